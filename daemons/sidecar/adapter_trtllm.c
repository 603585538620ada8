#include <kvpick/err.h>
#include <stdio.h>
#include <time.h>

#include "daemons/sidecar/sidecar.h"

/* TensorRT-LLM, context first: the context engine reads the prompt and makes the first token; its opaque
 * state and the prompt's tokens go to the generation engine. One number names both legs. */

#define TEXT(t) .val = (t), .val_len = sizeof(t) - 1

static uint64_t mint(struct kvp_worker *w)
{
	struct timespec ts;
	if (w->cfg->sidecar_node_id == KVP_CONFIG_UNSET)
		return kvp_trt_random_id();
	clock_gettime(CLOCK_REALTIME, &ts);
	uint64_t ms = (uint64_t)ts.tv_sec * 1000 + (uint64_t)ts.tv_nsec / 1000000;
	return kvp_trt_id(ms, (unsigned)w->cfg->sidecar_node_id, w->id, w->trt_counter++);
}

static int is_off(const char *text, const struct kvp_member *m)
{
	return !m->cnt || kvp_span_is(text, m->val, "null") || kvp_span_is(text, m->val, "false");
}

static int check(struct kvp_req *r, struct kvp_fail *f)
{
	enum { N, BEST, BEAM, STREAM, OPTIONS, CNT };
	struct kvp_member m[CNT] = {{.key = "n"}, {.key = "best_of"}, {.key = "use_beam_search"},
		{.key = "stream"}, {.key = "stream_options"}};
	const char *text = r->body.p;
	struct kvp_span usage;
	*f = (struct kvp_fail){400, KVP_RESULT_VARIANT, "only one sequence, without beam search"};
	kvp_span_members(text, kvp_span_all(r->body.len), m, CNT);
	if (!kvp_pd_one(text, &m[N]) || !is_off(text, &m[BEAM]) ||
		(!kvp_pd_one(text, &m[BEST]) && !kvp_span_is(text, m[BEST].val, "null")))
		return KVP_ERR_INVAL;
	r->drops_n = m[N].cnt > 1;
	r->is_stream = kvp_pd_stream(text, &m[STREAM]) == 1;
	r->wants_usage = kvp_span_member(text, m[OPTIONS].val, "include_usage", &usage) == KVP_OK &&
			 kvp_span_is(text, usage, "true");
	return KVP_OK;
}

static int prefill_body(struct kvp_req *r, struct kvp_http_buf *body)
{
	char params[96];
	r->trt_id = mint(r->w);
	int n = snprintf(params, sizeof(params),
		"{\"request_type\":\"context_only\",\"disagg_request_id\":%llu}",
		(unsigned long long)r->trt_id);
	const struct kvp_edit edit[] = {{.key = "stream", TEXT("false")}, {.key = "stream_options"},
		{.key = "prompt_token_ids"}, {.key = kvp_req_dropped(r)},
		{.key = "disaggregated_params", .val = params, .val_len = (uint64_t)n}};
	return kvp_span_edit(
		r->body.p, kvp_span_all(r->body.len), edit, sizeof(edit) / sizeof(edit[0]), body);
}

/* The context leg has already said all: its answer without the state. */
static int direct_body(struct kvp_req *r, const char *text, uint64_t len, const struct kvp_trt_context *c,
	struct kvp_http_buf *body)
{
	const struct kvp_edit edit = {.key = "disaggregated_params"};
	struct kvp_http_buf choice = {0};
	if (r->is_stream)
		return kvp_trt_events(text, len, c, r->path == KVP_PATH_CHAT, r->wants_usage, body);
	int rc = kvp_span_edit(text, c->choice, &edit, 1, &choice);
	rc = rc ? rc : kvp_text_replace(text, len, c->choice, choice.p, choice.len, body);
	kvp_http_buf_free(&choice);
	return rc;
}

static int generation_body(
	struct kvp_req *r, const char *text, const struct kvp_trt_context *c, struct kvp_http_buf *body)
{
	struct kvp_http_buf params = {0};
	char id[24];
	int n = snprintf(id, sizeof(id), "%llu", (unsigned long long)r->trt_id);
	const struct kvp_edit state[] = {{.key = "request_type", TEXT("\"generation_only\"")},
		{.key = "disagg_request_id", .val = id, .val_len = (uint64_t)n},
		{.key = "ctx_usage",
			.val = c->usage.len ? text + c->usage.at : NULL,
			.val_len = c->usage.len}};
	int rc = kvp_span_edit(text, c->params, state, 3, &params);
	int is_chat = r->path == KVP_PATH_CHAT;
	const struct kvp_edit edit[] = {{.key = is_chat ? "prompt_token_ids" : "prompt",
						.val = text + c->ids.at,
						.val_len = c->ids.len},
		{.key = "disaggregated_params", .val = params.p, .val_len = params.len},
		{.key = kvp_req_dropped(r)}, {.key = "prompt_token_ids"}};
	rc = rc ? rc : kvp_span_edit(r->body.p, kvp_span_all(r->body.len), edit, is_chat ? 3 : 4, body);
	kvp_http_buf_free(&params);
	return rc;
}

static enum kvp_answer prefill_answer(
	struct kvp_req *r, const char *text, uint64_t len, struct kvp_http_buf *body, struct kvp_fail *f)
{
	struct kvp_trt_context c;
	(void)f; /* says that already */
	if (kvp_trt_context(text, len, &c))
		return KVP_ANSWER_ERROR;
	if (c.needs_generation)
		return generation_body(r, text, &c, body) ? KVP_ANSWER_ERROR : KVP_ANSWER_DECODE;
	return direct_body(r, text, len, &c, body) ? KVP_ANSWER_ERROR : KVP_ANSWER_DIRECT;
}

const struct kvp_adapter kvp_adapter_trtllm = {.name = "trtllm",
	.flow = &kvp_flow_seq,
	.too_large = KVP_RESULT_TOO_LARGE,
	.check = check,
	.prefill_body = prefill_body,
	.prefill_answer = prefill_answer};
