#include <errno.h>
#include <http_parser.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <kvpick/err.h>
#include "ipc/http_client.h"
#include "ipc/http_parse.h"

#define UNSOLICITED_MAX_BYTES 65536 /* requests up to this are in the kernel before their answer can come */

enum cl_state { CL_CONNECTING, CL_RUNNING, CL_IDLE };

struct cl_conn {
	struct kvp_http_client *cl;
	struct cl_conn *next, **prev; /* all, or idle ones (newest first) */
	struct kvp_http_call *call;
	struct kvp_addr addr;
	struct kvp_sock sock;
	struct kvp_tls_client *tls_of; /* NULL = plain text */
	struct kvp_tls_conn *tls;      /* once it is connected */
	struct kvp_timer idle;
	struct kvp_http_head head;
	struct kvp_http_chunk chunk;
	enum kvp_http_framing framing;
	uint64_t left, tx_mark;
	uint8_t state, reused, sending;
	uint8_t got;	   /* a byte of the response came */
	uint8_t head_done; /* its final head is complete */
	uint8_t in_recv;   /* frames of ours on the stack: closing leaves the memory to the outermost */
	uint8_t tls_up;	   /* its handshake is done */
	uint8_t closed;
};

struct kvp_http_call {
	struct kvp_http_client *cl;
	struct kvp_http_call *next, **prev;
	struct cl_conn *conn;
	struct kvp_http_call_cfg cfg; /* strings are not kept */
	struct kvp_timer deadline;
	struct kvp_addr addr;
	struct kvp_http_buf req;
	uint64_t body_bytes;
	int status;
	uint8_t is_head, retried, paused, done;
};

struct kvp_http_client {
	struct kvp_loop *loop;
	struct kvp_http_client_cfg cfg;
	struct kvp_http_client_stat stat;
	struct cl_conn *busy, *idle;
	struct kvp_http_call *call;
	char why[200];
};

static void conn_unlink(struct cl_conn *c)
{
	*c->prev = c->next;
	if (c->next)
		c->next->prev = c->prev;
}

static void conn_link(struct cl_conn *c, struct cl_conn **list)
{
	c->next = *list;
	c->prev = list;
	if (c->next)
		c->next->prev = &c->next;
	*list = c;
}

static void conn_release(struct cl_conn *c)
{
	kvp_tls_conn_free(c->tls);
	kvp_http_head_free(&c->head);
	free(c);
}

static void conn_close(struct cl_conn *c)
{
	struct kvp_http_client *cl = c->cl;
	conn_unlink(c);
	cl->stat.open--;
	cl->stat.idle -= c->state == CL_IDLE;
	kvp_timer_cancel(cl->loop, &c->idle);
	kvp_sock_close(&c->sock);
	if (c->call)
		c->call->conn = NULL;
	c->call = NULL;
	c->closed = 1;
	if (!c->in_recv)
		conn_release(c);
}

static void call_free(struct kvp_http_call *k)
{
	*k->prev = k->next;
	if (k->next)
		k->next->prev = k->prev;
	kvp_timer_cancel(k->cl->loop, &k->deadline);
	kvp_http_buf_free(&k->req);
	free(k);
}

/* The end of a call; its connection has been closed or put back before. */
static void call_done(struct kvp_http_call *k, int err)
{
	if (k->conn)
		conn_close(k->conn);
	kvp_timer_cancel(k->cl->loop, &k->deadline);
	k->done = 1;
	k->cfg.on_done(k->cfg.ctx, k, k->status, err);
	call_free(k);
}

static void on_deadline(void *ctx, struct kvp_timer *t)
{
	(void)t;
	call_done(ctx, KVP_ERR_TIMEOUT);
}

static void on_idle_end(void *ctx, struct kvp_timer *t)
{
	(void)t;
	conn_close(ctx);
}

/* tls_flush sends what TLS has to say, as soon as nothing else is being sent. */
static int tls_flush(struct cl_conn *c)
{
	char *buf = NULL;
	size_t len = 0;
	if (c->sending)
		return KVP_OK;
	int rc = kvp_tls_conn_out(c->tls, &buf, &len);
	if (rc || !len)
		return rc;
	c->sending = 1;
	return kvp_sock_send(&c->sock, buf, 0, len);
}

