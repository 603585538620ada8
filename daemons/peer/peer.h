/* daemons/peer/peer.h — the process that shares this node's load with other replicas: what its files share.
 *
 * Shape      one event loop, one thread; struct kvp_peer lives in main. A mesh a role: a port, a set of
 *            peers.
 * Truth      the region: bookings (also mirrored ones), the table of peers, the ring of lifecycle records.
 *            Private and lost with the process: early frees and marks (reorder.h), the id of this replica.
 * Writers    mirrored bookings, through shm/resv.h, as bookings of the node.
 * Crash      the supervisor starts it again, under a new id; nothing is told twice but what was under way,
 *            which receivers ignore. What peers told meanwhile is lost: such bookings are unknown here, or
 *            end by age.
 * Proved by  tests/s_peer.t
 */
#ifndef KVP_PEER_H
#define KVP_PEER_H

#include "daemons/common/boot.h"
#include "daemons/common/config.h"
#include "daemons/common/log.h"
#include "daemons/peer/dump_port.h"
#include "daemons/peer/recovery.h"
#include "daemons/peer/warm_fetch.h"
#include <kvpick/clock.h>
#include "daemons/peer/bindings.h"
#include "daemons/peer/mirror.h"
#include "daemons/peer/sync.h"
#include "ipc/loop.h"
#include "ipc/zmq_mesh.h"
#include "shm/region.h"

#define KVP_PEER_BATCH 256	   /* events of a turn */
#define KVP_PEER_TURN_NS 1000000ull /* time of a turn for them */
#define KVP_PEER_AGAIN_MS 10	   /* until a record that is being written is looked at again */
#define KVP_PEER_FLUSH_MS 200	   /* at the end: for what was booked and freed last */

struct kvp_peer;

/* The replicas that share one role's load. */
struct kvp_peer_mesh {
	struct kvp_peer *peer;
	enum kvp_part_role role;
	struct kvp_zmq_mesh *zmq;
	struct kvp_peers *peers; /* the table it follows */
	uint16_t peer_port;	 /* the role's port at every replica; 0 = as the table says */
	uint64_t seen;		 /* its version that was followed last */
	struct kvp_zmq_mesh_stat counted;
};

struct kvp_peer {
	struct kvp_boot boot;
	struct kvp_loop *loop;
	void *zmq;
	struct kvp_peer_mesh mesh[KVP_PART_ROLE_CNT];
	uint32_t mesh_cnt;
	uint64_t router_id; /* of this process; never 0 */
	int is_open;	    /* 0: peers are not listened to yet */
	struct kvp_mirror mirror;
	struct kvp_bindings bindings;
	struct kvp_sync sync;
	struct kvp_replica_dec dec;
	uint64_t now_ns, until_ns; /* of this turn: when it began, when it shall end */
	uint32_t left;		   /* events that this turn may still apply */
	struct kvp_dump_port *dump_port; /* NULL: none is set */
	struct kvp_recovery *recovery;
	struct kvp_warm_fetch *warm; /* NULL: loads are not asked for */
	struct kvp_watch wake, signals;
	struct kvp_timer beat, end, again; /* again: a record that is being written */
	uint64_t lost_seen;		   /* events lost for a full ring, as told last */
	struct kvp_log_limit lost_log;
	int signal_fd;
	int draining;
};

/* members.c. kvp_peer_members connects to what the tables list and disconnects from what they don't, if they
 * have changed; costs one load a mesh otherwise. kvp_peer_mesh_of: the mesh of a role, NULL = there is
 * none. */
void kvp_peer_members(struct kvp_peer *p);
struct kvp_peer_mesh *kvp_peer_mesh_of(struct kvp_peer *p, enum kvp_part_role role);

/* kvp_peer_listen begins to listen to the peers: once what must come first is done. */
void kvp_peer_listen(struct kvp_peer *p);
#endif
