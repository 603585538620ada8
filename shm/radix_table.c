#include "shm/radix_priv.h"

#include <kvpick/point.h>
#include <string.h>
#include <sys/mman.h>

/* The table of headers changes its size while it is used, without a stop. The writer fills a second one from
 * the first, some slots with each new header and more in idle turns; every change of a header that was copied
 * already is repeated in the copy (kvp_radix_mirror). Nobody reads the copy until one store of the descriptor
 * makes it the table. The old one is given back piece by piece. A writer that is killed meanwhile leaves an
 * area that its successor clears. */

#define SLOTS_PER_HEADER 16u /* copied with each new header: done long before the table is too full */
/* of the old table, with each GIVE_EVERY-th new header: gone before the next one */
#define GIVE_BYTES (64u << 10)
#define GIVE_EVERY 64u

void kvp_radix_use_table(struct kvp_radix_w *w, uint64_t desc)
{
	w->tab_log2 = KVP_RADIX_DESC_LOG2(desc);
	w->tab_mask = (uint32_t)((1ULL << w->tab_log2) - 1);
	w->tab = (char *)w->pub + kvp_radix_area(&w->r, w->tab_log2, KVP_RADIX_DESC_SIDE(desc));
	w->pub->area_used[KVP_RADIX_DESC_SIDE(desc)] |= 1ULL << w->tab_log2;
	kvp_st_rlx_u64(&w->pub->stat.table_slots, 1ULL << w->tab_log2);
}

uint32_t kvp_radix_probe(const struct kvp_radix_w *w, uint64_t key)
{
	for (uint64_t i = key & w->tab_mask;; i = (i + 1) & w->tab_mask) {
		const struct kvp_radix_hdr_shm *h = kvp_radix_hdr(w, (uint32_t)i);
		if (h->key == key)
			return h->rid;
		if (h->key == KVP_RADIX_KEY_NONE)
			return 0;
	}
}

uint32_t kvp_radix_probe_free(const struct kvp_radix_w *w, uint64_t key)
{
	uint64_t i = key & w->tab_mask;
	while (kvp_radix_hdr(w, (uint32_t)i)->key >= KVP_RADIX_KEY_MIN)
		i = (i + 1) & w->tab_mask;
	return (uint32_t)i;
}

/* An area that is not the current table may be written freely: whoever still reads it sees another
 * descriptor at the end of the walk and starts again. */
static void zero(void *mem, uint64_t bytes)
{
	uint64_t *p = mem;
	if (madvise(p, bytes, MADV_REMOVE) != 0)
		for (uint64_t i = 0; i < bytes / 8; i++)
			kvp_st_rlx_u64(&p[i], 0);
}

void kvp_radix_area_clear(struct kvp_radix_w *w, uint32_t log2, uint32_t side)
{
	if (!(w->pub->area_used[side] >> log2 & 1))
		return;
	zero((char *)w->pub + kvp_radix_area(&w->r, log2, side), (uint64_t)w->geo.hdr_bytes << log2);
	w->pub->area_used[side] &= ~(1ULL << log2);
}

/* Gives the next piece of the old table back. */
static void old_give(struct kvp_radix_w *w)
{
	struct kvp_radix_old *o = &w->old;
	uint64_t n = o->bytes - o->at < GIVE_BYTES ? o->bytes - o->at : GIVE_BYTES;
	zero((char *)w->pub + kvp_radix_area(&w->r, o->log2, o->side) + o->at, n);
	o->at += n;
	if (o->at < o->bytes)
		return;
	w->pub->area_used[o->side] &= ~(1ULL << o->log2);
	memset(o, 0, sizeof(*o));
}

/* ---- filling the next table ---- */

static struct kvp_radix_hdr_shm *next_hdr(const struct kvp_radix_w *w, uint64_t i)
{
	return (struct kvp_radix_hdr_shm *)(void *)(w->next.tab + i * w->geo.hdr_bytes);
}

static void copy_to(const struct kvp_radix_w *w, uint64_t at, const struct kvp_radix_hdr_shm *h)
{
	uint64_t *dst = (uint64_t *)(void *)next_hdr(w, at);
	for (uint32_t x = 0; x < w->geo.hdr_bytes / 8; x++)
		kvp_st_rlx_u64(&dst[x], ((const uint64_t *)(const void *)h)[x]);
}

static void insert(struct kvp_radix_w *w, const struct kvp_radix_hdr_shm *h)
{
	struct kvp_radix_next *n = &w->next;
	uint64_t at = h->key & n->mask;
	while (next_hdr(w, at)->key >= KVP_RADIX_KEY_MIN)
		at = (at + 1) & n->mask;
	n->dead -= next_hdr(w, at)->key == KVP_RADIX_KEY_DEAD;
	copy_to(w, at, h);
	n->tslot[h->rid] = (uint32_t)at;
}

void kvp_radix_mirror(struct kvp_radix_w *w, const struct kvp_radix_hdr_shm *h)
{
	struct kvp_radix_next *n = &w->next;
	if (!n->tab || (const char *)h >= w->tab + n->at * w->geo.hdr_bytes)
		return;
	/* A place left by an earlier run of this number names another run, or none. */
	struct kvp_radix_hdr_shm *mine = next_hdr(w, n->tslot[h->rid] & n->mask);
	int known = mine->key >= KVP_RADIX_KEY_MIN && mine->rid == h->rid;
	if (h->key >= KVP_RADIX_KEY_MIN && !known) {
		insert(w, h);
	} else if (h->key >= KVP_RADIX_KEY_MIN) {
		copy_to(w, n->tslot[h->rid], h);
	} else if (known) {
		kvp_st_rlx_u64(&mine->key, KVP_RADIX_KEY_DEAD);
		n->dead++;
	}
}

