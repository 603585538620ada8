/* What happens to a booking from the answer to its end, and what is counted of a stream. */
#include "daemons/extproc/extproc.h"
#include "daemons/common/log.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#define RENEWALS_A_LEASE 4
/* Of a header that is logged. */
#define SHOWN(s) (int)((s).len < 128 ? (s).len : 128), (s).ptr ? (s).ptr : ""

void kvp_epp_log_refusal(const struct kvp_job *j, const char *stage, int status, const char *why)
{
	if (j->is_logged)
		KVP_LOG_I("epp.routing_failed",
			"request_id=%.*s traceparent=%.*s stage=%s code=%s status=%d reservation_taken=false",
			SHOWN(j->ask.request_id), SHOWN(j->ask.traceparent), stage, why, status);
}

static struct kvp_str id_of(const struct kvp_leg *l)
{
	return (struct kvp_str){l->id, l->id_len};
}

int kvp_epp_keep(void *ctx, int64_t bytes)
{
	struct kvp_epp *x = ((struct kvp_job *)ctx)->x;
	struct kvp_quota *q = &x->boot.region->quota;
	if (bytes > 0)
		return kvp_quota_take(q, x->boot.owner, KVP_QUOTA_BODY, (uint64_t)bytes,
			       x->boot.config->epp_body_budget_bytes) == KVP_OK;
	kvp_quota_give(q, x->boot.owner, KVP_QUOTA_BODY, (uint64_t)-bytes);
	return 1;
}

void kvp_epp_prefill_done(void *ctx)
{
	kvp_plan_first_body(&((struct kvp_job *)ctx)->plan);
}

void kvp_epp_leg_prefilled(struct kvp_leg *l)
{
	struct kvp_job *j = l->job;
	uint64_t from = kvp_stage_now(j->is_timed);
	int status = kvp_selection_prefill_complete(j->x->selection, id_of(l));
	kvp_stage_add(j->x->boot.ctr, KVP_CTR_EPP_TIMED_BOOK_NS, from);
	if (j->is_logged)
		KVP_LOG_I("epp.lifecycle_callback", "operation=prefill_complete reservation=%.*s status=%d",
			(int)l->id_len, l->id, status);
	kvp_epp_count(
		j->x, status == 200 || status == 404 ? KVP_CTR_EPP_PREFILL_OK : KVP_CTR_EPP_PREFILL_BAD);
}

/* A reservation that another process is just busy with can't be left: its load would stay for ever. */
void kvp_epp_free_id(struct kvp_epp *x, const char *id, uint32_t len)
{
	int status = kvp_selection_free(x->selection, (struct kvp_str){id, len});
	struct kvp_unfreed *u = status == 503 ? calloc(1, sizeof(*u)) : NULL;
	kvp_epp_count(x, status == 200 || status == 404 ? KVP_CTR_EPP_FREE_OK : KVP_CTR_EPP_FREE_BAD);
	if (!u)
		return;
	memcpy(u->id, id, len);
	u->id_len = len;
	u->next = x->unfreed;
	x->unfreed = u;
}

void kvp_epp_free_again(struct kvp_epp *x)
{
	struct kvp_unfreed *list = x->unfreed;
	x->unfreed = NULL;
	while (list) {
		struct kvp_unfreed *u = list;
		list = u->next;
		kvp_epp_free_id(x, u->id, u->id_len);
		free(u);
	}
}

/* ---- leases ---- */

static void renew_late(struct kvp_leg *l)
{
	struct kvp_epp *x = l->job->x;
	uint64_t lease_ns = x->boot.config->lease_secs * 1000000000ull;
	l->renew_ns = kvp_loop_now_ns(x->loop) + lease_ns / RENEWALS_A_LEASE;
	l->later = NULL;
	l->sooner = x->renew_last;
	if (x->renew_last)
		x->renew_last->later = l;
	else
		x->renew_first = l;
	x->renew_last = l;
}

