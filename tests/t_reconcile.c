/* tests/t_reconcile.c — registration, patch and removal of workers: what stays, what goes, and what a kill
 * leaves. */
#include <stdlib.h>

static int no_room;
static void *thrifty(void *p, size_t n)
{
	return no_room ? NULL : realloc(p, n);
}
#define realloc thrifty
#include "tests/idx_fake.h"
#include "tests/procs.h"
#undef realloc

static struct fake_node node;
static struct kvp_idx idx;

#define TWO                                                                                                  \
	"{\"worker_id\":1,\"model_name\":\"m\",\"endpoint\":\"http://w:8000\",\"block_size\":16,"            \
	"\"data_parallel_size\":2,\"kv_events_endpoints\":{\"0\":\"tcp://w:5557\",\"1\":\"%s\"}%s}"

static int patch(uint64_t id, const char *body)
{
	return kvp_idx_worker_patch(&idx, id, body, strlen(body));
}

static void test_register(void)
{
	is_u64(fake_post(&idx, TWO, "tcp://w:5558", ",\"replay_endpoint\":\"tcp://w:5560\""), 201,
		"a worker with two ranks is registered");
	ok(fake_reply_has(&idx, "\"lifecycle\":\"schedulable\"") && !fake_reply_has(&idx, "reasons"),
		"and schedulable");
	is_str(fake_view(&node.cat, 0), "1:0@0 1:1@1", "both ranks are in the view");
	ok(fake->open_gen[0] && fake->open_gen[1], "both can be booked");
	is_str(fake->listen[1].event, "tcp://w:5558", "rank 1 listens at its own endpoint");
	is_str(fake->listen[1].replay, "tcp://w:5561", "and replays from the next port");
	ok(fake->listen[0].rank_cnt == 2 && fake->listen[0].applied == KVP_MARK_UNSET,
		"with a fresh watermark");
	is_u64(kvp_catalogue_check(&node.cat), 0, "catalogue sound");
}

static void test_unchanged(void)
{
	uint64_t published = node.ctr->val[KVP_CTR_CAT_VIEW_PUBLISHED];
	struct fake before = *fake;
	for (int i = 0; i < 100; i++)
		fake_post(&idx, TWO, "tcp://w:5558", ",\"replay_endpoint\":\"tcp://w:5560\"");
	for (int i = 0; i < 100; i++)
		patch(1, "{\"kv_transfer_domain\":\"rack-7\"}");
	ok(memcmp(&before, fake, sizeof(before)) == 0,
		"100 equal registrations and 100 label patches touch nothing");
	is_u64(node.ctr->val[KVP_CTR_CAT_VIEW_PUBLISHED], published, "and publish no view");
	is_u64(patch(1, "{\"total_kv_blocks\":77,\"max_num_batched_tokens\":5,\"taints\":[\"a\",\"b\"]}"),
		200, "capacity is patched");
	struct kvp_cat_view v;
	const uint64_t *taint;
	kvp_cat_view_begin(&node.cat, 0, &v);
	ok(v.cnt == 2 && v.rank[1].total_kv_blocks == 77 && v.rank[0].max_num_batched_tokens == 5,
		"and seen in the view");
	is_u64(kvp_cat_view_taints(&v, 1, &taint), 2, "with its taints");
	ok(memcmp(&before, fake, sizeof(before)) == 0, "without touching slots, listeners or tree");
	patch(1, "{\"taints\":[]}");
}

static void test_endpoints(void)
{
	uint32_t starts = fake->starts, clears = fake->clears, gen = fake->open_gen[1];
	uint64_t listener = fake->listen[0].listener;
	kvp_mark_advance(&node.mark, 1, gen, 9, 9);
	patch(1, "{\"kv_events_endpoints\":{\"0\":\"tcp://w:5557\",\"1\":\"tcp://x:1\"}}");
	ok(fake->starts == starts + 1 && fake->clears == clears + 1,
		"a moved event endpoint restarts and empties one rank");
	is_str(fake->listen[1].event, "tcp://x:1", "that rank");
	ok(fake->listen[0].listener == listener && fake->open_gen[1] == gen,
		"the other keeps its listener, both their bookings");
	is_u64(fake->listen[1].applied, KVP_MARK_UNSET, "its watermark is forgotten");
	patch(1, "{\"replay_endpoints\":{\"1\":\"tcp://r:9\"}}");
	ok(fake->starts == starts + 1 && fake->moves == 1, "a moved replay address restarts nothing");
	is_str(fake->listen[1].replay, "tcp://r:9", "and is told to the listener");
}

