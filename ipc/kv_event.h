/* ipc/kv_event.h — KV-cache events of engines: one msgpack batch -> events -> operations on the index.
 *
 * Shape      struct kvp_kv_dec: arena of one decoder thread, reused for each batch. struct kvp_kv_norm:
 *            what one listener (one rank endpoint) has learned: cache groups, and LoRA and salt of the
 *            blocks of each rank.
 * Truth      the engine's stream; the norm state follows the operations that were let through.
 * Writers    the decoder thread that owns the listener; nothing here is shared.
 * Who        indexer's decoder threads; tests.
 * Ordering   none: process-local memory. Events must be normalised in the order of the stream.
 * Lifetime   a decoded batch points into the payload and the arena: valid until the next decode, or until the
 *            payload goes. An operation points into the batch.
 * Crash      all state is lost with the process, unless somebody keeps its notes (kvp_kv_norm_notes).
 * Proved by  tests/v_kv_events.c (70 payloads), tests/t_kv_event.c, tests/fuzz/f_kvevent.c.
 *
 * Every published shape of a batch and an event is accepted (arrays, maps, old and new tails, SGLang's
 * metadata map, typed extra keys, bytes as hashes, token pairs). A batch that cannot be framed is refused
 * as a whole; an error inside one event costs that event only. Every event that has no effect has a reason:
 * the caller counts.
 */
#ifndef KVP_IPC_KV_EVENT_H
#define KVP_IPC_KV_EVENT_H

#include <kvpick/err.h>
#include <kvpick/hash.h>
#include <stddef.h>
#include <stdint.h>

#define KVP_KV_PAYLOAD_MAX_BYTES (64u << 20)  /* default */
#define KVP_KV_ARENA_MAX_BYTES (512ull << 20) /* decoded form of one batch */
#define KVP_KV_ARENA_KEEP_BYTES (4u << 20)    /* kept between batches */
#define KVP_KV_DEPTH_MAX 32                   /* containers inside each other, batch included */
#define KVP_KV_EVENT_MAX (1u << 20)           /* events of one batch */
#define KVP_KV_RANK_MAX 256                   /* ranks that one listener keeps state for */
#define KVP_KV_GROUP_MAX 64                   /* learned cache groups of a rank */
#define KVP_KV_MEMORY_MAX (1u << 22)          /* blocks with LoRA or salt remembered by one listener */

enum kvp_kv_kind {
	KVP_KV_STORED,
	KVP_KV_REMOVED,
	KVP_KV_CLEARED,      /* all tiers of the rank */
	KVP_KV_TIER_CLEARED, /* one tier of the rank */
	KVP_KV_IGNORED,      /* tag Ignored */
	KVP_KV_UNKNOWN,      /* a tag nobody told us about */
	KVP_KV_MALFORMED
};

enum kvp_kv_tier { KVP_KV_DEVICE, KVP_KV_HOST, KVP_KV_DISK, KVP_KV_EXTERNAL, KVP_KV_TIER_CNT };

/* Text in the payload; p NULL = absent. */
struct kvp_kv_str {
	const char *p;
	uint32_t len;
};

struct kvp_kv_event {
	enum kvp_kv_kind kind;
	uint8_t has_parent, has_group, has_window; /* 0 or 1 */
	enum kvp_hash_window window;               /* KVP_HASH_WINDOW_EAGLE: token_ids were pairs */
	uint64_t parent;
	const uint64_t *hash; /* external block hashes */
	const uint32_t *tok;  /* of pairs: the first of each and the second of the last */
	uint32_t hash_cnt, tok_cnt;
	uint64_t block_size;
	const struct kvp_hash_mm *mm; /* one list a block for the first mm_cnt blocks; NULL = absent */
	uint32_t mm_cnt;
	uint32_t group_idx, sliding_window;
	struct kvp_kv_str tag;  /* event type as sent; absent only if malformed */
	struct kvp_kv_str lora; /* empty = absent */
	struct kvp_kv_str salt; /* own member, else tagged extra key, prefix stripped; empty = absent */
	struct kvp_kv_str medium, group_kind, locality, ownership;
};

struct kvp_kv_batch {
	double ts;        /* informational */
	uint8_t has_rank; /* 0: use the registered rank */
	uint32_t rank;    /* int32 on the wire, bits kept: -1 is 4294967295 */
	const struct kvp_kv_event *event;
	uint32_t event_cnt;
};

struct kvp_kv_dec;
/* kvp_kv_dec_new: NULL without memory. kvp_kv_dec_free takes NULL. */
struct kvp_kv_dec *kvp_kv_dec_new(void);
/* kvp_kv_dec_limit: longer payloads than that are refused, instead of KVP_KV_PAYLOAD_MAX_BYTES. */
void kvp_kv_dec_limit(struct kvp_kv_dec *d, uint64_t payload_max_bytes);
void kvp_kv_dec_free(struct kvp_kv_dec *d);

/* kvp_kv_decode decodes one batch. Bytes behind the first complete value are ignored.
 *
 * return     KVP_OK (possibly with malformed events); KVP_ERR_PROTO: not framed (truncated, reserved byte,
 *            outer shape, rank outside int32); KVP_ERR_LIMIT: payload, events or arena over the limits above;
 *            KVP_ERR_FULL: no memory. On errors nothing may be applied and the watermark stays.
 * blocks     no. Time linear in len.
 */
int kvp_kv_decode(struct kvp_kv_dec *d, const void *payload, size_t len, struct kvp_kv_batch *out);

/* kvp_kv_tier_name: "device", "host_pinned", "disk", "external". kvp_kv_tier_of: KVP_ERR_NOTFOUND if the
 * medium names no tier; an absent or empty medium is the device. */
