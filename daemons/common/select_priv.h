/* daemons/common/select_priv.h — what the files of the selection flow share. */
#ifndef KVP_SELECT_PRIV_H
#define KVP_SELECT_PRIV_H

#include "daemons/common/select.h"
#include "shm/active.h"

#define KVP_SELECT_ERR_MAX 8192
#define KVP_SEL_BUSY_RETRY_MAX 64 /* a rank under recount, an output block of another process under way */

/* A growing scratch array; growing keeps no contents. */
struct kvp_scratch {
	void *ptr;
	size_t bytes;
};

/* The handle's own copy of a partition's ranks: valid as long as no other view was published. */
struct kvp_sel_view {
	uint64_t version;
	uint32_t cnt; /* 0 = nothing copied */
	uint64_t drained; /* version at the last drain: a newer one may have left somebody without a rank */
	struct kvp_scratch rank_mem, taint_mem;
};

/* Selections that looked into the tree, and those that found something. */
struct kvp_sel_hits {
	uint32_t asked, found;
};

/* The normalised prompt of the current call. */
struct kvp_sel_prompt {
	struct kvp_hasher hasher; /* token form only */
	enum kvp_prompt_form form;
	const uint64_t *local; /* local block hashes; token form: scratch, filled as far as local_cnt */
	uint32_t local_cnt;
	uint32_t blk_cnt;    /* blocks to look up */
	const uint64_t *seq; /* tracking hashes */
	uint32_t seq_cnt;
	uint64_t isl_tok;
};

/* One schedulable rank of the partition as the current call sees it; parallel to the score candidates. */
struct kvp_sel_rank {
	uint64_t worker_id;
	uint32_t dp_rank, rank_slot, rank_gen, worker_idx;
	uint32_t index_slot, index_gen;
	struct kvp_score_tiers cached; /* blocks of the prompt */
	uint32_t additional_blk;       /* blocks that the prompt would newly activate */
	uint32_t taint_off, taint_cnt; /* in the handle's taint array */
	uint64_t total_kv_blocks, max_num_batched_tokens;
	uint64_t kv_hint; /* struct kvp_rank_view */
	struct kvp_load load;
};

struct kvp_sel_local; /* select_local.c */
void kvp_sel_local_close(struct kvp_sel_local *l);
/* kvp_sel_local_routed puts a booking into the private tree; kvp_sel_local_age drops what is due there. */
void kvp_sel_local_routed(
	struct kvp_sel_local *l, const struct kvp_sel_rank *r, uint32_t n, const uint64_t *local_hash);
void kvp_sel_local_age(struct kvp_sel_local *l);

/* The session of the current call. */
struct kvp_sel_session {
	struct kvp_affinity_key key;
	struct kvp_str id; /* what the key was made of */
	struct kvp_affinity_hold hold;	   /* UNPINNED: nothing to bind or to cancel */
	enum kvp_tristate steer;	   /* KVP_YES: prefer target */
	struct kvp_affinity_target target;
	struct kvp_select_request request; /* the caller's, with the session's target */
};

/* Constraints of a request that waited, in hashes. */
struct kvp_sel_stored {
	struct kvp_eligible_ask ask;
	const uint64_t *preferred;
};

