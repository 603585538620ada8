/* f_replica_msg — any bytes as a replica's message. Invariants: strings lie inside the payload, an accepted
 * message is written again and read again as the same one, and a second encoding has the same bytes. */
#define KVP_FUZZ_NAME "replica_msg"
#include "tests/fuzz/replay.h"

#include <stdlib.h>
#include <string.h>

#include "ipc/replica_msg.h"
#include "tests/tap.h"

static void inside(struct kvp_str s, const uint8_t *data, size_t len)
{
	const uint8_t *p = (const uint8_t *)s.ptr;
	KVP_ASSERT(!p || (p >= data && p <= data + len && s.len <= (size_t)(data + len - p)));
}

static void event(const uint8_t *data, size_t len)
{
	static struct kvp_replica_dec dec, other;
	struct kvp_replica_event e, back;
	size_t n, again;
	if (kvp_replica_decode_event(&dec, data, len, &e))
		return;
	inside(e.model, data, len);
	inside(e.group, data, len);
	inside(e.id, data, len);
	inside(e.lora, data, len);
	KVP_ASSERT(e.model.ptr && e.group.ptr && e.id.ptr && e.seq_cnt <= len);
	KVP_ASSERT(e.duration_nanos < 1000000000u);
	size_t cap = kvp_replica_event_bound(&e);
	uint8_t *a = malloc(cap), *b = malloc(cap);
	KVP_ASSERT(a && b && kvp_replica_encode_event(&e, a, cap, &n) == KVP_OK && n <= cap);
	KVP_ASSERT(kvp_replica_decode_event(&other, a, n, &back) == KVP_OK && back.kind == e.kind);
	KVP_ASSERT(back.seq_cnt == e.seq_cnt && !back.seq == !e.seq);
	KVP_ASSERT(kvp_replica_encode_event(&back, b, cap, &again) == KVP_OK);
	KVP_ASSERT(again == n && memcmp(a, b, n) == 0);
	free(a);
	free(b);
}

static void binding(const uint8_t *data, size_t len)
{
	static struct kvp_replica_dec dec;
	struct kvp_replica_binding b;
	uint8_t *p;
	size_t n;
	if (kvp_replica_decode_binding(&dec, data, len, &b))
		return;
	inside(b.session, data, len);
	size_t cap = kvp_replica_binding_bound(&b);
	p = malloc(cap);
	KVP_ASSERT(p && kvp_replica_encode_binding(&b, p, cap, &n) == KVP_OK && n <= cap);
	KVP_ASSERT(kvp_replica_decode_binding(&dec, p, n, &b) == KVP_OK);
	free(p);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len)
{
	enum kvp_replica_topic t;
	event(data, len);
	binding(data, len);
	(void)kvp_replica_topic_of(data, len, &t);
	return 0;
}
