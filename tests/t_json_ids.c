/* Token ids, lists and value spans straight from the text: the same verdicts as the parser's tree. */
#include "ipc/json_ids.h"
#include "tests/tap.h"

#include <inttypes.h>
#include <stdlib.h>

static struct kvp_json *json;

/* An exact copy with the promised slack, filled with bytes that would change a number if they were read. */
static char *slack(const char *text, size_t len)
{
	char *t = malloc(len + KVP_JSON_SLACK_BYTES);
	memcpy(t, text, len);
	memset(t + len, '7', KVP_JSON_SLACK_BYTES);
	return t;
}

struct row {
	const char *text;
	int rc;
	uint32_t cnt, id[6];
	const char *rest; /* a member that must still be readable, with this text */
};
static const struct row rows[] = {
	{"{\"token_ids\":[1,2,3]}", KVP_OK, 3, {1, 2, 3}, NULL},
	{"{\"request_id\":\"r\",\"token_ids\":[151644,872,198],\"model\":\"m\"}", KVP_OK, 3,
		{151644, 872, 198}, "m"},
	{" { \"model\" : \"m\" , \"token_ids\" : [ 1 , 2,\n3\t] , \"x\":{\"token_ids\":[9]} } ", KVP_OK, 3,
		{1, 2, 3}, "m"},
	{"[{\"token_ids\":[1,2]}]", KVP_OK, 2, {1, 2}, NULL},
	{" [ { \"model\":\"m\", \"token_ids\":[1,2]} ] ", KVP_OK, 2, {1, 2}, "m"},
	{"[{\"token_ids\":[1]},{\"token_ids\":[2]}]", KVP_ERR_INVAL, 0, {0}, NULL},
	{"[]", KVP_ERR_INVAL, 0, {0}, NULL},
	{"[[{\"token_ids\":[1]}]]", KVP_ERR_INVAL, 0, {0}, NULL},
	{"{\"token_ids\":[]}", KVP_OK, 0, {0}, NULL},
	{"{\"token_ids\":[[4,5]]}", KVP_OK, 2, {4, 5}, NULL},
	{"{\"token_ids\":[[4],[5]]}", KVP_ERR_INVAL, 0, {0}, NULL},
	{"{\"token_ids\":[[]]}", KVP_OK, 0, {0}, NULL},
	{"{\"token_ids\":[0,10,100,12345678,123456789,4294967295]}", KVP_OK, 6,
		{0, 10, 100, 12345678, 123456789, 4294967295u}, NULL},
	{"{\"token_ids\":[4294967296]}", KVP_ERR_LIMIT, 0, {0}, NULL},
	{"{\"token_ids\":[1,99999999999999999999999]}", KVP_ERR_LIMIT, 0, {0}, NULL},
	{"{\"token_ids\":[1,-1]}", KVP_ERR_LIMIT, 0, {0}, NULL},
	{"{\"token_ids\":[-0]}", KVP_OK, 1, {0}, NULL},
	{"{\"token_ids\":[1.0]}", KVP_ERR_INVAL, 0, {0}, NULL},
	{"{\"token_ids\":[1,\"2\"]}", KVP_ERR_INVAL, 0, {0}, NULL},
	{"{\"token_ids\":[1,null]}", KVP_ERR_INVAL, 0, {0}, NULL},
	{"{\"token_ids\":\"1\"}", KVP_ERR_INVAL, 0, {0}, NULL},
	{"{\"token_ids\":{\"a\":1}}", KVP_ERR_INVAL, 0, {0}, NULL},
	{"{\"token_ids\":null}", KVP_ERR_NOTFOUND, 0, {0}, NULL},
	{"{\"input_ids\":[1]}", KVP_ERR_NOTFOUND, 0, {0}, NULL},
	{"{\"a\":{\"token_ids\":[1]}}", KVP_ERR_NOTFOUND, 0, {0}, NULL},
	{"{\"a\":\"\\\"token_ids\\\":[1]\"}", KVP_ERR_NOTFOUND, 0, {0}, NULL},
	{"{}", KVP_ERR_NOTFOUND, 0, {0}, NULL},
	{"[1]", KVP_ERR_INVAL, 0, {0}, NULL},
	{"7", KVP_ERR_INVAL, 0, {0}, NULL},
	/* names: duplicates, the last one wins; escapes */
	{"{\"token_ids\":[1],\"token_ids\":[2,3],\"model\":\"m\"}", KVP_OK, 2, {2, 3}, "m"},
	{"{\"token_ids\":[1],\"token\\u005fids\":[2,3]}", KVP_OK, 2, {2, 3}, NULL},
	{"{\"token\\u005fids\":[2,3]}", KVP_OK, 2, {2, 3}, NULL},
	{"{\"token_ids\":[1,2],\"token_ids\":null}", KVP_ERR_NOTFOUND, 0, {0}, NULL},
	{"{\"a\\\\\":1,\"token_ids\":[1]}", KVP_OK, 1, {1}, NULL},
	{"{\"a\\\\\\\"\":\"}]\\\\\",\"token_ids\":[1]}", KVP_OK, 1, {1}, NULL},
	/* no JSON */
	{"", KVP_ERR_PROTO, 0, {0}, NULL},
	{"{\"token_ids\":[1,2,3]", KVP_ERR_PROTO, 0, {0}, NULL},
	{"{\"token_ids\":[1,2,3", KVP_ERR_PROTO, 0, {0}, NULL},
	{"{\"token_ids\":[1,2,3,]}", KVP_ERR_PROTO, 0, {0}, NULL},
	{"{\"token_ids\":[1,,3]}", KVP_ERR_PROTO, 0, {0}, NULL},
	{"{\"token_ids\":[01]}", KVP_ERR_PROTO, 0, {0}, NULL},
	{"{\"token_ids\":[00000000]}", KVP_ERR_PROTO, 0, {0}, NULL},
	{"{\"token_ids\":[+1]}", KVP_ERR_PROTO, 0, {0}, NULL},
	{"{\"token_ids\":[1 2]}", KVP_ERR_PROTO, 0, {0}, NULL},
	{"{\"token_ids\":[1]}}", KVP_ERR_PROTO, 0, {0}, NULL},
	{"{\"token_ids\":[1],}", KVP_ERR_PROTO, 0, {0}, NULL},
	{"{\"token_ids\":[1],\"b\":tru}", KVP_ERR_PROTO, 0, {0}, NULL},
	{"{\"b\":nul,\"token_ids\":[1]}", KVP_ERR_PROTO, 0, {0}, NULL},
	{"{\"b\":\"\xff\",\"token_ids\":[1]}", KVP_ERR_PROTO, 0, {0}, NULL},
	{"{\"token_ids\":[1],\"b\":\"\xff\"}", KVP_ERR_PROTO, 0, {0}, NULL},
	{"{\"b\":}\"token_ids\":[1]}", KVP_ERR_PROTO, 0, {0}, NULL},
	{"{,\"token_ids\":[1]}", KVP_ERR_PROTO, 0, {0}, NULL},
	{"{\"b\" \"token_ids\":[1]}", KVP_ERR_PROTO, 0, {0}, NULL},
	{"\xef\xbb\xbf{\"token_ids\":[1]}", KVP_ERR_PROTO, 0, {0}, NULL},
	{"{\"token_ids\":[1]} x", KVP_ERR_PROTO, 0, {0}, NULL},
};

