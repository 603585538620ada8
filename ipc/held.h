/* ipc/held.h - bytes kept in memory for requests, counted against one budget of the process.
 *
 * Shape      a word that all threads add to. Each holder has a word of its own with what it has in there.
 * Counted    what waits for something else. HTTP server: bodies, also those of requests that wait for their
 *            answer, and pipelined requests. Sidecar: these, heads over KVP_HTTP_KEEP_BYTES, copies of bodies
 *            on their way to engines or kept for a repetition, answers of prefill engines, what of a decode
 *            answer waits behind a gate or for its usage, and answers that a client does not take. Not
 *            counted: streams, whose queues are short.
 * Ordering   none: relaxed sums.
 * Crash      process-local.
 * Proved by  tests/s_sidecar_limits.t, tests/t_http.c, tests/s_http_held.t
 */
#ifndef KVP_IPC_HELD_H
#define KVP_IPC_HELD_H

#include <kvpick/atomic.h>
#include <kvpick/err.h>
#include <stdint.h>

#define KVP_HELD_OUT_BYTES 262144 /* bytes for a client that count: more than a stream lets wait */

struct kvp_held {
	uint64_t all, max; /* max 0: no budget */
};
enum kvp_held_how {
	KVP_HELD_ASK, /* more than there was is refused over the budget */
	KVP_HELD_TAKE /* the bytes are there already */
};

/* kvp_held_set: a holder has now bytes instead of *mine. KVP_OK, or KVP_ERR_FULL and nothing changed. */
static inline int kvp_held_set(struct kvp_held *h, uint64_t *mine, uint64_t now, enum kvp_held_how how)
{
	uint64_t more = now - *mine; /* modulo 2^64 */
	if (!more)
		return KVP_OK;
	uint64_t all = kvp_faa_rlx_u64(&h->all, more) + more;
	if (how == KVP_HELD_ASK && now > *mine && h->max && all > h->max) {
		kvp_faa_rlx_u64(&h->all, -more);
		return KVP_ERR_FULL;
	}
	*mine = now;
	return KVP_OK;
}
#endif
