/* A process is killed at every place of the booking code, at every hit; then one sweep. Nothing may be left
 * over, nothing counted twice, and every operation is there completely or not at all. Builds the booking
 * modules with their kill places whatever the build. */
#ifndef KVP_TEST_POINTS
#define KVP_TEST_POINTS
#endif
#include "shm/active.c"
#include "shm/book_check.c"
#include "shm/load.c"
#include "shm/point.c"
#include "shm/resv.c"
#include "shm/sweep.c"
#include "tests/book_fixture.h"
#include "tests/procs.h"

#define SURVIVOR KVP_OWNER(1, 1)
#define VICTIM KVP_OWNER(2, 7)
#define HITS_MAX 150 /* of one place; more are sampled */

/* What the victim has begun and ended, for the parent to judge by. */
enum { STEP_BOOK = 1, STEP_PREFILL, STEP_OUTPUT, STEP_FRACTION, STEP_FREE, STEP_END };
struct progress {
	uint64_t begun, ended;
};

static struct fixture f;
static struct progress *prog;

static void seq_of(uint64_t *seq, uint32_t shared, uint32_t n, uint64_t salt)
{
	for (uint32_t i = 0; i < n; i++)
		seq[i] = i < shared ? 1000 + i : salt * 100000 + i;
}

static void step(uint64_t s, int begin)
{
	kvp_st_rel_u64(begin ? &prog->begun : &prog->ended, s);
}

/* The victim's life: a booking of the node with every operation, its own booking left behind, a long id, a
 * refusal for lack of room, an abandoned claim. */
static void script(struct kvp_book *b)
{
	uint64_t h, own, seq[4400];
	double frac = 0.5;
	seq_of(seq, 20, 45, 7);
	struct kvp_resv_ask a = {.rank_slot = 0,
		.rank_gen = 1,
		.prefill_tok = 700,
		.seq = seq,
		.seq_cnt = 45,
		.flags = KVP_RESV_TRACK_PREFILL | KVP_RESV_NODE_OWNED,
		.now_ns = 5};
	step(STEP_BOOK, 1);
	kvp_resv_claim(b, VICTIM, "node", 4, &h);
	kvp_resv_book(b, h, &a);
	step(STEP_BOOK, 0);
	step(STEP_PREFILL, 1);
	kvp_resv_prefill_done(b, h);
	step(STEP_PREFILL, 0);
	step(STEP_OUTPUT, 1);
	kvp_resv_output(b, h, NULL);
	step(STEP_OUTPUT, 0);
	step(STEP_FRACTION, 1);
	kvp_resv_output(b, h, &frac);
	step(STEP_FRACTION, 0);
	book_simple(b, VICTIM, "own", 0, 1, 33, seq, 30, &own);
	char longer[700];
	memset(longer, 'x', sizeof(longer));
	if (!kvp_resv_claim(b, VICTIM, longer, sizeof(longer), &own))
		kvp_resv_abandon(b, own);
	step(STEP_FREE, 1);
	kvp_resv_free(b, h);
	step(STEP_FREE, 0);
	step(STEP_END, 1);
	book_simple(b, VICTIM, "empty", 1, 1, 44, seq, 0, &own);
	kvp_resv_free(b, own);
	seq_of(seq, 20, 4400, 9);
	book_simple(b, VICTIM, "too-big", 0, 1, 44, seq, 4400, &own);
}

static uint64_t base[2][3];

static void loads(uint64_t out[2][3])
{
	for (uint32_t r = 0; r < 2; r++) {
		struct kvp_load l;
		kvp_load_read(&f.b, r, &l);
		out[r][0] = l.prefill_tok;
		out[r][1] = l.requests;
		out[r][2] = l.active_blk_fx;
	}
}

static int loads_as_before(const char *when)
{
	uint64_t now[2][3];
	loads(now);
	if (memcmp(now, base, sizeof(base)) == 0)
		return 1;
	for (int r = 0; r < 2; r++)
		printf("# %s, rank %d: %" PRIu64 " %" PRIu64 " %" PRIu64 ", want %" PRIu64 " %" PRIu64
		       " %" PRIu64 "\n",
			when, r, now[r][0], now[r][1], now[r][2], base[r][0], base[r][1], base[r][2]);
	return 0;
}

/* The survivor's own bookings: shared with the victim's path, one with a fraction on its last blocks. */
static void survivor_begin(void)
{
	uint64_t seq[64], h;
	double frac = 0.25;
	seq_of(seq, 20, 40, 3);
	book_simple(&f.b, SURVIVOR, "s1", 0, 1, 100, seq, 40, &h);
	kvp_resv_output(&f.b, h, &frac);
	seq_of(seq, 20, 25, 4);
	book_simple(&f.b, SURVIVOR, "s2", 0, 1, 50, seq, 25, &h);
	loads(base);
}

