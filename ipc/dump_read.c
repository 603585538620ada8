/* ipc/dump_read.c — a state for each kind of object in a dump, driven by the JSON library's callbacks. */
#include "ipc/dump_read.h"

#include <kvpick/err.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <yajl/yajl_parse.h>

enum state { TOP, PARTS, PART, EVENTS, ROUTER, EVENT, DATA, STORED, BLOCKS, BLOCK, REMOVED, HASHES, DONE };
enum member {
	IGNORED,
	BLOCK_SIZE,
	EVENT_LIST,
	ERROR_TEXT,
	WORKER_ID,
	TIER,
	DOMAIN,
	STATE_SOURCE,
	INNER,
	EVENT_ID,
	DP_RANK,
	DATA_OF,
	STORED_OF,
	REMOVED_OF,
	CLEARED_OF,
	PARENT,
	START,
	BLOCK_LIST,
	BLOCK_HASH,
	TOKENS_HASH,
	MM_INFO,
	HASH_LIST
};
enum kind { IS_NULL, IS_BOOL, IS_NUMBER, IS_STRING, IS_MAP, IS_ARRAY };

static const struct {
	enum state in;
	const char *name;
	enum member member;
} known[] = {
	{PART, "block_size", BLOCK_SIZE},
	{PART, "events", EVENT_LIST},
	{PART, "error", ERROR_TEXT},
	{ROUTER, "worker_id", WORKER_ID},
	{ROUTER, "storage_tier", TIER},
	{ROUTER, "residency_domain", DOMAIN},
	{ROUTER, "state_source", STATE_SOURCE},
	{ROUTER, "event", INNER},
	{EVENT, "event_id", EVENT_ID},
	{EVENT, "dp_rank", DP_RANK},
	{EVENT, "data", DATA_OF},
	{DATA, "stored", STORED_OF},
	{DATA, "removed", REMOVED_OF},
	{DATA, "cleared", CLEARED_OF},
	{STORED, "parent_hash", PARENT},
	{STORED, "start_position", START},
	{STORED, "blocks", BLOCK_LIST},
	{BLOCK, "block_hash", BLOCK_HASH},
	{BLOCK, "tokens_hash", TOKENS_HASH},
	{BLOCK, "mm_extra_info", MM_INFO},
	{REMOVED, "block_hashes", HASH_LIST},
};

struct kvp_dread {
	struct kvp_dread_cfg cfg;
	yajl_handle json;
	enum state state;
	enum member member;
	uint32_t skip;		     /* depth inside an ignored value; 0 = none */
	uint64_t calls, quiet_bytes; /* callbacks so far; bytes since the last one */
	int rc;
	char err[256];
	/* partition */
	char key[KVP_DREAD_KEY_MAX + 1];
	uint32_t key_len, block_size; /* 0 = not yet */
	int has_events;
	/* event */
	struct kvp_dread_event ev;
	int has_worker, has_inner, has_id, has_data, is_foreign, has_block_list;
	uint64_t *ext, *local;
	uint32_t cap;
	/* block */
	uint64_t block_hash, tokens_hash;
	int has_block_hash, has_tokens_hash;
	/* events that wait for the block size */
	uint8_t *wait;
	uint64_t wait_len, wait_cap;
	struct kvp_dread_stat stat;
};

__attribute__((format(printf, 3, 4))) static int fail(struct kvp_dread *d, int rc, const char *fmt, ...)
{
	va_list ap;
	va_start(ap, fmt);
	if (!d->rc)
		vsnprintf(d->err, sizeof(d->err), fmt, ap);
	va_end(ap);
	if (!d->rc)
		d->rc = rc;
	return 0;
}

/* ---- events out ---- */

static int give(struct kvp_dread *d, const struct kvp_dread_event *e)
{
	int rc = d->cfg.on_event(d->cfg.ctx, e);
	return rc ? fail(d, rc, "refused by the receiver: %s", kvp_strerror(rc)) : 1;
}

static int wait_put(struct kvp_dread *d, const void *p, uint64_t len)
{
	if (d->wait_len + len > KVP_DREAD_WAIT_BYTES)
		return fail(d, KVP_ERR_LIMIT, "block_size comes behind too many events");
	if (d->wait_len + len > d->wait_cap) {
		uint64_t cap = 2 * (d->wait_len + len);
		uint8_t *grown = realloc(d->wait, cap);
		if (!grown)
			return fail(d, KVP_ERR_SYS, "out of memory");
		d->wait = grown;
		d->wait_cap = cap;
	}
	if (len)
		memcpy(d->wait + d->wait_len, p, len);
	d->wait_len += len;
	return 1;
}

