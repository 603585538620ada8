/* daemons/indexer/indexer.h — the apply thread's state: registry of workers and ranks, tree, commands.
 *
 * Shape      struct kvp_idx: writers of catalogue and tree, and what belongs to each worker and rank slot
 *            beside the catalogue. Everything here is touched by the apply thread only; decoder threads
 *            get copies (listener.h) and send operations (ring.h).
 * Truth      the catalogue. This state is rebuilt from it by kvp_idx_recover.
 * Writers    the apply thread.
 * Ordering   a change of a worker: rank slots taken and opened for booking -> record -> view; a loss:
 *            record -> view without the rank -> bookings dropped -> tree cleared (later,
 *            kvp_idx_clear_some) -> slot free.
 * Lifetime   the process.
 * Limits     a rank that finds no free index slot is scored by load only and waits: the first slot that gets
 *            free is given to it, its events count from then on, and what came before is fetched from its
 *            replay endpoint.
 * Crash      killed anywhere: kvp_idx_recover of the next process compares rank slots with schedulable
 *            records, takes what is missing, and drops and clears what nobody owns.
 * Proved by  tests/t_reconcile.c, tests/t_apply.c, tests/s_events.t
 */
#ifndef KVP_INDEXER_H
#define KVP_INDEXER_H

#include "daemons/common/worker_record.h"
#include "daemons/indexer/recovery.h"
#include "daemons/indexer/ring.h"
#include "shm/catalogue.h"
#include "shm/counter.h"
#include "shm/hits.h"
#include "shm/mark.h"
#include "shm/memo.h"
#include "shm/radix.h"
#include "shm/resv.h"
#include "shm/routed.h"

/* What is known of a rank slot in use beside the catalogue. */
struct kvp_idx_rank {
	uint64_t worker_id;
	uint64_t listener; /* number of its listener, 0 = none */
	uint64_t epoch;	   /* registry epoch since which operations count */
	uint64_t part_salt;
	uint32_t rank_gen, dp_rank, index_slot, index_gen;
	uint32_t part, worker_idx;
	uint32_t is_lost; /* 1: in the queue of those to be cleared */
	uint64_t kv_hint; /* struct kvp_rank_view */
	char *event, *replay; /* endpoints that the listener uses, heap, NULL = none */
};

/* A schedulable worker. */
struct kvp_idx_worker {
	uint64_t worker_id;
	uint32_t is_schedulable;
	uint32_t part, start_rank, rank_cnt;
	uint32_t *rank_slot; /* rank_cnt slots, ascending rank, heap */
	uint64_t max_num_batched_tokens, total_kv_blocks;
	uint64_t *taint; /* sorted hashes, heap */
	uint32_t taint_cnt;
};

struct kvp_idx_part { /* schedulable workers of a partition, ascending worker id */
	uint32_t *worker_idx;
	uint32_t cnt, cap;
	uint32_t taint_cnt;
};

/* What selections of a partition found when they were last looked at (unmatched.c). */
struct kvp_idx_hits {
	uint64_t asked, found;
	uint32_t is_unmatched;
};

struct kvp_idx_listeners; /* listener.h */
struct kvp_cmd_routed;	  /* shm/cmdring.h */

/* Bookings that feed a tree: the only one in approximate mode, that of predictions beside KV events. */
struct kvp_idx_path { /* of a long prompt whose pieces are coming in */
	uint64_t owner, number;
	uint64_t *local;
	uint32_t cnt;
};
struct kvp_idx_routed {
	struct kvp_radix_w *tree;
	struct kvp_routed *table;  /* NULL: bookings feed nothing */
	struct kvp_idx_path *path; /* by the sender's slot, KVP_SLOT_MAX */
};

struct kvp_idx_cfg {
	enum kvp_wrec_queueing queueing;
	enum kvp_wrec_events events;
};

/* While recovering no view is published. */
enum kvp_idx_state { KVP_IDX_RECOVERING, KVP_IDX_SERVING, KVP_IDX_STOPPING };

