/* ipc/zmq_cursor.h — what to do with sequence numbers: gaps, replays, duplicates, restarted publishers.
 *
 * Shape      a pure state machine of one rank endpoint: numbers in, verdicts out; no socket, no clock of
 *            its own.
 * Truth      w: last applied batch (watermark). live: last number received on the live socket.
 * Writers    the listener's thread (zmq_sub.c).
 * Who        the same.
 * Ordering   none: process-local memory.
 * Lifetime   a registration of a rank: a new registration starts with an unset watermark.
 * Crash      lost with the process; the next one starts unset, or at the kept marks (zmq_sub.h).
 * Proved by  tests/v_kv_events.c (cursor and replay vectors), tests/t_zmq_sub.c.
 *
 * A live number equal to the last live one is a duplicate; a smaller one can only come from a new publisher
 * (one connection delivers in order): clear the rank, start unset. w is no measure for that, a replay moves
 * it ahead. A replay that ends incomplete or held a bad batch starts a cooldown in which gaps are counted,
 * not repaired; a fetch that nobody answered does not.
 */
#ifndef KVP_IPC_ZMQ_CURSOR_H
#define KVP_IPC_ZMQ_CURSOR_H

#include <stdint.h>

#define KVP_ZMQ_RESET_MAX 3 /* resets within KVP_ZMQ_RESET_WINDOW_NS that are believed */
#define KVP_ZMQ_RESET_WINDOW_NS (60ull * 1000000000ull)
#define KVP_ZMQ_SEQ_END UINT64_MAX /* marks the end of a replay; never a batch */

enum kvp_zmq_verdict {
	KVP_ZMQ_APPLY,
	KVP_ZMQ_REPLAY,    /* request from gap.start, then apply if kvp_zmq_cursor_is_new */
	KVP_ZMQ_STALE,     /* applied before */
	KVP_ZMQ_DUPLICATE, /* same number as the last live one */
	KVP_ZMQ_RESET,     /* new publisher: clear the rank, then ask again with the same number */
	KVP_ZMQ_FAIL       /* too many resets: several publishers behind one address */
};

enum kvp_zmq_no_replay { KVP_ZMQ_REPLAY_DUE, KVP_ZMQ_NO_ENDPOINT, KVP_ZMQ_COOLDOWN };

struct kvp_zmq_gap {
	uint64_t missing; /* batches between the watermark and this one; 0 = contiguous, first or not newer */
	uint64_t start;   /* first one wanted */
	enum kvp_zmq_no_replay why; /* with missing > 0 and KVP_ZMQ_APPLY: why there is no replay */
};

enum kvp_zmq_cause {           /* how a replay ended */
	KVP_ZMQ_CAUSE_END,     /* end marker */
	KVP_ZMQ_CAUSE_TIMEOUT, /* no progress */
	KVP_ZMQ_CAUSE_BROKEN,  /* a reply that is no reply, or the request could not be sent */
	KVP_ZMQ_CAUSE_ABORTED, /* the replay address changed: no cooldown */
	KVP_ZMQ_CAUSE_CNT
};

/* What a replay lacked, first reason that holds. X(id, label) */
#define KVP_ZMQ_INCOMPLETE_LIST(X)                                                                           \
	X(COMPLETE, "complete")                                                                              \
	X(EMPTY, "empty")                                                                                    \
	X(STARTED_AFTER, "started_after_requested")                                                          \
	X(NON_CONTIGUOUS, "non_contiguous")                                                                  \
	X(ENDED_BEFORE, "ended_before_target")
enum kvp_zmq_incomplete {
#define X(id, label) KVP_ZMQ_##id,
	KVP_ZMQ_INCOMPLETE_LIST(X)
#undef X
		KVP_ZMQ_INCOMPLETE_CNT
};
const char *kvp_zmq_incomplete_name(enum kvp_zmq_incomplete r);

struct kvp_zmq_cursor {
	uint64_t w, live;
	uint8_t has_w, has_live;
	uint8_t after_snapshot; /* the first live batch needs no replay from 0: the state came from a peer */
	uint8_t has_replay;     /* there is a replay endpoint */
	uint8_t is_replaying, has_bad;
	uint64_t start, target; /* of the replay: wanted [start, target) */
	uint64_t first, last, cnt, hole_cnt;
	uint64_t cooldown_ns, cooldown_until_ns;
	uint64_t reset_ns[KVP_ZMQ_RESET_MAX];
	uint32_t reset_cnt;
};

/* kvp_zmq_cursor_init starts unset. has_replay: 0 or 1. */
void kvp_zmq_cursor_init(struct kvp_zmq_cursor *c, int has_replay, uint64_t cooldown_ns);

/* kvp_zmq_cursor_live judges the number of a live message (never KVP_ZMQ_SEQ_END). Not while replaying.
 * KVP_ZMQ_REPLAY has opened the replay: kvp_zmq_cursor_replay_end must follow. gap is always set. */
enum kvp_zmq_verdict kvp_zmq_cursor_live(
	struct kvp_zmq_cursor *c, uint64_t seq, uint64_t now_ns, struct kvp_zmq_gap *gap);
/* kvp_zmq_cursor_fetch opens a replay that no live message asked for: everything behind the watermark (from 0
 * if it is unset). Nothing is known to be missing, so an answer without batches is complete, and silence
 * starts no cooldown. 1: *start is set, kvp_zmq_cursor_replay_end must follow. 0: no endpoint, or in the
 * cooldown. */
int kvp_zmq_cursor_fetch(struct kvp_zmq_cursor *c, uint64_t now_ns, uint64_t *start);
/* kvp_zmq_cursor_is_new: is seq beyond the watermark? */
int kvp_zmq_cursor_is_new(const struct kvp_zmq_cursor *c, uint64_t seq);
/* kvp_zmq_cursor_applied moves the watermark; not called for a live batch that could not be framed. */
void kvp_zmq_cursor_applied(struct kvp_zmq_cursor *c, uint64_t seq);
/* kvp_zmq_cursor_replayed records a replayed batch that is_new let through; is_framed 0: bad, watermark
 * stays. */
void kvp_zmq_cursor_replayed(struct kvp_zmq_cursor *c, uint64_t seq, int is_framed);
/* kvp_zmq_cursor_covered: has the replay brought everything up to its target? */
int kvp_zmq_cursor_covered(const struct kvp_zmq_cursor *c);
enum kvp_zmq_incomplete kvp_zmq_cursor_replay_end(
	struct kvp_zmq_cursor *c, enum kvp_zmq_cause cause, uint64_t now_ns);
/* kvp_zmq_cursor_forget unsets watermark and last live number; resets seen so far are not forgotten. */
void kvp_zmq_cursor_forget(struct kvp_zmq_cursor *c);
/* kvp_zmq_cursor_set_replay: the replay address changed or went (ends the cooldown). */
void kvp_zmq_cursor_set_replay(struct kvp_zmq_cursor *c, int has_replay);
#endif
