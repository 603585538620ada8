#include "shm/radix_priv.h"

#include <string.h>

/* A tour goes depth first over the runs that its slot holds, without a stack: the run at hand and the block
 * in it say where it stands; the links of the tree lead on. When a run is cut, merged or taken out, the tours
 * in it are moved along, so that what a slot holds all the time is met whatever happens between two steps. */

#define OWN_BLK 64	/* blocks in an event whose names have to be collected */
#define LOW_BLK 64u	/* blocks of lower tiers that are told together */
#define LOW_RUN_LOOKS 4 /* what a run costs there */

/* One step of a tour. */
struct step {
	struct kvp_radix_w *w;
	struct kvp_radix_tour *t;
	kvp_radix_tour_fn *fn;
	void *ctx;
	int any; /* something was told in this step */
};

/* A name of a held block, the same one while it is held. */
static uint64_t name_at(const struct kvp_radix_w *w, uint32_t holder, uint32_t pos)
{
	uint32_t a = w->slot[holder].alias_cnt ? kvp_radix_alias_next(w, holder, pos, 0) : 0;
	return a ? w->alias[a - 1].ext : w->ext[pos];
}

/* Tells n blocks of a holder from column position at on. up: the holder that names the parent, at over.
 * Result: blocks taken. */
static uint32_t tell(struct step *s, uint32_t rid, uint32_t holder, uint32_t up, uint32_t over, uint32_t at,
	uint32_t n, const uint64_t *ext)
{
	struct kvp_radix_w *w = s->w;
	struct kvp_radix_dump_event ev = {.slot = holder % w->geo.slot_max,
		.tier = (enum kvp_radix_tier)(holder / w->geo.slot_max),
		.n = n,
		.part_salt = w->run[rid].part_salt,
		.how = over == KVP_RADIX_NOPOS ? KVP_RADIX_ROOT : KVP_RADIX_CHILD,
		.local = w->local + at,
		.ext = ext};
	if (ev.how == KVP_RADIX_CHILD)
		ev.parent_ext = name_at(w, up, over);
	uint32_t took = s->fn(s->ctx, &ev);
	s->any |= took != 0;
	return took < n ? took : n;
}

/* All names of the block at position at; 0 if they were not all taken. */
static int tell_names(struct step *s, uint32_t rid, uint32_t holder, uint32_t up, uint32_t over, uint32_t at)
{
	struct kvp_radix_w *w = s->w;
	uint32_t x = 0;
	while ((x = kvp_radix_alias_next(w, holder, at, x)) != 0)
		if (!tell(s, rid, holder, up, over, at, 1, &w->alias[x - 1].ext))
			return 0;
	return 1;
}

/* Blocks a..b-1 of a run with every name that the holder has for them. Result: blocks told. */
static uint32_t tell_run(struct step *s, uint32_t rid, uint32_t holder, uint32_t up, uint32_t a, uint32_t b)
{
	struct kvp_radix_w *w = s->w;
	uint32_t base = kvp_radix_hdr_of(w, rid)->base, i = a;
	uint64_t own[OWN_BLK];
	if (w->slot[holder].alias_cnt == 0 || !w->run[rid].alias)
		return tell(s, rid, holder, up, a ? base + a - 1 : w->run[rid].parent_pos, base + a, b - a,
			w->ext + base + a);
	while (i < b) {
		uint32_t over = i ? base + i - 1 : w->run[rid].parent_pos, m = 0;
		uint32_t who = i == a ? up : holder;
		while (m < OWN_BLK && i + m < b && kvp_radix_alias_cnt(w, holder, base + i + m) < 2) {
			own[m] = name_at(w, holder, base + i + m);
			m++;
		}
		if (m) {
			uint32_t took = tell(s, rid, holder, who, over, base + i, m, own);
			i += took;
			if (took < m)
				break;
		} else if (tell_names(s, rid, holder, who, over, base + i)) {
			i++;
		} else {
			break;
		}
	}
	return i - a;
}

