#include "daemons/extproc/tokenizer.h"

#include <errno.h>
#include <kvpick/clock.h>
#include <kvpick/err.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemons/common/token.h"
#include "daemons/extproc/tokenizer_priv.h"
#include "ipc/http_client.h"
#include "ipc/json_out.h"
#include "ipc/resolve.h"

#define SPARE_MAX 16		   /* answer buffers kept for the next calls */
#define SPARE_BYTES_MAX (4u << 20) /* a larger one is not kept */
#define REFRESH_MS 30000	   /* how often the name is looked up */
#define BEAT_NS 1000000000ull	   /* token file, probe */
#define REPROBE_BEATS 60
#define BREAK_FIRST_NS 250000000ull
#define BREAK_LAST_NS 8000000000ull
#define BAD_ADDRESS_NS 5000000000ull
#define CONN_MAX 65536 /* calls are limited by who makes them */

struct buf {
	char *p;
	size_t len, cap;
};

struct kvp_tkz_call {
	struct kvp_tkz *t;
	struct kvp_tkz_call *next, **prev;
	struct kvp_http_call *http;
	struct kvp_defer defer; /* of an end that is known at once */
	enum kvp_tkz_end end;
	const char *detail;
	void (*on_done)(void *ctx, const struct kvp_tkz_answer *a);
	void *ctx;
	uint64_t start_ns;
	const char *path;
	const void *body; /* the caller's */
	uint64_t len;
	char address[KVP_RESOLVE_TEXT]; /* that it is sent to */
	uint32_t tried;			/* addresses that could not be connected to */
	struct buf in;
	int status;
	uint8_t done;
};

enum probe { PROBE_UNKNOWN, PROBE_YES, PROBE_NO };

struct kvp_tkz {
	struct kvp_loop *loop;
	struct kvp_tkz_cfg cfg;
	struct kvp_http_url url;
	struct kvp_resolve *name;
	struct kvp_http_client *http;
	struct kvp_tls_client *tls; /* NULL: plain text */
	struct kvp_token token;
	struct kvp_timer beat;
	struct kvp_tkz_call *call;
	struct kvp_tkz_stat stat;
	struct buf spare[SPARE_MAX];
	uint32_t spare_cnt;
	struct kvp_json *json;
	struct kvp_json_ids ids;
	struct kvp_tkz_mm mm;
	char chat_path[KVP_TKZ_PATH_MAX], completion_path[KVP_TKZ_PATH_MAX];
	const char *member;
	char headers[KVP_TOKEN_MAX + 128];
	/* breaker */
	uint32_t failed_in_row;
	uint64_t open_until_ns, open_ns; /* open_ns: length of the last time; 0 = closed */
	struct kvp_tkz_call *trial;
	/* probe of sglang-tokenize */
	enum probe chat;
	struct kvp_http_call *probe;
	struct buf probe_in;
	uint32_t probe_age, probe_v1;
};

/* -- what an answer says -- */

static const struct {
	int status;
	const char *text;
	enum kvp_ctr ctr;
} end_of[KVP_TKZ_END_CNT] = {
	[KVP_TKZ_OK] = {200, "", KVP_CTR_TOK_OK},
	[KVP_TKZ_UNSERVED] = {200, "", KVP_CTR_TOK_UNSERVED},
	[KVP_TKZ_UNAVAILABLE] = {503, "tokenization service unavailable", KVP_CTR_TOK_UNAVAILABLE},
	[KVP_TKZ_BREAKER] = {503, "tokenization service unavailable", KVP_CTR_TOK_BREAKER},
	[KVP_TKZ_TIMEOUT] = {504, "tokenization service timed out", KVP_CTR_TOK_TIMEOUT},
	[KVP_TKZ_REJECTED] = {400, "request rejected by tokenization service", KVP_CTR_TOK_REJECTED},
	[KVP_TKZ_STATUS] = {502, "tokenization service error", KVP_CTR_TOK_STATUS},
	[KVP_TKZ_INVALID] = {502, "tokenization service error", KVP_CTR_TOK_INVALID},
	[KVP_TKZ_TOO_LARGE] = {502, "tokenization service error", KVP_CTR_TOK_TOO_LARGE},
};

static void count(struct kvp_tkz *t, enum kvp_ctr id)
{
	if (t->cfg.ctr)
		kvp_ctr_add(t->cfg.ctr, id, 1);
}