const char *kvp_kv_tier_name(enum kvp_kv_tier t);
int kvp_kv_tier_of(struct kvp_kv_str medium, enum kvp_kv_tier *out);

/* Why an event has no effect on the index. X(id, label) */
#define KVP_KV_REASON_LIST(X)                                                                                \
	X(OK, "ok")                                                                                          \
	X(IGNORED_EVENT, "ignored_event")                                                                    \
	X(UNKNOWN_EVENT, "unknown_event")                                                                    \
	X(MALFORMED_EVENT, "malformed_event")                                                                \
	X(NON_LOCAL, "non_local")                                                                            \
	X(FOREIGN_OWNER, "foreign_owner")                                                                    \
	X(UNKNOWN_MEDIUM, "unknown_medium")                                                                  \
	X(UNKNOWN_KIND, "unknown_kind")                                                                      \
	X(NON_MAIN_KIND, "non_main_attention_kind")                                                          \
	X(NON_MAIN_GROUP, "non_main_attention_group")                                                        \
	X(UNLEARNED_GROUP, "unlearned_group_idx")                                                            \
	X(SELF_REFERENCE, "self_reference")                                                                  \
	X(BLOCK_SIZE, "block_size_mismatch")                                                                 \
	X(EMPTY_STORE, "empty_store")                                                                        \
	X(AMBIGUOUS, "ambiguous_cache_namespace")                                                            \
	X(STATE_FULL, "listener_state_full")

enum kvp_kv_reason {
#define X(id, label) KVP_KV_REASON_##id,
	KVP_KV_REASON_LIST(X)
#undef X
		KVP_KV_REASON_CNT
};
const char *kvp_kv_reason_name(enum kvp_kv_reason r);

enum kvp_kv_op_kind {
	KVP_KV_OP_STORE,     /* ext[i] is block i of the token windows, behind parent */
	KVP_KV_OP_ATTACH,    /* lower tier, no tokens: attach each ext that is already known */
	KVP_KV_OP_REMOVE,    /* each ext, in this tier */
	KVP_KV_OP_CLEAR,     /* everything of the rank, all tiers */
	KVP_KV_OP_CLEAR_TIER /* everything of the rank in this tier */
};

struct kvp_kv_op {
	enum kvp_kv_op_kind kind;
	enum kvp_kv_tier tier;
	uint32_t dp_rank;
	uint8_t has_parent;
	uint64_t parent;
	const uint64_t *ext;
	uint32_t ext_cnt; /* STORE: >= 1, and the tokens suffice for all of them */
	/* STORE only: block i covers tok[i * block_size ..], block_size tokens (+1 in Eagle mode). */
	const uint32_t *tok;
	uint32_t tok_cnt, block_size;
	enum kvp_hash_window window;
	uint64_t seed;                /* LoRA and salt, own or inherited from the parent */
	const struct kvp_hash_mm *mm; /* lists of the first mm_cnt blocks, or NULL */
	uint32_t mm_cnt;
};

struct kvp_kv_norm;
/* kvp_kv_norm_new makes the state of one listener. block_size: the partition's, 1..2^32-1. NULL without
 * memory or for block_size 0. */
struct kvp_kv_norm *kvp_kv_norm_new(uint32_t block_size);
void kvp_kv_norm_free(struct kvp_kv_norm *n);
/* kvp_kv_norm_reset forgets everything: publisher restart. kvp_kv_norm_forget_rank: one rank was cleared or
 * removed by somebody else than its own events (LoRA and salt of its blocks; learned groups stay). */
void kvp_kv_norm_reset(struct kvp_kv_norm *n);
void kvp_kv_norm_forget_rank(struct kvp_kv_norm *n, uint32_t dp_rank);
/* One thing that a listener remembers, for those who keep it over a restart: a block with LoRA or salt, or
 * the class of a cache group (KVP_KV_NOTE_GROUP). (dp_rank, that bit, id) names it. */
#define KVP_KV_NOTE_GROUP 0x80000000u
struct kvp_kv_note {
	uint64_t id; /* external hash, or group index */
	uint64_t lora_term, salt_term;
	uint32_t dp_rank;
	uint32_t state; /* opaque but for KVP_KV_NOTE_GROUP; no other bit set: forgotten */
};
/* kvp_kv_norm_notes gives what the last kvp_kv_normalise or kvp_kv_norm_forget_rank has changed, whatever its
 * answer, in order; valid until the next call for n. Who applies the notes of a stream to a map has what n
 * remembers. kvp_kv_norm_reset makes none. kvp_kv_norm_restore puts the notes of such a map into an empty n:
 * KVP_ERR_FULL beyond its limits (the rest is left out); a note that makes no sense is skipped. */
uint32_t kvp_kv_norm_notes(const struct kvp_kv_norm *n, const struct kvp_kv_note **out);
int kvp_kv_norm_restore(struct kvp_kv_norm *n, const struct kvp_kv_note *note, uint32_t cnt);
/* kvp_kv_norm_remembered: blocks with LoRA or salt remembered now (gauge). */
uint32_t kvp_kv_norm_remembered(const struct kvp_kv_norm *n);
/* kvp_kv_norm_probes: cells looked at since new. About two for each hash, whatever the engine chose. */
uint64_t kvp_kv_norm_probes(const struct kvp_kv_norm *n);

/* kvp_kv_normalise turns one event of the effective rank dp_rank into an operation.
 *
 * dp_rank    batch rank if the batch has one, else the registered rank; the caller has checked that it
 *            belongs to the worker.
 * return     KVP_KV_REASON_OK and *op; any other: the event has no effect, op is untouched.
 */
enum kvp_kv_reason kvp_kv_normalise(
	struct kvp_kv_norm *n, const struct kvp_kv_event *ev, uint32_t dp_rank, struct kvp_kv_op *op);
#endif
