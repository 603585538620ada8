/* Booking: scan of all ranks + claim + book + prefill done + free, for growing numbers of ranks, with and
 * without prompt blocks, one and two processes. One line a case; medians of five runs. cycles_cpu_s: a second
 * of the processes' own processor time, which other load on the machine does not change.
 *   make BUILD=release build/release/bench/b_book && build/release/bench/b_book */
#include "shm/sweep.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define RUNS 5
#define OPS_MAX 100000

struct shared {
	uint64_t go, ready;
	uint64_t p50[RUNS][2], p99[RUNS][2], rate[RUNS][2], cpu[RUNS][2], book50[RUNS][2], book99[RUNS][2];
	uint64_t stale[RUNS][2];
};

static struct kvp_geom g = { .slot_max = 16, .rank_max = 16384, .index_rank_max = 64, .resv_max = 65536,
	.block_max = 10000, .active_block_max = 4194304, .queued_max = 64, .part_max = 4, .region_gen = 1,
	.salt = { 0x1234567890abcdefULL, 0xfedcba0987654321ULL } };
static struct shared *sh;
static void *mem;
uint64_t miss_fx[16384]; /* cost of the blocks that a rank has not cached; all alike here */

static uint64_t cpu_ns(void)
{
	struct timespec ts;
	clock_gettime(CLOCK_THREAD_CPUTIME_ID, &ts);
	return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

static uint64_t now_ns(void)
{
	struct timespec ts;
	clock_gettime(CLOCK_MONOTONIC, &ts);
	return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

static int by_value(const void *a, const void *b)
{
	uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
	return x < y ? -1 : x > y;
}

/* Cost as a selection has it: tokens not cached and live blocks, one block = 16 tokens; fixed point. */
static inline uint64_t cost_of(struct kvp_load_view v, uint32_t r)
{
	uint64_t tok, blk;
	kvp_load_peek(v, r, &tok, &blk);
	return (tok << 16) + (blk >> 20) + miss_fx[r];
}

/* The cheapest of ranks first..end. */
static uint64_t cheapest(const struct kvp_book *b, uint32_t first, uint32_t end, uint32_t *pick)
{
	struct kvp_load_view v = kvp_load_view(b);
	uint64_t best = UINT64_MAX;
#pragma GCC unroll 4
	for (uint32_t r = first; r < end; r++) {
		uint64_t c = cost_of(v, r);
		if (__builtin_expect(c < best, 0)) {
			best = c;
			*pick = r;
		}
	}
	return best;
}

/* The least loaded rank; start spreads ties. */
static uint32_t scan(const struct kvp_book *b, uint32_t ranks, uint32_t start, struct kvp_load *best)
{
	uint32_t pick = start, low = 0;
	uint64_t cost = cheapest(b, start, ranks, &pick);
	if (start && cheapest(b, 0, start, &low) < cost)
		pick = low;
	kvp_load_read(b, pick, best);
	return pick;
}

static uint64_t select_and_book(struct kvp_book *b, uint64_t h, uint32_t ranks, uint32_t start, uint64_t *seq,
	uint32_t blocks)
{
	struct kvp_resv_ask a = { .rank_gen = 1, .prefill_tok = 512, .seq = seq, .seq_cnt = blocks,
		.flags = KVP_RESV_TRACK_PREFILL, .validate = 1 };
	uint64_t again = 0;
	for (;; again++) {
		a.rank_slot = scan(b, ranks, start, &a.seen);
		a.validate = again < 4;
		if (kvp_resv_book(b, h, &a) == KVP_OK)
			return again;
	}
}

static void cycle_run(uint32_t proc, uint32_t run, uint32_t ranks, uint32_t blocks)
{
	static uint64_t lat[OPS_MAX], book[OPS_MAX], held[8];
	static char ids[OPS_MAX][48];
	struct kvp_book b;
	kvp_book_join(mem, &g, &b);
	kvp_book_attach(&b, KVP_OWNER(proc + 1, 1), NULL);
	madvise(mem, kvp_book_footprint(&g), MADV_POPULATE_WRITE); /* page tables are not inherited */
	uint32_t ops = blocks ? 4000 : OPS_MAX;
	uint64_t seq[512], again = 0;
	for (uint32_t i = 0; i < ops; i++)
		snprintf(ids[i], sizeof(ids[i]), "%08x-%04x-4000-8000-%012x", i, proc, i * 7919);
	kvp_faa_ar_u64(&sh->ready, 1);
	while (!kvp_ld_acq_u64(&sh->go))
		sched_yield();
	uint64_t begin = now_ns(), cpu = cpu_ns();
	for (uint32_t i = 0; i < ops; i++) {
		uint64_t h, was = held[i % 8];
		for (uint32_t k = 0; k < blocks; k++)
			seq[k] = k < 64 ? k + 1 : (uint64_t)(i % 64 + 64 * proc) * 1000003 + k;
		uint64_t t0 = now_ns();
		if (kvp_resv_claim(&b, b.owner, ids[i], 36, &h))
			abort();
		again += select_and_book(&b, h, ranks, (i * 31 + proc * 17) % ranks, seq, blocks);
		uint64_t t1 = now_ns();
		if (i >= 8) {
			kvp_resv_prefill_done(&b, was);
			kvp_resv_free(&b, was);
		}
		uint64_t t2 = now_ns();
		held[i % 8] = h;
		book[i] = t1 - t0;
		lat[i] = t2 - t0;
	}
	uint64_t end = now_ns();
	cpu = cpu_ns() - cpu;
	for (uint32_t i = 0; i < 8; i++)
		kvp_resv_free(&b, held[i]);
	qsort(lat, ops, sizeof(lat[0]), by_value);
	qsort(book, ops, sizeof(book[0]), by_value);
	sh->p50[run][proc] = lat[ops / 2];
	sh->p99[run][proc] = lat[ops / 100 * 99];
	sh->book50[run][proc] = book[ops / 2];
	sh->book99[run][proc] = book[ops / 100 * 99];
	sh->rate[run][proc] = (uint64_t)ops * 1000000000u / (end - begin);
	sh->cpu[run][proc] = (uint64_t)ops * 1000000000u / cpu;
	sh->stale[run][proc] = again * 10000 / ops;
}

static uint64_t median(uint64_t v[RUNS][2], uint32_t procs, int add)
{
	uint64_t x[RUNS];
	for (int r = 0; r < RUNS; r++)
		x[r] = procs == 1 ? v[r][0] : add ? v[r][0] + v[r][1] : (v[r][0] + v[r][1]) / 2;
	qsort(x, RUNS, sizeof(x[0]), by_value);
	return x[RUNS / 2];
}

static void cycle(struct kvp_book *b, uint32_t ranks, uint32_t blocks, uint32_t procs)
{
	for (uint32_t run = 0; run < RUNS; run++) {
		sh->go = sh->ready = 0;
		for (uint32_t p = 0; p < procs; p++)
			if (fork() == 0) {
				cpu_set_t set;
				CPU_ZERO(&set);
				CPU_SET(p, &set);
				sched_setaffinity(0, sizeof(set), &set);
				cycle_run(p, run, ranks, blocks);
				_exit(0);
			}
		while (kvp_ld_acq_u64(&sh->ready) < procs)
			sched_yield();
		kvp_st_rel_u64(&sh->go, 1);
		while (wait(NULL) > 0)
			;
	}
	printf("bench=book.cycle ranks=%u blocks=%u procs=%u p50_ns=%" PRIu64 " p99_ns=%" PRIu64
	       " cycles_s=%" PRIu64 " cycles_cpu_s=%" PRIu64 " again_per_10k=%" PRIu64
	       " select_reserve_p50_ns=%" PRIu64 " select_reserve_p99_ns=%" PRIu64 "\n",
		ranks, blocks, procs, median(sh->p50, procs, 0), median(sh->p99, procs, 0),
		median(sh->rate, procs, 1), median(sh->cpu, procs, 1),
		median(sh->stale, procs, 0), median(sh->book50, procs, 0), median(sh->book99, procs, 0));
	fflush(stdout);
	if (kvp_book_check(b))
		abort();
}

/* The two numbers every other one is read against: a scan alone, and scan + one plain fetch-and-add. */
static void calibrate(struct kvp_book *b, uint32_t ranks)
{
	uint64_t best_scan = UINT64_MAX, best_faa = UINT64_MAX, word = 0;
	for (int run = 0; run < 20; run++) {
		struct kvp_load l;
		uint64_t t0 = now_ns(), sum = 0;
		for (int i = 0; i < 200; i++)
			sum += scan(b, ranks, (uint32_t)i % ranks, &l);
		uint64_t t1 = now_ns();
		for (int i = 0; i < 200; i++) {
			sum += scan(b, ranks, (uint32_t)i % ranks, &l);
			kvp_faa_ar_u64(&word, sum);
		}
		uint64_t t2 = now_ns();
		best_scan = t1 - t0 < best_scan ? t1 - t0 : best_scan;
		best_faa = t2 - t1 < best_faa ? t2 - t1 : best_faa;
	}
	printf("bench=book.scan ranks=%u scan_ns=%.1f scan_ns_rank=%.2f scan_faa_ns=%.1f\n", ranks,
		(double)best_scan / 200, (double)best_scan / 200 / ranks, (double)best_faa / 200);
}

static void blocks_alone(struct kvp_book *b)
{
	uint64_t seq[512], h, best_book = UINT64_MAX, best_free = UINT64_MAX, best_depth = UINT64_MAX;
	for (int run = 0; run < 2000; run++) {
		for (uint32_t k = 0; k < 512; k++)
			seq[k] = (uint64_t)run * 1000003 + k;
		struct kvp_resv_ask a = { .rank_gen = 1, .rank_slot = 5, .seq = seq, .seq_cnt = 512 };
		kvp_resv_claim(b, b->owner, &run, sizeof(run), &h);
		uint64_t t0 = now_ns();
		kvp_resv_book(b, h, &a);
		uint64_t t1 = now_ns();
		uint32_t d = kvp_active_depth(b, 5, 1, seq, 512);
		uint64_t t2 = now_ns();
		kvp_resv_free(b, h);
		uint64_t t3 = now_ns();
		if (d != 512)
			abort();
		best_book = t1 - t0 < best_book ? t1 - t0 : best_book;
		best_depth = t2 - t1 < best_depth ? t2 - t1 : best_depth;
		best_free = t3 - t2 < best_free ? t3 - t2 : best_free;
	}
	printf("bench=book.blocks blocks=512 book_ns_block=%.1f free_ns_block=%.1f depth_ns=%" PRIu64 "\n",
		(double)best_book / 512, (double)best_free / 512, best_depth);
}

int main(void)
{
	static const uint32_t ranks[] = { 8, 64, 512, 1024 };
	mem = mmap(NULL, kvp_book_footprint(&g), PROT_READ | PROT_WRITE,
		MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	sh = mmap(NULL, sizeof(*sh), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	struct kvp_book b;
	madvise(mem, kvp_book_footprint(&g), MADV_POPULATE_WRITE); /* as a region does ahead of use */
	if (mem == MAP_FAILED || sh == MAP_FAILED || kvp_book_new(mem, &g) || kvp_book_join(mem, &g, &b))
		return 1;
	kvp_book_attach(&b, KVP_OWNER(9, 1), NULL);
	for (uint32_t r = 0; r < 1024; r++)
		kvp_rank_open(&b, r, 1);
	for (int i = 0; i < 4; i++)
		calibrate(&b, ranks[i]);
	blocks_alone(&b);
	for (uint32_t procs = 1; procs <= 2; procs++)
		for (int i = 0; i < 4; i++)
			for (uint32_t blocks = 0; blocks <= 512; blocks += 512)
				cycle(&b, ranks[i], blocks, procs);
	return 0;
}
