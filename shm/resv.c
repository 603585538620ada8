#include "shm/book_priv.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#define SPIN_MAX 1000

/* ---- chunk pool ---- */

uint32_t book_chunk_take(struct kvp_book *b, uint64_t h)
{
	for (uint32_t n = 1; n < b->chunk_cnt; n++) {
		b->chunk_cur = b->chunk_cur + 1 < b->chunk_cnt ? b->chunk_cur + 1 : 1;
		struct kvp_chunk_shm *c = &b->chunk[b->chunk_cur];
		if (kvp_ld_rlx_u64(&c->owner) == 0 && kvp_cas_ar_u64(&c->owner, 0, h)) {
			kvp_st_rlx_u32(&c->next, 0);
			kvp_st_rlx_u32(&c->prev, 0);
			KVP_POINT("book:chunk");
			return b->chunk_cur;
		}
	}
	return 0;
}

/* Walks a chain that a kill in the middle of this very walk may have broken: what is not h's stays. */
static void chain_drop(struct kvp_book *b, uint64_t h, uint32_t first, uint32_t max)
{
	for (uint32_t c = first, n = 0; c && c < b->chunk_cnt && n < max; n++) {
		uint32_t next = kvp_ld_rlx_u32(&b->chunk[c].next);
		kvp_cas_ar_u64(&b->chunk[c].owner, h, 0);
		KVP_POINT("book:chunk_free");
		c = next;
	}
}

void book_keys_drop(struct kvp_book *b, uint64_t h)
{
	struct kvp_resv_shm *e = &b->resv[H_IDX(h)];
	uint32_t max = (kvp_ld_rlx_u32(&e->seq_cnt) + CHUNK_KEYS - 1) / CHUNK_KEYS;
	chain_drop(b, h, kvp_ld_rlx_u32(&e->chunk_first), max);
	kvp_st_rlx_u32(&e->chunk_first, 0);
	kvp_st_rlx_u32(&e->chunk_last, 0);
	kvp_st_rlx_u32(&e->seq_cnt, 0);
}

int book_scratch(struct kvp_book *b, uint32_t cnt)
{
	if (b->scratch && cnt <= b->scratch_cnt)
		return 1;
	uint64_t *p = realloc(b->scratch, ((uint64_t)cnt + 1) * sizeof(*p));
	if (!p)
		return 0;
	b->scratch = p;
	b->scratch_cnt = cnt;
	return 1;
}

/* Set of the hashes of one request, in the handle's private memory. 0 marks an empty place; the hash 0 itself
 * is kept in the last word. */
static int seen_begin(struct kvp_book *b, uint32_t cnt)
{
	uint32_t size = 16;
	while (size < 2 * cnt)
		size *= 2;
	if (!book_scratch(b, size))
		return 0;
	memset(b->scratch, 0, size * sizeof(uint64_t));
	b->scratch[b->scratch_cnt] = 0;
	return (int)size - 1;
}

static int seen_before(struct kvp_book *b, uint32_t mask, uint64_t hash)
{
	if (hash == 0) {
		int was = b->scratch[b->scratch_cnt] != 0;
		b->scratch[b->scratch_cnt] = 1;
		return was;
	}
	/* sequence hashes come from outside: the salt keeps a sender from choosing where they land */
	uint32_t i = (uint32_t)(((hash ^ b->salt[0]) * (b->salt[1] | 1)) >> 32) & mask;
	while (b->scratch[i] && b->scratch[i] != hash)
		i = (i + 1) & mask;
	if (b->scratch[i])
		return 1;
	b->scratch[i] = hash;
	return 0;
}

int book_keys_store(struct kvp_book *b, uint64_t h, const uint64_t *seq, uint32_t cnt)
{
	struct kvp_resv_shm *e = &b->resv[H_IDX(h)];
	uint32_t chunk = 0, kept = 0;
	int mask = cnt ? seen_begin(b, cnt) : 1;
	if (!mask)
		return KVP_ERR_FULL;
	kvp_st_rlx_u32(&e->chunk_first, 0);
	for (uint32_t i = 0; i < cnt; i++) {
		if (seen_before(b, (uint32_t)mask, seq[i]))
			continue;
		if (kept % CHUNK_KEYS == 0) {
			uint32_t c = book_chunk_take(b, h);
			if (!c) {
				kvp_st_rlx_u32(&e->seq_cnt, kept);
				book_keys_drop(b, h);
				return KVP_ERR_FULL;
			}
			kvp_st_rlx_u32(&b->chunk[c].prev, chunk);
			kvp_st_rlx_u32(chunk ? &b->chunk[chunk].next : &e->chunk_first, c);
			chunk = c;
		}
		kvp_st_rlx_u64(&b->key[(uint64_t)chunk * CHUNK_KEYS + kept++ % CHUNK_KEYS], seq[i]);
	}
	kvp_st_rlx_u32(&e->chunk_last, chunk);
	kvp_st_rlx_u32(&e->seq_cnt, kept);
	return KVP_OK;
}

/* ---- ids ---- */

struct id_hash {
	uint64_t tag, lo;
	uint32_t home;
};

static struct id_hash id_hash(const struct kvp_book *b, const void *id, size_t len)
{
	XXH128_hash_t x = XXH3_128bits_withSeed(id, len, b->salt[0]);
	struct id_hash h = { (x.high64 ^ b->salt[1]) | 1, x.low64, 0 };
	h.home = (uint32_t)((x.low64 ^ b->salt[1]) >> 20) & (b->id_cnt - 1);
	return h;
}

