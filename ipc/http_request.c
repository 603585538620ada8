#include <http_parser.h>
#include <string.h>
#include <strings.h>
#include <kvpick/err.h>
#include "ipc/http_parse.h"

static const char no_body[KVP_HTTP_BODY_SLACK];

static int fail(struct kvp_http_in *in, int status, const char *text)
{
	in->phase = KVP_HTTP_IN_FAILED;
	in->status = status;
	in->text = text;
	return KVP_ERR_PROTO;
}

static enum kvp_http_method method_of(uint8_t m)
{
	switch (m) {
	case HTTP_GET:
	case HTTP_HEAD:
		return KVP_HTTP_GET;
	case HTTP_POST:
		return KVP_HTTP_POST;
	case HTTP_PUT:
		return KVP_HTTP_PUT;
	case HTTP_PATCH:
		return KVP_HTTP_PATCH;
	case HTTP_DELETE:
		return KVP_HTTP_DELETE;
	case HTTP_OPTIONS:
		return KVP_HTTP_OPTIONS;
	default:
		return KVP_HTTP_OTHER;
	}
}

/* Exactly "METHOD SP target SP HTTP/x.y": the library skips further spaces. */
static int line_exact(const struct kvp_http_head *h)
{
	size_t method_len = strlen(http_method_str((enum http_method)h->method));
	if (h->url != method_len + 1 || h->url + h->url_len + 9 != h->line_len)
		return KVP_ERR_PROTO;
	for (uint32_t i = 0; i < h->url_len; i++) {
		unsigned char c = (unsigned char)h->raw.p[h->url + i];
		if (c <= 32 || c >= 127 || c == '#')
			return KVP_ERR_PROTO;
	}
	return KVP_OK;
}

static int target_split(struct kvp_http_req *r, const char *t, uint32_t len)
{
	if (len >= 7 &&
		(strncasecmp(t, "http://", 7) == 0 || (len >= 8 && strncasecmp(t, "https://", 8) == 0))) {
		uint32_t at = (t[4] | 32) == 's' ? 8 : 7, from = at;
		while (at < len && t[at] != '/' && t[at] != '?')
			at++;
		if (at == from)
			return KVP_ERR_PROTO;
		t += at;
		len -= at;
	} else if (!(len && t[0] == '/') && !(len == 1 && t[0] == '*' && r->method == KVP_HTTP_OPTIONS)) {
		return KVP_ERR_PROTO;
	}
	const char *q = len ? memchr(t, '?', len) : NULL;
	r->path = t;
	r->path_len = q ? (uint32_t)(q - t) : len;
	if (q) {
		r->query = q + 1;
		r->query_len = len - r->path_len - 1;
	}
	if (!r->path_len) {
		r->path = "/";
		r->path_len = 1;
	}
	return KVP_OK;
}

static int head_done(struct kvp_http_in *in)
{
	struct kvp_http_head *h = &in->head;
	struct kvp_http_req *r = &in->req;
	uint32_t len = 0, cnt = 0;
	int rc = kvp_http_head_parse(h, KVP_HTTP_KIND_REQUEST);
	if (rc == KVP_ERR_LIMIT)
		return fail(in, 431, "too many header fields");
	if (h->version >> 8 > 1)
		return fail(in, 505, "HTTP version not supported");
	if (rc || h->version < 0x100 || line_exact(h))
		return fail(in, 400, "malformed request");
	if (h->version > 0x101)
		return fail(in, 505, "HTTP version not supported");
	kvp_http_head_find(h, "host", NULL, &cnt);
	if (cnt > 1)
		return fail(in, 400, "repeated Host");
	if (cnt == 0 && h->minor)
		return fail(in, 400, "missing Host");
	rc = kvp_http_head_framing(h, &in->framing, &in->length);
	if (rc == KVP_ERR_INVAL)
		return fail(in, 501, "transfer coding not supported");
	if (rc)
		return fail(in, 400, "contradictory or malformed message length");
	r->method = method_of(h->method);
	r->is_head = h->method == HTTP_HEAD;
	r->minor = h->minor;
	if (h->method == HTTP_CONNECT)
		return fail(in, 501, "method not supported");
	if (target_split(r, h->raw.p + h->url, h->url_len))
		return fail(in, 400, "malformed request target");
	const char *expect = kvp_http_head_find(h, "expect", &len, NULL);
	if (expect && (len != 12 || strncasecmp(expect, "100-continue", 12) != 0))
		return fail(in, 417, "expectation not supported");
	in->expect = expect && h->minor == 1;
	r->content_type = kvp_http_head_find(h, "content-type", &len, NULL);
	r->content_type_len = r->content_type ? len : 0;
	if (in->framing == KVP_HTTP_FRAME_LENGTH && in->length > in->body_max)
		return fail(in, 413, "request body too large");
	in->phase = KVP_HTTP_IN_BODY;
	return KVP_ERR_AGAIN;
}

