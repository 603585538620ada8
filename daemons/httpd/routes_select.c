#include "daemons/httpd/httpd.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

static void key_str(struct kvp_jw *w, const char *key, struct kvp_str s)
{
	kvp_jw_key(w, key);
	kvp_jw_strn(w, s.ptr ? s.ptr : "", s.ptr ? s.len : 0);
}

static void write_overlap(struct kvp_jw *w, const struct kvp_overlap_summary *o)
{
	char rank[16];
	kvp_jw_key(w, "overlap");
	kvp_jw_obj(w);
	kvp_jw_ku64(w, "longest_matched", o->longest_matched_tok);
	kvp_jw_ku64(w, "gpu", o->gpu_tok);
	kvp_jw_key(w, "dp");
	kvp_jw_obj(w);
	for (uint32_t i = 0; i < o->dp_cnt; i++) {
		snprintf(rank, sizeof(rank), "%" PRIu32, o->dp_rank[i]);
		kvp_jw_ku64(w, rank, o->dp_tok[i]);
	}
	kvp_jw_end(w);
	kvp_jw_ku64(w, "cpu", o->cpu_tok);
	kvp_jw_ku64(w, "disk", o->disk_tok);
	kvp_jw_end(w);
}

static void write_worker_load(struct kvp_jw *w, const struct kvp_worker_load *l)
{
	kvp_jw_key(w, "worker_load");
	kvp_jw_obj(w);
	kvp_jw_ku64(w, "active_prefill_tokens", l->active_prefill_tok);
	kvp_jw_ku64(w, "prefill_token_capacity", l->prefill_capacity_tok);
	if (l->total_kv_blocks)
		kvp_jw_ku64(w, "total_kv_blocks", l->total_kv_blocks);
	if (l->prefill_busy != KVP_UNSET)
		kvp_jw_kbool(w, "prefill_busy", l->prefill_busy == KVP_YES);
	kvp_jw_end(w);
}

/* Most clients send the hashes themselves: their digits are copied. An answer that had to wait has hashes of
 * its own. */
static void write_hashes(struct kvp_httpd *h, const struct kvp_select_answer *a)
{
	struct kvp_str text = kvp_parse_seq_text(&h->parse, a->seq_hash, a->seq_cnt);
	kvp_jw_key(&h->out, "sequence_hashes");
	if (text.ptr)
		kvp_jw_raw(&h->out, text.ptr, text.len);
	else
		kvp_jw_i64s(&h->out, (const int64_t *)a->seq_hash, a->seq_cnt);
}

static void write_selection(struct kvp_httpd *h, struct kvp_str model, struct kvp_str group,
	const struct kvp_select_answer *a, enum kvp_select_kind kind)
{
	struct kvp_jw *w = &h->out;
	kvp_jw_reset(w);
	kvp_jw_obj(w);
	if (a->selection_id.ptr)
		key_str(w, "selection_id", a->selection_id);
	if (kind == KVP_SELECT_AND_RESERVE) {
		write_hashes(h, a);
		kvp_jw_ku64(w, "isl_tokens", a->isl_tok);
		kvp_jw_kbool(w, "track_prefill_tokens", a->track_prefill_tokens == KVP_YES);
	}
	key_str(w, "model_name", model);
	key_str(w, "routing_group", group);
	kvp_jw_ku64(w, "worker_id", a->worker_id);
	kvp_jw_ku64(w, "dp_rank", a->dp_rank);
	kvp_jw_kstr(w, "endpoint", a->endpoint);
	kvp_jw_ku64(w, "block_size", a->block_size);
	write_overlap(w, &a->overlap);
	kvp_jw_ku64(w, "effective_prefill_tokens", a->effective_prefill_tok);
	kvp_jw_ku64(w, "potential_decode_blocks", a->potential_decode_blk);
	if (a->decode_busy != KVP_UNSET)
		kvp_jw_kbool(w, "decode_busy", a->decode_busy == KVP_YES);
	if (a->worker_load.given == KVP_YES)
		write_worker_load(w, &a->worker_load);
	kvp_jw_end(w);
}

static int refuse_when_draining(struct kvp_call *c)
{
	if (!c->h->draining)
		return 0;
	kvp_reply_error(c, 503, "selection service is shutting down");
	return 1;
}