static int is_good(int status)
{
	return status >= 200 && status < 300;
}

static enum kvp_tkz_end by_status(int status)
{
	if (status == 400 || status == 422)
		return KVP_TKZ_REJECTED;
	return status == 429 || status == 503 ? KVP_TKZ_UNAVAILABLE : KVP_TKZ_STATUS;
}

/* A status that says no counts even if the rest of its answer did not come, or was too long. */
static enum kvp_tkz_end classify(int status, int err, const char **detail)
{
	*detail = "";
	if (status && !is_good(status))
		return by_status(status);
	switch (err) {
	case KVP_OK:
		return KVP_TKZ_OK;
	case KVP_ERR_TIMEOUT:
		*detail = "deadline";
		return KVP_TKZ_TIMEOUT;
	case KVP_ERR_LIMIT:
		*detail = "answer too large";
		return KVP_TKZ_TOO_LARGE;
	case KVP_ERR_PROTO:
		*detail = "not an HTTP answer";
		return KVP_TKZ_INVALID;
	case KVP_ERR_CLOSED:
		*detail = "connection closed before the end of the answer";
		return KVP_TKZ_UNAVAILABLE;
	default:
		*detail = "no connection";
		return KVP_TKZ_UNAVAILABLE;
	}
}

static enum kvp_tkz_end read_ids(struct kvp_tkz *t, struct buf *in, struct kvp_tkz_answer *a)
{
	struct kvp_json_err err = {KVP_OK, NULL};
	if (!in->len) {
		a->detail = "empty answer";
		return KVP_TKZ_INVALID;
	}
	memset(in->p + in->len, 0, KVP_JSON_SLACK_BYTES);
	kvp_json_trim(t->json, SPARE_BYTES_MAX);
	int rc = kvp_json_ids_read(t->json, in->p, in->len, t->member, &t->ids, &err);
	if (rc) {
		a->detail = err.code		     ? err.text
			    : rc == KVP_ERR_NOTFOUND ? "no token ids in the answer"
			    : rc == KVP_ERR_LIMIT    ? "token id out of range"
						     : "token ids are not an array of integers";
		return KVP_TKZ_INVALID;
	}
	if (!t->ids.cnt || t->ids.cnt > UINT32_MAX) {
		a->detail = "no token in the answer";
		return KVP_TKZ_INVALID;
	}
	a->tokens.token = t->ids.id;
	a->tokens.token_cnt = (uint32_t)t->ids.cnt;
	if (t->cfg.protocol == KVP_TOK_VLLM_RENDER)
		kvp_tkz_mm_read(&t->mm, t->ids.obj, &a->tokens);
	return KVP_TKZ_OK;
}

/* -- breaker: calls that failed for want of a working service, one after another -- */

static uint64_t now_ns(const struct kvp_tkz *t)
{
	return kvp_loop_now_ns(t->loop);
}

static void breaker_open(struct kvp_tkz *t, uint64_t open_ns)
{
	t->open_ns = open_ns < BREAK_LAST_NS ? open_ns : BREAK_LAST_NS;
	t->open_until_ns = now_ns(t) + t->open_ns;
	t->stat.opened++;
	t->stat.is_open = 1;
	count(t, KVP_CTR_TOK_OPENED);
}

static int breaker_lets(struct kvp_tkz *t, struct kvp_tkz_call *c)
{
	if (!t->open_ns)
		return 1;
	if (t->trial || now_ns(t) < t->open_until_ns)
		return 0;
	t->trial = c;
	return 1;
}

static void breaker_learn(struct kvp_tkz *t, struct kvp_tkz_call *c, int failed)
{
	int was_trial = t->trial == c;
	if (was_trial)
		t->trial = NULL;
	if (!failed) {
		t->failed_in_row = 0;
		t->open_ns = 0;
		t->stat.is_open = 0;
	} else if (was_trial) {
		breaker_open(t, 2 * t->open_ns);
	} else if (!t->open_ns && ++t->failed_in_row >= KVP_TKZ_BREAK_AT) {
		breaker_open(t, BREAK_FIRST_NS);
	}
}

/* -- buffers -- */

static void buf_take(struct kvp_tkz *t, struct buf *b)
{
	*b = t->spare_cnt ? t->spare[--t->spare_cnt] : (struct buf){NULL, 0, 0};
	b->len = 0;
}

