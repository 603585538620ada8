/* shm/hits.c — two counts a partition. */
#include "shm/hits.h"

#include <string.h>

#define KVP_HITS_MAGIC 0x6b76702d68697473ull
#define KVP_HITS_LAYOUT 1

struct hits_part {
	_Alignas(KVP_CACHE_LINE) uint64_t asked;
	uint64_t found;
};

struct kvp_hits_shm {
	struct kvp_objhdr hdr;
	struct hits_part part[];
};

static uint32_t hits_layout_hash(void)
{
	static const size_t word[] = {sizeof(struct hits_part), offsetof(struct hits_part, found),
		offsetof(struct kvp_hits_shm, part)};
	return kvp_obj_hash(word, sizeof(word) / sizeof(word[0]));
}

uint64_t kvp_hits_align(void)
{
	return KVP_PAGE;
}

uint64_t kvp_hits_footprint(const struct kvp_geom *g)
{
	if (!g || g->part_max < 1 || g->part_max > KVP_PART_MAX)
		return 0;
	return kvp_align_up(sizeof(struct kvp_hits_shm) + g->part_max * sizeof(struct hits_part), KVP_PAGE);
}

int kvp_hits_new(void *mem, const struct kvp_geom *g)
{
	struct kvp_hits_shm *shm = mem;
	uint64_t footprint = kvp_hits_footprint(g);
	if (!mem || ((uintptr_t)mem & (KVP_CACHE_LINE - 1)) || !footprint)
		return KVP_ERR_INVAL;
	kvp_obj_begin(&shm->hdr, KVP_HITS_LAYOUT, hits_layout_hash(), footprint, g->region_gen);
	kvp_obj_ready(&shm->hdr, KVP_HITS_MAGIC); /* zeros are counts */
	return KVP_OK;
}

int kvp_hits_join(void *mem, const struct kvp_geom *g, struct kvp_hits *out)
{
	uint64_t footprint = kvp_hits_footprint(g);
	if (!footprint || !out)
		return KVP_ERR_INVAL;
	int rc = kvp_obj_join(mem, KVP_HITS_MAGIC, KVP_HITS_LAYOUT, hits_layout_hash());
	if (rc)
		return rc;
	struct kvp_hits_shm *shm = mem;
	if (shm->hdr.footprint != footprint || shm->hdr.region_gen != g->region_gen)
		return KVP_ERR_LAYOUT;
	*out = (struct kvp_hits){shm, g->part_max};
	return KVP_OK;
}

void kvp_hits_leave(struct kvp_hits *h)
{
	memset(h, 0, sizeof(*h));
}

int kvp_hits_delete(void *mem)
{
	if (!mem)
		return KVP_ERR_INVAL;
	kvp_obj_delete(mem);
	return KVP_OK;
}

void kvp_hits_add(struct kvp_hits *h, uint32_t part, uint32_t asked, uint32_t found)
{
	if (part >= h->part_max)
		return;
	struct hits_part *p = &h->shm->part[part];
	if (found)
		kvp_faa_ar_u64(&p->found, found);
	kvp_faa_ar_u64(&p->asked, asked); /* pairs with: kvp_hits_get */
}

void kvp_hits_get(const struct kvp_hits *h, uint32_t part, uint64_t *asked, uint64_t *found)
{
	*asked = *found = 0;
	if (part >= h->part_max)
		return;
	*asked = kvp_ld_acq_u64(&h->shm->part[part].asked); /* pairs with: kvp_hits_add */
	*found = kvp_ld_rlx_u64(&h->shm->part[part].found);
}
