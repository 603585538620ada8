/* The table of headers grows, shrinks and is cleaned while runs come, change and go. */
#include "shm/radix_priv.h"
#include "tests/radix_model.h"
#include "tests/tap.h"

#define PART 5
#define CHAINS 9000u
#define SLOTS 3u
static struct kvp_geom geom = {.slot_max = 8,
	.rank_max = 64,
	.index_rank_max = 256,
	.block_max = 100000,
	.region_gen = 7,
	.salt = {1, 2}};
static struct seg seg;
static struct kvp_radix radix;
static struct kvp_radix_w *w;
static struct kvp_radix_match *match;
static uint8_t held[CHAINS][SLOTS]; /* blocks of a chain that a slot holds: 0..4 */
static uint64_t faults, looks_beside, wrong;

static void chain(uint64_t c, uint64_t *local, uint64_t *ext)
{
	struct rng r = {c * 7919 + 5};
	for (uint32_t i = 0; i < 4; i++) {
		local[i] = rnd(&r);
		ext[i] = rnd(&r);
	}
}

static void look(uint32_t c)
{
	uint64_t local[4], ext[4];
	chain(c, local, ext);
	struct kvp_radix_query q = {PART, local, 4, 4, NULL, NULL};
	kvp_radix_find(&radix, &q, match);
	for (uint32_t s = 0; s < SLOTS; s++) {
		uint32_t idx = s * 100, on = match->active[idx >> 6] >> (idx & 63) & 1;
		wrong += (on ? match->depth[idx] : 0) != held[c][s];
	}
}

static void change(struct rng *r, uint32_t c, uint32_t s)
{
	uint64_t local[4], ext[4];
	uint32_t n = 1 + rnd_below(r, 4), unknown;
	chain(c, local, ext);
	if (n > held[c][s]) {
		wrong += kvp_radix_store(w, s * 100, PART, KVP_RADIX_ROOT, 0, n, local, ext, NULL) != KVP_OK;
		held[c][s] = (uint8_t)n;
	} else {
		kvp_radix_remove(w, s * 100, held[c][s] - n + 1, ext + n - 1, &unknown);
		wrong += unknown;
		held[c][s] = (uint8_t)(n - 1);
	}
}

/* Changes among the first `range` chains; the model is asked all the time, the whole tree now and then. */
static void work(struct rng *r, uint32_t ops, uint32_t range)
{
	for (uint32_t i = 0; i < ops; i++) {
		change(r, rnd_below(r, range), rnd_below(r, SLOTS));
		look(rnd_below(r, range));
		looks_beside += w->next.tab != NULL;
		if (i % 13 == 0)
			kvp_radix_w_tend(w, 20);
		if (i % 1500 == 0)
			faults += kvp_radix_check(&radix) + kvp_radix_w_check(w);
	}
}

static struct kvp_radix_stats stats(void)
{
	struct kvp_radix_stats st;
	kvp_radix_stats(&radix, &st);
	return st;
}

int main(void)
{
	struct rng r = {tap_seed(0)};
	match = malloc(sizeof(*match));
	seg_fresh(&seg, &geom, &radix, &w);
	work(&r, 30000, CHAINS);
	struct kvp_radix_stats full = stats();
	ok(full.table_slots >= 8192 && full.table_growths >= 3, "%llu runs: the table grew to %llu slots",
		(unsigned long long)full.runs, (unsigned long long)full.table_slots);
	ok(looks_beside > 500, "%llu lookups while it did", (unsigned long long)looks_beside);
	work(&r, 10000, 500);
	/* In steps, while the others go on changing what it shares with them; lookups miss it from the
	 * first. */
	uint32_t steps = 1;
	for (uint32_t c = 0; c < CHAINS; c++)
		held[c][0] = 0;
	for (; kvp_radix_clear_some(w, 0, 50) == KVP_ERR_AGAIN; steps++) {
		change(&r, rnd_below(&r, 500), 1 + rnd_below(&r, 2));
		look(rnd_below(&r, CHAINS));
	}
	ok(steps > 20 && kvp_radix_w_blocks(w, 0) == 0, "a slot is cleared in %u steps", steps);
	kvp_radix_clear(w, 100);
	for (uint32_t c = 0; c < CHAINS; c++)
		held[c][0] = held[c][1] = 0;
	work(&r, 3000, 300);
	kvp_radix_clear(w, 200);
	for (uint32_t c = 0; c < CHAINS; c++)
		held[c][2] = 0;
	work(&r, 3000, 100);
	while (kvp_radix_w_tend(w, 64))
		;
	struct kvp_radix_stats few = stats();
	ok(few.table_slots <= 16 * (few.runs + 2) && few.table_slots < full.table_slots,
		"%llu runs: the table shrank to %llu slots", (unsigned long long)few.runs,
		(unsigned long long)few.table_slots);
	for (uint32_t c = 0; c < CHAINS; c++)
		look(c);
	is_u64(wrong, 0, "tree and model agree throughout");
	is_u64(faults + kvp_radix_check(&radix) + kvp_radix_w_check(w), 0, "the tree was sound throughout");
	kvp_radix_w_close(w);
	seg_free(&seg);
	free(match);
	return done();
}
