/* daemons/common/dump_serve.c — rounds and pieces of the dumps under way. */
#include "daemons/common/dump_serve.h"

#include <kvpick/clock.h>
#include <kvpick/err.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ipc/http_query.h"

#define PIECES_PER_TURN 4u /* of 48 KiB of text */

struct kvp_dump_send {
	int tag; /* first: struct kvp_dumps */
	struct kvp_dump_send *next;
	struct kvp_dumps *all;
	struct kvp_http_req *req;
	struct kvp_dump *dump;
	enum kvp_part_role role;
	uint64_t max_bytes, bytes; /* asked for, 0 = any; made so far */
	int is_measured;	   /* 1: this round only counts the bytes */
	int is_begun, is_full;	   /* reply begun; the client has to read first */
};

static const char *const role_name[KVP_PART_ROLE_CNT] = {
	[KVP_PART_AGGREGATED] = "aggregated", [KVP_PART_PREFILL] = "prefill", [KVP_PART_DECODE] = "decode"};

static void role_field(enum kvp_part_role role, char out[64])
{
	snprintf(out, 64, "x-kvpick-dump-role: %s\r\n", role_name[role]);
}

/* ended takes a dump out of the list; its request is the caller's again. */
static void ended(struct kvp_dump_send *x)
{
	struct kvp_dump_send **at = &x->all->first;
	while (*at != x)
		at = &(*at)->next;
	*at = x->next;
	x->req->user = NULL;
	kvp_dump_close(x->dump);
	free(x);
}

static void refuse(struct kvp_dump_send *x, int status, const char *text)
{
	struct kvp_http_req *r = x->req;
	struct kvp_dumps *d = x->all;
	int is_begun = x->is_begun;
	kvp_ctr_add(d->ctr, KVP_CTR_DUMP_CUT, 1);
	ended(x);
	if (is_begun)
		kvp_http_reply_abort(r); /* the client sees that the text is not whole */
	else
		d->refuse(d->ctx, r, status, text);
}

static void on_drain(void *ctx, struct kvp_http_req *r);

static void begin(struct kvp_dump_send *x)
{
	char field[64];
	role_field(x->role, field);
	if (!x->is_begun)
		kvp_http_reply_begin(x->req, 200, "application/json", field, on_drain);
	x->is_begun = 1;
}

static struct kvp_dump *open_dump(const struct kvp_dumps *d, enum kvp_part_role role)
{
	return kvp_dump_open(d->region, d->owner, d->ctr, role);
}

/* The text is complete: after a round that counted the one that sends. 1 = nothing left to do. */
static int round_end(struct kvp_dump_send *x)
{
	if (x->is_measured) {
		x->is_measured = 0;
		x->bytes = 0;
		kvp_dump_close(x->dump);
		x->dump = open_dump(x->all, x->role);
		if (x->dump)
			return 0;
		refuse(x, 503, "out of memory");
		return 1;
	}
	struct kvp_http_req *r = x->req;
	begin(x);
	kvp_ctr_add(x->all->ctr, KVP_CTR_DUMP_DONE, 1);
	kvp_ctr_add(x->all->ctr, KVP_CTR_DUMP_BYTES, x->bytes);
	ended(x);
	kvp_http_reply_end(r);
	return 1;
}

/* One piece. 1 = the dump has ended, -1 = it has to wait. */
static int piece(struct kvp_dump_send *x)
{
	const char *data;
	size_t len;
	int rc = kvp_dump_next(x->dump, kvp_clock_mono_ns(), &data, &len);
	if (rc == KVP_ERR_AGAIN)
		return -1;
	if (rc == KVP_ERR_NOTFOUND)
		return round_end(x);
	if (rc) {
		refuse(x, x->all->failed_status, x->all->failed_text);
		return 1;
	}
	x->bytes += len;
	if (x->max_bytes && x->bytes > x->max_bytes) {
		refuse(x, 413, "peer KV-index snapshot exceeds requested max_bytes");
		return 1;
	}
	if (x->is_measured)
		return 0;
	begin(x);
	x->is_full = kvp_http_reply_chunk(x->req, data, len) == KVP_ERR_AGAIN;
	return x->is_full ? -1 : 0;
}

