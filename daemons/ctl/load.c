#include "daemons/ctl/ctl.h"

#include <kvpick/clock.h>
#include <stdlib.h>
#include <string.h>

struct sum {
	uint64_t prefill_tok, blocks, requests, ranks, unindexed;
};

/* sum_loads adds the loads of all rank slots in use up by worker slot. NULL without memory. */
static struct sum *sum_loads(const struct kvp_region *r)
{
	struct sum *s = calloc(kvp_cat_worker_max(&r->cat), sizeof(*s));
	for (uint32_t i = 0; s && i < r->geom.rank_max; i++) {
		struct kvp_cat_rank_info ri;
		struct kvp_load l;
		if (kvp_cat_rank_info(&r->cat, i, &ri) != KVP_OK ||
			ri.worker_idx >= kvp_cat_worker_max(&r->cat))
			continue;
		kvp_load_read(&r->book, i, &l);
		struct sum *w = &s[ri.worker_idx];
		w->prefill_tok += l.prefill_tok;
		w->blocks += kvp_load_blocks(&l);
		w->requests += l.requests;
		w->ranks++;
		w->unindexed += ri.index_slot == KVP_INDEX_NONE;
	}
	return s;
}

static int wanted(const char *want, const char *is, uint32_t len)
{
	return !want || (strlen(want) == len && memcmp(want, is, len) == 0);
}

static const char *part_role_name(enum kvp_part_role r)
{
	static const char *const name[] = {"aggregated", "prefill", "decode"};
	return (unsigned)r < 3 ? name[r] : "?";
}

static const char *life_name(enum kvp_lifecycle l)
{
	static const char *const name[] = {"incomplete", "schedulable", "draining", "unschedulable"};
	return (unsigned)l < 4 ? name[l] : "?";
}

int ctl_workers(struct ctl *c)
{
	static const char *const col[] = {"worker_id", "role", "model", "group", "lifecycle", "start_rank",
		"ranks", "in_use", "unindexed", "requests", "prefill_tokens", "blocks", "endpoint"};
	const struct kvp_cat *cat = &c->region->cat;
	struct sum *sum = sum_loads(c->region);
	struct kvp_cat_worker_info *w = malloc(sizeof(*w));
	struct ctl_tab t;
	ctl_tab_begin(&t, c, "workers", sizeof(col) / sizeof(col[0]), col);
	t.failed = !sum || !w;
	uint64_t n = 0;
	for (uint32_t i = 0; !t.failed && i < kvp_cat_worker_max(cat) && n < c->limit; i++) {
		if (kvp_cat_worker_info(cat, i, w) != KVP_OK || !wanted(c->model, w->model, w->model_len) ||
			!wanted(c->group, w->group, w->group_len))
			continue;
		n++;
		ctl_tab_u64(&t, w->worker_id);
		ctl_tab_str(&t, part_role_name(w->role));
		ctl_tab_strn(&t, w->model, w->model_len);
		ctl_tab_strn(&t, w->group, w->group_len);
		ctl_tab_str(&t, life_name(w->lifecycle));
		ctl_tab_u64(&t, w->start_rank);
		ctl_tab_u64(&t, w->size);
		ctl_tab_u64(&t, sum[i].ranks);
		ctl_tab_u64(&t, sum[i].unindexed);
		ctl_tab_u64(&t, sum[i].requests);
		ctl_tab_u64(&t, sum[i].prefill_tok);
		ctl_tab_u64(&t, sum[i].blocks);
		ctl_tab_strn(&t, w->endpoint, w->endpoint_len);
	}
	free(sum);
	free(w);
	return ctl_tab_end(&t);
}

/* in_part answers whether a booking belongs to the model and group asked for. */
static int in_part(struct ctl *c, uint32_t part, struct kvp_part_info *p)
{
	if (!c->model && !c->group)
		return 1;
	return kvp_cat_part_info(&c->region->cat, part, p) == KVP_OK &&
	       wanted(c->model, p->model, p->model_len) && wanted(c->group, p->group, p->group_len);
}

int ctl_resv(struct ctl *c)
{
	static const char *const col[] = {"selection_id", "worker_id", "dp_rank", "partition", "rank_slot",
		"prefill_tokens", "prefill_active", "prompt_tokens", "blocks", "output_blocks", "age_ms",
		"slot", "kind"};
	struct kvp_resv_info *r = malloc(sizeof(*r));
	struct kvp_part_info *p = malloc(sizeof(*p));
	struct ctl_tab t;
	ctl_tab_begin(&t, c, "reservations", sizeof(col) / sizeof(col[0]), col);
	t.failed = !r || !p;
	uint32_t cursor = 0;
	uint64_t h, n = 0, now = kvp_clock_mono_ns();
	while (!t.failed && n < c->limit && kvp_resv_iter(&c->region->book, &cursor, &h) == KVP_OK) {
		if (kvp_resv_info(&c->region->book, h, r) != KVP_OK || !in_part(c, r->part, p))
			continue;
		n++;
		ctl_tab_strn(&t, r->id, r->id_len);
		ctl_tab_u64(&t, r->worker_id);
		ctl_tab_u64(&t, r->dp_rank);
		ctl_tab_u64(&t, r->part);
		ctl_tab_u64(&t, r->rank_slot);
		ctl_tab_u64(&t, r->prefill_tok);
		ctl_tab_str(&t, r->prefill_active ? "yes" : "no");
		ctl_tab_u64(&t, r->isl_tok);
		ctl_tab_u64(&t, r->seq_cnt);
		ctl_tab_u64(&t, r->output_cnt);
		ctl_tab_u64(&t, now > r->booked_ns ? (now - r->booked_ns) / 1000000 : 0);
		ctl_tab_u64(&t, KVP_OWNER_SLOT(r->owner));
		ctl_tab_str(&t, r->flags & KVP_RESV_MIRRORED ? "mirrored"
				: r->flags & KVP_RESV_LEASED ? "leased"
							     : "node");
	}
	free(r);
	free(p);
	return ctl_tab_end(&t);
}
