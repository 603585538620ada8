/* The vectors of least_work.json (made by tests/lib/least_work.py in exact fractions): logit and cost of
 * every rank to 1e-9 relative, and the choice among the least. Then what holds of both policies: the name of
 * each is a word of the settings at its number, and the roles get theirs. */
#include "daemons/common/apply_config.h"
#include "shm/score.h"
#include "tests/vec.h"

#include <math.h>
#include <string.h>

#define RANKS_MAX 16
#define DRAWS 20

static int close_to(double got, double want)
{
	return fabs(got - want) <= 1e-9 * fmax(1.0, fabs(want));
}

static int flag(struct kvp_json_val v, const char *key)
{
	int b = 0;
	kvp_json_bool(vec_get(v, key), &b);
	return b;
}

static double real(struct kvp_json_val v, const char *key)
{
	return vec_real(vec_get(v, key));
}

static struct kvp_score_request request_of(struct kvp_json_val v)
{
	struct kvp_json_val w = vec_get(v, "weights");
	const char *role = vec_str(v, "role");
	return (struct kvp_score_request){.policy = KVP_SCORE_LEAST_WORK,
		.weights = {.overlap_score_credit = real(w, "overlap_score_credit"),
			.overlap_score_credit_decay = real(w, "overlap_score_credit_decay"),
			.prefill_load_scale = real(w, "prefill_load_scale"),
			.active_request_weight = real(w, "active_request_weight"),
			.host_weight = real(w, "host_weight"),
			.disk_weight = real(w, "disk_weight"),
			.shared_multiplier = real(w, "shared_multiplier")},
		.role = !strcmp(role, "decode")	   ? KVP_PART_DECODE
			: !strcmp(role, "prefill") ? KVP_PART_PREFILL
						   : KVP_PART_AGGREGATED,
		.isl_tok = vec_u64(v, "isl_tokens"),
		.block_size = (uint32_t)vec_u64(v, "block_size"),
		.seq_blk = (uint32_t)vec_u64(v, "sequence_blocks"),
		.track = flag(v, "track") ? KVP_YES : KVP_NO,
		.has_preferred = flag(v, "preferred") ? KVP_YES : KVP_NO};
}

static struct kvp_score_rank rank_of(struct kvp_json_val v)
{
	return (struct kvp_score_rank){.dev_blk = (uint32_t)vec_u64(v, "device"),
		.host_blk = (uint32_t)vec_u64(v, "host"),
		.disk_blk = (uint32_t)vec_u64(v, "disk"),
		.shared_beyond_blk = (uint32_t)vec_u64(v, "shared"),
		.additional_blk = (uint32_t)vec_u64(v, "additional"),
		.active_prefill_tok = vec_u64(v, "active_prefill_tokens"),
		.active_blk = vec_u64(v, "active_blocks"),
		.active_requests = (uint32_t)vec_u64(v, "active_requests"),
		.total_blk = vec_u64(v, "total_blocks"),
		.taint_multiplier = real(v, "taint_multiplier")};
}

static void one(struct kvp_json_val v)
{
	struct kvp_score_request q = request_of(vec_get(v, "request"));
	struct kvp_score_rank rank[RANKS_MAX];
	struct kvp_json_iter r = kvp_json_each(vec_get(v, "ranks")),
			     logit = kvp_json_each(vec_get(v, "logit")),
			     cost = kvp_json_each(vec_get(v, "cost")),
			     least = kvp_json_each(vec_get(v, "least"));
	uint32_t n = 0, good = 0, may_be = 0, chosen = 0;
	const char *id = vec_str(v, "id");
	struct kvp_rng rng;
	while (n < RANKS_MAX && kvp_json_next(&r))
		rank[n++] = rank_of(r.val);
	kvp_score_all(&q, rank, n);
	for (uint32_t i = 0; i < n && kvp_json_next(&logit) && kvp_json_next(&cost); i++) {
		int same = close_to(rank[i].logit, vec_real(logit.val)) &&
			   close_to(rank[i].cost, vec_real(cost.val));
		if (!same)
			printf("# rank %u: logit %.12g, want %.12g\n", i, rank[i].logit, vec_real(logit.val));
		good += (uint32_t)same;
	}
	ok(n && good == n, "%s: cost of %u ranks", id, n);
	while (kvp_json_next(&least))
		may_be |= 1u << vec_num(least.val);
	kvp_rng_seed(&rng, 5);
	for (int i = 0; i < DRAWS; i++)
		chosen |= 1u << kvp_score_pick(&q, rank, n, &rng);
	ok(chosen && !(chosen & ~may_be), "%s: the least is chosen", id);
}

/* The words of the settings, in the order of the numbers that the choice goes by. */
static void words(void)
{
	char all[256] = "";
	for (int i = 0; i < KVP_SCORE_POLICY_CNT; i++) {
		const char *name = kvp_score_policy_name((enum kvp_score_policy)i);
		snprintf(all + strlen(all), sizeof(all) - strlen(all), "%s%s", i ? "|" : "", name);
	}
	is_str(all, KVP_CONFIG_POLICIES, "every policy has its word");
	ok(!kvp_score_policy_name(KVP_SCORE_POLICY_CNT), "and there is none more");
}

static void roles_are(const char *a, const char *b, enum kvp_score_policy aggregated,
	enum kvp_score_policy prefill, enum kvp_score_policy decode, const char *name)
{
	static struct kvp_config cfg;
	static struct kvp_config_err err;
	struct kvp_select_settings set;
	const char *env[] = {a, b, NULL};
	if (!ok(kvp_config_load(KVP_BIN_SUPERVISOR, 0, NULL, env, &cfg, NULL, &err) == KVP_OK, "%s", name))
		return;
	kvp_select_from_config(&set, &cfg);
	ok(set.score_policy[KVP_PART_AGGREGATED] == aggregated &&
			set.score_policy[KVP_PART_PREFILL] == prefill &&
			set.score_policy[KVP_PART_DECODE] == decode,
		"%s: each role has its policy", name);
}

int main(void)
{
	const enum kvp_score_policy ref = KVP_SCORE_REFERENCE, work = KVP_SCORE_LEAST_WORK;
	struct kvp_json *p = kvp_json_new();
	struct kvp_json_iter v = kvp_json_each(vec_get(vec_load(p, "least_work.json"), "vectors"));
	while (kvp_json_next(&v))
		one(v.val);
	words();
	roles_are("A=", "B=", ref, ref, ref, "nothing set");
	roles_are("KVPICK_SELECTION_POLICY=least_work", "B=", work, work, work, "the base");
	roles_are("DYN_ROUTER_WORKER_SELECTION_POLICY=least_work", "DYN_ROUTER_PREFILL_POLICY=reference",
		work, ref, work, "all, and one role its own");
	roles_are("KVPICK_SELECTION_POLICY=least_work", "DYN_ROUTER_WORKER_SELECTION_POLICY=default", ref,
		ref, ref, "the published name wins, default is the reference");
	roles_are("DYN_ROUTER_PREFILL_POLICY=least_work", "DYN_ROUTER_DECODE_POLICY=reference", ref, work,
		ref, "the prefill role alone");
	roles_are("DYN_ROUTER_DECODE_POLICY=least_work", "KVPICK_SELECTION_POLICY=reference", ref, ref, work,
		"the decode role alone");
	kvp_json_free(p);
	return done();
}
