/* shm/memo.h — what the listeners must remember of each rank's stream beside the tree, kept over a restart of
 * the indexer: LoRA and salt of blocks (their children inherit them), classes of cache groups.
 *
 * Shape      a map in the indexer's own segment: chained hash, 32-bit links, nodes from a dense arena, so
 *            what is touched grows with what is remembered. Key (rank slot, data-parallel rank, kind, id),
 *            hashed with a secret that the header keeps; value two words and a state. A rank slot has an
 *            epoch; nodes of another epoch are dead.
 * Truth      nodes reachable from a bucket whose epoch is their rank slot's.
 * Why        an engine says LoRA and salt of the first block of a chain only. An indexer that has forgotten
 *            them would hash every later block of the chain wrongly: no foreign match, but no match either.
 *            Asking the engine again from 0 brings back the last 10000 batches at best, so it is kept
 *            instead, by the apply thread, in step with the tree and the marks; the decoder threads run
 *            ahead.
 * Writers    the indexer's apply thread.
 * Readers    the next indexer.
 * Ordering   a node's fields, then the link to it (release). A change of the state is one store; a change of
 *            the words makes a new node in front of the old one, which is unlinked then.
 * Lifetime   as long as the region.
 * Crash      killed anywhere: each key has its old or its new value. Nodes that were taken but not linked are
 *            free again after kvp_memo_join, which finds the free ones by walking the buckets. A batch that
 *            was half applied is applied again over its own notes; only a block that it both removes and
 *            stores under another salt is then taken for ambiguous.
 * Proved by  tests/t_memo.c, tests/t_kv_event.c, tests/s_events.t
 */
#ifndef KVP_SHM_MEMO_H
#define KVP_SHM_MEMO_H

#include "shm/obj.h"

struct kvp_memo_note {
	uint64_t id;
	uint64_t word[2];
	uint32_t dp_rank;
	uint32_t state; /* KVP_MEMO_KIND is part of the key; no other bit set: forgotten */
};
#define KVP_MEMO_KIND 0x80000000u

struct kvp_memo_shm;
struct kvp_memo { /* process-local handle */
	struct kvp_memo_shm *shm;
	uint32_t *epoch, *bucket; /* in the segment */
	struct kvp_memo_node *node;
	uint32_t rank_max, bucket_max, node_max;
	uint32_t fresh;	    /* nodes from here on have never been used */
	uint32_t *free;	    /* heap: stack of free nodes below fresh */
	uint32_t free_cnt, free_max;
	uint32_t sweep;	    /* next bucket to be looked through for dead nodes */
	uint32_t *live_cnt; /* heap: nodes of each rank slot's epoch */
	uint64_t steps;	    /* nodes looked at by kvp_memo_put: a few for each note, whatever the ids */
};

uint64_t kvp_memo_align(void);
uint64_t kvp_memo_footprint(const struct kvp_geom *g);
int kvp_memo_new(void *mem, const struct kvp_geom *g);
/* kvp_memo_join takes over as the writer; the previous one is dead. KVP_ERR_SYS without memory;
 * KVP_ERR_CORRUPT: links that lead nowhere or in circles; the memo has been emptied and is joined. */
int kvp_memo_join(void *mem, const struct kvp_geom *g, struct kvp_memo *out);
void kvp_memo_leave(struct kvp_memo *m);
int kvp_memo_delete(void *mem);
uint64_t kvp_memo_check(const struct kvp_memo *m);

/* kvp_memo_put applies notes of one rank slot's stream, in order. KVP_ERR_FULL: those that found no room are
 * not remembered (*lost counts them). KVP_ERR_INVAL for a slot out of range. Does not block; time linear in
 * cnt. */
int kvp_memo_put(struct kvp_memo *m, uint32_t rank_slot, const struct kvp_memo_note *note, uint32_t cnt,
	uint32_t *lost);
/* kvp_memo_clear forgets everything of a rank slot: one store. */
void kvp_memo_clear(struct kvp_memo *m, uint32_t rank_slot);
/* kvp_memo_cnt: notes of a rank slot. kvp_memo_get_all copies those of all slots, in no order: those of slot
 * i begin at out[first[i]]; out has room for the sum of all counts, first for rank_max + 1. It walks the
 * whole memo. */
uint32_t kvp_memo_cnt(const struct kvp_memo *m, uint32_t rank_slot);
void kvp_memo_get_all(const struct kvp_memo *m, struct kvp_memo_note *out, uint64_t *first);
#endif
