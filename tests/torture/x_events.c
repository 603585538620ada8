/* An engine that emits events as fast as a busy one, over real ZMQ, to a real node, while two processes look
 * chains up in the node's tree. Some batches are lost on the way and must come by replay. Oracle: the
 * publisher's own list of what each chain holds; at the end the tree must say exactly that. Then the same
 * once more with an indexer that is killed again and again.
 * KVP_TORTURE_S: seconds, default 3. KVP_EVENTS_RATE: events a second, default 100000; the speed is reported,
 * not judged. KVP_SEED replays the choice of operations. */
#include <arpa/inet.h>
#include <fcntl.h>
#include <kvpick/clock.h>
#include <kvpick/hash.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>
#include <zmq.h>

#include "daemons/common/boot.h"
#include "shm/region.h"
#include "tests/procs.h"
#include "tests/tap.h"

enum {
	CHAINS = 2000,
	DEPTH_MAX = 64,
	BLOCK = 16,
	EVENTS = 16,  /* of a batch */
	KEEP = 10000, /* batches kept for replays, as engines do */
	AHEAD = 5000, /* batches that the publisher runs ahead at most: it must not outrun its own buffer */
	LOSE_EVERY = 1500,
	KILLS = 3, /* the supervisor waits longer before it starts one that dies often */
	READERS = 2,
	WAIT_S = 120,
};

struct oracle {
	uint8_t depth[CHAINS];
	uint64_t events, batches, lost, run_ns, throttled_ns;
	uint32_t stop;
	struct {
		uint64_t lookups, too_deep, gave_up;
	} __attribute__((aligned(128))) reader[READERS];
};
static struct oracle *oracle;
static char dir[64], bin[512];
static struct kvp_attach attach;

static void fail(const char *what)
{
	printf("Bail out! %s\n", what);
	exit(1);
}

static void tokens(uint32_t chain, uint32_t i, uint32_t tok[BLOCK])
{
	for (uint32_t k = 0; k < BLOCK; k++)
		tok[k] = (chain * DEPTH_MAX + i) * BLOCK + k;
}

static uint64_t ext_of(uint32_t chain, uint32_t i)
{
	return ((uint64_t)chain << 32 | (i + 1)) * 0x9e3779b97f4a7c15ull;
}

/* -- msgpack, as far as it is needed -- */

static uint8_t *put_u8(uint8_t *p, unsigned v)
{
	*p = (uint8_t)v;
	return p + 1;
}

static uint8_t *put_be(uint8_t *p, unsigned tag, uint64_t v, int bytes)
{
	p = put_u8(p, tag);
	for (int i = bytes - 1; i >= 0; i--)
		p = put_u8(p, (unsigned)(v >> (8 * i)) & 0xff);
	return p;
}

static uint8_t *put_u64(uint8_t *p, uint64_t v)
{
	return put_be(p, 0xcf, v, 8);
}

static uint8_t *put_str(uint8_t *p, const char *s)
{
	size_t n = strlen(s);
	p = put_u8(p, 0xa0 | (unsigned)n);
	memcpy(p, s, n);
	return p + n;
}

enum form { ARRAY, MAP };

static uint8_t *put_key(uint8_t *p, const char *s, enum form form)
{
	return form == MAP ? put_str(p, s) : p;
}

static uint8_t *put_store(uint8_t *p, uint32_t chain, uint32_t i, enum form form)
{
	uint32_t tok[BLOCK];
	tokens(chain, i, tok);
	p = form == MAP ? put_u8(p, 0x87) : put_u8(p, 0x97);
	p = put_str(put_key(p, "type", form), "BlockStored");
	p = put_u64(put_u8(put_key(p, "block_hashes", form), 0x91), ext_of(chain, i));
	p = put_key(p, "parent_block_hash", form);
	p = i ? put_u64(p, ext_of(chain, i - 1)) : put_u8(p, 0xc0);
	p = put_be(put_key(p, "token_ids", form), 0xdc, BLOCK, 2);
	for (uint32_t k = 0; k < BLOCK; k++)
		p = put_be(p, 0xce, tok[k], 4);
	p = put_u8(put_key(p, "block_size", form), BLOCK);
	p = put_u8(put_key(p, "lora_id", form), 0xc0);
	return put_str(put_key(p, "medium", form), "GPU");
}

