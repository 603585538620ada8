/* The vectors of scheduling.json that concern cost, choice and reported values: select, effective_prefill,
 * effective_prefill_cached, overlap_summary, overlap_row, potential_loads, softmax, rng, rng_below,
 * tie_break, tie_distribution, taint_multiplier, busy_flags, deprecated_weight. logit, cost and
 * credit_blocks to 1e-9 relative, all else exactly. The settings of a vector go through the real parser.
 *
 * Kinds of other modules: booking_sequence, deep_chain, expiry (tests/v_booking.c); config_start
 * (tests/t_config.c); queue_admission, queue_order, best_cached, busy_worker_ratio, policy_limits,
 * policy_yaml, drr, refresh (tests/v_policy.c); conditional_disagg (tests/v_plan.c). Kinds that nothing runs
 * are skipped with the reason. The last test names every kind that is in no list.
 */
#include "daemons/common/config.h"
#include "shm/score.h"
#include "tests/vec.h"

#include <float.h>
#include <math.h>

#define RANKS_MAX 64

static int close_to(double got, double want)
{
	return fabs(got - want) <= 1e-9 * fmax(1.0, fabs(want));
}

static struct kvp_config cfg;

static void configure(struct kvp_json_val v)
{
	static struct kvp_config_err err;
	static char text[32][256];
	const char *env[33];
	int n = 0;
	struct kvp_json_iter it = kvp_json_each(vec_get(v, "config"));
	while (kvp_json_next(&it) && n < 32) {
		snprintf(text[n], sizeof(text[0]), "%.*s=%s", (int)it.key_len, it.key, vec_text(it.val));
		env[n] = text[n];
		n++;
	}
	env[n] = NULL;
	if (kvp_config_load(KVP_BIN_SUPERVISOR, 0, NULL, env, &cfg, NULL, &err) != KVP_OK)
		ok(0, "configuration of a vector: %s", err.text);
}

static struct kvp_score_request request_of(struct kvp_json_val v)
{
	struct kvp_json_val m, o;
	int b;
	struct kvp_score_request q = {
		.weights = {cfg.eff.overlap_score_credit, cfg.overlap_score_credit_decay,
			cfg.eff.prefill_load_scale, cfg.decode_active_request_weight,
			cfg.host_cache_hit_weight, cfg.disk_cache_hit_weight, cfg.shared_cache_multiplier,
			cfg.temperature},
		.isl_tok = vec_u64(v, "isl_tokens"),
		.block_size = (uint32_t)vec_u64(v, "block_size"),
		.track = cfg.track_prefill_tokens ? KVP_YES : KVP_NO};
	const char *role = vec_str(v, "role");
	q.role = !strcmp(role, "decode")    ? KVP_PART_DECODE
		 : !strcmp(role, "prefill") ? KVP_PART_PREFILL
					    : KVP_PART_AGGREGATED;
	if (vec_has(v, "router_config_override", &o)) {
		if (vec_has(o, "overlap_score_credit", &m))
			q.weights.overlap_score_credit = vec_real(m);
		if (vec_has(o, "track_prefill_tokens", &m) && kvp_json_bool(m, &b) == KVP_OK)
			q.track = b ? KVP_YES : KVP_NO;
	}
	q.has_preferred = vec_has(v, "preferred_taints", &m) && kvp_json_len(m) > 0 ? KVP_YES : KVP_NO;
	return q;
}

/* Sum of the preferred weights of the taints that a worker carries; float on the wire. */
static double taint_sum(struct kvp_json_val v, uint64_t worker_id)
{
	struct kvp_json_val all, mine, weight;
	char key[32];
	double sum = 0;
	snprintf(key, sizeof(key), "%" PRIu64, worker_id);
	if (!vec_has(v, "taints", &all) || !vec_has(all, key, &mine))
		return 0;
	struct kvp_json_iter it = kvp_json_each(mine);
	while (kvp_json_next(&it))
		if (vec_has(vec_get(v, "preferred_taints"), vec_text(it.val), &weight))
			sum += (double)(float)vec_real(weight);
	return sum;
}

