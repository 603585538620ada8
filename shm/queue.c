#include "shm/queue_priv.h"

#include <string.h>

#define MAGIC 0x3145554551564bULL /* "KVQEUE1" */
#define LAYOUT 1
#define QUEUED_MAX (1u << 20)

static uint32_t layout_hash(void)
{
	const size_t w[] = {sizeof(struct kvp_queue_rec_shm), sizeof(struct kvp_queue_part_shm),
		sizeof(struct kvp_queue_slot_shm), sizeof(struct kvp_queue_hdr_shm), CHUNK_WORDS,
		offsetof(struct kvp_queue_rec_shm, inl), offsetof(struct kvp_queue_part_shm, seq)};
	return kvp_obj_hash(w, sizeof(w) / sizeof(w[0]));
}

/* Offsets of the parts; the last is the size. */
struct places {
	uint64_t state, used, part, slot, ready, rec, link, pool, end;
	uint32_t chunk_cnt, word_cnt;
};

static int lay_out(const struct kvp_geom *g, struct places *p)
{
	if (!g || g->queued_max == 0 || g->queued_max > QUEUED_MAX || g->part_max == 0 ||
		g->part_max > KVP_PART_MAX || g->slot_max == 0 || g->slot_max > KVP_SLOT_MAX)
		return KVP_ERR_INVAL;
	uint64_t n = g->queued_max;
	p->chunk_cnt = g->queued_max * CHUNKS_PER_REC < CHUNKS_MIN ? CHUNKS_MIN
								   : g->queued_max * CHUNKS_PER_REC;
	p->word_cnt = (uint32_t)kvp_align_up((n + 63) / 64, 8);
	p->state = kvp_align_up(sizeof(struct kvp_queue_hdr_shm), KVP_FALSE_SHARE);
	p->used = kvp_align_up(p->state + n * 8, KVP_FALSE_SHARE);
	p->part = kvp_align_up(p->used + (uint64_t)p->word_cnt * 8, KVP_FALSE_SHARE);
	p->slot = p->part + g->part_max * sizeof(struct kvp_queue_part_shm);
	p->ready = p->slot + g->slot_max * sizeof(struct kvp_queue_slot_shm);
	p->rec = kvp_align_up(p->ready + (uint64_t)g->slot_max * p->word_cnt * 8, KVP_PAGE);
	p->link = kvp_align_up(p->rec + n * sizeof(struct kvp_queue_rec_shm), KVP_PAGE);
	p->pool = kvp_align_up(p->link + p->chunk_cnt * sizeof(struct kvp_queue_link_shm), KVP_PAGE);
	p->end = p->pool + (uint64_t)p->chunk_cnt * CHUNK_WORDS * 8;
	return KVP_OK;
}

uint64_t kvp_queue_align(void)
{
	return KVP_PAGE;
}

uint64_t kvp_queue_footprint(const struct kvp_geom *g)
{
	struct places p;
	return lay_out(g, &p) == KVP_OK ? p.end : 0;
}

int kvp_queue_new(void *mem, const struct kvp_geom *g)
{
	struct places p;
	if (!mem || ((uintptr_t)mem & (KVP_PAGE - 1)) || lay_out(g, &p))
		return KVP_ERR_INVAL;
	kvp_obj_begin(mem, LAYOUT, layout_hash(), p.end, g->region_gen);
	kvp_obj_ready(mem, MAGIC);
	return KVP_OK;
}

int kvp_queue_join(void *mem, const struct kvp_geom *g, struct kvp_queue *q)
{
	struct places p;
	int rc = kvp_obj_join(mem, MAGIC, LAYOUT, layout_hash());
	if (rc)
		return rc;
	if (lay_out(g, &p) || ((struct kvp_objhdr *)mem)->footprint != p.end)
		return KVP_ERR_LAYOUT;
	uint8_t *base = mem;
	memset(q, 0, sizeof(*q));
	q->hdr = mem;
	q->state = (uint64_t *)(void *)(base + p.state);
	q->used = (uint64_t *)(void *)(base + p.used);
	q->part = (struct kvp_queue_part_shm *)(void *)(base + p.part);
	q->slot = (struct kvp_queue_slot_shm *)(void *)(base + p.slot);
	q->ready = (uint64_t *)(void *)(base + p.ready);
	q->rec = (struct kvp_queue_rec_shm *)(void *)(base + p.rec);
	q->link = (struct kvp_queue_link_shm *)(void *)(base + p.link);
	q->pool = (uint64_t *)(void *)(base + p.pool);
	q->queued_max = g->queued_max;
	q->word_cnt = p.word_cnt;
	q->chunk_cnt = p.chunk_cnt;
	q->part_max = g->part_max;
	q->slot_max = g->slot_max;
	return KVP_OK;
}

