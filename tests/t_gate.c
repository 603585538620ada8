/* Gates: shut in a new region, turned by their own role, seen by everybody, and told apart from garbage. */
#include "shm/gate.c"

#include "tests/tap.h"
#include <stdlib.h>

static void lifetime(void)
{
	struct kvp_geom g = {.region_gen = 77}, other = {.region_gen = 78};
	struct kvp_gates p;
	void *mem = aligned_alloc(KVP_FALSE_SHARE, kvp_align_up(kvp_gates_footprint(&g), KVP_FALSE_SHARE));
	memset(mem, 0, kvp_gates_footprint(&g));
	is_u64(kvp_gates_footprint(NULL), 0, "no geometry, no footprint");
	ok(kvp_gates_join(mem, &g, &p) == KVP_ERR_AGAIN, "what is not made yet is to be waited for");
	ok(kvp_gates_new((char *)mem + 8, &g) == KVP_ERR_INVAL && kvp_gates_new(NULL, &g) == KVP_ERR_INVAL,
		"memory must be there and aligned");
	ok(kvp_gates_new(mem, &g) == KVP_OK && kvp_gates_join(mem, &g, &p) == KVP_OK, "made and joined");
	ok(kvp_gates_join(mem, &other, &p) == KVP_ERR_LAYOUT, "not with another generation");
	for (uint32_t i = 0; i < KVP_GATE_CNT; i++)
		ok(!kvp_gate_is_open(&p, i) && !kvp_gate_turns(&p, i), "%s is shut at first",
			kvp_gate_name(i));
	kvp_gate_open(&p, KVP_GATE_WORKERS);
	kvp_gate_open(&p, KVP_GATE_WORKERS);
	ok(kvp_gate_is_open(&p, KVP_GATE_WORKERS) && kvp_gate_turns(&p, KVP_GATE_WORKERS) == 1,
		"opening twice is opening once");
	ok(!kvp_gate_is_open(&p, KVP_GATE_PEERS), "the other stays");
	struct kvp_gates again;
	ok(kvp_gates_join(mem, &g, &again) == KVP_OK && kvp_gate_is_open(&again, KVP_GATE_WORKERS),
		"the next process finds it open");
	kvp_gate_shut(&again, KVP_GATE_WORKERS);
	kvp_gate_shut(&again, KVP_GATE_WORKERS);
	ok(!kvp_gate_is_open(&p, KVP_GATE_WORKERS) && kvp_gate_turns(&p, KVP_GATE_WORKERS) == 2,
		"and shuts it");
	kvp_gate_open(&p, KVP_GATE_CNT);
	ok(!kvp_gate_is_open(&p, KVP_GATE_CNT) && kvp_gates_check(&p) == 0, "there are no others");
	is_str(kvp_gate_name(KVP_GATE_CNT), "?", "nor names for them");
	p.shm->gate[1].word = 1;
	is_u64(kvp_gates_check(&p), 1, "open without a turn is a fault");
	kvp_gates_leave(&p);
	kvp_gates_delete(mem);
	ok(kvp_gates_join(mem, &g, &p) != KVP_OK, "deleted");
	free(mem);
}

int main(void)
{
	lifetime();
	return done();
}
