/* tests/t_apply.c — operations through the ring into the tree: order, generations, clears, marks. */
#include "daemons/indexer/ring.c"
#include "tests/idx_fake.h"
#include "shm/cmdring.h"

static struct fake_node node;
static struct kvp_idx idx;
static struct kvp_idx_ring ring;

static uint64_t ctr(enum kvp_ctr id)
{
	return node.ctr->val[id];
}

static struct kvp_idx_msg *message(enum kvp_idx_op op, uint32_t rank_slot, uint32_t dp_rank, uint32_t words)
{
	struct kvp_idx_msg *m = kvp_idx_ring_reserve(&ring, (uint32_t)KVP_IDX_MSG_WORDS + words);
	m->op = op;
	m->listener = fake->listen[rank_slot].listener;
	m->rank_slot = rank_slot;
	m->dp_rank = dp_rank;
	m->epoch = fake->epoch;
	return m;
}

static void store(uint32_t rank_slot, uint32_t dp_rank, uint64_t first, uint32_t n)
{
	struct kvp_idx_msg *m = message(KVP_IDX_STORE, rank_slot, dp_rank, 2 * n);
	m->n = n;
	for (uint32_t i = 0; i < n; i++) {
		m->data[i] = 1000 + i;
		m->data[n + i] = first + i;
	}
	kvp_idx_ring_commit(&ring);
}

static void plain(enum kvp_idx_op op, uint32_t rank_slot, uint32_t dp_rank)
{
	message(op, rank_slot, dp_rank, 0);
	kvp_idx_ring_commit(&ring);
}

static void apply_all(void)
{
	const struct kvp_idx_msg *m;
	while ((m = kvp_idx_ring_peek(&ring)))
		if (kvp_idx_apply(&idx, m, 5000) == KVP_OK)
			kvp_idx_ring_consume(&ring, m);
}

static uint32_t held(uint32_t rank_slot)
{
	return fake->ext_cnt[idx.rank[rank_slot].index_slot];
}

/* Records of random length come out as they went in, over many turns of the ring. */
static void test_ring(void)
{
	struct kvp_idx_ring r;
	uint64_t s = 88172645463325252ull, in = 0, out = 0, wrong = 0, full = 0;
	ok(kvp_idx_ring_open(&r, 1000) == KVP_ERR_INVAL, "a ring's size is a power of two");
	ok(kvp_idx_ring_open(&r, 1024) == KVP_ERR_INVAL, "and not too small");
	kvp_idx_ring_open(&r, 65536);
	while (out < 20000) {
		s ^= s << 13;
		s ^= s >> 7;
		s ^= s << 17;
		uint32_t extra = (uint32_t)(s >> 40) % (s & 63 ? 300 : 8192);
		struct kvp_idx_msg *m =
			s & 2 ? kvp_idx_ring_reserve(&r, (uint32_t)KVP_IDX_MSG_WORDS + extra) : NULL;
		full += (s & 2) && !m;
		if (m) {
			m->op = KVP_IDX_STORE;
			m->seq = in;
			m->n = extra;
			for (uint32_t i = 0; i < extra; i++)
				m->data[i] = in * 31 + i;
			kvp_idx_ring_commit(&r);
			in++;
		}
		/* The consumer is slower for a while, then faster. */
		int turn = (s >> 20 & 7) < (in / 512 % 2 ? 7u : 1u);
		const struct kvp_idx_msg *g = turn || (!m && (s & 2)) ? kvp_idx_ring_peek(&r) : NULL;
		if (!g)
			continue;
		wrong += g->seq != out || g->words != KVP_IDX_MSG_WORDS + g->n;
		for (uint32_t i = 0; i < g->n; i++)
			wrong += g->data[i] != out * 31 + i;
		kvp_idx_ring_consume(&r, g);
		out++;
	}
	is_u64(wrong, 0, "20000 records of any length come out in order and whole");
	ok(full > 0, "the ring was full at times (%llu)", (unsigned long long)full);
	kvp_idx_ring_close(&r);
}

