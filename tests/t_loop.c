/* The event loop on both back ends: sockets, timers, watches, deferred calls, teardown. */
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>
#include <kvpick/err.h>
#include "ipc/loop.h"
#include "tests/tap.h"

#define WAIT_NS UINT64_C(10000000000)

static struct kvp_loop *loop;
static const char *be_name;

/* Turns the loop until *flag reaches want, ten seconds at most. */
static int until(const int *flag, int want)
{
	uint64_t end = kvp_loop_now_ns(loop) + WAIT_NS;
	while (*flag < want && kvp_loop_now_ns(loop) < end)
		if (kvp_loop_run_once(loop, 100000000) < 0)
			return 0;
	return *flag >= want;
}

static void turns(int n)
{
	while (n--)
		kvp_loop_run_once(loop, 0);
}

static void count(void *ctx)
{
	++*(int *)ctx;
}

/* Timers. */

struct tm_test {
	struct kvp_timer t;
	int id;
};
static int fired[64], fired_cnt;

static void on_timer(void *ctx, struct kvp_timer *t)
{
	(void)t;
	fired[fired_cnt++] = ((struct tm_test *)ctx)->id;
}

static void test_timers(void)
{
	static struct tm_test t[40];
	uint64_t now = kvp_loop_now_ns(loop);
	memset(t, 0, sizeof(t));
	fired_cnt = 0;
	for (int i = 0; i < 40; i++) {
		t[i].id = i;
		/* 7 is coprime to 40: every order of insertion, deadlines 0.1 ms apart */
		kvp_timer_set(
			loop, &t[i].t, now + 1000000 + (uint64_t)(i * 7 % 40) * 100000, on_timer, &t[i]);
	}
	kvp_timer_cancel(loop, &t[3].t);
	kvp_timer_cancel(loop, &t[3].t);
	kvp_timer_set(loop, &t[5].t, now + 9000000, on_timer, &t[5]); /* later: last */
	kvp_timer_set(loop, &t[9].t, now + 500000, on_timer, &t[9]);  /* earlier: first */
	until(&fired_cnt, 39);
	is_u64(fired_cnt, 39, "%s: cancelled timers do not fire, the others fire once", be_name);
	is_u64(fired[0], 9, "%s: a timer moved to an earlier time fires first", be_name);
	is_u64(fired[38], 5, "%s: a timer moved to a later time fires last", be_name);
	int sorted = 1;
	for (int i = 2; i < 38; i++)
		sorted &= fired[i] * 7 % 40 > fired[i - 1] * 7 % 40;
	ok(sorted, "%s: timers fire in order of their deadlines", be_name);
	ok(kvp_loop_now_ns(loop) >= now + 9000000, "%s: no timer fires early", be_name);
}

/* Deferred calls. */

static struct kvp_defer d1, d2, d3;
static int d_log[8], d_cnt;
static void d_third(void *ctx)
{
	(void)ctx;
	d_log[d_cnt++] = 3;
}
static void d_first(void *ctx)
{
	(void)ctx;
	d_log[d_cnt++] = 1;
	kvp_loop_defer_cancel(&d2);
	kvp_loop_defer(loop, &d3, d_third, NULL);
}

static int sleep_calls, sleep_work;
static int on_sleep(void *ctx)
{
	(void)ctx;
	sleep_calls++;
	return sleep_work-- > 0;
}

static void test_defer(void)
{
	static int n;
	d_cnt = 0;
	kvp_loop_defer(loop, &d1, d_first, NULL);
	kvp_loop_defer(loop, &d1, d_first, NULL);
	kvp_loop_defer(loop, &d2, count, &n);
	turns(1);
	ok(d_cnt == 2 && d_log[0] == 1 && d_log[1] == 3 && n == 0,
		"%s: deferred calls run once, in order, also those set meanwhile, not the cancelled",
		be_name);
	kvp_loop_defer(loop, &d2, count, &n);
	kvp_loop_defer_cancel(&d2);
	kvp_loop_defer(loop, &d3, d_third, NULL);
	turns(1);
	is_u64(d_cnt, 3, "%s: the list is whole after its last element was cancelled", be_name);
	sleep_calls = 0;
	sleep_work = 1;
	kvp_loop_before_sleep(loop, on_sleep, NULL);
	kvp_loop_run_once(loop, KVP_LOOP_FOREVER); /* returns only because the hook found work */
	ok(sleep_calls == 1, "%s: the hook before sleeping can keep the loop from blocking", be_name);
	kvp_loop_before_sleep(loop, NULL, NULL);
}

