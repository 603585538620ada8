/* The sidecar's edits of JSON texts byte for byte, spans, the allowlist, judging of odd event streams, the
 * answer of a finished context leg. */
#include <kvpick/err.h>
#include <stdlib.h>

#include "daemons/sidecar/sidecar.h"
#include "tests/tap.h"

#define TEXT(t) .val = (t), .val_len = sizeof(t) - 1

static void edit_is(const char *in, const struct kvp_edit *e, size_t n, const char *want, const char *name)
{
	struct kvp_http_buf out = {0};
	int rc = kvp_span_edit(in, kvp_span_all(strlen(in)), e, n, &out);
	char text[512] = "";
	snprintf(text, sizeof(text), "%.*s", (int)out.len, out.p ? out.p : "");
	if (want)
		is_str(rc == KVP_OK ? text : "refused", want, "%s", name);
	else
		ok(rc == KVP_ERR_PROTO, "%s: refused", name);
	kvp_http_buf_free(&out);
}

static void edits(void)
{
	const struct kvp_edit set[] = {{.key = "a", TEXT("1")}}, drop[] = {{.key = "a"}},
			      maybe[] = {{.key = "a", TEXT("1"), .when = KVP_EDIT_IF_PRESENT}},
			      two[] = {{.key = "a", TEXT("1")}, {.key = "b", TEXT("{}")}, {.key = "c"}};
	edit_is("{}", set, 1, "{\"a\":1}", "into an empty object");
	edit_is(" { } \n", set, 1, " {\"a\":1} \n", "blanks around stay");
	edit_is("{\"b\":2}", set, 1, "{\"b\":2,\"a\":1}", "behind the last member");
	edit_is("{ \"b\" : 2 }", set, 1, "{ \"b\" : 2 ,\"a\":1}", "blanks of a member stay");
	edit_is("{\"a\":[{\"a\":2}],\"b\":{\"a\":3}}", set, 1, "{\"b\":{\"a\":3},\"a\":1}",
		"only at the top");
	edit_is("{\"a\":1,\"b\":2,\"a\":3}", drop, 1, "{\"b\":2}", "all of one name go");
	edit_is("{\"a\":1}", drop, 1, "{}", "the only one goes");
	edit_is("{\"b\":1,\"a\":1}", drop, 1, "{\"b\":1}", "the last one goes with its comma");
	edit_is("{\"\\u0061\":1,\"b\":1}", drop, 1, "{\"b\":1}", "an escaped name is what it spells");
	edit_is("{\"\\u0061b\":1,\"ab\\\"\":2}", drop, 1, "{\"\\u0061b\":1,\"ab\\\"\":2}",
		"a longer name is another");
	edit_is("{\"A\":1}", drop, 1, "{\"A\":1}", "case counts");
	edit_is("{\"b\":1}", maybe, 1, "{\"b\":1}", "not added where it is not");
	edit_is("{\"a\":9,\"b\":1}", maybe, 1, "{\"b\":1,\"a\":1}", "replaced where it is");
	edit_is("{\"c\":\"}\\\"],\",\"d\":\"\\\\\"}", two, 3, "{\"d\":\"\\\\\",\"a\":1,\"b\":{}}",
		"strings with brackets and quotes");
	edit_is("{\"x\":1E400,\"y\":-0.0,\"z\":18446744073709551616}", set, 1,
		"{\"x\":1E400,\"y\":-0.0,\"z\":18446744073709551616,\"a\":1}", "numbers of any size");
	edit_is("[1]", set, 1, NULL, "an array");
	edit_is("{\"a\":", set, 1, NULL, "a cut text");
	edit_is("{\"a\" 1}", set, 1, NULL, "no colon");
	edit_is("{\"a\\", set, 1, NULL, "an escape at the end");
}

static void spans(void)
{
	const char *t = "{\"a\":{\"b\":[ {\"c\":1} ,2]},\"a\":{\"b\":[[],3]},\"e\":[]}";
	struct kvp_span all = kvp_span_all(strlen(t)), v, w;
	ok(kvp_span_member(t, all, "a", &v) == KVP_OK && kvp_span_member(t, v, "b", &w) == KVP_OK &&
			w.len == 6 && !memcmp(t + w.at, "[[],3]", 6),
		"the last of two members counts");
	ok(kvp_span_first(t, w, &v) == KVP_OK && v.len == 2 && !memcmp(t + v.at, "[]", 2),
		"the first element");
	ok(kvp_span_member(t, all, "e", &v) == KVP_OK && kvp_span_first(t, v, &w) == KVP_ERR_NOTFOUND,
		"an empty array has none");
	ok(kvp_span_member(t, all, "zz", &v) == KVP_ERR_NOTFOUND, "an absent member is not found");
	ok(kvp_span_first(t, all, &v) == KVP_ERR_PROTO, "an object is no array");
}

