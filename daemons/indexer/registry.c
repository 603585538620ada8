/* daemons/indexer/registry.c — rank slots, listeners and views of the workers; recovery from the
 * catalogue. */
#include <kvpick/point.h>
#include <stdlib.h>
#include <string.h>

#include "daemons/indexer/indexer.h"
#include "daemons/indexer/listener.h"

int kvp_idx_open(struct kvp_idx *idx, const struct kvp_cat *cat, struct kvp_radix_w *radix,
	struct kvp_book *book, struct kvp_mark *mark, struct kvp_ctr_column_shm *ctr,
	const struct kvp_idx_cfg *cfg)
{
	memset(idx, 0, sizeof(*idx));
	idx->clearing = KVP_INDEX_NONE;
	int rc = kvp_cat_w_open(cat, &idx->cat);
	if (rc)
		return rc;
	idx->cfg = *cfg;
	idx->radix = radix;
	idx->book = book;
	idx->mark = mark;
	idx->ctr = ctr;
	idx->json = kvp_json_new();
	kvp_jw_init(&idx->jw);
	idx->rank = calloc(cat->rank_max, sizeof(*idx->rank));
	idx->worker = calloc(cat->worker_max, sizeof(*idx->worker));
	idx->view = calloc(cat->rank_max, sizeof(*idx->view));
	idx->taint = calloc(cat->taint_max, sizeof(*idx->taint));
	idx->lost = calloc(cat->rank_max, sizeof(*idx->lost));
	if (!idx->json || !idx->rank || !idx->worker || !idx->view || !idx->taint || !idx->lost) {
		kvp_idx_close(idx);
		return KVP_ERR_SYS;
	}
	return KVP_OK;
}

void kvp_idx_close(struct kvp_idx *idx)
{
	for (uint32_t i = 0; idx->rank && i < idx->cat.cat.rank_max; i++) {
		free(idx->rank[i].event);
		free(idx->rank[i].replay);
	}
	for (uint32_t i = 0; idx->worker && i < idx->cat.cat.worker_max; i++) {
		free(idx->worker[i].rank_slot);
		free(idx->worker[i].taint);
	}
	for (uint32_t i = 0; i < KVP_PART_MAX; i++)
		free(idx->part[i].worker_idx);
	kvp_idx_routed_close(idx);
	kvp_idx_recovery_close(idx);
	kvp_json_free(idx->json);
	kvp_jw_free(&idx->jw);
	free(idx->rank);
	free(idx->worker);
	free(idx->view);
	free(idx->taint);
	free(idx->lost);
	kvp_cat_w_close(&idx->cat);
	memset(idx, 0, sizeof(*idx));
}

/* -- partitions and their views -- */

/* Place of a worker in the sorted list, or where it belongs. */
static uint32_t part_place(const struct kvp_idx *idx, const struct kvp_idx_part *p, uint64_t worker_id)
{
	uint32_t lo = 0, hi = p->cnt;
	while (lo < hi) {
		uint32_t mid = lo + (hi - lo) / 2;
		if (idx->worker[p->worker_idx[mid]].worker_id < worker_id)
			lo = mid + 1;
		else
			hi = mid;
	}
	return lo;
}

int kvp_idx_part_room(struct kvp_idx *idx, uint32_t part)
{
	struct kvp_idx_part *p = &idx->part[part];
	if (p->cnt < p->cap)
		return KVP_OK;
	uint32_t cap = p->cap ? 2 * p->cap : 16;
	uint32_t *grown = realloc(p->worker_idx, cap * sizeof(*grown));
	if (!grown)
		return KVP_ERR_SYS;
	p->worker_idx = grown;
	p->cap = cap;
	return KVP_OK;
}

int kvp_idx_part_add(struct kvp_idx *idx, uint32_t part, uint32_t worker_idx)
{
	struct kvp_idx_part *p = &idx->part[part];
	uint32_t at = part_place(idx, p, idx->worker[worker_idx].worker_id);
	if (at < p->cnt && p->worker_idx[at] == worker_idx)
		return KVP_OK;
	int rc = kvp_idx_part_room(idx, part);
	if (rc)
		return rc;
	memmove(&p->worker_idx[at + 1], &p->worker_idx[at], (p->cnt - at) * sizeof(p->worker_idx[0]));
	p->worker_idx[at] = worker_idx;
	p->cnt++;
	return KVP_OK;
}

