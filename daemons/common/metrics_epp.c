/* The Endpoint Picker's counters under the names that dashboards of such pickers know. */
#include "daemons/common/metrics_text.h"
#include <kvpick/version.h>

#include <inttypes.h>
#include <stdio.h>

enum unit { NS, TOKENS, BYTES, PERCENT };
/* By unit: what a count stands for, and the buckets that are shown: 1 us to 1 min, 1 to a million, ... */
static const struct {
	double scale;
	int first, last;
} unit[] = {[NS] = {1e-9, 10, 36}, [TOKENS] = {1, 0, 20}, [BYTES] = {1, 6, 30}, [PERCENT] = {0.01, 0, 7}};

static void head(struct kvp_text *t, const char *name, const char *type, const char *help)
{
	kvp_text_add(t, "# HELP %s %s\n# TYPE %s %s\n", name, help, name, type);
}

/* hist writes one series of a histogram; labels without braces, not empty. Buckets are powers of two. */
static void hist(struct kvp_text *t, const struct kvp_region *r, const char *name, const char *labels,
	enum kvp_hist id, enum unit u)
{
	struct kvp_hist_shm h;
	uint64_t below = 0;
	kvp_hist_sum(&r->counters, id, &h);
	for (int b = 0; b < KVP_HIST_BUCKETS; b++) {
		below += h.bucket[b];
		if (b >= unit[u].first && b <= unit[u].last)
			kvp_text_add(t, "%s_bucket{%s,le=\"%.9g\"} %" PRIu64 "\n", name, labels,
				(double)((1ULL << b) - 1) * unit[u].scale, below);
	}
	kvp_text_add(t, "%s_bucket{%s,le=\"+Inf\"} %" PRIu64 "\n%s_sum{%s} %.9g\n%s_count{%s} %" PRIu64 "\n",
		name, labels, below, name, labels, (double)h.sum * unit[u].scale, name, labels, below);
}

static void one_hist(struct kvp_text *t, const struct kvp_region *r, const char *name, const char *help,
	const char *labels, enum kvp_hist id, enum unit u)
{
	head(t, name, "histogram", help);
	hist(t, r, name, labels, id, u);
}

static void one_value(struct kvp_text *t, const char *name, const char *type, const char *help,
	const char *labels, uint64_t v)
{
	head(t, name, type, help);
	kvp_text_add(t, "%s{%s} %" PRIu64 "\n", name, labels, v);
}

static void outcomes(struct kvp_text *t, const struct kvp_region *r, const char *model)
{
	static const struct {
		const char *outcome;
		enum kvp_ctr ctr;
		enum kvp_hist hist;
	} row[] = {{"early_reject", KVP_CTR_EPP_REJECTED, KVP_HIST_EPP_DUR_REJECTED_NS},
		{"ext_proc_error", KVP_CTR_EPP_STREAM_ERROR, KVP_HIST_EPP_DUR_FAILED_NS},
		{"upstream_http_error", KVP_CTR_EPP_UPSTREAM_ERROR, KVP_HIST_EPP_DUR_UPSTREAM_NS},
		{"response_eos", KVP_CTR_EPP_RESPONSE_EOS, KVP_HIST_EPP_DUR_EOS_NS},
		{"incomplete", KVP_CTR_EPP_INCOMPLETE, KVP_HIST_EPP_DUR_INCOMPLETE_NS}};
	char labels[2400];
	head(t, "dynamo_epp_requests_total", "counter", "streams by how they ended");
	for (size_t i = 0; i < sizeof(row) / sizeof(row[0]); i++)
		kvp_text_add(t, "dynamo_epp_requests_total{%s,outcome=\"%s\"} %" PRIu64 "\n", model,
			row[i].outcome, kvp_ctr_sum(&r->counters, row[i].ctr));
	head(t, "dynamo_epp_request_duration_seconds", "histogram", "whole stream");
	for (size_t i = 0; i < sizeof(row) / sizeof(row[0]); i++) {
		snprintf(labels, sizeof(labels), "%s,outcome=\"%s\"", model, row[i].outcome);
		hist(t, r, "dynamo_epp_request_duration_seconds", labels, row[i].hist, NS);
	}
}

