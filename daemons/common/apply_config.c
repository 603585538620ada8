#include "daemons/common/apply_config.h"

#include <math.h>

void kvp_select_from_config(struct kvp_select_settings *set, const struct kvp_config *cfg)
{
	kvp_select_defaults(set);
	set->weights = (struct kvp_score_weights){.overlap_score_credit = cfg->eff.overlap_score_credit,
		.overlap_score_credit_decay = cfg->overlap_score_credit_decay,
		.prefill_load_scale = cfg->eff.prefill_load_scale,
		.active_request_weight = cfg->decode_active_request_weight,
		.host_weight = cfg->host_cache_hit_weight,
		.disk_weight = cfg->disk_cache_hit_weight,
		.shared_multiplier = cfg->shared_cache_multiplier,
		.temperature = cfg->temperature};
	set->track_prefill_tokens = cfg->track_prefill_tokens ? KVP_YES : KVP_NO;
	set->track_active_blocks = cfg->track_active_blocks ? KVP_YES : KVP_NO;
	set->assume_kv_reuse = cfg->assume_kv_reuse ? KVP_YES : KVP_NO;
	set->records_routing =
		!cfg->use_kv_events || kvp_config_has(cfg->predicted_ttl_secs) ? KVP_YES : KVP_NO;
	if (kvp_config_has(cfg->decode_busy_threshold))
		set->decode_busy_threshold = cfg->decode_busy_threshold;
}
