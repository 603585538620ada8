/* What the Endpoint Picker books for a request, and how that ends, message by message. */
#include "tests/legs_fixture.h"

static const struct ranks two = {0, 2};
static const char *const ports[] = {"KVPICK_EPP_DP_ROUTING=port", "KVPICK_EPP_DATA_PARALLEL_SIZE=2", NULL};

/* ---- what is chosen ---- */

static void by_load_alone(void)
{
	open_node(NULL, NULL);
	worker(1, "http://10.0.0.1:8000", one);
	worker(7, "http://10.0.0.7:8000", one);
	worker(8, "http://10.0.0.8:8000", one);
	holds(7, 1, 8);
	struct ask *other = ask_on("/v1/completions", 1000, 4), *a[2];
	uint64_t loaded = strcmp(other->to, "10.0.0.7:8000") ? 8 : 7, calm = 15 - loaded;
	/* Of those two let the loaded one be the one that holds the prompt. */
	if (loaded == 8)
		holds(8, 1, 8);
	a[0] = pair(1);
	is_str(decode(calm), "0/8/1",
		"a decode worker is chosen by load alone: who holds the prompt is not preferred");
	a[1] = pair(1);
	is_str(decode(loaded), "0/9/2", "the next one goes to the other one");
	gone(other);
	other = pair(1);
	ok(!strcmp(decode(7), "0/16/2") || !strcmp(decode(8), "0/16/2"),
		"equal prompts share no blocks of a decode worker, and charge no prompt tokens");
	is_str(prefill(1), "96/8/3",
		"of a prefill worker they share them, and charge what is to be computed");
	is_str(a[0]->prefiller, "10.0.0.1:8000", "who prefills is named");
	is_u64(a[0]->set_cnt, 2, "beside the destination, and nothing else");
	gone(other);
	gone(a[0]);
	gone(a[1]);
	close_node("by load alone");
}

/* The second rank of the only prefill worker has no port. While its first one is loaded the prefill leg of
 * every pair fails, twice a request: then the decode booking is undone, unless prefill was asked first. */
static void in_turns(void)
{
	open_node(NULL, ports);
	x.ports[KVP_PLAN_PREFILL] = KVP_POOL_RANK_PORTS;
	worker(1, "http://10.0.0.1:65535", two);
	worker(7, "http://10.0.0.7:8000", two);
	struct ask *first = pair(1);
	for (uint32_t i = 0; !first->routed && i < 20; i++) {
		gone(first);
		first = pair(1 + i);
	}
	uint64_t undone = counted(KVP_CTR_EPP_PLAN_UNDONE), cnt = 0, turns = x.pair_turn;
	is_str(first->prefiller, "10.0.0.1:65535", "the rank that has a port");
	for (uint32_t i = 0; i < 20; i++) {
		struct ask *a = pair(1000 + 100 * i);
		cnt += a->status == 503;
		gone(a);
	}
	is_u64(cnt, 20, "of twenty requests none has a prefill worker");
	is_u64(x.pair_turn - turns, 40, "and each of them begins anew, once");
	is_u64(counted(KVP_CTR_EPP_PLAN_UNDONE) - undone, 20, "neither leg is systematically first");
	gone(first);
	close_node("in turns");
}

