/* bench/load/trace.c — see trace.h. The scanner knows the few shapes that such files have. */
#include "bench/load/trace.h"
#include "bench/sim/prompt.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MS_NS 1000000ull

struct scan {
	const char *p, *end;
};

enum { HAS_TIME = 1, HAS_IN = 2, HAS_OUT = 4, HAS_IDS = 8, HAS_ALL = 15 };

int kvp_trace_add(struct kvp_trace *t, uint64_t at_ns, uint32_t prompt_tok, uint32_t out_tok,
	const uint64_t *id, uint32_t id_cnt)
{
	if (t->req_cnt == t->req_max) {
		size_t max = t->req_max ? 2 * t->req_max : 1024;
		struct kvp_trace_req *p = realloc(t->req, max * sizeof(*p));
		if (!p)
			return KVP_ERR_SYS;
		t->req = p;
		t->req_max = max;
	}
	if (t->id_cnt + id_cnt > t->id_max) {
		size_t max = 2 * t->id_max + id_cnt + 1024;
		uint64_t *p = realloc(t->id, max * sizeof(*p));
		if (!p)
			return KVP_ERR_SYS;
		t->id = p;
		t->id_max = max;
	}
	if (id_cnt)
		memcpy(t->id + t->id_cnt, id, id_cnt * sizeof(*id));
	t->req[t->req_cnt++] = (struct kvp_trace_req){.at_ns = at_ns,
		.prompt_tok = prompt_tok,
		.out_tok = out_tok,
		.id_off = t->id_cnt,
		.id_cnt = id_cnt};
	t->id_cnt += id_cnt;
	return KVP_OK;
}

static void skip_space(struct scan *s)
{
	while (s->p < s->end && (*s->p == ' ' || *s->p == '\t' || *s->p == '\r' || *s->p == '\n'))
		s->p++;
}

static int take(struct scan *s, char c)
{
	skip_space(s);
	if (s->p == s->end || *s->p != c)
		return 0;
	s->p++;
	return 1;
}

static int scan_u64(struct scan *s, uint64_t max, uint64_t *out)
{
	skip_space(s);
	uint64_t v = 0;
	const char *first = s->p;
	for (; s->p < s->end && *s->p >= '0' && *s->p <= '9'; s->p++) {
		if (v > (UINT64_MAX - 9) / 10)
			return KVP_ERR_PROTO;
		v = v * 10 + (uint64_t)(*s->p - '0');
	}
	if (s->p < s->end && *s->p == '.') { /* a time such as 27.0: the fraction is dropped */
		s->p++;
		while (s->p < s->end && *s->p >= '0' && *s->p <= '9')
			s->p++;
	}
	if (s->p == first || v > max)
		return KVP_ERR_PROTO;
	*out = v;
	return KVP_OK;
}

static int scan_str(struct scan *s, const char **str, size_t *len)
{
	if (!take(s, '"'))
		return KVP_ERR_PROTO;
	const char *first = s->p;
	while (s->p < s->end && *s->p != '"')
		s->p += *s->p == '\\' ? 2 : 1;
	if (s->p >= s->end)
		return KVP_ERR_PROTO;
	*str = first;
	*len = (size_t)(s->p++ - first);
	return KVP_OK;
}

/* skip_value passes over a scalar or an array of scalars. */
static int skip_value(struct scan *s)
{
	const char *str;
	size_t len;
	skip_space(s);
	if (s->p < s->end && *s->p == '"')
		return scan_str(s, &str, &len);
	if (take(s, '[')) {
		while (!take(s, ']'))
			if (skip_value(s) || (!take(s, ',') && (s->p == s->end || *s->p != ']')))
				return KVP_ERR_PROTO;
		return KVP_OK;
	}
	const char *first = s->p;
	while (s->p < s->end && strchr("+-.0123456789aeEflnrstu", *s->p))
		s->p++;
	return s->p > first ? KVP_OK : KVP_ERR_PROTO;
}

/* scan_ids appends the ids of an array to the trace's id store, behind those that belong to requests. */
static int scan_ids(struct kvp_trace *t, struct scan *s, uint32_t *cnt)
{
	*cnt = 0;
	if (!take(s, '['))
		return KVP_ERR_PROTO;
	if (take(s, ']'))
		return KVP_OK;
	do {
		if (t->id_cnt + *cnt == t->id_max) {
			size_t max = 2 * t->id_max + 1024;
			uint64_t *p = realloc(t->id, max * sizeof(*p));
			if (!p)
				return KVP_ERR_SYS;
			t->id = p;
			t->id_max = max;
		}
		if (scan_u64(s, UINT64_MAX, &t->id[t->id_cnt + *cnt]))
			return KVP_ERR_PROTO;
		++*cnt;
	} while (take(s, ','));
	return take(s, ']') ? KVP_OK : KVP_ERR_PROTO;
}