static void test_ranks(void)
{
	uint32_t gen0 = fake->open_gen[0];
	patch(1, "{\"data_parallel_size\":3,\"kv_events_endpoints\":{\"0\":\"tcp://w:5557\",\"1\":\"tcp://"
			"x:1\",\"2\":\"tcp://y:1\"}}");
	is_str(fake_view(&node.cat, 0), "1:0@0 1:1@1 1:2@2", "a rank is added");
	is_u64(fake->listen[0].rank_cnt, 3, "listeners learn the new range");
	uint32_t closes = fake->closes;
	patch(1, "{\"data_parallel_start_rank\":1,\"data_parallel_size\":2}");
	is_str(fake_view(&node.cat, 0), "1:1@1 1:2@2", "the first rank is taken away");
	ok(fake->closes == closes + 1 && !fake->open_gen[0] && fake->open_gen[1] && fake->open_gen[2],
		"only its bookings go");
	is_u64(fake->listen[0].listener, 0, "and its listener");
	ok(kvp_cat_rank_gen(&node.cat, 0) == gen0, "its slot is in use until the tree is clear");
	is_u64(kvp_idx_clear_some(&idx, 10), 0, "the tree is cleared");
	ok(!(kvp_cat_rank_gen(&node.cat, 0) & 1), "then the slot is free");
	is_u64(kvp_catalogue_check(&node.cat), 0, "catalogue sound");
}

static void test_trouble(void)
{
	is_u64(fake_post(&idx, "{\"worker_id\":2,\"model_name\":\"m\",\"endpoint\":\"e\",\"block_size\":64,"
				"\"kv_events_endpoint\":\"tcp://a:1\"}"),
		201, "another block size is accepted");
	ok(fake_reply_has(&idx, "\"incomplete\"") &&
			fake_reply_has(&idx, "block_size mismatch for model=m routing_group=default: "
						"existing=16 requested=64"),
		"but incomplete, the reason names both");
	is_str(fake_view(&node.cat, 0), "1:1@1 1:2@2", "the partition is untouched");
	is_u64(patch(2, "{\"block_size\":16}"), 200, "a patch repairs it");
	ok(fake_reply_has(&idx, "\"schedulable\""), "schedulable");
	is_str(fake_view(&node.cat, 0), "1:1@1 1:2@2 2:0@0", "and in the view, in the free slot");
	is_u64(patch(2, "{\"endpoint\":\"\"}"), 200, "an empty endpoint is accepted");
	ok(fake_reply_has(&idx, "[\"endpoint is required\"]"), "makes it incomplete");
	is_str(fake_view(&node.cat, 0), "1:1@1 1:2@2", "and takes it out");
	ok(!fake->open_gen[0] && !fake->listen[0].listener, "with bookings and listener");
	patch(2, "{\"endpoint\":\"e\",\"kv_events_endpoint\":\"nonsense\"}");
	ok(fake_reply_has(&idx, "reconciliation failed: kv_events_endpoint"),
		"a bad event endpoint is a reason");
	is_u64(patch(99, "{}"), 404, "patch of an unknown worker");
	ok(fake_reply_has(&idx, "{\"error\":\"worker 99 not found\"}"), "says so");
	is_u64(patch(99, "{\"taints\":1}"), 422, "a wrong type comes first");
	is_u64(fake_post(&idx, "{\"worker_id\":1"), 400, "broken JSON");
	is_u64(fake_post(&idx, "{}"), 422, "no worker_id");
	fake_post(&idx, "{\"worker_id\":3,\"endpoint\":\"e\",\"block_size\":1,\"data_parallel_size\":97,\"kv_"
			"events_endpoints\":{}}");
	ok(fake_reply_has(&idx, "dp_rank 96"), "a reason a rank");
	is_u64(kvp_idx_worker_delete(&idx, 3), 200, "an incomplete worker is deleted");
	idx.state = KVP_IDX_STOPPING;
	is_u64(patch(1, "{}"), 503, "no patch while shutting down");
	is_u64(fake_post(&idx, "{\"worker_id\":5}"), 503, "nor a registration");
	is_u64(kvp_idx_worker_delete(&idx, 2), 200, "but removal");
	idx.state = KVP_IDX_SERVING;
}

