/* All held blocks in one pass, children before parents. */
#include "shm/radix_priv.h"

struct each {
	struct kvp_radix_w *w;
	kvp_radix_each_fn *fn;
	void *ctx;
};

/* Blocks at positions a..b-1; where some have aliases each name comes alone. */
static void tell(const struct each *e, uint32_t slot, uint32_t rid, uint32_t a, uint32_t b)
{
	struct kvp_radix_w *w = e->w;
	if (a >= b)
		return;
	if (!w->slot[slot].alias_cnt || !w->run[rid].alias) {
		e->fn(e->ctx, slot, b - a, w->ext + a);
		return;
	}
	for (uint32_t pos = b; pos-- > a;) {
		uint32_t x = kvp_radix_alias_next(w, slot, pos, 0);
		if (!x)
			e->fn(e->ctx, slot, 1, w->ext + pos);
		for (; x; x = kvp_radix_alias_next(w, slot, pos, x))
			e->fn(e->ctx, slot, 1, &w->alias[x - 1].ext);
	}
}

/* Stretches behind a gap lie behind what is visible: they come first. */
static void tell_run(const struct each *e, uint32_t rid)
{
	struct kvp_radix_w *w = e->w;
	const struct kvp_radix_hdr_shm *h = kvp_radix_hdr_of(w, rid);
	for (uint32_t o = w->run[rid].hole; o; o = w->hole[o - 1].next)
		tell(e, w->hole[o - 1].slot1 - 1, rid, w->hole[o - 1].a, w->hole[o - 1].b);
	for (uint32_t i = 0; i < KVP_RADIX_CUT_CNT(h->cut_n); i++) {
		uint32_t slot = KVP_RADIX_CUT_SLOT(w->cut[h->cut_ref + i]);
		if (!kvp_radix_has_bit(h, slot))
			tell(e, slot, rid, h->base, h->base + KVP_RADIX_CUT_BLK(w->cut[h->cut_ref + i]));
	}
	for (uint32_t i = 0; i < w->geo.word_cnt; i++)
		for (uint64_t x = h->bits[i]; x; x &= x - 1)
			tell(e, i * 64 + (uint32_t)__builtin_ctzll(x), rid, h->base, h->base + h->len);
}

static uint32_t deepest(const struct kvp_radix_w *w, uint32_t rid)
{
	while (rid && w->run[rid].child)
		rid = w->run[rid].child;
	return rid;
}

void kvp_radix_w_each(struct kvp_radix_w *w, kvp_radix_each_fn *fn, void *ctx)
{
	struct each e = {.w = w, .fn = fn, .ctx = ctx};
	uint32_t rid = deepest(w, w->run[0].child);
	while (rid) {
		tell_run(&e, rid);
		uint32_t next = w->run[rid].next;
		rid = next ? deepest(w, next) : kvp_radix_parent_of(w, rid);
	}
}