/* On from a run that is done with or gone: to its next sibling, else to that of the nearest ancestor. */
static void leave(const struct kvp_radix_w *w, struct kvp_radix_tour *t)
{
	uint32_t rid = t->rid;
	while (rid && !w->run[rid].next) {
		rid = kvp_radix_parent_of(w, rid);
		if (t->broken == rid)
			t->broken = 0;
		if (t->fresh == rid)
			t->fresh = 0;
	}
	t->rid = rid ? w->run[rid].next : 0;
	t->off = 0;
}

/* Device blocks of the run at hand. Result: 1 = told, and the tour goes down; 0 = told; AGAIN. */
static int device_run(struct step *s)
{
	struct kvp_radix_w *w = s->w;
	struct kvp_radix_tour *t = s->t;
	uint32_t rid = t->rid, over = w->run[rid].parent_pos;
	const struct kvp_radix_hdr_shm *h = kvp_radix_hdr_of(w, rid);
	uint32_t n = kvp_radix_cover_get(w, h, t->slot);
	if (t->off >= n)
		return n == h->len;
	if (t->off == 0 && over != KVP_RADIX_NOPOS && !kvp_radix_holds(w, t->slot, over))
		return 0;
	int fresh = !s->any;
	uint32_t did = tell_run(s, rid, t->slot, t->slot, t->off, n);
	t->off += did;
	t->told += did;
	if (!did && fresh && w->run[rid].alias)
		t->off++; /* more names than one step can take */
	return t->off < n ? KVP_ERR_AGAIN : n == h->len;
}

/* The holder that names the parent at pos for a child in `own`: one that has told it; NOPOS = nobody holds
 * it. */
static uint32_t namer(const struct kvp_radix_w *w, uint32_t own, uint32_t pos)
{
	uint32_t slot = own % w->geo.slot_max;
	if (pos == KVP_RADIX_NOPOS || kvp_radix_holds(w, own, pos))
		return own;
	for (uint32_t x = slot + w->geo.slot_max; x < w->geo.holder_max; x += w->geo.slot_max)
		if (w->slot[x].blocks && kvp_radix_holds(w, x, pos))
			return x;
	return kvp_radix_holds(w, slot, pos) ? slot : KVP_RADIX_NOPOS;
}

/* Blocks a..b-1 of the tiers in has, in the order in which stretches begin, so that a parent comes before its
 * children. Result: 1 if all were taken; *cnt = number of those in lower tiers. */
static int tell_low(struct step *s, const struct kvp_radix_set *has, uint32_t a, uint32_t b, uint64_t *cnt)
{
	struct kvp_radix_w *w = s->w;
	uint32_t rid = s->t->rid, base = kvp_radix_hdr_of(w, rid)->base, end[KVP_RADIX_TIER_CNT] = {0};
	for (uint32_t i = a; i < b; i++) {
		for (uint32_t t = KVP_RADIX_DEVICE; t < KVP_RADIX_TIER_CNT; t++) {
			if (i < end[t] || !(has[t].w[i >> 6] >> (i & 63) & 1))
				continue;
			uint32_t holder = s->t->slot + t * w->geo.slot_max;
			uint32_t up = namer(w, holder, i ? base + i - 1 : w->run[rid].parent_pos);
			end[t] = kvp_radix_set_next(&has[t], i, b, 0);
			if (up == KVP_RADIX_NOPOS)
				continue;
			if (tell_run(s, rid, holder, up, i, end[t]) < end[t] - i)
				return 0;
			*cnt += t == KVP_RADIX_DEVICE ? 0 : end[t] - i;
		}
	}
	return 1;
}

/* 1 if device blocks of the run at hand may have come since the tour of the device went by: then they, and
 * all below them that it could not reach, are told by this tour, lest children come without them. */
