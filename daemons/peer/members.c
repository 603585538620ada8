/* Whom this node listens to: the table of peers in the region, followed by its version. */
#include "daemons/peer/peer.h"
#include "daemons/common/log.h"

#include <stdio.h>
#include <string.h>

#define ENDPOINT_MAX (KVP_PEERS_TEXT_MAX + 8)

struct kvp_peer_mesh *kvp_peer_mesh_of(struct kvp_peer *p, enum kvp_part_role role)
{
	for (uint32_t i = 0; i < p->mesh_cnt; i++)
		if (p->mesh[i].role == role)
			return &p->mesh[i];
	return NULL;
}

/* endpoint_of is where a listed peer publishes the mesh's role: roles other than the aggregated one have a
 * port of their own on the same host. -1 = it can have none. */
static int endpoint_of(const struct kvp_peer_mesh *m, const char *text, uint32_t len, char *out, size_t cap)
{
	const char *colon = m->peer_port ? memrchr(text, ':', len) : NULL;
	int host = colon ? (int)(colon - text) : (int)len, n;
	if (!m->peer_port)
		n = snprintf(out, cap, "%.*s", host, text);
	else if (len > 6 && memcmp(text, "tcp://", 6) == 0 && host > 6)
		n = snprintf(out, cap, "%.*s:%u", host, text, m->peer_port);
	else
		return -1;
	return n > 0 && (size_t)n < cap ? 0 : -1;
}

struct wanted {
	struct kvp_peer *peer;
	struct kvp_peer_mesh *mesh;
};

static void connect_one(void *ctx, const char *text, uint32_t len)
{
	struct wanted *w = ctx;
	char endpoint[ENDPOINT_MAX];
	if (endpoint_of(w->mesh, text, len, endpoint, sizeof(endpoint)))
		return;
	int rc = kvp_zmq_mesh_connect(w->mesh->zmq, endpoint);
	if (rc == KVP_OK) {
		KVP_LOG_I("peer.connect", "endpoint=%s", endpoint);
	} else if (rc != KVP_ERR_EXISTS) {
		kvp_ctr_add(w->peer->boot.ctr, KVP_CTR_PEER_CONNECT_FAILED, 1);
		KVP_LOG_W("peer.connect_failed", "endpoint=%s error=%s", endpoint, kvp_strerror(rc));
	}
}

static int is_listed(const struct kvp_peer_mesh *m, const char *endpoint)
{
	char text[KVP_PEERS_TEXT_MAX + 1], of[ENDPOINT_MAX];
	uint32_t len;
	for (uint32_t i = 0; i < KVP_PEERS_MAX; i++)
		if (kvp_peers_get(m->peers, i, text, &len) == KVP_OK &&
			endpoint_of(m, text, len, of, sizeof(of)) == 0 && strcmp(of, endpoint) == 0)
			return 1;
	return 0;
}

static void follow(struct kvp_peer *p, struct kvp_peer_mesh *m)
{
	struct wanted w = {p, m};
	uint64_t version = kvp_peers_version(m->peers);
	if (version == m->seen)
		return;
	for (uint32_t i = kvp_zmq_mesh_cnt(m->zmq); i-- > 0;) {
		const char *endpoint = kvp_zmq_mesh_endpoint(m->zmq, i);
		if (is_listed(m, endpoint))
			continue;
		KVP_LOG_I("peer.disconnect", "endpoint=%s", endpoint);
		kvp_zmq_mesh_disconnect(m->zmq, endpoint);
	}
	if (kvp_peers_list(m->peers, connect_one, &w) == KVP_OK)
		m->seen = version; /* what has changed since then makes another version */
	uint64_t all = 0;
	for (uint32_t i = 0; i < p->mesh_cnt; i++)
		all += kvp_zmq_mesh_cnt(p->mesh[i].zmq);
	kvp_ctr_set(p->boot.ctr, KVP_CTR_PEER_PEERS, all);
}

void kvp_peer_members(struct kvp_peer *p)
{
	for (uint32_t i = 0; p->is_open && i < p->mesh_cnt; i++)
		follow(p, &p->mesh[i]);
}

void kvp_peer_listen(struct kvp_peer *p)
{
	p->is_open = 1;
	kvp_peer_members(p);
}
