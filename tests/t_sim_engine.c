/* tests/t_sim_engine.c — the model of an engine: exact step times, cache, eviction, admission, events. */
#include "bench/sim/engine.h"
#include "bench/sim/prompt.h"
#include "tests/tap.h"
#include <stdlib.h>

#define MS 1000000ull
#define LOG_MAX 4096

struct seen { /* everything the sink heard */
	uint64_t token_ns[64], finish_ns[64], sum;
	uint32_t token_cnt, finish_cnt, cached_tok[64];
	uint64_t held[LOG_MAX], gone[LOG_MAX];
	uint32_t held_cnt, gone_cnt, faults;
};

static void on_stored(void *ctx, const struct kvp_sim_req *r, uint32_t first, uint32_t cnt, uint64_t at_ns)
{
	struct seen *s = ctx;
	(void)at_ns;
	for (uint32_t i = 0; i < cnt && s->held_cnt < LOG_MAX; i++) {
		for (uint32_t k = 0; k < s->held_cnt; k++)
			s->faults += s->held[k] == r->key[first + i]; /* stored twice */
		s->held[s->held_cnt++] = r->key[first + i];
	}
}

static void on_removed(void *ctx, const uint64_t *key, uint32_t cnt, uint64_t at_ns)
{
	struct seen *s = ctx;
	(void)at_ns;
	for (uint32_t i = 0; i < cnt; i++) {
		uint32_t k = 0;
		while (k < s->held_cnt && s->held[k] != key[i])
			k++;
		if (k == s->held_cnt)
			s->faults++; /* removed without having been stored */
		else
			s->held[k] = s->held[--s->held_cnt];
		if (s->gone_cnt < LOG_MAX)
			s->gone[s->gone_cnt++] = key[i];
	}
}

static void on_token(void *ctx, const struct kvp_sim_req *r, uint64_t at_ns)
{
	struct seen *s = ctx;
	if (s->token_cnt < 64)
		s->token_ns[s->token_cnt] = at_ns;
	s->token_cnt++;
	s->sum = kvp_prompt_mix(s->sum ^ at_ns ^ r->arrival_ns ^ r->out_tok);
}

static void on_finished(void *ctx, const struct kvp_sim_req *r, uint64_t at_ns)
{
	struct seen *s = ctx;
	s->faults += r->out_tok != r->out_max_tok || r->finish_ns != at_ns;
	if (s->finish_cnt < 64) {
		s->finish_ns[s->finish_cnt] = at_ns;
		s->cached_tok[s->finish_cnt] = r->cached_tok;
	}
	s->finish_cnt++;
}

static struct kvp_sim_engine *open_engine(struct seen *s, uint32_t block_max, uint32_t block_size_tok)
{
	struct kvp_sim_cfg cfg;
	struct kvp_sim_sink sink = {s, on_stored, on_removed, on_token, on_finished};
	kvp_sim_cfg_default(&cfg);
	cfg.block_max = block_max;
	cfg.block_size_tok = block_size_tok;
	*s = (struct seen){0};
	return kvp_sim_open(&cfg, &sink);
}

/* submit adds a prompt whose block i is base + i. */
static int submit(struct kvp_sim_engine *e, uint64_t at_ns, uint64_t base, uint32_t block_size_tok,
	uint32_t prompt_tok, uint32_t out_tok, struct kvp_sim_req **r)
{
	uint64_t key[1024];
	for (uint32_t i = 0; i < prompt_tok / block_size_tok; i++)
		key[i] = base + i;
	kvp_sim_advance(e, at_ns);
	return kvp_sim_submit(e, at_ns, key, prompt_tok / block_size_tok, prompt_tok, out_tok, NULL, r);
}

