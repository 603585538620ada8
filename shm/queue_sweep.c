#include "shm/queue_priv.h"

#include <stdio.h>

/* ---- sweep ---- */

/* A record whose drainer died: what became of the claim decides. */
static void sweep_taken(
	struct kvp_queue *q, struct kvp_book *b, uint32_t idx, uint64_t s, struct kvp_queue_sweep *res)
{
	struct kvp_queue_rec_shm *r = &q->rec[idx];
	uint64_t resv = kvp_ld_rlx_u64(&r->resv);
	kvp_owner owner = kvp_ld_rlx_u32(&r->owner);
	if ((s & Q_ABANDONED) || (q->slots && kvp_owner_dead(q->slots, owner))) {
		if (resv && kvp_resv_abandon(b, resv) != KVP_OK)
			kvp_resv_free(b, resv);
		q_release(q, idx);
		res->freed_cnt++;
		return;
	}
	kvp_st_rlx_u64(&r->booked, 0);
	kvp_st_rlx_u32(&r->ans_first, 0); /* the chunks, also unlinked ones: sweep_chunks */
	kvp_st_rlx_u32(&r->ans_len, 0);
	if (!resv || kvp_resv_is_claim(b, resv)) {
		q_count(q, idx, Q_COUNT_IN);
		if (!q_move(q, idx, s, KVP_OWNER_SLOT(owner), Q_QUEUED))
			q_count(q, idx, Q_COUNT_OUT);
	} else {
		if (kvp_resv_abandon(b, resv) != KVP_OK) /* ousted */
			kvp_resv_free(b, resv);		 /* booked and never answered */
		KVP_POINT("queue:sweep_freed");
		if (q_move(q, idx, s, KVP_OWNER_SLOT(owner), Q_RETRY))
			q_ready(q, idx);
	}
	res->back_cnt++;
}

static void sweep_one(
	struct kvp_queue *q, struct kvp_book *b, uint32_t idx, kvp_owner dead, struct kvp_queue_sweep *res)
{
	uint64_t s = kvp_ld_acq_u64(&q->state[idx]);
	struct kvp_queue_rec_shm *r = &q->rec[idx];
	int mine = Q_SLOT(s) == KVP_OWNER_SLOT(dead) || Q_SLOT(s) == Q_NO_SLOT;
	switch (Q_STATE(s)) {
	case Q_TAKEN:
		if (mine) {
			sweep_taken(q, b, idx, s, res);
		} else if (kvp_ld_rlx_u32(&r->owner) == dead) {
			while (Q_STATE(s) == Q_TAKEN && !(s & Q_ABANDONED) &&
				!kvp_cas_ar_u64(&q->state[idx], s, s | Q_ABANDONED))
				s = kvp_ld_acq_u64(&q->state[idx]);
			if (Q_STATE(s) != Q_TAKEN) {
				sweep_one(q, b, idx, dead, res); /* finished meanwhile: done, of the dead */
				return;
			}
			res->left_cnt++;
		}
		return;
	case Q_QUEUED:
	case Q_RETRY:
		if (!mine || !q_move(q, idx, s, q_self(q), Q_DROP))
			return;
		if (Q_STATE(s) == Q_QUEUED)
			q_count(q, idx, Q_COUNT_OUT);
		kvp_resv_abandon(b, kvp_ld_rlx_u64(&r->resv));
		break;
	case Q_DONE:
		if (!mine)
			return;
		if (kvp_ld_rlx_u64(&r->booked))
			kvp_resv_free(b, kvp_ld_rlx_u64(&r->booked));
		break;
	case Q_FILL:
	case Q_DROP:
		if (!mine && Q_SLOT(s) != q_self(q)) /* an earlier sweep may have been killed at it */
			return;
		break;
	default:
		return;
	}
	KVP_POINT("queue:sweep");
	q_release(q, idx);
	res->freed_cnt++;
}

/* Chunks of freed records, and of answers that died with their drainer. One that a drainer takes right now
 * names a record that is being served. */
