/* ipc/json_out.h — JSON text out: a writer into one growing buffer; what comes out is always valid JSON.
 *
 * Shape      struct kvp_jw: buffer, length, nesting as two bit arrays. Commas and colons come by themselves.
 * Truth      buf[0..len). err is sticky: after the first failure every call is a no-op.
 * Writers    the owner's thread.
 * Who        the owner's thread.
 * Ordering   none: process-local memory.
 * Lifetime   init to free; kvp_jw_reset keeps the memory, so a warm writer allocates nothing.
 * Crash      nothing survives the process.
 * Proved by  tests/t_json.c.
 *
 * Strings: control characters, quote and backslash escaped; each byte that isn't part of valid UTF-8 becomes
 * U+FFFD. Integers exact. Doubles: shortest text that reads back as the same value; NaN and infinities: null.
 * Calls in the wrong place (a value in an object without a key, kvp_jw_end at the outermost level, nesting
 * over KVP_JW_DEPTH_MAX) set err to KVP_ERR_INVAL instead of writing something invalid.
 */
#ifndef KVP_IPC_JSON_OUT_H
#define KVP_IPC_JSON_OUT_H

#include <kvpick/err.h>
#include <stddef.h>
#include <stdint.h>

#include "ipc/json_in.h"

#define KVP_JW_DEPTH_MAX 192

struct kvp_jw {
	char *buf; /* not NUL-terminated; NULL until the first byte */
	size_t len, cap;
	int err;        /* KVP_OK, KVP_ERR_INVAL (misuse), KVP_ERR_FULL (no memory) */
	uint32_t depth; /* from here: private */
	uint8_t has_key, root_cnt;
	uint64_t is_obj[KVP_JW_DEPTH_MAX / 64], is_used[KVP_JW_DEPTH_MAX / 64];
};

void kvp_jw_init(struct kvp_jw *w);  /* no memory yet */
void kvp_jw_reset(struct kvp_jw *w); /* empty text, level 0, err cleared; memory kept */
void kvp_jw_free(struct kvp_jw *w);
/* kvp_jw_drain empties buf but keeps the nesting: the caller has sent buf[0..len) (streamed replies). */
void kvp_jw_drain(struct kvp_jw *w);
/* kvp_jw_done: KVP_OK if exactly one value was written and everything is closed, else err or KVP_ERR_INVAL.
 * */
int kvp_jw_done(const struct kvp_jw *w);

void kvp_jw_obj(struct kvp_jw *w); /* { */
void kvp_jw_arr(struct kvp_jw *w); /* [ */
void kvp_jw_end(struct kvp_jw *w); /* } or ] */
void kvp_jw_key(struct kvp_jw *w, const char *key);
void kvp_jw_keyn(struct kvp_jw *w, const char *key, size_t len);
void kvp_jw_str(struct kvp_jw *w, const char *s);
void kvp_jw_strn(struct kvp_jw *w, const char *s, size_t len);
void kvp_jw_u64(struct kvp_jw *w, uint64_t v);
void kvp_jw_i64(struct kvp_jw *w, int64_t v);
void kvp_jw_i64s(struct kvp_jw *w, const int64_t *v, size_t n); /* an array of them */
void kvp_jw_f64(struct kvp_jw *w, double v);
void kvp_jw_bool(struct kvp_jw *w, int v); /* 0 = false */
void kvp_jw_null(struct kvp_jw *w);
/* kvp_jw_raw: the bytes of one complete JSON value, trusted. */
void kvp_jw_raw(struct kvp_jw *w, const char *text, size_t len);
/* kvp_jw_val writes a parsed value with everything in it (text may differ in spacing, escapes, number
 * form). */
void kvp_jw_val(struct kvp_jw *w, struct kvp_json_val v);

/* Shorthands for members. */
void kvp_jw_kstr(struct kvp_jw *w, const char *key, const char *s);
void kvp_jw_ku64(struct kvp_jw *w, const char *key, uint64_t v);
void kvp_jw_kbool(struct kvp_jw *w, const char *key, int v);
#endif
