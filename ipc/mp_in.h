/* ipc/mp_in.h — msgpack in: a bounded cursor over one message, no memory, no recursion.
 *
 * Shape      struct kvp_mp: position and end of caller memory.
 * Truth      the bytes.
 * Writers    the owner of the cursor, one thread.
 * Who        kv_decode.c, replica messages.
 * Ordering   none: process-local memory.
 * Lifetime   strings point into the message.
 * Crash      nothing survives the process.
 * Proved by  tests/t_kv_event.c (against msgpack-c), tests/fuzz/f_kvevent.c.
 *
 * Why not the library's unpacker: it builds a tree of 24-byte objects and allocates by the counts that the
 * message claims (five bytes can ask for 64 GiB). Here a count is compared with the bytes that are left
 * before anybody allocates by it. All functions return KVP_OK and move on, or KVP_ERR_PROTO (other type,
 * truncated, reserved byte) and stay.
 */
#ifndef KVP_IPC_MP_IN_H
#define KVP_IPC_MP_IN_H

#include <kvpick/err.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

struct kvp_mp {
	const uint8_t *p, *end;
};

enum kvp_mp_type {
	KVP_MP_NIL,
	KVP_MP_BOOL,
	KVP_MP_INT,
	KVP_MP_FLOAT,
	KVP_MP_STR,
	KVP_MP_BIN,
	KVP_MP_ARR,
	KVP_MP_MAP,
	KVP_MP_EXT,
	KVP_MP_NONE /* nothing left, or the reserved byte */
};

static inline size_t kvp_mp_left(const struct kvp_mp *c)
{
	return (size_t)(c->end - c->p);
}

static inline uint16_t kvp_mp_be16(const uint8_t *p)
{
	uint16_t v;
	memcpy(&v, p, sizeof(v));
	return __builtin_bswap16(v);
}
static inline uint32_t kvp_mp_be32(const uint8_t *p)
{
	uint32_t v;
	memcpy(&v, p, sizeof(v));
	return __builtin_bswap32(v);
}
static inline uint64_t kvp_mp_be64(const uint8_t *p)
{
	uint64_t v;
	memcpy(&v, p, sizeof(v));
	return __builtin_bswap64(v);
}

/* kvp_mp_type tells what comes next. */
enum kvp_mp_type kvp_mp_type(const struct kvp_mp *c);

/* kvp_mp_u32 takes a non-negative integer below 2^32 in any encoding. */
int kvp_mp_u32_slow(struct kvp_mp *c, uint32_t *out);
static inline int kvp_mp_u32(struct kvp_mp *c, uint32_t *out)
{
	const uint8_t *p = c->p;
	size_t left = kvp_mp_left(c);
	if (left >= 5) { /* the encodings of token ids, without a check for each */
		if (p[0] < 0x80) {
			*out = p[0];
			c->p = p + 1;
			return KVP_OK;
		}
		if (p[0] == 0xcd) {
			*out = kvp_mp_be16(p + 1);
			c->p = p + 3;
			return KVP_OK;
		}
		if (p[0] == 0xce) {
			*out = kvp_mp_be32(p + 1);
			c->p = p + 5;
			return KVP_OK;
		}
	}
	return kvp_mp_u32_slow(c, out);
}

/* kvp_mp_int takes an integer as bit pattern; *neg: it was negative. kvp_mp_u64: non-negative ones only. */
int kvp_mp_int(struct kvp_mp *c, uint64_t *bits, int *neg);
int kvp_mp_u64(struct kvp_mp *c, uint64_t *out);
/* kvp_mp_number takes any integer or float as a double. */
int kvp_mp_number(struct kvp_mp *c, double *out);
int kvp_mp_nil(struct kvp_mp *c);
int kvp_mp_str(struct kvp_mp *c, const char **s, uint32_t *len);
int kvp_mp_bin(struct kvp_mp *c, const uint8_t **s, uint32_t *len);
/* kvp_mp_key takes a str or a bin (map keys). */
int kvp_mp_key(struct kvp_mp *c, const char **s, uint32_t *len);
/* kvp_mp_arr, kvp_mp_map take a header; *n elements (map: pairs) can follow in the bytes that are left. */
int kvp_mp_arr(struct kvp_mp *c, uint32_t *n);
int kvp_mp_map(struct kvp_mp *c, uint32_t *n);
/* kvp_mp_skip passes one value of any depth. kvp_mp_skip_depth refuses one with more than depth_max (0..1024)
 * containers inside each other. */
#define KVP_MP_DEPTH_MAX 1024
int kvp_mp_skip(struct kvp_mp *c);
int kvp_mp_skip_depth(struct kvp_mp *c, uint32_t depth_max);
#endif
