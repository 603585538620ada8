/* v_index — scenarios of an independent model of the index: events of all tiers, lookups, summaries of
 * workers, dumps. One deviation: a lower-tier block whose parent its rank holds nowhere is skipped, so it is
 * in no dump (the model keeps it). */
#include "ipc/json_in.h"
#include "tests/radix_model.h"
#include "tests/tap.h"

#define PART 41
#define RANKS 64
#define BLOCKS 256
#define LINKS 512

static struct kvp_geom geom = {.slot_max = 8,
	.rank_max = 64,
	.index_rank_max = 64,
	.block_max = 10000,
	.region_gen = 7,
	.salt = {1, 2}};
static struct kvp_radix radix;
static struct kvp_radix_w *w;
static struct kvp_radix_match *match;

/* Ranks in the order of their first event: position = index slot. */
static struct {
	uint64_t worker;
	uint32_t rank;
	int stored; /* had blocks once */
} rank_of[RANKS];
static uint32_t rank_cnt;
static uint64_t block_size;

/* What a dump says: this rank holds this block under this parent. */
struct link {
	uint64_t worker, parent, ext, local;
	uint32_t rank, root, tier;
};

static struct kvp_json_val member(struct kvp_json_val obj, const char *key)
{
	struct kvp_json_val v;
	if (kvp_json_get(obj, key, &v)) {
		printf("Bail out! no member %s\n", key);
		exit(1);
	}
	return v;
}

static int has(struct kvp_json_val obj, const char *key)
{
	struct kvp_json_val v;
	return kvp_json_get(obj, key, &v) == KVP_OK && kvp_json_type(v) != KVP_JSON_NULL;
}

/* A number, or one written as a decimal string. */
static uint64_t num(struct kvp_json_val v)
{
	const char *s;
	size_t n;
	uint64_t u = 0;
	if (kvp_json_str(v, &s, &n) == KVP_OK)
		return strtoull(s, NULL, 10);
	if (kvp_json_u64(v, &u)) {
		printf("Bail out! no number\n");
		exit(1);
	}
	return u;
}

static uint32_t slot_of(uint64_t worker, uint32_t rank)
{
	for (uint32_t i = 0; i < rank_cnt; i++)
		if (rank_of[i].worker == worker && rank_of[i].rank == rank)
			return i;
	rank_of[rank_cnt].worker = worker;
	rank_of[rank_cnt].rank = rank;
	rank_of[rank_cnt].stored = 0;
	return rank_cnt++;
}

static uint32_t list(struct kvp_json_val arr, const char *key, uint64_t *out)
{
	uint32_t n = 0;
	struct kvp_json_iter it = kvp_json_each(arr);
	while (kvp_json_next(&it) && n < BLOCKS)
		out[n++] = num(key ? member(it.val, key) : it.val);
	return n;
}

static const char *const tier_name[] = {"device", "host_pinned", "disk", "external"};

static enum kvp_radix_tier tier_of(struct kvp_json_val v)
{
	for (uint32_t t = 0; t < KVP_RADIX_TIER_CNT; t++)
		if (kvp_json_str_is(v, tier_name[t]))
			return (enum kvp_radix_tier)t;
	printf("Bail out! unknown tier\n");
	exit(1);
}

static const char *store(struct kvp_json_val a, uint32_t slot)
{
	uint64_t local[BLOCKS], ext[BLOCKS];
	uint32_t n = list(member(a, "blocks"), "tokens_hash", local);
	list(member(a, "blocks"), "block_hash", ext);
	int child = has(a, "parent");
	enum kvp_radix_tier t = tier_of(member(a, "tier"));
	int rc = kvp_radix_store_tier(w, slot, t, PART, child ? KVP_RADIX_CHILD : KVP_RADIX_ROOT,
		child ? num(member(a, "parent")) : 0, n, local, ext, NULL);
	rank_of[slot].stored |= rc == KVP_OK;
	if (t && rc == KVP_ERR_NOTFOUND)
		return "ok"; /* skipped and counted */
	return rc == KVP_OK		? "ok"
	       : rc == KVP_ERR_NOTFOUND ? "parent_block_not_found"
	       : rc == KVP_ERR_INVAL	? "invalid_block"
					: "other";
}

static const char *apply(struct kvp_json_val a)
{
	struct kvp_json_val op = member(a, "op");
	uint64_t ext[BLOCKS], worker = num(member(a, "worker_id"));
	if (kvp_json_str_is(op, "remove_worker")) {
		for (uint32_t i = 0; i < rank_cnt; i++)
			if (rank_of[i].worker == worker)
				kvp_radix_clear(w, i);
		return "ok";
	}
	uint32_t slot = slot_of(worker, (uint32_t)num(member(a, "dp_rank")));
	if (kvp_json_str_is(op, "stored"))
		return store(a, slot);
	if (kvp_json_str_is(op, "removed")) {
		uint32_t n = list(member(a, "block_hashes"), NULL, ext), unknown = 0;
		enum kvp_radix_tier t = tier_of(member(a, "tier"));
		kvp_radix_remove_tier(w, slot, t, n, ext, &unknown);
		return t || rank_of[slot].stored || unknown < n ? "ok" : "block_not_found";
	}
	kvp_radix_clear(w, slot);
	return "ok";
}

