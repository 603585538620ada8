/* daemons/indexer/listener.c — sockets to operations: receive, decode, normalise, hash, hand over. */
#include "daemons/indexer/listener.h"

#include <errno.h>
#include <kvpick/clock.h>
#include <kvpick/err.h>
#include <kvpick/hash.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>
#include <zmq.h>

#include "daemons/common/log.h"
#include "ipc/kv_event.h"
#include "shm/mark.h"

enum {
	RING_WORDS = 1 << 20, /* 8 MiB a thread, touched as far as it fills */
	MSG_PER_SUB = 64,     /* messages of one listener before the next one's turn */
	POLL_MS = 1000,
	FULL_WAIT_US = 200,
	WARN_MAX = 3, /* log lines of one kind a listener */
	SUB_MAX = 65536,
};
#define REPORT_NS 250000000u /* between two looks at the listeners' own figures */
#define RETRY_MIN_NS 1000000000ull
#define RETRY_MAX_NS 60000000000ull

enum change_kind { CHANGE_START, CHANGE_STOP, CHANGE_REPLAY, CHANGE_RANKS, CHANGE_MARK, CHANGE_OPEN };

struct change {
	struct change *next;
	enum change_kind kind;
	struct kvp_idx_listen spec; /* strings on the heap */
	uint64_t number;	    /* MARK, OPEN */
};

struct thread;
struct listener {
	struct kvp_idx_listen spec; /* event and replay: not set, the subscription has copies */
	struct kvp_kv_norm *norm;
	struct thread *thread;
	struct kvp_zmq_stats seen; /* what has been counted */
	uint32_t block_size_warned;
	uint32_t is_active, is_failed; /* as counted in the gauges */
	uint64_t retry_ns, wait_ns;    /* next attempt of a failed one, and how long it waits for it */
	uint64_t mark, handshakes;     /* last mark at which it was connected; handshakes by then */
};

struct thread {
	struct kvp_idx_listeners *all;
	struct kvp_idx_ring ring;
	pthread_t tid;
	pthread_mutex_t lock; /* mailbox */
	struct change *first, **last;
	int wake_fd;
	struct kvp_kv_dec *dec;
	struct listener **listener;
	struct kvp_zmq_sub **sub;
	uint32_t cnt, cap;
	uint64_t report_ns;
	enum kvp_zmq_gate gate;
	uint32_t is_opening;		 /* what was kept is being handed over */
	uint64_t marked;		 /* last mark; release */
	uint32_t marked_cnt, marked_connected;
	uint32_t is_caught_up;		 /* release */
};

struct kvp_idx_listeners {
	struct thread *thread;
	uint32_t thread_cnt;
	uint32_t stop; /* 1 = threads end */
	uint64_t epoch;
	void *zmq;
	struct kvp_ctr_column_shm *ctr;
	struct kvp_idx_listeners_cfg cfg;
};

static void wake(struct thread *t)
{
	t->all->cfg.wake(t->all->cfg.ctx);
}

/* -- from batches to the ring -- */

/* Waits for room: this is the back-pressure. NULL only when the threads are to end. */
static struct kvp_idx_msg *reserve(struct listener *l, enum kvp_idx_op op, uint32_t words)
{
	struct thread *t = l->thread;
	struct kvp_idx_msg *m = kvp_idx_ring_reserve(&t->ring, words);
	if (!m)
		kvp_ctr_add_mw(t->all->ctr, KVP_CTR_EV_RING_FULL, 1);
	while (!m && !kvp_ld_rlx_u32(&t->all->stop)) {
		wake(t);
		usleep(FULL_WAIT_US);
		m = kvp_idx_ring_reserve(&t->ring, words);
	}
	if (!m)
		return NULL;
	m->op = op;
	m->listener = l->spec.listener;
	m->rank_slot = l->spec.rank_slot;
	m->epoch = kvp_ld_acq_u64(&t->all->epoch); /* pairs with: kvp_idx_listeners_epoch */
	return m;
}

