#include "daemons/sidecar/usage.h"

#include <kvpick/err.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>

#include "daemons/sidecar/sidecar.h"

#define DETAILS "prompt_tokens_details"
#define CACHED "cached_tokens"

static int is_type(const char *v, uint32_t len, const char *type)
{
	size_t n = strlen(type);
	return len >= n && strncasecmp(v, type, n) == 0 &&
	       (len == n || v[n] == ';' || v[n] == ' ' || v[n] == '\t');
}

enum kvp_usage_form kvp_usage_form(const struct kvp_http_head *h)
{
	uint32_t len = 0, cnt = 0;
	const char *v = kvp_http_head_find(h, "content-encoding", &len, &cnt);
	if (v && !is_type(v, len, "identity"))
		return KVP_USAGE_RAW;
	v = kvp_http_head_find(h, "content-type", &len, &cnt);
	if (!v)
		return KVP_USAGE_RAW;
	if (is_type(v, len, "text/event-stream"))
		return KVP_USAGE_EVENTS;
	return is_type(v, len, "application/json") ? KVP_USAGE_JSON : KVP_USAGE_RAW;
}

uint64_t kvp_usage_cached(const char *text, uint64_t len)
{
	struct kvp_span usage, details, cached;
	uint64_t n = 0;
	if (kvp_span_member(text, kvp_span_all(len), "usage", &usage) ||
		kvp_span_member(text, usage, DETAILS, &details) ||
		kvp_span_member(text, details, CACHED, &cached) || kvp_span_u64(text, cached, &n))
		return 0;
	return n;
}

/* Most pieces of a stream have no usage: they need no look at their members. A name may be spelled with
 * escapes. */
static int may_have_usage(const char *text, uint64_t len)
{
	return memmem(text, len, "\"usage\"", 7) || memmem(text, len, "\\u00", 4);
}

static int has_usage(const char *text, uint64_t len)
{
	struct kvp_span usage;
	return kvp_pd_valid(text, len) == KVP_OK &&
	       kvp_span_member(text, kvp_span_all(len), "usage", &usage) == KVP_OK &&
	       kvp_span_is_object(text, usage);
}

/* Appends text with one more member, written with a comma before it, at the end of the object at obj. */
static int put_member(
	const char *text, uint64_t len, struct kvp_span obj, const char *member, struct kvp_http_buf *out)
{
	const struct kvp_span brace = {obj.at + obj.len - 1, 0};
	uint64_t last = brace.at;
	while (strchr(" \t\r\n", text[last - 1]))
		last--;
	if (text[last - 1] == '{')
		member++;
	return kvp_text_replace(text, len, brace, member, strlen(member), out);
}

/* A number in its place keeps its place; what is missing comes last in its object. */
static int put_set(
	const char *text, uint64_t len, struct kvp_span obj, uint64_t cached_tok, struct kvp_http_buf *out)
{
	struct kvp_span usage, details, cached;
	char number[24], object[48], member[96];
	snprintf(number, sizeof(number), "%llu", (unsigned long long)cached_tok);
	snprintf(object, sizeof(object), "{\"" CACHED "\":%s}", number);
	int rc = kvp_span_member(text, obj, "usage", &usage);
	if (rc)
		return rc;
	rc = kvp_span_member(text, usage, DETAILS, &details);
	if (rc == KVP_ERR_NOTFOUND) {
		snprintf(member, sizeof(member), ",\"" DETAILS "\":%s", object);
		return put_member(text, len, usage, member, out);
	}
	if (rc)
		return rc;
	if (text[details.at] != '{')
		return kvp_text_replace(text, len, details, object, strlen(object), out);
	rc = kvp_span_member(text, details, CACHED, &cached);
	if (rc == KVP_ERR_NOTFOUND) {
		snprintf(member, sizeof(member), ",\"" CACHED "\":%s", number);
		return put_member(text, len, details, member, out);
	}
	return rc ? rc : kvp_text_replace(text, len, cached, number, strlen(number), out);
}

/* A complete piece. */
static int put_piece(const struct kvp_usage *u, const char *text, uint64_t len, struct kvp_http_buf *out)
{
	uint64_t at = 0;
	if (u->form == KVP_USAGE_EVENTS) {
		if (len < 5 || memcmp(text, "data:", 5) != 0)
			return kvp_http_buf_put(out, text, len);
		at = 5;
	}
	if (!may_have_usage(text + at, len - at) || !has_usage(text + at, len - at))
		return kvp_http_buf_put(out, text, len);
	return put_set(text, len, (struct kvp_span){at, len - at}, u->cached_tok, out);
}

enum part { PART_MORE, PART_LAST };

/* One piece, or the part of it that is here. */
static int feed_piece(
	struct kvp_usage *u, const char *data, uint64_t len, enum part part, struct kvp_http_buf *out)
{
	int rc = KVP_OK, ends = part == PART_LAST;
	uint64_t most = u->is_tight && (!ends || u->held.len) ? 0 : KVP_USAGE_HELD_MAX;
	if (u->skips || u->held.len + len > most) {
		rc = kvp_http_buf_put(out, u->held.p, u->held.len);
		rc = rc ? rc : kvp_http_buf_put(out, data, len);
		kvp_http_buf_free(&u->held);
		u->long_cnt += !u->skips;
		u->skips = !ends;
	} else if (ends && !u->held.len) {
		rc = put_piece(u, data, len, out);
	} else {
		rc = kvp_http_buf_put(&u->held, data, len);
		if (ends && !rc) {
			rc = put_piece(u, u->held.p, u->held.len, out);
			kvp_http_buf_trim(&u->held);
		}
	}
	return rc;
}

/* The end of the line at p, NULL if it is not here. *lf: the next LF or the end of the text; NULL or before
 * p: not looked for yet. */
static const char *line_end(const char *p, const char *end, const char **lf)
{
	if (!*lf || *lf < p) {
		const char *found = memchr(p, '\n', (size_t)(end - p));
		*lf = found ? found : end;
	}
	const char *cr = memchr(p, '\r', (size_t)(*lf - p));
	if (cr)
		return cr + 1;
	return *lf < end ? *lf + 1 : NULL;
}

int kvp_usage_feed(struct kvp_usage *u, const char *data, uint64_t len, struct kvp_http_buf *out)
{
	const char *p = data, *end = data + len, *lf = NULL;
	int rc = KVP_OK;
	if (u->form == KVP_USAGE_RAW)
		return kvp_http_buf_put(out, data, len);
	if (u->form == KVP_USAGE_JSON)
		return feed_piece(u, data, len, PART_MORE, out);
	while (p < end && !rc) {
		const char *line = p;
		p = line_end(line, end, &lf);
		enum part part = p ? PART_LAST : PART_MORE;
		p = p ? p : end;
		rc = feed_piece(u, line, (uint64_t)(p - line), part, out);
	}
	return rc;
}

int kvp_usage_end(struct kvp_usage *u, struct kvp_http_buf *out)
{
	return u->held.len ? feed_piece(u, "", 0, PART_LAST, out) : KVP_OK;
}

void kvp_usage_free(struct kvp_usage *u)
{
	kvp_http_buf_free(&u->held);
}
