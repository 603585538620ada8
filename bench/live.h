/* bench/live.h — a real node and a real engine for benchmarks: `kvpick run` in a directory of its own, and a
 * process that publishes KV events over ZMQ, with a replay service; the caller only looks at the region.
 *
 * Shape      struct live: the node's process, the engine's process, the region mapped read-only, and memory
 *            shared with the engine: what it shall send, what it has sent and when.
 * Truth      the engine's counter of messages sent; message i is a pure function of i and of the shape that
 *            was set when it was sent.
 * Writers    the caller: shape, want, seen. The engine: sent, at_ns.
 * Ordering   want and sent are stored with release after what they announce.
 * Lifetime   live_open to live_close, which ends both processes and removes the directory.
 * Crash      both processes get SIGKILL or SIGTERM when the caller dies; the directory stays in the temporary
 *            directory.
 */
#ifndef KVP_BENCH_LIVE_H
#define KVP_BENCH_LIVE_H

#include "bench/bench.h"
#include "bench/sim/publish.h"
#include "daemons/common/boot.h"
#include "shm/region.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <fcntl.h>
#include <kvpick/hash.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <zmq.h>

#define LIVE_BLOCK_TOK 16
#define LIVE_MSG_MAX 2000000u
#define LIVE_MSG_BLK_MAX 4096u

/* One message stores one new prompt of event_cnt x event_blk blocks, an event for each event_blk of them,
 * and, if keep is not 0, removes the prompt stored keep messages before in as many events, last blocks
 * first. */
struct live_shape {
	uint32_t event_cnt, event_blk, keep;
	uint64_t interval_ns; /* between messages; 0: as fast as window allows */
	uint64_t window;      /* messages ahead of what the caller has seen; 0: no limit */
};

struct live_shared {
	uint64_t ports;	     /* event port << 16 | replay port, 0 = not open yet */
	uint64_t want, sent; /* messages, all in all */
	uint64_t seen, quit;
	uint64_t first; /* of this shape: nothing older is removed */
	struct live_shape shape;
	uint64_t at_ns[LIVE_MSG_MAX];
};

struct live {
	char dir[256], build[512];
	pid_t node, engine;
	uint16_t port;
	char peer[64]; /* address to recover the index from; "" = none */
	struct kvp_attach at;
	struct kvp_region region;
	struct live_shared *sh;
	struct kvp_radix_match *match;
	uint64_t part_salt;
};

static inline void live_die(const char *what)
{
	perror(what);
	exit(1);
}

static inline void live_pause(uint64_t ns)
{
	struct timespec t = {(time_t)(ns / 1000000000u), (long)(ns % 1000000000u)};
	nanosleep(&t, NULL);
}

/* -- the engine -- */

static inline void live_tokens(uint64_t msg, uint32_t from, uint32_t blk, uint32_t *tok)
{
	for (uint32_t i = 0; i < blk * LIVE_BLOCK_TOK; i++)
		tok[i] = (uint32_t)(bench_mix((msg << 20) + from * LIVE_BLOCK_TOK + i) % 128000);
}

static inline uint64_t live_key(uint64_t msg, uint32_t blk)
{
	return bench_mix((msg << 20) + blk + 0x5500000000000000ULL);
}

static inline void live_message(
	struct kvp_publish *p, const struct live_shape *s, uint64_t msg, uint64_t first)
{
	static uint32_t tok[LIVE_MSG_BLK_MAX * LIVE_BLOCK_TOK];
	uint64_t key[LIVE_MSG_BLK_MAX];
	for (uint32_t e = 0; e < s->event_cnt; e++) {
		uint32_t from = e * s->event_blk;
		uint64_t parent = from ? live_key(msg, from - 1) : 0;
		live_tokens(msg, from, s->event_blk, tok);
		for (uint32_t i = 0; i < s->event_blk; i++)
			key[i] = live_key(msg, from + i);
		kvp_publish_stored(p, from ? &parent : NULL, key, s->event_blk, tok);
	}
	if (!s->keep || msg < first + s->keep)
		return;
	for (uint32_t e = 0, at = s->event_cnt * s->event_blk; e < s->event_cnt; e++) {
		for (uint32_t i = 0; i < s->event_blk; i++)
			key[i] = live_key(msg - s->keep, --at);
		kvp_publish_removed(p, key, s->event_blk);
	}
}

