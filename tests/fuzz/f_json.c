/* f_json — any bytes as JSON: what parses is walked, written back, parsed again and written again: the two
 * texts must be the same, and everything must stay inside its limits. The judge that works piece by piece
 * says the same of the text, cut or not. */
#define KVP_FUZZ_NAME "json"
#include "tests/fuzz/replay.h"

#include <kvpick/err.h>
#include <string.h>

#include "ipc/json_check.h"
#include "ipc/json_out.h"

static uint64_t sum;

static void walk(struct kvp_json_val v, int depth)
{
	uint32_t u32[64];
	uint64_t u64[64], u = 0;
	int64_t i64[64], i = 0;
	size_t n = 0, len = 0;
	double d = 0;
	const char *s = "";
	int b = 0;
	KVP_ASSERT(depth <= KVP_JSON_DEPTH_MAX);
	sum += (uint64_t)kvp_json_u32s(v, u32, 64, &n) + (uint64_t)kvp_json_u64s(v, u64, 64, &n);
	sum += (uint64_t)kvp_json_i64s(v, i64, 64, &n) + (uint64_t)kvp_json_h64s(v, u64, 64, &n);
	sum += (uint64_t)kvp_json_bool(v, &b) + (uint64_t)kvp_json_double(v, &d);
	int is_u = kvp_json_u64(v, &u) == KVP_OK, is_i = kvp_json_i64(v, &i) == KVP_OK;
	KVP_ASSERT((is_u || is_i) == (kvp_json_type(v) == KVP_JSON_INT));
	if (kvp_json_str(v, &s, &len) == KVP_OK)
		KVP_ASSERT(s[len] == 0);
	struct kvp_json_iter it = kvp_json_each(v);
	for (n = 0; kvp_json_next(&it); n++) {
		struct kvp_json_val m;
		if (it.is_obj)
			KVP_ASSERT(kvp_json_getn(v, it.key, it.key_len, &m) == KVP_OK);
		walk(it.val, depth + 1);
		if (n > 200)
			return;
	}
	KVP_ASSERT(kvp_json_len(v) == n);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len)
{
	static struct kvp_json *p;
	static struct kvp_jw w, again;
	struct kvp_json_val v;
	struct kvp_json_err e;
	if (!p)
		p = kvp_json_new();
	KVP_ASSERT(p);
	int rc = kvp_json_parse(p, data, len, KVP_JSON_DEPTH_MAX, &v, &e);
	KVP_ASSERT(rc == e.code && (rc == KVP_OK) == !e.text);
	struct kvp_json_check whole = {.rc = KVP_OK}, cut = {.rc = KVP_OK};
	kvp_json_check_feed(&whole, data, len);
	kvp_json_check_feed(&cut, data, len / 3);
	kvp_json_check_feed(&cut, data + len / 3, len - len / 3);
	KVP_ASSERT((kvp_json_check_end(&whole) == KVP_OK) == (rc == KVP_OK));
	KVP_ASSERT(kvp_json_check_end(&cut) == kvp_json_check_end(&whole));
	if (rc != KVP_OK)
		return 0;
	walk(v, 0);
	kvp_jw_reset(&w);
	kvp_jw_val(&w, v);
	KVP_ASSERT(kvp_jw_done(&w) == KVP_OK);
	KVP_ASSERT(kvp_json_parse(p, w.buf, w.len, KVP_JSON_DEPTH_MAX, &v, &e) == KVP_OK);
	kvp_jw_reset(&again);
	kvp_jw_val(&again, v);
	KVP_ASSERT(kvp_jw_done(&again) == KVP_OK && again.len == w.len && !memcmp(again.buf, w.buf, w.len));
	return 0;
}
