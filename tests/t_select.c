/* The selection flow over a whole region in one process: cache, load, ties, constraints, life of a
 * booking. */
#include "daemons/common/select_priv.h"
#include "shm/sweep.h"
#include "tests/tap.h"

#include <math.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
#include <sys/wait.h>

static uint32_t tok[256];

static struct kvp_select_request request(uint32_t token_cnt)
{
	struct kvp_select_request q;
	memset(&q, 0, sizeof(q));
	q.model = q.group = (struct kvp_str){"default", 7};
	q.prompt.form = KVP_PROMPT_TOKENS;
	q.prompt.token = tok;
	q.prompt.token_cnt = token_cnt;
	q.prompt.eagle = KVP_UNSET;
	q.override = (struct kvp_override){NAN, NAN, NAN, NAN, KVP_UNSET, KVP_UNSET};
	return q;
}

static struct kvp_str str(const char *s)
{
	return (struct kvp_str){s, strlen(s)};
}

static int add_worker(struct kvp_selection *s, uint64_t id, uint32_t ranks, uint64_t total_kv_blocks)
{
	char endpoint[32];
	struct kvp_local_worker w = {.worker_id = id,
		.model = str("default"),
		.group = str("default"),
		.block_size = 4,
		.size = ranks,
		.total_kv_blocks = total_kv_blocks};
	snprintf(endpoint, sizeof(endpoint), "http://w%u:8000", (unsigned)id);
	w.endpoint = str(endpoint);
	return kvp_selection_local_worker(s, &w);
}

/* store: a rank holds the first n blocks of the prompt tok[]. */
static int store(struct kvp_selection *s, uint64_t worker_id, uint32_t dp_rank, uint32_t n)
{
	uint64_t local[64], ext[64];
	struct kvp_hasher h;
	kvp_hasher_init(&h, tok, n * 4, 4, KVP_HASH_WINDOW_PLAIN, kvp_hash_seed(NULL, 0, NULL, 0));
	kvp_hasher_local(&h, 0, n, local);
	kvp_hash_chain(NULL, local, n, ext);
	return kvp_selection_local_stored(s, worker_id, dp_rank, NULL, n, local, ext);
}

static void test_empty(struct kvp_selection *s)
{
	struct kvp_select_request q = request(0);
	struct kvp_select_answer a;
	is_u64(kvp_selection_select(s, &q, &a), 503, "no worker is 503, before the prompt is judged");
	is_str(kvp_selection_error(s), "no schedulable workers are available", "and says so");
}

static void test_cache_wins(struct kvp_selection *s)
{
	struct kvp_select_request q = request(40);
	struct kvp_select_answer a;
	is_u64(store(s, 2, 0, 8), 200, "worker 2 rank 0 stores 8 blocks");
	is_u64(kvp_selection_select(s, &q, &a), 200, "select");
	is_u64(a.worker_id, 2, "the rank that holds the prefix is chosen");
	is_u64(a.effective_prefill_tok, 8, "10 blocks of 4, 8 cached: 8 tokens left");
	is_u64(a.overlap.gpu_tok, 32, "matched tokens");
	ok(a.overlap.dp_cnt == 2 && a.overlap.dp_tok[0] == 32 && a.overlap.dp_tok[1] == 0,
		"every rank of the worker is listed");
	is_u64(a.potential_decode_blk, 10, "10 blocks would become active");
	ok(a.decode_busy == KVP_UNSET, "no busy flag without a threshold");
	is_str(a.endpoint, "http://w2:8000", "endpoint of the worker");
	q.override.overlap_score_credit = 0;
	is_u64(kvp_selection_select(s, &q, &a), 200, "with a credit of 0 for this request");
	ok(a.worker_id != 2 || a.effective_prefill_tok == 8, "the cache does not attract");
}