static void ranks_of_legs(void)
{
	open_node(NULL, ports);
	x.ports[KVP_PLAN_PREFILL] = KVP_POOL_RANK_PORTS;
	worker(1, "http://10.0.0.1:8000", two);
	worker(7, "http://10.0.0.7:8000", two);
	struct ask *a[4];
	uint32_t port[2] = {0, 0}, rank[2] = {0, 0};
	for (uint32_t i = 0; i < 4; i++) {
		a[i] = pair(1 + 100 * i);
		is_str(a[i]->to, "10.0.0.7:8000", "ports are of prefill ranks: %u goes to the sidecar's", i);
		ok(strlen(a[i]->rank) == 1 && !a[i]->first_rank[0], "a header names the decode rank");
		rank[a[i]->rank[0] == '1']++;
		port[!strcmp(a[i]->prefiller, "10.0.0.1:8001")]++;
	}
	ok(rank[0] == 2 && rank[1] == 2 && port[0] == 2 && port[1] == 2, "ranks of both are used alike");
	respond(a[0], "10.0.0.7:8000");
	is_u64(counted(KVP_CTR_EPP_MISMATCH), 0, "who was named has served");
	for (int i = 0; i < 4; i++)
		gone(a[i]);
	worker(7, "http://10.0.0.7:8000", one);
	a[0] = pair(1);
	is_str(a[0]->rank, "", "a decode worker of one rank: no header");
	gone(a[0]);
	close_node("ranks of legs");
	open_node(NULL, (const char *const[]){"KVPICK_EPP_DP_ROUTING=header", NULL});
	worker(1, "http://10.0.0.1:8000", (struct ranks){3, 1});
	worker(7, "http://10.0.0.7:8000", (struct ranks){5, 1});
	a[0] = pair(1);
	is_str(a[0]->rank, "5", "by headers: the rank of the decode leg");
	is_str(a[0]->first_rank, "3", "and that of the prefill leg");
	gone(a[0]);
	a[0] = ask_on("/v1/embeddings", 1, TOK);
	ok(!strcmp(a[0]->rank, "5") && !a[0]->first_rank[0], "a decode worker alone: its own only");
	gone(a[0]);
	close_node("ranks in headers");
}

static void one_engine(void)
{
	open_node(NULL, (const char *const[]){"KVPICK_EPP_FALLBACK_ENDPOINTS=3", NULL});
	worker(1, "http://10.0.0.7:8000", one);
	worker(7, "http://10.0.0.7:8000", one);
	struct ask *a = pair(1);
	ok(!strcmp(a->to, "10.0.0.7:8000") && !a->prefiller[0],
		"two workers that are one engine: no prefill header");
	is_u64(counted(KVP_CTR_EPP_PLAN_ONE_PLACE), 1, "counted");
	gone(a);
	worker(8, "http://10.0.0.8:8000", one);
	worker(9, "http://10.0.0.9:8000", one);
	a = pair(1);
	ok(!strchr(a->to, ','), "a pair has one destination, whatever else there is");
	gone(a);
	close_node("one engine");
}

static void conditional(void)
{
	open_node(NULL, (const char *const[]){"DYN_ROUTER_CONDITIONAL_DISAGG=true", NULL});
	worker(1, "http://10.0.0.1:8000", one);
	worker(7, "http://10.0.0.7:8000", one);
	worker(8, "http://10.0.0.8:8000", one);
	holds(7, 1, 7);
	struct ask *a = pair(1);
	ok(!strcmp(a->to, "10.0.0.7:8000") && !a->prefiller[0],
		"who holds most of the prompt prefills the rest");
	is_str(decode(7), "4/8/1", "and is charged with that");
	is_str(prefill(1), "0/0/0", "the preview of the other leg leaves no trace");
	respond(a, "");
	respond_body(a, "x", 0);
	is_str(decode(7), "0/8/1", "until the first byte");
	is_u64(counted(KVP_CTR_EPP_PREFILL_OK), 1, "counted");
	gone(a);
	a = pair(500);
	is_str(a->prefiller, "10.0.0.1:8000", "what nobody holds is prefilled remotely");
	is_u64(counted(KVP_CTR_EPP_PLAN_LOCAL) * 10 + counted(KVP_CTR_EPP_PLAN_REMOTE), 11, "counted");
	gone(a);
	a = ask_on("/v1/responses", 1, TOK);
	ok(!a->prefiller[0] && counted(KVP_CTR_EPP_PLAN_DECODE_ONLY) == 1,
		"the path decides before the policy");
	gone(a);
	cfg.eff.overlap_score_credit = 0; /* nobody can say what is cached: always local */
	x.cond.policy = KVP_COND_BY_NON_CACHED;
	uint64_t same = 0, of_7 = 0;
	for (uint32_t i = 0; i < 20; i++) {
		a = pair(1000 + 100 * i);
		same += a->j.leg[KVP_PLAN_MAIN].worker_id == a->j.pinned_worker_id && !a->prefiller[0];
		of_7 += a->j.pinned_worker_id == 7;
		gone(a);
	}
	ok(same == 20 && of_7 > 0 && of_7 < 20, "of two idle ones the one that was previewed is booked");
	x.cond.policy = KVP_COND_BY_ISL;
	x.cond.has_decode_gate = KVP_YES;
	a = pair(1);
	is_str(a->prefiller, "10.0.0.1:8000", "behind the gate a decode worker that may be busy does not");
	is_u64(counted(KVP_CTR_EPP_PLAN_VETOED), 1, "counted");
	gone(a);
	close_node("conditional");
}

