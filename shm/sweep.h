/* shm/sweep.h — what ends bookings besides their callers: death of an owner, age; and the full check.
 *
 * Shape      functions over struct kvp_book; no state of their own.
 * Truth      state words of the reservations (shm/resv.h).
 * Writers    the sweep helper (one at a time on a node), the indexer's timers of expiry and leases.
 * Readers    tests and kvpickctl (check).
 * Ordering   the caller knows that the owner is dead (its lock byte is free): all it wrote is visible. Live
 *            processes go on booking meanwhile.
 * Lifetime   a dead owner's slot is assigned again only after kvp_book_sweep_owner returned KVP_OK.
 * Crash      a killed sweep is repeated with the same arguments; it goes on where the first one stopped. A
 *            rank whose recount was interrupted stays closed to bookings (KVP_ERR_AGAIN) until then.
 *            A sweep killed in the instant that its rank is closed may leave blocks of one reservation in the
 *            table: they take room and count nowhere.
 * Proved by  tests/t_book_crash.c, tests/torture/x_book.c.
 */
#ifndef KVP_SHM_SWEEP_H
#define KVP_SHM_SWEEP_H

#include "shm/resv.h"

struct kvp_sweep_result {
	uint32_t claim_cnt;   /* claims given up */
	uint32_t finish_cnt;  /* interrupted operations brought to their end */
	uint32_t undo_cnt;    /* interrupted bookings undone */
	uint32_t free_cnt;    /* settled bookings freed */
	uint32_t kept_cnt;    /* settled bookings of the dead owner that belong to the node */
	uint32_t rank_cnt;    /* ranks recounted */
	uint32_t chunk_cnt;   /* chunks found without a reservation */
};

/* kvp_book_sweep_owner gives back everything a dead process held: finishes or undoes its interrupted
 * operations, gives up its claims, frees its settled bookings unless they are KVP_RESV_NODE_OWNED.
 *
 * dead    the dead owner; 0: only what processes without a slot left behind.
 * visit   NULL, or called with (ctx, h) before a settled booking is freed (its Free must reach the replicas).
 * result  filled in any case.
 * return  KVP_OK; KVP_ERR_AGAIN if something was left (repeat).
 * blocks  no; a few scans of the reservation table (milliseconds). who the sweep helper only.
 */
int kvp_book_sweep_owner(struct kvp_book *b, kvp_owner dead, void (*visit)(void *ctx, uint64_t h), void *ctx,
	struct kvp_sweep_result *result);

/* kvp_resv_expire frees every booking without KVP_RESV_LEASED that is older than limit_ns (strictly) at
 * now_ns. Returns their number. Indexer only; one scan of the table. */
uint32_t kvp_resv_expire(struct kvp_book *b, uint64_t now_ns, uint64_t limit_ns);

/* kvp_resv_lapse frees every booking with KVP_RESV_LEASED that nobody has renewed for more than limit_ns at
 * now_ns: its owner lives but follows it no more (stopped, or its request was lost). Returns their number.
 * Indexer only; one scan of the table. */
uint32_t kvp_resv_lapse(struct kvp_book *b, uint64_t now_ns, uint64_t limit_ns);

/* kvp_book_check recomputes loads, active blocks and chunk ownership from the reservations and compares.
 *
 * return  number of faults, the first ten to stderr. Operations under way count as faults: no concurrent
 *         writer.
 * memory  allocates about 64 bytes a live block; reads what was ever used of the active table, all of the
 *         rest. who tests, kvpickctl check.
 */
uint64_t kvp_book_check(struct kvp_book *b);

#endif
