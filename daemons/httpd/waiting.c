/* Selections that wait their turn: a request is kept until its ticket is answered or its client leaves. */
#include "daemons/httpd/httpd.h"

#include <stdlib.h>

static struct kvp_httpd_wait **bucket(struct kvp_httpd *h, uint64_t ticket)
{
	return &h->wait_of[(uint32_t)ticket % KVP_HTTPD_WAIT_BUCKETS];
}

void kvp_httpd_wait_add(struct kvp_call *c, enum kvp_select_kind kind, uint64_t ticket)
{
	struct kvp_httpd *h = c->h;
	struct kvp_httpd_wait *w = malloc(sizeof(*w)), **b = bucket(h, ticket);
	if (!w) {
		kvp_selection_cancel(h->selection, ticket);
		kvp_reply_error(c, 500, "out of memory");
		return;
	}
	*w = (struct kvp_httpd_wait){.job = KVP_HTTPD_WAIT,
		.kind = kind,
		.next = h->waits,
		.chain = *b,
		.req = c->req,
		.ticket = ticket};
	if (h->waits)
		h->waits->prev = w;
	h->waits = w;
	*b = w;
	c->req->user = w;
	kvp_http_req_forget_body(c->req); /* the queue has what it needs */
}

/* forget takes a wait out of the lists and frees it; its request is the caller's again. */
static void forget(struct kvp_httpd *h, struct kvp_httpd_wait *w)
{
	struct kvp_httpd_wait **at = bucket(h, w->ticket);
	while (*at != w)
		at = &(*at)->chain;
	*at = w->chain;
	if (w->next)
		w->next->prev = w->prev;
	if (w->prev)
		w->prev->next = w->next;
	else
		h->waits = w->next;
	w->req->user = NULL;
	free(w);
}

int kvp_httpd_wait_poll(struct kvp_httpd *h)
{
	struct kvp_select_answer a;
	uint64_t ticket;
	uint32_t cursor = 0;
	int any = 0;
	if (!h->waits)
		return 0;
	kvp_selection_tend(h->selection);
	while (h->waits && kvp_selection_next(h->selection, &cursor, &ticket)) {
		struct kvp_httpd_wait *w = *bucket(h, ticket);
		while (w && w->ticket != ticket)
			w = w->chain;
		if (!w)
			continue;
		int status = kvp_selection_collect(h->selection, ticket, &a);
		if (status == KVP_SELECT_WAITS)
			continue;
		struct kvp_call c = {.h = h, .req = w->req};
		enum kvp_select_kind kind = w->kind;
		forget(h, w);
		kvp_reply_selection(&c, status, a.model, a.group, &a, kind);
		any = 1;
	}
	return any;
}

void kvp_httpd_wait_drop(struct kvp_httpd *h, struct kvp_httpd_wait *w)
{
	uint64_t ticket = w->ticket;
	forget(h, w);
	kvp_selection_cancel(h->selection, ticket);
}

void kvp_httpd_wait_end(struct kvp_httpd *h)
{
	while (h->waits) {
		struct kvp_call c = {.h = h, .req = h->waits->req};
		kvp_httpd_wait_drop(h, h->waits);
		kvp_reply_error(&c, 503, "endpoint subscriber shutdown");
	}
}
