#include "shm/quota.h"

#include <stdio.h>
#include <string.h>

#define MAGIC 0x31544f5551ULL /* "QUOT1" */
#define LAYOUT 1
#define AMOUNT_MAX (1ull << 40)
#define SHARE_MAX (1ull << 62)
#define TRIES 8

struct share_shm {
	uint64_t used[KVP_QUOTA_KIND_CNT];
	uint32_t owner; /* who has it; 0 = nobody, then used is zero */
	uint32_t pad[27];
} __attribute__((aligned(128)));

struct kvp_quota_shm {
	struct kvp_objhdr hdr;
	uint64_t pad[8];
	struct share_shm share[];
};
_Static_assert(sizeof(struct share_shm) == KVP_FALSE_SHARE, "a share has its lines to itself");

static uint32_t layout_hash(void)
{
	const size_t w[] = {sizeof(struct kvp_quota_shm), sizeof(struct share_shm),
		offsetof(struct share_shm, owner), KVP_QUOTA_KIND_CNT};
	return kvp_obj_hash(w, sizeof(w) / sizeof(w[0]));
}

uint64_t kvp_quota_align(void)
{
	return KVP_FALSE_SHARE;
}

uint64_t kvp_quota_footprint(const struct kvp_geom *g)
{
	if (!g || g->slot_max < 1 || g->slot_max > KVP_SLOT_MAX)
		return 0;
	return sizeof(struct kvp_quota_shm) + g->slot_max * sizeof(struct share_shm);
}

int kvp_quota_new(void *mem, const struct kvp_geom *g)
{
	uint64_t bytes = kvp_quota_footprint(g);
	if (!mem || ((uintptr_t)mem & (KVP_FALSE_SHARE - 1)) || !bytes)
		return KVP_ERR_INVAL;
	kvp_obj_begin(mem, LAYOUT, layout_hash(), bytes, g->region_gen);
	kvp_obj_ready(mem, MAGIC); /* zeros are shares of nobody */
	return KVP_OK;
}

int kvp_quota_join(void *mem, const struct kvp_geom *g, struct kvp_quota *out)
{
	int rc = kvp_obj_join(mem, MAGIC, LAYOUT, layout_hash());
	if (rc)
		return rc;
	struct kvp_quota_shm *s = mem;
	if (s->hdr.footprint != kvp_quota_footprint(g))
		return KVP_ERR_LAYOUT;
	out->shm = s;
	out->slot_max = g->slot_max;
	return KVP_OK;
}

void kvp_quota_leave(struct kvp_quota *q)
{
	memset(q, 0, sizeof(*q));
}

int kvp_quota_delete(void *mem)
{
	kvp_obj_delete(mem);
	return KVP_OK;
}

uint64_t kvp_quota_check(const struct kvp_quota *q)
{
	uint64_t faults = 0;
	for (uint32_t i = 0; i < q->slot_max; i++) {
		const struct share_shm *s = &q->shm->share[i];
		kvp_owner o = kvp_ld_acq_u32(&s->owner);
		for (int k = 0; k < KVP_QUOTA_KIND_CNT; k++) {
			uint64_t used = kvp_ld_rlx_u64(&s->used[k]);
			const char *what = used > SHARE_MAX		 ? "share out of range"
					   : o && KVP_OWNER_SLOT(o) != i ? "share of another slot"
					   : !o && used && kvp_ld_acq_u32(&s->owner) == 0 ? "share of nobody"
											  : NULL;
			if (what && faults++ < 10)
				fprintf(stderr, "quota.check: slot %u kind %d: %s\n", i, k, what);
		}
	}
	return faults;
}

uint64_t kvp_quota_used(const struct kvp_quota *q, enum kvp_quota_kind kind)
{
	uint64_t sum = 0;
	for (uint32_t i = 0; i < q->slot_max; i++)
		sum += kvp_ld_sc_u64(&q->shm->share[i].used[kind]);
	return sum;
}

/* own answers the caller's share; the owner word comes before anything is counted in it. */
static struct share_shm *own(struct kvp_quota *q, kvp_owner owner)
{
	uint32_t slot = KVP_OWNER_SLOT(owner);
	if (!owner || slot >= q->slot_max)
		return NULL;
	struct share_shm *s = &q->shm->share[slot];
	if (kvp_ld_rlx_u32(&s->owner) != owner)
		kvp_st_rel_u32(&s->owner, owner);
	return s;
}

int kvp_quota_take(
	struct kvp_quota *q, kvp_owner owner, enum kvp_quota_kind kind, uint64_t amount, uint64_t limit)
{
	struct share_shm *s = own(q, owner);
	if (!s || amount < 1 || amount > AMOUNT_MAX)
		return KVP_ERR_INVAL;
	uint64_t mine = kvp_ld_rlx_u64(&s->used[kind]);
	for (int i = 0; i < TRIES; i++) {
		/* pairs with: the same store and loads of every other process */
		kvp_st_sc_u64(&s->used[kind], mine + amount);
		if (kvp_quota_used(q, kind) <= limit)
			return KVP_OK;
		kvp_st_sc_u64(&s->used[kind], mine);
		uint64_t used = kvp_quota_used(q, kind);
		if (used > limit || amount > limit - used)
			break;
	}
	return KVP_ERR_FULL;
}

void kvp_quota_give(struct kvp_quota *q, kvp_owner owner, enum kvp_quota_kind kind, uint64_t amount)
{
	struct share_shm *s = own(q, owner);
	if (!s)
		return;
	uint64_t mine = kvp_ld_rlx_u64(&s->used[kind]);
	kvp_st_sc_u64(&s->used[kind], mine > amount ? mine - amount : 0);
}

uint32_t kvp_quota_sweep_owner(struct kvp_quota *q, kvp_owner dead)
{
	uint32_t slot = KVP_OWNER_SLOT(dead);
	if (!dead || slot >= q->slot_max || kvp_ld_acq_u32(&q->shm->share[slot].owner) != dead)
		return 0;
	struct share_shm *s = &q->shm->share[slot];
	/* A sweep that is killed in here is run again: the owner goes last. */
	for (int k = 0; k < KVP_QUOTA_KIND_CNT; k++)
		kvp_st_sc_u64(&s->used[k], 0);
	kvp_st_rel_u32(&s->owner, 0);
	return 1;
}
