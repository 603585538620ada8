/* An example: a program that embeds libkvpick. It needs include/kvpick and libkvpick alone (see the Makefile)
 * and runs a router's day: workers, blocks that their engines hold, a choice, bookings, one that has to wait
 * its turn, lifecycle, and what there is to look at. Each claim below is what a router may rely on. */
#include <kvpick/selection.h>

#include "tests/tap.h"

#define BLOCK 16u /* tokens of a block */
#define TOKENS (8 * BLOCK)
#define MODEL text("llama")
#define GROUP text("default")

static uint32_t token[TOKENS]; /* the prompt of all requests here; a real one comes from the tokenizer */

static struct kvp_str text(const char *s)
{
	return (struct kvp_str){s, strlen(s)};
}

static struct kvp_select_request request(const char *id, uint32_t token_cnt)
{
	struct kvp_select_request q;
	kvp_select_request_init(&q);
	q.model = MODEL;
	q.group = GROUP;
	q.selection_id = text(id);
	q.prompt.form = KVP_PROMPT_TOKENS;
	q.prompt.token = token;
	q.prompt.token_cnt = token_cnt;
	return q;
}

static struct kvp_local_worker worker(uint64_t id, uint32_t ranks)
{
	return (struct kvp_local_worker){.worker_id = id,
		.model = MODEL,
		.group = GROUP,
		.endpoint = text(id == 1 ? "http://10.0.0.1:8000" : "http://10.0.0.2:8000"),
		.block_size = BLOCK,
		.size = ranks,
		.max_num_batched_tokens = 4 * TOKENS};
}

/* Upsert, patch, list. */
static void workers(struct kvp_selection *s)
{
	struct kvp_str slow[] = {text("slow")};
	struct kvp_local_worker one = worker(1, 1), two = worker(2, 2);
	struct kvp_worker_row row;
	uint32_t cursor = 0, cnt = 0, ranks = 0;
	is_u64(kvp_selection_schedulable(s), 0, "not ready yet");
	is_u64((uint64_t)kvp_selection_local_worker(s, &one), 201, "a worker");
	is_u64((uint64_t)kvp_selection_local_worker(s, &two), 201, "and one with two ranks");
	two.taint = slow;
	two.taint_cnt = 1;
	is_u64((uint64_t)kvp_selection_local_worker_update(s, &two), 200, "a label for the second");
	two.block_size = 32;
	is_u64((uint64_t)kvp_selection_local_worker_update(s, &two), 409, "block sizes do not change");
	two.worker_id = 3;
	two.block_size = BLOCK;
	is_u64((uint64_t)kvp_selection_local_worker_update(s, &two), 404, "only a known worker is changed");
	while (kvp_selection_worker_next(s, &cursor, &row)) {
		cnt++;
		ranks += row.size;
		ok(row.is_schedulable == KVP_YES && row.model.len == 5 && row.endpoint.len == 20, "worker %u",
			(unsigned)row.worker_id);
	}
	ok(cnt == 2 && ranks == 3 && kvp_selection_schedulable(s) == 2, "two workers, three ranks, ready");
}

/* What an engine tells in its KV events. */
static void blocks(struct kvp_selection *s)
{
	uint64_t local[6], block[6];
	struct kvp_hasher h;
	struct kvp_select_request q = request("look", TOKENS);
	struct kvp_overlap_row o[4];
	uint32_t cnt, block_size, blk;
	kvp_hasher_init(&h, token, TOKENS, BLOCK, KVP_HASH_WINDOW_PLAIN, kvp_hash_seed(NULL, 0, NULL, 0));
	kvp_hasher_local(&h, 0, 6, local);
	kvp_hash_chain(NULL, local, 6, block);
	int status = kvp_selection_local_stored(s, 2, 1, NULL, 4, local, block);
	is_u64((uint64_t)status, 200, "4 blocks in device memory");
	status = kvp_selection_local_stored_in(
		s, KVP_CACHE_HOST, 2, 1, &block[3], 2, local + 4, block + 4);
	is_u64((uint64_t)status, 200, "2 more in host memory");
	is_u64((uint64_t)kvp_selection_overlap_scores(s, &q, o, 4, &cnt, &block_size, &blk), 200, "overlap");
	ok(cnt == 3 && blk == 8 && o[2].worker_id == 2 && o[2].dp_rank == 1 && o[2].device_blk == 4 &&
			o[2].host_ext_blk == 2 && o[0].device_blk == 0,
		"of every rank");
}

