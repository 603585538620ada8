/* GET /status: the node at a glance, of every role. JSON; a browser gets a page that fetches it. */
#include "daemons/httpd/httpd.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <kvpick/version.h>

#define ERRORS_MAX 20 /* latest ones */

static const char page[] =
	"<!DOCTYPE html><html><head><meta charset=\"utf-8\"><title>kvpick</title><style>"
	"body{font:14px sans-serif;margin:1.5em}table{border-collapse:collapse;margin:.3em 0 1em}"
	"td,th{border:1px solid #bbb;padding:.2em .6em;text-align:left}th{background:#eee}"
	"</style></head><body><h1>kvpick</h1><div id=\"at\">no answer yet</div><script>\n"
	"function el(n,t){var e=document.createElement(n);if(t!==undefined)e.textContent=t;return e}\n"
	"function text(v){return v===null?'':typeof v==='object'?JSON.stringify(v):String(v)}\n"
	"function table(rows){var t=el('table'),h=el('tr');\n"
	" if(!rows.length)return el('p','none');\n"
	" Object.keys(rows[0]).forEach(function(k){h.appendChild(el('th',k))});t.appendChild(h);\n"
	" rows.forEach(function(r){var tr=el('tr');Object.keys(r).forEach(function(k){\n"
	"  tr.appendChild(el('td',text(r[k])))});t.appendChild(tr)});return t}\n"
	"function show(d){var to=el('div'),top={};\n"
	" Object.keys(d).forEach(function(k){if(typeof "
	"d[k]!=='object')top[k]=d[k]});to.appendChild(table([top]));\n"
	" Object.keys(d).forEach(function(k){var v=d[k];if(typeof v!=='object')return;\n"
	"  to.appendChild(el('h3',k));if(!Array.isArray(v))v=[v];\n"
	"  to.appendChild(table(v.map(function(x){return typeof x==='object'?x:{value:x}})))});\n"
	" var at=document.getElementById('at');at.replaceWith(to);to.id='at'}\n"
	"function go(){fetch('/status?format=json').then(function(r){return r.json()}).then(show)\n"
	" .catch(function(e){document.getElementById('at').textContent=String(e)})\n"
	" .then(function(){setTimeout(go,2000)})}\ngo()</script></body></html>\n";

static const char *role_name(enum kvp_part_role r)
{
	static const char *const name[KVP_PART_ROLE_CNT] = {"aggregated", "prefill", "decode"};
	return (unsigned)r < KVP_PART_ROLE_CNT ? name[r] : "?";
}

static void node(struct kvp_httpd *h, struct kvp_jw *w)
{
	const struct kvp_super_shm *s = h->boot.region->super;
	char gen[24];
	uint64_t now = kvp_clock_mono_ns();
	snprintf(gen, sizeof(gen), "%016" PRIx64, s->geom.region_gen);
	kvp_jw_kstr(w, "instance", h->boot.node);
	kvp_jw_kstr(w, "version", KVPICK_VERSION);
	kvp_jw_kstr(w, "generation", gen);
	kvp_jw_ku64(w, "uptime_ms", now > s->created_mono_ns ? (now - s->created_mono_ns) / 1000000 : 0);
	kvp_jw_kbool(w, "ready", kvp_httpd_ready(h));
	kvp_jw_ku64(w, "answered_by", h->boot.instance);
}

static void tree(struct kvp_httpd *h, struct kvp_jw *w)
{
	struct kvp_radix_stats st;
	kvp_radix_stats(&h->boot.region->radix, &st);
	kvp_jw_key(w, "index");
	kvp_jw_obj(w);
	kvp_jw_kbool(w, "ready", (int)st.ready);
	kvp_jw_ku64(w, "blocks", st.blocks);
	kvp_jw_ku64(w, "max_blocks", st.block_max);
	kvp_jw_ku64(w, "lower_tier_blocks", st.low_blocks);
	kvp_jw_ku64(w, "runs", st.runs);
	kvp_jw_ku64(w, "generation", st.generation);
	kvp_jw_ku64(w, "unmatched_partitions",
		kvp_ctr_sum(&h->boot.region->counters, KVP_CTR_IDX_UNMATCHED));
	kvp_jw_end(w);
}

static void recovery(struct kvp_httpd *h, struct kvp_jw *w)
{
	struct kvp_recov_info i;
	kvp_recov_get(&h->boot.region->recov, &i);
	uint64_t end = i.ended_ns ? i.ended_ns : kvp_clock_mono_ns();
	kvp_jw_key(w, "recovery");
	kvp_jw_obj(w);
	kvp_jw_kstr(w, "state", kvp_recov_name(i.state));
	kvp_jw_ku64(w, "attempts", i.attempts);
	kvp_jw_ku64(w, "blocks", i.blocks);
	kvp_jw_ku64(w, "ms", i.state == KVP_RECOV_NONE ? 0 : (end - i.begun_ns) / 1000000);
	kvp_jw_end(w);
}

