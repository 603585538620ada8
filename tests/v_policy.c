/* The vectors of scheduling.json that concern waiting: queue_admission, queue_order, best_cached,
 * busy_worker_ratio, policy_limits, policy_yaml, drr, refresh. Settings of a vector go through the real
 * parsers. Eligibility of queue_admission is judged by shm/score.h. */
#include "daemons/common/config.h"
#include "daemons/common/policy_file.h"
#include <kvpick/err.h>
#include "shm/score.h"
#include "tests/vec.h"

#include <math.h>

#define ENTRIES_MAX 64

static struct kvp_config cfg;

/* configure loads the vector's settings; KVP_OK, or what the parser says. A policy file is given apart. */
static int configure(struct kvp_json_val config, const char *refresh)
{
	static struct kvp_config_err err;
	static char text[16][256];
	const char *env[17];
	int n = 0;
	struct kvp_json_iter it = kvp_json_each(config);
	while (kvp_json_next(&it) && n < 14)
		if (strcmp(it.key, "DYN_ROUTER_POLICY_CONFIG") != 0) {
			snprintf(text[n], sizeof(text[0]), "%.*s=%s", (int)it.key_len, it.key,
				vec_text(it.val));
			env[n] = text[n];
			n++;
		}
	if (refresh) {
		snprintf(text[n], sizeof(text[0]), "DYN_ROUTER_OVERLAP_REFRESH_AFTER_SECS=%s", refresh);
		env[n] = text[n];
		n++;
	}
	env[n] = NULL;
	return kvp_config_load(KVP_BIN_SUPERVISOR, 0, NULL, env, &cfg, NULL, &err);
}

static enum kvp_order order_now(void)
{
	return cfg.queue_policy == KVP_QUEUE_LCFS   ? KVP_ORDER_LCFS
	       : cfg.queue_policy == KVP_QUEUE_WSPT ? KVP_ORDER_WSPT
						    : KVP_ORDER_FCFS;
}

static void admission(struct kvp_json_val v)
{
	static struct kvp_policy_profile p;
	struct kvp_json_val q = vec_get(v, "request"), m, want = vec_get(v, "expected");
	struct kvp_eligible_ask ask = {.has_pinned = KVP_NO};
	uint64_t allowed[8], required[1];
	uint32_t busy = 0, eligible = 0;
	int queued = 0;
	ok(configure(vec_get(v, "config"), NULL) == KVP_OK, "%s: settings", vec_str(v, "id"));
	kvp_policy_single(
		&p, order_now(), kvp_config_has(cfg.queue_threshold) ? cfg.queue_threshold : NAN);
	if (vec_has(q, "allowed_worker_ids", &m)) {
		struct kvp_json_iter it = kvp_json_each(m);
		while (kvp_json_next(&it) && ask.allowed_cnt < 8)
			allowed[ask.allowed_cnt++] = vec_num(it.val);
		ask.allowed = allowed;
	}
	if (vec_has(q, "pinned_worker", &m)) {
		ask.has_pinned = KVP_YES;
		ask.pinned_worker_id = vec_u64(m, "worker_id");
		ask.pinned_dp_rank = (uint32_t)vec_u64(m, "dp_rank");
	}
	if (vec_has(q, "routing_constraints", &m)) {
		required[0] = 1;
		ask.required = required;
		ask.required_cnt = 1;
	}
	struct kvp_json_iter it = kvp_json_each(vec_get(v, "ranks"));
	while (kvp_json_next(&it)) {
		uint64_t max = vec_has(it.val, "max_num_batched_tokens", &m) ? vec_num(m) : 0;
		if (kvp_score_eligible(&ask, vec_u64(it.val, "worker_id"),
			    (uint32_t)vec_u64(it.val, "dp_rank"), NULL, 0) != KVP_ELIGIBLE)
			continue;
		eligible++;
		busy += kvp_policy_rank_busy(&p.class[0], vec_u64(it.val, "active_prefill_tokens"), max) != 0;
	}
	int got = kvp_policy_queues(&p.class[0]) && kvp_policy_pool_busy(&p.class[0], busy, eligible);
	kvp_json_bool(vec_get(want, "queued"), &queued);
	ok(got == queued, "%s: %s", vec_str(v, "id"), vec_str(v, "title"));
	if (vec_has(want, "error", &m))
		ok(eligible == 0, "%s: nobody is eligible", vec_str(v, "id"));
}

