/* HTTP echo: one server process, one client process with closed-loop keep-alive connections.
 *
 * Usage      b_http [seconds] [connections] [body bytes]
 * Prints     ops_s = requests a second; ops_cpu_s = requests a second of the server's CPU time (a core's
 *            worth); latencies as the client sees them while it keeps every connection busy.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include <kvpick/err.h>
#include "ipc/http_server.h"

#define CONN_MAX 4096
#define LAT_MAX (1u << 20)
#define REPEATS 5

struct peer {
	struct kvp_sock s;
	char *out;
	uint64_t want, got, t_ns;
};
static struct kvp_loop *loop;
static struct peer peer[CONN_MAX];
static uint32_t conn_cnt = 64, body_bytes = 128, connected;
static uint64_t req_len, answers, end_ns;
static uint32_t *lat, lat_cnt;
static uint64_t wall_ns(void)
{
	struct timespec ts;
	clock_gettime(CLOCK_MONOTONIC, &ts);
	return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

static void on_request(void *ctx, struct kvp_http_req *r)
{
	(void)ctx;
	kvp_http_reply(r, 200, "application/json", r->body, r->body_len);
}

static void on_term(void *ctx, int fd)
{
	char c;
	(void)ctx;
	if (read(fd, &c, 1) >= 0)
		kvp_loop_stop(loop);
}

/* Serves until the pipe closes, then writes its CPU time. */
static int serve(enum kvp_loop_backend be, int ctl, int out)
{
	struct kvp_http_server_cfg cfg = {
		.ip = "127.0.0.1", .max_connections = CONN_MAX, .on_request = on_request};
	struct kvp_http_server *s;
	struct kvp_watch w;
	struct rusage ru;
	if (kvp_loop_open_backend(&loop, 0, be) || kvp_http_server_open(loop, &cfg, &s) ||
		kvp_loop_watch_fd(loop, &w, ctl, on_term, NULL))
		return 1;
	uint64_t port = kvp_http_server_port(s);
	if (write(out, &port, 8) != 8)
		return 1;
	kvp_loop_run(loop);
	getrusage(RUSAGE_SELF, &ru);
	uint64_t us = (uint64_t)(ru.ru_utime.tv_sec + ru.ru_stime.tv_sec) * 1000000 +
		      (uint64_t)(ru.ru_utime.tv_usec + ru.ru_stime.tv_usec);
	if (write(out, &us, 8) != 8)
		return 1;
	kvp_http_server_close(s);
	kvp_loop_close(loop);
	return 0;
}

static void ask(struct peer *p)
{
	p->got = 0;
	p->t_ns = wall_ns();
	kvp_sock_send(&p->s, p->out, 0, req_len);
}

static void on_recv(void *ctx, struct kvp_sock *s, const char *data, int64_t len)
{
	struct peer *p = ctx;
	(void)s;
	if (len <= 0) {
		fprintf(stderr, "b_http: connection lost: %lld\n", (long long)len);
		exit(1);
	}
	if (!p->want) { /* the first answer tells its length; all are alike */
		const char *end = memmem(data, (size_t)len, "\r\n\r\n", 4);
		p->want = end ? (uint64_t)(end - data) + 4 + body_bytes : 0;
	}
	p->got += (uint64_t)len;
	if (p->got < p->want)
		return;
	uint64_t now = wall_ns();
	if (lat_cnt < LAT_MAX)
		lat[lat_cnt++] = (uint32_t)(now - p->t_ns);
	answers++;
	if (now < end_ns && p->out)
		ask(p);
	else if (now >= end_ns)
		kvp_loop_stop(loop);
}

static void on_sent(void *ctx, struct kvp_sock *s, char *buf, int err)
{
	struct peer *p = ctx;
	(void)s;
	(void)err;
	p->out = buf;
}

static void on_connect(void *ctx, struct kvp_sock *s, int err)
{
	if (err) {
		fprintf(stderr, "b_http: connect: %s\n", strerror(-err));
		exit(1);
	}
	connected++;
	kvp_sock_recv_start(s);
	ask(ctx);
}

static int cmp(const void *a, const void *b)
{
	return *(const uint32_t *)a < *(const uint32_t *)b ? -1 : *(const uint32_t *)a > *(const uint32_t *)b;
}

