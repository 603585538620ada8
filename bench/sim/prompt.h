/* bench/sim/prompt.h — the tokens that a trace's block ids stand for, and the block hashes of a simulated
 * engine.
 *
 * Shape      pure functions. A trace names 512-token blocks by id; load generator and engine expand an id to
 *            the same 512 tokens, so a request may carry the ids instead of the tokens.
 * Truth, Writers, Readers, Ordering, Lifetime, Crash: no state.
 * Proved by  tests/t_load_trace.c
 */
#ifndef KVP_BENCH_SIM_PROMPT_H
#define KVP_BENCH_SIM_PROMPT_H

#include <stddef.h>
#include <stdint.h>

#define KVP_PROMPT_BLOCK_TOK 512u /* tokens a trace block */
#define KVP_PROMPT_VOCAB 32000u	  /* token ids are below */

/* kvp_prompt_mix is one step of the splitmix64 generator over x: the only source of randomness here. */
static inline uint64_t kvp_prompt_mix(uint64_t x)
{
	x += 0x9e3779b97f4a7c15ull;
	x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
	x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
	return x ^ (x >> 31);
}

/* kvp_prompt_next draws from a generator state. */
static inline uint64_t kvp_prompt_next(uint64_t *state)
{
	return kvp_prompt_mix((*state)++);
}

/* kvp_prompt_expand writes the tok_cnt tokens of the blocks id[0..]; the last block may be partial.
 * id has at least ceil(tok_cnt / 512) members. */
void kvp_prompt_expand(const uint64_t *id, uint32_t tok_cnt, uint32_t *tok);

/* kvp_prompt_text gives the tokens of a text: one per 4 bytes, the last one of what is left. Returns their
 * number, at most cap. */
uint32_t kvp_prompt_text(const char *s, size_t len, uint32_t *tok, uint32_t cap);

/* kvp_prompt_chain writes the chained hash of each whole block: tok_cnt / block_size of them, returned. These
 * are the engine's own (external) hashes, unrelated to the public block hashes. */
uint32_t kvp_prompt_chain(const uint32_t *tok, uint32_t tok_cnt, uint32_t block_size_tok, uint64_t *key);
#endif
