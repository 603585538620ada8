/* daemons/sidecar/sidecar.h - what the parts of kvpick-sidecar share: worker, client connection, request,
 * adapter.
 *
 * Shape      one worker a thread: a loop, a listener, client connections (one request at a time each), a pool
 *            of connections to engines. The process shares nothing with a region.
 * Flow       conn.c reads a request and chooses its flow; a flow runs the legs and answers through reply.c.
 *            Flows: pass (relay.c: one leg, streamed both ways), seq (seq.c: prefill, then decode), sgl
 *            (adapter_sglang.c: both at once).
 * Bounds     what is kept for requests is counted against a budget, see held.h and kvp_req_hold.
 * Truth      each worker's thread; counters are read by the thread that serves metrics.
 * End        a request ends exactly once, by kvp_req_end; its flow's finish closes the legs that still run.
 * Crash      SIGKILL: the kernel closes all connections, which is what cancels the engines' work; nothing
 *            else is left.
 * Proved by  tests/s_sidecar.t, tests/s_sidecar_llmd.t, tests/s_sidecar_vectors.t, tests/v_disagg.c
 */
#ifndef KVP_SIDECAR_H
#define KVP_SIDECAR_H

#include "daemons/common/config.h"
#include "daemons/common/log.h"
#include "daemons/sidecar/count.h"
#include "daemons/sidecar/handoff.h"
#include "daemons/sidecar/target.h"
#include "daemons/sidecar/usage.h"
#include "ipc/held.h"
#include "ipc/json_check.h"
#include "ipc/leg.h"

#define KVP_BASE_MAX 1024

struct kvp_req;
struct kvp_sidecar;

struct kvp_worker {
	struct kvp_sidecar *sidecar;
	const struct kvp_config *cfg;
	struct kvp_loop *loop;
	struct kvp_leg_pool pool;
	struct kvp_tls_client *tls; /* NULL: all engines in plain text */
	struct kvp_listener listener;
	struct kvp_conn *conn;	 /* all */
	struct kvp_abort *abort; /* calls that outlive their request */
	struct kvp_timer drain_end, exit_end;
	struct kvp_watch wake;
	struct kvp_count count;
	struct kvp_log_limit warned, tls_warned;
	uint64_t log_turn;
	uint64_t conn_cnt;
	unsigned id, trt_counter;
	char engine[32];	 /* authority of the engine beside us */
	struct kvp_addrs engine_at;
	char base[KVP_BASE_MAX]; /* what its paths begin with, no slash at the end; "" = nothing */
	int wake_fd;
	uint8_t draining, forced;
};

struct kvp_sidecar {
	struct kvp_config cfg;
	struct kvp_worker *worker;
	unsigned worker_cnt;
	uint64_t stream_cnt; /* requests that run, all workers */
	uint32_t is_draining;  /* set by worker 0; release */
	uint32_t other_cnt;    /* workers but 0 that run; release. Worker 0, with the metrics, ends last */
	struct kvp_held held;
};

/* How a request runs. stream_body: NULL: the body is collected first, under max and time-out, then start is
 * called; else start comes with the head, and the body in pieces. */
struct kvp_flow {
	void (*start)(struct kvp_req *r);
	void (*stream_body)(struct kvp_req *r, const char *data, uint64_t len);
	void (*stream_end)(struct kvp_req *r);
	void (*drained)(struct kvp_req *r); /* the client took enough: go on */
	void (*finish)(struct kvp_req *r);
};

/* A backend: names, the flow, and what the flow asks it. */
enum kvp_answer { KVP_ANSWER_DECODE, KVP_ANSWER_DIRECT, KVP_ANSWER_ERROR };
struct kvp_adapter {
	const char *name;
	const struct kvp_flow *flow;
	enum kvp_result too_large; /* code of the 413 */
	/* Judges the client's object, r->body. KVP_OK or *f. */
	int (*check)(struct kvp_req *r, struct kvp_fail *f);
	/* seq: body of the prefill leg; what to do with its answer: *body is the decode leg's, or the answer
	 * to the client, or *f. */
	int (*prefill_body)(struct kvp_req *r, struct kvp_http_buf *body);
	enum { KVP_FAILURE_ANSWERED, KVP_FAILURE_FALLS_BACK } prefill_failure;
	enum kvp_answer (*prefill_answer)(struct kvp_req *r, const char *text, uint64_t len,
		struct kvp_http_buf *body, struct kvp_fail *f);
};