static int push_store(struct listener *l, const struct kvp_kv_op *op)
{
	struct kvp_hasher h;
	kvp_hasher_init(&h, op->tok, op->tok_cnt, op->block_size, op->window, op->seed);
	kvp_hasher_set_mm(&h, op->mm, op->mm_cnt, &l->thread->all->cfg.placeholder);
	for (uint32_t first = 0; first < op->ext_cnt;) {
		uint32_t n =
			op->ext_cnt - first < KVP_IDX_MSG_BLK_MAX ? op->ext_cnt - first : KVP_IDX_MSG_BLK_MAX;
		struct kvp_idx_msg *m = reserve(l, KVP_IDX_STORE, (uint32_t)KVP_IDX_MSG_WORDS + 2 * n);
		if (!m)
			return KVP_ERR_AGAIN;
		m->dp_rank = op->dp_rank;
		m->n = n;
		m->tier = (uint16_t)op->tier;
		m->has_parent = first || op->has_parent;
		m->parent = first ? op->ext[first - 1] : op->parent;
		uint64_t got = kvp_hasher_local(&h, first, n, m->data);
		KVP_ASSERT(got == n); /* the normaliser has checked that the tokens suffice */
		memcpy(m->data + n, op->ext + first, n * 8ull);
		kvp_idx_ring_commit(&l->thread->ring);
		first += n;
	}
	return KVP_OK;
}

static int push_hashes(struct listener *l, enum kvp_idx_op what, const struct kvp_kv_op *op)
{
	for (uint32_t first = 0; first < op->ext_cnt;) {
		uint32_t n =
			op->ext_cnt - first < KVP_IDX_MSG_BLK_MAX ? op->ext_cnt - first : KVP_IDX_MSG_BLK_MAX;
		struct kvp_idx_msg *m = reserve(l, what, (uint32_t)KVP_IDX_MSG_WORDS + n);
		if (!m)
			return KVP_ERR_AGAIN;
		m->dp_rank = op->dp_rank;
		m->tier = (uint16_t)op->tier;
		m->n = n;
		memcpy(m->data, op->ext + first, n * 8ull);
		kvp_idx_ring_commit(&l->thread->ring);
		first += n;
	}
	return KVP_OK;
}

static int push_plain(struct listener *l, enum kvp_idx_op op, uint32_t dp_rank, enum kvp_kv_tier tier)
{
	struct kvp_idx_msg *m = reserve(l, op, (uint32_t)KVP_IDX_MSG_WORDS);
	if (!m)
		return KVP_ERR_AGAIN;
	m->dp_rank = dp_rank;
	m->tier = (uint16_t)tier;
	kvp_idx_ring_commit(&l->thread->ring);
	return KVP_OK;
}

static int push_mark(struct listener *l, uint64_t seq, enum kvp_zmq_source src, uint64_t recv_ns)
{
	struct kvp_idx_msg *m = reserve(l, KVP_IDX_MARK, (uint32_t)KVP_IDX_MSG_WORDS);
	if (!m)
		return KVP_ERR_AGAIN;
	m->seq = seq;
	m->live = src == KVP_ZMQ_LIVE ? seq : KVP_MARK_UNSET;
	m->recv_ns = recv_ns;
	kvp_idx_ring_commit(&l->thread->ring);
	wake(l->thread);
	return KVP_OK;
}

static int push_op(struct listener *l, const struct kvp_kv_op *op)
{
	if (op->tier != KVP_KV_DEVICE)
		kvp_ctr_add_mw(l->thread->all->ctr, KVP_CTR_EV_LOWER_TIER, 1);
	switch (op->kind) {
	case KVP_KV_OP_STORE:
		return push_store(l, op);
	case KVP_KV_OP_ATTACH:
		return push_hashes(l, KVP_IDX_ATTACH, op);
	case KVP_KV_OP_REMOVE:
		return push_hashes(l, KVP_IDX_REMOVE, op);
	case KVP_KV_OP_CLEAR_TIER:
		return push_plain(l, KVP_IDX_CLEAR_TIER, op->dp_rank, op->tier);
	default:
		return push_plain(l, KVP_IDX_CLEAR, op->dp_rank, KVP_KV_DEVICE);
	}
}

/* What the normaliser has learned or forgotten by the last call. */
static int push_notes(struct listener *l)
{
	const struct kvp_kv_note *note;
	uint32_t cnt = kvp_kv_norm_notes(l->norm, &note);
	for (uint32_t first = 0, n; first < cnt; first += n) {
		n = cnt - first < KVP_IDX_MSG_NOTE_MAX ? cnt - first : KVP_IDX_MSG_NOTE_MAX;
		struct kvp_idx_msg *m =
			reserve(l, KVP_IDX_NOTES, (uint32_t)KVP_IDX_MSG_WORDS + KVP_IDX_NOTE_WORDS * n);
		if (!m)
			return KVP_ERR_AGAIN;
		m->dp_rank = l->spec.dp_rank;
		m->n = n;
		for (uint32_t i = 0; i < n; i++) {
			uint64_t *w = &m->data[(uint64_t)KVP_IDX_NOTE_WORDS * i];
			w[0] = note[first + i].id;
			w[1] = note[first + i].lora_term;
			w[2] = note[first + i].salt_term;
			w[3] = (uint64_t)note[first + i].dp_rank << 32 | note[first + i].state;
		}
		kvp_idx_ring_commit(&l->thread->ring);
	}
	return KVP_OK;
}

