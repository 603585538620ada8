/* tests/torture/radix_oracle.h — what a tree is compared with while its writer works and dies: the intended
 * state of every slot and tier, each slot's under a sequence word. Even groups of slots hold blocks in every
 * tier, odd ones on their devices only. A slot whose sequence word did not change during a lookup was not
 * touched, so its depths in every tier must be exact, whatever happened to other slots of the same runs
 * meanwhile; any depth of a touched slot or of a walk that gave up must be within what the slot can hold, and
 * slots of other groups must not show at all. */
#ifndef KVP_TESTS_RADIX_ORACLE_H
#define KVP_TESTS_RADIX_ORACLE_H

#include "tests/radix_model.h"
#include "tests/tap.h"

#include <sys/prctl.h>
#include <signal.h>
#include <time.h>

#define GROUPS 4
#define CHAINS 8  /* in a group; they share the first blocks */
#define SHARED 24 /* blocks */
#define CHAIN_LEN 320
#define SLOTS (GROUPS * CHAINS * 2)
#define HELD_WORDS (CHAIN_LEN / 64)
#define PART 77
#define READERS 2
#define TIERS KVP_RADIX_TIER_CNT

struct oracle_slot {
	uint32_t seq;			  /* odd while the writer works on the slot */
	uint32_t end[TIERS], next[TIERS]; /* where a walk of its chain ends in each tier, from block 0 */
	uint64_t held[TIERS][HELD_WORDS];
} __attribute__((aligned(128)));
struct tally {
	uint64_t queries, exact, exact_low, retries, gave_up, wrong, slowest_ns;
} __attribute__((aligned(128)));
struct oracle {
	struct oracle_slot slot[SLOTS];
	struct tally reader[READERS];
	uint32_t stop;
	uint64_t ops, recovered, redone, undone, repeated, opens, merged, merges;
};

static struct kvp_geom geom = {.slot_max = 8,
	.rank_max = 64,
	.index_rank_max = 256,
	.block_max = 20000,
	.region_gen = 3,
	.salt = {5, 6}};
static struct seg seg;
static struct oracle *oracle;

static uint64_t local_of(uint32_t chain, uint32_t i)
{
	struct rng r = {i < SHARED ? chain / CHAINS : 1000 + chain};
	r.s += (uint64_t)i << 32;
	return rnd(&r);
}
static uint64_t ext_of(uint32_t slot, uint32_t i) /* the two holders of a chain hash differently */
{
	return local_of(slot / 2, i) ^ (slot & 1 ? 0xabcdef : 0x123456);
}
static uint32_t idx_of(uint32_t slot)
{
	return slot * 4 + 1;
}

