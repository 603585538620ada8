/* Fuzz the HTTP server's parser: arbitrary bytes, arbitrary cuts, no sockets.
 *
 * Input      byte 0: limits and cutting pattern; the rest: what a client sends.
 * Oracle     cutting must not matter: the same bytes in one piece and in pieces give the same requests and
 *            the same failure at the same place; limits hold; every request's parts lie inside its head.
 */
#include <stdlib.h>
#include <string.h>
#include <kvpick/err.h>
#include "ipc/http_parse.h"
#define KVP_FUZZ_NAME "http"
#include "tests/fuzz/replay.h"

struct trace {
	uint64_t hash, requests, taken;
	int status;
};

static void mix(struct trace *t, const void *data, uint64_t len)
{
	const unsigned char *p = data;
	for (uint64_t i = 0; i < len; i++)
		t->hash = (t->hash ^ p[i]) * 0x100000001b3u;
	t->hash = (t->hash ^ len) * 0x100000001b3u;
}

static void request_seen(struct trace *t, const struct kvp_http_in *in)
{
	const struct kvp_http_req *r = &in->req;
	const char *head = in->head.raw.p;
	KVP_ASSERT(r->path && r->path_len);
	KVP_ASSERT(!r->query || (r->query >= head && r->query + r->query_len <= head + in->head.raw.len));
	KVP_ASSERT(r->body_len <= in->body_max && in->head.line_len <= in->head.line_max);
	KVP_ASSERT(in->head.header_len <= in->head.header_max);
	for (int i = 0; i < KVP_HTTP_BODY_SLACK; i++)
		KVP_ASSERT(r->body[r->body_len + (uint64_t)i] == 0);
	uint32_t len = 0;
	const char *v = kvp_http_head_find(&in->head, "x", &len, NULL);
	mix(t, v ? v : "", len);
	mix(t, r->path, r->path_len);
	mix(t, r->query ? r->query : "", r->query_len);
	mix(t, r->content_type ? r->content_type : "", r->content_type_len);
	mix(t, r->body, r->body_len);
	t->hash += (uint64_t)r->method * 2 + r->is_head;
	t->requests++;
}

/* step 0: everything at once; else pieces of 1..step bytes. */
static struct trace feed(const char *data, uint64_t len, uint32_t step, uint32_t limits)
{
	struct kvp_http_in in;
	struct trace t = {0};
	memset(&in, 0, sizeof(in));
	in.body_max = limits & 1 ? 64 : 8192;
	in.head.line_max = limits & 2 ? 32 : 16384;
	in.head.header_max = limits & 4 ? 64 : 65536;
	uint32_t rnd = step;
	while (t.taken < len && !t.status) {
		rnd = rnd * 1103515245u + 12345u;
		uint64_t n = len - t.taken, used;
		if (step && n > 1 + (rnd >> 16) % step)
			n = 1 + (rnd >> 16) % step;
		int rc = kvp_http_in_feed(&in, data + t.taken, n, &used);
		KVP_ASSERT(used <= n && (used || rc != KVP_ERR_AGAIN));
		t.taken += used;
		if (rc == KVP_OK) {
			request_seen(&t, &in);
			kvp_http_in_reset(&in);
		} else if (rc == KVP_ERR_PROTO) {
			KVP_ASSERT(in.status >= 400 && in.text);
			t.status = in.status;
		} else {
			KVP_ASSERT(rc == KVP_ERR_AGAIN && used == n);
		}
	}
	kvp_http_in_free(&in);
	return t;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len)
{
	if (!len)
		return 0;
	kvp_http_parse_init();
	const char *p = (const char *)data + 1;
	struct trace whole = feed(p, len - 1, 0, data[0] & 7), one = feed(p, len - 1, 1, data[0] & 7),
		     some = feed(p, len - 1, 2u + (data[0] >> 3), data[0] & 7);
	KVP_ASSERT(whole.status == one.status && whole.status == some.status);
	KVP_ASSERT(whole.requests == one.requests && whole.requests == some.requests);
	KVP_ASSERT(whole.hash == one.hash && whole.hash == some.hash);
	return 0;
}
