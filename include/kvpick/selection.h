/* kvpick/selection.h — choose a worker for a prompt, book its load, give it back: the in-process interface
 * that every face (HTTP, ext_proc, embedding programs) calls.
 *
 * Shape      one opaque handle per thread; plain request and answer structs; all pointers borrowed for the
 *            call. 64-bit hashes are bit patterns (the HTTP API shows them signed).
 * Truth      the region: catalogue, tree, reservations. The handle holds scratch memory and settings only.
 * Who        one thread per handle; any number of handles and processes on one node.
 * Blocks     never: no lock, no wait on another process, bounded retries.
 * Errors     each call returns an HTTP status number (200, 201, 400, 404, 409, 429, 500, 503) and, for 4xx
 *            and 5xx, a text that names the field in the handle's error buffer (kvp_selection_error).
 * Methods    for every handle: select, select_and_reserve, reserve (explicit, by replay), prefill_complete,
 *            output_block, free, undo, potential_loads, overlap_scores, loads, waiting, worker_next (list),
 *            schedulable (ready). To upsert, patch and delete workers is the indexer's alone on a node (over
 *            HTTP); in a node of one's own it is kvp_selection_local_worker, _update and _gone. Peers and
 *            dump belong to a node's processes: a node of one's own has no peers, and whoever feeds it knows
 *            its blocks. tests/t_embed.c is a program that embeds all of it.
 * Crash      a caller killed inside a call leaves a claimed or pending reservation under its owner number;
 *            the sweep of that owner finishes or undoes it (shm/sweep.h). Settled HTTP bookings stay.
 * Proved by  tests/t_embed.c, tests/t_select.c, tests/t_select_queue.c, tests/s_selection.t
 */
#ifndef KVPICK_SELECTION_H
#define KVPICK_SELECTION_H

#include <kvpick/hash.h>
#include <kvpick/types.h>
#include <stdint.h>

struct kvp_selection;

#define KVP_SELECTION_WAIT 102	  /* the one answer that is none: see kvp_selection_select_and_reserve */
#define KVP_SELECTION_ID_MAX 4096 /* bytes of a selection id */
#define KVP_NAME_MAX 1024	  /* bytes of model, group, LoRA name, salt, endpoint */
#define KVP_SESSION_ID_MAX 256	  /* bytes of a session id */
#define KVP_DP_SHOWN_MAX 4096	  /* ranks of one worker listed in an overlap summary */

enum kvp_prompt_form {
	KVP_PROMPT_NONE,   /* neither tokens nor hashes were given */
	KVP_PROMPT_TOKENS, /* token, token_cnt, mm, mm_cnt */
	KVP_PROMPT_HASHES  /* block_hash, seq_hash, isl_tok */
};

struct kvp_prompt {
	enum kvp_prompt_form form;
	const uint32_t *token;
	uint32_t token_cnt;
	const struct kvp_hash_mm *mm; /* one entry a block, NULL = no multimodal objects */
	uint32_t mm_cnt;
	const uint64_t *block_hash; /* NULL = absent */
	uint32_t block_hash_cnt;
	const uint64_t *seq_hash; /* NULL = absent */
	uint32_t seq_hash_cnt;
	enum kvp_tristate has_isl;
	uint64_t isl_tok;
	struct kvp_str lora, salt;
	enum kvp_tristate eagle; /* KVP_UNSET = the partition's */
};

/* Values that replace the configured ones for one request. NaN = not given. */
struct kvp_override {
	double overlap_score_credit;
	double prefill_load_scale;
	double temperature;
	double shared_cache_multiplier;
	enum kvp_tristate assume_kv_reuse;
	enum kvp_tristate track_prefill_tokens;
};

struct kvp_taint_pref {
	struct kvp_str taint;
	float weight;
};