static void values(void)
{
	const char *t =
		"{\"n\":1,\"a\":[ 1 , \"x\",[2 ],{}],\"n\":18446744073709551615,\"s\":\"\\u0061b\",\"m\":"
		"-9223372036854775808,\"o\":18446744073709551616,\"d\":1.0}";
	struct kvp_member m[] = {{.key = "n"}, {.key = "zz"}, {.key = "a"}, {.key = "s"}, {.key = "m"},
		{.key = "o"}, {.key = "d"}};
	struct kvp_span_iter it;
	struct kvp_span v;
	uint64_t n = 0;
	static const char *const element[] = {"1", "\"x\"", "[2 ]", "{}"};
	ok(kvp_span_members(t, kvp_span_all(strlen(t)), m, 7) == KVP_OK, "members in one pass");
	ok(m[0].cnt == 2 && kvp_span_u64(t, m[0].val, &n) == KVP_OK && n == UINT64_MAX,
		"two of one name, the last of them");
	ok(!m[1].cnt && !m[1].val.len && kvp_span_u64(t, m[1].val, &n), "an absent one is nothing");
	ok(kvp_span_each(t, m[2].val, &it) == KVP_OK, "an array");
	for (unsigned i = 0; i < 4; i++)
		ok(kvp_span_next(&it, &v) && kvp_span_is(t, v, element[i]), "element %u", i);
	ok(!kvp_span_next(&it, &v) && !kvp_span_next(&it, &v), "no fifth");
	ok(kvp_span_spells(t, m[3].val, "ab") && !kvp_span_spells(t, m[3].val, "a"),
		"a string with an escape");
	ok(kvp_span_is_int(t, m[4].val) && kvp_span_u64(t, m[4].val, &n), "the least integer of 64 bits");
	ok(!kvp_span_is_int(t, m[5].val) && kvp_span_u64(t, m[5].val, &n), "one over the largest is none");
	ok(!kvp_span_is_int(t, m[6].val) && kvp_span_u64(t, m[6].val, &n), "neither is one with a fraction");
	ok(kvp_span_each(t, m[3].val, &it) == KVP_ERR_PROTO &&
			kvp_span_each(t, m[1].val, &it) == KVP_ERR_PROTO,
		"a string and an absent value are no arrays");
}

static void allow(const char *list, const char *target, int want)
{
	struct kvp_target t;
	ok(kvp_target_parse(target, strlen(target), &t) == KVP_OK && kvp_target_allowed(list, &t) == want,
		"'%s' %s %s", list, want ? "allows" : "denies", target);
}

static void allowlists(void)
{
	allow("", "a:1", 1);
	allow("a", "a:1", 1);
	allow("A.b", "a.B:7", 1);
	allow("a", "ab:1", 0);
	allow("a:1", "a:1", 1);
	allow("a:1", "a:2", 0);
	allow("10.0.0.0/8", "10.255.0.1:1", 1);
	allow("10.0.0.0/8", "11.0.0.1:1", 0);
	allow("10.0.0.128/25", "10.0.0.129:1", 1);
	allow("10.0.0.128/25", "10.0.0.127:1", 0);
	allow("0.0.0.0/0", "1.2.3.4:1", 1);
	allow("0.0.0.0/0", "[::1]:1", 0);
	allow("0.0.0.0/0", "name:1", 0);
	allow("::/0", "[::1]:1", 1);
	allow("fd00::/8", "[fd00:1::2]:1", 1);
	allow("fd00::/8", "[fe00::2]:1", 0);
	allow("10.0.0.0/8", "[::ffff:10.1.2.3]:1", 1);
	allow("::1", "[0:0::1]:1", 1);
	allow("[::1]:8", "[::1]:8", 1);
	allow("[::1]:8", "[::1]:9", 0);
	allow("x,10.1.1.1:5,y", "10.1.1.1:5", 1);
	allow("127.0.0.1", "127.1:80", 0);
}

