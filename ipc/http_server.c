#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <kvpick/err.h>
#include "ipc/http_server_priv.h"

#define PEND_PAUSE_BYTES                                                                                     \
	65536 /* unparsed bytes of a client that does not read its answers: receiving stops */
#define ERROR_BODY_MAX 1024
#define DRAIN_GRACE_NS 1000000000u /* for a connection that has not sent its first request yet */

static void conn_work(void *ctx);

void kvp_http_conn_work_later(struct http_conn *c)
{
	kvp_loop_defer(c->srv->loop, &c->work, conn_work, c);
}

int kvp_http_conn_hold(struct http_conn *c, uint64_t more, enum kvp_held_how how)
{
	int rc = kvp_held_set(c->srv->held, &c->held, c->in.body.len + c->pend.len + more, how);
	c->srv->stat.held_refused += rc != KVP_OK;
	return rc;
}

static void drained_call(void *ctx)
{
	struct kvp_http_server *s = ctx;
	void (*cb)(void *ctx) = s->on_drained;
	s->on_drained = NULL;
	if (cb)
		cb(s->drained_ctx);
}

static void drain_check(struct kvp_http_server *s)
{
	if (s->draining && !s->conn && s->on_drained)
		kvp_loop_defer(s->loop, &s->drained, drained_call, s);
}

static void conn_free(struct http_conn *c)
{
	struct kvp_http_server *s = c->srv;
	kvp_http_tags_end(c);
	*c->prev = c->next;
	if (c->next)
		c->next->prev = c->prev;
	s->stat.open--;
	kvp_timer_cancel(s->loop, &c->timer);
	kvp_loop_defer_cancel(&c->work);
	kvp_sock_close(&c->sock);
	kvp_http_in_free(&c->in);
	kvp_http_buf_free(&c->pend);
	kvp_http_buf_free(&c->out);
	kvp_http_conn_hold(c, 0, KVP_HELD_TAKE);
	free(c);
	drain_check(s);
}

/* The client is gone, or the server throws it out. */
static void conn_lost(struct http_conn *c)
{
	struct kvp_http_server *s = c->srv;
	if (c->state == CONN_BUSY) {
		c->state = CONN_FLUSH;
		s->stat.aborted++;
		if (s->cfg.on_abort)
			s->cfg.on_abort(s->cfg.ctx, &c->in.req);
	}
	conn_free(c);
}

static uint64_t unsent(const struct http_conn *c)
{
	return c->out.len + c->fly_len;
}

static void error_put(struct http_conn *c, const struct kvp_http_refusal *why)
{
	struct kvp_http_server *s = c->srv;
	int status = why->status;
	char body[ERROR_BODY_MAX];
	size_t len;
	if (s->cfg.error_body)
		len = s->cfg.error_body(s->cfg.ctx, status, why->text, body, sizeof(body));
	else
		len = (size_t)snprintf(body, sizeof(body), "{\"error\":\"%s\"}", why->text);
	len = len < sizeof(body) ? len : sizeof(body);
	if (status == 408)
		s->stat.timeouts++;
	else if (status == 413 || status == 414 || status == 431)
		s->stat.over_limit++;
	else
		s->stat.bad++;
	c->keep = 0;
	kvp_http_put_head(c, status, "application/json", why->extra, len);
	if (!c->in.req.is_head)
		kvp_http_put(c, body, len);
	c->state = CONN_FLUSH;
	kvp_http_buf_free(&c->pend);
	kvp_http_buf_free(&c->in.body);
	kvp_http_conn_hold(c, 0, KVP_HELD_TAKE);
	c->pend_at = 0;
	kvp_http_conn_work_later(c);
}

static void dispatch(struct http_conn *c)
{
	struct kvp_http_server *s = c->srv;
	c->state = CONN_BUSY;
	c->in.req.start_ns = c->start_ns;
	s->stat.requests++;
	s->cfg.on_request(s->cfg.ctx, &c->in.req);
}

static const struct kvp_http_refusal no_room = {503, "too many bytes are held", "Retry-After: 1\r\n"};

