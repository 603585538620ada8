#include "shm/affinity.h"

#include <kvpick/point.h>
#include <stdio.h>
#include <string.h>
#include <xxhash.h>

#define MAGIC 0x314e49464641ULL /* "AFFIN1" */
#define LAYOUT 1
#define TRIES 20000

/* Words; entries are numbered from 1, 0 = none. */
enum { G_FREE, G_BUMP, G_PART };
enum {
	A_STATE, /* enum state | owner << 8 */
	A_LINK,	 /* next in the bucket, or next free */
	A_LO,	 /* key */
	A_HI,
	A_WORKER,
	A_RANK,	 /* partition 32 | rank 32 */
	A_LEASE, /* nonce 32 | leases 32 */
	A_TIME,	 /* of the last commit or return; when the initialisation began */
	A_WORDS
};
enum state { S_FREE, S_INIT, S_BOUND };
#define PAIR(hi, lo) ((uint64_t)(hi) << 32 | (uint32_t)(lo))
#define HI32(v) ((uint32_t)((v) >> 32))
#define LO32(v) ((uint32_t)(v))

struct kvp_affinity_shm {
	struct kvp_objhdr hdr;
	uint64_t max, bucket_cnt, part_max, ttl_ns, hold_ns, word_off, pad[10];
	uint64_t cursor; /* of the reaper, counts up */
	uint64_t pad2[15];
	uint64_t waiting[KVP_SLOT_MAX / 64];
	uint64_t pad3[13];
	struct kvp_txn_shm txn __attribute__((aligned(128)));
};

struct plan {
	uint64_t bucket_cnt, word_cnt, word_off, total;
};

static uint32_t layout_hash(void)
{
	const size_t w[] = {sizeof(struct kvp_affinity_shm), offsetof(struct kvp_affinity_shm, waiting),
		offsetof(struct kvp_affinity_shm, txn), G_PART, A_WORDS};
	return kvp_obj_hash(w, sizeof(w) / sizeof(w[0]));
}

static int plan_of(const struct kvp_geom *g, struct plan *l)
{
	if (!g || g->affinity_max > KVP_AFFINITY_MAX || g->part_max > KVP_PART_MAX)
		return KVP_ERR_INVAL;
	l->bucket_cnt = 1;
	while (l->bucket_cnt < g->affinity_max)
		l->bucket_cnt *= 2;
	l->word_cnt = G_PART + g->part_max + l->bucket_cnt + (uint64_t)g->affinity_max * A_WORDS;
	l->word_off = kvp_align_up(sizeof(struct kvp_affinity_shm), KVP_PAGE);
	l->total = l->word_off + l->word_cnt * sizeof(struct kvp_u128);
	return KVP_OK;
}

uint64_t kvp_affinity_align(void)
{
	return KVP_PAGE;
}

uint64_t kvp_affinity_footprint(const struct kvp_geom *g)
{
	struct plan l;
	return plan_of(g, &l) ? 0 : l.total;
}

int kvp_affinity_new(void *mem, const struct kvp_geom *g)
{
	struct plan l;
	if (!mem || ((uintptr_t)mem & (KVP_CACHE_LINE - 1)) || plan_of(g, &l))
		return KVP_ERR_INVAL;
	struct kvp_affinity_shm *s = mem;
	kvp_obj_begin(&s->hdr, LAYOUT, layout_hash(), l.total, g->region_gen);
	s->max = g->affinity_max;
	s->bucket_cnt = l.bucket_cnt;
	s->part_max = g->part_max;
	s->ttl_ns = g->affinity_ttl_ns;
	s->hold_ns = g->affinity_hold_ns;
	s->word_off = l.word_off;
	kvp_obj_ready(&s->hdr, MAGIC);
	return KVP_OK;
}