void kvp_queue_leave(struct kvp_queue *q)
{
	memset(q, 0, sizeof(*q));
}

int kvp_queue_delete(void *mem)
{
	kvp_obj_delete(mem);
	return KVP_OK;
}

void kvp_queue_attach(
	struct kvp_queue *q, kvp_owner owner, struct kvp_slots *slots, struct kvp_ctr_column_shm *column)
{
	q->owner = owner;
	q->slots = slots;
	q->ctr = column;
	q->cursor = KVP_OWNER_SLOT(owner) * (q->chunk_cnt / (q->slot_max + 1));
}

/* ---- chunks ---- */

static int chunk_try(struct kvp_queue *q, uint64_t h, uint32_t c)
{
	if (kvp_ld_rlx_u64(&q->link[c].owner) != 0 || !kvp_cas_ar_u64(&q->link[c].owner, 0, h))
		return 0;
	kvp_st_rlx_u32(&q->link[c].next, 0);
	return 1;
}

/* Chunk 0 stays unused: 0 means none. What this process has seen given back is taken first: a queue of a few
 * stays in a few warm chunks, where going round would touch the whole pool. */
static uint32_t chunk_take(struct kvp_queue *q, uint64_t h)
{
	while (q->again_cnt) {
		uint32_t c = q->again[--q->again_cnt];
		if (chunk_try(q, h, c))
			return c;
	}
	for (uint32_t i = 0; i < q->chunk_cnt; i++) {
		uint32_t c = q->cursor + 1 < q->chunk_cnt ? q->cursor + 1 : 1;
		q->cursor = c;
		if (chunk_try(q, h, c))
			return c;
	}
	return 0;
}

void q_chunks_drop(struct kvp_queue *q, uint64_t h, uint32_t first)
{
	for (uint32_t c = first, left = q->chunk_cnt; c && c < q->chunk_cnt && left; left--) {
		uint32_t next = kvp_ld_rlx_u32(&q->link[c].next);
		if (!kvp_cas_ar_u64(&q->link[c].owner, h, 0))
			return; /* what is behind it is found by the sweep */
		if (q->again_cnt < KVP_QUEUE_AGAIN_MAX)
			q->again[q->again_cnt++] = c;
		c = next;
	}
}

int q_chunks_put(struct kvp_queue *q, uint64_t h, uint32_t *first, uint32_t *last, uint32_t *len,
	const uint64_t *word, uint32_t n)
{
	uint32_t at = kvp_ld_rlx_u32(len), c = kvp_ld_rlx_u32(last);
	for (uint32_t i = 0; i < n; i++, at++) {
		if (at % CHUNK_WORDS == 0) {
			uint32_t fresh = chunk_take(q, h);
			if (!fresh)
				return KVP_ERR_FULL;
			KVP_POINT("queue:chunk");
			if (c)
				kvp_st_rlx_u32(&q->link[c].next, fresh);
			else
				kvp_st_rlx_u32(first, fresh);
			kvp_st_rlx_u32(last, fresh);
			c = fresh;
		}
		kvp_st_rlx_u64(&q->pool[(uint64_t)c * CHUNK_WORDS + at % CHUNK_WORDS], word[i]);
		kvp_st_rlx_u32(len, at + 1);
	}
	return KVP_OK;
}

static void chunks_get(const struct kvp_queue *q, uint32_t c, uint32_t len, uint32_t first, uint64_t *out,
	uint32_t n)
{
	for (uint32_t k = first / CHUNK_WORDS; k && c && c < q->chunk_cnt; k--)
		c = kvp_ld_rlx_u32(&q->link[c].next);
	for (uint32_t i = 0; i < n; i++) {
		uint32_t at = first + i;
		if (i && at % CHUNK_WORDS == 0 && c && c < q->chunk_cnt)
			c = kvp_ld_rlx_u32(&q->link[c].next);
		out[i] = at < len && c && c < q->chunk_cnt
				 ? kvp_ld_rlx_u64(&q->pool[(uint64_t)c * CHUNK_WORDS + at % CHUNK_WORDS])
				 : 0;
	}
}

