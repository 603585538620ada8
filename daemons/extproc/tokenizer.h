/* daemons/extproc/tokenizer.h — token ids from a tokenizer service: POST of the client's body, unchanged,
 * over pooled keep-alive connections.
 *
 * Shape      one struct kvp_tkz an io thread; a call a request.
 * Truth      the service. No retry but the one of ipc/http_client.h for a stale pooled connection; redirects
 *            are errors; no header of the client is forwarded.
 * Bounds     one deadline for connect, headers and body; a cap on the answer; KVP_TKZ_ERROR_MAX bytes of an
 *            error's body, for logs only. While the breaker is open calls fail at once: it opens after
 *            KVP_TKZ_BREAK_AT calls in a row that failed to connect, broke or timed out, lets one call
 *            through after 250 ms (doubled up to 8 s each time that one fails), and closes when one answers.
 * Names      the host is looked up by a thread (ipc/resolve.h); several addresses are used in turn, and one
 *            that can't be connected to leaves its call to the next and is passed over for five seconds.
 * Errors     typed, with the status and text for the client.
 * Who        the loop's thread.
 * Lifetime   open to close; close ends all calls without callbacks.
 * Crash      process-local.
 * Proved by  tests/t_tokenizer.c
 */
#ifndef KVP_EXTPROC_TOKENIZER_H
#define KVP_EXTPROC_TOKENIZER_H

#include <kvpick/hash.h>
#include <stdint.h>
#include "daemons/extproc/request.h"
#include "ipc/loop.h"
#include "shm/counter.h"

#define KVP_TKZ_ERROR_MAX 1024
#define KVP_TKZ_BREAK_AT 16

struct kvp_tkz;
struct kvp_tkz_call;

enum kvp_tkz_what { KVP_TKZ_CHAT, KVP_TKZ_COMPLETIONS };

enum kvp_tkz_end {
	KVP_TKZ_OK,
	KVP_TKZ_UNSERVED,    /* 200: the service has no endpoint for this kind of request: book by length */
	KVP_TKZ_UNAVAILABLE, /* 503: not reachable, broke off, answered 429 or 503, too many calls */
	KVP_TKZ_BREAKER,     /* 503: not tried, the breaker is open */
	KVP_TKZ_TIMEOUT,     /* 504 */
	KVP_TKZ_REJECTED,    /* 400: it answered 400 or 422 */
	KVP_TKZ_STATUS,	     /* 502: any other status outside 2xx */
	KVP_TKZ_INVALID,     /* 502: no HTTP, no JSON, no token ids */
	KVP_TKZ_TOO_LARGE,   /* 502 */
	KVP_TKZ_END_CNT
};

struct kvp_tkz_answer { /* pointers valid during the callback */
	enum kvp_tkz_end end;
	int status;	     /* for the client: 200, 400, 502, 503, 504 */
	const char *text;    /* for the client; "" with 200 */
	int upstream_status; /* 0 = no answer came */
	const char
		*detail; /* for logs: start of an error body with control bytes replaced, or what is wrong */
	struct kvp_ask_tokens tokens;
	uint64_t took_ns;
	uint64_t parse_ns; /* processor time of reading the answer's JSON */
};

struct kvp_tkz_cfg {		/* strings are borrowed until close */
	int32_t protocol;	/* enum kvp_config_tokenizer, one that has a service */
	const char *url;	/* http(s)://host[:port][/base], or http://unix:/path[:/base] */
	const char *ca_file;	/* for https; "" = the system's certificates */
	const char *token_file; /* "" = no Authorization header; read again when it changes */
	const char *model;	/* for the probe of sglang-tokenize */
	uint64_t timeout_ns;
	uint64_t response_max_bytes;
	uint32_t conn_max;		/* 0 = as many as there are calls */
	struct kvp_ctr_column_shm *ctr; /* NULL = not counted */
};

/* kvp_tkz_open: KVP_OK; KVP_ERR_INVAL with a one-line reason in err (address, protocol, token file);
 * KVP_ERR_SYS. Does not wait for the service. */
int kvp_tkz_open(
	struct kvp_loop *l, const struct kvp_tkz_cfg *cfg, struct kvp_tkz **out, char *err, size_t cap);
void kvp_tkz_close(struct kvp_tkz *t); /* NULL is fine; not from a callback */

/* kvp_tkz_start begins a call; on_done comes exactly once, never from inside this call, unless it is
 * cancelled. body: len bytes, to stay as they are until then.
 * return KVP_OK with *out; KVP_ERR_SYS: no memory, no callback will come.
 */
int kvp_tkz_start(struct kvp_tkz *t, enum kvp_tkz_what what, const void *body, uint64_t len,
	void (*on_done)(void *ctx, const struct kvp_tkz_answer *a), void *ctx, struct kvp_tkz_call **out);
/* kvp_tkz_cancel ends a call at once and closes its connection; from inside its on_done it does nothing. */
void kvp_tkz_cancel(struct kvp_tkz_call *c);

struct kvp_tkz_stat { /* since open */
	uint64_t end[KVP_TKZ_END_CNT];
	uint64_t opened;   /* times that the breaker opened */
	uint64_t inflight; /* gauge */
	uint64_t is_open;  /* gauge: the breaker */
	uint64_t connects, reused, retried;
};
void kvp_tkz_stat(const struct kvp_tkz *t, struct kvp_tkz_stat *out);
#endif