static int came_since(const struct kvp_radix_w *w, const struct kvp_radix_tour *t)
{
	return w->came[t->slot] >= t->since && (t->fresh || w->run[t->rid].came >= t->since);
}

/* Blocks in lower tiers of the run at hand, as far as each follows one that was told in any tier. */
static int low_run(struct step *s)
{
	struct kvp_radix_w *w = s->w;
	struct kvp_radix_tour *t = s->t;
	struct kvp_radix_set has[KVP_RADIX_TIER_CNT] = {{{0}}}, any = {{0}};
	const struct kvp_radix_hdr_shm *h = kvp_radix_hdr_of(w, t->rid);
	uint32_t over = w->run[t->rid].parent_pos, device = kvp_radix_cover_get(w, h, t->slot);
	int came = came_since(w, t);
	if (t->off == 0 && over != KVP_RADIX_NOPOS && namer(w, t->slot, over) == KVP_RADIX_NOPOS)
		return 0;
	if (t->off == 0 && !t->broken && over != KVP_RADIX_NOPOS && !kvp_radix_holds(w, t->slot, over))
		t->broken = kvp_radix_rid_at(w, over); /* its last block went when it had been told */
	if (!t->broken)
		kvp_radix_set_add(&any, 0, device);
	if (came)
		has[KVP_RADIX_DEVICE] = any;
	for (uint32_t x = KVP_RADIX_HOST; x < KVP_RADIX_TIER_CNT; x++) {
		kvp_radix_held_set(w, t->rid, t->slot + x * w->geo.slot_max, &has[x]);
		for (int i = 0; i < KVP_RADIX_SET_WORDS; i++)
			any.w[i] |= has[x].w[i];
	}
	uint32_t reach = kvp_radix_set_next(&any, 0, h->len, 0), blk = w->run[t->rid].alias ? 1 : LOW_BLK;
	while (t->off < reach) {
		uint32_t to = reach - t->off > blk ? t->off + blk : reach;
		uint64_t cnt = 0;
		int fresh = !s->any;
		if (!tell_low(s, has, t->off, to, &cnt) && !fresh)
			return KVP_ERR_AGAIN;
		t->told += cnt;
		t->off = to;
	}
	if (reach < h->len)
		return 0;
	if (!t->broken && device < h->len && w->run[t->rid].child)
		t->broken = t->rid;
	if (!t->fresh && came && w->run[t->rid].child)
		t->fresh = t->rid;
	return 1;
}

/* Blocks that there are to tell, and their partition. */
static uint64_t held(const struct kvp_radix_w *w, uint32_t slot, uint32_t part, uint64_t *part_salt)
{
	uint32_t first = part == KVP_RADIX_TOUR_DEVICE ? slot : slot + w->geo.slot_max;
	uint32_t end = part == KVP_RADIX_TOUR_DEVICE ? slot + 1 : w->geo.holder_max;
	uint64_t blocks = 0;
	if (w->pub->hidden[slot >> 6] >> (slot & 63) & 1)
		return 0; /* it is being cleared */
	for (uint32_t x = first; x < end; x += w->geo.slot_max) {
		*part_salt = w->slot[x].blocks ? w->slot[x].part_salt : *part_salt;
		blocks += w->slot[x].blocks;
	}
	return blocks;
}

/* Takes a tour on; KVP_OK at its end, KVP_ERR_AGAIN. */
static int step(struct step *s, uint32_t budget)
{
	struct kvp_radix_w *w = s->w;
	struct kvp_radix_tour *t = s->t;
	uint64_t part = 0, left = budget;
	if (!held(w, t->slot, t->part, &part))
		return KVP_OK;
	while (t->rid) {
		uint32_t looks = t->part == KVP_RADIX_TOUR_DEVICE ? 1 : LOW_RUN_LOOKS, rid = t->rid;
		if (left < looks)
			return KVP_ERR_AGAIN;
		left -= looks;
		int down = 0;
		if (w->run[rid].part_salt == part)
			down = t->part == KVP_RADIX_TOUR_DEVICE ? device_run(s) : low_run(s);
		if (down < 0)
			return down;
		if (down && w->run[rid].child) {
			t->rid = w->run[rid].child;
			t->off = 0;
		} else {
			leave(w, t);
		}
	}
	return KVP_OK;
}