static uint32_t id_reach(const struct kvp_book *b)
{
	uint64_t n = kvp_ld_acq_u64(&b->hdr->id_reach);
	return (uint32_t)(n < KVP_RESV_WINDOW ? n : KVP_RESV_WINDOW);
}

/* One SCAN entry at the first free place of the window; KVP_ERR_EXISTS as soon as the id is seen settled. */
static int id_insert(struct kvp_book *b, const struct id_hash *x, uint32_t slot, uint32_t *at, uint64_t *s)
{
	for (;;) {
		uint32_t end = id_reach(b), empty = UINT32_MAX;
		for (uint32_t i = 0; i < end; i++) {
			struct kvp_u128 *p = &b->id[(x->home + i) & (b->id_cnt - 1)].p;
			uint64_t tag = kvp_ld_acq_u64(&p->hi);
			if (tag == x->tag) {
				enum kvp_base base = S_BASE(kvp_ld_acq_u64(&p->lo));
				if (base >= ST_CLAIM && base != ST_FREED)
					return KVP_ERR_EXISTS;
			}
			if (tag == 0 && empty == UINT32_MAX)
				empty = i;
		}
		if (empty == UINT32_MAX) {
			if (end >= KVP_RESV_WINDOW)
				return KVP_ERR_FULL;
			kvp_cas_ar_u64(&b->hdr->id_reach, end, end + 8);
			continue;
		}
		uint32_t idx = (x->home + empty) & (b->id_cnt - 1);
		struct kvp_u128 old = kvp_ld_u128(&b->id[idx].p);
		uint32_t gen = S_GEN(old.lo) + 1;
		gen = gen ? gen : 1;
		struct kvp_u128 new = { (uint64_t)gen << 32 | (uint64_t)slot << 8 | ST_SCAN, x->tag };
		if (S_BASE(old.lo) != ST_FREE || old.hi != 0)
			continue;
		if (kvp_cas_u128(&b->id[idx].p, &old, new)) {
			*at = empty;
			*s = new.lo;
			return KVP_OK;
		}
	}
}

/* Search for the same id after our entry is visible: of two claims that are both searching, at least one sees
 * the other. The lower place aborts the higher, the higher backs off. 1 = ours may be confirmed. */
static int id_alone(struct kvp_book *b, const struct id_hash *x, uint32_t mine)
{
	uint32_t end = id_reach(b);
	for (uint32_t i = 0; i < end; i++) {
		struct kvp_u128 *p = &b->id[(x->home + i) & (b->id_cnt - 1)].p;
		if (i == mine || kvp_ld_acq_u64(&p->hi) != x->tag)
			continue;
		for (;;) {
			uint64_t s = kvp_ld_acq_u64(&p->lo);
			if (S_BASE(s) == ST_FREE || S_BASE(s) == ST_ABORT || S_BASE(s) == ST_FREED)
				break;
			if (S_BASE(s) != ST_SCAN || i < mine)
				return 0;
			KVP_POINT("book:abort_other");
			if (kvp_cas_ar_u64(&p->lo, s, s_to(s, ST_ABORT, S_SLOT(s))))
				break;
		}
	}
	return 1;
}

int kvp_resv_claim(struct kvp_book *b, kvp_owner owner, const void *id, size_t id_len, uint64_t *h)
{
	return kvp_resv_claim_for(b, owner, id, id_len, NULL, 0, h);
}

int kvp_resv_claim_for(struct kvp_book *b, kvp_owner owner, const void *id, size_t id_len, const void *lora,
	size_t lora_len, uint64_t *h)
{
	if (!id || id_len == 0 || id_len > KVP_RESV_ID_MAX || lora_len > KVP_RESV_LORA_MAX)
		return KVP_ERR_INVAL;
	struct id_hash x = id_hash(b, id, id_len);
	__builtin_prefetch(&b->id[x.home], 1);
	__builtin_prefetch(&b->resv[x.home], 1);
	uint32_t at = 0;
	uint64_t s = 0;
	int rc = id_insert(b, &x, owner ? KVP_OWNER_SLOT(owner) : S_NO_SLOT, &at, &s);
	if (rc) {
		book_ctr(b, rc == KVP_ERR_EXISTS ? KVP_CTR_BOOK_EXISTS : KVP_CTR_BOOK_FULL, 1);
		return rc;
	}
	KVP_POINT("book:scan");
	uint32_t idx = (x.home + at) & (b->id_cnt - 1);
	uint64_t handle = HANDLE(S_GEN(s), idx);
	struct kvp_resv_shm *e = &b->resv[idx];
	kvp_st_rlx_u32(&e->owner, owner);
	kvp_st_rlx_u64(&e->hash_lo, x.lo);
	kvp_st_rlx_u32(&e->seq_cnt, 0);
	kvp_st_rlx_u32(&e->chunk_first, 0);
	kvp_st_rlx_u32(&e->chunk_last, 0);
	kvp_st_rlx_u32(&e->id_chunk, 0);
	kvp_st_rlx_u32(&e->id_len, 0);
	kvp_st_rlx_u32(&e->filling, 0);
	kvp_st_rlx_u32(&e->split_chunk, 0);
	kvp_st_rlx_u64(&e->session, 0);
	kvp_st_rlx_u32(&e->flags, 0);
	if ((int32_t)kvp_faa_rlx_u64(&b->hdr->live, LIVE_MORE) >= (int32_t)b->resv_max) {
		rc = KVP_ERR_FULL;
	} else if (!id_alone(b, &x, at) || !book_step(b, idx, &s, ST_CLAIM)) {
		rc = KVP_ERR_EXISTS;
	} else {
		KVP_POINT("book:claimed");
		rc = book_text_store(b, handle, id, id_len, lora, lora_len);
	}
	if (rc) {
		book_ctr(b, rc == KVP_ERR_EXISTS ? KVP_CTR_BOOK_EXISTS : KVP_CTR_BOOK_FULL, 1);
		book_release(b, idx);
		return rc;
	}
	*h = handle;
	return KVP_OK;
}

