/* shm/gate.h — what has to be so before the node is ready: one word a condition, told by who knows.
 *
 * Shape      KVP_GATE_CNT words, each on lines of its own: 0 = shut, 1 = open, and how often it changed.
 * Truth      the word. Whether a condition counts at all is a matter of the configuration: a reader does not
 *            look at a gate that nobody is there to open.
 * Writers    one role a gate: discovery KVP_GATE_WORKERS and KVP_GATE_PEERS. Recovery of the index has more
 *            to tell than open and shut: shm/recov.h.
 * Readers    extproc and httpd (readiness), peer (KVP_GATE_PEERS), tools.
 * Ordering   set is a store with release after what it tells of; get loads with acquire.
 * Lifetime   as long as the region: a new region has all gates shut.
 * Crash      the word stays as the dead process left it: what it told of goes on, and the next process of the
 *            role sets it anew as soon as it knows better.
 * Proved by  tests/t_gate.c
 */
#ifndef KVP_SHM_GATE_H
#define KVP_SHM_GATE_H

#include "shm/obj.h"

enum kvp_gate {
	KVP_GATE_WORKERS,  /* the workers of every pool, or of the file, are known and in the catalogue */
	KVP_GATE_PEERS,	   /* the replicas of the peer Service were listed completely, once */
	KVP_GATE_CNT
};

struct kvp_gates_shm;
struct kvp_gates { /* process-local */
	struct kvp_gates_shm *shm;
};

uint64_t kvp_gates_align(void);
uint64_t kvp_gates_footprint(const struct kvp_geom *g);
int kvp_gates_new(void *mem, const struct kvp_geom *g);
int kvp_gates_join(void *mem, const struct kvp_geom *g, struct kvp_gates *out);
void kvp_gates_leave(struct kvp_gates *p);
int kvp_gates_delete(void *mem);
/* kvp_gates_check counts words that cannot be. Meaningful at any time. */
uint64_t kvp_gates_check(const struct kvp_gates *p);

/* kvp_gate_open and kvp_gate_shut: the gate's own role, one thread. Nothing happens if it is so already.
 * Pairs with: kvp_gate_is_open. */
void kvp_gate_open(struct kvp_gates *p, enum kvp_gate which);
void kvp_gate_shut(struct kvp_gates *p, enum kvp_gate which);
/* kvp_gate_is_open: any process. 1 or 0. */
int kvp_gate_is_open(const struct kvp_gates *p, enum kvp_gate which);
/* kvp_gate_turns: how often the gate was opened or shut since the region exists. */
uint64_t kvp_gate_turns(const struct kvp_gates *p, enum kvp_gate which);
const char *kvp_gate_name(enum kvp_gate which); /* "workers", "peers"; "?" out of range */
#endif
