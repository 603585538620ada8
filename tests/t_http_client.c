/* The HTTP client over real sockets, on both loop back ends: against our server, and against scripted
 * peers. */
#include "ipc/http_client.h"
#include "tests/http_util.h"

static struct kvp_http_client *cl;

struct seen {
	int heads, head_status, done, status, err, sys;
	uint64_t body_len, body_cap;
	char *body;
	char type[32];
	int cancel_at_head, cancel_at_body, pause_at_body;
	struct kvp_http_call *call;
};

static void on_head(void *ctx, struct kvp_http_call *c, int status)
{
	struct seen *s = ctx;
	uint32_t len = 0;
	const char *t = kvp_http_call_header(c, "content-type", &len);
	s->heads++;
	s->head_status = status;
	if (t && len < sizeof(s->type))
		memcpy(s->type, t, len);
	if (s->cancel_at_head)
		kvp_http_call_cancel(c);
}

static void on_body(void *ctx, struct kvp_http_call *c, const char *data, uint64_t len)
{
	struct seen *s = ctx;
	if (s->body_len + len >= s->body_cap) {
		s->body_cap = 2 * (s->body_len + len) + 1;
		s->body = realloc(s->body, s->body_cap);
	}
	memcpy(s->body + s->body_len, data, len);
	s->body_len += len;
	s->body[s->body_len] = 0;
	if (s->cancel_at_body)
		kvp_http_call_cancel(c);
	else if (s->pause_at_body)
		kvp_http_call_pause(c);
}

static void on_done(void *ctx, struct kvp_http_call *c, int status, int err)
{
	struct seen *s = ctx;
	s->sys = errno;
	s->done++;
	s->status = status;
	s->err = err;
	kvp_http_call_cancel(c); /* allowed, does nothing */
}

static struct kvp_http_call_cfg to(const char *host, uint16_t port, const char *path, struct seen *s)
{
	memset(s, 0, sizeof(*s));
	return (struct kvp_http_call_cfg){.host = host,
		.port = port,
		.path = path,
		.on_head = on_head,
		.on_body = on_body,
		.on_done = on_done,
		.ctx = s,
		.timeout_ns = WAIT_NS};
}

static int call(const struct kvp_http_call_cfg *cfg, struct seen *s)
{
	int rc = kvp_http_call(cl, cfg, &s->call);
	if (rc) {
		s->err = rc;
		return rc;
	}
	if (s->done)
		s->done = 100; /* inside the call: not allowed */
	UNTIL(s->done);
	return s->err;
}

static void seen_free(struct seen *s)
{
	free(s->body);
	s->body = NULL;
	s->body_cap = 0;
}

