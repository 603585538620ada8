/* shm/catalogue.c — layout and readers of the catalogue. */
#include <stdio.h>
#include <string.h>
#include <xxhash.h>

#include <kvpick/point.h>
#include "shm/catalogue_priv.h"

_Static_assert(sizeof(struct kvp_rank_view) == 64, "one line a rank");
_Static_assert(sizeof(struct kvp_cat_worker_shm) == 64, "one line a worker");

static uint32_t cat_layout_hash(void)
{
	static const size_t word[] = {
		sizeof(struct kvp_cat_shm),
		offsetof(struct kvp_cat_shm, part_cnt),
		offsetof(struct kvp_cat_shm, part_hash),
		sizeof(struct kvp_cat_part_shm),
		offsetof(struct kvp_cat_part_shm, key_salt),
		offsetof(struct kvp_cat_part_shm, model),
		sizeof(struct kvp_cat_worker_shm),
		offsetof(struct kvp_cat_worker_shm, record),
		sizeof(struct kvp_cat_rank_shm),
		offsetof(struct kvp_cat_rank_shm, index_slot),
		sizeof(struct kvp_cat_index_shm),
		sizeof(struct kvp_rank_view),
		offsetof(struct kvp_rank_view, taint_off),
		offsetof(struct kvp_cat_view_shm, rank),
		sizeof(struct kvp_cat_record_shm),
		offsetof(struct kvp_cat_record_shm, json),
		offsetof(struct kvp_cat_worker_info, endpoint),
	};
	return kvp_obj_hash(word, sizeof(word) / sizeof(word[0]));
}

/* Fills every size and offset of a layout for g; 0 for a geometry out of range. */
static uint64_t cat_plan(const struct kvp_geom *g, struct kvp_cat_shm *p)
{
	if (!g || g->part_max < 1 || g->part_max > KVP_PART_MAX || g->rank_max < 1 || g->rank_max > 65536)
		return 0;
	if (g->index_rank_max < 64 || g->index_rank_max > 4096)
		return 0;
	memset(p, 0, sizeof(*p));
	p->part_max = g->part_max;
	p->rank_max = g->rank_max;
	p->index_max = g->index_rank_max;
	p->worker_max = g->rank_max + KVP_CAT_WORKER_SPARE;
	p->taint_max = g->rank_max * KVP_CAT_TAINT_PER_RANK + KVP_CAT_TAINT_SPARE;
	for (p->bucket_cnt = 64; p->bucket_cnt < p->worker_max;)
		p->bucket_cnt *= 2;
	p->view_bytes = kvp_align_up(sizeof(struct kvp_cat_view_shm) +
						(uint64_t)p->rank_max * sizeof(struct kvp_rank_view) +
						8ull * p->taint_max,
		KVP_PAGE);
	uint64_t off = sizeof(*p);
	p->off_part = off = kvp_align_up(off, KVP_PAGE);
	off += (uint64_t)p->part_max * sizeof(struct kvp_cat_part_shm);
	p->off_worker = off = kvp_align_up(off, KVP_PAGE);
	off += (uint64_t)p->worker_max * sizeof(struct kvp_cat_worker_shm);
	p->off_rank = off = kvp_align_up(off, KVP_PAGE);
	off += (uint64_t)p->rank_max * sizeof(struct kvp_cat_rank_shm);
	p->off_index = off = kvp_align_up(off, KVP_PAGE);
	off += (uint64_t)p->index_max * sizeof(struct kvp_cat_index_shm);
	p->off_bucket = off = kvp_align_up(off, KVP_PAGE);
	off += 4ull * p->bucket_cnt;
	p->off_view = off = kvp_align_up(off, KVP_PAGE);
	off += 2ull * p->part_max * p->view_bytes;
	p->off_record = off = kvp_align_up(off, KVP_PAGE);
	off += 2ull * p->worker_max * sizeof(struct kvp_cat_record_shm);
	return kvp_align_up(off, KVP_PAGE);
}

uint64_t kvp_catalogue_align(void)
{
	return KVP_PAGE;
}

