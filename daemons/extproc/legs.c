/* The bookings of a request: one leg or two, each through its selector, waiting included. */
#include "daemons/extproc/extproc.h"

#include <stdio.h>
#include <string.h>

#define ASK_MAX 8 /* parked legs asked again a turn: others are served in between */

static enum kvp_plan_leg which(const struct kvp_leg *l)
{
	return (enum kvp_plan_leg)(l - l->job->leg);
}

static const char *no_endpoints_for(const struct kvp_leg *l)
{
	return l->job->way == KVP_EPP_AGGREGATED ? "no endpoints available" : kvp_epp_no_endpoints[which(l)];
}

/* ---- waiting ---- */

static struct kvp_leg **bucket(struct kvp_epp *x, uint64_t ticket)
{
	return &x->by_ticket[(uint32_t)ticket % KVP_EPP_BUCKETS];
}

static void unqueue(struct kvp_leg *l)
{
	struct kvp_epp *x = l->job->x;
	struct kvp_leg **at = bucket(x, l->ticket);
	while (*at != l)
		at = &(*at)->chain;
	*at = l->chain;
	l->wait = KVP_LEG_STILL;
	x->queued_cnt--;
}

static void unpark(struct kvp_leg *l)
{
	*l->parkp = l->park;
	if (l->park)
		l->park->parkp = l->parkp;
	l->parkp = NULL;
	l->wait = KVP_LEG_STILL;
}

static void on_deadline(void *ctx, struct kvp_timer *t)
{
	struct kvp_job *j = ctx;
	(void)t;
	kvp_plan_late(&j->plan);
}

/* keep_time starts the one deadline of all legs with the first that waits. */
static void keep_time(struct kvp_job *j)
{
	uint64_t limit_ms = j->x->boot.config->epp_selection_deadline_ms;
	if (limit_ms && !j->deadline.pos)
		kvp_timer_set(j->x->loop, &j->deadline, j->select_ns + limit_ms * 1000000, on_deadline, j);
}

static void on_retry(void *ctx, struct kvp_timer *t);

static void set_retry(struct kvp_epp *x)
{
	kvp_timer_set(
		x->loop, &x->retry, kvp_loop_now_ns(x->loop) + KVP_SLEEP_MAX_MS * 1000000ull, on_retry, x);
}

static void on_retry(void *ctx, struct kvp_timer *t)
{
	struct kvp_epp *x = ctx;
	(void)t;
	x->looks = 1;
	kvp_epp_retry(x);
	if (x->parked)
		set_retry(x);
}

static void queue(struct kvp_leg *l, uint64_t ticket)
{
	struct kvp_epp *x = l->job->x;
	struct kvp_leg **b = bucket(x, ticket);
	l->wait = KVP_LEG_QUEUED;
	l->ticket = ticket;
	l->chain = *b;
	*b = l;
	x->queued_cnt++;
	kvp_epp_count(x, KVP_CTR_EPP_QUEUED);
	keep_time(l->job);
}

static void park(struct kvp_leg *l)
{
	struct kvp_epp *x = l->job->x;
	struct kvp_leg **end = &x->parked;
	while (*end)
		end = &(*end)->park;
	l->wait = KVP_LEG_PARKED;
	l->park = NULL;
	l->parkp = end;
	*end = l;
	l->met = kvp_select_waits_for(x->selection);
	set_retry(x);
	keep_time(l->job);
}

/* ---- the answer of a selector ---- */

static void fail(struct kvp_leg *l, enum kvp_ctr why, int status, const char *text)
{
	l->why = why;
	l->status = status;
	l->text = text;
	kvp_plan_failed(&l->job->plan, which(l));
}

/* fail_busy: a class that may not wait at all is shed; one that may has filled its queue. */
static void fail_busy(struct kvp_leg *l)
{
	const struct kvp_select_refusal *r = kvp_selection_refusal(l->job->x->selection);
	if (r && r->limit)
		fail(l, KVP_CTR_EPP_QUEUE_FULL, 429, "router queue limit reached");
	else
		fail(l, KVP_CTR_EPP_BUSY, 429, "all eligible workers are overloaded");
}

