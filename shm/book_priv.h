/* shm/book_priv.h — layouts and steps that load.c, active.c, resv.c and sweep.c share. Private to them.
 *
 * Shape      words described below; contracts are in load.h, active.h, resv.h and sweep.h.
 * Truth      as there. Writers, Readers: the booking modules only.
 * Ordering   every step of a reservation is one CAS on its state word (full barrier), so body words written
 *            before it are visible to whoever reads the new state.
 * Lifetime   as the booking object. Crash: see the four headers.
 * Proved by  tests/t_book_crash.c, tests/torture/x_book.c.
 */
#ifndef KVP_SHM_BOOK_PRIV_H
#define KVP_SHM_BOOK_PRIV_H

#include <kvpick/point.h>
#include "shm/lifecycle.h"
#include "shm/sweep.h"

/* ---- control word of a rank: generation 32 | count epoch 20 | garbage epochs before it 8 | state 4 ---- */
enum { KVP_CTL_CLOSED, KVP_CTL_OPEN, KVP_CTL_RECOUNT, KVP_CTL_CLEAN };
#define CTL(gen, ep, back, st)                                                                               \
	((uint64_t)(gen) << 32 | (uint64_t)((ep)&0xfffffu) << 12 | (uint64_t)(back) << 4 | (st))
#define CTL_GEN(r) ((uint32_t)((r) >> 32))
#define CTL_EPOCH(r) ((uint32_t)((r) >> 12) & 0xfffffu)
#define CTL_BACK(r) ((uint32_t)((r) >> 4) & 0xffu)
#define CTL_STATE(r) ((uint32_t)(r)&0xfu)
#define CTL_BACK_MAX 255u

#define PAIR_A KVP_RANK_PAIR_A
#define PAIR_B KVP_RANK_PAIR_B

/* ---- state word: generation 32 | output half 1 | phase 15 | performer's slot 8 | flags 3 | base 5 ---- */
enum kvp_base {
	ST_FREE,
	ST_SCAN,     /* id written, looking for the same id elsewhere */
	ST_ABORT,    /* another claim of the id won; its claimer gives it up */
	ST_CLAIM,    /* exclusive to the claimer until it books */
	ST_BOOK_A,   /* intent: tokens and request on pair A, then ST_BOOK_REF */
	ST_BOOK_A0,  /* the same without blocks, then ST_BOOKED */
	ST_BOOK_REF, /* exclusive: taking block references */
	ST_BOOK_B,   /* intent: delta on pair B, then ST_BOOKED */
	ST_UNDO_REF, /* exclusive: dropping the references of a booking that found no room */
	ST_UNDO_B,   /* intent: delta on pair B, then ST_UNDO_A */
	ST_UNDO_A,   /* intent: tokens and request off pair A, then ST_CLAIM */
	ST_BOOKED,
	ST_PRE_A,    /* intent: tokens off pair A, then ST_BOOKED without FL_TOK */
	ST_OUT_REF,  /* exclusive: preparing the other output half */
	ST_OUT_FRAC, /* exclusive: giving blocks the fraction in the body */
	ST_OUT_FIX,  /* exclusive: a recount has counted the new half; performer moves on to ST_BOOKED */
	ST_OUT_B,    /* intent: delta_out on pair B, then ST_BOOKED with the other half */
	ST_FREE_A,   /* intent: tokens and request off pair A, then ST_FREE_REF */
	ST_FREE_A1,  /* the same without blocks, then ST_FREED */
	ST_FREE_REF, /* exclusive: dropping block references */
	ST_FREE_B,   /* intent: delta on pair B, then ST_FREED */
	ST_FREED,    /* exclusive: counts nowhere, resources being given back */
	ST_CNT
};
#define FL_TOK 0x20u       /* prefill tokens are counted (or are part of the pending operation) */
#define FL_WANT_FREE 0x40u /* a free was left with whoever works on it */
#define FL_WANT_PRE 0x80u  /* a prefill-done was left likewise */
#define FL_WANT (FL_WANT_FREE | FL_WANT_PRE)
#define S_GEN(s) ((uint32_t)((s) >> 32))
#define S_BASE(s) ((enum kvp_base)((s)&0x1fu))
#define S_SLOT(s) ((uint32_t)((s) >> 8) & 0xffu)
#define S_SEL(s) ((uint32_t)((s) >> 31) & 1u)
#define S_SEL_BIT (1ULL << 31)
#define S_NO_SLOT 0xffu /* performer without a slot: dead for every sweep but its own */
#define BASE_BIT(x) (1u << (x))
#define BASES_ON_A                                                                                           \
	(BASE_BIT(ST_BOOK_A) | BASE_BIT(ST_BOOK_A0) | BASE_BIT(ST_UNDO_A) | BASE_BIT(ST_PRE_A) |             \
		BASE_BIT(ST_FREE_A) | BASE_BIT(ST_FREE_A1))