static void phases(struct kvp_text *t, const struct kvp_region *r, const char *model)
{
	static const struct {
		const char *phase, *outcome;
		enum kvp_hist hist;
	} row[] = {{"render_tokenize", "ok", KVP_HIST_EPP_TOK_OK_NS},
		{"render_tokenize", "error", KVP_HIST_EPP_TOK_BAD_NS},
		{"selection", "ok", KVP_HIST_EPP_SEL_OK_NS}, {"selection", "error", KVP_HIST_EPP_SEL_BAD_NS}};
	char labels[2400];
	head(t, "dynamo_epp_phase_duration_seconds", "histogram", "phases of a pick");
	for (size_t i = 0; i < sizeof(row) / sizeof(row[0]); i++) {
		snprintf(labels, sizeof(labels), "%s,phase=\"%s\",outcome=\"%s\"", model, row[i].phase,
			row[i].outcome);
		hist(t, r, "dynamo_epp_phase_duration_seconds", labels, row[i].hist, NS);
	}
}

static void labelled(struct kvp_text *t, const struct kvp_region *r, const char *model)
{
	static const struct {
		const char *name, *help, *labels;
		enum kvp_ctr ctr;
	} row[] = {{"dynamo_epp_lifecycle_callbacks_total", "ends of prefill and of bookings",
			   "operation=\"prefill_complete\",result=\"ok\"", KVP_CTR_EPP_PREFILL_OK},
		{"dynamo_epp_lifecycle_callbacks_total", NULL,
			"operation=\"prefill_complete\",result=\"error\"", KVP_CTR_EPP_PREFILL_BAD},
		{"dynamo_epp_lifecycle_callbacks_total", NULL, "operation=\"request_complete\",result=\"ok\"",
			KVP_CTR_EPP_FREE_OK},
		{"dynamo_epp_lifecycle_callbacks_total", NULL,
			"operation=\"request_complete\",result=\"error\"", KVP_CTR_EPP_FREE_BAD},
		{"dynamo_epp_router_rejections_total", "picks that the selection refused",
			"reason=\"overloaded\"", KVP_CTR_EPP_BUSY},
		{"dynamo_epp_router_rejections_total", NULL, "reason=\"queue_rejected\"",
			KVP_CTR_EPP_QUEUE_FULL},
		{"dynamo_epp_router_rejections_total", NULL, "reason=\"deadline_exceeded\"",
			KVP_CTR_EPP_DEADLINE},
		{"dynamo_epp_router_rejections_total", NULL, "reason=\"unavailable\"",
			KVP_CTR_EPP_NO_ENDPOINT},
		{"dynamo_epp_router_rejections_total", NULL, "reason=\"conflict\"", KVP_CTR_EPP_CONFLICT},
		{"dynamo_epp_router_rejections_total", NULL, "reason=\"bad_request\"",
			KVP_CTR_EPP_NOT_ROUTABLE},
		{"dynamo_epp_router_rejections_total", NULL, "reason=\"internal\"", KVP_CTR_EPP_INTERNAL}};
	for (size_t i = 0; i < sizeof(row) / sizeof(row[0]); i++) {
		if (row[i].help)
			head(t, row[i].name, "counter", row[i].help);
		kvp_text_add(t, "%s{%s,%s} %" PRIu64 "\n", row[i].name, model, row[i].labels,
			kvp_ctr_sum(&r->counters, row[i].ctr));
	}
}

static void tokens(struct kvp_text *t, const struct kvp_region *r, const char *model)
{
	const struct kvp_counters *c = &r->counters;
	one_hist(t, r, "dynamo_epp_cached_tokens", "cached prompt tokens that engines report", model,
		KVP_HIST_EPP_CACHED_TOK, TOKENS);
	one_value(t, "dynamo_epp_predicted_cached_tokens_total", "counter",
		"cached prompt tokens by the index", model, kvp_ctr_sum(c, KVP_CTR_EPP_PREDICTED_TOK));
	one_value(t, "dynamo_epp_reported_cached_tokens_total", "counter",
		"cached prompt tokens by the engines", model, kvp_ctr_sum(c, KVP_CTR_EPP_REPORTED_TOK));
	one_value(t, "dynamo_epp_index_mismatch", "gauge", "1: what the index predicts doesn't come true",
		model, kvp_ctr_sum(c, KVP_CTR_EPP_INDEX_MISMATCH) || kvp_ctr_sum(c, KVP_CTR_IDX_UNMATCHED));
	one_value(t, "dynamo_epp_endpoint_mismatch_total", "counter",
		"responses of another worker than chosen", model, kvp_ctr_sum(c, KVP_CTR_EPP_MISMATCH));
}