static int wait_keep(struct kvp_dread *d, const struct kvp_dread_event *e)
{
	return wait_put(d, e, sizeof(*e)) && wait_put(d, e->ext, 8ull * e->n) &&
	       wait_put(d, e->local, e->op == KVP_DREAD_STORE ? 8ull * e->n : 0);
}

static int wait_give(struct kvp_dread *d)
{
	uint64_t at = 0;
	while (at < d->wait_len) {
		struct kvp_dread_event e;
		memcpy(&e, d->wait + at, sizeof(e));
		at += sizeof(e);
		e.ext = (const uint64_t *)(const void *)(d->wait + at);
		at += 8ull * e.n;
		e.local = (const uint64_t *)(const void *)(d->wait + at);
		at += e.op == KVP_DREAD_STORE ? 8ull * e.n : 0;
		if (!give(d, &e))
			return 0;
	}
	d->wait_len = 0;
	return 1;
}

static int take_block_size(struct kvp_dread *d, uint64_t v)
{
	if (!v || v > UINT32_MAX || d->block_size)
		return fail(d, KVP_ERR_PROTO, "%s: block_size is 0, too large or there twice", d->key);
	d->block_size = (uint32_t)v;
	d->stat.parts++;
	int rc = d->cfg.on_part(d->cfg.ctx, d->key, d->key_len, d->block_size);
	return rc ? fail(d, rc, "refused by the receiver: %s", kvp_strerror(rc)) : wait_give(d);
}

static int event_end(struct kvp_dread *d)
{
	struct kvp_dread_event *e = &d->ev;
	if (!d->has_worker || (!d->has_inner && !d->is_foreign))
		return fail(d, KVP_ERR_PROTO, "%s: an event without worker_id or event", d->key);
	d->state = EVENTS;
	if (d->is_foreign) {
		d->stat.ignored++;
		return 1;
	}
	d->stat.events++;
	d->stat.blocks += e->op == KVP_DREAD_STORE ? e->n : 0;
	if (!e->n && e->op != KVP_DREAD_CLEAR)
		return 1;
	e->ext = d->ext;
	e->local = d->local;
	return d->block_size ? give(d, e) : wait_keep(d, e);
}

/* ---- hashes of the event at hand ---- */

static int room(struct kvp_dread *d)
{
	if (d->ev.n < d->cap)
		return 1;
	if (d->ev.n >= KVP_DREAD_BLK_MAX)
		return fail(
			d, KVP_ERR_LIMIT, "%s: an event of more than %u blocks", d->key, KVP_DREAD_BLK_MAX);
	uint32_t cap = d->cap ? 2 * d->cap : 256;
	uint64_t *ext = realloc(d->ext, cap * sizeof(*ext));
	if (ext)
		d->ext = ext;
	uint64_t *local = realloc(d->local, cap * sizeof(*local));
	if (local)
		d->local = local;
	if (!ext || !local)
		return fail(d, KVP_ERR_SYS, "out of memory");
	d->cap = cap;
	return 1;
}

static int block_end(struct kvp_dread *d)
{
	if (!d->has_block_hash || !d->has_tokens_hash)
		return fail(d, KVP_ERR_PROTO, "%s: a block without block_hash or tokens_hash", d->key);
	if (!room(d))
		return 0;
	d->ext[d->ev.n] = d->block_hash;
	d->local[d->ev.n++] = d->tokens_hash;
	d->state = BLOCKS;
	return 1;
}

/* ---- values in ---- */

/* An integer of 0..max in its plain form. */
static int number(struct kvp_dread *d, enum kind k, const char *s, size_t len, uint64_t max, uint64_t *out)
{
	unsigned __int128 v = 0;
	int good = k == IS_NUMBER && len > 0 && len <= 20;
	for (size_t i = 0; good && i < len; i++) {
		good = s[i] >= '0' && s[i] <= '9';
		v = v * 10 + (unsigned)(s[i] - '0');
	}
	if (!good || v > max)
		return fail(d, KVP_ERR_PROTO, "%s: %.*s is no integer of 0..%llu", d->key,
			(int)(len < 32 && k == IS_NUMBER ? len : 0), s, (unsigned long long)max);
	*out = (uint64_t)v;
	return 1;
}

static int u32_number(struct kvp_dread *d, enum kind k, const char *s, size_t len, uint32_t *out)
{
	uint64_t v;
	if (!number(d, k, s, len, UINT32_MAX, &v))
		return 0;
	*out = (uint32_t)v;
	return 1;
}

