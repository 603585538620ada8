#include <kvpick/err.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>

#include "daemons/sidecar/conn.h"

/* Of one connection, or rewritten: they never pass. */
static const char *const hop[] = {"connection", "keep-alive", "proxy-connection", "proxy-authenticate",
	"proxy-authorization", "te", "trailer", "transfer-encoding", "upgrade", "host", "content-length"};
static const char *const to_engine[] = {KVP_TARGET_HEADER, "x-prefiller-dp-rank", "expect"};
/* Our own of the two legs, and what only one engine may see: a rank is one engine's, and a compressed
 * prefill answer could not be read. */
static const char *const pd[] = {"content-type"};
static const char *const prefill[] = {"accept-encoding", "x-data-parallel-rank"};
static const char *const strict[] = {"x-gateway-destination-endpoint",
	"x-gateway-destination-endpoint-served", "x-gateway-destination-endpoint-subset",
	"x-gateway-inference-fairness-id", "x-gateway-inference-objective", "x-gateway-model-name-rewrite",
	"x-dynamo-worker-instance-id", "x-dynamo-prefill-instance-id", "x-dynamo-dp-rank",
	"x-dynamo-prefill-dp-rank", "x-dynamo-routing-mode"};
/* Of the other profile: what its sidecar acts on, and what we have no stage for. */
static const char *const llmd[] = {"x-encoder-hosts-ports", "x-data-parallel-host-port"};

#define IN(list, name, len) is_in(list, sizeof(list) / sizeof((list)[0]), name, len)

/* Names are never empty, and those of the lists begin with a small letter. */
static int is_in(const char *const *list, size_t cnt, const char *name, size_t len)
{
	for (size_t i = 0; i < cnt; i++)
		if (list[i][0] == (name[0] | 32) && strncasecmp(list[i], name, len) == 0 && !list[i][len])
			return 1;
	return 0;
}

/* Whether a Connection field names it. */
static int is_nominated(const struct kvp_http_head *h, const char *name, uint32_t len)
{
	for (uint32_t i = 0; i < h->field_cnt; i++) {
		const struct kvp_http_field *f = &h->field[i];
		if (f->name_len != 10 || strncasecmp(h->raw.p + f->name, "connection", 10) != 0)
			continue;
		const char *p = h->raw.p + f->val, *end = p + f->val_len;
		while (p < end) {
			while (p < end && (*p == ' ' || *p == '\t' || *p == ','))
				p++;
			const char *to = p;
			while (to < end && *to != ',' && *to != ' ' && *to != '\t')
				to++;
			if ((size_t)(to - p) == len && strncasecmp(p, name, len) == 0)
				return 1;
			p = to;
		}
	}
	return 0;
}

static int put_field(struct kvp_http_buf *b, const struct kvp_http_head *h, const struct kvp_http_field *f)
{
	uint64_t len = (uint64_t)f->name_len + f->val_len + 4;
	if (kvp_http_buf_room(b, len))
		return KVP_ERR_SYS;
	char *p = b->p + b->len;
	memcpy(p, h->raw.p + f->name, f->name_len);
	p += f->name_len;
	memcpy(p, ": ", 2);
	memcpy(p + 2, h->raw.p + f->val, f->val_len);
	memcpy(p + 2 + f->val_len, "\r\n", 2);
	b->len += len;
	return KVP_OK;
}

const struct kvp_http_head *kvp_req_head(const struct kvp_req *r)
{
	return &r->conn->in.head;
}

static int is_id(const char *name, uint32_t len)
{
	return len == 12 && strncasecmp(name, "x-request-id", 12) == 0;
}

const char *kvp_headers_id(const struct kvp_req *r, uint32_t *len)
{
	const struct kvp_http_head *h = kvp_req_head(r);
	for (uint32_t i = 0; i < h->field_cnt; i++) {
		const struct kvp_http_field *f = &h->field[i];
		const char *name = h->raw.p + f->name;
		if (!f->val_len || !is_id(name, f->name_len) || is_nominated(h, name, f->name_len))
			continue;
		*len = f->val_len;
		return h->raw.p + f->val;
	}
	return NULL;
}

static int passes(const struct kvp_req *r, enum kvp_leg_kind kind, const char *name, uint32_t len)
{
	const struct kvp_config *cfg = r->w->cfg;
	if (IN(hop, name, len) || IN(to_engine, name, len))
		return 0;
	if (kind != KVP_LEG_PASS && IN(pd, name, len))
		return 0;
	if (kind == KVP_LEG_PREFILL && IN(prefill, name, len))
		return 0;
	if (cfg->sidecar_strip_strict && IN(strict, name, len))
		return 0;
	return !cfg->sidecar_profile || !IN(llmd, name, len);
}

const char *kvp_headers_rank(const struct kvp_req *r, uint32_t *len)
{
	uint32_t cnt = 0;
	const char *v = kvp_http_head_find(kvp_req_head(r), "x-prefiller-dp-rank", len, &cnt);
	if (cnt != 1 || !*len || *len > 9 || (*v == '0' && *len > 1))
		return NULL;
	for (uint32_t i = 0; i < *len; i++)
		if (v[i] < '0' || v[i] > '9')
			return NULL;
	return v;
}

/* It travels in a field of its own. */
static int put_rank(struct kvp_req *r, struct kvp_http_buf *out)
{
	uint32_t len = 0;
	const char *v = kvp_headers_rank(r, &len);
	if (!v)
		return KVP_OK;
	int rc = kvp_http_buf_text(out, "x-data-parallel-rank: ");
	rc = rc ? rc : kvp_http_buf_put(out, v, len);
	return rc ? rc : kvp_http_buf_text(out, "\r\n");
}

