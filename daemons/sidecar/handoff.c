#include "daemons/sidecar/handoff.h"

#include <stdio.h>
#include <string.h>
#include <sys/random.h>

#define TRT_ID_MIN (UINT64_C(1) << 40)
#define TRT_MS_MASK ((UINT64_C(1) << 39) - 1)
#define TRT_MS_MIN 65536 /* keeps ids over TRT_ID_MIN */

int kvp_pd_root(struct kvp_json *j, const char *text, uint64_t len, struct kvp_json_val *root)
{
	if (kvp_json_parse(j, text, len, KVP_JSON_DEPTH_MAX, root, NULL))
		return KVP_ERR_PROTO;
	return kvp_json_type(*root) == KVP_JSON_OBJ ? KVP_OK : KVP_ERR_PROTO;
}

int kvp_pd_one(struct kvp_json_val root, const char *key)
{
	struct kvp_json_val v;
	uint64_t n;
	if (kvp_json_get(root, key, &v))
		return 1;
	return kvp_json_type(v) == KVP_JSON_INT && kvp_json_u64(v, &n) == KVP_OK && n == 1;
}

int kvp_pd_is_doubled(struct kvp_json_val root, const char *key)
{
	struct kvp_json_iter it = kvp_json_each(root);
	size_t len = strlen(key);
	unsigned cnt = 0;
	while (kvp_json_next(&it))
		cnt += it.key_len == len && memcmp(it.key, key, len) == 0;
	return cnt > 1;
}

int kvp_pd_stream(struct kvp_json_val root)
{
	struct kvp_json_val v;
	int on;
	if (kvp_json_get(root, "stream", &v) || kvp_json_type(v) == KVP_JSON_NULL)
		return 0;
	return kvp_json_bool(v, &on) ? KVP_ERR_INVAL : on;
}

int kvp_vllm_client_ok(struct kvp_json_val root)
{
	struct kvp_json_val v;
	if (kvp_json_get(root, "kv_transfer_params", &v) || kvp_json_type(v) == KVP_JSON_NULL)
		return 1;
	return kvp_json_type(v) == KVP_JSON_OBJ && kvp_json_len(v) == 0;
}

static int flag_is(struct kvp_json_val obj, const char *key, int want)
{
	struct kvp_json_val v;
	int b;
	return kvp_json_get(obj, key, &v) == KVP_OK && kvp_json_bool(v, &b) == KVP_OK && b == want;
}

static int has_text(struct kvp_json_val obj, const char *key)
{
	struct kvp_json_val v;
	const char *s;
	size_t len;
	return kvp_json_get(obj, key, &v) == KVP_OK && kvp_json_str(v, &s, &len) == KVP_OK && len;
}

/* Arrays of arrays of integers from 0; an integer beyond 64 bits is none. */
static int groups_ok(struct kvp_json_val v)
{
	struct kvp_json_iter group = kvp_json_each(v);
	uint64_t id;
	if (kvp_json_type(v) != KVP_JSON_ARR)
		return 0;
	while (kvp_json_next(&group)) {
		struct kvp_json_iter it = kvp_json_each(group.val);
		if (kvp_json_type(group.val) != KVP_JSON_ARR)
			return 0;
		while (kvp_json_next(&it))
			if (kvp_json_type(it.val) != KVP_JSON_INT || kvp_json_u64(it.val, &id))
				return 0;
	}
	return 1;
}

static int port_of(struct kvp_json_val obj, const char *key, uint16_t *port)
{
	struct kvp_json_val v;
	uint64_t n;
	if (kvp_json_get(obj, key, &v) || kvp_json_type(v) != KVP_JSON_INT || kvp_json_u64(v, &n) || !n ||
		n > 65535)
		return 0;
	*port = (uint16_t)n;
	return 1;
}

