/* bench/load/product.c — see product.h. A block's chained key serves as its local, sequence and engine hash:
 * equal keys mean equal prefixes for all three. */
#include "bench/load/product.h"
#include <inttypes.h>
#include <stdio.h>

#define MODEL ((struct kvp_str){"model", 5})

static struct kvp_str id_of(uint64_t number, char text[24])
{
	return (struct kvp_str){text, (size_t)snprintf(text, 24, "%" PRIu64, number)};
}

static int choose(void *ctx, uint64_t number, const uint64_t *key, uint32_t key_cnt, uint32_t prompt_tok,
	uint32_t *engine)
{
	struct kvp_product *p = ctx;
	struct kvp_select_request q;
	struct kvp_select_answer a;
	char id[24];
	kvp_select_request_init(&q);
	q.role = p->role;
	q.model = q.group = MODEL;
	q.selection_id = id_of(number, id);
	q.prompt.form = KVP_PROMPT_HASHES;
	q.prompt.block_hash = q.prompt.seq_hash = key;
	q.prompt.block_hash_cnt = q.prompt.seq_hash_cnt = key_cnt;
	q.prompt.has_isl = KVP_YES;
	q.prompt.isl_tok = prompt_tok;
	if (p->role == KVP_PART_DECODE) { /* as the Endpoint Picker asks */
		q.override.overlap_score_credit = 0;
		q.override.assume_kv_reuse = KVP_NO;
		q.override.track_prefill_tokens = KVP_NO;
	}
	if (kvp_selection_select_and_reserve(p->selection, &q, &a) != 200)
		return KVP_ERR_PROTO;
	*engine = (uint32_t)a.worker_id - 1;
	return KVP_OK;
}

static void prefilled(void *ctx, uint64_t number)
{
	struct kvp_product *p = ctx;
	char id[24];
	p->failed_cnt += kvp_selection_prefill_complete(p->selection, id_of(number, id)) != 200;
}

static void finished(void *ctx, uint64_t number)
{
	struct kvp_product *p = ctx;
	char id[24];
	p->failed_cnt += kvp_selection_free(p->selection, id_of(number, id)) != 200;
}

static void stored(void *ctx, uint32_t engine, const struct kvp_sim_req *r, uint32_t first, uint32_t cnt)
{
	struct kvp_product *p = ctx;
	const uint64_t *key = r->key + first, *parent = first ? key - 1 : NULL;
	p->failed_cnt +=
		kvp_selection_local_stored(p->selection, engine + 1ull, 0, parent, cnt, key, key) != 200;
}

static void removed(void *ctx, uint32_t engine, const uint64_t *key, uint32_t cnt)
{
	struct kvp_product *p = ctx;
	p->failed_cnt += kvp_selection_local_removed(p->selection, engine + 1ull, 0, cnt, key) != 200;
}

int kvp_product_open(
	struct kvp_product *p, const struct kvp_simulate_cfg *run, enum kvp_local_policy policy)
{
	uint64_t all_blk = (uint64_t)run->engine.block_max * run->engine_cnt;
	struct kvp_local_cfg cfg = {.policy = {policy, policy, policy},
		.rank_max = run->engine_cnt,
		.reservation_max = 65536,
		.block_max = 2 * all_blk,
		.active_block_max = 4u << 20,
		.seed = run->seed};
	*p = (struct kvp_product){.selection = kvp_selection_open_local(&cfg),
		.chooser = {p, choose, prefilled, finished, stored, removed},
		.role = run->role};
	for (uint32_t i = 0; p->selection && i < run->engine_cnt; i++) {
		struct kvp_local_worker w = {.worker_id = i + 1ull,
			.model = MODEL,
			.group = MODEL,
			.role = run->role,
			.endpoint = {"http://engine", 13},
			.block_size = run->engine.block_size_tok,
			.size = 1,
			.total_kv_blocks = run->engine.block_max};
		if (kvp_selection_local_worker(p->selection, &w) != 201) {
			kvp_product_close(p);
			return KVP_ERR_SYS;
		}
	}
	return p->selection ? KVP_OK : KVP_ERR_SYS;
}

void kvp_product_close(struct kvp_product *p)
{
	kvp_selection_close(p->selection);
	p->selection = NULL;
}
