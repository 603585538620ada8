/* The tree at its limits: what each bar of it is measured with, all in one build of the tree.
 *   b_radix [blocks 1000000] [slots 64] [readers 2] [lookup]
 * lookup: only build, lookups, churn, rates and memory. The data is bench/chains.h. Hashes of the queried
 * prompt are hot, the index is as cold as its size makes it. form=computed: the lookup as it is, which
 * computes the key chain of the prompt; form=given: the same walk compiled to take ready keys. _cpu_s: per
 * second of processor time. Medians of 5. */
#include "bench/chains.h"
#include "shm/radix_ahead.h"
#include "shm/radix_priv.h"

/* The walk with given keys: the same code, where the step of the key chain takes the hash for the key. */
int find_given(const struct kvp_radix *r, struct kvp_radix_query *q, struct kvp_radix_match *m);
#define KVP_RADIX_KEYS_AT /* another loop: as the compiler places it */
#define kvp_radix_step(salt, prev, key) ((void)(salt), (void)(prev), (key))
#define kvp_radix_find find_given
#include "shm/radix_read.c"
#undef kvp_radix_find
#undef kvp_radix_step

#include <pthread.h>
#include <semaphore.h>
#include <sys/wait.h>

#define SAMPLES 3000
#define REPEATS 5
#define READERS_MAX 8
#define RATE_NS 100000000ull
#define POOL_BYTES (16u << 20)
#define HOT_CHAINS 32

enum kind { FULL, HALF, MISS };
enum form { COMPUTED, GIVEN };
static const char *const form_name[] = {"computed", "given"};
static int (*const find[])(const struct kvp_radix *, struct kvp_radix_query *, struct kvp_radix_match *) = {
	kvp_radix_find, find_given};
static const char *const kind_name[] = {"full", "half", "miss"};
static const struct {
	uint32_t blk, kind;
} depth[3] = {{32, 0}, {512, 1}, {4096, 3}};

static struct kvp_geom geom;
static struct kvp_radix radix;
static struct kvp_radix_w *writer;
static void *pub, *priv;
static int pub_fd, priv_fd;
static struct kvp_radix_match *match;
static uint64_t local[8192], ext[8192], blocks, clock_ns, rng = 88172645463325252ULL, next_id = 1000;
static uint64_t sink;
static cpu_set_t cpus;

static uint64_t rnd(void)
{
	return bench_mix(rng++);
}

static uint32_t some_slot(void)
{
	return (uint32_t)(rnd() % (geom.index_rank_max - 2));
}

static void must(int rc, const char *what)
{
	if (rc) {
		fprintf(stderr, "b_radix: %s: %s\n", what, kvp_strerror(rc));
		exit(1);
	}
}

static uint64_t resident_bytes(void)
{
	char line[256];
	unsigned long long kib = 0;
	FILE *f = fopen("/proc/self/status", "re");
	while (f && fgets(line, sizeof(line), f))
		if (sscanf(line, "RssAnon: %llu", &kib) == 1)
			break;
	if (f)
		fclose(f);
	return kib * 1024;
}

/* -- the indexer's helper: touches memory before the writer does. KVP_BENCH_AHEAD=off: without it -- */

static struct kvp_radix_ahead *ahead;
static pthread_t ahead_thread;
static sem_t ahead_wake;
static uint32_t ahead_end;

static void *helper(void *arg)
{
	(void)arg;
	while (sem_wait(&ahead_wake) == 0 && !kvp_ld_acq_u32(&ahead_end))
		kvp_radix_ahead_run(ahead);
	return NULL;
}

static void wake_helper(void)
{
	int v = 0;
	if (ahead && kvp_radix_ahead_due(ahead) && sem_getvalue(&ahead_wake, &v) == 0 && v == 0)
		sem_post(&ahead_wake);
}

static void helper_start(void)
{
	const char *no = getenv("KVP_BENCH_AHEAD");
	if (no && strcmp(no, "off") == 0)
		return;
	must(kvp_radix_ahead_open(writer, KVP_RADIX_HUGE_TRY, &ahead), "ahead");
	if (sem_init(&ahead_wake, 0, 0) || pthread_create(&ahead_thread, NULL, helper, NULL))
		exit(1);
}

static void helper_stop(void)
{
	if (!ahead)
		return;
	kvp_st_rel_u32(&ahead_end, 1);
	sem_post(&ahead_wake);
	pthread_join(ahead_thread, NULL);
	kvp_radix_ahead_close(ahead);
	ahead = NULL;
}