static void test_server_calls(void)
{
	uint16_t port = kvp_http_server_port(srv);
	struct seen s;
	struct kvp_http_call_cfg cfg = to("127.0.0.1", port, "/e?x", &s);
	const struct kvp_leg_stat *st = kvp_http_client_stat(cl);
	is_u64(call(&cfg, &s), KVP_OK, "%s: GET", be_name);
	ok(s.heads == 1 && s.status == 200 && s.done == 1, "%s: one head, one end", be_name);
	is_str(s.body, "GET /e ?x ", "%s: the body is right", be_name);
	is_str(s.type, "text/plain", "%s: so are header fields", be_name);
	seen_free(&s);
	uint64_t connects = st->connects;
	cfg = to("127.0.0.1", port, "/e", &s);
	cfg.method = "POST";
	cfg.headers = "Content-Type: a/b\r\n";
	char *big = malloc(3 << 20);
	memset(big, 'q', 3 << 20);
	cfg.body = big;
	cfg.len = 3 << 20;
	is_u64(call(&cfg, &s), KVP_OK, "%s: POST of 3 MiB", be_name);
	ok(s.body_len == (3u << 20) + 12 && memcmp(s.body, "POST /e a/b q", 13) == 0, "%s: comes back",
		be_name);
	is_u64(st->connects, connects, "%s: on the pooled connection", be_name);
	seen_free(&s);
	cfg = to("127.0.0.1", port, "/e", &s);
	cfg.method = "POST";
	cfg.body = big;
	cfg.len = 100000;
	cfg.body_max_bytes = 100008;
	is_u64(call(&cfg, &s), KVP_OK, "%s: a response of exactly the cap", be_name);
	seen_free(&s);
	cfg.body_max_bytes = 100007;
	memset(&s, 0, sizeof(s));
	ok(call(&cfg, &s) == KVP_ERR_LIMIT && s.done == 1, "%s: one byte more is LIMIT", be_name);
	seen_free(&s);
	free(big);
	cfg = to("127.0.0.1", port, "/e", &s);
	cfg.method = "HEAD";
	ok(call(&cfg, &s) == KVP_OK && s.status == 200 && s.body_len == 0, "%s: HEAD has no body", be_name);
	cfg = to("127.0.0.1", port, "/204", &s);
	ok(call(&cfg, &s) == KVP_OK && s.status == 204 && s.body_len == 0, "%s: nor has 204", be_name);
	cfg = to("127.0.0.1", port, "/302", &s);
	ok(call(&cfg, &s) == KVP_OK && s.status == 302, "%s: a redirect is a response like others", be_name);
	stream_left = 5000000;
	cfg = to("127.0.0.1", port, "/stream", &s);
	ok(call(&cfg, &s) == KVP_OK && s.body_len == 5000000, "%s: a chunked response of 5 MB", be_name);
	seen_free(&s);
	stream_left = 5000000;
	cfg = to("127.0.0.1", port, "/stream", &s);
	cfg.body_max_bytes = 4000000;
	ok(call(&cfg, &s) == KVP_ERR_LIMIT, "%s: the cap counts chunked bodies, too", be_name);
	seen_free(&s);
	UNTIL(kvp_http_server_stat(srv)->open == 0 || st->open == kvp_http_server_stat(srv)->open);
	cfg = to("127.0.0.1", port, "/abort", &s);
	ok(call(&cfg, &s) == KVP_ERR_CLOSED && s.status == 0 && s.done == 1, "%s: no answer is CLOSED",
		be_name);
}

static void test_time_and_cancel(void)
{
	uint16_t port = kvp_http_server_port(srv);
	struct seen s;
	struct kvp_http_call_cfg cfg = to("127.0.0.1", port, "/hold", &s);
	uint64_t t;
	int rc;
	held_cnt = aborts = 0;
	cfg.timeout_ns = 30000000;
	do { /* a busy machine may let the time pass before the server has the request */
		t = kvp_loop_now_ns(loop);
		rc = call(&cfg, &s);
		t = kvp_loop_now_ns(loop) - t;
	} while (rc == KVP_ERR_TIMEOUT && !held_cnt);
	is_u64(-rc, -KVP_ERR_TIMEOUT, "%s: the deadline ends a call", be_name);
	ok(t >= 30000000, "%s: not early", be_name);
	UNTIL(aborts == held_cnt);
	is_u64(aborts, held_cnt, "%s: and closes its connection", be_name);
	cfg = to("127.0.0.1", port, "/hold", &s);
	ok(kvp_http_call(cl, &cfg, &s.call) == KVP_OK, "%s: a call to cancel", be_name);
	unsigned before = held_cnt;
	UNTIL(held_cnt > before);
	kvp_http_call_cancel(s.call);
	UNTIL(aborts == held_cnt);
	ok(held_cnt > before && aborts == held_cnt && !s.done,
		"%s: cancel closes the connection and says nothing", be_name);
	cfg = to("127.0.0.1", port, "/e", &s);
	ok(kvp_http_call(cl, &cfg, &s.call) == KVP_OK, "%s: cancelled while it connects", be_name);
	kvp_http_call_cancel(s.call);
	cfg = to("127.0.0.1", port, "/e", &s);
	s.cancel_at_head = 1;
	kvp_http_call(cl, &cfg, &s.call);
	UNTIL(s.heads);
	for (int i = 0; i < 10; i++)
		pump();
	ok(s.heads == 1 && !s.body_len && !s.done, "%s: cancelled in on_head: nothing more", be_name);
	stream_left = 400000;
	cfg = to("127.0.0.1", port, "/stream", &s);
	s.cancel_at_body = 1;
	kvp_http_call(cl, &cfg, &s.call);
	UNTIL(s.body_len);
	uint64_t had = s.body_len;
	for (int i = 0; i < 10; i++)
		pump();
	ok(s.body_len == had && !s.done, "%s: cancelled in on_body: nothing more", be_name);
	seen_free(&s);
	stream_left = 0;
	UNTIL(kvp_http_client_stat(cl)->open == kvp_http_server_stat(srv)->open);
	stream_left = 20000000;
	cfg = to("127.0.0.1", port, "/stream", &s);
	s.pause_at_body = 1;
	kvp_http_call(cl, &cfg, &s.call);
	UNTIL(s.body_len);
	for (int i = 0; i < 40; i++)
		pump();
	ok(s.body_len <= 3 * KVP_LOOP_RECV_BYTES && stream_left, "%s: a paused call stops its server",
		be_name);
	s.pause_at_body = 0;
	kvp_http_call_resume(s.call);
	UNTIL(s.done);
	ok(s.done == 1 && s.err == KVP_OK && s.body_len == 20000000, "%s: and gets all of it when it goes on",
		be_name);
	seen_free(&s);
}

