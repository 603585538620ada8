/* ipc/zmq_sub.c — sockets around the cursor, see zmq_sub.h.
 *
 * One live message at a time is held from the moment it was read until it is settled: first a reset or a
 *     replay may
 * have to come before it, and the consumer may have no room. Nothing is read from the live socket meanwhile.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <zmq.h>

#include "ipc/zmq_monitor.h"
#include "ipc/zmq_sub.h"

#define FRAME_MAX 5
#define SOCKETS_PER_SUB 4 /* live, replay, and two ends of the monitor */
#define NS_PER_MS 1000000ull
#define POLL_STACK 256
#define DROP_MAX 1000 /* replies nobody asked for; beyond, a new socket is cheaper */

#define FETCHES 2
#define ITEMS 3 /* poll items of one listener */

enum held { HELD_NONE, HELD_JUDGE, HELD_RESET, HELD_WAIT, HELD_CLEAR, HELD_APPLY };

struct kvp_zmq_sub {
	struct kvp_zmq_sub_cfg cfg;
	char endpoint[KVP_ZMQ_ENDPOINT_MAX + 1], replay_endpoint[KVP_ZMQ_ENDPOINT_MAX + 1];
	void *live, *dealer;
	struct kvp_zmq_monitor monitor; /* of live */
	enum kvp_zmq_state state;
	char error[160];
	struct kvp_zmq_cursor cursor;
	struct kvp_zmq_stats stats;
	enum held held; /* what the live message in msg waits for */
	zmq_msg_t msg, reply;
	uint64_t msg_seq, reply_seq;
	int has_reply, is_blocked;
	int is_fetching;  /* the running replay is a fetch: no live message is held */
	int needs_reset;  /* on_reset is due before anything else, for reset_why */
	enum kvp_zmq_why reset_why;
	int is_cleared;   /* the running replay began too late, and the rank was cleared for it */
	int fetch_left;   /* fetches still to make */
	int is_untrusted; /* failed for its publisher's numbers */
	uint64_t fetch_ns; /* not before */
	uint64_t replay_begin_ns, progress_ns;
};

static uint64_t now_ns(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000000000ull + (uint64_t)t.tv_nsec;
}

static uint64_t be64(const void *p)
{
	uint64_t v;
	memcpy(&v, p, sizeof(v));
	return __builtin_bswap64(v);
}

void *kvp_zmq_ctx_new(uint32_t sub_max)
{
	void *zmq = zmq_ctx_new();
	if (!zmq)
		return NULL;
	if (sub_max > 65536 || zmq_ctx_set(zmq, ZMQ_MAX_SOCKETS, (int)(sub_max * SOCKETS_PER_SUB + 64))) {
		if (sub_max > 65536)
			errno = EINVAL;
		int e = errno;
		zmq_ctx_term(zmq);
		errno = e;
		return NULL;
	}
	return zmq;
}

/* ---- sockets ---- */

static int set_int(void *sock, int opt, int v)
{
	return zmq_setsockopt(sock, opt, &v, sizeof(v));
}

static void *open_socket(const struct kvp_zmq_sub *s, int type, const char *endpoint)
{
	void *sock = zmq_socket(s->cfg.zmq, type);
	if (!sock)
		return NULL;
	uint64_t most = s->cfg.frame_max < INT64_MAX ? s->cfg.frame_max : INT64_MAX;
	int64_t msg_max = most > KVP_ZMQ_MSG_MAX_BYTES ? (int64_t)most : KVP_ZMQ_MSG_MAX_BYTES;
	int hwm = s->cfg.rcvhwm < 0 ? 0 : s->cfg.rcvhwm; /* the library's 0 is unlimited */
	int bad = set_int(sock, ZMQ_LINGER, 0) || set_int(sock, ZMQ_RECONNECT_IVL, 100) ||
		  set_int(sock, ZMQ_RECONNECT_IVL_MAX, 5000) || set_int(sock, ZMQ_TCP_KEEPALIVE, 1) ||
		  set_int(sock, ZMQ_HEARTBEAT_IVL, 5000) || set_int(sock, ZMQ_HEARTBEAT_TIMEOUT, 15000) ||
		  set_int(sock, ZMQ_HEARTBEAT_TTL, 15000) || set_int(sock, ZMQ_RCVHWM, hwm) ||
		  set_int(sock, ZMQ_IPV6, !strncmp(endpoint, "tcp://[", 7)) ||
		  zmq_setsockopt(sock, ZMQ_MAXMSGSIZE, &msg_max, sizeof(msg_max)) ||
		  (type == ZMQ_SUB && zmq_setsockopt(sock, ZMQ_SUBSCRIBE, "", 0));
	if (!bad)
		return sock;
	int e = errno;
	zmq_close(sock);
	errno = e;
	return NULL;
}

