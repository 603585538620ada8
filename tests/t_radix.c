/* Life cycle, layout, behaviour and capacity of the KV radix tree. */
#include "shm/radix_priv.h"
#include "tests/radix_model.h"
#include "tests/tap.h"

#include <stddef.h>

_Static_assert(offsetof(struct kvp_radix_hdr_shm, bits) == KVP_RADIX_HDR_FIXED, "fixed part of a header");
_Static_assert(KVP_RADIX_HDR_FIXED + 64 / 8 <= 64, "64 slots in one line");
_Static_assert(KVP_RADIX_HDR_FIXED + 256 / 8 <= 128, "256 slots in two lines");
_Static_assert(KVP_RADIX_HDR_FIXED + 1024 / 8 <= 192, "1024 slots in three lines");
_Static_assert(KVP_RADIX_HDR_FIXED + 4096 / 8 <= 576, "4096 slots in nine lines");
_Static_assert(offsetof(struct kvp_radix_hdr_shm, key) == 0, "key");
_Static_assert(offsetof(struct kvp_radix_hdr_shm, last) == 8, "last");
_Static_assert(offsetof(struct kvp_radix_hdr_shm, ver) == 16, "ver");
_Static_assert(offsetof(struct kvp_radix_hdr_shm, len) == 20, "len");
_Static_assert(offsetof(struct kvp_radix_hdr_shm, base) == 24, "base");
_Static_assert(offsetof(struct kvp_radix_hdr_shm, cap) == 28, "cap");
_Static_assert(offsetof(struct kvp_radix_hdr_shm, cut_ref) == 32, "cut_ref");
_Static_assert(offsetof(struct kvp_radix_hdr_shm, cut_n) == 36, "cut_n");
_Static_assert(offsetof(struct kvp_radix_hdr_shm, low_ref) == 40, "low_ref");
_Static_assert(offsetof(struct kvp_radix_hdr_shm, rid) == 44, "rid");
_Static_assert(offsetof(struct kvp_radix_shm, table) == 128, "table descriptor on a line of its own");
_Static_assert(sizeof(struct kvp_radix_shm) <= KVP_PAGE, "header page");
_Static_assert(sizeof(struct kvp_radix_priv_shm) <= KVP_PAGE, "private header page");
_Static_assert(sizeof(struct kvp_radix_run_shm) == 48, "run record");
_Static_assert(sizeof(struct kvp_radix_alias_shm) == 24, "alias record");
_Static_assert(sizeof(struct kvp_radix_hole_shm) == 16, "hole record");

#define PART 5
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

static void fresh(void)
{
	seg_fresh(&seg, &geom, &radix, &w);
}

static uint32_t depth(uint32_t slot, uint32_t n, const uint64_t *local)
{
	struct kvp_radix_query q = {PART, local, n, n, NULL, NULL};
	if (kvp_radix_find(&radix, &q, match))
		return UINT32_MAX;
	return match->active[slot >> 6] >> (slot & 63) & 1 ? match->depth[slot] : 0;
}

static int root(uint32_t slot, uint32_t n, const uint64_t *local, const uint64_t *ext)
{
	return kvp_radix_store(w, slot, PART, KVP_RADIX_ROOT, 0, n, local, ext, NULL);
}

static int under(uint32_t slot, uint64_t parent, uint32_t n, const uint64_t *local, const uint64_t *ext)
{
	return kvp_radix_store(w, slot, PART, KVP_RADIX_CHILD, parent, n, local, ext, NULL);
}

static int sound(void)
{
	return kvp_radix_check(&radix) == 0 && kvp_radix_w_check(w) == 0;
}

