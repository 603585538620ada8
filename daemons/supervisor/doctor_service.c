#include "daemons/supervisor/doctor.h"

#include <arpa/inet.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define ACCOUNT "/var/run/secrets/kubernetes.io/serviceaccount"

/* -- tokenizer -- */

/* One request of each protocol, and the member of its answer that holds the token ids. */
static const struct {
	const char *path, *member, *body; /* body: %s is the model, as a JSON string */
} question[] = {
	[KVP_TOK_VLLM_RENDER] = {"/v1/completions/render", "\"token_ids\"",
		"{\"model\":%s,\"prompt\":\"Is anybody there?\",\"max_tokens\":1}"},
	[KVP_TOK_SGLANG_RENDERER] = {"/v1/chat/completions/render", "\"input_ids\"",
		"{\"model\":%s,\"messages\":[{\"role\":\"user\",\"content\":\"Is anybody there?\"}]}"},
	[KVP_TOK_SGLANG_TOKENIZE] = {"/tokenize", "\"tokens\"",
		"{\"model\":%s,\"prompt\":\"Is anybody there?\"}"},
};

static const char *tokenizer_todo(int status)
{
	if (status == 401 || status == 403)
		return "put its bearer token into KVPICK_EPP_TOKENIZER_TOKEN_FILE";
	if (status == 404)
		return "set DYN_MODEL_NAME to the name that the engine serves, and "
		       "DYN_EPP_TOKENIZER_PROTOCOL to what the "
		       "service speaks";
	return "look into the service's log; DYN_EPP_TOKENIZER_PROTOCOL must be what it speaks";
}

static void say_tokenizer(struct doctor *d, const struct doc_http *h, int rc, const char *member)
{
	const char *url = d->cfg->tokenizer_url;
	if (rc)
		doc_say(d, DOC_FAIL, "tokenizer",
			"start the service, or correct DYN_EPP_TOKENIZER_SERVICE_URL", "%s: %s", url,
			h->error);
	else if (h->status != 200)
		doc_say(d, DOC_FAIL, "tokenizer", tokenizer_todo(h->status), "%s%s answered %d: %.300s", url,
			h->path, h->status, h->reply);
	else if (!strstr(h->reply, member))
		doc_say(d, DOC_FAIL, "tokenizer", "set DYN_EPP_TOKENIZER_PROTOCOL to what the service speaks",
			"%s%s answered without %s: %.300s", url, h->path, member, h->reply);
	else
		doc_say(d, DOC_OK, "tokenizer", NULL, "%s%s gave token ids for model %.200s", url, h->path,
			d->cfg->model_name);
}

void doc_tokenizer(struct doctor *d)
{
	const struct kvp_config *c = d->cfg;
	struct doc_url url;
	struct kvp_jw name;
	char *model = NULL, *body = NULL;
	if (!c->eff.epp_on || c->tokenizer_protocol == KVP_CONFIG_NO_WORD ||
		c->tokenizer_protocol == KVP_TOK_TEXT || doc_url_parse(c->tokenizer_url, &url))
		return;
	kvp_jw_init(&name);
	kvp_jw_str(&name, c->model_name);
	if (name.err == KVP_OK && asprintf(&model, "%.*s", (int)name.len, name.buf) < 0)
		model = NULL;
	kvp_jw_free(&name);
	const char *form = question[c->tokenizer_protocol].body, *at = strstr(form, "%s");
	if (model && asprintf(&body, "%.*s%s%s", (int)(at - form), form, model, at + 2) < 0)
		body = NULL;
	struct doc_http h = {.url = &url,
		.path = question[c->tokenizer_protocol].path,
		.token_file = c->tokenizer_token_file,
		.body = body};
	if (body)
		say_tokenizer(d, &h, doc_http_call(&h), question[c->tokenizer_protocol].member);
	doc_http_free(&h);
	free(model);
	free(body);
}

/* -- API server -- */

struct api {
	char text[1200]; /* its address, for people */
	struct doc_url url;
	const char *token_file, *ca_file;
};

/* one_call: 1 when the answer is 200. what: the object and the right to see it. */
static int one_call(
	struct doctor *d, const struct api *a, const char *path, const char *what, const char *missing)
{
	struct doc_http h = {
		.url = &a->url, .path = path, .token_file = a->token_file, .ca_file = a->ca_file};
	int rc = doc_http_call(&h), ok = 0;
	if (rc)
		doc_say(d, DOC_FAIL, "api server",
			strncmp(h.error, "TLS", 3) == 0 ? "mount the cluster's ca.crt of the service "
							  "account, and use a name of its certificate"
							: "check address and network policy; kvpick needs "
							  "the API server for its workers",
			"%s: %s", a->text, h.error);
	else if (h.status == 401)
		doc_say(d, DOC_FAIL, "api server", "mount a valid token (the service account's)",
			"%s: token refused (401)", a->text);
	else if (h.status == 403)
		doc_say(d, DOC_FAIL, "api server",
			"bind the Role of deploy/kubernetes/base/rbac.yaml to the pod's account",
			"%s: %s is forbidden (403)", a->text, what);
	else if (h.status == 404)
		doc_say(d, DOC_FAIL, "api server", missing, "%s: %s is not there (404)", a->text, what);
	else if (h.status != 200)
		doc_say(d, DOC_FAIL, "api server", "look into the API server's log", "%s: %s answered %d",
			a->text, what, h.status);
	else
		ok = 1;
	/* A list of a pool that does not exist is an empty list. */
	if (ok && strstr(path, "fieldSelector") && !strstr(h.reply, "\"spec\"")) {
		doc_say(d, DOC_FAIL, "api server", missing, "%s: no %s", a->text, what);
		ok = 0;
	}
	doc_http_free(&h);
	return ok;
}

