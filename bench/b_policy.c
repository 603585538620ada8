/* Selection policies on simulated engines: hit rate, time to first token and per output token.
 *   b_policy [--trace FILE]... [--speed X]... [--seeds N 3] [--engines N 8] [--blocks N 2000]
 *            [--role aggregated|prefill|decode]
 * Engines are those of bench/sim/engine.h by default. Role prefill: they stop at the first token; decode:
 * prompts come to them computed. Each trace (default: the bundled one) is played at each speed (times the
 * arrival rate; default 1 and 2), arrivals spread inside their ticks, by
 *   by=product  reference and least_work as the product chooses in this process;
 *   by=model    the same formulas written apart, round-robin, least-requests.
 * Values are means over the seeds of ties. ttft_ratio, tpot_ratio: against the first line's. */
#include "bench/load/product.h"
#include "bench/sim/opt.h"

#include <getopt.h>
#include <stdlib.h>
#include <string.h>

#define LIST_MAX 8
#define BUNDLED "bench/load/trace_small.jsonl"

static const char *const role_words[] = {"aggregated", "prefill", "decode", NULL};

static const struct contender {
	const char *name, *by;
	enum kvp_policy policy;
	enum kvp_local_policy product;
} contenders[] = {{"reference", "product", KVP_POLICY_KV, KVP_LOCAL_REFERENCE},
	{"least_work", "product", KVP_POLICY_LEAST_WORK, KVP_LOCAL_LEAST_WORK},
	{"reference", "model", KVP_POLICY_KV, KVP_LOCAL_REFERENCE},
	{"least_work", "model", KVP_POLICY_LEAST_WORK, KVP_LOCAL_REFERENCE},
	{"round_robin", "model", KVP_POLICY_ROUND_ROBIN, KVP_LOCAL_REFERENCE},
	{"least_requests", "model", KVP_POLICY_LEAST_LOADED, KVP_LOCAL_REFERENCE}};
#define CONTENDER_CNT (sizeof(contenders) / sizeof(contenders[0]))

struct result {
	double hit, ttft_s, ttft_p99_s, tpot_ms, tpot_p99_ms;
};

static int play(const struct contender *c, struct kvp_simulate_cfg *cfg, const struct kvp_trace *t,
	struct result *r)
{
	struct kvp_run_stats s = {0};
	struct kvp_product p;
	int by_product = !strcmp(c->by, "product");
	cfg->policy = c->policy;
	cfg->chooser = by_product ? &p.chooser : NULL;
	int rc = by_product ? kvp_product_open(&p, cfg, c->product) : KVP_OK;
	if (rc)
		return rc;
	rc = kvp_simulate(cfg, t, &s);
	if (by_product) {
		rc = rc || p.failed_cnt ? KVP_ERR_PROTO : KVP_OK;
		kvp_product_close(&p);
	}
	r->hit += (double)s.cached_tok / (double)s.prompt_tok;
	r->ttft_s += kvp_sample_mean(&s.ttft_s);
	r->ttft_p99_s += kvp_sample_pct(&s.ttft_s, 0.99);
	r->tpot_ms += kvp_sample_mean(&s.tpot_s) * 1e3;
	r->tpot_p99_ms += kvp_sample_pct(&s.tpot_s, 0.99) * 1e3;
	kvp_stats_free(&s);
	return rc;
}

/* All values are sums over n seeds. */
static void print(const char *path, const struct contender *c, const struct kvp_simulate_cfg *cfg, double n,
	const struct result *r, const struct result *first)
{
	const char *slash = strrchr(path, '/'), *name = slash ? slash + 1 : path;
	printf("bench=policy role=%s trace=%.*s speed=%g engines=%u blocks=%u policy=%s by=%s seeds=%.0f "
	       "hit=%.4f ttft_s=%.4f ttft_p99_s=%.3f tpot_ms=%.2f tpot_p99_ms=%.1f ttft_ratio=%.3f "
	       "tpot_ratio=%.3f\n",
		role_words[cfg->role], (int)strcspn(name, "."), name, cfg->speed, cfg->engine_cnt,
		cfg->engine.block_max, c->name, c->by, n, r->hit / n, r->ttft_s / n, r->ttft_p99_s / n,
		r->tpot_ms / n, r->tpot_p99_ms / n, r->ttft_s / first->ttft_s,
		first->tpot_ms > 0 ? r->tpot_ms / first->tpot_ms : 1);
	fflush(stdout);
}

static int play_all(const char *path, const struct kvp_trace *t, struct kvp_simulate_cfg *cfg, uint64_t seeds)
{
	struct result first = {0};
	for (size_t i = 0; i < CONTENDER_CNT; i++) {
		struct result r = {0};
		for (cfg->seed = 1; cfg->seed <= seeds; cfg->seed++)
			if (play(&contenders[i], cfg, t, &r))
				return KVP_ERR_PROTO;
		if (i == 0)
			first = r;
		print(path, &contenders[i], cfg, (double)seeds, &r, &first);
	}
	return KVP_OK;
}

static int play_file(const char *path, const double *speed, int speed_cnt, struct kvp_simulate_cfg *cfg,
	uint64_t seeds)
{
	struct kvp_trace t = {0};
	size_t line = 0;
	int rc = kvp_trace_read(&t, path, 0, &line);
	if (rc)
		fprintf(stderr, "%s:%zu: not a trace\n", path, line);
	else
		kvp_trace_spread(&t);
	for (int i = 0; !rc && i < speed_cnt; i++) {
		cfg->speed = speed[i];
		rc = play_all(path, &t, cfg, seeds);
	}
	kvp_trace_free(&t);
	return rc;
}

int main(int argc, char **argv)
{
	static const struct option options[] = {{"trace", 1, 0, 't'}, {"speed", 1, 0, 's'},
		{"seeds", 1, 0, 'n'}, {"engines", 1, 0, 'e'}, {"blocks", 1, 0, 'b'}, {"role", 1, 0, 'r'},
		{0}};
	const char *trace[LIST_MAX] = {BUNDLED};
	double speed[LIST_MAX] = {1, 2};
	int trace_cnt = 0, speed_cnt = 0, rc = KVP_OK;
	uint64_t seeds = 3;
	struct kvp_simulate_cfg cfg = {.engine_cnt = 8};
	kvp_sim_cfg_default(&cfg.engine);
	for (int opt; (opt = getopt_long(argc, argv, "", options, NULL)) != -1;) {
		if (opt == 't' && trace_cnt < LIST_MAX)
			trace[trace_cnt++] = optarg;
		else if (opt == 's' && speed_cnt < LIST_MAX)
			speed[speed_cnt++] = kvp_opt_f64("speed", optarg, 0.001, 10000);
		else if (opt == 'n')
			seeds = kvp_opt_u64("seeds", optarg, 1, 1000);
		else if (opt == 'e')
			cfg.engine_cnt = (uint32_t)kvp_opt_u64("engines", optarg, 1, 1024);
		else if (opt == 'b')
			cfg.engine.block_max = (uint32_t)kvp_opt_u64("blocks", optarg, 1, 1u << 24);
		else if (opt == 'r')
			cfg.role = (enum kvp_part_role)kvp_opt_word("role", optarg, role_words);
		else
			return KVP_EXIT_CONFIG;
	}
	for (int i = 0; !rc && i < (trace_cnt ? trace_cnt : 1); i++)
		rc = play_file(trace[i], speed, speed_cnt ? speed_cnt : 2, &cfg, seeds);
	return rc ? EXIT_FAILURE : EXIT_SUCCESS;
}
