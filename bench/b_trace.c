/* A request trace replayed into the tree: simulated workers with LRU caches, lookups, stores and removes.
 *   b_trace [--trace FILE bench/load/trace_small.jsonl] [--workers N 8] [--cache TOKENS 1048576] [--block
 *   TOKENS 16]
 * A prompt is its ids, 512 tokens each. Each request is looked up, goes to the worker with the least cost
 * (blocks that it lacks, plus what it was given lately), and that worker's events follow: stores of 128
 * blocks or less, and removes of the ids that fell out of its cache, last blocks first. Answers add no
 * blocks. Operations: a lookup is one request; a request block is a block of a prompt asked for, matched or
 * not (a walk stops at the first miss); an event block is a block in a store or remove event. block_ops_s
 * counts both. Line trace.serial: one thread, in order, each call timed. Line trace.beside: a writer applies
 * the same events while a reader asks for the same prompts, each at full speed on its processor. Medians of
 * 5. */
#include "bench/chains.h"
#include "bench/load/trace.h"

#include <pthread.h>

#define REPEATS 5
#define GROUP_TOK 512
#define EVENT_BLK 128
#define NONE UINT32_MAX
#define TRACE_DEFAULT "bench/load/trace_small.jsonl"

struct lru {		       /* of one worker, over ids */
	uint32_t *prev, *next; /* NONE: not held; the list is a ring through entry id_cnt */
	uint32_t cnt;
	double load; /* blocks given lately */
	uint64_t at_ns;
};

struct event { /* blocks of groups first .. first + cnt - 1 of req, or of one id */
	uint32_t slot, is_remove, req, from, n;
	uint32_t id;
};

static struct kvp_trace trace;
static uint32_t *dense; /* dense number of each id of the trace */
static uint32_t id_cnt, group_blk, worker_cnt = 8, cache_ids;
static struct lru *lru;
static struct event *event;
static uint64_t event_cnt, event_max, *local, *ext, local_max;
static struct kvp_geom geom;
static struct kvp_radix radix;
static struct kvp_radix_w *writer;
static void *pub, *priv;
static uint64_t request_blk, event_blk, matched_blk;
static struct kvp_radix_match match;
static cpu_set_t cpus;

static void *must_have(void *p)
{
	if (!p) {
		perror("b_trace");
		exit(1);
	}
	return p;
}

static uint64_t local_of(uint32_t id, uint32_t i)
{
	return bench_mix(((uint64_t)id << 16) + i + 1);
}

static uint64_t ext_of(uint32_t id, uint32_t i)
{
	return bench_mix(((uint64_t)id << 16) + i + 0x6600000000000000ULL);
}

/* -- reading -- */

struct pair {
	uint64_t id;
	size_t at;
};

static int by_id(const void *a, const void *b)
{
	const struct pair *x = a, *y = b;
	return (x->id > y->id) - (x->id < y->id);
}

static void number_ids(void)
{
	struct pair *p = must_have(malloc(trace.id_cnt * sizeof(*p)));
	dense = must_have(malloc(trace.id_cnt * sizeof(*dense)));
	for (size_t i = 0; i < trace.id_cnt; i++)
		p[i] = (struct pair){trace.id[i], i};
	qsort(p, trace.id_cnt, sizeof(*p), by_id);
	for (size_t i = 0; i < trace.id_cnt; i++) {
		id_cnt += i == 0 || p[i].id != p[i - 1].id;
		dense[p[i].at] = id_cnt - 1;
	}
	free(p);
}

static const uint32_t *ids_of(uint32_t req)
{
	return dense + trace.req[req].id_off;
}

static uint32_t blocks_of(uint32_t req)
{
	return trace.req[req].id_cnt * group_blk;
}

