/* ipc/names.h - host names, looked up without waiting and remembered for a while.
 *
 * Shape      up to KVP_NAMES_MAX names, each with a resolver of its own (ipc/resolve.h). Literals need none.
 * Truth      the thread of the loop only.
 * Bounds     a name that nobody asked for during KVP_NAMES_KEEP_NS makes room; without room: KVP_ERR_FULL.
 * Crash      process-local.
 * Proved by  tests/s_sidecar.t
 */
#ifndef KVP_IPC_NAMES_H
#define KVP_IPC_NAMES_H

#include "ipc/loop.h"
#include "ipc/resolve.h"

#define KVP_NAMES_MAX 64
#define KVP_NAMES_KEEP_NS UINT64_C(60000000000)
#define KVP_NAME_ADDR_MAX 4

struct kvp_addrs {
	struct kvp_addr addr[KVP_NAME_ADDR_MAX];
	uint32_t cnt;
};
struct kvp_name_wait { /* zeroed at first; private */
	struct kvp_name_wait *next, **prev;
	struct kvp_addrs *out;
	uint16_t port;
	void (*cb)(void *ctx, int err);
	void *ctx;
};
struct kvp_name {
	char host[256];
	struct kvp_resolve *resolve;
	struct kvp_name_wait *wait;
	uint64_t used_ns;
};
struct kvp_names { /* zeroed, then loop set */
	struct kvp_loop *loop;
	struct kvp_name *name[KVP_NAMES_MAX];
};

/* kvp_name_find: addresses of host with port. KVP_OK and *out; KVP_ERR_AGAIN: cb tells later, once, with *out
 * set if err is KVP_OK (KVP_ERR_NOTFOUND: no such name), unless it is cancelled; KVP_ERR_FULL,
 * KVP_ERR_SYS. */
int kvp_name_find(struct kvp_names *n, const char *host, uint16_t port, struct kvp_addrs *out,
	struct kvp_name_wait *w, void (*cb)(void *ctx, int err), void *ctx);
void kvp_name_cancel(struct kvp_name_wait *w); /* not waiting: nothing */
void kvp_names_end(struct kvp_names *n);       /* nobody waits any more */
#endif
