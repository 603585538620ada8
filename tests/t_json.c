/* t_json — JSON in and out. Expected values are written down here or come from the writer's own input. */
#include <math.h>
#include <stdlib.h>

#include "ipc/json_in.h"
#include "ipc/json_out.h"
#include "tests/tap.h"

static struct kvp_json *P;

static int parse(const char *s, struct kvp_json_val *v)
{
	return kvp_json_parse(P, s, strlen(s), KVP_JSON_DEPTH_MAX, v, NULL);
}

static struct kvp_json_val must(const char *s)
{
	struct kvp_json_val v = {NULL, 0};
	if (parse(s, &v) != KVP_OK) {
		printf("Bail out! %s does not parse\n", s);
		exit(1);
	}
	return v;
}

static struct kvp_json_val elem(struct kvp_json_val v, size_t n)
{
	struct kvp_json_iter it = kvp_json_each(v);
	for (size_t i = 0; i <= n; i++)
		kvp_json_next(&it);
	return it.val;
}

static void test_numbers(void)
{
	struct kvp_json_val v =
		must("[0,18446744073709551615,-9223372036854775808,9223372036854775807,3.0,1e2,-1,"
		     "18446744073709551616,-9223372036854775809,1e999,-1E999,true,4294967296,-0]");
	uint64_t u = 7;
	int64_t i = 7;
	uint32_t s = 7;
	double d = 7;
	ok(kvp_json_u64(elem(v, 0), &u) == KVP_OK && u == 0, "0 is an integer");
	ok(kvp_json_u64(elem(v, 1), &u) == KVP_OK && u == UINT64_MAX, "2^64-1 is exact");
	ok(kvp_json_i64(elem(v, 1), &i) == KVP_ERR_LIMIT && i == 7,
		"2^64-1 is outside int64, output untouched");
	ok(kvp_json_i64(elem(v, 2), &i) == KVP_OK && i == INT64_MIN, "-2^63 is exact");
	ok(kvp_json_u64(elem(v, 2), &u) == KVP_ERR_LIMIT, "a negative is outside uint64");
	ok(kvp_json_i64(elem(v, 3), &i) == KVP_OK && i == INT64_MAX, "2^63-1 is exact");
	ok(kvp_json_u64(elem(v, 3), &u) == KVP_OK && u == INT64_MAX, "2^63-1 as uint64");
	ok(kvp_json_type(elem(v, 4)) == KVP_JSON_DOUBLE, "3.0 is a double");
	ok(kvp_json_u64(elem(v, 4), &u) == KVP_ERR_INVAL, "3.0 is no integer");
	ok(kvp_json_i64(elem(v, 5), &i) == KVP_ERR_INVAL, "1e2 is no integer");
	ok(kvp_json_double(elem(v, 5), &d) == KVP_OK && d == 100, "1e2 is 100");
	ok(kvp_json_double(elem(v, 6), &d) == KVP_OK && d == -1, "an integer reads as double");
	ok(kvp_json_u64(elem(v, 7), &u) == KVP_ERR_LIMIT, "2^64 is beyond the integers");
	ok(kvp_json_double(elem(v, 7), &d) == KVP_OK && d == 18446744073709551616.0, "2^64 as double");
	ok(kvp_json_i64(elem(v, 8), &i) == KVP_ERR_LIMIT, "-2^63-1 is beyond the integers");
	ok(kvp_json_double(elem(v, 9), &d) == KVP_ERR_LIMIT, "1e999 cannot be read");
	ok(kvp_json_double(elem(v, 10), &d) == KVP_ERR_LIMIT, "-1E999 cannot be read");
	ok(kvp_json_type(elem(v, 9)) == KVP_JSON_DOUBLE, "1e999 stays a number");
	ok(kvp_json_u64(elem(v, 11), &u) == KVP_ERR_INVAL, "true is no integer");
	ok(kvp_json_u32(elem(v, 12), &s) == KVP_ERR_LIMIT && s == 7, "2^32 is outside uint32");
	ok(kvp_json_u32(elem(v, 13), &s) == KVP_OK && s == 0, "-0 is 0");
	char big[401];
	memset(big, '8', 400);
	big[400] = 0;
	ok(parse(big, &v) == KVP_OK && kvp_json_double(v, &d) == KVP_ERR_LIMIT,
		"400 digits parse, unreadable");
	big[30] = 0;
	ok(parse(big, &v) == KVP_OK && kvp_json_double(v, &d) == KVP_OK &&
			fabs(d / 8.88888888888e29 - 1) < 1e-9,
		"30 digits read as a double");
	v = must("1e-999");
	ok(kvp_json_double(v, &d) == KVP_OK && d == 0, "1e-999 is 0");
}

