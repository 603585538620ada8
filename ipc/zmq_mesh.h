/* ipc/zmq_mesh.h — one replica's place in a full mesh: a bound PUB socket, and for every peer a SUB socket
 * connected to the peer's PUB.
 *
 * Shape      the ZMQ sockets and the list of peers. Nothing is relayed, acknowledged or kept.
 * Truth      the sockets. A message is two frames (ipc/replica_msg.h).
 * Writers    the thread that opened it.
 * Who        kvpick-peer, one mesh a role.
 * Ordering   messages of one publisher come in its order; between publishers there is none, but each has its
 *            turn.
 * Given up   a frame that is much too long costs its sender the connection, which the library then gives up
 *            (zmq_monitor.h): kvp_zmq_mesh_tend makes that peer's socket anew. Others lose nothing by it.
 * Lifetime   open to close. What nobody has received at the end is lost, and so is what a peer publishes
 *            before its subscription has come to it.
 * Crash      the kernel closes everything; peers connect again by themselves.
 * Proved by  tests/t_zmq_mesh.c
 */
#ifndef KVP_IPC_ZMQ_MESH_H
#define KVP_IPC_ZMQ_MESH_H

#include "ipc/loop.h"
#include "ipc/replica_msg.h"

#define KVP_ZMQ_MESH_SOCKETS 3 /* of a peer: what hears it, and two ends of its monitor */

struct kvp_zmq_mesh;

struct kvp_zmq_mesh_cfg {
	void *zmq;	    /* ZMQ context */
	const char *ip;	    /* to bind to; NULL, "", "*", "0.0.0.0", "::" = all, IPv4 and IPv6 */
	uint16_t port;	    /* 0 = any, for tests */
	uint32_t topics;    /* to subscribe to: 1u << enum kvp_replica_topic, or-ed */
	uint32_t payload_max; /* bytes; much more than that costs a peer its connection */
	void *ctx;
	/* One message of a peer; payload is valid during the call. Nonzero: kvp_zmq_mesh_work returns. No
	 * call into the mesh but kvp_zmq_mesh_send from here. */
	int (*on_message)(void *ctx, enum kvp_replica_topic t, const void *payload, size_t len);
};

struct kvp_zmq_mesh_stat {
	uint64_t received;   /* messages handed over */
	uint64_t bad_frames; /* other numbers of frames, other topics */
	uint64_t sent;	     /* messages given to the library */
	uint64_t unsent;     /* refused by it */
	uint64_t given_up;   /* connections that the library gave up, and were made anew */
};

/* kvp_zmq_mesh_open binds the PUB socket. KVP_OK; KVP_ERR_SYS, errno says why (EADDRINUSE: the port is
 * taken). kvp_zmq_mesh_close: NULL allowed; the port is free when the context is gone, or soon. */
int kvp_zmq_mesh_open(const struct kvp_zmq_mesh_cfg *cfg, struct kvp_zmq_mesh **out);
void kvp_zmq_mesh_close(struct kvp_zmq_mesh *m);
uint16_t kvp_zmq_mesh_port(const struct kvp_zmq_mesh *m);

/* kvp_zmq_mesh_watch wakes a loop whenever the sockets have something to do: the loop's owner then calls
 * kvp_zmq_mesh_work, in every turn, before it sleeps. KVP_OK, KVP_ERR_SYS. */
int kvp_zmq_mesh_watch(struct kvp_zmq_mesh *m, struct kvp_loop *l);

/* kvp_zmq_mesh_connect: KVP_OK; KVP_ERR_EXISTS it is connected; KVP_ERR_INVAL refused by the library (a
 * wildcard host, a scheme it does not know); KVP_ERR_SYS. A peer that cannot be reached is no error: it is
 * tried again for ever. kvp_zmq_mesh_disconnect: KVP_OK, nothing that this peer has sent is handed over any
 * more; KVP_ERR_NOTFOUND. */
int kvp_zmq_mesh_connect(struct kvp_zmq_mesh *m, const char *endpoint);
int kvp_zmq_mesh_disconnect(struct kvp_zmq_mesh *m, const char *endpoint);
uint32_t kvp_zmq_mesh_cnt(const struct kvp_zmq_mesh *m);
const char *kvp_zmq_mesh_endpoint(const struct kvp_zmq_mesh *m, uint32_t i); /* i < cnt; order may change */

/* kvp_zmq_mesh_tend makes anew what the library has given up; to be called about once a second. Not from
 * on_message. */
void kvp_zmq_mesh_tend(struct kvp_zmq_mesh *m);

/* kvp_zmq_mesh_send publishes; never blocks. KVP_OK also if nobody listens or a peer's queue is full (the
 * library drops it there); KVP_ERR_SYS. */
int kvp_zmq_mesh_send(struct kvp_zmq_mesh *m, enum kvp_replica_topic t, const void *payload, size_t len);

/* kvp_zmq_mesh_work hands over up to max messages without blocking; 1 = there may be more, 0 = nothing is
 * left: the descriptors tell when there is. */
int kvp_zmq_mesh_work(struct kvp_zmq_mesh *m, uint32_t max);

const struct kvp_zmq_mesh_stat *kvp_zmq_mesh_stat(const struct kvp_zmq_mesh *m);
#endif