/* Watches. */

static int woken;
static struct kvp_watch w;
static void on_wake(void *ctx, int fd)
{
	uint64_t v;
	(void)ctx;
	woken++;
	if (read(fd, &v, sizeof(v)) != sizeof(v))
		woken += 1000;
}

static void test_watch(void)
{
	uint64_t one = 1;
	int fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	woken = 0;
	is_u64(kvp_loop_watch_fd(loop, &w, fd, on_wake, NULL), KVP_OK, "%s: an eventfd can be watched",
		be_name);
	turns(3);
	is_u64(woken, 0, "%s: no call while it is not readable", be_name);
	for (int i = 1; i <= 3; i++) {
		ok(write(fd, &one, 8) == 8 && until(&woken, i) && woken == i, "%s: wake-up %d arrives once",
			be_name, i);
		turns(2);
	}
	ok(write(fd, &one, 8) == 8, "%s: written again", be_name);
	kvp_loop_unwatch(&w);
	kvp_loop_unwatch(&w);
	memset(&w, 0xa5, sizeof(w)); /* the loop must not look at it any more */
	close(fd);
	turns(3);
	is_u64(woken, 3, "%s: no call after unwatch, though it was readable", be_name);
	w.loop = NULL;
}

/* Sockets. */

struct end {
	struct kvp_sock s;
	char *got;
	uint64_t got_cnt, hash;
	int conn, conn_err, eof, err, sent, sent_err, hup, recvs;
};
static struct end a, b;
static struct kvp_listener ls;
static int accepted;

static void e_recv(void *ctx, struct kvp_sock *s, const char *data, int64_t len)
{
	struct end *e = ctx;
	(void)s;
	e->recvs++;
	if (len == 0)
		e->eof++;
	if (len < 0)
		e->err = (int)len;
	for (int64_t i = 0; i < len; i++)
		e->hash = e->hash * 31 + (unsigned char)data[i];
	e->got_cnt += len > 0 ? (uint64_t)len : 0;
}
static void e_sent(void *ctx, struct kvp_sock *s, char *buf, int err)
{
	struct end *e = ctx;
	(void)s;
	e->sent++;
	e->sent_err = err;
	free(buf);
}
static void e_connect(void *ctx, struct kvp_sock *s, int err)
{
	struct end *e = ctx;
	(void)s;
	e->conn++;
	e->conn_err = err;
}
static void e_hup(void *ctx, struct kvp_sock *s, int hup)
{
	struct end *e = ctx;
	(void)s;
	e->hup = hup;
}
static const struct kvp_sock_ops e_ops = {e_recv, e_sent, e_connect, e_hup};

static void on_accept(void *ctx, int fd)
{
	struct end *e = ctx;
	accepted++;
	memset(e, 0, sizeof(*e));
	kvp_sock_open(loop, &e->s, fd, &e_ops, e);
}

static void pair(const struct kvp_addr *addr)
{
	memset(&a, 0, sizeof(a));
	accepted = 0;
	kvp_sock_connect(loop, &a.s, addr, &e_ops, &a);
	until(&a.conn, 1);
	until(&accepted, 1);
}

static void pair_close(void)
{
	kvp_sock_close(&a.s);
	kvp_sock_close(&b.s);
	turns(3);
}

