/* What a request asks for: paths, headers, body members and their limits, prompt forms. */
#include "daemons/extproc/request.c"
#include "tests/tap.h"

static struct kvp_ask_parser p;

static struct kvp_str str(const char *s)
{
	return (struct kvp_str){s, strlen(s)};
}

static int str_is(struct kvp_str s, const char *want)
{
	return want ? s.ptr && s.len == strlen(want) && !memcmp(s.ptr, want, s.len) : !s.ptr && !s.len;
}

/* Headers as "name: value" lines. */
static int head(struct kvp_ask *a, const char *lines)
{
	struct kvp_ask_field f[256];
	uint32_t n = 0;
	char *copy = strdup(lines), *save = NULL;
	for (char *l = strtok_r(copy, "\n", &save); l; l = strtok_r(NULL, "\n", &save)) {
		char *colon = strchr(l + 1, ':');
		f[n].name = (struct kvp_str){l, (size_t)(colon - l)};
		f[n++].value = str(colon + 1);
	}
	int rc = kvp_ask_head(&p, f, n, a);
	memset(copy, '?', strlen(lines)); /* nothing may point there any more */
	free(copy);
	return rc;
}

/* Body with slack behind it that is no part of it; freed at once. */
static int body(struct kvp_ask *a, const char *text)
{
	size_t len = strlen(text);
	char *t = malloc(len + KVP_JSON_SLACK_BYTES);
	memcpy(t, text, len);
	memset(t + len, '9', KVP_JSON_SLACK_BYTES);
	int rc = kvp_ask_body(&p, a, t, len);
	free(t);
	return rc;
}

static void open_as(int32_t tokenizer)
{
	struct kvp_ask_cfg cfg = {.model = "m", .tokenizer = tokenizer};
	kvp_ask_close(&p);
	kvp_ask_open(&p, &cfg);
}

static void test_pair_paths(void)
{
	static const struct {
		const char *path;
		int by_default, by_setting; /* "/responses,/v1/completions" */
	} t[] = {{"/v1/chat/completions", 1, 0}, {"/v1/completions", 1, 1}, {" /v1/completions ", 1, 1},
		{"/tenant/v1/completions?stream", 1, 1}, {"/v1/completions/", 0, 0}, {"completions", 0, 0},
		{"/v1/embeddings?x=/v1/completions", 0, 0}, {"/v1/responses", 0, 1},
		{"/v1/mycompletions", 0, 0}, {"/", 0, 0}, {"?", 0, 0}, {"", 1, 1}, {"  ", 1, 1},
		{"/generate", 0, 0}};
	struct kvp_ask_parser def, set, none;
	kvp_ask_open(&def, &(struct kvp_ask_cfg){.model = "m", .pair_paths = "/completions"});
	kvp_ask_open(&set, &(struct kvp_ask_cfg){.model = "m", .pair_paths = "/responses,/v1/completions"});
	kvp_ask_open(&none, &(struct kvp_ask_cfg){.model = "m"});
	for (size_t i = 0; i < sizeof(t) / sizeof(t[0]); i++) {
		struct kvp_str path = {t[i].path, strlen(t[i].path)};
		is_u64((uint64_t)kvp_ask_is_pair_path(&def, path), (uint64_t)t[i].by_default,
			"two workers: '%s'", t[i].path);
		is_u64((uint64_t)kvp_ask_is_pair_path(&set, path), (uint64_t)t[i].by_setting,
			"two workers, as set: '%s'", t[i].path);
		is_u64((uint64_t)kvp_ask_is_pair_path(&none, path), !t[i].path[strspn(t[i].path, " ")],
			"two workers, no path set: '%s'", t[i].path);
	}
	ok(kvp_ask_is_pair_path(&def, (struct kvp_str){NULL, 0}), "no path is chat, so for two workers");
	kvp_ask_close(&def);
	kvp_ask_close(&set);
	kvp_ask_close(&none);
}