static struct kvp_score_rank rank_of(struct kvp_json_val r, double taints)
{
	return (struct kvp_score_rank){.dev_blk = (uint32_t)vec_u64(r, "device"),
		.host_blk = (uint32_t)vec_u64(r, "host"),
		.disk_blk = (uint32_t)(vec_u64(r, "disk") + vec_u64(r, "external")),
		.additional_blk = (uint32_t)vec_u64(r, "additional_blocks"),
		.active_prefill_tok = vec_u64(r, "active_prefill_tokens"),
		.active_blk = vec_u64(r, "active_blocks"),
		.active_requests = (uint32_t)vec_u64(r, "active_requests"),
		.shared_beyond_blk = (uint32_t)vec_u64(r, "shared_beyond"),
		.taint_multiplier = kvp_score_taint_multiplier(taints)};
}

struct case_ranks {
	struct kvp_score_rank rank[RANKS_MAX];
	uint64_t worker_id[RANKS_MAX];
	uint32_t dp_rank[RANKS_MAX], n;
};

static int find_rank(const struct case_ranks *c, uint64_t worker_id, uint64_t dp_rank)
{
	for (uint32_t i = 0; i < c->n; i++)
		if (c->worker_id[i] == worker_id && c->dp_rank[i] == dp_rank)
			return (int)i;
	return -1;
}

static void check_candidates(
	struct kvp_json_val v, const struct kvp_score_request *q, const struct case_ranks *c)
{
	struct kvp_json_iter it = kvp_json_each(vec_get(vec_get(v, "expected"), "candidates"));
	uint32_t seen = 0;
	while (kvp_json_next(&it)) {
		struct kvp_json_val m;
		int i = find_rank(c, vec_u64(it.val, "worker_id"), vec_u64(it.val, "dp_rank"));
		if (!ok(i >= 0, "%s: candidate is a rank", vec_str(v, "id")))
			continue;
		const struct kvp_score_rank *r = &c->rank[i];
		const char *id = vec_str(v, "id");
		uint64_t cached = kvp_score_cached_tok(
			&q->weights, q->block_size, r->dev_blk, r->host_blk, r->disk_blk);
		is_u64(cached, vec_u64(it.val, "cached_tokens"), "%s rank %d: cached tokens", id, i);
		is_u64(kvp_score_effective_prefill(q->isl_tok, cached),
			vec_u64(it.val, "effective_prefill_tokens"), "%s rank %d: effective prefill", id, i);
		ok(close_to(r->logit, vec_real(vec_get(it.val, "logit"))), "%s rank %d: logit %.12g", id, i,
			r->logit);
		ok(close_to(r->cost, vec_real(vec_get(it.val, "cost"))), "%s rank %d: cost %.12g", id, i,
			r->cost);
		/* The vector's credit is the decayed one of the formula; the overlap row's is not decayed. */
		if (q->weights.overlap_score_credit_decay == 0)
			ok(close_to(kvp_score_credit_blk(&q->weights, r->dev_blk, r->host_blk, r->disk_blk,
					    r->shared_beyond_blk),
				   vec_real(vec_get(it.val, "credit_blocks"))),
				"%s rank %d: credit", id, i);
		if (vec_has(it.val, "preferred_taint_multiplier", &m))
			ok(close_to(r->taint_multiplier, vec_real(m)), "%s rank %d: taint multiplier", id, i);
		seen++;
	}
	is_u64(seen, c->n, "%s: every rank is a candidate", vec_str(v, "id"));
}

static void check_load_after(
	struct kvp_json_val v, const struct kvp_score_request *q, const struct case_ranks *c)
{
	struct kvp_json_iter it = kvp_json_each(vec_get(vec_get(v, "expected"), "chosen_load_after_booking"));
	while (kvp_json_next(&it)) {
		char *end;
		uint64_t worker = strtoull(it.key, &end, 10), dp = strtoull(end + 1, NULL, 10);
		int i = find_rank(c, worker, dp);
		if (!ok(i >= 0, "%s: booked rank is there", vec_str(v, "id")))
			continue;
		const struct kvp_score_rank *r = &c->rank[i];
		uint64_t cached = kvp_score_cached_tok(
			&q->weights, q->block_size, r->dev_blk, r->host_blk, r->disk_blk);
		/* A booking adds what a projection shows; with tracking off it books no tokens. */
		struct kvp_score_potential p = kvp_score_potential(r->active_prefill_tok, r->active_blk,
			q->isl_tok, cached, r->additional_blk, 0, q->track);
		ok(p.prefill_tok == vec_u64(it.val, "potential_prefill_tokens") &&
				p.decode_blk == vec_u64(it.val, "potential_decode_blocks") &&
				r->active_requests + 1 == vec_u64(it.val, "active_requests"),
			"%s rank %d: load after booking", vec_str(v, "id"), i);
	}
}

