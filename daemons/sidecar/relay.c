#include <kvpick/err.h>
#include <stdio.h>
#include <string.h>

#include "daemons/sidecar/conn.h"

void kvp_engine_cfg(const struct kvp_worker *w, enum kvp_req_engine_kind kind, const struct kvp_target *t,
	struct kvp_leg_cfg *cfg)
{
	*cfg = (struct kvp_leg_cfg){.connect_ns = w->cfg->sidecar_connect_timeout_ms * UINT64_C(1000000),
		.gap_ns = w->cfg->sidecar_read_timeout_ms * UINT64_C(1000000)};
	int wanted = w->cfg->sidecar_engine_tls; /* bit 1: prefill, bit 2: decode */
	if (wanted & (kind == KVP_ENGINE_PREFILL ? 1 : 2)) {
		const char *name = w->cfg->sidecar_engine_name;
		cfg->tls = w->tls;
		cfg->tls_name = name[0] ? name : kind == KVP_ENGINE_PREFILL ? t->host : "localhost";
	}
	if (kind == KVP_ENGINE_PREFILL) {
		cfg->host = t->host;
		cfg->port = t->port;
		return;
	}
	cfg->to = w->engine_at;
}

/* What is kept of a request in two legs: less and less. */
static void hold_leg(struct kvp_req *r)
{
	if (r->adapter)
		kvp_req_hold(r, kvp_leg_held(&r->decode));
}

/* The engine has its request: nothing of it is kept any more, as a rule. */
static void on_head(void *ctx, struct kvp_leg *leg)
{
	hold_leg(ctx);
	kvp_reply_head(ctx, leg->head);
}

void kvp_relay_put(struct kvp_req *r, struct kvp_leg *leg, const char *data, uint64_t len)
{
	if (kvp_reply_body(r, data, len) >= KVP_OUT_HIGH_BYTES)
		kvp_leg_pause(leg);
}

static void on_body(void *ctx, struct kvp_leg *leg, const char *data, uint64_t len)
{
	kvp_relay_put(ctx, leg, data, len);
}

static void count_leg(struct kvp_req *r, const struct kvp_leg *leg)
{
	kvp_count_leg(&r->w->count, KVP_COUNT_DECODE, kvp_loop_now_ns(r->w->loop) - leg->start_ns);
}

/* What the client is told of a decode leg without an answer. */
static struct kvp_fail failure(const struct kvp_req *r, enum kvp_leg_end end)
{
	if (end == KVP_LEG_FAILED)
		return kvp_fail_resources;
	struct kvp_fail error = {502, KVP_RESULT_DECODE_ERROR,
				"the decode engine could not be reached or broke off"},
			late = {504, KVP_RESULT_DECODE_TIMEOUT, "the decode engine did not answer in time"},
			refused = {503, KVP_RESULT_DECODE_ERROR, "the decode node is not ready"};
	int is_llmd = r->w->cfg->sidecar_profile;
	if (is_llmd && end == KVP_LEG_REFUSED)
		return refused;
	if (end != KVP_LEG_READ_TIMEOUT && end != KVP_LEG_CONNECT_TIMEOUT)
		return error;
	late.status = is_llmd ? 502 : 504;
	return late;
}

static void on_done(void *ctx, struct kvp_leg *leg, enum kvp_leg_end end)
{
	struct kvp_req *r = ctx;
	count_leg(r, leg);
	if (r->replied && end == KVP_LEG_COMPLETE) {
		kvp_reply_end(r, KVP_RESULT_OK);
	} else if (r->replied) {
		kvp_reply_cut(r, KVP_RESULT_DECODE_CUT);
	} else {
		struct kvp_fail f = failure(r, end);
		kvp_reply_error(r, &f, NULL);
	}
}

static void on_room(void *ctx, struct kvp_leg *leg)
{
	struct kvp_req *r = ctx;
	(void)leg;
	if (!r->replied)
		hold_leg(r);
	kvp_conn_room(r->conn);
}

static const struct kvp_leg_ops plain_ops = {on_head, on_body, on_done, on_room};

/* ---- the same with its usage set ---- */

static void usage_head(void *ctx, struct kvp_leg *leg)
{
	struct kvp_req *r = ctx;
	r->usage->form = kvp_usage_form(leg->head);
	on_head(ctx, leg);
}

/* rc of the call that filled b. */
static void put_usage(struct kvp_req *r, struct kvp_leg *leg, int rc, struct kvp_http_buf *b)
{
	if (rc) {
		r->conn->out.failed = 1;
		kvp_conn_later(r->conn);
	} else {
		kvp_relay_put(r, leg, b->p, b->len);
	}
	kvp_http_buf_free(b);
}