static void router(struct kvp_text *t, const struct kvp_region *r, const char *model, const char *pool)
{
	char labels[2800];
	snprintf(labels, sizeof(labels), "%s,inference_pool=\"%s\"", model, pool);
	one_value(t, "dynamo_component_router_requests_started_total", "counter", "selections of requests",
		labels, kvp_ctr_sum(&r->counters, KVP_CTR_EPP_BOOKED));
	one_hist(t, r, "dynamo_component_router_input_sequence_tokens", "prompt tokens", labels,
		KVP_HIST_EPP_ISL, TOKENS);
	one_hist(t, r, "dynamo_component_router_output_sequence_tokens", "generated tokens", labels,
		KVP_HIST_EPP_OUTPUT_TOK, TOKENS);
}

/* Selections and refusals. */
static void selections(struct kvp_text *t, const struct kvp_region *r, const char *model)
{
	static const struct {
		const char *reason;
		enum kvp_ctr ctr;
	} row[] = {{"not_ready", KVP_CTR_EPP_UNDISCOVERED}, {"no_endpoint", KVP_CTR_EPP_NO_ENDPOINT},
		{"subset_empty", KVP_CTR_EPP_SUBSET}, {"in_flight_limit", KVP_CTR_EPP_OVERLOADED},
		{"invalid_request", KVP_CTR_EPP_BODY_REFUSED},
		{"metadata_headers", KVP_CTR_EPP_HEADERS_REFUSED}, {"tokenizer", KVP_CTR_EPP_TOKENIZER},
		{"not_routable", KVP_CTR_EPP_NOT_ROUTABLE}, {"conflict", KVP_CTR_EPP_CONFLICT},
		{"workers_busy", KVP_CTR_EPP_BUSY}, {"queue_limit", KVP_CTR_EPP_QUEUE_FULL},
		{"deadline", KVP_CTR_EPP_DEADLINE}, {"worker_gone", KVP_CTR_EPP_VANISHED},
		{"shutting_down", KVP_CTR_EPP_SHUT_DOWN}, {"internal", KVP_CTR_EPP_INTERNAL}};
	char labels[2400];
	uint64_t errors = 0;
	snprintf(labels, sizeof(labels), "%s,role=\"aggregated\"", model);
	head(t, "dynamo_epp_selection_errors_total", "counter", "requests that got no worker");
	for (size_t i = 0; i < sizeof(row) / sizeof(row[0]); i++) {
		uint64_t v = kvp_ctr_sum(&r->counters, row[i].ctr);
		errors += v;
		kvp_text_add(t, "dynamo_epp_selection_errors_total{%s,reason=\"%s\"} %" PRIu64 "\n", labels,
			row[i].reason, v);
	}
	head(t, "dynamo_epp_selections_total", "counter", "requests by whether they got a worker");
	kvp_text_add(t, "dynamo_epp_selections_total{%s,result=\"ok\"} %" PRIu64 "\n", labels,
		kvp_ctr_sum(&r->counters, KVP_CTR_EPP_BOOKED));
	kvp_text_add(t, "dynamo_epp_selections_total{%s,result=\"error\"} %" PRIu64 "\n", labels, errors);
	one_hist(t, r, "dynamo_epp_selected_overlap_ratio", "share of a prompt that its worker has cached",
		labels, KVP_HIST_EPP_OVERLAP_PCT, PERCENT);
	one_hist(t, r, "dynamo_epp_queue_wait_seconds", "waits for a worker", labels, KVP_HIST_EPP_QUEUE_NS,
		NS);
	one_value(t, "dynamo_epp_queue_rejected_total", "counter",
		"requests refused by a limit of their class", labels,
		kvp_ctr_sum(&r->counters, KVP_CTR_QUEUE_REJECTED));
}

/* ---- names of the gateway's own pickers ---- */

