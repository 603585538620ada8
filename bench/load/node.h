/* bench/load/node.h — what kvpick-load says to a kvpick node and to engines, and how it reads their answers.
 *
 * Shape      functions that write one JSON body each, readers of the answers, and the registration of
 *            engines.
 * Truth, Writers, Readers, Ordering, Lifetime, Crash: no state.
 * Proved by  tests/t_load_trace.c (bodies), tests/s_sim.t
 */
#ifndef KVP_BENCH_LOAD_NODE_H
#define KVP_BENCH_LOAD_NODE_H

#include "bench/load/options.h"
#include "ipc/http_client.h"
#include "ipc/json_out.h"

/* kvp_node_select_body: POST /select_and_reserve, as token ids or as block hashes of cfg's block size. tok
 * holds the prompt's tokens. KVP_ERR_SYS: memory. */
int kvp_node_select_body(struct kvp_jw *w, const struct kvp_load_cfg *cfg, const uint32_t *tok,
	uint32_t tok_cnt, uint32_t out_tok, const char *selection_id);
/* kvp_node_engine_body: POST /v1/completions, streamed, with usage; the prompt as ids of the trace or as
 * tokens. */
void kvp_node_engine_body(struct kvp_jw *w, const struct kvp_load_cfg *cfg, const uint64_t *id,
	uint32_t id_cnt, const uint32_t *tok, uint32_t tok_cnt, uint32_t out_tok);
/* kvp_node_worker_body: POST /workers for one engine. */
void kvp_node_worker_body(struct kvp_jw *w, const struct kvp_load_cfg *cfg, const struct kvp_load_target *t,
	uint64_t worker_id);

/* kvp_node_selection reads host and port out of a selection's endpoint. KVP_ERR_PROTO. */
int kvp_node_selection(struct kvp_json *json, const char *text, size_t len, char host[64], uint16_t *port);

struct kvp_node_usage { /* of the last piece of a streamed answer */
	uint64_t prompt_tok, cached_tok, out_tok;
	uint64_t arrival_ns, first_ns, finish_ns; /* virtual; all 0 if the engine doesn't say */
};
/* kvp_node_usage reads one event's JSON. KVP_ERR_NOTFOUND: it has no usage; KVP_ERR_PROTO: not JSON. */
int kvp_node_usage(struct kvp_json *json, const char *text, size_t len, struct kvp_node_usage *out);

/* kvp_node_register registers every engine of a set under worker ids from 1 and waits, running the loop,
 * until the node is ready. headers: extra lines for each call, or NULL. Prints what fails to stderr.
 * errors  KVP_ERR_CLOSED (no answer), KVP_ERR_PROTO (refused), KVP_ERR_TIMEOUT (not ready within 30 s). */
int kvp_node_register(struct kvp_loop *l, struct kvp_http_client *client, const struct kvp_load_cfg *cfg,
	const struct kvp_load_set *set, const char *headers);
#endif