/* A peer that reads a request up to its empty line and answers with the next text of a script. */
enum then { THEN_KEEP, THEN_CLOSE, THEN_RESET };
struct act {
	const char *say;
	enum then then;
};
struct peer_conn {
	struct kvp_sock s;
	char buf[8192];
	size_t len;
};
static const struct act *script;
static int script_at, peers, peer_bytes_after;
static struct kvp_listener pl;
static struct peer_conn pc[64];

static void p_sent(void *ctx, struct kvp_sock *s, char *buf, int err)
{
	(void)ctx;
	(void)s;
	(void)err;
	free(buf);
	const struct act *a = &script[script_at - 1];
	if (a->then == THEN_CLOSE)
		kvp_sock_close(s);
	else if (a->then == THEN_RESET)
		kvp_sock_reset(s);
}

static void p_recv(void *ctx, struct kvp_sock *s, const char *data, int64_t len)
{
	struct peer_conn *p = ctx;
	if (len <= 0) {
		kvp_sock_close(s);
		return;
	}
	size_t n = (size_t)len < sizeof(p->buf) - p->len ? (size_t)len : sizeof(p->buf) - p->len;
	memcpy(p->buf + p->len, data, n);
	p->len += n;
	if (!memmem(p->buf, p->len, "\r\n\r\n", 4))
		return;
	p->len = 0;
	const struct act *a = &script[script_at++];
	if (a->say && *a->say) {
		char *out = strdup(a->say);
		kvp_sock_send(s, out, 0, strlen(out));
	} else if (a->then == THEN_CLOSE) {
		kvp_sock_close(s);
	} else if (a->then == THEN_RESET) {
		kvp_sock_reset(s);
	}
}
static const struct kvp_sock_ops p_ops = {.on_recv = p_recv, .on_sent = p_sent};

static void p_accept(void *ctx, int fd)
{
	struct peer_conn *p = &pc[peers++ % 64];
	(void)ctx;
	if (p->s.loop)
		kvp_sock_close(&p->s);
	memset(p, 0, sizeof(*p));
	kvp_sock_open(loop, &p->s, fd, &p_ops, p);
	kvp_sock_recv_start(&p->s);
}

static void script_set(const struct act *a)
{
	script = a;
	script_at = peers = 0;
	peer_bytes_after = 0;
}

