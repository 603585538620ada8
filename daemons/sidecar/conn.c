#include "daemons/sidecar/conn.h"
#include "daemons/common/log.h"

#include <kvpick/err.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define EXIT_NS UINT64_C(6000000000) /* from the forced end to ours: aborts take at most 5 s */

static const struct kvp_sock_ops conn_ops;
static void on_timer(void *ctx, struct kvp_timer *t);

static struct kvp_loop *loop_of(const struct kvp_conn *c)
{
	return c->w->loop;
}

static void conn_free(struct kvp_conn *c)
{
	struct kvp_worker *w = c->w;
	*c->prev = c->next;
	if (c->next)
		c->next->prev = c->prev;
	kvp_timer_cancel(w->loop, &c->timer);
	kvp_loop_defer_cancel(&c->work);
	kvp_loop_defer_cancel(&c->cork);
	if (c->cut)
		kvp_sock_reset(&c->sock);
	else
		kvp_sock_close(&c->sock);
	kvp_http_in_free(&c->in);
	kvp_http_buf_free(&c->pend);
	kvp_http_buf_free(&c->out.pend);
	kvp_held_set(&w->sidecar->held, &c->held, 0, KVP_HELD_TAKE);
	free(c);
	kvp_st_rlx_u64(&w->count.conns, --w->conn_cnt);
	kvp_worker_check(w);
}

/* The client is gone, or is thrown out. */
static void conn_gone(struct kvp_conn *c)
{
	if (c->req.running)
		kvp_req_end(&c->req, KVP_RESULT_CLIENT_GONE);
	conn_free(c);
}

static int flow_streams(const struct kvp_conn *c)
{
	return c->req.running && c->req.flow->stream_body;
}

static int wants_recv(const struct kvp_conn *c)
{
	if (c->fin)
		return 0;
	switch ((enum kvp_conn_state)c->state) {
	case KVP_CONN_READ:
		return kvp_out_len(&c->out) < KVP_OUT_HIGH_BYTES;
	case KVP_CONN_BODY:
		return !flow_streams(c) || kvp_leg_unsent(&c->req.decode) < KVP_OUT_HIGH_BYTES;
	case KVP_CONN_WAIT: /* whatever comes: behind it may be the end of the client */
	case KVP_CONN_FLUSH:
	case KVP_CONN_LINGER:
		break;
	}
	return 1;
}

/* Where nothing is received, a dead client is watched for. */
static void recv_ctl(struct kvp_conn *c)
{
	if (wants_recv(c)) {
		kvp_sock_watch_hup(&c->sock, 0);
		kvp_sock_recv_start(&c->sock);
		return;
	}
	kvp_sock_recv_stop(&c->sock);
	kvp_sock_watch_hup(&c->sock, KVP_SOCK_HUP);
}

/* ---- the budget ---- */

static int hold(struct kvp_conn *c, uint64_t flow, uint64_t pending, enum kvp_held_how how)
{
	uint64_t out = kvp_out_len(&c->out), head = c->in.head.raw.len;
	uint64_t all = flow + pending + (out > KVP_HELD_OUT_BYTES ? out : 0) +
		       (head > KVP_HTTP_KEEP_BYTES ? head : 0);
	int rc = kvp_held_set(&c->w->sidecar->held, &c->held, all, how);
	if (rc)
		kvp_count_add(&c->w->count.held_refused, 1);
	else
		c->flow_held = flow;
	return rc;
}

/* What the connection has now. */
static void hold_again(struct kvp_conn *c)
{
	hold(c, c->flow_held, c->pend.len, KVP_HELD_TAKE);
}

int kvp_req_hold(struct kvp_req *r, uint64_t bytes)
{
	struct kvp_conn *c = r->conn;
	if (bytes == c->flow_held)
		return KVP_OK;
	return hold(c, bytes, c->pend.len, KVP_HELD_ASK);
}