static void check_choice(struct kvp_json_val v, const struct kvp_score_request *q, const struct case_ranks *c)
{
	unsigned legal[RANKS_MAX] = {0}, hit[RANKS_MAX] = {0};
	int bad = 0, missed = 0;
	struct kvp_rng rng;
	struct kvp_json_iter it = kvp_json_each(vec_get(vec_get(v, "expected"), "choose_one_of"));
	while (kvp_json_next(&it)) {
		uint64_t pair[2] = {0, 0};
		size_t n;
		ok(kvp_json_u64s(it.val, pair, 2, &n) == KVP_OK && n == 2, "legal choice is a pair");
		int i = find_rank(c, pair[0], pair[1]);
		if (i >= 0)
			legal[i] = 1;
	}
	kvp_rng_seed(&rng, 1);
	for (int k = 0; k < 200; k++)
		hit[kvp_score_pick(q, c->rank, c->n, &rng)]++;
	for (uint32_t i = 0; i < c->n; i++) {
		bad += hit[i] && !legal[i];
		missed += legal[i] && !hit[i];
	}
	ok(!bad && !missed, "%s: every legal choice is made, no other", vec_str(v, "id"));
}

static void select_case(struct kvp_json_val v)
{
	static struct case_ranks c;
	struct kvp_json_iter it = kvp_json_each(vec_get(v, "ranks"));
	configure(v);
	struct kvp_score_request q = request_of(v);
	c.n = 0;
	while (kvp_json_next(&it) && c.n < RANKS_MAX) {
		c.worker_id[c.n] = vec_u64(it.val, "worker_id");
		c.dp_rank[c.n] = (uint32_t)vec_u64(it.val, "dp_rank");
		c.rank[c.n] = rank_of(it.val, taint_sum(v, c.worker_id[c.n]));
		c.n++;
	}
	kvp_score_all(&q, c.rank, c.n);
	check_candidates(v, &q, &c);
	check_choice(v, &q, &c);
	check_load_after(v, &q, &c);
}

static double opt_real(struct kvp_json_val v, const char *key, double otherwise)
{
	struct kvp_json_val m;
	return vec_has(v, key, &m) ? vec_real(m) : otherwise;
}

static void effective_prefill(struct kvp_json_val v)
{
	struct kvp_json_iter it = kvp_json_each(vec_get(v, "rows"));
	while (kvp_json_next(&it)) {
		struct kvp_score_weights w = {.host_weight = opt_real(it.val, "host_cache_hit_weight", 0),
			.disk_weight = opt_real(it.val, "disk_cache_hit_weight", 0)};
		uint64_t cached = kvp_score_cached_tok(&w, (uint32_t)vec_u64(it.val, "block_size"),
			(uint32_t)vec_u64(it.val, "device"), (uint32_t)vec_u64(it.val, "host"),
			(uint32_t)(vec_u64(it.val, "disk") + vec_u64(it.val, "external")));
		is_u64(cached, vec_u64(it.val, "cached_tokens"), "cached tokens");
		is_u64(kvp_score_effective_prefill(vec_u64(it.val, "isl_tokens"), cached),
			vec_u64(it.val, "effective_prefill_tokens"), "effective prefill tokens");
	}
}

static void effective_prefill_cached(struct kvp_json_val v)
{
	struct kvp_json_iter it = kvp_json_each(vec_get(v, "rows"));
	while (kvp_json_next(&it))
		is_u64(kvp_score_effective_prefill(
			       vec_u64(it.val, "isl_tokens"), vec_u64(it.val, "cached_tokens")),
			vec_u64(it.val, "effective_prefill_tokens"), "isl less cached");
}

