/* ipc/json_out.c — see json_out.h. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ipc/decimal.h"
#include "ipc/json_out.h"

void kvp_jw_init(struct kvp_jw *w)
{
	memset(w, 0, sizeof(*w));
}

void kvp_jw_reset(struct kvp_jw *w)
{
	char *buf = w->buf;
	size_t cap = w->cap;
	memset(w, 0, sizeof(*w));
	w->buf = buf;
	w->cap = cap;
}

void kvp_jw_free(struct kvp_jw *w)
{
	free(w->buf);
	memset(w, 0, sizeof(*w));
}

void kvp_jw_drain(struct kvp_jw *w)
{
	w->len = 0;
}

int kvp_jw_done(const struct kvp_jw *w)
{
	if (w->err)
		return w->err;
	return w->depth || !w->root_cnt ? KVP_ERR_INVAL : KVP_OK;
}

/* Room for n bytes, NULL (and err) without. */
static char *room(struct kvp_jw *w, size_t n)
{
	if (n <= w->cap - w->len)
		return w->buf + w->len;
	size_t cap = w->cap ? w->cap : 256;
	while (cap - w->len < n) {
		if (cap > SIZE_MAX / 2) {
			w->err = KVP_ERR_FULL;
			return NULL;
		}
		cap *= 2;
	}
	char *buf = realloc(w->buf, cap);
	if (!buf) {
		w->err = KVP_ERR_FULL;
		return NULL;
	}
	w->buf = buf;
	w->cap = cap;
	return buf + w->len;
}

static void put(struct kvp_jw *w, const char *s, size_t n)
{
	char *to = room(w, n);
	if (!to)
		return;
	if (n)
		memcpy(to, s, n);
	w->len += n;
}

static int bit(const uint64_t *set, uint32_t i)
{
	return (int)(set[i / 64] >> (i % 64) & 1);
}

static void set_bit(uint64_t *set, uint32_t i, int v)
{
	set[i / 64] = (set[i / 64] & ~(1ull << (i % 64))) | (uint64_t)v << (i % 64);
}

static void comma(struct kvp_jw *w)
{
	uint32_t level = w->depth - 1;
	if (bit(w->is_used, level))
		put(w, ",", 1);
	set_bit(w->is_used, level, 1);
}

/* Is a value allowed here? Writes the comma if one is due. */
static int begin_value(struct kvp_jw *w)
{
	if (w->err)
		return 0;
	if (!w->depth) {
		if (w->root_cnt)
			w->err = KVP_ERR_INVAL;
		w->root_cnt = 1;
	} else if (bit(w->is_obj, w->depth - 1)) {
		if (!w->has_key)
			w->err = KVP_ERR_INVAL;
		w->has_key = 0;
	} else {
		comma(w);
	}
	return w->err == KVP_OK;
}

static void open_level(struct kvp_jw *w, int is_obj)
{
	if (!begin_value(w))
		return;
	if (w->depth == KVP_JW_DEPTH_MAX) {
		w->err = KVP_ERR_INVAL;
		return;
	}
	set_bit(w->is_obj, w->depth, is_obj);
	set_bit(w->is_used, w->depth, 0);
	w->depth++;
	put(w, is_obj ? "{" : "[", 1);
}

void kvp_jw_obj(struct kvp_jw *w)
{
	open_level(w, 1);
}

void kvp_jw_arr(struct kvp_jw *w)
{
	open_level(w, 0);
}

void kvp_jw_end(struct kvp_jw *w)
{
	if (w->err)
		return;
	if (!w->depth || w->has_key) {
		w->err = KVP_ERR_INVAL;
		return;
	}
	w->depth--;
	put(w, bit(w->is_obj, w->depth) ? "}" : "]", 1);
}

