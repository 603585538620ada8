#include "daemons/common/metrics_text.h"
#include "shm/score.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *const role_name[KVP_PART_ROLE_CNT] = {"aggregated", "prefill", "decode"};

void kvp_text_add(struct kvp_text *t, const char *fmt, ...)
{
	va_list ap;
	if (t->err)
		return;
	va_start(ap, fmt);
	int n = vsnprintf(NULL, 0, fmt, ap);
	va_end(ap);
	if (t->len + (size_t)n + 1 > t->cap) {
		size_t cap = (t->cap ? t->cap * 2 : 65536) + (size_t)n;
		char *grown = realloc(t->buf, cap);
		if (!grown) {
			t->err = KVP_ERR_FULL;
			return;
		}
		t->buf = grown;
		t->cap = cap;
	}
	va_start(ap, fmt);
	t->len += (size_t)vsnprintf(t->buf + t->len, t->cap - t->len, fmt, ap);
	va_end(ap);
}

void kvp_text_free(struct kvp_text *t)
{
	free(t->buf);
	memset(t, 0, sizeof(*t));
}

/* family_name turns daemon.object.event_ns into kvpick_daemon_object_event_seconds. */
static double family_name(const struct kvp_ctr_info *info, char *out, size_t cap)
{
	double scale = 1;
	int n = snprintf(out, cap, "kvpick_%s", info->name);
	for (char *p = out; *p; p++)
		*p = *p == '.' ? '_' : *p;
	if (strcmp(info->unit, "ns") == 0) {
		if (n > 3 && strcmp(out + n - 3, "_ns") == 0)
			n -= 3;
		snprintf(out + n, cap - (size_t)n, "_seconds");
		scale = 1e-9;
	}
	return scale;
}

static void write_counter(struct kvp_text *t, const struct kvp_region *r, enum kvp_ctr id)
{
	const struct kvp_ctr_info *info = kvp_ctr_info(id);
	char name[160];
	double scale = family_name(info, name, sizeof(name));
	int is_counter = info->kind == KVP_CTR_KIND_COUNTER;
	uint64_t v = kvp_ctr_sum(&r->counters, id);
	kvp_text_add(t, "# HELP %s%s %s\n# TYPE %s%s %s\n", name, is_counter ? "_total" : "", info->help,
		name, is_counter ? "_total" : "", is_counter ? "counter" : "gauge");
	if (scale == 1)
		kvp_text_add(t, "%s%s %" PRIu64 "\n", name, is_counter ? "_total" : "", v);
	else
		kvp_text_add(t, "%s%s %.9g\n", name, is_counter ? "_total" : "", (double)v * scale);
}

static void write_hist(struct kvp_text *t, const struct kvp_region *r, enum kvp_hist id)
{
	const struct kvp_ctr_info *info = kvp_hist_info(id);
	struct kvp_hist_shm h;
	char name[160];
	double scale = family_name(info, name, sizeof(name));
	uint64_t below = 0;
	kvp_hist_sum(&r->counters, id, &h);
	kvp_text_add(t, "# HELP %s %s\n# TYPE %s histogram\n", name, info->help, name);
	for (int b = 0; b < KVP_HIST_BUCKETS; b++) {
		below += h.bucket[b];
		/* 1 us to 17 s is where durations lie; one line a power of two. */
		if (b >= 10 && b <= 34)
			kvp_text_add(t, "%s_bucket{le=\"%.9g\"} %" PRIu64 "\n", name,
				(double)((1ULL << b) - 1) * scale, below);
	}
	kvp_text_add(t, "%s_bucket{le=\"+Inf\"} %" PRIu64 "\n%s_sum %.9g\n%s_count %" PRIu64 "\n", name,
		below, name, (double)h.sum * scale, name, below);
}

static void write_node(struct kvp_text *t, const struct kvp_region *r)
{
	kvp_text_add(t, "# HELP kvpick_schedulable_workers workers that selections may choose\n"
			"# TYPE kvpick_schedulable_workers gauge\n");
	for (int i = 0; i < KVP_PART_ROLE_CNT; i++)
		kvp_text_add(t, "kvpick_schedulable_workers{role=\"%s\"} %" PRIu32 "\n", role_name[i],
			kvp_cat_schedulable_cnt(&r->cat, (enum kvp_part_role)i));
	kvp_text_add(t,
		"# HELP kvpick_build_info build of the region's creator\n# TYPE kvpick_build_info gauge\n"
		"kvpick_build_info{build=\"%.*s\"} 1\n",
		KVP_BUILD_ID_BYTES, r->super->build_id);
}

