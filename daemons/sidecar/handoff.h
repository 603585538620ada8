/* daemons/sidecar/handoff.h - what client and engines say, judged: request members, vLLM's handoff,
 * TensorRT-LLM's context answer, SGLang's server info and its answers.
 *
 * Shape      functions over a text; what is passed on is a span of the text, as it stands.
 * Truth      the text; nothing is kept but by struct kvp_sgl_check, which holds an unfinished event or value.
 * Numbers    64-bit integers stay exact: nothing goes through a double.
 * Memory     none beside the text: no tree is made of it.
 * Crash      process-local.
 * Proved by  tests/v_disagg.c, tests/t_sidecar_body.c, tests/fuzz/f_sidecar_body.c
 */
#ifndef KVP_SIDECAR_HANDOFF_H
#define KVP_SIDECAR_HANDOFF_H

#include "daemons/sidecar/body.h"
#include "daemons/sidecar/count.h"

/* An error answer of our own; message names no content. */
struct kvp_fail {
	int status;
	enum kvp_result result; /* its text is the code */
	const char *message;
};

/* kvp_pd_valid: KVP_OK if a text is JSON and its outermost value an object, else KVP_ERR_PROTO. */
int kvp_pd_valid(const char *text, uint64_t len);
/* kvp_pd_one: 1 if the member is absent or the integer 1. */
int kvp_pd_one(const char *text, const struct kvp_member *m);
/* kvp_pd_stream: 1, 0 (false, null, absent), or KVP_ERR_INVAL for another value. */
int kvp_pd_stream(const char *text, const struct kvp_member *m);

/* vLLM: the member kv_transfer_params of a client (absent, null or {} is fine: 1), and of a prefill answer:
 * KVP_OK and its text in *params, else KVP_ERR_PROTO. */
int kvp_vllm_client_ok(const char *text, const struct kvp_member *m);
int kvp_vllm_handoff(const char *text, uint64_t len, struct kvp_span *params);

/* TensorRT-LLM: the answer of the context leg. */
struct kvp_trt_context {
	struct kvp_span choice, params; /* choices[0] and its disaggregated_params */
	struct kvp_span ids, usage;	/* usage.len 0: absent */
	uint8_t needs_generation;
};
int kvp_trt_context(const char *text, uint64_t len, struct kvp_trt_context *out);
/* kvp_trt_events appends the event stream that a finished context answer is: one chunk with its message and
 * finish reason, usage if asked for, [DONE]. */
int kvp_trt_events(const char *text, uint64_t len, const struct kvp_trt_context *c, int is_chat,
	int with_usage, struct kvp_http_buf *out);
/* kvp_trt_id: sign 0, 39 bits ms, 8 bits node, 6 bits process, 10 bits counter; at least 2^40. */
uint64_t kvp_trt_id(uint64_t ms, unsigned node, unsigned process, unsigned counter);
uint64_t kvp_trt_random_id(void);

/* SGLang: GET /server_info of an engine of that mode ("prefill" or "decode"). *port is set from prefill. */
int kvp_sgl_info(const char *text, uint64_t len, const char *version, const char *mode, uint16_t *port);

/* SGLang: whether an answer is complete. feed takes it piece by piece: KVP_ERR_PROTO as soon as an event
 * spoils it, KVP_ERR_SYS without memory. end: KVP_OK if it was complete. */
enum kvp_sgl_form { KVP_SGL_JSON, KVP_SGL_EVENTS };
struct kvp_sgl_check { /* zeroed; private */
	enum kvp_sgl_form form;
	struct kvp_http_buf line, data;
	uint64_t seen; /* bytes */
	uint8_t first[3];
	uint8_t has_data, after_cr, finished, done, failed;
};
void kvp_sgl_open(struct kvp_sgl_check *c, enum kvp_sgl_form form);
int kvp_sgl_feed(struct kvp_sgl_check *c, const char *data, uint64_t len);
int kvp_sgl_end(struct kvp_sgl_check *c);
/* kvp_sgl_whole: the verdict on an answer that is here as a whole, of the form KVP_SGL_JSON. */
int kvp_sgl_whole(const char *text, uint64_t len);
/* kvp_sgl_held: bytes kept. */
static inline uint64_t kvp_sgl_held(const struct kvp_sgl_check *c)
{
	return c->line.len + c->data.len;
}
void kvp_sgl_close(struct kvp_sgl_check *c); /* twice is fine */
#endif