/* ---- who needs a prefill worker ---- */

static void paths(void)
{
	open_node(NULL, NULL);
	worker(7, "http://10.0.0.7:8000", one);
	struct ask *a = ask_on("/v1/embeddings?to=/v1/completions", 1, TOK);
	is_str(a->to, "10.0.0.7:8000", "a path that no sidecar shares: a decode worker alone");
	ok(strcmp(decode(7), "0/0/1") > 0 && counted(KVP_CTR_EPP_PLAN_DECODE_ONLY) == 1,
		"it is charged with the prompt: %s", decode(7));
	respond(a, "");
	respond_body(a, "x", 0);
	is_str(decode(7), "0/0/1", "until the first byte");
	gone(a);
	a = begin_as("GET", "/v1/models", 1);
	is_str(a->to, "10.0.0.7:8000", "a request without a body needs no prefill worker");
	is_str(decode(7), "0/0/0", "and books nothing");
	gone(a);
	a = begin_as("DELETE", "/v1/completions", 1);
	is_str(a->to, "10.0.0.7:8000", "whatever its path is");
	gone(a);
	a = begin_as("POST", "/v1/completions", 1);
	is_u64((uint64_t)a->status, 400, "one that ought to have a body is told so");
	gone(a);
	a = begin_as("POST", "/v1/completions", 0);
	send_prompt(a, 1, TOK);
	ok(a->status == 503 && !strcmp(a->text, "no prefill endpoints available"), "a pair needs one: %s",
		a->text);
	gone(a);
	cfg.enforce_disagg = 0;
	a = pair(1);
	ok(!strcmp(a->to, "10.0.0.7:8000") && !a->prefiller[0] && !strcmp(decode(7), "32/8/1"),
		"unless the decode worker may do both: %s", decode(7));
	is_u64(counted(KVP_CTR_EPP_PLAN_FALLBACK), 1, "counted");
	gone(a);
	kvp_selection_local_worker_gone(node, 7);
	worker(1, "http://10.0.0.1:8000", one);
	a = ask_on("/v1/embeddings", 1, TOK);
	ok(a->status == 503 && !strcmp(a->text, "no decode endpoints available"),
		"without a decode worker: %s", a->text);
	gone(a);
	close_node("paths");
}

/* ---- how it ends ---- */

static void handed_off(void)
{
	open_node(NULL, NULL);
	worker(1, "http://10.0.0.1:8000", one);
	worker(7, "http://10.0.0.7:8000", one);
	/* how: what the response has come to when the stream is gone */
	static const char *const name[] = {"before a response", "after its headers", "after its first byte",
		"after its end", "twice at its end"};
	for (int how = 0; how < 5; how++) {
		struct ask *a = pair(1 + 100 * (uint32_t)how);
		uint64_t freed = counted(KVP_CTR_EPP_FREE_OK), off = counted(KVP_CTR_EPP_PLAN_HANDOFF);
		ok(a->routed == 1 && !strcmp(prefill(1), "32/8/1") && !strcmp(decode(7), "0/8/1"),
			"both are booked");
		if (how > 0)
			respond(a, "10.0.0.7:8000");
		if (how > 0) {
			respond_body(a, "", 0);
			is_str(prefill(1), "32/8/1", "headers and an empty part hand nothing off");
		}
		if (how > 1) {
			respond_body(a, "x", 0);
			is_str(prefill(1), "0/0/0", "the first byte frees all of the prefill booking");
			is_str(decode(7), "0/8/1", "and nothing of the other one");
			respond_body(a, "y", 0);
		}
		if (how > 2)
			respond_body(a, "", 1);
		if (how > 3)
			respond_body(a, "", 1);
		gone(a);
		is_u64(counted(KVP_CTR_EPP_FREE_OK) - freed, 2, "gone %s: each booking is freed once",
			name[how]);
		is_u64(counted(KVP_CTR_EPP_PLAN_HANDOFF) - off, how > 1, "gone %s: handed off or not",
			name[how]);
	}
	is_u64(counted(KVP_CTR_EPP_PLAN_UNDONE), 0, "what was published is not undone");
	close_node("handed off");
}

