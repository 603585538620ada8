#include "ipc/leg.h"

#include <errno.h>
#include <kvpick/atomic.h>
#include <kvpick/err.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <string.h>

#define UNSOLICITED_MAX_BYTES 65536 /* requests up to this are in the kernel before their answer can come */

enum conn_state { CONN_CONNECTING, CONN_HANDSHAKE, CONN_RUNNING, CONN_IDLE };

struct kvp_leg_conn {
	struct kvp_leg_pool *pool;
	struct kvp_leg_conn *next, **prev; /* busy or idle ones (newest first) */
	struct kvp_leg *leg;
	struct kvp_addr addr;
	struct kvp_sock sock;
	struct kvp_timer idle;
	struct kvp_defer cork; /* pieces of one turn leave together */
	struct kvp_http_head head;
	struct kvp_http_chunk chunk;
	struct kvp_out out;
	struct kvp_tls_client *tls_of; /* NULL: plain text */
	struct kvp_tls_conn *tls;      /* once it is connected */
	char *tls_name;
	enum kvp_http_framing framing;
	uint64_t left, tx_mark;
	uint8_t state, reused;
	uint8_t head_done; /* the final head is complete */
	uint8_t in_recv;   /* frames of ours on the stack: closing leaves the memory to them */
	uint8_t closed;
	uint8_t said_end; /* the server sends no more */
	uint8_t was_lost; /* a send said that it was no end in order, which receiving does not say any more */
};

static void on_gap(void *ctx, struct kvp_timer *t);

static void count(uint64_t *c)
{
	kvp_st_rlx_u64(c, kvp_ld_rlx_u64(c) + 1);
}

static void conn_unlink(struct kvp_leg_conn *c)
{
	*c->prev = c->next;
	if (c->next)
		c->next->prev = c->prev;
}

static void conn_link(struct kvp_leg_conn *c, struct kvp_leg_conn **list)
{
	c->next = *list;
	c->prev = list;
	if (c->next)
		c->next->prev = &c->next;
	*list = c;
}

static void conn_release(struct kvp_leg_conn *c)
{
	kvp_http_head_free(&c->head);
	kvp_http_buf_free(&c->out.pend);
	kvp_tls_conn_free(c->tls);
	free(c->tls_name);
	free(c);
}

static void conn_enter(struct kvp_leg_conn *c)
{
	c->in_recv++;
}

static void conn_leave(struct kvp_leg_conn *c)
{
	if (!--c->in_recv && c->closed)
		conn_release(c);
}

static void conn_close(struct kvp_leg_conn *c)
{
	struct kvp_leg_pool *p = c->pool;
	conn_unlink(c);
	kvp_st_rlx_u64(&p->stat.open, kvp_ld_rlx_u64(&p->stat.open) - 1);
	p->stat.idle -= c->state == CONN_IDLE;
	kvp_timer_cancel(p->loop, &c->idle);
	kvp_loop_defer_cancel(&c->cork);
	kvp_sock_close(&c->sock);
	if (c->leg)
		c->leg->conn = NULL;
	c->leg = NULL;
	c->closed = 1;
	if (!c->in_recv)
		conn_release(c);
}

static void on_idle_end(void *ctx, struct kvp_timer *t)
{
	(void)t;
	conn_close(ctx);
}

static void leg_stop(struct kvp_leg *leg)
{
	if (leg->conn)
		conn_close(leg->conn);
	kvp_timer_cancel(leg->pool->loop, &leg->gap);
	kvp_timer_cancel(leg->pool->loop, &leg->deadline);
	kvp_loop_defer_cancel(&leg->failed);
	kvp_name_cancel(&leg->name);
	kvp_http_buf_free(&leg->request);
	leg->head = NULL;
	leg->running = 0;
}

static void leg_done(struct kvp_leg *leg, enum kvp_leg_end end)
{
	if (end == KVP_LEG_FAILED && !leg->sys)
		leg->sys = errno;
	leg_stop(leg);
	leg->ops->on_done(leg->ctx, leg, end);
}

void kvp_leg_close(struct kvp_leg *leg)
{
	if (leg->running)
		leg_stop(leg);
}

