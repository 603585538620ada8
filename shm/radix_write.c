#include "shm/radix_priv.h"

#include <kvpick/point.h>
#include <string.h>

#define RUN_MIN 16u /* words of the smallest array */
#define RUNS_MANY 65536u
#define NAME_AHEAD 8 /* names whose place in the map is fetched ahead */

/* A store on its way: the cursor stands behind block `off` - 1 of run `rid` (the root: run 0). */
struct put {
	uint32_t slot, n, i;
	uint32_t rid, off;
	uint64_t part_salt, part_mix;
	const uint64_t *local, *ext, *key;
};

void kvp_radix_gauges(struct kvp_radix_w *w)
{
	kvp_st_rlx_u64(&w->pub->stat.col_used_words,
		(uint64_t)(w->pub->col_bump - w->colb.free_gran) * KVP_RADIX_COL_GRAN);
	kvp_st_rlx_u64(&w->pub->stat.cut_used_words,
		(uint64_t)(w->pub->cut_bump - w->cutb.free_gran) * KVP_RADIX_CUT_GRAN);
	if (!w->ctr)
		return;
	kvp_ctr_set(w->ctr, KVP_CTR_RADIX_BLOCKS, w->pub->stat.blocks);
	kvp_ctr_set(w->ctr, KVP_CTR_RADIX_RUNS, w->pub->stat.runs);
	kvp_ctr_set(w->ctr, KVP_CTR_RADIX_LOW_BLOCKS, w->pub->stat.low_blocks);
}

/* Takes one name of a held block away; the block goes with its last name. */
static void unname(struct kvp_radix_w *w, uint32_t slot, uint64_t ext, uint32_t pos)
{
	uint32_t a = kvp_radix_alias_find(w, slot, ext, pos), rid = kvp_radix_rid_at(w, pos);
	if (a && kvp_radix_alias_cnt(w, slot, pos) > 1) {
		kvp_radix_alias_del(w, a);
		return;
	}
	struct kvp_radix_set one = {{0}};
	uint32_t off = pos - kvp_radix_hdr_of(w, rid)->base;
	one.w[off >> 6] = 1ULL << (off & 63);
	kvp_radix_drop(w, rid, slot, &one);
	kvp_radix_reap(w, rid);
}

/* A hash that the rank holds at another position moves to pos (none yet: KVP_RADIX_NOPOS): the old one is
 * dropped. */
static void move_name(struct kvp_radix_w *w, uint32_t slot, uint64_t ext, uint32_t pos)
{
	uint32_t old = kvp_radix_name_of(w, slot, ext);
	if (old == KVP_RADIX_NOPOS || old == pos)
		return;
	kvp_radix_count(w, &w->pub->stat.moved, KVP_CTR_RADIX_MOVED, 1);
	KVP_POINT("radix:move");
	unname(w, slot, ext, old);
}

/* Makes ext a name of the rank at a position that it holds or is about to hold. */
static int name_at(struct kvp_radix_w *w, uint32_t slot, uint64_t ext, uint32_t pos)
{
	int own = !(w->run_of[pos] & KVP_RADIX_NAME_OTHER);
	if (kvp_radix_alias_cnt(w, slot, pos)) {
		if (kvp_radix_alias_find(w, slot, ext, pos))
			return KVP_OK;
	} else if (kvp_radix_holds(w, slot, pos)) {
		if (w->ext[pos] == ext)
			return KVP_OK;
		int rc = kvp_radix_alias_put(w, slot, w->ext[pos], pos);
		if (rc)
			return rc;
	} else if (own && w->ext[pos] == ext) {
		return KVP_OK;
	} else {
		return kvp_radix_alias_put(w, slot, ext, pos);
	}
	KVP_POINT("radix:rename");
	kvp_add_sw_u64(&w->pub->stat.renamed, 1);
	return kvp_radix_alias_put(w, slot, ext, pos);
}

/* Blocks off.. of a run, m of them, equal those of the store: names, then coverage. Returns how many are
 * held now. */
static uint32_t hold_known(struct kvp_radix_w *w, struct put *p, uint32_t m)
{
	uint32_t base = kvp_radix_hdr_of(w, p->rid)->base + p->off, j = 0, fresh = 0, done = m;
	const uint64_t *ext = p->ext + p->i;
	if (w->slot[p->slot].alias_cnt == 0)
		while (j < m && w->ext[base + j] == ext[j] && !(w->run_of[base + j] & KVP_RADIX_NAME_OTHER))
			j++;
	if (j < m) {
		w->pin_rid = p->rid;
		for (uint32_t x = j; x < m; x++)
			move_name(w, p->slot, ext[x], base + x);
		for (done = j; done < m && name_at(w, p->slot, ext[done], base + done) == KVP_OK;)
			done++;
	}
	KVP_POINT("radix:named");
	if (done && kvp_radix_hold(w, p->rid, p->slot, p->off, p->off + done, &fresh))
		done = 0;
	kvp_radix_count(w, &w->pub->stat.stored, KVP_CTR_RADIX_STORED, fresh);
	if (done > fresh)
		kvp_radix_count(w, &w->pub->stat.duplicate, KVP_CTR_RADIX_DUPLICATE, done - fresh);
	if (w->pin_rid) {
		for (uint32_t x = done; x < m; x++)
			if (!kvp_radix_holds(w, p->slot, base + x))
				kvp_radix_alias_drop(w, p->slot, base + x);
		w->pin_rid = 0;
		kvp_radix_reap(w, p->rid);
	}
	return done;
}

