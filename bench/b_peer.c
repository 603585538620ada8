/* What replicas cost: messages written and read, published and mirrored, and both through loopback TCP.
 *   b_peer [bookings 40000]
 * read: from the ring to the message; send: to the library, nobody listens; mirror: from the message to the
 * booking. All in processor time of one thread, ns a message. loop: one thread books, publishes
 * and frees, another one receives and mirrors; messages that the library had dropped are told as lost. */
#include "bench/bench.h"
#include "ipc/zmq_mesh.h"
#include "tests/replica_fixture.h"

#include <pthread.h>
#include <zmq.h>

#define WINDOW                                                                                               \
	100u /* bookings under way: the library keeps 1000 messages a peer, and hears late of progress */
#define BATCH 2000u /* bookings at a time */

static uint32_t bookings = 40000;
static struct rf_node a, b;
static uint64_t seq[1024];
static uint64_t heard; /* messages; the listener's thread writes */
static uint32_t done_all;

static void die(const char *what)
{
	fprintf(stderr, "b_peer: %s\n", what);
	exit(1);
}

static void reserve(uint32_t i, uint32_t blocks)
{
	struct kvp_reserve_request q;
	struct kvp_select_answer ans;
	char id[24];
	snprintf(id, sizeof(id), "r%u", i);
	kvp_reserve_request_init(&q);
	q.model = rf_str("m");
	q.group = rf_str("g");
	q.selection_id = rf_str(id);
	q.worker_id = 1 + i % 8;
	q.prompt.form = KVP_PROMPT_HASHES;
	for (uint32_t k = 0; k < blocks; k++)
		seq[k] = bench_mix(k < blocks / 2 ? k : (uint64_t)i << 20 | k);
	q.prompt.block_hash = q.prompt.seq_hash = seq;
	q.prompt.block_hash_cnt = q.prompt.seq_hash_cnt = blocks;
	q.prompt.has_isl = q.has_effective_prefill = KVP_YES;
	q.prompt.isl_tok = q.effective_prefill_tok = 4ull * blocks;
	if (kvp_selection_reserve(a.s, &q, &ans) != 201)
		die("no booking");
}

static void mark(uint32_t i)
{
	char id[24];
	snprintf(id, sizeof(id), "r%u", i);
	kvp_selection_prefill_complete(a.s, rf_str(id));
}

static void end(uint32_t i)
{
	char id[24];
	snprintf(id, sizeof(id), "r%u", i);
	kvp_selection_free(a.s, rf_str(id));
}

/* The messages of a batch of bookings, kept: {length 4, bytes}. */
struct kept {
	uint8_t *p;
	size_t len, cap;
	uint32_t cnt;
};

static void keep(struct kept *k, const struct kvp_sync_msg *m)
{
	uint32_t len = (uint32_t)m->len;
	if (k->len + len + 4 > k->cap) {
		k->cap = 2 * k->cap + len + 4096;
		k->p = realloc(k->p, k->cap);
		if (!k->p)
			die("no memory");
	}
	memcpy(k->p + k->len, &len, 4);
	memcpy(k->p + k->len + 4, m->payload, len);
	k->len += len + 4;
	k->cnt++;
}

static uint64_t publish(struct kvp_zmq_mesh *mesh, struct kept *k)
{
	struct kvp_sync_msg msg;
	uint64_t from = bench_cpu_ns();
	int rc;
	while ((rc = kvp_sync_next(&a.sync, kvp_clock_mono_ns(), &msg)) == KVP_OK || rc == KVP_ERR_EXISTS) {
		if (rc == KVP_OK && k)
			keep(k, &msg);
		else if (rc == KVP_OK)
			kvp_zmq_mesh_send(mesh, msg.topic, msg.payload, msg.len);
		kvp_sync_done(&a.sync);
	}
	return bench_cpu_ns() - from;
}

static uint64_t mirror(const struct kept *k)
{
	uint64_t from = bench_cpu_ns(), now_ns = kvp_clock_mono_ns();
	for (size_t at = 0; at < k->len;) {
		uint32_t len;
		memcpy(&len, k->p + at, 4);
		rf_hear(&b, k->p + at + 4, len, now_ns);
		at += len + 4;
	}
	return bench_cpu_ns() - from;
}

