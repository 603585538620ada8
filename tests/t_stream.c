/* The state machine of an ext_proc stream: every order of messages in every mode, without gRPC. Each case is
 * a row: what comes in, and the exact list of actions that must come out. */
#include "daemons/extproc/stream.h"
#include "tests/tap.h"

#include <stdarg.h>
#include <stdlib.h>
#include <strings.h>

#define S(text) KVP_EXTPROC_STR(text)

/* ---- a picker that writes down what it is asked ---- */

enum answers { AT_ONCE, LATER };
struct fake {
	struct kvp_stream s;
	char log[8192];
	size_t len;
	enum answers answers;
	struct kvp_pick_answer a;
	int full;     /* admit refuses */
	int64_t kept; /* bytes */
	int64_t budget;
	int finished, sent_after_finish, releases, cancels, prefills, picks;
	/* headers set and removed, set and not overwritten; times that the prefill header was removed */
	uint32_t both, not_over, strips_prefiller;
	char *body; /* all request pieces */
	size_t body_len;
	int body_ends;
};

__attribute__((format(printf, 2, 3))) static void say(struct fake *f, const char *fmt, ...)
{
	va_list ap;
	if (f->len + 512 > sizeof(f->log))
		return;
	va_start(ap, fmt);
	f->len += (size_t)vsnprintf(f->log + f->len, sizeof(f->log) - f->len, fmt, ap);
	va_end(ap);
	f->log[f->len++] = ' ';
	f->log[f->len] = 0;
}

static const char *const answer_name[] = {
	"none", "headers", "rheaders", "body", "rbody", "trailers", "rtrailers"};

static void on_send(void *ctx, const struct kvp_extproc_reply *m)
{
	struct fake *f = ctx;
	char text[600] = "";
	size_t n = 0;
	f->sent_after_finish += f->finished;
	if (m->kind == KVP_EXTPROC_ANSWER_IMMEDIATE) {
		say(f, "immediate(%u,%.*s%s%.*s)", m->http_status, (int)m->body.len, m->body.p,
			m->set_cnt ? ",retry=" : "", m->set_cnt ? (int)m->set[0].value.len : 0,
			m->set_cnt ? m->set[0].value.p : "");
		return;
	}
	for (uint32_t i = 0; i < m->set_cnt; i++) {
		n += (size_t)snprintf(text + n, sizeof(text) - n, ",%.*s=%.*s", (int)m->set[i].key.len,
			m->set[i].key.p, (int)m->set[i].value.len, m->set[i].value.p);
		f->not_over += m->set[i].append != KVP_EXTPROC_OVERWRITE_OR_ADD;
		for (uint32_t k = 0; k < m->remove_cnt; k++)
			f->both += m->set[i].key.len == m->remove[k].len &&
				   !strncasecmp(m->set[i].key.p, m->remove[k].p, m->remove[k].len);
	}
	for (uint32_t k = 0; k < m->remove_cnt; k++)
		f->strips_prefiller +=
			m->remove[k].len == 21 && !memcmp(m->remove[k].p, "x-prefiller-host-port", 21);
	if (m->set_cnt)
		n += (size_t)snprintf(text + n, sizeof(text) - n, ",-%u%s", m->remove_cnt,
			m->clear_route_cache ? ",clear" : "");
	if (m->destination.len)
		n += (size_t)snprintf(
			text + n, sizeof(text) - n, ",meta=%.*s", (int)m->destination.len, m->destination.p);
	if (m->mutation == KVP_EXTPROC_BODY_STREAMED_PIECE) {
		n += (size_t)snprintf(
			text + n, sizeof(text) - n, ",%u%s", m->body.len, m->end_of_stream ? "." : "");
		if (m->kind == KVP_EXTPROC_ANSWER_REQUEST_BODY) {
			f->body = realloc(f->body, f->body_len + m->body.len + 1);
			if (m->body.len)
				memcpy(f->body + f->body_len, m->body.p, m->body.len);
			f->body_len += m->body.len;
			f->body_ends += m->end_of_stream;
		}
	}
	if (m->mutation == KVP_EXTPROC_BODY_REPLACE)
		n += (size_t)snprintf(text + n, sizeof(text) - n, ",replaced=%u", m->body.len);
	say(f, "%s%s%s%s", answer_name[m->kind], n ? "(" : "", n ? text + 1 : "", n ? ")" : "");
}

