#include "daemons/sidecar/body.h"

#include <kvpick/err.h>
#include <string.h>

#define EDIT_MAX 16
#define EDIT_ROOM_BYTES 4096

/* A place in a text: everything before end may be read. */
struct scan {
	const char *s;
	uint64_t at, end;
};

static void blanks(struct scan *c)
{
	while (c->at < c->end &&
		(c->s[c->at] == ' ' || c->s[c->at] == '\t' || c->s[c->at] == '\n' || c->s[c->at] == '\r'))
		c->at++;
}

static int is_at(const struct scan *c, char b)
{
	return c->at < c->end && c->s[c->at] == b;
}

/* From quote to quote; the place of the next quote is kept while escapes before it are passed over. */
static int string(struct scan *c)
{
	const char *end = c->s + c->end, *p = c->s + c->at, *quote = NULL;
	if (!is_at(c, '"'))
		return KVP_ERR_PROTO;
	for (p++; p < end;) {
		if (!quote || quote < p)
			quote = memchr(p, '"', (size_t)(end - p));
		if (!quote)
			break;
		const char *escape = memchr(p, '\\', (size_t)(quote - p));
		if (!escape) {
			c->at = (uint64_t)(quote - c->s) + 1;
			return KVP_OK;
		}
		p = escape + 2;
	}
	c->at = c->end;
	return KVP_ERR_PROTO;
}

/* Inside brackets only these matter. */
static int stops(char b)
{
	return b == '"' || (b | 32) == '{' || (b | 32) == '}';
}

static void skip(struct scan *c)
{
	const char *p = c->s + c->at, *end = c->s + c->end;
	while (p < end && !stops(*p))
		p++;
	c->at = (uint64_t)(p - c->s);
}

/* One value; the kinds of brackets are the parser's business. */
static int value(struct scan *c)
{
	uint64_t depth = 0, from = c->at;
	while (c->at < c->end) {
		if (depth)
			skip(c);
		if (c->at == c->end)
			break;
		char b = c->s[c->at];
		if (b == '"') {
			if (string(c))
				return KVP_ERR_PROTO;
			if (!depth)
				return KVP_OK;
			continue;
		}
		if (b == '{' || b == '[') {
			depth++;
		} else if (b == '}' || b == ']') {
			if (!depth)
				break;
			if (!--depth) {
				c->at++;
				return KVP_OK;
			}
		} else if (!depth && (b == ',' || b == ' ' || b == '\t' || b == '\n' || b == '\r')) {
			break;
		}
		c->at++;
	}
	return depth || c->at == from ? KVP_ERR_PROTO : KVP_OK;
}

static int hex4(const char *s, uint32_t *out)
{
	uint32_t v = 0;
	for (int i = 0; i < 4; i++) {
		char c = s[i];
		int d = c >= '0' && c <= '9'		     ? c - '0'
			: (c | 32) >= 'a' && (c | 32) <= 'f' ? (c | 32) - 'a' + 10
							     : -1;
		if (d < 0)
			return KVP_ERR_PROTO;
		v = v << 4 | (uint32_t)d;
	}
	*out = v;
	return KVP_OK;
}

/* Whether the string at span (with its quotes) spells key, which is ASCII. */
static int spells(const char *s, struct kvp_span v, const char *key)
{
	uint64_t at = v.at + 1, end = v.at + v.len - 1;
	for (; *key && at < end; key++, at++) {
		uint32_t c = (unsigned char)s[at];
		if (c == '\\') {
			static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
			const char *e = ++at < end ? strchr(from, s[at]) : NULL;
			if (e && *e) {
				c = (unsigned char)to[e - from];
			} else {
				if (at + 4 >= end || s[at] != 'u' || hex4(s + at + 1, &c))
					return 0;
				at += 4;
			}
		}
		if (c != (unsigned char)*key)
			return 0;
	}
	return !*key && at == end;
}

/* Members of an object: seg is everything between the braces and commas around one. */
struct member {
	struct kvp_span seg, key, val;
};

static int open_in(struct scan *c, const char *text, struct kvp_span in, char bracket)
{
	*c = (struct scan){text, in.at, in.at + in.len};
	blanks(c);
	if (!is_at(c, bracket))
		return KVP_ERR_PROTO;
	c->at++;
	return KVP_OK;
}

/* KVP_OK and the next member; KVP_ERR_NOTFOUND: the object ends, c stands on its brace; KVP_ERR_PROTO. */
static int next(struct scan *c, struct member *m)
{
	uint64_t from = c->at;
	blanks(c);
	if (is_at(c, '}'))
		return KVP_ERR_NOTFOUND;
	m->key.at = c->at;
	if (string(c))
		return KVP_ERR_PROTO;
	m->key.len = c->at - m->key.at;
	blanks(c);
	if (!is_at(c, ':'))
		return KVP_ERR_PROTO;
	c->at++;
	blanks(c);
	m->val.at = c->at;
	if (value(c))
		return KVP_ERR_PROTO;
	m->val.len = c->at - m->val.at;
	blanks(c);
	m->seg = (struct kvp_span){from, c->at - from};
	if (is_at(c, ','))
		c->at++;
	else if (!is_at(c, '}'))
		return KVP_ERR_PROTO;
	return KVP_OK;
}

int kvp_span_member(const char *text, struct kvp_span obj, const char *key, struct kvp_span *val)
{
	struct scan c;
	struct member m;
	int rc = open_in(&c, text, obj, '{'), found = KVP_ERR_NOTFOUND;
	struct kvp_span last = {0};
	while (!rc && !(rc = next(&c, &m)))
		if (spells(text, m.key, key)) {
			last = m.val;
			found = KVP_OK;
		}
	if (rc != KVP_ERR_NOTFOUND)
		return rc;
	if (!found)
		*val = last;
	return found;
}