static void test_move_and_delete(void)
{
	kvp_idx_clear_some(&idx, 100);
	uint32_t gen = fake->open_gen[1], closes = fake->closes;
	fake_post(&idx, TWO, "tcp://w:5558", ",\"routing_group\":\"g2\"");
	is_str(fake_view(&node.cat, 0), "", "a worker that moves leaves its partition");
	uint32_t part = 9;
	kvp_cat_part_find(&node.cat, KVP_PART_AGGREGATED, "m", 1, "g2", 2, &part);
	is_str(fake_view(&node.cat, part), "1:0@0 1:1@3", "and is in the other, in other slots");
	ok(fake->closes == closes + 2 && fake->open_gen[1] != gen, "without its bookings");
	is_u64(kvp_cat_schedulable_cnt(&node.cat, KVP_PART_AGGREGATED), 1, "one schedulable worker");
	is_u64(kvp_idx_worker_delete(&idx, 1), 200, "delete");
	ok(fake_reply_has(&idx, "\"lifecycle\":\"unschedulable\"") && !fake_reply_has(&idx, "reasons"),
		"answers the final record");
	is_u64(kvp_idx_worker_delete(&idx, 1), 404, "once");
	is_u64(kvp_cat_schedulable_cnt(&node.cat, KVP_PART_AGGREGATED), 0, "none is left");
	kvp_idx_clear_some(&idx, 100);
	is_u64(idx.cat.worker_cnt + idx.cat.rank_cnt + idx.cat.index_cnt, 0, "no slot is left in use");
	is_u64(kvp_catalogue_check(&node.cat), 0, "catalogue sound");
	for (int i = 0; i < FAKE_RANKS; i++)
		gen |= fake->listen[i].listener != 0 || fake->open_gen[i] ? 0x80000000 : 0;
	ok(!(gen & 0x80000000), "no listener and no open rank either");
}

/* A list of workers that can't grow refuses a worker, and changes nothing. */
static void test_no_memory(void)
{
	static const char body[] = "{\"worker_id\":77,\"model_name\":\"nomem\",\"block_size\":16,"
				   "\"endpoint\":\"http://w:1\",\"kv_events_endpoint\":\"tcp://w:5557\"}";
	char before[256];
	snprintf(before, sizeof(before), "%s", fake_view(&node.cat, 0));
	no_room = 1;
	is_u64(fake_post(&idx, "%s", body), 503, "no memory for another worker: refused");
	no_room = 0;
	is_str(fake_view(&node.cat, 0), before, "nothing else has changed");
	is_u64(fake_post(&idx, "%s", body), 201, "with memory it is taken");
	is_u64(kvp_catalogue_check(&node.cat), 0, "catalogue sound");
	kvp_idx_worker_delete(&idx, 77);
}

/* Partitions are not given back: the last one taken, a new model is told so, and counted. */
static void test_parts(void)
{
	uint64_t full = node.ctr->val[KVP_CTR_CAT_PART_FULL];
	uint32_t cnt = kvp_cat_part_cnt(&node.cat), had = cnt;
	idx.cfg.events = KVP_WREC_EVENTS_OFF;
	for (uint32_t i = 0; i < fake_geom.part_max + 2 - had; i++) {
		fake_post(&idx,
			"{\"worker_id\":300,\"model_name\":\"m%u\",\"endpoint\":\"e\",\"block_size\":1}", i);
		int is_taken = fake_reply_has(&idx, "\"schedulable\"");
		cnt += (uint32_t)is_taken;
		if (!is_taken)
			ok(fake_reply_has(&idx, "partition table is full"), "model %u finds no partition", i);
		kvp_idx_worker_delete(&idx, 300);
	}
	is_u64(cnt, fake_geom.part_max, "as many as there are");
	is_u64(node.ctr->val[KVP_CTR_CAT_PART_FULL] - full, 2, "two registrations too many, counted");
	is_u64(node.ctr->val[KVP_CTR_CAT_PARTS], fake_geom.part_max, "the gauge shows it");
	fake_post(&idx, "{\"worker_id\":300,\"model_name\":\"m0\",\"endpoint\":\"e\",\"block_size\":1}");
	ok(fake_reply_has(&idx, "\"schedulable\""), "a model that has a partition is served as ever");
	kvp_idx_worker_delete(&idx, 300);
	idx.cfg.events = KVP_WREC_EVENTS_ON;
}