/* Asks for what refuses a request before its body; 1 if something does, and it was answered. */
static int refused_early(struct http_conn *c, struct kvp_http_refusal why)
{
	if (c->srv->cfg.on_early)
		c->srv->cfg.on_early(c->srv->cfg.ctx, &c->in.req, &why);
	c->asked = 1;
	if (why.status)
		error_put(c, &why);
	return why.status != 0;
}

/* The request is not complete, and its header block is. */
static void await_body(struct http_conn *c)
{
	if (!c->asked && refused_early(c, (struct kvp_http_refusal){0, NULL, NULL}))
		return;
	if (!c->in.expect)
		return;
	if (!c->in.body.len)
		kvp_http_put(c, "HTTP/1.1 100 Continue\r\n\r\n", 25);
	c->in.expect = 0;
	kvp_http_conn_work_later(c);
}

static void failed(struct http_conn *c)
{
	struct kvp_http_refusal why = {c->in.status, c->in.text, NULL};
	if (why.status == 413)
		refused_early(c, why);
	else
		error_put(c, &why);
}

/* Parses and runs what is there; returns the bytes taken. Stops at a request that is not answered at once,
 * and while the client does not read its answers. */
static uint64_t advance(struct http_conn *c, const char *data, uint64_t len)
{
	uint64_t at = 0;
	while (at < len && c->state == CONN_READ && !c->dead && unsent(c) < c->srv->cfg.stream_high_bytes) {
		uint64_t used;
		if (!c->in.started)
			c->start_ns = kvp_loop_now_ns(c->srv->loop);
		int rc = kvp_http_in_feed(&c->in, data + at, len - at, &used);
		at += used;
		if (rc == KVP_ERR_PROTO)
			failed(c);
		else if (c->in.body.len && kvp_http_conn_hold(c, 0, KVP_HELD_ASK))
			error_put(c, &no_room);
		else if (rc == KVP_OK)
			dispatch(c);
		else if (c->in.phase == KVP_HTTP_IN_BODY)
			await_body(c);
	}
	return c->state >= CONN_FLUSH ? len : at;
}

static int pend_put(struct http_conn *c, const char *data, uint64_t len)
{
	if (c->overrun || c->state >= CONN_FLUSH)
		return KVP_OK;
	if (c->state == CONN_BUSY && c->pend.len - c->pend_at + len > c->srv->cfg.body_max_bytes) {
		c->srv->stat.overrun++;
		c->overrun = 1;
		return KVP_OK;
	}
	if (c->pend_at && c->pend_at >= c->pend.len - c->pend_at) { /* at most one move a byte */
		memmove(c->pend.p, c->pend.p + c->pend_at, c->pend.len - c->pend_at);
		c->pend.len -= c->pend_at;
		c->pend_at = 0;
	}
	if (kvp_http_conn_hold(c, len, KVP_HELD_ASK)) {
		c->overrun = c->state == CONN_BUSY;
		if (!c->overrun)
			error_put(c, &no_room);
		return KVP_OK;
	}
	return kvp_http_buf_put(&c->pend, data, len);
}

static void pend_run(struct http_conn *c)
{
	if (c->pend_at < c->pend.len && c->state == CONN_READ)
		c->pend_at += advance(c, c->pend.p + c->pend_at, c->pend.len - c->pend_at);
	if (c->state >= CONN_FLUSH || c->pend_at >= c->pend.len) {
		kvp_http_buf_trim(&c->pend);
		c->pend_at = 0;
		kvp_http_conn_hold(c, 0, KVP_HELD_TAKE);
	}
	/* Never behind a running request: its handler must hear of a client that goes away, and a FIN that
	 * the client's kernel could not send for want of window is heard by reading only. */
	int pause = c->state == CONN_READ && unsent(c) >= c->srv->cfg.stream_high_bytes &&
		    c->pend.len - c->pend_at > PEND_PAUSE_BYTES;
	if (pause == c->paused || c->eof || c->dead)
		return;
	c->paused = (uint8_t)pause;
	if (pause)
		kvp_sock_recv_stop(&c->sock);
	else
		kvp_sock_recv_start(&c->sock);
}

