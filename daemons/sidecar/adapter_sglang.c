#include <kvpick/err.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "daemons/sidecar/conn.h"

/* SGLang: both engines get the same body at the same time and meet at the prefill engine's bootstrap server.
 * The client sees nothing before the prefill answer is complete and valid; legs that end otherwise are told
 * to stop. */

#define INFO_MAX_BYTES (UINT64_C(1) << 20)
#define ABORT_NS UINT64_C(5000000000)

enum { PREFILL, DECODE };

static enum kvp_req_engine_kind engine_of(int which)
{
	return which == PREFILL ? KVP_ENGINE_PREFILL : KVP_ENGINE_LOCAL;
}

struct sgl {
	struct kvp_http_buf info[2]; /* answers of /server_info */
	struct kvp_sgl_check check[2];
	struct kvp_kept_head head; /* of the decode answer, until the gate opens */
	struct kvp_http_buf kept;  /* its body, too */
	uint8_t informed[2], complete[2], has_head;
	uint8_t started; /* the engines were asked to generate */
	uint8_t open;	 /* the gate: the prefill answer is valid */
	uint8_t unread;	 /* the decode answer is compressed: it is passed on unjudged */
	uint16_t port;
	char rid[33];
};

/* A call that outlives its request. */
struct kvp_abort {
	struct kvp_worker *w;
	struct kvp_abort *next, **prev;
	struct kvp_leg leg;
	struct kvp_target target;
};

static const struct kvp_fail invalid = {
	502, KVP_RESULT_SGL_PROTOCOL, "an engine's answer violates the prefill/decode protocol"};

static void abort_free(struct kvp_abort *a)
{
	*a->prev = a->next;
	if (a->next)
		a->next->prev = a->prev;
	kvp_leg_close(&a->leg);
	free(a);
}

static void abort_head(void *ctx, struct kvp_leg *leg)
{
	(void)ctx;
	(void)leg;
}

static void abort_body(void *ctx, struct kvp_leg *leg, const char *data, uint64_t len)
{
	(void)ctx;
	(void)leg;
	(void)data;
	(void)len;
}

static void abort_done(void *ctx, struct kvp_leg *leg, enum kvp_leg_end end)
{
	struct kvp_abort *a = ctx;
	struct kvp_worker *w = a->w;
	if (end != KVP_LEG_COMPLETE || leg->status / 100 != 2)
		kvp_count_add(&w->count.aborts_failed, 1);
	abort_free(a);
	kvp_worker_check(w);
}

static const struct kvp_leg_ops abort_ops = {
	.on_head = abort_head, .on_body = abort_body, .on_done = abort_done};

void kvp_aborts_end(struct kvp_worker *w)
{
	while (w->abort)
		abort_free(w->abort);
}

/* Best effort: the engine may be gone. */
static void abort_leg(struct kvp_req *r, int which)
{
	struct sgl *s = r->flow_state;
	struct kvp_worker *w = r->w;
	struct kvp_leg_cfg cfg;
	struct kvp_http_buf b = {0};
	char body[80];
	struct kvp_abort *a = calloc(1, sizeof(*a));
	snprintf(body, sizeof(body), "{\"rid\":\"%s\",\"abort_all\":false}", s->rid);
	kvp_count_add(&w->count.aborts, 1);
	if (!a || kvp_headers_side(r, engine_of(which), "/abort_request", body, &b)) {
		kvp_count_add(&w->count.aborts_failed, 1);
		kvp_http_buf_free(&b);
		free(a);
		return;
	}
	a->w = w;
	a->next = w->abort;
	a->prev = &w->abort;
	if (a->next)
		a->next->prev = &a->next;
	w->abort = a;
	a->target = r->target;
	kvp_engine_cfg(w, engine_of(which), &a->target, &cfg);
	cfg.deadline_ns = kvp_loop_now_ns(w->loop) + ABORT_NS;
	cfg.request = &b;
	kvp_leg_start(&a->leg, &w->pool, &cfg, &abort_ops, a);
}

