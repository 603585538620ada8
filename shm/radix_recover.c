#include "shm/radix_priv.h"

#include <string.h>

/* What a killed writer can have left, in this order: a half-copied header (img), a published tail whose
 * head is not shortened yet (split), arrays that no header names, aliases and holes that say more or less
 * than the coverage, an operation that is not finished (op). Everything else is computed anew. */

static uint32_t tab_cnt(const struct kvp_radix_w *w)
{
	return w->tab_mask + 1;
}

/* The head was lengthened: what hung from the tail hangs from the head's new end, and the tail goes. The
 * tail's header keeps its fields when it is dead. */
static void finish_merge(struct kvp_radix_w *w, struct kvp_radix_report *rep)
{
	struct kvp_radix_priv_shm *p = w->priv;
	if (p->split_head >= tab_cnt(w) || p->split_tail >= tab_cnt(w))
		return;
	if (kvp_radix_hdr(w, p->split_head)->len == p->split_len)
		return;
	for (uint32_t rid = 1; rid <= p->rid_bump; rid++)
		if (w->run[rid].parent_pos == p->merge_from)
			w->run[rid].parent_pos = p->merge_to;
	if (kvp_radix_hdr(w, p->split_tail)->key >= KVP_RADIX_KEY_MIN)
		kvp_radix_kill(w, p->split_tail);
	rep->merges_finished++;
}

static void finish_structure(struct kvp_radix_w *w, struct kvp_radix_report *rep)
{
	struct kvp_radix_priv_shm *p = w->priv;
	if (p->img_at && p->img_at <= tab_cnt(w)) {
		kvp_radix_commit_finish(w);
		rep->headers_redone++;
	}
	p->img_at = 0;
	if (p->split_on == KVP_RADIX_MERGE) {
		finish_merge(w, rep);
	} else if (p->split_on && p->split_head < tab_cnt(w) && p->split_tail < tab_cnt(w)) {
		const struct kvp_radix_hdr_shm *h = kvp_radix_hdr(w, p->split_head);
		const struct kvp_radix_hdr_shm *t = kvp_radix_hdr(w, p->split_tail);
		if (h->len != p->split_len && t->key >= KVP_RADIX_KEY_MIN &&
			t->base == h->base + p->split_len) {
			kvp_radix_kill(w, p->split_tail);
			rep->splits_undone++;
		}
	}
	p->split_on = 0;
}

static int sound_low(const struct kvp_radix_w *w, const struct kvp_radix_hdr_shm *h)
{
	uint32_t cnt = KVP_RADIX_CUT_CNT(h->low_n), cls = KVP_RADIX_CUT_CLASS(h->low_n);
	if (cls == 0)
		return cnt == 0;
	return cls <= KVP_RADIX_IV_CLASS_MAX && cnt <= 1u << cls && h->low_ref % KVP_RADIX_CUT_GRAN == 0 &&
	       h->low_ref / KVP_RADIX_CUT_GRAN + (1ULL << (cls - 1)) <= w->pub->cut_bump;
}

static int sound(const struct kvp_radix_w *w, const struct kvp_radix_hdr_shm *h)
{
	uint32_t cnt = KVP_RADIX_CUT_CNT(h->cut_n), cls = KVP_RADIX_CUT_CLASS(h->cut_n);
	if (h->ver & 1 || h->len == 0 || h->len > KVP_RADIX_RUN_BLK_MAX || h->cap < h->len ||
		h->cap > KVP_RADIX_RUN_BLK_MAX || h->rid == 0 || h->rid > w->priv->rid_bump ||
		w->run[h->rid].live ||
		((uint64_t)h->base + h->cap - 1) / KVP_RADIX_COL_GRAN >= w->pub->col_bump)
		return 0;
	if (w->col[h->base] != h->key || w->col[h->base + h->len - 1] != h->last)
		return 0;
	if (!sound_low(w, h))
		return 0;
	if (cls == 0)
		return cnt == 0;
	uint64_t gran = 1ULL << (cls - 1);
	return cls <= KVP_RADIX_ORDER_MAX && cnt <= gran * KVP_RADIX_CUT_GRAN &&
	       h->cut_ref % KVP_RADIX_CUT_GRAN == 0 &&
	       h->cut_ref / KVP_RADIX_CUT_GRAN + gran <= w->pub->cut_bump;
}

static void take_run(struct kvp_radix_w *w, uint32_t tslot)
{
	const struct kvp_radix_hdr_shm *h = kvp_radix_hdr(w, tslot);
	struct kvp_radix_run_shm *r = &w->run[h->rid];
	w->tslot[h->rid] = tslot;
	r->live = 1;
	for (uint32_t p = h->base; p < h->base + h->len; p++)
		w->run_of[p] = (w->run_of[p] & KVP_RADIX_NAME_OTHER) | h->rid;
	kvp_add_sw_u64(&w->pub->stat.runs, 1);
	kvp_add_sw_u64(&w->pub->stat.blocks, h->len);
}

