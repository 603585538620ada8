#include "daemons/sidecar/handoff.h"

#include <kvpick/err.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>

#include "ipc/json_check.h"

#define TRT_ID_MIN (UINT64_C(1) << 40)
#define TRT_MS_MASK ((UINT64_C(1) << 39) - 1)
#define TRT_MS_MIN 65536 /* keeps ids over TRT_ID_MIN */

int kvp_pd_valid(const char *text, uint64_t len)
{
	struct kvp_json_check c = {.rc = KVP_OK};
	kvp_json_check_feed(&c, text, len);
	return kvp_json_check_end(&c) == KVP_OK && c.first == '{' ? KVP_OK : KVP_ERR_PROTO;
}

int kvp_pd_one(const char *text, const struct kvp_member *m)
{
	return !m->cnt || kvp_span_is(text, m->val, "1");
}

int kvp_pd_stream(const char *text, const struct kvp_member *m)
{
	if (!m->cnt || kvp_span_is(text, m->val, "null") || kvp_span_is(text, m->val, "false"))
		return 0;
	return kvp_span_is(text, m->val, "true") ? 1 : KVP_ERR_INVAL;
}

int kvp_vllm_client_ok(const char *text, const struct kvp_member *m)
{
	if (!m->cnt || kvp_span_is(text, m->val, "null"))
		return 1;
	const char *p = text + m->val.at, *end = p + m->val.len - 1;
	if (*p++ != '{')
		return 0;
	while (p < end && strchr(" \t\r\n", *p))
		p++;
	return p == end;
}

static int has_text(const char *text, struct kvp_span v)
{
	return v.len > 2 && text[v.at] == '"';
}

/* Arrays of arrays of integers from 0. */
static int groups_ok(const char *text, struct kvp_span v)
{
	struct kvp_span_iter groups, ids;
	struct kvp_span group, one;
	uint64_t id;
	if (kvp_span_each(text, v, &groups))
		return 0;
	while (kvp_span_next(&groups, &group)) {
		if (kvp_span_each(text, group, &ids))
			return 0;
		while (kvp_span_next(&ids, &one))
			if (kvp_span_u64(text, one, &id))
				return 0;
	}
	return 1;
}

static int port_of(const char *text, struct kvp_span v, uint16_t *port)
{
	uint64_t n;
	if (kvp_span_u64(text, v, &n) || !n || n > 65535)
		return 0;
	*port = (uint16_t)n;
	return 1;
}

int kvp_vllm_handoff(const char *text, uint64_t len, struct kvp_span *params)
{
	enum { PREFILL, DECODE, BLOCKS, ENGINE, REQUEST, HOST, PORT, CNT };
	struct kvp_member m[CNT] = {{.key = "do_remote_prefill"}, {.key = "do_remote_decode"},
		{.key = "remote_block_ids"}, {.key = "remote_engine_id"}, {.key = "remote_request_id"},
		{.key = "remote_host"}, {.key = "remote_port"}};
	struct kvp_span p;
	uint16_t port;
	if (kvp_pd_valid(text, len) || kvp_span_member(text, kvp_span_all(len), "kv_transfer_params", &p) ||
		kvp_span_members(text, p, m, CNT) || !kvp_span_is(text, m[PREFILL].val, "true") ||
		!kvp_span_is(text, m[DECODE].val, "false") || !groups_ok(text, m[BLOCKS].val) ||
		!has_text(text, m[ENGINE].val) || !has_text(text, m[REQUEST].val) ||
		!has_text(text, m[HOST].val) || !port_of(text, m[PORT].val, &port))
		return KVP_ERR_PROTO;
	*params = p;
	return KVP_OK;
}

/* ---- TensorRT-LLM ---- */

enum ids_form { IDS_FLAT, IDS_ANY };

/* An array of integers, or of one such array. */
static int ids_ok(const char *text, struct kvp_span v, enum ids_form form)
{
	struct kvp_span_iter it;
	struct kvp_span one;
	if (kvp_span_each(text, v, &it))
		return 0;
	while (kvp_span_next(&it, &one)) {
		if (form == IDS_ANY && text[one.at] == '[')
			return ids_ok(text, one, IDS_FLAT) && !kvp_span_next(&it, &one);
		if (!kvp_span_is_int(text, one))
			return 0;
		form = IDS_FLAT;
	}
	return 1;
}

