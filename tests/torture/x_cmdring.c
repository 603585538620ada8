/* Command ring with real processes (threads, without kills, under ThreadSanitizer): producers and the
 * consumer are killed with SIGKILL at random moments, the parent sweeps and starts them again. Oracle: every
 * answered command has the right reply to its own payload; commands of one producer are executed in their
 * order; no more are answered than were executed; at the end, after a last sweep, every cell is free. */
#include "shm/cmdring.h"
#include "tests/tap.h"
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { PRODUCERS = 4, CONSUMER = 0 };
static struct kvp_geom geom = {.slot_max = 8, .region_gen = 1};

struct oracle {				  /* shared by all processes */
	uint64_t answered[PRODUCERS + 1]; /* replies seen, by producer slot */
	uint64_t executed, again;	  /* by the consumers */
	uint64_t last[PRODUCERS + 1];	  /* highest number executed for the first time, by producer slot */
	uint64_t wrong;			  /* any broken claim */
	uint64_t stop;			  /* threads only: 1 producers end, 2 the consumer, too */
};

static struct oracle *o;
static void *ring_mem, *slot_mem;
/* Handles belong to a process; here to a thread. */
static _Thread_local struct kvp_cmdring ring;
static _Thread_local struct kvp_slots slots;
static int wake_fd[8];

static uint64_t now_ms(void)
{
	struct timespec ts;
	clock_gettime(CLOCK_MONOTONIC, &ts);
	return (uint64_t)ts.tv_sec * 1000 + (uint64_t)ts.tv_nsec / 1000000;
}

static void join_both(void)
{
	kvp_cmdring_join(ring_mem, &geom, &ring);
	kvp_slot_join(slot_mem, &geom, &slots);
	slots.wake_fd = wake_fd;
	ring.slots = &slots;
}

static uint64_t mix(uint64_t x)
{
	x ^= x >> 31;
	x *= 0x9e3779b97f4a7c15u;
	return x ^ (x >> 29);
}

static void sleep_on(uint32_t idx, int (*idle)(void *), void *ctx)
{
	kvp_slot_sleep(&slots);
	struct pollfd pf = {.fd = wake_fd[idx], .events = POLLIN};
	if (idle(ctx))
		poll(&pf, 1, KVP_SLEEP_MAX_MS);
	kvp_slot_awake(&slots);
}

static int no_reply(void *c)
{
	return !kvp_cmd_done(&ring, c);
}

static int no_command(void *unused)
{
	(void)unused;
	uint32_t n[KVP_CMD_STATES];
	kvp_cmd_count(&ring, n);
	return n[2] == 0;
}

static void producer(kvp_owner me)
{
	uint32_t idx = KVP_OWNER_SLOT(me);
	slots.self = me;
	for (uint64_t n = 1; !kvp_ld_rlx_u64(&o->stop); n++) {
		struct kvp_cmd_cell *c;
		void *buf;
		int away = n % 16 == 8; /* nobody waits for it */
		while ((away ? kvp_cmd_begin_spare : kvp_cmd_begin)(&ring, me, &c, &buf) != KVP_OK)
			kvp_pause();
		uint64_t p[3] = {((uint64_t)KVP_OWNER_GEN(me) << 32) | n, idx, mix(n)};
		memcpy(buf, p, sizeof(p));
		memset((char *)buf + sizeof(p), (int)(n & 0xff), 64);
		c->worker_id = p[0];
		if ((away ? kvp_cmd_post_away : kvp_cmd_post)(&ring, c, KVP_CMD_PING, sizeof(p) + 64) !=
			KVP_OK)
			kvp_faa_rlx_u64(&o->wrong, 1);
		if (away)
			continue;
		if (n % 16 == 0) { /* give up at once: withdrawn or left to the consumer */
			kvp_cmd_end(&ring, c);
			continue;
		}
		while (!kvp_cmd_done(&ring, c))
			sleep_on(idx, no_reply, c);
		uint64_t r[2];
		memcpy(r, buf, sizeof(r));
		if (c->status != 7 || c->reply_len != sizeof(r) || r[0] != mix(p[0]) || r[1] != p[0])
			kvp_faa_rlx_u64(&o->wrong, 1);
		kvp_cmd_end(&ring, c);
		kvp_faa_rlx_u64(&o->answered[idx], 1);
	}
}

static void consumer(kvp_owner me)
{
	slots.self = me;
	kvp_faa_rlx_u64(&o->again, kvp_cmd_attach(&ring, me));
	for (;;) {
		struct kvp_cmd_cell *c;
		while (kvp_cmd_next(&ring, &c) != KVP_OK) {
			if (kvp_ld_acq_u64(&o->stop) == 2)
				return;
			sleep_on(CONSUMER, no_command, NULL);
		}
		uint64_t p[3], id = c->worker_id;
		char *buf = kvp_cmd_buffer(&ring, c);
		memcpy(p, buf, sizeof(p));
		/* A consumer killed before it published its reply leaves that in the buffer. */
		int replied = c->attempt > 1 && p[0] == mix(id) && p[1] == id;
		if (!replied &&
			(p[0] != id || p[1] < 1 || p[1] > PRODUCERS || p[2] != mix(id & 0xffffffffu) ||
				(unsigned char)buf[sizeof(p) + 63] != (id & 0xff)) &&
			c->attempt == 1)
			kvp_faa_rlx_u64(&o->wrong, 1);
		if (c->attempt == 1 && p[1] >= 1 && p[1] <= PRODUCERS) {
			if (id <= o->last[p[1]])
				kvp_faa_rlx_u64(&o->wrong, 1);
			o->last[p[1]] = id;
		}
		if (id % 64 == 0) /* work that takes a while, so that kills meet it */
			poll(NULL, 0, 1);
		kvp_faa_rlx_u64(&o->executed, 1);
		uint64_t r[2] = {mix(id), id};
		memcpy(buf, r, sizeof(r));
		kvp_cmd_reply(&ring, c, 7, sizeof(r));
	}
}

