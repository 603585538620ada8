/* A kept connection that breaks: what is sent again on a new one, and what is not. Addresses that say
 * nothing: the next is tried. Over real sockets, on both loop back ends; the engine is this thread, too, so
 * it closes exactly when it shall. */
#include "ipc/leg.h"
#include "tests/http_util.h"

#include <sys/eventfd.h>

#define GOOD "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
#define SMALL 2000
#define LARGE 6000000 /* more than the kernel takes at once */

static struct kvp_leg_pool pool;
static struct kvp_leg leg;
static int listener = -1, old = -1, fresh = -1; /* the engine's ends */
static uint16_t port;
static uint64_t old_got, fresh_got, request_len;
static int done_cnt, done_end, done_status, pauses;
static uint64_t body_got;

static void on_head(void *ctx, struct kvp_leg *l)
{
	(void)ctx;
	done_status = l->status;
}

static void on_body(void *ctx, struct kvp_leg *l, const char *data, uint64_t len)
{
	(void)ctx;
	(void)data;
	body_got += len;
	if (pauses)
		kvp_leg_pause(l);
}

static void on_done(void *ctx, struct kvp_leg *l, enum kvp_leg_end end)
{
	(void)ctx;
	(void)l;
	done_cnt++;
	done_end = (int)end;
}

static const struct kvp_leg_ops ops = {.on_head = on_head, .on_body = on_body, .on_done = on_done};

static void ask(enum kvp_leg_repeat repeat, uint64_t len)
{
	struct kvp_http_buf b = {0};
	char head[128], *body = malloc(len);
	int n = snprintf(head, sizeof(head), "POST /v1 HTTP/1.1\r\nContent-Length: %llu\r\n\r\n",
		(unsigned long long)len);
	memset(body, 'b', len);
	kvp_http_buf_put(&b, head, (uint64_t)n);
	kvp_http_buf_put(&b, body, len);
	free(body);
	request_len = b.len;
	done_cnt = done_status = 0;
	struct kvp_leg_cfg cfg = {
		.port = port, .request = &b, .repeat = repeat, .connect_ns = WAIT_NS, .gap_ns = WAIT_NS};
	cfg.to.cnt = 1;
	kvp_addr_ip(&cfg.to.addr[0], "127.0.0.1", port);
	kvp_leg_start(&leg, &pool, &cfg, &ops, NULL);
}

static void engine_read(int fd, uint64_t *got)
{
	char buf[65536];
	ssize_t n = fd < 0 ? -1 : recv(fd, buf, sizeof(buf), MSG_DONTWAIT);
	if (n > 0)
		*got += (uint64_t)n;
}

static void engine_take(int *fd)
{
	if (*fd < 0)
		*fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
}

static void engine_close(int *fd)
{
	if (*fd >= 0)
		close(*fd);
	*fd = -1;
}

static void engine_reset(int *fd)
{
	struct linger lg = {.l_onoff = 1, .l_linger = 0};
	setsockopt(*fd, SOL_SOCKET, SO_LINGER, &lg, sizeof(lg));
	engine_close(fd);
}

/* A request that its engine has. */
static void begin(void)
{
	engine_close(&old);
	engine_close(&fresh);
	old_got = fresh_got = 0;
	ask(KVP_LEG_AGAIN, SMALL);
	UNTIL(old_got == request_len)
	{
		engine_take(&old);
		engine_read(old, &old_got);
	}
}

/* One answered request, and its connection kept. */
static void keep(void)
{
	begin();
	send(old, GOOD, sizeof(GOOD) - 1, MSG_NOSIGNAL);
	UNTIL(done_cnt);
	old_got = 0;
}

static void test_paused(void)
{
	begin();
	pauses = 1;
	body_got = 0;
	send(old, GOOD, sizeof(GOOD) - 2, MSG_NOSIGNAL); /* all but a byte */
	UNTIL(body_got);
	pauses = 0;
	ok(body_got == 1 && !leg.gap.pos, "%s: the silence of an engine that waits for us is not counted",
		be_name);
	kvp_leg_resume(&leg);
	ok(leg.gap.pos, "%s: when we go on it is", be_name);
	send(old, GOOD + sizeof(GOOD) - 2, 1, MSG_NOSIGNAL);
	UNTIL(done_cnt);
	ok(done_end == KVP_LEG_COMPLETE && body_got == 2 && !leg.gap.pos, "%s: the rest comes", be_name);
}