static void life_cycle(void)
{
	struct kvp_geom g = geom;
	struct kvp_radix r;
	struct kvp_radix_w *x = NULL;
	g.index_rank_max = 65;
	is_u64(kvp_radix_footprint(&g), 0, "65 index slots: no footprint");
	is_u64(kvp_radix_priv_footprint(&g), 0, "65 index slots: no private footprint");
	g.index_rank_max = 64;
	g.block_max = 2000000000;
	is_u64(kvp_radix_footprint(&g), 0, "2e9 blocks: no footprint");
	is_u64(kvp_radix_footprint(NULL), 0, "no geometry: no footprint");
	g.block_max = 1000000000;
	ok(kvp_radix_footprint(&g) > 0, "1e9 blocks have a footprint");
	g = geom;
	char *mem = seg_map(kvp_radix_footprint(&g)), *priv = seg_map(kvp_radix_priv_footprint(&g));
	ok(kvp_radix_new(NULL, &g) == KVP_ERR_INVAL, "new without memory: INVAL");
	ok(kvp_radix_new(mem + 64, &g) == KVP_ERR_INVAL, "new on a misaligned address: INVAL");
	ok(kvp_radix_join(mem, &g, &r) == KVP_ERR_AGAIN, "join before new: AGAIN");
	ok(kvp_radix_join(NULL, &g, &r) == KVP_ERR_INVAL, "join without memory: INVAL");
	ok(kvp_radix_new(mem, &g) == KVP_OK && kvp_radix_join(mem, &g, &r) == KVP_OK, "join after new");
	ok(kvp_radix_w_open(mem, priv, &g, KVP_RADIX_RECOVER, NULL, &x, NULL) == KVP_ERR_AGAIN,
		"open before the private segment is made: AGAIN");
	ok(kvp_radix_priv_new(priv, &g) == KVP_OK, "private segment is made");
	g.index_rank_max = 256;
	ok(kvp_radix_join(mem, &g, &r) == KVP_ERR_LAYOUT, "join with another geometry: LAYOUT");
	g = geom;
	((struct kvp_objhdr *)(void *)mem)->layout_hash ^= 1;
	ok(kvp_radix_join(mem, &g, &r) == KVP_ERR_LAYOUT, "join with another layout hash: LAYOUT");
	((struct kvp_objhdr *)(void *)mem)->layout_hash ^= 1;
	((struct kvp_objhdr *)(void *)priv)->region_gen++;
	ok(kvp_radix_w_open(mem, priv, &g, KVP_RADIX_RECOVER, NULL, &x, NULL) == KVP_ERR_LAYOUT,
		"private segment of another region: LAYOUT");
	((struct kvp_objhdr *)(void *)priv)->region_gen--;
	ok(kvp_radix_delete(mem) == KVP_OK && kvp_radix_join(mem, &g, &r) == KVP_ERR_AGAIN,
		"join after delete: AGAIN");
	munmap(mem, kvp_radix_footprint(&g));
	munmap(priv, kvp_radix_priv_footprint(&g));
}

static void restart(void)
{
	uint64_t l[3] = {1, 2, 3}, e[3] = {11, 12, 13};
	struct kvp_radix_report rep;
	fresh();
	uint64_t gen = kvp_radix_generation(&radix);
	root(3, 3, l, e);
	kvp_radix_w_close(w);
	w = NULL;
	ok(kvp_radix_w_open(seg.pub, seg.priv, &geom, KVP_RADIX_RECOVER, NULL, &w, &rep) == KVP_OK &&
			rep.blocks == 3 && rep.runs == 1,
		"a successor keeps the tree");
	is_u64(depth(3, 3, l), 3, "readers see it");
	ok(under(3, 13, 1, l, &(uint64_t){14}) == KVP_OK, "and removal keys still work");
	kvp_radix_w_close(w);
	w = NULL;
	kvp_radix_priv_new(seg.priv, &geom);
	ok(kvp_radix_w_open(seg.pub, seg.priv, &geom, KVP_RADIX_RECOVER, NULL, &w, NULL) == KVP_ERR_CORRUPT,
		"a tree without its private segment: CORRUPT");
	ok(kvp_radix_w_open(seg.pub, seg.priv, &geom, KVP_RADIX_RESET, NULL, &w, &rep) == KVP_OK &&
			rep.blocks == 0,
		"reset begins an empty tree");
	ok(kvp_radix_generation(&radix) == gen + 1 && kvp_radix_ready(&radix), "generation + 1, ready");
	is_u64(depth(3, 3, l), 0, "nothing matches after reset");
	ok(root(3, 3, l, e) == KVP_OK && depth(3, 3, l) == 3 && sound(), "and it fills again");
	kvp_radix_w_set_ready(w, 0);
	is_u64(depth(3, 3, l), UINT32_MAX, "not ready: AGAIN");
	is_u64(match->longest, 0, "and an empty result");
	kvp_radix_w_set_ready(w, 1);
}

