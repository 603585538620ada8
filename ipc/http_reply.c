#include <http_parser.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <kvpick/err.h>
#include "ipc/http_server_priv.h"

static const char *reason(int status)
{
	switch (status) {
#define X(num, name, string)                                                                                 \
	case num:                                                                                            \
		return #string;
		HTTP_STATUS_MAP(X)
#undef X
	default:
		return "Status";
	}
}

void kvp_http_put(struct http_conn *c, const void *data, uint64_t len)
{
	if (kvp_http_buf_put(&c->out, data, len))
		c->dead = 1; /* no memory: half a reply must not look like a whole one */
	c->put_bytes += len;
}

static void put_text(struct http_conn *c, const char *text)
{
	kvp_http_put(c, text, strlen(text));
}

static const char *date_now(struct kvp_http_server *s)
{
	uint64_t now_s = kvp_loop_now_ns(s->loop) / 1000000000u + 1;
	if (s->date_s != now_s) {
		time_t t = time(NULL);
		struct tm tm;
		gmtime_r(&t, &tm);
		static const char day[7][4] = {"Sun", "Mon", "Tue", "Wed", "Thu", "Fri", "Sat"};
		static const char month[12][4] = {
			"Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"};
		snprintf(s->date, sizeof(s->date), "%s, %02u %s %04u %02u:%02u:%02u GMT", day[tm.tm_wday],
			(unsigned)tm.tm_mday % 100, month[tm.tm_mon], (unsigned)(tm.tm_year + 1900) % 10000,
			(unsigned)tm.tm_hour % 100, (unsigned)tm.tm_min % 100, (unsigned)tm.tm_sec % 100);
		s->date_s = now_s;
	}
	return s->date;
}

void kvp_http_put_head(
	struct http_conn *c, int status, const char *content_type, const char *extra, uint64_t body_len)
{
	char number[KVP_DECIMAL_MAX];
	if (!c->prefix_sent)
		put_text(c, KVP_HTTP_PREFIX);
	kvp_http_put(c, number, kvp_http_dec(number, (unsigned)status));
	put_text(c, " ");
	put_text(c, reason(status));
	put_text(c, "\r\nDate: ");
	put_text(c, date_now(c->srv));
	put_text(c, "\r\n");
	if (content_type) {
		put_text(c, "Content-Type: ");
		put_text(c, content_type);
		put_text(c, "\r\n");
	}
	if (c->reply == REPLY_CHUNKED) {
		put_text(c, "Transfer-Encoding: chunked\r\n");
	} else if (c->reply == REPLY_NONE && status != 204 && status != 304) {
		put_text(c, "Content-Length: ");
		kvp_http_put(c, number, kvp_http_dec(number, body_len));
		put_text(c, "\r\n");
	}
	if (extra)
		put_text(c, extra);
	if (!c->keep)
		put_text(c, "Connection: close\r\n");
	put_text(c, "\r\n");
}

static int keeps(const struct http_conn *c)
{
	return c->in.req.minor && c->in.head.keep_alive && !c->overrun && !c->srv->draining;
}

/* The handler is done: the connection takes the next request or ends behind its output. */
static void reply_done(struct http_conn *c)
{
	c->state = c->keep && !c->overrun ? CONN_READ : CONN_FLUSH;
	c->reply = REPLY_NONE;
	c->on_drain = NULL;
	c->prefix_sent = c->drain_asked = 0;
	c->served++;
	kvp_http_tags_push(c);
	c->idle_ns = kvp_loop_now_ns(c->srv->loop);
	kvp_http_in_reset(&c->in);
	c->asked = 0;
	kvp_http_conn_hold(c, 0, KVP_HELD_TAKE);
	kvp_http_conn_work_later(c);
}

void kvp_http_req_forget_body(struct kvp_http_req *r)
{
	static const char none[KVP_HTTP_BODY_SLACK];
	struct http_conn *c = conn_of(r);
	KVP_ASSERT(c->state == CONN_BUSY);
	r->body = none;
	r->body_len = 0;
	kvp_http_buf_free(&c->in.body);
	kvp_http_conn_hold(c, 0, KVP_HELD_TAKE);
}

void kvp_http_reply_extra(struct kvp_http_req *r, int status, const char *content_type, const char *extra,
	const void *body, uint64_t len)
{
	struct http_conn *c = conn_of(r);
	KVP_ASSERT(c->state == CONN_BUSY && c->reply == REPLY_NONE);
	c->keep = (uint8_t)keeps(c);
	kvp_http_put_head(c, status, content_type, extra, len);
	if (!r->is_head && status != 204 && status != 304)
		kvp_http_put(c, body, len);
	reply_done(c);
}

void kvp_http_reply(
	struct kvp_http_req *r, int status, const char *content_type, const void *body, uint64_t len)
{
	kvp_http_reply_extra(r, status, content_type, NULL, body, len);
}

void kvp_http_reply_begin(struct kvp_http_req *r, int status, const char *content_type, const char *extra,
	void (*on_drain)(void *ctx, struct kvp_http_req *r))
{
	struct http_conn *c = conn_of(r);
	KVP_ASSERT(c->state == CONN_BUSY && c->reply == REPLY_NONE);
	c->reply = r->minor ? REPLY_CHUNKED : REPLY_TO_CLOSE;
	c->keep = (uint8_t)keeps(c);
	c->on_drain = on_drain;
	kvp_http_put_head(c, status, content_type, extra, 0);
	kvp_http_conn_work_later(c);
}

int kvp_http_reply_chunk(struct kvp_http_req *r, const void *data, uint64_t len)
{
	struct http_conn *c = conn_of(r);
	KVP_ASSERT(c->state == CONN_BUSY && c->reply != REPLY_NONE);
	if (!r->is_head && len) {
		char line[KVP_HTTP_CHUNK_LINE_MAX];
		if (c->reply == REPLY_CHUNKED)
			kvp_http_put(c, line, kvp_http_chunk_line(line, len));
		kvp_http_put(c, data, len);
		if (c->reply == REPLY_CHUNKED)
			kvp_http_put(c, "\r\n", 2);
		kvp_http_conn_work_later(c);
	}
	if (c->out.len + c->fly_len < c->srv->cfg.stream_high_bytes)
		return KVP_OK;
	c->drain_asked = 1;
	return KVP_ERR_AGAIN;
}

void kvp_http_reply_end(struct kvp_http_req *r)
{
	struct http_conn *c = conn_of(r);
	KVP_ASSERT(c->state == CONN_BUSY && c->reply != REPLY_NONE);
	if (c->reply == REPLY_CHUNKED && !r->is_head)
		kvp_http_put(c, "0\r\n\r\n", 5);
	reply_done(c);
}

void kvp_http_reply_abort(struct kvp_http_req *r)
{
	struct http_conn *c = conn_of(r);
	KVP_ASSERT(c->state == CONN_BUSY);
	c->state = CONN_FLUSH;
	c->dead = 1;
	kvp_http_conn_work_later(c);
}
