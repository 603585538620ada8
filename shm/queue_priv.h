/* shm/queue_priv.h — layouts and steps that queue.c, queue_drain.c and queue_sweep.c share. Private to them.
 *
 * Shape      words described below; the contract is in queue.h. Truth, Writers, Ordering, Crash: as there.
 * Proved by  tests/t_queue_crash.c
 */
#ifndef KVP_SHM_QUEUE_PRIV_H
#define KVP_SHM_QUEUE_PRIV_H

#include <kvpick/clock.h>
#include <kvpick/point.h>
#include "shm/queue.h"

/* ---- state word: generation 32 | abandoned 1 (bit 16) | performer's slot 8 | state 8 ---- */
enum { Q_FREE, Q_FILL, Q_QUEUED, Q_TAKEN, Q_DONE, Q_RETRY, Q_DROP, Q_CNT };
#define Q_ABANDONED (1ull << 16)
#define Q_WORD(gen, slot, st) ((uint64_t)(gen) << 32 | (uint64_t)(slot) << 8 | (uint64_t)(st))
#define Q_GEN(s) ((uint32_t)((s) >> 32))
#define Q_SLOT(s) ((uint32_t)((s) >> 8) & 0xffu)
#define Q_STATE(s) ((uint32_t)(s)&0xffu)
#define Q_NO_SLOT 0xffu

#define Q_IDX(h) ((uint32_t)(h))
#define Q_ANSWER (1ull << 31) /* above every index: marks the chunks of an answer */
#define Q_HANDLE(gen, idx) ((uint64_t)(gen) << 32 | (idx))

struct kvp_queue_rec_shm { /* relaxed atomics; who may write: see the state */
	uint64_t resv, isl_tok, cached_tok, posted_ns, pinned_worker_id, score, seq;
	uint32_t strict, part, class, pinned_dp_rank, has_pinned, owner;
	uint32_t first, last, len;   /* chunks (0 = none) and words that it carries */
	uint32_t ans_first, ans_len; /* chunks of a long answer, else in inl */
	uint32_t pad;
	uint64_t booked;
	uint64_t inl[KVP_QUEUE_INLINE];
} __attribute__((aligned(64)));

#define CHUNK_WORDS 64u
#define CHUNKS_PER_REC 8u
#define CHUNKS_MIN 4096u
struct kvp_queue_link_shm {
	uint64_t owner; /* handle of the record (with Q_ANSWER for its answer), 0 = free; CAS */
	uint32_t next, pad;
};

/* A count with its number of changes, so that it can be repaired while others go on counting. */
#define COUNT_MORE ((1ull << 32) + 1)
#define COUNT_LESS ((1ull << 32) - 1) /* the count must be at least 1 */

struct kvp_queue_part_shm {
	uint64_t drain;	   /* kicks 32 | owner 32 */
	uint64_t drain_ns; /* when it was taken or last confirmed; a hint */
	uint64_t pad0[14];
	uint64_t total;
	uint64_t pad1[15];
	uint64_t class[KVP_POLICY_CLASS_MAX];
	uint64_t seq;
	uint32_t cursor, carry;
	uint64_t deficit[KVP_POLICY_CLASS_MAX];
} __attribute__((aligned(128)));
#define DRAIN_KICK (1ull << 32)
#define DRAIN_OWNER(w) ((uint32_t)(w))
#define DRAIN_KICKS(w) ((uint32_t)((w) >> 32))

struct kvp_queue_slot_shm {
	uint32_t asked;
	uint32_t pad[15];
} __attribute__((aligned(64)));

struct kvp_queue_hdr_shm {
	struct kvp_objhdr obj;
	uint64_t pad0[8];
	uint64_t total;
	uint64_t pad1[15];
};

static inline void q_ctr(const struct kvp_queue *q, enum kvp_ctr id, uint64_t n)
{
	if (q->ctr && n)
		kvp_ctr_add(q->ctr, id, n);
}
static inline uint32_t q_self(const struct kvp_queue *q)
{
	return q->owner ? KVP_OWNER_SLOT(q->owner) : Q_NO_SLOT;
}
/* q_state_of is the state word of a handle; 0 (free) when the handle is stale or garbage. */
static inline uint64_t q_state_of(const struct kvp_queue *q, uint64_t h)
{
	if (Q_IDX(h) >= q->queued_max)
		return 0;
	uint64_t s = kvp_ld_acq_u64(&q->state[Q_IDX(h)]);
	return Q_GEN(s) == Q_GEN(h) ? s : 0;
}
static inline int q_move(struct kvp_queue *q, uint32_t idx, uint64_t from, uint32_t slot, uint32_t st)
{
	return kvp_cas_ar_u64(&q->state[idx], from, Q_WORD(Q_GEN(from), slot, st));
}
/* q_part_of is the partition block of a record, bounds-checked; NULL if it holds garbage. */
static inline struct kvp_queue_part_shm *q_part_of(const struct kvp_queue *q, uint32_t idx)
{
	uint32_t p = kvp_ld_rlx_u32(&q->rec[idx].part);
	return p < q->part_max ? &q->part[p] : NULL;
}

/* ---- queue.c ---- */
enum q_count { Q_COUNT_IN, Q_COUNT_OUT };
void q_count(struct kvp_queue *q, uint32_t idx, enum q_count dir);
/* q_release frees a record that the caller holds in FILL, DROP, DONE or TAKEN. */
void q_release(struct kvp_queue *q, uint32_t idx);
/* q_chunks_put appends words to a chain: KVP_ERR_FULL leaves what was there. */
int q_chunks_put(struct kvp_queue *q, uint64_t h, uint32_t *first, uint32_t *last, uint32_t *len,
	const uint64_t *word, uint32_t n);
void q_chunks_drop(struct kvp_queue *q, uint64_t h, uint32_t first);
/* q_ready tells a record's owner that it changed. */
void q_ready(struct kvp_queue *q, uint32_t idx);
/* q_next_used gives the next record in use from idx on; queued_max at the end. */
uint32_t q_next_used(const struct kvp_queue *q, uint32_t idx);
#endif
