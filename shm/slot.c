#include "shm/slot.h"

#include <kvpick/point.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define MAGIC 0x31544f4c535650ULL /* "PVSLOT1" */
#define LAYOUT 1

static const char *const role_name[KVP_ROLE_CNT] = {
	"none", "supervisor", "indexer", "httpd", "extproc", "peer", "discovery", "ctl"};
static const char *const ctl_name[] = {"BOOT", "RUN", "DRAIN", "HALT", "FAIL"};
#define CTL_CNT (sizeof(ctl_name) / sizeof(ctl_name[0]))

static uint32_t layout_hash(void)
{
	const size_t w[] = {sizeof(struct kvp_slot_shm), offsetof(struct kvp_slot_shm, beat_ms),
		offsetof(struct kvp_slot_shm, control), offsetof(struct kvp_slot_shm, wake_need)};
	return kvp_obj_hash(w, sizeof(w) / sizeof(w[0]));
}

uint64_t kvp_slot_align(void)
{
	return KVP_FALSE_SHARE;
}

uint64_t kvp_slot_footprint(const struct kvp_geom *g)
{
	if (!g || g->slot_max == 0 || g->slot_max > KVP_SLOT_MAX)
		return 0;
	return KVP_FALSE_SHARE + (uint64_t)g->slot_max * sizeof(struct kvp_slot_shm);
}

int kvp_slot_new(void *mem, const struct kvp_geom *g)
{
	uint64_t fp = kvp_slot_footprint(g);
	if (!mem || ((uintptr_t)mem & (KVP_FALSE_SHARE - 1)) || !fp)
		return KVP_ERR_INVAL;
	kvp_obj_begin(mem, LAYOUT, layout_hash(), fp, g->region_gen);
	kvp_obj_ready(mem, MAGIC);
	return KVP_OK;
}

int kvp_slot_join(void *mem, const struct kvp_geom *g, struct kvp_slots *out)
{
	int rc = kvp_obj_join(mem, MAGIC, LAYOUT, layout_hash());
	if (rc)
		return rc;
	struct kvp_objhdr *h = mem;
	if (h->footprint != kvp_slot_footprint(g))
		return KVP_ERR_LAYOUT;
	out->hdr = h;
	out->slot = (struct kvp_slot_shm *)(void *)((char *)mem + KVP_FALSE_SHARE);
	out->slot_max = g->slot_max;
	out->lock_fd = -1;
	out->wake_fd = NULL;
	out->self = 0;
	return KVP_OK;
}

void kvp_slot_leave(struct kvp_slots *s)
{
	memset(s, 0, sizeof(*s));
	s->lock_fd = -1;
}

int kvp_slot_delete(void *mem)
{
	kvp_obj_delete(mem);
	return KVP_OK;
}

uint64_t kvp_slot_check(const struct kvp_slots *s)
{
	uint64_t faults = 0;
	if (!s->hdr || kvp_ld_acq_u64(&s->hdr->magic) != MAGIC)
		return 1;
	for (uint32_t i = 0; i < s->slot_max; i++) {
		const struct kvp_slot_shm *p = &s->slot[i];
		kvp_owner o = kvp_ld_acq_u32(&p->owner);
		const char *what = NULL;
		if (o && KVP_OWNER_SLOT(o) != i)
			what = "owner names another slot";
		else if (o && KVP_OWNER_GEN(o) != kvp_ld_rlx_u32(&p->gen) && kvp_slot_owner(s, i) == o)
			what = "owner names another generation";
		else if (kvp_ld_rlx_u32(&p->role) >= KVP_ROLE_CNT)
			what = "role out of range";
		else if (kvp_ld_rlx_u32(&p->state) > KVP_SLOT_ACTIVE)
			what = "state out of range";
		else if (kvp_ld_rlx_u32(&p->control) >= CTL_CNT)
			what = "control word out of range";
		else if (kvp_ld_rlx_u32(&p->wake_need) > 1)
			what = "wake word out of range";
		if (what && faults++ < 10)
			fprintf(stderr, "slot.check: slot %u: %s\n", i, what);
	}
	return faults;
}