static void buf_give(struct kvp_tkz *t, struct buf *b)
{
	if (b->p && b->cap <= SPARE_BYTES_MAX && t->spare_cnt < SPARE_MAX)
		t->spare[t->spare_cnt++] = *b;
	else
		free(b->p);
	*b = (struct buf){NULL, 0, 0};
}

static int buf_room(struct buf *b, size_t len)
{
	size_t want = len + KVP_JSON_SLACK_BYTES;
	if (want <= b->cap)
		return KVP_OK;
	size_t cap = want < 2 * b->cap ? 2 * b->cap : want;
	char *p = realloc(b->p, cap);
	if (!p)
		return KVP_ERR_SYS;
	b->p = p;
	b->cap = cap;
	return KVP_OK;
}

/* -- a call -- */

static void call_free(struct kvp_tkz_call *c)
{
	*c->prev = c->next;
	if (c->next)
		c->next->prev = c->prev;
	c->t->stat.inflight--;
	kvp_loop_defer_cancel(&c->defer);
	buf_give(c->t, &c->in);
	free(c);
}

/* The start of an error's body, fit for one log line. */
static const char *error_text(struct buf *in)
{
	if (!in->len || buf_room(in, in->len + 1))
		return "";
	for (size_t i = 0; i < in->len; i++)
		if ((unsigned char)in->p[i] < 32 || (unsigned char)in->p[i] == 127)
			in->p[i] = ' ';
	in->p[in->len] = 0;
	return in->p;
}

static void finish(struct kvp_tkz_call *c, int err)
{
	struct kvp_tkz *t = c->t;
	struct kvp_tkz_answer a = {.upstream_status = c->status};
	a.end = classify(c->status, err, &a.detail);
	breaker_learn(t, c,
		(a.end == KVP_TKZ_UNAVAILABLE && (!c->status || is_good(c->status))) ||
			a.end == KVP_TKZ_TIMEOUT);
	if (a.end == KVP_TKZ_OK) {
		uint64_t from = kvp_clock_ns(CLOCK_THREAD_CPUTIME_ID);
		a.end = read_ids(t, &c->in, &a);
		a.parse_ns = kvp_clock_ns(CLOCK_THREAD_CPUTIME_ID) - from;
	} else if (c->status && !is_good(c->status)) {
		a.detail = error_text(&c->in);
	} else if (err == KVP_ERR_SYS && t->tls && kvp_http_client_why(t->http)[0]) {
		a.detail = kvp_http_client_why(t->http);
	}
	a.status = end_of[a.end].status;
	a.text = end_of[a.end].text;
	a.took_ns = kvp_clock_mono_ns() - c->start_ns;
	t->stat.end[a.end]++;
	count(t, end_of[a.end].ctr);
	if (t->cfg.ctr)
		kvp_hist_add(t->cfg.ctr, KVP_HIST_TOK_NS, a.took_ns);
	c->done = 1;
	c->on_done(c->ctx, &a);
	call_free(c);
}

static void on_head(void *ctx, struct kvp_http_call *h, int status)
{
	struct kvp_tkz_call *c = ctx;
	uint32_t n = 0;
	const char *v = kvp_http_call_header(h, "content-length", &n);
	uint64_t want = 0;
	c->status = status;
	if (!is_good(status) || !v || n > 10)
		return;
	while (n--)
		want = want * 10 + (uint64_t)(*v++ - '0');
	if (want <= c->t->cfg.response_max_bytes && want <= SPARE_BYTES_MAX)
		buf_room(&c->in, want); /* without memory on_body says so */
}

static void on_body(void *ctx, struct kvp_http_call *h, const char *data, uint64_t len)
{
	struct kvp_tkz_call *c = ctx;
	int good = is_good(c->status), err = KVP_OK;
	if (!good && len > KVP_TKZ_ERROR_MAX - c->in.len)
		len = KVP_TKZ_ERROR_MAX - c->in.len;
	if (buf_room(&c->in, c->in.len + len)) {
		err = KVP_ERR_SYS;
	} else {
		memcpy(c->in.p + c->in.len, data, len);
		c->in.len += len;
	}
	if (err || (!good && c->in.len == KVP_TKZ_ERROR_MAX)) {
		kvp_http_call_cancel(h); /* enough is known */
		c->http = NULL;
		finish(c, err);
	}
}

