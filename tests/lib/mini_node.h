/* tests/lib/mini_node.h — a whole region in one process: what the indexer does, by direct calls.
 *
 * For unit tests of the selection flow: create, add workers, store blocks, then select through kvp_selection.
 */
#ifndef KVP_MINI_NODE_H
#define KVP_MINI_NODE_H

#include "daemons/common/select.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define MINI_RANK_MAX 1024

struct mini_node {
	struct kvp_region r;
	struct kvp_cat_writer w;
	struct kvp_radix_w *tree;
	struct kvp_geom geom;
	int fd;
	void *priv;
	uint32_t part;
	struct kvp_rank_view view[MINI_RANK_MAX];
	uint32_t view_cnt, worker_cnt;
};

static inline int mini_open(struct mini_node *n)
{
	memset(n, 0, sizeof(*n));
	n->geom = (struct kvp_geom){.slot_max = 8,
		.rank_max = MINI_RANK_MAX,
		.index_rank_max = 1024,
		.resv_max = 4096,
		.block_max = 100000,
		.active_block_max = 65536,
		.queued_max = 16,
		.part_max = 4};
	int rc = kvp_region_geom(&n->geom);
	rc = rc ? rc : kvp_region_create(&n->geom, &n->fd);
	rc = rc ? rc : kvp_region_join(n->fd, KVP_REGION_INDEXER, &n->r);
	rc = rc ? rc : kvp_cat_w_open(&n->r.cat, &n->w);
	if (rc)
		return rc;
	uint64_t bytes = kvp_radix_priv_footprint(&n->geom);
	n->priv =
		mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	rc = kvp_radix_priv_new(n->priv, &n->geom);
	void *pub = NULL;
	for (uint32_t i = 0; i < n->r.super->dir_cnt; i++)
		if (strcmp(n->r.super->dir[i].name, "radix") == 0)
			pub = n->r.base + n->r.super->dir[i].off;
	rc = rc ? rc : kvp_radix_w_open(pub, n->priv, &n->geom, KVP_RADIX_RESET, NULL, &n->tree, NULL);
	if (!rc)
		kvp_radix_w_set_ready(n->tree, 1);
	return rc ? rc
		  : kvp_cat_w_part(&n->w, KVP_PART_AGGREGATED, "default", 7, "default", 7, 4, 0, &n->part);
}

/* mini_worker registers worker id with ranks 0..ranks-1 and publishes the view; ids must ascend. */
static inline int mini_worker(struct mini_node *n, uint64_t id, uint32_t ranks, uint64_t total_kv_blocks)
{
	uint32_t idx;
	struct kvp_cat_worker_info info = {.worker_id = id,
		.part = n->part,
		.role = KVP_PART_AGGREGATED,
		.lifecycle = KVP_LIFE_SCHEDULABLE,
		.size = ranks};
	info.endpoint_len = (uint32_t)snprintf(
		info.endpoint, sizeof(info.endpoint), "http://w%llu:8000", (unsigned long long)id);
	info.model_len = (uint32_t)snprintf(info.model, sizeof(info.model), "default");
	info.group_len = (uint32_t)snprintf(info.group, sizeof(info.group), "default");
	int rc = kvp_cat_w_worker_slot(&n->w, id, &idx);
	rc = rc ? rc : kvp_cat_w_worker_put(&n->w, idx, &info, "{}", 2);
	for (uint32_t k = 0; k < ranks && !rc; k++) {
		struct kvp_cat_rank_info ri;
		rc = kvp_cat_w_rank_take(&n->w, id, k, n->part, idx, &ri);
		rc = rc ? rc : kvp_rank_open(&n->r.book, ri.rank_slot, ri.rank_gen);
		n->view[n->view_cnt++] = (struct kvp_rank_view){.worker_id = id,
			.dp_rank = k,
			.rank_slot = ri.rank_slot,
			.rank_gen = ri.rank_gen,
			.index_slot = ri.index_slot,
			.index_gen = ri.index_gen,
			.worker_idx = idx,
			.total_kv_blocks = total_kv_blocks};
	}
	n->worker_cnt++;
	return rc ? rc : kvp_cat_w_view(&n->w, n->part, n->view, n->view_cnt, NULL, 0, n->worker_cnt);
}

/* mini_store: rank `v` of the view holds the first n blocks of a token prompt (block size 4). */
static inline int mini_store(struct mini_node *n, uint32_t v, const uint32_t *tok, uint32_t blocks)
{
	uint64_t local[1024], ext[1024];
	struct kvp_part_fixed part;
	struct kvp_hasher h;
	kvp_cat_part_get(&n->r.cat, n->part, &part);
	kvp_hasher_init(&h, tok, blocks * 4, 4, KVP_HASH_WINDOW_PLAIN, kvp_hash_seed(NULL, 0, NULL, 0));
	kvp_hasher_local(&h, 0, blocks, local);
	kvp_hash_chain(NULL, local, blocks, ext);
	return kvp_radix_store(
		n->tree, n->view[v].index_slot, part.key_salt, KVP_RADIX_ROOT, 0, blocks, local, ext, NULL);
}

static inline void mini_close(struct mini_node *n)
{
	kvp_radix_w_close(n->tree);
	kvp_cat_w_close(&n->w);
	munmap(n->priv, kvp_radix_priv_footprint(&n->geom));
	kvp_region_leave(&n->r);
	close(n->fd);
}
#endif