/* waiting begins a request whose prefill leg waits: another one holds the only prefill worker. */
static struct ask *waiting(struct ask **busy)
{
	static const struct kvp_local_cfg queue = {.queue = KVP_LOCAL_FCFS, .queue_threshold = 0.5};
	open_node(&queue, NULL);
	worker(1, "http://10.0.0.1:8000", one);
	worker(7, "http://10.0.0.7:8000", one);
	*busy = pair(1);
	ok((*busy)->routed == 1, "one request prefills");
	struct ask *a = pair(200);
	ok(!a->routed && !a->status && x.queued_cnt == 1, "the next one waits for that");
	is_str(decode(7), "0/16/2", "with its decode worker booked");
	return a;
}

static void waits(void)
{
	struct ask *busy, *a = waiting(&busy);
	respond(busy, "");
	respond_body(busy, "x", 0);
	ok(kvp_epp_poll(&x) == 1 && a->routed == 1, "the handoff of the first one lets it go");
	is_str(a->prefiller, "10.0.0.1:8000", "with both workers");
	gone(busy);
	gone(a);
	close_node("a turn that comes");
	a = waiting(&busy);
	gone(a);
	is_str(decode(7), "0/8/1", "a client that leaves while it waits: its decode booking is freed");
	is_u64(x.queued_cnt, 0, "and it waits no more");
	gone(busy);
	ok(!kvp_epp_poll(&x), "nobody is let go");
	close_node("a client that leaves");
	a = waiting(&busy);
	gone(busy);
	kvp_selection_tend(node);
	is_str(prefill(1), "32/8/1", "its turn has come, and it has not heard of that:");
	gone(a);
	is_str(prefill(1), "0/0/0", "a client that leaves then: what was booked for it is freed");
	is_str(decode(7), "0/0/0", "and its decode booking");
	close_node("a client that leaves with its turn");
	a = waiting(&busy);
	kvp_stream_shut_down(&a->j.stream);
	kvp_stream_shut_down(&busy->j.stream);
	ok(a->status == 503 && !strcmp(decode(7), "0/8/1"),
		"the process ends: who waits is refused, and nothing kept");
	respond(busy, "");
	respond_body(busy, "x", 1);
	is_str(decode(7), "0/0/0", "who has been routed is served to the end");
	gone(a);
	gone(busy);
	close_node("a drain");
	a = waiting(&busy);
	kvp_selection_local_worker_gone(node, 7);
	worker(8, "http://10.0.0.8:8000", one);
	gone(busy);
	ok(kvp_epp_poll(&x) == 1 && !strcmp(a->to, "10.0.0.8:8000"),
		"its decode worker goes while it waits: the plan begins anew with another one");
	is_str(prefill(1), "32/8/1", "what stood of the first plan is freed");
	is_u64(counted(KVP_CTR_EPP_PLAN_RESTARTED), 1, "counted");
	gone(a);
	close_node("a worker that goes");
}

/* kept: the tokenizer's answer is copied once, whoever has to wait, as often as that may be. */
static void kept(void)
{
	uint32_t token[] = {7, 8, 9};
	struct kvp_ask_tokens t = {.token = token, .token_cnt = 3};
	struct ask *busy, *a = waiting(&busy);
	ok(!kvp_epp_kept(&a->j), "without a tokenizer nothing is kept");
	ok(kvp_epp_keep_tokens(&a->j, &t) && kvp_epp_kept(&a->j), "a leg that waits keeps its tokens");
	const uint32_t *first = a->j.kept_token;
	ok(kvp_epp_keep_tokens(&a->j, &t) && a->j.kept_token == first,
		"the other one does not copy them again");
	ok(kvp_epp_keep_tokens(&a->j, kvp_epp_kept(&a->j)) && a->j.kept_token == first && first[2] == 9,
		"neither does one that waits once more");
	gone(a);
	gone(busy);
	close_node("kept tokens");
}

