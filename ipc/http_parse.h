/* ipc/http_parse.h - HTTP/1.1 messages from bytes: head, framing, chunks, whole requests. No sockets.
 *
 * Shape      a head is collected up to its empty line, byte by byte under its limits, and then read by
 *            http_parser in one piece; what that library lets through is checked on top. Bodies are counted
 *            (Content-Length) or decoded (chunked) here.
 * Truth      the caller's thread only.
 * Strict     CRLF only; no control bytes, no line folding, no space before a colon; one Content-Length at
 *            most and not with Transfer-Encoding; no coding but chunked.
 * Lifetime   zero the struct, set the limits, feed; reset between messages keeps buffers, free ends it.
 * Crash      process-local.
 * Proved by  tests/t_http.c, tests/t_http_parse.c, tests/fuzz/f_http.c.
 */
#ifndef KVP_IPC_HTTP_PARSE_H
#define KVP_IPC_HTTP_PARSE_H

#include <stdint.h>
#include "ipc/decimal.h"
#include "ipc/http_server.h"

#define KVP_HTTP_FIELD_MAX 1024	 /* header fields of one message */
#define KVP_HTTP_KEEP_BYTES 8192 /* a larger buffer is not kept between messages */

struct kvp_http_buf {
	char *p;
	uint64_t len, cap;
};
/* KVP_OK or KVP_ERR_SYS; keep at least extra bytes of room behind len. grow is room's other half. */
int kvp_http_buf_grow(struct kvp_http_buf *b, uint64_t extra);
static inline int kvp_http_buf_room(struct kvp_http_buf *b, uint64_t extra)
{
	return extra <= b->cap - b->len ? 0 : kvp_http_buf_grow(b, extra);
}
int kvp_http_buf_put(struct kvp_http_buf *b, const void *data, uint64_t len);
int kvp_http_buf_text(struct kvp_http_buf *b, const char *text);
void kvp_http_buf_trim(struct kvp_http_buf *b); /* empty; freed if over KVP_HTTP_KEEP_BYTES */
void kvp_http_buf_free(struct kvp_http_buf *b);
/* kvp_http_dec writes decimal digits, kvp_http_chunk_line the line before a chunk of len bytes; neither is
 * terminated. Number of bytes written. */
#define KVP_HTTP_CHUNK_LINE_MAX 18
unsigned kvp_http_dec(char to[KVP_DECIMAL_MAX], uint64_t n);
unsigned kvp_http_chunk_line(char to[KVP_HTTP_CHUNK_LINE_MAX], uint64_t len);

struct kvp_http_field {
	uint32_t name, name_len, val, val_len; /* offsets into the head */
};
enum kvp_http_kind { KVP_HTTP_KIND_REQUEST, KVP_HTTP_KIND_RESPONSE };
struct kvp_http_head {
	uint32_t line_max, header_max; /* limits, bytes: first line without CRLF; fields with their CRLFs */
	struct kvp_http_buf raw;
	struct kvp_http_field *field;
	uint32_t field_cnt, field_cap;
	uint32_t line_len;   /* of the first line */
	uint32_t cur_len;    /* of the current line */
	uint32_t header_len; /* fields so far */
	uint8_t state, blank_cnt;
	uint8_t over_line; /* KVP_ERR_LIMIT came from the first line */
	/* after parse */
	uint8_t minor, keep_alive, done;
	uint16_t version; /* major * 256 + minor as written */
	uint16_t status;  /* response */
	uint8_t method;	  /* request: the library's number */
	uint32_t url, url_len;
};
/* feed takes bytes up to the end of the head. KVP_OK: complete; KVP_ERR_AGAIN: more; KVP_ERR_LIMIT;
 * KVP_ERR_PROTO; KVP_ERR_SYS. *used bytes were taken in any case. */
int kvp_http_head_feed(struct kvp_http_head *h, const char *data, uint64_t len, uint64_t *used);
/* parse reads a complete head: KVP_OK, KVP_ERR_PROTO, KVP_ERR_LIMIT (too many fields), KVP_ERR_SYS. */
int kvp_http_head_parse(struct kvp_http_head *h, enum kvp_http_kind kind);
const char *kvp_http_head_find(const struct kvp_http_head *h, const char *name, uint32_t *len, uint32_t *cnt);
void kvp_http_head_reset(struct kvp_http_head *h);
void kvp_http_head_free(struct kvp_http_head *h);

enum kvp_http_framing { KVP_HTTP_FRAME_NONE, KVP_HTTP_FRAME_LENGTH, KVP_HTTP_FRAME_CHUNKED };
/* framing of the body from the fields; KVP_ERR_PROTO; KVP_ERR_INVAL: a transfer coding that is not
 * chunked. */
int kvp_http_head_framing(const struct kvp_http_head *h, enum kvp_http_framing *f, uint64_t *length);

struct kvp_http_chunk {
	uint64_t left;
	uint32_t overhead; /* bytes of extensions and trailers so far */
	uint8_t state, digits;
};
/* One step: takes *used bytes; of them out_len at *out are body. KVP_OK: the last byte of the body's framing
 * was taken; KVP_ERR_AGAIN: go on with the rest; KVP_ERR_PROTO. */
int kvp_http_chunk_feed(struct kvp_http_chunk *c, const char *data, uint64_t len, uint64_t *used,
	const char **out, uint64_t *out_len);

/* kvp_http_chunk_due: bytes still to come of the chunk whose size line is complete, else 0. */
uint64_t kvp_http_chunk_due(const struct kvp_http_chunk *c);

enum kvp_http_phase { KVP_HTTP_IN_HEAD, KVP_HTTP_IN_BODY, KVP_HTTP_IN_DONE, KVP_HTTP_IN_FAILED };
struct kvp_http_in { /* one request */
	uint64_t body_max;
	struct kvp_http_head head;
	struct kvp_http_buf body;
	struct kvp_http_chunk chunk;
	enum kvp_http_framing framing;
	enum kvp_http_phase phase;
	uint64_t length;
	uint8_t expect;	  /* 100-continue asked for */
	uint8_t started;  /* a byte of the request was seen */
	int status;	  /* of a failure: 400 ... 505 */
	const char *text; /* of a failure */
	struct kvp_http_req req;
};
/* KVP_OK: req is complete; KVP_ERR_AGAIN: more bytes; KVP_ERR_PROTO: failed with status and text. */
int kvp_http_in_feed(struct kvp_http_in *in, const char *data, uint64_t len, uint64_t *used);
/* kvp_http_in_head takes the head only; the body's framing is then the caller's to read: in->framing, length,
 * chunk. Same returns, KVP_OK: the head is complete and req's fields are set but for the body. */
int kvp_http_in_head(struct kvp_http_in *in, const char *data, uint64_t len, uint64_t *used);
void kvp_http_in_reset(struct kvp_http_in *in);
void kvp_http_in_free(struct kvp_http_in *in);
/* Initialises the library's process-wide limit; called by server and client open. */
void kvp_http_parse_init(void);
#endif
