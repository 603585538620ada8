/* The played proxy against a minimal endpoint picker: every mode and way out of an exchange, and that it sees
 * the mistakes it is there to see. */
#include "bench/load/envoy.h"
#include "tests/grpc_fixture.h"

/* What the picker does wrong, if anything. */
enum fault {
	NO_FAULT,
	BODY_FIRST,	/* body answer before the headers answer */
	TWO_ENDS,	/* the last piece twice */
	LONG_PIECE,	/* the body in one piece */
	OTHER_METADATA, /* header and metadata differ */
	ALWAYS_ANSWERS, /* also in observability mode */
	CLOSES,		/* OK without an answer */
	CHANGES,	/* one byte of the body */
	NO_END,		/* no end flag: the exchange never ends, but for the cancel */
	REFUSES		/* immediate response, which is no fault */
};
static const struct kvp_extproc_set_header dest[] = {
	{{"x-gateway-destination-endpoint", 30}, {"10.0.0.7:8000", 13}, KVP_EXTPROC_OVERWRITE_OR_ADD}};

/* One stream of the picker. */
struct pick {
	char body[400000];
	uint32_t len;
	uint32_t request_mode, response_mode;
	int observed, response_cnt;
};
static struct kvp_grpc *g;
static struct kvp_gc *c;
static struct kvp_extproc_dec *dec, *client_dec;
static enum fault fault;
static uint32_t open_cnt, closed_cnt, cancelled_cnt;

static void answer(struct kvp_grpc_stream *st, const struct kvp_extproc_reply *r)
{
	size_t len;
	void *m = kvp_extproc_reply_new(r, &len);
	kvp_grpc_give(st, m, len);
}

static void pieces(
	struct kvp_grpc_stream *st, enum kvp_extproc_answer kind, struct kvp_extproc_str body, int end)
{
	struct kvp_extproc_reply r = {.kind = kind, .mutation = KVP_EXTPROC_BODY_STREAMED_PIECE};
	struct kvp_extproc_pieces cut = {.body = body, .end_of_stream = (uint8_t)end};
	if (fault == LONG_PIECE) {
		r.body = body;
		r.end_of_stream = (uint8_t)end;
		answer(st, &r);
		return;
	}
	while (kvp_extproc_piece_next(&cut, &r.body, &r.end_of_stream)) {
		r.end_of_stream = (uint8_t)(r.end_of_stream && fault != NO_END);
		answer(st, &r);
	}
	if (fault == TWO_ENDS)
		answer(st, &r);
}

static void pick(struct kvp_grpc_stream *st, struct pick *p, int trailers)
{
	struct kvp_extproc_reply r = {.kind = KVP_EXTPROC_ANSWER_REQUEST_HEADERS,
		.clear_route_cache = 1,
		.set = dest,
		.set_cnt = 1,
		.destination = {"10.0.0.7:8000", 13}};
	struct kvp_extproc_str body = {p->body, p->len};
	if (fault == OTHER_METADATA)
		r.destination.len--;
	if (fault == CHANGES && p->len)
		p->body[p->len / 2] ^= 1;
	if (fault == REFUSES)
		r = (struct kvp_extproc_reply){.kind = KVP_EXTPROC_ANSWER_IMMEDIATE,
			.http_status = 503,
			.body = KVP_EXTPROC_STR("no endpoints available")};
	if (fault == BODY_FIRST)
		pieces(st, KVP_EXTPROC_ANSWER_REQUEST_BODY, body, !trailers);
	if (p->request_mode == KVP_EXTPROC_BODY_BUFFERED && p->len && fault != REFUSES)
		r.kind = KVP_EXTPROC_ANSWER_REQUEST_BODY;
	if (fault != CLOSES)
		answer(st, &r);
	if (fault == REFUSES || fault == CLOSES)
		kvp_grpc_finish(st, KVP_GRPC_OK, "");
	else if (fault != BODY_FIRST && p->request_mode == KVP_EXTPROC_BODY_FULL_DUPLEX && p->len)
		pieces(st, KVP_EXTPROC_ANSWER_REQUEST_BODY, body, !trailers);
}