/* Families published under a name of their own: what happened to KV events. */
static void write_published(struct kvp_text *t, const struct kvp_region *r)
{
	static const struct {
		enum kvp_ctr id;
		const char *type, *status;
	} row[] = {
		{KVP_CTR_EV_STORED_OK, "stored", "ok"},
		{KVP_CTR_EV_STORED_PARENT, "stored", "parent_block_not_found"},
		{KVP_CTR_EV_STORED_INVALID, "stored", "invalid_block"},
		{KVP_CTR_EV_STORED_FULL, "stored", "capacity_exhausted"},
		{KVP_CTR_EV_REMOVED_OK, "removed", "ok"},
		{KVP_CTR_EV_REMOVED_NOTFOUND, "removed", "block_not_found"},
		{KVP_CTR_EV_CLEARED_OK, "cleared", "ok"},
	};
	static const char family[] = "dynamo_kvrouter_kv_cache_events_applied";
	kvp_text_add(t, "# HELP %s KV events by type and outcome\n# TYPE %s counter\n", family, family);
	for (size_t i = 0; i < sizeof(row) / sizeof(row[0]); i++)
		kvp_text_add(t, "%s{event_type=\"%s\",status=\"%s\"} %" PRIu64 "\n", family, row[i].type,
			row[i].status, kvp_ctr_sum(&r->counters, row[i].id));
	kvp_text_add(t,
		"# HELP dynamo_kvrouter_kv_cache_event_warnings KV events that changed nothing\n"
		"# TYPE dynamo_kvrouter_kv_cache_event_warnings counter\n"
		"dynamo_kvrouter_kv_cache_event_warnings{warning_kind=\"duplicate_store\"} %" PRIu64 "\n",
		kvp_ctr_sum(&r->counters, KVP_CTR_RADIX_DUPLICATE));
}

void kvp_text_label(const char *in, char *out, size_t cap)
{
	size_t n = 0;
	for (; *in && n + 3 < cap; in++) {
		if (*in == '\\' || *in == '"' || *in == '\n')
			out[n++] = '\\';
		out[n++] = *in == '\n' ? 'n' : *in;
	}
	out[n] = 0;
}

/* What the settings come to for each role. */
static void write_policies(struct kvp_text *t, const struct kvp_config *cfg)
{
	kvp_text_add(t, "# HELP kvpick_selection_policy_info policy that picks the ranks of a role\n"
			"# TYPE kvpick_selection_policy_info gauge\n");
	for (int i = 0; i < KVP_PART_ROLE_CNT; i++)
		kvp_text_add(t, "kvpick_selection_policy_info{role=\"%s\",policy=\"%s\"} 1\n",
			role_name[i],
			kvp_score_policy_name((enum kvp_score_policy)cfg->eff.policy[i]));
}

static void write_settings(struct kvp_text *t, const struct kvp_config *cfg)
{
	char value[1024], escaped[2048];
	int id = 0, at;
	kvp_text_add(t, "# HELP kvpick_setting_info effective settings\n# TYPE kvpick_setting_info gauge\n");
	while ((at = kvp_config_value_next(cfg, &id)) >= 0) {
		kvp_text_label(kvp_config_value(cfg, (enum kvp_config_id)at, value, sizeof(value)), escaped,
			sizeof(escaped));
		kvp_text_add(t, "kvpick_setting_info{name=\"%s\",value=\"%s\"} 1\n",
			kvp_config_name((enum kvp_config_id)at), escaped);
	}
}

void kvp_metrics_write(struct kvp_text *t, const struct kvp_region *r, const struct kvp_config *cfg)
{
	for (int i = 0; i < KVP_CTR_CNT; i++)
		write_counter(t, r, (enum kvp_ctr)i);
	for (int i = 0; i < KVP_HIST_CNT; i++)
		write_hist(t, r, (enum kvp_hist)i);
	write_published(t, r);
	write_node(t, r);
	if (cfg->eff.epp_on) {
		kvp_metrics_epp(t, r, cfg);
		kvp_metrics_node(t, r);
	}
	write_policies(t, cfg);
	write_settings(t, cfg);
}
