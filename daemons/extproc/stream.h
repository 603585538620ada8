/* daemons/extproc/stream.h — what one ext_proc stream has to be told, and when: events in, actions out.
 *
 * Shape      struct kvp_stream, one for each HTTP request. Events are calls with messages as plain
 *            structs; actions are calls of struct kvp_stream_ops. Nothing here knows gRPC, shared memory or
 *            clocks.
 * Truth      struct kvp_stream.
 * Writers    one thread. An action may be answered from inside itself (a pick that is known at once); an
 *            action must not free the stream.
 * Ordering   answers leave in the order headers, body, trailers, first of the request, then of the response.
 *            Exactly one of `release` and nothing follows a pick that came with a booking; `prefill_done`
 *            at most once and before it. After `finish` no more `send`.
 * Lifetime   kvp_stream_open to kvp_stream_close. What an event points to is used during the call only.
 * Crash      process-local; bookings of a dead process end with its owner (shm/sweep.h).
 * Proved by  tests/t_stream.c, tests/s_extproc.t
 */
#ifndef KVP_EXTPROC_STREAM_H
#define KVP_EXTPROC_STREAM_H

#include "ipc/extproc_msg.h"

#define KVP_STREAM_EXTRA_MAX 2 /* routing headers beside destination and prefiller */
#define KVP_STREAM_GRPC_OK 0
#define KVP_STREAM_GRPC_FAILED_PRECONDITION 9
#define KVP_STREAM_GRPC_UNKNOWN 2

enum kvp_pick_form { KVP_PICK_HEADERS_ONLY, KVP_PICK_EMPTY_BODY, KVP_PICK_BODY };

/* What a pick works on; valid until it has been answered or cancelled. */
struct kvp_pick_ask {
	enum kvp_pick_form form;
	const struct kvp_extproc_header *header; /* without x-prefiller-host-port */
	uint32_t header_cnt;
	const char *body; /* KVP_JSON_SLACK_BYTES readable behind it, unless NULL */
	size_t body_len;
	enum kvp_extproc_hint subset_hint; /* the last one of the request phase */
	const struct kvp_extproc_str *subset;
	uint32_t subset_cnt;
};

/* Its answer. Strings are copied by kvp_stream_picked. */
struct kvp_pick_answer {
	int status;	  /* 200, or what the client gets */
	const char *text; /* with another status: for the client */
	uint64_t retry_after_s;
	struct kvp_extproc_str destination; /* ip:port[,ip:port...] */
	struct kvp_extproc_str prefiller;   /* empty = none */
	struct kvp_extproc_header extra[KVP_STREAM_EXTRA_MAX];
	uint32_t extra_cnt;
	struct kvp_extproc_str body; /* p not NULL: goes on instead of the client's */
	int has_booking;	     /* release must follow */
};

enum kvp_stream_outcome {
	KVP_OUTCOME_INCOMPLETE,
	KVP_OUTCOME_EARLY_REJECT,
	KVP_OUTCOME_EXT_PROC_ERROR,
	KVP_OUTCOME_UPSTREAM_HTTP_ERROR,
	KVP_OUTCOME_RESPONSE_EOS,
	KVP_OUTCOME_CNT
};
const char *kvp_stream_outcome_name(enum kvp_stream_outcome o);

/* Oddities that are counted. */
enum kvp_stream_note {
	KVP_NOTE_EMPTY_MESSAGE,
	KVP_NOTE_LATE_BODY, /* body message after the end of the stream */
	KVP_NOTE_OUT_OF_ORDER,
	KVP_NOTE_OBSERVABILITY,
	KVP_NOTE_MODE_REFUSED,
	KVP_NOTE_BODY_TOO_LARGE,
	KVP_NOTE_BODY_TIMEOUT,
	KVP_NOTE_BUDGET,
	KVP_NOTE_CANCELLED, /* the proxy left while a pick was under way */
	KVP_NOTE_SHUT_DOWN, /* the process ends before there was a pick */
	KVP_NOTE_CNT
};