struct kvp_idx {
	struct kvp_idx_cfg cfg;
	struct kvp_cat_writer cat;
	struct kvp_radix_w *radix;
	struct kvp_book *book;
	struct kvp_mark *mark; /* NULL: marks are not kept */
	struct kvp_memo *memo; /* set before kvp_idx_recover; NULL: what listeners remember is not kept */
	struct kvp_memo_note *note; /* while recovering: what they are to start with, by rank slot */
	uint64_t *note_first;
	struct kvp_ctr_column_shm *ctr;
	struct kvp_idx_routed routed;
	struct kvp_idx_recovery recovery;
	struct kvp_idx_listeners *listeners;
	struct kvp_json *json;
	struct kvp_jw jw;	       /* last record written */
	struct kvp_idx_rank *rank;     /* rank_max */
	struct kvp_idx_worker *worker; /* worker_max */
	struct kvp_idx_part part[KVP_PART_MAX];
	const struct kvp_hits *hits; /* NULL: nobody looks */
	struct kvp_idx_hits seen[KVP_PART_MAX];
	struct kvp_rank_view *view; /* scratch, rank_max */
	uint64_t *taint;	    /* scratch, taint_max */
	uint32_t *lost;		    /* rank slots to be cleared and freed: a queue */
	uint32_t lost_head, lost_cnt;
	uint32_t clearing;    /* index slot that an event is clearing in steps, or KVP_INDEX_NONE */
	uint32_t waiting_cnt; /* ranks without an index slot, lost ones not counted */
	uint64_t next_listener, epoch;
	enum kvp_idx_state state;
};

/* kvp_idx_open fills idx around joined objects (which must outlive it), in state RECOVERING.
 * KVP_ERR_SYS without memory. */
int kvp_idx_open(struct kvp_idx *idx, const struct kvp_cat *cat, struct kvp_radix_w *radix,
	struct kvp_book *book, struct kvp_mark *mark, struct kvp_ctr_column_shm *ctr,
	const struct kvp_idx_cfg *cfg);
void kvp_idx_close(struct kvp_idx *idx);
/* kvp_idx_recover rebuilds the registry from the catalogue, starts the listeners of schedulable workers
 * and goes to SERVING. Call it once, also on an empty catalogue. */
int kvp_idx_recover(struct kvp_idx *idx);

/* -- registry.c -- */
/* kvp_idx_view_publish publishes the partition's eligible ranks if they changed. */
void kvp_idx_view_publish(struct kvp_idx *idx, uint32_t part);
/* kvp_idx_part_add and _drop keep the sorted list of a partition's workers. KVP_ERR_SYS: no memory; not for
 * the next one that is added once kvp_idx_part_room has said KVP_OK. */
int kvp_idx_part_room(struct kvp_idx *idx, uint32_t part);
int kvp_idx_part_add(struct kvp_idx *idx, uint32_t part, uint32_t worker_idx);
void kvp_idx_part_drop(struct kvp_idx *idx, uint32_t part, uint32_t worker_idx);
/* kvp_idx_rank_take takes and opens a slot for a rank: KVP_ERR_FULL. kvp_idx_rank_lose closes its
 * listener and its bookings and queues the slot for clearing; the view without it must be published. */
int kvp_idx_rank_take(struct kvp_idx *idx, uint32_t worker_idx, uint64_t worker_id, uint32_t part,
	uint32_t dp_rank, uint32_t *rank_slot);
void kvp_idx_rank_lose(struct kvp_idx *idx, uint32_t rank_slot);
/* kvp_idx_rank_purge empties the tree of a rank that stays and has its stream start anew; kvp_idx_rank_anew
 * is the second half alone. kvp_idx_rank_clear empties the tree in steps of some milliseconds, one rank at a
 * time: KVP_ERR_AGAIN until it is done. */
void kvp_idx_rank_purge(struct kvp_idx *idx, uint32_t rank_slot);
void kvp_idx_rank_anew(struct kvp_idx *idx, uint32_t rank_slot);
int kvp_idx_rank_clear(struct kvp_idx *idx, uint32_t index_slot);
/* kvp_idx_rank_set fills the registry's entry of a rank slot in use. */
void kvp_idx_rank_set(struct kvp_idx *idx, const struct kvp_cat_rank_info *info);
/* kvp_idx_clear_some clears queued slots in up to max steps of some milliseconds; returns how many are left.
 * Index slots that become free go to ranks that have none. */