/* Local and external hashes of a prompt. */
static void expand(uint32_t req, uint64_t *l, uint64_t *e)
{
	const uint32_t *id = ids_of(req);
	for (uint32_t g = 0; g < trace.req[req].id_cnt; g++)
		for (uint32_t i = 0; i < group_blk; i++) {
			l[g * group_blk + i] = local_of(id[g], i);
			if (e)
				e[g * group_blk + i] = ext_of(id[g], i);
		}
}

/* -- workers -- */

static void lru_drop(struct lru *w, uint32_t id)
{
	w->next[w->prev[id]] = w->next[id];
	w->prev[w->next[id]] = w->prev[id];
	w->prev[id] = w->next[id] = NONE;
	w->cnt--;
}

static void lru_touch(struct lru *w, uint32_t id) /* makes it the latest */
{
	if (w->next[id] != NONE)
		lru_drop(w, id);
	uint32_t head = w->next[id_cnt];
	w->next[id] = head;
	w->prev[id] = id_cnt;
	w->prev[head] = w->next[id_cnt] = id;
	w->cnt++;
}

static void workers_open(void)
{
	lru = must_have(calloc(worker_cnt, sizeof(*lru)));
	for (uint32_t w = 0; w < worker_cnt; w++) {
		lru[w].prev = must_have(malloc((id_cnt + 1) * sizeof(uint32_t)));
		lru[w].next = must_have(malloc((id_cnt + 1) * sizeof(uint32_t)));
		memset(lru[w].prev, 0xff, (id_cnt + 1) * sizeof(uint32_t));
		memset(lru[w].next, 0xff, (id_cnt + 1) * sizeof(uint32_t));
		lru[w].prev[id_cnt] = lru[w].next[id_cnt] = id_cnt;
	}
}

static uint32_t choose(uint32_t req)
{
	uint32_t best = 0;
	double least = 1e300;
	for (uint32_t w = 0; w < worker_cnt; w++) {
		uint32_t has = match.active[w >> 6] >> (w & 63) & 1 ? match.depth[w] : 0;
		double age = (double)(trace.req[req].at_ns - lru[w].at_ns) / 1e10; /* half life about 7 s */
		lru[w].load /= 1 + age;
		lru[w].at_ns = trace.req[req].at_ns;
		double cost = lru[w].load + blocks_of(req) - has;
		if (cost < least) {
			least = cost;
			best = w;
		}
	}
	lru[best].load = least;
	return best;
}

static void add_event(struct event e)
{
	if (event_cnt == event_max) {
		event_max = event_max ? event_max * 2 : 65536;
		event = must_have(realloc(event, event_max * sizeof(*event)));
	}
	event[event_cnt++] = e;
}

/* The worker takes a request: notes its events. Parents are always touched after their children, so that a
 * cache never has a hole. */
static void serve(uint32_t w, uint32_t req)
{
	const uint32_t *id = ids_of(req);
	uint32_t n = trace.req[req].id_cnt < cache_ids ? trace.req[req].id_cnt : cache_ids, has = 0;
	while (has < n && lru[w].next[id[has]] != NONE)
		has++;
	for (uint32_t g = n; g-- > 0;)
		lru_touch(&lru[w], id[g]);
	while (lru[w].cnt > cache_ids) {
		uint32_t old = lru[w].prev[id_cnt];
		lru_drop(&lru[w], old);
		add_event((struct event){.slot = w, .is_remove = 1, .id = old, .n = group_blk});
	}
	for (uint32_t at = has * group_blk, end = n * group_blk; at < end; at += EVENT_BLK)
		add_event((struct event){
			.slot = w, .req = req, .from = at, .n = end - at < EVENT_BLK ? end - at : EVENT_BLK});
}

/* -- the tree -- */

static void tree_open(void)
{
	kvp_radix_w_close(writer);
	if (kvp_radix_w_open(pub, priv, &geom, KVP_RADIX_RESET, NULL, &writer, NULL))
		exit(1);
	kvp_radix_w_set_ready(writer, 1);
}

