/* daemons/peer/dump_port.c — one route. */
#include "daemons/peer/dump_port.h"

#include <kvpick/err.h>
#include <stdlib.h>
#include <string.h>

#include "daemons/common/config.h"
#include "daemons/common/dump_serve.h"
#include "daemons/common/log.h"
#include "daemons/peer/warm_fetch.h"

struct kvp_dump_port {
	struct kvp_http_server *http;
	const struct kvp_boot *boot;
	struct kvp_dumps dumps;
};

static void refuse(void *ctx, struct kvp_http_req *r, int status, const char *text)
{
	(void)ctx;
	kvp_http_reply(r, status, "text/plain; charset=utf-8", text, strlen(text));
}

static int path_is(const struct kvp_http_req *r, const char *path)
{
	return r->path_len == strlen(path) && memcmp(r->path, path, r->path_len) == 0;
}

static void loads(struct kvp_dump_port *p, struct kvp_http_req *r)
{
	struct kvp_jw w;
	kvp_jw_init(&w);
	kvp_loads_write(p->boot->region, &w);
	if (kvp_jw_done(&w))
		refuse(p, r, 503, "out of memory");
	else
		kvp_http_reply(r, 200, "application/json", w.buf, w.len);
	kvp_jw_free(&w);
}

static void on_request(void *ctx, struct kvp_http_req *r)
{
	struct kvp_dump_port *p = ctx;
	enum kvp_part_role role;
	uint64_t max_bytes = 0;
	int is_loads = p->boot->config->recover_loads && path_is(r, "/loads");
	if (!is_loads && !path_is(r, "/dump"))
		refuse(p, r, 404, "this port serves GET /dump only");
	else if (r->method != KVP_HTTP_GET)
		kvp_http_reply_extra(
			r, 405, "text/plain; charset=utf-8", "Allow: GET, HEAD\r\n", "GET only", 8);
	else if (is_loads)
		loads(p, r);
	else if (kvp_dumps_query(&p->dumps, r, &role, &max_bytes) == 0)
		kvp_dumps_begin(&p->dumps, r, role, max_bytes);
}

static void on_abort(void *ctx, struct kvp_http_req *r)
{
	struct kvp_dump_port *p = ctx;
	if (r->user)
		kvp_dumps_drop(&p->dumps, r);
}

int kvp_dump_port_open(struct kvp_boot *boot, struct kvp_loop *loop, struct kvp_dump_port **out)
{
	const struct kvp_config *cfg = boot->config;
	*out = NULL;
	if (!cfg->eff.dump_port)
		return KVP_OK;
	struct kvp_dump_port *p = calloc(1, sizeof(*p));
	if (!p)
		return KVP_ERR_SYS;
	p->boot = boot;
	p->dumps = (struct kvp_dumps){.region = boot->region,
		.owner = boot->owner,
		.ctr = boot->ctr,
		.refuse = refuse,
		.ctx = p,
		.failed_status = 500,
		.failed_text = "peer KV-index snapshot generation failed"};
	struct kvp_http_server_cfg sc = {.ip = cfg->bind,
		.port = cfg->eff.dump_port,
		.max_connections = KVP_DUMP_PORT_CONNECTIONS,
		.body_max_bytes = 1,
		.read_timeout_ms = KVP_DUMP_PORT_STALL_MS,
		.on_request = on_request,
		.on_abort = on_abort,
		.ctx = p};
	if (cfg->pod_ip[0])
		sc.ip = strchr(cfg->pod_ip, ':') ? "::" : "0.0.0.0";
	int rc = kvp_http_server_open(loop, &sc, &p->http);
	if (rc) {
		free(p);
		return rc;
	}
	KVP_LOG_I("dump_port.run", "ip=%s port=%u", sc.ip, kvp_http_server_port(p->http));
	*out = p;
	return KVP_OK;
}

void kvp_dump_port_close(struct kvp_dump_port *p)
{
	if (!p)
		return;
	kvp_http_server_close(p->http);
	kvp_dumps_close(&p->dumps);
	free(p);
}

int kvp_dump_port_poll(struct kvp_dump_port *p)
{
	return p ? kvp_dumps_poll(&p->dumps) : 0;
}
