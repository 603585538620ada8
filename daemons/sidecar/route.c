#include <kvpick/err.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>

#include "daemons/sidecar/conn.h"

#define LLMD_LINES_MAX 16
#define LLMD_TARGETS_MAX 64 /* listed ones that one is drawn from */

static int path_is(const struct kvp_http_req *q, const char *path)
{
	size_t len = strlen(path);
	return q->path_len == len && memcmp(q->path, path, len) == 0;
}

/* The next byte of a path as an engine reads it: escapes are undone, once. */
static char next_byte(const char **p, const char *end)
{
	static const char digits[] = "0123456789abcdef";
	const char *at = *p, *high, *low;
	*p += 1;
	if (*at != '%' || end - at < 3)
		return *at;
	high = memchr(digits, at[1] | 32, 16);
	low = memchr(digits, at[2] | 32, 16);
	if (!high || !low)
		return *at;
	*p += 2;
	return (char)((high - digits) << 4 | (low - digits));
}

/* Whether an engine takes it for that path. */
static int path_means(const struct kvp_http_req *q, const char *path)
{
	const char *p = q->path, *end = p + q->path_len;
	if (!memchr(p, '%', q->path_len))
		return path_is(q, path);
	while (p < end && *path)
		if (next_byte(&p, end) != *path++)
			return 0;
	return p == end && !*path;
}

/* A path that could climb out of /v1/ at the engine is none below it: a segment of one or two dots. */
static int climbs(const struct kvp_http_req *q)
{
	const char *p = q->path, *end = p + q->path_len;
	unsigned dots = 0, other = 0;
	while (p < end) {
		char c = next_byte(&p, end);
		int ends = c == '/' || c == '\\';
		if (c == '.')
			dots++;
		else if (!ends)
			other = 1;
		if (!ends && p < end)
			continue;
		if (dots && dots <= 2 && !other)
			return 1;
		dots = other = 0;
	}
	return 0;
}

static enum kvp_req_path path_of(const struct kvp_worker *w, const struct kvp_http_req *q)
{
	if (path_means(q, "/v1/chat/completions"))
		return KVP_PATH_CHAT;
	if (path_means(q, "/v1/completions"))
		return KVP_PATH_COMPLETIONS;
	if (w->cfg->sidecar_profile && path_means(q, "/v1/responses"))
		return KVP_PATH_RESPONSES;
	return KVP_PATH_OTHER;
}

static int is_proxied(const struct kvp_worker *w, const struct kvp_http_req *q)
{
	/* Out of the base path nobody climbs. */
	if (w->cfg->sidecar_profile)
		return !w->base[0] || !climbs(q);
	return q->path_len > 4 && memcmp(q->path, "/v1/", 4) == 0 && !climbs(q);
}

static void mint_request_id(struct kvp_req *r)
{
	static const char hex[] = "0123456789abcdef";
	uint8_t b[16];
	/* The other profile gives both legs one of its own, behind the client's. */
	int is_own = r->w->cfg->sidecar_profile && r->adapter;
	uint32_t len;
	if ((!is_own && kvp_headers_id(r, &len)) || getrandom(b, sizeof(b), 0) != (ssize_t)sizeof(b))
		return;
	b[6] = (uint8_t)((b[6] & 15) | 0x40);
	b[8] = (uint8_t)((b[8] & 63) | 0x80);
	char *p = r->request_id;
	for (int i = 0; i < 16; i++) {
		if (i == 4 || i == 6 || i == 8 || i == 10)
			*p++ = '-';
		*p++ = hex[b[i] >> 4];
		*p++ = hex[b[i] & 15];
	}
	*p = 0;
}

/* What the prefill header says: 1 a target, 0 none, KVP_ERR_INVAL. */
static int target_strict(struct kvp_req *r)
{
	uint32_t len = 0, cnt = 0;
	const char *v = kvp_http_head_find(kvp_req_head(r), KVP_TARGET_HEADER, &len, &cnt);
	if (!cnt)
		return 0;
	return cnt > 1 || kvp_target_parse(v, len, &r->target) ? KVP_ERR_INVAL : 1;
}

static int target_lenient(struct kvp_req *r)
{
	const struct kvp_http_head *h = kvp_req_head(r);
	struct kvp_target_text line[LLMD_LINES_MAX], listed[LLMD_TARGETS_MAX];
	size_t n = 0, name_len = strlen(KVP_TARGET_HEADER);
	for (uint32_t i = 0; i < h->field_cnt && n < LLMD_LINES_MAX; i++)
		if (h->field[i].name_len == name_len &&
			strncasecmp(h->raw.p + h->field[i].name, KVP_TARGET_HEADER, name_len) == 0)
			line[n++] = (struct kvp_target_text){h->raw.p + h->field[i].val, h->field[i].val_len};
	n = kvp_target_pick(line, n, listed, r->w->cfg->enable_prefiller_sampling ? LLMD_TARGETS_MAX : 1);
	if (!n)
		return 0;
	uint64_t rnd = 0;
	if (n > 1 && getrandom(&rnd, sizeof(rnd), 0) != (ssize_t)sizeof(rnd))
		rnd = 0; /* the first, then */
	const struct kvp_target_text *one = &listed[rnd % n];
	return kvp_target_parse(one->ptr, one->len, &r->target) ? KVP_ERR_INVAL : 1;
}