struct answer {
	const char *name, *say, *body;
	enum then then;
	int err, status;
};
static const struct answer answers[] = {
	{"until close", "HTTP/1.1 200 OK\r\n\r\nhello", "hello", THEN_CLOSE, KVP_OK, 200},
	{"until reset", "HTTP/1.1 200 OK\r\n\r\nhello", NULL, THEN_RESET, KVP_ERR_CLOSED, 200},
	{"length", "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", "hello", THEN_KEEP, KVP_OK, 200},
	{"no reason phrase", "HTTP/1.1 200\r\nContent-Length: 2\r\n\r\nok", "ok", THEN_KEEP, KVP_OK, 200},
	{"HTTP/1.0", "HTTP/1.0 404 No\r\nContent-Length: 2\r\n\r\nok", "ok", THEN_CLOSE, KVP_OK, 404},
	{"short body", "HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nhello", "hello", THEN_CLOSE,
		KVP_ERR_CLOSED, 200},
	{"bytes too many", "HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nhello", "hell", THEN_KEEP, KVP_OK,
		200},
	{"chunked",
		"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n3;x\r\nllo\r\n0\r\nT: "
		"1\r\n\r\n",
		"hello", THEN_KEEP, KVP_OK, 200},
	{"chunked, cut", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n", "he", THEN_CLOSE,
		KVP_ERR_CLOSED, 200},
	{"bad chunk", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", NULL, THEN_KEEP,
		KVP_ERR_PROTO, 200},
	{"interim answers",
		"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Hints\r\nA: b\r\n\r\n"
		"HTTP/1.1 201 Created\r\nContent-Length: 1\r\n\r\nx",
		"x", THEN_KEEP, KVP_OK, 201},
	{"switching", "HTTP/1.1 101 Switching\r\n\r\n", NULL, THEN_KEEP, KVP_ERR_PROTO, 0},
	{"304 with length", "HTTP/1.1 304 Not Modified\r\nContent-Length: 99\r\n\r\n", NULL, THEN_KEEP,
		KVP_OK, 304},
	{"two lengths", "HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 5\r\n\r\nhello", NULL,
		THEN_KEEP, KVP_ERR_PROTO, 0},
	{"length and chunked",
		"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n", NULL,
		THEN_KEEP, KVP_ERR_PROTO, 0},
	{"foreign coding", "HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\nxx", NULL, THEN_CLOSE,
		KVP_ERR_PROTO, 0},
	{"garbage", "SSH-2.0-OpenSSH_9\r\n\r\n", NULL, THEN_KEEP, KVP_ERR_PROTO, 0},
	{"binary garbage", "\x15\x03\x01", NULL, THEN_KEEP, KVP_ERR_PROTO, 0},
	{"bare LF", "HTTP/1.1 200 OK\nContent-Length: 1\n\nx", NULL, THEN_KEEP, KVP_ERR_PROTO, 0},
	{"status 0", "HTTP/1.1 099 No\r\nContent-Length: 0\r\n\r\n", NULL, THEN_KEEP, KVP_ERR_PROTO, 0},
	{"HTTP/2", "HTTP/2.0 200 OK\r\nContent-Length: 0\r\n\r\n", NULL, THEN_KEEP, KVP_ERR_PROTO, 0},
	{"cut head", "HTTP/1.1 200 OK\r\nContent-Len", NULL, THEN_CLOSE, KVP_ERR_CLOSED, 0},
	{"nothing", "", NULL, THEN_CLOSE, KVP_ERR_CLOSED, 0},
};

