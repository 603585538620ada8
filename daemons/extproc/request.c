#include "daemons/extproc/request.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/random.h>

#include "ipc/json_out.h"

#define REQUEST_ID_MAX 256
#define KEEP_BYTES (4u << 20) /* memory for longer bodies is given back at the next request */
#define DEFAULT_PREFIX "x-dynamo-meta-"

__attribute__((format(printf, 3, 4))) static int fail(struct kvp_ask *a, int status, const char *fmt, ...)
{
	va_list ap;
	va_start(ap, fmt);
	vsnprintf(a->err, sizeof(a->err), fmt, ap);
	va_end(ap);
	return status;
}

int kvp_ask_open(struct kvp_ask_parser *p, const struct kvp_ask_cfg *cfg)
{
	memset(p, 0, sizeof(*p));
	p->cfg = *cfg;
	if (!p->cfg.metadata_prefix)
		p->cfg.metadata_prefix = DEFAULT_PREFIX;
	if (!p->cfg.pair_paths)
		p->cfg.pair_paths = "";
	if (getrandom(&p->rnd, sizeof(p->rnd), 0) != (ssize_t)sizeof(p->rnd))
		p->rnd = (uint64_t)(uintptr_t)p;
	p->json = kvp_json_new();
	return p->json ? KVP_OK : KVP_ERR_SYS;
}

void kvp_ask_close(struct kvp_ask_parser *p)
{
	kvp_json_free(p->json);
	kvp_json_ids_free(&p->ids);
	free(p->hash);
	free(p->blk_mm);
	memset(p, 0, sizeof(*p));
}

void kvp_ask_reset(struct kvp_ask *a)
{
	free(a->mem[0]);
	free(a->mem[1]);
	memset(a, 0, sizeof(*a));
}

/* keep moves the strings of a list into one block of the ask's own. */
static int keep(struct kvp_ask *a, uint32_t block, struct kvp_str **list, uint32_t cnt)
{
	size_t sum = 1;
	for (uint32_t i = 0; i < cnt; i++)
		sum += list[i]->len;
	char *to = malloc(sum);
	if (!to)
		return fail(a, 500, "out of memory");
	free(a->mem[block]);
	a->mem[block] = to;
	for (uint32_t i = 0; i < cnt; i++) {
		if (!list[i]->ptr)
			continue;
		memcpy(to, list[i]->ptr, list[i]->len);
		list[i]->ptr = to;
		to += list[i]->len;
	}
	return 0;
}

/* -- headers -- */

static int is_white(char c)
{
	return c == ' ' || (c >= '\t' && c <= '\r');
}

static struct kvp_str trim(struct kvp_str s)
{
	while (s.len && is_white(s.ptr[0])) {
		s.ptr++;
		s.len--;
	}
	while (s.len && is_white(s.ptr[s.len - 1]))
		s.len--;
	return s;
}

static int name_is(struct kvp_str s, const char *name)
{
	return s.len == strlen(name) && !strncasecmp(s.ptr, name, s.len);
}

/* Every byte sequence that UTF-8 allows, no other. */
static int is_utf8(struct kvp_str s)
{
	const unsigned char *p = (const unsigned char *)s.ptr, *end = p + s.len;
	while (p < end) {
		uint32_t c = *p++, n, low;
		if (c < 0x80)
			continue;
		if (c < 0xc2 || c > 0xf4)
			return 0;
		n = c < 0xe0 ? 1 : c < 0xf0 ? 2 : 3;
		if ((size_t)(end - p) < n)
			return 0;
		low = c == 0xe0 ? 0xa0 : c == 0xf0 ? 0x90 : 0x80;
		if (*p < low || *p > (c == 0xed ? 0x9f : c == 0xf4 ? 0x8f : 0xbf))
			return 0;
		for (p++; --n; p++)
			if (*p < 0x80 || *p > 0xbf)
				return 0;
	}
	return 1;
}

