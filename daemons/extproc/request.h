/* daemons/extproc/request.h — what a request through the proxy asks for: headers and body to the structs of
 * kvpick/selection.h.
 *
 * Shape      struct kvp_ask: one a stream, filled from the headers first, from the body when it is complete.
 *            struct kvp_ask_parser: a JSON parser and scratch arrays that grow, one an io thread.
 * Truth      the client's bytes; the body is never changed by these functions.
 * Order      kvp_ask_head, then (its 431 first) kvp_ask_body, then the tokenizer if the source says so, then
 *            kvp_ask_prompt and kvp_ask_select directly before the selection.
 * Errors     0, or the HTTP status of the answer and in ask->err the text for the client: 431 (metadata
 *            headers), 400 (body). Header values and bodies never appear in texts, only member names.
 * Lifetime   strings of an ask are its own copies until kvp_ask_reset; arrays of a prompt belong to the
 *            parser and are valid until its next use: call kvp_ask_prompt and the selection in one go.
 * Crash      process-local.
 * Proved by  tests/t_ask.c, tests/fuzz/f_ask.c
 */
#ifndef KVP_EXTPROC_REQUEST_H
#define KVP_EXTPROC_REQUEST_H

#include <kvpick/selection.h>
#include "daemons/common/config.h"
#include "ipc/json_ids.h"

#define KVP_ASK_ERR_MAX 256
#define KVP_ASK_META_MAX 64	     /* metadata headers with different names */
#define KVP_ASK_META_BYTES_MAX 65536 /* of their names behind the prefix and values */
#define KVP_ASK_SALT_TAG "dynamo-cache-salt:"

struct kvp_ask_field { /* one request header; the value as it counts: raw_value if not empty, else value */
	struct kvp_str name, value;
};

enum kvp_ask_path {		 /* longest suffix of the path without its query */
	KVP_ASK_CHAT,		 /* /v1/chat/completions, or no path at all */
	KVP_ASK_COMPLETIONS,	 /* /v1/completions */
	KVP_ASK_VLLM_GENERATE,	 /* /inference/v1/generate */
	KVP_ASK_SGLANG_GENERATE, /* /generate, only as the whole path */
	KVP_ASK_OTHER
};

enum kvp_ask_source {		   /* where the prompt comes from, known after kvp_ask_body */
	KVP_ASK_NO_BODY,	   /* any ready worker, nothing booked */
	KVP_ASK_LOAD_ONLY,	   /* booked by length alone */
	KVP_ASK_TOKENS,		   /* token ids in the body */
	KVP_ASK_TEXT,		   /* blocks of the raw text */
	KVP_ASK_RENDER_CHAT,	   /* the tokenizer's chat endpoint */
	KVP_ASK_RENDER_COMPLETIONS /* the tokenizer's completion endpoint */
};

enum kvp_ask_salt { KVP_ASK_SALT_NONE, KVP_ASK_SALT_TENANT, KVP_ASK_SALT_NVEXT, KVP_ASK_SALT_TOP };

struct kvp_ask_cfg {		     /* borrowed strings, kept as long as the parser */
	const char *model;	     /* DYN_MODEL_NAME */
	const char *metadata_prefix; /* NULL = x-dynamo-meta- */
	int32_t tokenizer;	     /* enum kvp_config_tokenizer; KVP_CONFIG_NO_WORD: load only */
	const char *pair_paths;	     /* ends of paths, comma-separated; NULL = none */
};

/* Token ids of a prompt and what is known about the media in it. */
enum kvp_ask_mm_form {
	KVP_ASK_MM_NONE,
	KVP_ASK_MM_KNOWN,  /* mm lists every object */
	KVP_ASK_MM_UNKNOWN /* there is media from token mm_from on, but not all is known of which */
};
struct kvp_ask_mm {
	uint64_t hash;
	uint32_t off, len; /* tokens that stand for it */
};
struct kvp_ask_tokens {
	const uint32_t *token;
	uint32_t token_cnt;
	enum kvp_ask_mm_form mm_form;
	const struct kvp_ask_mm *mm; /* by offset */
	uint32_t mm_cnt, mm_from;
};