/* ---- new blocks ---- */

/* Fills the columns for m new blocks at base and registers their names. other: hash is taken by another
 * position. Returns how many could be named. */
static uint32_t fill(struct kvp_radix_w *w, const struct put *p, uint32_t rid, uint32_t base, uint32_t m,
	const struct kvp_radix_set *other)
{
	const uint64_t *ext = p->ext + p->i;
	for (uint32_t j = 0; j < m; j++) {
		uint32_t pos = base + j;
		kvp_st_rlx_u64(&w->col[pos], p->key[p->i + j]);
		w->local[pos] = p->local[p->i + j];
		w->ext[pos] = ext[j];
		if (other->w[j >> 6] >> (j & 63) & 1) {
			w->run_of[pos] = rid | KVP_RADIX_NAME_OTHER;
			if (kvp_radix_alias_put(w, p->slot, ext[j], pos))
				return j;
		} else {
			w->run_of[pos] = rid;
			if (kvp_radix_name_put(w, ext[j], p->part_mix, pos))
				return j;
		}
	}
	return m;
}

/* Moves what the rank holds under these hashes elsewhere; marks the hashes that name other positions. */
static void clash(struct kvp_radix_w *w, const struct put *p, uint32_t m, struct kvp_radix_set *other)
{
	const uint64_t *ext = p->ext + p->i;
	memset(other, 0, sizeof(*other));
	for (uint32_t j = 0; j < m && j < NAME_AHEAD; j++)
		kvp_radix_name_prefetch(w, kvp_radix_name_hash(w, ext[j], p->part_mix));
	for (uint32_t j = 0; j < m; j++) {
		if (j + NAME_AHEAD < m)
			kvp_radix_name_prefetch(w, kvp_radix_name_hash(w, ext[j + NAME_AHEAD], p->part_mix));
		uint32_t q = kvp_radix_name_get(w, ext[j], p->part_mix);
		if (q == KVP_RADIX_NOPOS && w->slot[p->slot].alias_cnt == 0)
			continue;
		move_name(w, p->slot, ext[j], KVP_RADIX_NOPOS);
		if (q != KVP_RADIX_NOPOS && kvp_radix_name_get(w, ext[j], p->part_mix) != KVP_RADIX_NOPOS)
			other->w[j >> 6] |= 1ULL << (j & 63);
	}
}

/* Words that the cursor's run has left behind its end, if the store may simply go on there: a leaf that the
 * rank holds as a whole on its device and nobody else does; for a lower tier, one that nobody does. */
static uint32_t room_behind(const struct kvp_radix_w *w, const struct put *p)
{
	if (!p->rid || w->run[p->rid].child)
		return 0;
	const struct kvp_radix_hdr_shm *h = kvp_radix_hdr_of(w, p->rid);
	int low = kvp_radix_is_low(w, p->slot);
	if (!low && !kvp_radix_has_bit(h, p->slot))
		return 0;
	uint64_t others = 0;
	for (uint32_t i = 0; i < w->geo.word_cnt; i++)
		others |= h->bits[i] & (!low && i == p->slot >> 6 ? ~(1ULL << (p->slot & 63)) : ~0ULL);
	return others ? 0 : h->cap - h->len;
}

static uint32_t append(struct kvp_radix_w *w, struct put *p, uint32_t m, const struct kvp_radix_set *other)
{
	const struct kvp_radix_hdr_shm *h = kvp_radix_hdr_of(w, p->rid);
	uint32_t at = h->base + h->len, fresh;
	int low = kvp_radix_is_low(w, p->slot);
	if (low && kvp_radix_low_room(w, p->rid))
		return 0;
	m = fill(w, p, p->rid, at, m, other);
	KVP_POINT("radix:append");
	if (!m)
		return 0;
	struct kvp_radix_hdr_shm *n = kvp_radix_img_load(w, w->tslot[p->rid]);
	n->len += m;
	n->last = w->col[at + m - 1];
	kvp_radix_commit(w, w->tslot[p->rid]);
	kvp_add_sw_u64(&w->pub->stat.appends, 1);
	if (low) {
		KVP_POINT("radix:low_append");
		kvp_radix_low_hold(w, p->rid, p->slot, p->off, p->off + m, &fresh);
	}
	p->off += m;
	return m;
}

/* Words for a new run of m blocks: continuations double, so that a long chain has few runs. */
static uint32_t array_get(struct kvp_radix_w *w, const struct put *p, uint32_t m, uint32_t *words)
{
	uint32_t want = m;
	if (p->rid && !w->run[p->rid].child && kvp_radix_hdr_of(w, p->rid)->len * 2 > want)
		want = kvp_radix_hdr_of(w, p->rid)->len * 2;
	/* Where most runs are short, room to grow in would be most of the memory. */
	const struct kvp_radix_stats *st = &w->pub->stat;
	uint32_t least = st->runs > RUNS_MANY && st->blocks < 4 * st->runs ? KVP_RADIX_COL_GRAN : RUN_MIN;
	want = want < least ? least : want;
	want = want > KVP_RADIX_RUN_BLK_MAX ? KVP_RADIX_RUN_BLK_MAX : want;
	uint32_t order =
		want > KVP_RADIX_COL_GRAN ? 32 - (uint32_t)__builtin_clz((want - 1) / KVP_RADIX_COL_GRAN) : 0;
	for (;; order--) {
		uint32_t g = kvp_radix_buddy_get(&w->colb, order);
		if (g != KVP_RADIX_NOPOS) {
			*words = KVP_RADIX_COL_GRAN << order;
			return g * KVP_RADIX_COL_GRAN;
		}
		if (order == 0)
			return KVP_RADIX_NOPOS;
	}
}

