/* gRPC transport alone: one server process, one client process, streams of three messages each way.
 *
 * Usage      b_grpc [streams] [in flight]
 * Prints     streams_s = streams a second; cpu_us = CPU time of the server process a stream (both of its
 *            threads); for TCP and Unix socket, and for a request of 220 KB that goes back in pieces.
 */
#include <kvpick/err.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include "bench/bench.h"
#include "bench/load/grpc_client.h"
#include "ipc/grpc_server.h"

#define IN_FLIGHT_MAX 1024
#define PIECE 62000
static const char *const method[] = {"/kvp.bench.Service/Echo"};
static const uint32_t small[] = {1024, 8192, 512}, large[] = {65536, 65536, 65536, 23392};

enum load { SMALL, LARGE };
static uint32_t streams = 20000, in_flight = 64;

/* The server answers each small message with 200 bytes; a large one at the half close, all of it in
 * pieces. */
static void answer(const struct kvp_grpc_event *ev)
{
	static const char reply[PIECE];
	uintptr_t kept = (uintptr_t)kvp_grpc_ctx(ev->stream);
	switch (ev->kind) {
	case KVP_GRPC_MESSAGE:
		if (ev->len <= 8192)
			kvp_grpc_send(ev->stream, reply, 200);
		else
			kvp_grpc_set_ctx(ev->stream, (void *)(kept + ev->len));
		if (ev->len == large[3])
			for (kept += ev->len; kept; kept -= kept < PIECE ? kept : PIECE)
				kvp_grpc_send(ev->stream, reply, kept < PIECE ? kept : PIECE);
		break;
	case KVP_GRPC_HALF_CLOSE:
		kvp_grpc_finish(ev->stream, KVP_GRPC_OK, "");
		break;
	default:
		break;
	}
}

static pid_t start_server(const char *addr, int *hold, uint16_t *port_out)
{
	int down[2], up[2];
	uint16_t port = 0;
	if (pipe(down) != 0 || pipe(up) != 0)
		exit(1);
	pid_t pid = fork();
	if (pid) {
		close(down[0]);
		close(up[1]);
		*hold = down[1];
		if (read(up[0], &port, sizeof(port)) != sizeof(port))
			exit(1);
		close(up[0]);
		*port_out = port;
		return pid;
	}
	close(down[1]);
	struct kvp_grpc *g;
	struct kvp_grpc_event ev;
	struct kvp_grpc_listen l = {.addr = addr, .methods = 1};
	if (kvp_grpc_new(&g, &(struct kvp_grpc_cfg){.method = method, .method_cnt = 1}) != KVP_OK ||
		kvp_grpc_listen_add(g, &l, &port) != KVP_OK || kvp_grpc_start(g) != KVP_OK ||
		write(up[1], &port, sizeof(port)) != sizeof(port))
		_exit(1);
	struct pollfd p[2] = {{.fd = kvp_grpc_fd(g), .events = POLLIN}, {.fd = down[0], .events = POLLIN}};
	while (!p[1].revents) {
		while (kvp_grpc_next(g, &ev))
			answer(&ev);
		poll(p, 2, -1);
	}
	kvp_grpc_delete(g);
	_exit(0);
}

struct one {
	uint64_t t_ns;
};

static void begin(struct kvp_gc *c, struct one *o, enum load load)
{
	static const char data[65536];
	struct kvp_gc_call *k = kvp_gc_call(c, method[0], 0, o);
	const uint32_t *len = load == SMALL ? small : large;
	o->t_ns = bench_now_ns();
	for (int i = 0; i < (load == SMALL ? 3 : 4); i++)
		kvp_gc_send(k, data, len[i]);
	kvp_gc_half_close(k);
}

static int by_value(const void *a, const void *b)
{
	uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
	return (x > y) - (x < y);
}

static uint64_t cpu_of(pid_t pid)
{
	clockid_t clock;
	struct timespec t = {0};
	if (clock_getcpuclockid(pid, &clock) == 0)
		clock_gettime(clock, &t);
	return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void run(const char *name, pid_t pid, const char *target, enum load load, uint32_t cnt)
{
	static struct one one[IN_FLIGHT_MAX];
	struct kvp_gc *c;
	struct kvp_gc_event ev;
	uint64_t *lat = calloc(cnt, sizeof(*lat)), cpu = cpu_of(pid);
	kvp_gc_open(&c, &(struct kvp_gc_cfg){.target = target});
	uint32_t begun = 0, done = 0, failed = 0;
	uint64_t t = bench_now_ns();
	for (; begun < in_flight && begun < cnt; begun++)
		begin(c, &one[begun], load);
	while (done < cnt) {
		if (!kvp_gc_next(c, 10000, &ev))
			break;
		if (ev.kind != KVP_GC_STATUS)
			continue;
		struct one *o = ev.ctx;
		failed += ev.status != 0;
		lat[done++] = bench_now_ns() - o->t_ns;
		if (begun++ < cnt)
			begin(c, o, load);
	}
	t = bench_now_ns() - t;
	kvp_gc_close(c);
	cpu = cpu_of(pid) - cpu;
	qsort(lat, done, sizeof(*lat), by_value);
	printf("%s streams_s=%.0f cpu_us=%.1f p50_ms=%.2f p99_ms=%.2f in_flight=%u failed=%u\n", name,
		done / ((double)t / 1e9), (double)cpu / 1e3 / done, (double)lat[done / 2] / 1e6,
		(double)lat[done * 99ull / 100] / 1e6, in_flight, failed + cnt - done);
	free(lat);
}

int main(int argc, char **argv)
{
	char addr[64], port[32];
	uint16_t number;
	int hold[2];
	if (argc > 1)
		streams = (uint32_t)strtoul(argv[1], NULL, 10);
	if (argc > 2)
		in_flight = (uint32_t)strtoul(argv[2], NULL, 10);
	if (!streams || !in_flight || in_flight > IN_FLIGHT_MAX)
		return 2;
	signal(SIGPIPE, SIG_IGN);
	bench_header();
	snprintf(addr, sizeof(addr), "unix:/tmp/kvp-b-grpc-%d.sock", (int)getpid());
	/* Both servers first: a process must not fork once the core has run in it. */
	pid_t pid[2] = {
		start_server(addr, &hold[0], &number), start_server("127.0.0.1:0", &hold[1], &number)};
	snprintf(port, sizeof(port), "127.0.0.1:%u", number);
	run("grpc_unix_small", pid[0], addr, SMALL, streams);
	run("grpc_tcp_small", pid[1], port, SMALL, streams);
	run("grpc_unix_220k", pid[0], addr, LARGE, streams / 20 + 1);
	run("grpc_tcp_220k", pid[1], port, LARGE, streams / 20 + 1);
	close(hold[0]);
	close(hold[1]);
	for (int i = 0; i < 2; i++)
		waitpid(pid[i], NULL, 0);
	return 0;
}
