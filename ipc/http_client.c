#include "ipc/http_client.h"

#include <errno.h>
#include <kvpick/err.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct kvp_http_call {
	struct kvp_http_client *cl;
	struct kvp_http_call *next, **prev;
	struct kvp_http_call_cfg cfg; /* strings are not kept */
	struct kvp_leg leg;
	uint8_t done;
};

struct kvp_http_client {
	struct kvp_leg_pool pool;
	struct kvp_http_call *call;
	char why[200];
};

static void call_free(struct kvp_http_call *k)
{
	*k->prev = k->next;
	if (k->next)
		k->next->prev = k->prev;
	free(k);
}

static void on_head(void *ctx, struct kvp_leg *leg)
{
	struct kvp_http_call *k = ctx;
	if (k->cfg.on_head)
		k->cfg.on_head(k->cfg.ctx, k, leg->status);
}

static void on_body(void *ctx, struct kvp_leg *leg, const char *data, uint64_t len)
{
	struct kvp_http_call *k = ctx;
	(void)leg;
	if (k->cfg.on_body)
		k->cfg.on_body(k->cfg.ctx, k, data, len);
}

static int err_of(const struct kvp_leg *leg, enum kvp_leg_end end)
{
	switch (end) {
	case KVP_LEG_COMPLETE:
		return KVP_OK;
	case KVP_LEG_CONNECT_TIMEOUT:
	case KVP_LEG_READ_TIMEOUT:
	case KVP_LEG_DEADLINE:
		return KVP_ERR_TIMEOUT;
	case KVP_LEG_BROKEN:
	case KVP_LEG_CUT:
		return leg->err;
	case KVP_LEG_TOO_LARGE:
		return KVP_ERR_LIMIT;
	case KVP_LEG_REFUSED:
	case KVP_LEG_FAILED:
		break;
	}
	return KVP_ERR_SYS;
}

static void on_done(void *ctx, struct kvp_leg *leg, enum kvp_leg_end end)
{
	struct kvp_http_call *k = ctx;
	k->done = 1;
	errno = leg->sys;
	k->cfg.on_done(k->cfg.ctx, k, leg->status, err_of(leg, end));
	call_free(k);
}

static const struct kvp_leg_ops leg_ops = {.on_head = on_head, .on_body = on_body, .on_done = on_done};

static void on_tls_failed(void *ctx, const char *why)
{
	struct kvp_http_client *cl = ctx;
	snprintf(cl->why, sizeof(cl->why), "%s", why);
}

static int text_ok(const char *t, int least)
{
	for (; t && *t; t++)
		if ((unsigned char)*t < least || (unsigned char)*t == 127)
			return 0;
	return 1;
}

/* Whole lines, each ending in CRLF, none empty. */
static int lines_ok(const char *t)
{
	while (t && *t) {
		const char *end = strstr(t, "\r\n");
		if (!end || end == t || *t == ' ' || *t == '\t')
			return 0;
		for (; t < end; t++)
			if (((unsigned char)*t < 32 && *t != '\t') || (unsigned char)*t == 127)
				return 0;
		t = end + 2;
	}
	return 1;
}

static int request_build(const struct kvp_http_call_cfg *cfg, const struct kvp_addr *a, const char *method,
	struct kvp_http_buf *b)
{
	char num[64];
	int rc = kvp_http_buf_text(b, method);
	rc |= kvp_http_buf_text(b, " ");
	rc |= kvp_http_buf_text(b, cfg->path);
	rc |= kvp_http_buf_text(b, " HTTP/1.1\r\nHost: ");
	if (cfg->authority) {
		rc |= kvp_http_buf_text(b, cfg->authority);
	} else if (a->ss.ss_family == AF_UNIX) {
		rc |= kvp_http_buf_text(b, "localhost");
	} else {
		int bare6 = a->ss.ss_family == AF_INET6 && cfg->host[0] != '[';
		snprintf(num, sizeof(num), "%s:%u", bare6 ? "]" : "", (unsigned)cfg->port);
		rc |= kvp_http_buf_text(b, bare6 ? "[" : "");
		rc |= kvp_http_buf_text(b, cfg->host);
		rc |= kvp_http_buf_text(b, num);
	}
	rc |= kvp_http_buf_text(b, "\r\n");
	rc |= kvp_http_buf_text(b, cfg->headers ? cfg->headers : "");
	if (cfg->len || !strcmp(method, "POST") || !strcmp(method, "PUT") || !strcmp(method, "PATCH")) {
		snprintf(num, sizeof(num), "Content-Length: %llu\r\n", (unsigned long long)cfg->len);
		rc |= kvp_http_buf_text(b, num);
	}
	rc |= kvp_http_buf_text(b, "\r\n");
	rc |= kvp_http_buf_put(b, cfg->body, cfg->len);
	return rc ? KVP_ERR_SYS : KVP_OK;
}