static uint32_t create(struct kvp_radix_w *w, struct put *p, uint32_t m, const struct kvp_radix_set *other)
{
	uint32_t words = 0;
	kvp_radix_table_fit(w);
	uint32_t up = p->rid ? kvp_radix_hdr_of(w, p->rid)->base + p->off - 1 : KVP_RADIX_NOPOS;
	uint32_t rid = kvp_radix_run_get(w, p->part_salt, p->part_mix, up);
	if (!rid)
		return 0;
	uint32_t base = array_get(w, p, m, &words);
	if (base == KVP_RADIX_NOPOS) {
		kvp_radix_run_put(w, rid);
		return 0;
	}
	uint64_t iv = 0;
	int low = kvp_radix_is_low(w, p->slot);
	uint32_t low_n = 0, low_ref = low ? kvp_radix_low_list(w, &iv, 1, &low_n) : 0;
	m = low_ref == KVP_RADIX_NOPOS ? 0 : fill(w, p, rid, base, m < words ? m : words, other);
	KVP_POINT("radix:create");
	if (!m) {
		kvp_radix_low_free(w, low_ref, low_n);
		kvp_radix_buddy_put(&w->colb, base / KVP_RADIX_COL_GRAN, words / KVP_RADIX_COL_GRAN);
		kvp_radix_run_put(w, rid);
		return 0;
	}
	kvp_radix_col_use(w, base, words);
	struct kvp_radix_hdr_shm *n = kvp_radix_img_clear(w);
	n->key = w->col[base];
	n->last = w->col[base + m - 1];
	n->len = m;
	n->base = base;
	n->cap = words;
	n->rid = rid;
	n->low_ref = low_ref;
	n->low_n = low_n;
	if (low)
		kvp_st_rlx_u64((uint64_t *)(void *)(w->cut + low_ref), KVP_RADIX_IV(p->slot, 0, m));
	else
		n->bits[p->slot >> 6] = 1ULL << (p->slot & 63);
	uint32_t tslot = kvp_radix_probe_free(w, n->key);
	uint64_t reused = kvp_radix_hdr(w, tslot)->key == KVP_RADIX_KEY_DEAD;
	w->tslot[rid] = tslot;
	kvp_radix_commit(w, tslot);
	kvp_radix_run_link(w, rid);
	kvp_st_rlx_u64(&w->pub->stat.tombstones, w->pub->stat.tombstones - reused);
	kvp_st_rlx_u64(&w->pub->stat.runs, w->pub->stat.runs + 1);
	if (low) {
		w->slot[p->slot].blocks += m;
		kvp_radix_low_note(w, w->pub->stat.low_blocks + m);
	}
	p->rid = rid;
	p->off = m;
	return m;
}

/* Stores blocks that nobody holds below the cursor. Returns how many, 0 = no room. */
static uint32_t hold_new(struct kvp_radix_w *w, struct put *p)
{
	struct kvp_radix_set other;
	uint64_t budget = w->geo.block_max - w->pub->stat.blocks;
	uint32_t m = p->n - p->i;
	m = m < KVP_RADIX_RUN_BLK_MAX ? m : KVP_RADIX_RUN_BLK_MAX;
	uint32_t room = room_behind(w, p);
	m = room && room < m ? room : m;
	m = m < budget ? m : (uint32_t)budget;
	if (!m)
		return 0;
	clash(w, p, m, &other);
	room = room_behind(w, p);
	uint32_t done = room ? append(w, p, m < room ? m : room, &other) : create(w, p, m, &other);
	if (done && !kvp_radix_is_low(w, p->slot)) {
		w->slot[p->slot].blocks += done;
		kvp_radix_tour_came(w, p->rid, p->slot);
	}
	kvp_st_rlx_u64(&w->pub->stat.blocks, w->pub->stat.blocks + done);
	kvp_radix_count(w, &w->pub->stat.stored, KVP_CTR_RADIX_STORED, done);
	return done;
}

/* Leading blocks of the cursor's run that equal the store's. */
static uint32_t equal(const struct kvp_radix_w *w, const struct put *p)
{
	const struct kvp_radix_hdr_shm *h = kvp_radix_hdr_of(w, p->rid);
	uint32_t m = h->len - p->off < p->n - p->i ? h->len - p->off : p->n - p->i, j = 0;
	while (j < m && w->col[h->base + p->off + j] == p->key[p->i + j])
		j++;
	return j;
}