static void on_response(struct kvp_grpc_stream *st, struct pick *p, const struct kvp_extproc_req *m)
{
	if (m->kind == KVP_EXTPROC_RESPONSE_BODY && p->response_mode == KVP_EXTPROC_BODY_FULL_DUPLEX)
		pieces(st, KVP_EXTPROC_ANSWER_RESPONSE_BODY, m->body, m->end_of_stream);
	else
		answer(st,
			&(struct kvp_extproc_reply){.kind = m->kind == KVP_EXTPROC_RESPONSE_HEADERS
								    ? KVP_EXTPROC_ANSWER_RESPONSE_HEADERS
							    : m->kind == KVP_EXTPROC_RESPONSE_BODY
								    ? KVP_EXTPROC_ANSWER_RESPONSE_BODY
								    : KVP_EXTPROC_ANSWER_RESPONSE_TRAILERS});
}

static void on_request(struct kvp_grpc_stream *st, struct pick *p, const struct kvp_extproc_req *m)
{
	if (m->kind == KVP_EXTPROC_REQUEST_HEADERS) {
		p->request_mode = m->has_config ? m->request_body_mode : KVP_EXTPROC_BODY_FULL_DUPLEX;
		p->response_mode = m->has_config ? m->response_body_mode : KVP_EXTPROC_BODY_FULL_DUPLEX;
		p->observed = m->observability_mode && fault != ALWAYS_ANSWERS;
		if (p->observed)
			return;
		if (m->end_of_stream)
			pick(st, p, 0);
		else if (p->request_mode == KVP_EXTPROC_BODY_BUFFERED)
			answer(st, &(struct kvp_extproc_reply){.kind = KVP_EXTPROC_ANSWER_REQUEST_HEADERS});
		return;
	}
	if (p->observed)
		return;
	memcpy(p->body + p->len, m->body.p ? m->body.p : "", m->body.len);
	p->len += m->body.len;
	if (m->kind == KVP_EXTPROC_REQUEST_TRAILERS) {
		if (p->request_mode == KVP_EXTPROC_BODY_FULL_DUPLEX)
			pick(st, p, 1);
		answer(st, &(struct kvp_extproc_reply){.kind = KVP_EXTPROC_ANSWER_REQUEST_TRAILERS});
	} else if (m->end_of_stream || p->request_mode == KVP_EXTPROC_BODY_BUFFERED) {
		pick(st, p, 0);
	}
}

static void on_event(const struct kvp_grpc_event *ev)
{
	struct pick *p = ev->stream ? kvp_grpc_ctx(ev->stream) : NULL;
	struct kvp_extproc_req m;
	switch (ev->kind) {
	case KVP_GRPC_OPEN:
		open_cnt++;
		kvp_grpc_set_ctx(ev->stream, calloc(1, sizeof(*p)));
		break;
	case KVP_GRPC_MESSAGE:
		if (kvp_extproc_req_decode(dec, ev->data, ev->len, &m) != KVP_OK)
			ok(0, "a message of the proxy is readable");
		else if (m.kind == KVP_EXTPROC_REQUEST_HEADERS || m.kind == KVP_EXTPROC_REQUEST_BODY ||
			 m.kind == KVP_EXTPROC_REQUEST_TRAILERS)
			on_request(ev->stream, p, &m);
		else if (!p->observed)
			on_response(ev->stream, p, &m);
		break;
	case KVP_GRPC_HALF_CLOSE:
		kvp_grpc_finish(ev->stream, KVP_GRPC_OK, "");
		break;
	case KVP_GRPC_CLOSED:
		closed_cnt++;
		cancelled_cnt += ev->end == KVP_GRPC_END_CANCELLED;
		free(p);
		break;
	default:
		break;
	}
}

static int pump(void)
{
	struct kvp_grpc_event ev;
	struct kvp_gc_event cev;
	int n = 0;
	while (kvp_grpc_next(g, &ev))
		on_event(&ev);
	while (n < 64 && kvp_gc_next(c, n ? 0 : 1, &cev)) {
		kvp_envoy_event(client_dec, &cev);
		n++;
	}
	return n;
}

/* run plays until done; an exchange that can't end is cancelled when nothing has moved for a while. */
static void run(struct kvp_envoy *x)
{
	uint64_t end = fix_now_ms() + FIX_WAIT_MS;
	int quiet = 0;
	kvp_envoy_start(c, x);
	while (!x->done && fix_now_ms() < end) {
		quiet = pump() ? 0 : quiet + 1;
		if (fault == NO_END && quiet == 100)
			kvp_gc_cancel(x->call);
	}
}

