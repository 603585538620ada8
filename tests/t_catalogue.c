/* tests/t_catalogue.c — partitions, views, records, slots, and what a writer killed at each place leaves. */
#include "shm/catalogue.h"
#include "shm/catalogue_priv.h"
#include "tests/procs.h"
#include "tests/tap.h"

static const struct kvp_geom geom = {.slot_max = 16,
	.rank_max = 96,
	.index_rank_max = 64,
	.resv_max = 64,
	.block_max = 10000,
	.active_block_max = 1024,
	.queued_max = 16,
	.part_max = 4,
	.region_gen = 7,
	.salt = {0x1234, 0x5678}};

static void *shared_new(struct kvp_cat *cat)
{
	void *mem = shared(kvp_catalogue_footprint(&geom));
	if (kvp_catalogue_new(mem, &geom) || kvp_catalogue_join(mem, &geom, cat))
		exit(1);
	return mem;
}

static void test_life(void)
{
	struct kvp_geom bad = geom;
	struct kvp_cat cat;
	ok(kvp_catalogue_footprint(&geom) > 0, "a good geometry has a footprint");
	bad.part_max = 0;
	is_u64(kvp_catalogue_footprint(&bad), 0, "no partitions: no footprint");
	bad = geom;
	bad.rank_max = 65537;
	is_u64(kvp_catalogue_footprint(&bad), 0, "too many ranks: no footprint");
	ok(kvp_catalogue_new(NULL, &geom) == KVP_ERR_INVAL, "new refuses NULL");
	void *mem = shared_new(&cat);
	ok(kvp_catalogue_new((char *)mem + 8, &geom) == KVP_ERR_INVAL, "new refuses misaligned memory");
	is_u64(kvp_catalogue_check(&cat), 0, "an empty catalogue is sound");
	bad = geom;
	bad.rank_max = 97;
	ok(kvp_catalogue_join(mem, &bad, &cat) == KVP_ERR_LAYOUT, "join refuses another geometry");
	kvp_catalogue_delete(mem);
	ok(kvp_catalogue_join(mem, &geom, &cat) == KVP_ERR_AGAIN, "join after delete answers AGAIN");
	munmap(mem, kvp_catalogue_footprint(&geom));
}

static void test_parts(struct kvp_cat_writer *w)
{
	uint32_t a, b, c, x = 99;
	struct kvp_part_info info;
	ok(kvp_cat_w_part(w, KVP_PART_AGGREGATED, "m", 1, "g", 1, 16, 0, &a) == KVP_OK,
		"a partition is created");
	ok(kvp_cat_w_part(w, KVP_PART_DECODE, "m", 1, "g", 1, 32, 1, &b) == KVP_OK && b != a,
		"role is part of the key");
	ok(kvp_cat_w_part(w, KVP_PART_AGGREGATED, "mg", 2, "", 0, 16, 0, &c) == KVP_OK && c != a,
		"names are not joined");
	ok(kvp_cat_w_part(w, KVP_PART_AGGREGATED, "m", 1, "g", 1, 16, 0, &x) == KVP_OK && x == a,
		"creation is idempotent");
	ok(kvp_cat_w_part(w, KVP_PART_AGGREGATED, "m", 1, "g", 1, 64, 0, &x) == KVP_ERR_EXISTS && x == a,
		"another block size is a mismatch");
	ok(kvp_cat_w_part(w, KVP_PART_AGGREGATED, "m", 1, "g", 1, 16, 1, &x) == KVP_ERR_EXISTS,
		"another eagle flag is a mismatch");
	ok(kvp_cat_w_part(w, KVP_PART_AGGREGATED, "z", 1, "g", 1, 0, 0, &x) == KVP_ERR_INVAL,
		"block size 0 is refused");
	ok(kvp_cat_w_part(w, KVP_PART_PREFILL, "m", 1, "g", 1, 1, 0, &x) == KVP_OK,
		"the last partition fits");
	ok(kvp_cat_w_part(w, KVP_PART_PREFILL, "n", 1, "g", 1, 1, 0, &x) == KVP_ERR_FULL, "one more is FULL");
	ok(kvp_cat_part_find(&w->cat, KVP_PART_DECODE, "m", 1, "g", 1, &x) == KVP_OK && x == b,
		"find by role and names");
	ok(kvp_cat_part_find(&w->cat, KVP_PART_DECODE, "m", 1, "h", 1, &x) == KVP_ERR_NOTFOUND,
		"unknown names are NOTFOUND");
	kvp_cat_part_info(&w->cat, b, &info);
	is_u64(info.block_size, 32, "info: block size");
	is_u64(info.is_eagle, 1, "info: eagle");
	is_str(info.model, "m", "info: model");
	uint64_t salt = info.key_salt;
	kvp_cat_part_info(&w->cat, a, &info);
	ok(salt != info.key_salt, "partitions have different key salts");
	ok(kvp_cat_part_info(&w->cat, 4, &info) == KVP_ERR_INVAL, "info of an unknown partition is INVAL");
}