static void close_socket(void **sock)
{
	if (*sock)
		zmq_close(*sock);
	*sock = NULL;
}

static void close_sockets(struct kvp_zmq_sub *s)
{
	kvp_zmq_monitor_close(&s->monitor);
	close_socket(&s->live);
	close_socket(&s->dealer);
}

/* A failed listener must not go on buffering. */
static void fail(struct kvp_zmq_sub *s, const char *what, const char *why)
{
	s->state = KVP_ZMQ_FAILED;
	snprintf(s->error, sizeof(s->error), "%s: %s", what, why);
	close_sockets(s);
}

static void fetch_begin_soon(struct kvp_zmq_sub *s)
{
	s->fetch_left = FETCHES;
	s->fetch_ns = 0;
}

/* A DEALER that can't be had is no failure: the listener goes on without replay until the next attempt. */
static void open_dealer(struct kvp_zmq_sub *s)
{
	close_socket(&s->dealer);
	if (!s->replay_endpoint[0])
		return;
	s->dealer = open_socket(s, ZMQ_DEALER, s->replay_endpoint);
	if (s->dealer && zmq_connect(s->dealer, s->replay_endpoint))
		close_socket(&s->dealer);
}

int kvp_zmq_sub_is_connected(struct kvp_zmq_sub *s)
{
	kvp_zmq_monitor_read(&s->monitor);
	return s->monitor.is_connected;
}

uint64_t kvp_zmq_sub_handshakes(struct kvp_zmq_sub *s)
{
	kvp_zmq_monitor_read(&s->monitor);
	return s->monitor.handshakes;
}

static int is_running(const struct kvp_zmq_sub *s)
{
	return s->state == KVP_ZMQ_CATCHING_UP || s->state == KVP_ZMQ_ACTIVE;
}

void kvp_zmq_sub_look(struct kvp_zmq_sub *s)
{
	kvp_zmq_monitor_read(&s->monitor);
	if (is_running(s) && kvp_zmq_monitor_gave_up(&s->monitor) && s->held == HELD_NONE && !s->is_fetching)
		fail(s, "connection", "closed for good, as after a frame over the limit");
}

static int copy_endpoint(char *to, const char *from)
{
	if (!from || !*from) {
		to[0] = 0;
		return KVP_OK;
	}
	if (kvp_zmq_endpoint_check(from, NULL, 0) != KVP_OK)
		return KVP_ERR_INVAL;
	memcpy(to, from, strlen(from) + 1);
	return KVP_OK;
}

/* Opens and connects the live socket: FAILED or BUFFERING, and further if the gate is open. */
static void connect_live(struct kvp_zmq_sub *s)
{
	s->live = open_socket(s, ZMQ_SUB, s->endpoint);
	if (!s->live) {
		fail(s, "socket", zmq_strerror(errno));
		return;
	}
	kvp_zmq_monitor_open(&s->monitor, s->cfg.zmq, s->live);
	if (zmq_connect(s->live, s->endpoint)) {
		fail(s, "connect", zmq_strerror(errno));
		return;
	}
	s->state = KVP_ZMQ_BUFFERING;
	if (s->cfg.gate == KVP_ZMQ_GATE_OPEN)
		kvp_zmq_sub_ready(s);
}

