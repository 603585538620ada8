/* tests/replica_vec.h — members of replica_sync.json as messages. */
#ifndef KVP_TEST_REPLICA_VEC_H
#define KVP_TEST_REPLICA_VEC_H
#include <string.h>

#include "ipc/replica_msg.h"
#include "tests/vec.h"

/* Hex digits -> exact allocation, so that a read past the end is seen. */
__attribute__((unused)) static uint8_t *rv_unhex(const char *hex, size_t *len)
{
	size_t n = strlen(hex) / 2;
	uint8_t *p = malloc(n ? n : 1);
	for (size_t i = 0; p && i < n; i++) {
		unsigned v = 0;
		sscanf(hex + 2 * i, "%2x", &v);
		p[i] = (uint8_t)v;
	}
	*len = n;
	return p;
}

/* 64-bit values that a double would spoil stand as "u64:<decimal>". */
static uint64_t rv_num(struct kvp_json_val v)
{
	const char *text = vec_text(v);
	return strncmp(text, "u64:", 4) == 0 ? strtoull(text + 4, NULL, 10) : vec_num(v);
}
static uint64_t rv_u64(struct kvp_json_val v, const char *key)
{
	return rv_num(vec_get(v, key));
}

static struct kvp_str rv_str_of(struct kvp_json_val obj, const char *key)
{
	struct kvp_json_val v;
	struct kvp_str s = {NULL, 0};
	if (vec_has(obj, key, &v))
		kvp_json_str(v, &s.ptr, &s.len);
	return s;
}

static void rv_add_of(struct kvp_json_val add, struct kvp_replica_event *e, uint64_t *seq)
{
	struct kvp_json_val v, hint, dur;
	int flag = 0;
	e->kind = KVP_REPLICA_ADD;
	if (vec_has(add, "token_sequence", &v)) {
		e->seq = seq;
		struct kvp_json_iter it = kvp_json_each(v);
		while (kvp_json_next(&it))
			seq[e->seq_cnt++] = rv_num(it.val);
	}
	kvp_json_bool(vec_get(add, "track_prefill_tokens"), &flag);
	e->track_prefill = (uint8_t)flag;
	if (vec_has(add, "expected_output_tokens", &v)) {
		e->has_expected_output = 1;
		e->expected_output_tok = (uint32_t)rv_num(v);
	}
	if (!vec_has(add, "prefill_load_hint", &hint))
		return;
	e->has_hint = 1;
	e->hint_tok = rv_u64(hint, "initial_effective_prefill_tokens");
	if (vec_has(hint, "expected_prefill_duration", &dur)) {
		e->has_duration = 1;
		e->duration_secs = rv_u64(dur, "secs");
		e->duration_nanos = (uint32_t)rv_u64(dur, "nanos");
	}
}

__attribute__((unused)) static struct kvp_replica_event rv_event_of(struct kvp_json_val d, uint64_t *seq)
{
	struct kvp_json_val ev = vec_get(d, "event"), w = vec_get(ev, "worker"), data = vec_get(ev, "data");
	struct kvp_replica_event e = {.model = rv_str_of(d, "model_name"),
		.group = rv_str_of(d, "routing_group"),
		.block_size = (uint32_t)rv_u64(d, "block_size"),
		.id = rv_str_of(ev, "request_id"),
		.lora = rv_str_of(ev, "lora_name"),
		.worker_id = rv_u64(w, "worker_id"),
		.dp_rank = (uint32_t)rv_u64(w, "dp_rank"),
		.router_id = rv_u64(ev, "router_id")};
	if (kvp_json_type(data) == KVP_JSON_OBJ)
		rv_add_of(vec_get(data, "AddRequest"), &e, seq);
	else
		e.kind = strcmp(vec_text(data), "Free") == 0 ? KVP_REPLICA_FREE : KVP_REPLICA_MARK;
	return e;
}

__attribute__((unused)) static struct kvp_replica_binding rv_binding_of(struct kvp_json_val d)
{
	struct kvp_json_val v;
	struct kvp_replica_binding b = {.model = rv_str_of(d, "model_name"),
		.group = rv_str_of(d, "routing_group"),
		.session = rv_str_of(d, "session_id"),
		.worker_id = rv_u64(d, "worker_id"),
		.sequence = rv_u64(d, "sequence"),
		.writer_id = rv_u64(d, "writer_id")};
	if (vec_has(d, "dp_rank", &v)) {
		b.has_rank = 1;
		b.dp_rank = (uint32_t)rv_num(v);
	}
	return b;
}
#endif
