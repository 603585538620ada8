/* The catalogue's writer at work while a search stands in the middle of a chain. Builds the catalogue with
 * its places whatever the build. */
#ifndef KVP_TEST_POINTS
#define KVP_TEST_POINTS
#endif
#include "shm/catalogue.c"
#include "shm/catalogue_w.c"
#include "shm/point.c"

#include "tests/procs.h"
#include "tests/tap.h"

static const struct kvp_geom geom = {.slot_max = 16,
	.rank_max = 64,
	.index_rank_max = 64,
	.resv_max = 64,
	.block_max = 10000,
	.active_block_max = 1024,
	.queued_max = 16,
	.part_max = 2,
	.region_gen = 3,
	.salt = {1, 2}};
static struct kvp_cat cat;
static struct kvp_cat_writer w;
static uint64_t first, second, stranger; /* ids: two of one chain, one of another */

static void put(uint64_t id)
{
	uint32_t idx;
	struct kvp_cat_worker_info info = {.worker_id = id};
	if (kvp_cat_w_worker_slot(&w, id, &idx) == KVP_OK)
		kvp_cat_w_worker_put(&w, idx, &info, "{}", 2);
}

static void drop(uint64_t id)
{
	uint32_t idx;
	if (kvp_cat_worker_find(&cat, id, &idx) == KVP_OK)
		kvp_cat_w_worker_drop(&w, idx);
}

static uint64_t id_like(uint64_t id, int same_chain)
{
	uint64_t x = id + 1;
	while ((kvp_cat_bucket(&cat, x) == kvp_cat_bucket(&cat, id)) != same_chain)
		x++;
	return x;
}

static int hits_left;
static void (*deed)(void);
static void weave(const char *place)
{
	if (strcmp(place, "catalogue:walk") != 0 || !hits_left || --hits_left)
		return;
	deed();
}

static void d_reuse(void) /* the slot that the search stands on goes to another chain */
{
	drop(second);
	put(stranger);
}
static void d_drop(void)
{
	drop(second);
}
static void d_back(void) /* drops it and registers it again */
{
	drop(second);
	put(stranger);
	drop(stranger);
	put(second);
}

static void search(const char *what, void (*d)(void))
{
	uint32_t idx = 0;
	drop(stranger);
	drop(second);
	drop(first);
	put(first);
	put(second); /* stands before it */
	deed = d;
	hits_left = 1;
	kvp_point_hook = weave;
	int rc = kvp_cat_worker_find(&cat, first, &idx);
	kvp_point_hook = NULL;
	ok(rc == KVP_OK && !hits_left && cat.worker[idx].worker_id == first, "a worker is found: %s", what);
	is_u64(kvp_catalogue_check(&cat), 0, "and the catalogue is sound");
}

int main(void)
{
	void *mem = shared(kvp_catalogue_footprint(&geom));
	ok(kvp_catalogue_new(mem, &geom) == KVP_OK && kvp_catalogue_join(mem, &geom, &cat) == KVP_OK &&
			kvp_cat_w_open(&cat, &w) == KVP_OK,
		"a catalogue");
	first = 7;
	second = id_like(first, 1);
	stranger = id_like(first, 0);
	search("the slot on the way goes to another chain", d_reuse);
	search("the slot on the way becomes free", d_drop);
	search("the slot on the way goes and comes", d_back);
	kvp_cat_w_close(&w);
	return done();
}
