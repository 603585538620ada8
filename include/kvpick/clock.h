/* kvpick/clock.h — the two clocks, in nanoseconds.
 *
 * Shape      uint64_t nanoseconds. mono: CLOCK_MONOTONIC, comparable between processes of one boot. real: for
 *            people and records only.
 * Who        any thread; a vDSO call, no system call.
 */
#ifndef KVPICK_CLOCK_H
#define KVPICK_CLOCK_H

#include <stdint.h>
#include <time.h>

static inline uint64_t kvp_clock_ns(clockid_t id)
{
	struct timespec ts;
	clock_gettime(id, &ts);
	return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}
static inline uint64_t kvp_clock_mono_ns(void)
{
	return kvp_clock_ns(CLOCK_MONOTONIC);
}
static inline uint64_t kvp_clock_real_ns(void)
{
	return kvp_clock_ns(CLOCK_REALTIME);
}
#endif