static struct kvp_leg *leg_of(struct kvp_req *r, int which)
{
	return which == PREFILL ? &r->prefill : &r->decode;
}

static int which_of(const struct kvp_req *r, const struct kvp_leg *leg)
{
	return leg == &r->prefill ? PREFILL : DECODE;
}

static void leg_failed(struct kvp_req *r, enum kvp_leg_end end)
{
	static const struct kvp_fail late = {504, KVP_RESULT_SGL_UPSTREAM,
					     "an engine did not answer in time"},
				     gone = {502, KVP_RESULT_SGL_UPSTREAM,
					     "an engine could not be reached or broke off"};
	if (end == KVP_LEG_TOO_LARGE)
		kvp_reply_error(r, &invalid, NULL);
	else if (end == KVP_LEG_FAILED)
		kvp_reply_error(r, &kvp_fail_resources, NULL);
	else
		kvp_reply_error(r,
			end == KVP_LEG_CONNECT_TIMEOUT || end == KVP_LEG_READ_TIMEOUT ? &late : &gone, NULL);
}

/* ---- generation ---- */

/* So much is kept now, and more bytes will be. */
static int hold(struct kvp_req *r, uint64_t more)
{
	const struct sgl *s = r->flow_state;
	uint64_t legs = kvp_leg_held(&r->prefill) + kvp_leg_held(&r->decode);
	return kvp_req_hold(r, legs + s->kept.len + kvp_sgl_held(&s->check[PREFILL]) +
				       kvp_sgl_held(&s->check[DECODE]) + more);
}

static void put_rest(struct kvp_req *r)
{
	struct sgl *s = r->flow_state;
	if (s->kept.len)
		kvp_relay_put(r, &r->decode, s->kept.p, s->kept.len);
	kvp_http_buf_free(&s->kept);
	hold(r, 0);
}

static void gate_open(struct kvp_req *r)
{
	struct sgl *s = r->flow_state;
	s->open = 1;
	if (!s->has_head)
		return;
	kvp_reply_kept_head(r, &s->head);
	put_rest(r);
	if (s->complete[DECODE])
		kvp_reply_end(r, KVP_RESULT_OK);
}

static void rejected(struct kvp_req *r, struct kvp_leg *leg)
{
	struct kvp_fail f = {leg->status, KVP_RESULT_SGL_REJECTED, "an engine refused the request"},
			other = {502, KVP_RESULT_SGL_UPSTREAM, "an engine gave no usable answer"};
	char retry[96];
	uint32_t len = 0;
	const char *v = kvp_http_head_find(leg->head, "retry-after", &len, NULL);
	if (leg->status < 400 || leg->status > 599) {
		kvp_reply_error(r, &other, NULL);
		return;
	}
	snprintf(retry, sizeof(retry), "%.*s", (int)(len < 64 ? len : 64), v ? v : "");
	kvp_reply_error(r, &f, v && len ? retry : NULL);
}

static void gen_head(void *ctx, struct kvp_leg *leg)
{
	struct kvp_req *r = ctx;
	struct sgl *s = r->flow_state;
	uint32_t len = 0;
	if (leg->status / 100 != 2) {
		rejected(r, leg);
		return;
	}
	if (which_of(r, leg) == PREFILL)
		return;
	s->has_head = 1;
	s->unread = kvp_http_head_find(leg->head, "content-encoding", &len, NULL) != NULL;
	if (s->open) {
		hold(r, 0);
		kvp_reply_head(r, leg->head);
	} else if (kvp_reply_keep_head(&s->head, leg->head)) {
		kvp_reply_error(r, &kvp_fail_resources, NULL);
	}
}