static struct kvp_radix_tour *tour_of(struct kvp_radix_w *w, uint64_t id)
{
	struct kvp_radix_tour *t = &w->tour[id % KVP_RADIX_TOUR_MAX];
	return id && t->id == id ? t : NULL;
}

uint64_t kvp_radix_tour_begin(
	struct kvp_radix_w *w, uint32_t slot, enum kvp_radix_tour_part part, uint64_t after)
{
	uint64_t first = w->tour_first / KVP_RADIX_TOUR_MAX, since = after / KVP_RADIX_TOUR_MAX;
	if (slot >= w->geo.slot_max)
		return 0;
	uint32_t at = 0;
	for (uint32_t i = 1; i < KVP_RADIX_TOUR_MAX; i++)
		if (w->tour[i].used < w->tour[at].used)
			at = i;
	w->tour_serial = (w->tour_serial / KVP_RADIX_TOUR_MAX + 1) * KVP_RADIX_TOUR_MAX;
	w->tour[at] = (struct kvp_radix_tour){.id = w->tour_serial + at,
		.used = ++w->tour_tick,
		.slot = slot,
		.part = part,
		.since = since > first ? (uint32_t)(since - first) : 0,
		.rid = w->run[0].child};
	w->tour_any = 1;
	w->tour_now++;
	return w->tour[at].id;
}

int kvp_radix_tour_step(struct kvp_radix_w *w, uint64_t id, uint32_t budget, kvp_radix_tour_fn *fn, void *ctx)
{
	struct step s = {.w = w, .t = tour_of(w, id), .fn = fn, .ctx = ctx};
	if (!s.t)
		return KVP_ERR_NOTFOUND;
	s.t->used = ++w->tour_tick;
	s.t->age = 0;
	int rc = step(&s, budget);
	if (rc)
		return rc;
	uint64_t part = 0, blocks = held(w, s.t->slot, s.t->part, &part);
	if (w->ctr && blocks > s.t->told)
		kvp_ctr_add(w->ctr, KVP_CTR_RADIX_HIDDEN, blocks - s.t->told);
	kvp_radix_tour_end(w, id);
	return KVP_OK;
}

void kvp_radix_tour_age(struct kvp_radix_w *w, uint32_t max)
{
	for (uint32_t i = 0; w->tour_any && i < KVP_RADIX_TOUR_MAX; i++)
		if (w->tour[i].id && ++w->tour[i].age > max)
			kvp_radix_tour_end(w, w->tour[i].id);
}

void kvp_radix_tour_end(struct kvp_radix_w *w, uint64_t id)
{
	struct kvp_radix_tour *t = tour_of(w, id);
	if (t)
		memset(t, 0, sizeof(*t));
	w->tour_any = 0;
	for (uint32_t i = 0; i < KVP_RADIX_TOUR_MAX; i++)
		w->tour_any |= w->tour[i].id != 0;
}

/* ---- what the writer tells the tours ---- */

void kvp_radix_tour_gone(struct kvp_radix_w *w, uint32_t rid)
{
	for (uint32_t i = 0; w->tour_any && i < KVP_RADIX_TOUR_MAX; i++)
		if (w->tour[i].rid == rid)
			leave(w, &w->tour[i]);
}

void kvp_radix_tour_cut(struct kvp_radix_w *w, uint32_t head, uint32_t tail, uint32_t len)
{
	for (uint32_t i = 0; w->tour_any && i < KVP_RADIX_TOUR_MAX; i++) {
		struct kvp_radix_tour *t = &w->tour[i];
		int whole = kvp_radix_cover_get(w, kvp_radix_hdr_of(w, head), t->slot) == len;
		if (t->rid == head && t->off > len) {
			t->rid = tail;
			t->off -= len;
			t->broken = t->broken || whole ? t->broken : head;
		} else if (t->broken == head && whole) {
			t->broken = tail;
		}
	}
}