/* Applies an event whose hashes are in l and e (store: of the whole prompt). */
static int apply(const struct event *ev, const uint64_t *l, const uint64_t *e)
{
	if (ev->is_remove)
		return kvp_radix_remove(writer, ev->slot, ev->n, e, NULL);
	return kvp_radix_store(writer, ev->slot, CHAIN_PART, ev->from ? KVP_RADIX_CHILD : KVP_RADIX_ROOT,
		ev->from ? e[ev->from - 1] : 0, ev->n, l + ev->from, e + ev->from, NULL);
}

static void last_first(uint32_t id, uint64_t *e)
{
	for (uint32_t i = 0; i < group_blk; i++)
		e[i] = ext_of(id, group_blk - 1 - i);
}

struct pass {
	double lookup_ns, event_ns, p50, p99, event_p99;
};

static uint64_t apply_timed(uint64_t i, uint32_t *expanded)
{
	static uint64_t gone[GROUP_TOK];
	const struct event *ev = &event[i];
	if (ev->is_remove) {
		last_first(ev->id, gone);
	} else if (*expanded != ev->req) {
		expand(ev->req, local, ext);
		*expanded = ev->req;
	}
	uint64_t t = bench_now_ns();
	if (apply(ev, local, ev->is_remove ? gone : ext)) {
		fprintf(stderr, "b_trace: event %" PRIu64 " was refused\n", i);
		exit(1);
	}
	return bench_now_ns() - t;
}

/* One replay in order. The first one decides which worker takes a request and so fixes the events. */
static struct pass serial(int is_first, uint64_t *ns, uint64_t **event_ns, uint64_t clock_ns)
{
	static uint64_t *last; /* events before the end of each request */
	struct pass p = {0};
	uint64_t done = 0;
	tree_open();
	last = last ? last : must_have(calloc(trace.req_cnt, sizeof(*last)));
	matched_blk = 0;
	for (uint32_t r = 0; r < trace.req_cnt; r++) {
		uint32_t expanded = r, n = blocks_of(r);
		expand(r, local, ext);
		struct kvp_radix_query q = {CHAIN_PART, local, n, n, NULL, NULL};
		uint64_t t = bench_now_ns();
		kvp_radix_find(&radix, &q, &match);
		ns[r] = bench_now_ns() - t - clock_ns;
		p.lookup_ns += (double)ns[r];
		matched_blk += match.longest;
		if (is_first) {
			serve(choose(r), r);
			last[r] = event_cnt;
			*event_ns = must_have(realloc(*event_ns, (event_cnt + 1) * sizeof(**event_ns)));
		}
		for (; done < last[r]; done++) {
			(*event_ns)[done] = apply_timed(done, &expanded) - clock_ns;
			p.event_ns += (double)(*event_ns)[done];
		}
	}
	qsort(ns, trace.req_cnt, sizeof(*ns), bench_cmp_u64);
	qsort(*event_ns, event_cnt, sizeof(**event_ns), bench_cmp_u64);
	p.p50 = (double)ns[trace.req_cnt / 2];
	p.p99 = (double)ns[trace.req_cnt * 99 / 100];
	p.event_p99 = (double)(*event_ns)[event_cnt * 99 / 100];
	return p;
}

