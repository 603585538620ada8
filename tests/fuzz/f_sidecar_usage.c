/* Fuzz: any bytes as a decode engine's answer whose cached tokens are set. However it is cut, the same comes
 * out; a text that is changed is JSON with that count, and is not changed again; any other is not changed at
 * all.
 *
 * Input      byte 0: form of the answer, and where it is cut.
 */
#define KVP_FUZZ_NAME "sidecar_usage"
#include <kvpick/err.h>
#include <stdlib.h>
#include <string.h>

#include "daemons/sidecar/sidecar.h"
#include "tests/fuzz/replay.h"

static struct kvp_json *json;

static struct kvp_http_buf run(enum kvp_usage_form form, const char *text, uint64_t len, uint64_t cut)
{
	struct kvp_usage u = {.form = form, .cached_tok = 7};
	struct kvp_http_buf out = {0};
	KVP_ASSERT(kvp_usage_feed(&u, text, cut, &out) == 0);
	KVP_ASSERT(kvp_usage_feed(&u, text + cut, len - cut, &out) == 0);
	KVP_ASSERT(kvp_usage_end(&u, &out) == 0);
	kvp_usage_free(&u);
	return out;
}

static int same(const struct kvp_http_buf *a, const char *text, uint64_t len)
{
	return a->len == len && (!len || memcmp(a->p, text, len) == 0);
}

static int has_usage(const char *text, uint64_t len)
{
	struct kvp_json_val root, usage;
	return kvp_json_parse(json, text, len, KVP_JSON_DEPTH_MAX, &root, NULL) == 0 &&
	       kvp_json_get(root, "usage", &usage) == 0 && kvp_json_type(usage) == KVP_JSON_OBJ;
}

static void check_json(const char *text, uint64_t len, const struct kvp_http_buf *out)
{
	if (!has_usage(text, len)) {
		KVP_ASSERT(same(out, text, len));
		return;
	}
	KVP_ASSERT(kvp_pd_valid(out->p, out->len) == 0 && kvp_usage_cached(out->p, out->len) == 7);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len)
{
	if (!len)
		return 0;
	json = json ? json : kvp_json_new();
	enum kvp_usage_form form = data[0] % 2 ? KVP_USAGE_EVENTS : KVP_USAGE_JSON;
	const char *text = (const char *)data + 1;
	uint64_t n = len - 1, cut = n ? data[0] / 2 * n / 128 : 0;
	struct kvp_http_buf out = run(form, text, n, 0), other = run(form, text, n, cut);
	KVP_ASSERT(same(&out, other.p, other.len));
	struct kvp_http_buf again = run(form, out.p ? out.p : "", out.len, 0);
	KVP_ASSERT(same(&again, out.p, out.len));
	if (form == KVP_USAGE_JSON)
		check_json(text, n, &out);
	kvp_http_buf_free(&out);
	kvp_http_buf_free(&other);
	kvp_http_buf_free(&again);
	return 0;
}