struct kvp_selection {
	struct kvp_sel_local *local; /* the private node of kvp_selection_open_local, else NULL */
	struct kvp_region *region;
	struct kvp_ctr_column_shm *ctr;
	kvp_owner owner;
	struct kvp_select_settings set;
	struct kvp_rng rng;
	struct kvp_radix_match match, predicted;
	uint64_t routed_number; /* bookings told to the index */
	struct kvp_sel_prompt prompt;
	struct kvp_part_fixed part;
	uint32_t part_idx;
	uint32_t rank_cnt;
	struct kvp_sel_rank *rank;   /* of the partition in use: view[part_idx] */
	const uint64_t *taint;	     /* taint hashes of those ranks */
	struct kvp_score_rank *cand; /* eligible ranks, in scratch_cand */
	uint32_t *cand_rank;	     /* index into rank of each, in scratch_cand_rank */
	struct kvp_scratch scratch_cand, scratch_local, scratch_seq, scratch_dp, scratch_tiers,
		scratch_filter,
		scratch_cand_rank;
	struct kvp_sel_view view[KVP_PART_MAX];
	struct kvp_sel_hits hits[KVP_PART_MAX]; /* not yet reported */
	struct kvp_cat_worker_info worker; /* of the chosen worker */
	struct kvp_sel_session session;
	int is_noted; /* that somebody waits was noted anew since kvp_select_note */
	const struct kvp_sel_stored *stored;	  /* the call is for a request that waited, else NULL */
	const struct kvp_policy_class *gate;	  /* class of the current call, if it could be made to wait */
	uint32_t gate_idx;
	struct kvp_select_times *times;		  /* NULL: not measured */
	uint64_t *ticket;			  /* the current call may wait: its ticket goes here */
	struct kvp_select_refusal refusal;	  /* policy_class NULL = none */
	struct kvp_scratch scratch_words, scratch_entry, scratch_lane, scratch_answer, scratch_taint;
	char id[KVP_SELECTION_ID_MAX];	   /* generated id */
	char err[KVP_SELECT_ERR_MAX];
	size_t err_len;
};

/* kvp_sel_fail formats the error text and returns status. kvp_sel_fail_at puts the next of name[] wherever
 * text has a '%': names that come from outside, which may hold any byte, NUL, too. */
int kvp_sel_fail_at(struct kvp_selection *s, int status, const struct kvp_str *name, const char *text);
int kvp_sel_fail(struct kvp_selection *s, int status, const char *fmt, ...)
	__attribute__((format(printf, 3, 4)));

/* Steps that every form of booking shares. kvp_sel_claim takes an id for a booking of an adapter (len 0 =
 * none): 0, 400, 409 or 503. kvp_sel_worker_of fills s->worker with the record of a chosen rank: 0, or 500
 * when it is no longer schedulable.
 * kvp_sel_booking_flags are those of kvp_resv_ask; kvp_sel_booking_failed is the answer to a failed
 * kvp_resv_book. */
int kvp_sel_claim(struct kvp_selection *s, struct kvp_str id, struct kvp_str lora, uint64_t *h);
int kvp_sel_worker_of(struct kvp_selection *s, const struct kvp_sel_rank *r);
uint32_t kvp_sel_booking_flags(const struct kvp_selection *s, enum kvp_tristate track);
int kvp_sel_booking_failed(struct kvp_selection *s, int rc, uint64_t worker_id);

/* kvp_sel_remember keeps what select chose for a replay under q->selection_id; that it could not is counted
 * and not an error. kvp_sel_forget ends what is kept under the id of an explicit reservation. */
void kvp_sel_remember(
	struct kvp_selection *s, const struct kvp_select_request *q, const struct kvp_select_answer *a);
void kvp_sel_forget(struct kvp_selection *s, enum kvp_part_role role, const struct kvp_reserve_request *q);

/* Session of a request, after the partition was opened. look (select) steers to a bound target: 0 or 400.
 * hold (select_and_reserve) begins a booking: 0, 400 or KVP_SELECTION_WAIT. request is q with the target to
 * steer to. Then exactly one of cancel (no booking) and bind (booked as h): 0, or 400 bound elsewhere.
 * bind_kept is hold and bind of a replayed selection. steerable: a session that these calls look at. */
int kvp_sel_steerable(const struct kvp_selection *s, const struct kvp_select_request *q);
int kvp_sel_session_look(struct kvp_selection *s, const struct kvp_select_request *q);
int kvp_sel_session_hold(struct kvp_selection *s, const struct kvp_select_request *q);
const struct kvp_select_request *kvp_sel_session_request(
	struct kvp_selection *s, const struct kvp_select_request *q);
