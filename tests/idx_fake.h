/* tests/idx_fake.h — the indexer's registry in one process: its sources, with recording doubles of the tree,
 * the booking calls and, unless IDX_REAL_LISTENERS is defined, the decoder threads. The tree's double is a
 * set of external hashes an index slot and tier. */
#ifndef KVP_IDX_FAKE_H
#define KVP_IDX_FAKE_H

#include <stdlib.h>
#include <sys/mman.h>

#include "daemons/indexer/apply.c"
#include "daemons/indexer/held.c"
#include "daemons/indexer/reconcile.c"
#include "daemons/indexer/recovery.c"
#include "daemons/indexer/registry.c"
#include "daemons/indexer/routed.c"
#include "daemons/indexer/listener.h"
#include "tests/procs.h"
#include "tests/tap.h"

	enum { FAKE_RANKS = 96,
		FAKE_INDEX = 64,
		FAKE_HOLDERS = 4 * FAKE_INDEX,
		FAKE_BLOCKS = 64 };

struct fake_listen {
	uint64_t listener;
	uint32_t start_rank, rank_cnt, dp_rank;
	uint64_t applied;
	enum kvp_zmq_fetch fetch;
	char event[64], replay[64];
};

static struct fake {
	/* tree */
	uint64_t ext[FAKE_HOLDERS][FAKE_BLOCKS]; /* tier * FAKE_INDEX + index slot */
	uint32_t ext_cnt[FAKE_HOLDERS];
	uint32_t clears, store_rc, clear_steps; /* steps before the last one */
	uint64_t last_parent, last_salt;
	/* bookings: the last one recorded, index slots forgotten */
	uint32_t routed_cnt, routed_slot, routed_n, routed_wrong, forgotten[FAKE_RANKS], forgotten_cnt;
	uint64_t routed_salt, routed_limit, routed_now;
	uint8_t routed_owned[FAKE_INDEX];
	/* bookings: open generation of a slot, 0 = closed */
	uint32_t open_gen[FAKE_RANKS];
	uint32_t opens, closes;
	/* listeners by rank slot */
	struct fake_listen listen[FAKE_RANKS];
	uint32_t starts, stops, moves;
	uint64_t epoch;
	/* recovery */
	uint64_t mark, opened; /* last number marked; number of the opened gate + 1, 0 = shut */
	uint32_t has_looked, is_caught_up, connected;
} * fake; /* shared with forked children */

static const struct kvp_geom fake_geom = {.slot_max = 16,
	.rank_max = FAKE_RANKS,
	.index_rank_max = FAKE_INDEX,
	.resv_max = 64,
	.block_max = 10000,
	.active_block_max = 1024,
	.queued_max = 16,
	.part_max = 8,
	.region_gen = 7,
	.salt = {0x1234, 0x5678}};

int kvp_radix_store_tier(struct kvp_radix_w *w, uint32_t slot, enum kvp_radix_tier tier, uint64_t part_salt,
	enum kvp_radix_parent how, uint64_t parent_ext, uint32_t n, const uint64_t *local,
	const uint64_t *ext, uint32_t *stored)
{
	(void)w;
	(void)local;
	slot += tier * FAKE_INDEX;
	fake->last_parent = how == KVP_RADIX_CHILD ? parent_ext : 0;
	fake->last_salt = part_salt;
	for (uint32_t i = 0; !fake->store_rc && i < n && fake->ext_cnt[slot] < FAKE_BLOCKS; i++)
		fake->ext[slot][fake->ext_cnt[slot]++] = ext[i];
	*stored = fake->store_rc ? 0 : n;
	return (int)fake->store_rc;
}

/* Attaches what some holder knows. */
int kvp_radix_attach(struct kvp_radix_w *w, uint32_t slot, enum kvp_radix_tier tier, uint64_t part_salt,
	uint32_t n, const uint64_t *ext, uint32_t *unknown)
{
	uint32_t to = slot + tier * FAKE_INDEX;
	(void)w;
	*unknown = n;
	fake->last_salt = part_salt;
	for (uint32_t i = 0; i < n; i++)
		for (uint32_t k = 0; k < FAKE_HOLDERS * FAKE_BLOCKS; k++) {
			uint32_t h = k / FAKE_BLOCKS, at = k % FAKE_BLOCKS;
			if (at >= fake->ext_cnt[h] || fake->ext[h][at] != ext[i])
				continue;
			fake->ext[to][fake->ext_cnt[to]++] = ext[i];
			--*unknown;
			break;
		}
	return KVP_OK;
}

