/* shm/policy.h — queue policy: what must wait, in which class, in which order, whose turn it is. Pure
 * functions.
 *
 * Shape      plain structs in, plain values out. A profile is a set of classes; a request's class follows
 *            from its family and the bucket of its uncached length. A policy has one profile for everybody
 *            and optional ones by model.
 * Truth      the arguments. No shared memory, no I/O, no clock.
 * Writers    none: what a process makes of its configuration is read-only afterwards.
 * Ordering   none to keep. Who: any thread.
 * Crash      nothing to leave.
 * Proved by  tests/v_policy.c, tests/t_policy_file.c
 */
#ifndef KVP_SHM_POLICY_H
#define KVP_SHM_POLICY_H

#include <kvpick/types.h>
#include <stddef.h>
#include <stdint.h>

#define KVP_POLICY_CLASS_MAX 64 /* of one profile, also families and buckets */
#define KVP_POLICY_NAME_MAX 128 /* bytes of a class, family or bucket name */
#define KVP_POLICY_NONE UINT64_MAX /* no threshold, no limit */
#define KVP_POLICY_EXPLICIT UINT32_MAX /* family of a class that stands outside the matrix */
#define KVP_POLICY_BATCHED_TOK 10000000ull /* max_num_batched_tokens of a worker that did not say */

enum kvp_order { KVP_ORDER_FCFS, KVP_ORDER_LCFS, KVP_ORDER_WSPT };

struct kvp_policy_class {
	char name[KVP_POLICY_NAME_MAX + 1];
	enum kvp_order order;
	uint32_t family, bucket; /* place in the matrix; family KVP_POLICY_EXPLICIT: none */
	uint64_t quantum;	 /* tokens of credit a turn, >= 1 */
	uint64_t busy_tok;	 /* a rank with more prefill tokens is busy; KVP_POLICY_NONE */
	double busy_frac;	 /* the same as a share of max_num_batched_tokens; NaN = unset */
	double busy_ratio;	 /* share of busy ranks at which the pool is busy; NaN = all */
	uint64_t limit_requests, limit_isl_tok, limit_cached_tok; /* per worker; KVP_POLICY_NONE */
};

struct kvp_policy_profile {
	uint32_t class_cnt, family_cnt, bucket_cnt, default_family;
	struct kvp_policy_class class[KVP_POLICY_CLASS_MAX];
	char family[KVP_POLICY_CLASS_MAX][KVP_POLICY_NAME_MAX + 1];
	char bucket[KVP_POLICY_CLASS_MAX][KVP_POLICY_NAME_MAX + 1];
	uint64_t bucket_min[KVP_POLICY_CLASS_MAX]; /* ascending, the first is 0 */
	uint8_t matrix[KVP_POLICY_CLASS_MAX][KVP_POLICY_CLASS_MAX]; /* [family][bucket] -> class */
};

struct kvp_policy { /* process-local; read-only once made */
	uint32_t profile_cnt; /* profile[0]: for every model without one of its own */
	struct kvp_policy_profile *profile;
	char **model; /* profile_cnt names, [0] unused */
};

/* kvp_policy_single makes the profile without a policy file: one class called "default", quantum 1, no
 * limits. frac NaN = nothing ever waits. */
void kvp_policy_single(struct kvp_policy_profile *p, enum kvp_order order, double frac);

/* kvp_policy_of finds the profile of a model. */
const struct kvp_policy_profile *kvp_policy_of(const struct kvp_policy *p, struct kvp_str model);

/* kvp_policy_needs_cache: does the class of a request depend on its uncached length or its name at all? */
int kvp_policy_needs_cache(const struct kvp_policy_profile *p);

/* kvp_policy_cost is the uncached length, at least 1: cost of a turn and of the wspt order. */
uint64_t kvp_policy_cost(uint64_t isl_tok, uint64_t cached_tok);

/* kvp_policy_classify gives the class of a request. name: the class or family that the request asks for, ptr
 * NULL = none; unknown names and names of matrix classes fall to the default family. */
uint32_t kvp_policy_classify(
	const struct kvp_policy_profile *p, struct kvp_str name, uint64_t isl_tok, uint64_t cached_tok);

/* kvp_policy_any_queues: of any class? kvp_policy_queues: can a request of this class be made to wait? */
int kvp_policy_any_queues(const struct kvp_policy_profile *p);
int kvp_policy_queues(const struct kvp_policy_class *c);
/* kvp_policy_rank_busy: max_num_batched_tokens 0 = unknown. kvp_policy_pool_busy judges busy of eligible
 * ranks; no eligible rank is not busy. */
int kvp_policy_rank_busy(const struct kvp_policy_class *c, uint64_t active_tok, uint64_t max_batched_tok);
int kvp_policy_pool_busy(const struct kvp_policy_class *c, uint32_t busy, uint32_t eligible);

/* What waits in a class. */
struct kvp_policy_usage {
	uint64_t requests, isl_tok, cached_tok;
};
enum kvp_limit { KVP_LIMIT_NONE, KVP_LIMIT_REQUESTS, KVP_LIMIT_ISL_TOK, KVP_LIMIT_CACHED_TOK };
/* kvp_policy_limit: which limit forbids one more, with its numbers; workers: registered workers. */
enum kvp_limit kvp_policy_limit(const struct kvp_policy_class *c, uint64_t workers,
	const struct kvp_policy_usage *now, uint64_t *current, uint64_t *limit);
const char *kvp_limit_name(enum kvp_limit l); /* "requests", "raw_isl_tokens", "cached_tokens" */

/* Place in a lane: larger strict first, then larger score, then smaller seq. */
struct kvp_order_key {
	uint32_t strict;
	double score;
	uint64_t seq;
};
/* kvp_policy_score: arrival in seconds since a common start, jump in seconds (negative counts as 0). */
double kvp_policy_score(enum kvp_order order, double arrival_s, double jump_s, uint64_t cost);
int kvp_order_before(const struct kvp_order_key *a, const struct kvp_order_key *b);

/* kvp_policy_refresh_due: look the overlap up again at dequeue? after_s <= 0 = never. */
int kvp_policy_refresh_due(double after_s, uint64_t waited_ns, int has_hashes);

/* -- deficit round robin between the classes of a partition -- */
struct kvp_drr { /* zero at the start; contents are bounds-checked at use */
	uint32_t cursor;
	uint32_t carry; /* class + 1, 0 = none */
	uint64_t deficit[KVP_POLICY_CLASS_MAX];
};
struct kvp_drr_class {
	uint64_t quantum; /* >= 1 */
	uint64_t cost;	  /* of the head, if it can go */
	uint32_t waiting; /* entries in the class */
	int can_go;	  /* its head can be dispatched now */
};
/* kvp_drr_pick chooses the class whose head goes now: its index, or -1 if none can. kvp_drr_take accounts for
 * it: left = entries that still wait in the class. */
int kvp_drr_pick(struct kvp_drr *d, const struct kvp_drr_class *c, uint32_t n);
void kvp_drr_take(struct kvp_drr *d, uint32_t n, uint32_t i, uint64_t cost, uint32_t left);
#endif