/* The request is kept until an answer begins, for the one retry; what is sent is a copy where that can
 * happen. */
static int request_send(struct cl_conn *c)
{
	struct kvp_http_call *k = c->call;
	char *buf = k->req.p;
	if (c->tls) {
		c->tx_mark = c->sock.tx_bytes;
		return kvp_tls_conn_write(c->tls, k->req.p, k->req.len) ? KVP_ERR_SYS : tls_flush(c);
	}
	if (c->reused) {
		buf = malloc(k->req.len);
		if (!buf)
			return KVP_ERR_SYS;
		memcpy(buf, k->req.p, k->req.len);
	} else {
		k->req.p = NULL;
	}
	c->sending = 1;
	c->tx_mark = c->sock.tx_bytes;
	return kvp_sock_send(&c->sock, buf, 0, k->req.len);
}

static const struct kvp_sock_ops conn_ops;

static int conn_new(struct kvp_http_client *cl, struct kvp_http_call *k)
{
	struct cl_conn *c = calloc(1, sizeof(*c));
	if (!c)
		return KVP_ERR_SYS;
	c->cl = cl;
	c->addr = k->addr;
	c->tls_of = k->cfg.tls;
	c->head.line_max = c->head.header_max = cl->cfg.head_max_bytes;
	if (kvp_sock_connect(cl->loop, &c->sock, &c->addr, &conn_ops, c)) {
		int err = errno;
		free(c);
		errno = err;
		return KVP_ERR_SYS;
	}
	c->state = CL_CONNECTING;
	c->call = k;
	k->conn = c;
	conn_link(c, &cl->busy);
	cl->stat.connects++;
	cl->stat.open++;
	return KVP_OK;
}

static void tls_begin(struct cl_conn *c)
{
	c->tls = kvp_tls_conn_new(c->tls_of);
	if (!c->tls || kvp_tls_conn_handshake(c->tls) != KVP_ERR_AGAIN || tls_flush(c)) {
		errno = c->tls ? EPROTO : ENOMEM;
		call_done(c->call, KVP_ERR_SYS);
		return;
	}
	kvp_sock_recv_start(&c->sock);
}

static void on_connect(void *ctx, struct kvp_sock *s, int err)
{
	struct cl_conn *c = ctx;
	(void)s;
	if (err) {
		struct kvp_http_call *k = c->call;
		conn_close(c);
		errno = -err;
		call_done(k, KVP_ERR_SYS);
		return;
	}
	if (c->tls_of) {
		tls_begin(c);
		return;
	}
	c->state = CL_RUNNING;
	if (request_send(c)) {
		call_done(c->call, KVP_ERR_SYS);
		return;
	}
	if (!c->call->paused)
		kvp_sock_recv_start(&c->sock);
}

static void on_sent(void *ctx, struct kvp_sock *s, char *buf, int err)
{
	struct cl_conn *c = ctx;
	(void)s;
	(void)err; /* what the server said before it stopped reading still comes; the end of stream decides */
	free(buf);
	c->sending = 0;
	if (c->tls && !err && tls_flush(c))
		kvp_sock_shutdown(&c->sock); /* no memory: the peer ends it */
}

/* The connection ended under its call. */
static void conn_died(struct cl_conn *c)
{
	struct kvp_http_call *k = c->call;
	int again = c->reused && !c->got && !k->retried;
	conn_close(c);
	if (!again) {
		call_done(k, KVP_ERR_CLOSED);
		return;
	}
	k->retried = 1;
	k->cl->stat.retried++;
	if (conn_new(k->cl, k))
		call_done(k, KVP_ERR_SYS);
}

