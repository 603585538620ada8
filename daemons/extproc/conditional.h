/* daemons/extproc/conditional.h — whether the decode worker prefills a prompt itself: a pure decision.
 *
 * Shape      one function of numbers. Who previews which worker is the caller's.
 * Proved by  tests/v_plan.c
 */
#ifndef KVP_EXTPROC_CONDITIONAL_H
#define KVP_EXTPROC_CONDITIONAL_H

#include <kvpick/types.h>
#include <stdint.h>

struct kvp_config;

enum kvp_cond_policy {
	KVP_COND_NEVER,
	KVP_COND_BY_ISL,
	KVP_COND_BY_PREFILL_LOAD,
	KVP_COND_BY_EITHER,
	KVP_COND_BY_NON_CACHED, /* local below a number of uncached tokens */
	KVP_COND_BY_LENGTH	/* local up to a number of uncached tokens, if some are cached */
};

struct kvp_cond_cfg {
	enum kvp_cond_policy policy;
	uint64_t isl_max_tok;	 /* uncached tokens have to be fewer */
	double ratio_max;	 /* uncached share of the prompt has to be less */
	uint64_t non_cached_tok; /* BY_NON_CACHED: uncached tokens from which it is remote; 0 = never */
	uint64_t local_max_tok;	 /* BY_LENGTH */
	enum kvp_tristate has_decode_gate;
};

struct kvp_cond_in {
	uint64_t isl_tok;
	uint64_t hit_tok;		/* of them on the device of the decode worker that would be chosen */
	enum kvp_tristate is_hit_known; /* KVP_NO: nobody has looked, or can */
	/* of the workers that would be chosen; KVP_UNSET = not known */
	enum kvp_tristate prefill_busy, decode_busy;
};

enum kvp_cond_verdict {
	KVP_COND_REMOTE,
	KVP_COND_LOCAL,
	KVP_COND_VETOED /* the policy said local, but the decode worker is, or may be, busy: remote */
};

/* kvp_cond_from_config: what the settings say; KVP_COND_NEVER where they do not turn it on. */
void kvp_cond_from_config(const struct kvp_config *c, struct kvp_cond_cfg *out);

/* kvp_cond_uncached_tok: prompt tokens that the decode worker would have to prefill. */
uint64_t kvp_cond_uncached_tok(const struct kvp_cond_in *in);

/* kvp_cond_needs_load: 1 = the policy asks how busy the prefill worker is. */
int kvp_cond_needs_load(enum kvp_cond_policy p);

/* kvp_cond_decide: an unknown prefill load is calm, an unknown decode load behind the gate is busy. */
enum kvp_cond_verdict kvp_cond_decide(const struct kvp_cond_cfg *cfg, const struct kvp_cond_in *in);
#endif
