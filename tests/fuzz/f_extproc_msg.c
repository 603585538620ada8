/* f_extproc_msg - any bytes as a message of either direction, and as health messages. Invariants: everything
 * in a result lies inside the decoder's memory bound (the sanitizer watches it), what was read can be
 * written, and what we write is read back as the same. */
#define KVP_FUZZ_NAME "extproc_msg"
#include "tests/fuzz/replay.h"

#include <kvpick/err.h>
#include <stdlib.h>
#include <string.h>

#include "ipc/extproc_msg.h"
#include "ipc/grpc_health.h"

static uint64_t sum;

static void touch(struct kvp_extproc_str s)
{
	for (uint32_t i = 0; i < s.len; i++)
		sum += (uint8_t)s.p[i];
}

static int same(struct kvp_extproc_str a, struct kvp_extproc_str b)
{
	return a.len == b.len && (!a.len || memcmp(a.p, b.p, a.len) == 0);
}

static int is_listed(struct kvp_extproc_str s)
{
	KVP_ASSERT(s.len && s.p[0] != ' ' && s.p[s.len - 1] != ' ' && !memchr(s.p, ',', s.len));
	return 1;
}

/* In parts a message means the same. */
static void in_parts(struct kvp_extproc_dec *b, const uint8_t *data, size_t len, int rc,
	const struct kvp_extproc_req *want)
{
	struct kvp_extproc_req r;
	size_t one = len / 3, two = (len - one) / 2, at = 0;
	struct iovec part[3] = {{(void *)(uintptr_t)data, one}, {(void *)(uintptr_t)(data + one), two},
		{(void *)(uintptr_t)(data + one + two), len - one - two}};
	int skip = !one ? 1 + !two : 0;
	if (!len)
		return;
	int got = kvp_extproc_req_decode_parts(b, part + skip, (uint32_t)(3 - skip), &r);
	KVP_ASSERT(got == rc || rc == KVP_ERR_LIMIT);
	if (rc != KVP_OK)
		return;
	KVP_ASSERT(r.kind == want->kind && r.header_cnt == want->header_cnt &&
		   r.end_of_stream == want->end_of_stream && r.has_config == want->has_config &&
		   r.observability_mode == want->observability_mode && same(r.served, want->served));
	for (uint32_t i = 0; i <= r.body_more_cnt; i++) {
		struct kvp_extproc_str s = i ? r.body_more[i - 1] : r.body;
		KVP_ASSERT(at + s.len <= want->body.len);
		KVP_ASSERT(!s.len || !memcmp(s.p, want->body.p + at, s.len));
		at += s.len;
	}
	KVP_ASSERT(at == want->body.len);
}

static void request(struct kvp_extproc_dec *a, struct kvp_extproc_dec *b, const uint8_t *data, size_t len)
{
	struct kvp_extproc_req r, again;
	size_t n = 0;
	int rc = kvp_extproc_req_decode(a, data, len, &r);
	KVP_ASSERT(rc == KVP_OK || rc == KVP_ERR_PROTO || rc == KVP_ERR_LIMIT);
	in_parts(b, data, len, rc, &r);
	if (rc != KVP_OK)
		return;
	touch(r.body);
	touch(r.served);
	for (uint32_t i = 0; i < r.header_cnt; i++) {
		touch(r.header[i].key);
		touch(r.header[i].value);
	}
	KVP_ASSERT(r.subset_hint == KVP_EXTPROC_HINT_PRESENT || !r.subset_cnt);
	for (uint32_t i = 0; i < r.subset_cnt; i++)
		KVP_ASSERT(is_listed(r.subset[i]));
	KVP_ASSERT(!r.served.len || is_listed(r.served));
	void *out = kvp_extproc_req_new(&r, &n);
	KVP_ASSERT(out);
	rc = kvp_extproc_req_decode(b, out, n, &again);
	free(out);
	if (rc == KVP_ERR_LIMIT) /* our own form of a message may be the larger one */
		return;
	KVP_ASSERT(rc == KVP_OK && again.kind == r.kind && again.header_cnt == r.header_cnt &&
		   again.subset_cnt == r.subset_cnt && again.subset_hint == r.subset_hint &&
		   again.end_of_stream == r.end_of_stream && again.has_config == r.has_config &&
		   again.request_body_mode == r.request_body_mode && same(again.body, r.body) &&
		   same(again.served, r.served));
	for (uint32_t i = 0; i < r.header_cnt; i++)
		KVP_ASSERT(same(again.header[i].key, r.header[i].key) &&
			   same(again.header[i].value, r.header[i].value));
}

static void reply(struct kvp_extproc_dec *a, struct kvp_extproc_dec *b, const uint8_t *data, size_t len)
{
	struct kvp_extproc_reply r, again;
	size_t n = 0;
	int rc = kvp_extproc_reply_decode(a, data, len, &r);
	KVP_ASSERT(rc == KVP_OK || rc == KVP_ERR_PROTO || rc == KVP_ERR_LIMIT);
	if (rc != KVP_OK || r.set_cnt > KVP_EXTPROC_SET_MAX || r.remove_cnt > KVP_EXTPROC_SET_MAX)
		return;
	touch(r.body);
	touch(r.destination);
	void *out = kvp_extproc_reply_new(&r, &n);
	KVP_ASSERT(out);
	rc = kvp_extproc_reply_decode(b, out, n, &again);
	free(out);
	KVP_ASSERT(rc == KVP_OK && again.kind == r.kind && again.mutation == r.mutation &&
		   again.set_cnt == r.set_cnt && again.remove_cnt == r.remove_cnt &&
		   same(again.body, r.body) && again.http_status == r.http_status &&
		   same(again.destination, r.destination));
	for (uint32_t i = 0; i < r.set_cnt; i++)
		KVP_ASSERT(same(again.set[i].key, r.set[i].key) && same(again.set[i].value, r.set[i].value));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len)
{
	static struct kvp_extproc_dec *a, *b;
	if (!a)
		a = kvp_extproc_dec_new();
	if (!b)
		b = kvp_extproc_dec_new();
	KVP_ASSERT(a && b);
	request(a, b, data, len);
	reply(a, b, data, len);
	int status = kvp_grpc_health_reply_parse(data, len);
	KVP_ASSERT(status == KVP_ERR_PROTO || (status >= 0 && status <= KVP_GRPC_SERVICE_UNKNOWN));
	struct kvp_extproc_pieces cut = {.body = {(const char *)data, (uint32_t)len}, .end_of_stream = 1};
	struct kvp_extproc_str piece;
	uint8_t end = 0;
	size_t total = 0;
	while (kvp_extproc_piece_next(&cut, &piece, &end))
		total += piece.len;
	KVP_ASSERT(total == len && end);
	return 0;
}