static void serial_all(void)
{
	uint64_t *ns = must_have(calloc(trace.req_cnt, 8)), *event_ns = NULL, clock_ns = bench_clock_ns();
	double lookups[REPEATS], blk[REPEATS], ops[REPEATS], p50[REPEATS], p99[REPEATS], ep99[REPEATS];
	for (int i = 0; i < REPEATS; i++) {
		struct pass p = serial(i == 0, ns, &event_ns, clock_ns);
		if (i == 0) {
			for (uint64_t e = 0; e < event_cnt; e++)
				event_blk += event[e].n;
			for (uint32_t r = 0; r < trace.req_cnt; r++)
				request_blk += blocks_of(r);
		}
		lookups[i] = (double)trace.req_cnt * 1e9 / p.lookup_ns;
		blk[i] = (double)event_blk * 1e9 / p.event_ns;
		ops[i] = (double)(request_blk + event_blk) * 1e9 / (p.lookup_ns + p.event_ns);
		p50[i] = p.p50;
		p99[i] = p.p99;
		ep99[i] = p.event_p99;
	}
	struct kvp_radix_stats st;
	kvp_radix_stats(&radix, &st);
	printf("bench=trace.serial requests=%zu request_blk=%" PRIu64 " matched_blk=%" PRIu64
	       " events=%" PRIu64 " event_blk=%" PRIu64 " tree_blk=%" PRIu64 " tree_runs=%" PRIu64
	       " lookups_s=%.0f lookup_p50_ns=%.0f lookup_p99_ns=%.0f event_blk_s=%.0f event_p99_ns=%.0f "
	       "block_ops_s=%.0f\n",
		trace.req_cnt, request_blk, matched_blk, event_cnt, event_blk, st.blocks, st.runs,
		bench_median(lookups, REPEATS), bench_median(p50, REPEATS), bench_median(p99, REPEATS),
		bench_median(blk, REPEATS), bench_median(ep99, REPEATS), bench_median(ops, REPEATS));
	fflush(stdout);
	free(ns);
	free(event_ns);
}

/* -- reader and writer at once: hashes made ahead -- */

static uint64_t *all_local, *all_ext, *gone; /* prompts one after the other; removed ids likewise */
static uint64_t *blk_off;		     /* of each request */
static uint64_t write_cpu_ns, is_over;

static void *apply_all(void *arg)
{
	uint64_t at = 0, cpu;
	(void)arg;
	bench_pin(&cpus, 1);
	cpu = bench_cpu_ns();
	for (uint64_t i = 0; i < event_cnt; i++) {
		const struct event *ev = &event[i];
		uint64_t off = ev->is_remove ? 0 : blk_off[ev->req];
		if (apply(ev, all_local + off, ev->is_remove ? gone + at : all_ext + off))
			exit(1);
		at += ev->is_remove ? ev->n : 0;
	}
	write_cpu_ns = bench_cpu_ns() - cpu;
	kvp_st_rel_u64(&is_over, 1);
	return NULL;
}

static void make_ahead(void)
{
	uint64_t removed = 0, at = 0;
	for (uint64_t i = 0; i < event_cnt; i++)
		removed += event[i].is_remove;
	all_local = must_have(malloc(request_blk * 8));
	all_ext = must_have(malloc(request_blk * 8));
	blk_off = must_have(malloc(trace.req_cnt * 8));
	gone = must_have(malloc((removed + 1) * group_blk * 8));
	for (uint32_t r = 0; r < trace.req_cnt; at += blocks_of(r++)) {
		blk_off[r] = at;
		expand(r, all_local + at, all_ext + at);
	}
	for (uint64_t i = 0, k = 0; i < event_cnt; i++)
		if (event[i].is_remove)
			last_first(event[i].id, gone + group_blk * k++);
}

static void beside(void)
{
	double lookups[REPEATS], blk[REPEATS], ops[REPEATS];
	uint64_t retries = 0;
	make_ahead();
	bench_pin(&cpus, 0);
	for (int rep = 0; rep < REPEATS; rep++) {
		pthread_t th;
		uint64_t done = 0, done_blk = 0;
		tree_open();
		is_over = 0;
		uint64_t cpu = bench_cpu_ns();
		if (pthread_create(&th, NULL, apply_all, NULL))
			exit(1);
		for (uint32_t r = 0; !kvp_ld_acq_u64(&is_over);
			r = r + 1 < trace.req_cnt ? r + 1 : 0, done++) {
			uint32_t n = blocks_of(r);
			struct kvp_radix_query q = {CHAIN_PART, all_local + blk_off[r], n, n, NULL, NULL};
			kvp_radix_find(&radix, &q, &match);
			retries += match.retries;
			done_blk += n;
		}
		cpu = bench_cpu_ns() - cpu;
		pthread_join(th, NULL);
		lookups[rep] = (double)done * 1e9 / (double)cpu;
		blk[rep] = (double)event_blk * 1e9 / (double)write_cpu_ns;
		ops[rep] = (double)done_blk * 1e9 / (double)cpu + blk[rep];
	}
	printf("bench=trace.beside lookups_cpu_s=%.0f event_blk_cpu_s=%.0f block_ops_cpu_s=%.0f "
	       "retries=%" PRIu64 "\n",
		bench_median(lookups, REPEATS), bench_median(blk, REPEATS), bench_median(ops, REPEATS),
		retries);
}