int kvp_vllm_handoff(struct kvp_json *j, const char *text, uint64_t len, struct kvp_span *params)
{
	struct kvp_json_val root, p, groups;
	uint16_t port;
	if (kvp_pd_root(j, text, len, &root) || kvp_json_get(root, "kv_transfer_params", &p) ||
		kvp_json_type(p) != KVP_JSON_OBJ || !flag_is(p, "do_remote_prefill", 1) ||
		!flag_is(p, "do_remote_decode", 0) || kvp_json_get(p, "remote_block_ids", &groups) ||
		!groups_ok(groups) || !has_text(p, "remote_engine_id") || !has_text(p, "remote_request_id") ||
		!has_text(p, "remote_host") || !port_of(p, "remote_port", &port))
		return KVP_ERR_PROTO;
	return kvp_span_member(text, kvp_span_all(len), "kv_transfer_params", params) ? KVP_ERR_PROTO
										      : KVP_OK;
}

/* ---- TensorRT-LLM ---- */

static int is_int(struct kvp_json_val obj, const char *key)
{
	struct kvp_json_val v;
	return kvp_json_get(obj, key, &v) == KVP_OK && kvp_json_type(v) == KVP_JSON_INT;
}

static int ids_ok(struct kvp_json_val v, int nested)
{
	struct kvp_json_iter it = kvp_json_each(v);
	if (kvp_json_type(v) != KVP_JSON_ARR)
		return 0;
	while (kvp_json_next(&it)) {
		if (nested && kvp_json_type(it.val) == KVP_JSON_ARR)
			return kvp_json_len(v) == 1 && ids_ok(it.val, 0);
		if (kvp_json_type(it.val) != KVP_JSON_INT)
			return 0;
	}
	return 1;
}

int kvp_trt_context(struct kvp_json *j, const char *text, uint64_t len, struct kvp_trt_context *out)
{
	struct kvp_json_val root, v, choice, params, reason;
	struct kvp_trt_context c = {.needs_generation = 0};
	struct kvp_span all = kvp_span_all(len), choices;
	if (kvp_pd_root(j, text, len, &root) || kvp_json_get(root, "choices", &v) ||
		kvp_json_type(v) != KVP_JSON_ARR || kvp_json_len(v) != 1)
		return KVP_ERR_PROTO;
	struct kvp_json_iter it = kvp_json_each(v);
	kvp_json_next(&it);
	choice = it.val;
	if (kvp_json_get(choice, "disaggregated_params", &params) || kvp_json_type(params) != KVP_JSON_OBJ ||
		!is_int(params, "ctx_request_id") || !is_int(params, "disagg_request_id") ||
		kvp_json_get(root, "prompt_token_ids", &v) || !ids_ok(v, 1))
		return KVP_ERR_PROTO;
	c.needs_generation = kvp_json_get(choice, "finish_reason", &reason) == KVP_OK &&
			     (kvp_json_str_is(reason, "length") || kvp_json_str_is(reason, "not_finished"));
	if (kvp_span_member(text, all, "choices", &choices) || kvp_span_first(text, choices, &c.choice) ||
		kvp_span_member(text, c.choice, "disaggregated_params", &c.params) ||
		kvp_span_member(text, all, "prompt_token_ids", &c.ids))
		return KVP_ERR_PROTO;
	if (kvp_json_get(root, "usage", &v) == KVP_OK && kvp_json_type(v) == KVP_JSON_OBJ &&
		kvp_span_member(text, all, "usage", &c.usage))
		return KVP_ERR_PROTO;
	*out = c;
	return KVP_OK;
}

static int put_text(struct kvp_http_buf *b, const char *t)
{
	return kvp_http_buf_put(b, t, strlen(t));
}

/* A member of src under the same name, if it is there. */
static int put_same(struct kvp_http_buf *b, const char *text, struct kvp_span src, const char *key)
{
	struct kvp_span v;
	if (kvp_span_member(text, src, key, &v))
		return KVP_OK;
	int rc = put_text(b, "\"");
	rc = rc ? rc : put_text(b, key);
	rc = rc ? rc : put_text(b, "\":");
	rc = rc ? rc : kvp_http_buf_put(b, text + v.at, v.len);
	return rc ? rc : put_text(b, ",");
}

