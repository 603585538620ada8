/* Random bookings, ages, forgotten ranks and restarts against a naive trie that knows when each block of each
 * rank was recorded last. */
#include "shm/routed.h"
#include "tests/radix_model.h"
#include "tests/tap.h"

#define SLOTS 64 /* of the tree; the ranks below are spread over them */
#define RANKS 6
#define NODES 20000
#define PATH_MAX_BLK 300
#define OPS 1500
#define PART 77

struct node {
	uint32_t parent, child, next;
	uint64_t local;
	uint64_t at[RANKS]; /* 0 = not held; LRU: order of recording */
};
static struct node *node;
static uint32_t node_cnt;
static uint64_t stamp; /* order of recording */
static struct kvp_radix_match *match;
static struct kvp_ctr_column_shm ctr;

static struct kvp_geom geom = {.slot_max = 8,
	.rank_max = 64,
	.index_rank_max = SLOTS,
	.block_max = 100000,
	.region_gen = 7,
	.salt = {11, 22}};
struct routed_tree {
	struct seg seg;
	struct kvp_radix r;
	struct kvp_radix_w *w;
	struct kvp_routed *t;
	struct kvp_routed_cfg cfg;
};

static uint32_t slot_of(uint32_t rank)
{
	return rank * 11 + 3;
}

static uint32_t node_get(uint32_t parent, uint64_t local)
{
	uint32_t i = node[parent].child;
	while (i && node[i].local != local)
		i = node[i].next;
	if (i)
		return i;
	if (node_cnt + 1 == NODES)
		exit(1);
	i = ++node_cnt;
	node[i] = (struct node){.parent = parent, .local = local, .next = node[parent].child};
	node[parent].child = i;
	return i;
}

/* A path that shares a prefix with others. */
static uint32_t path(struct rng *g, uint64_t *local)
{
	uint32_t family = rnd_below(g, 3), n = 1 + rnd_below(g, PATH_MAX_BLK), fork = rnd_below(g, 8) * 37;
	uint64_t branch = rnd_below(g, 4);
	for (uint32_t i = 0; i < n; i++)
		local[i] = (i < fork ? 1000 + family : 5000 + family * 100 + fork * 1000 + branch) * 1000 + i;
	return n;
}

static uint64_t model_cnt(uint32_t rank)
{
	uint64_t n = 0;
	for (uint32_t i = 1; i <= node_cnt; i++)
		n += node[i].at[rank] != 0;
	return n;
}

static int newest_first(const void *a, const void *b)
{
	const uint64_t *x = a, *y = b;
	return (*x < *y) - (*x > *y);
}

/* Keeps the `limit` newest blocks of a rank. */
static void model_evict(uint32_t rank, uint64_t limit)
{
	static uint64_t order[NODES];
	uint64_t cnt = 0;
	for (uint32_t i = 1; i <= node_cnt; i++)
		if (node[i].at[rank])
			order[cnt++] = node[i].at[rank];
	if (cnt <= limit)
		return;
	qsort(order, cnt, sizeof(*order), newest_first);
	for (uint32_t i = 1; i <= node_cnt; i++)
		if (node[i].at[rank] < order[limit - 1])
			node[i].at[rank] = 0;
}

static void model_record(uint32_t rank, uint32_t n, const uint64_t *local, uint64_t now_ns, uint64_t limit)
{
	uint32_t at = 0;
	n = limit && n > limit ? (uint32_t)limit : n;
	for (uint32_t i = 0; i < n; i++) {
		at = node_get(at, local[i]);
		node[at].at[rank] = limit ? stamp + (n - i) : now_ns;
	}
	stamp += PATH_MAX_BLK + 1;
	if (limit)
		model_evict(rank, limit);
}

static void model_age(uint64_t now_ns, uint64_t ttl_ns)
{
	for (uint32_t i = 1; i <= node_cnt; i++)
		for (uint32_t r = 0; r < RANKS; r++)
			if (node[i].at[r] && now_ns - node[i].at[r] >= ttl_ns)
				node[i].at[r] = 0;
}

static uint32_t model_depth(uint32_t rank, uint32_t n, const uint64_t *local)
{
	uint32_t at = 0, d = 0;
	for (; d < n; d++) {
		uint32_t i = node[at].child;
		while (i && node[i].local != local[d])
			i = node[i].next;
		if (!i || !node[i].at[rank])
			break;
		at = i;
	}
	return d;
}

static uint32_t tree_depth(const struct routed_tree *t, uint32_t rank, uint32_t n, const uint64_t *local)
{
	struct kvp_radix_query q = {PART, local, n, n, NULL, NULL};
	uint32_t s = slot_of(rank);
	kvp_radix_find(&t->r, &q, match);
	return match->active[s >> 6] >> (s & 63) & 1 ? match->depth[s] : 0;
}

static int start(struct routed_tree *t, uint64_t now_ns, const uint8_t *owned)
{
	struct kvp_radix_report rep;
	if (kvp_radix_w_open(t->seg.pub, t->seg.priv, &geom, KVP_RADIX_RECOVER, NULL, &t->w, &rep) ||
		rep.runs_dropped || kvp_routed_open(t->w, &t->cfg, &t->t))
		return -1;
	kvp_radix_w_set_ready(t->w, 1);
	kvp_routed_recover(t->t, owned, now_ns);
	return 0;
}

