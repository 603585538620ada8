/* shm/lifecycle.h — what happened to bookings, on its way to the replicas: from every process that books to
 * kvpick-peer.
 *
 * Shape      A ring of cells of 128 bytes: a state word and 120 bytes of a record. A record lies in 1 to
 *            KVP_LIFECYCLE_CELLS_MAX cells in a row; the first one's word is its state: CLAIMED -> READY or
 *            VOID. The tail is a pair {place after the last claim, owner and length of the last claim}: the
 *            next claimer first writes the last claim into its cell, so every claim is known by name.
 * Truth      tail, head and the state words. The content is guarded by a checksum.
 * Writers    producers: any thread of any process that has an owner. Consumer (head): one thread of the
 *            process that called kvp_lifecycle_attach.
 * Readers    the consumer; kvpickctl check.
 * Ordering   Records are read in the order of their claims. What changes a booking claims its place before
 *            the change can be seen and makes the record READY after it: so the records of one id come in the
 *            order of what happened, whichever processes did it. READY is stored by compare-and-swap (full
 *            barrier) after the content, and loaded with acquire.
 * Lifetime   as long as the region. A record until the consumer's kvp_lifecycle_done.
 * Memory     The cells are touched as they are used for the first time: nothing without replica sync
 *            (lifecycle_max 0: one page), then 128 bytes a record up to the whole ring, once all of it was
 *            gone through: 16 MiB with the default of 100,000 events.
 * Limits     Full: the new record is lost and counted, the booking is not concerned.
 * Crash      Producer killed between claim and READY: the consumer sees that its owner is dead
 *            (kvp_owner_dead) and looks at the booking: an ADD whose booking lives and a FREE whose booking
 *            has gone are read like READY ones, anything else is passed and counted. Producer stopped there:
 *            the consumer passes it after KVP_LIFECYCLE_STALL_NS, and the record comes anew when it runs
 *            again; what it writes late into a cell that is no longer its own breaks the checksum of one
 *            record, which is dropped and counted. Consumer killed: what it had not called kvp_lifecycle_done
 *            for is read again by the next one (receivers ignore what they know).
 * What a kill may lose or tell twice, beyond that: a booking that the sweep completed is told only when it
 *            ends (peers ignore that); a prefill-done may be lost; a free that its dead performer left half
 *            done is told by the sweep, perhaps for a second time, and also where nobody is told of such a
 *            free (expiry or close of a rank by an indexer that was killed in the middle); a free that was
 *            left with another process (a recount) by a process that dies before READY may be lost.
 * Proved by  tests/t_lifecycle.c, tests/t_lifecycle_crash.c, tests/t_select_lifecycle.c,
 *            tests/torture/x_lifecycle.c, tests/s_peers_epp.t, tests/s_peers_netns.t
 */
#ifndef KVP_SHM_LIFECYCLE_H
#define KVP_SHM_LIFECYCLE_H

#include "shm/resv.h"
#include "shm/slot.h"

#define KVP_LIFECYCLE_CELL_BYTES 120u
#define KVP_LIFECYCLE_CELLS_MAX 43u /* of one record: the longest id and adapter name */
#define KVP_LIFECYCLE_STALL_NS 1000000000ull
#define KVP_LIFECYCLE_MAX 10000000u /* events, largest lifecycle_max */

enum kvp_lifecycle_kind {
	KVP_LIFECYCLE_NONE,
	KVP_LIFECYCLE_ADD,	    /* a booking was made */
	KVP_LIFECYCLE_PREFILL_DONE, /* told by a caller, for the first time or again */
	/* a booking was ended by somebody who knows (not by age, not by its rank) */
	KVP_LIFECYCLE_FREE,
	KVP_LIFECYCLE_AFFINITY,	    /* a session was bound; id is the session id, h is 0, adapter is empty */
	KVP_LIFECYCLE_KIND_CNT
};

/* One record, as the consumer gets it: all of it is a copy. Role, model and group are those of the partition
 * (kvp_cat_part_info). Of an ADD, hashes, tokens and flags are in the reservation as long as it lives
 * (kvp_resv_info, kvp_resv_seq by h); afterwards its FREE is already in the ring and it need not be sent. */
struct kvp_lifecycle_rec {
	enum kvp_lifecycle_kind kind;
	uint32_t part, dp_rank;
	uint64_t h;	    /* of the reservation */
	uint64_t worker_id; /* that holds or held the booking */
	uint32_t id_len, lora_len;
	char id[KVP_RESV_ID_MAX + 1];	  /* NUL added; any bytes */
	char lora[KVP_RESV_LORA_MAX + 1]; /* adapter as told at the booking; NUL added */
};

/* When a process wakes the consumer: with each record, or when it says so (kvp_lifecycle_tend). */
enum kvp_lifecycle_wake { KVP_LIFECYCLE_WAKE_NOW, KVP_LIFECYCLE_WAKE_LATER };

struct kvp_lifecycle_shm;
struct kvp_lifecycle_ring { /* process-local; producers may share it between threads */
	struct kvp_lifecycle_shm *shm; /* NULL = there is no replica sync */
	struct kvp_slots *slots;       /* for wake-ups and deaths; NULL = none. Set after join. */
	/* consumer: what the dead have done; NULL = nothing. Set after join. */
	const struct kvp_book *book;
	uint64_t cell_mask;
	uint64_t head_seen; /* producers: the head as it was; relaxed */
	enum kvp_lifecycle_wake wake;
	uint32_t owed; /* turns since a wake-up was put off, from 1; 0 = none is owed */
	/* consumer only */
	uint64_t stall_at, stall_since_ns, read_ns;
	uint32_t now_cells; /* of the record that kvp_lifecycle_next gave; 0 = none */
	struct kvp_ctr_column_shm *ctr; /* NULL = uncounted */
};