static void on_failed(void *ctx)
{
	leg_done(ctx, KVP_LEG_FAILED);
}

static void fail_later(struct kvp_leg *leg)
{
	leg->sys = errno;
	kvp_loop_defer(leg->pool->loop, &leg->failed, on_failed, leg);
}

/* Silence is counted while the server owes something: not while the reader is paused, and not while the
 * user has not put the rest of its upload. */
static void gap_set(struct kvp_leg *leg)
{
	struct kvp_loop *l = leg->pool->loop;
	const struct kvp_leg_conn *c = leg->conn;
	int waits = !c || c->state < CONN_RUNNING, owes = waits; /* for a name or a connection */
	if (!waits && !leg->paused)
		owes = leg->ended_upload || kvp_out_len(&c->out) || leg->status;
	uint64_t ns = !owes ? 0 : waits ? leg->cfg.connect_ns : leg->cfg.gap_ns;
	if (!ns)
		kvp_timer_cancel(l, &leg->gap);
	else if (kvp_timer_set(l, &leg->gap, kvp_loop_now_ns(l) + ns, on_gap, leg))
		fail_later(leg);
}

static void on_deadline(void *ctx, struct kvp_timer *t)
{
	(void)t;
	leg_done(ctx, KVP_LEG_DEADLINE);
}

/* What the TLS library wants to be sent. */
static int conn_pump(struct kvp_leg_conn *c)
{
	char *buf;
	size_t len;
	int rc = kvp_tls_conn_out(c->tls, &buf, &len);
	if (!rc && len)
		rc = kvp_http_buf_put(&c->out.pend, buf, len);
	if (!rc)
		free(buf);
	kvp_out_kick(&c->out, &c->sock);
	return rc;
}

static void conn_uncork(void *ctx)
{
	struct kvp_leg_conn *c = ctx;
	kvp_out_kick(&c->out, &c->sock);
}

static int conn_write(struct kvp_leg_conn *c, const char *data, uint64_t len)
{
	int rc = c->tls ? kvp_tls_conn_write(c->tls, data, len) : kvp_http_buf_put(&c->out.pend, data, len);
	if (rc)
		return rc;
	if (c->tls)
		return conn_pump(c);
	if (c->leg->ended_upload)
		conn_uncork(c);
	else
		kvp_loop_defer(c->pool->loop, &c->cork, conn_uncork, c);
	return KVP_OK;
}

/* The request is kept until an answer begins where that may be needed: on a connection that was used
 * before. */
static int request_send(struct kvp_leg_conn *c)
{
	struct kvp_leg *leg = c->leg;
	c->tx_mark = c->sock.tx_bytes;
	if (c->reused)
		return conn_write(c, leg->request.p, leg->request.len);
	if (c->tls) {
		int rc = conn_write(c, leg->request.p, leg->request.len);
		kvp_http_buf_free(&leg->request);
		return rc;
	}
	kvp_http_buf_free(&c->out.pend);
	c->out.pend = leg->request;
	leg->request = (struct kvp_http_buf){0};
	kvp_out_kick(&c->out, &c->sock);
	return KVP_OK;
}

static const struct kvp_sock_ops conn_ops;

/* From the leg's address on, the first for which there is a socket: a host may lack a family. */
static int dial(struct kvp_leg *leg, struct kvp_leg_conn *c)
{
	for (;;) {
		c->addr = leg->cfg.to.addr[leg->addr_at];
		int rc = kvp_sock_connect(leg->pool->loop, &c->sock, &c->addr, &conn_ops, c);
		if (!rc || leg->addr_at + 1 >= leg->cfg.to.cnt)
			return rc;
		leg->addr_at++;
	}
}

static int conn_new(struct kvp_leg *leg)
{
	struct kvp_leg_pool *p = leg->pool;
	struct kvp_leg_conn *c = calloc(1, sizeof(*c));
	if (!c)
		return KVP_ERR_SYS;
	if (p->open_max && p->stat.open >= p->open_max && p->idle)
		conn_close(p->idle);
	c->pool = p;
	c->tls_of = leg->cfg.tls;
	c->head.line_max = c->head.header_max = p->head_max_bytes;
	if (dial(leg, c)) {
		int err = errno;
		free(c);
		errno = err;
		return KVP_ERR_SYS;
	}
	c->state = CONN_CONNECTING;
	c->leg = leg;
	leg->conn = c;
	conn_link(c, &p->busy);
	count(&p->stat.connects);
	count(&p->stat.open);
	gap_set(leg);
	return KVP_OK;
}

