/* bench/bench.h — one line a case: medians of repeats after a warm-up, on pinned processors. */
#ifndef KVP_BENCH_H
#define KVP_BENCH_H
#include <inttypes.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/utsname.h>
#include <time.h>
#include <unistd.h>

#define BENCH_REPEATS 7
#define BENCH_NS_MIN 20000000ull /* least length of one repeat */

static inline uint64_t bench_now_ns(void)
{
	struct timespec ts;
	clock_gettime(CLOCK_MONOTONIC, &ts);
	return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

/* bench_cpu_ns is the processor time that the calling thread has used: what a neighbour's load does not
 * change. */
static inline uint64_t bench_cpu_ns(void)
{
	struct timespec ts;
	clock_gettime(CLOCK_THREAD_CPUTIME_ID, &ts);
	return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

static inline uint64_t bench_mix(uint64_t x)
{
	x += 0x9e3779b97f4a7c15ULL;
	x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
	x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
	return x ^ (x >> 31);
}

/* bench_pin ties the calling thread to the n-th processor that the process may use (modulo their number). */
__attribute__((unused)) static void bench_pin(const cpu_set_t *allowed, unsigned n)
{
	int cnt = CPU_COUNT(allowed);
	cpu_set_t one;
	n %= cnt > 0 ? (unsigned)cnt : 1;
	for (int c = 0; c < CPU_SETSIZE; c++)
		if (CPU_ISSET(c, allowed) && n-- == 0) {
			CPU_ZERO(&one);
			CPU_SET(c, &one);
			sched_setaffinity(0, sizeof(one), &one);
			return;
		}
}

/* bench_word puts into out the word in brackets of a switch file of the kernel, or its only word. */
__attribute__((unused)) static void bench_word(const char *path, char out[32])
{
	char line[128] = "";
	FILE *f = fopen(path, "re");
	if (f && !fgets(line, sizeof(line), f))
		line[0] = 0;
	if (f)
		fclose(f);
	const char *at = strchr(line, '[');
	at = at ? at + 1 : line;
	size_t n = strcspn(at, "] \n");
	snprintf(out, 32, "%.*s", (int)(n < 31 ? n : 31), n ? at : "none");
}

/* bench_header prints what the figures were taken on. KVP_BENCH_COMMIT names the commit. */
__attribute__((unused)) static void bench_header(void)
{
	char line[256], model[128] = "unknown", thp[32], shm[32], huge[32], load[32];
	const char *commit = getenv("KVP_BENCH_COMMIT");
	struct utsname u;
	FILE *f = fopen("/proc/cpuinfo", "re");
	while (f && fgets(line, sizeof(line), f))
		if (sscanf(line, "model name : %127[^\n]", model) == 1)
			break;
	if (f)
		fclose(f);
	uname(&u);
	bench_word("/sys/kernel/mm/transparent_hugepage/enabled", thp);
	bench_word("/sys/kernel/mm/transparent_hugepage/shmem_enabled", shm);
	bench_word("/proc/sys/vm/nr_hugepages", huge);
	bench_word("/proc/loadavg", load);
	printf("# cpu=\"%s\" cores=%ld kernel=%s compiler=\"%s\" page_bytes=%ld thp=%s thp_shmem=%s "
	       "hugepages=%s "
	       "load=%s commit=%s\n",
		model, sysconf(_SC_NPROCESSORS_ONLN), u.release, __VERSION__, sysconf(_SC_PAGESIZE), thp, shm,
		huge, load, commit ? commit : "unknown");
}

/* bench_begin pins the process to the processor it runs on and prints the header line. */
__attribute__((unused)) static void bench_begin(void)
{
	cpu_set_t set;
	CPU_ZERO(&set);
	CPU_SET(sched_getcpu(), &set);
	sched_setaffinity(0, sizeof(set), &set);
	bench_header();
}

/* bench_args prints the command line, so that every line below it can be repeated. */
__attribute__((unused)) static void bench_args(int argc, char **argv)
{
	const char *name = strrchr(argv[0], '/');
	printf("# run: %s", name ? name + 1 : argv[0]);
	for (int i = 1; i < argc; i++)
		printf(" %s", argv[i]);
	printf("\n");
	fflush(stdout);
}

static int bench_cmp(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;
	return (x > y) - (x < y);
}

/* bench_median sorts v. */
__attribute__((unused)) static double bench_median(double *v, size_t n)
{
	qsort(v, n, sizeof(v[0]), bench_cmp);
	return v[n / 2];
}

static inline int bench_cmp_u64(const void *a, const void *b)
{
	uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
	return (x > y) - (x < y);
}

/* bench_sparse maps shared memory of its own; *fd may be asked how much of it is in use. Exits on failure. */
__attribute__((unused)) static void *bench_sparse(uint64_t bytes, int *fd)
{
	*fd = memfd_create("bench", MFD_CLOEXEC);
	void *p = MAP_FAILED;
	if (*fd >= 0 && ftruncate(*fd, (off_t)bytes) == 0)
		p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, *fd, 0);
	if (p == MAP_FAILED) {
		perror("bench: shared memory");
		exit(1);
	}
	return p;
}

__attribute__((unused)) static uint64_t bench_used_bytes(int fd)
{
	struct stat st;
	return fstat(fd, &st) ? 0 : (uint64_t)st.st_blocks * 512;
}

/* bench_clock_ns is what reading the clock twice costs, to be taken off. */
__attribute__((unused)) static uint64_t bench_clock_ns(void)
{
	uint64_t best = UINT64_MAX;
	for (int i = 0; i < 2000; i++) {
		uint64_t t = bench_now_ns(), d = bench_now_ns() - t;
		best = d < best ? d : best;
	}
	return best;
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
	return bench_median(t, BENCH_REPEATS);
}
#endif