static void damaged(void)
{
	uint64_t l[3] = {1, 2, 3}, e[3] = {11, 12, 13}, l2[1] = {9}, e2[1] = {19};
	struct kvp_radix_report rep;
	fresh();
	root(3, 3, l, e);
	under(3, 13, 1, l2, e2);
	root(4, 3, l, e); /* a second holder, so that the next block makes a run of its own */
	under(3, 19, 1, &(uint64_t){8}, &(uint64_t){18});
	root(5, 1, l2, e2);
	uint32_t rid = kvp_radix_rid_at(w, kvp_radix_name_of(w, 3, 11));
	struct kvp_radix_hdr_shm *h = kvp_radix_hdr_of(w, rid);
	h->len = 5000;
	ok(kvp_radix_check(&radix) > 0, "check sees a run out of range");
	is_u64(depth(3, 3, l), 0, "a reader ends its walk there");
	ok(match->gave_up == 1 && match->retries == KVP_RADIX_RETRY_MAX, "after bounded retries");
	kvp_radix_w_close(w);
	w = NULL;
	ok(kvp_radix_w_open(seg.pub, seg.priv, &geom, KVP_RADIX_RECOVER, NULL, &w, &rep) == KVP_OK &&
			rep.runs_dropped >= 1,
		"a successor drops it and what hung from it");
	ok(sound() && depth(3, 3, l) == 0, "the rest is sound");
	is_u64(depth(5, 1, l2), 1, "and still there");
}