static void on_finish(void *ctx, int status, const char *text)
{
	struct fake *f = ctx;
	f->finished++;
	say(f, "finish(%d%s)", status, strstr(text, "response_body_mode") ? ",modes" : "");
}
static int on_admit(void *ctx, struct kvp_pick_answer *a)
{
	struct fake *f = ctx;
	say(f, "admit");
	if (!f->full)
		return 1;
	*a = (struct kvp_pick_answer){.status = 503, .text = "endpoint picker overloaded"};
	return 0;
}
static int on_keep(void *ctx, int64_t bytes)
{
	struct fake *f = ctx;
	if (bytes > 0 && f->kept + bytes > f->budget)
		return 0;
	f->kept += bytes;
	return 1;
}
static void on_pick(void *ctx, const struct kvp_pick_ask *ask)
{
	static const char *const form[] = {"headers", "empty", "body"};
	struct fake *f = ctx;
	f->picks++;
	say(f, "pick(%s,%zu%s)", form[ask->form], ask->body_len,
		ask->subset_hint == KVP_EXTPROC_HINT_PRESENT ? ",subset" : "");
	for (uint32_t i = 0; i < ask->header_cnt; i++)
		if (ask->header[i].key.len == 21 &&
			strncasecmp(ask->header[i].key.p, "x-prefiller-host-port", 21) == 0)
			say(f, "PREFILLER-SEEN");
	if (f->answers == AT_ONCE)
		kvp_stream_picked(&f->s, &f->a);
}
static void on_cancel(void *ctx)
{
	struct fake *f = ctx;
	f->cancels++;
	say(f, "cancel");
}
static void on_prefill(void *ctx)
{
	struct fake *f = ctx;
	f->prefills++;
	say(f, "prefilled");
}
static void on_served(void *ctx, struct kvp_extproc_str e)
{
	say(ctx, "served(%.*s)", (int)e.len, e.p);
}
static void on_response_headers(void *ctx, const struct kvp_extproc_header *h, uint32_t cnt)
{
	(void)ctx;
	(void)h;
	(void)cnt;
}
static void on_response_body(void *ctx, const void *body, size_t len, int ends)
{
	(void)ctx;
	(void)body;
	(void)len;
	(void)ends;
}
static void on_release(void *ctx)
{
	struct fake *f = ctx;
	f->releases++;
	say(f, "free");
}
static void on_note(void *ctx, enum kvp_stream_note n)
{
	static const char *const name[KVP_NOTE_CNT] = {
		"empty", "late", "order", "observed", "modes", "large", "slow", "budget", "gave-up", "ends"};
	say(ctx, "!%s", name[n]);
}

static const struct kvp_stream_ops ops = {on_send, on_finish, on_admit, on_keep, on_pick, on_cancel,
	on_prefill, on_served, on_response_headers, on_response_body, on_release, on_note};
static const struct kvp_stream_cfg cfg = {.body_max = 1 << 22,
	.assumed_mode = KVP_EXTPROC_BODY_FULL_DUPLEX,
	.strips_dp_rank = 1,
	.retry_after_s = 1};

static struct fake *begin_with(const struct kvp_stream_cfg *c, enum answers answers)
{
	struct fake *f = calloc(1, sizeof(*f));
	f->budget = 1 << 24;
	f->answers = answers;
	f->a = (struct kvp_pick_answer){.status = 200, .destination = S("10.0.0.7:8000"), .has_booking = 1};
	kvp_stream_open(&f->s, c, &ops, f);
	return f;
}
static struct fake *begin(enum answers answers)
{
	return begin_with(&cfg, answers);
}

/* end checks what holds for every stream, and the log. */
static void end(struct fake *f, const char *want, const char *name)
{
	if (!f->finished)
		kvp_stream_gone(&f->s);
	kvp_stream_close(&f->s);
	while (f->len && f->log[f->len - 1] == ' ')
		f->log[--f->len] = 0;
	if (want)
		is_str(f->log, want, "%s", name);
	ok(f->finished <= 1 && !f->sent_after_finish && f->releases <= 1 && f->prefills <= 1 && !f->kept,
		"%s: one end, one free, nothing kept", name);
	ok(!f->both && !f->not_over, "%s: what is set is overwritten; set and remove never both list it",
		name);
	free(f->body);
	free(f);
}

