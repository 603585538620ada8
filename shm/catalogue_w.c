/* shm/catalogue_w.c — the catalogue's one writer. */
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include <kvpick/point.h>
#include "shm/catalogue_priv.h"

/* The next version of a double buffer may be written after this. Pairs with: kvp_cat_dbuf_valid. */
static uint64_t dbuf_begin(struct kvp_cat_dbuf *d)
{
	uint64_t version = kvp_ld_rlx_u64(&d->word) + 1;
	kvp_st_rlx_u64(&d->building, version);
	kvp_fence_rel(); /* building, before the stores into the buffer */
	KVP_POINT("catalogue:building");
	return version;
}

static void dbuf_publish(struct kvp_cat_writer *w, struct kvp_cat_dbuf *d, uint64_t version)
{
	KVP_POINT("catalogue:publish");
	kvp_st_rel_u64(&d->word, version); /* pairs with: kvp_cat_view_begin, kvp_cat_worker_read */
	kvp_st_rel_u64(&w->cat.shm->version, kvp_ld_rlx_u64(&w->cat.shm->version) + 1);
}

/* -- bitmaps of slots in use -- */

static uint32_t bit_lowest_free(const uint64_t *map, uint32_t max)
{
	for (uint32_t i = 0; i < max; i += 64) {
		uint64_t free_bits = ~map[i / 64];
		if (!free_bits)
			continue;
		uint32_t at = i + (uint32_t)__builtin_ctzll(free_bits);
		return at < max ? at : UINT32_MAX;
	}
	return UINT32_MAX;
}
static void bit_set(uint64_t *map, uint32_t i)
{
	map[i / 64] |= 1ull << (i % 64);
}
static void bit_clear(uint64_t *map, uint32_t i)
{
	map[i / 64] &= ~(1ull << (i % 64));
}

/* -- chains -- */

static void worker_link(struct kvp_cat_writer *w, uint32_t idx)
{
	struct kvp_cat *c = &w->cat;
	uint32_t *head = &c->bucket[kvp_cat_bucket(c, c->worker[idx].worker_id)];
	kvp_st_rel_u32(&c->worker[idx].next, kvp_ld_rlx_u32(head));
	KVP_POINT("catalogue:link");
	kvp_st_rel_u32(head, idx + 1); /* pairs with: worker_walk */
}

/* The word that points to idx in its chain; NULL if it is not linked. */
static uint32_t *worker_linked_at(struct kvp_cat_writer *w, uint32_t idx)
{
	struct kvp_cat *c = &w->cat;
	uint32_t *at = &c->bucket[kvp_cat_bucket(c, c->worker[idx].worker_id)];
	for (uint32_t step = 0; *at && *at <= c->worker_max && step < c->worker_max; step++) {
		if (*at == idx + 1)
			return at;
		at = &c->worker[*at - 1].next;
	}
	return NULL;
}

static void worker_unlink(struct kvp_cat_writer *w, uint32_t idx)
{
	struct kvp_cat_shm *shm = w->cat.shm;
	uint32_t *at = worker_linked_at(w, idx);
	if (at)
		kvp_st_rel_u32(at, kvp_ld_rlx_u32(&w->cat.worker[idx].next));
	KVP_POINT("catalogue:unlink");
	kvp_st_rel_u64(
		&shm->chain_seq, kvp_ld_rlx_u64(&shm->chain_seq) + 1); /* pairs with: kvp_cat_worker_find */
	kvp_fence_rel(); /* chain_seq, before a later link of the slot */
	kvp_st_rel_u32(&w->cat.worker[idx].state, KVP_CAT_WORKER_FREE);
}

/* -- take-over -- */

static void recover_workers(struct kvp_cat_writer *w)
{
	struct kvp_cat *c = &w->cat;
	for (uint32_t i = 0; i < c->worker_max; i++) {
		struct kvp_cat_worker_shm *ws = &c->worker[i];
		switch (ws->state) {
		case KVP_CAT_WORKER_FREE:
			continue;
		case KVP_CAT_WORKER_LIVE:
			if (!worker_linked_at(w, i))
				worker_link(w, i);
			bit_set(w->worker_used, i);
			w->worker_cnt++;
			continue;
		case KVP_CAT_WORKER_TAKEN: /* never had a record */
			kvp_st_rel_u32(&ws->state, KVP_CAT_WORKER_FREE);
			continue;
		default:
			worker_unlink(w, i);
		}
	}
}