static void test_lifecycle(struct kvp_selection *s)
{
	struct kvp_select_request q = request(40);
	struct kvp_select_answer a;
	struct kvp_load_row row[8];
	uint32_t n;
	double half = 0.5, bad = 1.5;
	q.selection_id = str("a");
	is_u64(kvp_selection_select_and_reserve(s, &q, &a), 200, "booked");
	is_u64(a.seq_cnt, 10, "tracking hashes of all complete blocks");
	is_u64(kvp_selection_loads(s, KVP_PART_AGGREGATED, q.model, q.group, row, 8, &n), 200, "loads");
	ok(n == 4 && row[1].prefill_tok == 8 && row[1].decode_blk == 10 && row[1].active_requests == 1,
		"its tokens, blocks and one request are on the chosen rank");
	is_u64(kvp_selection_select_and_reserve(s, &q, &a), 409, "the id is taken");
	ok(strstr(kvp_selection_error(s), "already reserved or being reserved") != NULL, "conflict text");
	static const char nul[] = "reservation x\0% not found";
	is_u64(kvp_selection_free(s, (struct kvp_str){"x\0%", 3}), 404, "an id with a NUL is not known");
	ok(kvp_selection_error_len(s) == sizeof(nul) - 1 && !memcmp(kvp_selection_error(s), nul, sizeof(nul)),
		"and its text is whole");
	is_u64(kvp_selection_prefill_complete(s, str("a")), 200, "prefill complete");
	is_u64(kvp_selection_prefill_complete(s, str("a")), 200, "again: no change");
	is_u64(kvp_selection_output_block(s, str("zz"), &bad), 400, "a bad fraction comes before the id");
	is_u64(kvp_selection_output_block(s, str("a"), &half), 200, "an output block with a fraction");
	kvp_selection_loads(s, KVP_PART_AGGREGATED, q.model, q.group, row, 8, &n);
	ok(row[1].prefill_tok == 0 && row[1].decode_blk == 6, "11 exclusive blocks at one half round to 6");
	is_u64(kvp_selection_free(s, str("a")), 200, "free");
	is_u64(kvp_selection_free(s, str("a")), 404, "exactly once");
	kvp_selection_loads(s, KVP_PART_AGGREGATED, q.model, q.group, row, 8, &n);
	ok(row[1].decode_blk == 0 && row[1].active_requests == 0, "no load is left");
}

static void test_generated_id(struct kvp_selection *s)
{
	struct kvp_select_request q = request(8);
	struct kvp_select_answer a;
	char id[64];
	is_u64(kvp_selection_select_and_reserve(s, &q, &a), 200, "booked without an id");
	ok(a.selection_id.len == 36 && a.selection_id.ptr[14] == '4', "a version 4 UUID is made");
	memcpy(id, a.selection_id.ptr, 36);
	is_u64(kvp_selection_free(s, (struct kvp_str){id, 36}), 200, "and frees the booking");
}

static void test_constraints(struct kvp_selection *s)
{
	struct kvp_select_request q = request(40);
	struct kvp_select_answer a;
	uint64_t one = 1, nobody = 9;
	q.allowed_worker_id = &one;
	q.allowed_cnt = 1;
	ok(kvp_selection_select(s, &q, &a) == 200 && a.worker_id == 1, "allow list beats the cache");
	q.has_pinned = KVP_YES;
	q.pinned_worker_id = 2;
	q.pinned_dp_rank = 1;
	is_u64(kvp_selection_select(s, &q, &a), 400, "a pin outside the allow list is an argument error");
	q.allowed_worker_id = NULL;
	ok(kvp_selection_select(s, &q, &a) == 200 && a.worker_id == 2 && a.dp_rank == 1, "a pin is obeyed");
	q.pinned_dp_rank = 7;
	is_u64(kvp_selection_select(s, &q, &a), 503, "an unknown rank has no candidate");
	q.has_pinned = KVP_NO;
	q.allowed_worker_id = &nobody;
	is_u64(kvp_selection_select(s, &q, &a), 503, "nobody allowed");
	struct kvp_str taint = str("zone-a");
	q.allowed_worker_id = NULL;
	q.required_taint = &taint;
	q.required_cnt = 1;
	is_u64(kvp_selection_select(s, &q, &a), 503, "a taint that nobody carries");
	q.required_cnt = 0;
	q.selection_id = str("leak");
	q.prompt.token_cnt = 0;
	is_u64(kvp_selection_select_and_reserve(s, &q, &a), 400, "an empty prompt is refused");
	q.prompt.token_cnt = 4;
	is_u64(kvp_selection_select_and_reserve(s, &q, &a), 200, "and its id was given back");
	is_u64(kvp_selection_free(s, q.selection_id), 200, "free");
}