static void of_a_session(void)
{
	static const struct kvp_local_cfg local = {
		.queue = KVP_LOCAL_FCFS, .queue_threshold = 0.5, .session_ttl_ns = 1000000000};
	open_node(&local, NULL);
	worker(1, "http://10.0.0.1:8000", one);
	worker(7, "http://10.0.0.7:8000", one);
	struct ask *busy = pair(1), *a, *b, *c;
	session = "s";
	a = pair(200);
	b = pair(300);
	c = pair(400);
	session = NULL;
	ok(x.queued_cnt == 1 && x.parked && x.parked->park && !x.parked->park->park,
		"the first request of a session waits for its worker, two more for the session");
	is_str(decode(7), "0/32/4", "the decode workers of all are booked");
	ok(!kvp_epp_retry(&x), "they wait on");
	gone(c);
	ok(x.parked && !x.parked->park, "one that leaves waits no more");
	is_str(decode(7), "0/24/3", "and its decode booking is freed");
	gone(busy);
	ok(kvp_epp_poll(&x) == 1 && a->routed, "the first one has its worker");
	kvp_epp_retry(&x);
	ok(!x.parked && x.queued_cnt == 1, "the second one waits for that");
	gone(a);
	ok(kvp_epp_poll(&x) == 1 && b->routed, "and gets it");
	gone(b);
	close_node("a session");
}

/* changed: a pair waits while its decode worker changes; what it is told in the end. */
enum change { MOVED, AWAY };
static void changed(const char *name, const char *to, enum change what)
{
	struct ask *busy, *a = waiting(&busy);
	struct kvp_local_worker w = {.worker_id = 7,
		.role = KVP_PART_DECODE,
		.model = str("m"),
		.group = str(KVP_EPP_GROUP),
		.endpoint = str("http://10.0.0.70:8000"),
		.block_size = 4,
		.size = 1,
		.max_num_batched_tokens = TOK};
	if (what == AWAY) {
		kvp_selection_local_worker_gone(node, 7);
		worker(7, "http://10.0.0.7:8000", one);
	} else {
		is_u64((uint64_t)kvp_selection_local_worker_update(node, &w), 200, "another address");
	}
	gone(busy);
	kvp_epp_poll(&x);
	is_str(a->to, to, "%s", name);
	is_str(decode(7), "0/8/1", "%s: it is booked", name);
	is_u64(counted(KVP_CTR_EPP_PLAN_RESTARTED), 1, "%s: by a second plan", name);
	gone(a);
	close_node(name);
}

/* A prefill worker that goes after its booking, while the decode leg waits; the plan began anew before. */
static void prefill_lost(void)
{
	static const struct kvp_local_cfg queue = {.queue = KVP_LOCAL_FCFS, .queue_threshold = 0.5};
	for (int enforce = 0; enforce < 2; enforce++) {
		open_node(&queue, NULL);
		cfg.enforce_disagg = enforce;
		worker(1, "http://10.0.0.1:8000", one);
		worker(7, "http://10.0.0.7:8000", one);
		struct ask *busy = ask_on("/v1/embeddings", 1, TOK), *a = pair(200);
		ok(!a->routed && !a->status && x.queued_cnt == 1, "a pair waits for its decode worker");
		a->j.is_restarted = 1;
		kvp_selection_local_worker_gone(node, 1);
		worker(1, "http://10.0.0.1:8000", one);
		gone(busy);
		kvp_epp_poll(&x);
		if (enforce)
			is_u64((uint64_t)a->status, 503, "a prefill worker lost twice: refused");
		else
			ok(!strcmp(a->to, "10.0.0.7:8000") && !a->prefiller[0],
				"or the decode worker does both");
		is_u64(x.queued_cnt, 0, "nobody waits any more");
		gone(a);
		close_node("prefill lost");
	}
}