/* One kind after the other, so that each has its own figure. */
static void stages(struct kvp_zmq_mesh *mesh, uint32_t blocks, uint32_t *next)
{
	static const char *const kind[3] = {"add", "mark", "free"};
	void (*const act[3])(uint32_t) = {NULL, mark, end};
	uint64_t tell[3] = {0}, pub[3] = {0}, mir[3] = {0};
	uint32_t cnt = 0;
	for (; cnt < bookings; cnt += BATCH, *next += BATCH)
		for (int what = 0; what < 3; what++) {
			struct kept k = {0};
			for (uint32_t i = *next; i < *next + BATCH; i++)
				if (what)
					act[what](i);
				else
					reserve(i, blocks);
			tell[what] += publish(mesh, &k);
			mir[what] += mirror(&k);
			if (k.cnt != BATCH)
				die("not every event was told");
			uint64_t from = bench_cpu_ns();
			for (size_t at = 0; at < k.len;) {
				uint32_t len;
				memcpy(&len, k.p + at, 4);
				kvp_zmq_mesh_send(mesh, KVP_REPLICA_LIFECYCLE, k.p + at + 4, len);
				at += len + 4;
			}
			pub[what] += bench_cpu_ns() - from;
			free(k.p);
		}
	for (int what = 0; what < 3; what++)
		printf("bench=peer_%s blocks=%u read_ns=%.0f send_ns=%.0f mirror_ns=%.0f\n", kind[what],
			blocks, (double)tell[what] / cnt, (double)pub[what] / cnt, (double)mir[what] / cnt);
}

static int on_message(void *ctx, enum kvp_replica_topic t, const void *payload, size_t len)
{
	(void)ctx;
	(void)t;
	rf_hear(&b, payload, len, kvp_clock_mono_ns());
	kvp_st_rel_u64(&heard, heard + 1);
	return 0;
}

static void *listener(void *ctx)
{
	struct kvp_zmq_mesh *m = ctx;
	while (!kvp_ld_acq_u32(&done_all))
		if (!kvp_zmq_mesh_work(m, 256))
			zmq_poll(NULL, 0, 0);
	return NULL;
}

/* How many are missing in the end. */
static uint64_t wait_heard(uint64_t least, uint64_t ms)
{
	uint64_t until = bench_now_ns() + ms * 1000000, now;
	while ((now = kvp_ld_acq_u64(&heard)) < least && bench_now_ns() < until)
		sched_yield();
	return now < least ? least - now : 0;
}

static void loop(struct kvp_zmq_mesh *mesh, uint32_t blocks, uint32_t *next)
{
	uint64_t was = heard, sent = kvp_zmq_mesh_stat(mesh)->sent, from = bench_now_ns(), cpu = 0;
	uint64_t lost = 0;
	for (uint32_t done = 0; done < bookings; done += WINDOW) {
		for (uint32_t i = *next; i < *next + WINDOW; i++) {
			reserve(i, blocks);
			mark(i);
		}
		cpu += publish(mesh, NULL);
		for (uint32_t i = *next; i < *next + WINDOW; i++)
			end(i);
		cpu += publish(mesh, NULL);
		*next += WINDOW;
		uint64_t all = kvp_zmq_mesh_stat(mesh)->sent - sent;
		lost += wait_heard(was + all - lost, 10000);
	}
	uint64_t all = kvp_zmq_mesh_stat(mesh)->sent - sent, ns = bench_now_ns() - from;
	printf("bench=peer_loop blocks=%u messages=%" PRIu64 " lost=%" PRIu64 " per_s=%.0f publish_ns=%.0f\n",
		blocks, all, lost, 1e9 * (double)all / (double)ns, (double)cpu / (double)all);
}

int main(int argc, char **argv)
{
	struct kvp_local_cfg cfg = {.reservation_max = 16384, .active_block_max = 1u << 21, .seed = 1};
	struct kvp_zmq_mesh *out, *in;
	void *zmq = zmq_ctx_new();
	struct kvp_zmq_mesh_cfg mc = {.zmq = zmq,
		.ip = "127.0.0.1",
		.topics = 1u << KVP_REPLICA_LIFECYCLE,
		.on_message = on_message};
	pthread_t t;
	char endpoint[64];
	uint32_t next = 0;
	if (argc > 1)
		bookings = (uint32_t)strtoul(argv[1], NULL, 10);
	bookings = bookings < BATCH ? BATCH : bookings / BATCH * BATCH;
	bench_header();
	rf_open(&a, &cfg, 1, 8, 65536);
	rf_open(&b, &cfg, 2, 8, 1024);
	if (kvp_zmq_mesh_open(&mc, &out) || kvp_zmq_mesh_open(&mc, &in))
		die("no sockets");
	stages(out, 8, &next);
	stages(out, 128, &next);
	snprintf(endpoint, sizeof(endpoint), "tcp://127.0.0.1:%u", kvp_zmq_mesh_port(out));
	kvp_zmq_mesh_connect(in, endpoint);
	if (pthread_create(&t, NULL, listener, in))
		die("no thread");
	for (int i = 0; i < 1000 && !kvp_ld_acq_u64(&heard); i++) { /* until it is subscribed */
		kvp_zmq_mesh_send(out, KVP_REPLICA_LIFECYCLE, "", 0);
		zmq_poll(NULL, 0, 5);
	}
	zmq_poll(NULL, 0, 100);
	loop(out, 8, &next);
	loop(out, 128, &next);
	kvp_st_rel_u32(&done_all, 1);
	pthread_join(t, NULL);
	kvp_zmq_mesh_close(in);
	kvp_zmq_mesh_close(out);
	zmq_ctx_term(zmq);
	rf_close(&a);
	rf_close(&b);
	return 0;
}