static uint64_t now(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* ---- writer ---- */

static int is_held(const uint64_t *held, uint32_t i)
{
	return (int)(held[i >> 6] >> (i & 63) & 1);
}

/* Tier by tier, each from where the one before it ends. */
static void find_ends(uint64_t held[][HELD_WORDS], uint32_t *end)
{
	for (uint32_t t = 0, d = 0; t < TIERS; t++) {
		while (d < CHAIN_LEN && is_held(held[t], d))
			d++;
		end[t] = d;
	}
}

static void set_held(uint64_t *held, uint32_t a, uint32_t b, int on)
{
	for (; a < b; a++)
		held[a >> 6] = on ? held[a >> 6] | 1ULL << (a & 63) : held[a >> 6] & ~(1ULL << (a & 63));
}

/* The parent of a device block is on the device, that of another block anywhere. */
static int can_follow(uint64_t held[][HELD_WORDS], uint32_t t, uint32_t i)
{
	int yes = is_held(held[0], i);
	for (uint32_t u = 1; u < TIERS && t; u++)
		yes |= is_held(held[u], i);
	return yes;
}

enum kind { STORE, ATTACH, REMOVE, CLEAR_TIER, CLEAR };
struct change {
	enum kind kind;
	uint32_t tier, from, n;
};

static enum kind any_kind(struct rng *r)
{
	uint32_t x = rnd_below(r, 32);
	return x < 18 ? STORE : x < 30 ? REMOVE : x < 31 ? CLEAR_TIER : CLEAR;
}

/* What to do, and what the slot holds then. */
static struct change plan(struct rng *r, uint32_t s, uint64_t held[][HELD_WORDS], const uint32_t *end)
{
	struct change c = {any_kind(r), 0, 0, 1 + rnd_below(r, rnd_below(r, 3) ? 40 : CHAIN_LEN)};
	if (s / 2 / CHAINS % 2 == 0 && rnd_below(r, 2))
		c.tier = 1 + rnd_below(r, TIERS - 1);
	if (c.kind == STORE) { /* under a held block, or at the root */
		c.from = rnd_below(r, 3) ? end[c.tier] : rnd_below(r, CHAIN_LEN);
		while (c.from && !can_follow(held, c.tier, c.from - 1))
			c.from--;
	} else if (c.kind == REMOVE) { /* a stretch: the tail mostly */
		c.from = rnd_below(r, 4) && end[c.tier] > c.n ? end[c.tier] - c.n : rnd_below(r, CHAIN_LEN);
	}
	c.n = c.n < CHAIN_LEN - c.from ? c.n : CHAIN_LEN - c.from;
	/* What the device holds may also be told to a lower tier by its hashes only. */
	int known = c.kind == STORE && c.tier && c.n && rnd_below(r, 2);
	for (uint32_t i = 0; i < c.n && known; i++)
		known = can_follow(held, c.tier, c.from + i);
	c.kind = known ? ATTACH : c.kind;
	if (c.kind <= REMOVE)
		set_held(held[c.tier], c.from, c.from + c.n, c.kind != REMOVE);
	for (uint32_t t = 0; t < TIERS; t++)
		if (c.kind == CLEAR || (c.kind == CLEAR_TIER && t == c.tier))
			memset(held[t], 0, sizeof(held[t]));
	return c;
}

static int carry_out(struct kvp_radix_w *w, uint32_t s, const struct change *c)
{
	uint64_t local[CHAIN_LEN], ext[CHAIN_LEN];
	enum kvp_radix_tier t = (enum kvp_radix_tier)c->tier;
	for (uint32_t i = 0; i < c->n; i++) {
		uint32_t at = c->kind == REMOVE ? c->from + c->n - 1 - i : c->from + i;
		local[i] = local_of(s / 2, at);
		ext[i] = ext_of(s, at);
	}
	if (c->kind == CLEAR)
		return kvp_radix_clear(w, idx_of(s));
	if (c->kind == CLEAR_TIER)
		return kvp_radix_clear_tier(w, idx_of(s), t);
	if (c->n == 0)
		return KVP_OK;
	if (c->kind == REMOVE)
		return kvp_radix_remove_tier(w, idx_of(s), t, c->n, ext, NULL);
	uint32_t unknown = 0;
	if (c->kind == ATTACH && kvp_radix_attach(w, idx_of(s), t, PART, c->n, ext, &unknown))
		return KVP_ERR_FULL;
	if (c->kind == ATTACH)
		return unknown ? KVP_ERR_NOTFOUND : KVP_OK;
	return kvp_radix_store_tier(w, idx_of(s), t, PART, c->from ? KVP_RADIX_CHILD : KVP_RADIX_ROOT,
		c->from ? ext_of(s, c->from - 1) : 0, c->n, local, ext, NULL);
}

static void copy_ends(uint32_t *to, const uint32_t *from)
{
	for (uint32_t t = 0; t < TIERS; t++)
		kvp_st_rel_u32(&to[t], from[t]);
}

/* One change of one slot: the intended state first, then the tree, then the oracle. */
static int change(struct kvp_radix_w *w, struct rng *r, uint32_t s)
{
	struct oracle_slot *o = &oracle->slot[s];
	uint64_t held[TIERS][HELD_WORDS];
	uint32_t next[TIERS];
	memcpy(held, o->held, sizeof(held));
	struct change c = plan(r, s, held, o->end);
	find_ends(held, next);
	copy_ends(o->next, next);
	kvp_st_sc_u32(&o->seq, o->seq + 1);
	int rc = carry_out(w, s, &c);
	memcpy(o->held, held, sizeof(held));
	copy_ends(o->end, next);
	kvp_st_sc_u32(&o->seq, o->seq + 1);
	return rc;
}

/* Where the match ends in each tier. */
static void ends_of(const struct kvp_radix_match *m, uint32_t idx, uint32_t *end)
{
	end[0] = m->active[idx >> 6] >> (idx & 63) & 1 ? m->depth[idx] : 0;
	for (uint32_t t = 1; t < TIERS; t++)
		end[t] = end[t - 1] + kvp_radix_match_ext(m, (enum kvp_radix_tier)t, idx);
}

static void look_up(const struct kvp_radix *r, uint32_t s, struct kvp_radix_match *m, uint32_t *end)
{
	uint64_t local[CHAIN_LEN];
	for (uint32_t i = 0; i < CHAIN_LEN; i++)
		local[i] = local_of(s / 2, i);
	struct kvp_radix_query q = {PART, local, CHAIN_LEN, CHAIN_LEN, NULL, NULL};
	kvp_radix_find(r, &q, m);
	ends_of(m, idx_of(s), end);
}

/* The predecessor died in a change of this slot: it has happened or not; begin anew. This writer may die here
 * as well. */
static void begin_anew(struct kvp_radix_w *w, struct oracle_slot *o, uint32_t s, const uint32_t *is)
{
	static const uint32_t none[TIERS];
	copy_ends(o->end, is);
	copy_ends(o->next, none);
	kvp_radix_clear(w, idx_of(s));
	memset(o->held, 0, sizeof(o->held));
	copy_ends(o->end, none);
	kvp_st_sc_u32(&o->seq, o->seq + 1);
	oracle->recovered++;
}

/* Is every slot what it was, or what it should become? Exit code, 0 = yes. */
static int settle(struct kvp_radix_w *w, const struct kvp_radix *r)
{
	static struct kvp_radix_match m;
	for (uint32_t s = 0; s < SLOTS; s++) {
		struct oracle_slot *o = &oracle->slot[s];
		uint32_t is[TIERS];
		look_up(r, s, &m, is);
		if (memcmp(is, o->end, sizeof(is)) && !(o->seq & 1 && !memcmp(is, o->next, sizeof(is)))) {
			fprintf(stderr,
				"slot %u: ends %u %u %u %u, were %u %u %u %u, should become %u %u %u %u\n", s,
				is[0], is[1], is[2], is[3], o->end[0], o->end[1], o->end[2], o->end[3],
				o->next[0], o->next[1], o->next[2], o->next[3]);
			return 4;
		}
		if (o->seq & 1)
			begin_anew(w, o, s, is);
	}
	return 0;
}

/* Recovers, settles, works until it is stopped or killed; work counts its changes. */
static void writer(uint64_t seed, uint64_t *work)
{
	struct kvp_radix_w *w = NULL;
	struct kvp_radix_report rep;
	struct kvp_radix r;
	struct rng g = {seed};
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	if (kvp_radix_w_open(seg.pub, seg.priv, &geom, KVP_RADIX_RECOVER, NULL, &w, &rep) || rep.runs_dropped)
		_exit(2);
	kvp_radix_join(seg.pub, &geom, &r);
	if (kvp_radix_check(&r) || kvp_radix_w_check(w))
		_exit(3);
	oracle->opens++;
	oracle->redone += rep.headers_redone;
	oracle->undone += rep.splits_undone;
	oracle->merged += rep.merges_finished;
	oracle->repeated += rep.ops_repeated;
	int wrong = settle(w, &r);
	if (wrong)
		_exit(wrong);
	while (!kvp_ld_acq_u32(&oracle->stop)) {
		if (change(w, &g, rnd_below(&g, SLOTS)) != KVP_OK)
			_exit(5);
		kvp_radix_w_tend(w, 40);
		kvp_faa_rlx_u64(work, 1);
	}
	struct kvp_radix_stats st;
	kvp_radix_stats(&r, &st);
	oracle->merges = st.merges;
	_exit(kvp_radix_check(&r) || kvp_radix_w_check(w) ? 6 : 0);
}

/* ---- readers ---- */

struct before { /* what the oracle said before a lookup */
	uint32_t seq, end[TIERS];
};

/* Longer or foreign is wrong for any slot, shorter for one that nobody touched. */
static void judge_slot(struct tally *t, uint32_t s, uint32_t chain, const uint32_t *end,
	const struct before *b, uint32_t gave_up)
{
	uint32_t top = s / 2 == chain ? CHAIN_LEN : SHARED;
	if (s / 2 / CHAINS != chain / CHAINS) {
		t->wrong += end[TIERS - 1] != 0;
		return;
	}
	t->wrong += end[TIERS - 1] > top;
	if (b->seq & 1 || kvp_ld_sc_u32(&oracle->slot[s].seq) != b->seq)
		return;
	for (uint32_t i = 0; i < TIERS; i++) {
		uint32_t want = b->end[i] < top ? b->end[i] : top;
		t->wrong += gave_up ? end[i] > want : end[i] != want;
	}
	t->exact++;
	t->exact_low += end[TIERS - 1] > end[0];
}

static void judge(struct tally *t, uint32_t chain, const struct kvp_radix_match *m, const struct before *b)
{
	uint32_t seen = 0, low = 0, mine = 0, end[TIERS];
	for (uint32_t s = 0; s < SLOTS; s++) {
		uint32_t idx = idx_of(s), on = m->active[idx >> 6] >> (idx & 63) & 1;
		ends_of(m, idx, end);
		seen += on;
		low += m->low_any && (m->low[idx >> 6] >> (idx & 63) & 1);
		t->wrong += on && end[0] == 0;
		mine = end[0] > mine ? end[0] : mine;
		judge_slot(t, s, chain, end, &b[s], m->gave_up);
	}
	for (uint32_t i = 0; i < m->word_cnt; i++) {
		seen -= (uint32_t)__builtin_popcountll(m->active[i]);
		low -= m->low_any ? (uint32_t)__builtin_popcountll(m->low[i]) : 0;
	}
	t->wrong += seen != 0 || low != 0 || mine != m->longest;
}

/* One lookup: a prompt that goes on behind its chain, and what the oracle says before. */
struct look {
	struct kvp_radix_query q;
	uint64_t local[CHAIN_LEN + 40];
	uint32_t chain;
	struct before before[SLOTS];
};

static void look_begin(struct look *l, struct rng *g)
{
	l->chain = rnd_below(g, GROUPS * CHAINS);
	for (uint32_t i = 0; i < CHAIN_LEN + 40; i++)
		l->local[i] = i < CHAIN_LEN ? local_of(l->chain, i) : rnd(g);
	for (uint32_t s = 0; s < SLOTS; s++) {
		const struct oracle_slot *o = &oracle->slot[s];
		l->before[s].seq = kvp_ld_sc_u32(&o->seq);
		for (uint32_t i = 0; i < TIERS; i++)
			l->before[s].end[i] = kvp_ld_acq_u32(&o->end[i]);
		if (kvp_ld_sc_u32(&o->seq) != l->before[s].seq)
			l->before[s].seq = 1;
	}
	l->q = (struct kvp_radix_query){PART, l->local, CHAIN_LEN + 40, CHAIN_LEN + 40, NULL, NULL};
}

/* Read-only mapping, as readers have it. */
static void *read_only(void)
{
	void *p = mremap(seg.pub, 0, seg.pub_bytes, MREMAP_MAYMOVE);
	if (p == MAP_FAILED || mprotect(p, seg.pub_bytes, PROT_READ))
		return NULL;
	return p;
}

#endif