static inline void live_engine(struct live_shared *sh)
{
	struct kvp_publish_cfg cfg = {.ip = "127.0.0.1",
		.topic = "",
		.form = KVP_PUBLISH_ARRAY,
		.block_size_tok = LIVE_BLOCK_TOK,
		.kept_max = 100000,
		.kept_max_bytes = 1ull << 30};
	struct kvp_loop *loop;
	struct kvp_publish *p;
	void *zmq = zmq_ctx_new();
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	prctl(PR_SET_TIMERSLACK, 1000);
	if (!zmq || kvp_loop_open(&loop, 0) || kvp_publish_open(loop, zmq, &cfg, &p))
		live_die("bench: engine");
	kvp_st_rel_u64(&sh->ports, (uint64_t)kvp_publish_event_port(p) << 16 | kvp_publish_replay_port(p));
	uint64_t due = 0;
	while (!kvp_ld_acq_u64(&sh->quit)) {
		uint64_t sent = sh->sent, now = bench_now_ns();
		if (sent >= kvp_ld_acq_u64(&sh->want)) {
			due = 0;
			kvp_loop_run_once(loop, 100000);
			continue;
		}
		struct live_shape s = sh->shape;
		due = due ? due : now;
		if (now < due || (s.window && sent >= kvp_ld_acq_u64(&sh->seen) + s.window)) {
			uint64_t rest = now < due ? due - now : 20000;
			kvp_loop_run_once(loop, rest < 100000 ? rest : 100000);
			continue;
		}
		live_message(p, &s, sent, sh->first);
		sh->at_ns[sent] = bench_now_ns();
		kvp_publish_flush(p, 0);
		kvp_st_rel_u64(&sh->sent, sent + 1);
		due += s.interval_ns;
		if (sent % 64 == 0)
			kvp_loop_run_once(loop, 0);
	}
	_exit(0);
}

/* -- the node -- */

static inline void live_node(struct live *l, uint64_t blocks, uint32_t threads)
{
	char program[600], port[16], max[32], thr[16], log[300];
	char *env[] = {"PATH=/usr/bin:/bin", NULL};
	snprintf(program, sizeof(program), "%s/kvpick", l->build);
	snprintf(port, sizeof(port), "%u", l->port);
	snprintf(max, sizeof(max), "%" PRIu64, blocks);
	snprintf(thr, sizeof(thr), "%u", threads);
	snprintf(log, sizeof(log), "%s/log", l->dir);
	int fd = open(log, O_CREAT | O_WRONLY | O_APPEND, 0600);
	if (fd < 0 || dup2(fd, 1) < 0 || dup2(fd, 2) < 0)
		_exit(1);
	prctl(PR_SET_PDEATHSIG, SIGTERM);
	char *argv[] = {program, "run", "--run-dir", l->dir, "--port", port, "--bind", "127.0.0.1",
		"--max-ranks", "64", "--index-ranks", "64", "--max-blocks", max, "--max-reservations", "4096",
		"--max-active-blocks", "262144", "--threads", thr, l->peer[0] ? "--indexer-peers" : NULL,
		l->peer, NULL};
	execve(program, argv, env);
	_exit(127);
}

static inline uint16_t live_free_port(void)
{
	struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
	socklen_t len = sizeof(a);
	int s = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	if (s < 0 || bind(s, (struct sockaddr *)&a, len) || getsockname(s, (struct sockaddr *)&a, &len))
		live_die("bench: port");
	close(s);
	return ntohs(a.sin_port);
}

/* Status of a POST to the node, 0 if it does not answer. */
static inline int live_post(uint16_t port, const char *path, const char *body)
{
	struct sockaddr_in a = {
		.sin_family = AF_INET, .sin_port = htons(port), .sin_addr = {htonl(INADDR_LOOPBACK)}};
	char text[1024];
	int status = 0, n = snprintf(text, sizeof(text),
				"POST %s HTTP/1.1\r\nHost: bench\r\nConnection: close\r\n"
				"Content-Type: application/json\r\nContent-Length: %zu\r\n\r\n%s",
				path, strlen(body), body);
	int s = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	if (connect(s, (struct sockaddr *)&a, sizeof(a)) == 0 && write(s, text, (size_t)n) == n &&
		(n = (int)read(s, text, sizeof(text) - 1)) > 0) {
		text[n] = 0;
		if (sscanf(text, "HTTP/1.1 %d", &status) != 1)
			status = 0;
	}
	close(s);
	return status;
}

/* live_close_node ends the node alone. */
static inline void live_close_node(struct live *l)
{
	kvp_region_leave(&l->region);
	kvp_boot_detach(&l->at);
	kill(l->node, SIGTERM);
	waitpid(l->node, NULL, 0);
	DIR *d = opendir(l->dir);
	for (struct dirent *e; d && (e = readdir(d));)
		unlinkat(dirfd(d), e->d_name, 0);
	if (d)
		closedir(d);
	rmdir(l->dir);
}

static inline void live_close(struct live *l)
{
	kvp_st_rel_u64(&l->sh->quit, 1);
	waitpid(l->engine, NULL, 0);
	live_close_node(l);
}

static inline void live_register(struct live *l, uint64_t deadline_ns)
{
	char body[512];
	uint64_t ports;
	while (!(ports = kvp_ld_acq_u64(&l->sh->ports)))
		live_pause(1000000);
	snprintf(body, sizeof(body),
		"{\"worker_id\":1,\"endpoint\":\"http://127.0.0.1:1\",\"block_size\":%d,"
		"\"kv_events_endpoint\":\"tcp://127.0.0.1:%u\",\"replay_endpoint\":\"tcp://127.0.0.1:%u\"}",
		LIVE_BLOCK_TOK, (unsigned)(ports >> 16), (unsigned)(ports & 0xffff));
	for (int status; (status = live_post(l->port, "/workers", body)) != 201;) {
		if (bench_now_ns() > deadline_ns) {
			fprintf(stderr, "bench: the node refuses the worker: %d\n", status);
			exit(1);
		}
		live_pause(10000000);
	}
}