static void test_paths(void)
{
	static const struct {
		const char *path;
		enum kvp_ask_path want;
	} t[] = {{"/v1/chat/completions", KVP_ASK_CHAT}, {"/v1/completions", KVP_ASK_COMPLETIONS},
		{"/openai/v1/chat/completions?x=/v1/completions", KVP_ASK_CHAT},
		{"/tenant/v1/completions?a", KVP_ASK_COMPLETIONS}, {"/v1/chat/completions/", KVP_ASK_OTHER},
		{"/inference/v1/generate", KVP_ASK_VLLM_GENERATE},
		{"/a/inference/v1/generate", KVP_ASK_VLLM_GENERATE}, {"/generate", KVP_ASK_SGLANG_GENERATE},
		{"/generate?x", KVP_ASK_SGLANG_GENERATE}, {"/v1/generate", KVP_ASK_OTHER},
		{"/v1/embeddings", KVP_ASK_OTHER}, {"/v1/responses", KVP_ASK_OTHER}, {"/", KVP_ASK_OTHER},
		{"v1/completions", KVP_ASK_OTHER}, {"?/v1/completions", KVP_ASK_OTHER}};
	struct kvp_ask a = {.mem = {NULL}};
	for (size_t i = 0; i < sizeof(t) / sizeof(t[0]); i++) {
		char line[128];
		snprintf(line, sizeof(line), ":path:%s", t[i].path);
		head(&a, line);
		is_u64(a.path, t[i].want, "path %s", t[i].path);
		kvp_ask_reset(&a);
	}
	head(&a, "host:x");
	is_u64(a.path, KVP_ASK_CHAT, "no path is chat");
	kvp_ask_reset(&a);
}

static void test_priorities(void)
{
	static const struct {
		const char *lines, *json;
		double jump;
		uint32_t strict, osl;
	} t[] = {{"a:b", "{}", 0, 0, 0}, {"x-dynamo-request-priority: 5 ", "{}", 5, 0, 0},
		{"X-Dynamo-Request-Priority:-3", "{\"nvext\":{\"agent_hints\":{\"priority\":7}}}", 0, 0, 0},
		{"x-dynamo-request-priority:x\nx-dynamo-request-priority:9", "{}", 0, 0, 0},
		{"x-dynamo-request-priority: \n", "{\"nvext\":{\"agent_hints\":{\"priority\":7}}}", 7, 0, 0},
		{"x-dynamo-request-priority:2147483648", "{}", 0, 0, 0},
		{"x-dynamo-request-priority:2147483647", "{}", 2147483647.0, 0, 0},
		{"x-dynamo-request-strict-priority:4294967295", "{}", 0, 4294967295u, 0},
		{"x-dynamo-request-strict-priority:-1",
			"{\"nvext\":{\"agent_hints\":{\"strict_priority\":2}}}", 0, 2, 0},
		{"x-dynamo-request-strict-priority:1",
			"{\"nvext\":{\"agent_hints\":{\"strict_priority\":2}}}", 0, 1, 0},
		{"a:b", "{\"nvext\":{\"agent_hints\":{\"latency_sensitivity\":1.5,\"osl\":64}}}", 1.5, 0, 64},
		{"a:b", "{\"nvext\":{\"agent_hints\":{\"latency_sensitivity\":1.5,\"priority\":-4}}}", 0, 0,
			0},
		{"a:b", "{\"nvext\":{\"agent_hints\":{\"latency_sensitivity\":-2,\"osl\":0}}}", 0, 0, 0},
		{"a:b", "{\"nvext\":null}", 0, 0, 0}, {"a:b", "{\"nvext\":{\"agent_hints\":null}}", 0, 0, 0},
		{"a:b", "{\"nvext\":{\"agent_hints\":{\"priority\":null,\"latency_sensitivity\":2}}}", 2, 0,
			0}};
	for (size_t i = 0; i < sizeof(t) / sizeof(t[0]); i++) {
		struct kvp_ask a = {.mem = {NULL}};
		struct kvp_select_request q = {.role = KVP_PART_AGGREGATED};
		int rc = head(&a, t[i].lines) + body(&a, t[i].json);
		kvp_ask_select(&p, &a, &q);
		ok(rc == 0 && q.priority_jump == t[i].jump && q.strict_priority == t[i].strict &&
				q.expected_output_tok == t[i].osl,
			"priorities of row %zu: %s", i, t[i].json);
		ok(str_is(q.model, "m") && str_is(q.group, "default"), "the served model, the default group");
		kvp_ask_reset(&a);
	}
}

static void test_namespace(void)
{
	static const struct {
		const char *lines, *json, *want;
		enum kvp_ask_salt from;
	} t[] = {{"x-tenant-id: tenant-client\nx-tenant-id:   \nx-tenant-id: tenant-gateway ", "{}",
			 "tenant-gateway", KVP_ASK_SALT_TENANT},
		{"x-tenant-id:t", "{\"cache_salt\":\"top\",\"nvext\":{\"cache_salt\":\"ext\"}}", "t",
			KVP_ASK_SALT_TENANT},
		{"a:b", "{\"cache_salt\":\"top\",\"nvext\":{\"cache_salt\":\"ext\"}}", "ext",
			KVP_ASK_SALT_NVEXT},
		{"a:b", "{\"cache_salt\":\"top\",\"nvext\":{\"cache_salt\":\"\"}}", "top", KVP_ASK_SALT_TOP},
		{"x-tenant-id: ", "{\"cache_salt\":\"\"}", NULL, KVP_ASK_SALT_NONE},
		{"a:b", "{\"cache_salt\":null}", NULL, KVP_ASK_SALT_NONE},
		{"a:b", "{\"cache_salt\":\"a\",\"cache_salt\":\"b\"}", "b", KVP_ASK_SALT_TOP}};
	for (size_t i = 0; i < sizeof(t) / sizeof(t[0]); i++) {
		struct kvp_ask a = {.mem = {NULL}};
		int rc = head(&a, t[i].lines) + body(&a, t[i].json);
		ok(rc == 0 && str_is(a.salt, t[i].want) && a.salt_from == t[i].from, "namespace of row %zu",
			i);
		kvp_ask_reset(&a);
	}
}

