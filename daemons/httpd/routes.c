#include "daemons/httpd/httpd.h"

#include <string.h>
#include <strings.h>

enum body_rule { NO_BODY, JSON_BODY, COMMAND_BODY }; /* COMMAND_BODY: JSON that the indexer parses */

/* One row a method and path. `*` stands for the one variable segment. The first matching path decides between
 * 404 and 405. */
struct route {
	enum kvp_http_method method;
	const char *path;
	enum body_rule body;
	void (*run)(struct kvp_call *c);
};

static const struct route route[] = {
	{KVP_HTTP_POST, "/select_and_reserve", JSON_BODY, kvp_route_select_and_reserve},
	{KVP_HTTP_POST, "/select", JSON_BODY, kvp_route_select},
	{KVP_HTTP_POST, "/reservations", JSON_BODY, kvp_route_reserve},
	{KVP_HTTP_POST, "/reservations/*/prefill_complete", NO_BODY, kvp_route_prefill_complete},
	{KVP_HTTP_POST, "/reservations/*/output_block", JSON_BODY, kvp_route_output_block},
	{KVP_HTTP_DELETE, "/reservations/*", NO_BODY, kvp_route_free},
	{KVP_HTTP_POST, "/potential_loads", JSON_BODY, kvp_route_potential_loads},
	{KVP_HTTP_POST, "/overlap_scores", JSON_BODY, kvp_route_overlap_scores},
	{KVP_HTTP_GET, "/loads", NO_BODY, kvp_route_loads},
	{KVP_HTTP_POST, "/workers", COMMAND_BODY, kvp_route_worker_post},
	{KVP_HTTP_GET, "/workers", NO_BODY, kvp_route_worker_list},
	{KVP_HTTP_PATCH, "/workers/*", COMMAND_BODY, kvp_route_worker_patch},
	{KVP_HTTP_DELETE, "/workers/*", NO_BODY, kvp_route_worker_delete},
	{KVP_HTTP_POST, "/replica_sync/register_peer", JSON_BODY, kvp_route_peer_register},
	{KVP_HTTP_POST, "/replica_sync/deregister_peer", JSON_BODY, kvp_route_peer_deregister},
	{KVP_HTTP_GET, "/replica_sync/peers", NO_BODY, kvp_route_peer_list},
	{KVP_HTTP_GET, "/dump", NO_BODY, kvp_route_dump},
	{KVP_HTTP_GET, "/health", NO_BODY, kvp_route_health},
	{KVP_HTTP_GET, "/ready", NO_BODY, kvp_route_ready},
	{KVP_HTTP_GET, "/metrics", NO_BODY, kvp_route_metrics},
	{KVP_HTTP_GET, "/status", NO_BODY, kvp_route_status},
};
#define NOT_JSON "Content-Type must be application/json"
#define ROUTE_CNT (sizeof(route) / sizeof(route[0]))

void kvp_reply_json(struct kvp_call *c, int status)
{
	struct kvp_jw *w = &c->h->out;
	if (kvp_jw_done(w) != KVP_OK) {
		static const char text[] = "{\"error\":\"out of memory\"}";
		kvp_http_reply(c->req, 500, "application/json", text, sizeof(text) - 1);
		return;
	}
	kvp_http_reply(c->req, status, "application/json", w->buf, w->len);
}

static void reply_error(struct kvp_call *c, int status, const char *text, size_t len)
{
	struct kvp_jw *w = &c->h->out;
	kvp_ctr_add(c->h->boot.ctr, status >= 500 ? KVP_CTR_HTTP_SERVER_ERROR : KVP_CTR_HTTP_CLIENT_ERROR, 1);
	kvp_jw_reset(w);
	kvp_jw_obj(w);
	kvp_jw_key(w, "error");
	kvp_jw_strn(w, text, len);
	kvp_jw_end(w);
	kvp_reply_json(c, status);
}

void kvp_reply_error(struct kvp_call *c, int status, const char *text)
{
	reply_error(c, status, text, strlen(text));
}

void kvp_reply_refused(struct kvp_call *c, int status)
{
	const struct kvp_selection *s = c->h->selection;
	reply_error(c, status, kvp_selection_error(s), kvp_selection_error_len(s));
}