void kvp_sel_session_cancel(struct kvp_selection *s);
int kvp_sel_session_bind(struct kvp_selection *s, uint64_t h, uint64_t worker_id, uint32_t dp_rank);
int kvp_sel_session_bind_kept(
	struct kvp_selection *s, const char *session, size_t len, uint64_t h, const struct kvp_sel_rank *r);

/* kvp_sel_clock: processor time of the thread while times are wanted, else 0. The others add the time since
 * then. */
uint64_t kvp_sel_clock(const struct kvp_selection *s);
void kvp_sel_hashed(struct kvp_selection *s, uint64_t from);
void kvp_sel_booked(struct kvp_selection *s, uint64_t from);

/* kvp_sel_scratch makes room for n elements; NULL without memory. */
void *kvp_sel_scratch(struct kvp_scratch *m, size_t n, size_t elem_bytes);

/* -- waiting (select_queue.c, select_drain.c) -- */

/* kvp_sel_admit judges a prepared request: 0 = choose now; KVP_SELECT_WAITS = it waits (s->ticket is set);
 * else a refusal. h: its claim, 0 = it books nothing. kvp_sel_admit_again: the same for a booking that met
 * another one; 0 for requests that nothing can make wait. */
int kvp_sel_admit(
	struct kvp_selection *s, const struct kvp_select_request *q, enum kvp_tristate track, uint64_t h);
int kvp_sel_admit_again(
	struct kvp_selection *s, const struct kvp_select_request *q, enum kvp_tristate track, uint64_t h);
/* kvp_sel_drain lets go who can of one partition, or of all; the handle's call state is lost. One load when
 * nobody waits. */
void kvp_sel_drain(struct kvp_selection *s, uint32_t part);
void kvp_sel_drain_all(struct kvp_selection *s);

/* Blocks of the prompt that a rank had: worker, dp_rank << 32 | rank_gen, device << 32 | host, disk. */
#define KVP_SEL_CACHED_WORDS 4

/* A stored request, taken apart: pointers into scratch memory. */
struct kvp_sel_waiting {
	struct kvp_select_request q;
	struct kvp_sel_stored stored;
	enum kvp_tristate track;
	enum kvp_select_kind kind;
	struct kvp_sel_session session; /* key and hold */
	const uint64_t *cached; /* of each rank that had blocks, ascending: KVP_SEL_CACHED_WORDS words */
	uint32_t cached_cnt;
};
enum kvp_sel_load { KVP_SEL_LOAD_FILTERS, KVP_SEL_LOAD_ALL };
/* kvp_sel_load reads what a record carries: constraints only, or everything, prompt included. 0; KVP_ERR_* */
int kvp_sel_load(struct kvp_selection *s, uint64_t h, enum kvp_sel_load what, struct kvp_sel_waiting *w);
/* kvp_sel_answer_put packs an answer (or the error text of s) for kvp_queue_finish. */
int kvp_sel_answer_put(struct kvp_selection *s, uint64_t h, uint64_t booked, int status,
	const struct kvp_select_answer *a, uint32_t worker_idx);

/* What the eligible ranks are like. class NULL: only their number. cached: the most tokens that one holds. */
struct kvp_sel_survey {
	uint32_t eligible, busy;
	uint64_t best_cached_tok;
};
enum kvp_sel_look { KVP_SEL_LOOK_BUSY, KVP_SEL_LOOK_CACHED };
int kvp_sel_survey(struct kvp_selection *s, const struct kvp_select_request *q,
	const struct kvp_policy_class *class, enum kvp_sel_look look, struct kvp_sel_survey *out);

/* kvp_sel_open_part is kvp_sel_open_partition by index; without ranks rank_cnt is 0 and it answers 503. */
int kvp_sel_open_part(struct kvp_selection *s, uint32_t part);
int kvp_sel_book_chosen(struct kvp_selection *s, const struct kvp_select_request *q, uint64_t h,
	enum kvp_tristate track, uint32_t *chosen);
