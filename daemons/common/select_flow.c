#include "daemons/common/select_priv.h"
#include <kvpick/clock.h>

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>

#define NO_CAPACITY_TOK 10000000 /* prefill capacity of a worker that named none */
#define PICK_RETRY_MAX 4	 /* validated bookings before one without validation */

/* A random version 4 UUID. */
void kvp_selection_new_id(char out[KVP_SELECTION_NEW_ID_LEN + 1])
{
	static const char hex[] = "0123456789abcdef";
	uint8_t b[16];
	if (getrandom(b, sizeof(b), 0) != (ssize_t)sizeof(b))
		memset(b, 0, sizeof(b));
	b[6] = (uint8_t)((b[6] & 0x0f) | 0x40);
	b[8] = (uint8_t)((b[8] & 0x3f) | 0x80);
	char *p = out;
	for (int i = 0; i < 16; i++) {
		if (i == 4 || i == 6 || i == 8 || i == 10)
			*p++ = '-';
		*p++ = hex[b[i] >> 4];
		*p++ = hex[b[i] & 15];
	}
	*p = 0;
}

static struct kvp_str make_uuid(char *out)
{
	kvp_selection_new_id(out);
	return (struct kvp_str){out, KVP_SELECTION_NEW_ID_LEN};
}

int kvp_sel_claim(struct kvp_selection *s, struct kvp_str id, struct kvp_str lora, uint64_t *h)
{
	int rc = kvp_resv_claim_for(&s->region->book, s->owner, id.ptr, id.len, lora.ptr, lora.len, h);
	if (rc == KVP_OK)
		return 0;
	if (rc == KVP_ERR_EXISTS)
		return kvp_sel_fail_at(s, 409, &id, "selection % is already reserved or being reserved");
	if (rc == KVP_ERR_FULL)
		return kvp_sel_fail(s, 503, "reservation table is full");
	return kvp_sel_fail(s, 400, "selection_id must have 1 to %d bytes", KVP_SELECTION_ID_MAX);
}

static enum kvp_tristate either(enum kvp_tristate override, enum kvp_tristate configured)
{
	return override != KVP_UNSET ? override : configured;
}

/* worker_of fills s->worker with the record of a chosen rank; 500 when it is no longer schedulable. */
int kvp_sel_worker_of(struct kvp_selection *s, const struct kvp_sel_rank *r)
{
	if (kvp_cat_worker_info(&s->region->cat, r->worker_idx, &s->worker) == KVP_OK &&
		s->worker.worker_id == r->worker_id && s->worker.lifecycle == KVP_LIFE_SCHEDULABLE &&
		s->worker.part == s->part_idx)
		return 0;
	return kvp_sel_fail(s, 500, "selected worker %" PRIu64 " is no longer schedulable", r->worker_id);
}

static uint32_t saturated(uint64_t tok)
{
	return tok > UINT32_MAX ? UINT32_MAX : (uint32_t)tok;
}

/* summarize fills the overlap of the chosen worker: all its ranks, zeros included. */
static int summarize(struct kvp_selection *s, uint32_t chosen, struct kvp_overlap_summary *o)
{
	uint32_t from = chosen, to = chosen, block_size = s->part.block_size;
	while (from > 0 && s->rank[from - 1].worker_id == s->rank[chosen].worker_id)
		from--;
	while (to + 1 < s->rank_cnt && s->rank[to + 1].worker_id == s->rank[chosen].worker_id)
		to++;
	uint32_t n = to - from + 1;
	uint32_t *dp = kvp_sel_scratch(&s->scratch_dp, 2 * (size_t)n, sizeof(uint32_t));
	struct kvp_score_tiers *tiers = kvp_sel_scratch(&s->scratch_tiers, n, sizeof(*tiers));
	if (!dp || !tiers)
		return kvp_sel_fail(s, 500, "out of memory");
	for (uint32_t i = 0; i < n; i++) {
		dp[i] = s->rank[from + i].dp_rank;
		tiers[i] = s->rank[from + i].cached;
		dp[n + i] = saturated((uint64_t)tiers[i].dev_blk * block_size);
	}
	struct kvp_score_overlap sum = kvp_score_overlap(block_size, tiers, n);
	*o = (struct kvp_overlap_summary){.longest_matched_tok = saturated(sum.longest_tok),
		.gpu_tok = saturated(sum.gpu_tok),
		.cpu_tok = saturated(sum.cpu_tok),
		.disk_tok = saturated(sum.disk_tok),
		.dp_rank = dp,
		.dp_tok = dp + n,
		.dp_cnt = n};
	return 0;
}