static void decode_gated(struct kvp_req *r, const char *data, uint64_t len)
{
	struct sgl *s = r->flow_state;
	struct kvp_sgl_check *c = &s->check[DECODE];
	if (len > r->w->cfg->eff.sidecar_max_answer_bytes - s->kept.len)
		kvp_reply_error(r, &invalid, NULL);
	else if (hold(r, KVP_HELD_COPIES * len))
		kvp_reply_error(r, &kvp_fail_held, NULL);
	else if (kvp_http_buf_put(&s->kept, data, len))
		kvp_reply_error(r, &kvp_fail_resources, NULL);
	else if (c->form == KVP_SGL_EVENTS && !s->unread && kvp_sgl_feed(c, data, len))
		kvp_reply_error(r, &invalid, NULL);
}

static void gen_body(void *ctx, struct kvp_leg *leg, const char *data, uint64_t len)
{
	struct kvp_req *r = ctx;
	struct sgl *s = r->flow_state;
	if (which_of(r, leg) == PREFILL) {
		if (hold(r, len))
			kvp_reply_error(r, &kvp_fail_held, NULL);
		else if (kvp_sgl_feed(&s->check[PREFILL], data, len))
			kvp_reply_error(r, &invalid, NULL);
	} else if (!s->open) {
		decode_gated(r, data, len);
	} else {
		kvp_relay_put(r, leg, data, len);
	}
}

static void decode_done(struct kvp_req *r, enum kvp_leg_end end)
{
	struct sgl *s = r->flow_state;
	struct kvp_sgl_check *c = &s->check[DECODE];
	if (s->open && r->replied) {
		s->complete[DECODE] = end == KVP_LEG_COMPLETE;
		if (end == KVP_LEG_COMPLETE)
			kvp_reply_end(r, KVP_RESULT_OK);
		else
			kvp_reply_cut(r, KVP_RESULT_DECODE_CUT);
		return;
	}
	if (end != KVP_LEG_COMPLETE) {
		leg_failed(r, end);
		return;
	}
	int rc = KVP_OK;
	if (!s->unread && c->form == KVP_SGL_JSON)
		rc = kvp_sgl_whole(s->kept.p ? s->kept.p : "", s->kept.len);
	else if (!s->unread)
		rc = kvp_sgl_end(c);
	s->complete[DECODE] = 1;
	kvp_sgl_close(c);
	if (rc)
		kvp_reply_error(r, &invalid, NULL);
}

static void gen_done(void *ctx, struct kvp_leg *leg, enum kvp_leg_end end)
{
	struct kvp_req *r = ctx;
	struct sgl *s = r->flow_state;
	int which = which_of(r, leg);
	kvp_count_leg(&r->w->count, which == PREFILL ? KVP_COUNT_PREFILL : KVP_COUNT_DECODE,
		kvp_loop_now_ns(r->w->loop) - leg->start_ns);
	if (which == DECODE) {
		decode_done(r, end);
	} else if (end != KVP_LEG_COMPLETE) {
		leg_failed(r, end);
	} else if (kvp_sgl_end(&s->check[PREFILL])) {
		kvp_reply_error(r, &invalid, NULL);
	} else {
		s->complete[PREFILL] = 1;
		kvp_sgl_close(&s->check[PREFILL]);
		gate_open(r);
	}
}

/* A request has left. */
static void gen_room(void *ctx, struct kvp_leg *leg)
{
	(void)leg;
	hold(ctx, 0);
}

static const struct kvp_leg_ops gen_ops = {gen_head, gen_body, gen_done, gen_room};