static int call_send(struct kvp_tkz_call *c);

static void on_done(void *ctx, struct kvp_http_call *h, int status, int err)
{
	struct kvp_tkz_call *c = ctx;
	struct kvp_tkz *t = c->t;
	(void)h;
	c->http = NULL;
	if (status)
		c->status = status;
	if (err == KVP_ERR_SYS && !c->status) {
		/* Nothing was sent: another address of the name may do. */
		kvp_resolve_bad(t->name, c->address, now_ns(t) + BAD_ADDRESS_NS);
		if (++c->tried < kvp_resolve_cnt(t->name) && call_send(c) == KVP_OK)
			return;
	}
	finish(c, err);
}

static void on_defer(void *ctx)
{
	struct kvp_tkz_call *c = ctx;
	struct kvp_tkz *t = c->t;
	struct kvp_tkz_answer a = {.end = c->end,
		.status = end_of[c->end].status,
		.text = end_of[c->end].text,
		.detail = c->detail};
	if (t->trial == c)
		breaker_learn(t, c, c->end != KVP_TKZ_UNSERVED);
	t->stat.end[c->end]++;
	count(t, end_of[c->end].ctr);
	c->done = 1;
	c->on_done(c->ctx, &a);
	call_free(c);
}

/* An end that is known before anything was sent: said from the loop, like every other. */
static void end_later(struct kvp_tkz_call *c, enum kvp_tkz_end end, const char *detail)
{
	c->end = end;
	c->detail = detail;
	kvp_loop_defer(c->t->loop, &c->defer, on_defer, c);
}

static void set_headers(struct kvp_tkz *t)
{
	snprintf(t->headers, sizeof(t->headers), "Content-Type: application/json\r\n%s%.*s%s",
		t->token.len ? "Authorization: Bearer " : "", (int)t->token.len, t->token.text,
		t->token.len ? "\r\n" : "");
}

static int post(struct kvp_tkz *t, const char *path, const void *body, uint64_t len, uint64_t timeout_ns,
	struct kvp_http_call_cfg *k, struct kvp_http_call **out)
{
	k->host = kvp_resolve_next(t->name, now_ns(t));
	if (!k->host)
		return KVP_ERR_NOTFOUND;
	k->port = t->url.port;
	k->tls = t->tls;
	k->authority = t->url.authority;
	k->method = "POST";
	k->path = path;
	k->headers = t->headers;
	k->body = body;
	k->len = len;
	k->timeout_ns = timeout_ns;
	k->body_max_bytes = t->cfg.response_max_bytes;
	return kvp_http_call(t->http, k, out);
}

/* One deadline for all addresses that are tried. */
static int call_send(struct kvp_tkz_call *c)
{
	struct kvp_http_call_cfg k = {.on_head = on_head, .on_body = on_body, .on_done = on_done, .ctx = c};
	struct kvp_tkz *t = c->t;
	uint64_t spent_ns = c->tried ? kvp_clock_mono_ns() - c->start_ns : 0;
	if (spent_ns >= t->cfg.timeout_ns)
		return KVP_ERR_TIMEOUT;
	int rc = post(t, c->path, c->body, c->len, t->cfg.timeout_ns - spent_ns, &k, &c->http);
	if (k.host)
		snprintf(c->address, sizeof(c->address), "%s", k.host);
	return rc;
}

