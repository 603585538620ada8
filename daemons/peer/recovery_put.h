/* daemons/peer/recovery_put.h — commands of a recovery to the indexer, several under way.
 *
 * Shape      a queue of filled payloads, of which at most KVP_RECOVERY_CMDS are posted.
 * Truth      this memory; posted ones: shm/cmdring.h.
 * Writers    the loop's thread.
 * Ordering   posted in the order in which they were filled; the indexer executes them so.
 * Limits     waiting_bytes is what waits to be posted; the caller stops filling.
 * Lifetime   the owner's. kvp_put_reset gives everything up.
 * Crash      cells of a dead process are freed by the sweep.
 * Proved by  tests/s_recovery.t
 */
#ifndef KVP_PEER_RECOVERY_PUT_H
#define KVP_PEER_RECOVERY_PUT_H

#include "daemons/common/recov_page.h"
#include "ipc/dump_read.h"
#include "shm/counter.h"

#define KVP_PUT_CMDS 4u
#define KVP_PUT_BLK_MAX 4096u /* of one record; longer events are cut */

struct kvp_put_page;
struct kvp_put {
	struct kvp_cmdring *ring;
	kvp_owner owner;
	uint64_t number;			 /* of the attempt */
	struct kvp_cmd_cell *cell[KVP_PUT_CMDS]; /* posted, oldest first */
	uint32_t posted;
	struct kvp_put_page *first, *newest; /* filled, oldest first; the newest one may still grow */
	uint64_t waiting_bytes;
	char key[KVP_RECOV_KEY_MAX + 1];
	uint32_t key_len, block_size, role, is_new_part;
	struct kvp_recov_done done; /* sum of the answers */
};

void kvp_put_init(struct kvp_put *p, struct kvp_cmdring *ring, kvp_owner owner);
/* kvp_put_reset withdraws what is under way and starts with another number. */
void kvp_put_reset(struct kvp_put *p, uint64_t number);

/* kvp_put_part: events from now on are of this partition. kvp_put_event takes one over: KVP_ERR_SYS. */
void kvp_put_part(struct kvp_put *p, uint32_t role, const char *key, uint32_t key_len, uint32_t block_size);
int kvp_put_event(struct kvp_put *p, const struct kvp_dread_event *e);

/* kvp_put_poll posts and takes answers: KVP_OK, or what the indexer answered an order with. *any: something
 * was done. kvp_put_is_idle: 1 when all is answered. */
int kvp_put_poll(struct kvp_put *p, int *any);
int kvp_put_is_idle(const struct kvp_put *p);
#endif
