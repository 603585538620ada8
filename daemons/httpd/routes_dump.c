/* GET /dump of the Selection API: the aggregated role only; the other roles have the dump port. */
#include "daemons/httpd/httpd.h"

static void refuse(void *ctx, struct kvp_http_req *r, int status, const char *text)
{
	struct kvp_call c = {.h = ctx, .req = r};
	kvp_reply_error(&c, status, text);
}

void kvp_httpd_dump_open(struct kvp_httpd *h)
{
	h->dumps = (struct kvp_dumps){.region = h->boot.region,
		.owner = h->boot.owner,
		.ctr = h->boot.ctr,
		.tag = KVP_HTTPD_DUMP,
		.refuse = refuse,
		.ctx = h,
		.failed_status = 503,
		.failed_text = "the index is not available now; try again"};
}

void kvp_route_dump(struct kvp_call *c)
{
	enum kvp_part_role role;
	uint64_t max_bytes;
	if (kvp_dumps_query(&c->h->dumps, c->req, &role, &max_bytes))
		return;
	if (role == KVP_PART_AGGREGATED)
		kvp_dumps_begin(&c->h->dumps, c->req, role, max_bytes);
	else
		kvp_reply_error(c, 404, "dumps of this role are served by the dump port of the peer daemon");
}
