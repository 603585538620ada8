/* daemons/common/recov_page.h — what a peer's dump told, as the process that fetches it hands it to the
 * indexer, and the commands around it.
 *
 * Shape      KVP_CMD_RECOV_BEGIN: arg[0] a new number, not 0. The indexer notes which event listeners are
 *            connected by now. Reply: struct kvp_recov_begun.
 *            KVP_CMD_RECOV_PUT: arg[0] that number; payload: struct kvp_recov_head, the key (padded to 8
 *            bytes), rec_cnt records; a record is struct kvp_recov_rec and its hashes: STORE n local and n
 *            external, REMOVE n external, CLEAR none. Reply: struct kvp_recov_done.
 *            KVP_CMD_RECOV_END: arg[0] the number of the attempt that succeeded, or 0; arg[1] enum
 *            kvp_recov_state to end with; arg[2] peers asked in all.
 * Status     KVP_OK; KVP_ERR_AGAIN (begin: not all have looked yet, ask again with the same number);
 *            KVP_ERR_FENCED (put, end: another attempt has begun, or the indexer has been replaced since:
 *            begin anew); KVP_ERR_CLOSED (the recovery has ended: nothing left to do); KVP_ERR_PROTO (a
 *            record that cannot be; what was before it is applied).
 * Ordering   commands of one sender are executed in the order of their posts, so several may be under way.
 *            After the end was answered the gate opens (shm/recov.h) when the listeners have caught up.
 * Writers    the peer daemon. Readers: daemons/indexer/recovery.c, which checks every length.
 * Crash      sender killed: what it put stays; the next one begins anew, everything is idempotent. Indexer
 *            killed: FENCED.
 * Proved by  tests/t_idx_recovery.c, tests/s_recovery.t
 */
#ifndef KVP_DAEMONS_RECOV_PAGE_H
#define KVP_DAEMONS_RECOV_PAGE_H

#include "shm/cmdring.h"
#include "shm/radix.h"

enum kvp_recov_op { KVP_RECOV_STORE, KVP_RECOV_REMOVE, KVP_RECOV_CLEAR };

struct kvp_recov_head {
	uint32_t role;	     /* enum kvp_part_role */
	uint32_t block_size; /* tokens, > 0 */
	uint32_t key_len;    /* bytes of "model:group" */
	uint32_t rec_cnt;
};
struct kvp_recov_rec {
	uint64_t worker_id;
	uint64_t parent; /* external hash; 0 without */
	uint32_t dp_rank;
	uint32_t n; /* hashes; 0 only with CLEAR */
	uint16_t op, tier, has_parent, pad;
	uint32_t pad2[2];
};
_Static_assert(sizeof(struct kvp_recov_rec) == 40, "whole words");

#define KVP_RECOV_KEY_MAX 2049u /* two names and a colon */
#define KVP_RECOV_KEY_BYTES(len) (((uint32_t)(len) + 7u) & ~7u)
#define KVP_RECOV_REC_BYTES(op, n)                                                                           \
	(sizeof(struct kvp_recov_rec) + 8ull * ((op) == KVP_RECOV_STORE ? 2ull * (n) : (uint64_t)(n)))

struct kvp_recov_begun {
	uint32_t listeners, connected;
};
struct kvp_recov_done {	  /* blocks */
	uint64_t stored;  /* new in the tree */
	uint64_t held;	  /* kept for workers that are not registered */
	uint64_t dropped; /* no room, or held by none */
	uint64_t parent;  /* stores under a parent that the rank does not hold: events */
	uint64_t skipped; /* of a partition that has another block size here */
};
#endif
