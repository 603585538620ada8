/* shm/resv.h — reservations: the truth about every booking of the node.
 *
 * Shape      A table of 2 x resv_max entries (power of two), probed by a secret 128-bit hash of the id. Dense
 *            column of 16-byte pairs {state word, tag of the id}; entry bodies of 256 bytes; a pool of
 *            chunks of 32 words for sequence hashes and long ids. An entry lies at most KVP_RESV_WINDOW
 *            places from its home. State word: {generation 32, output half 1, phase 15, performer's slot 8,
 *            flags 3, state 5}.
 * Truth      State word and body. Loads and active-block counts follow from them.
 * Writers    A claimed entry: its claimer. A booked one: whoever moves its state word by CAS; while the
 *            state is one of the exclusive ones (references being taken or dropped, outputs prepared) only
 *            that performer.
 * Readers    find, info, iter: lock-free, validated by the state word.
 * Ordering   Body first, then the state word (release CAS); readers load the state word first (acquire) and
 *            again after copying.
 * Lifetime   A handle is (generation << 32 | index): valid from claim until abandon, free, expiry, close of
 *            the rank or sweep; a stale handle answers KVP_ERR_NOTFOUND for ever.
 * States     free > scanning > claimed > pending booking > booked > pending prefill-done | output > booked >
 *            pending free > freed > free. Every step bumps the phase.
 * Crash      A kill leaves the entry in one of these states with its performer's slot in the state word;
 *            the sweep finishes or undoes it (shm/sweep.h). Chunks name their reservation, so unlinked ones
 *            are found.
 * Proved by  tests/t_resv.c, tests/m_book.c, tests/t_book_crash.c, tests/torture/x_book.c.
 */
#ifndef KVP_SHM_RESV_H
#define KVP_SHM_RESV_H

#include "shm/active.h"
#include "shm/load.h"

#define KVP_RESV_ID_MAX 4096   /* bytes of an id */
#define KVP_RESV_LORA_MAX 1024 /* bytes of an adapter's name */
#define KVP_RESV_WINDOW 64     /* entries */
#define KVP_RESV_SEQ_MAX (1u << 20) /* sequence hashes of one booking */

/* Flags of a booking. */
#define KVP_RESV_TRACK_PREFILL 1u /* prefill_tok counts until prefill is done */
#define KVP_RESV_NODE_OWNED 2u    /* belongs to the node, not to its process: survives the owner's death */
#define KVP_RESV_LEASED 4u        /* ends when nobody renews it (kvp_resv_lapse), never by kvp_resv_expire */
#define KVP_RESV_MIRRORED 8u      /* announced by a peer replica */

struct kvp_resv_ask {
	uint64_t worker_id;
	const uint64_t *seq;   /* sequence hashes, root first; a repeated one counts once */
	uint64_t prefill_tok;  /* counted only with KVP_RESV_TRACK_PREFILL; clamped to KVP_LOAD_TOK_MAX */
	uint64_t isl_tok;      /* prompt length, stored only */
	uint64_t lora_hash;    /* stored only */
	uint64_t now_ns;       /* time of booking, CLOCK_MONOTONIC */
	uint32_t part, dp_rank; /* stored only */
	uint32_t rank_slot, rank_gen;
	uint32_t seq_cnt;      /* 0..KVP_RESV_SEQ_MAX */
	uint32_t expected_output_tok; /* stored only; 0 = unknown */
	uint32_t flags;
	int validate;          /* nonzero: book only if the rank's load is still the one in seen */
	struct kvp_load seen;
};

struct kvp_resv_info {
	uint64_t h, worker_id, prefill_tok, isl_tok, lora_hash, booked_ns;
	uint64_t output_fx;    /* weight of its output blocks, fixed point */
	uint32_t part, dp_rank, rank_slot, rank_gen, seq_cnt, output_cnt, expected_output_tok, flags;
	kvp_owner owner;
	int prefill_active;    /* nonzero: its prefill tokens still count */
	uint32_t id_len, lora_len;
	char id[KVP_RESV_ID_MAX + 1]; /* NUL added; the id itself may hold any byte */
	char lora[KVP_RESV_LORA_MAX + 1]; /* adapter as told by kvp_resv_claim_for; NUL added */
};

/* kvp_resv_claim takes an id for the caller, before anything is booked. The id is unique over the whole node.
 *
 * owner   who will book: swept with that process. Its slot must not be assigned again before its sweep.
 * id      1..KVP_RESV_ID_MAX bytes, any value.
 * return  KVP_OK and *h; KVP_ERR_EXISTS if the id is booked or claimed, or another claim of it won or is
 *         under way; KVP_ERR_FULL at resv_max reservations or without chunk for a long id; KVP_ERR_INVAL
 *         for the length.
 * blocks  no (lock-free). who any booker.
 */
int kvp_resv_claim(struct kvp_book *b, kvp_owner owner, const void *id, size_t id_len, uint64_t *h);

/* kvp_resv_claim_for: the same, and notes the name of the adapter (0..KVP_RESV_LORA_MAX bytes, any value)
 * that the booking is for: replicas are told with all that happens to it. */
int kvp_resv_claim_for(struct kvp_book *b, kvp_owner owner, const void *id, size_t id_len, const void *lora,
	size_t lora_len, uint64_t *h);

/* kvp_resv_abandon gives a claim up, also one that was ousted: the id is free again. KVP_ERR_NOTFOUND if h is
 * not a claim (booked reservations end by kvp_resv_free). Claimer only. */
int kvp_resv_abandon(struct kvp_book *b, uint64_t h);