int kvp_sel_fill_answer(
	struct kvp_selection *s, uint32_t chosen, enum kvp_tristate track, struct kvp_select_answer *a)
{
	const struct kvp_sel_rank *r = &s->rank[chosen];
	int status = summarize(s, chosen, &a->overlap);
	if (status)
		return status;
	a->worker_id = r->worker_id;
	a->dp_rank = r->dp_rank;
	a->endpoint = s->worker.endpoint;
	a->block_size = s->part.block_size;
	a->effective_prefill_tok = kvp_sel_effective_prefill(s, chosen);
	a->potential_decode_blk = kvp_load_blocks(&r->load) + r->additional_blk;
	a->decode_busy = kvp_score_decode_busy(
		a->potential_decode_blk, s->set.decode_busy_threshold, r->total_kv_blocks);
	a->seq_hash = s->prompt.seq;
	a->seq_cnt = s->prompt.seq_cnt;
	a->isl_tok = s->prompt.isl_tok;
	a->track_prefill_tokens = track;
	kvp_ctr_add(s->ctr, KVP_CTR_SELECT_OK, 1);
	kvp_ctr_add(s->ctr, KVP_CTR_SELECT_ISL_TOK, a->isl_tok);
	kvp_ctr_add(s->ctr, KVP_CTR_SELECT_HIT_TOK, a->isl_tok - a->effective_prefill_tok);
	return 0;
}

uint32_t kvp_sel_booking_flags(const struct kvp_selection *s, enum kvp_tristate track)
{
	uint32_t flags = track == KVP_YES ? KVP_RESV_TRACK_PREFILL : 0;
	return flags | (s->set.owner_kind == KVP_BOOK_FOR_NODE ? KVP_RESV_NODE_OWNED : KVP_RESV_LEASED);
}

static struct kvp_resv_ask ask_for(
	struct kvp_selection *s, const struct kvp_sel_rank *r, const struct kvp_prompt *p)
{
	int track_blocks = s->set.track_active_blocks == KVP_YES;
	return (struct kvp_resv_ask){.worker_id = r->worker_id,
		.seq = track_blocks ? s->prompt.seq : NULL,
		.seq_cnt = track_blocks ? s->prompt.seq_cnt : 0,
		.isl_tok = s->prompt.isl_tok,
		.lora_hash = p->lora.len ? kvp_hash_bytes(p->lora.ptr, p->lora.len, 0) : 0,
		.now_ns = kvp_clock_mono_ns(),
		.part = s->part_idx,
		.dp_rank = r->dp_rank,
		.rank_slot = r->rank_slot,
		.rank_gen = r->rank_gen};
}

int kvp_sel_booking_failed(struct kvp_selection *s, int rc, uint64_t worker_id)
{
	if (rc == KVP_ERR_FULL)
		return kvp_sel_fail(s, 503, "reservation table is full");
	if (rc == KVP_ERR_NOTFOUND)
		return kvp_sel_fail(
			s, 500, "selected worker %" PRIu64 " is no longer schedulable", worker_id);
	if (rc == KVP_ERR_EXISTS)
		return kvp_sel_fail(s, 409, "a replica has booked the selection_id: the claim was replaced");
	if (rc == KVP_ERR_INVAL)
		return kvp_sel_fail(s, 400, "the prompt has too many blocks to be booked");
	return kvp_sel_fail(s, 503, "worker %" PRIu64 " is being recounted; try again", worker_id);
}

