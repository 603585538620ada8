#include "daemons/ctl/ctl.h"

#include <inttypes.h>
#include <kvpick/clock.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <unistd.h>

#define WORKER_LINES 16 /* busiest workers shown on a screen */

struct sample {
	uint64_t at_ns;
	uint64_t ctr[KVP_CTR_CNT];
	struct kvp_hist_shm hist[KVP_HIST_CNT];
};

static volatile sig_atomic_t stop_asked;

static void on_stop(int sig)
{
	(void)sig;
	stop_asked = 1;
}

static void take(const struct kvp_region *r, struct sample *s)
{
	s->at_ns = kvp_clock_mono_ns();
	for (int i = 0; i < KVP_CTR_CNT; i++)
		s->ctr[i] = kvp_ctr_sum(&r->counters, (enum kvp_ctr)i);
	for (int i = 0; i < KVP_HIST_CNT; i++)
		kvp_hist_sum(&r->counters, (enum kvp_hist)i, &s->hist[i]);
}

static uint64_t minus(uint64_t a, uint64_t b)
{
	return a > b ? a - b : 0;
}

/* between makes the histogram of what happened between two samples; answers the number of values. */
static uint64_t between(const struct kvp_hist_shm *a, const struct kvp_hist_shm *b, struct kvp_hist_shm *d)
{
	uint64_t n = 0;
	for (int i = 0; i < KVP_HIST_BUCKETS; i++)
		n += d->bucket[i] = minus(b->bucket[i], a->bucket[i]);
	d->sum = minus(b->sum, a->sum);
	return n;
}

static void show_counters(struct ctl *c, const struct sample *a, const struct sample *b)
{
	static const char *const col[] = {"counter", "total", "per_second", "unit"};
	double dt = (double)(b->at_ns - a->at_ns) / 1e9;
	struct ctl_tab t;
	ctl_tab_begin(&t, c, "counters", 4, col);
	for (int i = 0; i < KVP_CTR_CNT; i++) {
		const struct kvp_ctr_info *info = kvp_ctr_info((enum kvp_ctr)i);
		if (b->ctr[i] == 0 && c->form == CTL_TEXT)
			continue;
		ctl_tab_str(&t, info->name);
		ctl_tab_u64(&t, b->ctr[i]);
		if (info->kind == KVP_CTR_KIND_COUNTER && dt > 0)
			ctl_tab_f64(&t, (double)minus(b->ctr[i], a->ctr[i]) / dt);
		else
			ctl_tab_none(&t);
		ctl_tab_str(&t, info->unit);
	}
	ctl_tab_end(&t);
}

static void show_latencies(struct ctl *c, const struct sample *a, const struct sample *b)
{
	static const char *const col[] = {"latency", "count", "mean_us", "p50_us", "p99_us", "p999_us"};
	struct ctl_tab t;
	ctl_tab_begin(&t, c, "latencies", 6, col);
	for (int i = 0; i < KVP_HIST_CNT; i++) {
		struct kvp_hist_shm d;
		uint64_t n = between(&a->hist[i], &b->hist[i], &d);
		ctl_tab_str(&t, kvp_hist_info((enum kvp_hist)i)->name);
		ctl_tab_u64(&t, n);
		ctl_tab_f64(&t, n ? (double)d.sum / (double)n / 1e3 : 0);
		ctl_tab_f64(&t, (double)kvp_hist_quantile(&d, 0.5) / 1e3);
		ctl_tab_f64(&t, (double)kvp_hist_quantile(&d, 0.99) / 1e3);
		ctl_tab_f64(&t, (double)kvp_hist_quantile(&d, 0.999) / 1e3);
	}
	ctl_tab_end(&t);
}

struct busy {
	uint64_t worker_id, prefill_tok, blocks;
	uint32_t dp_rank, requests, rank_slot;
};

static int by_load(const void *x, const void *y)
{
	const struct busy *a = x, *b = y;
	if (a->requests != b->requests)
		return a->requests < b->requests ? 1 : -1;
	if (a->prefill_tok != b->prefill_tok)
		return a->prefill_tok < b->prefill_tok ? 1 : -1;
	return a->rank_slot < b->rank_slot ? -1 : a->rank_slot > b->rank_slot;
}

