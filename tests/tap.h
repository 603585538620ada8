/* tests/tap.h — TAP producer: a test's description is a claim, ok() says whether it holds. */
#ifndef KVP_TAP_H
#define KVP_TAP_H
#include <inttypes.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static int tap_cnt, tap_failed;

__attribute__((unused, format(printf, 2, 3))) static int tap_ok(int cond, const char *fmt, ...)
{
	va_list ap;
	va_start(ap, fmt);
	printf("%sok %d - ", cond ? "" : "not ", ++tap_cnt);
	vprintf(fmt, ap);
	putchar('\n');
	fflush(stdout);
	va_end(ap);
	tap_failed += !cond;
	return cond;
}
#define ok(cond, ...)                                                                                        \
	(tap_ok(!!(cond), __VA_ARGS__) ? 1 : (printf("#   %s:%d: %s\n", __FILE__, __LINE__, #cond), 0))
#define is_u64(got, want, ...) tap_is_u64((uint64_t)(got), (uint64_t)(want), __FILE__, __LINE__, __VA_ARGS__)
#define is_str(got, want, ...) tap_is_str((got), (want), __FILE__, __LINE__, __VA_ARGS__)

__attribute__((unused, format(printf, 5, 6))) static int tap_is_u64(
	uint64_t got, uint64_t want, const char *file, int line, const char *fmt, ...)
{
	char name[512];
	va_list ap;
	va_start(ap, fmt);
	vsnprintf(name, sizeof(name), fmt, ap);
	va_end(ap);
	if (!tap_ok(got == want, "%s", name))
		printf("#   %s:%d: got %" PRIu64 ", want %" PRIu64 "\n", file, line, got, want);
	return got == want;
}

__attribute__((unused, format(printf, 5, 6))) static int tap_is_str(
	const char *got, const char *want, const char *file, int line, const char *fmt, ...)
{
	char name[512];
	va_list ap;
	va_start(ap, fmt);
	vsnprintf(name, sizeof(name), fmt, ap);
	va_end(ap);
	int same = got && want && strcmp(got, want) == 0;
	if (!tap_ok(same, "%s", name))
		printf("#   %s:%d: got '%s', want '%s'\n", file, line, got ? got : "(null)",
			want ? want : "(null)");
	return same;
}

/* ThreadSanitizer sees the threads of one process, so tests of what other processes do or leave are skipped
 * there; the structures run under threads in tests/torture. */
#ifdef KVP_ATOMIC_C11
enum { TAP_IS_TSAN = 1 };
#else
enum { TAP_IS_TSAN = 0 };
#endif
#define TAP_PROCESSES "several processes, of which ThreadSanitizer sees one"

/* skip_all is the whole output of a test that can't run in this build or on this machine. */
__attribute__((unused)) static int skip_all(const char *why)
{
	printf("1..0 # SKIP %s\n", why);
	return 0;
}

/* tap_seed prints the seed of a random test and returns it: KVP_SEED, else fallback, else (0) the clock. */
__attribute__((unused)) static uint64_t tap_seed(uint64_t fallback)
{
	const char *given = getenv("KVP_SEED");
	struct timespec ts;
	clock_gettime(CLOCK_REALTIME, &ts);
	uint64_t clock = (uint64_t)ts.tv_sec * 1000000 + (uint64_t)ts.tv_nsec / 1000;
	uint64_t seed = given ? strtoull(given, NULL, 0) : fallback ? fallback : clock;
	printf("# KVP_SEED=%" PRIu64 "\n", seed);
	return seed;
}

/* done prints the plan and returns the exit code of main. */
__attribute__((unused)) static int done(void)
{
	printf("1..%d\n", tap_cnt);
	return tap_failed || !tap_cnt ? 1 : 0;
}
#endif
