#include "shm/counter.h"

#include <string.h>

#define MAGIC 0x31525443504b56ULL /* "VKPCTR1" */
#define LAYOUT 1

static const struct kvp_ctr_info ctr_info[KVP_CTR_CNT] = {
#define X(id, name, kind, unit, help) {name, unit, help, KVP_CTR_KIND_##kind},
	KVP_COUNTER_LIST(X)
#undef X
};
static const struct kvp_ctr_info hist_info[KVP_HIST_CNT] = {
#define X(id, name, unit, help) {name, unit, help, KVP_CTR_KIND_COUNTER},
	KVP_HIST_LIST(X)
#undef X
};

static uint32_t layout_hash(void)
{
	const size_t w[] = {KVP_CTR_CNT, KVP_HIST_CNT, sizeof(struct kvp_ctr_column_shm)};
	return kvp_obj_hash(w, sizeof(w) / sizeof(w[0]));
}

uint64_t kvp_counter_align(void)
{
	return KVP_PAGE;
}

uint64_t kvp_counter_footprint(const struct kvp_geom *g)
{
	if (!g || g->slot_max == 0 || g->slot_max > KVP_SLOT_MAX)
		return 0;
	return KVP_PAGE + (uint64_t)g->slot_max * sizeof(struct kvp_ctr_column_shm);
}

int kvp_counter_new(void *mem, const struct kvp_geom *g)
{
	uint64_t fp = kvp_counter_footprint(g);
	if (!mem || ((uintptr_t)mem & (KVP_PAGE - 1)) || !fp)
		return KVP_ERR_INVAL;
	kvp_obj_begin(mem, LAYOUT, layout_hash(), fp, g->region_gen);
	kvp_obj_ready(mem, MAGIC);
	return KVP_OK;
}

int kvp_counter_join(void *mem, const struct kvp_geom *g, struct kvp_counters *out)
{
	int rc = kvp_obj_join(mem, MAGIC, LAYOUT, layout_hash());
	if (rc)
		return rc;
	struct kvp_objhdr *h = mem;
	if (h->footprint != kvp_counter_footprint(g))
		return KVP_ERR_LAYOUT;
	out->hdr = h;
	out->column = (struct kvp_ctr_column_shm *)(void *)((char *)mem + KVP_PAGE);
	out->slot_max = g->slot_max;
	return KVP_OK;
}

void kvp_counter_leave(struct kvp_counters *c)
{
	memset(c, 0, sizeof(*c));
}

int kvp_counter_delete(void *mem)
{
	kvp_obj_delete(mem);
	return KVP_OK;
}

uint64_t kvp_counter_check(const struct kvp_counters *c)
{
	return c->hdr && kvp_ld_acq_u64(&c->hdr->magic) == MAGIC ? 0 : 1;
}

const struct kvp_ctr_info *kvp_ctr_info(enum kvp_ctr id)
{
	return &ctr_info[id];
}

const struct kvp_ctr_info *kvp_hist_info(enum kvp_hist id)
{
	return &hist_info[id];
}

uint64_t kvp_ctr_sum(const struct kvp_counters *c, enum kvp_ctr id)
{
	uint64_t sum = 0;
	for (uint32_t s = 0; s < c->slot_max; s++) {
		uint64_t v = kvp_ld_rlx_u64(&c->column[s].val[id]);
		if (ctr_info[id].kind == KVP_CTR_KIND_MAX)
			sum = v > sum ? v : sum;
		else
			sum += v;
	}
	return sum;
}

void kvp_hist_sum(const struct kvp_counters *c, enum kvp_hist id, struct kvp_hist_shm *out)
{
	memset(out, 0, sizeof(*out));
	for (uint32_t s = 0; s < c->slot_max; s++) {
		for (int b = 0; b < KVP_HIST_BUCKETS; b++)
			out->bucket[b] += kvp_ld_rlx_u64(&c->column[s].hist[id].bucket[b]);
		out->sum += kvp_ld_rlx_u64(&c->column[s].hist[id].sum);
	}
}

uint64_t kvp_hist_quantile(const struct kvp_hist_shm *h, double q)
{
	uint64_t total = 0, seen = 0;
	for (int b = 0; b < KVP_HIST_BUCKETS; b++)
		total += h->bucket[b];
	for (int b = 0; b < KVP_HIST_BUCKETS && total; b++) {
		seen += h->bucket[b];
		if ((double)seen >= q * (double)total)
			return b ? (1ULL << b) - 1 : 0;
	}
	return 0;
}
