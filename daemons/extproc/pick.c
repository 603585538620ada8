/* From a complete request to its worker: checks in their order, tokenizer, selection, waiting. */
#include "daemons/extproc/extproc.h"
#include "daemons/common/log.h"
#include "ipc/json_in.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

static const char *const no_endpoints = "no endpoints available";
/* With roles the text says which one is missing. */
const char *const kvp_epp_no_endpoints[KVP_PLAN_LEGS] = {
	"no prefill endpoints available", "no decode endpoints available"};

/* give_permit gives back what admit took. */
static void give_permit(struct kvp_job *j)
{
	if (!j->has_permit)
		return;
	j->has_permit = 0;
	kvp_quota_give(&j->x->boot.region->quota, j->x->boot.owner, KVP_QUOTA_PICK, 1);
}

static void forget_tokens(struct kvp_job *j)
{
	free(j->kept_token);
	free(j->kept_mm);
	j->kept_token = NULL;
	j->kept_mm = NULL;
	j->is_rendered = 0;
}

static void done(struct kvp_job *j, const struct kvp_pick_answer *a)
{
	forget_tokens(j);
	give_permit(j);
	kvp_hist_add(j->x->boot.ctr, KVP_HIST_EPP_PICK_NS, kvp_clock_mono_ns() - j->pick_ns);
	kvp_timer_cancel(j->x->loop, &j->deadline);
	kvp_stream_picked(&j->stream, a);
	free(j->salted);
	j->salted = NULL;
}

static const char *stage_of(enum kvp_ctr why)
{
	switch (why) {
	case KVP_CTR_EPP_SUBSET:
		return "endpoint_subset";
	case KVP_CTR_EPP_TOKENIZER:
		return "render_tokenize";
	case KVP_CTR_EPP_VANISHED:
		return "endpoint_resolve";
	case KVP_CTR_EPP_HEADERS_REFUSED:
	case KVP_CTR_EPP_BODY_REFUSED:
		return "request";
	default:
		return "selection";
	}
}

static const char *code_of(enum kvp_ctr why, int status)
{
	switch (why) {
	case KVP_CTR_EPP_HEADERS_REFUSED:
		return "metadata_headers_too_large";
	case KVP_CTR_EPP_BODY_REFUSED:
		return "invalid_request";
	case KVP_CTR_EPP_TOKENIZER:
		return status == 503   ? "tokenizer_unavailable"
		       : status == 504 ? "tokenizer_timeout"
				       : "tokenizer_upstream_error";
	case KVP_CTR_EPP_BUSY:
	case KVP_CTR_EPP_QUEUE_FULL:
	case KVP_CTR_EPP_DEADLINE:
		return "overloaded";
	default:
		return status == 503 ? "no_endpoints" : "routing_failed";
	}
}

void kvp_epp_refuse(struct kvp_job *j, enum kvp_ctr why, int status, const char *text)
{
	struct kvp_pick_answer a = {.status = status, .text = text};
	if (status == 429)
		a.retry_after_s = j->x->boot.config->epp_shed_retry_after_secs;
	kvp_epp_count(j->x, why);
	kvp_epp_log_refusal(j, stage_of(why), status, code_of(why, status));
	done(j, &a);
}

/* may_be_local: a decode worker may prefill. */
static int may_be_local(const struct kvp_epp *x)
{
	return !x->boot.config->enforce_disagg || x->boot.config->conditional_disagg;
}

/* on_pair_path: the request is of a kind that a sidecar shares between two engines. The last path counts. */
static int on_pair_path(const struct kvp_job *j)
{
	struct kvp_str path = {NULL, 0};
	for (uint32_t i = 0; i < j->stream.header_cnt; i++) {
		const struct kvp_extproc_header *h = &j->stream.header[i];
		if (h->key.len == 5 && !strncasecmp(h->key.p, ":path", 5) && h->value.len)
			path = (struct kvp_str){h->value.p, h->value.len};
	}
	return kvp_ask_is_pair_path(&j->x->parser, path);
}

/* admit_check: 0, or a refusal: nothing can be picked at all. Who prefills is asked for only where somebody
 * else than the decode worker may. */