static int complete_cut(const char *text, size_t cut)
{
	struct kvp_sgl_check c;
	kvp_sgl_open(&c, KVP_SGL_EVENTS);
	int rc = kvp_sgl_feed(&c, text, cut);
	rc = rc ? rc : kvp_sgl_feed(&c, text + cut, strlen(text) - cut);
	rc = rc ? rc : kvp_sgl_end(&c);
	kvp_sgl_close(&c);
	return rc == KVP_OK;
}

static int complete(const char *text)
{
	return complete_cut(text, strlen(text));
}

static void streams(void)
{
	static const char good[] = "data: {\"choices\":[{\"finish_reason\":\"stop\"}]}\n\n";
	char text[400];
	snprintf(text, sizeof(text), "%sdata: [DONE]\n\n", good);
	ok(complete(text), "an event and [DONE]");
	snprintf(text, sizeof(text), "%sdata: [DONE]\n\n: later\n\nevent: x\n\n", good);
	ok(complete(text), "comments and events without data may follow");
	snprintf(text, sizeof(text), "%sdata: [DONE]\n", good);
	ok(!complete(text), "an event that has not ended is none");
	snprintf(text, sizeof(text), "%sdata: [DONE]\n\ndata: [DONE]\n\n", good);
	ok(!complete(text), "nothing comes behind [DONE], not even itself");
	ok(complete("data:{\"choices\":[{\ndata: \"finish_reason\":\"stop\"}]}\r\rdata:[DONE]\n\n"),
		"data in two lines, CR as line end, no blank");
	static const char crlf[] = "data: {\"choices\":\r\ndata: [{\"finish_reason\":\"stop\"}]}\r\n\r\n"
				   "data: [DONE]\r\n\r\n";
	size_t whole = 0;
	for (size_t cut = 0; cut < sizeof(crlf); cut++)
		whole += complete_cut(crlf, cut) != 0;
	is_u64(whole, sizeof(crlf), "data in two lines, CRLF as line end, cut anywhere");
	ok(!complete("data: "
		     "{\"choices\":[{\"finish_reason\":\"stop\"},{\"finish_reason\":\"abort\"}]}\n\ndata: "
		     "[DONE]\n\n"),
		"one aborted choice spoils it");
	ok(!complete("data\n\ndata: [DONE]\n\n"), "empty data is no JSON");
	snprintf(text, sizeof(text), "\xef\xbb\xbf\n%sdata: [DONE]\n\n", good);
	int seen = 0;
	for (size_t cut = 0; cut < 6; cut++)
		seen += complete_cut(text, cut);
	ok(complete(text + 3) && !seen, "a byte order mark spoils it, also in pieces");
}

static void context(void)
{
	static const char t[] =
		"{\"id\":\"c\",\"choices\":[{\"message\":{\"content\":\"R\"},\"finish_reason\":\"stop\","
		"\"disaggregated_params\":{\"ctx_request_id\":1,\"disagg_request_id\":9223372036854775807}}],"
		"\"usage\":{\"prompt_tokens\":5},\"prompt_token_ids\":[1]}";
	struct kvp_trt_context c;
	struct kvp_http_buf out = {0};
	ok(kvp_trt_context(t, sizeof(t) - 1, &c) == KVP_OK && !c.needs_generation,
		"a finished context answer");
	ok(kvp_trt_events(t, sizeof(t) - 1, &c, 1, 1, &out) == KVP_OK &&
			kvp_http_buf_put(&out, "", 1) == KVP_OK,
		"as events");
	is_str(out.p,
		"data: "
		"{\"id\":\"c\",\"object\":\"chat.completion.chunk\",\"choices\":[{\"index\":0,\"delta\":"
		"{\"content\":\"R\"},\"finish_reason\":\"stop\"}]}\n\ndata: {\"id\":\"c\",\"object\":"
		"\"chat.completion.chunk\",\"choices\":[],\"usage\":{\"prompt_tokens\":5}}\n\ndata: "
		"[DONE]\n\n",
		"one chunk, usage, [DONE]");
	kvp_http_buf_free(&out);
}

int main(void)
{
	edits();
	spans();
	values();
	allowlists();
	streams();
	context();
	return done();
}
