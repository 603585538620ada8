#include "shm/book_priv.h"

#include <string.h>

#define PASS_MAX 4

/* ---- recount of a rank ---- */

static int on_rank(const struct kvp_book *b, uint32_t idx, uint32_t rank, uint32_t gen)
{
	const struct kvp_resv_shm *e = &b->resv[idx];
	return book_rank_of(b, e) == rank && kvp_ld_rlx_u32(&e->rank_gen) == gen;
}

/* What state s becomes when its rank is counted anew; 0 = it stays as it is. Pending operations on pairs
 * count as done. Settled states change their phase only, so that no operation that saw the rank open can
 * begin any more. Bookings in flight are not touched: they see the control word and go back. */
static uint64_t settled(uint64_t s)
{
	if (IS_IN(s, BASES_FREEING))
		return s_to(s, ST_FREED, S_SLOT(s));
	switch (S_BASE(s)) {
	case ST_BOOKED:
	case ST_OUT_REF:
		return s_to(s, S_BASE(s), S_SLOT(s));
	case ST_PRE_A:
		return s_to(s, ST_BOOKED, S_SLOT(s)) & ~(uint64_t)(FL_TOK | FL_WANT_PRE);
	case ST_OUT_B:
		return s_to(s, ST_BOOKED, S_SLOT(s)) ^ S_SEL_BIT;
	case ST_OUT_FRAC:
		return s_to(s, ST_OUT_FIX, S_SLOT(s));
	default:
		return 0;
	}
}

static void settle_all(struct kvp_book *b, uint32_t rank, uint32_t gen)
{
	for (uint32_t i = 0; i < b->id_cnt; i++) {
		uint64_t *w = book_state(b, i);
		for (;;) {
			uint64_t s = kvp_ld_acq_u64(w), n = settled(s);
			if (!n || !on_rank(b, i, rank, gen) || kvp_cas_ar_u64(w, s, n))
				break;
		}
		KVP_POINT("book:recount_settle");
	}
}

/* Pair words of a rank from its reservations, their blocks referenced anew. 0 = another recount or a close
 * took the rank over. */
static int count_all(struct kvp_book *b, uint32_t rank, uint64_t ctl, uint64_t sum[2])
{
	struct book_dom dom = book_dom(b, rank, CTL_EPOCH(ctl));
	struct book_dom old = book_dom(b, rank, (CTL_EPOCH(ctl) - CTL_BACK(ctl)) & 0xfffffu);
	uint64_t tok = 0, req = 0;
	int64_t blk = 0;
	for (uint32_t i = 0; i < b->id_cnt; i++) {
		uint64_t s = kvp_ld_acq_u64(book_state(b, i));
		if (!IS_IN(s, BASES_LIVE) || !on_rank(b, i, rank, CTL_GEN(ctl)))
			continue;
		if (book_ctl(b, rank) != ctl)
			return 0;
		struct kvp_resv_shm *e = &b->resv[i];
		uint32_t sel = S_BASE(s) == ST_OUT_FIX ? !S_SEL(s) : S_SEL(s);
		tok += s & FL_TOK ? kvp_ld_rlx_u64(&e->prefill_tok) : 0;
		req++;
		blk += (int64_t)kvp_ld_rlx_u64(&e->out_fx[sel]);
		uint32_t cnt;
		if (book_count(b, i, dom, old, &blk, &cnt))
			book_ctr(b, KVP_CTR_BOOK_LOST, 1);
		KVP_POINT("book:recount_ref");
		/* Whoever takes the rank over purges this epoch only of reservations that it finds. */
		if (book_ctl(b, rank) != ctl) {
			book_uncount(b, dom, cnt);
			return 0;
		}
	}
	for (uint32_t i = 0; i < b->id_cnt; i++) /* fractions that were being given */
		if (S_BASE(kvp_ld_acq_u64(book_state(b, i))) == ST_OUT_FIX &&
			on_rank(b, i, rank, CTL_GEN(ctl)))
			book_frac(b, i, dom, kvp_ld_rlx_u64(&b->resv[i].frac_fx), &blk);
	tok = tok < KVP_LOAD_TOK_MAX ? tok : KVP_LOAD_TOK_MAX;
	sum[PAIR_A] = tok << 24 | req;
	sum[PAIR_B] = (uint64_t)blk;
	return 1;
}

