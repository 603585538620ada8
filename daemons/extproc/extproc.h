/* daemons/extproc/extproc.h — the Endpoint Picker process: what its files share.
 *
 * Shape      two threads: one of the gRPC server (ipc/grpc_server.h), and the io thread, which owns all that
 *            is here: the event loop, all streams, tokenizer calls, bookings. struct kvp_epp lives in main, a
 *            struct kvp_job is one stream from its opening to the end of its gRPC call.
 * Truth      bookings: the region, under this process's owner. A job knows the id of its own.
 * Writers    the io thread.
 * Ordering   a booking is made by the selection and given back by `release` of the stream; between the two no
 *            return path of pick.c leaves it without an owner.
 * Crash      streams break, the proxy tries another process; the sweep of this process's owner frees its
 *            bookings, its places in the queue and its share of the ceilings.
 * Proved by  tests/t_stream.c, tests/s_extproc.t
 */
#ifndef KVP_EXTPROC_H
#define KVP_EXTPROC_H

#include "daemons/common/apply_config.h"
#include "daemons/common/boot.h"
#include "daemons/common/config.h"
#include "daemons/common/select.h"
#include "daemons/extproc/mismatch.h"
#include "daemons/extproc/pool.h"
#include "daemons/extproc/request.h"
#include "daemons/extproc/stages.h"
#include "daemons/extproc/stream.h"
#include "daemons/extproc/tokenizer.h"
#include "ipc/grpc_health.h"
#include "ipc/grpc_server.h"
#include "ipc/loop.h"
#include "ipc/sse.h"
#include "ipc/tls_cert.h"
#include "shm/radix_ahead.h"
#include <kvpick/clock.h>
#include <math.h>

#define KVP_EPP_GROUP "default"		       /* routing group of all requests */
#define KVP_EPP_ID_MAX 48		       /* bytes of a booking's id, a UUID with a suffix */
#define KVP_EPP_FALLBACK_MAX 7	       /* as KVPICK_EPP_FALLBACK_ENDPOINTS */
#define KVP_EPP_BUCKETS 4096		       /* of jobs by ticket */
#define KVP_EPP_USAGE_MAX (1u << 20)	       /* bytes of a JSON response that are kept for its usage */
#define KVP_EPP_SESSION_WAIT_NS 10000000000ull /* then a request does not wait for its session any more */

enum kvp_job_state {
	KVP_JOB_IDLE,	    /* no pick is under way */
	KVP_JOB_TOKENIZING, /* call */
	KVP_JOB_QUEUED,	    /* ticket */
	KVP_JOB_PARKED	    /* another process binds its session */
};

struct kvp_job {
	struct kvp_epp *x;
	struct kvp_job *next, *prev;   /* all jobs */
	struct kvp_job *chain;	       /* same bucket of tickets */
	struct kvp_job *park, **parkp; /* parked jobs; parkp NULL = not parked */
	struct kvp_grpc_stream *grpc;  /* NULL: its call is over */
	struct kvp_stream stream;
	enum kvp_job_state state;
	struct kvp_pick_ask pick; /* while a pick is under way */
	struct kvp_ask ask;
	struct kvp_tkz_call *call;
	uint64_t ticket;
	struct kvp_ask_tokens kept; /* PARKED: own copy of the tokenizer's answer */
	uint32_t *kept_token;
	struct kvp_ask_mm *kept_mm;
	int is_rendered; /* kept is one */
	int by_length;	 /* the prompt counts by its length alone */
	int has_permit;
	struct kvp_timer body_timer, deadline;
	uint64_t start_ns, pick_ns, select_ns;
	/* its booking */
	char id[KVP_EPP_ID_MAX];
	uint32_t id_len; /* 0 = none */
	uint64_t booking; /* its handle */
	uint64_t renew_ns; /* when its lease is renewed next */
	struct kvp_job *later, *sooner; /* in the order of renewal */
	uint64_t worker_id, isl_tok, predicted_tok;
	uint32_t dp_rank, block_size;
	uint64_t out_events; /* counted towards output blocks */
	struct kvp_usage_scan usage;
	int has_usage;
	uint64_t first_body_ns; /* when it came; 0 = not yet */
	uint64_t response_bytes;
	char *salted;  /* the body as it goes on, when it is not the client's */
	int is_logged; /* one of those whose events are logged */
	int is_timed;  /* one of those whose processor time is measured */
};

/* An id whose reservation was busy with another process when it was to be freed. */
struct kvp_unfreed {
	struct kvp_unfreed *next;
	char id[KVP_EPP_ID_MAX];
	uint32_t id_len;
};

