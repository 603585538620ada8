/* GET /dump: the index as a stream. A dump goes on when its client has read or the indexer has answered; a
 * few pieces at a time, so that other requests wait for fractions of a millisecond. */
#include "daemons/httpd/httpd.h"

#include <stdlib.h>
#include <string.h>

#include "daemons/common/dump.h"

#define DUMPS_MAX 16	   /* of a process; a dump holds half a megabyte at most */
#define PIECES_PER_TURN 4u /* of 48 KiB of text */
#define ROLE_FIELD "x-kvpick-dump-role: aggregated\r\n"

struct kvp_httpd_dump {
	enum kvp_httpd_job job;
	struct kvp_httpd_dump *next;
	struct kvp_http_req *req;
	struct kvp_dump *dump;
	uint64_t max_bytes, bytes; /* asked for, 0 = any; made so far */
	int is_measured;	   /* 1: this round only counts the bytes */
	int is_begun, is_full;	   /* reply begun; the client has to read first */
};

/* ended takes a dump out of the list; its request is the caller's again. */
static void ended(struct kvp_httpd *h, struct kvp_httpd_dump *x)
{
	struct kvp_httpd_dump **at = &h->dumps;
	while (*at != x)
		at = &(*at)->next;
	*at = x->next;
	x->req->user = NULL;
	kvp_dump_close(x->dump);
	free(x);
}

static void refuse(struct kvp_httpd *h, struct kvp_httpd_dump *x, int status, const char *text)
{
	struct kvp_call c = {.h = h, .req = x->req};
	int is_begun = x->is_begun;
	kvp_ctr_add(h->boot.ctr, KVP_CTR_DUMP_CUT, 1);
	ended(h, x);
	if (is_begun)
		kvp_http_reply_abort(c.req); /* the client sees that the text is not whole */
	else
		kvp_reply_error(&c, status, text);
}

static void on_drain(void *ctx, struct kvp_http_req *r);

static void begin(struct kvp_httpd_dump *x)
{
	if (!x->is_begun)
		kvp_http_reply_begin(x->req, 200, "application/json", ROLE_FIELD, on_drain);
	x->is_begun = 1;
}

/* The text is complete: after a round that counted the one that sends. 1 = nothing left to do. */
static int round_end(struct kvp_httpd *h, struct kvp_httpd_dump *x)
{
	if (x->is_measured) {
		x->is_measured = 0;
		x->bytes = 0;
		kvp_dump_close(x->dump);
		x->dump = kvp_dump_open(h->boot.region, h->boot.owner, h->boot.ctr, KVP_PART_AGGREGATED);
		if (x->dump)
			return 0;
		refuse(h, x, 503, "out of memory");
		return 1;
	}
	struct kvp_http_req *r = x->req;
	begin(x);
	kvp_ctr_add(h->boot.ctr, KVP_CTR_DUMP_DONE, 1);
	kvp_ctr_add(h->boot.ctr, KVP_CTR_DUMP_BYTES, x->bytes);
	ended(h, x);
	kvp_http_reply_end(r);
	return 1;
}

/* One piece. 1 = the dump has ended, -1 = it has to wait. */
static int piece(struct kvp_httpd *h, struct kvp_httpd_dump *x)
{
	const char *data;
	size_t len;
	int rc = kvp_dump_next(x->dump, kvp_clock_mono_ns(), &data, &len);
	if (rc == KVP_ERR_AGAIN)
		return -1;
	if (rc == KVP_ERR_NOTFOUND)
		return round_end(h, x);
	if (rc) {
		refuse(h, x, 503, "the index is not available now; try again");
		return 1;
	}
	x->bytes += len;
	if (x->max_bytes && x->bytes > x->max_bytes) {
		refuse(h, x, 413, "peer KV-index snapshot exceeds requested max_bytes");
		return 1;
	}
	if (x->is_measured)
		return 0;
	begin(x);
	x->is_full = kvp_http_reply_chunk(x->req, data, len) == KVP_ERR_AGAIN;
	return x->is_full ? -1 : 0;
}

