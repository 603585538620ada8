/* daemons/indexer/recovery.h — the indexer's side of a recovery from a peer: records into the tree, the gate.
 *
 * Shape      struct kvp_idx_recovery beside the registry: the attempt under way, and what is held for workers
 *            to come (held.h).
 * Truth      the gate: shm/recov.h. The attempt: this memory.
 * Writers    the apply thread.
 * Ordering   while the gate is shut, listeners connect and keep what engines send in their sockets
 *            (listener.h). Recovered records go into the tree as they come. The end has the listeners go on;
 *            when what they kept is in the tree, or after KVP_IDX_CATCH_UP_NS, the gate opens. So a removal
 *            that came meanwhile is applied after the store that it removes.
 * Unknown    records of ranks that are not registered are held and applied when the worker registers, before
 *            its listener is started; up to the room of the tree, and KVP_HELD_NS long after the end.
 * Lifetime   the process.
 * Crash      killed: the successor finds the gate shut and knows no attempt; the sender is answered
 *            KVP_ERR_FENCED and begins anew. What was applied is in the tree; what was held is gone.
 *            The sender killed and not replaced: kvp_idx_recovery_tend ends a recovery that nobody has gone
 *            on with for patience_ns (0 = waits for ever), as exhausted.
 * Proved by  tests/t_idx_recovery.c, tests/s_recovery.t
 */
#ifndef KVP_INDEXER_RECOVERY_H
#define KVP_INDEXER_RECOVERY_H

#include "daemons/common/recov_page.h"
#include "daemons/indexer/held.h"
#include "shm/recov.h"

#define KVP_IDX_CATCH_UP_NS (5ull * 1000000000ull)

struct kvp_idx;
struct kvp_idx_recovery {
	struct kvp_recov *gate; /* NULL: this node never recovers */
	struct kvp_held *held;
	uint64_t attempt;	 /* number, 0 = none yet */
	uint64_t heard_ns;	 /* last command */
	uint64_t patience_ns;	 /* without one; 0 = for ever */
	enum kvp_recov_state to; /* the end asked for; NONE = not yet */
	uint64_t to_ns;		 /* when it was */
	uint64_t peers;		 /* asked, as told */
	uint64_t drop_ns;	 /* when held blocks are dropped; 0 = not yet known */
	uint32_t warned;	 /* log lines about partitions of another block size */
};

/* kvp_idx_recovery_open: gate NULL or not shut: there is nothing to recover. block_max: of the tree.
 * KVP_ERR_SYS. Before the first command; idx->listeners was opened with the gate shut. */
int kvp_idx_recovery_open(struct kvp_idx *idx, struct kvp_recov *gate, uint64_t block_max,
	uint64_t patience_ns, uint64_t now_ns);
void kvp_idx_recovery_close(struct kvp_idx *idx);

/* Each executes a command: its status; *len bytes of reply are in buf. */
int kvp_idx_recovery_begin(
	struct kvp_idx *idx, const struct kvp_cmd_cell *c, void *buf, uint32_t *len, uint64_t now_ns);
int kvp_idx_recovery_put(
	struct kvp_idx *idx, const struct kvp_cmd_cell *c, void *buf, uint32_t *len, uint64_t now_ns);
int kvp_idx_recovery_end(struct kvp_idx *idx, const struct kvp_cmd_cell *c, uint64_t now_ns);

/* kvp_idx_recovery_give applies what is held for a rank that has an index slot by now. Its listener must not
 * have been started. */
void kvp_idx_recovery_give(struct kvp_idx *idx, uint32_t rank_slot);

/* kvp_idx_recovery_tend opens the gate when it is time (are_rings_empty: all operations of decoder threads
 * have been applied) and drops what nobody came for. 1 if something changed. */
int kvp_idx_recovery_tend(struct kvp_idx *idx, uint64_t now_ns, int are_rings_empty);
#endif
