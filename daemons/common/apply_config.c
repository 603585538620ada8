#include "daemons/common/apply_config.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

struct kvp_hash_placeholder kvp_placeholder_from_config(const struct kvp_config *cfg)
{
	struct kvp_hash_placeholder p = {.image_set = KVP_HASH_PLACEHOLDER_UNSET};
	if (cfg->mm_image_token_id != KVP_CONFIG_UNSET) {
		p.image_set = KVP_HASH_PLACEHOLDER_SET;
		p.image_tok = (uint32_t)cfg->mm_image_token_id;
	}
	if (cfg->mm_video_token_id != KVP_CONFIG_UNSET) {
		p.video_set = KVP_HASH_PLACEHOLDER_SET;
		p.video_tok = (uint32_t)cfg->mm_video_token_id;
	}
	return p;
}

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
	for (int role = 0; role < KVP_PART_ROLE_CNT; role++)
		set->score_policy[role] = (enum kvp_score_policy)cfg->eff.policy[role];
	set->track_prefill_tokens = cfg->track_prefill_tokens ? KVP_YES : KVP_NO;
	set->track_active_blocks = cfg->track_active_blocks ? KVP_YES : KVP_NO;
	set->affinity_mode = cfg->session_affinity_mode == KVP_AFFINITY_SOFT ? KVP_AFFINITY_IS_SOFT
									     : KVP_AFFINITY_IS_HARD;
	set->assume_kv_reuse = cfg->assume_kv_reuse ? KVP_YES : KVP_NO;
	set->records_routing =
		!cfg->use_kv_events || kvp_config_has(cfg->predicted_ttl_secs) ? KVP_YES : KVP_NO;
	/* Nobody asks what decode workers hold, unless one of them may prefill; then their events tell it,
	 * where there are any, and nothing is predicted. */
	set->decode_learns = cfg->conditional_disagg && !cfg->use_kv_events ? KVP_YES : KVP_NO;
	set->refresh_after_s = cfg->overlap_refresh_after_secs;
	set->placeholder = kvp_placeholder_from_config(cfg);
	if (kvp_config_has(cfg->decode_busy_threshold))
		set->decode_busy_threshold = cfg->decode_busy_threshold;
	if (kvp_config_has(cfg->prefill_busy_threshold))
		set->prefill_busy_threshold = cfg->prefill_busy_threshold;
}

int kvp_policy_from_config(struct kvp_policy *out, const struct kvp_config *cfg, struct kvp_policy_err *err)
{
	struct kvp_policy_profile *single = malloc(sizeof(*single));
	enum kvp_order order = cfg->queue_policy == KVP_QUEUE_LCFS   ? KVP_ORDER_LCFS
			       : cfg->queue_policy == KVP_QUEUE_WSPT ? KVP_ORDER_WSPT
								     : KVP_ORDER_FCFS;
	*out = (struct kvp_policy){.profile = NULL};
	snprintf(err->text, sizeof(err->text), "out of memory");
	if (!single)
		return KVP_ERR_SYS;
	kvp_policy_single(single, order, kvp_config_has(cfg->queue_threshold) ? cfg->queue_threshold : NAN);
	int rc = kvp_policy_load(cfg->policy_config, single, out, err);
	free(single);
	return rc;
}