static void test_syntax(void)
{
	static const char *const bad[] = {"", " ", "{", "[1,]", "{\"a\":1,}", "{a:1}", "'a'", "[1 2]", "1 2",
		"NaN", "Infinity", "-", "01", "1.", ".5", "+1", "1e", "--1", "[1]x", "// c\n1", "/* c */1",
		"\xef\xbb\xbf{}", "\"\t\"", "\"a", "\"\\x\"", "\"\\u12\"", "\"\xff\"", "\"\xc0\x80\"",
		"\"\xed\xa0\x80\"", "nul", "tru", "[", "]", "{\"a\"}", "{\"a\":}", "\"\\ud80\"", "1e999x",
		"[01e999]"};
	struct kvp_json_val v = {NULL, 5};
	for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
		struct kvp_json_err e = {0, NULL};
		int rc = kvp_json_parse(P, bad[i], strlen(bad[i]), 128, &v, &e);
		ok(rc == KVP_ERR_PROTO && e.code == rc && e.text && v.at == 5, "case %zu is a syntax error",
			i);
	}
	ok(kvp_json_parse(P, "1\0", 2, 128, &v, NULL) == KVP_ERR_PROTO,
		"a NUL behind the value is a syntax error");
	ok(kvp_json_parse(P, "\"a\0b\"", 5, 128, &v, NULL) == KVP_ERR_PROTO, "a raw NUL in a string, too");
	ok(kvp_json_parse(P, "1", 1, 0, &v, NULL) == KVP_ERR_INVAL, "depth 0 is a bad argument");
	ok(kvp_json_parse(P, "1", 1, 129, &v, NULL) == KVP_ERR_INVAL, "depth 129 is a bad argument");
	ok(kvp_json_parse(P, "1", 1ull << 40, 128, &v, NULL) == KVP_ERR_LIMIT,
		"2^40 bytes are over the limit");
}

/* n levels, the innermost holding core. */
static int parse_nested(int n, const char *core, uint32_t depth_max)
{
	char buf[1200];
	size_t at = 0;
	for (int i = 0; i < n; i++) {
		const char *open = i % 2 ? "{\"a\":" : "[";
		memcpy(buf + at, open, strlen(open));
		at += strlen(open);
	}
	memcpy(buf + at, core, strlen(core));
	at += strlen(core);
	for (int i = n - 1; i >= 0; i--)
		buf[at++] = i % 2 ? '}' : ']';
	struct kvp_json_val v;
	return kvp_json_parse(P, buf, at, depth_max, &v, NULL);
}

static void test_depth(void)
{
	ok(parse_nested(128, "1", 128) == KVP_OK, "128 levels");
	ok(parse_nested(129, "1", 128) == KVP_ERR_LIMIT, "129 levels are too deep");
	ok(parse_nested(127, "[]", 128) == KVP_OK, "the 128th level empty");
	ok(parse_nested(128, "[]", 128) == KVP_ERR_LIMIT, "the 129th level empty is too deep, too");
	ok(parse_nested(128, "{}", 128) == KVP_ERR_LIMIT, "the same with an object");
	ok(parse_nested(2, "[1,[]]", 3) == KVP_ERR_LIMIT, "limit 3, 4 levels");
	ok(parse_nested(2, "[1,2.5,18446744073709551615,\"x\"]", 3) == KVP_OK, "limit 3, 3 levels");
	ok(parse_nested(0, "1", 1) == KVP_OK, "a scalar has no depth");
	ok(parse_nested(200, "1", 128) == KVP_ERR_LIMIT, "200 levels are too deep");
}