static int store_pairs(struct kvp_book *b, uint32_t rank, uint32_t epoch, const uint64_t sum[2])
{
	for (int i = PAIR_A; i <= PAIR_B; i++) {
		struct kvp_u128 *p = &kvp_rank_at(b, rank)->pair[i], old = kvp_ld_u128(p);
		if (old.hi != tag_fence(epoch, FENCE_RECOUNT))
			return 0;
		struct kvp_u128 new = {sum[i], tag_fence(epoch, FENCE_COUNTED)};
		if (!kvp_cas_u128(p, &old, new))
			return 0;
		KVP_POINT("book:recount_store");
	}
	return 1;
}

static void purge_old(struct kvp_book *b, uint32_t rank, uint64_t ctl, enum book_purge_what what)
{
	for (uint32_t i = 0; i < b->id_cnt; i++)
		if (S_BASE(kvp_ld_acq_u64(book_state(b, i))) > ST_CLAIM && on_rank(b, i, rank, CTL_GEN(ctl)))
			book_purge(b, i, rank, (CTL_EPOCH(ctl) - 1) & 0xfffffu, CTL_BACK(ctl), what);
}

/* Entries of earlier epochs go, then the rank opens and gets what was left for it meanwhile. */
static void recount_end(struct kvp_book *b, uint32_t rank, uint64_t ctl)
{
	uint32_t gen = CTL_GEN(ctl);
	purge_old(b, rank, ctl, PURGE_ALL);
	KVP_POINT("book:recount_clean");
	if (!kvp_cas_ar_u64(book_ctl_word(b, rank), ctl, CTL(gen, CTL_EPOCH(ctl), 0, KVP_CTL_OPEN)))
		return;
	KVP_POINT("book:recount_open");
	for (uint32_t i = 0; i < b->id_cnt; i++) {
		uint64_t s = kvp_ld_acq_u64(book_state(b, i));
		int open_op = S_BASE(s) == ST_PRE_A || S_BASE(s) == ST_OUT_B;
		if (IS_IN(s, BASES_LIVE) && ((s & FL_WANT) || open_op) && on_rank(b, i, rank, gen))
			book_wanted(b, i);
	}
	book_ctr(b, KVP_CTR_BOOK_RECOUNTED, 1);
}

/* Counts a rank anew. A recount that was interrupted is taken over: counting starts again in a further epoch
 * with the weights of the last complete one; cleaning just goes on. */
static void recount(struct kvp_book *b, uint32_t rank)
{
	uint64_t *w = book_ctl_word(b, rank), r, n;
	for (;;) {
		r = kvp_ld_acq_u64(w);
		if (CTL_STATE(r) == KVP_CTL_CLOSED)
			return;
		if (CTL_STATE(r) == KVP_CTL_CLEAN) {
			recount_end(b, rank, r);
			return;
		}
		uint32_t back = CTL_BACK(r) < CTL_BACK_MAX ? CTL_BACK(r) + 1 : CTL_BACK_MAX;
		n = CTL(CTL_GEN(r), CTL_EPOCH(r) + 1, back, KVP_CTL_RECOUNT);
		if (kvp_cas_ar_u64(w, r, n))
			break;
	}
	KVP_POINT("book:recount");
	book_fence(b, rank, tag_fence(CTL_EPOCH(n), FENCE_RECOUNT), FENCE_KEEP);
	settle_all(b, rank, CTL_GEN(n));
	/* Room for the new entries. What is counted again without an old entry gets weight one. */
	purge_old(b, rank, n, PURGE_WHOLE);
	uint64_t sum[2];
	if (!count_all(b, rank, n, sum) || !store_pairs(b, rank, CTL_EPOCH(n), sum))
		return;
	uint64_t clean = CTL(CTL_GEN(n), CTL_EPOCH(n), CTL_BACK(n), KVP_CTL_CLEAN);
	if (kvp_cas_ar_u64(w, n, clean))
		recount_end(b, rank, clean);
}

/* ---- sweep ---- */

