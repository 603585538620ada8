/* Two processes' worth of booking woven at the named places: whenever the first reaches one, the second does
 * something to the same reservation, id, block or rank. Every pair of place and deed is tried at every hit;
 * after each the loads must be those of the reservations. Builds the booking modules with their places
 * whatever the build. */
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

#define FIRST KVP_OWNER(1, 1)
#define SECOND KVP_OWNER(2, 1)
#define HITS_MAX 400

static struct fixture f;
static struct kvp_book second;
static uint64_t first_h; /* the first one's reservation, 0 = none yet */
static uint32_t gen0;	 /* generation open on rank 0 */
static uint64_t seq[40];

static uint64_t vanished; /* bookings that were reported and did not exist */
static const char *at_place;
static uint64_t at_hit, hits;
static int (*deed)(void);
static int deed_rc, busy;

static void count_hit(const char *place)
{
	if (!busy)
		note_spot(place);
}

static void weave(const char *place)
{
	if (busy || strcmp(place, at_place) != 0 || ++hits != at_hit)
		return;
	busy = 1; /* the second one runs through */
	deed_rc = deed();
	busy = 0;
}

/* Deeds. What the second one books, it frees later: second_h. */
static uint64_t second_h;
static int d_free(void)
{
	return kvp_resv_free(&second, first_h);
}
static int d_prefill(void)
{
	return kvp_resv_prefill_done(&second, first_h);
}
static int d_output(void)
{
	return kvp_resv_output(&second, first_h, NULL);
}
static int d_fraction(void)
{
	double frac = 0.5;
	return kvp_resv_output(&second, first_h, &frac);
}
static int d_book(void)
{
	return book_simple(&second, SECOND, "second", 0, gen0, 10, seq, 40, &second_h);
}
static int d_book_free(void)
{
	int rc = d_book();
	return rc ? rc : kvp_resv_free(&second, second_h);
}
static int d_same_id(void)
{
	int rc = book_simple(&second, SECOND, "first", 0, gen0, 10, seq, 40, &second_h);
	return rc;
}
static int d_recount(void)
{
	recount(&second, 0);
	return 0;
}
static int d_close(void)
{
	return kvp_rank_close(&second, 0, gen0);
}
static int d_flap(void)
{
	int rc = kvp_rank_close(&second, 0, gen0);
	return rc | kvp_rank_open(&second, 0, ++gen0);
}
static int d_crowd_free_book(void) /* makes room below the place that the first one has chosen */
{
	uint64_t h;
	if (kvp_resv_find(&second, "crowd", 5, &h) == KVP_OK)
		kvp_resv_free(&second, h);
	return d_book();
}
static int d_expire(void)
{
	kvp_resv_expire(&second, UINT64_MAX, 0);
	return 0;
}

static const struct {
	const char *name;
	int (*run)(void);
} deeds[] = {{"free", d_free}, {"prefill", d_prefill}, {"output", d_output}, {"fraction", d_fraction},
	{"book", d_book}, {"book+free", d_book_free}, {"same id", d_same_id}, {"recount", d_recount},
	{"close", d_close}, {"flap", d_flap}, {"expire", d_expire}, {"free+book", d_crowd_free_book}};

