/* A whole node inside one process: private region, catalogue and tree written by direct calls. */
#include "daemons/common/select_priv.h"
#include "shm/routed.h"
#include <kvpick/clock.h>

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define LOCAL_OWNER KVP_OWNER(1, 1)

struct local_rank {
	struct kvp_rank_view view;
	uint64_t *taint; /* view.taint_cnt hashes, ascending */
	uint32_t part;
};

struct kvp_sel_local {
	struct kvp_region region;
	struct kvp_ctr_column_shm column;
	struct kvp_cat_writer cat;
	struct kvp_radix_w *tree;
	struct kvp_radix_w *predicted; /* tree of what bookings tell, NULL without */
	struct kvp_routed *routed;
	struct kvp_geom geom;
	void *priv[2]; /* second segments of tree and predicted */
	uint64_t priv_bytes[2];
	struct local_rank *rank; /* sorted by (worker_id, dp_rank) */
	struct kvp_rank_view *scratch;
	struct kvp_scratch scratch_taint;
	uint32_t rank_cnt;
	struct kvp_policy policy;
	struct kvp_policy_profile profile;
	char *no_model;
};

static uint64_t either(uint64_t given, uint64_t otherwise)
{
	return given ? given : otherwise;
}

/* The writer of a tree of the region, which is new. */
static int open_tree(struct kvp_sel_local *l, int i, const struct kvp_geom *g, const struct kvp_radix *r,
	struct kvp_radix_w **out)
{
	l->priv_bytes[i] = kvp_radix_priv_footprint(g);
	void *priv = mmap(NULL, l->priv_bytes[i], PROT_READ | PROT_WRITE,
		MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (priv == MAP_FAILED)
		return KVP_ERR_SYS;
	l->priv[i] = priv;
	int rc = kvp_radix_priv_new(priv, g);
	/* Mapped writable here; the reader's handle only says so by its type. */
	void *pub = (void *)(uintptr_t)r->base;
	rc = rc ? rc : kvp_radix_w_open(pub, priv, g, KVP_RADIX_RESET, i ? NULL : &l->column, out, NULL);
	if (!rc)
		kvp_radix_w_set_ready(*out, 1);
	return rc;
}

static int open_predicted(struct kvp_sel_local *l, const struct kvp_geom *g, uint64_t ttl_ns)
{
	struct kvp_routed_cfg cfg = {.ttl_ns = ttl_ns,
		.entry_max = g->block_max,
		.slot_max = g->index_rank_max,
		.salt = g->salt[0],
		.ctr = &l->column};
	int rc = open_tree(l, 1, g, &l->region.predicted, &l->predicted);
	return rc ? rc : kvp_routed_open(l->predicted, &cfg, &l->routed);
}

static int open_objects(struct kvp_sel_local *l, const struct kvp_local_cfg *cfg)
{
	int fd = -1;
	l->geom = (struct kvp_geom){.slot_max = 8,
		.rank_max = (uint32_t)either(cfg->rank_max, 64),
		.index_rank_max = (uint32_t)either(cfg->rank_max, 64),
		.resv_max = (uint32_t)either(cfg->reservation_max, 4096),
		.block_max = either(cfg->block_max, 100000),
		.predicted_max = cfg->predicted_ttl_ns ? either(cfg->block_max, 100000) : 0,
		.active_block_max = either(cfg->active_block_max, 65536),
		.queued_max = 1024,
		.part_max = 16,
		.affinity_max = cfg->session_ttl_ns ? KVP_AFFINITY_PART_MAX : 0,
		.affinity_ttl_ns = cfg->session_ttl_ns,
		.affinity_hold_ns = UINT64_MAX / 4, /* bookings here end by call only */
		.pending_max = 4096,
		.pending_bytes = 256u << 20,
		.pending_ttl_ns = 120ull * 1000000000};
	if (l->geom.index_rank_max > 4096)
		l->geom.index_rank_max = 4096;
	int rc = kvp_region_geom(&l->geom);
	rc = rc ? rc : kvp_region_create(&l->geom, &fd);
	rc = rc ? rc : kvp_region_join(fd, KVP_REGION_INDEXER, &l->region);
	if (rc)
		return rc;
	rc = kvp_cat_w_open(&l->region.cat, &l->cat);
	rc = rc ? rc : open_tree(l, 0, &l->geom, &l->region.radix, &l->tree);
	struct kvp_geom predicted;
	if (!rc && kvp_region_predicted_geom(&l->geom, &predicted))
		rc = open_predicted(l, &predicted, cfg->predicted_ttl_ns);
	if (rc)
		return rc;
	l->rank = calloc(l->geom.rank_max, sizeof(*l->rank));
	l->scratch = calloc(l->geom.rank_max, sizeof(*l->scratch));
	return l->rank && l->scratch ? KVP_OK : KVP_ERR_SYS;
}

void kvp_sel_local_close(struct kvp_sel_local *l)
{
	if (!l)
		return;
	kvp_routed_close(l->routed);
	kvp_radix_w_close(l->predicted);
	kvp_radix_w_close(l->tree);
	if (l->cat.rank_used)
		kvp_cat_w_close(&l->cat);
	for (int i = 0; i < 2; i++)
		if (l->priv[i])
			munmap(l->priv[i], l->priv_bytes[i]);
	int fd = l->region.fd;
	for (uint32_t i = 0; i < l->rank_cnt; i++)
		free(l->rank[i].taint);
	free(l->scratch_taint.ptr);
	if (l->region.base) {
		kvp_region_leave(&l->region);
		close(fd);
	}
	free(l->rank);
	free(l->scratch);
	free(l);
}

void kvp_sel_local_routed(
	struct kvp_sel_local *l, const struct kvp_sel_rank *r, uint32_t n, const uint64_t *local_hash)
{
	struct kvp_part_fixed part;
	for (uint32_t i = 0; i < l->rank_cnt; i++)
		if (l->rank[i].view.rank_slot == r->rank_slot &&
			kvp_cat_part_get(&l->region.cat, l->rank[i].part, &part) == KVP_OK)
			kvp_routed_record(l->routed, r->index_slot, part.key_salt, n, local_hash, 0,
				kvp_clock_mono_ns());
}

void kvp_sel_local_age(struct kvp_sel_local *l)
{
	uint64_t now_ns = kvp_clock_mono_ns();
	while (l->routed && kvp_routed_tend(l->routed, now_ns, UINT32_MAX))
		;
}

static enum kvp_order order_of(enum kvp_local_queue q)
{
	return q == KVP_LOCAL_WSPT ? KVP_ORDER_WSPT : q == KVP_LOCAL_LCFS ? KVP_ORDER_LCFS : KVP_ORDER_FCFS;
}

struct kvp_selection *kvp_selection_open_local(const struct kvp_local_cfg *cfg)
{
	struct kvp_select_settings set;
	struct kvp_sel_local *l = aligned_alloc(_Alignof(struct kvp_sel_local), sizeof(*l));
	if (!l)
		return NULL;
	memset(l, 0, sizeof(*l));
	kvp_select_defaults(&set);
	if (cfg->queue != KVP_LOCAL_NO_QUEUE) {
		kvp_policy_single(&l->profile, order_of(cfg->queue), cfg->queue_threshold);
		l->policy = (struct kvp_policy){
			.profile_cnt = 1, .profile = &l->profile, .model = &l->no_model};
		set.policy = &l->policy;
	}
	for (int role = 0; role < KVP_PART_ROLE_CNT; role++)
		set.score_policy[role] = cfg->policy[role] == KVP_LOCAL_LEAST_WORK ? KVP_SCORE_LEAST_WORK
										   : KVP_SCORE_REFERENCE;
	set.records_routing = cfg->predicted_ttl_ns ? KVP_YES : KVP_NO;
	struct kvp_selection *s = NULL;
	if (open_objects(l, cfg) == KVP_OK)
		s = kvp_select_open(&l->region, LOCAL_OWNER, &l->column, &set);
	if (!s) {
		kvp_sel_local_close(l);
		return NULL;
	}
	s->local = l;
	if (cfg->seed)
		kvp_select_seed(s, cfg->seed);
	return s;
}

static struct local_rank *find_rank(struct kvp_sel_local *l, uint64_t worker_id, uint32_t dp_rank)
{
	for (uint32_t i = 0; i < l->rank_cnt; i++)
		if (l->rank[i].view.worker_id == worker_id && l->rank[i].view.dp_rank == dp_rank)
			return &l->rank[i];
	return NULL;
}

/* publish rebuilds the view of one partition. */
static int publish(struct kvp_sel_local *l, uint32_t part)
{
	uint32_t cnt = 0, workers = 0, taints = 0;
	uint64_t last = 0;
	for (uint32_t i = 0; i < l->rank_cnt; i++)
		taints += l->rank[i].view.taint_cnt;
	uint64_t *taint = kvp_sel_scratch(&l->scratch_taint, taints, sizeof(*taint));
	if (!taint)
		return KVP_ERR_SYS;
	taints = 0;
	for (uint32_t i = 0; i < l->rank_cnt; i++) {
		struct kvp_rank_view *v = &l->scratch[cnt];
		if (l->rank[i].part != part)
			continue;
		workers += cnt == 0 || l->rank[i].view.worker_id != last;
		*v = l->rank[i].view;
		last = v->worker_id;
		v->taint_off = taints;
		if (v->taint_cnt)
			memcpy(taint + taints, l->rank[i].taint, v->taint_cnt * sizeof(*taint));
		taints += v->taint_cnt;
		cnt++;
	}
	return kvp_cat_w_view(&l->cat, part, l->scratch, cnt, taint, taints, workers);
}

/* drop_ranks takes a worker's ranks out, but for cnt from keep on: of the view first, then their bookings,
 * blocks and slots. */
static void drop_ranks(struct kvp_sel_local *l, uint64_t worker_id, uint32_t keep, uint32_t cnt)
{
	struct local_rank gone;
	for (uint32_t i = 0; i < l->rank_cnt;) {
		const struct kvp_rank_view *v = &l->rank[i].view;
		if (v->worker_id != worker_id || (v->dp_rank >= keep && v->dp_rank - keep < cnt)) {
			i++;
			continue;
		}
		gone = l->rank[i];
		memmove(&l->rank[i], &l->rank[i + 1], (--l->rank_cnt - i) * sizeof(*l->rank));
		publish(l, gone.part);
		kvp_rank_close(&l->region.book, gone.view.rank_slot, gone.view.rank_gen);
		if (gone.view.index_slot != KVP_INDEX_NONE) {
			kvp_radix_clear(l->tree, gone.view.index_slot);
			if (l->routed) {
				kvp_routed_forget(l->routed, gone.view.index_slot);
				kvp_radix_clear(l->predicted, gone.view.index_slot);
			}
		}
		kvp_cat_w_rank_drop(&l->cat, gone.view.rank_slot);
		free(gone.taint);
	}
}

static int by_value(const void *a, const void *b)
{
	uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
	return (x > y) - (x < y);
}

/* describe sets what may change while a rank stays. */
static int describe(struct local_rank *r, const struct kvp_local_worker *w)
{
	uint64_t *taint = malloc((w->taint_cnt + 1ull) * sizeof(*taint));
	if (!taint)
		return KVP_ERR_SYS;
	for (uint32_t i = 0; i < w->taint_cnt; i++)
		taint[i] = kvp_hash_taint(w->taint[i].ptr, w->taint[i].len);
	qsort(taint, w->taint_cnt, sizeof(*taint), by_value);
	free(r->taint);
	r->taint = taint;
	r->view.taint_cnt = w->taint_cnt;
	r->view.max_num_batched_tokens = w->max_num_batched_tokens;
	r->view.total_kv_blocks = w->total_kv_blocks;
	return KVP_OK;
}

static int add_rank(struct kvp_sel_local *l, const struct kvp_local_worker *w, uint32_t dp_rank,
	uint32_t part, uint32_t worker_idx)
{
	struct kvp_cat_rank_info r;
	uint32_t at = 0;
	if (l->rank_cnt == l->geom.rank_max)
		return KVP_ERR_FULL;
	int rc = kvp_cat_w_rank_take(&l->cat, w->worker_id, dp_rank, part, worker_idx, &r);
	rc = rc ? rc : kvp_rank_open(&l->region.book, r.rank_slot, r.rank_gen);
	if (rc)
		return rc;
	while (at < l->rank_cnt &&
		(l->rank[at].view.worker_id < w->worker_id ||
			(l->rank[at].view.worker_id == w->worker_id && l->rank[at].view.dp_rank < dp_rank)))
		at++;
	memmove(&l->rank[at + 1], &l->rank[at], (l->rank_cnt++ - at) * sizeof(*l->rank));
	l->rank[at] = (struct local_rank){.part = part,
		.view = {.worker_id = w->worker_id,
			.dp_rank = dp_rank,
			.rank_slot = r.rank_slot,
			.rank_gen = r.rank_gen,
			.index_slot = r.index_slot,
			.index_gen = r.index_gen,
			.worker_idx = worker_idx}};
	return describe(&l->rank[at], w);
}

static int fill_info(struct kvp_cat_worker_info *info, const struct kvp_local_worker *w, uint32_t part)
{
	if (w->endpoint.len > KVP_CAT_NAME_MAX || w->model.len > KVP_CAT_NAME_MAX ||
		w->group.len > KVP_CAT_NAME_MAX)
		return KVP_ERR_LIMIT;
	memset(info, 0, sizeof(*info));
	info->worker_id = w->worker_id;
	info->part = part;
	info->role = w->role;
	info->lifecycle = KVP_LIFE_SCHEDULABLE;
	info->start_rank = w->start_rank;
	info->size = w->size;
	info->endpoint_len = (uint32_t)w->endpoint.len;
	info->model_len = (uint32_t)w->model.len;
	info->group_len = (uint32_t)w->group.len;
	memcpy(info->endpoint, w->endpoint.ptr, w->endpoint.len);
	memcpy(info->model, w->model.ptr, w->model.len);
	memcpy(info->group, w->group.ptr, w->group.len);
	return KVP_OK;
}

/* check_worker finds or makes the partition and fills the record: 0, 400 or 409. */
static int check_worker(struct kvp_selection *s, const struct kvp_local_worker *w,
	struct kvp_cat_worker_info *info)
{
	struct kvp_sel_local *l = s->local;
	uint32_t part;
	if (!l || !w->endpoint.len || !w->model.len || !w->group.len || !w->block_size || !w->size)
		return kvp_sel_fail(s, 400, "endpoint, model, group, block_size and size are required");
	int rc = kvp_cat_w_part(&l->cat, w->role, w->model.ptr, (uint32_t)w->model.len, w->group.ptr,
		(uint32_t)w->group.len, w->block_size, w->is_eagle == KVP_YES, &part);
	if (rc == KVP_ERR_EXISTS)
		return kvp_sel_fail(s, 409, "block_size or is_eagle differs from that of the partition");
	rc = rc ? rc : fill_info(info, w, part);
	return rc ? kvp_sel_fail(s, 400, "worker cannot be registered: %s", kvp_strerror(rc)) : 0;
}

/* put_worker publishes record and ranks; those that are there already stay. */
static int put_worker(struct kvp_sel_local *l, const struct kvp_local_worker *w,
	const struct kvp_cat_worker_info *info)
{
	uint32_t idx;
	int rc = kvp_cat_w_worker_slot(&l->cat, w->worker_id, &idx);
	rc = rc ? rc : kvp_cat_w_worker_put(&l->cat, idx, info, "{}", 2);
	for (uint32_t k = 0; k < w->size && rc == KVP_OK; k++) {
		struct local_rank *r = find_rank(l, w->worker_id, w->start_rank + k);
		rc = r ? describe(r, w) : add_rank(l, w, w->start_rank + k, info->part, idx);
	}
	int published = publish(l, info->part);
	return rc ? rc : published;
}

int kvp_selection_local_worker(struct kvp_selection *s, const struct kvp_local_worker *w)
{
	struct kvp_sel_local *l = s->local;
	struct kvp_cat_worker_info info;
	int status = check_worker(s, w, &info);
	if (status)
		return status;
	drop_ranks(l, w->worker_id, 0, 0);
	int rc = put_worker(l, w, &info);
	if (rc)
		drop_ranks(l, w->worker_id, 0, 0);
	kvp_sel_drain_all(s);
	return rc ? kvp_sel_fail(s, 503, "worker cannot be registered: %s", kvp_strerror(rc)) : 201;
}

int kvp_selection_local_worker_update(struct kvp_selection *s, const struct kvp_local_worker *w)
{
	struct kvp_sel_local *l = s->local;
	struct kvp_cat_worker_info old, info;
	uint32_t idx;
	if (!l || kvp_cat_worker_find(&l->region.cat, w->worker_id, &idx) != KVP_OK ||
		kvp_cat_worker_info(&l->region.cat, idx, &old) != KVP_OK)
		return kvp_sel_fail(s, 404, "worker %llu not found", (unsigned long long)w->worker_id);
	int status = check_worker(s, w, &info);
	if (status)
		return status;
	if (info.part != old.part)
		return kvp_sel_fail(s, 409, "model, group or role differs: register the worker anew");
	drop_ranks(l, w->worker_id, w->start_rank, w->size);
	int rc = put_worker(l, w, &info);
	kvp_sel_drain_all(s);
	return rc ? kvp_sel_fail(s, 503, "a rank cannot be registered: %s", kvp_strerror(rc)) : 200;
}

int kvp_selection_local_worker_gone(struct kvp_selection *s, uint64_t worker_id)
{
	struct kvp_sel_local *l = s->local;
	uint32_t idx;
	if (!l || kvp_cat_worker_find(&l->region.cat, worker_id, &idx) != KVP_OK)
		return kvp_sel_fail(s, 404, "worker %llu not found", (unsigned long long)worker_id);
	drop_ranks(l, worker_id, 0, 0);
	kvp_cat_w_worker_drop(&l->cat, idx);
	kvp_sel_drain_all(s);
	return 200;
}

_Static_assert((int)KVP_CACHE_DEVICE == KVP_RADIX_DEVICE && (int)KVP_CACHE_HOST == KVP_RADIX_HOST &&
		       (int)KVP_CACHE_DISK == KVP_RADIX_DISK && (int)KVP_CACHE_EXTERNAL == KVP_RADIX_EXTERNAL,
	"tiers of the interface are the tree's");

int kvp_selection_local_stored_in(struct kvp_selection *s, enum kvp_cache_tier tier, uint64_t worker_id,
	uint32_t dp_rank, const uint64_t *parent, uint32_t cnt, const uint64_t *local_hash,
	const uint64_t *block_hash)
{
	struct kvp_part_fixed part;
	struct local_rank *r = s->local ? find_rank(s->local, worker_id, dp_rank) : NULL;
	if (!r || r->view.index_slot == KVP_INDEX_NONE ||
		kvp_cat_part_get(&s->local->region.cat, r->part, &part) != KVP_OK)
		return kvp_sel_fail(s, 404, "rank is not registered or not indexed");
	int rc = kvp_radix_store_tier(s->local->tree, r->view.index_slot, (enum kvp_radix_tier)tier,
		part.key_salt, parent ? KVP_RADIX_CHILD : KVP_RADIX_ROOT, parent ? *parent : 0, cnt,
		local_hash, block_hash, NULL);
	if (rc == KVP_OK)
		return 200;
	return kvp_sel_fail(s, rc == KVP_ERR_FULL ? 503 : 400, "blocks not stored: %s", kvp_strerror(rc));
}

int kvp_selection_local_removed_in(struct kvp_selection *s, enum kvp_cache_tier tier, uint64_t worker_id,
	uint32_t dp_rank, uint32_t cnt, const uint64_t *block_hash)
{
	struct local_rank *r = s->local ? find_rank(s->local, worker_id, dp_rank) : NULL;
	if (!r || r->view.index_slot == KVP_INDEX_NONE)
		return kvp_sel_fail(s, 404, "rank is not registered or not indexed");
	kvp_radix_remove_tier(
		s->local->tree, r->view.index_slot, (enum kvp_radix_tier)tier, cnt, block_hash, NULL);
	return 200;
}

int kvp_selection_local_stored(struct kvp_selection *s, uint64_t worker_id, uint32_t dp_rank,
	const uint64_t *parent, uint32_t cnt, const uint64_t *local_hash, const uint64_t *block_hash)
{
	return kvp_selection_local_stored_in(
		s, KVP_CACHE_DEVICE, worker_id, dp_rank, parent, cnt, local_hash, block_hash);
}

int kvp_selection_local_removed(struct kvp_selection *s, uint64_t worker_id, uint32_t dp_rank, uint32_t cnt,
	const uint64_t *block_hash)
{
	return kvp_selection_local_removed_in(s, KVP_CACHE_DEVICE, worker_id, dp_rank, cnt, block_hash);
}

int kvp_selection_local_cleared(struct kvp_selection *s, uint64_t worker_id, uint32_t dp_rank)
{
	struct local_rank *r = s->local ? find_rank(s->local, worker_id, dp_rank) : NULL;
	if (!r || r->view.index_slot == KVP_INDEX_NONE)
		return kvp_sel_fail(s, 404, "rank is not registered or not indexed");
	kvp_radix_clear(s->local->tree, r->view.index_slot);
	return 200;
}
