#include "shm/radix_priv.h"

#include <kvpick/point.h>
#include <string.h>

/* The image of the header as it shall be stands in the second segment, so that a killed writer's successor
 * can finish the copy. img_load fills it from the table, img_clear with nothing. */
struct kvp_radix_hdr_shm *kvp_radix_img_load(struct kvp_radix_w *w, uint32_t tslot)
{
	memcpy(w->priv->img_room, kvp_radix_hdr(w, tslot), KVP_RADIX_HDR_FIXED + 8ULL * w->geo.word_cnt);
	return &w->priv->img;
}

struct kvp_radix_hdr_shm *kvp_radix_img_clear(struct kvp_radix_w *w)
{
	memset(w->priv->img_room, 0, KVP_RADIX_HDR_FIXED + 8ULL * w->geo.word_cnt);
	return &w->priv->img;
}

/* Copies the image under an odd version. May be done twice: a successor repeats it. */
void kvp_radix_commit_finish(struct kvp_radix_w *w)
{
	const struct kvp_radix_hdr_shm *n = &w->priv->img;
	struct kvp_radix_hdr_shm *h = kvp_radix_hdr(w, w->priv->img_at - 1);
	uint32_t ver = h->ver | 1;
	kvp_st_rlx_u32(&h->ver, ver);
	/* Orders the odd version before the fields, and before later stores into whatever the old fields
	 * named: pairs with the acquire fence in radix_read.c. */
	kvp_fence_rel();
	KVP_POINT("radix:commit_odd");
	kvp_st_rlx_u64(&h->last, n->last);
	kvp_st_rlx_u32(&h->len, n->len);
	KVP_POINT("radix:commit_len");
	kvp_st_rlx_u32(&h->base, n->base);
	kvp_st_rlx_u32(&h->cap, n->cap);
	kvp_st_rlx_u32(&h->cut_ref, n->cut_ref);
	KVP_POINT("radix:commit_cut");
	kvp_st_rlx_u32(&h->cut_n, n->cut_n);
	kvp_st_rlx_u32(&h->low_ref, n->low_ref);
	KVP_POINT("radix:commit_low");
	kvp_st_rlx_u32(&h->low_n, n->low_n);
	kvp_st_rlx_u32(&h->rid, n->rid);
	KVP_POINT("radix:commit_half");
	for (uint32_t i = 0; i < w->geo.word_cnt; i++)
		if (h->bits[i] != n->bits[i])
			kvp_st_rlx_u64(&h->bits[i], n->bits[i]);
	if (h->key != n->key)
		kvp_st_rel_u64(&h->key, n->key); /* pairs with: radix_read.c probe */
	KVP_POINT("radix:commit_key");
	kvp_st_rel_u32(&h->ver, ver + 1); /* pairs with: radix_read.c visit_run */
	kvp_st_rel_u32(&w->priv->img_at, 0);
}

void kvp_radix_commit(struct kvp_radix_w *w, uint32_t tslot)
{
	kvp_st_rel_u32(&w->priv->img_at, tslot + 1);
	KVP_POINT("radix:commit");
	kvp_radix_commit_finish(w);
	kvp_radix_mirror(w, kvp_radix_hdr(w, tslot));
	KVP_POINT("radix:committed");
}

/* ---- runs ---- */

/* A fresh run record; kvp_radix_run_link makes it a child of its parent once it is published. 0 = none
 * left. */
uint32_t kvp_radix_run_get(struct kvp_radix_w *w, uint64_t part_salt, uint64_t part_mix, uint32_t parent_pos)
{
	uint32_t rid = w->rid_free;
	if (rid)
		w->rid_free = w->run[rid].next;
	else if (w->priv->rid_bump < w->geo.run_max)
		rid = ++w->priv->rid_bump;
	else
		return 0;
	struct kvp_radix_run_shm *r = &w->run[rid];
	memset(r, 0, sizeof(*r));
	r->part_salt = part_salt;
	r->part_mix = part_mix;
	r->parent_pos = parent_pos;
	return rid;
}

void kvp_radix_run_put(struct kvp_radix_w *w, uint32_t rid)
{
	w->run[rid].live = 0;
	w->run[rid].next = w->rid_free;
	w->rid_free = rid;
}