static int restore_notes(struct kvp_kv_norm *norm, const struct kvp_memo_note *note, uint32_t cnt)
{
	int rc = KVP_OK;
	for (uint32_t i = 0; !rc && i < cnt; i++) {
		struct kvp_kv_note one = {
			note[i].id, note[i].word[0], note[i].word[1], note[i].dp_rank, note[i].state};
		rc = kvp_kv_norm_restore(norm, &one, 1);
	}
	return rc;
}

static void count_reason(struct listener *l, enum kvp_kv_reason why, const struct kvp_kv_event *ev)
{
	static const enum kvp_ctr ctr[KVP_KV_REASON_CNT] = {
		[KVP_KV_REASON_IGNORED_EVENT] = KVP_CTR_EV_IGNORED_EVENT,
		[KVP_KV_REASON_UNKNOWN_EVENT] = KVP_CTR_EV_UNKNOWN_EVENT,
		[KVP_KV_REASON_MALFORMED_EVENT] = KVP_CTR_EV_MALFORMED_EVENT,
		[KVP_KV_REASON_NON_LOCAL] = KVP_CTR_EV_NON_LOCAL,
		[KVP_KV_REASON_FOREIGN_OWNER] = KVP_CTR_EV_FOREIGN_OWNER,
		[KVP_KV_REASON_UNKNOWN_MEDIUM] = KVP_CTR_EV_UNKNOWN_MEDIUM,
		[KVP_KV_REASON_UNKNOWN_KIND] = KVP_CTR_EV_UNKNOWN_KIND,
		[KVP_KV_REASON_NON_MAIN_KIND] = KVP_CTR_EV_NON_MAIN_KIND,
		[KVP_KV_REASON_NON_MAIN_GROUP] = KVP_CTR_EV_NON_MAIN_GROUP,
		[KVP_KV_REASON_UNLEARNED_GROUP] = KVP_CTR_EV_UNLEARNED_GROUP,
		[KVP_KV_REASON_SELF_REFERENCE] = KVP_CTR_EV_SELF_REFERENCE,
		[KVP_KV_REASON_BLOCK_SIZE] = KVP_CTR_EV_BLOCK_SIZE,
		[KVP_KV_REASON_EMPTY_STORE] = KVP_CTR_EV_EMPTY_STORE,
		[KVP_KV_REASON_AMBIGUOUS] = KVP_CTR_EV_AMBIGUOUS,
		[KVP_KV_REASON_STATE_FULL] = KVP_CTR_EV_STATE_FULL,
	};
	kvp_ctr_add_mw(l->thread->all->ctr, ctr[why], 1);
	if (why == KVP_KV_REASON_BLOCK_SIZE && l->block_size_warned++ < WARN_MAX)
		KVP_LOG_W("listener.block_size", "worker=%llu rank=%u block_size=%u events=%llu",
			(unsigned long long)l->spec.worker_id, l->spec.dp_rank, l->spec.block_size,
			(unsigned long long)ev->block_size);
}

static int on_batch(void *ctx, uint64_t seq, const void *payload, size_t len, enum kvp_zmq_source src)
{
	struct listener *l = ctx;
	struct thread *t = l->thread;
	struct kvp_kv_batch batch;
	uint64_t recv_ns = kvp_clock_mono_ns();
	int rc = kvp_kv_decode(t->dec, payload, len, &batch);
	if (rc) {
		kvp_ctr_add_mw(t->all->ctr, KVP_CTR_EV_BATCH_BAD, 1);
		return rc == KVP_ERR_AGAIN ? KVP_ERR_PROTO : rc;
	}
	uint32_t dp_rank = batch.has_rank ? batch.rank : l->spec.dp_rank;
	if (dp_rank - l->spec.start_rank >= l->spec.rank_cnt) {
		kvp_ctr_add_mw(t->all->ctr, KVP_CTR_EV_UNKNOWN_RANK, batch.event_cnt);
		batch.event_cnt = 0;
	}
	for (uint32_t i = 0; i < batch.event_cnt; i++) {
		struct kvp_kv_op op;
		enum kvp_kv_reason why = kvp_kv_normalise(l->norm, &batch.event[i], dp_rank, &op);
		if (why != KVP_KV_REASON_OK)
			count_reason(l, why, &batch.event[i]);
		else if (push_op(l, &op))
			return KVP_ERR_AGAIN;
		if (push_notes(l))
			return KVP_ERR_AGAIN;
	}
	return push_mark(l, seq, src, recv_ns);
}

