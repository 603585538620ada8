#include "shm/radix_priv.h"

#include <kvpick/point.h>
#include <string.h>

#define NONE UINT32_MAX

/* Entry of a slot in a cutoff list; NONE if absent. */
static uint32_t entry_of(const struct kvp_radix_w *w, const struct kvp_radix_hdr_shm *h, uint32_t slot)
{
	const uint32_t *cut = w->cut + h->cut_ref;
	for (uint32_t i = 0; i < KVP_RADIX_CUT_CNT(h->cut_n); i++)
		if (KVP_RADIX_CUT_SLOT(cut[i]) == slot)
			return i;
	return NONE;
}

uint32_t kvp_radix_cover_get(const struct kvp_radix_w *w, const struct kvp_radix_hdr_shm *h, uint32_t slot)
{
	if (kvp_radix_has_bit(h, slot))
		return h->len;
	uint32_t i = entry_of(w, h, slot);
	return i == NONE ? 0 : KVP_RADIX_CUT_BLK(w->cut[h->cut_ref + i]);
}

/* Bits and entries change by single stores: each value a reader can see was true. A bit wins over an entry,
 * so an entry whose slot has the bit is as free as one of 0 blocks. */
static void bit_store(struct kvp_radix_hdr_shm *h, uint32_t slot, uint32_t on)
{
	uint64_t v = h->bits[slot >> 6], b = 1ULL << (slot & 63);
	kvp_st_rel_u64(&h->bits[slot >> 6], on ? v | b : v & ~b);
}

static int entry_free(const struct kvp_radix_hdr_shm *h, uint32_t e)
{
	return KVP_RADIX_CUT_BLK(e) == 0 || kvp_radix_has_bit(h, KVP_RADIX_CUT_SLOT(e));
}

/* Moves the list to one of twice the size, without its free entries. The old one is reused only after the
 * header named the new one under a new version. */
static int list_grow(struct kvp_radix_w *w, uint32_t rid, uint32_t entry)
{
	struct kvp_radix_hdr_shm *h = kvp_radix_hdr_of(w, rid), *n;
	uint32_t cls = KVP_RADIX_CUT_CLASS(h->cut_n), ref = h->cut_ref, cnt = 0;
	uint32_t g = kvp_radix_buddy_get(&w->cutb, cls);
	if (g == KVP_RADIX_NOPOS)
		return KVP_ERR_FULL;
	uint32_t *to = w->cut + (uint64_t)g * KVP_RADIX_CUT_GRAN;
	for (uint32_t i = 0; i < KVP_RADIX_CUT_CNT(h->cut_n); i++)
		if (!entry_free(h, w->cut[ref + i]))
			kvp_st_rlx_u32(&to[cnt++], w->cut[ref + i]);
	kvp_st_rlx_u32(&to[cnt++], entry);
	n = kvp_radix_img_load(w, w->tslot[rid]);
	n->cut_ref = g * KVP_RADIX_CUT_GRAN;
	n->cut_n = (cls + 1) << 16 | cnt;
	kvp_radix_commit(w, w->tslot[rid]);
	if (cls)
		kvp_radix_buddy_put(&w->cutb, ref / KVP_RADIX_CUT_GRAN, 1u << (cls - 1));
	return KVP_OK;
}

static int entry_put(struct kvp_radix_w *w, uint32_t rid, uint32_t slot, uint32_t blk)
{
	struct kvp_radix_hdr_shm *h = kvp_radix_hdr_of(w, rid);
	uint32_t cnt = KVP_RADIX_CUT_CNT(h->cut_n), cls = KVP_RADIX_CUT_CLASS(h->cut_n), entry;
	entry = KVP_RADIX_CUT(slot, blk);
	for (uint32_t i = 0; i < cnt; i++)
		if (entry_free(h, w->cut[h->cut_ref + i])) {
			kvp_st_rel_u32(&w->cut[h->cut_ref + i], entry);
			return KVP_OK;
		}
	if (cls && cnt < KVP_RADIX_CUT_GRAN << (cls - 1)) {
		kvp_st_rlx_u32(&w->cut[h->cut_ref + cnt], entry);
		kvp_st_rel_u32(&h->cut_n, h->cut_n + 1); /* pairs with: radix_read.c visit_run */
		return KVP_OK;
	}
	return list_grow(w, rid, entry);
}