int kvp_affinity_join(void *mem, const struct kvp_geom *g, struct kvp_affinity *out)
{
	struct kvp_affinity_shm *s = mem;
	struct plan l;
	int rc = kvp_obj_join(mem, MAGIC, LAYOUT, layout_hash());
	if (rc)
		return rc;
	if (plan_of(g, &l) || s->hdr.footprint != l.total || s->max != g->affinity_max ||
		s->bucket_cnt != l.bucket_cnt || s->part_max != g->part_max || s->word_off != l.word_off)
		return KVP_ERR_LAYOUT;
	*out = (struct kvp_affinity){.shm = s,
		.txn = {&s->txn, (struct kvp_u128 *)(void *)((uint8_t *)mem + l.word_off), l.word_cnt},
		.ttl_ns = s->ttl_ns,
		.hold_ns = s->hold_ns,
		.salt = {g->salt[0], g->salt[1]},
		.max = g->affinity_max,
		.bucket_cnt = (uint32_t)l.bucket_cnt,
		.part_max = g->part_max};
	return KVP_OK;
}

void kvp_affinity_leave(struct kvp_affinity *a)
{
	memset(a, 0, sizeof(*a));
}

int kvp_affinity_delete(void *mem)
{
	if (!mem)
		return KVP_ERR_INVAL;
	kvp_obj_delete(mem);
	return KVP_OK;
}

void kvp_affinity_attach(struct kvp_affinity *a, kvp_owner owner, struct kvp_ctr_column_shm *ctr)
{
	a->owner = owner;
	a->ctr = ctr;
}

struct kvp_affinity_key kvp_affinity_key(
	const struct kvp_affinity *a, uint32_t part, const char *session, size_t len)
{
	XXH128_hash_t x = XXH3_128bits_withSeed(session, len, a->salt[1] ^ ((uint64_t)part << 32 | part));
	return (struct kvp_affinity_key){x.low64 ^ a->salt[0], x.high64 ^ a->salt[1], part};
}

/* ---- steps inside one attempt ---- */

static uint64_t w_of(const struct kvp_affinity *a, uint64_t e, uint32_t field)
{
	return G_PART + (uint64_t)a->part_max + a->bucket_cnt + (e - 1) * A_WORDS + field;
}
static uint64_t bucket_of(const struct kvp_affinity *a, uint64_t lo)
{
	return G_PART + (uint64_t)a->part_max + ((lo >> 8) & (a->bucket_cnt - 1));
}
static uint64_t get(const struct kvp_affinity *a, struct kvp_txn_try *x, uint64_t w)
{
	return kvp_txn_get(&a->txn, x, w);
}
static void set(const struct kvp_affinity *a, struct kvp_txn_try *x, uint64_t w, uint64_t v)
{
	kvp_txn_set(&a->txn, x, w, v);
}
static void count(const struct kvp_affinity *a, enum kvp_ctr id, uint64_t n)
{
	if (a->ctr && n)
		kvp_ctr_add(a->ctr, id, n);
}

static int in_range(const struct kvp_affinity *a, struct kvp_txn_try *x, uint64_t e)
{
	x->torn |= e == 0 || e > a->max;
	return !x->torn;
}

static uint32_t find(const struct kvp_affinity *a, struct kvp_txn_try *x, struct kvp_affinity_key k)
{
	uint64_t e = get(a, x, bucket_of(a, k.lo));
	for (uint32_t i = 0; e && i <= a->max && in_range(a, x, e); i++) {
		if (get(a, x, w_of(a, e, A_LO)) == k.lo && get(a, x, w_of(a, e, A_HI)) == k.hi && !x->torn)
			return (uint32_t)e;
		e = get(a, x, w_of(a, e, A_LINK));
	}
	return 0;
}

static enum state state_of(const struct kvp_affinity *a, struct kvp_txn_try *x, uint64_t e)
{
	return (enum state)(get(a, x, w_of(a, e, A_STATE)) & 0xff);
}

static int is_past(const struct kvp_affinity *a, struct kvp_txn_try *x, uint64_t e, uint64_t now_ns)
{
	uint64_t time = get(a, x, w_of(a, e, A_TIME)), age = now_ns > time ? now_ns - time : 0;
	uint64_t hold = LO32(get(a, x, w_of(a, e, A_LEASE))) ? a->hold_ns : 0;
	return age > a->ttl_ns && age - a->ttl_ns > hold;
}

