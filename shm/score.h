/* shm/score.h — policy: what a rank costs, which ranks may be chosen, which one is. Pure functions.
 *
 * Shape      plain structs in, plain values out; doubles in the documented order of operations, compiled
 *            without contraction, because ties are exact equality of doubles.
 * Truth      the arguments. No shared memory, no I/O, no global state; the generator is the caller's.
 * Who        any thread.
 * Crash      nothing to leave.
 * Proved by  tests/v_scheduling.c, tests/v_least_work.c
 */
#ifndef KVP_SHM_SCORE_H
#define KVP_SHM_SCORE_H

#include <kvpick/types.h>
#include <stddef.h>
#include <stdint.h>

/* Weights of one request: the configured ones with its overrides applied. */
struct kvp_score_weights {
	double overlap_score_credit;	   /* blocks of credit a cached device block */
	double overlap_score_credit_decay; /* decay of that credit with excess prefill load */
	double prefill_load_scale;	   /* factor of the prefill part */
	double active_request_weight;	   /* cost of a live booking */
	double host_weight, disk_weight;   /* credit of a block in the lower tiers */
	double shared_multiplier;	   /* credit of a block in the shared cache */
	double temperature;		   /* 0 = exact minimum */
};

/* Selection policies: how a rank's cost is made. Everything else (eligibility, taints, temperature, ties) is
 * the same for all.
 *
 * reference  blocks: scale * (tokens to prefill there, this prompt's included, less its credit) + blocks of
 *            live requests, this one's included + weight * live requests.
 * least_work tokens: what the request makes the rank do. miss = tokens of the prompt that are neither cached
 *            there (with the same credits) nor part of a live request's prompt there, which will have been
 *            computed by then.
 *            prefill  scale * (miss + miss^2 / 51200 + 0.35 * tokens to prefill there): work counts in full,
 *                     waiting for others' only in part; a long miss more, as whoever comes next waits for it
 *            decode   640 * live requests + tokens of their blocks, this one's included, / 128: what slows
 *                     every step
 *            full     of a decode rank that would hold more than 0.9 of its blocks: the tokens beyond,
 *                     because the request would have to wait for room
 *            The prefill role pays prefill, the decode role decode + full + miss (the same everywhere unless
 *            its cache is asked for), the aggregated one prefill + decode. The active-request weight counts
 *            in blocks, as above. */
enum kvp_score_policy { KVP_SCORE_REFERENCE, KVP_SCORE_LEAST_WORK, KVP_SCORE_POLICY_CNT };

/* kvp_score_policy_name: the word of the settings; NULL beyond the last. */
const char *kvp_score_policy_name(enum kvp_score_policy p);

/* What is the same for all ranks of one request. */
struct kvp_score_request {
	struct kvp_score_weights weights;
	enum kvp_score_policy policy;
	enum kvp_part_role role;
	uint64_t isl_tok;		 /* > 0 */
	uint32_t block_size;		 /* > 0 */
	uint32_t seq_blk;		 /* tracked blocks of the prompt; 0 when blocks are not tracked */
	enum kvp_tristate track;	 /* prefill tokens take part */
	enum kvp_tristate has_preferred; /* the request prefers taints: multiplier applies */
};

/* One eligible rank: inputs, then results. */
struct kvp_score_rank {
	uint32_t dev_blk, host_blk,
		disk_blk;	 /* device prefix; additional blocks in host, in disk and external */
	uint32_t additional_blk; /* blocks that the prompt would newly activate */
	uint64_t active_prefill_tok;
	uint64_t active_blk; /* rounded */
	uint32_t active_requests;
	uint64_t total_blk;	    /* capacity; 0 = unknown */
	uint32_t shared_beyond_blk; /* shared-cache blocks behind the device prefix */
	double taint_multiplier;    /* kvp_score_taint_multiplier, 1.0 without preference */
	double logit, cost;	    /* out */
};

/* kvp_score_cached_tok rounds the weighted cached blocks to tokens, half away from zero. */
uint64_t kvp_score_cached_tok(
	const struct kvp_score_weights *w, uint32_t block_size, uint32_t dev, uint32_t host, uint32_t disk);
/* kvp_score_effective_prefill: tokens left to prefill. */
uint64_t kvp_score_effective_prefill(uint64_t isl_tok, uint64_t cached_tok);
/* kvp_score_credit_blk: undecayed credit of an overlap row. */
double kvp_score_credit_blk(const struct kvp_score_weights *w, uint32_t dev, uint32_t host, uint32_t disk,
	uint32_t shared_beyond);

/* kvp_score_all fills logit and cost of n ranks. */
void kvp_score_all(const struct kvp_score_request *q, struct kvp_score_rank *rank, uint32_t n);

/* kvp_score_taint_multiplier: exp(-tanh(sum)) of the weights of the preferred taints that a worker
 * carries. */
