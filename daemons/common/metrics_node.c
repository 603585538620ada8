/* What lies in the region at the moment of the scrape, under the Endpoint Picker's published names: workers,
 * their loads, bookings, queue, index, recovery. */
#include "daemons/common/metrics_text.h"

#include <inttypes.h>
#include <stdlib.h>
#include <sys/stat.h>

static const char *const role_name[KVP_PART_ROLE_CNT] = {"aggregated", "prefill", "decode"};

static void head(struct kvp_text *t, const char *name, const char *type, const char *help)
{
	kvp_text_add(t, "# HELP %s %s\n# TYPE %s %s\n", name, help, name, type);
}

static void series(struct kvp_text *t, const char *name, const char *label, const char *is, uint64_t v)
{
	kvp_text_add(t, "%s{%s=\"%s\"} %" PRIu64 "\n", name, label, is, v);
}

/* ---- workers ---- */

static void workers(struct kvp_text *t, const struct kvp_region *r)
{
	static const char *const life[] = {"incomplete", "schedulable", "draining", "unschedulable"};
	uint64_t cnt[KVP_PART_ROLE_CNT][4] = {{0}};
	struct kvp_cat_worker_info *w = malloc(sizeof(*w));
	uint32_t max = w ? kvp_cat_worker_max(&r->cat) : 0;
	for (uint32_t i = 0; i < max; i++)
		if (kvp_cat_worker_info(&r->cat, i, w) == KVP_OK && (unsigned)w->role < KVP_PART_ROLE_CNT &&
			(unsigned)w->lifecycle < 4)
			cnt[w->role][w->lifecycle]++;
	free(w);
	head(t, "dynamo_epp_workers", "gauge", "registered workers");
	for (int role = 0; role < KVP_PART_ROLE_CNT; role++)
		for (int l = 0; l < 4; l++)
			kvp_text_add(t, "dynamo_epp_workers{role=\"%s\",lifecycle=\"%s\"} %" PRIu64 "\n",
				role_name[role], life[l], cnt[role][l]);
}

/* Load of every rank that is registered; a worker's series end with it. */
struct loads {
	struct kvp_cat_rank_info *rank;
	struct kvp_load *load;
	enum kvp_part_role *role;
	uint32_t cnt;
};

static int read_loads(const struct kvp_region *r, struct loads *l)
{
	uint32_t max = r->geom.rank_max;
	struct kvp_part_fixed part;
	*l = (struct loads){.rank = calloc(max, sizeof(*l->rank)),
		.load = calloc(max, sizeof(*l->load)),
		.role = calloc(max, sizeof(*l->role))};
	if (!l->rank || !l->load || !l->role)
		return 0;
	for (uint32_t slot = 0; slot < max; slot++) {
		if (kvp_cat_rank_info(&r->cat, slot, &l->rank[l->cnt]) != KVP_OK ||
			kvp_cat_part_get(&r->cat, l->rank[l->cnt].part, &part) != KVP_OK)
			continue;
		kvp_load_read(&r->book, slot, &l->load[l->cnt]);
		l->role[l->cnt++] = part.role;
	}
	return 1;
}

static void drop_loads(struct loads *l)
{
	free(l->rank);
	free(l->load);
	free(l->role);
}

enum load_word { PREFILL_TOKENS, DECODE_BLOCKS, REQUESTS };

static uint64_t word_of(const struct kvp_load *l, enum load_word what)
{
	return what == PREFILL_TOKENS  ? l->prefill_tok
	       : what == DECODE_BLOCKS ? kvp_load_blocks(l)
				       : l->requests;
}

static void worker_loads(struct kvp_text *t, const struct loads *l)
{
	static const struct {
		const char *name, *help;
	} row[] = {
		{"dynamo_epp_worker_active_prefill_tokens", "prompt tokens to be prefilled by live bookings"},
		{"dynamo_epp_worker_active_decode_blocks", "blocks of live bookings"},
		{"dynamo_epp_worker_active_requests", "live bookings"}};
	for (int what = PREFILL_TOKENS; what <= REQUESTS; what++) {
		head(t, row[what].name, "gauge", row[what].help);
		for (uint32_t i = 0; i < l->cnt; i++)
			kvp_text_add(t,
				"%s{worker_id=\"%" PRIu64 "\",dp_rank=\"%" PRIu32 "\",role=\"%s\"} %" PRIu64
				"\n",
				row[what].name, l->rank[i].worker_id, l->rank[i].dp_rank,
				role_name[l->role[i]], word_of(&l->load[i], (enum load_word)what));
	}
}

/* ---- bookings and queue ---- */