static void test_headers(void)
{
	struct kvp_ask a = {.mem = {NULL}};
	char line[70000], big[400];
	memset(big, 'y', sizeof(big));
	big[257] = 0;
	is_u64(head(&a, "x-request-id: r-1 \nx-request-id:r-2\nx-session-id:s2\nX-Dynamo-Session-Id: s1 \n"
			"traceparent:00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01\n"
			"x-dynamo-session-final: True"),
		0, "a set of headers");
	ok(str_is(a.request_id, "r-1") && str_is(a.session_id, "s1"),
		"first request id, session by precedence");
	ok(a.session_final == KVP_YES, "end of session");
	ok(str_is(a.traceparent, "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"), "trace context");
	kvp_ask_reset(&a);
	head(&a, "x-dynamo-session-id: \nx-claude-code-session-id:c\nthread-id:t");
	ok(str_is(a.session_id, "c"), "blank session names are passed over");
	kvp_ask_reset(&a);
	head(&a, "thread-id:t");
	ok(str_is(a.session_id, "t") && a.request_id.ptr == NULL, "thread-id is the last of them");
	kvp_ask_reset(&a);
	snprintf(line, sizeof(line), "x-dynamo-session-id:%s", big);
	head(&a, line);
	ok(!a.session_id.ptr, "a session id of 257 bytes is absent");
	kvp_ask_reset(&a);
	big[256] = 0;
	snprintf(line, sizeof(line), "x-dynamo-session-id:%s", big);
	head(&a, line);
	is_u64(a.session_id.len, 256, "one of 256 bytes is not");
	kvp_ask_reset(&a);
	head(&a, ":method:GET\n:path:/v1/models");
	ok(a.may_lack_body == KVP_YES && kvp_ask_body(&p, &a, "", 0) == 0 && a.source == KVP_ASK_NO_BODY,
		"GET");
	kvp_ask_reset(&a);
}

static void test_policy_class(void)
{
	static const struct {
		const char *lines, *want;
	} t[] = {{"X-Dynamo-Meta-Policy-Class: \" latency \" \nx-dynamo-meta-policy-class:throughput",
			 "\" latency \""},
		{"x-dynamo-meta-policy-class:  latency  \nx-dynamo-policy-class:b", "latency"},
		{"x-dynamo-meta-policy-class: \nx-dynamo-policy-class:b\nx-dynamo-retry-attempt:1", "b"},
		{"x-dynamo-retry-attempt:", "retry"}, {"x-dynamo-policy-class:  ", NULL}, {"a:b", NULL},
		{"x-dynamo-meta-policy-class:\xff\nx-dynamo-policy-class:b", "b"}};
	for (size_t i = 0; i < sizeof(t) / sizeof(t[0]); i++) {
		struct kvp_ask a = {.mem = {NULL}};
		struct kvp_select_request q = {.role = KVP_PART_AGGREGATED};
		head(&a, t[i].lines);
		kvp_ask_select(&p, &a, &q);
		ok(str_is(q.policy_class, t[i].want), "policy class of row %zu", i);
		kvp_ask_reset(&a);
	}
}

