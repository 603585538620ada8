/* bench/load/gen.c — see gen.h.
 *
 * Block ids: system prompts first, then a range per conversation for its whole blocks, then one id for each
 * partial last block. A partial block never matches: in the next turn the conversation has filled it. */
#include "bench/load/gen.h"
#include "bench/sim/prompt.h"
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>

#define MS_NS 1000000ull
#define BLOCK_TOK KVP_PROMPT_BLOCK_TOK
#define TURN_MIN_MS 2000 /* least pause between two turns */

struct turn {
	uint64_t at_ms;
	uint64_t id_base; /* first id of the conversation's own blocks */
	uint32_t system, prompt_tok, out_tok;
};
struct turns {
	struct turn *turn;
	size_t cnt, max;
};

void kvp_gen_cfg_default(struct kvp_gen_cfg *cfg)
{
	*cfg = (struct kvp_gen_cfg){.session_cnt = 180,
		.turn_mean = 8,
		.system_cnt = 6,
		.system_tok = 2048,
		.user_tok = 4000,
		.out_tok = 160,
		.think_s = 40,
		.duration_s = 500,
		.seed = 1};
}

static double uniform(uint64_t *rng)
{
	return (double)(kvp_prompt_next(rng) >> 11) * 0x1p-53;
}

static uint32_t around(uint64_t *rng, uint32_t mean)
{
	uint32_t n = (uint32_t)((double)mean * (0.5 + uniform(rng)));
	return n ? n : 1;
}

static int turns_add(struct turns *l, struct turn turn)
{
	if (l->cnt == l->max) {
		size_t max = l->max ? 2 * l->max : 1024;
		struct turn *p = realloc(l->turn, max * sizeof(*p));
		if (!p)
			return KVP_ERR_SYS;
		l->turn = p;
		l->max = max;
	}
	l->turn[l->cnt++] = turn;
	return KVP_OK;
}

/* session adds the turns of one conversation and moves *id past the ids of its blocks. */
static int session(const struct kvp_gen_cfg *cfg, uint64_t *rng, uint64_t *id, struct turns *l)
{
	double skew = uniform(rng);
	uint32_t system = (uint32_t)(skew * skew * cfg->system_cnt);
	uint32_t turns = 1 + (uint32_t)(uniform(rng) * (2 * cfg->turn_mean - 1)),
		 prompt_tok = cfg->system_tok;
	uint64_t at_ms = (uint64_t)(uniform(rng) * 0.8 * cfg->duration_s * 1000);
	uint64_t base = *id;
	for (uint32_t i = 0; i < turns && at_ms <= cfg->duration_s * 1000ull; i++) {
		uint32_t out_tok = around(rng, cfg->out_tok);
		prompt_tok += around(rng, cfg->user_tok);
		if (prompt_tok > KVP_TRACE_PROMPT_MAX_TOK)
			break;
		int rc = turns_add(l, (struct turn){at_ms, base, system, prompt_tok, out_tok});
		if (rc)
			return rc;
		*id = base + prompt_tok / BLOCK_TOK - cfg->system_tok / BLOCK_TOK;
		prompt_tok += out_tok;
		at_ms += TURN_MIN_MS + (uint64_t)(-log(1 - uniform(rng)) * cfg->think_s * 1000);
	}
	return KVP_OK;
}

static int by_time(const void *a, const void *b)
{
	const struct turn *x = a, *y = b;
	if (x->at_ms != y->at_ms)
		return x->at_ms < y->at_ms ? -1 : 1;
	return (x->id_base > y->id_base) - (x->id_base < y->id_base);
}

static int emit(
	const struct kvp_gen_cfg *cfg, const struct turn *q, uint64_t *partial_id, struct kvp_trace *t)
{
	uint32_t whole = q->prompt_tok / BLOCK_TOK, shared = cfg->system_tok / BLOCK_TOK;
	uint32_t cnt = (q->prompt_tok + BLOCK_TOK - 1) / BLOCK_TOK;
	uint64_t *id = malloc(cnt * sizeof(*id));
	if (!id)
		return KVP_ERR_SYS;
	for (uint32_t b = 0; b < cnt; b++)
		id[b] = b >= whole   ? (*partial_id)++
			: b < shared ? (uint64_t)q->system * shared + b
				     : q->id_base + b - shared;
	int rc = kvp_trace_add(t, q->at_ms * MS_NS, q->prompt_tok, q->out_tok, id, cnt);
	free(id);
	return rc;
}

int kvp_gen_make(const struct kvp_gen_cfg *cfg, struct kvp_trace *t)
{
	if (!cfg->session_cnt || !cfg->turn_mean || !cfg->system_cnt || !cfg->user_tok || !cfg->out_tok ||
		!cfg->think_s || !cfg->duration_s)
		return KVP_ERR_INVAL;
	struct turns l = {0};
	uint64_t rng = cfg->seed, id = (uint64_t)cfg->system_cnt * (cfg->system_tok / BLOCK_TOK);
	int rc = KVP_OK;
	for (uint32_t i = 0; !rc && i < cfg->session_cnt; i++)
		rc = session(cfg, &rng, &id, &l);
	if (!rc)
		qsort(l.turn, l.cnt, sizeof(*l.turn), by_time);
	for (size_t i = 0; !rc && i < l.cnt; i++)
		rc = emit(cfg, &l.turn[i], &id, t);
	free(l.turn);
	return rc;
}

int kvp_gen_write(FILE *f, const struct kvp_trace *t)
{
	for (size_t i = 0; i < t->req_cnt; i++) {
		const struct kvp_trace_req *q = &t->req[i];
		fprintf(f,
			"{\"timestamp\":%" PRIu64 ",\"input_length\":%u,\"output_length\":%u,\"hash_ids\":[",
			(uint64_t)(q->at_ns / MS_NS), q->prompt_tok, q->out_tok);
		for (uint32_t b = 0; b < q->id_cnt; b++)
			fprintf(f, "%s%" PRIu64, b ? "," : "", t->id[q->id_off + b]);
		fprintf(f, "]}\n");
	}
	return fflush(f) || ferror(f) ? KVP_ERR_SYS : KVP_OK;
}
