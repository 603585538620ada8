/* shm/queue.h — requests that wait for a rank, each with all that is needed to book it without its owner.
 *
 * Shape      queued_max records (state column; bodies of 320 bytes), a bitmap of records in use, a pool of
 *            chunks of 64 words for what a record carries, one block of words a partition (drain word,
 *            counts, turn state), and a line and a bitmap of finished records a process slot.
 *            State word: {generation 32, abandoned 1, performer's slot 8, state 8}.
 *            free > fill > queued > taken > done > free; retry = queued, but its owner must claim anew.
 * Truth      state words and bodies. Counts and bitmaps are hints that err on the safe side: a count may be
 *            too high after a kill, never too low; a bit may be set for nothing.
 * Writers    fill, queued (cancel), done: the owner; taken: the drainer; each by CAS on the state word.
 *            Who drains a partition holds its drain word, which only keeps drainers from working twice:
 *            two at once are safe, because a record is taken by CAS.
 * Readers    drainers, loads, kvpickctl.
 * Ordering   body first, then the state word (CAS). A waiter counts itself, posts, and then drains; who gives
 *            load back does so, full barrier, and then looks at the count: one of the two sees the other.
 *            A kick is added to the drain word before anybody gives up for another drainer, and a drainer
 *            lets go only if nobody kicked since it began to look.
 * Lifetime   a handle (generation << 32 | index) from begin until end, cancel or sweep; stale ones answer
 *            KVP_ERR_NOTFOUND.
 * Crash      owner killed: kvp_queue_sweep_owner frees its records and gives up their claims, also bookings
 *            that were made for it and never answered; a record that a live drainer holds is marked
 *            abandoned and ended by that drainer. Drainer killed: its records go back to the queue (retry if
 *            the claim went with it), and whoever kicks next, or the sweep, takes the drain word. Drainer
 *            stopped: its drain word is taken after KVP_QUEUE_STALL_NS; the one record that it holds waits.
 *            Sweep killed: repeated.
 * Proved by  tests/t_queue.c, tests/t_queue_crash.c, tests/s_queue.t
 */
#ifndef KVP_SHM_QUEUE_H
#define KVP_SHM_QUEUE_H

#include "shm/policy.h"
#include "shm/resv.h"
#include "shm/slot.h"

#define KVP_QUEUE_STALL_NS 100000000ull
#define KVP_QUEUE_AGAIN_MAX 256
#define KVP_QUEUE_INLINE 24 /* words of an answer that always fit */

struct kvp_queue_hdr_shm;
struct kvp_queue_rec_shm;
struct kvp_queue_link_shm;
struct kvp_queue_part_shm;
struct kvp_queue_slot_shm;

struct kvp_queue { /* process-local, one thread */
	struct kvp_queue_hdr_shm *hdr;
	uint64_t *state, *used;
	struct kvp_queue_rec_shm *rec;
	struct kvp_queue_link_shm *link;
	uint64_t *pool;
	struct kvp_queue_part_shm *part;
	struct kvp_queue_slot_shm *slot;
	uint64_t *ready; /* slot_max bitmaps of finished records */
	uint32_t queued_max, word_cnt, chunk_cnt, part_max, slot_max, cursor;
	uint32_t again[KVP_QUEUE_AGAIN_MAX], again_cnt; /* chunks given back, to be taken first */
	struct kvp_slots *slots; /* liveness and wake-ups */
	struct kvp_ctr_column_shm *ctr;
	kvp_owner owner;
};

/* Life cycle as in shm/obj.h; footprint uses queued_max (1..1048576), part_max, slot_max. */
uint64_t kvp_queue_align(void);
uint64_t kvp_queue_footprint(const struct kvp_geom *g);
int kvp_queue_new(void *mem, const struct kvp_geom *g);
int kvp_queue_join(void *mem, const struct kvp_geom *g, struct kvp_queue *out);
void kvp_queue_leave(struct kvp_queue *q);
int kvp_queue_delete(void *mem);
/* kvp_queue_check scans everything: number of faults, the first ten to stderr. No concurrent writer. */
uint64_t kvp_queue_check(const struct kvp_queue *q);

/* kvp_queue_attach names the process behind a handle; column NULL: nothing is counted. Once, after join. */
void kvp_queue_attach(struct kvp_queue *q, kvp_owner owner, struct kvp_slots *slots,
	struct kvp_ctr_column_shm *column);

/* What orders and accounts for a record; fixed when it is posted. */
struct kvp_queue_entry {
	uint64_t h;	 /* handle; out */
	uint64_t resv;	 /* claimed reservation, 0 = none */
	uint64_t isl_tok, cached_tok;
	uint64_t posted_ns;
	uint64_t pinned_worker_id;
	struct kvp_order_key key; /* seq: out */
	uint32_t part, class;	  /* class < KVP_POLICY_CLASS_MAX */
	uint32_t pinned_dp_rank;
	enum kvp_tristate has_pinned;
	kvp_owner owner; /* out */
};

/* -- the owner's side -- */

/* kvp_queue_begin takes a free record: KVP_ERR_FULL. kvp_queue_put adds n words to what it carries:
 * KVP_ERR_FULL when the pool is exhausted. kvp_queue_abort gives an unposted record back.
 * kvp_queue_post makes it wait (e->h is its handle): from now on any process may take it.
 * Lock-free; owner only. */
int kvp_queue_begin(struct kvp_queue *q, uint64_t *h);
int kvp_queue_put(struct kvp_queue *q, uint64_t h, const uint64_t *word, uint32_t n);
void kvp_queue_abort(struct kvp_queue *q, uint64_t h);
int kvp_queue_post(struct kvp_queue *q, struct kvp_queue_entry *e);