void book_release(struct kvp_book *b, uint32_t idx)
{
	struct kvp_u128 *p = &b->id[idx].p;
	struct kvp_u128 old = kvp_ld_u128(p);
	struct kvp_resv_shm *e = &b->resv[idx];
	uint64_t h = HANDLE(S_GEN(old.lo), idx);
	KVP_POINT("book:release");
	uint64_t session = kvp_ld_acq_u64(&e->session) ? kvp_xchg_ar_u64(&e->session, 0) : 0;
	book_keys_drop(b, h);
	chain_drop(b, h, kvp_ld_rlx_u32(&e->id_chunk), RESV_TEXT_MAX / (CHUNK_KEYS * 8));
	kvp_st_rlx_u32(&e->id_chunk, 0);
	while (S_BASE(old.lo) != ST_FREED) { /* a claim that is searching may be aborted just now */
		if (S_BASE(old.lo) == ST_FREE || S_GEN(old.lo) != H_GEN(h))
			return;
		uint64_t n = s_to(old.lo, ST_FREED, S_SLOT(old.lo));
		old.lo = kvp_cas_ar_u64(&p->lo, old.lo, n) ? n : kvp_ld_acq_u64(&p->lo);
	}
	KVP_POINT("book:released");
	if ((int32_t)kvp_ld_rlx_u64(&b->hdr->live) > 0)
		kvp_faa_rlx_u64(&b->hdr->live, LIVE_LESS);
	struct kvp_u128 gone = { old.lo & ~0xffffffffULL, 0 };
	kvp_cas_u128(p, &old, gone);
	if (session && b->on_end)
		b->on_end(b->on_end_ctx, session);
}

/* The state word if h is of this generation, else 0 (which is a free entry). */
static uint64_t state_of(const struct kvp_book *b, uint64_t h)
{
	if (H_IDX(h) >= b->id_cnt)
		return 0;
	uint64_t s = kvp_ld_acq_u64(book_state(b, H_IDX(h)));
	return S_GEN(s) == H_GEN(h) ? s : 0;
}

int kvp_resv_abandon(struct kvp_book *b, uint64_t h)
{
	uint64_t s = state_of(b, h);
	if (S_BASE(s) != ST_CLAIM && S_BASE(s) != ST_ABORT)
		return KVP_ERR_NOTFOUND;
	kvp_st_rlx_u32(&b->resv[H_IDX(h)].flags, 0); /* of a booking that failed */
	book_release(b, H_IDX(h));
	return KVP_OK;
}

/* The claimer may be writing its entry just now and believes that it is alone: so the entry stays its own,
 * and only the step to the booking fails. */
int kvp_resv_oust(struct kvp_book *b, const void *id, size_t id_len)
{
	if (!id || id_len == 0 || id_len > KVP_RESV_ID_MAX)
		return KVP_ERR_NOTFOUND;
	struct id_hash x = id_hash(b, id, id_len);
	uint32_t end = id_reach(b);
	for (uint32_t i = 0; i < end; i++) {
		uint32_t idx = (x.home + i) & (b->id_cnt - 1);
		struct kvp_u128 *p = &b->id[idx].p;
		if (kvp_ld_acq_u64(&p->hi) != x.tag)
			continue;
		uint64_t s = kvp_ld_acq_u64(&p->lo);
		if (S_BASE(s) != ST_CLAIM || kvp_ld_rlx_u64(&b->resv[idx].hash_lo) != x.lo)
			continue;
		KVP_POINT("book:oust");
		if (kvp_cas_ar_u64(&p->lo, s, s_to(s, ST_ABORT, S_SLOT(s))))
			return KVP_OK;
	}
	return KVP_ERR_NOTFOUND;
}

int kvp_resv_hand(struct kvp_book *b, uint64_t h)
{
	uint64_t s = state_of(b, h);
	if (S_BASE(s) != ST_CLAIM)
		return KVP_ERR_NOTFOUND;
	uint64_t n = s_to(s, ST_CLAIM, book_slot(b));
	return kvp_cas_ar_u64(book_state(b, H_IDX(h)), s, n) ? KVP_OK : KVP_ERR_NOTFOUND;
}

int kvp_resv_is_claim(const struct kvp_book *b, uint64_t h)
{
	return S_BASE(state_of(b, h)) == ST_CLAIM;
}

int kvp_resv_is_booked(const struct kvp_book *b, uint64_t h)
{
	uint64_t s = state_of(b, h);
	return IS_IN(s, BASES_LIVE) && !(s & FL_WANT_FREE);
}

/* ---- booking ---- */