static int body_done(struct kvp_http_in *in)
{
	in->req.body = no_body;
	in->req.body_len = in->body.len;
	if (in->body.len) {
		if (kvp_http_buf_room(&in->body, KVP_HTTP_BODY_SLACK))
			return fail(in, 503, "out of memory");
		memset(in->body.p + in->body.len, 0, KVP_HTTP_BODY_SLACK);
		in->req.body = in->body.p;
	}
	in->phase = KVP_HTTP_IN_DONE;
	return KVP_OK;
}

static int body_put(struct kvp_http_in *in, const char *data, uint64_t len)
{
	if (len > in->body_max - in->body.len)
		return fail(in, 413, "request body too large");
	return kvp_http_buf_put(&in->body, data, len) ? fail(in, 503, "out of memory") : KVP_ERR_AGAIN;
}

static int body_feed(struct kvp_http_in *in, const char *data, uint64_t len, uint64_t *used)
{
	if (in->framing == KVP_HTTP_FRAME_NONE)
		return body_done(in);
	if (in->framing == KVP_HTTP_FRAME_LENGTH) {
		uint64_t left = in->length - in->body.len, n = len < left ? len : left;
		int rc = body_put(in, data, n);
		*used += n;
		return rc == KVP_ERR_AGAIN && n == left ? body_done(in) : rc;
	}
	int rc = KVP_ERR_AGAIN;
	for (uint64_t at = 0; rc == KVP_ERR_AGAIN && at < len;) {
		const char *out;
		uint64_t n, out_len;
		rc = kvp_http_chunk_feed(&in->chunk, data + at, len - at, &n, &out, &out_len);
		at += n;
		*used += n;
		if (out_len && body_put(in, out, out_len) == KVP_ERR_PROTO)
			return KVP_ERR_PROTO;
		/* Known to be too large before its bytes are here. */
		if (rc == KVP_ERR_AGAIN && kvp_http_chunk_due(&in->chunk) > in->body_max - in->body.len)
			return fail(in, 413, "request body too large");
	}
	if (rc == KVP_ERR_PROTO)
		return fail(in, 400, "malformed chunk");
	return rc ? rc : body_done(in);
}

int kvp_http_in_head(struct kvp_http_in *in, const char *data, uint64_t len, uint64_t *used)
{
	*used = 0;
	if (in->phase == KVP_HTTP_IN_HEAD) {
		int rc = kvp_http_head_feed(&in->head, data, len, used);
		in->started |= in->head.raw.len > 0;
		if (rc == KVP_ERR_LIMIT)
			return in->head.over_line ? fail(in, 414, "request line too long")
						  : fail(in, 431, "header block too large");
		if (rc == KVP_ERR_PROTO)
			return fail(in, 400, "malformed request");
		if (rc == KVP_ERR_SYS)
			return fail(in, 503, "out of memory");
		if (rc || (rc = head_done(in)) != KVP_ERR_AGAIN)
			return rc;
	}
	return in->phase == KVP_HTTP_IN_FAILED ? KVP_ERR_PROTO : KVP_OK;
}

int kvp_http_in_feed(struct kvp_http_in *in, const char *data, uint64_t len, uint64_t *used)
{
	int rc = kvp_http_in_head(in, data, len, used);
	if (rc || in->phase == KVP_HTTP_IN_DONE)
		return rc;
	return body_feed(in, data + *used, len - *used, used);
}

void kvp_http_in_reset(struct kvp_http_in *in)
{
	kvp_http_head_reset(&in->head);
	kvp_http_buf_trim(&in->body);
	in->chunk = (struct kvp_http_chunk){0};
	in->framing = KVP_HTTP_FRAME_NONE;
	in->phase = KVP_HTTP_IN_HEAD;
	in->length = 0;
	in->expect = in->started = 0;
	in->status = 0;
	in->text = NULL;
	in->req = (struct kvp_http_req){0};
}

void kvp_http_in_free(struct kvp_http_in *in)
{
	kvp_http_head_free(&in->head);
	kvp_http_buf_free(&in->body);
}