static void test_metadata_limits(void)
{
	struct kvp_ask_field f[70];
	char name[70][40], *value = malloc(65536);
	struct kvp_ask a = {.mem = {NULL}};
	memset(value, 'v', 65536);
	for (int i = 0; i < 70; i++) {
		snprintf(name[i], sizeof(name[i]), "x-dynamo-meta-k%d", i);
		f[i] = (struct kvp_ask_field){str(name[i]), str("v")};
	}
	is_u64(kvp_ask_head(&p, f, 64, &a), 0, "64 metadata headers");
	kvp_ask_reset(&a);
	is_u64(kvp_ask_head(&p, f, 65, &a), 431, "65 are too many");
	is_str(a.err, "metadata headers exceed the limit of 64 entries", "and it says so");
	kvp_ask_reset(&a);
	f[64].name = str("X-DYNAMO-META-K0");
	is_u64(kvp_ask_head(&p, f, 65, &a), 0, "a repeated name does not count");
	kvp_ask_reset(&a);
	f[64] = (struct kvp_ask_field){str("x-dynamo-meta-new"), str("\xc0\x80")};
	is_u64(kvp_ask_head(&p, f, 65, &a), 0, "nor does a value that is no UTF-8");
	kvp_ask_reset(&a);
	f[0] = (struct kvp_ask_field){str("x-dynamo-meta-k"), {value, 65535}};
	is_u64(kvp_ask_head(&p, f, 1, &a), 0, "65536 bytes");
	kvp_ask_reset(&a);
	f[0].value.len = 65536;
	is_u64(kvp_ask_head(&p, f, 1, &a), 431, "one more");
	is_str(a.err, "metadata headers exceed the limit of 65536 bytes", "and it says so");
	kvp_ask_reset(&a);
	free(value);
}

struct src {
	const char *path, *json;
	int status;
	enum kvp_ask_source want;
	const char *err;
};

static void test_sources(int32_t tokenizer, const struct src *t, size_t n)
{
	open_as(tokenizer);
	for (size_t i = 0; i < n; i++) {
		struct kvp_ask a = {.mem = {NULL}};
		char line[64];
		snprintf(line, sizeof(line), ":path:%s", t[i].path);
		head(&a, line);
		int rc = body(&a, t[i].json);
		is_u64(rc, t[i].status, "%d: %s %.60s", (int)tokenizer, t[i].path, t[i].json);
		if (!rc)
			is_u64(a.source, t[i].want, "and where its prompt comes from");
		else if (t[i].err)
			is_str(a.err, t[i].err, "and the text for the client");
		kvp_ask_reset(&a);
	}
}

#define CHAT "/v1/chat/completions"
#define COMP "/v1/completions"
#define VGEN "/inference/v1/generate"
#define SGEN "/generate"
#define IRB "invalid request body: "
#define BAD_IDS ": expected token ids in 0..4294967295"
#define BAD_PROMPT IRB "prompt: expected token ids in 0..4294967295, or one or more prompts"

