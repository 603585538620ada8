/* ipc/zmq_monitor.h — what has become of the one connection of a ZMQ socket that connects.
 *
 * Shape      a struct embedded in the user's own, next to the socket; a PAIR socket to the library's monitor.
 * Truth      the library's events, as far as they were read.
 * Writers    the thread of the socket.
 * Who        zmq_sub.c and zmq_mesh.c.
 * Given up   a connection that ends is tried again, and the library says so at once. It is not after a frame
 *            over ZMQ_MAXMSGSIZE, or other bytes that are no ZMQ: such a session has ended for good, and the
 *            socket hears nothing any more until it is made anew.
 * Lifetime   open behind zmq_socket and before zmq_connect, close before zmq_close. At most one connection a
 *            socket: events of several could not be told apart, since names become addresses on the way.
 * Crash      process-local.
 * Proved by  tests/t_zmq_sub.c, tests/t_zmq_mesh.c
 */
#ifndef KVP_IPC_ZMQ_MONITOR_H
#define KVP_IPC_ZMQ_MONITOR_H

#include <stdint.h>

#define KVP_ZMQ_GIVEN_UP_MS 1000 /* an ended connection that is not tried again for so long is given up */

struct kvp_zmq_monitor {
	void *of, *sock;     /* sock NULL: there is none to be had, nothing is known */
	uint64_t handshakes; /* since the struct was zeroed */
	uint64_t lost_ns;    /* the connection ended then, and the library has not begun another; 0 = no */
	int is_connected;    /* a handshake has succeeded, and the connection was not lost */
};

/* kvp_zmq_monitor_open begins to watch of. kvp_zmq_monitor_close: also of one that is not open. */
void kvp_zmq_monitor_open(struct kvp_zmq_monitor *m, void *zmq, void *of);
void kvp_zmq_monitor_close(struct kvp_zmq_monitor *m);
/* kvp_zmq_monitor_read takes what has been told; never blocks. */
void kvp_zmq_monitor_read(struct kvp_zmq_monitor *m);
/* kvp_zmq_monitor_gave_up: 1 = the library has given the connection up (as of the last read). */
int kvp_zmq_monitor_gave_up(const struct kvp_zmq_monitor *m);
#endif