enum kvp_req_path { KVP_PATH_CHAT, KVP_PATH_COMPLETIONS, KVP_PATH_RESPONSES, KVP_PATH_OTHER, KVP_PATH_CNT };
/* Labels of metrics and logs. */
extern const char *const kvp_path_text[KVP_PATH_CNT], *const kvp_result_text[KVP_RESULT_CNT];

struct kvp_req {
	struct kvp_worker *w;
	struct kvp_conn *conn;
	const struct kvp_adapter *adapter; /* NULL: passed through */
	const struct kvp_flow *flow;
	void *flow_state; /* the flow's own */
	struct kvp_target target;
	struct kvp_http_buf body;
	struct kvp_json_check check; /* of body, as it comes */
	struct kvp_leg prefill, decode;
	struct kvp_usage *usage; /* of the decode answer, to be set; NULL: it stays as it is */
	uint64_t start_ns, trt_id;
	enum kvp_req_path path;
	char request_id[37]; /* minted, "" if the client brought one */
	uint8_t running;
	uint8_t is_stream;   /* the client asked for a stream */
	uint8_t wants_usage; /* and for usage at its end */
	uint8_t drops_n;     /* more than one n: all of them go */
	uint8_t replied;     /* the head of the answer is on its way */
	uint8_t is_head;     /* answers have no body */
	uint8_t framing;     /* of the answer: enum kvp_reply_framing */
	int status;	     /* of the answer, 0 before */
};

/* reply.c: the answer. Everything but kvp_reply_head and kvp_reply_body ends the request: r is dead after
 * it. */
enum kvp_reply_framing { KVP_REPLY_NONE, KVP_REPLY_CHUNKED, KVP_REPLY_CLOSE };
/* Status line and header fields of an engine's answer, sanitised; kept for later or at once. */
struct kvp_kept_head {		  /* zeroed; free text */
	struct kvp_http_buf text; /* status and reason, then fields */
	uint64_t status_len;
	int status;
};
int kvp_reply_keep_head(struct kvp_kept_head *k, const struct kvp_http_head *h);
void kvp_reply_kept_head(struct kvp_req *r, const struct kvp_kept_head *k);
void kvp_reply_head(struct kvp_req *r, const struct kvp_http_head *h);
/* Body bytes; returns how many wait for the client. At KVP_OUT_HIGH_BYTES stop until the flow's drained. */
uint64_t kvp_reply_body(struct kvp_req *r, const char *data, uint64_t len);
void kvp_reply_end(struct kvp_req *r, enum kvp_result result);
/* kvp_reply_cut: the rest will not come; the client sees the break behind what it was sent. */
void kvp_reply_cut(struct kvp_req *r, enum kvp_result result);
/* An answer of our own, in the shape of the profile. retry_after: value of that field, or NULL. Before the
 * head of an answer only. kvp_reply_error_text: the message as plain text. */
void kvp_reply_error(struct kvp_req *r, const struct kvp_fail *f, const char *retry_after);
extern const struct kvp_fail kvp_fail_resources,
	kvp_fail_held; /* no memory or descriptors; over the budget */
void kvp_reply_error_text(struct kvp_req *r, const struct kvp_fail *f);
void kvp_reply_whole(struct kvp_req *r, int status, const char *content_type, const char *body, uint64_t len);

/* headers.c: the request to an engine. */
enum kvp_leg_kind { KVP_LEG_PASS, KVP_LEG_PREFILL, KVP_LEG_DECODE };
/* kvp_headers_request appends request line, Host and the client's fields as that leg may see them, framing
 * and the empty line. Paths at the engine beside us begin with the base path. length: of the body;
 * KVP_LENGTH_CHUNKED: chunked; KVP_LENGTH_NONE: no body. */
