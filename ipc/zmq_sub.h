/* ipc/zmq_sub.h — the listener of one rank endpoint: live SUB socket, replay DEALER socket, cursor.
 *
 * Shape      one struct kvp_zmq_sub a registered rank; a decoder thread owns many and polls them together.
 * Truth      the cursor (zmq_cursor.h).
 * Writers    the thread that opened it: ZMQ sockets must not be shared. kvp_zmq_sub_stats and _state may be
 *            read by the same thread only; publish copies.
 * Who        indexer's decoder threads.
 * Ordering   batches come to on_batch in the order of their numbers; on_reset comes before the batches of
 *            the new publisher.
 * Lifetime   open to close. A closed and reopened listener has forgotten its watermark.
 * Crash      everything is lost; the publisher keeps its replay buffer, the next process asks from 0, or from
 *            where its caller says that the last one stopped (resume).
 * Proved by  tests/t_zmq_sub.c (real PUB and ROUTER), tests/v_kv_events.c.
 *
 * While a replay runs, the live socket is not read: its messages wait there in order (high-water mark). A
 * replay never lasts longer than stall_ms without a new batch, nor KVP_ZMQ_REPLAY_TOTAL_MS in total; then the
 * DEALER is closed and opened again, so a late answer can't be taken for the next one's. Replies that
 * nobody asked for are dropped. With fetch the listener asks by itself once the live socket has shaken hands,
 * and a second time KVP_ZMQ_FETCH_AGAIN_MS later if no live batch came (the first answer may be older than
 * the subscription); a live batch makes that needless: its number shows what is missing. Both published
 * framings and the oldest end marker are understood.
 */
#ifndef KVP_IPC_ZMQ_SUB_H
#define KVP_IPC_ZMQ_SUB_H

#include <kvpick/err.h>
#include <stddef.h>
#include <stdint.h>

#include "ipc/zmq_cursor.h"

#define KVP_ZMQ_ENDPOINT_MAX 1024        /* bytes */
#define KVP_ZMQ_MSG_MAX_BYTES (64 << 20) /* least limit: longer frames cost a publisher its connection */
#define KVP_ZMQ_STALL_MS 5000            /* default: replay without progress */
#define KVP_ZMQ_COVERED_STALL_MS 500     /* the same when only the end marker is missing */
#define KVP_ZMQ_REPLAY_TOTAL_MS 120000
#define KVP_ZMQ_COOLDOWN_MS 30000 /* default */
#define KVP_ZMQ_NO_COOLDOWN UINT32_MAX
#define KVP_ZMQ_FETCH_AGAIN_MS 1000
#define KVP_ZMQ_RCVHWM 100000     /* default: what publishers use */

enum kvp_zmq_source { KVP_ZMQ_LIVE, KVP_ZMQ_REPLAYED };

enum kvp_zmq_state {
	KVP_ZMQ_PENDING,     /* not connected yet */
	KVP_ZMQ_BUFFERING,   /* connected; waits for kvp_zmq_sub_ready */
	KVP_ZMQ_CATCHING_UP, /* drains what was buffered */
	KVP_ZMQ_ACTIVE,
	KVP_ZMQ_FAILED, /* see kvp_zmq_sub_error; stays so until closed or tried again */
	KVP_ZMQ_STATE_CNT
};

enum kvp_zmq_gate { KVP_ZMQ_GATE_OPEN, KVP_ZMQ_GATE_SHUT };
/* Whether missing batches are asked for before a live one shows that they are missing. */
enum kvp_zmq_fetch { KVP_ZMQ_FETCH_ON_GAP, KVP_ZMQ_FETCH_AT_ONCE };

/* What happens to a rank's blocks when batches are lost for good: no replay is made of a gap, or it lacks
 * some. CLEAR: on_reset comes before the next batch, or the first one of a replay that begins too late. */
enum kvp_zmq_loss { KVP_ZMQ_LOSS_KEEP, KVP_ZMQ_LOSS_CLEAR };
/* Why a rank is to be cleared. */
enum kvp_zmq_why { KVP_ZMQ_WHY_RESTART, KVP_ZMQ_WHY_LOSS };

/* Where the listener of an earlier process stopped, for the same rank and publisher address. */
struct kvp_zmq_resume {
	uint8_t has_w, has_live; /* 0 = unset */
	uint64_t w, live;        /* last batch applied, last one that came live */
};