#define BASES_ON_B                                                                                           \
	(BASE_BIT(ST_BOOK_B) | BASE_BIT(ST_UNDO_B) | BASE_BIT(ST_OUT_B) | BASE_BIT(ST_FREE_B))
#define BASES_LIVE                                                                                           \
	(BASE_BIT(ST_BOOKED) | BASE_BIT(ST_PRE_A) | BASE_BIT(ST_OUT_REF) | BASE_BIT(ST_OUT_FRAC) |           \
		BASE_BIT(ST_OUT_FIX) | BASE_BIT(ST_OUT_B))
#define BASES_FREEING                                                                                        \
	(BASE_BIT(ST_FREE_A) | BASE_BIT(ST_FREE_A1) | BASE_BIT(ST_FREE_REF) | BASE_BIT(ST_FREE_B))
#define BASES_BOOKING                                                                                        \
	(BASE_BIT(ST_BOOK_A) | BASE_BIT(ST_BOOK_A0) | BASE_BIT(ST_BOOK_REF) | BASE_BIT(ST_BOOK_B) |          \
		BASE_BIT(ST_UNDO_REF) | BASE_BIT(ST_UNDO_B) | BASE_BIT(ST_UNDO_A))
#define IS_IN(s, set) ((BASE_BIT(S_BASE(s)) & (set)) != 0)

/* s_to is state s moved to a base: phase + 1, generation, half and flags kept. */
static inline uint64_t s_to(uint64_t s, enum kvp_base base, uint32_t slot)
{
	uint64_t phase = ((s >> 16) + 1) & 0x7fffu;
	return (s & ~0x7fffff1fULL) | phase << 16 | (uint64_t)slot << 8 | base;
}

/* ---- tag of a pair: index 24 | generation 21 | phase 14 | base 5; index all ones = fence ---- */
#define TAG_FENCE_IDX 0xffffffu
enum { FENCE_RECOUNT = 1, FENCE_COUNTED, FENCE_CLOSE, FENCE_OPEN };
static inline uint64_t tag_of(uint32_t idx, uint64_t s)
{
	return (uint64_t)idx << 40 | (s >> 32 & 0x1fffffu) << 19 | (s >> 16 & 0x3fffu) << 5 | (s & 0x1fu);
}
static inline uint64_t tag_fence(uint32_t epoch, uint32_t step)
{
	return (uint64_t)TAG_FENCE_IDX << 40 | (uint64_t)epoch << 19 | step << 5;
}

/* ---- table of ids: pair {state word, tag of the id} ---- */
struct kvp_id_shm {
	struct kvp_u128 p;
};

#define RESV_ID_INLINE 80u /* bytes of id and adapter kept in the body; longer ones in chunks */
#define RESV_TEXT_MAX (KVP_RESV_ID_MAX + KVP_RESV_LORA_MAX)
#define RESV_TEXT(id_len, lora_len) ((uint32_t)(lora_len) << 16 | (uint32_t)(id_len))
#define RESV_TEXT_ID(x) ((uint32_t)(x)&0xffffu)
#define RESV_TEXT_LORA(x) ((uint32_t)(x) >> 16)
#define RESV_TOLD 0x80000000u /* flag of a body: replicas may know it, through this node or another */