/* ---- records ---- */

uint32_t q_next_used(const struct kvp_queue *q, uint32_t idx)
{
	while (idx < q->queued_max) {
		uint64_t w = kvp_ld_rlx_u64(&q->used[idx / 64]) >> (idx % 64);
		if (w)
			return idx + (uint32_t)__builtin_ctzll(w);
		idx = (idx / 64 + 1) * 64;
	}
	return q->queued_max;
}

static void bit_put(uint64_t *word, uint64_t bit, int on)
{
	uint64_t w;
	do {
		w = kvp_ld_rlx_u64(word);
	} while (!kvp_cas_ar_u64(word, w, on ? w | bit : w & ~bit));
}

void q_count(struct kvp_queue *q, uint32_t idx, enum q_count dir)
{
	uint64_t d = dir == Q_COUNT_IN ? COUNT_MORE : COUNT_LESS;
	struct kvp_queue_part_shm *p = q_part_of(q, idx);
	uint32_t class = kvp_ld_rlx_u32(&q->rec[idx].class);
	if (!p || class >= KVP_POLICY_CLASS_MAX)
		return;
	kvp_faa_ar_u64(&q->hdr->total, d);
	kvp_faa_ar_u64(&p->total, d);
	kvp_faa_ar_u64(&p->class[class], d);
}

void q_release(struct kvp_queue *q, uint32_t idx)
{
	uint64_t s = kvp_ld_acq_u64(&q->state[idx]), h = Q_HANDLE(Q_GEN(s), idx);
	struct kvp_queue_rec_shm *r = &q->rec[idx];
	while (Q_STATE(s) != Q_DROP) { /* the abandoned bit may come just now */
		if (Q_STATE(s) == Q_FREE || Q_GEN(s) != Q_GEN(h))
			return;
		uint64_t n = Q_WORD(Q_GEN(s), q_self(q), Q_DROP);
		s = kvp_cas_ar_u64(&q->state[idx], s, n) ? n : kvp_ld_acq_u64(&q->state[idx]);
	}
	KVP_POINT("queue:drop");
	q_chunks_drop(q, h, kvp_ld_rlx_u32(&r->first));
	q_chunks_drop(q, h | Q_ANSWER, kvp_ld_rlx_u32(&r->ans_first));
	KVP_POINT("queue:dropped");
	bit_put(&q->used[idx / 64], 1ull << (idx % 64), 0); /* before it can be taken again */
	q_move(q, idx, s, 0, Q_FREE);
}

int kvp_queue_begin(struct kvp_queue *q, uint64_t *h)
{
	for (uint32_t w = 0; w < q->word_cnt; w++) {
		uint64_t zero = ~kvp_ld_rlx_u64(&q->used[w]);
		for (; zero; zero &= zero - 1) {
			uint32_t idx = w * 64 + (uint32_t)__builtin_ctzll(zero);
			if (idx >= q->queued_max)
				break;
			uint64_t s = kvp_ld_acq_u64(&q->state[idx]);
			uint32_t gen = Q_GEN(s) + 1 ? Q_GEN(s) + 1 : 1;
			if (Q_STATE(s) != Q_FREE ||
				!kvp_cas_ar_u64(&q->state[idx], s, Q_WORD(gen, q_self(q), Q_FILL)))
				continue;
			KVP_POINT("queue:begin");
			bit_put(&q->used[w], 1ull << (idx % 64), 1);
			struct kvp_queue_rec_shm *r = &q->rec[idx];
			kvp_st_rlx_u32(&r->owner, q->owner);
			kvp_st_rlx_u32(&r->first, 0);
			kvp_st_rlx_u32(&r->last, 0);
			kvp_st_rlx_u32(&r->len, 0);
			kvp_st_rlx_u32(&r->ans_first, 0);
			kvp_st_rlx_u32(&r->ans_len, 0);
			kvp_st_rlx_u64(&r->booked, 0);
			kvp_st_rlx_u64(&r->resv, 0);
			*h = Q_HANDLE(gen, idx);
			return KVP_OK;
		}
	}
	q_ctr(q, KVP_CTR_QUEUE_FULL, 1);
	return KVP_ERR_FULL;
}

