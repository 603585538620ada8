/* shm/load.h — the booking object, and the load of every rank that selections scan.
 *
 * Shape      One object, three parts joined together as struct kvp_book: loads (this header), active blocks
 *            (shm/active.h) and reservations (shm/resv.h). A rank is two 16-byte pairs
 *            A = {prefill tokens 40 bit | requests 24 bit, tag}, B = {active blocks 24.40 fixed point,
 *            tag}, and a control word {generation 32, count epoch 20, epochs of garbage 8, state 4}: together
 *            in a cache line where there are few ranks, so that bookers do not meet; else pairs and control
 *            words in dense arrays, so that a scan reads little.
 * Truth      The reservations. Loads and active-block counts are a cache of them and can be recomputed.
 * Writers    Every booker, by 16-byte CAS; the control word: indexer (open, close) and the sweep (repair).
 * Readers    Every selection, lock-free, by plain loads.
 * Ordering   An operation writes its intent into its reservation (release), marks done the operation that the
 *            pair's tag names, and replaces pair and tag in one CAS. So an intent was applied exactly if its
 *            reservation says done or the tag names it. The tag holds reservation index, generation, phase
 *            and kind. Pair first, then the reservation's state, then the control word: in this order an
 *            operation cannot reach a rank that was fenced by close or repair (they change the control
 *            word, then both tags).
 * Lifetime   As long as the region. A rank slot from kvp_rank_open to kvp_rank_close; generations tell them
 *            apart.
 * Crash      A kill at any instruction leaves an intent that anyone can decide (see Ordering) or block
 *            references half taken; kvp_book_sweep_owner (shm/sweep.h) finishes, undoes or recounts them. A
 *            kill inside open or close: call it again, or any sweep; both go on where it stopped. Readers
 *            are never blocked.
 * Proved by  tests/t_resv.c, tests/m_book.c, tests/v_booking.c, tests/t_book_crash.c, tests/torture/x_book.c.
 */
#ifndef KVP_SHM_LOAD_H
#define KVP_SHM_LOAD_H

#include "shm/counter.h"
#include "shm/obj.h"

#define KVP_BLK_FX_SHIFT 40                          /* fraction bits of a fixed-point block count */
#define KVP_BLK_FX_ONE (1ULL << KVP_BLK_FX_SHIFT)    /* one block */
#define KVP_LOAD_TOK_MAX ((1ULL << 40) - 1)          /* prefill tokens of a rank are clamped here */

struct kvp_rank_shm { /* for the booking modules and the inline readers below only */
	struct kvp_u128 pair[2]; /* lo = load, hi = tag; bookers, CAS; readers relaxed */
} __attribute__((aligned(32)));
#define KVP_LOAD_PADDED_MAX 64 /* objects of so many rank slots keep each in a cache line of its own */
#define KVP_RANK_PAIR_A 0 /* lo = prefill tokens << KVP_LOAD_REQ_BITS | requests */
#define KVP_RANK_PAIR_B 1 /* lo = active blocks, fixed point, modulo 2^64 */
/* A booking that takes over another's blocks may be counted after their end: until then the sum is below
 * zero, by this much at most. Such sums read as zero. */
#define KVP_LOAD_BLK_DEBT_MAX (1ULL << 60)
#define KVP_LOAD_BLK_MAX (UINT64_MAX - KVP_LOAD_BLK_DEBT_MAX)
#define KVP_LOAD_REQ_BITS 24

struct kvp_book_hdr_shm;
struct kvp_id_shm;
struct kvp_resv_shm;
struct kvp_chunk_shm;
struct kvp_bucket_shm;
struct kvp_lifecycle_ring;

/* Process-local handle, for one thread (it holds cursors and a scratch table). Join once more for a second
 * thread. Fields are private to the booking modules. */
