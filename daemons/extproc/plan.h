/* daemons/extproc/plan.h — one request's bookings from the first question to the last release: events in,
 * actions out.
 *
 * Shape      struct kvp_plan, one a request. A pair books a prefill and a decode worker, each with its own
 *            selector; a plan of one leg books the worker that does everything (aggregated, or a decode
 *            worker that prefills itself). Events are calls, actions are calls of struct kvp_plan_ops.
 *            Nothing here knows sockets, shared memory or clocks.
 * Truth      the bookings: the region. A plan knows which of its legs has one.
 * Writers    one thread. An action may be answered from inside itself.
 * Ordering   both legs of a pair are asked for before one is waited for; of a chain one after the other.
 *            `publish` only while every leg is booked and holds. Every booked leg is freed once, whatever
 *            comes and however often; no action follows the last free but, for a late success of a cancelled
 *            leg, one more.
 * Lifetime   kvp_plan_begin to kvp_plan_end; after `refuse` it may be begun again.
 * Crash      process-local and not kept: bookings of a dead process end with its owner (shm/sweep.h), those
 *            of a stopped one with their lease.
 * Proved by  tests/v_plan.c, tests/t_plan.c, tests/s_disagg.t
 */
#ifndef KVP_EXTPROC_PLAN_H
#define KVP_EXTPROC_PLAN_H

enum kvp_plan_leg { KVP_PLAN_PREFILL, KVP_PLAN_MAIN, KVP_PLAN_LEGS };
enum kvp_plan_form {
	KVP_PLAN_LOCAL, /* the main leg alone; it prefills, too */
	KVP_PLAN_PAIR,
	KVP_PLAN_CHAIN /* a pair whose prefill leg is asked for when the main leg is known */
};

enum kvp_plan_state {
	KVP_PLAN_NEW,
	KVP_PLAN_SELECTING,
	KVP_PLAN_PUBLISHED,
	KVP_PLAN_DECODING, /* the first byte of the response was there */
	KVP_PLAN_ABORTED,
	KVP_PLAN_CLOSED
};

enum kvp_leg_state {
	KVP_LEG_IDLE,
	KVP_LEG_PENDING,
	KVP_LEG_BOOKED,
	KVP_LEG_FREED,
	KVP_LEG_FAILED,
	KVP_LEG_CANCELLED
};

enum kvp_plan_fault {
	KVP_PLAN_FAILED, /* the leg could not be booked */
	KVP_PLAN_LATE,	 /* the leg, or both, took too long */
	KVP_PLAN_LOST	 /* the leg's worker went before it could be named */
};

struct kvp_plan_ops {
	/* Select and reserve: kvp_plan_booked or kvp_plan_failed follows, from inside or later, unless it is
	 * cancelled. */
	void (*book)(void *ctx, enum kvp_plan_leg leg);
	void (*cancel)(void *ctx, enum kvp_plan_leg leg);
	int (*holds)(void *ctx, enum kvp_plan_leg leg); /* 1: its worker is still there, as it was booked */
	void (*free)(void *ctx, enum kvp_plan_leg leg);
	void (*prefill_done)(void *ctx); /* the main leg prefilled, and has ended that */
	void (*publish)(void *ctx);
	/* Nothing is booked any more. kvp_plan_begin may be called from inside. */
	void (*refuse)(void *ctx, enum kvp_plan_fault fault, enum kvp_plan_leg leg);
};

struct kvp_plan {
	const struct kvp_plan_ops *ops;
	void *ctx;
	enum kvp_plan_state state;
	enum kvp_plan_form form;
	enum kvp_leg_state leg[KVP_PLAN_LEGS];
	unsigned attempt;
};

/* kvp_plan_begin asks for the legs of a plan that is new, aborted or closed. first: the leg of a pair that is
 * asked for first; the caller lets them take turns. ops and ctx outlive the plan. */
void kvp_plan_begin(struct kvp_plan *p, const struct kvp_plan_ops *ops, void *ctx, enum kvp_plan_form form,
	enum kvp_plan_leg first);

/* The answers to `book`. A success that comes after the cancellation is freed at once. */
void kvp_plan_booked(struct kvp_plan *p, enum kvp_plan_leg leg);
void kvp_plan_failed(struct kvp_plan *p, enum kvp_plan_leg leg);
/* The time for all legs together is over; ignored when they are there. */
void kvp_plan_late(struct kvp_plan *p);
/* The response has begun: the first byte of its body, or its end. Counts once. */
void kvp_plan_first_body(struct kvp_plan *p);
/* The request has ended, in whatever way. May come again. */
void kvp_plan_end(struct kvp_plan *p);
#endif
