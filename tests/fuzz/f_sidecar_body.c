/* Fuzz: any bytes as a request body, as answers of engines and as the prefill header. What is accepted obeys
 * its rules: an edited body is JSON whose other members are those of the original, a handoff lies inside its
 * answer, and an event stream is judged the same however it is cut.
 *
 * Input      byte 0: what the rest is, and where it is cut.
 */
#define KVP_FUZZ_NAME "sidecar_body"
#include <kvpick/err.h>
#include <stdlib.h>
#include <string.h>

#include "daemons/sidecar/sidecar.h"
#include "tests/fuzz/replay.h"

static struct kvp_json *json;

/* Objects as the library reads them: an independent judge of what the spans say. */
static int root_of(struct kvp_json *j, const char *text, uint64_t len, struct kvp_json_val *root)
{
	return kvp_json_parse(j, text, len, KVP_JSON_DEPTH_MAX, root, NULL) ||
	       kvp_json_type(*root) != KVP_JSON_OBJ;
}

/* Members that are not edited, in order, are the same texts before and after. */
static void check_rest(const char *a, uint64_t a_len, const char *b, uint64_t b_len)
{
	static const char *const edited[] = {"stream", "max_tokens", "max_completion_tokens",
		"stream_options", "min_tokens", "min_completion_tokens", "kv_transfer_params"};
	struct kvp_json *other = kvp_json_new();
	struct kvp_json_val x, y, v;
	KVP_ASSERT(other && root_of(json, a, a_len, &x) == 0 && root_of(other, b, b_len, &y) == 0);
	struct kvp_json_iter i = kvp_json_each(x), k = kvp_json_each(y);
	while (kvp_json_next(&i)) {
		int is_edited = 0;
		for (size_t e = 0; e < sizeof(edited) / sizeof(edited[0]); e++)
			is_edited |= strlen(edited[e]) == i.key_len && !memcmp(edited[e], i.key, i.key_len);
		if (is_edited)
			continue;
		KVP_ASSERT(kvp_json_next(&k) && k.key_len == i.key_len && !memcmp(k.key, i.key, i.key_len));
		KVP_ASSERT(kvp_json_type(k.val) == kvp_json_type(i.val));
		KVP_ASSERT(kvp_json_len(k.val) == kvp_json_len(i.val));
	}
	struct kvp_member m[] = {{.key = "stream"}, {.key = "max_tokens"}};
	KVP_ASSERT(kvp_span_members(b, kvp_span_all(b_len), m, 2) == 0 && m[0].cnt == 1 && m[1].cnt == 1);
	KVP_ASSERT(
		kvp_json_get(y, "stream", &v) == 0 && kvp_pd_stream(b, &m[0]) == 0 && kvp_pd_one(b, &m[1]));
	KVP_ASSERT(kvp_json_get(y, "min_tokens", &v) && kvp_json_get(y, "stream_options", &v));
	kvp_json_free(other);
}

static void body(const char *text, uint64_t len)
{
	struct kvp_req r = {.body = {.len = len}};
	struct kvp_http_buf out = {0};
	struct kvp_json_val root;
	r.body.p = malloc(len ? len : 1);
	KVP_ASSERT(r.body.p);
	memcpy(r.body.p, text, len);
	int valid = root_of(json, text, len, &root) == 0;
	KVP_ASSERT(valid == (kvp_pd_valid(text, len) == 0));
	int rc = kvp_adapter_vllm.prefill_body(&r, &out); /* also of a text that is no JSON: in bounds */
	KVP_ASSERT(!valid || rc == 0);
	if (valid)
		check_rest(text, len, out.p, out.len);
	kvp_http_buf_free(&out);
	kvp_http_buf_free(&r.body);
}

static void handoff(const char *text, uint64_t len)
{
	struct kvp_span p;
	struct kvp_trt_context c;
	struct kvp_json_val v;
	uint16_t port = 0;
	if (kvp_vllm_handoff(text, len, &p) == 0) {
		KVP_ASSERT(p.at + p.len <= len && p.len >= 2 && text[p.at] == '{');
		KVP_ASSERT(root_of(json, text + p.at, p.len, &v) == 0);
	}
	if (kvp_trt_context(text, len, &c) == 0) {
		struct kvp_http_buf out = {0};
		KVP_ASSERT(root_of(json, text + c.params.at, c.params.len, &v) == 0);
		KVP_ASSERT(kvp_trt_events(text, len, &c, 1, 1, &out) == 0);
		char *end = memmem(out.p, out.len, "\n\n", 2);
		KVP_ASSERT(end && root_of(json, out.p + 6, (uint64_t)(end - out.p) - 6, &v) == 0);
		kvp_http_buf_free(&out);
	}
	if (kvp_sgl_info(text, len, "0.5.19", "prefill", &port) == 0)
		KVP_ASSERT(port);
}

static int judged(enum kvp_sgl_form form, const char *text, uint64_t len, uint64_t cut)
{
	struct kvp_sgl_check c;
	kvp_sgl_open(&c, form);
	int rc = kvp_sgl_feed(&c, text, cut);
	rc = rc ? rc : kvp_sgl_feed(&c, text + cut, len - cut);
	rc = rc ? rc : kvp_sgl_end(&c);
	kvp_sgl_close(&c);
	return rc;
}

static void target(const char *text, uint64_t len)
{
	struct kvp_target t, again;
	struct kvp_target_text line = {text, len}, out[4];
	size_t n = kvp_target_pick(&line, 1, out, 4);
	for (size_t i = 0; i < n; i++)
		KVP_ASSERT(out[i].len && out[i].ptr >= text && out[i].ptr + out[i].len <= text + len);
	if (kvp_target_parse(text, len, &t) != 0)
		return;
	KVP_ASSERT(t.port && t.host[0] && !strpbrk(t.host, "/@,%[] "));
	KVP_ASSERT(kvp_target_parse(t.authority, strlen(t.authority), &again) == 0 && again.port == t.port);
	KVP_ASSERT(kvp_target_allowed(t.authority, &t) && kvp_target_allowed("", &t));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len)
{
	if (!len)
		return 0;
	json = json ? json : kvp_json_new();
	const char *text = (const char *)data + 1;
	uint64_t n = len - 1, cut = n ? data[0] / 4 * n / 64 : 0;
	switch (data[0] % 4) {
	case 0:
		body(text, n);
		break;
	case 1:
		handoff(text, n);
		break;
	case 2:
		KVP_ASSERT(judged(KVP_SGL_EVENTS, text, n, cut) == judged(KVP_SGL_EVENTS, text, n, 0));
		KVP_ASSERT(judged(KVP_SGL_JSON, text, n, cut) == judged(KVP_SGL_JSON, text, n, 0));
		break;
	default:
		target(text, n);
	}
	return 0;
}
