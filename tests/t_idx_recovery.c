/* The indexer's side of a recovery: attempts, records for known and unknown ranks, the end, the gate. */
#include "tests/idx_fake.h"

#define SEC 1000000000ull

static struct fake_node node;
static struct kvp_idx idx;
static struct kvp_recov gate;
static struct kvp_cmd_cell cell;
static union {
	char bytes[KVP_CMD_PAYLOAD_MAX];
	uint64_t word[KVP_CMD_PAYLOAD_MAX / 8];
} buf;
static uint32_t used, rec_off;

static void open_node(void)
{
	static void *mem;
	if (!mem)
		mem = shared(KVP_PAGE);
	memset(mem, 0, KVP_PAGE);
	fake_node_open(&node);
	if (kvp_recov_new(mem, &fake_geom) || kvp_recov_join(mem, &fake_geom, &gate))
		exit(1);
	kvp_recov_begin(&gate, 1);
	fake_idx_open(&idx, &node, KVP_WREC_EVENTS_ON);
	if (kvp_idx_recovery_open(&idx, &gate, 200, 0, 1))
		exit(1);
	fake->has_looked = 1;
}

static void close_node(void)
{
	kvp_idx_close(&idx);
	fake_node_close(&node);
}

/* -- commands -- */

static void head(const char *key, uint32_t block_size)
{
	struct kvp_recov_head h = {KVP_PART_AGGREGATED, block_size, (uint32_t)strlen(key), 0};
	memset(&buf, 0, sizeof(buf));
	memcpy(buf.bytes, &h, sizeof(h));
	memcpy(buf.bytes + sizeof(h), key, strlen(key));
	used = (uint32_t)sizeof(h) + KVP_RECOV_KEY_BYTES(strlen(key));
}

static void rec(
	enum kvp_recov_op op, uint64_t worker, uint32_t rank, uint64_t parent, uint64_t first, uint32_t n)
{
	struct kvp_recov_rec r = {.worker_id = worker,
		.dp_rank = rank,
		.parent = parent,
		.has_parent = parent != 0,
		.n = n,
		.op = (uint16_t)op};
	rec_off = used;
	memcpy(buf.bytes + used, &r, sizeof(r));
	uint64_t *h = &buf.word[(used + sizeof(r)) / 8];
	for (uint32_t i = 0; op == KVP_RECOV_STORE && i < n; i++)
		*h++ = 5000 + first + i;
	for (uint32_t i = 0; i < n; i++)
		*h++ = first + i;
	used += (uint32_t)KVP_RECOV_REC_BYTES(op, n);
	((struct kvp_recov_head *)(void *)&buf)->rec_cnt++;
}

static int put(uint64_t number, struct kvp_recov_done *done)
{
	uint32_t len;
	memset(done, 0, sizeof(*done));
	cell.arg[0] = number;
	cell.len = used;
	int rc = kvp_idx_recovery_put(&idx, &cell, &buf, &len, 5 * SEC);
	if (len == sizeof(*done))
		memcpy(done, &buf, sizeof(*done));
	return rc;
}

static int begin(uint64_t number, struct kvp_recov_begun *b)
{
	uint32_t len;
	cell.arg[0] = number;
	int rc = kvp_idx_recovery_begin(&idx, &cell, &buf, &len, 5 * SEC);
	if (len == sizeof(*b))
		memcpy(b, &buf, sizeof(*b));
	return rc;
}

static int end(uint64_t number, enum kvp_recov_state to)
{
	cell.arg[0] = number;
	cell.arg[1] = to;
	cell.arg[2] = 3;
	return kvp_idx_recovery_end(&idx, &cell, 6 * SEC);
}

static uint32_t slot_of(uint64_t worker_id)
{
	uint32_t w;
	return kvp_cat_worker_find(&node.cat, worker_id, &w)
		       ? UINT32_MAX
		       : idx.rank[idx.worker[w].rank_slot[0]].index_slot;
}

static void add(uint64_t id, uint32_t block_size)
{
	fake_post(&idx,
		"{\"worker_id\":%llu,\"model_name\":\"a:b\",\"routing_group\":\"g\",\"endpoint\":\"http://"
		"h:1\","
		"\"block_size\":%u,\"kv_events_endpoint\":\"tcp://h:%u\"}",
		(unsigned long long)id, block_size, 1000 + (unsigned)id);
}

/* -- claims -- */