static void ask_store(struct kvp_book *b, uint32_t idx, const struct kvp_resv_ask *a, uint64_t ctl)
{
	struct kvp_resv_shm *e = &b->resv[idx];
	kvp_st_rlx_u32(&e->rank_slot, a->rank_slot);
	kvp_st_rlx_u32(&e->rank_gen, a->rank_gen);
	kvp_st_rlx_u32(&e->part, a->part);
	uint64_t tok = a->prefill_tok < KVP_LOAD_TOK_MAX ? a->prefill_tok : KVP_LOAD_TOK_MAX;
	kvp_st_rlx_u64(&e->prefill_tok, tok);
	kvp_st_rlx_u32(&e->flags, (a->flags & ~RESV_TOLD) | (b->tell ? RESV_TOLD : 0));
	kvp_st_rlx_u64(&e->op_ctl, ctl);
	kvp_st_rlx_u64(&e->worker_id, a->worker_id);
	kvp_st_rlx_u32(&e->dp_rank, a->dp_rank);
	kvp_st_rlx_u32(&e->expected_output_tok, a->expected_output_tok);
	kvp_st_rlx_u64(&e->isl_tok, a->isl_tok);
	kvp_st_rlx_u64(&e->lora_hash, a->lora_hash);
	kvp_st_rlx_u64(&e->booked_ns, a->now_ns);
	kvp_st_rlx_u64(&e->lease_ns, a->now_ns);
	for (int i = 0; i < 2; i++) {
		kvp_st_rlx_u64(&e->out_fx[i], 0);
		kvp_st_rlx_u32(&e->out_cnt[i], 0);
	}
}

/* Why a rank takes no booking of generation gen under control word ctl. */
static int refusal(struct kvp_book *b, uint64_t ctl, uint32_t gen)
{
	if (CTL_GEN(ctl) != gen || CTL_STATE(ctl) == KVP_CTL_CLOSED) {
		book_ctr(b, KVP_CTR_BOOK_CLOSED, 1);
		return KVP_ERR_NOTFOUND;
	}
	book_ctr(b, KVP_CTR_BOOK_FENCED, 1);
	return KVP_ERR_AGAIN;
}

/* Back to the claim, nothing counted. cnt keys were referenced under ctl, whose epoch is over. */
static int book_back(struct kvp_book *b, uint32_t idx, uint64_t s, uint64_t ctl, uint32_t cnt)
{
	struct kvp_resv_shm *e = &b->resv[idx];
	uint32_t rank = book_rank_of(b, e);
	int64_t lost = 0;
	if (cnt)
		book_unref(b, idx, book_dom(b, rank, CTL_EPOCH(ctl)), cnt, &lost);
	KVP_POINT("book:back");
	book_keys_drop(b, HANDLE(S_GEN(s), idx));
	book_step(b, idx, &s, ST_CLAIM);
	return refusal(b, book_ctl(b, rank), kvp_ld_rlx_u32(&e->rank_gen));
}

/* The active table has no room for key number done: drop what was taken, and what it changed. */
static int book_undo(struct kvp_book *b, uint32_t idx, uint64_t s, uint64_t ctl, int64_t delta, uint32_t done)
{
	struct kvp_resv_shm *e = &b->resv[idx];
	book_step(b, idx, &s, ST_UNDO_REF);
	KVP_POINT("book:undo");
	book_unref(b, idx, book_dom(b, book_rank_of(b, e), CTL_EPOCH(ctl)), done, &delta);
	kvp_st_rlx_u64(&e->delta, (uint64_t)delta);
	book_step(b, idx, &s, ST_UNDO_B);
	for (int i = 0; i < 2; i++) { /* pair B, then pair A; a recount meanwhile has done without us */
		if (book_apply(b, idx, s, ctl, NULL) == APPLY_FENCED)
			break;
		s = kvp_ld_acq_u64(book_state(b, idx));
	}
	book_keys_drop(b, HANDLE(S_GEN(s), idx));
	if (S_BASE(s) != ST_CLAIM)
		book_step(b, idx, &s, ST_CLAIM);
	book_ctr(b, KVP_CTR_BOOK_FULL, 1);
	return KVP_ERR_FULL;
}

static int book_blocks(struct kvp_book *b, uint32_t idx, uint64_t ctl)
{
	struct kvp_resv_shm *e = &b->resv[idx];
	uint64_t s = kvp_ld_acq_u64(book_state(b, idx));
	int64_t delta = 0;
	uint32_t done = 0;
	if (book_ref(b, idx, book_dom(b, book_rank_of(b, e), CTL_EPOCH(ctl)), &delta, &done))
		return book_undo(b, idx, s, ctl, delta, done);
	kvp_st_rlx_u64(&e->delta, (uint64_t)delta);
	book_step(b, idx, &s, ST_BOOK_B);
	KVP_POINT("book:blocks");
	if (book_apply(b, idx, s, ctl, NULL) == APPLY_FENCED)
		return book_back(b, idx, s, ctl, done);
	return KVP_OK;
}

/* Ousted, or swept: the caller was taken for dead. */
static int no_claim(const struct kvp_book *b, uint64_t h)
{
	return S_BASE(state_of(b, h)) == ST_ABORT ? KVP_ERR_EXISTS : KVP_ERR_NOTFOUND;
}