/* Dead entries at the end of a list leave it. */
static void list_trim(struct kvp_radix_w *w, struct kvp_radix_hdr_shm *h)
{
	uint32_t n = h->cut_n;
	while (KVP_RADIX_CUT_CNT(n) && KVP_RADIX_CUT_BLK(w->cut[h->cut_ref + KVP_RADIX_CUT_CNT(n) - 1]) == 0)
		n--;
	if (n != h->cut_n)
		kvp_st_rel_u32(&h->cut_n, n);
}

static int cover_store(struct kvp_radix_w *w, uint32_t rid, uint32_t slot, uint32_t blk)
{
	struct kvp_radix_hdr_shm *h = kvp_radix_hdr_of(w, rid);
	uint32_t i = entry_of(w, h, slot);
	if (blk == h->len) {
		if (!kvp_radix_has_bit(h, slot))
			bit_store(h, slot, 1);
		if (i != NONE) { /* readers need not look at it any more */
			kvp_st_rel_u32(&w->cut[h->cut_ref + i], KVP_RADIX_CUT(slot, 0));
			list_trim(w, h);
		}
		return KVP_OK;
	}
	if (i != NONE)
		kvp_st_rel_u32(&w->cut[h->cut_ref + i], KVP_RADIX_CUT(slot, blk));
	else if (blk && entry_put(w, rid, slot, blk))
		return KVP_ERR_FULL;
	KVP_POINT("radix:cover_entry");
	h = kvp_radix_hdr_of(w, rid);
	if (kvp_radix_has_bit(h, slot))
		bit_store(h, slot, 0);
	if (blk == 0)
		list_trim(w, h);
	return KVP_OK;
}

/* Sets what readers see of a slot in a run: its first blk blocks. FULL: no room for a cutoff, nothing
 * changed. */
int kvp_radix_cover_set(struct kvp_radix_w *w, uint32_t rid, uint32_t slot, uint32_t blk)
{
	int rc = cover_store(w, rid, slot, blk);
	kvp_radix_mirror(w, kvp_radix_hdr_of(w, rid)); /* bits and counts are stored one by one */
	return rc;
}

/* ---- what is held behind a hole ---- */

uint32_t kvp_radix_hole_get(struct kvp_radix_w *w, uint32_t slot, uint32_t a, uint32_t b)
{
	uint32_t i1 = w->hole_free;
	if (i1)
		w->hole_free = w->hole[i1 - 1].next;
	else if (w->priv->hole_bump < w->geo.hole_max)
		i1 = ++w->priv->hole_bump;
	else
		return 0;
	struct kvp_radix_hole_shm *x = &w->hole[i1 - 1];
	x->a = a;
	x->b = b;
	x->next = 0;
	kvp_st_rel_u32(&x->slot1, slot + 1);
	kvp_st_rlx_u64(&w->pub->stat.hole_cnt, w->pub->stat.hole_cnt + 1);
	return i1;
}

void kvp_radix_hole_link(struct kvp_radix_w *w, uint32_t hole1)
{
	struct kvp_radix_hole_shm *x = &w->hole[hole1 - 1];
	struct kvp_radix_run_shm *r = &w->run[kvp_radix_rid_at(w, x->a)];
	x->next = r->hole;
	r->hole = hole1;
}

/* The record must not be in a chain any more. */
void kvp_radix_hole_put(struct kvp_radix_w *w, uint32_t hole1)
{
	struct kvp_radix_hole_shm *x = &w->hole[hole1 - 1];
	kvp_st_rel_u32(&x->slot1, 0);
	x->next = w->hole_free;
	w->hole_free = hole1;
	kvp_st_rlx_u64(&w->pub->stat.hole_cnt, w->pub->stat.hole_cnt - 1);
}

static int has_hole(const struct kvp_radix_w *w, uint32_t rid, uint32_t slot)
{
	for (uint32_t o = w->run[rid].hole; o; o = w->hole[o - 1].next)
		if (w->hole[o - 1].slot1 == slot + 1)
			return 1;
	return 0;
}