/* reply_refusal says which limit of the queue refused a request. */
static void reply_refusal(struct kvp_call *c, int status, const struct kvp_select_refusal *r)
{
	struct kvp_jw *w = &c->h->out;
	kvp_ctr_add(c->h->boot.ctr, KVP_CTR_HTTP_CLIENT_ERROR, 1);
	kvp_jw_reset(w);
	kvp_jw_obj(w);
	kvp_jw_key(w, "error");
	kvp_jw_strn(w, kvp_selection_error(c->h->selection), kvp_selection_error_len(c->h->selection));
	kvp_jw_key(w, "details");
	kvp_jw_obj(w);
	kvp_jw_kstr(w, "policy_class", r->policy_class);
	kvp_jw_kstr(w, "limit_kind", r->limit_kind);
	kvp_jw_ku64(w, "current", r->current);
	kvp_jw_ku64(w, "limit", r->limit);
	kvp_jw_end(w);
	kvp_jw_end(w);
	kvp_reply_json(c, status);
}

void kvp_reply_selection(struct kvp_call *c, int status, struct kvp_str model, struct kvp_str group,
	const struct kvp_select_answer *a, enum kvp_select_kind kind)
{
	struct kvp_httpd *h = c->h;
	const struct kvp_select_refusal *refusal = status == 200 ? NULL : kvp_selection_refusal(h->selection);
	if (refusal) {
		reply_refusal(c, status, refusal);
	} else if (status != 200) {
		kvp_reply_refused(c, status);
	} else {
		write_selection(h, model, group, a, kind);
		if (kind == KVP_SELECT_AND_RESERVE && kvp_httpd_hint_begin(c, a))
			return;
		if (kind == KVP_SELECT_AND_RESERVE)
			kvp_httpd_tag_booking(c, a->booking);
		kvp_reply_json(c, 200);
	}
}

static struct kvp_str policy_class(const struct kvp_http_req *r)
{
	uint32_t len = 0;
	const char *v = kvp_http_req_header(r, "x-dynamo-meta-policy-class", &len);
	while (v && len && (*v == ' ' || *v == '\t')) {
		v++;
		len--;
	}
	while (v && len && (v[len - 1] == ' ' || v[len - 1] == '\t'))
		len--;
	return (struct kvp_str){len ? v : NULL, len};
}

static void select_any(struct kvp_call *c, enum kvp_select_kind kind)
{
	struct kvp_httpd *h = c->h;
	struct kvp_select_request q;
	struct kvp_select_answer a;
	uint64_t ticket = 0;
	int status = kvp_parse_select(&h->parse, &q);
	if (status) {
		kvp_reply_error(c, status, h->parse.err);
		return;
	}
	if (refuse_when_draining(c))
		return;
	q.policy_class = policy_class(c->req);
	if (c->since_ns && kvp_clock_mono_ns() - c->since_ns > KVP_AFFINITY_WAIT_NS)
		q.no_wait = KVP_YES;
	status = kvp_selection_submit(h->selection, &q, kind, &a, &ticket);
	if (status == KVP_SELECTION_WAIT)
		kvp_httpd_park(c);
	else if (status == KVP_SELECT_WAITS)
		kvp_httpd_wait_add(c, kind, ticket);
	else
		kvp_reply_selection(c, status, q.model, q.group, &a, kind);
}

void kvp_route_select(struct kvp_call *c)
{
	select_any(c, KVP_SELECT_ONLY);
}

void kvp_route_select_and_reserve(struct kvp_call *c)
{
	select_any(c, KVP_SELECT_AND_RESERVE);
}

void kvp_route_reserve(struct kvp_call *c)
{
	struct kvp_httpd *h = c->h;
	struct kvp_reserve_request q;
	struct kvp_select_answer a;
	enum kvp_tristate has_worker;
	int status = kvp_parse_reserve(&h->parse, &q, &has_worker);
	if (status) {
		kvp_reply_error(c, status, h->parse.err);
		return;
	}
	if (refuse_when_draining(c))
		return;
	status = has_worker == KVP_YES ? kvp_selection_reserve(h->selection, &q, &a)
				       : kvp_selection_replay(h->selection, KVP_PART_AGGREGATED, q.model,
						 q.group, q.selection_id, &a);
	if (status != 201) {
		kvp_reply_refused(c, status);
		return;
	}
	struct kvp_jw *w = &h->out;
	kvp_jw_reset(w);
	kvp_jw_obj(w);
	key_str(w, "selection_id", q.selection_id);
	key_str(w, "model_name", q.model);
	key_str(w, "routing_group", q.group);
	kvp_jw_ku64(w, "worker_id", a.worker_id);
	kvp_jw_ku64(w, "dp_rank", a.dp_rank);
	kvp_jw_kstr(w, "endpoint", a.endpoint);
	kvp_jw_end(w);
	kvp_reply_json(c, 201);
}