struct kvp_zmq_sub_cfg {
	void *zmq;                      /* ZMQ context */
	const char *endpoint;           /* copied */
	const char *replay_endpoint;    /* copied; NULL or "" = none */
	enum kvp_zmq_gate gate;         /* SHUT: buffer until kvp_zmq_sub_ready */
	enum kvp_zmq_fetch fetch;
	int rcvhwm;                     /* messages; 0 = default, -1 = unlimited */
	uint32_t stall_ms, cooldown_ms; /* 0 = default; KVP_ZMQ_NO_COOLDOWN = every gap is replayed */
	uint64_t frame_max;             /* bytes; counts above KVP_ZMQ_MSG_MAX_BYTES */
	enum kvp_zmq_loss loss;
	const struct kvp_zmq_resume *resume; /* NULL: start unset. Not used after open. */
	void *ctx;
	/* One batch: KVP_OK (framed: the watermark moves), KVP_ERR_AGAIN (no room: offered again by the next
	 * kvp_zmq_sub_work, nothing is read meanwhile), anything else: could not be framed, counted. */
	int (*on_batch)(void *ctx, uint64_t seq, const void *payload, size_t len, enum kvp_zmq_source src);
	/* A new publisher, or a loss: clear the rank, all tiers, behind everything delivered so far. KVP_OK
	 * or KVP_ERR_AGAIN. */
	int (*on_reset)(void *ctx, enum kvp_zmq_why why);
};

struct kvp_zmq_stats {
	uint64_t received; /* live messages */
	uint64_t applied;  /* live batches */
	uint64_t replayed; /* replayed batches */
	uint64_t stale, duplicate;
	uint64_t bad_frames;            /* live messages with wrong frames */
	uint64_t unframed;              /* live or replayed batches that on_batch refused */
	uint64_t gaps;                  /* holes in the live numbers, first message above 0 not counted */
	uint64_t missing;               /* batches in those holes */
	uint64_t late_start;            /* first message above 0 */
	uint64_t no_endpoint, cooldown; /* replays not made */
	uint64_t replays;               /* requested */
	uint64_t fetches;               /* of these, before any gap was seen */
	uint64_t ended[KVP_ZMQ_CAUSE_CNT];
	uint64_t incomplete[KVP_ZMQ_INCOMPLETE_CNT]; /* [KVP_ZMQ_COMPLETE] counts the complete ones */
	uint64_t replies_dropped;                    /* not asked for, or older than the watermark */
	uint64_t restarts;
	uint64_t retries; /* of a failed listener */
};

struct kvp_zmq_sub;

/* kvp_zmq_ctx_new makes a ZMQ context with room for sub_max listeners. NULL: errno is set. Free it with
 * zmq_ctx_term after all listeners are closed. */
void *kvp_zmq_ctx_new(uint32_t sub_max);

/* kvp_zmq_sub_open connects. An address that ZMQ refuses to connect to, or no socket to be had, is no error:
 * the listener is KVP_ZMQ_FAILED. return: KVP_OK, KVP_ERR_INVAL (endpoint, callbacks), KVP_ERR_FULL (no
 * memory). */
int kvp_zmq_sub_open(const struct kvp_zmq_sub_cfg *cfg, struct kvp_zmq_sub **out);
void kvp_zmq_sub_close(struct kvp_zmq_sub *s); /* NULL allowed; no callback afterwards */

/* kvp_zmq_sub_retry connects a FAILED listener anew (anything else: KVP_OK, nothing happens). If publisher
 * restarts were the reason, on_reset comes first, the watermark is unset, and one more restart within
 * KVP_ZMQ_RESET_WINDOW_NS fails again. What was missed is fetched at once. KVP_ERR_SYS: failed again. */
int kvp_zmq_sub_retry(struct kvp_zmq_sub *s);
/* kvp_zmq_sub_ready opens the gate. kvp_zmq_sub_after_snapshot: the rank's state came from a peer, so the
 * first live batch needs no replay from 0. kvp_zmq_sub_set_replay changes (NULL: removes) the replay
 * address; a running replay ends, the cooldown, too; KVP_ERR_INVAL if the address is bad (nothing changed).
 * */
void kvp_zmq_sub_ready(struct kvp_zmq_sub *s);
void kvp_zmq_sub_after_snapshot(struct kvp_zmq_sub *s);
int kvp_zmq_sub_set_replay(struct kvp_zmq_sub *s, const char *replay_endpoint);

