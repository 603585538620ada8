/* tests/t_events.c — from a publisher's socket to the tree: restart, gaps, clears, both reply shapes, a
 * worker registered anew. Real sockets and decoder threads; the tree is a double that records hashes. */
#define IDX_REAL_LISTENERS
#include <kvpick/clock.h>
#include <msgpack.h>
#include <pthread.h>
#include <unistd.h>
#include <zmq.h>

#include "daemons/indexer/listener.c"
#include "daemons/indexer/ring.c"
#include "tests/idx_fake.h"

enum { WAIT_MS = 10000, BLOCK = 4 };

/* A publisher with a replay service. */
struct engine {
	void *pub, *router;
	char at[64], replay[64];
	struct kept {
		uint64_t seq;
		size_t len;
		char bytes[512];
	} kept[32];
	int kept_cnt, has_topic, has_end;
	uint32_t requests;
	uint64_t last_start;
	int subscribers;
};

static void *zmq;
static struct fake_node node;
static struct kvp_idx idx;

static void *bind_at(int type, char at[64])
{
	int zero = 0, all = 1;
	size_t len = 64;
	void *s = zmq_socket(zmq, type);
	zmq_setsockopt(s, ZMQ_LINGER, &zero, sizeof(zero));
	if (type == ZMQ_XPUB)
		zmq_setsockopt(s, ZMQ_XPUB_VERBOSER, &all, sizeof(all));
	uint64_t end = kvp_clock_mono_ns() + WAIT_MS * 1000000ull;
	while (zmq_bind(s, at[0] ? at : "tcp://127.0.0.1:*") && kvp_clock_mono_ns() < end)
		usleep(5000); /* the address of the publisher before may still be taken */
	zmq_getsockopt(s, ZMQ_LAST_ENDPOINT, at, &len);
	return s;
}

static void put_seq(unsigned char out[8], uint64_t seq)
{
	for (int i = 0; i < 8; i++)
		out[i] = (unsigned char)(seq >> (56 - 8 * i));
}

static void serve(struct engine *e)
{
	unsigned char id[256], start[16], seq[8], m[64];
	int n = zmq_recv(e->pub, m, sizeof(m), ZMQ_DONTWAIT);
	if (n >= 1)
		e->subscribers += m[0] == 1 ? 1 : -1;
	int id_len = e->router ? zmq_recv(e->router, id, sizeof(id), ZMQ_DONTWAIT) : -1;
	if (id_len < 0 || zmq_recv(e->router, start, sizeof(start), 0) != 0 ||
		zmq_recv(e->router, start, sizeof(start), 0) != 8)
		return;
	e->last_start = 0;
	for (int i = 0; i < 8; i++)
		e->last_start = e->last_start << 8 | start[i];
	e->requests++;
	for (int i = 0; i <= e->kept_cnt; i++) {
		int is_end = i == e->kept_cnt;
		if (is_end ? !e->has_end : e->kept[i].seq < e->last_start)
			continue;
		put_seq(seq, is_end ? UINT64_MAX : e->kept[i].seq);
		zmq_send(e->router, id, (size_t)id_len, ZMQ_SNDMORE);
		zmq_send(e->router, "", 0, ZMQ_SNDMORE);
		if (e->has_topic)
			zmq_send(e->router, "", 0, ZMQ_SNDMORE);
		zmq_send(e->router, seq, 8, ZMQ_SNDMORE);
		zmq_send(e->router, is_end ? "" : e->kept[i].bytes, is_end ? 0 : e->kept[i].len, 0);
	}
}

/* Applies, serves and waits until cond holds. */
#define UNTIL(e, cond)                                                                                       \
	for (uint64_t end_ = kvp_clock_mono_ns() + WAIT_MS * 1000000ull;                                     \
		!(cond) && kvp_clock_mono_ns() < end_;)                                                      \
	turn(e)

static void turn(struct engine *e)
{
	const struct kvp_idx_msg *m;
	struct kvp_idx_ring *r;
	for (uint32_t i = 0; idx.listeners && (r = kvp_idx_listeners_ring(idx.listeners, i)); i++)
		while ((m = kvp_idx_ring_peek(r)) && kvp_idx_apply(&idx, m, kvp_clock_mono_ns()) == KVP_OK)
			kvp_idx_ring_consume(r, m);
	serve(e);
	usleep(500);
}