/* 1 if something was done. */
static int pump(struct kvp_httpd *h, struct kvp_httpd_dump *x)
{
	uint32_t n = 0;
	int rc = 0;
	while (!x->is_full && !rc && n < PIECES_PER_TURN) {
		rc = piece(h, x);
		n += rc >= 0;
		if (rc > 0)
			break; /* x is gone */
	}
	return n != 0;
}

static void on_drain(void *ctx, struct kvp_http_req *r)
{
	struct kvp_httpd_dump *x = r->user;
	x->is_full = 0;
	pump(ctx, x);
}

int kvp_httpd_dump_poll(struct kvp_httpd *h)
{
	int any = 0;
	for (struct kvp_httpd_dump *x = h->dumps, *next; x; x = next) {
		next = x->next;
		any |= pump(h, x);
	}
	return any;
}

void kvp_httpd_dump_drop(struct kvp_httpd *h, struct kvp_httpd_dump *x)
{
	kvp_ctr_add(h->boot.ctr, KVP_CTR_DUMP_CUT, 1);
	ended(h, x);
}

/* 0 = the query is in order, else the error has been answered. */
static int take_query(struct kvp_call *c, uint64_t *max_bytes)
{
	char text[32];
	size_t len;
	int has = kvp_query_get(c->req, "role", text, sizeof(text) - 1, &len);
	text[has > 0 ? len : 0] = 0;
	if (has > 0 && (strcmp(text, "prefill") == 0 || strcmp(text, "decode") == 0)) {
		kvp_reply_error(c, 404, "dumps of this role are served by the dump port of the peer daemon");
		return -1;
	}
	if (has < 0 || (has && strcmp(text, "aggregated") != 0)) {
		kvp_reply_error(c, 400, "role must be aggregated, prefill or decode");
		return -1;
	}
	has = kvp_query_get(c->req, "max_bytes", text, sizeof(text) - 1, &len);
	text[has > 0 ? len : 0] = 0;
	unsigned __int128 v = 0;
	int good = has == 0 || (has > 0 && len > 0 && len <= 20 && strspn(text, "0123456789") == len);
	for (size_t i = 0; good && has && i < len; i++)
		v = v * 10 + (unsigned)(text[i] - '0');
	if (!good || v > UINT64_MAX) {
		kvp_reply_error(c, 400, "max_bytes must be an integer in 0..18446744073709551615");
		return -1;
	}
	*max_bytes = (uint64_t)v;
	return 0;
}

void kvp_route_dump(struct kvp_call *c)
{
	struct kvp_httpd *h = c->h;
	uint64_t max_bytes;
	uint32_t cnt = 0;
	if (take_query(c, &max_bytes))
		return;
	if (!kvp_radix_ready(&h->boot.region->radix)) {
		kvp_reply_error(c, 503, "peer KV index not yet recovered");
		return;
	}
	if (c->req->is_head) {
		kvp_http_reply_extra(c->req, 200, "application/json", ROLE_FIELD, "", 0);
		return;
	}
	for (const struct kvp_httpd_dump *o = h->dumps; o; o = o->next)
		cnt++;
	struct kvp_httpd_dump *x = cnt < DUMPS_MAX ? calloc(1, sizeof(*x)) : NULL;
	if (x)
		x->dump = kvp_dump_open(h->boot.region, h->boot.owner, h->boot.ctr, KVP_PART_AGGREGATED);
	if (!x || !x->dump) {
		free(x);
		kvp_ctr_add(h->boot.ctr, KVP_CTR_DUMP_REFUSED, 1);
		kvp_reply_error(c, 503, "too many dumps are under way; try again");
		return;
	}
	x->job = KVP_HTTPD_DUMP;
	x->req = c->req;
	x->max_bytes = max_bytes;
	x->is_measured = max_bytes != 0;
	x->next = h->dumps;
	h->dumps = x;
	c->req->user = x;
	pump(h, x);
}
