#include "shm/book_priv.h"

#include <stdlib.h>
#include <string.h>

#define MAGIC 0x314b4f4f4250564bULL /* "KVPBOOK1" */
#define LAYOUT 4
#define REQ_BITS KVP_LOAD_REQ_BITS
#define REQ_MAX ((1ULL << REQ_BITS) - 1)

struct layout { /* offsets from the object's start */
	uint64_t rank, ctl, id, resv, chunk, key, used, act, end;
	uint64_t act_lines;
	uint32_t id_cnt, chunk_cnt, rank_stride, ctl_stride;
};

static uint32_t layout_hash(void)
{
	const size_t w[] = {KVP_LOAD_PADDED_MAX, sizeof(struct kvp_bucket_shm), KVP_ACTIVE_RUN,
		ACT_USED_LINES, sizeof(struct kvp_book_hdr_shm), sizeof(struct kvp_rank_shm),
		sizeof(struct kvp_resv_shm), sizeof(struct kvp_chunk_shm), offsetof(struct kvp_resv_shm, id),
		offsetof(struct kvp_resv_shm, out_fx), offsetof(struct kvp_book_hdr_shm, live), ST_CNT,
		KVP_ACTIVE_REACH, KVP_RESV_WINDOW, CHUNK_KEYS};
	return kvp_obj_hash(w, sizeof(w) / sizeof(w[0]));
}

static uint64_t pow2_up(uint64_t x)
{
	uint64_t p = 1;
	while (p < x)
		p <<= 1;
	return p;
}

static int layout_of(const struct kvp_geom *g, struct layout *l)
{
	if (!g || g->rank_max < 1 || g->rank_max > 65536 || g->resv_max < 64 || g->resv_max > 4194304 ||
		g->active_block_max < 1024 || g->active_block_max > 1ULL << 30)
		return KVP_ERR_INVAL;
	l->id_cnt = (uint32_t)pow2_up(2ULL * g->resv_max);
	/* a partly filled last chunk for every reservation, and chunk 0, which stands for "none" */
	l->chunk_cnt = (uint32_t)(g->active_block_max / CHUNK_KEYS + g->resv_max + 64);
	/* full runs, and for every reservation a partly filled one and one more where it leaves another's
	 * path; at most three quarters full */
	uint64_t runs = g->active_block_max / KVP_ACTIVE_RUN + 2ULL * g->resv_max;
	l->act_lines = pow2_up(runs + runs / 3) / 4;
	l->rank = KVP_PAGE;
	int padded = g->rank_max <= KVP_LOAD_PADDED_MAX;
	l->rank_stride = padded ? 64 : sizeof(struct kvp_rank_shm);
	l->ctl_stride = padded ? 64 : 8;
	l->ctl = l->rank + sizeof(struct kvp_rank_shm);
	if (!padded)
		l->ctl = kvp_align_up(l->rank + ((uint64_t)g->rank_max * l->rank_stride), KVP_PAGE);
	l->id = kvp_align_up(l->ctl + ((uint64_t)g->rank_max * l->ctl_stride), KVP_PAGE);
	l->resv = kvp_align_up(l->id + (uint64_t)l->id_cnt * sizeof(struct kvp_id_shm), KVP_PAGE);
	l->chunk = kvp_align_up(l->resv + (uint64_t)l->id_cnt * sizeof(struct kvp_resv_shm), KVP_PAGE);
	l->key = kvp_align_up(l->chunk + (uint64_t)l->chunk_cnt * sizeof(struct kvp_chunk_shm), KVP_PAGE);
	l->used = kvp_align_up(l->key + (uint64_t)l->chunk_cnt * CHUNK_KEYS * 8, KVP_PAGE);
	l->act = kvp_align_up(l->used + (l->act_lines / ACT_USED_LINES / 64 + 1) * 8, KVP_PAGE);
	l->end = kvp_align_up(l->act + l->act_lines * sizeof(struct kvp_bucket_shm), KVP_PAGE);
	return KVP_OK;
}

