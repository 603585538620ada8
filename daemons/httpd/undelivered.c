/* Bookings whose answer nobody got. A client that went away before it knew worker and id cannot use the
 * booking nor give it back, and it would weigh on its worker until it expires. */
#include "daemons/httpd/httpd.h"

/* A tag is a reservation's handle plus one, for 0 is no tag. */
void kvp_httpd_tag_booking(struct kvp_call *c, uint64_t booking)
{
	kvp_http_reply_tag(c->req, booking + 1);
}

void kvp_httpd_undelivered(void *ctx, uint64_t tag)
{
	struct kvp_httpd *h = ctx;
	if (kvp_selection_undo(h->selection, tag - 1) == 200)
		kvp_ctr_add(h->boot.ctr, KVP_CTR_HTTP_UNDELIVERED, 1);
}