static void test_said_close(void)
{
	static const char last[] = "HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok";
	begin();
	uint64_t idle = pool.stat.idle, open = pool.stat.open;
	send(old, last, sizeof(last) - 1, MSG_NOSIGNAL);
	UNTIL(done_cnt);
	ok(done_end == KVP_LEG_COMPLETE && pool.stat.idle == idle && pool.stat.open == open - 1,
		"%s: a connection that its engine will close is not kept", be_name);
}

/* What the engine does with the kept connection, and when. The first comes before the call, the next before
 * a byte of it has left; the rest when it is there. */
enum when {
	CLOSED_BEFORE,
	CLOSES_IN_THE_GAP,
	RESETS_IN_THE_GAP,
	CLOSES_UNREAD,
	CLOSES_IN_THE_MIDDLE,
	ENDS_IN_THE_MIDDLE,
	CLOSES_BEHIND,
	RESETS_BEHIND,
	ANSWERS_A_BYTE
};

static void on_kept(enum when when)
{
	char b;
	if (when <= RESETS_IN_THE_GAP)
		return;
	uint64_t want = when == CLOSES_UNREAD ? 0 : when < CLOSES_BEHIND ? 100000 : request_len;
	UNTIL(old_got >= want)
	engine_read(old, &old_got);
	if (when == CLOSES_UNREAD)
		UNTIL(recv(old, &b, 1, MSG_PEEK | MSG_DONTWAIT) == 1);
	if (when == ANSWERS_A_BYTE)
		send(old, "H", 1, MSG_NOSIGNAL);
	if (when == ENDS_IN_THE_MIDDLE)
		shutdown(old, SHUT_WR);
	else if (when == RESETS_BEHIND)
		engine_reset(&old);
	else
		engine_close(&old);
}

/* The new connection answers, if there is one. */
static void until_done(void)
{
	int said = 0;
	UNTIL(done_cnt)
	{
		engine_take(&fresh);
		engine_read(fresh, &fresh_got);
		if (!said && fresh_got && fresh_got == request_len)
			said = send(fresh, GOOD, sizeof(GOOD) - 1, MSG_NOSIGNAL) > 0;
	}
	engine_take(&fresh);
}

static const struct {
	const char *what;
	enum when when;
	uint64_t len;
	int again[2]; /* repeated: as KVP_LEG_AGAIN, as KVP_LEG_ONCE */
	int stale;
} kinds[] = {{"closed before the call", CLOSED_BEFORE, SMALL, {0, 0}, 1},
	{"closed before a byte of the request left", CLOSES_IN_THE_GAP, SMALL, {1, 1}, 0},
	{"closed before a byte of a large request left", CLOSES_IN_THE_GAP, LARGE, {1, 1}, 0},
	{"reset before a byte of the request left", RESETS_IN_THE_GAP, SMALL, {1, 1}, 0},
	{"closed with the request unread", CLOSES_UNREAD, SMALL, {1, 0}, 0},
	{"closed while the request arrives", CLOSES_IN_THE_MIDDLE, LARGE, {1, 0}, 0},
	{"ended while the request arrives", ENDS_IN_THE_MIDDLE, LARGE, {1, 0}, 0},
	{"closed when the request was read", CLOSES_BEHIND, SMALL, {1, 0}, 0},
	{"closed when a large request was read", CLOSES_BEHIND, LARGE, {1, 0}, 0},
	{"reset when the request was read", RESETS_BEHIND, SMALL, {1, 0}, 0},
	{"closed when an answer had begun", ANSWERS_A_BYTE, SMALL, {0, 0}, 0}};

static void test_kind(unsigned i, enum kvp_leg_repeat repeat)
{
	const char *how = repeat == KVP_LEG_ONCE ? "once" : "again";
	int again = kinds[i].again[repeat], answered = again || kinds[i].stale;
	keep();
	uint64_t retried = pool.stat.retried, stale = pool.stat.stale, reused = pool.stat.reused,
		 unrepeated = pool.stat.unrepeated;
	if (kinds[i].when == CLOSED_BEFORE)
		engine_close(&old);
	ask(repeat, kinds[i].len);
	if (kinds[i].when == CLOSES_IN_THE_GAP)
		engine_close(&old);
	if (kinds[i].when == RESETS_IN_THE_GAP)
		engine_reset(&old);
	on_kept(kinds[i].when);
	until_done();
	ok(done_cnt == 1 && done_end == (answered ? KVP_LEG_COMPLETE : KVP_LEG_BROKEN) &&
			done_status == (answered ? 200 : 0),
		"%s: %s: %s: %s", be_name, how, kinds[i].what, answered ? "answered" : "broken");
	is_u64(pool.stat.retried - retried, again, "%s: %s: %s: repeated or not", be_name, how,
		kinds[i].what);
	ok((fresh >= 0) == answered, "%s: %s: %s: on a new connection, or none", be_name, how, kinds[i].what);
	int held_back = repeat == KVP_LEG_ONCE && !answered && kinds[i].when != ANSWERS_A_BYTE;
	is_u64(pool.stat.unrepeated - unrepeated, held_back, "%s: %s: %s: what is not repeated is counted",
		be_name, how, kinds[i].what);
	ok(pool.stat.stale - stale == (uint64_t)kinds[i].stale &&
			pool.stat.reused - reused == !kinds[i].stale,
		"%s: %s: %s: noticed before use, or not", be_name, how, kinds[i].what);
}

