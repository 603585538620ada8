/* daemons/sidecar/handoff.h - what client and engines say, judged: request members, vLLM's handoff,
 * TensorRT-LLM's context answer, SGLang's server info and its answers.
 *
 * Shape      functions over a text and a parser; what is passed on is a span of the text, as it stands.
 * Truth      the text; nothing is kept but by struct kvp_sgl_check, which holds an unfinished event or value.
 * Numbers    64-bit integers stay exact: nothing goes through a double.
 * Crash      process-local.
 * Proved by  tests/v_disagg.c, tests/t_sidecar_body.c, tests/fuzz/f_sidecar_body.c
 */
#ifndef KVP_SIDECAR_HANDOFF_H
#define KVP_SIDECAR_HANDOFF_H

#include "daemons/sidecar/body.h"
#include "ipc/json_in.h"

/* An error answer; code is a constant, message names no content. */
struct kvp_fail {
	int status;
	const char *code, *message;
};

/* kvp_pd_root parses a text whose outermost value must be an object: KVP_OK, KVP_ERR_PROTO. */
int kvp_pd_root(struct kvp_json *j, const char *text, uint64_t len, struct kvp_json_val *root);
/* kvp_pd_one: 1 if member key is absent or the integer 1. */
int kvp_pd_one(struct kvp_json_val root, const char *key);
/* kvp_pd_is_doubled: 1 if the object has more than one member of that name. The last of them counts; engines
 * must not see any, since they may read another. */
int kvp_pd_is_doubled(struct kvp_json_val root, const char *key);
/* kvp_pd_stream: 1, 0 (false, null, absent), or KVP_ERR_INVAL for another type. */
int kvp_pd_stream(struct kvp_json_val root);

/* vLLM: the member kv_transfer_params of a client (absent, null or {} is fine: 1), and of a prefill answer:
 * KVP_OK and its text in *params, else KVP_ERR_PROTO. */
int kvp_vllm_client_ok(struct kvp_json_val root);
int kvp_vllm_handoff(struct kvp_json *j, const char *text, uint64_t len, struct kvp_span *params);

/* TensorRT-LLM: the answer of the context leg. */
struct kvp_trt_context {
	struct kvp_span choice, params; /* choices[0] and its disaggregated_params */
	struct kvp_span ids, usage;	/* usage.len 0: absent */
	uint8_t needs_generation;
};
int kvp_trt_context(struct kvp_json *j, const char *text, uint64_t len, struct kvp_trt_context *out);
/* kvp_trt_events appends the event stream that a finished context answer is: one chunk with its message and
 * finish reason, usage if asked for, [DONE]. */
int kvp_trt_events(const char *text, uint64_t len, const struct kvp_trt_context *c, int is_chat,
	int with_usage, struct kvp_http_buf *out);
/* kvp_trt_id: sign 0, 39 bits ms, 8 bits node, 6 bits process, 10 bits counter; at least 2^40. */
uint64_t kvp_trt_id(uint64_t ms, unsigned node, unsigned process, unsigned counter);
uint64_t kvp_trt_random_id(void);

/* SGLang: GET /server_info of an engine of that mode ("prefill" or "decode"). *port is set from prefill. */
int kvp_sgl_info(struct kvp_json *j, const char *text, uint64_t len, const char *version, const char *mode,
	uint16_t *port);

/* SGLang: whether an answer is complete. feed takes it piece by piece: KVP_ERR_PROTO as soon as an event
 * spoils it, KVP_ERR_SYS without memory. end: KVP_OK if it was complete. */
enum kvp_sgl_form { KVP_SGL_JSON, KVP_SGL_EVENTS };
struct kvp_sgl_check { /* zeroed; private */
	enum kvp_sgl_form form;
	struct kvp_json *json;
	struct kvp_http_buf line, data;
	uint64_t seen; /* bytes */
	uint8_t first[3];
	uint8_t has_data, after_cr, finished, done, failed;
};
void kvp_sgl_open(struct kvp_sgl_check *c, enum kvp_sgl_form form, struct kvp_json *j);
int kvp_sgl_feed(struct kvp_sgl_check *c, const char *data, uint64_t len);
int kvp_sgl_end(struct kvp_sgl_check *c);
void kvp_sgl_close(struct kvp_sgl_check *c); /* twice is fine */
#endif
