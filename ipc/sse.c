#include "ipc/sse.h"

#include <stdlib.h>
#include <string.h>

void kvp_usage_open(
	struct kvp_usage_scan *u, enum kvp_usage_form form, struct kvp_json *json, size_t body_max_bytes)
{
	memset(u, 0, sizeof(*u));
	u->form = form;
	u->json = json;
	u->max = form == KVP_USAGE_SSE ? KVP_USAGE_LINE_MAX : body_max_bytes;
}

void kvp_usage_close(struct kvp_usage_scan *u)
{
	free(u->buf);
	u->buf = NULL;
	u->len = u->cap = 0;
}

static int is_white(char c)
{
	return c == ' ' || c == '\t' || c == '\r' || c == '\n' || c == '\v' || c == '\f';
}

static void member(struct kvp_json_val obj, const char *name, uint32_t bit, uint64_t *out, uint32_t *has)
{
	struct kvp_json_val v;
	if (kvp_json_get(obj, name, &v) == KVP_OK && kvp_json_u64(v, out) == KVP_OK)
		*has |= bit;
}

/* 1: the text is a JSON object with an object called usage. */
static int usage_of(struct kvp_json *json, const char *text, size_t len, struct kvp_usage *out)
{
	struct kvp_json_val root, use, part;
	struct kvp_usage n = {.has = 0};
	if (!memmem(text, len, "\"usage\"", 7) ||
		kvp_json_parse(json, text, len, KVP_JSON_DEPTH_MAX, &root, NULL) ||
		kvp_json_get(root, "usage", &use) || kvp_json_type(use) != KVP_JSON_OBJ)
		return 0;
	member(use, "prompt_tokens", KVP_USAGE_HAS_PROMPT, &n.prompt_tok, &n.has);
	member(use, "completion_tokens", KVP_USAGE_HAS_COMPLETION, &n.completion_tok, &n.has);
	member(use, "total_tokens", KVP_USAGE_HAS_TOTAL, &n.total_tok, &n.has);
	if (kvp_json_get(use, "prompt_tokens_details", &part) == KVP_OK)
		member(part, "cached_tokens", KVP_USAGE_HAS_CACHED, &n.cached_tok, &n.has);
	*out = n;
	return 1;
}

static void line(struct kvp_usage_scan *u, const char *s, size_t len)
{
	const char *end = s + len;
	while (s < end && is_white(*s))
		s++;
	if (end - s < 5 || memcmp(s, "data:", 5) != 0)
		return;
	for (s += 5; s < end && is_white(*s);)
		s++;
	while (end > s && is_white(end[-1]))
		end--;
	if (s == end || (end - s == 6 && !memcmp(s, "[DONE]", 6)))
		return;
	u->event_cnt++;
	usage_of(u->json, s, (size_t)(end - s), &u->last);
}

static int keep(struct kvp_usage_scan *u, const char *data, size_t len)
{
	if (len > u->max - u->len)
		return 0;
	if (u->len + len > u->cap) {
		size_t cap = 2 * (u->len + len) < 512 ? 512 : 2 * (u->len + len);
		cap = cap < u->max ? cap : u->max;
		char *buf = realloc(u->buf, cap);
		if (!buf)
			return 0;
		u->buf = buf;
		u->cap = cap;
	}
	memcpy(u->buf + u->len, data, len);
	u->len += len;
	return 1;
}

static void feed_lines(struct kvp_usage_scan *u, const char *data, size_t len)
{
	const char *end = data + len;
	for (const char *nl; (nl = memchr(data, '\n', (size_t)(end - data))); data = nl + 1) {
		if (!u->len) {
			line(u, data, (size_t)(nl - data));
			continue;
		}
		if (keep(u, data, (size_t)(nl - data)))
			line(u, u->buf, u->len);
		else
			u->dropped++;
		u->len = 0;
	}
	if (data < end && !keep(u, data, (size_t)(end - data))) {
		u->dropped++;
		u->len = 0;
	}
}

void kvp_usage_read(struct kvp_usage_scan *u, const char *data, size_t len)
{
	if (!len)
		return;
	if (u->form == KVP_USAGE_SSE) {
		feed_lines(u, data, len);
	} else if (!u->dropped && !keep(u, data, len)) {
		u->dropped++; /* the rest of a document tells nothing */
		u->len = 0;
	}
}

int kvp_usage_done(struct kvp_usage_scan *u, struct kvp_usage *out)
{
	struct kvp_usage found = {.has = 0};
	int any;
	if (u->form == KVP_USAGE_SSE) {
		if (u->len)
			line(u, u->buf, u->len);
		found = u->last;
		any = u->last.has != 0;
	} else {
		any = u->len && usage_of(u->json, u->buf, u->len, &found) && found.has;
	}
	u->len = 0;
	if (!any)
		return KVP_ERR_NOTFOUND;
	*out = found;
	return KVP_OK;
}