static int put_walk(struct kvp_radix_w *w, struct put *p)
{
	while (p->i < p->n) {
		uint32_t done;
		if (p->rid && p->off < kvp_radix_hdr_of(w, p->rid)->len) {
			uint32_t m = equal(w, p);
			if (m == 0) {
				if (kvp_radix_split(w, p->rid, p->off))
					return KVP_ERR_FULL;
				continue;
			}
			done = hold_known(w, p, m);
			p->off += done;
			p->i += done;
			if (done < m)
				return KVP_ERR_FULL;
			continue;
		}
		uint32_t next = kvp_radix_probe(w, p->key[p->i]);
		if (next) {
			p->rid = next;
			p->off = 0;
			continue;
		}
		done = hold_new(w, p);
		if (!done)
			return KVP_ERR_FULL;
		p->i += done;
	}
	return KVP_OK;
}

static void keys(struct kvp_radix_w *w, uint64_t k, uint32_t n, const uint64_t *local)
{
	for (uint32_t i = 0; i < n; i++)
		w->key[i] = k = kvp_radix_step(w->r.key_salt, k, local[i]);
}

/* 1 if the hashes (and the parent's) are pairwise distinct. */
static int distinct(struct kvp_radix_w *w, uint32_t n, const uint64_t *ext, const uint64_t *parent)
{
	uint32_t log2 = 33 - (uint32_t)__builtin_clz(n), mask = (1u << log2) - 1;
	if (w->dup_stamp > UINT32_MAX - 2 * KVP_RADIX_OP_BLK_MAX) {
		memset(w->dup, 0, sizeof(*w->dup) * 4 * KVP_RADIX_OP_BLK_MAX);
		w->dup_stamp = 1;
	}
	uint32_t stamp = w->dup_stamp;
	w->dup_stamp += n;
	for (uint32_t i = 0; i < n; i++) {
		if (parent && ext[i] == *parent)
			return 0;
		uint32_t at = (uint32_t)kvp_mix_u64(&w->dup_mix, ext[i]) & mask;
		for (; w->dup[at] >= stamp; at = (at + 1) & mask, w->dup_steps++)
			if (ext[w->dup[at] - stamp] == ext[i])
				return 0;
		w->dup[at] = stamp + i;
	}
	return 1;
}

static void op_begin(struct kvp_radix_w *w, enum kvp_radix_op op, uint32_t slot, uint32_t n)
{
	w->priv->op.slot = slot;
	w->priv->op.n = n;
	kvp_st_rel_u32(&w->priv->op.op, op);
	KVP_POINT("radix:op");
}

static void op_end(struct kvp_radix_w *w)
{
	kvp_st_rel_u32(&w->priv->op.op, KVP_RADIX_OP_NONE);
	kvp_radix_gauges(w);
}

/* The store itself, from the cursor of the parent. */
static int store_from(struct kvp_radix_w *w, struct put *p, uint32_t parent_pos)
{
	uint64_t k = kvp_radix_seed(w->r.key_salt, p->part_salt);
	if (parent_pos != KVP_RADIX_NOPOS) {
		p->rid = kvp_radix_rid_at(w, parent_pos);
		p->off = parent_pos - kvp_radix_hdr_of(w, p->rid)->base + 1;
		k = w->col[parent_pos];
	}
	keys(w, k, p->n, p->local);
	p->key = w->key;
	return put_walk(w, p);
}

static uint32_t holder_of(const struct kvp_radix_w *w, uint32_t slot, enum kvp_radix_tier tier)
{
	return slot + (uint32_t)tier * w->geo.slot_max;
}

static uint64_t mix_of(const struct kvp_radix_w *w, uint64_t part_salt)
{
	return kvp_radix_fold(part_salt ^ w->r.key_salt[1], 0xa0761d6478bd642fULL ^ w->r.key_salt[0]);
}

/* Position of a parent: on the device for a device block; for a lower tier in that tier, else in any. */
static uint32_t parent_pos(const struct kvp_radix_w *w, uint32_t holder, uint64_t ext)
{
	uint32_t pos = w->slot[holder].blocks ? kvp_radix_name_of(w, holder, ext) : KVP_RADIX_NOPOS;
	if (!kvp_radix_is_low(w, holder))
		return pos;
	for (uint32_t x = holder % w->geo.slot_max; x < w->geo.holder_max && pos == KVP_RADIX_NOPOS;
		x += w->geo.slot_max)
		pos = w->slot[x].blocks ? kvp_radix_name_of(w, x, ext) : KVP_RADIX_NOPOS;
	return pos;
}

static void slot_part(struct kvp_radix_w *w, uint32_t holder, uint64_t part_salt, uint64_t part_mix)
{
	struct kvp_radix_slot_shm *s = &w->slot[holder];
	if (s->has_part && s->part_salt == part_salt)
		return;
	s->part_salt = part_salt;
	s->part_mix = part_mix;
	s->has_part = 1;
}

/* 1 if some tier of the rank holds blocks of another partition. */
static int other_part(const struct kvp_radix_w *w, uint32_t slot, uint64_t part_salt)
{
	for (uint32_t x = slot; x < w->geo.holder_max; x += w->geo.slot_max)
		if (w->slot[x].has_part && w->slot[x].blocks && w->slot[x].part_salt != part_salt)
			return 1;
	return 0;
}