int kvp_zmq_sub_open(const struct kvp_zmq_sub_cfg *cfg, struct kvp_zmq_sub **out)
{
	if (!cfg->zmq || !cfg->endpoint || !cfg->endpoint[0] || !cfg->on_batch || !cfg->on_reset)
		return KVP_ERR_INVAL;
	struct kvp_zmq_sub *s = calloc(1, sizeof(*s));
	if (!s)
		return KVP_ERR_FULL;
	s->cfg = *cfg;
	s->cfg.stall_ms = cfg->stall_ms ? cfg->stall_ms : KVP_ZMQ_STALL_MS;
	s->cfg.cooldown_ms = cfg->cooldown_ms == KVP_ZMQ_NO_COOLDOWN ? 0
			     : cfg->cooldown_ms			       ? cfg->cooldown_ms
									       : KVP_ZMQ_COOLDOWN_MS;
	s->cfg.rcvhwm = cfg->rcvhwm ? cfg->rcvhwm : KVP_ZMQ_RCVHWM;
	zmq_msg_init(&s->msg);
	zmq_msg_init(&s->reply);
	int rc = copy_endpoint(s->endpoint, cfg->endpoint);
	if (rc == KVP_OK)
		rc = copy_endpoint(s->replay_endpoint, cfg->replay_endpoint);
	s->cfg.endpoint = s->endpoint;
	s->cfg.replay_endpoint = s->replay_endpoint;
	kvp_zmq_cursor_init(&s->cursor, s->replay_endpoint[0] != 0, s->cfg.cooldown_ms * NS_PER_MS);
	if (cfg->resume) {
		s->cursor.has_w = cfg->resume->has_w != 0;
		s->cursor.w = cfg->resume->w;
		s->cursor.has_live = cfg->resume->has_live != 0;
		s->cursor.live = cfg->resume->live;
	}
	s->cfg.resume = NULL;
	if (rc != KVP_OK) {
		free(s);
		return rc;
	}
	if (cfg->fetch == KVP_ZMQ_FETCH_AT_ONCE)
		fetch_begin_soon(s);
	connect_live(s);
	*out = s;
	return KVP_OK;
}

int kvp_zmq_sub_retry(struct kvp_zmq_sub *s)
{
	if (s->state != KVP_ZMQ_FAILED)
		return KVP_OK;
	s->stats.retries++;
	if (s->is_untrusted) {
		kvp_zmq_cursor_forget(&s->cursor);
		s->needs_reset = 1;
		s->reset_why = KVP_ZMQ_WHY_RESTART;
		s->is_untrusted = 0;
	}
	fetch_begin_soon(s);
	connect_live(s);
	if (s->state == KVP_ZMQ_FAILED)
		return KVP_ERR_SYS;
	s->error[0] = 0;
	return KVP_OK;
}

void kvp_zmq_sub_close(struct kvp_zmq_sub *s)
{
	if (!s)
		return;
	zmq_msg_close(&s->msg);
	zmq_msg_close(&s->reply);
	close_sockets(s);
	free(s);
}

void kvp_zmq_sub_ready(struct kvp_zmq_sub *s)
{
	s->cfg.gate = KVP_ZMQ_GATE_OPEN; /* for a retry, too */
	if (s->state != KVP_ZMQ_BUFFERING)
		return;
	s->state = KVP_ZMQ_CATCHING_UP;
	open_dealer(s);
}

void kvp_zmq_sub_after_snapshot(struct kvp_zmq_sub *s)
{
	s->cursor.after_snapshot = 1;
}

/* ---- replay ---- */

enum kvp_zmq_reply kvp_zmq_reply_parse(const struct kvp_zmq_frame *frame, uint32_t n, uint64_t *seq)
{
	/* Read from the end: [.. ] seq payload. In front: delimiter, topic, both or neither. */
	if (n == 1 && !frame[0].len)
		return KVP_ZMQ_REPLY_END;
	if (n < 2 || n > 4)
		return KVP_ZMQ_REPLY_BAD;
	const struct kvp_zmq_frame *number = &frame[n - 2], *payload = &frame[n - 1];
	if (n == 2 && !number->len && !payload->len)
		return KVP_ZMQ_REPLY_END;
	if (number->len != 8)
		return KVP_ZMQ_REPLY_BAD;
	uint64_t v = be64(number->p);
	if (v == KVP_ZMQ_SEQ_END || !payload->len)
		return KVP_ZMQ_REPLY_END;
	*seq = v;
	return KVP_ZMQ_REPLY_BATCH;
}