static void finish_lifecycle(struct kvp_call *c, int status)
{
	if (status == 200)
		kvp_reply_ok(c);
	else
		kvp_reply_refused(c, status);
}

void kvp_route_prefill_complete(struct kvp_call *c)
{
	struct kvp_str id = {c->seg, c->seg_len};
	finish_lifecycle(c, kvp_selection_prefill_complete(c->h->selection, id));
}

void kvp_route_output_block(struct kvp_call *c)
{
	struct kvp_str id = {c->seg, c->seg_len};
	double fraction;
	enum kvp_tristate has;
	int status = kvp_parse_output_block(&c->h->parse, &fraction, &has);
	if (status) {
		kvp_reply_error(c, status, c->h->parse.err);
		return;
	}
	finish_lifecycle(
		c, kvp_selection_output_block(c->h->selection, id, has == KVP_YES ? &fraction : NULL));
}

void kvp_route_free(struct kvp_call *c)
{
	struct kvp_str id = {c->seg, c->seg_len};
	finish_lifecycle(c, kvp_selection_free(c->h->selection, id));
}

static void write_load_rows(struct kvp_jw *w, const struct kvp_load_row *row, uint32_t cnt)
{
	kvp_jw_arr(w);
	for (uint32_t i = 0; i < cnt; i++) {
		kvp_jw_obj(w);
		kvp_jw_ku64(w, "worker_id", row[i].worker_id);
		kvp_jw_ku64(w, "dp_rank", row[i].dp_rank);
		kvp_jw_ku64(w, "potential_prefill_tokens", row[i].prefill_tok);
		kvp_jw_ku64(w, "potential_decode_blocks", row[i].decode_blk);
		kvp_jw_ku64(w, "active_requests", row[i].active_requests);
		kvp_jw_end(w);
	}
	kvp_jw_end(w);
}

void kvp_route_potential_loads(struct kvp_call *c)
{
	struct kvp_httpd *h = c->h;
	struct kvp_select_request q;
	uint32_t cnt = 0;
	int status = kvp_parse_select(&h->parse, &q);
	if (status) {
		kvp_reply_error(c, status, h->parse.err);
		return;
	}
	status = kvp_selection_potential_loads(h->selection, &q, h->load_row, KVP_HTTPD_ROWS_MAX, &cnt);
	if (status != 200) {
		kvp_reply_refused(c, status);
		return;
	}
	kvp_jw_reset(&h->out);
	write_load_rows(&h->out, h->load_row, cnt);
	kvp_reply_json(c, 200);
}

/* loads_of writes one partition's element of GET /loads. */
static void loads_of(struct kvp_httpd *h, const struct kvp_part_info *info)
{
	struct kvp_jw *w = &h->out;
	struct kvp_str model = {info->model, info->model_len}, group = {info->group, info->group_len};
	uint64_t waiting, waiting_isl;
	uint32_t cnt = 0;
	kvp_selection_loads(h->selection, info->role, model, group, h->load_row, KVP_HTTPD_ROWS_MAX, &cnt);
	kvp_jw_obj(w);
	key_str(w, "model_name", model);
	key_str(w, "routing_group", group);
	kvp_jw_key(w, "loads");
	write_load_rows(w, h->load_row, cnt);
	kvp_selection_waiting(h->selection, info->role, model, group, &waiting, &waiting_isl);
	kvp_jw_ku64(w, "pending_count", waiting);
	kvp_jw_ku64(w, "pending_isl_tokens", waiting_isl);
	kvp_jw_end(w);
}

static int by_name(const struct kvp_part_info *a, const struct kvp_part_info *b)
{
	int d = strcmp(a->model, b->model);
	return d ? d : strcmp(a->group, b->group);
}