/* A complete response: the connection goes back if it is clean. */
static void conn_finish(struct cl_conn *c, uint64_t rest)
{
	struct kvp_http_client *cl = c->cl;
	struct kvp_http_call *k = c->call;
	if (!c->head.keep_alive || rest || c->sending ||
		kvp_timer_set(cl->loop, &c->idle,
			kvp_loop_now_ns(cl->loop) + cl->cfg.idle_ms * UINT64_C(1000000), on_idle_end, c)) {
		call_done(k, KVP_OK);
		return;
	}
	conn_unlink(c);
	conn_link(c, &cl->idle);
	c->state = CL_IDLE;
	cl->stat.idle++;
	if (k->paused)
		kvp_sock_recv_start(&c->sock); /* an idle connection is watched for its end */
	if (cl->stat.idle > cl->cfg.idle_max) {
		struct cl_conn *oldest = c;
		while (oldest->next)
			oldest = oldest->next;
		conn_close(oldest);
	}
	k->conn = NULL;
	c->call = NULL;
	call_done(k, KVP_OK);
}

static int head_in(struct cl_conn *c)
{
	struct kvp_http_call *k = c->call;
	int rc = kvp_http_head_parse(&c->head, KVP_HTTP_KIND_RESPONSE);
	if (rc)
		return rc == KVP_ERR_SYS ? KVP_ERR_SYS : rc == KVP_ERR_LIMIT ? KVP_ERR_LIMIT : KVP_ERR_PROTO;
	int status = c->head.status;
	if (c->head.version >> 8 != 1 || status < 100 || status > 999 || status == 101)
		return KVP_ERR_PROTO;
	if (status < 200) {
		kvp_http_head_reset(&c->head);
		return KVP_ERR_AGAIN;
	}
	if (kvp_http_head_framing(&c->head, &c->framing, &c->left))
		return KVP_ERR_PROTO;
	c->head_done = 1;
	k->status = status;
	if (k->is_head || status == 204 || status == 304) {
		c->framing = KVP_HTTP_FRAME_LENGTH;
		c->left = 0;
	}
	if (c->framing == KVP_HTTP_FRAME_LENGTH && k->cfg.body_max_bytes && c->left > k->cfg.body_max_bytes)
		return KVP_ERR_LIMIT;
	if (k->cfg.on_head)
		k->cfg.on_head(k->cfg.ctx, k, status);
	return KVP_OK;
}

static int body_in(struct cl_conn *c, const char *data, uint64_t len)
{
	struct kvp_http_call *k = c->call;
	if (!len)
		return KVP_OK;
	if (k->cfg.body_max_bytes && len > k->cfg.body_max_bytes - k->body_bytes)
		return KVP_ERR_LIMIT;
	k->body_bytes += len;
	if (k->cfg.on_body)
		k->cfg.on_body(k->cfg.ctx, k, data, len);
	return KVP_OK;
}

/* Takes bytes of a response. KVP_OK: complete, *used says where; KVP_ERR_AGAIN: more, or the call was
 * cancelled by its callbacks (c->call is NULL then). */
static int response_in(struct cl_conn *c, const char *data, uint64_t len, uint64_t *used)
{
	uint64_t at = 0, n;
	int rc;
	while (!c->head_done) {
		rc = kvp_http_head_feed(&c->head, data + at, len - at, &n);
		at += n;
		if (rc)
			return rc;
		rc = head_in(c);
		if (!c->call)
			return KVP_ERR_AGAIN;
		if (rc && rc != KVP_ERR_AGAIN)
			return rc;
	}
	*used = at;
	if (c->framing == KVP_HTTP_FRAME_NONE)
		return body_in(c, data + at, len - at) ? KVP_ERR_LIMIT : KVP_ERR_AGAIN;
	if (c->framing == KVP_HTTP_FRAME_LENGTH) {
		n = len - at < c->left ? len - at : c->left;
		c->left -= n;
		*used = at + n;
		uint64_t left = c->left;
		if (body_in(c, data + at, n))
			return KVP_ERR_LIMIT;
		return !c->call || left ? KVP_ERR_AGAIN : KVP_OK;
	}
	for (rc = KVP_ERR_AGAIN; rc == KVP_ERR_AGAIN && at < len;) {
		const char *out;
		uint64_t out_len;
		rc = kvp_http_chunk_feed(&c->chunk, data + at, len - at, &n, &out, &out_len);
		at += n;
		*used = at;
		if (body_in(c, out, out_len))
			return KVP_ERR_LIMIT;
		if (!c->call)
			return KVP_ERR_AGAIN;
	}
	return rc;
}