int kvp_tkz_start(struct kvp_tkz *t, enum kvp_tkz_what what, const void *body, uint64_t len,
	void (*cb)(void *ctx, const struct kvp_tkz_answer *a), void *ctx, struct kvp_tkz_call **out)
{
	const char *path = what == KVP_TKZ_CHAT ? t->chat_path : t->completion_path;
	struct kvp_tkz_call *c = calloc(1, sizeof(*c));
	if (!c)
		return KVP_ERR_SYS;
	c->t = t;
	c->on_done = cb;
	c->ctx = ctx;
	c->start_ns = kvp_clock_mono_ns();
	c->path = path;
	c->body = body;
	c->len = len;
	c->next = t->call;
	c->prev = &t->call;
	if (c->next)
		c->next->prev = &c->next;
	t->call = c;
	t->stat.inflight++;
	*out = c;
	int gated = t->cfg.protocol == KVP_TOK_SGLANG_TOKENIZE && what == KVP_TKZ_CHAT;
	if (!*path || (gated && t->chat == PROBE_NO)) {
		end_later(c, KVP_TKZ_UNSERVED, "no endpoint for such requests");
	} else if (!breaker_lets(t, c)) {
		end_later(c, KVP_TKZ_BREAKER, "not tried: the last calls failed");
	} else if (gated && t->chat == PROBE_UNKNOWN) {
		end_later(c, KVP_TKZ_UNAVAILABLE, "not known yet whether it takes chat requests");
	} else {
		buf_take(t, &c->in);
		int rc = call_send(c);
		if (rc == KVP_ERR_NOTFOUND)
			end_later(c, KVP_TKZ_UNAVAILABLE, "its name has no address");
		else if (rc)
			end_later(c, KVP_TKZ_UNAVAILABLE,
				rc == KVP_ERR_FULL ? "too many calls at once" : "no connection");
	}
	return KVP_OK;
}

void kvp_tkz_cancel(struct kvp_tkz_call *c)
{
	if (c->done)
		return;
	if (c->http)
		kvp_http_call_cancel(c->http);
	if (c->t->trial == c)
		c->t->trial = NULL; /* the next call tries instead */
	count(c->t, KVP_CTR_TOK_CANCELLED);
	call_free(c);
}

/* -- sglang-tokenize: does this version take chat requests? -- */

static void probe_body(void *ctx, struct kvp_http_call *h, const char *data, uint64_t len)
{
	struct kvp_tkz *t = ctx;
	(void)h;
	if (!buf_room(&t->probe_in, t->probe_in.len + len)) {
		memcpy(t->probe_in.p + t->probe_in.len, data, len);
		t->probe_in.len += len;
	}
}

static void probe_done(void *ctx, struct kvp_http_call *h, int status, int err)
{
	struct kvp_tkz *t = ctx;
	struct kvp_tkz_answer a = {.end = KVP_TKZ_OK};
	(void)h;
	t->probe = NULL;
	t->probe_age = 0;
	if (status == 404 || status == 405) {
		t->probe_v1 = !t->probe_v1; /* the other spelling of the path, at the next beat */
		t->chat = PROBE_UNKNOWN;
	} else if (status == 400 || status == 422) {
		t->chat = PROBE_NO;
	} else if (is_good(status) && err == KVP_OK) {
		t->chat = read_ids(t, &t->probe_in, &a) == KVP_TKZ_OK ? PROBE_YES : PROBE_NO;
	}
	kvp_tkz_path(&t->url, t->probe_v1 ? "/v1/tokenize" : "/tokenize", t->chat_path);
	memcpy(t->completion_path, t->chat_path, sizeof(t->completion_path));
	buf_give(t, &t->probe_in);
}

static void probe_start(struct kvp_tkz *t)
{
	struct kvp_http_call_cfg k = {.on_body = probe_body, .on_done = probe_done, .ctx = t};
	struct kvp_jw w;
	kvp_jw_init(&w);
	kvp_jw_obj(&w);
	kvp_jw_kstr(&w, "model", t->cfg.model ? t->cfg.model : "");
	kvp_jw_key(&w, "messages");
	kvp_jw_arr(&w);
	kvp_jw_obj(&w);
	kvp_jw_kstr(&w, "role", "user");
	kvp_jw_kstr(&w, "content", "a");
	kvp_jw_end(&w);
	kvp_jw_end(&w);
	kvp_jw_end(&w);
	buf_take(t, &t->probe_in);
	if (kvp_jw_done(&w) || post(t, t->chat_path, w.buf, w.len, t->cfg.timeout_ns, &k, &t->probe))
		buf_give(t, &t->probe_in);
	kvp_jw_free(&w);
}

static void on_beat(void *ctx, struct kvp_timer *timer)
{
	struct kvp_tkz *t = ctx;
	if (kvp_token_refresh(&t->token) == KVP_OK) /* else the last good one stays */
		set_headers(t);
	if (t->cfg.protocol == KVP_TOK_SGLANG_TOKENIZE && !t->probe &&
		(t->chat == PROBE_UNKNOWN || ++t->probe_age >= REPROBE_BEATS))
		probe_start(t);
	kvp_timer_set(t->loop, timer, now_ns(t) + BEAT_NS, on_beat, t);
}