static void test_events(void)
{
	fake_post(&idx, "{\"worker_id\":1,\"endpoint\":\"e\",\"block_size\":4,\"data_parallel_size\":2,"
			"\"kv_events_endpoints\":{\"0\":\"tcp://a:1\",\"1\":\"tcp://a:2\"}}");
	fake_post(&idx,
		"{\"worker_id\":2,\"endpoint\":\"e\",\"block_size\":4,\"kv_events_endpoint\":\"tcp://b:1\"}");
	struct kvp_part_info info;
	kvp_cat_part_info(&node.cat, 0, &info);
	for (uint32_t slot = 0; slot < 3; slot++)
		store(slot, slot == 1, 100, 4);
	apply_all();
	ok(held(0) == 4 && held(1) == 4 && held(2) == 4, "each rank holds what its own stream stored");
	is_u64(fake->last_salt, info.key_salt, "under its partition's salt");
	plain(KVP_IDX_CLEAR, 0, 0);
	store(0, 0, 200, 2);
	apply_all();
	ok(held(0) == 2 && held(1) == 4 && held(2) == 4,
		"a clear empties exactly its rank, what follows counts");
	store(0, 1, 300, 3);
	apply_all();
	ok(held(0) == 2 && held(1) == 7, "a batch that names another rank of the worker goes there");
	store(0, 2, 300, 3);
	apply_all();
	ok(held(0) == 2 && held(1) == 7 && ctr(KVP_CTR_EV_LATE) == 1,
		"a rank that the worker has not is refused");
	struct kvp_idx_msg *m = message(KVP_IDX_REMOVE, 1, 1, 3);
	m->n = 3;
	m->data[0] = 999;
	m->data[1] = 100;
	m->data[2] = 103;
	kvp_idx_ring_commit(&ring);
	apply_all();
	ok(held(1) == 5 && ctr(KVP_CTR_EV_BLOCKS_UNKNOWN) == 1,
		"an unknown hash in a removal is counted, the rest is removed");
	fake->store_rc = (uint32_t)KVP_ERR_NOTFOUND;
	store(0, 0, 1, 1);
	fake->store_rc = (uint32_t)KVP_ERR_NOTFOUND;
	apply_all();
	fake->store_rc = 0;
	is_u64(ctr(KVP_CTR_EV_STORED_PARENT), 1, "a store under a missing parent is counted");
}

static uint32_t held_in(uint32_t rank_slot, enum kvp_radix_tier tier)
{
	return fake->ext_cnt[idx.rank[rank_slot].index_slot + tier * FAKE_INDEX];
}

static struct kvp_idx_msg *hashes(enum kvp_idx_op op, enum kvp_radix_tier tier, uint64_t first, uint32_t n)
{
	struct kvp_idx_msg *m = message(op, 0, 0, 2 * n);
	m->tier = (uint16_t)tier;
	m->n = n;
	for (uint32_t i = 0; i < 2 * n; i++)
		m->data[i] = first + i % n;
	return m;
}

/* Each operation names its tier; only a clear is for all of them. */
static void test_tiers(void)
{
	uint64_t ok_before = ctr(KVP_CTR_EV_STORED_OK), removed = ctr(KVP_CTR_EV_BLOCKS_REMOVED),
		 unknown = ctr(KVP_CTR_EV_BLOCKS_UNKNOWN);
	uint32_t device = held(0);
	hashes(KVP_IDX_STORE, KVP_RADIX_HOST, 500, 4);
	kvp_idx_ring_commit(&ring);
	hashes(KVP_IDX_ATTACH, KVP_RADIX_DISK, 502, 4); /* 502 and 503 are known */
	kvp_idx_ring_commit(&ring);
	hashes(KVP_IDX_STORE, KVP_RADIX_EXTERNAL, 600, 1);
	kvp_idx_ring_commit(&ring);
	hashes(KVP_IDX_REMOVE, KVP_RADIX_HOST, 499, 2);
	kvp_idx_ring_commit(&ring);
	apply_all();
	ok(held(0) == device && held_in(0, KVP_RADIX_HOST) == 3 && held_in(0, KVP_RADIX_DISK) == 2 &&
			held_in(0, KVP_RADIX_EXTERNAL) == 1,
		"operations reach the tier they name");
	ok(ctr(KVP_CTR_EV_BLOCKS_REMOVED) == removed + 1 && ctr(KVP_CTR_EV_BLOCKS_UNKNOWN) == unknown + 1 &&
			ctr(KVP_CTR_EV_STORED_OK) == ok_before,
		"blocks of all tiers are counted, results of events on the device only");
	hashes(KVP_IDX_CLEAR_TIER, KVP_RADIX_HOST, 0, 0);
	kvp_idx_ring_commit(&ring);
	apply_all();
	ok(held(0) == device && !held_in(0, KVP_RADIX_HOST) && held_in(0, KVP_RADIX_DISK) == 2,
		"one tier is cleared alone");
	plain(KVP_IDX_CLEAR, 0, 0);
	apply_all();
	ok(!held(0) && !held_in(0, KVP_RADIX_DISK) && !held_in(0, KVP_RADIX_EXTERNAL),
		"a clear is for all tiers");
}

