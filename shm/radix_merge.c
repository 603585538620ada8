#include "shm/radix_priv.h"

#include <kvpick/point.h>
#include <string.h>

/* A run that is the only child of its parent and held by the same ranks is made part of it. The reverse of a
 * split: first the head is lengthened, from then on nobody finds the tail, then the tail is taken out. If the
 * tail's words do not follow those of the head already, both are brought together in the room behind the head
 * or in a new array; what hangs from the tail then hangs from another position. */

#define CHILD_MAX 64 /* children of the tail that are given a new position in one step */

/* Nothing behind holes, no cutoff that still says something, nothing in lower tiers. */
static int plain(const struct kvp_radix_w *w, uint32_t rid, const struct kvp_radix_hdr_shm *h)
{
	if (w->run[rid].hole || h->low_n)
		return 0;
	for (uint32_t i = 0; i < KVP_RADIX_CUT_CNT(h->cut_n); i++) {
		uint32_t e = w->cut[h->cut_ref + i];
		if (KVP_RADIX_CUT_BLK(e) && !kvp_radix_has_bit(h, KVP_RADIX_CUT_SLOT(e)))
			return 0;
	}
	return 1;
}

static int same_ranks(
	const struct kvp_radix_w *w, const struct kvp_radix_hdr_shm *a, const struct kvp_radix_hdr_shm *b)
{
	uint64_t any = 0, diff = 0;
	for (uint32_t i = 0; i < w->geo.word_cnt; i++) {
		any |= a->bits[i];
		diff |= a->bits[i] ^ b->bits[i];
	}
	return any && !diff;
}

static int few_children(const struct kvp_radix_w *w, uint32_t rid)
{
	uint32_t n = 0;
	for (uint32_t c = w->run[rid].child; c; c = w->run[c].next)
		if (++n > CHILD_MAX)
			return 0;
	return 1;
}

/* How the words come together. */
struct join {
	uint32_t head, tail; /* runs */
	uint32_t hlen, tlen;
	uint32_t from_head, from_tail; /* words now */
	uint32_t base, cap;	       /* words of the whole */
};

static int in_place(const struct kvp_radix_hdr_shm *h, const struct kvp_radix_hdr_shm *t)
{
	return h->base + h->cap == t->base && h->cap == h->len && h->cap + t->cap <= KVP_RADIX_RUN_BLK_MAX;
}

/* Finds the place for both; 0 = not now. */
static int plan(struct kvp_radix_w *w, struct join *j)
{
	const struct kvp_radix_hdr_shm *h = kvp_radix_hdr_of(w, j->head), *t = kvp_radix_hdr_of(w, j->tail);
	j->hlen = h->len;
	j->tlen = t->len;
	j->from_head = j->base = h->base;
	j->from_tail = t->base;
	if (in_place(h, t)) {
		j->cap = h->cap + t->cap;
		return 1;
	}
	if (w->run[j->tail].alias || !few_children(w, j->tail))
		return 0;
	j->cap = h->cap;
	if (h->cap - h->len >= t->len)
		return 1;
	if (w->run[j->head].alias)
		return 0;
	uint32_t want = 2 * (j->hlen + j->tlen);
	want = want < 2 * KVP_RADIX_COL_GRAN ? 2 * KVP_RADIX_COL_GRAN : want;
	want = want > KVP_RADIX_RUN_BLK_MAX ? KVP_RADIX_RUN_BLK_MAX : want;
	uint32_t order = 32 - (uint32_t)__builtin_clz((want - 1) / KVP_RADIX_COL_GRAN);
	uint32_t g = kvp_radix_buddy_get(&w->colb, order);
	if (g == KVP_RADIX_NOPOS)
		return 0;
	j->base = g * KVP_RADIX_COL_GRAN;
	j->cap = KVP_RADIX_COL_GRAN << order;
	kvp_radix_col_use(w, j->base, j->cap);
	return 1;
}

/* Copies n blocks to words that no header names. */
static void copy(struct kvp_radix_w *w, uint32_t to, uint32_t from, uint32_t n, uint32_t rid)
{
	if (to == from)
		return;
	for (uint32_t i = 0; i < n; i++)
		kvp_st_rlx_u64(&w->col[to + i], w->col[from + i]);
	memcpy(&w->local[to], &w->local[from], 8ULL * n);
	memcpy(&w->ext[to], &w->ext[from], 8ULL * n);
	for (uint32_t i = 0; i < n; i++)
		w->run_of[to + i] = (w->run_of[from + i] & KVP_RADIX_NAME_OTHER) | rid;
}

static void move_names(struct kvp_radix_w *w, uint32_t to, uint32_t from, uint32_t n, uint64_t mix)
{
	for (uint32_t i = 0; i < n && to != from; i++)
		if (!(w->run_of[from + i] & KVP_RADIX_NAME_OTHER))
			kvp_radix_name_move(w, w->ext[from + i], mix, from + i, to + i);
}