static void on_recv_idle(struct cl_conn *c)
{
	c->cl->stat.stale++;
	conn_close(c);
}

/* leave ends a frame that works on c. */
static void leave(struct cl_conn *c)
{
	if (--c->in_recv == 0 && c->closed)
		conn_release(c);
}

static void plain_in(struct cl_conn *c, const char *data, int64_t len)
{
	if (c->state == CL_IDLE) {
		on_recv_idle(c); /* its end, or bytes that nobody asked for */
		return;
	}
	if (len <= 0) {
		if (len == 0 && c->head_done && c->framing == KVP_HTTP_FRAME_NONE)
			call_done(c->call, KVP_OK);
		else
			conn_died(c);
		return;
	}
	if (c->reused && !c->got && c->sock.tx_bytes == c->tx_mark &&
		c->call->req.len <= UNSOLICITED_MAX_BYTES) {
		conn_died(c); /* said before it was asked: no answer to this request */
		return;
	}
	c->got = 1;
	uint64_t used = 0;
	c->in_recv++;
	int rc = response_in(c, data, (uint64_t)len, &used);
	if (c->call) {
		if (rc == KVP_OK)
			conn_finish(c, (uint64_t)len - used);
		else if (rc != KVP_ERR_AGAIN)
			call_done(c->call, rc);
	}
	leave(c);
}

/* tls_end: the connection has ended, or what comes is no TLS. */
static void tls_end(struct cl_conn *c)
{
	if (c->state == CL_CONNECTING) {
		snprintf(c->cl->why, sizeof(c->cl->why), "%s",
			kvp_tls_conn_why(c->tls)[0] ? kvp_tls_conn_why(c->tls) : "broken off");
		errno = EPROTO;
		call_done(c->call, KVP_ERR_SYS);
	} else {
		plain_in(c, NULL, -EPROTO); /* also in place of an end that the peer did not announce */
	}
}

/* tls_handshake goes on with it: 1 when it is done and the request is on its way. */
static int tls_handshake(struct cl_conn *c)
{
	int rc = kvp_tls_conn_handshake(c->tls);
	if (rc && rc != KVP_ERR_AGAIN) {
		(void)tls_flush(c); /* its alert, if it can be sent */
		tls_end(c);
		return 0;
	}
	c->tls_up = rc == KVP_OK;
	c->state = c->tls_up ? CL_RUNNING : CL_CONNECTING;
	if (c->tls_up ? request_send(c) : tls_flush(c)) {
		errno = ENOMEM;
		call_done(c->call, KVP_ERR_SYS);
		return 0;
	}
	if (c->tls_up && c->call->paused)
		kvp_sock_recv_stop(&c->sock);
	return c->tls_up;
}

static void tls_in(struct cl_conn *c, const char *data, int64_t len)
{
	char text[16384];
	size_t n = 0;
	if (len <= 0 || kvp_tls_conn_in(c->tls, data, (size_t)len)) {
		tls_end(c);
		return;
	}
	if (!c->tls_up && !tls_handshake(c))
		return;
	int rc = KVP_OK;
	while (!rc && !c->closed) {
		rc = kvp_tls_conn_read(c->tls, text, sizeof(text), &n);
		if (rc == KVP_OK)
			plain_in(c, text, (int64_t)n);
		else if (rc == KVP_ERR_CLOSED)
			plain_in(c, NULL, 0);
		else if (rc != KVP_ERR_AGAIN)
			tls_end(c);
	}
	if (!c->closed)
		(void)tls_flush(c);
}

static void on_recv(void *ctx, struct kvp_sock *s, const char *data, int64_t len)
{
	struct cl_conn *c = ctx;
	(void)s;
	c->in_recv++;
	if (c->tls)
		tls_in(c, data, len);
	else
		plain_in(c, data, len);
	leave(c);
}

static const struct kvp_sock_ops conn_ops = {
	.on_recv = on_recv, .on_sent = on_sent, .on_connect = on_connect};