static double opt_real(struct kvp_json_val v, const char *key)
{
	struct kvp_json_val m;
	return vec_has(v, key, &m) ? vec_real(m) : 0;
}
static uint64_t opt_u64(struct kvp_json_val v, const char *key)
{
	struct kvp_json_val m;
	return vec_has(v, key, &m) ? vec_num(m) : 0;
}

static void order(struct kvp_json_val v)
{
	struct kvp_order_key key[ENTRIES_MAX];
	char id[ENTRIES_MAX][32];
	uint32_t n = 0, taken = 0;
	ok(configure(vec_get(v, "config"), NULL) == KVP_OK, "%s: settings", vec_str(v, "id"));
	struct kvp_json_iter it = kvp_json_each(vec_get(v, "entries"));
	while (kvp_json_next(&it) && n < ENTRIES_MAX) {
		uint64_t cost = kvp_policy_cost(
			opt_u64(it.val, "isl_tokens"), opt_u64(it.val, "best_cached_tokens"));
		snprintf(id[n], sizeof(id[n]), "%s", vec_str(it.val, "id"));
		key[n] = (struct kvp_order_key){(uint32_t)opt_u64(it.val, "strict_priority"),
			kvp_policy_score(order_now(), opt_real(it.val, "arrival_s"),
				opt_real(it.val, "priority_jump"), cost),
			n};
		n++;
	}
	it = kvp_json_each(vec_get(vec_get(v, "expected"), "keys"));
	for (uint32_t i = 0; i < n && kvp_json_next(&it); i++)
		ok(key[i].score == vec_real(vec_get(it.val, "score")) &&
				key[i].strict == vec_u64(it.val, "strict_priority") &&
				key[i].seq == vec_u64(it.val, "sequence"),
			"%s: key of %s", vec_str(v, "id"), id[i]);
	it = kvp_json_each(vec_get(vec_get(v, "expected"), "order"));
	while (kvp_json_next(&it)) {
		uint32_t best = ENTRIES_MAX;
		for (uint32_t i = 0; i < n; i++)
			if (id[i][0] && (best == ENTRIES_MAX || kvp_order_before(&key[i], &key[best])))
				best = i;
		is_str(best < n ? id[best] : "none", vec_text(it.val), "%s: number %u", vec_str(v, "id"),
			taken++);
		if (best < n)
			id[best][0] = 0;
	}
}

static void best_cached(struct kvp_json_val v)
{
	struct kvp_json_iter it = kvp_json_each(vec_get(v, "rows"));
	while (kvp_json_next(&it)) {
		struct kvp_json_val m;
		uint64_t best = 0;
		const char *pin = vec_has(it.val, "pinned", &m) ? vec_text(m) : NULL;
		struct kvp_json_iter c = kvp_json_each(vec_get(it.val, "cached"));
		while (kvp_json_next(&c))
			if ((!pin || strcmp(pin, c.key) == 0) && vec_num(c.val) > best)
				best = vec_num(c.val);
		is_u64(kvp_policy_cost(vec_u64(it.val, "isl_tokens"), best), vec_u64(it.val, "cost"),
			"cost of a turn");
	}
}

static void ratio(struct kvp_json_val v)
{
	struct kvp_policy_class c = {.busy_tok = 0, .busy_frac = NAN};
	struct kvp_json_iter it = kvp_json_each(vec_get(v, "rows"));
	while (kvp_json_next(&it)) {
		int want = 0;
		c.busy_ratio = vec_real(vec_get(it.val, "busy_worker_ratio"));
		uint32_t busy = (uint32_t)vec_u64(it.val, "busy"),
			 all = (uint32_t)vec_u64(it.val, "eligible");
		kvp_json_bool(vec_get(it.val, "pool_busy"), &want);
		ok(kvp_policy_pool_busy(&c, busy, all) == want, "%u of %u busy at %g", busy, all,
			c.busy_ratio);
	}
}