static int store_piece(struct kvp_radix_w *w, struct put *p, enum kvp_radix_parent how, uint64_t parent_ext)
{
	uint32_t pos = KVP_RADIX_NOPOS;
	if (p->n && !distinct(w, p->n, p->ext, how == KVP_RADIX_CHILD ? &parent_ext : NULL))
		return KVP_ERR_INVAL;
	if (how == KVP_RADIX_CHILD) {
		pos = parent_pos(w, p->slot, parent_ext);
		if (pos == KVP_RADIX_NOPOS)
			return KVP_ERR_NOTFOUND;
	}
	if (p->n == 0)
		return KVP_OK;
	slot_part(w, p->slot, p->part_salt, p->part_mix);
	memcpy(w->op_local, p->local, 8ULL * p->n);
	memcpy(w->op_ext, p->ext, 8ULL * p->n);
	w->priv->op.how = how;
	w->priv->op.parent_ext = parent_ext;
	w->priv->op.part_salt = p->part_salt;
	op_begin(w, KVP_RADIX_OP_STORE, p->slot, p->n);
	int rc = store_from(w, p, pos);
	op_end(w);
	return rc;
}

int kvp_radix_store(struct kvp_radix_w *w, uint32_t slot, uint64_t part_salt, enum kvp_radix_parent how,
	uint64_t parent_ext, uint32_t n, const uint64_t *local, const uint64_t *ext, uint32_t *stored)
{
	return kvp_radix_store_tier(
		w, slot, KVP_RADIX_DEVICE, part_salt, how, parent_ext, n, local, ext, stored);
}

int kvp_radix_store_tier(struct kvp_radix_w *w, uint32_t slot, enum kvp_radix_tier tier, uint64_t part_salt,
	enum kvp_radix_parent how, uint64_t parent_ext, uint32_t n, const uint64_t *local,
	const uint64_t *ext, uint32_t *stored)
{
	uint32_t at = 0;
	int rc;
	if (slot >= w->geo.slot_max || (uint32_t)tier >= KVP_RADIX_TIER_CNT ||
		other_part(w, slot, part_salt)) {
		kvp_radix_count(w, &w->pub->stat.invalid, KVP_CTR_RADIX_INVALID, 1);
		return KVP_ERR_INVAL;
	}
	struct put p = {
		.slot = holder_of(w, slot, tier), .part_salt = part_salt, .part_mix = mix_of(w, part_salt)};
	do {
		p.rid = p.off = p.i = 0;
		p.n = n - at < KVP_RADIX_OP_BLK_MAX ? n - at : KVP_RADIX_OP_BLK_MAX;
		p.local = local + at;
		p.ext = ext + at;
		rc = store_piece(w, &p, how, parent_ext);
		at += p.i;
		if (at) {
			how = KVP_RADIX_CHILD;
			parent_ext = ext[at - 1];
		}
	} while (rc == KVP_OK && at < n);
	if (rc == KVP_ERR_NOTFOUND && tier != KVP_RADIX_DEVICE)
		kvp_radix_count(w, &w->pub->stat.orphans, KVP_CTR_RADIX_ORPHANS, n);
	else if (rc == KVP_ERR_NOTFOUND)
		kvp_radix_count(w, &w->pub->stat.not_found, KVP_CTR_RADIX_NOT_FOUND, 1);
	else if (rc == KVP_ERR_INVAL)
		kvp_radix_count(w, &w->pub->stat.invalid, KVP_CTR_RADIX_INVALID, 1);
	else if (rc == KVP_ERR_FULL)
		kvp_radix_count(w, &w->pub->stat.full, KVP_CTR_RADIX_FULL, n - at);
	if (stored && (rc == KVP_OK || rc == KVP_ERR_FULL))
		*stored = at;
	return rc;
}

/* ---- remove ---- */

struct take {
	uint32_t rid, cnt;
	struct kvp_radix_set set;
};

static void take_flush(struct kvp_radix_w *w, uint32_t slot, struct take *t)
{
	if (t->cnt) {
		kvp_radix_drop(w, t->rid, slot, &t->set);
		kvp_radix_count(w, &w->pub->stat.removed, KVP_CTR_RADIX_REMOVED, t->cnt);
		kvp_radix_reap(w, t->rid);
	}
	memset(t, 0, sizeof(*t));
}

/* Fetches ahead: first the name's place, then what it points to. */
static void remove_ahead(
	const struct kvp_radix_w *w, uint64_t mix, uint32_t n, const uint64_t *ext, uint32_t i)
{
	if (i + NAME_AHEAD < n)
		kvp_radix_name_prefetch(w, kvp_radix_name_hash(w, ext[i + NAME_AHEAD], mix));
	if (i + NAME_AHEAD / 2 >= n)
		return;
	uint64_t e = w->name[kvp_radix_name_hash(w, ext[i + NAME_AHEAD / 2], mix) >> (64 - w->name_log2)];
	if (e) {
		__builtin_prefetch(&w->ext[(uint32_t)e - 1]);
		__builtin_prefetch(&w->run_of[(uint32_t)e - 1]);
	}
}