static void drive(uint16_t port, double seconds)
{
	static const struct kvp_sock_ops ops = {
		.on_recv = on_recv, .on_sent = on_sent, .on_connect = on_connect};
	struct kvp_addr a;
	char head[256];
	int n = snprintf(head, sizeof(head),
		"POST /select HTTP/1.1\r\nHost: 127.0.0.1:%u\r\nContent-Type: application/json\r\n"
		"Content-Length: %u\r\n\r\n",
		(unsigned)port, body_bytes);
	if (kvp_loop_open(&loop, 0) || kvp_addr_ip(&a, "127.0.0.1", port))
		exit(1);
	req_len = (uint64_t)n + body_bytes;
	answers = lat_cnt = connected = 0;
	end_ns = wall_ns() + (uint64_t)(seconds * 1e9);
	memset(peer, 0, sizeof(peer));
	for (uint32_t i = 0; i < conn_cnt; i++) {
		peer[i].out = malloc(req_len);
		memcpy(peer[i].out, head, (size_t)n);
		memset(peer[i].out + n, 'x', body_bytes);
		if (kvp_sock_connect(loop, &peer[i].s, &a, &ops, &peer[i]))
			exit(1);
	}
	kvp_loop_run(loop);
	for (uint32_t i = 0; i < conn_cnt; i++)
		kvp_sock_close(&peer[i].s);
	kvp_loop_close(loop);
}

struct result {
	double ops_s, ops_cpu_s;
	uint32_t p50, p99, max;
	uint64_t ops;
};

static struct result once(enum kvp_loop_backend be, double seconds)
{
	int ctl[2], out[2];
	uint64_t port, us;
	if (pipe(ctl) || pipe(out))
		exit(1);
	fflush(stdout);
	pid_t pid = fork();
	if (pid == 0) {
		close(ctl[1]);
		_exit(serve(be, ctl[0], out[1]));
	}
	close(ctl[0]);
	close(out[1]);
	if (read(out[0], &port, 8) != 8)
		exit(1);
	uint64_t t0 = wall_ns();
	drive((uint16_t)port, seconds);
	double wall = (double)(wall_ns() - t0) / 1e9;
	close(ctl[1]);
	if (read(out[0], &us, 8) != 8)
		exit(1);
	close(out[0]);
	waitpid(pid, NULL, 0);
	qsort(lat, lat_cnt, sizeof(*lat), cmp);
	return (struct result){(double)answers / wall, (double)answers * 1e6 / (double)us, lat[lat_cnt / 2],
		lat[lat_cnt * 99ull / 100], lat[lat_cnt - 1], answers};
}

static int by_ops(const void *a, const void *b)
{
	double x = ((const struct result *)a)->ops_s, y = ((const struct result *)b)->ops_s;
	return x < y ? -1 : x > y;
}

static void bench(enum kvp_loop_backend be, const char *name, double seconds)
{
	struct result r[REPEATS];
	once(be, seconds / 4);
	for (int i = 0; i < REPEATS; i++)
		r[i] = once(be, seconds);
	qsort(r, REPEATS, sizeof(r[0]), by_ops);
	const struct result *m = &r[REPEATS / 2];
	printf("bench=http.echo backend=%s conns=%u body=%u ops=%llu ops_s=%.0f ops_cpu_s=%.0f p50_us=%.1f "
	       "p99_us=%.1f max_us=%.1f\n",
		name, conn_cnt, body_bytes, (unsigned long long)m->ops, m->ops_s, m->ops_cpu_s, m->p50 / 1e3,
		m->p99 / 1e3, m->max / 1e3);
}

int main(int argc, char **argv)
{
	double seconds = argc > 1 ? strtod(argv[1], NULL) : 1.0;
	conn_cnt = argc > 2 ? (uint32_t)strtoul(argv[2], NULL, 10) : conn_cnt;
	body_bytes = argc > 3 ? (uint32_t)strtoul(argv[3], NULL, 10) : body_bytes;
	if (conn_cnt < 1 || conn_cnt > CONN_MAX || seconds <= 0)
		return 2;
	lat = malloc(LAT_MAX * sizeof(*lat));
	printf("# http echo, closed loop, %d repeats, median; compiler %s\n", REPEATS, __VERSION__);
	bench(KVP_LOOP_URING, "uring", seconds);
	bench(KVP_LOOP_EPOLL, "epoll", seconds);
	free(lat);
	return 0;
}