static void test_objects(void)
{
	struct kvp_json_val v = must("{\"a\":1,\"b\":[1,2],\"a\":2,\"\":3,\"k\\u0000z\":4,\"a\":7}"), m;
	uint64_t u = 0;
	ok(kvp_json_get(v, "a", &m) == KVP_OK && kvp_json_u64(m, &u) == KVP_OK && u == 7,
		"the last duplicate wins");
	ok(kvp_json_get(v, "", &m) == KVP_OK && kvp_json_u64(m, &u) == KVP_OK && u == 3, "empty key");
	ok(kvp_json_getn(v, "k\0z", 3, &m) == KVP_OK && kvp_json_u64(m, &u) == KVP_OK && u == 4,
		"key with NUL");
	ok(kvp_json_get(v, "k", &m) == KVP_ERR_NOTFOUND, "a key is not its prefix");
	ok(kvp_json_get(v, "c", &m) == KVP_ERR_NOTFOUND, "unknown key");
	is_u64(kvp_json_len(v), 6, "members, duplicates counted");
	struct kvp_json_iter it = kvp_json_each(v);
	char keys[64] = "";
	while (kvp_json_next(&it))
		snprintf(keys + strlen(keys), sizeof(keys) - strlen(keys), "%s=%d;", it.key,
			(int)kvp_json_type(it.val));
	is_str(keys, "a=2;b=5;a=2;=2;k=2;a=2;", "iteration follows the text");
	v = must("[]");
	ok(kvp_json_get(v, "a", &m) == KVP_ERR_INVAL, "a list has no members");
	it = kvp_json_each(v);
	ok(!kvp_json_next(&it) && kvp_json_len(v) == 0, "an empty list yields nothing");
	v = must("5");
	it = kvp_json_each(v);
	ok(!kvp_json_next(&it) && kvp_json_len(v) == 0, "a number yields nothing");
	int b = 5;
	ok(kvp_json_bool(must("true"), &b) == KVP_OK && b == 1, "true");
	ok(kvp_json_bool(must("false"), &b) == KVP_OK && b == 0, "false");
	ok(kvp_json_type(must("null")) == KVP_JSON_NULL, "null");
}

static void test_strings(void)
{
	const char *s;
	size_t n;
	struct kvp_json_val v = must("\"a\\u0000b\\u00e9\\ud83d\\ude00\"");
	ok(kvp_json_str(v, &s, &n) == KVP_OK && n == 9 && !memcmp(s, "a\0b\xc3\xa9\xf0\x9f\x98\x80", 10),
		"NUL, two-byte and surrogate pair escapes");
	v = must("[\"\\ud800\",\"\\udc00x\",\"\\ud83d\\ud83d\\ude00\",\"\\\\ud800\"]");
	ok(kvp_json_str(elem(v, 0), &s, &n) == KVP_OK && n == 3 && !memcmp(s, "\xef\xbf\xbd", 3),
		"a lone surrogate reads as U+FFFD");
	ok(kvp_json_str(elem(v, 1), &s, &n) == KVP_OK && n == 4 && s[3] == 'x', "a lone low one, too");
	ok(kvp_json_str(elem(v, 2), &s, &n) == KVP_OK && n == 7 && !memcmp(s + 3, "\xf0\x9f\x98\x80", 4),
		"a pair behind a lone one survives");
	ok(kvp_json_str_is(elem(v, 3), "\\ud800"), "an escaped backslash is no escape");
	ok(kvp_json_str(must("1"), &s, &n) == KVP_ERR_INVAL, "a number is no string");
	ok(!kvp_json_str_is(must("\"ab\""), "a") && !kvp_json_str_is(must("\"a\""), "ab"),
		"lengths are compared");
}