/* What is little is not counted. */
static int hold_usage(struct kvp_req *r, uint64_t len)
{
	return kvp_req_hold(r, len > KVP_OUT_HIGH_BYTES ? len : 0);
}

static void usage_body(void *ctx, struct kvp_leg *leg, const char *data, uint64_t len)
{
	struct kvp_req *r = ctx;
	struct kvp_http_buf b = {0};
	r->usage->is_tight = hold_usage(r, r->usage->held.len + len) != KVP_OK;
	put_usage(r, leg, kvp_usage_feed(r->usage, data, len, &b), &b);
	hold_usage(r, r->usage->held.len);
}

/* An answer that breaks off ends behind what came of it. */
static void usage_done(void *ctx, struct kvp_leg *leg, enum kvp_leg_end end)
{
	struct kvp_req *r = ctx;
	struct kvp_http_buf b = {0};
	if (r->replied)
		put_usage(r, leg, kvp_usage_end(r->usage, &b), &b);
	on_done(ctx, leg, end);
}

static const struct kvp_leg_ops usage_ops = {usage_head, usage_body, usage_done, on_room};

void kvp_relay_drained(struct kvp_req *r)
{
	kvp_leg_resume(&r->decode);
}

void kvp_relay_start(struct kvp_req *r, enum kvp_leg_kind kind, struct kvp_http_buf *body)
{
	struct kvp_leg_cfg cfg;
	kvp_engine_cfg(r->w, KVP_ENGINE_LOCAL, NULL, &cfg);
	if (kvp_headers_whole(r, kind, body)) {
		kvp_http_buf_free(body);
		kvp_reply_error(r, &kvp_fail_resources, NULL);
		return;
	}
	cfg.request = body;
	kvp_leg_start(&r->decode, &r->w->pool, &cfg, r->usage ? &usage_ops : &plain_ops, r);
	hold_leg(r);
}

/* ---- passed through: one leg, both ways streamed ---- */

static void pass_start(struct kvp_req *r)
{
	const struct kvp_http_in *in = &r->conn->in;
	struct kvp_leg_cfg cfg;
	struct kvp_http_buf b = {0};
	uint64_t length = in->framing == KVP_HTTP_FRAME_CHUNKED	 ? KVP_LENGTH_CHUNKED
			  : in->framing == KVP_HTTP_FRAME_LENGTH ? in->length
								 : KVP_LENGTH_NONE;
	kvp_engine_cfg(r->w, KVP_ENGINE_LOCAL, NULL, &cfg);
	if (kvp_headers_request(r, KVP_LEG_PASS, length, &b)) {
		kvp_http_buf_free(&b);
		kvp_reply_error(r, &kvp_fail_resources, NULL);
		return;
	}
	cfg.request = &b;
	cfg.is_head = r->is_head;
	cfg.upload = length == KVP_LENGTH_NONE || !length ? KVP_LEG_WHOLE
		     : length <= KVP_LEG_HELD_MAX	  ? KVP_LEG_SHORT
							  : KVP_LEG_LONG;
	kvp_leg_start(&r->decode, &r->w->pool, &cfg, &plain_ops, r);
}

static void pass_body(struct kvp_req *r, const char *data, uint64_t len)
{
	char line[KVP_HTTP_CHUNK_LINE_MAX];
	if (r->conn->in.framing != KVP_HTTP_FRAME_CHUNKED) {
		kvp_leg_put(&r->decode, data, len);
		return;
	}
	kvp_leg_put(&r->decode, line, kvp_http_chunk_line(line, len));
	kvp_leg_put(&r->decode, data, len);
	kvp_leg_put(&r->decode, "\r\n", 2);
}

static void pass_end(struct kvp_req *r)
{
	if (r->conn->in.framing == KVP_HTTP_FRAME_CHUNKED)
		kvp_leg_put(&r->decode, "0\r\n\r\n", 5);
	kvp_leg_put_end(&r->decode);
}

static void pass_finish(struct kvp_req *r)
{
	if (kvp_leg_runs(&r->decode))
		kvp_count_add(&r->w->count.cancelled[KVP_COUNT_DECODE], 1);
	kvp_leg_close(&r->decode);
}

const struct kvp_flow kvp_flow_pass = {.start = pass_start,
	.stream_body = pass_body,
	.stream_end = pass_end,
	.drained = kvp_relay_drained,
	.finish = pass_finish};
