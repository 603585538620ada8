/* Runs that are merged into their parents: in place, into the room behind, into a new array, and while a walk
 * stands between the two. */
#include "shm/radix_priv.h"
#include "tests/radix_model.h"
#include "tests/tap.h"

#define PART 5
#define N 200
static struct kvp_geom geom = {.slot_max = 8,
	.rank_max = 64,
	.index_rank_max = 64,
	.block_max = 10000,
	.region_gen = 7,
	.salt = {1, 2}};
static struct seg seg;
static struct kvp_radix radix;
static struct kvp_radix_w *w;
static struct kvp_radix_match *match;
static uint64_t local[N], ext[N];

static void fresh(void)
{
	seg_fresh(&seg, &geom, &radix, &w);
}

static void put(uint32_t slot, uint32_t from, uint32_t n)
{
	if (kvp_radix_store(w, slot, PART, from ? KVP_RADIX_CHILD : KVP_RADIX_ROOT, from ? ext[from - 1] : 0,
		    n, local + from, ext + from, NULL))
		exit(1);
}

static void take(uint32_t slot, uint32_t from, uint32_t n)
{
	uint32_t unknown;
	kvp_radix_remove(w, slot, n, ext + from, &unknown);
	if (unknown)
		exit(1);
}

static uint32_t depth(uint32_t slot)
{
	struct kvp_radix_query q = {PART, local, N, N, NULL, NULL};
	kvp_radix_find(&radix, &q, match);
	return match->active[slot >> 6] >> (slot & 63) & 1 ? match->depth[slot] : 0;
}

static uint64_t runs(void)
{
	struct kvp_radix_stats st;
	kvp_radix_stats(&radix, &st);
	return st.runs;
}

static void tend(void)
{
	while (kvp_radix_w_tend(w, 7))
		;
}

static int sound(void)
{
	return kvp_radix_check(&radix) == 0 && kvp_radix_w_check(w) == 0;
}

static void in_place(void)
{
	uint64_t other = 77, name = 78;
	fresh();
	put(0, 0, 40);
	put(1, 0, 20);
	kvp_radix_store(w, 1, PART, KVP_RADIX_CHILD, ext[19], 1, &other, &name, NULL);
	is_u64(runs(), 3, "a branch splits a run");
	tend();
	is_u64(runs(), 3, "two children: nothing to merge");
	kvp_radix_clear(w, 1);
	is_u64(runs(), 2, "without the branch the two halves are left");
	is_u64(depth(0), 40, "all of it is found");
	tend();
	is_u64(runs(), 1, "they are one again");
	ok(depth(0) == 40 && sound(), "all of it is found, the tree is sound");
	is_u64(kvp_radix_w_tend(w, 100), 0, "nothing changed: nothing is looked at");
	put(0, 40, 30);
	ok(depth(0) == 70 && runs() <= 2 && sound(), "and goes on growing");
}

static void moved(void)
{
	fresh();
	put(0, 0, 16);
	put(1, 0, 16);
	put(0, 16, 16);
	put(0, 32, 20);
	put(2, 0, 16);
	take(2, 0, 16);
	tend();
	is_u64(runs(), 2, "other ranks hold the tail: it stays");
	put(1, 16, 36);
	tend();
	is_u64(runs(), 1, "same ranks: merged into a new array");
	ok(depth(0) == 52 && depth(1) == 52 && sound(), "both ranks hold all of it, the tree is sound");
	put(0, 52, 8);
	put(0, 60, 2);
	put(1, 52, 10);
	tend();
	is_u64(runs(), 1, "merged into the room behind");
	ok(depth(0) == 62 && depth(1) == 62 && sound(), "both ranks hold all of it, the tree is sound");
	take(1, 61, 1);
	take(0, 20, 1);
	ok(depth(1) == 61 && depth(0) == 20 && sound(), "names lead to the new places");
	tend();
	put(0, 20, 1);
	is_u64(depth(0), 62, "what a rank holds behind a hole is kept");
}

static void children(void)
{
	fresh();
	put(0, 0, 16);
	put(1, 0, 16);
	put(0, 16, 16);
	put(1, 16, 16);
	for (uint64_t c = 0; c < 5; c++) {
		uint64_t l = 1000 + c, e = 2000 + c;
		kvp_radix_store(w, 0, PART, KVP_RADIX_CHILD, ext[31], 1, &l, &e, NULL);
	}
	put(1, 32, 3);
	uint64_t before = runs();
	tend();
	is_u64(runs(), before - 1, "a run with six children is merged into its parent");
	ok(depth(1) == 35 && sound(), "its children hang from the new end");
}

/* Merges when the walk has read the first run and asks for more. */
static uint32_t more(void *ctx, struct kvp_radix_query *q)
{
	uint32_t *merged = ctx;
	if (q->local_cnt == 64) {
		uint64_t before = runs();
		tend();
		*merged = (uint32_t)(before - runs());
	}
	q->local_cnt = N;
	return q->local_cnt;
}

static void under_reader(void)
{
	uint32_t merged = 0;
	fresh();
	put(0, 0, 64);
	put(1, 0, 64);
	put(0, 64, 64);
	put(1, 64, 64);
	is_u64(runs(), 2, "two runs");
	struct kvp_radix_query q = {PART, local, 64, N, more, &merged};
	kvp_radix_find(&radix, &q, match);
	is_u64(merged, 1, "merged behind the back of a walk");
	ok(match->active[0] == 3 && match->depth[0] == 128 && match->depth[1] == 128,
		"which finds all of it all the same (%u retries)", match->retries);
}

int main(void)
{
	struct rng r = {1};
	match = malloc(sizeof(*match));
	for (uint32_t i = 0; i < N; i++) {
		local[i] = rnd(&r);
		ext[i] = rnd(&r);
	}
	in_place();
	moved();
	children();
	under_reader();
	kvp_radix_w_close(w);
	seg_free(&seg);
	free(match);
	return done();
}
