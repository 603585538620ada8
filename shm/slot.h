/* shm/slot.h — participant table: which process holds which slot, what it is doing, and how to wake it.
 *
 * Shape      slot_max slots of 384 bytes; slot i belongs to one (role, instance number), fixed at node start.
 *            Slot 0 is the supervisor.
 * Truth      the owner word together with the lock byte 1 + i of the instance's lock file. state, control and
 *            beat mean something only while owner != 0.
 * Writers    supervisor: owner, gen, role, instance, state (assign, release). The slot's process: pid,
 *            control, beat, state ASSIGNED -> ACTIVE. wake_need: its process sets it, any process clears it.
 * Readers    everybody.
 * Ordering   owner is stored with release after the other fields of an assignment and loaded with acquire.
 *            wake_need is store-then-load across two words on both sides and needs sequential consistency:
 *            kvp_slot_sleep and kvp_slot_wake.
 * Lifetime   the table as long as the region; an owner from assign to release.
 * Crash      owner killed: the kernel frees its lock byte; the supervisor reaps it, runs the sweep for
 *            exactly this owner, and only then calls kvp_slot_release. Supervisor killed: every child gets
 *            the parent-death signal; the next supervisor makes a new region.
 * Proved by  tests/t_slot.c, tests/t_owner.c, tests/s_pid.t
 */
#ifndef KVP_SHM_SLOT_H
#define KVP_SHM_SLOT_H

#include "shm/obj.h"

enum kvp_role {
	KVP_ROLE_NONE,
	KVP_ROLE_SUPERVISOR,
	KVP_ROLE_INDEXER,
	KVP_ROLE_HTTPD,
	KVP_ROLE_EXTPROC,
	KVP_ROLE_PEER,
	KVP_ROLE_DISCOVERY,
	KVP_ROLE_CTL,
	KVP_ROLE_CNT
};
enum kvp_slot_state { KVP_SLOT_FREE, KVP_SLOT_ASSIGNED, KVP_SLOT_ACTIVE };
/* Control word: what a process says about itself. */
enum kvp_ctl { KVP_CTL_BOOT, KVP_CTL_RUN, KVP_CTL_DRAIN, KVP_CTL_HALT, KVP_CTL_FAIL };

struct kvp_slot_shm {
	uint32_t owner;    /* kvp_owner, 0 = nobody; supervisor, release */
	uint32_t gen;      /* last generation handed out, 1..2^24-1, wraps past 0; supervisor */
	uint32_t role;     /* enum kvp_role; supervisor */
	uint32_t instance; /* number within the role, from 0; supervisor */
	uint32_t state;    /* enum kvp_slot_state; supervisor and slot's process */
	uint32_t pad0[27];
	uint64_t beat_ms;  /* CLOCK_MONOTONIC ms of the last loop turn; slot's process, relaxed */
	uint64_t start_ms; /* CLOCK_MONOTONIC ms of activation; slot's process */
	uint32_t control;  /* enum kvp_ctl; slot's process, release */
	uint32_t pid;      /* for people and signals only, never for liveness; slot's process */
	uint32_t pad1[26];
	uint32_t wake_need; /* 1 = the process sleeps or is about to; sequentially consistent */
	uint32_t pad2[31];
} __attribute__((aligned(128)));

struct kvp_slots { /* process-local handle */
	struct kvp_objhdr *hdr;
	struct kvp_slot_shm *slot;
	uint32_t slot_max;
	int lock_fd;        /* instance's lock file, -1 = no liveness by lock byte */
	const int *wake_fd; /* slot_max eventfds (-1 = none), or NULL */
	kvp_owner self;     /* this process, 0 = none */
};

uint64_t kvp_slot_align(void);
uint64_t kvp_slot_footprint(const struct kvp_geom *g); /* 0 unless slot_max is 1..KVP_SLOT_MAX */
int kvp_slot_new(void *mem, const struct kvp_geom *g);
/* kvp_slot_join fills out with lock_fd -1, wake_fd NULL and self 0; mem may be mapped read-only. */
int kvp_slot_join(void *mem, const struct kvp_geom *g, struct kvp_slots *out);
void kvp_slot_leave(struct kvp_slots *s);
int kvp_slot_delete(void *mem);
/* kvp_slot_check counts words out of range and owners that name another slot or another generation. */
uint64_t kvp_slot_check(const struct kvp_slots *s);

/* kvp_slot_assign gives slot idx to a process that is about to start.
 * idx      0..slot_max-1, free (owner 0).  role  not NONE.
 * return   the new owner (next generation of the slot), 0 if idx or role is out of range or the slot is
 *          taken.
 * who      supervisor only. blocks no. */
