/* daemons/peer/warm_fetch.c — the exchange, the timer, and the answer that other newcomers get. */
#include "daemons/peer/warm_fetch.h"

#include <kvpick/err.h>
#include <kvpick/point.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemons/common/config.h"
#include "daemons/common/log.h"
#include "ipc/http_client.h"
#include "ipc/json_in.h"

#define TEND_NS 1000000000ull

struct kvp_warm_fetch {
	struct kvp_boot *boot;
	struct kvp_loop *loop;
	struct kvp_warm *warm;
	struct kvp_http_client *http;
	struct kvp_http_call *call;
	struct kvp_timer tick;
	char *body;
	uint64_t len, cap;
	char peer[400];
};

static void on_tick(void *ctx, struct kvp_timer *t)
{
	struct kvp_warm_fetch *f = ctx;
	uint64_t now = kvp_loop_now_ns(f->loop);
	kvp_warm_tend(f->warm, now);
	kvp_timer_set(f->loop, t, now + TEND_NS, on_tick, f);
}

static void body_drop(struct kvp_warm_fetch *f)
{
	free(f->body);
	f->body = NULL;
	f->len = f->cap = 0;
}

/* With room for what the JSON parser reads beyond the end. */
static void on_body(void *ctx, struct kvp_http_call *c, const char *data, uint64_t len)
{
	struct kvp_warm_fetch *f = ctx;
	if (f->len + len + KVP_JSON_SLACK_BYTES > f->cap) {
		uint64_t cap = 2 * (f->len + len) + KVP_JSON_SLACK_BYTES;
		char *grown = realloc(f->body, cap);
		if (!grown) {
			kvp_http_call_cancel(c);
			f->call = NULL;
			return;
		}
		f->body = grown;
		f->cap = cap;
	}
	memcpy(f->body + f->len, data, len);
	f->len += len;
}

static void on_done(void *ctx, struct kvp_http_call *c, int status, int err)
{
	struct kvp_warm_fetch *f = ctx;
	(void)c;
	f->call = NULL;
	uint64_t now = kvp_loop_now_ns(f->loop);
	int rc = err ? err : status < 200 || status > 299 ? KVP_ERR_PROTO : KVP_OK;
	if (!rc && f->len)
		memset(f->body + f->len, 0, KVP_JSON_SLACK_BYTES);
	rc = rc ? rc : f->len ? kvp_warm_take(f->warm, f->body, f->len, now) : KVP_ERR_PROTO;
	body_drop(f);
	if (rc) {
		KVP_LOG_W("recovery.loads", "peer=%s status=%d error=%s effect=none_are_assumed", f->peer,
			status, kvp_strerror(rc));
		return;
	}
	KVP_LOG_N("recovery.loads", "peer=%s slices=%u", f->peer, kvp_warm_tend(f->warm, now));
	kvp_timer_set(f->loop, &f->tick, now + TEND_NS, on_tick, f);
}

void kvp_warm_fetch_ask(struct kvp_warm_fetch *f, const struct kvp_http_url *to, const char *host)
{
	char path[1100];
	if (!f || f->call)
		return;
	snprintf(path, sizeof(path), "%s/loads", to->base);
	snprintf(f->peer, sizeof(f->peer), "%s", to->authority);
	struct kvp_http_call_cfg c = {.host = host,
		.port = to->port,
		.path = path,
		.authority = to->authority,
		.headers = "Accept: application/json\r\n",
		.timeout_ns = f->boot->config->recovery_http_timeout_ms * 1000000,
		.body_max_bytes = KVP_WARM_FETCH_BYTES,
		.on_body = on_body,
		.on_done = on_done,
		.ctx = f};
	if (kvp_http_call(f->http, &c, &f->call))
		KVP_LOG_W("recovery.loads", "peer=%s error=no_call", f->peer);
}

