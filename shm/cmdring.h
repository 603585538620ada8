/* shm/cmdring.h — commands from any process to one consumer (the indexer), each with a reply.
 *
 * Shape      KVP_CMD_CELLS cells; a cell is a state word, a small header and one buffer of
 *            KVP_CMD_PAYLOAD_MAX bytes that holds first the payload and then the reply.
 *            FREE -> CLAIMED -> POSTED -> TAKEN -> DONE -> FREE; owner and a use count are in the state word.
 * Truth      the state word; the header and buffer belong to the producer in CLAIMED and DONE, to the
 *            consumer in TAKEN.
 * Writers    producers: any process, any thread, own cells. Consumer: one thread of the process that called
 *            kvp_cmd_attach.
 * Readers    kvpickctl check.
 * Ordering   POSTED, DONE and FREE are stored by compare-and-swap with release after the data they publish;
 *            the other side loads the word with acquire. A command whose post returned before another post
 *            began is taken first (ticket order).
 * Lifetime   as long as the region.
 * Crash      producer killed: the sweep of its owner (kvp_cmd_sweep_owner) frees cells in CLAIMED and DONE;
 *            one in POSTED or TAKEN loses its owner, is still executed, and goes to FREE at the reply. So
 *            does one that was posted away, which has no owner from its post on.
 *            Consumer killed: cells stay POSTED or TAKEN; the next consumer's kvp_cmd_attach makes TAKEN
 *            ones POSTED again with attempt + 1 (it may answer those KVP_ERR_AGAIN). A producer waits with
 *            its own deadline and gives up by kvp_cmd_end. Nobody waits for anybody inside a call.
 * Proved by  tests/t_cmdring.c, tests/t_cmdring_crash.c, tests/torture/x_cmdring.c
 */
#ifndef KVP_SHM_CMDRING_H
#define KVP_SHM_CMDRING_H

#include "shm/slot.h"

#define KVP_CMD_CELLS 256u
#define KVP_CMD_PAYLOAD_MAX 73728u /* bytes, also of a reply */
#define KVP_CMD_RESERVED 64u	   /* cells that are never used by commands nobody waits for */

enum kvp_cmd_type {
	KVP_CMD_NONE,
	KVP_CMD_PING,	       /* payload is given back as the reply */
	KVP_CMD_WORKER_POST,   /* arg: role, enum kvp_cmd_post_by; payload: JSON body; reply: JSON */
	KVP_CMD_WORKER_PATCH,  /* worker_id and JSON body */
	KVP_CMD_WORKER_DELETE, /* worker_id */
	KVP_CMD_DUMP,	       /* a page of a dump: daemons/common/dump_page.h */
	KVP_CMD_ROUTED,	       /* a piece of a booking for the index: struct kvp_cmd_routed */
	KVP_CMD_NAMES, /* arg: index slot << 32 | generation, partition; payload: local hashes of a prompt's
			* first blocks; reply: the rank's own hashes of those that it holds */
	KVP_CMD_RECOV_BEGIN,   /* recovery from a peer: daemons/common/recov_page.h */
	KVP_CMD_RECOV_PUT,
	KVP_CMD_RECOV_END,
	KVP_CMD_TYPE_CNT
};

/* Who posts a worker: the API never takes a worker over that is registered with another role. */
enum kvp_cmd_post_by { KVP_CMD_BY_DISCOVERY, KVP_CMD_BY_API };

struct kvp_cmd_cell {
	uint64_t word;	    /* owner << 32 | use count << 8 | state; changed by compare-and-swap only */
	uint64_t ticket;    /* order among posted commands; producer, before POSTED */
	uint64_t worker_id; /* argument of the command; producer sets it between begin and post */
	uint64_t arg[4];    /* further arguments, meaning by type; producer */
	uint32_t type;	    /* enum kvp_cmd_type; kvp_cmd_post */
	uint32_t len;	    /* payload bytes; kvp_cmd_post */
	uint32_t attempt;   /* times a consumer took it; above 1: a consumer died while it had it */
	int32_t status;	    /* reply: KVP_OK or an error or a status of the command's own; consumer */
	uint32_t reply_len; /* reply bytes; consumer */
	uint32_t pad[11];
} __attribute__((aligned(128)));

/* What arg[0..3] of KVP_CMD_ROUTED say. Payload: local hashes of blocks from, from + 1, ... of a prompt of
 * which total are told, in pieces one after the other. */
struct kvp_cmd_routed {
	uint32_t rank_slot, rank_gen;
	uint32_t from, total;
	uint64_t owner;	 /* of the sender: pieces of several senders come mixed */
	uint64_t number; /* of the booking among the sender's */
};
_Static_assert(sizeof(struct kvp_cmd_routed) == 32, "fits into arg");