struct kvp_select_request {
	enum kvp_part_role role;
	struct kvp_str model, group;
	struct kvp_str selection_id; /* absent: select has none, select_and_reserve makes a UUID */
	struct kvp_prompt prompt;
	struct kvp_override override;
	uint32_t expected_output_tok; /* 0 = not given */
	enum kvp_tristate has_pinned;
	uint64_t pinned_worker_id;
	uint32_t pinned_dp_rank;
	enum kvp_tristate binds_pinned; /* the session sticks to the pinned rank; else a pin passes it over */
	enum kvp_tristate has_target, has_target_rank; /* soft steering: ignored when it is not eligible */
	uint64_t target_worker_id;
	uint32_t target_dp_rank;
	const uint64_t *allowed_worker_id; /* NULL = all; with allowed_cnt 0 and not NULL: nobody */
	uint32_t allowed_cnt;
	const struct kvp_str *required_taint;
	uint32_t required_cnt;
	const struct kvp_taint_pref *preferred_taint;
	uint32_t preferred_cnt;
	struct kvp_str session_id;  /* sticks to its first booked worker where session affinity is on */
	enum kvp_tristate no_wait;  /* select_and_reserve: do not wait for another booking of the session */
	double priority_jump;	     /* seconds of waiting that it starts ahead with; negative counts as 0 */
	uint32_t strict_priority;    /* higher goes first, whatever else */
	struct kvp_str policy_class; /* class or family of the queue policy; ptr NULL = the default */
	enum kvp_tristate advisory; /* select only: never waits, reports the load of the chosen worker */
};

/* kvp_select_request_init makes a request in which nothing is given: then set model, group, prompt and what
 * else there is. kvp_reserve_request_init the same for an explicit reservation. */
void kvp_select_request_init(struct kvp_select_request *q);

/* kvp_selection_new_id writes a new random id, a UUID in text, and a final 0. */
#define KVP_SELECTION_NEW_ID_LEN 36
void kvp_selection_new_id(char out[KVP_SELECTION_NEW_ID_LEN + 1]);

/* Matched tokens of the chosen worker, cumulative over tiers. */
struct kvp_overlap_summary {
	uint32_t longest_matched_tok, gpu_tok, cpu_tok, disk_tok;
	const uint32_t *dp_rank; /* every rank of the worker, ascending */
	const uint32_t *dp_tok;	 /* device-tier tokens of that rank */
	uint32_t dp_cnt;
};

/* Load of the chosen rank before the request, for an advisory selection. */
struct kvp_worker_load {
	enum kvp_tristate given;
	uint64_t active_prefill_tok;
	uint64_t prefill_capacity_tok;	/* max_num_batched_tokens; 10,000,000 for a worker that named none */
	uint64_t total_kv_blocks;	/* 0 = unknown */
	enum kvp_tristate prefill_busy; /* KVP_UNSET = no threshold */
};

/* Pointers stay valid until the next call on the handle. */
/* Where the worker that was chosen could fetch blocks of the prompt from: a rank of the same kind (the worker
 * type of its router hint) that holds more of it. Its own hashes of these blocks are known to the indexer
 * only. */
struct kvp_kv_source {
	uint64_t worker_id;
	uint32_t dp_rank, part, index_slot, index_gen;
	uint32_t blk_cnt;	    /* blocks from the first on that it holds; 0 = there is no such rank */
	uint32_t more_blk;	    /* beyond those that the chosen rank holds */
	const uint64_t *local_hash; /* of these blocks; valid until the next call */
};

struct kvp_select_answer {
	struct kvp_str selection_id; /* ptr NULL = none */
	struct kvp_str model, group; /* kvp_selection_collect only */
	uint64_t worker_id;
	uint32_t dp_rank;
	const char *endpoint;
	uint32_t block_size;
	struct kvp_overlap_summary overlap;
	uint64_t effective_prefill_tok;
	uint64_t potential_decode_blk;
	enum kvp_tristate decode_busy; /* KVP_UNSET = threshold or capacity unknown */
	const uint64_t *seq_hash;      /* tracking hashes booked (select_and_reserve) */
	uint32_t seq_cnt;
	uint64_t isl_tok;
	enum kvp_tristate track_prefill_tokens;
	struct kvp_worker_load worker_load;
	struct kvp_kv_source kv_source; /* select_and_reserve */
	uint64_t booking; /* select_and_reserve: what was booked, for kvp_selection_undo */
};

struct kvp_reserve_request {
	enum kvp_part_role role;
	struct kvp_str model, group, selection_id;
	uint64_t worker_id;
	uint32_t dp_rank;
	struct kvp_prompt prompt;
	struct kvp_override override;
	uint32_t expected_output_tok;
	enum kvp_tristate has_effective_prefill;
	uint64_t effective_prefill_tok;
	enum kvp_tristate track_prefill_tokens;
	struct kvp_str session_id; /* in soft affinity: the session sticks to this worker from now on */
};

void kvp_reserve_request_init(struct kvp_reserve_request *q);