static uint32_t sweep_chunks(struct kvp_queue *q)
{
	uint32_t cnt = 0;
	for (uint32_t c = 1; c < q->chunk_cnt; c++) {
		uint64_t h = kvp_ld_acq_u64(&q->link[c].owner);
		if (!h)
			continue;
		uint32_t st = Q_STATE(q_state_of(q, h & ~Q_ANSWER));
		int stray = (h & Q_ANSWER) && (st == Q_QUEUED || st == Q_RETRY);
		if (st == Q_FREE || stray)
			cnt += kvp_cas_ar_u64(&q->link[c].owner, h, 0);
	}
	return cnt;
}

/* Waiting records of a partition and class (out of range: all), by a scan of all states. */
static uint32_t count_of(const struct kvp_queue *q, uint32_t part, uint32_t class)
{
	uint32_t n = 0;
	for (uint32_t i = 0; i < q->queued_max; i++) {
		const struct kvp_queue_rec_shm *r = &q->rec[i];
		if (Q_STATE(kvp_ld_acq_u64(&q->state[i])) != Q_QUEUED)
			continue;
		n += (part >= q->part_max || kvp_ld_rlx_u32(&r->part) == part) &&
		     (class >= KVP_POLICY_CLASS_MAX || kvp_ld_rlx_u32(&r->class) == class);
	}
	return n;
}

/* A kill between a record's step and its count leaves the count too high. It is put right if nobody counts
 * during a scan; a post under way has counted but is not yet seen, so one more look comes before the store:
 * its own change of the word makes that fail. */
static void recount(struct kvp_queue *q, uint64_t *word, uint32_t part, uint32_t class)
{
	for (int i = 0; i < 3; i++) {
		uint64_t seen = kvp_ld_acq_u64(word);
		int moving = 0;
		if ((uint32_t)seen == 0)
			return;
		for (uint32_t k = 0; k < q->queued_max; k++) {
			uint32_t st = Q_STATE(kvp_ld_acq_u64(&q->state[k]));
			moving |= st == Q_FILL || st == Q_TAKEN || st == Q_RETRY || st == Q_DROP;
		}
		uint32_t cnt = count_of(q, part, class);
		if (cnt == (uint32_t)seen)
			return;
		if (!moving && kvp_cas_ar_u64(word, seen, (seen & ~0xffffffffull) | cnt))
			return;
	}
}

void kvp_queue_sweep_owner(
	struct kvp_queue *q, struct kvp_book *b, kvp_owner dead, struct kvp_queue_sweep *res)
{
	*res = (struct kvp_queue_sweep){0, 0, 0, 0, 0};
	uint32_t slot = KVP_OWNER_SLOT(dead);
	for (uint32_t i = 0; i < q->queued_max; i++)
		if (Q_STATE(kvp_ld_acq_u64(&q->state[i])) != Q_FREE)
			sweep_one(q, b, i, dead, res);
	for (uint32_t i = 0; i < q->queued_max; i++) { /* answers whose drainer died before it told anybody */
		uint32_t st = Q_STATE(kvp_ld_acq_u64(&q->state[i]));
		if (st == Q_DONE || st == Q_RETRY)
			q_ready(q, i);
	}
	for (uint32_t p = 0; p < q->part_max; p++) {
		uint64_t w = kvp_ld_acq_u64(&q->part[p].drain);
		while (dead && DRAIN_OWNER(w) == dead) {
			if (kvp_cas_ar_u64(&q->part[p].drain, w, w & ~0xffffffffull))
				res->drain_cnt++;
			w = kvp_ld_acq_u64(&q->part[p].drain);
		}
	}
	if (slot < q->slot_max)
		kvp_st_rlx_u32(&q->slot[slot].asked, 0);
	recount(q, &q->hdr->total, q->part_max, KVP_POLICY_CLASS_MAX);
	for (uint32_t p = 0; p < q->part_max; p++) {
		if (!(uint32_t)kvp_ld_acq_u64(&q->part[p].total))
			continue;
		recount(q, &q->part[p].total, p, KVP_POLICY_CLASS_MAX);
		for (uint32_t c = 0; c < KVP_POLICY_CLASS_MAX; c++)
			recount(q, &q->part[p].class[c], p, c);
	}
	res->chunk_cnt = sweep_chunks(q);
	q_ctr(q, KVP_CTR_QUEUE_SWEPT, res->freed_cnt);
	q_ctr(q, KVP_CTR_QUEUE_BACK, res->back_cnt);
	kvp_queue_nudge(q);
}

