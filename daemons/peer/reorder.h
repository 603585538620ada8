/* daemons/peer/reorder.h — what replicas said out of order: a set of keys, each with the time when it was put
 * there last.
 *
 * Shape      entries in order of their times, found through a hash. Grows by doubling up to its limit; then
 *            the oldest entry makes room for a new one. One set holds frees that came before their request
 *            (tombstones), another one marks of a finished prefill that did. A third one holds who bound a
 *            session last (bindings.h): with a value for each key.
 * Truth      the entries. Times never fall from call to call.
 * Who        kvpick-peer, one thread.
 * Ordering   none: private memory of the process.
 * Lifetime   init to close. Lost with the process: then what came early counts as never said.
 * Crash      nothing survives.
 * Proved by  tests/t_reorder.c
 */
#ifndef KVP_PEER_REORDER_H
#define KVP_PEER_REORDER_H

#include <stdint.h>

#define KVP_REORDER_TTL_NS 300000000000ull
#define KVP_REORDER_MAX 1000000u /* entries of a set */

/* A hash of partition, publisher and request; secret, so that nobody chooses what meets. */
struct kvp_reorder_key {
	uint64_t lo, hi;
};

struct kvp_reorder_val {
	uint64_t a, b;
};
enum kvp_reorder_kind { KVP_REORDER_KEYS, KVP_REORDER_VALUES };

struct kvp_reorder_node;
struct kvp_reorder {
	enum kvp_reorder_kind kind;
	struct kvp_reorder_node *node; /* 1..cap; 0 = the list's ends */
	struct kvp_reorder_val *val;   /* of each; NULL in a set of keys */
	uint32_t *bucket;	       /* bucket_mask + 1; 0 = empty */
	uint32_t bucket_mask, cap, max, cnt, free;
	uint64_t evicted; /* since init */
};

/* kvp_reorder_init: an empty set of at most max entries (1..2^30). KVP_OK, KVP_ERR_SYS without memory.
 * kvp_reorder_close frees its memory. */
int kvp_reorder_init(struct kvp_reorder *s, uint32_t max, enum kvp_reorder_kind kind);
void kvp_reorder_close(struct kvp_reorder *s);

/* kvp_reorder_put adds a key, or gives a present one the new time. KVP_OK; KVP_ERR_SYS: there was no memory
 * to grow, and the oldest entry made room. */
int kvp_reorder_put(struct kvp_reorder *s, struct kvp_reorder_key k, uint64_t now_ns);
int kvp_reorder_has(const struct kvp_reorder *s, struct kvp_reorder_key k); /* 1 or 0 */
/* kvp_reorder_val: where a present key's value is, valid until the next put; NULL if it is not there. A new
 * key's value is zero. */
struct kvp_reorder_val *kvp_reorder_val(const struct kvp_reorder *s, struct kvp_reorder_key k);
int kvp_reorder_take(struct kvp_reorder *s, struct kvp_reorder_key k); /* removes: 1 it was there, 0 */

/* kvp_reorder_expire removes what is older than age_ns (strictly) at now_ns; returns the number. Costs one
 * comparison if nothing is. */
uint32_t kvp_reorder_expire(struct kvp_reorder *s, uint64_t now_ns, uint64_t age_ns);
#endif