static void flush(struct http_conn *c)
{
	if (c->fly_len || !c->out.len)
		return;
	c->fly_len = c->out.len;
	c->fly_cap = c->out.cap;
	c->tx_mark = c->sock.tx_bytes;
	c->send_ns = kvp_loop_now_ns(c->srv->loop);
	kvp_sock_send(&c->sock, c->out.p, 0, c->out.len);
	c->out = (struct kvp_http_buf){0};
}

static void conn_timer(void *ctx, struct kvp_timer *t);

/* Everything is sent. Bytes of the client that nobody reads would turn our FIN into a reset that can overtake
 * the answer, so they are read until the client closes. */
static void linger_begin(struct http_conn *c)
{
	struct kvp_http_server *s = c->srv;
	if (c->eof && !kvp_http_tags_waiting(c)) {
		conn_free(c);
		return;
	}
	c->state = CONN_LINGER;
	c->linger_ns = kvp_loop_now_ns(s->loop) + s->linger_ns;
	kvp_sock_shutdown(&c->sock);
	if (c->eof)
		kvp_sock_watch_hup(&c->sock, KVP_SOCK_HUP); /* all acknowledged, or a reset */
	else
		kvp_sock_recv_start(&c->sock);
	if (kvp_timer_set(s->loop, &c->timer, c->linger_ns, conn_timer, c))
		conn_free(c);
}

/* End of the turn: next requests out of pend, then one send for all their replies. */
static void conn_work(void *ctx)
{
	struct http_conn *c = ctx;
	pend_run(c);
	if (c->dead) {
		conn_lost(c);
		return;
	}
	int idle = c->state == CONN_READ && c->pend_at >= c->pend.len;
	int ending = idle && c->srv->draining && !c->in.started && c->served;
	if (ending && !unsent(c)) {
		conn_free(c);
		return;
	}
	if (ending || (idle && c->eof))
		c->state = CONN_FLUSH;
	flush(c);
	if (c->state == CONN_FLUSH && !c->fly_len)
		linger_begin(c);
}

/* A FIN says only that the client sends no more. The first bytes of the answer, the same for every answer,
 * are harmless to a client that waits for it and are answered with a reset for one that is gone. */
static void probe(struct http_conn *c)
{
	if (c->state == CONN_BUSY && c->reply == REPLY_NONE && !c->prefix_sent) {
		kvp_http_put(c, KVP_HTTP_PREFIX, sizeof(KVP_HTTP_PREFIX) - 1);
		c->prefix_sent = 1;
	}
	kvp_sock_watch_hup(&c->sock, KVP_SOCK_HUP);
	kvp_http_conn_work_later(c);
}

static void on_recv(void *ctx, struct kvp_sock *sock, const char *data, int64_t len)
{
	struct http_conn *c = ctx;
	(void)sock;
	if (len < 0 || (len == 0 && c->state == CONN_LINGER)) {
		conn_lost(c);
		return;
	}
	if (len == 0) {
		c->eof = 1;
		if (c->state == CONN_BUSY || unsent(c))
			probe(c);
		kvp_http_conn_work_later(c);
		return;
	}
	c->srv->stat.rx_bytes += (uint64_t)len;
	if (c->state >= CONN_FLUSH)
		return;
	uint64_t used = 0;
	if (c->pend_at >= c->pend.len)
		used = advance(c, data, (uint64_t)len);
	if (used < (uint64_t)len) {
		if (pend_put(c, data + used, (uint64_t)len - used))
			c->dead = 1;
		kvp_http_conn_work_later(c);
	} else if (c->dead) {
		kvp_http_conn_work_later(c);
	}
}