static void renew_never(struct kvp_leg *l)
{
	struct kvp_epp *x = l->job->x;
	if (!l->renew_ns)
		return;
	l->renew_ns = 0;
	if (l->sooner)
		l->sooner->later = l->later;
	else
		x->renew_first = l->later;
	if (l->later)
		l->later->sooner = l->sooner;
	else
		x->renew_last = l->sooner;
}

void kvp_epp_booked(struct kvp_leg *l)
{
	if (kvp_resv_find(&l->job->x->boot.region->book, l->id, l->id_len, &l->booking) == KVP_OK)
		renew_late(l);
}

void kvp_epp_renew(struct kvp_epp *x)
{
	uint64_t now = kvp_loop_now_ns(x->loop);
	while (x->renew_first && x->renew_first->renew_ns <= now) {
		struct kvp_leg *l = x->renew_first;
		renew_never(l);
		if (kvp_resv_renew(&x->boot.region->book, l->booking, now) == KVP_OK) {
			kvp_epp_count(x, KVP_CTR_EPP_RENEWED);
			renew_late(l);
		} else {
			/* Its worker has gone, or this process was stopped for longer than a lease. */
			kvp_epp_count(x, KVP_CTR_EPP_LEASE_LOST);
		}
	}
}

void kvp_epp_free_leg(struct kvp_leg *l)
{
	struct kvp_job *j = l->job;
	renew_never(l);
	if (j->is_logged)
		KVP_LOG_I("epp.lifecycle_callback", "operation=request_complete reservation=%.*s",
			(int)l->id_len, l->id);
	uint64_t from = kvp_stage_now(j->is_timed);
	kvp_epp_free_id(j->x, l->id, l->id_len);
	kvp_stage_add(j->x->boot.ctr, KVP_CTR_EPP_TIMED_BOOK_NS, from);
	l->id_len = 0;
}

void kvp_epp_release(void *ctx)
{
	struct kvp_job *j = ctx;
	struct kvp_epp *x = j->x;
	kvp_plan_end(&j->plan);
	if (j->ask.session_final != KVP_YES || !j->ask.session_id.len)
		return;
	for (int i = 0; i < KVP_PLAN_LEGS; i++)
		if (x->pool[i].cat)
			kvp_selection_end_session(x->selection, x->pool[i].role, x->pool[i].model,
				x->pool[i].group, j->ask.session_id);
}

/* ---- the proxy used another worker ---- */

/* move_booking gives the booking up and makes an equal one on m: another id, because peers take a used id for
 * a repetition. */
static void move_booking(struct kvp_job *j, const struct kvp_pool_member *m, uint32_t dp_rank)
{
	struct kvp_epp *x = j->x;
	struct kvp_leg *l = kvp_epp_main(j);
	struct kvp_pool *pool = &x->pool[KVP_PLAN_MAIN];
	struct kvp_book *b = &x->boot.region->book;
	struct kvp_resv_info *info = malloc(sizeof(*info));
	struct kvp_select_answer a;
	uint64_t h, *seq = NULL;
	uint32_t cnt = 0;
	static const char suffix[] = "~1";
	int ok = info && l->id_len + sizeof(suffix) <= sizeof(l->id) &&
		 kvp_resv_find(b, l->id, l->id_len, &h) == KVP_OK && kvp_resv_info(b, h, info) == KVP_OK;
	if (ok)
		seq = malloc((info->seq_cnt + 1) * sizeof(*seq));
	ok = seq && kvp_resv_seq(b, h, 0, seq, info->seq_cnt, &cnt) == KVP_OK;
	if (ok) {
		struct kvp_reserve_request q = {.role = pool->role,
			.model = pool->model,
			.group = pool->group,
			.worker_id = m->worker_id,
			.dp_rank = dp_rank,
			.override = KVP_EPP_NO_OVERRIDE,
			.expected_output_tok = info->expected_output_tok,
			.has_effective_prefill = KVP_YES,
			.effective_prefill_tok = info->prefill_tok,
			.track_prefill_tokens = j->plan.form != KVP_PLAN_LOCAL ? KVP_NO : KVP_UNSET,
			.session_id = j->ask.session_id};
		q.prompt = (struct kvp_prompt){.form = KVP_PROMPT_HASHES,
			.seq_hash = seq,
			.seq_hash_cnt = cnt,
			.has_isl = KVP_YES,
			.isl_tok = info->isl_tok,
			.lora = {info->lora, info->lora_len},
			.eagle = KVP_UNSET};
		renew_never(l);
		kvp_epp_free_id(x, l->id, l->id_len);
		memcpy(l->id + l->id_len, suffix, sizeof(suffix));
		l->id_len += sizeof(suffix) - 1;
		q.selection_id = id_of(l);
		int status = kvp_selection_reserve(x->selection, &q, &a);
		kvp_epp_count(x, status == 201 ? KVP_CTR_EPP_MOVED : KVP_CTR_EPP_NOT_MOVED);
		if (status == 201) {
			l->worker_id = m->worker_id;
			l->dp_rank = dp_rank;
			kvp_epp_booked(l);
		}
	} else {
		kvp_epp_count(x, KVP_CTR_EPP_NOT_MOVED);
	}
	free(seq);
	free(info);
}

