/* bench/sim/ask.c — see ask.h. */
#include "bench/sim/ask.h"
#include "bench/sim/prompt.h"
#include <stdlib.h>
#include <string.h>

#define OUT_MAX_TOK (1u << 20)

static int room(struct kvp_ask *a, uint64_t more)
{
	uint64_t need = a->tok_cnt + more;
	if (need > KVP_ASK_PROMPT_MAX_TOK)
		return KVP_ERR_LIMIT;
	if (need <= a->tok_max)
		return KVP_OK;
	uint32_t *p = realloc(a->tok, (need + 1) * sizeof(*p));
	if (!p)
		return KVP_ERR_SYS;
	a->tok = p;
	a->tok_max = (uint32_t)need;
	return KVP_OK;
}

static int add_text(struct kvp_ask *a, const char *s, size_t len)
{
	int rc = room(a, len / 4 + 1);
	if (!rc)
		a->tok_cnt += kvp_prompt_text(s, len, a->tok + a->tok_cnt, a->tok_max - a->tok_cnt);
	return rc;
}

static int add_ids(struct kvp_ask *a, struct kvp_json_val v)
{
	size_t n = kvp_json_len(v);
	int rc = room(a, n);
	if (!rc)
		rc = kvp_json_u32s(v, a->tok + a->tok_cnt, n, &n);
	if (!rc)
		a->tok_cnt += (uint32_t)n;
	return rc;
}

/* prompt_end closes one prompt; none may be empty. */
static int prompt_end(struct kvp_ask *a)
{
	uint32_t first = a->prompt_cnt ? a->end[a->prompt_cnt - 1] : 0;
	if (a->tok_cnt == first || a->prompt_cnt == KVP_ASK_PROMPTS_MAX)
		return KVP_ERR_PROTO;
	a->end[a->prompt_cnt++] = a->tok_cnt;
	return KVP_OK;
}

static int read_prompt(struct kvp_ask *a, struct kvp_json_val v)
{
	const char *s;
	size_t len;
	struct kvp_json_iter it = kvp_json_each(v);
	if (kvp_json_str(v, &s, &len) == KVP_OK)
		return add_text(a, s, len) ? KVP_ERR_PROTO : prompt_end(a);
	if (kvp_json_type(v) != KVP_JSON_ARR || !kvp_json_next(&it))
		return KVP_ERR_PROTO;
	if (kvp_json_type(it.val) == KVP_JSON_INT)
		return add_ids(a, v) ? KVP_ERR_PROTO : prompt_end(a);
	do {
		int rc = kvp_json_str(it.val, &s, &len) == KVP_OK ? add_text(a, s, len) : add_ids(a, it.val);
		if (rc || prompt_end(a))
			return KVP_ERR_PROTO;
	} while (kvp_json_next(&it));
	return KVP_OK;
}

/* read_content adds the text of one message: a string, or the text members of a list of parts. */
static int read_content(struct kvp_ask *a, struct kvp_json_val v)
{
	const char *s;
	size_t len;
	if (kvp_json_str(v, &s, &len) == KVP_OK)
		return add_text(a, s, len);
	struct kvp_json_iter it = kvp_json_each(v);
	while (kvp_json_next(&it)) {
		struct kvp_json_val text;
		if (kvp_json_get(it.val, "text", &text) || kvp_json_str(text, &s, &len))
			continue;
		int rc = add_text(a, s, len);
		if (rc)
			return rc;
	}
	return KVP_OK;
}

static int read_messages(struct kvp_ask *a, struct kvp_json_val v)
{
	struct kvp_json_iter it = kvp_json_each(v);
	if (kvp_json_type(v) != KVP_JSON_ARR)
		return KVP_ERR_PROTO;
	while (kvp_json_next(&it)) {
		struct kvp_json_val m;
		const char *role;
		size_t len;
		if (kvp_json_get(it.val, "role", &m) || kvp_json_str(m, &role, &len))
			return KVP_ERR_PROTO;
		if (add_text(a, "<|", 2) || add_text(a, role, len) || add_text(a, "|>\n", 3))
			return KVP_ERR_PROTO;
		if (kvp_json_get(it.val, "content", &m) == KVP_OK && read_content(a, m))
			return KVP_ERR_PROTO;
	}
	return prompt_end(a);
}