struct kvp_stream_ops {
	void (*send)(void *ctx, const struct kvp_extproc_reply *m);
	void (*finish)(void *ctx, int grpc_status, const char *text);
	/* The first body byte has come: 1 = go on; 0 = refused, *a says how. */
	int (*admit)(void *ctx, struct kvp_pick_answer *a);
	/* So many bytes more (or, negative, less) of bodies are kept. 0 = over the budget, only for more. */
	int (*keep)(void *ctx, int64_t bytes);
	/* Choose a worker: kvp_stream_picked follows, from inside or later, unless cancelled. */
	void (*pick)(void *ctx, const struct kvp_pick_ask *ask);
	void (*cancel)(void *ctx); /* the pick, or what admit took: nothing more is wanted */
	void (*prefill_done)(void *ctx);
	void (*served)(void *ctx, struct kvp_extproc_str endpoint); /* at most once */
	void (*response_headers)(void *ctx, const struct kvp_extproc_header *header, uint32_t cnt);
	void (*response_body)(void *ctx, const void *body, size_t len, int end_of_stream);
	void (*release)(void *ctx); /* the booking */
	void (*note)(void *ctx, enum kvp_stream_note n);
};

struct kvp_stream_cfg {
	uint64_t body_max;			 /* bytes of a request body */
	enum kvp_extproc_body_mode assumed_mode; /* full duplex or buffered */
	int response_none;			 /* nonzero: response body mode NONE is served, too */
	int strips_dp_rank;			 /* nonzero: the client's x-data-parallel-rank is removed */
	uint64_t retry_after_s;			 /* of a request over the body budget */
};

enum kvp_stream_state {
	KVP_STREAM_OPEN,    /* nothing yet, or the body is coming */
	KVP_STREAM_PICKING, /* complete; the pick is under way */
	KVP_STREAM_ROUTED,  /* answered */
	KVP_STREAM_WATCHED, /* observability mode: listens only */
	KVP_STREAM_OVER	    /* finished or gone */
};

struct kvp_stream {
	const struct kvp_stream_cfg *cfg;
	const struct kvp_stream_ops *ops;
	void *ctx;
	enum kvp_stream_state state;
	uint32_t request_mode, response_mode;
	unsigned checked : 1, has_headers : 1, body_over : 1, body_message : 1, trailers : 1,
		trailers_answered : 1, admitted : 1, booked : 1, prefilled : 1, response_over : 1, failed : 1,
		rejected : 1, has_served : 1;
	enum kvp_pick_form form;
	uint32_t late_cnt; /* body messages that await their empty answer */
	uint32_t stripped; /* bits of the conditional header names that the client sent */
	int http_status;   /* of the upstream; 0 = not seen */
	struct kvp_extproc_header *header;
	uint32_t header_cnt;
	char *header_mem;
	struct kvp_extproc_kept *body;
	size_t body_len, body_cap;
	enum kvp_extproc_hint subset_hint;
	uint32_t subset_cnt;
	struct kvp_extproc_str *subset; /* one allocation with its text */
};

/* kvp_stream_open begins a stream. cfg, ops and ctx outlive it. */
void kvp_stream_open(
	struct kvp_stream *s, const struct kvp_stream_cfg *cfg, const struct kvp_stream_ops *ops, void *ctx);
/* kvp_stream_close gives its memory back; kvp_stream_gone must have been called, or the stream finished. */
void kvp_stream_close(struct kvp_stream *s);

void kvp_stream_message(struct kvp_stream *s, const struct kvp_extproc_req *m);
/* A message that is no ProcessingRequest. */
void kvp_stream_garbled(struct kvp_stream *s);
/* The proxy sends no more. */
void kvp_stream_half_closed(struct kvp_stream *s);
/* The stream is gone: reset, cancelled, connection lost. */
void kvp_stream_gone(struct kvp_stream *s);
/* The request body is not complete in time; ignored when it is. */
void kvp_stream_body_late(struct kvp_stream *s);
int kvp_stream_body_outstanding(const struct kvp_stream *s);
/* The process ends: no pick any more. */
void kvp_stream_shut_down(struct kvp_stream *s);
void kvp_stream_picked(struct kvp_stream *s, const struct kvp_pick_answer *a);

/* How it ended, so far. */
enum kvp_stream_outcome kvp_stream_outcome(const struct kvp_stream *s);
#endif
