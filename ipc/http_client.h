/* ipc/http_client.h - HTTP/1.1 client on the loop: requests made from their parts and sent whole, streamed
 * responses. What happens on connections is ipc/leg.h's.
 *
 * Shape      one client holds idle connections by address and port; a call owns one connection while it runs.
 * Truth      the client's thread only.
 * Writers    loop thread: every function here is called on it, also from inside callbacks.
 * Readers    the same.
 * Ordering   on_head once, on_body any number of times, on_done exactly once - unless the call is cancelled,
 *            then nothing more. None of them runs inside kvp_http_call.
 * Retry      as ipc/leg.h, KVP_LEG_AGAIN.
 * TLS        as the call says; idle connections are reused for calls with the same kvp_tls_client only. A
 *            handshake that fails is a connection that can't be made (errno EPROTO, and kvp_http_client_why).
 *            A response without a length must end with the peer's word that it is done.
 * Strict     what ipc/leg.h calls broken: KVP_ERR_PROTO.
 * Lifetime   open to close; close cancels all calls.
 * Crash      process-local.
 * Proved by  tests/t_http_client.c.
 */
#ifndef KVP_IPC_HTTP_CLIENT_H
#define KVP_IPC_HTTP_CLIENT_H

#include <stdint.h>
#include "ipc/leg.h"

struct kvp_http_client;
struct kvp_http_call; /* alive until on_done returns or the cancel */

struct kvp_http_client_cfg {	 /* zero the struct; 0 takes the default in brackets */
	uint32_t conn_max;	 /* [1024] connections, running and idle */
	uint32_t idle_max;	 /* [64] idle connections kept in all */
	uint32_t idle_ms;	 /* [30000] an idle connection is closed after that */
	uint32_t head_max_bytes; /* [65536] status line and header block of a response */
};

struct kvp_http_call_cfg { /* zero the struct; strings are copied */
	const char *host;  /* IP literal, or "unix:/path" (port ignored) */
	uint16_t port;
	struct kvp_tls_client *tls; /* NULL = plain text; outlives the client */
	const char *method;    /* NULL = GET */
	const char *path;      /* target as sent, starts with '/' */
	const char *authority; /* Host header; NULL = host:port, "localhost" for unix */
	const char *headers;   /* further lines, each ending in CRLF; NULL = none */
	const void *body;      /* copied; Content-Length is sent when len > 0 or method is POST, PUT, PATCH */
	uint64_t len;
	uint64_t timeout_ns;	 /* for the whole call; 0 = none */
	uint64_t body_max_bytes; /* of the response; 0 = no cap. Over it: KVP_ERR_LIMIT */
	/* on_head: final status (1xx are skipped). on_body: bytes valid during the call. Both may be NULL.
	 * on_done: err KVP_OK = complete response; KVP_ERR_TIMEOUT; KVP_ERR_LIMIT (head or body too large);
	 * KVP_ERR_PROTO (not HTTP); KVP_ERR_CLOSED (died or ended early); KVP_ERR_SYS (no connection, errno
	 * set). status is 0 if no head came. */
	void (*on_head)(void *ctx, struct kvp_http_call *c, int status);
	void (*on_body)(void *ctx, struct kvp_http_call *c, const char *data, uint64_t len);
	void (*on_done)(void *ctx, struct kvp_http_call *c, int status, int err);
	void *ctx;
};

int kvp_http_client_open(
	struct kvp_loop *l, const struct kvp_http_client_cfg *cfg, struct kvp_http_client **out);
void kvp_http_client_close(struct kvp_http_client *c); /* NULL is fine; not from a callback of the client */
/* kvp_http_client_why: why the last failed TLS handshake failed; "" = none has. */
const char *kvp_http_client_why(const struct kvp_http_client *c);
const struct kvp_leg_stat *kvp_http_client_stat(const struct kvp_http_client *c);

/* kvp_http_call starts a call. *out may be NULL. KVP_ERR_INVAL (host, control bytes in method, path, headers,
 * no on_done), KVP_ERR_FULL (conn_max), KVP_ERR_SYS (memory). */
int kvp_http_call(struct kvp_http_client *c, const struct kvp_http_call_cfg *cfg, struct kvp_http_call **out);
/* kvp_http_call_cancel closes the call's connection; no callback comes any more and the call is dead. */
void kvp_http_call_cancel(struct kvp_http_call *call);
/* kvp_http_call_header: from on_head until on_done; as kvp_http_req_header. */
const char *kvp_http_call_header(const struct kvp_http_call *call, const char *name, uint32_t *len);
/* pause stops reading (at most 2 * KVP_LOOP_RECV_BYTES more bytes still come); resume goes on. */
void kvp_http_call_pause(struct kvp_http_call *call);
void kvp_http_call_resume(struct kvp_http_call *call);
#endif
