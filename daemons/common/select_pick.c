#include "daemons/common/select_priv.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static int by_value(const void *a, const void *b)
{
	uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
	return (x > y) - (x < y);
}

/* Arrays of one pick in one scratch block: allowed ids, required and preferred taint hashes. */
struct filters {
	struct kvp_eligible_ask ask;
	const uint64_t *preferred;
};

static int prepare_filters(struct kvp_selection *s, const struct kvp_select_request *q, struct filters *f)
{
	if (s->stored) {
		f->ask = s->stored->ask;
		f->preferred = s->stored->preferred;
		return 0;
	}
	uint32_t allowed_cnt = q->allowed_worker_id ? q->allowed_cnt : 0;
	size_t n = (size_t)allowed_cnt + q->required_cnt + q->preferred_cnt;
	uint64_t *mem = kvp_sel_scratch(&s->scratch_filter, n, sizeof(uint64_t));
	if (!mem)
		return kvp_sel_fail(s, 500, "out of memory");
	uint64_t *required = mem + allowed_cnt, *preferred = required + q->required_cnt;
	if (allowed_cnt) {
		memcpy(mem, q->allowed_worker_id, allowed_cnt * sizeof(*mem));
		qsort(mem, allowed_cnt, sizeof(*mem), by_value);
	}
	for (uint32_t i = 0; i < q->required_cnt; i++)
		required[i] = kvp_hash_taint(q->required_taint[i].ptr, q->required_taint[i].len);
	for (uint32_t i = 0; i < q->preferred_cnt; i++)
		preferred[i] =
			kvp_hash_taint(q->preferred_taint[i].taint.ptr, q->preferred_taint[i].taint.len);
	f->preferred = preferred;
	f->ask = (struct kvp_eligible_ask){.allowed = q->allowed_worker_id ? mem : NULL,
		.allowed_cnt = allowed_cnt,
		.has_pinned = q->has_pinned,
		.pinned_worker_id = q->pinned_worker_id,
		.pinned_dp_rank = q->pinned_dp_rank,
		.required = required,
		.required_cnt = q->required_cnt};
	if (q->has_pinned == KVP_YES && f->ask.allowed &&
		!kvp_score_has(f->ask.allowed, f->ask.allowed_cnt, q->pinned_worker_id))
		return kvp_sel_fail(s, 400, "pinned worker %llu is not in allowed worker set",
			(unsigned long long)q->pinned_worker_id);
	return 0;
}

static double preference(
	const struct kvp_select_request *q, const uint64_t *preferred, const uint64_t *taint, uint32_t n)
{
	double sum = 0;
	for (uint32_t i = 0; i < q->preferred_cnt; i++)
		if (kvp_score_has(taint, n, preferred[i]))
			sum += (double)q->preferred_taint[i].weight;
	return kvp_score_taint_multiplier(sum);
}

static struct kvp_score_request score_request(
	const struct kvp_selection *s, const struct kvp_select_request *q, enum kvp_tristate track)
{
	struct kvp_score_request r = {.weights = s->set.weights,
		.policy = s->set.score_policy[q->role],
		.role = q->role,
		.isl_tok = s->prompt.isl_tok,
		.block_size = s->part.block_size,
		.seq_blk = s->set.track_active_blocks == KVP_YES ? s->prompt.seq_cnt : 0,
		.track = track,
		.has_preferred = q->preferred_cnt ? KVP_YES : KVP_NO};
	if (!isnan(q->override.overlap_score_credit))
		r.weights.overlap_score_credit = q->override.overlap_score_credit;
	if (!isnan(q->override.prefill_load_scale))
		r.weights.prefill_load_scale = q->override.prefill_load_scale;
	if (!isnan(q->override.temperature))
		r.weights.temperature = q->override.temperature;
	if (!isnan(q->override.shared_cache_multiplier))
		r.weights.shared_multiplier = q->override.shared_cache_multiplier;
	return r;
}

/* steer keeps only the candidates of the soft target, if there are any: the cheapest of them is taken. */
static uint32_t steer(
	struct kvp_selection *s, const struct kvp_select_request *q, uint32_t n, struct kvp_score_request *r)
{
	uint32_t kept = 0;
	for (uint32_t i = 0; i < n; i++) {
		const struct kvp_sel_rank *k = &s->rank[s->cand_rank[i]];
		if (k->worker_id != q->target_worker_id ||
			(q->has_target_rank == KVP_YES && k->dp_rank != q->target_dp_rank))
			continue;
		s->cand_rank[kept] = s->cand_rank[i];
		s->cand[kept++] = s->cand[i];
	}
	if (kept == 0)
		return n;
	r->weights.temperature = 0;
	return kept;
}

