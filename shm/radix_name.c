#include "shm/radix_priv.h"

#include <string.h>

/* Names are placed by the upper bits of their hash, so that growing is one sweep and a difference shows
 * without a look at the column. Removal shifts back: no tombstones. */
#define ENTRY(hash, pos) (((hash)&0xffffffff00000000ULL) | ((uint64_t)(pos) + 1))
#define ENTRY_POS(e) ((uint32_t)(e)-1)

static uint64_t home(const struct kvp_radix_w *w, uint64_t e)
{
	return e >> (64 - w->name_log2);
}

static int grow(struct kvp_radix_w *w)
{
	uint64_t old_cnt = 1ULL << w->name_log2, *old = w->name;
	uint64_t *t = kvp_radix_mem_get(old_cnt * 2 * sizeof(*t));
	if (!t || w->name_log2 >= 31) {
		kvp_radix_mem_put(t, old_cnt * 2 * sizeof(*t));
		return KVP_ERR_SYS;
	}
	w->name = t;
	w->name_log2++;
	uint64_t mask = old_cnt * 2 - 1;
	for (uint64_t i = 0; i < old_cnt; i++) {
		if (!old[i])
			continue;
		uint64_t j = home(w, old[i]);
		while (t[j])
			j = (j + 1) & mask;
		t[j] = old[i];
	}
	kvp_radix_mem_put(old, old_cnt * sizeof(*old));
	return KVP_OK;
}

/* Index of the entry, or of the empty place that ends the search. Hash bits are compared first, then the
 * column. */
static uint64_t seek(const struct kvp_radix_w *w, uint64_t ext, uint64_t part_mix)
{
	uint64_t h = kvp_radix_name_hash(w, ext, part_mix), mask = (1ULL << w->name_log2) - 1;
	uint64_t i = h >> (64 - w->name_log2);
	for (uint64_t e; (e = w->name[i]) != 0; i = (i + 1) & mask) {
		if ((e ^ h) >> 32)
			continue;
		uint32_t p = ENTRY_POS(e);
		if (w->ext[p] == ext && w->run[kvp_radix_rid_at(w, p)].part_mix == part_mix)
			break;
	}
	return i;
}

uint32_t kvp_radix_name_get(const struct kvp_radix_w *w, uint64_t ext, uint64_t part_mix)
{
	uint64_t e = w->name[seek(w, ext, part_mix)];
	return e ? ENTRY_POS(e) : KVP_RADIX_NOPOS;
}

int kvp_radix_name_put(struct kvp_radix_w *w, uint64_t ext, uint64_t part_mix, uint32_t pos)
{
	if (w->name_cnt * 5 >= (3ULL << w->name_log2) && grow(w) && w->name_cnt * 8 >= (7ULL << w->name_log2))
		return KVP_ERR_FULL;
	uint64_t h = kvp_radix_name_hash(w, ext, part_mix), mask = (1ULL << w->name_log2) - 1;
	uint64_t i = h >> (64 - w->name_log2);
	while (w->name[i])
		i = (i + 1) & mask;
	w->name[i] = ENTRY(h, pos);
	w->name_cnt++;
	return KVP_OK;
}

void kvp_radix_name_del(struct kvp_radix_w *w, uint64_t ext, uint64_t part_mix, uint32_t pos)
{
	uint64_t h = kvp_radix_name_hash(w, ext, part_mix), mask = (1ULL << w->name_log2) - 1;
	uint64_t i = h >> (64 - w->name_log2), want = ENTRY(h, pos);
	while (w->name[i] != want) {
		if (!w->name[i])
			return;
		i = (i + 1) & mask;
	}
	w->name_cnt--;
	for (uint64_t j = (i + 1) & mask; w->name[j]; j = (j + 1) & mask) {
		uint64_t at = home(w, w->name[j]);
		if (((j - at) & mask) < ((j - i) & mask))
			continue; /* would come to stand before its home */
		w->name[i] = w->name[j];
		i = j;
	}
	w->name[i] = 0;
}

/* ---- aliases ---- */

static uint32_t ext_bucket(const struct kvp_radix_w *w, uint32_t slot, uint64_t ext)
{
	return (uint32_t)(kvp_radix_name_hash(w, ext, slot * 0x9e3779b97f4a7c15ULL) >> (64 - w->alias_log2));
}

static uint32_t pos_bucket(const struct kvp_radix_w *w, uint32_t slot, uint32_t pos)
{
	uint64_t x = ((uint64_t)slot << 32 | pos) * 0x9fb21c651e98df25ULL;
	x ^= x >> 29;
	return (uint32_t)((x * 0xd6e8feb86659fd93ULL) >> (64 - w->alias_log2));
}

static void chain(struct kvp_radix_w *w, uint32_t alias1)
{
	struct kvp_radix_alias_shm *a = &w->alias[alias1 - 1];
	uint32_t *e = &w->alias_by_ext[ext_bucket(w, a->slot1 - 1, a->ext)];
	uint32_t *p = &w->alias_by_pos[pos_bucket(w, a->slot1 - 1, a->pos)];
	a->next_ext = *e;
	*e = alias1;
	a->next_pos = *p;
	*p = alias1;
}

