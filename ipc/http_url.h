/* ipc/http_url.h — an http:// or https:// address of the configuration, taken apart for ipc/http_client.h.
 *
 * Shape      a plain struct.
 * Truth      the text.
 * Writers    kvp_http_url_parse.
 * Readers    its caller.
 * Ordering   none.
 * Lifetime   the caller's.
 * Crash      process-local.
 * Proved by  tests/t_tokenizer.c, tests/s_recovery.t
 */
#ifndef KVP_IPC_HTTP_URL_H
#define KVP_IPC_HTTP_URL_H

#include <stdint.h>

struct kvp_http_url {
	char host[256];	     /* name, IP literal without brackets, or unix:/path */
	char authority[300]; /* of the Host header */
	char base[1024];     /* path before the endpoint's, no slash behind; may be empty */
	uint16_t port;
	uint16_t is_https;
};
/* kvp_http_url_parse: NULL, or what is wrong. Query and fragment of the address are left out, and one slash
 * at the end of its path. Addresses of https are refused; kvp_http_url_parse_any takes them, too. */
const char *kvp_http_url_parse(struct kvp_http_url *u, const char *text);
const char *kvp_http_url_parse_any(struct kvp_http_url *u, const char *text);
#endif