static void overlap_summary(struct kvp_json_val v)
{
	struct kvp_json_iter it = kvp_json_each(vec_get(v, "rows"));
	while (kvp_json_next(&it)) {
		struct kvp_score_tiers t[RANKS_MAX];
		uint32_t n = 0, bs = (uint32_t)vec_u64(it.val, "block_size");
		struct kvp_json_val want = vec_get(it.val, "overlap");
		struct kvp_json_iter r = kvp_json_each(vec_get(it.val, "ranks"));
		while (kvp_json_next(&r)) {
			char key[16];
			t[n].dev_blk = (uint32_t)vec_u64(r.val, "device");
			t[n].host_blk = (uint32_t)vec_u64(r.val, "host");
			t[n].disk_blk = (uint32_t)(vec_u64(r.val, "disk") + vec_u64(r.val, "external"));
			snprintf(key, sizeof(key), "%" PRIu64, vec_u64(r.val, "dp_rank"));
			is_u64((uint64_t)bs * t[n].dev_blk, vec_u64(vec_get(want, "dp"), key),
				"tokens of rank %s", key);
			n++;
		}
		struct kvp_score_overlap o = kvp_score_overlap(bs, t, n);
		ok(o.longest_tok == vec_u64(want, "longest_matched") && o.gpu_tok == vec_u64(want, "gpu") &&
				o.cpu_tok == vec_u64(want, "cpu") && o.disk_tok == vec_u64(want, "disk"),
			"overlap summary of %u ranks", n);
	}
}

static void overlap_row(struct kvp_json_val v)
{
	struct kvp_json_iter it = kvp_json_each(vec_get(v, "rows"));
	configure(v);
	while (kvp_json_next(&it)) {
		struct kvp_score_weights w = {
			.overlap_score_credit = vec_real(vec_get(it.val, "overlap_score_credit")),
			.host_weight = cfg.host_cache_hit_weight,
			.disk_weight = cfg.disk_cache_hit_weight};
		struct kvp_score_tiers t = {(uint32_t)vec_u64(it.val, "device"),
			(uint32_t)vec_u64(it.val, "host"),
			(uint32_t)(vec_u64(it.val, "disk") + vec_u64(it.val, "external"))};
		struct kvp_score_overlap o = kvp_score_overlap(1, &t, 1);
		ok(kvp_score_credit_blk(&w, t.dev_blk, t.host_blk, t.disk_blk, 0) ==
				vec_real(vec_get(it.val, "router_credit_blocks")),
			"router credit of an overlap row");
		ok(o.gpu_tok == vec_u64(it.val, "device_blocks") &&
				o.cpu_tok == vec_u64(it.val, "host_pinned_blocks") &&
				o.disk_tok == vec_u64(it.val, "disk_blocks"),
			"cumulative blocks of an overlap row");
	}
}

/* Naive bookings for the projection: a set of live sequence hashes and a token sum for each worker. */
struct naive {
	uint64_t hash[64], n, tok, requests;
};

static int naive_has(const struct naive *w, uint64_t h)
{
	for (uint64_t i = 0; i < w->n; i++)
		if (w->hash[i] == h)
			return 1;
	return 0;
}

static void potential_rows(
	struct kvp_json_val v, const struct naive *w, const char *key, enum kvp_tristate track)
{
	struct kvp_json_val query = vec_get(v, "query"), cached;
	struct kvp_json_iter it = kvp_json_each(vec_get(vec_get(v, "expected"), key));
	while (kvp_json_next(&it)) {
		uint64_t id = vec_u64(it.val, "worker_id"), n = 0, depth = 0, tok = 0;
		struct kvp_json_val m;
		char rank[32];
		struct kvp_json_iter s = kvp_json_each(vec_get(query, "sequence_hashes"));
		while (kvp_json_next(&s)) {
			depth += depth == n && naive_has(&w[id], vec_num(s.val));
			n++;
		}
		snprintf(rank, sizeof(rank), "%" PRIu64 ":%" PRIu64, id, vec_u64(it.val, "dp_rank"));
		if (vec_has(query, "cached_tokens", &cached) && vec_has(cached, rank, &m))
			tok = vec_num(m);
		struct kvp_score_potential p = kvp_score_potential(
			w[id].tok, w[id].n, vec_u64(query, "isl_tokens"), tok, n, depth, track);
		ok(p.prefill_tok == vec_u64(it.val, "potential_prefill_tokens") &&
				p.decode_blk == vec_u64(it.val, "potential_decode_blocks") &&
				w[id].requests == vec_u64(it.val, "active_requests"),
			"%s %s: projection on %s", vec_str(v, "id"), key, rank);
	}
}

static void potential_loads(struct kvp_json_val v)
{
	struct naive w[4] = {0};
	struct kvp_json_iter b = kvp_json_each(vec_get(v, "bookings"));
	while (kvp_json_next(&b)) {
		struct naive *me = &w[vec_u64(b.val, "worker_id") & 3];
		struct kvp_json_iter s = kvp_json_each(vec_get(b.val, "sequence_hashes"));
		while (kvp_json_next(&s))
			if (!naive_has(me, vec_num(s.val)))
				me->hash[me->n++] = vec_num(s.val);
		me->tok += vec_u64(b.val, "effective_prefill_tokens");
		me->requests++;
	}
	potential_rows(v, w, "track_prefill_tokens", KVP_YES);
	potential_rows(v, w, "no_track", KVP_NO);
}