static void processes(struct kvp_httpd *h, struct kvp_jw *w)
{
	const struct kvp_slots *s = h->boot.slots;
	uint64_t now = kvp_clock_mono_ns() / 1000000;
	kvp_jw_key(w, "processes");
	kvp_jw_arr(w);
	for (uint32_t i = 0; i < s->slot_max; i++) {
		const struct kvp_slot_shm *p = &s->slot[i];
		uint64_t beat = kvp_ld_rlx_u64(&p->beat_ms), start = kvp_ld_rlx_u64(&p->start_ms);
		if (kvp_ld_acq_u32(&p->state) != KVP_SLOT_ACTIVE)
			continue;
		kvp_jw_obj(w);
		kvp_jw_kstr(w, "role", kvp_role_name((enum kvp_role)kvp_ld_rlx_u32(&p->role)));
		kvp_jw_ku64(w, "instance", kvp_ld_rlx_u32(&p->instance));
		kvp_jw_ku64(w, "pid", kvp_ld_rlx_u32(&p->pid));
		kvp_jw_kstr(w, "state", kvp_ctl_name(kvp_slot_control_get(s, i)));
		kvp_jw_ku64(w, "uptime_ms", now > start ? now - start : 0);
		kvp_jw_ku64(w, "beat_age_ms", now > beat ? now - beat : 0);
		kvp_jw_ku64(w, "starts",
			kvp_ld_rlx_u64(&h->boot.region->counters.column[i].val[KVP_CTR_PROC_STARTED]));
		kvp_jw_end(w);
	}
	kvp_jw_end(w);
}

struct sum {
	uint64_t ranks, indexed, prefill_tok, blocks, requests;
};

static const char *policy_name(const struct kvp_httpd *h, enum kvp_part_role role)
{
	return kvp_score_policy_name((enum kvp_score_policy)h->boot.config->eff.policy[role]);
}

static void partitions(struct kvp_httpd *h, struct kvp_jw *w, const struct sum *sum)
{
	const struct kvp_cat *cat = &h->boot.region->cat;
	struct kvp_part_info p;
	kvp_jw_key(w, "partitions");
	kvp_jw_arr(w);
	for (uint32_t i = 0; i < KVP_PART_MAX && kvp_cat_part_info(cat, i, &p) == KVP_OK; i++) {
		struct kvp_cat_view v;
		uint64_t waiting = 0, waiting_isl = 0;
		uint32_t workers = kvp_cat_view_begin(cat, i, &v) == KVP_OK ? v.worker_cnt : 0;
		kvp_jw_obj(w);
		kvp_jw_kstr(w, "role", role_name(p.role));
		kvp_jw_key(w, "model_name");
		kvp_jw_strn(w, p.model, p.model_len);
		kvp_jw_key(w, "routing_group");
		kvp_jw_strn(w, p.group, p.group_len);
		kvp_jw_ku64(w, "block_size", p.block_size);
		kvp_jw_kstr(w, "selection_policy", policy_name(h, p.role));
		kvp_jw_ku64(w, "schedulable_workers", workers);
		kvp_jw_ku64(w, "ranks", sum[i].ranks);
		kvp_jw_ku64(w, "indexed_ranks", sum[i].indexed);
		kvp_jw_ku64(w, "active_requests", sum[i].requests);
		kvp_jw_ku64(w, "active_prefill_tokens", sum[i].prefill_tok);
		kvp_jw_ku64(w, "active_decode_blocks", sum[i].blocks);
		kvp_selection_waiting(h->selection, p.role, (struct kvp_str){p.model, p.model_len},
			(struct kvp_str){p.group, p.group_len}, &waiting, &waiting_isl);
		kvp_jw_ku64(w, "waiting_requests", waiting);
		kvp_jw_ku64(w, "waiting_isl_tokens", waiting_isl);
		kvp_jw_end(w);
	}
	kvp_jw_end(w);
}