static int on_reset(void *ctx, enum kvp_zmq_why why)
{
	struct listener *l = ctx;
	int is_loss = why == KVP_ZMQ_WHY_LOSS;
	int rc = push_plain(l, is_loss ? KVP_IDX_LOST : KVP_IDX_RESTART, l->spec.dp_rank, KVP_KV_DEVICE);
	if (rc)
		return rc;
	kvp_kv_norm_reset(l->norm);
	wake(l->thread);
	KVP_LOG_N("listener.cleared", "worker=%llu rank=%u reason=%s", (unsigned long long)l->spec.worker_id,
		l->spec.dp_rank, is_loss ? "events_lost" : "publisher_restarted");
	return KVP_OK;
}

/* -- figures -- */

static void gauge(struct thread *t, enum kvp_ctr id, uint32_t *was, uint32_t is)
{
	if (*was != is)
		kvp_ctr_add_mw(t->all->ctr, id, (uint64_t)is - *was);
	*was = is;
}

static void count_more(struct thread *t, enum kvp_ctr id, uint64_t *seen, uint64_t now)
{
	if (now != *seen)
		kvp_ctr_add_mw(t->all->ctr, id, now - *seen);
	*seen = now;
}

static void retry_later(struct listener *l, uint64_t now)
{
	l->wait_ns = l->wait_ns ? 2 * l->wait_ns : RETRY_MIN_NS;
	if (l->wait_ns > RETRY_MAX_NS)
		l->wait_ns = RETRY_MAX_NS;
	l->retry_ns = now + l->wait_ns;
}

static void tell_failure(struct listener *l, const char *why)
{
	char text[256];
	KVP_LOG_W("listener.failed", "worker=%llu rank=%u error=%s", (unsigned long long)l->spec.worker_id,
		l->spec.dp_rank, why);
	snprintf(text, sizeof(text), "events of worker %llu rank %u: %s",
		(unsigned long long)l->spec.worker_id, l->spec.dp_rank, why);
	l->thread->all->cfg.failed(l->thread->all->cfg.ctx, text);
}

/* A failed listener is tried again. One that has held for long enough starts with the short wait next
 * time. */
static void mend(struct listener *l, struct kvp_zmq_sub *sub, uint64_t now)
{
	if (l->is_failed && now >= l->retry_ns) {
		retry_later(l, now);
		kvp_zmq_sub_retry(sub);
	} else if (!l->is_failed && l->wait_ns && now > l->retry_ns + RETRY_MAX_NS) {
		l->wait_ns = 0;
	}
}

static void report(struct thread *t, struct listener *l, struct kvp_zmq_sub *sub)
{
	kvp_zmq_sub_look(sub);
	const struct kvp_zmq_stats *s = kvp_zmq_sub_stats(sub);
	struct kvp_zmq_stats *seen = &l->seen;
	count_more(t, KVP_CTR_EV_RECEIVED, &seen->received, s->received);
	count_more(t, KVP_CTR_EV_REPLAYED, &seen->replayed, s->replayed);
	count_more(t, KVP_CTR_EV_STALE, &seen->stale, s->stale);
	count_more(t, KVP_CTR_EV_DUPLICATE, &seen->duplicate, s->duplicate);
	count_more(t, KVP_CTR_EV_BAD_FRAMES, &seen->bad_frames, s->bad_frames);
	count_more(t, KVP_CTR_EV_GAPS, &seen->gaps, s->gaps);
	count_more(t, KVP_CTR_EV_GAP_MISSING, &seen->missing, s->missing);
	count_more(t, KVP_CTR_EV_REPLAYS, &seen->replays, s->replays);
	count_more(t, KVP_CTR_EV_FETCHES, &seen->fetches, s->fetches);
	count_more(t, KVP_CTR_EV_RETRIES, &seen->retries, s->retries);
	count_more(t, KVP_CTR_EV_REPLAY_NONE, &seen->no_endpoint, s->no_endpoint);
	count_more(t, KVP_CTR_EV_REPLAY_NONE, &seen->cooldown, s->cooldown);
	count_more(t, KVP_CTR_EV_REPLY_DROPPED, &seen->replies_dropped, s->replies_dropped);
	for (int i = 0; i < KVP_ZMQ_INCOMPLETE_CNT; i++)
		count_more(t,
			i == KVP_ZMQ_COMPLETE ? KVP_CTR_EV_REPLAY_COMPLETE : KVP_CTR_EV_REPLAY_INCOMPLETE,
			&seen->incomplete[i], s->incomplete[i]);
	uint32_t is_failed = kvp_zmq_sub_state(sub) == KVP_ZMQ_FAILED;
	if (is_failed && !l->is_failed) {
		tell_failure(l, kvp_zmq_sub_error(sub));
		retry_later(l, kvp_clock_mono_ns());
	}
	gauge(t, KVP_CTR_EV_LISTENERS_FAILED, &l->is_failed, is_failed);
	gauge(t, KVP_CTR_EV_LISTENERS_ACTIVE, &l->is_active, kvp_zmq_sub_state(sub) == KVP_ZMQ_ACTIVE);
}

