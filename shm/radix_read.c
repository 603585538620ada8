#include "shm/radix_walk.h"

#include <string.h>

/* Ranks that drop out here by the run's cutoff list. act: still in, but without the run's bit. */
static int cutoffs(struct walk *w, struct visit *v, const uint64_t *out)
{
	struct kvp_radix_match *m = w->m;
	uint32_t cnt = KVP_RADIX_CUT_CNT(v->cut_n);
	if (cnt > KVP_RADIX_SLOT_MAX || (uint64_t)v->cut_ref + cnt > w->r->cut_max)
		return -1;
	const uint32_t *cut = (const uint32_t *)(const void *)(w->r->base + w->r->cut_off) + v->cut_ref;
	for (uint32_t i = 0; i < cnt; i++) {
		uint32_t e = kvp_ld_rlx_u32(&cut[i]);
		uint32_t s = KVP_RADIX_CUT_SLOT(e), blk = KVP_RADIX_CUT_BLK(e);
		if (s >= w->r->word_cnt * 64 || blk == 0 || !(out[s >> 6] >> (s & 63) & 1))
			continue;
		m->depth[s] = w->pos + (blk < v->matched ? blk : v->matched);
		if (w->pos == 0)
			m->active[s >> 6] |= 1ULL << (s & 63);
		v->longest = m->depth[s] > v->longest ? m->depth[s] : v->longest;
	}
	return 0;
}

/* Intersects the ranks still in with those of the run. Everything written to the result is either validated
 * afterwards or written again. */
static int cover(struct walk *w, const struct kvp_radix_hdr_shm *h, struct visit *v, uint64_t *act)
{
	uint64_t out[KVP_RADIX_WORD_MAX];
	v->longest = w->longest;
	for (uint32_t i = 0; i < w->r->word_cnt; i++) {
		uint64_t bits = kvp_ld_rlx_u64(&h->bits[i]);
		act[i] = w->act[i] & bits;
		out[i] = w->act[i] & ~bits;
		if (w->pos == 0)
			w->m->active[i] = act[i];
		else
			for (uint64_t x = out[i]; x; x &= x - 1)
				w->m->depth[i * 64 + (uint32_t)__builtin_ctzll(x)] = w->pos;
	}
	return cutoffs(w, v, out);
}

static enum step visit_run(struct walk *w)
{
	struct visit v;
	uint64_t act[KVP_RADIX_WORD_MAX], any = 0;
	int64_t i = probe(w, w->key[w->pos & (RING - 1)]);
	if (i < 0) /* perhaps it has become part of the run before since that was read */
		return w->prev && kvp_ld_rlx_u32(&w->prev->ver) != w->prev_ver ? STEP_ANEW : STEP_END;
	const struct kvp_radix_hdr_shm *h = hdr_at(w, (uint64_t)i);
	v.ver = kvp_ld_acq_u32(&h->ver); /* pairs with: kvp_radix_commit (version even) */
	v.len = kvp_ld_rlx_u32(&h->len);
	v.base = kvp_ld_rlx_u32(&h->base);
	v.last = kvp_ld_rlx_u64(&h->last);
	v.cut_ref = kvp_ld_rlx_u32(&h->cut_ref);
	v.cut_n = kvp_ld_acq_u32(&h->cut_n); /* pairs with: kvp_radix_cover_set (entry, then count) */
	if (v.ver & 1 || kvp_ld_rlx_u64(&h->key) != w->key[w->pos & (RING - 1)] || v.len == 0 ||
		v.len > KVP_RADIX_RUN_BLK_MAX || (uint64_t)v.base + v.len > w->r->col_max)
		return STEP_TORN;
	if (w->total - w->pos < v.len)
		__builtin_prefetch(&col_of(w->r)[v.base + (w->total - w->pos) - 1]);
	if (KVP_RADIX_CUT_CNT(v.cut_n) && v.cut_ref < w->r->cut_max)
		__builtin_prefetch((const uint32_t *)(const void *)(w->r->base + w->r->cut_off) + v.cut_ref);
	look_ahead(w, v.len);
	v.matched = match_len(w, &v);
	if (cover(w, h, &v, act))
		return STEP_TORN;
	/* Orders the loads above before the version: pairs with the release fence in kvp_radix_commit. */
	kvp_fence_acq();
	if (kvp_ld_rlx_u32(&h->ver) != v.ver)
		return STEP_TORN;
	for (uint32_t x = 0; x < w->r->word_cnt; x++) {
		w->act[x] = act[x];
		any |= act[x];
	}
	w->longest = v.longest;
	w->prev = h;
	w->prev_ver = v.ver;
	w->pos += v.matched;
	if (any)
		w->longest = w->pos;
	if (!any || v.matched < v.len)
		return STEP_END;
	if (w->pos == w->have && (w->have >= w->total || !more_keys(w)))
		return STEP_END;
	return STEP_ON;
}