static pid_t spawn(void (*run)(struct kvp_book *), kvp_owner owner, const char *place, uint64_t n)
{
	memset(prog, 0, sizeof(*prog));
	fflush(stdout);
	pid_t pid = fork();
	if (pid == 0) {
		struct kvp_book b;
		kvp_book_join(f.mem, &f.g, &b);
		kvp_book_attach(&b, owner, NULL);
		die_at(place, n);
		run(&b);
		_exit(0);
	}
	return pid;
}

/* The booking of the node is what the progress says, give or take the operation under way. */
static int judge(void)
{
	uint64_t h, begun = prog->begun, ended = prog->ended;
	struct kvp_resv_info i;
	int here = kvp_resv_find(&f.b, "node", 4, &h) == KVP_OK && kvp_resv_info(&f.b, h, &i) == KVP_OK;
	if (!here)
		return begun <= STEP_BOOK || begun >= STEP_FREE;
	int good = ended < STEP_FREE && i.seq_cnt == 45 && i.prefill_tok == 700;
	good &= i.prefill_active ? ended < STEP_PREFILL : begun >= STEP_PREFILL;
	uint32_t min = ended >= STEP_FRACTION ? 2 : ended >= STEP_OUTPUT ? 1 : 0;
	uint32_t max = begun >= STEP_FRACTION ? 2 : begun >= STEP_OUTPUT ? 1 : 0;
	good &= i.output_cnt >= min && i.output_cnt <= max;
	good &= i.output_fx == (i.output_cnt == 0 ? 0 : KVP_BLK_FX_ONE); /* one, or two halves */
	good &= kvp_resv_free(&f.b, h) == KVP_OK;
	return good;
}

/* While the victim's oversized booking fills the table, a refusal is right too. */
static int survivor_goes_on(void)
{
	uint64_t seq[40], h;
	seq_of(seq, 20, 40, 11);
	int rc = book_simple(&f.b, SURVIVOR, "while", 0, 1, 9, seq, 40, &h);
	if (rc == KVP_ERR_FULL && prog->begun == STEP_END)
		return 1;
	return rc == KVP_OK && kvp_resv_prefill_done(&f.b, h) == KVP_OK && kvp_resv_free(&f.b, h) == KVP_OK;
}

static int ids_are_free(void)
{
	static const char *const ids[] = { "node", "own", "empty", "too-big", "while" };
	int good = 1;
	uint64_t h;
	for (size_t i = 0; i < sizeof(ids) / sizeof(ids[0]); i++)
		good &= kvp_resv_claim(&f.b, SURVIVOR, ids[i], strlen(ids[i]), &h) == KVP_OK &&
			kvp_resv_abandon(&f.b, h) == KVP_OK;
	return good && kvp_resv_cnt(&f.b) == 2;
}

static int kill_once(const char *place, uint64_t n)
{
	struct kvp_sweep_result res;
	if (was_killed(spawn(script, VICTIM, place, n)) != 1)
		printf("# %s:%" PRIu64 " not hit\n", place, n);
	int on = survivor_goes_on();
	int swept = kvp_book_sweep_owner(&f.b, VICTIM, NULL, NULL, &res) == KVP_OK;
	uint64_t faults = kvp_book_check(&f.b);
	int judged = judge(), back = loads_as_before("after the sweep"), ids = ids_are_free();
	int good = on && swept && !faults && judged && back && ids && !kvp_book_check(&f.b);
	if (!good)
		printf("# %s:%" PRIu64 " survivor %d swept %d faults %" PRIu64
		       " judged %d loads %d ids %d (begun %" PRIu64 ")\n",
			place, n, on, swept, faults, judged, back, ids, prog->begun);
	return good;
}

static uint64_t next_hit(uint64_t n, uint64_t hits)
{
	return hits <= HITS_MAX || n < HITS_MAX / 2 ? n + 1 : n + 1 + (hits - HITS_MAX / 2) / (HITS_MAX / 2);
}

static void test_victim(void)
{
	kvp_point_hook = note_spot;
	kvp_owner me = f.b.owner;
	script(&f.b);
	f.b.owner = me;
	kvp_point_hook = NULL;
	kvp_book_sweep_owner(&f.b, VICTIM, NULL, NULL, NULL);
	ok(loads_as_before("script without a kill") && kvp_book_check(&f.b) == 0,
		"the script leaves nothing behind");
	for (int i = 0; spot[i].name; i++) {
		uint64_t tried = 0, bad = 0;
		if (strncmp(spot[i].name, "book:recount", 12) == 0 ||
			strcmp(spot[i].name, "book:sweep") == 0)
			continue;
		for (uint64_t n = 1; n <= spot[i].hits && !bad; n = next_hit(n, spot[i].hits), tried++)
			bad += !kill_once(spot[i].name, n);
		ok(!bad, "killed at %s (%" PRIu64 " of %" PRIu64 " hits): swept without a trace",
			spot[i].name, tried, spot[i].hits);
	}
}