enum what { LIVE = 1, KEPT = 2 };

static void batch(struct engine *e, uint64_t seq, enum what what, const msgpack_sbuffer *b)
{
	unsigned char s[8];
	put_seq(s, seq);
	if (what & KEPT) {
		struct kept *k = &e->kept[e->kept_cnt++];
		k->seq = seq;
		k->len = b->size;
		memcpy(k->bytes, b->data, b->size);
	}
	if (!(what & LIVE))
		return;
	zmq_send(e->pub, "", 0, ZMQ_SNDMORE);
	zmq_send(e->pub, s, 8, ZMQ_SNDMORE);
	zmq_send(e->pub, b->data, b->size, 0);
}

static void pack_str(msgpack_packer *p, const char *s)
{
	msgpack_pack_str(p, strlen(s));
	msgpack_pack_str_body(p, s, strlen(s));
}

/* One BlockStored of block `ext` under `parent` (0 = root); rank < 0: the batch names none. */
static void store(struct engine *e, uint64_t seq, enum what what, uint64_t ext, uint64_t parent, int rank)
{
	msgpack_sbuffer b;
	msgpack_packer p;
	msgpack_sbuffer_init(&b);
	msgpack_packer_init(&p, &b, msgpack_sbuffer_write);
	msgpack_pack_array(&p, 3);
	msgpack_pack_double(&p, 1.0);
	msgpack_pack_array(&p, 1);
	msgpack_pack_array(&p, 7);
	pack_str(&p, "BlockStored");
	msgpack_pack_array(&p, 1);
	msgpack_pack_uint64(&p, ext);
	if (parent)
		msgpack_pack_uint64(&p, parent);
	else
		msgpack_pack_nil(&p);
	msgpack_pack_array(&p, BLOCK);
	for (int i = 0; i < BLOCK; i++)
		msgpack_pack_uint32(&p, (uint32_t)ext * 10 + (uint32_t)i);
	msgpack_pack_uint32(&p, BLOCK);
	msgpack_pack_nil(&p);
	pack_str(&p, "GPU");
	if (rank >= 0)
		msgpack_pack_int(&p, rank);
	else
		msgpack_pack_nil(&p);
	batch(e, seq, what, &b);
	msgpack_sbuffer_destroy(&b);
}

static void clear(struct engine *e, uint64_t seq)
{
	msgpack_sbuffer b;
	msgpack_packer p;
	msgpack_sbuffer_init(&b);
	msgpack_packer_init(&p, &b, msgpack_sbuffer_write);
	msgpack_pack_array(&p, 2);
	msgpack_pack_double(&p, 1.0);
	msgpack_pack_array(&p, 1);
	msgpack_pack_array(&p, 1);
	pack_str(&p, "AllBlocksCleared");
	batch(e, seq, LIVE, &b);
	msgpack_sbuffer_destroy(&b);
}

static void woken(void *ctx)
{
	(void)ctx;
}

/* What a decoder thread told last. */
static struct {
	pthread_mutex_t lock;
	char text[256];
} failure = {PTHREAD_MUTEX_INITIALIZER, ""};

static void failed(void *ctx, const char *text)
{
	(void)ctx;
	pthread_mutex_lock(&failure.lock);
	snprintf(failure.text, sizeof(failure.text), "%s", text);
	pthread_mutex_unlock(&failure.lock);
}

static const char *last_failure(void)
{
	static char text[sizeof(failure.text)];
	pthread_mutex_lock(&failure.lock);
	memcpy(text, failure.text, sizeof(text));
	pthread_mutex_unlock(&failure.lock);
	return text;
}

static int idx_open(void)
{
	struct kvp_idx_cfg cfg = {KVP_WREC_QUEUEING_OFF, KVP_WREC_EVENTS_ON};
	struct kvp_idx_listeners_cfg lc = {.threads = 2, .ctr = node.ctr, .wake = woken, .failed = failed};
	return kvp_idx_open(&idx, &node.cat, NULL, NULL, &node.mark, node.ctr, &cfg) ||
		kvp_idx_listeners_open(&lc, &idx.listeners) || kvp_idx_recover(&idx);
}

static uint32_t held(uint64_t worker, uint32_t rank)
{
	for (uint32_t i = 0; i < FAKE_RANKS; i++)
		if (idx.rank[i].worker_id == worker && idx.rank[i].dp_rank == rank && idx.rank[i].listener)
			return fake->ext_cnt[idx.rank[i].index_slot];
	return UINT32_MAX;
}

