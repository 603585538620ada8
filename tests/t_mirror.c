/* t_mirror — bookings of replicas against this node's own: who gets an id, who waits, what two threads at
 * once leave behind. */
#include "daemons/common/select_priv.h"
#include "daemons/peer/mirror.h"
#include "shm/sweep.h"
#include "tests/tap.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#define T0 1000000000000ull

static struct kvp_str str(const char *s)
{
	return (struct kvp_str){s, strlen(s)};
}

static void add_worker(struct kvp_selection *s, uint64_t id, const char *model, uint64_t most)
{
	struct kvp_local_worker w = {.worker_id = id,
		.model = str(model),
		.group = str("g"),
		.endpoint = str("http://w"),
		.block_size = 4,
		.size = 1,
		.max_num_batched_tokens = most,
		.is_eagle = KVP_NO};
	if (kvp_selection_local_worker(s, &w) != 201)
		ok(0, "worker registered");
}

static struct kvp_selection *open_node(struct kvp_mirror *m, const struct kvp_local_cfg *cfg)
{
	struct kvp_selection *s = kvp_selection_open_local(cfg);
	add_worker(s, 1, "m", 0);
	kvp_mirror_open(m, s->region, s->owner, s->ctr, 99);
	return s;
}

static void close_node(struct kvp_selection *s, struct kvp_mirror *m)
{
	is_u64(kvp_book_check(&s->region->book), 0, "nothing is broken");
	kvp_mirror_close(m);
	kvp_selection_close(s);
}

static const uint64_t some_seq[] = {11, 12, 13};

static struct kvp_replica_event event(enum kvp_replica_kind kind, struct kvp_str id, const char *model)
{
	return (struct kvp_replica_event){.model = str(model),
		.group = str("g"),
		.id = id,
		.worker_id = strcmp(model, "m") ? 2 : 1,
		.router_id = 7,
		.block_size = 4,
		.kind = kind,
		.seq = some_seq,
		.seq_cnt = 3,
		.track_prefill = 1,
		.has_hint = 1,
		.hint_tok = 12};
}

static const char *apply(
	struct kvp_mirror *m, enum kvp_replica_kind kind, struct kvp_str id, const char *model)
{
	struct kvp_replica_event e = event(kind, id, model);
	return kvp_mirror_text(kvp_mirror_apply(m, KVP_PART_AGGREGATED, &e, T0));
}

/* requests * 1000000 + blocks * 1000 + tokens of a partition's first worker */
static uint64_t load(struct kvp_selection *s, const char *model)
{
	struct kvp_load_row row[4] = {{0}};
	uint32_t n;
	kvp_selection_loads(s, KVP_PART_AGGREGATED, str(model), str("g"), row, 4, &n);
	return row[0].active_requests * 1000000 + row[0].decode_blk * 1000 + row[0].prefill_tok;
}

static int reserve(struct kvp_selection *s, struct kvp_str id, const char *model)
{
	static const uint64_t block[] = {1}, seq[] = {1};
	struct kvp_reserve_request q;
	struct kvp_select_answer a;
	kvp_reserve_request_init(&q);
	q.model = str(model);
	q.group = str("g");
	q.selection_id = id;
	q.worker_id = strcmp(model, "m") ? 2 : 1;
	q.prompt.form = KVP_PROMPT_HASHES;
	q.prompt.block_hash = block;
	q.prompt.seq_hash = seq;
	q.prompt.block_hash_cnt = q.prompt.seq_hash_cnt = 1;
	q.prompt.has_isl = KVP_YES;
	q.prompt.isl_tok = 4;
	return kvp_selection_reserve(s, &q, &a);
}