/* Read one whole message without blocking. The first FRAME_MAX frames go to part (all initialised, closed
 * by the caller); the rest is dropped but counted. 0 = nothing there. */
static uint32_t recv_parts(void *sock, zmq_msg_t part[FRAME_MAX])
{
	uint32_t n = 0;
	for (int more = 1; more; n++) {
		zmq_msg_t surplus, *m = n < FRAME_MAX ? &part[n] : &surplus;
		if (m == &surplus)
			zmq_msg_init(m);
		int rc;
		do {
			rc = zmq_msg_recv(m, sock, ZMQ_DONTWAIT);
		} while (rc < 0 && errno == EINTR);
		more = rc >= 0 && zmq_msg_more(m);
		if (m == &surplus)
			zmq_msg_close(m);
		if (rc < 0)
			break;
	}
	return n;
}

static void init_parts(zmq_msg_t part[FRAME_MAX])
{
	for (int i = 0; i < FRAME_MAX; i++)
		zmq_msg_init(&part[i]);
}

static void close_parts(zmq_msg_t part[FRAME_MAX])
{
	for (int i = 0; i < FRAME_MAX; i++)
		zmq_msg_close(&part[i]);
}

/* Replies that nobody asked for. */
static void drop_replies(struct kvp_zmq_sub *s)
{
	for (uint32_t n = 0; s->dealer && n < DROP_MAX; n++) {
		zmq_msg_t part[FRAME_MAX];
		init_parts(part);
		uint32_t frames = recv_parts(s->dealer, part);
		close_parts(part);
		if (!frames)
			return;
		s->stats.replies_dropped++;
	}
	open_dealer(s);
}

/* What follows a fetch: the second one, or the same again if nobody answered. */
static void fetch_end(struct kvp_zmq_sub *s, enum kvp_zmq_cause cause)
{
	s->is_fetching = 0;
	if (cause == KVP_ZMQ_CAUSE_ABORTED)
		return;
	if (cause == KVP_ZMQ_CAUSE_END)
		s->fetch_left--;
	uint64_t ms = cause == KVP_ZMQ_CAUSE_END || s->cfg.cooldown_ms < KVP_ZMQ_FETCH_AGAIN_MS
			      ? KVP_ZMQ_FETCH_AGAIN_MS
			      : s->cfg.cooldown_ms;
	s->fetch_ns = now_ns() + ms * NS_PER_MS;
}

static int clears_loss(const struct kvp_zmq_sub *s)
{
	return s->cfg.loss == KVP_ZMQ_LOSS_CLEAR;
}

static void replay_end(struct kvp_zmq_sub *s, enum kvp_zmq_cause cause)
{
	enum kvp_zmq_incomplete r = kvp_zmq_cursor_replay_end(&s->cursor, cause, now_ns());
	s->stats.ended[cause]++;
	s->stats.incomplete[r]++;
	int is_lost = clears_loss(s) && s->cursor.start && r != KVP_ZMQ_COMPLETE && !s->is_cleared;
	s->held = s->is_fetching ? HELD_NONE : is_lost ? HELD_CLEAR : HELD_APPLY;
	if (s->is_fetching && is_lost && s->cursor.cnt) { /* none at all: nothing is known to be missing */
		s->needs_reset = 1;
		s->reset_why = KVP_ZMQ_WHY_LOSS;
	}
	if (s->is_fetching)
		fetch_end(s, cause);
	if (s->has_reply) { /* only when aborted */
		s->has_reply = 0;
		s->stats.replies_dropped++;
		zmq_msg_close(&s->reply);
		zmq_msg_init(&s->reply);
	}
	if (cause == KVP_ZMQ_CAUSE_TIMEOUT || cause == KVP_ZMQ_CAUSE_BROKEN)
		open_dealer(s);
}

