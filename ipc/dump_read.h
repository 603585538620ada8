/* ipc/dump_read.h — reads the text of a peer's `GET /dump` as it comes, event by event.
 *
 * Shape      a pull-free parser: bytes in pieces of any size, callbacks out. It holds one event, a token of
 *            at most KVP_DREAD_TOKEN_MAX bytes, and, where a partition names its block size behind its
 *            events, those events up to KVP_DREAD_WAIT_BYTES.
 * Truth      the struct; the JSON grammar is the library's (yajl), numbers are read from their text: exact.
 * Writers    one thread.
 * Ordering   on_part once a partition, as soon as its block size is known; on_event in the order of the text,
 *            behind on_part.
 * Dialects   members in any order, unknown ones ignored; without storage_tier (device), dp_rank (0),
 *            residency_domain (worker). Events of another residency domain or with a state_source are left
 *            out. {"error": ...} for a partition, a key without a colon, an explicit null domain, negative,
 *            broken or too large numbers, unknown tiers and kinds of events: KVP_ERR_PROTO.
 * Lifetime   new to free.
 * Crash      process-local.
 * Proved by  tests/t_dump_read.c, tests/fuzz/f_dump_read.c
 */
#ifndef KVP_IPC_DUMP_READ_H
#define KVP_IPC_DUMP_READ_H

#include <stddef.h>
#include <stdint.h>

#define KVP_DREAD_KEY_MAX 2049u		   /* bytes of a partition's key */
#define KVP_DREAD_BLK_MAX (4u << 20)	   /* blocks of one event */
#define KVP_DREAD_TOKEN_MAX (1u << 20)	   /* bytes of text without any progress */
#define KVP_DREAD_WAIT_BYTES (64ull << 20) /* events that wait for a block size */
#define KVP_DREAD_DEPTH_MAX 64u		   /* nesting of values that are ignored */

enum kvp_dread_op { KVP_DREAD_STORE, KVP_DREAD_REMOVE, KVP_DREAD_CLEAR };
enum kvp_dread_tier {
	KVP_DREAD_DEVICE,
	KVP_DREAD_HOST,
	KVP_DREAD_DISK,
	KVP_DREAD_EXTERNAL,
	KVP_DREAD_TIER_CNT
};

struct kvp_dread_event {
	uint64_t worker_id, event_id;
	uint64_t parent;     /* external hash; STORE with has_parent */
	uint32_t dp_rank, n; /* n hashes; 0 with CLEAR */
	uint16_t op, tier, has_parent, pad;
	const uint64_t *ext, *local; /* local: STORE only; valid during the call */
};

struct kvp_dread_cfg {
	/* KVP_OK to go on; anything else ends the parse and is the result of the feed. */
	int (*on_part)(void *ctx, const char *key, uint32_t key_len, uint32_t block_size);
	int (*on_event)(void *ctx, const struct kvp_dread_event *e);
	void *ctx;
};
struct kvp_dread_stat {
	uint64_t bytes, parts, events, blocks, ignored; /* ignored: events left out */
};

struct kvp_dread;

/* kvp_dread_new: NULL without memory. kvp_dread_free: NULL is fine; not from a callback. */
struct kvp_dread *kvp_dread_new(const struct kvp_dread_cfg *cfg);
void kvp_dread_free(struct kvp_dread *d);

/* kvp_dread_feed reads len bytes. kvp_dread_end: the text is over. KVP_OK; KVP_ERR_PROTO (not a dump, or an
 * end in the middle), KVP_ERR_LIMIT (a token, an event or a wait over its limit), KVP_ERR_SYS (memory), or
 * what a callback answered. After a failure the same again. kvp_dread_error: one line about it. */
int kvp_dread_feed(struct kvp_dread *d, const char *data, size_t len);
int kvp_dread_end(struct kvp_dread *d);
const char *kvp_dread_error(const struct kvp_dread *d);
const struct kvp_dread_stat *kvp_dread_stat(const struct kvp_dread *d);
#endif
