/* The floor under the loads of a newcomer: as told, falling in a straight line, giving way to live
 * bookings. */
#include "daemons/common/select_priv.h"
#include "daemons/peer/warm.c"
#include "shm/sweep.h"
#include "tests/tap.h"

#include <stdlib.h>

#define S 1000000000ull
#define T0 (1000 * S)

static struct kvp_mirror m;
static struct kvp_selection *s;
static struct kvp_warm *w;

static struct kvp_str str(const char *t)
{
	return (struct kvp_str){t, strlen(t)};
}

static void add_worker(uint64_t id)
{
	struct kvp_local_worker x = {.worker_id = id,
		.model = str("m"),
		.group = str("g"),
		.endpoint = str("http://w"),
		.block_size = 4,
		.size = 1,
		.is_eagle = KVP_NO};
	if (kvp_selection_local_worker(s, &x) != 201)
		ok(0, "worker registered");
}

static void node_open(void)
{
	struct kvp_local_cfg cfg = {0};
	s = kvp_selection_open_local(&cfg);
	add_worker(1);
	kvp_mirror_open(&m, s->region, s->owner, s->ctr, 99);
	w = kvp_warm_open(&m);
}

static void node_close(void)
{
	kvp_warm_close(w);
	is_u64(kvp_book_check(&s->region->book), 0, "nothing is broken");
	kvp_mirror_close(&m);
	kvp_selection_close(s);
}

/* blocks * 1000 + tokens of a worker */
static uint64_t load(uint64_t worker)
{
	struct kvp_load_row row[4] = {{0}};
	uint32_t n;
	kvp_selection_loads(s, KVP_PART_AGGREGATED, str("m"), str("g"), row, 4, &n);
	for (uint32_t i = 0; i < n; i++)
		if (row[i].worker_id == worker)
			return row[i].decode_blk * 1000 + row[i].prefill_tok;
	return UINT64_MAX;
}

static int take(const char *json, uint64_t now)
{
	return kvp_warm_take(w, json, strlen(json), now);
}

#define PART(rows) "[{\"model_name\":\"m\",\"routing_group\":\"g\",\"loads\":[" rows "]}]"
#define ROW(worker, tok, blk)                                                                                \
	"{\"worker_id\":" worker ",\"dp_rank\":0,\"potential_prefill_tokens\":" tok                          \
	",\"potential_decode_blocks\":" blk ",\"active_requests\":3}"

static void shares(void)
{
	const uint64_t n[] = {0, 1, 11, 12, 13, 1000003, 1ull << 60, UINT64_MAX / 12 + 1, UINT64_MAX};
	for (size_t k = 0; k < sizeof(n) / sizeof(n[0]); k++) {
		uint64_t sum = 0, bad = 0;
		for (uint32_t i = 0; i < KVP_WARM_SLICES; i++) {
			sum += share(n[k], i);
			bad += share(n[k], i) > n[k] / KVP_WARM_SLICES + 1;
		}
		ok(sum == n[k] && !bad, "shares of %" PRIu64 " are even and all of it", n[k]);
	}
}

static void falls(void)
{
	node_open();
	ok(take(PART(ROW("1", "240", "60")), T0) == KVP_OK, "an answer is taken");
	is_u64(load(1), 0, "nothing yet");
	is_u64(kvp_warm_tend(w, T0), KVP_WARM_SLICES, "twelve slices");
	is_u64(load(1), 60240, "the whole load");
	int bad = 0;
	for (uint64_t sec = 0; sec <= 60; sec++) {
		kvp_warm_tend(w, T0 + sec * S);
		uint64_t slices = (60 - sec + 4) / 5; /* 5 s each, rounded up */
		bad += load(1) != slices * 5000 + slices * 20;
	}
	ok(!bad, "it falls by a twelfth every five seconds");
	is_u64(load(1), 0, "to nothing");
	is_u64(kvp_warm_tend(w, T0 + 61 * S), 0, "and stays so");
	ok(take(PART(ROW("1", "7", "0")), T0 + 70 * S) == KVP_OK, "a small one");
	kvp_warm_tend(w, T0 + 70 * S);
	is_u64(load(1), 0, "whose ids are too young to be used again is left out");
	node_close();
}

static void gives_way(void)
{
	static const uint64_t seq[30] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19,
		20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30};
	node_open();
	take(PART(ROW("1", "120", "60")), T0);
	kvp_warm_tend(w, T0);
	struct kvp_replica_event e = {.model = str("m"),
		.group = str("g"),
		.id = str("live"),
		.worker_id = 1,
		.router_id = 7,
		.block_size = 4,
		.kind = KVP_REPLICA_ADD,
		.seq = seq,
		.seq_cnt = 30,
		.track_prefill = 1,
		.has_hint = 1,
		.hint_tok = 60};
	kvp_mirror_apply(&m, KVP_PART_AGGREGATED, &e, T0);
	is_u64(load(1), 90180, "a replica tells of a booking of half as much: both count");
	kvp_warm_tend(w, T0);
	is_u64(load(1), 60120, "until slices give way to it");
	kvp_warm_tend(w, T0 + 30 * S);
	is_u64(load(1), 30060, "half of the time over: only the live one is left");
	e.kind = KVP_REPLICA_FREE;
	kvp_mirror_apply(&m, KVP_PART_AGGREGATED, &e, T0 + 31 * S);
	kvp_warm_tend(w, T0 + 31 * S);
	is_u64(load(1), 0, "slices that went do not come back");
	node_close();
}

static void later(void)
{
	node_open();
	take(PART(ROW("2", "120", "60") "," ROW("1", "0", "0")), T0);
	is_u64(kvp_warm_tend(w, T0), 0, "a worker that is not registered yet");
	add_worker(2);
	kvp_warm_tend(w, T0 + 30 * S);
	is_u64(load(2), 30060, "registers after half of the time: half of the load");
	kvp_warm_tend(w, T0 + 60 * S);
	is_u64(load(2), 0, "for the rest of it");
	take(PART(ROW("3", "120", "60")), T0 + 60 * S);
	kvp_warm_tend(w, T0 + 120 * S);
	add_worker(3);
	kvp_warm_tend(w, T0 + 121 * S);
	is_u64(load(3), 0, "too late: nothing");
	node_close();
}

static void refused(void)
{
	static const char *const bad[] = {"", "{}", "[7]", "[{}]",
		"[{\"model_name\":\"m\",\"routing_group\":\"g\"}]", PART("7"), PART("{}"),
		PART(ROW("-1", "1", "1")), PART(ROW("1", "1.5", "1")), PART(ROW("1", "5", "5") ",{}")};
	node_open();
	for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++)
		ok(take(bad[i], T0) == KVP_ERR_PROTO, "refused: %.50s", bad[i]);
	is_u64(kvp_warm_tend(w, T0), 0, "and nothing is taken");
	ok(take("[]", T0) == KVP_OK && take(PART(""), T0) == KVP_OK, "no load is an answer, too");
	node_close();
}

int main(void)
{
	shares();
	falls();
	gives_way();
	later();
	refused();
	return done();
}