/* visible: the bound entry of a key that is not past its time, 0 = none. */
static uint32_t visible(
	const struct kvp_affinity *a, struct kvp_txn_try *x, struct kvp_affinity_key k, uint64_t now_ns)
{
	uint32_t e = find(a, x, k);
	return e && state_of(a, x, e) == S_BOUND && !is_past(a, x, e, now_ns) ? e : 0;
}

static struct kvp_affinity_target target_of(const struct kvp_affinity *a, struct kvp_txn_try *x, uint64_t e)
{
	return (struct kvp_affinity_target){
		get(a, x, w_of(a, e, A_WORKER)), LO32(get(a, x, w_of(a, e, A_RANK)))};
}

static int same(struct kvp_affinity_target p, struct kvp_affinity_target q)
{
	return p.worker_id == q.worker_id && p.dp_rank == q.dp_rank;
}

static uint64_t tag_of(const struct kvp_affinity *a, struct kvp_txn_try *x, uint64_t e)
{
	return PAIR(e, HI32(get(a, x, w_of(a, e, A_LEASE))));
}

/* make takes an entry for k out of the pool and links it, 0 = no room. */
static uint32_t make(const struct kvp_affinity *a, struct kvp_txn_try *x, struct kvp_affinity_key k)
{
	uint64_t e = get(a, x, G_FREE), bump = get(a, x, G_BUMP);
	if (k.part >= a->part_max)
		return 0;
	uint64_t n = get(a, x, G_PART + k.part), bucket = bucket_of(a, k.lo);
	if (x->torn || n >= KVP_AFFINITY_PART_MAX || (!e && bump >= a->max))
		return 0;
	if (e && in_range(a, x, e)) {
		set(a, x, G_FREE, get(a, x, w_of(a, e, A_LINK)));
	} else {
		e = bump + 1;
		set(a, x, G_BUMP, e);
	}
	set(a, x, G_PART + k.part, n + 1);
	set(a, x, w_of(a, e, A_LINK), get(a, x, bucket));
	set(a, x, bucket, e);
	set(a, x, w_of(a, e, A_LO), k.lo);
	set(a, x, w_of(a, e, A_HI), k.hi);
	set(a, x, w_of(a, e, A_RANK), PAIR(k.part, 0));
	return x->torn ? 0 : (uint32_t)e;
}

static void removal(const struct kvp_affinity *a, struct kvp_txn_try *x, uint64_t e)
{
	if (!in_range(a, x, e))
		return;
	uint64_t at = bucket_of(a, get(a, x, w_of(a, e, A_LO)));
	for (uint32_t i = 0; i <= a->max && !x->torn; i++) {
		uint64_t next = get(a, x, at);
		if (next == e)
			break;
		if (!in_range(a, x, next))
			return;
		at = w_of(a, next, A_LINK);
	}
	set(a, x, at, get(a, x, w_of(a, e, A_LINK)));
	uint64_t part = G_PART + HI32(get(a, x, w_of(a, e, A_RANK)));
	set(a, x, part, get(a, x, part) - 1);
	set(a, x, w_of(a, e, A_STATE), S_FREE);
	set(a, x, w_of(a, e, A_LEASE), 0);
	set(a, x, w_of(a, e, A_LINK), get(a, x, G_FREE));
	set(a, x, G_FREE, e);
}

/* become_init gives an entry to the caller for initialisation, as a binding with a name of its own. */
static void become_init(const struct kvp_affinity *a, struct kvp_txn_try *x, uint64_t e, uint64_t now_ns)
{
	set(a, x, w_of(a, e, A_STATE), S_INIT | (uint64_t)a->owner << 8);
	set(a, x, w_of(a, e, A_LEASE), PAIR((uint32_t)(x->seq + 1), 0));
	set(a, x, w_of(a, e, A_TIME), now_ns);
}

static void become_bound(const struct kvp_affinity *a, struct kvp_txn_try *x, uint64_t e,
	struct kvp_affinity_target at, uint64_t now_ns)
{
	uint64_t lease = get(a, x, w_of(a, e, A_LEASE));
	uint32_t part = HI32(get(a, x, w_of(a, e, A_RANK)));
	set(a, x, w_of(a, e, A_STATE), S_BOUND);
	set(a, x, w_of(a, e, A_WORKER), at.worker_id);
	set(a, x, w_of(a, e, A_RANK), PAIR(part, at.dp_rank));
	set(a, x, w_of(a, e, A_LEASE), PAIR(HI32(lease), LO32(lease) + 1));
	set(a, x, w_of(a, e, A_TIME), now_ns);
}