void kvp_idx_part_drop(struct kvp_idx *idx, uint32_t part, uint32_t worker_idx)
{
	struct kvp_idx_part *p = &idx->part[part];
	uint32_t at = part_place(idx, p, idx->worker[worker_idx].worker_id);
	if (at >= p->cnt || p->worker_idx[at] != worker_idx)
		return;
	p->cnt--;
	memmove(&p->worker_idx[at], &p->worker_idx[at + 1], (p->cnt - at) * sizeof(p->worker_idx[0]));
}

static int view_same(const struct kvp_idx *idx, const struct kvp_cat_view *v, uint32_t cnt,
	uint32_t taint_cnt, uint32_t worker_cnt)
{
	if (!v->version || v->cnt != cnt || v->taint_cnt != taint_cnt || v->worker_cnt != worker_cnt)
		return 0;
	return (!cnt || memcmp(v->rank, idx->view, cnt * sizeof(*idx->view)) == 0) &&
		(!taint_cnt || memcmp(v->taint, idx->taint, taint_cnt * sizeof(*idx->taint)) == 0);
}

void kvp_idx_view_publish(struct kvp_idx *idx, uint32_t part)
{
	const struct kvp_idx_part *p = &idx->part[part];
	uint32_t cnt = 0, taint_cnt = 0;
	if (idx->state == KVP_IDX_RECOVERING)
		return;
	for (uint32_t i = 0; i < p->cnt; i++) {
		const struct kvp_idx_worker *w = &idx->worker[p->worker_idx[i]];
		if (w->taint_cnt > idx->cat.cat.taint_max - taint_cnt ||
			w->rank_cnt > idx->cat.cat.rank_max - cnt)
			break; /* registration checked both; never leave the scratch arrays */
		if (w->taint_cnt)
			memcpy(&idx->taint[taint_cnt], w->taint, w->taint_cnt * sizeof(*w->taint));
		for (uint32_t k = 0; k < w->rank_cnt; k++) {
			const struct kvp_idx_rank *r = &idx->rank[w->rank_slot[k]];
			idx->view[cnt++] = (struct kvp_rank_view){
				.worker_id = r->worker_id,
				.dp_rank = r->dp_rank,
				.rank_slot = w->rank_slot[k],
				.rank_gen = r->rank_gen,
				.index_slot = r->index_slot,
				.index_gen = r->index_gen,
				.worker_idx = p->worker_idx[i],
				.max_num_batched_tokens = w->max_num_batched_tokens,
				.total_kv_blocks = w->total_kv_blocks,
				.taint_off = taint_cnt,
				.taint_cnt = w->taint_cnt,
				.kv_hint = r->kv_hint,
			};
		}
		taint_cnt += w->taint_cnt;
	}
	struct kvp_cat_view now;
	if (kvp_cat_view_begin(&idx->cat.cat, part, &now) || view_same(idx, &now, cnt, taint_cnt, p->cnt))
		return;
	int rc = kvp_cat_w_view(&idx->cat, part, idx->view, cnt, idx->taint, taint_cnt, p->cnt);
	KVP_ASSERT(rc == KVP_OK);
	kvp_ctr_add(idx->ctr, KVP_CTR_CAT_VIEW_PUBLISHED, 1);
}

/* -- rank slots -- */

static void epoch_next(struct kvp_idx *idx)
{
	idx->epoch++;
	if (idx->listeners)
		kvp_idx_listeners_epoch(idx->listeners, idx->epoch);
}

/* A rank's stream starts anew: nothing remembered, mark unset (gen 0: the mark is nobody's). */
static void forget_stream(struct kvp_idx *idx, uint32_t rank_slot, uint32_t gen)
{
	if (idx->memo)
		kvp_memo_clear(idx->memo, rank_slot);
	if (idx->mark)
		kvp_mark_reset(idx->mark, rank_slot, gen);
}

void kvp_idx_rank_set(struct kvp_idx *idx, const struct kvp_cat_rank_info *info)
{
	idx->waiting_cnt += info->index_slot == KVP_INDEX_NONE;
	struct kvp_part_fixed fixed = {.key_salt = 0};
	kvp_cat_part_get(&idx->cat.cat, info->part, &fixed);
	idx->rank[info->rank_slot] = (struct kvp_idx_rank){
		.worker_id = info->worker_id,
		.epoch = idx->epoch,
		.part_salt = fixed.key_salt,
		.rank_gen = info->rank_gen,
		.dp_rank = info->dp_rank,
		.index_slot = info->index_slot,
		.index_gen = info->index_gen,
		.part = info->part,
		.worker_idx = info->worker_idx,
	};
}