static uint32_t read_costs(struct kvp_json_val v, struct kvp_score_rank *r)
{
	uint32_t n = 0;
	struct kvp_json_iter it = kvp_json_each(v);
	while (kvp_json_next(&it) && n < RANKS_MAX)
		r[n++] = (struct kvp_score_rank){.cost = vec_real(it.val)};
	return n;
}

static void softmax(struct kvp_json_val v)
{
	struct kvp_score_rank r[RANKS_MAX];
	double prob[RANKS_MAX], temperature = vec_real(vec_get(v, "temperature"));
	uint32_t n = 2, i = 0;
	/* The JSON reader answers LIMIT from 9e307 on; these costs are the two ends of double. */
	if (!strcmp(vec_str(v, "id"), "SMmax")) {
		r[0] = (struct kvp_score_rank){.cost = -DBL_MAX};
		r[1] = (struct kvp_score_rank){.cost = DBL_MAX};
	} else {
		n = read_costs(vec_get(v, "costs"), r);
	}
	kvp_score_softmax_prob(r, n, temperature, prob);
	struct kvp_json_iter it = kvp_json_each(vec_get(vec_get(v, "expected"), "probabilities"));
	for (; kvp_json_next(&it); i++)
		ok(i < n && close_to(prob[i], vec_real(it.val)), "%s: probability %u", vec_str(v, "id"), i);
	is_u64(i, n, "%s: all probabilities", vec_str(v, "id"));
	it = kvp_json_each(vec_get(vec_get(v, "expected"), "picks"));
	while (kvp_json_next(&it))
		is_u64(kvp_score_softmax_at(r, n, temperature, vec_real(vec_get(it.val, "u"))),
			vec_u64(it.val, "index"), "%s: pick", vec_str(v, "id"));
}

static void rng_outputs(struct kvp_json_val v)
{
	struct kvp_rng r;
	struct kvp_json_iter it = kvp_json_each(vec_get(vec_get(v, "expected"), "next_u64"));
	kvp_rng_seed(&r, vec_u64(v, "seed"));
	while (kvp_json_next(&it))
		is_u64(kvp_rng_next(&r), vec_num(it.val), "generator output");
	it = kvp_json_each(vec_get(vec_get(v, "expected"), "f64"));
	kvp_rng_seed(&r, vec_u64(v, "seed"));
	while (kvp_json_next(&it))
		ok(kvp_rng_double(&r) == vec_real(it.val), "generator double");
}

static void rng_below(struct kvp_json_val v)
{
	struct kvp_rng r;
	struct kvp_json_iter b = kvp_json_each(vec_get(v, "bounds"));
	struct kvp_json_iter want = kvp_json_each(vec_get(vec_get(v, "expected"), "values"));
	kvp_rng_seed(&r, vec_u64(v, "seed"));
	while (kvp_json_next(&b) && kvp_json_next(&want))
		is_u64(kvp_rng_below(&r, vec_num(b.val)), vec_num(want.val), "bounded draw");
}

static void tie_break(struct kvp_json_val v)
{
	struct kvp_score_rank r[RANKS_MAX] = {0};
	struct kvp_json_val costs;
	uint64_t worker[RANKS_MAX] = {0};
	size_t n = 0;
	int bad = 0, cnt = 0;
	struct kvp_rng rng;
	struct kvp_score_request q = {.weights = {.temperature = vec_real(vec_get(v, "temperature"))}};
	ok(kvp_json_u64s(vec_get(v, "workers"), worker, RANKS_MAX, &n) == KVP_OK, "workers are read");
	if (vec_has(v, "costs", &costs))
		read_costs(costs, r);
	kvp_rng_seed(&rng, vec_u64(v, "seed"));
	struct kvp_json_iter it = kvp_json_each(vec_get(vec_get(v, "expected"), "sequence"));
	for (; kvp_json_next(&it); cnt++)
		bad += worker[kvp_score_pick(&q, r, (uint32_t)n, &rng)] != vec_num(it.val);
	ok(cnt > 0 && !bad, "%s: the %d seeded choices", vec_str(v, "id"), cnt);
}