static void sweep_victim(struct kvp_book *b)
{
	kvp_book_sweep_owner(b, VICTIM, NULL, NULL, NULL);
}

/* The sweep of a death in the middle of block references is killed too, then repeated. */
static void test_sweep(void)
{
	static const char *const deaths[] = {
		"book:ref", "book:unref", "book:frac", "book:blocks", "book:fence"};
	uint64_t tried = 0, bad = 0;
	for (size_t d = 0; d < 4; d++) {
		spots_clear();
		was_killed(spawn(script, VICTIM, deaths[d], 3));
		kvp_point_hook = note_spot;
		sweep_victim(&f.b);
		kvp_point_hook = NULL;
		judge();
		for (int i = 0; spot[i].name; i++) {
			uint64_t hits = spot[i].hits;
			for (uint64_t n = 1; n <= hits && !bad; n += 1 + hits / 12, tried++) {
				was_killed(spawn(script, VICTIM, deaths[d], 3));
				struct progress p = *prog;
				was_killed(spawn(sweep_victim, KVP_OWNER(3, 1), spot[i].name, n));
				*prog = p;
				int rc = kvp_book_sweep_owner(&f.b, VICTIM, NULL, NULL, NULL);
				rc |= kvp_book_sweep_owner(&f.b, KVP_OWNER(3, 1), NULL, NULL, NULL);
				uint64_t faults = kvp_book_check(&f.b);
				int judged = judge();
				bad += rc || faults || !judged || !loads_as_before("second sweep") ||
				       !ids_are_free();
				if (bad)
					printf("# %s, sweep at %s:%" PRIu64 " rc %d faults %" PRIu64
					       " judged %d\n",
						deaths[d], spot[i].name, n, rc, faults, judged);
			}
		}
	}
	ok(!bad && tried > 20, "%" PRIu64 " sweeps killed in the middle and repeated: without a trace",
		tried);
}

static void flap(struct kvp_book *b)
{
	kvp_rank_close(b, 2, 1);
	kvp_rank_open(b, 2, 2);
}

/* The indexer dies while it closes and opens a rank that holds bookings of others. */
static void test_close(void)
{
	uint64_t seq[40], h, bad = 0, tried = 0;
	seq_of(seq, 20, 40, 12);
	for (int round = 0; round < 2; round++) {
		spots_clear();
		kvp_rank_open(&f.b, 2, 1);
		book_simple(&f.b, SURVIVOR, "doomed", 2, 1, 9, seq, 40, &h);
		kvp_point_hook = note_spot;
		flap(&f.b);
		kvp_point_hook = NULL;
		kvp_rank_close(&f.b, 2, 2);
	}
	for (int i = 0; spot[i].name; i++)
		for (uint64_t n = 1; n <= spot[i].hits && !bad; n++, tried++) {
			kvp_rank_open(&f.b, 2, 1);
			book_simple(&f.b, SURVIVOR, "doomed", 2, 1, 9, seq, 40, &h);
			was_killed(spawn(flap, VICTIM, spot[i].name, n));
			bad += kvp_book_sweep_owner(&f.b, VICTIM, NULL, NULL, NULL) != KVP_OK;
			kvp_rank_close(&f.b, 2, 1);
			bad += kvp_rank_open(&f.b, 2, 2) != KVP_OK;
			bad += kvp_resv_free(&f.b, h) != KVP_ERR_NOTFOUND;
			bad += !loads_as_before("after the close") || !ids_are_free() || kvp_book_check(&f.b);
			kvp_rank_close(&f.b, 2, 2);
			if (bad)
				printf("# close killed at %s:%" PRIu64 "\n", spot[i].name, n);
		}
	ok(!bad && tried > 5, "%" PRIu64 " closes killed in the middle and repeated: without a trace", tried);
}

int main(void)
{
	if (TAP_IS_TSAN)
		return skip_all(TAP_PROCESSES);
	fixture_make(&f, 4, 64, 1024);
	prog = shared(KVP_PAGE);
	kvp_book_attach(&f.b, SURVIVOR, NULL);
	kvp_rank_open(&f.b, 0, 1);
	kvp_rank_open(&f.b, 1, 1);
	survivor_begin();
	test_victim();
	test_sweep();
	test_close();
	fixture_drop(&f);
	return done();
}
