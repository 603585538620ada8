/* Requests that wait, through the selection flow: what a waiter gets, cancelling, overlap of then and of now,
 * refusals, classes in turn. Then many waits of three real processes that sleep on their eventfds without a
 * time-out that could hide a lost wake-up. */
#include "daemons/common/select_priv.h"
#include "shm/sweep.h"
#include "tests/procs.h"
#include "tests/tap.h"
#include <kvpick/clock.h>

#include <math.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#define PROCS 3u
#define LOST_MS 20000 /* nobody answers this long: a wake-up was lost */

static uint32_t tok[64];
static struct kvp_selection *node; /* the whole node; its region is what the processes join */
static struct kvp_policy policy;
static struct kvp_policy_profile profile;
static int wake_fd[8] = {-1, -1, -1, -1, -1, -1, -1, -1};

static struct kvp_str str(const char *s)
{
	return (struct kvp_str){s, strlen(s)};
}

static struct kvp_select_request request(const char *id, uint32_t token_cnt)
{
	struct kvp_select_request q;
	memset(&q, 0, sizeof(q));
	q.model = q.group = str("default");
	q.selection_id = str(id);
	q.prompt.form = KVP_PROMPT_TOKENS;
	q.prompt.token = tok;
	q.prompt.token_cnt = token_cnt;
	q.prompt.eagle = KVP_UNSET;
	q.override = (struct kvp_override){NAN, NAN, NAN, NAN, KVP_UNSET, KVP_UNSET};
	return q;
}

static void add_worker(uint64_t id)
{
	struct kvp_local_worker w = {.worker_id = id,
		.model = str("default"),
		.group = str("default"),
		.endpoint = str("http://w:8000"),
		.block_size = 4,
		.size = 1,
		.max_num_batched_tokens = 512};
	if (kvp_selection_local_worker(node, &w) != 201)
		ok(0, "worker %u", (unsigned)id);
}

/* A process's handle: joins the region anew, as the owner of a slot. */
static struct kvp_region region[4];
static struct kvp_selection *process(uint32_t slot, double refresh_after_s)
{
	struct kvp_select_settings set;
	struct kvp_region *r = &region[slot - 2];
	if (!r->base && kvp_region_join(node->region->fd, KVP_REGION_BOOKER, r)) {
		printf("Bail out! no region\n");
		exit(1);
	}
	kvp_owner o = kvp_slot_owner(&r->slots, slot);
	if (!o)
		o = kvp_slot_assign(&node->region->slots, slot, KVP_ROLE_HTTPD, slot);
	kvp_select_defaults(&set);
	set.policy = &policy;
	set.refresh_after_s = refresh_after_s;
	r->slots.self = o;
	r->slots.wake_fd = wake_fd;
	return kvp_select_open(r, o, kvp_region_own_column(r, slot), &set);
}

static int submit(struct kvp_selection *s, const char *id, uint32_t tokens, uint64_t *ticket)
{
	struct kvp_select_request q = request(id, tokens);
	struct kvp_select_answer a;
	return kvp_selection_submit(s, &q, KVP_SELECT_AND_RESERVE, &a, ticket);
}

static void leave_clean(const char *what)
{
	uint64_t cnt, isl;
	struct kvp_load_row row[4];
	uint32_t n = 0;
	kvp_selection_waiting(node, KVP_PART_AGGREGATED, str("default"), str("default"), &cnt, &isl);
	kvp_selection_loads(node, KVP_PART_AGGREGATED, str("default"), str("default"), row, 4, &n);
	uint64_t load = 0;
	for (uint32_t i = 0; i < n; i++)
		load += row[i].prefill_tok + row[i].decode_blk + row[i].active_requests;
	ok(cnt == 0 && isl == 0 && load == 0 && kvp_queue_check(&node->region->queue) == 0 &&
			kvp_book_check(&node->region->book) == 0,
		"%s: nobody waits, no load, no fault", what);
}

/* ---- one process after the other ---- */