uint32_t kvp_radix_parent_of(const struct kvp_radix_w *w, uint32_t rid)
{
	uint32_t p = w->run[rid].parent_pos;
	return p == KVP_RADIX_NOPOS ? 0 : kvp_radix_rid_at(w, p);
}

void kvp_radix_run_link(struct kvp_radix_w *w, uint32_t rid)
{
	struct kvp_radix_run_shm *r = &w->run[rid], *p = &w->run[kvp_radix_parent_of(w, rid)];
	r->live = 1;
	r->prev = 0;
	r->next = p->child;
	if (p->child)
		w->run[p->child].prev = rid;
	p->child = rid;
}

static void run_unlink(struct kvp_radix_w *w, uint32_t rid)
{
	struct kvp_radix_run_shm *r = &w->run[rid];
	if (r->prev)
		w->run[r->prev].next = r->next;
	else
		w->run[kvp_radix_parent_of(w, rid)].child = r->next;
	if (r->next)
		w->run[r->next].prev = r->prev;
}

void kvp_radix_col_use(struct kvp_radix_w *w, uint32_t base, uint32_t cap)
{
	for (uint32_t g = base / KVP_RADIX_COL_GRAN; g <= (base + cap - 1) / KVP_RADIX_COL_GRAN; g++)
		w->col_use[g]++;
}

/* Gives the words of a run back; a granule is free when no run reaches into it (runs made by splits share
 * one). */
void kvp_radix_col_unuse(struct kvp_radix_w *w, uint32_t base, uint32_t cap)
{
	uint32_t g = base / KVP_RADIX_COL_GRAN, end = (base + cap - 1) / KVP_RADIX_COL_GRAN + 1;
	while (g < end) {
		uint32_t from = g;
		while (g < end && --w->col_use[g] == 0)
			g++;
		if (g > from)
			kvp_radix_buddy_put(&w->colb, from, g - from);
		g++; /* the one that ended the stretch is counted down already */
	}
}

/* Takes a header out of the table. A tombstone that nobody probes across becomes an empty place again. */
void kvp_radix_kill(struct kvp_radix_w *w, uint32_t tslot)
{
	struct kvp_radix_hdr_shm *n = kvp_radix_img_load(w, tslot);
	n->key = KVP_RADIX_KEY_DEAD;
	kvp_radix_commit(w, tslot);
	uint64_t dead = w->pub->stat.tombstones + 1, i = tslot;
	if (kvp_radix_hdr(w, (uint32_t)((i + 1) & w->tab_mask))->key == KVP_RADIX_KEY_NONE) {
		while (kvp_radix_hdr(w, (uint32_t)i)->key == KVP_RADIX_KEY_DEAD) {
			kvp_st_rel_u64(&kvp_radix_hdr(w, (uint32_t)i)->key, KVP_RADIX_KEY_NONE);
			dead--;
			i = (i - 1) & w->tab_mask;
		}
	}
	kvp_st_rlx_u64(&w->pub->stat.tombstones, dead);
	kvp_st_rlx_u64(&w->pub->stat.runs, w->pub->stat.runs - 1);
}

/* Who holds all of a run's new length by its cutoff gets the bit. */
static void promote(
	const struct kvp_radix_w *w, const struct kvp_radix_hdr_shm *h, struct kvp_radix_hdr_shm *n)
{
	for (uint32_t i = 0; i < KVP_RADIX_CUT_CNT(h->cut_n); i++) {
		uint32_t e = w->cut[h->cut_ref + i], s = KVP_RADIX_CUT_SLOT(e);
		if (KVP_RADIX_CUT_BLK(e) >= n->len)
			n->bits[s >> 6] |= 1ULL << (s & 63);
	}
}

static void forget_names(struct kvp_radix_w *w, uint32_t rid, uint32_t pos, uint32_t end)
{
	uint64_t mix = w->run[rid].part_mix;
	for (uint32_t p = pos; p < end; p++)
		if (!(w->run_of[p] & KVP_RADIX_NAME_OTHER))
			kvp_radix_name_del(w, w->ext[p], mix, p);
}

/* Frees blocks at the end of a leaf that nobody holds, the run itself when nothing is left, then its
 * parent's. */
