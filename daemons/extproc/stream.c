#include "daemons/extproc/stream_priv.h"
#include "ipc/json_in.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define EXPECTED_MAX (1u << 20) /* bytes of a body that are made room for unseen */

static const char *const no_endpoints = "no endpoints available";

const char *kvp_stream_outcome_name(enum kvp_stream_outcome o)
{
	static const char *const name[KVP_OUTCOME_CNT] = {
		"incomplete", "early_reject", "ext_proc_error", "upstream_http_error", "response_eos"};
	return o < KVP_OUTCOME_CNT ? name[o] : "?";
}

void kvp_stream_open(
	struct kvp_stream *s, const struct kvp_stream_cfg *cfg, const struct kvp_stream_ops *ops, void *ctx)
{
	*s = (struct kvp_stream){.cfg = cfg, .ops = ops, .ctx = ctx};
	s->request_mode = s->response_mode = (uint32_t)cfg->assumed_mode;
}

/* forget_body gives the kept body back to the budget. */
static void forget_body(struct kvp_stream *s)
{
	if (s->body_len)
		s->ops->keep(s->ctx, -(int64_t)s->body_len);
	kvp_extproc_kept_unref(s->body);
	s->body = NULL;
	s->body_len = s->body_cap = 0;
}

void kvp_stream_close(struct kvp_stream *s)
{
	forget_body(s);
	free(s->header);
	free(s->header_mem);
	free(s->subset);
	s->header = NULL;
	s->header_mem = NULL;
	s->subset = NULL;
	s->state = KVP_STREAM_OVER;
}

enum kvp_stream_outcome kvp_stream_outcome(const struct kvp_stream *s)
{
	if (s->rejected)
		return KVP_OUTCOME_EARLY_REJECT;
	if (s->failed)
		return KVP_OUTCOME_EXT_PROC_ERROR;
	if (s->http_status >= 400)
		return KVP_OUTCOME_UPSTREAM_HTTP_ERROR;
	return s->response_over ? KVP_OUTCOME_RESPONSE_EOS : KVP_OUTCOME_INCOMPLETE;
}

/* let_go ends what is under way or booked. */
static void let_go(struct kvp_stream *s)
{
	if (s->state == KVP_STREAM_PICKING || s->admitted) {
		if (s->state == KVP_STREAM_PICKING)
			s->ops->note(s->ctx, KVP_NOTE_CANCELLED);
		s->admitted = 0;
		s->state = KVP_STREAM_ROUTED;
		s->ops->cancel(s->ctx);
	}
	if (s->booked) {
		s->booked = 0;
		s->ops->release(s->ctx);
	}
	forget_body(s);
}

static void finish(struct kvp_stream *s, int grpc_status, const char *text)
{
	let_go(s);
	s->state = KVP_STREAM_OVER;
	s->ops->finish(s->ctx, grpc_status, text);
}

static void reject(struct kvp_stream *s, int status, const char *text, uint64_t retry_after_s)
{
	let_go(s);
	stream_reject(s, status, text, retry_after_s);
}

static void out_of_memory(struct kvp_stream *s)
{
	reject(s, 500, "out of memory", 0);
}

/* ---- request ---- */

static void start_pick(struct kvp_stream *s, enum kvp_pick_form form)
{
	s->body_over = 1;
	s->form = form;
	s->state = KVP_STREAM_PICKING;
	s->ops->pick(s->ctx, &(struct kvp_pick_ask){.form = form,
				     .header = s->header,
				     .header_cnt = s->header_cnt,
				     .body = s->body ? s->body->bytes : NULL,
				     .body_len = s->body_len,
				     .subset_hint = s->subset_hint,
				     .subset = s->subset,
				     .subset_cnt = s->subset_cnt});
}

static int is_duplex(uint32_t mode)
{
	return mode == KVP_EXTPROC_BODY_FULL_DUPLEX;
}

static void answer_trailers(struct kvp_stream *s)
{
	s->trailers_answered = 1;
	stream_say(s, KVP_EXTPROC_ANSWER_REQUEST_TRAILERS);
}

/* answer_duplex: headers, the body in pieces, trailers. */
static void answer_duplex(struct kvp_stream *s, const struct kvp_pick_answer *a)
{
	stream_say_routing(s, KVP_EXTPROC_ANSWER_REQUEST_HEADERS, a);
	if (s->form == KVP_PICK_HEADERS_ONLY)
		return;
	struct kvp_extproc_kept *kept = a->body.p ? NULL : s->body;
	struct kvp_extproc_str body = a->body;
	if (kept)
		body = (struct kvp_extproc_str){kept->bytes, (uint32_t)s->body_len};
	if (body.len || !s->trailers)
		stream_say_pieces(s, KVP_EXTPROC_ANSWER_REQUEST_BODY, body, kept, !s->trailers);
	if (s->trailers)
		answer_trailers(s);
}

