#include "shm/queue_priv.h"

static int holder_lost(const struct kvp_queue *q, const struct kvp_queue_part_shm *p, uint32_t owner)
{
	uint64_t now_ns = kvp_clock_mono_ns(), since_ns = kvp_ld_rlx_u64(&p->drain_ns);
	if (owner == q->owner || (now_ns > since_ns && now_ns - since_ns > KVP_QUEUE_STALL_NS))
		return 1;
	return q->slots && kvp_owner_dead(q->slots, owner);
}

int kvp_queue_drain_begin(struct kvp_queue *q, uint32_t part, uint32_t *seen)
{
	if (part >= q->part_max)
		return KVP_ERR_EXISTS;
	struct kvp_queue_part_shm *p = &q->part[part];
	/* The kick comes first: whoever holds the word finds it when it wants to let go. pairs with:
	 * kvp_queue_drain_end */
	uint64_t w = kvp_faa_ar_u64(&p->drain, DRAIN_KICK) + DRAIN_KICK;
	KVP_POINT("queue:kick");
	uint32_t lost = 0;
	for (;;) {
		uint32_t owner = DRAIN_OWNER(w);
		if (owner && owner != lost && !holder_lost(q, p, owner))
			return KVP_ERR_EXISTS;
		lost = owner;
		/* The time first: with that of the one before, who comes next would take the word again. */
		kvp_st_rlx_u64(&p->drain_ns, kvp_clock_mono_ns());
		if (kvp_cas_ar_u64(&p->drain, w, (w & ~0xffffffffull) | q->owner)) {
			q_ctr(q, KVP_CTR_QUEUE_TAKEOVER, owner != 0 && owner != q->owner);
			break;
		}
		w = kvp_ld_acq_u64(&p->drain);
	}
	*seen = DRAIN_KICKS(w);
	KVP_POINT("queue:drain");
	return KVP_OK;
}

int kvp_queue_drain_end(struct kvp_queue *q, uint32_t part, uint32_t *seen)
{
	struct kvp_queue_part_shm *p = &q->part[part];
	for (;;) {
		uint64_t w = kvp_ld_acq_u64(&p->drain);
		if (DRAIN_OWNER(w) != q->owner)
			return KVP_OK; /* taken over: the new holder looks */
		if (DRAIN_KICKS(w) != *seen) {
			*seen = DRAIN_KICKS(w);
			kvp_st_rlx_u64(&p->drain_ns, kvp_clock_mono_ns());
			return KVP_ERR_AGAIN;
		}
		KVP_POINT("queue:undrain");
		if (kvp_cas_ar_u64(&p->drain, w, w & ~0xffffffffull))
			return KVP_OK;
	}
}

void kvp_queue_drain_leave(struct kvp_queue *q, uint32_t part)
{
	struct kvp_queue_part_shm *p = &q->part[part];
	uint64_t w = kvp_ld_acq_u64(&p->drain);
	while (DRAIN_OWNER(w) == q->owner && !kvp_cas_ar_u64(&p->drain, w, w & ~0xffffffffull))
		w = kvp_ld_acq_u64(&p->drain);
	uint32_t self = q_self(q);
	if (self >= q->slot_max)
		return;
	kvp_st_rel_u32(&q->slot[self].asked, 1);
	if (q->slots)
		kvp_slot_wake(q->slots, self);
}

int kvp_queue_stalled(const struct kvp_queue *q, uint32_t part)
{
	if (part >= q->part_max)
		return 0;
	const struct kvp_queue_part_shm *p = &q->part[part];
	uint32_t owner = DRAIN_OWNER(kvp_ld_acq_u64(&p->drain));
	return owner && holder_lost(q, p, owner);
}

void kvp_queue_turns(const struct kvp_queue *q, uint32_t part, struct kvp_drr *d)
{
	const struct kvp_queue_part_shm *p = &q->part[part];
	d->cursor = kvp_ld_rlx_u32(&p->cursor);
	d->carry = kvp_ld_rlx_u32(&p->carry);
	for (uint32_t i = 0; i < KVP_POLICY_CLASS_MAX; i++)
		d->deficit[i] = kvp_ld_rlx_u64(&p->deficit[i]);
}

void kvp_queue_turns_set(struct kvp_queue *q, uint32_t part, const struct kvp_drr *d)
{
	struct kvp_queue_part_shm *p = &q->part[part];
	kvp_st_rlx_u32(&p->cursor, d->cursor);
	kvp_st_rlx_u32(&p->carry, d->carry);
	for (uint32_t i = 0; i < KVP_POLICY_CLASS_MAX; i++)
		kvp_st_rlx_u64(&p->deficit[i], d->deficit[i]);
}

