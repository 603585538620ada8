#include "ipc/json_ids.h"

#include <stdlib.h>
#include <string.h>

/* A walk over the members of one object in a text that need not be valid: it never leaves the text, and on a
 * valid text it sees exactly the members. What it makes of an invalid one doesn't matter, because nothing is
 * accepted that the parser has not accepted, too. */
struct walk {
	const char *s, *end;
};

static void skip_white(struct walk *w)
{
	while (w->s < w->end && (*w->s == ' ' || *w->s == '\n' || *w->s == '\r' || *w->s == '\t'))
		w->s++;
}

static int take(struct walk *w, char c)
{
	skip_white(w);
	if (w->s == w->end || *w->s != c)
		return 0;
	w->s++;
	return 1;
}

/* From behind an opening quote to behind the closing one. */
static void skip_string(struct walk *w)
{
	const char *from = w->s;
	for (const char *q; (q = memchr(w->s, '"', (size_t)(w->end - w->s)));) {
		const char *b = q;
		while (b > from && b[-1] == '\\')
			b--;
		w->s = q + 1;
		if ((q - b) % 2 == 0)
			return;
	}
	w->s = w->end;
}

static void skip_value(struct walk *w)
{
	size_t depth = 0;
	skip_white(w);
	while (w->s < w->end) {
		switch (*w->s) {
		case '"':
			w->s++;
			skip_string(w);
			break;
		case '{':
		case '[':
			depth++;
			w->s++;
			break;
		case '}':
		case ']':
			if (depth)
				depth--;
			else
				return;
			w->s++;
			break;
		case ',':
			if (!depth)
				return;
			w->s++;
			break;
		default:
			w->s++;
			break;
		}
		if (!depth && w->s[-1] != ',' && (w->s[-1] == '"' || w->s[-1] == '}' || w->s[-1] == ']'))
			return;
	}
}

/* The next member: its name as spelled, and the walk at its value. The first call comes behind the brace. */
static int next_member(struct walk *w, const char **key, size_t *key_len)
{
	if (!take(w, '"'))
		return 0;
	*key = w->s;
	skip_string(w);
	*key_len = (size_t)(w->s - *key) - (w->s > *key ? 1 : 0);
	if (!take(w, ':'))
		return 0;
	skip_white(w);
	return 1;
}

static int after_member(struct walk *w)
{
	skip_value(w);
	return take(w, ',');
}

/* -- ids -- */

static int room_ids(struct kvp_json_ids *out, size_t n)
{
	if (n <= out->cap)
		return KVP_OK;
	uint32_t *id = malloc(n * sizeof(*id)); /* old contents are not wanted */
	if (!id)
		return KVP_ERR_FULL;
	free(out->id);
	out->id = id;
	out->cap = n;
	return KVP_OK;
}

/* A number of one to ten digits at s; *used 0 if it is none, too large, or has a needless zero before it. */
static uint64_t long_number(const char *s, size_t *used)
{
	uint64_t v = 0;
	size_t n = 0;
	for (; n <= 10 && s[n] >= '0' && s[n] <= '9'; n++)
		v = v * 10 + (uint64_t)(s[n] - '0');
	*used = n > 10 || v > UINT32_MAX || (n > 1 && *s == '0') ? 0 : n;
	return v;
}

/* Up to eight digits in one word: first the position of the first byte that is no digit, then all digits at
 * once. No branch depends on the length of a number, which changes from id to id. */
static uint64_t number(const char *s, size_t *used)
{
	uint64_t w;
	memcpy(&w, s, 8);
	w ^= 0x3030303030303030ull;
	uint64_t other = ((w + 0x7676767676767676ull) | w) & 0x8080808080808080ull;
	if (!other || (*s == '0' && (other & 0xff) == 0 && !(other & 0x8000)))
		return long_number(s, used);
	size_t n = (size_t)__builtin_ctzll(other) / 8;
	*used = n;
	if (!n)
		return 0;
	w <<= 64 - 8 * n;
	w = (w * 10 + (w >> 8)) & 0x00ff00ff00ff00ffull;
	w = (w * 100 + (w >> 16)) & 0x0000ffff0000ffffull;
	return (w * 10000 + (w >> 32)) & 0xffffffffull;
}

/* Reads "[1, 2]" at the walk and leaves it behind the bracket. 0: not that simple. */
static int ids_at(struct walk *w, struct kvp_json_ids *out)
{
	struct walk i = *w;
	if (!take(&i, '[') || room_ids(out, (size_t)(i.end - i.s) / 2 + 1))
		return 0;
	uint32_t *to = out->id;
	while (i.s < i.end) {
		size_t used;
		if (*i.s <= ' ')
			skip_white(&i);
		*to = (uint32_t)number(i.s, &used);
		if (!used || (size_t)(i.end - i.s) <= used)
			return 0;
		to++;
		i.s += used;
		if (*i.s != ',') {
			if (take(&i, ']')) {
				out->cnt = (size_t)(to - out->id);
				*w = i;
				return 1;
			}
			if (!take(&i, ','))
				return 0;
		} else {
			i.s++;
		}
	}
	return 0;
}

/* The text with the ids between from and to taken out, judged by the parser. KVP_ERR_AGAIN: the name occurs
 * twice after all. */