/* ---- messages ---- */

static struct kvp_extproc_req headers(int ends)
{
	static const struct kvp_extproc_header h[] = {
		{S(":method"), S("POST")}, {S(":path"), S("/v1/chat/completions")}};
	return (struct kvp_extproc_req){.kind = KVP_EXTPROC_REQUEST_HEADERS,
		.header = h,
		.header_cnt = 2,
		.end_of_stream = (uint8_t)ends};
}
static struct kvp_extproc_req with_modes(struct kvp_extproc_req m, uint32_t request, uint32_t response)
{
	m.has_config = 1;
	m.request_body_mode = request;
	m.response_body_mode = response;
	m.send_body_without_waiting = 1;
	return m;
}
static struct kvp_extproc_req part(enum kvp_extproc_kind kind, const char *p, size_t len, int ends)
{
	return (struct kvp_extproc_req){
		.kind = kind, .body = {p, (uint32_t)len}, .end_of_stream = (uint8_t)ends};
}
static void put(struct fake *f, struct kvp_extproc_req m)
{
	kvp_stream_message(&f->s, &m);
}
static void put_kind(struct fake *f, enum kvp_extproc_kind kind)
{
	put(f, (struct kvp_extproc_req){.kind = kind});
}
static void put_response(struct fake *f, const char *status, int ends)
{
	struct kvp_extproc_header h = {S(":status"), {status, 3}};
	put(f, (struct kvp_extproc_req){.kind = KVP_EXTPROC_RESPONSE_HEADERS,
		       .header = &h,
		       .header_cnt = 1,
		       .end_of_stream = (uint8_t)ends});
}
#define BODY "{\"model\":\"m\"}"
#define BODY_LEN 13
#define DUPLEX KVP_EXTPROC_BODY_FULL_DUPLEX
#define ROUTE "x-gateway-destination-endpoint=10.0.0.7:8000,-6,clear,meta=10.0.0.7:8000"

static void put_body(struct fake *f, int ends)
{
	put(f, part(KVP_EXTPROC_REQUEST_BODY, BODY, BODY_LEN, ends));
}
static void put_response_body(struct fake *f, const char *text, int ends)
{
	put(f, part(KVP_EXTPROC_RESPONSE_BODY, text, strlen(text), ends));
}

/* ---- cases ---- */

static void duplex(void)
{
	struct fake *f = begin(AT_ONCE);
	put(f, with_modes(headers(0), DUPLEX, DUPLEX));
	is_str(f->log, "", "headers of a request with a body are not answered");
	put_body(f, 1);
	put_response(f, "200", 0);
	put_response_body(f, "", 0);
	put_response_body(f, "data: 1\n\n", 0);
	put_response_body(f, "data: 2\n\n", 0);
	put_response_body(f, "data: [DONE]\n\n", 1);
	is_u64(kvp_stream_outcome(&f->s), KVP_OUTCOME_RESPONSE_EOS, "the response ended");
	kvp_stream_half_closed(&f->s);
	end(f,
		"admit pick(body,13) headers(" ROUTE
		") body(13.) rheaders rbody(0) rbody(9) prefilled rbody(9) "
		"rbody(14.) free finish(0)",
		"a streamed chat");

	f = begin(AT_ONCE);
	put(f, headers(0));
	put(f, part(KVP_EXTPROC_REQUEST_BODY, BODY, 5, 0));
	put(f, part(KVP_EXTPROC_REQUEST_BODY, BODY + 5, BODY_LEN - 5, 0));
	put(f, part(KVP_EXTPROC_REQUEST_BODY, "", 0, 1));
	ok(f->body_len == BODY_LEN && memcmp(f->body, BODY, BODY_LEN) == 0 && f->body_ends == 1,
		"the body goes on as it came");
	end(f, "admit pick(body,13) headers(" ROUTE ") body(13.) free",
		"no configuration, a body in parts, an empty closing message, a reset");

	f = begin(AT_ONCE);
	put(f, headers(0));
	put_body(f, 0);
	put_kind(f, KVP_EXTPROC_REQUEST_TRAILERS);
	put_response(f, "200", 0);
	put_response_body(f, "x", 0);
	put_kind(f, KVP_EXTPROC_RESPONSE_TRAILERS);
	put_kind(f, KVP_EXTPROC_RESPONSE_TRAILERS);
	kvp_stream_half_closed(&f->s);
	end(f,
		"admit pick(body,13) headers(" ROUTE ") body(13) trailers rheaders rbody(1) prefilled "
		"rtrailers free rtrailers finish(0)",
		"trailers end the bodies in both directions");
}