static int text_is(const char *s, size_t len, const char *want)
{
	return strlen(want) == len && memcmp(s, want, len) == 0;
}

static int malformed(struct kvp_dread *d, const char *what)
{
	return fail(d, KVP_ERR_PROTO, "%s: malformed %s", d->key, what);
}

/* A value whose contents nobody wants. */
static int skip_value(struct kvp_dread *d, enum kind k)
{
	d->skip = k == IS_MAP || k == IS_ARRAY;
	return 1;
}

static int enter(struct kvp_dread *d, enum kind k, enum kind want, enum state to, const char *what)
{
	if (k != want)
		return malformed(d, what);
	d->state = to;
	return 1;
}

static int part_value(struct kvp_dread *d, enum kind k, const char *s, size_t len)
{
	uint64_t v;
	switch (d->member) {
	case BLOCK_SIZE:
		return number(d, k, s, len, UINT32_MAX, &v) && take_block_size(d, v);
	case EVENT_LIST:
		if (d->has_events)
			return malformed(d, "partition: events twice");
		d->has_events = 1;
		return enter(d, k, IS_ARRAY, EVENTS, "events");
	case ERROR_TEXT:
		return fail(d, KVP_ERR_PROTO, "%s: the peer's own dump failed: %.*s", d->key,
			(int)(k == IS_STRING ? (len < 100 ? len : 100) : 0), s);
	default:
		return skip_value(d, k);
	}
}

static int tier_value(struct kvp_dread *d, enum kind k, const char *s, size_t len)
{
	static const char *const name[KVP_DREAD_TIER_CNT] = {"device", "host_pinned", "disk", "external"};
	for (uint16_t i = 0; k == IS_STRING && i < KVP_DREAD_TIER_CNT; i++)
		if (text_is(s, len, name[i])) {
			d->ev.tier = i;
			return 1;
		}
	return malformed(d, "storage_tier");
}

static int router_value(struct kvp_dread *d, enum kind k, const char *s, size_t len)
{
	switch (d->member) {
	case WORKER_ID:
		d->has_worker = 1;
		return number(d, k, s, len, UINT64_MAX, &d->ev.worker_id);
	case TIER:
		return tier_value(d, k, s, len);
	case DOMAIN:
		if (k != IS_STRING)
			return malformed(d, "residency_domain");
		d->is_foreign |= !text_is(s, len, "worker");
		return 1;
	case STATE_SOURCE:
		d->is_foreign |= k != IS_NULL;
		return skip_value(d, k);
	case INNER:
		if (d->is_foreign)
			return skip_value(d, k);
		if (d->has_inner)
			return malformed(d, "event: there twice");
		return enter(d, k, IS_MAP, EVENT, "event");
	default:
		return skip_value(d, k);
	}
}

static int event_value(struct kvp_dread *d, enum kind k, const char *s, size_t len)
{
	switch (d->member) {
	case EVENT_ID:
		d->has_id = 1;
		return number(d, k, s, len, UINT64_MAX, &d->ev.event_id);
	case DP_RANK:
		return u32_number(d, k, s, len, &d->ev.dp_rank);
	case DATA_OF:
		if (d->has_data)
			return malformed(d, "data: there twice");
		if (k == IS_STRING && text_is(s, len, "cleared")) {
			d->has_data = 1;
			d->ev.op = KVP_DREAD_CLEAR;
			return 1;
		}
		return enter(d, k, IS_MAP, DATA, "data");
	default:
		return skip_value(d, k);
	}
}

static int data_value(struct kvp_dread *d, enum kind k)
{
	if (d->has_data)
		return malformed(d, "data: two kinds of event");
	d->has_data = 1;
	switch (d->member) {
	case STORED_OF:
		d->ev.op = KVP_DREAD_STORE;
		return enter(d, k, IS_MAP, STORED, "stored");
	case REMOVED_OF:
		d->ev.op = KVP_DREAD_REMOVE;
		return enter(d, k, IS_MAP, REMOVED, "removed");
	case CLEARED_OF:
		d->ev.op = KVP_DREAD_CLEAR;
		return k == IS_NULL ? 1 : malformed(d, "cleared");
	default:
		return malformed(d, "data: unknown kind of event");
	}
}

