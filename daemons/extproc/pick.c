/* From a complete request to its worker: checks in their order, tokenizer, selection, waiting. */
#include "daemons/extproc/extproc.h"
#include "daemons/common/log.h"
#include "ipc/json_in.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *const no_endpoints = "no endpoints available";

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

static struct kvp_job **bucket(struct kvp_epp *x, uint64_t ticket)
{
	return &x->by_ticket[(uint32_t)ticket % KVP_EPP_BUCKETS];
}

static void unqueue(struct kvp_job *j)
{
	struct kvp_job **at = bucket(j->x, j->ticket);
	while (*at != j)
		at = &(*at)->chain;
	*at = j->chain;
	j->x->queued_cnt--;
}

static void unpark(struct kvp_job *j)
{
	*j->parkp = j->park;
	if (j->park)
		j->park->parkp = j->parkp;
	j->parkp = NULL;
}

/* leave ends whatever a pick waits for. */
static void leave(struct kvp_job *j)
{
	struct kvp_epp *x = j->x;
	enum kvp_job_state was = j->state;
	j->state = KVP_JOB_IDLE;
	kvp_timer_cancel(x->loop, &j->deadline);
	if (was == KVP_JOB_TOKENIZING) {
		kvp_tkz_cancel(j->call);
		j->call = NULL;
	} else if (was == KVP_JOB_QUEUED) {
		unqueue(j);
		kvp_selection_cancel(x->selection, j->ticket);
	} else if (was == KVP_JOB_PARKED) {
		unpark(j);
	}
}

