/* tests/torture/x_threads.c — the structures under threads, so that ThreadSanitizer sees both sides: tree
 * with a writer that comes and goes, wake-ups, error log, counters. Each with an oracle, so it is a test in
 * every build. KVP_TORTURE_S seconds for the tree (1), KVP_SEED. */
#include "shm/counter.h"
#include "shm/errlog.h"
#include "shm/slot.h"
#include "tests/procs.h"
#include "tests/radix_model.h"
#include "tests/tap.h"

#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <sys/eventfd.h>

static const struct kvp_geom geom = {.slot_max = 8,
	.rank_max = 64,
	.index_rank_max = 64,
	.block_max = 4000,
	.region_gen = 7,
	.salt = {11, 22}};

static uint64_t mix(uint64_t *x)
{
	return xorshift(x) >> 8;
}

/* ---- tree: slot f holds prompts of family f only; families share their first TRUNK blocks ---- */

enum { FAMILIES = 6, TRUNK = 20, PROMPT = 300, READERS = 2, TREE_SLOTS = FAMILIES };

static struct seg seg;
static uint64_t stop, walks, retries, gave_up, foreign, lost, turns;

static uint64_t local_of(uint64_t family, uint32_t i)
{
	return i < TRUNK ? 1000 + i : (family + 1) * 1000000 + i;
}

static void prompt_of(uint64_t family, uint32_t n, uint64_t *local, uint64_t *ext)
{
	for (uint32_t i = 0; i < n; i++) {
		local[i] = local_of(family, i);
		ext[i] = family * 77777 + i + 1;
	}
}

/* Family 0 is stored once and stays; the others come, lose blocks and go, so that headers, columns and cutoff
 * lists are used again and again. */
static void tree_turn(struct kvp_radix_w *w, uint64_t *x)
{
	uint64_t local[PROMPT], ext[PROMPT];
	uint32_t f = 1 + (uint32_t)(mix(x) % (FAMILIES - 1)), n = 1 + (uint32_t)(mix(x) % PROMPT);
	prompt_of(f, PROMPT, local, ext);
	switch (mix(x) % 4) {
	case 0:
		kvp_radix_clear(w, f);
		break;
	case 1:
		kvp_radix_remove(w, f, PROMPT - n, ext + n, NULL);
		break;
	default:
		kvp_radix_store(w, f, 9, KVP_RADIX_ROOT, 0, n, local, ext, NULL);
	}
	kvp_add_sw_u64(&turns, 1);
}

static void *tree_writer(void *arg)
{
	uint64_t x = *(const uint64_t *)arg;
	struct kvp_radix_w *w = NULL;
	while (!kvp_ld_rlx_u64(&stop)) {
		if (!w && kvp_radix_w_open(seg.pub, seg.priv, &geom, KVP_RADIX_RECOVER, NULL, &w, NULL))
			break;
		tree_turn(w, &x);
		if (mix(&x) % 500 == 0) {
			kvp_radix_w_close(w);
			w = NULL;
		}
	}
	kvp_radix_w_close(w);
	return NULL;
}

/* Longest prefix that family s may hold of a prompt of family f. */
static uint32_t limit(uint32_t s, uint32_t f, uint32_t n)
{
	return s == f || n < TRUNK ? n : TRUNK;
}

static void *tree_reader(void *arg)
{
	uint64_t x = *(const uint64_t *)arg, local[PROMPT], ext[PROMPT];
	struct kvp_radix_match *m = calloc(1, sizeof(*m));
	struct kvp_radix_stats st;
	struct kvp_radix r;
	kvp_radix_join(seg.pub, &geom, &r);
	while (m && !kvp_ld_rlx_u64(&stop)) {
		uint32_t f = (uint32_t)(mix(&x) % FAMILIES), n = 1 + (uint32_t)(mix(&x) % PROMPT);
		prompt_of(f, n, local, ext);
		struct kvp_radix_query q = {
			.part_salt = 9, .local = local, .local_cnt = n, .total_blk = n};
		if (kvp_radix_find(&r, &q, m))
			continue;
		kvp_radix_stats(&r, &st);
		for (uint32_t s = 0; s < 64; s++) {
			uint32_t held = m->active[s >> 6] >> (s & 63) & 1 ? m->depth[s] : 0;
			if (held > (s < TREE_SLOTS ? limit(s, f, n) : 0))
				kvp_faa_rlx_u64(&foreign, 1);
			if (s == 0 && held != limit(0, f, n) && !m->gave_up)
				kvp_faa_rlx_u64(&lost, 1);
		}
		kvp_faa_rlx_u64(&walks, 1);
		kvp_faa_rlx_u64(&retries, m->retries);
		kvp_faa_rlx_u64(&gave_up, m->gave_up);
	}
	free(m);
	return NULL;
}