/* The first one's flows. */
static void flow_life(void)
{
	double frac = 0.25;
	struct kvp_resv_ask a = {.rank_slot = 0,
		.rank_gen = gen0,
		.prefill_tok = 100,
		.seq = seq,
		.seq_cnt = 36,
		.flags = KVP_RESV_TRACK_PREFILL,
		.now_ns = 1};
	uint64_t h;
	if (kvp_resv_claim(&f.b, FIRST, "first", 5, &h))
		return;
	first_h = h;
	if (kvp_resv_book(&f.b, h, &a)) {
		kvp_resv_abandon(&f.b, h);
		return;
	}
	struct kvp_resv_info info;
	vanished += kvp_resv_info(&f.b, h, &info) != KVP_OK; /* no place lies between the two calls */
	kvp_resv_output(&f.b, h, NULL);
	kvp_resv_output(&f.b, h, &frac);
	kvp_resv_prefill_done(&f.b, h);
	kvp_resv_free(&f.b, h);
}
static void flow_leave(void) /* the booking stays */
{
	book_simple(&f.b, FIRST, "first", 0, gen0, 100, seq, 36, &first_h);
}
static void flow_recount(void)
{
	double frac = 0.75;
	if (book_simple(&f.b, FIRST, "first", 0, gen0, 100, seq, 36, &first_h) == KVP_OK)
		kvp_resv_output(&f.b, first_h, &frac);
	recount(&f.b, 0);
}
static void flow_crowded(void) /* in a table whose lines are mostly taken */
{
	uint64_t crowd[1000];
	for (uint32_t i = 0; i < 1000; i++)
		crowd[i] = 7000000 + i;
	busy = 1;
	book_simple(&second, SECOND, "crowd", 1, 1, 1, crowd, 1000, &second_h);
	busy = 0;
	flow_leave();
}
static void flow_split(void) /* leaves paths that live bookings go on with */
{
	double frac = 0.5;
	uint64_t other[40];
	for (uint32_t i = 0; i < 40; i++)
		other[i] = i < 21 ? seq[i] : 900 + i;
	busy = 1;
	book_simple(&second, SECOND, "crowd", 0, gen0, 1, seq, 40, &second_h);
	kvp_resv_output(&second, second_h, &frac);
	book_simple(&second, SECOND, "crowd2", 0, gen0, 1, other, 39, &second_h);
	busy = 0;
	flow_life();
	busy = 1;
	if (kvp_resv_find(&second, "crowd", 5, &second_h) == KVP_OK)
		kvp_resv_free(&second, second_h);
	if (kvp_resv_find(&second, "crowd2", 6, &second_h) == KVP_OK)
		kvp_resv_free(&second, second_h);
	busy = 0;
	book_simple(&f.b, FIRST, "first", 0, gen0, 100, other, 18, &first_h);
}
static const struct {
	const char *name;
	void (*run)(void);
} flows[] = {{"life", flow_life}, {"leave", flow_leave}, {"recount", flow_recount}, {"crowded", flow_crowded},
	{"split", flow_split}};
#define FLOWS (sizeof(flows) / sizeof(flows[0]))

static void clean(void)
{
	uint32_t cursor = 0;
	uint64_t h;
	while (kvp_resv_iter(&f.b, &cursor, &h) == KVP_OK)
		kvp_resv_free(&f.b, h);
	first_h = second_h = 0;
	if (CTL_STATE(book_ctl(&f.b, 0)) == KVP_CTL_CLOSED)
		kvp_rank_open(&f.b, 0, ++gen0);
}

static int one(int fl, int d, const char *place, uint64_t n)
{
	struct kvp_load l;
	at_place = place;
	at_hit = n;
	hits = 0;
	deed = deeds[d].run;
	kvp_point_hook = weave;
	flows[fl].run();
	kvp_point_hook = NULL;
	uint64_t faults = kvp_book_check(&f.b) + vanished;
	vanished = 0;
	clean();
	kvp_load_read(&f.b, 0, &l);
	uint64_t left = l.prefill_tok + l.requests + l.active_blk_fx + kvp_resv_cnt(&f.b);
	faults += kvp_book_check(&f.b);
	if (faults || left)
		printf("# %s, %s at %s:%" PRIu64 " (rc %d): faults %" PRIu64 ", left over %" PRIu64 "\n",
			flows[fl].name, deeds[d].name, place, n, deed_rc, faults, left);
	return faults == 0 && left == 0;
}

/* The first one tries its claim on another rank, as its picks do when a load has moved. */
static int moved_rc;
static void move_on(const char *place)
{
	struct kvp_resv_ask a = {.rank_slot = 1, .rank_gen = 1, .prefill_tok = 9, .seq = seq, .seq_cnt = 20};
	if (busy || strcmp(place, "book:drop_look") != 0 || ++hits != at_hit)
		return;
	busy = 1;
	moved_rc = kvp_resv_book(&f.b, first_h, &a);
	busy = 0;
}

/* While rank 0 is being closed, a claim whose body still names it becomes a booking of rank 1. */
static int closed_behind_claim(uint64_t n)
{
	struct kvp_resv_ask a = {.rank_slot = 0, .rank_gen = gen0, .prefill_tok = 9, .validate = 1};
	struct kvp_resv_info info;
	int ok = kvp_resv_claim(&f.b, FIRST, "first", 5, &first_h) == KVP_OK;
	kvp_load_read(&f.b, 0, &a.seen);
	a.seen.requests++; /* refused, but only after its body was written */
	ok &= kvp_resv_book(&f.b, first_h, &a) == KVP_ERR_AGAIN;
	at_hit = n;
	hits = 0;
	moved_rc = KVP_OK;
	kvp_point_hook = move_on;
	kvp_rank_close(&second, 0, gen0);
	kvp_point_hook = NULL;
	if (hits >= n)
		ok &= kvp_resv_info(&f.b, first_h, &info) == KVP_OK && info.rank_slot == 1;
	else
		kvp_resv_abandon(&f.b, first_h);
	ok &= moved_rc == KVP_OK && kvp_book_check(&f.b) == 0;
	clean();
	return ok;
}

