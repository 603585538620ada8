#include "shm/radix_walk.h"

#include <string.h>

/* The second walk over the same runs, only where lower tiers hold anything: what a rank holds there goes on
 * where its blocks of the tier before ended. Nothing is written before a run is validated. */

struct low {
	uint64_t in[KVP_RADIX_WORD_MAX];  /* slots whose blocks reach the cursor, or may begin there */
	uint32_t end[KVP_RADIX_SLOT_MAX]; /* blocks so far, all tiers together */
	uint8_t tier[KVP_RADIX_SLOT_MAX]; /* the tier that the last of them came from */
	uint64_t iv[KVP_RADIX_IV_MAX];	  /* the run's intervals */
	uint32_t cnt;
};

static int copy_low(const struct walk *w, const struct kvp_radix_hdr_shm *h, struct low *l)
{
	uint32_t n = kvp_ld_acq_u32(&h->low_n); /* pairs with: radix_low.c entry_add */
	uint32_t ref = kvp_ld_rlx_u32(&h->low_ref);
	l->cnt = KVP_RADIX_CUT_CNT(n);
	if (l->cnt > KVP_RADIX_IV_MAX || ref % KVP_RADIX_CUT_GRAN ||
		(uint64_t)ref + 2 * l->cnt > w->r->cut_max)
		return -1;
	const uint64_t *iv = (const uint64_t *)(const void *)(w->r->base + w->r->cut_off + 4ULL * ref);
	for (uint32_t i = 0; i < l->cnt; i++)
		l->iv[i] = kvp_ld_rlx_u64(&iv[i]);
	return 0;
}

static void extend(struct walk *w, struct low *l, uint32_t tier, uint32_t s, uint32_t to)
{
	struct kvp_radix_match *m = w->m;
	uint64_t bit = 1ULL << (s & 63);
	if (!(m->low[s >> 6] & bit)) {
		m->low[s >> 6] |= bit;
		m->ext[0][s] = m->ext[1][s] = m->ext[2][s] = 0;
	}
	m->ext[tier - 1][s] += to - l->end[s];
	l->end[s] = to;
	l->tier[s] = (uint8_t)tier;
}

/* Goes on with every slot that ended inside the run, tier by tier; no tier is gone back to. */
static void cover(struct walk *w, struct low *l, uint32_t matched)
{
	uint32_t slot_max = w->r->word_cnt * 64;
	for (uint32_t tier = KVP_RADIX_HOST; tier < KVP_RADIX_TIER_CNT && l->cnt; tier++) {
		for (uint32_t i = 0; i < l->cnt; i++) {
			uint64_t v = l->iv[i];
			uint32_t s = KVP_RADIX_IV_HOLDER(v) - tier * slot_max, b = KVP_RADIX_IV_B(v);
			if (s >= slot_max || !(l->in[s >> 6] >> (s & 63) & 1) || l->tier[s] > tier)
				continue;
			uint32_t off = l->end[s] - w->pos;
			if (off >= matched || off < KVP_RADIX_IV_A(v) || off >= b)
				continue; /* off wraps for a slot that ended before, too */
			extend(w, l, tier, s, w->pos + (b < matched ? b : matched));
		}
	}
}

static enum step begin(struct walk *w, struct low *l)
{
	struct kvp_radix_match *m = w->m;
	uint32_t slot_max = w->r->word_cnt * 64;
	memset(l->end, 0, sizeof(l->end[0]) * slot_max);
	memset(l->tier, 0, sizeof(l->tier[0]) * slot_max);
	for (uint32_t i = 0; i < w->r->word_cnt; i++) {
		l->in[i] = ~kvp_ld_acq_u64(&w->r->shm->hidden[i]); /* pairs with: radix_write.c hide */
		m->low[i] = 0;
		for (uint64_t x = m->active[i]; x; x &= x - 1) {
			uint32_t s = i * 64 + (uint32_t)__builtin_ctzll(x);
			l->end[s] = m->depth[s];
		}
	}
	m->low_any = 1;
	w->pos = w->have = w->guess = 0;
	w->step = KVP_RADIX_RUN_BLK_MAX;
	w->total = w->q->total_blk;
	w->chain = kvp_radix_seed(w->r->key_salt, w->q->part_salt);
	w->prev = NULL;
	return more_keys(w) ? STEP_ON : STEP_END;
}

static enum step visit(struct walk *w, struct low *l)
{
	struct visit v;
	uint64_t any = 0;
	int64_t i = probe(w, w->key[w->pos & (RING - 1)]);
	if (i < 0) /* as in radix_read.c */
		return w->prev && kvp_ld_rlx_u32(&w->prev->ver) != w->prev_ver ? STEP_ANEW : STEP_END;
	const struct kvp_radix_hdr_shm *h = hdr_at(w, (uint64_t)i);
	v.ver = kvp_ld_acq_u32(&h->ver); /* pairs with: kvp_radix_commit (version even) */
	v.len = kvp_ld_rlx_u32(&h->len);
	v.base = kvp_ld_rlx_u32(&h->base);
	v.last = kvp_ld_rlx_u64(&h->last);
	if (v.ver & 1 || kvp_ld_rlx_u64(&h->key) != w->key[w->pos & (RING - 1)] || v.len == 0 ||
		v.len > KVP_RADIX_RUN_BLK_MAX || (uint64_t)v.base + v.len > w->r->col_max)
		return STEP_TORN;
	look_ahead(w, v.len);
	v.matched = match_len(w, &v);
	if (copy_low(w, h, l))
		return STEP_TORN;
	/* Orders the loads above before the version: pairs with the release fence in kvp_radix_commit. */
	kvp_fence_acq();
	if (kvp_ld_rlx_u32(&h->ver) != v.ver)
		return STEP_TORN;
	cover(w, l, v.matched);
	w->prev = h;
	w->prev_ver = v.ver;
	w->pos += v.matched;
	for (uint32_t x = 0; x < w->r->word_cnt; x++) {
		for (uint64_t b = l->in[x]; b; b &= b - 1)
			if (l->end[x * 64 + (uint32_t)__builtin_ctzll(b)] < w->pos)
				l->in[x] ^= b & -b;
		any |= l->in[x];
	}
	if (!any || v.matched < v.len)
		return STEP_END;
	if (w->pos == w->have && (w->have >= w->total || !more_keys(w)))
		return STEP_END;
	return STEP_ON;
}

void kvp_radix_walk_low(struct walk *w)
{
	struct low l;
	enum step st = begin(w, &l);
	while (st == STEP_ON) {
		st = visit(w, &l);
		if (st != STEP_TORN && st != STEP_ANEW)
			continue;
		if (w->m->retries >= KVP_RADIX_RETRY_MAX) {
			w->m->gave_up = 1;
			return;
		}
		w->m->retries++;
		kvp_pause();
		st = st == STEP_ANEW ? begin(w, &l) : STEP_ON;
	}
}
