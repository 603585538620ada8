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