/* book_chosen picks and books until a booking lands on the load that the pick saw. */
int kvp_sel_book_chosen(struct kvp_selection *s, const struct kvp_select_request *q, uint64_t h,
	enum kvp_tristate track, uint32_t *chosen)
{
	for (int i = 0;; i++) {
		int status = i ? kvp_sel_admit_again(s, q, track, h) : 0;
		status = status ? status : kvp_sel_pick(s, q, track, chosen);
		if (status)
			return status;
		const struct kvp_sel_rank *r = &s->rank[*chosen];
		struct kvp_resv_ask a = ask_for(s, r, &q->prompt);
		a.prefill_tok = kvp_sel_effective_prefill(s, *chosen);
		a.expected_output_tok = q->expected_output_tok;
		a.flags = kvp_sel_booking_flags(s, track);
		a.validate = i < PICK_RETRY_MAX;
		a.seen = r->load;
		uint64_t from = kvp_sel_clock(s);
		int rc = kvp_resv_book(&s->region->book, h, &a);
		kvp_sel_booked(s, from);
		if (rc == KVP_OK) {
			if (!a.validate)
				kvp_ctr_add(s->ctr, KVP_CTR_SELECT_UNVALIDATED, 1);
			kvp_ctr_add(s->ctr, KVP_CTR_SELECT_BOOKED, 1);
			return 0;
		}
		if (rc != KVP_ERR_AGAIN || i >= KVP_SEL_BUSY_RETRY_MAX)
			return kvp_sel_booking_failed(s, rc, r->worker_id);
		kvp_ctr_add(s->ctr, KVP_CTR_SELECT_REPICK, 1);
	}
}

/* prepare does what every form of selection needs before loads are read: pins, prompt, lookup, hashes. */
static int prepare(struct kvp_selection *s, const struct kvp_select_request *q, enum kvp_prompt_use use)
{
	int status = kvp_sel_prompt_begin(s, &q->prompt, use);
	if (status)
		return status;
	enum kvp_tristate found = kvp_sel_look_up(s);
	if (use == KVP_PROMPT_USE_SELECT)
		kvp_sel_note(s, found);
	return kvp_sel_prompt_finish(s, either(q->override.assume_kv_reuse, s->set.assume_kv_reuse));
}

static void report_load(const struct kvp_selection *s, uint32_t chosen, struct kvp_worker_load *l)
{
	const struct kvp_sel_rank *r = &s->rank[chosen];
	l->given = KVP_YES;
	l->active_prefill_tok = r->load.prefill_tok;
	l->prefill_capacity_tok = r->max_num_batched_tokens ? r->max_num_batched_tokens : NO_CAPACITY_TOK;
	l->total_kv_blocks = r->total_kv_blocks;
	l->prefill_busy = kvp_score_prefill_busy(
		l->active_prefill_tok, s->set.prefill_busy_threshold, l->prefill_capacity_tok);
}

static int select_unbooked(
	struct kvp_selection *s, const struct kvp_select_request *q, struct kvp_select_answer *a)
{
	enum kvp_tristate track = either(q->override.track_prefill_tokens, s->set.track_prefill_tokens);
	uint32_t chosen;
	int status = kvp_sel_session_look(s, q);
	status = status ? status : prepare(s, q, KVP_PROMPT_USE_SELECT);
	if (status)
		return status;
	const struct kvp_select_request *steered = kvp_sel_session_request(s, q);
	status = kvp_sel_admit(s, steered, track, 0);
	status = status ? status : kvp_sel_pick(s, steered, track, &chosen);
	status = status ? status : kvp_sel_worker_of(s, &s->rank[chosen]);
	status = status ? status : kvp_sel_fill_answer(s, chosen, track, a);
	if (!status && q->advisory == KVP_YES)
		report_load(s, chosen, &a->worker_load);
	if (!status && q->selection_id.len)
		kvp_sel_remember(s, q, a);
	return status;
}

/* Nothing is selected before the index is recovered: 0, or 503. */
static int open_to_select(struct kvp_selection *s, const struct kvp_select_request *q)
{
	if (kvp_recov_is_shut(&s->region->recov))
		return kvp_sel_fail(s, 503, "the index is still being recovered from a peer");
	return kvp_sel_open_partition(s, q->role, q->model, q->group);
}

int kvp_selection_select(
	struct kvp_selection *s, const struct kvp_select_request *q, struct kvp_select_answer *a)
{
	uint64_t start_ns = kvp_clock_mono_ns();
	memset(a, 0, sizeof(*a));
	int status = open_to_select(s, q);
	status = status ? status : select_unbooked(s, q, a);
	if (status)
		return status;
	a->selection_id = q->selection_id;
	kvp_hist_add(s->ctr, KVP_HIST_SELECT_NS, kvp_clock_mono_ns() - start_ns);
	return 200;
}

