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

static struct kvp_str id_of(const struct kvp_job *j)
{
	return (struct kvp_str){j->id, j->id_len};
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
	struct kvp_job *j = ctx;
	uint64_t from = kvp_stage_now(j->is_timed);
	int status = kvp_selection_prefill_complete(j->x->selection, id_of(j));
	kvp_stage_add(j->x->boot.ctr, KVP_CTR_EPP_TIMED_BOOK_NS, from);
	if (j->is_logged)
		KVP_LOG_I("epp.lifecycle_callback", "operation=prefill_complete reservation=%.*s status=%d",
			(int)j->id_len, j->id, status);
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

static void renew_late(struct kvp_job *j)
{
	struct kvp_epp *x = j->x;
	uint64_t lease_ns = x->boot.config->lease_secs * 1000000000ull;
	j->renew_ns = kvp_loop_now_ns(x->loop) + lease_ns / RENEWALS_A_LEASE;
	j->later = NULL;
	j->sooner = x->renew_last;
	if (x->renew_last)
		x->renew_last->later = j;
	else
		x->renew_first = j;
	x->renew_last = j;
}

static void renew_never(struct kvp_job *j)
{
	struct kvp_epp *x = j->x;
	if (!j->renew_ns)
		return;
	j->renew_ns = 0;
	if (j->sooner)
		j->sooner->later = j->later;
	else
		x->renew_first = j->later;
	if (j->later)
		j->later->sooner = j->sooner;
	else
		x->renew_last = j->sooner;
}

void kvp_epp_booked(struct kvp_job *j)
{
	if (kvp_resv_find(&j->x->boot.region->book, j->id, j->id_len, &j->booking) == KVP_OK)
		renew_late(j);
}

void kvp_epp_renew(struct kvp_epp *x)
{
	uint64_t now = kvp_loop_now_ns(x->loop);
	while (x->renew_first && x->renew_first->renew_ns <= now) {
		struct kvp_job *j = x->renew_first;
		renew_never(j);
		if (kvp_resv_renew(&x->boot.region->book, j->booking, now) == KVP_OK) {
			kvp_epp_count(x, KVP_CTR_EPP_RENEWED);
			renew_late(j);
		} else {
			/* Its worker has gone, or this process was stopped for longer than a lease. */
			kvp_epp_count(x, KVP_CTR_EPP_LEASE_LOST);
		}
	}
}

void kvp_epp_release(void *ctx)
{
	struct kvp_job *j = ctx;
	renew_never(j);
	if (j->is_logged)
		KVP_LOG_I("epp.lifecycle_callback", "operation=request_complete reservation=%.*s",
			(int)j->id_len, j->id);
	uint64_t from = kvp_stage_now(j->is_timed);
	kvp_epp_free_id(j->x, j->id, j->id_len);
	kvp_stage_add(j->x->boot.ctr, KVP_CTR_EPP_TIMED_BOOK_NS, from);
	j->id_len = 0;
	if (j->ask.session_final == KVP_YES && j->ask.session_id.len)
		kvp_selection_end_session(j->x->selection, KVP_PART_AGGREGATED, j->x->pool.model,
			j->x->pool.group, j->ask.session_id);
}

/* ---- the proxy used another worker ---- */

/* move_booking gives the booking up and makes an equal one on m: another id, because peers take a used id for
 * a repetition. */
static void move_booking(struct kvp_job *j, const struct kvp_pool_member *m, uint32_t dp_rank)
{
	struct kvp_epp *x = j->x;
	struct kvp_book *b = &x->boot.region->book;
	struct kvp_resv_info *info = malloc(sizeof(*info));
	struct kvp_select_answer a;
	uint64_t h, *seq = NULL;
	uint32_t cnt = 0;
	int ok = info && kvp_resv_find(b, j->id, j->id_len, &h) == KVP_OK &&
		 kvp_resv_info(b, h, info) == KVP_OK;
	if (ok)
		seq = malloc((info->seq_cnt + 1) * sizeof(*seq));
	ok = seq && kvp_resv_seq(b, h, 0, seq, info->seq_cnt, &cnt) == KVP_OK;
	if (ok) {
		struct kvp_reserve_request q = {.model = x->pool.model,
			.group = x->pool.group,
			.worker_id = m->worker_id,
			.dp_rank = dp_rank,
			.override = KVP_EPP_NO_OVERRIDE,
			.expected_output_tok = info->expected_output_tok,
			.has_effective_prefill = KVP_YES,
			.effective_prefill_tok = info->prefill_tok,
			.track_prefill_tokens = KVP_UNSET,
			.session_id = j->ask.session_id};
		q.prompt = (struct kvp_prompt){.form = KVP_PROMPT_HASHES,
			.seq_hash = seq,
			.seq_hash_cnt = cnt,
			.has_isl = KVP_YES,
			.isl_tok = info->isl_tok,
			.lora = {info->lora, info->lora_len},
			.eagle = KVP_UNSET};
		renew_never(j);
		kvp_epp_free_id(x, j->id, j->id_len);
		memcpy(j->id + j->id_len, "~1", 3);
		j->id_len += 2;
		q.selection_id = id_of(j);
		int status = kvp_selection_reserve(x->selection, &q, &a);
		kvp_epp_count(x, status == 201 ? KVP_CTR_EPP_MOVED : KVP_CTR_EPP_NOT_MOVED);
		if (status == 201) {
			j->worker_id = m->worker_id;
			j->dp_rank = dp_rank;
			kvp_epp_booked(j);
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
	kvp_pool_refresh(&x->pool);
	uint32_t rank = 0;
	const struct kvp_pool_member *m = kvp_pool_at(&x->pool, endpoint, x->ports, &rank);
	/* Without ports of their own the ranks of a worker can't be told apart here. */
	if (m && m->worker_id == j->worker_id && (x->ports == KVP_POOL_ONE_PORT || rank == j->dp_rank))
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
	if (!j->id_len || j->has_usage)
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
	double fraction = 0, *decay = NULL;
	if (!j->x->boot.config->track_output_blocks || !j->id_len || !j->block_size)
		return;
	while (j->usage.event_cnt - j->out_events >= j->block_size) {
		j->out_events += j->block_size;
		if (j->ask.expected_output_tok) {
			fraction = 1.0 - (double)j->out_events / j->ask.expected_output_tok;
			fraction = fraction > 0 ? fraction : 0;
			decay = &fraction;
		}
		if (kvp_selection_output_block(j->x->selection, id_of(j), decay) == 200)
			kvp_epp_count(j->x, KVP_CTR_EPP_OUTPUT_BLOCKS);
	}
}

/* compare looks whether what the index predicts is what engines report. */
static void compare(struct kvp_job *j, uint64_t reported_tok)
{
	struct kvp_epp *x = j->x;
	enum kvp_mismatch_word w =
		kvp_mismatch_report(&x->mismatch, j->isl_tok, j->predicted_tok, reported_tok);
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
	if (kvp_usage_end(&j->usage, &u) == KVP_OK) {
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
		kvp_usage_feed(&j->usage, body, len);
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
	if (j->is_logged)
		KVP_LOG_I("epp.request_finished",
			"request_id=%.*s traceparent=%.*s outcome=%s upstream_status=%d worker=%llu rank=%u "
			"prompt_tokens=%llu predicted_tokens=%llu ms=%llu",
			SHOWN(j->ask.request_id), SHOWN(j->ask.traceparent), kvp_stream_outcome_name(o),
			j->stream.http_status, (unsigned long long)j->worker_id, j->dp_rank,
			(unsigned long long)j->isl_tok, (unsigned long long)j->predicted_tok,
			(unsigned long long)(took_ns / 1000000));
}
