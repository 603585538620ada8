/* ipc/sse.h - what an engine's response says about its usage: one JSON body, or the lines of an event stream.
 *
 * Shape      struct kvp_usage_scan: the unfinished line (at most KVP_USAGE_LINE_MAX bytes), or the whole JSON
 *            body up to the caller's limit. The response itself is never held back or changed.
 * Truth      the bytes fed, cut anywhere. One thread.
 * Events     a line that starts with "data:" behind white space; its trimmed payload, unless empty or [DONE],
 *            is one event. Only payloads with the text "usage" in quotes are parsed; the last that parses
 *            wins. An unfinished line over the bound is dropped, and scanning goes on with what follows.
 * Lifetime   open to close; end may be called once, and later than close of the response.
 * Crash      process-local.
 * Proved by  tests/t_sse.c, tests/fuzz/f_sse.c
 */
#ifndef KVP_IPC_SSE_H
#define KVP_IPC_SSE_H

#include <stddef.h>
#include <stdint.h>

#include "ipc/json_in.h"

#define KVP_USAGE_LINE_MAX 65536 /* bytes of an unfinished line that are kept */

enum kvp_usage_form { KVP_USAGE_JSON, KVP_USAGE_SSE };

enum kvp_usage_member { /* bits of kvp_usage.has: absent is not 0 */
	KVP_USAGE_HAS_PROMPT = 1,
	KVP_USAGE_HAS_COMPLETION = 2,
	KVP_USAGE_HAS_TOTAL = 4,
	KVP_USAGE_HAS_CACHED = 8
};
struct kvp_usage {
	uint64_t prompt_tok, completion_tok, total_tok, cached_tok;
	uint32_t has;
};

struct kvp_usage_scan {	       /* private but for these three */
	struct kvp_usage last; /* of the newest event that carried one (event streams only) */
	uint64_t event_cnt;    /* data events so far, without [DONE] */
	uint64_t dropped;      /* times that the bound was met */
	struct kvp_json *json;
	char *buf;
	size_t len, cap, max;
	enum kvp_usage_form form;
};

/* kvp_usage_open. json: a parser of the same thread; it may serve any number of scans. body_max_bytes: of a
 * JSON body that is kept; longer ones give no usage. Takes no memory before the first byte. */
void kvp_usage_open(
	struct kvp_usage_scan *u, enum kvp_usage_form form, struct kvp_json *json, size_t body_max_bytes);
void kvp_usage_close(struct kvp_usage_scan *u); /* twice is fine */

/* kvp_usage_read takes the next bytes. Without memory they are dropped. */
void kvp_usage_read(struct kvp_usage_scan *u, const char *data, size_t len);

/* kvp_usage_done: the response is over (an event stream's last line needs no line end). KVP_OK and *out, or
 * KVP_ERR_NOTFOUND: absent, null, not JSON, too long. */
int kvp_usage_done(struct kvp_usage_scan *u, struct kvp_usage *out);
#endif