static int admit_check(const struct kvp_job *j, struct kvp_pick_answer *a)
{
	struct kvp_epp *x = j->x;
	struct kvp_pool *first = &x->pool[KVP_PLAN_PREFILL], *pool = &x->pool[KVP_PLAN_MAIN];
	int is_bound = j->may_pair && !may_be_local(x);
	kvp_pool_refresh(pool);
	if (is_bound)
		kvp_pool_refresh(first);
	*a = (struct kvp_pick_answer){.status = 503, .text = no_endpoints};
	if (x->boot.config->eff.discovery_on && !kvp_gate_is_open(&x->boot.region->gates, KVP_GATE_WORKERS)) {
		a->text = "pod reflector cache not ready";
		kvp_epp_count(x, KVP_CTR_EPP_UNDISCOVERED);
		return 1;
	}
	int is_shut = kvp_recov_is_shut(&x->boot.region->recov);
	if (pool->cnt && !is_shut && (!is_bound || first->cnt))
		return 0;
	if (!is_shut && x->boot.config->eff.disaggregated)
		a->text = kvp_epp_no_endpoints[pool->cnt ? KVP_PLAN_PREFILL : KVP_PLAN_MAIN];
	kvp_epp_count(x, KVP_CTR_EPP_NO_ENDPOINT);
	return 1;
}

int kvp_epp_admit(void *ctx, struct kvp_pick_answer *a)
{
	struct kvp_job *j = ctx;
	struct kvp_epp *x = j->x;
	j->may_pair = x->boot.config->eff.disaggregated && on_pair_path(j);
	if (admit_check(j, a))
		return 0;
	if (kvp_quota_take(&x->boot.region->quota, x->boot.owner, KVP_QUOTA_PICK, 1,
		    x->boot.config->epp_max_inflight)) {
		a->text = "endpoint picker overloaded";
		kvp_epp_count(x, KVP_CTR_EPP_OVERLOADED);
		return 0;
	}
	j->has_permit = 1;
	return 1;
}

void kvp_epp_cancel(void *ctx)
{
	struct kvp_job *j = ctx;
	if (j->call)
		kvp_tkz_cancel(j->call);
	j->call = NULL;
	kvp_plan_end(&j->plan);
	kvp_timer_cancel(j->x->loop, &j->deadline);
	forget_tokens(j);
	give_permit(j);
}

/* ---- what the selection is asked ---- */

static uint32_t block_size_of(const struct kvp_epp *x, const struct kvp_pool *pool)
{
	struct kvp_part_fixed f;
	uint32_t part;
	if (kvp_cat_part_find(&x->boot.region->cat, pool->role, pool->model.ptr, (uint32_t)pool->model.len,
		    pool->group.ptr, (uint32_t)pool->group.len, &part) ||
		kvp_cat_part_get(&x->boot.region->cat, part, &f))
		return 0;
	return f.block_size;
}

const struct kvp_ask_tokens *kvp_epp_kept(const struct kvp_job *j)
{
	return j->is_rendered ? &j->kept : NULL;
}

/* allow applies the subset hint. One that names no prefill endpoint is about where the request may go, not
 * about who prefills. */
static int allow(struct kvp_job *j, enum kvp_plan_leg leg, const uint64_t **ids, uint32_t *cnt)
{
	struct kvp_pool *pool = &j->x->pool[leg];
	int rc = kvp_pool_refresh(pool);
	rc = rc ? rc
		: kvp_pool_allow(pool, j->pick.subset_hint, j->pick.subset, j->pick.subset_cnt, ids, cnt);
	if (!rc && leg == KVP_PLAN_PREFILL && *ids && !*cnt)
		rc = kvp_pool_allow(pool, KVP_EXTPROC_HINT_ABSENT, NULL, 0, ids, cnt);
	return rc;
}

/* same_domain narrows the prefill workers to the transfer domain of the decode worker. Preferred: unless
 * there is none. */
static int same_domain(struct kvp_job *j, const uint64_t **ids, uint32_t *cnt)
{
	struct kvp_epp *x = j->x;
	struct kvp_pool *pool = &x->pool[KVP_PLAN_PREFILL];
	const struct kvp_pool_member *m =
		kvp_pool_worker(&x->pool[KVP_PLAN_MAIN], kvp_epp_main(j)->worker_id);
	int rc = m ? kvp_pool_narrow(pool, m->domain, ids, cnt) : KVP_OK;
	if (!rc && x->by_domain == KVP_DOMAIN_PREFERRED && *ids && !*cnt)
		rc = allow(j, KVP_PLAN_PREFILL, ids, cnt);
	return rc;
}

