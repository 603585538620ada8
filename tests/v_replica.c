/* v_replica — messages of an independent encoder both ways: what we write is byte for byte what they write,
 * and what they accept or drop we accept or drop. */
#include "ipc/zmq_sub.h"
#include "tests/replica_vec.h"

#define MSG_MAX (1u << 20)

static int same_str(struct kvp_str a, struct kvp_str b)
{
	return !a.ptr == !b.ptr && a.len == b.len && (!a.len || memcmp(a.ptr, b.ptr, a.len) == 0);
}

static int same_event(const struct kvp_replica_event *a, const struct kvp_replica_event *b)
{
	return same_str(a->model, b->model) && same_str(a->group, b->group) && same_str(a->id, b->id) &&
	       same_str(a->lora, b->lora) && a->worker_id == b->worker_id && a->router_id == b->router_id &&
	       a->block_size == b->block_size && a->dp_rank == b->dp_rank && a->kind == b->kind &&
	       !a->seq == !b->seq && a->seq_cnt == b->seq_cnt &&
	       (!a->seq_cnt || memcmp(a->seq, b->seq, 8ull * a->seq_cnt) == 0) &&
	       a->track_prefill == b->track_prefill && a->has_expected_output == b->has_expected_output &&
	       a->expected_output_tok == b->expected_output_tok && a->has_hint == b->has_hint &&
	       a->hint_tok == b->hint_tok && a->has_duration == b->has_duration &&
	       a->duration_secs == b->duration_secs && a->duration_nanos == b->duration_nanos;
}

static int same_binding(const struct kvp_replica_binding *a, const struct kvp_replica_binding *b)
{
	return same_str(a->model, b->model) && same_str(a->group, b->group) &&
	       same_str(a->session, b->session) && a->worker_id == b->worker_id &&
	       a->sequence == b->sequence && a->writer_id == b->writer_id && a->has_rank == b->has_rank &&
	       a->dp_rank == b->dp_rank;
}

static uint64_t seq_mem[MSG_MAX / 8];
static uint8_t out_mem[MSG_MAX];

static void golden_one(struct kvp_json_val g, struct kvp_replica_dec *dec)
{
	const char *name = vec_str(g, "name"), *topic = vec_str(g, "topic");
	size_t len, got = 0;
	uint8_t *want = rv_unhex(vec_str(g, "payload_hex"), &len);
	enum kvp_replica_topic t;
	int rc = kvp_replica_topic_of(topic, strlen(topic), &t);
	ok(rc == KVP_OK && len == vec_u64(g, "payload_len"), "%s: topic and length", name);
	if (t == KVP_REPLICA_LIFECYCLE) {
		struct kvp_replica_event e = rv_event_of(vec_get(g, "decoded"), seq_mem), back;
		rc = kvp_replica_encode_event(&e, out_mem, sizeof(out_mem), &got);
		ok(rc == KVP_OK && got == len && memcmp(out_mem, want, len) == 0, "%s: written", name);
		rc = kvp_replica_decode_event(dec, want, len, &back);
		ok(rc == KVP_OK && same_event(&e, &back), "%s: read", name);
		ok(kvp_replica_event_bound(&e) >= len &&
				kvp_replica_encode_event(
					&e, out_mem, kvp_replica_event_bound(&e) - 1, &got) == KVP_ERR_FULL,
			"%s: needs its bound", name);
		for (size_t n = 0; n < len; n++)
			if (kvp_replica_decode_event(dec, want, n, &back) == KVP_OK)
				ok(0, "%s: cut at %zu is refused", name, n);
	} else {
		struct kvp_replica_binding b = rv_binding_of(vec_get(g, "decoded")), back;
		rc = kvp_replica_encode_binding(&b, out_mem, sizeof(out_mem), &got);
		ok(rc == KVP_OK && got == len && memcmp(out_mem, want, len) == 0, "%s: written", name);
		rc = kvp_replica_decode_binding(dec, want, len, &back);
		ok(rc == KVP_OK && same_binding(&b, &back), "%s: read", name);
	}
	free(want);
}