static uint8_t *put_remove(uint8_t *p, uint32_t chain, uint32_t i, enum form form)
{
	p = form == MAP ? put_u8(p, 0x83) : put_u8(p, 0x93);
	p = put_str(put_key(p, "type", form), "BlockRemoved");
	p = put_u64(put_u8(put_key(p, "block_hashes", form), 0x91), ext_of(chain, i));
	return put_str(put_key(p, "medium", form), "GPU");
}

static size_t make_batch(uint8_t *buf, uint64_t *s)
{
	uint8_t *p = put_u8(buf, 0x93);
	p = put_be(p, 0xcb, 0x3ff0000000000000ull, 8);
	p = put_be(p, 0xdc, EVENTS, 2);
	for (int e = 0; e < EVENTS; e++) {
		uint32_t chain = (uint32_t)(xorshift(s) % CHAINS);
		uint8_t *depth = &oracle->depth[chain];
		enum form form = xorshift(s) & 1 ? MAP : ARRAY;
		int grows = xorshift(s) % 100 < 55;
		if (!*depth || (grows && *depth < DEPTH_MAX))
			p = put_store(p, chain, (*depth)++, form);
		else
			p = put_remove(p, chain, --*depth, form);
	}
	p = put_u8(p, 0);
	return (size_t)(p - buf);
}

/* -- the publisher: one process -- */

struct batch {
	uint64_t seq;
	size_t len;
	uint8_t bytes[4096];
};

static struct publisher {
	void *zmq, *pub, *router;
	struct batch *kept; /* KEEP, by number */
	uint64_t next;
} pb;

static void *bind_at(int type, char at[64])
{
	int zero = 0, hwm = 100000;
	size_t len = 64;
	void *s = zmq_socket(pb.zmq, type);
	zmq_setsockopt(s, ZMQ_LINGER, &zero, sizeof(zero));
	zmq_setsockopt(s, ZMQ_SNDHWM, &hwm, sizeof(hwm));
	if (zmq_bind(s, "tcp://127.0.0.1:*") || zmq_getsockopt(s, ZMQ_LAST_ENDPOINT, at, &len))
		fail("bind");
	return s;
}

static void send_reply(const uint8_t *id, size_t id_len, uint64_t seq, const void *p, size_t len)
{
	uint64_t wire = __builtin_bswap64(seq);
	zmq_send(pb.router, id, id_len, ZMQ_SNDMORE);
	zmq_send(pb.router, "", 0, ZMQ_SNDMORE);
	zmq_send(pb.router, "", 0, ZMQ_SNDMORE);
	zmq_send(pb.router, &wire, 8, ZMQ_SNDMORE);
	zmq_send(pb.router, p, len, 0);
}

static void serve_replay(void)
{
	uint8_t id[256], part[64];
	int id_len = zmq_recv(pb.router, id, sizeof(id), ZMQ_DONTWAIT);
	uint64_t start;
	if (id_len < 0 || zmq_recv(pb.router, part, sizeof(part), 0) != 0 ||
		zmq_recv(pb.router, &start, sizeof(start), 0) != 8)
		return;
	start = __builtin_bswap64(start);
	if (pb.next > KEEP && start < pb.next - KEEP)
		start = pb.next - KEEP;
	for (; start < pb.next; start++) {
		const struct batch *b = &pb.kept[start % KEEP];
		send_reply(id, (size_t)id_len, b->seq, b->bytes, b->len);
	}
	send_reply(id, (size_t)id_len, UINT64_MAX, "", 0);
}

static void publish(uint64_t *s, int is_lost)
{
	struct batch *b = &pb.kept[pb.next % KEEP];
	b->seq = pb.next++;
	b->len = make_batch(b->bytes, s);
	oracle->events += EVENTS;
	oracle->batches++;
	oracle->lost += (uint64_t)is_lost;
	if (is_lost)
		return;
	uint64_t wire = __builtin_bswap64(b->seq);
	zmq_send(pb.pub, "", 0, ZMQ_SNDMORE);
	zmq_send(pb.pub, &wire, 8, ZMQ_SNDMORE);
	zmq_send(pb.pub, b->bytes, b->len, 0);
}