uint32_t kvp_idx_clear_some(struct kvp_idx *idx, uint32_t max);
/* kvp_idx_rank_listen gives a rank the listener for these endpoints (NULL = none): keeps the one it has
 * if the event endpoint is the same, moves its replay address if only that changed, else purges the rank
 * and starts a new one: FRESH at an unset mark, RESUME where the last process stopped, REFILL at an unset
 * mark for an engine that may hold blocks already. The last two fetch at once what was missed. */
enum kvp_idx_resume { KVP_IDX_FRESH, KVP_IDX_RESUME, KVP_IDX_REFILL };
int kvp_idx_rank_listen(struct kvp_idx *idx, uint32_t rank_slot, const char *event, const char *replay,
	enum kvp_idx_resume how);
/* kvp_idx_notes_load reads what the listeners of before remembered; rank_listen with RESUME hands it over.
 * KVP_ERR_SYS. */
int kvp_idx_notes_load(struct kvp_idx *idx);
void kvp_idx_notes_free(struct kvp_idx *idx);
/* kvp_idx_index_waiting gives free index slots to ranks that have none; their listeners start anew. */
void kvp_idx_index_waiting(struct kvp_idx *idx);
void kvp_idx_gauges(struct kvp_idx *idx);

/* -- unmatched.c -- */
/* kvp_idx_unmatched_begin names the counts, kvp_idx_unmatched compares them with those of the last look: a
 * partition that holds blocks of which KVP_IDX_UNMATCHED_CNT selections or more have found none is told of
 * once, and once when that ends. */
#define KVP_IDX_UNMATCHED_CNT 200
void kvp_idx_unmatched_begin(struct kvp_idx *idx, const struct kvp_hits *hits);
void kvp_idx_unmatched(struct kvp_idx *idx);

/* -- reconcile.c: each executes a command and returns an HTTP status; the reply's JSON is in idx->jw -- */
/* post: from the API an id that is registered with another role is refused with 409; discovery moves it. */
int kvp_idx_worker_post(struct kvp_idx *idx, enum kvp_part_role role, enum kvp_cmd_post_by by,
	const char *json, size_t len);
int kvp_idx_worker_patch(struct kvp_idx *idx, uint64_t worker_id, const char *json, size_t len);
int kvp_idx_worker_delete(struct kvp_idx *idx, uint64_t worker_id);

/* -- routed.c -- */
/* kvp_idx_routed_open makes bookings feed a tree, idx->radix or one of its own; after kvp_idx_open.
 * KVP_ERR_SYS, KVP_ERR_INVAL. kvp_idx_routed_recover goes on with what the tree holds; after kvp_idx_recover,
 * before the first command. Returns the blocks kept: as if they had been booked just now. About 0.2 us a
 * block. */
int kvp_idx_routed_open(struct kvp_idx *idx, struct kvp_radix_w *tree, const struct kvp_routed_cfg *cfg);
uint64_t kvp_idx_routed_recover(struct kvp_idx *idx);
void kvp_idx_routed_close(struct kvp_idx *idx);
/* kvp_idx_routed executes a command: len bytes of local hashes, 8-byte aligned. Counted and dropped if the
 * rank is gone or not indexed, or a piece before it is missing. */
void kvp_idx_routed(struct kvp_idx *idx, const struct kvp_cmd_routed *c, const uint64_t *local, uint32_t len,
	uint64_t now_ns);
/* kvp_idx_routed_forget: a rank that is lost; its blocks are cleared with the rank. */
void kvp_idx_routed_forget(struct kvp_idx *idx, uint32_t index_slot);
/* kvp_idx_routed_tend drops what is due, at most about budget blocks. 0 = nothing to do. */
uint32_t kvp_idx_routed_tend(struct kvp_idx *idx, uint64_t now_ns, uint32_t budget);

/* -- apply.c -- */
/* kvp_idx_apply applies one operation to the tree, if its listener and rank are still the ones it was
 * meant for. now_ns (CLOCK_MONOTONIC) is used by marks only. KVP_OK; KVP_ERR_AGAIN: a step of a clear is
 * done, or the rank is being cleared: bring the same message again, and those behind it after it. */
int kvp_idx_apply(struct kvp_idx *idx, const struct kvp_idx_msg *m, uint64_t now_ns);
#endif