static void limits(struct kvp_json_val v)
{
	struct kvp_json_val l = vec_get(v, "class_limits"), m;
	static struct kvp_policy policy;
	struct kvp_policy_profile single;
	struct kvp_policy_err err;
	char yaml[1024];
	int at = snprintf(yaml, sizeof(yaml),
		"default_policy_family: f\nuncached_isl_buckets: [{min_tokens: 0, bucket: b}]\n"
		"policy_classes:\n- {name: c, quantum: 1, policy_family: f, cache_bucket: b");
	struct kvp_json_iter it = kvp_json_each(l);
	while (kvp_json_next(&it))
		at += snprintf(yaml + at, sizeof(yaml) - (size_t)at, ", %.*s: %" PRIu64, (int)it.key_len,
			it.key, vec_num(it.val));
	snprintf(yaml + at, sizeof(yaml) - (size_t)at, "}\n");
	kvp_policy_single(&single, KVP_ORDER_FCFS, NAN);
	if (!ok(kvp_policy_parse(yaml, strlen(yaml), &single, &policy, &err) == KVP_OK, "%s: policy",
		    vec_str(v, "id")))
		return;
	struct kvp_policy_usage use = {0, 0, 0};
	struct kvp_json_iter want = kvp_json_each(vec_get(v, "expected"));
	it = kvp_json_each(vec_get(v, "entries"));
	while (kvp_json_next(&it) && kvp_json_next(&want)) {
		uint64_t current = 0, limit = 0;
		int accepted = 0;
		enum kvp_limit got = kvp_policy_limit(
			&policy.profile[0].class[0], vec_u64(v, "workers"), &use, &current, &limit);
		kvp_json_bool(vec_get(want.val, "accepted"), &accepted);
		ok((got == KVP_LIMIT_NONE) == accepted, "%s: accepted or not", vec_str(v, "id"));
		if (got != KVP_LIMIT_NONE && vec_has(want.val, "limit_kind", &m)) {
			is_str(kvp_limit_name(got), vec_text(m), "%s: kind", vec_str(v, "id"));
			is_u64(current, vec_u64(want.val, "current"), "%s: current", vec_str(v, "id"));
			is_u64(limit, vec_u64(want.val, "limit"), "%s: limit", vec_str(v, "id"));
			continue;
		}
		use.requests++;
		use.isl_tok += vec_u64(it.val, "isl_tokens");
		use.cached_tok += opt_u64(it.val, "cached_tokens");
	}
	kvp_policy_drop(&policy);
}

static void yaml(struct kvp_json_val v)
{
	static struct kvp_policy policy;
	struct kvp_policy_profile single;
	struct kvp_policy_err err;
	const char *text = vec_str(v, "policy_yaml");
	kvp_policy_single(&single, KVP_ORDER_FCFS, NAN);
	if (!ok(kvp_policy_parse(text, strlen(text), &single, &policy, &err) == KVP_OK, "%s: valid",
		    vec_str(v, "id")))
		return;
	struct kvp_json_iter it = kvp_json_each(vec_get(vec_get(v, "expected"), "classification"));
	while (kvp_json_next(&it)) {
		struct kvp_json_val m;
		struct kvp_str name = {NULL, 0};
		if (vec_has(it.val, "header", &m))
			name = (struct kvp_str){vec_text(m), strlen(vec_text(m))};
		const struct kvp_policy_profile *p =
			kvp_policy_of(&policy, (struct kvp_str){"any-model", 9});
		is_str(p->class[kvp_policy_classify(p, name, 100, 0)].name, vec_str(it.val, "class"),
			"class of header %s", name.ptr ? name.ptr : "(none)");
	}
	kvp_policy_drop(&policy);
}