static int make_body(struct kvp_req *r, struct kvp_http_buf *body)
{
	struct sgl *s = r->flow_state;
	uint8_t rnd[24];
	uint64_t room;
	char host[KVP_TARGET_HOST_MAX + 3], port[8], number[24], rid[36], rank[16];
	if (getrandom(rnd, sizeof(rnd), 0) != (ssize_t)sizeof(rnd))
		return KVP_ERR_SYS;
	for (int i = 0; i < 16; i++)
		snprintf(s->rid + 2 * i, 3, "%02x", rnd[i]);
	memcpy(&room, rnd + 16, sizeof(room));
	snprintf(host, sizeof(host), "\"%s\"",
		r->target.host); /* a name's or address's bytes need no escape */
	snprintf(port, sizeof(port), "%u", (unsigned)s->port);
	snprintf(number, sizeof(number), "%llu", (unsigned long long)(room & INT64_MAX));
	snprintf(rid, sizeof(rid), "\"%s\"", s->rid);
	uint32_t len = 0;
	const char *v = kvp_headers_rank(r, &len);
	snprintf(rank, sizeof(rank), "%.*s", v ? (int)len : 0, v ? v : "");
	const struct kvp_edit edit[] = {{.key = "bootstrap_host", .val = host, .val_len = strlen(host)},
		{.key = "bootstrap_port", .val = port, .val_len = strlen(port)},
		{.key = "bootstrap_room", .val = number, .val_len = strlen(number)},
		{.key = "rid", .val = rid, .val_len = strlen(rid)}, {.key = kvp_req_dropped(r)},
		{.key = "disagg_prefill_dp_rank", .val = rank, .val_len = strlen(rank)}};
	return kvp_span_edit(r->body.p, kvp_span_all(r->body.len), edit, v ? 6 : 5, body);
}

/* The body is taken over. */
static int start_one(struct kvp_req *r, int which, struct kvp_http_buf *body)
{
	struct sgl *s = r->flow_state;
	struct kvp_worker *w = r->w;
	struct kvp_leg_cfg cfg;
	kvp_engine_cfg(w, engine_of(which), &r->target, &cfg);
	int rc = kvp_headers_whole(r, which == PREFILL ? KVP_LEG_PREFILL : KVP_LEG_DECODE, body);
	if (rc)
		return rc;
	kvp_sgl_open(&s->check[which], r->is_stream ? KVP_SGL_EVENTS : KVP_SGL_JSON);
	cfg.body_max_bytes = which == PREFILL ? w->cfg->eff.sidecar_max_answer_bytes : 0;
	cfg.repeat = KVP_LEG_ONCE; /* a room and an id are used once */
	cfg.request = body;
	kvp_leg_start(leg_of(r, which), &w->pool, &cfg, &gen_ops, r);
	return KVP_OK;
}

static void generate(struct kvp_req *r)
{
	struct sgl *s = r->flow_state;
	struct kvp_http_buf body = {0}, copy = {0};
	int rc = make_body(r, &body);
	kvp_http_buf_free(&r->body);
	rc = rc ? rc : kvp_http_buf_room(&copy, body.cap); /* its head, too */
	rc = rc ? rc : kvp_http_buf_put(&copy, body.p, body.len);
	s->started = rc == KVP_OK;
	rc = rc ? rc : start_one(r, PREFILL, &copy);
	rc = rc ? rc : start_one(r, DECODE, &body);
	kvp_http_buf_free(&copy);
	kvp_http_buf_free(&body);
	if (rc)
		kvp_reply_error(r, &kvp_fail_resources, NULL);
	else if (hold(r, 0)) /* on kept connections both have one copy more */
		kvp_reply_error(r, &kvp_fail_held, NULL);
}

/* ---- server info ---- */

static void info_head(void *ctx, struct kvp_leg *leg)
{
	struct kvp_fail f = {502, KVP_RESULT_SGL_UPSTREAM, "an engine does not say what it is"};
	if (leg->status / 100 != 2)
		kvp_reply_error(ctx, &f, NULL);
}

static void info_body(void *ctx, struct kvp_leg *leg, const char *data, uint64_t len)
{
	struct kvp_req *r = ctx;
	struct sgl *s = r->flow_state;
	if (kvp_http_buf_put(&s->info[which_of(r, leg)], data, len))
		kvp_reply_error(r, &kvp_fail_resources, NULL);
}