static void drop_leaves_other_ranks(void)
{
	uint64_t n = 1;
	while (closed_behind_claim(n) && hits >= n)
		n++;
	ok(hits < n && n > 100,
		"a claim may turn into a booking of another rank at %" PRIu64 " instants of a close", n - 1);
}

/* Two bookings of one block split the same entry of eight: the first one's change, which holds the seven it
 * moved, is applied after the seven have ended. */
static void outrun(const char *place)
{
	uint64_t h;
	if (busy)
		return;
	busy = 1;
	if (strcmp(place, "book:split") == 0 && !second_h)
		moved_rc = book_simple(&second, SECOND, "second", 0, gen0, 10, seq, 1, &second_h);
	if (strcmp(place, "book:blocks") == 0 && kvp_resv_find(&second, "crowd", 5, &h) == KVP_OK)
		moved_rc |= kvp_resv_free(&second, h) | kvp_resv_free(&second, second_h);
	busy = 0;
}

static void sum_below_zero_for_a_while(void)
{
	uint64_t h;
	struct kvp_load l;
	book_simple(&second, SECOND, "crowd", 0, gen0, 1, seq, 8, &h);
	moved_rc = KVP_ERR_INVAL;
	kvp_point_hook = outrun;
	book_simple(&f.b, FIRST, "first", 0, gen0, 100, seq, 1, &first_h);
	kvp_point_hook = NULL;
	is_u64((uint64_t)-moved_rc, KVP_OK, "the same entry split by another, then ended");
	kvp_load_read(&f.b, 0, &l);
	is_u64(l.active_blk_fx, KVP_BLK_FX_ONE, "one block is left");
	is_u64(kvp_book_check(&f.b), 0, "as its booking says");
	clean();
}

static void hand_over(const char *place)
{
	if (strcmp(place, "book:sweep_claim") != 0)
		return;
	kvp_point_hook = NULL;
	moved_rc = kvp_resv_hand(&second, first_h);
}

/* A claim that is handed over while its claimer's death is being swept belongs to its new performer. */
static void handed_behind_sweep(void)
{
	struct kvp_resv_ask a = {.rank_slot = 1, .rank_gen = 1, .prefill_tok = 9, .seq = seq, .seq_cnt = 20};
	kvp_resv_claim(&f.b, FIRST, "first", 5, &first_h);
	moved_rc = KVP_ERR_INVAL;
	kvp_point_hook = hand_over;
	kvp_book_sweep_owner(&second, FIRST, NULL, NULL, NULL);
	kvp_point_hook = NULL;
	is_u64((uint64_t)-moved_rc, KVP_OK, "handed over");
	is_u64((uint64_t)-kvp_resv_book(&second, first_h, &a), KVP_OK, "and booked by its new performer");
	is_u64(kvp_book_check(&f.b), 0, "its load is counted");
	clean();
	is_u64(kvp_book_check(&f.b), 0, "and taken off");
}

int main(void)
{
	fixture_make(&f, 2, 64, 1024);
	kvp_book_join(f.mem, &f.g, &second);
	kvp_book_attach(&f.b, FIRST, NULL);
	kvp_book_attach(&second, SECOND, NULL);
	kvp_rank_open(&f.b, 0, ++gen0);
	for (uint32_t i = 0; i < 40; i++)
		seq[i] = 500 + i;
	kvp_rank_open(&f.b, 1, 1);
	for (size_t fl = 0; fl < FLOWS; fl++) {
		spots_clear();
		kvp_point_hook = count_hit;
		flows[fl].run();
		kvp_point_hook = NULL;
		clean();
		for (size_t d = 0; d < sizeof(deeds) / sizeof(deeds[0]); d++) {
			uint64_t tried = 0, bad = 0;
			for (int p = 0; spot[p].name; p++)
				for (uint64_t n = 1; n <= spot[p].hits && n <= HITS_MAX && !bad;
					n++, tried++)
					bad += !one((int)fl, (int)d, spot[p].name, n);
			ok(!bad && tried > 10,
				"%s with %s in between, at %" PRIu64 " instants: loads stay exact",
				flows[fl].name, deeds[d].name, tried);
		}
	}
	drop_leaves_other_ranks();
	sum_below_zero_for_a_while();
	handed_behind_sweep();
	kvp_book_leave(&second);
	fixture_drop(&f);
	return done();
}
