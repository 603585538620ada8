/* t_bindings — sessions' bindings told by replicas: whatever the order of messages, the last writer wins on
 * every node. */
#include "daemons/common/select_priv.h"
#include "daemons/peer/bindings.h"
#include <kvpick/clock.h>
#include "tests/tap.h"

#include <stdlib.h>
#include <string.h>

#define NODES 3
#define T0 5000000000000ull

static uint64_t rnd = 1;

static uint32_t some(uint32_t n)
{
	rnd = rnd * 6364136223846793005u + 1442695040888963407u;
	return (uint32_t)(rnd >> 33) % n;
}

static struct kvp_str str(const char *s)
{
	return (struct kvp_str){s, strlen(s)};
}

static struct kvp_selection *open_node(struct kvp_bindings *b, uint64_t router_id)
{
	struct kvp_local_cfg cfg = {.session_ttl_ns = 100000000000ull};
	struct kvp_selection *s = kvp_selection_open_local(&cfg);
	for (uint64_t id = 1; id <= 4; id++) {
		struct kvp_local_worker w = {.worker_id = id,
			.model = str("m"),
			.group = str("g"),
			.endpoint = str("http://w"),
			.block_size = 4,
			.start_rank = id == 4 ? 2 : 0,
			.size = 2,
			.is_eagle = KVP_NO};
		if (kvp_selection_local_worker(s, &w) != 201)
			ok(0, "worker registered");
	}
	kvp_bindings_open(b, s->region, s->ctr, router_id, 0);
	return s;
}

static struct kvp_replica_binding message(uint64_t worker, uint64_t sequence, uint64_t writer)
{
	return (struct kvp_replica_binding){.model = str("m"),
		.group = str("g"),
		.session = str("s"),
		.worker_id = worker,
		.has_rank = 1,
		.dp_rank = worker == 4 ? 2 : 0,
		.sequence = sequence,
		.writer_id = writer};
}

/* The worker a session is bound to, 0 = none. */
static uint64_t bound(struct kvp_bindings *b, const char *session, uint64_t now_ns, uint32_t *rank)
{
	struct kvp_affinity *a = &b->region->affinity;
	struct kvp_affinity_target t = {0, 0};
	kvp_affinity_query(a, kvp_affinity_key(a, 0, session, strlen(session)), now_ns, &t);
	*rank = t.dp_rank;
	return t.worker_id;
}

static void rules(void)
{
	struct kvp_bindings b;
	struct kvp_selection *s = open_node(&b, 100);
	uint32_t rank;
	struct kvp_replica_binding m = message(1, 10, 7), x;
	ok(kvp_bindings_apply(&b, KVP_PART_AGGREGATED, &m, T0) == KVP_OK, "a session is bound");
	is_u64(bound(&b, "s", T0, &rank), 1, "to the worker");
	is_u64(b.clock, 10, "the clock follows");
	x = message(2, 9, 8);
	ok(kvp_bindings_apply(&b, KVP_PART_AGGREGATED, &x, T0) == KVP_ERR_CLOSED, "an older one is ignored");
	x = message(2, 10, 6);
	ok(kvp_bindings_apply(&b, KVP_PART_AGGREGATED, &x, T0) == KVP_ERR_CLOSED, "so is a lesser writer's");
	x = message(2, 10, 8);
	ok(kvp_bindings_apply(&b, KVP_PART_AGGREGATED, &x, T0) == KVP_OK, "a greater writer's is newer");
	is_u64(bound(&b, "s", T0, &rank), 2, "and replaces");
	x = message(3, 30, 100);
	ok(kvp_bindings_apply(&b, KVP_PART_AGGREGATED, &x, T0) == KVP_ERR_EXISTS, "own ones are dropped");
	is_u64(b.clock, 10, "and move no clock");
	x = message(9, 40, 7);
	ok(kvp_bindings_apply(&b, KVP_PART_AGGREGATED, &x, T0) == KVP_ERR_NOTFOUND, "unknown worker");
	is_u64(b.clock, 40, "but the clock follows");
	x = message(1, 50, 7);
	x.dp_rank = 5;
	ok(kvp_bindings_apply(&b, KVP_PART_AGGREGATED, &x, T0) == KVP_ERR_NOTFOUND, "unknown rank");
	x = message(1, 60, 7);
	x.group = str("other");
	ok(kvp_bindings_apply(&b, KVP_PART_AGGREGATED, &x, T0) == KVP_ERR_NOTFOUND, "unknown partition");
	is_u64(b.clock, 50, "which moves no clock");
	ok(kvp_bindings_apply(&b, KVP_PART_PREFILL, &m, T0) == KVP_ERR_NOTFOUND, "of another role");
	x = message(4, 70, 7);
	x.has_rank = 0;
	ok(kvp_bindings_apply(&b, KVP_PART_AGGREGATED, &x, T0) == KVP_OK, "any rank of a worker");
	ok(bound(&b, "s", T0, &rank) == 4 && rank == 2, "is its first one");
	is_u64(bound(&b, "s", T0 + 99000000000ull, &rank), 4, "a binding lives as long as an idle one");
	is_u64(bound(&b, "s", T0 + 101000000000ull, &rank), 0, "and no longer");
	x = message(4, 80, 7);
	kvp_bindings_apply(&b, KVP_PART_AGGREGATED, &x, T0 + 50000000000ull);
	is_u64(bound(&b, "s", T0 + 101000000000ull, &rank), 4, "the same binding again renews it");
	kvp_bindings_close(&b);
	kvp_selection_close(s);
}