static void claims(void)
{
	struct kvp_local_cfg cfg = {0};
	struct kvp_mirror m;
	struct kvp_selection *s = open_node(&m, &cfg);
	struct kvp_book *b = &s->region->book;
	struct kvp_resv_ask a = {.worker_id = 1, .rank_gen = 1};
	uint64_t h, found;
	ok(kvp_resv_claim(b, s->owner, "x", 1, &h) == KVP_OK, "an id is claimed");
	is_str(apply(&m, KVP_REPLICA_FREE, str("x"), "m"), "tombstoned", "a claim is no booking");
	struct kvp_replica_event e = event(KVP_REPLICA_ADD, str("x"), "m");
	e.router_id = 8;
	e.lora = str("adapter");
	is_str(kvp_mirror_text(kvp_mirror_apply(&m, KVP_PART_AGGREGATED, &e, T0)), "applied",
		"the mirror wins");
	ok(kvp_resv_book(b, h, &a) == KVP_ERR_EXISTS, "the claimer cannot book");
	ok(kvp_resv_hand(b, h) == KVP_ERR_NOTFOUND && !kvp_resv_is_claim(b, h), "nor hand over");
	ok(kvp_resv_abandon(b, h) == KVP_OK, "and gives the rest back");
	ok(kvp_resv_abandon(b, h) == KVP_ERR_NOTFOUND, "once");
	ok(kvp_resv_find(b, "x", 1, &found) == KVP_OK && found != h, "the id is the mirrored booking's");
	static struct kvp_resv_info info;
	kvp_resv_info(b, found, &info);
	ok((info.flags & KVP_RESV_MIRRORED) && (info.flags & KVP_RESV_NODE_OWNED), "which is marked so");
	is_str(info.lora, "adapter", "and knows its adapter");
	is_u64(info.booked_ns, T0, "and when it was heard of");
	is_u64(reserve(s, str("x"), "m"), 409, "a mirrored id is taken");
	is_u64(load(s, "m"), 1003012, "its load counts");
	is_u64((uint64_t)kvp_selection_free(s, str("x")), 200, "anybody may free it");
	is_u64(load(s, "m"), 0, "no load is left");
	ok(kvp_resv_oust(b, "x", 1) == KVP_ERR_NOTFOUND, "nothing to oust");
	kvp_owner dead = kvp_slot_assign(&s->region->slots, 3, KVP_ROLE_HTTPD, 0);
	struct kvp_sweep_result res;
	ok(kvp_resv_claim(b, dead, "z", 1, &h) == KVP_OK, "a process claims another id");
	is_str(apply(&m, KVP_REPLICA_ADD, str("z"), "m"), "applied", "which a replica takes");
	is_u64(kvp_resv_cnt(b), 2, "what is left of the claim is there");
	ok(kvp_book_sweep_owner(b, dead, NULL, NULL, &res) == KVP_OK, "the process dies");
	is_u64(kvp_resv_cnt(b), 1, "and the sweep gives it back");
	is_str(apply(&m, KVP_REPLICA_FREE, str("z"), "m"), "applied", "and the replica ends its own");
	close_node(s, &m);
}

static void partitions(void)
{
	struct kvp_local_cfg cfg = {0};
	struct kvp_mirror m;
	struct kvp_selection *s = open_node(&m, &cfg);
	add_worker(s, 2, "other", 0);
	is_u64(reserve(s, str("x"), "m"), 201, "booked here in one partition");
	is_str(apply(&m, KVP_REPLICA_ADD, str("x"), "other"), "applied",
		"a replica books the id in another one");
	is_u64(load(s, "m"), 1001000, "each has its load");
	is_u64(load(s, "other"), 1003012, "in its partition");
	is_str(apply(&m, KVP_REPLICA_ADD, str("x"), "other"), "dropped:duplicate", "once");
	is_str(apply(&m, KVP_REPLICA_MARK, str("x"), "other"), "applied", "the replica's prefill ends");
	is_u64(load(s, "other"), 1003000, "there");
	is_u64((uint64_t)kvp_selection_free(s, str("x")), 200, "the id is freed here");
	is_u64(load(s, "m"), 0, "which frees our own");
	is_u64(load(s, "other"), 1003000, "and not the replica's");
	is_str(apply(&m, KVP_REPLICA_FREE, str("x"), "other"), "applied", "which the replica frees");
	is_u64(load(s, "other"), 0, "no load is left");
	close_node(s, &m);
}