static uint32_t bits_or(const struct kvp_radix_w *w, const struct kvp_radix_hdr_shm *h)
{
	for (uint32_t i = 0; i < w->geo.word_cnt; i++)
		if (h->bits[i])
			return 1;
	return 0;
}

uint32_t kvp_radix_held_end(const struct kvp_radix_w *w, uint32_t rid)
{
	const struct kvp_radix_hdr_shm *h = kvp_radix_hdr_of(w, rid);
	uint32_t end = 0;
	if (bits_or(w, h))
		return h->len;
	for (uint32_t i = 0; i < KVP_RADIX_CUT_CNT(h->cut_n); i++) {
		uint32_t blk = KVP_RADIX_CUT_BLK(w->cut[h->cut_ref + i]);
		end = blk > end ? blk : end;
	}
	for (uint32_t o = w->run[rid].hole; o; o = w->hole[o - 1].next)
		end = w->hole[o - 1].b - h->base > end ? w->hole[o - 1].b - h->base : end;
	uint32_t low = h->low_n ? kvp_radix_low_end(w, h) : 0;
	return low > end ? low : end;
}

int kvp_radix_holds(const struct kvp_radix_w *w, uint32_t slot, uint32_t pos)
{
	if (kvp_radix_is_low(w, slot))
		return kvp_radix_low_holds(w, slot, pos);
	uint32_t rid = kvp_radix_rid_at(w, pos);
	const struct kvp_radix_hdr_shm *h = kvp_radix_hdr_of(w, rid);
	if (kvp_radix_has_bit(h, slot) || pos - h->base < kvp_radix_cover_get(w, h, slot))
		return 1;
	for (uint32_t o = w->run[rid].hole; o; o = w->hole[o - 1].next) {
		const struct kvp_radix_hole_shm *x = &w->hole[o - 1];
		if (x->slot1 == slot + 1 && pos >= x->a && pos < x->b)
			return 1;
	}
	return 0;
}

/* ---- sets ---- */

void kvp_radix_set_add(struct kvp_radix_set *s, uint32_t a, uint32_t b)
{
	for (; a < b; a++)
		s->w[a >> 6] |= 1ULL << (a & 63);
}

uint32_t kvp_radix_set_cnt(const struct kvp_radix_set *s)
{
	uint32_t n = 0;
	for (int i = 0; i < KVP_RADIX_SET_WORDS; i++)
		n += (uint32_t)__builtin_popcountll(s->w[i]);
	return n;
}

uint32_t kvp_radix_set_next(const struct kvp_radix_set *s, uint32_t at, uint32_t len, uint64_t in)
{
	while (at < len) {
		uint64_t x = (in ? s->w[at >> 6] : ~s->w[at >> 6]) >> (at & 63);
		if (x) {
			at += (uint32_t)__builtin_ctzll(x);
			return at < len ? at : len;
		}
		at = (at | 63) + 1;
	}
	return len;
}

void kvp_radix_held_set(const struct kvp_radix_w *w, uint32_t rid, uint32_t slot, struct kvp_radix_set *s)
{
	const struct kvp_radix_hdr_shm *h = kvp_radix_hdr_of(w, rid);
	memset(s, 0, sizeof(*s));
	if (kvp_radix_is_low(w, slot)) {
		kvp_radix_low_set(w, rid, slot, s);
		return;
	}
	kvp_radix_set_add(s, 0, kvp_radix_cover_get(w, h, slot));
	for (uint32_t o = w->run[rid].hole; o; o = w->hole[o - 1].next)
		if (w->hole[o - 1].slot1 == slot + 1)
			kvp_radix_set_add(s, w->hole[o - 1].a - h->base, w->hole[o - 1].b - h->base);
}

/* Unlinks the records of a slot from its run's chain; returns them as a chain. */
static uint32_t holes_take(struct kvp_radix_w *w, uint32_t rid, uint32_t slot)
{
	uint32_t taken = 0, *p = &w->run[rid].hole;
	while (*p) {
		struct kvp_radix_hole_shm *x = &w->hole[*p - 1];
		uint32_t me = *p;
		if (x->slot1 != slot + 1) {
			p = &x->next;
			continue;
		}
		*p = x->next;
		x->next = taken;
		taken = me;
	}
	return taken;
}