static void replay_begin(struct kvp_zmq_sub *s, uint64_t start)
{
	uint64_t wire = __builtin_bswap64(start);
	s->stats.replays++;
	s->held = HELD_WAIT;
	s->is_cleared = 0;
	s->replay_begin_ns = s->progress_ns = now_ns();
	drop_replies(s);
	if (!s->dealer)
		open_dealer(s);
	if (!s->dealer || zmq_send(s->dealer, "", 0, ZMQ_SNDMORE | ZMQ_DONTWAIT) < 0 ||
		zmq_send(s->dealer, &wire, sizeof(wire), ZMQ_DONTWAIT) < 0)
		replay_end(s, KVP_ZMQ_CAUSE_BROKEN);
}

/* When a fetch is to be made: 0 = none, or not before the live socket has shaken hands. */
static uint64_t fetch_deadline(const struct kvp_zmq_sub *s)
{
	if (!s->fetch_left || !s->cursor.has_replay || (!s->monitor.is_connected && s->monitor.sock))
		return 0;
	uint64_t cool = s->cursor.cooldown_until_ns, at = s->fetch_ns > cool ? s->fetch_ns : cool;
	return at ? at : 1;
}

static int fetch_begin(struct kvp_zmq_sub *s)
{
	uint64_t start, at;
	kvp_zmq_sub_is_connected(s);
	at = fetch_deadline(s);
	if (!at || now_ns() < at || !kvp_zmq_cursor_fetch(&s->cursor, now_ns(), &start))
		return 0;
	s->is_fetching = 1;
	s->stats.fetches++;
	replay_begin(s, start);
	return 1;
}

static uint64_t replay_deadline(const struct kvp_zmq_sub *s)
{
	uint64_t stall_ms = s->cfg.stall_ms;
	if (kvp_zmq_cursor_covered(&s->cursor) && stall_ms > KVP_ZMQ_COVERED_STALL_MS)
		stall_ms = KVP_ZMQ_COVERED_STALL_MS;
	uint64_t stall = s->progress_ns + stall_ms * NS_PER_MS;
	uint64_t total = s->replay_begin_ns + KVP_ZMQ_REPLAY_TOTAL_MS * NS_PER_MS;
	return stall < total ? stall : total;
}

/* Offer the reply in hand. */
static void deliver_reply(struct kvp_zmq_sub *s)
{
	const struct kvp_zmq_cursor *c = &s->cursor;
	if (clears_loss(s) && !s->is_cleared && !c->cnt && c->start && s->reply_seq > c->start) {
		if (s->cfg.on_reset(s->cfg.ctx, KVP_ZMQ_WHY_LOSS) == KVP_ERR_AGAIN) {
			s->is_blocked = 1;
			return;
		}
		s->is_cleared = 1;
	}
	int rc = s->cfg.on_batch(
		s->cfg.ctx, s->reply_seq, zmq_msg_data(&s->reply), zmq_msg_size(&s->reply), KVP_ZMQ_REPLAYED);
	if (rc == KVP_ERR_AGAIN) {
		s->is_blocked = 1;
		return;
	}
	kvp_zmq_cursor_replayed(&s->cursor, s->reply_seq, rc == KVP_OK);
	*(rc == KVP_OK ? &s->stats.replayed : &s->stats.unframed) += 1;
	s->has_reply = 0;
	s->progress_ns = now_ns();
}

/* One step of a running replay; 0 = nothing to do now. */
static int step_replay(struct kvp_zmq_sub *s)
{
	if (s->has_reply) {
		deliver_reply(s);
		return !s->is_blocked;
	}
	if (now_ns() >= replay_deadline(s)) {
		replay_end(s, KVP_ZMQ_CAUSE_TIMEOUT);
		return 1;
	}
	zmq_msg_t part[FRAME_MAX];
	struct kvp_zmq_frame frame[FRAME_MAX];
	init_parts(part);
	uint32_t n = recv_parts(s->dealer, part);
	for (uint32_t i = 0; i < n && i < FRAME_MAX; i++)
		frame[i] = (struct kvp_zmq_frame){zmq_msg_data(&part[i]), zmq_msg_size(&part[i])};
	enum kvp_zmq_reply kind = n ? kvp_zmq_reply_parse(frame, n, &s->reply_seq) : KVP_ZMQ_REPLY_BAD;
	if (n && kind == KVP_ZMQ_REPLY_BATCH) {
		if (kvp_zmq_cursor_is_new(&s->cursor, s->reply_seq)) {
			zmq_msg_move(&s->reply, &part[n - 1]);
			s->has_reply = 1;
		} else {
			s->stats.replies_dropped++;
		}
	} else if (n) {
		replay_end(s, kind == KVP_ZMQ_REPLY_END ? KVP_ZMQ_CAUSE_END : KVP_ZMQ_CAUSE_BROKEN);
	}
	close_parts(part);
	return n != 0;
}

