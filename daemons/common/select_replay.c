/* Selections kept under their id, and their booking by it. */
#include "daemons/common/select_priv.h"
#include <kvpick/clock.h>

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

void kvp_sel_remember(
	struct kvp_selection *s, const struct kvp_select_request *q, const struct kvp_select_answer *a)
{
	const struct kvp_str *lora = &q->prompt.lora;
	int records = s->set.records_routing == KVP_YES;
	if (records)
		kvp_sel_hash_rest(s);
	struct kvp_pending_item it = {.id = q->selection_id.ptr,
		.id_len = (uint32_t)q->selection_id.len,
		.names_len = (uint32_t)(q->model.len + q->group.len + lora->len),
		.part = s->part_idx,
		.worker_id = a->worker_id,
		.dp_rank = a->dp_rank,
		.seq = a->seq_hash,
		.seq_cnt = a->seq_cnt,
		.block = records ? s->prompt.local : NULL,
		.block_cnt = records ? s->prompt.local_cnt : 0,
		.isl_tok = a->isl_tok,
		.prefill_tok = a->effective_prefill_tok,
		.lora_hash = lora->len ? kvp_hash_bytes(lora->ptr, lora->len, 0) : 0,
		.expected_output_tok = q->expected_output_tok,
		.session = kvp_sel_steerable(s, q) ? q->session_id.ptr : NULL,
		.lora = lora->ptr,
		.lora_len = (uint32_t)lora->len,
		.session_len = kvp_sel_steerable(s, q) ? (uint32_t)q->session_id.len : 0,
		.flags = a->track_prefill_tokens == KVP_YES ? KVP_PENDING_TRACK_PREFILL : 0};
	kvp_pending_insert(&s->region->pending, &it, kvp_clock_mono_ns());
}

static int find_part(
	struct kvp_selection *s, enum kvp_part_role role, struct kvp_str model, struct kvp_str group)
{
	return kvp_cat_part_find(&s->region->cat, role, model.ptr, (uint32_t)model.len, group.ptr,
		(uint32_t)group.len, &s->part_idx);
}

void kvp_sel_forget(struct kvp_selection *s, enum kvp_part_role role, const struct kvp_reserve_request *q)
{
	if (find_part(s, role, q->model, q->group) == KVP_OK)
		kvp_pending_discard(
			&s->region->pending, s->part_idx, q->selection_id.ptr, q->selection_id.len);
}

struct replay {
	struct kvp_str model, group, id;
	struct kvp_pending_hit hit;
	uint64_t *block; /* block hashes that were kept */
	char session[KVP_PENDING_SESSION_MAX];
	char lora[KVP_PENDING_LORA_MAX];
};

static int nothing_kept(struct kvp_selection *s, const struct replay *r)
{
	const struct kvp_str name[] = {r->id, r->model, r->group};
	return kvp_sel_fail_at(s, 404, name,
		"no pending selection % for model=% routing_group=% (expired, already used, or never "
		"selected)");
}

/* kept_rank finds the kept worker and rank among those that are schedulable now. */
static int kept_rank(struct kvp_selection *s, const struct replay *r, uint32_t *at)
{
	for (uint32_t i = 0; i < s->rank_cnt; i++)
		if (s->rank[i].worker_id == r->hit.worker_id && s->rank[i].dp_rank == r->hit.dp_rank) {
			*at = i;
			if (kvp_sel_worker_of(s, &s->rank[i]) == 0)
				return 0;
		}
	char rank[64];
	int len = snprintf(rank, sizeof(rank), "%" PRIu64 " (dp_rank %" PRIu32 ")", r->hit.worker_id,
		r->hit.dp_rank);
	const struct kvp_str name[] = {{rank, (size_t)len}, r->model, r->group};
	return kvp_sel_fail_at(
		s, 404, name, "schedulable worker % not found for model=% routing_group=%");
}