static void bookings(struct kvp_text *t, const struct kvp_region *r, const struct loads *l)
{
	uint64_t live[KVP_PART_ROLE_CNT] = {0}, pending[KVP_PART_ROLE_CNT] = {0};
	struct kvp_part_fixed part;
	for (uint32_t i = 0; i < l->cnt; i++)
		live[l->role[i]] += l->load[i].requests;
	for (uint32_t p = 0; p < kvp_cat_part_cnt(&r->cat); p++)
		if (kvp_cat_part_get(&r->cat, p, &part) == KVP_OK)
			pending[part.role] += kvp_queue_waiting(&r->queue, p, KVP_POLICY_CLASS_MAX);
	head(t, "dynamo_epp_reservations_active", "gauge", "live bookings");
	for (int i = 0; i < KVP_PART_ROLE_CNT; i++)
		series(t, "dynamo_epp_reservations_active", "role", role_name[i], live[i]);
	head(t, "dynamo_epp_queue_pending", "gauge", "requests that wait for a worker");
	for (int i = 0; i < KVP_PART_ROLE_CNT; i++)
		series(t, "dynamo_epp_queue_pending", "role", role_name[i], pending[i]);
	head(t, "dynamo_epp_reservations_expired_total", "counter", "bookings freed for their age");
	kvp_text_add(t, "dynamo_epp_reservations_expired_total %" PRIu64 "\n",
		kvp_ctr_sum(&r->counters, KVP_CTR_BOOK_EXPIRED));
	head(t, "dynamo_epp_reservations_swept_total", "counter", "bookings freed for their owner");
	series(t, "dynamo_epp_reservations_swept_total", "reason", "owner_dead",
		kvp_ctr_sum(&r->counters, KVP_CTR_BOOK_SWEPT));
	series(t, "dynamo_epp_reservations_swept_total", "reason", "lease",
		kvp_ctr_sum(&r->counters, KVP_CTR_BOOK_LAPSED));
}

/* ---- index, recovery, memory ---- */

static void events(struct kvp_text *t, const struct kvp_counters *c)
{
	static const struct {
		const char *type, *result;
		enum kvp_ctr ctr;
	} row[] = {{"stored", "ok", KVP_CTR_EV_STORED_OK},
		{"stored", "parent_block_not_found", KVP_CTR_EV_STORED_PARENT},
		{"stored", "invalid_block", KVP_CTR_EV_STORED_INVALID},
		{"stored", "capacity_exhausted", KVP_CTR_EV_STORED_FULL},
		{"removed", "ok", KVP_CTR_EV_REMOVED_OK},
		{"removed", "block_not_found", KVP_CTR_EV_REMOVED_NOTFOUND},
		{"cleared", "ok", KVP_CTR_EV_CLEARED_OK}};
	head(t, "dynamo_epp_kv_events_total", "counter", "KV events by type and result");
	for (size_t i = 0; i < sizeof(row) / sizeof(row[0]); i++)
		kvp_text_add(t, "dynamo_epp_kv_events_total{type=\"%s\",result=\"%s\"} %" PRIu64 "\n",
			row[i].type, row[i].result, kvp_ctr_sum(c, row[i].ctr));
	head(t, "dynamo_epp_kv_event_gaps_total", "counter", "gaps in the sequence of KV events");
	kvp_text_add(t, "dynamo_epp_kv_event_gaps_total %" PRIu64 "\n", kvp_ctr_sum(c, KVP_CTR_EV_GAPS));
	head(t, "dynamo_epp_kv_replay_total", "counter", "replays by result");
	series(t, "dynamo_epp_kv_replay_total", "result", "complete",
		kvp_ctr_sum(c, KVP_CTR_EV_REPLAY_COMPLETE));
	series(t, "dynamo_epp_kv_replay_total", "result", "incomplete",
		kvp_ctr_sum(c, KVP_CTR_EV_REPLAY_INCOMPLETE));
}

static void index_and_memory(struct kvp_text *t, const struct kvp_region *r)
{
	struct stat st;
	struct kvp_recov_info got;
	head(t, "dynamo_epp_index_nodes", "gauge", "blocks and runs in the prefix index");
	series(t, "dynamo_epp_index_nodes", "kind", "block", kvp_ctr_sum(&r->counters, KVP_CTR_RADIX_BLOCKS));
	series(t, "dynamo_epp_index_nodes", "kind", "run", kvp_ctr_sum(&r->counters, KVP_CTR_RADIX_RUNS));
	head(t, "dynamo_epp_shm_bytes", "gauge", "memory of the region in use");
	series(t, "dynamo_epp_shm_bytes", "segment", "region",
		fstat(r->fd, &st) == 0 ? (uint64_t)st.st_blocks * 512 : 0);
	kvp_recov_get(&r->recov, &got);
	head(t, "dynamo_epp_replica_recovery_state", "gauge",
		"0 no source, 1 recovering, 2 recovered, 3 begun empty, 4 every peer failed");
	kvp_text_add(t, "dynamo_epp_replica_recovery_state %d\n", (int)got.state);
	head(t, "dynamo_epp_recovery_duration_seconds", "gauge", "time that the recovery took");
	kvp_text_add(t, "dynamo_epp_recovery_duration_seconds %.9g\n",
		got.ended_ns ? (double)(got.ended_ns - got.begun_ns) * 1e-9 : 0.0);
}

void kvp_metrics_node(struct kvp_text *t, const struct kvp_region *r)
{
	struct loads l;
	workers(t, r);
	if (read_loads(r, &l)) {
		worker_loads(t, &l);
		bookings(t, r, &l);
	} else {
		t->err = KVP_ERR_FULL;
	}
	drop_loads(&l);
	events(t, &r->counters);
	index_and_memory(t, r);
}
