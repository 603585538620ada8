/* tests/t_back_pressure.c — the apply thread stands still while an engine goes on: the ring fills, the thread
 * stops reading, the sockets fill and drop. Nothing may be lost: what was dropped comes by replay, in order.
 * The apply thread is a double that checks the order of what it takes from the rings. */
#include <kvpick/clock.h>
#include <kvpick/hash.h>
#include <unistd.h>

#include "daemons/indexer/listener.c"
#include "daemons/indexer/ring.c"
#include "tests/tap.h"

enum { BLOCK = 4, THREADS = 2, RANKS = 3, FLOOD = 300000, FEW = 500, WAIT_S = 120 };

/* An engine whose batch s stores block s + 1 under block s. It can say any of them again. */
static struct engine {
	void *pub, *router;
	char at[64], replay[64];
	uint64_t next, end; /* batches published; to be published */
	uint32_t requests;
} engine[RANKS];
static void *zmq;
static struct kvp_ctr_column_shm ctr;
static uint32_t stop;

static struct taken { /* by the double, of each rank */
	uint64_t blocks, marks, wrong;
	uint32_t ring_mask;
} taken[RANKS];

static size_t put_be(unsigned char *p, unsigned tag, uint64_t v, int bytes)
{
	p[0] = (unsigned char)tag;
	for (int i = 0; i < bytes; i++)
		p[1 + i] = (unsigned char)(v >> (8 * (bytes - 1 - i)));
	return (size_t)bytes + 1;
}

static size_t payload(unsigned char *buf, uint64_t seq)
{
	unsigned char *p = buf;
	memcpy(p, "\x92\x01\x91\x95\xab" "BlockStored" "\x91", 17);
	p += 17;
	p += put_be(p, 0xcf, seq + 1, 8);
	if (seq)
		p += put_be(p, 0xcf, seq, 8);
	else
		*p++ = 0xc0;
	*p++ = 0x90 | BLOCK;
	for (int i = 0; i < BLOCK; i++)
		p += put_be(p, 0xce, seq, 4);
	*p++ = BLOCK;
	return (size_t)(p - buf);
}

static void publish(struct engine *e)
{
	unsigned char buf[128], seq[9];
	put_be(seq, 0, e->next, 8);
	zmq_send(e->pub, "", 0, ZMQ_SNDMORE);
	zmq_send(e->pub, seq + 1, 8, ZMQ_SNDMORE);
	zmq_send(e->pub, buf, payload(buf, e->next), 0);
	kvp_st_rel_u64(&e->next, e->next + 1);
}

static void serve(struct engine *e)
{
	unsigned char id[256], start[8], seq[9], buf[128];
	int id_len = zmq_recv(e->router, id, sizeof(id), ZMQ_DONTWAIT);
	if (id_len < 0 || zmq_recv(e->router, buf, sizeof(buf), 0) != 0 ||
		zmq_recv(e->router, start, sizeof(start), 0) != 8)
		return;
	uint64_t from = 0;
	for (int i = 0; i < 8; i++)
		from = from << 8 | start[i];
	for (uint64_t s = from; s <= e->next; s++) {
		int is_end = s == e->next;
		put_be(seq, 0, is_end ? UINT64_MAX : s, 8);
		zmq_send(e->router, id, (size_t)id_len, ZMQ_SNDMORE);
		zmq_send(e->router, "", 0, ZMQ_SNDMORE);
		zmq_send(e->router, "", 0, ZMQ_SNDMORE);
		zmq_send(e->router, seq + 1, 8, ZMQ_SNDMORE);
		zmq_send(e->router, buf, is_end ? 0 : payload(buf, s), 0);
	}
	kvp_st_rel_u32(&e->requests, e->requests + 1);
}

static void *engines_run(void *arg)
{
	(void)arg;
	while (!kvp_ld_acq_u32(&stop)) {
		int busy = 0;
		for (int i = 0; i < RANKS; i++) {
			uint64_t end = kvp_ld_acq_u64(&engine[i].end);
			for (int n = 0; n < 100 && engine[i].next < end; n++, busy++)
				publish(&engine[i]);
			serve(&engine[i]);
		}
		if (!busy)
			usleep(500);
	}
	return NULL;
}

static void *bind_at(int type, char at[64], int hwm)
{
	int zero = 0;
	size_t len = 64;
	void *s = zmq_socket(zmq, type);
	zmq_setsockopt(s, ZMQ_LINGER, &zero, sizeof(zero));
	zmq_setsockopt(s, ZMQ_SNDHWM, &hwm, sizeof(hwm));
	if (zmq_bind(s, "tcp://127.0.0.1:*") || zmq_getsockopt(s, ZMQ_LAST_ENDPOINT, at, &len)) {
		printf("Bail out! bind\n");
		exit(1);
	}
	return s;
}

static void woken(void *ctx)
{
	(void)ctx;
}

static void failed(void *ctx, const char *text)
{
	(void)ctx;
	ok(0, "no listener fails: %s", text);
}

/* The double of the apply thread: takes what there is in one ring. */
static void take(struct kvp_idx_listeners *l, uint32_t ring)
{
	struct kvp_idx_ring *r = kvp_idx_listeners_ring(l, ring);
	const struct kvp_idx_msg *m;
	while ((m = kvp_idx_ring_peek(r))) {
		struct taken *t = &taken[m->rank_slot];
		t->ring_mask |= 1u << ring;
		if (m->op == KVP_IDX_STORE)
			t->wrong += m->n != 1 || m->data[1] != ++t->blocks ||
				    m->has_parent != (t->blocks > 1) ||
				    (m->has_parent && m->parent != t->blocks - 1);
		else if (m->op == KVP_IDX_MARK)
			t->wrong += m->seq != t->marks++ || t->blocks != t->marks;
		else
			t->wrong++;
		kvp_idx_ring_consume(r, m);
	}
}