static void begin(struct kvp_radix_w *w, uint32_t log2)
{
	uint64_t d = w->pub->table;
	struct kvp_radix_next *n = &w->next;
	n->side = log2 == w->tab_log2 ? !KVP_RADIX_DESC_SIDE(d) : KVP_RADIX_DESC_SIDE(d);
	n->log2 = log2;
	n->mask = (uint32_t)((1ULL << log2) - 1);
	n->at = n->dead = 0;
	while (w->old.bytes && w->old.log2 == n->log2 && w->old.side == n->side)
		old_give(w);
	kvp_radix_area_clear(w, n->log2, n->side);
	w->pub->area_used[n->side] |= 1ULL << log2;
	n->tab = (char *)w->pub + kvp_radix_area(&w->r, log2, n->side);
	KVP_POINT("radix:table_begin");
}

/* The copy becomes the table. */
static void finish(struct kvp_radix_w *w)
{
	struct kvp_radix_next *n = &w->next;
	uint64_t d = w->pub->table, nd = KVP_RADIX_DESC(KVP_RADIX_DESC_SEQ(d) + 1, n->log2, n->side);
	uint32_t *was = w->tslot;
	KVP_POINT("radix:table_copied");
	kvp_st_rel_u64(&w->pub->table, nd); /* pairs with: radix_read.c kvp_radix_find */
	/* Orders the new descriptor before any store into what the old table's headers name. */
	kvp_fence_rel();
	KVP_POINT("radix:table_new");
	while (w->old.bytes)
		old_give(w);
	w->old = (struct kvp_radix_old){.log2 = w->tab_log2,
		.side = KVP_RADIX_DESC_SIDE(d),
		.bytes = (uint64_t)w->geo.hdr_bytes << w->tab_log2};
	w->tslot = n->tslot;
	kvp_st_rlx_u64(&w->pub->stat.tombstones, n->dead);
	kvp_add_sw_u64(&w->pub->stat.table_growths, 1);
	memset(n, 0, sizeof(*n));
	n->tslot = was;
	kvp_radix_use_table(w, nd);
}

static void step(struct kvp_radix_w *w, uint64_t slots)
{
	struct kvp_radix_next *n = &w->next;
	for (; slots && n->at <= w->tab_mask; slots--) {
		const struct kvp_radix_hdr_shm *h = kvp_radix_hdr(w, (uint32_t)n->at++);
		if (h->key >= KVP_RADIX_KEY_MIN)
			insert(w, h);
	}
	if (n->at > w->tab_mask)
		finish(w);
}

/* Half of the table live, or five eighths used: another one is begun. Seven eighths used: it is finished at
 * once, which the steps before made needless. */
void kvp_radix_table_fit(struct kvp_radix_w *w)
{
	uint64_t cnt = 1ULL << w->tab_log2, live = w->pub->stat.runs + 2,
		 used = live + w->pub->stat.tombstones;
	if (!w->next.tab && live * 2 > cnt && w->tab_log2 < w->geo.log2_max)
		begin(w, w->tab_log2 + 1);
	else if (!w->next.tab && used * 8 > cnt * 5)
		begin(w, w->tab_log2);
	if (w->old.bytes && w->old.tick++ % GIVE_EVERY == 0)
		old_give(w);
	if (w->next.tab)
		step(w, used * 8 > cnt * 7 ? UINT64_MAX : SLOTS_PER_HEADER);
}

uint32_t kvp_radix_table_tend(struct kvp_radix_w *w, uint32_t budget)
{
	uint64_t cnt = 1ULL << w->tab_log2, live = w->pub->stat.runs + 2;
	if (w->old.bytes) {
		for (uint32_t i = 0; w->old.bytes && i < budget; i += 100)
			old_give(w);
		return budget;
	}
	if (!w->next.tab && live * 16 < cnt && w->tab_log2 > w->geo.log2_min)
		begin(w, w->tab_log2 - 1);
	if (!w->next.tab)
		return 0;
	step(w, budget);
	return budget;
}

/* Headers whose copy in the table that is being filled is not theirs. */
uint64_t kvp_radix_table_check(const struct kvp_radix_w *w)
{
	const struct kvp_radix_next *n = &w->next;
	uint64_t wrong = 0, copies = 0, live = 0;
	for (uint64_t i = 0; n->tab && i <= n->mask; i++)
		copies += next_hdr(w, i)->key >= KVP_RADIX_KEY_MIN;
	for (uint64_t i = 0; n->tab && i < n->at; i++) {
		const struct kvp_radix_hdr_shm *h = kvp_radix_hdr(w, (uint32_t)i);
		if (h->key < KVP_RADIX_KEY_MIN)
			continue;
		live++;
		wrong += memcmp(next_hdr(w, n->tslot[h->rid] & n->mask), h, w->geo.hdr_bytes) != 0;
	}
	return wrong + (copies != live);
}
