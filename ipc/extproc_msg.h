/* ipc/extproc_msg.h - messages of envoy.service.ext_proc.v3 as plain structs.
 *
 * Shape      ProcessingRequest bytes -> struct kvp_extproc_req, struct kvp_extproc_reply ->
 *            ProcessingResponse bytes; and the other two directions for whoever plays the proxy.
 * Truth      the bytes. Unknown fields and oneof members are skipped; text is taken as bytes (it may hold NUL
 *            and need not be UTF-8).
 * Writers    none shared: a decoder belongs to one thread.
 * Ordering   fields are written in ascending order, default values left out: the bytes are reproducible.
 * Bounds     memory of one decode is 3 times the message and 256 KiB; nesting is fixed (no recursion).
 * Crash      process-local.
 * Proved by  tests/t_extproc_msg.c (every message of the vectors both ways), tests/fuzz/f_extproc_msg.c.
 */
#ifndef KVP_IPC_EXTPROC_MSG_H
#define KVP_IPC_EXTPROC_MSG_H

#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

#define KVP_EXTPROC_METHOD "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
#define KVP_EXTPROC_PIECE_BYTES 62000u /* most body bytes of one answer */
#define KVP_EXTPROC_SET_MAX 32	       /* most headers that one answer sets, and removes */

struct kvp_extproc_str { /* bytes somewhere else, not terminated; p may be NULL when len is 0 */
	const char *p;
	uint32_t len;
};
#define KVP_EXTPROC_STR(literal) ((struct kvp_extproc_str){(literal), sizeof(literal) - 1})

struct kvp_extproc_header {
	struct kvp_extproc_str key;
	struct kvp_extproc_str value; /* raw_value when not empty, else value */
};

/* Which oneof member; the values are the field numbers of ProcessingRequest. */
enum kvp_extproc_kind {
	KVP_EXTPROC_NONE = 0,
	KVP_EXTPROC_REQUEST_HEADERS = 2,
	KVP_EXTPROC_RESPONSE_HEADERS = 3,
	KVP_EXTPROC_REQUEST_BODY = 4,
	KVP_EXTPROC_RESPONSE_BODY = 5,
	KVP_EXTPROC_REQUEST_TRAILERS = 6,
	KVP_EXTPROC_RESPONSE_TRAILERS = 7
};
enum kvp_extproc_body_mode { /* BodySendMode; other numbers are possible in a request */
	KVP_EXTPROC_BODY_NONE = 0,
	KVP_EXTPROC_BODY_STREAMED = 1,
	KVP_EXTPROC_BODY_BUFFERED = 2,
	KVP_EXTPROC_BODY_BUFFERED_PARTIAL = 3,
	KVP_EXTPROC_BODY_FULL_DUPLEX = 4,
	KVP_EXTPROC_BODY_GRPC = 5
};
enum kvp_extproc_hint { KVP_EXTPROC_HINT_ABSENT, KVP_EXTPROC_HINT_PRESENT };

struct kvp_extproc_req {
	enum kvp_extproc_kind kind;
	const struct kvp_extproc_header *header; /* headers or trailers, in order */
	uint32_t header_cnt;
	uint8_t end_of_stream;	    /* of headers or body */
	uint8_t observability_mode; /* 1: must not be answered */
	uint8_t has_config;	    /* protocol_config is there; then: */
	uint8_t send_body_without_waiting;
	uint32_t request_body_mode, response_body_mode;
	struct kvp_extproc_str body;
	const struct kvp_extproc_str *body_more; /* the body goes on here (decode_parts only) */
	uint32_t body_more_cnt;
	/* envoy.lb.subset_hint / x-gateway-destination-endpoint-subset: entries split at commas, trimmed,
	 * blank ones dropped. PRESENT with 0 entries: the hint excludes everybody (also when it has a wrong
	 * type). */
	enum kvp_extproc_hint subset_hint;
	uint32_t subset_cnt;
	const struct kvp_extproc_str *subset;
	/* envoy.lb / x-gateway-destination-endpoint-served: the last attempt, trimmed; len 0: none. */
	struct kvp_extproc_str served;
};

struct kvp_extproc_dec;
struct kvp_extproc_dec *kvp_extproc_dec_new(void); /* NULL: no memory */
void kvp_extproc_dec_delete(struct kvp_extproc_dec *d);

/* kvp_extproc_req_decode parses a ProcessingRequest. What *out points to stays valid until the next decode
 * with d; it does not point into data. KVP_ERR_PROTO: not such a message; KVP_ERR_LIMIT: over the memory
 * bound. */
int kvp_extproc_req_decode(
	struct kvp_extproc_dec *d, const void *data, size_t len, struct kvp_extproc_req *out);
/* kvp_extproc_req_decode_parts parses a message that lies in several places. Its body is not copied: it
 * points into the parts, and that of a request may go on in body_more. */
int kvp_extproc_req_decode_parts(
	struct kvp_extproc_dec *d, const struct iovec *part, uint32_t cnt, struct kvp_extproc_req *out);