enum kvp_queue_state { KVP_Q_GONE, KVP_Q_WAITS, KVP_Q_RETRY, KVP_Q_ANSWERED };
enum kvp_queue_state kvp_queue_state(const struct kvp_queue *q, uint64_t h);

/* kvp_queue_cancel ends a wait. KVP_OK: it is gone, the claim is the caller's again; KVP_ERR_AGAIN: a drainer
 * has it and ends it, claim and booking included; KVP_ERR_EXISTS: it is answered, the caller reads the answer
 * and ends it; KVP_ERR_NOTFOUND. Never waits. */
int kvp_queue_cancel(struct kvp_queue *q, uint64_t h);
/* kvp_queue_again puts a record in RETRY back into its place with a new claim. */
int kvp_queue_again(struct kvp_queue *q, uint64_t h, uint64_t resv);
/* kvp_queue_next_ready gives the caller's records that changed (answered, retry) since the last call;
 * *cursor 0 at the start. KVP_ERR_NOTFOUND at the end. A record may be given that has not changed. */
int kvp_queue_next_ready(struct kvp_queue *q, uint32_t *cursor, uint64_t *h);
/* kvp_queue_end frees an answered record. */
void kvp_queue_end(struct kvp_queue *q, uint64_t h);

/* -- both sides: copies; KVP_ERR_NOTFOUND when h is not (or no longer) in use. Words beyond the end read 0;
 * *len is the number there are. -- */
int kvp_queue_entry(const struct kvp_queue *q, uint64_t h, struct kvp_queue_entry *e);
int kvp_queue_words(const struct kvp_queue *q, uint64_t h, uint32_t first, uint64_t *out, uint32_t n,
	uint32_t *len);
int kvp_queue_answer(const struct kvp_queue *q, uint64_t h, uint64_t *out, uint32_t n, uint32_t *len);

/* -- the drainer's side -- */

/* kvp_queue_drain_begin asks that a partition be looked at. KVP_OK: by the caller, who now holds the drain
 * word; KVP_ERR_EXISTS: somebody does, and will look once more. kvp_queue_drain_end lets go: KVP_OK, or
 * KVP_ERR_AGAIN when it was kicked meanwhile: look again and end again. kvp_queue_drain_leave lets go in any
 * case and asks the own process to look later (kvp_queue_asked). None blocks. */
int kvp_queue_drain_begin(struct kvp_queue *q, uint32_t part, uint32_t *seen);
int kvp_queue_drain_end(struct kvp_queue *q, uint32_t part, uint32_t *seen);
void kvp_queue_drain_leave(struct kvp_queue *q, uint32_t part);
/* kvp_queue_stalled: is the drain word of a partition held by the dead or by one that stands still? */
int kvp_queue_stalled(const struct kvp_queue *q, uint32_t part);

/* kvp_queue_list copies up to cap waiting entries of a partition; returns their number. */
uint32_t kvp_queue_list(
	const struct kvp_queue *q, uint32_t part, struct kvp_queue_entry *out, uint32_t cap);
/* kvp_queue_turns gives the turn state of a partition's classes, kvp_queue_turns_set stores it; who holds the
 * drain word. */
void kvp_queue_turns(const struct kvp_queue *q, uint32_t part, struct kvp_drr *d);
void kvp_queue_turns_set(struct kvp_queue *q, uint32_t part, const struct kvp_drr *d);

/* kvp_queue_take makes a waiting record the caller's: KVP_OK and *resv (its claim, now performed by the
 * caller; 0 = none), or KVP_ERR_NOTFOUND. kvp_queue_finish gives the answer and wakes the owner: KVP_OK;
 * KVP_ERR_FULL: no room for so many words, try fewer (KVP_QUEUE_INLINE always fit); KVP_ERR_NOTFOUND: the
 * owner has gone, the record is freed, and the caller undoes what it booked. booked: reservation that stands
 * when the answer is given, 0 = none. */
int kvp_queue_take(struct kvp_queue *q, struct kvp_book *b, uint64_t h, uint64_t *resv);
int kvp_queue_finish(
	struct kvp_queue *q, uint64_t h, uint64_t booked, const uint64_t *word, uint32_t n);

/* -- everybody -- */

/* kvp_queue_total: 0 = nobody waits anywhere. Full barrier in front: call it after giving load back.
 * kvp_queue_waiting: of one class of a partition; class KVP_POLICY_CLASS_MAX = of all. Upper bounds. */
uint64_t kvp_queue_total(const struct kvp_queue *q);
uint32_t kvp_queue_waiting(const struct kvp_queue *q, uint32_t part, uint32_t class);
/* kvp_queue_usage adds up what waits, exactly, by a scan. */
void kvp_queue_usage(
	const struct kvp_queue *q, uint32_t part, uint32_t class, struct kvp_policy_usage *use);

/* kvp_queue_nudge asks every owner of a waiting record to drain, and wakes them: after a change of workers or
 * an expiry by a process that can't choose itself. Returns the number asked. kvp_queue_asked: was the caller
 * asked (once)? */
uint32_t kvp_queue_nudge(struct kvp_queue *q);
int kvp_queue_asked(struct kvp_queue *q);

struct kvp_queue_sweep {
	uint32_t freed_cnt, back_cnt, left_cnt, chunk_cnt, drain_cnt;
};
/* kvp_queue_sweep_owner gives back what a dead process held (see Crash) and nudges the living. Call it after
 * kvp_book_sweep_owner for the same owner. Sweep helper only; a few scans, never waits. */
void kvp_queue_sweep_owner(
	struct kvp_queue *q, struct kvp_book *b, kvp_owner dead, struct kvp_queue_sweep *result);
#endif