/* A decimal number with an optional sign; 1 if it lies in min..max. */
static int integer(struct kvp_str s, int64_t min, int64_t max, int64_t *out)
{
	int neg = s.len && *s.ptr == '-';
	int64_t v = 0;
	if (s.len && (*s.ptr == '-' || *s.ptr == '+')) {
		s.ptr++;
		s.len--;
	}
	if (!s.len)
		return 0;
	for (size_t i = 0; i < s.len; i++) {
		if (s.ptr[i] < '0' || s.ptr[i] > '9' || v > UINT32_MAX)
			return 0;
		v = v * 10 + (s.ptr[i] - '0');
	}
	v = neg ? -v : v;
	if (v < min || v > max)
		return 0;
	*out = v;
	return 1;
}

static struct kvp_str without_query(struct kvp_str path)
{
	const char *query = path.len ? memchr(path.ptr, '?', path.len) : NULL;
	if (query)
		path.len = (size_t)(query - path.ptr);
	return path;
}

static int ends_with(struct kvp_str s, const char *end, size_t n)
{
	return s.len >= n && !memcmp(s.ptr + s.len - n, end, n);
}

int kvp_ask_is_pair_path(const struct kvp_ask_parser *p, struct kvp_str path)
{
	path = trim(path);
	if (!path.len)
		return 1;
	path = without_query(path);
	for (const char *end = p->cfg.pair_paths; *end;) {
		size_t n = strcspn(end, ",");
		if (ends_with(path, end, n))
			return 1;
		end += n + (end[n] == ',');
	}
	return 0;
}

static enum kvp_ask_path path_of(struct kvp_str path)
{
	static const struct {
		const char *suffix;
		enum kvp_ask_path is;
	} known[] = {{"/v1/chat/completions", KVP_ASK_CHAT}, {"/v1/completions", KVP_ASK_COMPLETIONS},
		{"/inference/v1/generate", KVP_ASK_VLLM_GENERATE}};
	path = without_query(path);
	for (size_t i = 0; i < sizeof(known) / sizeof(known[0]); i++)
		if (ends_with(path, known[i].suffix, strlen(known[i].suffix)))
			return known[i].is;
	return path.len == 9 && !memcmp(path.ptr, "/generate", 9) ? KVP_ASK_SGLANG_GENERATE : KVP_ASK_OTHER;
}

/* What one pass over the headers collects beside the ask. */
struct head_walk {
	struct kvp_str session[4]; /* by precedence */
	struct kvp_str class_meta, class_header;
	struct kvp_str meta_key[KVP_ASK_META_MAX];
	uint32_t meta_cnt, priority_seen, strict_seen;
	uint64_t meta_bytes;
	enum { META_FITS, META_MANY, META_LONG } meta;
};

static void meta_field(struct head_walk *w, struct kvp_str key, struct kvp_str value)
{
	if (!is_utf8(value))
		return;
	for (uint32_t i = 0; i < w->meta_cnt; i++)
		if (w->meta_key[i].len == key.len && !strncasecmp(w->meta_key[i].ptr, key.ptr, key.len))
			return; /* the first one counts */
	if (w->meta != META_FITS)
		return;
	w->meta_bytes += key.len + value.len;
	if (w->meta_cnt == KVP_ASK_META_MAX)
		w->meta = META_MANY;
	else if (w->meta_bytes > KVP_ASK_META_BYTES_MAX)
		w->meta = META_LONG;
	else
		w->meta_key[w->meta_cnt++] = key;
	if (w->meta == META_FITS && name_is(key, "policy-class"))
		w->class_meta = value;
}

static void priority_field(struct kvp_ask *a, struct head_walk *w, struct kvp_str name, struct kvp_str value)
{
	int64_t v;
	if (name_is(name, "x-dynamo-request-priority") && !w->priority_seen++ &&
		integer(value, INT32_MIN, INT32_MAX, &v)) {
		a->has_priority = KVP_YES;
		a->priority_jump = v > 0 ? (double)v : 0;
	} else if (name_is(name, "x-dynamo-request-strict-priority") && !w->strict_seen++ &&
		   integer(value, 0, UINT32_MAX, &v)) {
		a->has_strict = KVP_YES;
		a->strict_priority = (uint32_t)v;
	}
}