static void tie_distribution(struct kvp_json_val v)
{
	struct kvp_score_rank r[RANKS_MAX] = {0};
	struct kvp_score_request q = {.isl_tok = 16, .block_size = (uint32_t)vec_u64(v, "block_size")};
	uint32_t n = (uint32_t)kvp_json_len(vec_get(v, "workers")), hit[RANKS_MAX] = {0};
	double total = (double)vec_u64(v, "selections");
	struct kvp_rng rng;
	kvp_rng_seed(&rng, tap_seed(2024));
	kvp_score_all(&q, r, n);
	for (int i = 0; i < (int)total; i++)
		hit[kvp_score_pick(&q, r, n, &rng)]++;
	for (uint32_t i = 0; i < n; i++)
		ok(hit[i] >= vec_real(vec_get(vec_get(v, "expected"), "min_share")) * total &&
				hit[i] <= vec_real(vec_get(vec_get(v, "expected"), "max_share")) * total,
			"worker %u of %u got %u of %.0f", i, n, hit[i], total);
}

static void taint_multiplier(struct kvp_json_val v)
{
	struct kvp_json_iter it = kvp_json_each(vec_get(v, "rows"));
	while (kvp_json_next(&it)) {
		double sum = 0;
		struct kvp_json_iter w = kvp_json_each(vec_get(it.val, "weights"));
		while (kvp_json_next(&w))
			sum += (double)(float)vec_real(w.val);
		ok(close_to(kvp_score_taint_multiplier(sum), vec_real(vec_get(it.val, "multiplier"))),
			"multiplier of weight %g", sum);
	}
}

static void busy_flags(struct kvp_json_val v)
{
	struct kvp_json_iter it = kvp_json_each(vec_get(v, "rows"));
	while (kvp_json_next(&it)) {
		uint64_t value = vec_u64(it.val, "value"), capacity = vec_u64(it.val, "capacity");
		double threshold = vec_real(vec_get(it.val, "threshold"));
		int want = 0, decode = !strcmp(vec_str(it.val, "what"), "decode");
		kvp_json_bool(vec_get(it.val, "busy"), &want);
		enum kvp_tristate got = decode ? kvp_score_decode_busy(value, threshold, capacity)
					       : kvp_score_prefill_busy(value, threshold, capacity);
		ok(got == (want ? KVP_YES : KVP_NO), "%s busy: %" PRIu64 " of %" PRIu64 " at %g",
			vec_str(it.val, "what"), value, capacity, threshold);
	}
	ok(kvp_score_decode_busy(5, NAN, 9) == KVP_UNSET && kvp_score_decode_busy(5, 0.5, 0) == KVP_UNSET &&
			kvp_score_prefill_busy(5, NAN, 9) == KVP_UNSET &&
			kvp_score_prefill_busy(5, 0.5, 0) == KVP_UNSET,
		"no threshold or no capacity: unknown");
}

static void deprecated_weight(struct kvp_json_val v)
{
	struct kvp_json_iter it = kvp_json_each(vec_get(v, "rows"));
	while (kvp_json_next(&it)) {
		struct kvp_json_val m;
		int starts = 1;
		if (vec_has(it.val, "starts", &m))
			kvp_json_bool(m, &starts);
		if (!starts) /* refused: tests/t_config.c */
			continue;
		configure(it.val);
		ok(cfg.eff.overlap_score_credit == vec_real(vec_get(it.val, "overlap_score_credit")) &&
				cfg.eff.prefill_load_scale == vec_real(vec_get(it.val, "prefill_load_scale")),
			"deprecated weight: credit %g scale %g", cfg.eff.overlap_score_credit,
			cfg.eff.prefill_load_scale);
	}
}