/* An address that says nothing is left for the next one. */
static void on_gap(void *ctx, struct kvp_timer *t)
{
	struct kvp_leg *leg = ctx;
	(void)t;
	int waits = !leg->conn || leg->conn->state < CONN_RUNNING;
	if (leg->conn && leg->conn->state == CONN_CONNECTING && leg->addr_at + 1 < leg->cfg.to.cnt) {
		conn_close(leg->conn);
		leg->addr_at++;
		leg->was_late = 1;
		if (conn_new(leg) == KVP_OK)
			return;
	}
	leg_done(leg, waits ? KVP_LEG_CONNECT_TIMEOUT : KVP_LEG_READ_TIMEOUT);
}

/* Connected: the request goes out. */
static void conn_run(struct kvp_leg_conn *c)
{
	struct kvp_leg *leg = c->leg;
	c->state = CONN_RUNNING;
	if (request_send(c)) {
		leg_done(leg, KVP_LEG_FAILED);
		return;
	}
	if (leg->paused)
		kvp_sock_recv_stop(&c->sock);
	else
		kvp_sock_recv_start(&c->sock);
	gap_set(leg);
}

static void handshake_failed(struct kvp_leg_conn *c)
{
	struct kvp_leg_pool *p = c->pool;
	const char *why = kvp_tls_conn_why(c->tls);
	count(&p->stat.tls_failed);
	if (p->on_tls_failed)
		p->on_tls_failed(p->ctx, why[0] ? why : "broken off");
	c->leg->sys = EPROTO;
	leg_done(c->leg, KVP_LEG_REFUSED);
}

static void handshake_begin(struct kvp_leg_conn *c)
{
	struct kvp_leg *leg = c->leg;
	const char *name = leg->cfg.tls_name;
	c->tls_name = name ? strdup(name) : NULL;
	if (!name)
		c->tls = kvp_tls_conn_new(c->tls_of);
	else if (c->tls_name)
		c->tls = kvp_tls_conn_new_for(c->tls_of, name);
	c->state = CONN_HANDSHAKE;
	if (!c->tls || kvp_tls_conn_handshake(c->tls) != KVP_ERR_AGAIN || conn_pump(c)) {
		leg_done(leg, KVP_LEG_FAILED);
		return;
	}
	kvp_sock_recv_start(&c->sock);
	gap_set(leg);
}

static void on_connect(void *ctx, struct kvp_sock *s, int err)
{
	struct kvp_leg_conn *c = ctx;
	struct kvp_leg *leg = c->leg;
	(void)s;
	if (err) {
		conn_close(c);
		if (++leg->addr_at < leg->cfg.to.cnt && conn_new(leg) == KVP_OK)
			return;
		leg->sys = -err;
		leg_done(leg, leg->was_late ? KVP_LEG_CONNECT_TIMEOUT : KVP_LEG_REFUSED);
		return;
	}
	if (c->tls_of) {
		handshake_begin(c);
		return;
	}
	conn_run(c);
}

static void on_sent(void *ctx, struct kvp_sock *s, char *buf, int err)
{
	struct kvp_leg_conn *c = ctx;
	uint64_t before = kvp_out_len(&c->out);
	kvp_out_sent(&c->out, s, buf, err);
	c->was_lost |= err && err != -EPIPE;
	if (!c->leg)
		return;
	/* What the server said before it stopped reading still comes: the end of its stream decides. */
	gap_set(c->leg);
	if (before > KVP_OUT_LOW_BYTES && kvp_out_len(&c->out) <= KVP_OUT_LOW_BYTES && c->leg->ops->on_room)
		c->leg->ops->on_room(c->leg->ctx, c->leg);
}