static void test_arrays(void)
{
	uint32_t u[4];
	int64_t i[4];
	uint64_t h[4];
	size_t n = 99;
	ok(kvp_json_u32s(must("[1,4294967295,0]"), u, 4, &n) == KVP_OK && n == 3 && u[1] == UINT32_MAX,
		"u32 list");
	ok(kvp_json_u32s(must("[]"), u, 0, &n) == KVP_OK && n == 0, "empty list");
	ok(kvp_json_u32s(must("[1,2,4294967296]"), u, 4, &n) == KVP_ERR_LIMIT && n == 2,
		"element 2 out of range");
	ok(kvp_json_u32s(must("[1,-2]"), u, 4, &n) == KVP_ERR_LIMIT && n == 1, "element 1 negative");
	ok(kvp_json_u32s(must("[1,2.0]"), u, 4, &n) == KVP_ERR_PROTO && n == 1, "element 1 no integer");
	ok(kvp_json_u32s(must("[[1]]"), u, 4, &n) == KVP_ERR_PROTO && n == 0, "element 0 a list");
	ok(kvp_json_u32s(must("[null]"), u, 4, &n) == KVP_ERR_PROTO && n == 0, "element 0 null");
	ok(kvp_json_u32s(must("[1,99999999999999999999]"), u, 4, &n) == KVP_ERR_LIMIT && n == 1,
		"beyond 64 bits");
	ok(kvp_json_u32s(must("[1,2,3,4,5]"), u, 4, &n) == KVP_ERR_FULL && n == 5, "5 elements into 4");
	ok(kvp_json_u32s(must("{}"), u, 4, &n) == KVP_ERR_INVAL && n == 0, "an object is no list");
	ok(kvp_json_i64s(must("[-9223372036854775808,9223372036854775807]"), i, 4, &n) == KVP_OK && n == 2 &&
			i[0] == INT64_MIN && i[1] == INT64_MAX,
		"i64 list");
	ok(kvp_json_i64s(must("[0,9223372036854775808]"), i, 4, &n) == KVP_ERR_LIMIT && n == 1,
		"2^63 is no i64");
	ok(kvp_json_u64s(must("[18446744073709551615]"), h, 4, &n) == KVP_OK && h[0] == UINT64_MAX,
		"u64 list");
	ok(kvp_json_u64s(must("[-1]"), h, 4, &n) == KVP_ERR_LIMIT && n == 0, "-1 is no u64");
	ok(kvp_json_h64s(must("[-1,18446744073709551615,-9223372036854775808]"), h, 4, &n) == KVP_OK &&
			n == 3 && h[0] == UINT64_MAX && h[1] == UINT64_MAX && h[2] == 1ull << 63,
		"hashes in both notations");
	size_t cnt = 40000, at = 0;
	char *text = malloc(cnt * 8 + KVP_JSON_SLACK_BYTES);
	uint32_t *out = malloc(cnt * sizeof(*out));
	text[at++] = '[';
	for (size_t k = 0; k < cnt; k++)
		at += (size_t)snprintf(text + at, 8, "%s%zu", k ? "," : "", k * 3);
	text[at++] = ']';
	struct kvp_json_val v;
	int rc = kvp_json_parse_slack(P, text, at, 128, KVP_JSON_HAS_SLACK, &v, NULL);
	ok(rc == KVP_OK && kvp_json_u32s(v, out, cnt, &n) == KVP_OK && n == cnt && out[39999] == 119997,
		"40000 elements without a copy");
	free(text);
	free(out);
}

static void test_slack(void)
{
	struct kvp_json_val v;
	for (size_t len = 1; len < 200; len++) { /* exact allocations: ASan sees any read behind the text */
		char *text = malloc(len + 2);
		memset(text, ' ', len + 2);
		text[len] = '7';
		uint64_t u = 0;
		int rc = kvp_json_parse(P, text, len + 1, 128, &v, NULL);
		if (rc || kvp_json_u64(v, &u) || u != 7)
			ok(0, "length %zu", len);
		free(text);
	}
	char tail[128] = "[1]23";
	memset(tail + 5, '9', 64);
	uint64_t u = 0;
	ok(kvp_json_parse_slack(P, tail, 3, 128, KVP_JSON_HAS_SLACK, &v, NULL) == KVP_OK &&
			kvp_json_u64(elem(v, 0), &u) == KVP_OK && u == 1,
		"slack bytes don't take part");
}

static void is_text(struct kvp_jw *w, const char *want, const char *name)
{
	ok(kvp_jw_done(w) == KVP_OK && w->len == strlen(want) && !memcmp(w->buf, want, w->len), "%s (%.*s)",
		name, (int)w->len, w->buf ? w->buf : "");
	kvp_jw_reset(w);
}