/* Blocks that follow one another in a run are dropped together. Returns the number of unknown hashes. */
static uint32_t remove_all(struct kvp_radix_w *w, uint32_t slot, uint32_t n, const uint64_t *ext)
{
	struct take t = {0};
	uint64_t mix = w->slot[slot].part_mix;
	uint32_t unknown = 0;
	for (uint32_t i = 0; i < n && i < NAME_AHEAD; i++)
		kvp_radix_name_prefetch(w, kvp_radix_name_hash(w, ext[i], mix));
	for (uint32_t i = 0; i < n; i++) {
		remove_ahead(w, mix, n, ext, i);
		uint32_t pos = kvp_radix_name_of(w, slot, ext[i]);
		if (pos == KVP_RADIX_NOPOS) {
			unknown++;
			continue;
		}
		uint32_t rid = kvp_radix_rid_at(w, pos);
		if (rid != t.rid) {
			take_flush(w, slot, &t);
			t.rid = rid;
		}
		uint32_t off = pos - kvp_radix_hdr_of(w, rid)->base;
		uint64_t bit = 1ULL << (off & 63);
		if (t.set.w[off >> 6] & bit) {
			unknown++; /* named twice in this call */
			continue;
		}
		if (kvp_radix_alias_cnt(w, slot, pos) > 1) {
			kvp_radix_alias_del(w, kvp_radix_alias_find(w, slot, ext[i], pos));
			KVP_POINT("radix:unalias");
			continue;
		}
		t.set.w[off >> 6] |= bit;
		t.cnt++;
	}
	take_flush(w, slot, &t);
	return unknown;
}

int kvp_radix_remove(struct kvp_radix_w *w, uint32_t slot, uint32_t n, const uint64_t *ext, uint32_t *unknown)
{
	return kvp_radix_remove_tier(w, slot, KVP_RADIX_DEVICE, n, ext, unknown);
}

int kvp_radix_remove_tier(struct kvp_radix_w *w, uint32_t slot, enum kvp_radix_tier tier, uint32_t n,
	const uint64_t *ext, uint32_t *unknown)
{
	uint32_t lost = 0, x = holder_of(w, slot, tier);
	if (slot >= w->geo.slot_max || (uint32_t)tier >= KVP_RADIX_TIER_CNT)
		return KVP_ERR_INVAL;
	for (uint32_t at = 0; at < n;) {
		uint32_t m = n - at < KVP_RADIX_OP_BLK_MAX ? n - at : KVP_RADIX_OP_BLK_MAX;
		if (w->slot[x].blocks == 0) {
			lost += n - at;
			break;
		}
		memcpy(w->op_ext, ext + at, 8ULL * m);
		op_begin(w, KVP_RADIX_OP_REMOVE, x, m);
		lost += remove_all(w, x, m, ext + at);
		op_end(w);
		at += m;
	}
	if (lost)
		kvp_radix_count(w, &w->pub->stat.unknown, KVP_CTR_RADIX_UNKNOWN, lost);
	if (unknown)
		*unknown = lost;
	return KVP_OK;
}

/* ---- clear ---- */

#define CLEAR_LOOKS 8u /* what dropping a run costs, in looks */

static uint64_t held_by(const struct kvp_radix_w *w, uint32_t first, uint32_t end)
{
	uint64_t n = 0;
	for (uint32_t x = first; x < end; x += w->geo.slot_max)
		n += w->slot[x].blocks;
	return n;
}

/* Everything of holders first, first + slot_max, ... below end in one run; what that cost, in looks. */
static uint32_t clear_run(struct kvp_radix_w *w, uint32_t rid, uint32_t first, uint32_t end)
{
	uint32_t cost = 1;
	for (uint32_t x = first; x < end; x += w->geo.slot_max) {
		const struct kvp_radix_hdr_shm *h = kvp_radix_hdr_of(w, rid);
		if (!w->slot[x].blocks ||
			(kvp_radix_is_low(w, x) ? !h->low_n
						: !kvp_radix_cover_get(w, h, x) && !w->run[rid].hole))
			continue;
		kvp_radix_drop_all(w, rid, x);
		cost += CLEAR_LOOKS;
	}
	if (cost > 1)
		kvp_radix_reap(w, rid);
	return cost;
}

/* Goes on with a pass over all runs, budget of them. A run that was split meanwhile may leave something
 * behind the pass: then another one follows. 1: nothing is left. */
static int clear_pass(struct kvp_radix_w *w, uint32_t first, uint32_t end, uint32_t budget)
{
	if (w->clear_slot != first || w->clear_at > w->priv->rid_bump)
		w->clear_at = 1;
	w->clear_slot = first;
	while (w->clear_at <= w->priv->rid_bump && budget && held_by(w, first, end)) {
		uint32_t rid = w->clear_at++, cost = 1;
		if (rid + 8 <= w->priv->rid_bump && w->run[rid + 8].live)
			__builtin_prefetch(kvp_radix_hdr_of(w, rid + 8));
		if (w->run[rid].live)
			cost = clear_run(w, rid, first, end);
		budget -= cost < budget ? cost : budget;
	}
	if (held_by(w, first, end))
		return 0;
	for (uint32_t x = first; x < end; x += w->geo.slot_max)
		w->slot[x].has_part = 0;
	w->clear_at = 1;
	return 1;
}

/* All tiers of a rank, or a single holder in a lower tier or on the device. */
static void clear_all(struct kvp_radix_w *w, uint32_t first, uint32_t end)
{
	w->clear_at = 1;
	clear_pass(w, first, end, UINT32_MAX);
}

