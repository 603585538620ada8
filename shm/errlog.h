/* shm/errlog.h — distinct error log: each different error once, with how often and when.
 *
 * Shape      KVP_ERRLOG_MAX records of 320 bytes in an open hash table; nothing is removed before the region
 *            ends.
 * Truth      records in state READY. Two records of one error may exist when two processes meet it in the
 *            same instant; readers add them up.
 * Writers    any process, any thread: kvp_errlog_put. Sweep: kvp_errlog_sweep_owner.
 * Readers    kvpickctl errors, the supervisor (archive before a region is created anew), /status.
 * Ordering   a record's fields are stored before its state goes to READY with release; readers load the
 *            state with acquire. count and last are relaxed.
 * Lifetime   as long as the region.
 * Crash      writer killed while filling: the record stays CLAIMED, is skipped by everybody and freed by the
 *            sweep of its owner. Killed later: at most one count is missing.
 * Proved by  tests/t_errlog.c
 */
#ifndef KVP_SHM_ERRLOG_H
#define KVP_SHM_ERRLOG_H

#include "shm/obj.h"

#define KVP_ERRLOG_MAX 1024u
#define KVP_ERRLOG_TEXT 192 /* bytes, terminator included; longer text is cut at a whole character */
#define KVP_ERRLOG_MODULE 24

struct kvp_errlog_shm;
struct kvp_errlog { /* process-local handle */
	struct kvp_errlog_shm *shm;
};
struct kvp_errlog_entry { /* a copy for readers */
	int code;
	uint32_t line;
	uint32_t slot; /* slot of the first writer */
	char module[KVP_ERRLOG_MODULE];
	char text[KVP_ERRLOG_TEXT];
	uint64_t cnt;
	uint64_t first_ns, last_ns; /* CLOCK_REALTIME */
};

uint64_t kvp_errlog_align(void);
uint64_t kvp_errlog_footprint(const struct kvp_geom *g);
int kvp_errlog_new(void *mem, const struct kvp_geom *g);
int kvp_errlog_join(void *mem, const struct kvp_geom *g, struct kvp_errlog *out);
void kvp_errlog_leave(struct kvp_errlog *l);
int kvp_errlog_delete(void *mem);
uint64_t kvp_errlog_check(const struct kvp_errlog *l);

/* kvp_errlog_put records one occurrence of (code, module, line, text).
 * owner    the caller's owner word, not 0.  module  file or module name, cut to 23 bytes.  text  what went
 *          wrong, without parts that change from one occurrence to the next; control characters become '?'.
 * now_ns   CLOCK_REALTIME.
 * return   KVP_OK; KVP_ERR_FULL when no record is free: then the occurrence is counted on a record of the
 *          same code, module and line if there is one (KVP_OK), else in the number of lost ones;
 *          KVP_ERR_INVAL.
 * blocks   no; bounded. who: any process that maps the log read-write. */
int kvp_errlog_put(struct kvp_errlog *l, kvp_owner owner, uint64_t now_ns, int code, const char *module,
	uint32_t line, const char *text);

/* kvp_errlog_get copies record idx (0..KVP_ERRLOG_MAX-1): KVP_ERR_NOTFOUND if there is none. kvp_errlog_lost
 * tells how many occurrences found no room. Works on a read-only mapping. */
int kvp_errlog_get(const struct kvp_errlog *l, uint32_t idx, struct kvp_errlog_entry *out);
uint64_t kvp_errlog_lost(const struct kvp_errlog *l);

/* kvp_errlog_sweep_owner frees the records a dead owner left half-written; returns their number. */
uint32_t kvp_errlog_sweep_owner(struct kvp_errlog *l, kvp_owner dead);
#endif