static uint32_t rank_of_key(const char *key)
{
	char *end;
	uint64_t worker = strtoull(key, &end, 10);
	return slot_of(worker, (uint32_t)strtoul(end + 1, NULL, 10));
}

/* Every rank that is not listed continues nowhere. */
static void lower(const char *name, uint32_t step, struct kvp_json_val tiers)
{
	for (uint32_t t = KVP_RADIX_HOST; t < KVP_RADIX_TIER_CNT; t++) {
		uint32_t want[RANKS] = {0}, good = 0;
		struct kvp_json_iter it = {0};
		if (has(tiers, tier_name[t]))
			it = kvp_json_each(member(tiers, tier_name[t]));
		while (has(tiers, tier_name[t]) && kvp_json_next(&it))
			want[rank_of_key(it.key)] = (uint32_t)num(it.val);
		for (uint32_t s = 0; s < RANKS; s++)
			good += kvp_radix_match_ext(match, (enum kvp_radix_tier)t, s) == want[s];
		ok(good == RANKS, "%s step %u: ranks go on as far as expected in %s", name, step,
			tier_name[t]);
	}
}

/* The summary of a worker: tokens, tiers cumulative, the greatest of its ranks. */
static int instance(uint64_t worker, struct kvp_json_val want)
{
	uint64_t top[3] = {0}, longest = 0;
	int good = 1;
	for (uint32_t s = 0; s < rank_cnt; s++) {
		if (rank_of[s].worker != worker)
			continue;
		uint64_t sum[3] = {(match->active[0] >> s & 1) ? match->depth[s] : 0};
		sum[1] = sum[0] + kvp_radix_match_ext(match, KVP_RADIX_HOST, s);
		sum[2] = sum[1] + kvp_radix_match_ext(match, KVP_RADIX_DISK, s) +
			 kvp_radix_match_ext(match, KVP_RADIX_EXTERNAL, s);
		for (uint32_t i = 0; i < 3; i++)
			top[i] = sum[i] * block_size > top[i] ? sum[i] * block_size : top[i];
		char rank[16];
		snprintf(rank, sizeof(rank), "%u", rank_of[s].rank);
		good &= has(member(want, "dp"), rank)
				? num(member(member(want, "dp"), rank)) == sum[0] * block_size
				: sum[2] == 0;
	}
	for (uint32_t i = 0; i < 3; i++)
		longest = top[i] > longest ? top[i] : longest;
	return good && num(member(want, "gpu")) == top[0] && num(member(want, "cpu")) == top[1] &&
	       num(member(want, "disk")) == top[2] && num(member(want, "longest_matched")) == longest;
}

static void instances(const char *name, uint32_t step, struct kvp_json_val want)
{
	uint32_t cnt = 0, good = 0;
	struct kvp_json_iter it = kvp_json_each(want);
	for (; kvp_json_next(&it); cnt++)
		good += (uint32_t)instance(strtoull(it.key, NULL, 10), it.val);
	ok(good == cnt, "%s step %u: summaries of %u workers", name, step, cnt);
}

static void query(const char *name, uint32_t step, struct kvp_json_val s)
{
	uint64_t local[BLOCKS];
	uint32_t n = list(member(s, "query_block_hashes"), NULL, local), want = 0, good = 0, got = 0;
	struct kvp_radix_query q = {PART, local, n, n, NULL, NULL};
	kvp_radix_find(&radix, &q, match);
	struct kvp_json_iter it = kvp_json_each(member(member(s, "expect"), "device_blocks"));
	while (kvp_json_next(&it)) {
		uint32_t slot = rank_of_key(it.key);
		want++;
		good += (match->active[0] >> slot & 1) && match->depth[slot] == num(it.val);
	}
	for (uint32_t i = 0; i < match->word_cnt; i++)
		got += (uint32_t)__builtin_popcountll(match->active[i]);
	ok(good == want && got == want, "%s step %u: %u ranks match as deep as expected", name, step, want);
	lower(name, step, member(member(s, "expect"), "lower_tier_extension_blocks"));
	instances(name, step, member(member(s, "expect"), "instances"));
}

struct told {
	struct link l[LINKS];
	uint32_t cnt;
};

