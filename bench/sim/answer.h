/* bench/sim/answer.h — the JSON that a simulated engine answers with: OpenAI's shapes, vLLM's render shape.
 *
 * Shape      functions that append to a JSON writer; server-sent events carry one object each.
 * Truth, Writers, Readers, Ordering, Lifetime, Crash: the caller's writer.
 * Proved by  tests/s_sim.t
 *
 * Usage is prompt_tokens, completion_tokens, total_tokens and prompt_tokens_details.cached_tokens; beside it
 * stands the extension kvpick_sim {arrival_ns, first_ns, finish_ns} in virtual time.
 */
#ifndef KVP_BENCH_SIM_ANSWER_H
#define KVP_BENCH_SIM_ANSWER_H

#include "bench/sim/ask.h"
#include "ipc/json_out.h"

struct kvp_answer { /* one request, as far as it has come */
	enum kvp_ask_kind kind;
	uint64_t id;
	const char *model;
	uint32_t prompt_tok, cached_tok, out_tok;
	uint64_t arrival_ns, first_ns, finish_ns;
	uint64_t created_s;
	/* Members of an answer whose rest another engine gives; each NULL or one JSON value. */
	const char *kv_transfer_params, *disaggregated_params, *prompt_token_ids;
};

enum kvp_answer_place { KVP_ANSWER_FIRST, KVP_ANSWER_MIDDLE }; /* the first piece of a chat names the role */

/* kvp_answer_piece: one streamed piece with text. kvp_answer_stop: the piece with the finish reason.
 * kvp_answer_usage: the last piece, without choices. kvp_answer_whole: an answer in one object. */
void kvp_answer_piece(struct kvp_jw *w, const struct kvp_answer *a, enum kvp_answer_place place,
	const char *text, size_t len);
void kvp_answer_stop(struct kvp_jw *w, const struct kvp_answer *a);
void kvp_answer_usage(struct kvp_jw *w, const struct kvp_answer *a);
void kvp_answer_whole(struct kvp_jw *w, const struct kvp_answer *a, const char *text, size_t len);
/* kvp_answer_render: token ids of a prompt (chat), or a list with one object a prompt (completions). */
void kvp_answer_render(struct kvp_jw *w, const struct kvp_ask *ask, uint64_t id, const char *model);
/* kvp_answer_error: {"error": {message, type, param, code}}. */
void kvp_answer_error(struct kvp_jw *w, int status, const char *text);
#endif