void kvp_epp_served(void *ctx, struct kvp_extproc_str endpoint)
{
	struct kvp_job *j = ctx;
	struct kvp_epp *x = j->x;
	struct kvp_leg *l = kvp_epp_main(j);
	struct kvp_pool *pool = &x->pool[KVP_PLAN_MAIN];
	kvp_pool_refresh(pool);
	enum kvp_pool_ports ports = x->ports[KVP_PLAN_MAIN];
	uint32_t rank = 0;
	const struct kvp_pool_member *m = kvp_pool_at(pool, endpoint, ports, &rank);
	/* Behind one port the rank is the one that was asked for, where there is such a one. */
	if (m && ports == KVP_POOL_ONE_PORT && l->dp_rank - m->start_rank < m->rank_cnt)
		rank = l->dp_rank;
	if (m && m->worker_id == l->worker_id && rank == l->dp_rank)
		return;
	kvp_epp_count(x, KVP_CTR_EPP_MISMATCH);
	if (m)
		move_booking(j, m, rank);
	else
		kvp_epp_count(x, KVP_CTR_EPP_NOT_MOVED);
}

/* ---- response ---- */

static int name_is(struct kvp_extproc_str s, const char *lower)
{
	return s.len == strlen(lower) && strncasecmp(s.p, lower, s.len) == 0;
}

void kvp_epp_response_headers(void *ctx, const struct kvp_extproc_header *header, uint32_t cnt)
{
	struct kvp_job *j = ctx;
	enum kvp_usage_form form = KVP_USAGE_JSON;
	if (!kvp_epp_main(j)->id_len || j->has_usage)
		return;
	for (uint32_t i = 0; i < cnt; i++)
		if (name_is(header[i].key, "content-type") && header[i].value.len &&
			memmem(header[i].value.p, header[i].value.len, "text/event-stream", 17))
			form = KVP_USAGE_SSE;
	kvp_usage_open(&j->usage, form, j->x->usage_json, KVP_EPP_USAGE_MAX);
	j->has_usage = 1;
}

/* track_output adds an output block each time that the events of the stream have filled one. */
static void track_output(struct kvp_job *j)
{
	struct kvp_leg *l = kvp_epp_main(j);
	double fraction = 0, *decay = NULL;
	if (!j->x->boot.config->track_output_blocks || !l->id_len || !l->block_size)
		return;
	while (j->usage.event_cnt - j->out_events >= l->block_size) {
		j->out_events += l->block_size;
		if (j->ask.expected_output_tok) {
			fraction = 1.0 - (double)j->out_events / j->ask.expected_output_tok;
			fraction = fraction > 0 ? fraction : 0;
			decay = &fraction;
		}
		if (kvp_selection_output_block(j->x->selection, id_of(l), decay) == 200)
			kvp_epp_count(j->x, KVP_CTR_EPP_OUTPUT_BLOCKS);
	}
}

