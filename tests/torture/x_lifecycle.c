/* Lifecycle ring with real processes (threads, without kills, under ThreadSanitizer): producers and the
 * consumer are killed with SIGKILL at random moments and started again. Oracle: every record is whole; those
 * of one producer come in their order, each once (the one at which a consumer died may come twice); every
 * record that was counted as told comes. */
#include "shm/lifecycle.h"
#include "tests/tap.h"
#include <kvpick/clock.h>

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
static struct kvp_geom geom = {.slot_max = 8, .region_gen = 1, .lifecycle_max = 1024};

struct oracle { /* shared by all processes */
	struct kvp_ctr_column_shm col[PRODUCERS + 1];
	uint64_t last[PRODUCERS + 1];		 /* last number that came, by producer slot */
	uint64_t seen, twice, wrong, full, stop; /* stop: 1 producers end, 2 the consumer, too */
};

static struct oracle *o;
static void *ring_mem, *slot_mem;
/* Handles belong to a process; here to a thread. */
static _Thread_local struct kvp_lifecycle_ring ring;
static _Thread_local struct kvp_slots slots;
static int wake_fd[8];

static uint64_t now_ms(void)
{
	return kvp_clock_mono_ns() / 1000000;
}

static uint64_t mix(uint64_t x)
{
	x ^= x >> 31;
	x *= 0x9e3779b97f4a7c15u;
	return x ^ (x >> 29);
}

static void join_both(void)
{
	kvp_lifecycle_join(ring_mem, &geom, &ring);
	kvp_slot_join(slot_mem, &geom, &slots);
	slots.wake_fd = wake_fd;
	ring.slots = &slots;
}

/* Number n of a producer: texts whose bytes and lengths follow from it. */
static void texts_of(uint64_t n, char *id, uint32_t *id_len, char *lora, uint32_t *lora_len)
{
	uint64_t m = mix(n);
	*id_len = 1 + (uint32_t)(m % (m & 0x700 ? 100 : KVP_RESV_ID_MAX));
	*lora_len = m & 0x1000 ? (uint32_t)(m >> 20) % 50 : 0;
	memset(id, 'a' + (int)(m % 26), *id_len);
	memset(lora, 'A' + (int)(m % 26), *lora_len);
}

static void producer(kvp_owner me)
{
	uint32_t idx = KVP_OWNER_SLOT(me);
	char id[KVP_RESV_ID_MAX], lora[KVP_RESV_LORA_MAX];
	slots.self = me;
	for (uint64_t n = 1; !kvp_ld_rlx_u64(&o->stop); n++) {
		struct kvp_lifecycle_claim c;
		struct kvp_lifecycle_put p = {.kind = KVP_LIFECYCLE_ADD,
			.part = idx,
			.h = (uint64_t)KVP_OWNER_GEN(me) << 32 | n,
			.id = id,
			.lora = lora};
		p.worker_id = mix(p.h);
		texts_of(p.h, id, &p.id_len, lora, &p.lora_len);
		while (kvp_lifecycle_claim(&ring, me, &p, &c) != KVP_OK) {
			kvp_faa_rlx_u64(&o->full, 1);
			if (kvp_ld_rlx_u64(&o->stop))
				return;
			poll(NULL, 0, 1);
		}
		if (n % 9 == 0)
			kvp_lifecycle_void(&ring, &c);
		else
			kvp_lifecycle_ready(&ring, &c, &o->col[idx]);
		if (n % 512 == 0)
			poll(NULL, 0, 1);
	}
}

/* judge compares a record with its number; first: the first one of a consumer. */
static void judge(const struct kvp_lifecycle_rec *r, int first)
{
	char id[KVP_RESV_ID_MAX], lora[KVP_RESV_LORA_MAX];
	uint32_t id_len, lora_len;
	texts_of(r->h, id, &id_len, lora, &lora_len);
	int good = r->kind == KVP_LIFECYCLE_ADD && r->part >= 1 && r->part <= PRODUCERS &&
		   r->worker_id == mix(r->h) && r->id_len == id_len && r->lora_len == lora_len &&
		   memcmp(r->id, id, id_len) == 0 && memcmp(r->lora, lora, lora_len) == 0 &&
		   (uint32_t)r->h % 9 != 0;
	if (good && r->h == o->last[r->part] && first) {
		o->twice++;
	} else if (good && r->h > o->last[r->part]) {
		o->last[r->part] = r->h;
		o->seen++;
	} else {
		o->wrong++;
	}
}

