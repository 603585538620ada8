/* ipc/http_query.h — parameters of a request's query string.
 *
 * Shape      functions of the request only; nothing is kept.
 * Truth      the request.
 * Writers    none.
 * Readers    the thread of the request's server.
 * Ordering   none.
 * Lifetime   the call's.
 * Crash      process-local.
 * Proved by  tests/s_http.t, tests/s_dump.t
 */
#ifndef KVP_IPC_HTTP_QUERY_H
#define KVP_IPC_HTTP_QUERY_H

#include "ipc/http_server.h"

/* kvp_query_get decodes a query parameter into buf: 1 found, 0 absent, -1 malformed, repeated or too long. */
int kvp_query_get(const struct kvp_http_req *r, const char *name, char *buf, size_t cap, size_t *len);
/* kvp_percent_decode decodes n bytes; the length, or -1 when malformed or over cap. */
enum kvp_plus { KVP_PLUS_IS_PLUS, KVP_PLUS_IS_SPACE }; /* in paths, in query strings */
long kvp_percent_decode(const char *in, size_t n, enum kvp_plus plus, char *out, size_t cap);
#endif