uint64_t kvp_catalogue_footprint(const struct kvp_geom *g)
{
	struct kvp_cat_shm plan;
	return cat_plan(g, &plan);
}

int kvp_catalogue_new(void *mem, const struct kvp_geom *g)
{
	struct kvp_cat_shm plan, *shm = mem;
	uint64_t footprint = cat_plan(g, &plan);
	if (!mem || ((uintptr_t)mem & (KVP_CACHE_LINE - 1)) || !footprint)
		return KVP_ERR_INVAL;
	kvp_obj_begin(&shm->hdr, KVP_CAT_LAYOUT, cat_layout_hash(), footprint, g->region_gen);
	plan.hdr = shm->hdr;
	plan.salt[0] = g->salt[0];
	plan.salt[1] = g->salt[1];
	*shm = plan;
	kvp_obj_ready(&shm->hdr, KVP_CAT_MAGIC);
	return KVP_OK;
}

int kvp_catalogue_join(void *mem, const struct kvp_geom *g, struct kvp_cat *out)
{
	struct kvp_cat_shm plan, *shm = mem;
	uint64_t footprint = cat_plan(g, &plan);
	if (!footprint || !out)
		return KVP_ERR_INVAL;
	int rc = kvp_obj_join(mem, KVP_CAT_MAGIC, KVP_CAT_LAYOUT, cat_layout_hash());
	if (rc)
		return rc;
	if (shm->hdr.footprint != footprint)
		return KVP_ERR_LAYOUT;
	/* Offsets are taken from the plan, not from memory: the geometry is what the caller has checked. */
	uint8_t *base = mem;
	*out = (struct kvp_cat){
		.shm = shm,
		.part = (struct kvp_cat_part_shm *)(void *)(base + plan.off_part),
		.worker = (struct kvp_cat_worker_shm *)(void *)(base + plan.off_worker),
		.rank = (struct kvp_cat_rank_shm *)(void *)(base + plan.off_rank),
		.index = (struct kvp_cat_index_shm *)(void *)(base + plan.off_index),
		.bucket = (uint32_t *)(void *)(base + plan.off_bucket),
		.view = base + plan.off_view,
		.record = base + plan.off_record,
		.view_bytes = plan.view_bytes,
		.part_max = plan.part_max,
		.worker_max = plan.worker_max,
		.rank_max = plan.rank_max,
		.index_max = plan.index_max,
		.taint_max = plan.taint_max,
		.bucket_mask = plan.bucket_cnt - 1,
	};
	return KVP_OK;
}

void kvp_catalogue_leave(struct kvp_cat *cat)
{
	memset(cat, 0, sizeof(*cat));
}

int kvp_catalogue_delete(void *mem)
{
	if (!mem)
		return KVP_ERR_INVAL;
	kvp_obj_delete(mem);
	return KVP_OK;
}

/* -- partitions -- */

uint64_t kvp_cat_part_hash(const struct kvp_cat_shm *shm, enum kvp_part_role role, const char *model,
	uint32_t model_len, const char *group, uint32_t group_len)
{
	uint64_t word[4] = {shm->salt[0], shm->salt[1], 0, 0};
	word[2] = XXH3_64bits_withSeed(model, model_len, (uint64_t)role);
	word[3] = XXH3_64bits_withSeed(group, group_len, word[2]);
	return XXH3_64bits(word, sizeof(word));
}

int kvp_cat_part_find(const struct kvp_cat *cat, enum kvp_part_role role, const char *model,
	uint32_t model_len, const char *group, uint32_t group_len, uint32_t *part)
{
	uint32_t cnt = kvp_cat_part_cnt(cat);
	uint64_t hash = kvp_cat_part_hash(cat->shm, role, model, model_len, group, group_len);
	for (uint32_t i = 0; i < cnt; i++) {
		const struct kvp_cat_part_shm *p = &cat->part[i];
		if (kvp_ld_rlx_u64(&cat->shm->part_hash[i]) != hash || p->role != (uint32_t)role)
			continue;
		if (p->model_len != model_len || p->group_len != group_len)
			continue;
		if (memcmp(p->model, model, model_len) == 0 && memcmp(p->group, group, group_len) == 0) {
			*part = i;
			return KVP_OK;
		}
	}
	return KVP_ERR_NOTFOUND;
}