static void test_transfer(const struct kvp_addr *addr, const char *what)
{
	enum { BYTES = 24 << 20 };
	uint64_t hash = 0;
	pair(addr);
	ok(a.conn_err == 0 && accepted == 1, "%s: %s: connected", be_name, what);
	char *buf = malloc(BYTES + 5);
	for (uint64_t i = 0; i < BYTES + 5; i++)
		buf[i] = (char)(i * 2654435761u >> 13);
	for (uint64_t i = 5; i < BYTES + 5; i++)
		hash = hash * 31 + (unsigned char)buf[i];
	is_u64(kvp_sock_send(&a.s, buf, 5, BYTES), KVP_OK, "%s: %s: 24 MiB given to send", be_name, what);
	char more = 0;
	ok(kvp_sock_send(&a.s, &more, 0, 1) == KVP_ERR_AGAIN, "%s: %s: a second send has to wait", be_name,
		what);
	turns(20);
	ok(a.sent == 0, "%s: %s: nobody reads, so it is not through", be_name, what);
	kvp_sock_recv_start(&b.s);
	until(&a.sent, 1);
	kvp_sock_shutdown(&a.s);
	until(&b.eof, 1);
	is_u64(b.got_cnt, BYTES, "%s: %s: every byte arrives", be_name, what);
	is_u64(b.hash, hash, "%s: %s: in order", be_name, what);
	ok(a.sent_err == 0 && a.s.tx_bytes == BYTES && b.eof == 1, "%s: %s: then the end, once", be_name,
		what);
	/* the other direction still works after the half close */
	char *small = malloc(4);
	memcpy(small, "back", 4);
	kvp_sock_send(&b.s, small, 0, 4);
	kvp_sock_recv_start(&a.s);
	until(&a.recvs, 1);
	is_u64(a.got_cnt, 4, "%s: %s: a half close leaves the other direction", be_name, what);
	pair_close();
}

static void test_stop(const struct kvp_addr *addr)
{
	pair(addr);
	kvp_sock_recv_start(&b.s);
	turns(2);
	kvp_sock_recv_stop(&b.s);
	for (int i = 0; i < 3; i++) {
		ok(send(a.s.fd, "x", 1, 0) == 1, "%s: byte %d written", be_name, i);
		turns(10);
	}
	ok(b.recvs <= 1, "%s: after recv_stop at most one more arrives", be_name);
	kvp_sock_recv_start(&b.s);
	uint64_t end = kvp_loop_now_ns(loop) + WAIT_NS;
	while (b.got_cnt < 3 && kvp_loop_now_ns(loop) < end)
		kvp_loop_run_once(loop, 10000000);
	is_u64(b.got_cnt, 3, "%s: after recv_start the rest", be_name);
	pair_close();
}

static void test_hup(const struct kvp_addr *addr)
{
	struct linger lg = {1, 0};
	pair(addr);
	send(a.s.fd, "unread", 6, 0);
	kvp_sock_watch_hup(&b.s, KVP_SOCK_RDHUP | KVP_SOCK_HUP);
	turns(5);
	is_u64(b.hup, 0, "%s: bytes to read are no hang-up", be_name);
	kvp_sock_shutdown(&a.s);
	until(&b.hup, 1);
	is_u64(b.hup, KVP_SOCK_RDHUP, "%s: a FIN is seen behind bytes that nobody has read", be_name);
	b.hup = 0;
	kvp_sock_watch_hup(&b.s, KVP_SOCK_HUP);
	turns(5);
	is_u64(b.hup, 0, "%s: a half close is not the end of the connection", be_name);
	setsockopt(a.s.fd, SOL_SOCKET, SO_LINGER, &lg, sizeof(lg));
	kvp_sock_close(&a.s);
	until(&b.hup, 1);
	is_u64(b.hup & KVP_SOCK_HUP, KVP_SOCK_HUP, "%s: a reset is", be_name);
	pair_close();
}

static int option(const struct kvp_sock *s, int level, int name)
{
	int v = -1;
	socklen_t len = sizeof(v);
	return getsockopt(s->fd, level, name, &v, &len) ? -1 : v;
}

static void is_kept(const struct kvp_sock *s, int take_ms, const char *what)
{
	is_u64(option(s, SOL_SOCKET, SO_KEEPALIVE), 1, "%s: %s: has keep-alive", be_name, what);
	is_u64(option(s, IPPROTO_TCP, TCP_KEEPIDLE), 60, "%s: %s: asks after a minute", be_name, what);
	is_u64(option(s, IPPROTO_TCP, TCP_KEEPINTVL), 15, "%s: %s: every 15 s", be_name, what);
	is_u64(option(s, IPPROTO_TCP, TCP_KEEPCNT), 4, "%s: %s: four times", be_name, what);
	is_u64(option(s, IPPROTO_TCP, TCP_USER_TIMEOUT), take_ms, "%s: %s: limit of what is not taken",
		be_name, what);
}