static void test_answers(void)
{
	struct kvp_http_client_cfg no_pool = {.head_max_bytes = 2000};
	struct kvp_http_client *pool = cl;
	for (size_t i = 0; i < sizeof(answers) / sizeof(answers[0]); i++) {
		const struct answer *a = &answers[i];
		struct act acts[2] = {{a->say, a->then}, {"", THEN_CLOSE}};
		struct seen s;
		kvp_http_client_open(loop, &no_pool, &cl); /* every answer meets a fresh connection */
		struct kvp_http_call_cfg cfg = to("127.0.0.1", pl.port, "/", &s);
		script_set(acts);
		call(&cfg, &s);
		ok(s.done == 1 && s.err == a->err && s.status == a->status, "%s: %s: %s, status %d", be_name,
			a->name, kvp_strerror(a->err), a->status);
		if (s.err != a->err || s.status != a->status)
			printf("# err %d status %d\n", s.err, s.status);
		if (a->err == KVP_OK || a->body)
			is_str(s.body ? s.body : "", a->body ? a->body : "", "%s: %s: body", be_name,
				a->name);
		is_u64(peers, 1, "%s: %s: nothing is repeated", be_name, a->name);
		seen_free(&s);
		kvp_http_client_close(cl);
	}
	char *longish = malloc(5000);
	memset(longish, 'h', 5000);
	memcpy(longish, "HTTP/1.1 200 OK\r\nX: ", 20);
	longish[4999] = 0;
	struct act acts[2] = {{longish, THEN_KEEP}, {"", THEN_CLOSE}};
	struct seen s;
	kvp_http_client_open(loop, &no_pool, &cl);
	struct kvp_http_call_cfg cfg = to("127.0.0.1", pl.port, "/", &s);
	script_set(acts);
	is_u64(-call(&cfg, &s), -KVP_ERR_LIMIT, "%s: a head over the limit is LIMIT", be_name);
	kvp_http_client_close(cl);
	free(longish);
	cl = pool;
}

#define GOOD "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
static void test_pool(void)
{
	const struct kvp_leg_stat *st;
	struct kvp_http_client *old = cl;
	struct seen s;
	kvp_http_client_open(loop, NULL, &cl);
	st = kvp_http_client_stat(cl);
	/* answered, then closed while idle: noticed before the next call */
	static const struct act closes[] = {{GOOD, THEN_CLOSE}, {GOOD, THEN_KEEP}};
	script_set(closes);
	struct kvp_http_call_cfg cfg = to("127.0.0.1", pl.port, "/", &s);
	cfg.method = "POST";
	call(&cfg, &s);
	seen_free(&s);
	UNTIL(st->stale == 1);
	ok(st->stale == 1 && st->idle == 0, "%s: a pooled connection that its server closed is noticed",
		be_name);
	cfg.ctx = &s;
	memset(&s, 0, sizeof(s));
	ok(call(&cfg, &s) == KVP_OK && st->retried == 0 && peers == 2, "%s: and not used", be_name);
	seen_free(&s);
	/* dies when it gets the next request, before a byte of the answer: once again */
	static const struct act dies[] = {{"", THEN_RESET}, {GOOD, THEN_KEEP}};
	script = dies;
	script_at = 0;
	memset(&s, 0, sizeof(s));
	ok(call(&cfg, &s) == KVP_OK && s.done == 1 && s.status == 200,
		"%s: a reused one that dies is replaced", be_name);
	ok(st->retried == 1 && peers == 3, "%s: by one fresh connection", be_name);
	seen_free(&s);
	/* and again: the fresh one fails as well */
	static const struct act twice[] = {{"", THEN_CLOSE}, {"", THEN_CLOSE}, {GOOD, THEN_KEEP}};
	script = twice;
	script_at = 0;
	memset(&s, 0, sizeof(s));
	ok(call(&cfg, &s) == KVP_ERR_CLOSED && script_at == 2, "%s: once only", be_name);
	/* a byte of the answer came: not repeated */
	static const struct act byte[] = {{GOOD, THEN_KEEP}, {"H", THEN_CLOSE}, {GOOD, THEN_KEEP}};
	script_set(byte);
	memset(&s, 0, sizeof(s));
	call(&cfg, &s);
	seen_free(&s);
	memset(&s, 0, sizeof(s));
	ok(call(&cfg, &s) == KVP_ERR_CLOSED && script_at == 2 && st->reused > 0,
		"%s: nothing is repeated once an answer began", be_name);
	/* bytes nobody asked for */
	static const struct act chatty[] = {{GOOD GOOD, THEN_KEEP}, {GOOD, THEN_KEEP}};
	script_set(chatty);
	memset(&s, 0, sizeof(s));
	call(&cfg, &s);
	seen_free(&s);
	ok(st->idle == 0, "%s: a connection with bytes behind the answer is not kept", be_name);
	/* closed just now: the loop has not heard of it, a look before use has */
	static const struct act again[] = {{GOOD, THEN_KEEP}, {GOOD, THEN_KEEP}};
	script_set(again);
	memset(&s, 0, sizeof(s));
	call(&cfg, &s);
	seen_free(&s);
	uint64_t before = st->stale, retried = st->retried;
	shutdown(pc[(peers - 1) % 64].s.fd, SHUT_RDWR);
	memset(&s, 0, sizeof(s));
	ok(call(&cfg, &s) == KVP_OK && st->stale == before + 1 && st->retried == retried,
		"%s: a pooled connection that was closed in this turn is not used either", be_name);
	seen_free(&s);
	kvp_http_client_close(cl);
	kvp_http_client_open(loop, NULL, &cl);
	st = kvp_http_client_stat(cl);
	script_set(again);
	/* a peer that speaks while it is idle */
	memset(&s, 0, sizeof(s));
	call(&cfg, &s);
	seen_free(&s);
	ok(st->idle == 1, "%s: one in the pool", be_name);
	uint64_t stale = st->stale;
	send(pc[(peers - 1) % 64].s.fd, "HTTP/1.1 408 x\r\n\r\n", 18, 0);
	UNTIL(st->stale > stale);
	ok(st->idle == 0 && st->stale == stale + 1, "%s: an idle connection that speaks is closed", be_name);
	kvp_http_client_close(cl);
	cl = old;
}