static void test_ties(struct kvp_selection *s)
{
	uint32_t seen[4] = {0};
	struct kvp_select_request q = request(4);
	struct kvp_select_answer a;
	tok[0] = 77777; /* nobody holds it */
	for (int i = 0; i < 4000; i++)
		if (kvp_selection_select(s, &q, &a) == 200)
			seen[a.worker_id == 1 ? 0 : a.worker_id == 3 ? 3 : 1 + a.dp_rank]++;
	for (int i = 0; i < 4; i++)
		ok(seen[i] > 850 && seen[i] < 1150, "equal ranks share 4000 picks evenly: %u", seen[i]);
	tok[0] = 0;
}

static void test_reserve(struct kvp_selection *s)
{
	struct kvp_reserve_request r;
	struct kvp_select_answer a;
	uint64_t seq[3] = {1, 2, 3};
	memset(&r, 0, sizeof(r));
	r.model = r.group = str("default");
	r.selection_id = str("e");
	r.worker_id = 2;
	r.dp_rank = 1;
	r.track_prefill_tokens = KVP_UNSET;
	r.override = (struct kvp_override){NAN, NAN, NAN, NAN, KVP_UNSET, KVP_UNSET};
	r.prompt.form = KVP_PROMPT_HASHES;
	r.prompt.eagle = KVP_UNSET;
	r.prompt.seq_hash = seq;
	r.prompt.seq_hash_cnt = 3;
	is_u64(kvp_selection_reserve(s, &r, &a), 400, "isl_tokens is required");
	r.prompt.has_isl = KVP_YES;
	r.prompt.isl_tok = 12;
	r.has_effective_prefill = KVP_YES;
	r.effective_prefill_tok = 13;
	is_u64(kvp_selection_reserve(s, &r, &a), 400, "effective prefill over the prompt");
	r.effective_prefill_tok = 12;
	r.worker_id = 99;
	is_u64(kvp_selection_reserve(s, &r, &a), 404, "unknown worker");
	r.worker_id = 2;
	r.dp_rank = 5;
	is_u64(kvp_selection_reserve(s, &r, &a), 404, "unknown rank");
	r.dp_rank = 1;
	is_u64(kvp_selection_reserve(s, &r, &a), 201, "booked");
	is_u64(kvp_selection_reserve(s, &r, &a), 409, "twice is a conflict");
	is_u64(kvp_selection_free(s, r.selection_id), 200, "free");
}

/* Who would be next: in the order of cost, each worker once, constraints kept, nothing booked. */
static void test_runners_up(struct kvp_selection *s)
{
	struct kvp_select_request q = request(40);
	struct kvp_runner_up r[4];
	uint64_t only[] = {3};
	uint32_t rank = 1;
	is_u64(kvp_selection_runners_up(s, &q, 99, NULL, r, 4), 3, "every worker comes once");
	ok(r[0].worker_id == 2 && r[0].dp_rank == 0 && r[1].worker_id + r[2].worker_id == 4,
		"first the one with the cache, with the rank that has it");
	is_u64(kvp_selection_runners_up(s, &q, 2, NULL, r, 4), 2, "without the chosen one");
	ok(r[0].worker_id != 2 && r[1].worker_id != 2, "it is not among them");
	is_u64(kvp_selection_runners_up(s, &q, 1, NULL, r, 1), 1, "no more than asked for");
	is_u64(r[0].worker_id, 2, "the best of them");
	is_u64(kvp_selection_runners_up(s, &q, 1, &rank, r, 4), 1, "only ranks of one number");
	ok(r[0].worker_id == 2 && r[0].dp_rank == 1, "are named");
	q.allowed_worker_id = only;
	q.allowed_cnt = 1;
	ok(kvp_selection_runners_up(s, &q, 2, NULL, r, 4) == 1 && r[0].worker_id == 3, "allowed ones only");
	is_u64(kvp_selection_runners_up(s, &q, 3, NULL, r, 4), 0, "and nobody when that is the chosen one");
	q = request(40);
	q.model = str("unknown");
	is_u64(kvp_selection_runners_up(s, &q, 2, NULL, r, 4), 0, "of an unknown model there is none");
	is_u64(kvp_resv_cnt(&s->region->book), 0, "nothing is booked");
}

