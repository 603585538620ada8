#include "shm/radix_priv.h"

#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define MAGIC 0x31505452504b56ULL /* "VKPRTP1" */
#define LAYOUT 2
#define NAME_LOG2_MIN 12

static uint32_t layout_hash(void)
{
	const size_t w[] = {sizeof(struct kvp_radix_priv_shm), offsetof(struct kvp_radix_priv_shm, op),
		offsetof(struct kvp_radix_priv_shm, img), sizeof(struct kvp_radix_run_shm),
		sizeof(struct kvp_radix_hole_shm), sizeof(struct kvp_radix_alias_shm),
		sizeof(struct kvp_radix_slot_shm), KVP_RADIX_OP_BLK_MAX};
	return kvp_obj_hash(w, sizeof(w) / sizeof(w[0]));
}

uint64_t kvp_radix_priv_align(void)
{
	return KVP_PAGE;
}

uint64_t kvp_radix_priv_footprint(const struct kvp_geom *g)
{
	struct kvp_radix_geo o;
	return kvp_radix_geo(g, &o) ? 0 : o.priv_footprint;
}

int kvp_radix_priv_new(void *mem, const struct kvp_geom *g)
{
	struct kvp_radix_geo o;
	if (!mem || ((uintptr_t)mem & (KVP_PAGE - 1)) || kvp_radix_geo(g, &o))
		return KVP_ERR_INVAL;
	struct kvp_radix_priv_shm *p = mem;
	kvp_obj_begin(&p->hdr, LAYOUT, layout_hash(), o.priv_footprint, g->region_gen);
	memset((char *)mem + sizeof(p->hdr), 0, sizeof(*p) - sizeof(p->hdr));
	kvp_obj_ready(&p->hdr, MAGIC);
	return KVP_OK;
}

int kvp_radix_priv_delete(void *mem)
{
	if (!mem)
		return KVP_ERR_INVAL;
	kvp_obj_delete(mem);
	return KVP_OK;
}

void kvp_radix_w_close(struct kvp_radix_w *w)
{
	if (!w)
		return;
	kvp_radix_mem_put(w->name, 8ULL << w->name_log2);
	kvp_radix_mem_put(w->name_sweep.old, 8ULL << w->name_sweep.log2);
	kvp_radix_mem_put(w->alias_by_ext, 4ULL << w->alias_log2);
	kvp_radix_mem_put(w->alias_by_pos, 4ULL << w->alias_log2);
	kvp_radix_mem_put(w->col_use, w->geo.col_max / KVP_RADIX_COL_GRAN);
	kvp_radix_mem_put(w->tslot, 4ULL * w->geo.run_max + 4);
	kvp_radix_mem_put(w->next.tslot, 4ULL * w->geo.run_max + 4);
	kvp_radix_mem_put(w->key, 8ULL * KVP_RADIX_OP_BLK_MAX);
	kvp_radix_mem_put(w->dup, 16ULL * KVP_RADIX_OP_BLK_MAX);
	kvp_radix_buddy_close(&w->colb);
	kvp_radix_buddy_close(&w->cutb);
	free(w);
}

static uint32_t log2_for(uint64_t cnt)
{
	uint32_t log2 = NAME_LOG2_MIN;
	while (cnt * 5 >= 3ULL << log2)
		log2++;
	return log2;
}

static int memory(struct kvp_radix_w *w)
{
	w->name_log2 = log2_for(w->pub->stat.blocks);
	w->alias_log2 = log2_for(w->priv->alias_bump);
	w->name = kvp_radix_mem_get(8ULL << w->name_log2);
	w->alias_by_ext = kvp_radix_mem_get(4ULL << w->alias_log2);
	w->alias_by_pos = kvp_radix_mem_get(4ULL << w->alias_log2);
	w->col_use = kvp_radix_mem_get(w->geo.col_max / KVP_RADIX_COL_GRAN);
	w->tslot = kvp_radix_mem_get(4ULL * w->geo.run_max + 4);
	w->next.tslot = kvp_radix_mem_get(4ULL * w->geo.run_max + 4);
	w->key = kvp_radix_mem_get(8ULL * KVP_RADIX_OP_BLK_MAX);
	w->dup = kvp_radix_mem_get(16ULL * KVP_RADIX_OP_BLK_MAX);
	w->dup_stamp = 1;
	if (!w->name || !w->alias_by_ext || !w->alias_by_pos || !w->col_use || !w->tslot ||
		!w->next.tslot || !w->key || !w->dup || kvp_mix_draw(&w->dup_mix) ||
		kvp_radix_buddy_open(&w->colb, w->geo.col_max / KVP_RADIX_COL_GRAN, 7, &w->pub->col_bump) ||
		kvp_radix_buddy_open(&w->cutb, w->geo.cut_max / KVP_RADIX_CUT_GRAN,
			KVP_RADIX_IV_CLASS_MAX - 1, &w->pub->cut_bump))
		return KVP_ERR_SYS;
	return KVP_OK;
}