/* Goes as a host does that loses its power: the kernel forgets the connection and sends nothing. */
static int vanish(struct end *e)
{
	int on = 1, rc = setsockopt(e->s.fd, IPPROTO_TCP, TCP_REPAIR, &on, sizeof(on));
	kvp_sock_close(&e->s);
	turns(3);
	return rc;
}

static void hurry(struct end *e)
{
	int s = 1;
	setsockopt(e->s.fd, IPPROTO_TCP, TCP_KEEPIDLE, &s, sizeof(s));
}

static void test_vanished(const struct kvp_addr *addr)
{
	pair(addr);
	is_kept(&a.s, 0, "made");
	is_kept(&b.s, 0, "accepted");
	pair_close();
	kvp_listener_take_limit(&ls, 300000);
	pair(addr);
	is_kept(&b.s, 300000, "accepted under a limit");
	pair_close();
	kvp_listener_take_limit(&ls, 1);
	pair(addr);
	is_kept(&b.s, 120000, "accepted under a short one");
	kvp_sock_recv_start(&b.s);
	hurry(&b);
	if (vanish(&a)) {
		printf("# no right to TCP_REPAIR here: errno %d\n", errno);
		pair_close();
		return;
	}
	until(&b.recvs, 1);
	is_u64(-b.err, ECONNRESET, "%s: a host that went without a word is noticed by who receives", be_name);
	pair_close();
	pair(addr);
	kvp_sock_watch_hup(&a.s, KVP_SOCK_HUP);
	hurry(&a);
	vanish(&b);
	until(&a.hup, 1);
	ok(a.hup & KVP_SOCK_HUP, "%s: and by who does not", be_name);
	pair_close();
}

static void test_reset(const struct kvp_addr *addr)
{
	pair(addr);
	kvp_sock_recv_start(&b.s);
	turns(2);
	kvp_sock_reset(&a.s);
	until(&b.recvs, 1);
	is_u64(-b.err, ECONNRESET, "%s: a reset reaches the receiver as such", be_name);
	pair_close();
}

static void test_refused(void)
{
	struct kvp_addr addr;
	struct kvp_listener gone;
	kvp_loop_listen(loop, &gone, "127.0.0.1", 0, KVP_LISTEN_PLAIN, on_accept, &b);
	kvp_addr_ip(&addr, "127.0.0.1", gone.port);
	kvp_listener_close(&gone, KVP_LISTENER_DROP);
	turns(2);
	memset(&a, 0, sizeof(a));
	kvp_sock_connect(loop, &a.s, &addr, &e_ops, &a);
	until(&a.conn, 1);
	is_u64(-a.conn_err, ECONNREFUSED, "%s: a refused connection is reported", be_name);
	kvp_sock_close(&a.s);
	kvp_addr_unix(&addr, "/nonexistent/kvp");
	memset(&a, 0, sizeof(a));
	kvp_sock_connect(loop, &a.s, &addr, &e_ops, &a);
	until(&a.conn, 1);
	is_u64(-a.conn_err, ENOENT, "%s: also on a unix socket path", be_name);
	kvp_sock_close(&a.s);
}

/* The user's struct is poisoned and freed right after close, with operations of every kind in the kernel. */
static void test_close_in_flight(const struct kvp_addr *addr)
{
	for (int i = 0; i < 30; i++) {
		struct end *e = calloc(1, sizeof(*e));
		accepted = 0;
		kvp_sock_connect(loop, &e->s, addr, &e_ops, e);
		if (i % 3) {
			until(&e->conn, 1);
			until(&accepted, 1);
			kvp_sock_recv_start(&e->s);
			kvp_sock_watch_hup(&e->s, KVP_SOCK_HUP | KVP_SOCK_RDHUP);
			kvp_sock_send(&e->s, calloc(1, 8 << 20), 0, 8 << 20);
			turns(i % 2);
			send(b.s.fd, "data", 4, MSG_DONTWAIT | MSG_NOSIGNAL);
		}
		kvp_sock_close(&e->s);
		memset(e, 0xa5, sizeof(*e));
		free(e);
		turns(2);
		kvp_sock_close(&b.s);
		turns(1);
	}
	ok(1, "%s: closing with operations in flight touches no freed memory", be_name);
}