static void test_caps(void)
{
	struct kvp_http_client_cfg cc = {.conn_max = 3, .idle_max = 2, .idle_ms = 50};
	struct kvp_http_client *old = cl;
	struct seen s[4];
	uint16_t port = kvp_http_server_port(srv);
	kvp_http_client_open(loop, &cc, &cl);
	const struct kvp_leg_stat *st = kvp_http_client_stat(cl);
	held_cnt = 0;
	for (int i = 0; i < 3; i++) {
		struct kvp_http_call_cfg cfg = to("127.0.0.1", port, "/hold", &s[i]);
		ok(kvp_http_call(cl, &cfg, NULL) == KVP_OK, "%s: call %d", be_name, i);
	}
	struct kvp_http_call_cfg cfg = to("127.0.0.1", port, "/e", &s[3]);
	ok(kvp_http_call(cl, &cfg, NULL) == KVP_ERR_FULL, "%s: one over conn_max is FULL", be_name);
	UNTIL(held_cnt == 3);
	for (int i = 0; i < 3; i++)
		kvp_http_reply(held[i], 200, "text/plain", "x", 1);
	UNTIL(s[0].done && s[1].done && s[2].done);
	ok(st->idle == 2 && st->open == 2, "%s: idle_max are kept", be_name);
	UNTIL(st->idle == 0);
	is_u64(st->open, 0, "%s: and closed after idle_ms", be_name);
	for (int i = 0; i < 3; i++)
		seen_free(&s[i]);
	kvp_http_client_close(cl);
	cl = old;
}

