/* ipc/zmq_cursor.c — see zmq_cursor.h. */
#include <kvpick/err.h>
#include <string.h>

#include "ipc/zmq_cursor.h"

const char *kvp_zmq_incomplete_name(enum kvp_zmq_incomplete r)
{
	static const char *const name[] = {
#define X(id, label) label,
		KVP_ZMQ_INCOMPLETE_LIST(X)
#undef X
	};
	return r >= 0 && r < KVP_ZMQ_INCOMPLETE_CNT ? name[r] : "unknown";
}

void kvp_zmq_cursor_init(struct kvp_zmq_cursor *c, int has_replay, uint64_t cooldown_ns)
{
	memset(c, 0, sizeof(*c));
	c->has_replay = has_replay != 0;
	c->cooldown_ns = cooldown_ns;
}

/* A number below the last live one. The oldest of the last resets decides whether this one is believed. */
static enum kvp_zmq_verdict restarted(struct kvp_zmq_cursor *c, uint64_t now_ns)
{
	uint64_t *oldest = &c->reset_ns[c->reset_cnt % KVP_ZMQ_RESET_MAX];
	if (c->reset_cnt >= KVP_ZMQ_RESET_MAX && now_ns - *oldest < KVP_ZMQ_RESET_WINDOW_NS)
		return KVP_ZMQ_FAIL;
	*oldest = now_ns;
	/* Only the order counts; keep the counter from wrapping out of step. */
	c->reset_cnt++;
	if (c->reset_cnt == 2 * KVP_ZMQ_RESET_MAX)
		c->reset_cnt = KVP_ZMQ_RESET_MAX;
	kvp_zmq_cursor_forget(c);
	return KVP_ZMQ_RESET;
}

static void open_replay(struct kvp_zmq_cursor *c, uint64_t start, uint64_t target)
{
	c->is_replaying = 1;
	c->has_bad = 0;
	c->start = start;
	c->target = target;
	c->first = c->last = c->cnt = c->hole_cnt = 0;
}

enum kvp_zmq_verdict kvp_zmq_cursor_live(
	struct kvp_zmq_cursor *c, uint64_t seq, uint64_t now_ns, struct kvp_zmq_gap *gap)
{
	KVP_ASSERT(!c->is_replaying);
	*gap = (struct kvp_zmq_gap){0, 0, KVP_ZMQ_REPLAY_DUE};
	if (c->has_live && seq == c->live)
		return KVP_ZMQ_DUPLICATE;
	if (c->has_live && seq < c->live)
		return restarted(c, now_ns);
	c->live = seq;
	c->has_live = 1;
	int skip_first = c->after_snapshot && !c->has_w;
	c->after_snapshot = 0;
	if (!kvp_zmq_cursor_is_new(c, seq))
		return KVP_ZMQ_STALE;
	uint64_t start = c->has_w ? c->w + 1 : 0;
	if (seq == start || skip_first)
		return KVP_ZMQ_APPLY;
	gap->missing = seq - start;
	gap->start = start;
	if (!c->has_replay)
		gap->why = KVP_ZMQ_NO_ENDPOINT;
	else if (now_ns < c->cooldown_until_ns)
		gap->why = KVP_ZMQ_COOLDOWN;
	if (gap->why != KVP_ZMQ_REPLAY_DUE)
		return KVP_ZMQ_APPLY;
	open_replay(c, start, seq);
	return KVP_ZMQ_REPLAY;
}

int kvp_zmq_cursor_fetch(struct kvp_zmq_cursor *c, uint64_t now_ns, uint64_t *start)
{
	KVP_ASSERT(!c->is_replaying);
	if (!c->has_replay || now_ns < c->cooldown_until_ns)
		return 0;
	*start = c->has_w ? c->w + 1 : 0;
	open_replay(c, *start, *start);
	return 1;
}

int kvp_zmq_cursor_is_new(const struct kvp_zmq_cursor *c, uint64_t seq)
{
	return !c->has_w || seq > c->w;
}

void kvp_zmq_cursor_applied(struct kvp_zmq_cursor *c, uint64_t seq)
{
	c->w = seq;
	c->has_w = 1;
}

void kvp_zmq_cursor_replayed(struct kvp_zmq_cursor *c, uint64_t seq, int is_framed)
{
	KVP_ASSERT(c->is_replaying && kvp_zmq_cursor_is_new(c, seq));
	if (!is_framed) {
		c->has_bad = 1;
		return;
	}
	if (!c->cnt)
		c->first = seq;
	else if (seq != c->last + 1)
		c->hole_cnt++;
	c->last = seq;
	c->cnt++;
	kvp_zmq_cursor_applied(c, seq);
}

static enum kvp_zmq_incomplete classify(const struct kvp_zmq_cursor *c, enum kvp_zmq_cause cause)
{
	if (!c->cnt)
		return c->target == c->start && cause == KVP_ZMQ_CAUSE_END ? KVP_ZMQ_COMPLETE : KVP_ZMQ_EMPTY;
	if (c->first > c->start)
		return KVP_ZMQ_STARTED_AFTER;
	if (c->hole_cnt)
		return KVP_ZMQ_NON_CONTIGUOUS;
	return c->last + 1 < c->target ? KVP_ZMQ_ENDED_BEFORE : KVP_ZMQ_COMPLETE;
}

int kvp_zmq_cursor_covered(const struct kvp_zmq_cursor *c)
{
	return c->cnt && c->last + 1 >= c->target;
}

enum kvp_zmq_incomplete kvp_zmq_cursor_replay_end(
	struct kvp_zmq_cursor *c, enum kvp_zmq_cause cause, uint64_t now_ns)
{
	enum kvp_zmq_incomplete r = classify(c, cause);
	int is_silence = !c->cnt && !c->has_bad && c->target == c->start;
	c->is_replaying = 0;
	if (cause != KVP_ZMQ_CAUSE_ABORTED && !is_silence)
		c->cooldown_until_ns = r != KVP_ZMQ_COMPLETE || c->has_bad ? now_ns + c->cooldown_ns : 0;
	return r;
}

void kvp_zmq_cursor_forget(struct kvp_zmq_cursor *c)
{
	c->has_w = c->has_live = c->after_snapshot = 0;
	c->cooldown_until_ns = 0;
}

void kvp_zmq_cursor_set_replay(struct kvp_zmq_cursor *c, int has_replay)
{
	c->has_replay = has_replay != 0;
	c->cooldown_until_ns = 0;
}