static int judge_rest(struct kvp_json *p, const char *text, size_t len, const char *key, const char *from,
	const char *to, struct kvp_json_ids *out, struct kvp_json_err *err)
{
	size_t head = (size_t)(from - text) + 1, tail = len - (size_t)(to - text) + 1;
	struct kvp_json_val root;
	if (out->rest_cap < head + tail + KVP_JSON_SLACK_BYTES) {
		size_t cap = head + tail + 4096;
		char *rest = malloc(cap);
		if (!rest)
			return KVP_ERR_FULL;
		free(out->rest);
		out->rest = rest;
		out->rest_cap = cap;
	}
	memcpy(out->rest, text, head);
	memcpy(out->rest + head, to - 1, tail);
	memset(out->rest + head + tail, 0, KVP_JSON_SLACK_BYTES);
	int rc = kvp_json_parse_slack(
		p, out->rest, head + tail, KVP_JSON_DEPTH_MAX, KVP_JSON_HAS_SLACK, &root, err);
	if (rc)
		return rc;
	if (kvp_json_type(root) == KVP_JSON_ARR) {
		struct kvp_json_iter el = kvp_json_each(root);
		if (kvp_json_len(root) != 1 || !kvp_json_next(&el))
			return KVP_ERR_INVAL;
		root = el.val;
	}
	size_t times = 0, key_len = strlen(key);
	struct kvp_json_iter it = kvp_json_each(root);
	while (kvp_json_next(&it))
		times += it.key_len == key_len && !memcmp(it.key, key, key_len);
	if (times != 1)
		return KVP_ERR_AGAIN;
	out->obj = root;
	return KVP_OK;
}

/* The whole text by the parser alone. */
static int ids_by_tree(struct kvp_json *p, const char *text, size_t len, const char *key,
	struct kvp_json_ids *out, struct kvp_json_err *err)
{
	struct kvp_json_val root, v;
	int rc = kvp_json_parse_slack(p, text, len, KVP_JSON_DEPTH_MAX, KVP_JSON_HAS_SLACK, &root, err);
	if (rc)
		return rc;
	if (kvp_json_type(root) == KVP_JSON_ARR && kvp_json_len(root) == 1) {
		struct kvp_json_iter el = kvp_json_each(root);
		kvp_json_next(&el);
		root = el.val;
	}
	if (kvp_json_type(root) != KVP_JSON_OBJ)
		return KVP_ERR_INVAL;
	out->obj = root;
	if (kvp_json_get(root, key, &v) || kvp_json_type(v) == KVP_JSON_NULL)
		return KVP_ERR_NOTFOUND;
	if (kvp_json_type(v) == KVP_JSON_ARR && kvp_json_len(v) == 1) {
		struct kvp_json_iter el = kvp_json_each(v);
		kvp_json_next(&el);
		if (kvp_json_type(el.val) == KVP_JSON_ARR)
			v = el.val;
	}
	if (kvp_json_type(v) != KVP_JSON_ARR)
		return KVP_ERR_INVAL;
	if (room_ids(out, kvp_json_len(v)))
		return KVP_ERR_FULL;
	rc = kvp_json_u32s(v, out->id, out->cap, &out->cnt);
	if (rc)
		out->cnt = 0;
	return rc == KVP_ERR_PROTO ? KVP_ERR_INVAL : rc;
}

int kvp_json_ids_read(struct kvp_json *p, const char *text, size_t len, const char *key,
	struct kvp_json_ids *out, struct kvp_json_err *err)
{
	struct walk w = {.s = text, .end = text + len};
	struct kvp_json_err own;
	const char *name;
	size_t name_len, key_len = strlen(key);
	err = err ? err : &own;
	if (out->cap > KVP_JSON_IDS_KEEP || out->rest_cap > KVP_JSON_IDS_KEEP)
		kvp_json_ids_free(out);
	out->obj = (struct kvp_json_val){NULL, 0};
	out->cnt = 0;
	take(&w, '[');
	if (len <= KVP_JSON_LEN_MAX && take(&w, '{'))
		do {
			if (!next_member(&w, &name, &name_len))
				break;
			const char *from = w.s;
			if (name_len != key_len || memcmp(name, key, key_len) != 0)
				continue;
			if (!ids_at(&w, out))
				break;
			int rc = judge_rest(p, text, len, key, from, w.s, out, err);
			if (rc == KVP_OK)
				return rc;
			out->cnt = 0;
			if (rc != KVP_ERR_AGAIN)
				return rc;
			break;
		} while (after_member(&w));
	return ids_by_tree(p, text, len, key, out, err);
}

void kvp_json_ids_free(struct kvp_json_ids *ids)
{
	free(ids->id);
	free(ids->rest);
	memset(ids, 0, sizeof(*ids));
}

/* -- the bytes of a value -- */

int kvp_json_span(
	const char *text, size_t len, struct kvp_json_val root, const char *key, size_t *off, size_t *n)
{
	size_t at = 0, wanted = 0, key_len = strlen(key), name_len;
	struct walk w = {.s = text, .end = text + len};
	const char *name;
	struct kvp_json_iter it = kvp_json_each(root);
	/* Which member it is says the parser, since its name may be spelled in several ways. */
	for (size_t i = 1; it.is_obj && kvp_json_next(&it); i++)
		if (it.key_len == key_len && !memcmp(it.key, key, key_len))
			wanted = i;
	if (!wanted || !take(&w, '{'))
		return KVP_ERR_NOTFOUND;
	do {
		if (!next_member(&w, &name, &name_len))
			return KVP_ERR_NOTFOUND;
		if (++at == wanted) {
			const char *from = w.s;
			skip_value(&w);
			while (w.s > from &&
				(w.s[-1] == ' ' || w.s[-1] == '\n' || w.s[-1] == '\r' || w.s[-1] == '\t'))
				w.s--;
			*off = (size_t)(from - text);
			*n = (size_t)(w.s - from);
			return KVP_OK;
		}
	} while (after_member(&w));
	return KVP_ERR_NOTFOUND;
}