int kvp_zmq_sub_set_replay(struct kvp_zmq_sub *s, const char *replay_endpoint)
{
	char text[KVP_ZMQ_ENDPOINT_MAX + 1];
	if (copy_endpoint(text, replay_endpoint) != KVP_OK)
		return KVP_ERR_INVAL;
	if (!strcmp(text, s->replay_endpoint))
		return KVP_OK;
	memcpy(s->replay_endpoint, text, sizeof(text));
	if (s->cursor.is_replaying)
		replay_end(s, KVP_ZMQ_CAUSE_ABORTED);
	kvp_zmq_cursor_set_replay(&s->cursor, text[0] != 0);
	close_socket(&s->dealer);
	if (s->state == KVP_ZMQ_CATCHING_UP || s->state == KVP_ZMQ_ACTIVE)
		open_dealer(s);
	return KVP_OK;
}

/* ---- live ---- */

static void release(struct kvp_zmq_sub *s)
{
	s->held = HELD_NONE;
	zmq_msg_close(&s->msg);
	zmq_msg_init(&s->msg);
}

static void count_gap(struct kvp_zmq_sub *s, const struct kvp_zmq_gap *gap)
{
	if (!gap->missing)
		return;
	if (s->cursor.has_w) {
		s->stats.gaps++;
		s->stats.missing += gap->missing;
	} else {
		s->stats.late_start++;
	}
	if (gap->why == KVP_ZMQ_NO_ENDPOINT)
		s->stats.no_endpoint++;
	else if (gap->why == KVP_ZMQ_COOLDOWN)
		s->stats.cooldown++;
}

static void judge(struct kvp_zmq_sub *s)
{
	struct kvp_zmq_gap gap;
	enum kvp_zmq_verdict v = kvp_zmq_cursor_live(&s->cursor, s->msg_seq, now_ns(), &gap);
	count_gap(s, &gap);
	switch (v) {
	case KVP_ZMQ_APPLY:
		s->held = gap.missing && gap.start && clears_loss(s) ? HELD_CLEAR : HELD_APPLY;
		break;
	case KVP_ZMQ_REPLAY:
		replay_begin(s, gap.start);
		break;
	case KVP_ZMQ_STALE:
		s->stats.stale++;
		release(s);
		break;
	case KVP_ZMQ_DUPLICATE:
		s->stats.duplicate++;
		release(s);
		break;
	case KVP_ZMQ_RESET:
		s->stats.restarts++;
		s->held = HELD_RESET;
		break;
	case KVP_ZMQ_FAIL:
		fail(s, "sequence numbers keep going back",
			"several publishers behind one address, or a publisher in a restart loop");
		s->is_untrusted = 1;
		release(s);
		break;
	}
}

/* Before a live message, or before anything at all. */
static void deliver_reset(struct kvp_zmq_sub *s)
{
	enum kvp_zmq_why why = s->held == HELD_CLEAR   ? KVP_ZMQ_WHY_LOSS
			       : s->held == HELD_RESET ? KVP_ZMQ_WHY_RESTART
						       : s->reset_why;
	if (s->cfg.on_reset(s->cfg.ctx, why) == KVP_ERR_AGAIN)
		s->is_blocked = 1;
	else if (s->held == HELD_RESET)
		s->held = HELD_JUDGE;
	else if (s->held == HELD_CLEAR)
		s->held = HELD_APPLY;
	else
		s->needs_reset = 0;
}