static int publish(struct kvp_cat_writer *w, uint32_t part, uint64_t mark, uint32_t cnt,
	const struct kvp_cat_rank_info *slot)
{
	struct kvp_rank_view rank[96] = {0};
	uint64_t taint[3] = {mark, mark + 1, mark + 2};
	for (uint32_t i = 0; i < cnt; i++) {
		rank[i] = (struct kvp_rank_view){.worker_id = slot[i].worker_id,
			.dp_rank = slot[i].dp_rank,
			.rank_slot = slot[i].rank_slot,
			.rank_gen = slot[i].rank_gen,
			.index_slot = slot[i].index_slot,
			.index_gen = slot[i].index_gen,
			.worker_idx = slot[i].worker_idx,
			.total_kv_blocks = mark,
			.taint_off = 1,
			.taint_cnt = 2};
	}
	return kvp_cat_w_view(w, part, rank, cnt, taint, 3, cnt ? 1 : 0);
}

static void test_views(struct kvp_cat_writer *w)
{
	struct kvp_cat_rank_info slot[3];
	struct kvp_cat_view v, old;
	const uint64_t *taint;
	uint64_t version = kvp_cat_version(&w->cat);
	for (uint32_t i = 0; i < 3; i++)
		kvp_cat_w_rank_take(w, 11, i, 0, 5, &slot[i]);
	ok(kvp_cat_view_begin(&w->cat, 0, &v) == KVP_OK && v.cnt == 0,
		"a view before the first publication is empty");
	ok(publish(w, 0, 100, 3, slot) == KVP_OK, "a view is published");
	ok(kvp_cat_version(&w->cat) != version, "publication moves the version");
	ok(kvp_cat_view_valid(&w->cat, &v) == KVP_OK,
		"the empty view before stays valid over one publication");
	kvp_cat_view_begin(&w->cat, 0, &old);
	is_u64(old.cnt, 3, "all ranks are in it");
	is_u64(old.rank[2].dp_rank, 2, "in order");
	is_u64(kvp_cat_view_taints(&old, 1, &taint), 2, "taints of a rank");
	is_u64(taint[0], 101, "first taint");
	is_u64(kvp_cat_schedulable_cnt(&w->cat, KVP_PART_AGGREGATED), 1,
		"schedulable workers are counted by role");
	is_u64(kvp_cat_schedulable_cnt(&w->cat, KVP_PART_DECODE), 0, "and not in another role");
	publish(w, 0, 200, 2, slot);
	ok(kvp_cat_view_valid(&w->cat, &old) == KVP_OK && old.rank[0].total_kv_blocks == 100,
		"one publication later the old view still stands");
	publish(w, 0, 300, 1, slot);
	ok(kvp_cat_view_valid(&w->cat, &old) == KVP_ERR_AGAIN, "two publications later it is not valid");
	uint64_t many[1] = {0};
	ok(kvp_cat_w_view(w, 0, NULL, 0, many, w->cat.taint_max + 1, 0) == KVP_ERR_FULL,
		"too many taints are FULL");
	kvp_cat_view_begin(&w->cat, 0, &v);
	ok(v.cnt == 1 && v.rank[0].total_kv_blocks == 300, "and nothing was published");
	is_u64(kvp_catalogue_check(&w->cat), 0, "sound with views");
	publish(w, 0, 0, 0, slot);
	for (uint32_t i = 0; i < 3; i++)
		kvp_cat_w_rank_drop(w, slot[i].rank_slot);
}

