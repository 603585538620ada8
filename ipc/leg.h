/* ipc/leg.h - HTTP/1.1 calls on the loop: pooled connections, requests and responses streamed with
 * back-pressure. A leg is one such call, as the sidecar has two for each of its requests.
 *
 * Shape      a pool holds idle connections by address. A leg (embedded in the user's struct) is one request
 *            and its response; it owns one connection while it runs.
 * Truth      the thread of the pool's loop only.
 * Ordering   on_head once, on_body any number of times, on_done exactly once - unless the leg is closed, then
 *            nothing more. None of them runs inside kvp_leg_start. In on_done the leg may be started again.
 * Retry      an idle connection that its server closed is noticed before use; a reused one that dies before
 *            the first response byte: once more on a fresh one, if the whole request is still held. A request
 *            that must not be run twice (KVP_LEG_ONCE) is repeated only if its server has none of it: no byte
 *            left, or the server's end of stream came and acknowledges no byte. Behind a reset the second is
 *            not known. Nothing else is repeated; redirects are ordinary responses.
 * TLS        a connection is made for one trust and one name, and used again only for both.
 * Strict     Content-Length twice or with Transfer-Encoding, other transfer codings, broken chunks, control
 *            bytes: the leg is broken and its connection closed.
 * Bounds     a paused leg takes at most two more receives; what waits to be sent is bounded by the user, who
 *            stops at KVP_OUT_HIGH_BYTES and goes on at on_room.
 * Crash      process-local.
 * Proved by  tests/t_leg.c, tests/t_http_client.c, tests/s_sidecar.t, tests/s_sidecar_kept.t
 */
#ifndef KVP_IPC_LEG_H
#define KVP_IPC_LEG_H

#include "ipc/http_parse.h"
#include "ipc/loop.h"
#include "ipc/names.h"
#include "ipc/out.h"
#include "ipc/tls_client.h"

struct kvp_leg_conn;

struct kvp_leg_stat {
	uint64_t open, idle;		       /* gauges: connections */
	uint64_t connects, reused, tls_failed; /* since start, like the rest; other threads may read them */
	uint64_t retried, unrepeated;	       /* legs sent again; not sent again because of KVP_LEG_ONCE */
	uint64_t stale;			       /* idle connections found dead */
};
struct kvp_leg_pool { /* zeroed, then loop and limits set */
	struct kvp_loop *loop;
	uint32_t idle_max, idle_ms, head_max_bytes;
	uint32_t open_max; /* an idle connection makes room for a new one; 0: no limit */
	void (*on_tls_failed)(void *ctx, const char *why); /* a handshake; may be NULL */
	void *ctx;
	struct kvp_names names;
	struct kvp_leg_conn *busy, *idle;
	struct kvp_leg_stat stat;
};
void kvp_leg_pool_end(struct kvp_leg_pool *p); /* closes idle connections; no leg may run */

enum kvp_leg_end {
	KVP_LEG_COMPLETE,
	KVP_LEG_REFUSED,	 /* no connection */
	KVP_LEG_CONNECT_TIMEOUT, /* none in time; also if of several addresses one was silent */
	KVP_LEG_READ_TIMEOUT,	 /* a gap that was too long */
	KVP_LEG_DEADLINE,	 /* the whole took too long */
	KVP_LEG_BROKEN,		 /* ended or was no HTTP before its head was complete */
	KVP_LEG_CUT,		 /* the same behind its head */
	KVP_LEG_TOO_LARGE,	 /* over body_max_bytes */
	KVP_LEG_FAILED		 /* no memory or descriptors here */
};

struct kvp_leg;
struct kvp_leg_ops {
	void (*on_head)(void *ctx, struct kvp_leg *leg);
	void (*on_body)(void *ctx, struct kvp_leg *leg, const char *data, uint64_t len);
	void (*on_done)(void *ctx, struct kvp_leg *leg, enum kvp_leg_end end);
	/* What was to be sent has left, as good as; may be NULL for legs without an upload. */
	void (*on_room)(void *ctx, struct kvp_leg *leg);
};

/* How the request comes: whole; in pieces of at most KVP_LEG_HELD_MAX bytes in all; in any number of them.
 * The last takes no connection that was used before, because it could not be repeated. */
#define KVP_LEG_HELD_MAX 65536
enum kvp_leg_upload { KVP_LEG_WHOLE, KVP_LEG_SHORT, KVP_LEG_LONG };
/* Whether a server may get the request twice. */
enum kvp_leg_repeat { KVP_LEG_AGAIN, KVP_LEG_ONCE };

struct kvp_leg_cfg {
	struct kvp_addrs to; /* tried one after the other, connect_ns each; none: host is looked up */
	const char *host;    /* literal or name; not kept */
	uint16_t port;
	struct kvp_tls_client *tls;   /* NULL: plain text */
	const char *tls_name;	      /* host to prove, NULL: tls's; stays valid while the leg runs */
	struct kvp_http_buf *request; /* head and body; taken over, also on failure */
	enum kvp_leg_upload upload;   /* not WHOLE: more comes by kvp_leg_put, up to kvp_leg_put_end */
	enum kvp_leg_repeat repeat;   /* whether it may be sent twice, see Retry */
	uint8_t is_head;	      /* of a HEAD request: the response has no body */
	uint64_t connect_ns, gap_ns;  /* longest connect, longest silence; 0 = no limit */
	uint64_t deadline_ns;	      /* of the loop's clock; 0 = none */
	uint64_t body_max_bytes;      /* of the response; 0 = no limit */
};

struct kvp_leg { /* zeroed at first; private but for status, head, got, and err and sys in on_done */
	struct kvp_leg_pool *pool;
	const struct kvp_leg_ops *ops;
	void *ctx;
	struct kvp_leg_conn *conn;
	struct kvp_timer gap, deadline;
	struct kvp_defer failed;
	struct kvp_name_wait name;
	struct kvp_leg_cfg cfg;
	struct kvp_http_buf request;
	const struct kvp_http_head *head; /* of the response, from on_head until the call of on_done */
	uint64_t body_bytes, start_ns;
	uint32_t addr_at;
	int status; /* 0 before the head */
	int err;    /* of BROKEN and CUT: KVP_ERR_CLOSED, KVP_ERR_PROTO, KVP_ERR_LIMIT (head), KVP_ERR_SYS */
	int sys;    /* of REFUSED and FAILED: errno; EPROTO: TLS */
	uint8_t got, running, paused, retried, ended_upload;
	uint8_t was_late; /* an address did not answer */
};

/* kvp_leg_start: never fails at once, on_done tells. */
void kvp_leg_start(struct kvp_leg *leg, struct kvp_leg_pool *p, const struct kvp_leg_cfg *cfg,
	const struct kvp_leg_ops *ops, void *ctx);
static inline int kvp_leg_runs(const struct kvp_leg *leg)
{
	return leg->running;
}
/* kvp_leg_close ends a running leg without callbacks; its connection is closed. Not running: nothing. */
void kvp_leg_close(struct kvp_leg *leg);
/* Streamed upload. kvp_leg_unsent: bytes not yet in the kernel's hands. */
void kvp_leg_put(struct kvp_leg *leg, const char *data, uint64_t len);
void kvp_leg_put_end(struct kvp_leg *leg);
uint64_t kvp_leg_unsent(const struct kvp_leg *leg);
/* kvp_leg_held: bytes of the request that are in memory: those unsent, and a copy while it may be
 * repeated. */
uint64_t kvp_leg_held(const struct kvp_leg *leg);
void kvp_leg_pause(struct kvp_leg *leg);
void kvp_leg_resume(struct kvp_leg *leg);
#endif