static void refuse(struct kvp_req *r, int status, enum kvp_result result, const char *message)
{
	struct kvp_fail f = {status, result, message};
	kvp_reply_error(r, &f, NULL);
}

/* A target that the list of allowed ones has not. */
static void deny(struct kvp_req *r)
{
	static const struct kvp_fail f = {
		403, KVP_RESULT_FORBIDDEN, "Forbidden: prefill target not allowed by SSRF protection"};
	if (r->w->cfg->sidecar_profile)
		kvp_reply_error_text(r, &f);
	else
		refuse(r, 502, KVP_RESULT_METADATA, "the prefill endpoint of the request is not allowed");
}

/* The flow of a request that goes to an engine; 0 = answered. */
static int choose(struct kvp_req *r)
{
	static const struct kvp_adapter *const adapter[] = {[KVP_PD_VLLM_NIXL] = &kvp_adapter_vllm,
		[KVP_PD_SGLANG] = &kvp_adapter_sglang,
		[KVP_PD_TRTLLM] = &kvp_adapter_trtllm};
	const struct kvp_config *cfg = r->w->cfg;
	int found = 0;
	r->flow = &kvp_flow_pass;
	if (r->path != KVP_PATH_OTHER)
		found = cfg->sidecar_profile ? target_lenient(r) : target_strict(r);
	if (found < 0) {
		r->flow = NULL;
		refuse(r, 502, KVP_RESULT_METADATA, "the prefill endpoint of the request is not valid");
		return 0;
	}
	if (!found)
		return 1;
	r->flow = NULL;
	if (!kvp_target_allowed(cfg->sidecar_prefill_allowlist, &r->target)) {
		deny(r);
		return 0;
	}
	const struct kvp_adapter *a = adapter[cfg->eff.sidecar_adapter];
	/* The other profile's protocol is vLLM's; of the others it takes the reading of the header. */
	if (cfg->sidecar_profile && (!a || a == &kvp_adapter_vllm))
		a = &kvp_adapter_llmd;
	if (!a) {
		refuse(r, 501, KVP_RESULT_NO_ADAPTER, "no prefill/decode protocol is configured here");
		return 0;
	}
	r->adapter = a;
	r->flow = a->flow;
	return 1;
}

static void begin(struct kvp_req *r)
{
	struct kvp_worker *w = r->w;
	uint64_t max = w->cfg->sidecar_max_streams;
	const struct kvp_flow *flow = r->flow;
	if (kvp_faa_rlx_u64(&w->sidecar->stream_cnt, 1) >= max && max) {
		kvp_faa_rlx_u64(&w->sidecar->stream_cnt, (uint64_t)-1);
		r->flow = NULL;
		refuse(r, 503, KVP_RESULT_TOO_MANY, "too many requests run");
		return;
	}
	kvp_count_add(&w->count.streams, 1);
	mint_request_id(r);
	r->conn->state = KVP_CONN_BODY;
	if (flow->stream_body)
		flow->start(r);
	else if (r->conn->in.framing == KVP_HTTP_FRAME_LENGTH &&
		 r->conn->in.length <= w->cfg->eff.sidecar_max_request_bytes)
		kvp_http_buf_room(&r->body, r->conn->in.length); /* once; without memory piece by piece */
}

void kvp_conn_route(struct kvp_conn *c)
{
	struct kvp_worker *w = c->w;
	struct kvp_req *r = &c->req;
	const struct kvp_http_req *q = &c->in.req;
	int has_body = c->in.framing == KVP_HTTP_FRAME_CHUNKED ||
		       (c->in.framing == KVP_HTTP_FRAME_LENGTH && c->in.length);
	*r = (struct kvp_req){.w = w,
		.conn = c,
		.start_ns = kvp_loop_now_ns(w->loop),
		.path = path_of(w, q),
		.is_head = q->is_head,
		.running = 1};
	c->state = has_body ? KVP_CONN_BODY : KVP_CONN_WAIT;
	if (path_is(q, "/health") || path_is(q, "/ready")) {
		kvp_count_add(&w->count.local, 1);
		int ready = q->path_len == 7 || !w->draining;
		kvp_reply_whole(r, q->method != KVP_HTTP_GET ? 405 : ready ? 200 : 503, NULL, "", 0);
	} else if (r->path != KVP_PATH_OTHER && q->method != KVP_HTTP_POST) {
		kvp_reply_whole(r, 405, NULL, "", 0);
	} else if (r->path == KVP_PATH_OTHER && !is_proxied(w, q)) {
		kvp_count_add(&w->count.not_found, 1);
		kvp_reply_whole(r, 404, NULL, "", 0);
	} else if (choose(r)) {
		begin(r);
	}
}
