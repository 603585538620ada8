/* Usage of responses: whatever the cuts, bounded memory, 0 is not absent. */
#include "ipc/sse.h"
#include "tests/tap.h"

#include <stdlib.h>

static struct kvp_json *json;

#define USE(p, c, t, k)                                                                                      \
	"{\"id\":\"1\",\"choices\":[],\"usage\":{\"prompt_tokens\":" p ",\"completion_tokens\":" c           \
	",\"total_tokens\":" t ",\"prompt_tokens_details\":{\"cached_tokens\":" k "}}}"
#define CHUNK "data: {\"choices\":[{\"delta\":{\"content\":\"hi\"}}],\"usage\":null}\n\n"

static int whole(
	enum kvp_usage_form form, const char *text, size_t step, struct kvp_usage *out, uint64_t *events)
{
	struct kvp_usage_scan u;
	size_t len = strlen(text);
	kvp_usage_open(&u, form, json, 1 << 20);
	for (size_t at = 0; at < len; at += step)
		kvp_usage_read(&u, text + at, len - at < step ? len - at : step);
	int rc = kvp_usage_done(&u, out);
	if (events)
		*events = u.event_cnt;
	kvp_usage_close(&u);
	return rc;
}

static void test_stream(void)
{
	static const char text[] = ": comment\n" CHUNK "event: x\n  data:" USE(
		"8", "2", "10", "4") "\r\n\r\ndata:   [DONE]  \n\n";
	size_t len = sizeof(text) - 1, wrong = 0;
	struct kvp_usage g = {.has = 0};
	uint64_t events = 0;
	is_u64(whole(KVP_USAGE_SSE, text, len, &g, &events), KVP_OK, "an event stream with usage");
	ok(g.prompt_tok == 8 && g.completion_tok == 2 && g.total_tok == 10 && g.cached_tok == 4 &&
			g.has == 15,
		"its four numbers");
	is_u64(events, 2, "two data events, [DONE] is none");
	for (size_t cut = 1; cut < len; cut++) {
		struct kvp_usage_scan u;
		struct kvp_usage h = {.has = 0};
		kvp_usage_open(&u, KVP_USAGE_SSE, json, 0);
		kvp_usage_read(&u, text, cut);
		kvp_usage_read(&u, text + cut, len - cut);
		wrong +=
			kvp_usage_done(&u, &h) != KVP_OK ||
				memcmp(&h, &g, sizeof(h)) != 0 || u.event_cnt != 2;
		kvp_usage_close(&u);
	}
	is_u64(wrong, 0, "R15: the same for a cut at each of %zu places", len - 1);
	is_u64(whole(KVP_USAGE_SSE, text, 1, &g, &events), KVP_OK, "and byte by byte");
	is_u64(events, 2, "with as many events");
}

static void test_rules(void)
{
	struct kvp_usage g = {.has = 0};
	ok(whole(KVP_USAGE_SSE, "data: " USE("8", "2", "10", "0"), 7, &g, NULL) == KVP_OK &&
			g.has & KVP_USAGE_HAS_CACHED && g.cached_tok == 0,
		"no line end at the end is needed; 0 is an observation");
	ok(whole(KVP_USAGE_SSE, "data: {\"usage\":{\"prompt_tokens\":3,\"total_tokens\":3}}\n", 9, &g,
		   NULL) == KVP_OK &&
			!(g.has & KVP_USAGE_HAS_CACHED) && g.prompt_tok == 3,
		"missing details are none");
	ok(whole(KVP_USAGE_SSE,
		   "data: " USE("1", "1", "2", "1") "\ndata: " USE(
			   "5", "5", "10", "4") "\ndata: {\"usage\": oops\n",
		   11, &g, NULL) == KVP_OK &&
			g.cached_tok == 4,
		"the last that can be parsed wins");
	ok(whole(KVP_USAGE_SSE, CHUNK CHUNK "data: [DONE]\n", 5, &g, NULL) == KVP_ERR_NOTFOUND,
		"null is none");
	ok(whole(KVP_USAGE_SSE, "xdata: " USE("1", "1", "2", "1") "\n", 5, &g, NULL) == KVP_ERR_NOTFOUND,
		"other lines are none");
	ok(whole(KVP_USAGE_SSE, "", 5, &g, NULL) == KVP_ERR_NOTFOUND, "nothing is none");
	ok(whole(KVP_USAGE_JSON, USE("8", "2", "10", "4"), 13, &g, NULL) == KVP_OK && g.cached_tok == 4 &&
			g.total_tok == 10,
		"a whole body");
	ok(whole(KVP_USAGE_JSON, "{\"usage\":null}", 3, &g, NULL) == KVP_ERR_NOTFOUND, "with null");
	ok(whole(KVP_USAGE_JSON, "{\"usage\":{", 3, &g, NULL) == KVP_ERR_NOTFOUND, "not JSON");
	ok(whole(KVP_USAGE_JSON,
		   "{\"usage\":{\"prompt_tokens_details\":null,\"total_tokens\":-1,\"prompt_tokens\":\"8\"}}",
		   3, &g, NULL) == KVP_ERR_NOTFOUND,
		"wrong types are absent");
	ok(whole(KVP_USAGE_JSON, "[{\"usage\":{\"total_tokens\":1}}]", 3, &g, NULL) == KVP_ERR_NOTFOUND,
		"no object");
}

static void test_bounds(void)
{
	struct kvp_usage_scan u;
	struct kvp_usage g = {.has = 0};
	char *x = malloc(131072);
	memset(x, 'x', 131072);
	kvp_usage_open(&u, KVP_USAGE_SSE, json, 0);
	size_t most = 0;
	for (size_t at = 0; at < 131072; at += 4096) {
		kvp_usage_read(&u, x + at, 4096);
		most = u.cap > most ? u.cap : most;
	}
	static const char tail[] = "data: " USE("8", "2", "10", "4");
	kvp_usage_read(&u, "\n", 1);
	kvp_usage_read(&u, tail, sizeof(tail) - 1);
	ok(most <= 65536 && u.dropped, "a line of 131072 bytes is not kept (%zu bytes)", most);
	ok(kvp_usage_done(&u, &g) == KVP_OK && g.cached_tok == 4, "the line behind it is read");
	kvp_usage_close(&u);
	kvp_usage_open(&u, KVP_USAGE_SSE, json, 0);
	kvp_usage_read(&u, x, 131072);
	is_u64(u.len, 0, "a line over the bound empties the buffer");
	kvp_usage_read(&u, tail, sizeof(tail) - 1);
	ok(kvp_usage_done(&u, &g) == KVP_OK && g.cached_tok == 4, "and the usage behind it is still found");
	kvp_usage_close(&u);
	kvp_usage_open(&u, KVP_USAGE_JSON, json, 1000);
	kvp_usage_read(&u, x, 600);
	kvp_usage_read(&u, x, 600);
	ok(u.len == 0 && u.dropped == 1, "a body over its bound is given up");
	kvp_usage_read(&u, tail + 6, sizeof(tail) - 7);
	ok(kvp_usage_done(&u, &g) == KVP_ERR_NOTFOUND, "with what follows");
	kvp_usage_close(&u);
	kvp_usage_close(&u);
	free(x);
}

int main(void)
{
	json = kvp_json_new();
	test_stream();
	test_rules();
	test_bounds();
	kvp_json_free(json);
	return done();
}