/* ---- calls ---- */

int kvp_affinity_query(const struct kvp_affinity *a, struct kvp_affinity_key k, uint64_t now_ns,
	struct kvp_affinity_target *out)
{
	struct kvp_txn_try x;
	for (int i = 0; i < TRIES; i++) {
		if (kvp_txn_begin(&a->txn, &x))
			continue;
		uint32_t e = visible(a, &x, k, now_ns);
		struct kvp_affinity_target t = e ? target_of(a, &x, e) : (struct kvp_affinity_target){0, 0};
		if (x.torn)
			continue;
		if (e)
			*out = t;
		return e ? KVP_OK : KVP_ERR_NOTFOUND;
	}
	return KVP_ERR_AGAIN;
}

int kvp_affinity_busy(const struct kvp_affinity *a, struct kvp_affinity_key k)
{
	struct kvp_txn_try x;
	for (int i = 0; i < TRIES; i++) {
		if (kvp_txn_begin(&a->txn, &x))
			continue;
		uint32_t e = find(a, &x, k);
		int is_init = e && state_of(a, &x, e) == S_INIT;
		if (!x.torn)
			return is_init;
	}
	return 0;
}

int kvp_affinity_hold(struct kvp_affinity *a, struct kvp_affinity_key k, uint64_t now_ns,
	const struct kvp_affinity_target *gone, struct kvp_affinity_hold *hold)
{
	struct kvp_txn_try x;
	for (int i = 0; i < TRIES; i++) {
		if (kvp_txn_begin(&a->txn, &x))
			continue;
		uint32_t e = find(a, &x, k);
		enum state s = e ? state_of(a, &x, e) : S_FREE;
		struct kvp_affinity_hold h = {KVP_AFFINITY_INIT, {0, 0}, 0};
		if (s == S_INIT && !x.torn)
			return KVP_ERR_EXISTS;
		if (s == S_BOUND && !is_past(a, &x, e, now_ns)) {
			h.target = target_of(a, &x, e);
			h.tag = tag_of(a, &x, e);
			h.kind = gone && same(h.target, *gone) ? KVP_AFFINITY_INIT : KVP_AFFINITY_BOUND;
		} else if (!e) {
			e = make(a, &x, k);
			h.kind = e ? KVP_AFFINITY_INIT : KVP_AFFINITY_UNPINNED;
		}
		if (x.torn)
			continue;
		if (h.kind == KVP_AFFINITY_INIT) {
			become_init(a, &x, e, now_ns);
			h.tag = tag_of(a, &x, e);
		}
		if (kvp_txn_commit(&a->txn, &x, a->owner) == KVP_OK) {
			count(a, KVP_CTR_AFFINITY_FULL, h.kind == KVP_AFFINITY_UNPINNED);
			count(a, KVP_CTR_AFFINITY_INIT, h.kind == KVP_AFFINITY_INIT);
			KVP_POINT("affinity:held");
			*hold = h;
			return KVP_OK;
		}
	}
	return KVP_ERR_AGAIN;
}

void kvp_affinity_cancel(
	struct kvp_affinity *a, struct kvp_affinity_key k, const struct kvp_affinity_hold *hold)
{
	struct kvp_txn_try x;
	for (int i = 0; i < TRIES && hold->kind == KVP_AFFINITY_INIT; i++) {
		if (kvp_txn_begin(&a->txn, &x))
			continue;
		uint32_t e = find(a, &x, k);
		if (x.torn)
			continue;
		if (!e || state_of(a, &x, e) != S_INIT || tag_of(a, &x, e) != hold->tag)
			return;
		removal(a, &x, e);
		if (kvp_txn_commit(&a->txn, &x, a->owner) == KVP_OK)
			return;
	}
}