static void test_clock(void)
{
	struct seen s;
	struct kvp_sim_req *r;
	struct kvp_sim_engine *e = open_engine(&s, 2000, 512);
	is_u64(kvp_sim_next_ns(e), KVP_SIM_NEVER, "an empty engine is idle");
	is_u64(submit(e, 5 * MS, 1000, 512, 1000, 3, &r), KVP_OK, "a request is taken");
	/* 10 ms + 1000 / 16 k per s; then 10 ms + 1 / 16 k + 0.1 ms + 30 ns per live token */
	uint64_t first = 5 * MS + 10 * MS + 62500000, second = first + 10 * MS + 62500 + 100000 + 1001 * 30;
	is_u64(kvp_sim_next_ns(e), first, "the first step ends when the prompt is computed");
	kvp_sim_advance(e, first - 1);
	is_u64(s.token_cnt, 0, "no token before that");
	kvp_sim_advance(e, 1000 * MS);
	is_u64(s.token_cnt, 3, "max_tokens tokens come out");
	is_u64(s.token_ns[0], first, "the first at the end of the prefill step");
	is_u64(s.token_ns[1], second, "the second a decode step later");
	is_u64(s.finish_ns[0], second + 10 * MS + 162500 + 1002 * 30, "the last finishes the request");
	is_u64(submit(e, 2000 * MS, 9000, 512, 10000, 1, &r), KVP_OK,
		"a prompt longer than a chunk is taken");
	kvp_sim_advance(e, 5000 * MS);
	is_u64(s.token_ns[3], 2000 * MS + 20 * MS + 625000000 + 8192 * 30, "it takes two steps");
	is_u64(submit(e, 4000 * MS, 1, 512, 512, 1, &r), (uint64_t)KVP_ERR_INVAL,
		"time doesn't run backwards");
	kvp_sim_close(e);
}

static void test_cache(void)
{
	struct seen s;
	struct kvp_sim_req *r;
	struct kvp_sim_engine *e = open_engine(&s, 10, 16);
	submit(e, 0, 100, 16, 64, 1, &r); /* 4 prompt blocks and one for the output */
	kvp_sim_advance(e, 100 * MS);
	is_u64(s.held_cnt, 4, "whole prompt blocks enter the cache");
	submit(e, 200 * MS, 100, 16, 64, 1, &r);
	kvp_sim_advance(e, 300 * MS);
	is_u64(s.cached_tok[1], 48, "a cached prompt still computes its last block");
	is_u64(s.held_cnt, 4, "a block that was computed again is shared, not stored twice");
	submit(e, 400 * MS, 100, 16, 40, 1, &r);
	submit(e, 400 * MS, 200, 16, 80, 1, &r); /* 6 blocks more */
	kvp_sim_advance(e, 600 * MS);
	is_u64(s.cached_tok[2], 32, "a shorter prompt hits its whole blocks");
	is_u64(s.gone_cnt, 1, "what doesn't fit evicts");
	is_u64(s.gone[0], 103, "the least recent leaf goes first");
	is_u64(submit(e, 700 * MS, 300, 16, 160, 1, &r), (uint64_t)KVP_ERR_LIMIT,
		"what can never fit is refused");
	is_u64(submit(e, 700 * MS, 300, 16, 144, 16, &r), KVP_OK, "what fills the cache is taken");
	kvp_sim_advance(e, 2000 * MS);
	is_u64(s.held_cnt, 9, "and evicts everything else");
	is_u64(s.faults, 0, "stored and removed events agree");
	is_u64(kvp_sim_check(e), 0, "the cache is consistent");
	kvp_sim_close(e);
}