static void test_wait(struct kvp_selection *a, struct kvp_selection *b)
{
	struct kvp_select_answer ans;
	uint64_t t[4] = {0}, cnt, isl, next = 0;
	uint32_t cursor = 0;
	is_u64((uint64_t)submit(a, "first", 16, &t[0]), 200, "an idle rank is taken at once");
	is_u64((uint64_t)submit(a, "second", 20, &t[1]), KVP_SELECT_WAITS, "a busy one is waited for");
	is_u64((uint64_t)submit(b, "third", 12, &t[2]), KVP_SELECT_WAITS, "by another process too");
	kvp_selection_waiting(b, KVP_PART_AGGREGATED, str("default"), str("default"), &cnt, &isl);
	ok(cnt == 2 && isl == 32, "both are counted, with their tokens");
	is_u64((uint64_t)submit(b, "second", 20, &t[3]), 409, "the id of a waiting request is taken");
	is_u64((uint64_t)kvp_selection_free(b, str("second")), 404, "but it is no booking yet");
	is_u64((uint64_t)kvp_selection_collect(a, t[1], &ans), KVP_SELECT_WAITS, "it waits");
	is_u64((uint64_t)kvp_selection_free(b, str("first")), 200, "another process frees");
	ok(kvp_selection_next(a, &cursor, &next) && next == t[1], "the waiter's process is told");
	is_u64((uint64_t)kvp_selection_collect(a, t[1], &ans), 200, "and has its answer");
	ok(ans.worker_id == 1 && ans.isl_tok == 20 && ans.seq_cnt == 5 && ans.effective_prefill_tok == 20 &&
			ans.block_size == 4 && ans.overlap.dp_cnt == 1 && ans.selection_id.len == 6 &&
			ans.model.len == 7 && ans.track_prefill_tokens == KVP_YES,
		"which is whole");
	is_u64((uint64_t)kvp_selection_collect(b, t[2], &ans), KVP_SELECT_WAITS,
		"the younger one still waits");
	is_u64((uint64_t)kvp_selection_prefill_complete(a, str("second")), 200,
		"prefill done frees the rank");
	is_u64((uint64_t)kvp_selection_collect(b, t[2], &ans), 200, "for the next one");
	kvp_selection_free(a, str("second"));
	kvp_selection_free(a, str("third"));
	leave_clean("wait");
}

static void test_cancel(struct kvp_selection *a, struct kvp_selection *b)
{
	struct kvp_select_answer ans;
	struct kvp_select_request q = request("c0", 16);
	uint64_t t[3];
	submit(a, "c0", 16, &t[0]);
	submit(a, "c1", 16, &t[1]);
	kvp_selection_cancel(a, t[1]);
	is_u64((uint64_t)submit(b, "c1", 16, &t[1]), KVP_SELECT_WAITS, "the id of a cancelled wait is free");
	submit(a, "c2", 16, &t[2]);
	kvp_selection_free(a, str("c0"));
	kvp_selection_cancel(b, t[1]); /* answered already: its booking goes, the next one has its turn */
	is_u64((uint64_t)kvp_selection_collect(a, t[2], &ans), 200,
		"cancelling an answered wait frees the rank");
	kvp_selection_free(a, str("c2"));
	submit(a, "c3", 16, &t[0]);
	is_u64((uint64_t)kvp_selection_select_and_reserve(a, &q, &ans), 429,
		"the call that can't wait says so");
	q.advisory = KVP_YES;
	is_u64((uint64_t)kvp_selection_select(a, &q, &ans), 200, "advice is given at once");
	kvp_selection_free(a, str("c3"));
	q = request("c4", 16);
	is_u64((uint64_t)kvp_selection_submit(a, &q, KVP_SELECT_AND_RESERVE, &ans, &t[0]), 200, "a booking");
	uint64_t booking = ans.booking;
	submit(b, "c5", 16, &t[1]);
	is_u64((uint64_t)kvp_selection_undo(a, booking), 200, "whose answer did not arrive is undone");
	ok(kvp_selection_collect(b, t[1], &ans) == 200 && ans.booking && ans.booking != booking,
		"for who waited");
	is_u64((uint64_t)kvp_selection_undo(a, booking), 404, "once");
	is_u64((uint64_t)kvp_selection_undo(b, ans.booking), 200, "an answer that was waited for as well");
	leave_clean("cancel");
}