/* Process-local side: the tail's blocks, children and words belong to the head. */
static void adopt(struct kvp_radix_w *w, const struct join *j, uint32_t head_cap, uint32_t tail_cap)
{
	struct kvp_radix_run_shm *h = &w->run[j->head], *t = &w->run[j->tail];
	uint32_t at = j->base + j->hlen;
	move_names(w, j->base, j->from_head, j->hlen, h->part_mix);
	move_names(w, at, j->from_tail, j->tlen, h->part_mix);
	if (at == j->from_tail) {
		for (uint32_t p = at; p < at + j->tlen; p++)
			w->run_of[p] = (w->run_of[p] & KVP_RADIX_NAME_OTHER) | j->head;
		w->col_use[at / KVP_RADIX_COL_GRAN] -= at % KVP_RADIX_COL_GRAN != 0;
		h->alias |= t->alias;
	} else {
		kvp_radix_col_unuse(w, j->from_tail, tail_cap);
	}
	if (j->base != j->from_head)
		kvp_radix_col_unuse(w, j->from_head, head_cap);
	h->child = t->child; /* the tail was the only one */
	h->came = h->came > t->came ? h->came : t->came;
	kvp_radix_tour_merged(w, j->head, j->tail, j->hlen);
	kvp_radix_run_put(w, j->tail);
}

static void join(struct kvp_radix_w *w, const struct join *j)
{
	struct kvp_radix_priv_shm *p = w->priv;
	const struct kvp_radix_hdr_shm *t = kvp_radix_hdr_of(w, j->tail);
	uint32_t head_cap = kvp_radix_hdr_of(w, j->head)->cap, tail_cap = t->cap;
	uint32_t ref = t->cut_ref, cls = KVP_RADIX_CUT_CLASS(t->cut_n), end = j->base + j->hlen + j->tlen;
	copy(w, j->base, j->from_head, j->hlen, j->head);
	copy(w, j->base + j->hlen, j->from_tail, j->tlen, j->head);
	p->split_head = w->tslot[j->head];
	p->split_tail = w->tslot[j->tail];
	p->split_len = j->hlen;
	p->merge_from = j->from_tail + j->tlen - 1;
	p->merge_to = end - 1;
	kvp_st_rel_u32(&p->split_on, KVP_RADIX_MERGE);
	KVP_POINT("radix:merge");
	struct kvp_radix_hdr_shm *n = kvp_radix_img_load(w, w->tslot[j->head]);
	n->len = j->hlen + j->tlen;
	n->last = t->last;
	n->base = j->base;
	n->cap = j->cap;
	kvp_radix_commit(w, w->tslot[j->head]);
	KVP_POINT("radix:merge_head");
	for (uint32_t c = w->run[j->tail].child; c; c = w->run[c].next)
		w->run[c].parent_pos = p->merge_to;
	KVP_POINT("radix:merge_children");
	kvp_radix_kill(w, w->tslot[j->tail]);
	KVP_POINT("radix:merge_tail");
	kvp_st_rel_u32(&p->split_on, 0);
	adopt(w, j, head_cap, tail_cap);
	if (cls)
		kvp_radix_buddy_put(&w->cutb, ref / KVP_RADIX_CUT_GRAN, 1u << (cls - 1));
	kvp_radix_count(w, &w->pub->stat.merges, KVP_CTR_RADIX_MERGES, 1);
	KVP_POINT("radix:merged");
}

/* Puts a run into its parent if that is possible: 1 = done. */
static int merge(struct kvp_radix_w *w, uint32_t rid)
{
	struct join j = {.tail = rid, .head = kvp_radix_parent_of(w, rid)};
	if (!j.head || w->run[j.head].child != rid || w->run[rid].next)
		return 0;
	const struct kvp_radix_hdr_shm *h = kvp_radix_hdr_of(w, j.head), *t = kvp_radix_hdr_of(w, rid);
	if (h->len + t->len > KVP_RADIX_RUN_BLK_MAX || w->run[j.head].hole || h->low_n ||
		!same_ranks(w, h, t) || !plain(w, rid, t) || !plan(w, &j))
		return 0;
	join(w, &j);
	return 1;
}

/* A pass looks at every run once. The next one begins when something has changed since this one began. */
uint32_t kvp_radix_merge_some(struct kvp_radix_w *w, uint32_t budget)
{
	const struct kvp_radix_stats *st = &w->pub->stat;
	uint64_t now = st->stored + st->removed + st->cleared;
	if (!w->merge_at) {
		if (w->merge_seen == now)
			return 0;
		w->merge_seen = now;
		w->merge_at = 1;
	}
	uint32_t left = budget;
	while (left && w->merge_at <= w->priv->rid_bump) {
		uint32_t rid = w->merge_at++;
		left--;
		if (w->run[rid].live && merge(w, rid))
			left -= left < 8 ? left : 8; /* a merge costs as much as a few looks */
	}
	if (w->merge_at > w->priv->rid_bump)
		w->merge_at = 0;
	return budget - left;
}

uint32_t kvp_radix_w_tend(struct kvp_radix_w *w, uint32_t budget)
{
	uint32_t did = kvp_radix_table_tend(w, budget);
	did = did ? did : kvp_radix_merge_some(w, budget);
	did = did ? did : kvp_radix_give_back(w, budget);
	if (did)
		kvp_radix_gauges(w);
	return did;
}
