/* tests/torture/x_catalogue.c — readers never see a half-made view or record while writers are killed
 * (ThreadSanitizer: threads, and a writer that leaves and comes back). */
#include "shm/catalogue.h"
#include "tests/procs.h"
#include "tests/tap.h"

#include <pthread.h>

enum { RANKS = 64, WORKERS = 40, READERS = 2 };
static const struct kvp_geom geom = {.slot_max = 16,
	.rank_max = RANKS,
	.index_rank_max = 64,
	.resv_max = 64,
	.block_max = 10000,
	.active_block_max = 1024,
	.queued_max = 16,
	.part_max = 2,
	.region_gen = 3,
	.salt = {1, 2}};

struct tally { /* shared with the children */
	uint64_t seed, views, records, found, again, torn, written, stop, writer_stop;
};

/* A view with mark k: k % 60 ranks, every field derived from k. */
static void write_view(struct kvp_cat_writer *w, uint32_t part, uint64_t k)
{
	struct kvp_rank_view rank[RANKS] = {0};
	uint64_t taint[RANKS];
	uint32_t cnt = (uint32_t)(k % 60);
	for (uint32_t i = 0; i < cnt; i++) {
		rank[i] = (struct kvp_rank_view){.worker_id = k + i,
			.dp_rank = i,
			.total_kv_blocks = k,
			.max_num_batched_tokens = ~k,
			.taint_off = i,
			.taint_cnt = 1};
		taint[i] = k * 3;
	}
	kvp_cat_w_view(w, part, rank, cnt, taint, cnt, (uint32_t)k);
}

static void write_record(struct kvp_cat_writer *w, uint64_t id, uint64_t k)
{
	static char json[4096];
	uint32_t idx, len = 64 + (uint32_t)(k % 4000);
	if (kvp_cat_w_worker_slot(w, id, &idx))
		return;
	struct kvp_cat_worker_info info = {.worker_id = id,
		.start_rank = (uint32_t)k,
		.size = (uint32_t)~k,
		.endpoint_len = (uint32_t)(k % 100)};
	memset(info.endpoint, (int)(k & 0x7f), info.endpoint_len);
	memset(json, (int)(k & 0x7f), len);
	kvp_cat_w_worker_put(w, idx, &info, json, len);
}

static void writer(const struct kvp_cat *cat, struct tally *t)
{
	struct kvp_cat_writer w;
	uint64_t s = t->seed ^ (t->written * 77 + 1);
	uint32_t part[2], idx;
	kvp_cat_w_open(cat, &w);
	kvp_cat_w_part(&w, KVP_PART_AGGREGATED, "a", 1, "g", 1, 16, 0, &part[0]);
	kvp_cat_w_part(&w, KVP_PART_AGGREGATED, "b", 1, "g", 1, 16, 0, &part[1]);
	while (!kvp_ld_rlx_u64(&t->writer_stop)) {
		uint64_t r = xorshift(&s);
		kvp_faa_rlx_u64(&t->written, 1);
		if (r % 8 < 3)
			write_view(&w, part[(r >> 8) & 1], r >> 16);
		else if (r % 8 < 6)
			write_record(&w, 1 + (r >> 8) % WORKERS, r >> 16);
		else if (r % 8 == 6 && (r >> 8) % 4 == 0 &&
				kvp_cat_worker_find(cat, 2 + (r >> 16) % (WORKERS - 1), &idx) == 0)
			kvp_cat_w_worker_drop(&w, idx);
	}
	kvp_cat_w_close(&w);
}

static int read_view(const struct kvp_cat *cat, uint32_t part, struct tally *t)
{
	struct kvp_cat_view v;
	if (kvp_cat_view_begin(cat, part, &v))
		return 0;
	uint64_t k = 0, bad = 0;
	for (uint32_t i = 0; i < v.cnt; i++) {
		const struct kvp_rank_view *r = &v.rank[i];
		const uint64_t *taint;
		uint64_t total = kvp_ld_rlx_u64(&r->total_kv_blocks);
		k = i ? k : total;
		bad += total != k || kvp_ld_rlx_u64(&r->max_num_batched_tokens) != ~k ||
		       kvp_ld_rlx_u64(&r->worker_id) != k + i;
		bad += kvp_cat_view_taints(&v, i, &taint) != 1 || kvp_ld_rlx_u64(taint) != k * 3;
	}
	bad += v.cnt && (v.cnt != k % 60 || v.worker_cnt != (uint32_t)k);
	if (kvp_cat_view_valid(cat, &v)) {
		kvp_faa_rlx_u64(&t->again, 1);
		return 0;
	}
	kvp_faa_rlx_u64(&t->views, 1);
	return bad != 0;
}

static int read_record(const struct kvp_cat *cat, uint64_t id, struct tally *t)
{
	static _Thread_local char json[KVP_CAT_RECORD_MAX];
	struct kvp_cat_worker_info info;
	uint32_t idx, len = 0;
	if (kvp_cat_worker_find(cat, id, &idx) ||
		kvp_cat_worker_read(cat, idx, &info, json, sizeof(json), &len))
		return 0;
	kvp_faa_rlx_u64(&t->records, 1);
	int bad = info.start_rank != (uint32_t)~info.size;
	for (uint32_t i = 1; i < len; i++)
		bad |= json[i] != json[0];
	for (uint32_t i = 0; i < info.endpoint_len; i++)
		bad |= info.endpoint[i] != json[0];
	return bad;
}

