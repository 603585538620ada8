/* tests/replica_fixture.h — a node in this process that tells replicas: local selection, lifecycle ring, and
 * the two halves of kvpick-peer. */
#ifndef KVP_REPLICA_FIXTURE_H
#define KVP_REPLICA_FIXTURE_H
#include "daemons/common/select_priv.h"
#include "daemons/peer/mirror.h"
#include "daemons/peer/sync.h"
#include "tests/procs.h"
#include <kvpick/clock.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

struct rf_node {
	struct kvp_selection *s;
	struct kvp_geom geom;
	void *ring;
	struct kvp_mirror mirror;
	struct kvp_bindings bindings;
	struct kvp_sync sync;
	struct kvp_replica_dec dec;
};

static struct kvp_str rf_str(const char *s)
{
	return (struct kvp_str){s, strlen(s)};
}

__attribute__((unused)) static void rf_open(
	struct rf_node *n, struct kvp_local_cfg *cfg, uint64_t router_id, uint32_t workers, uint32_t events)
{
	memset(n, 0, sizeof(*n));
	n->s = kvp_selection_open_local(cfg);
	n->geom = (struct kvp_geom){.slot_max = 8, .region_gen = 1, .lifecycle_max = events};
	uint64_t bytes = kvp_lifecycle_footprint(&n->geom);
	n->ring = shared(bytes);
	struct kvp_region *r = n->s ? n->s->region : NULL;
	if (!r || kvp_lifecycle_new(n->ring, &n->geom) ||
		kvp_lifecycle_join(n->ring, &n->geom, &r->lifecycle)) {
		printf("Bail out! no node\n");
		exit(1);
	}
	for (uint64_t id = 1; id <= workers; id++) {
		struct kvp_local_worker w = {.worker_id = id,
			.model = rf_str("m"),
			.group = rf_str("g"),
			.endpoint = rf_str("http://w"),
			.block_size = 4,
			.size = 1,
			.is_eagle = KVP_NO};
		kvp_selection_local_worker(n->s, &w);
	}
	kvp_mirror_open(&n->mirror, r, n->s->owner, n->s->ctr, router_id);
	kvp_bindings_open(&n->bindings, r, n->s->ctr, router_id, 0);
	kvp_sync_open(&n->sync, r, n->s->owner, n->s->ctr, router_id, r->affinity.max ? &n->bindings : NULL);
	kvp_book_publish(&r->book, &r->lifecycle);
}

__attribute__((unused)) static void rf_close(struct rf_node *n)
{
	kvp_sync_close(&n->sync);
	kvp_bindings_close(&n->bindings);
	kvp_mirror_close(&n->mirror);
	kvp_replica_dec_close(&n->dec);
	kvp_selection_close(n->s);
	munmap(n->ring, kvp_lifecycle_footprint(&n->geom));
}

/* What the process of a replica does with a message: its handle tells nobody. */
__attribute__((unused)) static enum kvp_mirror_result rf_hear(
	struct rf_node *n, const void *payload, size_t len, uint64_t now_ns)
{
	struct kvp_book *b = &n->s->region->book;
	struct kvp_lifecycle_ring *tell = b->tell;
	struct kvp_replica_event e;
	enum kvp_mirror_result r = KVP_MIRROR_RESULT_CNT;
	b->tell = NULL;
	if (kvp_replica_decode_event(&n->dec, payload, len, &e) == KVP_OK)
		r = kvp_mirror_apply(&n->mirror, KVP_PART_AGGREGATED, &e, now_ns);
	b->tell = tell;
	return r;
}
#endif