static void info_done(void *ctx, struct kvp_leg *leg, enum kvp_leg_end end)
{
	static const char *const mode[] = {"prefill", "decode"};
	struct kvp_req *r = ctx;
	struct sgl *s = r->flow_state;
	const struct kvp_worker *w = r->w;
	int which = which_of(r, leg);
	struct kvp_http_buf *b = &s->info[which];
	if (end != KVP_LEG_COMPLETE) {
		leg_failed(r, end);
		return;
	}
	if (kvp_sgl_info(b->p ? b->p : "", b->len, w->cfg->sidecar_sglang_version, mode[which], &s->port)) {
		kvp_reply_error(r, &invalid, NULL);
		return;
	}
	kvp_http_buf_free(b);
	/* The other profile may be told the port instead. */
	if (w->cfg->sidecar_profile && w->cfg->sglang_bootstrap_port != KVP_CONFIG_UNSET)
		s->port = (uint16_t)w->cfg->sglang_bootstrap_port;
	s->informed[which] = 1;
	if (s->informed[PREFILL] && s->informed[DECODE])
		generate(r);
}

static const struct kvp_leg_ops info_ops = {.on_head = info_head, .on_body = info_body, .on_done = info_done};

static int ask_info(struct kvp_req *r, int which)
{
	struct kvp_worker *w = r->w;
	struct kvp_leg_cfg cfg;
	struct kvp_http_buf b = {0};
	kvp_engine_cfg(w, engine_of(which), &r->target, &cfg);
	if (kvp_headers_side(r, engine_of(which), "/server_info", NULL, &b)) {
		kvp_http_buf_free(&b);
		return KVP_ERR_SYS;
	}
	cfg.body_max_bytes = INFO_MAX_BYTES;
	cfg.request = &b;
	kvp_leg_start(leg_of(r, which), &w->pool, &cfg, &info_ops, r);
	return KVP_OK;
}

static void start(struct kvp_req *r)
{
	struct kvp_fail f = {400, KVP_RESULT_INVALID, "the request body is not a JSON object"};
	if (!kvp_req_is_object(r) || r->adapter->check(r, &f)) {
		kvp_reply_error(r, &f, NULL);
		return;
	}
	struct sgl *s = calloc(1, sizeof(*s));
	r->flow_state = s;
	if (!s || ask_info(r, PREFILL) || ask_info(r, DECODE))
		kvp_reply_error(r, &kvp_fail_resources, NULL);
}

static void finish(struct kvp_req *r)
{
	struct sgl *s = r->flow_state;
	if (!s)
		return;
	/* Connections first: that is what stops an engine that reads. */
	for (int i = PREFILL; i <= DECODE; i++) {
		if (kvp_leg_runs(leg_of(r, i)))
			kvp_count_add(&r->w->count.cancelled[i], 1);
		kvp_leg_close(leg_of(r, i));
	}
	for (int i = PREFILL; i <= DECODE; i++) {
		if (s->started && !s->complete[i])
			abort_leg(r, i);
		kvp_sgl_close(&s->check[i]);
		kvp_http_buf_free(&s->info[i]);
	}
	kvp_http_buf_free(&s->head.text);
	kvp_http_buf_free(&s->kept);
	free(s);
	r->flow_state = NULL;
}

const struct kvp_flow kvp_flow_sgl = {.start = start, .drained = kvp_relay_drained, .finish = finish};

/* ---- the adapter ---- */

static int check(struct kvp_req *r, struct kvp_fail *f)
{
	struct kvp_member m[] = {{.key = "n"}, {.key = "stream"}};
	kvp_span_members(r->body.p, kvp_span_all(r->body.len), m, 2);
	int stream = kvp_pd_stream(r->body.p, &m[1]);
	if (!kvp_pd_one(r->body.p, &m[0])) {
		*f = (struct kvp_fail){400, KVP_RESULT_SAMPLING, "n must be 1"};
		return KVP_ERR_INVAL;
	}
	if (stream < 0) {
		*f = (struct kvp_fail){400, KVP_RESULT_INVALID, "stream must be a boolean"};
		return KVP_ERR_INVAL;
	}
	r->is_stream = stream == 1;
	r->drops_n = m[0].cnt > 1;
	return KVP_OK;
}

const struct kvp_adapter kvp_adapter_sglang = {.name = "sglang",
	.flow = &kvp_flow_sgl,
	.too_large = KVP_RESULT_INVALID,
	.check = check};