static void reader(const struct kvp_cat *cat, struct tally *t, uint64_t s)
{
	uint32_t idx;
	int seen_one = 0;
	while (!kvp_ld_rlx_u64(&t->stop)) {
		uint64_t r = xorshift(&s);
		int bad = read_view(cat, r & 1, t) + read_record(cat, 1 + (r >> 8) % WORKERS, t);
		/* Worker 1 is never dropped: once seen, it is always found. */
		int found = kvp_cat_worker_find(cat, 1, &idx) == KVP_OK;
		bad += seen_one && !found;
		seen_one |= found;
		if (bad)
			kvp_faa_rlx_u64(&t->torn, 1);
	}
}

static struct kvp_cat shared_cat;
static struct tally *tally;

/* Workers that have a record and are not found; then the writer's own take-over has failed them. */
static uint64_t lost_workers(void)
{
	struct kvp_cat_writer w;
	uint64_t lost = 0;
	uint32_t idx;
	kvp_cat_w_open(&shared_cat, &w);
	/* Views of this test name no real slots, so only chains and slots are checked here. */
	for (uint32_t i = 0; i < kvp_cat_worker_max(&shared_cat); i++) {
		struct kvp_cat_worker_info info;
		if (kvp_cat_worker_info(&shared_cat, i, &info) == KVP_OK)
			lost += kvp_cat_worker_find(&shared_cat, info.worker_id, &idx) || idx != i;
	}
	kvp_cat_w_close(&w);
	return lost;
}

static void let_write(uint64_t *s)
{
	uint64_t goal = kvp_ld_rlx_u64(&tally->written) + 50 + xorshift(s) % 2000;
	for (uint64_t stop = now_ms() + 1000; kvp_ld_rlx_u64(&tally->written) < goal && now_ms() < stop;)
		usleep(100);
}

static uint64_t processes(uint64_t end, uint64_t *kills)
{
	pid_t pid[READERS];
	uint64_t lost = 0, s = tally->seed;
	for (uint64_t i = 0; i < READERS; i++)
		if ((pid[i] = fork()) == 0) {
			reader(&shared_cat, tally, tally->seed + 99 * (i + 1));
			_exit(0);
		}
	for (; now_ms() < end; ++*kills) {
		pid_t wr = fork();
		if (wr == 0) {
			writer(&shared_cat, tally);
			_exit(0);
		}
		let_write(&s);
		kill(wr, SIGKILL);
		waitpid(wr, NULL, 0);
		lost += lost_workers();
	}
	kvp_st_rel_u64(&tally->stop, 1);
	for (int i = 0; i < READERS; i++)
		waitpid(pid[i], NULL, 0);
	return lost;
}

static void *reader_main(void *arg)
{
	reader(&shared_cat, tally, (uint64_t)(uintptr_t)arg);
	return NULL;
}

static void *writer_main(void *arg)
{
	(void)arg;
	writer(&shared_cat, tally);
	return NULL;
}

static uint64_t threads(uint64_t end, uint64_t *leaves)
{
	pthread_t tid[READERS], wr;
	uint64_t lost = 0, s = tally->seed;
	for (uint64_t i = 0; i < READERS; i++)
		pthread_create(&tid[i], NULL, reader_main, (void *)(uintptr_t)(tally->seed + 99 * (i + 1)));
	for (; now_ms() < end; ++*leaves) {
		kvp_st_rel_u64(&tally->writer_stop, 0);
		pthread_create(&wr, NULL, writer_main, NULL);
		let_write(&s);
		kvp_st_rel_u64(&tally->writer_stop, 1);
		pthread_join(wr, NULL);
		lost += lost_workers();
	}
	kvp_st_rel_u64(&tally->stop, 1);
	for (int i = 0; i < READERS; i++)
		pthread_join(tid[i], NULL);
	return lost;
}

int main(void)
{
	const char *env = getenv("KVP_TORTURE_S");
	uint64_t run_ms = env ? strtoull(env, NULL, 10) * 1000 : 2000;
	uint64_t end = now_ms() + run_ms, kills = 0;
	void *mem = shared(kvp_catalogue_footprint(&geom));
	tally = shared(sizeof(*tally));
	if (kvp_catalogue_new(mem, &geom) || kvp_catalogue_join(mem, &geom, &shared_cat))
		return 1;
	tally->seed = tap_seed(0);
	fflush(stdout);
#ifdef KVP_ATOMIC_C11
	uint64_t lost = threads(end, &kills);
	(void)processes;
#else
	uint64_t lost = processes(end, &kills);
	(void)threads;
#endif
	printf("# %" PRIu64 " kills, %" PRIu64 " writes, %" PRIu64 " views, %" PRIu64 " records, %" PRIu64
	       " retries\n",
		kills, tally->written, tally->views, tally->records, tally->again);
	is_u64(tally->torn, 0, "no reader saw a half-made view or record");
	is_u64(lost, 0, "every worker with a record is found after each kill");
	ok(tally->views > 0 && tally->records > 0 && kills > 0, "readers and writers both got somewhere");
	return done();
}