static const struct src vllm[] = {
	{CHAT, "{\"messages\":[]}", 0, KVP_ASK_RENDER_CHAT, NULL},
	{CHAT, "{}", 0, KVP_ASK_RENDER_CHAT, NULL},
	{CHAT, "", 400, 0, IRB "empty text"},
	{CHAT, "x", 400, 0, NULL},
	{CHAT, "[]", 400, 0, IRB "not a JSON object"},
	{CHAT, "[{}]", 400, 0, IRB "not a JSON object"},
	{CHAT, "1", 400, 0, IRB "not a JSON object"},
	{CHAT, "{\"a\":NaN}", 400, 0, NULL},
	{CHAT, "{/* c */}", 400, 0, NULL},
	{CHAT, "\xef\xbb\xbf{}", 400, 0, IRB "byte order mark"},
	{CHAT, "{} {}", 400, 0, NULL},
	{CHAT, "{\"model\":1}", 400, 0, IRB "model: expected a string"},
	{CHAT, "{\"model\":null,\"x\":\"\\ud800\",\"y\":1e999,\"z\":123456789012345678901234567890}", 0,
		KVP_ASK_RENDER_CHAT, NULL},
	{CHAT, "{\"model\":\"\\ud800\"}", 400, 0, IRB "model: expected valid Unicode"},
	{CHAT, "{\"model\":\"\xef\xbf\xbd\"}", 0, KVP_ASK_RENDER_CHAT, NULL},
	{CHAT, "{\"nvext\":[]}", 400, 0, IRB "nvext: expected an object"},
	{CHAT, "{\"nvext\":{\"agent_hints\":1}}", 400, 0, IRB "nvext.agent_hints: expected an object"},
	{CHAT, "{\"nvext\":{\"agent_hints\":{\"osl\":-1}}}", 400, 0,
		IRB "nvext.agent_hints.osl: expected an integer in 0..4294967295"},
	{CHAT, "{\"nvext\":{\"agent_hints\":{\"osl\":1.5}}}", 400, 0, NULL},
	{CHAT, "{\"nvext\":{\"agent_hints\":{\"osl\":-1,\"osl\":3}}}", 0, KVP_ASK_RENDER_CHAT, NULL},
	{CHAT, "{\"nvext\":{\"agent_hints\":{\"priority\":2147483648}}}", 400, 0,
		IRB "nvext.agent_hints.priority: expected an integer in -2147483648..2147483647"},
	{CHAT, "{\"nvext\":{\"agent_hints\":{\"strict_priority\":-1}}}", 400, 0, NULL},
	{CHAT, "{\"nvext\":{\"agent_hints\":{\"latency_sensitivity\":\"x\"}}}", 400, 0, NULL},
	{CHAT, "{\"nvext\":{\"cache_salt\":7}}", 400, 0, IRB "nvext.cache_salt: expected a string"},
	{CHAT, "{\"cache_salt\":[]}", 400, 0, IRB "cache_salt: expected a string"},
	{CHAT, "{\"stream\":\"yes\"}", 0, KVP_ASK_RENDER_CHAT, NULL},
	{COMP, "{\"prompt\":\"text\"}", 0, KVP_ASK_RENDER_COMPLETIONS, NULL},
	{COMP, "{\"prompt\":[\"text\"]}", 0, KVP_ASK_RENDER_COMPLETIONS, NULL},
	{COMP, "{\"prompt\":[\"a\",\"b\"]}", 0, KVP_ASK_LOAD_ONLY, NULL},
	{COMP, "{\"prompt\":[1,2,3]}", 0, KVP_ASK_TOKENS, NULL},
	{COMP, "{\"prompt\":[[1,2,3]]}", 0, KVP_ASK_TOKENS, NULL},
	{COMP, "{\"prompt\":[[1],[2]]}", 0, KVP_ASK_LOAD_ONLY, NULL},
	{COMP, "{\"model\":\"m\"}", 0, KVP_ASK_LOAD_ONLY, NULL},
	{COMP, "{\"prompt\":null}", 0, KVP_ASK_LOAD_ONLY, NULL},
	{COMP, "{\"prompt\":[1,-2]}", 400, 0, IRB "prompt" BAD_IDS},
	{COMP, "{\"prompt\":[1,4294967296]}", 400, 0, IRB "prompt" BAD_IDS},
	{COMP, "{\"prompt\":[1,2.5]}", 400, 0, BAD_PROMPT},
	{COMP, "{\"prompt\":[\"a\",1]}", 400, 0, BAD_PROMPT},
	{COMP, "{\"prompt\":[\"a\",[1]]}", 400, 0, BAD_PROMPT},
	{COMP, "{\"prompt\":[]}", 400, 0, IRB "prompt: expected at least one element"},
	{COMP, "{\"prompt\":7}", 400, 0, IRB "prompt: expected a string or an array"},
	{COMP, "{\"prompt\":[1,2],\"nvext\":1}", 400, 0, IRB "nvext: expected an object"},
	{COMP, "[{\"prompt\":[1,2]}]", 400, 0, IRB "not a JSON object"},
	{COMP, "", 400, 0, IRB "empty text"},
	{COMP, "{\"prompt\":[1,2]", 400, 0, NULL},
	{VGEN, "{\"token_ids\":[1,2]}", 0, KVP_ASK_TOKENS, NULL},
	{VGEN, "{\"prompt\":\"x\"}", 0, KVP_ASK_LOAD_ONLY, NULL},
	{VGEN, "{\"token_ids\":[-1]}", 400, 0, IRB "token_ids" BAD_IDS},
	{VGEN, "{\"token_ids\":\"x\"}", 400, 0, IRB "token_ids" BAD_IDS},
	{VGEN, "{\"token_ids\":[]}", 400, 0, IRB "token_ids: expected at least one token id"},
	{VGEN, "garbage", 0, KVP_ASK_LOAD_ONLY, NULL},
	{VGEN, "{garbage", 0, KVP_ASK_LOAD_ONLY, NULL},
	{VGEN, "[{\"token_ids\":[1]}]", 0, KVP_ASK_LOAD_ONLY, NULL},
	{VGEN, "", 0, KVP_ASK_NO_BODY, NULL},
	{SGEN, "{\"input_ids\":[1,2]}", 0, KVP_ASK_TOKENS, NULL},
	{SGEN, "{\"input_ids\":[[1],[2]]}", 0, KVP_ASK_LOAD_ONLY, NULL},
	{SGEN, "{\"text\":\"x\"}", 0, KVP_ASK_LOAD_ONLY, NULL},
	{SGEN, "{\"input_ids\":[1,\"a\"]}", 400, 0, IRB "input_ids" BAD_IDS},
	{"/v1/embeddings", "{\"input\":\"x\",\"nvext\":7,\"model\":8}", 0, KVP_ASK_LOAD_ONLY, NULL},
	{"/v1/audio/transcriptions", "--boundary\r\n", 0, KVP_ASK_LOAD_ONLY, NULL},
	{"/v1/embeddings", "{broken", 0, KVP_ASK_LOAD_ONLY, NULL},
	{"/v1/embeddings", "", 0, KVP_ASK_NO_BODY, NULL},
};
static const struct src sglang[] = {
	{CHAT, "{}", 0, KVP_ASK_RENDER_CHAT, NULL},
	{COMP, "{\"prompt\":\"text\"}", 0, KVP_ASK_LOAD_ONLY, NULL},
	{COMP, "{\"prompt\":[1]}", 0, KVP_ASK_TOKENS, NULL},
};
static const struct src tokenize[] = {
	{CHAT, "{}", 0, KVP_ASK_RENDER_CHAT, NULL},
	{COMP, "{\"prompt\":\"text\"}", 0, KVP_ASK_RENDER_COMPLETIONS, NULL},
};
static const struct src none[] = {
	{CHAT, "{}", 0, KVP_ASK_LOAD_ONLY, NULL},
	{CHAT, "x", 400, 0, NULL},
	{COMP, "{\"prompt\":\"text\"}", 0, KVP_ASK_LOAD_ONLY, NULL},
};
static const struct src blocks[] = {
	{CHAT, "{\"messages\":[]}", 0, KVP_ASK_TEXT, NULL},
	{CHAT, "{}", 0, KVP_ASK_LOAD_ONLY, NULL},
	{COMP, "{\"prompt\":\"text\"}", 0, KVP_ASK_TEXT, NULL},
	{COMP, "{\"prompt\":[1]}", 0, KVP_ASK_TOKENS, NULL},
};