int kvp_epp_request(struct kvp_job *j, enum kvp_plan_leg leg, const struct kvp_ask_tokens *t,
	struct kvp_select_request *q)
{
	struct kvp_epp *x = j->x;
	uint64_t from = kvp_stage_now(j->is_timed);
	int status = 0;
	*q = (struct kvp_select_request){.role = x->pool[leg].role, .override = KVP_EPP_NO_OVERRIDE};
	if (j->by_length)
		kvp_ask_load_only(&j->ask, &q->prompt);
	else
		status = kvp_ask_prompt(&x->parser, &j->ask, j->pick.body, j->pick.body_len, t,
			block_size_of(x, &x->pool[leg]), &q->prompt);
	kvp_stage_add(x->boot.ctr, KVP_CTR_EPP_TIMED_HASH_NS, from);
	if (status || allow(j, leg, &q->allowed_worker_id, &q->allowed_cnt))
		return 500;
	if (leg == KVP_PLAN_PREFILL && j->plan.form == KVP_PLAN_CHAIN &&
		same_domain(j, &q->allowed_worker_id, &q->allowed_cnt))
		return 500;
	kvp_ask_select(&x->parser, &j->ask, q);
	return 0;
}

/* ---- after the selection ---- */

/* add_fallbacks appends the next best workers' endpoints: a proxy that can't reach the first may try them. A
 * rank header goes to whoever is tried, so with one only ranks of that number count. */
static void add_fallbacks(struct kvp_job *j, const struct kvp_select_request *q, char *to, size_t cap)
{
	struct kvp_epp *x = j->x;
	const struct kvp_leg *l = kvp_epp_main(j);
	const uint32_t *rank = x->boot.config->epp_dp_routing == KVP_DP_HEADER ? &l->dp_rank : NULL;
	struct kvp_runner_up next[KVP_EPP_FALLBACK_MAX];
	uint32_t cnt = kvp_selection_runners_up(
		x->selection, q, l->worker_id, rank, next, (uint32_t)x->boot.config->epp_fallback_endpoints);
	size_t len = strlen(to);
	for (uint32_t i = 0; i < cnt; i++) {
		const struct kvp_pool_member *m = kvp_pool_worker(&x->pool[KVP_PLAN_MAIN], next[i].worker_id);
		if (!m || cap - len < KVP_POOL_TEXT + 1 ||
			!kvp_pool_destination(
				m, next[i].dp_rank, x->ports[KVP_PLAN_MAIN], to + len + 1, cap - len - 1))
			continue;
		to[len] = ',';
		len += 1 + strlen(to + len + 1);
		kvp_epp_count(x, KVP_CTR_EPP_FALLBACKS);
	}
	to[len] = 0;
}

static void count_answer(struct kvp_job *j)
{
	struct kvp_epp *x = j->x;
	const struct kvp_leg *l = kvp_epp_main(j);
	/* What is cached counts where the prompt is prefilled. */
	uint64_t predicted =
		j->leg[j->plan.form != KVP_PLAN_LOCAL ? KVP_PLAN_PREFILL : KVP_PLAN_MAIN].predicted_tok;
	kvp_epp_count(x, KVP_CTR_EPP_BOOKED);
	kvp_hist_add(x->boot.ctr, KVP_HIST_EPP_ISL, l->isl_tok);
	kvp_hist_add(x->boot.ctr, KVP_HIST_EPP_REQUEST_BYTES, j->pick.body_len);
	if (l->isl_tok)
		kvp_hist_add(x->boot.ctr, KVP_HIST_EPP_OVERLAP_PCT, 100 * predicted / l->isl_tok);
	kvp_ctr_add(x->boot.ctr, KVP_CTR_EPP_PREDICTED_TOK, predicted);
}

static void add_rank(struct kvp_pick_answer *a, struct kvp_extproc_str name, uint32_t rank, char text[16])
{
	int n = snprintf(text, 16, "%u", rank);
	a->extra[a->extra_cnt++] = (struct kvp_extproc_header){name, {text, (uint32_t)n}};
}

/* rank_is_told: a header names the rank of the destination. Where prefill ranks have ports, those of a decode
 * worker are behind its sidecar's. */
static int rank_is_told(struct kvp_job *j)
{
	const struct kvp_config *cfg = j->x->boot.config;
	if (cfg->epp_dp_routing == KVP_DP_PORT)
		return cfg->eff.disaggregated && kvp_epp_main(j)->rank_cnt > 1;
	return cfg->epp_dp_routing == KVP_DP_HEADER;
}

