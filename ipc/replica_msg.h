/* ipc/replica_msg.h — what replicas tell each other: msgpack of lifecycle events and of session bindings.
 *
 * Shape      plain structs; strings and hashes point into memory of the caller or of the message.
 * Truth      the bytes. One message is two frames, topic and one msgpack map.
 * Writers    none: pure functions. A decoder has scratch memory and belongs to one thread.
 * Who        kvpick-peer.
 * Ordering   none: process-local memory.
 * Lifetime   a decoded event is valid until the decoder's next call and as long as the payload's memory.
 * Crash      nothing survives the process.
 * Proved by  tests/v_replica.c (bytes of an independent encoder, both ways), tests/fuzz/f_replica_msg.c.
 *
 * Encoded are the smallest forms, all keys in order, unsigned integers only. Decoded is what other encoders
 * may send, too: any width, any order of keys, unknown keys, absent optional ones, arrays in field order,
 * bytes behind the value. Refused: an unknown key of a duration, a known key twice, a required one missing,
 * negative or too large integers, floats, invalid UTF-8, anything nested deeper than 1024.
 */
#ifndef KVP_IPC_REPLICA_MSG_H
#define KVP_IPC_REPLICA_MSG_H

#include <kvpick/err.h>
#include <kvpick/types.h>
#include <stddef.h>
#include <stdint.h>

#define KVP_REPLICA_TOPIC_LIFECYCLE "dynamo.slot-tracker.v1"
#define KVP_REPLICA_TOPIC_AFFINITY "dynamo.session-affinity.v1"
#define KVP_REPLICA_PAYLOAD_MAX_BYTES (16u << 20) /* a longer payload is not decoded */

enum kvp_replica_topic { KVP_REPLICA_LIFECYCLE, KVP_REPLICA_AFFINITY, KVP_REPLICA_TOPIC_CNT };

/* kvp_replica_topic_text: the first frame, without the final 0. kvp_replica_topic_of looks the whole frame
 * up: KVP_OK and *out, or KVP_ERR_NOTFOUND. */
struct kvp_str kvp_replica_topic_text(enum kvp_replica_topic t);
int kvp_replica_topic_of(const void *frame, size_t len, enum kvp_replica_topic *out);

enum kvp_replica_kind { KVP_REPLICA_ADD, KVP_REPLICA_MARK, KVP_REPLICA_FREE };

struct kvp_replica_event {
	struct kvp_str model, group; /* the partition; never absent */
	struct kvp_str id;	     /* of the request; never absent */
	struct kvp_str lora;	     /* ptr NULL = none */
	uint64_t worker_id, router_id;
	uint32_t block_size, dp_rank;
	enum kvp_replica_kind kind;
	/* ADD only */
	const uint64_t *seq; /* sequence hashes, root first; NULL = none were told */
	uint32_t seq_cnt;
	uint32_t expected_output_tok;
	uint8_t track_prefill, has_expected_output, has_hint, has_duration; /* 0 or 1 */
	uint32_t duration_nanos; /* 0..999999999 */
	uint64_t duration_secs;
	uint64_t hint_tok; /* prefill tokens at first */
};

struct kvp_replica_binding {
	struct kvp_str model, group, session; /* never absent */
	uint64_t worker_id, sequence, writer_id;
	uint32_t dp_rank;
	uint8_t has_rank; /* 0: any rank */
};

/* kvp_replica_event_bound and _binding_bound: bytes that suffice for the encoding. The encoders write into
 * buf[cap]: KVP_OK and *len, KVP_ERR_FULL if cap does not suffice, KVP_ERR_INVAL for a string of 4 GiB. */
size_t kvp_replica_event_bound(const struct kvp_replica_event *e);
size_t kvp_replica_binding_bound(const struct kvp_replica_binding *b);
int kvp_replica_encode_event(const struct kvp_replica_event *e, void *buf, size_t cap, size_t *len);
int kvp_replica_encode_binding(const struct kvp_replica_binding *b, void *buf, size_t cap, size_t *len);

/* A decoder: zero it before use; payload_max 0 = KVP_REPLICA_PAYLOAD_MAX_BYTES. kvp_replica_dec_close frees
 * its memory. */
struct kvp_replica_dec {
	uint64_t *seq;
	uint32_t seq_cap;
	uint32_t payload_max; /* bytes */
};
void kvp_replica_dec_close(struct kvp_replica_dec *d);

/* kvp_replica_decode_event and _binding read a payload. KVP_OK; KVP_ERR_PROTO (not such a message);
 * KVP_ERR_LIMIT (longer than payload_max); KVP_ERR_SYS (no memory). On failure *out is undefined. */
int kvp_replica_decode_event(
	struct kvp_replica_dec *d, const void *payload, size_t len, struct kvp_replica_event *out);
int kvp_replica_decode_binding(
	struct kvp_replica_dec *d, const void *payload, size_t len, struct kvp_replica_binding *out);
#endif
