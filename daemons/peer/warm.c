/* daemons/peer/warm.c — rows of a peer's loads, and the bookings that stand for them. */
#include "daemons/peer/warm.h"

#include <inttypes.h>
#include <kvpick/hash.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ipc/json_in.h"

#define DEPTH_MAX 16
#define ID_BYTES 96
#define BLK_MAX (1u << 20) /* of a row */

struct row {
	char *model, *group; /* one allocation, model first */
	uint32_t model_len, group_len;
	uint64_t worker_id, tok, blk, since_ns;
	uint32_t dp_rank, made; /* bit i: slice i has been booked and not ended */
	uint32_t is_tried;	/* slices were booked, once */
};

struct kvp_warm {
	struct kvp_mirror *m;
	struct kvp_json *json;
	struct row *row;
	uint32_t cnt, cap;
	uint64_t serial; /* in ids and hashes: no two the same */
	uint64_t *seq;	 /* BLK_MAX / KVP_WARM_SLICES + 1 */
};

struct kvp_warm *kvp_warm_open(struct kvp_mirror *m)
{
	struct kvp_warm *w = calloc(1, sizeof(*w));
	if (!w)
		return NULL;
	w->m = m;
	w->json = kvp_json_new();
	w->seq = malloc((BLK_MAX / KVP_WARM_SLICES + 1) * sizeof(*w->seq));
	w->serial = m->router_id;
	if (w->json && w->seq)
		return w;
	kvp_warm_close(w);
	return NULL;
}

/* ---- slices ---- */

/* Share i of n in KVP_WARM_SLICES parts: they sum up to n, which may be any number. */
static uint64_t share(uint64_t n, uint32_t i)
{
	uint64_t rest = n % KVP_WARM_SLICES;
	return n / KVP_WARM_SLICES + rest * (i + 1) / KVP_WARM_SLICES - rest * i / KVP_WARM_SLICES;
}

static enum kvp_mirror_result tell(
	struct kvp_warm *w, const struct row *r, uint32_t i, enum kvp_replica_kind kind, uint64_t now_ns)
{
	char id[ID_BYTES];
	uint32_t part;
	struct kvp_part_fixed fixed;
	const struct kvp_cat *cat = &w->m->region->cat;
	if (kvp_cat_part_find(
		    cat, KVP_PART_AGGREGATED, r->model, r->model_len, r->group, r->group_len, &part) ||
		kvp_cat_part_get(cat, part, &fixed))
		return KVP_MIRROR_NO_PARTITION;
	int len = snprintf(id, sizeof(id), "~warm-up/%016" PRIx64 "/%" PRIu64 "/%u/%u", w->m->router_id,
		r->worker_id, r->dp_rank, i);
	struct kvp_replica_event e = {.model = {r->model, r->model_len},
		.group = {r->group, r->group_len},
		.id = {id, (size_t)len},
		.worker_id = r->worker_id,
		.dp_rank = r->dp_rank,
		.router_id = w->m->router_id + 1 ? w->m->router_id + 1 : 1, /* anybody's but ours */
		.block_size = fixed.block_size,
		.kind = kind,
		.seq = w->seq,
		.track_prefill = 1,
		.has_hint = 1,
		.hint_tok = share(r->tok, i)};
	e.seq_cnt = kind == KVP_REPLICA_ADD ? (uint32_t)share(r->blk, i) : 0;
	for (uint32_t k = 0; k < e.seq_cnt; k++) {
		w->serial += 0x9e3779b97f4a7c15ull;
		w->seq[k] = kvp_hash_bytes(&w->serial, sizeof(w->serial), 0);
	}
	return kvp_mirror_apply(w->m, KVP_PART_AGGREGATED, &e, now_ns);
}

static void slice_end(struct kvp_warm *w, struct row *r, uint32_t i, uint64_t now_ns)
{
	r->made &= ~(1u << i);
	tell(w, r, i, KVP_REPLICA_FREE, now_ns);
}