void kvp_epp_answer(struct kvp_job *j)
{
	struct kvp_epp *x = j->x;
	const struct kvp_config *cfg = x->boot.config;
	const struct kvp_leg *l = kvp_epp_main(j), *first = &j->leg[KVP_PLAN_PREFILL];
	struct kvp_pick_answer a = {.status = 200, .has_booking = 1};
	char to[KVP_POOL_TEXT * (1 + KVP_EPP_FALLBACK_MAX)], rank[KVP_PLAN_LEGS][16];
	int is_pair = j->plan.form != KVP_PLAN_LOCAL && !kvp_epp_is_one_place(j);
	snprintf(to, sizeof(to), "%s", l->to);
	/* A pair belongs together: another decode worker would not have been told of it. */
	if (cfg->epp_fallback_endpoints && j->way == KVP_EPP_AGGREGATED) {
		struct kvp_select_request again;
		if (x->asked)
			add_fallbacks(j, x->asked, to, sizeof(to));
		else if (!kvp_epp_request(j, KVP_PLAN_MAIN, kvp_epp_kept(j), &again))
			add_fallbacks(j, &again, to, sizeof(to));
	}
	a.destination = (struct kvp_extproc_str){to, (uint32_t)strlen(to)};
	if (is_pair)
		a.prefiller = (struct kvp_extproc_str){first->to, (uint32_t)strlen(first->to)};
	if (rank_is_told(j))
		add_rank(&a, KVP_EXTPROC_STR("x-data-parallel-rank"), l->dp_rank, rank[KVP_PLAN_MAIN]);
	if (cfg->epp_dp_routing == KVP_DP_HEADER && is_pair)
		add_rank(&a, KVP_EXTPROC_STR("x-prefiller-dp-rank"), first->dp_rank, rank[KVP_PLAN_PREFILL]);
	if (cfg->epp_cache_salt_forwarding) {
		uint64_t n = 0;
		if (kvp_ask_salted(&x->parser, &j->ask, j->pick.body, j->pick.body_len, &j->salted, &n) ==
			KVP_OK)
			a.body = (struct kvp_extproc_str){j->salted, (uint32_t)n};
	}
	count_answer(j);
	done(j, &a);
}

/* ---- the tokenizer's answer ---- */

int kvp_epp_keep_tokens(struct kvp_job *j, const struct kvp_ask_tokens *t)
{
	/* Both legs of a pair may have to wait, and a plan may be followed by another one. */
	if (!t || j->is_rendered)
		return 1;
	forget_tokens(j);
	j->kept = *t;
	j->kept_token = malloc((t->token_cnt + 1) * sizeof(*t->token));
	j->kept_mm = malloc((t->mm_cnt + 1) * sizeof(*t->mm));
	if (!j->kept_token || !j->kept_mm)
		return 0;
	if (t->token_cnt)
		memcpy(j->kept_token, t->token, t->token_cnt * sizeof(*t->token));
	if (t->mm_cnt)
		memcpy(j->kept_mm, t->mm, t->mm_cnt * sizeof(*t->mm));
	j->kept.token = j->kept_token;
	j->kept.mm = j->kept_mm;
	j->is_rendered = 1;
	return 1;
}

/* ---- the request ---- */

/* say_unreachable: what a service answered is its own affair; that it can't be talked to is the
 * operator's. */
static void say_unreachable(const struct kvp_tkz_answer *t)
{
	static struct kvp_log_limit limit;
	uint64_t left = 0;
	if (t->upstream_status || t->end == KVP_TKZ_BREAKER || t->status == 200)
		return;
	if (kvp_log_limit_pass(&limit, kvp_clock_mono_ns(), 10000000000ull, &left))
		KVP_LOG_W("extproc.tokenizer", "reason=%s suppressed=%llu", t->detail,
			(unsigned long long)left);
}

static void on_tokens(void *ctx, const struct kvp_tkz_answer *t)
{
	struct kvp_job *j = ctx;
	say_unreachable(t);
	j->call = NULL;
	kvp_hist_add(j->x->boot.ctr, t->status == 200 ? KVP_HIST_EPP_TOK_OK_NS : KVP_HIST_EPP_TOK_BAD_NS,
		t->took_ns);
	j->by_length = t->end == KVP_TKZ_UNSERVED;
	if (j->is_timed)
		kvp_ctr_add(j->x->boot.ctr, KVP_CTR_EPP_TIMED_JSON_NS, t->parse_ns);
	if (t->status != 200)
		kvp_epp_refuse(j, KVP_CTR_EPP_TOKENIZER, t->status, t->text);
	else
		kvp_epp_choose(j, &t->tokens);
}

