/* daemons/peer/recovery.h — fetches the index from a peer at the node's start and hands it to the indexer.
 *
 * Shape      struct kvp_recovery on the daemon's loop. An attempt: begin (the indexer notes which listeners
 *            are connected; waited for at most KVP_RECOVERY_SETTLE_NS), one GET a role, its text read as it
 *            comes (ipc/dump_read.h), commands to the indexer (daemons/common/recov_page.h), at most
 *            KVP_PUT_CMDS under way; end.
 * Truth      whether there is anything to do: shm/recov.h. Which peer, and when: recovery_drive.h.
 * Writers    the loop's thread.
 * Limits     of an attempt: DYN_EPP_RECOVERY_HTTP_TIMEOUT_MS for each exchange, body included;
 *            DYN_EPP_RECOVERY_MAX_DUMP_BYTES, by Content-Length before reading and by count. When the indexer
 *            is behind by KVP_RECOVERY_AHEAD_BYTES, reading pauses. Any status but 2xx, a redirect included,
 *            a content encoding, another content type than JSON, another role: that peer failed.
 * Lifetime   open to close; idle for ever once the gate is open.
 * Crash      killed: the next process begins with the first peer; what the indexer has it keeps. The indexer
 *            killed: the attempt is made again with the same peer.
 * Proved by  tests/t_recovery_drive.c, tests/s_recovery.t
 */
#ifndef KVP_PEER_RECOVERY_H
#define KVP_PEER_RECOVERY_H

#include "daemons/common/boot.h"
#include "ipc/http_url.h"
#include "ipc/loop.h"

#define KVP_RECOVERY_SETTLE_NS 1000000000ull
#define KVP_RECOVERY_AHEAD_BYTES (1u << 20)

struct kvp_recovery;

/* What the daemon does about it, from the loop. done: there is nothing to recover (any more), the gate is
 * open and the peers may be listened to; it comes again if the index was lost and recovered once more.
 * fetched (may be NULL): the index came from this peer, host as kvp_http_call takes it; before done. */
struct kvp_recovery_hooks {
	void (*done)(void *ctx);
	void (*fetched)(void *ctx, const struct kvp_http_url *from, const char *host);
	void *ctx;
};

/* kvp_recovery_open: from config's indexer_peers, or else from the region's table of sources once discovery
 * has listed them completely. Nothing is asked if the gate is open. KVP_ERR_SYS. */
int kvp_recovery_open(struct kvp_boot *boot, struct kvp_loop *loop, const struct kvp_recovery_hooks *hooks,
	struct kvp_recovery **out);
void kvp_recovery_close(struct kvp_recovery *r); /* NULL is fine */

/* kvp_recovery_poll looks at the indexer's answers and at the table of sources: from the loop, whenever the
 * process was woken, and last before it sleeps. 1 if something was done. */
int kvp_recovery_poll(struct kvp_recovery *r);
#endif
