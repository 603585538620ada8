/* shm/mark.h — how far the event stream of each rank has been applied, kept over a restart of the
 * indexer.
 *
 * Shape      rank_max marks, one a rank slot, in the indexer's own segment.
 * Truth      a mark whose gen is the rank slot's generation now.
 * Writers    the indexer's apply thread.
 * Readers    the next indexer; kvpickctl check.
 * Ordering   reset: gen 0 first, then the words, then gen (release). Advance: one store a word, after the
 *            batch is in the tree.
 * Lifetime   as long as the region.
 * Crash      killed between batch and advance: the batch is applied once more, which changes nothing.
 *            Killed inside reset: the mark belongs to no generation and counts as unset.
 * Proved by  tests/t_mark.c
 */
#ifndef KVP_SHM_MARK_H
#define KVP_SHM_MARK_H

#include "shm/obj.h"

#define KVP_MARK_UNSET UINT64_MAX /* no batch yet; sequence numbers are below */

struct kvp_mark_rec {	      /* of one rank slot */
	uint64_t applied_seq; /* last batch applied */
	uint64_t live_seq;    /* last batch that came live, not by replay */
	uint32_t gen;	      /* rank slot generation; 0 = belongs to nobody; stored last, release */
	uint32_t pad[3];
};
struct kvp_mark_shm;
struct kvp_mark { /* process-local handle */
	struct kvp_mark_shm *shm;
	uint32_t rank_max;
};

uint64_t kvp_mark_align(void);
uint64_t kvp_mark_footprint(const struct kvp_geom *g);
int kvp_mark_new(void *mem, const struct kvp_geom *g);
int kvp_mark_join(void *mem, const struct kvp_geom *g, struct kvp_mark *out);
void kvp_mark_leave(struct kvp_mark *m);
int kvp_mark_delete(void *mem);
uint64_t kvp_mark_check(const struct kvp_mark *m); /* marks with a live number but nothing applied */

/* kvp_mark_reset starts a rank slot's generation with both numbers unset; gen 0 forgets. kvp_mark_advance
 * stores numbers (KVP_MARK_UNSET leaves one as it is) if gen is the mark's. kvp_mark_get:
 * KVP_ERR_NOTFOUND for another generation. KVP_ERR_INVAL for a slot out of range. None blocks. */
int kvp_mark_reset(struct kvp_mark *m, uint32_t rank_slot, uint32_t gen);
int kvp_mark_advance(
	struct kvp_mark *m, uint32_t rank_slot, uint32_t gen, uint64_t applied_seq, uint64_t live_seq);
int kvp_mark_get(const struct kvp_mark *m, uint32_t rank_slot, uint32_t gen, uint64_t *applied_seq,
	uint64_t *live_seq);
#endif
