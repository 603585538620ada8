/* Fuzz: any bytes as headers and body of a request. Every path and tokenizer; a body that is accepted gives a
 * prompt whose parts are in bounds, and salting it gives a body that is accepted again.
 *
 * Input      byte 0: path and tokenizer; header lines "name:value\n" up to an empty line; the body.
 */
#define KVP_FUZZ_NAME "ask"
#include "daemons/extproc/request.c"
#include "tests/fuzz/replay.h"

static const char *const path[] = {
	"/v1/chat/completions", "/v1/completions", "/inference/v1/generate", "/generate", "/v1/embeddings"};
static const int32_t tokenizer[] = {KVP_TOK_VLLM_RENDER, KVP_TOK_SGLANG_RENDERER, KVP_TOK_SGLANG_TOKENIZE,
	KVP_TOK_TEXT, KVP_CONFIG_NO_WORD};

static uint32_t lines(char *s, size_t len, struct kvp_ask_field *f, uint32_t cap, size_t *used)
{
	uint32_t n = 0;
	size_t at = 0;
	while (at < len && n < cap) {
		char *nl = memchr(s + at, '\n', len - at);
		size_t end = nl ? (size_t)(nl - s) : len;
		char *colon = memchr(s + at, ':', end - at);
		if (end == at || !colon) {
			at = end < len ? end + 1 : len;
			break;
		}
		if (colon == s + at)
			colon = memchr(colon + 1, ':', (size_t)(s + end - colon) - 1);
		if (colon) {
			f[n].name = (struct kvp_str){s + at, (size_t)(colon - s) - at};
			f[n++].value = (struct kvp_str){colon + 1, (size_t)(s + end - colon) - 1};
		}
		at = end < len ? end + 1 : len;
	}
	*used = at;
	return n;
}

static void check_prompt(struct kvp_ask_parser *p, struct kvp_ask *a, const char *body, size_t len)
{
	struct kvp_prompt q;
	KVP_ASSERT(kvp_ask_prompt(p, a, body, len, NULL, 2, &q) == 0);
	if (q.form == KVP_PROMPT_TOKENS) {
		KVP_ASSERT(a->source == KVP_ASK_TOKENS && q.token_cnt && q.token_cnt <= len);
	} else {
		KVP_ASSERT(q.block_hash && q.seq_hash && q.block_hash_cnt == q.seq_hash_cnt && q.isl_tok);
		KVP_ASSERT((uint64_t)q.block_hash_cnt * 8 <= len);
	}
	KVP_ASSERT(a->lora.len <= KVP_NAME_MAX && a->salt.len <= KVP_NAME_MAX);
	KVP_ASSERT(a->session_id.len <= KVP_SESSION_ID_MAX && !(a->priority_jump < 0));
}

static void check_salted(struct kvp_ask_parser *p, struct kvp_ask *a, const char *body, size_t len)
{
	char *out;
	uint64_t out_len;
	if (kvp_ask_salted(p, a, body, len, &out, &out_len) != KVP_OK)
		return;
	struct kvp_json_val root, v;
	const char *s;
	size_t n;
	KVP_ASSERT(kvp_json_parse(p->json, out, out_len, KVP_JSON_DEPTH_MAX, &root, NULL) == KVP_OK);
	KVP_ASSERT(kvp_json_get(root, "cache_salt", &v) == KVP_OK && kvp_json_str(v, &s, &n) == KVP_OK);
	KVP_ASSERT(n >= sizeof(KVP_ASK_SALT_TAG) - 1 &&
		   !memcmp(s, KVP_ASK_SALT_TAG, sizeof(KVP_ASK_SALT_TAG) - 1));
	free(out);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len)
{
	struct kvp_ask_parser p;
	struct kvp_ask a = {.mem = {NULL}};
	struct kvp_ask_field f[100];
	size_t used = 0;
	if (!len)
		return 0;
	struct kvp_ask_cfg cfg = {.model = "m", .tokenizer = tokenizer[data[0] / 5 % 5]};
	const char *at = path[data[0] % 5];
	char *head = malloc(len), *body;
	KVP_ASSERT(head && kvp_ask_open(&p, &cfg) == KVP_OK);
	memcpy(head, data + 1, len - 1);
	uint32_t n = lines(head, len - 1, f, 99, &used);
	f[n].name = (struct kvp_str){":path", 5};
	f[n++].value = (struct kvp_str){at, strlen(at)};
	int rc = kvp_ask_head(&p, f, n, &a);
	KVP_ASSERT(rc == 0 || (rc == 431 && a.err[0]));
	size_t body_len = len - 1 - used;
	body = malloc(body_len + KVP_JSON_SLACK_BYTES);
	KVP_ASSERT(body);
	memcpy(body, head + used, body_len);
	memset(body + body_len, '"', KVP_JSON_SLACK_BYTES);
	free(head);
	rc = kvp_ask_body(&p, &a, body, body_len);
	KVP_ASSERT(rc == 0 || (rc == 400 && a.err[0]));
	KVP_ASSERT(rc == 0 || a.path != KVP_ASK_OTHER || a.tenant.len > KVP_NAME_MAX);
	if (rc == 0) {
		check_prompt(&p, &a, body, body_len);
		check_salted(&p, &a, body, body_len);
	}
	kvp_ask_reset(&a);
	kvp_ask_close(&p);
	free(body);
	return 0;
}