int kvp_trt_context(const char *text, uint64_t len, struct kvp_trt_context *out)
{
	struct kvp_member top[] = {{.key = "choices"}, {.key = "prompt_token_ids"}, {.key = "usage"}},
			  said[] = {{.key = "disaggregated_params"}, {.key = "finish_reason"}},
			  id[] = {{.key = "ctx_request_id"}, {.key = "disagg_request_id"}};
	struct kvp_trt_context c = {.needs_generation = 0};
	struct kvp_span_iter it;
	struct kvp_span second;
	if (kvp_pd_valid(text, len) || kvp_span_members(text, kvp_span_all(len), top, 3) ||
		kvp_span_each(text, top[0].val, &it) || !kvp_span_next(&it, &c.choice) ||
		kvp_span_next(&it, &second) || kvp_span_members(text, c.choice, said, 2) ||
		kvp_span_members(text, said[0].val, id, 2) || !kvp_span_is_int(text, id[0].val) ||
		!kvp_span_is_int(text, id[1].val) || !ids_ok(text, top[1].val, IDS_ANY))
		return KVP_ERR_PROTO;
	c.needs_generation = kvp_span_spells(text, said[1].val, "length") ||
			     kvp_span_spells(text, said[1].val, "not_finished");
	c.params = said[0].val;
	c.ids = top[1].val;
	if (kvp_span_is_object(text, top[2].val))
		c.usage = top[2].val;
	*out = c;
	return KVP_OK;
}

/* A member of src under the same name, if it is there. */
static int put_same(struct kvp_http_buf *b, const char *text, struct kvp_span src, const char *key)
{
	struct kvp_span v;
	if (kvp_span_member(text, src, key, &v))
		return KVP_OK;
	int rc = kvp_http_buf_text(b, "\"");
	rc = rc ? rc : kvp_http_buf_text(b, key);
	rc = rc ? rc : kvp_http_buf_text(b, "\":");
	rc = rc ? rc : kvp_http_buf_put(b, text + v.at, v.len);
	return rc ? rc : kvp_http_buf_text(b, ",");
}

static int put_chunk_head(struct kvp_http_buf *b, const char *text, uint64_t len, int is_chat)
{
	struct kvp_span all = kvp_span_all(len);
	int rc = kvp_http_buf_text(b, "data: {");
	rc = rc ? rc : put_same(b, text, all, "id");
	rc = rc ? rc : put_same(b, text, all, "created");
	rc = rc ? rc : put_same(b, text, all, "model");
	rc = rc ? rc : kvp_http_buf_text(b, "\"object\":\"");
	rc = rc ? rc : kvp_http_buf_text(b, is_chat ? "chat.completion.chunk" : "text_completion");
	return rc ? rc : kvp_http_buf_text(b, "\",\"choices\":[");
}