int kvp_warm_fetch_open(
	struct kvp_boot *boot, struct kvp_loop *loop, struct kvp_mirror *m, struct kvp_warm_fetch **out)
{
	struct kvp_http_client_cfg hc = {.conn_max = 1, .idle_max = 1};
	*out = NULL;
	if (!boot->config->recover_loads)
		return KVP_OK;
	struct kvp_warm_fetch *f = calloc(1, sizeof(*f));
	if (!f)
		return KVP_ERR_SYS;
	f->boot = boot;
	f->loop = loop;
	f->warm = kvp_warm_open(m);
	int rc = f->warm ? kvp_http_client_open(loop, &hc, &f->http) : KVP_ERR_SYS;
	if (rc)
		kvp_warm_fetch_close(f);
	else
		*out = f;
	return rc;
}

void kvp_warm_fetch_close(struct kvp_warm_fetch *f)
{
	if (!f)
		return;
	kvp_timer_cancel(f->loop, &f->tick);
	kvp_http_client_close(f->http);
	kvp_warm_close(f->warm);
	body_drop(f);
	free(f);
}

/* ---- what others are told ---- */

struct told { /* the last row; rows are in this order */
	uint64_t worker_id;
	uint32_t dp_rank;
	int any;
};

/* rows_of tells the rows of a view behind the last one told. KVP_ERR_AGAIN: the view has changed; what was
 * told is of it. */
static int rows_of(
	const struct kvp_region *r, const struct kvp_cat_view *v, struct told *last, struct kvp_jw *w)
{
	for (uint32_t i = 0; i < v->cnt; i++) {
		struct kvp_load l;
		struct told row = {
			kvp_ld_rlx_u64(&v->rank[i].worker_id), kvp_ld_rlx_u32(&v->rank[i].dp_rank), 1};
		if (last->any && (row.worker_id < last->worker_id ||
					 (row.worker_id == last->worker_id && row.dp_rank <= last->dp_rank)))
			continue;
		kvp_load_read(&r->book, kvp_ld_rlx_u32(&v->rank[i].rank_slot), &l);
		KVP_POINT("loads:row");
		if (kvp_cat_view_valid(&r->cat, v))
			return KVP_ERR_AGAIN;
		kvp_jw_obj(w);
		kvp_jw_ku64(w, "worker_id", row.worker_id);
		kvp_jw_ku64(w, "dp_rank", row.dp_rank);
		kvp_jw_ku64(w, "potential_prefill_tokens", l.prefill_tok);
		kvp_jw_ku64(w, "potential_decode_blocks", kvp_load_blocks(&l));
		kvp_jw_ku64(w, "active_requests", l.requests);
		kvp_jw_end(w);
		*last = row;
	}
	return KVP_OK;
}

static void rows(const struct kvp_region *r, uint32_t part, struct kvp_jw *w)
{
	struct kvp_cat_view v;
	struct told last = {0, 0, 0};
	for (int i = 0; i < KVP_CAT_RETRY_MAX; i++)
		if (kvp_cat_view_begin(&r->cat, part, &v) || rows_of(r, &v, &last, w) == KVP_OK)
			return;
}

void kvp_loads_write(const struct kvp_region *r, struct kvp_jw *w)
{
	static struct kvp_part_info p; /* the daemon's one thread */
	kvp_jw_arr(w);
	for (uint32_t i = 0; i < kvp_cat_part_cnt(&r->cat); i++) {
		if (kvp_cat_part_info(&r->cat, i, &p) || p.role != KVP_PART_AGGREGATED)
			continue;
		kvp_jw_obj(w);
		kvp_jw_key(w, "model_name");
		kvp_jw_strn(w, p.model, p.model_len);
		kvp_jw_key(w, "routing_group");
		kvp_jw_strn(w, p.group, p.group_len);
		kvp_jw_key(w, "loads");
		kvp_jw_arr(w);
		rows(r, i, w);
		kvp_jw_end(w);
		kvp_jw_end(w);
	}
	kvp_jw_end(w);
}