static void too_late(void)
{
	for (int enforce = 0; enforce < 2; enforce++) {
		struct ask *busy, *a = waiting(&busy);
		cfg.enforce_disagg = enforce;
		gone(a);
		cfg.epp_selection_deadline_ms = 1;
		a = pair(300);
		for (uint64_t end = kvp_clock_mono_ns() + 5000000000ull;
			!a->routed && !a->status && kvp_clock_mono_ns() < end;)
			kvp_loop_run_once(x.loop, 1000000);
		if (enforce) {
			is_u64((uint64_t)a->status, 429, "no prefill worker in time: refused");
			is_str(decode(7), "0/8/1", "and the decode booking is undone");
		} else {
			ok(!strcmp(a->to, "10.0.0.7:8000") && !a->prefiller[0],
				"or the decode worker does both");
			is_str(decode(7), "32/16/2", "and is charged with both");
		}
		is_u64(x.queued_cnt, 0, "nobody waits any more");
		gone(a);
		gone(busy);
		close_node("too late");
	}
	struct ask *busy, *a = waiting(&busy), *alone;
	cfg.enforce_disagg = 0;
	alone = ask_on("/v1/embeddings", 1, TOK);
	ok(alone->routed == 1, "its decode worker becomes busy, too");
	kvp_plan_late(&a->j.plan);
	is_u64((uint64_t)a->status, 429, "who is late does not wait for the decode worker to do both");
	is_u64(x.queued_cnt, 0, "nobody waits any more");
	gone(a);
	gone(busy);
	gone(alone);
	close_node("late twice");
}

/* ---- leases ---- */

static void leases(void)
{
	open_node(NULL, (const char *const[]){"KVPICK_LEASE_SECS=2", NULL});
	worker(1, "http://10.0.0.1:8000", one);
	worker(7, "http://10.0.0.7:8000", one);
	struct ask *a = pair(1), *b = pair(100);
	kvp_epp_renew(&x);
	is_u64(counted(KVP_CTR_EPP_RENEWED), 0, "leases that are new are not renewed");
	struct kvp_leg *leg[] = {&a->j.leg[0], &a->j.leg[1], &b->j.leg[0], &b->j.leg[1]};
	for (int i = 0; i < 4; i++)
		leg[i]->renew_ns = 1;
	kvp_epp_renew(&x);
	is_u64(counted(KVP_CTR_EPP_RENEWED), 4, "old ones are, those of both legs");
	respond(a, "");
	respond_body(a, "x", 0);
	gone(b);
	for (struct kvp_leg *l = x.renew_first; l; l = l->later)
		l->renew_ns = 1;
	kvp_epp_renew(&x);
	is_u64(counted(KVP_CTR_EPP_RENEWED), 5, "one that is freed is not renewed any more");
	kvp_selection_local_worker_gone(node, 7);
	for (struct kvp_leg *l = x.renew_first; l; l = l->later)
		l->renew_ns = 1;
	kvp_epp_renew(&x);
	is_u64(counted(KVP_CTR_EPP_LEASE_LOST), 1, "the worker has gone: so has the lease");
	gone(a);
	close_node("leases");
}

/* ---- who served ---- */