/* A registered worker; the strings are valid until the next call on the handle. */
struct kvp_worker_row {
	uint64_t worker_id;
	enum kvp_part_role role;
	struct kvp_str model, group, endpoint; /* ptr NULL = not known yet */
	uint32_t start_rank, size;	       /* data-parallel ranks */
	enum kvp_tristate is_schedulable;
};

struct kvp_load_row {
	uint64_t worker_id;
	uint32_t dp_rank;
	uint64_t prefill_tok;
	uint64_t decode_blk;
	uint64_t active_requests;
};

/* Blocks of the prompt: on the device, and what host memory and then disk and external store add. */
struct kvp_overlap_row {
	uint64_t worker_id;
	uint32_t dp_rank;
	uint32_t device_blk, host_ext_blk, disk_ext_blk;
	double router_credit_blk;
};

/* kvp_selection_select chooses without booking; kvp_selection_select_and_reserve also books atomically.
 *
 * return  200 with a filled; 400 prompt or argument (text names the member), 409 the id is live or being
 * booked (or, with a session, 400 it is bound elsewhere), 500 the chosen worker vanished, KVP_SELECTION_WAIT
 * when another process just binds the session (nothing was done: repeat the call when this process's slot is
 * woken or some milliseconds later, after ten seconds with no_wait), 503 no schedulable worker, nothing
 * eligible, or table full.
 */
int kvp_selection_select(
	struct kvp_selection *s, const struct kvp_select_request *q, struct kvp_select_answer *a);
int kvp_selection_select_and_reserve(
	struct kvp_selection *s, const struct kvp_select_request *q, struct kvp_select_answer *a);

/* -- waiting: with a queue policy, a request whose eligible ranks are all busy waits its turn. The two calls
 * above never wait: they answer 429. kvp_selection_submit is either of them and may answer KVP_SELECT_WAITS
 * and a ticket; whoever gives load back then chooses and books for it, in any process, and wakes this one. --
 *
 * kvp_selection_tend: call it when the process was woken (shm/slot.h) and once a heartbeat while it has
 * tickets. kvp_selection_next gives a ticket that may have changed: 1, or 0 when there is none; *cursor 0 at
 * first. kvp_selection_collect answers it: KVP_SELECT_WAITS, or what the call itself would have answered,
 * with a (model and group too) filled from what was stored; the ticket is then over.
 * kvp_selection_cancel ends a ticket at once: its id is free, or is freed by who is booking it just now. */
#define KVP_SELECT_WAITS 202
enum kvp_select_kind { KVP_SELECT_ONLY, KVP_SELECT_AND_RESERVE };
int kvp_selection_submit(struct kvp_selection *s, const struct kvp_select_request *q,
	enum kvp_select_kind kind, struct kvp_select_answer *a, uint64_t *ticket);
void kvp_selection_tend(struct kvp_selection *s);
int kvp_selection_next(struct kvp_selection *s, uint32_t *cursor, uint64_t *ticket);
int kvp_selection_collect(struct kvp_selection *s, uint64_t ticket, struct kvp_select_answer *a);
void kvp_selection_cancel(struct kvp_selection *s, uint64_t ticket);

/* Which limit refused the last call; NULL if it was not a limit. */
struct kvp_select_refusal {
	const char *policy_class, *limit_kind;
	uint64_t current, limit;
};
const struct kvp_select_refusal *kvp_selection_refusal(const struct kvp_selection *s);
/* kvp_selection_waiting counts what waits in a partition, and its prompt tokens. */
void kvp_selection_waiting(struct kvp_selection *s, enum kvp_part_role role, struct kvp_str model,
	struct kvp_str group, uint64_t *cnt, uint64_t *isl_tok);

/* kvp_selection_runners_up names further workers for a request, the cheapest first, as a selection without a
 * session would judge them now: for a caller that tries them in order when the chosen one can't be reached.
 * Books nothing, waits for nothing. Each worker comes once, with its cheapest rank.
 *
 * except    worker to leave out: the chosen one.
 * dp_rank   NULL, or the only rank number that counts.
 * return    how many of at most cap were written to out; 0 also where the request can't be judged.
 */
#define KVP_RUNNERS_MAX 16
struct kvp_runner_up {
	uint64_t worker_id;
	uint32_t dp_rank;
};
uint32_t kvp_selection_runners_up(struct kvp_selection *s, const struct kvp_select_request *q,
	uint64_t except, const uint32_t *dp_rank, struct kvp_runner_up *out, uint32_t cap);

