/* bench/load/replay.h — plays a trace against real sockets, one or several policies at once.
 *
 * Shape      one loop. A run per policy: open-loop arrivals by timer, a small state machine per request: with
 *            policy kv select_and_reserve, the engine's stream, prefill_complete at its first piece, DELETE
 *            of the reservation after its end; otherwise the engine alone.
 * Truth      the statistics it fills. Writers, readers: the calling thread. Ordering: none.
 * Lifetime   one call. Crash: process-local; bookings left at a node expire there.
 * Proved by  tests/s_sim.t
 */
#ifndef KVP_BENCH_LOAD_REPLAY_H
#define KVP_BENCH_LOAD_REPLAY_H

#include "bench/load/options.h"

/* kvp_replay plays every run of cfg and fills stats[0 .. run_cnt). Progress goes to stderr. Ends early at
 * SIGINT or SIGTERM. Errors: KVP_ERR_SYS (set-up), those of kvp_node_register, KVP_ERR_CLOSED (interrupted).
 * Requests that fail are counted in the statistics. */
int kvp_replay(const struct kvp_load_cfg *cfg, const struct kvp_trace *t, struct kvp_run_stats *stats);
#endif