static int stored_value(struct kvp_dread *d, enum kind k, const char *s, size_t len)
{
	uint32_t ignored;
	switch (d->member) {
	case PARENT:
		d->ev.has_parent = k != IS_NULL;
		return k == IS_NULL || number(d, k, s, len, UINT64_MAX, &d->ev.parent);
	case START:
		return k == IS_NULL || u32_number(d, k, s, len, &ignored);
	case BLOCK_LIST:
		d->has_block_list = 1;
		d->ev.n = 0;
		return enter(d, k, IS_ARRAY, BLOCKS, "blocks");
	default:
		return skip_value(d, k);
	}
}

static int block_value(struct kvp_dread *d, enum kind k, const char *s, size_t len)
{
	switch (d->member) {
	case BLOCK_HASH:
		d->has_block_hash = 1;
		return number(d, k, s, len, UINT64_MAX, &d->block_hash);
	case TOKENS_HASH:
		d->has_tokens_hash = 1;
		return number(d, k, s, len, UINT64_MAX, &d->tokens_hash);
	case MM_INFO:
		return k == IS_NULL || k == IS_MAP ? skip_value(d, k) : malformed(d, "mm_extra_info");
	default:
		return skip_value(d, k);
	}
}

static int hash_value(struct kvp_dread *d, enum kind k, const char *s, size_t len)
{
	uint64_t v;
	if (!number(d, k, s, len, UINT64_MAX, &v) || !room(d))
		return 0;
	d->ext[d->ev.n++] = v;
	return 1;
}

static int removed_value(struct kvp_dread *d, enum kind k)
{
	if (d->member != HASH_LIST)
		return skip_value(d, k);
	d->has_block_list = 1;
	d->ev.n = 0;
	return enter(d, k, IS_ARRAY, HASHES, "block_hashes");
}

static void event_begin(struct kvp_dread *d)
{
	d->ev = (struct kvp_dread_event){.worker_id = 0};
	d->has_worker = d->has_inner = d->has_id = d->has_data = d->is_foreign = d->has_block_list = 0;
}

static int value(struct kvp_dread *d, enum kind k, const char *s, size_t len)
{
	d->calls++;
	if (d->skip) {
		d->skip += k == IS_MAP || k == IS_ARRAY;
		return d->skip <= KVP_DREAD_DEPTH_MAX || fail(d, KVP_ERR_LIMIT, "nested too deeply");
	}
	switch (d->state) {
	case TOP:
		return k == IS_MAP ? enter(d, k, IS_MAP, PARTS, "") : fail(d, KVP_ERR_PROTO, "not an object");
	case PARTS:
		return enter(d, k, IS_MAP, PART, "partition: not an object");
	case PART:
		return part_value(d, k, s, len);
	case EVENTS:
		event_begin(d);
		return enter(d, k, IS_MAP, ROUTER, "event of the list");
	case ROUTER:
		return router_value(d, k, s, len);
	case EVENT:
		return event_value(d, k, s, len);
	case DATA:
		return data_value(d, k);
	case STORED:
		return stored_value(d, k, s, len);
	case BLOCKS:
		d->has_block_hash = d->has_tokens_hash = 0;
		return enter(d, k, IS_MAP, BLOCK, "block");
	case BLOCK:
		return block_value(d, k, s, len);
	case REMOVED:
		return removed_value(d, k);
	case HASHES:
		return hash_value(d, k, s, len);
	case DONE:
		break;
	}
	return fail(d, KVP_ERR_PROTO, "text behind the end");
}

/* ---- the library's callbacks ---- */

static int on_null(void *ctx)
{
	return value(ctx, IS_NULL, "", 0);
}

static int on_bool(void *ctx, int v)
{
	(void)v;
	return value(ctx, IS_BOOL, "", 0);
}

static int on_number(void *ctx, const char *s, size_t len)
{
	return value(ctx, IS_NUMBER, s, len);
}

static int on_string(void *ctx, const unsigned char *s, size_t len)
{
	return value(ctx, IS_STRING, (const char *)s, len);
}

static int on_map(void *ctx)
{
	return value(ctx, IS_MAP, "", 0);
}

static int on_array(void *ctx)
{
	return value(ctx, IS_ARRAY, "", 0);
}

static int part_begin(struct kvp_dread *d, const char *s, size_t len)
{
	if (len > KVP_DREAD_KEY_MAX)
		return fail(d, KVP_ERR_LIMIT, "a key of more than %u bytes", KVP_DREAD_KEY_MAX);
	memcpy(d->key, s, len);
	d->key[len] = 0;
	d->key_len = (uint32_t)len;
	d->block_size = 0;
	d->has_events = 0;
	d->wait_len = 0;
	return memchr(s, ':', len) ? 1 : fail(d, KVP_ERR_PROTO, "%s: a key without a colon", d->key);
}