static void test_many(const struct kvp_addr *addr)
{
	enum { N = 300 };
	static struct end c[N];
	static struct end peer[N];
	int conns = 0, got = 0;
	memset(c, 0, sizeof(c));
	for (int i = 0; i < N; i++) {
		accepted = 0;
		ls.ctx = &peer[i];
		kvp_sock_connect(loop, &c[i].s, addr, &e_ops, &c[i]);
		until(&c[i].conn, 1);
		until(&accepted, 1);
		conns += c[i].conn_err == 0;
		kvp_sock_recv_start(&peer[i].s);
	}
	/* more receivers at once than there are receive buffers */
	for (int i = 0; i < N; i++) {
		char *m = malloc(1000);
		memset(m, 'm', 1000);
		kvp_sock_send(&c[i].s, m, 0, 1000);
	}
	uint64_t end = kvp_loop_now_ns(loop) + WAIT_NS;
	while (got < N && kvp_loop_now_ns(loop) < end) {
		kvp_loop_run_once(loop, 10000000);
		got = 0;
		for (int i = 0; i < N; i++)
			got += peer[i].got_cnt == 1000;
	}
	is_u64(conns, N, "%s: %d connections", be_name, N);
	is_u64(got, N, "%s: all of them receive at the same time", be_name);
	for (int i = 0; i < N; i++) {
		kvp_sock_close(&c[i].s);
		kvp_sock_close(&peer[i].s);
	}
	ls.ctx = &b;
	turns(5);
}

static int taken;
static void take(void *ctx, int fd)
{
	(void)ctx;
	taken++;
	close(fd);
}

static void test_listener_end(void)
{
	struct kvp_listener l2;
	struct kvp_addr addr;
	int fd[5];
	is_u64(kvp_loop_listen(loop, &l2, "127.0.0.1", 0, KVP_LISTEN_REUSEPORT, take, NULL), KVP_OK,
		"%s: a second listener", be_name);
	ok(l2.port != 0, "%s: port 0 becomes a real one", be_name);
	kvp_addr_ip(&addr, "127.0.0.1", l2.port);
	for (int i = 0; i < 5; i++) {
		fd[i] = socket(AF_INET, SOCK_STREAM, 0);
		ok(connect(fd[i], (struct sockaddr *)&addr.ss, addr.len) == 0, "%s: client %d waits", be_name,
			i);
	}
	taken = 0;
	kvp_listener_close(&l2, KVP_LISTENER_SERVE);
	is_u64(taken, 5, "%s: closing hands over what waits in the backlog", be_name);
	turns(3);
	for (int i = 0; i < 5; i++)
		close(fd[i]);
}

/* With no descriptor left, accepting pauses and goes on. */
static void test_no_descriptors(const struct kvp_addr *addr)
{
	struct rlimit lim, low;
	struct kvp_loop_stat st;
	int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	getrlimit(RLIMIT_NOFILE, &lim);
	low = lim;
	low.rlim_cur = (rlim_t)fd + 1;
	setrlimit(RLIMIT_NOFILE, &low);
	for (int i = 3; i < fd; i++) { /* fill holes */
		int f = dup(0);
		if (f < 0)
			break;
	}
	accepted = 0;
	kvp_loop_stat_take(loop, &st);
	uint64_t failed = st.accept_failed, end = kvp_loop_now_ns(loop) + WAIT_NS;
	ok(connect(fd, (const struct sockaddr *)&addr->ss, addr->len) == 0, "%s: a client connects", be_name);
	while (st.accept_failed == failed && kvp_loop_now_ns(loop) < end) {
		kvp_loop_run_once(loop, 10000000);
		kvp_loop_stat_take(loop, &st);
	}
	ok(st.accept_failed > failed && accepted == 0, "%s: without descriptors accept fails and is counted",
		be_name);
	setrlimit(RLIMIT_NOFILE, &lim);
	until(&accepted, 1);
	is_u64(accepted, 1, "%s: accepting goes on when there are descriptors again", be_name);
	close(fd);
	kvp_sock_close(&b.s);
	turns(2);
}

