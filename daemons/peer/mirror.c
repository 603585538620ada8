#include "daemons/peer/mirror.h"

#include <kvpick/atomic.h>
#include <kvpick/hash.h>

#include <string.h>
#include <sys/random.h>
#include <xxhash.h>

#define BUSY_MAX 20000 /* looks at a rank that is being counted anew: about a millisecond */
#define CLAIM_MAX 1000
#define SHADOW_BYTES 5 /* in front of the id of a booking that cannot have its own name: no UTF-8 */

const char *kvp_mirror_text(enum kvp_mirror_result r)
{
	static const char *const text[KVP_MIRROR_RESULT_CNT] = {
#define X(id, what, counter) [KVP_MIRROR_##id] = what,
		KVP_MIRROR_LIST(X)
#undef X
	};
	return r < KVP_MIRROR_RESULT_CNT ? text[r] : "?";
}

static void count(struct kvp_mirror *m, enum kvp_mirror_result r)
{
	static const enum kvp_ctr of[KVP_MIRROR_RESULT_CNT] = {
#define X(id, what, counter) [KVP_MIRROR_##id] = KVP_CTR_##counter,
		KVP_MIRROR_LIST(X)
#undef X
	};
	if (m->ctr)
		kvp_ctr_add(m->ctr, of[r], 1);
}

int kvp_mirror_open(struct kvp_mirror *m, struct kvp_region *region, kvp_owner owner,
	struct kvp_ctr_column_shm *ctr, uint64_t router_id)
{
	memset(m, 0, sizeof(*m));
	m->region = region;
	m->owner = owner;
	m->ctr = ctr;
	m->router_id = router_id;
	if (getrandom(m->salt, sizeof(m->salt), 0) != (ssize_t)sizeof(m->salt))
		return KVP_ERR_SYS;
	int rc = kvp_reorder_init(&m->tomb, KVP_REORDER_MAX, KVP_REORDER_KEYS);
	rc = rc ? rc : kvp_reorder_init(&m->pending, KVP_REORDER_MAX, KVP_REORDER_KEYS);
	if (rc)
		kvp_mirror_close(m);
	return rc;
}

void kvp_mirror_close(struct kvp_mirror *m)
{
	kvp_reorder_close(&m->tomb);
	kvp_reorder_close(&m->pending);
}

/* ---- looking up ---- */

static struct kvp_reorder_key key_of(
	const struct kvp_mirror *m, uint32_t part, const struct kvp_replica_event *e)
{
	XXH128_hash_t id = XXH3_128bits_withSeed(e->id.ptr, e->id.len, m->salt[0]);
	uint64_t all[4] = {id.low64, id.high64, e->router_id, part};
	XXH128_hash_t k = XXH3_128bits_withSeed(all, sizeof(all), m->salt[1]);
	return (struct kvp_reorder_key){k.low64, k.high64};
}

/* The name of a booking whose own one another partition holds; 0 = it would be too long. */
static size_t shadow_of(uint32_t part, struct kvp_str id, char out[KVP_RESV_ID_MAX])
{
	if (id.len > KVP_RESV_ID_MAX - SHADOW_BYTES)
		return 0;
	out[0] = (char)0xff;
	memcpy(out + 1, &part, 4);
	memcpy(out + SHADOW_BYTES, id.ptr, id.len);
	return SHADOW_BYTES + id.len;
}

/* find looks for the partition's booking of an id: 1 and m->info, or 0. */
static int find(struct kvp_mirror *m, uint32_t part, struct kvp_str id)
{
	const struct kvp_book *b = &m->region->book;
	char shadow[KVP_RESV_ID_MAX];
	uint64_t h;
	if (kvp_resv_find(b, id.ptr, id.len, &h) == KVP_OK && kvp_resv_info(b, h, &m->info) == KVP_OK &&
		m->info.part == part)
		return 1;
	size_t len = shadow_of(part, id, shadow);
	return len && kvp_resv_find(b, shadow, len, &h) == KVP_OK && kvp_resv_info(b, h, &m->info) == KVP_OK;
}

static int is_same_worker(const struct kvp_mirror *m, const struct kvp_replica_event *e)
{
	return m->info.worker_id == e->worker_id && m->info.dp_rank == e->dp_rank;
}

/* before: in a view's order. */
static int before(const struct kvp_rank_view *r, const struct kvp_replica_event *e)
{
	uint64_t id = kvp_ld_rlx_u64(&r->worker_id);
	return id < e->worker_id || (id == e->worker_id && kvp_ld_rlx_u32(&r->dp_rank) < e->dp_rank);
}