/* -- the thread's own list -- */

static void spec_free(struct kvp_idx_listen *spec)
{
	free((void *)(uintptr_t)spec->event);
	free((void *)(uintptr_t)spec->replay);
	free((void *)(uintptr_t)spec->note);
	spec->event = spec->replay = NULL;
	spec->note = NULL;
}

static int room_for_one(struct thread *t)
{
	if (t->cnt < t->cap)
		return KVP_OK;
	uint32_t cap = t->cap ? 2 * t->cap : 16;
	struct listener **l = realloc(t->listener, cap * sizeof(*l));
	if (l)
		t->listener = l;
	struct kvp_zmq_sub **s = realloc(t->sub, cap * sizeof(*s));
	if (s)
		t->sub = s;
	if (!l || !s)
		return KVP_ERR_SYS;
	t->cap = cap;
	return KVP_OK;
}

static void listener_free(struct listener *l)
{
	kvp_kv_norm_free(l->norm);
	free(l);
}

static void listener_add(struct thread *t, const struct kvp_idx_listen *spec)
{
	struct listener *l = calloc(1, sizeof(*l));
	struct kvp_zmq_sub *sub = NULL;
	if (l)
		l->norm = kvp_kv_norm_new(spec->block_size);
	if (!l || !l->norm || restore_notes(l->norm, spec->note, spec->note_cnt) || room_for_one(t)) {
		if (l)
			listener_free(l);
		kvp_ctr_add_mw(t->all->ctr, KVP_CTR_IDX_LISTEN_FAILED, 1);
		return;
	}
	l->spec = *spec;
	l->spec.event = l->spec.replay = NULL;
	l->spec.note = NULL;
	l->thread = t;
	struct kvp_zmq_sub_cfg cfg = {.zmq = t->all->zmq,
		.endpoint = spec->event,
		.replay_endpoint = spec->replay,
		.gate = t->gate,
		.fetch = spec->fetch,
		.rcvhwm = t->all->cfg.rcvhwm,
		.stall_ms = t->all->cfg.stall_ms,
		.cooldown_ms = t->all->cfg.cooldown_ms,
		.frame_max = t->all->cfg.payload_max,
		.loss = t->all->cfg.loss,
		.ctx = l,
		.on_batch = on_batch,
		.on_reset = on_reset};
	struct kvp_zmq_resume resume = { .has_w = spec->applied_seq != KVP_MARK_UNSET, .w = spec->applied_seq,
		.has_live = spec->live_seq != KVP_MARK_UNSET, .live = spec->live_seq };
	cfg.resume = &resume;
	int rc = kvp_zmq_sub_open(&cfg, &sub);
	if (rc) {
		KVP_LOG_W("listener.not_opened", "worker=%llu rank=%u error=%s",
			(unsigned long long)spec->worker_id, spec->dp_rank, kvp_strerror(rc));
		kvp_ctr_add_mw(t->all->ctr, KVP_CTR_IDX_LISTEN_FAILED, 1);
		listener_free(l);
		return;
	}
	t->listener[t->cnt] = l;
	t->sub[t->cnt++] = sub;
	kvp_ctr_add_mw(t->all->ctr, KVP_CTR_EV_LISTENERS, 1);
}

