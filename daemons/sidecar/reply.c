#include <kvpick/err.h>
#include <stdio.h>
#include <string.h>

#include "daemons/common/log.h"
#include "daemons/sidecar/conn.h"

const char *const kvp_result_text[KVP_RESULT_CNT] = {
#define X(name, text) text,
	KVP_RESULTS(X)
#undef X
};
const char *const kvp_path_text[KVP_PATH_CNT] = {"chat_completions", "completions", "responses", "other"};

const struct kvp_fail kvp_fail_resources = {503, KVP_RESULT_NO_RESOURCES, "out of memory or descriptors"},
		      kvp_fail_held = {503, KVP_RESULT_NO_ROOM, "too many bytes are held for requests"};

static const char *reason(int status)
{
	static const struct {
		int status;
		const char *text;
	} known[] = {{200, "OK"}, {400, "Bad Request"}, {401, "Unauthorized"}, {403, "Forbidden"},
		{404, "Not Found"}, {405, "Method Not Allowed"}, {408, "Request Timeout"},
		{413, "Content Too Large"}, {414, "URI Too Long"}, {417, "Expectation Failed"},
		{422, "Unprocessable Content"}, {429, "Too Many Requests"},
		{431, "Request Header Fields Too Large"}, {500, "Internal Server Error"},
		{501, "Not Implemented"}, {502, "Bad Gateway"}, {503, "Service Unavailable"},
		{504, "Gateway Timeout"}, {505, "HTTP Version Not Supported"}};
	for (size_t i = 0; i < sizeof(known) / sizeof(known[0]); i++)
		if (known[i].status == status)
			return known[i].text;
	return "Status";
}

/* The whole head. length: KVP_LENGTH_NONE without a content-length. */
static int head_build(struct kvp_req *r, struct kvp_http_buf *b, const char *status, uint64_t status_len,
	const char *fields, uint64_t fields_len, uint64_t length)
{
	struct kvp_conn *c = r->conn;
	/* An answer before the end of the upload ends the connection, also when that end still comes. */
	if (c->w->draining || !kvp_conn_expects(c) || c->state == KVP_CONN_BODY ||
		r->framing == KVP_REPLY_CLOSE)
		c->keep = 0;
	int rc = c->prefix_out ? KVP_OK : kvp_http_buf_text(b, "HTTP/1.1 ");
	c->prefix_out = 0;
	rc = rc ? rc : kvp_http_buf_put(b, status, status_len);
	rc = rc ? rc : kvp_http_buf_text(b, "\r\n");
	rc = rc ? rc : kvp_http_buf_put(b, fields, fields_len);
	if (r->framing == KVP_REPLY_CHUNKED) {
		rc = rc ? rc : kvp_http_buf_text(b, "transfer-encoding: chunked\r\n");
	} else if (length != KVP_LENGTH_NONE) {
		rc = rc ? rc : kvp_headers_length(length, b);
	}
	if (!c->keep)
		rc = rc ? rc : kvp_http_buf_text(b, "connection: close\r\n");
	return rc ? rc : kvp_http_buf_text(b, "\r\n");
}

static void put_or_fail(struct kvp_conn *c, struct kvp_http_buf *b, int rc)
{
	if (rc) {
		c->out.failed = 1;
		kvp_conn_later(c);
	} else {
		kvp_conn_put(c, b->p, b->len);
	}
	kvp_http_buf_free(b);
}

int kvp_reply_keep_head(struct kvp_kept_head *k, const struct kvp_http_head *h)
{
	/* The number as it was read, then the engine's reason: the parser let no control bytes through. */
	const char *p = h->raw.p + 8, *end = h->raw.p + h->line_len;
	char number[KVP_DECIMAL_MAX];
	while (p < end && *p == ' ')
		p++;
	while (p < end && *p >= '0' && *p <= '9')
		p++;
	while (p < end && *p == ' ')
		p++;
	k->status = h->status;
	int rc = kvp_http_buf_put(&k->text, number, kvp_http_dec(number, h->status));
	rc = rc ? rc : kvp_http_buf_put(&k->text, " ", 1);
	rc = rc ? rc : kvp_http_buf_put(&k->text, p, (uint64_t)(end - p));
	k->status_len = k->text.len;
	return rc ? rc : kvp_headers_answer(h, &k->text);
}

void kvp_reply_kept_head(struct kvp_req *r, const struct kvp_kept_head *k)
{
	struct kvp_conn *c = r->conn;
	struct kvp_http_buf b = {0};
	int none = r->is_head || k->status == 204 || k->status == 304;
	r->replied = 1;
	r->status = k->status;
	r->framing = none ? KVP_REPLY_NONE : c->in.req.minor == 0 ? KVP_REPLY_CLOSE : KVP_REPLY_CHUNKED;
	int rc = head_build(r, &b, k->text.p, k->status_len, k->text.p + k->status_len,
		k->text.len - k->status_len, KVP_LENGTH_NONE);
	put_or_fail(c, &b, rc);
}

void kvp_reply_head(struct kvp_req *r, const struct kvp_http_head *h)
{
	struct kvp_kept_head k = {.status_len = 0};
	if (kvp_reply_keep_head(&k, h) == KVP_OK)
		kvp_reply_kept_head(r, &k);
	else
		r->conn->out.failed = 1;
	kvp_http_buf_free(&k.text);
	if (r->conn->out.failed)
		kvp_conn_later(r->conn);
}