static void drr(struct kvp_json_val v)
{
	struct kvp_drr d = {.cursor = 0};
	struct kvp_drr_class c[8];
	uint64_t cost[8][16];
	uint32_t head[8] = {0}, cnt[8] = {0}, n = 0, pop = 0;
	char letter[8];
	struct kvp_json_iter it = kvp_json_each(vec_get(v, "classes"));
	while (kvp_json_next(&it) && n < 8) {
		letter[n] = (char)(vec_str(it.val, "name")[0] & ~0x20);
		c[n].quantum = vec_u64(it.val, "quantum");
		struct kvp_json_iter k = kvp_json_each(vec_get(it.val, "costs"));
		while (kvp_json_next(&k) && cnt[n] < 16)
			cost[n][cnt[n]++] = vec_num(k.val);
		n++;
	}
	struct kvp_json_iter want = kvp_json_each(vec_get(vec_get(v, "expected"), "order"));
	struct kvp_json_iter deficits =
		kvp_json_each(vec_get(vec_get(v, "expected"), "deficits_after_pop"));
	for (;; pop++) {
		char name[16];
		for (uint32_t i = 0; i < n; i++) {
			c[i].waiting = cnt[i] - head[i];
			c[i].can_go = c[i].waiting != 0;
			c[i].cost = c[i].can_go ? cost[i][head[i]] : 0;
		}
		int i = kvp_drr_pick(&d, c, n);
		int more = kvp_json_next(&want);
		if (i < 0 || !more) {
			ok(i < 0 && !more, "%s: %u pops", vec_str(v, "id"), pop);
			break;
		}
		snprintf(name, sizeof(name), "%c%u", letter[i], head[i]);
		is_str(name, vec_text(want.val), "%s: pop %u", vec_str(v, "id"), pop);
		head[i]++;
		kvp_drr_take(&d, n, (uint32_t)i, c[i].cost, cnt[i] - head[i]);
		kvp_json_next(&deficits);
		struct kvp_json_iter k = kvp_json_each(deficits.val);
		for (uint32_t j = 0; j < n && kvp_json_next(&k); j++)
			is_u64(d.deficit[j], vec_num(k.val), "%s: deficit %u after pop %u", vec_str(v, "id"),
				j, pop);
	}
}

static void refresh(struct kvp_json_val v)
{
	struct kvp_json_iter it = kvp_json_each(vec_get(v, "rows"));
	while (kvp_json_next(&it)) {
		struct kvp_json_val m;
		int want = 0, hashes = 0;
		const char *env = vec_has(it.val, "env", &m) ? vec_text(m) : NULL;
		int rc = configure(vec_get(v, "config"), env);
		if (vec_has(it.val, "starts", &m)) {
			ok(rc != KVP_OK, "refresh=%s is refused", env);
			continue;
		}
		kvp_json_bool(vec_get(it.val, "has_hashes"), &hashes);
		kvp_json_bool(vec_get(it.val, "refresh"), &want);
		double waited = vec_real(vec_get(it.val, "waited_s"));
		ok(rc == KVP_OK && kvp_policy_refresh_due(cfg.overlap_refresh_after_secs,
					   (uint64_t)llround(waited * 1e9), hashes) == want,
			"refresh=%s after %g s", env ? env : "(unset)", waited);
	}
}

static const struct {
	const char *kind;
	void (*run)(struct kvp_json_val v);
} here[] = {{"queue_admission", admission}, {"queue_order", order}, {"best_cached", best_cached},
	{"busy_worker_ratio", ratio}, {"policy_limits", limits}, {"policy_yaml", yaml}, {"drr", drr},
	{"refresh", refresh}};
#define HERE_CNT (sizeof(here) / sizeof(here[0]))

int main(void)
{
	struct kvp_json *p = kvp_json_new();
	struct kvp_json_iter v = kvp_json_each(vec_get(vec_load(p, "scheduling.json"), "vectors"));
	unsigned ran[HERE_CNT] = {0};
	while (kvp_json_next(&v))
		for (size_t i = 0; i < HERE_CNT; i++)
			if (strcmp(vec_str(v.val, "kind"), here[i].kind) == 0) {
				ran[i]++;
				here[i].run(v.val);
			}
	for (size_t i = 0; i < HERE_CNT; i++)
		ok(ran[i] > 0, "%u vectors of kind %s", ran[i], here[i].kind);
	kvp_json_free(p);
	return done();
}
