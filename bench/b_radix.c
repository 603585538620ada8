/* Lookups and updates of the KV radix tree.
 *   b_radix [blocks, default 1000000] [slots: 64, 256, 1024 or 4096, default 64]
 * Data: equal shares of blocks in chains of 64, 512, 1024 and 4608; 16 chains share their first 16 blocks;
 * each chain has one to three holders of all of it and one or two of a part. Hashes of the queried prompt are
 * hot, the index is as cold as its size makes it. Key chains are computed inside the lookup. */
#include "shm/radix_ahead.h"
#include "shm/radix_priv.h"

#include <pthread.h>
#include <semaphore.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define SAMPLES 4000
#define REPEATS 5
#define CHASE_BYTES (512ULL << 20)

static struct kvp_geom geom;
static struct kvp_radix radix;
static struct kvp_radix_w *writer;
static struct kvp_radix_match *match;
static uint64_t local[8192], ext[8192];
static uint64_t rng = 88172645463325252ULL;
static uint64_t clock_cost;

static uint64_t mix(uint64_t x)
{
	x += 0x9e3779b97f4a7c15ULL;
	x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
	x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
	return x ^ (x >> 31);
}

static uint64_t rnd(void)
{
	return mix(rng++);
}

static uint64_t now(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* Time on the processor: tells what the work costs when others use the machine. */
static uint64_t cpu_now(void)
{
	struct timespec t;
	clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
	return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void *map(uint64_t bytes)
{
	int fd = memfd_create("b", 0);
	if (fd < 0 || ftruncate(fd, (off_t)bytes))
		exit(1);
	void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
	close(fd);
	if (p == MAP_FAILED)
		exit(1);
	return p;
}

/* Kind k of chain c: blocks 0..15 are those of its group. */
static const uint32_t chain_len[4] = {64, 512, 1024, 4608};
static uint32_t chain_cnt[4];

static void chain(uint32_t k, uint32_t c, uint32_t n)
{
	for (uint32_t i = 0; i < n; i++) {
		uint64_t who = i < 16 ? (uint64_t)(1 + c / 16) << 8 : ((uint64_t)c << 20) + 0x100000000000ULL;
		local[i] = mix(who + ((uint64_t)k << 56) + i);
		ext[i] = mix(local[i] ^ 0x55);
	}
}

/* The indexer's helper: touches memory before the writer does. */
static struct kvp_radix_ahead *ahead;
static sem_t ahead_wake;
static volatile int ahead_end;

static void *helper(void *arg)
{
	(void)arg;
	while (sem_wait(&ahead_wake) == 0 && !ahead_end)
		kvp_radix_ahead_run(ahead);
	return NULL;
}

static void wake_helper(void)
{
	int v = 0;
	if (ahead && kvp_radix_ahead_due(ahead) && sem_getvalue(&ahead_wake, &v) == 0 && v == 0)
		sem_post(&ahead_wake);
}

static void put(uint32_t slot, uint32_t from, uint32_t n, uint32_t batch)
{
	for (uint32_t i = from; i < n; i += batch) {
		uint32_t m = n - i < batch ? n - i : batch;
		if (kvp_radix_store(writer, slot, 1, i ? KVP_RADIX_CHILD : KVP_RADIX_ROOT, i ? ext[i - 1] : 0,
			    m, local + i, ext + i, NULL)) {
			fprintf(stderr, "store failed\n");
			exit(1);
		}
	}
}

static uint32_t some_slot(void)
{
	return (uint32_t)(rnd() % (geom.index_rank_max - 2));
}

static void build(uint64_t blocks)
{
	uint64_t fresh = 0, fresh_ns = 0, fresh_cpu = 0, joined = 0, joined_ns = 0;
	for (uint32_t k = 0; k < 4; k++) {
		chain_cnt[k] = (uint32_t)(blocks / 4 / chain_len[k]) + 1;
		for (uint32_t c = 0; c < chain_cnt[k]; c++) {
			uint32_t n = chain_len[k];
			chain(k, c, n);
			uint64_t t = now(), c0 = cpu_now();
			put(some_slot(), 0, n, 64);
			wake_helper();
			fresh_cpu += cpu_now() - c0;
			fresh_ns += now() - t;
			fresh += n;
			uint32_t full = (uint32_t)(rnd() % 3), part = 1 + (uint32_t)(rnd() % 2);
			t = now();
			for (uint32_t h = 0; h < full; h++, joined += n)
				put(some_slot(), 0, n, 64);
			for (uint32_t h = 0; h < part; h++) {
				uint32_t cut = 1 + (uint32_t)(rnd() % (n - 1));
				put(some_slot(), 0, cut, 64);
				joined += cut;
			}
			joined_ns += now() - t;
		}
	}
	printf("bench=radix.store blocks=%llu batch=64 ns_blk=%.1f cpu_ns_blk=%.1f\n",
		(unsigned long long)fresh, (double)fresh_ns / (double)fresh,
		(double)fresh_cpu / (double)fresh);
	printf("bench=radix.join blocks=%llu batch=64 ns_blk=%.1f\n", (unsigned long long)joined,
		(double)joined_ns / (double)joined);
}

/* Calibration: a dependent random load over 512 MiB, and a step of the key chain. */
static double calibrate(double *chain_ns)
{
	uint64_t n = CHASE_BYTES / 64, *p = map(CHASE_BYTES);
	for (uint64_t i = 0; i < n; i++)
		p[i * 8] = i;
	for (uint64_t i = n - 1; i > 0; i--) {
		uint64_t j = rnd() % i, x = p[i * 8];
		p[i * 8] = p[j * 8];
		p[j * 8] = x;
	}
	uint64_t at = 0, steps = 2000000, t = now();
	for (uint64_t i = 0; i < steps; i++)
		at = p[at * 8];
	double m = (double)(now() - t) / (double)steps;
	uint64_t k = at;
	t = now();
	for (uint64_t i = 0; i < 20000000; i++)
		k = kvp_radix_step(radix.key_salt, k, local[i & 1023]);
	*chain_ns = (double)(now() - t) / 20000000.0;
	if (k == 42)
		printf("# unlikely\n");
	munmap(p, CHASE_BYTES);
	uint64_t best = UINT64_MAX;
	for (int i = 0; i < 1000; i++) {
		t = now();
		uint64_t d = now() - t;
		best = d < best ? d : best;
	}
	clock_cost = best;
	return m;
}

static int by_size(const void *a, const void *b)
{
	uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
	return x < y ? -1 : x > y;
}

enum kind { FULL, HALF, MISS };
static const char *const kind_name[] = {"full", "half", "miss"};

/* One case: the median over the repeats of p50 and p99. */
static void lookups(uint32_t n, enum kind kind, uint32_t k, double m, const char *beside)
{
	static uint64_t ns[SAMPLES];
	uint64_t p50[REPEATS], p99[REPEATS], retries = 0, wrong = 0;
	for (int rep = 0; rep < REPEATS; rep++) {
		for (int i = 0; i < SAMPLES; i++) {
			chain(k, (uint32_t)(rnd() % chain_cnt[k]), n);
			if (kind != FULL)
				for (uint32_t j = kind == HALF ? n / 2 : 0; j < n; j++)
					local[j] = rnd();
			struct kvp_radix_query q = {1, local, n, n, NULL, NULL};
			uint64_t t = now();
			kvp_radix_find(&radix, &q, match);
			uint64_t d = now() - t;
			ns[i] = d > clock_cost ? d - clock_cost : 0;
			retries += match->retries;
			wrong += match->longest != (kind == FULL ? n : kind == HALF ? n / 2 : 0);
		}
		qsort(ns, SAMPLES, sizeof(ns[0]), by_size);
		p50[rep] = ns[SAMPLES / 2];
		p99[rep] = ns[SAMPLES * 99 / 100];
	}
	qsort(p50, REPEATS, sizeof(p50[0]), by_size);
	qsort(p99, REPEATS, sizeof(p99[0]), by_size);
	double mid = (double)p50[REPEATS / 2];
	printf("bench=radix.find%s depth=%u kind=%s p50_ns=%.0f p99_ns=%llu ns_blk=%.2f in_M=%.2f "
	       "retries=%llu "
	       "wrong=%llu\n",
		beside, n, kind_name[kind], mid, (unsigned long long)p99[REPEATS / 2], mid / n, mid / m,
		(unsigned long long)retries, (unsigned long long)wrong);
}

/* Chains of 16 shared and 128 own blocks, two holders, stored first block first, removed last block first. */
#define LIVE 4000
#define CHURN_LEN 144

static void churn_chain(uint64_t id, uint64_t *l, uint64_t *e)
{
	for (uint32_t i = 0; i < CHURN_LEN; i++) {
		l[i] = mix((i < 16 ? (id / 64) << 8 : id << 20) + i + 0x7700000000000000ULL);
		e[i] = mix(l[i] ^ 0x99);
	}
}

static void churn_put(uint64_t id, uint32_t batch, uint64_t *l, uint64_t *e)
{
	churn_chain(id, l, e);
	for (uint32_t h = 0; h < 2; h++)
		for (uint32_t i = 0; i < CHURN_LEN; i += batch) {
			uint32_t m = CHURN_LEN - i < batch ? CHURN_LEN - i : batch;
			kvp_radix_store(writer, (uint32_t)((id + h * 7) % geom.index_rank_max), 1,
				i ? KVP_RADIX_CHILD : KVP_RADIX_ROOT, i ? e[i - 1] : 0, m, l + i, e + i,
				NULL);
		}
}

static void churn_take(uint64_t id, uint32_t batch, uint64_t *l, uint64_t *e)
{
	uint64_t back[CHURN_LEN];
	churn_chain(id, l, e);
	for (uint32_t i = 0; i < CHURN_LEN; i++)
		back[i] = e[CHURN_LEN - 1 - i];
	for (uint32_t h = 0; h < 2; h++)
		for (uint32_t i = 0; i < CHURN_LEN; i += batch) {
			uint32_t m = CHURN_LEN - i < batch ? CHURN_LEN - i : batch;
			kvp_radix_remove(
				writer, (uint32_t)((id + h * 7) % geom.index_rank_max), m, back + i, NULL);
		}
}

static volatile int stop;
static uint64_t next_id = 1000;

static void churn(uint32_t batch, uint64_t rounds, const char *name)
{
	uint64_t l[CHURN_LEN], e[CHURN_LEN], blocks = 0, begin = next_id, t;
	for (uint64_t i = 0; i < LIVE; i++)
		churn_put(next_id++, batch, l, e);
	t = now();
	for (uint64_t i = 0; i < rounds && !stop; i++) {
		churn_take(begin++, batch, l, e);
		churn_put(next_id++, batch, l, e);
		blocks += 4 * CHURN_LEN;
	}
	double s = (double)(now() - t) / 1e9;
	for (; begin < next_id; begin++)
		churn_take(begin, batch, l, e);
	printf("bench=radix.churn%s batch=%u mblk_s=%.2f events_s=%.0f\n", name, batch,
		(double)blocks / s / 1e6, (double)blocks / batch / s);
}

static void *churner(void *arg)
{
	(void)arg;
	churn(32, UINT64_MAX, ".beside");
	return NULL;
}

/* 4096 blocks in runs of 32: at every 32nd block another chain branches off. */
static void short_runs(uint64_t blocks, double m)
{
	uint64_t own[4096], own_ext[4096];
	uint32_t cnt = (uint32_t)(blocks / 10 / 4096) + 1;
	chain_cnt[3] = cnt;
	for (uint32_t c = 0; c < cnt; c++) {
		chain(3, c + 0x10000, 4096);
		memcpy(own, local, sizeof(own));
		memcpy(own_ext, ext, sizeof(own_ext));
		put(some_slot(), 0, 4096, 64);
		uint32_t slot = some_slot();
		put(slot, 0, 4096, 64);
		for (uint32_t i = 32; i < 4096; i += 32) {
			local[i] = rnd();
			ext[i] = rnd();
			kvp_radix_store(writer, slot, 1, KVP_RADIX_CHILD, own_ext[i - 1], 1, local + i,
				ext + i, NULL);
		}
	}
	static uint64_t ns[SAMPLES];
	for (int i = 0; i < SAMPLES; i++) {
		chain(3, (uint32_t)(rnd() % cnt) + 0x10000, 4096);
		struct kvp_radix_query q = {1, local, 4096, 4096, NULL, NULL};
		uint64_t t = now();
		kvp_radix_find(&radix, &q, match);
		ns[i] = now() - t - clock_cost;
	}
	qsort(ns, SAMPLES, sizeof(ns[0]), by_size);
	printf("bench=radix.find.runs32 depth=4096 kind=full p50_ns=%llu p99_ns=%llu in_M=%.2f\n",
		(unsigned long long)ns[SAMPLES / 2], (unsigned long long)ns[SAMPLES * 99 / 100],
		(double)ns[SAMPLES / 2] / m);
}

int main(int argc, char **argv)
{
	uint64_t blocks = argc > 1 ? strtoull(argv[1], NULL, 10) : 1000000;
	double h;
	geom = (struct kvp_geom){.index_rank_max = argc > 2 ? (uint32_t)strtoul(argv[2], NULL, 10) : 64,
		.block_max = blocks * 3 / 2 + 4000000,
		.region_gen = 1,
		.salt = {3, 4}};
	uint64_t bytes = kvp_radix_footprint(&geom);
	if (!bytes)
		return 2;
	void *pub = map(bytes), *priv = map(kvp_radix_priv_footprint(&geom));
	match = malloc(sizeof(*match));
	if (kvp_radix_new(pub, &geom) || kvp_radix_priv_new(priv, &geom) ||
		kvp_radix_join(pub, &geom, &radix) ||
		kvp_radix_w_open(pub, priv, &geom, KVP_RADIX_RECOVER, NULL, &writer, NULL))
		return 1;
	double m = calibrate(&h);
	pthread_t th, help;
	const char *no = getenv("KVP_BENCH_AHEAD"); /* "off": without the helper thread */
	if (!no || strcmp(no, "off") != 0) {
		if (sem_init(&ahead_wake, 0, 0) || kvp_radix_ahead_open(writer, KVP_RADIX_HUGE_TRY, &ahead) ||
			pthread_create(&help, NULL, helper, NULL))
			return 1;
	}
	printf("# b_radix blocks=%llu slots=%u M_ns=%.0f H_ns=%.2f clock_ns=%llu ahead=%s huge_pages=%s\n",
		(unsigned long long)blocks, geom.index_rank_max, m, h, (unsigned long long)clock_cost,
		ahead ? "on" : "off", ahead && kvp_radix_ahead_huge(ahead) ? "on" : "off");
	build(blocks);
	const uint32_t depth[3] = {32, 512, 4096};
	for (int kind = FULL; kind <= MISS; kind++)
		for (int d = 0; d < 3; d++)
			lookups(depth[d], kind, d == 0 ? 0 : d == 1 ? 1 : 3, m, "");
	churn(32, 20000, "");
	churn(1, 4000, "");
	pthread_create(&th, NULL, churner, NULL);
	for (int d = 0; d < 3; d++)
		lookups(depth[d], FULL, d == 0 ? 0 : d == 1 ? 1 : 3, m, ".beside");
	stop = 1;
	pthread_join(th, NULL);
	stop = 0;
	short_runs(blocks, m);
	struct kvp_radix_stats st;
	kvp_radix_stats(&radix, &st);
	printf("bench=radix.memory blocks=%llu runs=%llu table_slots=%llu shm_bytes_blk=%.1f\n",
		(unsigned long long)st.blocks, (unsigned long long)st.runs,
		(unsigned long long)st.table_slots,
		((double)st.col_used_words * 8 + (double)st.cut_used_words * 4 +
			(double)st.table_slots * radix.hdr_bytes) /
			(double)st.blocks);
	struct kvp_radix_report rep;
	if (ahead) {
		ahead_end = 1;
		sem_post(&ahead_wake);
		pthread_join(help, NULL);
		kvp_radix_ahead_close(ahead);
	}
	kvp_radix_w_close(writer);
	if (kvp_radix_w_open(pub, priv, &geom, KVP_RADIX_RECOVER, NULL, &writer, &rep))
		return 1;
	printf("bench=radix.recover blocks=%llu ms=%.0f ns_blk=%.1f dropped=%llu\n",
		(unsigned long long)rep.blocks, (double)rep.duration_ns / 1e6,
		(double)rep.duration_ns / (double)rep.blocks, (unsigned long long)rep.runs_dropped);
	return 0;
}