/* A connection that its server closed, or that has something to say unasked, shows it to a look that takes
 * nothing. */
static int is_stale(const struct cl_conn *c)
{
	char b;
	ssize_t n = recv(c->sock.fd, &b, 1, MSG_PEEK | MSG_DONTWAIT);
	return !(n < 0 && (errno == EAGAIN || errno == EINTR));
}

static int idle_take(struct kvp_http_client *cl, struct kvp_http_call *k)
{
	for (struct cl_conn *c = cl->idle, *next; c; c = next) {
		next = c->next;
		if (c->tls_of != k->cfg.tls || c->addr.len != k->addr.len ||
			memcmp(&c->addr.ss, &k->addr.ss, c->addr.len) != 0)
			continue;
		if (is_stale(c)) {
			on_recv_idle(c);
			continue;
		}
		conn_unlink(c);
		conn_link(c, &cl->busy);
		cl->stat.idle--;
		cl->stat.reused++;
		kvp_timer_cancel(cl->loop, &c->idle);
		c->state = CL_RUNNING;
		c->reused = 1;
		c->got = c->head_done = 0;
		c->chunk = (struct kvp_http_chunk){0};
		kvp_http_head_reset(&c->head);
		c->call = k;
		k->conn = c;
		return request_send(c);
	}
	return KVP_ERR_NOTFOUND;
}

static int text_ok(const char *t, int least)
{
	for (; t && *t; t++)
		if ((unsigned char)*t < least || (unsigned char)*t == 127)
			return 0;
	return 1;
}

/* Whole lines, each ending in CRLF, none empty. */
static int lines_ok(const char *t)
{
	while (t && *t) {
		const char *end = strstr(t, "\r\n");
		if (!end || end == t || *t == ' ' || *t == '\t')
			return 0;
		for (; t < end; t++)
			if (((unsigned char)*t < 32 && *t != '\t') || (unsigned char)*t == 127)
				return 0;
		t = end + 2;
	}
	return 1;
}

static int put_text(struct kvp_http_buf *b, const char *t)
{
	return kvp_http_buf_put(b, t, strlen(t));
}

static int request_build(struct kvp_http_call *k, const struct kvp_http_call_cfg *cfg, const char *method)
{
	struct kvp_http_buf *b = &k->req;
	char num[64];
	int rc = put_text(b, method);
	rc |= put_text(b, " ");
	rc |= put_text(b, cfg->path);
	rc |= put_text(b, " HTTP/1.1\r\nHost: ");
	if (cfg->authority) {
		rc |= put_text(b, cfg->authority);
	} else if (k->addr.ss.ss_family == AF_UNIX) {
		rc |= put_text(b, "localhost");
	} else {
		int bare6 = k->addr.ss.ss_family == AF_INET6 && cfg->host[0] != '[';
		snprintf(num, sizeof(num), "%s:%u", bare6 ? "]" : "", (unsigned)cfg->port);
		rc |= put_text(b, bare6 ? "[" : "");
		rc |= put_text(b, cfg->host);
		rc |= put_text(b, num);
	}
	rc |= put_text(b, "\r\n");
	rc |= put_text(b, cfg->headers ? cfg->headers : "");
	if (cfg->len || !strcmp(method, "POST") || !strcmp(method, "PUT") || !strcmp(method, "PATCH")) {
		snprintf(num, sizeof(num), "Content-Length: %llu\r\n", (unsigned long long)cfg->len);
		rc |= put_text(b, num);
	}
	rc |= put_text(b, "\r\n");
	rc |= kvp_http_buf_put(b, cfg->body, cfg->len);
	return rc ? KVP_ERR_SYS : KVP_OK;
}

static int address(const struct kvp_http_call_cfg *cfg, struct kvp_addr *a)
{
	if (!cfg->host || !*cfg->host)
		return KVP_ERR_INVAL;
	if (strncmp(cfg->host, "unix:", 5) == 0)
		return kvp_addr_unix(a, cfg->host + 5);
	return kvp_addr_ip(a, cfg->host, cfg->port);
}

