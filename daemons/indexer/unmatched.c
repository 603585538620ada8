/* Does anybody find what the index holds? If its blocks are hashed in another way than the requests, or made
 * of other tokens, all else works, and every choice is by load alone. */
#include <inttypes.h>

#include "daemons/common/log.h"
#include "daemons/indexer/indexer.h"

void kvp_idx_unmatched_begin(struct kvp_idx *idx, const struct kvp_hits *hits)
{
	idx->hits = hits;
	for (uint32_t p = 0; p < KVP_PART_MAX; p++)
		kvp_hits_get(hits, p, &idx->seen[p].asked, &idx->seen[p].found);
}

static uint64_t blocks_of(const struct kvp_idx *idx, uint32_t part)
{
	const struct kvp_idx_part *p = &idx->part[part];
	uint64_t n = 0;
	for (uint32_t i = 0; i < p->cnt; i++) {
		const struct kvp_idx_worker *w = &idx->worker[p->worker_idx[i]];
		for (uint32_t k = 0; k < w->rank_cnt; k++) {
			uint32_t slot = idx->rank[w->rank_slot[k]].index_slot;
			for (int t = 0; slot != KVP_INDEX_NONE && t < KVP_RADIX_TIER_CNT; t++)
				n += kvp_radix_w_tier_blocks(idx->radix, slot, (enum kvp_radix_tier)t);
		}
	}
	return n;
}

static void tell(const struct kvp_idx *idx, uint32_t part, uint64_t asked, uint64_t found, uint64_t blocks)
{
	struct kvp_part_info i;
	if (kvp_cat_part_info(&idx->cat.cat, part, &i))
		return;
	if (idx->seen[part].is_unmatched)
		KVP_LOG_W("index.unmatched",
			"model=%s group=%s requests=%" PRIu64 " zero_hit_share=1.00 blocks=%" PRIu64
			" reason=\"requests have no block that is held: other tokens, seed, LoRA or salt?\"",
			i.model, i.group, asked, blocks);
	else
		KVP_LOG_N("index.matched", "model=%s group=%s requests=%" PRIu64 " with_hits=%" PRIu64,
			i.model, i.group, asked, found);
}

void kvp_idx_unmatched(struct kvp_idx *idx)
{
	uint32_t unmatched = 0;
	for (uint32_t p = 0; idx->hits && p < kvp_cat_part_cnt(&idx->cat.cat); p++) {
		struct kvp_idx_hits *s = &idx->seen[p];
		uint64_t asked, found;
		kvp_hits_get(idx->hits, p, &asked, &found);
		uint64_t new_asked = asked - s->asked, new_found = found - s->found;
		if (new_asked >= KVP_IDX_UNMATCHED_CNT) {
			uint64_t blocks = new_found ? 0 : blocks_of(idx, p);
			uint32_t was = s->is_unmatched;
			*s = (struct kvp_idx_hits){asked, found, blocks != 0};
			if (was != s->is_unmatched)
				tell(idx, p, new_asked, new_found, blocks);
		}
		unmatched += s->is_unmatched;
	}
	kvp_ctr_set(idx->ctr, KVP_CTR_IDX_UNMATCHED, unmatched);
}