enum sight { HIDDEN, SEEN };

/* Walks that begin from now on leave the slot out, or no longer do so and find nothing of what was
 * cleared. */
static void hide(struct kvp_radix_w *w, uint32_t slot, enum sight sight)
{
	uint64_t *word = &w->pub->hidden[slot >> 6], bit = 1ULL << (slot & 63);
	/* pairs with: begin of both walks */
	kvp_st_rel_u64(word, sight == HIDDEN ? *word | bit : *word & ~bit);
}

int kvp_radix_clear_some(struct kvp_radix_w *w, uint32_t slot, uint32_t budget)
{
	if (slot >= w->geo.slot_max)
		return KVP_ERR_INVAL;
	hide(w, slot, HIDDEN);
	KVP_POINT("radix:hidden");
	op_begin(w, KVP_RADIX_OP_CLEAR, slot, 0);
	int done = clear_pass(w, slot, w->geo.holder_max, budget);
	op_end(w);
	KVP_POINT("radix:cleared");
	if (!done)
		return KVP_ERR_AGAIN;
	hide(w, slot, SEEN);
	kvp_radix_count(w, &w->pub->stat.cleared, KVP_CTR_RADIX_CLEARED, 1);
	return KVP_OK;
}

int kvp_radix_clear(struct kvp_radix_w *w, uint32_t slot)
{
	w->clear_at = 1;
	return kvp_radix_clear_some(w, slot, UINT32_MAX);
}

int kvp_radix_clear_tier(struct kvp_radix_w *w, uint32_t slot, enum kvp_radix_tier tier)
{
	if (slot >= w->geo.slot_max || (uint32_t)tier >= KVP_RADIX_TIER_CNT)
		return KVP_ERR_INVAL;
	uint32_t x = holder_of(w, slot, tier);
	op_begin(w, KVP_RADIX_OP_CLEAR_TIER, x, 0);
	clear_all(w, x, x + 1);
	op_end(w);
	kvp_radix_count(w, &w->pub->stat.cleared, KVP_CTR_RADIX_CLEARED, 1);
	return KVP_OK;
}

/* ---- attach ---- */

/* 1 if some holder names the block at pos by the column of external hashes. */
static int column_name_in_use(const struct kvp_radix_w *w, uint32_t pos)
{
	uint32_t rid = kvp_radix_rid_at(w, pos);
	const struct kvp_radix_hdr_shm *h = kvp_radix_hdr_of(w, rid);
	const uint64_t *iv = kvp_radix_iv(w, h);
	uint32_t off = pos - h->base;
	for (uint32_t i = 0; i < w->geo.word_cnt; i++)
		for (uint64_t x = h->bits[i]; x; x &= x - 1)
			if (!kvp_radix_alias_cnt(w, i * 64 + (uint32_t)__builtin_ctzll(x), pos))
				return 1;
	for (uint32_t i = 0; i < KVP_RADIX_CUT_CNT(h->cut_n); i++) {
		uint32_t e = w->cut[h->cut_ref + i];
		if (KVP_RADIX_CUT_BLK(e) > off && !kvp_radix_alias_cnt(w, KVP_RADIX_CUT_SLOT(e), pos))
			return 1;
	}
	for (uint32_t o = w->run[rid].hole; o; o = w->hole[o - 1].next) {
		const struct kvp_radix_hole_shm *x = &w->hole[o - 1];
		if (x->a <= pos && pos < x->b && !kvp_radix_alias_cnt(w, x->slot1 - 1, pos))
			return 1;
	}
	for (uint32_t i = 0; i < KVP_RADIX_CUT_CNT(h->low_n); i++)
		if (KVP_RADIX_IV_A(iv[i]) <= off && off < KVP_RADIX_IV_B(iv[i]) &&
			!kvp_radix_alias_cnt(w, KVP_RADIX_IV_HOLDER(iv[i]), pos))
			return 1;
	return 0;
}

/* Where a hash is known: to the rank itself, in any tier, else to any rank of the partition. */
static uint32_t known_pos(const struct kvp_radix_w *w, uint32_t holder, uint64_t part_mix, uint64_t ext)
{
	uint32_t pos = parent_pos(w, holder, ext);
	if (pos != KVP_RADIX_NOPOS)
		return pos;
	pos = kvp_radix_name_get(w, ext, part_mix);
	if (pos != KVP_RADIX_NOPOS && column_name_in_use(w, pos))
		return pos;
	for (uint32_t x = 0; x < w->geo.holder_max; x++) {
		if (!w->slot[x].alias_cnt || w->slot[x].part_mix != part_mix)
			continue;
		uint32_t a = kvp_radix_alias_find(w, x, ext, KVP_RADIX_NOPOS);
		if (a)
			return w->alias[a - 1].pos;
	}
	return KVP_RADIX_NOPOS;
}

