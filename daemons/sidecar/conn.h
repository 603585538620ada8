/* daemons/sidecar/conn.h - a client's connection: reading, one request at a time, writing.
 *
 * Shape      READ (head), BODY (of the running request), WAIT (for its answer), FLUSH (the answer's last
 *            bytes leave), LINGER (our side is closed, the client's rest is thrown away).
 * Truth      the worker's thread only.
 * Client     a reset or full close ends the request at once; a half close behind a complete request is
 *            served. To tell the two apart bytes that have to be sent anyway go out when a FIN arrives - the
 *            status line's first, or a leading zero of the next chunk's size -, which a fully closed peer
 *            answers with a reset.
 * Bounds     pipelined bytes: KVP_CONN_PEND_MAX, and the budget of held.h; over that they are thrown away and
 *            the connection ends with the running answer. Unsent bytes: flows stop at KVP_OUT_HIGH_BYTES. A
 *            client that takes nothing for KVP_CONN_STALL_NS is closed.
 * Crash      process-local.
 * Proved by  tests/s_sidecar.t
 */
#ifndef KVP_SIDECAR_CONN_H
#define KVP_SIDECAR_CONN_H

#include "daemons/sidecar/sidecar.h"

#define KVP_CONN_PEND_MAX UINT64_C(1048576)
#define KVP_CONN_HEAD_MAX 65536
#define KVP_CONN_LINE_MAX 65536
#define KVP_CONN_HEAD_NS UINT64_C(30000000000) /* first byte to complete head */
#define KVP_CONN_IDLE_NS UINT64_C(75000000000)
#define KVP_CONN_STALL_NS UINT64_C(300000000000)
#define KVP_CONN_LINGER_NS UINT64_C(5000000000)
#define KVP_CONN_FORCED_NS UINT64_C(1000000000) /* to linger in a drain, to flush after a forced end */

enum kvp_conn_state { KVP_CONN_READ, KVP_CONN_BODY, KVP_CONN_WAIT, KVP_CONN_FLUSH, KVP_CONN_LINGER };

struct kvp_conn {
	struct kvp_worker *w;
	struct kvp_conn *next, **prev;
	struct kvp_sock sock;
	struct kvp_timer timer;
	struct kvp_defer work;
	struct kvp_defer cork; /* what is put in one turn leaves in one piece */
	struct kvp_http_in in;
	struct kvp_http_buf pend; /* bytes behind the running request */
	struct kvp_out out;
	struct kvp_req req;
	uint64_t rest;		  /* bytes behind those that are being fed */
	uint64_t held, flow_held; /* of the budget: all of it, and that for the running request */
	uint8_t state;
	uint8_t keep;
	uint8_t fin;	    /* the client sends no more */
	uint8_t prefix_out; /* the first bytes of the status line are on their way */
	uint8_t cut;	    /* ends with a reset behind the last byte */
	uint8_t overrun;    /* pipelined bytes were thrown away */
};

/* kvp_conn_expects: there is, or may come, a request behind the running one. */
static inline int kvp_conn_expects(const struct kvp_conn *c)
{
	return !c->fin || c->pend.len || c->rest;
}
/* kvp_conn_put queues bytes for the client; kvp_conn_later processes what waits, at the end of the turn. */
void kvp_conn_put(struct kvp_conn *c, const void *data, uint64_t len);
void kvp_conn_later(struct kvp_conn *c);
/* kvp_conn_room: the flow has room for more of the upload. */
void kvp_conn_room(struct kvp_conn *c);
void kvp_conn_timer(struct kvp_conn *c);

/* route.c: what a complete head asks for. Replies, or starts the flow; the state tells. */
void kvp_conn_route(struct kvp_conn *c);
#endif
