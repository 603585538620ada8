#include "daemons/extproc/conditional.h"

uint64_t kvp_cond_uncached_tok(const struct kvp_cond_in *in)
{
	uint64_t cached = (uint64_t)in->overlap_blk * in->block_size;
	return in->isl_tok > cached ? in->isl_tok - cached : 0;
}

static int is_short(const struct kvp_cond_cfg *cfg, const struct kvp_cond_in *in)
{
	uint64_t rest = kvp_cond_uncached_tok(in);
	double ratio = (double)rest / (double)(in->isl_tok ? in->isl_tok : 1);
	return rest < cfg->isl_max_tok && ratio < cfg->ratio_max;
}

enum kvp_cond_verdict kvp_cond_decide(const struct kvp_cond_cfg *cfg, const struct kvp_cond_in *in)
{
	int by_isl = cfg->policy != KVP_COND_BY_PREFILL_LOAD && is_short(cfg, in);
	int by_load = cfg->policy != KVP_COND_BY_ISL && in->prefill_busy == KVP_YES;
	if (!by_isl && !by_load)
		return KVP_COND_REMOTE;
	return cfg->has_decode_gate == KVP_YES && in->decode_busy != KVP_NO ? KVP_COND_VETOED
									    : KVP_COND_LOCAL;
}