static void buffered(void)
{
	struct fake *f = begin(AT_ONCE);
	put(f, with_modes(headers(0), KVP_EXTPROC_BODY_BUFFERED, KVP_EXTPROC_BODY_STREAMED));
	put_body(f, 1);
	put_body(f, 1);
	put_response(f, "200", 0);
	put_response_body(f, "a", 0);
	put_response_body(f, "", 0);
	put_response_body(f, "b", 1);
	put_response_body(f, "c", 1);
	kvp_stream_half_closed(&f->s);
	end(f,
		"headers admit pick(body,13) body(" ROUTE ") !late body rheaders rbody prefilled rbody rbody "
		"free !late rbody finish(0)",
		"buffered request, streamed response: one answer a message");

	f = begin(LATER);
	put(f, with_modes(headers(0), KVP_EXTPROC_BODY_BUFFERED, KVP_EXTPROC_BODY_BUFFERED));
	put_body(f, 0);
	put_body(f, 1);
	put_kind(f, KVP_EXTPROC_REQUEST_TRAILERS);
	kvp_stream_picked(&f->s, &f->a);
	end(f, "headers admit pick(body,13) !late body(" ROUTE ") body trailers free",
		"a buffered body without the end flag is the whole body; what follows is answered behind it");

	f = begin(AT_ONCE);
	f->a.has_booking = 0;
	put(f, with_modes(headers(0), KVP_EXTPROC_BODY_BUFFERED, KVP_EXTPROC_BODY_BUFFERED));
	put_kind(f, KVP_EXTPROC_REQUEST_TRAILERS);
	end(f, "headers pick(empty,0) trailers(meta=10.0.0.7:8000)",
		"buffered without a body: the routing travels with the trailers");

	struct kvp_stream_cfg c = cfg;
	c.assumed_mode = KVP_EXTPROC_BODY_BUFFERED;
	f = begin_with(&c, AT_ONCE);
	put(f, headers(0));
	put_body(f, 1);
	end(f, "headers admit pick(body,13) body(" ROUTE ") free",
		"the assumed mode counts when none is stated");
}

static void without_body(void)
{
	struct fake *f = begin(AT_ONCE);
	f->a.has_booking = 0;
	put(f, with_modes(headers(1), KVP_EXTPROC_BODY_NONE, KVP_EXTPROC_BODY_NONE));
	put_response(f, "200", 0);
	put_response_body(f, "x", 1);
	kvp_stream_half_closed(&f->s);
	end(f, "pick(headers,0) headers(" ROUTE ") rheaders rbody finish(0)",
		"headers alone are answered in every mode, no booking, no callback");

	f = begin(AT_ONCE);
	f->a.has_booking = 0;
	put(f, headers(0));
	put(f, part(KVP_EXTPROC_REQUEST_BODY, "", 0, 1));
	end(f, "pick(empty,0) headers(" ROUTE ") body(0.)",
		"an empty body takes no permit and is answered empty");

	f = begin(AT_ONCE);
	f->a.has_booking = 0;
	put(f, headers(0));
	put_kind(f, KVP_EXTPROC_REQUEST_TRAILERS);
	end(f, "pick(empty,0) headers(" ROUTE ") trailers", "headers and trailers: no body piece");

	f = begin(AT_ONCE);
	f->a = (struct kvp_pick_answer){.status = 400, .text = "invalid request body: empty"};
	put(f, headers(0));
	put(f, part(KVP_EXTPROC_REQUEST_BODY, "", 0, 1));
	is_u64(kvp_stream_outcome(&f->s), KVP_OUTCOME_EARLY_REJECT, "a rejected stream");
	put_body(f, 1);
	kvp_stream_half_closed(&f->s);
	end(f, "pick(empty,0) immediate(400,invalid request body: empty) finish(0)",
		"a rejected request is over: nothing after it is answered");
}