static void served(void)
{
	open_node(NULL, NULL);
	worker(1, "http://10.0.0.1:8000", one);
	worker(7, "http://10.0.0.7:8000", two);
	worker(8, "http://10.0.0.8:8000", two);
	struct ask *a = pair(1);
	uint64_t home = a->j.leg[KVP_PLAN_MAIN].worker_id, other = 15 - home;
	uint32_t rank = a->j.leg[KVP_PLAN_MAIN].dp_rank;
	const char *at[] = {home == 7 ? "10.0.0.8:8000" : "10.0.0.7:8000", a->to};
	for (int i = 0; i < 20; i++)
		respond(a, at[i % 2]);
	is_str(decode(other), "0/8/1", "who served is told twenty times: the first one counts");
	is_str(decode(home), "0/0/0", "and nothing is left where it was booked first");
	is_u64(a->j.leg[KVP_PLAN_MAIN].dp_rank, rank, "behind one port the rank is that which was asked for");
	is_u64(strlen(a->j.leg[KVP_PLAN_MAIN].id), strlen("00000000-0000-0000-0000-000000000000/decode~1"),
		"its id has one suffix");
	is_str(prefill(1), "32/8/1", "the prefill booking stays");
	for (struct kvp_leg *l = x.renew_first; l; l = l->later)
		l->renew_ns = 1;
	kvp_epp_renew(&x);
	is_u64(counted(KVP_CTR_EPP_RENEWED) * 10 + counted(KVP_CTR_EPP_LEASE_LOST), 20,
		"leases of both are renewed");
	is_u64(counted(KVP_CTR_EPP_MOVED) * 10 + counted(KVP_CTR_EPP_MISMATCH), 11, "counted once");
	gone(a);
	/* An id that leaves no room for the suffix. */
	a = pair(1);
	struct kvp_leg *l = &a->j.leg[KVP_PLAN_MAIN];
	struct kvp_reserve_request q;
	struct kvp_select_answer got;
	kvp_selection_free(node, (struct kvp_str){l->id, l->id_len});
	memset(l->id, 'i', KVP_EPP_ID_MAX);
	l->id_len = KVP_EPP_ID_MAX - 2;
	kvp_reserve_request_init(&q);
	q.role = KVP_PART_DECODE;
	q.model = str("m");
	q.group = str(KVP_EPP_GROUP);
	q.worker_id = l->worker_id;
	q.dp_rank = l->dp_rank;
	q.selection_id = (struct kvp_str){l->id, l->id_len};
	static const uint64_t seq = 1;
	q.prompt.form = KVP_PROMPT_HASHES;
	q.prompt.seq_hash = &seq;
	q.prompt.seq_hash_cnt = 1;
	q.prompt.has_isl = KVP_YES;
	q.prompt.isl_tok = 4;
	is_u64((uint64_t)kvp_selection_reserve(node, &q, &got), 201, "a booking with a long id: %s",
		kvp_selection_error(node));
	respond(a, l->worker_id == 7 ? "10.0.0.8:8000" : "10.0.0.7:8000");
	ok(l->id_len == KVP_EPP_ID_MAX - 2 && counted(KVP_CTR_EPP_NOT_MOVED) == 1,
		"is not moved, and nothing is overwritten");
	gone(a);
	close_node("who served");
}

/* reported answers a window of requests with "all of it was cached": 1 = that is found to be a mismatch. */
static int reported(const char *path, const char *body)
{
	x.mismatch = (struct kvp_mismatch){.seen = 0};
	for (uint32_t i = 0; i < KVP_MISMATCH_WINDOW; i++) {
		struct ask *a = begin_as("POST", path, 0);
		message(a, (struct kvp_extproc_req){.kind = KVP_EXTPROC_REQUEST_BODY,
				   .end_of_stream = 1,
				   .body = {body, (uint32_t)strlen(body)}});
		respond(a, "");
		respond_body(a,
			"{\"usage\":{\"prompt_tokens\":4,\"completion_tokens\":1,"
			"\"prompt_tokens_details\":{\"cached_tokens\":4}}}",
			1);
		gone(a);
	}
	return x.mismatch.stands;
}

static void predicted(void)
{
	static const char tokens[] = "{\"token_ids\":[1,2,3,4]}";
	static const char *const more[] = {"DYN_ROUTER_CONDITIONAL_DISAGG=true", NULL};
	open_node(NULL, NULL);
	worker(1, "http://10.0.0.1:8000", one);
	worker(7, "http://10.0.0.7:8000", one);
	ok(!reported("/inference/v1/generate", tokens), "what decode workers hold is not known: no mismatch");
	ok(!reported("/v1/completions", "{\"prompt\":[1,2,3,4]}"), "of a pair nothing is compared");
	is_u64(counted(KVP_CTR_EPP_REPORTED_TOK), 8 * KVP_MISMATCH_WINDOW, "what they report is counted");
	close_node("not predicted");
	open_node(NULL, more);
	worker(1, "http://10.0.0.1:8000", one);
	worker(7, "http://10.0.0.7:8000", one);
	ok(reported("/inference/v1/generate", tokens),
		"with their events it is: reports that differ are noticed");
	ok(!reported("/v1/responses", "{\"input\":\"x\"}"),
		"not those of a prompt that counts by its length");
	close_node("predicted");
}

int main(void)
{
	by_load_alone();
	in_turns();
	ranks_of_legs();
	one_engine();
	conditional();
	paths();
	handed_off();
	waits();
	kept();
	of_a_session();
	changed("a decode worker with another address", "10.0.0.70:8000", MOVED);
	changed("a decode worker that was away", "10.0.0.7:8000", AWAY);
	prefill_lost();
	too_late();
	leases();
	served();
	predicted();
	return done();
}