/* is_predicted: the index knows what the worker that prefills holds. Of decode workers it does only where
 * their events are asked for. */
static int is_predicted(const struct kvp_job *j)
{
	int is_told = j->way == KVP_EPP_AGGREGATED || j->x->cond.policy != KVP_COND_NEVER;
	return is_told && kvp_epp_is_hit_known(j) == KVP_YES;
}

/* compare looks whether what the index predicts is what engines report. What a decode engine got from a
 * prefill engine may be cached to it: of a pair nothing is compared. */
static void compare(struct kvp_job *j, uint64_t reported_tok)
{
	struct kvp_epp *x = j->x;
	const struct kvp_leg *l = kvp_epp_main(j);
	if (j->plan.form != KVP_PLAN_LOCAL || !is_predicted(j))
		return;
	enum kvp_mismatch_word w =
		kvp_mismatch_report(&x->mismatch, l->isl_tok, l->predicted_tok, reported_tok);
	kvp_ctr_set(x->boot.ctr, KVP_CTR_EPP_INDEX_MISMATCH, (uint64_t)x->mismatch.stands);
	if (w)
		KVP_LOG_W("extproc.mismatch", "model=%s engines_report=%s", x->boot.config->model_name,
			w == KVP_MISMATCH_UNDERSTATED ? "far more cached tokens than the index predicts"
						      : "far fewer cached tokens than the index predicts");
}

static void time_tokens(struct kvp_job *j, uint64_t cnt)
{
	struct kvp_ctr_column_shm *c = j->x->boot.ctr;
	uint64_t now_ns = kvp_clock_mono_ns();
	kvp_hist_add(c, KVP_HIST_EPP_OUTPUT_TOK, cnt);
	if (cnt)
		kvp_hist_add(c, KVP_HIST_EPP_NTPOT_NS, (now_ns - j->start_ns) / cnt);
	if (cnt > 1 && j->first_body_ns)
		kvp_hist_add(c, KVP_HIST_EPP_TPOT_NS, (now_ns - j->first_body_ns) / (cnt - 1));
}

static void end_usage(struct kvp_job *j)
{
	struct kvp_usage u;
	struct kvp_ctr_column_shm *c = j->x->boot.ctr;
	if (kvp_usage_done(&j->usage, &u) == KVP_OK) {
		if (u.has & KVP_USAGE_HAS_CACHED) {
			kvp_hist_add(c, KVP_HIST_EPP_CACHED_TOK, u.cached_tok);
			kvp_ctr_add(c, KVP_CTR_EPP_REPORTED_TOK, u.cached_tok);
			compare(j, u.cached_tok);
		}
		if (u.has & KVP_USAGE_HAS_COMPLETION)
			time_tokens(j, u.completion_tok);
	}
	kvp_usage_close(&j->usage);
	j->has_usage = 0;
}

void kvp_epp_response_body(void *ctx, const void *body, size_t len, int end_of_stream)
{
	struct kvp_job *j = ctx;
	j->response_bytes += len;
	if (len && !j->first_body_ns) {
		j->first_body_ns = kvp_clock_mono_ns();
		kvp_hist_add(j->x->boot.ctr, KVP_HIST_EPP_FIRST_BODY_NS, j->first_body_ns - j->start_ns);
	}
	if (!j->has_usage)
		return;
	if (len) {
		kvp_usage_read(&j->usage, body, len);
		track_output(j);
	}
	if (end_of_stream)
		end_usage(j);
}

/* ---- counting ---- */

