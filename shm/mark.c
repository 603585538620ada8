/* shm/mark.c — words of the event stream's progress. */
#include "shm/mark.h"

#include <stdio.h>
#include <string.h>

#define KVP_MARK_MAGIC 0x6b76702d6d61726bull
#define KVP_MARK_LAYOUT 1

struct kvp_mark_shm {
	struct kvp_objhdr hdr;
	struct kvp_mark_rec rec[];
};

static uint32_t mark_layout_hash(void)
{
	static const size_t word[] = {sizeof(struct kvp_mark_rec), offsetof(struct kvp_mark_rec, live_seq),
		offsetof(struct kvp_mark_rec, gen), offsetof(struct kvp_mark_shm, rec)};
	return kvp_obj_hash(word, sizeof(word) / sizeof(word[0]));
}

uint64_t kvp_mark_align(void)
{
	return KVP_PAGE;
}

uint64_t kvp_mark_footprint(const struct kvp_geom *g)
{
	if (!g || g->rank_max < 1 || g->rank_max > 65536)
		return 0;
	return kvp_align_up(
		sizeof(struct kvp_mark_shm) + g->rank_max * sizeof(struct kvp_mark_rec), KVP_PAGE);
}

int kvp_mark_new(void *mem, const struct kvp_geom *g)
{
	struct kvp_mark_shm *shm = mem;
	uint64_t footprint = kvp_mark_footprint(g);
	if (!mem || ((uintptr_t)mem & (KVP_CACHE_LINE - 1)) || !footprint)
		return KVP_ERR_INVAL;
	kvp_obj_begin(&shm->hdr, KVP_MARK_LAYOUT, mark_layout_hash(), footprint, g->region_gen);
	kvp_obj_ready(&shm->hdr, KVP_MARK_MAGIC); /* zeros are marks of nobody */
	return KVP_OK;
}

int kvp_mark_join(void *mem, const struct kvp_geom *g, struct kvp_mark *out)
{
	uint64_t footprint = kvp_mark_footprint(g);
	if (!footprint || !out)
		return KVP_ERR_INVAL;
	int rc = kvp_obj_join(mem, KVP_MARK_MAGIC, KVP_MARK_LAYOUT, mark_layout_hash());
	if (rc)
		return rc;
	struct kvp_mark_shm *shm = mem;
	if (shm->hdr.footprint != footprint || shm->hdr.region_gen != g->region_gen)
		return KVP_ERR_LAYOUT;
	*out = (struct kvp_mark){shm, g->rank_max};
	return KVP_OK;
}

void kvp_mark_leave(struct kvp_mark *m)
{
	memset(m, 0, sizeof(*m));
}

int kvp_mark_delete(void *mem)
{
	if (!mem)
		return KVP_ERR_INVAL;
	kvp_obj_delete(mem);
	return KVP_OK;
}

uint64_t kvp_mark_check(const struct kvp_mark *m)
{
	uint64_t faults = 0;
	for (uint32_t i = 0; i < m->rank_max; i++) {
		const struct kvp_mark_rec *r = &m->shm->rec[i];
		if (r->gen && r->applied_seq == KVP_MARK_UNSET && r->live_seq != KVP_MARK_UNSET &&
			++faults <= 10)
			fprintf(stderr, "mark check: slot %u has a live number but nothing applied\n", i);
	}
	return faults;
}

int kvp_mark_reset(struct kvp_mark *m, uint32_t rank_slot, uint32_t gen)
{
	if (rank_slot >= m->rank_max)
		return KVP_ERR_INVAL;
	struct kvp_mark_rec *r = &m->shm->rec[rank_slot];
	kvp_st_rlx_u32(&r->gen, 0);
	kvp_fence_rel(); /* gen 0, before the words of the next generation */
	kvp_st_rlx_u64(&r->applied_seq, KVP_MARK_UNSET);
	kvp_st_rlx_u64(&r->live_seq, KVP_MARK_UNSET);
	kvp_st_rel_u32(&r->gen, gen); /* pairs with: kvp_mark_get */
	return KVP_OK;
}

int kvp_mark_advance(
	struct kvp_mark *m, uint32_t rank_slot, uint32_t gen, uint64_t applied_seq, uint64_t live_seq)
{
	if (rank_slot >= m->rank_max)
		return KVP_ERR_INVAL;
	struct kvp_mark_rec *r = &m->shm->rec[rank_slot];
	if (!gen || kvp_ld_rlx_u32(&r->gen) != gen)
		return KVP_ERR_NOTFOUND;
	if (applied_seq != KVP_MARK_UNSET)
		kvp_st_rel_u64(&r->applied_seq, applied_seq);
	if (live_seq != KVP_MARK_UNSET)
		kvp_st_rel_u64(&r->live_seq, live_seq);
	return KVP_OK;
}

int kvp_mark_get(
	const struct kvp_mark *m, uint32_t rank_slot, uint32_t gen, uint64_t *applied_seq, uint64_t *live_seq)
{
	if (rank_slot >= m->rank_max)
		return KVP_ERR_INVAL;
	const struct kvp_mark_rec *r = &m->shm->rec[rank_slot];
	if (!gen || kvp_ld_acq_u32(&r->gen) != gen) /* pairs with: kvp_mark_reset */
		return KVP_ERR_NOTFOUND;
	*applied_seq = kvp_ld_rlx_u64(&r->applied_seq);
	*live_seq = kvp_ld_rlx_u64(&r->live_seq);
	return KVP_OK;
}