static void limits(void)
{
	struct kvp_local_cfg cfg = {.reservation_max = 64};
	struct kvp_mirror m;
	struct kvp_selection *s = open_node(&m, &cfg);
	char *id = malloc(KVP_RESV_ID_MAX + 2);
	uint32_t full = 0, added = 0;
	memset(id, 'i', KVP_RESV_ID_MAX + 1);
	is_str(apply(&m, KVP_REPLICA_ADD, (struct kvp_str){id, 0}, "m"), "dropped:id", "an empty id");
	is_str(apply(&m, KVP_REPLICA_ADD, (struct kvp_str){id, KVP_RESV_ID_MAX + 1}, "m"), "dropped:id",
		"a too long one");
	is_str(apply(&m, KVP_REPLICA_ADD, (struct kvp_str){id, KVP_RESV_ID_MAX}, "m"), "applied",
		"the longest");
	is_str(apply(&m, KVP_REPLICA_FREE, (struct kvp_str){id, KVP_RESV_ID_MAX}, "m"), "applied",
		"and back");
	for (uint32_t i = 0; i < 100; i++) {
		char name[16];
		snprintf(name, sizeof(name), "n%u", i);
		const char *r = apply(&m, KVP_REPLICA_ADD, str(name), "m");
		added += strcmp(r, "applied") == 0;
		full += strcmp(r, "dropped:full") == 0;
	}
	ok(added >= 64 && added + full == 100, "a full table drops: %u added, %u dropped", added, full);
	is_u64(load(s, "m") / 1000000, added, "what was added counts");
	is_u64(kvp_resv_expire(&s->region->book, T0 + 300000000001ull, 300000000000ull), added,
		"until it is old");
	is_u64(load(s, "m"), 0, "no load is left");
	free(id);
	close_node(s, &m);
}

static int submit(struct kvp_selection *s, struct kvp_str id, uint64_t *ticket)
{
	static const uint32_t token[20] = {1, 2, 3};
	struct kvp_select_request q;
	struct kvp_select_answer a;
	kvp_select_request_init(&q);
	q.model = str("q");
	q.group = str("g");
	q.selection_id = id;
	q.prompt.form = KVP_PROMPT_TOKENS;
	q.prompt.token = token;
	q.prompt.token_cnt = 20;
	return kvp_selection_submit(s, &q, KVP_SELECT_AND_RESERVE, &a, ticket);
}

/* Who waits because of a replica's load gets its turn when that ends; a replica takes a waiting request's
 * id. */
static void waiting(void)
{
	struct kvp_local_cfg cfg = {.queue = KVP_LOCAL_FCFS, .queue_threshold = 0.1};
	struct kvp_mirror m;
	struct kvp_selection *s = open_node(&m, &cfg);
	struct kvp_select_answer a;
	uint64_t first, second, h;
	add_worker(s, 2, "q", 100);
	is_str(apply(&m, KVP_REPLICA_ADD, str("load"), "q"), "applied", "a replica makes the worker busy");
	is_u64((uint64_t)submit(s, str("one"), &first), KVP_SELECT_WAITS, "a request waits");
	is_u64((uint64_t)submit(s, str("two"), &second), KVP_SELECT_WAITS, "and another one");
	is_str(apply(&m, KVP_REPLICA_ADD, str("one"), "q"), "applied", "a replica books the first one's id");
	is_str(apply(&m, KVP_REPLICA_FREE, str("load"), "q"), "applied", "the load ends");
	kvp_mirror_flush(&m);
	kvp_selection_tend(s);
	is_u64((uint64_t)kvp_selection_collect(s, second, &a), KVP_SELECT_WAITS,
		"the replica's booking is load");
	is_str(apply(&m, KVP_REPLICA_MARK, str("one"), "q"), "applied", "its prefill ends");
	kvp_mirror_flush(&m);
	kvp_selection_tend(s);
	is_u64((uint64_t)kvp_selection_collect(s, first, &a), 409, "the first one's claim was replaced");
	is_u64((uint64_t)kvp_selection_collect(s, second, &a), 200, "the second one has its turn");
	ok(kvp_resv_find(&s->region->book, "one", 3, &h) == KVP_OK, "the id is the replica's");
	is_u64((uint64_t)kvp_selection_free(s, str("two")), 200, "freed");
	is_str(apply(&m, KVP_REPLICA_FREE, str("one"), "q"), "applied", "freed");
	is_u64(load(s, "q"), 0, "no load is left");
	is_u64(kvp_queue_check(&s->region->queue), 0, "the queue is in order");
	is_u64(kvp_resv_cnt(&s->region->book), 0, "no claim is left");
	close_node(s, &m);
}

