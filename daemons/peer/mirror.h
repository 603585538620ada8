/* daemons/peer/mirror.h — what replicas tell about their bookings, applied to this node's.
 *
 * Shape      a handle on the region, and the two sets of what came too early (reorder.h).
 * Truth      the reservations. A mirrored one belongs to the node, is marked KVP_RESV_MIRRORED and ends, if
 *            nobody ends it, by age from its receipt.
 * Who        kvpick-peer, one thread; any number of meshes.
 * Ordering   an event is in effect when kvp_mirror_apply returns. Whoever waits in the queue for what it gave
 *            back is told by kvp_mirror_flush, once a batch.
 * Lifetime   open to close; mirrored bookings outlive it.
 * Crash      as that of any booker (shm/resv.h). Early frees and marks are forgotten.
 * Proved by  tests/v_replica_apply.c (recorded scenarios, by the clock of the test), tests/t_mirror.c,
 *            tests/s_peer.t
 *
 * An id is taken once on a node, whatever its partition; replicas tell them apart by partition. So a mirrored
 * booking whose id another partition holds gets a name that nobody can ask for, and only replicas reach it.
 */
#ifndef KVP_PEER_MIRROR_H
#define KVP_PEER_MIRROR_H

#include "daemons/peer/reorder.h"
#include "ipc/replica_msg.h"
#include "shm/region.h"

/* What became of an event. X(id, text, counter): each one is counted. */
#define KVP_MIRROR_LIST(X)                                                                                   \
	X(ADDED, "applied", PEER_ADDED)                                                                      \
	X(ADDED_DONE, "applied+prefill_done", PEER_ADDED_DONE)                                               \
	X(MARKED, "applied", PEER_MARKED)                                                                    \
	X(FREED, "applied", PEER_FREED)                                                                      \
	X(UNCHANGED, "unchanged", PEER_UNCHANGED)                                                            \
	X(TOMBSTONED, "tombstoned", PEER_TOMBSTONED)                                                         \
	X(PENDING, "pending", PEER_PENDED)                                                                   \
	X(OWN, "dropped:self", PEER_OWN)                                                                     \
	X(NO_PARTITION, "dropped:unknown_partition", PEER_NO_PARTITION)                                      \
	X(BLOCK_SIZE, "dropped:block_size", PEER_BLOCK_SIZE)                                                 \
	X(NO_WORKER, "dropped:unknown_worker", PEER_NO_WORKER)                                               \
	X(DUPLICATE, "dropped:duplicate", PEER_DUPLICATE)                                                    \
	X(LATE, "dropped:tombstone", PEER_LATE)                                                              \
	X(MISMATCH, "ignored:worker_mismatch", PEER_MISMATCH)                                                \
	X(BAD_ID, "dropped:id", PEER_BAD_ID)                                                                 \
	X(FULL, "dropped:full", PEER_FULL)                                                                   \
	X(BUSY, "dropped:busy", PEER_BUSY)

enum kvp_mirror_result {
#define X(id, text, counter) KVP_MIRROR_##id,
	KVP_MIRROR_LIST(X)
#undef X
		KVP_MIRROR_RESULT_CNT
};
const char *kvp_mirror_text(enum kvp_mirror_result r);

struct kvp_mirror {
	struct kvp_region *region;
	struct kvp_ctr_column_shm *ctr;
	kvp_owner owner;
	uint64_t router_id, salt[2];
	uint64_t evicted; /* counted */
	struct kvp_reorder tomb, pending;
	int gave_back; /* load was given back since the last flush */
	struct kvp_resv_info info; /* of the booking in question */
};

/* kvp_mirror_open: the region joined with KVP_REGION_BOOKER or more; its booking handle is used and must not
 * tell replicas. router_id: this node's, its own events are dropped. ctr NULL: uncounted. KVP_OK,
 * KVP_ERR_SYS. */
int kvp_mirror_open(struct kvp_mirror *m, struct kvp_region *region, kvp_owner owner,
	struct kvp_ctr_column_shm *ctr, uint64_t router_id);
void kvp_mirror_close(struct kvp_mirror *m);

/* kvp_mirror_apply applies one event of a role's mesh, received at now_ns (CLOCK_MONOTONIC, never falling).
 * blocks  no: a rank that is being counted anew is waited for by a bounded number of looks. */
enum kvp_mirror_result kvp_mirror_apply(struct kvp_mirror *m, enum kvp_part_role role,
	const struct kvp_replica_event *e, uint64_t now_ns);

/* kvp_mirror_flush ends a batch: whoever waits gets its turn if load was given back. */
void kvp_mirror_flush(struct kvp_mirror *m);
/* kvp_mirror_expire forgets what came too early and is too old; once a heartbeat, beside what apply does. */
void kvp_mirror_expire(struct kvp_mirror *m, uint64_t now_ns);
#endif