struct kvp_resv_shm { /* all words by relaxed atomics; who may write: see the state */
	uint32_t owner, rank_slot, rank_gen, part;
	uint64_t prefill_tok;
	uint32_t seq_cnt, chunk_first; /* after removal of repeats; 0 = no chunk */
	uint32_t chunk_last, flags;
	uint64_t op_ctl;   /* control word of the rank under which the booking runs */
	uint64_t delta;    /* two's complement: what ST_BOOK_B, ST_UNDO_B, ST_FREE_B add to pair B */
	uint64_t hash_lo;  /* low half of the id's hash */
	uint64_t worker_id;
	uint32_t dp_rank, expected_output_tok;
	uint64_t isl_tok, lora_hash, booked_ns;
	uint64_t out_fx[2]; /* weight of the output blocks; the state word says which half is true */
	uint64_t delta_out;
	uint32_t out_cnt[2];
	uint64_t frac_fx;
	uint32_t id_len, id_chunk; /* RESV_TEXT: id, and the adapter's name behind it */
	uint32_t filling;     /* place + 1 in the active table whose hashes its performer writes or wrote */
	uint32_t split_chunk; /* hashes of entries that its performer splits; 0 = none */
	uint64_t session;     /* lease of a session that ends with the reservation; 0 = none */
	uint64_t lease_ns;    /* with KVP_RESV_LEASED: booked, or renewed last */
	uint64_t id[RESV_ID_INLINE / 8];
} __attribute__((aligned(64)));

#define CHUNK_KEYS 32u
struct kvp_chunk_shm {
	uint64_t owner; /* handle of the reservation, 0 = free; CAS */
	uint32_t next, prev;
};

struct kvp_book_hdr_shm {
	struct kvp_objhdr obj;
	uint64_t pad0[8];
	uint64_t act_reach; /* lines in use beyond home, 1..KVP_ACTIVE_REACH; only grows */
	uint64_t id_reach;  /* entries in use from home, 8..KVP_RESV_WINDOW; only grows */
	uint64_t pad1[14];
	uint32_t filling[256]; /* as in a reservation: by slot of a sweeping process */
	uint64_t live; /* changes 32 | claims and bookings 32: entries from ST_CLAIM to ST_FREE_B */
	uint64_t pad2[15];
};

/* Four entries of the active table: gate words, then the hashes of each. */
struct kvp_bucket_shm {
	struct kvp_u128 gate[4];
	uint64_t hash[4][KVP_ACTIVE_RUN];
} __attribute__((aligned(64)));
#define BOOK_GATE_CNT_SHIFT 44
#define BOOK_GATE_CNT(hi) ((uint32_t)((hi) >> BOOK_GATE_CNT_SHIFT)) /* references */
#define ACT_USED_LINES 64u /* buckets a bit of the use map stands for */
_Static_assert(CHUNK_KEYS % KVP_ACTIVE_RUN == 0, "a group lies within a chunk");

#define LIVE_MORE ((1ULL << 32) + 1)
#define LIVE_LESS ((1ULL << 32) - 1) /* the count must be at least 1 */

#define H_IDX(h) ((uint32_t)(h))
#define H_GEN(h) ((uint32_t)((h) >> 32))
#define HANDLE(gen, idx) ((uint64_t)(gen) << 32 | (idx))

