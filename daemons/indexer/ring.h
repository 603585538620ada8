/* daemons/indexer/ring.h — operations from one decoder thread to the apply thread, in order, bounded.
 *
 * Shape      a ring of 64-bit words with records of varying length; a record never wraps (a filler record
 *            fills the end of the ring).
 * Truth      tail (producer) and head (consumer), word counts that only grow.
 * Writers    producer: one decoder thread. Consumer: the apply thread.
 * Ordering   tail is stored with release after the record's words; head with release after they were
 *            read.
 * Lifetime   both threads' common life; process memory.
 * Crash      gone with the process; what was in it is replayed (shm/mark.h advances after the tree).
 * Proved by  tests/t_apply.c
 */
#ifndef KVP_INDEXER_RING_H
#define KVP_INDEXER_RING_H

#include <kvpick/atomic.h>
#include <stddef.h>

enum kvp_idx_op {
	KVP_IDX_FILLER,
	KVP_IDX_STORE,
	KVP_IDX_ATTACH,
	KVP_IDX_REMOVE,
	KVP_IDX_CLEAR,
	KVP_IDX_CLEAR_TIER,
	KVP_IDX_RESTART, /* the engine has begun anew: all of the rank goes */
	KVP_IDX_LOST,	 /* the same, for batches that were lost */
	KVP_IDX_NOTES,
	KVP_IDX_MARK
};

/* One operation. words counts 64-bit words, header included. */
struct kvp_idx_msg {
	uint32_t words;
	uint32_t op;	    /* enum kvp_idx_op */
	uint64_t listener;  /* unique number of the listener it came from */
	uint32_t rank_slot; /* the listener's own rank */
	uint32_t dp_rank;   /* rank that the operation is for */
	uint64_t epoch;	    /* registry epoch that the decoder had seen when the batch came */
	uint64_t parent;    /* STORE */
	uint32_t n;	    /* blocks, or notes */
	uint16_t has_parent;
	uint16_t tier; /* STORE, ATTACH, REMOVE, CLEAR_TIER: enum kvp_radix_tier */
	uint64_t seq;	  /* MARK: batch applied so far */
	uint64_t live;	  /* MARK: last live batch, or KVP_MARK_UNSET */
	uint64_t recv_ns; /* MARK: when the batch came */
	/* STORE: n local, n external hashes; ATTACH, REMOVE: n external; NOTES: n times id, two words, and
	 * data-parallel rank << 32 | state (ipc/kv_event.h, shm/memo.h). */
	uint64_t data[];
};
#define KVP_IDX_MSG_WORDS (sizeof(struct kvp_idx_msg) / 8)
#define KVP_IDX_MSG_BLK_MAX 4096 /* blocks of one record; longer events are cut */
#define KVP_IDX_NOTE_WORDS 4
#define KVP_IDX_MSG_NOTE_MAX (2 * KVP_IDX_MSG_BLK_MAX / KVP_IDX_NOTE_WORDS)

struct kvp_idx_ring {
	uint64_t *word; /* heap */
	uint64_t mask;
	uint8_t pad0[112];
	uint64_t tail; /* producer */
	uint64_t head_seen, reserved;
	uint8_t pad1[104];
	uint64_t head; /* consumer */
	uint64_t tail_seen;
	uint8_t pad2[112];
};

/* kvp_idx_ring_open: words a power of two, at least 4 records of the greatest length. KVP_ERR_INVAL,
 * KVP_ERR_SYS. */
int kvp_idx_ring_open(struct kvp_idx_ring *r, uint64_t words);
void kvp_idx_ring_close(struct kvp_idx_ring *r);
/* kvp_idx_ring_reserve gives room for a record of `words` words (header fields zero but words), NULL if
 * there is none now. kvp_idx_ring_commit publishes it. Producer. */
struct kvp_idx_msg *kvp_idx_ring_reserve(struct kvp_idx_ring *r, uint32_t words);
void kvp_idx_ring_commit(struct kvp_idx_ring *r);
/* kvp_idx_ring_peek gives the oldest record, NULL if there is none; it stays until
 * kvp_idx_ring_consume. Consumer. */
const struct kvp_idx_msg *kvp_idx_ring_peek(struct kvp_idx_ring *r);
void kvp_idx_ring_consume(struct kvp_idx_ring *r, const struct kvp_idx_msg *m);
#endif