/* The cost formula once more, statement by statement as it is published, with the library's round. */
static double naive_cost(
	const struct kvp_score_request *q, const struct kvp_score_rank *all, uint32_t n, uint32_t i)
{
	const struct kvp_score_weights *w = &q->weights;
	const struct kvp_score_rank *r = &all[i];
	double bs = q->block_size, dev = r->dev_blk, host = r->host_blk, disk = r->disk_blk, decay = 1.0;
	double least = (double)all[0].active_prefill_tok, raw = 0;
	for (uint32_t k = 1; k < n; k++)
		least = fmin(least, (double)all[k].active_prefill_tok);
	if (q->track == KVP_YES && w->overlap_score_credit_decay > 0) {
		double excess = fmax(0, (double)r->active_prefill_tok - least) / bs;
		decay = 1 / (1 + w->overlap_score_credit_decay * (excess / ceil((double)q->isl_tok / bs)));
	}
	double credit =
		((w->overlap_score_credit * decay * dev + w->host_weight * host) + w->disk_weight * disk) +
		w->shared_multiplier * r->shared_beyond_blk;
	double cached = round((dev + w->host_weight * host + w->disk_weight * disk) * bs);
	double decode = (double)r->active_blk + r->additional_blk, isl = (double)q->isl_tok;
	double request = w->active_request_weight * r->active_requests;
	if (q->role == KVP_PART_DECODE && q->track != KVP_YES && w->overlap_score_credit > 0)
		return fmax(0, decode - credit) + request;
	if (q->track == KVP_YES)
		raw = (double)r->active_prefill_tok + (isl - fmin(isl, cached)) + cached;
	return w->prefill_load_scale * fmax(0, raw / bs - credit) + decode + request;
}

static double some_weight(struct kvp_rng *rng)
{
	static const double special[] = {0, 0.25, 0.5, 1, 1.5, 2};
	uint64_t k = kvp_rng_below(rng, 8);
	return k < 6 ? special[k] : kvp_rng_double(rng);
}

/* Ties are exact equality, so the fast loop must give the same bits, not nearly the same cost. */
static void same_bits(void)
{
	struct kvp_rng rng;
	uint64_t bad = 0;
	kvp_rng_seed(&rng, 99);
	for (int round_nr = 0; round_nr < 20000; round_nr++) {
		struct kvp_score_rank r[8] = {0};
		struct kvp_score_request q = {.weights = {some_weight(&rng), some_weight(&rng),
						      some_weight(&rng), some_weight(&rng), some_weight(&rng),
						      some_weight(&rng), some_weight(&rng), 0},
			.role = (enum kvp_part_role)kvp_rng_below(&rng, KVP_PART_ROLE_CNT),
			.isl_tok = 1 + kvp_rng_below(&rng, 1u << (1 + kvp_rng_below(&rng, 20))),
			.block_size = 1 + (uint32_t)kvp_rng_below(&rng, 128),
			.track = kvp_rng_below(&rng, 3) ? KVP_YES : KVP_NO};
		for (int i = 0; i < 8; i++) {
			r[i].dev_blk = (uint32_t)kvp_rng_below(&rng, 200);
			r[i].host_blk = (uint32_t)kvp_rng_below(&rng, 50);
			r[i].disk_blk = (uint32_t)kvp_rng_below(&rng, 50);
			r[i].additional_blk = (uint32_t)kvp_rng_below(&rng, 300);
			r[i].active_prefill_tok = kvp_rng_below(&rng, 100000);
			r[i].active_blk = kvp_rng_below(&rng, 10000);
			r[i].active_requests = (uint32_t)kvp_rng_below(&rng, 50);
			r[i].shared_beyond_blk = (uint32_t)kvp_rng_below(&rng, 100);
		}
		kvp_score_all(&q, r, 8);
		for (uint32_t i = 0; i < 8; i++)
			bad += r[i].cost != naive_cost(&q, r, 8, i);
	}
	is_u64(bad, 0, "160000 random costs have the bits of the published formula");
	bad = 0;
	for (int k = 0; k < 100000; k++) {
		struct kvp_score_weights w = {
			.host_weight = some_weight(&rng), .disk_weight = some_weight(&rng)};
		uint32_t d = (uint32_t)kvp_rng_below(&rng, 9), h = (uint32_t)kvp_rng_below(&rng, 9),
			 x = (uint32_t)kvp_rng_below(&rng, 9), bs = 1 + (uint32_t)kvp_rng_below(&rng, 8);
		bad += (double)kvp_score_cached_tok(&w, bs, d, h, x) !=
		       round(((double)d + w.host_weight * h + w.disk_weight * x) * bs);
	}
	is_u64(bad, 0, "100000 roundings are half away from zero");
}