void kvp_radix_tour_merged(struct kvp_radix_w *w, uint32_t head, uint32_t tail, uint32_t len)
{
	for (uint32_t i = 0; w->tour_any && i < KVP_RADIX_TOUR_MAX; i++) {
		struct kvp_radix_tour *t = &w->tour[i];
		if (t->rid == tail) {
			t->rid = head;
			t->off += len;
			t->broken = t->broken == head ? 0 : t->broken;
			t->fresh = t->fresh == head ? 0 : t->fresh;
			continue;
		}
		t->broken = t->broken == tail ? head : t->broken;
		t->fresh = t->fresh == tail ? head : t->fresh;
	}
}

/* ---- names of a prompt ---- */

uint32_t kvp_radix_w_names(const struct kvp_radix_w *w, uint32_t slot, uint64_t part_salt, uint32_t n,
	const uint64_t *local, uint64_t *ext)
{
	uint64_t key = kvp_radix_seed(w->r.key_salt, part_salt);
	uint32_t done = 0;
	while (slot < w->geo.slot_max && done < n) {
		uint32_t rid = kvp_radix_probe(w, kvp_radix_step(w->r.key_salt, key, local[done]));
		if (!rid)
			break;
		const struct kvp_radix_hdr_shm *h = kvp_radix_hdr_of(w, rid);
		uint32_t cover = kvp_radix_cover_get(w, h, slot), j = 0;
		for (; j < cover && done < n && w->local[h->base + j] == local[done]; j++)
			ext[done++] = name_at(w, slot, h->base + j);
		if (j < h->len)
			break;
		key = h->last;
	}
	return done;
}

/* ---- everything at once ---- */

struct whole {
	kvp_radix_dump_fn *fn;
	void *ctx;
	int rc;
};

static uint32_t hand_over(void *ctx, const struct kvp_radix_dump_event *ev)
{
	struct whole *x = ctx;
	x->rc = x->rc ? x->rc : x->fn(x->ctx, ev);
	return x->rc ? 0 : ev->n;
}

/* Everything of one rank; *hid += what was left out. */
static int dump_rank(struct kvp_radix_w *w, uint32_t slot, struct whole *x, uint64_t *hid)
{
	for (uint32_t part = KVP_RADIX_TOUR_DEVICE; part <= KVP_RADIX_TOUR_LOW; part++) {
		struct kvp_radix_tour t = {
			.slot = slot, .part = part, .since = UINT32_MAX, .rid = w->run[0].child};
		struct step s = {.w = w, .t = &t, .fn = hand_over, .ctx = x};
		uint64_t salt = 0;
		while (step(&s, UINT32_MAX) == KVP_ERR_AGAIN && !x->rc)
			;
		if (x->rc)
			return x->rc;
		*hid += held(w, slot, part, &salt) - t.told;
	}
	return KVP_OK;
}

int kvp_radix_w_dump(struct kvp_radix_w *w, uint32_t slot, kvp_radix_dump_fn *fn, void *ctx, uint64_t *hidden)
{
	uint32_t first = slot == KVP_RADIX_SLOT_ALL ? 0 : slot;
	uint32_t end = slot == KVP_RADIX_SLOT_ALL ? w->geo.slot_max : slot + 1;
	struct whole x = {.fn = fn, .ctx = ctx};
	uint64_t hid = 0;
	if (end > w->geo.slot_max || !fn)
		return KVP_ERR_INVAL;
	for (uint32_t s = first; s < end; s++) {
		int rc = dump_rank(w, s, &x, &hid);
		if (rc)
			return rc;
	}
	if (hidden)
		*hidden = hid;
	return KVP_OK;
}
