/* daemons/common/dump.c — the text of a dump: partitions, ranks, pages, events. */
#include "daemons/common/dump.h"

#include <stdlib.h>
#include <string.h>

#include "daemons/common/dump_page.h"
#include "ipc/decimal.h"
#include "ipc/json_out.h"

#define TEXT_BYTES 49152u /* given out at a time, about */

enum at { AT_BEGIN, AT_PART, AT_RANK, AT_WAIT, AT_PAGE, AT_END };

struct rank {
	uint64_t worker_id;
	uint64_t device_tour; /* its number; 0 = none yet */
	uint32_t dp_rank, index_slot, index_gen;
};

struct kvp_dump {
	struct kvp_region *region;
	kvp_owner owner;
	struct kvp_ctr_column_shm *ctr;
	enum kvp_part_role role;
	enum at at;
	uint32_t part, part_cnt;
	struct rank *rank; /* of the partition at hand, heap */
	uint32_t rank_at, rank_cnt;
	enum kvp_radix_tour_part tier; /* which tour of the rank */
	uint64_t event_id;
	/* command under way */
	struct kvp_cmd_cell *cell; /* NULL = none */
	uint64_t since_ns;	   /* waiting since; 0 = not yet */
	uint64_t tour;
	uint32_t anew;
	/* page being told */
	int page_status;
	/* bytes; blk_at: next block of the event at page_at */
	uint32_t page_at, page_end, event_left; /* bytes, bytes, events */
	uint32_t blk_at;			/* next block of the event at page_at */
	int is_open;				/* that event has been begun */
	uint8_t *page;				/* KVP_CMD_PAYLOAD_MAX bytes */
	struct kvp_jw out;
};

struct kvp_dump *kvp_dump_open(
	struct kvp_region *region, kvp_owner owner, struct kvp_ctr_column_shm *ctr, enum kvp_part_role role)
{
	struct kvp_dump *d = calloc(1, sizeof(*d));
	if (!d)
		return NULL;
	d->region = region;
	d->owner = owner;
	d->ctr = ctr;
	d->role = role;
	d->part_cnt = kvp_cat_part_cnt(&region->cat);
	kvp_jw_init(&d->out);
	d->page = malloc(KVP_CMD_PAYLOAD_MAX);
	if (d->page)
		return d;
	free(d);
	return NULL;
}

void kvp_dump_close(struct kvp_dump *d)
{
	if (!d)
		return;
	if (d->cell)
		kvp_cmd_end(&d->region->cmd, d->cell);
	kvp_jw_free(&d->out);
	free(d->page);
	free(d->rank);
	free(d);
}

/* ---- partitions and ranks ---- */

/* Copies the ranks of a partition that have an index slot, as they are at one moment. */
static int take_ranks(struct kvp_dump *d)
{
	struct kvp_cat_view v;
	for (int i = 0; i < KVP_CAT_RETRY_MAX; i++) {
		if (kvp_cat_view_begin(&d->region->cat, d->part, &v))
			return KVP_ERR_PROTO;
		struct rank *grown = realloc(d->rank, (v.cnt + 1ull) * sizeof(*grown));
		if (!grown)
			return KVP_ERR_SYS;
		d->rank = grown;
		d->rank_cnt = 0;
		for (uint32_t k = 0; k < v.cnt; k++) {
			struct rank r = {.worker_id = kvp_ld_rlx_u64(&v.rank[k].worker_id),
				.dp_rank = kvp_ld_rlx_u32(&v.rank[k].dp_rank),
				.index_slot = kvp_ld_rlx_u32(&v.rank[k].index_slot),
				.index_gen = kvp_ld_rlx_u32(&v.rank[k].index_gen)};
			if (r.index_slot != KVP_INDEX_NONE)
				d->rank[d->rank_cnt++] = r;
		}
		if (kvp_cat_view_valid(&d->region->cat, &v) == KVP_OK)
			return KVP_OK;
	}
	return KVP_ERR_CLOSED;
}

/* The next partition of the role, or the end of the text. */
static int next_part(struct kvp_dump *d)
{
	struct kvp_part_info p;
	char key[2 * KVP_CAT_NAME_MAX + 1];
	while (d->part < d->part_cnt &&
		(kvp_cat_part_info(&d->region->cat, d->part, &p) || p.role != d->role))
		d->part++;
	if (d->part == d->part_cnt) {
		kvp_jw_end(&d->out);
		d->at = AT_END;
		return KVP_OK;
	}
	int rc = take_ranks(d);
	if (rc)
		return rc;
	memcpy(key, p.model, p.model_len);
	key[p.model_len] = ':';
	memcpy(key + p.model_len + 1, p.group, p.group_len);
	kvp_jw_keyn(&d->out, key, p.model_len + 1ull + p.group_len);
	kvp_jw_obj(&d->out);
	kvp_jw_ku64(&d->out, "block_size", p.block_size);
	kvp_jw_key(&d->out, "events");
	kvp_jw_arr(&d->out);
	d->event_id = 0;
	d->rank_at = 0;
	d->tier = KVP_RADIX_TOUR_DEVICE;
	d->at = AT_RANK;
	return KVP_OK;
}