/* answer_buffered: the headers were answered when they came; what is open now carries the routing. Only
 * metadata can travel with trailers: header mutations there are for trailers. */
static void answer_buffered(struct kvp_stream *s, const struct kvp_pick_answer *a)
{
	if (s->form == KVP_PICK_HEADERS_ONLY) {
		stream_say_routing(s, KVP_EXTPROC_ANSWER_REQUEST_HEADERS, a);
		return;
	}
	if (s->body_message) {
		stream_say_routing(s, KVP_EXTPROC_ANSWER_REQUEST_BODY, a);
		for (; s->late_cnt; s->late_cnt--)
			stream_say(s, KVP_EXTPROC_ANSWER_REQUEST_BODY);
		if (s->trailers)
			answer_trailers(s);
		return;
	}
	struct kvp_extproc_reply m = {
		.kind = KVP_EXTPROC_ANSWER_REQUEST_TRAILERS, .destination = a->destination};
	s->trailers_answered = 1;
	s->ops->send(s->ctx, &m);
}

void kvp_stream_picked(struct kvp_stream *s, const struct kvp_pick_answer *a)
{
	if (s->state != KVP_STREAM_PICKING) {
		if (a->has_booking)
			s->ops->release(s->ctx);
		return;
	}
	s->admitted = 0;
	s->state = KVP_STREAM_ROUTED;
	s->booked = a->status == 200 && a->has_booking;
	if (a->status != 200) {
		reject(s, a->status, a->text, a->retry_after_s);
		return;
	}
	if (is_duplex(s->request_mode))
		answer_duplex(s, a);
	else
		answer_buffered(s, a);
	forget_body(s);
}

static int mode_is_served(const struct kvp_stream *s)
{
	int request = s->request_mode == KVP_EXTPROC_BODY_FULL_DUPLEX ||
		      s->request_mode == KVP_EXTPROC_BODY_BUFFERED;
	int response = s->response_mode == KVP_EXTPROC_BODY_FULL_DUPLEX ||
		       s->response_mode == KVP_EXTPROC_BODY_BUFFERED ||
		       s->response_mode == KVP_EXTPROC_BODY_STREAMED ||
		       (s->response_mode == KVP_EXTPROC_BODY_NONE && s->cfg->response_none);
	return request && response;
}

/* look_at_config checks the modes when they are stated first; 0 = the stream is refused. A request that has
 * no body is answered in every mode. */
static int look_at_config(struct kvp_stream *s, const struct kvp_extproc_req *m)
{
	char text[400];
	if (!m->has_config || s->checked)
		return 1;
	s->checked = 1;
	s->request_mode = m->request_body_mode;
	s->response_mode = m->response_body_mode;
	if (mode_is_served(s) || (m->kind == KVP_EXTPROC_REQUEST_HEADERS && m->end_of_stream))
		return 1;
	snprintf(text, sizeof(text),
		"ext_proc filter needs request_body_mode FULL_DUPLEX_STREAMED or BUFFERED and "
		"response_body_mode FULL_DUPLEX_STREAMED, STREAMED or BUFFERED; it states "
		"request_body_mode=%u response_body_mode=%u "
		"send_body_without_waiting_for_header_response=%s",
		m->request_body_mode, m->response_body_mode, m->send_body_without_waiting ? "true" : "false");
	s->failed = 1;
	s->ops->note(s->ctx, KVP_NOTE_MODE_REFUSED);
	finish(s, KVP_STREAM_GRPC_FAILED_PRECONDITION, text);
	return 0;
}

static void request_headers(struct kvp_stream *s, const struct kvp_extproc_req *m)
{
	if (s->has_headers || s->state != KVP_STREAM_OPEN || s->body_message) {
		s->ops->note(s->ctx, KVP_NOTE_OUT_OF_ORDER);
		return;
	}
	s->has_headers = 1;
	if (!stream_take_headers(s, m)) {
		out_of_memory(s);
		return;
	}
	if (m->end_of_stream)
		start_pick(s, KVP_PICK_HEADERS_ONLY);
	else if (!is_duplex(s->request_mode))
		stream_say(s, KVP_EXTPROC_ANSWER_REQUEST_HEADERS);
}

/* expected is the length that the client announced, 0 = none; it is only a hint. */
static size_t expected(const struct kvp_stream *s)
{
	uint64_t n = 0;
	for (uint32_t i = 0; i < s->header_cnt; i++) {
		struct kvp_extproc_str v = s->header[i].value;
		if (v.len > 12 || !stream_name_is(s->header[i].key, "content-length"))
			continue;
		for (uint32_t k = 0; k < v.len; k++)
			n = v.p[k] >= '0' && v.p[k] <= '9' ? n * 10 + (uint64_t)(v.p[k] - '0') : 0;
	}
	return n < EXPECTED_MAX ? n : EXPECTED_MAX;
}

