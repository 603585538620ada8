/* daemons/extproc/extproc.h — the Endpoint Picker process: what its files share.
 *
 * Shape      two threads: one of the gRPC server (ipc/grpc_server.h), and the io thread, which owns all that
 *            is here: the event loop, all streams, tokenizer calls, bookings. struct kvp_epp lives in main, a
 *            struct kvp_job is one stream from its opening to the end of its gRPC call.
 * Truth      bookings: the region, under this process's owner. A job knows the id of its own.
 * Writers    the io thread.
 * Ordering   a booking is made by the selection and given back by the plan of its job (plan.h), which ends
 *            with `release` or `cancel` of the stream.
 * Crash      streams break, the proxy tries another process; the sweep of this process's owner frees its
 *            bookings, its places in the queue and its share of the ceilings.
 * Proved by  tests/t_stream.c, tests/s_extproc.t, tests/s_disagg.t
 */
#ifndef KVP_EXTPROC_H
#define KVP_EXTPROC_H

#include "daemons/common/apply_config.h"
#include "daemons/common/boot.h"
#include "daemons/common/config.h"
#include "daemons/common/select.h"
#include "daemons/extproc/conditional.h"
#include "daemons/extproc/mismatch.h"
#include "daemons/extproc/plan.h"
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
#include <string.h>

#define KVP_EPP_GROUP "default"		       /* routing group of all requests */
#define KVP_EPP_ID_MAX 64		       /* bytes of a booking's id, a UUID with role and suffix */
#define KVP_EPP_FALLBACK_MAX 7		       /* as KVPICK_EPP_FALLBACK_ENDPOINTS */
#define KVP_EPP_BUCKETS 4096		       /* of jobs by ticket */
#define KVP_EPP_USAGE_MAX (1u << 20)	       /* bytes of a JSON response that are kept for its usage */
#define KVP_EPP_SESSION_WAIT_NS 10000000000ull /* then a request does not wait for its session any more */

enum kvp_leg_wait {
	KVP_LEG_STILL,	/* it waits for nothing */
	KVP_LEG_QUEUED, /* ticket */
	KVP_LEG_PARKED	/* another process binds its session */
};

/* One of the two workers of a request; without roles the main leg is all there is. */
struct kvp_leg {
	struct kvp_job *job;
	enum kvp_leg_wait wait;
	uint64_t ticket;
	struct kvp_leg *chain;	       /* same bucket of tickets */
	struct kvp_leg *park, **parkp; /* parked legs; parkp NULL = not parked */
	struct kvp_affinity_key met;   /* parked: the session whose other booking it met */
	enum kvp_ctr why;	       /* it failed: counter, status and text */
	int status;
	const char *text;
	/* its booking */
	char id[KVP_EPP_ID_MAX];
	uint32_t id_len;			/* 0 = none */
	uint32_t dp_rank, rank_cnt, block_size; /* rank_cnt: of its worker */
	uint64_t booking;			/* its handle */
	uint64_t renew_ns;			/* when its lease is renewed next; 0 = never */
	struct kvp_leg *later, *sooner;		/* in the order of renewal */
	uint64_t worker_id, isl_tok, predicted_tok;
	char to[KVP_POOL_TEXT]; /* host:port of its worker */
};

/* Which workers a request asks for, beyond what it says itself. */
enum kvp_epp_way {
	KVP_EPP_AGGREGATED,
	KVP_EPP_REMOTE,	    /* a pair */
	KVP_EPP_PINNED,	    /* the previewed decode worker prefills itself */
	KVP_EPP_LOCAL,	    /* a decode worker prefills itself, because no prefill worker can */
	KVP_EPP_DECODE_ONLY /* one that no sidecar shares between two engines */
};