/* adopt takes a booking over: from here on it is the plan's. */
static void adopt(struct kvp_leg *l, const struct kvp_select_answer *got)
{
	struct kvp_epp *x = l->job->x;
	struct kvp_pool *pool = &x->pool[which(l)];
	uint32_t len = (uint32_t)got->selection_id.len;
	if (len >= KVP_EPP_ID_MAX - 4) {
		kvp_selection_free(x->selection, got->selection_id);
		fail(l, KVP_CTR_EPP_INTERNAL, 500, "internal routing error");
		return;
	}
	memcpy(l->id, got->selection_id.ptr, len);
	l->id_len = len;
	l->worker_id = got->worker_id;
	l->dp_rank = got->dp_rank;
	l->isl_tok = got->isl_tok;
	l->block_size = got->block_size;
	l->predicted_tok = got->overlap.longest_matched_tok;
	kvp_pool_refresh(pool);
	const struct kvp_pool_member *m = kvp_pool_worker(pool, l->worker_id);
	if (!m || !kvp_pool_destination(m, l->dp_rank, x->ports[which(l)], l->to, sizeof(l->to))) {
		kvp_epp_free_id(x, l->id, l->id_len);
		l->id_len = 0;
		fail(l, KVP_CTR_EPP_VANISHED, 503, no_endpoints_for(l));
		return;
	}
	l->rank_cnt = m->rank_cnt;
	kvp_epp_booked(l);
	kvp_plan_booked(&l->job->plan, which(l));
}

static void settle(struct kvp_leg *l, int status, const struct kvp_select_answer *got)
{
	switch (status) {
	case 200:
		adopt(l, got);
		break;
	case 400:
		fail(l, KVP_CTR_EPP_NOT_ROUTABLE, 400, "request is not routable");
		break;
	case 409:
		fail(l, KVP_CTR_EPP_CONFLICT, 409, "reservation conflict");
		break;
	case 429:
		fail_busy(l);
		break;
	case 503:
		fail(l, KVP_CTR_EPP_NO_ENDPOINT, 503, no_endpoints_for(l));
		break;
	default:
		fail(l, KVP_CTR_EPP_INTERNAL, 500, "internal routing error");
		break;
	}
}

/* ---- asking a selector ---- */

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

/* specialize makes the request that of a leg. */
static void specialize(struct kvp_leg *l, struct kvp_select_request *q, char id[KVP_EPP_ID_MAX])
{
	struct kvp_job *j = l->job;
	if (j->way == KVP_EPP_AGGREGATED)
		return;
	int n = snprintf(
		id, KVP_EPP_ID_MAX, "%s/%s", j->plan_id, which(l) == KVP_PLAN_PREFILL ? "prefill" : "decode");
	q->selection_id = (struct kvp_str){id, (size_t)n};
	if (j->way == KVP_EPP_REMOTE && which(l) == KVP_PLAN_MAIN) {
		kvp_epp_override_decode(&q->override);
	} else if (j->way == KVP_EPP_PINNED) {
		q->has_pinned = q->binds_pinned = KVP_YES;
		q->pinned_worker_id = j->pinned_worker_id;
		q->pinned_dp_rank = j->pinned_dp_rank;
	}
}

/* may_ask_again: after this answer the prompt may be needed once more. With roles always: the plan may begin
 * anew. */
static int may_ask_again(const struct kvp_job *j, int status)
{
	return status == KVP_SELECTION_WAIT || j->way != KVP_EPP_AGGREGATED ||
	       j->x->boot.config->epp_fallback_endpoints;
}

static void ask(struct kvp_leg *l)
{
	struct kvp_job *j = l->job;
	struct kvp_epp *x = j->x;
	const struct kvp_ask_tokens *t = x->tokens ? x->tokens : kvp_epp_kept(j);
	struct kvp_select_request q;
	struct kvp_select_answer got;
	uint64_t ticket = 0;
	char id[KVP_EPP_ID_MAX];
	int status = kvp_epp_request(j, which(l), t, &q);
	if (status) {
		fail(l, KVP_CTR_EPP_INTERNAL, 500, "out of memory");
		return;
	}
	specialize(l, &q, id);
	q.no_wait = kvp_clock_mono_ns() - j->select_ns > KVP_EPP_SESSION_WAIT_NS ? KVP_YES : KVP_NO;
	status = submit(j, &q, &got, &ticket);
	int waits = status == KVP_SELECT_WAITS || status == KVP_SELECTION_WAIT;
	/* Without memory a prompt that is asked for again counts by its length alone. */
	if (waits && may_ask_again(j, status) && !kvp_epp_keep_tokens(j, t))
		j->by_length = 1;
	x->asked = &q;
	if (status == KVP_SELECT_WAITS)
		queue(l, ticket);
	else if (status == KVP_SELECTION_WAIT)
		park(l);
	else
		settle(l, status, &got);
	x->asked = NULL;
}