/* -- build -- */

struct slice {
	uint64_t fresh, fresh_ns, joined, joined_ns;
};

static void store_chain(uint32_t kind, uint64_t c, struct slice *s)
{
	uint32_t n = chain_blk[kind], full = (uint32_t)(rnd() % 3), part = 1 + (uint32_t)(rnd() % 2);
	chain_make(kind, c, n, local, ext);
	uint64_t t = bench_cpu_ns();
	must(chain_store(writer, some_slot(), n, 64, local, ext), "store");
	wake_helper();
	uint64_t mid = bench_cpu_ns();
	for (uint32_t h = 0; h < full + part; h++) {
		uint32_t cut = h < full ? n : 1 + (uint32_t)(rnd() % (n - 1));
		must(chain_store(writer, some_slot(), cut, 64, local, ext), "join");
		s->joined += cut;
	}
	s->joined_ns += bench_cpu_ns() - mid;
	s->fresh_ns += mid - t;
	s->fresh += n;
}

/* Chains of all kinds in five equal slices, so that the medians are over trees of growing size. */
static void build(void)
{
	double fresh[REPEATS], join[REPEATS];
	uint64_t total = 0;
	for (uint32_t i = 0; i < REPEATS; i++) {
		struct slice s = {0};
		for (uint32_t kind = 0; kind < CHAIN_KINDS; kind++) {
			uint64_t cnt = chain_cnt(blocks, kind);
			for (uint64_t c = cnt * i / REPEATS; c < cnt * (i + 1) / REPEATS; c++)
				store_chain(kind, c, &s);
		}
		fresh[i] = s.fresh ? (double)s.fresh_ns / (double)s.fresh : 0;
		join[i] = s.joined ? (double)s.joined_ns / (double)s.joined : 0;
		total += s.fresh;
	}
	printf("bench=radix.build blocks=%" PRIu64 " batch=64 new_ns_blk=%.1f join_ns_blk=%.1f\n", total,
		bench_median(fresh, REPEATS), bench_median(join, REPEATS));
}

static void memory(uint64_t anon_before)
{
	struct kvp_radix_stats st;
	kvp_radix_stats(&radix, &st);
	double n = (double)st.blocks;
	uint64_t used = st.col_used_words * 8 + st.cut_used_words * 4 + st.table_slots * radix.hdr_bytes;
	printf("bench=radix.memory blocks=%" PRIu64 " runs=%" PRIu64 " table_slots=%" PRIu64 " hdr_bytes=%u "
	       "region_bytes_blk=%.1f touched_bytes_blk=%.1f private_bytes_blk=%.1f "
	       "private_segment_bytes_blk=%.1f\n",
		st.blocks, st.runs, st.table_slots, radix.hdr_bytes, (double)used / n,
		(double)bench_used_bytes(pub_fd) / n,
		(double)(bench_used_bytes(priv_fd) + resident_bytes() - anon_before) / n,
		(double)bench_used_bytes(priv_fd) / n);
}

/* -- lookups one at a time -- */

/* Local hashes to keys, in place. */
static void to_keys(uint64_t *hash, uint32_t n)
{
	uint64_t k = kvp_radix_seed(radix.key_salt, CHAIN_PART);
	for (uint32_t i = 0; i < n; i++)
		hash[i] = k = kvp_radix_step(radix.key_salt, k, hash[i]);
}

static void prompt(int d, enum kind kind, enum form form)
{
	uint32_t n = depth[d].blk, known = kind == FULL ? n : kind == HALF ? n / 2 : 0;
	/* of a miss, the walk reads the first chunk only */
	for (uint32_t j = known; j < (kind == MISS && n > KVP_RADIX_CHUNK_BLK ? KVP_RADIX_CHUNK_BLK : n); j++)
		local[j] = rnd();
	chain_make(depth[d].kind, rnd() % chain_cnt(blocks, depth[d].kind), known, local, NULL);
	if (form == GIVEN)
		to_keys(local, kind == MISS && n > KVP_RADIX_CHUNK_BLK ? KVP_RADIX_CHUNK_BLK : n);
	for (uint32_t j = 0; j < KVP_RADIX_CHUNK_BLK; j++) /* what a walk reads first is in the near cache */
		sink += local[j];
}