int kvp_trt_events(const char *text, uint64_t len, const struct kvp_trt_context *c, int is_chat,
	int with_usage, struct kvp_http_buf *out)
{
	struct kvp_span said;
	int rc = put_chunk_head(out, text, len, is_chat);
	rc = rc ? rc : kvp_http_buf_text(out, "{\"index\":0,");
	if (is_chat) {
		rc = rc ? rc : kvp_http_buf_text(out, "\"delta\":");
		if (kvp_span_member(text, c->choice, "message", &said))
			rc = rc ? rc : kvp_http_buf_text(out, "{}");
		else
			rc = rc ? rc : kvp_http_buf_put(out, text + said.at, said.len);
		rc = rc ? rc : kvp_http_buf_text(out, ",");
	} else {
		rc = rc ? rc : put_same(out, text, c->choice, "text");
	}
	rc = rc ? rc : put_same(out, text, c->choice, "finish_reason");
	if (!rc && out->p[out->len - 1] == ',')
		out->len--;
	rc = rc ? rc : kvp_http_buf_text(out, "}]}\n\n");
	if (with_usage && c->usage.len) {
		rc = rc ? rc : put_chunk_head(out, text, len, is_chat);
		rc = rc ? rc : kvp_http_buf_text(out, "],\"usage\":");
		rc = rc ? rc : kvp_http_buf_put(out, text + c->usage.at, c->usage.len);
		rc = rc ? rc : kvp_http_buf_text(out, "}\n\n");
	}
	return rc ? rc : kvp_http_buf_text(out, "data: [DONE]\n\n");
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

int kvp_sgl_info(const char *text, uint64_t len, const char *version, const char *mode, uint16_t *port)
{
	struct kvp_member m[] = {
		{.key = "version"}, {.key = "disaggregation_mode"}, {.key = "disaggregation_bootstrap_port"}};
	if (kvp_pd_valid(text, len) || kvp_span_members(text, kvp_span_all(len), m, 3) ||
		!kvp_span_spells(text, m[0].val, version) || !kvp_span_spells(text, m[1].val, mode))
		return KVP_ERR_PROTO;
	if (strcmp(mode, "prefill") == 0 && !port_of(text, m[2].val, port))
		return KVP_ERR_PROTO;
	return KVP_OK;
}

void kvp_sgl_open(struct kvp_sgl_check *c, enum kvp_sgl_form form)
{
	*c = (struct kvp_sgl_check){.form = form};
}

void kvp_sgl_close(struct kvp_sgl_check *c)
{
	kvp_http_buf_free(&c->line);
	kvp_http_buf_free(&c->data);
}

/* A finish reason: KVP_OK and *finished set if it is one of those that complete an answer. */
static int finish_reason(const char *text, struct kvp_span v, uint8_t *finished)
{
	static const char *const finish[] = {
		"stop", "length", "tool_calls", "function_call", "content_filter"};
	if (kvp_span_spells(text, v, "abort"))
		return KVP_ERR_PROTO;
	for (size_t i = 0; i < sizeof(finish) / sizeof(finish[0]); i++)
		*finished |= kvp_span_spells(text, v, finish[i]) != 0;
	return KVP_OK;
}

/* An error spoils the answer; a finish reason completes it. */
static int judge(const char *text, uint64_t len, uint8_t *finished)
{
	struct kvp_member m[] = {{.key = "object"}, {.key = "error"}, {.key = "choices"}},
			  reason = {.key = "finish_reason"};
	struct kvp_span_iter it;
	struct kvp_span choice;
	if (kvp_pd_valid(text, len) || kvp_span_members(text, kvp_span_all(len), m, 3) ||
		kvp_span_spells(text, m[0].val, "error") ||
		(m[1].cnt && !kvp_span_is(text, m[1].val, "null")))
		return KVP_ERR_PROTO;
	if (kvp_span_each(text, m[2].val, &it))
		return KVP_OK;
	while (kvp_span_next(&it, &choice))
		if (kvp_span_members(text, choice, &reason, 1) == KVP_OK &&
			finish_reason(text, reason.val, finished))
			return KVP_ERR_PROTO;
	return KVP_OK;
}

int kvp_sgl_whole(const char *text, uint64_t len)
{
	uint8_t finished = 0;
	return judge(text, len, &finished) || !finished ? KVP_ERR_PROTO : KVP_OK;
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
		rc = judge(c->data.len ? c->data.p : "", c->data.len, &c->finished);
	c->has_data = 0;
	kvp_http_buf_trim(&c->data);
	return rc;
}

static int line_data(struct kvp_sgl_check *c, const char *p, uint64_t len)
{
	if (!len)
		return event_end(c);
	if (len < 4 || memcmp(p, "data", 4) != 0 || (len > 4 && p[4] != ':'))
		return KVP_OK; /* a comment, or another field */
	uint64_t at = len == 4 ? 4 : len > 5 && p[5] == ' ' ? 6 : 5;
	int rc = c->has_data ? kvp_http_buf_put(&c->data, "\n", 1) : KVP_OK;
	c->has_data = 1;
	return rc ? rc : kvp_http_buf_put(&c->data, p + at, len - at);
}

static int line_end(struct kvp_sgl_check *c)
{
	int rc = line_data(c, c->line.p, c->line.len);
	kvp_http_buf_trim(&c->line);
	return rc;
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
		return kvp_sgl_whole(c->data.len ? c->data.p : "", c->data.len);
	return c->done && c->finished && !c->line.len && !c->has_data ? KVP_OK : KVP_ERR_PROTO;
}