/* ---- two threads on the same few ids ---- */

#define ROUNDS 60000
static struct kvp_selection *shared;
static struct kvp_book other;
static uint64_t replaced, booked;

static void *claimer(void *arg)
{
	struct kvp_resv_ask a = {.worker_id = 1, .seq = some_seq, .seq_cnt = 3, .now_ns = T0};
	struct kvp_cat_rank_info info;
	(void)arg;
	kvp_cat_rank_info(&shared->region->cat, 0, &info);
	a.rank_gen = info.rank_gen;
	a.part = info.part;
	for (uint32_t i = 0; i < ROUNDS; i++) {
		char id = (char)('a' + i % 3);
		uint64_t h;
		if (kvp_resv_claim(&other, shared->owner, &id, 1, &h))
			continue;
		int rc = kvp_resv_book(&other, h, &a);
		if (rc == KVP_OK) {
			booked++;
			kvp_resv_free(&other, h); /* or the mirror has freed it */
		} else {
			replaced += rc == KVP_ERR_EXISTS;
			kvp_resv_abandon(&other, h);
		}
	}
	return NULL;
}

static void race(void)
{
	struct kvp_local_cfg cfg = {0};
	struct kvp_mirror m;
	pthread_t t;
	uint64_t added = 0;
	shared = open_node(&m, &cfg);
	kvp_reorder_close(&m.tomb); /* ids are used again at once here */
	kvp_reorder_init(&m.tomb, 1, KVP_REORDER_KEYS);
	memcpy(&other, &shared->region->book, sizeof(other));
	other.scratch = NULL;
	other.scratch_cnt = 0;
	if (pthread_create(&t, NULL, claimer, NULL))
		ok(0, "a thread");
	for (uint32_t i = 0; i < ROUNDS; i++) {
		char id[2] = {(char)('a' + (i * 7 + i / 5) % 3), 0};
		kvp_reorder_expire(&m.tomb, UINT64_MAX, 0);
		added += strcmp(apply(&m, KVP_REPLICA_ADD, str(id), "m"), "applied") == 0;
		apply(&m, KVP_REPLICA_MARK, str(id), "m");
		apply(&m, KVP_REPLICA_FREE, str(id), "m");
	}
	pthread_join(t, NULL);
	ok(added > 0 && booked > 0, "both have booked");
	printf("# mirrored %llu, booked %llu, replaced %llu\n", (unsigned long long)added,
		(unsigned long long)booked, (unsigned long long)replaced);
	is_u64(kvp_resv_cnt(&shared->region->book), 0, "nothing is left booked or claimed");
	is_u64(load(shared, "m"), 0, "nor any load");
	free(other.scratch);
	close_node(shared, &m);
}

int main(void)
{
	claims();
	partitions();
	limits();
	waiting();
	race();
	return done();
}