static void listener_remove(struct thread *t, uint32_t at)
{
	struct listener *l = t->listener[at];
	report(t, l, t->sub[at]);
	gauge(t, KVP_CTR_EV_LISTENERS_FAILED, &l->is_failed, 0);
	gauge(t, KVP_CTR_EV_LISTENERS_ACTIVE, &l->is_active, 0);
	kvp_ctr_add_mw(t->all->ctr, KVP_CTR_EV_LISTENERS, UINT64_MAX);
	kvp_zmq_sub_close(t->sub[at]);
	listener_free(l);
	t->cnt--;
	t->listener[at] = t->listener[t->cnt];
	t->sub[at] = t->sub[t->cnt];
}

/* New ranks of the worker. What a rank that left had taught is forgotten, so that its successor starts
 * afresh. */
static void listener_ranks(struct listener *l, uint32_t start_rank, uint32_t rank_cnt)
{
	uint32_t had = l->spec.start_rank;
	for (uint32_t i = 0; i < l->spec.rank_cnt; i++)
		if (had + i - start_rank >= rank_cnt) {
			kvp_kv_norm_forget_rank(l->norm, had + i);
			push_notes(l);
		}
	l->spec.start_rank = start_rank;
	l->spec.rank_cnt = rank_cnt;
}

/* Which listeners are connected now. */
static void mark(struct thread *t, uint64_t number)
{
	uint32_t connected = 0;
	for (uint32_t i = 0; i < t->cnt; i++) {
		struct listener *l = t->listener[i];
		l->handshakes = kvp_zmq_sub_handshakes(t->sub[i]);
		l->mark = kvp_zmq_sub_is_connected(t->sub[i]) ? number : 0;
		connected += l->mark != 0;
	}
	t->marked_cnt = t->cnt;
	t->marked_connected = connected;
	kvp_st_rel_u64(&t->marked, number); /* pairs with: kvp_idx_listeners_marked */
	wake(t);
}

static void open_gate(struct thread *t, uint64_t number)
{
	for (uint32_t i = 0; i < t->cnt; i++) {
		const struct listener *l = t->listener[i];
		if (number && l->mark == number && kvp_zmq_sub_handshakes(t->sub[i]) == l->handshakes &&
			kvp_zmq_sub_is_connected(t->sub[i]))
			kvp_zmq_sub_after_snapshot(t->sub[i]);
		kvp_zmq_sub_ready(t->sub[i]);
	}
	t->gate = KVP_ZMQ_GATE_OPEN;
	t->is_opening = 1;
}

/* Tells when nothing is left of what was kept while the gate was shut. */
static void catch_up(struct thread *t)
{
	for (uint32_t i = 0; i < t->cnt; i++)
		if (kvp_zmq_sub_state(t->sub[i]) == KVP_ZMQ_CATCHING_UP)
			return;
	t->is_opening = 0;
	kvp_st_rel_u32(&t->is_caught_up, 1); /* pairs with: kvp_idx_listeners_caught_up */
	wake(t);
}

static void change_apply(struct thread *t, struct change *c)
{
	uint32_t at = 0;
	if (c->kind == CHANGE_START) {
		listener_add(t, &c->spec);
		return;
	}
	if (c->kind == CHANGE_MARK || c->kind == CHANGE_OPEN) {
		(c->kind == CHANGE_MARK ? mark : open_gate)(t, c->number);
		return;
	}
	while (at < t->cnt && t->listener[at]->spec.listener != c->spec.listener)
		at++;
	if (at == t->cnt)
		return; /* could not be opened */
	if (c->kind == CHANGE_STOP)
		listener_remove(t, at);
	else if (c->kind == CHANGE_RANKS)
		listener_ranks(t->listener[at], c->spec.start_rank, c->spec.rank_cnt);
	else
		kvp_zmq_sub_set_replay(t->sub[at], c->spec.replay);
}

static void mailbox_empty(struct thread *t)
{
	pthread_mutex_lock(&t->lock);
	struct change *c = t->first;
	t->first = NULL;
	t->last = &t->first;
	pthread_mutex_unlock(&t->lock);
	while (c) {
		struct change *next = c->next;
		if (!kvp_ld_rlx_u32(&t->all->stop))
			change_apply(t, c);
		spec_free(&c->spec);
		free(c);
		c = next;
	}
}