void kvp_conn_timer(struct kvp_conn *c)
{
	const struct kvp_worker *w = c->w;
	uint64_t ns = 0;
	if (c->state == KVP_CONN_LINGER)
		ns = w->draining ? KVP_CONN_FORCED_NS : KVP_CONN_LINGER_NS;
	else if (c->state == KVP_CONN_FLUSH && w->forced)
		ns = KVP_CONN_FORCED_NS;
	else if (kvp_out_len(&c->out))
		ns = KVP_CONN_STALL_NS;
	else if (c->state == KVP_CONN_READ)
		ns = c->in.started ? KVP_CONN_HEAD_NS : KVP_CONN_IDLE_NS;
	else if (c->state == KVP_CONN_BODY && !flow_streams(c))
		ns = w->cfg->sidecar_client_body_timeout_ms * UINT64_C(1000000);
	if (!ns)
		kvp_timer_cancel(loop_of(c), &c->timer);
	else if (kvp_timer_set(loop_of(c), &c->timer, kvp_loop_now_ns(loop_of(c)) + ns, on_timer, c))
		c->keep = 0;
}

static void uncork(void *ctx)
{
	struct kvp_conn *c = ctx;
	kvp_out_kick(&c->out, &c->sock);
}

void kvp_conn_put(struct kvp_conn *c, const void *data, uint64_t len)
{
	if (c->out.failed)
		return;
	int idle = !kvp_out_len(&c->out);
	if (kvp_http_buf_put(&c->out.pend, data, len)) {
		c->out.failed = 1; /* without memory the client sees the break */
		kvp_conn_later(c);
		return;
	}
	if (!c->out.fly)
		kvp_loop_defer(loop_of(c), &c->cork, uncork, c);
	if (kvp_out_len(&c->out) > KVP_HELD_OUT_BYTES)
		hold_again(c);
	if (idle && c->state >= KVP_CONN_WAIT)
		kvp_conn_timer(c);
}

/* A FIN behind a complete request: bytes that are due anyway bring a fully closed client to say so. */
static void probe(struct kvp_conn *c)
{
	struct kvp_req *r = &c->req;
	if (!r->replied && !c->prefix_out) {
		kvp_conn_put(c, "HTTP/1.1 ", 9);
		c->prefix_out = 1;
	} else if (r->replied && r->framing == KVP_REPLY_CHUNKED) {
		kvp_conn_put(c, "0", 1);
	}
}

static void linger(struct kvp_conn *c)
{
	c->state = KVP_CONN_LINGER;
	kvp_http_in_reset(&c->in);
	hold_again(c);
	kvp_sock_shutdown(&c->sock);
	recv_ctl(c);
	kvp_conn_timer(c);
}

/* The last byte of the last answer has left. */
static void flushed(struct kvp_conn *c)
{
	if (c->cut || c->fin)
		conn_free(c);
	else
		linger(c);
}

/* ---- body ---- */

static void body_over(struct kvp_conn *c)
{
	struct kvp_fail f = {413, c->req.adapter->too_large, "request body too large"};
	kvp_reply_error(&c->req, &f, NULL);
}

static void body_bad(struct kvp_conn *c)
{
	struct kvp_fail f = {400, KVP_RESULT_BAD_HTTP, "malformed chunk"};
	if (c->req.replied)
		kvp_reply_cut(&c->req, KVP_RESULT_BAD_HTTP);
	else
		kvp_reply_error(&c->req, &f, NULL);
}

static void body_piece(struct kvp_conn *c, const char *data, uint64_t len, uint64_t due)
{
	struct kvp_req *r = &c->req;
	if (flow_streams(c)) {
		if (len)
			r->flow->stream_body(r, data, len);
		return;
	}
	uint64_t max = c->w->cfg->eff.sidecar_max_request_bytes;
	if (len > max - r->body.len || due > max - r->body.len - len) {
		body_over(c); /* also when it is known before its bytes are here */
	} else if (kvp_req_hold(r, KVP_HELD_COPIES * (r->body.len + len))) {
		kvp_reply_error(r, &kvp_fail_held, NULL);
	} else if (kvp_http_buf_put(&r->body, data, len)) {
		kvp_reply_error(r, &kvp_fail_resources, NULL);
	} else {
		kvp_json_check_feed(&r->check, data, len);
	}
}