static void drop_header(struct kvp_radix_w *w, uint32_t tslot, struct kvp_radix_report *rep)
{
	kvp_add_sw_u64(&w->pub->stat.runs, 1); /* kill counts it down */
	if (kvp_radix_hdr(w, tslot)->ver & 1)
		kvp_st_rlx_u32(&kvp_radix_hdr(w, tslot)->ver, kvp_radix_hdr(w, tslot)->ver + 1);
	kvp_radix_kill(w, tslot);
	rep->runs_dropped++;
}

static void scan_table(struct kvp_radix_w *w, struct kvp_radix_report *rep)
{
	struct kvp_radix_stats *st = &w->pub->stat;
	for (uint32_t i = 0; i <= w->priv->rid_bump; i++) {
		struct kvp_radix_run_shm *r = &w->run[i];
		r->live = r->child = r->next = r->prev = r->hole = r->alias = r->came = 0;
	}
	uint64_t dead = 0;
	for (uint32_t i = 0; i < tab_cnt(w); i++)
		dead += kvp_radix_hdr(w, i)->key == KVP_RADIX_KEY_DEAD;
	kvp_st_rlx_u64(&st->runs, 0); /* readers of the figures go on during a recovery */
	kvp_st_rlx_u64(&st->blocks, 0);
	kvp_st_rlx_u64(&st->tombstones, dead);
	for (uint32_t i = 0; i < tab_cnt(w); i++) {
		const struct kvp_radix_hdr_shm *h = kvp_radix_hdr(w, i);
		if (h->key < KVP_RADIX_KEY_MIN)
			continue;
		if (sound(w, h))
			take_run(w, i);
		else
			drop_header(w, i, rep);
	}
}

/* 1 if the run hangs from the last block of a live run, by the keys as well. */
static int rooted(const struct kvp_radix_w *w, uint32_t rid)
{
	const struct kvp_radix_run_shm *r = &w->run[rid];
	const struct kvp_radix_hdr_shm *h = kvp_radix_hdr_of(w, rid);
	uint64_t k = kvp_radix_seed(w->r.key_salt, r->part_salt);
	if (r->parent_pos != KVP_RADIX_NOPOS) {
		if (r->parent_pos >= w->geo.col_max)
			return 0;
		uint32_t up = kvp_radix_rid_at(w, r->parent_pos);
		if (up == 0 || up > w->priv->rid_bump || !w->run[up].live)
			return 0;
		const struct kvp_radix_hdr_shm *u = kvp_radix_hdr_of(w, up);
		if (r->parent_pos != u->base + u->len - 1)
			return 0;
		k = w->col[r->parent_pos];
	}
	return kvp_radix_step(w->r.key_salt, k, w->local[h->base]) == h->key;
}

static void drop_rootless(struct kvp_radix_w *w, struct kvp_radix_report *rep)
{
	for (int again = 1; again;) {
		again = 0;
		for (uint32_t rid = 1; rid <= w->priv->rid_bump; rid++) {
			if (!w->run[rid].live || rooted(w, rid))
				continue;
			kvp_add_sw_u64(&w->pub->stat.blocks, 0 - (uint64_t)kvp_radix_hdr_of(w, rid)->len);
			kvp_add_sw_u64(&w->pub->stat.runs, 0 - 1ULL);
			w->run[rid].live = 0;
			drop_header(w, w->tslot[rid], rep);
			again = 1;
		}
	}
}

static void link_runs(struct kvp_radix_w *w)
{
	w->rid_free = 0;
	for (uint32_t rid = w->priv->rid_bump; rid >= 1; rid--) {
		if (!w->run[rid].live) {
			kvp_radix_run_put(w, rid);
			continue;
		}
		const struct kvp_radix_hdr_shm *h = kvp_radix_hdr_of(w, rid);
		kvp_radix_run_link(w, rid);
		kvp_radix_col_use(w, h->base, h->cap);
	}
}

static void free_gaps(struct kvp_radix_buddy *b, const uint8_t *use)
{
	for (uint32_t g = 0, from; g < *b->bump; g++) {
		for (from = g; g < *b->bump && !use[g]; g++)
			;
		if (g > from)
			kvp_radix_buddy_put(b, from, g - from);
	}
}