static void attempts(void)
{
	struct kvp_recov_begun b = {9, 9};
	struct kvp_recov_done d;
	open_node();
	add(1, 16);
	fake->connected = 1;
	head("a:b:g", 16);
	rec(KVP_RECOV_STORE, 1, 0, 0, 100, 3);
	ok(put(7, &d) == KVP_ERR_FENCED, "records before any attempt are refused");
	fake->has_looked = 0;
	ok(begin(7, &b) == KVP_ERR_AGAIN && fake->mark == 7, "not all threads have looked yet");
	fake->has_looked = 1;
	ok(begin(7, &b) == KVP_OK && b.listeners == 1 && b.connected == 1, "they have");
	ok(begin(0, &b) == KVP_ERR_INVAL, "0 is no number");
	head("a:b:g", 16);
	rec(KVP_RECOV_STORE, 1, 0, 0, 100, 3);
	ok(put(7, &d) == KVP_OK && d.stored == 3 && fake->ext_cnt[slot_of(1)] == 3,
		"a known rank's go into the tree");
	ok(begin(8, &b) == KVP_OK && fake->mark == 8, "the next attempt");
	head("a:b:g", 16);
	ok(put(7, &d) == KVP_ERR_FENCED, "the last one is fenced");
	ok(end(7, KVP_RECOV_RECOVERED) == KVP_ERR_FENCED && end(0, KVP_RECOV_RECOVERED) == KVP_ERR_INVAL &&
			end(8, KVP_RECOV_RUNNING) == KVP_ERR_INVAL && !fake->opened,
		"these do not end it");
	ok(end(8, KVP_RECOV_RECOVERED) == KVP_OK && fake->opened == 9, "the listeners go on, with the mark");
	ok(end(8, KVP_RECOV_RECOVERED) == KVP_ERR_CLOSED && begin(9, &b) == KVP_ERR_CLOSED, "once");
	ok(!kvp_idx_recovery_tend(&idx, 6 * SEC, 1) && kvp_recov_is_shut(&gate), "shut until they caught up");
	fake->is_caught_up = 1;
	ok(!kvp_idx_recovery_tend(&idx, 6 * SEC, 0) && kvp_recov_is_shut(&gate),
		"and their events are applied");
	ok(kvp_idx_recovery_tend(&idx, 7 * SEC, 1) && kvp_recov_state(&gate) == KVP_RECOV_RECOVERED, "open");
	struct kvp_recov_info i;
	kvp_recov_get(&gate, &i);
	ok(i.attempts == 3 && i.blocks == 3, "figures");
	close_node();
	open_node();
	ok(begin(1, &b) == KVP_OK && end(1, KVP_RECOV_RECOVERED) == KVP_OK, "again");
	ok(!kvp_idx_recovery_tend(&idx, 6 * SEC + KVP_IDX_CATCH_UP_NS, 0) &&
			kvp_idx_recovery_tend(&idx, 7 * SEC + KVP_IDX_CATCH_UP_NS, 0) &&
			!kvp_recov_is_shut(&gate),
		"it is not waited for without bound");
	close_node();
}

static void unknown_workers(void)
{
	struct kvp_recov_begun b;
	struct kvp_recov_done d;
	open_node();
	begin(1, &b);
	head("a:b:g", 16);
	rec(KVP_RECOV_STORE, 5, 0, 0, 10, 4);
	rec(KVP_RECOV_STORE, 5, 0, 13, 14, 2);
	rec(KVP_RECOV_REMOVE, 5, 0, 0, 11, 1);
	rec(KVP_RECOV_STORE, 6, 0, 0, 20, 3);
	rec(KVP_RECOV_STORE, 7, 0, 0, 30, 3);
	rec(KVP_RECOV_CLEAR, 7, 0, 0, 0, 0);
	ok(put(1, &d) == KVP_OK && d.held == 12 && !d.stored, "blocks of workers to come are held");
	add(5, 16);
	uint32_t s = slot_of(5);
	ok(fake->ext_cnt[s] == 5 && fake->last_parent == 13 && fake->last_salt == idx.rank[0].part_salt,
		"registered: it has them, in order, without the one removed");
	ok(fake->starts == 1, "and then its listener started");
	add(6, 32);
	is_u64(idx.cat.rank_cnt, 1, "6 is of another block size than its partition: no rank");
	add(7, 16);
	ok(fake->ext_cnt[slot_of(7)] == 0, "7 was cleared");
	head("a:b:g", 16);
	rec(KVP_RECOV_STORE, 8, 0, 0, 40, 8);
	for (int i = 0; i < 60; i++) {
		cell.len = used;
		head("a:b:g", 16);
		rec(KVP_RECOV_STORE, 8, 0, 0, 40, 8);
		put(1, &d);
	}
	ok(d.dropped == 8 && !d.held, "their memory is bounded");
	begin(2, &b);
	is_u64(kvp_held_blocks(idx.recovery.held), 0, "the next attempt begins without them");
	head("a:b:g", 16);
	rec(KVP_RECOV_STORE, 9, 3, 0, 40, 8);
	put(2, &d);
	end(2, KVP_RECOV_RECOVERED);
	fake->is_caught_up = 1;
	kvp_idx_recovery_tend(&idx, 10 * SEC, 1);
	kvp_idx_recovery_tend(&idx, 10 * SEC + KVP_HELD_NS - 1, 1);
	is_u64(kvp_held_blocks(idx.recovery.held), 8, "they wait");
	kvp_idx_recovery_tend(&idx, 10 * SEC + KVP_HELD_NS, 1);
	is_u64(kvp_held_blocks(idx.recovery.held), 0, "not for ever");
	close_node();
}