static int read_hash_ids(struct kvp_ask *a, struct kvp_json_val v, struct kvp_json_val root)
{
	struct kvp_json_val m;
	uint32_t tok_cnt;
	size_t n = kvp_json_len(v);
	if (kvp_json_get(root, "prompt_len", &m) || kvp_json_u32(m, &tok_cnt) || !tok_cnt ||
		room(a, tok_cnt) ||
		n != ((uint64_t)tok_cnt + KVP_PROMPT_BLOCK_TOK - 1) / KVP_PROMPT_BLOCK_TOK)
		return KVP_ERR_PROTO;
	uint64_t *id = malloc(n * sizeof(*id));
	int rc = id ? kvp_json_u64s(v, id, n, &n) : KVP_ERR_SYS;
	if (!rc) {
		kvp_prompt_expand(id, tok_cnt, a->tok);
		a->tok_cnt = tok_cnt;
		rc = prompt_end(a);
	}
	free(id);
	return rc;
}

static int read_limits(struct kvp_ask *a, struct kvp_json_val root)
{
	struct kvp_json_val m, opt;
	int yes = 0;
	a->out_tok = KVP_ASK_OUT_TOK;
	static const char *const names[] = {"max_tokens", "max_completion_tokens"};
	for (int i = 0; i < 2; i++) {
		if (kvp_json_get(root, names[i], &m) || kvp_json_type(m) == KVP_JSON_NULL)
			continue;
		if (kvp_json_u32(m, &a->out_tok) || !a->out_tok || a->out_tok > OUT_MAX_TOK)
			return KVP_ERR_PROTO;
	}
	if (kvp_json_get(root, "stream", &m) == KVP_OK && kvp_json_bool(m, &yes) &&
		kvp_json_type(m) != KVP_JSON_NULL)
		return KVP_ERR_PROTO;
	a->mode = yes ? KVP_ASK_STREAM : KVP_ASK_WHOLE;
	yes = 0;
	if (kvp_json_get(root, "stream_options", &opt) == KVP_OK &&
		kvp_json_get(opt, "include_usage", &m) == KVP_OK)
		kvp_json_bool(m, &yes);
	a->usage = yes ? KVP_ASK_USAGE : KVP_ASK_NO_USAGE;
	return KVP_OK;
}

int kvp_ask_parse(struct kvp_json *json, const char *body, size_t len, enum kvp_ask_kind kind,
	const char *model, struct kvp_ask *out, const char **why)
{
	struct kvp_json_val root, m;
	*out = (struct kvp_ask){.kind = kind};
	if (kvp_json_parse(json, body, len, KVP_JSON_DEPTH_MAX, &root, NULL) ||
		kvp_json_type(root) != KVP_JSON_OBJ) {
		*why = "the body is not a JSON object";
		return 400;
	}
	if (kvp_json_get(root, "model", &m) == KVP_OK && !kvp_json_str_is(m, model)) {
		*why = "no such model";
		return 404;
	}
	*why = "max_tokens or stream is out of range";
	if (read_limits(out, root))
		return 400;
	*why = "prompt, messages, or kvpick_hash_ids with prompt_len: missing, empty or malformed";
	int rc = KVP_ERR_PROTO;
	if (kvp_json_get(root, "kvpick_hash_ids", &m) == KVP_OK)
		rc = read_hash_ids(out, m, root);
	else if (kind == KVP_ASK_CHAT && kvp_json_get(root, "messages", &m) == KVP_OK)
		rc = read_messages(out, m);
	else if (kind == KVP_ASK_COMPLETION && kvp_json_get(root, "prompt", &m) == KVP_OK)
		rc = read_prompt(out, m);
	return rc ? 400 : 200;
}

void kvp_ask_free(struct kvp_ask *a)
{
	free(a->tok);
	a->tok = NULL;
}