static void test_overlap(struct kvp_selection *a, struct kvp_selection *eager)
{
	struct kvp_select_answer ans;
	uint64_t local[8], ext[8], t[2];
	struct kvp_hasher h;
	submit(a, "o0", 16, &t[0]);
	submit(a, "o1", 32, &t[0]);
	submit(eager, "o2", 32, &t[1]);
	kvp_hasher_init(&h, tok, 32, 4, KVP_HASH_WINDOW_PLAIN, kvp_hash_seed(NULL, 0, NULL, 0));
	kvp_hasher_local(&h, 0, 8, local);
	kvp_hash_chain(NULL, local, 8, ext);
	kvp_selection_local_stored(node, 1, 0, NULL, 4, local, ext);
	kvp_selection_free(a, str("o0"));
	ok(kvp_selection_collect(a, t[0], &ans) == 200 && ans.effective_prefill_tok == 32,
		"after a short wait the overlap is that of then");
	kvp_selection_free(eager, str("o1"));
	ok(kvp_selection_collect(eager, t[1], &ans) == 200 && ans.effective_prefill_tok == 16 &&
			ans.overlap.gpu_tok == 16,
		"after a long one it is looked up again");
	kvp_selection_free(a, str("o2"));
	submit(a, "o3", 64, &t[0]);
	ok(submit(a, "o4", 32, &t[1]) == KVP_SELECT_WAITS, "one that waits with a known prefix");
	kvp_selection_local_cleared(node, 1, 0);
	kvp_selection_free(a, str("o3"));
	ok(kvp_selection_collect(a, t[1], &ans) == 200 && ans.effective_prefill_tok == 16,
		"keeps it over a short wait");
	kvp_selection_free(a, str("o4"));
	leave_clean("overlap");
}

/* Blocks of lower tiers count for a waiter as they did when it came: 2 device, 3 host, 1 disk. */
static void test_tiers(struct kvp_selection *a, struct kvp_selection *eager)
{
	struct kvp_select_answer now, ans;
	struct kvp_select_request q = request("t-", 32);
	uint64_t local[8], ext[8], t[2];
	struct kvp_hasher h;
	kvp_hasher_init(&h, tok, 32, 4, KVP_HASH_WINDOW_PLAIN, kvp_hash_seed(NULL, 0, NULL, 0));
	kvp_hasher_local(&h, 0, 8, local);
	kvp_hash_chain(NULL, local, 8, ext);
	kvp_selection_local_stored(node, 1, 0, NULL, 2, local, ext);
	kvp_selection_local_stored_in(node, KVP_CACHE_HOST, 1, 0, &ext[1], 3, local + 2, ext + 2);
	kvp_selection_local_stored_in(node, KVP_CACHE_DISK, 1, 0, &ext[4], 1, local + 5, ext + 5);
	q.advisory = KVP_YES;
	is_u64((uint64_t)kvp_selection_select(a, &q, &now), 200, "a prefix over three tiers");
	submit(a, "t0", 16, &t[0]);
	ok(submit(a, "t1", 32, &t[0]) == KVP_SELECT_WAITS &&
			submit(eager, "t2", 32, &t[1]) == KVP_SELECT_WAITS,
		"is waited with");
	kvp_selection_local_cleared(node, 1, 0);
	kvp_selection_free(a, str("t0"));
	is_u64((uint64_t)kvp_selection_collect(a, t[0], &ans), 200, "and after a short wait");
	/* 8 tokens of the device, 3/4 of 12 of the host, 1/4 of 4 of the disk */
	ok(ans.effective_prefill_tok == 32 - 8 - 9 - 1 &&
			now.effective_prefill_tok == ans.effective_prefill_tok,
		"every tier still has its credit");
	ok(ans.overlap.gpu_tok == 8 && ans.overlap.cpu_tok == 20 && ans.overlap.disk_tok == 24 &&
			ans.overlap.longest_matched_tok == now.overlap.longest_matched_tok,
		"and is in the answer");
	kvp_selection_free(eager, str("t1"));
	int status = kvp_selection_collect(eager, t[1], &ans);
	ok(status == 200 && ans.effective_prefill_tok == 32 && ans.overlap.disk_tok == 0,
		"after a long one none has");
	kvp_selection_free(a, str("t2"));
	leave_clean("tiers");
}