static void stop(struct routed_tree *t)
{
	kvp_routed_close(t->t);
	kvp_radix_w_close(t->w);
}

static int compare(struct routed_tree *t, struct rng *g)
{
	uint64_t local[PATH_MAX_BLK], sum = 0;
	if (kvp_routed_check(t->t) || kvp_radix_check(&t->r) || kvp_radix_w_check(t->w))
		return -1;
	for (uint32_t r = 0; r < RANKS; r++) {
		uint64_t got = kvp_routed_cnt(t->t, slot_of(r)), want = model_cnt(r);
		sum += got;
		if (got != want) {
			printf("# rank %u holds %llu blocks, want %llu\n", r, (unsigned long long)got,
				(unsigned long long)want);
			return -1;
		}
	}
	for (int i = 0; i < 10; i++) {
		uint32_t n = path(g, local);
		for (uint32_t r = 0; r < RANKS; r++)
			if (tree_depth(t, r, n, local) != model_depth(r, n, local)) {
				printf("# rank %u: depth %u, want %u\n", r, tree_depth(t, r, n, local),
					model_depth(r, n, local));
				return -1;
			}
	}
	return sum == kvp_routed_cnt(t->t, KVP_RADIX_SLOT_ALL) ? 0 : -1;
}

/* A rank goes: its entries at once, its blocks in steps, unless a restart comes between. */
static void forget(struct routed_tree *t, uint32_t rank)
{
	kvp_routed_forget(t->t, slot_of(rank));
	while (kvp_radix_clear_some(t->w, slot_of(rank), 3) == KVP_ERR_AGAIN)
		;
	for (uint32_t i = 1; i <= node_cnt; i++)
		node[i].at[rank] = 0;
}

static int restart(struct routed_tree *t, uint64_t now_ns)
{
	uint8_t owned[SLOTS] = {0};
	for (uint32_t r = 0; r < RANKS; r++)
		owned[slot_of(r)] = 1;
	stop(t);
	for (uint32_t i = 1; i <= node_cnt; i++)
		for (uint32_t r = 0; r < RANKS; r++)
			node[i].at[r] = node[i].at[r] ? now_ns : 0;
	return start(t, now_ns, owned);
}

static void all_due(struct routed_tree *t, uint64_t now_ns, uint32_t budget)
{
	while (kvp_routed_tend(t->t, now_ns, budget))
		;
}

static int churn(enum kvp_routed_policy policy, uint64_t seed)
{
	struct routed_tree t = {.cfg = {.policy = policy,
				 .ttl_ns = 1000,
				 .entry_max = 100000,
				 .slot_max = SLOTS,
				 .salt = seed,
				 .ctr = &ctr}};
	struct rng g = {seed};
	uint64_t local[PATH_MAX_BLK], now = 5000, limit = policy == KVP_ROUTED_LRU ? 400 : 0;
	uint8_t owned[SLOTS] = {0};
	node_cnt = 0;
	node[0].child = 0;
	if (seg_new(&t.seg, &geom) || kvp_radix_join(t.seg.pub, &geom, &t.r) || start(&t, now, owned))
		return -1;
	int bad = 0;
	for (int i = 0; i < OPS && !bad; i++) {
		uint32_t what = rnd_below(&g, 100), rank = rnd_below(&g, RANKS);
		now += rnd_below(&g, 40);
		if (what < 80) {
			/* Whoever records first sees what is due. */
			all_due(&t, now, 1 + rnd_below(&g, 700));
			if (!limit)
				model_age(now, t.cfg.ttl_ns);
			uint32_t n = path(&g, local);
			model_record(rank, n, local, now, limit);
			kvp_routed_record(t.t, slot_of(rank), PART, n, local, limit, now);
		} else if (what < 83) {
			forget(&t, rank);
		} else if (what < 84 && !limit) {
			bad = restart(&t, now);
		} else {
			kvp_radix_w_tend(t.w, rnd_below(&g, 300));
		}
		if (i % 10 == 0 && !bad) {
			all_due(&t, now, 50);
			if (!limit)
				model_age(now, t.cfg.ttl_ns);
			bad = compare(&t, &g);
		}
		if (bad)
			printf("# operation %d\n", i);
	}
	stop(&t);
	seg_free(&t.seg);
	return bad;
}

int main(void)
{
	uint64_t seed = tap_seed(0);
	node = calloc(NODES, sizeof(*node));
	match = calloc(1, sizeof(*match));
	if (!node || !match)
		return 1;
	for (uint64_t i = 0; i < 3; i++) {
		ok(churn(KVP_ROUTED_TTL, seed + i) == 0, "age: as the model, seed %llu",
			(unsigned long long)(seed + i));
		ok(churn(KVP_ROUTED_LRU, seed + i) == 0, "least recently recorded: as the model, seed %llu",
			(unsigned long long)(seed + i));
	}
	ok(ctr.val[KVP_CTR_ROUTED_EXPIRED] > 1000, "blocks came of age");
	ok(ctr.val[KVP_CTR_ROUTED_EVICTED] > 1000, "blocks were over their rank's limit");
	ok(ctr.val[KVP_CTR_ROUTED_REFRESHED] > 1000, "blocks were recorded again");
	return done();
}
