/* Requests that wait for another booking of their session: kept without a thread, run again when that one is
 * done. Until then only the table of sessions is looked at: a request is long, and its client's choice. */
#include "daemons/httpd/httpd.h"

#include <stdlib.h>

#define RUN_MAX 8 /* requests a turn: others are served in between */

static void on_retry(void *ctx, struct kvp_timer *t);

static void set_timer(struct kvp_httpd *h)
{
	kvp_timer_set(
		h->loop, &h->retry, kvp_loop_now_ns(h->loop) + KVP_SLEEP_MAX_MS * 1000000ull, on_retry, h);
}

static void on_retry(void *ctx, struct kvp_timer *t)
{
	struct kvp_httpd *h = ctx;
	(void)t;
	h->looks = 1;
	kvp_httpd_retry(h);
	if (h->parked)
		set_timer(h);
}

void kvp_httpd_park(struct kvp_call *c)
{
	struct kvp_httpd *h = c->h;
	struct kvp_httpd_parked *p = malloc(sizeof(*p));
	if (!p) {
		kvp_reply_error(c, 503, "out of memory");
		return;
	}
	*p = (struct kvp_httpd_parked){.req = c->req,
		.key = kvp_select_waits_for(h->selection),
		.since_ns = c->since_ns ? c->since_ns : kvp_clock_mono_ns()};
	if (!h->parked)
		h->parked_end = &h->parked;
	*h->parked_end = p;
	h->parked_end = &p->next;
	set_timer(h);
}

/* take removes the entry that *at leads to. */
static struct kvp_httpd_parked take(struct kvp_httpd *h, struct kvp_httpd_parked **at)
{
	struct kvp_httpd_parked *p = *at, was = *p;
	*at = p->next;
	if (h->parked_end == &p->next)
		h->parked_end = at;
	free(p);
	return was;
}

int kvp_httpd_unpark(struct kvp_httpd *h, const struct kvp_http_req *r)
{
	for (struct kvp_httpd_parked **at = &h->parked; *at; at = &(*at)->next)
		if ((*at)->req == r) {
			take(h, at);
			return 1;
		}
	return 0;
}

int kvp_httpd_retry(struct kvp_httpd *h)
{
	uint32_t ran = 0, cnt = 0;
	if (!h->parked)
		return 0;
	int ended = kvp_select_note(h->selection);
	if (!ended && !h->looks && !h->draining)
		return 0;
	uint64_t now_ns = kvp_clock_mono_ns();
	for (const struct kvp_httpd_parked *p = h->parked; p; p = p->next)
		cnt++;
	/* Those that have to wait on go to the end of the list, behind the cnt that are looked at. */
	for (struct kvp_httpd_parked **at = &h->parked; cnt && *at && ran < RUN_MAX; cnt--) {
		if (!h->draining && now_ns - (*at)->since_ns <= KVP_AFFINITY_WAIT_NS &&
			kvp_select_is_met(h->selection, (*at)->key)) {
			at = &(*at)->next;
			continue;
		}
		struct kvp_httpd_parked p = take(h, at);
		kvp_httpd_run(h, p.req, p.since_ns);
		ran++;
	}
	h->looks = ran == RUN_MAX; /* at the others */
	return ran > 0;
}
