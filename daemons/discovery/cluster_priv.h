/* daemons/discovery/cluster_priv.h — what the parts of cluster*.c share. */
#ifndef KVP_DISCOVERY_CLUSTER_PRIV_H
#define KVP_DISCOVERY_CLUSTER_PRIV_H

#include "daemons/common/config.h"
#include "daemons/discovery/cluster.h"
#include "daemons/discovery/probe.h"
#include "shm/region.h"

#define CLUSTER_COMPARE_NS 5000000000ull /* between looks at the whole catalogue */
#define CLUSTER_SERVICE_RETRY_NS 1000000000ull
#define CLUSTER_NAME_MAX 1024

struct cluster_pool {
	struct kvp_cluster *c;
	const char *name; /* "" = not configured */
	struct kvp_kube_reflector *ref;
	struct kvp_ipool pool; /* points into bytes of the reflector: read anew at every change */
	int said_valid;	       /* as logged: 0 = nothing yet, 1, or -1 */
};

/* The replicas that the peer Service names. */
struct cluster_peers {
	struct kvp_cluster *c;
	char service_path[CLUSTER_NAME_MAX];
	struct kvp_kube_get get;
	struct kvp_timer timer;
	struct kvp_kube_reflector *ref;
	int adopted; /* rows of a process before were looked at */
};

struct kvp_cluster {
	struct kvp_cluster_cfg cfg;
	const struct kvp_config *config;
	struct kvp_pod_rules rules;
	struct kvp_kube_access access;
	struct kvp_kube *kube;
	struct cluster_pool pool[2]; /* the pool, and that of prefill workers */
	uint32_t pool_cnt;
	struct kvp_kube_reflector *pods;
	struct cluster_peers peers;
	struct kvp_probes *probes; /* NULL: engines are not asked */
	struct kvp_probe_stat probed;
	struct kvp_jw body;
	uint32_t why[KVP_POD_WHY_CNT]; /* pods that are no workers, of the last picture of all */
	uint32_t left_out; /* workers that the last picture of all left out: one change may let them in */
	int is_picture_due, opened_once;
	uint64_t compare_ns, cat_version;
	struct kvp_kube_stat seen;
};

int cluster_peers_open(struct kvp_cluster *c);
void cluster_peers_close(struct kvp_cluster *c);
#endif