static void test_room(void)
{
	idx.cfg.events = KVP_WREC_EVENTS_OFF;
	uint32_t starts = fake->starts;
	fake_post(&idx, "{\"worker_id\":1,\"endpoint\":\"e\",\"block_size\":1,\"data_parallel_size\":90}");
	ok(fake_reply_has(&idx, "\"schedulable\"") && fake->starts == starts,
		"without KV events no endpoint is needed and nothing listens");
	fake_post(&idx, "{\"worker_id\":2,\"endpoint\":\"e\",\"block_size\":1,\"data_parallel_size\":10}");
	ok(fake_reply_has(&idx, "[\"rank capacity exhausted\"]"),
		"a worker beyond the rank capacity is incomplete");
	is_u64(kvp_cat_schedulable_cnt(&node.cat, KVP_PART_AGGREGATED), 1, "the other stays");
	fake_post(&idx,
		"{\"worker_id\":1,\"endpoint\":\"e\",\"block_size\":1,\"data_parallel_size\":4000000000}");
	ok(fake_reply_has(&idx, "[\"rank capacity exhausted\"]"), "billions of ranks as well");
	patch(2, "{}");
	ok(fake_reply_has(&idx, "\"schedulable\""), "the freed slots serve the other worker at once");
	static char body[70000];
	size_t len = (size_t)snprintf(body, sizeof(body), "{\"worker_id\":9,\"stable_routing_id\":\"");
	memset(body + len, 'x', 65400);
	snprintf(body + len + 65400, 8, "\"}");
	is_u64(kvp_idx_worker_post(&idx, KVP_PART_AGGREGATED, KVP_CMD_BY_API, body, strlen(body)), 400,
		"a record over its limit is refused");
	uint32_t widx;
	ok(kvp_cat_worker_find(&node.cat, 9, &widx) == KVP_ERR_NOTFOUND, "and leaves nothing");
	for (uint64_t id = 100; id < 100 + 50; id++)
		fake_post(&idx, "{\"worker_id\":%llu,\"endpoint\":\"e\",\"block_size\":1}",
			(unsigned long long)id);
	ok(kvp_cat_schedulable_cnt(&node.cat, KVP_PART_AGGREGATED) == 51, "51 workers");
	struct kvp_cat_view v;
	kvp_cat_view_begin(&node.cat, kvp_cat_part_cnt(&node.cat) - 1, &v);
	is_u64(kvp_catalogue_check(&node.cat), 0, "catalogue sound, views sorted");
	for (uint64_t id = 100; id < 100 + 50; id++)
		kvp_idx_worker_delete(&idx, id);
	kvp_idx_worker_delete(&idx, 1);
	kvp_idx_worker_delete(&idx, 2);
	kvp_idx_clear_some(&idx, 1000);
	is_u64(idx.cat.worker_cnt + idx.cat.rank_cnt + idx.cat.index_cnt, 0, "churn leaves nothing");
	idx.cfg.events = KVP_WREC_EVENTS_ON;
}

/* The index slots that the ranks of worker id have, NONE as -1. */
static int index_of(uint64_t id)
{
	for (uint32_t i = 0; i < FAKE_RANKS; i++)
		if (idx.rank[i].worker_id == id && !idx.rank[i].is_lost)
			return (int)idx.rank[i].index_slot;
	return -2;
}

static uint64_t waiting(void)
{
	kvp_idx_gauges(&idx);
	return node.ctr->val[KVP_CTR_IDX_RANK_WAITING];
}