/* Every length of a number, against what the C library prints; alone and as a list. */
static void test_written_numbers(void)
{
	enum { N = 4000 };
	static int64_t v[N];
	static char want[N * 24];
	struct kvp_jw w, one;
	size_t len = 0;
	uint32_t differ = 0;
	uint64_t x = 88172645463325252ull;
	for (int i = 0; i < N; i++) {
		x ^= x << 13;
		x ^= x >> 7;
		x ^= x << 17;
		v[i] = (int64_t)(x >> (i % 64)) * (i % 3 ? 1 : -1);
	}
	uint64_t ten = 1;
	for (int i = 0; i < 20; i++, ten *= 10) { /* the powers of ten and their neighbours */
		v[3 * i] = (int64_t)(ten - 1);
		v[3 * i + 1] = (int64_t)ten;
		v[3 * i + 2] = (int64_t)(0 - ten);
	}
	v[60] = INT64_MIN;
	v[61] = INT64_MAX;
	kvp_jw_init(&w);
	kvp_jw_init(&one);
	for (int i = 0; i < N; i++) {
		int n = snprintf(want + len, 24, "%c%" PRId64, i ? ',' : '[', v[i]);
		kvp_jw_i64(&one, v[i]);
		differ += one.len != (size_t)n - 1 || memcmp(one.buf, want + len + 1, one.len) != 0;
		kvp_jw_reset(&one);
		n = snprintf(want + len, 24, "%c%" PRIu64, i ? ',' : '[', (uint64_t)v[i]);
		kvp_jw_u64(&one, (uint64_t)v[i]);
		differ += one.len != (size_t)n - 1 || memcmp(one.buf, want + len + 1, one.len) != 0;
		kvp_jw_reset(&one);
		len += (size_t)snprintf(want + len, 24, "%c%" PRId64, i ? ',' : '[', v[i]);
	}
	is_u64(differ, 0, "%d numbers read as the C library prints them", N);
	want[len++] = ']';
	kvp_jw_i64s(&w, v, N);
	ok(kvp_jw_done(&w) == KVP_OK && w.len == len && !memcmp(w.buf, want, len), "and as one list");
	kvp_jw_reset(&w);
	kvp_jw_arr(&w);
	kvp_jw_i64s(&w, v, 0);
	kvp_jw_i64s(&w, v + 61, 1);
	kvp_jw_i64(&w, 5);
	kvp_jw_end(&w);
	is_text(&w, "[[],[9223372036854775807],5]", "lists of none and one inside a list");
	kvp_jw_obj(&w);
	kvp_jw_i64s(&w, v, 1);
	ok(kvp_jw_done(&w) == KVP_ERR_INVAL, "a list where a key belongs is an error");
	kvp_jw_free(&w);
	kvp_jw_free(&one);
}

static void test_write(void)
{
	struct kvp_jw w;
	kvp_jw_init(&w);
	kvp_jw_obj(&w);
	kvp_jw_kstr(&w, "a\"b", "x\ny\x01\x7f/\\");
	kvp_jw_key(&w, "n");
	kvp_jw_arr(&w);
	kvp_jw_u64(&w, UINT64_MAX);
	kvp_jw_i64(&w, INT64_MIN);
	kvp_jw_i64(&w, -1);
	kvp_jw_u64(&w, 0);
	kvp_jw_null(&w);
	kvp_jw_arr(&w);
	kvp_jw_end(&w);
	kvp_jw_obj(&w);
	kvp_jw_end(&w);
	kvp_jw_raw(&w, "[1]", 3);
	kvp_jw_end(&w);
	kvp_jw_kbool(&w, "t", 1);
	kvp_jw_kbool(&w, "f", 0);
	kvp_jw_ku64(&w, "u", 5);
	kvp_jw_end(&w);
	is_text(&w,
		"{\"a\\\"b\":\"x\\ny\\u0001\x7f/"
		"\\\\\",\"n\":[18446744073709551615,-9223372036854775808,-1,0,null,[],"
		"{},[1]],\"t\":true,\"f\":false,\"u\":5}",
		"a nested object");
	static const double num[] = {
		0.1, 1, -0.0, 1e300, 5e-324, 1.0 / 3, 123456789012345680.0, NAN, INFINITY};
	kvp_jw_arr(&w);
	for (size_t i = 0; i < sizeof(num) / sizeof(num[0]); i++)
		kvp_jw_f64(&w, num[i]);
	kvp_jw_end(&w);
	is_text(&w,
		"[0.1,1.0,-0.0,1e+300,4.94065645841247e-324,0.3333333333333333,1.2345678901234568e+17,null,"
		"null]",
		"doubles");
	static const struct {
		const char *in, *out;
	} utf[] = {{"\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80", "\"\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80\""},
		{"a\xff", "\"a\xef\xbf\xbd\""}, {"\xc0\x80", "\"\xef\xbf\xbd\xef\xbf\xbd\""},
		{"\xed\xa0\x80", "\"\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd\""},
		{"\xe2\x82", "\"\xef\xbf\xbd\xef\xbf\xbd\""},
		{"\xf4\x90\x80\x80", "\"\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd\""}, {"", "\"\""}};
	for (size_t i = 0; i < sizeof(utf) / sizeof(utf[0]); i++) {
		kvp_jw_str(&w, utf[i].in);
		is_text(&w, utf[i].out, "UTF-8 checked");
	}
	kvp_jw_free(&w);
}