static void *thread_main(void *arg)
{
	struct thread *t = arg;
	while (!kvp_ld_acq_u32(&t->all->stop)) {
		int is_woken = 0;
		uint64_t word;
		kvp_zmq_sub_poll(t->sub, t->cnt, t->wake_fd, t->cnt ? REPORT_NS / 1000000 : POLL_MS,
			MSG_PER_SUB, &is_woken);
		if (is_woken && read(t->wake_fd, &word, sizeof(word)) < 0 && errno != EAGAIN)
			KVP_LOG_W("listener.wake", "errno=%d", errno);
		mailbox_empty(t);
		if (t->is_opening)
			catch_up(t);
		uint64_t now = kvp_clock_mono_ns();
		if (now < t->report_ns)
			continue;
		t->report_ns = now + REPORT_NS;
		for (uint32_t i = 0; i < t->cnt; i++) {
			report(t, t->listener[i], t->sub[i]);
			mend(t->listener[i], t->sub[i], now);
		}
	}
	mailbox_empty(t);
	while (t->cnt)
		listener_remove(t, t->cnt - 1);
	return NULL;
}

/* -- apply thread's side -- */

static void leave(struct thread *t, struct change *c)
{
	uint64_t one = 1;
	pthread_mutex_lock(&t->lock);
	*t->last = c;
	t->last = &c->next;
	pthread_mutex_unlock(&t->lock);
	if (write(t->wake_fd, &one, sizeof(one)) < 0 && errno != EAGAIN)
		KVP_LOG_W("listener.wake", "errno=%d", errno);
}

/* For every thread the same change. */
static int leave_all(struct kvp_idx_listeners *l, enum change_kind kind, uint64_t number)
{
	for (uint32_t i = 0; i < l->thread_cnt; i++) {
		struct change *c = calloc(1, sizeof(*c));
		if (!c)
			return KVP_ERR_SYS;
		c->kind = kind;
		c->number = number;
		leave(&l->thread[i], c);
	}
	return KVP_OK;
}

int kvp_idx_listeners_mark(struct kvp_idx_listeners *l, uint64_t number)
{
	return leave_all(l, CHANGE_MARK, number);
}

int kvp_idx_listeners_marked(
	const struct kvp_idx_listeners *l, uint64_t number, uint32_t *cnt, uint32_t *connected)
{
	*cnt = *connected = 0;
	for (uint32_t i = 0; i < l->thread_cnt; i++) {
		const struct thread *t = &l->thread[i];
		if (kvp_ld_acq_u64(&t->marked) != number) /* pairs with: mark */
			return 0;
		*cnt += t->marked_cnt;
		*connected += t->marked_connected;
	}
	return 1;
}

int kvp_idx_listeners_open_gate(struct kvp_idx_listeners *l, uint64_t number)
{
	return leave_all(l, CHANGE_OPEN, number);
}

int kvp_idx_listeners_caught_up(const struct kvp_idx_listeners *l)
{
	for (uint32_t i = 0; i < l->thread_cnt; i++)
		if (!kvp_ld_acq_u32(&l->thread[i].is_caught_up)) /* pairs with: catch_up */
			return 0;
	return 1;
}

static int leave_change(struct kvp_idx_listeners *l, enum change_kind kind, const struct kvp_idx_listen *spec)
{
	struct thread *t = &l->thread[spec->rank_slot % l->thread_cnt];
	struct change *c = calloc(1, sizeof(*c));
	if (!c)
		return KVP_ERR_SYS;
	c->kind = kind;
	c->spec = *spec;
	c->spec.event = spec->event ? strdup(spec->event) : NULL;
	c->spec.replay = spec->replay ? strdup(spec->replay) : NULL;
	struct kvp_memo_note *note = spec->note_cnt ? malloc(spec->note_cnt * sizeof(*note)) : NULL;
	if (note)
		memcpy(note, spec->note, spec->note_cnt * sizeof(*note));
	c->spec.note = note;
	if ((spec->note_cnt && !note) || (spec->event && !c->spec.event) ||
		(spec->replay && !c->spec.replay)) {
		spec_free(&c->spec);
		free(c);
		return KVP_ERR_SYS;
	}
	leave(t, c);
	return KVP_OK;
}

int kvp_idx_listen_start(struct kvp_idx_listeners *l, const struct kvp_idx_listen *spec)
{
	return leave_change(l, CHANGE_START, spec);
}

void kvp_idx_listen_stop(struct kvp_idx_listeners *l, uint32_t rank_slot, uint64_t listener)
{
	struct kvp_idx_listen spec = {.rank_slot = rank_slot, .listener = listener};
	leave_change(l, CHANGE_STOP, &spec); /* lost for lack of memory: its operations are refused anyway */
}