static void refused(void)
{
	struct kvp_recov_begun b;
	struct kvp_recov_done d;
	open_node();
	add(1, 16);
	begin(1, &b);
	head("a:b:g", 8);
	rec(KVP_RECOV_STORE, 1, 0, 0, 100, 3);
	ok(put(1, &d) == KVP_OK && d.skipped == 3 && !fake->ext_cnt[slot_of(1)],
		"another block size: left out");
	head("a:c", 16);
	rec(KVP_RECOV_STORE, 1, 0, 0, 100, 3);
	ok(put(1, &d) == KVP_OK && d.held == 3, "another partition: held for a worker there");
	fake->store_rc = (uint32_t)KVP_ERR_NOTFOUND;
	head("a:b:g", 16);
	rec(KVP_RECOV_STORE, 1, 0, 77, 100, 3);
	ok(put(1, &d) == KVP_OK && d.parent == 1, "an unknown parent is counted");
	fake->store_rc = 0;
	head("a:b:g", 16);
	rec(KVP_RECOV_STORE, 1, 0, 0, 100, 3);
	used -= 8;
	ok(put(1, &d) == KVP_ERR_PROTO, "cut off");
	head("a:b:g", 16);
	rec(KVP_RECOV_STORE, 1, 0, 0, 100, 3);
	((struct kvp_recov_rec *)(void *)(buf.bytes + rec_off))->tier = 4;
	ok(put(1, &d) == KVP_ERR_PROTO, "no such tier");
	head("a:b:g", 16);
	rec(KVP_RECOV_REMOVE, 1, 0, 0, 100, 3);
	((struct kvp_recov_rec *)(void *)(buf.bytes + rec_off))->n = 0;
	ok(put(1, &d) == KVP_ERR_PROTO, "nothing to remove");
	static char key[KVP_RECOV_KEY_MAX + 2];
	memset(key, 'k', KVP_RECOV_KEY_MAX);
	key[KVP_RECOV_KEY_MAX / 2] = ':';
	for (uint32_t cut = 0; cut < 2; cut++) {
		head(key + cut, 16);
		rec(KVP_RECOV_STORE, 1, 0, 0, 100, 3);
		ok(put(1, &d) == KVP_OK && d.held == 3, "a key of %u bytes", KVP_RECOV_KEY_MAX - cut);
	}
	key[KVP_RECOV_KEY_MAX] = 'k';
	head(key, 16);
	rec(KVP_RECOV_STORE, 1, 0, 0, 100, 3);
	ok(put(1, &d) == KVP_ERR_PROTO, "a key of one byte more");
	head("a:b:g", 0);
	ok(put(1, &d) == KVP_ERR_PROTO, "no block size");
	used = 8;
	ok(put(1, &d) == KVP_ERR_PROTO, "no head");
	close_node();
}

static void nobody_goes_on(void)
{
	struct kvp_recov_begun b;
	open_node();
	idx.recovery.patience_ns = 60 * SEC;
	begin(1, &b); /* at 5 s */
	fake->is_caught_up = 1;
	kvp_idx_recovery_tend(&idx, 65 * SEC, 1);
	ok(kvp_recov_is_shut(&gate), "waits for the peer daemon");
	kvp_idx_recovery_tend(&idx, 66 * SEC, 1);
	ok(kvp_recov_state(&gate) == KVP_RECOV_EXHAUSTED && fake->opened == 1, "not for ever");
	close_node();
}

int main(void)
{
	attempts();
	unknown_workers();
	refused();
	nobody_goes_on();
	return done();
}