/* A replica that sends the greatest numbers there are; the others go on. */
static void poisoned(void)
{
	const uint64_t high[] = {UINT64_MAX, UINT64_MAX - 1, 1ull << 63,
		kvp_clock_real_ns() + 90000ull * 1000000000};
	struct kvp_bindings b;
	struct kvp_selection *s = open_node(&b, 100);
	struct kvp_affinity_target t = {1, 0};
	struct kvp_replica_binding m = message(1, 10, 7), x;
	uint64_t sequence;
	uint32_t rank;
	kvp_bindings_apply(&b, KVP_PART_AGGREGATED, &m, T0);
	for (size_t i = 0; i < sizeof(high) / sizeof(high[0]); i++) {
		x = message(2, high[i], 8);
		ok(kvp_bindings_apply(&b, KVP_PART_AGGREGATED, &x, T0) == KVP_ERR_LIMIT && b.clock == 10 &&
				bound(&b, "s", T0, &rank) == 1,
			"a sequence of %" PRIu64 " binds nothing and moves no clock", high[i]);
	}
	ok(kvp_bindings_stamp(&b, 0, str("s"), t, T0, &sequence) == KVP_OK && sequence == 11, "ours goes on");
	x = message(2, 12, 6);
	ok(kvp_bindings_apply(&b, KVP_PART_AGGREGATED, &x, T0) == KVP_OK && bound(&b, "s", T0, &rank) == 2,
		"a healthy replica binds the session anew");
	x = message(4, kvp_clock_real_ns() + 1000000000, 7);
	ok(kvp_bindings_apply(&b, KVP_PART_AGGREGATED, &x, T0) == KVP_OK,
		"nanoseconds of the time of day may be");
	ok(kvp_bindings_stamp(&b, 0, str("s"), (struct kvp_affinity_target){4, 2}, T0, &sequence) == KVP_OK &&
			sequence == x.sequence + 1,
		"and are followed");
	kvp_bindings_close(&b);
	kvp_selection_close(s);
}

/* Random writers; every node hears all messages of the others, in an order of its own per writer pair. */
static void converges(void)
{
	struct kvp_bindings b[NODES];
	struct kvp_selection *s[NODES];
	struct kvp_replica_binding log[600];
	uint32_t n = 0, at[NODES][NODES] = {{0}}, from[NODES][600], cnt[NODES] = {0};
	char name[600][8];
	for (uint32_t i = 0; i < NODES; i++)
		s[i] = open_node(&b[i], 100 + i);
	for (uint32_t step = 0; step < 4000; step++) {
		uint32_t i = some(NODES), j = some(NODES);
		if (some(3) == 0 && n < 600) { /* node i binds a session as a booking does, and tells it */
			struct kvp_affinity *a = &b[i].region->affinity;
			struct kvp_affinity_target t = {1 + some(3), some(2)}, other;
			uint64_t tag, sequence;
			snprintf(name[n], sizeof(name[n]), "s%u", some(10));
			struct kvp_affinity_key k = kvp_affinity_key(a, 0, name[n], strlen(name[n]));
			kvp_affinity_commit(
				a, k, t, KVP_AFFINITY_IS_SOFT, KVP_AFFINITY_KEEP, T0, &tag, &other);
			kvp_affinity_release(a, tag, T0);
			if (some(4) == 0 && at[i][j] < cnt[j] && i != j) /* a message comes in between */
				kvp_bindings_apply(&b[i], KVP_PART_AGGREGATED, &log[from[j][at[i][j]++]], T0);
			if (kvp_bindings_stamp(&b[i], 0, str(name[n]), t, T0, &sequence))
				continue;
			log[n] = message(t.worker_id, sequence, 100 + i);
			log[n].dp_rank = t.dp_rank;
			log[n].session = str(name[n]);
			from[i][cnt[i]++] = n++;
		} else if (i != j && at[i][j] < cnt[j]) {
			kvp_bindings_apply(&b[i], KVP_PART_AGGREGATED, &log[from[j][at[i][j]++]], T0);
		}
	}
	for (uint32_t i = 0; i < NODES; i++)
		for (uint32_t j = 0; j < NODES; j++)
			while (i != j && at[i][j] < cnt[j])
				kvp_bindings_apply(&b[i], KVP_PART_AGGREGATED, &log[from[j][at[i][j]++]], T0);
	uint32_t differ = 0, there = 0;
	for (uint32_t x = 0; x < 10; x++) {
		char session[8];
		uint32_t rank[NODES];
		uint64_t w[NODES];
		snprintf(session, sizeof(session), "s%u", x);
		for (uint32_t i = 0; i < NODES; i++)
			w[i] = bound(&b[i], session, T0, &rank[i]);
		there += w[0] != 0;
		differ += w[0] != w[1] || w[1] != w[2] || rank[0] != rank[1] || rank[1] != rank[2];
	}
	is_u64(differ, 0, "%u messages of %u nodes: all agree", n, NODES);
	is_u64(there, 10, "on all sessions");
	for (uint32_t i = 0; i < NODES; i++) {
		kvp_bindings_close(&b[i]);
		kvp_selection_close(s[i]);
	}
}

int main(void)
{
	rnd = tap_seed(1);
	rules();
	poisoned();
	converges();
	return done();
}
