/* bench/sim/ask.h — one completion request: body to token ids and limits.
 *
 * Shape      struct kvp_ask, filled from a JSON body; tokens on the heap.
 * Prompt     kvpick_hash_ids with prompt_len (both endpoints, see prompt.h), or `messages` (chat), or
 *            `prompt` (completions): token ids, one string, or a list holding one of them. Text becomes one
 *            token per 4 bytes; messages are joined as <|role|> content.
 * Truth, Writers, Readers, Ordering, Crash: process-local, one thread.
 * Lifetime   kvp_ask_parse to kvp_ask_free.
 * Proved by  tests/s_sim.t
 */
#ifndef KVP_BENCH_SIM_ASK_H
#define KVP_BENCH_SIM_ASK_H

#include "ipc/json_in.h"

enum kvp_ask_kind { KVP_ASK_CHAT, KVP_ASK_COMPLETION };
enum kvp_ask_mode { KVP_ASK_WHOLE, KVP_ASK_STREAM };
enum kvp_ask_usage { KVP_ASK_NO_USAGE, KVP_ASK_USAGE };

#define KVP_ASK_PROMPT_MAX_TOK (1u << 24)
#define KVP_ASK_PROMPTS_MAX 64 /* prompts of a render call */
#define KVP_ASK_OUT_TOK 16     /* tokens to generate when the body doesn't say */

struct kvp_ask {
	enum kvp_ask_kind kind;
	enum kvp_ask_mode mode;
	enum kvp_ask_usage usage; /* a streamed answer ends with a usage chunk */
	uint32_t *tok;
	uint32_t tok_cnt, tok_max;
	uint32_t end[KVP_ASK_PROMPTS_MAX]; /* prompt i ends before token end[i] */
	uint32_t prompt_cnt;		   /* at least 1 after a parse */
	uint32_t out_tok;		   /* tokens to generate, at least 1 */
};

/* kvp_ask_parse reads a body.
 *
 * model    the only model name that is known; an absent member is this one
 * return   HTTP status: 200; 400 or 404 with *why set to a constant text. *out needs kvp_ask_free in any
 *          case. */
int kvp_ask_parse(struct kvp_json *json, const char *body, size_t len, enum kvp_ask_kind kind,
	const char *model, struct kvp_ask *out, const char **why);
void kvp_ask_free(struct kvp_ask *a);
#endif