static void lookups(int d, enum kind kind, enum form form, const char *name)
{
	static uint64_t ns[SAMPLES];
	uint32_t n = depth[d].blk, want = kind == FULL ? n : kind == HALF ? n / 2 : 0;
	double p50[REPEATS], p99[REPEATS];
	uint64_t retries = 0, wrong = 0;
	for (int rep = 0; rep < REPEATS; rep++) {
		for (int i = 0; i < SAMPLES; i++) {
			prompt(d, kind, form);
			struct kvp_radix_query q = {CHAIN_PART, local, n, n, NULL, NULL};
			uint64_t t = bench_now_ns();
			find[form](&radix, &q, match);
			t = bench_now_ns() - t;
			ns[i] = t > clock_ns ? t - clock_ns : 0;
			retries += match->retries;
			wrong += match->longest != want;
		}
		qsort(ns, SAMPLES, sizeof(ns[0]), bench_cmp_u64);
		p50[rep] = (double)ns[SAMPLES / 2];
		p99[rep] = (double)ns[SAMPLES * 99 / 100];
	}
	double mid = bench_median(p50, REPEATS);
	printf("bench=radix.%s depth=%u kind=%s form=%s p50_ns=%.0f p99_ns=%.0f ns_blk=%.2f retries=%" PRIu64
	       " wrong=%" PRIu64 "\n",
		name, n, kind_name[kind], form_name[form], mid, bench_median(p99, REPEATS), mid / n, retries,
		wrong);
	fflush(stdout);
}

/* The same prompt again and again: what a walk costs when nothing has to come from memory. */
static void hot(int d, enum form form)
{
	double v[REPEATS];
	uint32_t n = depth[d].blk;
	prompt(d, FULL, form);
	for (int rep = 0; rep < REPEATS; rep++) {
		uint64_t t = bench_cpu_ns();
		for (int i = 0; i < 500; i++) {
			struct kvp_radix_query q = {CHAIN_PART, local, n, n, NULL, NULL};
			find[form](&radix, &q, match);
		}
		v[rep] = (double)(bench_cpu_ns() - t) / 500;
	}
	printf("bench=radix.hot depth=%u form=%s ns=%.0f\n", n, form_name[form], bench_median(v, REPEATS));
}

/* -- rates: prompts made ahead, the whole loop counts -- */

struct pool {
	uint64_t *hash;
	uint32_t n, cnt;
	enum form form;
};

static struct pool pool_make(int d, enum form form)
{
	struct pool p = {.n = depth[d].blk, .form = form};
	uint64_t chains = chain_cnt(blocks, depth[d].kind);
	p.cnt = POOL_BYTES / 8 / p.n;
	p.cnt = p.cnt < chains ? p.cnt : (uint32_t)chains;
	p.hash = malloc((size_t)p.cnt * p.n * 8);
	if (!p.hash)
		exit(1);
	for (uint32_t i = 0; i < p.cnt; i++) {
		chain_make(depth[d].kind, rnd() % chains, p.n, p.hash + (size_t)i * p.n, NULL);
		if (form == GIVEN)
			to_keys(p.hash + (size_t)i * p.n, p.n);
	}
	return p;
}

/* Lookups a second of processor time; *wall: a second of the clock. */
static double pool_rate(const struct pool *p, uint64_t for_ns, double *wall)
{
	uint64_t done = 0, start = bench_now_ns(), cpu = bench_cpu_ns(), end;
	do {
		for (int i = 0; i < 64; i++, done++) {
			uint64_t *h = p->hash + (size_t)(done % p->cnt) * p->n;
			struct kvp_radix_query q = {CHAIN_PART, h, p->n, p->n, NULL, NULL};
			find[p->form](&radix, &q, match);
			sink += match->longest;
		}
		end = bench_now_ns();
	} while (end - start < for_ns);
	*wall = (double)done * 1e9 / (double)(end - start);
	return (double)done * 1e9 / (double)(bench_cpu_ns() - cpu);
}

struct shared {
	uint64_t ready, go;
	double rate[READERS_MAX], wall[READERS_MAX];
};

