/* daemons/indexer/ring.c — single-producer single-consumer ring of records. */
#include "daemons/indexer/ring.h"

#include <kvpick/err.h>
#include <stdlib.h>
#include <string.h>

int kvp_idx_ring_open(struct kvp_idx_ring *r, uint64_t words)
{
	if (words < 4 * (KVP_IDX_MSG_WORDS + 2ull * KVP_IDX_MSG_BLK_MAX) || (words & (words - 1)))
		return KVP_ERR_INVAL;
	memset(r, 0, sizeof(*r));
	r->word = malloc(words * 8);
	if (!r->word)
		return KVP_ERR_SYS;
	r->mask = words - 1;
	return KVP_OK;
}

void kvp_idx_ring_close(struct kvp_idx_ring *r)
{
	free(r->word);
	memset(r, 0, sizeof(*r));
}

static int has_room(struct kvp_idx_ring *r, uint64_t end)
{
	if (end - r->head_seen <= r->mask + 1)
		return 1;
	r->head_seen = kvp_ld_acq_u64(&r->head); /* pairs with: kvp_idx_ring_consume */
	return end - r->head_seen <= r->mask + 1;
}

struct kvp_idx_msg *kvp_idx_ring_reserve(struct kvp_idx_ring *r, uint32_t words)
{
	uint64_t at = r->tail & r->mask, left = r->mask + 1 - at, fill = left < words ? left : 0;
	if (!has_room(r, r->tail + fill + words))
		return NULL;
	if (fill) {
		/* A filler may be shorter than a header: only its first word is touched. */
		uint64_t first = (uint64_t)KVP_IDX_FILLER << 32 | fill;
		r->word[at] = first;
		at = 0;
	}
	struct kvp_idx_msg *m = (struct kvp_idx_msg *)(void *)&r->word[at];
	memset(m, 0, sizeof(*m));
	m->words = words;
	r->reserved = fill + words;
	return m;
}

void kvp_idx_ring_commit(struct kvp_idx_ring *r)
{
	kvp_st_rel_u64(&r->tail, r->tail + r->reserved); /* pairs with: kvp_idx_ring_peek */
	r->reserved = 0;
}

const struct kvp_idx_msg *kvp_idx_ring_peek(struct kvp_idx_ring *r)
{
	for (;;) {
		if (r->head == r->tail_seen) {
			r->tail_seen = kvp_ld_acq_u64(&r->tail); /* pairs with: kvp_idx_ring_commit */
			if (r->head == r->tail_seen)
				return NULL;
		}
		const struct kvp_idx_msg *m = (const struct kvp_idx_msg *)(void *)&r->word[r->head & r->mask];
		if (m->op != KVP_IDX_FILLER)
			return m;
		kvp_idx_ring_consume(r, m);
	}
}

void kvp_idx_ring_consume(struct kvp_idx_ring *r, const struct kvp_idx_msg *m)
{
	kvp_st_rel_u64(&r->head, r->head + m->words); /* pairs with: has_room */
}
