/* b_decode — decoding of KV-event batches and JSON bodies, one thread.
 * Usage: build/release/bench/b_decode [seconds per case, default 1] */
#include <msgpack.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "ipc/json_in.h"
#include "ipc/json_out.h"
#include "ipc/kv_event.h"

#define BLOCKS 64
#define BLOCK_TOK 16
#define REPEATS 5

static msgpack_sbuffer B;
static msgpack_packer P;
static double seconds = 1;
static uint64_t sink;

static double now_s(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static void str(const char *s)
{
	msgpack_pack_str(&P, strlen(s));
	msgpack_pack_str_body(&P, s, strlen(s));
}

static uint64_t mix(uint64_t i)
{
	i = (i ^ (i >> 30)) * 0xbf58476d1ce4e5b9ull;
	return i ^ (i >> 27);
}

static void hashes(void)
{
	msgpack_pack_array(&P, BLOCKS);
	for (uint64_t i = 0; i < BLOCKS; i++)
		msgpack_pack_uint64(&P, mix(i + 1) | 1ull << 63);
}

static void tokens(void)
{
	msgpack_pack_array(&P, BLOCKS * BLOCK_TOK);
	for (uint64_t i = 0; i < BLOCKS * BLOCK_TOK; i++)
		msgpack_pack_uint32(&P, (uint32_t)(mix(i + 7) % 128000)); /* a vocabulary of 128 k */
}

static void pack_array_store(void)
{
	msgpack_pack_array(&P, 6);
	str("BlockStored");
	hashes();
	msgpack_pack_nil(&P);
	tokens();
	msgpack_pack_int(&P, BLOCK_TOK);
	msgpack_pack_nil(&P);
}

static void pack_map_store(void)
{
	msgpack_pack_map(&P, 10);
	str("type"), str("BlockStored");
	str("block_hashes"), hashes();
	str("parent_block_hash"), msgpack_pack_nil(&P);
	str("token_ids"), tokens();
	str("block_size"), msgpack_pack_int(&P, BLOCK_TOK);
	str("lora_id"), msgpack_pack_nil(&P);
	str("medium"), str("GPU");
	str("lora_name"), msgpack_pack_nil(&P);
	str("group_idx"), msgpack_pack_int(&P, 0);
	str("kv_cache_spec_kind"), str("full_attention");
}

static void pack_batch(void (*store)(void))
{
	msgpack_sbuffer_clear(&B);
	msgpack_packer_init(&P, &B, msgpack_sbuffer_write);
	msgpack_pack_array(&P, 3);
	msgpack_pack_double(&P, 1.5);
	msgpack_pack_array(&P, 1);
	store();
	msgpack_pack_int(&P, 0);
}

/* Runs once(ctx) for the time of a repeat; prints the median of the repeats. */
static int by_value(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;
	return (x > y) - (x < y);
}

static void measure(
	const char *name, int (*once)(void *), void *ctx, double bytes, double items, const char *item)
{
	double ns[REPEATS];
	for (int r = -1; r < REPEATS; r++) { /* the first one warms up */
		uint64_t n = 0;
		double start = now_s(), end = start;
		while (end - start < seconds / REPEATS) {
			for (int i = 0; i < 16; i++, n++)
				if (once(ctx)) {
					fprintf(stderr, "%s: failed\n", name);
					exit(1);
				}
			end = now_s();
		}
		if (r >= 0)
			ns[r] = (end - start) * 1e9 / (double)n;
	}
	qsort(ns, REPEATS, sizeof(ns[0]), by_value);
	double m = ns[REPEATS / 2];
	printf("bench=decode.%s bytes=%.0f ns_op=%.0f MB_s=%.0f %s_s=%.2fM\n", name, bytes, m,
		bytes * 1e3 / m, item, items * 1e3 / m);
}

struct kv_case {
	struct kvp_kv_dec *dec;
	struct kvp_kv_norm *norm;
	enum { DECODE, NORMALISE, HASH } until;
};

static int once_kv(void *ctx)
{
	struct kv_case *c = ctx;
	struct kvp_kv_batch b;
	struct kvp_kv_op op;
	if (kvp_kv_decode(c->dec, B.data, B.size, &b) != KVP_OK || b.event[0].tok_cnt != BLOCKS * BLOCK_TOK)
		return 1;
	if (c->until == DECODE)
		return 0;
	if (kvp_kv_normalise(c->norm, &b.event[0], 0, &op) != KVP_KV_REASON_OK)
		return 1;
	if (c->until == NORMALISE)
		return 0;
	struct kvp_hasher h;
	uint64_t local[BLOCKS];
	kvp_hasher_init(&h, op.tok, op.tok_cnt, op.block_size, op.window, op.seed);
	if (kvp_hasher_local(&h, 0, BLOCKS, local) != BLOCKS)
		return 1;
	sink += local[BLOCKS - 1];
	return 0;
}

struct json_case {
	struct kvp_json *parser;
	struct kvp_jw text;
	const char *key;
	uint64_t *out;
	size_t cnt;
};

static int once_json(void *ctx)
{
	struct json_case *c = ctx;
	struct kvp_json_val root, list;
	size_t n = 0;
	if (kvp_json_parse(c->parser, c->text.buf, c->text.len, 128, &root, NULL) != KVP_OK ||
		kvp_json_get(root, c->key, &list) != KVP_OK)
		return 1;
	int rc = strcmp(c->key, "token_ids") ? kvp_json_h64s(list, c->out, c->cnt, &n)
					     : kvp_json_u32s(list, (uint32_t *)c->out, c->cnt, &n);
	return rc != KVP_OK || n != c->cnt;
}

static void json(const char *name, const char *key, size_t cnt)
{
	struct json_case c = {.parser = kvp_json_new(), .key = key, .cnt = cnt, .out = calloc(cnt, 8)};
	kvp_jw_init(&c.text);
	kvp_jw_obj(&c.text);
	kvp_jw_kstr(&c.text, "model_name", "m");
	kvp_jw_key(&c.text, key);
	kvp_jw_arr(&c.text);
	for (size_t i = 0; i < cnt; i++) {
		if (strcmp(key, "token_ids"))
			kvp_jw_i64(&c.text, (int64_t)mix(i + 1));
		else
			kvp_jw_u64(&c.text, mix(i + 1) % 128000);
	}
	kvp_jw_end(&c.text);
	kvp_jw_end(&c.text);
	measure(name, once_json, &c, (double)c.text.len, (double)cnt, "values");
	kvp_jw_free(&c.text);
	kvp_json_free(c.parser);
	free(c.out);
}

int main(int argc, char **argv)
{
	static const struct {
		const char *name;
		void (*store)(void);
	} shape[] = {{"array", pack_array_store}, {"map", pack_map_store}};
	static const char *const until[] = {"decode", "normalise", "hash"};
	struct kv_case c = {.dec = kvp_kv_dec_new(), .norm = kvp_kv_norm_new(BLOCK_TOK)};
	if (argc > 1)
		seconds = strtod(argv[1], NULL);
	msgpack_sbuffer_init(&B);
	for (int s = 0; s < 2; s++) {
		pack_batch(shape[s].store);
		for (int u = DECODE; u <= HASH; u++) {
			char name[64];
			snprintf(name, sizeof(name), "kv_%s_%s", shape[s].name, until[u]);
			c.until = u;
			measure(name, once_kv, &c, (double)B.size, BLOCKS, "blocks");
		}
	}
	json("json_128_hashes", "block_hashes", 128);
	json("json_32k_tokens", "token_ids", 32768);
	msgpack_sbuffer_destroy(&B);
	kvp_kv_norm_free(c.norm);
	kvp_kv_dec_free(c.dec);
	return sink == 1;
}
