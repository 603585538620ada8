#include "shm/policy.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

void kvp_policy_single(struct kvp_policy_profile *p, enum kvp_order order, double frac)
{
	memset(p, 0, sizeof(*p));
	p->class_cnt = p->family_cnt = p->bucket_cnt = 1;
	struct kvp_policy_class *c = &p->class[0];
	snprintf(c->name, sizeof(c->name), "default");
	c->order = order;
	c->quantum = 1;
	c->busy_tok = KVP_POLICY_NONE;
	c->busy_frac = frac;
	c->busy_ratio = NAN;
	c->limit_requests = c->limit_isl_tok = c->limit_cached_tok = KVP_POLICY_NONE;
}

static int same(const char *a, struct kvp_str b)
{
	return strlen(a) == b.len && memcmp(a, b.ptr, b.len) == 0;
}

const struct kvp_policy_profile *kvp_policy_of(const struct kvp_policy *p, struct kvp_str model)
{
	for (uint32_t i = 1; i < p->profile_cnt; i++)
		if (same(p->model[i], model))
			return &p->profile[i];
	return &p->profile[0];
}

int kvp_policy_needs_cache(const struct kvp_policy_profile *p)
{
	return p->bucket_cnt > 1;
}

uint64_t kvp_policy_cost(uint64_t isl_tok, uint64_t cached_tok)
{
	return cached_tok < isl_tok ? isl_tok - cached_tok : 1;
}

uint32_t kvp_policy_classify(
	const struct kvp_policy_profile *p, struct kvp_str name, uint64_t isl_tok, uint64_t cached_tok)
{
	uint32_t family = p->default_family, bucket = 0;
	uint64_t uncached = cached_tok < isl_tok ? isl_tok - cached_tok : 0;
	if (name.ptr) {
		for (uint32_t i = 0; i < p->class_cnt; i++)
			if (p->class[i].family == KVP_POLICY_EXPLICIT && same(p->class[i].name, name))
				return i;
		for (uint32_t i = 0; i < p->family_cnt; i++)
			if (same(p->family[i], name))
				family = i;
	}
	while (bucket + 1 < p->bucket_cnt && p->bucket_min[bucket + 1] <= uncached)
		bucket++;
	return p->matrix[family][bucket];
}

int kvp_policy_queues(const struct kvp_policy_class *c)
{
	return c->busy_tok != KVP_POLICY_NONE || !isnan(c->busy_frac);
}

int kvp_policy_any_queues(const struct kvp_policy_profile *p)
{
	for (uint32_t i = 0; i < p->class_cnt; i++)
		if (kvp_policy_queues(&p->class[i]))
			return 1;
	return 0;
}

int kvp_policy_rank_busy(const struct kvp_policy_class *c, uint64_t active_tok, uint64_t max_batched_tok)
{
	double cap = (double)(max_batched_tok ? max_batched_tok : KVP_POLICY_BATCHED_TOK);
	if (c->busy_tok != KVP_POLICY_NONE && active_tok > c->busy_tok)
		return 1;
	return !isnan(c->busy_frac) && (double)active_tok > c->busy_frac * cap;
}

int kvp_policy_pool_busy(const struct kvp_policy_class *c, uint32_t busy, uint32_t eligible)
{
	if (eligible == 0)
		return 0;
	if (isnan(c->busy_ratio))
		return busy >= eligible;
	return (double)busy >= c->busy_ratio * (double)eligible;
}

static int over(uint64_t now, uint64_t per_worker, uint64_t workers, uint64_t *current, uint64_t *limit)
{
	if (per_worker == KVP_POLICY_NONE)
		return 0;
	if (__builtin_mul_overflow(per_worker, workers, limit))
		*limit = UINT64_MAX;
	*current = now;
	return now >= *limit;
}

enum kvp_limit kvp_policy_limit(const struct kvp_policy_class *c, uint64_t workers,
	const struct kvp_policy_usage *now, uint64_t *current, uint64_t *limit)
{
	if (over(now->requests, c->limit_requests, workers, current, limit))
		return KVP_LIMIT_REQUESTS;
	if (over(now->isl_tok, c->limit_isl_tok, workers, current, limit))
		return KVP_LIMIT_ISL_TOK;
	if (over(now->cached_tok, c->limit_cached_tok, workers, current, limit))
		return KVP_LIMIT_CACHED_TOK;
	return KVP_LIMIT_NONE;
}

