/* Whom this node listens to: the table of peers in the region, followed by its version. */
#include "daemons/peer/peer.h"
#include "daemons/common/log.h"

#include <string.h>

struct kvp_peer_mesh *kvp_peer_mesh_of(struct kvp_peer *p, enum kvp_part_role role)
{
	for (uint32_t i = 0; i < p->mesh_cnt; i++)
		if (p->mesh[i].role == role)
			return &p->mesh[i];
	return NULL;
}

struct wanted {
	struct kvp_peer *peer;
	struct kvp_peer_mesh *mesh;
};

static void connect_one(void *ctx, const char *text, uint32_t len)
{
	struct wanted *w = ctx;
	char endpoint[KVP_PEERS_TEXT_MAX + 1];
	memcpy(endpoint, text, len);
	endpoint[len] = 0;
	int rc = kvp_zmq_mesh_connect(w->mesh->zmq, endpoint);
	if (rc == KVP_OK) {
		KVP_LOG_I("peer.connect", "endpoint=%s", endpoint);
	} else if (rc != KVP_ERR_EXISTS) {
		kvp_ctr_add(w->peer->boot.ctr, KVP_CTR_PEER_CONNECT_FAILED, 1);
		KVP_LOG_W("peer.connect_failed", "endpoint=%s error=%s", endpoint, kvp_strerror(rc));
	}
}

static int is_listed(const struct kvp_peers *t, const char *endpoint)
{
	char text[KVP_PEERS_TEXT_MAX + 1];
	uint32_t len;
	for (uint32_t i = 0; i < KVP_PEERS_MAX; i++)
		if (kvp_peers_get(t, i, text, &len) == KVP_OK && strcmp(text, endpoint) == 0)
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
		if (is_listed(m->peers, endpoint))
			continue;
		KVP_LOG_I("peer.disconnect", "endpoint=%s", endpoint);
		kvp_zmq_mesh_disconnect(m->zmq, endpoint);
	}
	if (kvp_peers_list(m->peers, connect_one, &w) == KVP_OK)
		m->seen = version; /* what has changed since then makes another version */
	kvp_ctr_set(p->boot.ctr, KVP_CTR_PEER_PEERS, kvp_zmq_mesh_cnt(m->zmq));
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