static int submit_at(
	struct kvp_selection *s, const char *id, uint32_t tokens, uint64_t worker_id, uint64_t *ticket)
{
	struct kvp_select_request q = request(id, tokens);
	struct kvp_select_answer a;
	q.has_pinned = KVP_YES;
	q.pinned_worker_id = worker_id;
	return kvp_selection_submit(s, &q, KVP_SELECT_AND_RESERVE, &a, ticket);
}

/* Where the chosen worker could fetch blocks from: who holds them when the answer is collected. */
static void test_source(struct kvp_selection *a)
{
	struct kvp_select_answer ans;
	uint64_t local[8], ext[8], t[3];
	struct kvp_hasher h;
	kvp_hasher_init(&h, tok, 32, 4, KVP_HASH_WINDOW_PLAIN, kvp_hash_seed(NULL, 0, NULL, 0));
	kvp_hasher_local(&h, 0, 8, local);
	kvp_hash_chain(NULL, local, 8, ext);
	add_worker(2);
	submit_at(a, "k1", 16, 1, &t[0]);
	submit_at(a, "k2", 16, 2, &t[0]);
	struct kvp_sel_rank *copy = a->view[a->part_idx].rank_mem.ptr;
	for (uint32_t i = 0; i < 2; i++)
		copy[i].kv_hint = 16 | 1; /* one kind, both may be sources */
	ok(submit_at(a, "k3", 32, 2, &t[0]) == KVP_SELECT_WAITS &&
			submit_at(a, "k4", 32, 1, &t[1]) == KVP_SELECT_WAITS &&
			submit_at(a, "k5", 32, 2, &t[2]) == KVP_SELECT_WAITS,
		"three wait for their rank");
	kvp_selection_free(a, str("k2"));
	kvp_selection_local_stored(node, 1, 0, NULL, 4, local, ext);
	int status = kvp_selection_collect(a, t[0], &ans);
	ok(status == 200 && ans.worker_id == 2 && ans.kv_source.worker_id == 1 &&
			ans.kv_source.blk_cnt == 4 && ans.kv_source.more_blk == 4 &&
			memcmp(ans.kv_source.local_hash, local, 4 * sizeof(local[0])) == 0,
		"whose answer tells of a source that came to hold the prompt after the choice");
	kvp_selection_free(a, str("k1"));
	ok(kvp_selection_collect(a, t[1], &ans) == 200 && ans.worker_id == 1 && ans.kv_source.blk_cnt == 0,
		"the source itself needs none");
	kvp_selection_free(a, str("k3"));
	kvp_selection_local_cleared(node, 1, 0);
	ok(kvp_selection_collect(a, t[2], &ans) == 200 && ans.kv_source.blk_cnt == 0,
		"one that has lost the blocks meanwhile is none");
	kvp_selection_free(a, str("k4"));
	kvp_selection_free(a, str("k5"));
	kvp_selection_local_worker_gone(node, 2);
	leave_clean("source");
}