/* A chosen rank is booked later by its id alone, with what was decided then. */
static void test_replay(struct kvp_selection *s)
{
	struct kvp_select_request q = request(40);
	struct kvp_select_answer a, b;
	struct kvp_load_row row[8];
	struct kvp_str m = str("default"), id = str("later");
	uint32_t cnt;
	q.selection_id = id;
	q.has_pinned = KVP_YES;
	q.pinned_worker_id = 2;
	q.pinned_dp_rank = 1;
	ok(kvp_selection_replay(s, KVP_PART_AGGREGATED, m, m, id, &b) == 404,
		"nothing kept: 404");
	ok(kvp_selection_select(s, &q, &a) == 200 && a.worker_id == 2 && a.dp_rank == 1, "chosen");
	uint64_t effective = a.effective_prefill_tok;
	ok(kvp_selection_replay(s, KVP_PART_AGGREGATED, str("other"), m, id, &b) == 404,
		"another model: 404");
	ok(kvp_selection_replay(s, KVP_PART_AGGREGATED, m, m, id, &b) == 201 && b.worker_id == 2 &&
			b.dp_rank == 1 && strcmp(b.endpoint, "http://w2:8000") == 0,
		"booked by its id");
	kvp_selection_loads(s, KVP_PART_AGGREGATED, m, m, row, 8, &cnt);
	ok(row[2].worker_id == 2 && row[2].dp_rank == 1 && row[2].prefill_tok == effective &&
			row[2].decode_blk == 10 && row[2].active_requests == 1,
		"with the load of its prompt");
	ok(kvp_selection_replay(s, KVP_PART_AGGREGATED, m, m, id, &b) == 404, "once only");
	ok(kvp_selection_select(s, &q, &a) == 200 &&
			kvp_selection_replay(s, KVP_PART_AGGREGATED, m, m, id, &b) == 409 &&
			kvp_selection_free(s, id) == 200 &&
			kvp_selection_replay(s, KVP_PART_AGGREGATED, m, m, id, &b) == 201 &&
			kvp_selection_free(s, id) == 200,
		"409 while the id is booked, and may then be repeated");
}

/* Two processes book at once; every pick is validated against the load it saw, so they spread evenly. */
static void test_spread(struct kvp_selection *s0)
{
	const int each = 200;
	pid_t pid[2];
	if (TAP_IS_TSAN) {
		ok(1, "# SKIP spread: " TAP_PROCESSES);
		return;
	}
	for (int p = 0; p < 2; p++) {
		pid[p] = fork();
		if (pid[p])
			continue;
		struct kvp_region r;
		struct kvp_select_settings set;
		struct kvp_select_answer a;
		static struct kvp_ctr_column_shm own;
		int bad = kvp_region_join(s0->region->fd, KVP_REGION_BOOKER, &r) != KVP_OK;
		kvp_select_defaults(&set);
		struct kvp_selection *s = bad ? NULL : kvp_select_open(&r, KVP_OWNER(3 + p, 1), &own, &set);
		for (int i = 0; s && i < each; i++) {
			char id[32];
			struct kvp_select_request q = request(64);
			tok[0] = (uint32_t)(1000000 + p * each + i);
			snprintf(id, sizeof(id), "s%d-%d", p, i);
			q.selection_id = str(id);
			bad |= kvp_selection_select_and_reserve(s, &q, &a) != 200;
		}
		_exit(bad || !s);
	}
	int st, good = 1;
	for (int p = 0; p < 2; p++) {
		waitpid(pid[p], &st, 0);
		good &= WIFEXITED(st) && WEXITSTATUS(st) == 0;
	}
	ok(good, "two processes booked %d each", each);
	struct kvp_load l;
	for (uint32_t i = 0; i < 4; i++) {
		kvp_load_read(&s0->region->book, i, &l);
		ok(l.requests >= 95 && l.requests <= 105, "rank %u of 4 got %u of 400", i, l.requests);
	}
	is_u64(kvp_book_check(&s0->region->book), 0, "booking is consistent");
}