struct kvp_job {
	struct kvp_epp *x;
	struct kvp_job *next, *prev;  /* all jobs */
	struct kvp_grpc_stream *grpc; /* NULL: its call is over */
	struct kvp_stream stream;
	struct kvp_pick_ask pick; /* while a pick is under way */
	struct kvp_ask ask;
	struct kvp_tkz_call *call; /* NULL: none is under way */
	struct kvp_plan plan;
	char plan_id[KVP_SELECTION_NEW_ID_LEN + 1]; /* not of aggregated ones */
	struct kvp_leg leg[KVP_PLAN_LEGS];
	enum kvp_epp_way way;
	int may_pair;		   /* two workers may share it; known with the first byte of its body */
	int is_restarted;	   /* this is the second plan, because the first one lost a worker */
	uint64_t pinned_worker_id; /* PINNED */
	uint32_t pinned_dp_rank;
	struct kvp_ask_tokens kept; /* own copy of the tokenizer's answer, for what is asked for again */
	uint32_t *kept_token;
	struct kvp_ask_mm *kept_mm;
	int is_rendered; /* kept is one */
	int by_length;	 /* the prompt counts by its length alone */
	int has_permit;
	struct kvp_timer body_timer, deadline;
	uint64_t start_ns, pick_ns, select_ns;
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

/* Whether both workers of a pair are to be in one transfer domain; in the order of the setting's words. */
enum kvp_domain { KVP_DOMAIN_OFF, KVP_DOMAIN_REQUIRED, KVP_DOMAIN_PREFERRED };

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
	struct kvp_tkz *tkz;		     /* NULL: no service */
	struct kvp_pool pool[KVP_PLAN_LEGS]; /* the main one: aggregated or decode workers */
	struct kvp_cond_cfg cond;
	enum kvp_domain by_domain;
	struct kvp_stream_cfg stream_cfg;
	enum kvp_pool_ports ports[KVP_PLAN_LEGS]; /* in front of a decode worker is a sidecar: one port */
	struct kvp_job *jobs;
	struct kvp_leg *parked;
	int looks; /* at them in the next turn, whether or not one may go on by then */
	uint32_t job_cnt, queued_cnt;
	struct kvp_leg *by_ticket[KVP_EPP_BUCKETS];
	struct kvp_unfreed *unfreed;
	struct kvp_leg *renew_first, *renew_last; /* all with a booking, the next to be renewed first */
	/* While a leg is asked for from inside choose: the tokenizer's answer, and what the selection is
	 * asked. */
	const struct kvp_ask_tokens *tokens;
	const struct kvp_select_request *asked;
	uint64_t pair_turn; /* pairs begun: which leg is asked for first */
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

/* pick.c: from a complete request to its workers. */
int kvp_epp_admit(void *job, struct kvp_pick_answer *a);
void kvp_epp_pick(void *job, const struct kvp_pick_ask *ask);
void kvp_epp_cancel(void *job);
/* kvp_epp_read_head fills j->ask from headers: 0, or the status that the request is refused with. */
int kvp_epp_read_head(struct kvp_job *j, const struct kvp_extproc_header *header, uint32_t cnt);
/* kvp_epp_request makes the request of the selection for a leg; t as in kvp_epp_choose. Its prompt lies in
 * the parser: valid until the next one is made. 0, or a status. */
int kvp_epp_request(struct kvp_job *j, enum kvp_plan_leg leg, const struct kvp_ask_tokens *t,
	struct kvp_select_request *q);
/* kvp_epp_keep_tokens copies a tokenizer's answer for what has to be asked for again; 0 without memory. */
int kvp_epp_keep_tokens(struct kvp_job *j, const struct kvp_ask_tokens *t);
const struct kvp_ask_tokens *kvp_epp_kept(const struct kvp_job *j);
void kvp_epp_answer(struct kvp_job *j); /* the plan is published */
void kvp_epp_refuse(struct kvp_job *j, enum kvp_ctr why, int status, const char *text);
extern const char *const kvp_epp_no_endpoints[KVP_PLAN_LEGS];

/* legs.c: bookings of a request, one or two, waiting included. */
/* kvp_epp_choose asks for workers. t: the tokenizer's answer, NULL where there was no call. */
void kvp_epp_choose(struct kvp_job *j, const struct kvp_ask_tokens *t);
/* kvp_epp_is_hit_known: what is cached of the prompt is looked up, and it is more than a length. */
enum kvp_tristate kvp_epp_is_hit_known(const struct kvp_job *j);
/* kvp_epp_retry asks parked legs once more whose booking has ended, or that waited too long; 1 if one got on.
 * It looks at them only if some booking has ended, and by a timer; otherwise it costs one load. */
int kvp_epp_retry(struct kvp_epp *x);
int kvp_epp_poll(struct kvp_epp *x);  /* queued ones whose turn has come; 1 if there was one */

/* lifecycle.c: what happens to a booking. */
int kvp_epp_keep(void *job, int64_t bytes);
void kvp_epp_prefill_done(void *job);
void kvp_epp_served(void *job, struct kvp_extproc_str endpoint);
void kvp_epp_response_headers(void *job, const struct kvp_extproc_header *header, uint32_t cnt);
void kvp_epp_response_body(void *job, const void *body, size_t len, int end_of_stream);
void kvp_epp_release(void *job);
void kvp_epp_note(void *job, enum kvp_stream_note n);
/* kvp_epp_booked notes the booking whose id is in l->id: its lease is renewed until it is freed.
 * kvp_epp_renew renews what is due: every beat. */
void kvp_epp_booked(struct kvp_leg *l);
void kvp_epp_renew(struct kvp_epp *x);
void kvp_epp_free_leg(struct kvp_leg *l);
void kvp_epp_leg_prefilled(struct kvp_leg *l);
void kvp_epp_free_id(struct kvp_epp *x, const char *id, uint32_t len);
void kvp_epp_free_again(struct kvp_epp *x); /* ids whose reservation was busy */
/* kvp_epp_log_refusal writes the event of a request that was not routed, if it is one that is logged. */
void kvp_epp_log_refusal(const struct kvp_job *j, const char *stage, int status, const char *why);
void kvp_epp_job_ended(struct kvp_job *j); /* counts how */

static inline struct kvp_leg *kvp_epp_main(struct kvp_job *j)
{
	return &j->leg[KVP_PLAN_MAIN];
}

/* Both workers of a pair are one engine, which then needs nobody else to prefill. */
static inline int kvp_epp_is_one_place(const struct kvp_job *j)
{
	return j->plan.form != KVP_PLAN_LOCAL &&
	       strcmp(j->leg[KVP_PLAN_PREFILL].to, j->leg[KVP_PLAN_MAIN].to) == 0;
}

/* Nothing of the configuration is overridden. */
#define KVP_EPP_NO_OVERRIDE                                                                                  \
	{                                                                                                    \
		.overlap_score_credit = NAN, .prefill_load_scale = NAN, .temperature = NAN,                  \
		.shared_cache_multiplier = NAN, .assume_kv_reuse = KVP_UNSET,                                \
		.track_prefill_tokens = KVP_UNSET                                                            \
	}

/* kvp_epp_override_decode: who decodes what another one prefilled computes nothing of the prompt and holds
 * all of it; it is chosen by its load alone. */
static inline void kvp_epp_override_decode(struct kvp_override *o)
{
	o->overlap_score_credit = 0;
	o->assume_kv_reuse = KVP_NO;
	o->track_prefill_tokens = KVP_NO;
}

static inline void kvp_epp_count(struct kvp_epp *x, enum kvp_ctr c)
{
	kvp_ctr_add(x->boot.ctr, c, 1);
}
#endif