static int put_chunk_head(struct kvp_http_buf *b, const char *text, uint64_t len, int is_chat)
{
	struct kvp_span all = kvp_span_all(len);
	int rc = put_text(b, "data: {");
	rc = rc ? rc : put_same(b, text, all, "id");
	rc = rc ? rc : put_same(b, text, all, "created");
	rc = rc ? rc : put_same(b, text, all, "model");
	rc = rc ? rc : put_text(b, "\"object\":\"");
	rc = rc ? rc : put_text(b, is_chat ? "chat.completion.chunk" : "text_completion");
	return rc ? rc : put_text(b, "\",\"choices\":[");
}

int kvp_trt_events(const char *text, uint64_t len, const struct kvp_trt_context *c, int is_chat,
	int with_usage, struct kvp_http_buf *out)
{
	struct kvp_span said;
	int rc = put_chunk_head(out, text, len, is_chat);
	rc = rc ? rc : put_text(out, "{\"index\":0,");
	if (is_chat) {
		rc = rc ? rc : put_text(out, "\"delta\":");
		if (kvp_span_member(text, c->choice, "message", &said))
			rc = rc ? rc : put_text(out, "{}");
		else
			rc = rc ? rc : kvp_http_buf_put(out, text + said.at, said.len);
		rc = rc ? rc : put_text(out, ",");
	} else {
		rc = rc ? rc : put_same(out, text, c->choice, "text");
	}
	rc = rc ? rc : put_same(out, text, c->choice, "finish_reason");
	if (!rc && out->p[out->len - 1] == ',')
		out->len--;
	rc = rc ? rc : put_text(out, "}]}\n\n");
	if (with_usage && c->usage.len) {
		rc = rc ? rc : put_chunk_head(out, text, len, is_chat);
		rc = rc ? rc : put_text(out, "],\"usage\":");
		rc = rc ? rc : kvp_http_buf_put(out, text + c->usage.at, c->usage.len);
		rc = rc ? rc : put_text(out, "}\n\n");
	}
	return rc ? rc : put_text(out, "data: [DONE]\n\n");
}

uint64_t kvp_trt_id(uint64_t ms, unsigned node, unsigned process, unsigned counter)
{
	ms &= TRT_MS_MASK;
	ms += ms < TRT_MS_MIN ? TRT_MS_MIN : 0;
	return ms << 24 | (uint64_t)(node & 255) << 16 | (uint64_t)(process & 63) << 10 | (counter & 1023);
}

uint64_t kvp_trt_random_id(void)
{
	uint64_t v;
	if (getrandom(&v, sizeof(v), 0) != (ssize_t)sizeof(v))
		v = 0;
	v &= INT64_MAX;
	return v < TRT_ID_MIN ? v | TRT_ID_MIN : v;
}

/* ---- SGLang ---- */

int kvp_sgl_info(struct kvp_json *j, const char *text, uint64_t len, const char *version, const char *mode,
	uint16_t *port)
{
	struct kvp_json_val root, v;
	if (kvp_pd_root(j, text, len, &root) || kvp_json_get(root, "version", &v) ||
		!kvp_json_str_is(v, version) || kvp_json_get(root, "disaggregation_mode", &v) ||
		!kvp_json_str_is(v, mode))
		return KVP_ERR_PROTO;
	if (strcmp(mode, "prefill") == 0 && !port_of(root, "disaggregation_bootstrap_port", port))
		return KVP_ERR_PROTO;
	return KVP_OK;
}

void kvp_sgl_open(struct kvp_sgl_check *c, enum kvp_sgl_form form, struct kvp_json *j)
{
	*c = (struct kvp_sgl_check){.form = form, .json = j};
}

void kvp_sgl_close(struct kvp_sgl_check *c)
{
	kvp_http_buf_free(&c->line);
	kvp_http_buf_free(&c->data);
}

