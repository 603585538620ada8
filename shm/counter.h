/* shm/counter.h — the node's counters: one column a process slot, readers add the columns up.
 *
 * Shape      slot_max columns, each page-aligned: one word a counter of counters.def, 64 buckets and a sum a
 *            histogram. Labels are compiled in (kvp_ctr_info), not stored.
 * Truth      the words.
 * Writers    the process that owns the slot, its own column only: kvp_ctr_add from one thread a counter,
 *            kvp_ctr_add_mw from any of its threads.
 * Readers    httpd (/metrics), ctl, tests: kvp_ctr_sum, kvp_hist_sum.
 * Ordering   relaxed: a counter orders nothing.
 * Lifetime   as long as the region; a restarted process goes on in its slot's column, so sums never fall.
 * Crash      nothing is torn; at most the last increment is missing.
 */
#ifndef KVP_SHM_COUNTER_H
#define KVP_SHM_COUNTER_H

#include <kvpick/counters.def>
#include "shm/obj.h"

enum kvp_ctr_kind { KVP_CTR_KIND_COUNTER, KVP_CTR_KIND_GAUGE, KVP_CTR_KIND_MAX };
enum kvp_ctr {
#define X(id, name, kind, unit, help) KVP_CTR_##id,
	KVP_COUNTER_LIST(X)
#undef X
		KVP_CTR_CNT
};
enum kvp_hist {
#define X(id, name, unit, help) KVP_HIST_##id,
	KVP_HIST_LIST(X)
#undef X
		KVP_HIST_CNT
};
#define KVP_HIST_BUCKETS 64

struct kvp_hist_shm {
	uint64_t bucket[KVP_HIST_BUCKETS]; /* bucket b: values with bit length b, that is < 2^b */
	uint64_t sum;
};
struct kvp_ctr_column_shm {
	uint64_t val[KVP_CTR_CNT];
	struct kvp_hist_shm hist[KVP_HIST_CNT];
} __attribute__((aligned(4096)));

struct kvp_ctr_info {
	const char *name, *unit, *help;
	enum kvp_ctr_kind kind;
};

struct kvp_counters { /* process-local handle of the whole object */
	struct kvp_objhdr *hdr;
	struct kvp_ctr_column_shm *column;
	uint32_t slot_max;
};
/* A writer's handle is its own column. Unit tests may use a column on the stack or heap. */
struct kvp_ctr_column_shm;

uint64_t kvp_counter_align(void);
uint64_t kvp_counter_footprint(const struct kvp_geom *g);
int kvp_counter_new(void *mem, const struct kvp_geom *g);
int kvp_counter_join(void *mem, const struct kvp_geom *g, struct kvp_counters *out);
void kvp_counter_leave(struct kvp_counters *c);
int kvp_counter_delete(void *mem);
uint64_t kvp_counter_check(const struct kvp_counters *c);

const struct kvp_ctr_info *kvp_ctr_info(enum kvp_ctr id);
const struct kvp_ctr_info *kvp_hist_info(enum kvp_hist id);

/* kvp_ctr_add adds n; the counter has one writing thread in this process. Wait-free. */
static inline void kvp_ctr_add(struct kvp_ctr_column_shm *c, enum kvp_ctr id, uint64_t n)
{
	kvp_add_sw_u64(&c->val[id], n);
}
/* kvp_ctr_add_mw adds n; any thread of this process. */
static inline void kvp_ctr_add_mw(struct kvp_ctr_column_shm *c, enum kvp_ctr id, uint64_t n)
{
	kvp_faa_rlx_u64(&c->val[id], n);
}
/* kvp_ctr_set stores a gauge. */
static inline void kvp_ctr_set(struct kvp_ctr_column_shm *c, enum kvp_ctr id, uint64_t v)
{
	kvp_st_rlx_u64(&c->val[id], v);
}
/* kvp_ctr_max raises a maximum. */
static inline void kvp_ctr_max(struct kvp_ctr_column_shm *c, enum kvp_ctr id, uint64_t v)
{
	if (v > kvp_ld_rlx_u64(&c->val[id]))
		kvp_st_rlx_u64(&c->val[id], v);
}
/* kvp_hist_add records one value; one writing thread. */
static inline void kvp_hist_add(struct kvp_ctr_column_shm *c, enum kvp_hist id, uint64_t v)
{
	struct kvp_hist_shm *h = &c->hist[id];
	int b = v ? 64 - __builtin_clzll(v) : 0;
	kvp_add_sw_u64(&h->bucket[b < KVP_HIST_BUCKETS ? b : KVP_HIST_BUCKETS - 1], 1);
	kvp_add_sw_u64(&h->sum, v);
}

/* kvp_ctr_sum adds a counter over all slots (MAX: the maximum). kvp_hist_sum does it for a histogram and
 * kvp_hist_quantile reads the upper edge of the bucket that holds quantile q (0..1) of a summed histogram. */
uint64_t kvp_ctr_sum(const struct kvp_counters *c, enum kvp_ctr id);
void kvp_hist_sum(const struct kvp_counters *c, enum kvp_hist id, struct kvp_hist_shm *out);
uint64_t kvp_hist_quantile(const struct kvp_hist_shm *h, double q);
#endif