static void test_workers(struct kvp_selection *a)
{
	struct kvp_select_answer ans;
	struct kvp_select_request q = request("w1", 16);
	uint64_t t[3];
	submit(a, "w0", 16, &t[0]);
	q.has_pinned = KVP_YES;
	q.pinned_worker_id = 1;
	is_u64((uint64_t)kvp_selection_submit(a, &q, KVP_SELECT_AND_RESERVE, &ans, &t[1]), KVP_SELECT_WAITS,
		"one waits for worker 1 alone");
	is_u64((uint64_t)submit(a, "w2", 16, &t[2]), KVP_SELECT_WAITS, "one behind it for anybody");
	q = request("w3", 16);
	q.has_pinned = KVP_YES;
	q.pinned_worker_id = 9;
	is_u64((uint64_t)kvp_selection_submit(a, &q, KVP_SELECT_AND_RESERVE, &ans, &t[0]), 503,
		"a pin on nobody fails at once");
	add_worker(2);
	is_u64(kvp_queue_nudge(&node->region->queue), 1, "a new worker nudges who waits");
	kvp_selection_tend(a);
	ok(kvp_selection_collect(a, t[2], &ans) == 200 && ans.worker_id == 2, "which takes it");
	kvp_selection_local_worker_gone(node, 1);
	kvp_queue_nudge(&node->region->queue);
	kvp_selection_tend(a);
	is_u64((uint64_t)kvp_selection_collect(a, t[1], &ans), 503, "who waited for a lost worker is told");
	kvp_selection_free(a, str("w2"));
	kvp_selection_local_worker_gone(node, 2);
	add_worker(1);
	leave_clean("workers");
}

static void test_limits(struct kvp_selection *a)
{
	const struct kvp_select_refusal *r;
	uint64_t t[4];
	policy.profile[0].class[0].limit_requests = 1;
	submit(a, "l0", 16, &t[0]);
	ok(submit(a, "l1", 16, &t[1]) == KVP_SELECT_WAITS && submit(a, "l2", 16, &t[2]) == 429,
		"one may wait");
	r = kvp_selection_refusal(a);
	ok(r && r->current == 1 && r->limit == 1 && strcmp(r->limit_kind, "requests") == 0 &&
			strcmp(r->policy_class, "default") == 0,
		"the refusal has its numbers");
	is_str(kvp_selection_error(a),
		"router policy class \"default\" queue requests limit reached (current=1, limit=1)",
		"and its text");
	policy.profile[0].class[0].limit_requests = KVP_POLICY_NONE;
	ok(kvp_selection_free(a, str("l2")) == 404 && submit(a, "l2", 16, &t[2]) == KVP_SELECT_WAITS,
		"the refused id is free");
	ok(!kvp_selection_refusal(a), "a later call has no refusal");
	kvp_selection_cancel(a, t[1]);
	kvp_selection_cancel(a, t[2]);
	kvp_selection_free(a, str("l0"));
	leave_clean("limits");
}

static int submit_of(struct kvp_selection *s, const char *id, const char *session, enum kvp_select_kind kind,
	uint64_t *ticket)
{
	struct kvp_select_request q = request(id, 16);
	struct kvp_select_answer a;
	q.session_id = str(session);
	return kvp_selection_submit(s, &q, kind, &a, ticket);
}

static int submit_session(
	struct kvp_selection *s, const char *id, enum kvp_select_kind kind, uint64_t *ticket)
{
	return submit_of(s, id, "chat", kind, ticket);
}

/* b waits for bookings of a: it has to look at what it waits for when one has ended, and only then. */
static void test_note(struct kvp_selection *a, struct kvp_selection *b)
{
	const enum kvp_select_kind kind = KVP_SELECT_AND_RESERVE;
	uint64_t t[4];
	submit(a, "n0", 16, &t[0]);
	submit_of(a, "n1", "one", kind, &t[1]);
	submit_of(a, "n2", "two", kind, &t[2]);
	kvp_select_note(b);
	ok(submit_of(b, "n3", "one", kind, &t[3]) == KVP_SELECTION_WAIT, "a booking waits for its session");
	struct kvp_affinity_key one = kvp_select_waits_for(b);
	is_u64((uint64_t)kvp_select_note(b), 0, "nothing has ended since it looked");
	ok(kvp_select_is_met(b, one), "as a look would say");
	kvp_selection_cancel(a, t[1]);
	ok(submit_of(b, "n4", "two", kind, &t[3]) == KVP_SELECTION_WAIT,
		"the first has ended; another waits");
	ok(kvp_select_note(b) == 1 && !kvp_select_is_met(b, one), "which hides nothing from the first");
	is_u64((uint64_t)kvp_select_note(b), 0, "said once");
	kvp_selection_cancel(a, t[2]);
	one = kvp_select_waits_for(b);
	ok(kvp_select_note(b) == 1 && !kvp_select_is_met(b, one), "the other has ended, too");
	kvp_selection_free(a, str("n0"));
	leave_clean("note");
}

