/* JSON judged piece by piece: hand-made texts with a known verdict, and random ones against kvp_json_parse;
 * cut anywhere, the verdict is the same. */
#include <kvpick/err.h>
#include <stdlib.h>

#include "ipc/json_check.h"
#include "tests/tap.h"

static uint64_t seed;

static uint64_t rnd(uint64_t below)
{
	seed = seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
	return (seed >> 33) % below;
}

/* The verdict in pieces of at most `most` bytes. */
static int check(const char *text, size_t len, size_t most)
{
	struct kvp_json_check c = {.rc = KVP_OK};
	for (size_t at = 0, n; at < len; at += n) {
		n = most == SIZE_MAX ? len : 1 + rnd(most);
		n = n < len - at ? n : len - at;
		char *copy = malloc(n); /* of its own: a read past its end is seen */
		memcpy(copy, text + at, n);
		kvp_json_check_feed(&c, copy, n);
		free(copy);
	}
	return kvp_json_check_end(&c);
}

static void known(void)
{
	static const struct {
		const char *text;
		int rc;
	} t[] = {{"{}", KVP_OK}, {" [ ] ", KVP_OK}, {"0", KVP_OK}, {"-0.5e+10", KVP_OK}, {"1E400", KVP_OK},
		{"\"\\ud800\"", KVP_OK}, {"18446744073709551616", KVP_OK}, {"{\"a\":1,\"a\":[true]}", KVP_OK},
		{"\"\xf4\x8f\xbf\xbf \xe0\xa0\x80\"", KVP_OK}, {"\"\x7f\"", KVP_OK}, {"", KVP_ERR_PROTO},
		{" ", KVP_ERR_PROTO}, {"{", KVP_ERR_PROTO}, {"{}}", KVP_ERR_PROTO}, {"[1,]", KVP_ERR_PROTO},
		{"{\"a\":1,}", KVP_ERR_PROTO}, {"{1:1}", KVP_ERR_PROTO}, {"{\"a\",1}", KVP_ERR_PROTO},
		{"[1}", KVP_ERR_PROTO}, {"{\"a\":1]", KVP_ERR_PROTO}, {"01", KVP_ERR_PROTO},
		{"-", KVP_ERR_PROTO}, {"1.", KVP_ERR_PROTO}, {".5", KVP_ERR_PROTO}, {"1e", KVP_ERR_PROTO},
		{"1e+", KVP_ERR_PROTO}, {"+1", KVP_ERR_PROTO}, {"1 2", KVP_ERR_PROTO}, {"1a", KVP_ERR_PROTO},
		{"tru", KVP_ERR_PROTO}, {"truee", KVP_ERR_PROTO}, {"NaN", KVP_ERR_PROTO},
		{"\"a", KVP_ERR_PROTO}, {"\"\\x\"", KVP_ERR_PROTO}, {"\"\\u12g4\"", KVP_ERR_PROTO},
		{"\"\n\"", KVP_ERR_PROTO}, {"\"\xc0\x80\"", KVP_ERR_PROTO}, {"\"\xc1\xbf\"", KVP_ERR_PROTO},
		{"\"\xe0\x9f\xbf\"", KVP_ERR_PROTO}, {"\"\xed\xa0\x80\"", KVP_ERR_PROTO},
		{"\"\xf0\x8f\xbf\xbf\"", KVP_ERR_PROTO}, {"\"\xf4\x90\x80\x80\"", KVP_ERR_PROTO},
		{"\"\xf5\x80\x80\x80\"", KVP_ERR_PROTO}, {"\"\x80\"", KVP_ERR_PROTO},
		{"\"\xe4\xb8\"", KVP_ERR_PROTO}, {"\xef\xbb\xbf{}", KVP_ERR_PROTO}, {"[1 2]", KVP_ERR_PROTO},
		{",", KVP_ERR_PROTO}, {"1,2", KVP_ERR_PROTO}, {"[\"a\":1]", KVP_ERR_PROTO}};
	for (size_t i = 0; i < sizeof(t) / sizeof(t[0]); i++) {
		size_t len = strlen(t[i].text);
		ok(check(t[i].text, len, SIZE_MAX) == t[i].rc && check(t[i].text, len, 1) == t[i].rc,
			"text %zu is %s", i, t[i].rc ? "refused" : "JSON");
	}
	struct kvp_json_check nul = {.rc = KVP_OK};
	ok(kvp_json_check_feed(&nul, "\"\\\0\"", 4) == KVP_ERR_PROTO, "a NUL is no escape");
}

