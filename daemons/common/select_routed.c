/* Bookings told to the index, for what no KV event says: approximate mode and predictions. */
#include "daemons/common/select_priv.h"
#include "shm/routed.h"

#include <string.h>

#define PIECE_BLK (KVP_CMD_PAYLOAD_MAX / 8)

/* One piece into the command ring; KVP_ERR_FULL. */
static int send(struct kvp_selection *s, const struct kvp_cmd_routed *r, uint32_t n, const uint64_t *local)
{
	struct kvp_cmdring *ring = &s->region->cmd;
	struct kvp_cmd_cell *cell;
	void *payload;
	int rc = kvp_cmd_begin_spare(ring, s->owner, &cell, &payload);
	if (rc)
		return rc;
	memcpy(cell->arg, r, sizeof(*r));
	memcpy(payload, local, n * sizeof(*local));
	return kvp_cmd_post_away(ring, cell, KVP_CMD_ROUTED, n * (uint32_t)sizeof(*local));
}

void kvp_sel_tell_routed(
	struct kvp_selection *s, const struct kvp_sel_rank *r, uint32_t n, const uint64_t *local)
{
	/* Without credit nobody would ask for it. */
	if (s->set.records_routing != KVP_YES || s->set.weights.overlap_score_credit == 0 || !n ||
		r->index_slot == KVP_INDEX_NONE)
		return;
	if (n > KVP_ROUTED_BLK_MAX) {
		kvp_ctr_add(s->ctr, KVP_CTR_SELECT_ROUTED_CUT, n - KVP_ROUTED_BLK_MAX);
		n = KVP_ROUTED_BLK_MAX;
	}
	if (s->local) {
		kvp_sel_local_routed(s->local, r, n, local);
		return;
	}
	struct kvp_cmd_routed c = {.rank_slot = r->rank_slot,
		.rank_gen = r->rank_gen,
		.total = n,
		.owner = s->owner,
		.number = ++s->routed_number};
	for (; c.from < n; c.from += PIECE_BLK) {
		uint32_t cnt = n - c.from < PIECE_BLK ? n - c.from : PIECE_BLK;
		if (send(s, &c, cnt, local + c.from)) {
			kvp_ctr_add(s->ctr, KVP_CTR_SELECT_ROUTED_FULL, 1);
			return;
		}
	}
	kvp_ctr_add(s->ctr, KVP_CTR_SELECT_ROUTED, 1);
}

void kvp_sel_tell_prompt(struct kvp_selection *s, const struct kvp_sel_rank *r)
{
	if (s->set.records_routing != KVP_YES ||
		(s->part.role == KVP_PART_DECODE && s->set.decode_learns != KVP_YES))
		return;
	kvp_sel_hash_rest(s);
	kvp_sel_tell_routed(s, r, s->prompt.local_cnt, s->prompt.local);
}