/* A session whose first booking waits stays reserved for it, and is bound when it is answered. */
static void test_session(struct kvp_selection *a, struct kvp_selection *b)
{
	struct kvp_select_answer ans;
	uint64_t t[3];
	submit(a, "s0", 16, &t[0]);
	ok(submit_session(a, "s1", KVP_SELECT_AND_RESERVE, &t[0]) == KVP_SELECT_WAITS &&
			submit_session(b, "s2", KVP_SELECT_AND_RESERVE, &t[1]) == KVP_SELECTION_WAIT,
		"another booking of a session waits for the first one, which waits for a rank");
	kvp_selection_cancel(a, t[0]);
	is_u64((uint64_t)submit_session(b, "s2", KVP_SELECT_AND_RESERVE, &t[1]), KVP_SELECT_WAITS,
		"when that is cancelled it takes its place");
	add_worker(2);
	kvp_queue_nudge(&node->region->queue);
	kvp_selection_tend(b);
	ok(kvp_selection_collect(b, t[1], &ans) == 200 && ans.worker_id == 2, "it is booked on a new worker");
	kvp_selection_free(a, str("s0"));
	struct kvp_select_request q = request("s3", 16);
	q.session_id = str("chat");
	ok(kvp_selection_submit(a, &q, KVP_SELECT_AND_RESERVE, &ans, &t[0]) == 200 && ans.worker_id == 2,
		"where the session stays, whatever the load");
	submit(a, "s4", 16, &t[0]);
	ok(submit_session(a, "s5", KVP_SELECT_AND_RESERVE, &t[0]) == KVP_SELECT_WAITS &&
			submit_session(b, "s6", KVP_SELECT_ONLY, &t[1]) == KVP_SELECT_WAITS,
		"one of a bound session waits, and a choice without booking");
	kvp_selection_free(a, str("s4"));
	ok(kvp_selection_collect(a, t[0], &ans) == 200 && ans.worker_id == 2, "and goes to its worker, too");
	kvp_selection_free(a, str("s2"));
	kvp_selection_free(a, str("s3"));
	kvp_selection_free(a, str("s5"));
	ok(kvp_selection_collect(b, t[1], &ans) == 200 && ans.worker_id == 2, "as does the choice");
	is_u64((uint64_t)kvp_selection_replay(a, KVP_PART_AGGREGATED, str("default"), str("default"),
		       str("s6"), &ans),
		201, "which is kept for a replay by its id");
	kvp_selection_free(a, str("s6"));
	kvp_selection_local_worker_gone(node, 2);
	leave_clean("session");
}

/* Where bookings feed the index, one that waited does so, too. */
static void test_learns(void)
{
	struct kvp_local_cfg cfg = {
		.seed = 1, .predicted_ttl_ns = UINT64_MAX, .queue = KVP_LOCAL_FCFS, .queue_threshold = 0};
	struct kvp_selection *s = kvp_selection_open_local(&cfg);
	struct kvp_local_worker w = {.worker_id = 1,
		.model = str("default"),
		.group = str("default"),
		.endpoint = str("http://w:8000"),
		.block_size = 4,
		.size = 1};
	struct kvp_select_request q = request("n", 32);
	struct kvp_select_answer ans;
	struct kvp_overlap_row row;
	uint32_t cnt, size, blk;
	uint64_t t;
	kvp_selection_local_worker(s, &w);
	ok(submit(s, "n0", 16, &t) == 200 && submit(s, "n1", 32, &t) == KVP_SELECT_WAITS,
		"one of 8 blocks waits");
	kvp_selection_overlap_scores(s, &q, &row, 1, &cnt, &size, &blk);
	is_u64(row.device_blk, 4, "the index knows the 4 that are booked");
	kvp_selection_free(s, str("n0"));
	is_u64((uint64_t)kvp_selection_collect(s, t, &ans), 200, "its turn comes");
	kvp_selection_overlap_scores(s, &q, &row, 1, &cnt, &size, &blk);
	is_u64(row.device_blk, 8, "and the index learns its blocks");
	kvp_selection_close(s);
}