int kvp_queue_put(struct kvp_queue *q, uint64_t h, const uint64_t *word, uint32_t n)
{
	struct kvp_queue_rec_shm *r = &q->rec[Q_IDX(h)];
	int rc = q_chunks_put(q, h, &r->first, &r->last, &r->len, word, n);
	q_ctr(q, KVP_CTR_QUEUE_FULL, rc != KVP_OK);
	return rc;
}

void kvp_queue_abort(struct kvp_queue *q, uint64_t h)
{
	if (Q_STATE(q_state_of(q, h)) == Q_FILL)
		q_release(q, Q_IDX(h));
}

int kvp_queue_post(struct kvp_queue *q, struct kvp_queue_entry *e)
{
	uint32_t idx = Q_IDX(e->h);
	uint64_t s = q_state_of(q, e->h), score;
	if (Q_STATE(s) != Q_FILL || e->part >= q->part_max || e->class >= KVP_POLICY_CLASS_MAX)
		return KVP_ERR_INVAL;
	struct kvp_queue_rec_shm *r = &q->rec[idx];
	e->key.seq = kvp_faa_ar_u64(&q->part[e->part].seq, 1);
	e->owner = q->owner;
	memcpy(&score, &e->key.score, sizeof(score));
	kvp_st_rlx_u64(&r->resv, e->resv);
	kvp_st_rlx_u64(&r->isl_tok, e->isl_tok);
	kvp_st_rlx_u64(&r->cached_tok, e->cached_tok);
	kvp_st_rlx_u64(&r->posted_ns, e->posted_ns);
	kvp_st_rlx_u64(&r->pinned_worker_id, e->pinned_worker_id);
	kvp_st_rlx_u64(&r->score, score);
	kvp_st_rlx_u64(&r->seq, e->key.seq);
	kvp_st_rlx_u32(&r->strict, e->key.strict);
	kvp_st_rlx_u32(&r->part, e->part);
	kvp_st_rlx_u32(&r->class, e->class);
	kvp_st_rlx_u32(&r->pinned_dp_rank, e->pinned_dp_rank);
	kvp_st_rlx_u32(&r->has_pinned, e->has_pinned == KVP_YES);
	q_count(q, idx, Q_COUNT_IN);
	KVP_POINT("queue:counted");
	if (!q_move(q, idx, s, q_self(q), Q_QUEUED)) /* swept: the caller was taken for dead */
		return KVP_ERR_NOTFOUND;
	KVP_POINT("queue:posted");
	q_ctr(q, KVP_CTR_QUEUE_POSTED, 1);
	return KVP_OK;
}

enum kvp_queue_state kvp_queue_state(const struct kvp_queue *q, uint64_t h)
{
	switch (Q_STATE(q_state_of(q, h))) {
	case Q_QUEUED:
	case Q_TAKEN:
		return KVP_Q_WAITS;
	case Q_DONE:
		return KVP_Q_ANSWERED;
	case Q_RETRY:
		return KVP_Q_RETRY;
	default:
		return KVP_Q_GONE;
	}
}

int kvp_queue_cancel(struct kvp_queue *q, uint64_t h)
{
	uint32_t idx = Q_IDX(h);
	for (;;) {
		uint64_t s = q_state_of(q, h);
		switch (Q_STATE(s)) {
		case Q_QUEUED:
		case Q_RETRY:
			if (!q_move(q, idx, s, q_self(q), Q_DROP))
				break;
			KVP_POINT("queue:cancel");
			if (Q_STATE(s) == Q_QUEUED)
				q_count(q, idx, Q_COUNT_OUT);
			q_release(q, idx);
			q_ctr(q, KVP_CTR_QUEUE_CANCELLED, 1);
			return KVP_OK;
		case Q_TAKEN:
			if (!kvp_cas_ar_u64(&q->state[idx], s, s | Q_ABANDONED))
				break;
			q_ctr(q, KVP_CTR_QUEUE_CANCELLED, 1);
			return KVP_ERR_AGAIN;
		case Q_DONE:
			return KVP_ERR_EXISTS;
		default:
			return KVP_ERR_NOTFOUND;
		}
	}
}