static void recover_slots(struct kvp_cat_writer *w)
{
	struct kvp_cat *c = &w->cat;
	for (uint32_t i = 0; i < c->rank_max; i++)
		if (c->rank[i].gen & 1) {
			bit_set(w->rank_used, i);
			w->rank_cnt++;
		}
	for (uint32_t i = 0; i < c->index_max; i++) {
		struct kvp_cat_index_shm *x = &c->index[i];
		if (!(x->gen & 1))
			continue;
		int owned = x->rank_slot < c->rank_max && (c->rank[x->rank_slot].gen & 1) &&
				c->rank[x->rank_slot].index_slot == i;
		if (!owned) { /* half taken, or half dropped: the tree holds nothing of it */
			kvp_st_rel_u32(&x->gen, x->gen + 1);
			continue;
		}
		bit_set(w->index_used, i);
		w->index_cnt++;
	}
}

int kvp_cat_w_open(const struct kvp_cat *cat, struct kvp_cat_writer *w)
{
	memset(w, 0, sizeof(*w));
	w->cat = *cat;
	w->rank_used = calloc(cat->rank_max / 64 + 1, 8);
	w->index_used = calloc(cat->index_max / 64 + 1, 8);
	w->worker_used = calloc(cat->worker_max / 64 + 1, 8);
	if (!w->rank_used || !w->index_used || !w->worker_used) {
		kvp_cat_w_close(w);
		return KVP_ERR_SYS;
	}
	recover_workers(w);
	recover_slots(w);
	return KVP_OK;
}

void kvp_cat_w_close(struct kvp_cat_writer *w)
{
	free(w->rank_used);
	free(w->index_used);
	free(w->worker_used);
	memset(w, 0, sizeof(*w));
}

/* -- partitions -- */

int kvp_cat_w_part(struct kvp_cat_writer *w, enum kvp_part_role role, const char *model, uint32_t model_len,
	const char *group, uint32_t group_len, uint32_t block_size, uint32_t is_eagle, uint32_t *part)
{
	struct kvp_cat_shm *shm = w->cat.shm;
	uint32_t idx;
	if (!block_size || model_len > KVP_CAT_NAME_MAX || group_len > KVP_CAT_NAME_MAX || is_eagle > 1)
		return KVP_ERR_INVAL;
	if (kvp_cat_part_find(&w->cat, role, model, model_len, group, group_len, &idx) == KVP_OK) {
		const struct kvp_cat_part_shm *have = &w->cat.part[idx];
		*part = idx;
		return have->block_size == block_size && have->is_eagle == is_eagle ? KVP_OK : KVP_ERR_EXISTS;
	}
	idx = kvp_cat_part_cnt(&w->cat);
	if (idx >= w->cat.part_max)
		return KVP_ERR_FULL;
	struct kvp_cat_part_shm *p = &w->cat.part[idx];
	p->role = (uint32_t)role;
	p->block_size = block_size;
	p->is_eagle = is_eagle;
	p->model_len = model_len;
	p->group_len = group_len;
	memcpy(p->model, model, model_len);
	memcpy(p->group, group, group_len);
	uint64_t hash = kvp_cat_part_hash(shm, role, model, model_len, group, group_len);
	uint64_t salted[4] = {shm->salt[1], hash, idx, shm->salt[0]};
	p->key_salt = XXH3_64bits(salted, sizeof(salted));
	kvp_st_rlx_u64(&shm->part_hash[idx], hash);
	KVP_POINT("catalogue:part");
	kvp_st_rel_u32(&shm->part_cnt, idx + 1); /* pairs with: kvp_cat_part_cnt */
	*part = idx;
	return KVP_OK;
}

/* -- rank and index slots -- */

/* The lowest free index slot, now that of rank_slot; KVP_INDEX_NONE if there is none. A slot whose generation
 * is even is read by nobody. */
static uint32_t index_take(struct kvp_cat_writer *w, uint32_t rank_slot)
{
	struct kvp_cat *c = &w->cat;
	uint32_t index = bit_lowest_free(w->index_used, c->index_max);
	if (index == UINT32_MAX)
		return KVP_INDEX_NONE;
	kvp_st_rlx_u32(&c->index[index].rank_slot, rank_slot);
	kvp_st_rel_u32(&c->index[index].gen, c->index[index].gen + 1); /* pairs with: kvp_cat_index_gen */
	bit_set(w->index_used, index);
	w->index_cnt++;
	return index;
}

