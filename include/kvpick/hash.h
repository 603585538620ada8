/* kvpick/hash.h — hashes of prompt blocks: request side and KV-event side must agree on them bit by bit.
 *
 * Shape      pure functions over caller memory, plus struct kvp_hasher: a view of one token array that hashes
 *            any range of its blocks on demand, so a walk that stops early hashes no more than it saw.
 * Truth      XXH3 64-bit, seeded. Block seed: 1337 + H(lora, 0) + H(salt, 1); chain seed: always 1337.
 * Writers    nobody: no shared memory, no state outside the caller's structs.
 * Readers    any thread of any process.
 * Ordering   none.
 * Lifetime   a kvp_hasher borrows the token array and the lists until its last call.
 * Crash      nothing shared is touched.
 * Proved by  tests/v_hashes.c (independently computed vectors).
 *
 * All hashes are raw 64-bit patterns; signedness is a matter of the wire form.
 */
#ifndef KVPICK_HASH_H
#define KVPICK_HASH_H

#include <stddef.h>
#include <stdint.h>

#define KVP_HASH_BASE_SEED 1337u
#define KVP_HASH_SECRET_BYTES 192

/* Window of a block: B tokens, or B + 1 (bigram mode of speculative decoding). The stride is B in both. */
enum kvp_hash_window { KVP_HASH_WINDOW_PLAIN, KVP_HASH_WINDOW_EAGLE };

/* Multimodal objects of one block, in the order of the prompt. cnt = 0 is the same as no list. */
struct kvp_hash_mm {
	const uint64_t *hash;
	uint32_t cnt;
};

/* Token ids that stand for media in a prompt; a block whose runs of them fit its objects is hashed with the
 * objects' pad values in their place (what SGLang caches under). Both unset: always appended. */
enum kvp_hash_placeholder_set { KVP_HASH_PLACEHOLDER_UNSET, KVP_HASH_PLACEHOLDER_SET };
struct kvp_hash_placeholder {
	enum kvp_hash_placeholder_set image_set, video_set;
	uint32_t image_tok, video_tok;
};

/* kvp_hash_bytes is the primitive H(bytes, seed). p may be NULL when len is 0. */
uint64_t kvp_hash_bytes(const void *p, size_t len, uint64_t seed);

/* kvp_hash_seed derives the block seed of a request or an event. Length 0 (any pointer) means absent. */
uint64_t kvp_hash_seed(const char *lora, size_t lora_len, const char *salt, size_t salt_len);

/* kvp_hash_block returns the local hash of one complete block.
 *
 * tok      n_tok tokens (the window, so B or B + 1).
 * mm       mm_cnt object hashes in any order, appended sorted with duplicates kept; not modified.
 * memory   lists of up to 256 objects need none; longer ones take a temporary heap copy.
 */
uint64_t kvp_hash_block(
	const uint32_t *tok, uint32_t n_tok, const uint64_t *mm, uint32_t mm_cnt, uint64_t seed);

/* kvp_hash_block_mm is kvp_hash_block with placeholder mapping: ph NULL or without a set id, or runs that do
 * not fit, fall back to the append form. The order of mm matters for the mapping. */
uint64_t kvp_hash_block_mm(const uint32_t *tok, uint32_t n_tok, const uint64_t *mm, uint32_t mm_cnt,
	uint64_t seed, const struct kvp_hash_placeholder *ph);

/* kvp_hash_seq extends the sequence chain by one block. The chain's first value is the first local hash
 * itself. */
uint64_t kvp_hash_seq(uint64_t prev_seq, uint64_t local);

/* kvp_hash_chain writes the n sequence hashes of n local hashes. prev: the sequence hash before local[0], or
 * NULL at the start of the chain. out may be the same array as local. */
void kvp_hash_chain(const uint64_t *prev, const uint64_t *local, size_t n, uint64_t *out);

/* kvp_hash_mm_id turns a media identifier into its hash: 64 hex digits give the value of the first 16,
 * anything else is hashed. KVP_ERR_NOTFOUND (out untouched) for an empty identifier: no object. */
int kvp_hash_mm_id(const char *s, size_t len, uint64_t *out);

/* kvp_hash_pad_value is the placeholder token that stands for an object in SGLang's cache. */
uint32_t kvp_hash_pad_value(uint64_t mm_hash);

/* kvp_hash_external_bytes reads an engine's block hash sent as bytes: the last 8, big-endian, padded left. */
uint64_t kvp_hash_external_bytes(const uint8_t *p, size_t len);

/* kvp_hash_taint hashes a taint for comparison in the hot path (XXH3, seed 0). */
uint64_t kvp_hash_taint(const char *s, size_t len);

struct kvp_hasher {
	const uint32_t *tok;
	uint64_t tok_cnt;
	uint64_t blocks; /* complete blocks in tok */
	uint64_t seed;
	const struct kvp_hash_mm *mm; /* list of block i at mm[i]; blocks >= mm_cnt have none */
	uint64_t mm_cnt;
	struct kvp_hash_placeholder placeholder;
	uint32_t block_size;
	uint32_t window_tok; /* B, or B + 1 in bigram mode */
	uint8_t secret[KVP_HASH_SECRET_BYTES]
		__attribute__((aligned(64))); /* of seed, for windows over 60 tokens */
};

/* kvp_hasher_init points a hasher at a token array. block_size 0 gives no blocks. No multimodal lists. */
void kvp_hasher_init(struct kvp_hasher *h, const uint32_t *tok, uint64_t tok_cnt, uint32_t block_size,
	enum kvp_hash_window window, uint64_t seed);

/* kvp_hasher_set_mm attaches per-block lists (mm[i] for block i, mm_cnt of them); ph may be NULL. */
void kvp_hasher_set_mm(struct kvp_hasher *h, const struct kvp_hash_mm *mm, uint64_t mm_cnt,
	const struct kvp_hash_placeholder *ph);

/* kvp_hasher_blocks returns the number of complete blocks. */
static inline uint64_t kvp_hasher_blocks(const struct kvp_hasher *h)
{
	return h->blocks;
}

/* kvp_hasher_local writes the local hashes of blocks first .. first + n - 1 and returns how many it wrote:
 * less than n only at the end of the prompt. Any order, any number of times. */
uint64_t kvp_hasher_local(const struct kvp_hasher *h, uint64_t first, uint64_t n, uint64_t *out);
#endif
