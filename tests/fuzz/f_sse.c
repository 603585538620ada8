/* Fuzz: any bytes as a response, cut anywhere: the same usage and events as in one piece, bounded memory. */
#define KVP_FUZZ_NAME "sse"
#include "tests/fuzz/replay.h"

#include <kvpick/err.h>
#include <string.h>

#include "ipc/sse.h"

static struct kvp_json *json;

static int scan(const uint8_t *data, size_t len, size_t step, enum kvp_usage_form form, struct kvp_usage *out,
	uint64_t *events, uint64_t *dropped)
{
	struct kvp_usage_scan u;
	kvp_usage_open(&u, form, json, 8192);
	for (size_t at = 0; at < len; at += step) {
		kvp_usage_read(&u, (const char *)data + at, len - at < step ? len - at : step);
		KVP_ASSERT(u.len <= u.cap && u.cap <= KVP_USAGE_LINE_MAX);
	}
	int rc = kvp_usage_done(&u, out);
	*events = u.event_cnt;
	*dropped = u.dropped;
	kvp_usage_close(&u);
	return rc;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len)
{
	struct kvp_usage a, b;
	uint64_t events, other, drop, drop2;
	if (!json)
		json = kvp_json_new();
	KVP_ASSERT(json);
	memset(&a, 0, sizeof(a));
	memset(&b, 0, sizeof(b));
	if (!len)
		return 0;
	enum kvp_usage_form form = data[0] & 1 ? KVP_USAGE_JSON : KVP_USAGE_SSE;
	size_t step = 1 + data[0] / 2;
	int rc = scan(data + 1, len - 1, len, form, &a, &events, &drop);
	int rc2 = scan(data + 1, len - 1, step, form, &b, &other, &drop2);
	KVP_ASSERT(rc == KVP_OK || a.has == 0);
	if (!drop && !drop2 && len <= KVP_USAGE_LINE_MAX) {
		KVP_ASSERT(rc == rc2 && events == other);
		KVP_ASSERT(rc != KVP_OK || !memcmp(&a, &b, sizeof(a)));
	}
	return 0;
}