static void place(struct kvp_radix_w *w, char *pub, char *priv)
{
	const struct kvp_radix_geo *g = &w->geo;
	w->pub = (void *)pub;
	w->priv = (void *)priv;
	w->col = (void *)(pub + g->col_off);
	w->cut = (void *)(pub + g->cut_off);
	w->slot = (void *)(priv + g->slot_off);
	w->op_local = (void *)(priv + g->op_local_off);
	w->op_ext = (void *)(priv + g->op_ext_off);
	w->local = (void *)(priv + g->local_off);
	w->ext = (void *)(priv + g->ext_off);
	w->run_of = (void *)(priv + g->run_of_off);
	w->run = (void *)(priv + g->run_off);
	w->hole = (void *)(priv + g->hole_off);
	w->alias = (void *)(priv + g->alias_off);
}

/* An empty table under a new descriptor: whoever reads the old one notices at the end of the walk, so that
 * everything else may be reused at once. The private generation follows last: killed in between, the
 * segments do not match and the next opener resets again. */
static void reset(struct kvp_radix_w *w)
{
	struct kvp_radix_shm *s = w->pub;
	uint64_t d = s->table;
	uint32_t side = !KVP_RADIX_DESC_SIDE(d), log2 = w->geo.log2_min;
	kvp_st_rel_u32(&s->ready, 0);
	w->priv->generation = 0;
	kvp_radix_area_clear(w, log2, side);
	kvp_st_rel_u64(&s->table, KVP_RADIX_DESC(KVP_RADIX_DESC_SEQ(d) + 1, log2, side));
	kvp_fence_rel(); /* orders the new descriptor before any reuse: pairs with kvp_radix_find */
	kvp_st_rel_u64(&s->generation, s->generation + 1);
	kvp_st_rlx_u32(&s->col_bump, 0);
	kvp_st_rlx_u32(&s->cut_bump, 0);
	kvp_st_rlx_u64(&s->stat.runs, 0);
	kvp_st_rlx_u64(&s->stat.blocks, 0);
	kvp_st_rlx_u64(&s->stat.low_blocks, 0);
	kvp_st_rlx_u32(&s->low, 0);
	for (uint32_t i = 0; i < KVP_RADIX_WORD_MAX; i++)
		kvp_st_rlx_u64(&s->hidden[i], 0);
	memset((char *)w->priv + sizeof(w->priv->hdr), 0, sizeof(*w->priv) - sizeof(w->priv->hdr));
	memset(w->slot, 0, sizeof(*w->slot) * w->geo.holder_max);
	w->priv->generation = s->generation;
}

/* The private segment must be the one that was written along with this tree, or both empty. */
static int same_tree(const struct kvp_radix_w *w)
{
	const struct kvp_radix_priv_shm *p = w->priv;
	uint32_t log2 = KVP_RADIX_DESC_LOG2(w->pub->table);
	if (log2 < w->geo.log2_min || log2 > w->geo.log2_max)
		return 0;
	if (p->generation == 0)
		return w->pub->stat.runs == 0 && w->pub->col_bump == 0;
	return p->generation == w->pub->generation && p->rid_bump <= w->geo.run_max &&
	       p->hole_bump <= w->geo.hole_max && p->alias_bump <= w->geo.alias_max &&
	       w->pub->col_bump <= w->geo.col_max / KVP_RADIX_COL_GRAN &&
	       w->pub->cut_bump <= w->geo.cut_max / KVP_RADIX_CUT_GRAN;
}

static uint64_t now_ns(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

int kvp_radix_w_open(void *pub, void *priv, const struct kvp_geom *g, enum kvp_radix_open how,
	struct kvp_ctr_column_shm *ctr, struct kvp_radix_w **out, struct kvp_radix_report *rep)
{
	struct kvp_radix r;
	struct kvp_radix_report mine = {0};
	uint64_t begin = now_ns();
	int rc = kvp_radix_join(pub, g, &r);
	if (!rc)
		rc = kvp_obj_join(priv, MAGIC, LAYOUT, layout_hash());
	if (rc)
		return rc;
	struct kvp_radix_w *w = calloc(1, sizeof(*w));
	if (!w)
		return KVP_ERR_SYS;
	w->r = r;
	w->ctr = ctr;
	w->tour_serial = w->tour_first = begin; /* numbers of a writer before this one are smaller */
	kvp_radix_geo(g, &w->geo);
	place(w, pub, priv);
	if (w->priv->hdr.footprint != w->geo.priv_footprint ||
		w->priv->hdr.region_gen != w->pub->hdr.region_gen) {
		rc = KVP_ERR_LAYOUT;
		goto fail;
	}
	if (how == KVP_RADIX_RESET)
		reset(w);
	if (!same_tree(w)) {
		rc = KVP_ERR_CORRUPT;
		goto fail;
	}
	w->priv->generation = w->pub->generation;
	rc = memory(w);
	if (!rc)
		rc = kvp_radix_recover(w, &mine);
	if (rc)
		goto fail;
	for (uint32_t s = 0; s < w->geo.slot_max; s++)
		if (w->pub->hidden[s >> 6] >> (s & 63) & 1) /* a clear was begun */
			kvp_radix_clear(w, s);
	kvp_radix_w_set_ready(w, 1);
	mine.duration_ns = now_ns() - begin;
	if (rep)
		*rep = mine;
	*out = w;
	return KVP_OK;
fail:
	kvp_radix_w_close(w);
	return rc;
}