static uint64_t number(const char *s, uint64_t max)
{
	char *end;
	unsigned long long v = strtoull(s, &end, 10);
	if (*end || !v || v > max) {
		fprintf(stderr, "b_trace: not a number from 1 to %" PRIu64 ": %s\n", max, s);
		exit(2);
	}
	return v;
}

static void open_all(const char *path, uint64_t cache_tok)
{
	size_t line = 0;
	int fd, rc = kvp_trace_read(&trace, path, 0, &line);
	if (rc || !trace.req_cnt) {
		fprintf(stderr, "b_trace: %s line %zu: %s\n", path, line, kvp_strerror(rc));
		exit(1);
	}
	number_ids();
	cache_ids = (uint32_t)(cache_tok / GROUP_TOK) + !(cache_tok / GROUP_TOK);
	for (uint32_t r = 0; r < trace.req_cnt; r++)
		local_max = blocks_of(r) > local_max ? blocks_of(r) : local_max;
	local = must_have(malloc(local_max * 8));
	ext = must_have(malloc(local_max * 8));
	geom = (struct kvp_geom){.index_rank_max = worker_cnt <= 64    ? 64
						   : worker_cnt <= 256 ? 256
								       : 1024,
		.block_max = (uint64_t)id_cnt * group_blk * 2 + 1000000,
		.region_gen = 1,
		.salt = {5, 6}};
	pub = bench_sparse(kvp_radix_footprint(&geom), &fd);
	priv = bench_sparse(kvp_radix_priv_footprint(&geom), &fd);
	if (kvp_radix_new(pub, &geom) || kvp_radix_priv_new(priv, &geom) ||
		kvp_radix_join(pub, &geom, &radix))
		exit(1);
	workers_open();
}

int main(int argc, char **argv)
{
	const char *path = TRACE_DEFAULT;
	uint64_t cache_tok = 1048576, block_tok = 16;
	for (int i = 1; i + 1 < argc; i += 2) {
		if (strcmp(argv[i], "--trace") == 0)
			path = argv[i + 1];
		else if (strcmp(argv[i], "--workers") == 0)
			worker_cnt = (uint32_t)number(argv[i + 1], 1024);
		else if (strcmp(argv[i], "--cache") == 0)
			cache_tok = number(argv[i + 1], 1u << 30);
		else if (strcmp(argv[i], "--block") == 0)
			block_tok = number(argv[i + 1], GROUP_TOK);
		else
			return 2;
	}
	if (argc % 2 == 0 || GROUP_TOK % block_tok)
		return 2;
	group_blk = (uint32_t)(GROUP_TOK / block_tok);
	sched_getaffinity(0, sizeof(cpus), &cpus);
	bench_pin(&cpus, 0);
	bench_args(argc, argv);
	open_all(path, cache_tok);
	printf("# trace=%s requests=%zu ids=%u workers=%u cache_tok=%" PRIu64 " block_tok=%" PRIu64 "\n",
		path, trace.req_cnt, id_cnt, worker_cnt, cache_tok, block_tok);
	serial_all();
	beside();
	return 0;
}
