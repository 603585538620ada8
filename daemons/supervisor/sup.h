/* daemons/supervisor/sup.h — the supervisor: starts, watches, sweeps and stops the processes of a node.
 *
 * Shape      one thread, one poll loop over signalfd, the children's pidfds, the control socket and its own
 *            eventfd.
 * Truth      struct sup (this process); slot table (the node).
 * Writers    it writes superblock, slot table, its own counters and the error log, nothing else of the
 *            region.
 * Crash      supervisor killed: children are killed by the parent-death signal; the next start makes a new
 *            region. A killed child is reaped, swept by the one-shot helper `kvpickctl sweep`, released,
 *            started again. A killed helper is started again, and sweeps what the killed one held, too.
 */
#ifndef KVP_SUPERVISOR_SUP_H
#define KVP_SUPERVISOR_SUP_H

#include "daemons/common/boot.h"
#include "daemons/common/config.h"
#include <kvpick/clock.h>

#define SUP_CHILD_MAX KVP_SLOT_MAX
#define SUP_BACKOFF_MIN_MS 100
#define SUP_HEALTHY_MS 10000	   /* a child that ran that long starts again without delay */
#define SUP_SWEEP_TIMEOUT_MS 20000 /* the helper needs milliseconds */
#define SUP_SWEEP_TRIES 3	   /* helpers killed in a row: then the region is taken for broken */
#define SUP_BOOT_STUCK_MS 30000	   /* stuck limit in BOOT: rebuilding the largest index takes 100 s */
#define SUP_STUCK_KILL 10	   /* times the stuck limit after which a stuck child is killed */
#define SUP_ARCHIVE_MAX 8	   /* archived error logs kept in the run directory */

enum sup_state {
	SUP_DOWN,     /* no process; to be started at next_ms */
	SUP_STARTING, /* process runs, control word not RUN yet */
	SUP_UP,
	SUP_SWEEP_WAIT, /* dead, its owner not swept yet */
	SUP_SWEEPING
};
enum sup_mode {
	SUP_RUN,
	SUP_DRAIN,   /* children but the indexer were asked to end */
	SUP_DRAIN_2, /* only the indexer is left and was asked to end */
	SUP_KILL,    /* everybody was killed; ends when all are reaped */
	SUP_REBUILD  /* same, then a new region */
};

struct sup_child {
	enum kvp_role role;
	uint32_t instance, slot;
	enum sup_state state;
	const char *program; /* absolute path */
	pid_t pid;	     /* 0 = none */
	int pidfd;
	kvp_owner owner;
	uint64_t start_ms, next_ms, backoff_ms;
	uint32_t starts;
	int stuck; /* reported, and no beat since */
};

struct sup {
	struct kvp_node node;
	const struct kvp_config *cfg;
	struct kvp_geom geom;
	struct kvp_ctr_column_shm *ctr;
	struct sup_child child[SUP_CHILD_MAX];
	uint32_t child_cnt;
	struct sup_child sweeper; /* the one-shot helper; state UP while it runs */
	uint32_t sweep_target;	  /* index in child[] */
	kvp_owner sweep_lost[SUP_SWEEP_TRIES]; /* helpers that were killed since the last one that was not */
	uint32_t sweep_lost_cnt;
	enum sup_mode mode;
	int exit_code;
	int opened;	      /* the indexer ran once in this region: the others may start */
	uint64_t deadline_ms; /* of a drain */
	uint64_t rebuild_ms, rebuild_backoff_ms, rebuilds;
	int sig_fd;
	char dir[KVP_BOOT_PATH_MAX]; /* where the sibling programs are */
	char path[KVP_ROLE_CNT][KVP_BOOT_PATH_MAX + 32];
};

static inline uint64_t sup_now_ms(void)
{
	return kvp_clock_mono_ns() / 1000000;
}

/* plan.c: which children, which slots, which capacities. 0, or an exit code after a message on stderr. */
int sup_plan(struct sup *s);

/* child.c: one turn of supervision each. */
void sup_start_due(struct sup *s, uint64_t now);
void sup_reap(struct sup *s, uint64_t now);
void sup_sweep_next(struct sup *s, uint64_t now);
void sup_watch(struct sup *s, uint64_t now);
uint32_t sup_alive(const struct sup *s);
void sup_signal_all(struct sup *s, int sig, int with_indexer);
/* sup_error puts one occurrence into the node's error log. */
void sup_error(struct sup *s, int code, uint32_t line, const char *text);

/* region.c: make the region; after corruption archive its error log first. */
int sup_region(struct sup *s);
void sup_archive(struct sup *s);

/* loop.c: runs until the node has stopped; answers the exit code. */
int sup_run(struct sup *s);
void sup_stop(struct sup *s, int exit_code, uint64_t now);
void sup_corrupt(struct sup *s, const char *why, uint64_t now);
#endif