/* Ranks beyond the index capacity get a slot when one becomes free, and their events from the start. */
static void test_index_slots(void)
{
	idx.cfg.events = KVP_WREC_EVENTS_OFF;
	fake_post(&idx, "{\"worker_id\":1,\"endpoint\":\"e\",\"block_size\":1,\"data_parallel_size\":%d}",
		FAKE_INDEX - 1);
	idx.cfg.events = KVP_WREC_EVENTS_ON;
	for (int id = 2; id < 6; id++)
		fake_post(&idx,
			"{\"worker_id\":%d,\"endpoint\":\"e\",\"block_size\":1,\"kv_events_endpoint\":"
			"\"tcp://h:%d\"}",
			id, id);
	ok(index_of(2) == FAKE_INDEX - 1 && index_of(3) == -1 && index_of(4) == -1 && index_of(5) == -1,
		"the last index slot is taken, three ranks have none");
	is_u64(waiting(), 3, "counted");
	is_u64(kvp_idx_worker_delete(&idx, 4), 200, "one of them leaves");
	is_u64(waiting(), 2, "two wait");
	uint32_t slot3 = 0, gen = kvp_cat_index_gen(&node.cat, FAKE_INDEX - 1);
	while (idx.rank[slot3].worker_id != 3)
		slot3++;
	uint64_t listener = fake->listen[slot3].listener, clears = fake->clears;
	kvp_mark_advance(&node.mark, slot3, idx.rank[slot3].rank_gen, 9, 9);
	kvp_idx_worker_delete(&idx, 2);
	ok(index_of(3) == -1, "a slot that is still in the tree is given to nobody");
	kvp_idx_clear_some(&idx, 10);
	ok(index_of(3) == FAKE_INDEX - 1 && index_of(5) == -1 && waiting() == 1,
		"once cleared it goes to the first rank that waits");
	ok(fake->clears == clears + 1 && kvp_cat_index_gen(&node.cat, FAKE_INDEX - 1) == gen + 2,
		"in the next generation");
	struct kvp_cat_view v;
	struct kvp_cat_rank_info info;
	kvp_cat_view_begin(&node.cat, idx.rank[slot3].part, &v);
	uint32_t at = 0;
	while (at < v.cnt && v.rank[at].worker_id != 3)
		at++;
	ok(at < v.cnt && v.rank[at].index_slot == FAKE_INDEX - 1 && v.rank[at].index_gen == gen + 2 &&
			kvp_cat_index_info(&node.cat, FAKE_INDEX - 1, &info) == KVP_OK && info.worker_id == 3,
		"the view and the catalogue say so");
	const struct fake_listen *f = &fake->listen[slot3];
	ok(f->listener != listener && f->applied == KVP_MARK_UNSET && f->fetch == KVP_ZMQ_FETCH_AT_ONCE,
		"its listener starts anew, unset, and fetches");
	is_str(f->event, "tcp://h:3", "from the same address");
	is_u64(node.ctr->val[KVP_CTR_IDX_RANK_INDEXED], 1, "counted");
	is_u64(kvp_catalogue_check(&node.cat), 0, "catalogue sound");
	/* The slot's owner is gone, but nobody was told: the next process finds the one that waits. */
	idx.waiting_cnt = 0;
	kvp_idx_worker_delete(&idx, 3);
	idx.waiting_cnt = 0;
	kvp_idx_clear_some(&idx, 10);
	kvp_idx_close(&idx);
	fake_idx_open(&idx, &node, KVP_WREC_EVENTS_ON);
	ok(index_of(5) == FAKE_INDEX - 1 && waiting() == 0, "a restarted indexer gives the free slot away");
	kvp_idx_worker_delete(&idx, 1);
	kvp_idx_worker_delete(&idx, 5);
	kvp_idx_clear_some(&idx, 1000);
	is_u64(idx.cat.rank_cnt + idx.cat.index_cnt + waiting(), 0, "nothing is left");
}