static void test_rows(void)
{
	struct kvp_json_ids ids = {.id = NULL};
	for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
		const struct row *r = &rows[i];
		char *t = slack(r->text, strlen(r->text));
		struct kvp_json_err e;
		int rc = kvp_json_ids_read(json, t, strlen(r->text), "token_ids", &ids, &e);
		int same = rc == r->rc && ids.cnt == r->cnt &&
			   !memcmp(ids.id ? ids.id : r->id, r->id, 4 * r->cnt);
		struct kvp_json_val v;
		ok(same, "ids of %s", r->text);
		if (!same)
			printf("# rc %d, %zu ids\n", rc, ids.cnt);
		ok((rc == KVP_ERR_PROTO) == (e.code == KVP_ERR_PROTO) && (!e.code || e.text),
			"its verdict agrees");
		if (r->rest)
			ok(kvp_json_get(ids.obj, "model", &v) == KVP_OK && kvp_json_str_is(v, r->rest),
				"its other members can be read");
		free(t);
	}
	kvp_json_ids_free(&ids);
}

/* Every length of number at every place of a word, and many of them. */
static void test_many(void)
{
	struct kvp_json_ids ids = {.id = NULL};
	size_t n = 20000, len = 0, wrong = 0;
	char *t = malloc(n * 12 + 128);
	uint64_t x = 1;
	uint32_t *want = malloc(n * sizeof(*want));
	len += (size_t)snprintf(t, 32, "{\"token_ids\":[");
	for (size_t i = 0; i < n; i++) {
		x = x * 6364136223846793005ull + 1442695040888963407ull;
		want[i] = (uint32_t)(x >> 32) >> (x >> 27 & 31);
		len += (size_t)snprintf(t + len, 16, "%s%u", i ? i % 3 ? "," : ", " : "", want[i]);
	}
	len += (size_t)snprintf(t + len, 64, "],\"n\":\"%s\"}", "after");
	int rc = kvp_json_ids_read(json, t, len, "token_ids", &ids, NULL);
	for (size_t i = 0; rc == KVP_OK && i < n; i++)
		wrong += ids.id[i] != want[i];
	ok(rc == KVP_OK && ids.cnt == n && !wrong, "%zu ids of every length are exact", n);
	/* cut anywhere, it is an error and no access outside */
	size_t bad = 0;
	for (size_t cut = 1; cut < 400; cut++) {
		char *c = slack(t, cut);
		bad += kvp_json_ids_read(json, c, cut, "token_ids", &ids, NULL) != KVP_ERR_PROTO;
		free(c);
	}
	is_u64(bad, 0, "a cut text is never accepted");
	free(t);
	free(want);
	kvp_json_ids_free(&ids);
}