/* Whether the server has nothing of the request. What it says last acknowledges what it has got; a reset is
 * taken without a look at what it acknowledges. */
static int is_unseen(const struct kvp_leg_conn *c)
{
	struct tcp_info ti = {.tcpi_state = 0};
	socklen_t len = sizeof(ti);
	if (getsockopt(c->sock.fd, IPPROTO_TCP, TCP_INFO, &ti, &len))
		return 0;
	uint64_t sent = ti.tcpi_bytes_sent - ti.tcpi_bytes_retrans;
	uint64_t acked = ti.tcpi_bytes_acked - 1; /* the connection's begin counts */
	return sent == c->tx_mark || (c->said_end && !c->was_lost && acked == c->tx_mark);
}

static int may_repeat(const struct kvp_leg_conn *c)
{
	struct kvp_leg *leg = c->leg;
	if (!c->reused || leg->got || leg->retried || !leg->request.len)
		return 0;
	shutdown(c->sock.fd, SHUT_RDWR); /* what still waits in the loop to be sent stays here */
	if (leg->cfg.repeat == KVP_LEG_AGAIN || is_unseen(c))
		return 1;
	count(&leg->pool->stat.unrepeated);
	return 0;
}

/* The connection ended under its leg. */
static void conn_died(struct kvp_leg_conn *c)
{
	struct kvp_leg *leg = c->leg;
	int again = may_repeat(c);
	int head_done = c->head_done;
	conn_close(c);
	if (!again) {
		leg->err = KVP_ERR_CLOSED;
		leg_done(leg, head_done ? KVP_LEG_CUT : KVP_LEG_BROKEN);
		return;
	}
	leg->retried = 1;
	count(&leg->pool->stat.retried);
	if (conn_new(leg))
		leg_done(leg, KVP_LEG_FAILED);
}

/* A complete response: the connection goes back if it is clean. */
static void conn_finish(struct kvp_leg_conn *c, uint64_t rest)
{
	struct kvp_leg_pool *p = c->pool;
	struct kvp_leg *leg = c->leg;
	if (!c->head.keep_alive || rest || kvp_out_len(&c->out) || !leg->ended_upload || c->out.failed ||
		kvp_timer_set(p->loop, &c->idle, kvp_loop_now_ns(p->loop) + p->idle_ms * UINT64_C(1000000),
			on_idle_end, c)) {
		leg_done(leg, KVP_LEG_COMPLETE);
		return;
	}
	conn_unlink(c);
	conn_link(c, &p->idle);
	c->state = CONN_IDLE;
	p->stat.idle++;
	if (leg->paused)
		kvp_sock_recv_start(&c->sock); /* an idle connection is watched for its end */
	if (p->stat.idle > p->idle_max) {
		struct kvp_leg_conn *oldest = c;
		while (oldest->next)
			oldest = oldest->next;
		if (oldest != c)
			conn_close(oldest);
	}
	leg->conn = NULL;
	c->leg = NULL;
	leg_done(leg, KVP_LEG_COMPLETE);
}

/* KVP_ERR_AGAIN: an interim response was passed over. */
static int head_in(struct kvp_leg_conn *c)
{
	struct kvp_leg *leg = c->leg;
	int rc = kvp_http_head_parse(&c->head, KVP_HTTP_KIND_RESPONSE);
	if (rc)
		return rc;
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
	leg->status = status;
	leg->head = &c->head;
	if (leg->cfg.is_head || status == 204 || status == 304) {
		c->framing = KVP_HTTP_FRAME_LENGTH;
		c->left = 0;
	}
	leg->ops->on_head(leg->ctx, leg);
	if (!c->leg)
		return KVP_OK;
	int over = c->framing == KVP_HTTP_FRAME_LENGTH && leg->cfg.body_max_bytes &&
		   c->left > leg->cfg.body_max_bytes;
	return over ? KVP_ERR_LIMIT : KVP_OK;
}

static int body_in(struct kvp_leg_conn *c, const char *data, uint64_t len)
{
	struct kvp_leg *leg = c->leg;
	if (!len)
		return KVP_OK;
	if (leg->cfg.body_max_bytes && len > leg->cfg.body_max_bytes - leg->body_bytes)
		return KVP_ERR_LIMIT;
	leg->body_bytes += len;
	leg->ops->on_body(leg->ctx, leg, data, len);
	return KVP_OK;
}

