/* kvpick-load — replays request traces under a policy, simulates them, or generates one. */
#include "bench/load/options.h"
#include "bench/load/replay.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>

static int generate(const struct kvp_load_cfg *c)
{
	struct kvp_trace t = {0};
	int rc = kvp_gen_make(&c->gen, &t), is_stdout = !strcmp(c->generate, "-");
	FILE *f = rc ? NULL : is_stdout ? stdout : fopen(c->generate, "we");
	if (!rc)
		rc = f ? kvp_gen_write(f, &t) : KVP_ERR_SYS;
	if (f && !is_stdout && fclose(f) && !rc)
		rc = KVP_ERR_SYS;
	if (rc)
		fprintf(stderr, "%s: %s\n", c->generate,
			rc == KVP_ERR_SYS ? strerror(errno) : kvp_strerror(rc));
	kvp_trace_free(&t);
	return rc;
}

static int load_trace(const struct kvp_load_cfg *c, struct kvp_trace *t)
{
	size_t line;
	int rc = kvp_trace_read(t, c->trace, c->limit, &line);
	if (rc) {
		fprintf(stderr, "%s:%zu: %s\n", c->trace, line,
			rc == KVP_ERR_SYS ? strerror(errno) : kvp_strerror(rc));
		return rc;
	}
	if (c->arrival == KVP_LOAD_SPREAD)
		kvp_trace_spread(t);
	while (c->duration_s && t->req_cnt &&
		(double)t->req[t->req_cnt - 1].at_ns / c->speed > 1e9 * (double)c->duration_s)
		t->req_cnt--;
	return KVP_OK;
}

static int simulate(const struct kvp_load_cfg *c, const struct kvp_trace *t, struct kvp_run_stats *stats)
{
	int rc = KVP_OK;
	for (uint32_t i = 0; !rc && i < c->run_cnt; i++) {
		struct kvp_simulate_cfg s = {.engine = c->engine,
			.engine_cnt = c->engine_cnt,
			.policy = c->policy[i],
			.speed = c->speed,
			.seed = c->seed};
		rc = kvp_simulate(&s, t, &stats[i]);
	}
	if (rc)
		fprintf(stderr, "simulate: %s\n", kvp_strerror(rc));
	return rc;
}

int main(int argc, char **argv)
{
	static struct kvp_load_cfg c;
	struct kvp_run_stats stats[KVP_LOAD_RUN_MAX] = {0};
	struct kvp_trace t = {0};
	kvp_load_options(argc, argv, &c);
	if (c.mode == KVP_LOAD_GENERATE)
		return generate(&c) ? EXIT_FAILURE : EXIT_SUCCESS;
	int rc = load_trace(&c, &t);
	if (!rc && c.mode == KVP_LOAD_SIMULATE)
		rc = simulate(&c, &t, stats);
	else if (!rc)
		rc = kvp_replay(&c, &t, stats);
	if (!rc && c.output == KVP_LOAD_JSON)
		kvp_stats_json(stdout, stats, c.run_cnt);
	else if (!rc)
		kvp_stats_table(stdout, stats, c.run_cnt);
	uint64_t error_cnt = 0;
	for (uint32_t i = 0; i < c.run_cnt; i++) {
		error_cnt += stats[i].error_cnt;
		kvp_stats_free(&stats[i]);
	}
	kvp_trace_free(&t);
	return rc || error_cnt ? EXIT_FAILURE : EXIT_SUCCESS;
}
