/* bench/bench.h — one line a case: median of repeats after a warm-up, on one pinned processor. */
#ifndef KVP_BENCH_H
#define KVP_BENCH_H
#include <inttypes.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define BENCH_REPEATS 7
#define BENCH_NS_MIN 20000000ull /* least length of one repeat */

static inline uint64_t bench_now_ns(void)
{
	struct timespec ts;
	clock_gettime(CLOCK_MONOTONIC, &ts);
	return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

/* bench_begin pins the process to the processor it runs on and prints the header line. */
__attribute__((unused)) static void bench_begin(void)
{
	char line[256], model[128] = "unknown";
	cpu_set_t set;
	CPU_ZERO(&set);
	CPU_SET(sched_getcpu(), &set);
	sched_setaffinity(0, sizeof(set), &set);
	FILE *f = fopen("/proc/cpuinfo", "re");
	while (f && fgets(line, sizeof(line), f))
		if (sscanf(line, "model name : %127[^\n]", model) == 1)
			break;
	if (f)
		fclose(f);
	printf("# cpu=\"%s\" compiler=%s\n", model, __VERSION__);
}

static int bench_cmp(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;
	return (x > y) - (x < y);
}

/* bench_ns returns the median time of one call of fn, in ns. */
__attribute__((unused)) static double bench_ns(void (*fn)(void *ctx), void *ctx)
{
	double t[BENCH_REPEATS];
	uint64_t calls = 1;
	for (int i = -1; i < BENCH_REPEATS;) {
		uint64_t start = bench_now_ns();
		for (uint64_t k = 0; k < calls; k++)
			fn(ctx);
		uint64_t took = bench_now_ns() - start;
		if (took < BENCH_NS_MIN && i < 0) {
			calls *= 2;
			continue;
		}
		if (i >= 0)
			t[i] = (double)took / (double)calls;
		i++;
	}
	qsort(t, BENCH_REPEATS, sizeof(t[0]), bench_cmp);
	return t[BENCH_REPEATS / 2];
}
#endif
