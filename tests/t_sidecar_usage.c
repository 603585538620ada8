/* Cached tokens set in answers: which texts are changed and how, byte for byte; cut anywhere; the bound; how
 * the form of an answer is told. Over sockets and against a model: tests/s_sidecar_llmd.t. */
#include <kvpick/err.h>
#include <stdlib.h>

#include "daemons/sidecar/usage.h"
#include "tests/tap.h"

/* The answer in two pieces. */
static struct kvp_http_buf run(enum kvp_usage_form form, const char *text, uint64_t len, uint64_t cut)
{
	struct kvp_usage u = {.form = form, .cached_tok = 7};
	struct kvp_http_buf out = {0};
	int rc = kvp_usage_feed(&u, text, cut, &out);
	rc = rc ? rc : kvp_usage_feed(&u, text + cut, len - cut, &out);
	rc = rc ? rc : kvp_usage_end(&u, &out);
	kvp_usage_free(&u);
	if (rc)
		ok(0, "memory");
	return out;
}

static void becomes(enum kvp_usage_form form, const char *text, const char *want, const char *name)
{
	uint64_t len = strlen(text), wrong = 0;
	want = want ? want : text;
	for (uint64_t cut = 0; cut <= len; cut++) {
		struct kvp_http_buf b = run(form, text, len, cut);
		wrong += b.len != strlen(want) || (b.len && memcmp(b.p, want, b.len) != 0);
		kvp_http_buf_free(&b);
	}
	is_u64(wrong, 0, "%s, cut anywhere", name);
}

#define D7 "\"prompt_tokens_details\":{\"cached_tokens\":7}"

static void texts(void)
{
	const enum kvp_usage_form j = KVP_USAGE_JSON;
	becomes(j, "{\"usage\":{\"prompt_tokens_details\":{\"cached_tokens\": 30 ,\"x\":1}},\"z\":[ ]}",
		"{\"usage\":{\"prompt_tokens_details\":{\"cached_tokens\": 7 ,\"x\":1}},\"z\":[ ]}",
		"a count in its place");
	becomes(j, "{\"usage\":{\"t\":1 }}", "{\"usage\":{\"t\":1 ," D7 "}}", "no details");
	becomes(j, "{\"usage\":{ }}", "{\"usage\":{ " D7 "}}", "an empty usage");
	becomes(j, "{\"usage\":{\"prompt_tokens_details\":{\"x\":{}}}}",
		"{\"usage\":{\"prompt_tokens_details\":{\"x\":{},\"cached_tokens\":7}}}", "no count");
	becomes(j, "{\"usage\":{\"prompt_tokens_details\":null}}", "{\"usage\":{" D7 "}}", "details null");
	becomes(j, "{\"u\\u0073age\":{}}", "{\"u\\u0073age\":{" D7 "}}", "a name with an escape");
	becomes(j, "{\"usage\":{\"a\":1},\"usage\":{}}", "{\"usage\":{\"a\":1},\"usage\":{" D7 "}}",
		"the last of two");
	becomes(j, "{\"usage\":null}", NULL, "usage null");
	becomes(j, "[{\"usage\":{}}]", NULL, "an array");
	becomes(j, "{\"usage\":{}", NULL, "no JSON");
	becomes(j, "data: {\"usage\":{}}\n", NULL, "an event where JSON was announced");
	becomes(KVP_USAGE_RAW, "{\"usage\":{}}", NULL, "another form");
}

static void lines(void)
{
	const enum kvp_usage_form e = KVP_USAGE_EVENTS;
	becomes(e, "data: {\"usage\":{}}\n\ndata:{\"usage\":{}}\r\n\r\n: x\ndata: [DONE]\n\n",
		"data: {\"usage\":{" D7 "}}\n\ndata:{\"usage\":{" D7 "}}\r\n\r\n: x\ndata: [DONE]\n\n",
		"lines of both ends");
	becomes(e, "data: {\"usage\":{}}\rdata: {\"usage\":{}}\r\r",
		"data: {\"usage\":{" D7 "}}\rdata: {\"usage\":{" D7 "}}\r\r", "lines that end with CR");
	becomes(e, "data: 1\ndata: {\"usage\":{}}", "data: 1\ndata: {\"usage\":{" D7 "}}",
		"a last line without end");
	becomes(e, "{\"usage\":{}}\nevent: {\"usage\":{}}\ndata : {\"usage\":{}}\n", NULL, "other lines");
	becomes(e, "data: {\"usage\":{\ndata: }}\n", NULL, "a text on two lines");
	becomes(e, "", NULL, "nothing");
}