struct kvp_book {
	struct kvp_book_hdr_shm *hdr;
	struct kvp_rank_shm *rank; /* use kvp_rank_at */
	uint64_t *rank_ctl;        /* control words: indexer and sweep, CAS; bookers acquire */
	uint32_t rank_stride, ctl_stride; /* from slot to slot, bytes */
	struct kvp_id_shm *id;
	struct kvp_resv_shm *resv;
	struct kvp_chunk_shm *chunk;
	uint64_t *key;
	struct kvp_bucket_shm *act;
	uint64_t *act_used;
	struct kvp_ctr_column_shm *ctr;
	uint64_t *scratch;
	uint64_t act_line_mask;
	uint64_t salt[2];
	uint64_t nonce;
	uint32_t rank_max, id_cnt, resv_max, chunk_cnt, chunk_cur, scratch_cnt, rank_end;
	kvp_owner owner;
	void (*on_end)(void *ctx, uint64_t session); /* NULL = none */
	void *on_end_ctx;
	struct kvp_lifecycle_ring *tell; /* NULL = nobody */
};

/* Life cycle as in shm/obj.h. footprint uses rank_max, resv_max, active_block_max and salt; new expects
 * zero-filled memory and touches only the first page. leave frees the handle's scratch memory. check: see
 * shm/sweep.h (kvp_book_check). */
uint64_t kvp_book_align(void);
uint64_t kvp_book_footprint(const struct kvp_geom *g);
int kvp_book_new(void *mem, const struct kvp_geom *g);
int kvp_book_join(void *mem, const struct kvp_geom *g, struct kvp_book *out);
void kvp_book_leave(struct kvp_book *b);
int kvp_book_delete(void *mem);

/* kvp_book_attach names the process behind a handle and where it counts.
 *
 * owner   performer of all operations made through b; 0 = a tool without a slot.
 * column  the process's counter column, or NULL (nothing is counted).
 * who     once, after join, before the first booking; one owner may have several handles.
 */
void kvp_book_attach(struct kvp_book *b, kvp_owner owner, struct kvp_ctr_column_shm *column);

/* kvp_book_on_end sets what a handle calls with the session of every reservation that it ends. */
static inline void kvp_book_on_end(struct kvp_book *b, void (*hook)(void *ctx, uint64_t session), void *ctx)
{
	b->on_end = hook;
	b->on_end_ctx = ctx;
}

/* kvp_book_publish makes a handle tell the replicas what is done through it: every kvp_resv_book without
 * KVP_RESV_MIRRORED, every kvp_resv_prefill_done and kvp_resv_free that answers KVP_OK, and what
 * ends by the sweep of a dead owner or by its lease, each as a record in the ring (shm/lifecycle.h). Not
 * told: outputs, expiry, the close of a rank. l NULL, or without a ring (no replica sync): nobody is told,
 * which is how a handle begins. Who applies what replicas tell uses a handle of its own that tells nobody. */
void kvp_book_publish(struct kvp_book *b, struct kvp_lifecycle_ring *l);

static inline uint64_t kvp_load_blk_fx(uint64_t sum)
{
	return sum <= KVP_LOAD_BLK_MAX ? sum : 0;
}

struct kvp_load {
	uint64_t prefill_tok;   /* tokens still to be prefilled by live bookings */
	uint64_t active_blk_fx; /* live blocks, fixed point with KVP_BLK_FX_SHIFT fraction bits */
	uint32_t requests;      /* live bookings */
	uint64_t version;       /* changes with every change of prefill_tok or requests */
};

static inline struct kvp_rank_shm *kvp_rank_at(const struct kvp_book *b, uint32_t rank_slot)
{
	return (struct kvp_rank_shm *)(void *)((char *)b->rank + (uint64_t)rank_slot * b->rank_stride);
}

/* What a loop over many ranks keeps in registers: shared words being volatile, a compiler reads the fields of
 * a handle anew for every rank. */
struct kvp_load_view {
	const char *rank;
	uint64_t stride;
};
static inline struct kvp_load_view kvp_load_view(const struct kvp_book *b)
{
	return (struct kvp_load_view){ (const char *)b->rank, b->rank_stride };
}