int kvp_idx_rank_take(struct kvp_idx *idx, uint32_t worker_idx, uint64_t worker_id, uint32_t part,
	uint32_t dp_rank, uint32_t *rank_slot)
{
	struct kvp_cat_rank_info info;
	if (idx->lost_cnt &&
		(idx->cat.index_cnt >= idx->cat.cat.index_max || idx->cat.rank_cnt >= idx->cat.cat.rank_max))
		kvp_idx_clear_some(idx, UINT32_MAX);
	int rc = kvp_cat_w_rank_take(&idx->cat, worker_id, dp_rank, part, worker_idx, &info);
	if (rc)
		return rc;
	KVP_POINT("indexer:rank_taken");
	rc = kvp_rank_open(idx->book, info.rank_slot, info.rank_gen);
	KVP_ASSERT(rc == KVP_OK);
	forget_stream(idx, info.rank_slot, info.rank_gen);
	epoch_next(idx);
	kvp_idx_rank_set(idx, &info);
	*rank_slot = info.rank_slot;
	return KVP_OK;
}

static void listener_drop(struct kvp_idx *idx, uint32_t rank_slot)
{
	struct kvp_idx_rank *r = &idx->rank[rank_slot];
	if (r->listener && idx->listeners)
		kvp_idx_listen_stop(idx->listeners, rank_slot, r->listener);
	r->listener = 0;
	free(r->event);
	free(r->replay);
	r->event = r->replay = NULL;
}

/* Somebody else clears the rest of the slot, or all of it is cleared. */
static void clearing_ends(struct kvp_idx *idx, uint32_t index_slot)
{
	if (idx->clearing == index_slot)
		idx->clearing = KVP_INDEX_NONE;
}

void kvp_idx_rank_lose(struct kvp_idx *idx, uint32_t rank_slot)
{
	listener_drop(idx, rank_slot);
	clearing_ends(idx, idx->rank[rank_slot].index_slot);
	kvp_rank_close(idx->book, rank_slot, idx->rank[rank_slot].rank_gen);
	KVP_POINT("indexer:rank_closed");
	idx->rank[rank_slot].is_lost = 1;
	kvp_idx_routed_forget(idx, idx->rank[rank_slot].index_slot);
	idx->waiting_cnt -= idx->rank[rank_slot].index_slot == KVP_INDEX_NONE;
	idx->lost[(idx->lost_head + idx->lost_cnt++) % idx->cat.cat.rank_max] = rank_slot;
}

void kvp_idx_rank_purge(struct kvp_idx *idx, uint32_t rank_slot)
{
	struct kvp_idx_rank *r = &idx->rank[rank_slot];
	if (r->index_slot != KVP_INDEX_NONE)
		kvp_radix_clear(idx->radix, r->index_slot);
	clearing_ends(idx, r->index_slot);
	kvp_idx_rank_anew(idx, rank_slot);
}

void kvp_idx_rank_anew(struct kvp_idx *idx, uint32_t rank_slot)
{
	forget_stream(idx, rank_slot, idx->rank[rank_slot].rank_gen);
	kvp_ctr_add(idx->ctr, KVP_CTR_IDX_RANK_PURGED, 1);
}

#define LOOKS_PER_STEP 32768u /* at runs of the tree: two or three milliseconds */

/* One step through the trees: KVP_ERR_AGAIN until neither holds anything of the slot. */
static int clear_step(struct kvp_idx *idx, uint32_t index_slot)
{
	struct kvp_radix_w *other = idx->routed.tree;
	if (index_slot == KVP_INDEX_NONE)
		return KVP_OK;
	int rc = kvp_radix_clear_some(idx->radix, index_slot, LOOKS_PER_STEP);
	return rc || !other || other == idx->radix ? rc
						   : kvp_radix_clear_some(other, index_slot, LOOKS_PER_STEP);
}