static int on_key(void *ctx, const unsigned char *s, size_t len)
{
	struct kvp_dread *d = ctx;
	d->calls++;
	if (d->skip)
		return 1;
	if (d->state == PARTS)
		return part_begin(d, (const char *)s, len);
	d->member = IGNORED;
	for (size_t i = 0; i < sizeof(known) / sizeof(known[0]); i++)
		if (known[i].in == d->state && text_is((const char *)s, len, known[i].name))
			d->member = known[i].member;
	return 1;
}

static int on_map_end(void *ctx)
{
	struct kvp_dread *d = ctx;
	d->calls++;
	if (d->skip) {
		d->skip--;
		return 1;
	}
	switch (d->state) {
	case PARTS:
		d->state = DONE;
		return 1;
	case PART:
		d->state = PARTS;
		return d->block_size && d->has_events ? 1
						      : malformed(d, "partition: no block_size or events");
	case ROUTER:
		return event_end(d);
	case EVENT:
		d->state = ROUTER;
		d->has_inner = 1;
		return d->has_id && d->has_data ? 1 : malformed(d, "event: no event_id or data");
	case DATA:
		d->state = EVENT;
		return d->has_data ? 1 : malformed(d, "data");
	case STORED:
	case REMOVED:
		d->state = DATA;
		return d->has_block_list ? 1 : malformed(d, "event: no blocks");
	case BLOCK:
		return block_end(d);
	default:
		return fail(d, KVP_ERR_PROTO, "an object ends where none began");
	}
}

static int on_array_end(void *ctx)
{
	struct kvp_dread *d = ctx;
	d->calls++;
	if (d->skip) {
		d->skip--;
		return 1;
	}
	d->state = d->state == EVENTS ? PART : d->state == BLOCKS ? STORED : REMOVED;
	return 1;
}

static const yajl_callbacks callbacks = {.yajl_null = on_null,
	.yajl_boolean = on_bool,
	.yajl_number = on_number,
	.yajl_string = on_string,
	.yajl_start_map = on_map,
	.yajl_map_key = on_key,
	.yajl_end_map = on_map_end,
	.yajl_start_array = on_array,
	.yajl_end_array = on_array_end};

struct kvp_dread *kvp_dread_new(const struct kvp_dread_cfg *cfg)
{
	struct kvp_dread *d = calloc(1, sizeof(*d));
	if (!d)
		return NULL;
	d->cfg = *cfg;
	d->json = yajl_alloc(&callbacks, NULL, d);
	if (d->json)
		return d;
	free(d);
	return NULL;
}

void kvp_dread_free(struct kvp_dread *d)
{
	if (!d)
		return;
	yajl_free(d->json);
	free(d->ext);
	free(d->local);
	free(d->wait);
	free(d);
}

static int outcome(struct kvp_dread *d, yajl_status st)
{
	if (st == yajl_status_error)
		fail(d, KVP_ERR_PROTO, "not JSON, or cut off, behind byte %llu",
			(unsigned long long)d->stat.bytes);
	else if (st != yajl_status_ok)
		fail(d, KVP_ERR_PROTO, "refused");
	return d->rc;
}

int kvp_dread_feed(struct kvp_dread *d, const char *data, size_t len)
{
	uint64_t calls = d->calls;
	if (d->rc || !len)
		return d->rc;
	yajl_status st = yajl_parse(d->json, (const unsigned char *)data, len);
	d->quiet_bytes = d->calls == calls ? d->quiet_bytes + len : 0;
	if (outcome(d, st))
		return d->rc;
	d->stat.bytes += len;
	if (d->quiet_bytes > KVP_DREAD_TOKEN_MAX)
		fail(d, KVP_ERR_LIMIT, "a token of more than %u bytes", KVP_DREAD_TOKEN_MAX);
	return d->rc;
}

int kvp_dread_end(struct kvp_dread *d)
{
	if (d->rc)
		return d->rc;
	if (outcome(d, yajl_complete_parse(d->json)))
		return d->rc;
	if (d->state != DONE)
		fail(d, KVP_ERR_PROTO, "not an object, or it ends too early");
	return d->rc;
}

const char *kvp_dread_error(const struct kvp_dread *d)
{
	return d->err;
}

const struct kvp_dread_stat *kvp_dread_stat(const struct kvp_dread *d)
{
	return &d->stat;
}
