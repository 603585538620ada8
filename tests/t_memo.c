/* tests/t_memo.c — the listeners' memory against a plain array: puts, clears, full arena, takeover, kills. */
#include "shm/memo.h"
#include "tests/procs.h"
#include "tests/tap.h"

enum { RANKS = 5, DPS = 2, IDS = 400, STEPS = 60000 };

static const struct kvp_geom geom = {.rank_max = RANKS, .block_max = 10000, .region_gen = 3};

struct want { /* [rank slot][dp rank][kind][id] */
	struct kvp_memo_note at[RANKS][DPS][2][IDS];
};
static struct want *want;

static uint64_t id_of(uint64_t i)
{
	return i * 0x9e3779b97f4a7c15ull;
}

static struct kvp_memo_note random_note(uint64_t *s, uint32_t *rank, uint32_t *i)
{
	*rank = (uint32_t)(xorshift(s) % RANKS);
	*i = (uint32_t)(xorshift(s) % IDS);
	uint32_t kind = xorshift(s) % 8 == 0 ? KVP_MEMO_KIND : 0;
	return (struct kvp_memo_note){id_of(*i), {xorshift(s) % 3, xorshift(s) % 2},
		(uint32_t)(xorshift(s) % DPS),
		kind | (xorshift(s) % 5 < 2 ? 0 : 1 + (uint32_t)(xorshift(s) % 7))};
}

static void want_put(uint32_t rank, uint32_t i, const struct kvp_memo_note *n)
{
	want->at[rank][n->dp_rank][(n->state & KVP_MEMO_KIND) != 0][i] = *n;
}

static void want_clear(uint32_t rank)
{
	memset(want->at[rank], 0, sizeof(want->at[rank]));
}

/* The one that the model has for the same key; dead ones have no bit beside the kind. */
static const struct kvp_memo_note *want_of(uint32_t rank, const struct kvp_memo_note *n)
{
	uint64_t i = n->id * 0xf1de83e19937733dull; /* inverse of id_of */
	if (i >= IDS || n->dp_rank >= DPS)
		return NULL;
	return &want->at[rank][n->dp_rank][(n->state & KVP_MEMO_KIND) != 0][i];
}

static int is_set(const struct kvp_memo_note *n)
{
	return (n->state & ~KVP_MEMO_KIND) != 0;
}

/* Notes that differ from the model. */
static uint64_t differences(const struct kvp_memo *m)
{
	uint64_t first[RANKS + 1], cnt = 0, wanted = 0, bad = 0;
	for (uint32_t r = 0; r < RANKS; r++)
		cnt += kvp_memo_cnt(m, r);
	struct kvp_memo_note *all = malloc((cnt + 1) * sizeof(*all));
	kvp_memo_get_all(m, all, first);
	for (uint32_t r = 0; r < RANKS; r++) {
		bad += first[r + 1] - first[r] != kvp_memo_cnt(m, r);
		for (uint64_t k = first[r]; k < first[r + 1]; k++) {
			const struct kvp_memo_note *w = want_of(r, &all[k]);
			bad += !w || memcmp(w, &all[k], sizeof(*w)) != 0;
		}
	}
	const struct kvp_memo_note *w = &want->at[0][0][0][0];
	for (uint64_t i = 0; i < sizeof(*want) / sizeof(*w); i++)
		wanted += (uint64_t)is_set(&w[i]);
	free(all);
	return bad + (wanted > cnt ? wanted - cnt : cnt - wanted);
}

static void test_life(void *mem)
{
	struct kvp_geom other = geom;
	struct kvp_memo m;
	ok(kvp_memo_new(NULL, &geom) == KVP_ERR_INVAL, "new refuses NULL");
	ok(kvp_memo_join(mem, &geom, &m) == KVP_ERR_AGAIN, "join before new answers AGAIN");
	ok(kvp_memo_new(mem, &geom) == KVP_OK && kvp_memo_join(mem, &geom, &m) == KVP_OK, "new and join");
	kvp_memo_leave(&m);
	other.region_gen = 4;
	ok(kvp_memo_join(mem, &other, &m) == KVP_ERR_LAYOUT, "join refuses another region's");
	other = geom;
	other.rank_max = 0;
	is_u64(kvp_memo_footprint(&other), 0, "no ranks, no memory");
}