static void done(struct kvp_job *j, const struct kvp_pick_answer *a)
{
	forget_tokens(j);
	give_permit(j);
	kvp_hist_add(j->x->boot.ctr, KVP_HIST_EPP_PICK_NS, kvp_clock_mono_ns() - j->pick_ns);
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

static void refuse(struct kvp_job *j, enum kvp_ctr why, int status, const char *text)
{
	struct kvp_pick_answer a = {.status = status, .text = text};
	if (status == 429)
		a.retry_after_s = j->x->boot.config->epp_shed_retry_after_secs;
	kvp_epp_count(j->x, why);
	kvp_epp_log_refusal(j, stage_of(why), status, code_of(why, status));
	done(j, &a);
}

/* admit_check: 0, or a refusal: nothing can be picked at all. */
static int admit_check(struct kvp_epp *x, struct kvp_pick_answer *a)
{
	kvp_pool_refresh(&x->pool);
	*a = (struct kvp_pick_answer){.status = 503, .text = no_endpoints};
	if (x->boot.config->eff.discovery_on && !kvp_gate_is_open(&x->boot.region->gates, KVP_GATE_WORKERS)) {
		a->text = "pod reflector cache not ready";
		kvp_epp_count(x, KVP_CTR_EPP_UNDISCOVERED);
		return 1;
	}
	if (x->pool.cnt && !kvp_recov_is_shut(&x->boot.region->recov))
		return 0;
	kvp_epp_count(x, KVP_CTR_EPP_NO_ENDPOINT);
	return 1;
}

int kvp_epp_admit(void *ctx, struct kvp_pick_answer *a)
{
	struct kvp_job *j = ctx;
	struct kvp_epp *x = j->x;
	if (admit_check(x, a))
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
	leave(j);
	forget_tokens(j);
	give_permit(j);
}

/* ---- what the selection is asked ---- */

static uint32_t block_size_of(const struct kvp_epp *x)
{
	struct kvp_part_fixed f;
	uint32_t part;
	if (kvp_cat_part_find(&x->boot.region->cat, KVP_PART_AGGREGATED, x->pool.model.ptr,
		    (uint32_t)x->pool.model.len, x->pool.group.ptr, (uint32_t)x->pool.group.len, &part) ||
		kvp_cat_part_get(&x->boot.region->cat, part, &f))
		return 0;
	return f.block_size;
}

static const struct kvp_ask_tokens *kept_of(const struct kvp_job *j)
{
	return j->is_rendered ? &j->kept : NULL;
}

/* request_of makes the request of the selection; t as in choose. Its prompt lies in the parser: valid until
 * the next one is made. */
static int request_of(struct kvp_job *j, const struct kvp_ask_tokens *t, struct kvp_select_request *q)
{
	struct kvp_epp *x = j->x;
	uint64_t from = kvp_stage_now(j->is_timed);
	int status = 0;
	if (j->by_length)
		kvp_ask_load_only(&j->ask, &q->prompt);
	else
		status = kvp_ask_prompt(
			&x->parser, &j->ask, j->pick.body, j->pick.body_len, t, block_size_of(x), &q->prompt);
	kvp_stage_add(x->boot.ctr, KVP_CTR_EPP_TIMED_HASH_NS, from);
	if (status || kvp_pool_refresh(&x->pool) ||
		kvp_pool_allow(&x->pool, j->pick.subset_hint, j->pick.subset, j->pick.subset_cnt,
			&q->allowed_worker_id, &q->allowed_cnt))
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
	const uint32_t *rank = x->boot.config->epp_dp_routing == KVP_DP_HEADER ? &j->dp_rank : NULL;
	struct kvp_runner_up next[KVP_EPP_FALLBACK_MAX];
	uint32_t cnt = kvp_selection_runners_up(x->selection, q, j->worker_id, rank, next,
		(uint32_t)x->boot.config->epp_fallback_endpoints);
	size_t len = strlen(to);
	for (uint32_t i = 0; i < cnt; i++) {
		const struct kvp_pool_member *m = kvp_pool_worker(&x->pool, next[i].worker_id);
		if (!m || cap - len < KVP_POOL_TEXT + 1 ||
			!kvp_pool_destination(m, next[i].dp_rank, x->ports, to + len + 1, cap - len - 1))
			continue;
		to[len] = ',';
		len += 1 + strlen(to + len + 1);
		kvp_epp_count(x, KVP_CTR_EPP_FALLBACKS);
	}
	to[len] = 0;
}

/* q: the request as it was selected for; NULL: it waited, and is made anew where it is needed. */
static void adopt(struct kvp_job *j, const struct kvp_select_request *q, const struct kvp_select_answer *got)
{
	struct kvp_epp *x = j->x;
	struct kvp_pick_answer a = {.status = 200, .has_booking = 1};
	char to[KVP_POOL_TEXT * (1 + KVP_EPP_FALLBACK_MAX)], rank[16];
	struct kvp_select_request again = {.role = KVP_PART_AGGREGATED, .override = KVP_EPP_NO_OVERRIDE};
	uint32_t len = (uint32_t)got->selection_id.len;
	if (len >= KVP_EPP_ID_MAX - 4) {
		kvp_selection_free(x->selection, got->selection_id);
		refuse(j, KVP_CTR_EPP_INTERNAL, 500, "internal routing error");
		return;
	}
	memcpy(j->id, got->selection_id.ptr, len);
	j->id_len = len;
	j->worker_id = got->worker_id;
	j->dp_rank = got->dp_rank;
	j->isl_tok = got->isl_tok;
	j->block_size = got->block_size;
	kvp_pool_refresh(&x->pool);
	const struct kvp_pool_member *m = kvp_pool_worker(&x->pool, j->worker_id);
	if (!m || !kvp_pool_destination(m, j->dp_rank, x->ports, to, sizeof(to))) {
		kvp_epp_free_id(x, j->id, j->id_len);
		j->id_len = 0;
		refuse(j, KVP_CTR_EPP_VANISHED, 503, no_endpoints);
		return;
	}
	j->predicted_tok = got->overlap.longest_matched_tok;
	if (x->boot.config->epp_fallback_endpoints && (q || !request_of(j, kept_of(j), &again)))
		add_fallbacks(j, q ? q : &again, to, sizeof(to));
	a.destination = (struct kvp_extproc_str){to, (uint32_t)strlen(to)};
	if (x->boot.config->epp_dp_routing == KVP_DP_HEADER) {
		int n = snprintf(rank, sizeof(rank), "%u", j->dp_rank);
		a.extra[a.extra_cnt++] = (struct kvp_extproc_header){
			KVP_EXTPROC_STR("x-data-parallel-rank"), {rank, (uint32_t)n}};
	}
	if (x->boot.config->epp_cache_salt_forwarding) {
		uint64_t n = 0;
		if (kvp_ask_salted(&x->parser, &j->ask, j->pick.body, j->pick.body_len, &j->salted, &n) ==
			KVP_OK)
			a.body = (struct kvp_extproc_str){j->salted, (uint32_t)n};
	}
	kvp_epp_booked(j);
	kvp_epp_count(x, KVP_CTR_EPP_BOOKED);
	kvp_hist_add(x->boot.ctr, KVP_HIST_EPP_ISL, j->isl_tok);
	kvp_hist_add(x->boot.ctr, KVP_HIST_EPP_REQUEST_BYTES, j->pick.body_len);
	if (j->isl_tok)
		kvp_hist_add(x->boot.ctr, KVP_HIST_EPP_OVERLAP_PCT, 100 * j->predicted_tok / j->isl_tok);
	kvp_ctr_add(x->boot.ctr, KVP_CTR_EPP_PREDICTED_TOK, j->predicted_tok);
	done(j, &a);
}

/* refuse_busy: a class that may not wait at all is shed; one that may has filled its queue. */
static void refuse_busy(struct kvp_job *j)
{
	const struct kvp_select_refusal *r = kvp_selection_refusal(j->x->selection);
	if (r && r->limit)
		refuse(j, KVP_CTR_EPP_QUEUE_FULL, 429, "router queue limit reached");
	else
		refuse(j, KVP_CTR_EPP_BUSY, 429, "all eligible workers are overloaded");
}

/* settle turns the answer of the selection into the stream's. */
static void settle(struct kvp_job *j, const struct kvp_select_request *q, int status,
	const struct kvp_select_answer *got)
{
	kvp_timer_cancel(j->x->loop, &j->deadline);
	j->state = KVP_JOB_IDLE;
	kvp_hist_add(j->x->boot.ctr, status == 200 ? KVP_HIST_EPP_SEL_OK_NS : KVP_HIST_EPP_SEL_BAD_NS,
		kvp_clock_mono_ns() - j->select_ns);
	switch (status) {
	case 200:
		adopt(j, q, got);
		break;
	case 400:
		refuse(j, KVP_CTR_EPP_NOT_ROUTABLE, 400, "request is not routable");
		break;
	case 409:
		refuse(j, KVP_CTR_EPP_CONFLICT, 409, "reservation conflict");
		break;
	case 429:
		refuse_busy(j);
		break;
	case 503:
		refuse(j, KVP_CTR_EPP_NO_ENDPOINT, 503, no_endpoints);
		break;
	default:
		refuse(j, KVP_CTR_EPP_INTERNAL, 500, "internal routing error");
		break;
	}
}

static void on_deadline(void *ctx, struct kvp_timer *t)
{
	struct kvp_job *j = ctx;
	(void)t;
	leave(j);
	kvp_hist_add(j->x->boot.ctr, KVP_HIST_EPP_SEL_BAD_NS, kvp_clock_mono_ns() - j->select_ns);
	refuse(j, KVP_CTR_EPP_DEADLINE, 429, "no worker became free in time");
}

/* ---- selection ---- */

/* keep_tokens copies a tokenizer's answer for a request that has to be tried again. */
static int keep_tokens(struct kvp_job *j, const struct kvp_ask_tokens *t)
{
	if (!t || t == &j->kept)
		return 1;
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

static void on_retry(void *ctx, struct kvp_timer *t)
{
	(void)t;
	kvp_epp_retry(ctx);
}

static void park(struct kvp_job *j, const struct kvp_ask_tokens *t)
{
	struct kvp_epp *x = j->x;
	if (!keep_tokens(j, t)) {
		refuse(j, KVP_CTR_EPP_INTERNAL, 500, "out of memory");
		return;
	}
	struct kvp_job **end = &x->parked;
	while (*end)
		end = &(*end)->park;
	j->state = KVP_JOB_PARKED;
	j->park = NULL;
	j->parkp = end;
	*end = j;
	kvp_timer_set(
		x->loop, &x->retry, kvp_loop_now_ns(x->loop) + KVP_SLEEP_MAX_MS * 1000000ull, on_retry, x);
}

static void queue(struct kvp_job *j, const struct kvp_ask_tokens *t, uint64_t ticket)
{
	/* Fallbacks are looked for when its turn has come; without memory, by load alone. */
	if (j->x->boot.config->epp_fallback_endpoints && !keep_tokens(j, t))
		j->by_length = 1;
	struct kvp_job **b = bucket(j->x, ticket);
	j->state = KVP_JOB_QUEUED;
	j->ticket = ticket;
	j->chain = *b;
	*b = j;
	j->x->queued_cnt++;
	kvp_epp_count(j->x, KVP_CTR_EPP_QUEUED);
}

static int submit(struct kvp_job *j, const struct kvp_select_request *q, struct kvp_select_answer *got,
	uint64_t *ticket)
{
	struct kvp_epp *x = j->x;
	struct kvp_ctr_column_shm *c = x->boot.ctr;
	struct kvp_select_times t = {0};
	uint64_t from = kvp_stage_now(j->is_timed);
	if (!j->is_timed)
		return kvp_selection_submit(x->selection, q, KVP_SELECT_AND_RESERVE, got, ticket);
	kvp_select_time(x->selection, &t);
	int status = kvp_selection_submit(x->selection, q, KVP_SELECT_AND_RESERVE, got, ticket);
	kvp_select_time(x->selection, NULL);
	uint64_t all_ns = kvp_stage_now(1) - from, inner_ns = t.hash_ns + t.book_ns;
	kvp_stage_sum(c, KVP_CTR_EPP_TIMED_SELECT_NS, all_ns > inner_ns ? all_ns - inner_ns : 0,
		1 + t.hash_cnt + t.book_cnt);
	kvp_stage_sum(c, KVP_CTR_EPP_TIMED_HASH_NS, t.hash_ns, t.hash_cnt);
	kvp_stage_sum(c, KVP_CTR_EPP_TIMED_BOOK_NS, t.book_ns, t.book_cnt);
	return status;
}

/* choose asks for a worker. t: the tokenizer's answer, NULL where there was no call. */
static void choose(struct kvp_job *j, const struct kvp_ask_tokens *t)
{
	struct kvp_epp *x = j->x;
	struct kvp_select_request q = {.role = KVP_PART_AGGREGATED, .override = KVP_EPP_NO_OVERRIDE};
	struct kvp_select_answer got;
	uint64_t ticket = 0, now = kvp_clock_mono_ns(), limit_ms = x->boot.config->epp_selection_deadline_ms;
	int status = request_of(j, t, &q);
	if (status) {
		refuse(j, KVP_CTR_EPP_INTERNAL, 500, "out of memory");
		return;
	}
	if (!j->select_ns)
		j->select_ns = now;
	q.no_wait = now - j->select_ns > KVP_EPP_SESSION_WAIT_NS ? KVP_YES : KVP_NO;
	status = submit(j, &q, &got, &ticket);
	if (status == KVP_SELECT_WAITS)
		queue(j, t, ticket);
	else if (status == KVP_SELECTION_WAIT)
		park(j, t);
	else
		settle(j, &q, status, &got);
	if ((status == KVP_SELECT_WAITS || status == KVP_SELECTION_WAIT) && limit_ms && j->state)
		kvp_timer_set(x->loop, &j->deadline, j->select_ns + limit_ms * 1000000, on_deadline, j);
}

int kvp_epp_retry(struct kvp_epp *x)
{
	struct kvp_job *list = x->parked;
	uint32_t cnt = 0, left = 0;
	for (struct kvp_job *j = list; j; j = j->park)
		cnt++;
	/* Those that have to wait on go to the end of the list. */
	for (uint32_t i = 0; i < cnt && x->parked; i++) {
		struct kvp_job *j = x->parked;
		unpark(j);
		j->state = KVP_JOB_IDLE;
		choose(j, kept_of(j));
	}
	for (struct kvp_job *j = x->parked; j; j = j->park)
		left++;
	return left < cnt;
}

int kvp_epp_poll(struct kvp_epp *x)
{
	struct kvp_select_answer got;
	uint64_t ticket;
	uint32_t cursor = 0;
	int any = 0;
	if (!x->queued_cnt)
		return 0;
	kvp_selection_tend(x->selection);
	while (x->queued_cnt && kvp_selection_next(x->selection, &cursor, &ticket)) {
		struct kvp_job *j = *bucket(x, ticket);
		while (j && j->ticket != ticket)
			j = j->chain;
		int status = j ? kvp_selection_collect(x->selection, ticket, &got) : KVP_SELECT_WAITS;
		if (status == KVP_SELECT_WAITS)
			continue;
		unqueue(j);
		kvp_hist_add(x->boot.ctr, KVP_HIST_EPP_QUEUE_NS, kvp_clock_mono_ns() - j->select_ns);
		settle(j, NULL, status, &got);
		any = 1;
	}
	return any;
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
	j->state = KVP_JOB_IDLE;
	j->call = NULL;
	kvp_hist_add(j->x->boot.ctr, t->status == 200 ? KVP_HIST_EPP_TOK_OK_NS : KVP_HIST_EPP_TOK_BAD_NS,
		t->took_ns);
	j->by_length = t->end == KVP_TKZ_UNSERVED;
	if (j->is_timed)
		kvp_ctr_add(j->x->boot.ctr, KVP_CTR_EPP_TIMED_JSON_NS, t->parse_ns);
	if (t->status != 200)
		refuse(j, KVP_CTR_EPP_TOKENIZER, t->status, t->text);
	else
		choose(j, &t->tokens);
}

static void tokenize(struct kvp_job *j, enum kvp_tkz_what what)
{
	struct kvp_epp *x = j->x;
	if (!x->tkz) {
		j->by_length = 1;
		choose(j, NULL);
		return;
	}
	j->state = KVP_JOB_TOKENIZING;
	if (kvp_tkz_start(x->tkz, what, j->pick.body, j->pick.body_len, on_tokens, j, &j->call) == KVP_OK)
		return;
	j->state = KVP_JOB_IDLE;
	refuse(j, KVP_CTR_EPP_INTERNAL, 500, "out of memory");
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

/* any_worker answers a request without a body: some worker, nothing booked. */
static void any_worker(struct kvp_job *j, const uint64_t *ids, uint32_t cnt)
{
	char to[KVP_POOL_TEXT];
	const struct kvp_pool_member *m = kvp_pool_any(&j->x->pool, ids, cnt);
	if (!m || !kvp_pool_destination(m, m->start_rank, j->x->ports, to, sizeof(to))) {
		refuse(j, KVP_CTR_EPP_NO_ENDPOINT, 503, no_endpoints);
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
	if (admit_check(x, &none)) {
		done(j, &none);
		return;
	}
	if (kvp_pool_allow(&x->pool, ask->subset_hint, ask->subset, ask->subset_cnt, &ids, &cnt)) {
		refuse(j, KVP_CTR_EPP_INTERNAL, 500, "out of memory");
		return;
	}
	if (ids && !cnt) {
		refuse(j, KVP_CTR_EPP_SUBSET, 503, no_endpoints);
		return;
	}
	uint64_t from = kvp_stage_now(j->is_timed);
	int status = kvp_epp_read_head(j, ask->header, ask->header_cnt);
	if (status) {
		refuse(j, status == 431 ? KVP_CTR_EPP_HEADERS_REFUSED : KVP_CTR_EPP_INTERNAL, status,
			j->ask.err);
		return;
	}
	status = kvp_ask_body(&x->parser, &j->ask, ask->body, ask->body_len);
	kvp_stage_add(x->boot.ctr, KVP_CTR_EPP_TIMED_JSON_NS, from);
	if (status) {
		refuse(j, KVP_CTR_EPP_BODY_REFUSED, status, j->ask.err);
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
		choose(j, NULL);
		break;
	}
}