static void x_field(struct kvp_ask *a, struct head_walk *w, struct kvp_str name, struct kvp_str value)
{
	if (name_is(name, "x-request-id") && !a->request_id.len)
		a->request_id = value;
	else if (name_is(name, "x-tenant-id") && value.len)
		a->tenant = value; /* the last one counts */
	else if (name_is(name, "x-dynamo-session-id") && !w->session[0].len)
		w->session[0] = value;
	else if (name_is(name, "x-session-id") && !w->session[1].len)
		w->session[1] = value;
	else if (name_is(name, "x-claude-code-session-id") && !w->session[2].len)
		w->session[2] = value;
	else if (name_is(name, "x-dynamo-session-final"))
		a->session_final = name_is(value, "true") ? KVP_YES : KVP_NO;
	else if (name_is(name, "x-dynamo-policy-class") && !w->class_header.len)
		w->class_header = value;
	else if (name_is(name, "x-dynamo-retry-attempt"))
		a->is_retry = KVP_YES;
	else
		priority_field(a, w, name, value);
}

static void field(
	const struct kvp_ask_parser *p, struct kvp_ask *a, struct head_walk *w, const struct kvp_ask_field *f)
{
	size_t n = strlen(p->cfg.metadata_prefix);
	struct kvp_str name = f->name, value = trim(f->value);
	if (name.len >= n && !strncasecmp(name.ptr, p->cfg.metadata_prefix, n))
		meta_field(w, (struct kvp_str){name.ptr + n, name.len - n}, value);
	if (name.len > 2 && (*name.ptr | 0x20) == 'x' && name.ptr[1] == '-')
		x_field(a, w, name, value);
	else if (name_is(name, ":path") && value.len)
		a->path = path_of(value);
	else if (name_is(name, ":method"))
		a->may_lack_body = name_is(value, "GET") || name_is(value, "HEAD") ||
						   name_is(value, "DELETE") || name_is(value, "OPTIONS")
					   ? KVP_YES
					   : KVP_NO;
	else if (name_is(name, "thread-id") && !w->session[3].len)
		w->session[3] = value;
	else if (name_is(name, "traceparent") && !a->traceparent.len)
		a->traceparent = value;
}

static struct kvp_str at_most(struct kvp_str s, size_t max)
{
	return s.len && s.len <= max ? s : (struct kvp_str){NULL, 0};
}

int kvp_ask_head(struct kvp_ask_parser *p, const struct kvp_ask_field *f, uint32_t cnt, struct kvp_ask *a)
{
	static const struct kvp_str retry = {"retry", 5};
	struct head_walk w = {.meta_cnt = 0};
	memset(a, 0, sizeof(*a));
	a->path = KVP_ASK_CHAT;
	a->has_priority = a->has_strict = a->stream = KVP_UNSET;
	for (uint32_t i = 0; i < cnt; i++)
		field(p, a, &w, &f[i]);
	for (size_t i = 0; i < 4 && !a->session_id.len; i++)
		a->session_id = w.session[i];
	a->session_id = at_most(a->session_id, KVP_SESSION_ID_MAX);
	a->policy_class = w.class_meta.len ? w.class_meta : w.class_header;
	if (!a->policy_class.len && a->is_retry == KVP_YES)
		a->policy_class = retry;
	a->policy_class = at_most(a->policy_class, KVP_NAME_MAX);
	a->tenant = a->tenant.len ? a->tenant : (struct kvp_str){NULL, 0};
	a->traceparent = at_most(a->traceparent, 128);
	if (a->request_id.len > REQUEST_ID_MAX)
		a->request_id.len = REQUEST_ID_MAX;
	a->request_id = at_most(a->request_id, REQUEST_ID_MAX);
	struct kvp_str *own[] = {
		&a->request_id, &a->session_id, &a->policy_class, &a->tenant, &a->traceparent};
	if (keep(a, 0, own, sizeof(own) / sizeof(own[0])))
		return 500;
	if (w.meta == META_MANY)
		return fail(a, 431, "metadata headers exceed the limit of %d entries", KVP_ASK_META_MAX);
	if (w.meta == META_LONG)
		return fail(a, 431, "metadata headers exceed the limit of %d bytes", KVP_ASK_META_BYTES_MAX);
	return 0;
}

/* -- body -- */

/* Whether a wrong member ends the request: not where the content is nobody's business. */
enum strictness { LENIENT, STRICT };

