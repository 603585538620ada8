/* daemons/indexer/held.h — recovered blocks of workers that are not registered yet, kept until they are.
 *
 * Shape      one growing list of records (daemons/common/recov_page.h) a (role, key, worker, rank), found by
 *            a hash table.
 * Truth      this memory; the tree and the catalogue know nothing of it.
 * Writers    the apply thread.
 * Limits     max_words hashes and record words in all, KVP_HELD_RANKS ranks; what is over is dropped and
 *            counted. kvp_held_drop ends the waiting.
 * Lifetime   from a recovery until the worker registers, at most KVP_HELD_NS after the recovery's end.
 * Crash      gone with the process: such blocks come with the engine's replay or are missed until stored
 *            again.
 * Proved by  tests/t_idx_recovery.c
 */
#ifndef KVP_INDEXER_HELD_H
#define KVP_INDEXER_HELD_H

#include "daemons/common/recov_page.h"
#include <stddef.h>

#define KVP_HELD_RANKS 16384u
#define KVP_HELD_NS (300ull * 1000000000ull)

struct kvp_held_key {
	uint32_t role, block_size;
	const char *text; /* "model:group" */
	uint32_t len;
};
struct kvp_held_list { /* of one rank; freed by kvp_held_free_list */
	uint64_t *word;
	uint64_t cnt, blocks;
	uint32_t block_size;
};
struct kvp_held;

/* kvp_held_new: NULL without memory. kvp_held_free: NULL is fine. */
struct kvp_held *kvp_held_new(uint64_t max_words);
void kvp_held_free(struct kvp_held *h);

/* kvp_held_put keeps a record (checked by the caller, 8-byte aligned, with its hashes). KVP_ERR_FULL,
 * KVP_ERR_SYS. A record that clears throws away what was kept before it. */
int kvp_held_put(struct kvp_held *h, const struct kvp_held_key *k, const struct kvp_recov_rec *rec);

/* kvp_held_take gives what is kept for a rank and forgets it: 1, or 0 if there is nothing. */
int kvp_held_take(struct kvp_held *h, uint32_t role, const char *key, uint32_t key_len, uint64_t worker_id,
	uint32_t dp_rank, struct kvp_held_list *out);
void kvp_held_free_list(struct kvp_held_list *l);

/* kvp_held_drop forgets everything; returns the blocks. kvp_held_blocks, kvp_held_ranks: kept now.
 * kvp_held_steps: ranks passed by in chains since new; a few for each look, whatever the ids. */
uint64_t kvp_held_drop(struct kvp_held *h);
uint64_t kvp_held_blocks(const struct kvp_held *h);
uint32_t kvp_held_ranks(const struct kvp_held *h);
uint64_t kvp_held_steps(const struct kvp_held *h);
#endif