/* kvp_resv_oust takes an id away from a claim that is not booked yet: the claimer's kvp_resv_book answers
 * KVP_ERR_EXISTS from now on, and it abandons what is left; the id may be claimed at once. KVP_ERR_NOTFOUND
 * if there is no such claim (any more). Lock-free; who mirrors bookings of replicas, which win. */
int kvp_resv_oust(struct kvp_book *b, const void *id, size_t id_len);

/* kvp_resv_hand makes the caller (the owner of b's handle) the performer of a claim that another process
 * made: it books or abandons it from now on, and its death gives the claim up. Whose booking it will be does
 * not change. KVP_OK, KVP_ERR_NOTFOUND if h is not a claim. The claimer must not use it any more.
 * kvp_resv_is_claim answers 1 while h is a claim and nothing else, kvp_resv_is_booked while it is booked.
 * Lock-free; any process. */
int kvp_resv_hand(struct kvp_book *b, uint64_t h);
int kvp_resv_is_claim(const struct kvp_book *b, uint64_t h);
int kvp_resv_is_booked(const struct kvp_book *b, uint64_t h);

/* kvp_resv_book books a claimed reservation on a rank.
 *
 * return  KVP_OK: load and blocks are counted. On every failure nothing is counted and the claim is kept,
 *         so the caller books again or abandons:
 *         KVP_ERR_AGAIN    validate is set and the load moved since seen, or the rank is being recounted:
 *         pick again KVP_ERR_NOTFOUND rank closed, another generation, or h is not a claim
 *         KVP_ERR_EXISTS   the claim was ousted: abandon it
 *         KVP_ERR_FULL     no room for the sequence hashes or the active blocks
 *         KVP_ERR_INVAL    rank_slot or seq_cnt out of range
 * cost    constant plus about 10 ns a block. blocks no (lock-free). who claimer only.
 * order   a kvp_load_read that starts after the return sees the booking.
 */
int kvp_resv_book(struct kvp_book *b, uint64_t h, const struct kvp_resv_ask *a);

/* kvp_resv_find looks a booked id up: KVP_OK and *h, or KVP_ERR_NOTFOUND (unknown, claimed, or freed). */
int kvp_resv_find(const struct kvp_book *b, const void *id, size_t id_len, uint64_t *h);

/* kvp_resv_prefill_done takes the booking's prefill tokens off its rank. KVP_OK, also when repeated;
 * KVP_ERR_NOTFOUND if h is not booked. Any process; lock-free. On a rank that is being recounted, or while
 * another process prepares an output block, the change is left with that process and KVP_OK returned. */
int kvp_resv_prefill_done(struct kvp_book *b, uint64_t h);

/* kvp_resv_output adds one output block of weight 1.0.
 *
 * fraction  NULL, or 0.0..1.0: all output blocks of the booking, and its prompt blocks from the last one
 *           towards the root as long as no other booking holds them, get this weight (absolute, it replaces
 *           earlier ones).
 * return    KVP_OK; KVP_ERR_INVAL for a fraction out of range or NaN, checked first; KVP_ERR_NOTFOUND;
 *           KVP_ERR_AGAIN if the rank is being recounted or another process prepares an output of this
 *           booking (nothing done).
 * blocks    no. who any process.
 */
int kvp_resv_output(struct kvp_book *b, uint64_t h, const double *fraction);

/* kvp_resv_free ends a booking: its tokens, request, prompt blocks and output blocks leave the rank.
 *
 * return  KVP_OK exactly once a booking; KVP_ERR_NOTFOUND afterwards, for a claim, and for a booking whose
 *         rank was closed. After KVP_OK find answers NOTFOUND. On a rank that is being recounted, or while
 *         another process prepares an output block, the free is left with that process: the id stays taken
 *         for a moment.
 * blocks  no (lock-free). who any process.
 */
int kvp_resv_free(struct kvp_book *b, uint64_t h);

/* kvp_resv_set_session ties a lease (any value but 0) to a booked reservation: the process that ends it,
 * however it ends, hands the value to the hook of kvp_book_on_end once. KVP_ERR_NOTFOUND if it has ended:
 * nothing tied. A process killed while it ends the reservation may lose the call. Booker only, once a
 * booking. */
int kvp_resv_set_session(struct kvp_book *b, uint64_t h, uint64_t session);

/* kvp_resv_renew starts the lease of a booked reservation anew at now_ns (CLOCK_MONOTONIC). KVP_ERR_NOTFOUND
 * if it has ended. Without KVP_RESV_LEASED it does nothing. One plain store; whoever follows the request. */
int kvp_resv_renew(struct kvp_book *b, uint64_t h, uint64_t now_ns);

/* kvp_resv_info copies a booked reservation: KVP_OK, or KVP_ERR_NOTFOUND. All fields are of one instant. */
int kvp_resv_info(const struct kvp_book *b, uint64_t h, struct kvp_resv_info *out);

/* kvp_resv_seq copies up to cap sequence hashes of a booked reservation, root first, from position first on;
 * *cnt = number copied. KVP_ERR_NOTFOUND if it is not booked (any more). */
int kvp_resv_seq(const struct kvp_book *b, uint64_t h, uint32_t first, uint64_t *out, uint32_t cap,
	uint32_t *cnt);

/* kvp_resv_iter walks the booked reservations: *cursor 0 at the start; KVP_OK and *h, or KVP_ERR_NOTFOUND
 * at the end. Bookings that come or go during the walk may be met or not, each at most once. */
int kvp_resv_iter(const struct kvp_book *b, uint32_t *cursor, uint64_t *h);

/* kvp_resv_cnt returns the number of claims and bookings now (the one that resv_max bounds). */
uint64_t kvp_resv_cnt(const struct kvp_book *b);

#endif