/* Memory for a very long text does not stay. */
static void test_trim(void)
{
	struct kvp_json_ids ids = {.id = NULL};
	size_t len = 9u << 20;
	char *t = malloc(len + KVP_JSON_SLACK_BYTES);
	memset(t, ' ', len + KVP_JSON_SLACK_BYTES);
	memcpy(t, "{\"token_ids\":[1,2]", 18);
	t[len - 1] = '}';
	ok(kvp_json_ids_read(json, t, len, "token_ids", &ids, NULL) == KVP_OK && ids.cnt == 2,
		"a text of 9 MiB");
	ok(ids.cap > KVP_JSON_IDS_KEEP, "takes room for as many ids as it could hold");
	kvp_json_trim(json, 1 << 20);
	kvp_json_trim(json, 1 << 20);
	static const char text[] =
		"{\"token_ids\":[1,2,3]}                                                                  ";
	ok(kvp_json_ids_read(json, text, 21, "token_ids", &ids, NULL) == KVP_OK && ids.cnt == 3,
		"after it a short one");
	ok(ids.cap < 100, "takes little");
	free(t);
	kvp_json_ids_free(&ids);
}

static void test_depth(void)
{
	struct kvp_json_ids ids = {.id = NULL};
	char t[600];
	for (int deep = 127; deep <= 128; deep++) {
		size_t len = (size_t)snprintf(t, sizeof(t), "{\"token_ids\":[1],\"a\":");
		memset(t + len, '[', (size_t)deep);
		memset(t + len + deep, ']', (size_t)deep);
		len += 2 * (size_t)deep;
		t[len++] = '}';
		memset(t + len, 0, KVP_JSON_SLACK_BYTES);
		int rc = kvp_json_ids_read(json, t, len, "token_ids", &ids, NULL);
		is_u64(-rc, deep == 127 ? -KVP_OK : -KVP_ERR_LIMIT, "%d arrays inside the object", deep);
	}
	kvp_json_ids_free(&ids);
}

/* -- lists -- */

