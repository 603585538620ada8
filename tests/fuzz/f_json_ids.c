/* Fuzz: any bytes as an answer with token ids. What is read straight from the text must be what the parser's
 * tree says, verdict and numbers; and the span of a member must hold that member's value. */
#define KVP_FUZZ_NAME "json_ids"
#include "tests/fuzz/replay.h"

#include <kvpick/err.h>
#include <stdlib.h>
#include <string.h>

#include "ipc/json_ids.h"

#define KEY "token_ids"

/* The slow way: 0 and *n ids, or that there are none. */
static int by_tree(struct kvp_json_val root, uint32_t *id, size_t cap, size_t *n)
{
	struct kvp_json_val v;
	*n = 0;
	if (kvp_json_type(root) == KVP_JSON_ARR && kvp_json_len(root) == 1) {
		struct kvp_json_iter it = kvp_json_each(root);
		kvp_json_next(&it);
		root = it.val;
	}
	if (kvp_json_get(root, KEY, &v))
		return -1;
	if (kvp_json_type(v) == KVP_JSON_ARR && kvp_json_len(v) == 1) {
		struct kvp_json_iter it = kvp_json_each(v);
		kvp_json_next(&it);
		if (kvp_json_type(it.val) == KVP_JSON_ARR)
			v = it.val;
	}
	return kvp_json_u32s(v, id, cap, n) ? -1 : 0;
}

static void span(
	struct kvp_json *p, struct kvp_json *q, const char *text, size_t len, struct kvp_json_val root)
{
	struct kvp_json_val v, again;
	size_t off, n;
	int rc = kvp_json_span(text, len, root, KEY, &off, &n);
	KVP_ASSERT((rc == KVP_OK) == (kvp_json_get(root, KEY, &v) == KVP_OK));
	if (rc != KVP_OK)
		return;
	KVP_ASSERT(off + n <= len && n);
	KVP_ASSERT(kvp_json_parse(q, text + off, n, KVP_JSON_DEPTH_MAX, &again, NULL) == KVP_OK);
	KVP_ASSERT(kvp_json_type(again) == kvp_json_type(v) && kvp_json_len(again) == kvp_json_len(v));
	(void)p;
}

/* Lists read past the tree, against the tree of the whole text. */
static void lists(struct kvp_json *q, const char *text, size_t len, int whole_rc, struct kvp_json_val whole)
{
	struct kvp_json_lists l = {.list_cnt = 2,
		.list = {{.key = KEY, .of = KVP_JSON_LIST_U32}, {.key = "hashes", .of = KVP_JSON_LIST_I64}}};
	struct kvp_json_val root, v;
	int rc = kvp_json_lists_read(q, text, len, &l, &root, NULL);
	KVP_ASSERT(rc == whole_rc);
	for (size_t i = 0; rc == KVP_OK && i < l.list_cnt; i++) {
		const struct kvp_json_list *li = &l.list[i];
		size_t size = li->of == KVP_JSON_LIST_U32 ? 4 : 8, n = 0;
		void *mem = malloc((len + 1) * size);
		KVP_ASSERT(mem);
		if (li->is_read) {
			KVP_ASSERT(kvp_json_get(whole, li->key, &v) == KVP_OK);
			KVP_ASSERT((size == 4 ? kvp_json_u32s(v, mem, len + 1, &n)
					      : kvp_json_i64s(v, mem, len + 1, &n)) == KVP_OK);
			KVP_ASSERT(n == li->cnt && n && !memcmp(mem, li->mem, n * size));
			KVP_ASSERT(!li->text || (li->text[0] == '[' && li->text[li->text_len - 1] == ']'));
		}
		free(mem);
	}
	KVP_ASSERT(rc != KVP_OK || kvp_json_len(root) == kvp_json_len(whole));
	kvp_json_lists_free(&l);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len)
{
	static struct kvp_json *p, *q;
	struct kvp_json_ids ids = {.id = NULL};
	struct kvp_json_val root = {NULL, 0};
	struct kvp_json_err e, e2;
	char *text = malloc(len + KVP_JSON_SLACK_BYTES);
	uint32_t *id = malloc((len + 1) * sizeof(*id));
	size_t n = 0;
	if (!p)
		p = kvp_json_new();
	if (!q)
		q = kvp_json_new();
	KVP_ASSERT(p && q && text && id);
	if (len)
		memcpy(text, data, len);
	memset(text + len, '0', KVP_JSON_SLACK_BYTES);
	int rc = kvp_json_parse(p, text, len, KVP_JSON_DEPTH_MAX, &root, &e);
	int has = rc == KVP_OK && by_tree(root, id, len + 1, &n) == 0;
	if (rc == KVP_OK)
		span(p, q, text, len, root);
	lists(q, text, len, rc, root);
	rc = kvp_json_ids_read(q, text, len, KEY, &ids, &e2);
	KVP_ASSERT((rc == KVP_OK) == has);
	KVP_ASSERT(rc != KVP_OK || (ids.cnt == n && (!n || !memcmp(ids.id, id, n * sizeof(*id)))));
	KVP_ASSERT(rc == KVP_OK || !ids.cnt);
	KVP_ASSERT(!e.code == !e2.code);
	kvp_json_ids_free(&ids);
	free(text);
	free(id);
	return 0;
}