uint64_t kvp_book_align(void)
{
	return KVP_PAGE;
}

uint64_t kvp_book_footprint(const struct kvp_geom *g)
{
	struct layout l;
	return layout_of(g, &l) ? 0 : l.end;
}

int kvp_book_new(void *mem, const struct kvp_geom *g)
{
	struct layout l;
	if (!mem || ((uintptr_t)mem & (KVP_PAGE - 1)) || layout_of(g, &l))
		return KVP_ERR_INVAL;
	struct kvp_book_hdr_shm *h = mem;
	kvp_obj_begin(&h->obj, LAYOUT, layout_hash(), l.end, g->region_gen);
	h->act_reach = 1;
	h->id_reach = 8;
	h->live = 0;
	kvp_obj_ready(&h->obj, MAGIC);
	return KVP_OK;
}

int kvp_book_join(void *mem, const struct kvp_geom *g, struct kvp_book *out)
{
	struct layout l;
	int rc = kvp_obj_join(mem, MAGIC, LAYOUT, layout_hash());
	if (rc)
		return rc;
	struct kvp_book_hdr_shm *h = mem;
	if (layout_of(g, &l) || h->obj.footprint != l.end)
		return KVP_ERR_LAYOUT;
	char *base = mem;
	memset(out, 0, sizeof(*out));
	out->hdr = h;
	out->rank = (struct kvp_rank_shm *)(void *)(base + l.rank);
	out->rank_ctl = (uint64_t *)(void *)(base + l.ctl);
	out->rank_stride = l.rank_stride;
	out->ctl_stride = l.ctl_stride;
	out->id = (struct kvp_id_shm *)(void *)(base + l.id);
	out->resv = (struct kvp_resv_shm *)(void *)(base + l.resv);
	out->chunk = (struct kvp_chunk_shm *)(void *)(base + l.chunk);
	out->key = (uint64_t *)(void *)(base + l.key);
	out->act_used = (uint64_t *)(void *)(base + l.used);
	out->act = (struct kvp_bucket_shm *)(void *)(base + l.act);
	out->act_line_mask = l.act_lines - 1;
	out->salt[0] = g->salt[0];
	out->salt[1] = g->salt[1];
	out->rank_max = g->rank_max;
	out->id_cnt = l.id_cnt;
	out->resv_max = g->resv_max;
	out->chunk_cnt = l.chunk_cnt;
	return KVP_OK;
}

void kvp_book_attach(struct kvp_book *b, kvp_owner owner, struct kvp_ctr_column_shm *column)
{
	b->owner = owner;
	b->ctr = column;
	/* Cursors of different processes start far apart, so that they seldom try the same chunk. */
	b->chunk_cur = (uint32_t)(((uint64_t)owner * 0x9e3779b1u) % b->chunk_cnt);
	/* and an owner's entries do not get the same nonces as those of its predecessor in the slot */
	b->nonce = (uint32_t)((uint64_t)owner * 0x9e3779b1u >> 16) & 0xffffu;
}

void kvp_book_leave(struct kvp_book *b)
{
	free(b->scratch);
	memset(b, 0, sizeof(*b));
}

int kvp_book_delete(void *mem)
{
	kvp_obj_delete(mem);
	return KVP_OK;
}