struct list_row {
	const char *text;
	int rc;
	int ids, hashes;  /* read past the tree: how many; -1 they are not, or in the tree */
	const char *copy; /* the hashes as they may be copied, NULL = not */
};
static const struct list_row list_rows[] = {
	{"{\"ids\":[1,2],\"hashes\":[-1,0],\"model\":\"m\"}", KVP_OK, 2, 2, "[-1,0]"},
	{"{\"hashes\":[9223372036854775807,-9223372036854775808]}", KVP_OK, -1, 2,
		"[9223372036854775807,-9223372036854775808]"},
	{" { \"model\" : \"m\" , \"hashes\" : [ 1 , 2,\n3\t] , \"ids\" : [4294967295]\r} ", KVP_OK, 1, 3,
		NULL},
	{"{\"hashes\":[1 ]}", KVP_OK, -1, 1, NULL},
	{"{\"hashes\":[1, 2]}", KVP_OK, -1, 2, NULL},
	{"{\"hashes\":[]}", KVP_OK, -1, -1, NULL},
	{"{\"hashes\":[9223372036854775808]}", KVP_OK, -1, -1, NULL},
	{"{\"hashes\":[-9223372036854775809]}", KVP_OK, -1, -1, NULL},
	{"{\"hashes\":[1,18446744073709551615,2]}", KVP_OK, -1, -1, NULL},
	{"{\"hashes\":[99999999999999999999999]}", KVP_OK, -1, -1, NULL},
	{"{\"hashes\":[-0]}", KVP_OK, -1, -1, NULL},
	{"{\"hashes\":[1.0]}", KVP_OK, -1, -1, NULL},
	{"{\"hashes\":[1e3,2]}", KVP_OK, -1, -1, NULL},
	{"{\"hashes\":[1,null]}", KVP_OK, -1, -1, NULL},
	{"{\"hashes\":[[1]]}", KVP_OK, -1, -1, NULL},
	{"{\"hashes\":null,\"ids\":\"1\"}", KVP_OK, -1, -1, NULL},
	{"{\"ids\":[4294967296],\"hashes\":[7]}", KVP_OK, -1, 1, "[7]"},
	{"{\"ids\":[-1]}", KVP_OK, -1, -1, NULL},
	{"{\"a\":{\"hashes\":[1]},\"b\":[\"hashes\",[1]]}", KVP_OK, -1, -1, NULL},
	{"[{\"hashes\":[1]}]", KVP_OK, -1, -1, NULL},
	{"[1]", KVP_OK, -1, -1, NULL},
	/* a name that comes twice, also spelled in another way */
	{"{\"hashes\":[1],\"hashes\":[2,3]}", KVP_OK, -1, -1, NULL},
	{"{\"hashes\":[1],\"hash\\u0065s\":null}", KVP_OK, -1, -1, NULL},
	{"{\"hashes\":[1.5],\"hashes\":[2,3]}", KVP_OK, -1, -1, NULL},
	{"{\"ids\":[1],\"hashes\":[1],\"ids\":[2]}", KVP_OK, -1, -1, NULL},
	/* no JSON */
	{"", KVP_ERR_PROTO, -1, -1, NULL},
	{"{\"hashes\":[1,2]", KVP_ERR_PROTO, -1, -1, NULL},
	{"{\"hashes\":[1,2", KVP_ERR_PROTO, -1, -1, NULL},
	{"{\"hashes\":[1,2,]}", KVP_ERR_PROTO, -1, -1, NULL},
	{"{\"hashes\":[1,,2]}", KVP_ERR_PROTO, -1, -1, NULL},
	{"{\"hashes\":[01]}", KVP_ERR_PROTO, -1, -1, NULL},
	{"{\"hashes\":[0123456789012345678]}", KVP_ERR_PROTO, -1, -1, NULL},
	{"{\"hashes\":[-]}", KVP_ERR_PROTO, -1, -1, NULL},
	{"{\"hashes\":[--1]}", KVP_ERR_PROTO, -1, -1, NULL},
	{"{\"hashes\":[1],}", KVP_ERR_PROTO, -1, -1, NULL},
	{"{\"hashes\":[1],\"b\":tru}", KVP_ERR_PROTO, -1, -1, NULL},
	{"{\"b\":\"\xff\",\"hashes\":[1]}", KVP_ERR_PROTO, -1, -1, NULL},
	{"{\"hashes\":[1]} x", KVP_ERR_PROTO, -1, -1, NULL},
};

static struct kvp_json_lists two_lists(void)
{
	return (struct kvp_json_lists){.list_cnt = 2,
		.list = {{.key = "ids", .of = KVP_JSON_LIST_U32},
			{.key = "hashes", .of = KVP_JSON_LIST_I64}}};
}

/* What was read past the tree of q is what the tree of the whole text says; everything else is there. */
static int same_as_tree(const struct kvp_json_lists *l, struct kvp_json_val root, struct kvp_json_val whole)
{
	static int64_t i64[32768];
	static uint32_t u32[32768];
	struct kvp_json_val v, w;
	size_t n;
	int same = kvp_json_len(root) == kvp_json_len(whole) && kvp_json_type(root) == kvp_json_type(whole);
	for (size_t i = 0; i < l->list_cnt; i++) {
		const struct kvp_json_list *li = &l->list[i];
		int is_u32 = li->of == KVP_JSON_LIST_U32;
		if (!li->is_read) {
			same &= (kvp_json_get(root, li->key, &v) == KVP_OK) ==
				(kvp_json_get(whole, li->key, &w) == KVP_OK);
			continue;
		}
		same &= kvp_json_get(root, li->key, &v) == KVP_OK && kvp_json_type(v) == KVP_JSON_ARR &&
			kvp_json_len(v) == 0 && kvp_json_get(whole, li->key, &w) == KVP_OK;
		if (!same)
			return 0;
		int rc = is_u32 ? kvp_json_u32s(w, u32, 32768, &n) : kvp_json_i64s(w, i64, 32768, &n);
		same = rc == KVP_OK && n == li->cnt &&
		       !memcmp(li->mem, is_u32 ? (void *)u32 : i64, n * (is_u32 ? 4 : 8));
	}
	return same;
}