static void consumer(kvp_owner me)
{
	static _Thread_local struct kvp_lifecycle_rec rec;
	slots.self = me;
	kvp_lifecycle_attach(&ring, me, &o->col[CONSUMER]);
	for (int first = 1;;) {
		int rc = kvp_lifecycle_next(&ring, kvp_clock_mono_ns(), &rec);
		if (rc == KVP_OK) {
			judge(&rec, first);
			kvp_lifecycle_done(&ring);
			first = 0;
			continue;
		}
		if (rc == KVP_ERR_NOTFOUND && kvp_ld_acq_u64(&o->stop) == 2)
			return;
		int ms = (int)kvp_lifecycle_rest(&ring, kvp_clock_mono_ns());
		kvp_slot_sleep(&slots);
		struct pollfd pf = {.fd = wake_fd[CONSUMER], .events = POLLIN};
		if (kvp_lifecycle_next(&ring, kvp_clock_mono_ns(), &rec) != KVP_OK)
			poll(&pf, 1, rc == KVP_ERR_AGAIN ? 1 : ms);
		kvp_slot_awake(&slots);
	}
}

static pid_t start(uint32_t idx, kvp_owner *owner)
{
	*owner = kvp_slot_assign(&slots, idx, idx == CONSUMER ? KVP_ROLE_PEER : KVP_ROLE_HTTPD, idx);
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

/* The same work by threads, watched by kvp_lifecycle_check. */
static uint64_t threads(uint64_t run_ms)
{
	pthread_t t[PRODUCERS + 1];
	uint64_t faults = 0;
	for (uint32_t i = 0; i <= PRODUCERS; i++)
		kvp_slot_assign(&slots, i, i == CONSUMER ? KVP_ROLE_PEER : KVP_ROLE_HTTPD, i);
	for (uintptr_t i = 0; i <= PRODUCERS; i++)
		pthread_create(&t[i], NULL, thread_main, (void *)i);
	for (uint64_t end = now_ms() + run_ms; now_ms() < end; poll(NULL, 0, 1))
		faults += kvp_lifecycle_check(&ring);
	kvp_st_rel_u64(&o->stop, 1);
	for (uint32_t i = 1; i <= PRODUCERS; i++)
		pthread_join(t[i], NULL);
	kvp_st_rel_u64(&o->stop, 2);
	pthread_join(t[CONSUMER], NULL);
	return faults;
}

static uint64_t killed, consumer_kills;

static uint64_t kills(uint64_t seed, uint64_t run_ms)
{
	pid_t pid[PRODUCERS + 1];
	kvp_owner owner[PRODUCERS + 1];
	uint64_t faults = 0;
	for (uint32_t i = 0; i <= PRODUCERS; i++)
		pid[i] = start(i, &owner[i]);
	for (uint64_t end = now_ms() + run_ms; now_ms() < end; killed++) {
		seed = mix(seed + 0x632be59bd9b4e019u);
		struct timespec ts = {0, (long)(seed % 4000000)};
		nanosleep(&ts, NULL);
		uint32_t idx = (uint32_t)((seed >> 40) % (PRODUCERS + 1));
		consumer_kills += idx == CONSUMER;
		stop(pid[idx], owner[idx]);
		faults += kvp_lifecycle_check(&ring);
		pid[idx] = start(idx, &owner[idx]);
	}
	for (uint32_t i = 1; i <= PRODUCERS; i++)
		stop(pid[i], owner[i]);
	for (uint64_t end = now_ms() + 5000; kvp_lifecycle_depth(&ring) && now_ms() < end;)
		poll(NULL, 0, 1);
	stop(pid[CONSUMER], owner[CONSUMER]);
	return faults;
}

int main(void)
{
	const char *s = getenv("KVP_SEED"), *t = getenv("KVP_TORTURE_S");
	uint64_t told = 0, seed = s ? strtoull(s, NULL, 10) : now_ms();
	uint64_t run_ms = (t ? strtoull(t, NULL, 10) : 2) * 1000;
	printf("# seed %" PRIu64 "\n", seed);
	ring_mem = shared(kvp_lifecycle_footprint(&geom));
	slot_mem = shared(kvp_slot_footprint(&geom));
	o = shared(sizeof(*o));
	kvp_lifecycle_new(ring_mem, &geom);
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
		told += kvp_ld_rlx_u64(&o->col[i].val[KVP_CTR_LIFECYCLE_ENQUEUED]);
	uint64_t dead = kvp_ld_rlx_u64(&o->col[CONSUMER].val[KVP_CTR_LIFECYCLE_DEAD]);
	uint64_t lost = kvp_ld_rlx_u64(&o->col[CONSUMER].val[KVP_CTR_LIFECYCLE_BROKEN]);
	printf("# %" PRIu64 " kills (%" PRIu64 " of the consumer), %" PRIu64 " told, %" PRIu64
	       " seen, %" PRIu64 " twice, %" PRIu64 " of the dead, full %" PRIu64 " times\n",
		killed, consumer_kills, told, o->seen, o->twice, dead, o->full);
	is_u64(o->wrong, 0, "every record is whole, in order, and comes once");
	is_u64(faults, 0, "no faults at any time");
	is_u64(lost, 0, "none was written over");
	ok(told > 0 && o->seen >= told && o->seen <= told + killed, "what was told has come");
	ok(o->twice <= consumer_kills && dead <= killed, "no more came twice, or was lost, than was killed");
	is_u64(kvp_lifecycle_depth(&ring), 0, "nothing is left");
	return done();
}