kvp_owner kvp_slot_assign(struct kvp_slots *s, uint32_t idx, enum kvp_role role, uint32_t instance);

/* kvp_slot_activate makes the calling process the active holder: pid, start time, control BOOT, state ACTIVE.
 * return KVP_OK; KVP_ERR_FENCED if the slot's owner is not `owner`. Sets s->self. who: the slot's process,
 * after it took its lock byte. */
int kvp_slot_activate(struct kvp_slots *s, kvp_owner owner);

/* kvp_slot_release ends an ownership: owner 0, state FREE, control HALT. KVP_ERR_NOTFOUND if the slot's
 * owner is not `owner`. who: supervisor, after the sweep for this owner. */
int kvp_slot_release(struct kvp_slots *s, kvp_owner owner);

/* kvp_slot_owner loads the owner word (acquire), 0 = nobody or idx out of range. */
kvp_owner kvp_slot_owner(const struct kvp_slots *s, uint32_t idx);

/* kvp_slot_find gives the index of the slot assigned to (role, instance), owner or not: KVP_ERR_NOTFOUND if
 * none. Bounded scan. */
int kvp_slot_find(const struct kvp_slots *s, enum kvp_role role, uint32_t instance, uint32_t *idx);

/* kvp_slot_beat says "my loop turns"; slot's process, once a turn or every KVPICK_SLOT_BEAT_MS. Wait-free.
 * kvp_slot_control stores the control word (release), kvp_slot_control_get loads it (acquire, HALT if idx is
 * out of range). A missing beat never means dead. */
void kvp_slot_beat(struct kvp_slots *s, uint32_t idx, uint64_t now_ms);
void kvp_slot_control(struct kvp_slots *s, uint32_t idx, enum kvp_ctl v);
enum kvp_ctl kvp_slot_control_get(const struct kvp_slots *s, uint32_t idx);

const char *kvp_role_name(enum kvp_role r); /* "indexer", "httpd" ...; "?" out of range */
const char *kvp_ctl_name(enum kvp_ctl c);   /* "BOOT", "RUN" ...; "?" out of range */

/* ---- liveness: open-file-description byte locks on the lock file ---- */
#define KVP_LOCK_BYTE_NODE 0u /* held by the supervisor; byte 1 + idx by the process in slot idx */

/* kvp_slot_lock takes the byte of slot idx (kvp_lock_byte: any byte) for the open file description of fd; it
 * is held until that description is closed in every process that has it, so: open the file after exec,
 * close-on-exec, never fork afterwards. KVP_ERR_EXISTS if another description holds it, KVP_ERR_SYS. Does
 * not block. */
int kvp_slot_lock(int fd, uint32_t idx);
int kvp_lock_byte(int fd, uint32_t byte);
/* kvp_slot_alive answers 1 if some other description holds the byte of slot idx, 0 if it is free (also when
 * only fd itself holds it), KVP_ERR_SYS. kvp_lock_held: the same for any byte. About 1 us. */
int kvp_slot_alive(int fd, uint32_t idx);
int kvp_lock_held(int fd, uint32_t byte);

/* kvp_owner_dead: is this owner gone for good?
 * ctx      a struct kvp_slots * (the signature suits the callbacks of other objects).
 * owner    as stored in a record; any garbage is allowed.
 * return   1 if the slot's generation moved on or its lock byte is free (0 and impossible owners are dead
 *          too); 0 if it lives, is stopped, is the caller, or nothing can be said (no lock file).
 * blocks   no; one system call. */
int kvp_owner_dead(void *ctx, kvp_owner owner);

/* ---- wake-ups ---- */

/* kvp_slot_sleep announces that the caller is going to wait on its own eventfd: sets wake_need, full barrier.
 * The caller then looks into all its queues once more, and only if they are empty waits (poll or io_uring,
 * with a time-out). kvp_slot_awake clears the word after the wait and drains the eventfd. who: the slot's
 * process, one thread. Pairs with: kvp_slot_wake. */
void kvp_slot_sleep(struct kvp_slots *s);
void kvp_slot_awake(struct kvp_slots *s);

/* kvp_slot_wake wakes the process in slot idx if it asked for it: full barrier, wake_need 1 -> 0, one write
 * to its eventfd. Call it after the store that gives the sleeper work. Wait-free, any process; idx out of
 * range or without an eventfd is ignored. return 1 if a write was made, 0 if not.
 * A waker killed between the two leaves wake_need 0 and no write: sleepers therefore wait with a time-out
 * (KVP_SLEEP_MAX_MS). */
int kvp_slot_wake(struct kvp_slots *s, uint32_t idx);
#define KVP_SLEEP_MAX_MS 50
#endif