static int any_low(const struct kvp_dump *d)
{
	struct kvp_radix_stats st;
	kvp_radix_stats(&d->region->radix, &st);
	return st.low_blocks != 0;
}

static void next_rank(struct kvp_dump *d)
{
	if (d->rank_at == d->rank_cnt && d->tier == KVP_RADIX_TOUR_DEVICE && d->rank_cnt && any_low(d)) {
		d->tier = KVP_RADIX_TOUR_LOW;
		d->rank_at = 0;
	}
	if (d->rank_at < d->rank_cnt) {
		d->tour = 0;
		d->anew = 0;
		d->since_ns = 0;
		d->at = AT_WAIT;
		return;
	}
	kvp_jw_end(&d->out);
	kvp_jw_end(&d->out);
	d->part++;
	d->at = AT_PART;
}

/* ---- pages ---- */

/* Asks for the next page of the rank at hand. Without a free cell it is tried again at the next call. */
static void ask(struct kvp_dump *d)
{
	const struct rank *r = &d->rank[d->rank_at];
	void *payload;
	if (kvp_cmd_begin(&d->region->cmd, d->owner, &d->cell, &payload)) {
		d->cell = NULL;
		kvp_ctr_add(d->ctr, KVP_CTR_CMD_FULL, 1);
		return;
	}
	d->cell->arg[0] = d->tour;
	d->cell->arg[1] = (uint64_t)r->index_slot << 32 | r->index_gen;
	d->cell->arg[2] = d->tier;
	d->cell->arg[3] = r->device_tour;
	kvp_cmd_post(&d->region->cmd, d->cell, KVP_CMD_DUMP, 0);
}

/* Copies what the indexer answered, so that it can make the next page meanwhile. */
static int take_page(struct kvp_dump *d)
{
	uint32_t len = d->cell->reply_len;
	struct kvp_dump_page p = {.tour = 0};
	d->page_status = d->cell->status;
	if (len <= KVP_CMD_PAYLOAD_MAX)
		memcpy(d->page, kvp_cmd_buffer(&d->region->cmd, d->cell), len);
	kvp_cmd_end(&d->region->cmd, d->cell);
	d->cell = NULL;
	d->since_ns = 0;
	if (d->page_status == KVP_ERR_FENCED) {
		d->rank_at++;
		d->at = AT_RANK;
		return KVP_OK;
	}
	if (d->page_status == KVP_ERR_NOTFOUND) {
		d->tour = 0; /* and wait again */
		return ++d->anew > KVP_DUMP_AGAIN_MAX ? KVP_ERR_CLOSED : KVP_OK;
	}
	if (len <= KVP_CMD_PAYLOAD_MAX && len >= sizeof(p))
		memcpy(&p, d->page, sizeof(p));
	if (!p.tour || p.bytes != len - sizeof(p) || (d->page_status && d->page_status != KVP_ERR_AGAIN))
		return KVP_ERR_PROTO;
	d->tour = p.tour;
	if (d->tier == KVP_RADIX_TOUR_DEVICE)
		d->rank[d->rank_at].device_tour = p.tour;
	d->page_at = sizeof(p);
	d->page_end = len;
	d->event_left = p.event_cnt;
	d->blk_at = 0;
	d->at = AT_PAGE;
	if (d->page_status == KVP_ERR_AGAIN)
		ask(d);
	return KVP_OK;
}

static int wait_page(struct kvp_dump *d, uint64_t now_ns)
{
	if (!d->cell)
		ask(d);
	if (!d->since_ns)
		d->since_ns = now_ns;
	if (d->cell && kvp_cmd_done(&d->region->cmd, d->cell))
		return take_page(d);
	return now_ns - d->since_ns > KVP_DUMP_WAIT_NS ? KVP_ERR_TIMEOUT : KVP_ERR_AGAIN;
}

/* ---- events ---- */

static const char *const tier_name[KVP_RADIX_TIER_CNT] = {"device", "host_pinned", "disk", "external"};

