#include "daemons/extproc/conditional.h"
#include "daemons/common/config.h"

void kvp_cond_from_config(const struct kvp_config *c, struct kvp_cond_cfg *out)
{
	static const enum kvp_cond_policy policy[] = {[KVP_COND_ISL_BOUNDING] = KVP_COND_BY_ISL,
		[KVP_COND_PREFILL_LOAD] = KVP_COND_BY_PREFILL_LOAD,
		[KVP_COND_ISL_OR_LOAD] = KVP_COND_BY_EITHER,
		[KVP_COND_NON_CACHED_TOKENS] = KVP_COND_BY_NON_CACHED,
		[KVP_COND_MAX_LOCAL_PREFILL] = KVP_COND_BY_LENGTH};
	*out = (struct kvp_cond_cfg){
		.policy = c->conditional_disagg ? policy[c->conditional_disagg_policy] : KVP_COND_NEVER,
		.isl_max_tok = c->conditional_disagg_eff_isl,
		.ratio_max = c->conditional_disagg_ratio,
		.non_cached_tok = c->conditional_disagg_non_cached,
		.local_max_tok = c->conditional_disagg_local_max,
		.has_decode_gate = kvp_config_has(c->decode_busy_threshold) ? KVP_YES : KVP_NO};
}

uint64_t kvp_cond_uncached_tok(const struct kvp_cond_in *in)
{
	return in->isl_tok > in->hit_tok ? in->isl_tok - in->hit_tok : 0;
}

static int is_short(const struct kvp_cond_cfg *cfg, const struct kvp_cond_in *in)
{
	uint64_t rest = kvp_cond_uncached_tok(in);
	double ratio = (double)rest / (double)(in->isl_tok ? in->isl_tok : 1);
	return rest < cfg->isl_max_tok && ratio < cfg->ratio_max;
}

/* As llm-d's prefix-based decider: as many uncached tokens as the threshold says are remote. A prompt whose
 * cached part is not known is local. */
static int is_mostly_cached(const struct kvp_cond_cfg *cfg, const struct kvp_cond_in *in)
{
	return !cfg->non_cached_tok || in->is_hit_known == KVP_NO ||
	       kvp_cond_uncached_tok(in) < cfg->non_cached_tok;
}

/* As TensorRT-LLM's orchestrator: as many uncached tokens as the length says are local. A prompt of which
 * nothing is cached is remote, however short it is. */
static int is_local_length(const struct kvp_cond_cfg *cfg, const struct kvp_cond_in *in)
{
	return in->hit_tok && kvp_cond_uncached_tok(in) <= cfg->local_max_tok;
}

int kvp_cond_needs_load(enum kvp_cond_policy p)
{
	return p == KVP_COND_BY_PREFILL_LOAD || p == KVP_COND_BY_EITHER;
}

static int is_local(const struct kvp_cond_cfg *cfg, const struct kvp_cond_in *in)
{
	int is_busy = in->prefill_busy == KVP_YES;
	switch (cfg->policy) {
	case KVP_COND_NEVER:
		return 0;
	case KVP_COND_BY_ISL:
		return is_short(cfg, in);
	case KVP_COND_BY_PREFILL_LOAD:
		return is_busy;
	case KVP_COND_BY_EITHER:
		return is_busy || is_short(cfg, in);
	case KVP_COND_BY_NON_CACHED:
		return is_mostly_cached(cfg, in);
	case KVP_COND_BY_LENGTH:
		return is_local_length(cfg, in);
	}
	return 0;
}

enum kvp_cond_verdict kvp_cond_decide(const struct kvp_cond_cfg *cfg, const struct kvp_cond_in *in)
{
	if (!is_local(cfg, in))
		return KVP_COND_REMOTE;
	return cfg->has_decode_gate == KVP_YES && in->decode_busy != KVP_NO ? KVP_COND_VETOED
									    : KVP_COND_LOCAL;
}
