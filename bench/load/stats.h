/* bench/load/stats.h — what a run measured, and how it is printed.
 *
 * Shape      counters and samples of one run under one policy. Times of engines are virtual seconds;
 *            selection latency is wall seconds.
 * Truth      this struct. Writers, readers: the owning thread. Ordering: none. Crash: process-local.
 * Lifetime   zeroed to kvp_stats_free.
 * Proved by  tests/t_load_trace.c
 */
#ifndef KVP_BENCH_LOAD_STATS_H
#define KVP_BENCH_LOAD_STATS_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

enum kvp_policy {
	KVP_POLICY_KV,
	KVP_POLICY_ROUND_ROBIN,
	KVP_POLICY_RANDOM,
	KVP_POLICY_LEAST_LOADED,
	KVP_POLICY_LEAST_WORK,
	KVP_POLICY_CNT
};
/* kvp_policy_name is the word on the command line; kvp_policy_parse its reverse, -1 for another word. */
const char *kvp_policy_name(enum kvp_policy p);
int kvp_policy_parse(const char *s, size_t len);

struct kvp_sample {
	double *val;
	size_t cnt, max;
	int is_sorted;
};
void kvp_sample_add(struct kvp_sample *s, double v); /* a sample that finds no memory is dropped */
double kvp_sample_mean(const struct kvp_sample *s);  /* 0 without values */
/* kvp_sample_pct is the value below or at which a share (0..1) of the values lies (nearest rank); sorts. */
double kvp_sample_pct(struct kvp_sample *s, double share);

struct kvp_run_stats {
	const char *name;
	uint64_t sent_cnt, done_cnt, error_cnt;
	uint64_t prompt_tok, cached_tok, out_tok; /* of finished requests */
	struct kvp_sample ttft_s, tpot_s;	  /* virtual */
	struct kvp_sample select_s;		  /* wall */
	double virtual_s;			  /* first arrival to last finish */
	double wall_s;
};

/* kvp_stats_finished adds one finished request. Virtual instants in ns; out_tok >= 1. */
void kvp_stats_finished(struct kvp_run_stats *s, uint64_t arrival_ns, uint64_t first_ns, uint64_t finish_ns,
	uint64_t prompt_tok, uint64_t cached_tok, uint64_t out_tok);
void kvp_stats_free(struct kvp_run_stats *s);

/* kvp_stats_table prints the runs as columns, and the first against the second as a ratio when there are two.
 * kvp_stats_json prints one object: {"runs":[...]}. */
void kvp_stats_table(FILE *f, struct kvp_run_stats *run, size_t run_cnt);
void kvp_stats_json(FILE *f, struct kvp_run_stats *run, size_t run_cnt);
#endif