static void test_lists(void)
{
	struct kvp_json_lists l = two_lists();
	struct kvp_json *other = kvp_json_new();
	for (size_t i = 0; i < sizeof(list_rows) / sizeof(list_rows[0]); i++) {
		const struct list_row *r = &list_rows[i];
		size_t len = strlen(r->text);
		char *t = slack(r->text, len);
		struct kvp_json_err e, e2;
		struct kvp_json_val root, whole;
		int rc = kvp_json_lists_read(json, t, len, &l, &root, &e);
		const struct kvp_json_list *ids = &l.list[0], *h = &l.list[1];
		ok(rc == r->rc && (ids->is_read ? (int)ids->cnt : -1) == r->ids &&
				(h->is_read ? (int)h->cnt : -1) == r->hashes,
			"lists of %s", r->text);
		int rc2 = kvp_json_parse(other, t, len, 128, &whole, &e2);
		ok(rc == rc2 && e.text == e2.text && (rc || same_as_tree(&l, root, whole)),
			"as the parser has it");
		if (h->is_read)
			ok(r->copy ? h->text && strlen(r->copy) == h->text_len &&
						!memcmp(h->text, r->copy, h->text_len)
				   : !h->text,
				"%s be copied", r->copy ? "they can" : "they can't");
		free(t);
	}
	kvp_json_free(other);
	kvp_json_lists_free(&l);
}

/* Every length of number, signs, mostly the longest; white space here and there. */
static void test_long_lists(void)
{
	struct kvp_json_lists l = two_lists();
	struct kvp_json_val root;
	size_t n = 20000, len = 0, wrong = 0, bad = 0;
	char *t = malloc(n * 24 + 128);
	int64_t *want = malloc(n * sizeof(*want));
	uint64_t x = 7;
	len += (size_t)snprintf(t, 32, "{\"hashes\":[");
	for (size_t i = 0; i < n; i++) {
		x = x * 6364136223846793005ull + 1442695040888963407ull;
		uint64_t y = x ^ x >> 31;
		want[i] = i % 4 ? (int64_t)y : (int64_t)(y >> (x >> 58)) * (y & 1 ? 1 : -1);
		want[i] = want[i] ? want[i] : 1;
		len += (size_t)snprintf(
			t + len, 32, "%s%" PRId64, i ? i % 50 ? "," : " , " : "", want[i]);
	}
	len += (size_t)snprintf(t + len, 64, "],\"n\":\"%s\"}", "after");
	memset(t + len, '7', KVP_JSON_SLACK_BYTES);
	int rc = kvp_json_lists_read(json, t, len, &l, &root, NULL);
	for (size_t i = 0; rc == KVP_OK && i < l.list[1].cnt && i < n; i++)
		wrong += l.list[1].i64[i] != want[i];
	ok(rc == KVP_OK && l.list[1].is_read && l.list[1].cnt == n && !wrong,
		"%zu signed numbers of every length are exact", n);
	for (size_t cut = 1; cut < 400; cut++) {
		char *c = slack(t, cut);
		bad += kvp_json_lists_read(json, c, cut, &l, &root, NULL) != KVP_ERR_PROTO;
		free(c);
	}
	is_u64(bad, 0, "a cut text is never accepted");
	/* one byte of the first numbers changed: the parser's verdict, and its numbers */
	struct kvp_json *other = kvp_json_new();
	for (size_t at = 11; at < 300; at++)
		for (const char *c = "0-,] .e\"9"; *c; c++) {
			char *m = slack(t, 700);
			struct kvp_json_val whole;
			memcpy(m + 690, "0]}       ", 10);
			m[at] = *c;
			int rc2 = kvp_json_parse(other, m, 700, 128, &whole, NULL);
			rc = kvp_json_lists_read(json, m, 700, &l, &root, NULL);
			bad += rc != rc2 || (!rc && !same_as_tree(&l, root, whole));
			free(m);
		}
	is_u64(bad, 0, "a changed byte means what it means to the parser");
	kvp_json_free(other);
	free(t);
	free(want);
	kvp_json_lists_free(&l);
}