struct body_walk {
	struct kvp_ask *a;
	const char *body;
	uint64_t len;
	enum strictness strict;
	struct kvp_json_val obj;
	struct kvp_str nvext_salt, top_salt;
};

static int wrong(struct body_walk *w, const char *name, const char *want)
{
	if (w->strict == LENIENT)
		return 0;
	return fail(w->a, 400, "invalid request body: %s: expected %s", name, want);
}

static int present(struct kvp_json_val obj, const char *name, struct kvp_json_val *v)
{
	return kvp_json_get(obj, name, v) == KVP_OK && kvp_json_type(*v) != KVP_JSON_NULL;
}

/* full: the name as the client is told it. */
static int text(
	struct body_walk *w, struct kvp_json_val obj, const char *name, const char *full, struct kvp_str *out)
{
	struct kvp_json_val v;
	struct kvp_str s;
	if (!present(obj, name, &v))
		return 0;
	if (kvp_json_str(v, &s.ptr, &s.len))
		return wrong(w, full, "a string");
	if (s.len > KVP_NAME_MAX)
		return wrong(w, full, "at most 1024 bytes");
	/* An unpaired surrogate reads as this character; a name that holds one was never ours to match. */
	if (memmem(s.ptr, s.len, "\xef\xbf\xbd", 3) && kvp_json_lone_surrogate(w->body, w->len))
		return wrong(w, full, "valid Unicode");
	*out = s;
	return 0;
}

static int agent_hints(struct body_walk *w, struct kvp_json_val hints)
{
	struct kvp_ask *a = w->a;
	struct kvp_json_val v;
	int64_t i;
	uint32_t u;
	double d;
	int has_priority = present(hints, "priority", &v);
	if (has_priority) {
		if (kvp_json_i64(v, &i) || i < INT32_MIN || i > INT32_MAX)
			return wrong(
				w, "nvext.agent_hints.priority", "an integer in -2147483648..2147483647");
		if (a->has_priority != KVP_YES)
			a->priority_jump = i > 0 ? (double)i : 0;
	}
	if (present(hints, "latency_sensitivity", &v)) {
		if (kvp_json_double(v, &d))
			return wrong(w, "nvext.agent_hints.latency_sensitivity", "a number");
		if (a->has_priority != KVP_YES && !has_priority)
			a->priority_jump = d > 0 ? d : 0;
	}
	if (present(hints, "strict_priority", &v)) {
		if (kvp_json_u32(v, &u))
			return wrong(w, "nvext.agent_hints.strict_priority", "an integer in 0..4294967295");
		if (a->has_strict != KVP_YES)
			a->strict_priority = u;
	}
	if (present(hints, "osl", &v)) {
		if (kvp_json_u32(v, &u))
			return wrong(w, "nvext.agent_hints.osl", "an integer in 0..4294967295");
		a->expected_output_tok = u;
	}
	return 0;
}

static int nvext(struct body_walk *w)
{
	struct kvp_json_val ext, hints;
	if (!present(w->obj, "nvext", &ext))
		return 0;
	if (kvp_json_type(ext) != KVP_JSON_OBJ)
		return wrong(w, "nvext", "an object");
	int rc = text(w, ext, "cache_salt", "nvext.cache_salt", &w->nvext_salt);
	if (rc || !present(ext, "agent_hints", &hints))
		return rc;
	if (kvp_json_type(hints) != KVP_JSON_OBJ)
		return wrong(w, "nvext.agent_hints", "an object");
	return agent_hints(w, hints);
}

static int namespace_of(struct body_walk *w)
{
	struct kvp_ask *a = w->a;
	if (a->tenant.len > KVP_NAME_MAX)
		return wrong(w, "x-tenant-id", "at most 1024 bytes");
	a->salt_from = a->tenant.len	   ? KVP_ASK_SALT_TENANT
		       : w->nvext_salt.len ? KVP_ASK_SALT_NVEXT
		       : w->top_salt.len   ? KVP_ASK_SALT_TOP
					   : KVP_ASK_SALT_NONE;
	if (a->salt_from != KVP_ASK_SALT_NONE)
		a->salt = a->salt_from == KVP_ASK_SALT_TENANT  ? a->tenant
			  : a->salt_from == KVP_ASK_SALT_NVEXT ? w->nvext_salt
							       : w->top_salt;
	return 0;
}

