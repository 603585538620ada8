/* daemons/discovery/cluster_peers.c — the replicas behind the peer Service: who is followed, and who may be
 * asked for the index. Two tables of the region are made equal to what the slices say, but for rows that
 * others put there. */
#include "daemons/discovery/cluster_priv.h"

#include "daemons/common/log.h"
#include <arpa/inet.h>
#include <kvpick/clock.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct texts { /* sorted, no duplicates after texts_sort */
	char **item;
	uint32_t cnt, cap;
	int rc;
};

static void texts_add(struct texts *t, const char *s, size_t len)
{
	if (t->cnt == t->cap) {
		uint32_t cap = t->cap ? 2 * t->cap : 16;
		char **grown = realloc(t->item, cap * sizeof(*grown));
		if (!grown) {
			t->rc = KVP_ERR_SYS;
			return;
		}
		t->item = grown;
		t->cap = cap;
	}
	t->item[t->cnt] = strndup(s, len);
	if (t->item[t->cnt])
		t->cnt++;
	else
		t->rc = KVP_ERR_SYS;
}

static int by_text(const void *x, const void *y)
{
	const char *const *a = x, *const *b = y;
	return strcmp(*a, *b);
}

static int texts_has(const struct texts *t, const char *s)
{
	return t->cnt && bsearch(&s, t->item, t->cnt, sizeof(*t->item), by_text) != NULL;
}

static void texts_sort(struct texts *t)
{
	uint32_t kept = 0;
	if (t->cnt)
		qsort(t->item, t->cnt, sizeof(*t->item), by_text);
	for (uint32_t i = 0; i < t->cnt; i++)
		if (kept && strcmp(t->item[kept - 1], t->item[i]) == 0)
			free(t->item[i]);
		else
			t->item[kept++] = t->item[i];
	t->cnt = kept;
}

static void texts_free(struct texts *t)
{
	for (uint32_t i = 0; i < t->cnt; i++)
		free(t->item[i]);
	free(t->item);
	*t = (struct texts){.cnt = 0};
}

/* ---- what the slices say ---- */

struct gather {
	struct kvp_cluster *c;
	enum kvp_slice_family family;
	struct texts members, sources;
};

static void add_address(void *ctx, const char *address, int is_source)
{
	struct gather *g = ctx;
	const struct kvp_config *cfg = g->c->config;
	const char *left = g->family == KVP_SLICE_V6 ? "[" : "",
		   *right = g->family == KVP_SLICE_V6 ? "]" : "";
	char text[128];
	int n = snprintf(
		text, sizeof(text), "tcp://%s%s%s:%u", left, address, right, (unsigned)cfg->eff.sync_port);
	texts_add(&g->members, text, (size_t)n);
	if (!is_source || !cfg->eff.dump_port)
		return;
	n = snprintf(
		text, sizeof(text), "http://%s%s%s:%u", left, address, right, (unsigned)cfg->eff.dump_port);
	texts_add(&g->sources, text, (size_t)n);
}

static void add_slice(void *ctx, const char *name, struct kvp_kube_bytes slice)
{
	struct gather *g = ctx;
	(void)name;
	kvp_slice_each(slice, g->family, g->c->config->pod_ip, add_address, g);
}

/* ---- the tables ---- */

static void list_row(void *ctx, const char *text, uint32_t len)
{
	texts_add(ctx, text, len);
}

/* Rows that the configuration made stay whatever a Service says. */
static int is_configured(const char *list, const char *text)
{
	char member[1100];
	size_t pos = 0;
	while (kvp_config_list_next(list, &pos, member, sizeof(member)))
		if (strcmp(member, text) == 0)
			return 1;
	return 0;
}

/* make_equal adds what is wanted and drops what was ours and no longer is. had: what this process, or one
 * before it, had put there. Returns the number of changes. */
static uint32_t make_equal(
	struct kvp_cluster *c, struct kvp_peers *table, const struct texts *want, struct texts *had)
{
	uint32_t changes = 0;
	for (uint32_t i = 0; i < want->cnt; i++) {
		int rc = kvp_peers_add(
			table, c->cfg.boot->owner, want->item[i], (uint32_t)strlen(want->item[i]));
		changes += rc == KVP_OK;
		if (rc != KVP_OK && rc != KVP_ERR_EXISTS)
			kvp_ctr_add(c->cfg.boot->ctr, KVP_CTR_KUBE_PEERS_FULL, 1);
	}
	for (uint32_t i = 0; i < had->cnt; i++)
		if (!texts_has(want, had->item[i]) &&
			!is_configured(c->config->replica_sync_peers, had->item[i]))
			changes +=
				kvp_peers_drop(table, had->item[i], (uint32_t)strlen(had->item[i])) == KVP_OK;
	return changes;
}

/* Slices give addresses, never names: a row with a name is somebody else's. */
static int is_address(const char *text, size_t len)
{
	char host[INET6_ADDRSTRLEN];
	unsigned char a[16];
	int bracket = len > 2 && text[0] == '[' && text[len - 1] == ']';
	len -= 2 * (size_t)bracket;
	if (len >= sizeof(host))
		return 0;
	memcpy(host, text + bracket, len);
	host[len] = 0;
	return inet_pton(bracket ? AF_INET6 : AF_INET, host, a) == 1;
}

/* What a process before this one had put into a table: rows of the form that the slices give. */
static void adopt(struct kvp_peers *table, const char *scheme, uint32_t port, struct texts *had)
{
	struct texts all = {.cnt = 0};
	char end[16];
	snprintf(end, sizeof(end), ":%u", port);
	if (kvp_peers_list(table, list_row, &all) == KVP_OK)
		for (uint32_t i = 0; i < all.cnt; i++) {
			size_t n = strlen(all.item[i]), e = strlen(end), s = strlen(scheme);
			if (strncmp(all.item[i], scheme, s) == 0 && n > e + s &&
				strcmp(all.item[i] + n - e, end) == 0 &&
				is_address(all.item[i] + s, n - e - s))
				texts_add(had, all.item[i], n);
		}
	texts_free(&all);
}

