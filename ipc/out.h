/* ipc/out.h - bytes on their way to a socket: one send in flight, the rest gathered behind it.
 *
 * Shape      struct kvp_out: gathered bytes and the number in flight.
 * Truth      the loop's thread only.
 * Bounds     none here: who puts looks at kvp_out_len.
 * Crash      process-local.
 * Proved by  tests/t_leg.c, tests/s_sidecar.t
 */
#ifndef KVP_IPC_OUT_H
#define KVP_IPC_OUT_H

#include <stdlib.h>

#include "ipc/http_parse.h"
#include "ipc/loop.h"

#define KVP_OUT_HIGH_BYTES 65536 /* who streams stops here */
#define KVP_OUT_LOW_BYTES 16384	 /* and goes on here */

struct kvp_out {
	struct kvp_http_buf pend;
	uint64_t fly; /* bytes in the loop's hands */
	uint8_t failed;
};

static inline uint64_t kvp_out_len(const struct kvp_out *o)
{
	return o->pend.len + o->fly;
}

/* kvp_out_kick hands over what is gathered if nothing is in flight; the loop refuses bytes only while it has
 * some. */
static inline void kvp_out_kick(struct kvp_out *o, struct kvp_sock *s)
{
	if (o->fly || !o->pend.len || o->failed)
		return;
	uint64_t len = o->pend.len;
	if (kvp_sock_send(s, o->pend.p, 0, len))
		return;
	o->pend = (struct kvp_http_buf){0};
	o->fly = len;
}

/* kvp_out_sent is for on_sent: the buffer is used again or freed. After an error nothing more is sent. */
static inline void kvp_out_sent(struct kvp_out *o, struct kvp_sock *s, char *buf, int err)
{
	free(buf);
	o->fly = 0;
	if (err) {
		o->failed = 1;
		kvp_http_buf_free(&o->pend);
	}
	kvp_out_kick(o, s);
}
#endif
