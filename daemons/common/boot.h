/* daemons/common/boot.h — how a process gets into the node: what the supervisor hands out and how a child
 * joins.
 *
 * Shape      supervisor: struct kvp_node (lock file, region, index segment, configuration, eventfds, control
 *            socket). Child: struct kvp_boot, filled by kvp_boot_child from the sealed memory file named by
 *            --boot-fd N. Tool: struct kvp_attach, filled from the control socket <run dir>/<instance>.sock.
 * Truth      the lock file <run dir>/<instance>.lock: byte 0 = the node, byte 1 + slot = the process in the
 *            slot.
 * Writers    supervisor: run directory, lock file, socket. Child: its lock byte, its slot.
 * Ordering   child: parent-death signal -> re-check parent -> open lock file, take byte -> map -> join ->
 *            slot active; the daemon then says RUN itself (kvp_boot_control), which wakes the supervisor.
 * Lifetime   until the process ends; nothing is given back piecemeal.
 * Crash      child killed: the kernel frees its byte and descriptors. Supervisor killed: children are killed
 *            by the parent-death signal, lock file and socket stay as empty names and are taken over by the
 *            next one.
 * Proved by  tests/t_boot.c, tests/s_supervisor.t
 */
#ifndef KVP_DAEMONS_BOOT_H
#define KVP_DAEMONS_BOOT_H

#include "shm/counter.h"
#include "shm/slot.h"
#include <sys/types.h>

struct kvp_config;
struct kvp_region;

#define KVP_BOOT_PATH_MAX 1024

/* ---- child ---- */

struct kvp_boot {
	struct kvp_config *config;	/* as parsed by the supervisor */
	struct kvp_region *region;	/* joined with the access of the role */
	struct kvp_slots *slots;	/* = &region->slots, with lock file, eventfds and self filled in */
	struct kvp_ctr_column_shm *ctr; /* this process's column of counters */
	kvp_owner owner;
	uint32_t slot;
	enum kvp_role role;
	uint32_t instance; /* number within the role, from 0 */
	uint32_t slot_max;
	pid_t parent;
	int region_fd, index_fd; /* index_fd: the indexer's private segment, -1 in other roles */
	int lock_fd;
	int wake_fd;		    /* own eventfd: wait on it after kvp_slot_sleep */
	int wake_fds[KVP_SLOT_MAX]; /* eventfd of every configured slot, -1 = none */
	char run_dir[KVP_BOOT_PATH_MAX];
	char node[40]; /* instance name of the node */
	char name[48]; /* "httpd[1]/4711", for log lines */
};

/* kvp_boot_child joins the node as `role`.
 * argv     of main; --boot-fd N (or --boot-fd=N) is mandatory. --help and --version are the daemon's own
 *          business before this call.
 * boot     zeroed by the call; valid after KVP_OK until the process ends.
 * errors   KVP_ERR_NOTFOUND no --boot-fd; KVP_ERR_INVAL it does not describe a process of this role;
 *          KVP_ERR_CLOSED the parent is gone; KVP_ERR_EXISTS the lock byte is held; KVP_ERR_LAYOUT,
 *          KVP_ERR_FENCED, KVP_ERR_SYS. One line on stderr says which. The daemon then exits with
 *          kvp_boot_exit(rc).
 * blocks   no. Signals: SIGPIPE is ignored, the mask is empty, PR_SET_PDEATHSIG is SIGKILL.
 * After it the process must not fork. */
int kvp_boot_child(int argc, char **argv, enum kvp_role role, struct kvp_boot *boot);

/* What the index segment holds: the writer's part of the tree (shm/radix.h), the marks (shm/mark.h), the
 * listeners' memory (shm/memo.h) and the writer's part of the tree of predictions (nothing without one), all
 * made by the supervisor. Offsets and size in bytes, page multiples. */
struct kvp_boot_index {
	uint64_t radix_off, mark_off, memo_off, predicted_off, bytes;
};
void kvp_boot_index_layout(const struct kvp_geom *g, struct kvp_boot_index *out);

/* kvp_boot_exit turns an error of kvp_boot_child (or of a later join) into the exit code the supervisor acts
 * on. */
int kvp_boot_exit(int rc);

/* kvp_boot_files raises the number of files that this process may have open as far as it may itself; returns
 * it. */
uint64_t kvp_boot_files(void);

