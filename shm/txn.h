/* shm/txn.h — change several words of an object at once, without a lock: the next one finishes what a killed
 * or stopped process began.
 *
 * Shape      A turn word {number of the last change 48 | record + 1 of the change under way 16}, KVP_TXN_REC
 *            records, and the words of the object: 16 bytes each, {value, number of the change that wrote
 *            it}.
 * Truth      turn word and words. A change is there as soon as the turn word names its record.
 * Writers    any process: it reads words as of one instant, notes new values in a record and puts the record
 *            into the turn word by CAS; then it, or anybody who finds it there, stores the values.
 * Readers    the same calls without a commit, or kvp_txn_look without helping (also on a read-only mapping).
 * Ordering   the CAS on the turn word is a full barrier: what was written before a commit (also ordinary
 *            memory) is seen by everybody who begins after it. A word's value and number change together
 *            (16-byte CAS), and only upwards, so a helper that comes late changes nothing.
 * Lifetime   as the object that embeds it; all zero is the valid first state.
 * Crash      before the CAS: nothing happened, a record stays taken until kvp_txn_sweep_owner. After it: the
 *            change is complete as soon as anybody begins another one. No repair is needed to go on.
 * Proved by  tests/t_pending.c, tests/t_pending_crash.c, tests/torture/x_pending.c
 */
#ifndef KVP_SHM_TXN_H
#define KVP_SHM_TXN_H

#include "shm/obj.h"

#define KVP_TXN_WORDS 40 /* words that one change may write */
#define KVP_TXN_REC 256	 /* changes prepared at one time over all processes */

struct kvp_txn_rec_shm {
	uint64_t owner; /* 0 = free, else 2^32 | owner; CAS */
	uint64_t cnt;
	uint64_t pad[6];
	uint64_t idx[KVP_TXN_WORDS], val[KVP_TXN_WORDS];
} __attribute__((aligned(64)));

struct kvp_txn_shm {
	uint64_t turn; /* CAS only */
	uint64_t pad[15];
	struct kvp_txn_rec_shm rec[KVP_TXN_REC];
};

struct kvp_txn { /* process-local */
	struct kvp_txn_shm *shm;
	struct kvp_u128 *word;
	uint64_t word_cnt;
};

/* One attempt at a change, or one look. Process-local; valid from begin to commit. */
struct kvp_txn_try {
	uint64_t seq; /* the instant that is read; after a commit the number of the change */
	uint32_t cnt;
	uint32_t torn; /* a word that changed since was met: give up and begin again */
	uint64_t idx[KVP_TXN_WORDS], val[KVP_TXN_WORDS];
};

/* kvp_txn_begin starts an attempt, after finishing a change that is under way. KVP_OK, or KVP_ERR_AGAIN when
 * the turn did not come to rest in a bounded number of steps. kvp_txn_look does not help: KVP_ERR_AGAIN while
 * a change is under way. Lock-free; any process. */
int kvp_txn_begin(const struct kvp_txn *t, struct kvp_txn_try *x);
int kvp_txn_look(const struct kvp_txn *t, struct kvp_txn_try *x);

/* kvp_txn_get reads a word as of the attempt's instant, or what the attempt has set. All values that one
 * attempt gets belong together. A word that has changed since, or an index out of range, sets torn and gives
 * 0. kvp_txn_set notes a value; more than KVP_TXN_WORDS words or an index out of range abort the process. */
uint64_t kvp_txn_get(const struct kvp_txn *t, struct kvp_txn_try *x, uint64_t idx);
void kvp_txn_set(const struct kvp_txn *t, struct kvp_txn_try *x, uint64_t idx, uint64_t val);

/* kvp_txn_commit makes the noted values the truth, all at once.
 * return  KVP_OK: done, x->seq is the number of this change; without noted values: what was read was true.
 *         KVP_ERR_AGAIN: torn, another change came first, or all records are taken: nothing happened.
 * who     any process or thread; owner names it for the sweep. Lock-free. */
int kvp_txn_commit(const struct kvp_txn *t, struct kvp_txn_try *x, kvp_owner owner);

/* kvp_txn_stamp is the number of the change that wrote a word last. */
uint64_t kvp_txn_stamp(const struct kvp_txn *t, uint64_t idx);

/* kvp_txn_own_set stores a word that no attempt can reach because the caller holds what it belongs to.
 * seq: the number of the change that gave it to the caller, or a later one that is complete. */
void kvp_txn_own_set(const struct kvp_txn *t, uint64_t idx, uint64_t val, uint64_t seq);

/* kvp_txn_sweep_owner finishes a change under way and gives back the records of a dead owner; their
 * number. */
uint32_t kvp_txn_sweep_owner(const struct kvp_txn *t, kvp_owner dead);

/* kvp_txn_check counts records taken and a change that nobody finished. No concurrent writer. */
uint64_t kvp_txn_check(const struct kvp_txn *t);
#endif