/* Who decodes is chosen by load: such a worker needs no events, and listens to none. */
static void test_decode(void)
{
	static const char body[] = "{\"worker_id\":900,\"model_name\":\"d\",\"endpoint\":\"http://w:8000\","
				   "\"block_size\":16}";
	uint32_t starts = fake->starts;
	kvp_idx_worker_post(&idx, KVP_PART_AGGREGATED, KVP_CMD_BY_API, body, strlen(body));
	ok(fake_reply_has(&idx, "\"lifecycle\":\"incomplete\""), "a worker without events is incomplete");
	kvp_idx_worker_post(&idx, KVP_PART_DECODE, KVP_CMD_BY_DISCOVERY, body, strlen(body));
	ok(fake_reply_has(&idx, "\"lifecycle\":\"schedulable\""), "but not one that decodes");
	is_u64(fake->starts, starts, "which is not listened to");
	is_u64(kvp_idx_worker_post(&idx, KVP_PART_AGGREGATED, KVP_CMD_BY_API, body, strlen(body)), 409,
		"the API does not take it over");
	ok(fake_reply_has(&idx, "worker_id 900 is registered with role decode"), "and says whose it is");
	is_u64(kvp_idx_worker_post(&idx, KVP_PART_AGGREGATED, KVP_CMD_BY_DISCOVERY, body, strlen(body)), 201,
		"discovery moves it");
	ok(fake_reply_has(&idx, "\"lifecycle\":\"incomplete\""), "to what it is now");
	is_u64(kvp_idx_worker_post(&idx, KVP_PART_AGGREGATED, KVP_CMD_BY_API, body, strlen(body)), 201,
		"where the API may change it");
	kvp_idx_worker_delete(&idx, 900);
}

static void test_restart(void)
{
	fake_post(&idx, TWO, "tcp://w:5558", ",\"taints\":[\"z\"],\"total_kv_blocks\":5");
	char before[256];
	uint32_t part = 0;
	kvp_cat_part_find(&node.cat, KVP_PART_AGGREGATED, "m", 1, "default", 7, &part);
	snprintf(before, sizeof(before), "%s", fake_view(&node.cat, part));
	kvp_mark_advance(&node.mark, 0, kvp_cat_rank_gen(&node.cat, 0), 41, 40);
	uint32_t starts = fake->starts, closes = fake->closes, clears = fake->clears;
	uint64_t version = kvp_cat_version(&node.cat);
	(void)version;
	kvp_idx_close(&idx);
	fake_idx_open(&idx, &node, KVP_WREC_EVENTS_ON);
	is_str(fake_view(&node.cat, part), before, "a restart keeps the view and its slots");
	ok(fake->closes == closes && fake->clears == clears, "bookings and tree");
	is_u64(fake->starts, starts + 2, "and listens again");
	ok(fake->listen[0].applied == 41 && fake->listen[1].applied == KVP_MARK_UNSET, "from the kept marks");
	is_u64(kvp_catalogue_check(&node.cat), 0, "catalogue sound");
	kvp_idx_worker_delete(&idx, 1);
	kvp_idx_clear_some(&idx, 10);
}

static void script(struct kvp_idx *x)
{
	fake_post(x, TWO, "tcp://w:5558", "");
	fake_post(x, "{\"worker_id\":2,\"model_name\":\"m\",\"endpoint\":\"e\",\"block_size\":16,\"kv_events_"
			"endpoint\":\"tcp://a:1\"}");
	fake_post(x, TWO, "tcp://x:1", "");
	kvp_idx_worker_patch(x, 1, "{\"data_parallel_size\":1}", 24);
	fake_post(x, TWO, "tcp://x:1", ",\"routing_group\":\"g\"");
	kvp_idx_worker_patch(x, 2, "{\"endpoint\":\"\"}", 15);
	kvp_idx_clear_some(x, 1);
	kvp_idx_worker_delete(x, 1);
	kvp_idx_clear_some(x, 100);
}

/* One rank finds no index slot until another worker gives some back. Meanwhile its mark goes on. */
static void script_index(struct kvp_idx *x)
{
	static char map[FAKE_INDEX * 32];
	size_t len = 0;
	for (int i = 0; i < FAKE_INDEX; i++)
		len += (size_t)snprintf(map + len, sizeof(map) - len, "%s\"%d\":\"tcp://f:%d\"",
			i ? "," : "", i, 1000 + i);
	fake_post(x,
		"{\"worker_id\":1,\"endpoint\":\"e\",\"block_size\":1,\"data_parallel_size\":%d,"
		"\"kv_events_endpoints\":{%s}}",
		FAKE_INDEX, map);
	fake_post(x, "{\"worker_id\":2,\"endpoint\":\"e\",\"block_size\":1,"
		     "\"kv_events_endpoint\":\"tcp://b:1\"}");
	for (uint32_t i = 0; i < FAKE_RANKS; i++)
		if (x->rank[i].worker_id == 2 && x->rank[i].index_slot == KVP_INDEX_NONE)
			kvp_mark_advance(x->mark, i, x->rank[i].rank_gen, 9, 9);
	kvp_idx_worker_patch(x, 1, "{\"data_parallel_size\":62}", 25);
	kvp_idx_clear_some(x, 100);
}