/* Applied so far; the node counts each batch once or, after a kill, more often. */
static uint64_t applied(struct kvp_region *r)
{
	return kvp_ctr_sum(&r->counters, KVP_CTR_EV_BATCH_APPLIED);
}

static void publisher_run(uint64_t seed, uint64_t seconds, uint64_t rate)
{
	static struct kvp_region r; /* for the counters */
	if (kvp_region_join(attach.region_fd, KVP_REGION_LOOK, &r))
		fail("join");
	uint8_t subscription[8];
	zmq_recv(pb.pub, subscription, sizeof(subscription), 0); /* what comes before it is lost */
	uint64_t start = kvp_clock_mono_ns(), now = start, due = start;
	uint64_t step = rate ? EVENTS * 1000000000ull / rate : 0;
	for (uint64_t n = 0; now - start < seconds * 1000000000ull; n++, due += step) {
		while (pb.next - applied(&r) > AHEAD && now - start < seconds * 1000000000ull) {
			serve_replay();
			usleep(200);
			oracle->throttled_ns += kvp_clock_mono_ns() - now;
			now = kvp_clock_mono_ns();
		}
		publish(&seed, n % LOSE_EVERY == LOSE_EVERY - 1);
		if (n % 8 == 0)
			serve_replay();
		now = kvp_clock_mono_ns();
		if (step && due > now + 1000000)
			usleep((useconds_t)((due - now) / 1000));
	}
	oracle->run_ns = now - start;
	/* One more that is not lost shows the last gap. Then replays only, until nobody wants any. */
	publish(&seed, 0);
	while (!kvp_ld_acq_u32(&oracle->stop)) {
		serve_replay();
		usleep(500);
	}
	_exit(0);
}

/* -- looking -- */

static uint32_t depth_of(const struct kvp_region *r, uint64_t part_salt, uint32_t index_slot, uint32_t chain,
	uint32_t *gave_up)
{
	static struct kvp_radix_match m;
	uint64_t local[DEPTH_MAX];
	uint32_t tok[BLOCK];
	uint64_t seed = kvp_hash_seed(NULL, 0, NULL, 0);
	struct kvp_hasher h;
	for (uint32_t i = 0; i < DEPTH_MAX; i++) {
		tokens(chain, i, tok);
		kvp_hasher_init(&h, tok, BLOCK, BLOCK, KVP_HASH_WINDOW_PLAIN, seed);
		kvp_hasher_local(&h, 0, 1, &local[i]);
	}
	struct kvp_radix_query q = {
		.part_salt = part_salt, .local = local, .local_cnt = DEPTH_MAX, .total_blk = DEPTH_MAX};
	if (kvp_radix_find(&r->radix, &q, &m))
		return UINT32_MAX;
	*gave_up = m.gave_up;
	return m.active[index_slot / 64] >> (index_slot % 64) & 1 ? m.depth[index_slot] : 0;
}

/* The registered rank's place in the tree. */
static int place(const struct kvp_region *r, uint64_t *part_salt, uint32_t *index_slot)
{
	struct kvp_cat_view v;
	struct kvp_part_fixed fixed;
	if (kvp_cat_view_begin(&r->cat, 0, &v) || v.cnt != 1 || kvp_cat_part_get(&r->cat, 0, &fixed))
		return 0;
	*part_salt = fixed.key_salt;
	*index_slot = v.rank[0].index_slot;
	return *index_slot != KVP_INDEX_NONE;
}

static void reader_run(uint32_t self, uint64_t seed)
{
	static struct kvp_region r;
	uint64_t part_salt;
	uint32_t index_slot, gave_up = 0;
	if (kvp_region_join(attach.region_fd, KVP_REGION_LOOK, &r) || !place(&r, &part_salt, &index_slot))
		_exit(2);
	while (!kvp_ld_acq_u32(&oracle->stop)) {
		for (int i = 0; i < 32; i++) {
			uint32_t d = depth_of(
				&r, part_salt, index_slot, (uint32_t)(xorshift(&seed) % CHAINS), &gave_up);
			oracle->reader[self].lookups++;
			oracle->reader[self].gave_up += gave_up;
			oracle->reader[self].too_deep += d > DEPTH_MAX;
		}
		usleep(300);
	}
	_exit(0);
}

