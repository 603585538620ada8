/* daemons/peer/bindings.h — sessions' bindings that replicas tell each other: the last writer wins.
 *
 * Shape      a logical clock, and for every session heard of the stamp of its last writer.
 * Truth      bindings: shm/affinity.h. Stamps: private, bounded; a forgotten one loses to whatever comes.
 * Who        kvpick-peer, one thread.
 * Ordering   stamps are (sequence, writer), greater wins. The clock is never behind a sequence heard, and
 *            begins with the time of day in microseconds, so that a restarted process is not behind itself.
 * Limits     a sequence of more than the time of day in nanoseconds, and a day, is refused and moves no
 *            clock: whoever sends the greatest number would else end the order of all replicas. Others that
 *            count, or take micro- or nanoseconds, are below; one that goes up to the limit leaves room,
 *            which grows faster than bindings are made.
 * Lifetime   open to close.
 * Crash      stamps are lost: until a session is bound anew, an older message of a replica may win.
 * Proved by  tests/t_bindings.c, tests/s_peer.t
 */
#ifndef KVP_PEER_BINDINGS_H
#define KVP_PEER_BINDINGS_H

#include "daemons/peer/reorder.h"
#include "ipc/replica_msg.h"
#include "shm/region.h"

#define KVP_BINDINGS_MAX 1000000u

struct kvp_bindings {
	struct kvp_region *region;
	struct kvp_ctr_column_shm *ctr;
	struct kvp_reorder stamp;
	uint64_t router_id, clock;
};

/* kvp_bindings_open: the region's affinity handle is attached to the caller. ctr NULL: uncounted. KVP_OK,
 * KVP_ERR_SYS. */
int kvp_bindings_open(struct kvp_bindings *b, struct kvp_region *region, struct kvp_ctr_column_shm *ctr,
	uint64_t router_id, uint64_t real_ns);
void kvp_bindings_close(struct kvp_bindings *b);

/* kvp_bindings_apply applies a message, received at now_ns (CLOCK_MONOTONIC). Counted by its outcome.
 * return  KVP_OK bound, or its time renewed; KVP_ERR_EXISTS own message; KVP_ERR_NOTFOUND partition or worker
 *         is not known here; KVP_ERR_CLOSED older than what is known; KVP_ERR_FULL no room;
 *         KVP_ERR_LIMIT too far ahead. */
int kvp_bindings_apply(struct kvp_bindings *b, enum kvp_part_role role, const struct kvp_replica_binding *m,
	uint64_t now_ns);

/* kvp_bindings_stamp gives a binding made on this node its stamp. KVP_OK; KVP_ERR_CLOSED: the session is
 * bound to something else by now. */
int kvp_bindings_stamp(struct kvp_bindings *b, uint32_t part, struct kvp_str session,
	struct kvp_affinity_target at, uint64_t now_ns, uint64_t *sequence);
#endif