static const char *authority(const struct kvp_req *r, enum kvp_req_engine_kind kind)
{
	return kind == KVP_ENGINE_PREFILL ? r->target.authority : r->w->engine;
}

static const char *base(const struct kvp_req *r, enum kvp_req_engine_kind kind)
{
	return kind == KVP_ENGINE_PREFILL ? "" : r->w->base;
}

static int put_line(struct kvp_req *r, enum kvp_req_engine_kind kind, struct kvp_http_buf *out)
{
	const struct kvp_http_in *in = &r->conn->in;
	const char *url = in->req.path;
	uint64_t len = in->req.path_len + (in->req.query ? in->req.query_len + 1 : 0);
	/* The method as it was written: a foreign one passes, too. */
	const char *line = in->head.raw.p;
	int rc = kvp_http_buf_put(out, line, in->head.url ? in->head.url - 1 : 0);
	rc = rc ? rc : kvp_http_buf_text(out, " ");
	if (url[0] == '/') /* no path is "*" */
		rc = rc ? rc : kvp_http_buf_text(out, base(r, kind));
	rc = rc ? rc : kvp_http_buf_put(out, url, len);
	rc = rc ? rc : kvp_http_buf_text(out, " HTTP/1.1\r\nhost: ");
	rc = rc ? rc : kvp_http_buf_text(out, authority(r, kind));
	return rc ? rc : kvp_http_buf_text(out, "\r\n");
}

int kvp_headers_request(struct kvp_req *r, enum kvp_leg_kind kind, uint64_t length, struct kvp_http_buf *out)
{
	const struct kvp_http_head *h = kvp_req_head(r);
	char line[80];
	int rc = kvp_http_buf_room(out, h->raw.len + 256);
	rc = rc ? rc : put_line(r, kind == KVP_LEG_PREFILL ? KVP_ENGINE_PREFILL : KVP_ENGINE_LOCAL, out);
	for (uint32_t i = 0; i < h->field_cnt && !rc; i++) {
		const struct kvp_http_field *f = &h->field[i];
		const char *name = h->raw.p + f->name;
		int is_empty_id = !f->val_len && is_id(name, f->name_len);
		if (passes(r, kind, name, f->name_len) && !is_nominated(h, name, f->name_len) && !is_empty_id)
			rc = put_field(out, h, f);
	}
	if (r->request_id[0]) {
		snprintf(line, sizeof(line), "x-request-id: %s\r\n", r->request_id);
		rc = rc ? rc : kvp_http_buf_text(out, line);
	}
	if (kind != KVP_LEG_PASS)
		rc = rc ? rc : kvp_http_buf_text(out, "content-type: application/json\r\n");
	if (kind == KVP_LEG_PREFILL)
		rc = rc ? rc : put_rank(r, out);
	if (length == KVP_LENGTH_CHUNKED) {
		rc = rc ? rc : kvp_http_buf_text(out, "transfer-encoding: chunked\r\n");
	} else if (length != KVP_LENGTH_NONE) {
		rc = rc ? rc : kvp_headers_length(length, out);
	}
	return rc ? rc : kvp_http_buf_text(out, "\r\n");
}

int kvp_headers_length(uint64_t length, struct kvp_http_buf *out)
{
	char number[KVP_DECIMAL_MAX];
	int rc = kvp_http_buf_text(out, "content-length: ");
	rc = rc ? rc : kvp_http_buf_put(out, number, kvp_http_dec(number, length));
	return rc ? rc : kvp_http_buf_text(out, "\r\n");
}

int kvp_headers_whole(struct kvp_req *r, enum kvp_leg_kind kind, struct kvp_http_buf *body)
{
	struct kvp_http_buf head = {0};
	int rc = kvp_headers_request(r, kind, body->len, &head);
	rc = rc ? rc : kvp_http_buf_room(body, head.len);
	if (rc == KVP_OK) {
		memmove(body->p + head.len, body->p, body->len);
		memcpy(body->p, head.p, head.len);
		body->len += head.len;
	}
	kvp_http_buf_free(&head);
	return rc;
}

int kvp_headers_side(struct kvp_req *r, enum kvp_req_engine_kind kind, const char *path, const char *body,
	struct kvp_http_buf *out)
{
	const struct kvp_http_head *h = kvp_req_head(r);
	char line[KVP_TARGET_HOST_MAX + KVP_BASE_MAX + 160];
	snprintf(line, sizeof(line), "%s %s%s HTTP/1.1\r\nhost: %s\r\n", body ? "POST" : "GET", base(r, kind),
		path, authority(r, kind));
	int rc = kvp_http_buf_text(out, line);
	for (uint32_t i = 0; i < h->field_cnt && !rc; i++)
		if (h->field[i].name_len == 13 &&
			strncasecmp(h->raw.p + h->field[i].name, "authorization", 13) == 0)
			rc = put_field(out, h, &h->field[i]);
	if (body) {
		snprintf(line, sizeof(line), "content-type: application/json\r\ncontent-length: %zu\r\n",
			strlen(body));
		rc = rc ? rc : kvp_http_buf_text(out, line);
	}
	rc = rc ? rc : kvp_http_buf_text(out, "\r\n");
	return rc || !body ? rc : kvp_http_buf_text(out, body);
}

int kvp_headers_answer(const struct kvp_http_head *h, struct kvp_http_buf *out)
{
	int rc = KVP_OK;
	for (uint32_t i = 0; i < h->field_cnt && !rc; i++) {
		const struct kvp_http_field *f = &h->field[i];
		const char *name = h->raw.p + f->name;
		if (!IN(hop, name, f->name_len) && !is_nominated(h, name, f->name_len))
			rc = put_field(out, h, f);
	}
	return rc;
}