static uint64_t ctr(enum kvp_ctr id)
{
	return kvp_ld_rlx_u64(&node.ctr->val[id]);
}

static void engine_open(struct engine *e, int has_replay)
{
	memset(e, 0, sizeof(*e));
	e->has_topic = e->has_end = 1;
	e->pub = bind_at(ZMQ_XPUB, e->at);
	e->router = has_replay ? bind_at(ZMQ_ROUTER, e->replay) : NULL;
}

static void engine_close(struct engine *e)
{
	zmq_close(e->pub);
	if (e->router)
		zmq_close(e->router);
}

static void worker(struct engine *e, uint64_t id)
{
	fake_post(&idx,
		"{\"worker_id\":%llu,\"endpoint\":\"e\",\"block_size\":4,\"kv_events_endpoint\":\"%s\"%s%s%"
		"s}",
		(unsigned long long)id, e->at, e->router ? ",\"replay_endpoint\":\"" : "", e->replay,
		e->router ? "\"" : "");
	UNTIL(e, e->subscribers > 0);
}

static void test_restart(void) /* R05 */
{
	struct engine e;
	engine_open(&e, 0);
	worker(&e, 1);
	for (uint64_t s = 0; s < 10; s++)
		store(&e, s, LIVE, 100 + s, s ? 99 + s : 0, -1);
	UNTIL(&e, held(1, 0) == 10);
	is_u64(held(1, 0), 10, "ten blocks of a publisher");
	zmq_close(e.pub);
	e.subscribers = 0;
	e.pub = bind_at(ZMQ_XPUB, e.at);
	UNTIL(&e, e.subscribers > 0);
	store(&e, 0, LIVE, 500, 0, -1);
	UNTIL(&e, held(1, 0) == 1);
	is_u64(held(1, 0), 1, "after its restart only what the new one stored");
	is_u64(ctr(KVP_CTR_EV_RESTART), 1, "counted");
	engine_close(&e);
	kvp_idx_worker_delete(&idx, 1);
}

static void test_gap(int has_replay, int frames) /* R06, R08 */
{
	struct engine e;
	uint64_t gaps = ctr(KVP_CTR_EV_GAPS);
	engine_open(&e, has_replay);
	e.has_topic = frames == 3;
	worker(&e, 2);
	for (uint64_t s = 0; s < 6; s++)
		store(&e, s, s == 3 || s == 4 ? KEPT : LIVE | KEPT, 200 + s, s ? 199 + s : 0, -1);
	UNTIL(&e, has_replay ? held(2, 0) == 6 : held(2, 0) == 4);
	is_u64(held(2, 0), has_replay ? 6 : 4, "two lost batches: %s",
		has_replay ? "replayed" : "no crash, the rest is applied");
	if (has_replay)
		ok(e.last_start == 3 && e.requests == 1, "asked from the first lost one, once (%d frames)",
			frames);
	UNTIL(&e, ctr(KVP_CTR_EV_GAPS) > gaps);
	is_u64(ctr(KVP_CTR_EV_GAPS), gaps + 1, "one gap counted");
	engine_close(&e);
	kvp_idx_worker_delete(&idx, 2);
}

static void test_no_end(void) /* R08 */
{
	struct engine e;
	engine_open(&e, 1);
	e.has_end = 0;
	worker(&e, 3);
	for (uint64_t s = 0; s < 4; s++)
		store(&e, s, s == 1 ? KEPT : LIVE | KEPT, 300 + s, s ? 299 + s : 0, -1);
	UNTIL(&e, held(3, 0) == 4);
	store(&e, 4, LIVE, 304, 303, -1);
	UNTIL(&e, held(3, 0) == 5);
	is_u64(held(3, 0), 5, "a replay without end marker is left behind, the live stream goes on");
	engine_close(&e);
	kvp_idx_worker_delete(&idx, 3);
}

