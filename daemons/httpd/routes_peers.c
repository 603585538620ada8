/* Replica peers: the table in the region that the peer daemon follows (shm/peers.h). */
#include "daemons/httpd/httpd.h"

#include <stdio.h>
#include <string.h>

#include "ipc/zmq_sub.h"

enum change { REGISTER, DEREGISTER };

/* The peer daemon looks at the table when its version has changed. */
static void wake_peer(struct kvp_httpd *h)
{
	uint32_t slot;
	if (kvp_slot_find(h->boot.slots, KVP_ROLE_PEER, 0, &slot) == KVP_OK)
		kvp_wake(&h->boot, slot);
}

/* 0 = the endpoint of the body is in order, else the error has been answered. */
static int take_endpoint(struct kvp_call *c, const char **endpoint, size_t *len)
{
	char why[128], text[KVP_PEERS_TEXT_MAX + sizeof(why) + 64];
	struct kvp_json_val v;
	if (kvp_json_get(c->h->parse.root, "endpoint", &v) || kvp_json_str(v, endpoint, len)) {
		kvp_reply_error(c, 422, "endpoint is required and must be a string");
		return -1;
	}
	if (!c->h->boot.config->eff.sync_port) {
		kvp_reply_error(c, 409, "replica sync is disabled");
		return -1;
	}
	if (*len > KVP_PEERS_TEXT_MAX) {
		kvp_reply_error(c, 400, "endpoint must not exceed 1024 bytes");
		return -1;
	}
	int is_bad = strlen(*endpoint) != *len || kvp_zmq_endpoint_check(*endpoint, why, sizeof(why));
	if (!is_bad && strncmp(*endpoint, "tcp://*:", 8) != 0)
		return 0;
	if (!is_bad)
		snprintf(why, sizeof(why), "nobody can connect to a wildcard host");
	else if (strlen(*endpoint) != *len)
		snprintf(why, sizeof(why), "endpoint contains white space or control characters");
	snprintf(text, sizeof(text), "invalid ZMQ endpoint `%s`: %s", *endpoint, why);
	kvp_reply_error(c, 400, text);
	return -1;
}

static void change(struct kvp_call *c, enum change how)
{
	struct kvp_httpd *h = c->h;
	struct kvp_peers *peers = &h->boot.region->peers;
	const char *endpoint;
	size_t len;
	if (take_endpoint(c, &endpoint, &len))
		return;
	if (h->draining) {
		kvp_reply_error(c, 503, "replica peer manager is unavailable");
		return;
	}
	int rc = how == REGISTER ? kvp_peers_add(peers, h->boot.owner, endpoint, (uint32_t)len)
				 : kvp_peers_drop(peers, endpoint, (uint32_t)len);
	if (rc == KVP_OK)
		wake_peer(h);
	if (rc == KVP_ERR_NOTFOUND) {
		kvp_reply_error(c, 404, "peer not found");
	} else if (rc && rc != KVP_ERR_EXISTS) {
		kvp_reply_error(c, 503, "replica peer table is full");
	} else if (how == REGISTER && rc == KVP_OK) {
		static const char text[] = "{\"status\":\"ok\"}";
		kvp_http_reply(c->req, 201, "application/json", text, sizeof(text) - 1);
	} else {
		kvp_reply_ok(c);
	}
}

void kvp_route_peer_register(struct kvp_call *c)
{
	change(c, REGISTER);
}

void kvp_route_peer_deregister(struct kvp_call *c)
{
	change(c, DEREGISTER);
}

static void write_peer(void *ctx, const char *text, uint32_t len)
{
	kvp_jw_strn(ctx, text, len);
}

void kvp_peer_list(struct kvp_httpd *h)
{
	kvp_jw_arr(&h->out);
	if (h->boot.config->eff.sync_port && kvp_peers_list(&h->boot.region->peers, write_peer, &h->out))
		h->out.err = KVP_ERR_FULL;
	kvp_jw_end(&h->out);
}

void kvp_route_peer_list(struct kvp_call *c)
{
	kvp_jw_reset(&c->h->out);
	kvp_peer_list(c->h);
	kvp_reply_json(c, 200);
}
