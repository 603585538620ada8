#include "shm/score.h"

#include <float.h>
#include <math.h>

/* The static twins serve the loop over ranks: a call of an exported function can't be inlined in a shared
 * library. */
static inline uint64_t cached_of(
	const struct kvp_score_weights *w, uint32_t block_size, uint32_t dev, uint32_t host, uint32_t disk)
{
	double blocks = (double)dev + w->host_weight * (double)host + w->disk_weight * (double)disk;
	double tok = blocks * (double)block_size;
	if (!(tok > 0)) /* NaN, too */
		return 0;
	if (tok >= 9e18) /* integers anyway */
		return tok < 1.8e19 ? (uint64_t)tok : UINT64_MAX;
	/* round() without the call: cutting is exact, and so is the rest that it leaves. */
	uint64_t whole = (uint64_t)(int64_t)tok;
	return whole + (tok - (double)(int64_t)whole >= 0.5);
}

static inline uint64_t left_of(uint64_t isl_tok, uint64_t cached_tok)
{
	return isl_tok - (cached_tok < isl_tok ? cached_tok : isl_tok);
}

uint64_t kvp_score_cached_tok(
	const struct kvp_score_weights *w, uint32_t block_size, uint32_t dev, uint32_t host, uint32_t disk)
{
	return cached_of(w, block_size, dev, host, disk);
}

uint64_t kvp_score_effective_prefill(uint64_t isl_tok, uint64_t cached_tok)
{
	return left_of(isl_tok, cached_tok);
}

double kvp_score_credit_blk(
	const struct kvp_score_weights *w, uint32_t dev, uint32_t host, uint32_t disk, uint32_t shared_beyond)
{
	return w->overlap_score_credit * (double)dev + w->host_weight * (double)host +
	       w->disk_weight * (double)disk + w->shared_multiplier * (double)shared_beyond;
}

static double positive(double v)
{
	return v > 0 ? v : 0;
}

static uint64_t least_prefill(const struct kvp_score_rank *rank, uint32_t n)
{
	uint64_t least = UINT64_MAX;
	for (uint32_t i = 0; i < n; i++)
		least = rank[i].active_prefill_tok < least ? rank[i].active_prefill_tok : least;
	return least;
}

static double credit_decay(const struct kvp_score_request *q, const struct kvp_score_rank *r, uint64_t least)
{
	double excess_blk = (double)(r->active_prefill_tok - least) / (double)q->block_size;
	/* Rounded up without a sum that could wrap. */
	double request_blk = (double)(q->isl_tok / q->block_size + (q->isl_tok % q->block_size != 0));
	return 1.0 / (1.0 + q->weights.overlap_score_credit_decay * (excess_blk / request_blk));
}

/* Tokens to blocks. A block size that is a power of two has an exact reciprocal: the product has the same
 * bits as the quotient and costs a quarter of it. */
struct to_blocks {
	double size, reciprocal; /* reciprocal 0 = divide */
};

static struct to_blocks to_blocks_of(uint32_t block_size)
{
	int exact = block_size && (block_size & (block_size - 1)) == 0;
	return (struct to_blocks){(double)block_size, exact ? 1.0 / (double)block_size : 0};
}

static inline double blocks_of(const struct to_blocks *t, double tok)
{
	return t->reciprocal > 0 ? tok * t->reciprocal : tok / t->size;
}

/* Cached blocks as credit, the device's decayed. */
static inline double credit_of(
	const struct kvp_score_weights *w, const struct kvp_score_rank *r, double decay)
{
	return ((w->overlap_score_credit * decay * (double)r->dev_blk +
			w->host_weight * (double)r->host_blk) +
		       w->disk_weight * (double)r->disk_blk) +
	       w->shared_multiplier * (double)r->shared_beyond_blk;
}

static inline double logit_of(const struct kvp_score_request *q, const struct kvp_score_rank *r, double decay,
	const struct to_blocks *t)
{
	const struct kvp_score_weights *w = &q->weights;
	double credit_blk = 0;
	uint64_t cached = 0;
	if (r->dev_blk | r->host_blk | r->disk_blk | r->shared_beyond_blk) {
		credit_blk = credit_of(w, r, decay);
		cached = cached_of(w, q->block_size, r->dev_blk, r->host_blk, r->disk_blk);
	}
	double decode = (double)(r->active_blk + r->additional_blk);
	double request = w->active_request_weight * (double)r->active_requests;
	if (q->role == KVP_PART_DECODE && q->track != KVP_YES && w->overlap_score_credit > 0)
		return positive(decode - credit_blk) + request;
	double raw_tok = 0;
	if (q->track == KVP_YES)
		raw_tok =
			(double)r->active_prefill_tok + (double)left_of(q->isl_tok, cached) + (double)cached;
	return w->prefill_load_scale * positive(blocks_of(t, raw_tok) - credit_blk) + decode + request;
}

/* Constants of least_work, found by replaying traces (README, "Which policy"). */
#define WORK_LONG_TOK 51200.0
#define WORK_AHEAD 0.35
#define WORK_REQUEST_TOK 640.0
#define WORK_HELD 0.0078125
#define WORK_FULL 0.9