static int book_kept(struct kvp_selection *s, struct replay *r, uint64_t h, const struct kvp_sel_rank *rank)
{
	uint64_t *seq = kvp_sel_scratch(&s->scratch_seq, r->hit.seq_cnt, sizeof(uint64_t));
	r->block = kvp_sel_scratch(&s->scratch_local, r->hit.block_cnt, sizeof(uint64_t));
	if (!seq || !r->block)
		return kvp_sel_fail(s, 500, "out of memory");
	if (kvp_pending_lists(&s->region->pending, &r->hit, seq, r->block, r->session))
		return nothing_kept(s, r);
	int blocks = s->set.track_active_blocks == KVP_YES;
	int track = (r->hit.flags & KVP_PENDING_TRACK_PREFILL) != 0;
	struct kvp_resv_ask a = {.worker_id = r->hit.worker_id,
		.seq = blocks ? seq : NULL,
		.seq_cnt = blocks ? r->hit.seq_cnt : 0,
		.prefill_tok = r->hit.prefill_tok,
		.isl_tok = r->hit.isl_tok,
		.lora_hash = r->hit.lora_hash,
		.now_ns = kvp_clock_mono_ns(),
		.part = s->part_idx,
		.dp_rank = r->hit.dp_rank,
		.rank_slot = rank->rank_slot,
		.rank_gen = rank->rank_gen,
		.expected_output_tok = r->hit.expected_output_tok,
		.flags = kvp_sel_booking_flags(s, track ? KVP_YES : KVP_NO)};
	int rc = KVP_ERR_AGAIN;
	for (int i = 0; rc == KVP_ERR_AGAIN && i < KVP_SEL_BUSY_RETRY_MAX; i++)
		rc = kvp_resv_book(&s->region->book, h, &a);
	if (rc == KVP_ERR_NOTFOUND)
		return kvp_sel_fail(s, 404, "Worker %" PRIu64 " dp_rank %" PRIu32 " not found",
			r->hit.worker_id, r->hit.dp_rank);
	return rc ? kvp_sel_booking_failed(s, rc, r->hit.worker_id) : 0;
}

int kvp_selection_replay(struct kvp_selection *s, enum kvp_part_role role, struct kvp_str model,
	struct kvp_str group, struct kvp_str selection_id, struct kvp_select_answer *a)
{
	struct replay r = {.model = model, .group = group, .id = selection_id};
	uint32_t at = 0;
	uint64_t h;
	memset(a, 0, sizeof(*a));
	int rc = find_part(s, role, model, group);
	rc = rc ? rc
		: kvp_pending_peek(&s->region->pending, s->part_idx, selection_id.ptr, selection_id.len,
			  kvp_clock_mono_ns(), &r.hit);
	if (rc == KVP_ERR_AGAIN)
		return kvp_sel_fail(s, 503, "too many selections at once; try again");
	if (rc)
		return nothing_kept(s, &r);
	int status = kvp_sel_open_partition(s, role, model, group);
	status = status ? status : kept_rank(s, &r, &at);
	if (!status && kvp_pending_lora(&s->region->pending, &r.hit, r.lora))
		status = nothing_kept(s, &r);
	struct kvp_str lora = {r.lora, r.hit.lora_len};
	status = status ? status : kvp_sel_claim(s, selection_id, lora, &h);
	if (status)
		return status;
	status = book_kept(s, &r, h, &s->rank[at]);
	if (status) {
		kvp_resv_abandon(&s->region->book, h);
		return status;
	}
	/* A newer selection of the id stays: only what was booked ends, also when the session refuses it. */
	kvp_pending_consume(&s->region->pending, &r.hit);
	status = kvp_sel_session_bind_kept(s, r.session, r.hit.session_len, h, &s->rank[at]);
	if (status) {
		kvp_resv_free(&s->region->book, h);
		return status;
	}
	kvp_ctr_add(s->ctr, KVP_CTR_SELECT_BOOKED, 1);
	kvp_sel_tell_routed(s, &s->rank[at], r.hit.block_cnt, r.block);
	a->selection_id = selection_id;
	a->worker_id = r.hit.worker_id;
	a->dp_rank = r.hit.dp_rank;
	a->endpoint = s->worker.endpoint;
	return 201;
}
