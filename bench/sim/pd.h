/* bench/sim/pd.h - prefill and decode as two engines: what each of the three protocols asks, strictly, and
 * the handoffs between the engines of one process.
 *
 * Shape      kvp_pd_ask reads and judges a request; struct kvp_pd_table holds handoffs by number: a prefill
 *            under way, one that is done and waits to be fetched, or a decode request that came first.
 * Strict     what the real engines refuse is answered 400: stream options without a stream, a least number of
 *            tokens over the limit, a half or foreign handoff, a room that is missing or taken, members that
 *            TensorRT-LLM does not know; beyond them, a handoff whose prompt is not the request's.
 * Truth, Writers, Readers, Ordering, Lifetime, Crash: process-local, one thread.
 * Proved by  tests/s_sim_pd.t
 */
#ifndef KVP_BENCH_SIM_PD_H
#define KVP_BENCH_SIM_PD_H

#include "bench/sim/ask.h"
#include "ipc/json_out.h"

enum kvp_pd_proto { KVP_PD_OFF, KVP_PD_VLLM, KVP_PD_SGLANG, KVP_PD_TRTLLM };
enum kvp_pd_role { KVP_PD_PREFILL, KVP_PD_DECODE };
/* What a generation request meets instead: an error 500; no answer; a reset; an answer without its handoff
 * (SGLang: the room stays empty); an answer that breaks off before its end; a refusal 429. */
enum kvp_pd_fault {
	KVP_PD_NO_FAULT,
	KVP_PD_ERROR,
	KVP_PD_HANG,
	KVP_PD_RESET,
	KVP_PD_BAD,
	KVP_PD_CUT,
	KVP_PD_REFUSE
};

struct kvp_pd_cfg {
	enum kvp_pd_proto proto;
	uint32_t prefill_cnt; /* the first engines; the others decode */
	enum kvp_pd_fault fault;
	enum kvp_pd_role fault_role;
	uint32_t fault_every; /* one request in so many; 0 = none */
};

enum kvp_pd_leg { KVP_PD_PLAIN, KVP_PD_FIRST, KVP_PD_SECOND };
struct kvp_pd_ask {
	enum kvp_pd_leg leg;
	uint64_t key; /* of the handoff; vLLM's is made at the end of the first leg */
	char rid[40]; /* SGLang's name of the request, "" without */
};

/* kvp_pd_ask: HTTP status: 200, or 400 with *why set to a constant text. prompt_tok: tokens of the prompt as
 * ask has read them. The body was parsed before; the parser is used again. */
int kvp_pd_ask(const struct kvp_pd_cfg *cfg, enum kvp_pd_role role, struct kvp_json *json, const char *body,
	size_t len, const struct kvp_ask *ask, struct kvp_pd_ask *out, const char **why);

struct kvp_pd_handoff {
	uint64_t key;
	uint32_t prompt_tok;
	uint8_t is_ready;
	void *waiter; /* a decode request that came first */
};
struct kvp_pd_table { /* zeroed; free handoff */
	struct kvp_pd_handoff *handoff;
	uint32_t cnt, cap;
};
struct kvp_pd_handoff *kvp_pd_find(struct kvp_pd_table *t, uint64_t key);
/* kvp_pd_add: NULL without memory; valid until the next add or drop. */
struct kvp_pd_handoff *kvp_pd_add(struct kvp_pd_table *t, uint64_t key);
void kvp_pd_drop(struct kvp_pd_table *t, struct kvp_pd_handoff *h);

/* Members of answers. kvp_pd_params: the value of vLLM's kv_transfer_params, or of TensorRT-LLM's
 * disaggregated_params. kvp_pd_info: SGLang's /server_info. */
void kvp_pd_params(struct kvp_jw *w, enum kvp_pd_proto proto, const struct kvp_pd_ask *a, uint32_t engine,
	uint32_t prompt_tok);
void kvp_pd_info(struct kvp_jw *w, enum kvp_pd_role role);
#endif