static void test_admission(void)
{
	struct seen s;
	struct kvp_sim_req *r, *second, *third;
	struct kvp_sim_load load;
	struct kvp_sim_engine *e = open_engine(&s, 10, 16);
	submit(e, 0, 100, 16, 96, 10, &r);	/* 7 blocks */
	submit(e, 0, 200, 16, 64, 10, &second); /* 5 blocks: waits */
	submit(e, 0, 300, 16, 16, 10, &third);	/* 2 blocks would fit, but first come, first served */
	kvp_sim_next_ns(e);
	kvp_sim_load(e, &load);
	is_u64(load.running_cnt, 1, "a request whose blocks don't fit waits");
	is_u64(load.waiting_cnt, 2, "and those behind it do, too");
	is_u64(load.private_blk, 7, "blocks of prompt and output are reserved at admission");
	kvp_sim_abort(e, second);
	kvp_sim_advance(e, 50 * MS);
	kvp_sim_load(e, &load);
	is_u64(load.running_cnt, 2, "an aborted request no longer holds up the next");
	is_u64(kvp_sim_check(e), 0, "counts are right while requests run");
	kvp_sim_abort(e, third);
	kvp_sim_abort(e, r);
	kvp_sim_load(e, &load);
	is_u64(load.private_blk + load.pinned_blk + load.running_cnt, 0, "aborting gives everything back");
	is_u64(load.cached_blk, s.held_cnt, "what was computed stays cached");
	is_u64(kvp_sim_next_ns(e) != KVP_SIM_NEVER, 1, "the step under way still ends");
	kvp_sim_advance(e, 1000 * MS);
	is_u64(kvp_sim_next_ns(e), KVP_SIM_NEVER, "then the engine is idle");
	kvp_sim_close(e);
}

static void test_sharing(void)
{
	struct seen s;
	struct kvp_sim_req *r;
	struct kvp_sim_engine *e = open_engine(&s, 100, 16);
	submit(e, 0, 100, 16, 100, 2, &r);
	submit(e, 0, 100, 16, 100, 2, &r);
	kvp_sim_advance(e, 1000 * MS);
	is_u64(s.finish_cnt, 2, "two equal prompts at once both finish");
	is_u64(s.cached_tok[0] + s.cached_tok[1], 0, "neither found the other's blocks");
	is_u64(s.held_cnt, 6, "their blocks are cached once");
	is_u64(s.token_ns[0], s.token_ns[1], "they shared the steps");
	is_u64(s.faults + kvp_sim_check(e), 0, "no fault");
	kvp_sim_close(e);
}

/* play runs a random load; pace_ns is the distance between the caller's looks at the clock. */
static uint64_t play(uint64_t seed, uint64_t pace_ns, uint32_t *faults)
{
	static struct seen s;
	struct kvp_sim_req *r;
	struct kvp_sim_engine *e = open_engine(&s, 120, 16);
	uint64_t at_ns = 0, rng = seed, turn_ns = 0;
	for (uint32_t i = 0; i < 400; i++) {
		at_ns += kvp_prompt_next(&rng) % (60 * MS);
		for (; pace_ns && turn_ns < at_ns; turn_ns += pace_ns)
			kvp_sim_advance(e, turn_ns);
		submit(e, at_ns, 1000 * (1 + kvp_prompt_next(&rng) % 20), 16,
			1 + (uint32_t)(kvp_prompt_next(&rng) % 900), (uint32_t)(kvp_prompt_next(&rng) % 20),
			&r);
		if (i % 20 == 0)
			*faults += kvp_sim_check(e);
	}
	kvp_sim_advance(e, at_ns + 1000000 * MS);
	uint64_t key[1];
	for (uint32_t i = 0; i < s.held_cnt; i++) {
		key[0] = s.held[i];
		*faults += kvp_sim_match(e, key, 1) != 1;
	}
	struct kvp_sim_load load;
	kvp_sim_load(e, &load);
	*faults += s.faults + kvp_sim_check(e) + (s.finish_cnt != 400) + (load.cached_blk != s.held_cnt);
	kvp_sim_close(e);
	return s.sum;
}

static void test_random(void)
{
	uint64_t seed = tap_seed(42);
	uint32_t faults = 0;
	uint64_t late = play(seed, 0, &faults);
	is_u64(play(seed, 700000, &faults), late, "stamps don't depend on how late the caller looks");
	is_u64(play(seed, 25 * MS, &faults), late, "nor on the pace");
	is_u64(faults, 0, "counts, events and cache agree throughout");
}

int main(void)
{
	test_clock();
	test_cache();
	test_admission();
	test_sharing();
	test_random();
	return done();
}
