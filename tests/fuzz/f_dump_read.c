/* Fuzz: any bytes as a peer's dump. The verdict and everything told must not depend on how the text is cut,
 * and what is told must be in range. */
#define KVP_FUZZ_NAME "dump_read"
#include "tests/fuzz/replay.h"

#include <kvpick/err.h>
#include <stdlib.h>
#include <string.h>

#include "ipc/dump_read.h"

struct told {
	uint64_t sum, cnt;
	uint32_t block_size;
};

static void mix(struct told *t, uint64_t v)
{
	t->sum = (t->sum ^ v) * 0x9e3779b97f4a7c15ull;
	t->cnt++;
}

static int on_part(void *ctx, const char *key, uint32_t key_len, uint32_t block_size)
{
	struct told *t = ctx;
	KVP_ASSERT(block_size && key_len && key_len <= KVP_DREAD_KEY_MAX && memchr(key, ':', key_len));
	t->block_size = block_size;
	for (uint32_t i = 0; i < key_len; i++)
		mix(t, (uint8_t)key[i]);
	return KVP_OK;
}

static int on_event(void *ctx, const struct kvp_dread_event *e)
{
	struct told *t = ctx;
	KVP_ASSERT(t->block_size && e->tier < KVP_DREAD_TIER_CNT && e->op <= KVP_DREAD_CLEAR);
	KVP_ASSERT((e->op == KVP_DREAD_CLEAR) == !e->n);
	mix(t, e->worker_id ^ e->dp_rank ^ (uint64_t)e->op << 40 ^ (uint64_t)e->tier << 50 ^ e->parent);
	for (uint32_t i = 0; i < e->n; i++) {
		mix(t, e->ext[i]);
		mix(t, e->op == KVP_DREAD_STORE ? e->local[i] : 0);
	}
	return KVP_OK;
}

static int read_as(const uint8_t *data, size_t len, size_t piece, struct told *t)
{
	struct kvp_dread_cfg cfg = {on_part, on_event, t};
	struct kvp_dread *d = kvp_dread_new(&cfg);
	int rc = KVP_OK;
	KVP_ASSERT(d);
	memset(t, 0, sizeof(*t));
	for (size_t at = 0; !rc && at < len; at += piece)
		rc = kvp_dread_feed(d, (const char *)data + at, piece < len - at ? piece : len - at);
	if (!rc)
		rc = kvp_dread_end(d);
	KVP_ASSERT(!rc == !kvp_dread_error(d)[0]);
	kvp_dread_free(d);
	return rc;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len)
{
	struct told whole, cut;
	int a = read_as(data, len, len ? len : 1, &whole), b = read_as(data, len, 1 + len % 7, &cut);
	KVP_ASSERT(a == b && whole.cnt == cut.cnt && whole.sum == cut.sum);
	return 0;
}