static void test_addr(void)
{
	struct kvp_addr x;
	ok(kvp_addr_ip(&x, "127.0.0.1", 1) == KVP_OK && x.ss.ss_family == AF_INET, "an IPv4 literal");
	ok(kvp_addr_ip(&x, NULL, 1) == KVP_OK && x.ss.ss_family == AF_INET, "no address is any address");
	ok(kvp_addr_ip(&x, "::1", 1) == KVP_OK && x.ss.ss_family == AF_INET6, "an IPv6 literal");
	ok(kvp_addr_ip(&x, "[fd00::1]", 1) == KVP_OK && x.ss.ss_family == AF_INET6,
		"an IPv6 literal in brackets");
	ok(kvp_addr_ip(&x, "[127.0.0.1]", 1) == KVP_ERR_INVAL, "no IPv4 in brackets");
	ok(kvp_addr_ip(&x, "localhost", 1) == KVP_ERR_INVAL, "names are refused");
	ok(kvp_addr_ip(&x, "1.2.3", 1) == KVP_ERR_INVAL, "short literals are refused");
	char path[200];
	memset(path, 'p', sizeof(path));
	path[108] = 0;
	ok(kvp_addr_unix(&x, path) == KVP_ERR_INVAL, "a unix path of 108 bytes is refused");
	path[107] = 0;
	ok(kvp_addr_unix(&x, path) == KVP_OK, "one of 107 is not");
}

static void on_stop_timer(void *ctx, struct kvp_timer *t)
{
	(void)ctx;
	(void)t;
	kvp_loop_stop(loop);
}

static void run(enum kvp_loop_backend be, const char *name)
{
	struct kvp_addr addr, ux;
	struct kvp_listener uls;
	char path[64];
	be_name = name;
	ok(kvp_loop_open_backend(&loop, 0, be) == KVP_OK, "%s: opened", name);
	ok(kvp_loop_backend_of(loop) == be, "%s: as asked", name);
	test_timers();
	test_defer();
	test_watch();
	ok(kvp_loop_listen(loop, &ls, "127.0.0.1", 0, KVP_LISTEN_PLAIN, on_accept, &b) == KVP_OK,
		"%s: listens", name);
	kvp_addr_ip(&addr, "127.0.0.1", ls.port);
	test_transfer(&addr, "TCP");
	snprintf(path, sizeof(path), "/tmp/kvp-t-loop-%d", (int)getpid());
	kvp_addr_unix(&ux, path);
	ok(kvp_loop_listen_addr(loop, &uls, &ux, 0, on_accept, &b) == KVP_OK, "%s: on a unix socket", name);
	test_transfer(&ux, "unix");
	kvp_listener_close(&uls, KVP_LISTENER_DROP);
	unlink(path);
	test_stop(&addr);
	test_hup(&addr);
	test_reset(&addr);
	test_vanished(&addr);
	test_refused();
	test_close_in_flight(&addr);
	test_many(&addr);
	test_listener_end();
	struct kvp_timer st = {0};
	kvp_timer_set(loop, &st, kvp_loop_now_ns(loop) + 1000000, on_stop_timer, NULL);
	ok(kvp_loop_run(loop) == KVP_OK, "%s: run ends when asked to stop", name);
	/* left open on purpose: socket with send and receive in flight, listener, watch, timer */
	pair(&addr);
	kvp_sock_recv_start(&b.s);
	kvp_sock_send(&a.s, calloc(1, 8 << 20), 0, 8 << 20);
	kvp_timer_set(loop, &st, UINT64_MAX - 1, on_stop_timer, NULL);
	turns(1);
	kvp_loop_close(loop);
	ok(1, "%s: closing the loop releases what is still open", name);
}

int main(void)
{
	signal(SIGPIPE, SIG_IGN);
	test_addr();
	run(KVP_LOOP_EPOLL, "epoll");
	struct kvp_loop *probe;
	if (kvp_loop_open_backend(&probe, 8, KVP_LOOP_URING) == KVP_OK) {
		kvp_loop_close(probe);
		run(KVP_LOOP_URING, "uring");
	} else {
		printf("# io_uring is not available here: errno %d\n", errno);
	}
	/* last: it leaves descriptors behind */
	be_name = "auto";
	struct kvp_addr addr;
	kvp_loop_open(&loop, 0);
	kvp_loop_listen(loop, &ls, "127.0.0.1", 0, KVP_LISTEN_PLAIN, on_accept, &b);
	kvp_addr_ip(&addr, "127.0.0.1", ls.port);
	test_no_descriptors(&addr);
	kvp_loop_close(loop);
	return done();
}