static int key_is(const char *s, size_t len, const char *key)
{
	return len == strlen(key) && !memcmp(s, key, len);
}

int kvp_trace_line(struct kvp_trace *t, const char *text, size_t len, uint64_t last_ms)
{
	struct scan s = {text, text + len};
	uint64_t ms = 0, in_tok = 0, out_tok = 0;
	uint32_t id_cnt = 0, seen = 0, bit;
	if (!take(&s, '{'))
		return KVP_ERR_PROTO;
	do {
		const char *key;
		size_t key_len;
		int rc;
		if (scan_str(&s, &key, &key_len) || !take(&s, ':'))
			return KVP_ERR_PROTO;
		if (key_is(key, key_len, "timestamp"))
			rc = scan_u64(&s, UINT64_MAX / MS_NS, &ms), bit = HAS_TIME;
		else if (key_is(key, key_len, "input_length"))
			rc = scan_u64(&s, KVP_TRACE_PROMPT_MAX_TOK, &in_tok), bit = HAS_IN;
		else if (key_is(key, key_len, "output_length"))
			rc = scan_u64(&s, KVP_TRACE_PROMPT_MAX_TOK, &out_tok), bit = HAS_OUT;
		else if (key_is(key, key_len, "hash_ids"))
			rc = scan_ids(t, &s, &id_cnt), bit = HAS_IDS;
		else
			rc = skip_value(&s), bit = 0;
		if (rc || (seen & bit))
			return rc ? rc : KVP_ERR_PROTO;
		seen |= bit;
	} while (take(&s, ','));
	if (!take(&s, '}') || seen != HAS_ALL || ms < last_ms || !in_tok)
		return KVP_ERR_PROTO;
	skip_space(&s);
	if (s.p != s.end || id_cnt != (in_tok + KVP_PROMPT_BLOCK_TOK - 1) / KVP_PROMPT_BLOCK_TOK)
		return KVP_ERR_PROTO;
	/* The ids already stand where the next request's belong. */
	size_t off = t->id_cnt;
	int rc = kvp_trace_add(t, ms * MS_NS, (uint32_t)in_tok, (uint32_t)out_tok, NULL, 0);
	if (rc)
		return rc;
	t->req[t->req_cnt - 1].id_off = off;
	t->req[t->req_cnt - 1].id_cnt = id_cnt;
	t->id_cnt += id_cnt;
	return KVP_OK;
}

static int is_blank(const char *s)
{
	return s[strspn(s, " \t\r\n")] == 0;
}

int kvp_trace_read(struct kvp_trace *t, const char *path, size_t limit, size_t *line)
{
	FILE *f = fopen(path, "re");
	char *buf = NULL;
	size_t cap = 0, before = t->req_cnt;
	ssize_t n;
	int rc = KVP_OK;
	*line = 0;
	if (!f)
		return KVP_ERR_SYS;
	while (!rc && (!limit || t->req_cnt - before < limit) && (n = getline(&buf, &cap, f)) >= 0) {
		++*line;
		uint64_t last_ms = t->req_cnt > before ? t->req[t->req_cnt - 1].at_ns / MS_NS : 0;
		if (!is_blank(buf))
			rc = kvp_trace_line(t, buf, (size_t)n, last_ms);
	}
	if (!rc && ferror(f))
		rc = KVP_ERR_SYS;
	free(buf);
	fclose(f);
	return rc;
}

void kvp_trace_spread(struct kvp_trace *t)
{
	uint64_t gap_ns = 0;
	for (size_t first = 0, next; first < t->req_cnt; first = next) {
		uint64_t at_ns = t->req[first].at_ns;
		for (next = first; next < t->req_cnt && t->req[next].at_ns == at_ns;)
			next++;
		if (next < t->req_cnt)
			gap_ns = t->req[next].at_ns - at_ns;
		for (size_t i = first; i < next; i++)
			t->req[i].at_ns = at_ns + gap_ns * (i - first) / (next - first);
	}
}

void kvp_trace_free(struct kvp_trace *t)
{
	free(t->req);
	free(t->id);
	*t = (struct kvp_trace){0};
}