/* again asks the owner of a taken record to claim its id anew. */
static void again(struct kvp_queue *q, uint32_t idx)
{
	uint64_t s = kvp_ld_acq_u64(&q->state[idx]);
	uint32_t owner = KVP_OWNER_SLOT(kvp_ld_rlx_u32(&q->rec[idx].owner));
	kvp_st_rlx_u64(&q->rec[idx].booked, 0);
	if (!(s & Q_ABANDONED) && q_move(q, idx, s, owner, Q_RETRY))
		q_ready(q, idx);
	else
		q_release(q, idx);
}

int kvp_queue_take(struct kvp_queue *q, struct kvp_book *b, uint64_t h, uint64_t *resv)
{
	uint32_t idx = Q_IDX(h);
	uint64_t s = q_state_of(q, h);
	if (Q_STATE(s) != Q_QUEUED || !q_move(q, idx, s, q_self(q), Q_TAKEN))
		return KVP_ERR_NOTFOUND;
	KVP_POINT("queue:taken");
	q_count(q, idx, Q_COUNT_OUT);
	*resv = kvp_ld_rlx_u64(&q->rec[idx].resv);
	if (*resv && kvp_resv_hand(b, *resv) != KVP_OK) {
		if (kvp_resv_abandon(b, *resv) == KVP_OK)
			again(q, idx); /* ousted: its owner learns by claiming anew that the id is taken */
		else
			q_release(q, idx); /* the owner was swept just now */
		return KVP_ERR_NOTFOUND;
	}
	KVP_POINT("queue:handed");
	return KVP_OK;
}

int kvp_queue_finish(struct kvp_queue *q, uint64_t h, uint64_t booked, const uint64_t *word, uint32_t n)
{
	uint32_t idx = Q_IDX(h), last = 0;
	uint64_t s = q_state_of(q, h);
	struct kvp_queue_rec_shm *r = &q->rec[idx < q->queued_max ? idx : 0];
	if (Q_STATE(s) != Q_TAKEN || Q_SLOT(s) != q_self(q))
		return KVP_ERR_NOTFOUND;
	for (uint32_t i = 0; i < n && n <= KVP_QUEUE_INLINE; i++)
		kvp_st_rlx_u64(&r->inl[i], word[i]);
	if (n > KVP_QUEUE_INLINE) {
		int rc = q_chunks_put(q, h | Q_ANSWER, &r->ans_first, &last, &r->ans_len, word, n);
		if (rc) {
			q_chunks_drop(q, h | Q_ANSWER, kvp_ld_rlx_u32(&r->ans_first));
			kvp_st_rlx_u32(&r->ans_first, 0);
			kvp_st_rlx_u32(&r->ans_len, 0);
			q_ctr(q, KVP_CTR_QUEUE_FULL, 1);
			return rc;
		}
	}
	kvp_st_rlx_u32(&r->ans_len, n);
	kvp_st_rlx_u64(&r->booked, booked);
	KVP_POINT("queue:answer");
	if (!q_move(q, idx, s & ~Q_ABANDONED, KVP_OWNER_SLOT(kvp_ld_rlx_u32(&r->owner)), Q_DONE)) {
		if (Q_STATE(q_state_of(q, h)) == Q_TAKEN)
			q_release(q, idx);
		return KVP_ERR_NOTFOUND;
	}
	KVP_POINT("queue:done");
	q_ctr(q, KVP_CTR_QUEUE_ANSWERED, 1);
	q_ready(q, idx);
	return KVP_OK;
}

uint32_t kvp_queue_nudge(struct kvp_queue *q)
{
	uint64_t seen[(KVP_SLOT_MAX + 63) / 64] = {0};
	uint32_t n = 0;
	if (!kvp_queue_total(q))
		return 0;
	for (uint32_t i = q_next_used(q, 0); i < q->queued_max; i = q_next_used(q, i + 1)) {
		uint32_t slot = KVP_OWNER_SLOT(kvp_ld_rlx_u32(&q->rec[i].owner));
		if (slot >= q->slot_max || slot >= KVP_SLOT_MAX || (seen[slot / 64] >> (slot % 64) & 1))
			continue;
		seen[slot / 64] |= 1ull << (slot % 64);
		kvp_st_rel_u32(&q->slot[slot].asked, 1); /* pairs with: kvp_queue_asked */
		if (q->slots)
			kvp_slot_wake(q->slots, slot);
		n++;
	}
	return n;
}

int kvp_queue_asked(struct kvp_queue *q)
{
	uint32_t self = q_self(q);
	return self < q->slot_max && kvp_ld_acq_u32(&q->slot[self].asked) &&
	       kvp_xchg_ar_u32(&q->slot[self].asked, 0);
}
