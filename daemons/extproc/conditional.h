/* daemons/extproc/conditional.h — whether the decode worker prefills a prompt itself: a pure decision.
 *
 * Shape      one function of numbers. Who previews which worker is the caller's.
 * Proved by  tests/v_plan.c
 */
#ifndef KVP_EXTPROC_CONDITIONAL_H
#define KVP_EXTPROC_CONDITIONAL_H

#include <kvpick/types.h>
#include <stdint.h>

enum kvp_cond_policy { KVP_COND_BY_ISL, KVP_COND_BY_PREFILL_LOAD, KVP_COND_BY_EITHER };

struct kvp_cond_cfg {
	enum kvp_cond_policy policy;
	uint64_t isl_max_tok; /* uncached tokens have to be fewer */
	double ratio_max;     /* uncached share of the prompt has to be less */
	enum kvp_tristate has_decode_gate;
};

struct kvp_cond_in {
	uint64_t isl_tok;
	uint32_t overlap_blk, block_size; /* blocks on the device of the decode worker that would be chosen */
	/* of the workers that would be chosen; KVP_UNSET = not known */
	enum kvp_tristate prefill_busy, decode_busy;
};

enum kvp_cond_verdict {
	KVP_COND_REMOTE,
	KVP_COND_LOCAL,
	KVP_COND_VETOED /* the policy said local, but the decode worker is, or may be, busy: remote */
};

/* kvp_cond_uncached_tok: prompt tokens that the decode worker would have to prefill. */
uint64_t kvp_cond_uncached_tok(const struct kvp_cond_in *in);

/* kvp_cond_decide: an unknown prefill load is calm, an unknown decode load behind the gate is busy. */
enum kvp_cond_verdict kvp_cond_decide(const struct kvp_cond_cfg *cfg, const struct kvp_cond_in *in);
#endif