struct sweep {
	struct kvp_book *b;
	kvp_owner dead;
	void (*visit)(void *ctx, uint64_t h);
	void *ctx;
	struct kvp_sweep_result *res;
	uint32_t left; /* reservations that need another pass */
};

static int performed_by_dead(const struct sweep *w, uint64_t s)
{
	uint32_t slot = S_SLOT(s);
	return slot == S_NO_SLOT || (w->dead && slot == KVP_OWNER_SLOT(w->dead));
}

/* Gives up what its dead performer had in state s, unless another has moved it on: claims are handed over. */
static void sweep_claim(struct sweep *w, uint32_t idx, uint64_t s)
{
	struct kvp_resv_shm *e = &w->b->resv[idx];
	KVP_POINT("book:sweep_claim");
	if (IS_IN(s, BASES_BOOKING)) {
		book_gate_clean(w->b, kvp_ld_rlx_u32(&e->filling), S_SLOT(s));
		uint64_t ctl = kvp_ld_rlx_u64(&e->op_ctl);
		uint32_t rank = book_rank_of(w->b, e);
		/* under another control word, what it still references is garbage */
		if (rank < w->b->rank_max && book_ctl(w->b, rank) != ctl)
			book_purge(w->b, idx, rank, CTL_EPOCH(ctl), 1, PURGE_ALL);
	}
	if (!kvp_cas_ar_u64(book_state(w->b, idx), s, s_to(s, ST_FREED, book_slot(w->b)))) {
		w->left++;
		return;
	}
	*(IS_IN(s, BASES_BOOKING) ? &w->res->undo_cnt : &w->res->claim_cnt) += 1;
	book_release(w->b, idx);
}

/* A booking that its dead claimer had begun. Exact where the pairs tell; a rank whose references are
 * uncertain is counted anew, which makes the control word differ from the booking's. */
static void sweep_booking(struct sweep *w, uint32_t idx, uint64_t s)
{
	struct kvp_book *b = w->b;
	struct kvp_resv_shm *e = &b->resv[idx];
	uint32_t rank = book_rank_of(b, e);
	uint64_t ctl = kvp_ld_rlx_u64(&e->op_ctl);
	if (rank >= b->rank_max || book_ctl(b, rank) != ctl) {
		sweep_claim(w, idx, s);
		return;
	}
	switch (S_BASE(s)) {
	case ST_BOOK_A:
	case ST_BOOK_A0:
		book_help(b, kvp_ld_u128(&kvp_rank_at(b, rank)->pair[PAIR_A]).hi);
		if (kvp_ld_acq_u64(book_state(b, idx)) == s)
			sweep_claim(w, idx, s); /* never applied, and nobody else applies it */
		break;
	case ST_BOOK_REF:
	case ST_UNDO_REF:
		recount(b, rank);
		w->res->rank_cnt++;
		break;
	default:
		book_apply(b, idx, s, ctl, NULL);
		w->res->finish_cnt++;
		break;
	}
	w->left++;
}

static void sweep_pending(struct sweep *w, uint32_t idx, uint64_t s)
{
	struct kvp_book *b = w->b;
	struct kvp_resv_shm *e = &b->resv[idx];
	uint32_t rank = book_rank_of(b, e);
	uint64_t ctl = rank < b->rank_max ? book_ctl(b, rank) : 0;
	w->left++;
	if (CTL_STATE(ctl) == KVP_CTL_CLOSED || CTL_GEN(ctl) != kvp_ld_rlx_u32(&e->rank_gen)) {
		uint64_t n = s_to(s, ST_FREED, S_NO_SLOT) & ~(uint64_t)FL_WANT;
		kvp_cas_ar_u64(book_state(b, idx), s, n);
		return;
	}
	if (CTL_STATE(ctl) != KVP_CTL_OPEN) {
		recount(b, rank);
		w->res->rank_cnt++;
		return;
	}
	switch (S_BASE(s)) {
	case ST_OUT_REF: /* nothing counted yet */
		w->res->undo_cnt += (uint32_t)book_step(b, idx, &s, ST_BOOKED);
		break;
	case ST_OUT_FIX: /* counted by a recount */
		w->res->finish_cnt += (uint32_t)book_step(b, idx, &s, ST_BOOKED);
		break;
	case ST_FREE_REF:
		if (!kvp_ld_rlx_u32(&e->seq_cnt)) { /* no references: the delta is certain */
			book_tell_swept(b, idx);
			book_free_run(b, idx, ctl);
			w->res->finish_cnt++;
			break;
		}
		/* fall through */
	case ST_OUT_FRAC:
		recount(b, rank);
		w->res->rank_cnt++;
		w->res->finish_cnt++;
		break;
	default:
		book_apply(b, idx, s, 0, NULL);
		w->res->finish_cnt++;
		break;
	}
}