/* The state that follows once a pending operation is applied. */
static uint64_t s_applied(uint64_t s)
{
	static const uint8_t next[ST_CNT] = {
		[ST_BOOK_A] = ST_BOOK_REF,
		[ST_BOOK_A0] = ST_BOOKED,
		[ST_BOOK_B] = ST_BOOKED,
		[ST_UNDO_B] = ST_UNDO_A,
		[ST_UNDO_A] = ST_CLAIM,
		[ST_PRE_A] = ST_BOOKED,
		[ST_OUT_B] = ST_BOOKED,
		[ST_FREE_A] = ST_FREE_REF,
		[ST_FREE_A1] = ST_FREED,
		[ST_FREE_B] = ST_FREED,
	};
	uint64_t n = s_to(s, next[S_BASE(s)], S_SLOT(s));
	if (S_BASE(s) == ST_PRE_A)
		n &= ~(uint64_t)(FL_TOK | FL_WANT_PRE);
	if (S_BASE(s) == ST_UNDO_A)
		n &= ~(uint64_t)FL_TOK;
	if (S_BASE(s) == ST_OUT_B)
		n ^= S_SEL_BIT;
	return n;
}

int book_step(struct kvp_book *b, uint32_t idx, uint64_t *s, enum kvp_base base)
{
	uint64_t *w = book_state(b, idx);
	for (;;) {
		uint64_t cur = kvp_ld_acq_u64(w);
		if ((cur ^ *s) & ~(uint64_t)FL_WANT) {
			*s = cur;
			return 0;
		}
		uint64_t n = s_to(cur, base, S_SLOT(cur));
		if (base == ST_CLAIM)
			n &= ~(uint64_t)FL_TOK;
		if (S_BASE(cur) == ST_OUT_FIX)
			n ^= S_SEL_BIT;
		if (kvp_cas_ar_u64(w, cur, n)) {
			*s = n;
			return 1;
		}
	}
}

void book_advance(struct kvp_book *b, uint32_t idx, uint64_t s)
{
	uint64_t *w = book_state(b, idx);
	for (;;) {
		uint64_t cur = kvp_ld_acq_u64(w);
		if ((cur ^ s) & ~(uint64_t)FL_WANT)
			return;
		if (kvp_cas_ar_u64(w, cur, s_applied(cur)))
			return;
	}
}

void book_help(struct kvp_book *b, uint64_t tag)
{
	uint32_t idx = (uint32_t)(tag >> 40);
	if (idx >= b->id_cnt)
		return; /* a fence, or garbage */
	uint64_t s = kvp_ld_acq_u64(book_state(b, idx));
	if (tag_of(idx, s) == tag && IS_IN(s, BASES_ON_A | BASES_ON_B))
		book_advance(b, idx, s);
}

static uint64_t load_a(struct kvp_book *b, uint64_t old, const struct kvp_resv_shm *e, uint64_t s)
{
	uint64_t tok = old >> REQ_BITS, req = old & REQ_MAX;
	uint64_t dt = s & FL_TOK ? kvp_ld_rlx_u64(&e->prefill_tok) : 0;
	uint64_t dr = S_BASE(s) == ST_PRE_A ? 0 : 1;
	if (IS_IN(s, BASE_BIT(ST_BOOK_A) | BASE_BIT(ST_BOOK_A0))) {
		if (dt > KVP_LOAD_TOK_MAX - tok || dr > REQ_MAX - req)
			book_ctr(b, KVP_CTR_BOOK_CLAMPED, 1);
		tok = dt > KVP_LOAD_TOK_MAX - tok ? KVP_LOAD_TOK_MAX : tok + dt;
		req = dr > REQ_MAX - req ? REQ_MAX : req + dr;
	} else {
		if (dt > tok || dr > req)
			book_ctr(b, KVP_CTR_BOOK_CLAMPED, 1);
		tok = dt > tok ? 0 : tok - dt;
		req = dr > req ? 0 : req - dr;
	}
	return tok << REQ_BITS | req;
}