static void behaviour(void)
{
	uint64_t l[6] = {1, 2, 3, 4, 5, 6}, e[6] = {11, 12, 13, 14, 15, 16}, f[6] = {21, 22, 23, 24, 25, 26};
	uint32_t unknown = 9, stored = 9;
	fresh();
	ok(root(0, 6, l, e) == KVP_OK, "store six blocks");
	is_u64(depth(0, 6, l), 6, "all found");
	is_u64(depth(0, 3, l), 3, "a shorter prompt matches as a whole");
	ok(under(1, 12, 1, l, f) == KVP_ERR_NOTFOUND, "a parent that only another rank holds: NOTFOUND");
	ok(under(0, 99, 1, l, f) == KVP_ERR_NOTFOUND, "an unknown parent: NOTFOUND");
	ok(under(0, 16, 1, l, &e[5]) == KVP_ERR_INVAL, "parent among the blocks: INVAL");
	ok(root(0, 2, l, (uint64_t[]){5, 5}) == KVP_ERR_INVAL, "the same hash twice: INVAL");
	ok(root(64, 1, l, e) == KVP_ERR_INVAL, "slot out of range: INVAL");
	ok(kvp_radix_store(w, 0, PART + 1, KVP_RADIX_ROOT, 0, 1, l, f, NULL) == KVP_ERR_INVAL,
		"a second partition of one slot: INVAL");
	ok(kvp_radix_store(w, 1, PART, KVP_RADIX_ROOT, 0, 6, l, f, &stored) == KVP_OK && stored == 6,
		"another rank with other hashes");
	struct kvp_radix_stats st;
	kvp_radix_stats(&radix, &st);
	is_u64(st.blocks, 6, "the same blocks");
	ok(kvp_radix_remove(w, 1, 2, (uint64_t[]){13, 23}, &unknown) == KVP_OK && unknown == 1,
		"each rank removes by its own hashes only");
	is_u64(depth(1, 6, l), 2, "block 2 is a hole");
	is_u64(depth(0, 6, l), 6, "for that rank only");
	is_u64(kvp_radix_w_blocks(w, 1), 5, "what is behind the hole is held");
	ok(under(1, 24, 1, &(uint64_t){77}, &(uint64_t){78}) == KVP_OK, "a hidden block can be a parent");
	ok(under(1, 22, 1, &l[2], &f[2]) == KVP_OK && depth(1, 6, l) == 6,
		"storing the hole shows the tail again");
	is_u64(depth(1, 5, (uint64_t[]){1, 2, 3, 4, 77}), 5, "and the branch");
	ok(root(0, 1, l, f) == KVP_OK && kvp_radix_remove(w, 0, 1, e, NULL) == KVP_OK && depth(0, 6, l) == 6,
		"a block with two names stays when one goes");
	ok(kvp_radix_remove(w, 0, 1, f, NULL) == KVP_OK && depth(0, 6, l) == 0, "and goes with the last");
	ok(sound(), "sound");
	kvp_radix_clear(w, 0);
	kvp_radix_clear(w, 1);
	kvp_radix_stats(&radix, &st);
	ok(st.blocks == 0 && st.runs == 0 && st.col_used_words == 0 && sound(),
		"cleared: everything is free");
	ok(kvp_radix_store(w, 0, PART + 1, KVP_RADIX_ROOT, 0, 1, l, f, NULL) == KVP_OK,
		"after clear the slot may change its partition");
	is_u64(depth(0, 1, l), 0, "partitions are apart");
}

/* Hashes that arrive in pieces. */
struct source {
	const uint64_t *all;
	uint32_t cnt, calls, piece;
};
static uint32_t pour(void *ctx, struct kvp_radix_query *q)
{
	struct source *s = ctx;
	s->calls++;
	uint32_t n = q->local_cnt + s->piece < s->cnt ? q->local_cnt + s->piece : s->cnt;
	q->local = s->all;
	return q->local_cnt = n;
}

static void lazy(void)
{
	static uint64_t l[3000], e[3000];
	for (uint32_t i = 0; i < 3000; i++) {
		l[i] = i * 7919 + 1;
		e[i] = i + 1000000;
	}
	fresh();
	root(2, 1500, l, e);
	const uint32_t piece[] = {1, 64, 100};
	for (int i = 0; i < 3; i++) {
		struct source s = {l, 3000, 0, piece[i]};
		struct kvp_radix_query q = {PART, NULL, 0, 3000, pour, &s};
		kvp_radix_find(&radix, &q, match);
		is_u64(match->longest, 1500, "hashes in pieces of %u: whole match", piece[i]);
		ok(q.local_cnt < 1500 + 2 * 128,
			"no more than two chunks are asked for beyond the match (%u)", q.local_cnt - 1500);
	}
	struct source s = {l, 3000, 0, 64};
	struct kvp_radix_query q = {PART + 1, NULL, 0, 3000, pour, &s};
	kvp_radix_find(&radix, &q, match);
	ok(match->longest == 0 && s.calls == 1, "a miss asks for one chunk");
	l[700] = 1; /* the prompt differs inside a run */
	s = (struct source){l, 3000, 0, 64};
	q = (struct kvp_radix_query){PART, NULL, 0, 3000, pour, &s};
	kvp_radix_find(&radix, &q, match);
	ok(match->longest == 700 && q.local_cnt <= 700 + 2 * 64, "a miss inside a run stops the hashing");
	s = (struct source){l, 300, 0, 64};
	q = (struct kvp_radix_query){PART, NULL, 0, 3000, pour, &s};
	kvp_radix_find(&radix, &q, match);
	is_u64(match->longest, 300, "fewer hashes than announced: matched as far as they go");
	q = (struct kvp_radix_query){PART, NULL, 0, 0, NULL, NULL};
	ok(kvp_radix_find(&radix, &q, match) == KVP_OK && match->longest == 0,
		"an empty prompt matches nothing");
}