int kvp_affinity_commit(struct kvp_affinity *a, struct kvp_affinity_key k, struct kvp_affinity_target at,
	enum kvp_affinity_mode mode, enum kvp_affinity_force force, uint64_t now_ns, uint64_t *tag,
	struct kvp_affinity_target *other)
{
	struct kvp_txn_try x;
	for (int i = 0; i < TRIES; i++) {
		if (kvp_txn_begin(&a->txn, &x))
			continue;
		uint32_t e = find(a, &x, k);
		struct kvp_affinity_target bound = {0, 0};
		int elsewhere = 0, past = 0;
		if (e && state_of(a, &x, e) == S_BOUND) {
			bound = target_of(a, &x, e);
			past = is_past(a, &x, e, now_ns);
			elsewhere = !past && !same(bound, at);
		}
		if (x.torn)
			continue;
		int dead = force == KVP_AFFINITY_REPLACE && same(bound, *other);
		if (elsewhere && !dead && mode == KVP_AFFINITY_IS_HARD) {
			*other = bound;
			return KVP_ERR_EXISTS;
		}
		if (!e)
			e = make(a, &x, k);
		if (!e && !x.torn) {
			*tag = 0;
			return KVP_OK;
		}
		/* A binding that starts anew forgets the leases of the old one. */
		if (e && !x.torn && (past || (elsewhere && dead) || state_of(a, &x, e) == S_FREE))
			become_init(a, &x, e, now_ns);
		if (e && !x.torn)
			become_bound(a, &x, e, at, now_ns);
		uint64_t t = e && !x.torn ? tag_of(a, &x, e) : 0;
		if (kvp_txn_commit(&a->txn, &x, a->owner) == KVP_OK) {
			count(a, KVP_CTR_AFFINITY_BOUND, 1);
			KVP_POINT("affinity:committed");
			*tag = t;
			return KVP_OK;
		}
	}
	return KVP_ERR_AGAIN;
}

void kvp_affinity_drop(struct kvp_affinity *a, struct kvp_affinity_key k, struct kvp_affinity_target at)
{
	struct kvp_txn_try x;
	for (int i = 0; i < TRIES; i++) {
		if (kvp_txn_begin(&a->txn, &x))
			continue;
		uint32_t e = find(a, &x, k);
		if (x.torn)
			continue;
		if (!e || state_of(a, &x, e) != S_BOUND || !same(target_of(a, &x, e), at))
			return;
		removal(a, &x, e);
		if (kvp_txn_commit(&a->txn, &x, a->owner) == KVP_OK)
			return;
	}
}

void kvp_affinity_release(struct kvp_affinity *a, uint64_t tag, uint64_t now_ns)
{
	struct kvp_txn_try x;
	uint32_t e = HI32(tag);
	for (int i = 0; i < TRIES && e && e <= a->max; i++) {
		if (kvp_txn_begin(&a->txn, &x))
			continue;
		uint64_t lease = get(a, &x, w_of(a, e, A_LEASE));
		enum state s = state_of(a, &x, e);
		if (x.torn)
			continue;
		if (s != S_BOUND || HI32(lease) != LO32(tag) || LO32(lease) == 0)
			return;
		set(a, &x, w_of(a, e, A_LEASE), lease - 1);
		if (LO32(lease) == 1)
			set(a, &x, w_of(a, e, A_TIME), now_ns);
		if (kvp_txn_commit(&a->txn, &x, a->owner) == KVP_OK)
			return;
	}
}

uint32_t kvp_affinity_used(const struct kvp_affinity *a)
{
	uint64_t used = a->max ? kvp_ld_acq_u64(&a->txn.word[G_BUMP].lo) : 0;
	return (uint32_t)(used < a->max ? used : a->max);
}

static int reap_one(struct kvp_affinity *a, uint64_t e, uint64_t now_ns)
{
	struct kvp_txn_try x;
	for (int i = 0; i < TRIES; i++) {
		if (kvp_txn_begin(&a->txn, &x))
			continue;
		int past = state_of(a, &x, e) == S_BOUND && is_past(a, &x, e, now_ns);
		if (x.torn)
			continue;
		if (!past)
			return 0;
		removal(a, &x, e);
		if (kvp_txn_commit(&a->txn, &x, a->owner) == KVP_OK)
			return 1;
	}
	return 0;
}

