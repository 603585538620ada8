/* t_peer_sync — from a booking to the bytes that replicas get, and from there to the same load at another
 * node. */
#include "shm/sweep.h"
#include "tests/replica_fixture.h"
#include "tests/tap.h"

static uint64_t rnd = 1;

static uint32_t some(uint32_t n)
{
	rnd = rnd * 6364136223846793005u + 1442695040888963407u;
	return (uint32_t)(rnd >> 33) % n;
}

static uint64_t counted(struct rf_node *n, enum kvp_ctr id)
{
	return n->s->ctr ? n->s->ctr->val[id] : 0;
}

static int book(struct rf_node *n, const char *id, const char *session, uint32_t blocks)
{
	static uint32_t token[256];
	struct kvp_select_request q;
	struct kvp_select_answer a;
	uint32_t first = some(3);
	kvp_select_request_init(&q);
	q.model = rf_str("m");
	q.group = rf_str("g");
	q.selection_id = rf_str(id);
	if (session)
		q.session_id = rf_str(session);
	q.prompt.form = KVP_PROMPT_TOKENS;
	for (uint32_t i = 0; i < 4 * blocks; i++)
		token[i] = first * 1000 + i;
	q.prompt.token = token;
	q.prompt.token_cnt = 4 * blocks;
	return kvp_selection_select_and_reserve(n->s, &q, &a);
}

/* All messages of a node, to another one (NULL: to nobody); their number. */
static uint32_t tell(struct rf_node *from, struct rf_node *to)
{
	struct kvp_sync_msg msg;
	uint32_t n = 0;
	for (int rc; (rc = kvp_sync_next(&from->sync, kvp_clock_mono_ns(), &msg)) == KVP_OK ||
		     rc == KVP_ERR_EXISTS;) {
		if (rc == KVP_OK) {
			n++;
			if (to && msg.topic == KVP_REPLICA_LIFECYCLE)
				rf_hear(to, msg.payload, msg.len, kvp_clock_mono_ns());
		}
		kvp_sync_done(&from->sync);
	}
	return n;
}

static int same_loads(struct rf_node *a, struct rf_node *b)
{
	struct kvp_load_row x[8], y[8];
	uint32_t n, m;
	struct kvp_str model = rf_str("m"), group = rf_str("g");
	kvp_selection_loads(a->s, KVP_PART_AGGREGATED, model, group, x, 8, &n);
	kvp_selection_loads(b->s, KVP_PART_AGGREGATED, model, group, y, 8, &m);
	for (uint32_t i = 0; n == m && i < n; i++)
		if (x[i].prefill_tok != y[i].prefill_tok || x[i].decode_blk != y[i].decode_blk ||
			x[i].active_requests != y[i].active_requests)
			return 0;
	return n == m;
}

static void skipped(void)
{
	struct kvp_local_cfg cfg = {.seed = 1};
	struct rf_node n;
	struct kvp_sync_msg msg;
	rf_open(&n, &cfg, 7, 1, 1024);
	ok(kvp_sync_next(&n.sync, 0, &msg) == KVP_ERR_NOTFOUND, "nothing happened, nothing is told");
	is_u64((uint64_t)book(&n, "gone", NULL, 2), 200, "booked");
	is_u64((uint64_t)kvp_selection_free(n.s, rf_str("gone")), 200, "and freed before anybody looked");
	uint64_t was = counted(&n, KVP_CTR_PEER_TOLD_SKIPPED);
	is_u64(tell(&n, NULL), 1, "only its end is told");
	is_u64(counted(&n, KVP_CTR_PEER_TOLD_SKIPPED) - was, n.s->ctr ? 1 : 0, "the rest is counted");
	is_u64((uint64_t)book(&n, "twice", NULL, 2), 200, "booked");
	ok(kvp_sync_next(&n.sync, 0, &msg) == KVP_OK, "told");
	uint8_t *copy = malloc(msg.len);
	size_t len = msg.len;
	memcpy(copy, msg.payload, len);
	kvp_lifecycle_attach(&n.s->region->lifecycle, n.s->owner, n.s->ctr); /* killed before it was done */
	ok(kvp_sync_next(&n.sync, 0, &msg) == KVP_OK && msg.len == len && !memcmp(msg.payload, copy, len),
		"the next process tells it again");
	kvp_sync_done(&n.sync);
	ok(kvp_sync_next(&n.sync, 0, &msg) == KVP_ERR_NOTFOUND, "once");
	free(copy);
	rf_close(&n);
}

