/* ipc/json_in.h — JSON text in: simdjson's DOM behind C, exact 64-bit integers, bounded depth.
 *
 * Shape      struct kvp_json: a reusable parser (opaque). struct kvp_json_val: 16 bytes, a place in the
 *            document last parsed; copy it freely.
 * Truth      the parser's tape. Strings point into the parser, not into the input.
 * Writers    kvp_json_parse, one thread a parser. Values are read by the same thread.
 * Who        everybody who parses bodies: httpd, indexer, discovery, peer, policy files, vector tests.
 * Ordering   none: process-local memory.
 * Lifetime   values and strings are valid until the next kvp_json_parse or kvp_json_free of that parser.
 *            A warm parser (an input at most as long as one seen before) allocates nothing.
 * Crash      nothing survives the process.
 * Proved by  tests/t_json.c, tests/fuzz/f_json.c.
 *
 * Rules: RFC 8259 text only: byte order mark, NaN, comments, trailing commas, unescaped control characters,
 * invalid UTF-8 and text after the value are syntax errors. Duplicate members: the last wins (kvp_json_get;
 * who iterates and assigns gets it for free). Members that nobody reads may hold lone surrogates (read as
 * U+FFFD), integers beyond 64 bits (read as doubles) and numbers beyond a double (reading them is
 * KVP_ERR_LIMIT). Strings may hold NUL: always use the length. No C++ exception leaves json_in.cc.
 */
#ifndef KVP_IPC_JSON_IN_H
#define KVP_IPC_JSON_IN_H

#include <kvpick/err.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define KVP_JSON_DEPTH_MAX 128        /* nested objects and arrays */
#define KVP_JSON_SLACK_BYTES 64       /* readable bytes behind an input that saves the copy */
#define KVP_JSON_LEN_MAX (1ull << 30) /* longest text */

enum kvp_json_slack {
	KVP_JSON_NO_SLACK, /* the text is copied into the parser first */
	KVP_JSON_HAS_SLACK /* KVP_JSON_SLACK_BYTES bytes (any values) behind the text may be read: no copy */
};

enum kvp_json_type {
	KVP_JSON_NULL,
	KVP_JSON_BOOL,
	KVP_JSON_INT,    /* integer token in -2^63 .. 2^64-1 */
	KVP_JSON_DOUBLE, /* token with fraction or exponent, or an integer beyond that range */
	KVP_JSON_STR,
	KVP_JSON_ARR,
	KVP_JSON_OBJ
};

struct kvp_json;
struct kvp_json_val {
	const void *doc;
	size_t at;
};
struct kvp_json_err {
	int code;         /* KVP_OK, or as returned */
	const char *text; /* constant text, one line; NULL when code is KVP_OK */
};

/* kvp_json_new returns an empty parser, NULL without memory. kvp_json_free takes NULL, too. */
struct kvp_json *kvp_json_new(void);
void kvp_json_free(struct kvp_json *p);

/* kvp_json_trim voids all values and gives the memory of p back, if that has grown for a text of more than
 * most bytes. */
void kvp_json_trim(struct kvp_json *p, size_t most);

/* kvp_json_parse_slack parses a text into p; *root is the outermost value (any type).
 *
 * text, len  the bytes; len 0 is a syntax error. Not changed; not referenced after the call.
 * depth_max  1..KVP_JSON_DEPTH_MAX; values nested deeper are refused. A scalar is depth 0.
 * err        may be NULL; always set otherwise.
 * return     KVP_OK; KVP_ERR_PROTO (syntax, UTF-8), KVP_ERR_LIMIT (depth or length), KVP_ERR_FULL (no
 *            memory), KVP_ERR_INVAL (arguments). After a failure the parser is reusable and old values are
 *            void.
 */
int kvp_json_parse_slack(struct kvp_json *p, const void *text, size_t len, uint32_t depth_max,
	enum kvp_json_slack slack, struct kvp_json_val *root, struct kvp_json_err *err);
/* kvp_json_parse is the same for a text without slack. */
int kvp_json_parse(struct kvp_json *p, const void *text, size_t len, uint32_t depth_max,
	struct kvp_json_val *root, struct kvp_json_err *err);

/* kvp_json_lone_surrogate: 1 if a valid text holds an unpaired surrogate escape anywhere. */
int kvp_json_lone_surrogate(const void *text, size_t len);

enum kvp_json_type kvp_json_type(struct kvp_json_val v);
const char *kvp_json_type_name(enum kvp_json_type t); /* "null", "boolean", "integer", "number", ... */

/* Scalars: KVP_OK and *out, else KVP_ERR_INVAL (another type; for integers also a double, even 3.0) or
 * KVP_ERR_LIMIT (an integer, or an integer beyond 64 bits, outside the range of the out type).
 * kvp_json_double takes integers, too. */
int kvp_json_u64(struct kvp_json_val v, uint64_t *out);
int kvp_json_u32(struct kvp_json_val v, uint32_t *out);
int kvp_json_i64(struct kvp_json_val v, int64_t *out);
int kvp_json_double(struct kvp_json_val v, double *out);
int kvp_json_bool(struct kvp_json_val v, int *out);
/* kvp_json_str: UTF-8, NUL behind the last byte, NUL possible inside. */
int kvp_json_str(struct kvp_json_val v, const char **s, size_t *len);
/* kvp_json_str_is: 1 if v is a string equal to the C string s, else 0. */
int kvp_json_str_is(struct kvp_json_val v, const char *s);

/* Objects. kvp_json_get: the last member with that key; KVP_ERR_NOTFOUND, or KVP_ERR_INVAL if not an object.
 * kvp_json_len: members of an object or elements of an array, 0 for anything else. */
int kvp_json_get(struct kvp_json_val obj, const char *key, struct kvp_json_val *out);
int kvp_json_getn(struct kvp_json_val obj, const char *key, size_t key_len, struct kvp_json_val *out);
size_t kvp_json_len(struct kvp_json_val v);

/* Iteration, objects and arrays alike:
 *	struct kvp_json_iter it = kvp_json_each(v);
 *	while (kvp_json_next(&it)) use(it.key, it.key_len, it.val);
 * kvp_json_each of a value that is neither yields nothing. key is NULL in arrays. Each member of an object
 * comes in the order of the text, duplicates included. */
struct kvp_json_iter {
	struct kvp_json_val val;
	const char *key;
	size_t key_len;
	const void *doc; /* from here: private */
	size_t next, end;
	int is_obj;
};
struct kvp_json_iter kvp_json_each(struct kvp_json_val v);
int kvp_json_next(struct kvp_json_iter *it);

/* Whole arrays of integers into out[cap], one call. The only functions that set an out-parameter on failure:
 *
 * n        in any case: elements stored, or the index of the offending element, or with KVP_ERR_FULL the
 *          length of the array.
 * return   KVP_OK; KVP_ERR_INVAL (not an array; *n = 0), KVP_ERR_PROTO (element *n is no integer),
 *          KVP_ERR_LIMIT (element *n is out of range), KVP_ERR_FULL (more than cap elements, nothing stored).
 * kvp_json_h64s takes -2^63 .. 2^64-1 as bit patterns (hashes are written both ways). */
int kvp_json_u32s(struct kvp_json_val v, uint32_t *out, size_t cap, size_t *n);
int kvp_json_u64s(struct kvp_json_val v, uint64_t *out, size_t cap, size_t *n);
int kvp_json_i64s(struct kvp_json_val v, int64_t *out, size_t cap, size_t *n);
int kvp_json_h64s(struct kvp_json_val v, uint64_t *out, size_t cap, size_t *n);

#ifdef __cplusplus
}
#endif
#endif