int kvp_cat_part_info(const struct kvp_cat *cat, uint32_t part, struct kvp_part_info *out)
{
	if (part >= kvp_cat_part_cnt(cat))
		return KVP_ERR_INVAL;
	const struct kvp_cat_part_shm *p = &cat->part[part];
	out->role = (enum kvp_part_role)p->role;
	out->block_size = p->block_size;
	out->is_eagle = p->is_eagle;
	out->model_len = p->model_len <= KVP_CAT_NAME_MAX ? p->model_len : KVP_CAT_NAME_MAX;
	out->group_len = p->group_len <= KVP_CAT_NAME_MAX ? p->group_len : KVP_CAT_NAME_MAX;
	out->key_salt = p->key_salt;
	memcpy(out->model, p->model, out->model_len);
	memcpy(out->group, p->group, out->group_len);
	out->model[out->model_len] = 0;
	out->group[out->group_len] = 0;
	return KVP_OK;
}

int kvp_cat_part_get(const struct kvp_cat *cat, uint32_t part, struct kvp_part_fixed *out)
{
	if (part >= kvp_cat_part_cnt(cat))
		return KVP_ERR_INVAL;
	const struct kvp_cat_part_shm *p = &cat->part[part];
	*out = (struct kvp_part_fixed){(enum kvp_part_role)p->role, p->block_size, p->is_eagle, p->key_salt};
	return KVP_OK;
}

uint32_t kvp_cat_part_cnt(const struct kvp_cat *cat)
{
	uint32_t cnt = kvp_ld_acq_u32(&cat->shm->part_cnt); /* pairs with: kvp_cat_w_part */
	return cnt <= cat->part_max ? cnt : cat->part_max;
}

/* -- views -- */

int kvp_cat_view_begin(const struct kvp_cat *cat, uint32_t part, struct kvp_cat_view *v)
{
	if (part >= kvp_cat_part_cnt(cat))
		return KVP_ERR_INVAL;
	uint64_t version = kvp_ld_acq_u64(&cat->part[part].view.word); /* pairs with: dbuf_publish */
	struct kvp_cat_view_shm *b = kvp_cat_view_buf(cat, part, version);
	memset(v, 0, sizeof(*v));
	v->part = part;
	v->version = version;
	if (!version)
		return KVP_OK;
	uint32_t cnt = kvp_ld_rlx_u32(&b->cnt), taint_cnt = kvp_ld_rlx_u32(&b->taint_cnt);
	v->rank = b->rank;
	v->taint = kvp_cat_view_taint(cat, b);
	v->cnt = cnt <= cat->rank_max ? cnt : cat->rank_max;
	v->taint_cnt = taint_cnt <= cat->taint_max ? taint_cnt : cat->taint_max;
	v->worker_cnt = kvp_ld_rlx_u32(&b->worker_cnt);
	return KVP_OK;
}

int kvp_cat_view_valid(const struct kvp_cat *cat, const struct kvp_cat_view *v)
{
	return kvp_cat_dbuf_valid(&cat->part[v->part].view, v->version) ? KVP_OK : KVP_ERR_AGAIN;
}

uint32_t kvp_cat_view_taints(const struct kvp_cat_view *v, uint32_t i, const uint64_t **taint)
{
	uint32_t off = kvp_ld_rlx_u32(&v->rank[i].taint_off), cnt = kvp_ld_rlx_u32(&v->rank[i].taint_cnt);
	if (off > v->taint_cnt)
		off = v->taint_cnt;
	if (cnt > v->taint_cnt - off)
		cnt = v->taint_cnt - off;
	*taint = v->taint + off;
	return cnt;
}

uint64_t kvp_cat_version(const struct kvp_cat *cat)
{
	return kvp_ld_acq_u64(&cat->shm->version); /* pairs with: dbuf_publish */
}

