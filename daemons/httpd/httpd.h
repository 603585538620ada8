/* daemons/httpd/httpd.h — the Selection API process: what its files share.
 *
 * Shape      one event loop, one thread; struct kvp_httpd lives in main.
 * Truth      the region. A worker command is kept in `pending` from the request until the indexer's reply.
 * Crash      clients see their connections reset; reservations stay (they belong to the node); a claim or a
 *            command cell that was under way is repaired by the sweep of this process's owner.
 */
#ifndef KVP_HTTPD_H
#define KVP_HTTPD_H

#include "daemons/common/apply_config.h"
#include "daemons/common/boot.h"
#include "daemons/common/config.h"
#include "daemons/common/dump_serve.h"
#include "daemons/common/select.h"
#include "daemons/common/request_body.h"
#include <kvpick/clock.h>
#include "daemons/common/token.h"
#include "ipc/http_query.h"
#include "ipc/http_server.h"
#include "ipc/json_out.h"
#include "ipc/loop.h"
#include "shm/radix_ahead.h"

#define KVP_HTTPD_CMD_TIMEOUT_NS (10ull * 1000000000ull) /* wait for the indexer's answer */
#define KVP_HTTPD_ROWS_MAX 65536

/* What a request's `user` points to while its answer is outstanding: the first member of all kinds. */
enum kvp_httpd_job { KVP_HTTPD_COMMAND, KVP_HTTPD_WAIT, KVP_HTTPD_DUMP, KVP_HTTPD_HINT };

/* A worker command that waits for the indexer. */
struct kvp_httpd_cmd {
	enum kvp_httpd_job job;
	struct kvp_httpd_cmd *next;
	struct kvp_http_req *req; /* NULL: the client has gone */
	struct kvp_cmd_cell *cell;
	uint64_t deadline_ns;
};

/* A request that waits for another booking of its session. */
struct kvp_httpd_parked {
	struct kvp_httpd_parked *next;
	struct kvp_http_req *req;
	struct kvp_affinity_key key; /* the session's */
	uint64_t since_ns;
};

/* A selection that waits its turn. In the list as long as its ticket lives. */
struct kvp_httpd_wait {
	enum kvp_httpd_job job;
	enum kvp_select_kind kind;
	struct kvp_httpd_wait *next, *prev, *chain; /* chain: same bucket */
	struct kvp_http_req *req;
	uint64_t ticket;
};
#define KVP_HTTPD_WAIT_BUCKETS 4096

struct kvp_httpd_hint; /* kv_hint.c: an answer that waits for its hint */

struct kvp_httpd {
	struct kvp_boot boot;
	struct kvp_loop *loop;
	struct kvp_http_server *api, *metrics; /* NULL: that port is off */
	struct kvp_held held;		       /* bodies and pipelined bytes of both */
	struct kvp_selection *selection;
	struct kvp_parse parse;
	struct kvp_jw out;
	struct kvp_httpd_cmd *pending;
	struct kvp_dumps dumps;
	struct kvp_httpd_hint *hints;
	struct kvp_httpd_parked *parked, **parked_end; /* oldest first; end: where the next one goes */
	int looks; /* at them in the next turn, whether or not one may go on by then */
	struct kvp_policy policy;
	struct kvp_httpd_wait *waits;				/* all, newest first */
	struct kvp_httpd_wait *wait_of[KVP_HTTPD_WAIT_BUCKETS]; /* by ticket */
	struct kvp_watch wake, signals;
	struct kvp_timer beat, retry;
	struct kvp_http_server_stat seen;    /* last statistics added to the counters */
	struct kvp_load_row *load_row;	     /* KVP_HTTPD_ROWS_MAX */
	struct kvp_overlap_row *overlap_row; /* KVP_HTTPD_ROWS_MAX */
	char *record;			     /* KVP_CAT_RECORD_MAX */
	struct kvp_token token;
	struct kvp_radix_touch touch; /* how much of the tree this process has mapped */
	int signal_fd;
	int draining;
};

/* One call of the API: the request, and what its route extracted. */
struct kvp_call {
	struct kvp_httpd *h;
	struct kvp_http_req *req;
	char seg[KVP_SELECTION_ID_MAX + 1]; /* percent-decoded variable path segment */
	size_t seg_len;
	uint64_t worker_id; /* the segment of /workers/{id} */
	uint64_t since_ns;  /* when the request was parked first; 0 = it was not */
};

void kvp_httpd_request(void *ctx, struct kvp_http_req *r); /* routes.c: on_request */
void kvp_httpd_metrics_request(void *ctx, struct kvp_http_req *r); /* the metrics port */
void kvp_httpd_abort(void *ctx, struct kvp_http_req *r);
void kvp_httpd_early(void *ctx, const struct kvp_http_req *r, struct kvp_http_refusal *why);

/* kvp_reply_json sends what h->out holds; kvp_reply_error {"error":text}; kvp_reply_refused the same with the
 * text of the selection handle; kvp_reply_ok {"status":"ok"}. */
