#include "shm/radix_priv.h"

#include <stdio.h>
#include <string.h>

struct dump {
	struct kvp_radix_w *w;
	uint32_t slot; /* holder */
	kvp_radix_dump_fn *fn;
	void *ctx;
	uint64_t told; /* blocks reported */
};

/* A name of a held block, the same one during a dump. */
static uint64_t name_at(const struct kvp_radix_w *w, uint32_t slot, uint32_t pos)
{
	uint32_t a = w->slot[slot].alias_cnt ? kvp_radix_alias_next(w, slot, pos, 0) : 0;
	return a ? w->alias[a - 1].ext : w->ext[pos];
}

/* up: the holder that names the parent. */
static int tell(struct dump *d, uint32_t rid, uint32_t up, uint32_t parent_pos, uint32_t n,
	const uint64_t *local, const uint64_t *ext)
{
	struct kvp_radix_dump_event ev = {.slot = d->slot % d->w->geo.slot_max,
		.tier = (enum kvp_radix_tier)(d->slot / d->w->geo.slot_max),
		.n = n,
		.part_salt = d->w->run[rid].part_salt,
		.how = parent_pos == KVP_RADIX_NOPOS ? KVP_RADIX_ROOT : KVP_RADIX_CHILD,
		.local = local,
		.ext = ext};
	if (ev.how == KVP_RADIX_CHILD)
		ev.parent_ext = name_at(d->w, up, parent_pos);
	return d->fn(d->ctx, &ev);
}

/* Blocks a..b-1 of a run, and the further names of each. up: the holder that names the parent of block a. */
static int tell_run(struct dump *d, uint32_t rid, uint32_t up, uint32_t a, uint32_t b)
{
	struct kvp_radix_w *w = d->w;
	uint32_t at = kvp_radix_hdr_of(w, rid)->base + a, n = b - a;
	uint32_t over = a ? at - 1 : w->run[rid].parent_pos;
	uint64_t own[KVP_RADIX_RUN_BLK_MAX] = {0};
	d->told += n;
	if (w->slot[d->slot].alias_cnt == 0 || !w->run[rid].alias)
		return tell(d, rid, up, over, n, w->local + at, w->ext + at);
	for (uint32_t j = 0; j < n; j++)
		own[j] = name_at(w, d->slot, at + j);
	int rc = tell(d, rid, up, over, n, w->local + at, own);
	for (uint32_t j = 0; j < n && !rc; j++) {
		uint32_t x = kvp_radix_alias_next(w, d->slot, at + j, 0);
		while (x && !rc && (x = kvp_radix_alias_next(w, d->slot, at + j, x)) != 0)
			rc = tell(d, rid, j ? d->slot : up, j ? at + j - 1 : over, 1, w->local + at + j,
				&w->alias[x - 1].ext);
	}
	return rc;
}

/* Depth first, no recursion: down while the slot holds the whole run, then to the next sibling, else up. */
static int dump_slot(struct dump *d)
{
	struct kvp_radix_w *w = d->w;
	uint64_t part = w->slot[d->slot].part_salt;
	uint32_t rid = w->slot[d->slot].blocks ? w->run[0].child : 0;
	while (rid) {
		uint32_t down = 0;
		if (w->run[rid].part_salt == part) {
			const struct kvp_radix_hdr_shm *h = kvp_radix_hdr_of(w, rid);
			uint32_t n = kvp_radix_cover_get(w, h, d->slot), len = h->len;
			int rc = n ? tell_run(d, rid, d->slot, 0, n) : 0;
			if (rc)
				return rc;
			down = n == len ? w->run[rid].child : 0;
		}
		while (!down && rid) {
			down = w->run[rid].next;
			rid = kvp_radix_parent_of(w, rid);
		}
		rid = down;
	}
	return KVP_OK;
}

/* ---- lower tiers ---- */

/* One state of the way down: which blocks of the run at hand were reported, on the device and in any tier. */
struct low_dump {
	struct dump d;
	uint32_t level, dev_level; /* runs on the way down; those of them that the device dump went through */
	struct kvp_radix_set dev;  /* blocks of this run that it reported */
};

/* The holder that names the block at pos for a child in holder `own`: one that reported it. */
static uint32_t namer(const struct low_dump *l, uint32_t own, uint32_t pos, int on_device)
{
	const struct kvp_radix_w *w = l->d.w;
	uint32_t slot = own % w->geo.slot_max;
	if (pos == KVP_RADIX_NOPOS || (w->slot[own].blocks && kvp_radix_holds(w, own, pos)))
		return own;
	if (on_device)
		return slot;
	uint32_t x = slot + w->geo.slot_max;
	while (x < w->geo.holder_max && !(w->slot[x].blocks && kvp_radix_holds(w, x, pos)))
		x += w->geo.slot_max;
	return x;
}

/* Reports stretches of blocks in the order of their start, so that a parent comes before its children.
 * Result: *whole = 1 if the last block of the run was reported in some tier. */