static void tree(uint64_t seed, uint64_t run_ms)
{
	pthread_t w, r[READERS];
	uint64_t at[READERS + 1], local[PROMPT], ext[PROMPT];
	struct kvp_radix_w *open = NULL;
	struct kvp_radix reader;
	prompt_of(0, PROMPT, local, ext);
	ok(seg_new(&seg, &geom) == 0 && kvp_radix_join(seg.pub, &geom, &reader) == KVP_OK &&
			kvp_radix_w_open(seg.pub, seg.priv, &geom, KVP_RADIX_RECOVER, NULL, &open, NULL) ==
				KVP_OK,
		"a tree");
	kvp_radix_store(open, 0, 9, KVP_RADIX_ROOT, 0, PROMPT, local, ext, NULL);
	kvp_radix_w_set_ready(open, 1);
	kvp_radix_w_close(open);
	for (int i = 0; i <= READERS; i++)
		at[i] = (seed + 0x9e3779b97f4a7c15ULL * (uint64_t)(i + 1)) | 1;
	pthread_create(&w, NULL, tree_writer, &at[READERS]);
	for (int i = 0; i < READERS; i++)
		pthread_create(&r[i], NULL, tree_reader, &at[i]);
	for (uint64_t end = now_ms() + run_ms; now_ms() < end;)
		poll(NULL, 0, 5);
	kvp_st_rel_u64(&stop, 1);
	pthread_join(w, NULL);
	for (int i = 0; i < READERS; i++)
		pthread_join(r[i], NULL);
	printf("# %" PRIu64 " changes, %" PRIu64 " walks, %" PRIu64 " retries, %" PRIu64 " given up\n", turns,
		walks, retries, gave_up);
	is_u64(foreign, 0, "no walk ever finds a block at a rank that never held it");
	is_u64(lost, 0, "what a rank holds all the time is found whole by every walk that was not given up");
	ok(walks > 0 && turns > 0, "writer and readers both got somewhere");
	ok(kvp_radix_w_open(seg.pub, seg.priv, &geom, KVP_RADIX_RECOVER, NULL, &open, NULL) == KVP_OK &&
			kvp_radix_check(&reader) == 0 && kvp_radix_w_check(open) == 0,
		"and no fault is left");
	kvp_radix_w_close(open);
	seg_free(&seg);
}

/* ---- wake-ups: in every round one thread gives work while the other is about to sleep. One of them must see
 * the other: the sleeper the work, or the waker the need. Both begin a round at the same moment. ---- */

enum { ROUNDS = 100000 };
static void *slot_mem;
static uint64_t arrived; /* threads that came to a meeting, ever */
static uint64_t work __attribute__((aligned(128)));
static uint64_t unseen __attribute__((aligned(128)));
static uint64_t woken;
static int wake_fd[8];

static void meet(uint64_t *mine)
{
	*mine += 2;
	kvp_faa_ar_u64(&arrived, 1);
	for (uint32_t i = 0; kvp_ld_acq_u64(&arrived) < *mine; i++)
		if (i % 1000 == 999)
			sched_yield();
}

/* A CPU each, so that they run at the same time; where that cannot be had, they do not. */
static void pin(uint32_t cpu)
{
	cpu_set_t mine, set;
	CPU_ZERO(&mine);
	if (pthread_getaffinity_np(pthread_self(), sizeof(set), &set))
		return;
	for (uint32_t i = 0, at = 0; i < CPU_SETSIZE; i++)
		if (CPU_ISSET(i, &set) && at++ == cpu)
			CPU_SET(i, &mine);
	if (CPU_COUNT(&mine))
		pthread_setaffinity_np(pthread_self(), sizeof(mine), &mine);
}

static void *waker(void *arg)
{
	struct kvp_slots s;
	uint64_t met = 0, near_by = 0;
	(void)arg;
	pin(0);
	kvp_slot_join(slot_mem, &geom, &s);
	s.wake_fd = wake_fd;
	for (uint64_t n = 1; n <= ROUNDS; n++) {
		meet(&met);
		meet(&met);
		/* The need stays at hand, so that the store of the work takes longer than the look at it. */
		for (uint64_t i = 0; i < n % 128; i++)
			near_by += kvp_ld_rlx_u32(&s.slot[1].wake_need);
		kvp_st_rel_u64(&work, n);
		woken = (uint64_t)kvp_slot_wake(&s, 1);
		meet(&met);
	}
	return near_by ? NULL : arg;
}

static void *sleeper(void *arg)
{
	struct kvp_slots s;
	uint64_t met = 0, near_by = 0, *slept = arg;
	pin(1);
	kvp_slot_join(slot_mem, &geom, &s);
	s.wake_fd = wake_fd;
	kvp_slot_activate(&s, kvp_slot_owner(&s, 1));
	for (uint64_t n = 1; n <= ROUNDS; n++) {
		meet(&met);
		near_by += kvp_ld_rlx_u64(&work);
		meet(&met);
		kvp_slot_sleep(&s);
		uint64_t seen = kvp_ld_acq_u64(&work);
		meet(&met);
		*slept += seen != n;
		unseen += seen != n && !woken;
		kvp_slot_awake(&s);
	}
	return near_by ? NULL : arg;
}

