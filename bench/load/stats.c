/* bench/load/stats.c — see stats.h. */
#include "bench/load/stats.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define NS 1e-9

static const char *const policy_name[KVP_POLICY_CNT] = {"kv", "round-robin", "random", "least-loaded",
	"least-work"};

const char *kvp_policy_name(enum kvp_policy p)
{
	return policy_name[p];
}

int kvp_policy_parse(const char *s, size_t len)
{
	for (int p = 0; p < KVP_POLICY_CNT; p++)
		if (len == strlen(policy_name[p]) && !memcmp(s, policy_name[p], len))
			return p;
	return -1;
}

void kvp_sample_add(struct kvp_sample *s, double v)
{
	if (s->cnt == s->max) {
		size_t max = s->max ? 2 * s->max : 1024;
		double *p = realloc(s->val, max * sizeof(*p));
		if (!p)
			return;
		s->val = p;
		s->max = max;
	}
	s->val[s->cnt++] = v;
	s->is_sorted = 0;
}

double kvp_sample_mean(const struct kvp_sample *s)
{
	double sum = 0;
	for (size_t i = 0; i < s->cnt; i++)
		sum += s->val[i];
	return s->cnt ? sum / (double)s->cnt : 0;
}

static int cmp_double(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;
	return (x > y) - (x < y);
}

double kvp_sample_pct(struct kvp_sample *s, double share)
{
	if (!s->cnt)
		return 0;
	if (!s->is_sorted)
		qsort(s->val, s->cnt, sizeof(*s->val), cmp_double);
	s->is_sorted = 1;
	double rank = ceil(share * (double)s->cnt);
	return s->val[rank < 1 ? 0 : (size_t)rank - 1];
}

void kvp_stats_finished(struct kvp_run_stats *s, uint64_t arrival_ns, uint64_t first_ns, uint64_t finish_ns,
	uint64_t prompt_tok, uint64_t cached_tok, uint64_t out_tok)
{
	s->done_cnt++;
	s->prompt_tok += prompt_tok;
	s->cached_tok += cached_tok;
	s->out_tok += out_tok;
	kvp_sample_add(&s->ttft_s, (double)(first_ns - arrival_ns) * NS);
	if (out_tok > 1)
		kvp_sample_add(&s->tpot_s, (double)(finish_ns - first_ns) * NS / (double)(out_tok - 1));
}

void kvp_stats_free(struct kvp_run_stats *s)
{
	free(s->ttft_s.val);
	free(s->tpot_s.val);
	free(s->select_s.val);
	*s = (struct kvp_run_stats){0};
}

/* One row of the table: what it is called, how to get it. */
struct row {
	const char *label, *json;
	int decimals;
	double (*get)(struct kvp_run_stats *s);
};

static double get_sent(struct kvp_run_stats *s)
{
	return (double)s->sent_cnt;
}
static double get_done(struct kvp_run_stats *s)
{
	return (double)s->done_cnt;
}
static double get_errors(struct kvp_run_stats *s)
{
	return (double)s->error_cnt;
}
static double get_hit(struct kvp_run_stats *s)
{
	return s->prompt_tok ? (double)s->cached_tok / (double)s->prompt_tok : 0;
}
static double get_prefilled(struct kvp_run_stats *s)
{
	return (double)(s->prompt_tok - s->cached_tok);
}
static double get_ttft_mean(struct kvp_run_stats *s)
{
	return kvp_sample_mean(&s->ttft_s);
}
static double get_ttft_p50(struct kvp_run_stats *s)
{
	return kvp_sample_pct(&s->ttft_s, 0.50);
}
static double get_ttft_p99(struct kvp_run_stats *s)
{
	return kvp_sample_pct(&s->ttft_s, 0.99);
}
static double get_tpot_mean(struct kvp_run_stats *s)
{
	return kvp_sample_mean(&s->tpot_s) * 1e3;
}
static double get_tpot_p50(struct kvp_run_stats *s)
{
	return kvp_sample_pct(&s->tpot_s, 0.50) * 1e3;
}
static double get_tpot_p99(struct kvp_run_stats *s)
{
	return kvp_sample_pct(&s->tpot_s, 0.99) * 1e3;
}
static double get_select_p50(struct kvp_run_stats *s)
{
	return kvp_sample_pct(&s->select_s, 0.50) * 1e6;
}
static double get_select_p99(struct kvp_run_stats *s)
{
	return kvp_sample_pct(&s->select_s, 0.99) * 1e6;
}
static double get_rate(struct kvp_run_stats *s)
{
	return s->virtual_s > 0 ? (double)s->done_cnt / s->virtual_s : 0;
}
static double get_wall(struct kvp_run_stats *s)
{
	return s->wall_s;
}

static const struct row rows[] = {
	{"requests sent", "sent", 0, get_sent},
	{"requests finished", "finished", 0, get_done},
	{"errors", "errors", 0, get_errors},
	{"prefix hit rate", "hit_rate", 4, get_hit},
	{"prefilled tokens", "prefilled_tokens", 0, get_prefilled},
	{"TTFT mean, s", "ttft_mean_s", 3, get_ttft_mean},
	{"TTFT p50, s", "ttft_p50_s", 3, get_ttft_p50},
	{"TTFT p99, s", "ttft_p99_s", 3, get_ttft_p99},
	{"TPOT mean, ms", "tpot_mean_ms", 2, get_tpot_mean},
	{"TPOT p50, ms", "tpot_p50_ms", 2, get_tpot_p50},
	{"TPOT p99, ms", "tpot_p99_ms", 2, get_tpot_p99},
	{"selection p50, us wall", "select_p50_us", 0, get_select_p50},
	{"selection p99, us wall", "select_p99_us", 0, get_select_p99},
	{"requests/s, virtual", "requests_s", 2, get_rate},
	{"run time, s wall", "wall_s", 1, get_wall},
};
#define ROW_CNT (sizeof(rows) / sizeof(rows[0]))

void kvp_stats_table(FILE *f, struct kvp_run_stats *run, size_t run_cnt)
{
	fprintf(f, "\n%-24s", "");
	for (size_t i = 0; i < run_cnt; i++)
		fprintf(f, "%14s", run[i].name);
	fprintf(f, "%s\n", run_cnt == 2 ? "     ratio" : "");
	for (size_t r = 0; r < ROW_CNT; r++) {
		double v[2] = {0, 0};
		fprintf(f, "%-24s", rows[r].label);
		for (size_t i = 0; i < run_cnt; i++) {
			double x = rows[r].get(&run[i]);
			if (i < 2)
				v[i] = x;
			fprintf(f, "%14.*f", rows[r].decimals, x);
		}
		if (run_cnt == 2 && v[0] != 0 && v[1] != 0)
			fprintf(f, "%10.3f", v[0] / v[1]);
		fputc('\n', f);
	}
	fputc('\n', f);
	fflush(f);
}

void kvp_stats_json(FILE *f, struct kvp_run_stats *run, size_t run_cnt)
{
	fprintf(f, "{\"runs\":[");
	for (size_t i = 0; i < run_cnt; i++) {
		fprintf(f, "%s{\"policy\":\"%s\"", i ? "," : "", run[i].name);
		for (size_t r = 0; r < ROW_CNT; r++)
			fprintf(f, ",\"%s\":%.9g", rows[r].json, rows[r].get(&run[i]));
		fputc('}', f);
	}
	fprintf(f, "]}\n");
	fflush(f);
}