static void deliver_live(struct kvp_zmq_sub *s)
{
	if (!kvp_zmq_cursor_is_new(&s->cursor, s->msg_seq)) { /* the replay brought it, too */
		s->stats.stale++;
		release(s);
		return;
	}
	int rc = s->cfg.on_batch(
		s->cfg.ctx, s->msg_seq, zmq_msg_data(&s->msg), zmq_msg_size(&s->msg), KVP_ZMQ_LIVE);
	if (rc == KVP_ERR_AGAIN) {
		s->is_blocked = 1;
		return;
	}
	if (rc == KVP_OK) {
		kvp_zmq_cursor_applied(&s->cursor, s->msg_seq);
		s->stats.applied++;
	} else {
		s->stats.unframed++;
	}
	release(s);
}

/* 0 = nothing there. */
static int read_live(struct kvp_zmq_sub *s)
{
	zmq_msg_t part[FRAME_MAX];
	init_parts(part);
	uint32_t n = recv_parts(s->live, part);
	uint64_t seq = n == 3 && zmq_msg_size(&part[1]) == 8 ? be64(zmq_msg_data(&part[1])) : KVP_ZMQ_SEQ_END;
	if (n) {
		s->stats.received++;
		if (seq == KVP_ZMQ_SEQ_END) {
			s->stats.bad_frames++;
		} else {
			zmq_msg_move(&s->msg, &part[2]);
			s->msg_seq = seq;
			s->held = HELD_JUDGE;
			s->fetch_left = 0;
		}
	}
	close_parts(part);
	return n != 0;
}

static int step(struct kvp_zmq_sub *s)
{
	switch (s->held) {
	case HELD_NONE:
		if (s->needs_reset) {
			deliver_reset(s);
			return 1;
		}
		return (s->fetch_left && fetch_begin(s)) || read_live(s);
	case HELD_JUDGE:
		judge(s);
		return 1;
	case HELD_RESET:
	case HELD_CLEAR:
		deliver_reset(s);
		return 1;
	case HELD_WAIT:
		return step_replay(s);
	case HELD_APPLY:
		deliver_live(s);
		return 1;
	}
	return 0;
}

/* A message is handled when it is let go of: delivered, counted away, or used up as a reply. */
uint32_t kvp_zmq_sub_work(struct kvp_zmq_sub *s, uint32_t msg_max)
{
	uint32_t done = 0;
	s->is_blocked = 0;
	if (is_running(s) && s->held != HELD_WAIT)
		drop_replies(s);
	while (done < msg_max && is_running(s)) {
		enum held was = s->held;
		int had_reply = s->has_reply;
		if (!step(s)) {
			if (was == HELD_NONE)
				s->state = KVP_ZMQ_ACTIVE;
			break;
		}
		if (s->is_blocked)
			break;
		if (was == HELD_WAIT ? had_reply || !s->has_reply : s->held == HELD_NONE)
			done++;
	}
	return done;
}

int kvp_zmq_sub_is_blocked(const struct kvp_zmq_sub *s)
{
	return s->is_blocked;
}

uint64_t kvp_zmq_sub_deadline_ns(const struct kvp_zmq_sub *s)
{
	if (!is_running(s))
		return 0;
	if (s->held == HELD_NONE)
		return fetch_deadline(s);
	return s->held == HELD_WAIT && !s->has_reply ? replay_deadline(s) : 0;
}

/* ---- waiting ---- */

void kvp_zmq_sub_fds(const struct kvp_zmq_sub *s, int fd[2])
{
	void *sock[2] = {s->live, s->dealer};
	for (int i = 0; i < 2; i++) {
		size_t len = sizeof(fd[i]);
		if (!sock[i] || zmq_getsockopt(sock[i], ZMQ_FD, &fd[i], &len))
			fd[i] = -1;
	}
}

/* Has the listener something to do without waiting? Blocked ones do, but nobody can tell when. */
static int is_due(const struct kvp_zmq_sub *s)
{
	return is_running(s) &&
	       (s->is_blocked || s->needs_reset || s->has_reply ||
		       (s->held != HELD_NONE && s->held != HELD_WAIT));
}