void kvp_route_loads(struct kvp_call *c)
{
	struct kvp_httpd *h = c->h;
	char model[KVP_NAME_MAX + 1], group[KVP_NAME_MAX + 1];
	size_t mlen = 0, glen = 0;
	int by_model = kvp_query_get(c->req, "model_name", model, KVP_NAME_MAX, &mlen);
	int by_group = kvp_query_get(c->req, "routing_group", group, KVP_NAME_MAX, &glen);
	if (by_model < 0 || by_group < 0) {
		kvp_reply_error(c, 400, "query string is malformed");
		return;
	}
	const struct kvp_cat *cat = &h->boot.region->cat;
	uint32_t cnt = kvp_cat_part_cnt(cat);
	struct kvp_part_info last, best, info;
	int have_last = 0;
	kvp_jw_reset(&h->out);
	kvp_jw_arr(&h->out);
	/* Names in order without a table of them: each turn picks the smallest name above the last one. */
	for (;;) {
		int have_best = 0;
		for (uint32_t i = 0; i < cnt; i++) {
			if (kvp_cat_part_info(cat, i, &info) || info.role != KVP_PART_AGGREGATED)
				continue;
			if (by_model && (info.model_len != mlen || memcmp(info.model, model, mlen) != 0))
				continue;
			if (by_group && (info.group_len != glen || memcmp(info.group, group, glen) != 0))
				continue;
			if (have_last && by_name(&info, &last) <= 0)
				continue;
			if (!have_best || by_name(&info, &best) < 0)
				best = info;
			have_best = 1;
		}
		if (!have_best)
			break;
		loads_of(h, &best);
		last = best;
		have_last = 1;
	}
	kvp_jw_end(&h->out);
	kvp_reply_json(c, 200);
}

static void write_overlap_row(struct kvp_jw *w, const struct kvp_overlap_row *r)
{
	kvp_jw_obj(w);
	kvp_jw_ku64(w, "worker_id", r->worker_id);
	kvp_jw_ku64(w, "dp_rank", r->dp_rank);
	kvp_jw_ku64(w, "device_blocks", r->device_blk);
	kvp_jw_ku64(w, "host_pinned_blocks", (uint64_t)r->device_blk + r->host_ext_blk);
	kvp_jw_ku64(w, "disk_blocks", (uint64_t)r->device_blk + r->host_ext_blk + r->disk_ext_blk);
	kvp_jw_ku64(w, "host_pinned_extension_blocks", r->host_ext_blk);
	kvp_jw_ku64(w, "disk_extension_blocks", r->disk_ext_blk);
	kvp_jw_key(w, "shared_beyond_device_blocks");
	kvp_jw_null(w);
	kvp_jw_key(w, "router_credit_blocks");
	kvp_jw_f64(w, r->router_credit_blk);
	kvp_jw_end(w);
}

void kvp_route_overlap_scores(struct kvp_call *c)
{
	struct kvp_httpd *h = c->h;
	struct kvp_jw *w = &h->out;
	struct kvp_select_request q;
	uint32_t cnt = 0, block_size = 0, num_blk = 0;
	int status = kvp_parse_select(&h->parse, &q);
	if (status) {
		kvp_reply_error(c, status, h->parse.err);
		return;
	}
	status = kvp_selection_overlap_scores(
		h->selection, &q, h->overlap_row, KVP_HTTPD_ROWS_MAX, &cnt, &block_size, &num_blk);
	if (status != 200) {
		kvp_reply_refused(c, status);
		return;
	}
	kvp_jw_reset(w);
	kvp_jw_obj(w);
	kvp_jw_ku64(w, "block_size", block_size);
	kvp_jw_ku64(w, "num_blocks", num_blk);
	kvp_jw_key(w, "workers");
	kvp_jw_arr(w);
	for (uint32_t i = 0; i < cnt; i++)
		write_overlap_row(w, &h->overlap_row[i]);
	kvp_jw_end(w);
	kvp_jw_key(w, "shared_cache");
	kvp_jw_obj(w);
	kvp_jw_kbool(w, "enabled", 0);
	kvp_jw_ku64(w, "total_hit_blocks", 0);
	kvp_jw_key(w, "ranges");
	kvp_jw_arr(w);
	kvp_jw_end(w);
	kvp_jw_key(w, "error");
	kvp_jw_null(w);
	kvp_jw_end(w);
	kvp_jw_end(w);
	kvp_reply_json(c, 200);
}