static int address(const struct kvp_http_call_cfg *cfg, struct kvp_addr *a)
{
	if (!cfg->host || !*cfg->host)
		return KVP_ERR_INVAL;
	if (strncmp(cfg->host, "unix:", 5) == 0)
		return kvp_addr_unix(a, cfg->host + 5);
	return kvp_addr_ip(a, cfg->host, cfg->port);
}

int kvp_http_call(struct kvp_http_client *cl, const struct kvp_http_call_cfg *cfg, struct kvp_http_call **out)
{
	const char *method = cfg->method ? cfg->method : "GET";
	struct kvp_http_buf req = {0};
	struct kvp_leg_cfg leg = {.tls = cfg->tls,
		.request = &req,
		.is_head = strcmp(method, "HEAD") == 0,
		.body_max_bytes = cfg->body_max_bytes};
	if (address(cfg, &leg.to.addr[0]) || !cfg->on_done || !cfg->path || !*cfg->path || !*method ||
		!text_ok(method, 33) || !text_ok(cfg->path, 33) || !text_ok(cfg->authority, 33) ||
		!lines_ok(cfg->headers))
		return KVP_ERR_INVAL;
	leg.to.cnt = 1;
	if (cl->pool.stat.open - cl->pool.stat.idle >= cl->pool.open_max)
		return KVP_ERR_FULL;
	struct kvp_http_call *k = calloc(1, sizeof(*k));
	if (!k || request_build(cfg, &leg.to.addr[0], method, &req)) {
		kvp_http_buf_free(&req);
		free(k);
		return KVP_ERR_SYS;
	}
	k->cl = cl;
	k->cfg = *cfg;
	k->next = cl->call;
	k->prev = &cl->call;
	if (k->next)
		k->next->prev = &k->next;
	cl->call = k;
	if (cfg->timeout_ns)
		leg.deadline_ns = kvp_loop_now_ns(cl->pool.loop) + cfg->timeout_ns;
	kvp_leg_start(&k->leg, &cl->pool, &leg, &leg_ops, k);
	if (out)
		*out = k;
	return KVP_OK;
}

void kvp_http_call_cancel(struct kvp_http_call *k)
{
	if (k->done)
		return; /* from inside on_done: the call ends anyway */
	kvp_leg_close(&k->leg);
	call_free(k);
}

const char *kvp_http_call_header(const struct kvp_http_call *k, const char *name, uint32_t *len)
{
	return k->leg.head ? kvp_http_head_find(k->leg.head, name, len, NULL) : NULL;
}

void kvp_http_call_pause(struct kvp_http_call *k)
{
	kvp_leg_pause(&k->leg);
}

void kvp_http_call_resume(struct kvp_http_call *k)
{
	kvp_leg_resume(&k->leg);
}

#define OR(v, d) ((v) ? (v) : (d))
int kvp_http_client_open(
	struct kvp_loop *l, const struct kvp_http_client_cfg *cfg, struct kvp_http_client **out)
{
	static const struct kvp_http_client_cfg none;
	struct kvp_http_client *cl = calloc(1, sizeof(*cl));
	if (!cl)
		return KVP_ERR_SYS;
	if (!cfg)
		cfg = &none;
	kvp_http_parse_init();
	cl->pool = (struct kvp_leg_pool){.loop = l,
		.open_max = OR(cfg->conn_max, 1024),
		.idle_max = OR(cfg->idle_max, 64),
		.idle_ms = OR(cfg->idle_ms, 30000),
		.head_max_bytes = OR(cfg->head_max_bytes, 65536),
		.on_tls_failed = on_tls_failed,
		.ctx = cl};
	*out = cl;
	return KVP_OK;
}

void kvp_http_client_close(struct kvp_http_client *cl)
{
	if (!cl)
		return;
	while (cl->call)
		kvp_http_call_cancel(cl->call);
	kvp_leg_pool_end(&cl->pool);
	free(cl);
}

const char *kvp_http_client_why(const struct kvp_http_client *c)
{
	return c->why;
}

const struct kvp_leg_stat *kvp_http_client_stat(const struct kvp_http_client *c)
{
	return &c->pool.stat;
}