int kvp_span_members(const char *text, struct kvp_span obj, struct kvp_member *want, size_t cnt)
{
	struct scan c;
	struct member m;
	int rc = open_in(&c, text, obj, '{');
	for (size_t i = 0; i < cnt; i++)
		want[i] = (struct kvp_member){.key = want[i].key};
	while (!rc && !(rc = next(&c, &m)))
		for (size_t i = 0; i < cnt; i++)
			if (spells(text, m.key, want[i].key)) {
				want[i].val = m.val;
				want[i].cnt++;
			}
	return rc == KVP_ERR_NOTFOUND ? KVP_OK : rc;
}

int kvp_span_each(const char *text, struct kvp_span arr, struct kvp_span_iter *it)
{
	struct scan c;
	if (open_in(&c, text, arr, '['))
		return KVP_ERR_PROTO;
	*it = (struct kvp_span_iter){text, c.at, c.end};
	return KVP_OK;
}

int kvp_span_next(struct kvp_span_iter *it, struct kvp_span *val)
{
	struct scan c = {it->text, it->at, it->end};
	blanks(&c);
	uint64_t from = c.at;
	if (value(&c)) /* also at the closing bracket */
		return 0;
	*val = (struct kvp_span){from, c.at - from};
	blanks(&c);
	it->at = is_at(&c, ',') ? c.at + 1 : c.at;
	return 1;
}

int kvp_span_first(const char *text, struct kvp_span arr, struct kvp_span *val)
{
	struct kvp_span_iter it;
	if (kvp_span_each(text, arr, &it))
		return KVP_ERR_PROTO;
	return kvp_span_next(&it, val) ? KVP_OK : KVP_ERR_NOTFOUND;
}

int kvp_span_is(const char *text, struct kvp_span v, const char *what)
{
	size_t len = strlen(what);
	return v.len == len && memcmp(text + v.at, what, len) == 0;
}

int kvp_span_spells(const char *text, struct kvp_span v, const char *word)
{
	return v.len >= 2 && text[v.at] == '"' && spells(text, v, word);
}

/* Digits only; *out up to max. */
static int digits(const char *p, uint64_t len, uint64_t max, uint64_t *out)
{
	uint64_t n = 0;
	if (!len)
		return KVP_ERR_INVAL;
	for (uint64_t i = 0; i < len; i++) {
		uint64_t d = (uint64_t)(unsigned char)p[i] - '0';
		if (d > 9 || n > (max - d) / 10)
			return KVP_ERR_INVAL;
		n = n * 10 + d;
	}
	*out = n;
	return KVP_OK;
}

int kvp_span_u64(const char *text, struct kvp_span v, uint64_t *out)
{
	return digits(text + v.at, v.len, UINT64_MAX, out);
}

int kvp_span_is_int(const char *text, struct kvp_span v)
{
	uint64_t n;
	if (v.len && text[v.at] == '-')
		return digits(text + v.at + 1, v.len - 1, UINT64_C(1) << 63, &n) == KVP_OK;
	return digits(text + v.at, v.len, UINT64_MAX, &n) == KVP_OK;
}

static int put(struct kvp_http_buf *out, const char *text, uint64_t from, uint64_t to)
{
	return kvp_http_buf_put(out, text + from, to - from);
}

static int put_new(struct kvp_http_buf *out, const struct kvp_edit *e, int first)
{
	int rc = kvp_http_buf_put(out, first ? "\"" : ",\"", first ? 1 : 2);
	rc = rc ? rc : kvp_http_buf_put(out, e->key, strlen(e->key));
	rc = rc ? rc : kvp_http_buf_put(out, "\":", 2);
	return rc ? rc : kvp_http_buf_put(out, e->val, e->val_len);
}

int kvp_span_edit(const char *text, struct kvp_span obj, const struct kvp_edit *edit, size_t edit_cnt,
	struct kvp_http_buf *out)
{
	struct scan c;
	struct member m;
	int rc = open_in(&c, text, obj, '{'), kept = 0;
	uint32_t seen = 0;
	if (rc || edit_cnt > EDIT_MAX)
		return KVP_ERR_PROTO;
	/* What is added, and the head of a request before it, is known well enough. */
	rc = kvp_http_buf_room(out, obj.len + EDIT_ROOM_BYTES);
	rc = rc ? rc : put(out, text, obj.at, c.at);
	while (!rc && !(rc = next(&c, &m))) {
		int goes = 0;
		for (size_t i = 0; i < edit_cnt; i++)
			if (spells(text, m.key, edit[i].key)) {
				goes = 1;
				seen |= 1u << i;
			}
		if (goes)
			continue;
		if (kept)
			rc = kvp_http_buf_put(out, ",", 1);
		kept = 1;
		rc = rc ? rc : put(out, text, m.seg.at, m.seg.at + m.seg.len);
	}
	if (rc != KVP_ERR_NOTFOUND)
		return rc;
	rc = KVP_OK;
	for (size_t i = 0; i < edit_cnt && !rc; i++)
		if (edit[i].val && (edit[i].when == KVP_EDIT_ALWAYS || seen & 1u << i)) {
			rc = put_new(out, &edit[i], !kept);
			kept = 1;
		}
	return rc ? rc : put(out, text, c.at, obj.at + obj.len);
}

int kvp_text_replace(const char *text, uint64_t len, struct kvp_span old, const char *val, uint64_t val_len,
	struct kvp_http_buf *out)
{
	int rc = kvp_http_buf_room(out, len - old.len + val_len);
	rc = rc ? rc : put(out, text, 0, old.at);
	rc = rc ? rc : kvp_http_buf_put(out, val, val_len);
	return rc ? rc : put(out, text, old.at + old.len, len);
}
