/* daemons/indexer/apply.c — operations of decoder threads into the tree. */
#include "daemons/indexer/indexer.h"
#include "ipc/kv_event.h"

_Static_assert((int)KVP_KV_DEVICE == KVP_RADIX_DEVICE && (int)KVP_KV_HOST == KVP_RADIX_HOST &&
		       (int)KVP_KV_DISK == KVP_RADIX_DISK && (int)KVP_KV_EXTERNAL == KVP_RADIX_EXTERNAL,
	"a decoder's tiers are the tree's");

/* The rank that an operation of listener rank `own` is for; NULL if the worker has no such rank now, or
 * not the one that the operation was meant for. */
static struct kvp_idx_rank *target_rank(
	struct kvp_idx *idx, struct kvp_idx_rank *own, const struct kvp_idx_msg *m)
{
	struct kvp_idx_rank *r = own;
	if (m->dp_rank != own->dp_rank) {
		const struct kvp_idx_worker *w = &idx->worker[own->worker_idx];
		uint32_t at = m->dp_rank - w->start_rank;
		if (!w->is_schedulable || at >= w->rank_cnt)
			return NULL;
		r = &idx->rank[w->rank_slot[at]];
	}
	return r->epoch <= m->epoch ? r : NULL;
}

static void apply_store(struct kvp_idx *idx, const struct kvp_idx_rank *r, const struct kvp_idx_msg *m)
{
	uint32_t stored = 0;
	int rc = kvp_radix_store_tier(idx->radix, r->index_slot, (enum kvp_radix_tier)m->tier, r->part_salt,
		m->has_parent ? KVP_RADIX_CHILD : KVP_RADIX_ROOT, m->parent, m->n, m->data, m->data + m->n,
		&stored);
	kvp_ctr_add(idx->ctr, KVP_CTR_EV_BLOCKS_STORED, stored);
	int is_device = m->tier == KVP_RADIX_DEVICE; /* the results of lower tiers are the tree's counters */
	if (rc == KVP_OK)
		kvp_ctr_add(idx->ctr, KVP_CTR_EV_STORED_OK, (uint64_t)is_device);
	else if (rc == KVP_ERR_NOTFOUND)
		kvp_ctr_add(idx->ctr, KVP_CTR_EV_STORED_PARENT, (uint64_t)is_device);
	else if (rc == KVP_ERR_FULL)
		kvp_ctr_add(idx->ctr, KVP_CTR_EV_STORED_FULL, 1);
	else
		kvp_ctr_add(idx->ctr, KVP_CTR_EV_STORED_INVALID, 1);
}

static void apply_attach(struct kvp_idx *idx, const struct kvp_idx_rank *r, const struct kvp_idx_msg *m)
{
	uint32_t unknown = 0;
	int rc = kvp_radix_attach(idx->radix, r->index_slot, (enum kvp_radix_tier)m->tier, r->part_salt, m->n,
		m->data, &unknown);
	if (rc == KVP_OK)
		kvp_ctr_add(idx->ctr, KVP_CTR_EV_BLOCKS_STORED, m->n - unknown);
	else
		kvp_ctr_add(
			idx->ctr, rc == KVP_ERR_FULL ? KVP_CTR_EV_STORED_FULL : KVP_CTR_EV_STORED_INVALID, 1);
}

static void apply_remove(struct kvp_idx *idx, const struct kvp_idx_rank *r, const struct kvp_idx_msg *m)
{
	uint32_t unknown = 0;
	kvp_radix_remove_tier(
		idx->radix, r->index_slot, (enum kvp_radix_tier)m->tier, m->n, m->data, &unknown);
	kvp_ctr_add(idx->ctr, KVP_CTR_EV_BLOCKS_REMOVED, m->n - unknown);
	kvp_ctr_add(idx->ctr, KVP_CTR_EV_BLOCKS_UNKNOWN, unknown);
	if (m->tier != KVP_RADIX_DEVICE)
		return;
	kvp_ctr_add(
		idx->ctr, unknown < m->n || !m->n ? KVP_CTR_EV_REMOVED_OK : KVP_CTR_EV_REMOVED_NOTFOUND, 1);
}

static void apply_mark(
	struct kvp_idx *idx, const struct kvp_idx_rank *own, const struct kvp_idx_msg *m, uint64_t now_ns)
{
	if (idx->mark)
		kvp_mark_advance(idx->mark, m->rank_slot, own->rank_gen, m->seq, m->live);
	kvp_ctr_add(idx->ctr, KVP_CTR_EV_BATCH_APPLIED, 1);
	if (m->recv_ns)
		kvp_hist_add(idx->ctr, KVP_HIST_APPLY_NS, now_ns > m->recv_ns ? now_ns - m->recv_ns : 0);
}