static void sessions(void)
{
	struct kvp_local_cfg cfg = {.seed = 1, .session_ttl_ns = 100000000000ull};
	struct rf_node n;
	struct kvp_sync_msg msg;
	struct kvp_replica_binding b;
	uint64_t last = 0;
	rf_open(&n, &cfg, 7, 2, 1024);
	for (int i = 0; i < 3; i++) {
		char id[16];
		snprintf(id, sizeof(id), "s%d", i);
		is_u64((uint64_t)book(&n, id, "chat", 2), 200, "a booking of a session");
		ok(kvp_sync_next(&n.sync, kvp_clock_mono_ns(), &msg) == KVP_OK, "is told");
		kvp_sync_done(&n.sync);
		int rc = kvp_sync_next(&n.sync, kvp_clock_mono_ns(), &msg);
		ok(rc == KVP_OK && msg.topic == KVP_REPLICA_AFFINITY, "and its binding");
		rc = kvp_replica_decode_binding(&n.dec, msg.payload, msg.len, &b);
		ok(rc == KVP_OK && b.writer_id == 7 && b.has_rank && b.sequence > last, "with a newer stamp");
		ok(b.session.len == 4 && !memcmp(b.session.ptr, "chat", 4), "of the session");
		last = b.sequence;
		kvp_sync_done(&n.sync);
	}
	book(&n, "other", "chat", 2);
	struct kvp_replica_binding far = b;
	far.writer_id = 8;
	far.sequence = last + 10;
	far.worker_id = 3 - b.worker_id;
	ok(kvp_bindings_apply(&n.bindings, KVP_PART_AGGREGATED, &far, kvp_clock_mono_ns()) == KVP_OK,
		"a replica binds it elsewhere before ours is told");
	is_u64(tell(&n, NULL), 1, "then ours is not told any more, only the booking");
	rf_close(&n);
}

/* Two nodes, random calls on both, messages delayed but in order: the same loads whenever all are through. */
static void converges(void)
{
	struct kvp_local_cfg cfg = {.seed = 1};
	struct rf_node n[2];
	char live[200][12];
	uint32_t cnt = 0, made = 0, differ = 0, refused = 0;
	rf_open(&n[0], &cfg, 100, 3, 4096);
	rf_open(&n[1], &cfg, 200, 3, 4096);
	for (uint32_t step = 0; step < 20000; step++) {
		struct rf_node *x = &n[some(2)];
		uint32_t what = some(10), at = cnt ? some(cnt) : 0;
		if (what < 4 && cnt < 200) {
			snprintf(live[cnt], sizeof(live[0]), "id%u", made++);
			if (book(x, live[cnt], NULL, 1 + some(30)) == 200)
				cnt++;
			else
				refused++;
		} else if (what < 6 && cnt) {
			kvp_selection_prefill_complete(x->s, rf_str(live[at]));
		} else if (what < 9 && cnt) {
			if (kvp_selection_free(x->s, rf_str(live[at])) == 200)
				memcpy(live[at], live[--cnt], sizeof(live[0]));
		} else {
			tell(&n[0], &n[1]);
			tell(&n[1], &n[0]);
			differ += !same_loads(&n[0], &n[1]);
		}
	}
	is_u64(differ, 0, "%u bookings: equal loads whenever all was told", made);
	is_u64(refused, 0, "none was refused");
	tell(&n[0], &n[1]);
	tell(&n[1], &n[0]);
	while (cnt)
		kvp_selection_free(n[some(2)].s, rf_str(live[--cnt]));
	tell(&n[0], &n[1]);
	tell(&n[1], &n[0]);
	for (int i = 0; i < 2; i++) {
		is_u64(kvp_resv_cnt(&n[i].s->region->book), 0, "node %d: nothing is left", i);
		is_u64(kvp_book_check(&n[i].s->region->book), 0, "node %d: nothing is broken", i);
		is_u64(kvp_lifecycle_check(&n[i].s->region->lifecycle), 0, "node %d: ring in order", i);
		rf_close(&n[i]);
	}
}

int main(void)
{
	rnd = tap_seed(1);
	skipped();
	sessions();
	converges();
	return done();
}