static int low_run(struct low_dump *l, uint32_t rid, int *whole)
{
	struct kvp_radix_w *w = l->d.w;
	struct kvp_radix_set held[KVP_RADIX_TIER_CNT], any = l->dev;
	uint32_t len = kvp_radix_hdr_of(w, rid)->len, base = kvp_radix_hdr_of(w, rid)->base;
	uint32_t slot = l->d.slot % w->geo.slot_max, end[KVP_RADIX_TIER_CNT] = {0};
	for (uint32_t t = KVP_RADIX_HOST; t < KVP_RADIX_TIER_CNT; t++) {
		kvp_radix_held_set(w, rid, slot + t * w->geo.slot_max, &held[t]);
		for (int i = 0; i < KVP_RADIX_SET_WORDS; i++)
			any.w[i] |= held[t].w[i];
	}
	uint32_t reach = kvp_radix_set_next(&any, 0, len, 0);
	for (uint32_t a = 0; a < reach; a++) {
		for (uint32_t t = KVP_RADIX_HOST; t < KVP_RADIX_TIER_CNT; t++) {
			if (a < end[t] || !(held[t].w[a >> 6] >> (a & 63) & 1))
				continue;
			end[t] = kvp_radix_set_next(&held[t], a, reach, 0);
			l->d.slot = slot + t * w->geo.slot_max;
			uint32_t over = a ? base + a - 1 : w->run[rid].parent_pos;
			int on_device = a ? l->dev.w[(a - 1) >> 6] >> ((a - 1) & 63) & 1
					  : l->dev_level + 1 >= l->level;
			int rc = tell_run(&l->d, rid, namer(l, l->d.slot, over, on_device), a, end[t]);
			if (rc)
				return rc;
		}
	}
	*whole = reach == len;
	return 0;
}

/* Depth first as dump_slot, along runs that the slot holds as a whole in its tiers taken together. */
static int dump_low(struct low_dump *l)
{
	struct kvp_radix_w *w = l->d.w;
	uint32_t slot = l->d.slot, rid = w->run[0].child;
	uint64_t part = 0;
	for (uint32_t x = slot; x < w->geo.holder_max; x += w->geo.slot_max)
		part = w->slot[x].blocks ? w->slot[x].part_salt : part;
	l->level = rid != 0;
	while (rid) {
		uint32_t down = 0;
		if (w->run[rid].part_salt == part) {
			const struct kvp_radix_hdr_shm *h = kvp_radix_hdr_of(w, rid);
			int whole = 0;
			uint32_t dev = l->dev_level + 1 >= l->level ? kvp_radix_cover_get(w, h, slot) : 0;
			memset(&l->dev, 0, sizeof(l->dev));
			kvp_radix_set_add(&l->dev, 0, dev);
			int rc = low_run(l, rid, &whole);
			if (rc)
				return rc;
			if (dev == h->len)
				l->dev_level = l->level;
			down = whole ? w->run[rid].child : 0;
			l->level += down != 0;
		}
		while (!down && rid) {
			l->dev_level = l->dev_level < l->level ? l->dev_level : l->level - 1;
			down = w->run[rid].next;
			rid = kvp_radix_parent_of(w, rid);
			l->level -= !down;
		}
		rid = down;
	}
	return KVP_OK;
}

/* Everything of one rank; *hid += what was left out. */
static int dump_rank(struct kvp_radix_w *w, uint32_t slot, kvp_radix_dump_fn *fn, void *ctx, uint64_t *hid)
{
	struct dump d = {.w = w, .slot = slot, .fn = fn, .ctx = ctx};
	uint64_t low = 0;
	int rc = dump_slot(&d);
	*hid += w->slot[slot].blocks - d.told;
	for (uint32_t x = slot + w->geo.slot_max; x < w->geo.holder_max; x += w->geo.slot_max)
		low += w->slot[x].blocks;
	if (rc || !low)
		return rc;
	struct low_dump l = {.d = {.w = w, .slot = slot, .fn = fn, .ctx = ctx}};
	rc = dump_low(&l);
	*hid += low - l.d.told;
	return rc;
}

int kvp_radix_w_dump(struct kvp_radix_w *w, uint32_t slot, kvp_radix_dump_fn *fn, void *ctx, uint64_t *hidden)
{
	uint32_t first = slot == KVP_RADIX_SLOT_ALL ? 0 : slot;
	uint32_t end = slot == KVP_RADIX_SLOT_ALL ? w->geo.slot_max : slot + 1;
	uint64_t hid = 0;
	if (end > w->geo.slot_max || !fn)
		return KVP_ERR_INVAL;
	for (uint32_t s = first; s < end; s++) {
		int rc = dump_rank(w, s, fn, ctx, &hid);
		if (rc)
			return rc;
	}
	if (hidden)
		*hidden = hid;
	return KVP_OK;
}

/* ---- check ---- */

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
