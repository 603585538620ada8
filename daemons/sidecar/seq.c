#include <kvpick/err.h>
#include <stdlib.h>
#include <string.h>

#include "daemons/sidecar/conn.h"

/* Prefill first, its answer whole; then the decode leg, whose answer the client gets. */

struct seq {
	struct kvp_http_buf answer; /* of the prefill leg */
	uint8_t relays;		    /* it is the client's */
};

/* What is kept, and more bytes of the answer. Of body and answer together the decode leg's body is made. */
static int hold(struct kvp_req *r, uint64_t more)
{
	const struct seq *s = r->flow_state;
	uint64_t leg = kvp_leg_held(&r->prefill), body = r->body.len;
	return kvp_req_hold(r, body + (leg > body ? leg : body) + KVP_HELD_COPIES * (s->answer.len + more));
}

/* The decode engine gets the client's body and all of the work. */
static void fall_back(struct kvp_req *r)
{
	struct seq *s = r->flow_state;
	kvp_leg_close(&r->prefill);
	kvp_http_buf_free(&s->answer);
	kvp_count_add(&r->w->count.fallbacks, 1);
	kvp_relay_start(r, KVP_LEG_DECODE, &r->body);
}

static void failed(struct kvp_req *r, const struct kvp_fail *f)
{
	if (r->adapter->prefill_failure == KVP_FAILURE_FALLS_BACK)
		fall_back(r);
	else
		kvp_reply_error(r, f, NULL);
}

static void on_head(void *ctx, struct kvp_leg *leg)
{
	struct kvp_req *r = ctx;
	struct seq *s = r->flow_state;
	/* 304 forbids a body, which carries the reason; over 599 HTTP has no class. */
	struct kvp_fail f = {leg->status == 304 || leg->status > 599 ? 502 : leg->status,
		KVP_RESULT_PREFILL_ERROR, "the prefill engine refused the request"};
	if (leg->status >= 200 && leg->status < 300)
		return;
	if (r->adapter->prefill_failure == KVP_FAILURE_FALLS_BACK && leg->status >= 400 &&
		leg->status <= 451) {
		s->relays = 1;
		kvp_reply_head(r, leg->head);
		return;
	}
	failed(r, &f);
}

static void on_body(void *ctx, struct kvp_leg *leg, const char *data, uint64_t len)
{
	struct kvp_req *r = ctx;
	struct seq *s = r->flow_state;
	if (s->relays) {
		kvp_relay_put(r, leg, data, len);
	} else if (hold(r, len)) {
		failed(r, &kvp_fail_held);
	} else if (kvp_http_buf_put(&s->answer, data, len)) {
		kvp_reply_error(r, &kvp_fail_resources, NULL);
	}
}

static void answered(struct kvp_req *r)
{
	struct seq *s = r->flow_state;
	struct kvp_http_buf body = {0};
	struct kvp_fail f = {502, KVP_RESULT_HANDOFF, "the answer of the prefill engine is not usable"};
	enum kvp_answer what =
		r->adapter->prefill_answer(r, s->answer.p ? s->answer.p : "", s->answer.len, &body, &f);
	kvp_http_buf_free(&s->answer);
	kvp_http_buf_free(&r->body);
	if (what == KVP_ANSWER_DECODE) {
		kvp_relay_start(r, KVP_LEG_DECODE, &body);
		return;
	}
	if (what == KVP_ANSWER_DIRECT)
		kvp_reply_whole(
			r, 200, r->is_stream ? "text/event-stream" : "application/json", body.p, body.len);
	else
		kvp_reply_error(r, &f, NULL);
	kvp_http_buf_free(&body);
}