uint32_t kvp_cat_schedulable_cnt(const struct kvp_cat *cat, enum kvp_part_role role)
{
	uint32_t cnt = kvp_cat_part_cnt(cat), sum = 0;
	for (uint32_t i = 0; i < cnt; i++) {
		if (cat->part[i].role != (uint32_t)role)
			continue;
		struct kvp_cat_view v;
		for (int try = 0; try < KVP_CAT_RETRY_MAX; try++)
			if (kvp_cat_view_begin(cat, i, &v) || kvp_cat_view_valid(cat, &v) == KVP_OK)
				break;
		sum += v.worker_cnt;
	}
	return sum;
}

uint32_t kvp_cat_most_schedulable(const struct kvp_cat *cat)
{
	return kvp_ld_acq_u32(&cat->shm->most_schedulable);
}

/* -- workers -- */

/* One walk along a chain: the index found, or UINT32_MAX. A walk that strays into another chain misses, which
 * the caller notices by chain_seq. */
static uint32_t worker_walk(const struct kvp_cat *cat, uint64_t worker_id)
{
	uint32_t link =
		kvp_ld_acq_u32(&cat->bucket[kvp_cat_bucket(cat, worker_id)]); /* pairs with: worker_link */
	for (uint32_t step = 0; link && step < cat->worker_max; step++) {
		uint32_t idx = link - 1;
		if (idx >= cat->worker_max)
			return UINT32_MAX;
		const struct kvp_cat_worker_shm *ws = &cat->worker[idx];
		if (kvp_ld_acq_u32(&ws->state) == KVP_CAT_WORKER_LIVE &&
			kvp_ld_rlx_u64(&ws->worker_id) == worker_id)
			return idx;
		KVP_POINT("catalogue:walk");
		link = kvp_ld_acq_u32(&ws->next);
	}
	return UINT32_MAX;
}

int kvp_cat_worker_find(const struct kvp_cat *cat, uint64_t worker_id, uint32_t *idx)
{
	for (int try = 0; try < KVP_CAT_RETRY_MAX; try++) {
		uint64_t seq = kvp_ld_acq_u64(&cat->shm->chain_seq); /* pairs with: worker_unlink */
		uint32_t found = worker_walk(cat, worker_id);
		if (found != UINT32_MAX) {
			*idx = found;
			return KVP_OK;
		}
		kvp_fence_acq(); /* the walk's loads, before the second load of chain_seq */
		if (kvp_ld_rlx_u64(&cat->shm->chain_seq) == seq)
			return KVP_ERR_NOTFOUND;
	}
	return KVP_ERR_AGAIN;
}

uint32_t kvp_cat_worker_max(const struct kvp_cat *cat)
{
	return cat->worker_max;
}

/* Only the used part of a name is copied: the whole of it would be three KiB a selection. */
static void name_out(char *to, uint32_t *len, const uint64_t *from)
{
	if (*len > KVP_CAT_NAME_MAX)
		*len = KVP_CAT_NAME_MAX;
	kvp_copy_out(to, from, *len);
	to[*len] = 0;
}

static void worker_copy(struct kvp_cat_worker_info *out, const struct kvp_cat_record_shm *b)
{
	kvp_copy_out(out, b->head, offsetof(struct kvp_cat_worker_info, endpoint));
	name_out(out->endpoint, &out->endpoint_len, b->endpoint);
	name_out(out->model, &out->model_len, b->model);
	name_out(out->group, &out->group_len, b->group);
}