/* Everything that is read whatever the prompt looks like. */
static int members(struct body_walk *w, const struct kvp_ask_parser *p)
{
	struct kvp_ask *a = w->a;
	struct kvp_json_val v;
	int b, rc = text(w, w->obj, "model", "model", &a->model);
	if (!rc)
		rc = text(w, w->obj, "cache_salt", "cache_salt", &w->top_salt);
	if (!rc)
		rc = nvext(w);
	if (!rc)
		rc = namespace_of(w);
	if (rc)
		return rc;
	if (present(w->obj, "stream", &v) && kvp_json_bool(v, &b) == KVP_OK)
		a->stream = b ? KVP_YES : KVP_NO;
	const char *served = p->cfg.model ? p->cfg.model : "";
	if (!a->model.len)
		a->model = (struct kvp_str){NULL, 0};
	else if (*served &&
		 (a->model.len != strlen(served) || memcmp(a->model.ptr, served, a->model.len) != 0))
		a->lora = a->model;
	struct kvp_str *own[] = {&a->model, &a->salt};
	struct kvp_str model = a->model;
	if (keep(a, 1, own, 2))
		return 500;
	if (a->lora.ptr)
		a->lora = (struct kvp_str){a->model.ptr, model.len};
	return 0;
}

/* The one prompt of a completion: 1 if there are several, or none that we can read. */
static int several(struct kvp_json_val v, struct kvp_json_val *one)
{
	struct kvp_json_iter it = kvp_json_each(v);
	if (kvp_json_type(v) != KVP_JSON_ARR) {
		*one = v;
		return 0;
	}
	if (kvp_json_len(v) != 1 || !kvp_json_next(&it))
		return 1;
	*one = it.val;
	return 0;
}

static int completion_source(struct body_walk *w, const struct kvp_ask_parser *p)
{
	struct kvp_ask *a = w->a;
	struct kvp_json_val v, one;
	a->source = KVP_ASK_LOAD_ONLY;
	if (!present(w->obj, "prompt", &v))
		return 0;
	if (kvp_json_type(v) != KVP_JSON_STR && kvp_json_type(v) != KVP_JSON_ARR)
		return wrong(w, "prompt", "a string or an array");
	if (several(v, &one)) {
		struct kvp_json_iter it = kvp_json_each(v);
		for (enum kvp_json_type first = KVP_JSON_NULL; kvp_json_next(&it);
			first = kvp_json_type(it.val))
			if ((kvp_json_type(it.val) != KVP_JSON_STR &&
				    kvp_json_type(it.val) != KVP_JSON_ARR) ||
				(first != KVP_JSON_NULL && first != kvp_json_type(it.val)))
				return wrong(
					w, "prompt", "token ids in 0..4294967295, or one or more prompts");
		return kvp_json_len(v) ? 0 : wrong(w, "prompt", "at least one element");
	}
	if (kvp_json_type(one) != KVP_JSON_STR)
		return wrong(w, "prompt", "token ids in 0..4294967295, or one or more prompts");
	if (p->cfg.tokenizer == KVP_TOK_TEXT)
		a->source = KVP_ASK_TEXT;
	else if (p->cfg.tokenizer == KVP_TOK_VLLM_RENDER || p->cfg.tokenizer == KVP_TOK_SGLANG_TOKENIZE)
		a->source = KVP_ASK_RENDER_COMPLETIONS;
	return 0;
}

static const char *token_member(enum kvp_ask_path path)
{
	return path == KVP_ASK_COMPLETIONS	 ? "prompt"
	       : path == KVP_ASK_VLLM_GENERATE	 ? "token_ids"
	       : path == KVP_ASK_SGLANG_GENERATE ? "input_ids"
						 : NULL;
}

