/* shm/affinity.h — which worker and rank a session sticks to: one table for all processes of the node.
 *
 * Shape      Entries of eight words of a txn (shm/txn.h), hash buckets, a count for each partition. Entries
 *            are found by a secret 128-bit hash of (partition, session id). An entry is initialising (its
 *            first booking is being made by the process in its state word) or bound: target, leases, time.
 * Truth      the txn's words.
 * Writers    bookers, one change a call; whoever ends a reservation (kvp_affinity_release); the reaper.
 * Readers    bookers.
 * Ordering   that of the txn.
 * Lifetime   a binding ends when it has no lease and its last one was returned more than the time to live
 *            ago: it is invisible at once and removed by the reaper. A lease ends with its reservation. One
 *            that was lost with its process counts no longer than affinity_hold_ns after the last booking.
 * Limits     KVP_AFFINITY_PART_MAX entries a partition and affinity_max altogether; then sessions go
 *            unpinned.
 * Crash      killed while initialising: kvp_affinity_sweep_owner removes the entry. Killed between a booking
 *            and its lease or between a free and its return: see Lifetime. A stopped process is in nobody's
 *            way, except for who waits for its initialisation, and they have a limit (KVP_AFFINITY_WAIT_NS).
 * Proved by  tests/t_affinity.c, tests/s_affinity.t
 */
#ifndef KVP_SHM_AFFINITY_H
#define KVP_SHM_AFFINITY_H

#include "shm/counter.h"
#include "shm/obj.h"
#include "shm/txn.h"

#define KVP_AFFINITY_PART_MAX 65536	      /* sessions of a partition */
#define KVP_AFFINITY_MAX (1u << 24)	      /* of a node */
#define KVP_AFFINITY_WAIT_NS (10000000000ULL) /* then a waiter goes on without the table */

struct kvp_affinity_shm;
struct kvp_affinity { /* process-local */
	struct kvp_affinity_shm *shm;
	struct kvp_txn txn;
	uint64_t ttl_ns, hold_ns, salt[2];
	uint32_t max, bucket_cnt, part_max; /* max 0 = affinity is off */
	kvp_owner owner;
	struct kvp_ctr_column_shm *ctr; /* NULL = uncounted */
};

struct kvp_affinity_key {
	uint64_t lo, hi;
	uint32_t part;
};
struct kvp_affinity_target {
	uint64_t worker_id;
	uint32_t dp_rank;
};

/* What a booking of a session has to do with the table. */
enum kvp_affinity_kind {
	KVP_AFFINITY_UNPINNED, /* nothing: no room */
	KVP_AFFINITY_INIT,     /* the caller initialises: commit or cancel */
	KVP_AFFINITY_BOUND     /* steer to target; commit */
};
struct kvp_affinity_hold {
	enum kvp_affinity_kind kind;
	struct kvp_affinity_target target;
	uint64_t tag; /* of the binding */
};

enum kvp_affinity_mode { KVP_AFFINITY_IS_HARD, KVP_AFFINITY_IS_SOFT };
enum kvp_affinity_force { KVP_AFFINITY_KEEP, KVP_AFFINITY_REPLACE };

uint64_t kvp_affinity_align(void);
uint64_t kvp_affinity_footprint(const struct kvp_geom *g);
int kvp_affinity_new(void *mem, const struct kvp_geom *g);
int kvp_affinity_join(void *mem, const struct kvp_geom *g, struct kvp_affinity *out);
void kvp_affinity_leave(struct kvp_affinity *a);
int kvp_affinity_delete(void *mem);
uint64_t kvp_affinity_check(const struct kvp_affinity *a);
void kvp_affinity_attach(struct kvp_affinity *a, kvp_owner owner, struct kvp_ctr_column_shm *ctr);

struct kvp_affinity_key kvp_affinity_key(
	const struct kvp_affinity *a, uint32_t part, const char *session, size_t len);