/* ---- check ---- */

struct faults {
	uint64_t cnt;
};

static void fault(struct faults *f, const char *what, uint64_t where)
{
	if (f->cnt++ < 10)
		fprintf(stderr, "queue.check: %s at %llu\n", what, (unsigned long long)where);
}

/* chain counts its chunks; all must belong to h. */
static uint32_t chain(const struct kvp_queue *q, struct faults *f, uint64_t h, uint32_t c, uint32_t len)
{
	uint32_t n = 0;
	for (; c && n <= q->chunk_cnt; n++) {
		if (c >= q->chunk_cnt || kvp_ld_rlx_u64(&q->link[c].owner) != h) {
			fault(f, "chunk of another record", Q_IDX(h & ~Q_ANSWER));
			return n;
		}
		c = kvp_ld_rlx_u32(&q->link[c].next);
	}
	if (n != (len + CHUNK_WORDS - 1) / CHUNK_WORDS)
		fault(f, "words and chunks differ", Q_IDX(h & ~Q_ANSWER));
	return n;
}

static void check_counts(const struct kvp_queue *q, struct faults *f)
{
	if ((uint32_t)kvp_ld_rlx_u64(&q->hdr->total) != count_of(q, q->part_max, KVP_POLICY_CLASS_MAX))
		fault(f, "total count", 0);
	for (uint32_t p = 0; p < q->part_max; p++) {
		const struct kvp_queue_part_shm *s = &q->part[p];
		uint32_t all = (uint32_t)kvp_ld_rlx_u64(&s->total), classes = 0;
		if (all != count_of(q, p, KVP_POLICY_CLASS_MAX))
			fault(f, "count of a partition", p);
		for (uint32_t c = 0; c < KVP_POLICY_CLASS_MAX; c++)
			classes += (uint32_t)kvp_ld_rlx_u64(&s->class[c]);
		if (classes != all)
			fault(f, "counts of classes", p);
		if (DRAIN_OWNER(kvp_ld_rlx_u64(&s->drain)))
			fault(f, "drain word is held", p);
	}
}

uint64_t kvp_queue_check(const struct kvp_queue *q)
{
	struct faults f = {0};
	uint64_t held = 0, linked = 0;
	for (uint32_t i = 0; i < q->queued_max; i++) {
		uint64_t s = kvp_ld_acq_u64(&q->state[i]);
		int bit = (int)(kvp_ld_rlx_u64(&q->used[i / 64]) >> (i % 64) & 1);
		const struct kvp_queue_rec_shm *r = &q->rec[i];
		if (Q_STATE(s) >= Q_CNT || bit != (Q_STATE(s) != Q_FREE))
			fault(&f, "state or use bit", i);
		if (Q_STATE(s) == Q_FREE)
			continue;
		if (Q_STATE(s) != Q_QUEUED && Q_STATE(s) != Q_DONE && Q_STATE(s) != Q_RETRY)
			fault(&f, "unfinished step", i);
		if (kvp_ld_rlx_u32(&r->part) >= q->part_max ||
			kvp_ld_rlx_u32(&r->class) >= KVP_POLICY_CLASS_MAX)
			fault(&f, "partition or class", i);
		uint64_t h = Q_HANDLE(Q_GEN(s), i);
		uint32_t c = kvp_ld_rlx_u32(&r->ans_first);
		linked += chain(q, &f, h, kvp_ld_rlx_u32(&r->first), kvp_ld_rlx_u32(&r->len));
		linked += c ? chain(q, &f, h | Q_ANSWER, c, kvp_ld_rlx_u32(&r->ans_len)) : 0;
	}
	for (uint32_t c = 1; c < q->chunk_cnt; c++)
		held += kvp_ld_rlx_u64(&q->link[c].owner) != 0;
	if (held != linked)
		fault(&f, "chunks without a record", held - linked);
	check_counts(q, &f);
	return f.cnt;
}