static void depth(void)
{
	char text[2 * KVP_JSON_DEPTH_MAX + 8];
	for (size_t n = KVP_JSON_DEPTH_MAX; n <= KVP_JSON_DEPTH_MAX + 1; n++) {
		int want = n > KVP_JSON_DEPTH_MAX ? KVP_ERR_LIMIT : KVP_OK;
		memset(text, '[', n);
		memset(text + n, ']', n);
		ok(check(text, 2 * n, SIZE_MAX) == want, "%zu levels: %s", n, want ? "refused" : "fine");
	}
}

/* Long runs of plain bytes are taken eight at a time: what spoils one is seen wherever it stands. */
static void places(void)
{
	static const unsigned char spoils[] = {0, 0x1f, '\n', 0x80, 0xff, '"'};
	char text[64];
	unsigned wrong = 0, good = 0;
	for (size_t at = 1; at < 40; at++) {
		for (size_t i = 0; i < sizeof(spoils); i++) {
			memset(text, i & 1 ? 0x20 : 0x7e, 41);
			text[0] = text[40] = '"';
			good += check(text, 41, SIZE_MAX) == KVP_OK;
			text[at] = (char)spoils[i];
			wrong += check(text, 41, SIZE_MAX) == KVP_OK;
		}
	}
	is_u64(wrong, 0, "a byte that spoils a string is seen at each place");
	is_u64(good, 39 * sizeof(spoils), "without it the string is fine");
}

/* ---- random texts ---- */

static size_t put(char *out, const char *piece)
{
	size_t n = strlen(piece);
	memcpy(out, piece, n);
	return n;
}

static size_t value(char *out, unsigned depth_left)
{
	static const char *const scalar[] = {"true", "false", "null", "0", "-1", "12.50", "3e7", "1E-2",
		"\"\"", "\"plain text that is longer than eight\"", "\"\\n\\u00e9\\ud83d\\ude00\"",
		"\"\xc3\xa9\xe4\xb8\xad\xf0\x9f\x98\x80\"", "\"\\\\\\\"\"", "99999999999999999999", "1e999"};
	static const char *const blank[] = {"", "", "", " ", "\n\t", "\r"};
	size_t at = put(out, blank[rnd(6)]);
	uint64_t kind = depth_left ? rnd(4) : 0;
	if (kind < 2) {
		at += put(out + at, scalar[rnd(sizeof(scalar) / sizeof(scalar[0]))]);
	} else {
		uint64_t n = rnd(4);
		at += put(out + at, kind == 2 ? "[" : "{");
		for (uint64_t i = 0; i < n; i++) {
			at += put(out + at, i ? "," : "");
			at += put(out + at, kind == 3 ? i & 1 ? "\"k\":" : " \"\\u0041\" : " : "");
			at += value(out + at, depth_left - 1);
		}
		at += put(out + at, kind == 2 ? "]" : "}");
	}
	return at + put(out + at, blank[rnd(6)]);
}

static size_t spoil(char *text, size_t len)
{
	static const char bytes[] = "\"\\{}[],:0123-+.eEtfn u\n\x01\x80\xc3\xed\xf4";
	for (uint64_t n = rnd(3); n && len; n--) {
		size_t at = rnd(len);
		if (rnd(3)) {
			text[at] = bytes[rnd(sizeof(bytes) - 1)];
		} else {
			memmove(text + at, text + at + 1, len - at - 1);
			len--;
		}
	}
	return len;
}

static void random_texts(void)
{
	static char text[1 << 16];
	const char *replay = getenv("KVP_SEED");
	struct kvp_json *j = kvp_json_new();
	seed = replay ? strtoull(replay, NULL, 0) : 20261130;
	printf("# KVP_SEED=%" PRIu64 "\n", seed);
	unsigned wrong = 0, good = 0, cnt = 60000;
	for (unsigned i = 0; i < cnt; i++) {
		struct kvp_json_val v;
		size_t len = value(text, 5);
		len = i & 1 ? spoil(text, len) : len;
		int want = kvp_json_parse(j, text, len, KVP_JSON_DEPTH_MAX, &v, NULL) == KVP_OK;
		int whole = check(text, len, SIZE_MAX) == KVP_OK, cut = check(text, len, 7) == KVP_OK;
		good += want != 0;
		if (whole != want || cut != want) {
			wrong++;
			printf("# JSON %d, whole %d, in pieces %d: %.*s\n", want, whole, cut, (int)len, text);
		}
	}
	is_u64(wrong, 0, "%u random texts, %u of them JSON: the verdicts are the parser's", cnt, good);
	ok(good > cnt / 2 && good < cnt - cnt / 8, "some are JSON, some are not");
	kvp_json_free(j);
}

int main(void)
{
	known();
	depth();
	places();
	random_texts();
	return done();
}
