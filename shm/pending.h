/* shm/pending.h — selections that may still be booked by their id alone: one cache for all processes of the
 * node.
 *
 * Shape      Entries of 128 bytes, chunks of 1 KiB for their hash lists, hash buckets, one order list from
 *            the oldest to the newest; links and counts are words of a txn (shm/txn.h). Entries are found by
 *            a secret 128-bit hash of (partition, id).
 * Truth      the txn's words. A dropped entry is a cache miss and nothing worse.
 * Writers    bookers, by one change each for take, publish, drop; an entry between take and publish belongs
 *            to the process named in its state word.
 * Readers    bookers; find reads as of one instant, copies are validated by the entry's generation.
 * Ordering   that of the txn. An entry's generation is the number of the change that published it: it never
 *            comes back, so a consume cannot hit a newer selection of the same id.
 * Lifetime   an entry from its insert to consume, discard, replacement, eviction or the sweep of expired
 *            ones. All of it survives the death of any process and ends with the region.
 * Limits     after an insert never more than pending_max entries nor pending_bytes bytes by the estimate
 *            below. The order list holds exactly the live entries.
 * Crash      killed between take and publish: kvp_pending_sweep_owner gives entry and chunks back. Killed
 *            anywhere else: nothing to repair. A stopped process is in nobody's way.
 * Proved by  tests/t_pending.c, tests/t_pending_crash.c, tests/torture/x_pending.c
 */
#ifndef KVP_SHM_PENDING_H
#define KVP_SHM_PENDING_H

#include "shm/counter.h"
#include "shm/obj.h"
#include "shm/txn.h"

#define KVP_PENDING_HASH_MAX (1u << 20)	   /* sequence hashes of an entry; likewise block hashes */
#define KVP_PENDING_SESSION_MAX 256	   /* bytes */
#define KVP_PENDING_LORA_MAX 1024	   /* bytes */
#define KVP_PENDING_POOL_MAX (16ULL << 30) /* bytes of chunks, whatever pending_bytes says */
#define KVP_PENDING_SWEEP_MAX 64	   /* expired entries that one insert drops */

#define KVP_PENDING_TRACK_PREFILL 1u

struct kvp_pending_item {
	const char *id;
	const uint64_t *seq;   /* sequence hashes */
	const uint64_t *block; /* block hashes for an index that records routing; NULL with cnt 0 */
	const char *session;   /* NULL with len 0 */
	const char *lora;      /* NULL with len 0 */
	uint64_t worker_id, isl_tok, prefill_tok, lora_hash;
	uint32_t part, dp_rank;
	uint32_t id_len;    /* 1.. */
	uint32_t names_len; /* bytes of model, group and LoRA name: they count in the estimate */
	uint32_t seq_cnt, block_cnt, session_len, lora_len, expected_output_tok, flags;
};

/* A found entry: what was captured, without its lists. */
struct kvp_pending_hit {
	uint64_t gen;
	uint64_t worker_id, isl_tok, prefill_tok, lora_hash, inserted_ns;
	uint32_t idx, part, dp_rank, seq_cnt, block_cnt, session_len, lora_len, expected_output_tok, flags;
};

struct kvp_pending_stat {
	uint64_t entries, bytes; /* live; bytes by the estimate */
	uint64_t taken;		 /* entries between take and publish */
};

struct kvp_pending_shm;
struct kvp_pending { /* process-local */
	struct kvp_pending_shm *shm;
	struct kvp_txn txn;
	uint64_t *body, *data;
	uint64_t bytes_max, ttl_ns, salt[2];
	uint32_t max, entry_cap, bucket_cnt, chunk_cnt;
	kvp_owner owner;
	struct kvp_ctr_column_shm *ctr; /* NULL = uncounted */
};

uint64_t kvp_pending_align(void);
uint64_t kvp_pending_footprint(const struct kvp_geom *g);
int kvp_pending_new(void *mem, const struct kvp_geom *g);
int kvp_pending_join(void *mem, const struct kvp_geom *g, struct kvp_pending *out);
void kvp_pending_leave(struct kvp_pending *p);
int kvp_pending_delete(void *mem);
/* kvp_pending_check walks order list, buckets and chunks. A change under way counts as a fault. */
uint64_t kvp_pending_check(const struct kvp_pending *p);
/* kvp_pending_attach names the caller for inserts. */
void kvp_pending_attach(struct kvp_pending *p, kvp_owner owner, struct kvp_ctr_column_shm *ctr);

/* kvp_pending_estimate: 8 bytes a hash, plus id, model, group and LoRA name. */
uint64_t kvp_pending_estimate(const struct kvp_pending_item *it);

/* kvp_pending_insert makes it the newest entry of its (part, id), replacing an older one in the same instant,
 * and drops the oldest entries while a limit would be exceeded. An item over pending_bytes drops all and is
 * not kept; with pending_max 0 nothing happens.
 *
 * now_ns  CLOCK_MONOTONIC; an entry never counts as older than one inserted before it.
 * return  KVP_OK (kept, or not kept as said above); KVP_ERR_INVAL a count out of range; KVP_ERR_FULL no
 *         chunks even with nothing left to drop; KVP_ERR_AGAIN other inserts kept coming first, very many
 *         times.
 * blocks  no (lock-free). Drops at most KVP_PENDING_SWEEP_MAX expired entries, oldest first.
 */
int kvp_pending_insert(struct kvp_pending *p, const struct kvp_pending_item *it, uint64_t now_ns);

/* kvp_pending_peek finds the entry of (part, id) and does not consume or refresh it. KVP_OK;
 * KVP_ERR_NOTFOUND, also when now_ns is more than the time to live past its insert; KVP_ERR_AGAIN as above.
 * Lock-free. */
int kvp_pending_peek(struct kvp_pending *p, uint32_t part, const char *id, size_t id_len, uint64_t now_ns,
	struct kvp_pending_hit *hit);

/* kvp_pending_lists copies the lists of a hit: seq_cnt and block_cnt values, session_len bytes. NULL = not
 * wanted. KVP_ERR_NOTFOUND if the entry is gone by now; the buffers then hold anything. Lock-free. */
int kvp_pending_lists(const struct kvp_pending *p, const struct kvp_pending_hit *hit, uint64_t *seq,
	uint64_t *block, char *session);

/* kvp_pending_lora copies the adapter's name of a hit, lora_len bytes, likewise. */
int kvp_pending_lora(
	const struct kvp_pending *p, const struct kvp_pending_hit *hit, char lora[KVP_PENDING_LORA_MAX]);

/* kvp_pending_consume drops exactly the entry that was found: KVP_ERR_NOTFOUND if it is gone or was replaced.
 * kvp_pending_discard drops whatever (part, id) has now, expired or not. Both KVP_ERR_AGAIN as above. */
int kvp_pending_consume(struct kvp_pending *p, const struct kvp_pending_hit *hit);
int kvp_pending_discard(struct kvp_pending *p, uint32_t part, const char *id, size_t id_len);

/* kvp_pending_sweep_owner gives back what a dead process had taken; the number of entries. Sweep helper
 * only. */
uint32_t kvp_pending_sweep_owner(struct kvp_pending *p, kvp_owner dead);

void kvp_pending_stat(const struct kvp_pending *p, struct kvp_pending_stat *out);
#endif
