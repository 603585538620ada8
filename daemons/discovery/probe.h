/* daemons/discovery/probe.h — asks engines what they are: model, block size, KV blocks. Optional.
 *
 * Shape      one entry a pod: its address and, once it has answered, what it said. GET /health, /v1/models,
 *            /metrics, one after the other; at most KVP_PROBE_WINDOW engines at a time.
 * Truth      the engine, at the time it was asked. Asked once for an address; what failed is asked again
 *            after KVP_PROBE_RETRY_NS.
 * Writers    the process's one thread.
 * Ordering   on_answer after everything of an engine is known; never from inside a call.
 * Lifetime   open to close; close gives up what is under way.
 * Limits     KVP_PROBE_TIMEOUT_NS for a request, KVP_PROBE_BODY_MAX bytes of an answer.
 * Crash      process-local: a new process asks again.
 * Proved by  tests/t_probe.c (texts), tests/s_kube.t
 */
#ifndef KVP_DISCOVERY_PROBE_H
#define KVP_DISCOVERY_PROBE_H

#include "ipc/json_in.h"
#include "ipc/loop.h"
#include <stddef.h>
#include <stdint.h>

#define KVP_PROBE_WINDOW 16u
#define KVP_PROBE_TIMEOUT_NS 3000000000ull
#define KVP_PROBE_RETRY_NS 10000000000ull
#define KVP_PROBE_BODY_MAX (4u << 20)

enum kvp_probe_model { KVP_PROBE_MODEL_UNKNOWN, KVP_PROBE_MODEL_SERVED, KVP_PROBE_MODEL_OTHER };

struct kvp_probe_answer {
	uint64_t block_size, kv_blocks; /* 0 = it did not say */
	enum kvp_probe_model model;
};

struct kvp_probe_stat {
	uint64_t asked, answered, failed;
	uint32_t known, waiting;
};

struct kvp_probes;

struct kvp_probe_cfg {
	struct kvp_loop *loop;
	const char *model; /* outlives the handle */
	void (*on_answer)(void *ctx, const char *name, const struct kvp_probe_answer *a);
	void *ctx;
};

/* kvp_probes_open: KVP_ERR_SYS. */
int kvp_probes_open(const struct kvp_probe_cfg *cfg, struct kvp_probes **out);
void kvp_probes_close(struct kvp_probes *p);

/* kvp_probe_get gives what the engine of a pod at an address (IP literal) has answered; NULL if that is not
 * known yet: then it is asked. kvp_probe_drop forgets a pod. */
const struct kvp_probe_answer *kvp_probe_get(
	struct kvp_probes *p, const char *name, const char *ip, uint16_t port);
void kvp_probe_drop(struct kvp_probes *p, const char *name);
/* kvp_probes_tend: every beat. */
void kvp_probes_tend(struct kvp_probes *p, uint64_t now_ns);
void kvp_probes_stat(const struct kvp_probes *p, struct kvp_probe_stat *out);

/* What an answer says. models: JSON of /v1/models. metrics: text of /metrics, of which a line such as
 * vllm:cache_config_info{block_size="16",num_gpu_blocks="2048",...} 1 tells (page_size and num_pages,
 * too). */
enum kvp_probe_model kvp_probe_models(struct kvp_json *json, const char *text, size_t len, const char *model);
void kvp_probe_metrics(const char *text, size_t len, struct kvp_probe_answer *out);
#endif