static void on_sent(void *ctx, struct kvp_sock *sock, char *buf, int err)
{
	struct http_conn *c = ctx;
	(void)sock;
	if (!c->out.p) {
		c->out.p = buf;
		c->out.cap = c->fly_cap;
		kvp_http_buf_trim(&c->out);
	} else {
		free(buf);
	}
	c->srv->stat.tx_bytes += err ? 0 : c->fly_len;
	c->fly_len = 0;
	if (err) {
		conn_lost(c);
		return;
	}
	kvp_http_tags_trim(c);
	if (c->state == CONN_BUSY && c->drain_asked && unsent(c) < c->srv->cfg.stream_high_bytes / 2) {
		c->drain_asked = 0;
		if (c->on_drain)
			c->on_drain(c->srv->cfg.ctx, &c->in.req);
	}
	if (c->out.len || c->state == CONN_FLUSH || c->pend_at < c->pend.len || c->dead)
		kvp_http_conn_work_later(c);
}

static void on_hup(void *ctx, struct kvp_sock *sock, int hup)
{
	(void)sock;
	(void)hup; /* only HUP is watched */
	conn_lost(ctx);
}

static const struct kvp_sock_ops conn_ops = {.on_recv = on_recv, .on_sent = on_sent, .on_hup = on_hup};

/* One timer a connection that is never later than the next deadline: requests do not touch it, it looks what
 * is due when it fires. Returns the next deadline, or 0 if the connection is gone. */
static uint64_t conn_due(struct http_conn *c, uint64_t now)
{
	struct kvp_http_server *s = c->srv;
	uint64_t at;
	if (c->state == CONN_LINGER) {
		if (now < c->linger_ns)
			return c->linger_ns;
		conn_free(c);
		return 0;
	}
	if (c->fly_len) {
		if (c->sock.tx_bytes != c->tx_mark) {
			c->tx_mark = c->sock.tx_bytes;
			c->send_ns = now;
		}
		at = c->send_ns + s->read_ns;
		if (now < at)
			return at;
		s->stat.stalled++;
		conn_lost(c);
		return 0;
	}
	if (c->state != CONN_READ)
		return now + s->read_ns;
	if (c->in.started) {
		at = c->start_ns + s->read_ns;
		if (now >= at) {
			error_put(c, &(struct kvp_http_refusal){408, "request not complete in time", NULL});
			at = now + s->read_ns;
		}
		return at;
	}
	at = c->idle_ns + s->idle_ns;
	if (s->draining && s->drain_ns + DRAIN_GRACE_NS < at)
		at = s->drain_ns + DRAIN_GRACE_NS;
	if (now < at)
		return at;
	s->stat.idle_closed++;
	conn_free(c);
	return 0;
}

static void conn_timer(void *ctx, struct kvp_timer *t)
{
	struct http_conn *c = ctx;
	struct kvp_http_server *s = c->srv;
	uint64_t now = kvp_loop_now_ns(s->loop), at = conn_due(c, now);
	if (!at)
		return;
	/* A request or a send that begins now is due after read_ns at the earliest. */
	at = at < now + s->read_ns ? at : now + s->read_ns;
	if (kvp_timer_set(s->loop, t, at, conn_timer, c))
		conn_lost(c);
}

static void refuse(struct kvp_http_server *s, int fd)
{
	static const char text[] = "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\n"
				   "Content-Length: 32\r\nConnection: close\r\n\r\n"
				   "{\"error\":\"too many connections\"}";
	s->stat.refused++;
	if (send(fd, text, sizeof(text) - 1, MSG_DONTWAIT | MSG_NOSIGNAL) > 0)
		shutdown(fd, SHUT_WR);
	close(fd);
}

static void on_accept(void *ctx, int fd)
{
	struct kvp_http_server *s = ctx;
	if (s->stat.open >= s->cfg.max_connections) {
		refuse(s, fd);
		return;
	}
	struct http_conn *c = calloc(1, sizeof(*c));
	if (!c) {
		refuse(s, fd);
		return;
	}
	if (kvp_sock_open(s->loop, &c->sock, fd, &conn_ops, c)) {
		free(c);
		s->stat.refused++;
		return;
	}
	uint64_t now = kvp_loop_now_ns(s->loop), first = s->idle_ns < s->read_ns ? s->idle_ns : s->read_ns;
	c->srv = s;
	c->in.body_max = s->cfg.body_max_bytes;
	c->in.head.line_max = s->cfg.line_max_bytes;
	c->in.head.header_max = s->cfg.header_max_bytes;
	c->idle_ns = now;
	c->next = s->conn;
	c->prev = &s->conn;
	if (c->next)
		c->next->prev = &c->next;
	s->conn = c;
	s->stat.accepted++;
	s->stat.open++;
	if (s->draining && first > DRAIN_GRACE_NS)
		first = DRAIN_GRACE_NS;
	if (kvp_timer_set(s->loop, &c->timer, now + first, conn_timer, c))
		conn_free(c);
	else
		kvp_sock_recv_start(&c->sock);
}