static void show_ranks(struct ctl *c)
{
	static const char *const col[] = {
		"worker_id", "dp_rank", "rank_slot", "requests", "prefill_tokens", "blocks"};
	struct kvp_region *r = c->region;
	struct busy *b = calloc(r->geom.rank_max, sizeof(*b));
	struct ctl_tab t;
	size_t n = 0;
	ctl_tab_begin(&t, c, "ranks", 6, col);
	for (uint32_t i = 0; b && i < r->geom.rank_max; i++) {
		struct kvp_cat_rank_info ri;
		struct kvp_load l;
		if (kvp_cat_rank_info(&r->cat, i, &ri) != KVP_OK)
			continue;
		kvp_load_read(&r->book, i, &l);
		b[n++] = (struct busy){.worker_id = ri.worker_id,
			.dp_rank = ri.dp_rank,
			.rank_slot = i,
			.requests = l.requests,
			.prefill_tok = l.prefill_tok,
			.blocks = kvp_load_blocks(&l)};
	}
	if (n)
		qsort(b, n, sizeof(*b), by_load);
	uint64_t show = c->limit != UINT64_MAX ? c->limit : c->form == CTL_TEXT ? WORKER_LINES : UINT64_MAX;
	for (size_t i = 0; i < n && i < show; i++) {
		ctl_tab_u64(&t, b[i].worker_id);
		ctl_tab_u64(&t, b[i].dp_rank);
		ctl_tab_u64(&t, b[i].rank_slot);
		ctl_tab_u64(&t, b[i].requests);
		ctl_tab_u64(&t, b[i].prefill_tok);
		ctl_tab_u64(&t, b[i].blocks);
	}
	free(b);
	ctl_tab_end(&t);
}

static void screen(struct ctl *c, const struct sample *a, const struct sample *b)
{
	if (c->form == CTL_TEXT) {
		char now[32];
		ctl_time(kvp_clock_real_ns(), now);
		if (!c->once && isatty(STDOUT_FILENO))
			fputs("\033[H\033[2J", stdout);
		printf("kvpick %s  %s  workers %u  bookings %" PRIu64 "  index %s\n\n", c->cfg->instance, now,
			kvp_cat_schedulable_cnt(&c->region->cat, KVP_PART_AGGREGATED) +
				kvp_cat_schedulable_cnt(&c->region->cat, KVP_PART_PREFILL) +
				kvp_cat_schedulable_cnt(&c->region->cat, KVP_PART_DECODE),
			kvp_resv_cnt(&c->region->book),
			kvp_radix_ready(&c->region->radix) ? "ready" : "not ready");
	}
	show_latencies(c, a, b);
	if (c->form == CTL_TEXT)
		putchar('\n');
	show_ranks(c);
	if (c->form == CTL_TEXT)
		putchar('\n');
	show_counters(c, a, b);
	if (c->form == CTL_JSON) { /* one object a turn */
		ctl_doc_end(c);
		ctl_doc_begin(c);
	}
	fflush(stdout);
}

/* same_region follows the node into a new region: KVP_OK the same, KVP_ERR_AGAIN another (mapped now), else
 * the node is gone. */
static int same_region(struct ctl *c)
{
	struct kvp_attach at;
	int rc = kvp_boot_attach(c->cfg->run_dir, c->cfg->instance, c->timeout_ms, &at);
	if (rc)
		return rc;
	int same = at.region_gen == c->at.region_gen;
	kvp_boot_detach(&at);
	if (same)
		return KVP_OK;
	ctl_detach(c);
	return ctl_attach(c) ? KVP_ERR_CLOSED : KVP_ERR_AGAIN;
}

int ctl_top(struct ctl *c)
{
	struct sample *s = calloc(2, sizeof(*s));
	int code = KVP_EXIT_OK, cur = 0;
	struct sigaction sa = {.sa_handler = on_stop};
	if (!s) {
		fputs("kvpickctl: no memory\n", stderr);
		return KVP_EXIT_DEPEND;
	}
	sigaction(SIGINT, &sa, NULL);
	sigaction(SIGTERM, &sa, NULL);
	take(c->region, &s[0]);
	while (!stop_asked) {
		poll(NULL, 0, (int)c->interval_ms);
		int rc = stop_asked ? KVP_ERR_CLOSED : same_region(c);
		if (rc == KVP_ERR_AGAIN) {
			take(c->region, &s[cur]);
			continue;
		}
		if (rc) {
			if (!stop_asked)
				fputs("kvpickctl: the node is gone\n", stderr);
			code = stop_asked ? KVP_EXIT_OK : KVP_EXIT_AGAIN;
			break;
		}
		take(c->region, &s[!cur]);
		screen(c, &s[cur], &s[!cur]);
		cur = !cur;
		if (c->once || ferror(stdout))
			break;
	}
	free(s);
	return code;
}
