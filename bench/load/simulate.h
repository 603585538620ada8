/* bench/load/simulate.h — a run without sockets: engine models, a policy with ideal information, one clock.
 *
 * Shape      pure function over a trace. The policy sees every cache and every booking as of the arrival:
 *            what an endpoint picker with no delay could reach. It is written apart from the product's
 *            selection code and serves as the reference for it; a chooser takes its place (product.h).
 * Truth, Writers, Readers, Ordering, Crash: no state beyond the call.
 * Proved by  tests/t_load_trace.c
 */
#ifndef KVP_BENCH_LOAD_SIMULATE_H
#define KVP_BENCH_LOAD_SIMULATE_H

#include "bench/load/stats.h"
#include "bench/load/trace.h"
#include "bench/sim/engine.h"
#include <kvpick/types.h>

/* Somebody else who chooses, and hears what an endpoint picker hears. choose gives an engine below
 * engine_cnt, or KVP_ERR_*; number: of the request, from 0. stored and removed: KV events
 * (bench/sim/engine.h). */
struct kvp_chooser {
	void *ctx;
	int (*choose)(void *ctx, uint64_t number, const uint64_t *key, uint32_t key_cnt, uint32_t prompt_tok,
		uint32_t *engine);
	void (*prefilled)(void *ctx, uint64_t number);
	void (*finished)(void *ctx, uint64_t number);
	void (*stored)(
		void *ctx, uint32_t engine, const struct kvp_sim_req *r, uint32_t first, uint32_t cnt);
	void (*removed)(void *ctx, uint32_t engine, const uint64_t *key, uint32_t cnt);
};

struct kvp_simulate_cfg {
	struct kvp_sim_cfg engine;
	uint32_t engine_cnt; /* 1..1024 */
	enum kvp_policy policy;
	double speed;  /* arrivals come this much faster, > 0 */
	uint64_t seed; /* ties and the random policy */
	enum kvp_part_role role; /* prefill: engines stop at the first token; decode: prompts come computed */
	const struct kvp_chooser *chooser; /* NULL: policy chooses; else policy only names the run */
};

/* kvp_simulate plays the whole trace. Errors: KVP_ERR_INVAL (configuration), KVP_ERR_SYS (memory). A request
 * that no engine can ever hold counts as an error in the statistics. */
int kvp_simulate(const struct kvp_simulate_cfg *cfg, const struct kvp_trace *t, struct kvp_run_stats *out);
#endif