void kvp_idx_listen_replay(
	struct kvp_idx_listeners *l, uint32_t rank_slot, uint64_t listener, const char *replay)
{
	struct kvp_idx_listen spec = {.rank_slot = rank_slot, .listener = listener, .replay = replay};
	leave_change(l, CHANGE_REPLAY, &spec);
}

void kvp_idx_listen_ranks(struct kvp_idx_listeners *l, uint32_t rank_slot, uint64_t listener,
	uint32_t start_rank, uint32_t rank_cnt)
{
	struct kvp_idx_listen spec = {
		.rank_slot = rank_slot, .listener = listener, .start_rank = start_rank, .rank_cnt = rank_cnt};
	leave_change(l, CHANGE_RANKS, &spec);
}

void kvp_idx_listeners_epoch(struct kvp_idx_listeners *l, uint64_t epoch)
{
	kvp_st_rel_u64(&l->epoch, epoch); /* pairs with: reserve */
}

struct kvp_idx_ring *kvp_idx_listeners_ring(struct kvp_idx_listeners *l, uint32_t thread)
{
	return thread < l->thread_cnt ? &l->thread[thread].ring : NULL;
}

static int thread_open(struct kvp_idx_listeners *l, struct thread *t)
{
	t->all = l;
	t->last = &t->first;
	t->gate = l->cfg.gate == KVP_IDX_GATE_SHUT ? KVP_ZMQ_GATE_SHUT : KVP_ZMQ_GATE_OPEN;
	t->wake_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
	t->dec = kvp_kv_dec_new();
	if (t->wake_fd < 0 || !t->dec || kvp_idx_ring_open(&t->ring, RING_WORDS) ||
		pthread_mutex_init(&t->lock, NULL))
		return KVP_ERR_SYS;
	if (l->cfg.payload_max)
		kvp_kv_dec_limit(t->dec, l->cfg.payload_max);
	return KVP_OK;
}

static void thread_close(struct thread *t)
{
	pthread_mutex_destroy(&t->lock);
	kvp_idx_ring_close(&t->ring);
	kvp_kv_dec_free(t->dec);
	if (t->wake_fd >= 0)
		close(t->wake_fd);
	free(t->listener);
	free(t->sub);
}

int kvp_idx_listeners_open(const struct kvp_idx_listeners_cfg *cfg, struct kvp_idx_listeners **out)
{
	struct kvp_idx_listeners *l = calloc(1, sizeof(*l));
	if (!l)
		return KVP_ERR_SYS;
	*l = (struct kvp_idx_listeners){.ctr = cfg->ctr, .cfg = *cfg};
	static const enum kvp_ctr now[] = {
		KVP_CTR_EV_LISTENERS, KVP_CTR_EV_LISTENERS_ACTIVE, KVP_CTR_EV_LISTENERS_FAILED};
	for (size_t i = 0; i < sizeof(now) / sizeof(now[0]); i++)
		kvp_ctr_set(l->ctr, now[i], 0); /* left by the process before */
	l->thread = calloc(cfg->threads, sizeof(*l->thread));
	l->zmq = kvp_zmq_ctx_new(SUB_MAX);
	int rc = l->thread && l->zmq ? KVP_OK : KVP_ERR_SYS;
	for (; !rc && l->thread_cnt < cfg->threads; l->thread_cnt++) {
		struct thread *t = &l->thread[l->thread_cnt];
		rc = thread_open(l, t);
		if (!rc && pthread_create(&t->tid, NULL, thread_main, t))
			rc = KVP_ERR_SYS;
		if (rc)
			thread_close(t);
		if (rc)
			break;
	}
	if (rc)
		kvp_idx_listeners_close(l);
	else
		*out = l;
	return rc;
}

void kvp_idx_listeners_close(struct kvp_idx_listeners *l)
{
	uint64_t one = 1;
	kvp_st_rel_u32(&l->stop, 1);
	for (uint32_t i = 0; i < l->thread_cnt; i++)
		if (write(l->thread[i].wake_fd, &one, sizeof(one)) < 0)
			KVP_LOG_W("listener.wake", "errno=%d", errno);
	for (uint32_t i = 0; i < l->thread_cnt; i++) {
		pthread_join(l->thread[i].tid, NULL);
		thread_close(&l->thread[i]);
	}
	if (l->zmq)
		zmq_ctx_term(l->zmq);
	free(l->thread);
	free(l);
}
