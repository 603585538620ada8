/* Cost of all ranks and the choice among them, ns a rank.
 * Run: make benches && build/release/bench/b_score */
#include "bench/bench.h"
#include "shm/score.h"

#define RANKS_MAX 1024

struct work {
	struct kvp_score_request q;
	struct kvp_score_rank rank[RANKS_MAX];
	uint32_t n, picked;
	struct kvp_rng rng;
};

static void score(void *ctx)
{
	struct work *w = ctx;
	kvp_score_all(&w->q, w->rank, w->n);
}

static void pick(void *ctx)
{
	struct work *w = ctx;
	w->picked += kvp_score_pick(&w->q, w->rank, w->n, &w->rng);
}

static void fill(struct work *w, uint32_t n, int tiers)
{
	w->n = n;
	kvp_rng_seed(&w->rng, 7);
	for (uint32_t i = 0; i < n; i++)
		w->rank[i] = (struct kvp_score_rank){.dev_blk = (uint32_t)kvp_rng_below(&w->rng, 64),
			.host_blk = tiers ? (uint32_t)kvp_rng_below(&w->rng, 16) : 0,
			.disk_blk = tiers ? (uint32_t)kvp_rng_below(&w->rng, 16) : 0,
			.additional_blk = 100,
			.active_prefill_tok = kvp_rng_below(&w->rng, 50000),
			.active_blk = kvp_rng_below(&w->rng, 5000),
			.active_requests = (uint32_t)kvp_rng_below(&w->rng, 40),
			.taint_multiplier = 1.0};
}

int main(void)
{
	static struct work w;
	static const uint32_t ranks[] = {8, 64, 1024};
	bench_begin();
	for (size_t i = 0; i < sizeof(ranks) / sizeof(ranks[0]); i++) {
		for (int mode = 0; mode < 4; mode++) {
			static const char *const name[] = {"plain", "tiers", "decay", "least_work"};
			fill(&w, ranks[i], mode > 0);
			w.q = (struct kvp_score_request){
				.policy = mode == 3 ? KVP_SCORE_LEAST_WORK : KVP_SCORE_REFERENCE,
				.weights = {1.0, mode == 2 ? 1.0 : 0.0, 1.0, 0.5, 0.75, 0.25, 0.0, 0.0},
				.isl_tok = 4096,
				.block_size = 16,
				.seq_blk = 256,
				.track = KVP_YES,
				.has_preferred = KVP_NO};
			printf("bench=score.all ranks=%u case=%s ns_rank=%.2f\n", w.n, name[mode],
				bench_ns(score, &w) / w.n);
		}
		printf("bench=score.pick ranks=%u case=least ns_rank=%.2f\n", w.n, bench_ns(pick, &w) / w.n);
		w.q.weights.temperature = 0.7;
		printf("bench=score.pick ranks=%u case=softmax ns_rank=%.2f\n", w.n,
			bench_ns(pick, &w) / w.n);
	}
	return 0;
}
