/* bench/load/simulate.c — see simulate.h.
 *
 * Cost of an engine (kv), in blocks: prompt tokens still to be prefilled there, this prompt's included, over
 * the block size, less the prompt blocks that its cache holds; plus the distinct prompt blocks of its live
 * requests, plus those that this one adds. The least wins, ties by lot.
 *
 * Cost of an engine (least-work), in tokens: those of the prompt that are neither cached nor part of a live
 * prompt there, and their square over 51200; 0.35 of those still to be prefilled there; 640 a live request; a
 * 128th of the tokens of live prompt blocks, with those that this one adds. Prefill engines: without the
 * last two. Decode engines: those two, and the tokens of live blocks beyond 0.9 of the cache.
 *
 * A decode engine is given a prompt as nobody's: under keys that no other has, so that none is shared.
 * Nothing of it is to be prefilled. */
#include "bench/load/simulate.h"
#include "bench/sim/prompt.h"
#include <math.h>
#include <stdlib.h>

struct live { /* prompt blocks of live requests with their number of users; key 0 = free */
	uint64_t key;
	uint32_t cnt;
};

struct engine {
	struct kvp_sim_engine *sim;
	struct run *run;
	uint64_t prefill_tok; /* booked and not finished */
	uint32_t request_cnt;
	uint32_t live_blk;
	struct live *live;
	uint32_t live_used, live_max; /* power of two */
};

struct run {
	const struct kvp_simulate_cfg *cfg;
	struct kvp_run_stats *stats;
	struct engine *engine;
	uint64_t rng;
	uint32_t turn;
	uint64_t last_ns;
	uint32_t *tok;
	uint64_t *key;
};

struct booking { /* one request under way: kvp_sim_req.user */
	struct engine *engine;
	uint64_t number;
	uint64_t prefill_tok;
};

/* Keys are never removed, only counted down to 0: one engine sees far fewer distinct keys than memory holds.
 * */
static struct live *live_at(struct engine *g, uint64_t key)
{
	uint32_t at = (uint32_t)(key >> 20) & (g->live_max - 1);
	while (g->live[at].key && g->live[at].key != key)
		at = (at + 1) & (g->live_max - 1);
	return &g->live[at];
}

static int live_grow(struct engine *g, uint32_t more)
{
	if (g->live_used + more < g->live_max / 2)
		return KVP_OK;
	struct engine bigger = {.live_max = g->live_max ? g->live_max : 1024};
	while (g->live_used + more >= bigger.live_max / 2)
		bigger.live_max *= 2;
	bigger.live = calloc(bigger.live_max, sizeof(*bigger.live));
	if (!bigger.live)
		return KVP_ERR_SYS;
	for (uint32_t i = 0; i < g->live_max; i++)
		if (g->live[i].key)
			*live_at(&bigger, g->live[i].key) = g->live[i];
	free(g->live);
	g->live = bigger.live;
	g->live_max = bigger.live_max;
	return KVP_OK;
}

static uint32_t live_depth(struct engine *g, const uint64_t *key, uint32_t cnt)
{
	uint32_t n = 0;
	while (n < cnt && g->live_max && live_at(g, key[n])->cnt)
		n++;
	return n;
}

static double work(struct run *x, struct engine *g, uint32_t prompt_tok, uint32_t key_cnt)
{
	double block = x->cfg->engine.block_size_tok;
	uint32_t live = live_depth(g, x->key, key_cnt), held = kvp_sim_match(g->sim, x->key, key_cnt);
	double miss = prompt_tok - block * (live > held ? live : held);
	double prefill = miss * (1 + miss / 51200) + 0.35 * (double)g->prefill_tok;
	double hold = block * (g->live_blk + key_cnt - live);
	double room = 0.9 * block * x->cfg->engine.block_max;
	double decode = 640.0 * g->request_cnt + hold / 128;
	if (x->cfg->role == KVP_PART_DECODE)
		return decode + (hold > room ? hold - room : 0);
	return x->cfg->role == KVP_PART_PREFILL ? prefill : prefill + decode;
}

static double cost(struct run *x, struct engine *g, uint32_t prompt_tok, uint32_t key_cnt)
{
	double block = x->cfg->engine.block_size_tok;
	double decode = (double)g->live_blk + key_cnt - live_depth(g, x->key, key_cnt);
	if (x->cfg->role == KVP_PART_DECODE)
		return decode;
	return (double)(g->prefill_tok + prompt_tok) / block - kvp_sim_match(g->sim, x->key, key_cnt) +
	       decode;
}

