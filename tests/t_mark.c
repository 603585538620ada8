/* tests/t_mark.c — marks belong to one generation of a rank slot. */
#include <stdlib.h>

#include "shm/mark.h"
#include "tests/tap.h"

int main(void)
{
	struct kvp_geom g = {.rank_max = 8, .region_gen = 5}, other = g;
	struct kvp_mark m;
	uint64_t applied = 1, live = 1, bytes = kvp_mark_footprint(&g);
	void *mem = aligned_alloc(KVP_PAGE, bytes);
	memset(mem, 0, bytes);
	ok(kvp_mark_new(NULL, &g) == KVP_ERR_INVAL, "new refuses NULL");
	ok(kvp_mark_join(mem, &g, &m) == KVP_ERR_AGAIN, "join before new answers AGAIN");
	ok(kvp_mark_new(mem, &g) == KVP_OK && kvp_mark_join(mem, &g, &m) == KVP_OK, "new and join");
	other.region_gen = 6;
	ok(kvp_mark_join(mem, &other, &m) == KVP_ERR_LAYOUT, "join refuses another region's marks");
	ok(kvp_mark_get(&m, 3, 7, &applied, &live) == KVP_ERR_NOTFOUND, "a fresh mark belongs to nobody");
	ok(kvp_mark_get(&m, 3, 0, &applied, &live) == KVP_ERR_NOTFOUND, "not even to generation 0");
	kvp_mark_reset(&m, 3, 7);
	ok(kvp_mark_get(&m, 3, 7, &applied, &live) == KVP_OK, "after reset it belongs to its generation");
	ok(applied == KVP_MARK_UNSET && live == KVP_MARK_UNSET, "and is unset");
	kvp_mark_advance(&m, 3, 7, 10, KVP_MARK_UNSET);
	kvp_mark_advance(&m, 3, 7, KVP_MARK_UNSET, 9);
	kvp_mark_get(&m, 3, 7, &applied, &live);
	ok(applied == 10 && live == 9, "both numbers advance by themselves");
	ok(kvp_mark_advance(&m, 3, 9, 11, 11) == KVP_ERR_NOTFOUND, "another generation can't advance it");
	ok(kvp_mark_get(&m, 3, 9, &applied, &live) == KVP_ERR_NOTFOUND && applied == 10, "nor read it");
	ok(kvp_mark_reset(&m, 8, 1) == KVP_ERR_INVAL, "a slot out of range is INVAL");
	is_u64(kvp_mark_check(&m), 0, "sound");
	kvp_mark_delete(mem);
	ok(kvp_mark_join(mem, &g, &m) == KVP_ERR_AGAIN, "join after delete answers AGAIN");
	free(mem);
	return done();
}