/* kvp_selection_end_session ends the binding of a session: its next request goes where it is cheapest. 200,
 * or 404 there is none. */
int kvp_selection_end_session(struct kvp_selection *s, enum kvp_part_role role, struct kvp_str model,
	struct kvp_str group, struct kvp_str session_id);

/* kvp_selection_reserve books a named worker and rank, without a choice and without a queue (explicit form).
 * return  201 with a->endpoint, worker_id, dp_rank filled; 400, 404 worker or rank, 409, 503.
 */
int kvp_selection_reserve(
	struct kvp_selection *s, const struct kvp_reserve_request *q, struct kvp_select_answer *a);

/* kvp_selection_replay books what kvp_selection_select chose last under the same partition and id: that
 * worker and rank, with the hashes, loads and decisions of then; neither limits nor load are looked at again.
 * The selections of all processes of the node are known, for the configured time and as far as the configured
 * room goes; an explicit reservation of the id ends them. A failed replay may be repeated.
 * return  201 with a->endpoint, worker_id, dp_rank filled; 404 nothing kept, or worker or rank gone; 409;
 *         503.
 */
int kvp_selection_replay(struct kvp_selection *s, enum kvp_part_role role, struct kvp_str model,
	struct kvp_str group, struct kvp_str selection_id, struct kvp_select_answer *a);

/* Lifecycle of a live booking: 200, or 404 when the id is unknown, in flight, freed or expired.
 * kvp_selection_output_block: fraction NULL = none; outside [0,1] or NaN is 400, checked before the id. */
int kvp_selection_prefill_complete(struct kvp_selection *s, struct kvp_str id);
int kvp_selection_output_block(struct kvp_selection *s, struct kvp_str id, const double *fraction);
int kvp_selection_free(struct kvp_selection *s, struct kvp_str id);
/* kvp_selection_undo frees exactly the booking of an answer whose receiver has gone, however it is called and
 * whoever has booked the same id since: 200, or 404 it has ended. */
int kvp_selection_undo(struct kvp_selection *s, uint64_t booking);

/* kvp_selection_loads fills up to cap rows (active load of every schedulable rank of a partition, sorted by
 * worker and rank); *cnt is the number there are. 200, or 404 unknown partition. */
int kvp_selection_loads(struct kvp_selection *s, enum kvp_part_role role, struct kvp_str model,
	struct kvp_str group, struct kvp_load_row *row, uint32_t cap, uint32_t *cnt);

/* kvp_selection_potential_loads: the same with the prompt added. 200, 400, 503. */
int kvp_selection_potential_loads(struct kvp_selection *s, const struct kvp_select_request *q,
	struct kvp_load_row *row, uint32_t cap, uint32_t *cnt);

/* kvp_selection_overlap_scores: cached blocks of every schedulable rank for a prompt. 200, 400, 503. */
int kvp_selection_overlap_scores(struct kvp_selection *s, const struct kvp_select_request *q,
	struct kvp_overlap_row *row, uint32_t cap, uint32_t *cnt, uint32_t *block_size, uint32_t *num_blk);

/* -- a node of one's own, for tests and local-only use: a private region in this process, with the catalogue
 * and the tree written by these calls. No events from sockets, no other process, nothing synchronised with
 * anybody. One thread. All counts of the configuration: 0 takes the default in brackets. -- */
enum kvp_local_queue { KVP_LOCAL_NO_QUEUE, KVP_LOCAL_FCFS, KVP_LOCAL_LCFS, KVP_LOCAL_WSPT };
/* How ranks are compared: by cached blocks and load in blocks, or by the work that a request makes a rank do
 * (README, "Which policy"). */