/* What the rank bears beside the slices. */
static void others(const struct kvp_warm *w, const struct row *r, uint64_t *tok, uint64_t *blk)
{
	const struct kvp_region *g = w->m->region;
	struct kvp_cat_view v;
	struct kvp_load l = {0};
	uint32_t part;
	uint64_t mine_tok = 0, mine_blk = 0;
	*tok = *blk = 0;
	if (kvp_cat_part_find(
		    &g->cat, KVP_PART_AGGREGATED, r->model, r->model_len, r->group, r->group_len, &part) ||
		kvp_cat_view_begin(&g->cat, part, &v))
		return;
	int rc = KVP_ERR_AGAIN;
	for (int t = 0; rc && t < KVP_CAT_RETRY_MAX; t++) {
		l = (struct kvp_load){0};
		for (uint32_t i = 0; i < v.cnt; i++)
			if (kvp_ld_rlx_u64(&v.rank[i].worker_id) == r->worker_id &&
				kvp_ld_rlx_u32(&v.rank[i].dp_rank) == r->dp_rank)
				kvp_load_read(&g->book, kvp_ld_rlx_u32(&v.rank[i].rank_slot), &l);
		rc = kvp_cat_view_valid(&g->cat, &v);
		if (rc && kvp_cat_view_begin(&g->cat, part, &v))
			return;
	}
	for (uint32_t i = 0; i < KVP_WARM_SLICES; i++)
		if (r->made >> i & 1) {
			mine_tok += share(r->tok, i);
			mine_blk += share(r->blk, i);
		}
	uint64_t all_blk = kvp_load_blocks(&l);
	*tok = l.prefill_tok > mine_tok ? l.prefill_tok - mine_tok : 0;
	*blk = all_blk > mine_blk ? all_blk - mine_blk : 0;
}

/* Slices that make up for what `have` lacks of the floor of `whole` that is left. */
static uint32_t slices_for(uint64_t whole, uint64_t have, uint64_t left_ns)
{
	double floor_now = (double)whole * (double)left_ns / (double)KVP_WARM_NS;
	double lack = floor_now - (double)have;
	if (!whole || lack <= 0)
		return 0;
	double n = lack * KVP_WARM_SLICES / (double)whole;
	return (uint32_t)n + ((double)(uint32_t)n < n);
}

/* 0 = nothing is left of the row, and nothing can come. */
static int tend_row(struct kvp_warm *w, struct row *r, uint64_t now_ns)
{
	uint64_t age = now_ns - r->since_ns, tok, blk;
	uint64_t left = age < KVP_WARM_NS ? KVP_WARM_NS - age : 0;
	others(w, r, &tok, &blk);
	uint32_t by_tok = slices_for(r->tok, tok, left), by_blk = slices_for(r->blk, blk, left);
	uint32_t want = by_tok > by_blk ? by_tok : by_blk;
	for (uint32_t i = 0; !r->is_tried && i < want; i++) {
		enum kvp_mirror_result got = tell(w, r, i, KVP_REPLICA_ADD, now_ns);
		if (got == KVP_MIRROR_NO_WORKER || got == KVP_MIRROR_NO_PARTITION)
			return left != 0; /* it may still register */
		if (got == KVP_MIRROR_ADDED)
			r->made |= 1u << i;
	}
	r->is_tried = 1; /* slices that went do not come back */
	for (uint32_t i = want; i < KVP_WARM_SLICES; i++)
		if (r->made >> i & 1)
			slice_end(w, r, i, now_ns);
	return r->made != 0;
}

uint32_t kvp_warm_tend(struct kvp_warm *w, uint64_t now_ns)
{
	uint32_t n = 0, slices = 0;
	for (uint32_t i = 0; i < w->cnt; i++) {
		struct row *r = &w->row[i];
		if (!tend_row(w, r, now_ns)) {
			free(r->model);
			continue;
		}
		slices += (uint32_t)__builtin_popcount(r->made);
		if (n != i)
			w->row[n] = *r;
		n++;
	}
	w->cnt = n;
	kvp_mirror_flush(w->m);
	return slices;
}

void kvp_warm_close(struct kvp_warm *w)
{
	if (!w)
		return;
	for (uint32_t i = 0; i < w->cnt; i++)
		free(w->row[i].model);
	kvp_json_free(w->json);
	free(w->row);
	free(w->seq);
	free(w);
}

/* ---- what a peer tells ---- */