int kvp_cat_worker_read(const struct kvp_cat *cat, uint32_t idx, struct kvp_cat_worker_info *out, char *json,
	uint32_t cap, uint32_t *len)
{
	if (idx >= cat->worker_max)
		return KVP_ERR_INVAL;
	const struct kvp_cat_worker_shm *ws = &cat->worker[idx];
	struct kvp_cat_worker_info info;
	for (int try = 0; try < KVP_CAT_RETRY_MAX; try++) {
		if (kvp_ld_acq_u32(&ws->state) != KVP_CAT_WORKER_LIVE) /* pairs with: kvp_cat_w_worker_put */
			return KVP_ERR_NOTFOUND;
		uint64_t version = kvp_ld_acq_u64(&ws->record.word); /* pairs with: dbuf_publish */
		const struct kvp_cat_record_shm *b = kvp_cat_record_buf(cat, idx, version);
		uint32_t json_len = kvp_ld_rlx_u32(&b->json_len);
		if (json_len > KVP_CAT_RECORD_MAX)
			json_len = KVP_CAT_RECORD_MAX;
		if (out)
			worker_copy(&info, b);
		if (json && json_len <= cap)
			kvp_copy_out(json, b->json, json_len);
		if (!kvp_cat_dbuf_valid(&ws->record, version))
			continue;
		if (out)
			*out = info;
		if (len)
			*len = json_len;
		return json && json_len > cap ? KVP_ERR_LIMIT : KVP_OK;
	}
	return KVP_ERR_AGAIN;
}

int kvp_cat_worker_info(const struct kvp_cat *cat, uint32_t idx, struct kvp_cat_worker_info *out)
{
	return kvp_cat_worker_read(cat, idx, out, NULL, 0, NULL);
}

int kvp_cat_worker_json(const struct kvp_cat *cat, uint32_t idx, char *buf, uint32_t cap, uint32_t *len)
{
	return kvp_cat_worker_read(cat, idx, NULL, buf, cap, len);
}

/* -- rank and index slots -- */

uint32_t kvp_cat_rank_gen(const struct kvp_cat *cat, uint32_t rank_slot)
{
	return rank_slot < cat->rank_max ? kvp_ld_acq_u32(&cat->rank[rank_slot].gen) : 0;
}

uint32_t kvp_cat_index_gen(const struct kvp_cat *cat, uint32_t index_slot)
{
	return index_slot < cat->index_max ? kvp_ld_acq_u32(&cat->index[index_slot].gen) : 0;
}

int kvp_cat_rank_info(const struct kvp_cat *cat, uint32_t rank_slot, struct kvp_cat_rank_info *out)
{
	uint32_t gen = kvp_cat_rank_gen(cat, rank_slot); /* pairs with: kvp_cat_w_rank_take */
	if (!(gen & 1))
		return KVP_ERR_NOTFOUND;
	const struct kvp_cat_rank_shm *r = &cat->rank[rank_slot];
	struct kvp_cat_rank_info info = {
		.worker_id = kvp_ld_rlx_u64(&r->worker_id),
		.dp_rank = kvp_ld_rlx_u32(&r->dp_rank),
		.rank_slot = rank_slot,
		.rank_gen = gen,
		.index_slot = kvp_ld_acq_u32(&r->index_slot), /* pairs with: kvp_cat_w_rank_index */
		.worker_idx = kvp_ld_rlx_u32(&r->worker_idx),
		.part = kvp_ld_rlx_u32(&r->part),
	};
	if (info.index_slot != KVP_INDEX_NONE)
		info.index_gen = kvp_cat_index_gen(cat, info.index_slot);
	kvp_fence_acq(); /* the loads above, before the second load of gen */
	if (kvp_ld_rlx_u32(&r->gen) != gen)
		return KVP_ERR_AGAIN;
	*out = info;
	return KVP_OK;
}

int kvp_cat_index_info(const struct kvp_cat *cat, uint32_t index_slot, struct kvp_cat_rank_info *out)
{
	uint32_t gen = kvp_cat_index_gen(cat, index_slot); /* pairs with: kvp_cat_w_rank_take */
	if (!(gen & 1))
		return KVP_ERR_NOTFOUND;
	struct kvp_cat_rank_info info;
	int rc = kvp_cat_rank_info(cat, kvp_ld_rlx_u32(&cat->index[index_slot].rank_slot), &info);
	if (rc || info.index_slot != index_slot || info.index_gen != gen)
		return KVP_ERR_AGAIN;
	*out = info;
	return KVP_OK;
}

/* -- check -- */