static int book_run(struct kvp_book *b, uint64_t h, const struct kvp_resv_ask *a)
{
	if (a->rank_slot >= b->rank_max || a->seq_cnt > KVP_RESV_SEQ_MAX || (a->seq_cnt && !a->seq))
		return KVP_ERR_INVAL;
	uint32_t idx = H_IDX(h);
	uint64_t s = state_of(b, h);
	if (S_BASE(s) != ST_CLAIM)
		return no_claim(b, h);
	uint64_t ctl = book_ctl(b, a->rank_slot);
	if (CTL_GEN(ctl) != a->rank_gen || CTL_STATE(ctl) != KVP_CTL_OPEN)
		return refusal(b, ctl, a->rank_gen);
	struct kvp_load now;
	kvp_load_read(b, a->rank_slot, &now);
	if (a->validate && now.version != a->seen.version) {
		book_ctr(b, KVP_CTR_BOOK_STALE, 1);
		return KVP_ERR_AGAIN;
	}
	ask_store(b, idx, a, ctl);
	if (book_keys_store(b, h, a->seq, a->seq_cnt)) {
		book_ctr(b, KVP_CTR_BOOK_FULL, 1);
		return KVP_ERR_FULL;
	}
	KVP_POINT("book:asked");
	uint64_t n = s_to(s, a->seq_cnt ? ST_BOOK_A : ST_BOOK_A0, S_SLOT(s));
	if ((a->flags & KVP_RESV_TRACK_PREFILL) && a->prefill_tok)
		n |= FL_TOK;
	if (!kvp_cas_ar_u64(book_state(b, idx), s, n))
		return no_claim(b, h);
	KVP_POINT("book:intent");
	switch (book_apply(b, idx, n, ctl, a->validate ? &a->seen : NULL)) {
	case APPLY_FENCED:
		return book_back(b, idx, n, ctl, 0);
	case APPLY_STALE:
		book_keys_drop(b, h);
		book_step(b, idx, &n, ST_CLAIM);
		book_ctr(b, KVP_CTR_BOOK_STALE, 1);
		return KVP_ERR_AGAIN;
	case APPLY_DONE:
	case APPLY_MOVED:
		break;
	}
	int rc = a->seq_cnt ? book_blocks(b, idx, ctl) : KVP_OK;
	KVP_POINT("book:booked");
	/* The rank may have been closed right behind us: then the booking is gone already. */
	if (!rc && !IS_IN(state_of(b, h), BASES_LIVE))
		rc = KVP_ERR_NOTFOUND;
	if (!rc)
		book_ctr(b, KVP_CTR_BOOK_BOOKED, 1);
	return rc;
}

int kvp_resv_book(struct kvp_book *b, uint64_t h, const struct kvp_resv_ask *a)
{
	if (!b->tell || (a->flags & KVP_RESV_MIRRORED))
		return book_run(b, h, a);
	struct kvp_lifecycle_claim c;
	book_tell_add(b, h, a, &c);
	int rc = book_run(b, h, a);
	book_tell_end(b, &c, rc);
	return rc;
}

int kvp_resv_find(const struct kvp_book *b, const void *id, size_t id_len, uint64_t *h)
{
	if (!id || id_len == 0 || id_len > KVP_RESV_ID_MAX)
		return KVP_ERR_NOTFOUND;
	struct id_hash x = id_hash(b, id, id_len);
	uint32_t end = id_reach(b);
	for (uint32_t i = 0; i < end; i++) {
		uint32_t idx = (x.home + i) & (b->id_cnt - 1);
		struct kvp_u128 *p = &b->id[idx].p;
		if (kvp_ld_acq_u64(&p->hi) != x.tag)
			continue;
		uint64_t s = kvp_ld_acq_u64(&p->lo);
		if (!IS_IN(s, BASES_LIVE) || (s & FL_WANT_FREE) ||
			kvp_ld_rlx_u64(&b->resv[idx].hash_lo) != x.lo)
			continue;
		*h = HANDLE(S_GEN(s), idx);
		return KVP_OK;
	}
	return KVP_ERR_NOTFOUND;
}

/* ---- lifecycle ---- */

/* Leaves a request with whoever is at work on idx. 1 = left there; 0 = the state moved, look again. */
static int leave_with(struct kvp_book *b, uint32_t idx, uint64_t s, uint64_t flag)
{
	if (!kvp_cas_ar_u64(book_state(b, idx), s, s | flag))
		return 0;
	book_ctr(b, KVP_CTR_BOOK_LEFT, 1);
	KVP_POINT("book:left");
	return 1;
}

/* Applies a pending operation that needs nothing but its rank to be open. 1 = the state moved on. */
static int settle_pending(struct kvp_book *b, uint32_t idx, uint64_t s)
{
	uint32_t rank = book_rank_of(b, &b->resv[idx]);
	for (int i = 0; i < 4; i++) {
		if (book_apply(b, idx, s, 0, NULL) != APPLY_FENCED)
			return 1;
		if (rank >= b->rank_max || CTL_STATE(book_ctl(b, rank)) != KVP_CTL_OPEN)
			return 0;
	}
	return 0;
}

void book_free_run(struct kvp_book *b, uint32_t idx, uint64_t ctl)
{
	struct kvp_resv_shm *e = &b->resv[idx];
	uint32_t rank = book_rank_of(b, e);
	uint64_t s = kvp_ld_acq_u64(book_state(b, idx));
	uint64_t gen = S_GEN(s);
	struct book_dom dom = book_dom(b, rank, CTL_EPOCH(ctl));
	int64_t delta = 0, lost = 0;
	int held = 1;
	while (S_GEN(s) == gen && IS_IN(s, BASES_FREEING)) {
		if (S_BASE(s) == ST_FREE_REF) {
			delta = -(int64_t)kvp_ld_rlx_u64(&e->out_fx[S_SEL(s)]);
			book_unref(b, idx, dom, UINT32_MAX, &delta);
			held = 0;
			kvp_st_rlx_u64(&e->delta, (uint64_t)delta);
			book_step(b, idx, &s, ST_FREE_B);
			KVP_POINT("book:unrefed");
		} else if (book_apply(b, idx, s, 0, NULL) == APPLY_FENCED) {
			/* Whoever fenced the rank counts it again without what is being freed. */
			book_step(b, idx, &s, ST_FREED);
		}
		s = kvp_ld_acq_u64(book_state(b, idx));
	}
	if (S_GEN(s) != gen || S_BASE(s) != ST_FREED)
		return;
	if (held) /* fenced before the references went: their epoch is over, but they take up room */
		book_unref(b, idx, dom, UINT32_MAX, &lost);
	book_release(b, idx);
}

