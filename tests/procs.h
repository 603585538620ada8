/* tests/procs.h — what tests with several processes have in common: memory they share, a clock, random
 * numbers, and deaths at the named places of the code (KVP_POINT). */
#ifndef KVP_TESTS_PROCS_H
#define KVP_TESTS_PROCS_H
#include <kvpick/clock.h>
#include <kvpick/point.h>

#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

/* shared maps zeros that children of fork see, too. */
__attribute__((unused)) static void *shared(uint64_t bytes)
{
	void *p = mmap(
		NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (p == MAP_FAILED) {
		printf("Bail out! no memory\n");
		exit(1);
	}
	return p;
}

/* shared_file does the same with a file in memory: *fd. */
__attribute__((unused)) static void *shared_file(uint64_t bytes, int *fd)
{
	*fd = memfd_create("test", MFD_CLOEXEC);
	void *p = MAP_FAILED;
	if (*fd >= 0 && ftruncate(*fd, (off_t)bytes) == 0)
		p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, *fd, 0);
	if (p == MAP_FAILED) {
		printf("Bail out! no memory\n");
		exit(1);
	}
	return p;
}

__attribute__((unused)) static uint64_t now_ms(void)
{
	return kvp_clock_mono_ns() / 1000000;
}

/* xorshift: the next number of a state that is not 0; its upper bits are the better ones. */
__attribute__((unused)) static uint64_t xorshift(uint64_t *s)
{
	*s ^= *s << 13;
	*s ^= *s >> 7;
	*s ^= *s << 17;
	return *s;
}

/* was_killed waits for a child: 1 by SIGKILL, 0 it has ended with exit code 0, -1 otherwise. */
__attribute__((unused)) static int was_killed(pid_t pid)
{
	int st = 0;
	if (waitpid(pid, &st, 0) != pid)
		return -1;
	if (WIFSIGNALED(st) && WTERMSIG(st) == SIGKILL)
		return 1;
	return WIFEXITED(st) && WEXITSTATUS(st) == 0 ? 0 : -1;
}

#ifdef KVP_TEST_POINTS
/* die_at: from now on this process kills itself at the nth hit (from 1) of a place; NULL: of any place. */
static const char *death_place;
static uint64_t death_hits;
static void death(const char *place)
{
	if ((!death_place || strcmp(place, death_place) == 0) && --death_hits == 0)
		kill(getpid(), SIGKILL);
}
__attribute__((unused)) static void die_at(const char *place, uint64_t nth)
{
	death_place = place;
	death_hits = nth;
	kvp_point_hook = death;
}

/* The places that were met since spots_clear, in the order of their first hit; note_spot is the hook. */
#define SPOT_MAX 64
static struct {
	const char *name; /* NULL behind the last one */
	uint64_t hits;
} spot[SPOT_MAX + 1];
__attribute__((unused)) static void spots_clear(void)
{
	memset(spot, 0, sizeof(spot));
}
__attribute__((unused)) static void note_spot(const char *place)
{
	int i = 0;
	while (i < SPOT_MAX - 1 && spot[i].name && strcmp(spot[i].name, place) != 0)
		i++;
	spot[i].name = place;
	spot[i].hits++;
}
#endif
#endif