static void test_marks(void)
{
	uint64_t applied = 0, live = 0;
	struct kvp_idx_msg *m = message(KVP_IDX_MARK, 0, 0, 0);
	m->seq = 7;
	m->live = 7;
	m->recv_ns = 1000;
	kvp_idx_ring_commit(&ring);
	m = message(KVP_IDX_MARK, 0, 0, 0);
	m->seq = 9;
	m->live = KVP_MARK_UNSET;
	kvp_idx_ring_commit(&ring);
	apply_all();
	kvp_mark_get(&node.mark, 0, fake->open_gen[0], &applied, &live);
	ok(applied == 9 && live == 7, "marks follow the batches, replayed ones leave the live number");
	is_u64(node.ctr->hist[KVP_HIST_APPLY_NS].sum, 4000, "the lag is measured from receipt");
	plain(KVP_IDX_RESTART, 0, 0);
	store(0, 0, 500, 1);
	apply_all();
	kvp_mark_get(&node.mark, 0, fake->open_gen[0], &applied, &live);
	ok(held(0) == 1 && applied == KVP_MARK_UNSET,
		"a restarted publisher's rank starts empty, its mark unset");
	is_u64(held(1), 5, "the other rank keeps its blocks");
}

static void test_late(void)
{
	/* Operations that wait in the ring while their worker goes and comes back. */
	uint64_t late = ctr(KVP_CTR_EV_LATE);
	store(2, 0, 600, 8);
	kvp_idx_worker_delete(&idx, 2);
	apply_all();
	is_u64(ctr(KVP_CTR_EV_LATE), late + 1, "an operation of a removed worker is refused");
	kvp_idx_clear_some(&idx, 10);
	struct fake_listen old = fake->listen[2];
	fake_post(&idx,
		"{\"worker_id\":2,\"endpoint\":\"e\",\"block_size\":4,\"kv_events_endpoint\":\"tcp://b:1\"}");
	is_u64(fake->listen[2].applied, KVP_MARK_UNSET, "the worker comes back with a fresh watermark");
	ok(held(2) == 0 && fake->listen[2].listener != old.listener, "empty, with another listener");
	struct kvp_idx_msg *m = message(KVP_IDX_STORE, 2, 0, 2);
	m->listener = old.listener;
	m->n = 1;
	kvp_idx_ring_commit(&ring);
	apply_all();
	is_u64(held(2), 0, "what its old listener still sends does not revive its blocks");
	/* The same for one rank of a worker whose other rank's listener stays and names it. */
	store(0, 1, 700, 2);
	kvp_idx_worker_patch(&idx, 1, "{\"data_parallel_size\":1}", 24);
	kvp_idx_clear_some(&idx, 10);
	kvp_idx_worker_patch(&idx, 1, "{\"data_parallel_size\":2}", 24);
	apply_all();
	is_u64(held(1), 0, "an operation older than its rank's registration is refused");
	store(0, 1, 700, 2);
	apply_all();
	is_u64(held(1), 2, "a newer one counts");
}

/* Brings the next message once. */
static int apply_once(void)
{
	const struct kvp_idx_msg *m = kvp_idx_ring_peek(&ring);
	int rc = kvp_idx_apply(&idx, m, 5000);
	if (rc == KVP_OK)
		kvp_idx_ring_consume(&ring, m);
	return rc;
}