void kvp_reply_ok(struct kvp_call *c)
{
	static const char text[] = "{\"status\":\"ok\"}";
	kvp_http_reply(c->req, 200, "application/json", text, sizeof(text) - 1);
}

/* match compares a request path with a pattern; the bytes under `*` go to seg. */
static int match(const char *pattern, const char *path, size_t len, const char **seg, size_t *seg_len)
{
	size_t i = 0;
	for (; *pattern; pattern++) {
		if (*pattern != '*') {
			if (i >= len || path[i++] != *pattern)
				return 0;
			continue;
		}
		*seg = path + i;
		while (i < len && path[i] != '/')
			i++;
		*seg_len = (size_t)(path + i - *seg);
		if (*seg_len == 0)
			return 0;
	}
	return i == len;
}

/* valid_utf8: no overlong form, no surrogate, nothing above U+10FFFF. */
static int valid_utf8(const char *s, size_t len)
{
	const unsigned char *p = (const unsigned char *)s, *end = p + len;
	while (p < end) {
		unsigned c = *p++;
		if (c < 0x80)
			continue;
		int more = c >= 0xf0 ? 3 : c >= 0xe0 ? 2 : 1;
		if (c < 0xc2 || c > 0xf4 || end - p < more)
			return 0;
		if ((c == 0xe0 && *p < 0xa0) || (c == 0xed && *p > 0x9f) || (c == 0xf0 && *p < 0x90) ||
			(c == 0xf4 && *p > 0x8f))
			return 0;
		for (int i = 0; i < more; i++, p++)
			if ((*p & 0xc0) != 0x80)
				return 0;
	}
	return 1;
}

static int parse_worker_id(struct kvp_call *c)
{
	unsigned __int128 v = 0;
	if (c->seg_len == 0 || c->seg_len > 20 || strspn(c->seg, "0123456789") != c->seg_len)
		return -1;
	for (size_t i = 0; i < c->seg_len; i++)
		v = v * 10 + (unsigned)(c->seg[i] - '0');
	if (v > UINT64_MAX)
		return -1;
	c->worker_id = (uint64_t)v;
	return 0;
}

static int is_json(const struct kvp_http_req *r)
{
	static const char app[] = "application/";
	const char *t = r->content_type;
	size_t n = r->content_type_len;
	if (!t)
		return 0;
	const char *semi = memchr(t, ';', n);
	n = semi ? (size_t)(semi - t) : n;
	while (n && (t[n - 1] == ' ' || t[n - 1] == '\t'))
		n--;
	if (n < sizeof(app) - 1 || strncasecmp(t, app, sizeof(app) - 1) != 0)
		return 0;
	t += sizeof(app) - 1;
	n -= sizeof(app) - 1;
	return (n == 4 && strncasecmp(t, "json", 4) == 0) ||
	       (n > 5 && strncasecmp(t + n - 5, "+json", 5) == 0);
}

/* take_segment decodes the variable path segment and judges it before anything else of the request. */
static int take_segment(struct kvp_call *c, const struct route *rt, const char *seg, size_t seg_len)
{
	long n = kvp_percent_decode(seg, seg_len, KVP_PLUS_IS_PLUS, c->seg, KVP_SELECTION_ID_MAX);
	if (n < 0 || !valid_utf8(c->seg, (size_t)n)) {
		kvp_reply_error(c, 400, "path segment is malformed or longer than 4096 bytes");
		return -1;
	}
	c->seg_len = (size_t)n;
	c->seg[n] = 0;
	if (strncmp(rt->path, "/workers/", 9) == 0 && parse_worker_id(c) != 0) {
		kvp_reply_error(
			c, 400, "worker_id in the path must be an integer in 0..18446744073709551615");
		return -1;
	}
	return 0;
}

/* guarded: requests that change something need the token; the two that only look do not. */
static int guarded(const struct route *rt)
{
	return rt->method != KVP_HTTP_GET && rt->run != kvp_route_potential_loads &&
	       rt->run != kvp_route_overlap_scores;
}

#define NO_TOKEN "a valid bearer token is required"
#define ASK_TOKEN "WWW-Authenticate: Bearer\r\n"