static void gateway_errors(struct kvp_text *t, const struct kvp_region *r, const char *model)
{
	static const struct {
		const char *code;
		enum kvp_ctr ctr[7];
		int cnt;
	} row[] = {{"BadRequest",
			   {KVP_CTR_EPP_BODY_REFUSED, KVP_CTR_EPP_HEADERS_REFUSED, KVP_CTR_EPP_NOT_ROUTABLE,
				   KVP_CTR_EPP_BODY_TOO_LARGE, KVP_CTR_EPP_BODY_TIMEOUT},
			   5},
		{"InferencePoolResourceExhausted",
			{KVP_CTR_EPP_BUSY, KVP_CTR_EPP_QUEUE_FULL, KVP_CTR_EPP_DEADLINE}, 3},
		{"ServiceUnavailable",
			{KVP_CTR_EPP_NO_ENDPOINT, KVP_CTR_EPP_SUBSET, KVP_CTR_EPP_OVERLOADED,
				KVP_CTR_EPP_VANISHED, KVP_CTR_EPP_OVER_BUDGET, KVP_CTR_EPP_SHUT_DOWN,
				KVP_CTR_EPP_UNDISCOVERED},
			7},
		{"ModelServerError", {KVP_CTR_EPP_UPSTREAM_ERROR}, 1},
		{"Internal", {KVP_CTR_EPP_INTERNAL, KVP_CTR_EPP_CONFLICT, KVP_CTR_EPP_TOKENIZER}, 3}};
	head(t, "inference_objective_request_error_total", "counter", "requests that failed, by kind");
	for (size_t i = 0; i < sizeof(row) / sizeof(row[0]); i++) {
		uint64_t v = 0;
		for (int k = 0; k < row[i].cnt; k++)
			v += kvp_ctr_sum(&r->counters, row[i].ctr[k]);
		kvp_text_add(t, "inference_objective_request_error_total{%s,error_code=\"%s\"} %" PRIu64 "\n",
			model, row[i].code, v);
	}
}

static void gateway_requests(struct kvp_text *t, const struct kvp_region *r, const char *model)
{
	static const struct {
		const char *name, *help;
		enum kvp_hist id;
		enum unit u;
	} row[] = {{"input_tokens", "prompt tokens", KVP_HIST_EPP_ISL, TOKENS},
		{"output_tokens", "generated tokens", KVP_HIST_EPP_OUTPUT_TOK, TOKENS},
		{"prompt_cached_tokens", "cached prompt tokens", KVP_HIST_EPP_CACHED_TOK, TOKENS},
		{"request_duration_seconds", "streams whose response ended", KVP_HIST_EPP_DUR_EOS_NS, NS},
		{"request_ttft_seconds", "stream opened to first response byte", KVP_HIST_EPP_FIRST_BODY_NS,
			NS},
		{"request_tpot_seconds", "time of an output token behind the first byte",
			KVP_HIST_EPP_TPOT_NS, NS},
		{"normalized_time_per_output_token_seconds", "time of a whole stream by its output tokens",
			KVP_HIST_EPP_NTPOT_NS, NS},
		{"request_sizes", "bytes of request bodies", KVP_HIST_EPP_REQUEST_BYTES, BYTES},
		{"response_sizes", "bytes of response bodies", KVP_HIST_EPP_RESPONSE_BYTES, BYTES}};
	char name[128];
	one_value(t, "inference_objective_request_total", "counter", "requests sent to a worker", model,
		kvp_ctr_sum(&r->counters, KVP_CTR_EPP_BOOKED));
	for (size_t i = 0; i < sizeof(row) / sizeof(row[0]); i++) {
		snprintf(name, sizeof(name), "inference_objective_%s", row[i].name);
		one_hist(t, r, name, row[i].help, model, row[i].id, row[i].u);
	}
}

static uint64_t waiting(const struct kvp_region *r)
{
	uint64_t n = 0;
	for (uint32_t p = 0; p < kvp_cat_part_cnt(&r->cat); p++)
		n += kvp_queue_waiting(&r->queue, p, KVP_POLICY_CLASS_MAX);
	return n;
}

static void gateway_scheduler(
	struct kvp_text *t, const struct kvp_region *r, const char *model, const char *pool)
{
	static const char attempts[] = "inference_extension_scheduler_attempts_total";
	static const char hits[] = "inference_extension_prefix_indexer_hit_ratio";
	static const char wait[] = "inference_extension_flow_control_request_queue_duration_seconds";
	const struct kvp_counters *c = &r->counters;
	char labels[5200];
	one_hist(t, r, "inference_extension_scheduler_e2e_duration_seconds", "complete request to answer",
		"role=\"aggregated\"", KVP_HIST_EPP_PICK_NS, NS);
	head(t, attempts, "counter", "choices of a worker");
	kvp_text_add(t, "%s{%s,status=\"success\"} %" PRIu64 "\n", attempts, model,
		kvp_ctr_sum(c, KVP_CTR_EPP_BOOKED));
	kvp_text_add(t, "%s{%s,status=\"failure\"} %" PRIu64 "\n", attempts, model,
		kvp_ctr_sum(c, KVP_CTR_EPP_NO_ENDPOINT) + kvp_ctr_sum(c, KVP_CTR_EPP_BUSY));
	one_value(t, "inference_extension_prefix_indexer_size", "gauge", "blocks in the prefix index",
		"role=\"aggregated\"", kvp_ctr_sum(c, KVP_CTR_RADIX_BLOCKS));
	one_hist(t, r, hits, "share of a prompt that its worker has cached", "role=\"aggregated\"",
		KVP_HIST_EPP_OVERLAP_PCT, PERCENT);
	snprintf(labels, sizeof(labels), "inference_pool=\"%s\",%s", pool, model);
	one_value(t, "inference_extension_flow_control_queue_size", "gauge",
		"requests that wait for a worker", labels, waiting(r));
	one_hist(t, r, wait, "waits for a worker", labels, KVP_HIST_EPP_QUEUE_NS, NS);
	one_value(t, "inference_extension_info", "gauge", "build of kvpick",
		"build_ref=\"" KVPICK_VERSION "\"", 1);
}