/* A rank that is in the tree starts with its first event if it was not in the tree before. */
static uint32_t late_without_start(const struct kvp_idx *x)
{
	uint32_t wrong = 0;
	for (uint32_t i = 0; i < FAKE_RANKS; i++)
		wrong += x->rank[i].worker_id == 2 && x->rank[i].index_slot != KVP_INDEX_NONE &&
			 fake->listen[i].applied != KVP_MARK_UNSET;
	return wrong;
}

/* Every schedulable record has exactly its ranks in its partition's view, each open; nothing else is in
 * use. */
static uint32_t disagreements(const struct kvp_cat *cat)
{
	static struct kvp_cat_worker_info info;
	uint32_t wrong = 0, ranks = 0, in_views = 0, used = 0;
	for (uint32_t i = 0; i < kvp_cat_worker_max(cat); i++) {
		if (kvp_cat_worker_info(cat, i, &info))
			continue;
		wrong += info.lifecycle == KVP_LIFE_DRAINING;
		struct kvp_cat_view v;
		if (info.lifecycle != KVP_LIFE_SCHEDULABLE)
			continue;
		ranks += info.size;
		if (kvp_cat_view_begin(cat, info.part, &v))
			wrong++;
		for (uint32_t k = 0; k < v.cnt; k++)
			if (v.rank[k].worker_id == info.worker_id) {
				in_views++;
				wrong += v.rank[k].dp_rank - info.start_rank >= info.size;
				wrong += fake->open_gen[v.rank[k].rank_slot] != v.rank[k].rank_gen;
				wrong += !fake->listen[v.rank[k].rank_slot].listener;
			}
	}
	for (uint32_t i = 0; i < FAKE_RANKS; i++)
		used += kvp_cat_rank_gen(cat, i) & 1;
	return wrong + (ranks != in_views) + (ranks != used);
}

static void test_kill(void (*script_run)(struct kvp_idx *), int places)
{
	uint64_t faults = 0, wrong = 0;
	int n = 1, killed = 1;
	for (; killed == 1; n++) {
		struct fake_node m;
		struct kvp_idx x;
		struct fake *outer = fake;
		fake_node_open(&m);
		pid_t pid = fork();
		if (pid == 0) {
			fake_idx_open(&x, &m, KVP_WREC_EVENTS_ON);
			die_at(NULL, (uint64_t)n);
			script_run(&x);
			_exit(0);
		}
		killed = was_killed(pid);
		memset(fake->listen, 0, sizeof(fake->listen)); /* they died with the process */
		fake_idx_open(&x, &m, KVP_WREC_EVENTS_ON);
		kvp_idx_clear_some(&x, 1000);
		faults += kvp_catalogue_check(&m.cat);
		wrong += disagreements(&m.cat) + late_without_start(&x);
		script_run(&x);
		faults += kvp_catalogue_check(&m.cat);
		wrong += disagreements(&m.cat) + late_without_start(&x) + x.waiting_cnt;
		kvp_idx_close(&x);
		fake_node_close(&m);
		fake = outer;
	}
	ok(n > places && killed == 0, "killed at every place of every command (%d)", n - 2);
	is_u64(faults, 0, "the successor's catalogue is sound each time");
	is_u64(wrong, 0, "records, views, slots, bookings and listeners agree each time");
}

int main(void)
{
	fake_node_open(&node);
	fake_idx_open(&idx, &node, KVP_WREC_EVENTS_ON);
	test_register();
	test_unchanged();
	test_endpoints();
	test_ranks();
	test_trouble();
	test_move_and_delete();
	test_no_memory();
	test_room();
	test_index_slots();
	test_restart();
	test_decode();
	test_parts();
	kvp_idx_close(&idx);
	test_kill(script, 40);
	test_kill(script_index, 60);
	fake_node_close(&node);
	return done();
}
