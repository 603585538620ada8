/* daemons/sidecar/count.h - what a worker counts, and how requests end.
 *
 * Shape      struct kvp_count: plain words, one writer (the worker's thread); others read them relaxed.
 * Crash      process-local.
 * Proved by  tests/s_sidecar.t
 */
#ifndef KVP_SIDECAR_COUNT_H
#define KVP_SIDECAR_COUNT_H

#include <kvpick/atomic.h>
#include <stdint.h>

/* Ends of a request: enum, text of the metric's label. Error answers of our own are labelled by their
 * code. */
#define KVP_RESULTS(X)                                                                                       \
	X(OK, "ok")                                                                                          \
	X(CLIENT_GONE, "client_gone")                                                                        \
	X(DECODE_CUT, "decode_cut")                                                                          \
	X(CANCELLED, "request_cancelled")                                                                    \
	X(FORBIDDEN, "prefill_target_forbidden")                                                             \
	X(METADATA, "invalid_epp_metadata")                                                                  \
	X(NO_ADAPTER, "pd_adapter_unavailable")                                                              \
	X(DECODE_ERROR, "decode_upstream_error")                                                             \
	X(DECODE_TIMEOUT, "decode_upstream_timeout")                                                         \
	X(INVALID, "invalid_pd_request")                                                                     \
	X(VARIANT, "unsupported_pd_variant")                                                                 \
	X(SAMPLING, "unsupported_pd_sampling")                                                               \
	X(TOO_LARGE, "pd_request_too_large")                                                                 \
	X(TIMEOUT, "pd_request_timeout")                                                                     \
	X(PREFILL_UNAVAILABLE, "prefill_upstream_unavailable")                                               \
	X(PREFILL_TIMEOUT, "prefill_upstream_timeout")                                                       \
	X(PREFILL_DEADLINE, "prefill_deadline_exceeded")                                                     \
	X(PREFILL_ERROR, "prefill_upstream_error")                                                           \
	X(PREFILL_TOO_LARGE, "prefill_response_too_large")                                                   \
	X(HANDOFF, "invalid_prefill_handoff")                                                                \
	X(SGL_PROTOCOL, "sglang_pd_protocol_error")                                                          \
	X(SGL_UPSTREAM, "sglang_pd_upstream_error")                                                          \
	X(SGL_REJECTED, "pd_engine_rejected")                                                                \
	X(TOO_MANY, "too_many_streams")                                                                      \
	X(NO_ROOM, "too_many_held_bytes")                                                                    \
	X(NO_RESOURCES, "sidecar_resources_exhausted")                                                       \
	X(BAD_HTTP, "invalid_http_request")                                                                  \
	X(OTHER, "other")

enum kvp_result {
#define X(name, text) KVP_RESULT_##name,
	KVP_RESULTS(X)
#undef X
		KVP_RESULT_CNT
};

#define KVP_COUNT_PATHS 4
#define KVP_COUNT_BUCKETS 24 /* of leg durations: 1 ms, doubling */
enum kvp_count_leg { KVP_COUNT_PREFILL, KVP_COUNT_DECODE, KVP_COUNT_LEGS };

struct kvp_count {
	uint64_t request[KVP_COUNT_PATHS][2][KVP_RESULT_CNT]; /* [1]: run by the adapter */
	uint64_t leg_bucket[KVP_COUNT_LEGS][KVP_COUNT_BUCKETS];
	uint64_t leg_sum_us[KVP_COUNT_LEGS];
	uint64_t cancelled[KVP_COUNT_LEGS]; /* legs closed before their end */
	uint64_t local, not_found, accepted, aborts, aborts_failed;
	uint64_t held_refused; /* requests and pipelined bytes over the budget */
	uint64_t fallbacks;    /* prefills that failed and left all to the decode engine */
	uint64_t usage_long;   /* pieces of answers that were too long for their usage to be set */
	uint64_t rx_bytes, tx_bytes;
	uint64_t streams, conns; /* gauges */
};

static inline void kvp_count_add(uint64_t *c, uint64_t n)
{
	kvp_st_rlx_u64(c, kvp_ld_rlx_u64(c) + n);
}

/* kvp_count_leg notes the duration of a leg. */
static inline void kvp_count_leg(struct kvp_count *c, enum kvp_count_leg leg, uint64_t ns)
{
	unsigned b = 0;
	while (b < KVP_COUNT_BUCKETS - 1 && ns > UINT64_C(1000000) << b)
		b++;
	kvp_count_add(&c->leg_bucket[leg][b], 1);
	kvp_count_add(&c->leg_sum_us[leg], ns / 1000);
}
#endif