struct place {
	const char *model, *group;
	size_t model_len, group_len;
};

static int has_row(const struct kvp_warm *w, const struct place *p, uint64_t worker_id, uint32_t dp_rank)
{
	for (uint32_t i = 0; i < w->cnt; i++) {
		const struct row *r = &w->row[i];
		if (r->worker_id == worker_id && r->dp_rank == dp_rank && r->model_len == p->model_len &&
			r->group_len == p->group_len && memcmp(r->model, p->model, p->model_len) == 0 &&
			memcmp(r->group, p->group, p->group_len) == 0)
			return 1;
	}
	return 0;
}

static int row_add(struct kvp_warm *w, const struct place *p, const struct row *from)
{
	if (w->cnt == KVP_WARM_ROWS || (!from->tok && !from->blk) ||
		has_row(w, p, from->worker_id, from->dp_rank))
		return KVP_OK;
	if (w->cnt == w->cap) {
		uint32_t cap = w->cap ? 2 * w->cap : 64;
		struct row *grown = realloc(w->row, cap * sizeof(*grown));
		if (!grown)
			return KVP_ERR_SYS;
		w->row = grown;
		w->cap = cap;
	}
	char *names = malloc(p->model_len + p->group_len + 1);
	if (!names)
		return KVP_ERR_SYS;
	memcpy(names, p->model, p->model_len);
	memcpy(names + p->model_len, p->group, p->group_len);
	struct row *r = &w->row[w->cnt++];
	*r = *from;
	r->model = names;
	r->group = names + p->model_len;
	r->model_len = (uint32_t)p->model_len;
	r->group_len = (uint32_t)p->group_len;
	r->blk = r->blk < BLK_MAX ? r->blk : BLK_MAX;
	return KVP_OK;
}

static int read_row(struct kvp_json_val v, struct row *r)
{
	struct kvp_json_val id, rank, tok, blk;
	return kvp_json_get(v, "worker_id", &id) || kvp_json_u64(id, &r->worker_id) ||
	       kvp_json_get(v, "dp_rank", &rank) || kvp_json_u32(rank, &r->dp_rank) ||
	       kvp_json_get(v, "potential_prefill_tokens", &tok) || kvp_json_u64(tok, &r->tok) ||
	       kvp_json_get(v, "potential_decode_blocks", &blk) || kvp_json_u64(blk, &r->blk);
}

enum pass { PASS_CHECK, PASS_TAKE };

static int read_part(struct kvp_warm *w, struct kvp_json_val part, enum pass pass, uint64_t now_ns)
{
	struct kvp_json_val model, group, loads;
	struct place p;
	if (kvp_json_get(part, "model_name", &model) || kvp_json_str(model, &p.model, &p.model_len) ||
		kvp_json_get(part, "routing_group", &group) || kvp_json_str(group, &p.group, &p.group_len) ||
		kvp_json_get(part, "loads", &loads) || kvp_json_type(loads) != KVP_JSON_ARR ||
		p.model_len > KVP_CAT_NAME_MAX || p.group_len > KVP_CAT_NAME_MAX)
		return KVP_ERR_PROTO;
	struct kvp_json_iter it = kvp_json_each(loads);
	int rc = KVP_OK;
	while (!rc && kvp_json_next(&it)) {
		struct row r = {.since_ns = now_ns};
		if (read_row(it.val, &r))
			rc = KVP_ERR_PROTO;
		else if (pass == PASS_TAKE)
			rc = row_add(w, &p, &r);
	}
	return rc;
}

int kvp_warm_take(struct kvp_warm *w, const char *json, size_t len, uint64_t now_ns)
{
	struct kvp_json_val root;
	struct kvp_json_err err;
	if (kvp_json_parse(w->json, json, len, DEPTH_MAX, &root, &err) || kvp_json_type(root) != KVP_JSON_ARR)
		return KVP_ERR_PROTO;
	int rc = KVP_OK;
	for (enum pass pass = PASS_CHECK; !rc && pass <= PASS_TAKE; pass++) {
		struct kvp_json_iter it = kvp_json_each(root);
		while (!rc && kvp_json_next(&it))
			rc = read_part(w, it.val, pass, now_ns);
	}
	return rc;
}