/* Candidates are scored in pieces that stay in the first-level cache; only a choice that looks at all costs
 * together (softmax, credit decay, soft target) wants them in one piece. */
#define PIECE_RANKS 64

struct pick {
	struct filters filters;
	struct kvp_score_request request;
	struct kvp_score_best best;
	uint32_t cnt, room; /* candidates in the current piece; its size */
};

static void add_candidate(
	struct kvp_selection *s, const struct kvp_select_request *q, struct pick *p, uint32_t i)
{
	const struct kvp_sel_rank *r = &s->rank[i];
	kvp_sel_read_load(s, i);
	s->cand_rank[p->cnt] = i;
	s->cand[p->cnt++] = (struct kvp_score_rank){.dev_blk = r->cached.dev_blk,
		.host_blk = r->cached.host_blk,
		.disk_blk = r->cached.disk_blk,
		.additional_blk = r->additional_blk,
		.active_prefill_tok = r->load.prefill_tok,
		.active_blk = kvp_load_blocks(&r->load),
		.active_requests = r->load.requests,
		.total_blk = r->total_kv_blocks,
		.taint_multiplier = q->preferred_cnt ? preference(q, p->filters.preferred,
							       s->taint + r->taint_off, r->taint_cnt)
						     : 1.0};
}

static void score_piece(struct kvp_selection *s, struct pick *p)
{
	kvp_score_all(&p->request, s->cand, p->cnt);
	for (uint32_t i = 0; i < p->cnt; i++)
		kvp_score_offer(&p->best, s->cand[i].cost, s->cand_rank[i], &s->rng);
	p->cnt = 0;
}

static int begin_pick(struct kvp_selection *s, const struct kvp_select_request *q, enum kvp_tristate track,
	struct pick *p, int *whole)
{
	memset(p, 0, sizeof(*p));
	int status = prepare_filters(s, q, &p->filters);
	if (status)
		return status;
	p->request = score_request(s, q, track);
	*whole = p->request.weights.temperature > 0 || p->request.weights.overlap_score_credit_decay > 0 ||
		 q->has_target == KVP_YES;
	p->room = *whole ? s->rank_cnt : PIECE_RANKS;
	s->cand = kvp_sel_scratch(&s->scratch_cand, p->room, sizeof(*s->cand));
	s->cand_rank = kvp_sel_scratch(&s->scratch_cand_rank, p->room, sizeof(*s->cand_rank));
	return s->cand && s->cand_rank ? 0 : kvp_sel_fail(s, 500, "out of memory");
}

int kvp_sel_pick(struct kvp_selection *s, const struct kvp_select_request *q, enum kvp_tristate track,
	uint32_t *chosen)
{
	struct pick p;
	int whole;
	int status = begin_pick(s, q, track, &p, &whole);
	if (status)
		return status;
	int anybody = !p.filters.ask.allowed && q->has_pinned != KVP_YES && !q->required_cnt;
	for (uint32_t i = 0; i < s->rank_cnt; i++) {
		const struct kvp_sel_rank *r = &s->rank[i];
		if (!anybody && kvp_score_eligible(&p.filters.ask, r->worker_id, r->dp_rank,
					s->taint + r->taint_off, r->taint_cnt) != KVP_ELIGIBLE)
			continue;
		if (p.cnt == p.room)
			score_piece(s, &p);
		add_candidate(s, q, &p, i);
	}
	if (p.cnt == 0 && p.best.offered == 0)
		return kvp_sel_fail(s, 503, "no endpoints available to route work");
	if (!whole) {
		score_piece(s, &p);
		*chosen = p.best.at;
		return 0;
	}
	if (q->has_target == KVP_YES)
		p.cnt = steer(s, q, p.cnt, &p.request);
	kvp_score_all(&p.request, s->cand, p.cnt);
	*chosen = s->cand_rank[kvp_score_pick(&p.request, s->cand, p.cnt, &s->rng)];
	return 0;
}

uint64_t kvp_sel_cached_tok(const struct kvp_selection *s, uint32_t i)
{
	const struct kvp_score_tiers *t = &s->rank[i].cached;
	return kvp_score_cached_tok(
		&s->set.weights, s->part.block_size, t->dev_blk, t->host_blk, t->disk_blk);
}

uint64_t kvp_sel_effective_prefill(const struct kvp_selection *s, uint32_t i)
{
	return kvp_score_effective_prefill(s->prompt.isl_tok, kvp_sel_cached_tok(s, i));
}