/* kvp_boot_control stores the own control word and wakes the supervisor: RUN when the daemon serves, DRAIN
 * after SIGTERM, FAIL before exit code 70. */
void kvp_boot_control(struct kvp_boot *b, enum kvp_ctl v);

/* kvp_boot_error puts one occurrence into the node's distinct error log (shm/errlog.h). Any thread. */
void kvp_boot_error(struct kvp_boot *b, int code, const char *module, uint32_t line, const char *text);

/* kvp_wake wakes the process in a slot if it sleeps: see kvp_slot_wake. */
static inline int kvp_wake(struct kvp_boot *b, uint32_t slot)
{
	return kvp_slot_wake(b->slots, slot);
}

/* ---- tool ---- */

struct kvp_attach {
	int region_fd; /* opened read-only: a shared writable mapping of it is refused by the kernel */
	int lock_fd;   /* lock file, for liveness questions; -1 if it cannot be opened */
	pid_t supervisor;
	uint64_t region_gen;
};

/* kvp_boot_attach fetches the descriptors of a running node.
 * run_dir, instance  as configured (both resolved, not NULL).
 * timeout_ms         how long to wait for a node that is starting.
 * errors   KVP_ERR_TIMEOUT no node answered; KVP_ERR_INVAL path too long, or directory or peer of another
 *          user; KVP_ERR_PROTO an answer of another version; KVP_ERR_SYS.
 * who      any process of the same user; it does not become a participant and must only look. */
int kvp_boot_attach(const char *run_dir, const char *instance, uint32_t timeout_ms, struct kvp_attach *out);
void kvp_boot_detach(struct kvp_attach *a);

/* ---- supervisor ---- */

struct kvp_node {
	const struct kvp_config *config;
	struct kvp_geom geom;
	struct kvp_region *region; /* writes only superblock, slots, own counters, error log; NULL = none */
	struct kvp_slots *slots;
	kvp_owner owner; /* of slot 0 */
	int dir_fd, lock_fd, sock_fd;
	int region_fd, region_ro_fd, index_fd, config_fd;
	int wake_fds[KVP_SLOT_MAX];
	uint64_t lock_dev, lock_ino;
	char run_dir[KVP_BOOT_PATH_MAX];
	char instance[40];
};

/* What went wrong, for people. */
struct kvp_node_err {
	char text[KVP_BOOT_PATH_MAX + 256];
};

/* kvp_node_open takes the run directory (made with mode 0700 if missing, refused if it belongs to another
 * user or others may write in it) and the lock, and opens the control socket.
 * errors   KVP_ERR_EXISTS the instance runs, or a process of an earlier one still lives (waits for those up
 *          to two seconds); KVP_ERR_INVAL, KVP_ERR_SYS; err says which and why. Nothing stays open then. */
int kvp_node_open(struct kvp_node *n, const struct kvp_config *cfg, const char *run_dir, const char *instance,
	struct kvp_node_err *err);

/* kvp_node_region creates region, index segment, sealed configuration and one eventfd a slot (geom->slot_max
 * slots; generation and salt are chosen here), drops those of the generation before, and takes slot 0. No
 * child may be alive. KVP_ERR_INVAL, KVP_ERR_SYS, and what kvp_region_join answers. */
int kvp_node_region(struct kvp_node *n, const struct kvp_geom *geom, struct kvp_node_err *err);

/* kvp_node_spawn starts `program` (absolute path) for slot idx, which kvp_slot_assign gave to its role: argv
 * is the program, extra[] (NULL-terminated, may be NULL) and --boot-fd N. Only the indexer gets the index
 * segment. *pid and *pidfd (close-on-exec). KVP_ERR_SYS. The child exits with KVP_EXIT_DEPEND if it cannot be
 * executed. */
int kvp_node_spawn(struct kvp_node *n, uint32_t idx, const char *program, const char *const *extra,
	pid_t *pid, int *pidfd);

/* kvp_node_serve answers all waiting callers of the control socket; never blocks. *denied counts callers of
 * another user. Returns the number answered. */
int kvp_node_serve(struct kvp_node *n, uint32_t *denied);

/* kvp_node_drop closes region, index segment, configuration and eventfds. kvp_node_close also removes the
 * socket name and closes the rest; the lock file's name stays. */
void kvp_node_drop(struct kvp_node *n);
void kvp_node_close(struct kvp_node *n);
#endif