static void modes(void)
{
	for (uint32_t request = 0; request <= 6; request++)
		for (uint32_t response = 0; response <= 6; response++) {
			int served = (request == 2 || request == 4) &&
				     (response == 1 || response == 2 || response == 4);
			struct fake *f = begin(AT_ONCE);
			char name[80];
			put(f, with_modes(headers(0), request, response));
			snprintf(name, sizeof(name), "request mode %u, response mode %u", request, response);
			end(f, !served ? "!modes finish(9,modes)" : request == 2 ? "headers" : "", name);
		}
	struct kvp_stream_cfg c = cfg;
	c.response_none = 1;
	struct fake *f = begin_with(&c, AT_ONCE);
	put(f, with_modes(headers(0), DUPLEX, KVP_EXTPROC_BODY_NONE));
	put_body(f, 1);
	put_response(f, "200", 0);
	kvp_stream_half_closed(&f->s);
	end(f, "admit pick(body,13) headers(" ROUTE ") body(13.) rheaders prefilled free finish(0)",
		"without response bodies the headers mark prefill and the stream's end frees");
	f = begin(AT_ONCE);
	put(f, headers(0));
	put(f, with_modes(part(KVP_EXTPROC_REQUEST_BODY, BODY, 4, 0), DUPLEX, 0));
	is_u64(kvp_stream_outcome(&f->s), KVP_OUTCOME_EXT_PROC_ERROR,
		"a refused mode is an error of the stream");
	end(f, "!modes finish(9,modes)", "the configuration counts in whichever message it comes first");
}

static void refusals(void)
{
	struct fake *f = begin(AT_ONCE);
	f->full = 1;
	put(f, headers(0));
	put(f, part(KVP_EXTPROC_REQUEST_BODY, "", 0, 0));
	put_body(f, 0);
	end(f, "admit immediate(503,endpoint picker overloaded) finish(0)",
		"the permit is taken at the first byte; none: 503 at once");

	struct kvp_stream_cfg c = cfg;
	c.body_max = 20;
	f = begin_with(&c, AT_ONCE);
	put(f, headers(0));
	put_body(f, 0);
	put_body(f, 0);
	end(f, "admit !large cancel immediate(413,request body too large) finish(0)",
		"a body over the limit");

	f = begin(AT_ONCE);
	f->budget = 20;
	put(f, headers(0));
	put_body(f, 0);
	put_body(f, 1);
	end(f, "admit !budget cancel immediate(503,endpoint picker overloaded,retry=1) finish(0)",
		"bodies over the node's budget");

	f = begin(AT_ONCE);
	put(f, headers(0));
	ok(kvp_stream_body_outstanding(&f->s), "a body is outstanding");
	kvp_stream_body_late(&f->s);
	end(f, "!slow immediate(408,request body timed out) finish(0)", "a body that does not come");

	f = begin(LATER);
	put(f, headers(0));
	put_body(f, 1);
	kvp_stream_body_late(&f->s);
	f->a = (struct kvp_pick_answer){.status = 429, .text = "all workers are busy", .retry_after_s = 7};
	kvp_stream_picked(&f->s, &f->a);
	end(f, "admit pick(body,13) immediate(429,all workers are busy,retry=7) finish(0)",
		"a complete body is not late; a refused pick is answered with retry-after");

	f = begin(LATER);
	put(f, headers(0));
	put_body(f, 1);
	kvp_stream_shut_down(&f->s);
	end(f, "admit pick(body,13) !ends cancel immediate(503,no endpoints available,retry=1) finish(0)",
		"the process ends while a pick is under way");

	f = begin(AT_ONCE);
	put(f, headers(0));
	kvp_stream_shut_down(&f->s);
	end(f, "!ends immediate(503,no endpoints available,retry=1) finish(0)", "or while the body comes");

	f = begin(AT_ONCE);
	put(f, headers(0));
	put_body(f, 1);
	kvp_stream_shut_down(&f->s);
	put_response(f, "200", 1);
	ok(f->finished == 0 && f->releases == 1, "a routed stream goes on to its end");
	end(f, NULL, "shut down while it is served");
}