int kvp_queue_again(struct kvp_queue *q, uint64_t h, uint64_t resv)
{
	uint64_t s = q_state_of(q, h);
	if (Q_STATE(s) != Q_RETRY)
		return KVP_ERR_NOTFOUND;
	kvp_st_rlx_u64(&q->rec[Q_IDX(h)].resv, resv);
	q_count(q, Q_IDX(h), Q_COUNT_IN);
	if (q_move(q, Q_IDX(h), s, q_self(q), Q_QUEUED))
		return KVP_OK;
	q_count(q, Q_IDX(h), Q_COUNT_OUT);
	return KVP_ERR_NOTFOUND;
}

void q_ready(struct kvp_queue *q, uint32_t idx)
{
	uint32_t slot = KVP_OWNER_SLOT(kvp_ld_rlx_u32(&q->rec[idx].owner));
	if (slot >= q->slot_max)
		return;
	bit_put(&q->ready[(uint64_t)slot * q->word_cnt + idx / 64], 1ull << (idx % 64), 1);
	KVP_POINT("queue:ready");
	if (q->slots)
		kvp_slot_wake(q->slots, slot);
}

int kvp_queue_next_ready(struct kvp_queue *q, uint32_t *cursor, uint64_t *h)
{
	uint32_t slot = q_self(q);
	uint64_t *mine = &q->ready[(uint64_t)slot * q->word_cnt];
	if (slot >= q->slot_max)
		return KVP_ERR_NOTFOUND;
	for (; *cursor < q->word_cnt; ++*cursor) {
		uint64_t w;
		while ((w = kvp_ld_acq_u64(&mine[*cursor]))) {
			uint32_t idx = *cursor * 64 + (uint32_t)__builtin_ctzll(w);
			bit_put(&mine[*cursor], w & -w, 0); /* before the look at the record */
			if (idx >= q->queued_max)
				continue;
			uint64_t s = kvp_ld_acq_u64(&q->state[idx]);
			if ((Q_STATE(s) != Q_DONE && Q_STATE(s) != Q_RETRY) ||
				kvp_ld_rlx_u32(&q->rec[idx].owner) != q->owner)
				continue;
			*h = Q_HANDLE(Q_GEN(s), idx);
			return KVP_OK;
		}
	}
	return KVP_ERR_NOTFOUND;
}

void kvp_queue_end(struct kvp_queue *q, uint64_t h)
{
	if (Q_STATE(q_state_of(q, h)) == Q_DONE)
		q_release(q, Q_IDX(h));
}

/* ---- copies ---- */

static void copy_entry(const struct kvp_queue *q, uint32_t idx, uint64_t s, struct kvp_queue_entry *e)
{
	const struct kvp_queue_rec_shm *r = &q->rec[idx];
	uint64_t score = kvp_ld_rlx_u64(&r->score);
	*e = (struct kvp_queue_entry){.h = Q_HANDLE(Q_GEN(s), idx),
		.resv = kvp_ld_rlx_u64(&r->resv),
		.isl_tok = kvp_ld_rlx_u64(&r->isl_tok),
		.cached_tok = kvp_ld_rlx_u64(&r->cached_tok),
		.posted_ns = kvp_ld_rlx_u64(&r->posted_ns),
		.pinned_worker_id = kvp_ld_rlx_u64(&r->pinned_worker_id),
		.key = {.strict = kvp_ld_rlx_u32(&r->strict), .seq = kvp_ld_rlx_u64(&r->seq)},
		.part = kvp_ld_rlx_u32(&r->part),
		.class = kvp_ld_rlx_u32(&r->class),
		.pinned_dp_rank = kvp_ld_rlx_u32(&r->pinned_dp_rank),
		.has_pinned = kvp_ld_rlx_u32(&r->has_pinned) ? KVP_YES : KVP_NO,
		.owner = kvp_ld_rlx_u32(&r->owner)};
	memcpy(&e->key.score, &score, sizeof(score));
}

/* still: does a record's word stand as it was when the copy began? The abandoned bit may come meanwhile. */
static int still(const struct kvp_queue *q, uint64_t h, uint64_t s)
{
	kvp_fence_acq();
	return ((q_state_of(q, h) ^ s) & ~Q_ABANDONED) == 0;
}