static uint32_t poll_items(const struct kvp_zmq_sub *s, zmq_pollitem_t *item)
{
	uint32_t n = 0;
	if (!s || !is_running(s) || is_due(s))
		return 0;
	if (s->held == HELD_NONE)
		item[n++] = (zmq_pollitem_t){.socket = s->live, .events = ZMQ_POLLIN};
	if (s->dealer)
		item[n++] = (zmq_pollitem_t){.socket = s->dealer, .events = ZMQ_POLLIN};
	if (s->fetch_left && s->held == HELD_NONE && s->monitor.sock)
		item[n++] = (zmq_pollitem_t){.socket = s->monitor.sock, .events = ZMQ_POLLIN};
	return n;
}

/* The shorter of the time limit and the nearest replay deadline. */
static int wait_ms(struct kvp_zmq_sub **sub, uint32_t cnt, int timeout_ms)
{
	uint64_t now = now_ns();
	for (uint32_t i = 0; i < cnt; i++) {
		uint64_t at = sub[i] ? kvp_zmq_sub_deadline_ns(sub[i]) : 0;
		if (!at)
			continue;
		uint64_t ms = at > now ? (at - now + NS_PER_MS - 1) / NS_PER_MS : 0;
		if (timeout_ms < 0 || ms < (uint64_t)timeout_ms)
			timeout_ms = (int)ms;
	}
	return timeout_ms;
}

static uint32_t work_all(struct kvp_zmq_sub **sub, uint32_t cnt, const zmq_pollitem_t *item, uint32_t msg_max)
{
	uint32_t done = 0;
	uint64_t now = now_ns();
	for (uint32_t i = 0; i < cnt; i++) {
		if (!sub[i])
			continue;
		zmq_pollitem_t mine[ITEMS];
		uint32_t n = poll_items(sub[i], mine);
		uint64_t at = kvp_zmq_sub_deadline_ns(sub[i]);
		int is_ready = (at && at <= now) || sub[i]->state == KVP_ZMQ_CATCHING_UP;
		for (uint32_t k = 0; k < n; k++)
			is_ready |= item++->revents != 0;
		if (is_ready)
			done += kvp_zmq_sub_work(sub[i], msg_max);
	}
	return done;
}

int kvp_zmq_sub_poll(
	struct kvp_zmq_sub **sub, uint32_t cnt, int wake_fd, int timeout_ms, uint32_t msg_max, int *is_woken)
{
	zmq_pollitem_t on_stack[POLL_STACK], *item = on_stack;
	uint32_t n = 0, done = 0;
	int rc = KVP_ERR_SYS;
	for (uint32_t i = 0; i < cnt; i++)
		if (sub[i] && (is_due(sub[i]) || sub[i]->state == KVP_ZMQ_CATCHING_UP))
			done += kvp_zmq_sub_work(sub[i], msg_max);
	uint64_t item_max = (uint64_t)ITEMS * cnt + 1;
	if (item_max > POLL_STACK && !(item = calloc(item_max, sizeof(*item)))) {
		errno = ENOMEM;
		return KVP_ERR_SYS;
	}
	for (uint32_t i = 0; i < cnt; i++)
		n += poll_items(sub[i], item + n);
	if (wake_fd >= 0)
		item[n] = (zmq_pollitem_t){.fd = wake_fd, .events = ZMQ_POLLIN};
	int got = zmq_poll(item, (int)n + (wake_fd >= 0), done ? 0 : wait_ms(sub, cnt, timeout_ms));
	if (got < 0 && errno != EINTR)
		goto out;
	if (is_woken)
		*is_woken = got > 0 && wake_fd >= 0 && item[n].revents != 0;
	if (got >= 0)
		done += work_all(sub, cnt, item, msg_max);
	rc = done > INT32_MAX ? INT32_MAX : (int)done;
out:
	if (item != on_stack)
		free(item);
	return rc;
}

/* ---- looking ---- */

enum kvp_zmq_state kvp_zmq_sub_state(const struct kvp_zmq_sub *s)
{
	return s->state;
}

const char *kvp_zmq_sub_error(const struct kvp_zmq_sub *s)
{
	return s->error;
}

const struct kvp_zmq_stats *kvp_zmq_sub_stats(const struct kvp_zmq_sub *s)
{
	return &s->stats;
}

const struct kvp_zmq_cursor *kvp_zmq_sub_cursor(const struct kvp_zmq_sub *s)
{
	return &s->cursor;
}