/* A body whose path may carry token ids. rc: what reading them said. */
static int token_source(struct body_walk *w, struct kvp_ask_parser *p, int rc)
{
	struct kvp_ask *a = w->a;
	const char *name = token_member(a->path);
	struct kvp_json_val v, first;
	if (rc == KVP_OK && p->ids.cnt) {
		a->source = KVP_ASK_TOKENS;
		p->ids_of = a;
		return 0;
	}
	if (a->path == KVP_ASK_COMPLETIONS)
		return rc == KVP_ERR_LIMIT ? wrong(w, name, "token ids in 0..4294967295")
					   : completion_source(w, p);
	if (rc == KVP_ERR_NOTFOUND)
		return 0;
	/* Several prompts in one request are load like any other. */
	if (kvp_json_get(w->obj, name, &v) == KVP_OK && kvp_json_len(v) > 1) {
		struct kvp_json_iter it = kvp_json_each(v);
		if (!it.is_obj && kvp_json_next(&it)) {
			first = it.val;
			if (kvp_json_type(first) == KVP_JSON_ARR)
				return 0;
		}
	}
	return wrong(w, name, rc == KVP_OK ? "at least one token id" : "token ids in 0..4294967295");
}

/* The bytes of a value as they stand in the body, quotes and brackets included. */
static void text_span(struct body_walk *w, const char *member)
{
	size_t off, n;
	if (kvp_json_span(w->body, w->len, w->obj, member, &off, &n) == KVP_OK) {
		w->a->text_off = off;
		w->a->text_len = n;
	} else {
		w->a->source = KVP_ASK_LOAD_ONLY;
	}
}

static int chat_source(struct body_walk *w, const struct kvp_ask_parser *p)
{
	struct kvp_json_val v;
	w->a->source = KVP_ASK_RENDER_CHAT;
	if (p->cfg.tokenizer == KVP_CONFIG_NO_WORD)
		w->a->source = KVP_ASK_LOAD_ONLY;
	else if (p->cfg.tokenizer == KVP_TOK_TEXT)
		w->a->source = present(w->obj, "messages", &v) ? KVP_ASK_TEXT : KVP_ASK_LOAD_ONLY;
	return 0;
}

/* Only what looks like an object is parsed where the content doesn't matter. */
static int looks_like_object(const char *body, uint64_t len)
{
	uint64_t i = 0;
	while (i < len && is_white(body[i]))
		i++;
	return i < len && body[i] == '{';
}

int kvp_ask_body(struct kvp_ask_parser *p, struct kvp_ask *a, const char *body, uint64_t len)
{
	int needs = a->path == KVP_ASK_CHAT || a->path == KVP_ASK_COMPLETIONS, rc;
	struct body_walk w = {.a = a, .body = body, .len = len, .strict = needs ? STRICT : LENIENT};
	const char *ids = token_member(a->path);
	struct kvp_json_err err = {KVP_OK, NULL};
	a->body_bytes = len;
	p->ids_of = NULL;
	kvp_json_trim(p->json, KEEP_BYTES);
	if (!len && (!needs || a->may_lack_body == KVP_YES)) {
		a->source = KVP_ASK_NO_BODY;
		return namespace_of(&w);
	}
	a->source = KVP_ASK_LOAD_ONLY;
	if (!needs && !looks_like_object(body, len))
		return namespace_of(&w);
	if (ids) {
		rc = kvp_json_ids_read(p->json, body, len, ids, &p->ids, &err);
		w.obj = p->ids.obj;
	} else {
		rc = kvp_json_parse_slack(
			p->json, body, len, KVP_JSON_DEPTH_MAX, KVP_JSON_HAS_SLACK, &w.obj, &err);
	}
	if (rc == KVP_ERR_FULL)
		return fail(a, 500, "out of memory");
	if (err.code)
		return needs ? fail(a, 400, "invalid request body: %s", err.text) : namespace_of(&w);
	if (!w.obj.doc || kvp_json_type(w.obj) != KVP_JSON_OBJ || !looks_like_object(body, len))
		return needs ? fail(a, 400, "invalid request body: not a JSON object") : namespace_of(&w);
	if (ids && a->path != KVP_ASK_COMPLETIONS && rc != KVP_ERR_NOTFOUND)
		w.strict = STRICT;
	int bad = ids ? token_source(&w, p, rc) : a->path == KVP_ASK_CHAT ? chat_source(&w, p) : 0;
	if (!bad)
		bad = members(&w, p);
	if (!bad && a->source == KVP_ASK_TEXT)
		text_span(&w, a->path == KVP_ASK_CHAT ? "messages" : "prompt");
	return bad;
}

/* -- the prompt -- */