static int reserve(struct kvp_stream *s, size_t need)
{
	if (need <= s->body_cap)
		return 1;
	size_t cap = s->body_cap ? 2 * s->body_cap : expected(s);
	cap = cap > need ? cap : need;
	struct kvp_extproc_kept *grown = kvp_extproc_kept_grow(s->body, cap + KVP_JSON_SLACK_BYTES);
	if (!grown)
		return 0;
	s->body = grown;
	s->body_cap = cap;
	return 1;
}

static void add(struct kvp_stream *s, struct kvp_extproc_str part)
{
	if (part.len)
		memcpy(s->body->bytes + s->body_len, part.p, part.len);
	s->body_len += part.len;
}

/* append keeps a part of the body; 0 = the stream was answered instead. */
static int append(struct kvp_stream *s, const struct kvp_extproc_req *m)
{
	struct kvp_pick_answer a = {.status = 503, .text = no_endpoints};
	size_t len = m->body.len;
	for (uint32_t i = 0; i < m->body_more_cnt; i++)
		len += m->body_more[i].len;
	if (!len)
		return 1;
	if (!s->admitted) {
		if (!s->ops->admit(s->ctx, &a)) {
			reject(s, a.status, a.text, a.retry_after_s);
			return 0;
		}
		s->admitted = 1;
	}
	if (len > s->cfg->body_max || s->body_len > s->cfg->body_max - len) {
		s->ops->note(s->ctx, KVP_NOTE_BODY_TOO_LARGE);
		reject(s, 413, "request body too large", 0);
		return 0;
	}
	if (!s->ops->keep(s->ctx, (int64_t)len)) {
		s->ops->note(s->ctx, KVP_NOTE_BUDGET);
		reject(s, 503, "endpoint picker overloaded", s->cfg->retry_after_s);
		return 0;
	}
	if (!reserve(s, s->body_len + len)) {
		s->ops->keep(s->ctx, -(int64_t)len);
		out_of_memory(s);
		return 0;
	}
	add(s, m->body);
	for (uint32_t i = 0; i < m->body_more_cnt; i++)
		add(s, m->body_more[i]);
	return 1;
}

static void request_body(struct kvp_stream *s, const struct kvp_extproc_req *m)
{
	if (s->body_over) {
		s->ops->note(s->ctx, KVP_NOTE_LATE_BODY);
		if (is_duplex(s->request_mode))
			return;
		if (s->state == KVP_STREAM_PICKING)
			s->late_cnt++;
		else
			stream_say(s, KVP_EXTPROC_ANSWER_REQUEST_BODY);
		return;
	}
	if (!append(s, m))
		return;
	s->body_message = 1;
	/* A buffered body is one message, also when trailers follow it. */
	if (m->end_of_stream || !is_duplex(s->request_mode))
		start_pick(s, s->body_len ? KVP_PICK_BODY : KVP_PICK_EMPTY_BODY);
}

static void request_trailers(struct kvp_stream *s)
{
	if (s->trailers) {
		s->ops->note(s->ctx, KVP_NOTE_OUT_OF_ORDER);
		return;
	}
	s->trailers = 1;
	if (s->state == KVP_STREAM_ROUTED)
		answer_trailers(s);
	else if (!s->body_over)
		start_pick(s, s->body_len ? KVP_PICK_BODY : KVP_PICK_EMPTY_BODY);
}

/* ---- response ---- */

static void prefill_done(struct kvp_stream *s)
{
	if (!s->booked || s->prefilled)
		return;
	s->prefilled = 1;
	s->ops->prefill_done(s->ctx);
}

static void response_ends(struct kvp_stream *s)
{
	s->response_over = 1;
	if (s->booked) {
		s->booked = 0;
		s->ops->release(s->ctx);
	}
}

/* begin_response: a response before the routing answer is the proxy's own; the request is over. */
static void begin_response(struct kvp_stream *s)
{
	if (s->state == KVP_STREAM_ROUTED)
		return;
	let_go(s);
	s->body_over = 1;
	s->state = KVP_STREAM_ROUTED;
}

static int status_of(const struct kvp_extproc_req *m)
{
	for (uint32_t i = 0; i < m->header_cnt; i++) {
		struct kvp_extproc_str v = m->header[i].value;
		if (!stream_name_is(m->header[i].key, ":status") || v.len != 3)
			continue;
		int n = 0;
		for (uint32_t k = 0; k < v.len; k++)
			n = v.p[k] >= '0' && v.p[k] <= '9' ? n * 10 + (v.p[k] - '0') : 0;
		return n;
	}
	return 0;
}

