/* daemons/peer/sync.h — what happened to this node's bookings, as messages for the replicas.
 *
 * Shape      the consumer's side of the lifecycle ring (shm/lifecycle.h), and scratch memory.
 * Truth      the ring; of a booking, the reservation.
 * Who        kvpick-peer, one thread.
 * Ordering   records leave in the order of the ring. kvp_sync_done after the message was sent.
 * Lifetime   open to close.
 * Crash      a record that was not done is read again by the next process, and told a second time, under
 *            another router id: an add of a booking that replicas know, or a free of one that they don't.
 * Proved by  tests/t_peer_sync.c, tests/s_peer.t
 */
#ifndef KVP_PEER_SYNC_H
#define KVP_PEER_SYNC_H

#include "daemons/peer/bindings.h"
#include "ipc/replica_msg.h"
#include "shm/region.h"

struct kvp_sync {
	struct kvp_region *region;
	struct kvp_ctr_column_shm *ctr;
	struct kvp_bindings *bindings; /* NULL = no affinity */
	uint64_t router_id;
	struct kvp_part_info *part[KVP_PART_MAX]; /* constant once there; NULL = not asked for yet */
	uint64_t *seq;
	uint8_t *buf;
	size_t buf_cap;
	uint32_t seq_cap;
	struct kvp_resv_info info;
	struct kvp_lifecycle_rec rec;
};

/* One message to be published. */
struct kvp_sync_msg {
	enum kvp_part_role role; /* whose mesh */
	enum kvp_replica_topic topic;
	const void *payload;
	size_t len;
};

/* kvp_sync_open makes the caller the ring's consumer. bindings: of the same process, or NULL.
 * kvp_sync_close frees memory. */
void kvp_sync_open(struct kvp_sync *s, struct kvp_region *region, kvp_owner owner,
	struct kvp_ctr_column_shm *ctr, uint64_t router_id, struct kvp_bindings *bindings);
void kvp_sync_close(struct kvp_sync *s);

/* kvp_sync_next takes the oldest record.
 * return  KVP_OK and *out, valid until the next call; KVP_ERR_EXISTS: a record about which nobody need be
 *         told (counted); after both kvp_sync_done. KVP_ERR_NOTFOUND: there is none, the slot will be woken.
 *         KVP_ERR_AGAIN: the oldest is being written, look again soon. */
int kvp_sync_next(struct kvp_sync *s, uint64_t now_ns, struct kvp_sync_msg *out);
void kvp_sync_done(struct kvp_sync *s);
#endif