static void sweep_settled(struct sweep *w, uint32_t idx, uint64_t s)
{
	struct kvp_book *b = w->b;
	struct kvp_resv_shm *e = &b->resv[idx];
	uint32_t rank = book_rank_of(b, e);
	uint64_t h = HANDLE(S_GEN(s), idx), ctl = rank < b->rank_max ? book_ctl(b, rank) : 0;
	if (CTL_STATE(ctl) == KVP_CTL_RECOUNT || CTL_STATE(ctl) == KVP_CTL_CLEAN) {
		recount(b, rank);
		w->res->rank_cnt++;
		w->left++;
		return;
	}
	if (CTL_STATE(ctl) == KVP_CTL_CLOSED) {
		if (rank < b->rank_max)
			book_rank_drop(b, rank, ctl);
		return;
	}
	if (s & FL_WANT) {
		book_wanted(b, idx);
		return;
	}
	if (!w->dead || kvp_ld_rlx_u32(&e->owner) != w->dead)
		return;
	if (kvp_ld_rlx_u32(&e->flags) & KVP_RESV_NODE_OWNED) {
		w->res->kept_cnt++;
		return;
	}
	if (w->visit)
		w->visit(w->ctx, h);
	if (kvp_resv_free(b, h) == KVP_OK)
		w->res->free_cnt++;
}

static void sweep_freed(struct sweep *w, uint32_t idx)
{
	struct kvp_book *b = w->b;
	uint32_t rank = book_rank_of(b, &b->resv[idx]);
	uint64_t ctl = rank < b->rank_max ? book_ctl(b, rank) : 0;
	if (CTL_STATE(ctl) == KVP_CTL_CLOSED && CTL_GEN(ctl) == kvp_ld_rlx_u32(&b->resv[idx].rank_gen))
		book_purge(b, idx, rank, CTL_EPOCH(ctl), CTL_BACK(ctl) + 1, PURGE_ALL);
	book_tell_swept(b, idx);
	book_release(b, idx);
	w->res->finish_cnt++;
}

static void sweep_one(struct sweep *w, uint32_t idx)
{
	uint64_t s = kvp_ld_acq_u64(book_state(w->b, idx));
	if (S_BASE(s) == ST_FREE)
		return;
	if (S_BASE(s) == ST_BOOKED) {
		sweep_settled(w, idx, s);
	} else if (performed_by_dead(w, s)) {
		if (S_BASE(s) <= ST_CLAIM) {
			sweep_claim(w, idx, s);
		} else if (S_BASE(s) == ST_FREED) {
			sweep_freed(w, idx);
		} else if (IS_IN(s, BASES_BOOKING)) {
			sweep_booking(w, idx, s);
		} else {
			sweep_pending(w, idx, s);
		}
	}
	KVP_POINT("book:sweep");
}

/* Chunks whose reservation is gone. One that its allocator takes right now names a live claim. */
static uint32_t sweep_chunks(struct kvp_book *b)
{
	uint32_t cnt = 0;
	for (uint32_t c = 1; c < b->chunk_cnt; c++) {
		uint64_t h = kvp_ld_acq_u64(&b->chunk[c].owner);
		if (!h)
			continue;
		uint64_t s = H_IDX(h) < b->id_cnt ? kvp_ld_acq_u64(book_state(b, H_IDX(h))) : 0;
		if (S_GEN(s) == H_GEN(h) && S_BASE(s) != ST_FREE)
			continue;
		cnt += kvp_cas_ar_u64(&b->chunk[c].owner, h, 0);
	}
	return cnt;
}

/* The number of live entries is off by one after a kill between an entry's step and its count. It is put
 * right when nobody claims or frees during a scan; otherwise the next sweep or expiry tries again. */
