/* tests/book_fixture.h — a booking object in shared memory for the booking tests. */
#ifndef KVP_TESTS_BOOK_FIXTURE_H
#define KVP_TESTS_BOOK_FIXTURE_H

#include "shm/sweep.h"
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include "tests/procs.h"
#include "tests/tap.h"

struct fixture {
	struct kvp_geom g;
	void *mem;
	uint64_t bytes;
	struct kvp_book b;
};

__attribute__((unused)) static struct kvp_geom fixture_geom(uint32_t ranks, uint32_t resv, uint64_t blocks)
{
	struct kvp_geom g = {.slot_max = 16,
		.rank_max = ranks,
		.index_rank_max = 64,
		.resv_max = resv,
		.block_max = 10000,
		.active_block_max = blocks,
		.queued_max = 64,
		.part_max = 4,
		.region_gen = 1,
		.salt = {0x1234567890abcdefULL, 0xfedcba0987654321ULL}};
	return g;
}

/* Shared anonymous memory: children of fork see the same object. */
__attribute__((unused)) static void fixture_make(
	struct fixture *f, uint32_t ranks, uint32_t resv, uint64_t blocks)
{
	f->g = fixture_geom(ranks, resv, blocks);
	f->bytes = kvp_book_footprint(&f->g);
	f->mem = shared(f->bytes);
	if (kvp_book_new(f->mem, &f->g) || kvp_book_join(f->mem, &f->g, &f->b)) {
		printf("Bail out! no booking object\n");
		exit(1);
	}
}

__attribute__((unused)) static void fixture_drop(struct fixture *f)
{
	kvp_book_leave(&f->b);
	munmap(f->mem, f->bytes);
}

/* xorshift; seeded from KVP_SEED or the clock, printed. */
static uint64_t rnd_state;
__attribute__((unused)) static void rnd_seed(void)
{
	rnd_state = tap_seed(0) | 1;
}
__attribute__((unused)) static uint64_t rnd(void)
{
	rnd_state ^= rnd_state << 13;
	rnd_state ^= rnd_state >> 7;
	rnd_state ^= rnd_state << 17;
	return rnd_state;
}
__attribute__((unused)) static uint32_t rnd_below(uint32_t n)
{
	return (uint32_t)((rnd() >> 11) % n);
}

__attribute__((unused)) static uint64_t now_ns(void)
{
	struct timespec ts;
	clock_gettime(CLOCK_MONOTONIC, &ts);
	return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

/* Claims id and books it with n hashes; returns the code of the first call that fails. */
__attribute__((unused)) static int book_simple(struct kvp_book *b, kvp_owner owner, const char *id,
	uint32_t rank, uint32_t gen, uint64_t tok, const uint64_t *seq, uint32_t n, uint64_t *h)
{
	int rc = kvp_resv_claim(b, owner, id, strlen(id), h);
	if (rc)
		return rc;
	struct kvp_resv_ask a = {.rank_slot = rank,
		.rank_gen = gen,
		.prefill_tok = tok,
		.seq = seq,
		.seq_cnt = n,
		.flags = KVP_RESV_TRACK_PREFILL,
		.now_ns = 1000};
	rc = kvp_resv_book(b, *h, &a);
	if (rc)
		kvp_resv_abandon(b, *h);
	return rc;
}
#endif
