/* shm/routed.h — bookings as content of a KV radix tree: their blocks are stored for the booked rank and end
 * by age or by number, because no engine tells when they are gone.
 *
 * Shape      process-local: one entry a (slot, block) in a hash table that grows by one bucket at a time, and
 *            in a list of its slot, least recently recorded first. A block's name in the tree is its sequence
 *            hash, made here from the local hashes, so that a path has one name whoever tells it.
 * Truth      the tree says what is held; the entries say since when. Together: a block has an entry if and
 *            only if its slot holds it.
 * Writers    the tree's writer thread.
 * Ordering   a block is recorded after those that follow it in the same path, so it never ends before them:
 *            what is held has no gaps.
 * Lifetime   from kvp_routed_open to _close, within that of the tree's writer. The tree must get nothing but
 *            by these calls, except that the caller clears a slot after kvp_routed_forget.
 * Crash      the entries go with the process, the tree stays; kvp_routed_recover makes new ones, as if
 *            everything had been recorded at that moment.
 * Proved by  tests/t_routed.c, tests/m_routed.c
 */
#ifndef KVP_SHM_ROUTED_H
#define KVP_SHM_ROUTED_H

#include "shm/radix.h"

#define KVP_ROUTED_BLK_MAX 65536u /* blocks of one booking */

enum kvp_routed_policy {
	KVP_ROUTED_TTL, /* blocks end ttl_ns after they were recorded last */
	KVP_ROUTED_LRU	/* blocks end when their slot would hold more than the booking's limit */
};

struct kvp_routed_cfg {
	enum kvp_routed_policy policy;
	uint64_t ttl_ns;
	uint64_t entry_max; /* blocks over all slots, 1..2^31; beyond, the oldest end early */
	uint32_t slot_max;  /* of the tree */
	uint64_t salt;	    /* secret, so that nobody chooses what collides in the table */
	struct kvp_ctr_column_shm *ctr; /* NULL = uncounted */
};

struct kvp_routed;

/* kvp_routed_open: KVP_ERR_INVAL, KVP_ERR_SYS. Memory is taken as it is used, 36 bytes an entry. */
int kvp_routed_open(struct kvp_radix_w *w, const struct kvp_routed_cfg *cfg, struct kvp_routed **out);
void kvp_routed_close(struct kvp_routed *t); /* NULL is allowed */

/* kvp_routed_record stores the n blocks of a path for a slot and makes them its newest.
 *
 * part_salt  key salt of the slot's partition, the same until the slot is forgotten.
 * n          at most KVP_ROUTED_BLK_MAX are taken.
 * limit_blk  LRU: what the slot may hold, 0 = no limit of its own. A longer path is cut.
 * now_ns     CLOCK_MONOTONIC, never going back.
 * return     blocks of the path that are held now, counted from its start: less than n when capacity is used
 *            up.
 * blocks     no; about 0.35 us a new block, 0.07 us a held one (bench/b_routed.c). */
uint32_t kvp_routed_record(struct kvp_routed *t, uint32_t slot, uint64_t part_salt, uint32_t n,
	const uint64_t *local, uint64_t limit_blk, uint64_t now_ns);

/* kvp_routed_forget ends all entries of a slot at once; the caller clears the slot in the tree. */
void kvp_routed_forget(struct kvp_routed *t, uint32_t slot);

/* kvp_routed_tend drops what is over its age, at most budget blocks, and frees forgotten entries. Returns how
 * many it looked at, 0 = nothing is due at now_ns. */
uint32_t kvp_routed_tend(struct kvp_routed *t, uint64_t now_ns, uint32_t budget);

/* kvp_routed_recover makes entries for all blocks of the tree, recorded at now_ns. owned[slot] != 0: do so
 * for this slot; the others are to be cleared by the caller. For a table without entries. Returns their
 * number. */
uint64_t kvp_routed_recover(struct kvp_routed *t, const uint8_t *owned, uint64_t now_ns);

/* kvp_routed_cnt counts the entries of a slot, or of all: KVP_RADIX_SLOT_ALL. */
uint64_t kvp_routed_cnt(const struct kvp_routed *t, uint32_t slot);
/* kvp_routed_check compares lists, table and tree: number of faults, the first ten go to stderr. */
uint64_t kvp_routed_check(const struct kvp_routed *t);
#endif