static void recount_live(struct kvp_book *b)
{
	for (int i = 0; i < 3; i++) {
		uint64_t seen = kvp_ld_acq_u64(&b->hdr->live), cnt = 0;
		int moving = 0;
		for (uint32_t k = 0; k < b->id_cnt; k++) {
			enum kvp_base base = S_BASE(kvp_ld_acq_u64(book_state(b, k)));
			moving |= base == ST_SCAN || base == ST_ABORT || base == ST_FREED;
			cnt += base != ST_FREE;
		}
		if (moving)
			continue;
		if ((uint32_t)seen == cnt ||
			kvp_cas_ar_u64(&b->hdr->live, seen, (seen & ~0xffffffffULL) | cnt))
			return;
	}
}

int kvp_book_sweep_owner(struct kvp_book *b, kvp_owner dead, void (*visit)(void *ctx, uint64_t h), void *ctx,
	struct kvp_sweep_result *result)
{
	struct kvp_sweep_result dummy;
	struct sweep w = {b, dead, visit, ctx, result ? result : &dummy, 0};
	memset(w.res, 0, sizeof(*w.res));
	uint32_t slot = dead ? KVP_OWNER_SLOT(dead) : S_NO_SLOT;
	book_gate_clean(b, kvp_ld_acq_u32(&b->hdr->filling[slot]), slot);
	for (uint32_t r = 0; r < b->rank_max; r++) { /* recounts that a killed sweep left */
		uint32_t st = CTL_STATE(book_ctl(b, r));
		if (st == KVP_CTL_RECOUNT || st == KVP_CTL_CLEAN) {
			recount(b, r);
			w.res->rank_cnt++;
		}
	}
	int pass = 0;
	do {
		w.left = 0;
		w.res->kept_cnt = 0;
		for (uint32_t i = 0; i < b->id_cnt; i++)
			sweep_one(&w, i);
	} while (w.left && ++pass < PASS_MAX);
	w.res->chunk_cnt = sweep_chunks(b);
	recount_live(b);
	book_ctr(b, KVP_CTR_BOOK_SWEPT, w.res->free_cnt + w.res->claim_cnt + w.res->undo_cnt);
	book_ctr(b, KVP_CTR_BOOK_FINISHED, w.res->finish_cnt);
	return w.left ? KVP_ERR_AGAIN : KVP_OK;
}

/* end_old frees the live bookings with (want) or without KVP_RESV_LEASED whose time is too long ago. */
static uint32_t end_old(struct kvp_book *b, uint32_t want, uint64_t now_ns, uint64_t limit_ns)
{
	uint32_t cnt = 0;
	for (uint32_t i = 0; i < b->id_cnt; i++) {
		uint64_t s = kvp_ld_acq_u64(book_state(b, i));
		const struct kvp_resv_shm *e = &b->resv[i];
		if (!IS_IN(s, BASES_LIVE) || (kvp_ld_rlx_u32(&e->flags) & KVP_RESV_LEASED) != want)
			continue;
		uint64_t since = kvp_ld_rlx_u64(want ? &e->lease_ns : &e->booked_ns);
		if (since >= now_ns || now_ns - since <= limit_ns)
			continue;
		/* Replicas know the age of a booking, and nothing of its lease. */
		uint64_t h = HANDLE(S_GEN(s), i);
		cnt += (want ? kvp_resv_free(b, h) : book_free(b, h, BOOK_FREE_CALL)) == KVP_OK;
	}
	return cnt;
}

uint32_t kvp_resv_expire(struct kvp_book *b, uint64_t now_ns, uint64_t limit_ns)
{
	uint32_t cnt = end_old(b, 0, now_ns, limit_ns);
	recount_live(b);
	book_ctr(b, KVP_CTR_BOOK_EXPIRED, cnt);
	return cnt;
}

uint32_t kvp_resv_lapse(struct kvp_book *b, uint64_t now_ns, uint64_t limit_ns)
{
	uint32_t cnt = end_old(b, KVP_RESV_LEASED, now_ns, limit_ns);
	book_ctr(b, KVP_CTR_BOOK_LAPSED, cnt);
	return cnt;
}