int book_free(struct kvp_book *b, uint64_t h, enum book_free_mode mode)
{
	uint32_t idx = H_IDX(h);
	struct kvp_resv_shm *e = &b->resv[idx];
	for (;;) {
		uint64_t s = state_of(b, h);
		if (!IS_IN(s, BASES_LIVE) || ((s & FL_WANT_FREE) && mode == BOOK_FREE_CALL))
			return KVP_ERR_NOTFOUND;
		uint32_t rank = book_rank_of(b, e);
		/* After the state: a recount touches every settled state before it opens a rank. */
		uint64_t ctl = rank < b->rank_max ? book_ctl(b, rank) : 0;
		if (CTL_GEN(ctl) != kvp_ld_rlx_u32(&e->rank_gen) || CTL_STATE(ctl) == KVP_CTL_CLOSED)
			return KVP_ERR_NOTFOUND; /* dropped by the close */
		int open = CTL_STATE(ctl) == KVP_CTL_OPEN;
		if (open && (S_BASE(s) == ST_PRE_A || S_BASE(s) == ST_OUT_B)) {
			settle_pending(b, idx, s);
			continue;
		}
		if (open && S_BASE(s) == ST_BOOKED) {
			int plain = !kvp_ld_rlx_u32(&e->seq_cnt) && !kvp_ld_rlx_u32(&e->out_cnt[S_SEL(s)]);
			uint64_t n = s_to(s, plain ? ST_FREE_A1 : ST_FREE_A, book_slot(b));
			n &= ~(uint64_t)FL_WANT;
			KVP_POINT("book:free_try");
			if (!kvp_cas_ar_u64(book_state(b, idx), s, n))
				continue;
			KVP_POINT("book:free");
			book_free_run(b, idx, ctl);
			book_ctr(b, KVP_CTR_BOOK_FREED, 1);
			return KVP_OK;
		}
		if (mode == BOOK_FREE_WANTED)
			return KVP_ERR_AGAIN;
		if (!leave_with(b, idx, s, FL_WANT_FREE))
			continue;
		/* The recount looks for left requests after it opened the rank: one of us sees the other. */
		if (CTL_STATE(book_ctl(b, rank)) == KVP_CTL_OPEN)
			book_wanted(b, idx);
		return KVP_OK;
	}
}

int kvp_resv_free(struct kvp_book *b, uint64_t h)
{
	if (!b->tell)
		return book_free(b, h, BOOK_FREE_CALL);
	struct kvp_lifecycle_claim c;
	if (!book_tell_begin(b, h, BOOK_TELL_FREE, &c))
		return KVP_ERR_NOTFOUND;
	int rc = book_free(b, h, BOOK_FREE_CALL);
	book_tell_end(b, &c, rc);
	return rc;
}

/* The tokens of s (settled) come off. 0 = the state moved, look again. */
static int prefill_run(struct kvp_book *b, uint32_t idx, uint64_t s)
{
	uint64_t n = s_to(s, ST_PRE_A, book_slot(b));
	KVP_POINT("book:prefill_try");
	if (!kvp_cas_ar_u64(book_state(b, idx), s, n))
		return 0;
	KVP_POINT("book:prefill");
	settle_pending(b, idx, n);
	return 1;
}

static int prefill_done(struct kvp_book *b, uint64_t h);

void book_wanted(struct kvp_book *b, uint32_t idx)
{
	uint64_t s = kvp_ld_acq_u64(book_state(b, idx));
	uint64_t h = HANDLE(S_GEN(s), idx);
	for (int i = 0; i < 8; i++) {
		s = state_of(b, h);
		if (S_BASE(s) == ST_PRE_A || S_BASE(s) == ST_OUT_B) {
			if (!settle_pending(b, idx, s))
				return;
		} else if (S_BASE(s) != ST_BOOKED || !(s & FL_WANT)) {
			return;
		} else if (s & FL_WANT_FREE) {
			if (book_free(b, h, BOOK_FREE_WANTED) != KVP_ERR_AGAIN)
				return;
			if (S_BASE(state_of(b, h)) == ST_BOOKED)
				return; /* recount under way: it comes back to this */
		} else {
			prefill_done(b, h);
		}
	}
}

static int prefill_done(struct kvp_book *b, uint64_t h)
{
	uint32_t idx = H_IDX(h);
	struct kvp_resv_shm *e = &b->resv[idx];
	for (;;) {
		uint64_t s = state_of(b, h);
		if (!IS_IN(s, BASES_LIVE) || (s & FL_WANT_FREE))
			return KVP_ERR_NOTFOUND;
		if (!(s & FL_TOK))
			return KVP_OK;
		uint32_t rank = book_rank_of(b, e);
		uint64_t ctl = rank < b->rank_max ? book_ctl(b, rank) : 0;
		if (CTL_GEN(ctl) != kvp_ld_rlx_u32(&e->rank_gen) || CTL_STATE(ctl) == KVP_CTL_CLOSED)
			return KVP_ERR_NOTFOUND;
		int open = CTL_STATE(ctl) == KVP_CTL_OPEN;
		if (S_BASE(s) == ST_PRE_A || (S_BASE(s) == ST_OUT_B && open)) {
			if (!settle_pending(b, idx, s) && S_BASE(s) == ST_PRE_A)
				return KVP_OK; /* the recount takes it */
			continue;
		}
		if (open && S_BASE(s) == ST_BOOKED) {
			if (!prefill_run(b, idx, s))
				continue;
			if (kvp_ld_acq_u64(book_state(b, idx)) & FL_WANT)
				book_wanted(b, idx);
			return KVP_OK;
		}
		if (s & FL_WANT_PRE)
			return KVP_OK;
		if (!leave_with(b, idx, s, FL_WANT_PRE))
			continue;
		if (CTL_STATE(book_ctl(b, rank)) == KVP_CTL_OPEN)
			book_wanted(b, idx);
		return KVP_OK;
	}
}