/* select, select_and_reserve, replay, explicit reservation, lifecycle. */
static void bookings(struct kvp_selection *s)
{
	struct kvp_select_request q = request("first", TOKENS);
	struct kvp_select_answer a;
	struct kvp_load_row load[4];
	uint32_t cnt;
	is_u64((uint64_t)kvp_selection_select(s, &q, &a), 200, "a choice without booking");
	ok(a.worker_id == 2 && a.dp_rank == 1 && a.effective_prefill_tok == TOKENS - 4 * BLOCK - 24,
		"the rank with the prefix, 3/4 of a token for each in host memory");
	is_u64((uint64_t)kvp_selection_replay(s, q.role, MODEL, GROUP, text("first"), &a), 201,
		"booked later by its id");
	is_u64((uint64_t)kvp_selection_select_and_reserve(s, &q, &a), 409, "an id is booked once");
	q = request("second", TOKENS);
	is_u64((uint64_t)kvp_selection_select_and_reserve(s, &q, &a), 200, "choice and booking in one step");
	const struct kvp_str not_slow[] = {text("slow")};
	struct kvp_taint_pref avoid = {text("slow"), -5};
	q = request("third", TOKENS);
	q.required_taint = not_slow;
	q.required_cnt = 1;
	is_u64((uint64_t)kvp_selection_select_and_reserve(s, &q, &a), 200, "only on workers with a label");
	is_u64(a.worker_id, 2, "which one has");
	q = request("fourth", TOKENS);
	q.preferred_taint = &avoid;
	q.preferred_cnt = 1;
	is_u64((uint64_t)kvp_selection_potential_loads(s, &q, load, 4, &cnt), 200, "loads with it");
	struct kvp_reserve_request r;
	kvp_reserve_request_init(&r);
	r.model = MODEL;
	r.group = GROUP;
	r.selection_id = text("fifth");
	r.worker_id = 1;
	r.prompt = q.prompt;
	is_u64((uint64_t)kvp_selection_reserve(s, &r, &a), 201, "a booking where the caller wants it");
	double half = 0.5;
	is_u64((uint64_t)kvp_selection_output_block(s, text("fifth"), &half), 200, "its output has grown");
	is_u64((uint64_t)kvp_selection_prefill_complete(s, text("fifth")), 200, "its prefill is done");
	is_u64((uint64_t)kvp_selection_loads(s, q.role, MODEL, GROUP, load, 4, &cnt), 200, "the loads");
	ok(cnt == 3 && load[0].active_requests == 1 && load[0].prefill_tok == 0 &&
			load[0].active_requests + load[1].active_requests + load[2].active_requests == 4,
		"of every rank");
	const char *id[] = {"first", "second", "third", "fifth"};
	for (int i = 0; i < 4; i++)
		is_u64((uint64_t)kvp_selection_free(s, text(id[i])), 200, "%s is over", id[i]);
	is_u64((uint64_t)kvp_selection_free(s, text("first")), 404, "once");
}

/* Tickets that may have changed; 0 = none is answered. */
static uint64_t next_answer(struct kvp_selection *s, struct kvp_select_answer *a, int *status)
{
	uint64_t ticket;
	uint32_t cursor = 0;
	while (kvp_selection_next(s, &cursor, &ticket))
		if ((*status = kvp_selection_collect(s, ticket, a)) != KVP_SELECT_WAITS)
			return ticket;
	return 0;
}

/* With a queue a request whose ranks are all busy gets a ticket. Here it is answered when load is given back
 * in this program; on a node any process may do that. */
static void waiting(struct kvp_selection *s)
{
	struct kvp_select_request q = request("running", TOKENS);
	struct kvp_select_answer a;
	uint64_t ticket[3], cnt, isl;
	int status = 0;
	is_u64((uint64_t)kvp_selection_local_worker_gone(s, 2), 200, "only worker 1 is left");
	status = kvp_selection_submit(s, &q, KVP_SELECT_AND_RESERVE, &a, &ticket[0]);
	is_u64((uint64_t)status, 200, "and gets busy");
	for (int i = 0; i < 3; i++) {
		const char *id[] = {"patient", "urgent", "given up"};
		q = request(id[i], TOKENS);
		q.strict_priority = i == 1;
		is_u64((uint64_t)kvp_selection_submit(s, &q, KVP_SELECT_AND_RESERVE, &a, &ticket[i]),
			KVP_SELECT_WAITS, "%s waits", id[i]);
	}
	q = request("hasty", TOKENS);
	is_u64((uint64_t)kvp_selection_select_and_reserve(s, &q, &a), 429, "who will not wait is told");
	kvp_selection_waiting(s, q.role, MODEL, GROUP, &cnt, &isl);
	ok(cnt == 3 && isl == 3 * TOKENS, "three wait, with their tokens");
	kvp_selection_cancel(s, ticket[2]);
	is_u64((uint64_t)kvp_selection_collect(s, ticket[1], &a), KVP_SELECT_WAITS, "not yet");
	is_u64((uint64_t)kvp_selection_free(s, text("running")), 200, "load is given back");
	ok(next_answer(s, &a, &status) == ticket[1] && status == 200, "the more urgent one goes first");
	ok(a.worker_id == 1 && a.isl_tok == TOKENS && a.selection_id.len == 6, "and answered like any other");
	is_u64((uint64_t)kvp_selection_undo(s, a.booking), 200, "its client has gone meanwhile");
	is_u64((uint64_t)kvp_selection_collect(s, ticket[0], &a), 200, "so the next one has its turn");
	is_u64((uint64_t)kvp_selection_free(s, text("patient")), 200, "which ends");
	struct kvp_local_worker two = worker(2, 1);
	q = request("last", TOKENS);
	kvp_selection_submit(s, &q, KVP_SELECT_AND_RESERVE, &a, &ticket[0]);
	q = request("new", TOKENS);
	status = kvp_selection_submit(s, &q, KVP_SELECT_AND_RESERVE, &a, &ticket[1]);
	is_u64((uint64_t)status, KVP_SELECT_WAITS, "one more waits");
	kvp_selection_local_worker(s, &two);
	ok(kvp_selection_collect(s, ticket[1], &a) == 200 && a.worker_id == 2, "until there is a new worker");
	kvp_selection_free(s, text("last"));
	kvp_selection_free(s, text("new"));
}

int main(void)
{
	struct kvp_local_cfg cfg = {.queue = KVP_LOCAL_FCFS, .queue_threshold = 0.2};
	for (uint32_t i = 0; i < TOKENS; i++)
		token[i] = 1000 + i;
	struct kvp_selection *s = kvp_selection_open_local(&cfg);
	if (!ok(s != NULL, "a node of one's own"))
		return done();
	workers(s);
	blocks(s);
	bookings(s);
	waiting(s);
	kvp_selection_close(s);
	return done();
}