static int tell(void *ctx, const struct kvp_radix_dump_event *ev)
{
	struct told *t = ctx;
	for (uint32_t i = 0; i < ev->n && t->cnt < LINKS; i++) {
		struct link *l = &t->l[t->cnt++];
		l->worker = rank_of[ev->slot].worker;
		l->rank = rank_of[ev->slot].rank;
		l->tier = ev->tier;
		l->root = i == 0 && ev->how == KVP_RADIX_ROOT;
		l->parent = l->root ? 0 : i ? ev->ext[i - 1] : ev->parent_ext;
		l->ext = ev->ext[i];
		l->local = ev->local[i];
	}
	return 0;
}

/* 1 if some event of the rank of `of` stores this block. */
static int known(struct kvp_json_val events, struct kvp_json_val of, uint64_t block)
{
	struct kvp_json_iter it = kvp_json_each(events);
	int found = 0;
	while (kvp_json_next(&it)) {
		struct kvp_json_val ev = member(it.val, "event");
		struct kvp_json_iter b =
			kvp_json_each(member(member(member(ev, "data"), "stored"), "blocks"));
		int same = num(member(it.val, "worker_id")) == num(member(of, "worker_id")) &&
			   num(member(ev, "dp_rank")) == num(member(member(of, "event"), "dp_rank"));
		while (kvp_json_next(&b))
			found |= same && num(member(b.val, "block_hash")) == block;
	}
	return found;
}

static void dump(const char *name, uint32_t step, struct kvp_json_val events)
{
	struct told t = {.cnt = 0};
	uint32_t want = 0, good = 0;
	kvp_radix_w_dump(w, KVP_RADIX_SLOT_ALL, tell, &t, NULL);
	struct kvp_json_iter it = kvp_json_each(events);
	while (kvp_json_next(&it)) {
		struct kvp_json_val ev = member(it.val, "event");
		struct kvp_json_val st = member(member(ev, "data"), "stored");
		struct kvp_json_iter b = kvp_json_each(member(st, "blocks"));
		int root = !has(st, "parent_hash");
		uint64_t parent = root ? 0 : num(member(st, "parent_hash"));
		if (!root && !known(events, it.val, parent))
			continue;
		for (; kvp_json_next(&b); root = 0) {
			want++;
			for (uint32_t i = 0; i < t.cnt; i++) {
				const struct link *l = &t.l[i];
				good += l->tier == tier_of(member(it.val, "storage_tier")) &&
					l->worker == num(member(it.val, "worker_id")) &&
					l->rank == num(member(ev, "dp_rank")) && l->root == (uint32_t)root &&
					l->parent == parent && l->ext == num(member(b.val, "block_hash")) &&
					l->local == num(member(b.val, "tokens_hash"));
			}
			parent = num(member(b.val, "block_hash"));
		}
	}
	ok(good == want && t.cnt == want, "%s step %u: dump has the %u blocks of all tiers", name, step,
		want);
}

static void scenario(struct kvp_json_val s)
{
	struct seg seg = {.pub = NULL};
	const char *name;
	size_t len;
	uint32_t step = 0;
	kvp_json_str(member(s, "name"), &name, &len);
	rank_cnt = 0;
	block_size = num(member(s, "block_size"));
	seg_fresh(&seg, &geom, &radix, &w);
	struct kvp_json_iter it = kvp_json_each(member(s, "steps"));
	for (; kvp_json_next(&it); step++) {
		if (has(it.val, "query_block_hashes")) {
			query(name, step, it.val);
		} else if (has(it.val, "dump_canonical")) {
			dump(name, step, member(it.val, "dump_canonical"));
		} else if (has(it.val, "apply")) {
			struct kvp_json_val a = member(it.val, "apply"), want = member(it.val, "result");
			const char *got = apply(a);
			ok(kvp_json_str_is(want, got), "%s step %u: result %s", name, step, got);
		} else {
			ok(0, "%s step %u is of a known kind", name, step);
		}
	}
	ok(kvp_radix_check(&radix) == 0 && kvp_radix_w_check(w) == 0, "%s: sound at the end", name);
	kvp_radix_w_close(w);
	w = NULL;
	seg_free(&seg);
}

int main(void)
{
	const char *path = "tests/vectors/index_scenarios.json";
	static char text[1 << 20];
	FILE *f = fopen(path, "rb");
	size_t n = f ? fread(text, 1, sizeof(text), f) : 0;
	struct kvp_json *p = kvp_json_new();
	struct kvp_json_val root;
	uint32_t ran = 0;
	if (f)
		fclose(f);
	if (n == 0 || n == sizeof(text) || kvp_json_parse(p, text, n, 128, &root, NULL)) {
		printf("Bail out! cannot read %s\n", path);
		return 1;
	}
	match = malloc(sizeof(*match));
	struct kvp_json_iter it = kvp_json_each(member(root, "scenarios"));
	for (; kvp_json_next(&it); ran++)
		scenario(it.val);
	is_u64(ran, 21, "all scenarios ran");
	free(match);
	kvp_json_free(p);
	return done();
}