/* 1 if something was done. */
static int pump(struct kvp_dump_send *x)
{
	uint32_t n = 0;
	int rc = 0;
	while (!x->is_full && !rc && n < PIECES_PER_TURN) {
		rc = piece(x);
		n += rc >= 0;
		if (rc > 0)
			break; /* x is gone */
	}
	return n != 0;
}

static void on_drain(void *ctx, struct kvp_http_req *r)
{
	(void)ctx; /* the server's, which is not ours */
	struct kvp_dump_send *x = r->user;
	x->is_full = 0;
	pump(x);
}

int kvp_dumps_poll(struct kvp_dumps *d)
{
	int any = 0;
	for (struct kvp_dump_send *x = d->first, *next; x; x = next) {
		next = x->next;
		any |= pump(x);
	}
	return any;
}

void kvp_dumps_drop(struct kvp_dumps *d, struct kvp_http_req *r)
{
	struct kvp_dump_send *x = r->user;
	kvp_ctr_add(d->ctr, KVP_CTR_DUMP_CUT, 1);
	ended(x);
}

void kvp_dumps_close(struct kvp_dumps *d)
{
	while (d->first)
		ended(d->first);
}

static int read_max_bytes(struct kvp_http_req *r, uint64_t *max_bytes)
{
	char text[32];
	size_t len;
	unsigned __int128 v = 0;
	int has = kvp_query_get(r, "max_bytes", text, sizeof(text) - 1, &len);
	text[has > 0 ? len : 0] = 0;
	int good = has == 0 || (has > 0 && len > 0 && len <= 20 && strspn(text, "0123456789") == len);
	for (size_t i = 0; good && has && i < len; i++)
		v = v * 10 + (unsigned)(text[i] - '0');
	if (!good || v > UINT64_MAX)
		return KVP_ERR_INVAL;
	*max_bytes = (uint64_t)v;
	return KVP_OK;
}

int kvp_dumps_query(
	struct kvp_dumps *d, struct kvp_http_req *r, enum kvp_part_role *role, uint64_t *max_bytes)
{
	char text[32];
	size_t len;
	int has = kvp_query_get(r, "role", text, sizeof(text) - 1, &len);
	text[has > 0 ? len : 0] = 0;
	int found = KVP_PART_AGGREGATED;
	while (has && found < KVP_PART_ROLE_CNT && strcmp(text, role_name[found]) != 0)
		found++;
	if (has < 0 || found == KVP_PART_ROLE_CNT) {
		d->refuse(d->ctx, r, 400, "role must be aggregated, prefill or decode");
		return -1;
	}
	if (read_max_bytes(r, max_bytes)) {
		d->refuse(d->ctx, r, 400, "max_bytes must be an integer in 0..18446744073709551615");
		return -1;
	}
	*role = (enum kvp_part_role)found;
	return 0;
}

void kvp_dumps_begin(struct kvp_dumps *d, struct kvp_http_req *r, enum kvp_part_role role, uint64_t max_bytes)
{
	uint32_t cnt = 0;
	char field[64];
	if (!kvp_radix_ready(&d->region->radix) || kvp_recov_is_active(&d->region->recov)) {
		d->refuse(d->ctx, r, 503, "peer KV index not yet recovered");
		return;
	}
	if (r->is_head) {
		role_field(role, field);
		kvp_http_reply_extra(r, 200, "application/json", field, "", 0);
		return;
	}
	for (const struct kvp_dump_send *o = d->first; o; o = o->next)
		cnt++;
	struct kvp_dump_send *x = cnt < KVP_DUMPS_MAX ? calloc(1, sizeof(*x)) : NULL;
	if (x)
		x->dump = open_dump(d, role);
	if (!x || !x->dump) {
		free(x);
		kvp_ctr_add(d->ctr, KVP_CTR_DUMP_REFUSED, 1);
		d->refuse(d->ctx, r, 503, "too many dumps are under way; try again");
		return;
	}
	x->tag = d->tag;
	x->all = d;
	x->req = r;
	x->role = role;
	x->max_bytes = max_bytes;
	x->is_measured = max_bytes != 0;
	x->next = d->first;
	d->first = x;
	r->user = x;
	pump(x);
}