int kvp_idx_rank_clear(struct kvp_idx *idx, uint32_t index_slot)
{
	if (idx->clearing != KVP_INDEX_NONE && idx->clearing != index_slot)
		return KVP_ERR_AGAIN;
	int rc = kvp_radix_clear_some(idx->radix, index_slot, LOOKS_PER_STEP);
	idx->clearing = rc == KVP_ERR_AGAIN ? index_slot : KVP_INDEX_NONE;
	return rc;
}

uint32_t kvp_idx_clear_some(struct kvp_idx *idx, uint32_t max)
{
	if (idx->clearing != KVP_INDEX_NONE && max != UINT32_MAX)
		return idx->lost_cnt; /* the tree clears one slot at a time, and events wait for that one */
	for (; max && idx->lost_cnt; max--) {
		uint32_t slot = idx->lost[idx->lost_head];
		if (clear_step(idx, idx->rank[slot].index_slot) == KVP_ERR_AGAIN)
			continue;
		idx->lost_head = (idx->lost_head + 1) % idx->cat.cat.rank_max;
		idx->lost_cnt--;
		KVP_POINT("indexer:cleared");
		forget_stream(idx, slot, 0);
		kvp_cat_w_rank_drop(&idx->cat, slot);
		memset(&idx->rank[slot], 0, sizeof(idx->rank[slot]));
	}
	kvp_idx_index_waiting(idx);
	return idx->lost_cnt;
}

/* -- listeners -- */

int kvp_idx_notes_load(struct kvp_idx *idx)
{
	uint64_t cnt = 0;
	for (uint32_t i = 0; idx->memo && i < idx->memo->rank_max; i++)
		cnt += kvp_memo_cnt(idx->memo, i);
	if (!cnt)
		return KVP_OK;
	idx->note = malloc(cnt * sizeof(*idx->note));
	idx->note_first = malloc((idx->memo->rank_max + 1ull) * sizeof(*idx->note_first));
	if (!idx->note || !idx->note_first) {
		kvp_idx_notes_free(idx);
		return KVP_ERR_SYS;
	}
	kvp_memo_get_all(idx->memo, idx->note, idx->note_first);
	return KVP_OK;
}

void kvp_idx_notes_free(struct kvp_idx *idx)
{
	free(idx->note);
	free(idx->note_first);
	idx->note = NULL;
	idx->note_first = NULL;
}

static int same_text(const char *a, const char *b)
{
	return a == b || (a && b && strcmp(a, b) == 0);
}

static int replace_text(char **at, const char *s)
{
	char *copy = s ? strdup(s) : NULL;
	if (s && !copy)
		return KVP_ERR_SYS;
	free(*at);
	*at = copy;
	return KVP_OK;
}

static int listener_start(struct kvp_idx *idx, uint32_t rank_slot, enum kvp_idx_resume how)
{
	struct kvp_idx_rank *r = &idx->rank[rank_slot];
	const struct kvp_idx_worker *w = &idx->worker[r->worker_idx];
	struct kvp_part_fixed fixed;
	int rc = kvp_cat_part_get(&idx->cat.cat, r->part, &fixed);
	if (rc)
		return rc;
	struct kvp_idx_listen spec = {.listener = ++idx->next_listener,
		.worker_id = r->worker_id,
		.rank_slot = rank_slot,
		.dp_rank = r->dp_rank,
		.start_rank = w->start_rank,
		.rank_cnt = w->rank_cnt,
		.block_size = fixed.block_size,
		.event = r->event,
		.replay = r->replay,
		.applied_seq = KVP_MARK_UNSET,
		.live_seq = KVP_MARK_UNSET,
		.fetch = how == KVP_IDX_FRESH ? KVP_ZMQ_FETCH_ON_GAP : KVP_ZMQ_FETCH_AT_ONCE};
	if (how == KVP_IDX_RESUME && idx->mark)
		kvp_mark_get(idx->mark, rank_slot, r->rank_gen, &spec.applied_seq, &spec.live_seq);
	if (how == KVP_IDX_RESUME && idx->note) {
		spec.note = idx->note + idx->note_first[rank_slot];
		spec.note_cnt = (uint32_t)(idx->note_first[rank_slot + 1] - idx->note_first[rank_slot]);
	}
	if (idx->listeners)
		rc = kvp_idx_listen_start(idx->listeners, &spec);
	if (!rc)
		r->listener = spec.listener;
	return rc;
}