/* -- open and close -- */

__attribute__((format(printf, 4, 5))) static int refuse(
	struct kvp_tkz *t, char *err, size_t cap, const char *fmt, ...)
{
	va_list ap;
	va_start(ap, fmt);
	vsnprintf(err, cap, fmt, ap);
	va_end(ap);
	kvp_tkz_close(t);
	return KVP_ERR_INVAL;
}

static int protocol_set(struct kvp_tkz *t)
{
	switch (t->cfg.protocol) {
	case KVP_TOK_VLLM_RENDER:
		t->member = "token_ids";
		return kvp_tkz_path(&t->url, "/v1/chat/completions/render", t->chat_path) |
		       kvp_tkz_path(&t->url, "/v1/completions/render", t->completion_path);
	case KVP_TOK_SGLANG_RENDERER:
		t->member = "input_ids";
		return kvp_tkz_path(&t->url, "/v1/chat/completions/render", t->chat_path);
	case KVP_TOK_SGLANG_TOKENIZE:
		t->member = "tokens";
		return kvp_tkz_path(&t->url, "/tokenize", t->chat_path) |
		       kvp_tkz_path(&t->url, "/tokenize", t->completion_path);
	default:
		return KVP_ERR_INVAL;
	}
}

int kvp_tkz_open(
	struct kvp_loop *l, const struct kvp_tkz_cfg *cfg, struct kvp_tkz **out, char *err, size_t cap)
{
	struct kvp_http_client_cfg http = {
		.conn_max = cfg->conn_max ? cfg->conn_max : CONN_MAX, .idle_max = 512};
	struct kvp_tkz *t = calloc(1, sizeof(*t));
	if (!t)
		return KVP_ERR_SYS;
	t->loop = l;
	t->cfg = *cfg;
	const char *why = kvp_http_url_parse_any(&t->url, cfg->url ? cfg->url : "");
	if (why)
		return refuse(t, err, cap, "address of the tokenizer service %s", why);
	if (protocol_set(t))
		return refuse(t, err, cap, "no such tokenizer protocol, or its address is too long");
	char tls_err[200];
	int rc = t->url.is_https ? kvp_tls_client_open(&t->tls, cfg->ca_file ? cfg->ca_file : "", t->url.host,
					   tls_err, sizeof(tls_err))
				 : KVP_OK;
	if (rc)
		return refuse(t, err, cap, "certificates for the tokenizer service: %s", tls_err);
	t->token.path = cfg->token_file ? cfg->token_file : "";
	if (kvp_token_refresh(&t->token))
		return refuse(t, err, cap, "%s cannot be read, is empty or too long", t->token.path);
	for (size_t i = 0; i < t->token.len; i++)
		if ((unsigned char)t->token.text[i] <= 32 || (unsigned char)t->token.text[i] >= 127)
			return refuse(t, err, cap, "%s holds characters that no token has", t->token.path);
	set_headers(t);
	t->json = kvp_json_new();
	if (!t->json || kvp_http_client_open(l, &http, &t->http) ||
		kvp_resolve_open(l, t->url.host, REFRESH_MS, &t->name) ||
		kvp_timer_set(l, &t->beat, now_ns(t), on_beat, t)) {
		snprintf(err, cap, "out of memory or descriptors");
		kvp_tkz_close(t);
		return KVP_ERR_SYS;
	}
	*out = t;
	return KVP_OK;
}

void kvp_tkz_close(struct kvp_tkz *t)
{
	if (!t)
		return;
	while (t->call)
		kvp_tkz_cancel(t->call);
	kvp_timer_cancel(t->loop, &t->beat);
	kvp_http_client_close(t->http); /* the probe, too */
	kvp_tls_client_close(t->tls);
	kvp_resolve_close(t->name);
	kvp_json_free(t->json);
	kvp_json_ids_free(&t->ids);
	kvp_tkz_mm_free(&t->mm);
	free(t->probe_in.p);
	while (t->spare_cnt)
		free(t->spare[--t->spare_cnt].p);
	free(t);
}

void kvp_tkz_stat(const struct kvp_tkz *t, struct kvp_tkz_stat *out)
{
	const struct kvp_leg_stat *h = kvp_http_client_stat(t->http);
	*out = t->stat;
	out->connects = h->connects;
	out->reused = h->reused;
	out->retried = h->retried;
}