static const struct kvp_extproc_header request_headers[] = {
	{{":method", 7}, {"POST", 4}}, {{":path", 5}, {"/v1/chat/completions", 20}}};
static const struct kvp_extproc_header response_headers[] = {{{":status", 7}, {"200", 3}}};
static char body[220000], reply_body[100000];

static struct kvp_envoy exchange(uint32_t request_mode, uint32_t response_mode, uint32_t len)
{
	struct kvp_envoy x = {.header = request_headers,
		.header_cnt = 2,
		.response_header = response_headers,
		.response_header_cnt = 1,
		.body = {len ? body : NULL, len},
		.response_body = {reply_body, len / 3},
		.request_mode = request_mode,
		.response_mode = response_mode};
	return x;
}

static void modes(void)
{
	static const uint32_t request[] = {KVP_EXTPROC_BODY_FULL_DUPLEX, KVP_EXTPROC_BODY_BUFFERED},
			      response[] = {KVP_EXTPROC_BODY_FULL_DUPLEX, KVP_EXTPROC_BODY_STREAMED,
				      KVP_EXTPROC_BODY_BUFFERED, KVP_EXTPROC_BODY_NONE},
			      size[] = {0, 1, 62001, 220000};
	for (uint32_t i = 0; i < 2 * 4 * 4 * 4; i++) {
		uint32_t q = request[i % 2], p = response[i / 2 % 4], len = size[i / 8 % 4];
		struct kvp_envoy x = exchange(q, p, len);
		x.trailers = i / 32 & 1;
		x.response_trailers = i / 64 & 1;
		run(&x);
		int good = x.done && x.grpc_status == 0 && !x.violations && !x.mismatches &&
			   x.forwarded_bytes == len && !x.http_status;
		if (p == KVP_EXTPROC_BODY_FULL_DUPLEX)
			good &= x.response_bytes == len / 3;
		if (!ok(good, "modes %u and %u, %u bytes, trailers %u and %u", q, p, len, x.trailers,
			    x.response_trailers))
			printf("# status %d, %s, %llu bytes\n", x.grpc_status, x.violation,
				(unsigned long long)x.forwarded_bytes);
	}
	struct kvp_envoy old = exchange(KVP_EXTPROC_BODY_FULL_DUPLEX, KVP_EXTPROC_BODY_FULL_DUPLEX, 100);
	old.no_config = 1;
	run(&old);
	ok(!old.violations && old.grpc_status == 0, "a proxy that sends no configuration");
	is_str(old.destination, "10.0.0.7:8000", "the destination");
	is_str(old.metadata, "10.0.0.7:8000", "and the metadata");
	ok(old.clear_route_cache && old.set_cnt == 1, "with the route cache cleared");
	struct kvp_envoy head = exchange(KVP_EXTPROC_BODY_FULL_DUPLEX, KVP_EXTPROC_BODY_FULL_DUPLEX, 100);
	head.response_ends_with_headers = 1;
	run(&head);
	ok(!head.violations && head.grpc_status == 0, "a response that ends with its headers");
	struct kvp_envoy watch = exchange(KVP_EXTPROC_BODY_FULL_DUPLEX, KVP_EXTPROC_BODY_FULL_DUPLEX, 100);
	watch.observability = 1;
	run(&watch);
	ok(!watch.violations && watch.grpc_status == 0 && !watch.answers,
		"observability mode: no answer, OK");
}

/* settled: the picker has seen the end of everything before; a whole exchange behind it on the same
 * connection makes sure that nothing is still on its way. */
static void settled(void)
{
	struct kvp_envoy x = exchange(KVP_EXTPROC_BODY_FULL_DUPLEX, KVP_EXTPROC_BODY_FULL_DUPLEX, 100);
	run(&x);
	for (uint64_t end = fix_now_ms() + FIX_WAIT_MS; closed_cnt < open_cnt && fix_now_ms() < end;)
		pump();
}

