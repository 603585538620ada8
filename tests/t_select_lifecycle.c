/* What the replicas are told, record by record: every way to make a booking and every way to end one. */
#include "daemons/common/select_priv.h"
#include "shm/sweep.h"
#include "tests/procs.h"
#include "tests/tap.h"
#include <kvpick/clock.h>

#include <math.h>
#include <stdlib.h>

static uint32_t tok[64];
static struct kvp_selection *node; /* the whole node; its region is what the processes join */
static struct kvp_policy policy;
static struct kvp_policy_profile profile;
static struct kvp_region region[3];
static struct kvp_selection *a, *b, *dying; /* of three processes */
static struct kvp_geom geom = {.slot_max = 8, .region_gen = 1, .lifecycle_max = 256};
static void *ring_mem;
static struct kvp_lifecycle_ring ring; /* the consumer's */
static struct kvp_lifecycle_rec rec;

static struct kvp_str str(const char *s)
{
	return (struct kvp_str){s, strlen(s)};
}

static struct kvp_select_request request(const char *id)
{
	struct kvp_select_request q;
	kvp_select_request_init(&q);
	q.model = q.group = str("default");
	q.selection_id = str(id);
	q.prompt.form = KVP_PROMPT_TOKENS;
	q.prompt.token = tok;
	q.prompt.token_cnt = 16;
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

static struct kvp_selection *process(uint32_t slot, enum kvp_booking_owner kind)
{
	struct kvp_select_settings set;
	struct kvp_region *r = &region[slot - 2];
	if (kvp_region_join(node->region->fd, KVP_REGION_BOOKER, r) ||
		kvp_lifecycle_join(ring_mem, &geom, &r->lifecycle))
		exit(printf("Bail out! no region\n"));
	kvp_owner o = kvp_slot_assign(&node->region->slots, slot, KVP_ROLE_HTTPD, slot);
	kvp_select_defaults(&set);
	set.policy = &policy;
	set.owner_kind = kind;
	r->slots.self = o;
	return kvp_select_open(r, o, kvp_region_own_column(r, slot), &set);
}

static char told[2048];

/* All records of the ring as words: kind, id, worker/rank, the adapter in brackets. */
static const char *drain(void)
{
	static const char *const kind[] = {"?", "ADD", "PRE", "FREE", "BIND"};
	size_t n = 0;
	told[0] = 0;
	while (kvp_lifecycle_next(&ring, kvp_clock_mono_ns(), &rec) == KVP_OK) {
		n += (size_t)snprintf(told + n, sizeof(told) - n, "%s%s %.64s %u/%u", n ? ", " : "",
			kind[rec.kind], rec.id, (unsigned)rec.worker_id, rec.dp_rank);
		if (rec.lora_len)
			n += (size_t)snprintf(told + n, sizeof(told) - n, "[%.64s]", rec.lora);
		kvp_lifecycle_done(&ring);
	}
	return told;
}

static int book(struct kvp_selection *s, const char *id, const char *lora)
{
	struct kvp_select_request q = request(id);
	struct kvp_select_answer ans;
	if (lora)
		q.prompt.lora = str(lora);
	return kvp_selection_select_and_reserve(s, &q, &ans);
}

static int submit(struct kvp_selection *s, const char *id, uint64_t *ticket)
{
	struct kvp_select_request q = request(id);
	struct kvp_select_answer ans;
	return kvp_selection_submit(s, &q, KVP_SELECT_AND_RESERVE, &ans, ticket);
}

static int reserve(struct kvp_selection *s, const char *id, uint64_t worker_id)
{
	struct kvp_reserve_request q;
	struct kvp_select_answer ans;
	kvp_reserve_request_init(&q);
	q.model = q.group = str("default");
	q.selection_id = str(id);
	q.worker_id = worker_id;
	q.prompt = request(id).prompt;
	q.prompt.lora = str("two");
	return kvp_selection_reserve(s, &q, &ans);
}

static void test_one(void)
{
	ok(book(a, "one", "adapter") == 200, "a booking");
	is_str(drain(), "ADD one 1/0[adapter]", "is told");
	kvp_selection_output_block(b, str("one"), NULL);
	is_str(drain(), "", "its output is not");
	ok(kvp_selection_prefill_complete(b, str("one")) == 200, "another process says that prefill is done");
	is_str(drain(), "PRE one 1/0[adapter]", "which is told");
	kvp_selection_prefill_complete(a, str("one"));
	is_str(drain(), "PRE one 1/0[adapter]", "again, when it is said again");
	ok(book(b, "one", NULL) == 409, "a second booking of the id is refused");
	is_str(drain(), "", "and not told");
	ok(kvp_selection_free(b, str("one")) == 200, "another process frees");
	is_str(drain(), "FREE one 1/0[adapter]", "which is told with the adapter of then");
	kvp_selection_free(a, str("one"));
	kvp_selection_prefill_complete(a, str("one"));
	kvp_selection_free(a, str("never"));
	is_str(drain(), "", "what has ended, or never was, is told no more");
	book(a, "one", NULL);
	kvp_selection_free(a, str("one"));
	is_str(drain(), "ADD one 1/0, FREE one 1/0", "the id is used again, without an adapter");
}

static void test_forms(void)
{
	struct kvp_select_request q = request("kept");
	struct kvp_select_answer ans;
	struct kvp_str def = str("default");
	q.prompt.lora = str("three");
	ok(kvp_selection_select(a, &q, &ans) == 200, "a choice without booking");
	is_str(drain(), "", "is not told");
	ok(kvp_selection_replay(b, KVP_PART_AGGREGATED, def, def, str("kept"), &ans) == 201, "its replay");
	is_str(drain(), "ADD kept 1/0[three]", "is, with the adapter of the choice");
	ok(kvp_selection_replay(b, KVP_PART_AGGREGATED, def, def, str("kept"), &ans) == 404, "once");
	kvp_selection_free(a, str("kept"));
	is_str(drain(), "FREE kept 1/0[three]", "and its end");
	ok(reserve(a, "named", 1) == 201 && reserve(a, "named", 1) == 409 && reserve(a, "other", 7) == 404,
		"an explicit reservation, a repeated one, and one of an unknown worker");
	is_str(drain(), "ADD named 1/0[two]", "only the first is told");
	kvp_selection_free(a, str("named"));
	drain();
	q = request("gone");
	ok(kvp_selection_select_and_reserve(a, &q, &ans) == 200 &&
			kvp_selection_undo(b, ans.booking) == 200 &&
			kvp_selection_undo(b, ans.booking) == 404,
		"a booking whose receiver has gone is undone");
	is_str(drain(), "ADD gone 1/0, FREE gone 1/0", "which is told once");
	static char id[KVP_SELECTION_ID_MAX + 1], lora[KVP_NAME_MAX + 1];
	memset(id, 'i', KVP_SELECTION_ID_MAX);
	memset(lora, 'l', KVP_NAME_MAX);
	ok(book(a, id, lora) == 200 && kvp_lifecycle_next(&ring, 1, &rec) == KVP_OK &&
			strcmp(rec.id, id) == 0 && strcmp(rec.lora, lora) == 0,
		"the longest id and adapter are told whole");
	kvp_lifecycle_done(&ring);
	kvp_selection_free(a, str(id));
	ok(kvp_lifecycle_next(&ring, 1, &rec) == KVP_OK && rec.kind == KVP_LIFECYCLE_FREE &&
			strcmp(rec.id, id) == 0 && strcmp(rec.lora, lora) == 0,
		"at the end, too");
	kvp_lifecycle_done(&ring);
}

static void test_queue(void)
{
	struct kvp_select_answer ans;
	uint64_t t[3];
	profile.class[0].busy_frac = 0;
	submit(a, "first", &t[0]);
	drain();
	ok(submit(a, "second", &t[1]) == KVP_SELECT_WAITS && submit(a, "third", &t[2]) == KVP_SELECT_WAITS,
		"two wait");
	is_str(drain(), "", "that is not told");
	ok(kvp_selection_free(b, str("first")) == 200, "another process frees, and books for the next");
	is_str(drain(), "FREE first 1/0, ADD second 1/0", "in this order");
	ok(kvp_selection_collect(a, t[1], &ans) == 200, "the answer is collected");
	kvp_selection_cancel(a, t[2]);
	is_str(drain(), "", "who waits and goes away is not told");
	submit(a, "fourth", &t[2]);
	kvp_selection_free(b, str("second"));
	drain();
	kvp_selection_cancel(a, t[2]);
	is_str(drain(), "FREE fourth 1/0", "who goes away after the booking is");
}

static void test_session(void)
{
	struct kvp_select_request q = request("s1");
	struct kvp_select_answer ans;
	struct kvp_str def = str("default");
	q.session_id = str("chat");
	ok(kvp_selection_select_and_reserve(a, &q, &ans) == 200, "the first booking of a session");
	is_str(drain(), "ADD s1 1/0, BIND chat 1/0", "is told with its binding");
	ok(rec.h == 0 && rec.part == 0, "which is of the partition");
	kvp_selection_prefill_complete(a, str("s1"));
	q.selection_id = str("s2");
	ok(kvp_selection_select_and_reserve(b, &q, &ans) == 200, "the second one");
	is_str(drain(), "PRE s1 1/0, ADD s2 1/0, BIND chat 1/0", "confirms it");
	kvp_selection_free(a, str("s1"));
	kvp_selection_free(a, str("s2"));
	drain();
	q.selection_id = str("s3");
	kvp_selection_select(a, &q, &ans);
	kvp_selection_replay(a, KVP_PART_AGGREGATED, def, def, str("s3"), &ans);
	is_str(drain(), "ADD s3 1/0, BIND chat 1/0", "a replay, too");
	kvp_selection_free(a, str("s3"));
	drain();
}

static void test_ends(void)
{
	struct kvp_book *bk = &region[0].book; /* publishes */
	struct kvp_sweep_result res;
	struct kvp_queue_sweep waiting;
	uint64_t t[2];
	kvp_owner dead = dying->owner;
	book(dying, "orphan", "x");
	kvp_selection_prefill_complete(dying, str("orphan"));
	drain();
	ok(kvp_book_sweep_owner(bk, dead, NULL, NULL, &res) == KVP_OK && res.free_cnt == 1,
		"a booking of a dead process is swept");
	is_str(drain(), "FREE orphan 1/0[x]", "which is told");
	book(a, "kept", NULL);
	kvp_selection_prefill_complete(a, str("kept"));
	drain();
	ok(kvp_book_sweep_owner(bk, a->owner, NULL, NULL, &res) == KVP_OK && res.kept_cnt == 1,
		"one of the node outlives its process");
	is_str(drain(), "", "and nothing is told");
	is_u64(kvp_resv_expire(bk, kvp_clock_mono_ns() + 400000000000ull, 300000000000ull), 1, "it expires");
	is_str(drain(), "", "which is not told");
	kvp_selection_free(a, str("kept"));
	is_str(drain(), "", "nor what is asked of it later");
	book(dying, "lost", NULL);
	kvp_selection_prefill_complete(dying, str("lost"));
	drain();
	is_u64(kvp_resv_expire(bk, kvp_clock_mono_ns() + 400000000000ull, 300000000000ull), 0,
		"one that lives by lease does not expire");
	is_u64(kvp_resv_lapse(bk, kvp_clock_mono_ns() + 70000000000ull, 60000000000ull), 1,
		"but its lease runs out");
	is_str(drain(), "FREE lost 1/0", "which is told");
	book(a, "busy", NULL);
	submit(dying, "waits", &t[0]);
	kvp_selection_free(a, str("busy"));
	is_str(drain(), "ADD busy 1/0, FREE busy 1/0, ADD waits 1/0", "one is booked for who waits");
	kvp_queue_sweep_owner(&region[0].queue, bk, dead, &waiting);
	kvp_book_sweep_owner(bk, dead, NULL, NULL, &res);
	is_str(drain(), "FREE waits 1/0", "who died before it had the answer: the end is told");
	book(a, "here", NULL);
	drain();
	kvp_selection_local_worker_gone(node, 1);
	is_str(drain(), "", "the end of a worker is not told");
	ok(kvp_selection_free(a, str("here")) == 404, "its bookings have gone with it");
	is_str(drain(), "", "silently");
	add_worker(1);
}

/* What another replica told is booked through a handle of its own. */
static void test_mirrored(void)
{
	struct kvp_book quiet = region[1].book;
	struct kvp_select_request q = request("m1");
	struct kvp_select_answer ans;
	uint64_t h;
	kvp_book_publish(&quiet, NULL);
	quiet.scratch = NULL;
	quiet.scratch_cnt = 0;
	kvp_selection_select(a, &q, &ans); /* opens the partition */
	struct kvp_resv_ask ask = {.worker_id = 1,
		.rank_slot = a->rank[0].rank_slot,
		.rank_gen = a->rank[0].rank_gen,
		.prefill_tok = 5,
		.flags = KVP_RESV_MIRRORED | KVP_RESV_NODE_OWNED | KVP_RESV_TRACK_PREFILL};
	for (int i = 0; i < 3; i++) {
		char id[3] = {'m', (char)('1' + i), 0};
		struct kvp_book *through = i == 2 ? &region[1].book : &quiet;
		ok(kvp_resv_claim_for(through, b->owner, id, 2, "ad", 2, &h) == KVP_OK &&
				kvp_resv_book(through, h, &ask) == KVP_OK,
			"a mirrored booking");
	}
	is_str(drain(), "", "is not told, through whichever handle");
	ok(book(a, "m1", NULL) == 409, "it blocks its id");
	kvp_selection_prefill_complete(a, str("m1"));
	kvp_selection_free(a, str("m1"));
	is_str(drain(), "PRE m1 1/0[ad], FREE m1 1/0[ad]", "what callers here do to it is");
	kvp_resv_find(&quiet, "m2", 2, &h);
	ok(kvp_resv_prefill_done(&quiet, h) == KVP_OK && kvp_resv_free(&quiet, h) == KVP_OK,
		"what the replica tells later is applied");
	is_str(drain(), "", "and not told back");
	kvp_selection_free(a, str("m3"));
	drain();
	kvp_book_leave(&quiet);
}

static void test_full(void)
{
	struct kvp_counters *c = &node->region->counters;
	char id[16];
	int good = 1;
	profile.class[0].busy_frac = NAN;
	uint64_t lost = kvp_ctr_sum(c, KVP_CTR_LIFECYCLE_DROPPED);
	for (int i = 0; i < 300; i++) {
		snprintf(id, sizeof(id), "f%d", i);
		good &= book(a, id, NULL) == 200;
	}
	ok(good, "nobody reads: bookings go on");
	is_u64(kvp_lifecycle_depth(&ring), 256, "the ring is full");
	is_u64(kvp_ctr_sum(c, KVP_CTR_LIFECYCLE_DROPPED) - lost, 44, "what had no room is counted");
	uint32_t n = 0;
	for (; kvp_lifecycle_next(&ring, 1, &rec) == KVP_OK; n++) {
		snprintf(id, sizeof(id), "f%u", n);
		good &= strcmp(rec.id, id) == 0;
		kvp_lifecycle_done(&ring);
	}
	ok(good && n == 256, "the oldest are there");
	for (int i = 0; i < 300; i++) {
		snprintf(id, sizeof(id), "f%d", i);
		good &= kvp_selection_free(a, str(id)) == 200;
	}
	ok(good, "all are freed");
	while (kvp_lifecycle_next(&ring, 1, &rec) == KVP_OK)
		kvp_lifecycle_done(&ring);
}

int main(void)
{
	struct kvp_local_cfg cfg = {.seed = 1, .session_ttl_ns = 3600000000000ull, .queue = KVP_LOCAL_FCFS};
	node = kvp_selection_open_local(&cfg);
	ring_mem = shared(kvp_lifecycle_footprint(&geom));
	if (!node || kvp_lifecycle_new(ring_mem, &geom) || kvp_lifecycle_join(ring_mem, &geom, &ring))
		return printf("Bail out! no node\n"), 1;
	static char *no_model;
	kvp_policy_single(&profile, KVP_ORDER_FCFS, NAN);
	policy = (struct kvp_policy){.profile_cnt = 1, .profile = &profile, .model = &no_model};
	add_worker(1);
	a = process(2, KVP_BOOK_FOR_NODE);
	b = process(3, KVP_BOOK_FOR_NODE);
	dying = process(4, KVP_BOOK_FOR_PROCESS);
	test_one();
	test_forms();
	test_queue();
	test_session();
	test_ends();
	test_mirrored();
	test_full();
	book(node, "private", NULL);
	is_str(drain(), "", "a node without replicas tells nobody");
	kvp_selection_free(node, str("private"));
	is_u64(kvp_book_check(&node->region->book) + kvp_lifecycle_check(&ring), 0, "no faults");
	return done();
}