/* Length of the valid UTF-8 sequence at s (2..4), 0 if there is none. The lead byte is >= 0x80. */
static size_t utf8_len(const unsigned char *s, size_t n)
{
	size_t len = s[0] >= 0xf0 ? 4 : s[0] >= 0xe0 ? 3 : 2;
	if (s[0] < 0xc2 || s[0] > 0xf4 || n < len)
		return 0;
	for (size_t i = 1; i < len; i++)
		if ((s[i] & 0xc0) != 0x80)
			return 0;
	/* Overlong forms, surrogates, beyond U+10FFFF: decided by the second byte. */
	if ((s[0] == 0xe0 && s[1] < 0xa0) || (s[0] == 0xed && s[1] > 0x9f) || (s[0] == 0xf0 && s[1] < 0x90) ||
		(s[0] == 0xf4 && s[1] > 0x8f))
		return 0;
	return len;
}

static void put_escape(struct kvp_jw *w, unsigned char c)
{
	static const char hex[] = "0123456789abcdef";
	char buf[6] = {'\\', 'u', '0', '0', hex[c >> 4], hex[c & 15]};
	const char *named = "\"\"\\\\\bb\ff\nn\rr\tt";
	for (const char *p = named; *p; p += 2) {
		if ((unsigned char)*p == c) {
			buf[1] = p[1];
			put(w, buf, 2);
			return;
		}
	}
	put(w, buf, 6);
}

static void put_string(struct kvp_jw *w, const char *str, size_t len)
{
	const unsigned char *s = (const unsigned char *)str;
	size_t from = 0, i = 0;
	put(w, "\"", 1);
	while (i < len) {
		if (s[i] >= 0x20 && s[i] < 0x80 && s[i] != '"' && s[i] != '\\') {
			i++;
			continue;
		}
		size_t seq = s[i] >= 0x80 ? utf8_len(s + i, len - i) : 0;
		if (seq) {
			i += seq;
			continue;
		}
		put(w, str + from, i - from);
		if (s[i] >= 0x80)
			put(w, "\xef\xbf\xbd", 3);
		else
			put_escape(w, s[i]);
		from = ++i;
	}
	put(w, str + from, len - from);
	put(w, "\"", 1);
}

void kvp_jw_keyn(struct kvp_jw *w, const char *key, size_t len)
{
	if (w->err)
		return;
	if (!w->depth || !bit(w->is_obj, w->depth - 1) || w->has_key) {
		w->err = KVP_ERR_INVAL;
		return;
	}
	comma(w);
	put_string(w, key, len);
	put(w, ":", 1);
	w->has_key = 1;
}

void kvp_jw_key(struct kvp_jw *w, const char *key)
{
	kvp_jw_keyn(w, key, strlen(key));
}

void kvp_jw_strn(struct kvp_jw *w, const char *s, size_t len)
{
	if (begin_value(w))
		put_string(w, s, len);
}

void kvp_jw_str(struct kvp_jw *w, const char *s)
{
	kvp_jw_strn(w, s, strlen(s));
}

#define DIGITS_MAX 24 /* room for the longest number with its sign and a comma */

static char *signed_digits(char *to, int64_t v)
{
	char *from = kvp_decimal(to, v < 0 ? 0 - (uint64_t)v : (uint64_t)v);
	if (v < 0)
		*--from = '-';
	return from;
}

void kvp_jw_u64(struct kvp_jw *w, uint64_t v)
{
	char buf[DIGITS_MAX], *end = buf + DIGITS_MAX, *from = kvp_decimal(end, v);
	if (begin_value(w))
		put(w, from, (size_t)(end - from));
}

void kvp_jw_i64(struct kvp_jw *w, int64_t v)
{
	char buf[DIGITS_MAX], *end = buf + DIGITS_MAX, *from = signed_digits(end, v);
	if (begin_value(w))
		put(w, from, (size_t)(end - from));
}

void kvp_jw_i64s(struct kvp_jw *w, const int64_t *v, size_t n)
{
	char buf[2 * DIGITS_MAX] = ""; /* copied in one piece of DIGITS_MAX from where the number begins */
	if (!begin_value(w) || n > (SIZE_MAX - DIGITS_MAX) / DIGITS_MAX ||
		!room(w, n * DIGITS_MAX + DIGITS_MAX)) {
		w->err = w->err ? w->err : KVP_ERR_FULL;
		return;
	}
	char *to = w->buf + w->len;
	*to++ = '[';
	for (size_t i = 0; i < n; i++) {
		char *end = buf + DIGITS_MAX, *from;
		*--end = ',';
		from = signed_digits(end, v[i]);
		memcpy(to, from, DIGITS_MAX);
		to += end + 1 - from;
	}
	to -= n > 0; /* the last comma */
	*to++ = ']';
	w->len = (size_t)(to - w->buf);
}