/* A clear of many steps: what is behind it waits for it, other ranks do not. */
static void test_steps(void)
{
	uint64_t cleared = ctr(KVP_CTR_EV_CLEARED_OK), restarts = ctr(KVP_CTR_EV_RESTART);
	struct kvp_idx_msg *other = calloc(1, sizeof(*other) + 16);
	plain(KVP_IDX_CLEAR, 0, 0);
	store(0, 0, 800, 3);
	fake->clear_steps = 3;
	ok(apply_once() == KVP_ERR_AGAIN && apply_once() == KVP_ERR_AGAIN, "a clear in steps");
	*other = *message(KVP_IDX_STORE, 1, 0, 2); /* never committed: as of another decoder thread */
	other->n = 1;
	ok(kvp_idx_apply(&idx, other, 5000) == KVP_ERR_AGAIN,
		"what another listener has for that rank waits as well");
	other->dp_rank = 1;
	uint32_t was = held(1);
	ok(kvp_idx_apply(&idx, other, 5000) == KVP_OK && held(1) == was + 1,
		"what it has for others does not");
	other->op = KVP_IDX_CLEAR;
	ok(kvp_idx_apply(&idx, other, 5000) == KVP_ERR_AGAIN && held(1) == was + 1 && fake->clear_steps == 1,
		"the tree clears one slot at a time");
	is_u64(ctr(KVP_CTR_EV_CLEARED_OK), cleared, "not done yet");
	apply_all();
	ok(held(0) == 3 && ctr(KVP_CTR_EV_CLEARED_OK) == cleared + 1, "done; then the rest, in order");
	ok(kvp_idx_apply(&idx, other, 5000) == KVP_OK && held(1) == 0, "now the next");
	plain(KVP_IDX_RESTART, 0, 0);
	store(0, 0, 900, 2);
	fake->clear_steps = 2;
	ok(apply_once() == KVP_ERR_AGAIN && ctr(KVP_CTR_EV_RESTART) == restarts, "a restart clears in steps");
	apply_all();
	ok(held(0) == 2 && ctr(KVP_CTR_EV_RESTART) == restarts + 1, "and what follows counts");
	/* The worker goes in the middle of it: its slot is cleared as any that was lost. */
	plain(KVP_IDX_CLEAR, 2, 0);
	fake->clear_steps = 5;
	ok(apply_once() == KVP_ERR_AGAIN, "a third clear");
	uint32_t clears = fake->clears;
	kvp_idx_worker_delete(&idx, 2);
	apply_all();
	is_u64(kvp_idx_clear_some(&idx, 10), 0, "whose worker goes: the slot is cleared all the same");
	ok(fake->clears == clears + 1 && idx.clearing == KVP_INDEX_NONE, "once, and nobody waits for it");
	fake->clear_steps = 0;
	fake_post(&idx,
		"{\"worker_id\":2,\"endpoint\":\"e\",\"block_size\":4,\"kv_events_endpoint\":\"tcp://b:1\"}");
	free(other);
}

static void test_not_indexed(void)
{
	idx.cfg.events = KVP_WREC_EVENTS_OFF;
	fake_post(&idx, "{\"worker_id\":50,\"endpoint\":\"e\",\"block_size\":4,\"data_parallel_size\":61}");
	idx.cfg.events = KVP_WREC_EVENTS_ON;
	fake_post(&idx, "{\"worker_id\":60,\"endpoint\":\"e\",\"block_size\":4,\"kv_events_endpoint\":\"tcp:/"
			"/z:1\"}");
	uint32_t slot = 64;
	ok(idx.rank[slot].worker_id == 60 && idx.rank[slot].index_slot == KVP_INDEX_NONE,
		"a rank beyond the index capacity");
	store(slot, 0, 1, 1);
	apply_all();
	is_u64(ctr(KVP_CTR_EV_NOT_INDEXED), 1, "is selectable, its events are counted");
}

/* Sends blocks from..from + n - 1 of a booking of total blocks. 1: it was recorded. */
static int piece(struct kvp_cmd_routed c, uint32_t from, uint32_t n, uint32_t total)
{
	static uint64_t local[100000];
	uint32_t before = fake->routed_cnt;
	c.from = from;
	c.total = total;
	for (uint32_t i = 0; i < n; i++)
		local[i] = 7000 + from + i;
	kvp_idx_routed(&idx, &c, local, n * 8, 77);
	return fake->routed_cnt != before;
}