static void test_slots(struct kvp_cat_writer *w)
{
	struct kvp_cat_rank_info slot[97], x;
	uint32_t indexed = 0;
	for (uint32_t i = 0; i < 96; i++) {
		kvp_cat_w_rank_take(w, i, 0, 0, 0, &slot[i]);
		indexed += slot[i].index_slot != KVP_INDEX_NONE;
	}
	is_u64(slot[95].rank_slot, 95, "rank slots are dense");
	is_u64(indexed, 64, "index slots go to the first ranks, the rest has none");
	ok(kvp_cat_w_rank_take(w, 1, 1, 0, 0, &x) == KVP_ERR_FULL, "no rank slot left: FULL");
	ok(kvp_cat_index_info(&w->cat, slot[5].index_slot, &x) == KVP_OK && x.worker_id == 5,
		"an index slot names its rank");
	ok((kvp_cat_rank_gen(&w->cat, 7) & 1) == 1, "a used slot has an odd generation");
	uint32_t gen = kvp_cat_rank_gen(&w->cat, 7), igen = slot[7].index_gen;
	ok(kvp_cat_w_rank_drop(w, 7) == KVP_OK && kvp_cat_w_rank_drop(w, 7) == KVP_ERR_NOTFOUND,
		"a slot is dropped once");
	ok(kvp_cat_rank_info(&w->cat, 7, &x) == KVP_ERR_NOTFOUND, "a free slot has no owner");
	kvp_cat_w_rank_take(w, 1000, 3, 0, 0, &x);
	is_u64(x.rank_slot, 7, "the lowest free slot is taken again");
	ok(x.rank_gen == gen + 2 && x.index_gen == igen + 2, "with the next generations");
	is_u64(kvp_cat_rank_gen(&w->cat, 96), 0, "a slot out of range has generation 0");
	is_u64(kvp_catalogue_check(&w->cat), 0, "sound with all slots in use");
	for (uint32_t i = 0; i < 96; i++)
		kvp_cat_w_rank_drop(w, i);
}

static int put(struct kvp_cat_writer *w, uint64_t id, const char *json)
{
	uint32_t idx;
	struct kvp_cat_worker_info info = {.worker_id = id,
		.part = KVP_PART_NONE,
		.start_rank = 1,
		.size = 2,
		.endpoint_len = 3,
		.endpoint = "e:1",
		.model_len = 1,
		.model = "m"};
	int rc = kvp_cat_w_worker_slot(w, id, &idx);
	return rc ? rc : kvp_cat_w_worker_put(w, idx, &info, json, (uint32_t)strlen(json));
}

static void test_workers(struct kvp_cat_writer *w)
{
	static char buf[KVP_CAT_RECORD_MAX], big[KVP_CAT_RECORD_MAX + 2];
	uint32_t idx, len = 0, max = kvp_cat_worker_max(&w->cat);
	struct kvp_cat_worker_info info;
	ok(kvp_cat_worker_find(&w->cat, 42, &idx) == KVP_ERR_NOTFOUND, "unknown worker");
	ok(put(w, 42, "{\"a\":1}") == KVP_OK, "a record is put");
	ok(kvp_cat_worker_find(&w->cat, 42, &idx) == KVP_OK, "and found");
	ok(kvp_cat_worker_json(&w->cat, idx, buf, sizeof(buf), &len) == KVP_OK && len == 7 &&
			!memcmp(buf, "{\"a\":1}", 7),
		"its text is what was put");
	ok(kvp_cat_worker_json(&w->cat, idx, buf, 3, &len) == KVP_ERR_LIMIT && len == 7,
		"too small a buffer: LIMIT and the size");
	kvp_cat_worker_info(&w->cat, idx, &info);
	ok(info.worker_id == 42 && info.size == 2, "info of the worker");
	is_str(info.endpoint, "e:1", "its endpoint");
	memset(big, 'x', sizeof(big) - 1);
	ok(put(w, 42, big) == KVP_ERR_LIMIT, "a text over 64 KiB is LIMIT");
	big[KVP_CAT_RECORD_MAX] = 0;
	ok(put(w, 42, big) == KVP_OK, "64 KiB fit");
	uint32_t cnt = 1;
	for (uint64_t id = 1000; put(w, id * 0x100000001ull, "{}") == KVP_OK; id++)
		cnt++;
	is_u64(cnt, max, "every worker slot can be used, then FULL");
	is_u64(kvp_catalogue_check(&w->cat), 0, "sound when full");
	uint32_t found = 0;
	for (uint64_t id = 1000; id < 1000 + max; id++)
		found += kvp_cat_worker_find(&w->cat, id * 0x100000001ull, &idx) == KVP_OK;
	is_u64(found, max - 1, "all are found by id");
	for (uint32_t i = 0; i < max; i += 2)
		kvp_cat_w_worker_drop(w, i);
	is_u64(kvp_catalogue_check(&w->cat), 0, "sound after dropping every second");
	for (uint32_t i = 1; i < max; i += 2)
		kvp_cat_w_worker_drop(w, i);
	ok(kvp_cat_w_worker_drop(w, 1) == KVP_ERR_NOTFOUND, "a worker is dropped once");
	ok(kvp_cat_worker_json(&w->cat, 1, buf, sizeof(buf), &len) == KVP_ERR_NOTFOUND,
		"a free slot has no text");
}