/* One block. A name that cannot be held leaves no alias behind. */
static int attach_one(struct kvp_radix_w *w, uint32_t holder, uint64_t ext, uint32_t pos)
{
	uint32_t rid = kvp_radix_rid_at(w, pos), off = pos - kvp_radix_hdr_of(w, rid)->base, fresh = 0;
	int held = kvp_radix_holds(w, holder, pos), rc = name_at(w, holder, ext, pos);
	KVP_POINT("radix:attach");
	if (!rc)
		rc = kvp_radix_hold(w, rid, holder, off, off + 1, &fresh);
	if (rc && !held)
		kvp_radix_alias_drop(w, holder, pos);
	kvp_radix_count(w, &w->pub->stat.stored, KVP_CTR_RADIX_STORED, fresh);
	if (!rc && !fresh)
		kvp_radix_count(w, &w->pub->stat.duplicate, KVP_CTR_RADIX_DUPLICATE, 1);
	return rc;
}

static int attach_all(struct kvp_radix_w *w, uint32_t holder, uint64_t part_mix, uint32_t n,
	const uint64_t *ext, uint32_t *unknown, uint32_t *full)
{
	for (uint32_t i = 0; i < n; i++) {
		uint32_t pos = known_pos(w, holder, part_mix, ext[i]);
		if (pos == KVP_RADIX_NOPOS)
			++*unknown;
		else
			*full += attach_one(w, holder, ext[i], pos) != KVP_OK;
	}
	return *full ? KVP_ERR_FULL : KVP_OK;
}

int kvp_radix_attach(struct kvp_radix_w *w, uint32_t slot, enum kvp_radix_tier tier, uint64_t part_salt,
	uint32_t n, const uint64_t *ext, uint32_t *unknown)
{
	uint32_t lost = 0, full = 0;
	int rc = KVP_OK;
	if (slot >= w->geo.slot_max || tier == KVP_RADIX_DEVICE || (uint32_t)tier >= KVP_RADIX_TIER_CNT ||
		other_part(w, slot, part_salt)) {
		kvp_radix_count(w, &w->pub->stat.invalid, KVP_CTR_RADIX_INVALID, 1);
		return KVP_ERR_INVAL;
	}
	uint32_t x = holder_of(w, slot, tier);
	uint64_t mix = mix_of(w, part_salt);
	for (uint32_t at = 0; at < n;) {
		uint32_t m = n - at < KVP_RADIX_OP_BLK_MAX ? n - at : KVP_RADIX_OP_BLK_MAX;
		slot_part(w, x, part_salt, mix);
		memcpy(w->op_ext, ext + at, 8ULL * m);
		w->priv->op.part_salt = part_salt;
		op_begin(w, KVP_RADIX_OP_ATTACH, x, m);
		rc = attach_all(w, x, mix, m, ext + at, &lost, &full);
		op_end(w);
		at += m;
	}
	kvp_radix_count(w, &w->pub->stat.unattached, KVP_CTR_RADIX_UNATTACHED, lost);
	if (full)
		kvp_radix_count(w, &w->pub->stat.full, KVP_CTR_RADIX_FULL, full);
	if (unknown)
		*unknown = lost;
	return rc;
}

/* Carries out the operation that a predecessor was killed in. Each is idempotent. */
void kvp_radix_redo(struct kvp_radix_w *w)
{
	const struct kvp_radix_oprec *o = &w->priv->op;
	if (o->slot < w->geo.holder_max && o->n <= KVP_RADIX_OP_BLK_MAX) {
		uint32_t unknown = 0, full = 0;
		struct put p = {.slot = o->slot,
			.n = o->n,
			.local = w->op_local,
			.ext = w->op_ext,
			.part_salt = o->part_salt,
			.part_mix = mix_of(w, o->part_salt)};
		uint32_t pos = KVP_RADIX_NOPOS;
		if (o->op == KVP_RADIX_OP_STORE) {
			slot_part(w, p.slot, p.part_salt, p.part_mix);
			if (o->how == KVP_RADIX_CHILD)
				pos = parent_pos(w, o->slot, o->parent_ext);
			if (o->how == KVP_RADIX_ROOT || pos != KVP_RADIX_NOPOS)
				store_from(w, &p, pos);
		} else if (o->op == KVP_RADIX_OP_REMOVE) {
			remove_all(w, o->slot, o->n, w->op_ext);
		} else if (o->op == KVP_RADIX_OP_CLEAR) {
			clear_all(w, o->slot, w->geo.holder_max);
		} else if (o->op == KVP_RADIX_OP_CLEAR_TIER) {
			clear_all(w, o->slot, o->slot + 1);
		} else if (o->op == KVP_RADIX_OP_ATTACH) {
			slot_part(w, p.slot, p.part_salt, p.part_mix);
			attach_all(w, o->slot, p.part_mix, o->n, w->op_ext, &unknown, &full);
		}
	}
	op_end(w);
}

uint64_t kvp_radix_w_blocks(const struct kvp_radix_w *w, uint32_t slot)
{
	return slot < w->geo.slot_max ? w->slot[slot].blocks : 0;
}

uint64_t kvp_radix_w_tier_blocks(const struct kvp_radix_w *w, uint32_t slot, enum kvp_radix_tier tier)
{
	return slot < w->geo.slot_max && (uint32_t)tier < KVP_RADIX_TIER_CNT
		       ? w->slot[holder_of(w, slot, tier)].blocks
		       : 0;
}

void kvp_radix_w_set_ready(struct kvp_radix_w *w, uint32_t ready)
{
	kvp_st_rel_u32(&w->pub->ready, ready);
}
