/* Thousands of streams whose messages come in any order and that end in every way, while workers come and go:
 * no booking, load, lease, place in a queue or memory of theirs is left. */
#include "tests/legs_fixture.h"

#define AT_ONCE 24u
#define STREAMS 20000u

static struct kvp_rng rng;
static uint64_t routed, refused, queued, parked;

static uint32_t below(uint32_t n)
{
	return (uint32_t)(kvp_rng_next(&rng) % n);
}

/* any is one stream that begins: with a body or without, for one or two workers, of a session or of none. */
static struct ask *any(void)
{
	static const char *const path[] = {"/v1/completions", "/v1/completions", "/v1/completions",
		"/inference/v1/generate", "/v1/models"};
	const char *to = path[below(5)];
	int ends = to[4] == 'm';
	session = below(2) ? NULL : below(2) ? "a" : "b";
	struct ask *a = begin_as(ends ? "GET" : "POST", to, ends);
	session = NULL;
	if (!ends && below(8))
		send_prompt(a, 1 + 100 * below(4), 4 * (1 + below(TOK / 4)));
	return a;
}

static void step(struct ask *a)
{
	static const char *const at[] = {"10.0.0.7:8000", "10.0.0.8:8000", "10.9.9.9:1", ""};
	struct kvp_stream *s = &a->j.stream;
	switch (below(12)) {
	case 0:
		kvp_plan_late(&a->j.plan);
		break;
	case 1:
		kvp_stream_half_closed(s);
		break;
	case 2:
		if (!below(4))
			kvp_stream_garbled(s);
		break;
	case 3:
		if (!below(4))
			kvp_stream_shut_down(s);
		break;
	case 4:
		kvp_stream_body_late(s);
		break;
	case 5:
		message(a, (struct kvp_extproc_req){.kind = below(2) ? KVP_EXTPROC_REQUEST_TRAILERS
								     : KVP_EXTPROC_RESPONSE_TRAILERS});
		break;
	case 6:
		message(a, (struct kvp_extproc_req){.kind = KVP_EXTPROC_RESPONSE_BODY,
				   .observability_mode = !below(4),
				   .body = KVP_EXTPROC_STR("x")});
		break;
	case 7:
		send_prompt(a, 1, 4);
		break;
	case 8:
	case 9:
		respond(a, at[below(4)]);
		break;
	default:
		respond_body(a, below(2) ? "x" : "", !below(3));
		break;
	}
}

static void flap(void)
{
	static const char *const at[] = {"", "http://10.0.0.1:8000", "http://10.0.0.2:8000"};
	uint64_t id = below(2) ? 1 + below(2) : 7 + below(2);
	char decodes[40];
	snprintf(decodes, sizeof(decodes), "http://10.0.0.%u:8000", (unsigned)id);
	if (below(3))
		kvp_selection_local_worker_gone(node, id);
	else
		put_worker(id, id < 5 ? at[id] : decodes, one);
}

static void leave(struct ask **a)
{
	routed += (uint64_t)(*a)->routed;
	refused += (*a)->status != 0;
	gone(*a);
	*a = NULL;
}

static void in_any_order(void)
{
	static const struct kvp_local_cfg local = {
		.queue = KVP_LOCAL_FCFS, .queue_threshold = 0.5, .session_ttl_ns = 1000000000};
	static struct ask *a[AT_ONCE];
	kvp_rng_seed(&rng, tap_seed(20260130));
	open_node(&local, (const char *const[]){"DYN_ENFORCE_DISAGG=false", NULL});
	for (uint64_t id = 1; id <= 2; id++) {
		char at[40];
		snprintf(at, sizeof(at), "http://10.0.0.%u:8000", (unsigned)id);
		worker(id, at, one);
		snprintf(at, sizeof(at), "http://10.0.0.%u:8000", (unsigned)id + 6);
		worker(id + 6, at, one);
	}
	for (uint32_t begun = 0, turn = 0; begun < STREAMS; turn++) {
		uint32_t i = below(AT_ONCE);
		if (!a[i]) {
			a[i] = any();
			begun++;
		} else if (below(4)) {
			step(a[i]);
		} else {
			leave(&a[i]);
		}
		queued += x.queued_cnt;
		parked += x.parked != NULL;
		if (!below(3))
			kvp_epp_poll(&x);
		if (!below(3))
			kvp_epp_retry(&x);
		kvp_epp_free_again(&x);
		if (!below(16))
			flap();
	}
	for (uint32_t i = 0; i < AT_ONCE; i++)
		if (a[i])
			leave(&a[i]);
	printf("# routed %u, refused %u, handed off %u, undone %u, begun anew %u, moved %u, waits seen %u, "
	       "%u\n",
		(unsigned)routed, (unsigned)refused, (unsigned)counted(KVP_CTR_EPP_PLAN_HANDOFF),
		(unsigned)counted(KVP_CTR_EPP_PLAN_UNDONE), (unsigned)counted(KVP_CTR_EPP_PLAN_RESTARTED),
		(unsigned)counted(KVP_CTR_EPP_MOVED), (unsigned)queued, (unsigned)parked);
	ok(routed > STREAMS / 10 && refused > STREAMS / 100, "many were routed, and many refused");
	ok(counted(KVP_CTR_EPP_PLAN_HANDOFF) > 100 && counted(KVP_CTR_EPP_PLAN_UNDONE) > 100 &&
			queued > 100 && counted(KVP_CTR_EPP_PLAN_RESTARTED) > 0 &&
			counted(KVP_CTR_EPP_MOVED) > 10,
		"in every way");
	is_u64(counted(KVP_CTR_EPP_BOOKED), routed - counted(KVP_CTR_EPP_UNBOOKED),
		"each answer was one booking");
	close_node("in any order");
}

int main(void)
{
	in_any_order();
	return done();
}
