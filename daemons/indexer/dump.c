/* daemons/indexer/dump.c — pages of a dump: a step of a tour each, as much as a reply holds. */
#include "daemons/indexer/dump.h"

#include <string.h>

#include "daemons/common/dump_page.h"

#define LOOKS_PER_PAGE 2048u /* a tenth to a fifth of a millisecond */

struct filling {
	struct kvp_dump_page *page;
	uint8_t *at, *end;
	uint64_t blocks;
};

static uint32_t take(void *ctx, const struct kvp_radix_dump_event *ev)
{
	struct filling *f = ctx;
	uint64_t room = (uint64_t)(f->end - f->at);
	if (room < KVP_DUMP_EVENT_BYTES(1))
		return 0;
	uint64_t max = (room - sizeof(struct kvp_dump_event)) / 16;
	uint32_t n = ev->n < max ? ev->n : (uint32_t)max;
	struct kvp_dump_event e = {.n = n,
		.how = (uint16_t)ev->how,
		.tier = (uint16_t)ev->tier,
		.parent = ev->how == KVP_RADIX_CHILD ? ev->parent_ext : 0};
	memcpy(f->at, &e, sizeof(e));
	memcpy(f->at + sizeof(e), ev->local, 8ull * n);
	memcpy(f->at + sizeof(e) + 8ull * n, ev->ext, 8ull * n);
	f->at += KVP_DUMP_EVENT_BYTES(n);
	f->page->event_cnt++;
	f->blocks += n;
	return n;
}

int kvp_idx_dump(struct kvp_idx *idx, const struct kvp_cmd_cell *c, void *buf, uint32_t *len)
{
	uint32_t slot = (uint32_t)(c->arg[1] >> 32), gen = (uint32_t)c->arg[1];
	struct kvp_dump_page page = {.tour = c->arg[0]};
	struct filling f = {.page = &page,
		.at = (uint8_t *)buf + sizeof(page),
		.end = (uint8_t *)buf + KVP_CMD_PAYLOAD_MAX};
	*len = 0;
	if (slot >= idx->cat.cat.index_max || c->arg[2] > KVP_RADIX_TOUR_LOW)
		return KVP_ERR_INVAL;
	if (!(gen & 1) || kvp_cat_index_gen(&idx->cat.cat, slot) != gen) {
		kvp_radix_tour_end(idx->radix, c->arg[0]);
		return KVP_ERR_FENCED;
	}
	if (!page.tour)
		page.tour = kvp_radix_tour_begin(
			idx->radix, slot, (enum kvp_radix_tour_part)c->arg[2], c->arg[3]);
	int rc = kvp_radix_tour_step(idx->radix, page.tour, LOOKS_PER_PAGE, take, &f);
	kvp_ctr_add(idx->ctr, KVP_CTR_DUMP_PAGES, 1);
	kvp_ctr_add(idx->ctr, KVP_CTR_DUMP_BLOCKS, f.blocks);
	kvp_ctr_add(idx->ctr, KVP_CTR_DUMP_VOID, rc == KVP_ERR_NOTFOUND);
	page.bytes = (uint32_t)(f.at - (uint8_t *)buf - sizeof(page));
	memcpy(buf, &page, sizeof(page));
	*len = (uint32_t)sizeof(page) + page.bytes;
	return rc;
}

int kvp_idx_names(struct kvp_idx *idx, const struct kvp_cmd_cell *c, void *buf, uint32_t *len)
{
	static uint64_t local[KVP_CMD_PAYLOAD_MAX / 8]; /* apply thread only */
	uint32_t slot = (uint32_t)(c->arg[0] >> 32), gen = (uint32_t)c->arg[0];
	struct kvp_part_fixed part;
	*len = 0;
	if (c->arg[1] > UINT32_MAX || kvp_cat_part_get(&idx->cat.cat, (uint32_t)c->arg[1], &part))
		return KVP_ERR_INVAL;
	if (!(gen & 1) || kvp_cat_index_gen(&idx->cat.cat, slot) != gen)
		return KVP_ERR_FENCED;
	memcpy(local, buf, c->len);
	*len = 8 * kvp_radix_w_names(idx->radix, slot, part.key_salt, c->len / 8, local, buf);
	return KVP_OK;
}
