/* Bookings whose answer nobody got. A client that went away before it knew worker and id cannot use the
 * booking nor give it back, and it would weigh on its worker until it expires. */
#include "daemons/httpd/httpd.h"
#include "shm/resv.h"
#include <kvpick/err.h>

#define FREE_TRIES 16 /* another process is just busy with the booking */

/* A tag is a reservation's handle plus one, for 0 is no tag. */
void kvp_httpd_tag_booking(struct kvp_call *c, struct kvp_str id)
{
	uint64_t h;
	if (kvp_resv_find(&c->h->boot.region->book, id.ptr, id.len, &h) == KVP_OK)
		kvp_http_reply_tag(c->req, h + 1);
}

void kvp_httpd_undelivered(void *ctx, uint64_t tag)
{
	struct kvp_httpd *h = ctx;
	int rc = KVP_ERR_AGAIN;
	for (int i = 0; i < FREE_TRIES && rc == KVP_ERR_AGAIN; i++)
		rc = kvp_resv_free(&h->boot.region->book, tag - 1);
	if (rc == KVP_OK)
		kvp_ctr_add(h->boot.ctr, KVP_CTR_HTTP_UNDELIVERED, 1);
}