/* KVP_OK: complete, *used says where; KVP_ERR_AGAIN: more, or the leg was closed by its callbacks;
 * KVP_ERR_LIMIT: of head or body; KVP_ERR_PROTO; KVP_ERR_SYS. */
static int response_in(struct kvp_leg_conn *c, const char *data, uint64_t len, uint64_t *used)
{
	uint64_t at = 0, n;
	int rc;
	while (!c->head_done) {
		rc = kvp_http_head_feed(&c->head, data + at, len - at, &n);
		at += n;
		if (rc)
			return rc;
		rc = head_in(c);
		if (!c->leg)
			return KVP_ERR_AGAIN;
		if (rc && rc != KVP_ERR_AGAIN)
			return rc;
	}
	*used = at;
	if (c->framing == KVP_HTTP_FRAME_NONE) {
		*used = len;
		return body_in(c, data + at, len - at) ? KVP_ERR_LIMIT : KVP_ERR_AGAIN;
	}
	if (c->framing == KVP_HTTP_FRAME_LENGTH) {
		n = len - at < c->left ? len - at : c->left;
		c->left -= n;
		*used = at + n;
		uint64_t left = c->left;
		if (body_in(c, data + at, n))
			return KVP_ERR_LIMIT;
		return !c->leg || left ? KVP_ERR_AGAIN : KVP_OK;
	}
	for (rc = KVP_ERR_AGAIN; rc == KVP_ERR_AGAIN && at < len;) {
		const char *out;
		uint64_t out_len;
		rc = kvp_http_chunk_feed(&c->chunk, data + at, len - at, &n, &out, &out_len);
		at += n;
		*used = at;
		if (body_in(c, out, out_len))
			return KVP_ERR_LIMIT;
		if (!c->leg)
			return KVP_ERR_AGAIN;
	}
	return rc;
}

static void recv_running(struct kvp_leg_conn *c, const char *data, uint64_t len)
{
	struct kvp_leg *leg = c->leg;
	uint64_t used = 0;
	if (!leg->got) {
		leg->got = 1;
		kvp_http_buf_free(&leg->request); /* no retry any more */
	}
	conn_enter(c);
	int rc = response_in(c, data, len, &used);
	if (c->leg) {
		leg->err = rc;
		if (rc == KVP_OK)
			conn_finish(c, len - used);
		else if (rc == KVP_ERR_AGAIN)
			gap_set(leg);
		else if (rc == KVP_ERR_LIMIT && c->head_done)
			leg_done(leg, KVP_LEG_TOO_LARGE);
		else
			leg_done(leg, c->head_done ? KVP_LEG_CUT : KVP_LEG_BROKEN);
	}
	conn_leave(c);
}

static void conn_plain(struct kvp_leg_conn *c, const char *data, uint64_t len)
{
	if (c->state == CONN_IDLE) {
		count(&c->pool->stat.stale);
		conn_close(c); /* bytes that nobody asked for */
	} else if (c->reused && !c->leg->got && c->sock.tx_bytes == c->tx_mark &&
		   c->leg->request.len <= UNSOLICITED_MAX_BYTES) {
		conn_died(c); /* said before it was asked: no answer to this request */
	} else {
		recv_running(c, data, len);
	}
}

enum conn_end { END_CLEAN, END_BROKEN };

static void conn_ended(struct kvp_leg_conn *c, enum conn_end how)
{
	if (c->state == CONN_IDLE) {
		count(&c->pool->stat.stale);
		conn_close(c);
	} else if (c->state == CONN_HANDSHAKE) {
		handshake_failed(c);
	} else if (how == END_CLEAN && c->head_done && c->framing == KVP_HTTP_FRAME_NONE) {
		leg_done(c->leg, KVP_LEG_COMPLETE);
	} else {
		conn_died(c);
	}
}