static inline void book_ctr(const struct kvp_book *b, enum kvp_ctr id, uint64_t n)
{
	if (b->ctr)
		kvp_ctr_add_mw(b->ctr, id, n);
}
static inline uint64_t *book_state(const struct kvp_book *b, uint32_t idx)
{
	return &b->id[idx].p.lo;
}
static inline uint64_t *book_ctl_word(const struct kvp_book *b, uint32_t rank)
{
	return (uint64_t *)(void *)((char *)b->rank_ctl + (uint64_t)rank * b->ctl_stride);
}
static inline uint64_t book_ctl(const struct kvp_book *b, uint32_t rank)
{
	return kvp_ld_acq_u64(book_ctl_word(b, rank));
}
static inline uint32_t book_slot(const struct kvp_book *b)
{
	return b->owner ? KVP_OWNER_SLOT(b->owner) : S_NO_SLOT;
}
/* book_rank_of is the rank slot in a body, bounds-checked: rank_max if it holds garbage. */
static inline uint32_t book_rank_of(const struct kvp_book *b, const struct kvp_resv_shm *e)
{
	uint32_t r = kvp_ld_rlx_u32(&e->rank_slot);
	return r < b->rank_max ? r : b->rank_max;
}

/* ---- load.c ---- */
enum book_apply {
	APPLY_DONE,   /* applied, state moved on */
	APPLY_MOVED,  /* the state had moved on by itself: read it again */
	APPLY_FENCED, /* rank closed, being recounted or (want) under another control word: not applied */
	APPLY_STALE   /* seen does not match: not applied */
};
/* book_apply brings the pending operation of state s (of idx) onto its rank.
 * want  0: the rank must be open in the reservation's generation; else its control word must equal want.
 * seen  NULL, or the load that must still be there (pair A exactly, blocks of pair B just before). */
enum book_apply book_apply(struct kvp_book *b, uint32_t idx, uint64_t s, uint64_t want,
	const struct kvp_load *seen);
/* book_help moves on the reservation that a tag names, if its operation is still marked as pending. */
void book_help(struct kvp_book *b, uint64_t tag);
/* book_step moves state *s to base if nothing but flags changed meanwhile: 1 and *s = new; else 0 and *s =
 * now. */
int book_step(struct kvp_book *b, uint32_t idx, uint64_t *s, enum kvp_base base);
/* book_advance does the step that an applied operation stands for. */
void book_advance(struct kvp_book *b, uint32_t idx, uint64_t s);
/* book_fence replaces both tags of a rank, after helping them; zero = also the loads. */
enum book_fence_load { FENCE_KEEP, FENCE_ZERO };
void book_fence(struct kvp_book *b, uint32_t rank, uint64_t tag, enum book_fence_load mode);
/* book_rank_drop drops the bookings of a closed rank and purges the epochs of its control word: their number.
 * */
uint32_t book_rank_drop(struct kvp_book *b, uint32_t rank, uint64_t ctl);

/* ---- active.c ---- */
struct book_dom { /* key domain of one (rank slot, count epoch) */
	uint64_t a, m;
};
struct book_dom book_dom(const struct kvp_book *b, uint32_t rank, uint32_t epoch);
/* Entries that together hold the blocks h[0..n) of one group, root first. 0 = not all of them are live. */
struct book_link {
	struct kvp_u128 v;
	uint32_t at, pos, len, cnt;
	uint64_t weight;
};
struct book_chain {
	uint32_t cnt;
	struct book_link link[KVP_ACTIVE_RUN];
};
int book_cover(const struct kvp_book *b, struct book_dom dom, const uint64_t *h, uint32_t n,
	struct book_chain *c);
/* Walks over the key array of idx in a domain; *delta collects the change of live weight.
 * book_ref    root to leaf; 0, or KVP_ERR_FULL; *done = keys referenced
 * book_unref  the first cnt keys, leaf to root
 * book_frac   fraction to the exclusive suffix
 * book_purge  delete outright, in garbage epochs only: epochs of them, epoch_last the newest
 * book_count  reference in dom with the weights of old; *cnt keys, kept in the scratch memory for
 * book_uncount, which deletes them again when dom turns out to be over */