/* The new connection breaks as well. */
static void test_twice(enum kvp_leg_repeat repeat)
{
	keep();
	ask(repeat, SMALL);
	engine_close(&old);
	UNTIL(fresh_got == request_len || done_cnt)
	{
		engine_take(&fresh);
		engine_read(fresh, &fresh_got);
	}
	engine_close(&fresh);
	until_done();
	ok(done_cnt == 1 && done_end == KVP_LEG_BROKEN && fresh < 0, "%s: repeated only once", be_name);
}

/* Bytes that nobody asked for are in our hands when the call is made, and not seen yet: the call goes to a
 * new connection, and the old one gets nothing of it. */
static void call_now(void *ctx, int fd)
{
	uint64_t n;
	if (read(fd, &n, sizeof(n)) == (ssize_t)sizeof(n))
		ask(*(enum kvp_leg_repeat *)ctx, SMALL);
}

static void test_unasked(enum kvp_leg_repeat repeat)
{
	static const char said[] = "HTTP/1.1 408 Late\r\n\r\n";
	struct kvp_watch w;
	uint64_t one = 1;
	int fd = eventfd(0, EFD_CLOEXEC);
	keep();
	kvp_loop_watch_fd(loop, &w, fd, call_now, &repeat);
	pump();
	done_cnt = 0;
	if (write(fd, &one, sizeof(one)) < 0)
		printf("# eventfd: errno %d\n", errno);
	send(old, said, sizeof(said) - 1, MSG_NOSIGNAL);
	until_done();
	for (int i = 0; i < 10; i++) {
		pump();
		engine_read(old, &old_got);
	}
	ok(done_cnt == 1 && done_end == KVP_LEG_COMPLETE && done_status == 200,
		"%s: an answer that came before the call is not taken for its own", be_name);
	is_u64(old_got, 0, "%s: and nothing of the call goes to who sent it", be_name);
	is_u64(fresh_got, request_len, "%s: but all of it to a new connection", be_name);
	kvp_loop_unwatch(&w);
	close(fd);
}

/* The engine of the old connection takes the whole request and answers it. */
static void old_answers(void)
{
	UNTIL(done_cnt || old_got == request_len)
	{
		engine_take(&old);
		engine_read(old, &old_got);
	}
	if (old >= 0)
		send(old, GOOD, sizeof(GOOD) - 1, MSG_NOSIGNAL);
	UNTIL(done_cnt);
}

/* A port that answers no SYN: its queue is full. */
static int silent_port(int fd[8], uint16_t *silent)
{
	struct sockaddr_in sa = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
	socklen_t len = sizeof(sa);
	for (int i = 0; i < 8; i++)
		fd[i] = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	int rc = bind(fd[0], (struct sockaddr *)&sa, len) || listen(fd[0], 0) ||
		 getsockname(fd[0], (struct sockaddr *)&sa, &len);
	for (int i = 1; i < 8 && !rc; i++)
		if (connect(fd[i], (struct sockaddr *)&sa, len) && errno != EINPROGRESS)
			rc = -1;
	*silent = ntohs(sa.sin_port);
	return rc;
}

static void ask_two(uint16_t first, uint16_t second)
{
	struct kvp_http_buf b = {0};
	kvp_http_buf_text(&b, "GET / HTTP/1.1\r\n\r\n");
	request_len = b.len;
	done_cnt = done_status = 0;
	struct kvp_leg_cfg cfg = {.request = &b, .connect_ns = 50000000, .gap_ns = WAIT_NS, .to = {.cnt = 2}};
	kvp_addr_ip(&cfg.to.addr[0], "127.0.0.1", first);
	kvp_addr_ip(&cfg.to.addr[1], "127.0.0.1", second);
	kvp_leg_start(&leg, &pool, &cfg, &ops, NULL);
}