int kvp_resv_prefill_done(struct kvp_book *b, uint64_t h)
{
	if (!b->tell)
		return prefill_done(b, h);
	struct kvp_lifecycle_claim c;
	if (!book_tell_begin(b, h, BOOK_TELL_PREFILL, &c))
		return KVP_ERR_NOTFOUND;
	int rc = prefill_done(b, h);
	book_tell_end(b, &c, rc);
	return rc;
}

/* Takes the reservation for an output block: ST_OUT_REF and the rank's control word at that moment. */
static int output_begin(struct kvp_book *b, uint64_t h, uint64_t *s, uint64_t *ctl)
{
	uint32_t idx = H_IDX(h);
	struct kvp_resv_shm *e = &b->resv[idx];
	for (int spin = 0; spin < SPIN_MAX; spin++) {
		*s = state_of(b, h);
		if (!IS_IN(*s, BASES_LIVE) || (*s & FL_WANT_FREE))
			return KVP_ERR_NOTFOUND;
		uint32_t rank = book_rank_of(b, e);
		*ctl = rank < b->rank_max ? book_ctl(b, rank) : 0;
		if (CTL_GEN(*ctl) != kvp_ld_rlx_u32(&e->rank_gen) || CTL_STATE(*ctl) == KVP_CTL_CLOSED)
			return KVP_ERR_NOTFOUND;
		if (CTL_STATE(*ctl) != KVP_CTL_OPEN)
			return KVP_ERR_AGAIN;
		if (S_BASE(*s) == ST_PRE_A || S_BASE(*s) == ST_OUT_B) {
			settle_pending(b, idx, *s);
		} else if (S_BASE(*s) == ST_BOOKED) {
			uint64_t n = s_to(*s, ST_OUT_REF, book_slot(b));
			KVP_POINT("book:output_try");
			if (kvp_cas_ar_u64(book_state(b, idx), *s, n)) {
				*s = n;
				return KVP_OK;
			}
		} else {
			kvp_pause();
		}
	}
	return KVP_ERR_AGAIN;
}

/* From ST_OUT_REF to the pending ST_OUT_B. KVP_ERR_AGAIN: a recount came between, start over. */
static int output_prepare(struct kvp_book *b, uint32_t idx, uint64_t *s, uint64_t ctl, const double *fraction)
{
	struct kvp_resv_shm *e = &b->resv[idx];
	uint32_t was = S_SEL(*s), will = !was;
	uint32_t cnt = kvp_ld_rlx_u32(&e->out_cnt[was]) + 1;
	uint64_t old = kvp_ld_rlx_u64(&e->out_fx[was]), frac_fx = KVP_BLK_FX_ONE;
	if (fraction)
		frac_fx = (uint64_t)llround(*fraction * (double)KVP_BLK_FX_ONE);
	uint64_t new = fraction ? cnt * frac_fx : old + KVP_BLK_FX_ONE;
	int64_t delta = (int64_t)(new - old);
	kvp_st_rlx_u32(&e->out_cnt[will], cnt);
	kvp_st_rlx_u64(&e->out_fx[will], new);
	kvp_st_rlx_u64(&e->frac_fx, frac_fx);
	if (fraction && kvp_ld_rlx_u32(&e->seq_cnt)) {
		if (!book_step(b, idx, s, ST_OUT_FRAC))
			return KVP_ERR_AGAIN;
		KVP_POINT("book:fraction");
		book_frac(b, idx, book_dom(b, book_rank_of(b, e), CTL_EPOCH(ctl)), frac_fx, &delta);
	}
	kvp_st_rlx_u64(&e->delta_out, (uint64_t)delta);
	return book_step(b, idx, s, ST_OUT_B) ? KVP_OK : KVP_ERR_AGAIN;
}

int kvp_resv_output(struct kvp_book *b, uint64_t h, const double *fraction)
{
	if (fraction && !(*fraction >= 0.0 && *fraction <= 1.0))
		return KVP_ERR_INVAL;
	uint32_t idx = H_IDX(h);
	for (;;) {
		uint64_t s, ctl;
		int rc = output_begin(b, h, &s, &ctl);
		if (rc)
			return rc;
		KVP_POINT("book:output");
		rc = output_prepare(b, idx, &s, ctl, fraction);
		if (rc && S_GEN(s) == H_GEN(h) && S_BASE(s) == ST_OUT_REF) {
			book_step(b, idx, &s, ST_BOOKED); /* touched by a recount before anything counted */
			book_wanted(b, idx);
			continue;
		}
		if (S_GEN(s) == H_GEN(h) && S_BASE(s) == ST_FREED) {
			book_release(b, idx);
			return KVP_ERR_NOTFOUND;
		}
		if (S_GEN(s) == H_GEN(h) && S_BASE(s) == ST_OUT_FIX)
			book_step(b, idx, &s, ST_BOOKED); /* counted by the recount */
		KVP_POINT("book:output_intent");
		if (S_GEN(s) == H_GEN(h) && S_BASE(s) == ST_OUT_B)
			settle_pending(b, idx, s);
		if (kvp_ld_acq_u64(book_state(b, idx)) & FL_WANT)
			book_wanted(b, idx);
		return KVP_OK;
	}
}