static void test_addresses(void)
{
	struct seen s;
	struct kvp_http_call_cfg cfg = to("localhost", 1, "/", &s);
	ok(kvp_http_call(cl, &cfg, NULL) == KVP_ERR_INVAL, "%s: names are refused", be_name);
	cfg = to("127.0.0.1", 1, "/a b", &s);
	ok(kvp_http_call(cl, &cfg, NULL) == KVP_ERR_INVAL, "%s: a space in the path", be_name);
	cfg = to("127.0.0.1", 1, "/a\r\nX: y", &s);
	ok(kvp_http_call(cl, &cfg, NULL) == KVP_ERR_INVAL, "%s: a line break in the path", be_name);
	cfg = to("127.0.0.1", 1, "/", &s);
	cfg.headers = "A: b\r\n\r\nGET / HTTP/1.1\r\n";
	ok(kvp_http_call(cl, &cfg, NULL) == KVP_ERR_INVAL, "%s: an empty line in the fields", be_name);
	cfg.headers = "A: b";
	ok(kvp_http_call(cl, &cfg, NULL) == KVP_ERR_INVAL, "%s: a field without its end", be_name);
	cfg.headers = "A: b\nC: d\r\n";
	ok(kvp_http_call(cl, &cfg, NULL) == KVP_ERR_INVAL, "%s: a bare LF", be_name);
	struct kvp_listener gone;
	kvp_loop_listen(loop, &gone, "127.0.0.1", 0, KVP_LISTEN_PLAIN, p_accept, NULL);
	cfg = to("127.0.0.1", gone.port, "/", &s);
	kvp_listener_close(&gone, KVP_LISTENER_DROP);
	for (int i = 0; i < 3; i++)
		pump();
	ok(call(&cfg, &s) == KVP_ERR_SYS && s.sys == ECONNREFUSED, "%s: nobody listens: SYS with errno",
		be_name);
	char path[64], host[80];
	struct kvp_addr a;
	static const struct act good[] = {{GOOD, THEN_KEEP}, {GOOD, THEN_KEEP}};
	snprintf(path, sizeof(path), "/tmp/kvp-t-http-%d", (int)getpid());
	snprintf(host, sizeof(host), "unix:%s", path);
	kvp_addr_unix(&a, path);
	script_set(good);
	ok(kvp_loop_listen_addr(loop, &gone, &a, 0, p_accept, NULL) == KVP_OK, "%s: a unix socket", be_name);
	cfg = to(host, 0, "/", &s);
	ok(call(&cfg, &s) == KVP_OK && s.status == 200, "%s: a call over it", be_name);
	seen_free(&s);
	kvp_listener_close(&gone, KVP_LISTENER_DROP);
	unlink(path);
	struct kvp_listener six;
	if (kvp_loop_listen(loop, &six, "::1", 0, KVP_LISTEN_PLAIN, p_accept, NULL) == KVP_OK) {
		script_set(good);
		cfg = to("[::1]", six.port, "/", &s);
		ok(call(&cfg, &s) == KVP_OK && s.status == 200, "%s: a call over IPv6", be_name);
		seen_free(&s);
		kvp_listener_close(&six, KVP_LISTENER_DROP);
	}
}

static void run(enum kvp_loop_backend be, const char *name)
{
	struct kvp_http_server_cfg cfg = {
		.ip = "127.0.0.1", .linger_ms = 500, .on_request = on_request, .on_abort = on_abort};
	be_name = name;
	if (!ok(kvp_loop_open_backend(&loop, 0, be) == KVP_OK, "%s: loop", name))
		return;
	ok(kvp_http_server_open(loop, &cfg, &srv) == KVP_OK, "%s: server", name);
	ok(kvp_http_client_open(loop, NULL, &cl) == KVP_OK, "%s: client", name);
	ok(kvp_loop_listen(loop, &pl, "127.0.0.1", 0, KVP_LISTEN_PLAIN, p_accept, NULL) == KVP_OK, "%s: peer",
		name);
	test_server_calls();
	test_time_and_cancel();
	test_answers();
	test_pool();
	test_caps();
	test_addresses();
	/* closing with a call under way */
	struct seen s;
	struct kvp_http_call_cfg last = to("127.0.0.1", kvp_http_server_port(srv), "/hold", &s);
	held_cnt = 0;
	kvp_http_call(cl, &last, NULL);
	UNTIL(held_cnt == 1);
	kvp_http_client_close(cl);
	ok(!s.done, "%s: closing the client ends its calls without callbacks", name);
	for (int i = 0; i < 64; i++)
		kvp_sock_close(&pc[i].s);
	memset(pc, 0, sizeof(pc));
	kvp_listener_close(&pl, KVP_LISTENER_DROP);
	kvp_http_server_close(srv);
	kvp_loop_close(loop);
}

int main(void)
{
	return on_each_backend(run);
}