/* kvp_zmq_sub_work handles up to msg_max messages without blocking.
 * return     messages handled; msg_max means there may be more. After fewer, nothing is left (so it is
 *            right to sleep on the edge-triggered descriptors), or on_batch said KVP_ERR_AGAIN
 *            (kvp_zmq_sub_is_blocked). */
uint32_t kvp_zmq_sub_work(struct kvp_zmq_sub *s, uint32_t msg_max);
int kvp_zmq_sub_is_blocked(const struct kvp_zmq_sub *s);
/* kvp_zmq_sub_deadline_ns: CLOCK_MONOTONIC time at which work must be called even if nothing comes (replay
 * time-out); 0 = none. */
uint64_t kvp_zmq_sub_deadline_ns(const struct kvp_zmq_sub *s);
/* kvp_zmq_sub_fds: the ZMQ_FD of both sockets, -1 where there is none. They signal readability by edges: call
 * work until it returns less than msg_max. The handshake that a fetch waits for is not told by them, only
 * kvp_zmq_sub_poll waits for it. fd[1] changes after a replay time-out and with set_replay: ask
 * again after work. */
void kvp_zmq_sub_fds(const struct kvp_zmq_sub *s, int fd[2]);

/* kvp_zmq_sub_poll waits for messages of cnt listeners of this thread (entries may be NULL), for wake_fd
 * (-1 = none), for replay deadlines or timeout_ms (-1 = no limit), then works on those that are ready, up
 * to msg_max messages each. Blocked listeners are not polled, only worked on at the start.
 * return     messages handled; *is_woken (NULL allowed): wake_fd is readable (the caller reads it).
 *            KVP_ERR_SYS. */
int kvp_zmq_sub_poll(
	struct kvp_zmq_sub **sub, uint32_t cnt, int wake_fd, int timeout_ms, uint32_t msg_max, int *is_woken);

enum kvp_zmq_state kvp_zmq_sub_state(const struct kvp_zmq_sub *s);
const char *kvp_zmq_sub_error(const struct kvp_zmq_sub *s); /* "" if not failed */
/* kvp_zmq_sub_is_connected: has the live socket finished a handshake with the publisher (and not lost it)? */
int kvp_zmq_sub_is_connected(struct kvp_zmq_sub *s);
/* kvp_zmq_sub_look: to be called several times a second. A listener whose connection the library has ended
 * without trying again (zmq_monitor.h) becomes FAILED after KVP_ZMQ_GIVEN_UP_MS, so that it can be tried
 * again. */
void kvp_zmq_sub_look(struct kvp_zmq_sub *s);
/* kvp_zmq_sub_handshakes counts them since open: the same number, connected both times, means that nothing
 * sent meanwhile was lost on a broken connection. */
uint64_t kvp_zmq_sub_handshakes(struct kvp_zmq_sub *s);
const struct kvp_zmq_stats *kvp_zmq_sub_stats(const struct kvp_zmq_sub *s);
const struct kvp_zmq_cursor *kvp_zmq_sub_cursor(const struct kvp_zmq_sub *s);

/* kvp_zmq_reply_parse looks at one reply as a DEALER receives it, n frames.
 * return     KVP_ZMQ_REPLY_*; for a batch *seq, and the payload is the last frame. */
enum kvp_zmq_reply { KVP_ZMQ_REPLY_BATCH, KVP_ZMQ_REPLY_END, KVP_ZMQ_REPLY_BAD };
struct kvp_zmq_frame {
	const void *p;
	size_t len;
};
enum kvp_zmq_reply kvp_zmq_reply_parse(const struct kvp_zmq_frame *frame, uint32_t n, uint64_t *seq);

/* kvp_zmq_endpoint_check: KVP_OK, or KVP_ERR_INVAL with a one-line text for the client in err[cap]. tcp
 * needs host and port 0..65535 (IPv6 hosts in brackets, "*" allowed), ipc and inproc a non-empty address. */
int kvp_zmq_endpoint_check(const char *endpoint, char *err, size_t cap);
/* kvp_zmq_endpoint_advance writes the address of the rank delta ranks further, as engines derive it: tcp
 * port + delta, inproc suffix _dp<delta>; delta 0 copies. KVP_ERR_INVAL (bad endpoint, ipc), KVP_ERR_LIMIT
 * (port over 65535), KVP_ERR_FULL (cap). */
int kvp_zmq_endpoint_advance(const char *endpoint, uint32_t delta, char *out, size_t cap);
#endif