#define KVP_LENGTH_CHUNKED UINT64_MAX
#define KVP_LENGTH_NONE (UINT64_MAX - 1)
int kvp_headers_request(struct kvp_req *r, enum kvp_leg_kind kind, uint64_t length, struct kvp_http_buf *out);
/* kvp_headers_whole puts such a head before the bytes in body, in place: then it is the whole request. After
 * a failure body is as it was. */
int kvp_headers_whole(struct kvp_req *r, enum kvp_leg_kind kind, struct kvp_http_buf *body);
/* kvp_headers_rank: the prefill engine's rank, decimal without leading zeros, or NULL: anything else is
 * none. */
const char *kvp_headers_rank(const struct kvp_req *r, uint32_t *len);
/* kvp_headers_side: a call of our own to an engine, with the client's authorization and no other field of
 * it. body NULL: GET. */
enum kvp_req_engine_kind { KVP_ENGINE_LOCAL, KVP_ENGINE_PREFILL };
int kvp_headers_side(struct kvp_req *r, enum kvp_req_engine_kind kind, const char *path, const char *body,
	struct kvp_http_buf *out);
/* kvp_headers_length appends a content-length field. */
int kvp_headers_length(uint64_t length, struct kvp_http_buf *out);
/* kvp_headers_answer appends the fields of an engine's answer that a client may see. */
int kvp_headers_answer(const struct kvp_http_head *h, struct kvp_http_buf *out);
/* kvp_headers_id: the client's x-request-id, or NULL: absent, empty, or of the connection only. */
const char *kvp_headers_id(const struct kvp_req *r, uint32_t *len);
const struct kvp_http_head *kvp_req_head(const struct kvp_req *r);

/* kvp_engine_cfg fills in where the engine beside us or the prefill engine is, and the settings'
 * time-outs. */
void kvp_engine_cfg(const struct kvp_worker *w, enum kvp_req_engine_kind kind, const struct kvp_target *t,
	struct kvp_leg_cfg *cfg);

/* kvp_req_end closes a request's books; used by reply.c and conn.c. */
void kvp_req_end(struct kvp_req *r, enum kvp_result result);

/* kvp_req_hold: a request keeps so many bytes now, all its buffers together. KVP_ERR_FULL: more than before
 * is over the budget, it was counted, and kvp_fail_held is the answer. A body that is collected counts
 * KVP_HELD_COPIES times: an engine's copy is made of it. */
#define KVP_HELD_COPIES 2
int kvp_req_hold(struct kvp_req *r, uint64_t bytes);

/* relay.c: the decode leg as the client's answer, the same in every flow. */
void kvp_relay_start(struct kvp_req *r, enum kvp_leg_kind kind, struct kvp_http_buf *body);
void kvp_relay_drained(struct kvp_req *r);
/* kvp_relay_put: bytes of a leg's answer to the client; the leg pauses when they wait. */
void kvp_relay_put(struct kvp_req *r, struct kvp_leg *leg, const char *data, uint64_t len);

/* kvp_req_dropped: name of the member whose copies must not reach an engine; of none that JSON can have. */
static inline const char *kvp_req_dropped(const struct kvp_req *r)
{
	return r->drops_n ? "n" : "\xff";
}

/* kvp_req_is_object: the body, which is here, is JSON and an object. */
static inline int kvp_req_is_object(const struct kvp_req *r)
{
	return r->check.first == '{' && kvp_json_check_end(&r->check) == KVP_OK;
}

/* Flows and adapters. */
extern const struct kvp_flow kvp_flow_pass, kvp_flow_seq, kvp_flow_sgl;
extern const struct kvp_adapter kvp_adapter_vllm, kvp_adapter_sglang, kvp_adapter_trtllm, kvp_adapter_llmd;

/* adapter_sglang.c: calls that tell an engine to stop; they end by themselves, within 5 s. */
void kvp_aborts_end(struct kvp_worker *w);

/* conn.c */
int kvp_worker_listen(struct kvp_worker *w, int flags);
void kvp_worker_drain(struct kvp_worker *w); /* stops accepting; the loop stops when all is done */
void kvp_worker_check(struct kvp_worker *w); /* stops the loop of a draining worker that has nothing left */
void kvp_worker_end(struct kvp_worker *w);
#endif
