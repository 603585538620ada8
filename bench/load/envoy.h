/* bench/load/envoy.h - plays a proxy with an ext_proc filter: one HTTP exchange on one stream.
 *
 * Shape      struct kvp_envoy describes an exchange (request, modes, the upstream's response, where it breaks
 *            off) and gathers what the endpoint picker answered. Many run at once on one client.
 * Truth      the rules of the filter: which messages are sent without waiting, which answers each one obliges
 *            to; an answer against them is a violation.
 * Ordering   start, then kvp_envoy_event for each event of its call, until done.
 * Crash      process-local.
 * Proved by  tests/t_grpc_envoy.c
 */
#ifndef KVP_BENCH_ENVOY_H
#define KVP_BENCH_ENVOY_H

#include "bench/load/grpc_client.h"
#include "ipc/extproc_msg.h"

/* Where an exchange breaks off; otherwise it runs to its end. */
enum kvp_envoy_stop {
	KVP_ENVOY_WHOLE,
	KVP_ENVOY_AT_HEADERS, /* behind the request headers */
	KVP_ENVOY_IN_BODY,    /* behind the first piece of the request body, which has more than one */
	KVP_ENVOY_UNANSWERED, /* everything of the request is sent; the answer is not awaited */
	KVP_ENVOY_ROUTED,     /* the request is answered, the upstream never responds */
	KVP_ENVOY_IN_RESPONSE /* behind the first piece of the response body */
};
enum kvp_envoy_leave { KVP_ENVOY_CLOSE, KVP_ENVOY_RESET }; /* half close, or reset of the stream */

struct kvp_envoy {
	/* The exchange; what it points to stays until done. */
	const struct kvp_extproc_header *header, *response_header;
	uint32_t header_cnt, response_header_cnt;
	struct kvp_extproc_str body; /* p NULL: headers end the request (or its trailers do) */
	struct kvp_extproc_str response_body;
	uint32_t piece_bytes, response_piece_bytes; /* 0: 16384 */
	uint8_t trailers, response_trailers;	    /* 1: there are some */
	uint8_t no_config;			    /* 1: an old proxy, sends no protocol_config */
	uint8_t observability;
	uint8_t response_ends_with_headers;   /* 1: HEAD, 204: no body */
	uint32_t request_mode, response_mode; /* enum kvp_extproc_body_mode */
	enum kvp_extproc_hint hint;
	const struct kvp_extproc_str *subset;
	uint32_t subset_cnt;
	struct kvp_extproc_str served; /* what the upstream phase reports; len 0: the destination */
	enum kvp_envoy_stop stop;
	enum kvp_envoy_leave leave; /* how a stop, and the end, are made */

	/* What came. */
	int done;
	int grpc_status; /* -1 until done */
	char grpc_text[256];
	uint32_t http_status; /* of an immediate response, 0 = none */
	char http_body[256];
	char retry_after[32];
	char destination[256], metadata[256], prefiller[64]; /* headers set, and the dynamic metadata */
	uint32_t set_cnt, remove_cnt;
	uint8_t clear_route_cache;
	uint64_t forwarded_bytes, response_bytes; /* of streamed pieces and of untouched messages */
	uint32_t mismatches;			  /* pieces that differ from what was sent */
	uint32_t answers;
	uint32_t violations;
	char violation[128];		      /* the first */
	uint64_t start_ns, routed_ns, end_ns; /* CLOCK_MONOTONIC */

	/* Inside. */
	struct kvp_gc_call *call;
	uint32_t phase, sent_body,
		sent_response; /* messages that oblige to one answer each, still unanswered */
	uint8_t headers_answered, body_answered, trailers_answered, request_eos, response_headers_answered,
		response_trailers_answered, response_eos, trailers_sent, left;
};

/* kvp_envoy_start begins the exchange. The struct is the call's ctx and must stay until done. */
void kvp_envoy_start(struct kvp_gc *c, struct kvp_envoy *x);
/* kvp_envoy_event handles an event whose ctx is an exchange; d: a decoder of the thread. */
void kvp_envoy_event(struct kvp_extproc_dec *d, const struct kvp_gc_event *ev);
#endif
