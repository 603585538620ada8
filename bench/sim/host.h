/* bench/sim/host.h — any number of simulated engines in one process: model, HTTP server and publisher of
 * each.
 *
 * Shape      one loop, one virtual clock (wall time since the start, times the scale), one wake-up for the
 *            earliest step of all engines. A late wake-up plays every step that is due with its exact end.
 * Routes     POST /v1/chat/completions, /v1/completions and both with /render; POST /reset_prefix_cache;
 *            GET /health, /v1/models, /stats; for SGLang's pairs GET /server_info, POST /abort_request.
 * Truth      the engines. Writers, readers: the loop's thread. Ordering: none.
 * Lifetime   open to close. Crash: process-local; clients see their connections end.
 * Proved by  tests/s_sim.t
 */
#ifndef KVP_BENCH_SIM_HOST_H
#define KVP_BENCH_SIM_HOST_H

#include "bench/sim/engine.h"
#include "bench/sim/pd.h"
#include "bench/sim/publish.h"

enum kvp_host_events { KVP_HOST_EVENTS_ON, KVP_HOST_EVENTS_OFF };

struct kvp_host_cfg {
	const char *ip;	     /* literal to bind and to print */
	const char *model;   /* the one model name served */
	uint32_t engine_cnt; /* 1..1024; engine i has port + i of each kind */
	uint16_t http_port;  /* 0 = any */
	enum kvp_host_events events;
	struct kvp_sim_cfg engine;
	struct kvp_pd_cfg pd;
	struct kvp_publish_cfg publish; /* ports: of engine 0, 0 = any */
	double scale;			/* virtual seconds a wall second, > 0 */
	uint64_t turn_ns;		/* wall: least time between two wake-ups while scaled */
	uint64_t stream_ns; /* wall: least time between two pieces of one answer; 0 = each wake-up */
};

struct kvp_host;

/* kvp_host_open makes all engines; they listen when it returns. KVP_ERR_INVAL: configuration; KVP_ERR_SYS:
 * errno. */
int kvp_host_open(struct kvp_loop *l, const struct kvp_host_cfg *cfg, struct kvp_host **out);
void kvp_host_close(struct kvp_host *h); /* NULL is fine */

/* Ports of one engine; event and replay are 0 with events off. */
struct kvp_host_ports {
	uint16_t http, event, replay;
};
void kvp_host_ports(const struct kvp_host *h, uint32_t engine, struct kvp_host_ports *out);
#endif