double kvp_score_taint_multiplier(double weight_sum);

/* -- what is reported -- */

/* Cached blocks of one rank, tier by tier: the device prefix, then what the lower tiers add behind it. */
struct kvp_score_tiers {
	uint32_t dev_blk, host_blk, disk_blk; /* disk: disk and external together */
};
/* Overlap of one worker: the best of its ranks, cumulative over tiers, in tokens. */
struct kvp_score_overlap {
	uint64_t longest_tok, gpu_tok, cpu_tok, disk_tok;
};
/* kvp_score_overlap sums up the n ranks of a worker; n = 0 gives zeros. */
struct kvp_score_overlap kvp_score_overlap(
	uint32_t block_size, const struct kvp_score_tiers *rank, uint32_t n);

/* Load of a rank as if the request ran there. */
struct kvp_score_potential {
	uint64_t prefill_tok, decode_blk;
};
/* kvp_score_potential adds a request to a rank's load: seq_cnt sequence hashes of which the first
 * active_depth are live there; track other than KVP_YES leaves the prefill tokens out. */
struct kvp_score_potential kvp_score_potential(uint64_t active_prefill_tok, uint64_t active_blk,
	uint64_t isl_tok, uint64_t cached_tok, uint64_t seq_cnt, uint64_t active_depth,
	enum kvp_tristate track);

/* kvp_score_prefill_busy: strictly over threshold * max_num_batched_tokens. KVP_UNSET when the capacity is 0
 * (unknown) or the threshold NaN. */
enum kvp_tristate kvp_score_prefill_busy(
	uint64_t active_prefill_tok, double threshold, uint64_t max_num_batched_tokens);

/* Busy guard: strictly over the threshold. KVP_UNSET when total_kv_blocks is 0 or the threshold NaN. */
enum kvp_tristate kvp_score_decode_busy(uint64_t potential_blk, double threshold, uint64_t total_kv_blocks);

/* -- picking -- */

/* The documented 64-bit generator; production seeds it from the kernel, tests by number. */
struct kvp_rng {
	uint64_t state;
};
void kvp_rng_seed(struct kvp_rng *r, uint64_t seed);
uint64_t kvp_rng_next(struct kvp_rng *r);
uint64_t kvp_rng_below(struct kvp_rng *r, uint64_t n); /* uniform in [0, n), n > 0 */
double kvp_rng_double(struct kvp_rng *r);	       /* uniform in [0, 1) */

/* kvp_score_offer: the choice of the least cost, one candidate at a time. Zero the struct, offer costs in any
 * pieces; at is then the chosen one, uniform among exact ties. What kvp_score_pick does at temperature 0. */
struct kvp_score_best {
	double cost;
	uint64_t offered, ties;
	uint32_t at;
};
void kvp_score_offer(struct kvp_score_best *b, double cost, uint32_t at, struct kvp_rng *rng);

/* kvp_score_pick chooses among n > 0 scored ranks: the least cost with a uniform choice among exact ties,
 * or softmax over min-max normalised costs when the temperature is above 0. Returns the index. NaN never
 * wins. */
uint32_t kvp_score_pick(const struct kvp_score_request *q, const struct kvp_score_rank *rank, uint32_t n,
	struct kvp_rng *rng);
/* kvp_score_softmax_prob fills the probabilities of n costs at a temperature above 0; kvp_score_softmax_at
 * gives the index that a draw u in [0, 1) selects. */
void kvp_score_softmax_prob(const struct kvp_score_rank *rank, uint32_t n, double temperature, double *prob);
uint32_t kvp_score_softmax_at(const struct kvp_score_rank *rank, uint32_t n, double temperature, double u);

/* -- eligibility -- */

enum kvp_eligible {
	KVP_ELIGIBLE,
	KVP_NOT_ALLOWED, /* outside allowed_worker_ids */
	KVP_NOT_PINNED,	 /* another rank is pinned */
	KVP_NO_TAINT,	 /* a required taint is missing */
};
struct kvp_eligible_ask {
	const uint64_t *allowed; /* sorted; NULL = all */
	uint32_t allowed_cnt;
	enum kvp_tristate has_pinned;
	uint64_t pinned_worker_id;
	uint32_t pinned_dp_rank;
	const uint64_t *required; /* taint hashes */
	uint32_t required_cnt;
};
/* kvp_score_eligible judges one rank; taint: its worker's taint hashes, sorted. */
enum kvp_eligible kvp_score_eligible(const struct kvp_eligible_ask *a, uint64_t worker_id, uint32_t dp_rank,
	const uint64_t *taint, uint32_t taint_cnt);
/* kvp_score_has finds v in a sorted array. */
int kvp_score_has(const uint64_t *sorted, uint32_t n, uint64_t v);
#endif