static void decode_one(struct kvp_json_val c, struct kvp_replica_dec *dec)
{
	struct kvp_json_val frames = vec_get(c, "frames_hex"), want;
	struct kvp_json_iter it = kvp_json_each(frames);
	const char *name = vec_str(c, "name");
	uint32_t n = (uint32_t)kvp_json_len(frames);
	int accept = 0, rc = n == 2 ? KVP_OK : KVP_ERR_PROTO;
	size_t len[4] = {0};
	uint8_t *p[4] = {NULL};
	enum kvp_replica_topic t = KVP_REPLICA_AFFINITY;
	struct kvp_replica_event e;
	kvp_json_bool(vec_get(c, "accept"), &accept);
	for (uint32_t i = 0; i < 4 && kvp_json_next(&it); i++)
		p[i] = rv_unhex(vec_text(it.val), &len[i]);
	rc = rc ? rc : kvp_replica_topic_of(p[0], len[0], &t);
	rc = rc ? rc : t == KVP_REPLICA_LIFECYCLE ? kvp_replica_decode_event(dec, p[1], len[1], &e) : -1;
	ok((rc == KVP_OK) == accept, "%s: %s", name, accept ? "accepted" : "dropped");
	if (rc == KVP_OK && accept && vec_has(c, "decodes_as", &want)) {
		struct kvp_replica_event w = rv_event_of(want, seq_mem);
		ok(same_event(&e, &w), "%s: means the same", name);
	}
	for (uint32_t i = 0; i < 4; i++)
		free(p[i]);
}

static void endpoints(struct kvp_json_val list)
{
	struct kvp_json_iter it = kvp_json_each(list);
	while (kvp_json_next(&it)) {
		char why[128] = "";
		int valid = 0;
		kvp_json_bool(vec_get(it.val, "valid"), &valid);
		int rc = kvp_zmq_endpoint_check(vec_str(it.val, "endpoint"), why, sizeof(why));
		ok((rc == KVP_OK) == valid, "endpoint '%s' %s", vec_str(it.val, "endpoint"), why);
	}
}

/* An unknown key may hold anything, as long as the whole is not nested deeper than 1024. */
static int nested(struct kvp_replica_dec *dec, const uint8_t *msg, size_t len, unsigned deep)
{
	struct kvp_replica_event e;
	uint8_t *p = out_mem;
	memcpy(p, msg, len);
	p[0]++; /* one pair more */
	p[len] = 0xa1;
	p[len + 1] = 'x';
	memset(p + len + 2, 0x91, deep);
	p[len + 2 + deep] = 0xc0;
	return kvp_replica_decode_event(dec, p, len + deep + 3, &e);
}

static void limits(struct kvp_json_val golden, struct kvp_replica_dec *dec)
{
	struct kvp_json_iter it = kvp_json_each(golden);
	struct kvp_replica_event e;
	size_t len;
	kvp_json_next(&it);
	uint8_t *msg = rv_unhex(vec_str(it.val, "payload_hex"), &len);
	ok(nested(dec, msg, len, 1023) == KVP_OK, "1024 containers inside each other are read");
	ok(nested(dec, msg, len, 1024) == KVP_ERR_PROTO, "1025 are refused");
	dec->payload_max = (uint32_t)len;
	ok(kvp_replica_decode_event(dec, msg, len, &e) == KVP_OK, "a payload of the limit's size is read");
	dec->payload_max = (uint32_t)len - 1;
	ok(kvp_replica_decode_event(dec, msg, len, &e) == KVP_ERR_LIMIT, "a longer one is refused");
	dec->payload_max = 0;
	/* An array header may claim four thousand million hashes: no memory is taken for them. */
	static const uint8_t huge[] = {0x81, 0xaa, 'A', 'd', 'd', 'R', 'e', 'q', 'u', 'e', 's', 't', 0x81,
		0xae, 't', 'o', 'k', 'e', 'n', '_', 's', 'e', 'q', 'u', 'e', 'n', 'c', 'e', 0xdd, 0xff, 0xff,
		0xff, 0xff};
	memcpy(out_mem, msg, len);
	uint8_t *at = memmem(out_mem, len, "\xa4""Free", 5);
	if (ok(at != NULL, "the bare name is there")) {
		memcpy(at, huge, sizeof(huge));
		size_t n = (size_t)(at - out_mem) + sizeof(huge);
		ok(kvp_replica_decode_event(dec, out_mem, n, &e), "a false count is refused");
	}
	free(msg);
}

int main(void)
{
	struct kvp_json *json = kvp_json_new();
	struct kvp_json_val root = vec_load(json, "replica_sync.json");
	struct kvp_json_val golden = vec_get(root, "golden"), cases = vec_get(root, "decode_cases");
	struct kvp_replica_dec dec = {0};
	struct kvp_json_iter it = kvp_json_each(golden);
	is_u64(kvp_json_len(golden), 12, "golden messages");
	while (kvp_json_next(&it))
		golden_one(it.val, &dec);
	it = kvp_json_each(cases);
	is_u64(kvp_json_len(cases), 29, "decode cases");
	while (kvp_json_next(&it))
		decode_one(it.val, &dec);
	endpoints(vec_get(root, "endpoint_validation"));
	limits(golden, &dec);
	kvp_replica_dec_close(&dec);
	kvp_json_free(json);
	return done();
}