kvp_owner kvp_slot_assign(struct kvp_slots *s, uint32_t idx, enum kvp_role role, uint32_t instance)
{
	if (idx >= s->slot_max || role <= KVP_ROLE_NONE || role >= KVP_ROLE_CNT)
		return 0;
	struct kvp_slot_shm *p = &s->slot[idx];
	if (kvp_ld_acq_u32(&p->owner))
		return 0;
	uint32_t gen = (kvp_ld_rlx_u32(&p->gen) + 1) & 0xffffffu;
	gen = gen ? gen : 1;
	kvp_st_rlx_u32(&p->gen, gen);
	kvp_st_rlx_u32(&p->role, (uint32_t)role);
	kvp_st_rlx_u32(&p->instance, instance);
	kvp_st_rlx_u32(&p->control, KVP_CTL_BOOT);
	kvp_st_rlx_u32(&p->pid, 0);
	kvp_st_rlx_u64(&p->beat_ms, 0);
	kvp_st_rlx_u32(&p->wake_need, 0);
	kvp_st_rlx_u32(&p->state, KVP_SLOT_ASSIGNED);
	kvp_st_rel_u32(&p->owner, KVP_OWNER(idx, gen)); /* pairs with: kvp_slot_owner */
	return KVP_OWNER(idx, gen);
}

static uint64_t mono_ms(void)
{
	struct timespec ts;
	clock_gettime(CLOCK_MONOTONIC, &ts);
	return (uint64_t)ts.tv_sec * 1000 + (uint64_t)ts.tv_nsec / 1000000;
}

int kvp_slot_activate(struct kvp_slots *s, kvp_owner owner)
{
	uint32_t idx = KVP_OWNER_SLOT(owner);
	if (!owner || idx >= s->slot_max || kvp_ld_acq_u32(&s->slot[idx].owner) != owner)
		return KVP_ERR_FENCED;
	struct kvp_slot_shm *p = &s->slot[idx];
	uint64_t now = mono_ms();
	kvp_st_rlx_u32(&p->pid, (uint32_t)getpid());
	kvp_st_rlx_u64(&p->start_ms, now);
	kvp_st_rlx_u64(&p->beat_ms, now);
	kvp_st_rel_u32(&p->control, KVP_CTL_BOOT);
	kvp_st_rel_u32(&p->state, KVP_SLOT_ACTIVE);
	s->self = owner;
	return KVP_OK;
}

int kvp_slot_release(struct kvp_slots *s, kvp_owner owner)
{
	uint32_t idx = KVP_OWNER_SLOT(owner);
	if (!owner || idx >= s->slot_max || kvp_ld_acq_u32(&s->slot[idx].owner) != owner)
		return KVP_ERR_NOTFOUND;
	struct kvp_slot_shm *p = &s->slot[idx];
	kvp_st_rel_u32(&p->control, KVP_CTL_HALT);
	kvp_st_rlx_u32(&p->wake_need, 0);
	kvp_st_rel_u32(&p->state, KVP_SLOT_FREE);
	kvp_st_rel_u32(&p->owner, 0);
	return KVP_OK;
}

kvp_owner kvp_slot_owner(const struct kvp_slots *s, uint32_t idx)
{
	return idx < s->slot_max ? kvp_ld_acq_u32(&s->slot[idx].owner) : 0; /* pairs with: kvp_slot_assign */
}

int kvp_slot_find(const struct kvp_slots *s, enum kvp_role role, uint32_t instance, uint32_t *idx)
{
	for (uint32_t i = 0; i < s->slot_max; i++)
		if (kvp_ld_rlx_u32(&s->slot[i].role) == (uint32_t)role &&
			kvp_ld_rlx_u32(&s->slot[i].instance) == instance) {
			*idx = i;
			return KVP_OK;
		}
	return KVP_ERR_NOTFOUND;
}

void kvp_slot_beat(struct kvp_slots *s, uint32_t idx, uint64_t now_ms)
{
	if (idx < s->slot_max)
		kvp_st_rlx_u64(&s->slot[idx].beat_ms, now_ms);
}

