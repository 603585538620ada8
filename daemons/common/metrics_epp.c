/* The Endpoint Picker's counters under the names that dashboards of such pickers know. */
#include "daemons/common/metrics_text.h"

#include <inttypes.h>
#include <stdio.h>

#define NS 1e-9

static void head(struct kvp_text *t, const char *name, const char *type, const char *help)
{
	kvp_text_add(t, "# HELP %s %s\n# TYPE %s %s\n", name, help, name, type);
}

/* hist writes one series of a histogram; labels without braces, not empty. Buckets are powers of two. */
static void hist(struct kvp_text *t, const struct kvp_region *r, const char *name, const char *labels,
	enum kvp_hist id, double scale)
{
	struct kvp_hist_shm h;
	uint64_t below = 0;
	int first = scale < 1 ? 10 : 0, last = scale < 1 ? 36 : 20; /* 1 us to 1 min; 1 to a million */
	kvp_hist_sum(&r->counters, id, &h);
	for (int b = 0; b < KVP_HIST_BUCKETS; b++) {
		below += h.bucket[b];
		if (b >= first && b <= last)
			kvp_text_add(t, "%s_bucket{%s,le=\"%.9g\"} %" PRIu64 "\n", name, labels,
				(double)((1ULL << b) - 1) * scale, below);
	}
	kvp_text_add(t, "%s_bucket{%s,le=\"+Inf\"} %" PRIu64 "\n%s_sum{%s} %.9g\n%s_count{%s} %" PRIu64 "\n",
		name, labels, below, name, labels, (double)h.sum * scale, name, labels, below);
}

static void one_hist(struct kvp_text *t, const struct kvp_region *r, const char *name, const char *help,
	const char *labels, enum kvp_hist id, double scale)
{
	head(t, name, "histogram", help);
	hist(t, r, name, labels, id, scale);
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
		KVP_HIST_EPP_CACHED_TOK, 1);
	one_value(t, "dynamo_epp_predicted_cached_tokens_total", "counter",
		"cached prompt tokens by the index", model, kvp_ctr_sum(c, KVP_CTR_EPP_PREDICTED_TOK));
	one_value(t, "dynamo_epp_reported_cached_tokens_total", "counter",
		"cached prompt tokens by the engines", model, kvp_ctr_sum(c, KVP_CTR_EPP_REPORTED_TOK));
	one_value(t, "dynamo_epp_index_mismatch", "gauge", "1: what the index predicts doesn't come true",
		model,
		kvp_ctr_sum(c, KVP_CTR_EPP_INDEX_MISMATCH) || kvp_ctr_sum(c, KVP_CTR_IDX_UNMATCHED));
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
		KVP_HIST_EPP_ISL, 1);
	one_hist(t, r, "dynamo_component_router_output_sequence_tokens", "generated tokens", labels,
		KVP_HIST_EPP_OUTPUT_TOK, 1);
}

static void gateway(struct kvp_text *t, const struct kvp_region *r, const char *name, const char *pool)
{
	char model[4400], labels[600];
	snprintf(model, sizeof(model), "model_name=\"%s\",target_model_name=\"%s\"", name, name);
	snprintf(labels, sizeof(labels), "name=\"%s\"", pool);
	one_value(t, "inference_pool_ready_pods", "gauge", "schedulable workers", labels,
		kvp_cat_schedulable_cnt(&r->cat, KVP_PART_AGGREGATED));
	one_value(t, "inference_objective_request_total", "counter", "requests sent to a worker", model,
		kvp_ctr_sum(&r->counters, KVP_CTR_EPP_BOOKED));
	one_hist(t, r, "inference_objective_input_tokens", "prompt tokens", model, KVP_HIST_EPP_ISL, 1);
	one_hist(t, r, "inference_objective_output_tokens", "generated tokens", model,
		KVP_HIST_EPP_OUTPUT_TOK, 1);
	one_hist(t, r, "inference_objective_prompt_cached_tokens", "cached prompt tokens", model,
		KVP_HIST_EPP_CACHED_TOK, 1);
	one_hist(t, r, "inference_objective_request_duration_seconds", "streams whose response ended", model,
		KVP_HIST_EPP_DUR_EOS_NS, NS);
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
	gateway(t, r, name, pool);
}
