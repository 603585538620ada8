/* daemons/sidecar/body.h - members of JSON objects by their places in the text, and texts changed without
 * being written anew.
 *
 * Shape      spans: offset and length in a text that was found valid (ipc/json_check.h). An edit takes
 *            members out and puts others behind the last one; every other byte is copied as it stands.
 * Truth      the text. No I/O, no parser state.
 * Names      a member spelled with escapes is the member that it spells. Several members of one name: all go
 *            when one is edited, and the last counts when one is looked up.
 * Bounds     also a text that is no JSON is never read past its end: KVP_ERR_PROTO.
 * Crash      process-local.
 * Proved by  tests/v_disagg.c, tests/t_sidecar_body.c, tests/fuzz/f_sidecar_body.c
 */
#ifndef KVP_SIDECAR_BODY_H
#define KVP_SIDECAR_BODY_H

#include <stddef.h>
#include <stdint.h>

#include "ipc/http_parse.h"

struct kvp_span {
	uint64_t at, len;
};

/* kvp_span_all: the whole text as a span. */
static inline struct kvp_span kvp_span_all(uint64_t len)
{
	return (struct kvp_span){0, len};
}

/* kvp_span_member finds the value of the last member called key of the object in obj. KVP_OK,
 * KVP_ERR_NOTFOUND, KVP_ERR_PROTO (no object). kvp_span_first: the first element of the array in arr. */
int kvp_span_member(const char *text, struct kvp_span obj, const char *key, struct kvp_span *val);
int kvp_span_first(const char *text, struct kvp_span arr, struct kvp_span *val);

/* kvp_span_members finds several in one pass: of each key the last value (len 0: none) and the number of
 * members. KVP_OK, KVP_ERR_PROTO (no object). */
struct kvp_member {
	const char *key;
	struct kvp_span val;
	uint32_t cnt;
};
int kvp_span_members(const char *text, struct kvp_span obj, struct kvp_member *m, size_t cnt);

/* Elements of an array, in order: kvp_span_each (KVP_ERR_PROTO: no array), then kvp_span_next while it is
 * 1. */
struct kvp_span_iter {
	const char *text;
	uint64_t at, end;
};
int kvp_span_each(const char *text, struct kvp_span arr, struct kvp_span_iter *it);
int kvp_span_next(struct kvp_span_iter *it, struct kvp_span *val);

/* What a value is. kvp_span_is: the very text; kvp_span_spells: a string that spells word, which is ASCII. An
 * absent value (len 0) is nothing. kvp_span_u64: KVP_OK for an integer token of 0 .. 2^64-1, else
 * KVP_ERR_INVAL; kvp_span_is_int: one of 64 bits, with a sign or without. */
int kvp_span_is(const char *text, struct kvp_span v, const char *what);
int kvp_span_spells(const char *text, struct kvp_span v, const char *word);
int kvp_span_u64(const char *text, struct kvp_span v, uint64_t *out);
int kvp_span_is_int(const char *text, struct kvp_span v);
static inline int kvp_span_is_object(const char *text, struct kvp_span v)
{
	return v.len && text[v.at] == '{';
}

struct kvp_edit {
	const char *key;
	const char *val; /* JSON text of the new value; NULL: the member goes */
	uint64_t val_len;
	enum { KVP_EDIT_ALWAYS, KVP_EDIT_IF_PRESENT } when;
};

/* kvp_span_edit appends to out the object in obj with the edits made. KVP_ERR_PROTO (no object), KVP_ERR_SYS
 * (memory). */
int kvp_span_edit(const char *text, struct kvp_span obj, const struct kvp_edit *edit, size_t edit_cnt,
	struct kvp_http_buf *out);

/* kvp_text_replace: what stands around a value inside a text stays: appends text with the span `old` replaced
 * by val. */
int kvp_text_replace(const char *text, uint64_t len, struct kvp_span old, const char *val, uint64_t val_len,
	struct kvp_http_buf *out);
#endif