static uint64_t load_b(struct kvp_book *b, uint64_t old, const struct kvp_resv_shm *e, uint64_t s)
{
	int64_t d = (int64_t)kvp_ld_rlx_u64(S_BASE(s) == ST_OUT_B ? &e->delta_out : &e->delta);
	__int128 sum = (__int128)old - (old > KVP_LOAD_BLK_MAX ? (__int128)1 << 64 : 0) + d;
	if (sum <= (__int128)KVP_LOAD_BLK_MAX && sum >= -(__int128)KVP_LOAD_BLK_DEBT_MAX)
		return (uint64_t)sum;
	book_ctr(b, KVP_CTR_BOOK_CLAMPED, 1);
	return sum > 0 ? KVP_LOAD_BLK_MAX : -KVP_LOAD_BLK_DEBT_MAX;
}

enum book_apply book_apply(
	struct kvp_book *b, uint32_t idx, uint64_t s, uint64_t want, const struct kvp_load *seen)
{
	struct kvp_resv_shm *e = &b->resv[idx];
	uint32_t rank = book_rank_of(b, e);
	if (rank >= b->rank_max)
		return APPLY_FENCED;
	struct kvp_rank_shm *r = kvp_rank_at(b, rank);
	int on_b = IS_IN(s, BASES_ON_B);
	struct kvp_u128 *pair = &r->pair[on_b ? PAIR_B : PAIR_A];
	uint64_t tag = tag_of(idx, s);
	struct kvp_u128 old = kvp_ld_u128(pair);
	for (;;) {
		if (old.hi == tag) {
			book_advance(b, idx, s);
			return APPLY_DONE;
		}
		/* After the pair: whoever replaced our tag moved our state on first. */
		uint64_t cur = kvp_ld_acq_u64(book_state(b, idx));
		if ((cur ^ s) & ~(uint64_t)FL_WANT)
			return APPLY_MOVED;
		/* After the state: a recount settles states before it writes the pair anew. */
		uint64_t ctl = book_ctl(b, rank);
		if (want ? ctl != want
			 : CTL_STATE(ctl) != KVP_CTL_OPEN || CTL_GEN(ctl) != kvp_ld_rlx_u32(&e->rank_gen))
			return APPLY_FENCED;
		if (seen &&
			(old.hi != seen->version ||
				old.lo != (seen->prefill_tok << REQ_BITS | seen->requests) ||
				kvp_load_blk_fx(kvp_ld_acq_u64(&r->pair[PAIR_B].lo)) != seen->active_blk_fx))
			return APPLY_STALE;
		book_help(b, old.hi);
		struct kvp_u128 n = {on_b ? load_b(b, old.lo, e, s) : load_a(b, old.lo, e, s), tag};
		KVP_POINT("book:before_pair");
		if (kvp_cas_u128(pair, &old, n)) {
			KVP_POINT("book:after_pair");
			book_advance(b, idx, s);
			return APPLY_DONE;
		}
		book_ctr(b, KVP_CTR_BOOK_RETRIED, 1);
	}
}

void book_fence(struct kvp_book *b, uint32_t rank, uint64_t tag, enum book_fence_load mode)
{
	for (int i = PAIR_A; i <= PAIR_B; i++) {
		struct kvp_u128 *pair = &kvp_rank_at(b, rank)->pair[i];
		struct kvp_u128 old = kvp_ld_u128(pair);
		while (old.hi != tag) {
			book_help(b, old.hi);
			struct kvp_u128 n = {mode == FENCE_ZERO ? 0 : old.lo, tag};
			if (kvp_cas_u128(pair, &old, n))
				break;
		}
		KVP_POINT("book:fence");
	}
}

/* One reservation of a rank that is gone: settled ones are ours to release; in the exclusive states and in a
 * free their performer (or its sweep) still works on the body and releases it. Bookings in flight see the
 * control word and go back to their claim by themselves. */