static void test_clear(void) /* R07 */
{
	struct engine a, b, c;
	engine_open(&a, 0);
	engine_open(&b, 0);
	engine_open(&c, 0);
	fake_post(&idx,
		"{\"worker_id\":4,\"endpoint\":\"e\",\"block_size\":4,\"data_parallel_size\":2,"
		"\"kv_events_endpoints\":{\"0\":\"%s\",\"1\":\"%s\"}}",
		a.at, b.at);
	worker(&c, 5);
	UNTIL(&a, a.subscribers);
	UNTIL(&b, b.subscribers);
	for (uint64_t s = 0; s < 4; s++) {
		store(&a, s, LIVE, 10 + s, s ? 9 + s : 0, -1);
		store(&b, s, LIVE, 10 + s, s ? 9 + s : 0, -1);
		store(&c, s, LIVE, 10 + s, s ? 9 + s : 0, -1);
	}
	UNTIL(&a, held(4, 0) == 4 && held(4, 1) == 4 && held(5, 0) == 4);
	clear(&a, 4);
	UNTIL(&a, held(4, 0) == 0);
	ok(held(4, 0) == 0 && held(4, 1) == 4 && held(5, 0) == 4,
		"a clear empties exactly the emitting rank");
	store(&a, 5, LIVE, 20, 0, -1);
	store(&a, 6, LIVE, 21, 20, -1);
	UNTIL(&a, held(4, 0) == 2);
	is_u64(held(4, 0), 2, "which then fills again");
	store(&a, 7, LIVE, 30, 0, 1);
	UNTIL(&a, held(4, 1) == 5);
	is_u64(held(4, 1), 5, "a batch that names the other rank goes to it");
	uint64_t unknown = ctr(KVP_CTR_EV_UNKNOWN_RANK);
	store(&a, 8, LIVE, 31, 0, 7);
	UNTIL(&a, ctr(KVP_CTR_EV_UNKNOWN_RANK) > unknown);
	ok(ctr(KVP_CTR_EV_UNKNOWN_RANK) == unknown + 1 && held(4, 0) == 2,
		"one for a rank the worker has not is counted");
	engine_close(&a);
	engine_close(&b);
	engine_close(&c);
	kvp_idx_worker_delete(&idx, 4);
	kvp_idx_worker_delete(&idx, 5);
}

static void test_anew(void) /* R12 */
{
	struct engine e;
	engine_open(&e, 1);
	worker(&e, 6);
	for (uint64_t s = 0; s < 10; s++)
		store(&e, s, LIVE | KEPT, 600 + s, s ? 599 + s : 0, -1);
	UNTIL(&e, held(6, 0) == 10);
	kvp_idx_worker_delete(&idx, 6);
	UNTIL(&e, e.subscribers == 0);
	kvp_idx_clear_some(&idx, 10);
	uint64_t parents = ctr(KVP_CTR_EV_STORED_PARENT);
	worker(&e, 6);
	is_u64(held(6, 0), 0, "a worker that comes back starts empty");
	store(&e, 10, LIVE | KEPT, 610, 609, -1);
	UNTIL(&e, held(6, 0) == 11);
	ok(e.requests == 1 && e.last_start == 0, "its first batch asks for all from 0");
	is_u64(held(6, 0), 11, "the whole chain is there");
	is_u64(ctr(KVP_CTR_EV_STORED_PARENT), parents, "no store missed its parent");
	uint64_t applied = 0, live = 0;
	for (uint32_t i = 0; i < FAKE_RANKS; i++)
		if (idx.rank[i].listener)
			UNTIL(&e, kvp_mark_get(&node.mark, i, idx.rank[i].rank_gen, &applied, &live) == 0 &&
						applied == 10);
	ok(applied == 10, "the mark has advanced");
	engine_close(&e);
	kvp_idx_worker_delete(&idx, 6);
}

/* The indexer ends and starts again while its publisher goes on. */
static void test_resume(void)
{
	struct engine e;
	engine_open(&e, 1);
	worker(&e, 7);
	for (uint64_t s = 0; s < 5; s++)
		store(&e, s, LIVE | KEPT, 700 + s, s ? 699 + s : 0, -1);
	UNTIL(&e, held(7, 0) == 5);
	for (int i = 0; i < 20; i++)
		turn(&e); /* the mark follows the blocks */
	kvp_idx_listeners_close(idx.listeners);
	kvp_idx_close(&idx);
	UNTIL(&e, e.subscribers == 0);
	store(&e, 5, KEPT, 705, 704, -1);
	ok(!idx_open(), "a restarted indexer takes over");
	is_u64(held(7, 0), 5, "the tree is what it was");
	UNTIL(&e, held(7, 0) == 6);
	ok(e.requests == 1 && e.last_start == 5, "it fetches what came meanwhile, without a live batch");
	UNTIL(&e, e.subscribers > 0);
	uint32_t requests = e.requests;
	store(&e, 6, LIVE | KEPT, 706, 705, -1);
	UNTIL(&e, held(7, 0) == 7);
	is_u64(held(7, 0), 7, "then the stream goes on");
	ok(e.requests - requests <= 1, "with at most the second look");
	engine_close(&e);
	kvp_idx_worker_delete(&idx, 7);
}

