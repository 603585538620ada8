/* shm/recov.h — whether this node still recovers its index from another one: the one gate of its start.
 *
 * Shape      one state word and what is told of the recovery, in one page.
 * Truth      the state word. RUNNING shuts the gate: no selection, not ready, no dump. Any other opens it. A
 *            node that lost its index while it serves is REFILLING: the same work with the gate open.
 * Writers    the supervisor (begin, before any other process exists); the indexer (refill, tell, end).
 * Readers    every process.
 * Ordering   end stores the state with release after everything that was recovered is in the tree; readers
 *            load it with acquire.
 * Lifetime   as long as the region: a rebuilt node recovers anew.
 * Crash      the indexer killed before end: the state is still RUNNING, and who waited for the end asks its
 *            successor again. The process that fetches killed: still RUNNING; its successor begins anew, and
 *            the indexer ends what nobody has gone on with for too long (daemons/indexer/recovery.h).
 * Proved by  tests/t_recov.c, tests/s_recovery.t
 */
#ifndef KVP_SHM_RECOV_H
#define KVP_SHM_RECOV_H

#include "shm/obj.h"

enum kvp_recov_state {
	KVP_RECOV_NONE,	     /* no source is configured */
	KVP_RECOV_RUNNING,   /* the gate is shut */
	KVP_RECOV_RECOVERED, /* from a peer */
	KVP_RECOV_EMPTY,     /* there was no peer to recover from: begun with an empty index */
	KVP_RECOV_EXHAUSTED, /* every peer failed: begun with what was there */
	KVP_RECOV_REFILLING, /* the tree had to be emptied: being recovered again */
	KVP_RECOV_STATE_CNT
};

struct kvp_recov_info {
	enum kvp_recov_state state;
	uint64_t begun_ns, ended_ns; /* CLOCK_MONOTONIC; 0 = not yet */
	uint64_t attempts;	     /* peers asked so far */
	uint64_t blocks;	     /* taken over so far, those held for workers to come included */
};

struct kvp_recov_shm;
struct kvp_recov { /* process-local handle */
	struct kvp_recov_shm *shm;
};

/* Life cycle as in shm/obj.h. */
uint64_t kvp_recov_align(void);
uint64_t kvp_recov_footprint(const struct kvp_geom *g);
int kvp_recov_new(void *mem, const struct kvp_geom *g);
int kvp_recov_join(void *mem, const struct kvp_geom *g, struct kvp_recov *out);
void kvp_recov_leave(struct kvp_recov *r);
int kvp_recov_delete(void *mem);
uint64_t kvp_recov_check(const struct kvp_recov *r);

/* kvp_recov_begin: NONE -> RUNNING. kvp_recov_refill: an end -> REFILLING; 0 = there was no recovery, or it
 * is under way. kvp_recov_tell adds what was done. kvp_recov_end: RUNNING or REFILLING -> state; 0 = it was
 * neither, or state is no end, nothing changed. now_ns: CLOCK_MONOTONIC. None blocks. */
void kvp_recov_begin(struct kvp_recov *r, uint64_t now_ns);
int kvp_recov_refill(struct kvp_recov *r, uint64_t now_ns);
void kvp_recov_tell(struct kvp_recov *r, uint64_t attempts, uint64_t blocks);
int kvp_recov_end(struct kvp_recov *r, enum kvp_recov_state state, uint64_t now_ns);

/* kvp_recov_state: acquire. kvp_recov_is_shut: 1 while nothing may be selected: one load.
 * kvp_recov_is_active: 1 while a recovery is under way, behind a shut gate or not: nothing may be dumped.
 * kvp_recov_get copies everything; the figures are exact once the state is an end. */
enum kvp_recov_state kvp_recov_state(const struct kvp_recov *r);
int kvp_recov_is_shut(const struct kvp_recov *r);
int kvp_recov_is_active(const struct kvp_recov *r);
void kvp_recov_get(const struct kvp_recov *r, struct kvp_recov_info *out);
const char *kvp_recov_name(enum kvp_recov_state s);
#endif