/* kvp_load_peek copies what costs are made of. rank_slot must be below rank_max; otherwise as
 * kvp_load_read. */
static inline void kvp_load_peek(struct kvp_load_view v, uint32_t rank_slot, uint64_t *prefill_tok,
	uint64_t *active_blk_fx)
{
	const struct kvp_rank_shm *r =
		(const struct kvp_rank_shm *)(const void *)(v.rank + rank_slot * v.stride);
	*prefill_tok = kvp_ld_rlx_u64(&r->pair[KVP_RANK_PAIR_A].lo) >> KVP_LOAD_REQ_BITS;
	*active_blk_fx = kvp_load_blk_fx(kvp_ld_rlx_u64(&r->pair[KVP_RANK_PAIR_B].lo));
}

/* kvp_load_read copies the load of a rank slot; a closed or out-of-range slot reads as zero load.
 *
 * errors  none. blocks no. who any reader. order: relaxed; the words may come from neighbouring instants,
 *         which a validated booking (kvp_resv_ask.validate) detects.
 */
static inline void kvp_load_read(const struct kvp_book *b, uint32_t rank_slot, struct kvp_load *l)
{
	static const struct kvp_rank_shm none;
	const struct kvp_rank_shm *r = rank_slot < b->rank_max ? kvp_rank_at(b, rank_slot) : &none;
	uint64_t a = kvp_ld_rlx_u64(&r->pair[KVP_RANK_PAIR_A].lo);
	l->prefill_tok = a >> KVP_LOAD_REQ_BITS;
	l->requests = (uint32_t)(a & ((1u << KVP_LOAD_REQ_BITS) - 1));
	l->version = kvp_ld_rlx_u64(&r->pair[KVP_RANK_PAIR_A].hi);
	l->active_blk_fx = kvp_load_blk_fx(kvp_ld_rlx_u64(&r->pair[KVP_RANK_PAIR_B].lo));
}

/* kvp_load_prefetch hints that the load of a rank is read soon. Any slot number is harmless. */
static inline void kvp_load_prefetch(const struct kvp_book *b, uint32_t rank_slot)
{
	if (rank_slot < b->rank_max)
		__builtin_prefetch(kvp_rank_at(b, rank_slot));
}

/* kvp_load_blocks rounds half away from zero. Sums within 2^-27 below a half count as the half, because
 * weights such as 0.7 have no exact binary form. */
static inline uint64_t kvp_load_blocks(const struct kvp_load *l)
{
	uint64_t up = (KVP_BLK_FX_ONE >> 1) + (1ULL << (KVP_BLK_FX_SHIFT - 27));
	return l->active_blk_fx > UINT64_MAX - up ? UINT64_MAX >> KVP_BLK_FX_SHIFT
						  : (l->active_blk_fx + up) >> KVP_BLK_FX_SHIFT;
}

/* kvp_rank_open gives a rank slot to generation gen, with zero load.
 *
 * gen     1..2^32-1, differs from every earlier generation of the slot.
 * return  KVP_OK, also if gen is open already (nothing changes); KVP_ERR_INVAL for slot or gen out of range.
 * blocks  no; drops what an earlier generation left, so up to one scan of the reservation table.
 * who     indexer only, one thread. order: release; a booker that learns gen afterwards finds the rank open.
 */
int kvp_rank_open(struct kvp_book *b, uint32_t rank_slot, uint32_t gen);

/* kvp_rank_close drops every booking of generation gen and closes the slot.
 *
 * return  KVP_OK, also if it was closed already (leftovers are dropped); KVP_ERR_NOTFOUND if another
 *         generation is open; KVP_ERR_INVAL for a slot out of range.
 * after   lifecycle calls on dropped bookings answer KVP_ERR_NOTFOUND; bookings in flight answer it as well.
 * blocks  no; one scan of the reservation table. who indexer only, one thread.
 */
int kvp_rank_close(struct kvp_book *b, uint32_t rank_slot, uint32_t gen);

#endif