void kvp_epp_note(void *ctx, enum kvp_stream_note n)
{
	static const enum kvp_ctr ctr[KVP_NOTE_CNT] = {[KVP_NOTE_EMPTY_MESSAGE] = KVP_CTR_EPP_EMPTY_MESSAGE,
		[KVP_NOTE_LATE_BODY] = KVP_CTR_EPP_LATE_BODY,
		[KVP_NOTE_OUT_OF_ORDER] = KVP_CTR_EPP_OUT_OF_ORDER,
		[KVP_NOTE_OBSERVABILITY] = KVP_CTR_EPP_OBSERVED,
		[KVP_NOTE_MODE_REFUSED] = KVP_CTR_EPP_MODE_REFUSED,
		[KVP_NOTE_BODY_TOO_LARGE] = KVP_CTR_EPP_BODY_TOO_LARGE,
		[KVP_NOTE_BODY_TIMEOUT] = KVP_CTR_EPP_BODY_TIMEOUT,
		[KVP_NOTE_BUDGET] = KVP_CTR_EPP_OVER_BUDGET,
		[KVP_NOTE_CANCELLED] = KVP_CTR_EPP_CANCELLED,
		[KVP_NOTE_SHUT_DOWN] = KVP_CTR_EPP_SHUT_DOWN};
	kvp_epp_count(((struct kvp_job *)ctx)->x, ctr[n]);
}

void kvp_epp_job_ended(struct kvp_job *j)
{
	static const enum kvp_ctr ctr[KVP_OUTCOME_CNT] = {[KVP_OUTCOME_INCOMPLETE] = KVP_CTR_EPP_INCOMPLETE,
		[KVP_OUTCOME_EARLY_REJECT] = KVP_CTR_EPP_REJECTED,
		[KVP_OUTCOME_EXT_PROC_ERROR] = KVP_CTR_EPP_STREAM_ERROR,
		[KVP_OUTCOME_UPSTREAM_HTTP_ERROR] = KVP_CTR_EPP_UPSTREAM_ERROR,
		[KVP_OUTCOME_RESPONSE_EOS] = KVP_CTR_EPP_RESPONSE_EOS};
	static const enum kvp_hist hist[KVP_OUTCOME_CNT] = {
		[KVP_OUTCOME_INCOMPLETE] = KVP_HIST_EPP_DUR_INCOMPLETE_NS,
		[KVP_OUTCOME_EARLY_REJECT] = KVP_HIST_EPP_DUR_REJECTED_NS,
		[KVP_OUTCOME_EXT_PROC_ERROR] = KVP_HIST_EPP_DUR_FAILED_NS,
		[KVP_OUTCOME_UPSTREAM_HTTP_ERROR] = KVP_HIST_EPP_DUR_UPSTREAM_NS,
		[KVP_OUTCOME_RESPONSE_EOS] = KVP_HIST_EPP_DUR_EOS_NS};
	enum kvp_stream_outcome o = kvp_stream_outcome(&j->stream);
	if (j->has_usage)
		end_usage(j);
	kvp_epp_count(j->x, ctr[o]);
	if (j->response_bytes)
		kvp_hist_add(j->x->boot.ctr, KVP_HIST_EPP_RESPONSE_BYTES, j->response_bytes);
	uint64_t took_ns = kvp_clock_mono_ns() - j->start_ns;
	if (j->is_logged && !j->pick_ns) /* it ended before its body did: for its id and trace */
		kvp_epp_read_head(j, j->stream.header, j->stream.header_cnt);
	kvp_hist_add(j->x->boot.ctr, hist[o], took_ns);
	const struct kvp_leg *l = kvp_epp_main(j);
	if (j->is_logged)
		KVP_LOG_I("epp.request_finished",
			"request_id=%.*s traceparent=%.*s outcome=%s upstream_status=%d worker=%llu rank=%u "
			"prompt_tokens=%llu predicted_tokens=%llu ms=%llu",
			SHOWN(j->ask.request_id), SHOWN(j->ask.traceparent), kvp_stream_outcome_name(o),
			j->stream.http_status, (unsigned long long)l->worker_id, l->dp_rank,
			(unsigned long long)l->isl_tok, (unsigned long long)l->predicted_tok,
			(unsigned long long)(took_ns / 1000000));
}