static void tokenize(struct kvp_job *j, enum kvp_tkz_what what)
{
	struct kvp_epp *x = j->x;
	if (!x->tkz) {
		j->by_length = 1;
		kvp_epp_choose(j, NULL);
		return;
	}
	if (kvp_tkz_start(x->tkz, what, j->pick.body, j->pick.body_len, on_tokens, j, &j->call) == KVP_OK)
		return;
	j->call = NULL;
	kvp_epp_refuse(j, KVP_CTR_EPP_INTERNAL, 500, "out of memory");
}

int kvp_epp_read_head(struct kvp_job *j, const struct kvp_extproc_header *header, uint32_t cnt)
{
	struct kvp_ask_field *f = calloc(cnt + 1, sizeof(*f));
	if (!f) {
		snprintf(j->ask.err, sizeof(j->ask.err), "out of memory");
		return 500;
	}
	for (uint32_t i = 0; i < cnt; i++) {
		const struct kvp_extproc_header *h = &header[i];
		f[i] = (struct kvp_ask_field){{h->key.p, h->key.len}, {h->value.p, h->value.len}};
	}
	int status = kvp_ask_head(&j->x->parser, f, cnt, &j->ask);
	free(f);
	return status;
}

/* any_worker answers a request without a body: some worker, nothing booked, nobody prefills. */
static void any_worker(struct kvp_job *j, const uint64_t *ids, uint32_t cnt)
{
	char to[KVP_POOL_TEXT];
	const struct kvp_pool_member *m = kvp_pool_any(&j->x->pool[KVP_PLAN_MAIN], ids, cnt);
	if (!m || !kvp_pool_destination(m, m->start_rank, j->x->ports[KVP_PLAN_MAIN], to, sizeof(to))) {
		kvp_epp_refuse(j, KVP_CTR_EPP_NO_ENDPOINT, 503, no_endpoints);
		return;
	}
	kvp_epp_count(j->x, KVP_CTR_EPP_UNBOOKED);
	done(j, &(struct kvp_pick_answer){.status = 200, .destination = {to, (uint32_t)strlen(to)}});
}

void kvp_epp_pick(void *ctx, const struct kvp_pick_ask *ask)
{
	struct kvp_job *j = ctx;
	struct kvp_epp *x = j->x;
	struct kvp_pick_answer none;
	const uint64_t *ids;
	uint32_t cnt;
	j->pick = *ask;
	j->pick_ns = kvp_clock_mono_ns();
	kvp_timer_cancel(x->loop, &j->body_timer);
	if (admit_check(j, &none)) {
		done(j, &none);
		return;
	}
	if (allow(j, KVP_PLAN_MAIN, &ids, &cnt)) {
		kvp_epp_refuse(j, KVP_CTR_EPP_INTERNAL, 500, "out of memory");
		return;
	}
	if (ids && !cnt) {
		kvp_epp_refuse(j, KVP_CTR_EPP_SUBSET, 503, no_endpoints);
		return;
	}
	uint64_t from = kvp_stage_now(j->is_timed);
	int status = kvp_epp_read_head(j, ask->header, ask->header_cnt);
	if (status) {
		kvp_epp_refuse(j, status == 431 ? KVP_CTR_EPP_HEADERS_REFUSED : KVP_CTR_EPP_INTERNAL, status,
			j->ask.err);
		return;
	}
	status = kvp_ask_body(&x->parser, &j->ask, ask->body, ask->body_len);
	kvp_stage_add(x->boot.ctr, KVP_CTR_EPP_TIMED_JSON_NS, from);
	if (status) {
		kvp_epp_refuse(j, KVP_CTR_EPP_BODY_REFUSED, status, j->ask.err);
		return;
	}
	switch (j->ask.source) {
	case KVP_ASK_NO_BODY:
		any_worker(j, ids, cnt);
		break;
	case KVP_ASK_RENDER_CHAT:
		tokenize(j, KVP_TKZ_CHAT);
		break;
	case KVP_ASK_RENDER_COMPLETIONS:
		tokenize(j, KVP_TKZ_COMPLETIONS);
		break;
	default:
		kvp_epp_choose(j, NULL);
		break;
	}
}