/* What a rank's listener has learned, kept for its successor. A rank outside the tree starts anew when it
 * gets an index slot. */
static void apply_notes(struct kvp_idx *idx, const struct kvp_idx_rank *own, const struct kvp_idx_msg *m)
{
	uint32_t lost = 0, lost_one;
	for (uint32_t i = 0; idx->memo && own->index_slot != KVP_INDEX_NONE && i < m->n; i++) {
		const uint64_t *w = &m->data[(uint64_t)KVP_IDX_NOTE_WORDS * i];
		struct kvp_memo_note note = {w[0], {w[1], w[2]}, (uint32_t)(w[3] >> 32), (uint32_t)w[3]};
		kvp_memo_put(idx->memo, m->rank_slot, &note, 1, &lost_one);
		lost += lost_one;
	}
	kvp_ctr_add(idx->ctr, KVP_CTR_EV_NOTES_LOST, lost);
}

/* All or one tier of a rank is to be cleared. */
static int apply_clear(struct kvp_idx *idx, const struct kvp_idx_rank *r, const struct kvp_idx_msg *m)
{
	int every = m->op == KVP_IDX_CLEAR;
	if (!every)
		kvp_radix_clear_tier(idx->radix, r->index_slot, (enum kvp_radix_tier)m->tier);
	else if (kvp_idx_rank_clear(idx, r->index_slot) == KVP_ERR_AGAIN)
		return KVP_ERR_AGAIN;
	kvp_ctr_add(idx->ctr, KVP_CTR_EV_CLEARED_OK, every || m->tier == KVP_RADIX_DEVICE);
	return KVP_OK;
}

/* The listener's engine has begun anew, or batches of it were lost. */
static int apply_restart(struct kvp_idx *idx, const struct kvp_idx_rank *own, const struct kvp_idx_msg *m)
{
	if (own->index_slot != KVP_INDEX_NONE && kvp_idx_rank_clear(idx, own->index_slot) == KVP_ERR_AGAIN)
		return KVP_ERR_AGAIN;
	kvp_idx_rank_anew(idx, m->rank_slot);
	kvp_ctr_add(idx->ctr, m->op == KVP_IDX_LOST ? KVP_CTR_EV_LOST : KVP_CTR_EV_RESTART, 1);
	return KVP_OK;
}

int kvp_idx_apply(struct kvp_idx *idx, const struct kvp_idx_msg *m, uint64_t now_ns)
{
	struct kvp_idx_rank *own = m->rank_slot < idx->cat.cat.rank_max ? &idx->rank[m->rank_slot] : NULL;
	if (!own || !own->listener || own->listener != m->listener) {
		kvp_ctr_add(idx->ctr, KVP_CTR_EV_LATE, 1);
		return KVP_OK;
	}
	if (m->op == KVP_IDX_MARK) {
		apply_mark(idx, own, m, now_ns);
		return KVP_OK;
	}
	if (m->op == KVP_IDX_NOTES) {
		apply_notes(idx, own, m);
		return KVP_OK;
	}
	if (m->op == KVP_IDX_RESTART || m->op == KVP_IDX_LOST)
		return apply_restart(idx, own, m);
	struct kvp_idx_rank *r = target_rank(idx, own, m);
	if (!r) {
		kvp_ctr_add(idx->ctr, KVP_CTR_EV_LATE, 1);
		return KVP_OK;
	}
	if (r->index_slot == KVP_INDEX_NONE) {
		kvp_ctr_add(idx->ctr, KVP_CTR_EV_NOT_INDEXED, 1);
		return KVP_OK;
	}
	if (r->index_slot == idx->clearing && m->op != KVP_IDX_CLEAR)
		return KVP_ERR_AGAIN; /* another listener's message for a rank that is being cleared */
	if (m->op == KVP_IDX_CLEAR || m->op == KVP_IDX_CLEAR_TIER)
		return apply_clear(idx, r, m);
	switch (m->op) {
	case KVP_IDX_STORE:
		apply_store(idx, r, m);
		break;
	case KVP_IDX_ATTACH:
		apply_attach(idx, r, m);
		break;
	case KVP_IDX_REMOVE:
		apply_remove(idx, r, m);
		break;
	default:
		KVP_ASSERT(!"operation of this ring");
	}
	return KVP_OK;
}