/* The one that holds most, the first of those. */
void kvp_sel_kv_source(const struct kvp_selection *s, uint32_t chosen, struct kvp_kv_source *out)
{
	const struct kvp_sel_rank *c = &s->rank[chosen], *best = NULL;
	if (!c->kv_hint || s->set.records_routing == KVP_YES)
		return;
	for (uint32_t i = 0; i < s->rank_cnt; i++) {
		const struct kvp_sel_rank *r = &s->rank[i];
		if (i != chosen && r->kv_hint == (c->kv_hint | 1) &&
			r->cached.dev_blk > (best ? best : c)->cached.dev_blk)
			best = r;
	}
	if (!best || best->cached.dev_blk > s->prompt.local_cnt)
		return;
	*out = (struct kvp_kv_source){.worker_id = best->worker_id,
		.dp_rank = best->dp_rank,
		.part = s->part_idx,
		.index_slot = best->index_slot,
		.index_gen = best->index_gen,
		.blk_cnt = best->cached.dev_blk,
		.more_blk = best->cached.dev_blk - c->cached.dev_blk,
		.local_hash = s->prompt.local};
}

int kvp_selection_select_and_reserve(
	struct kvp_selection *s, const struct kvp_select_request *q, struct kvp_select_answer *a)
{
	uint64_t start_ns = kvp_clock_mono_ns(), h;
	enum kvp_tristate track = either(q->override.track_prefill_tokens, s->set.track_prefill_tokens);
	uint32_t chosen = 0;
	memset(a, 0, sizeof(*a));
	int status = open_to_select(s, q);
	if (status)
		return status;
	a->selection_id = q->selection_id.ptr ? q->selection_id : make_uuid(s->id);
	status = kvp_sel_claim(s, a->selection_id, q->prompt.lora, &h);
	if (status)
		return status;
	status = kvp_sel_session_hold(s, q);
	status = status ? status : prepare(s, q, KVP_PROMPT_USE_SELECT);
	const struct kvp_select_request *steered = status ? q : kvp_sel_session_request(s, q);
	status = status ? status : kvp_sel_admit(s, steered, track, h);
	status = status ? status : kvp_sel_book_chosen(s, steered, h, track, &chosen);
	if (status == KVP_SELECT_WAITS)
		return status;
	if (status) {
		kvp_sel_session_cancel(s);
		kvp_resv_abandon(&s->region->book, h);
		return status;
	}
	status = kvp_sel_worker_of(s, &s->rank[chosen]);
	status = status ? status : kvp_sel_fill_answer(s, chosen, track, a);
	status = status ? status : kvp_sel_session_bind(s, h, a->worker_id, a->dp_rank);
	if (status) {
		kvp_sel_session_cancel(s);
		kvp_resv_free(&s->region->book, h);
		return status;
	}
	kvp_sel_kv_source(s, chosen, &a->kv_source);
	a->booking = h;
	kvp_sel_tell_prompt(s, &s->rank[chosen]);
	kvp_hist_add(s->ctr, KVP_HIST_SELECT_NS, kvp_clock_mono_ns() - start_ns);
	return 200;
}

/* named_rank finds the rank that an explicit reservation names; 404 texts as documented. */
static int named_rank(struct kvp_selection *s, const struct kvp_reserve_request *q, uint32_t *chosen)
{
	int known = 0;
	for (uint32_t i = 0; i < s->rank_cnt; i++) {
		if (s->rank[i].worker_id != q->worker_id)
			continue;
		known = 1;
		if (s->rank[i].dp_rank == q->dp_rank) {
			*chosen = i;
			return 0;
		}
	}
	if (known)
		return kvp_sel_fail(
			s, 404, "Worker %" PRIu64 " dp_rank %" PRIu32 " not found", q->worker_id, q->dp_rank);
	char number[24];
	int len = snprintf(number, sizeof(number), "%" PRIu64, q->worker_id);
	const struct kvp_str name[] = {{number, (size_t)len}, q->model, q->group};
	return kvp_sel_fail_at(
		s, 404, name, "schedulable worker % not found for model=% routing_group=%");
}

/* worker_known: an unknown worker is 404 before the id is claimed, an unknown rank of a known one after
 * it. */
static int worker_known(struct kvp_selection *s, const struct kvp_reserve_request *q)
{
	uint32_t unused;
	for (uint32_t i = 0; i < s->rank_cnt; i++)
		if (s->rank[i].worker_id == q->worker_id)
			return 0;
	return named_rank(s, q, &unused);
}