static void on_done(void *ctx, struct kvp_leg *leg, enum kvp_leg_end end)
{
	static const struct kvp_fail fail[] = {[KVP_LEG_REFUSED] = {502, KVP_RESULT_PREFILL_UNAVAILABLE,
						       "the prefill engine could not be reached"},
		[KVP_LEG_CONNECT_TIMEOUT] = {504, KVP_RESULT_PREFILL_TIMEOUT,
			"the prefill engine could not be reached in time"},
		[KVP_LEG_READ_TIMEOUT] = {504, KVP_RESULT_PREFILL_TIMEOUT,
			"the prefill engine did not answer in time"},
		[KVP_LEG_DEADLINE] = {504, KVP_RESULT_PREFILL_DEADLINE, "prefill took too long"},
		[KVP_LEG_BROKEN] = {502, KVP_RESULT_PREFILL_UNAVAILABLE,
			"the prefill engine broke off the connection"},
		[KVP_LEG_CUT] = {502, KVP_RESULT_HANDOFF, "the answer of the prefill engine is incomplete"},
		[KVP_LEG_TOO_LARGE] = {502, KVP_RESULT_PREFILL_TOO_LARGE,
			"the answer of the prefill engine is too large"},
		[KVP_LEG_FAILED] = {503, KVP_RESULT_NO_RESOURCES, "out of memory or descriptors"}};
	struct kvp_req *r = ctx;
	struct seq *s = r->flow_state;
	kvp_count_leg(&r->w->count, KVP_COUNT_PREFILL, kvp_loop_now_ns(r->w->loop) - leg->start_ns);
	if (s->relays && end == KVP_LEG_COMPLETE)
		kvp_reply_end(r, KVP_RESULT_PREFILL_ERROR);
	else if (s->relays)
		kvp_reply_cut(r, KVP_RESULT_PREFILL_ERROR);
	else if (end == KVP_LEG_COMPLETE)
		answered(r);
	else
		failed(r, &fail[end]);
}

/* The request has left. */
static void on_room(void *ctx, struct kvp_leg *leg)
{
	(void)leg;
	hold(ctx, 0);
}

static const struct kvp_leg_ops prefill_ops = {on_head, on_body, on_done, on_room};

static void start_prefill(struct kvp_req *r)
{
	struct kvp_worker *w = r->w;
	struct kvp_http_buf body = {0};
	struct kvp_leg_cfg cfg;
	struct seq *s = calloc(1, sizeof(*s));
	r->flow_state = s;
	int rc = s ? r->adapter->prefill_body(r, &body) : KVP_ERR_SYS;
	rc = rc ? rc : kvp_headers_whole(r, KVP_LEG_PREFILL, &body);
	if (rc) {
		kvp_http_buf_free(&body);
		kvp_reply_error(r, &kvp_fail_resources, NULL);
		return;
	}
	kvp_engine_cfg(w, KVP_ENGINE_PREFILL, &r->target, &cfg);
	cfg.deadline_ns = kvp_loop_now_ns(w->loop) + w->cfg->sidecar_prefill_deadline_ms * UINT64_C(1000000);
	cfg.body_max_bytes = w->cfg->eff.sidecar_max_answer_bytes;
	cfg.request = &body;
	kvp_leg_start(&r->prefill, &w->pool, &cfg, &prefill_ops, r);
	if (hold(r, 0)) /* on a kept connection it has one copy more */
		failed(r, &kvp_fail_held);
}

static void start(struct kvp_req *r)
{
	struct kvp_fail f = {400, KVP_RESULT_INVALID, "the request body is not a JSON object"};
	if (!kvp_req_is_object(r) || r->adapter->check(r, &f))
		kvp_reply_error(r, &f, NULL);
	else
		start_prefill(r);
}

static void drained(struct kvp_req *r)
{
	kvp_leg_resume(&r->prefill);
	kvp_leg_resume(&r->decode);
}

static void finish(struct kvp_req *r)
{
	struct seq *s = r->flow_state;
	if (kvp_leg_runs(&r->prefill))
		kvp_count_add(&r->w->count.cancelled[KVP_COUNT_PREFILL], 1);
	if (kvp_leg_runs(&r->decode))
		kvp_count_add(&r->w->count.cancelled[KVP_COUNT_DECODE], 1);
	kvp_leg_close(&r->prefill);
	kvp_leg_close(&r->decode);
	if (s)
		kvp_http_buf_free(&s->answer);
	free(s);
	r->flow_state = NULL;
	if (!r->usage)
		return;
	kvp_count_add(&r->w->count.usage_long, r->usage->long_cnt);
	kvp_usage_free(r->usage);
	free(r->usage);
	r->usage = NULL;
}

const struct kvp_flow kvp_flow_seq = {.start = start, .drained = drained, .finish = finish};