uint32_t kvp_affinity_reap(struct kvp_affinity *a, uint64_t now_ns, uint32_t max)
{
	uint32_t used = kvp_affinity_used(a), cnt = 0;
	if (used == 0 || max == 0)
		return 0;
	max = max < used ? max : used;
	uint64_t from = kvp_faa_ar_u64(&a->shm->cursor, max);
	for (uint64_t i = from; i < from + max; i++)
		cnt += (uint32_t)reap_one(a, i % used + 1, now_ns);
	count(a, KVP_CTR_AFFINITY_REAPED, cnt);
	return cnt;
}

int kvp_affinity_wait(struct kvp_affinity *a, uint32_t slot)
{
	uint64_t *w = &a->shm->waiting[slot / 64 % (KVP_SLOT_MAX / 64)], bit = 1ULL << (slot % 64), old;
	do {
		old = kvp_ld_acq_u64(w);
		if (old & bit)
			return 0; /* whoever ends one takes it after this, and wakes */
	} while (!kvp_cas_ar_u64(w, old, old | bit));
	/* pairs with: the commit before kvp_affinity_waiting; both are full barriers, so one sees the
	 * other */
	return 1;
}

int kvp_affinity_waiting(struct kvp_affinity *a, uint32_t *slot)
{
	for (uint32_t i = 0; i < KVP_SLOT_MAX / 64; i++) {
		uint64_t *w = &a->shm->waiting[i], old;
		while ((old = kvp_ld_acq_u64(w)) != 0)
			if (kvp_cas_ar_u64(w, old, old & (old - 1))) {
				*slot = i * 64 + (uint32_t)__builtin_ctzll(old);
				return 1;
			}
	}
	return 0;
}

uint32_t kvp_affinity_sweep_owner(struct kvp_affinity *a, kvp_owner dead)
{
	uint32_t cnt = 0, used = kvp_affinity_used(a);
	kvp_txn_sweep_owner(&a->txn, dead);
	for (uint64_t e = 1; e <= used; e++) {
		struct kvp_txn_try x;
		for (int i = 0; i < TRIES; i++) {
			if (kvp_txn_begin(&a->txn, &x))
				continue;
			uint64_t s = get(a, &x, w_of(a, e, A_STATE));
			if (!x.torn && s != (S_INIT | (uint64_t)dead << 8))
				break;
			removal(a, &x, e);
			if (kvp_txn_commit(&a->txn, &x, a->owner) == KVP_OK) {
				cnt++;
				break;
			}
		}
	}
	return cnt;
}

uint64_t kvp_affinity_cnt(const struct kvp_affinity *a, uint32_t part)
{
	return part < a->part_max ? kvp_ld_acq_u64(&a->txn.word[G_PART + part].lo) : 0;
}

uint64_t kvp_affinity_check(const struct kvp_affinity *a)
{
	struct kvp_txn_try x;
	uint64_t faults = kvp_txn_check(&a->txn), live = 0, counted = 0, linked = 0, free_cnt = 0;
	if (kvp_txn_look(&a->txn, &x))
		return faults;
	uint64_t used = get(a, &x, G_BUMP);
	for (uint64_t e = 1; e <= used && e <= a->max; e++)
		live += state_of(a, &x, e) != S_FREE;
	for (uint32_t p = 0; p < a->part_max; p++)
		counted += get(a, &x, G_PART + p);
	for (uint32_t b = 0; b < a->bucket_cnt; b++)
		for (uint64_t e = get(a, &x, G_PART + (uint64_t)a->part_max + b);
			e && e <= used && linked <= used; linked++)
			e = get(a, &x, w_of(a, e, A_LINK));
	for (uint64_t e = get(a, &x, G_FREE); e && e <= used && free_cnt <= used; free_cnt++)
		e = get(a, &x, w_of(a, e, A_LINK));
	if (used > a->max || live != counted || live != linked || live + free_cnt != used || x.torn) {
		fprintf(stderr, "affinity: used %llu live %llu counted %llu linked %llu free %llu\n",
			(unsigned long long)used, (unsigned long long)live, (unsigned long long)counted,
			(unsigned long long)linked, (unsigned long long)free_cnt);
		faults++;
	}
	return faults;
}
