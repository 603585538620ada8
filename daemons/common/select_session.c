/* Sessions that stick to a worker: what selections and bookings do with the table of shm/affinity.h. */
#include "daemons/common/select_priv.h"
#include <kvpick/clock.h>

#include <inttypes.h>

#define FORCE_MAX 4 /* departed targets replaced by one commit */

static struct kvp_affinity *table(struct kvp_selection *s)
{
	return &s->region->affinity;
}

static int is_schedulable(const struct kvp_selection *s, struct kvp_affinity_target t)
{
	for (uint32_t i = 0; i < s->rank_cnt; i++)
		if (s->rank[i].worker_id == t.worker_id && s->rank[i].dp_rank == t.dp_rank)
			return 1;
	return 0;
}

static void wake_waiters(struct kvp_selection *s)
{
	uint32_t slot;
	while (kvp_affinity_waiting(table(s), &slot))
		kvp_slot_wake(&s->region->slots, slot);
}

int kvp_sel_steerable(const struct kvp_selection *s, const struct kvp_select_request *q)
{
	int is_pinned = q->has_pinned == KVP_YES && q->binds_pinned != KVP_YES;
	return s->region->affinity.max && q->session_id.len && !is_pinned && q->has_target != KVP_YES;
}

/* begin says whether the request has to do with the table at all: 1, 0, or 400. */
static int begin(struct kvp_selection *s, const struct kvp_select_request *q)
{
	s->session.hold.kind = KVP_AFFINITY_UNPINNED;
	if (!kvp_sel_steerable(s, q))
		return 0;
	if (q->session_id.len > KVP_SESSION_ID_MAX)
		return kvp_sel_fail(
			s, 400, "session affinity ID must not exceed %d bytes", KVP_SESSION_ID_MAX);
	s->session.key = kvp_affinity_key(table(s), s->part_idx, q->session_id.ptr, q->session_id.len);
	s->session.id = q->session_id;
	return 1;
}

static void steer_to(struct kvp_selection *s, struct kvp_affinity_target t)
{
	s->session.steer = KVP_YES;
	s->session.target = t;
}

int kvp_sel_session_look(struct kvp_selection *s, const struct kvp_select_request *q)
{
	struct kvp_affinity_target t;
	int on = begin(s, q);
	s->session.steer = KVP_NO;
	if (on != 1)
		return on;
	if (kvp_affinity_query(table(s), s->session.key, kvp_clock_mono_ns(), &t) == KVP_OK &&
		is_schedulable(s, t))
		steer_to(s, t);
	return 0;
}

/* hold_live holds, and initialises anew what is bound to a target that has gone. */
static int hold_live(struct kvp_selection *s)
{
	struct kvp_affinity_hold *h = &s->session.hold;
	uint64_t now_ns = kvp_clock_mono_ns();
	int rc = kvp_affinity_hold(table(s), s->session.key, now_ns, NULL, h);
	for (int i = 0; i < FORCE_MAX && rc == KVP_OK && h->kind == KVP_AFFINITY_BOUND; i++) {
		if (is_schedulable(s, h->target))
			return KVP_OK;
		struct kvp_affinity_target gone = h->target;
		rc = kvp_affinity_hold(table(s), s->session.key, now_ns, &gone, h);
	}
	return rc;
}

int kvp_sel_session_hold(struct kvp_selection *s, const struct kvp_select_request *q)
{
	struct kvp_affinity_hold *h = &s->session.hold;
	int on = begin(s, q);
	s->session.steer = KVP_NO;
	if (on != 1)
		return on;
	int rc = hold_live(s);
	if (rc == KVP_ERR_EXISTS && q->no_wait == KVP_YES) {
		kvp_ctr_add(s->ctr, KVP_CTR_AFFINITY_GAVE_UP, 1);
	} else if (rc == KVP_ERR_EXISTS) {
		/* Noted first, then looked again: an end of the initialisation in between is not missed. */
		s->is_noted |= kvp_affinity_wait(table(s), KVP_OWNER_SLOT(s->owner));
		rc = hold_live(s);
		if (rc == KVP_ERR_EXISTS) {
			h->kind = KVP_AFFINITY_UNPINNED;
			kvp_ctr_add(s->ctr, KVP_CTR_AFFINITY_WAITED, 1);
			return KVP_SELECTION_WAIT;
		}
	}
	if (rc)
		h->kind = KVP_AFFINITY_UNPINNED;
	if (h->kind == KVP_AFFINITY_BOUND)
		steer_to(s, h->target);
	return 0;
}

struct kvp_affinity_key kvp_select_waits_for(const struct kvp_selection *s)
{
	return s->session.key;
}

int kvp_select_note(struct kvp_selection *s)
{
	int anew = s->is_noted | kvp_affinity_wait(table(s), KVP_OWNER_SLOT(s->owner));
	s->is_noted = 0;
	return anew;
}

int kvp_select_is_met(struct kvp_selection *s, struct kvp_affinity_key key)
{
	kvp_ctr_add(s->ctr, KVP_CTR_AFFINITY_LOOKED, 1);
	return kvp_affinity_busy(table(s), key);
}

