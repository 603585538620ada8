/* shm/hits.h — how many selections looked for their prompt in the tree, and how many found a block of it
 * anywhere, by partition. An index that holds blocks which no request ever finds is fed wrongly: other
 * hashes, other tokens.
 *
 * Shape      part_max lines of two counts that only grow.
 * Truth      the counts.
 * Writers    every process that selects (kvp_hits_add), some selections at a time.
 * Readers    the indexer, which compares them with what it saw before.
 * Ordering   found is added before asked, and asked is read first: a reader never sees fewer finds than
 *            belong to the selections it sees.
 * Lifetime   as long as the region.
 * Crash      killed between its selections and its report: those are not counted. Between the two additions:
 *            finds without selections, which hides a fault for one comparison at most.
 * Proved by  tests/t_hits.c, tests/s_regressions.t
 */
#ifndef KVP_SHM_HITS_H
#define KVP_SHM_HITS_H

#include "shm/obj.h"

struct kvp_hits_shm;
struct kvp_hits { /* process-local handle */
	struct kvp_hits_shm *shm;
	uint32_t part_max;
};

/* Life cycle as in shm/obj.h; footprint uses part_max. */
uint64_t kvp_hits_align(void);
uint64_t kvp_hits_footprint(const struct kvp_geom *g);
int kvp_hits_new(void *mem, const struct kvp_geom *g);
int kvp_hits_join(void *mem, const struct kvp_geom *g, struct kvp_hits *out);
void kvp_hits_leave(struct kvp_hits *h);
int kvp_hits_delete(void *mem);

/* kvp_hits_add reports selections of a partition; found at most asked. kvp_hits_get reads the sums so far; a
 * partition out of range has none. Neither blocks. */
void kvp_hits_add(struct kvp_hits *h, uint32_t part, uint32_t asked, uint32_t found);
void kvp_hits_get(const struct kvp_hits *h, uint32_t part, uint64_t *asked, uint64_t *found);
#endif
