/* bench/load/envoy.c - the filter's side of a stream. Phases: the request is being sent, answered, the
 * response is being sent, answered. */
#include "bench/load/envoy.h"

#include <kvpick/err.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum phase { REQUEST, ROUTED, RESPONSE, ENDED };
#define PIECE_MAX 65536

static uint64_t now_ns(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

__attribute__((format(printf, 2, 3))) static void wrong(struct kvp_envoy *x, const char *fmt, ...)
{
	va_list ap;
	va_start(ap, fmt);
	if (!x->violations++)
		vsnprintf(x->violation, sizeof(x->violation), fmt, ap);
	va_end(ap);
}

static void copy(char *out, size_t size, struct kvp_extproc_str s)
{
	size_t n = s.len < size - 1 ? s.len : size - 1;
	if (n)
		memcpy(out, s.p, n);
	out[n] = 0;
}

static int is(struct kvp_extproc_str s, const char *text)
{
	return s.len == strlen(text) && memcmp(s.p, text, s.len) == 0;
}

static void send(struct kvp_envoy *x, struct kvp_extproc_req *r)
{
	size_t len = 0;
	void *msg = kvp_extproc_req_new(r, &len);
	KVP_ASSERT(msg);
	kvp_gc_send(x->call, msg, len);
	free(msg);
}

static void leave(struct kvp_envoy *x)
{
	if (x->left)
		return;
	x->left = 1;
	if (x->leave == KVP_ENVOY_RESET)
		kvp_gc_cancel(x->call);
	else
		kvp_gc_half_close(x->call);
}

/* Cuts a body as data arrives; 0: left in between. */
static int send_body(struct kvp_envoy *x, enum kvp_extproc_kind kind, struct kvp_extproc_str body,
	uint32_t piece, int ends, enum kvp_envoy_stop stop, uint32_t *unanswered)
{
	uint32_t off = 0;
	do {
		uint32_t n = body.len - off < piece ? body.len - off : piece;
		struct kvp_extproc_req r = {.kind = kind, .body = {n ? body.p + off : NULL, n}};
		off += n;
		r.end_of_stream = (uint8_t)(ends && off == body.len);
		send(x, &r);
		++*unanswered;
		if (x->stop == stop && off < body.len) {
			leave(x);
			return 0;
		}
	} while (off < body.len);
	return 1;
}

static uint32_t piece_of(uint32_t mode, uint32_t wanted, struct kvp_extproc_str body)
{
	if (mode == KVP_EXTPROC_BODY_BUFFERED)
		return body.len ? body.len : 1;
	return wanted ? wanted : 16384;
}

/* Trailers wait for the body's answer, except in full duplex mode. */
static void send_trailers(struct kvp_envoy *x)
{
	if (!x->trailers || x->trailers_sent ||
		(x->request_mode != KVP_EXTPROC_BODY_FULL_DUPLEX && x->sent_body))
		return;
	x->trailers_sent = 1;
	send(x, &(struct kvp_extproc_req){.kind = KVP_EXTPROC_REQUEST_TRAILERS});
}

/* Body and trailers of the request: at once in full duplex mode, behind the headers' answer when buffered. */
static void send_request_rest(struct kvp_envoy *x)
{
	if (x->body.p && !send_body(x, KVP_EXTPROC_REQUEST_BODY, x->body,
				 piece_of(x->request_mode, x->piece_bytes, x->body), !x->trailers,
				 KVP_ENVOY_IN_BODY, &x->sent_body))
		return;
	send_trailers(x);
	if (x->stop == KVP_ENVOY_UNANSWERED)
		leave(x);
}

void kvp_envoy_start(struct kvp_gc *c, struct kvp_envoy *x)
{
	struct kvp_extproc_req r = {.kind = KVP_EXTPROC_REQUEST_HEADERS,
		.header = x->header,
		.header_cnt = x->header_cnt,
		.end_of_stream = (uint8_t)(!x->body.p && !x->trailers),
		.observability_mode = x->observability,
		.subset_hint = x->hint,
		.subset = x->subset,
		.subset_cnt = x->subset_cnt};
	r.has_config = !x->no_config;
	r.request_body_mode = x->request_mode;
	r.response_body_mode = x->response_mode;
	r.send_body_without_waiting = x->request_mode == KVP_EXTPROC_BODY_FULL_DUPLEX;
	x->grpc_status = -1;
	x->start_ns = now_ns();
	x->call = kvp_gc_call(c, KVP_EXTPROC_METHOD, 0, x);
	send(x, &r);
	if (x->stop == KVP_ENVOY_AT_HEADERS)
		leave(x);
	else if (x->request_mode == KVP_EXTPROC_BODY_FULL_DUPLEX || x->observability)
		send_request_rest(x);
	if (x->observability)
		leave(x);
}

static void send_response(struct kvp_envoy *x)
{
	struct kvp_extproc_req r = {.kind = KVP_EXTPROC_RESPONSE_HEADERS,
		.header = x->response_header,
		.header_cnt = x->response_header_cnt,
		.end_of_stream = x->response_ends_with_headers,
		.served = x->served};
	if (!r.served.len)
		r.served = (struct kvp_extproc_str){x->destination, (uint32_t)strlen(x->destination)};
	x->phase = RESPONSE;
	send(x, &r);
	int none = x->response_mode == KVP_EXTPROC_BODY_NONE || x->response_ends_with_headers;
	if (!none && !send_body(x, KVP_EXTPROC_RESPONSE_BODY, x->response_body,
			     piece_of(x->response_mode, x->response_piece_bytes, x->response_body),
			     !x->response_trailers, KVP_ENVOY_IN_RESPONSE, &x->sent_response))
		return;
	if (x->response_trailers)
		send(x, &(struct kvp_extproc_req){.kind = KVP_EXTPROC_RESPONSE_TRAILERS});
}

static int request_answered(const struct kvp_envoy *x)
{
	int duplex = x->request_mode == KVP_EXTPROC_BODY_FULL_DUPLEX;
	if (!x->headers_answered)
		return 0;
	if (x->trailers)
		return x->trailers_answered;
	return !x->body.p || (duplex ? x->request_eos : !x->sent_body);
}

static int response_answered(const struct kvp_envoy *x)
{
	if (!x->response_headers_answered || (x->response_trailers && !x->response_trailers_answered))
		return 0;
	if (x->response_mode == KVP_EXTPROC_BODY_NONE || x->response_ends_with_headers ||
		x->response_trailers)
		return 1;
	return x->response_mode == KVP_EXTPROC_BODY_FULL_DUPLEX ? x->response_eos : !x->sent_response;
}

static void advance(struct kvp_envoy *x)
{
	if (x->phase == REQUEST && request_answered(x)) {
		x->phase = ROUTED;
		x->routed_ns = now_ns();
		if (strcmp(x->destination, x->metadata) != 0)
			wrong(x, "header and metadata differ: '%.40s' '%.40s'", x->destination, x->metadata);
		if (x->stop == KVP_ENVOY_ROUTED)
			leave(x);
		else
			send_response(x);
	}
	if (x->phase == RESPONSE && response_answered(x)) {
		x->phase = ENDED;
		leave(x);
	}
}

static void take_headers(struct kvp_envoy *x, const struct kvp_extproc_reply *r)
{
	for (uint32_t i = 0; i < r->set_cnt; i++) {
		if (is(r->set[i].key, "x-gateway-destination-endpoint"))
			copy(x->destination, sizeof(x->destination), r->set[i].value);
		if (is(r->set[i].key, "x-prefiller-host-port"))
			copy(x->prefiller, sizeof(x->prefiller), r->set[i].value);
		if (is(r->set[i].key, "content-length") || (r->set[i].key.len && r->set[i].key.p[0] == ':'))
			wrong(x, "sets %.*s", (int)r->set[i].key.len, r->set[i].key.p);
	}
	x->set_cnt += r->set_cnt;
	x->remove_cnt += r->remove_cnt;
	x->clear_route_cache |= r->clear_route_cache;
	if (r->destination.len)
		copy(x->metadata, sizeof(x->metadata), r->destination);
}

static void take_piece(struct kvp_envoy *x, const struct kvp_extproc_reply *r, struct kvp_extproc_str sent,
	uint64_t *bytes, uint8_t *eos)
{
	if (r->mutation != KVP_EXTPROC_BODY_STREAMED_PIECE)
		wrong(x, "full duplex: a body answer without a piece");
	if (r->body.len > PIECE_MAX)
		wrong(x, "a piece of %u bytes", r->body.len);
	if (*eos)
		wrong(x, "a piece behind the end of the stream");
	if (*bytes + r->body.len > sent.len ||
		(r->body.len && memcmp(sent.p + *bytes, r->body.p, r->body.len) != 0))
		x->mismatches++;
	*bytes += r->body.len;
	*eos |= r->end_of_stream;
	if (*eos && *bytes != sent.len)
		wrong(x, "the stream ends after %llu of %u bytes", (unsigned long long)*bytes, sent.len);
}

static void one_for_one(struct kvp_envoy *x, const struct kvp_extproc_reply *r, uint32_t *unanswered)
{
	if (r->mutation == KVP_EXTPROC_BODY_STREAMED_PIECE)
		wrong(x, "a streamed piece outside of full duplex mode");
	if (!*unanswered)
		wrong(x, "a body answer without a body message");
	else
		--*unanswered;
}

static void take_request_body(struct kvp_envoy *x, const struct kvp_extproc_reply *r)
{
	if (!x->headers_answered)
		wrong(x, "the request body is answered before the headers");
	if (x->trailers_answered)
		wrong(x, "the request body is answered behind the trailers");
	if (x->request_mode == KVP_EXTPROC_BODY_FULL_DUPLEX) {
		take_piece(x, r, x->body, &x->forwarded_bytes, &x->request_eos);
	} else {
		one_for_one(x, r, &x->sent_body);
		take_headers(x, r);
		x->forwarded_bytes = x->body.len;
		if (!x->left)
			send_trailers(x);
	}
}

static void take_response_body(struct kvp_envoy *x, const struct kvp_extproc_reply *r)
{
	if (!x->response_headers_answered)
		wrong(x, "the response body is answered before the headers");
	if (x->response_mode == KVP_EXTPROC_BODY_FULL_DUPLEX)
		take_piece(x, r, x->response_body, &x->response_bytes, &x->response_eos);
	else
		one_for_one(x, r, &x->sent_response);
}

static void take_immediate(struct kvp_envoy *x, const struct kvp_extproc_reply *r)
{
	if (x->http_status)
		wrong(x, "a second immediate response");
	x->http_status = r->http_status;
	copy(x->http_body, sizeof(x->http_body), r->body);
	for (uint32_t i = 0; i < r->set_cnt; i++)
		if (is(r->set[i].key, "retry-after"))
			copy(x->retry_after, sizeof(x->retry_after), r->set[i].value);
}

static void once(struct kvp_envoy *x, uint8_t *flag, const char *what)
{
	if (*flag)
		wrong(x, "%s answered twice", what);
	*flag = 1;
}

static void on_answer(struct kvp_envoy *x, const struct kvp_extproc_reply *r)
{
	x->answers++;
	if (x->observability)
		wrong(x, "an answer in observability mode");
	if (x->http_status)
		wrong(x, "an answer behind an immediate response");
	switch (r->kind) {
	case KVP_EXTPROC_ANSWER_REQUEST_HEADERS:
		once(x, &x->headers_answered, "request headers");
		take_headers(x, r);
		if (x->request_mode != KVP_EXTPROC_BODY_FULL_DUPLEX && !x->left)
			send_request_rest(x);
		break;
	case KVP_EXTPROC_ANSWER_REQUEST_BODY:
		take_request_body(x, r);
		break;
	case KVP_EXTPROC_ANSWER_REQUEST_TRAILERS:
		once(x, &x->trailers_answered, "request trailers");
		if (!x->trailers || !x->headers_answered || x->forwarded_bytes != x->body.len)
			wrong(x, "request trailers answered before everything else");
		break;
	case KVP_EXTPROC_ANSWER_RESPONSE_HEADERS:
		once(x, &x->response_headers_answered, "response headers");
		if (x->phase != RESPONSE)
			wrong(x, "response headers answered before they came");
		break;
	case KVP_EXTPROC_ANSWER_RESPONSE_BODY:
		take_response_body(x, r);
		break;
	case KVP_EXTPROC_ANSWER_RESPONSE_TRAILERS:
		once(x, &x->response_trailers_answered, "response trailers");
		if (x->response_mode == KVP_EXTPROC_BODY_FULL_DUPLEX &&
			x->response_bytes != x->response_body.len)
			wrong(x, "response trailers answered before the body");
		break;
	case KVP_EXTPROC_ANSWER_IMMEDIATE:
		take_immediate(x, r);
		break;
	default:
		wrong(x, "an answer without a member");
	}
	if (!x->http_status && !x->left)
		advance(x);
}

void kvp_envoy_event(struct kvp_extproc_dec *d, const struct kvp_gc_event *ev)
{
	struct kvp_envoy *x = ev->ctx;
	struct kvp_extproc_reply r;
	if (ev->kind == KVP_GC_STATUS) {
		x->done = 1;
		x->grpc_status = ev->status;
		x->end_ns = now_ns();
		snprintf(x->grpc_text, sizeof(x->grpc_text), "%s", ev->text);
		if (!x->left && !x->http_status && !ev->status)
			wrong(x, "closed cleanly in the middle of the exchange");
		x->call = NULL;
		return;
	}
	if (kvp_extproc_reply_decode(d, ev->data, ev->len, &r) == KVP_OK)
		on_answer(x, &r);
	else
		wrong(x, "an answer that is no ProcessingResponse");
}