static uint64_t *hash_room(struct kvp_ask_parser *p, size_t n)
{
	if (n > p->hash_cap) {
		uint64_t *h = malloc(n * sizeof(*h));
		if (!h)
			return NULL;
		free(p->hash);
		p->hash = h;
		p->hash_cap = n;
	}
	return p->hash;
}

static const uint64_t no_hash[1];

void kvp_ask_load_only(const struct kvp_ask *a, struct kvp_prompt *out)
{
	*out = (struct kvp_prompt){.form = KVP_PROMPT_HASHES,
		.block_hash = no_hash,
		.seq_hash = no_hash,
		.has_isl = KVP_YES,
		.isl_tok = a->body_bytes / 4 ? a->body_bytes / 4 : 1,
		.lora = a->lora,
		.salt = a->salt,
		.eagle = KVP_UNSET};
}

static int text_prompt(struct kvp_ask_parser *p, struct kvp_ask *a, const char *text_at, uint32_t block_size,
	struct kvp_prompt *out)
{
	uint64_t bytes = 4ull * block_size, blocks = a->text_len / bytes;
	uint64_t seed = kvp_hash_seed(a->lora.ptr, a->lora.len, a->salt.ptr, a->salt.len);
	uint64_t *local = hash_room(p, 2 * blocks + 2);
	if (!local || blocks > UINT32_MAX)
		return fail(a, 500, "out of memory");
	uint64_t *seq = local + blocks + 1;
	for (uint64_t i = 0; i < blocks; i++)
		local[i] = kvp_hash_bytes(text_at + i * bytes, bytes, seed);
	kvp_hash_chain(NULL, local, blocks, seq);
	kvp_ask_load_only(a, out);
	out->block_hash = local;
	out->seq_hash = seq;
	out->block_hash_cnt = out->seq_hash_cnt = (uint32_t)blocks;
	out->isl_tok = (a->text_len + 3) / 4 ? (a->text_len + 3) / 4 : 1;
	return 0;
}

static uint64_t matches_nothing(struct kvp_ask_parser *p)
{
	uint64_t z = p->rnd += 0x9e3779b97f4a7c15ull;
	z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
	z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
	return z ^ (z >> 31);
}

/* Every block gets the objects that some of its tokens stand for. */
static int media(struct kvp_ask_parser *p, struct kvp_ask *a, const struct kvp_ask_tokens *t,
	uint32_t block_size, struct kvp_prompt *out)
{
	uint32_t blocks = t->token_cnt / block_size;
	size_t most = 1; /* places in lists, all blocks together */
	for (uint32_t i = 0; i < t->mm_cnt; i++)
		most += t->mm[i].len / block_size + 2;
	uint64_t *hash = hash_room(p, most);
	if (blocks > p->blk_mm_cap || !p->blk_mm) {
		free(p->blk_mm);
		p->blk_mm_cap = 0;
		p->blk_mm = calloc((size_t)blocks + 1, sizeof(*p->blk_mm));
		if (p->blk_mm)
			p->blk_mm_cap = (size_t)blocks + 1;
	}
	if (!hash || !p->blk_mm)
		return fail(a, 500, "out of memory");
	uint64_t own = matches_nothing(p);
	hash[0] = own;
	uint64_t *to = hash + 1;
	for (uint32_t b = 0, first = 0; b < blocks; b++) {
		uint64_t from = (uint64_t)b * block_size, end = from + block_size;
		struct kvp_hash_mm *m = &p->blk_mm[b];
		*m = (struct kvp_hash_mm){to, 0};
		if (t->mm_form == KVP_ASK_MM_UNKNOWN) {
			*m = (struct kvp_hash_mm){hash, end > t->mm_from};
			continue;
		}
		while (first < t->mm_cnt && (uint64_t)t->mm[first].off + t->mm[first].len <= from)
			first++;
		for (uint32_t i = first; i < t->mm_cnt && t->mm[i].off < end; i++)
			if ((uint64_t)t->mm[i].off + t->mm[i].len > from && to < hash + most) {
				*to++ = t->mm[i].hash;
				m->cnt++;
			}
	}
	out->mm = p->blk_mm;
	out->mm_cnt = blocks;
	return 0;
}