static int authorized(struct kvp_httpd *h, const struct kvp_http_req *r, const struct route *rt)
{
	uint32_t len = 0;
	const char *value = guarded(rt) ? kvp_http_req_header(r, "authorization", &len) : NULL;
	if (!guarded(rt) || kvp_token_passes(&h->token, value, len))
		return 1;
	kvp_ctr_add(h->boot.ctr, KVP_CTR_HTTP_UNAUTHORIZED, 1);
	return 0;
}

static void dispatch(struct kvp_call *c, const struct route *rt, const char *seg, size_t seg_len)
{
	if (!authorized(c->h, c->req, rt)) {
		static const char body[] = "{\"error\":\"" NO_TOKEN "\"}";
		kvp_http_reply_extra(c->req, 401, "application/json", ASK_TOKEN, body, sizeof(body) - 1);
		return;
	}
	if (seg && take_segment(c, rt, seg, seg_len) != 0)
		return;
	if (rt->body != NO_BODY && !is_json(c->req)) {
		kvp_reply_error(c, 415, NOT_JSON);
		return;
	}
	if (rt->body == JSON_BODY) {
		int status = kvp_parse_body(&c->h->parse, c->req->body, c->req->body_len);
		if (status) {
			kvp_reply_error(c, status, c->h->parse.err);
			return;
		}
	}
	rt->run(c);
}

/* find looks a request up: the route, or NULL with 404 or 405 in *status. */
static const struct route *find(
	const struct kvp_http_req *r, const char **seg, size_t *seg_len, int *status, const char **text)
{
	*status = 404;
	*text = "route not found";
	for (size_t i = 0; i < ROUTE_CNT; i++) {
		*seg = NULL;
		if (!match(route[i].path, r->path, r->path_len, seg, seg_len))
			continue;
		if (route[i].method == r->method)
			return &route[i];
		*status = 405;
		*text = "method not allowed";
	}
	return NULL;
}

/* A body is read for nobody without the token. Other faults of its request are told behind it, so that the
 * connection can go on, unless it is refused anyway. */
void kvp_httpd_early(void *ctx, const struct kvp_http_req *r, struct kvp_http_refusal *why)
{
	const char *seg, *text;
	size_t seg_len = 0;
	int status;
	const struct route *rt = find(r, &seg, &seg_len, &status, &text);
	if (rt && !authorized(ctx, r, rt))
		*why = (struct kvp_http_refusal){401, NO_TOKEN, ASK_TOKEN};
	else if (why->status && !rt)
		*why = (struct kvp_http_refusal){status, text, NULL};
	else if (why->status && rt->body != NO_BODY && !is_json(r))
		*why = (struct kvp_http_refusal){415, NOT_JSON, NULL};
}

void kvp_httpd_request(void *ctx, struct kvp_http_req *r)
{
	kvp_httpd_run(ctx, r, 0);
}

/* The metrics port may be open to more clients than the API: it shows, and changes nothing. */
void kvp_httpd_metrics_request(void *ctx, struct kvp_http_req *r)
{
	struct kvp_call c = {.h = ctx, .req = r};
	const char *seg, *text;
	size_t seg_len;
	int status;
	const struct route *rt = find(r, &seg, &seg_len, &status, &text);
	if (r->path_len == 1 && r->path[0] == '/' && r->method == KVP_HTTP_GET) {
		kvp_status_redirect(&c);
		return;
	}
	if (rt && rt->run != kvp_route_metrics && rt->run != kvp_route_health && rt->run != kvp_route_ready &&
		rt->run != kvp_route_status) {
		status = 404;
		text = "route not found";
		rt = NULL;
	}
	if (rt)
		rt->run(&c);
	else
		kvp_reply_error(&c, status, text);
}

void kvp_httpd_run(struct kvp_httpd *h, struct kvp_http_req *r, uint64_t since_ns)
{
	struct kvp_call c = {.h = h, .req = r, .since_ns = since_ns};
	const char *seg, *text;
	size_t seg_len = 0;
	int status;
	uint64_t start_ns = kvp_loop_now_ns(h->loop);
	const struct route *rt = find(r, &seg, &seg_len, &status, &text);
	if (!rt) {
		kvp_reply_error(&c, status, text);
		return;
	}
	dispatch(&c, rt, seg, seg_len);
	kvp_hist_add(h->boot.ctr, KVP_HIST_HTTP_NS, kvp_clock_mono_ns() - start_ns);
}