static void test_model(void)
{
	struct kvp_ask a = {.mem = {NULL}};
	char *t = malloc(2048);
	open_as(KVP_TOK_VLLM_RENDER);
	head(&a, "x-tenant-id:t");
	is_u64(body(&a, "{\"model\":\"adapter-1\",\"stream\":true}"), 0, "another model");
	ok(str_is(a.model, "adapter-1") && str_is(a.lora, "adapter-1") && a.stream == KVP_YES,
		"is the adapter's name");
	kvp_ask_reset(&a);
	head(&a, "a:b");
	body(&a, "{\"model\":\"m\",\"stream\":false}");
	ok(str_is(a.model, "m") && str_is(a.lora, NULL) && a.stream == KVP_NO, "the served model is none");
	kvp_ask_reset(&a);
	for (int len = 1024; len <= 1025; len++) {
		memset(t, 'm', 2048);
		memcpy(t, "{\"model\":\"", 10);
		memcpy(t + 10 + len, "\"}", 3);
		head(&a, "a:b");
		is_u64(body(&a, t), len == 1024 ? 0 : 400, "a name of %d bytes", len);
		kvp_ask_reset(&a);
	}
	memset(t, 't', 2047);
	memcpy(t, "x-tenant-id:", 12);
	t[12 + 1025] = 0;
	head(&a, t);
	is_u64(body(&a, "{}"), 400, "a tenant of 1025 bytes");
	kvp_ask_reset(&a);
	free(t);
}

static void test_prompts(void)
{
	static char text[] = "{\"prompt\":[5,6,7],\"model\":\"ad\"}"
			     "0123456789012345678901234567890123456789012345678901234567890123456789";
	size_t len = 31;
	struct kvp_ask a = {.mem = {NULL}}, b = {.mem = {NULL}}, c = {.mem = {NULL}};
	struct kvp_prompt q;
	open_as(KVP_TOK_VLLM_RENDER);
	head(&a, ":path:" COMP);
	is_u64(kvp_ask_body(&p, &a, text, len), 0, "token ids in the body");
	is_u64(kvp_ask_prompt(&p, &a, text, len, NULL, 16, &q), 0, "as a prompt");
	ok(q.form == KVP_PROMPT_TOKENS && q.token_cnt == 3 && q.token[2] == 7 && str_is(q.lora, "ad"),
		"its tokens");
	head(&b, "x-tenant-id:ten");
	body(&b, "{}");
	head(&c, ":path:" COMP);
	body(&c, "{\"prompt\":[9,9,9]}");
	kvp_ask_reset(&c);
	is_u64(kvp_ask_prompt(&p, &a, text, len, NULL, 16, &q), 0,
		"again, after another request used the parser");
	ok(q.token_cnt == 3 && q.token[0] == 5, "its tokens are the same");
	uint32_t ids[4] = {1, 2, 3, 4};
	struct kvp_ask_tokens t = {.token = ids, .token_cnt = 4};
	kvp_ask_prompt(&p, &b, "{}", 2, &t, 0, &q);
	ok(q.form == KVP_PROMPT_TOKENS && q.token == ids && q.token_cnt == 4 && !q.mm &&
			str_is(q.salt, "ten"),
		"a tokenizer's answer");
	kvp_ask_load_only(&b, &q);
	ok(q.form == KVP_PROMPT_HASHES && q.block_hash && !q.block_hash_cnt && q.seq_hash &&
			!q.seq_hash_cnt && q.isl_tok == 1,
		"load only: no hashes, at least one token");
	b.body_bytes = 4003;
	kvp_ask_load_only(&b, &q);
	is_u64(q.isl_tok, 1000, "a quarter of the body's bytes");
	kvp_ask_reset(&a);
	kvp_ask_reset(&b);
}

