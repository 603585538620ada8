/* daemons/sidecar/metrics.h - the sidecar's counters over HTTP, on a port of their own.
 *
 * Shape      GET /metrics: the sums over all workers as Prometheus text; GET /health; GET /ready: 200 while
 *            the engine beside us accepts connections and we don't drain, else 503.
 * Truth      workers' counters, read relaxed; runs on the loop of worker 0.
 * Crash      process-local.
 * Proved by  tests/s_sidecar.t
 */
#ifndef KVP_SIDECAR_METRICS_H
#define KVP_SIDECAR_METRICS_H

#include "daemons/sidecar/sidecar.h"

/* kvp_sc_metrics_open does nothing when the port is 0. KVP_ERR_SYS, KVP_ERR_INVAL. */
int kvp_sc_metrics_open(struct kvp_sidecar *s);
void kvp_sc_metrics_close(void);
#endif