/* Bookings: put together by sender, taken for the rank that they name and no other. */
static void test_routed(void)
{
	struct kvp_routed_cfg cfg = {.slot_max = FAKE_INDEX};
	struct kvp_cmd_routed a = {1, idx.rank[1].rank_gen, 0, 0, KVP_OWNER(2, 3), 0};
	struct kvp_cmd_routed b = {2, idx.rank[2].rank_gen, 0, 0, KVP_OWNER(4, 3), 0};
	uint64_t bad = ctr(KVP_CTR_ROUTED_BAD), late = ctr(KVP_CTR_ROUTED_LATE);
	ok(!piece(a, 0, 3, 3), "without a table for them bookings do nothing");
	kvp_idx_routed_open(&idx, NULL, &cfg);
	fake->routed_wrong = 0;
	ok(piece(a, 0, 3, 3) && fake->routed_n == 3 && fake->routed_slot == idx.rank[1].index_slot,
		"a booking in one piece goes to its rank's index slot");
	ok(fake->routed_salt == idx.rank[1].part_salt && fake->routed_now == 77 && fake->routed_limit == 0,
		"with its partition's salt, the time, and the size of its worker, unknown here");
	a.number = b.number = 5;
	ok(!piece(a, 0, 400, 1000) && !piece(b, 0, 500, 900) && !piece(a, 400, 400, 1000) &&
			piece(b, 500, 400, 900) && fake->routed_n == 900,
		"pieces of two senders, mixed");
	ok(piece(a, 800, 200, 1000) && fake->routed_n == 1000, "each is whole in the end");
	ok(piece(a, 0, 65536, 65536), "the longest booking");
	is_u64(ctr(KVP_CTR_ROUTED_BAD), bad, "all that is well-formed");
	a.number = 6;
	piece(a, 0, 400, 1000);
	a.number = 7;
	ok(!piece(a, 400, 600, 1000), "a piece of another booking does not fit");
	a.number = 6;
	ok(!piece(a, 600, 400, 1000), "nor one behind a missing piece");
	ok(!piece(a, 0, 0, 0) && !piece(a, 0, 4, 3) && !piece(a, 3, 1, 3), "nor more blocks than there are");
	ok(!piece(a, 0, 65537, 65537), "nor a longer booking than any");
	a.owner = KVP_OWNER(2, 4); /* another process in the same slot */
	a.number = 6;
	ok(!piece(a, 400, 600, 1000), "nor one of a sender that has died");
	is_u64(ctr(KVP_CTR_ROUTED_BAD), bad + 7, "each is counted");
	is_u64(fake->routed_wrong, 0, "every block came through");
	a.rank_gen += 2;
	ok(!piece(a, 0, 3, 3), "a rank's successor does not get its bookings");
	a.rank_slot = 5000;
	ok(!piece(a, 0, 3, 3), "nor does a rank that cannot be");
	a.rank_slot = 64;
	a.rank_gen = idx.rank[64].rank_gen;
	ok(!piece(a, 0, 3, 3), "nor one without an index slot");
	fake->forgotten_cnt = 0;
	uint32_t slot = idx.rank[2].index_slot;
	kvp_idx_worker_delete(&idx, 2);
	ok(fake->forgotten_cnt == 1 && fake->forgotten[0] == slot, "those of a lost rank are forgotten");
	ok(!piece(b, 0, 3, 3), "what still comes for it is refused");
	is_u64(ctr(KVP_CTR_ROUTED_LATE), late + 4, "each is counted");
	kvp_idx_routed_recover(&idx);
	ok(fake->routed_owned[idx.rank[1].index_slot] && !fake->routed_owned[slot],
		"a restart goes on with the blocks of ranks that stay");
	fake_post(&idx, "{\"worker_id\":7,\"endpoint\":\"e\",\"block_size\":4,\"total_kv_blocks\":123,"
			"\"kv_events_endpoint\":\"tcp://q:1\"}");
	struct kvp_cmd_routed c = {.rank_slot = UINT32_MAX, .owner = KVP_OWNER(2, 3)};
	for (uint32_t i = 0; i < FAKE_RANKS; i++)
		if (idx.rank[i].worker_id == 7)
			c.rank_slot = i;
	c.rank_gen = c.rank_slot < FAKE_RANKS ? idx.rank[c.rank_slot].rank_gen : 0;
	idx.rank[c.rank_slot % FAKE_RANKS].index_slot = 9; /* all real ones are taken */
	ok(piece(c, 0, 2, 2) && fake->routed_limit == 123, "a worker's size goes along");
}

int main(void)
{
	fake_node_open(&node);
	fake_idx_open(&idx, &node, KVP_WREC_EVENTS_ON);
	kvp_idx_ring_open(&ring, 1 << 16);
	test_ring();
	test_events();
	test_tiers();
	test_marks();
	test_late();
	test_steps();
	test_not_indexed();
	test_routed();
	kvp_idx_ring_close(&ring);
	kvp_idx_close(&idx);
	fake_node_close(&node);
	return done();
}
