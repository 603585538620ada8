/* daemons/discovery/cluster.h — workers and replicas from Kubernetes: watches pools, pods and endpoint
 * slices.
 *
 * Shape      a reflector for each pool, one for the pods of the namespace, one for the slices of the peer
 *            Service. A change of a pod changes one worker; a complete list, or a change of a pool, makes a
 *            new picture of all.
 * Truth      the API server, as the reflectors hold it (ipc/kube.h).
 * Writers    the process's one thread.
 * Readers    extproc: the gate of workers; peer: the tables of peers and of sources, the gate of peers.
 * Ordering   no picture is made before the pods and every pool were listed completely, none in the middle of
 *            a list. A pool that is gone or invalid empties the picture at once and shuts the gate, before
 *            anything else is done. The gate opens when the first picture has reached the catalogue.
 * Lifetime   open to close.
 * Crash      the next process starts from lists; the gate, the tables and the catalogue stay as they are
 *            until it knows.
 * Proved by  tests/s_kube.t, tests/t_discovery.c (the rules)
 */
#ifndef KVP_DISCOVERY_CLUSTER_H
#define KVP_DISCOVERY_CLUSTER_H

#include "daemons/common/boot.h"
#include "daemons/discovery/catalog.h"
#include "daemons/discovery/objects.h"

struct kvp_cluster;

struct kvp_cluster_cfg {
	struct kvp_loop *loop;
	struct kvp_boot *boot;
	struct kvp_catalog *catalog;
	/* the process can't go on: exit with this code, when the turn is over */
	void (*on_fatal)(void *ctx, int exit_code);
	void *ctx;
};

/* kvp_cluster_rules turns settings into rules. Texts are the configuration's. */
void kvp_cluster_rules(const struct kvp_config *cfg, struct kvp_pod_rules *out);

/* kvp_cluster_open starts watching. KVP_OK; KVP_ERR_INVAL the configuration gives no API server (logged);
 * KVP_ERR_SYS. */
int kvp_cluster_open(const struct kvp_cluster_cfg *cfg, struct kvp_cluster **out);
void kvp_cluster_close(struct kvp_cluster *c);
/* kvp_cluster_tend: every beat and after every turn in which the catalogue got answers: gates, counters, the
 * comparison with the catalogue. */
void kvp_cluster_tend(struct kvp_cluster *c, uint64_t now_ns);
#endif