/* One pass over every kind of write; a child dies inside it. */
static void script(struct kvp_cat_writer *w)
{
	struct kvp_cat_rank_info a, b;
	uint32_t part, idx;
	put(w, 1, "{\"v\":1}");
	put(w, 2, "{\"v\":1}");
	kvp_cat_w_part(w, KVP_PART_AGGREGATED, "m", 1, "g", 1, 16, 0, &part);
	kvp_cat_w_rank_take(w, 1, 0, part, 0, &a);
	kvp_cat_w_rank_take(w, 2, 0, part, 1, &b);
	publish(w, part, 1, 1, &a);
	put(w, 1, "{\"v\":2}");
	publish(w, part, 2, 1, &b);
	kvp_cat_w_rank_drop(w, a.rank_slot);
	kvp_cat_worker_find(&w->cat, 1, &idx);
	kvp_cat_w_worker_drop(w, idx);
}

static void test_kill(void)
{
	uint64_t faults = 0, wrong = 0;
	int n = 1, killed = 1;
	for (; killed == 1; n++) {
		struct kvp_cat cat;
		struct kvp_cat_writer w;
		void *mem = shared_new(&cat);
		pid_t pid = fork();
		if (pid == 0) {
			die_at(NULL, (uint64_t)n);
			kvp_cat_w_open(&cat, &w);
			script(&w);
			_exit(0);
		}
		killed = was_killed(pid);
		kvp_cat_w_open(&cat, &w);
		faults += kvp_catalogue_check(&cat);
		uint32_t live = 0;
		for (uint32_t i = 0; i < kvp_cat_worker_max(&cat); i++) {
			struct kvp_cat_worker_info info;
			live += kvp_cat_worker_info(&cat, i, &info) == KVP_OK;
		}
		wrong += live != w.worker_cnt;
		/* The successor drops what it doesn't know and does the whole script again. */
		struct kvp_cat_view v;
		for (uint32_t p = 0; p < kvp_cat_part_cnt(&cat); p++)
			wrong += publish(&w, p, 0, 0, NULL) != KVP_OK || kvp_cat_view_begin(&cat, p, &v) ||
					v.cnt;
		for (uint32_t i = 0; i < geom.rank_max; i++)
			kvp_cat_w_rank_drop(&w, i);
		wrong += w.rank_cnt || w.index_cnt;
		script(&w);
		faults += kvp_catalogue_check(&cat);
		kvp_cat_w_close(&w);
		munmap(mem, kvp_catalogue_footprint(&geom));
	}
	ok(n > 20 && killed == 0, "the writer was killed at every place (%d)", n - 2);
	is_u64(faults, 0, "its successor finds a sound catalogue each time");
	is_u64(wrong, 0, "and goes on");
}

int main(void)
{
	struct kvp_cat cat;
	struct kvp_cat_writer w;
	test_life();
	shared_new(&cat);
	ok(kvp_cat_w_open(&cat, &w) == KVP_OK, "the writer opens");
	test_parts(&w);
	test_views(&w);
	test_slots(&w);
	test_workers(&w);
	is_u64(w.worker_cnt + w.rank_cnt + w.index_cnt, 0, "nothing is left in use");
	kvp_cat_w_close(&w);
	test_kill();
	return done();
}
