/* daemons/peer/warm.h — the load that a newcomer does not know: a floor under each rank's load, for a minute.
 *
 * Shape      rows, one a rank that a peer told as loaded. A row's floor is KVP_WARM_SLICES bookings, each
 *            with its share of the tokens and blocks, made like those that replicas tell (mirror.h), under
 *            ids that nobody asks for.
 * Truth      the bookings; this memory knows which of them are still to be ended.
 * Writers    the daemon's thread.
 * Ordering   the floor falls in a straight line to nothing within KVP_WARM_NS from when it was told. What a
 *            rank bears beside it counts against it: as live bookings come, slices go.
 * Lifetime   from the answer of a peer until all slices are ended.
 * Limits     KVP_WARM_ROWS ranks; aggregated role. A row whose worker is not registered waits for it
 *            meanwhile.
 * Crash      the process killed: its slices end by age, like any mirrored booking.
 * Proved by  tests/t_warm.c, tests/s_recovery.t
 */
#ifndef KVP_PEER_WARM_H
#define KVP_PEER_WARM_H

#include "daemons/peer/mirror.h"

#define KVP_WARM_SLICES 12u
#define KVP_WARM_NS (60ull * 1000000000ull)
#define KVP_WARM_ROWS 65536u

struct kvp_warm;

/* kvp_warm_open: the mirror must outlive it. NULL without memory. kvp_warm_close ends what is left; NULL is
 * fine. */
struct kvp_warm *kvp_warm_open(struct kvp_mirror *m);
void kvp_warm_close(struct kvp_warm *w);

/* kvp_warm_take reads the answer of GET /loads: rows of before are kept, a rank that has one is left alone.
 * KVP_OK, KVP_ERR_PROTO (not such an answer: nothing is taken), KVP_ERR_SYS. */
int kvp_warm_take(struct kvp_warm *w, const char *json, size_t len, uint64_t now_ns);

/* kvp_warm_tend makes, and ends, what is due: about once a second. Returns the slices that are there. */
uint32_t kvp_warm_tend(struct kvp_warm *w, uint64_t now_ns);
#endif