static int call_start(struct kvp_http_client *cl, struct kvp_http_call *k)
{
	int rc = idle_take(cl, k);
	if (rc != KVP_ERR_NOTFOUND)
		return rc;
	if (cl->stat.open >= cl->cfg.conn_max && cl->idle)
		conn_close(cl->idle);
	return cl->stat.open >= cl->cfg.conn_max ? KVP_ERR_FULL : conn_new(cl, k);
}

int kvp_http_call(struct kvp_http_client *cl, const struct kvp_http_call_cfg *cfg, struct kvp_http_call **out)
{
	const char *method = cfg->method ? cfg->method : "GET";
	struct kvp_addr a;
	if (address(cfg, &a) || !cfg->on_done || !cfg->path || !*cfg->path || !*method ||
		!text_ok(method, 33) || !text_ok(cfg->path, 33) || !text_ok(cfg->authority, 33) ||
		!lines_ok(cfg->headers))
		return KVP_ERR_INVAL;
	struct kvp_http_call *k = calloc(1, sizeof(*k));
	if (!k)
		return KVP_ERR_SYS;
	k->cl = cl;
	k->cfg = *cfg;
	k->addr = a;
	k->is_head = strcmp(method, "HEAD") == 0;
	k->next = cl->call;
	k->prev = &cl->call;
	if (k->next)
		k->next->prev = &k->next;
	cl->call = k;
	int rc = request_build(k, cfg, method);
	if (!rc && cfg->timeout_ns)
		rc = kvp_timer_set(
			cl->loop, &k->deadline, kvp_loop_now_ns(cl->loop) + cfg->timeout_ns, on_deadline, k);
	if (!rc)
		rc = call_start(cl, k);
	if (rc) {
		int err = errno;
		if (k->conn)
			conn_close(k->conn);
		call_free(k);
		errno = err;
		return rc;
	}
	cl->stat.calls++;
	if (out)
		*out = k;
	return KVP_OK;
}

void kvp_http_call_cancel(struct kvp_http_call *k)
{
	if (k->done)
		return; /* from inside on_done: the call ends anyway */
	if (k->conn)
		conn_close(k->conn);
	call_free(k);
}

const char *kvp_http_call_header(const struct kvp_http_call *k, const char *name, uint32_t *len)
{
	return k->conn ? kvp_http_head_find(&k->conn->head, name, len, NULL) : NULL;
}

void kvp_http_call_pause(struct kvp_http_call *k)
{
	k->paused = 1;
	if (k->conn && k->conn->state == CL_RUNNING)
		kvp_sock_recv_stop(&k->conn->sock);
}

void kvp_http_call_resume(struct kvp_http_call *k)
{
	k->paused = 0;
	if (k->conn && k->conn->state == CL_RUNNING)
		kvp_sock_recv_start(&k->conn->sock);
}

#define OR(v, d) ((v) ? (v) : (d))
int kvp_http_client_open(
	struct kvp_loop *l, const struct kvp_http_client_cfg *cfg, struct kvp_http_client **out)
{
	struct kvp_http_client *cl = calloc(1, sizeof(*cl));
	if (!cl)
		return KVP_ERR_SYS;
	kvp_http_parse_init();
	cl->loop = l;
	cl->cfg.conn_max = OR(cfg ? cfg->conn_max : 0, 1024);
	cl->cfg.idle_max = OR(cfg ? cfg->idle_max : 0, 64);
	cl->cfg.idle_ms = OR(cfg ? cfg->idle_ms : 0, 30000);
	cl->cfg.head_max_bytes = OR(cfg ? cfg->head_max_bytes : 0, 65536);
	*out = cl;
	return KVP_OK;
}

void kvp_http_client_close(struct kvp_http_client *cl)
{
	if (!cl)
		return;
	while (cl->call)
		kvp_http_call_cancel(cl->call);
	while (cl->idle)
		conn_close(cl->idle);
	free(cl);
}

const char *kvp_http_client_why(const struct kvp_http_client *c)
{
	return c->why;
}

const struct kvp_http_client_stat *kvp_http_client_stat(const struct kvp_http_client *c)
{
	return &c->stat;
}