int kvp_radix_remove_tier(struct kvp_radix_w *w, uint32_t slot, enum kvp_radix_tier tier, uint32_t n,
	const uint64_t *ext, uint32_t *unknown)
{
	(void)w;
	*unknown = n;
	slot += tier * FAKE_INDEX;
	for (uint32_t i = 0; i < n; i++)
		for (uint32_t k = 0; k < fake->ext_cnt[slot]; k++)
			if (fake->ext[slot][k] == ext[i]) {
				fake->ext[slot][k] = fake->ext[slot][--fake->ext_cnt[slot]];
				--*unknown;
				break;
			}
	return KVP_OK;
}

int kvp_radix_clear(struct kvp_radix_w *w, uint32_t slot)
{
	(void)w;
	for (uint32_t h = slot; h < FAKE_HOLDERS; h += FAKE_INDEX)
		fake->ext_cnt[h] = 0;
	fake->clears++;
	return KVP_OK;
}
int kvp_radix_clear_tier(struct kvp_radix_w *w, uint32_t slot, enum kvp_radix_tier tier)
{
	(void)w;
	fake->ext_cnt[slot + tier * FAKE_INDEX] = 0;
	return KVP_OK;
}
int kvp_radix_clear_some(struct kvp_radix_w *w, uint32_t slot, uint32_t budget)
{
	(void)budget;
	if (fake->clear_steps) {
		fake->clear_steps--;
		return KVP_ERR_AGAIN;
	}
	return kvp_radix_clear(w, slot);
}

uint32_t kvp_radix_w_tend(struct kvp_radix_w *w, uint32_t budget)
{
	(void)w;
	(void)budget;
	return 0;
}

/* Block i of a booking has local hash 7000 + i here. */
int kvp_routed_open(struct kvp_radix_w *w, const struct kvp_routed_cfg *cfg, struct kvp_routed **out)
{
	(void)w;
	(void)cfg;
	*out = (struct kvp_routed *)(void *)fake;
	return KVP_OK;
}
void kvp_routed_close(struct kvp_routed *t)
{
	(void)t;
}
uint32_t kvp_routed_record(struct kvp_routed *t, uint32_t slot, uint64_t part_salt, uint32_t n,
	const uint64_t *local, uint64_t limit_blk, uint64_t now_ns)
{
	(void)t;
	fake->routed_cnt++;
	fake->routed_slot = slot;
	fake->routed_salt = part_salt;
	fake->routed_n = n;
	fake->routed_limit = limit_blk;
	fake->routed_now = now_ns;
	for (uint32_t i = 0; i < n; i++)
		fake->routed_wrong += local[i] != 7000 + i;
	return n;
}
void kvp_routed_forget(struct kvp_routed *t, uint32_t slot)
{
	(void)t;
	fake->forgotten[fake->forgotten_cnt++ % FAKE_RANKS] = slot;
}
uint32_t kvp_routed_tend(struct kvp_routed *t, uint64_t now_ns, uint32_t budget)
{
	(void)t;
	(void)now_ns;
	(void)budget;
	return 0;
}
uint64_t kvp_routed_recover(struct kvp_routed *t, const uint8_t *owned, uint64_t now_ns)
{
	(void)t;
	(void)now_ns;
	memcpy(fake->routed_owned, owned, FAKE_INDEX);
	return 0;
}
uint64_t kvp_routed_cnt(const struct kvp_routed *t, uint32_t slot)
{
	(void)t;
	(void)slot;
	return fake->routed_cnt;
}

int kvp_rank_open(struct kvp_book *b, uint32_t slot, uint32_t gen)
{
	(void)b;
	fake->open_gen[slot] = gen;
	fake->opens++;
	return KVP_OK;
}

int kvp_rank_close(struct kvp_book *b, uint32_t slot, uint32_t gen)
{
	(void)b;
	if (fake->open_gen[slot] && fake->open_gen[slot] != gen)
		return KVP_ERR_NOTFOUND;
	fake->open_gen[slot] = 0;
	fake->closes++;
	return KVP_OK;
}

#ifndef IDX_REAL_LISTENERS
int kvp_idx_listen_start(struct kvp_idx_listeners *l, const struct kvp_idx_listen *spec)
{
	(void)l;
	struct fake_listen *f = &fake->listen[spec->rank_slot];
	*f = (struct fake_listen){.listener = spec->listener,
		.start_rank = spec->start_rank,
		.rank_cnt = spec->rank_cnt,
		.dp_rank = spec->dp_rank,
		.applied = spec->applied_seq,
		.fetch = spec->fetch};
	snprintf(f->event, sizeof(f->event), "%s", spec->event);
	snprintf(f->replay, sizeof(f->replay), "%s", spec->replay ? spec->replay : "");
	fake->starts++;
	return KVP_OK;
}

void kvp_idx_listen_stop(struct kvp_idx_listeners *l, uint32_t rank_slot, uint64_t listener)
{
	(void)l;
	if (fake->listen[rank_slot].listener == listener)
		fake->listen[rank_slot].listener = 0;
	fake->stops++;
}