/* Life cycle as in shm/obj.h. footprint uses lifecycle_max and is one page for 0; join leaves out->shm NULL
 * then. */
uint64_t kvp_lifecycle_align(void);
uint64_t kvp_lifecycle_footprint(const struct kvp_geom *g);
int kvp_lifecycle_new(void *mem, const struct kvp_geom *g);
int kvp_lifecycle_join(void *mem, const struct kvp_geom *g, struct kvp_lifecycle_ring *out);
void kvp_lifecycle_leave(struct kvp_lifecycle_ring *l);
int kvp_lifecycle_delete(void *mem);
/* kvp_lifecycle_check counts words, lengths and places that cannot be, and broken checksums of READY records.
 * Meaningful at any time. */
uint64_t kvp_lifecycle_check(const struct kvp_lifecycle_ring *l);

/* ---- producer: shm/resv.h calls these for handles that kvp_book_publish was called for ---- */

struct kvp_lifecycle_claim {
	uint64_t pos; /* 0 = no place */
	uint32_t cells;
	kvp_owner owner;
	enum kvp_lifecycle_kind kind;
};

/* kvp_lifecycle_claim takes a place for a record with the members of r that the producer knows (kind, part,
 * dp_rank, h, worker_id, id, lora; r->id and r->lora are not used). owner: not 0.
 * return  KVP_OK and *c; KVP_ERR_FULL (c->pos 0: kvp_lifecycle_ready then counts the loss); KVP_ERR_INVAL.
 * Then exactly one of: kvp_lifecycle_ready publishes it and wakes the consumer; kvp_lifecycle_void gives it
 * up (nothing happened). column: where to count, or NULL.
 * blocks  no (lock-free). */
struct kvp_lifecycle_put {
	enum kvp_lifecycle_kind kind;
	uint32_t part, dp_rank;
	uint64_t h, worker_id;
	const void *id, *lora;
	uint32_t id_len, lora_len; /* 1..KVP_RESV_ID_MAX, 0..KVP_RESV_LORA_MAX */
};
int kvp_lifecycle_claim(struct kvp_lifecycle_ring *l, kvp_owner owner, const struct kvp_lifecycle_put *r,
	struct kvp_lifecycle_claim *c);
void kvp_lifecycle_ready(
	struct kvp_lifecycle_ring *l, const struct kvp_lifecycle_claim *c, struct kvp_ctr_column_shm *column);
void kvp_lifecycle_void(struct kvp_lifecycle_ring *l, const struct kvp_lifecycle_claim *c);

/* kvp_lifecycle_tend makes the wake-up that a process with KVP_LIFECYCLE_WAKE_LATER (wake, set after join;
 * one thread) put off: what it owes to callers goes first. Call it once a turn of an event loop, after the
 * callbacks: 1 = a record came in this turn, do not wait but come back when the answers are on their way; 0 =
 * nothing is owed any more. A process that dies in between leaves the consumer to its own time-out. */
int kvp_lifecycle_tend(struct kvp_lifecycle_ring *l);

/* ---- consumer ---- */

/* kvp_lifecycle_attach makes the caller the consumer: it is woken from now on and begins with the oldest
 * record that no consumer was done with. The former one must be dead. column: where it counts, or NULL. */
void kvp_lifecycle_attach(struct kvp_lifecycle_ring *l, kvp_owner owner, struct kvp_ctr_column_shm *column);

/* kvp_lifecycle_next copies the oldest record.
 *
 * now_ns  CLOCK_MONOTONIC, for who stalls.
 * return  KVP_OK and *r; KVP_ERR_NOTFOUND: the ring is empty; KVP_ERR_AGAIN: the oldest record is being
 *         written; its producer wakes the consumer, or it is dead or stalled: call again within
 *         KVP_SLEEP_MAX_MS.
 * wait    kvp_lifecycle_rest and kvp_slot_sleep, then kvp_lifecycle_next once more, and only if it is not
 *         KVP_OK wait, no longer than rest said.
 * blocks  no. */
int kvp_lifecycle_next(struct kvp_lifecycle_ring *l, uint64_t now_ns, struct kvp_lifecycle_rec *r);

/* kvp_lifecycle_rest tells how long the consumer may wait, ms. A wake-up costs the process that makes it some
 * microseconds: so a consumer that had a record within KVP_LIFECYCLE_LINGER_NS looks again after a
 * millisecond and is not woken meanwhile; one that had none is woken at once and may wait KVP_SLEEP_MAX_MS.
 * Who never calls it is woken by every record. */
#define KVP_LIFECYCLE_LINGER_NS 4000000ull
uint32_t kvp_lifecycle_rest(struct kvp_lifecycle_ring *l, uint64_t now_ns);

/* kvp_lifecycle_done gives the place of that record back: it is not seen again by any consumer. */
void kvp_lifecycle_done(struct kvp_lifecycle_ring *l);

/* ---- both ---- */

/* kvp_lifecycle_depth is the number of cells in use; 0 without a ring. */
uint64_t kvp_lifecycle_depth(const struct kvp_lifecycle_ring *l);
#endif