void kvp_reply_json(struct kvp_call *c, int status);
void kvp_reply_error(struct kvp_call *c, int status, const char *text);
void kvp_reply_refused(struct kvp_call *c, int status);
void kvp_reply_ok(struct kvp_call *c);

/* Routes by file: selection and lifecycle; worker catalogue; inspection. */
void kvp_route_select(struct kvp_call *c);
void kvp_route_select_and_reserve(struct kvp_call *c);
void kvp_route_reserve(struct kvp_call *c);
void kvp_route_prefill_complete(struct kvp_call *c);
void kvp_route_output_block(struct kvp_call *c);
void kvp_route_free(struct kvp_call *c);
void kvp_route_potential_loads(struct kvp_call *c);
void kvp_route_overlap_scores(struct kvp_call *c);
void kvp_route_worker_post(struct kvp_call *c);
void kvp_route_worker_patch(struct kvp_call *c);
void kvp_route_worker_delete(struct kvp_call *c);
void kvp_route_worker_list(struct kvp_call *c);
void kvp_route_health(struct kvp_call *c);
void kvp_route_ready(struct kvp_call *c);
void kvp_route_status(struct kvp_call *c);
void kvp_status_redirect(struct kvp_call *c);
/* kvp_httpd_ready: what GET /ready says: the index is recovered if there is where from, a worker is
 * schedulable, as many as wanted at first have been so at once, and the process does not drain. */
int kvp_httpd_ready(struct kvp_httpd *h);
void kvp_route_loads(struct kvp_call *c);
void kvp_route_metrics(struct kvp_call *c);
void kvp_route_dump(struct kvp_call *c);
void kvp_route_peer_register(struct kvp_call *c);
void kvp_route_peer_deregister(struct kvp_call *c);
void kvp_route_peer_list(struct kvp_call *c);
/* kvp_peer_list writes the listed peers as an array to h->out. */
void kvp_peer_list(struct kvp_httpd *h);

/* park.c. kvp_httpd_park keeps a call until the booking of its session that it met has ended, or for too
 * long; kvp_httpd_retry then runs it once more, a few each time: called before every sleep and when this
 * process is woken. It looks at them only if such a booking has ended, and by a timer in case the waker died;
 * otherwise it costs one load. 1 if one was run. kvp_httpd_unpark: 1 if the request was
 * parked. */
void kvp_httpd_park(struct kvp_call *c);
int kvp_httpd_unpark(struct kvp_httpd *h, const struct kvp_http_req *r);
int kvp_httpd_retry(struct kvp_httpd *h);
/* kvp_httpd_run handles a request: on_request, and every retry. since_ns as in struct kvp_call. */
void kvp_httpd_run(struct kvp_httpd *h, struct kvp_http_req *r, uint64_t since_ns);

/* kvp_reply_selection answers a selection: 200 with a, else the error with its details. */
void kvp_reply_selection(struct kvp_call *c, int status, struct kvp_str model, struct kvp_str group,
	const struct kvp_select_answer *a, enum kvp_select_kind kind);

/* waiting.c. kvp_httpd_wait_add keeps a request until its ticket is answered; kvp_httpd_wait_poll answers
 * those that are: 1 if there was one; kvp_httpd_wait_drop gives one up whose client has gone;
 * kvp_httpd_wait_end answers all with 503, for the end of the process. */
void kvp_httpd_wait_add(struct kvp_call *c, enum kvp_select_kind kind, uint64_t ticket);
int kvp_httpd_wait_poll(struct kvp_httpd *h);
void kvp_httpd_wait_drop(struct kvp_httpd *h, struct kvp_httpd_wait *w);
void kvp_httpd_wait_end(struct kvp_httpd *h);

/* undelivered.c. kvp_httpd_tag_booking marks the coming answer as the one that tells of a booking: if the
 * client is gone before the answer can reach it, kvp_httpd_undelivered ends the booking. */
void kvp_httpd_tag_booking(struct kvp_call *c, uint64_t booking);
void kvp_httpd_undelivered(void *ctx, uint64_t tag);

/* kv_hint.c. kvp_httpd_hint_begin takes the answer in h->out over if there may be a hint: 1, it is sent
 * later; 0 the caller sends it. poll and drop as for dumps; a dropped one ends its booking. */
int kvp_httpd_hint_begin(struct kvp_call *c, const struct kvp_select_answer *a);
int kvp_httpd_hint_poll(struct kvp_httpd *h);
void kvp_httpd_hint_drop(struct kvp_httpd *h, struct kvp_httpd_hint *x);

/* routes_dump.c: makes h->dumps ready for use. */
void kvp_httpd_dump_open(struct kvp_httpd *h);

/* kvp_httpd_poll_commands answers the requests whose command the indexer has answered; 1 if there was one. */
int kvp_httpd_poll_commands(struct kvp_httpd *h);
#endif