static void event_begin(struct kvp_dump *d, const struct kvp_dump_event *e)
{
	struct kvp_jw *w = &d->out;
	kvp_jw_obj(w);
	kvp_jw_ku64(w, "worker_id", d->rank[d->rank_at].worker_id);
	kvp_jw_kstr(w, "storage_tier", tier_name[e->tier]);
	kvp_jw_kstr(w, "residency_domain", "worker");
	kvp_jw_key(w, "event");
	kvp_jw_obj(w);
	kvp_jw_ku64(w, "event_id", d->event_id++);
	kvp_jw_ku64(w, "dp_rank", d->rank[d->rank_at].dp_rank);
	kvp_jw_key(w, "data");
	kvp_jw_obj(w);
	kvp_jw_key(w, "stored");
	kvp_jw_obj(w);
	kvp_jw_key(w, "parent_hash");
	if (e->how == KVP_RADIX_CHILD)
		kvp_jw_u64(w, e->parent);
	else
		kvp_jw_null(w);
	kvp_jw_key(w, "start_position");
	kvp_jw_null(w);
	kvp_jw_key(w, "blocks");
	kvp_jw_arr(w);
}

static void event_end(struct kvp_dump *d)
{
	kvp_jw_end(&d->out);
	for (int i = 0; i < 4; i++)
		kvp_jw_end(&d->out);
}

static char *put_text(char *to, const char *text, size_t n)
{
	memcpy(to, text, n);
	return to + n;
}

static char *put_u64(char *to, uint64_t v)
{
	char digit[KVP_DECIMAL_MAX], *end = digit + sizeof(digit), *from = kvp_decimal(end, v);
	return put_text(to, from, (size_t)(end - from));
}

#define BLOCK_BYTES 128 /* the longest text of a block is 92 */
#define LIT(s) s, sizeof(s) - 1

static void block(struct kvp_jw *w, uint64_t ext, uint64_t local)
{
	char text[BLOCK_BYTES], *p = put_text(text, LIT("{\"block_hash\":"));
	p = put_u64(p, ext);
	p = put_text(p, LIT(",\"tokens_hash\":"));
	p = put_u64(p, local);
	p = put_text(p, LIT(",\"mm_extra_info\":null}"));
	kvp_jw_raw(w, text, (size_t)(p - text));
}

static uint64_t word_at(const uint8_t *p)
{
	uint64_t v;
	memcpy(&v, p, sizeof(v));
	return v;
}

/* Events of the page until enough text is there. */
static int tell_page(struct kvp_dump *d)
{
	while (d->event_left && d->out.len < TEXT_BYTES) {
		struct kvp_dump_event e;
		if (d->page_end - d->page_at < sizeof(e))
			return KVP_ERR_PROTO;
		memcpy(&e, d->page + d->page_at, sizeof(e));
		if (!e.n || e.tier >= KVP_RADIX_TIER_CNT ||
			d->page_end - d->page_at < KVP_DUMP_EVENT_BYTES(e.n))
			return KVP_ERR_PROTO;
		const uint8_t *local = d->page + d->page_at + sizeof(e), *ext = local + 8ull * e.n;
		if (!d->is_open)
			event_begin(d, &e);
		d->is_open = 1;
		for (; d->blk_at < e.n && d->out.len < TEXT_BYTES; d->blk_at++)
			block(&d->out, word_at(ext + 8ull * d->blk_at), word_at(local + 8ull * d->blk_at));
		if (d->blk_at < e.n)
			break;
		event_end(d);
		d->is_open = 0;
		d->blk_at = 0;
		d->page_at += (uint32_t)KVP_DUMP_EVENT_BYTES(e.n);
		d->event_left--;
	}
	if (d->event_left)
		return KVP_OK;
	d->at = AT_WAIT;
	if (d->page_status == KVP_OK) {
		d->rank_at++;
		d->at = AT_RANK;
	}
	return KVP_OK;
}

static int step(struct kvp_dump *d, uint64_t now_ns)
{
	switch (d->at) {
	case AT_BEGIN:
		kvp_jw_obj(&d->out);
		d->at = AT_PART;
		return KVP_OK;
	case AT_PART:
		return next_part(d);
	case AT_RANK:
		next_rank(d);
		return KVP_OK;
	case AT_WAIT:
		return wait_page(d, now_ns);
	case AT_PAGE:
		return tell_page(d);
	case AT_END:
		break;
	}
	return KVP_ERR_NOTFOUND;
}

int kvp_dump_next(struct kvp_dump *d, uint64_t now_ns, const char **data, size_t *len)
{
	int rc = KVP_OK;
	kvp_jw_drain(&d->out);
	while (!rc && d->out.len < TEXT_BYTES)
		rc = step(d, now_ns);
	if (d->out.err)
		return KVP_ERR_SYS;
	if (rc && rc != KVP_ERR_AGAIN && rc != KVP_ERR_NOTFOUND)
		return rc;
	if (d->out.len == 0)
		return rc;
	*data = d->out.buf;
	*len = d->out.len;
	return KVP_OK;
}