enum kvp_local_policy { KVP_LOCAL_REFERENCE, KVP_LOCAL_LEAST_WORK };
struct kvp_local_cfg {
	enum kvp_local_policy policy[KVP_PART_ROLE_CNT]; /* of each role */
	uint32_t rank_max;	   /* [64] at most 65536; up to 4096 of them indexed */
	uint32_t reservation_max;  /* [4096] */
	uint64_t block_max;	   /* [100000] */
	uint64_t active_block_max; /* [65536] */
	uint64_t seed;		   /* of the tie-breaking generator; 0 = from the kernel */
	uint64_t session_ttl_ns;   /* life of an idle session's binding; 0 = no session affinity */
	enum kvp_local_queue queue;
	double queue_threshold; /* a rank is busy above this share of its max_num_batched_tokens */
	/* The blocks of a booking count as cached at its rank, whatever the calls below tell, for so long
	 * after the last booking of them; 0 = no. */
	uint64_t predicted_ttl_ns;
};
struct kvp_local_worker {
	uint64_t worker_id;
	enum kvp_part_role role;
	struct kvp_str model, group, endpoint; /* at most KVP_NAME_MAX bytes each */
	uint32_t block_size;		       /* tokens, fixed by the partition's first worker */
	uint32_t start_rank, size;	       /* data-parallel ranks start_rank .. start_rank + size - 1 */
	enum kvp_tristate is_eagle;
	uint64_t max_num_batched_tokens, total_kv_blocks; /* 0 = unknown */
	const struct kvp_str *taint;
	uint32_t taint_cnt;
};

/* kvp_selection_open_local: NULL without memory or for counts out of range. kvp_selection_close ends it. */
struct kvp_selection *kvp_selection_open_local(const struct kvp_local_cfg *cfg);

/* kvp_selection_local_worker registers a worker anew: bookings and blocks of a former registration are
 * dropped. 201; 400 a member is missing or too long; 409 another block size or eagle flag than the
 * partition's; 503 full. kvp_selection_local_worker_update gives a registered one another endpoint,
 * capacities, taints or number of ranks: ranks that stay keep bookings and blocks. 200; 400; 404 unknown; 409
 * it would be in another partition; 503 no room for a new rank (the others are as asked for).
 * kvp_selection_local_worker_gone: 200, 404. Each lets go who waited for such a change. */
int kvp_selection_local_worker(struct kvp_selection *s, const struct kvp_local_worker *w);
int kvp_selection_local_worker_update(struct kvp_selection *s, const struct kvp_local_worker *w);
int kvp_selection_local_worker_gone(struct kvp_selection *s, uint64_t worker_id);

/* What an engine's KV events say: cnt blocks in a row, the first under the block named parent (NULL: at the
 * root), with their local hashes (kvpick/hash.h) and the engine's own hashes. 200; 404 unknown rank; 400
 * unknown parent or repeated hashes; 503 the tree is full. Removing unknown hashes is no error. */
int kvp_selection_local_stored(struct kvp_selection *s, uint64_t worker_id, uint32_t dp_rank,
	const uint64_t *parent, uint32_t cnt, const uint64_t *local_hash, const uint64_t *block_hash);
int kvp_selection_local_removed(struct kvp_selection *s, uint64_t worker_id, uint32_t dp_rank, uint32_t cnt,
	const uint64_t *block_hash);
/* The same for blocks in another tier than the device's. A block of a lower tier needs a parent that the rank
 * holds in any tier. kvp_selection_local_cleared is for all tiers. */
enum kvp_cache_tier { KVP_CACHE_DEVICE, KVP_CACHE_HOST, KVP_CACHE_DISK, KVP_CACHE_EXTERNAL };
int kvp_selection_local_stored_in(struct kvp_selection *s, enum kvp_cache_tier tier, uint64_t worker_id,
	uint32_t dp_rank, const uint64_t *parent, uint32_t cnt, const uint64_t *local_hash,
	const uint64_t *block_hash);
int kvp_selection_local_removed_in(struct kvp_selection *s, enum kvp_cache_tier tier, uint64_t worker_id,
	uint32_t dp_rank, uint32_t cnt, const uint64_t *block_hash);
int kvp_selection_local_cleared(struct kvp_selection *s, uint64_t worker_id, uint32_t dp_rank);

/* kvp_selection_worker_next gives one registered worker after the other: 1, or 0 at the end; *cursor 0 at
 * first. A worker that changes meanwhile may be left out. */
int kvp_selection_worker_next(struct kvp_selection *s, uint32_t *cursor, struct kvp_worker_row *row);

/* kvp_selection_schedulable counts the schedulable workers of all aggregated partitions. */
uint32_t kvp_selection_schedulable(struct kvp_selection *s);

/* kvp_selection_error is the text of the last non-2xx answer; never NULL. It names ids as they were given:
 * where one holds a NUL byte, kvp_selection_error_len bytes are all of it. */
const char *kvp_selection_error(const struct kvp_selection *s);
size_t kvp_selection_error_len(const struct kvp_selection *s);

void kvp_selection_close(struct kvp_selection *s);
#endif