static void capacity(void)
{
	uint64_t l[500], e[500];
	uint32_t stored = 0, total = 0;
	int rc = 0;
	fresh();
	for (uint32_t c = 0; rc == KVP_OK; c++) {
		for (uint32_t i = 0; i < 490; i++) {
			l[i] = c * 1000 + i + 1;
			e[i] = l[i] + 5000000;
		}
		rc = kvp_radix_store(w, c % 64, PART, KVP_RADIX_ROOT, 0, 490, l, e, &stored);
		total += stored;
	}
	ok(rc == KVP_ERR_FULL && total == geom.block_max, "full at exactly block_max (%u)", total);
	uint32_t slot = total / 490 % 64, unknown = 0;
	is_u64(depth(slot, 490, l), stored, "the blocks that fitted are held");
	ok(under(slot, e[stored - 1], 1, &l[stored], &e[stored]) == KVP_ERR_FULL, "the next one is refused");
	kvp_radix_remove(w, slot, 1, &e[stored], &unknown);
	is_u64(unknown, 1, "and removing it is removing an unknown hash");
	ok(sound(), "sound when full");
	l[0] = 1;
	ok(root(50, 1, l, e) == KVP_OK && depth(50, 1, l) == 1, "blocks that are there can still be joined");
	kvp_radix_clear(w, 3);
	ok(root(3, 490, l, e) == KVP_OK && sound(), "room comes back when a slot is cleared");
	struct kvp_radix_stats st;
	kvp_radix_stats(&radix, &st);
	is_u64(st.full, 490 - stored + 1, "refused blocks are counted");
	for (uint32_t s = 0; s < 64; s++)
		kvp_radix_clear(w, s);
	for (rc = 0, total = 0; rc == KVP_OK; total++)
		rc = root(total % 64, 1, &(uint64_t){total + 1}, &(uint64_t){total + 1});
	ok(rc == KVP_ERR_FULL && total - 1 == geom.block_max && sound(),
		"the same with runs of one block (%u)", total - 1);
}

static void scarce(void)
{
	uint64_t l[40], e[40];
	fresh();
	for (uint32_t i = 0; i < 40; i++) {
		l[i] = i + 1;
		e[i] = i + 100;
	}
	root(1, 40, l, e);
	root(2, 40, l, e);
	w->geo.hole_max = 0;
	w->cutb.gran_max = w->pub->cut_bump; /* neither records nor cutoff lists are left */
	kvp_radix_remove(w, 1, 1, &e[20], NULL);
	is_u64(depth(1, 40, l), 0, "no room to say what is left of a run: nothing is said");
	is_u64(kvp_radix_w_blocks(w, 1), 0, "and nothing is held");
	struct kvp_radix_stats st;
	kvp_radix_stats(&radix, &st);
	is_u64(st.lost, 39, "the loss is counted");
	is_u64(depth(2, 40, l), 40, "the other rank keeps its blocks");
	ok(sound(), "sound");
	ok(root(3, 20, l, e) == KVP_ERR_FULL && depth(3, 40, l) == 0,
		"a store that needs a cutoff list: FULL");
	ok(under(2, e[9], 1, &(uint64_t){500}, &(uint64_t){501}) == KVP_OK && sound(),
		"a split that needs none works");
}

int main(void)
{
	match = malloc(sizeof(*match));
	life_cycle();
	restart();
	damaged();
	behaviour();
	lazy();
	capacity();
	scarce();
	kvp_radix_w_close(w);
	seg_free(&seg);
	free(match);
	return done();
}