void kvp_sel_session_cancel(struct kvp_selection *s)
{
	if (s->session.hold.kind != KVP_AFFINITY_INIT)
		return;
	kvp_affinity_cancel(table(s), s->session.key, &s->session.hold);
	s->session.hold.kind = KVP_AFFINITY_UNPINNED;
	wake_waiters(s);
}

/* tell_bound leaves a record of a binding, new or confirmed, for the replicas. */
static void tell_bound(struct kvp_selection *s, struct kvp_affinity_target at)
{
	struct kvp_book *b = &s->region->book;
	struct kvp_lifecycle_claim c;
	struct kvp_lifecycle_put r = {.kind = KVP_LIFECYCLE_AFFINITY,
		.part = s->session.key.part,
		.dp_rank = at.dp_rank,
		.worker_id = at.worker_id,
		.id = s->session.id.ptr,
		.id_len = (uint32_t)s->session.id.len};
	if (!b->tell || !s->session.id.len)
		return;
	kvp_lifecycle_claim(b->tell, s->owner, &r, &c);
	kvp_lifecycle_ready(b->tell, &c, s->ctr);
}

/* bind takes a lease for a booking: 0, or 400 when the session is bound elsewhere. */
static int bind_to(struct kvp_selection *s, uint64_t h, uint64_t worker_id, uint32_t dp_rank)
{
	struct kvp_affinity_target at = {worker_id, dp_rank}, other = {0, 0};
	uint64_t now_ns = kvp_clock_mono_ns(), tag = 0;
	enum kvp_affinity_force force = KVP_AFFINITY_KEEP;
	int rc = KVP_ERR_EXISTS;
	for (int i = 0; i < FORCE_MAX && rc == KVP_ERR_EXISTS; i++) {
		rc = kvp_affinity_commit(
			table(s), s->session.key, at, s->set.affinity_mode, force, now_ns, &tag, &other);
		if (rc == KVP_ERR_EXISTS && is_schedulable(s, other))
			break;
		force = KVP_AFFINITY_REPLACE;
	}
	if (rc == KVP_ERR_EXISTS) {
		kvp_affinity_drop(table(s), s->session.key, other);
		kvp_ctr_add(s->ctr, KVP_CTR_AFFINITY_CONFLICT, 1);
	}
	s->session.hold.kind = KVP_AFFINITY_UNPINNED;
	wake_waiters(s);
	if (rc == KVP_ERR_EXISTS)
		return kvp_sel_fail(s, 400,
			"session affinity: the session is bound to worker %" PRIu64 " dp_rank %" PRIu32,
			other.worker_id, other.dp_rank);
	if (tag)
		tell_bound(s, at);
	if (tag && kvp_resv_set_session(&s->region->book, h, tag))
		kvp_affinity_release(table(s), tag, now_ns); /* freed by somebody in this very moment */
	return 0;
}

int kvp_sel_session_bind(struct kvp_selection *s, uint64_t h, uint64_t worker_id, uint32_t dp_rank)
{
	return s->session.hold.kind == KVP_AFFINITY_UNPINNED ? 0 : bind_to(s, h, worker_id, dp_rank);
}

int kvp_sel_session_bind_kept(
	struct kvp_selection *s, const char *session, size_t len, uint64_t h, const struct kvp_sel_rank *r)
{
	if (len == 0 || !s->region->affinity.max)
		return 0;
	s->session.key = kvp_affinity_key(table(s), s->part_idx, session, len);
	s->session.id = (struct kvp_str){session, len};
	return bind_to(s, h, r->worker_id, r->dp_rank);
}

const struct kvp_select_request *kvp_sel_session_request(
	struct kvp_selection *s, const struct kvp_select_request *q)
{
	if (s->session.steer != KVP_YES)
		return q;
	s->session.request = *q;
	s->session.request.has_target = s->session.request.has_target_rank = KVP_YES;
	s->session.request.target_worker_id = s->session.target.worker_id;
	s->session.request.target_dp_rank = s->session.target.dp_rank;
	return &s->session.request;
}

int kvp_selection_end_session(struct kvp_selection *s, enum kvp_part_role role, struct kvp_str model,
	struct kvp_str group, struct kvp_str session_id)
{
	struct kvp_affinity_target t;
	uint32_t part;
	if (!s->region->affinity.max ||
		kvp_cat_part_find(&s->region->cat, role, model.ptr, (uint32_t)model.len, group.ptr,
			(uint32_t)group.len, &part) != KVP_OK)
		return kvp_sel_fail(s, 404, "no such session");
	struct kvp_affinity_key key = kvp_affinity_key(table(s), part, session_id.ptr, session_id.len);
	if (kvp_affinity_query(table(s), key, kvp_clock_mono_ns(), &t) != KVP_OK)
		return kvp_sel_fail(s, 404, "no such session");
	kvp_affinity_drop(table(s), key, t);
	wake_waiters(s);
	kvp_ctr_add(s->ctr, KVP_CTR_AFFINITY_ENDED, 1);
	return 200;
}
