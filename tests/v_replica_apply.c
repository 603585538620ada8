/* v_replica_apply — recorded scenarios of replicas' events, byte by byte through the decoder into a node of
 * one's own, by the clock of the scenario: what becomes of each event, and the loads after every step. */
#include "daemons/common/select_priv.h"
#include "daemons/peer/mirror.h"
#include "shm/sweep.h"
#include "tests/replica_vec.h"

#define BASE_NS 1000000000000ull
#define EXPIRY_NS 300000000000ull

static struct kvp_str text_of(struct kvp_json_val obj, const char *key)
{
	return rv_str_of(obj, key);
}

static void add_worker(struct kvp_selection *s, struct kvp_json_val receiver, uint64_t id, uint32_t rank)
{
	struct kvp_local_worker w = {.worker_id = id,
		.model = text_of(receiver, "model_name"),
		.group = text_of(receiver, "routing_group"),
		.endpoint = {"http://w", 8},
		.block_size = (uint32_t)vec_u64(receiver, "block_size"),
		.start_rank = rank,
		.size = 1,
		.is_eagle = KVP_NO};
	int status = kvp_selection_local_worker(s, &w);
	if (status != 201)
		ok(0, "worker %llu registered: %d", (unsigned long long)id, status);
}

static int same_loads(struct kvp_selection *s, struct kvp_json_val receiver, struct kvp_json_val want)
{
	struct kvp_load_row row[16];
	uint32_t n = 0, bad = 0;
	kvp_selection_loads(s, KVP_PART_AGGREGATED, text_of(receiver, "model_name"),
		text_of(receiver, "routing_group"), row, 16, &n);
	struct kvp_json_iter it = kvp_json_each(want);
	while (kvp_json_next(&it)) {
		uint64_t id = vec_u64(it.val, "worker_id");
		uint32_t i = 0;
		while (i < n && (row[i].worker_id != id || row[i].dp_rank != vec_u64(it.val, "dp_rank")))
			i++;
		struct kvp_load_row none = {0}, *r = i < n ? &row[i] : &none;
		int same = r->active_requests == vec_u64(it.val, "active_requests") &&
			   r->decode_blk == vec_u64(it.val, "active_decode_blocks") &&
			   r->prefill_tok == vec_u64(it.val, "active_prefill_tokens");
		if (!same)
			printf("# worker %llu: %llu/%llu/%llu\n", (unsigned long long)id,
				(unsigned long long)r->active_requests, (unsigned long long)r->decode_blk,
				(unsigned long long)r->prefill_tok);
		bad += !same;
	}
	return bad == 0;
}

static void action(struct kvp_selection *s, struct kvp_json_val receiver, struct kvp_json_val step,
	const char *what, uint64_t now_ns)
{
	if (strcmp(what, "delete_worker") == 0)
		kvp_selection_local_worker_gone(s, vec_u64(step, "worker_id"));
	else if (strcmp(what, "register_worker") == 0)
		add_worker(s, receiver, vec_u64(step, "worker_id"), (uint32_t)vec_u64(step, "dp_rank"));
	else if (strcmp(what, "periodic_expiry_sweep") == 0)
		kvp_resv_expire(&s->region->book, now_ns, EXPIRY_NS);
	else
		ok(0, "action %s is known", what);
}

static void run(struct kvp_json_val sc)
{
	struct kvp_local_cfg cfg = {0};
	struct kvp_selection *s = kvp_selection_open_local(&cfg);
	struct kvp_json_val receiver = vec_get(sc, "receiver"), v;
	struct kvp_replica_dec dec = {0};
	struct kvp_mirror m;
	const char *name = vec_str(sc, "name");
	uint32_t n = 0;
	kvp_mirror_open(&m, s->region, s->owner, s->ctr, vec_u64(receiver, "process_id"));
	struct kvp_json_iter it = kvp_json_each(vec_get(receiver, "workers"));
	while (kvp_json_next(&it)) {
		struct kvp_json_iter pair = kvp_json_each(it.val);
		kvp_json_next(&pair);
		uint64_t id = vec_num(pair.val);
		kvp_json_next(&pair);
		add_worker(s, receiver, id, (uint32_t)vec_num(pair.val));
	}
	it = kvp_json_each(vec_get(sc, "steps"));
	for (; kvp_json_next(&it); n++) {
		uint64_t now_ns = BASE_NS + (uint64_t)(vec_real(vec_get(it.val, "t")) * 1e9);
		if (vec_has(it.val, "action", &v)) {
			action(s, receiver, it.val, vec_text(v), now_ns);
		} else {
			struct kvp_replica_event e;
			size_t len;
			uint8_t *p = rv_unhex(vec_str(it.val, "payload_hex"), &len);
			enum kvp_mirror_result r = KVP_MIRROR_RESULT_CNT;
			if (kvp_replica_decode_event(&dec, p, len, &e) == KVP_OK)
				r = kvp_mirror_apply(&m, KVP_PART_AGGREGATED, &e, now_ns);
			is_str(kvp_mirror_text(r), vec_str(it.val, "result"), "%s step %u", name, n);
			free(p);
		}
		if (vec_has(it.val, "loads_after", &v))
			ok(same_loads(s, receiver, v), "%s: loads after step %u", name, n);
	}
	ok(same_loads(s, receiver, vec_get(sc, "final_loads")), "%s: loads at the end", name);
	is_u64(kvp_book_check(&s->region->book), 0, "%s: nothing is broken", name);
	kvp_mirror_close(&m);
	kvp_replica_dec_close(&dec);
	kvp_selection_close(s);
}

int main(void)
{
	struct kvp_json *json = kvp_json_new();
	struct kvp_json_val list = vec_get(vec_load(json, "replica_sync.json"), "scenarios");
	struct kvp_json_iter it = kvp_json_each(list);
	is_u64(kvp_json_len(list), 20, "scenarios");
	while (kvp_json_next(&it))
		run(it.val);
	kvp_json_free(json);
	return done();
}