const char *kvp_limit_name(enum kvp_limit l)
{
	static const char *const name[] = {"none", "requests", "raw_isl_tokens", "cached_tokens"};
	return (unsigned)l < sizeof(name) / sizeof(name[0]) ? name[l] : "none";
}

double kvp_policy_score(enum kvp_order order, double arrival_s, double jump_s, uint64_t cost)
{
	double jump = jump_s > 0 ? jump_s : 0;
	if (order == KVP_ORDER_WSPT)
		return (1 + jump) / (double)(cost ? cost : 1);
	return order == KVP_ORDER_LCFS ? jump + arrival_s : jump - arrival_s;
}

int kvp_order_before(const struct kvp_order_key *a, const struct kvp_order_key *b)
{
	if (a->strict != b->strict)
		return a->strict > b->strict;
	if (a->score > b->score || a->score < b->score)
		return a->score > b->score;
	return a->seq < b->seq;
}

int kvp_policy_refresh_due(double after_s, uint64_t waited_ns, int has_hashes)
{
	return has_hashes && after_s > 0 && (double)waited_ns >= after_s * 1e9;
}

/* grant adds to a deficit, saturating. */
static void grant(uint64_t *deficit, uint64_t quantum, uint64_t times)
{
	uint64_t more;
	if (__builtin_mul_overflow(quantum, times, &more) || __builtin_add_overflow(*deficit, more, deficit))
		*deficit = UINT64_MAX;
}

/* Rounds until the first class that can go affords its head. */
static uint64_t rounds_needed(const struct kvp_drr *d, const struct kvp_drr_class *c, uint32_t n)
{
	uint64_t least = UINT64_MAX;
	for (uint32_t i = 0; i < n; i++) {
		if (!c[i].can_go || c[i].cost <= d->deficit[i])
			continue;
		uint64_t lack = c[i].cost - d->deficit[i];
		uint64_t rounds = lack / c[i].quantum + (lack % c[i].quantum != 0);
		least = rounds < least ? rounds : least;
	}
	return least;
}

int kvp_drr_pick(struct kvp_drr *d, const struct kvp_drr_class *c, uint32_t n)
{
	uint32_t carried = d->carry, waiting = 0, can_go = 0, from = d->cursor < n ? d->cursor : 0;
	for (uint32_t i = 0; i < n; i++) {
		waiting += c[i].waiting != 0;
		can_go += c[i].can_go != 0;
	}
	d->carry = 0;
	if (waiting == 0 || n == 0)
		return -1;
	if (carried && carried <= n) {
		uint32_t i = carried - 1;
		if (c[i].can_go && c[i].cost <= d->deficit[i])
			return (int)i;
	}
	for (uint32_t k = 0; k < n; k++) {
		uint32_t i = (from + k) % n;
		if (!c[i].can_go) {
			if (!c[i].waiting)
				d->deficit[i] = 0;
			continue;
		}
		if (c[i].cost > d->deficit[i])
			grant(&d->deficit[i], c[i].quantum, 1);
		if (c[i].cost <= d->deficit[i])
			return (int)i;
	}
	if (can_go == 0)
		return -1;
	uint64_t rounds = rounds_needed(d, c, n);
	for (uint32_t i = 0; i < n; i++)
		if (c[i].can_go)
			grant(&d->deficit[i], c[i].quantum, rounds);
	for (uint32_t k = 0; k < n; k++)
		if (c[(from + k) % n].can_go && c[(from + k) % n].cost <= d->deficit[(from + k) % n])
			return (int)((from + k) % n);
	return -1;
}

void kvp_drr_take(struct kvp_drr *d, uint32_t n, uint32_t i, uint64_t cost, uint32_t left)
{
	d->cursor = (i + 1) % n;
	d->deficit[i] -= cost < d->deficit[i] ? cost : d->deficit[i];
	if (left == 0)
		d->deficit[i] = 0;
	else if (d->deficit[i])
		d->carry = i + 1;
}
