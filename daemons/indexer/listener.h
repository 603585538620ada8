/* daemons/indexer/listener.h — decoder threads: each owns the event subscriptions of some ranks.
 *
 * Shape      N threads, each with one ring to the apply thread and a mailbox of changes from it; a rank
 *            stays with one thread (rank slot modulo N).
 * Truth      a thread's own list of subscriptions.
 * Writers    the thread. The apply thread only leaves changes in the mailbox (a mutex held for a few
 *            instructions) and rings the thread's eventfd.
 * Ordering   an operation carries the number of its listener and the registry epoch seen before its batch
 *            was taken from the socket; the apply thread refuses what is outdated.
 * Lifetime   the process.
 * Crash      gone with the process; the next one opens all subscriptions anew at the kept marks, with what
 *            the normaliser remembered up to there (NOTES operations keep shm/memo.h in step).
 * Limits     a full ring stops the thread's reading; sockets buffer, then drop, then the gap is replayed. A
 *            listener that fails is tried again after 1 s, then twice as long each time up to a minute.
 * Proved by  tests/t_events.c, tests/t_back_pressure.c, tests/s_events.t, tests/torture/x_events.c
 */
#ifndef KVP_INDEXER_LISTENER_H
#define KVP_INDEXER_LISTENER_H

#include "daemons/indexer/ring.h"
#include "ipc/zmq_sub.h"
#include "shm/counter.h"
#include "shm/memo.h"

#include <kvpick/hash.h>

struct kvp_idx_listeners;

struct kvp_idx_listen {	   /* what a listener is to do */
	uint64_t listener; /* unique number, not 0 */
	uint64_t worker_id;
	uint32_t rank_slot, dp_rank;
	uint32_t start_rank, rank_cnt; /* ranks of the worker: events for others are dropped */
	uint32_t block_size;
	const char *event, *replay;	/* replay NULL = none; copied */
	uint64_t applied_seq, live_seq; /* KVP_MARK_UNSET = unset */
	enum kvp_zmq_fetch fetch;
	const struct kvp_memo_note *note; /* what it remembers from the start; copied */
	uint32_t note_cnt;
};

/* SHUT: what engines send is kept in the sockets until kvp_idx_listeners_open_gate. */
enum kvp_idx_gate { KVP_IDX_GATE_OPEN, KVP_IDX_GATE_SHUT };

struct kvp_idx_listeners_cfg {
	uint32_t threads; /* >= 1 */
	enum kvp_idx_gate gate;
	struct kvp_ctr_column_shm *ctr;
	/* Called by the decoder threads: they gave the apply thread work; a listener has failed (one line
	 * of text without a number that changes). */
	void (*wake)(void *ctx);
	void (*failed)(void *ctx, const char *text);
	void *ctx;
	/* Of every listener (ipc/zmq_sub.h); all zeros: the defaults. */
	int rcvhwm;
	uint32_t stall_ms, cooldown_ms;
	uint64_t payload_max; /* bytes; longer batches are refused */
	enum kvp_zmq_loss loss;
	struct kvp_hash_placeholder placeholder;
};

/* kvp_idx_listeners_open starts the decoder threads. KVP_ERR_SYS. */
int kvp_idx_listeners_open(const struct kvp_idx_listeners_cfg *cfg, struct kvp_idx_listeners **out);
/* kvp_idx_listeners_close stops and joins the threads. Rings are gone afterwards. */
void kvp_idx_listeners_close(struct kvp_idx_listeners *l);

/* Apply thread. Each leaves a change for the rank's thread; none waits for it. kvp_idx_listen_start:
 * KVP_ERR_SYS without memory. kvp_idx_listen_replay moves the replay address (NULL = none).
 * kvp_idx_listen_ranks tells a new range of ranks. */
int kvp_idx_listen_start(struct kvp_idx_listeners *l, const struct kvp_idx_listen *spec);
void kvp_idx_listen_stop(struct kvp_idx_listeners *l, uint32_t rank_slot, uint64_t listener);
void kvp_idx_listen_replay(
	struct kvp_idx_listeners *l, uint32_t rank_slot, uint64_t listener, const char *replay);
void kvp_idx_listen_ranks(struct kvp_idx_listeners *l, uint32_t rank_slot, uint64_t listener,
	uint32_t start_rank, uint32_t rank_cnt);

/* -- recovery, apply thread --
 * kvp_idx_listeners_mark has all threads note which listeners are connected now, under a number that is not
 * 0; KVP_ERR_SYS. kvp_idx_listeners_marked: 1 once all have; *cnt listeners, *connected of them.
 * kvp_idx_listeners_open_gate lets all listeners go on, also those to come. Those that were connected at that
 * mark and have not lost their connection since take their first batch as following the snapshot; number 0:
 * none does. KVP_ERR_SYS. kvp_idx_listeners_caught_up: 1 once what was kept has gone to the rings. */
int kvp_idx_listeners_mark(struct kvp_idx_listeners *l, uint64_t number);
int kvp_idx_listeners_marked(
	const struct kvp_idx_listeners *l, uint64_t number, uint32_t *cnt, uint32_t *connected);
int kvp_idx_listeners_open_gate(struct kvp_idx_listeners *l, uint64_t number);
int kvp_idx_listeners_caught_up(const struct kvp_idx_listeners *l);

/* kvp_idx_listeners_epoch publishes the registry epoch to the threads. */
void kvp_idx_listeners_epoch(struct kvp_idx_listeners *l, uint64_t epoch);

/* Rings, 0..threads-1. NULL out of range. */
struct kvp_idx_ring *kvp_idx_listeners_ring(struct kvp_idx_listeners *l, uint32_t thread);
#endif