/* ---- what the plan wants done ---- */

static void on_book(void *ctx, enum kvp_plan_leg leg)
{
	ask(&((struct kvp_job *)ctx)->leg[leg]);
}

static void on_cancel(void *ctx, enum kvp_plan_leg leg)
{
	struct kvp_leg *l = &((struct kvp_job *)ctx)->leg[leg];
	if (l->wait == KVP_LEG_QUEUED) {
		unqueue(l);
		kvp_selection_cancel(l->job->x->selection, l->ticket);
	} else if (l->wait == KVP_LEG_PARKED) {
		unpark(l);
	}
}

/* on_holds: the worker is there under the same address, and with it the booking. */
static int on_holds(void *ctx, enum kvp_plan_leg leg)
{
	struct kvp_job *j = ctx;
	struct kvp_epp *x = j->x;
	struct kvp_leg *l = &j->leg[leg];
	char now[KVP_POOL_TEXT];
	if (j->plan.form == KVP_PLAN_LOCAL)
		return 1; /* it was looked at just now */
	kvp_pool_refresh(&x->pool[leg]);
	const struct kvp_pool_member *m = kvp_pool_worker(&x->pool[leg], l->worker_id);
	return m && kvp_pool_destination(m, l->dp_rank, x->ports[leg], now, sizeof(now)) &&
	       strcmp(now, l->to) == 0 &&
	       kvp_resv_renew(&x->boot.region->book, l->booking, kvp_loop_now_ns(x->loop)) == KVP_OK;
}

static void on_free(void *ctx, enum kvp_plan_leg leg)
{
	struct kvp_job *j = ctx;
	if (j->plan.state == KVP_PLAN_ABORTED)
		kvp_epp_count(j->x, KVP_CTR_EPP_PLAN_UNDONE);
	else if (j->plan.state == KVP_PLAN_DECODING && leg == KVP_PLAN_PREFILL)
		kvp_epp_count(j->x, KVP_CTR_EPP_PLAN_HANDOFF);
	kvp_epp_free_leg(&j->leg[leg]);
}

static void on_prefilled(void *ctx)
{
	kvp_epp_leg_prefilled(kvp_epp_main(ctx));
}

static void on_publish(void *ctx)
{
	static const enum kvp_ctr action[] = {[KVP_EPP_REMOTE] = KVP_CTR_EPP_PLAN_REMOTE,
		[KVP_EPP_PINNED] = KVP_CTR_EPP_PLAN_LOCAL,
		[KVP_EPP_LOCAL] = KVP_CTR_EPP_PLAN_FALLBACK,
		[KVP_EPP_DECODE_ONLY] = KVP_CTR_EPP_PLAN_DECODE_ONLY};
	struct kvp_job *j = ctx;
	kvp_hist_add(j->x->boot.ctr, KVP_HIST_EPP_SEL_OK_NS, kvp_clock_mono_ns() - j->select_ns);
	if (kvp_epp_is_one_place(j))
		kvp_epp_count(j->x, KVP_CTR_EPP_PLAN_ONE_PLACE);
	else if (j->way != KVP_EPP_AGGREGATED)
		kvp_epp_count(j->x, action[j->way]);
	kvp_epp_answer(j);
}

static void begin(struct kvp_job *j, enum kvp_epp_way way);

/* may_restart: the leg's worker went between its booking and the answer, and it is the first time. Who had to
 * wait without roles has not kept his prompt. */
static int may_restart(const struct kvp_job *j, enum kvp_plan_fault fault, enum kvp_plan_leg leg)
{
	if (fault == KVP_PLAN_LATE || (fault == KVP_PLAN_FAILED && j->leg[leg].why != KVP_CTR_EPP_VANISHED))
		return 0;
	return !j->is_restarted && (j->way != KVP_EPP_AGGREGATED || j->x->asked);
}

