#include "daemons/supervisor/doctor.h"

#include "ipc/kube.h"
#include "ipc/loop.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PATH_MAX_BYTES 1400

struct api {
	struct doctor *d;
	struct kvp_kube_access access;
	struct kvp_loop *loop;
	struct kvp_kube *kube;
};

struct reply {
	int done;
	long status;
	char text[320]; /* why there is no answer */
	int has_spec;	/* some object of the list has one */
};

static void on_reply(void *ctx, struct kvp_kube_get *g, long status, const char *text, size_t len)
{
	struct reply *r = ctx;
	(void)g;
	r->done = 1;
	r->status = status;
	r->has_spec = len && memmem(text, len, "\"spec\"", 6) != NULL;
	if (!status)
		snprintf(r->text, sizeof(r->text), "%.*s", (int)len, text);
}

static void ask(struct api *a, const char *path, struct reply *r)
{
	struct kvp_kube_get g = {.k = NULL};
	uint64_t end = sup_now_ms() + DOC_CALL_MS, now;
	*r = (struct reply){.text = "no answer came in time"};
	if (kvp_kube_get(a->kube, &g, path, on_reply, r) != KVP_OK) {
		snprintf(r->text, sizeof(r->text), "no memory");
		return;
	}
	while (!r->done && (now = sup_now_ms()) < end)
		if (kvp_loop_run_once(a->loop, (end - now) * 1000000) < 0)
			break;
	kvp_kube_get_end(&g);
}

/* judge: 1 when the object is there. what: its name for people; missing: what to do if it isn't. */
static int judge(
	struct api *a, const char *path, const struct reply *reply, const char *what, const char *missing)
{
	static const char *const check = "api server";
	struct doctor *d = a->d;
	const char *at = a->access.base;
	const struct reply r = *reply;
	if (r.status == 0)
		doc_say(d, DOC_FAIL, check,
			"check address, network policy, and that the mounted ca.crt is the cluster's; kvpick "
			"has its "
			"workers from there",
			"%s: %s", at, r.text);
	else if (r.status == 401)
		doc_say(d, DOC_FAIL, check,
			"give a valid token or certificate (in a pod: the service account's)",
			"%s: it refuses who asks (401)", at);
	else if (r.status == 403)
		doc_say(d, DOC_FAIL, check,
			"bind the Role of deploy/kubernetes/base/rbac.yaml to the pod's account",
			"%s: %s is forbidden (403)", at, what);
	else if (r.status == 404)
		doc_say(d, DOC_FAIL, check, missing, "%s: %s is not there (404)", at, what);
	else if (r.status != 200)
		doc_say(d, DOC_FAIL, check, "look into the API server's log", "%s: %s answered %ld", at, what,
			r.status);
	else if (strstr(path, "fieldSelector") && !r.has_spec) /* a list, of none */
		doc_say(d, DOC_FAIL, check, missing, "%s: no %s", at, what);
	else
		return 1;
	return 0;
}

static int one_call(struct api *a, const char *path, const char *what, const char *missing)
{
	struct reply r;
	ask(a, path, &r);
	return judge(a, path, &r, what, missing);
}

/* A cluster without the group of v1 is asked for the older one, as discovery does. */
static int ask_pool(struct api *a, const char *pool)
{
	static const char *const group[] = {
		"inference.networking.k8s.io/v1", "inference.networking.x-k8s.io/v1alpha2"};
	char path[PATH_MAX_BYTES], what[300];
	struct reply r = {.status = 404};
	int old = -1;
	while (r.status == 404 && ++old < 2) {
		snprintf(path, sizeof(path),
			"/apis/%s/namespaces/%s/inferencepools?fieldSelector=metadata.name%%3D%s", group[old],
			a->d->cfg->pod_namespace, pool);
		ask(a, path, &r);
	}
	snprintf(what, sizeof(what), "InferencePool %s", pool);
	int ok = judge(a, path, &r, what,
		"make it in kvpick's own namespace, or correct DYN_EPP_INFERENCE_POOL_NAME; the cluster "
		"needs the "
		"CRD of InferencePool v1");
	if (ok && old)
		doc_say(a->d, DOC_WARN, "api server",
			"install the CRD of InferencePool v1 and move the pool to it",
			"%s: %s is of the older group %s", a->access.base, what, group[1]);
	return ok;
}

static void ask_objects(struct api *a)
{
	static const char *const no_service = "make the headless Service, or correct DYN_EPP_PEER_SERVICE";
	const struct kvp_config *c = a->d->cfg;
	char path[PATH_MAX_BYTES];
	snprintf(path, sizeof(path), "/api/v1/namespaces/%s/pods?limit=1", c->pod_namespace);
	int ok = one_call(a, path, "list of pods", "correct POD_NAMESPACE");
	ok = ok && ask_pool(a, c->pool_name);
	if (ok && c->prefill_pool_name[0])
		ok = ask_pool(a, c->prefill_pool_name);
	if (ok && c->epp_peer_service[0]) {
		snprintf(path, sizeof(path), "/api/v1/namespaces/%s/services/%s", c->pod_namespace,
			c->epp_peer_service);
		ok = one_call(a, path, "peer Service", no_service);
		snprintf(path, sizeof(path),
			"/apis/discovery.k8s.io/v1/namespaces/%s/endpointslices?limit=1&labelSelector="
			"kubernetes.io%%2Fservice-name%%3D%s",
			c->pod_namespace, c->epp_peer_service);
		ok = ok && one_call(a, path, "list of EndpointSlices", no_service);
	}
	if (ok)
		doc_say(a->d, DOC_OK, "api server", NULL, "%s: pods, pool %s%s in namespace %s",
			a->access.base, c->pool_name, c->epp_peer_service[0] ? ", peers" : "",
			c->pod_namespace);
}

void doc_api_server(struct doctor *d)
{
	const struct kvp_config *c = d->cfg;
	struct api a = {.d = d};
	struct kvp_kube_where where = {.url = c->kube_api_url,
		.host = c->kubernetes_service_host,
		.port = c->kubernetes_service_port == KVP_CONFIG_UNSET ? 0
								       : (uint32_t)c->kubernetes_service_port,
		.kubeconfig = c->kubeconfig};
	struct kvp_kube_cfg cfg = {.access = &a.access};
	char why[512] = "";
	if (!c->eff.discovery_on || c->workers_file[0])
		return;
	if (kvp_kube_access_find(&where, &a.access, why, sizeof(why)) != KVP_OK)
		doc_say(d, DOC_FAIL, "api server",
			"run in a pod with its account's token mounted (automountServiceAccountToken), or "
			"set KUBECONFIG "
			"or KVPICK_KUBE_API_URL; without Kubernetes set KVPICK_WORKERS_FILE",
			"%s", why);
	else if (kvp_loop_open(&a.loop, 64) != KVP_OK || kvp_kube_open(a.loop, &cfg, &a.kube) != KVP_OK)
		doc_say(d, DOC_FAIL, "api server", "free some memory", "no memory");
	else
		ask_objects(&a);
	if (a.kube)
		kvp_kube_close(a.kube);
	kvp_loop_close(a.loop);
	kvp_kube_access_free(&a.access);
}