static void test_lists_trim(void)
{
	struct kvp_json_lists l = two_lists();
	struct kvp_json_val root;
	size_t n = KVP_JSON_IDS_KEEP + 1, len = 11;
	char *t = malloc(2 * n + 128);
	memcpy(t, "{\"hashes\":[", len);
	for (size_t i = 0; i < n; i++, len += 2)
		memcpy(t + len, "1,", 2);
	memcpy(t + len - 1, "]}", 2);
	len++;
	memset(t + len, 0, KVP_JSON_SLACK_BYTES);
	ok(kvp_json_lists_read(json, t, len, &l, &root, NULL) == KVP_OK && l.list[1].cnt == n, "%zu numbers",
		n);
	kvp_json_trim(json, 1 << 20);
	memcpy(t, "{\"hashes\":[5]}", 14);
	memset(t + 14, 0, KVP_JSON_SLACK_BYTES);
	ok(kvp_json_lists_read(json, t, 14, &l, &root, NULL) == KVP_OK && l.list[1].cnt == 1 &&
			l.list[1].i64[0] == 5,
		"after them one");
	ok(l.list[1].cap < 1000, "takes little");
	free(t);
	kvp_json_lists_free(&l);
}

static void test_span(void)
{
	static const struct {
		const char *text, *key, *want; /* want NULL = not there */
	} s[] = {{"{\"messages\":[{\"a\":1}],\"b\":2}", "messages", "[{\"a\":1}]"},
		{" { \"b\" : 2 , \"messages\" :\n [ 1 , \"]\" ] \t, \"c\":3}", "messages", "[ 1 , \"]\" ]"},
		{"{\"prompt\":\"a\\\"b\\\\\"}", "prompt", "\"a\\\"b\\\\\""},
		{"{\"prompt\": 12.5e3 }", "prompt", "12.5e3"},
		{"{\"prompt\":true,\"x\":1}", "prompt", "true"},
		{"{\"prompt\":{\"prompt\":1}}", "prompt", "{\"prompt\":1}"},
		{"{\"prompt\":1,\"prompt\":[2]}", "prompt", "[2]"},
		{"{\"prompt\":1,\"prom\\u0070t\":[2],\"z\":0}", "prompt", "[2]"},
		{"{\"a\":{\"prompt\":1},\"b\":[{\"prompt\":2}]}", "prompt", NULL},
		{"{\"a\":\"{[\\\"\",\"prompt\":[[],{},\"}\"]}", "prompt", "[[],{},\"}\"]"},
		{"{}", "prompt", NULL}, {"[1]", "prompt", NULL}};
	for (size_t i = 0; i < sizeof(s) / sizeof(s[0]); i++) {
		struct kvp_json_val root;
		size_t off = 0, n = 0;
		char got[64] = "";
		kvp_json_parse(json, s[i].text, strlen(s[i].text), 128, &root, NULL);
		int rc = kvp_json_span(s[i].text, strlen(s[i].text), root, s[i].key, &off, &n);
		if (rc == KVP_OK && n < sizeof(got))
			memcpy(got, s[i].text + off, n);
		if (s[i].want)
			is_str(got, s[i].want, "value of %s in %s", s[i].key, s[i].text);
		else
			ok(rc == KVP_ERR_NOTFOUND, "%s has no %s", s[i].text, s[i].key);
	}
}

static void test_surrogate(void)
{
	static const struct {
		const char *text;
		int lone;
	} s[] = {{"\"\\ud83d\\ude00\"", 0}, {"\"\\ud83d\"", 1}, {"\"\\ude00\"", 1}, {"\"\\ud83d\\n\"", 1},
		{"\"\\\\ud83d\"", 0}, {"\"\\ud83d\\ud83d\\ude00\"", 1}, {"\"\\u0041\"", 0}, {"\"a\"", 0}};
	for (size_t i = 0; i < sizeof(s) / sizeof(s[0]); i++)
		is_u64(kvp_json_lone_surrogate(s[i].text, strlen(s[i].text)), s[i].lone, "%s", s[i].text);
}

int main(void)
{
	json = kvp_json_new();
	test_rows();
	test_many();
	test_trim();
	test_depth();
	test_lists();
	test_long_lists();
	test_lists_trim();
	test_span();
	test_surrogate();
	kvp_json_free(json);
	return done();
}