/* goes_on begins another plan where one may follow: 1. A decode worker that could not be pinned gives way to
 * a pair, or to another one that prefills where nobody else shall; a plan that lost a worker begins anew,
 * once; a prefill worker that is not there, or not free, is done without where that is allowed. */
static int goes_on(struct kvp_job *j, enum kvp_plan_fault fault, enum kvp_plan_leg leg)
{
	int status = j->leg[leg].status;
	if (j->way == KVP_EPP_PINNED && fault == KVP_PLAN_FAILED) {
		const struct kvp_cond_cfg *cond = &j->x->cond;
		int is_never = cond->policy == KVP_COND_BY_NON_CACHED && !cond->non_cached_tok;
		begin(j, is_never ? KVP_EPP_LOCAL : KVP_EPP_REMOTE);
		return 1;
	}
	if (may_restart(j, fault, leg)) {
		j->is_restarted = 1;
		kvp_epp_count(j->x, KVP_CTR_EPP_PLAN_RESTARTED);
		begin(j, j->way);
		return 1;
	}
	if (j->way != KVP_EPP_REMOTE || leg != KVP_PLAN_PREFILL || j->x->boot.config->enforce_disagg)
		return 0;
	if (fault == KVP_PLAN_FAILED && status != 503 && status != 429)
		return 0;
	begin(j, KVP_EPP_LOCAL);
	if (fault == KVP_PLAN_LATE) /* the time is over for this one, too, unless it was there at once */
		kvp_plan_late(&j->plan);
	return 1;
}

static void on_refuse(void *ctx, enum kvp_plan_fault fault, enum kvp_plan_leg leg)
{
	struct kvp_job *j = ctx;
	const struct kvp_leg *l = &j->leg[leg];
	if (goes_on(j, fault, leg))
		return;
	kvp_hist_add(j->x->boot.ctr, KVP_HIST_EPP_SEL_BAD_NS, kvp_clock_mono_ns() - j->select_ns);
	if (fault == KVP_PLAN_FAILED)
		kvp_epp_refuse(j, l->why, l->status, l->text);
	else if (fault == KVP_PLAN_LATE)
		kvp_epp_refuse(j, KVP_CTR_EPP_DEADLINE, 429, "no worker became free in time");
	else
		kvp_epp_refuse(j, KVP_CTR_EPP_VANISHED, 503, no_endpoints_for(l));
}

static const struct kvp_plan_ops plan_ops = {.book = on_book,
	.cancel = on_cancel,
	.holds = on_holds,
	.free = on_free,
	.prefill_done = on_prefilled,
	.publish = on_publish,
	.refuse = on_refuse};

static void begin(struct kvp_job *j, enum kvp_epp_way way)
{
	struct kvp_epp *x = j->x;
	enum kvp_plan_form form = way != KVP_EPP_REMOTE		   ? KVP_PLAN_LOCAL
				  : x->by_domain == KVP_DOMAIN_OFF ? KVP_PLAN_PAIR
								   : KVP_PLAN_CHAIN;
	j->way = way;
	for (int i = 0; i < KVP_PLAN_LEGS; i++)
		j->leg[i].job = j;
	/* Each attempt is a plan of its own: replicas take a used id for a repetition. */
	if (way != KVP_EPP_AGGREGATED)
		kvp_selection_new_id(j->plan_id);
	kvp_plan_begin(&j->plan, &plan_ops, j, form,
		form == KVP_PLAN_PAIR && x->pair_turn++ % 2 ? KVP_PLAN_PREFILL : KVP_PLAN_MAIN);
}

/* ---- who prefills ---- */

/* preview chooses for a leg without booking: 200, or another status. */
static int preview(struct kvp_job *j, enum kvp_plan_leg leg, const struct kvp_ask_tokens *t,
	struct kvp_select_answer *got)
{
	struct kvp_select_request q;
	int status = kvp_epp_request(j, leg, t, &q);
	if (status)
		return status;
	q.advisory = KVP_YES;
	return kvp_selection_select(j->x->selection, &q, got);
}

static uint32_t device_tokens(const struct kvp_select_answer *a)
{
	for (uint32_t i = 0; i < a->overlap.dp_cnt; i++)
		if (a->overlap.dp_rank[i] == a->dp_rank)
			return a->overlap.dp_tok[i];
	return 0;
}