#define OR(v, d) ((v) ? (v) : (d))
int kvp_http_server_open(
	struct kvp_loop *l, const struct kvp_http_server_cfg *cfg, struct kvp_http_server **out)
{
	if (!cfg->on_request)
		return KVP_ERR_INVAL;
	struct kvp_http_server *s = calloc(1, sizeof(*s));
	if (!s)
		return KVP_ERR_SYS;
	kvp_http_parse_init();
	s->loop = l;
	s->cfg = *cfg;
	s->cfg.max_connections = OR(cfg->max_connections, 4096);
	s->cfg.header_max_bytes = OR(cfg->header_max_bytes, 65536);
	s->cfg.line_max_bytes = OR(cfg->line_max_bytes, 16384);
	s->cfg.body_max_bytes = OR(cfg->body_max_bytes, 8u << 20);
	s->cfg.stream_high_bytes = OR(cfg->stream_high_bytes, 262144);
	s->read_ns = OR(cfg->read_timeout_ms, 30000) * UINT64_C(1000000);
	s->idle_ns = OR(cfg->idle_timeout_ms, 75000) * UINT64_C(1000000);
	s->linger_ns = OR(cfg->linger_ms, 5000) * UINT64_C(1000000);
	s->own.max = KVP_HTTP_HELD_BYTES;
	s->held = cfg->held ? cfg->held : &s->own;
	s->cfg.ip = NULL; /* the caller's string need not live on */
	int rc = cfg->listen_fd > 0 ? kvp_loop_listen_fd(l, &s->listener, cfg->listen_fd, on_accept, s)
				    : kvp_loop_listen(l, &s->listener, cfg->ip, cfg->port, cfg->listen_flags,
					      on_accept, s);
	if (rc) {
		int err = errno;
		free(s);
		errno = err;
		return rc;
	}
	kvp_listener_take_limit(&s->listener, s->read_ns / 1000000);
	*out = s;
	return KVP_OK;
}

uint16_t kvp_http_server_port(const struct kvp_http_server *s)
{
	return s->listener.port;
}

const struct kvp_http_server_stat *kvp_http_server_stat(const struct kvp_http_server *s)
{
	return &s->stat;
}

void kvp_http_server_drain(struct kvp_http_server *s, void (*on_drained)(void *ctx), void *ctx)
{
	s->on_drained = on_drained;
	s->drained_ctx = ctx;
	if (s->draining)
		return;
	s->draining = 1;
	s->drain_ns = kvp_loop_now_ns(s->loop);
	kvp_listener_close(&s->listener, KVP_LISTENER_SERVE);
	for (struct http_conn *c = s->conn; c; c = c->next) {
		kvp_http_conn_work_later(c); /* ends those that wait between requests */
		if (!c->served &&
			kvp_timer_set(s->loop, &c->timer, s->drain_ns + DRAIN_GRACE_NS, conn_timer, c))
			c->dead = 1;
	}
	drain_check(s);
}

void kvp_http_server_close(struct kvp_http_server *s)
{
	if (!s)
		return;
	s->on_drained = NULL;
	kvp_listener_close(&s->listener, KVP_LISTENER_DROP);
	while (s->conn)
		conn_lost(s->conn);
	kvp_loop_defer_cancel(&s->drained);
	free(s);
}

const char *kvp_http_req_header(const struct kvp_http_req *r, const char *name, uint32_t *len)
{
	return kvp_http_head_find(&conn_of(r)->in.head, name, len, NULL);
}
