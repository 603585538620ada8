/* Booking through its public headers: life cycle, errors, ids of every length, capacity, generations, sweep,
 * expiry. */
#include "shm/book_priv.h"
#include "tests/book_fixture.h"

#include <math.h>

_Static_assert(sizeof(struct kvp_rank_shm) == 32, "two ranks in a cache line where there are many");

#define ME KVP_OWNER(1, 5)
#define OTHER KVP_OWNER(2, 9)

static struct fixture f;
static struct kvp_ctr_column_shm col;

static struct kvp_load load(uint32_t rank)
{
	struct kvp_load l;
	kvp_load_read(&f.b, rank, &l);
	return l;
}

static void test_lifecycle(void)
{
	struct kvp_geom g = fixture_geom(4, 64, 1024), bad = g;
	struct kvp_book b;
	ok(kvp_book_footprint(&g) % KVP_PAGE == 0 && kvp_book_footprint(&g) > 0, "footprint is whole pages");
	bad.resv_max = 63;
	is_u64(kvp_book_footprint(&bad), 0, "too few reservations: no footprint");
	bad = g;
	bad.active_block_max = 1023;
	is_u64(kvp_book_footprint(&bad), 0, "too few active blocks: no footprint");
	bad = g;
	bad.rank_max = 65537;
	is_u64(kvp_book_footprint(&bad), 0, "too many ranks: no footprint");
	is_u64(kvp_book_footprint(NULL), 0, "no geometry: no footprint");
	uint64_t n = kvp_book_footprint(&g);
	char *mem = mmap(NULL, n + KVP_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	is_u64(kvp_book_join(NULL, &g, &b), KVP_ERR_INVAL, "join of NULL");
	is_u64(kvp_book_join(mem + 8, &g, &b), KVP_ERR_INVAL, "join of misaligned memory");
	is_u64(kvp_book_join(mem, &g, &b), KVP_ERR_AGAIN, "join before new: AGAIN");
	is_u64(kvp_book_new(mem + 64, &g), KVP_ERR_INVAL, "new in memory that is not page-aligned");
	is_u64(kvp_book_new(NULL, &g), KVP_ERR_INVAL, "new in NULL");
	is_u64(kvp_book_new(mem, &g), KVP_OK, "new");
	is_u64(kvp_book_join(mem, &bad, &b), KVP_ERR_LAYOUT, "join with another geometry");
	is_u64(kvp_book_join(mem, &g, &b), KVP_OK, "join");
	is_u64(kvp_book_check(&b), 0, "a new object has no faults");
	kvp_book_leave(&b);
	kvp_book_delete(mem);
	is_u64(kvp_book_join(mem, &g, &b), KVP_ERR_AGAIN, "join after delete: AGAIN");
	munmap(mem, n + KVP_PAGE);
}

static uint64_t test_claim(void)
{
	struct kvp_book *b = &f.b;
	uint64_t h, h2;
	struct kvp_resv_info i;
	is_u64(kvp_resv_claim(b, ME, "a", 1, &h), KVP_OK, "claim");
	is_u64(kvp_resv_claim(b, OTHER, "a", 1, &h2), KVP_ERR_EXISTS, "a claimed id is taken");
	is_u64(kvp_resv_find(b, "a", 1, &h2), KVP_ERR_NOTFOUND, "find does not see a claim");
	is_u64(kvp_resv_prefill_done(b, h), KVP_ERR_NOTFOUND, "prefill_done of a claim");
	is_u64(kvp_resv_output(b, h, NULL), KVP_ERR_NOTFOUND, "output of a claim");
	is_u64(kvp_resv_free(b, h), KVP_ERR_NOTFOUND, "free of a claim");
	is_u64(kvp_resv_info(b, h, &i), KVP_ERR_NOTFOUND, "info of a claim");
	return h;
}

static void test_steps(uint64_t h)
{
	struct kvp_book *b = &f.b;
	uint64_t h2, seq[3] = { 11, 12, 13 };
	struct kvp_resv_info i;
	struct kvp_resv_ask a = {.worker_id = 77,
		.dp_rank = 2,
		.part = 3,
		.rank_slot = 1,
		.rank_gen = 9,
		.seq = seq,
		.seq_cnt = 3,
		.prefill_tok = 100,
		.isl_tok = 120,
		.expected_output_tok = 50,
		.lora_hash = 8,
		.flags = KVP_RESV_TRACK_PREFILL | KVP_RESV_LEASED,
		.now_ns = 4711};
	is_u64(kvp_resv_book(b, h, &a), KVP_ERR_NOTFOUND, "book on a generation that is not open");
	a.rank_gen = 1;
	a.rank_slot = 4;
	is_u64(kvp_resv_book(b, h, &a), KVP_ERR_INVAL, "book on a rank slot out of range");
	a.rank_slot = 3;
	is_u64(kvp_resv_book(b, h, &a), KVP_ERR_NOTFOUND, "book on a rank that was never opened");
	a.rank_slot = 1;
	a.seq_cnt = KVP_RESV_SEQ_MAX + 1;
	is_u64(kvp_resv_book(b, h, &a), KVP_ERR_INVAL, "more hashes than a booking may have");
	a.seq_cnt = 3;
	a.validate = 1;
	a.seen = load(1);
	a.seen.version++;
	is_u64(kvp_resv_book(b, h, &a), KVP_ERR_AGAIN, "validated booking after the load moved");
	a.seen = load(1);
	a.seen.active_blk_fx++;
	is_u64(kvp_resv_book(b, h, &a), KVP_ERR_AGAIN, "validated booking after the blocks moved");
	is_u64(load(1).requests, 0, "refused bookings count nothing");
	a.seen = load(1);
	is_u64(kvp_resv_book(b, h, &a), KVP_OK, "validated booking with the load as seen");
	is_u64(kvp_resv_book(b, h, &a), KVP_ERR_NOTFOUND, "a booking is booked once");
	is_u64(kvp_resv_abandon(b, h), KVP_ERR_NOTFOUND, "a booking is not abandoned");
	ok(kvp_resv_find(b, "a", 1, &h2) == KVP_OK && h2 == h, "find sees the booking");
	ok(kvp_resv_info(b, h, &i) == KVP_OK && i.worker_id == 77 && i.dp_rank == 2 && i.part == 3 &&
			i.rank_slot == 1 && i.rank_gen == 1 && i.seq_cnt == 3 && i.prefill_tok == 100 &&
			i.isl_tok == 120 && i.expected_output_tok == 50 && i.lora_hash == 8 &&
			i.booked_ns == 4711 && i.owner == ME && i.flags == a.flags && i.prefill_active &&
			i.output_cnt == 0 && strcmp(i.id, "a") == 0,
		"info tells everything that was asked");
	uint64_t got[4];
	uint32_t n;
	ok(kvp_resv_seq(b, h, 1, got, 4, &n) == KVP_OK && n == 2 && got[0] == 12 && got[1] == 13,
		"seq from the middle");
	is_u64(kvp_active_depth(b, 1, 1, seq, 3), 3, "its blocks are live");
	is_u64(kvp_active_depth(b, 1, 2, seq, 3), 0, "not for another generation");
	is_u64(kvp_active_depth(b, 0, 1, seq, 3), 0, "not on another rank");
	double half = 0.5, over = 1.5, under = -0.1, nan = NAN;
	is_u64(kvp_resv_output(b, 12345, &over), KVP_ERR_INVAL, "fraction over 1, checked before the handle");
	is_u64(kvp_resv_output(b, h, &under), KVP_ERR_INVAL, "fraction under 0");
	is_u64(kvp_resv_output(b, h, &nan), KVP_ERR_INVAL, "fraction NaN");
	is_u64(kvp_resv_output(b, h, &half), KVP_OK, "output with a fraction");
	struct kvp_load l = load(1);
	ok(l.prefill_tok == 100 && l.requests == 1 && l.active_blk_fx == 2 * KVP_BLK_FX_ONE,
		"three blocks and an output "
		"at one half each");
	ok(kvp_resv_prefill_done(b, h) == KVP_OK && load(1).prefill_tok == 0,
		"prefill_done takes the tokens");
	ok(kvp_resv_prefill_done(b, h) == KVP_OK && load(1).prefill_tok == 0, "repeated: OK, no change");
	is_u64(kvp_resv_free(b, h), KVP_OK, "free");
	is_u64(kvp_resv_free(b, h), KVP_ERR_NOTFOUND, "free once only");
	l = load(1);
	is_u64(l.prefill_tok + l.requests + l.active_blk_fx, 0, "nothing is left");
	is_u64(kvp_resv_prefill_done(b, h), KVP_ERR_NOTFOUND, "prefill_done after the free");
	is_u64(kvp_resv_claim(b, ME, "a", 1, &h2), KVP_OK, "the id is free again");
	ok(h2 != h, "under another handle");
	is_u64(kvp_resv_abandon(b, h2), KVP_OK, "abandon");
	is_u64(kvp_resv_abandon(b, h2), KVP_ERR_NOTFOUND, "abandon once only");
	is_u64(kvp_resv_free(b, 0), KVP_ERR_NOTFOUND, "handle 0 is nobody's");
	is_u64(kvp_resv_free(b, UINT64_MAX), KVP_ERR_NOTFOUND, "a handle out of range is nobody's");
	is_u64(col.val[KVP_CTR_BOOK_BOOKED], 1, "one booking was counted");
	is_u64(col.val[KVP_CTR_BOOK_STALE], 2, "two outdated picks were counted");
}

static void test_ids(void)
{
	struct kvp_book *b = &f.b;
	static char id[KVP_RESV_ID_MAX + 1];
	uint64_t h, found, bad = 0;
	for (size_t i = 0; i < sizeof(id); i++)
		id[i] = (char)(i * 7 + i / 256);
	is_u64(kvp_resv_claim(b, ME, id, 0, &h), KVP_ERR_INVAL, "an empty id");
	is_u64(kvp_resv_claim(b, ME, id, sizeof(id), &h), KVP_ERR_INVAL, "an id over the limit");
	for (uint32_t len = 1; len <= KVP_RESV_ID_MAX; len += len < 300 ? 1 : 211) {
		struct kvp_resv_ask a = { .rank_slot = 0, .rank_gen = 1 };
		struct kvp_resv_info i;
		bad += kvp_resv_claim(b, ME, id, len, &h) != KVP_OK || kvp_resv_book(b, h, &a) != KVP_OK;
		bad += kvp_resv_claim(b, ME, id, len, &found) != KVP_ERR_EXISTS;
		bad += kvp_resv_find(b, id, len, &found) != KVP_OK || found != h;
		bad += kvp_resv_find(b, id, len - 1, &found) == KVP_OK;
		bad += kvp_resv_info(b, h, &i) != KVP_OK || i.id_len != len || memcmp(i.id, id, len) != 0;
		bad += kvp_resv_free(b, h) != KVP_OK;
	}
	is_u64(bad, 0, "ids of 1..4096 bytes with any byte are stored, found and given back");
	is_u64(kvp_book_check(b), 0, "and leave no chunk");
}

static void test_capacity(void)
{
	struct kvp_book *b = &f.b;
	uint64_t h[65], seq[2000], got = 0, x;
	char id[16];
	for (uint32_t i = 0; i < 64; i++) {
		snprintf(id, sizeof(id), "cap-%u", i);
		got += book_simple(b, ME, id, 0, 1, 1, NULL, 0, &h[i]) == KVP_OK;
	}
	is_u64(got, 64, "resv_max bookings fit");
	is_u64(kvp_resv_claim(b, ME, "more", 4, &x), KVP_ERR_FULL, "one more is FULL");
	is_u64(kvp_resv_cnt(b), 64, "the refused claim is not counted");
	kvp_resv_free(b, h[10]);
	is_u64(kvp_resv_claim(b, ME, "more", 4, &x), KVP_OK, "after a free there is room");
	kvp_resv_abandon(b, x);
	uint32_t cursor = 0, n = 0;
	while (kvp_resv_iter(b, &cursor, &x) == KVP_OK)
		n++;
	is_u64(n, 63, "iteration meets every booking once");
	for (uint32_t i = 0; i < 64; i++)
		kvp_resv_free(b, h[i]);
	uint32_t fit = 0, full = 0;
	for (uint32_t i = 0; i < 60; i++) {
		for (uint32_t k = 0; k < 100; k++)
			seq[k] = i * 1000 + k + 1;
		snprintf(id, sizeof(id), "blk-%u", i);
		int rc = book_simple(b, ME, id, 0, 1, 1, seq, 100, &h[i]);
		fit += rc == KVP_OK;
		full += rc == KVP_ERR_FULL;
		h[i] = rc ? 0 : h[i];
	}
	ok(fit >= 10 && full > 0 && fit + full == 60,
		"at least active_block_max blocks fit, then FULL (%u x 100)", fit);
	is_u64(load(0).active_blk_fx >> KVP_BLK_FX_SHIFT, fit * 100, "a refused booking leaves no block");
	is_u64(kvp_resv_cnt(b), fit, "nor a claim");
	is_u64(kvp_book_check(b), 0, "nor anything else");
	for (uint32_t i = 0; i < 60; i++)
		kvp_resv_free(b, h[i]);
	is_u64(kvp_book_check(b), 0, "all can be freed");
}

static void test_generations(void)
{
	struct kvp_book *b = &f.b;
	uint64_t a, c, seq[5] = { 1, 2, 3, 4, 5 };
	is_u64(kvp_rank_open(b, 2, 0), KVP_ERR_INVAL, "generation 0 is none");
	is_u64(kvp_rank_open(b, 99, 1), KVP_ERR_INVAL, "open of a slot out of range");
	kvp_rank_open(b, 2, 1);
	book_simple(b, ME, "A", 2, 1, 30, seq, 3, &a);
	is_u64(kvp_rank_open(b, 2, 1), KVP_OK, "open again changes nothing");
	is_u64(load(2).requests, 1, "its load stays");
	is_u64(kvp_rank_close(b, 2, 7), KVP_ERR_NOTFOUND, "close of another generation");
	is_u64(kvp_rank_close(b, 2, 1), KVP_OK, "close");
	is_u64(load(2).requests + load(2).prefill_tok + load(2).active_blk_fx, 0,
		"a closed rank has no load");
	is_u64(kvp_resv_find(b, "A", 1, &c), KVP_ERR_NOTFOUND, "its booking is gone");
	is_u64(book_simple(b, ME, "late", 2, 1, 30, seq, 3, &c), KVP_ERR_NOTFOUND,
		"no booking on a closed rank");
	kvp_rank_open(b, 2, 2);
	is_u64(book_simple(b, ME, "A", 2, 2, 20, seq, 2, &c), KVP_OK, "the id books on the next generation");
	is_u64(kvp_load_blocks(&(struct kvp_load){.active_blk_fx = load(2).active_blk_fx}), 2,
		"which starts at zero");
	is_u64(kvp_resv_free(b, a), KVP_ERR_NOTFOUND, "the late free of the old booking answers NOTFOUND");
	is_u64(kvp_resv_output(b, a, NULL), KVP_ERR_NOTFOUND, "so does its output block");
	is_u64(load(2).requests, 1, "and leaves the new one alone");
	is_u64(kvp_resv_free(b, c), KVP_OK, "free of the new booking");
	is_u64(load(2).requests + load(2).prefill_tok + load(2).active_blk_fx, 0,
		"down to zero, never below");
	is_u64(kvp_book_check(b), 0, "check");
}

static uint32_t visited;
static void visit(void *ctx, uint64_t h)
{
	struct kvp_resv_info i;
	visited += kvp_resv_info(ctx, h, &i) == KVP_OK && i.owner == OTHER;
}

static void test_sweep_expire(void)
{
	struct kvp_book *b = &f.b;
	struct kvp_sweep_result r;
	uint64_t h, keep, mine, seq[4] = { 1, 2, 3, 4 };
	struct kvp_resv_ask a = { .rank_slot = 0, .rank_gen = 1, .seq = seq, .seq_cnt = 4, .now_ns = 1000,
		.flags = KVP_RESV_NODE_OWNED };
	kvp_resv_claim(b, OTHER, "claim", 5, &h);
	kvp_resv_claim(b, OTHER, "keep", 4, &keep);
	kvp_resv_book(b, keep, &a);
	book_simple(b, OTHER, "gone", 0, 1, 7, seq, 2, &h);
	book_simple(b, ME, "mine", 0, 1, 7, seq, 3, &mine);
	is_u64(kvp_book_sweep_owner(b, KVP_OWNER(2, 8), NULL, NULL, &r), KVP_OK,
		"sweep of the slot's former owner");
	is_u64(r.free_cnt, 0, "frees no settled booking of the present one");
	kvp_resv_claim(b, OTHER, "claim", 5, &h);
	is_u64(kvp_book_sweep_owner(b, OTHER, visit, b, &r), KVP_OK, "sweep of the dead owner");
	ok(r.claim_cnt == 1 && r.free_cnt == 1 && r.kept_cnt == 1 && visited == 1,
		"one claim, one booking, one kept, one "
		"visit");
	is_u64(load(0).requests, 2, "the node's and mine stay");
	is_u64(kvp_resv_free(b, keep), KVP_OK, "the node's is freed by whoever is told to");
	a.flags = KVP_RESV_LEASED;
	kvp_resv_claim(b, ME, "leased", 6, &keep);
	kvp_resv_book(b, keep, &a);
	is_u64(kvp_resv_expire(b, 6000, 5000), 0, "a booking exactly at the limit stays");
	is_u64(kvp_resv_expire(b, 6001, 5000), 1, "one over the limit goes, a leased one never");
	is_u64(kvp_resv_free(b, mine), KVP_ERR_NOTFOUND, "free after expiry: NOTFOUND");
	is_u64(kvp_resv_lapse(b, 6000, 5000), 0, "a lease exactly at its end holds");
	is_u64(kvp_resv_renew(b, keep, 4000), KVP_OK, "it is renewed");
	book_simple(b, ME, "mine", 0, 1, 7, seq, 3, &mine);
	is_u64(kvp_resv_lapse(b, 9000, 5000), 0, "and holds so much longer");
	is_u64(kvp_resv_lapse(b, 9001, 5000), 1, "not renewed again it ends");
	is_u64(kvp_resv_renew(b, keep, 9002), KVP_ERR_NOTFOUND, "an ended booking can't be renewed");
	is_u64(kvp_resv_free(b, keep), KVP_ERR_NOTFOUND, "nor freed");
	is_u64(kvp_resv_free(b, mine), KVP_OK, "a booking without lease is left alone");
	is_u64(kvp_book_check(b), 0, "check");
	is_u64(kvp_resv_cnt(b), 0, "nothing left");
}

static void test_clamp(void)
{
	struct kvp_book *b = &f.b;
	uint64_t h[2];
	book_simple(b, ME, "huge-1", 0, 1, UINT64_MAX, NULL, 0, &h[0]);
	book_simple(b, ME, "huge-2", 0, 1, UINT64_MAX, NULL, 0, &h[1]);
	is_u64(load(0).prefill_tok, KVP_LOAD_TOK_MAX, "the sum of tokens is clamped");
	is_u64(load(0).requests, 2, "without a carry into the requests");
	kvp_resv_free(b, h[0]);
	kvp_resv_free(b, h[1]);
	is_u64(load(0).prefill_tok + load(0).requests, 0, "and without a borrow on the way back");
}

/* A check costs no memory for what was never used. */
static void test_check_touches_little(void)
{
	static unsigned char in[1u << 16];
	fixture_make(&f, 128, 4096, 4194304);
	uint64_t faults = kvp_book_check(&f.b), pages = f.bytes / KVP_PAGE, resident = 0;
	ok(pages <= sizeof(in) && mincore(f.mem, f.bytes, in) == 0, "residence of %" PRIu64 " pages", pages);
	for (uint64_t i = 0; i < pages && i < sizeof(in); i++)
		resident += in[i] & 1;
	is_u64(faults, 0, "an empty table has no faults");
	ok(resident < 1024, "and its check touches few of its pages (%" PRIu64 ")", resident);
	fixture_drop(&f);
}

/* Many short prompts in a small table, so that lines run over: every one is seen in full, no other is. */
static void test_crowded(void)
{
	enum { PROMPTS = 700, BLOCKS = 11 }; /* two groups each */
	static uint64_t seq[PROMPTS][BLOCKS];
	uint64_t h[PROMPTS], x = 1, lost = 0, seen = 0;
	struct fixture c;
	fixture_make(&c, 4, 1024, 16384);
	kvp_rank_open(&c.b, 2, 1);
	for (uint32_t p = 0; p < PROMPTS; p++) {
		char id[16];
		for (uint32_t i = 0; i < BLOCKS; i++)
			seq[p][i] = x = x * 6364136223846793005ull + 1442695040888963407ull;
		snprintf(id, sizeof(id), "c%u", p);
		lost += p % 7 == 0 ? 0 : book_simple(&c.b, ME, id, 2, 1, 0, seq[p], BLOCKS, &h[p]) != KVP_OK;
	}
	is_u64(lost, 0, "all are booked");
	ok(kvp_ld_rlx_u64(&c.b.hdr->act_reach) > 1, "and lie in more lines than one");
	for (uint32_t p = 0; p < PROMPTS; p++) {
		uint32_t d = kvp_active_depth(&c.b, 2, 1, seq[p], BLOCKS);
		lost += p % 7 && d != BLOCKS;
		seen += p % 7 == 0 && d != 0;
	}
	is_u64(lost, 0, "each is live in full");
	is_u64(seen, 0, "what was not booked is not live");
	fixture_drop(&c);
}

int main(void)
{
	test_lifecycle();
	fixture_make(&f, 4, 64, 1024);
	kvp_book_attach(&f.b, ME, &col);
	kvp_rank_open(&f.b, 0, 1);
	kvp_rank_open(&f.b, 1, 1);
	test_steps(test_claim());
	test_ids();
	test_capacity();
	test_generations();
	test_sweep_expire();
	test_clamp();
	is_u64(kvp_load_blocks(&(struct kvp_load){.active_blk_fx = KVP_BLK_FX_ONE / 2}), 1,
		"a half rounds up");
	is_u64(kvp_load_blocks(&(struct kvp_load){.active_blk_fx = UINT64_MAX}), (1u << 24) - 1,
		"no overflow in rounding");
	fixture_drop(&f);
	test_check_touches_little();
	test_crowded();
	return done();
}
