#include "shm/radix_priv.h"

#include <stdio.h>

static void fault(uint64_t *n, const char *what, uint64_t where)
{
	if (++*n <= 10)
		fprintf(stderr, "radix.w_check fault=\"%s\" at=%llu\n", what, (unsigned long long)where);
}

static void check_blocks(struct kvp_radix_w *w, uint32_t rid, uint64_t *named, uint64_t *n)
{
	const struct kvp_radix_hdr_shm *h = kvp_radix_hdr_of(w, rid);
	const struct kvp_radix_run_shm *r = &w->run[rid];
	uint64_t k = r->parent_pos == KVP_RADIX_NOPOS ? kvp_radix_seed(w->r.key_salt, r->part_salt)
						      : w->col[r->parent_pos];
	for (uint32_t p = h->base; p < h->base + h->len; p++) {
		k = kvp_radix_step(w->r.key_salt, k, w->local[p]);
		if (k != w->col[p])
			fault(n, "key and local hash differ", p);
		if (kvp_radix_rid_at(w, p) != rid)
			fault(n, "position belongs to another run", p);
		if (w->run_of[p] & KVP_RADIX_NAME_OTHER)
			continue;
		++*named;
		if (kvp_radix_name_get(w, w->ext[p], r->part_mix) != p)
			fault(n, "name does not lead to its block", p);
	}
}

static void check_holes(struct kvp_radix_w *w, uint32_t rid, uint64_t *n)
{
	const struct kvp_radix_hdr_shm *h = kvp_radix_hdr_of(w, rid);
	for (uint32_t o = w->run[rid].hole; o; o = w->hole[o - 1].next) {
		const struct kvp_radix_hole_shm *x = &w->hole[o - 1];
		uint32_t see = x->slot1 ? kvp_radix_cover_get(w, h, x->slot1 - 1) : 0;
		if (!x->slot1 || x->slot1 > w->geo.slot_max || x->a >= x->b || x->a <= h->base + see ||
			x->b > h->base + h->len) {
			fault(n, "hole record out of place", o);
			continue;
		}
		for (uint32_t y = x->next; y; y = w->hole[y - 1].next)
			if (w->hole[y - 1].slot1 == x->slot1 && w->hole[y - 1].a <= x->b &&
				x->a <= w->hole[y - 1].b)
				fault(n, "hole records of one slot touch", o);
	}
}

static void check_links(struct kvp_radix_w *w, uint32_t rid, uint64_t *n)
{
	const struct kvp_radix_run_shm *r = &w->run[rid];
	const struct kvp_radix_hdr_shm *h = kvp_radix_hdr_of(w, rid);
	if (h->key < KVP_RADIX_KEY_MIN || h->rid != rid)
		fault(n, "run record and header differ", rid);
	for (uint32_t c = r->child; c; c = w->run[c].next) {
		if (w->run[c].parent_pos != h->base + h->len - 1)
			fault(n, "child does not hang from the end of its parent", c);
		if (!w->run[c].live)
			fault(n, "dead child", c);
	}
	if (!r->child && kvp_radix_held_end(w, rid) != h->len)
		fault(n, "leaf ends in blocks that nobody holds", rid);
	for (uint32_t g = h->base / KVP_RADIX_COL_GRAN; g <= (h->base + h->cap - 1) / KVP_RADIX_COL_GRAN; g++)
		if (!w->col_use[g] || w->colb.state[g])
			fault(n, "words of a run are free", rid);
}

static void check_aliases(struct kvp_radix_w *w, uint64_t *n)
{
	uint64_t cnt = 0, per_slot = 0;
	for (uint32_t i = 1; i <= w->priv->alias_bump; i++) {
		const struct kvp_radix_alias_shm *a = &w->alias[i - 1];
		if (!a->slot1)
			continue;
		cnt++;
		if (!kvp_radix_holds(w, a->slot1 - 1, a->pos))
			fault(n, "alias of a block that is not held", i);
		if (kvp_radix_alias_find(w, a->slot1 - 1, a->ext, KVP_RADIX_NOPOS) != i)
			fault(n, "alias not found by its hash", i);
	}
	for (uint32_t s = 0; s < w->geo.holder_max; s++)
		per_slot += w->slot[s].alias_cnt;
	if (cnt != per_slot || cnt != w->pub->stat.alias_cnt)
		fault(n, "aliases differ from their count", cnt);
}

/* Blocks by slot, counted anew. */
static void check_slots(struct kvp_radix_w *w, uint64_t *n)
{
	uint64_t sum[KVP_RADIX_TIER_CNT * KVP_RADIX_SLOT_MAX] = {0}, low = 0;
	for (uint32_t rid = 1; rid <= w->priv->rid_bump; rid++) {
		if (!w->run[rid].live)
			continue;
		const struct kvp_radix_hdr_shm *h = kvp_radix_hdr_of(w, rid);
		for (uint32_t i = 0; i < w->geo.word_cnt; i++)
			for (uint64_t x = h->bits[i]; x; x &= x - 1)
				sum[i * 64 + (uint32_t)__builtin_ctzll(x)] += h->len;
		for (uint32_t i = 0; i < KVP_RADIX_CUT_CNT(h->cut_n); i++) {
			uint32_t s = KVP_RADIX_CUT_SLOT(w->cut[h->cut_ref + i]);
			sum[s] += kvp_radix_has_bit(h, s) ? 0 : KVP_RADIX_CUT_BLK(w->cut[h->cut_ref + i]);
		}
		for (uint32_t o = w->run[rid].hole; o; o = w->hole[o - 1].next)
			sum[w->hole[o - 1].slot1 - 1] += w->hole[o - 1].b - w->hole[o - 1].a;
		const uint64_t *iv = kvp_radix_iv(w, h);
		for (uint32_t i = 0; i < KVP_RADIX_CUT_CNT(h->low_n); i++)
			if (KVP_RADIX_IV_B(iv[i]))
				sum[KVP_RADIX_IV_HOLDER(iv[i])] +=
					KVP_RADIX_IV_B(iv[i]) - KVP_RADIX_IV_A(iv[i]);
	}
	for (uint32_t s = w->geo.slot_max; s < w->geo.holder_max; s++)
		low += sum[s];
	if (low != w->pub->stat.low_blocks || w->pub->low != (low != 0))
		fault(n, "lower-tier blocks differ from their count", low);
	for (uint32_t s = 0; s < w->geo.holder_max; s++)
		if (sum[s] != w->slot[s].blocks)
			fault(n, "blocks of a slot differ from their count", s);
}

uint64_t kvp_radix_w_check(struct kvp_radix_w *w)
{
	uint64_t n = 0, runs = 0, named = 0;
	if (w->priv->img_at || w->priv->split_on || w->priv->op.op || w->pin_rid)
		fault(&n, "something is under way at rest", 0);
	for (uint32_t rid = 1; rid <= w->priv->rid_bump; rid++) {
		if (!w->run[rid].live)
			continue;
		runs++;
		check_links(w, rid, &n);
		check_blocks(w, rid, &named, &n);
		check_holes(w, rid, &n);
	}
	if (runs != w->pub->stat.runs)
		fault(&n, "runs differ from their count", runs);
	if (named != w->name_cnt)
		fault(&n, "names differ from their count", named);
	if (kvp_radix_table_check(w))
		fault(&n, "table being filled differs from the current one", w->next.at);
	check_aliases(w, &n);
	check_slots(w, &n);
	return n;
}