static uint32_t drop_one(struct kvp_book *b, uint32_t idx, uint32_t rank, uint64_t ctl)
{
	uint64_t *w = book_state(b, idx);
	for (;;) {
		uint64_t s = kvp_ld_acq_u64(w);
		KVP_POINT("book:drop_look");
		if (!IS_IN(s, BASES_LIVE | BASES_FREEING | BASE_BIT(ST_FREED)))
			return 0;
		/* After the state, which does not change while the body is that of another booking. */
		if (book_rank_of(b, &b->resv[idx]) != rank ||
			kvp_ld_rlx_u32(&b->resv[idx].rank_gen) != CTL_GEN(ctl))
			return 0;
		if (S_BASE(s) ==
			ST_FREED) { /* its performer may have died before it dropped the references */
			book_purge(b, idx, rank, CTL_EPOCH(ctl), CTL_BACK(ctl) + 1, PURGE_ALL);
			return 0;
		}
		int ours = IS_IN(s, BASE_BIT(ST_BOOKED) | BASE_BIT(ST_PRE_A) | BASE_BIT(ST_OUT_B));
		uint64_t n = s_to(s, ST_FREED, ours ? book_slot(b) : S_SLOT(s)) & ~(uint64_t)FL_WANT;
		if (!kvp_cas_ar_u64(w, s, n))
			continue;
		KVP_POINT("book:drop");
		book_purge(b, idx, rank, CTL_EPOCH(ctl), CTL_BACK(ctl) + 1, PURGE_ALL);
		if (ours)
			book_release(b, idx);
		book_ctr(b, KVP_CTR_BOOK_DROPPED, 1);
		return 1;
	}
}

uint32_t book_rank_drop(struct kvp_book *b, uint32_t rank, uint64_t ctl)
{
	uint32_t cnt = 0;
	for (uint32_t i = 0; i < b->id_cnt; i++)
		cnt += drop_one(b, i, rank, ctl);
	return cnt;
}

/* The rest of a close, also of one that was killed: fence first, so that no booking can settle behind the
 * scan. */
static void close_run(struct kvp_book *b, uint32_t rank, uint64_t ctl)
{
	book_fence(b, rank, tag_fence(CTL_EPOCH(ctl), FENCE_CLOSE), FENCE_ZERO);
	book_rank_drop(b, rank, ctl);
}

int kvp_rank_close(struct kvp_book *b, uint32_t rank_slot, uint32_t gen)
{
	if (rank_slot >= b->rank_max)
		return KVP_ERR_INVAL;
	uint64_t *w = book_ctl_word(b, rank_slot), r;
	do {
		r = kvp_ld_acq_u64(w);
		if (CTL_GEN(r) != gen)
			return KVP_ERR_NOTFOUND;
		if (CTL_STATE(r) == KVP_CTL_CLOSED)
			break;
	} while (!kvp_cas_ar_u64(w, r, CTL(gen, CTL_EPOCH(r), CTL_BACK(r), KVP_CTL_CLOSED)));
	KVP_POINT("book:close");
	close_run(b, rank_slot, CTL(gen, CTL_EPOCH(r), CTL_BACK(r), KVP_CTL_CLOSED));
	return KVP_OK;
}

int kvp_rank_open(struct kvp_book *b, uint32_t rank_slot, uint32_t gen)
{
	if (rank_slot >= b->rank_max || gen == 0)
		return KVP_ERR_INVAL;
	uint64_t *w = book_ctl_word(b, rank_slot), r = kvp_ld_acq_u64(w);
	if (CTL_STATE(r) != KVP_CTL_CLOSED) {
		if (CTL_GEN(r) == gen)
			return KVP_OK;
		kvp_rank_close(b, rank_slot, CTL_GEN(r));
	} else if (r) {
		close_run(b, rank_slot, r); /* it may have been killed */
	}
	r = kvp_ld_acq_u64(w);
	uint32_t ep = CTL_EPOCH(r) + 1;
	book_fence(b, rank_slot, tag_fence(ep & 0xfffffu, FENCE_OPEN), FENCE_ZERO);
	KVP_POINT("book:open");
	kvp_st_rel_u64(w, CTL(gen, ep, 0, KVP_CTL_OPEN));
	return KVP_OK;
}