/* ---- three processes ---- */

struct tally {
	uint64_t waits, at_once, sleeps, lost, failed;
};
static struct tally *tally;

#define OPEN_MAX 8

struct proc {
	struct kvp_selection *s;
	struct tally *t;
	uint32_t slot, open, held_cnt, next_id;
	uint64_t ticket[OPEN_MAX];
	char held[OPEN_MAX][24];
};

static void free_held(struct proc *p)
{
	while (p->held_cnt)
		p->t->failed += kvp_selection_free(p->s, str(p->held[--p->held_cnt])) != 200;
}

static void hold(struct proc *p, struct kvp_str id)
{
	if (p->held_cnt == OPEN_MAX)
		free_held(p);
	snprintf(p->held[p->held_cnt++], sizeof(p->held[0]), "%.*s", (int)id.len, id.ptr);
}

/* Answers that are there; 1 if there was one. */
static int collect(struct proc *p)
{
	struct kvp_select_answer a;
	uint64_t ticket;
	uint32_t cursor = 0;
	int any = 0;
	kvp_selection_tend(p->s);
	while (kvp_selection_next(p->s, &cursor, &ticket)) {
		int status = kvp_selection_collect(p->s, ticket, &a);
		if (status == KVP_SELECT_WAITS)
			continue;
		for (uint32_t i = 0; i < p->open; i++)
			if (p->ticket[i] == ticket)
				p->ticket[i] = p->ticket[--p->open];
		p->t->failed += status != 200;
		if (status == 200)
			hold(p, a.selection_id);
		p->t->waits++;
		any = 1;
	}
	return any;
}

/* Sleeps until woken; whoever sleeps holds nothing, so only wake-ups keep the node going. */
static void sleep_for_answer(struct proc *p)
{
	struct kvp_slots *slots = &p->s->region->slots;
	struct pollfd fd = {.fd = wake_fd[p->slot], .events = POLLIN};
	free_held(p);
	kvp_slot_sleep(slots);
	if (!collect(p)) {
		p->t->sleeps++;
		if (poll(&fd, 1, LOST_MS) == 0) {
			p->t->lost++;
			_exit(1);
		}
	}
	kvp_slot_awake(slots);
	collect(p);
}

static void live(struct proc *p, uint64_t waits)
{
	char id[24];
	uint64_t ticket = 0;
	while (p->t->waits < waits || p->open) {
		if (p->open == OPEN_MAX || p->t->waits >= waits) {
			sleep_for_answer(p);
			continue;
		}
		snprintf(id, sizeof(id), "p%u-%u", p->slot, p->next_id++);
		int status = submit(p->s, id, 16, &ticket);
		if (status == KVP_SELECT_WAITS)
			p->ticket[p->open++] = ticket;
		else if (status == 200)
			hold(p, str(id));
		p->t->at_once += status == 200;
		p->t->failed += status != 200 && status != KVP_SELECT_WAITS;
	}
	free_held(p);
}

static void test_processes(uint64_t waits)
{
	pid_t pid[PROCS];
	int bad = 0;
	tally = shared(4096);
	uint64_t start_ns = kvp_clock_mono_ns();
	fflush(stdout);
	for (uint32_t i = 0; i < PROCS; i++) {
		pid[i] = fork();
		if (pid[i] == 0) {
			struct proc p = {.s = process(2 + i, 10), .t = &tally[i], .slot = 2 + i};
			live(&p, waits / PROCS);
			_exit(0);
		}
	}
	struct tally sum = {0, 0, 0, 0, 0};
	for (uint32_t i = 0; i < PROCS; i++) {
		int st;
		waitpid(pid[i], &st, 0);
		bad |= st;
		sum.waits += tally[i].waits;
		sum.at_once += tally[i].at_once;
		sum.sleeps += tally[i].sleeps;
		sum.lost += tally[i].lost;
		sum.failed += tally[i].failed;
	}
	struct rusage use;
	getrusage(RUSAGE_CHILDREN, &use);
	double cpu = (double)(use.ru_utime.tv_sec + use.ru_stime.tv_sec) +
		     (double)(use.ru_utime.tv_usec + use.ru_stime.tv_usec) / 1e6;
	printf("# %" PRIu64 " waits, %" PRIu64 " at once, %" PRIu64 " sleeps, %.2f s, %.2f s of processor\n",
		sum.waits, sum.at_once, sum.sleeps, (double)(kvp_clock_mono_ns() - start_ns) / 1e9, cpu);
	ok(!bad && sum.lost == 0 && sum.waits >= waits - PROCS, "%" PRIu64 " waits, no wake-up is lost",
		sum.waits);
	is_u64(sum.failed, 0, "every call is answered as it should be");
	leave_clean("three processes");
}

