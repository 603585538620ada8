/* shm/radix_walk.h — the steps that the walk along device blocks and the one through lower tiers share.
 *
 * Shape      static functions in both radix_read.c and radix_low_read.c: each walk is compiled as one whole,
 *            so that the second costs the first nothing.
 * Truth      the tree, as far as the version of a run's header is even and unchanged after the loads.
 * Writers    none; a walk lives in the frame of its reader.
 * Ordering   see radix.h.
 * Lifetime   one lookup.
 * Crash      leaves nothing.
 * Proved by  tests/t_radix.c, tests/m_radix.c, tests/m_tiers.c.
 */
#ifndef KVP_SHM_RADIX_WALK_H
#define KVP_SHM_RADIX_WALK_H

#include "shm/radix_priv.h"

#define RING 2048u /* keys kept: the current run and what is looked ahead */
#define AHEAD 8u   /* runs looked ahead */
_Static_assert(RING >= KVP_RADIX_RUN_BLK_MAX + 2 * KVP_RADIX_CHUNK_BLK, "a run and two chunks fit");

struct walk {
	const struct kvp_radix *r;
	struct kvp_radix_query *q;
	struct kvp_radix_match *m;
	const char *tab;
	uint32_t mask;
	uint32_t pos;	/* blocks matched so far = position of the next run */
	uint32_t have;	/* keys known */
	uint32_t total; /* blocks of the prompt, as far as they can be had */
	uint32_t longest;
	uint32_t guess, step; /* next position where a run is expected, and its expected length */
	const struct kvp_radix_hdr_shm *prev; /* run before, NULL = none, and its version */
	uint32_t prev_ver;
	uint64_t chain;
	uint64_t act[KVP_RADIX_WORD_MAX];
	uint64_t key[RING];
};

/* What one visit of a run learned before it is validated. */
struct visit {
	uint32_t ver, len, base, cut_ref, cut_n;
	uint64_t last;
	uint32_t matched;
	uint32_t longest;
};

enum step { STEP_ON, STEP_END, STEP_TORN, STEP_ANEW };

static const uint64_t *col_of(const struct kvp_radix *r)
{
	return (const uint64_t *)(const void *)(r->base + r->col_off);
}

static const struct kvp_radix_hdr_shm *hdr_at(const struct walk *w, uint64_t i)
{
	return (const struct kvp_radix_hdr_shm *)(const void *)(w->tab + i * w->r->hdr_bytes);
}

static void prefetch_hdr(const struct walk *w, uint64_t key)
{
	const char *p = w->tab + (key & w->mask) * w->r->hdr_bytes;
	for (uint32_t o = 0; o < w->r->hdr_bytes && o < 256; o += KVP_CACHE_LINE)
		__builtin_prefetch(p + o);
}

/* Where the loop over the key chain comes to lie in a cache line costs up to 0.4 ns a block. */
#ifndef KVP_RADIX_KEYS_AT
#define KVP_RADIX_KEYS_AT __attribute__((aligned(64)))
#endif

/* Computes the keys of the next chunk; 0 if there are no more hashes. */
KVP_RADIX_KEYS_AT static int more_keys(struct walk *w)
{
	struct kvp_radix_query *q = w->q;
	uint32_t want = w->have + KVP_RADIX_CHUNK_BLK;
	want = want < w->total ? want : w->total;
	while (q->local_cnt < want && q->more) {
		uint32_t before = q->local_cnt;
		if (q->more(q->ctx, q) <= before)
			break;
	}
	if (q->local_cnt < want) {
		w->total = q->local_cnt > w->have ? q->local_cnt : w->have;
		want = w->total;
	}
	if (want == w->have)
		return 0;
	uint64_t k = w->chain;
	for (uint32_t i = w->have; i < want; i++) {
		k = kvp_radix_step(w->r->key_salt, k, q->local[i]);
		w->key[i & (RING - 1)] = k;
		if (i == w->guess) {
			prefetch_hdr(w, k);
			w->guess += w->step;
		}
	}
	w->chain = k;
	w->have = want;
	return 1;
}

/* Hashes that are there already cost little: look ahead so that the headers of short runs are on their way.
 * */
static void look_ahead(struct walk *w, uint32_t len)
{
	int known = w->step == len && w->guess > w->pos && (w->guess - w->pos) % len == 0;
	uint32_t to = w->pos + AHEAD * len;
	if (len < 8 || to > w->pos + RING / 2)
		to = w->pos + len + 1;
	if (!known) { /* else they are on their way already */
		w->step = len;
		w->guess = w->pos + len;
		for (uint32_t i = 0; i < AHEAD && w->guess < w->have; i++, w->guess += len)
			prefetch_hdr(w, w->key[w->guess & (RING - 1)]);
	}
	to = to < w->total ? to : w->total;
	const struct kvp_radix_query *q = w->q;
	while (w->have < to && w->have + KVP_RADIX_CHUNK_BLK <= w->pos + RING &&
		(q->local_cnt >= w->total || w->have + KVP_RADIX_CHUNK_BLK <= q->local_cnt) && more_keys(w))
		;
}

/* Slot of the header with this key; -1 if absent. */
static int64_t probe(const struct walk *w, uint64_t key)
{
	uint64_t i = key & w->mask;
	for (uint32_t n = 0; n <= w->mask; n++, i = (i + 1) & w->mask) {
		uint64_t k = kvp_ld_acq_u64(&hdr_at(w, i)->key); /* pairs with: kvp_radix_commit (key) */
		if (k == key)
			return (int64_t)i;
		if (k == KVP_RADIX_KEY_NONE)
			return -1;
	}
	return -1;
}

/* Number of leading blocks of the run that equal the prompt: lo are known to, block hi - 1 is known not to.
 * */
static uint32_t bisect(const struct walk *w, const struct visit *v, uint32_t lo, uint32_t hi)
{
	const uint64_t *col = col_of(w->r) + v->base;
	hi--;
	while (lo < hi) {
		uint32_t mid = lo + (hi - lo) / 2;
		if (kvp_ld_rlx_u64(&col[mid]) == w->key[(w->pos + mid) & (RING - 1)])
			lo = mid + 1;
		else
			hi = mid;
	}
	return lo;
}

static uint32_t match_len(struct walk *w, const struct visit *v)
{
	const uint64_t *col = col_of(w->r) + v->base;
	uint32_t lo = 1; /* the first block is the header's key */
	for (;;) {
		uint32_t avail = w->have - w->pos;
		if (avail >= v->len)
			return w->key[(w->pos + v->len - 1) & (RING - 1)] == v->last
				       ? v->len
				       : bisect(w, v, lo, v->len);
		/* Look at the column where the known keys end, so that a miss stops the hashing. */
		if (kvp_ld_rlx_u64(&col[avail - 1]) != w->key[(w->have - 1) & (RING - 1)])
			return bisect(w, v, lo, avail);
		lo = avail;
		uint32_t next = avail + KVP_RADIX_CHUNK_BLK;
		__builtin_prefetch(&col[(next < v->len ? next : v->len) - 1]);
		if (w->have >= w->total || !more_keys(w))
			return avail;
	}
}

/* Walks lower tiers from where the device's blocks end in w->m; sets m->low_any and what goes with it. Counts
 * retries in m, which gives up when they are used up. */
void kvp_radix_walk_low(struct walk *w);
#endif