struct kvp_ask {
	/* from the headers; ptr NULL = absent, everything trimmed */
	enum kvp_ask_path path;
	enum kvp_tristate may_lack_body; /* the method is GET, HEAD, DELETE or OPTIONS */
	struct kvp_str request_id, session_id, policy_class, tenant, traceparent;
	enum kvp_tristate session_final; /* KVP_YES: the binding ends with the stream */
	enum kvp_tristate is_retry;
	/* from headers and body */
	double priority_jump;
	uint32_t strict_priority;
	uint32_t expected_output_tok; /* 0 = not given */
	struct kvp_str model;	      /* as the body says; ptr NULL = it does not */
	struct kvp_str lora;	      /* the model, when it is not the served one */
	struct kvp_str salt;	      /* cache namespace */
	enum kvp_ask_salt salt_from;
	enum kvp_tristate stream; /* the body's member, KVP_UNSET = none */
	enum kvp_ask_source source;
	uint64_t body_bytes;
	char err[KVP_ASK_ERR_MAX];
	/* private */
	enum kvp_tristate has_priority, has_strict; /* set by a header, which wins over the body */
	uint64_t text_off, text_len;		    /* KVP_ASK_TEXT: where in the body */
	char *mem[2];				    /* own copies, of headers and body */
};

struct kvp_ask_parser {
	struct kvp_ask_cfg cfg;
	struct kvp_json *json;
	struct kvp_json_ids ids;
	const struct kvp_ask *ids_of; /* whose token ids are in ids; NULL = nobody's */
	uint64_t *hash;		      /* scratch: local and sequence hashes, hashes of media by block */
	size_t hash_cap;
	struct kvp_hash_mm *blk_mm; /* by block */
	size_t blk_mm_cap;
	uint64_t rnd; /* values that match nothing */
};

int kvp_ask_open(struct kvp_ask_parser *p, const struct kvp_ask_cfg *cfg); /* KVP_OK, KVP_ERR_SYS */
void kvp_ask_close(struct kvp_ask_parser *p);

/* kvp_ask_is_pair_path: 1 = two workers may share a request of this path; its query does not count, blanks
 * around it neither. No path: as KVP_ASK_CHAT, so 1. */
int kvp_ask_is_pair_path(const struct kvp_ask_parser *p, struct kvp_str path);

/* kvp_ask_head fills *a (any contents) from the request headers, order kept. 0, or 431 with a->err (the rest
 * is filled all the same), or 500 without memory. kvp_ask_reset drops its copies; needed before it is
 * forgotten, not before kvp_ask_head of a zeroed one. */
int kvp_ask_head(struct kvp_ask_parser *p, const struct kvp_ask_field *f, uint32_t cnt, struct kvp_ask *a);
void kvp_ask_reset(struct kvp_ask *a);

/* kvp_ask_body reads the complete body: 0 and a->source, or 400 with a->err.
 *
 * body, len  KVP_JSON_SLACK_BYTES readable bytes (any values) behind it; len 0: there is none (400 where the
 *            path needs one).
 */
int kvp_ask_body(struct kvp_ask_parser *p, struct kvp_ask *a, const char *body, uint64_t len);

/* kvp_ask_prompt makes the prompt of a selection.
 *
 * body, len   the same body as before.
 * t           tokenizer's answer, for the two render sources; else NULL.
 * block_size  of the partition; text blocks and media need it, 0 = unknown: then these count as load only.
 * return      0; 500 without memory.
 *
 * Media whose identity is not known are hashed as something that nobody else has: blocks before them match.
 */
int kvp_ask_prompt(struct kvp_ask_parser *p, struct kvp_ask *a, const char *body, uint64_t len,
	const struct kvp_ask_tokens *t, uint32_t block_size, struct kvp_prompt *out);

/* kvp_ask_load_only makes *out a prompt that is booked by its length alone (a tokenizer that can't serve this
 * request). */
void kvp_ask_load_only(const struct kvp_ask *a, struct kvp_prompt *out);

/* kvp_ask_select fills model, group "default", priorities, expected output, session and policy class of q;
 * prompt, id, role and worker limits are the caller's. */
void kvp_ask_select(const struct kvp_ask_parser *p, const struct kvp_ask *a, struct kvp_select_request *q);

/* kvp_ask_salted writes the body with its outermost cache_salt set to the tagged namespace (opt-in; every
 * other byte as it was) to *out (malloc, KVP_JSON_SLACK_BYTES behind it). KVP_OK; KVP_ERR_NOTFOUND no
 * namespace, or the body is no object: forward the original; KVP_ERR_SYS. */
int kvp_ask_salted(struct kvp_ask_parser *p, const struct kvp_ask *a, const char *body, uint64_t len,
	char **out, uint64_t *out_len);
#endif