/* The first local hash of a completion of the token ids 0..7, blocks of 4. */
static uint64_t first_hash(const char *members, uint64_t *second)
{
	struct kvp_ask a = {.mem = {NULL}};
	struct kvp_prompt q;
	struct kvp_hasher h;
	uint64_t local[2] = {0, 0};
	char *t = calloc(1, 256 + KVP_JSON_SLACK_BYTES);
	snprintf(t, 256, "{\"prompt\":[0,1,2,3,4,5,6,7]%s}", members);
	head(&a, ":path:" COMP);
	if (!kvp_ask_body(&p, &a, t, strlen(t)) && !kvp_ask_prompt(&p, &a, t, strlen(t), NULL, 4, &q)) {
		kvp_hasher_init(&h, q.token, q.token_cnt, 4, KVP_HASH_WINDOW_PLAIN,
			kvp_hash_seed(q.lora.ptr, q.lora.len, q.salt.ptr, q.salt.len));
		kvp_hasher_local(&h, 0, 2, local);
	}
	kvp_ask_reset(&a);
	free(t);
	if (second)
		*second = local[1];
	return local[0];
}

static void test_r14(void)
{
	uint64_t second, plain, a, b, salted;
	open_as(KVP_TOK_VLLM_RENDER);
	plain = first_hash(",\"model\":\"m\"", NULL);
	a = first_hash(",\"model\":\"a\"", NULL);
	b = first_hash(",\"model\":\"b\"", NULL);
	salted = first_hash(",\"model\":\"m\",\"cache_salt\":\"tenant-a\"", &second);
	ok(plain && plain != a && plain != b && plain != salted && a != b && a != salted && b != salted,
		"R14: plain, two adapters and a salt have four hashes");
	ok(salted == 17009624042690211646u && second == 10000672136415158886u,
		"R14: those of the hashing specification");
	ok(first_hash(",\"model\":\"tenant-a\"", NULL) != salted, "R14: an adapter is no salt of that name");
}

static void test_text_blocks(void)
{
	/* value: 2 brackets and 39 bytes = 41 bytes, blocks of 4 * 4 */
	static const char text[] = "{ \"x\":1, \"messages\" : [\"0123456789abcdefghijklmnopqrstuvwxyzA\"] , "
				   "\"cache_salt\":\"s\"}";
	const char *value = strchr(text, '[');
	char *t = malloc(sizeof(text) + KVP_JSON_SLACK_BYTES);
	struct kvp_ask a = {.mem = {NULL}};
	struct kvp_prompt q;
	memset(t, 0, sizeof(text) + KVP_JSON_SLACK_BYTES);
	memcpy(t, text, sizeof(text));
	open_as(KVP_TOK_TEXT);
	head(&a, ":path:" CHAT);
	is_u64(kvp_ask_body(&p, &a, t, sizeof(text) - 1), 0, "a chat");
	is_u64(a.text_len, 41, "the bytes of its messages");
	is_u64(kvp_ask_prompt(&p, &a, t, sizeof(text) - 1, NULL, 4, &q), 0, "as text blocks");
	uint64_t seed = kvp_hash_seed("", 0, "s", 1), want[2], seq[2];
	want[0] = kvp_hash_bytes(value, 16, seed);
	want[1] = kvp_hash_bytes(value + 16, 16, seed);
	kvp_hash_chain(NULL, want, 2, seq);
	ok(q.form == KVP_PROMPT_HASHES && q.block_hash_cnt == 2 && q.seq_hash_cnt == 2 &&
			!memcmp(q.block_hash, want, 16) && !memcmp(q.seq_hash, seq, 16),
		"whole blocks of the raw bytes, salted");
	is_u64(q.isl_tok, 11, "a token for each begun four bytes");
	kvp_ask_prompt(&p, &a, t, sizeof(text) - 1, NULL, 0, &q);
	ok(!q.block_hash_cnt && q.isl_tok == (sizeof(text) - 1) / 4, "unknown block size: load only");
	kvp_ask_reset(&a);
	free(t);
}