static inline double work_of(const struct kvp_score_request *q, const struct kvp_score_rank *r, double decay)
{
	const struct kvp_score_weights *w = &q->weights;
	double block = (double)q->block_size;
	double live_blk = q->seq_blk > r->additional_blk ? (double)(q->seq_blk - r->additional_blk) : 0;
	double cached_blk = credit_of(w, r, decay), found_blk = w->overlap_score_credit * live_blk;
	found_blk = cached_blk > found_blk ? cached_blk : found_blk;
	double miss = positive((double)q->isl_tok - found_blk * block);
	double ahead = q->track == KVP_YES ? (double)r->active_prefill_tok : 0;
	double prefill = w->prefill_load_scale * (miss + miss * miss / WORK_LONG_TOK + WORK_AHEAD * ahead);
	double requests = (double)r->active_requests;
	double work = prefill + w->active_request_weight * block * requests;
	if (q->role == KVP_PART_PREFILL)
		return work;
	double held = (double)(r->active_blk + r->additional_blk) * block;
	work += WORK_REQUEST_TOK * requests + WORK_HELD * held;
	if (q->role == KVP_PART_DECODE && r->total_blk)
		work += positive(held - WORK_FULL * (double)r->total_blk * block);
	return work;
}

static inline void settle(const struct kvp_score_request *q, struct kvp_score_rank *r, double logit)
{
	r->logit = logit;
	r->cost = q->has_preferred == KVP_YES ? logit * r->taint_multiplier : logit;
}

void kvp_score_all(const struct kvp_score_request *q, struct kvp_score_rank *rank, uint32_t n)
{
	int decaying = q->track == KVP_YES && q->weights.overlap_score_credit_decay > 0;
	uint64_t least = decaying ? least_prefill(rank, n) : 0;
	struct to_blocks t = to_blocks_of(q->block_size);
	if (q->policy == KVP_SCORE_LEAST_WORK) {
		for (uint32_t i = 0; i < n; i++)
			settle(q, &rank[i],
				work_of(q, &rank[i], decaying ? credit_decay(q, &rank[i], least) : 1.0));
		return;
	}
	for (uint32_t i = 0; i < n; i++)
		settle(q, &rank[i],
			logit_of(q, &rank[i], decaying ? credit_decay(q, &rank[i], least) : 1.0, &t));
}

const char *kvp_score_policy_name(enum kvp_score_policy p)
{
	static const char *const name[KVP_SCORE_POLICY_CNT] = {"reference", "least_work"};
	return (unsigned)p < KVP_SCORE_POLICY_CNT ? name[p] : NULL;
}

double kvp_score_taint_multiplier(double weight_sum)
{
	return exp(-tanh(weight_sum));
}

struct kvp_score_overlap kvp_score_overlap(
	uint32_t block_size, const struct kvp_score_tiers *rank, uint32_t n)
{
	uint64_t gpu = 0, cpu = 0, disk = 0, bs = block_size;
	for (uint32_t i = 0; i < n; i++) {
		uint64_t g = rank[i].dev_blk, c = g + rank[i].host_blk, d = c + rank[i].disk_blk;
		gpu = g > gpu ? g : gpu;
		cpu = c > cpu ? c : cpu;
		disk = d > disk ? d : disk;
	}
	/* Cumulative over tiers, so the last one is the longest. */
	return (struct kvp_score_overlap){bs * disk, bs * gpu, bs * cpu, bs * disk};
}

struct kvp_score_potential kvp_score_potential(uint64_t active_prefill_tok, uint64_t active_blk,
	uint64_t isl_tok, uint64_t cached_tok, uint64_t seq_cnt, uint64_t active_depth,
	enum kvp_tristate track)
{
	struct kvp_score_potential p = {active_prefill_tok, active_blk + (seq_cnt - active_depth)};
	if (track == KVP_YES)
		p.prefill_tok += kvp_score_effective_prefill(isl_tok, cached_tok);
	return p;
}

enum kvp_tristate kvp_score_prefill_busy(
	uint64_t active_prefill_tok, double threshold, uint64_t max_num_batched_tokens)
{
	if (isnan(threshold) || max_num_batched_tokens == 0)
		return KVP_UNSET;
	return (double)active_prefill_tok > threshold * (double)max_num_batched_tokens ? KVP_YES : KVP_NO;
}

enum kvp_tristate kvp_score_decode_busy(uint64_t potential_blk, double threshold, uint64_t total_kv_blocks)
{
	if (isnan(threshold) || total_kv_blocks == 0)
		return KVP_UNSET;
	return (double)potential_blk > threshold * (double)total_kv_blocks ? KVP_YES : KVP_NO;
}

void kvp_rng_seed(struct kvp_rng *r, uint64_t seed)
{
	r->state = seed;
}

uint64_t kvp_rng_next(struct kvp_rng *r)
{
	r->state += 0x2d358dccaa6c78a5u;
	unsigned __int128 t = (unsigned __int128)r->state * (r->state ^ 0x8bb84b93962eacc9u);
	return (uint64_t)t ^ (uint64_t)(t >> 64);
}

