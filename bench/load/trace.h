/* bench/load/trace.h — request traces in the Mooncake format: one JSON object a line, members timestamp (ms),
 * input_length, output_length (tokens) and hash_ids (one per started block of 512 prompt tokens).
 *
 * Shape      one array of requests in the order of arrival, one array of ids they point into.
 * Truth      the file; this is a copy. Writers, readers: the owning thread. Ordering: none. Crash:
 *            process-local.
 * Lifetime   from kvp_trace_read to kvp_trace_free.
 * Proved by  tests/t_load_trace.c
 */
#ifndef KVP_BENCH_LOAD_TRACE_H
#define KVP_BENCH_LOAD_TRACE_H

#include <kvpick/err.h>
#include <stddef.h>
#include <stdint.h>

#define KVP_TRACE_PROMPT_MAX_TOK (1u << 24)

struct kvp_trace_req {
	uint64_t at_ns; /* arrival since the start of the trace, virtual */
	uint32_t prompt_tok, out_tok;
	uint64_t id_off; /* first id in kvp_trace.id; ceil(prompt_tok / 512) of them */
	uint32_t id_cnt;
};

struct kvp_trace {
	struct kvp_trace_req *req;
	uint64_t *id;
	size_t req_cnt, id_cnt;
	size_t req_max, id_max; /* allocated */
};

/* kvp_trace_read appends at most limit requests (0 = all) of a file to a trace that is zeroed or was read
 * before. Blank lines are skipped; unknown members with scalar or array values, too.
 * errors  KVP_ERR_SYS (file, memory), KVP_ERR_PROTO (line *line: syntax, a member missing or repeated, a
 *         number out of range, arrival earlier than the line before, wrong number of ids). */
int kvp_trace_read(struct kvp_trace *t, const char *path, size_t limit, size_t *line);
/* kvp_trace_line parses one line; last_ms is the least timestamp that is allowed. Same errors. */
int kvp_trace_line(struct kvp_trace *t, const char *s, size_t len, uint64_t last_ms);

/* kvp_trace_add appends a request; ids are copied. KVP_ERR_SYS: memory. */
int kvp_trace_add(struct kvp_trace *t, uint64_t at_ns, uint32_t prompt_tok, uint32_t out_tok,
	const uint64_t *id, uint32_t id_cnt);

/* kvp_trace_spread undoes the rounding of timestamps: the n requests that share one are placed at equal
 * distances from it up to the next one; those of the last, over the distance before it. */
void kvp_trace_spread(struct kvp_trace *t);

void kvp_trace_free(struct kvp_trace *t);
#endif