static struct engine *pick(struct run *x, uint32_t prompt_tok, uint32_t key_cnt)
{
	uint32_t n = x->cfg->engine_cnt, best = 0, ties = 0;
	double best_cost = INFINITY;
	if (x->cfg->policy == KVP_POLICY_ROUND_ROBIN)
		return &x->engine[x->turn++ % n];
	if (x->cfg->policy == KVP_POLICY_RANDOM)
		return &x->engine[kvp_prompt_next(&x->rng) % n];
	for (uint32_t i = 0; i < n; i++) {
		double c = x->cfg->policy == KVP_POLICY_KV ? cost(x, &x->engine[i], prompt_tok, key_cnt)
			   : x->cfg->policy == KVP_POLICY_LEAST_WORK
				   ? work(x, &x->engine[i], prompt_tok, key_cnt)
				   : x->engine[i].request_cnt;
		if (c > best_cost)
			continue;
		ties = c < best_cost ? 1 : ties + 1;
		if (ties == 1 || kvp_prompt_next(&x->rng) % ties == 0)
			best = i;
		best_cost = c;
	}
	return &x->engine[best];
}

static int book(struct run *x, struct engine *g, struct booking *b, uint32_t prompt_tok, uint32_t key_cnt)
{
	int rc = live_grow(g, key_cnt);
	if (rc)
		return rc;
	uint64_t hit_tok = (uint64_t)kvp_sim_match(g->sim, x->key, key_cnt) * x->cfg->engine.block_size_tok;
	*b = (struct booking){.engine = g,
		.prefill_tok = x->cfg->role == KVP_PART_DECODE ? 0 : prompt_tok - hit_tok};
	for (uint32_t i = 0; i < key_cnt; i++) {
		struct live *l = live_at(g, x->key[i]);
		g->live_used += !l->key;
		g->live_blk += !l->cnt;
		l->key = x->key[i];
		l->cnt++;
	}
	g->prefill_tok += b->prefill_tok;
	g->request_cnt++;
	return KVP_OK;
}

static void unbook(struct booking *b, const uint64_t *key, uint32_t key_cnt)
{
	struct engine *g = b->engine;
	g->prefill_tok -= b->prefill_tok;
	g->request_cnt--;
	for (uint32_t i = 0; i < key_cnt; i++)
		g->live_blk -= !--live_at(g, key[i])->cnt;
	free(b);
}

static void on_token(void *ctx, const struct kvp_sim_req *r, uint64_t at_ns)
{
	struct booking *b = r->user;
	(void)ctx;
	(void)at_ns;
	if (r->out_tok != 1)
		return;
	b->engine->prefill_tok -= b->prefill_tok;
	b->prefill_tok = 0;
	const struct kvp_chooser *c = b->engine->run->cfg->chooser;
	if (c)
		c->prefilled(c->ctx, b->number);
}

static void on_stored(void *ctx, const struct kvp_sim_req *r, uint32_t first, uint32_t cnt, uint64_t at_ns)
{
	struct engine *g = ctx;
	const struct kvp_chooser *c = g->run->cfg->chooser;
	(void)at_ns;
	if (c)
		c->stored(c->ctx, (uint32_t)(g - g->run->engine), r, first, cnt);
}

static void on_removed(void *ctx, const uint64_t *key, uint32_t cnt, uint64_t at_ns)
{
	struct engine *g = ctx;
	const struct kvp_chooser *c = g->run->cfg->chooser;
	(void)at_ns;
	if (c)
		c->removed(c->ctx, (uint32_t)(g - g->run->engine), key, cnt);
}

static void on_finished(void *ctx, const struct kvp_sim_req *r, uint64_t at_ns)
{
	struct run *x = ((struct engine *)ctx)->run;
	struct booking *b = r->user;
	const struct kvp_chooser *c = x->cfg->chooser;
	kvp_stats_finished(
		x->stats, r->arrival_ns, r->first_ns, at_ns, r->prompt_tok, r->cached_tok, r->out_tok);
	if (at_ns > x->last_ns)
		x->last_ns = at_ns;
	if (c)
		c->finished(c->ctx, b->number);
	unbook(b, r->key, r->key_cnt);
}