int kvp_idx_rank_listen(struct kvp_idx *idx, uint32_t rank_slot, const char *event, const char *replay,
	enum kvp_idx_resume how)
{
	struct kvp_idx_rank *r = &idx->rank[rank_slot];
	const struct kvp_idx_worker *w = &idx->worker[r->worker_idx];
	if (r->listener && same_text(r->event, event)) {
		if (idx->listeners)
			kvp_idx_listen_ranks(
				idx->listeners, rank_slot, r->listener, w->start_rank, w->rank_cnt);
		if (same_text(r->replay, replay))
			return KVP_OK;
		int rc = replace_text(&r->replay, replay);
		if (!rc && idx->listeners)
			kvp_idx_listen_replay(idx->listeners, rank_slot, r->listener, replay);
		return rc;
	}
	if (r->listener) {
		listener_drop(idx, rank_slot);
		kvp_idx_rank_purge(idx, rank_slot);
		epoch_next(idx);
		r->epoch = idx->epoch;
	}
	if (!event)
		return KVP_OK;
	int rc = replace_text(&r->event, event);
	if (!rc)
		rc = replace_text(&r->replay, replay);
	return rc ? rc : listener_start(idx, rank_slot, how);
}

/* The listener of before is replaced, so what it has under way is refused and everything is fetched. Its mark
 * tells of events that are not in the tree: it goes before the index slot comes. */
static void index_one(struct kvp_idx *idx, uint32_t rank_slot)
{
	struct kvp_idx_rank *r = &idx->rank[rank_slot];
	struct kvp_cat_rank_info info;
	forget_stream(idx, rank_slot, r->rank_gen);
	if (kvp_cat_w_rank_index(&idx->cat, rank_slot, &info))
		return;
	KVP_POINT("indexer:index_taken");
	r->index_slot = info.index_slot;
	r->index_gen = info.index_gen;
	idx->waiting_cnt--;
	kvp_ctr_add(idx->ctr, KVP_CTR_IDX_RANK_INDEXED, 1);
	epoch_next(idx);
	r->epoch = idx->epoch;
	kvp_idx_recovery_give(idx, rank_slot);
	if (r->listener) {
		if (idx->listeners)
			kvp_idx_listen_stop(idx->listeners, rank_slot, r->listener);
		r->listener = 0;
		if (listener_start(idx, rank_slot, KVP_IDX_REFILL))
			kvp_ctr_add(idx->ctr, KVP_CTR_IDX_LISTEN_FAILED, 1);
	}
	kvp_idx_view_publish(idx, r->part);
}

void kvp_idx_index_waiting(struct kvp_idx *idx)
{
	for (uint32_t i = 0; i < idx->cat.cat.rank_max && idx->waiting_cnt &&
			     idx->cat.index_cnt < idx->cat.cat.index_max;
		i++) {
		const struct kvp_idx_rank *r = &idx->rank[i];
		if (r->rank_gen && !r->is_lost && r->index_slot == KVP_INDEX_NONE)
			index_one(idx, i);
	}
}

void kvp_idx_gauges(struct kvp_idx *idx)
{
	uint32_t schedulable = 0;
	for (uint32_t i = 0; i < kvp_cat_part_cnt(&idx->cat.cat); i++)
		schedulable += idx->part[i].cnt;
	kvp_ctr_set(idx->ctr, KVP_CTR_CAT_WORKERS, idx->cat.worker_cnt);
	kvp_ctr_set(idx->ctr, KVP_CTR_CAT_SCHEDULABLE, schedulable);
	kvp_ctr_set(idx->ctr, KVP_CTR_CAT_RANKS, idx->cat.rank_cnt);
	kvp_ctr_set(idx->ctr, KVP_CTR_CAT_INDEXED, idx->cat.index_cnt);
	kvp_ctr_set(idx->ctr, KVP_CTR_CAT_PARTS, kvp_cat_part_cnt(&idx->cat.cat));
	kvp_ctr_set(idx->ctr, KVP_CTR_IDX_RANK_LOST, idx->lost_cnt);
	kvp_ctr_set(idx->ctr, KVP_CTR_IDX_RANK_WAITING, idx->waiting_cnt);
	if (idx->routed.table)
		kvp_ctr_set(idx->ctr, KVP_CTR_ROUTED_BLOCKS,
			kvp_routed_cnt(idx->routed.table, KVP_RADIX_SLOT_ALL));
}
