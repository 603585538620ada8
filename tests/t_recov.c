/* The gate of recovery: its states, in order, and nothing else opens or shuts it. */
#include "shm/recov.h"

#include <stdlib.h>

#include "tests/tap.h"

int main(void)
{
	struct kvp_geom g = {.slot_max = 4, .region_gen = 9};
	struct kvp_recov r;
	struct kvp_recov_info i;
	void *mem = aligned_alloc(KVP_PAGE, KVP_PAGE);
	memset(mem, 0, KVP_PAGE);
	is_u64(kvp_recov_footprint(&g), KVP_PAGE, "a page");
	ok(kvp_recov_join(mem, &g, &r) == KVP_ERR_AGAIN, "not made yet");
	ok(kvp_recov_new(mem, &g) == KVP_OK && kvp_recov_join(mem, &g, &r) == KVP_OK, "made and joined");
	ok(kvp_recov_state(&r) == KVP_RECOV_NONE && !kvp_recov_is_shut(&r), "open at first");
	ok(!kvp_recov_end(&r, KVP_RECOV_RECOVERED, 5) && !kvp_recov_refill(&r, 5),
		"nothing to end, nothing to refill");
	is_u64(kvp_recov_check(&r), 0, "no fault");
	kvp_recov_begin(&r, 100);
	ok(kvp_recov_is_shut(&r), "begun: shut");
	kvp_recov_tell(&r, 1, 1000);
	kvp_recov_tell(&r, 2, 7);
	ok(!kvp_recov_end(&r, KVP_RECOV_NONE, 5) && !kvp_recov_end(&r, KVP_RECOV_RUNNING, 5) &&
			!kvp_recov_end(&r, KVP_RECOV_STATE_CNT, 5) && kvp_recov_is_shut(&r),
		"these are no ends");
	is_u64(kvp_recov_check(&r), 0, "no fault");
	ok(kvp_recov_end(&r, KVP_RECOV_EXHAUSTED, 300) && !kvp_recov_is_shut(&r), "ended: open");
	ok(!kvp_recov_end(&r, KVP_RECOV_RECOVERED, 400), "once");
	kvp_recov_get(&r, &i);
	ok(i.state == KVP_RECOV_EXHAUSTED && i.begun_ns == 100 && i.ended_ns == 300 && i.attempts == 3 &&
			i.blocks == 1007,
		"figures");
	is_u64(kvp_recov_check(&r), 0, "no fault");
	ok(kvp_recov_refill(&r, 500) && !kvp_recov_is_shut(&r) && kvp_recov_is_active(&r),
		"again, behind an open gate");
	ok(!kvp_recov_refill(&r, 600), "once at a time");
	is_u64(kvp_recov_check(&r), 0, "no fault");
	kvp_recov_tell(&r, 1, 5);
	ok(kvp_recov_end(&r, KVP_RECOV_RECOVERED, 700) && !kvp_recov_is_active(&r), "ended");
	kvp_recov_get(&r, &i);
	ok(i.attempts == 1 && i.blocks == 5 && i.begun_ns == 500 && i.ended_ns == 700, "its own figures");
	is_str(kvp_recov_name(KVP_RECOV_EMPTY), "empty_bootstrap", "name");
	is_str(kvp_recov_name(KVP_RECOV_STATE_CNT), "unknown", "no name");
	g.region_gen = 10;
	ok(kvp_recov_join(mem, &g, &r) == KVP_ERR_LAYOUT, "another region's");
	ok(kvp_recov_delete(mem) == KVP_OK && kvp_recov_join(mem, &g, &r) == KVP_ERR_AGAIN, "withdrawn");
	free(mem);
	return done();
}
