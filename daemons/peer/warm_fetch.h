/* daemons/peer/warm_fetch.h — asks the peer that the index came from for its loads, and tends the floor.
 *
 * Shape      one GET <peer>/loads on the daemon's loop, and a timer while there is a floor (warm.h).
 * Truth      warm.h's.
 * Writers    the loop's thread.
 * Limits     KVP_WARM_FETCH_BYTES of answer, DYN_EPP_RECOVERY_HTTP_TIMEOUT_MS; whatever goes wrong costs a
 *            line in the log, and the node starts without a floor.
 * Lifetime   open to close; nothing is done unless KVPICK_RECOVER_LOADS is on.
 * Crash      as warm.h.
 * Proved by  tests/s_recovery.t
 */
#ifndef KVP_PEER_WARM_FETCH_H
#define KVP_PEER_WARM_FETCH_H

#include "daemons/common/boot.h"
#include "daemons/peer/warm.h"
#include "ipc/http_url.h"
#include "ipc/json_out.h"
#include "ipc/loop.h"

#define KVP_WARM_FETCH_BYTES (16u << 20)

struct kvp_warm_fetch;

/* kvp_warm_fetch_open: *out NULL if the setting is off. KVP_ERR_SYS. */
int kvp_warm_fetch_open(
	struct kvp_boot *boot, struct kvp_loop *loop, struct kvp_mirror *m, struct kvp_warm_fetch **out);
void kvp_warm_fetch_close(struct kvp_warm_fetch *f); /* NULL is fine */
/* kvp_warm_fetch_ask: host as kvp_http_call takes it. NULL f: nothing. */
void kvp_warm_fetch_ask(struct kvp_warm_fetch *f, const struct kvp_http_url *to, const char *host);

/* kvp_loads_write writes what GET /loads answers: the loads of all ranks of the aggregated role. */
void kvp_loads_write(const struct kvp_region *r, struct kvp_jw *w);
#endif