static void holes_free(struct kvp_radix_w *w, uint32_t chain)
{
	while (chain) {
		uint32_t next = w->hole[chain - 1].next;
		kvp_radix_hole_put(w, chain);
		chain = next;
	}
}

/* Records for everything in s from block `from` on: a chain, or *ok = 0 and as many as there was room for.
 * */
static uint32_t holes_make(struct kvp_radix_w *w, uint32_t rid, uint32_t slot, const struct kvp_radix_set *s,
	uint32_t from, int *ok)
{
	const struct kvp_radix_hdr_shm *h = kvp_radix_hdr_of(w, rid);
	uint32_t chain = 0, a = kvp_radix_set_next(s, from, h->len, 1);
	*ok = 1;
	while (a < h->len) {
		uint32_t b = kvp_radix_set_next(s, a, h->len, 0);
		uint32_t o = kvp_radix_hole_get(w, slot, h->base + a, h->base + b);
		if (!o) {
			*ok = 0;
			return chain;
		}
		w->hole[o - 1].next = chain;
		chain = o;
		a = kvp_radix_set_next(s, b, h->len, 1);
	}
	return chain;
}

static void holes_link(struct kvp_radix_w *w, uint32_t chain)
{
	while (chain) {
		uint32_t next = w->hole[chain - 1].next;
		kvp_radix_hole_link(w, chain);
		chain = next;
	}
}

static int hold_holes(
	struct kvp_radix_w *w, uint32_t rid, uint32_t slot, uint32_t a, uint32_t b, uint32_t *fresh)
{
	struct kvp_radix_set s;
	int made;
	kvp_radix_held_set(w, rid, slot, &s);
	uint32_t before = kvp_radix_set_cnt(&s), len = kvp_radix_hdr_of(w, rid)->len;
	kvp_radix_set_add(&s, a, b);
	uint32_t see = kvp_radix_set_next(&s, 0, len, 0);
	uint32_t more = holes_make(w, rid, slot, &s, see, &made);
	/* Records first, then what readers see, then the old records away: a kill in between leaves too
	 * much said about blocks that are held anyway. */
	if (!made || kvp_radix_cover_set(w, rid, slot, see)) {
		holes_free(w, more);
		return KVP_ERR_FULL;
	}
	KVP_POINT("radix:hold_holes");
	holes_free(w, holes_take(w, rid, slot));
	holes_link(w, more);
	*fresh = kvp_radix_set_cnt(&s) - before;
	w->slot[slot].blocks += *fresh;
	return KVP_OK;
}

int kvp_radix_hold(
	struct kvp_radix_w *w, uint32_t rid, uint32_t slot, uint32_t a, uint32_t b, uint32_t *fresh)
{
	const struct kvp_radix_hdr_shm *h = kvp_radix_hdr_of(w, rid);
	if (kvp_radix_is_low(w, slot))
		return kvp_radix_low_hold(w, rid, slot, a, b, fresh);
	uint32_t see = kvp_radix_cover_get(w, h, slot);
	*fresh = 0;
	if (b <= see)
		return KVP_OK;
	kvp_radix_tour_came(w, rid, slot);
	if (a > see || (w->run[rid].hole && has_hole(w, rid, slot)))
		return hold_holes(w, rid, slot, a, b, fresh);
	int rc = kvp_radix_cover_set(w, rid, slot, b);
	if (rc)
		return rc;
	*fresh = b - see;
	w->slot[slot].blocks += *fresh;
	return KVP_OK;
}

static void alias_drop_set(struct kvp_radix_w *w, uint32_t base, uint32_t slot, const struct kvp_radix_set *s)
{
	if (w->slot[slot].alias_cnt == 0)
		return;
	for (uint32_t i = 0; i < KVP_RADIX_SET_WORDS; i++)
		for (uint64_t x = s->w[i]; x; x &= x - 1)
			kvp_radix_alias_drop(w, slot, base + i * 64 + (uint32_t)__builtin_ctzll(x));
}

/* Says what is left, as far as there is room: cutoffs and records may be used up, and then less is said.
 * *off = what is no longer held. */