/* Loads of all ranks in use, by partition; 0 = no memory. */
static int loads(struct kvp_httpd *h, struct kvp_jw *w)
{
	const struct kvp_region *r = h->boot.region;
	struct sum *sum = calloc(KVP_PART_MAX, sizeof(*sum));
	for (uint32_t i = 0; sum && i < r->geom.rank_max; i++) {
		struct kvp_cat_rank_info ri;
		struct kvp_load l;
		if (kvp_cat_rank_info(&r->cat, i, &ri) != KVP_OK || ri.part >= KVP_PART_MAX)
			continue;
		kvp_load_read(&r->book, i, &l);
		sum[ri.part].ranks++;
		sum[ri.part].indexed += ri.index_slot != KVP_INDEX_NONE;
		sum[ri.part].prefill_tok += l.prefill_tok;
		sum[ri.part].blocks += kvp_load_blocks(&l);
		sum[ri.part].requests += l.requests;
	}
	if (sum)
		partitions(h, w, sum);
	free(sum);
	return sum != NULL;
}

static void workers(struct kvp_httpd *h, struct kvp_jw *w, struct kvp_cat_worker_info *info)
{
	static const char *const name[] = {"incomplete", "schedulable", "draining", "unschedulable"};
	uint64_t cnt[4] = {0};
	const struct kvp_cat *cat = &h->boot.region->cat;
	for (uint32_t i = 0; i < kvp_cat_worker_max(cat); i++)
		if (kvp_cat_worker_info(cat, i, info) == KVP_OK && (unsigned)info->lifecycle < 4)
			cnt[info->lifecycle]++;
	kvp_jw_key(w, "workers");
	kvp_jw_obj(w);
	for (int i = 0; i < 4; i++)
		kvp_jw_ku64(w, name[i], cnt[i]);
	kvp_jw_ku64(w, "most_schedulable", kvp_cat_most_schedulable(cat));
	kvp_jw_ku64(w, "wanted_before_ready", h->boot.config->min_initial_workers);
	kvp_jw_end(w);
}

static int by_last(const void *a, const void *b)
{
	const struct kvp_errlog_entry *x = a, *y = b;
	return (x->last_ns < y->last_ns) - (x->last_ns > y->last_ns);
}

static int errors(struct kvp_httpd *h, struct kvp_jw *w)
{
	struct kvp_errlog_entry *e = malloc(sizeof(*e) * KVP_ERRLOG_MAX);
	uint64_t now = kvp_clock_real_ns();
	size_t n = 0;
	for (uint32_t i = 0; e && i < KVP_ERRLOG_MAX; i++)
		n += kvp_errlog_get(&h->boot.region->errlog, i, &e[n]) == KVP_OK;
	if (!e)
		return 0;
	qsort(e, n, sizeof(*e), by_last);
	kvp_jw_key(w, "errors");
	kvp_jw_arr(w);
	for (size_t i = 0; i < n && i < ERRORS_MAX; i++) {
		char place[sizeof(e->module) + 16];
		snprintf(place, sizeof(place), "%s:%u", e[i].module, e[i].line);
		kvp_jw_obj(w);
		kvp_jw_ku64(w, "count", e[i].cnt);
		kvp_jw_ku64(w, "last_s_ago", now > e[i].last_ns ? (now - e[i].last_ns) / 1000000000 : 0);
		kvp_jw_kstr(w, "error", kvp_strerror(e[i].code));
		kvp_jw_kstr(w, "place", place);
		kvp_jw_kstr(w, "text", e[i].text);
		kvp_jw_end(w);
	}
	kvp_jw_end(w);
	free(e);
	return 1;
}

/* 1 if the client is a browser that did not ask for JSON. */
static int wants_page(const struct kvp_http_req *r)
{
	char form[8];
	size_t len;
	uint32_t n = 0;
	const char *accept = kvp_http_req_header(r, "accept", &n);
	if (kvp_query_get(r, "format", form, sizeof(form), &len) > 0)
		return len == 4 && memcmp(form, "html", 4) == 0;
	return accept && memmem(accept, n, "text/html", 9) != NULL;
}

void kvp_route_status(struct kvp_call *c)
{
	struct kvp_httpd *h = c->h;
	struct kvp_jw *w = &h->out;
	if (wants_page(c->req)) {
		kvp_http_reply(c->req, 200, "text/html; charset=utf-8", page, sizeof(page) - 1);
		return;
	}
	struct kvp_cat_worker_info *info = malloc(sizeof(*info));
	kvp_jw_reset(w);
	kvp_jw_obj(w);
	node(h, w);
	tree(h, w);
	recovery(h, w);
	int good = info && loads(h, w);
	if (good)
		workers(h, w, info);
	processes(h, w);
	kvp_jw_key(w, "replica_peers");
	kvp_peer_list(h);
	good = good && errors(h, w);
	kvp_jw_end(w);
	free(info);
	if (good)
		kvp_reply_json(c, 200);
	else
		kvp_reply_error(c, 500, "out of memory");
}

void kvp_status_redirect(struct kvp_call *c)
{
	kvp_http_reply_extra(c->req, 302, NULL, "Location: /status\r\n", "", 0);
}