/* rank_of finds the rank slot of a schedulable rank of the partition. */
static int rank_of(
	const struct kvp_mirror *m, uint32_t part, const struct kvp_replica_event *e, struct kvp_resv_ask *a)
{
	const struct kvp_cat *cat = &m->region->cat;
	struct kvp_cat_view v;
	for (int i = 0; i < KVP_CAT_RETRY_MAX; i++) {
		if (kvp_cat_view_begin(cat, part, &v))
			return KVP_ERR_NOTFOUND;
		uint32_t low = 0, high = v.cnt;
		while (low < high) {
			uint32_t mid = low + (high - low) / 2;
			if (before(&v.rank[mid], e))
				low = mid + 1;
			else
				high = mid;
		}
		int is_there = low < v.cnt && kvp_ld_rlx_u64(&v.rank[low].worker_id) == e->worker_id &&
			       kvp_ld_rlx_u32(&v.rank[low].dp_rank) == e->dp_rank;
		if (is_there) {
			a->rank_slot = kvp_ld_rlx_u32(&v.rank[low].rank_slot);
			a->rank_gen = kvp_ld_rlx_u32(&v.rank[low].rank_gen);
		}
		if (kvp_cat_view_valid(cat, &v) == KVP_OK)
			return is_there ? KVP_OK : KVP_ERR_NOTFOUND;
	}
	return KVP_ERR_NOTFOUND;
}

/* ---- booking ---- */

/* claim takes the id, or the name of a shadow. A claim of this node that is not booked yet gives way. */
static enum kvp_mirror_result claim(
	struct kvp_mirror *m, uint32_t part, const struct kvp_replica_event *e, uint64_t *h)
{
	struct kvp_book *b = &m->region->book;
	char shadow[KVP_RESV_ID_MAX];
	size_t lora_len = e->lora.len <= KVP_RESV_LORA_MAX ? e->lora.len : 0;
	for (int i = 0; i < CLAIM_MAX; i++) {
		uint64_t other;
		int rc = kvp_resv_claim_for(b, m->owner, e->id.ptr, e->id.len, e->lora.ptr, lora_len, h);
		if (rc == KVP_ERR_EXISTS && find(m, part, e->id))
			return KVP_MIRROR_DUPLICATE;
		if (rc == KVP_ERR_EXISTS && kvp_resv_oust(b, e->id.ptr, e->id.len) == KVP_OK) {
			if (m->ctr)
				kvp_ctr_add(m->ctr, KVP_CTR_PEER_OUSTED, 1);
			continue;
		}
		if (rc == KVP_ERR_EXISTS && kvp_resv_find(b, e->id.ptr, e->id.len, &other) == KVP_OK) {
			size_t len = shadow_of(part, e->id, shadow);
			rc = !len ? KVP_ERR_INVAL
				  : kvp_resv_claim_for(b, m->owner, shadow, len, e->lora.ptr, lora_len, h);
		}
		if (rc == KVP_OK)
			return KVP_MIRROR_ADDED;
		if (rc == KVP_ERR_FULL)
			return KVP_MIRROR_FULL;
		if (rc != KVP_ERR_EXISTS)
			return KVP_MIRROR_BAD_ID;
		kvp_pause(); /* being freed, or claimed, just now */
	}
	return KVP_MIRROR_BUSY;
}

static enum kvp_mirror_result book(struct kvp_mirror *m, uint32_t part, const struct kvp_replica_event *e,
	struct kvp_resv_ask *a, uint64_t *h)
{
	struct kvp_book *b = &m->region->book;
	enum kvp_mirror_result r = claim(m, part, e, h);
	if (r != KVP_MIRROR_ADDED)
		return r;
	int rc = KVP_ERR_AGAIN;
	for (int i = 0; rc == KVP_ERR_AGAIN && i < BUSY_MAX; i++) {
		if (i)
			kvp_pause();
		rc = kvp_resv_book(b, *h, a);
	}
	if (rc == KVP_OK)
		return KVP_MIRROR_ADDED;
	kvp_resv_abandon(b, *h);
	return rc == KVP_ERR_NOTFOUND ? KVP_MIRROR_NO_WORKER
	       : rc == KVP_ERR_AGAIN  ? KVP_MIRROR_BUSY
				      : KVP_MIRROR_FULL;
}

static enum kvp_mirror_result add(struct kvp_mirror *m, uint32_t part, const struct kvp_replica_event *e,
	struct kvp_reorder_key k, uint64_t now_ns)
{
	struct kvp_resv_ask a;
	uint64_t h;
	int is_tracked = e->track_prefill && e->has_hint && e->hint_tok;
	int is_done = kvp_reorder_take(&m->pending, k);
	if (kvp_reorder_has(&m->tomb, k))
		return KVP_MIRROR_LATE;
	if (find(m, part, e->id))
		return KVP_MIRROR_DUPLICATE;
	memset(&a, 0, sizeof(a));
	if (rank_of(m, part, e, &a))
		return KVP_MIRROR_NO_WORKER;
	if (e->seq_cnt > KVP_RESV_SEQ_MAX)
		return KVP_MIRROR_FULL;
	a.worker_id = e->worker_id;
	a.dp_rank = e->dp_rank;
	a.part = part;
	a.seq = e->seq;
	a.seq_cnt = e->seq_cnt;
	a.prefill_tok = is_tracked ? e->hint_tok : 0;
	a.expected_output_tok = e->has_expected_output ? e->expected_output_tok : 0;
	a.lora_hash = e->lora.len ? kvp_hash_bytes(e->lora.ptr, e->lora.len, 0) : 0;
	a.now_ns = now_ns;
	a.flags = KVP_RESV_NODE_OWNED | KVP_RESV_MIRRORED | (is_tracked ? KVP_RESV_TRACK_PREFILL : 0);
	enum kvp_mirror_result r = book(m, part, e, &a, &h);
	if (r != KVP_MIRROR_ADDED || !is_done)
		return r;
	kvp_resv_prefill_done(&m->region->book, h);
	m->gave_back = 1;
	return KVP_MIRROR_ADDED_DONE;
}