/* All calls below are lock-free and may answer KVP_ERR_AGAIN after very many lost races; none blocks. now_ns
 * is CLOCK_MONOTONIC. */

/* kvp_affinity_query looks without touching: KVP_OK and the target of a visible binding, or
 * KVP_ERR_NOTFOUND. */
int kvp_affinity_query(const struct kvp_affinity *a, struct kvp_affinity_key k, uint64_t now_ns,
	struct kvp_affinity_target *out);

/* kvp_affinity_hold begins a booking.
 * gone    NULL, or a target that is no longer schedulable: a binding to it is initialised anew.
 * return  KVP_OK and *hold; KVP_ERR_EXISTS: another booking of the session initialises it now. The caller may
 *         be woken when that ends: kvp_affinity_wait first, then hold once more. */
int kvp_affinity_hold(struct kvp_affinity *a, struct kvp_affinity_key k, uint64_t now_ns,
	const struct kvp_affinity_target *gone, struct kvp_affinity_hold *hold);

/* kvp_affinity_busy looks without touching: 1 while a booking of the session initialises it, so that hold
 * would answer KVP_ERR_EXISTS. */
int kvp_affinity_busy(const struct kvp_affinity *a, struct kvp_affinity_key k);

/* kvp_affinity_cancel gives an initialisation up (no booking was made). Other kinds: nothing. */
void kvp_affinity_cancel(
	struct kvp_affinity *a, struct kvp_affinity_key k, const struct kvp_affinity_hold *hold);

/* kvp_affinity_commit says where the session was booked and takes a lease.
 * force   KVP_AFFINITY_REPLACE: a binding to *other (from an earlier commit) is replaced, its target is gone.
 * return  KVP_OK and *tag for kvp_affinity_release (0 = no room, unpinned); KVP_ERR_EXISTS and *other: bound
 *         elsewhere in hard mode, nothing changed. An initialisation of somebody else is completed with
 *         at. */
int kvp_affinity_commit(struct kvp_affinity *a, struct kvp_affinity_key k, struct kvp_affinity_target at,
	enum kvp_affinity_mode mode, enum kvp_affinity_force force, uint64_t now_ns, uint64_t *tag,
	struct kvp_affinity_target *other);

/* kvp_affinity_drop ends a binding to exactly this target. */
void kvp_affinity_drop(struct kvp_affinity *a, struct kvp_affinity_key k, struct kvp_affinity_target at);

/* kvp_affinity_release returns a lease; a binding that was replaced or removed meanwhile is left alone. */
void kvp_affinity_release(struct kvp_affinity *a, uint64_t tag, uint64_t now_ns);

/* kvp_affinity_reap looks at the next max entries, over all callers, and removes what is past its time. */
uint32_t kvp_affinity_reap(struct kvp_affinity *a, uint64_t now_ns, uint32_t max);
/* kvp_affinity_used is the number of entries that a reaper has to look at. */
uint32_t kvp_affinity_used(const struct kvp_affinity *a);

/* kvp_affinity_wait notes that a slot's process waits for an initialisation: 1, or 0 if that stands there
 * still: whatever ended before the earlier call, or after it, has not been followed by a kvp_affinity_waiting
 * yet. kvp_affinity_waiting takes the next noted slot: 1 and *slot, or 0. Call it after commit, cancel, drop
 * and the sweep, and wake who comes. */
int kvp_affinity_wait(struct kvp_affinity *a, uint32_t slot);
int kvp_affinity_waiting(struct kvp_affinity *a, uint32_t *slot);

/* kvp_affinity_sweep_owner removes what a dead process was initialising; their number. Sweep helper only. */
uint32_t kvp_affinity_sweep_owner(struct kvp_affinity *a, kvp_owner dead);

/* kvp_affinity_cnt is the number of entries of a partition. */
uint64_t kvp_affinity_cnt(const struct kvp_affinity *a, uint32_t part);
#endif