int kvp_sel_survey(struct kvp_selection *s, const struct kvp_select_request *q,
	const struct kvp_policy_class *class, enum kvp_sel_look look, struct kvp_sel_survey *out)
{
	struct filters f;
	*out = (struct kvp_sel_survey){0, 0, 0};
	int status = prepare_filters(s, q, &f);
	if (status)
		return status;
	/* One rank that is not busy settles it, unless a share counts. */
	int all = look == KVP_SEL_LOOK_CACHED || !class || !isnan(class->busy_ratio);
	for (uint32_t i = 0; i < s->rank_cnt; i++) {
		const struct kvp_sel_rank *r = &s->rank[i];
		if (kvp_score_eligible(&f.ask, r->worker_id, r->dp_rank, s->taint + r->taint_off,
			    r->taint_cnt) != KVP_ELIGIBLE)
			continue;
		out->eligible++;
		if (class) {
			struct kvp_load l;
			kvp_load_read(&s->region->book, r->rank_slot, &l);
			int busy = kvp_policy_rank_busy(class, l.prefill_tok, r->max_num_batched_tokens);
			out->busy += busy != 0;
		}
		if (look == KVP_SEL_LOOK_CACHED && kvp_sel_cached_tok(s, i) > out->best_cached_tok)
			out->best_cached_tok = kvp_sel_cached_tok(s, i);
		if (!all && out->busy < out->eligible)
			break;
	}
	return 0;
}

/* offer keeps out[0..*n) ascending by cost: one entry a worker, cap at most. */
static void offer(struct kvp_runner_up *out, double *cost, uint32_t *n, uint32_t cap,
	const struct kvp_sel_rank *r, double c)
{
	uint32_t at = 0, old = 0;
	while (old < *n && out[old].worker_id != r->worker_id)
		old++;
	if (old < *n && cost[old] <= c)
		return;
	if (old == *n) {
		if (*n == cap && cost[cap - 1] <= c)
			return;
		old = *n < cap ? (*n)++ : cap - 1;
	}
	while (at < old && cost[at] <= c)
		at++;
	memmove(out + at + 1, out + at, (old - at) * sizeof(*out));
	memmove(cost + at + 1, cost + at, (old - at) * sizeof(*cost));
	out[at] = (struct kvp_runner_up){r->worker_id, r->dp_rank};
	cost[at] = c;
}

/* judge fills cand and cand_rank with every eligible rank and its cost: 0, or a status. */
static int judge(struct kvp_selection *s, const struct kvp_select_request *q, uint32_t *cnt)
{
	enum kvp_tristate reuse = q->override.assume_kv_reuse, track = q->override.track_prefill_tokens;
	struct pick p;
	int whole;
	int status = kvp_sel_open_partition(s, q->role, q->model, q->group);
	status = status ? status : kvp_sel_prompt_begin(s, &q->prompt, KVP_PROMPT_USE_SELECT);
	if (status)
		return status;
	kvp_sel_look_up(s);
	status = kvp_sel_prompt_finish(s, reuse != KVP_UNSET ? reuse : s->set.assume_kv_reuse);
	track = track != KVP_UNSET ? track : s->set.track_prefill_tokens;
	status = status ? status : begin_pick(s, q, track, &p, &whole);
	s->cand = kvp_sel_scratch(&s->scratch_cand, s->rank_cnt, sizeof(*s->cand));
	s->cand_rank = kvp_sel_scratch(&s->scratch_cand_rank, s->rank_cnt, sizeof(*s->cand_rank));
	if (status || !s->cand || !s->cand_rank)
		return status ? status : 500;
	for (uint32_t i = 0; i < s->rank_cnt; i++) {
		const struct kvp_sel_rank *r = &s->rank[i];
		if (kvp_score_eligible(&p.filters.ask, r->worker_id, r->dp_rank, s->taint + r->taint_off,
			    r->taint_cnt) == KVP_ELIGIBLE)
			add_candidate(s, q, &p, i);
	}
	kvp_score_all(&p.request, s->cand, p.cnt);
	*cnt = p.cnt;
	return 0;
}

uint32_t kvp_selection_runners_up(struct kvp_selection *s, const struct kvp_select_request *q,
	uint64_t except, const uint32_t *dp_rank, struct kvp_runner_up *out, uint32_t cap)
{
	double cost[KVP_RUNNERS_MAX];
	uint32_t cnt = 0, n = 0;
	cap = cap < KVP_RUNNERS_MAX ? cap : KVP_RUNNERS_MAX;
	if (!cap || judge(s, q, &cnt))
		return 0;
	for (uint32_t i = 0; i < cnt; i++) {
		const struct kvp_sel_rank *r = &s->rank[s->cand_rank[i]];
		if (r->worker_id != except && (!dp_rank || r->dp_rank == *dp_rank))
			offer(out, cost, &n, cap, r, s->cand[i].cost);
	}
	return n;
}