/* A publisher whose numbers keep going back fails its listener; it is tried again, and the rank is emptied
 * before it is filled anew. */
static void test_failed(void)
{
	struct engine e;
	engine_open(&e, 0);
	worker(&e, 8);
	uint64_t retries = ctr(KVP_CTR_EV_RETRIES), restarts = ctr(KVP_CTR_EV_RESTART);
	for (uint64_t s = 9; s >= 5; s--) /* three numbers that go back are believed */
		store(&e, s, LIVE, 800 + s, 0, -1);
	UNTIL(&e, ctr(KVP_CTR_EV_LISTENERS_FAILED) == 1 && strstr(last_failure(), "worker 8"));
	is_u64(ctr(KVP_CTR_EV_LISTENERS_FAILED), 1, "numbers that keep going back: failed");
	const char *told = last_failure();
	ok(strstr(told, "worker 8 rank 0") && strstr(told, "several publishers"), "told: %s", told);
	ok(fake_reply_has(&idx, "\"schedulable\""), "the worker is schedulable all the same");
	is_u64(held(8, 0), 1, "its rank holds what the last one believed had stored");
	e.subscribers = 0;
	UNTIL(&e, e.subscribers == 1 && held(8, 0) == 0);
	ok(held(8, 0) == 0 && ctr(KVP_CTR_EV_RESTART) == restarts + 4, "tried again: the rank is emptied");
	store(&e, 0, LIVE, 900, 0, -1);
	UNTIL(&e, held(8, 0) == 1 && ctr(KVP_CTR_EV_LISTENERS_FAILED) == 0);
	ok(held(8, 0) == 1 && ctr(KVP_CTR_EV_LISTENERS_FAILED) == 0, "and filled by what comes now");
	is_u64(ctr(KVP_CTR_EV_RETRIES), retries + 1, "counted");
	engine_close(&e);
	kvp_idx_worker_delete(&idx, 8);

	char path[160] = "ipc:///tmp/";
	memset(path + strlen(path), 'x', 130);
	fake_post(&idx, "{\"worker_id\":9,\"endpoint\":\"e\",\"block_size\":4,\"kv_events_endpoint\":\"%s\"}",
		path);
	ok(fake_reply_has(&idx, "\"schedulable\""), "an address that is refused: schedulable");
	engine_open(&e, 0);
	UNTIL(&e, ctr(KVP_CTR_EV_RETRIES) == retries + 2 && strstr(last_failure(), "worker 9"));
	ok(ctr(KVP_CTR_EV_RETRIES) >= retries + 2 && ctr(KVP_CTR_EV_LISTENERS_FAILED) == 1,
		"failed, tried again, failed");
	told = last_failure();
	ok(strstr(told, "worker 9 rank 0: connect"), "told: %s", told);
	kvp_idx_worker_delete(&idx, 9);
	UNTIL(&e, ctr(KVP_CTR_EV_LISTENERS_FAILED) == 0);
	is_u64(ctr(KVP_CTR_EV_LISTENERS_FAILED), 0, "until it is removed");
	engine_close(&e);
}

int main(void)
{
	zmq = zmq_ctx_new();
	fake_node_open(&node);
	if (idx_open())
		return 1;
	test_restart();
	test_gap(0, 3);
	test_gap(1, 3);
	test_gap(1, 2);
	test_no_end();
	test_clear();
	test_anew();
	test_resume();
	test_failed();
	struct engine idle;
	engine_open(&idle, 0);
	UNTIL(&idle, ctr(KVP_CTR_EV_LISTENERS) == 0);
	engine_close(&idle);
	is_u64(ctr(KVP_CTR_EV_LISTENERS), 0, "no listener is left");
	kvp_idx_listeners_close(idx.listeners);
	kvp_idx_close(&idx);
	fake_node_close(&node);
	zmq_ctx_term(zmq);
	return done();
}
