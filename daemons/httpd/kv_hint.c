/* kv_hint of a selection: where the chosen worker may fetch blocks of the prompt from. The answer is kept
 * until the indexer has told the source's names of the blocks, but not for long: a hint is a hint. */
#include "daemons/httpd/httpd.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define WAIT_NS (50ull * 1000000ull)

struct kvp_httpd_hint {
	enum kvp_httpd_job job;
	struct kvp_httpd_hint *next;
	struct kvp_http_req *req;
	struct kvp_cmd_cell *cell;
	uint64_t deadline_ns, booking;
	uint32_t least; /* so many blocks the chosen rank holds itself */
	char *id, *endpoint, *body;
	size_t body_len; /* the answer without its last brace */
};

static void drop(struct kvp_httpd *h, struct kvp_httpd_hint *x)
{
	struct kvp_httpd_hint **at = &h->hints;
	while (*at && *at != x)
		at = &(*at)->next;
	if (*at)
		*at = x->next;
	if (x->cell)
		kvp_cmd_end(&h->boot.region->cmd, x->cell);
	free(x->id);
	free(x->endpoint);
	free(x->body);
	free(x);
}

/* The control endpoint of a rank, as its worker registered it; NULL = none or no memory. Heap. */
static char *control_endpoint(struct kvp_httpd *h, const struct kvp_kv_source *src)
{
	const struct kvp_cat *cat = &h->boot.region->cat;
	struct kvp_json *json = kvp_json_new();
	struct kvp_json_val root, map, v;
	char rank[16], *out = NULL;
	const char *s;
	size_t n;
	uint32_t idx, len;
	snprintf(rank, sizeof(rank), "%" PRIu32, src->dp_rank);
	if (json && kvp_cat_worker_find(cat, src->worker_id, &idx) == KVP_OK &&
		kvp_cat_worker_json(cat, idx, h->record, KVP_CAT_RECORD_MAX, &len) == KVP_OK &&
		kvp_json_parse(json, h->record, len, KVP_JSON_DEPTH_MAX, &root, NULL) == KVP_OK &&
		kvp_json_get(root, "router_hint_source_control_endpoints", &map) == KVP_OK &&
		kvp_json_get(map, rank, &v) == KVP_OK && kvp_json_str(v, &s, &n) == KVP_OK && n)
		out = strndup(s, n);
	kvp_json_free(json);
	return out;
}

/* Sends the answer, with the hint if n blocks are worth one. */
static void reply(struct kvp_httpd *h, struct kvp_httpd_hint *x, const uint64_t *ext, uint32_t n)
{
	struct kvp_call c = {.h = h, .req = x->req};
	struct kvp_jw *w = &h->out;
	x->req->user = NULL;
	kvp_jw_reset(w);
	kvp_jw_obj(w);
	kvp_jw_kstr(w, "protocol_version", "0.1");
	kvp_jw_kstr(w, "message_id", x->id);
	kvp_jw_key(w, "actions");
	kvp_jw_arr(w);
	kvp_jw_obj(w);
	kvp_jw_kstr(w, "action_id", "a1");
	kvp_jw_kstr(w, "action_type", "kv.fetch");
	kvp_jw_kstr(w, "action_version", "1.0");
	kvp_jw_key(w, "payload");
	kvp_jw_obj(w);
	kvp_jw_kstr(w, "source_control_endpoint", x->endpoint);
	kvp_jw_key(w, "block_hashes");
	kvp_jw_arr(w);
	for (uint32_t i = 0; i < n; i++)
		kvp_jw_u64(w, ext[i]);
	for (int i = 0; i < 5; i++)
		kvp_jw_end(w);
	size_t len = x->body_len + w->len + sizeof(",\"kv_hint\":}");
	char *text = n > x->least && kvp_jw_done(w) == KVP_OK ? malloc(len) : NULL;
	int made = text ? snprintf(text, len, "%.*s,\"kv_hint\":%.*s}", (int)x->body_len, x->body,
				  (int)w->len, w->buf)
			: 0;
	kvp_ctr_add(h->boot.ctr, text ? KVP_CTR_HINT_GIVEN : KVP_CTR_HINT_LOST, 1);
	kvp_httpd_tag_booking(&c, x->booking);
	if (text)
		kvp_http_reply(x->req, 200, "application/json", text, (uint64_t)made);
	else
		kvp_http_reply(x->req, 200, "application/json", x->body, x->body_len + 1);
	free(text);
	drop(h, x);
}

int kvp_httpd_hint_begin(struct kvp_call *c, const struct kvp_select_answer *a)
{
	struct kvp_httpd *h = c->h;
	const struct kvp_kv_source *src = &a->kv_source;
	struct kvp_cmdring *ring = &h->boot.region->cmd;
	void *payload;
	if (!src->blk_cnt || h->out.len < 2 || kvp_jw_done(&h->out))
		return 0;
	uint32_t most = KVP_CMD_PAYLOAD_MAX / 8, n = src->blk_cnt < most ? src->blk_cnt : most;
	struct kvp_httpd_hint *x = calloc(1, sizeof(*x));
	if (!x)
		return 0;
	x->job = KVP_HTTPD_HINT;
	x->req = c->req;
	x->booking = a->booking;
	x->least = src->blk_cnt - src->more_blk;
	x->deadline_ns = kvp_clock_mono_ns() + WAIT_NS;
	x->id = strndup(a->selection_id.ptr, a->selection_id.len);
	x->endpoint = control_endpoint(h, src);
	x->body = malloc(h->out.len);
	if (!x->id || !x->endpoint || !x->body || n <= x->least ||
		kvp_cmd_begin(ring, h->boot.owner, &x->cell, &payload)) {
		x->cell = NULL;
		kvp_ctr_add(h->boot.ctr, KVP_CTR_HINT_LOST, 1);
		drop(h, x);
		return 0;
	}
	memcpy(x->body, h->out.buf, h->out.len);
	x->body_len = h->out.len - 1;
	memcpy(payload, src->local_hash, 8ull * n);
	x->cell->arg[0] = (uint64_t)src->index_slot << 32 | src->index_gen;
	x->cell->arg[1] = src->part;
	kvp_cmd_post(ring, x->cell, KVP_CMD_NAMES, 8 * n);
	x->next = h->hints;
	h->hints = x;
	c->req->user = x;
	return 1;
}

int kvp_httpd_hint_poll(struct kvp_httpd *h)
{
	struct kvp_cmdring *ring = &h->boot.region->cmd;
	uint64_t now_ns = h->hints ? kvp_clock_mono_ns() : 0;
	int any = 0;
	for (struct kvp_httpd_hint *x = h->hints, *next; x; x = next) {
		next = x->next;
		int is_done = kvp_cmd_done(ring, x->cell);
		if (!is_done && now_ns < x->deadline_ns)
			continue;
		int is_good =
			is_done && x->cell->status == KVP_OK && x->cell->reply_len <= KVP_CMD_PAYLOAD_MAX;
		reply(h, x, kvp_cmd_buffer(ring, x->cell), is_good ? x->cell->reply_len / 8 : 0);
		any = 1;
	}
	return any;
}

void kvp_httpd_hint_drop(struct kvp_httpd *h, struct kvp_httpd_hint *x)
{
	uint64_t booking = x->booking;
	drop(h, x);
	kvp_httpd_undelivered(h, booking + 1);
}