/* Plain text as far as there is any; callbacks may close the connection. */
static void conn_decrypt(struct kvp_leg_conn *c)
{
	char buf[KVP_LOOP_RECV_BYTES];
	size_t len;
	int rc = KVP_OK;
	while (!c->closed && (rc = kvp_tls_conn_read(c->tls, buf, sizeof(buf), &len)) == KVP_OK)
		conn_plain(c, buf, len);
	if (c->closed)
		return;
	if (rc == KVP_ERR_AGAIN && conn_pump(c) == KVP_OK)
		return;
	c->said_end = rc == KVP_ERR_CLOSED;
	conn_ended(c, rc == KVP_ERR_CLOSED ? END_CLEAN : END_BROKEN);
}

static void conn_tls_in(struct kvp_leg_conn *c, const char *data, uint64_t len)
{
	if (kvp_tls_conn_in(c->tls, data, len)) {
		conn_ended(c, END_BROKEN);
		return;
	}
	if (c->state == CONN_HANDSHAKE) {
		int rc = kvp_tls_conn_handshake(c->tls);
		if (conn_pump(c) || (rc && rc != KVP_ERR_AGAIN)) {
			handshake_failed(c);
			return;
		}
		if (rc)
			return;
		conn_run(c);
	}
	if (!c->closed)
		conn_decrypt(c);
}

static void on_recv(void *ctx, struct kvp_sock *s, const char *data, int64_t len)
{
	struct kvp_leg_conn *c = ctx;
	(void)s;
	if (len <= 0) {
		c->said_end = len == 0;
		/* Under TLS an end that was not announced is a break. */
		conn_ended(c, len == 0 && !c->tls ? END_CLEAN : END_BROKEN);
	} else if (c->tls) {
		conn_enter(c);
		conn_tls_in(c, data, (uint64_t)len);
		conn_leave(c);
	} else {
		conn_plain(c, data, (uint64_t)len);
	}
}

static const struct kvp_sock_ops conn_ops = {
	.on_recv = on_recv, .on_sent = on_sent, .on_connect = on_connect};

/* A connection that its server closed, or that has something to say unasked, shows it to a look that takes
 * nothing. */
static int is_stale(const struct kvp_leg_conn *c)
{
	char b;
	ssize_t n = recv(c->sock.fd, &b, 1, MSG_PEEK | MSG_DONTWAIT);
	return !(n < 0 && (errno == EAGAIN || errno == EINTR));
}

static int same_addr(const struct kvp_addr *a, const struct kvp_addr *b)
{
	return a->len == b->len && memcmp(&a->ss, &b->ss, a->len) == 0;
}

static int same_tls(const struct kvp_leg_conn *c, const struct kvp_leg *leg)
{
	const char *a = c->tls_name, *b = leg->cfg.tls_name;
	return c->tls_of == leg->cfg.tls && (!c->tls_of || (a && b ? strcmp(a, b) == 0 : a == b));
}

static struct kvp_leg_conn *idle_find(struct kvp_leg *leg)
{
	struct kvp_leg_pool *p = leg->pool;
	for (struct kvp_leg_conn *c = p->idle, *next; c; c = next) {
		int fits = 0;
		next = c->next;
		for (uint32_t i = 0; i < leg->cfg.to.cnt && !fits; i++)
			fits = same_addr(&c->addr, &leg->cfg.to.addr[i]);
		if (!fits || !same_tls(c, leg))
			continue;
		if (!is_stale(c))
			return c;
		count(&p->stat.stale);
		conn_close(c);
	}
	return NULL;
}

static int idle_take(struct kvp_leg *leg)
{
	struct kvp_leg_pool *p = leg->pool;
	struct kvp_leg_conn *c = leg->cfg.upload == KVP_LEG_LONG ? NULL : idle_find(leg);
	if (!c)
		return KVP_ERR_NOTFOUND;
	conn_unlink(c);
	conn_link(c, &p->busy);
	p->stat.idle--;
	count(&p->stat.reused);
	kvp_timer_cancel(p->loop, &c->idle);
	c->state = CONN_RUNNING;
	c->reused = 1;
	c->head_done = 0;
	c->chunk = (struct kvp_http_chunk){0};
	kvp_http_head_reset(&c->head);
	c->leg = leg;
	leg->conn = c;
	int rc = request_send(c);
	gap_set(leg);
	return rc;
}