/* -- the node -- */

static uint16_t free_port(void)
{
	struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	socklen_t len = sizeof(a);
	int fd = socket(AF_INET, SOCK_STREAM, 0);
	if (bind(fd, (struct sockaddr *)&a, sizeof(a)) || getsockname(fd, (struct sockaddr *)&a, &len))
		fail("no port");
	close(fd);
	return ntohs(a.sin_port);
}

static pid_t node_start(uint16_t port)
{
	char port_text[16], log[96];
	snprintf(port_text, sizeof(port_text), "%u", port);
	snprintf(log, sizeof(log), "%s/log", dir);
	pid_t pid = fork();
	if (pid)
		return pid;
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	for (char **e = environ; *e;) { /* defaults, whatever the caller has set */
		char name[128];
		snprintf(name, sizeof(name), "%.*s", (int)strcspn(*e, "="), *e);
		if ((strncmp(name, "DYN_", 4) && strncmp(name, "KVPICK_", 7)) || unsetenv(name))
			e++;
	}
	int fd = open(log, O_CREAT | O_WRONLY, 0600);
	dup2(fd, 1);
	dup2(fd, 2);
	execl(bin, bin, "run", "--run-dir", dir, "--port", port_text, "--bind", "127.0.0.1", "--max-ranks",
		"64", "--index-ranks", "64", "--max-blocks", "400000", "--max-reservations", "4096",
		"--max-active-blocks", "262144", (char *)NULL);
	_exit(127);
}

