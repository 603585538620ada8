/* bench/load/gen.h — makes a multi-turn workload: conversations that grow turn by turn over shared system
 * prompts.
 *
 * Shape      pure function of its configuration: the same seed gives the same trace.
 * Truth, Writers, Readers, Ordering, Lifetime, Crash: no state.
 * Proved by  tests/t_load_trace.c
 */
#ifndef KVP_BENCH_LOAD_GEN_H
#define KVP_BENCH_LOAD_GEN_H

#include "bench/load/trace.h"
#include <stdio.h>

struct kvp_gen_cfg {
	uint32_t session_cnt; /* conversations, starting at random over the first four fifths of the time */
	uint32_t turn_mean;   /* turns a conversation: 1 .. 2 * mean - 1, evenly */
	uint32_t system_cnt;  /* distinct system prompts, low ones used more often */
	uint32_t system_tok;  /* length of a system prompt */
	uint32_t user_tok;    /* mean tokens that a turn adds: half to three halves, evenly */
	uint32_t out_tok;     /* mean tokens of an answer: likewise */
	uint32_t think_s;     /* mean pause between turns, exponential, in seconds */
	uint32_t duration_s;  /* no request later than this */
	uint64_t seed;
};

void kvp_gen_cfg_default(struct kvp_gen_cfg *cfg);

/* kvp_gen_make appends the workload to an empty trace, ordered by arrival (whole ms). KVP_ERR_INVAL: a zero
 * that must not be one (everything but seed and system_tok); KVP_ERR_SYS: memory. */
int kvp_gen_make(const struct kvp_gen_cfg *cfg, struct kvp_trace *t);

/* kvp_gen_write prints a trace in the format that kvp_trace_read reads. KVP_ERR_SYS: write error. */
int kvp_gen_write(FILE *f, const struct kvp_trace *t);
#endif
