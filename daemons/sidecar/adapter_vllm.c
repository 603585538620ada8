#include <kvpick/err.h>
#include <stdlib.h>

#include "daemons/sidecar/sidecar.h"

/* vLLM, NIXL pull: the prefill engine makes one token and keeps the blocks; what it says about them goes word
 * for word to the decode engine. */

#define PRODUCER                                                                                             \
	"{\"do_remote_decode\":true,\"do_remote_prefill\":false,\"remote_engine_id\":null,"                  \
	"\"remote_block_ids\":null,\"remote_host\":null,\"remote_port\":null}"
#define TEXT(t) .val = (t), .val_len = sizeof(t) - 1

static int check(struct kvp_req *r, struct kvp_fail *f)
{
	struct kvp_member m[] = {{.key = "kv_transfer_params"}, {.key = "n"}};
	kvp_span_members(r->body.p, kvp_span_all(r->body.len), m, 2);
	if (!kvp_vllm_client_ok(r->body.p, &m[0])) {
		*f = (struct kvp_fail){400, KVP_RESULT_INVALID, "kv_transfer_params is not a client's"};
		return KVP_ERR_INVAL;
	}
	if (!kvp_pd_one(r->body.p, &m[1])) {
		*f = (struct kvp_fail){400, KVP_RESULT_VARIANT, "n must be 1"};
		return KVP_ERR_INVAL;
	}
	r->drops_n = m[1].cnt > 1;
	return KVP_OK;
}

/* A limit of one token; what contradicts it, and what needs a stream, goes. */
static int prefill_body(struct kvp_req *r, struct kvp_http_buf *body)
{
	const struct kvp_edit edit[] = {{.key = "stream", TEXT("false")}, {.key = kvp_req_dropped(r)},
		{.key = "max_tokens", TEXT("1")},
		{.key = "max_completion_tokens", TEXT("1"), .when = KVP_EDIT_IF_PRESENT},
		{.key = "stream_options"}, {.key = "min_tokens"}, {.key = "min_completion_tokens"},
		{.key = "kv_transfer_params", TEXT(PRODUCER)}};
	return kvp_span_edit(
		r->body.p, kvp_span_all(r->body.len), edit, sizeof(edit) / sizeof(edit[0]), body);
}

static enum kvp_answer decode_body(
	struct kvp_req *r, const char *val, uint64_t len, struct kvp_http_buf *body)
{
	const struct kvp_edit edit[] = {
		{.key = "kv_transfer_params", .val = val, .val_len = len}, {.key = kvp_req_dropped(r)}};
	return kvp_span_edit(r->body.p, kvp_span_all(r->body.len), edit, 2, body) ? KVP_ANSWER_ERROR
										  : KVP_ANSWER_DECODE;
}

static enum kvp_answer prefill_answer(
	struct kvp_req *r, const char *text, uint64_t len, struct kvp_http_buf *body, struct kvp_fail *f)
{
	struct kvp_span params;
	(void)f; /* says that already */
	if (kvp_vllm_handoff(text, len, &params))
		return KVP_ANSWER_ERROR;
	return decode_body(r, text + params.at, params.len, body);
}

const struct kvp_adapter kvp_adapter_vllm = {.name = "vllm_nixl",
	.flow = &kvp_flow_seq,
	.too_large = KVP_RESULT_TOO_LARGE,
	.check = check,
	.prefill_body = prefill_body,
	.prefill_answer = prefill_answer};

/* The same engine as another sidecar speaks to it: limits always set, the handoff not looked at, a prefill
 * that fails leaves all of the work to the decode engine, and the count of cached tokens in the answer is the
 * prefill engine's. */

static int llmd_check(struct kvp_req *r, struct kvp_fail *f)
{
	(void)r;
	(void)f;
	return KVP_OK;
}

static int llmd_prefill_body(struct kvp_req *r, struct kvp_http_buf *body)
{
	static const struct kvp_edit chat[] = {{.key = "stream", TEXT("false")}, {.key = "stream_options"},
		{.key = "max_tokens", TEXT("1")}, {.key = "max_completion_tokens", TEXT("1")},
		{.key = "kv_transfer_params", TEXT(PRODUCER)}};
	static const struct kvp_edit responses[] = {{.key = "stream", TEXT("false")},
		{.key = "stream_options"}, {.key = "max_output_tokens", TEXT("1")},
		{.key = "kv_transfer_params", TEXT(PRODUCER)}};
	int is_responses = r->path == KVP_PATH_RESPONSES;
	return kvp_span_edit(r->body.p, kvp_span_all(r->body.len), is_responses ? responses : chat,
		is_responses ? sizeof(responses) / sizeof(responses[0]) : sizeof(chat) / sizeof(chat[0]),
		body);
}

static enum kvp_answer llmd_prefill_answer(
	struct kvp_req *r, const char *text, uint64_t len, struct kvp_http_buf *body, struct kvp_fail *f)
{
	struct kvp_span params;
	if (kvp_pd_valid(text, len)) {
		*f = (struct kvp_fail){
			400, KVP_RESULT_HANDOFF, "the answer of the prefill engine is not a JSON object"};
		return KVP_ANSWER_ERROR;
	}
	r->usage = calloc(1, sizeof(*r->usage));
	if (!r->usage) {
		*f = kvp_fail_resources;
		return KVP_ANSWER_ERROR;
	}
	r->usage->cached_tok = kvp_usage_cached(text, len);
	if (kvp_span_member(text, kvp_span_all(len), "kv_transfer_params", &params))
		return decode_body(r, "null", 4, body);
	return decode_body(r, text + params.at, params.len, body);
}

const struct kvp_adapter kvp_adapter_llmd = {.name = "llmd",
	.flow = &kvp_flow_seq,
	.too_large = KVP_RESULT_TOO_LARGE,
	.check = llmd_check,
	.prefill_body = llmd_prefill_body,
	.prefill_failure = KVP_FAILURE_FALLS_BACK,
	.prefill_answer = llmd_prefill_answer};