uint64_t kvp_reply_body(struct kvp_req *r, const char *data, uint64_t len)
{
	struct kvp_conn *c = r->conn;
	char line[KVP_HTTP_CHUNK_LINE_MAX];
	if (!len || r->framing == KVP_REPLY_NONE || c->out.failed)
		return kvp_out_len(&c->out);
	int chunked = r->framing == KVP_REPLY_CHUNKED;
	uint64_t n = chunked ? kvp_http_chunk_line(line, len) : 0;
	/* Gathered as one piece: one send a chunk. */
	struct kvp_http_buf *b = &c->out.pend;
	int rc = kvp_http_buf_room(b, len + n + 2);
	rc = rc ? rc : kvp_http_buf_put(b, line, n);
	rc = rc ? rc : kvp_http_buf_put(b, data, chunked ? len : len - 1);
	if (rc) {
		c->out.failed = 1;
		kvp_conn_later(c);
		return 0;
	}
	kvp_conn_put(c, chunked ? "\r\n" : data + len - 1, chunked ? 2 : 1);
	return kvp_out_len(&c->out);
}

void kvp_reply_end(struct kvp_req *r, enum kvp_result result)
{
	if (r->framing == KVP_REPLY_CHUNKED)
		kvp_conn_put(r->conn, "0\r\n\r\n", 5);
	kvp_req_end(r, result);
}

void kvp_reply_cut(struct kvp_req *r, enum kvp_result result)
{
	/* Where the end of the connection is the end of the body, only a reset says that it is not. */
	r->conn->keep = 0;
	r->conn->cut = r->framing == KVP_REPLY_CLOSE;
	kvp_req_end(r, result);
}

static void reply_own(struct kvp_req *r, int status, const struct kvp_http_buf *fields, const char *body,
	uint64_t len, enum kvp_result result)
{
	struct kvp_http_buf b = {0};
	char line[64];
	int n = snprintf(line, sizeof(line), "%d %s", status, reason(status));
	r->replied = 1;
	r->status = status;
	r->framing = KVP_REPLY_NONE;
	int rc = head_build(r, &b, line, (uint64_t)n, fields->p, fields->len, len);
	if (!r->is_head)
		rc = rc ? rc : kvp_http_buf_put(&b, body, len);
	put_or_fail(r->conn, &b, rc);
	kvp_req_end(r, result);
}

void kvp_reply_whole(struct kvp_req *r, int status, const char *content_type, const char *body, uint64_t len)
{
	struct kvp_http_buf f = {0};
	char line[96];
	if (content_type) {
		int n = snprintf(line, sizeof(line), "content-type: %s\r\n", content_type);
		kvp_http_buf_put(&f, line, (uint64_t)n);
	}
	if (status == 405)
		kvp_http_buf_text(&f, r->path == KVP_PATH_OTHER ? "allow: GET, HEAD\r\n" : "allow: POST\r\n");
	reply_own(r, status, &f, body, len, status == 200 ? KVP_RESULT_OK : KVP_RESULT_OTHER);
	kvp_http_buf_free(&f);
}

#define WARN_NS UINT64_C(1000000000) /* least time between two warnings of a worker */

/* Status and code; nothing that client or engines said. */
static void warn(struct kvp_req *r, const struct kvp_fail *f)
{
	uint64_t left_out = 0;
	if (kvp_log_limit_pass(&r->w->warned, kvp_loop_now_ns(r->w->loop), WARN_NS, &left_out))
		KVP_LOG_W("sidecar.request", "status=%d code=%s suppressed=%llu", f->status,
			kvp_result_text[f->result], (unsigned long long)left_out);
}

/* vLLM's shape, which the other profile speaks: the kind of the error is its status. */
static const char *llmd_type(int status)
{
	if (status < 500)
		return "BadRequestError";
	return status == 503			? "ServiceUnavailable"
	       : status == 502 || status == 504 ? "BadGateway"
						: "InternalServerError";
}

static int error_body(const struct kvp_req *r, const struct kvp_fail *f, char *body, size_t cap)
{
	if (r->w->cfg->sidecar_profile)
		return snprintf(body, cap,
			"{\"object\":\"error\",\"message\":\"%s\",\"type\":\"%s\",\"param\":\"\",\"code\":%"
			"d}",
			f->message, llmd_type(f->status), f->status);
	return snprintf(body, cap,
		"{\"error\":{\"message\":\"%s\",\"type\":\"server_error\",\"param\":null,\"code\":\"%s\"}}",
		f->message, kvp_result_text[f->result]);
}

void kvp_reply_error(struct kvp_req *r, const struct kvp_fail *f, const char *retry_after)
{
	warn(r, f);
	struct kvp_http_buf fields = {0};
	char body[512], line[192];
	int n = error_body(r, f, body, sizeof(body));
	kvp_http_buf_text(&fields, "content-type: application/json\r\n");
	if (retry_after) {
		snprintf(line, sizeof(line), "retry-after: %s\r\n", retry_after);
		kvp_http_buf_text(&fields, line);
	}
	reply_own(r, f->status, &fields, body, (uint64_t)n, f->result);
	kvp_http_buf_free(&fields);
}

void kvp_reply_error_text(struct kvp_req *r, const struct kvp_fail *f)
{
	warn(r, f);
	struct kvp_http_buf fields = {0};
	kvp_http_buf_text(&fields, "content-type: text/plain; charset=utf-8\r\n");
	reply_own(r, f->status, &fields, f->message, strlen(f->message), f->result);
	kvp_http_buf_free(&fields);
}