static void body_end(struct kvp_conn *c)
{
	struct kvp_req *r = &c->req;
	int streams = flow_streams(c);
	c->state = KVP_CONN_WAIT;
	kvp_conn_timer(c);
	if (streams)
		r->flow->stream_end(r);
	else
		r->flow->start(r);
}

static uint64_t feed_body(struct kvp_conn *c, const char *data, uint64_t len)
{
	struct kvp_http_in *in = &c->in;
	const char *out = data;
	uint64_t used = 0, out_len = 0;
	int rc = KVP_OK;
	if (in->framing == KVP_HTTP_FRAME_LENGTH) {
		used = out_len = len < in->length ? len : in->length;
		in->length -= used;
		rc = in->length ? KVP_ERR_AGAIN : KVP_OK;
	} else if (in->framing == KVP_HTTP_FRAME_CHUNKED) {
		rc = kvp_http_chunk_feed(&in->chunk, data, len, &used, &out, &out_len);
	}
	if (rc == KVP_ERR_PROTO) {
		body_bad(c);
		return used;
	}
	c->rest = len - used;
	uint64_t due = in->framing == KVP_HTTP_FRAME_LENGTH ? in->length : kvp_http_chunk_due(&in->chunk);
	body_piece(c, out, out_len, due);
	if (rc == KVP_OK && c->state == KVP_CONN_BODY)
		body_end(c);
	return used;
}

/* ---- input ---- */

static void head_refuse(struct kvp_conn *c, const struct kvp_fail *f)
{
	c->req = (struct kvp_req){.w = c->w,
		.conn = c,
		.start_ns = kvp_loop_now_ns(loop_of(c)),
		.is_head = c->in.req.is_head,
		.path = KVP_PATH_OTHER,
		.running = 1};
	c->keep = 0;
	c->state = KVP_CONN_WAIT;
	kvp_reply_error(&c->req, f, NULL);
}

static void head_bad(struct kvp_conn *c)
{
	struct kvp_fail f = {c->in.status, KVP_RESULT_BAD_HTTP, c->in.text};
	head_refuse(c, &f);
}

static void head_complete(struct kvp_conn *c)
{
	c->keep = c->in.head.keep_alive && c->in.req.minor == 1 && !c->w->draining;
	kvp_conn_route(c);
	/* Too large as announced. */
	if (c->state == KVP_CONN_BODY && c->in.framing == KVP_HTTP_FRAME_LENGTH && !flow_streams(c))
		body_piece(c, "", 0, c->in.length);
	if (c->state == KVP_CONN_BODY && c->in.expect && !c->rest)
		kvp_conn_put(c, "HTTP/1.1 100 Continue\r\n\r\n", 25);
	int none = c->in.framing == KVP_HTTP_FRAME_NONE ||
		   (c->in.framing == KVP_HTTP_FRAME_LENGTH && !c->in.length);
	if (c->state == KVP_CONN_BODY && none)
		feed_body(c, "", 0);
	kvp_conn_timer(c);
}

static uint64_t feed_head(struct kvp_conn *c, const char *data, uint64_t len)
{
	uint64_t used;
	int fresh = !c->in.started;
	int rc = kvp_http_in_head(&c->in, data, len, &used);
	c->rest = len - used;
	if (rc == KVP_ERR_PROTO)
		head_bad(c);
	else if (hold(c, c->flow_held, c->pend.len, KVP_HELD_ASK))
		head_refuse(c, &kvp_fail_held);
	else if (rc == KVP_OK)
		head_complete(c);
	else if (fresh && c->in.started)
		kvp_conn_timer(c);
	return used;
}

/* Takes what can be taken now; returns the bytes used. After an answer that ends the connection the rest is
 * thrown away. */