/* Answers; the values are the field numbers of ProcessingResponse. */
enum kvp_extproc_answer {
	KVP_EXTPROC_ANSWER_NONE = 0,
	KVP_EXTPROC_ANSWER_REQUEST_HEADERS = 1,
	KVP_EXTPROC_ANSWER_RESPONSE_HEADERS = 2,
	KVP_EXTPROC_ANSWER_REQUEST_BODY = 3,
	KVP_EXTPROC_ANSWER_RESPONSE_BODY = 4,
	KVP_EXTPROC_ANSWER_REQUEST_TRAILERS = 5,
	KVP_EXTPROC_ANSWER_RESPONSE_TRAILERS = 6,
	KVP_EXTPROC_ANSWER_IMMEDIATE = 7
};
enum kvp_extproc_append {
	KVP_EXTPROC_APPEND_OR_ADD = 0,
	KVP_EXTPROC_ADD_IF_ABSENT = 1,
	KVP_EXTPROC_OVERWRITE_OR_ADD = 2,
	KVP_EXTPROC_OVERWRITE_IF_EXISTS = 3
};
struct kvp_extproc_set_header {
	struct kvp_extproc_str key, value; /* value is written as raw_value */
	enum kvp_extproc_append append;
};
enum kvp_extproc_mutation {
	KVP_EXTPROC_BODY_KEEP,		/* no body mutation */
	KVP_EXTPROC_BODY_REPLACE,	/* BUFFERED, STREAMED: body takes the place of the message's */
	KVP_EXTPROC_BODY_CLEAR,		/* the message's body is dropped */
	KVP_EXTPROC_BODY_STREAMED_PIECE /* FULL_DUPLEX_STREAMED: body and end_of_stream */
};
struct kvp_extproc_reply {
	enum kvp_extproc_answer kind;
	uint8_t clear_route_cache;
	uint8_t end_of_stream; /* of a streamed piece */
	enum kvp_extproc_mutation mutation;
	struct kvp_extproc_str body; /* by mutation, or of an immediate response */
	struct kvp_extproc_kept *kept; /* not NULL: the body lies in here */
	/* Header mutation, of headers, body, trailers and immediate responses; none when both counts are
	 * 0. */
	const struct kvp_extproc_set_header *set;
	uint32_t set_cnt;
	uint32_t remove_cnt;
	const struct kvp_extproc_str *remove;
	uint32_t http_status;		    /* immediate response */
	struct kvp_extproc_str destination; /* not empty: dynamic metadata envoy.lb {destination key: this} */
};

/* kvp_extproc_reply_new: the encoded message in memory from malloc (for kvp_grpc_give); NULL: no memory. */
void *kvp_extproc_reply_new(const struct kvp_extproc_reply *r, size_t *len);

/* Memory that several answers may use until they are sent. grow (kept NULL: a new one, with one reference)
 * makes room for size bytes while there is one reference; NULL: no memory, kept is unchanged. ref and unref
 * on any thread. */
struct kvp_extproc_kept {
	uint32_t refs;
	char bytes[];
};
struct kvp_extproc_kept *kvp_extproc_kept_grow(struct kvp_extproc_kept *kept, size_t size);
void kvp_extproc_kept_ref(struct kvp_extproc_kept *kept);
void kvp_extproc_kept_unref(void *kept); /* NULL is fine */

/* kvp_extproc_reply_frame: what stands before and behind the body of an answer with a streamed piece that has
 * nothing else: 1, or 0 for every other answer. The same bytes as of reply_new. */
#define KVP_EXTPROC_FRAME_MAX 48
struct kvp_extproc_frame {
	uint8_t head[KVP_EXTPROC_FRAME_MAX], tail[KVP_EXTPROC_FRAME_MAX];
	uint32_t head_len, tail_len;
};
int kvp_extproc_reply_frame(const struct kvp_extproc_reply *r, struct kvp_extproc_frame *f);

/* kvp_extproc_piece_next cuts a body into pieces of at most KVP_EXTPROC_PIECE_BYTES: 1 and the next piece, or
 * 0 behind the last. An empty body is one empty piece. Only the last one carries the end flag, if one is
 * wanted. */
struct kvp_extproc_pieces {
	struct kvp_extproc_str body;
	uint8_t end_of_stream; /* wanted on the last piece */
	uint8_t begun;	       /* start with 0 */
	uint32_t off;	       /* start with 0 */
};
int kvp_extproc_piece_next(
	struct kvp_extproc_pieces *p, struct kvp_extproc_str *piece, uint8_t *end_of_stream);

/* The proxy's side (tests, load generator). req_encode writes what decode reads: value as raw_value, the
 * subset as a list of strings, served as one string. Bytes in memory from malloc. reply_decode is the inverse
 * of reply_encode: pointers live in d until its next decode. */
void *kvp_extproc_req_new(const struct kvp_extproc_req *r, size_t *len);
int kvp_extproc_reply_decode(
	struct kvp_extproc_dec *d, const void *data, size_t len, struct kvp_extproc_reply *out);
#endif
