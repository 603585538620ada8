/* bench/sim/prompt.c — see prompt.h. */
#include "bench/sim/prompt.h"
#include <kvpick/hash.h>

#define CHAIN_ROOT 0x6b7670696b73696dull /* no parent */

void kvp_prompt_expand(const uint64_t *id, uint32_t tok_cnt, uint32_t *tok)
{
	for (uint32_t i = 0; i < tok_cnt; i += 2) {
		uint64_t in_block = i % KVP_PROMPT_BLOCK_TOK;
		uint64_t x = kvp_prompt_mix(id[i / KVP_PROMPT_BLOCK_TOK] * KVP_PROMPT_BLOCK_TOK + in_block);
		/* Two tokens a draw, scaled into the vocabulary by multiplication. */
		tok[i] = (uint32_t)(((x & 0xffffffffu) * KVP_PROMPT_VOCAB) >> 32);
		if (i + 1 < tok_cnt)
			tok[i + 1] = (uint32_t)(((x >> 32) * KVP_PROMPT_VOCAB) >> 32);
	}
}

uint32_t kvp_prompt_text(const char *s, size_t len, uint32_t *tok, uint32_t cap)
{
	uint32_t n = 0;
	for (size_t i = 0; i < len && n < cap; i += 4) {
		uint64_t x = 0;
		for (size_t k = i; k < len && k < i + 4; k++)
			x = x << 8 | (uint8_t)s[k];
		tok[n++] = (uint32_t)(kvp_prompt_mix(x) % KVP_PROMPT_VOCAB);
	}
	return n;
}

uint32_t kvp_prompt_chain(const uint32_t *tok, uint32_t tok_cnt, uint32_t block_size_tok, uint64_t *key)
{
	uint32_t n = tok_cnt / block_size_tok;
	uint64_t parent = CHAIN_ROOT;
	for (uint32_t i = 0; i < n; i++) {
		parent = kvp_hash_bytes(
			tok + (size_t)i * block_size_tok, block_size_tok * sizeof(*tok), parent);
		key[i] = parent;
	}
	return n;
}
