#include "daemons/peer/bindings.h"

#include <kvpick/atomic.h>
#include <kvpick/clock.h>

#define AHEAD_MAX_NS 86400000000000ull
#define FORCE_MAX 4 /* other bindings replaced by one message */

int kvp_bindings_open(struct kvp_bindings *b, struct kvp_region *region, struct kvp_ctr_column_shm *ctr,
	uint64_t router_id, uint64_t real_ns)
{
	*b = (struct kvp_bindings){.region = region,
		.ctr = ctr,
		.router_id = router_id,
		.clock = real_ns / 1000};
	return kvp_reorder_init(&b->stamp, KVP_BINDINGS_MAX, KVP_REORDER_VALUES);
}

void kvp_bindings_close(struct kvp_bindings *b)
{
	kvp_reorder_close(&b->stamp);
}

static void count(const struct kvp_bindings *b, enum kvp_ctr id)
{
	if (b->ctr)
		kvp_ctr_add(b->ctr, id, 1);
}

/* The table's own key is a secret hash of partition and session already. */
static struct kvp_reorder_key stamp_key(struct kvp_affinity_key k)
{
	return (struct kvp_reorder_key){k.lo, k.hi};
}

static int is_older(const struct kvp_reorder_val *known, uint64_t sequence, uint64_t writer)
{
	return known && (sequence < known->a || (sequence == known->a && writer < known->b));
}

static void set_stamp(struct kvp_bindings *b, struct kvp_affinity_key k, uint64_t sequence, uint64_t writer,
	uint64_t now_ns)
{
	if (kvp_reorder_put(&b->stamp, stamp_key(k), now_ns) == KVP_OK)
		*kvp_reorder_val(&b->stamp, stamp_key(k)) = (struct kvp_reorder_val){sequence, writer};
}

/* A schedulable rank of the worker: the one named, or its first one. */
static int rank_of(const struct kvp_bindings *b, uint32_t part, const struct kvp_replica_binding *m,
	struct kvp_affinity_target *at)
{
	const struct kvp_cat *cat = &b->region->cat;
	struct kvp_cat_view v;
	for (int i = 0; i < KVP_CAT_RETRY_MAX; i++) {
		if (kvp_cat_view_begin(cat, part, &v))
			return KVP_ERR_NOTFOUND;
		uint32_t low = 0, high = v.cnt, rank = m->has_rank ? m->dp_rank : 0;
		while (low < high) {
			uint32_t mid = low + (high - low) / 2;
			uint64_t id = kvp_ld_rlx_u64(&v.rank[mid].worker_id);
			if (id < m->worker_id ||
				(id == m->worker_id && kvp_ld_rlx_u32(&v.rank[mid].dp_rank) < rank))
				low = mid + 1;
			else
				high = mid;
		}
		int is_there = low < v.cnt && kvp_ld_rlx_u64(&v.rank[low].worker_id) == m->worker_id;
		at->worker_id = m->worker_id;
		at->dp_rank = is_there ? kvp_ld_rlx_u32(&v.rank[low].dp_rank) : 0;
		if (kvp_cat_view_valid(cat, &v) == KVP_OK)
			return is_there && (!m->has_rank || at->dp_rank == rank) ? KVP_OK : KVP_ERR_NOTFOUND;
	}
	return KVP_ERR_NOTFOUND;
}

/* Binds without holding a lease: the binding lives as long as an idle one does. */
static int bind_to(struct kvp_bindings *b, struct kvp_affinity_key k, struct kvp_affinity_target at,
	uint64_t now_ns)
{
	struct kvp_affinity *a = &b->region->affinity;
	struct kvp_affinity_target other = {0, 0};
	enum kvp_affinity_force force = KVP_AFFINITY_KEEP;
	uint64_t tag = 0;
	uint32_t slot;
	int rc = KVP_ERR_EXISTS;
	for (int i = 0; rc == KVP_ERR_EXISTS && i < FORCE_MAX; i++, force = KVP_AFFINITY_REPLACE)
		rc = kvp_affinity_commit(a, k, at, KVP_AFFINITY_IS_HARD, force, now_ns, &tag, &other);
	if (rc || !tag)
		return KVP_ERR_FULL;
	kvp_affinity_release(a, tag, now_ns);
	while (kvp_affinity_waiting(a, &slot))
		kvp_slot_wake(&b->region->slots, slot);
	return KVP_OK;
}

static int apply(struct kvp_bindings *b, enum kvp_part_role role, const struct kvp_replica_binding *m,
	uint64_t now_ns)
{
	struct kvp_affinity_target at;
	uint32_t part;
	if (!b->region->affinity.max || m->model.len > KVP_CAT_NAME_MAX || m->group.len > KVP_CAT_NAME_MAX ||
		kvp_cat_part_find(&b->region->cat, role, m->model.ptr, (uint32_t)m->model.len, m->group.ptr,
			(uint32_t)m->group.len, &part))
		return KVP_ERR_NOTFOUND;
	if (m->writer_id == b->router_id)
		return KVP_ERR_EXISTS;
	if (m->sequence > kvp_clock_real_ns() + AHEAD_MAX_NS)
		return KVP_ERR_LIMIT;
	if (b->clock < m->sequence)
		b->clock = m->sequence;
	if (rank_of(b, part, m, &at) || !m->session.len)
		return KVP_ERR_NOTFOUND;
	struct kvp_affinity_key k =
		kvp_affinity_key(&b->region->affinity, part, m->session.ptr, m->session.len);
	if (is_older(kvp_reorder_val(&b->stamp, stamp_key(k)), m->sequence, m->writer_id))
		return KVP_ERR_CLOSED;
	int rc = bind_to(b, k, at, now_ns);
	if (rc == KVP_OK)
		set_stamp(b, k, m->sequence, m->writer_id, now_ns);
	return rc;
}

int kvp_bindings_apply(struct kvp_bindings *b, enum kvp_part_role role, const struct kvp_replica_binding *m,
	uint64_t now_ns)
{
	int rc = apply(b, role, m, now_ns);
	count(b, rc == KVP_OK		? KVP_CTR_PEER_BOUND
		 : rc == KVP_ERR_EXISTS ? KVP_CTR_PEER_BIND_OWN
		 : rc == KVP_ERR_CLOSED ? KVP_CTR_PEER_BIND_OLD
		 : rc == KVP_ERR_FULL	? KVP_CTR_PEER_BIND_FULL
		 : rc == KVP_ERR_LIMIT	? KVP_CTR_PEER_BIND_AHEAD
					: KVP_CTR_PEER_BIND_UNKNOWN);
	return rc;
}

int kvp_bindings_stamp(struct kvp_bindings *b, uint32_t part, struct kvp_str session,
	struct kvp_affinity_target at, uint64_t now_ns, uint64_t *sequence)
{
	struct kvp_affinity *a = &b->region->affinity;
	struct kvp_affinity_key k = kvp_affinity_key(a, part, session.ptr, session.len);
	struct kvp_affinity_target now;
	if (kvp_affinity_query(a, k, now_ns, &now) == KVP_OK &&
		(now.worker_id != at.worker_id || now.dp_rank != at.dp_rank))
		return KVP_ERR_CLOSED;
	*sequence = ++b->clock;
	set_stamp(b, k, *sequence, b->router_id, now_ns);
	return KVP_OK;
}