/* Workers that requests of the topology may get. */
static uint64_t ready(const struct kvp_region *r, const struct kvp_config *cfg)
{
	return cfg->eff.disaggregated ? (uint64_t)kvp_cat_schedulable_cnt(&r->cat, KVP_PART_PREFILL) +
						kvp_cat_schedulable_cnt(&r->cat, KVP_PART_DECODE)
				      : kvp_cat_schedulable_cnt(&r->cat, KVP_PART_AGGREGATED);
}

static void gateway_pool(
	struct kvp_text *t, const struct kvp_region *r, const struct kvp_config *cfg, const char *pool)
{
	struct kvp_cat_rank_info info;
	struct kvp_load l;
	uint64_t requests = 0, ranks = 0;
	char labels[600];
	for (uint32_t slot = 0; slot < r->geom.rank_max; slot++) {
		if (kvp_cat_rank_info(&r->cat, slot, &info) != KVP_OK)
			continue;
		kvp_load_read(&r->book, slot, &l);
		requests += l.requests;
		ranks++;
	}
	snprintf(labels, sizeof(labels), "name=\"%s\"", pool);
	one_value(t, "inference_pool_ready_pods", "gauge", "schedulable workers", labels, ready(r, cfg));
	head(t, "inference_pool_average_running_requests", "gauge", "live bookings a rank");
	kvp_text_add(t, "inference_pool_average_running_requests{%s} %.9g\n", labels,
		ranks ? (double)requests / (double)ranks : 0);
	head(t, "inference_pool_average_queue_size", "gauge", "requests that wait for a worker, a rank");
	kvp_text_add(t, "inference_pool_average_queue_size{%s} %.9g\n", labels,
		ranks ? (double)waiting(r) / (double)ranks : 0);
}

static void gateway(struct kvp_text *t, const struct kvp_region *r, const struct kvp_config *cfg,
	const char *name, const char *pool)
{
	char model[4400];
	gateway_pool(t, r, cfg, pool);
	snprintf(model, sizeof(model), "model_name=\"%s\",target_model_name=\"%s\"", name, name);
	gateway_requests(t, r, model);
	gateway_errors(t, r, model);
	gateway_scheduler(t, r, model, pool);
	snprintf(model, sizeof(model), "model_name=\"%s\"", name);
	one_value(t, "inference_objective_running_requests", "gauge", "streams now", model,
		kvp_ctr_sum(&r->counters, KVP_CTR_EPP_OPEN));
}

void kvp_metrics_epp(struct kvp_text *t, const struct kvp_region *r, const struct kvp_config *cfg)
{
	char name[2 * sizeof(cfg->model_name)], pool[2 * sizeof(cfg->pool_name)], model[2200];
	kvp_text_label(cfg->model_name, name, sizeof(name));
	kvp_text_label(cfg->pool_name[0] ? cfg->pool_name : "default", pool, sizeof(pool));
	snprintf(model, sizeof(model), "model=\"%s\"", name);
	outcomes(t, r, model);
	one_value(t, "dynamo_epp_streams_inflight", "gauge", "streams now", model,
		kvp_ctr_sum(&r->counters, KVP_CTR_EPP_OPEN));
	phases(t, r, model);
	one_hist(t, r, "dynamo_epp_first_response_body_seconds", "stream opened to first response byte",
		model, KVP_HIST_EPP_FIRST_BODY_NS, NS);
	labelled(t, r, model);
	tokens(t, r, model);
	router(t, r, model, pool);
	selections(t, r, model);
	gateway(t, r, cfg, name, pool);
}