static uint64_t feed(struct kvp_conn *c, const char *data, uint64_t len)
{
	uint64_t at = 0;
	while (at < len && c->state <= KVP_CONN_BODY && !c->out.failed) {
		if (c->state == KVP_CONN_READ && kvp_out_len(&c->out) >= KVP_OUT_HIGH_BYTES)
			break;
		at += c->state == KVP_CONN_READ ? feed_head(c, data + at, len - at)
						: feed_body(c, data + at, len - at);
	}
	c->rest = 0;
	return c->state >= KVP_CONN_FLUSH ? len : at;
}

/* What a client left unfinished when it sent its last byte. Returns 1 if the connection is gone. */
static int fin_check(struct kvp_conn *c)
{
	if (!c->fin || c->pend.len)
		return 0;
	if (c->state == KVP_CONN_READ || c->state == KVP_CONN_BODY || c->state == KVP_CONN_LINGER) {
		if (c->state == KVP_CONN_READ && kvp_out_len(&c->out)) {
			c->state = KVP_CONN_FLUSH;
			return 0;
		}
		conn_gone(c);
		return 1;
	}
	return 0;
}

static void work(void *ctx)
{
	struct kvp_conn *c = ctx;
	if (c->out.failed) {
		conn_gone(c);
		return;
	}
	if (c->pend.len && c->state != KVP_CONN_WAIT) {
		struct kvp_http_buf b = c->pend;
		c->pend = (struct kvp_http_buf){0};
		uint64_t used = feed(c, b.p, b.len);
		if (used < b.len && kvp_http_buf_put(&c->pend, b.p + used, b.len - used))
			c->out.failed = 1;
		kvp_http_buf_free(&b);
		hold_again(c);
	}
	if (c->out.failed) {
		conn_gone(c);
		return;
	}
	if (c->state == KVP_CONN_FLUSH && !kvp_out_len(&c->out)) {
		flushed(c);
		return;
	}
	if (!fin_check(c))
		recv_ctl(c);
}

void kvp_conn_later(struct kvp_conn *c)
{
	kvp_loop_defer(loop_of(c), &c->work, work, c);
}

void kvp_conn_room(struct kvp_conn *c)
{
	recv_ctl(c);
}

static void on_fin(struct kvp_conn *c)
{
	c->fin = 1;
	if (fin_check(c))
		return;
	if (c->state == KVP_CONN_WAIT)
		probe(c);
	recv_ctl(c);
}

/* Bytes behind the running request. What is too much is thrown away, and the connection ends with the
 * answer. */
static void keep_pending(struct kvp_conn *c, const char *data, uint64_t len)
{
	int waits = c->state == KVP_CONN_WAIT; /* else it is one piece at most */
	uint64_t all = c->pend.len + len;
	if (c->overrun || (waits && all > KVP_CONN_PEND_MAX) ||
		hold(c, c->flow_held, all, waits ? KVP_HELD_ASK : KVP_HELD_TAKE)) {
		c->overrun = 1;
		c->keep = 0;
		kvp_http_buf_free(&c->pend);
		hold_again(c);
	} else if (kvp_http_buf_put(&c->pend, data, len)) {
		c->out.failed = 1;
	}
}

static void on_recv(void *ctx, struct kvp_sock *s, const char *data, int64_t len)
{
	struct kvp_conn *c = ctx;
	uint64_t used = 0, n = (uint64_t)len;
	(void)s;
	if (len < 0) {
		conn_gone(c);
		return;
	}
	if (len == 0) {
		on_fin(c);
		return;
	}
	kvp_count_add(&c->w->count.rx_bytes, n);
	if (!c->pend.len)
		used = feed(c, data, n);
	if (c->state >= KVP_CONN_FLUSH)
		used = n;
	if (used < n)
		keep_pending(c, data + used, n - used);
	if (c->out.failed)
		kvp_conn_later(c);
	else
		recv_ctl(c);
}

