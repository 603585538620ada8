/* ipc/http_server.h - HTTP/1.1 server on the loop: one request at a time a connection, ordered, bounded.
 *
 * Shape      a listener and its connections. A connection holds one request (struct kvp_http_req); pipelined
 *            bytes behind it wait until it is answered, so replies cannot change places and a later request
 *            never runs before an earlier one has ended.
 * Truth      the server's thread only.
 * Writers    loop thread: every function here is called on it, also from inside callbacks.
 * Readers    the same.
 * Ordering   on_request once a complete request; then exactly one of: a reply (kvp_http_reply, or begin ..
 *            end), kvp_http_reply_abort, or on_abort. After any of them the request pointer is dead.
 * Limits     request line 414, header block 431, body 413 (answered early, then the rest of the upload is
 *            read and thrown away for linger_ms so that the client can read the answer), incomplete within
 *            read_timeout 408, broken framing or bytes 400, other Expect 417, other transfer coding 501,
 *            other version 505, connections 503. Each closes the connection and is counted.
 * Pipelined  bytes behind a running request are kept up to body_max_bytes; over that the rest is thrown away
 *            and the connection closes behind the reply.
 * Budget     bodies and pipelined bytes of all connections together are bounded (held): over it a request
 *            that is being read is answered 503, and bytes behind a running one are thrown away as above.
 * Abort      a reset, or a client that closed fully, calls on_abort at once also while the reply is pending.
 *            A client that only ended its sending side (FIN) still gets its reply: to tell the two apart the
 *            first bytes of the coming status line are sent when the FIN arrives; a fully closed peer answers
 *            them with a reset.
 *            A client whose host vanished does as much as one that reset, once the kernel knows
 *            (ipc/loop.h).
 * Delivery   a reply that matters can be tagged (kvp_http_reply_tag): on_undelivered hears of it if the
 *            connection ends before all its bytes were handed to the kernel, or is reset before the client's
 *            kernel has acknowledged them. A client that resets later may or may not have read it.
 * Lifetime   open to close. kvp_http_server_close drops all connections (on_abort for running requests).
 * Crash      process-local.
 * Proved by  tests/t_http.c, tests/t_http_tags.c, tests/s_http.t, tests/fuzz/f_http.c.
 */
#ifndef KVP_IPC_HTTP_SERVER_H
#define KVP_IPC_HTTP_SERVER_H

#include <stddef.h>
#include <stdint.h>
#include "ipc/held.h"
#include "ipc/loop.h"

struct kvp_http_server;
enum kvp_http_method {
	KVP_HTTP_GET, /* HEAD arrives as GET with is_head set; the server leaves the body out */
	KVP_HTTP_POST,
	KVP_HTTP_PUT,
	KVP_HTTP_PATCH,
	KVP_HTTP_DELETE,
	KVP_HTTP_OPTIONS,
	KVP_HTTP_OTHER
};
#define KVP_HTTP_BODY_SLACK 64 /* readable zero bytes behind every request body */

struct kvp_http_req {
	enum kvp_http_method method;
	uint8_t is_head;
	uint8_t minor;	   /* 1 or 0: HTTP/1.minor */
	const char *path;  /* raw (percent-encoded), starts with '/' (or is "*"); not terminated */
	uint32_t path_len; /* scheme and authority of an absolute-form target are left out */
	const char *query; /* behind '?', raw; NULL if there is no '?' */
	uint32_t query_len;
	const char *content_type; /* value of the header; NULL if absent */
	uint32_t content_type_len;
	const char *body; /* contiguous, KVP_HTTP_BODY_SLACK readable bytes behind it; never NULL */
	uint64_t body_len;
	uint64_t start_ns; /* loop time at which the first byte was seen */
	void *user;	   /* the handler's own; NULL at first */
};

struct kvp_http_server_stat {	    /* since open */
	uint64_t accepted, refused; /* connections; refused = over max_connections, answered 503 and closed */
	uint64_t requests;	    /* given to on_request */
	uint64_t bad;		    /* answered 4xx/5xx by the server itself, without time-outs and limits */
	uint64_t over_limit;	    /* 413, 414, 431 */
	uint64_t timeouts;	    /* 408 */
	uint64_t idle_closed;	    /* idle connections closed by time */
	uint64_t stalled;	    /* clients that read no reply for read_timeout: closed */
	uint64_t aborted;	    /* on_abort calls */
	uint64_t rx_bytes, tx_bytes;
	uint64_t open;	  /* gauge: connections now */
	uint64_t overrun; /* more than body_max_bytes pipelined behind a running request: closed after it */
	uint64_t held_refused; /* requests and pipelined bytes over the budget */
};

struct kvp_http_refusal {
	int status; /* 0: none */
	const char *text;
	const char *extra; /* further header lines, each ending in CRLF, or NULL */
};

#define KVP_HTTP_HELD_BYTES (64u << 20) /* budget of a server that is given none */