enum kvp_tristate kvp_epp_is_hit_known(const struct kvp_job *j)
{
	int is_read = !j->by_length && j->ask.source != KVP_ASK_LOAD_ONLY;
	return is_read && j->x->boot.config->eff.overlap_score_credit != 0 ? KVP_YES : KVP_NO;
}

/* who_prefills asks whether the decode worker that would be chosen had better prefill itself. Of one that
 * can't be previewed nothing is known: by default that is remote. */
static enum kvp_epp_way who_prefills(struct kvp_job *j, const struct kvp_ask_tokens *t)
{
	struct kvp_epp *x = j->x;
	struct kvp_select_answer got;
	if (preview(j, KVP_PLAN_MAIN, t, &got) != 200)
		return x->cond.policy == KVP_COND_BY_NON_CACHED ? KVP_EPP_LOCAL : KVP_EPP_REMOTE;
	struct kvp_cond_in in = {.isl_tok = got.isl_tok,
		.hit_tok = device_tokens(&got),
		.is_hit_known = kvp_epp_is_hit_known(j),
		.prefill_busy = KVP_UNSET,
		.decode_busy = got.decode_busy};
	j->pinned_worker_id = got.worker_id;
	j->pinned_dp_rank = got.dp_rank;
	if (kvp_cond_needs_load(x->cond.policy) && preview(j, KVP_PLAN_PREFILL, t, &got) == 200)
		in.prefill_busy = kvp_score_prefill_busy(got.worker_load.active_prefill_tok,
			x->boot.config->eff.prefill_busy_threshold, got.worker_load.prefill_capacity_tok);
	enum kvp_cond_verdict v = kvp_cond_decide(&x->cond, &in);
	if (v == KVP_COND_VETOED)
		kvp_epp_count(x, KVP_CTR_EPP_PLAN_VETOED);
	return v == KVP_COND_LOCAL ? KVP_EPP_PINNED : KVP_EPP_REMOTE;
}

void kvp_epp_choose(struct kvp_job *j, const struct kvp_ask_tokens *t)
{
	struct kvp_epp *x = j->x;
	enum kvp_epp_way way = KVP_EPP_AGGREGATED;
	j->select_ns = kvp_clock_mono_ns();
	if (x->boot.config->eff.disaggregated)
		way = !j->may_pair			 ? KVP_EPP_DECODE_ONLY
		      : x->cond.policy != KVP_COND_NEVER ? who_prefills(j, t)
							 : KVP_EPP_REMOTE;
	j->is_restarted = 0;
	x->tokens = t;
	begin(j, way);
	x->tokens = NULL;
}

/* ---- turns ---- */

/* A parked leg is asked again when the booking that it met is done, or after too long: a prompt is long, and
 * its client's choice. */
static struct kvp_leg *due(struct kvp_epp *x)
{
	uint64_t now_ns = kvp_clock_mono_ns();
	for (struct kvp_leg *l = x->parked; l; l = l->park)
		if (now_ns - l->job->select_ns > KVP_EPP_SESSION_WAIT_NS ||
			!kvp_select_is_met(x->selection, l->met))
			return l;
	return NULL;
}

int kvp_epp_retry(struct kvp_epp *x)
{
	struct kvp_leg *l;
	int ran = 0;
	if (!x->parked)
		return 0;
	int ended = kvp_select_note(x->selection);
	if (!ended && !x->looks)
		return 0;
	for (; ran < ASK_MAX && (l = due(x)); ran++) {
		unpark(l);
		ask(l);
	}
	x->looks = ran == ASK_MAX; /* at the others */
	return ran > 0;
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
		struct kvp_leg *l = *bucket(x, ticket);
		while (l && l->ticket != ticket)
			l = l->chain;
		int status = l ? kvp_selection_collect(x->selection, ticket, &got) : KVP_SELECT_WAITS;
		if (status == KVP_SELECT_WAITS)
			continue;
		unqueue(l);
		kvp_hist_add(x->boot.ctr, KVP_HIST_EPP_QUEUE_NS, kvp_clock_mono_ns() - l->job->select_ns);
		settle(l, status, &got);
		any = 1;
	}
	return any;
}
