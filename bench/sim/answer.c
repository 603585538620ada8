/* bench/sim/answer.c — see answer.h. */
#include "bench/sim/answer.h"
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

static const char *id_prefix(enum kvp_ask_kind kind)
{
	return kind == KVP_ASK_CHAT ? "chatcmpl" : "cmpl";
}

static void put_id(struct kvp_jw *w, const char *key, enum kvp_ask_kind kind, uint64_t id, uint32_t part)
{
	char text[64];
	if (part)
		snprintf(text, sizeof(text), "%s-%" PRIx64 "-%u", id_prefix(kind), id, part);
	else
		snprintf(text, sizeof(text), "%s-%" PRIx64, id_prefix(kind), id);
	kvp_jw_kstr(w, key, text);
}

static void head(struct kvp_jw *w, const struct kvp_answer *a, const char *object)
{
	kvp_jw_obj(w);
	put_id(w, "id", a->kind, a->id, 0);
	kvp_jw_kstr(w, "object", object);
	kvp_jw_ku64(w, "created", a->created_s);
	kvp_jw_kstr(w, "model", a->model);
	kvp_jw_key(w, "choices");
	kvp_jw_arr(w);
}

static const char *stream_object(enum kvp_ask_kind kind)
{
	return kind == KVP_ASK_CHAT ? "chat.completion.chunk" : "text_completion";
}

static void text_member(struct kvp_jw *w, const char *key, const char *text, size_t len)
{
	kvp_jw_key(w, key);
	kvp_jw_strn(w, text, len);
}

void kvp_answer_piece(struct kvp_jw *w, const struct kvp_answer *a, enum kvp_answer_place place,
	const char *text, size_t len)
{
	head(w, a, stream_object(a->kind));
	kvp_jw_obj(w);
	kvp_jw_ku64(w, "index", 0);
	if (a->kind == KVP_ASK_CHAT) {
		kvp_jw_key(w, "delta");
		kvp_jw_obj(w);
		if (place == KVP_ANSWER_FIRST)
			kvp_jw_kstr(w, "role", "assistant");
		text_member(w, "content", text, len);
		kvp_jw_end(w);
	} else {
		text_member(w, "text", text, len);
	}
	kvp_jw_key(w, "finish_reason");
	kvp_jw_null(w);
	kvp_jw_end(w);
	kvp_jw_end(w);
	kvp_jw_end(w);
}

void kvp_answer_stop(struct kvp_jw *w, const struct kvp_answer *a)
{
	head(w, a, stream_object(a->kind));
	kvp_jw_obj(w);
	kvp_jw_ku64(w, "index", 0);
	if (a->kind == KVP_ASK_CHAT) {
		kvp_jw_key(w, "delta");
		kvp_jw_obj(w);
		kvp_jw_end(w);
	} else {
		kvp_jw_kstr(w, "text", "");
	}
	kvp_jw_kstr(w, "finish_reason", "length");
	kvp_jw_end(w);
	kvp_jw_end(w);
	kvp_jw_end(w);
}

static void put_usage(struct kvp_jw *w, const struct kvp_answer *a)
{
	kvp_jw_key(w, "usage");
	kvp_jw_obj(w);
	kvp_jw_ku64(w, "prompt_tokens", a->prompt_tok);
	kvp_jw_ku64(w, "completion_tokens", a->out_tok);
	kvp_jw_ku64(w, "total_tokens", (uint64_t)a->prompt_tok + a->out_tok);
	kvp_jw_key(w, "prompt_tokens_details");
	kvp_jw_obj(w);
	kvp_jw_ku64(w, "cached_tokens", a->cached_tok);
	kvp_jw_end(w);
	kvp_jw_end(w);
	kvp_jw_key(w, "kvpick_sim");
	kvp_jw_obj(w);
	kvp_jw_ku64(w, "arrival_ns", a->arrival_ns);
	kvp_jw_ku64(w, "first_ns", a->first_ns);
	kvp_jw_ku64(w, "finish_ns", a->finish_ns);
	kvp_jw_end(w);
}

