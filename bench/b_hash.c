/* Hashing a prompt: local hashes by the lazy hasher and the sequence chain, ns a block.
 * Run: make benches && build/release/bench/b_hash */
#include <kvpick/hash.h>

#include "bench/bench.h"

#define TOKENS 131072

struct work {
	struct kvp_hasher h;
	uint64_t blocks;
	uint64_t *local, *seq;
};

static void local_hashes(void *ctx)
{
	struct work *w = ctx;
	kvp_hasher_local(&w->h, 0, w->blocks, w->local);
}

static void chain(void *ctx)
{
	struct work *w = ctx;
	kvp_hash_chain(NULL, w->local, w->blocks, w->seq);
}

static void init_only(void *ctx)
{
	struct work *w = ctx;
	kvp_hasher_init(&w->h, w->h.tok, w->h.tok_cnt, w->h.block_size, KVP_HASH_WINDOW_PLAIN, w->h.seed);
}

int main(void)
{
	static uint32_t tok[TOKENS];
	static uint64_t local[TOKENS], seq[TOKENS];
	static const uint32_t size[] = {16, 32, 64, 128};
	bench_begin();
	for (uint32_t i = 0; i < TOKENS; i++)
		tok[i] = i * 2654435761u % 150000;
	for (size_t i = 0; i < sizeof(size) / sizeof(size[0]); i++) {
		struct work w = {.local = local, .seq = seq};
		kvp_hasher_init(&w.h, tok, TOKENS, size[i], KVP_HASH_WINDOW_PLAIN, 1337);
		w.blocks = kvp_hasher_blocks(&w.h);
		printf("bench=hash.local block=%u blocks=%" PRIu64 " ns_block=%.2f\n", size[i], w.blocks,
			bench_ns(local_hashes, &w) / (double)w.blocks);
		printf("bench=hash.chain block=%u blocks=%" PRIu64 " ns_block=%.2f\n", size[i], w.blocks,
			bench_ns(chain, &w) / (double)w.blocks);
		printf("bench=hash.init block=%u ns_op=%.2f\n", size[i], bench_ns(init_only, &w));
	}
	return 0;
}
