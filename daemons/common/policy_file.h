/* daemons/common/policy_file.h — the policy file (YAML) read into profiles of classes.
 *
 * Shape      one document: default_policy_family, policy_classes, uncached_isl_buckets (all three or none),
 *            models.<name> with the same three, worker_selection. Every unknown key, duplicate, missing
 *            member, number out of range and hole in the family x bucket matrix is an error.
 * Truth      the file at the moment of the read.
 * Lifetime   from load to drop; read-only in between.
 * Crash      process-local.
 * Proved by  tests/t_policy_file.c, tests/v_policy.c
 */
#ifndef KVP_POLICY_FILE_H
#define KVP_POLICY_FILE_H

#include "shm/policy.h"

#define KVP_POLICY_FILE_MAX (1u << 20) /* bytes */

struct kvp_policy_err {
	char text[512]; /* one line: where, what, what is legal */
};

/* kvp_policy_load reads a file.
 *
 * path      "" or NULL = none: every model gets `single`.
 * single    profile of models that the file says nothing about (kvp_policy_single).
 * errors    KVP_ERR_SYS unreadable or no memory, KVP_ERR_INVAL contents; err says which. *out is then empty.
 * blocks    on the disk. who: at start only.
 */
int kvp_policy_load(const char *path, const struct kvp_policy_profile *single, struct kvp_policy *out,
	struct kvp_policy_err *err);
/* kvp_policy_parse does the same with a text in memory. */
int kvp_policy_parse(const char *text, size_t len, const struct kvp_policy_profile *single,
	struct kvp_policy *out, struct kvp_policy_err *err);
void kvp_policy_drop(struct kvp_policy *p);
#endif