static void test_misuse(void)
{
	struct kvp_jw w;
	kvp_jw_init(&w);
	ok(kvp_jw_done(&w) == KVP_ERR_INVAL, "nothing written is not done");
	kvp_jw_obj(&w);
	ok(kvp_jw_done(&w) == KVP_ERR_INVAL, "an open object is not done");
	kvp_jw_u64(&w, 1);
	ok(w.err == KVP_ERR_INVAL, "a value without a key");
	kvp_jw_reset(&w);
	kvp_jw_arr(&w);
	kvp_jw_key(&w, "k");
	ok(w.err == KVP_ERR_INVAL, "a key in a list");
	kvp_jw_reset(&w);
	kvp_jw_obj(&w);
	kvp_jw_key(&w, "k");
	kvp_jw_end(&w);
	ok(w.err == KVP_ERR_INVAL, "a key without a value");
	kvp_jw_reset(&w);
	kvp_jw_u64(&w, 1);
	kvp_jw_u64(&w, 2);
	ok(w.err == KVP_ERR_INVAL, "two outermost values");
	kvp_jw_reset(&w);
	kvp_jw_end(&w);
	ok(w.err == KVP_ERR_INVAL, "an end too many");
	kvp_jw_reset(&w);
	for (int i = 0; i <= KVP_JW_DEPTH_MAX; i++)
		kvp_jw_arr(&w);
	ok(w.err == KVP_ERR_INVAL, "nested too deeply");
	kvp_jw_reset(&w);
	kvp_jw_arr(&w);
	kvp_jw_u64(&w, 1);
	kvp_jw_drain(&w);
	kvp_jw_u64(&w, 2);
	kvp_jw_end(&w);
	is_text(&w, ",2]", "drain keeps the nesting");
	kvp_jw_free(&w);
}

static uint64_t rnd(uint64_t *s)
{
	*s += 0x9e3779b97f4a7c15ull;
	uint64_t z = *s;
	z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
	z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
	return z ^ (z >> 31);
}

static void test_round_trip(void)
{
	uint64_t seed = tap_seed(20250131), s = seed;
	struct kvp_jw w;
	kvp_jw_init(&w);
	double in[500];
	kvp_jw_arr(&w);
	for (int i = 0; i < 500; i++) {
		uint64_t bits = rnd(&s);
		memcpy(&in[i], &bits, 8);
		if (!(fabs(in[i]) < 1e300))
			in[i] = (double)(int64_t)bits;
		kvp_jw_f64(&w, in[i]);
	}
	kvp_jw_end(&w);
	struct kvp_json_val v;
	int same = kvp_json_parse(P, w.buf, w.len, 128, &v, NULL) == KVP_OK && kvp_json_len(v) == 500;
	struct kvp_json_iter it = kvp_json_each(v);
	for (int i = 0; same && kvp_json_next(&it); i++) {
		double d = 0;
		same = kvp_json_type(it.val) == KVP_JSON_DOUBLE && kvp_json_double(it.val, &d) == KVP_OK &&
		       d == in[i];
	}
	ok(same, "500 random doubles come back exactly");
	const char *text = "{\"a\":[1,-2,18446744073709551615,0.5,\"x\\u0000\",null,true,false,[],{}],\"\":{"
			   "\"b\":[[[]]]}}";
	kvp_jw_reset(&w);
	kvp_jw_val(&w, must(text));
	is_text(&w, text, "a parsed value is written back");
	kvp_jw_free(&w);
}

int main(void)
{
	P = kvp_json_new();
	test_numbers();
	test_syntax();
	test_depth();
	test_objects();
	test_strings();
	test_arrays();
	test_slack();
	test_written_numbers();
	test_write();
	test_misuse();
	test_round_trip();
	kvp_json_free(P);
	kvp_json_free(NULL);
	return done();
}