static void shrink(struct kvp_radix_w *w, uint32_t rid, uint32_t slot, const struct kvp_radix_set *gone,
	struct kvp_radix_set *off)
{
	struct kvp_radix_set s, left;
	int made;
	kvp_radix_held_set(w, rid, slot, &s);
	*off = s;
	for (int i = 0; i < KVP_RADIX_SET_WORDS; i++)
		s.w[i] &= ~gone->w[i];
	uint32_t see = kvp_radix_set_next(&s, 0, kvp_radix_hdr_of(w, rid)->len, 0);
	uint32_t more = holes_make(w, rid, slot, &s, see, &made);
	KVP_POINT("radix:drop_holes");
	if (kvp_radix_cover_set(w, rid, slot, see))
		kvp_radix_cover_set(w, rid, slot, 0);
	KVP_POINT("radix:drop_seen");
	holes_free(w, holes_take(w, rid, slot));
	holes_link(w, more);
	kvp_radix_held_set(w, rid, slot, &left);
	for (int i = 0; i < KVP_RADIX_SET_WORDS; i++)
		off->w[i] &= ~left.w[i];
}

static void drop_low(struct kvp_radix_w *w, uint32_t rid, uint32_t holder, const struct kvp_radix_set *gone)
{
	struct kvp_radix_set off, left;
	uint32_t base = kvp_radix_hdr_of(w, rid)->base;
	kvp_radix_held_set(w, rid, holder, &off);
	kvp_radix_low_cut(w, rid, holder, gone);
	kvp_radix_held_set(w, rid, holder, &left);
	for (int i = 0; i < KVP_RADIX_SET_WORDS; i++)
		off.w[i] &= ~left.w[i];
	uint32_t all = kvp_radix_set_cnt(&off), asked = kvp_radix_set_cnt(gone);
	if (all > asked)
		kvp_radix_count(w, &w->pub->stat.lost, KVP_CTR_RADIX_LOST, all - asked);
	KVP_POINT("radix:low_dropped");
	alias_drop_set(w, base, holder, &off);
	w->slot[holder].blocks -= all;
	kvp_radix_low_note(w, w->pub->stat.low_blocks - all);
}

void kvp_radix_drop(struct kvp_radix_w *w, uint32_t rid, uint32_t slot, const struct kvp_radix_set *gone)
{
	if (kvp_radix_is_low(w, slot)) {
		drop_low(w, rid, slot, gone);
		return;
	}
	const struct kvp_radix_hdr_shm *h = kvp_radix_hdr_of(w, rid);
	struct kvp_radix_set off = *gone;
	uint32_t see = kvp_radix_cover_get(w, h, slot), base = h->base, cnt = kvp_radix_set_cnt(gone),
		 all = cnt;
	uint32_t first = kvp_radix_set_next(gone, 0, h->len, 1);
	if ((w->run[rid].hole && has_hole(w, rid, slot)) || first + cnt != see ||
		kvp_radix_set_next(gone, first, h->len, 0) != see ||
		kvp_radix_cover_set(w, rid, slot, first)) {
		shrink(w, rid, slot, gone, &off);
		all = kvp_radix_set_cnt(&off);
		kvp_radix_count(w, &w->pub->stat.lost, KVP_CTR_RADIX_LOST, all - cnt);
	}
	KVP_POINT("radix:dropped");
	alias_drop_set(w, base, slot,
		&off); /* last: without it the block would seem to be held under its column's name */
	w->slot[slot].blocks -= all;
}

void kvp_radix_drop_all(struct kvp_radix_w *w, uint32_t rid, uint32_t slot)
{
	struct kvp_radix_set s;
	kvp_radix_held_set(w, rid, slot, &s);
	uint32_t cnt = kvp_radix_set_cnt(&s), base = kvp_radix_hdr_of(w, rid)->base;
	if (!cnt)
		return;
	if (kvp_radix_is_low(w, slot)) {
		drop_low(w, rid, slot, &s);
		return;
	}
	kvp_radix_cover_set(w, rid, slot, 0);
	holes_free(w, holes_take(w, rid, slot));
	KVP_POINT("radix:drop_all");
	alias_drop_set(w, base, slot, &s);
	w->slot[slot].blocks -= cnt;
}

void kvp_radix_tidy(struct kvp_radix_w *w, uint32_t rid, uint32_t slot)
{
	struct kvp_radix_set none = {{0}}, off;
	shrink(w, rid, slot, &none, &off);
}