/* The proxy may leave before and after every message: the booking is freed exactly when there is one. */
static void resets(void)
{
	for (int at = 0; at <= 6; at++)
		for (int answered = 0; answered <= 1; answered++)
			for (int how = 0; how <= 1; how++) {
				struct fake *f = begin(answered ? AT_ONCE : LATER);
				if (at > 0)
					put(f, headers(0));
				if (at > 1)
					put(f, part(KVP_EXTPROC_REQUEST_BODY, BODY, 4, 0));
				if (at > 2)
					put(f, part(KVP_EXTPROC_REQUEST_BODY, BODY + 4, BODY_LEN - 4, 1));
				if (at > 3 && answered)
					put_response(f, "200", 0);
				if (at > 4 && answered)
					put_response_body(f, "x", 0);
				if (at > 5 && answered)
					put_response_body(f, "y", 1);
				if (how)
					kvp_stream_half_closed(&f->s);
				else
					kvp_stream_gone(&f->s);
				int booked = at > 2 && answered, picking = at > 2 && !answered;
				int freed = f->releases, cancels = f->cancels;
				/* A late answer is of no use: its booking is given back, not adopted. */
				if (picking)
					kvp_stream_picked(&f->s, &f->a);
				ok(freed == booked && f->releases == booked + picking &&
						cancels == (at == 2 || picking),
					"left after %d messages, pick answered: %d, half close: %d", at,
					answered, how);
				end(f, NULL, "left");
			}
}

static void odd_orders(void)
{
	struct fake *f = begin(AT_ONCE);
	put(f, headers(0));
	put_body(f, 1);
	put_body(f, 1);
	put(f, part(KVP_EXTPROC_REQUEST_BODY, "garbage", 7, 1));
	is_u64(f->picks, 1, "one pick");
	end(f, "admit pick(body,13) headers(" ROUTE ") body(13.) !late !late free",
		"body messages behind the end are ignored in full duplex mode");

	f = begin(AT_ONCE);
	put_kind(f, KVP_EXTPROC_NONE);
	put(f, headers(0));
	put(f, headers(0));
	put_body(f, 1);
	put(f, headers(0));
	end(f, "!empty !order admit pick(body,13) headers(" ROUTE ") body(13.) !order free",
		"an empty message and repeated headers change nothing");

	f = begin(LATER);
	put(f, headers(0));
	put_body(f, 1);
	put_response(f, "504", 0);
	put_response_body(f, "timeout", 1);
	is_u64(kvp_stream_outcome(&f->s), KVP_OUTCOME_UPSTREAM_HTTP_ERROR, "an error of the upstream");
	kvp_stream_half_closed(&f->s);
	end(f, "admit pick(body,13) !gave-up cancel rheaders rbody(7.) finish(0)",
		"a response of the proxy itself before the pick: the pick is given up");

	f = begin(AT_ONCE);
	put(f, headers(0));
	put_body(f, 1);
	put_response(f, "204", 1);
	put_response_body(f, "x", 0);
	end(f,
		"admit pick(body,13) headers(" ROUTE ") body(13.) rheaders prefilled "
		"free !late",
		"a response that ends with its headers");

	f = begin(AT_ONCE);
	put(f, headers(0));
	kvp_stream_garbled(&f->s);
	is_u64(kvp_stream_outcome(&f->s), KVP_OUTCOME_EXT_PROC_ERROR, "a garbled stream");
	end(f, "finish(2)", "bytes that are no message");

	f = begin(AT_ONCE);
	struct kvp_extproc_req m = with_modes(headers(0), 0, 0);
	m.observability_mode = 1;
	put(f, m);
	put_body(f, 1);
	put_response(f, "200", 0);
	kvp_stream_half_closed(&f->s);
	end(f, "!observed finish(0)", "observability mode: no check, no answer, no booking, OK in the end");
}