uint64_t kvp_rng_below(struct kvp_rng *r, uint64_t n)
{
	unsigned __int128 t = (unsigned __int128)kvp_rng_next(r) * n;
	if ((uint64_t)t < n) {
		uint64_t reject = -n % n;
		while ((uint64_t)t < reject)
			t = (unsigned __int128)kvp_rng_next(r) * n;
	}
	return (uint64_t)(t >> 64);
}

double kvp_rng_double(struct kvp_rng *r)
{
	union {
		uint64_t u;
		double d;
	} v = {.u = 0x3FF0000000000000u + (kvp_rng_next(r) >> 12)};
	return v.d - 1.0;
}

void kvp_score_offer(struct kvp_score_best *b, double cost, uint32_t at, struct kvp_rng *rng)
{
	if (b->offered++ == 0 || cost < b->cost || (isnan(b->cost) && !isnan(cost))) {
		b->cost = cost;
		b->at = at;
		b->ties = 1;
	} else if (cost == b->cost && kvp_rng_below(rng, ++b->ties) == 0) {
		b->at = at;
	}
}

static uint32_t pick_least(const struct kvp_score_rank *rank, uint32_t n, struct kvp_rng *rng)
{
	struct kvp_score_best best = {0};
	for (uint32_t i = 0; i < n; i++)
		kvp_score_offer(&best, rank[i].cost, i, rng);
	return best.at;
}

/* How costs turn into weights exp(cost / m * scale - shift): m keeps the extremes of double finite. */
struct softmax {
	double m, scale, shift, sum;
	int flat; /* all costs equal */
};

static struct softmax softmax_of(const struct kvp_score_rank *rank, uint32_t n, double temperature)
{
	double lo = rank[0].cost, hi = rank[0].cost;
	for (uint32_t i = 1; i < n; i++) {
		lo = rank[i].cost < lo ? rank[i].cost : lo;
		hi = rank[i].cost > hi ? rank[i].cost : hi;
	}
	struct softmax s = {.m = 1, .flat = lo == hi};
	if (s.flat)
		return s;
	if (!isfinite(hi - lo))
		s.m = fabs(lo) > fabs(hi) ? fabs(lo) : fabs(hi);
	s.scale = -1.0 / ((hi / s.m - lo / s.m) * temperature);
	s.shift = (lo / s.m) * s.scale;
	for (uint32_t i = 0; i < n; i++)
		s.sum += exp(rank[i].cost / s.m * s.scale - s.shift);
	return s;
}

static double softmax_prob(const struct softmax *s, const struct kvp_score_rank *r, uint32_t n)
{
	return s->flat ? 1.0 / (double)n : exp(r->cost / s->m * s->scale - s->shift) / s->sum;
}

void kvp_score_softmax_prob(const struct kvp_score_rank *rank, uint32_t n, double temperature, double *prob)
{
	struct softmax s = softmax_of(rank, n, temperature);
	for (uint32_t i = 0; i < n; i++)
		prob[i] = softmax_prob(&s, &rank[i], n);
}

uint32_t kvp_score_softmax_at(const struct kvp_score_rank *rank, uint32_t n, double temperature, double u)
{
	struct softmax s = softmax_of(rank, n, temperature);
	double below = 0;
	for (uint32_t i = 0; i < n; i++) {
		below += softmax_prob(&s, &rank[i], n);
		if (u <= below)
			return i;
	}
	return n - 1;
}

uint32_t kvp_score_pick(
	const struct kvp_score_request *q, const struct kvp_score_rank *rank, uint32_t n, struct kvp_rng *rng)
{
	if (q->weights.temperature > 0)
		return kvp_score_softmax_at(rank, n, q->weights.temperature, kvp_rng_double(rng));
	return pick_least(rank, n, rng);
}

int kvp_score_has(const uint64_t *sorted, uint32_t n, uint64_t v)
{
	uint32_t lo = 0, hi = n;
	while (lo < hi) {
		uint32_t mid = lo + (hi - lo) / 2;
		if (sorted[mid] < v)
			lo = mid + 1;
		else
			hi = mid;
	}
	return lo < n && sorted[lo] == v;
}

enum kvp_eligible kvp_score_eligible(const struct kvp_eligible_ask *a, uint64_t worker_id, uint32_t dp_rank,
	const uint64_t *taint, uint32_t taint_cnt)
{
	if (a->allowed && !kvp_score_has(a->allowed, a->allowed_cnt, worker_id))
		return KVP_NOT_ALLOWED;
	if (a->has_pinned == KVP_YES && (worker_id != a->pinned_worker_id || dp_rank != a->pinned_dp_rank))
		return KVP_NOT_PINNED;
	for (uint32_t i = 0; i < a->required_cnt; i++)
		if (!kvp_score_has(taint, taint_cnt, a->required[i]))
			return KVP_NO_TAINT;
	return KVP_ELIGIBLE;
}
