#include "daemons/httpd/httpd.h"
#include "daemons/common/metrics_text.h"

void kvp_route_health(struct kvp_call *c)
{
	kvp_reply_ok(c);
}

void kvp_route_metrics(struct kvp_call *c)
{
	struct kvp_text out = {NULL, 0, 0, KVP_OK};
	kvp_metrics_write(&out, c->h->boot.region, c->h->boot.config);
	if (out.err)
		kvp_reply_error(c, 500, "out of memory");
	else
		kvp_http_reply(c->req, 200, "text/plain; version=0.0.4; charset=utf-8", out.buf, out.len);
	kvp_text_free(&out);
}

/* Without a sync port there is no peer plane: membership can be read but not changed. */
void kvp_route_peer_change(struct kvp_call *c)
{
	struct kvp_json_val v;
	const char *endpoint;
	size_t len;
	if (kvp_json_get(c->h->parse.root, "endpoint", &v) || kvp_json_str(v, &endpoint, &len))
		kvp_reply_error(c, 422, "endpoint is required and must be a string");
	else
		kvp_reply_error(c, 409, "replica sync is disabled");
}

void kvp_route_peer_list(struct kvp_call *c)
{
	kvp_http_reply(c->req, 200, "application/json", "[]", 2);
}
