/* daemons/sidecar/usage.h - cached prompt tokens in a decode engine's answer, as the prefill engine counted
 * them.
 *
 * Shape      an answer is one JSON text or lines of events, each with one; of a text that is an object with
 *            an object `usage`, usage.prompt_tokens_details.cached_tokens is set. Everything else keeps its
 *            bytes and its order.
 * Truth      the bytes fed; only a piece that is not complete is kept.
 * Lines      end behind a CR or LF; what they are cut into does not matter.
 * Bounds     a piece of more than KVP_USAGE_HELD_MAX passes as it is, and is counted.
 * Crash      process-local.
 * Proved by  tests/t_sidecar_usage.c, tests/s_sidecar_llmd.t, tests/fuzz/f_sidecar_usage.c
 */
#ifndef KVP_SIDECAR_USAGE_H
#define KVP_SIDECAR_USAGE_H

#include "ipc/http_parse.h"

#define KVP_USAGE_HELD_MAX (UINT64_C(4) << 20)

enum kvp_usage_form { KVP_USAGE_RAW, KVP_USAGE_JSON, KVP_USAGE_EVENTS };

struct kvp_usage { /* zeroed, then form and cached_tok set */
	enum kvp_usage_form form;
	uint64_t cached_tok;
	uint64_t long_cnt;	  /* pieces over the bound */
	struct kvp_http_buf held; /* private, as what follows */
	uint8_t skips;		  /* the rest of the piece passes */
	uint8_t is_tight;	  /* by the user, at any time: what is not here as a whole piece passes */
};

/* kvp_usage_form tells from the fields of an answer how it is cut; compressed ones are raw. */
enum kvp_usage_form kvp_usage_form(const struct kvp_http_head *h);
/* kvp_usage_cached: what an answer, a valid object, says in that place; 0 if it says no count. */
uint64_t kvp_usage_cached(const char *text, uint64_t len);

/* kvp_usage_feed takes bytes of the answer and appends to out what may go; kvp_usage_end appends what is
 * left. KVP_OK or KVP_ERR_SYS (memory). */
int kvp_usage_feed(struct kvp_usage *u, const char *data, uint64_t len, struct kvp_http_buf *out);
int kvp_usage_end(struct kvp_usage *u, struct kvp_http_buf *out);
void kvp_usage_free(struct kvp_usage *u); /* twice is fine */
#endif