static pid_t start(uint32_t idx, kvp_owner *owner)
{
	*owner = kvp_slot_assign(&slots, idx, idx == CONSUMER ? KVP_ROLE_INDEXER : KVP_ROLE_HTTPD, idx);
	pid_t pid = fork();
	if (pid)
		return pid;
	if (idx == CONSUMER)
		consumer(*owner);
	else
		producer(*owner);
	_exit(0);
}

static void stop(pid_t pid, kvp_owner owner)
{
	kill(pid, SIGKILL);
	waitpid(pid, NULL, 0);
	kvp_cmd_sweep_owner(&ring, owner);
	kvp_slot_release(&slots, owner);
}

static void *shared(uint64_t n)
{
	return mmap(NULL, n, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
}

static void *thread_main(void *arg)
{
	uint32_t idx = (uint32_t)(uintptr_t)arg;
	join_both();
	kvp_owner owner = kvp_slot_owner(&slots, idx);
	kvp_slot_activate(&slots, owner);
	if (idx == CONSUMER)
		consumer(owner);
	else
		producer(owner);
	return NULL;
}

/* The same work by threads, watched by kvp_cmdring_check. */
static uint64_t threads(uint64_t run_ms)
{
	pthread_t t[PRODUCERS + 1];
	uint64_t faults = 0;
	for (uint32_t i = 0; i <= PRODUCERS; i++)
		kvp_slot_assign(&slots, i, i == CONSUMER ? KVP_ROLE_INDEXER : KVP_ROLE_HTTPD, i);
	for (uintptr_t i = 0; i <= PRODUCERS; i++)
		pthread_create(&t[i], NULL, thread_main, (void *)i);
	for (uint64_t end = now_ms() + run_ms; now_ms() < end; poll(NULL, 0, 1))
		faults += kvp_cmdring_check(&ring) + kvp_slot_check(&slots);
	kvp_st_rel_u64(&o->stop, 1);
	for (uint32_t i = 1; i <= PRODUCERS; i++)
		pthread_join(t[i], NULL);
	kvp_st_rel_u64(&o->stop, 2);
	pthread_join(t[CONSUMER], NULL);
	return faults;
}

static uint64_t kills(uint64_t seed, uint64_t run_ms)
{
	pid_t pid[PRODUCERS + 1];
	kvp_owner owner[PRODUCERS + 1];
	for (uint32_t i = 0; i <= PRODUCERS; i++)
		pid[i] = start(i, &owner[i]);
	uint64_t killed = 0, consumer_kills = 0, faults = 0;
	for (uint64_t end = now_ms() + run_ms; now_ms() < end; killed++) {
		seed = mix(seed + 0x632be59bd9b4e019u);
		struct timespec ts = {0, (long)(seed % 4000000)};
		nanosleep(&ts, NULL);
		uint32_t idx = (uint32_t)((seed >> 40) % (PRODUCERS + 1));
		consumer_kills += idx == CONSUMER;
		stop(pid[idx], owner[idx]);
		faults += kvp_cmdring_check(&ring);
		pid[idx] = start(idx, &owner[idx]);
	}
	for (uint32_t i = 1; i <= PRODUCERS; i++)
		stop(pid[i], owner[i]);
	uint32_t n[KVP_CMD_STATES];
	uint64_t end = now_ms() + 5000;
	do {
		poll(NULL, 0, 1);
		kvp_cmd_count(&ring, n);
	} while (n[0] != KVP_CMD_CELLS && now_ms() < end);
	stop(pid[CONSUMER], owner[CONSUMER]);
	printf("# %" PRIu64 " kills (%" PRIu64 " of the consumer)\n", killed, consumer_kills);
	return faults;
}

int main(void)
{
	const char *s = getenv("KVP_SEED"), *t = getenv("KVP_TORTURE_S");
	uint64_t answered = 0, seed = s ? strtoull(s, NULL, 10) : now_ms();
	uint64_t run_ms = (t ? strtoull(t, NULL, 10) : 2) * 1000;
	uint32_t n[KVP_CMD_STATES];
	printf("# seed %" PRIu64 "\n", seed);
	ring_mem = shared(kvp_cmdring_footprint(&geom));
	slot_mem = shared(kvp_slot_footprint(&geom));
	o = shared(sizeof(*o));
	kvp_cmdring_new(ring_mem, &geom);
	kvp_slot_new(slot_mem, &geom);
	for (int i = 0; i < 8; i++)
		wake_fd[i] = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
	join_both();
#ifdef KVP_ATOMIC_C11
	uint64_t faults = threads(run_ms);
	(void)kills;
#else
	uint64_t faults = kills(seed, run_ms);
	(void)threads;
#endif
	for (uint32_t i = 1; i <= PRODUCERS; i++)
		answered += o->answered[i];
	kvp_cmd_count(&ring, n);
	printf("# %" PRIu64 " answered, %" PRIu64 " executed, %" PRIu64 " taken again\n", answered,
		o->executed, o->again);
	is_u64(o->wrong, 0, "every reply fits its command, commands of a producer are taken in order");
	is_u64(faults, 0, "no faults at any time");
	ok(answered > 0 && o->executed >= answered, "what was answered was executed");
	is_u64(n[0], KVP_CMD_CELLS, "all cells are free at the end");
	return done();
}
