/* daemons/peer/dump_port.h — GET /dump for other replicas, on a port of its own.
 *
 * Shape      an HTTP server on the daemon's loop and the dumps under way (daemons/common/dump_serve.h).
 * Truth      the index, page by page.
 * Writers    the loop's thread.
 * Loads      with KVPICK_RECOVER_LOADS also GET /loads, which newcomers ask for.
 * Answers    200, application/json, the role in x-kvpick-dump-role; 400 bad max_bytes or role; 404, 405
 *            anything else than GET /dump; 413 longer than max_bytes; 500 the dump failed; 503 not recovered
 *            yet. Errors are plain text. A dump that fails in the middle ends the connection.
 * Limits     as in dump_serve.h; a client that reads nothing for KVP_DUMP_PORT_STALL_MS is cut.
 * Lifetime   open to close.
 * Crash      clients see their connections end.
 * Proved by  tests/s_recovery.t
 */
#ifndef KVP_PEER_DUMP_PORT_H
#define KVP_PEER_DUMP_PORT_H

#include "daemons/common/boot.h"
#include "ipc/loop.h"

#define KVP_DUMP_PORT_STALL_MS 60000
#define KVP_DUMP_PORT_CONNECTIONS 256

struct kvp_dump_port;

/* kvp_dump_port_open listens on DYN_EPP_SELECTION_HTTP_PORT: on every address of the family of POD_IP, or on
 * the address of --bind without it. *out NULL: no port is set. KVP_ERR_SYS: errno. */
int kvp_dump_port_open(struct kvp_boot *boot, struct kvp_loop *loop, struct kvp_dump_port **out);
void kvp_dump_port_close(struct kvp_dump_port *p); /* NULL is fine */
/* kvp_dump_port_poll goes on with what the indexer has answered: from the loop, whenever the process was
 * woken, and last before it sleeps. 1 if something was done. */
int kvp_dump_port_poll(struct kvp_dump_port *p); /* NULL is fine */
#endif
