#include "daemons/sidecar/body.h"

#include <kvpick/err.h>
#include <string.h>

#define EDIT_MAX 16

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

/* One value; the kinds of brackets are the parser's business. */
static int value(struct scan *c)
{
	uint64_t depth = 0, from = c->at;
	while (c->at < c->end) {
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

int kvp_span_first(const char *text, struct kvp_span arr, struct kvp_span *val)
{
	struct scan c;
	int rc = open_in(&c, text, arr, '[');
	if (rc)
		return rc;
	blanks(&c);
	if (is_at(&c, ']'))
		return KVP_ERR_NOTFOUND;
	uint64_t from = c.at;
	if (value(&c))
		return KVP_ERR_PROTO;
	*val = (struct kvp_span){from, c.at - from};
	return KVP_OK;
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
	/* Members are added once: the room for all of it is known well enough. */
	rc = kvp_http_buf_room(out, obj.len + 1024);
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