/* One request on a connection of its own; the reply's status, 0 if there was none. */
static int request(uint16_t port, const char *method, const char *path, const char *body)
{
	char text[2048];
	struct sockaddr_in a = {.sin_family = AF_INET,
		.sin_port = htons(port),
		.sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	int fd = socket(AF_INET, SOCK_STREAM, 0), status = 0;
	int len = snprintf(text, sizeof(text),
		"%s %s HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\n"
		"Content-Length: %zu\r\n\r\n%s",
		method, path, strlen(body), body);
	if (connect(fd, (struct sockaddr *)&a, sizeof(a)) == 0 && write(fd, text, (size_t)len) == len) {
		ssize_t n = read(fd, text, sizeof(text) - 1);
		text[n > 0 ? n : 0] = 0;
		if (sscanf(text, "HTTP/1.1 %d", &status) != 1)
			status = 0;
	}
	close(fd);
	return status;
}

static void node_ready(uint16_t port)
{
	for (uint64_t end = kvp_clock_mono_ns() + WAIT_S * 1000000000ull; kvp_clock_mono_ns() < end;) {
		if (request(port, "GET", "/health", "") == 200)
			return;
		usleep(10000);
	}
	fail("the node does not become healthy");
}

static uint32_t wrong_chains(const struct kvp_region *r, uint64_t part_salt, uint32_t index_slot)
{
	uint32_t wrong = 0, gave_up;
	for (uint32_t c = 0; c < CHAINS; c++)
		wrong += depth_of(r, part_salt, index_slot, c, &gave_up) != oracle->depth[c];
	return wrong;
}

static uint64_t sum(const struct kvp_region *r, enum kvp_ctr id)
{
	return kvp_ctr_sum(&r->counters, id);
}

static void report(const struct kvp_region *r)
{
	struct kvp_hist_shm h;
	uint64_t lookups = 0, too_deep = 0, gave_up = 0;
	kvp_hist_sum(&r->counters, KVP_HIST_APPLY_NS, &h);
	for (int i = 0; i < READERS; i++) {
		lookups += oracle->reader[i].lookups;
		too_deep += oracle->reader[i].too_deep;
		gave_up += oracle->reader[i].gave_up;
	}
	double s = (double)oracle->run_ns / 1e9;
	printf("# %.0f events/s for %.1f s in %llu batches, %llu lost on the way; "
	       "waited %.1f s for the index\n",
		(double)oracle->events / s, s, (unsigned long long)oracle->batches,
		(unsigned long long)oracle->lost, (double)oracle->throttled_ns / 1e9);
	printf("# lag from socket to tree: p50 < %llu us, p99 < %llu us; %.0f lookups/s, %llu given up\n",
		(unsigned long long)kvp_hist_quantile(&h, 0.5) / 1000,
		(unsigned long long)kvp_hist_quantile(&h, 0.99) / 1000, (double)lookups / s,
		(unsigned long long)gave_up);
	is_u64(too_deep, 0, "no lookup was deeper than any chain");
	ok(lookups > 0, "there were lookups (%llu)", (unsigned long long)lookups);
}

/* SIGKILLs the node's indexer; 0 if there is none now. */
static int kill_indexer(pid_t node)
{
	char path[64], pids[4096] = "", name[32];
	snprintf(path, sizeof(path), "/proc/%d/task/%d/children", node, node);
	FILE *f = fopen(path, "r");
	size_t n = f ? fread(pids, 1, sizeof(pids) - 1, f) : 0;
	pids[n] = 0;
	if (f)
		fclose(f);
	for (char *at = pids, *end; *at; at = end) {
		long pid = strtol(at, &end, 10);
		if (end == at)
			break;
		snprintf(path, sizeof(path), "/proc/%ld/comm", pid);
		f = fopen(path, "r");
		int is_it = f && fgets(name, sizeof(name), f) && strcmp(name, "kvpick-indexer\n") == 0;
		if (f)
			fclose(f);
		if (is_it)
			return kill((pid_t)pid, SIGKILL) == 0;
	}
	return 0;
}

enum kills { LEFT_ALONE, KILLED };

static void judge_loss(const struct kvp_region *r)
{
	is_u64(sum(r, KVP_CTR_EV_STORED_PARENT) + sum(r, KVP_CTR_EV_BLOCKS_UNKNOWN), 0,
		"no store missed its parent, no remove its block");
	is_u64(sum(r, KVP_CTR_EV_BATCH_APPLIED), oracle->batches, "each batch was applied once");
	for (uint64_t to = kvp_clock_mono_ns() + 2000000000ull;
		sum(r, KVP_CTR_EV_GAPS) < oracle->lost && kvp_clock_mono_ns() < to;)
		usleep(20000); /* these figures come some time later */
	uint64_t gaps = sum(r, KVP_CTR_EV_GAPS);
	ok(gaps <= oracle->lost && (oracle->lost == 0) == (gaps == 0),
		"gaps only where batches were lost (%llu)", (unsigned long long)gaps);
}

static void judge(enum kills kills, pid_t node, uint64_t seconds)
{
	static struct kvp_region r;
	uint64_t part_salt, now = kvp_clock_mono_ns(), end = now + (seconds + WAIT_S) * 1000000000ull;
	uint64_t every_ns = seconds * 1000000000ull / (KILLS + 1), kill_ns = now + every_ns;
	uint32_t index_slot, wrong = CHAINS, killed = 0;
	if (kvp_region_join(attach.region_fd, KVP_REGION_LOOK, &r) || !place(&r, &part_salt, &index_slot))
		fail("join");
	while (!kvp_ld_acq_u64(&oracle->run_ns) && (now = kvp_clock_mono_ns()) < end) {
		if (kills == KILLED && now >= kill_ns && kill_indexer(node)) {
			killed++;
			kill_ns = now + every_ns;
		}
		usleep(10000);
	}
	while ((wrong = wrong_chains(&r, part_salt, index_slot)) && kvp_clock_mono_ns() < end)
		usleep(20000);
	is_u64(wrong, 0, "each chain is as deep in the tree as the publisher's list says");
	if (kills == KILLED)
		ok(killed > 0, "the indexer was killed %u times", killed);
	else
		judge_loss(&r);
	is_u64(sum(&r, KVP_CTR_EV_REPLAY_INCOMPLETE) + sum(&r, KVP_CTR_EV_REPLAY_NONE), 0,
		"each gap was replayed completely");
	report(&r);
	is_u64(kvp_radix_check(&r.radix), 0, "tree sound");
	kvp_region_leave(&r);
}

static void publisher_open(char event[64], char replay[64])
{
	pb.zmq = zmq_ctx_new();
	pb.pub = bind_at(ZMQ_XPUB, event);
	pb.router = bind_at(ZMQ_ROUTER, replay);
	pb.kept = calloc(KEEP, sizeof(*pb.kept));
	if (!pb.kept)
		fail("memory");
}

static uint64_t number(const char *name, uint64_t otherwise)
{
	const char *env = getenv(name);
	return env ? strtoull(env, NULL, 10) : otherwise;
}

/* Sockets are made in the publisher's own process; their addresses come through a pipe. */
static pid_t publisher_start(uint64_t seed, uint64_t seconds, char event[64], char replay[64], int go[2])
{
	int tell[2];
	if (pipe(tell) || pipe(go))
		fail("pipe");
	pid_t pid = fork();
	if (!pid) {
		char c;
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		publisher_open(event, replay);
		if (write(tell[1], event, 64) != 64 || write(tell[1], replay, 64) != 64 ||
			read(go[0], &c, 1) != 1 ||
			kvp_boot_attach(dir, "default", 10000, &attach))
			_exit(2);
		publisher_run(seed, seconds, number("KVP_EVENTS_RATE", 100000));
	}
	if (read(tell[0], event, 64) != 64 || read(tell[0], replay, 64) != 64)
		fail("no publisher");
	return pid;
}

static void run(enum kills kills, uint64_t seed, uint64_t seconds)
{
	char event[64], replay[64], body[512];
	int go[2], status = 0;
	memset(oracle, 0, sizeof(*oracle));
	snprintf(dir, sizeof(dir), "/tmp/kvpick-x-events-XXXXXX");
	if (!mkdtemp(dir))
		fail("no directory");
	pid_t pub = publisher_start(seed, seconds, event, replay, go);
	uint16_t port = free_port();
	pid_t node = node_start(port), reader[READERS];
	node_ready(port);
	snprintf(body, sizeof(body),
		"{\"worker_id\":1,\"endpoint\":\"http://h:1\",\"block_size\":%d,"
		"\"kv_events_endpoint\":\"%s\","
		"\"replay_endpoint\":\"%s\"}",
		BLOCK, event, replay);
	is_u64((uint64_t)request(port, "POST", "/workers", body), 201, "the engine is registered");
	if (kvp_boot_attach(dir, "default", 10000, &attach))
		fail("attach");
	for (uint32_t i = 0; i < READERS; i++)
		if (!(reader[i] = fork())) {
			prctl(PR_SET_PDEATHSIG, SIGKILL);
			reader_run(i, seed + i + 1);
		}
	if (write(go[1], "", 1) != 1)
		fail("pipe");
	judge(kills, node, seconds);
	kvp_st_rel_u32(&oracle->stop, 1);
	for (uint32_t i = 0; i < READERS; i++) {
		waitpid(reader[i], &status, 0);
		ok(WIFEXITED(status) && !WEXITSTATUS(status), "reader %u ended well", i);
	}
	waitpid(pub, &status, 0);
	kill(node, SIGTERM);
	waitpid(node, &status, 0);
	ok(WIFEXITED(status) && !WEXITSTATUS(status), "the node ended well");
	kvp_boot_detach(&attach);
	close(go[0]);
	close(go[1]);
	snprintf(body, sizeof(body), "rm -rf %s", dir);
	ok(system(body) == 0, "and is gone");
}

int main(int argc, char **argv)
{
	(void)argc;
	uint64_t seed = number("KVP_SEED", 20011), seconds = number("KVP_TORTURE_S", 3);
	printf("# KVP_SEED=%llu\n", (unsigned long long)seed);
	const char *build = getenv("KVP_BUILD_DIR"), *slash = strrchr(argv[0], '/');
	if (build)
		snprintf(bin, sizeof(bin), "%s/kvpick", build);
	else
		snprintf(bin, sizeof(bin), "%.*s/../../kvpick", slash ? (int)(slash - argv[0]) : 1, argv[0]);
	oracle = shared(sizeof(*oracle));
	run(LEFT_ALONE, seed, seconds);
	run(KILLED, seed + 1, seconds);
	return done();
}