void kvp_idx_listen_replay(
	struct kvp_idx_listeners *l, uint32_t rank_slot, uint64_t listener, const char *replay)
{
	(void)l;
	(void)listener;
	snprintf(fake->listen[rank_slot].replay, sizeof(fake->listen[rank_slot].replay), "%s",
		replay ? replay : "");
	fake->moves++;
}

void kvp_idx_listen_ranks(struct kvp_idx_listeners *l, uint32_t rank_slot, uint64_t listener,
	uint32_t start_rank, uint32_t rank_cnt)
{
	(void)l;
	(void)listener;
	fake->listen[rank_slot].start_rank = start_rank;
	fake->listen[rank_slot].rank_cnt = rank_cnt;
}

void kvp_idx_listeners_epoch(struct kvp_idx_listeners *l, uint64_t epoch)
{
	(void)l;
	fake->epoch = epoch;
}

int kvp_idx_listeners_mark(struct kvp_idx_listeners *l, uint64_t number)
{
	(void)l;
	fake->mark = number;
	return KVP_OK;
}

int kvp_idx_listeners_marked(
	const struct kvp_idx_listeners *l, uint64_t number, uint32_t *cnt, uint32_t *connected)
{
	(void)l;
	*cnt = fake->starts - fake->stops;
	*connected = fake->connected;
	return fake->has_looked && fake->mark == number;
}

int kvp_idx_listeners_open_gate(struct kvp_idx_listeners *l, uint64_t number)
{
	(void)l;
	fake->opened = number + 1;
	return KVP_OK;
}

int kvp_idx_listeners_caught_up(const struct kvp_idx_listeners *l)
{
	(void)l;
	return (int)fake->is_caught_up;
}
#endif

/* The node's memory: catalogue, marks and doubles. */
struct fake_node {
	void *cat_mem, *mark_mem;
	struct kvp_cat cat;
	struct kvp_mark mark;
	struct kvp_ctr_column_shm *ctr;
};

static void fake_node_open(struct fake_node *n)
{
	fake = shared(sizeof(*fake));
	n->cat_mem = shared(kvp_catalogue_footprint(&fake_geom));
	n->mark_mem = shared(kvp_mark_footprint(&fake_geom));
	n->ctr = shared(sizeof(*n->ctr));
	if (kvp_catalogue_new(n->cat_mem, &fake_geom) ||
		kvp_catalogue_join(n->cat_mem, &fake_geom, &n->cat) ||
		kvp_mark_new(n->mark_mem, &fake_geom) || kvp_mark_join(n->mark_mem, &fake_geom, &n->mark))
		exit(1);
}

static void fake_node_close(struct fake_node *n)
{
	munmap(n->cat_mem, kvp_catalogue_footprint(&fake_geom));
	munmap(n->mark_mem, kvp_mark_footprint(&fake_geom));
	munmap(n->ctr, sizeof(*n->ctr));
	munmap(fake, sizeof(*fake));
}

__attribute__((unused)) static void fake_idx_open(
	struct kvp_idx *idx, struct fake_node *n, enum kvp_wrec_events events)
{
	struct kvp_idx_cfg cfg = {KVP_WREC_QUEUEING_OFF, events};
	if (kvp_idx_open(idx, &n->cat, NULL, NULL, &n->mark, n->ctr, &cfg))
		exit(1);
#ifndef IDX_REAL_LISTENERS
	idx->listeners = (struct kvp_idx_listeners *)(void *)fake; /* any pointer: the doubles ignore it */
#endif
	if (kvp_idx_recover(idx))
		exit(1);
}

__attribute__((format(printf, 2, 3), unused)) static int fake_post(struct kvp_idx *idx, const char *fmt, ...)
{
	static char body[4096];
	va_list ap;
	va_start(ap, fmt);
	vsnprintf(body, sizeof(body), fmt, ap);
	va_end(ap);
	return kvp_idx_worker_post(idx, KVP_PART_AGGREGATED, KVP_CMD_BY_API, body, strlen(body));
}

__attribute__((unused)) static int fake_reply_has(struct kvp_idx *idx, const char *text)
{
	return memmem(idx->jw.buf, idx->jw.len, text, strlen(text)) != NULL;
}

/* "worker:rank@slot ..." of a partition's view. */
__attribute__((unused)) static const char *fake_view(const struct kvp_cat *cat, uint32_t part)
{
	static char text[2048];
	struct kvp_cat_view v;
	text[0] = 0;
	if (kvp_cat_view_begin(cat, part, &v))
		return "no partition";
	for (uint32_t i = 0; i < v.cnt; i++)
		snprintf(text + strlen(text), sizeof(text) - strlen(text), "%s%llu:%u@%u", i ? " " : "",
			(unsigned long long)v.rank[i].worker_id, v.rank[i].dp_rank, v.rank[i].rank_slot);
	return text;
}

#endif
