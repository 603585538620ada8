/* ipc/http_server_priv.h - what http_server.c (connections) and http_reply.c (replies) share.
 *
 * Shape      a connection is READ (collecting a request), BUSY (a handler has it), FLUSH (closes once
 *            everything is sent) or LINGER (FIN sent, what still comes is thrown away). Functions that
 *            handlers call never free a connection: they leave the rest to its deferred work at the end of
 *            the turn.
 * Truth      loop thread only. Crash: process-local.
 */
#ifndef KVP_IPC_HTTP_SERVER_PRIV_H
#define KVP_IPC_HTTP_SERVER_PRIV_H

#include "ipc/http_parse.h"

enum conn_state { CONN_READ, CONN_BUSY, CONN_FLUSH, CONN_LINGER };
enum conn_reply { REPLY_NONE, REPLY_CHUNKED, REPLY_TO_CLOSE };
#define DATE_BYTES 40

struct http_tag {
	uint64_t end, tag; /* the reply's last byte, counted from the connection's first */
};
struct http_tags {
	struct http_tag *at; /* in the order of end */
	uint32_t cnt, cap;
};

struct http_conn {
	struct kvp_http_in in;
	struct kvp_http_server *srv;
	struct http_conn *next, **prev;
	struct kvp_sock sock;
	struct kvp_timer timer;
	struct kvp_defer work;
	struct kvp_http_buf pend; /* received, not yet parsed */
	struct kvp_http_buf out;  /* to be sent */
	uint64_t pend_at;
	uint64_t held; /* of the budget */
	uint64_t fly_len, fly_cap; /* buffer in the loop's hands; 0 = none */
	uint64_t put_bytes;	   /* all that was ever put into out */
	uint64_t tag;		   /* of the running request's reply, 0 = none */
	struct http_tags tags;	   /* replies that may not have arrived yet */
	uint64_t tx_mark, send_ns; /* progress seen by the stall check */
	uint64_t start_ns, idle_ns, linger_ns;
	void (*on_drain)(void *ctx, struct kvp_http_req *r);
	uint32_t served;
	uint8_t state, reply;
	uint8_t eof;	     /* the client sends no more */
	uint8_t paused;	     /* receiving stopped: the client does not read its answers */
	uint8_t overrun;     /* pipelined too much: closes behind the running request */
	uint8_t prefix_sent; /* first bytes of the status line are out */
	uint8_t drain_asked; /* chunk said AGAIN */
	uint8_t asked;	     /* on_early was asked about this request */
	uint8_t dead;	     /* to be dropped by the deferred work */
	uint8_t keep;	     /* this reply keeps the connection */
};

struct kvp_http_server {
	struct kvp_loop *loop;
	struct kvp_http_server_cfg cfg;
	struct kvp_http_server_stat stat;
	struct kvp_listener listener;
	struct http_conn *conn;
	struct kvp_held *held, own; /* own: where the caller gave none */
	uint64_t read_ns, idle_ns, linger_ns;
	uint8_t draining;
	uint64_t drain_ns;
	void (*on_drained)(void *ctx);
	void *drained_ctx;
	struct kvp_defer drained;
	uint64_t date_s;
	char date[DATE_BYTES];
};

static inline struct http_conn *conn_of(const struct kvp_http_req *r)
{
	return (void *)((char *)(uintptr_t)r - offsetof(struct http_conn, in.req));
}
void kvp_http_conn_work_later(struct http_conn *c);
/* kvp_http_conn_hold counts what the connection keeps now, and more bytes; KVP_ERR_FULL as kvp_held_set. */
int kvp_http_conn_hold(struct http_conn *c, uint64_t more, enum kvp_held_how how);
/* status line and fields; body_len UINT64_MAX: chunked or to close as c->reply says. */
void kvp_http_put_head(
	struct http_conn *c, int status, const char *content_type, const char *extra, uint64_t body_len);
void kvp_http_put(struct http_conn *c, const void *data, uint64_t len);
/* http_tags.c: push when a tagged reply is complete, trim when bytes were sent, end when the connection goes.
 * waiting: 1 while a tagged reply is not acknowledged. */
void kvp_http_tags_push(struct http_conn *c);
void kvp_http_tags_trim(struct http_conn *c);
void kvp_http_tags_end(struct http_conn *c);
int kvp_http_tags_waiting(struct http_conn *c);
#define KVP_HTTP_PREFIX "HTTP/1.1 "
#endif