int kvp_sel_fill_answer(
	struct kvp_selection *s, uint32_t chosen, enum kvp_tristate track, struct kvp_select_answer *a);
/* kvp_sel_kv_source finds another rank of the chosen one's kind that holds more of the prompt, as the last
 * kvp_sel_look_up told; *out stays as it is if there is none. */
void kvp_sel_kv_source(const struct kvp_selection *s, uint32_t chosen, struct kvp_kv_source *out);

enum kvp_prompt_use {
	KVP_PROMPT_USE_SELECT,	/* select, select_and_reserve: everything needed, isl > 0 */
	KVP_PROMPT_USE_INSPECT, /* potential_loads, overlap_scores: an empty token list is fine */
	KVP_PROMPT_USE_RESERVE	/* explicit reservation: tracking hashes and length only */
};

/* kvp_sel_prompt_begin checks a prompt and prepares hashing; 0, or an HTTP status with text. Token hashes are
 * made when the walk asks for them. kvp_sel_prompt_finish hashes what the walk did not need and makes the
 * tracking hashes: 0, or 500 without memory. */
int kvp_sel_prompt_begin(struct kvp_selection *s, const struct kvp_prompt *p, enum kvp_prompt_use use);
int kvp_sel_prompt_finish(struct kvp_selection *s, enum kvp_tristate assume_reuse);

/* kvp_sel_hash_rest makes the local hashes that the walk did not ask for. */
void kvp_sel_hash_rest(struct kvp_selection *s);

/* kvp_sel_tell_prompt tells the index that the prompt of the current call was booked at a rank, where it is
 * configured to learn from bookings; kvp_sel_tell_routed does so for n given blocks. Nobody waits for the
 * index: what finds no room in the command ring is counted and lost, which costs later requests a hit. */
void kvp_sel_tell_prompt(struct kvp_selection *s, const struct kvp_sel_rank *r);
void kvp_sel_tell_routed(
	struct kvp_selection *s, const struct kvp_sel_rank *r, uint32_t n, const uint64_t *local);

/* kvp_sel_open_partition finds a partition and copies its schedulable ranks: 0, 500, or 503 with text.
 * kvp_sel_look_up walks the tree for the prompt and fills cached of all ranks; KVP_YES: the tree
 * has a block of it, KVP_NO: it has none, KVP_UNSET: it was not looked for. kvp_sel_read_load fills load
 * and additional_blk of rank i. All work on s->rank. */
int kvp_sel_open_partition(
	struct kvp_selection *s, enum kvp_part_role role, struct kvp_str model, struct kvp_str group);
enum kvp_tristate kvp_sel_look_up(struct kvp_selection *s);
/* kvp_sel_note counts what a selection found, for kvp_select_report. */
void kvp_sel_note(struct kvp_selection *s, enum kvp_tristate found);
void kvp_sel_read_load(struct kvp_selection *s, uint32_t i);

/* kvp_sel_pick scores the eligible ranks and picks one: 0 and *chosen (index into s->rank), 400 pin outside
 * the allow list, 500 without memory, 503 nothing eligible. kvp_sel_effective_prefill: prompt tokens that a
 * rank would have to prefill. */
int kvp_sel_pick(struct kvp_selection *s, const struct kvp_select_request *q, enum kvp_tristate track,
	uint32_t *chosen);
uint64_t kvp_sel_effective_prefill(const struct kvp_selection *s, uint32_t i);
uint64_t kvp_sel_cached_tok(const struct kvp_selection *s, uint32_t i);

/* kvp_sel_prompt_more is the tree walk's request for more local hashes (struct kvp_radix_query). */
uint32_t kvp_sel_prompt_more(void *ctx, struct kvp_radix_query *q);
#endif