static void test_media(void)
{
	uint32_t tok[40];
	struct kvp_ask a = {.mem = {NULL}};
	struct kvp_ask_mm mm[2] = {{111, 6, 5}, {222, 20, 4}};
	struct kvp_ask_tokens t = {
		.token = tok, .token_cnt = 40, .mm_form = KVP_ASK_MM_KNOWN, .mm = mm, .mm_cnt = 2};
	struct kvp_prompt q;
	for (uint32_t i = 0; i < 40; i++)
		tok[i] = i;
	open_as(KVP_TOK_VLLM_RENDER);
	head(&a, ":path:" CHAT);
	body(&a, "{}");
	a.source = KVP_ASK_RENDER_CHAT;
	is_u64(kvp_ask_prompt(&p, &a, "{}", 2, &t, 4, &q), 0, "two images");
	static const uint32_t cnt[10] = {0, 1, 1, 0, 0, 1, 0, 0, 0, 0};
	int same = q.mm_cnt == 10;
	for (int i = 0; same && i < 10; i++)
		same = q.mm[i].cnt == cnt[i] && (!cnt[i] || q.mm[i].hash[0] == (i < 5 ? 111 : 222));
	ok(same, "each block knows the objects that its tokens stand for");
	mm[1].off = 11;
	kvp_ask_prompt(&p, &a, "{}", 2, &t, 4, &q);
	ok(q.mm[2].cnt == 2 && q.mm[2].hash[0] == 111 && q.mm[2].hash[1] == 222 && q.mm[3].cnt == 1,
		"two objects in one block");
	t.mm_form = KVP_ASK_MM_UNKNOWN;
	t.mm_from = 9;
	kvp_ask_prompt(&p, &a, "{}", 2, &t, 4, &q);
	ok(!q.mm[1].cnt && q.mm[2].cnt == 1 && q.mm[9].cnt == 1, "unknown media: from their first block on");
	uint64_t first = q.mm[2].hash[0];
	kvp_ask_prompt(&p, &a, "{}", 2, &t, 4, &q);
	ok(q.mm[2].hash[0] != first, "something that no other request has");
	t.mm_from = 0;
	kvp_ask_prompt(&p, &a, "{}", 2, &t, 4, &q);
	ok(q.mm[0].cnt == 1, "or everything");
	kvp_ask_prompt(&p, &a, "{}", 2, &t, 0, &q);
	ok(q.form == KVP_PROMPT_HASHES, "unknown block size: load only");
	kvp_ask_reset(&a);
}

static void test_salted(void)
{
	static const struct {
		const char *in, *want;
	} t[] = {{"{\"a\":1}", "{\"cache_salt\":\"dynamo-cache-salt:t\\\"1\",\"a\":1}"},
		{" {}", " {\"cache_salt\":\"dynamo-cache-salt:t\\\"1\"}"},
		{"{\"cache_salt\" : \"x\" , \"b\":\"\\ud800\"}",
			"{\"cache_salt\" : \"dynamo-cache-salt:t\\\"1\" , \"b\":\"\\ud800\"}"},
		{"{\"cache_salt\":1,\"cache_salt\":2}",
			"{\"cache_salt\":1,\"cache_salt\":\"dynamo-cache-salt:t\\\"1\"}"},
		{"[]", NULL}, {"{", NULL}};
	struct kvp_ask a = {.mem = {NULL}};
	head(&a, "x-tenant-id:t\"1");
	body(&a, "{}");
	for (size_t i = 0; i < sizeof(t) / sizeof(t[0]); i++) {
		char *out = NULL, text[128] = "";
		uint64_t len = 0;
		int rc = kvp_ask_salted(&p, &a, t[i].in, strlen(t[i].in), &out, &len);
		if (rc == KVP_OK)
			snprintf(text, sizeof(text), "%.*s", (int)len, out);
		is_str(text, t[i].want ? t[i].want : "", "salted %s", t[i].in);
		free(out);
	}
	kvp_ask_reset(&a);
}

int main(void)
{
	open_as(KVP_TOK_VLLM_RENDER);
	test_paths();
	test_pair_paths();
	test_priorities();
	test_namespace();
	test_headers();
	test_policy_class();
	test_metadata_limits();
	test_sources(KVP_TOK_VLLM_RENDER, vllm, sizeof(vllm) / sizeof(vllm[0]));
	test_sources(KVP_TOK_SGLANG_RENDERER, sglang, sizeof(sglang) / sizeof(sglang[0]));
	test_sources(KVP_TOK_SGLANG_TOKENIZE, tokenize, sizeof(tokenize) / sizeof(tokenize[0]));
	test_sources(KVP_CONFIG_NO_WORD, none, sizeof(none) / sizeof(none[0]));
	test_sources(KVP_TOK_TEXT, blocks, sizeof(blocks) / sizeof(blocks[0]));
	test_model();
	test_prompts();
	test_r14();
	test_text_blocks();
	test_media();
	test_salted();
	kvp_ask_close(&p);
	return done();
}