int kvp_cat_w_rank_take(struct kvp_cat_writer *w, uint64_t worker_id, uint32_t dp_rank, uint32_t part,
	uint32_t worker_idx, struct kvp_cat_rank_info *out)
{
	struct kvp_cat *c = &w->cat;
	uint32_t slot = bit_lowest_free(w->rank_used, c->rank_max);
	if (slot == UINT32_MAX)
		return KVP_ERR_FULL;
	kvp_fence_rel(); /* keeps fields of the next use behind the even generations */
	uint32_t index = index_take(w, slot);
	KVP_POINT("catalogue:take");
	struct kvp_cat_rank_shm *r = &c->rank[slot];
	kvp_st_rlx_u64(&r->worker_id, worker_id);
	kvp_st_rlx_u32(&r->dp_rank, dp_rank);
	kvp_st_rlx_u32(&r->index_slot, index);
	kvp_st_rlx_u32(&r->worker_idx, worker_idx);
	kvp_st_rlx_u32(&r->part, part);
	kvp_st_rel_u32(&r->gen, r->gen + 1); /* pairs with: kvp_cat_rank_gen */
	bit_set(w->rank_used, slot);
	w->rank_cnt++;
	return kvp_cat_rank_info(c, slot, out);
}

int kvp_cat_w_rank_index(struct kvp_cat_writer *w, uint32_t rank_slot, struct kvp_cat_rank_info *out)
{
	struct kvp_cat *c = &w->cat;
	if (!(kvp_cat_rank_gen(c, rank_slot) & 1))
		return KVP_ERR_NOTFOUND;
	if (c->rank[rank_slot].index_slot != KVP_INDEX_NONE)
		return KVP_ERR_EXISTS;
	kvp_fence_rel(); /* as in kvp_cat_w_rank_take */
	uint32_t index = index_take(w, rank_slot);
	if (index == KVP_INDEX_NONE)
		return KVP_ERR_FULL;
	KVP_POINT("catalogue:index");
	kvp_st_rel_u32(&c->rank[rank_slot].index_slot, index); /* pairs with: kvp_cat_rank_info */
	return kvp_cat_rank_info(c, rank_slot, out);
}

int kvp_cat_w_rank_drop(struct kvp_cat_writer *w, uint32_t rank_slot)
{
	struct kvp_cat *c = &w->cat;
	if (!(kvp_cat_rank_gen(c, rank_slot) & 1))
		return KVP_ERR_NOTFOUND;
	struct kvp_cat_rank_shm *r = &c->rank[rank_slot];
	uint32_t index = r->index_slot;
	kvp_st_rel_u32(&r->gen, r->gen + 1); /* pairs with: kvp_cat_rank_gen */
	bit_clear(w->rank_used, rank_slot);
	w->rank_cnt--;
	KVP_POINT("catalogue:drop");
	if (index < c->index_max) {
		kvp_st_rel_u32(
			&c->index[index].gen, c->index[index].gen + 1); /* pairs with: kvp_cat_index_gen */
		bit_clear(w->index_used, index);
		w->index_cnt--;
	}
	kvp_fence_rel(); /* the generations, before the fields of the next use */
	return KVP_OK;
}

/* -- views -- */

static uint32_t schedulable(const struct kvp_cat *c)
{
	uint32_t sum = 0;
	for (uint32_t role = 0; role < KVP_PART_ROLE_CNT; role++)
		sum += kvp_cat_schedulable_cnt(c, (enum kvp_part_role)role);
	return sum;
}