static int alias_grow(struct kvp_radix_w *w)
{
	uint32_t log2 = w->alias_log2 + 1;
	uint32_t *e = kvp_radix_mem_get(4ULL << log2), *p = kvp_radix_mem_get(4ULL << log2);
	if (!e || !p) {
		kvp_radix_mem_put(e, 4ULL << log2);
		kvp_radix_mem_put(p, 4ULL << log2);
		return KVP_ERR_SYS;
	}
	kvp_radix_mem_put(w->alias_by_ext, 4ULL << w->alias_log2);
	kvp_radix_mem_put(w->alias_by_pos, 4ULL << w->alias_log2);
	w->alias_by_ext = e;
	w->alias_by_pos = p;
	w->alias_log2 = log2;
	for (uint32_t i = 0; i < w->priv->alias_bump; i++)
		if (w->alias[i].slot1)
			chain(w, i + 1);
	return KVP_OK;
}

int kvp_radix_alias_link(struct kvp_radix_w *w, uint32_t alias1)
{
	struct kvp_radix_alias_shm *a = &w->alias[alias1 - 1];
	chain(w, alias1);
	w->slot[a->slot1 - 1].alias_cnt++;
	w->run[kvp_radix_rid_at(w, a->pos)].alias = 1;
	uint64_t cnt = w->pub->stat.alias_cnt + 1;
	kvp_st_rlx_u64(&w->pub->stat.alias_cnt, cnt);
	if (cnt > (2ULL << w->alias_log2) && w->alias_log2 < 30)
		alias_grow(w); /* longer chains if there is no memory */
	return KVP_OK;
}

int kvp_radix_alias_put(struct kvp_radix_w *w, uint32_t slot, uint64_t ext, uint32_t pos)
{
	uint32_t i1 = w->alias_free;
	if (i1)
		w->alias_free = w->alias[i1 - 1].next_ext;
	else if (w->priv->alias_bump < w->geo.alias_max)
		i1 = ++w->priv->alias_bump;
	else
		return KVP_ERR_FULL;
	struct kvp_radix_alias_shm *a = &w->alias[i1 - 1];
	a->ext = ext;
	a->pos = pos;
	kvp_st_rel_u32(&a->slot1, slot + 1);
	return kvp_radix_alias_link(w, i1);
}

uint32_t kvp_radix_alias_next(const struct kvp_radix_w *w, uint32_t slot, uint32_t pos, uint32_t alias1)
{
	uint32_t i1 = alias1 ? w->alias[alias1 - 1].next_pos : w->alias_by_pos[pos_bucket(w, slot, pos)];
	while (i1 && (w->alias[i1 - 1].pos != pos || w->alias[i1 - 1].slot1 != slot + 1))
		i1 = w->alias[i1 - 1].next_pos;
	return i1;
}

uint32_t kvp_radix_alias_cnt(const struct kvp_radix_w *w, uint32_t slot, uint32_t pos)
{
	uint32_t n = 0;
	if (w->slot[slot].alias_cnt == 0 || !w->run[kvp_radix_rid_at(w, pos)].alias)
		return 0;
	for (uint32_t i = kvp_radix_alias_next(w, slot, pos, 0); i; i = kvp_radix_alias_next(w, slot, pos, i))
		n++;
	return n;
}

/* Alias + 1 of (slot, ext), at pos only unless pos is KVP_RADIX_NOPOS; 0 = none. */
uint32_t kvp_radix_alias_find(const struct kvp_radix_w *w, uint32_t slot, uint64_t ext, uint32_t pos)
{
	if (w->slot[slot].alias_cnt == 0)
		return 0;
	uint32_t i1 = w->alias_by_ext[ext_bucket(w, slot, ext)];
	for (; i1; i1 = w->alias[i1 - 1].next_ext) {
		const struct kvp_radix_alias_shm *a = &w->alias[i1 - 1];
		if (a->ext == ext && a->slot1 == slot + 1 && (pos == KVP_RADIX_NOPOS || a->pos == pos))
			break;
	}
	return i1;
}

void kvp_radix_alias_del(struct kvp_radix_w *w, uint32_t alias1)
{
	struct kvp_radix_alias_shm *a = &w->alias[alias1 - 1];
	uint32_t slot = a->slot1 - 1, *p = &w->alias_by_ext[ext_bucket(w, slot, a->ext)];
	while (*p != alias1)
		p = &w->alias[*p - 1].next_ext;
	*p = a->next_ext;
	p = &w->alias_by_pos[pos_bucket(w, slot, a->pos)];
	while (*p != alias1)
		p = &w->alias[*p - 1].next_pos;
	*p = a->next_pos;
	kvp_st_rel_u32(&a->slot1, 0);
	a->next_ext = w->alias_free;
	w->alias_free = alias1;
	w->slot[slot].alias_cnt--;
	kvp_st_rlx_u64(&w->pub->stat.alias_cnt, w->pub->stat.alias_cnt - 1);
}

void kvp_radix_alias_drop(struct kvp_radix_w *w, uint32_t slot, uint32_t pos)
{
	if (w->slot[slot].alias_cnt == 0 || !w->run[kvp_radix_rid_at(w, pos)].alias)
		return;
	for (uint32_t i; (i = kvp_radix_alias_next(w, slot, pos, 0)) != 0;)
		kvp_radix_alias_del(w, i);
}

uint32_t kvp_radix_name_of(const struct kvp_radix_w *w, uint32_t slot, uint64_t ext)
{
	uint32_t a = kvp_radix_alias_find(w, slot, ext, KVP_RADIX_NOPOS);
	if (a)
		return w->alias[a - 1].pos;
	uint32_t pos = kvp_radix_name_get(w, ext, w->slot[slot].part_mix);
	if (pos == KVP_RADIX_NOPOS || !kvp_radix_holds(w, slot, pos) || kvp_radix_alias_cnt(w, slot, pos))
		return KVP_RADIX_NOPOS;
	return pos;
}