/* live_open starts engine and node, and registers the engine as worker 1. argv0 tells where the build is. */
static inline void live_open(struct live *l, const char *argv0, uint64_t blocks, uint32_t threads)
{
	const char *tmp = getenv("TMPDIR"), *build = getenv("KVP_BUILD_DIR"), *slash = strrchr(argv0, '/');
	memset(l, 0, sizeof(*l));
	snprintf(l->dir, sizeof(l->dir), "%s/kvpick-bench-XXXXXX", tmp ? tmp : "/tmp");
	snprintf(
		l->build, sizeof(l->build), "%.*s/..", (int)(slash ? slash - argv0 : 1), slash ? argv0 : ".");
	if (build)
		snprintf(l->build, sizeof(l->build), "%s", build);
	l->match = calloc(1, sizeof(*l->match));
	l->sh = mmap(NULL, sizeof(*l->sh), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE,
		-1, 0);
	if (!mkdtemp(l->dir) || !l->match || l->sh == MAP_FAILED)
		live_die("bench: start");
	prctl(PR_SET_TIMERSLACK, 1000);
	l->port = live_free_port();
	fflush(stdout);
	l->engine = fork();
	if (l->engine == 0)
		live_engine(l->sh);
	l->node = fork();
	if (l->node == 0)
		live_node(l, blocks, threads);
	struct kvp_part_fixed part;
	uint64_t deadline = bench_now_ns() + 30000000000ull;
	while (kvp_boot_attach(l->dir, "default", 1000, &l->at) != KVP_OK ||
		kvp_region_join(l->at.region_fd, KVP_REGION_LOOK, &l->region) != KVP_OK)
		if (bench_now_ns() > deadline)
			live_die("bench: the node does not start");
	live_register(l, deadline);
	if (kvp_cat_part_get(&l->region.cat, 0, &part) != KVP_OK)
		live_die("bench: partition");
	l->part_salt = part.key_salt;
}

/* -- looking -- */

/* live_shape sets what the next messages look like; call it while the engine has nothing to send. */
static inline void live_shape(struct live *l, struct live_shape s)
{
	l->sh->shape = s;
	l->sh->first = l->sh->sent;
	l->sh->seen = l->sh->sent;
}

/* live_send lets the engine send n more messages; returns the number of the first. */
static inline uint64_t live_send(struct live *l, uint64_t n)
{
	uint64_t first = l->sh->want;
	if (first + n > LIVE_MSG_MAX) {
		fprintf(stderr, "bench: too many messages\n");
		exit(1);
	}
	kvp_st_rel_u64(&l->sh->want, first + n);
	return first;
}

/* live_wait waits until all blocks of a message are in the tree: the time, 0 after the deadline. */
static inline uint64_t live_wait(struct live *l, uint64_t msg, uint64_t deadline_ns)
{
	static uint32_t tok[LIVE_MSG_BLK_MAX * LIVE_BLOCK_TOK];
	static uint64_t local[LIVE_MSG_BLK_MAX];
	uint32_t n = l->sh->shape.event_cnt * l->sh->shape.event_blk;
	struct kvp_hasher h;
	live_tokens(msg, 0, n, tok);
	kvp_hasher_init(&h, tok, (uint64_t)n * LIVE_BLOCK_TOK, LIVE_BLOCK_TOK, KVP_HASH_WINDOW_PLAIN,
		kvp_hash_seed(NULL, 0, NULL, 0));
	kvp_hasher_local(&h, 0, n, local);
	for (;;) {
		struct kvp_radix_query q = {l->part_salt, local, n, n, NULL, NULL};
		kvp_radix_find(&l->region.radix, &q, l->match);
		uint64_t now = bench_now_ns();
		if (l->match->longest == n)
			return now;
		if (now > deadline_ns)
			return 0;
		live_pause(20000);
	}
}

/* live_fill lets the engine store as many blocks, in messages of 1024; back when all of them are in the tree.
 * Exits when a message takes longer than limit_ns. */
static inline void live_fill(struct live *l, uint64_t blocks, uint64_t limit_ns)
{
	struct live_shape s = {16, 64, 0, 0, 256};
	live_shape(l, s);
	uint64_t n = (blocks + 1023) / 1024, first = live_send(l, n);
	for (uint64_t i = first; i < first + n; i++) {
		while (kvp_ld_acq_u64(&l->sh->sent) <= i)
			live_pause(20000);
		if (!live_wait(l, i, bench_now_ns() + limit_ns)) {
			fprintf(stderr, "bench: events were lost\n");
			exit(1);
		}
		kvp_st_rel_u64(&l->sh->seen, i + 1);
	}
}
#endif