/* An error spoils the answer; a finish reason completes it. */
static int judge(struct kvp_sgl_check *c, const char *text, uint64_t len)
{
	static const char *const finish[] = {
		"stop", "length", "tool_calls", "function_call", "content_filter"};
	struct kvp_json_val root, v;
	if (kvp_pd_root(c->json, text, len, &root))
		return KVP_ERR_PROTO;
	if (kvp_json_get(root, "object", &v) == KVP_OK && kvp_json_str_is(v, "error"))
		return KVP_ERR_PROTO;
	if (kvp_json_get(root, "error", &v) == KVP_OK && kvp_json_type(v) != KVP_JSON_NULL)
		return KVP_ERR_PROTO;
	if (kvp_json_get(root, "choices", &v) || kvp_json_type(v) != KVP_JSON_ARR)
		return KVP_OK;
	struct kvp_json_iter it = kvp_json_each(v);
	while (kvp_json_next(&it)) {
		struct kvp_json_val reason;
		if (kvp_json_get(it.val, "finish_reason", &reason))
			continue;
		if (kvp_json_str_is(reason, "abort"))
			return KVP_ERR_PROTO;
		for (size_t i = 0; i < sizeof(finish) / sizeof(finish[0]); i++)
			c->finished |= kvp_json_str_is(reason, finish[i]) != 0;
	}
	return KVP_OK;
}

static int event_end(struct kvp_sgl_check *c)
{
	int rc = KVP_OK;
	if (!c->has_data)
		return KVP_OK;
	if (c->done)
		rc = KVP_ERR_PROTO; /* nothing comes after the last event */
	else if (c->data.len == 6 && memcmp(c->data.p, "[DONE]", 6) == 0)
		c->done = 1;
	else
		rc = judge(c, c->data.len ? c->data.p : "", c->data.len);
	c->has_data = 0;
	kvp_http_buf_trim(&c->data);
	return rc;
}

static int line_end(struct kvp_sgl_check *c)
{
	const char *p = c->line.p;
	uint64_t len = c->line.len;
	c->line.len = 0;
	if (!len)
		return event_end(c);
	if (len < 4 || memcmp(p, "data", 4) != 0 || (len > 4 && p[4] != ':'))
		return KVP_OK; /* a comment, or another field */
	uint64_t at = len == 4 ? 4 : len > 5 && p[5] == ' ' ? 6 : 5;
	int rc = c->has_data ? kvp_http_buf_put(&c->data, "\n", 1) : KVP_OK;
	c->has_data = 1;
	return rc ? rc : kvp_http_buf_put(&c->data, p + at, len - at);
}

static int feed_events(struct kvp_sgl_check *c, const char *data, uint64_t len)
{
	uint64_t at = 0;
	int rc = KVP_OK;
	while (!rc && at < len) {
		uint64_t from = at;
		if (c->after_cr && data[at] == '\n') {
			c->after_cr = 0;
			at++;
			continue;
		}
		c->after_cr = 0;
		while (at < len && data[at] != '\n' && data[at] != '\r')
			at++;
		rc = kvp_http_buf_put(&c->line, data + from, at - from);
		if (!rc && at < len) {
			c->after_cr = data[at] == '\r';
			at++;
			rc = line_end(c);
		}
	}
	return rc;
}

int kvp_sgl_feed(struct kvp_sgl_check *c, const char *data, uint64_t len)
{
	static const uint8_t bom[3] = {0xef, 0xbb, 0xbf};
	if (c->failed)
		return KVP_ERR_PROTO;
	for (uint64_t i = 0; i < len && c->seen + i < 3; i++)
		c->first[c->seen + i] = (uint8_t)data[i];
	int fresh = c->seen < 3;
	c->seen += len;
	int rc = fresh && c->seen >= 3 && memcmp(c->first, bom, 3) == 0 ? KVP_ERR_PROTO : KVP_OK;
	if (!rc)
		rc = c->form == KVP_SGL_JSON ? kvp_http_buf_put(&c->data, data, len)
					     : feed_events(c, data, len);
	c->failed = rc != KVP_OK;
	return rc;
}

int kvp_sgl_end(struct kvp_sgl_check *c)
{
	if (c->failed)
		return KVP_ERR_PROTO;
	if (c->form == KVP_SGL_JSON)
		return judge(c, c->data.len ? c->data.p : "", c->data.len) || !c->finished ? KVP_ERR_PROTO
											   : KVP_OK;
	return c->done && c->finished && !c->line.len && !c->has_data ? KVP_OK : KVP_ERR_PROTO;
}