static int connect_any(struct kvp_leg *leg)
{
	int rc = idle_take(leg);
	return rc == KVP_ERR_NOTFOUND ? conn_new(leg) : rc;
}

static void on_name(void *ctx, int err)
{
	struct kvp_leg *leg = ctx;
	if (err)
		leg_done(leg, KVP_LEG_REFUSED);
	else if (connect_any(leg))
		leg_done(leg, KVP_LEG_FAILED);
}

void kvp_leg_start(struct kvp_leg *leg, struct kvp_leg_pool *p, const struct kvp_leg_cfg *cfg,
	const struct kvp_leg_ops *ops, void *ctx)
{
	*leg = (struct kvp_leg){.pool = p,
		.ops = ops,
		.ctx = ctx,
		.cfg = *cfg,
		.request = *cfg->request,
		.start_ns = kvp_loop_now_ns(p->loop),
		.ended_upload = cfg->upload == KVP_LEG_WHOLE,
		.running = 1};
	*cfg->request = (struct kvp_http_buf){0};
	leg->cfg.request = NULL;
	leg->cfg.host = NULL;
	int rc = KVP_OK;
	if (cfg->deadline_ns)
		rc = kvp_timer_set(p->loop, &leg->deadline, cfg->deadline_ns, on_deadline, leg);
	if (!rc && !cfg->to.cnt) {
		rc = kvp_name_find(&p->names, cfg->host, cfg->port, &leg->cfg.to, &leg->name, on_name, leg);
		if (rc == KVP_ERR_AGAIN) {
			gap_set(leg);
			return;
		}
	}
	if (rc || (rc = connect_any(leg)))
		fail_later(leg);
}

/* Before the connection is there, the upload is gathered behind the head; on one that was used before, also
 * after, for the retry. */
void kvp_leg_put(struct kvp_leg *leg, const char *data, uint64_t len)
{
	struct kvp_leg_conn *c = leg->conn;
	int sends = c && c->state == CONN_RUNNING, rc = KVP_OK;
	if (!leg->running || (c && c->out.failed))
		return;
	if (!sends || (c->reused && leg->request.len))
		rc = kvp_http_buf_put(&leg->request, data, len);
	if (!rc && sends)
		rc = conn_write(c, data, len);
	if (rc)
		fail_later(leg);
	else if (sends)
		gap_set(leg);
}

void kvp_leg_put_end(struct kvp_leg *leg)
{
	leg->ended_upload = 1;
	if (!leg->running)
		return;
	if (leg->conn && leg->conn->state == CONN_RUNNING)
		conn_uncork(leg->conn);
	gap_set(leg);
}

uint64_t kvp_leg_held(const struct kvp_leg *leg)
{
	const struct kvp_leg_conn *c = leg->conn;
	return !leg->running ? 0 : leg->request.len + (c ? kvp_out_len(&c->out) : 0);
}

uint64_t kvp_leg_unsent(const struct kvp_leg *leg)
{
	const struct kvp_leg_conn *c = leg->conn;
	return !leg->running ? 0 : c && c->state == CONN_RUNNING ? kvp_out_len(&c->out) : leg->request.len;
}

void kvp_leg_pause(struct kvp_leg *leg)
{
	if (!leg->running || leg->paused)
		return;
	leg->paused = 1;
	if (leg->conn && leg->conn->state == CONN_RUNNING)
		kvp_sock_recv_stop(&leg->conn->sock);
	gap_set(leg);
}

void kvp_leg_resume(struct kvp_leg *leg)
{
	if (!leg->running || !leg->paused)
		return;
	leg->paused = 0;
	if (leg->conn && leg->conn->state == CONN_RUNNING)
		kvp_sock_recv_start(&leg->conn->sock);
	gap_set(leg);
}

void kvp_leg_pool_end(struct kvp_leg_pool *p)
{
	while (p->idle)
		conn_close(p->idle);
	while (p->busy)
		conn_close(p->busy);
	kvp_names_end(&p->names);
}