static int rebuild_arenas(struct kvp_radix_w *w)
{
	uint32_t cut_gran = w->geo.cut_max / KVP_RADIX_CUT_GRAN;
	uint8_t *use = kvp_radix_mem_get(cut_gran);
	if (!use)
		return KVP_ERR_SYS;
	for (uint32_t rid = 1; rid <= w->priv->rid_bump; rid++) {
		if (!w->run[rid].live)
			continue;
		const struct kvp_radix_hdr_shm *h = kvp_radix_hdr_of(w, rid);
		uint32_t cls = KVP_RADIX_CUT_CLASS(h->cut_n);
		if (cls)
			memset(use + h->cut_ref / KVP_RADIX_CUT_GRAN, 1, 1u << (cls - 1));
		cls = KVP_RADIX_CUT_CLASS(h->low_n);
		if (cls)
			memset(use + h->low_ref / KVP_RADIX_CUT_GRAN, 1, 1u << (cls - 1));
	}
	free_gaps(&w->cutb, use);
	free_gaps(&w->colb, w->col_use);
	kvp_radix_mem_put(use, cut_gran);
	return KVP_OK;
}

/* Live run that holds column position pos; 0 if none. */
static uint32_t run_at(const struct kvp_radix_w *w, uint32_t pos)
{
	if (pos >= w->geo.col_max)
		return 0;
	uint32_t rid = kvp_radix_rid_at(w, pos);
	if (rid == 0 || rid > w->priv->rid_bump || !w->run[rid].live)
		return 0;
	const struct kvp_radix_hdr_shm *h = kvp_radix_hdr_of(w, rid);
	return pos >= h->base && pos < h->base + h->len ? rid : 0;
}

/* Links a record into its run; what reaches into a tail that was split off gets a record of its own. */
static void adopt_hole(struct kvp_radix_w *w, uint32_t hole1, struct kvp_radix_report *rep)
{
	struct kvp_radix_hole_shm *x = &w->hole[hole1 - 1];
	uint32_t rid = x->slot1 <= w->geo.slot_max && x->a < x->b ? run_at(w, x->a) : 0;
	if (!rid) {
		kvp_radix_hole_put(w, hole1);
		rep->names_dropped++;
		return;
	}
	const struct kvp_radix_hdr_shm *h = kvp_radix_hdr_of(w, rid);
	uint32_t end = h->base + h->len, rest = x->b;
	if (rest > end) {
		uint32_t o = run_at(w, end) ? kvp_radix_hole_get(w, x->slot1 - 1, end, rest) : 0;
		kvp_st_rlx_u32(&x->b, end);
		if (o)
			adopt_hole(w, o, rep);
	}
	kvp_radix_hole_link(w, hole1);
}

static void rebuild_holes(struct kvp_radix_w *w, struct kvp_radix_report *rep)
{
	uint32_t cnt = w->priv->hole_bump;
	w->hole_free = 0;
	kvp_st_rlx_u64(&w->pub->stat.hole_cnt, 0);
	for (uint32_t i = cnt; i >= 1; i--) {
		if (w->hole[i - 1].slot1) {
			kvp_add_sw_u64(&w->pub->stat.hole_cnt, 1);
			continue;
		}
		w->hole[i - 1].next = w->hole_free;
		w->hole_free = i;
	}
	/* Records that adopt_hole makes are linked by it: remember which were there before. */
	for (uint32_t i = 0; i < cnt; i++)
		w->hole[i].next = w->hole[i].slot1 ? UINT32_MAX : w->hole[i].next;
	for (uint32_t i = 1; i <= cnt; i++)
		if (w->hole[i - 1].slot1 && w->hole[i - 1].next == UINT32_MAX)
			adopt_hole(w, i, rep);
	for (uint32_t rid = 1; rid <= w->priv->rid_bump; rid++) {
		uint64_t seen[KVP_RADIX_WORD_MAX] = {0};
		if (!w->run[rid].live || !w->run[rid].hole)
			continue;
		for (uint32_t o = w->run[rid].hole; o; o = w->hole[o - 1].next)
			seen[(w->hole[o - 1].slot1 - 1) >> 6] |= 1ULL << ((w->hole[o - 1].slot1 - 1) & 63);
		for (uint32_t s = 0; s < w->geo.slot_max; s++)
			if (seen[s >> 6] >> (s & 63) & 1)
				kvp_radix_tidy(w, rid, s);
	}
}