void kvp_slot_control(struct kvp_slots *s, uint32_t idx, enum kvp_ctl v)
{
	if (idx < s->slot_max)
		kvp_st_rel_u32(&s->slot[idx].control, (uint32_t)v); /* pairs with: kvp_slot_control_get */
}

enum kvp_ctl kvp_slot_control_get(const struct kvp_slots *s, uint32_t idx)
{
	uint32_t v = idx < s->slot_max ? kvp_ld_acq_u32(&s->slot[idx].control) : KVP_CTL_HALT;
	return v < CTL_CNT ? (enum kvp_ctl)v : KVP_CTL_HALT;
}

const char *kvp_role_name(enum kvp_role r)
{
	return (unsigned)r < KVP_ROLE_CNT ? role_name[r] : "?";
}

const char *kvp_ctl_name(enum kvp_ctl c)
{
	return (unsigned)c < CTL_CNT ? ctl_name[c] : "?";
}

static struct flock byte_of(uint32_t byte)
{
	struct flock f = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = (off_t)byte, .l_len = 1};
	return f;
}

int kvp_lock_byte(int fd, uint32_t byte)
{
	struct flock f = byte_of(byte);
	if (fcntl(fd, F_OFD_SETLK, &f) == 0)
		return KVP_OK;
	return errno == EAGAIN || errno == EACCES ? KVP_ERR_EXISTS : KVP_ERR_SYS;
}

int kvp_lock_held(int fd, uint32_t byte)
{
	struct flock f = byte_of(byte);
	if (fcntl(fd, F_OFD_GETLK, &f) != 0)
		return KVP_ERR_SYS;
	return f.l_type != F_UNLCK;
}

int kvp_slot_lock(int fd, uint32_t idx)
{
	return kvp_lock_byte(fd, 1 + idx);
}

int kvp_slot_alive(int fd, uint32_t idx)
{
	return kvp_lock_held(fd, 1 + idx);
}

int kvp_owner_dead(void *ctx, kvp_owner owner)
{
	const struct kvp_slots *s = ctx;
	uint32_t idx = KVP_OWNER_SLOT(owner);
	if (owner && owner == s->self)
		return 0;
	if (!owner || idx >= s->slot_max || kvp_slot_owner(s, idx) != owner)
		return 1;
	if (s->lock_fd < 0 || kvp_slot_alive(s->lock_fd, idx) != 0)
		return 0;
	/* The byte of an owner that is only assigned is free too, but such an owner has no records yet. */
	return 1;
}

void kvp_slot_sleep(struct kvp_slots *s)
{
	uint32_t idx = KVP_OWNER_SLOT(s->self);
	if (s->self && idx < s->slot_max)
		/* Store, then the caller's loads of its queues: seq_cst. pairs with: kvp_slot_wake, stores
		 * the work first and loads wake_need second. One of the two sees the other. */
		kvp_xchg_sc_u32(&s->slot[idx].wake_need, 1);
}

void kvp_slot_awake(struct kvp_slots *s)
{
	uint32_t idx = KVP_OWNER_SLOT(s->self);
	if (!s->self || idx >= s->slot_max)
		return;
	kvp_st_rlx_u32(&s->slot[idx].wake_need, 0);
	uint64_t n;
	if (s->wake_fd && s->wake_fd[idx] >= 0 && read(s->wake_fd[idx], &n, sizeof(n)) < 0)
		return; /* nothing to drain */
}

int kvp_slot_wake(struct kvp_slots *s, uint32_t idx)
{
	if (idx >= s->slot_max || !s->wake_fd || s->wake_fd[idx] < 0)
		return 0;
	kvp_fence_sc(); /* store of work before load of wake_need; pairs with: kvp_slot_sleep */
	if (!kvp_ld_rlx_u32(&s->slot[idx].wake_need) || !kvp_xchg_sc_u32(&s->slot[idx].wake_need, 0))
		return 0;
	KVP_POINT("slot:wake");
	const uint64_t one = 1;
	return write(s->wake_fd[idx], &one, sizeof(one)) == (ssize_t)sizeof(one);
}