/* Cases that the vectors leave open. */
static void corners(void)
{
	struct kvp_score_request q = {.isl_tok = 64, .block_size = 16};
	struct kvp_score_rank r[3] = {{.cost = NAN}, {.cost = 5}, {.cost = 7}};
	struct kvp_rng rng;
	kvp_rng_seed(&rng, 3);
	is_u64(kvp_score_pick(&q, r, 3, &rng), 1, "NaN never wins");
	is_u64(kvp_score_pick(&q, r, 1, &rng), 0, "a single rank is picked whatever it costs");
	struct kvp_score_rank equal[2] = {{.cost = 4}, {.cost = 4}}, far[2] = {{.cost = 1}, {.cost = 9}};
	double prob[2];
	is_u64(kvp_score_softmax_at(equal, 2, 1.0, 0.5), 0, "a draw on the edge belongs to the first");
	kvp_score_softmax_prob(far, 2, 1e-4, prob);
	ok(prob[0] == 1.0 && prob[1] == 0.0, "a tiny temperature does not overflow");
	uint64_t allowed[] = {2, 5, 9}, taint[] = {10, 20, 30}, need[] = {20}, other[] = {25};
	struct kvp_eligible_ask a = {
		.allowed = allowed, .allowed_cnt = 3, .required = need, .required_cnt = 1};
	ok(kvp_score_eligible(&a, 5, 0, taint, 3) == KVP_ELIGIBLE, "allowed and tainted as required");
	ok(kvp_score_eligible(&a, 4, 0, taint, 3) == KVP_NOT_ALLOWED, "outside the allow list");
	a.required = other;
	ok(kvp_score_eligible(&a, 5, 0, taint, 3) == KVP_NO_TAINT, "a required taint is missing");
	a.has_pinned = KVP_YES;
	a.pinned_worker_id = 5;
	a.pinned_dp_rank = 1;
	ok(kvp_score_eligible(&a, 5, 0, taint, 3) == KVP_NOT_PINNED, "another rank of the pinned worker");
	ok(kvp_score_eligible(&a, 4, 1, taint, 3) == KVP_NOT_ALLOWED, "allow list comes before the pin");
	ok(kvp_score_eligible(&a, 5, 1, taint, 3) == KVP_NO_TAINT, "taints come after the pin");
	a.allowed_cnt = 0;
	ok(kvp_score_eligible(&a, 5, 1, taint, 3) == KVP_NOT_ALLOWED, "an empty allow list is nobody");
}

static const struct {
	const char *kind;
	void (*run)(struct kvp_json_val v);
} here[] = {{"select", select_case}, {"effective_prefill", effective_prefill},
	{"effective_prefill_cached", effective_prefill_cached}, {"overlap_summary", overlap_summary},
	{"overlap_row", overlap_row}, {"potential_loads", potential_loads}, {"softmax", softmax},
	{"rng", rng_outputs}, {"rng_below", rng_below}, {"tie_break", tie_break},
	{"tie_distribution", tie_distribution}, {"taint_multiplier", taint_multiplier},
	{"busy_flags", busy_flags}, {"deprecated_weight", deprecated_weight}};
static const char *const elsewhere[] = {"booking_sequence", "deep_chain", "config_start", "queue_admission",
	"queue_order", "best_cached", "busy_worker_ratio", "policy_limits", "policy_yaml", "drr", "refresh",
	"expiry", "conditional_disagg"};
static const struct {
	const char *kind, *why;
} nowhere[] = {{"prefill_decay", "the load model that it needs is refused at start (README, Limits)"}};
#define HERE_CNT (sizeof(here) / sizeof(here[0]))

int main(void)
{
	struct kvp_json *p = kvp_json_new();
	struct kvp_json_iter v = kvp_json_each(vec_get(vec_load(p, "scheduling.json"), "vectors"));
	unsigned ran[HERE_CNT] = {0};
	while (kvp_json_next(&v)) {
		const char *kind = vec_str(v.val, "kind");
		int known = 0;
		for (size_t i = 0; i < HERE_CNT; i++) {
			if (strcmp(kind, here[i].kind) != 0)
				continue;
			known = 1;
			ran[i]++;
			here[i].run(v.val);
		}
		for (size_t i = 0; i < sizeof(elsewhere) / sizeof(elsewhere[0]); i++)
			known |= strcmp(kind, elsewhere[i]) == 0;
		for (size_t i = 0; i < sizeof(nowhere) / sizeof(nowhere[0]); i++)
			if (strcmp(kind, nowhere[i].kind) == 0)
				known = ok(1, "%s # SKIP %s", vec_str(v.val, "id"), nowhere[i].why);
		if (!known)
			ok(0, "vector kind %s belongs to a test", kind);
	}
	for (size_t i = 0; i < HERE_CNT; i++)
		ok(ran[i] > 0, "%u vectors of kind %s", ran[i], here[i].kind);
	corners();
	same_bits();
	kvp_json_free(p);
	return done();
}