/* All readers together; *wall: by the clock, which processes that share a processor divide among them. */
static double readers_rate(const struct pool *p, uint32_t readers, struct shared *sh, double *wall)
{
	double sum = 0;
	memset(sh, 0, sizeof(*sh));
	for (uint32_t r = 0; r < readers; r++)
		if (fork() == 0) {
			bench_pin(&cpus, r);
			pool_rate(p, RATE_NS / 2, &sh->wall[r]); /* the mapping's pages are not inherited */
			kvp_faa_ar_u64(&sh->ready, 1);
			while (!kvp_ld_acq_u64(&sh->go))
				sched_yield();
			sh->rate[r] = pool_rate(p, RATE_NS, &sh->wall[r]);
			_exit(0);
		}
	while (kvp_ld_acq_u64(&sh->ready) < readers)
		sched_yield();
	kvp_st_rel_u64(&sh->go, 1);
	while (wait(NULL) > 0)
		;
	for (uint32_t r = 0, first = 1; r < readers; r++, first = 0) {
		sum += sh->rate[r];
		*wall = first ? sh->wall[r] : *wall + sh->wall[r];
	}
	return sum;
}

static void rates(uint32_t readers)
{
	struct shared *sh =
		mmap(NULL, sizeof(*sh), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (sh == MAP_FAILED)
		exit(1);
	for (int i = 0; i < 6; i++) {
		struct pool p = pool_make(i / 2, i % 2 ? GIVEN : COMPUTED);
		double rate[READERS_MAX + 1];
		for (uint32_t r = 1; r <= readers; r++) {
			double v[REPEATS], wall[REPEATS];
			for (int rep = 0; rep < REPEATS; rep++)
				v[rep] = readers_rate(&p, r, sh, &wall[rep]);
			rate[r] = bench_median(v, REPEATS);
			printf("bench=radix.rate depth=%u form=%s readers=%u lookups_cpu_s=%.0f scaling=%.2f "
			       "block_ops_cpu_s=%.0f lookups_wall_s=%.0f\n",
				p.n, form_name[p.form], r, rate[r], rate[r] / rate[1], rate[r] * p.n,
				bench_median(wall, REPEATS));
			fflush(stdout);
		}
		free(p.hash);
	}
	munmap(sh, sizeof(*sh));
}

/* -- the writer, alone and beside a reader -- */

static uint64_t stop, churned, churn_cpu_ns; /* churned: blocks so far */
static uint32_t churn_batch;
static uint64_t hot_chains; /* 0: ever new chains; else the same ones again and again */

static void *churner(void *arg)
{
	uint64_t begin = next_id, live = hot_chains ? hot_chains : CHURN_LIVE, slots = geom.index_rank_max;
	bench_pin(&cpus, 1);
	for (uint64_t i = 0; i < live; i++)
		must(churn_put(writer, begin + i, churn_batch, (uint32_t)slots), "churn");
	uint64_t cpu = bench_cpu_ns(), i = 0, done = 0;
	kvp_st_rel_u64((uint64_t *)arg, 1);
	for (; !kvp_ld_acq_u64(&stop); i++) {
		uint64_t out = hot_chains ? begin + i % live : begin + i,
			 in = hot_chains ? out : begin + live + i;
		churn_take(writer, out, churn_batch, (uint32_t)slots);
		must(churn_put(writer, in, churn_batch, (uint32_t)slots), "churn");
		wake_helper();
		done += 4 * CHURN_BLK;
		kvp_st_rlx_u64(&churned, done);
	}
	kvp_st_rlx_u64(&churn_cpu_ns, bench_cpu_ns() - cpu);
	for (uint64_t k = 0; k < live; k++)
		churn_take(writer, hot_chains ? begin + k : begin + i + k, churn_batch, (uint32_t)slots);
	next_id = begin + live + i;
	return NULL;
}

static pthread_t churn_start(uint32_t batch, uint64_t hot)
{
	static uint64_t running;
	pthread_t th;
	churn_batch = batch;
	hot_chains = hot;
	running = stop = churned = 0;
	if (pthread_create(&th, NULL, churner, &running))
		exit(1);
	while (!kvp_ld_acq_u64(&running))
		sched_yield();
	return th;
}

/* Ends the churn: blocks a second of the writer's processor time. */
static double churn_stop(pthread_t th)
{
	kvp_st_rel_u64(&stop, 1);
	pthread_join(th, NULL);
	return (double)churned * 1e9 / (double)churn_cpu_ns;
}

static void churn_alone(uint32_t batch)
{
	double v[REPEATS];
	for (int rep = 0; rep < REPEATS; rep++) {
		pthread_t th = churn_start(batch, 0);
		usleep(150000);
		v[rep] = churn_stop(th);
	}
	double blk = bench_median(v, REPEATS);
	printf("bench=radix.churn batch=%u blk_cpu_s=%.0f events_cpu_s=%.0f\n", batch, blk, blk / batch);
	fflush(stdout);
}

static void mixed(enum form form)
{
	struct pool p = pool_make(1, form);
	double v[REPEATS], req[REPEATS], ev[REPEATS], wall;
	for (int rep = 0; rep < REPEATS; rep++) {
		pthread_t th = churn_start(32, 0);
		req[rep] = pool_rate(&p, RATE_NS * 2, &wall) * p.n;
		ev[rep] = churn_stop(th);
		v[rep] = req[rep] + ev[rep];
	}
	printf("bench=radix.mixed depth=%u form=%s request_blk_cpu_s=%.0f event_blk_cpu_s=%.0f "
	       "block_ops_cpu_s=%.0f\n",
		p.n, form_name[form], bench_median(req, REPEATS), bench_median(ev, REPEATS),
		bench_median(v, REPEATS));
	fflush(stdout);
	free(p.hash);
}

static void beside(void)
{
	pthread_t th = churn_start(32, 0);
	for (int d = 0; d < 3; d++) {
		lookups(d, FULL, COMPUTED, "beside");
		lookups(d, FULL, GIVEN, "beside");
	}
	printf("bench=radix.churn_beside batch=32 blk_cpu_s=%.0f\n", churn_stop(th));
	mixed(COMPUTED);
	mixed(GIVEN);
}

/* Every query meets the few chains that the writer stores and removes all the time. */
static void contended(void)
{
	uint64_t id0 = next_id, l[CHURN_BLK], e[CHURN_BLK], queries = 0, retries = 0, gave_up = 0, over = 0;
	pthread_t th = churn_start(32, HOT_CHAINS);
	for (uint64_t end = bench_now_ns() + 10 * RATE_NS; bench_now_ns() < end;)
		for (int i = 0; i < 64; i++, queries++) {
			churn_make(id0 + rnd() % HOT_CHAINS, l, e);
			struct kvp_radix_query q = {CHAIN_PART, l, CHURN_BLK, CHURN_BLK, NULL, NULL};
			kvp_radix_find(&radix, &q, match);
			retries += match->retries > 0;
			gave_up += match->gave_up;
			over += match->longest > CHURN_BLK;
		}
	churn_stop(th);
	printf("bench=radix.contended chains=%d queries=%" PRIu64 " retried_percent=%.3f gave_up=%" PRIu64
	       " over_long=%" PRIu64 "\n",
		HOT_CHAINS, queries, 100.0 * (double)retries / (double)queries, gave_up, over);
	fflush(stdout);
}

/* -- 4096 blocks in runs of 32: at every 32nd block another chain branches off -- */

static void short_lookups(uint64_t first, uint64_t cnt, enum form form)
{
	static uint64_t ns[SAMPLES];
	double p50[REPEATS], p99[REPEATS];
	uint64_t wrong = 0;
	for (int rep = 0; rep < REPEATS; rep++) {
		for (int i = 0; i < SAMPLES / 3; i++) {
			chain_make(3, first + rnd() % cnt, 4096, local, NULL);
			if (form == GIVEN)
				to_keys(local, 4096);
			struct kvp_radix_query q = {CHAIN_PART, local, 4096, 4096, NULL, NULL};
			uint64_t t = bench_now_ns();
			find[form](&radix, &q, match);
			ns[i] = bench_now_ns() - t - clock_ns;
			wrong += match->longest != 4096;
		}
		qsort(ns, SAMPLES / 3, sizeof(ns[0]), bench_cmp_u64);
		p50[rep] = (double)ns[SAMPLES / 6];
		p99[rep] = (double)ns[SAMPLES / 3 * 99 / 100];
	}
	printf("bench=radix.runs32 depth=4096 form=%s p50_ns=%.0f p99_ns=%.0f wrong=%" PRIu64 "\n",
		form_name[form], bench_median(p50, REPEATS), bench_median(p99, REPEATS), wrong);
	fflush(stdout);
}

static void short_runs(void)
{
	uint64_t cnt = blocks / 10 / 4096 + 1, first = 1u << 20;
	for (uint64_t c = first; c < first + cnt; c++) {
		uint32_t slot = some_slot();
		chain_make(3, c, 4096, local, ext);
		must(chain_store(writer, some_slot(), 4096, 64, local, ext), "short run");
		must(chain_store(writer, slot, 4096, 64, local, ext), "short run");
		for (uint32_t i = 32; i < 4096; i += 32) {
			uint64_t l = rnd(), e = rnd();
			must(kvp_radix_store(
				     writer, slot, CHAIN_PART, KVP_RADIX_CHILD, ext[i - 1], 1, &l, &e, NULL),
				"branch");
		}
	}
	struct kvp_radix_stats st;
	kvp_radix_stats(&radix, &st);
	printf("bench=radix.table runs=%" PRIu64 " tombstones=%" PRIu64 " table_slots=%" PRIu64 "\n", st.runs,
		st.tombstones, st.table_slots);
	short_lookups(first, cnt, COMPUTED);
	short_lookups(first, cnt, GIVEN);
}

/* -- what the tree is compared with: a node a block, and a hash table entry a block -- */

struct node {
	uint64_t local, seq, bits, child, pad[4];
};
struct entry {
	uint64_t key, bits;
};

static uint64_t scatter(uint64_t x, uint64_t mask)
{
	x = (x * 0x9e3779b97f4a7c15ULL) & mask; /* both steps are bijections below mask + 1 */
	x ^= x >> (__builtin_popcountll(mask) / 2 + 1);
	return (x * 0xd1342543de82ef95ULL) & mask;
}

static uint64_t walk_nodes(const struct node *t, uint64_t mask, uint64_t c, const uint64_t *l)
{
	uint64_t at = scatter(c * 4096, mask), bits = ~0ULL, i = 0;
	for (; i < 4096 && t[at].local == l[i] && bits; i++) {
		bits &= t[at].bits;
		at = t[at].child;
	}
	return i;
}

static const struct entry *entry_at(const struct entry *t, uint64_t mask, uint64_t key)
{
	uint64_t at = key & mask;
	while (t[at].key && t[at].key != key)
		at = (at + 1) & mask;
	return &t[at];
}

static uint64_t walk_hash(const struct entry *t, uint64_t mask, const uint64_t *key)
{
	uint64_t bits = ~0ULL, i = 0;
	for (; i < 4096; i++) {
		if (i + 24 < 4096)
			__builtin_prefetch(&t[key[i + 24] & mask]);
		const struct entry *e = entry_at(t, mask, key[i]);
		if (!e->key || !(bits &= e->bits))
			break;
	}
	return i;
}

static uint64_t jump_hash(const struct entry *t, uint64_t mask, const uint64_t *key)
{
	uint64_t lo = 0, pos = 0, bits = ~0ULL;
	while (lo < 4096) {
		pos = lo + 63 < 4095 ? lo + 63 : 4095;
		const struct entry *e = entry_at(t, mask, key[pos]);
		if (!e->key || !(bits &= e->bits))
			break;
		lo = pos + 1;
	}
	for (uint64_t hi = pos; lo < 4096 && lo < hi;) {
		uint64_t mid = lo + (hi - lo) / 2;
		if (entry_at(t, mask, key[mid])->key)
			lo = mid + 1;
		else
			hi = mid;
	}
	return lo;
}

static double compare(const void *t, uint64_t mask, uint64_t chains, int how)
{
	static uint64_t key[4096];
	enum { N = 61 };
	double v[N];
	for (int i = 0; i < N; i++) {
		uint64_t c = rnd() % chains, k = c + 1, got;
		for (uint32_t j = 0; j < 4096; j++)
			key[j] = k = bench_mix(k);
		uint64_t begin = bench_now_ns();
		if (how == 0)
			got = walk_nodes(t, mask, c, key);
		else
			got = how == 1 ? walk_hash(t, mask, key) : jump_hash(t, mask, key);
		v[i] = (double)(bench_now_ns() - begin);
		if (got != 4096)
			exit(1);
	}
	return bench_median(v, N);
}

static void others(void)
{
	uint64_t chains = blocks / 4096 + 1, mask = 1, n, result[3];
	while (mask < chains * 4096)
		mask = mask * 2;
	int fd;
	struct node *t = bench_sparse(mask * sizeof(*t), &fd);
	for (uint64_t c = 0; c < chains; c++)
		for (uint64_t i = 0, k = c + 1; i < 4096; i++) {
			k = bench_mix(k);
			t[scatter(c * 4096 + i, mask - 1)] = (struct node){
				.local = k, .bits = 1, .child = scatter((c * 4096 + i + 1) % mask, mask - 1)};
		}
	result[0] = (uint64_t)compare(t, mask - 1, chains, 0);
	munmap(t, mask * sizeof(*t));
	close(fd);
	n = mask * 2;
	struct entry *h = bench_sparse(n * sizeof(*h), &fd);
	for (uint64_t c = 0; c < chains; c++)
		for (uint64_t i = 0, k = c + 1; i < 4096; i++) {
			k = bench_mix(k);
			*(struct entry *)(uintptr_t)entry_at(h, n - 1, k) = (struct entry){k, 1};
		}
	result[1] = (uint64_t)compare(h, n - 1, chains, 1);
	result[2] = (uint64_t)compare(h, n - 1, chains, 2);
	munmap(h, n * sizeof(*h));
	close(fd);
	printf("bench=radix.others depth=4096 node_walk_ns=%" PRIu64 " hash_walk_ns=%" PRIu64
	       " jump64_ns=%" PRIu64 "\n",
		result[0], result[1], result[2]);
	fflush(stdout);
}

/* The writer's start on a tree that is there: what a restart of the indexer waits for. */
static void recover(void)
{
	struct kvp_radix_report rep;
	double ms[REPEATS];
	helper_stop();
	for (int i = 0; i < REPEATS; i++) {
		kvp_radix_w_close(writer);
		uint64_t cpu = bench_cpu_ns();
		must(kvp_radix_w_open(pub, priv, &geom, KVP_RADIX_RECOVER, NULL, &writer, &rep), "recover");
		ms[i] = (double)(bench_cpu_ns() - cpu) / 1e6;
	}
	double mid = bench_median(ms, REPEATS);
	printf("bench=radix.recover blocks=%" PRIu64 " cpu_ms=%.1f ns_blk=%.1f dropped=%" PRIu64 "\n",
		rep.blocks, mid, mid * 1e6 / (double)rep.blocks, rep.runs_dropped);
	fflush(stdout);
}

int main(int argc, char **argv)
{
	blocks = argc > 1 ? strtoull(argv[1], NULL, 10) : 1000000;
	uint32_t readers = argc > 3 ? (uint32_t)strtoul(argv[3], NULL, 10) : 2;
	int short_form = argc > 4 && strcmp(argv[4], "lookup") == 0;
	geom = (struct kvp_geom){.index_rank_max = argc > 2 ? (uint32_t)strtoul(argv[2], NULL, 10) : 64,
		.block_max = blocks * 3 / 2 + 4000000,
		.region_gen = 1,
		.salt = {3, 4}};
	uint64_t bytes = kvp_radix_footprint(&geom);
	if (!bytes || !readers || readers > READERS_MAX)
		return 2;
	sched_getaffinity(0, sizeof(cpus), &cpus);
	bench_pin(&cpus, 0);
	bench_args(argc, argv);
	clock_ns = bench_clock_ns();
	uint64_t anon = resident_bytes();
	pub = bench_sparse(bytes, &pub_fd);
	priv = bench_sparse(kvp_radix_priv_footprint(&geom), &priv_fd);
	match = calloc(1, sizeof(*match));
	if (!match)
		return 1;
	must(kvp_radix_new(pub, &geom), "new");
	must(kvp_radix_priv_new(priv, &geom), "priv_new");
	must(kvp_radix_join(pub, &geom, &radix), "join");
	must(kvp_radix_w_open(pub, priv, &geom, KVP_RADIX_RESET, NULL, &writer, NULL), "open");
	kvp_radix_w_set_ready(writer, 1);
	helper_start();
	printf("# helper=%s huge_pages=%s\n", ahead ? "on" : "off",
		ahead && kvp_radix_ahead_huge(ahead) ? "on" : "off");
	build();
	memory(anon);
	for (int kind = FULL; kind <= MISS; kind++)
		for (int d = 0; d < 3; d++)
			for (int form = COMPUTED; form <= GIVEN; form++)
				lookups(d, (enum kind)kind, (enum form)form, "find");
	for (int d = 0; d < 3; d++) {
		hot(d, COMPUTED);
		hot(d, GIVEN);
	}
	churn_alone(32);
	churn_alone(1);
	rates(readers);
	if (!short_form) {
		beside();
		contended();
		short_runs();
		recover();
		kvp_radix_w_close(writer);
		others();
	}
	return sink == 42;
}