/* Who waits does not run: processor time of a process that sleeps with waiting requests. */
static void test_idle(struct kvp_selection *a)
{
	uint64_t t, ns[2];
	submit(a, "i0", 16, &t);
	fflush(stdout);
	pid_t pid = fork();
	if (pid == 0) {
		struct proc p = {.s = process(3, 10), .t = tally, .slot = 3};
		for (p.open = 0; p.open < OPEN_MAX; p.open++) {
			char id[24];
			snprintf(id, sizeof(id), "i1-%u", p.open);
			submit(p.s, id, 16, &p.ticket[p.open]);
		}
		ns[0] = kvp_clock_ns(CLOCK_PROCESS_CPUTIME_ID);
		while (p.open)
			sleep_for_answer(&p);
		free_held(&p);
		ns[1] = kvp_clock_ns(CLOCK_PROCESS_CPUTIME_ID);
		printf("# a process slept with %d waits for 300 ms: %.3f ms of processor in all\n", OPEN_MAX,
			(double)(ns[1] - ns[0]) / 1e6);
		fflush(stdout);
		_exit(0);
	}
	poll(NULL, 0, 300); /* the pause that is measured; nothing depends on it */
	uint64_t cnt = 0, isl;
	while (cnt < OPEN_MAX) {
		kvp_selection_waiting(
			a, KVP_PART_AGGREGATED, str("default"), str("default"), &cnt, &isl);
		poll(NULL, 0, 1);
	}
	kvp_selection_free(a, str("i0"));
	int st = 1;
	waitpid(pid, &st, 0);
	ok(st == 0, "eight waits that slept are answered");
	leave_clean("idle");
}

int main(void)
{
	struct kvp_local_cfg cfg = {.seed = 1, .session_ttl_ns = 60000000000ull};
	char *no_model = NULL;
	node = kvp_selection_open_local(&cfg);
	for (uint32_t i = 0; i < 64; i++)
		tok[i] = i;
	for (uint32_t i = 2; i < 6; i++)
		wake_fd[i] = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	kvp_policy_single(&profile, KVP_ORDER_FCFS, 0.0);
	policy = (struct kvp_policy){.profile_cnt = 1, .profile = &profile, .model = &no_model};
	add_worker(1);
	struct kvp_selection *a = process(2, 10), *b = process(3, 10), *eager = process(4, 1e-9);
	test_wait(a, b);
	test_cancel(a, b);
	test_overlap(a, eager);
	test_tiers(a, eager);
	test_source(a);
	test_workers(a);
	test_limits(a);
	test_note(a, b);
	test_session(a, b);
	test_learns();
	if (TAP_IS_TSAN) {
		ok(1, "# SKIP three processes, and a sleeping one: " TAP_PROCESSES);
	} else {
		add_worker(2);
		test_processes(getenv("KVP_LONG") ? 100000 : 10000);
		kvp_selection_local_worker_gone(node, 2);
		test_idle(a);
	}
	kvp_selection_close(a);
	kvp_selection_close(b);
	kvp_selection_close(eager);
	for (uint32_t i = 0; i < 3; i++)
		kvp_region_leave(&region[i]);
	kvp_selection_close(node);
	return done();
}