static int book_named(
	struct kvp_selection *s, const struct kvp_reserve_request *q, uint64_t h, uint32_t *chosen)
{
	int status = named_rank(s, q, chosen);
	if (status)
		return status;
	const struct kvp_sel_rank *r = &s->rank[*chosen];
	enum kvp_tristate track = q->track_prefill_tokens;
	if (track == KVP_UNSET)
		track = q->has_effective_prefill == KVP_YES
				? KVP_YES
				: either(q->override.track_prefill_tokens, s->set.track_prefill_tokens);
	struct kvp_resv_ask a = ask_for(s, r, &q->prompt);
	a.prefill_tok = q->has_effective_prefill == KVP_YES ? q->effective_prefill_tok : 0;
	a.expected_output_tok = q->expected_output_tok;
	a.flags = kvp_sel_booking_flags(s, track);
	for (int i = 0;; i++) {
		int rc = kvp_resv_book(&s->region->book, h, &a);
		if (rc == KVP_OK)
			break;
		if (rc == KVP_ERR_NOTFOUND)
			return kvp_sel_fail(s, 404, "Worker %" PRIu64 " dp_rank %" PRIu32 " not found",
				r->worker_id, r->dp_rank);
		if (rc != KVP_ERR_AGAIN || i >= KVP_SEL_BUSY_RETRY_MAX)
			return kvp_sel_booking_failed(s, rc, r->worker_id);
	}
	kvp_ctr_add(s->ctr, KVP_CTR_SELECT_BOOKED, 1);
	return 0;
}

int kvp_selection_reserve(
	struct kvp_selection *s, const struct kvp_reserve_request *q, struct kvp_select_answer *a)
{
	uint64_t h;
	uint32_t chosen = 0;
	memset(a, 0, sizeof(*a));
	kvp_sel_forget(s, q->role, q);
	int status = kvp_sel_open_partition(s, q->role, q->model, q->group);
	status = status ? status : kvp_sel_prompt_begin(s, &q->prompt, KVP_PROMPT_USE_RESERVE);
	if (status)
		return status;
	if (q->has_effective_prefill == KVP_YES && q->effective_prefill_tok > s->prompt.isl_tok)
		return kvp_sel_fail(s, 400,
			"effective_prefill_tokens (%" PRIu64 ") must not exceed isl_tokens (%" PRIu64 ")",
			q->effective_prefill_tok, s->prompt.isl_tok);
	status = kvp_sel_prompt_finish(s, either(q->override.assume_kv_reuse, s->set.assume_kv_reuse));
	status = status ? status : worker_known(s, q);
	status = status ? status : kvp_sel_claim(s, q->selection_id, q->prompt.lora, &h);
	if (status)
		return status;
	status = book_named(s, q, h, &chosen);
	if (status) {
		kvp_resv_abandon(&s->region->book, h);
		return status;
	}
	status = kvp_sel_worker_of(s, &s->rank[chosen]);
	if (status) {
		kvp_resv_free(&s->region->book, h);
		return status;
	}
	/* A binding for which there is no room is none; the booking stands. */
	if (s->set.affinity_mode == KVP_AFFINITY_IS_SOFT)
		(void)kvp_sel_session_bind_kept(
			s, q->session_id.ptr, q->session_id.len, h, &s->rank[chosen]);
	kvp_sel_tell_prompt(s, &s->rank[chosen]);
	a->selection_id = q->selection_id;
	a->worker_id = q->worker_id;
	a->dp_rank = q->dp_rank;
	a->endpoint = s->worker.endpoint;
	return 201;
}

enum lifecycle { PREFILL_COMPLETE, OUTPUT_BLOCK, FREE };

static int lifecycle(struct kvp_selection *s, struct kvp_str id, enum lifecycle what, const double *fraction)
{
	struct kvp_book *b = &s->region->book;
	uint64_t h;
	int rc = KVP_ERR_NOTFOUND;
	for (int i = 0; i < KVP_SEL_BUSY_RETRY_MAX; i++) {
		rc = kvp_resv_find(b, id.ptr, id.len, &h);
		if (rc == KVP_OK)
			rc = what == FREE	    ? kvp_resv_free(b, h)
			     : what == OUTPUT_BLOCK ? kvp_resv_output(b, h, fraction)
						    : kvp_resv_prefill_done(b, h);
		if (rc != KVP_ERR_AGAIN)
			break;
	}
	if (rc == KVP_OK && what != OUTPUT_BLOCK)
		kvp_sel_drain_all(s);
	if (rc == KVP_OK)
		return 200;
	if (rc == KVP_ERR_AGAIN)
		return kvp_sel_fail_at(s, 503, &id, "reservation % is busy; try again");
	return kvp_sel_fail_at(s, 404, &id, "reservation % not found");
}