void kvp_radix_reap(struct kvp_radix_w *w, uint32_t rid)
{
	while (rid && rid != w->pin_rid && w->run[rid].live && !w->run[rid].child) {
		struct kvp_radix_hdr_shm *h = kvp_radix_hdr_of(w, rid);
		uint32_t end = kvp_radix_held_end(w, rid), len = h->len, base = h->base, cap = h->cap;
		if (end == len)
			return;
		forget_names(w, rid, base + end, base + len);
		kvp_st_rlx_u64(&w->pub->stat.blocks, w->pub->stat.blocks - (len - end));
		if (end) {
			struct kvp_radix_hdr_shm *n = kvp_radix_img_load(w, w->tslot[rid]);
			n->len = end;
			n->last = w->col[base + end - 1];
			promote(w, h, n);
			kvp_radix_commit(w, w->tslot[rid]);
			kvp_add_sw_u64(&w->pub->stat.truncations, 1);
			return;
		}
		uint32_t up = kvp_radix_parent_of(w, rid), ref = h->cut_ref,
			 cls = KVP_RADIX_CUT_CLASS(h->cut_n), low_ref = h->low_ref, low_n = h->low_n;
		kvp_radix_kill(w, w->tslot[rid]);
		kvp_radix_tour_gone(w, rid);
		run_unlink(w, rid);
		kvp_radix_col_unuse(w, base, cap);
		if (cls)
			kvp_radix_buddy_put(&w->cutb, ref / KVP_RADIX_CUT_GRAN, 1u << (cls - 1));
		kvp_radix_low_free(w, low_ref, low_n);
		kvp_radix_run_put(w, rid);
		KVP_POINT("radix:killed");
		rid = up;
	}
}

/* ---- split ---- */

/* Cutoffs of the tail: of those who hold all of the head and part of the tail, visible so far or behind a
 * hole. */
static uint32_t tail_cuts(
	const struct kvp_radix_w *w, uint32_t rid, uint32_t len, uint32_t *out, struct kvp_radix_hdr_shm *n)
{
	const struct kvp_radix_hdr_shm *h = kvp_radix_hdr_of(w, rid);
	uint32_t cnt = 0, at = h->base + len, end = h->base + h->len;
	for (uint32_t i = 0; i < KVP_RADIX_CUT_CNT(h->cut_n); i++) {
		uint32_t e = w->cut[h->cut_ref + i], s = KVP_RADIX_CUT_SLOT(e);
		if (!kvp_radix_has_bit(h, s) && KVP_RADIX_CUT_BLK(e) > len)
			out[cnt++] = KVP_RADIX_CUT(s, KVP_RADIX_CUT_BLK(e) - len);
	}
	for (uint32_t o = w->run[rid].hole; o; o = w->hole[o - 1].next) {
		const struct kvp_radix_hole_shm *x = &w->hole[o - 1];
		uint32_t s = x->slot1 - 1;
		if (x->a > at || x->b <= at)
			continue;
		if (x->b == end)
			n->bits[s >> 6] |= 1ULL << (s & 63);
		else
			out[cnt++] = KVP_RADIX_CUT(s, x->b - at);
	}
	return cnt;
}

/* The tail's list of lower-tier intervals; 0 if there is room for it. */
static int tail_low(struct kvp_radix_w *w, uint32_t rid, uint32_t len, uint32_t *ref, uint32_t *low_n)
{
	const struct kvp_radix_hdr_shm *h = kvp_radix_hdr_of(w, rid);
	uint64_t iv[KVP_RADIX_IV_MAX];
	uint32_t cnt = h->low_n ? kvp_radix_low_tail(w, h, len, iv) : 0;
	*ref = *low_n = 0;
	if (cnt)
		*ref = kvp_radix_low_list(w, iv, cnt, low_n);
	return *ref == KVP_RADIX_NOPOS;
}

static uint32_t class_for(uint32_t cnt)
{
	uint32_t cls = 1;
	while ((KVP_RADIX_CUT_GRAN << (cls - 1)) < cnt)
		cls++;
	return cls;
}