static void test_model(void *mem, uint64_t *s)
{
	struct kvp_memo m;
	uint64_t wrong = 0, faults = 0;
	kvp_memo_join(mem, &geom, &m);
	for (int step = 0; step < STEPS; step++) {
		uint32_t rank, i, lost = 9;
		if (xorshift(s) % 4000 == 0) {
			rank = (uint32_t)(xorshift(s) % RANKS);
			kvp_memo_clear(&m, rank);
			want_clear(rank);
			continue;
		}
		struct kvp_memo_note n = random_note(s, &rank, &i);
		wrong += kvp_memo_put(&m, rank, &n, 1, &lost) != KVP_OK || lost;
		want_put(rank, i, &n);
		if (step % 5000 == 0) {
			wrong += differences(&m);
			faults += kvp_memo_check(&m);
		}
		if (step % 9000 == 0) { /* the next process */
			kvp_memo_leave(&m);
			wrong += kvp_memo_join(mem, &geom, &m) != KVP_OK;
			wrong += differences(&m);
		}
	}
	is_u64(wrong, 0, "%d random puts and clears: what the model has, over takeovers", STEPS);
	is_u64(faults, 0, "sound throughout");
	uint32_t lost;
	struct kvp_memo_note n = {1, {0, 0}, 0, 1};
	ok(kvp_memo_put(&m, RANKS, &n, 1, &lost) == KVP_ERR_INVAL, "a slot out of range is INVAL");
	for (uint32_t r = 0; r < RANKS; r++) {
		kvp_memo_clear(&m, r);
		want_clear(r);
	}
	is_u64(differences(&m), 0, "all forgotten");
	kvp_memo_leave(&m);
}

static void test_full(void *mem)
{
	struct kvp_memo m;
	uint32_t lost = 0, all_lost = 0, cnt = 2 * 10000;
	kvp_memo_join(mem, &geom, &m);
	struct kvp_memo_note n = {0, {1, 2}, 0, 1};
	for (uint32_t i = 0; i < cnt + 5; i++) {
		n.id = i;
		kvp_memo_put(&m, 1, &n, 1, &lost);
		all_lost += lost;
	}
	ok(all_lost >= 5 && all_lost < 100, "beyond its room notes are lost, and counted (%u)", all_lost);
	n.state = 2;
	n.id = 7;
	ok(kvp_memo_put(&m, 1, &n, 1, &lost) == KVP_OK, "known ones still change");
	kvp_memo_clear(&m, 1);
	n.state = 1;
	for (uint32_t i = 0; i < 9000; i++) {
		n.id = i;
		kvp_memo_put(&m, 2, &n, 1, &lost);
	}
	ok(kvp_memo_cnt(&m, 2) > 8900, "another rank has most of the room of one that was cleared (%u)",
		kvp_memo_cnt(&m, 2));
	is_u64(kvp_memo_check(&m), 0, "sound");
	kvp_memo_clear(&m, 2);
	kvp_memo_leave(&m);
}

static void test_corrupt(void *mem)
{
	struct kvp_memo m;
	struct kvp_memo_note n = {5, {0, 0}, 0, 1};
	uint32_t lost;
	kvp_memo_join(mem, &geom, &m);
	kvp_memo_put(&m, 0, &n, 1, &lost);
	for (uint32_t b = 0; b < m.bucket_max; b++)
		if (m.bucket[b])
			m.bucket[b] = 0x7fffffff;
	kvp_memo_leave(&m);
	ok(kvp_memo_join(mem, &geom, &m) == KVP_ERR_CORRUPT, "a link that leads nowhere is noticed");
	is_u64(kvp_memo_cnt(&m, 0), 0, "and the memo starts empty");
	ok(kvp_memo_put(&m, 0, &n, 1, &lost) == KVP_OK && kvp_memo_cnt(&m, 0) == 1, "and goes on");
	kvp_memo_clear(&m, 0);
	kvp_memo_leave(&m);
}

/* A child puts and is killed at some place; the model counts what it had finished. */
static void test_kill(void *mem, uint64_t *s)
{
	struct shared {
		uint32_t done, rank, i;
		struct kvp_memo_note note; /* under way */
	} *sh = shared(sizeof(*sh));
	uint64_t wrong = 0, rounds = 150;
	struct kvp_memo m;
	for (uint64_t round = 0; round < rounds; round++) {
		uint64_t seed = *s, nth = 1 + xorshift(s) % 200;
		sh->done = 1;
		pid_t pid = fork();
		if (!pid) {
			kvp_memo_join(mem, &geom, &m);
			die_at(NULL, nth);
			for (uint32_t lost;;) {
				sh->note = random_note(&seed, &sh->rank, &sh->i);
				sh->done = 0;
				kvp_memo_put(&m, sh->rank, &sh->note, 1, &lost);
				want_put(sh->rank, sh->i, &sh->note);
				sh->done = 1;
			}
		}
		wrong += was_killed(pid) != 1;
		wrong += kvp_memo_join(mem, &geom, &m) != KVP_OK;
		uint64_t bad = differences(&m);
		if (!sh->done && bad) {
			want_put(sh->rank, sh->i, &sh->note);
			bad = differences(&m);
		}
		wrong += bad + kvp_memo_check(&m);
		kvp_memo_leave(&m);
	}
	is_u64(wrong, 0, "%llu kills: each key has its old or its new value", (unsigned long long)rounds);
	munmap(sh, sizeof(*sh));
}

int main(void)
{
	uint64_t s = tap_seed(20210), bytes = kvp_memo_footprint(&geom);
	void *mem = shared(bytes);
	want = shared(sizeof(*want));
	test_life(mem);
	test_model(mem, &s);
	test_full(mem);
	test_corrupt(mem);
	memset(want, 0, sizeof(*want));
	test_kill(mem, &s);
	munmap(mem, bytes);
	munmap(want, sizeof(*want));
	return done();
}