int book_ref(struct kvp_book *b, uint32_t idx, struct book_dom dom, int64_t *delta, uint32_t *done);
void book_unref(struct kvp_book *b, uint32_t idx, struct book_dom dom, uint32_t cnt, int64_t *delta);
void book_frac(struct kvp_book *b, uint32_t idx, struct book_dom dom, uint64_t frac_fx, int64_t *delta);
enum book_purge_what { PURGE_ALL, PURGE_WHOLE /* only entries whose weight is one */ };
void book_purge(struct kvp_book *b, uint32_t idx, uint32_t rank, uint32_t epoch_last, uint32_t epochs,
	enum book_purge_what what);
int book_count(struct kvp_book *b, uint32_t idx, struct book_dom dom, struct book_dom old, int64_t *delta,
	uint32_t *cnt);
void book_uncount(struct kvp_book *b, struct book_dom dom, uint32_t cnt);
/* book_key is the table key of an entry that begins with this sequence hash. */
uint64_t book_key(struct book_dom dom, uint64_t seq);
/* book_gate_clean empties the place that a dead process of this slot was filling. */
void book_gate_clean(struct kvp_book *b, uint32_t note, uint32_t slot);

/* ---- resv.c ---- */
/* book_chunk_take takes a chunk for reservation h; 0 if there is none. */
uint32_t book_chunk_take(struct kvp_book *b, uint64_t h);
/* book_scratch makes the handle's private memory hold at least cnt words (and one more): 0 without memory. */
int book_scratch(struct kvp_book *b, uint32_t cnt);
/* book_keys_store keeps seq without repeats in chunks of h: KVP_ERR_FULL leaves none behind. */
int book_keys_store(struct kvp_book *b, uint64_t h, const uint64_t *seq, uint32_t cnt);
void book_keys_drop(struct kvp_book *b, uint64_t h);
/* book_release gives the resources of an exclusive (claimed, aborted, freed) entry back; handle dies. */
void book_release(struct kvp_book *b, uint32_t idx);
/* book_free_run carries a pending free of idx to its end; ctl = the rank's word when it began. */
void book_free_run(struct kvp_book *b, uint32_t idx, uint64_t ctl);
/* book_wanted executes what others left with idx, and applies what is pending and open to all. */
void book_wanted(struct kvp_book *b, uint32_t idx);
enum book_free_mode { BOOK_FREE_CALL, BOOK_FREE_WANTED };
/* book_free tells nobody. */
int book_free(struct kvp_book *b, uint64_t h, enum book_free_mode mode);

/* ---- book_text.c ---- */
/* book_text_store keeps id and adapter (lora_len 0 = none) of a claim: KVP_OK, KVP_ERR_FULL. */
int book_text_store(struct kvp_book *b, uint64_t h, const void *id, size_t id_len, const void *lora,
	size_t lora_len);
/* book_text_load copies id and adapter, one behind the other: RESV_TEXT of them, 0 = they are no text. */
uint32_t book_text_load(const struct kvp_book *b, uint32_t idx, unsigned char text[RESV_TEXT_MAX]);

/* ---- book_tell.c: nothing unless kvp_book_publish was called ---- */

/* book_tell_* takes a place in the ring for what is going to be done to h; book_tell_end fills or gives it up
 * by what came out (KVP_OK = it was done). book_tell_begin: 0 = h is not a booking. */
void book_tell_add(
	struct kvp_book *b, uint64_t h, const struct kvp_resv_ask *a, struct kvp_lifecycle_claim *c);
enum book_tell_what { BOOK_TELL_PREFILL, BOOK_TELL_FREE };
int book_tell_begin(
	struct kvp_book *b, uint64_t h, enum book_tell_what what, struct kvp_lifecycle_claim *c);
void book_tell_end(struct kvp_book *b, const struct kvp_lifecycle_claim *c, int rc);
/* book_tell_swept tells that a dead process had begun to free idx; its id is still taken. */
void book_tell_swept(struct kvp_book *b, uint32_t idx);

#endif