struct kvp_http_server_cfg {	    /* zero the struct; 0 takes the default in brackets */
	const char *ip;		    /* literal; NULL = any IPv4 */
	uint16_t port;		    /* 0 = any, see kvp_http_server_port */
	int listen_fd;		    /* > 0: take over this listening descriptor instead of ip and port */
	int listen_flags;	    /* enum kvp_listen_flags */
	uint32_t max_connections;   /* [4096] */
	uint32_t header_max_bytes;  /* [65536] header fields with their CRLFs and the empty line */
	uint32_t line_max_bytes;    /* [16384] request line without CRLF */
	uint64_t body_max_bytes;    /* [8388608] */
	uint32_t read_timeout_ms;   /* [30000] first byte to complete request; longest stall of a reply */
	uint32_t idle_timeout_ms;   /* [75000] */
	uint32_t linger_ms;	    /* [5000] */
	struct kvp_held *held;	    /* budget of bodies and pipelined bytes; NULL: KVP_HTTP_HELD_BYTES */
	uint32_t stream_high_bytes; /* [262144] unsent bytes of a streamed reply at which chunk says AGAIN */
	void (*on_request)(void *ctx, struct kvp_http_req *r);
	void (*on_abort)(void *ctx, struct kvp_http_req *r); /* may be NULL */
	/* A tagged reply that the client has not got; may be NULL. Not to call the server from. */
	void (*on_undelivered)(void *ctx, uint64_t tag);
	/* Asked once the header block of a request is here and its body is not, or is over the limit (then
	 * status is 413): may set or replace what refuses the request, by an error that comes before the
	 * body in the order of checks. Method, path and header fields of r are set, the body is not. May be
	 * NULL. */
	void (*on_early)(void *ctx, const struct kvp_http_req *r, struct kvp_http_refusal *why);
	/* Body of the server's own errors, at most cap bytes to buf, its length returned; NULL:
	 * {"error":"text"}. Content type is application/json. */
	size_t (*error_body)(void *ctx, int status, const char *text, char *buf, size_t cap);
	void *ctx;
};

/* kvp_http_server_open binds and listens. KVP_ERR_INVAL (address, no on_request), KVP_ERR_SYS (errno). */
int kvp_http_server_open(
	struct kvp_loop *l, const struct kvp_http_server_cfg *cfg, struct kvp_http_server **out);
uint16_t kvp_http_server_port(const struct kvp_http_server *s);
const struct kvp_http_server_stat *kvp_http_server_stat(const struct kvp_http_server *s);
/* kvp_http_server_drain stops accepting (what waits in the backlog is still served), closes idle connections
 * at once, lets running requests and uploads finish (their connections close behind the reply) and then calls
 * on_drained once (never from inside this call). The server must still be closed; closing ends the drain. */
void kvp_http_server_drain(struct kvp_http_server *s, void (*on_drained)(void *ctx), void *ctx);
void kvp_http_server_close(struct kvp_http_server *s); /* NULL is fine; not from a callback of the server */

/* kvp_http_req_header: value of the first field called name (lower case, any case in the request); length to
 * *len; NULL if absent. Valid while the request lives. Not terminated. */
const char *kvp_http_req_header(const struct kvp_http_req *r, const char *name, uint32_t *len);

/* kvp_http_req_forget_body gives the memory of the body back while the request waits for its answer. */
void kvp_http_req_forget_body(struct kvp_http_req *r);

/* Whole reply: copies everything. extra: further header lines, each ending in CRLF, or NULL. content_type
 * NULL: none. May be called from on_request or any time later. */
void kvp_http_reply(
	struct kvp_http_req *r, int status, const char *content_type, const void *body, uint64_t len);
void kvp_http_reply_extra(struct kvp_http_req *r, int status, const char *content_type, const char *extra,
	const void *body, uint64_t len);
/* kvp_http_reply_tag, called before the reply, tags it with any number but 0. Without memory for it the tag
 * is lost. */
void kvp_http_reply_tag(struct kvp_http_req *r, uint64_t tag);
/* Streamed reply: chunked, or until close for HTTP/1.0. chunk always takes the bytes; KVP_ERR_AGAIN asks the
 * caller to stop until on_drain(ctx, r) (called once a request for it; NULL if the caller never waits). end
 * finishes; the request is dead after it. */
void kvp_http_reply_begin(struct kvp_http_req *r, int status, const char *content_type, const char *extra,
	void (*on_drain)(void *ctx, struct kvp_http_req *r));
int kvp_http_reply_chunk(struct kvp_http_req *r, const void *data, uint64_t len);
void kvp_http_reply_end(struct kvp_http_req *r);
/* kvp_http_reply_abort closes the connection without (the rest of) a reply, so that the client sees the
 * failure. */
void kvp_http_reply_abort(struct kvp_http_req *r);
#endif