/* Private side of a split: the words of the tail, its children and what is held behind holes move over. */
static void split_private(struct kvp_radix_w *w, uint32_t rid, uint32_t tail, uint32_t at, uint32_t end)
{
	struct kvp_radix_run_shm *r = &w->run[rid], *t = &w->run[tail];
	for (uint32_t p = at; p < end; p++)
		w->run_of[p] = (w->run_of[p] & KVP_RADIX_NAME_OTHER) | tail;
	w->col_use[at / KVP_RADIX_COL_GRAN] += at % KVP_RADIX_COL_GRAN != 0;
	t->child = r->child;
	t->alias = r->alias;
	t->came = r->came;
	r->child = 0;
	kvp_radix_run_link(w, tail);
	uint32_t o = r->hole;
	r->hole = 0;
	while (o) {
		struct kvp_radix_hole_shm *x = &w->hole[o - 1];
		uint32_t next = x->next;
		if (x->a < at && x->b > at)
			x->b = at;
		if (x->a == at)
			kvp_radix_hole_put(w, o); /* visible in the tail now */
		else
			kvp_radix_hole_link(w, o);
		o = next;
	}
}

/* Cuts a run after len blocks. The tail is published first; until the head is shortened nobody finds it,
 * because the head still covers it. FULL: nothing changed. */
int kvp_radix_split(struct kvp_radix_w *w, uint32_t rid, uint32_t len)
{
	uint32_t cuts[KVP_RADIX_SLOT_MAX];
	kvp_radix_table_fit(w);
	struct kvp_radix_hdr_shm *h = kvp_radix_hdr_of(w, rid);
	uint32_t at = h->base + len, end = h->base + h->len, hslot = w->tslot[rid];
	uint32_t tail = kvp_radix_run_get(w, w->run[rid].part_salt, w->run[rid].part_mix, at - 1);
	if (!tail)
		return KVP_ERR_FULL;
	uint32_t low_ref, low_n;
	if (tail_low(w, rid, len, &low_ref, &low_n)) {
		kvp_radix_run_put(w, tail);
		return KVP_ERR_FULL;
	}
	struct kvp_radix_hdr_shm *n = kvp_radix_img_load(w, hslot);
	uint32_t cnt = tail_cuts(w, rid, len, cuts, n), ref = 0, cls = 0;
	if (cnt) {
		cls = class_for(cnt);
		uint32_t g = kvp_radix_buddy_get(&w->cutb, cls - 1);
		if (g == KVP_RADIX_NOPOS) {
			kvp_radix_low_free(w, low_ref, low_n);
			kvp_radix_run_put(w, tail);
			return KVP_ERR_FULL;
		}
		ref = g * KVP_RADIX_CUT_GRAN;
		for (uint32_t i = 0; i < cnt; i++)
			kvp_st_rlx_u32(&w->cut[ref + i], cuts[i]);
	}
	n->key = w->col[at];
	n->len = end - at;
	n->base = at;
	n->cap = h->cap - len;
	n->cut_ref = ref;
	n->cut_n = cls << 16 | cnt;
	n->low_ref = low_ref;
	n->low_n = low_n;
	n->rid = tail;
	uint32_t tslot = kvp_radix_probe_free(w, n->key);
	uint64_t reused = kvp_radix_hdr(w, tslot)->key == KVP_RADIX_KEY_DEAD;
	w->tslot[tail] = tslot;
	w->priv->split_head = hslot;
	w->priv->split_tail = tslot;
	w->priv->split_len = len;
	kvp_st_rel_u32(&w->priv->split_on, KVP_RADIX_SPLIT);
	KVP_POINT("radix:split");
	kvp_radix_commit(w, tslot);
	KVP_POINT("radix:split_tail");
	n = kvp_radix_img_load(w, hslot);
	n->len = n->cap = len;
	n->last = w->col[at - 1];
	promote(w, h, n);
	kvp_radix_commit(w, hslot);
	KVP_POINT("radix:split_head");
	kvp_st_rel_u32(&w->priv->split_on, 0);
	split_private(w, rid, tail, at, end);
	kvp_radix_low_clip(w, rid);
	kvp_radix_tour_cut(w, rid, tail, len);
	kvp_st_rlx_u64(&w->pub->stat.tombstones, w->pub->stat.tombstones - reused);
	kvp_st_rlx_u64(&w->pub->stat.runs, w->pub->stat.runs + 1);
	kvp_radix_count(w, &w->pub->stat.splits, KVP_CTR_RADIX_SPLITS, 1);
	KVP_POINT("radix:split_done");
	return KVP_OK;
}
