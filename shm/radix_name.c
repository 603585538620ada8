#include "shm/radix_priv.h"

#include <string.h>
#include <sys/mman.h>

/* Names are placed by the upper bits of their hash, so that growing is one sweep and a difference shows
 * without a look at the column. Removal shifts back: no tombstones. */
#define ENTRY(hash, pos) (((hash)&0xffffffff00000000ULL) | ((uint64_t)(pos) + 1))
#define ENTRY_POS(e) ((uint32_t)(e)-1)

/* While the map grows there are two: entries move from the old one to the new one a few at a time, in the
 * order of their places, so that no single insertion pays for all of them. The places that were swept are a
 * stretch of the old map that begins and ends in front of an empty place; hence an entry is in the new map if
 * and only if its home in the old one was swept. */
struct map {
	uint64_t *t;
	uint32_t log2;
};
/* places looked at for each insertion: it ends long before the next growth */
#define SWEEP 8u
#define PIECE (KVP_HUGE_PAGE / 8) /* places given back at a time */

static struct map map_of(const struct kvp_radix_w *w, uint64_t hash)
{
	const struct kvp_radix_sweep *s = &w->name_sweep;
	struct map m = {w->name, w->name_log2};
	if (s->old) {
		uint64_t at = ((hash >> (64 - s->log2)) - s->from) & ((1ULL << s->log2) - 1);
		if (at >= s->done)
			m = (struct map){s->old, s->log2};
	}
	return m;
}

static void insert(struct map m, uint64_t e)
{
	uint64_t i = e >> (64 - m.log2), mask = (1ULL << m.log2) - 1;
	while (m.t[i])
		i = (i + 1) & mask;
	m.t[i] = e;
}

/* Gives a whole swept piece of the old map back. The first one stays: entries from the end may come to stand
 * in it. */
static void sweep_give_back(struct kvp_radix_sweep *s, uint64_t i)
{
	uint64_t piece = ((i - 1) & ((1ULL << s->log2) - 1)) / PIECE;
	if (s->done >= PIECE && i % PIECE == 0 && piece != s->from / PIECE)
		madvise(s->old + piece * PIECE, PIECE * 8, MADV_DONTNEED);
}

void kvp_radix_name_sweep(struct kvp_radix_w *w, uint64_t budget)
{
	struct kvp_radix_sweep *s = &w->name_sweep;
	uint64_t cnt = 1ULL << s->log2;
	struct map to = {w->name, w->name_log2};
	while (s->old) {
		uint64_t i = (s->from + s->done) & (cnt - 1), e = s->old[i];
		if (!e && s->done >= cnt) {
			kvp_radix_mem_put(s->old, cnt * sizeof(*s->old));
			memset(s, 0, sizeof(*s));
			return;
		}
		if (!e && !budget)
			return;
		if (e) {
			s->old[i] = 0;
			insert(to, e);
		}
		if (i % PIECE == 0)
			sweep_give_back(s, i);
		s->done++;
		budget -= budget != 0;
	}
}

static int grow(struct kvp_radix_w *w)
{
	struct kvp_radix_sweep *s = &w->name_sweep;
	kvp_radix_name_sweep(w, UINT64_MAX);
	uint64_t cnt = 1ULL << w->name_log2, *t = kvp_radix_ahead_names(w, w->name_log2 + 1);
	if (!t && w->name_log2 < 31)
		t = kvp_radix_mem_get(cnt * 2 * sizeof(*t));
	if (!t)
		return KVP_ERR_SYS;
	s->old = w->name;
	s->log2 = w->name_log2;
	s->from = s->done = 0;
	while (s->old[s->from])
		s->from++;
	w->name = t;
	w->name_log2++;
	return KVP_OK;
}

/* The place of the entry, or the empty place that ends the search. Hash bits are compared first, then the
 * column. */
static uint64_t *seek(const struct kvp_radix_w *w, uint64_t ext, uint64_t part_mix)
{
	uint64_t h = kvp_radix_name_hash(w, ext, part_mix);
	struct map m = map_of(w, h);
	uint64_t i = h >> (64 - m.log2), mask = (1ULL << m.log2) - 1;
	for (uint64_t e; (e = m.t[i]) != 0; i = (i + 1) & mask) {
		if ((e ^ h) >> 32)
			continue;
		uint32_t p = ENTRY_POS(e);
		if (w->ext[p] == ext && w->run[kvp_radix_rid_at(w, p)].part_mix == part_mix)
			break;
	}
	return &m.t[i];
}

uint32_t kvp_radix_name_get(const struct kvp_radix_w *w, uint64_t ext, uint64_t part_mix)
{
	uint64_t e = *seek(w, ext, part_mix);
	return e ? ENTRY_POS(e) : KVP_RADIX_NOPOS;
}

int kvp_radix_name_put(struct kvp_radix_w *w, uint64_t ext, uint64_t part_mix, uint32_t pos)
{
	if (w->name_cnt * 5 >= (3ULL << w->name_log2) && grow(w) && w->name_cnt * 8 >= (7ULL << w->name_log2))
		return KVP_ERR_FULL;
	if (w->name_sweep.old)
		kvp_radix_name_sweep(w, SWEEP);
	uint64_t h = kvp_radix_name_hash(w, ext, part_mix);
	insert(map_of(w, h), ENTRY(h, pos));
	w->name_cnt++;
	return KVP_OK;
}

void kvp_radix_name_del(struct kvp_radix_w *w, uint64_t ext, uint64_t part_mix, uint32_t pos)
{
	uint64_t h = kvp_radix_name_hash(w, ext, part_mix), want = ENTRY(h, pos);
	struct map m = map_of(w, h);
	uint64_t i = h >> (64 - m.log2), mask = (1ULL << m.log2) - 1;
	while (m.t[i] != want) {
		if (!m.t[i])
			return;
		i = (i + 1) & mask;
	}
	w->name_cnt--;
	for (uint64_t j = (i + 1) & mask; m.t[j]; j = (j + 1) & mask) {
		uint64_t at = m.t[j] >> (64 - m.log2);
		if (((j - at) & mask) < ((j - i) & mask))
			continue; /* would come to stand before its home */
		m.t[i] = m.t[j];
		i = j;
	}
	m.t[i] = 0;
}

void kvp_radix_name_move(struct kvp_radix_w *w, uint64_t ext, uint64_t part_mix, uint32_t from, uint32_t to)
{
	uint64_t h = kvp_radix_name_hash(w, ext, part_mix), want = ENTRY(h, from);
	struct map m = map_of(w, h);
	uint64_t i = h >> (64 - m.log2), mask = (1ULL << m.log2) - 1;
	while (m.t[i] && m.t[i] != want)
		i = (i + 1) & mask;
	if (m.t[i])
		m.t[i] = ENTRY(h, to);
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