static void on_sent(void *ctx, struct kvp_sock *s, char *buf, int err)
{
	struct kvp_conn *c = ctx;
	uint64_t before = kvp_out_len(&c->out);
	kvp_count_add(&c->w->count.tx_bytes, c->out.fly);
	kvp_out_sent(&c->out, s, buf, err);
	uint64_t left = kvp_out_len(&c->out);
	if (err) {
		conn_gone(c);
		return;
	}
	if (before > KVP_HELD_OUT_BYTES)
		hold_again(c);
	if (c->state == KVP_CONN_FLUSH && !left) {
		flushed(c);
		return;
	}
	kvp_conn_timer(c);
	if (before > KVP_OUT_LOW_BYTES && left <= KVP_OUT_LOW_BYTES) {
		if (c->req.running && c->req.flow->drained)
			c->req.flow->drained(&c->req);
		kvp_conn_later(c);
	}
}

static void on_hup(void *ctx, struct kvp_sock *s, int hup)
{
	struct kvp_conn *c = ctx;
	(void)s;
	(void)hup; /* watched for nothing else */
	conn_gone(c);
}

static void on_timer(void *ctx, struct kvp_timer *t)
{
	struct kvp_conn *c = ctx;
	struct kvp_fail f = {408, KVP_RESULT_TIMEOUT, "the request body did not arrive in time"};
	(void)t;
	if (c->state == KVP_CONN_BODY && !kvp_out_len(&c->out)) {
		kvp_reply_error(&c->req, &f, NULL);
	} else if (c->state == KVP_CONN_READ && c->in.started && !kvp_out_len(&c->out)) {
		c->in.status = 408;
		c->in.text = "the request did not arrive in time";
		head_bad(c);
	} else {
		conn_gone(c);
	}
}

static const struct kvp_sock_ops conn_ops = {.on_recv = on_recv, .on_sent = on_sent, .on_hup = on_hup};

static void on_accept(void *ctx, int fd)
{
	struct kvp_worker *w = ctx;
	struct kvp_conn *c = calloc(1, sizeof(*c));
	kvp_count_add(&w->count.accepted, 1);
	if (!c) {
		close(fd);
		return;
	}
	c->w = w;
	c->in.head.line_max = KVP_CONN_LINE_MAX;
	c->in.head.header_max = KVP_CONN_HEAD_MAX;
	c->in.body_max = UINT64_MAX;
	if (kvp_sock_open(w->loop, &c->sock, fd, &conn_ops, c)) {
		free(c);
		return;
	}
	c->next = w->conn;
	c->prev = &w->conn;
	if (c->next)
		c->next->prev = &c->next;
	w->conn = c;
	kvp_st_rlx_u64(&w->count.conns, ++w->conn_cnt);
	kvp_conn_timer(c);
	kvp_sock_recv_start(&c->sock);
}

int kvp_worker_listen(struct kvp_worker *w, int flags)
{
	int rc = kvp_loop_listen(w->loop, &w->listener, w->cfg->sidecar_bind, (uint16_t)w->cfg->sidecar_port,
		flags, on_accept, w);
	if (!rc)
		kvp_listener_take_limit(&w->listener, KVP_CONN_STALL_NS / 1000000);
	return rc;
}

/* ---- the end of a request ---- */

/* One request in so many. Ids only: no header value but the request's own id, no path beyond its kind. */
static void log_request(struct kvp_req *r, enum kvp_result result)
{
	const struct kvp_config *cfg = r->w->cfg;
	uint32_t len = 0;
	const char *id = kvp_headers_id(r, &len);
	int is_local = !r->flow && (result == KVP_RESULT_OK || result == KVP_RESULT_OTHER);
	if (!cfg->log_requests || is_local || r->w->log_turn++ % cfg->log_requests)
		return;
	if (!id) {
		id = r->request_id;
		len = (uint32_t)strlen(id);
	}
	KVP_LOG_I("sidecar.request", "request_id=%.*s path=%s backend=%s result=%s status=%d ms=%llu",
		(int)len, id, kvp_path_text[r->path], r->adapter ? r->adapter->name : "none",
		kvp_result_text[result], r->status,
		(unsigned long long)(kvp_loop_now_ns(r->w->loop) - r->start_ns) / 1000000);
}

