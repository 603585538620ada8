/* tests/torture/ring_kills.h — producers of a ring and its one consumer, as processes that are killed at
 * random moments and started again; under ThreadSanitizer as threads, without kills. The ring is the test's:
 *   ring_join     makes this thread's handle of the ring, with `slots`
 *   producer      works until `*ring_end` is not 0
 *   consumer      works until `*ring_end` is RING_ALL and the ring is empty
 *   ring_faults   what the ring's check finds; ring_left: what is still in it
 *   ring_sweep    repairs what a dead owner left
 * KVP_SEED, KVP_TORTURE_S seconds (2). */
#ifndef KVP_TORTURE_RING_KILLS_H
#define KVP_TORTURE_RING_KILLS_H
#include "shm/slot.h"
#include "tests/procs.h"
#include "tests/tap.h"

#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>

enum { PRODUCERS = 4, CONSUMER = 0, RING_PROCS = PRODUCERS + 1 }; /* slots: the producers are 1 to 4 */
enum { RING_PRODUCERS = 1, RING_ALL = 2 };			   /* who is to end */

static void *slot_mem;
static int wake_fd[8];
static uint64_t *ring_end, killed, consumer_kills;
static _Thread_local struct kvp_slots slots; /* handles belong to a process; here to a thread */

static void ring_join(void);
static void producer(kvp_owner me);
static void consumer(kvp_owner me);
static uint64_t ring_faults(void);
static uint64_t ring_left(void);
static void ring_sweep(kvp_owner dead);

static uint64_t mix(uint64_t x)
{
	x ^= x >> 31;
	x *= 0x9e3779b97f4a7c15u;
	return x ^ (x >> 29);
}

static void join_both(const struct kvp_geom *g)
{
	kvp_slot_join(slot_mem, g, &slots);
	slots.wake_fd = wake_fd;
	ring_join();
}

static kvp_owner assign(uint32_t idx)
{
	return kvp_slot_assign(&slots, idx, idx == CONSUMER ? KVP_ROLE_INDEXER : KVP_ROLE_HTTPD, idx);
}

static void work(uint32_t idx, kvp_owner owner)
{
	if (idx == CONSUMER)
		consumer(owner);
	else
		producer(owner);
}

static pid_t start(uint32_t idx, kvp_owner *owner)
{
	*owner = assign(idx);
	pid_t pid = fork();
	if (pid)
		return pid;
	work(idx, *owner);
	_exit(0);
}

static void stop(pid_t pid, kvp_owner owner)
{
	kill(pid, SIGKILL);
	waitpid(pid, NULL, 0);
	ring_sweep(owner);
	kvp_slot_release(&slots, owner);
}

struct ring_thread {
	pthread_t id;
	uint32_t idx;
	const struct kvp_geom *g;
};

static void *thread_main(void *arg)
{
	struct ring_thread *t = arg;
	join_both(t->g);
	kvp_owner owner = kvp_slot_owner(&slots, t->idx);
	kvp_slot_activate(&slots, owner);
	work(t->idx, owner);
	return NULL;
}

/* The same work by threads, watched by the checks. */
static uint64_t threads(const struct kvp_geom *g, uint64_t run_ms)
{
	struct ring_thread t[RING_PROCS];
	uint64_t faults = 0;
	for (uint32_t i = 0; i < RING_PROCS; i++)
		assign(i);
	for (uint32_t i = 0; i < RING_PROCS; i++) {
		t[i] = (struct ring_thread){.idx = i, .g = g};
		pthread_create(&t[i].id, NULL, thread_main, &t[i]);
	}
	for (uint64_t end = now_ms() + run_ms; now_ms() < end; poll(NULL, 0, 1))
		faults += ring_faults() + kvp_slot_check(&slots);
	kvp_st_rel_u64(ring_end, RING_PRODUCERS);
	for (uint32_t i = 1; i < RING_PROCS; i++)
		pthread_join(t[i].id, NULL);
	kvp_st_rel_u64(ring_end, RING_ALL);
	pthread_join(t[CONSUMER].id, NULL);
	return faults;
}

static uint64_t kills(uint64_t seed, uint64_t run_ms)
{
	pid_t pid[RING_PROCS];
	kvp_owner owner[RING_PROCS];
	uint64_t faults = 0;
	for (uint32_t i = 0; i < RING_PROCS; i++)
		pid[i] = start(i, &owner[i]);
	for (uint64_t end = now_ms() + run_ms; now_ms() < end; killed++) {
		seed = mix(seed + 0x632be59bd9b4e019u);
		usleep((useconds_t)(seed % 4000)); /* killed at some moment */
		uint32_t idx = (uint32_t)((seed >> 40) % RING_PROCS);
		consumer_kills += idx == CONSUMER;
		stop(pid[idx], owner[idx]);
		faults += ring_faults();
		pid[idx] = start(idx, &owner[idx]);
	}
	for (uint32_t i = 1; i < RING_PROCS; i++)
		stop(pid[i], owner[i]);
	for (uint64_t end = now_ms() + 5000; ring_left() && now_ms() < end;)
		poll(NULL, 0, 1);
	stop(pid[CONSUMER], owner[CONSUMER]);
	return faults;
}

/* ring_run is the whole run: faults that were seen at any time. */
static uint64_t ring_run(const struct kvp_geom *g)
{
	const char *t = getenv("KVP_TORTURE_S");
	uint64_t seed = tap_seed(0);
	uint64_t run_ms = (t ? strtoull(t, NULL, 10) : 2) * 1000;
	ring_end = shared(sizeof(*ring_end));
	slot_mem = shared(kvp_slot_footprint(g));
	kvp_slot_new(slot_mem, g);
	for (int i = 0; i < 8; i++)
		wake_fd[i] = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
	join_both(g);
	uint64_t faults = TAP_IS_TSAN ? threads(g, run_ms) : kills(seed, run_ms);
	printf("# %" PRIu64 " kills (%" PRIu64 " of the consumer)\n", killed, consumer_kills);
	return faults;
}
#endif