void kvp_jw_f64(struct kvp_jw *w, double v)
{
	if (!begin_value(w))
		return;
	if (!isfinite(v)) {
		put(w, "null", 4);
		return;
	}
	char buf[40];
	int n = 0;
	for (int digits = 15; digits <= 17; digits++) {
		n = snprintf(buf, sizeof(buf) - 2, "%.*g", digits, v);
		if (strtod(buf, NULL) == v)
			break;
	}
	/* A reader must see a floating-point number, not an integer. */
	if (!memchr(buf, '.', (size_t)n) && !memchr(buf, 'e', (size_t)n)) {
		buf[n++] = '.';
		buf[n++] = '0';
	}
	put(w, buf, (size_t)n);
}

void kvp_jw_bool(struct kvp_jw *w, int v)
{
	if (begin_value(w))
		put(w, v ? "true" : "false", v ? 4 : 5);
}

void kvp_jw_null(struct kvp_jw *w)
{
	if (begin_value(w))
		put(w, "null", 4);
}

void kvp_jw_raw(struct kvp_jw *w, const char *text, size_t len)
{
	if (begin_value(w))
		put(w, text, len);
}

/* A scalar, or the opening of a container (return 1). */
static int write_one(struct kvp_jw *w, struct kvp_json_val v)
{
	uint64_t u;
	int64_t i;
	double d = INFINITY;
	int b = 0;
	const char *s;
	size_t len;
	switch (kvp_json_type(v)) {
	case KVP_JSON_OBJ:
		kvp_jw_obj(w);
		return 1;
	case KVP_JSON_ARR:
		kvp_jw_arr(w);
		return 1;
	case KVP_JSON_INT:
		if (kvp_json_i64(v, &i) == KVP_OK)
			kvp_jw_i64(w, i);
		else if (kvp_json_u64(v, &u) == KVP_OK)
			kvp_jw_u64(w, u);
		return 0;
	case KVP_JSON_DOUBLE:
		(void)kvp_json_double(v, &d); /* beyond a double: stays infinite, written as null */
		kvp_jw_f64(w, d);
		return 0;
	case KVP_JSON_STR:
		if (kvp_json_str(v, &s, &len) == KVP_OK)
			kvp_jw_strn(w, s, len);
		return 0;
	case KVP_JSON_BOOL:
		(void)kvp_json_bool(v, &b);
		kvp_jw_bool(w, b);
		return 0;
	case KVP_JSON_NULL:
		break;
	}
	kvp_jw_null(w);
	return 0;
}

void kvp_jw_val(struct kvp_jw *w, struct kvp_json_val v)
{
	struct kvp_json_iter it[KVP_JSON_DEPTH_MAX];
	uint32_t depth = 0;
	if (w->err || !write_one(w, v))
		return;
	it[depth++] = kvp_json_each(v);
	while (depth && !w->err) {
		struct kvp_json_iter *top = &it[depth - 1];
		if (!kvp_json_next(top)) {
			kvp_jw_end(w);
			depth--;
			continue;
		}
		if (top->is_obj)
			kvp_jw_keyn(w, top->key, top->key_len);
		if (write_one(w, top->val)) {
			KVP_ASSERT(depth < KVP_JSON_DEPTH_MAX);
			it[depth++] = kvp_json_each(top->val);
		}
	}
}

void kvp_jw_kstr(struct kvp_jw *w, const char *key, const char *s)
{
	kvp_jw_key(w, key);
	kvp_jw_str(w, s);
}

void kvp_jw_ku64(struct kvp_jw *w, const char *key, uint64_t v)
{
	kvp_jw_key(w, key);
	kvp_jw_u64(w, v);
}

void kvp_jw_kbool(struct kvp_jw *w, const char *key, int v)
{
	kvp_jw_key(w, key);
	kvp_jw_bool(w, v);
}