static void wake_peer(struct kvp_cluster *c)
{
	uint32_t slot;
	if (kvp_slot_find(c->cfg.boot->slots, KVP_ROLE_PEER, 0, &slot) == KVP_OK)
		kvp_wake(c->cfg.boot, slot);
}

static void reconcile(struct kvp_cluster *c)
{
	static struct texts members, sources; /* of the last time; one cluster a process */
	struct kvp_region *r = c->cfg.boot->region;
	struct gather g = {.c = c, .family = strchr(c->config->pod_ip, ':') ? KVP_SLICE_V6 : KVP_SLICE_V4};
	kvp_kube_each(c->peers.ref, add_slice, &g);
	if (!c->peers.adopted) {
		adopt(&r->peers, "tcp://", c->config->eff.sync_port, &members);
		adopt(&r->sources, "http://", c->config->eff.dump_port, &sources);
		c->peers.adopted = 1;
	}
	texts_sort(&g.members);
	texts_sort(&g.sources);
	if (g.members.rc || g.sources.rc) { /* no memory: a part of them is not what the slices say */
		texts_free(&g.members);
		texts_free(&g.sources);
		return;
	}
	uint32_t n = make_equal(c, &r->peers, &g.members, &members);
	n += make_equal(c, &r->sources, &g.sources, &sources);
	texts_free(&members);
	texts_free(&sources);
	members = g.members;
	sources = g.sources;
	kvp_ctr_set(c->cfg.boot->ctr, KVP_CTR_KUBE_PEERS, members.cnt);
	kvp_ctr_set(c->cfg.boot->ctr, KVP_CTR_KUBE_SOURCES, sources.cnt);
	if (n)
		KVP_LOG_I("discovery.peers", "members=%u sources=%u", members.cnt, sources.cnt);
	if (!kvp_gate_is_open(&r->gates, KVP_GATE_PEERS))
		kvp_gate_open(&r->gates, KVP_GATE_PEERS);
	wake_peer(c);
}

/* ---- watching ---- */

static int digest_slice(void *ctx, int which, struct kvp_json_val obj, struct kvp_kube_buf *out)
{
	(void)ctx;
	(void)which;
	return kvp_slice_digest(obj, out);
}

static void on_slice(void *ctx, const char *name, struct kvp_kube_bytes was, struct kvp_kube_bytes is)
{
	struct kvp_cluster *c = ctx;
	(void)name;
	(void)was;
	(void)is;
	if (!kvp_kube_is_listing(c->peers.ref))
		reconcile(c);
}

static void on_synced(void *ctx)
{
	reconcile(ctx);
}

static int watch(struct kvp_cluster *c)
{
	char path[CLUSTER_NAME_MAX], query[CLUSTER_NAME_MAX];
	snprintf(path, sizeof(path), "/apis/discovery.k8s.io/v1/namespaces/%s/endpointslices",
		c->config->pod_namespace);
	snprintf(query, sizeof(query), "labelSelector=kubernetes.io%%2Fservice-name%%3D%s",
		c->config->epp_peer_service);
	struct kvp_kube_reflector_cfg rc = {.path = {path, NULL},
		.query = query,
		.digest = digest_slice,
		.on_change = on_slice,
		.on_synced = on_synced,
		.ctx = c};
	return kvp_kube_reflect(c->kube, &rc, &c->peers.ref);
}

static void ask(void *ctx, struct kvp_timer *t);

static void ask_again(struct kvp_cluster *c)
{
	kvp_timer_set(c->cfg.loop, &c->peers.timer, kvp_clock_mono_ns() + CLUSTER_SERVICE_RETRY_NS, ask, c);
}

/* The Service has to be there when a node starts: without it every replica would stay alone and not know
 * it. */
static void on_service(void *ctx, struct kvp_kube_get *get, long status, const char *text, size_t len)
{
	struct kvp_cluster *c = ctx;
	(void)get;
	if (status == 200 && watch(c) == KVP_OK)
		return;
	if (status == 404 && !kvp_gate_is_open(&c->cfg.boot->region->gates, KVP_GATE_PEERS)) {
		KVP_LOG_E("discovery.peers", "DYN_EPP_PEER_SERVICE=%s POD_NAMESPACE=%s reason=%.*s",
			c->config->epp_peer_service, c->config->pod_namespace, (int)len, text);
		c->cfg.on_fatal(c->cfg.ctx, KVP_EXIT_CONFIG);
		return;
	}
	ask_again(c);
}

static void ask(void *ctx, struct kvp_timer *t)
{
	struct kvp_cluster *c = ctx;
	(void)t;
	if (kvp_kube_get(c->kube, &c->peers.get, c->peers.service_path, on_service, c))
		ask_again(c);
}

int cluster_peers_open(struct kvp_cluster *c)
{
	c->peers.c = c;
	snprintf(c->peers.service_path, sizeof(c->peers.service_path), "/api/v1/namespaces/%s/services/%s",
		c->config->pod_namespace, c->config->epp_peer_service);
	return kvp_timer_set(c->cfg.loop, &c->peers.timer, 0, ask, c);
}

void cluster_peers_close(struct kvp_cluster *c)
{
	kvp_timer_cancel(c->cfg.loop, &c->peers.timer);
	kvp_kube_get_end(&c->peers.get);
	kvp_kube_reflector_close(c->peers.ref);
}
