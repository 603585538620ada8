/* daemons/common/apply_config.h — parsed settings turned into what the modules take.
 *
 * Shape      pure functions over struct kvp_config.
 * Crash      process-local.
 */
#ifndef KVP_APPLY_CONFIG_H
#define KVP_APPLY_CONFIG_H

#include "daemons/common/config.h"
#include "daemons/common/policy_file.h"
#include "daemons/common/select.h"

/* kvp_policy_from_config reads the policy file, if there is one: what kvp_policy_load answers. */
int kvp_policy_from_config(struct kvp_policy *out, const struct kvp_config *cfg, struct kvp_policy_err *err);

/* kvp_placeholder_from_config: the tokens that stand for media, the same for prompts and for events. */
struct kvp_hash_placeholder kvp_placeholder_from_config(const struct kvp_config *cfg);

/* kvp_select_from_config gives the settings of the aggregated role for bookings that belong to the node. */
void kvp_select_from_config(struct kvp_select_settings *set, const struct kvp_config *cfg);
#endif