/* One line of that size, and a short one behind it. */
static void sized(uint64_t size, uint64_t cut, int is_set)
{
	static const char head[] = "data: {\"usage\":{},\"x\":\"", tail[] = "\"}\n",
			  next[] = "data: {\"usage\":{}}\n";
	uint64_t len = size + strlen(next), extra = strlen(D7);
	char *text = malloc(len);
	memset(text, 'x', size);
	memcpy(text, head, strlen(head));
	memcpy(text + size - strlen(tail), tail, strlen(tail));
	memcpy(text + size, next, strlen(next));
	struct kvp_http_buf b = run(KVP_USAGE_EVENTS, text, len, cut);
	is_u64(b.len, len + extra + (is_set ? extra : 0), "a line of %llu bytes %s, the next is set",
		(unsigned long long)size, is_set ? "is set" : "passes");
	ok(is_set || !memcmp(b.p, text, size), "as it should be");
	kvp_http_buf_free(&b);
	free(text);
}

/* The rest of a line that is too long may look like a line of its own. */
static void rest(void)
{
	static const char next[] = "data: {\"usage\":{}}\n";
	uint64_t size = KVP_USAGE_HELD_MAX + 1, len = size + strlen(next);
	char *text = malloc(len);
	memset(text, 'x', size);
	memcpy(text + size, next, strlen(next));
	struct kvp_http_buf b = run(KVP_USAGE_EVENTS, text, len, size);
	ok(b.len == len && !memcmp(b.p, text, len), "the rest of a line that is too long passes");
	kvp_http_buf_free(&b);
	free(text);
}

static void form_is(const char *fields, enum kvp_usage_form want)
{
	struct kvp_http_head h = {.line_max = 1000, .header_max = 1000};
	char text[512];
	uint64_t used;
	snprintf(text, sizeof(text), "HTTP/1.1 200 OK\r\n%s\r\n", fields);
	int rc = kvp_http_head_feed(&h, text, strlen(text), &used);
	rc = rc ? rc : kvp_http_head_parse(&h, KVP_HTTP_KIND_RESPONSE);
	ok(rc == KVP_OK && kvp_usage_form(&h) == want, "form of %.*s", (int)strcspn(fields, "\r"), fields);
	kvp_http_head_free(&h);
}

static void counts(void)
{
	static const struct {
		const char *text;
		uint64_t want;
	} c[] = {{"{\"usage\":{\"prompt_tokens_details\":{\"cached_tokens\":61}}}", 61},
		{"{\"usage\":{\"prompt_tokens_details\":{\"cached_tokens\":-1}}}", 0},
		{"{\"usage\":{\"prompt_tokens_details\":{\"cached_tokens\":1.0}}}", 0},
		{"{\"usage\":{\"prompt_tokens_details\":null}}", 0}, {"{\"usage\":[]}", 0}, {"{}", 0}};
	for (size_t i = 0; i < sizeof(c) / sizeof(c[0]); i++)
		is_u64(kvp_usage_cached(c[i].text, strlen(c[i].text)), c[i].want, "count of %s", c[i].text);
}

/* Without room nothing is kept: a piece that comes whole is still changed. */
static void tight(void)
{
	struct kvp_usage u = {.form = KVP_USAGE_EVENTS, .cached_tok = 7};
	struct kvp_http_buf out = {0};
	static const char whole[] = "data: {\"usage\":{}}\n", half[] = "data: {\"usa", rest[] = "ge\":{}}\n";
	kvp_usage_feed(&u, half, sizeof(half) - 1, &out);
	u.is_tight = 1;
	kvp_usage_feed(&u, rest, sizeof(rest) - 1, &out);
	kvp_usage_feed(&u, whole, sizeof(whole) - 1, &out);
	kvp_usage_feed(&u, half, sizeof(half) - 1, &out);
	is_u64(u.held.len, 0, "without room nothing is kept");
	kvp_usage_feed(&u, rest, sizeof(rest) - 1, &out);
	kvp_http_buf_put(&out, "", 1);
	is_str(out.p, "data: {\"usage\":{}}\ndata: {\"usage\":{" D7 "}}\ndata: {\"usage\":{}}\n",
		"pieces that come whole are changed, others pass");
	kvp_http_buf_free(&out);
	kvp_usage_free(&u);
}

int main(void)
{
	texts();
	lines();
	for (uint64_t cut = 0; cut < 3; cut++) {
		sized(KVP_USAGE_HELD_MAX, cut * KVP_USAGE_HELD_MAX / 2, 1);
		sized(KVP_USAGE_HELD_MAX + 1, cut * KVP_USAGE_HELD_MAX / 2, 0);
	}
	rest();
	tight();
	form_is("Content-Type: application/json\r\n", KVP_USAGE_JSON);
	form_is("content-type: Application/JSON; charset=utf-8\r\n", KVP_USAGE_JSON);
	form_is("content-type: text/event-stream\r\n", KVP_USAGE_EVENTS);
	form_is("content-type: text/event-stream2\r\n", KVP_USAGE_RAW);
	form_is("content-type: text/plain\r\n", KVP_USAGE_RAW);
	form_is("content-encoding: gzip\r\ncontent-type: application/json\r\n", KVP_USAGE_RAW);
	form_is("content-encoding: identity\r\ncontent-type: application/json\r\n", KVP_USAGE_JSON);
	form_is("x: y\r\n", KVP_USAGE_RAW);
	counts();
	return done();
}
