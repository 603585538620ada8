#include "shm/gate.h"

#include <stdio.h>
#include <string.h>

#define MAGIC 0x3145544147ULL /* "GATE1" */
#define LAYOUT 1

struct gate_shm {
	uint64_t word; /* turns << 1 | open */
	uint64_t pad[15];
} __attribute__((aligned(128)));

struct kvp_gates_shm {
	struct kvp_objhdr hdr;
	uint64_t pad[8];
	struct gate_shm gate[KVP_GATE_CNT];
};
_Static_assert(sizeof(struct gate_shm) == KVP_FALSE_SHARE, "a gate has its lines to itself");

static uint32_t layout_hash(void)
{
	const size_t w[] = {sizeof(struct kvp_gates_shm), sizeof(struct gate_shm),
		offsetof(struct kvp_gates_shm, gate), KVP_GATE_CNT};
	return kvp_obj_hash(w, sizeof(w) / sizeof(w[0]));
}

uint64_t kvp_gates_align(void)
{
	return KVP_FALSE_SHARE;
}

uint64_t kvp_gates_footprint(const struct kvp_geom *g)
{
	return g ? sizeof(struct kvp_gates_shm) : 0;
}

int kvp_gates_new(void *mem, const struct kvp_geom *g)
{
	if (!mem || ((uintptr_t)mem & (KVP_FALSE_SHARE - 1)) || !g)
		return KVP_ERR_INVAL;
	kvp_obj_begin(mem, LAYOUT, layout_hash(), kvp_gates_footprint(g), g->region_gen);
	kvp_obj_ready(mem, MAGIC); /* zeros are gates that are shut */
	return KVP_OK;
}

int kvp_gates_join(void *mem, const struct kvp_geom *g, struct kvp_gates *out)
{
	int rc = kvp_obj_join(mem, MAGIC, LAYOUT, layout_hash());
	if (rc)
		return rc;
	struct kvp_gates_shm *s = mem;
	if (!g || s->hdr.footprint != kvp_gates_footprint(g) || s->hdr.region_gen != g->region_gen)
		return KVP_ERR_LAYOUT;
	out->shm = s;
	return KVP_OK;
}

void kvp_gates_leave(struct kvp_gates *p)
{
	memset(p, 0, sizeof(*p));
}

int kvp_gates_delete(void *mem)
{
	if (!mem)
		return KVP_ERR_INVAL;
	kvp_obj_delete(mem);
	return KVP_OK;
}

/* A gate begins shut and alternates, so an open one has turned an odd number of times. */
static int is_right(uint64_t word)
{
	return (word & 1) == (word >> 1 & 1);
}

uint64_t kvp_gates_check(const struct kvp_gates *p)
{
	uint64_t faults = 0;
	for (uint32_t i = 0; i < KVP_GATE_CNT; i++) {
		uint64_t word = kvp_ld_acq_u64(&p->shm->gate[i].word);
		if (!is_right(word) && ++faults <= 10)
			fprintf(stderr, "gates.check fault gate=%s word=%llx\n", kvp_gate_name(i),
				(unsigned long long)word);
	}
	return faults;
}

static void turn(struct kvp_gates *p, enum kvp_gate which, uint64_t to)
{
	if ((uint32_t)which >= KVP_GATE_CNT)
		return;
	uint64_t word = kvp_ld_rlx_u64(&p->shm->gate[which].word);
	if ((word & 1) != to)
		/* pairs with: kvp_gate_is_open */
		kvp_st_rel_u64(&p->shm->gate[which].word, ((word >> 1) + 1) << 1 | to);
}

void kvp_gate_open(struct kvp_gates *p, enum kvp_gate which)
{
	turn(p, which, 1);
}

void kvp_gate_shut(struct kvp_gates *p, enum kvp_gate which)
{
	turn(p, which, 0);
}

int kvp_gate_is_open(const struct kvp_gates *p, enum kvp_gate which)
{
	if ((uint32_t)which >= KVP_GATE_CNT)
		return 0;
	return (int)(kvp_ld_acq_u64(&p->shm->gate[which].word) & 1); /* pairs with: turn */
}

uint64_t kvp_gate_turns(const struct kvp_gates *p, enum kvp_gate which)
{
	return (uint32_t)which < KVP_GATE_CNT ? kvp_ld_acq_u64(&p->shm->gate[which].word) >> 1 : 0;
}

const char *kvp_gate_name(enum kvp_gate which)
{
	static const char *const name[] = {"workers", "peers"};
	return (uint32_t)which < KVP_GATE_CNT ? name[which] : "?";
}