static void served_and_stripped(void)
{
	struct fake *f = begin(AT_ONCE);
	static const struct kvp_extproc_header h[] = {{S(":path"), S("/v1/x")},
		{S("X-Prefiller-Host-Port"), S("127.0.0.1:9")},
		{S("x-prefiller-host-port"), S("127.0.0.1:9")},
		{S("X-Prefiller-URL"), S("http://127.0.0.1:9")}, {S("x-data-parallel-rank"), S("3")}};
	f->a.extra[f->a.extra_cnt++] =
		(struct kvp_extproc_header){S("x-gateway-inference-objective"), S("no")};
	f->a.extra[f->a.extra_cnt++] = (struct kvp_extproc_header){S("X-Envoy-Thing"), S("no")};
	put(f, (struct kvp_extproc_req){.kind = KVP_EXTPROC_REQUEST_HEADERS, .header = h, .header_cnt = 5});
	put_body(f, 1);
	struct kvp_extproc_req r = {.kind = KVP_EXTPROC_RESPONSE_HEADERS, .served = S("10.0.0.9:8000")};
	put(f, r);
	is_u64(f->strips_prefiller, 1, "Header injection: absent selection removes");
	end(f,
		"admit pick(body,13) headers(x-gateway-destination-endpoint=10.0.0.7:8000,-8,clear,"
		"meta=10.0.0.7:8000) body(13.) served(10.0.0.9:8000) rheaders free",
		"Header injection: client prefill header never reaches selection; owned names are not set by "
		"anybody else");

	f = begin(AT_ONCE);
	f->a.extra[f->a.extra_cnt++] = (struct kvp_extproc_header){S("x-data-parallel-rank"), S("1")};
	f->a.prefiller = S("[fd00::1]:8001");
	put(f, (struct kvp_extproc_req){.kind = KVP_EXTPROC_REQUEST_HEADERS, .header = h, .header_cnt = 5});
	put_body(f, 1);
	is_u64(f->strips_prefiller, 0, "Header injection: what is set is not removed as well");
	end(f,
		"admit pick(body,13) "
		"headers(x-gateway-destination-endpoint=10.0.0.7:8000,x-data-parallel-rank=1,"
		"x-prefiller-host-port=[fd00::1]:8001,-6,clear,meta=10.0.0.7:8000) body(13.) free",
		"Header injection: present selection overwrites");

	struct kvp_stream_cfg c = cfg;
	c.strips_dp_rank = 0;
	f = begin_with(&c, AT_ONCE);
	put(f, (struct kvp_extproc_req){.kind = KVP_EXTPROC_REQUEST_HEADERS, .header = h, .header_cnt = 5});
	put_body(f, 1);
	end(f,
		"admit pick(body,13) headers(x-gateway-destination-endpoint=10.0.0.7:8000,-7,clear,"
		"meta=10.0.0.7:8000) body(13.) free",
		"without routing by rank the client's rank is its own business");
}

static void other_body(void)
{
	struct fake *f = begin(AT_ONCE);
	f->a.body = (struct kvp_extproc_str)S("another");
	put(f, headers(0));
	put_body(f, 1);
	ok(f->body_len == 7 && memcmp(f->body, "another", 7) == 0, "another body goes on");
	end(f, "admit pick(body,13) headers(" ROUTE ") body(7.) free", "in full duplex mode");
	f = begin(AT_ONCE);
	f->a.body = (struct kvp_extproc_str)S("another");
	put(f, with_modes(headers(0), KVP_EXTPROC_BODY_BUFFERED, KVP_EXTPROC_BODY_BUFFERED));
	put_body(f, 1);
	end(f,
		"headers admit pick(body,13) body(x-gateway-destination-endpoint=10.0.0.7:8000,-7,clear,"
		"meta=10.0.0.7:8000,replaced=7) free",
		"and takes the place of a buffered one, whose length is removed");
}

static void subset(void)
{
	struct fake *f = begin(AT_ONCE);
	struct kvp_extproc_str one[] = {S("10.0.0.7")};
	struct kvp_extproc_req m = headers(0), b = part(KVP_EXTPROC_REQUEST_BODY, BODY, BODY_LEN, 1);
	m.subset_hint = KVP_EXTPROC_HINT_PRESENT;
	m.subset = one;
	m.subset_cnt = 1;
	put(f, m);
	is_u64(f->s.subset_cnt, 1, "the hint of the headers is kept");
	b.subset_hint = KVP_EXTPROC_HINT_PRESENT;
	put(f, b);
	is_u64(f->s.subset_cnt, 0, "the last message that has the key wins, also when it is empty");
	end(f, "admit pick(body,13,subset) headers(" ROUTE ") body(13.) free", "subset hint");
}

