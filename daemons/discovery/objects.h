/* daemons/discovery/objects.h — what discovery keeps of pools, pods and endpoint slices, and what a pod
 * becomes.
 *
 * Shape      digests: short texts, made from the API's JSON and read back from the bytes that a reflector
 *            keeps. Equal digests mean that nothing changed that matters here: a pod that nobody may be sent
 *            to is one byte.
 * Truth      the API's objects.
 * Writers    none: functions without state and I/O.
 * Ordering   none.
 * Lifetime   what is read back points into the bytes.
 * Crash      process-local.
 * Proved by  tests/t_discovery.c, tests/s_kube.t
 */
#ifndef KVP_DISCOVERY_OBJECTS_H
#define KVP_DISCOVERY_OBJECTS_H

#include "ipc/json_out.h"
#include "ipc/kube.h"
#include <kvpick/types.h>

#define KVP_IPOOL_PORTS_MAX 8
#define KVP_IPOOL_LABELS_MAX 64
#define KVP_WORKER_GROUP "default"
#define KVP_ACTIVE_PORTS "inference.networking.k8s.io/active-ports"

/* ---- pools ---- */

enum kvp_ipool_form {
	KVP_IPOOL_V1, /* inference.networking.k8s.io/v1 */
	KVP_IPOOL_OLD /* inference.networking.x-k8s.io/v1alpha2 */
};

struct kvp_ipool {
	const char *why; /* it can't be used; NULL = it can */
	uint16_t port[KVP_IPOOL_PORTS_MAX];
	uint32_t port_cnt, label_cnt;
	struct {
		const char *key, *val;
	} label[KVP_IPOOL_LABELS_MAX];
};

/* kvp_ipool_digest never refuses an object: an invalid pool is one that selects nothing. KVP_ERR_SYS. */
int kvp_ipool_digest(enum kvp_ipool_form form, struct kvp_json_val obj, struct kvp_kube_buf *out);
/* kvp_ipool_read: bytes p NULL = there is no pool. */
void kvp_ipool_read(struct kvp_kube_bytes b, struct kvp_ipool *out);

/* ---- pods ---- */

int kvp_pod_digest(struct kvp_json_val obj, struct kvp_kube_buf *out);
/* kvp_pod_id is the worker id of a pod: 53 bits of its name's hash, the same in every replica. */
uint64_t kvp_pod_id(const char *name, size_t len);

/* What a pod is not a worker for. */
enum kvp_pod_why {
	KVP_POD_IS_WORKER,
	KVP_POD_NOT_READY,    /* not ready, being deleted, or without an address */
	KVP_POD_NOT_SELECTED, /* its labels are not those of the pool */
	KVP_POD_PORT_OFF,     /* none of its ports is active, or a port would be above 65535 */
	KVP_POD_ROLE_MISSING,
	KVP_POD_ROLE_INVALID,
	KVP_POD_IN_BOTH, /* of two pools */
	KVP_POD_WHY_CNT
};
const char *kvp_pod_why_name(enum kvp_pod_why w);

enum kvp_pod_roles {
	KVP_PODS_AGGREGATED, /* one pool, every pod does all */
	KVP_PODS_BY_LABEL,   /* one pool, a label tells prefill from decode */
	KVP_PODS_BY_POOL     /* a pool of decode workers and one of prefill workers */
};

enum kvp_pod_words {
	KVP_PODS_DYN, /* the label says prefill or decode; a pod without it is none of them */
	KVP_PODS_LLMD /* llm-d's words, some of which mean both; a pod without the label decodes */
};

struct kvp_pod_capacity {
	uint64_t max_num_batched_tokens; /* UINT64_MAX = not told */
};

/* Everything beside the pod itself that makes a worker of it. */
struct kvp_pod_rules {
	enum kvp_pod_roles roles;
	enum kvp_pod_words words; /* BY_LABEL */
	const char *model, *role_label;
	uint32_t block_size;
	uint32_t event_port, replay_port, stride; /* replay_port 0 = none */
	uint32_t rank_cnt;
	int ranks_by_port;     /* every rank has its own target port, unless it decodes behind a sidecar */
	int has_events;	       /* the engines publish KV events */
	int has_decode_events; /* so do decode workers, and it is listened to */
	int is_eagle;
	uint64_t total_kv_blocks; /* UINT64_MAX = not told */
	struct kvp_pod_capacity capacity[KVP_PART_ROLE_CNT];
	const char *taint_labels; /* list of keys, commas between them */
	const char *domain_label; /* "" = none */
	const char *enforcement;  /* NULL = off */
};

struct kvp_pod_worker {
	uint64_t id;
	enum kvp_part_role role;
	int has_twin;	   /* the pod decodes and prefills: this is the decode worker */
	char why_text[96]; /* of the role label, as it is written */
	const char *ip;	   /* in the pod's bytes */
	const char *created; /* there, too: RFC 3339, or "" */
	uint16_t port;	   /* of its first rank */
};

/* kvp_pod_role_id is the worker id of a pod in a role. Where a pod may have two, the id of the prefill worker
 * is that of <name>/prefill, which is no pod's name; else both ids are the pod's. */
uint64_t kvp_pod_role_id(const struct kvp_pod_rules *r, const char *name, enum kvp_part_role role);

/* kvp_pod_worker_of makes the WorkerRequest of a pod.
 *
 * pool     the pool, or that of the decode workers.  prefill: that of the prefill workers, NULL = none.
 * w        receives the body; what it holds is void unless the answer is KVP_POD_IS_WORKER. Out of memory
 *          shows in kvp_jw_done. */
enum kvp_pod_why kvp_pod_worker_of(const struct kvp_pod_rules *r, const struct kvp_ipool *pool,
	const struct kvp_ipool *prefill, const char *name, struct kvp_kube_bytes pod, struct kvp_jw *w,
	struct kvp_pod_worker *out);

/* kvp_pod_twin_of makes the WorkerRequest of the prefill worker of a pod whose decode worker has a twin: the
 * same arguments as there, out as it was told. */
enum kvp_pod_why kvp_pod_twin_of(const struct kvp_pod_rules *r, const struct kvp_ipool *pool,
	const char *name, struct kvp_kube_bytes pod, struct kvp_jw *w, struct kvp_pod_worker *out);

/* ---- endpoint slices ---- */

int kvp_slice_digest(struct kvp_json_val obj, struct kvp_kube_buf *out);

enum kvp_slice_family { KVP_SLICE_V4 = 4, KVP_SLICE_V6 = 6 };
/* kvp_slice_each calls fn for every address of a slice of this family but `own`. is_source: the index may be
 * recovered from there. */
void kvp_slice_each(struct kvp_kube_bytes slice, enum kvp_slice_family family, const char *own,
	void (*fn)(void *ctx, const char *address, int is_source), void *ctx);
#endif
