/* shm/quota.h — ceilings that all processes of a node share: picks under way, bytes of bodies under way.
 *
 * Shape      one line of words for each participant slot: its process's share of every ceiling.
 * Truth      the shares; what is used of a ceiling is their sum. There is no total that could go wrong.
 * Writers    a share: the process in the slot, one thread; after its death whoever sweeps it.
 * Readers    everybody who takes.
 * Ordering   taking is add to the own share, full barrier, sum over all, take back when that is too much. Of
 *            two that take the last place at once each sees the other, so a ceiling is never exceeded; both
 *            may give way, then each tries again a few times.
 * Lifetime   as long as the region.
 * Crash      a killed process leaves its share; kvp_quota_sweep_owner gives it back.
 * Proved by  tests/t_quota.c
 */
#ifndef KVP_SHM_QUOTA_H
#define KVP_SHM_QUOTA_H

#include "shm/obj.h"

enum kvp_quota_kind {
	KVP_QUOTA_PICK, /* requests from their first body byte until their pick has ended */
	KVP_QUOTA_BODY, /* bytes of request bodies that are kept */
	KVP_QUOTA_KIND_CNT
};

struct kvp_quota_shm;
struct kvp_quota { /* process-local */
	struct kvp_quota_shm *shm;
	uint32_t slot_max;
};

uint64_t kvp_quota_align(void);
uint64_t kvp_quota_footprint(const struct kvp_geom *g);
int kvp_quota_new(void *mem, const struct kvp_geom *g);
int kvp_quota_join(void *mem, const struct kvp_geom *g, struct kvp_quota *out);
void kvp_quota_leave(struct kvp_quota *q);
int kvp_quota_delete(void *mem);
/* kvp_quota_check counts shares of slots that say nobody's and are not zero, or beyond any sense. */
uint64_t kvp_quota_check(const struct kvp_quota *q);

/* kvp_quota_take adds amount to the caller's share if the node then has at most limit.
 * owner   the caller's slot owner.  amount  1..2^40.
 * return  KVP_OK; KVP_ERR_FULL (nothing taken); KVP_ERR_INVAL. Does not block, bounded. One thread. */
int kvp_quota_take(
	struct kvp_quota *q, kvp_owner owner, enum kvp_quota_kind kind, uint64_t amount, uint64_t limit);
/* kvp_quota_give takes amount from the caller's share; at most what is there. */
void kvp_quota_give(struct kvp_quota *q, kvp_owner owner, enum kvp_quota_kind kind, uint64_t amount);
/* kvp_quota_used is what all processes together have taken. */
uint64_t kvp_quota_used(const struct kvp_quota *q, enum kvp_quota_kind kind);

/* kvp_quota_sweep_owner gives the share of a dead process back. Returns 1 if there was one. */
uint32_t kvp_quota_sweep_owner(struct kvp_quota *q, kvp_owner dead);
#endif