/* ---- the others ---- */

static enum kvp_mirror_result end(struct kvp_mirror *m, uint32_t part, const struct kvp_replica_event *e,
	struct kvp_reorder_key k, uint64_t now_ns)
{
	int is_there = find(m, part, e->id);
	if (is_there && !is_same_worker(m, e))
		return KVP_MIRROR_MISMATCH;
	kvp_reorder_take(&m->pending, k);
	kvp_reorder_put(&m->tomb, k, now_ns);
	if (!is_there || kvp_resv_free(&m->region->book, m->info.h))
		return KVP_MIRROR_TOMBSTONED;
	m->gave_back = 1;
	return KVP_MIRROR_FREED;
}

static enum kvp_mirror_result mark(struct kvp_mirror *m, uint32_t part, const struct kvp_replica_event *e,
	struct kvp_reorder_key k, uint64_t now_ns)
{
	if (!find(m, part, e->id)) {
		kvp_reorder_put(&m->pending, k, now_ns);
		return KVP_MIRROR_PENDING;
	}
	if (!is_same_worker(m, e))
		return KVP_MIRROR_MISMATCH;
	kvp_reorder_take(&m->pending, k);
	if (!m->info.prefill_active || kvp_resv_prefill_done(&m->region->book, m->info.h))
		return KVP_MIRROR_UNCHANGED;
	m->gave_back = 1;
	return KVP_MIRROR_MARKED;
}

static enum kvp_mirror_result apply(struct kvp_mirror *m, enum kvp_part_role role,
	const struct kvp_replica_event *e, uint64_t now_ns)
{
	const struct kvp_cat *cat = &m->region->cat;
	struct kvp_part_fixed f;
	uint32_t part;
	if (e->router_id == m->router_id)
		return KVP_MIRROR_OWN;
	if (e->model.len > KVP_CAT_NAME_MAX || e->group.len > KVP_CAT_NAME_MAX ||
		kvp_cat_part_find(cat, role, e->model.ptr, (uint32_t)e->model.len, e->group.ptr,
			(uint32_t)e->group.len, &part) ||
		kvp_cat_part_get(cat, part, &f))
		return KVP_MIRROR_NO_PARTITION;
	if (f.block_size != e->block_size)
		return KVP_MIRROR_BLOCK_SIZE;
	if (!e->id.len || e->id.len > KVP_RESV_ID_MAX)
		return KVP_MIRROR_BAD_ID;
	kvp_mirror_expire(m, now_ns);
	struct kvp_reorder_key k = key_of(m, part, e);
	switch (e->kind) {
	case KVP_REPLICA_ADD:
		return add(m, part, e, k, now_ns);
	case KVP_REPLICA_MARK:
		return mark(m, part, e, k, now_ns);
	case KVP_REPLICA_FREE:
		break;
	}
	return end(m, part, e, k, now_ns);
}

enum kvp_mirror_result kvp_mirror_apply(struct kvp_mirror *m, enum kvp_part_role role,
	const struct kvp_replica_event *e, uint64_t now_ns)
{
	enum kvp_mirror_result r = apply(m, role, e, now_ns);
	count(m, r);
	return r;
}

void kvp_mirror_flush(struct kvp_mirror *m)
{
	struct kvp_queue *q = &m->region->queue;
	if (m->gave_back && kvp_queue_total(q))
		kvp_queue_nudge(q);
	m->gave_back = 0;
}

void kvp_mirror_expire(struct kvp_mirror *m, uint64_t now_ns)
{
	kvp_reorder_expire(&m->tomb, now_ns, KVP_REORDER_TTL_NS);
	kvp_reorder_expire(&m->pending, now_ns, KVP_REORDER_TTL_NS);
	if (!m->ctr)
		return;
	uint64_t evicted = m->tomb.evicted + m->pending.evicted;
	kvp_ctr_add(m->ctr, KVP_CTR_PEER_EVICTED, evicted - m->evicted);
	m->evicted = evicted;
	kvp_ctr_set(m->ctr, KVP_CTR_PEER_TOMBSTONES, m->tomb.cnt);
	kvp_ctr_set(m->ctr, KVP_CTR_PEER_EARLY_MARKS, m->pending.cnt);
}