static void test_local(struct kvp_selection *s)
{
	struct kvp_select_request q = request(40);
	struct kvp_select_answer a;
	struct kvp_local_worker w = {.worker_id = 9,
		.model = str("default"),
		.group = str("default"),
		.endpoint = str("http://w9:8000"),
		.block_size = 16,
		.size = 1};
	is_u64(kvp_selection_local_worker(s, &w), 409,
		"another block size than the partition's is a conflict");
	w.endpoint.len = 0;
	is_u64(kvp_selection_local_worker(s, &w), 400, "an endpoint is required");
	is_u64(kvp_selection_local_stored(s, 77, 0, NULL, 0, NULL, NULL), 404, "events of unknown ranks");
	is_u64(kvp_selection_local_cleared(s, 2, 0), 200, "the holder's cache is cleared");
	is_u64(kvp_selection_select(s, &q, &a), 200, "select");
	is_u64(a.effective_prefill_tok, 40, "nothing is cached any more");
	is_u64(store(s, 3, 0, 4), 200, "another one stores");
	is_u64(add_worker(s, 3, 1, 0), 201, "and is registered anew");
	is_u64(kvp_selection_select(s, &q, &a), 200, "select");
	is_u64(a.effective_prefill_tok, 40, "which drops its blocks");
	is_u64(kvp_selection_local_worker_gone(s, 3), 200, "gone");
	is_u64(kvp_selection_local_worker_gone(s, 3), 404, "once");
	is_u64(kvp_selection_schedulable(s), 2, "two workers are left");
}

/* A worker that changes keeps what is booked on the ranks that stay, and their blocks. */
static void test_update(struct kvp_selection *s)
{
	struct kvp_str taint[] = {str("b"), str("a")};
	struct kvp_local_worker w = {.worker_id = 8,
		.model = str("default"),
		.group = str("default"),
		.endpoint = str("http://w8:8000"),
		.block_size = 4,
		.size = 2};
	struct kvp_select_request q = request(32);
	struct kvp_select_answer a;
	struct kvp_reserve_request r;
	kvp_selection_local_worker(s, &w);
	store(s, 8, 0, 3);
	store(s, 8, 1, 5);
	kvp_reserve_request_init(&r);
	r.model = r.group = str("default");
	r.worker_id = 8;
	r.prompt = q.prompt;
	for (r.dp_rank = 0; r.dp_rank < 2; r.dp_rank++) {
		r.selection_id = str(r.dp_rank ? "u1" : "u0");
		is_u64((uint64_t)kvp_selection_reserve(s, &r, &a), 201, "rank %u is booked", r.dp_rank);
	}
	w.endpoint = str("http://new:8000");
	w.start_rank = 1;
	w.taint = taint;
	w.taint_cnt = 2;
	w.total_kv_blocks = 77;
	is_u64((uint64_t)kvp_selection_local_worker_update(s, &w), 200, "rank 0 goes, rank 2 comes");
	q.required_taint = taint;
	q.required_cnt = 2;
	q.advisory = KVP_YES;
	is_u64((uint64_t)kvp_selection_select(s, &q, &a), 200, "its new taints are known");
	is_str(a.endpoint, "http://new:8000", "and its endpoint");
	ok(a.worker_id == 8 && a.overlap.dp_cnt == 2 && a.overlap.dp_rank[0] == 1 &&
			a.overlap.dp_tok[0] == 20 && a.worker_load.total_kv_blocks == 77,
		"and its ranks: blocks of rank 1 stay");
	is_u64((uint64_t)kvp_selection_free(s, str("u0")), 404, "the booking of the rank that went is gone");
	is_u64((uint64_t)kvp_selection_free(s, str("u1")), 200, "the other one is there");
	w.size = 100;
	is_u64((uint64_t)kvp_selection_local_worker_update(s, &w), 503, "no room for so many ranks");
	kvp_selection_local_worker_gone(s, 8);
	is_u64((uint64_t)kvp_selection_local_worker_update(s, &w), 404, "a lost worker does not change");
	is_u64(kvp_book_check(&s->region->book) + kvp_catalogue_check(&s->region->cat), 0, "no fault");
}

/* dev, host, disk blocks of worker 1 for the first n tokens; router credit too. */
static struct kvp_overlap_row score(struct kvp_selection *s, uint32_t n)
{
	struct kvp_select_request q = request(n);
	struct kvp_overlap_row row[4];
	uint32_t cnt, size, blk;
	memset(row, 0, sizeof(row));
	kvp_selection_overlap_scores(s, &q, row, 4, &cnt, &size, &blk);
	return row[0];
}

static int row_is(struct kvp_overlap_row r, uint32_t dev, uint32_t host, uint32_t disk, double credit)
{
	return r.device_blk == dev && r.host_ext_blk == host && r.disk_ext_blk == disk &&
	       r.router_credit_blk == credit;
}

