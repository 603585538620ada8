/* daemons/indexer/routed.c — bookings that processes tell, into the tree that learns from them. */
#include <kvpick/clock.h>
#include <stdlib.h>
#include <string.h>

#include "daemons/indexer/indexer.h"
#include "shm/cmdring.h"

int kvp_idx_routed_open(struct kvp_idx *idx, struct kvp_radix_w *tree, const struct kvp_routed_cfg *cfg)
{
	struct kvp_idx_routed *d = &idx->routed;
	int rc = kvp_routed_open(tree, cfg, &d->table);
	if (rc)
		return rc;
	d->tree = tree;
	d->path = calloc(KVP_SLOT_MAX, sizeof(*d->path));
	return d->path ? KVP_OK : KVP_ERR_SYS;
}

void kvp_idx_routed_close(struct kvp_idx *idx)
{
	struct kvp_idx_routed *d = &idx->routed;
	for (uint32_t i = 0; d->path && i < KVP_SLOT_MAX; i++)
		free(d->path[i].local);
	free(d->path);
	kvp_routed_close(d->table);
	memset(d, 0, sizeof(*d));
}

uint64_t kvp_idx_routed_recover(struct kvp_idx *idx)
{
	struct kvp_idx_routed *d = &idx->routed;
	uint64_t cnt = 0;
	uint8_t *owned = calloc(KVP_RADIX_SLOT_MAX, 1);
	KVP_ASSERT(owned);
	for (uint32_t i = 0; i < idx->cat.cat.rank_max; i++) {
		const struct kvp_idx_rank *r = &idx->rank[i];
		if (r->rank_gen && !r->is_lost && r->index_slot < KVP_RADIX_SLOT_MAX)
			owned[r->index_slot] = 1;
	}
	if (d->table)
		cnt = kvp_routed_recover(d->table, owned, kvp_clock_mono_ns());
	free(owned);
	return cnt;
}

void kvp_idx_routed_forget(struct kvp_idx *idx, uint32_t index_slot)
{
	if (idx->routed.table)
		kvp_routed_forget(idx->routed.table, index_slot);
}

uint32_t kvp_idx_routed_tend(struct kvp_idx *idx, uint64_t now_ns, uint32_t budget)
{
	struct kvp_idx_routed *d = &idx->routed;
	if (!d->table)
		return 0;
	uint32_t n = kvp_routed_tend(d->table, now_ns, budget);
	/* The main tree is tended anyway. */
	return d->tree == idx->radix ? n : n + kvp_radix_w_tend(d->tree, n ? 16 : budget);
}

/* Pieces of long prompts are put together by sender. Result: the whole path, or NULL: not yet, or never. */
static const uint64_t *whole(
	struct kvp_idx *idx, const struct kvp_cmd_routed *c, uint32_t n, const uint64_t *piece)
{
	struct kvp_idx_path *p = &idx->routed.path[KVP_OWNER_SLOT(c->owner) % KVP_SLOT_MAX];
	if (!n || c->total > KVP_ROUTED_BLK_MAX || c->from >= c->total || n > c->total - c->from) {
		kvp_ctr_add(idx->ctr, KVP_CTR_ROUTED_BAD, 1);
		return NULL;
	}
	if (n == c->total)
		return piece;
	if (!p->local)
		p->local = malloc(KVP_ROUTED_BLK_MAX * sizeof(*p->local));
	int fits = p->local && (c->from == 0 || (p->cnt == c->from && p->owner == c->owner &&
							p->number == c->number));
	if (!fits) {
		kvp_ctr_add(idx->ctr, KVP_CTR_ROUTED_BAD, 1);
		return NULL;
	}
	memcpy(p->local + c->from, piece, n * sizeof(*piece));
	p->owner = c->owner;
	p->number = c->number;
	p->cnt = c->from + n;
	return p->cnt == c->total ? p->local : NULL;
}

void kvp_idx_routed(struct kvp_idx *idx, const struct kvp_cmd_routed *c, const uint64_t *local, uint32_t len,
	uint64_t now_ns)
{
	uint32_t n = len / (uint32_t)sizeof(*local);
	const uint64_t *path = NULL;
	if (idx->routed.table && len % sizeof(*local) == 0)
		path = whole(idx, c, n, local);
	if (!path)
		return;
	const struct kvp_idx_rank *r =
		c->rank_slot < idx->cat.cat.rank_max ? &idx->rank[c->rank_slot] : NULL;
	if (!r || !r->rank_gen || r->rank_gen != c->rank_gen || r->is_lost ||
		r->index_slot == KVP_INDEX_NONE) {
		kvp_ctr_add(idx->ctr, KVP_CTR_ROUTED_LATE, 1);
		return;
	}
	kvp_routed_record(idx->routed.table, r->index_slot, r->part_salt, c->total, path,
		idx->worker[r->worker_idx].total_kv_blocks, now_ns);
}