#define UNTIL(cond, work)                                                                                    \
	for (uint64_t end_ = kvp_clock_mono_ns() + WAIT_S * 1000000000ull;                                   \
		!(cond) && kvp_clock_mono_ns() < end_; usleep(200))                                          \
	work

static uint64_t counted(enum kvp_ctr id)
{
	return kvp_ld_rlx_u64(&ctr.val[id]);
}

static void take_all(struct kvp_idx_listeners *l)
{
	for (uint32_t i = 0; i < THREADS; i++)
		take(l, i);
}

static void test_stall(struct kvp_idx_listeners *l)
{
	for (int i = 0; i < RANKS; i++)
		kvp_st_rel_u64(&engine[i].end, FEW);
	UNTIL(taken[0].marks == FEW && taken[1].marks == FEW && taken[2].marks == FEW, take_all(l));
	ok(taken[0].marks == FEW && taken[1].marks == FEW && taken[2].marks == FEW,
		"three engines are heard");

	/* Nobody takes from the first ring any more, while one of its engines goes on and on. */
	uint64_t full = counted(KVP_CTR_EV_RING_FULL);
	kvp_st_rel_u64(&engine[0].end, FLOOD);
	UNTIL(kvp_ld_acq_u64(&engine[0].next) == FLOOD, take(l, 1));
	is_u64(kvp_ld_acq_u64(&engine[0].next), FLOOD, "one engine publishes %d batches; nobody takes them",
		FLOOD);
	UNTIL(counted(KVP_CTR_EV_RING_FULL) > full, take(l, 1));
	ok(counted(KVP_CTR_EV_RING_FULL) > full, "the ring is full, its thread waits");
	kvp_st_rel_u64(&engine[1].end, 2 * FEW);
	kvp_st_rel_u64(&engine[2].end, 2 * FEW);
	UNTIL(taken[1].marks == 2 * FEW, take(l, 1));
	ok(taken[1].marks == 2 * FEW && taken[0].marks == FEW && taken[2].marks == FEW,
		"the other thread's engine is not held up");

	/* Goes on. What is lost shows at the next batch that is not. */
	uint32_t turns = 0;
	UNTIL(counted(KVP_CTR_EV_GAPS) && taken[0].marks == kvp_ld_acq_u64(&engine[0].next), {
		take_all(l);
		if (++turns % 100 == 0)
			kvp_st_rel_u64(&engine[0].end, engine[0].end + 1);
	});
	UNTIL(taken[2].marks == 2 * FEW, take_all(l));
	is_u64(taken[0].marks, kvp_ld_acq_u64(&engine[0].next), "after the stall everything is there");
	ok(counted(KVP_CTR_EV_GAPS) > 0 && counted(KVP_CTR_EV_REPLAYED) > 0,
		"%llu of them by replay, for %llu that the sockets had dropped",
		(unsigned long long)counted(KVP_CTR_EV_REPLAYED),
		(unsigned long long)counted(KVP_CTR_EV_GAP_MISSING));
	is_u64(counted(KVP_CTR_EV_REPLAY_INCOMPLETE), 0, "no replay lacked anything");
	ok(taken[1].marks == 2 * FEW && taken[2].marks == 2 * FEW,
		"the other engines' batches are there, too");
	is_u64(taken[0].wrong + taken[1].wrong + taken[2].wrong, 0, "all in order, none twice");
	ok(taken[0].ring_mask == 1 && taken[1].ring_mask == 2 && taken[2].ring_mask == 1,
		"each rank stayed with one thread");
}

int main(void)
{
	zmq = zmq_ctx_new();
	struct kvp_idx_listeners *l;
	struct kvp_idx_listeners_cfg cfg = {
		.threads = THREADS, .ctr = &ctr, .wake = woken, .failed = failed};
	if (kvp_idx_listeners_open(&cfg, &l))
		return 1;
	for (uint32_t i = 0; i < RANKS; i++) {
		engine[i].pub = bind_at(ZMQ_XPUB, engine[i].at, 1000);
		engine[i].router = bind_at(ZMQ_ROUTER, engine[i].replay, 0);
		struct kvp_idx_listen spec = {.listener = i + 1,
			.rank_slot = i,
			.rank_cnt = 1,
			.block_size = BLOCK,
			.event = engine[i].at,
			.replay = engine[i].replay,
			.applied_seq = KVP_MARK_UNSET,
			.live_seq = KVP_MARK_UNSET};
		unsigned char subscription[8];
		kvp_idx_listen_start(l, &spec);
		zmq_recv(engine[i].pub, subscription, sizeof(subscription), 0);
	}
	pthread_t tid;
	if (pthread_create(&tid, NULL, engines_run, NULL))
		return 1;
	test_stall(l);
	kvp_st_rel_u32(&stop, 1);
	pthread_join(tid, NULL);
	kvp_idx_listeners_close(l);
	for (uint32_t i = 0; i < RANKS; i++) {
		zmq_close(engine[i].pub);
		zmq_close(engine[i].router);
	}
	zmq_ctx_term(zmq);
	return done();
}