int kvp_selection_prefill_complete(struct kvp_selection *s, struct kvp_str id)
{
	return lifecycle(s, id, PREFILL_COMPLETE, NULL);
}

int kvp_selection_output_block(struct kvp_selection *s, struct kvp_str id, const double *fraction)
{
	if (fraction && !(*fraction >= 0.0 && *fraction <= 1.0))
		return kvp_sel_fail(s, 400, "decay_fraction must be between 0.0 and 1.0");
	return lifecycle(s, id, OUTPUT_BLOCK, fraction);
}

int kvp_selection_free(struct kvp_selection *s, struct kvp_str id)
{
	return lifecycle(s, id, FREE, NULL);
}

int kvp_selection_undo(struct kvp_selection *s, uint64_t booking)
{
	int rc = KVP_ERR_AGAIN;
	for (int i = 0; i < KVP_SEL_BUSY_RETRY_MAX && rc == KVP_ERR_AGAIN; i++)
		rc = kvp_resv_free(&s->region->book, booking);
	if (rc == KVP_OK)
		kvp_sel_drain_all(s);
	return rc == KVP_OK ? 200 : kvp_sel_fail(s, 404, "the booking has ended");
}

int kvp_selection_loads(struct kvp_selection *s, enum kvp_part_role role, struct kvp_str model,
	struct kvp_str group, struct kvp_load_row *row, uint32_t cap, uint32_t *cnt)
{
	*cnt = 0;
	if (kvp_sel_open_partition(s, role, model, group))
		return 200;
	for (uint32_t i = 0; i < s->rank_cnt && i < cap; i++) {
		struct kvp_load l;
		kvp_load_read(&s->region->book, s->rank[i].rank_slot, &l);
		row[i] = (struct kvp_load_row){s->rank[i].worker_id, s->rank[i].dp_rank, l.prefill_tok,
			kvp_load_blocks(&l), l.requests};
	}
	*cnt = s->rank_cnt;
	return 200;
}

int kvp_selection_potential_loads(struct kvp_selection *s, const struct kvp_select_request *q,
	struct kvp_load_row *row, uint32_t cap, uint32_t *cnt)
{
	enum kvp_tristate track = either(q->override.track_prefill_tokens, s->set.track_prefill_tokens);
	*cnt = 0;
	int status = kvp_sel_open_partition(s, q->role, q->model, q->group);
	status = status ? status : prepare(s, q, KVP_PROMPT_USE_INSPECT);
	if (status)
		return status;
	for (uint32_t i = 0; i < s->rank_cnt && i < cap; i++) {
		const struct kvp_sel_rank *r = &s->rank[i];
		kvp_sel_read_load(s, i);
		uint64_t added = track == KVP_YES ? kvp_sel_effective_prefill(s, i) : 0;
		row[i] = (struct kvp_load_row){r->worker_id, r->dp_rank, r->load.prefill_tok + added,
			kvp_load_blocks(&r->load) + r->additional_blk, r->load.requests};
	}
	*cnt = s->rank_cnt;
	return 200;
}

int kvp_selection_overlap_scores(struct kvp_selection *s, const struct kvp_select_request *q,
	struct kvp_overlap_row *row, uint32_t cap, uint32_t *cnt, uint32_t *block_size, uint32_t *num_blk)
{
	*cnt = 0;
	int status = kvp_sel_open_partition(s, q->role, q->model, q->group);
	status = status ? status : prepare(s, q, KVP_PROMPT_USE_INSPECT);
	if (status)
		return status;
	struct kvp_score_weights w = s->set.weights;
	if (!isnan(q->override.overlap_score_credit))
		w.overlap_score_credit = q->override.overlap_score_credit;
	for (uint32_t i = 0; i < s->rank_cnt && i < cap; i++) {
		const struct kvp_score_tiers *t = &s->rank[i].cached;
		row[i] = (struct kvp_overlap_row){s->rank[i].worker_id, s->rank[i].dp_rank, t->dev_blk,
			t->host_blk, t->disk_blk,
			kvp_score_credit_blk(&w, t->dev_blk, t->host_blk, t->disk_blk, 0)};
	}
	*cnt = s->rank_cnt;
	*block_size = s->part.block_size;
	*num_blk = s->prompt.blk_cnt;
	return 200;
}