static void pieces(void)
{
	static const size_t size[] = {1, 61999, 62000, 62001, 65535, 65536, 65537, 124000, 130000, 3 << 20};
	char *big = malloc(3 << 20);
	for (size_t i = 0; i < 3 << 20; i++)
		big[i] = (char)((7 * i + 3) % 256);
	for (size_t k = 0; k < sizeof(size) / sizeof(size[0]); k++) {
		struct fake *f = begin(AT_ONCE);
		put(f, headers(0));
		for (size_t at = 0; at < size[k]; at += 65536) {
			size_t n = size[k] - at < 65536 ? size[k] - at : 65536;
			put(f, part(KVP_EXTPROC_REQUEST_BODY, big + at, n, at + n == size[k]));
		}
		ok(f->body_len == size[k] && memcmp(f->body, big, size[k]) == 0 && f->body_ends == 1,
			"%zu bytes come back as they were, with one end", size[k]);
		size_t cnt = 0;
		for (const char *p = f->log; (p = strstr(p, " body(")); p++)
			cnt++;
		is_u64(cnt, (size[k] + 61999) / 62000, "in the fewest pieces of 62,000 bytes");
		end(f, NULL, "pieces");
	}
	free(big);
}

/* Any events in any order: whatever a proxy does, what must hold holds. */
static uint64_t seed;
static uint32_t draw(uint32_t n)
{
	seed = seed * 6364136223846793005u + 1442695040888963407u;
	return (uint32_t)(seed >> 33) % n;
}

static void one_event(struct fake *f, uint32_t request_mode, uint32_t response_mode)
{
	static const char text[] = "0123456789";
	uint32_t n = draw(8);
	switch (draw(14)) {
	case 0:
	case 1:
		put(f, with_modes(headers(draw(6) == 0), request_mode, response_mode));
		break;
	case 2:
	case 3:
	case 4:
		put(f, part(KVP_EXTPROC_REQUEST_BODY, text, n, draw(3) == 0));
		break;
	case 5:
		put_kind(f, KVP_EXTPROC_REQUEST_TRAILERS);
		break;
	case 6:
		put_response(f, draw(2) ? "200" : "500", draw(5) == 0);
		break;
	case 7:
	case 8:
		put(f, part(KVP_EXTPROC_RESPONSE_BODY, text, n, draw(4) == 0));
		break;
	case 9:
		put_kind(f, KVP_EXTPROC_RESPONSE_TRAILERS);
		break;
	case 10:
		if (f->s.state == KVP_STREAM_PICKING)
			kvp_stream_picked(&f->s, &f->a);
		break;
	case 11:
		kvp_stream_body_late(&f->s);
		break;
	case 12:
		if (draw(10) == 0)
			kvp_stream_half_closed(&f->s);
		break;
	default:
		if (draw(20) == 0)
			kvp_stream_garbled(&f->s);
		break;
	}
}

static void any_order(void)
{
	seed = tap_seed(20240229);
	uint32_t bad = 0, routed = 0, freed = 0;
	for (int i = 0; i < 30000 && !bad; i++) {
		struct fake *f = begin(draw(2) ? AT_ONCE : LATER);
		uint32_t request_mode = draw(8) ? draw(2) * 2 + 2 : draw(6),
			 response_mode = draw(8) ? 4 : draw(6);
		f->a.status = draw(6) ? 200 : 503;
		f->a.text = "no";
		f->budget = draw(4) ? 1 << 20 : 12;
		f->full = draw(10) == 0;
		for (uint32_t k = draw(24); k; k--)
			one_event(f, request_mode, response_mode);
		int booked = f->s.booked;
		if (!f->finished)
			kvp_stream_gone(&f->s);
		bad += f->picks > 1 || f->releases > 1 || f->prefills > f->releases || f->finished > 1 ||
		       f->sent_after_finish || (booked && !f->releases) || f->body_ends > 1 || f->s.booked;
		const char *head = strstr(f->log, "headers(x-gateway"), *piece = strstr(f->log, " body(");
		const char *end_piece = strstr(f->log, ".) body(");
		bad += (piece && request_mode == 4 && (!head || head > piece)) || (end_piece != NULL);
		routed += head != NULL;
		freed += (uint32_t)f->releases;
		kvp_stream_close(&f->s);
		bad += f->kept != 0;
		if (bad)
			printf("# stream %d: %s\n", i, f->log);
		free(f->body);
		free(f);
	}
	ok(!bad, "any order of events: one pick, one end, one free, answers in order, nothing kept");
	ok(routed > 1000 && freed > 1000, "%u were routed, %u bookings freed", routed, freed);
}

int main(void)
{
	any_order();
	duplex();
	buffered();
	without_body();
	modes();
	refusals();
	resets();
	odd_orders();
	served_and_stripped();
	other_body();
	subset();
	pieces();
	return done();
}