static void rebuild_aliases(struct kvp_radix_w *w, struct kvp_radix_report *rep)
{
	w->alias_free = 0;
	kvp_st_rlx_u64(&w->pub->stat.alias_cnt, 0);
	for (uint32_t s = 0; s < w->geo.holder_max; s++)
		w->slot[s].alias_cnt = 0;
	for (uint32_t i = w->priv->alias_bump; i >= 1; i--) {
		struct kvp_radix_alias_shm *a = &w->alias[i - 1];
		if (a->slot1 && a->slot1 <= w->geo.holder_max && run_at(w, a->pos) &&
			kvp_radix_holds(w, a->slot1 - 1, a->pos)) {
			kvp_radix_alias_link(w, i);
			continue;
		}
		rep->names_dropped += a->slot1 != 0;
		kvp_st_rel_u32(&a->slot1, 0);
		a->next_ext = w->alias_free;
		w->alias_free = i;
	}
}

static int rebuild_names(struct kvp_radix_w *w)
{
	w->name_cnt = 0;
	for (uint32_t rid = 1; rid <= w->priv->rid_bump; rid++) {
		if (!w->run[rid].live)
			continue;
		const struct kvp_radix_hdr_shm *h = kvp_radix_hdr_of(w, rid);
		uint64_t mix = w->run[rid].part_mix;
		for (uint32_t p = h->base; p < h->base + h->len; p++) {
			if (p + 16 < h->base + h->len)
				kvp_radix_name_prefetch(w, kvp_radix_name_hash(w, w->ext[p + 16], mix));
			if (!(w->run_of[p] & KVP_RADIX_NAME_OTHER) &&
				kvp_radix_name_put(w, w->ext[p], mix, p))
				return KVP_ERR_SYS;
		}
	}
	return KVP_OK;
}

static void count_slots(struct kvp_radix_w *w)
{
	uint64_t low = 0;
	for (uint32_t s = 0; s < w->geo.holder_max; s++)
		w->slot[s].blocks = 0;
	for (uint32_t rid = 1; rid <= w->priv->rid_bump; rid++) {
		if (!w->run[rid].live)
			continue;
		const struct kvp_radix_hdr_shm *h = kvp_radix_hdr_of(w, rid);
		for (uint32_t i = 0; i < w->geo.word_cnt; i++)
			for (uint64_t x = h->bits[i]; x; x &= x - 1)
				w->slot[i * 64 + (uint32_t)__builtin_ctzll(x)].blocks += h->len;
		for (uint32_t i = 0; i < KVP_RADIX_CUT_CNT(h->cut_n); i++) {
			uint32_t e = w->cut[h->cut_ref + i], s = KVP_RADIX_CUT_SLOT(e);
			if (s < w->geo.slot_max && !kvp_radix_has_bit(h, s))
				w->slot[s].blocks += KVP_RADIX_CUT_BLK(e);
		}
		for (uint32_t o = w->run[rid].hole; o; o = w->hole[o - 1].next)
			w->slot[w->hole[o - 1].slot1 - 1].blocks += w->hole[o - 1].b - w->hole[o - 1].a;
		const uint64_t *iv = kvp_radix_iv(w, h);
		for (uint32_t i = 0; i < KVP_RADIX_CUT_CNT(h->low_n); i++) {
			uint32_t blk = KVP_RADIX_IV_B(iv[i]) - KVP_RADIX_IV_A(iv[i]);
			if (KVP_RADIX_IV_B(iv[i]) == 0)
				continue;
			w->slot[KVP_RADIX_IV_HOLDER(iv[i])].blocks += blk;
			low += blk;
		}
	}
	kvp_radix_low_note(w, low);
}

int kvp_radix_recover(struct kvp_radix_w *w, struct kvp_radix_report *rep)
{
	kvp_radix_use_table(w, w->pub->table);
	for (uint32_t log2 = w->geo.log2_min; log2 <= w->geo.log2_max; log2++)
		for (uint32_t side = 0; side < 2; side++)
			if (log2 != w->tab_log2 || side != KVP_RADIX_DESC_SIDE(w->pub->table))
				kvp_radix_area_clear(w, log2, side);
	finish_structure(w, rep);
	scan_table(w, rep);
	drop_rootless(w, rep);
	link_runs(w);
	int rc = rebuild_arenas(w);
	if (rc)
		return rc;
	for (uint32_t rid = 1; rid <= w->priv->rid_bump; rid++)
		if (w->run[rid].live && kvp_radix_hdr_of(w, rid)->low_n)
			kvp_radix_low_tidy(w, rid);
	rebuild_holes(w, rep);
	rebuild_aliases(w, rep);
	rc = rebuild_names(w);
	if (rc)
		return rc;
	count_slots(w);
	for (uint32_t rid = 1; rid <= w->priv->rid_bump; rid++)
		kvp_radix_reap(w, rid);
	if (w->priv->op.op) {
		kvp_radix_redo(w);
		rep->ops_repeated++;
	}
	rep->runs = w->pub->stat.runs;
	rep->blocks = w->pub->stat.blocks;
	return KVP_OK;
}
