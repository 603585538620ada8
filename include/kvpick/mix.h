/* kvpick/mix.h — where a word belongs in a hash table, when the word was chosen by somebody else.
 *
 * Shape      two secret words; a word is folded with them (64 x 64 -> 128 bit multiplication), so that nobody
 *            who doesn't know them can choose words that meet. The fold alone leaves rows of numbers in rows,
 *            which linear probing does not stand: it is finished with a fixed mix. All bits are good.
 * Truth      the secret: drawn once for a table of one process, or derived from the region's for a table in
 *            shared memory, where it is kept in the object's header.
 * Who        any thread; no state.
 */
#ifndef KVPICK_MIX_H
#define KVPICK_MIX_H

#include <kvpick/err.h>
#include <stdint.h>
#include <sys/random.h>

struct kvp_mix {
	uint64_t key[2];
};

/* kvp_mix_of derives a secret from two words, which may be anything, also 0. */
static inline struct kvp_mix kvp_mix_of(const uint64_t salt[2])
{
	struct kvp_mix m = {{salt[0] ^ 0xa0761d6478bd642full, (salt[1] ^ 0xe7037ed1a0b428dbull) | 1}};
	return m;
}

/* kvp_mix_draw draws one: KVP_OK or KVP_ERR_SYS. */
static inline int kvp_mix_draw(struct kvp_mix *out)
{
	uint64_t salt[2];
	if (getrandom(salt, sizeof(salt), 0) != (ssize_t)sizeof(salt))
		return KVP_ERR_SYS;
	*out = kvp_mix_of(salt);
	return KVP_OK;
}

/* kvp_mix_u64: of a key of two words, the second goes in as kvp_mix_u64(m, kvp_mix_u64(m, a) ^ b). */
static inline uint64_t kvp_mix_u64(const struct kvp_mix *m, uint64_t x)
{
	unsigned __int128 p = (unsigned __int128)(x ^ m->key[0]) * m->key[1];
	x = (uint64_t)p ^ (uint64_t)(p >> 64);
	x = (x ^ x >> 32) * 0x9fb21c651e98df25ull;
	return x ^ x >> 29;
}
#endif