void kvp_req_end(struct kvp_req *r, enum kvp_result result)
{
	struct kvp_conn *c = r->conn;
	struct kvp_worker *w = r->w;
	if (!r->running)
		return;
	r->running = 0;
	log_request(r, result);
	if (r->flow) {
		r->flow->finish(r);
		kvp_st_rlx_u64(&w->count.streams, kvp_ld_rlx_u64(&w->count.streams) - 1);
		kvp_faa_rlx_u64(&w->sidecar->stream_cnt, (uint64_t)-1);
	}
	kvp_count_add(&w->count.request[r->path][r->adapter != NULL][result], 1);
	kvp_http_buf_free(&r->body);
	/* An upload that was not read to its end is thrown away with the connection. */
	if (c->state == KVP_CONN_WAIT && c->keep && kvp_conn_expects(c) && !c->cut && !w->draining) {
		c->state = KVP_CONN_READ;
		kvp_http_in_reset(&c->in);
	} else {
		c->state = KVP_CONN_FLUSH;
		kvp_http_buf_free(&c->pend);
	}
	hold(c, 0, c->pend.len, KVP_HELD_TAKE);
	kvp_conn_timer(c);
	kvp_conn_later(c);
}

/* ---- the end of a worker ---- */

static int is_idle(const struct kvp_conn *c)
{
	char b;
	return c->state == KVP_CONN_READ && !c->in.started && !c->pend.len && !kvp_out_len(&c->out) &&
	       recv(c->sock.fd, &b, 1, MSG_PEEK | MSG_DONTWAIT) < 0;
}

static void force_conn(struct kvp_conn *c)
{
	struct kvp_fail f = {502, KVP_RESULT_CANCELLED, "the server is shutting down"};
	struct kvp_req *r = &c->req;
	if (r->running) {
		f.status = c->state == KVP_CONN_BODY ? 503 : 502;
		if (r->replied)
			kvp_reply_end(r, KVP_RESULT_CANCELLED);
		else
			kvp_reply_error(r, &f, NULL);
	} else if (c->state == KVP_CONN_READ) {
		conn_free(c);
	} else {
		kvp_conn_timer(c);
	}
}

static void on_exit_end(void *ctx, struct kvp_timer *t)
{
	struct kvp_worker *w = ctx;
	(void)t;
	kvp_loop_stop(w->loop);
}

static void on_drain_end(void *ctx, struct kvp_timer *t)
{
	struct kvp_worker *w = ctx;
	(void)t;
	w->forced = 1;
	kvp_timer_set(w->loop, &w->exit_end, kvp_loop_now_ns(w->loop) + EXIT_NS, on_exit_end, w);
	for (struct kvp_conn *c = w->conn, *next; c; c = next) {
		next = c->next;
		force_conn(c);
	}
	kvp_worker_check(w);
}

void kvp_worker_check(struct kvp_worker *w)
{
	if (w->draining && !w->conn && !w->abort && (w->id || !kvp_ld_acq_u32(&w->sidecar->other_cnt)))
		kvp_loop_stop(w->loop);
}

void kvp_worker_drain(struct kvp_worker *w)
{
	if (w->draining)
		return;
	w->draining = 1;
	kvp_listener_close(&w->listener, KVP_LISTENER_SERVE);
	for (struct kvp_conn *c = w->conn, *next; c; c = next) {
		next = c->next;
		if (is_idle(c))
			conn_free(c);
	}
	uint64_t ns = w->cfg->sidecar_drain_timeout_ms * UINT64_C(1000000);
	if (kvp_timer_set(w->loop, &w->drain_end, kvp_loop_now_ns(w->loop) + ns, on_drain_end, w))
		kvp_loop_stop(w->loop);
	kvp_worker_check(w);
}

void kvp_worker_end(struct kvp_worker *w)
{
	kvp_listener_close(&w->listener, KVP_LISTENER_DROP);
	while (w->conn)
		conn_gone(w->conn);
	kvp_timer_cancel(w->loop, &w->drain_end);
	kvp_timer_cancel(w->loop, &w->exit_end);
	kvp_aborts_end(w); /* those that the requests' ends have just begun, too */
	kvp_leg_pool_end(&w->pool);
}