int kvp_resv_set_session(struct kvp_book *b, uint64_t h, uint64_t session)
{
	if (!IS_IN(state_of(b, h), BASES_LIVE))
		return KVP_ERR_NOTFOUND;
	uint64_t *w = &b->resv[H_IDX(h)].session;
	kvp_xchg_sc_u64(w, session);
	if (IS_IN(state_of(b, h), BASES_LIVE))
		return KVP_OK; /* whoever ends it from now on finds the session */
	return kvp_cas_ar_u64(w, session, 0) ? KVP_ERR_NOTFOUND : KVP_OK;
}

/* A renewal that comes when the entry has just become another booking's makes that one's lease a little
 * longer: it is a time of now either way. */
int kvp_resv_renew(struct kvp_book *b, uint64_t h, uint64_t now_ns)
{
	if (!IS_IN(state_of(b, h), BASES_LIVE))
		return KVP_ERR_NOTFOUND;
	kvp_st_rlx_u64(&b->resv[H_IDX(h)].lease_ns, now_ns);
	return KVP_OK;
}

/* ---- looking: body words by acquire, so that the state is looked at again after all of them ---- */

int kvp_resv_info(const struct kvp_book *b, uint64_t h, struct kvp_resv_info *out)
{
	uint32_t idx = H_IDX(h);
	const struct kvp_resv_shm *e = idx < b->id_cnt ? &b->resv[idx] : NULL;
	unsigned char text[RESV_TEXT_MAX];
	for (int i = 0; e && i < SPIN_MAX; i++) {
		uint64_t s = state_of(b, h);
		if (!IS_IN(s, BASES_LIVE) || (s & FL_WANT_FREE))
			return KVP_ERR_NOTFOUND;
		struct kvp_resv_info o = { .h = h };
		o.worker_id = kvp_ld_acq_u64(&e->worker_id);
		o.prefill_tok = kvp_ld_acq_u64(&e->prefill_tok);
		o.isl_tok = kvp_ld_acq_u64(&e->isl_tok);
		o.lora_hash = kvp_ld_acq_u64(&e->lora_hash);
		o.booked_ns = kvp_ld_acq_u64(&e->booked_ns);
		o.output_fx = kvp_ld_acq_u64(&e->out_fx[S_SEL(s)]);
		o.output_cnt = kvp_ld_acq_u32(&e->out_cnt[S_SEL(s)]);
		o.part = kvp_ld_acq_u32(&e->part);
		o.dp_rank = kvp_ld_acq_u32(&e->dp_rank);
		o.rank_slot = kvp_ld_acq_u32(&e->rank_slot);
		o.rank_gen = kvp_ld_acq_u32(&e->rank_gen);
		o.seq_cnt = kvp_ld_acq_u32(&e->seq_cnt);
		o.expected_output_tok = kvp_ld_acq_u32(&e->expected_output_tok);
		o.flags = kvp_ld_acq_u32(&e->flags) & ~RESV_TOLD;
		o.owner = kvp_ld_acq_u32(&e->owner);
		o.prefill_active = (s & FL_TOK) && S_BASE(s) != ST_PRE_A;
		uint32_t lens = book_text_load(b, idx, text);
		o.id_len = RESV_TEXT_ID(lens);
		o.lora_len = RESV_TEXT_LORA(lens);
		memcpy(o.id, text, o.id_len);
		memcpy(o.lora, text + o.id_len, o.lora_len);
		if (kvp_ld_acq_u64(book_state(b, idx)) != s)
			continue;
		memcpy(out, &o, sizeof(o));
		return KVP_OK;
	}
	return KVP_ERR_NOTFOUND;
}

int kvp_resv_seq(const struct kvp_book *b, uint64_t h, uint32_t first, uint64_t *out, uint32_t cap,
	uint32_t *cnt)
{
	uint32_t idx = H_IDX(h), n = 0;
	if (!IS_IN(state_of(b, h), BASES_LIVE))
		return KVP_ERR_NOTFOUND;
	const struct kvp_resv_shm *e = &b->resv[idx];
	uint32_t total = kvp_ld_acq_u32(&e->seq_cnt), pos = 0;
	for (uint32_t c = kvp_ld_acq_u32(&e->chunk_first); c && c < b->chunk_cnt && pos < total && n < cap;
		c = kvp_ld_acq_u32(&b->chunk[c].next)) {
		for (uint32_t i = 0; i < CHUNK_KEYS && pos < total && n < cap; i++, pos++)
			if (pos >= first)
				out[n++] = kvp_ld_acq_u64(&b->key[(uint64_t)c * CHUNK_KEYS + i]);
	}
	if (!IS_IN(state_of(b, h), BASES_LIVE))
		return KVP_ERR_NOTFOUND;
	*cnt = n;
	return KVP_OK;
}

int kvp_resv_iter(const struct kvp_book *b, uint32_t *cursor, uint64_t *h)
{
	for (uint32_t i = *cursor; i < b->id_cnt; i++) {
		uint64_t s = kvp_ld_acq_u64(book_state(b, i));
		if (!IS_IN(s, BASES_LIVE) || (s & FL_WANT_FREE))
			continue;
		*cursor = i + 1;
		*h = HANDLE(S_GEN(s), i);
		return KVP_OK;
	}
	*cursor = b->id_cnt;
	return KVP_ERR_NOTFOUND;
}

uint64_t kvp_resv_cnt(const struct kvp_book *b)
{
	return (uint32_t)kvp_ld_rlx_u64(&b->hdr->live);
}