int kvp_cat_w_view(struct kvp_cat_writer *w, uint32_t part, const struct kvp_rank_view *rank, uint32_t cnt,
	const uint64_t *taint, uint32_t taint_cnt, uint32_t worker_cnt)
{
	struct kvp_cat *c = &w->cat;
	if (part >= kvp_cat_part_cnt(c))
		return KVP_ERR_INVAL;
	if (cnt > c->rank_max || taint_cnt > c->taint_max)
		return KVP_ERR_FULL;
	struct kvp_cat_dbuf *d = &c->part[part].view;
	uint64_t version = dbuf_begin(d);
	struct kvp_cat_view_shm *b = kvp_cat_view_buf(c, part, version);
	kvp_st_rlx_u32(&b->cnt, cnt);
	kvp_st_rlx_u32(&b->taint_cnt, taint_cnt);
	kvp_st_rlx_u32(&b->worker_cnt, worker_cnt);
	for (uint32_t i = 0; i < cnt; i++) {
		const struct kvp_rank_view *f = &rank[i];
		struct kvp_rank_view *t = &b->rank[i];
		kvp_st_rlx_u64(&t->worker_id, f->worker_id);
		kvp_st_rlx_u32(&t->dp_rank, f->dp_rank);
		kvp_st_rlx_u32(&t->rank_slot, f->rank_slot);
		kvp_st_rlx_u32(&t->rank_gen, f->rank_gen);
		kvp_st_rlx_u32(&t->index_slot, f->index_slot);
		kvp_st_rlx_u32(&t->index_gen, f->index_gen);
		kvp_st_rlx_u32(&t->worker_idx, f->worker_idx);
		kvp_st_rlx_u64(&t->max_num_batched_tokens, f->max_num_batched_tokens);
		kvp_st_rlx_u64(&t->total_kv_blocks, f->total_kv_blocks);
		kvp_st_rlx_u32(&t->taint_off, f->taint_off);
		kvp_st_rlx_u32(&t->taint_cnt, f->taint_cnt);
		kvp_st_rlx_u64(&t->kv_hint, f->kv_hint);
	}
	uint64_t *to = kvp_cat_view_taint(c, b);
	for (uint32_t i = 0; i < taint_cnt; i++)
		kvp_st_rlx_u64(&to[i], taint[i]);
	dbuf_publish(w, d, version);
	uint32_t now = schedulable(c);
	if (now > c->shm->most_schedulable)
		kvp_st_rel_u32(&c->shm->most_schedulable, now);
	return KVP_OK;
}

/* -- workers -- */

int kvp_cat_w_worker_slot(struct kvp_cat_writer *w, uint64_t worker_id, uint32_t *idx)
{
	struct kvp_cat *c = &w->cat;
	if (kvp_cat_worker_find(c, worker_id, idx) == KVP_OK)
		return KVP_OK;
	uint32_t slot = bit_lowest_free(w->worker_used, c->worker_max);
	if (slot == UINT32_MAX)
		return KVP_ERR_FULL;
	kvp_st_rel_u32(&c->worker[slot].state, KVP_CAT_WORKER_TAKEN);
	kvp_st_rlx_u64(&c->worker[slot].worker_id, worker_id);
	bit_set(w->worker_used, slot);
	w->worker_cnt++;
	*idx = slot;
	return KVP_OK;
}

int kvp_cat_w_worker_put(struct kvp_cat_writer *w, uint32_t idx, const struct kvp_cat_worker_info *info,
	const char *json, uint32_t len)
{
	if (idx >= w->cat.worker_max)
		return KVP_ERR_INVAL;
	if (len > KVP_CAT_RECORD_MAX || info->endpoint_len > KVP_CAT_NAME_MAX ||
		info->model_len > KVP_CAT_NAME_MAX || info->group_len > KVP_CAT_NAME_MAX)
		return KVP_ERR_LIMIT;
	struct kvp_cat_worker_shm *ws = &w->cat.worker[idx];
	if (ws->worker_id != info->worker_id || ws->state == KVP_CAT_WORKER_FREE)
		return KVP_ERR_INVAL;
	uint64_t version = dbuf_begin(&ws->record);
	struct kvp_cat_record_shm *b = kvp_cat_record_buf(&w->cat, idx, version);
	kvp_copy_in(b->head, info, offsetof(struct kvp_cat_worker_info, endpoint));
	kvp_copy_in(b->endpoint, info->endpoint, info->endpoint_len);
	kvp_copy_in(b->model, info->model, info->model_len);
	kvp_copy_in(b->group, info->group, info->group_len);
	kvp_st_rlx_u32(&b->json_len, len);
	kvp_copy_in(b->json, json, len);
	dbuf_publish(w, &ws->record, version);
	if (ws->state == KVP_CAT_WORKER_TAKEN) {
		kvp_st_rel_u32(&ws->state, KVP_CAT_WORKER_LIVE); /* pairs with: kvp_cat_worker_read */
		KVP_POINT("catalogue:live");
		worker_link(w, idx);
	}
	return KVP_OK;
}

int kvp_cat_w_worker_drop(struct kvp_cat_writer *w, uint32_t idx)
{
	struct kvp_cat *c = &w->cat;
	if (idx >= c->worker_max || c->worker[idx].state == KVP_CAT_WORKER_FREE)
		return KVP_ERR_NOTFOUND;
	kvp_st_rel_u32(&c->worker[idx].state, KVP_CAT_WORKER_DEAD);
	KVP_POINT("catalogue:dead");
	worker_unlink(w, idx);
	bit_clear(w->worker_used, idx);
	w->worker_cnt--;
	kvp_st_rel_u64(&c->shm->version, kvp_ld_rlx_u64(&c->shm->version) + 1);
	return KVP_OK;
}