int kvp_ask_prompt(struct kvp_ask_parser *p, struct kvp_ask *a, const char *body, uint64_t len,
	const struct kvp_ask_tokens *t, uint32_t block_size, struct kvp_prompt *out)
{
	struct kvp_ask_tokens own = {.mm_form = KVP_ASK_MM_NONE};
	kvp_ask_load_only(a, out);
	if (a->source == KVP_ASK_TEXT)
		return block_size ? text_prompt(p, a, body + a->text_off, block_size, out) : 0;
	if (a->source == KVP_ASK_TOKENS) {
		if (p->ids_of != a &&
			kvp_json_ids_read(p->json, body, len, token_member(a->path), &p->ids, NULL))
			return fail(a, 500, "out of memory"); /* it was readable before */
		p->ids_of = a;
		own.token = p->ids.id;
		own.token_cnt = (uint32_t)p->ids.cnt;
		t = &own;
	}
	if (!t || !t->token_cnt || (t->mm_form != KVP_ASK_MM_NONE && !block_size))
		return 0;
	*out = (struct kvp_prompt){.form = KVP_PROMPT_TOKENS,
		.token = t->token,
		.token_cnt = t->token_cnt,
		.has_isl = KVP_NO,
		.lora = a->lora,
		.salt = a->salt,
		.eagle = KVP_UNSET};
	return t->mm_form == KVP_ASK_MM_NONE ? 0 : media(p, a, t, block_size, out);
}

void kvp_ask_select(const struct kvp_ask_parser *p, const struct kvp_ask *a, struct kvp_select_request *q)
{
	static const char group[] = "default";
	const char *model = p->cfg.model ? p->cfg.model : "";
	q->model = (struct kvp_str){model, strlen(model)};
	q->group = (struct kvp_str){group, sizeof(group) - 1};
	q->expected_output_tok = a->expected_output_tok;
	q->session_id = a->session_id;
	q->priority_jump = a->priority_jump;
	q->strict_priority = a->strict_priority;
	q->policy_class = a->policy_class;
}

int kvp_ask_salted(struct kvp_ask_parser *p, const struct kvp_ask *a, const char *body, uint64_t len,
	char **out, uint64_t *out_len)
{
	struct kvp_json_val root;
	struct kvp_jw value;
	size_t off, n = 0;
	char *salt, *to = NULL;
	p->ids_of = NULL;
	if (!a->salt.len || kvp_json_parse(p->json, body, len, KVP_JSON_DEPTH_MAX, &root, NULL) ||
		kvp_json_type(root) != KVP_JSON_OBJ)
		return KVP_ERR_NOTFOUND;
	int is_new = kvp_json_span(body, len, root, "cache_salt", &off, &n) != KVP_OK;
	if (is_new)
		off = (size_t)((const char *)memchr(body, '{', len) - body) + 1;
	kvp_jw_init(&value);
	salt = malloc(sizeof(KVP_ASK_SALT_TAG) + a->salt.len);
	if (salt) {
		memcpy(salt, KVP_ASK_SALT_TAG, sizeof(KVP_ASK_SALT_TAG) - 1);
		memcpy(salt + sizeof(KVP_ASK_SALT_TAG) - 1, a->salt.ptr, a->salt.len);
		kvp_jw_strn(&value, salt, sizeof(KVP_ASK_SALT_TAG) - 1 + a->salt.len);
		if (kvp_jw_done(&value) == KVP_OK)
			to = malloc(len + value.len + 32 + KVP_JSON_SLACK_BYTES);
	}
	free(salt);
	if (to) {
		static const char name[] = "\"cache_salt\":";
		char *at = to + off;
		memcpy(to, body, off);
		if (is_new) {
			memcpy(at, name, sizeof(name) - 1);
			at += sizeof(name) - 1;
		}
		memcpy(at, value.buf, value.len);
		at += value.len;
		if (is_new && kvp_json_len(root))
			*at++ = ',';
		memcpy(at, body + off + n, len - off - n);
		at += len - off - n;
		memset(at, 0, KVP_JSON_SLACK_BYTES);
		*out = to;
		*out_len = (uint64_t)(at - to);
	}
	kvp_jw_free(&value);
	return to ? KVP_OK : KVP_ERR_SYS;
}