void kvp_answer_usage(struct kvp_jw *w, const struct kvp_answer *a)
{
	head(w, a, stream_object(a->kind));
	kvp_jw_end(w);
	put_usage(w, a);
	kvp_jw_end(w);
}

static void put_value(struct kvp_jw *w, const char *key, const char *value)
{
	if (!value)
		return;
	kvp_jw_key(w, key);
	kvp_jw_raw(w, value, strlen(value));
}

void kvp_answer_whole(struct kvp_jw *w, const struct kvp_answer *a, const char *text, size_t len)
{
	head(w, a, a->kind == KVP_ASK_CHAT ? "chat.completion" : "text_completion");
	kvp_jw_obj(w);
	kvp_jw_ku64(w, "index", 0);
	if (a->kind == KVP_ASK_CHAT) {
		kvp_jw_key(w, "message");
		kvp_jw_obj(w);
		kvp_jw_kstr(w, "role", "assistant");
		text_member(w, "content", text, len);
		kvp_jw_end(w);
	} else {
		text_member(w, "text", text, len);
	}
	kvp_jw_kstr(w, "finish_reason", a->disaggregated_params ? "not_finished" : "length");
	put_value(w, "disaggregated_params", a->disaggregated_params);
	kvp_jw_end(w);
	kvp_jw_end(w);
	put_usage(w, a);
	put_value(w, "kv_transfer_params", a->kv_transfer_params);
	put_value(w, "prompt_token_ids", a->prompt_token_ids);
	kvp_jw_end(w);
}

static void render_one(
	struct kvp_jw *w, const struct kvp_ask *ask, uint32_t i, uint64_t id, const char *model)
{
	kvp_jw_obj(w);
	put_id(w, "request_id", ask->kind, id, i);
	kvp_jw_key(w, "token_ids");
	kvp_jw_arr(w);
	for (uint32_t t = i ? ask->end[i - 1] : 0; t < ask->end[i]; t++)
		kvp_jw_u64(w, ask->tok[t]);
	kvp_jw_end(w);
	kvp_jw_key(w, "features");
	kvp_jw_null(w);
	kvp_jw_key(w, "sampling_params");
	kvp_jw_obj(w);
	kvp_jw_ku64(w, "max_tokens", ask->out_tok);
	kvp_jw_end(w);
	kvp_jw_kstr(w, "model", model);
	kvp_jw_kbool(w, "stream", ask->mode == KVP_ASK_STREAM);
	kvp_jw_key(w, "stream_options");
	kvp_jw_null(w);
	kvp_jw_key(w, "cache_salt");
	kvp_jw_null(w);
	kvp_jw_ku64(w, "priority", 0);
	kvp_jw_end(w);
}

void kvp_answer_render(struct kvp_jw *w, const struct kvp_ask *ask, uint64_t id, const char *model)
{
	if (ask->kind == KVP_ASK_CHAT) {
		render_one(w, ask, 0, id, model);
		return;
	}
	kvp_jw_arr(w);
	for (uint32_t i = 0; i < ask->prompt_cnt; i++)
		render_one(w, ask, i, id, model);
	kvp_jw_end(w);
}

void kvp_answer_error(struct kvp_jw *w, int status, const char *text)
{
	kvp_jw_obj(w);
	kvp_jw_key(w, "error");
	kvp_jw_obj(w);
	kvp_jw_kstr(w, "message", text);
	kvp_jw_kstr(w, "type",
		status == 404  ? "NotFoundError"
		: status < 500 ? "BadRequestError"
			       : "InternalServerError");
	kvp_jw_key(w, "param");
	kvp_jw_null(w);
	kvp_jw_ku64(w, "code", (uint64_t)status);
	kvp_jw_end(w);
	kvp_jw_end(w);
}
