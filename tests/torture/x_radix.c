/* One writer and two readers in processes of their own; the writer is killed at random instants and its
 * successor recovers. Oracle: a slot whose sequence word did not change during a lookup was not touched, so
 * its depth must be exact, whatever happened to other slots of the same runs meanwhile; any depth of a
 * touched slot or of a walk that gave up must be within what the slot can hold, and slots of other groups
 * must not show at all. KVP_TORTURE_S: seconds, default 2. */
#include "tests/radix_model.h"
#include "tests/tap.h"

#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>

#define GROUPS 4
#define CHAINS 8  /* in a group; they share the first blocks */
#define SHARED 24 /* blocks */
#define CHAIN_LEN 320
#define SLOTS (GROUPS * CHAINS * 2)
#define HELD_WORDS (CHAIN_LEN / 64)
#define PART 77
#define READERS 2

struct oracle_slot {
	uint32_t seq; /* odd while the writer works on the slot */
	uint32_t depth, next_depth;
	uint64_t held[HELD_WORDS];
} __attribute__((aligned(128)));
struct tally {
	uint64_t queries, exact, retries, gave_up, wrong, slowest_ns;
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

static uint32_t held_depth(const uint64_t *held)
{
	uint32_t d = 0;
	while (d < CHAIN_LEN && held[d >> 6] >> (d & 63) & 1)
		d++;
	return d;
}

static void set_held(uint64_t *held, uint32_t a, uint32_t b, int on)
{
	for (; a < b; a++)
		held[a >> 6] = on ? held[a >> 6] | 1ULL << (a & 63) : held[a >> 6] & ~(1ULL << (a & 63));
}

static int is_held(const uint64_t *held, uint32_t i)
{
	return (int)(held[i >> 6] >> (i & 63) & 1);
}

/* One change of one slot: the intended state first, then the tree, then the oracle. */
static int change(struct kvp_radix_w *w, struct rng *r, uint32_t s)
{
	struct oracle_slot *o = &oracle->slot[s];
	uint64_t local[CHAIN_LEN], ext[CHAIN_LEN], held[HELD_WORDS];
	uint32_t kind = rnd_below(r, 16), n = 1 + rnd_below(r, rnd_below(r, 3) ? 40 : CHAIN_LEN), from = 0;
	memcpy(held, o->held, sizeof(held));
	if (kind < 9) { /* store under a held block, or at the root */
		from = rnd_below(r, 3) ? o->depth : rnd_below(r, CHAIN_LEN);
		while (from && !is_held(held, from - 1))
			from--;
		n = n < CHAIN_LEN - from ? n : CHAIN_LEN - from;
		set_held(held, from, from + n, 1);
	} else if (kind < 15) { /* remove a stretch: the tail mostly */
		from = rnd_below(r, 4) && o->depth > n ? o->depth - n : rnd_below(r, CHAIN_LEN);
		n = n < CHAIN_LEN - from ? n : CHAIN_LEN - from;
		set_held(held, from, from + n, 0);
	} else {
		memset(held, 0, sizeof(held));
	}
	for (uint32_t i = 0; i < n; i++) {
		uint32_t at = kind < 9 ? from + i : from + n - 1 - i;
		local[i] = local_of(s / 2, at);
		ext[i] = ext_of(s, at);
	}
	o->next_depth = held_depth(held);
	kvp_st_sc_u32(&o->seq, o->seq + 1);
	int rc = n == 0	     ? KVP_OK
		 : kind < 9  ? kvp_radix_store(w, idx_of(s), PART, from ? KVP_RADIX_CHILD : KVP_RADIX_ROOT,
				       from ? ext_of(s, from - 1) : 0, n, local, ext, NULL)
		 : kind < 15 ? kvp_radix_remove(w, idx_of(s), n, ext, NULL)
			     : kvp_radix_clear(w, idx_of(s));
	memcpy(o->held, held, sizeof(held));
	o->depth = o->next_depth;
	kvp_st_sc_u32(&o->seq, o->seq + 1);
	oracle->ops++;
	return rc;
}

static uint32_t depth_of(const struct kvp_radix *r, uint32_t s, struct kvp_radix_match *m)
{
	uint64_t local[CHAIN_LEN];
	for (uint32_t i = 0; i < CHAIN_LEN; i++)
		local[i] = local_of(s / 2, i);
	struct kvp_radix_query q = {PART, local, CHAIN_LEN, CHAIN_LEN, NULL, NULL};
	kvp_radix_find(r, &q, m);
	uint32_t idx = idx_of(s);
	return m->active[idx >> 6] >> (idx & 63) & 1 ? m->depth[idx] : 0;
}

static void writer(uint64_t seed)
{
	struct kvp_radix_w *w = NULL;
	struct kvp_radix_report rep;
	struct kvp_radix r;
	struct kvp_radix_match *m = malloc(sizeof(*m));
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
	for (uint32_t s = 0; s < SLOTS; s++) {
		struct oracle_slot *o = &oracle->slot[s];
		uint32_t d = depth_of(&r, s, m);
		if (d != o->depth && !(o->seq & 1 && d == o->next_depth)) {
			fprintf(stderr, "slot %u: depth %u, was %u, should become %u\n", s, d, o->depth,
				o->next_depth);
			_exit(4);
		}
		if (!(o->seq & 1))
			continue;
		/* The predecessor died in a change of this slot: it has happened or not; begin anew. This
		 * writer may die here as well. */
		o->depth = d;
		kvp_st_rel_u32(&o->next_depth, 0);
		kvp_radix_clear(w, idx_of(s));
		memset(o->held, 0, sizeof(o->held));
		o->depth = 0;
		kvp_st_sc_u32(&o->seq, o->seq + 1);
		oracle->recovered++;
	}
	while (!kvp_ld_acq_u32(&oracle->stop)) {
		if (change(w, &g, rnd_below(&g, SLOTS)) != KVP_OK)
			_exit(5);
		kvp_radix_w_tend(w, 40);
	}
	struct kvp_radix_stats st;
	kvp_radix_stats(&r, &st);
	oracle->merges = st.merges;
	_exit(kvp_radix_check(&r) || kvp_radix_w_check(w) ? 6 : 0);
}

/* ---- readers ---- */

static void judge(struct tally *t, uint32_t chain, const struct kvp_radix_match *m, const uint32_t *seq,
	const uint32_t *depth)
{
	uint32_t seen = 0, mine = 0;
	for (uint32_t s = 0; s < SLOTS; s++) {
		uint32_t idx = idx_of(s), on = m->active[idx >> 6] >> (idx & 63) & 1;
		uint32_t d = on ? m->depth[idx] : 0, top = s / 2 == chain ? CHAIN_LEN : SHARED;
		seen += on;
		if (s / 2 / CHAINS != chain / CHAINS) {
			t->wrong += on;
			continue;
		}
		t->wrong += d > top || (on && d == 0);
		mine = d > mine ? d : mine;
		if (seq[s] & 1 || kvp_ld_sc_u32(&oracle->slot[s].seq) != seq[s])
			continue;
		uint32_t want = depth[s] < top ? depth[s] : top;
		t->wrong += m->gave_up ? d > want : d != want;
		t->exact++;
	}
	for (uint32_t i = 0; i < m->word_cnt; i++)
		seen -= (uint32_t)__builtin_popcountll(m->active[i]);
	t->wrong += seen != 0 || mine != m->longest;
}

static void reader(uint32_t n, const void *pub)
{
	struct kvp_radix r;
	struct kvp_radix_match *m = malloc(sizeof(*m));
	struct tally *t = &oracle->reader[n];
	struct rng g = {n + 99};
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	if (kvp_radix_join(pub, &geom, &r))
		_exit(2);
	while (!kvp_ld_acq_u32(&oracle->stop)) {
		uint64_t local[CHAIN_LEN + 40];
		uint32_t seq[SLOTS], depth[SLOTS], chain = rnd_below(&g, GROUPS * CHAINS);
		for (uint32_t i = 0; i < CHAIN_LEN + 40; i++)
			local[i] = i < CHAIN_LEN ? local_of(chain, i) : rnd(&g);
		for (uint32_t s = 0; s < SLOTS; s++) {
			seq[s] = kvp_ld_sc_u32(&oracle->slot[s].seq);
			depth[s] = kvp_ld_acq_u32(&oracle->slot[s].depth);
			if (kvp_ld_sc_u32(&oracle->slot[s].seq) != seq[s])
				seq[s] = 1;
		}
		struct kvp_radix_query q = {PART, local, CHAIN_LEN + 40, CHAIN_LEN + 40, NULL, NULL};
		uint64_t begin = now();
		kvp_radix_find(&r, &q, m);
		uint64_t ns = now() - begin;
		judge(t, chain, m, seq, depth);
		t->queries++;
		t->retries += m->retries;
		t->gave_up += m->gave_up;
		t->slowest_ns = ns > t->slowest_ns ? ns : t->slowest_ns;
	}
	_exit(0);
}

/* ---- parent ---- */

static pid_t start_writer(uint64_t seed)
{
	pid_t p = fork();
	if (p == 0)
		writer(seed);
	return p;
}

/* Read-only mapping, as readers have it. */
static void *read_only(void)
{
	void *p = mremap(seg.pub, 0, seg.pub_bytes, MREMAP_MAYMOVE);
	if (p == MAP_FAILED || mprotect(p, seg.pub_bytes, PROT_READ))
		return NULL;
	return p;
}

int main(void)
{
	const char *fixed = getenv("KVP_SEED"), *s = getenv("KVP_TORTURE_S");
	uint64_t seed = fixed ? strtoull(fixed, NULL, 0) : now(), kills = 0, bad_exit = 0, end;
	struct rng g = {seed};
	printf("# seed %llu\n", (unsigned long long)seed);
	oracle = seg_map(sizeof(*oracle));
	if (!oracle || seg_new(&seg, &geom))
		return 1;
	const void *ro = read_only();
	ok(ro != NULL, "readers have a read-only mapping");
	end = now() + (s ? strtoull(s, NULL, 10) : 2) * 1000000000ULL;
	pid_t rd[READERS], wr = start_writer(rnd(&g));
	for (uint32_t i = 0; i < READERS; i++) {
		rd[i] = fork();
		if (rd[i] == 0)
			reader(i, ro);
	}
	int st;
	while (now() < end && !bad_exit) {
		struct timespec t = {0, (long)(1000000 + rnd_below(&g, 25000000))};
		nanosleep(&t, NULL);
		kill(wr, SIGKILL);
		waitpid(wr, &st, 0);
		if (WIFSIGNALED(st))
			kills++;
		else
			bad_exit = 100 + (uint64_t)WEXITSTATUS(st);
		wr = start_writer(rnd(&g));
	}
	kvp_st_sc_u32(&oracle->stop, 1);
	waitpid(wr, &st, 0);
	bad_exit = bad_exit ? bad_exit : st ? 1 : 0;
	for (uint32_t i = 0; i < READERS; i++) {
		waitpid(rd[i], &st, 0);
		ok(st == 0, "reader %u ended in order", i);
	}
	is_u64(bad_exit, 0,
		"every writer recovered a sound tree (%llu kills, %llu opened, %llu headers finished, "
		"%llu splits undone, %llu merges finished, %llu operations repeated)",
		(unsigned long long)kills, (unsigned long long)oracle->opens,
		(unsigned long long)oracle->redone, (unsigned long long)oracle->undone,
		(unsigned long long)oracle->merged, (unsigned long long)oracle->repeated);
	struct tally *a = &oracle->reader[0], *b = &oracle->reader[1];
	is_u64(a->wrong + b->wrong, 0,
		"no foreign slot, no wrong depth in %llu lookups (%llu exact comparisons)",
		(unsigned long long)(a->queries + b->queries), (unsigned long long)(a->exact + b->exact));
	ok(a->queries && b->queries && a->exact && oracle->ops, "readers and writer worked (%llu changes)",
		(unsigned long long)oracle->ops);
	ok(oracle->merges > 0, "runs were merged under readers (%llu)", (unsigned long long)oracle->merges);
	printf("# retries %llu, gave up %llu, slowest lookup %llu us\n",
		(unsigned long long)(a->retries + b->retries), (unsigned long long)(a->gave_up + b->gave_up),
		(unsigned long long)(a->slowest_ns > b->slowest_ns ? a->slowest_ns : b->slowest_ns) / 1000);
	return done();
}