struct kvp_epp {
	struct kvp_boot boot;
	struct kvp_loop *loop;
	struct kvp_grpc *grpc;
	struct kvp_grpc_health *health;
	struct kvp_extproc_dec *dec;
	struct kvp_selection *selection;
	struct kvp_policy policy;
	struct kvp_ask_parser parser;
	struct kvp_json *usage_json;
	struct kvp_tkz *tkz; /* NULL: no service */
	struct kvp_pool pool;
	struct kvp_stream_cfg stream_cfg;
	enum kvp_pool_ports ports;
	struct kvp_job *jobs, *parked;
	uint32_t job_cnt, queued_cnt;
	struct kvp_job *by_ticket[KVP_EPP_BUCKETS];
	struct kvp_unfreed *unfreed;
	struct kvp_job *renew_first, *renew_last; /* all with a booking, the next to be renewed first */
	struct kvp_mismatch mismatch;
	struct kvp_watch wake, signals, grpc_fd;
	struct kvp_timer beat, retry;
	struct kvp_tls_watch tls;
	struct kvp_grpc_stat seen;
	struct kvp_radix_touch touch;
	int signal_fd, draining, ready;
	uint64_t drain_ns; /* when the drain began */
	uint64_t log_turn, timed_turn;
};

/* server.c: gRPC events to streams, and what streams say to gRPC. */
int kvp_epp_server_open(struct kvp_epp *x);
void kvp_epp_server_close(struct kvp_epp *x);
void kvp_epp_server_beat(struct kvp_epp *x); /* counters, certificate, readiness */
/* kvp_epp_server_drain: not ready, no new streams; who waits for a worker is answered 503; who has one goes
 * on. */
void kvp_epp_server_drain(struct kvp_epp *x);
void kvp_epp_send(void *job, const struct kvp_extproc_reply *m);
void kvp_epp_finish(void *job, int grpc_status, const char *text);
extern const struct kvp_stream_ops kvp_epp_ops;

/* pick.c: from a complete request to its worker. */
int kvp_epp_admit(void *job, struct kvp_pick_answer *a);
void kvp_epp_pick(void *job, const struct kvp_pick_ask *ask);
void kvp_epp_cancel(void *job);
/* kvp_epp_read_head fills j->ask from headers: 0, or the status that the request is refused with. */
int kvp_epp_read_head(struct kvp_job *j, const struct kvp_extproc_header *header, uint32_t cnt);
int kvp_epp_retry(struct kvp_epp *x); /* parked jobs once more; 1 if one got on */
int kvp_epp_poll(struct kvp_epp *x);  /* queued ones whose turn has come; 1 if there was one */

/* lifecycle.c: what happens to a booking. */
int kvp_epp_keep(void *job, int64_t bytes);
void kvp_epp_prefill_done(void *job);
void kvp_epp_served(void *job, struct kvp_extproc_str endpoint);
void kvp_epp_response_headers(void *job, const struct kvp_extproc_header *header, uint32_t cnt);
void kvp_epp_response_body(void *job, const void *body, size_t len, int end_of_stream);
void kvp_epp_release(void *job);
void kvp_epp_note(void *job, enum kvp_stream_note n);
/* kvp_epp_booked notes the booking whose id is in j->id: its lease is renewed until release.
 * kvp_epp_renew renews what is due: every beat. */
void kvp_epp_booked(struct kvp_job *j);
void kvp_epp_renew(struct kvp_epp *x);
void kvp_epp_free_id(struct kvp_epp *x, const char *id, uint32_t len);
void kvp_epp_free_again(struct kvp_epp *x); /* ids whose reservation was busy */
/* kvp_epp_log_refusal writes the event of a request that was not routed, if it is one that is logged. */
void kvp_epp_log_refusal(const struct kvp_job *j, const char *stage, int status, const char *why);
void kvp_epp_job_ended(struct kvp_job *j); /* counts how */

/* Nothing of the configuration is overridden. */
#define KVP_EPP_NO_OVERRIDE                                                                                  \
	{                                                                                                    \
		.overlap_score_credit = NAN, .prefill_load_scale = NAN, .temperature = NAN,                  \
		.shared_cache_multiplier = NAN, .assume_kv_reuse = KVP_UNSET,                                \
		.track_prefill_tokens = KVP_UNSET                                                            \
	}

static inline void kvp_epp_count(struct kvp_epp *x, enum kvp_ctr c)
{
	kvp_ctr_add(x->boot.ctr, c, 1);
}
#endif