static int play_one(struct run *x, const struct kvp_trace *t, const struct kvp_trace_req *q)
{
	uint64_t at_ns = (uint64_t)((double)q->at_ns / x->cfg->speed);
	for (uint32_t i = 0; i < x->cfg->engine_cnt; i++)
		kvp_sim_advance(x->engine[i].sim, at_ns);
	kvp_prompt_expand(t->id + q->id_off, q->prompt_tok, x->tok);
	uint32_t key_cnt = kvp_prompt_chain(x->tok, q->prompt_tok, x->cfg->engine.block_size_tok, x->key);
	if (x->cfg->role == KVP_PART_DECODE)
		for (uint32_t i = 0; i < key_cnt; i++)
			x->key[i] = kvp_prompt_next(&x->rng);
	const struct kvp_chooser *c = x->cfg->chooser;
	uint64_t number = x->stats->sent_cnt++;
	uint32_t at = 0;
	int rc = c ? c->choose(c->ctx, number, x->key, key_cnt, q->prompt_tok, &at) : KVP_OK;
	if (rc)
		return rc;
	struct engine *g = c ? &x->engine[at] : pick(x, q->prompt_tok, key_cnt);
	struct booking *b = malloc(sizeof(*b));
	struct kvp_sim_req *r;
	rc = b ? book(x, g, b, q->prompt_tok, key_cnt) : KVP_ERR_SYS;
	if (rc) {
		free(b);
		return rc;
	}
	b->number = number;
	rc = kvp_sim_submit(g->sim, at_ns, x->key, key_cnt, q->prompt_tok,
		x->cfg->role == KVP_PART_PREFILL ? 1 : q->out_tok, b, &r);
	if (!rc && x->cfg->role == KVP_PART_DECODE)
		r->remote_tok = q->prompt_tok;
	if (rc) {
		if (c)
			c->finished(c->ctx, number);
		unbook(b, x->key, key_cnt);
		x->stats->error_cnt++;
	}
	return rc == KVP_ERR_LIMIT ? KVP_OK : rc;
}

static int run_open(struct run *x, const struct kvp_trace *t)
{
	uint32_t prompt_max = 1;
	for (size_t i = 0; i < t->req_cnt; i++)
		if (t->req[i].prompt_tok > prompt_max)
			prompt_max = t->req[i].prompt_tok;
	x->tok = malloc((prompt_max + 1) * sizeof(*x->tok));
	x->key = malloc((prompt_max / x->cfg->engine.block_size_tok + 1) * sizeof(*x->key));
	x->engine = calloc(x->cfg->engine_cnt, sizeof(*x->engine));
	if (!x->tok || !x->key || !x->engine)
		return KVP_ERR_SYS;
	for (uint32_t i = 0; i < x->cfg->engine_cnt; i++) {
		struct kvp_sim_sink sink = {.ctx = &x->engine[i],
			.stored = on_stored,
			.removed = on_removed,
			.token = on_token,
			.finished = on_finished};
		x->engine[i].run = x;
		x->engine[i].sim = kvp_sim_open(&x->cfg->engine, &sink);
		if (!x->engine[i].sim)
			return KVP_ERR_INVAL;
	}
	return KVP_OK;
}

int kvp_simulate(const struct kvp_simulate_cfg *cfg, const struct kvp_trace *t, struct kvp_run_stats *out)
{
	if (!cfg->engine_cnt || cfg->engine_cnt > 1024 || !cfg->engine.block_size_tok || !(cfg->speed > 0))
		return KVP_ERR_INVAL;
	struct run x = {.cfg = cfg, .stats = out, .rng = cfg->seed};
	int rc = run_open(&x, t);
	out->name = kvp_policy_name(cfg->policy);
	for (size_t i = 0; !rc && i < t->req_cnt; i++)
		rc = play_one(&x, t, &t->req[i]);
	for (uint32_t i = 0; x.engine && i < cfg->engine_cnt; i++) {
		struct kvp_sim_load load;
		do { /* run dry: a step at a time */
			if (rc || !x.engine[i].sim)
				break;
			kvp_sim_advance(x.engine[i].sim, kvp_sim_next_ns(x.engine[i].sim));
			kvp_sim_load(x.engine[i].sim, &load);
		} while (load.running_cnt + load.waiting_cnt);
		kvp_sim_close(x.engine[i].sim);
		free(x.engine[i].live);
	}
	if (t->req_cnt && !rc)
		out->virtual_s = ((double)x.last_ns - (double)t->req[0].at_ns / cfg->speed) * 1e-9;
	free(x.engine);
	free(x.tok);
	free(x.key);
	return rc;
}