static void stops(void)
{
	settled();
	for (uint32_t i = 0; i < 12; i++) {
		struct kvp_envoy x =
			exchange(KVP_EXTPROC_BODY_FULL_DUPLEX, KVP_EXTPROC_BODY_FULL_DUPLEX, 100000);
		uint32_t cancelled = cancelled_cnt, opened = open_cnt;
		x.stop = (enum kvp_envoy_stop)(i / 2);
		x.leave = i % 2 ? KVP_ENVOY_RESET : KVP_ENVOY_CLOSE;
		run(&x);
		settled();
		/* A reset right behind the headers may overtake them: then the picker never saw the
		 * stream. */
		uint32_t seen = open_cnt - opened - 1;
		ok(x.done && !x.violations, "leaves at %u by %s", x.stop, i % 2 ? "reset" : "close");
		is_u64(x.grpc_status, i % 2 ? 1 : 0, "with that status");
		ok(seen == 1 || x.stop == KVP_ENVOY_AT_HEADERS, "seen by the picker");
		/* A whole exchange is over before its reset, so the reset may find it finished. */
		ok(cancelled_cnt - cancelled == (i % 2 ? seen : 0) || x.stop == KVP_ENVOY_WHOLE,
			"which hears how it left");
	}
}

static void faults(void)
{
	static const char *const name[] = {"none", "body first", "two ends", "a long piece", "other metadata",
		"answers in observability mode", "closes", "changes the body", "no end"};
	for (fault = BODY_FIRST; fault < REFUSES; fault++) {
		struct kvp_envoy x =
			exchange(KVP_EXTPROC_BODY_FULL_DUPLEX, KVP_EXTPROC_BODY_FULL_DUPLEX, 100000);
		x.observability = fault == ALWAYS_ANSWERS;
		run(&x);
		ok(x.done && (x.violations || x.mismatches || (fault == NO_END && x.grpc_status == 1)),
			"seen: %s (%s)", name[fault], x.violation);
	}
	struct kvp_envoy x = exchange(KVP_EXTPROC_BODY_FULL_DUPLEX, KVP_EXTPROC_BODY_FULL_DUPLEX, 100);
	fault = REFUSES;
	run(&x);
	ok(x.done && !x.violations && x.http_status == 503 && x.grpc_status == 0, "an immediate response");
	is_str(x.http_body, "no endpoints available", "with its text");
	fault = NO_FAULT;
}

static void many(void)
{
	static struct kvp_envoy x[200];
	uint32_t good = 0;
	uint64_t end = fix_now_ms() + FIX_WAIT_MS;
	for (uint32_t i = 0; i < 200; i++) {
		x[i] = exchange(KVP_EXTPROC_BODY_FULL_DUPLEX, KVP_EXTPROC_BODY_FULL_DUPLEX, i * 37);
		kvp_envoy_start(c, &x[i]);
	}
	for (uint32_t i = 0; i < 200; i++) {
		while (!x[i].done && fix_now_ms() < end)
			pump();
		good += x[i].done && !x[i].violations && !x[i].mismatches && x[i].grpc_status == 0;
	}
	is_u64(good, 200, "200 exchanges at once");
}

int main(void)
{
	static const char *const method[] = {KVP_EXTPROC_METHOD};
	struct kvp_grpc_cfg cfg = {.method = method, .method_cnt = 1};
	struct kvp_grpc_listen l = {.addr = "127.0.0.1:0", .methods = 1};
	uint16_t port;
	char target[64];
	if (TAP_IS_TSAN)
		return skip_all(FIX_TSAN);
	for (uint32_t i = 0; i < sizeof(body); i++)
		body[i] = (char)('a' + i % 23);
	for (uint32_t i = 0; i < sizeof(reply_body); i++)
		reply_body[i] = (char)('A' + i % 19);
	dec = kvp_extproc_dec_new();
	client_dec = kvp_extproc_dec_new();
	ok(kvp_grpc_new(&g, &cfg) == KVP_OK && kvp_grpc_listen_add(g, &l, &port) == KVP_OK &&
			kvp_grpc_start(g) == KVP_OK,
		"a server");
	snprintf(target, sizeof(target), "127.0.0.1:%u", port);
	kvp_gc_open(&c, &(struct kvp_gc_cfg){.target = target});
	modes();
	stops();
	faults();
	many();
	for (uint64_t end = fix_now_ms() + FIX_WAIT_MS; closed_cnt < open_cnt && fix_now_ms() < end;)
		pump();
	is_u64(closed_cnt, open_cnt, "every stream had its end");
	kvp_gc_close(c);
	kvp_grpc_delete(g);
	kvp_extproc_dec_delete(dec);
	kvp_extproc_dec_delete(client_dec);
	return done();
}
