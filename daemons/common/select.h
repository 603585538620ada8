/* daemons/common/select.h — the one selection flow that every face calls, behind kvpick/selection.h.
 *
 * Shape      struct kvp_selection: settings, handles of the region's objects, scratch arrays that only grow.
 * Truth      the region; a handle can be thrown away at any time.
 * Writers    bookings, through shm/resv.h, as the handle's owner.
 * Readers    catalogue views and tree, by version validation.
 * Ordering   that of the objects; the flow adds none.
 * Lifetime   from kvp_select_open to kvp_selection_close; the region must outlive it.
 * Crash      see kvpick/selection.h.
 * Proved by  tests/t_select.c, tests/s_selection.t
 */
#ifndef KVP_SELECT_H
#define KVP_SELECT_H

#include <kvpick/selection.h>
#include "shm/region.h"
#include "shm/score.h"

enum kvp_booking_owner {
	KVP_BOOK_FOR_NODE,   /* made over HTTP: outlives the process that made it, ends by absolute age */
	KVP_BOOK_FOR_PROCESS /* made by ext_proc: ends with its process */
};

struct kvp_select_settings {
	struct kvp_score_weights weights; /* credits, scale, tier weights, temperature */
	enum kvp_score_policy score_policy[KVP_PART_ROLE_CNT]; /* how each role's ranks are compared */
	enum kvp_tristate track_prefill_tokens;
	enum kvp_tristate track_active_blocks;
	enum kvp_tristate assume_kv_reuse;
	double decode_busy_threshold;	   /* NaN = unset */
	const struct kvp_policy *policy;   /* what waits, how; NULL = nothing; outlives the handle */
	double refresh_after_s;		   /* wait after which the overlap is looked up again; <= 0 = never */
	double prefill_busy_threshold;	   /* NaN = unset; for advisory selections */
	enum kvp_tristate records_routing; /* bookings feed the index: explicit block hashes are checked */
	enum kvp_tristate decode_learns;   /* bookings of the decode role feed the index like others */
	enum kvp_booking_owner owner_kind;
	enum kvp_affinity_mode affinity_mode;
	struct kvp_hash_placeholder placeholder; /* of prompts with media; both unset by default */
};

/* kvp_select_defaults fills in what an empty environment gives. */
void kvp_select_defaults(struct kvp_select_settings *set);

/* kvp_select_open makes a handle on a joined region.
 *
 * r       joined with KVP_REGION_BOOKER or KVP_REGION_INDEXER.
 * owner   the caller's slot owner number; column: its counters.
 * return  NULL without memory.
 */
struct kvp_selection *kvp_select_open(struct kvp_region *r, kvp_owner owner,
	struct kvp_ctr_column_shm *column, const struct kvp_select_settings *set);

/* After KVP_SELECTION_WAIT: kvp_select_waits_for names the session's booking that was met, kvp_select_note
 * asks for a wake (shm/slot.h) when any such booking ends, kvp_select_is_met tells whether this one goes on:
 * a look, without the request. Note first, then look, then sleep. kvp_select_note: 1, or 0 when the wake
 * that was asked for last time is still to come: until then, or the next time-out, there is nothing to look
 * at. For one handle a slot. */
struct kvp_affinity_key kvp_select_waits_for(const struct kvp_selection *s);
int kvp_select_note(struct kvp_selection *s);
int kvp_select_is_met(struct kvp_selection *s, struct kvp_affinity_key key);

/* kvp_select_report adds what the handle's selections found to the node's counts (shm/hits.h): once a
 * heartbeat. */
void kvp_select_report(struct kvp_selection *s);

/* kvp_select_time adds up in *t, from now on, what calls take of the thread's processor time; NULL ends
 * it. */
struct kvp_select_times {
	uint64_t hash_ns, hash_cnt; /* a prompt's tokens to hashes; spans measured */
	uint64_t book_ns, book_cnt; /* entering the booking */
};
void kvp_select_time(struct kvp_selection *s, struct kvp_select_times *t);

/* kvp_select_seed makes tie-breaking reproducible (tests only; production seeds from the kernel). */
void kvp_select_seed(struct kvp_selection *s, uint64_t seed);
#endif