static void wakes(void)
{
	struct kvp_slots s;
	pthread_t t[2];
	uint64_t slept = 0;
	slot_mem = shared(kvp_slot_footprint(&geom));
	kvp_slot_new(slot_mem, &geom);
	kvp_slot_join(slot_mem, &geom, &s);
	for (uint32_t i = 0; i < 8; i++)
		wake_fd[i] = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
	kvp_slot_assign(&s, 1, KVP_ROLE_HTTPD, 1);
	pthread_create(&t[0], NULL, waker, NULL);
	pthread_create(&t[1], NULL, sleeper, &slept);
	for (int i = 0; i < 2; i++)
		pthread_join(t[i], NULL);
	printf("# %d rounds, %" PRIu64 " times nothing to do was seen\n", ROUNDS, slept);
	is_u64(unseen, 0, "whoever goes to sleep without having seen the work is woken");
	is_u64(kvp_slot_check(&s), 0, "and the slot table is sound");
}

/* ---- error log and counters: four writers, one that reads meanwhile ---- */

enum { WRITERS = 4, PUTS = 4000, TEXTS = 60 };
static void *log_mem, *ctr_mem;
static uint64_t writers_left = WRITERS;

static void *log_writer(void *arg)
{
	uint32_t me = (uint32_t)(uintptr_t)arg;
	uint64_t x = me + 17;
	struct kvp_errlog l;
	struct kvp_counters c;
	char text[64];
	kvp_errlog_join(log_mem, &geom, &l);
	kvp_counter_join(ctr_mem, &geom, &c);
	for (int i = 0; i < PUTS; i++) {
		unsigned k = (unsigned)(mix(&x) % TEXTS);
		snprintf(text, sizeof(text), "text %u %08x %08x", k, k * 2654435761u, ~k);
		kvp_errlog_put(&l, KVP_OWNER(me, 1), 1000 + (uint64_t)i, -(int)k, "module", k, text);
		kvp_ctr_add(&c.column[me], KVP_CTR_BOOK_FULL, 1);
		kvp_ctr_add_mw(&c.column[0], KVP_CTR_BOOK_STALE, 1);
	}
	kvp_faa_ar_u64(&writers_left, (uint64_t)-1);
	return NULL;
}

static uint64_t log_read(const struct kvp_errlog *l, uint64_t *wrong)
{
	struct kvp_errlog_entry e;
	uint64_t sum = 0;
	char text[64];
	for (uint32_t i = 0; i < KVP_ERRLOG_MAX; i++) {
		if (kvp_errlog_get(l, i, &e))
			continue;
		snprintf(text, sizeof(text), "text %u %08x %08x", e.line, e.line * 2654435761u, ~e.line);
		*wrong += e.code != -(int)e.line || strcmp(e.text, text) != 0 || e.last_ns < e.first_ns;
		sum += e.cnt;
	}
	return sum;
}

static void logs(void)
{
	pthread_t t[WRITERS];
	struct kvp_errlog l;
	struct kvp_counters c;
	uint64_t wrong = 0, before = 0, backwards = 0;
	log_mem = shared(kvp_errlog_footprint(&geom));
	ctr_mem = shared(kvp_counter_footprint(&geom));
	kvp_errlog_new(log_mem, &geom);
	kvp_counter_new(ctr_mem, &geom);
	kvp_errlog_join(log_mem, &geom, &l);
	kvp_counter_join(ctr_mem, &geom, &c);
	for (uintptr_t i = 0; i < WRITERS; i++)
		pthread_create(&t[i], NULL, log_writer, (void *)i);
	while (kvp_ld_acq_u64(&writers_left)) {
		log_read(&l, &wrong);
		uint64_t sum = kvp_ctr_sum(&c, KVP_CTR_BOOK_FULL);
		backwards += sum < before;
		before = sum;
	}
	for (int i = 0; i < WRITERS; i++)
		pthread_join(t[i], NULL);
	is_u64(log_read(&l, &wrong) + kvp_errlog_lost(&l), WRITERS * PUTS, "every error is counted once");
	is_u64(wrong, 0, "and no reader saw half a record");
	is_u64(kvp_errlog_check(&l), 0, "the log is sound");
	is_u64(kvp_ctr_sum(&c, KVP_CTR_BOOK_FULL), WRITERS * PUTS, "columns add up");
	is_u64(kvp_ctr_sum(&c, KVP_CTR_BOOK_STALE), WRITERS * PUTS, "a counter with several writers, too");
	is_u64(backwards, 0, "and never go back");
}

int main(void)
{
	const char *t = getenv("KVP_TORTURE_S");
	uint64_t seed = tap_seed(0);
	tree(seed, (t ? strtoull(t, NULL, 10) : 1) * 1000);
	wakes();
	logs();
	return done();
}