static void test_silent(void)
{
	int fd[8];
	uint16_t silent;
	engine_close(&old);
	engine_close(&fresh);
	for (int i = 0; i < 10; i++)
		pump(); /* what was kept is closed */
	ok(silent_port(fd, &silent) == 0, "%s: an address that says nothing", be_name);
	old_got = 0;
	ask_two(silent, port);
	old_answers();
	ok(done_end == KVP_LEG_COMPLETE && done_status == 200, "%s: the next one is tried, and answers",
		be_name);
	engine_close(&old);
	engine_close(&listener);
	for (int i = 0; i < 10; i++)
		pump();
	ask_two(silent, port);
	UNTIL(done_cnt);
	is_u64(done_end, KVP_LEG_CONNECT_TIMEOUT, "%s: when the next refuses, the silence is told", be_name);
	ask_two(port, silent);
	UNTIL(done_cnt);
	is_u64(done_end, KVP_LEG_CONNECT_TIMEOUT, "%s: also when the first refuses", be_name);
	ask_two(port, port);
	UNTIL(done_cnt);
	is_u64(done_end, KVP_LEG_REFUSED, "%s: two that refuse are no silence", be_name);
	for (int i = 0; i < 8; i++)
		close(fd[i]);
}

/* An address of a family that this host has not. */
static struct kvp_addr foreign(void)
{
	struct kvp_addr a = {.len = sizeof(struct sockaddr_in6)};
	a.ss.ss_family = AF_MAX + 1;
	return a;
}

/* The engine's address stands at `at` of three, foreign ones elsewhere, or nowhere (3). */
static void ask_three(uint32_t at)
{
	struct kvp_http_buf b = {0};
	kvp_http_buf_text(&b, "GET / HTTP/1.1\r\n\r\n");
	request_len = b.len;
	done_cnt = done_status = 0;
	struct kvp_leg_cfg cfg = {.request = &b, .connect_ns = WAIT_NS, .gap_ns = WAIT_NS, .to = {.cnt = 3}};
	for (uint32_t i = 0; i < 3; i++)
		cfg.to.addr[i] = foreign();
	if (at < 3)
		kvp_addr_ip(&cfg.to.addr[at], "127.0.0.1", port);
	kvp_leg_start(&leg, &pool, &cfg, &ops, NULL);
}

static void test_foreign(void)
{
	engine_close(&old);
	engine_close(&fresh);
	for (int i = 0; i < 10; i++)
		pump(); /* what was kept is closed */
	for (uint32_t at = 0; at < 3; at++) {
		old_got = 0;
		ask_three(at);
		old_answers();
		ok(done_end == KVP_LEG_COMPLETE && done_status == 200,
			"%s: addresses of a family that is not there are passed over, %u", be_name, at);
		engine_close(&old);
		for (int i = 0; i < 10; i++)
			pump(); /* what was kept is closed */
	}
	ask_three(3);
	UNTIL(done_cnt);
	ok(done_end == KVP_LEG_FAILED && leg.sys == EAFNOSUPPORT, "%s: with no other there is no connection",
		be_name);
}

static void run(enum kvp_loop_backend be, const char *name)
{
	struct sockaddr_in sa = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
	socklen_t len = sizeof(sa);
	be_name = name;
	ok(kvp_loop_open_backend(&loop, 0, be) == KVP_OK, "%s: a loop", name);
	listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	ok(bind(listener, (struct sockaddr *)&sa, len) == 0 && listen(listener, 16) == 0 &&
			getsockname(listener, (struct sockaddr *)&sa, &len) == 0,
		"%s: an engine", name);
	port = ntohs(sa.sin_port);
	pool = (struct kvp_leg_pool){.loop = loop,
		.idle_max = 4,
		.idle_ms = 60000,
		.head_max_bytes = 65536,
		.names = {.loop = loop}};
	for (enum kvp_leg_repeat repeat = KVP_LEG_AGAIN; repeat <= KVP_LEG_ONCE; repeat++) {
		for (unsigned i = 0; i < sizeof(kinds) / sizeof(kinds[0]); i++)
			test_kind(i, repeat);
		test_twice(repeat);
		test_unasked(repeat);
	}
	test_paused();
	test_said_close();
	test_foreign();
	test_silent();
	engine_close(&fresh);
	kvp_leg_pool_end(&pool);
	kvp_loop_close(loop);
}

int main(void)
{
	kvp_http_parse_init();
	return on_each_backend(run);
}