static int reserve(struct kvp_selection *s, const char *id, uint64_t worker_id, uint32_t token_cnt)
{
	struct kvp_reserve_request q;
	struct kvp_select_answer a;
	memset(&q, 0, sizeof(q));
	q.model = q.group = str("default");
	q.selection_id = str(id);
	q.worker_id = worker_id;
	q.prompt.form = KVP_PROMPT_TOKENS;
	q.prompt.token = tok;
	q.prompt.token_cnt = token_cnt;
	q.prompt.eagle = KVP_UNSET;
	q.override.assume_kv_reuse = KVP_NO; /* its tracking hashes are of no use to others, its blocks are */
	return kvp_selection_reserve(s, &q, &a);
}

/* What bookings tell, beside what engines tell. */
static void test_predicted(void)
{
	struct kvp_local_cfg cfg = {.seed = 42, .predicted_ttl_ns = UINT64_MAX};
	struct kvp_selection *s = kvp_selection_open_local(&cfg);
	struct kvp_select_request q = request(40);
	struct kvp_select_answer a;
	uint64_t local[10], ext[10];
	if (!ok(s != NULL, "a node with predictions"))
		return;
	add_worker(s, 1, 1, 0);
	add_worker(s, 2, 1, 0);
	for (int i = 0; i < 5; i++)
		kvp_selection_select(s, &q, &a);
	ok(row_is(score(s, 40), 0, 0, 0, 0), "a selection without a booking predicts nothing");
	is_u64(reserve(s, "a", 1, 24), 201, "a booking of six blocks");
	ok(row_is(score(s, 40), 6, 0, 0, 6), "they count as on the device");
	is_u64(kvp_selection_select(s, &q, &a), 200, "select");
	ok(a.worker_id == 1 && a.effective_prefill_tok == 16, "and attract");
	is_u64(store(s, 1, 0, 2), 200, "the engine tells two blocks");
	struct kvp_hasher h;
	kvp_hasher_init(&h, tok, 40, 4, KVP_HASH_WINDOW_PLAIN, kvp_hash_seed(NULL, 0, NULL, 0));
	kvp_hasher_local(&h, 0, 10, local);
	kvp_hash_chain(NULL, local, 10, ext);
	kvp_selection_local_stored_in(s, KVP_CACHE_HOST, 1, 0, &ext[1], 5, local + 2, ext + 2);
	kvp_selection_local_stored_in(s, KVP_CACHE_DISK, 1, 0, &ext[6], 2, local + 7, ext + 7);
	ok(row_is(score(s, 40), 6, 1, 2, 7.25), "lower tiers count beyond the prediction: none twice");
	is_u64(reserve(s, "b", 1, 32), 201, "eight blocks");
	ok(row_is(score(s, 40), 8, 0, 1, 8.25), "it covers the host's block and one of the disk's");
	is_u64(reserve(s, "c", 1, 40), 201, "ten blocks");
	ok(row_is(score(s, 40), 10, 0, 0, 10), "more than all tiers together");
	kvp_selection_local_removed(s, 1, 0, 10, ext);
	ok(row_is(score(s, 40), 10, 0, 0, 10), "an engine's remove does not touch a prediction");
	is_u64(store(s, 2, 0, 10), 200, "another worker's engine tells the whole prompt");
	kvp_selection_local_cleared(s, 2, 0);
	ok(row_is(score(s, 40), 10, 0, 0, 10), "nor does a clear");
	add_worker(s, 1, 1, 0);
	ok(row_is(score(s, 40), 0, 0, 0, 0), "a worker registered anew has none");
	kvp_selection_close(s);
}

int main(void)
{
	struct kvp_local_cfg cfg = {.seed = 42};
	for (uint32_t i = 0; i < 256; i++)
		tok[i] = i;
	struct kvp_selection *s = kvp_selection_open_local(&cfg);
	if (!ok(s != NULL, "a node of one's own"))
		return done();
	test_empty(s);
	ok(add_worker(s, 1, 1, 0) == 201 && add_worker(s, 2, 2, 1000) == 201 && add_worker(s, 3, 1, 0) == 201,
		"three workers, four ranks");
	test_cache_wins(s);
	test_lifecycle(s);
	test_generated_id(s);
	test_constraints(s);
	test_ties(s);
	test_reserve(s);
	test_runners_up(s);
	test_replay(s);
	test_spread(s);
	test_local(s);
	test_update(s);
	kvp_selection_close(s);
	test_predicted();
	cfg.rank_max = 70000;
	ok(kvp_selection_open_local(&cfg) == NULL, "too many ranks are refused");
	return done();
}
