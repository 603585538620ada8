/* Requests that wait for another process: kept without a thread, run again when that one is done. */
#include "daemons/httpd/httpd.h"

#include <stdlib.h>

static void on_retry(void *ctx, struct kvp_timer *t)
{
	(void)t;
	kvp_httpd_retry(ctx);
}

void kvp_httpd_park(struct kvp_call *c)
{
	struct kvp_httpd *h = c->h;
	struct kvp_httpd_parked *p = malloc(sizeof(*p));
	if (!p) {
		kvp_reply_error(c, 503, "out of memory");
		return;
	}
	*p = (struct kvp_httpd_parked){
		.req = c->req, .since_ns = c->since_ns ? c->since_ns : kvp_clock_mono_ns()};
	struct kvp_httpd_parked **end = &h->parked;
	while (*end)
		end = &(*end)->next;
	*end = p;
	kvp_timer_set(
		h->loop, &h->retry, kvp_loop_now_ns(h->loop) + KVP_SLEEP_MAX_MS * 1000000ull, on_retry, h);
}

int kvp_httpd_unpark(struct kvp_httpd *h, const struct kvp_http_req *r)
{
	for (struct kvp_httpd_parked **at = &h->parked; *at; at = &(*at)->next)
		if ((*at)->req == r) {
			struct kvp_httpd_parked *p = *at;
			*at = p->next;
			free(p);
			return 1;
		}
	return 0;
}

int kvp_httpd_retry(struct kvp_httpd *h)
{
	uint32_t cnt = 0, left = 0;
	for (const struct kvp_httpd_parked *p = h->parked; p; p = p->next)
		cnt++;
	/* Those that have to wait on go to the end of the list. */
	for (uint32_t i = 0; i < cnt && h->parked; i++) {
		struct kvp_http_req *r = h->parked->req;
		uint64_t since_ns = h->parked->since_ns;
		kvp_httpd_unpark(h, r);
		kvp_httpd_run(h, r, since_ns);
	}
	for (const struct kvp_httpd_parked *p = h->parked; p; p = p->next)
		left++;
	return left < cnt;
}