static int ask_pool(struct doctor *d, const struct api *a, const char *pool)
{
	char path[1400], what[300];
	snprintf(what, sizeof(what), "InferencePool %s", pool);
	snprintf(path, sizeof(path),
		"/apis/inference.networking.k8s.io/v1/namespaces/%s/"
		"inferencepools?fieldSelector=metadata.name%%3D%s",
		d->cfg->pod_namespace, pool);
	return one_call(d, a, path, what,
		"make it in kvpick's own namespace, or correct DYN_EPP_INFERENCE_POOL_NAME; the "
		"cluster needs the CRD of InferencePool v1");
}

static void ask_objects(struct doctor *d, const struct api *a)
{
	const struct kvp_config *c = d->cfg;
	char path[1400];
	static const char *const no_service = "make the headless Service, or correct DYN_EPP_PEER_SERVICE";
	snprintf(path, sizeof(path), "/api/v1/namespaces/%s/pods?limit=1", c->pod_namespace);
	int ok = one_call(d, a, path, "list of pods", "correct POD_NAMESPACE");
	ok = ok && ask_pool(d, a, c->pool_name);
	if (ok && c->prefill_pool_name[0])
		ok = ask_pool(d, a, c->prefill_pool_name);
	if (ok && c->epp_peer_service[0]) {
		snprintf(path, sizeof(path), "/api/v1/namespaces/%s/services/%s", c->pod_namespace,
			c->epp_peer_service);
		ok = one_call(d, a, path, "peer Service", no_service);
		snprintf(path, sizeof(path),
			"/apis/discovery.k8s.io/v1/namespaces/%s/endpointslices?limit=1&labelSelector="
			"kubernetes.io%%2Fservice-name%%3D%s",
			c->pod_namespace, c->epp_peer_service);
		ok = ok && one_call(d, a, path, "list of EndpointSlices", no_service);
	}
	if (ok)
		doc_say(d, DOC_OK, "api server", NULL, "%s: pods, pool %s%s in namespace %s", a->text,
			c->pool_name, c->epp_peer_service[0] ? ", peers" : "", c->pod_namespace);
}

static int find_server(struct doctor *d, struct api *a)
{
	const struct kvp_config *c = d->cfg;
	unsigned char ip[16];
	int six = inet_pton(AF_INET6, c->kubernetes_service_host, ip) == 1;
	if (c->kube_api_url[0]) {
		snprintf(a->text, sizeof(a->text), "%s", c->kube_api_url);
	} else if (c->kubernetes_service_host[0]) {
		unsigned port = c->kubernetes_service_port == KVP_CONFIG_UNSET
					? 443
					: (unsigned)c->kubernetes_service_port;
		snprintf(a->text, sizeof(a->text), "https://%s%s%s:%u", six ? "[" : "",
			c->kubernetes_service_host, six ? "]" : "", port);
	} else if (c->kubeconfig[0]) {
		int ok = access(c->kubeconfig, R_OK) == 0;
		doc_say(d, ok ? DOC_WARN : DOC_FAIL, "api server",
			ok ? "run doctor in a pod, or with KVPICK_KUBE_API_URL, to have the server asked"
			   : "make it readable for the user of the node",
			"KUBECONFIG %s: %s", c->kubeconfig,
			ok ? "readable; what is in it was not tried" : strerror(errno));
		return KVP_ERR_NOTFOUND;
	} else {
		doc_say(d, DOC_FAIL, "api server",
			"run in a pod, or set KUBECONFIG or KVPICK_KUBE_API_URL; without Kubernetes set "
			"KVPICK_WORKERS_FILE",
			"no API server is known");
		return KVP_ERR_NOTFOUND;
	}
	return doc_url_parse(a->text, &a->url);
}

void doc_api_server(struct doctor *d)
{
	struct api a = {.token_file = ACCOUNT "/token", .ca_file = ACCOUNT "/ca.crt"};
	if (!d->cfg->eff.discovery_on || d->cfg->workers_file[0] || find_server(d, &a))
		return;
	int have = access(a.token_file, R_OK) == 0;
	if (a.url.tls && !have) {
		doc_say(d, DOC_FAIL, "api server",
			"mount the service account's token (automountServiceAccountToken), readable for the "
			"pod's user",
			"%s: %s", a.token_file, strerror(errno));
		return;
	}
	a.token_file = have ? a.token_file : NULL;
	a.ca_file = access(a.ca_file, R_OK) == 0 ? a.ca_file : NULL;
	ask_objects(d, &a);
}