int kvp_queue_entry(const struct kvp_queue *q, uint64_t h, struct kvp_queue_entry *e)
{
	uint64_t s = q_state_of(q, h);
	if (Q_STATE(s) == Q_FREE)
		return KVP_ERR_NOTFOUND;
	copy_entry(q, Q_IDX(h), s, e);
	return still(q, h, s) ? KVP_OK : KVP_ERR_NOTFOUND;
}

int kvp_queue_words(
	const struct kvp_queue *q, uint64_t h, uint32_t first, uint64_t *out, uint32_t n, uint32_t *len)
{
	uint64_t s = q_state_of(q, h);
	if (Q_STATE(s) == Q_FREE)
		return KVP_ERR_NOTFOUND;
	const struct kvp_queue_rec_shm *r = &q->rec[Q_IDX(h)];
	*len = kvp_ld_rlx_u32(&r->len);
	chunks_get(q, kvp_ld_rlx_u32(&r->first), *len, first, out, n);
	return still(q, h, s) ? KVP_OK : KVP_ERR_NOTFOUND;
}

int kvp_queue_answer(const struct kvp_queue *q, uint64_t h, uint64_t *out, uint32_t n, uint32_t *len)
{
	uint64_t s = q_state_of(q, h);
	if (Q_STATE(s) != Q_DONE)
		return KVP_ERR_NOTFOUND;
	const struct kvp_queue_rec_shm *r = &q->rec[Q_IDX(h)];
	uint32_t c = kvp_ld_rlx_u32(&r->ans_first);
	*len = kvp_ld_rlx_u32(&r->ans_len);
	if (c)
		chunks_get(q, c, *len, 0, out, n);
	for (uint32_t i = 0; !c && i < n; i++)
		out[i] = i < *len && i < KVP_QUEUE_INLINE ? kvp_ld_rlx_u64(&r->inl[i]) : 0;
	return still(q, h, s) ? KVP_OK : KVP_ERR_NOTFOUND;
}

uint32_t kvp_queue_list(
	const struct kvp_queue *q, uint32_t part, struct kvp_queue_entry *out, uint32_t cap)
{
	uint32_t n = 0;
	for (uint32_t i = q_next_used(q, 0); i < q->queued_max && n < cap; i = q_next_used(q, i + 1)) {
		uint64_t s = kvp_ld_acq_u64(&q->state[i]);
		if (Q_STATE(s) != Q_QUEUED || kvp_ld_rlx_u32(&q->rec[i].part) != part)
			continue;
		copy_entry(q, i, s, &out[n]);
		kvp_fence_acq();
		n += kvp_ld_rlx_u64(&q->state[i]) == s && out[n].class < KVP_POLICY_CLASS_MAX;
	}
	return n;
}

void kvp_queue_usage(
	const struct kvp_queue *q, uint32_t part, uint32_t class, struct kvp_policy_usage *use)
{
	*use = (struct kvp_policy_usage){0, 0, 0};
	for (uint32_t i = q_next_used(q, 0); i < q->queued_max; i = q_next_used(q, i + 1)) {
		struct kvp_queue_entry e;
		uint64_t s = kvp_ld_acq_u64(&q->state[i]);
		if (Q_STATE(s) != Q_QUEUED)
			continue;
		copy_entry(q, i, s, &e);
		kvp_fence_acq();
		if (kvp_ld_rlx_u64(&q->state[i]) != s || e.part != part ||
			(class != KVP_POLICY_CLASS_MAX && e.class != class))
			continue;
		use->requests++;
		use->isl_tok += e.isl_tok;
		use->cached_tok += e.cached_tok;
	}
}

uint64_t kvp_queue_total(const struct kvp_queue *q)
{
	kvp_fence_sc(); /* load given back before, count read after; pairs with: kvp_queue_post, q_count */
	return (uint32_t)kvp_ld_acq_u64(&q->hdr->total);
}

uint32_t kvp_queue_waiting(const struct kvp_queue *q, uint32_t part, uint32_t class)
{
	if (part >= q->part_max)
		return 0;
	const struct kvp_queue_part_shm *p = &q->part[part];
	return (uint32_t)kvp_ld_acq_u64(class < KVP_POLICY_CLASS_MAX ? &p->class[class] : &p->total);
}