struct kvp_cmdring_shm;
struct kvp_cmdring { /* process-local handle */
	struct kvp_cmdring_shm *shm;
	struct kvp_slots *slots; /* for wake-ups; NULL = none. Set after join. */
};

uint64_t kvp_cmdring_align(void);
uint64_t kvp_cmdring_footprint(const struct kvp_geom *g);
int kvp_cmdring_new(void *mem, const struct kvp_geom *g);
int kvp_cmdring_join(void *mem, const struct kvp_geom *g, struct kvp_cmdring *out);
void kvp_cmdring_leave(struct kvp_cmdring *r);
int kvp_cmdring_delete(void *mem);
/* kvp_cmdring_check counts states, owners, types, lengths and tickets that cannot be. Meaningful at any
 * time: a cell that changes while it is looked at is looked at again. */
uint64_t kvp_cmdring_check(const struct kvp_cmdring *r);

/* ---- producer ---- */

/* kvp_cmd_begin claims a free cell. owner: the caller's, not 0. *c is the cell (worker_id and arg are zero),
 * *payload its buffer. KVP_ERR_FULL if no cell is free. Bounded, never blocks. */
int kvp_cmd_begin(struct kvp_cmdring *r, kvp_owner owner, struct kvp_cmd_cell **c, void **payload);

/* kvp_cmd_begin_spare: the same for a command that nobody waits for: KVP_CMD_RESERVED cells stay free for
 * others. */
int kvp_cmd_begin_spare(struct kvp_cmdring *r, kvp_owner owner, struct kvp_cmd_cell **c, void **payload);

/* kvp_cmd_post publishes the command and wakes the consumer. len 0..KVP_CMD_PAYLOAD_MAX. KVP_ERR_INVAL (the
 * cell stays claimed). Pairs with: kvp_cmd_next. */
int kvp_cmd_post(struct kvp_cmdring *r, struct kvp_cmd_cell *c, enum kvp_cmd_type type, uint32_t len);

/* kvp_cmd_post_away: the same for a command that nobody waits for: the cell is no longer the caller's, is
 * free after its execution and must not be touched again. */
int kvp_cmd_post_away(struct kvp_cmdring *r, struct kvp_cmd_cell *c, enum kvp_cmd_type type, uint32_t len);

/* kvp_cmd_done answers 1 when the reply is there (c->status, c->reply_len, bytes in the buffer:
 * kvp_cmd_buffer), else 0. The consumer wakes the producer's slot at the reply. Pairs with: kvp_cmd_reply. */
int kvp_cmd_done(const struct kvp_cmdring *r, const struct kvp_cmd_cell *c);

/* kvp_cmd_end gives the cell back in whatever state it is: claimed and done ones are free at once, a posted
 * one is withdrawn and never executed, a taken one is left to the consumer, whose reply nobody will read.
 * The caller must not touch the cell again. return 1 if the command can no longer be executed or was
 * answered, 0 if it is being executed (it may or may not take effect). */
int kvp_cmd_end(struct kvp_cmdring *r, struct kvp_cmd_cell *c);

/* ---- consumer ---- */

/* kvp_cmd_attach makes the caller the consumer: commands that a dead consumer had taken become posted again
 * in their old order. owner: the caller's. return the number of such commands. who: the consumer process,
 * once, before kvp_cmd_next; the former consumer must be dead (one process in the role: the supervisor sees
 * to it). */
uint32_t kvp_cmd_attach(struct kvp_cmdring *r, kvp_owner owner);

/* kvp_cmd_next takes the oldest posted command. KVP_ERR_NOTFOUND if there is none; costs one load then. Type
 * and len of *c are in range. */
int kvp_cmd_next(struct kvp_cmdring *r, struct kvp_cmd_cell **c);

/* kvp_cmd_reply publishes status and len bytes of reply (already in the buffer) and wakes the producer; the
 * cell becomes free at once if nobody waits for it any more. len above KVP_CMD_PAYLOAD_MAX: KVP_ERR_INVAL. */
int kvp_cmd_reply(struct kvp_cmdring *r, struct kvp_cmd_cell *c, int status, uint32_t len);

/* ---- both ---- */

/* kvp_cmd_buffer gives the cell's buffer, KVP_CMD_PAYLOAD_MAX bytes. */
void *kvp_cmd_buffer(const struct kvp_cmdring *r, const struct kvp_cmd_cell *c);

/* kvp_cmd_sweep_owner repairs the cells of a dead owner (see Crash) and rings the consumer; returns their
 * number. */
uint32_t kvp_cmd_sweep_owner(struct kvp_cmdring *r, kvp_owner dead);

/* kvp_cmd_count tells how many cells are in each state (cnt[0..4] = FREE, CLAIMED, POSTED, TAKEN, DONE). */
#define KVP_CMD_STATES 5
void kvp_cmd_count(const struct kvp_cmdring *r, uint32_t cnt[KVP_CMD_STATES]);
#endif
