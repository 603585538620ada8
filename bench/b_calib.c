/* The two numbers that other figures are read against, and the machine they were taken on.
 *   b_calib [MiB, default 640]
 * M: a dependent random load, one cache line a step, over that much memory (anonymous, 4 KiB pages; M_huge:
 * the same with transparent huge pages, if the kernel gives them). H: one step of the tree's key chain.
 * Medians of 5,
 * in processor time. */
#include "bench/bench.h"
#include "shm/radix_priv.h"

#include <kvpick/hash.h>

#define REPEATS 5
#define STEPS 400000
#define CHAIN_STEPS 4000000

static uint64_t sink;

/* The lines of the memory, linked into one random cycle. */
static uint64_t *cycle(uint64_t lines, int advice)
{
	uint64_t bytes = lines * 64;
	uint64_t *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (p == MAP_FAILED)
		return NULL;
	madvise(p, bytes, advice);
	for (uint64_t i = 0; i < lines; i++)
		p[i * 8] = i;
	for (uint64_t i = lines - 1; i > 0; i--) {
		uint64_t j = bench_mix(i) % i, x = p[i * 8];
		p[i * 8] = p[j * 8];
		p[j * 8] = x;
	}
	return p;
}

static double chase(uint64_t lines, int advice)
{
	uint64_t *p = cycle(lines, advice), at = 0;
	double ns[REPEATS];
	if (!p)
		return 0;
	for (int rep = 0; rep < REPEATS; rep++) {
		uint64_t t = bench_cpu_ns();
		for (uint64_t i = 0; i < STEPS; i++)
			at = p[at * 8];
		ns[rep] = (double)(bench_cpu_ns() - t) / STEPS;
	}
	sink += at;
	munmap(p, lines * 64);
	return bench_median(ns, REPEATS);
}

static double key_chain(void)
{
	static uint64_t local[1024];
	const uint64_t salt[2] = {bench_mix(1), bench_mix(2)};
	double ns[REPEATS];
	uint64_t k = 1;
	for (int i = 0; i < 1024; i++)
		local[i] = bench_mix((uint64_t)i + 7);
	for (int rep = 0; rep < REPEATS; rep++) {
		uint64_t t = bench_cpu_ns();
		for (uint64_t i = 0; i < CHAIN_STEPS; i++)
			k = kvp_radix_step(salt, k, local[i & 1023]);
		ns[rep] = (double)(bench_cpu_ns() - t) / CHAIN_STEPS;
	}
	sink += k;
	return bench_median(ns, REPEATS);
}

static double sequence_chain(void)
{
	static uint64_t local[4096], seq[4096];
	double ns[REPEATS];
	for (uint64_t i = 0; i < 4096; i++)
		local[i] = bench_mix(i);
	for (int rep = 0; rep < REPEATS; rep++) {
		uint64_t t = bench_cpu_ns();
		for (int i = 0; i < 100; i++)
			kvp_hash_chain(NULL, local, 4096, seq);
		ns[rep] = (double)(bench_cpu_ns() - t) / 409600;
	}
	sink += seq[4095];
	return bench_median(ns, REPEATS);
}

int main(int argc, char **argv)
{
	uint64_t mib = argc > 1 ? strtoull(argv[1], NULL, 10) : 640;
	if (mib < 1 || mib > 65536)
		return 2;
	bench_begin();
	bench_args(argc, argv);
	double m = chase(mib * 16384, MADV_NOHUGEPAGE), huge = chase(mib * 16384, MADV_HUGEPAGE);
	printf("bench=calib mib=%" PRIu64 " M_ns=%.1f M_huge_ns=%.1f H_ns=%.2f sequence_chain_ns=%.2f\n", mib,
		m, huge, key_chain(), sequence_chain());
	return sink == 42;
}
