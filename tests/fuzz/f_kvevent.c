/* f_kvevent — any bytes as a KV-event batch: decode, normalise, hash what would be indexed. Invariants:
 * everything in the result lies inside the payload or the arena, operations are what the header promises,
 * and a batch decodes the same way twice. */
#define KVP_FUZZ_NAME "kvevent"
#include "tests/fuzz/replay.h"

#include <kvpick/err.h>

#include "ipc/kv_event.h"
#include "ipc/zmq_sub.h"

static uint64_t sum;

static void touch(struct kvp_kv_str s, const uint8_t *data, size_t len)
{
	const uint8_t *p = (const uint8_t *)s.p;
	KVP_ASSERT(!p || (p >= data && p <= data + len && s.len <= (size_t)(data + len - p)));
	for (uint32_t i = 0; p && i < s.len; i++)
		sum += p[i];
}

static void check_op(const struct kvp_kv_op *op)
{
	for (uint32_t i = 0; i < op->ext_cnt; i++)
		sum += op->ext[i];
	if (op->kind != KVP_KV_OP_STORE)
		return;
	struct kvp_hasher h;
	kvp_hasher_init(&h, op->tok, op->tok_cnt, op->block_size, op->window, op->seed);
	kvp_hasher_set_mm(&h, op->mm, op->mm_cnt, NULL);
	KVP_ASSERT(op->ext_cnt && op->ext_cnt <= kvp_hasher_blocks(&h));
	for (uint32_t i = 0; i < op->ext_cnt; i++) {
		uint64_t local = 0;
		KVP_ASSERT(kvp_hasher_local(&h, i, 1, &local) == 1);
		sum += local;
	}
}

static void check_event(const struct kvp_kv_event *ev, const uint8_t *data, size_t len)
{
	touch(ev->tag, data, len);
	touch(ev->lora, data, len);
	touch(ev->salt, data, len);
	touch(ev->medium, data, len);
	touch(ev->group_kind, data, len);
	touch(ev->locality, data, len);
	touch(ev->ownership, data, len);
	KVP_ASSERT(ev->hash_cnt <= len && ev->tok_cnt <= len && ev->mm_cnt <= ev->hash_cnt);
	for (uint32_t i = 0; i < ev->mm_cnt; i++)
		for (uint32_t k = 0; k < ev->mm[i].cnt; k++)
			sum += ev->mm[i].hash[k];
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len)
{
	static struct kvp_kv_dec *dec;
	static struct kvp_kv_norm *norm;
	struct kvp_kv_batch b, again;
	if (!dec)
		dec = kvp_kv_dec_new();
	if (!norm)
		norm = kvp_kv_norm_new(4);
	KVP_ASSERT(dec && norm);
	int rc = kvp_kv_decode(dec, data, len, &b);
	struct kvp_zmq_frame frame[4] = {{data, 0}, {data, len < 8 ? len : 8}, {data, len}, {data, len / 2}};
	uint64_t seq;
	for (uint32_t n = 1; n <= 4; n++)
		sum += (uint64_t)kvp_zmq_reply_parse(frame, n, &seq);
	if (rc != KVP_OK)
		return 0;
	for (uint32_t i = 0; i < b.event_cnt; i++) {
		struct kvp_kv_op op;
		check_event(&b.event[i], data, len);
		if (kvp_kv_normalise(norm, &b.event[i], b.rank % 3, &op) == KVP_KV_REASON_OK)
			check_op(&op);
	}
	uint32_t cnt = b.event_cnt;
	KVP_ASSERT(kvp_kv_decode(dec, data, len, &again) == KVP_OK && again.event_cnt == cnt);
	if (kvp_kv_norm_remembered(norm) > 10000)
		kvp_kv_norm_reset(norm);
	return 0;
}