static uint64_t fault(uint64_t *cnt, const char *what, uint64_t at)
{
	if (++*cnt <= 10)
		fprintf(stderr, "catalogue check: %s at %llu\n", what, (unsigned long long)at);
	return *cnt;
}

static void check_slots(const struct kvp_cat *cat, uint64_t *cnt)
{
	for (uint32_t i = 0; i < cat->rank_max; i++) {
		const struct kvp_cat_rank_shm *r = &cat->rank[i];
		if (!(r->gen & 1) || r->index_slot == KVP_INDEX_NONE)
			continue;
		if (r->index_slot >= cat->index_max || cat->index[r->index_slot].rank_slot != i ||
			!(cat->index[r->index_slot].gen & 1))
			fault(cnt, "rank slot without its index slot", i);
	}
	for (uint32_t i = 0; i < cat->index_max; i++) {
		const struct kvp_cat_index_shm *x = &cat->index[i];
		if (!(x->gen & 1))
			continue;
		if (x->rank_slot >= cat->rank_max || !(cat->rank[x->rank_slot].gen & 1) ||
			cat->rank[x->rank_slot].index_slot != i)
			fault(cnt, "index slot without its rank slot", i);
	}
}

static void check_workers(const struct kvp_cat *cat, uint64_t *cnt)
{
	uint32_t live = 0, linked = 0;
	for (uint32_t i = 0; i < cat->worker_max; i++) {
		const struct kvp_cat_worker_shm *ws = &cat->worker[i];
		if (ws->state > KVP_CAT_WORKER_DEAD)
			fault(cnt, "worker state", i);
		if (ws->state != KVP_CAT_WORKER_LIVE)
			continue;
		live++;
		if (worker_walk(cat, ws->worker_id) != i)
			fault(cnt, "worker not found by its id", i);
		if (kvp_cat_record_buf(cat, i, ws->record.word)->head[0] != ws->worker_id)
			fault(cnt, "record of another worker", i);
	}
	for (uint32_t b = 0; b <= cat->bucket_mask; b++) {
		uint32_t link = cat->bucket[b], step = 0;
		for (; link && link <= cat->worker_max && step++ < cat->worker_max;
			link = cat->worker[link - 1].next)
			linked++;
		if (link)
			fault(cnt, "endless chain", b);
	}
	if (live != linked)
		fault(cnt, "linked workers differ from live ones", linked);
}

static void check_view(const struct kvp_cat *cat, uint32_t part, uint64_t *cnt)
{
	struct kvp_cat_view v;
	const struct kvp_cat_dbuf *d = &cat->part[part].view;
	if (d->building < d->word || d->building > d->word + 1)
		fault(cnt, "view versions", part);
	if (kvp_cat_view_begin(cat, part, &v))
		fault(cnt, "view", part);
	for (uint32_t i = 0; i < v.cnt; i++) {
		const struct kvp_rank_view *r = &v.rank[i];
		if (kvp_cat_rank_gen(cat, r->rank_slot) != r->rank_gen || !(r->rank_gen & 1))
			fault(cnt, "view names a closed rank slot", i);
		if (r->index_slot != KVP_INDEX_NONE && kvp_cat_index_gen(cat, r->index_slot) != r->index_gen)
			fault(cnt, "view names a closed index slot", i);
		if ((uint64_t)r->taint_off + r->taint_cnt > v.taint_cnt)
			fault(cnt, "taints outside the view", i);
		const struct kvp_rank_view *p = i ? r - 1 : NULL;
		if (p && (p->worker_id > r->worker_id ||
					(p->worker_id == r->worker_id && p->dp_rank >= r->dp_rank)))
			fault(cnt, "view not sorted", i);
	}
}

uint64_t kvp_catalogue_check(const struct kvp_cat *cat)
{
	uint64_t cnt = 0;
	check_slots(cat, &cnt);
	check_workers(cat, &cnt);
	for (uint32_t i = 0; i < kvp_cat_part_cnt(cat); i++)
		check_view(cat, i, &cnt);
	return cnt;
}