static enum step begin(struct walk *w)
{
	w->pos = w->have = w->longest = w->guess = 0;
	w->step = KVP_RADIX_RUN_BLK_MAX;
	w->total = w->q->total_blk;
	w->chain = kvp_radix_seed(w->r->key_salt, w->q->part_salt);
	for (uint32_t i = 0; i < w->r->word_cnt; i++) {
		w->act[i] = ~kvp_ld_acq_u64(&w->r->shm->hidden[i]); /* pairs with: radix_write.c hide */
		w->m->active[i] = 0;
	}
	w->prev = NULL;
	return more_keys(w) ? STEP_ON : STEP_END;
}

/* Walks one state of the table. Returns 0 when retries are used up. */
static int walk(struct walk *w)
{
	struct kvp_radix_match *m = w->m;
	enum step st = begin(w);
	while (st == STEP_ON) {
		st = visit_run(w);
		if (st != STEP_TORN && st != STEP_ANEW)
			continue;
		if (m->retries >= KVP_RADIX_RETRY_MAX) {
			m->gave_up = 1;
			break;
		}
		m->retries++;
		kvp_pause();
		st = st == STEP_ANEW ? begin(w) : STEP_ON;
	}
	if (w->pos == 0) { /* nothing validated: also undoes what a torn visit wrote */
		for (uint32_t i = 0; i < w->r->word_cnt; i++)
			m->active[i] = 0;
		w->longest = 0;
	} else {
		for (uint32_t i = 0; i < w->r->word_cnt; i++)
			for (uint64_t x = w->act[i]; x; x &= x - 1)
				m->depth[i * 64 + (uint32_t)__builtin_ctzll(x)] = w->pos;
	}
	m->longest = w->longest;
	return !m->gave_up;
}

int kvp_radix_find(const struct kvp_radix *r, struct kvp_radix_query *q, struct kvp_radix_match *m)
{
	struct walk w;
	m->longest = m->retries = m->gave_up = m->low_any = 0;
	m->word_cnt = r->word_cnt;
	w.r = r;
	w.q = q;
	w.m = m;
	while (kvp_radix_ready(r)) {
		uint64_t d = kvp_ld_acq_u64(&r->shm->table); /* pairs with: use of a new table, radix_run.c */
		uint32_t log2 = KVP_RADIX_DESC_LOG2(d);
		if (log2 >= r->log2_min && log2 <= r->log2_max) {
			w.tab = r->base + kvp_radix_area(r, log2, KVP_RADIX_DESC_SIDE(d));
			w.mask = (uint32_t)((1ULL << log2) - 1);
			if (walk(&w) && kvp_ld_acq_u32(&r->shm->low)) /* pairs with: kvp_radix_low_note */
				kvp_radix_walk_low(&w);
			/* A table that was replaced meanwhile may name recycled arrays: walk the new one.
			 * */
			kvp_fence_acq();
			if (kvp_ld_rlx_u64(&r->shm->table) == d)
				return KVP_OK;
		}
		memset(m->active, 0, sizeof(m->active[0]) * r->word_cnt);
		m->longest = m->low_any = 0;
		if (m->retries >= KVP_RADIX_RETRY_MAX) {
			m->gave_up = 1;
			return KVP_OK;
		}
		m->retries++;
		m->gave_up = 0;
	}
	memset(m->active, 0, sizeof(m->active[0]) * r->word_cnt);
	m->longest = 0;
	return KVP_ERR_AGAIN;
}