static void response_headers(struct kvp_stream *s, const struct kvp_extproc_req *m)
{
	begin_response(s);
	if (!s->http_status)
		s->http_status = status_of(m);
	/* A proxy knows it once; one that says it again and again must not move the booking each time. */
	if (s->booked && m->served.len && !s->has_served) {
		s->has_served = 1;
		s->ops->served(s->ctx, m->served);
	}
	s->ops->response_headers(s->ctx, m->header, m->header_cnt);
	stream_say(s, KVP_EXTPROC_ANSWER_RESPONSE_HEADERS);
	if (m->end_of_stream || s->response_mode == KVP_EXTPROC_BODY_NONE)
		prefill_done(s);
	if (m->end_of_stream)
		response_ends(s);
}

static void response_body(struct kvp_stream *s, const struct kvp_extproc_req *m)
{
	begin_response(s);
	if (s->response_over) {
		s->ops->note(s->ctx, KVP_NOTE_LATE_BODY);
		if (!is_duplex(s->response_mode))
			stream_say(s, KVP_EXTPROC_ANSWER_RESPONSE_BODY);
		return;
	}
	/* The client's bytes first, then the bookkeeping. */
	if (is_duplex(s->response_mode))
		stream_say_pieces(s, KVP_EXTPROC_ANSWER_RESPONSE_BODY, m->body, NULL, m->end_of_stream);
	else
		stream_say(s, KVP_EXTPROC_ANSWER_RESPONSE_BODY);
	if (m->body.len)
		prefill_done(s);
	s->ops->response_body(s->ctx, m->body.p, m->body.len, m->end_of_stream);
	if (m->end_of_stream)
		response_ends(s);
}

static void response_trailers(struct kvp_stream *s)
{
	begin_response(s);
	stream_say(s, KVP_EXTPROC_ANSWER_RESPONSE_TRAILERS);
	if (!s->response_over) {
		s->ops->response_body(s->ctx, "", 0, 1);
		response_ends(s);
	}
}

/* ---- events ---- */

void kvp_stream_message(struct kvp_stream *s, const struct kvp_extproc_req *m)
{
	if (s->state == KVP_STREAM_OVER || s->state == KVP_STREAM_WATCHED)
		return;
	if (m->observability_mode) {
		s->ops->note(s->ctx, KVP_NOTE_OBSERVABILITY);
		let_go(s);
		s->state = KVP_STREAM_WATCHED;
		return;
	}
	if (!look_at_config(s, m))
		return;
	if (s->state == KVP_STREAM_OPEN && !stream_take_subset(s, m)) {
		out_of_memory(s);
		return;
	}
	switch (m->kind) {
	case KVP_EXTPROC_REQUEST_HEADERS:
		request_headers(s, m);
		break;
	case KVP_EXTPROC_REQUEST_BODY:
		request_body(s, m);
		break;
	case KVP_EXTPROC_REQUEST_TRAILERS:
		request_trailers(s);
		break;
	case KVP_EXTPROC_RESPONSE_HEADERS:
		response_headers(s, m);
		break;
	case KVP_EXTPROC_RESPONSE_BODY:
		response_body(s, m);
		break;
	case KVP_EXTPROC_RESPONSE_TRAILERS:
		response_trailers(s);
		break;
	default:
		s->ops->note(s->ctx, KVP_NOTE_EMPTY_MESSAGE);
		break;
	}
}

void kvp_stream_garbled(struct kvp_stream *s)
{
	if (s->state == KVP_STREAM_OVER)
		return;
	s->failed = !s->response_over;
	finish(s, KVP_STREAM_GRPC_UNKNOWN, "not a ProcessingRequest");
}

void kvp_stream_half_closed(struct kvp_stream *s)
{
	if (s->state != KVP_STREAM_OVER)
		finish(s, KVP_STREAM_GRPC_OK, "");
}

void kvp_stream_gone(struct kvp_stream *s)
{
	let_go(s);
	s->state = KVP_STREAM_OVER;
}

int kvp_stream_body_outstanding(const struct kvp_stream *s)
{
	return s->state == KVP_STREAM_OPEN && !s->body_over;
}

void kvp_stream_body_late(struct kvp_stream *s)
{
	if (!kvp_stream_body_outstanding(s))
		return;
	s->ops->note(s->ctx, KVP_NOTE_BODY_TIMEOUT);
	reject(s, 408, "request body timed out", 0);
}

void kvp_stream_shut_down(struct kvp_stream *s)
{
	if (s->state != KVP_STREAM_OPEN && s->state != KVP_STREAM_PICKING)
		return;
	s->ops->note(s->ctx, KVP_NOTE_SHUT_DOWN);
	s->admitted |= s->state == KVP_STREAM_PICKING; /* something to cancel, and not by the proxy */
	s->state = KVP_STREAM_OPEN;
	reject(s, 503, no_endpoints, s->cfg->retry_after_s);
}
