/* t_peer_members — the meshes follow the table of peers, each role at its own port. */
#include "daemons/peer/peer.h"
#include "tests/tap.h"

#include <stdlib.h>
#include <string.h>
#include <zmq.h>

static struct kvp_geom geom = {.region_gen = 1};
static struct kvp_peers table;
static struct kvp_peer peer;
static struct kvp_ctr_column_shm *column;

static int on_message(void *ctx, enum kvp_replica_topic t, const void *payload, size_t len)
{
	(void)ctx;
	(void)t;
	(void)payload;
	(void)len;
	return 0;
}

static void add_mesh(enum kvp_part_role role, uint16_t peer_port)
{
	struct kvp_peer_mesh *m = &peer.mesh[peer.mesh_cnt++];
	struct kvp_zmq_mesh_cfg cfg = {.zmq = peer.zmq, .ip = "127.0.0.1", .on_message = on_message};
	*m = (struct kvp_peer_mesh){
		.peer = &peer, .role = role, .peers = &table, .peer_port = peer_port, .seen = UINT64_MAX};
	if (kvp_zmq_mesh_open(&cfg, &m->zmq))
		exit(printf("Bail out! no mesh\n"));
}

static int hears(uint32_t mesh, const char *endpoint)
{
	struct kvp_zmq_mesh *z = peer.mesh[mesh].zmq;
	for (uint32_t i = 0; i < kvp_zmq_mesh_cnt(z); i++)
		if (strcmp(kvp_zmq_mesh_endpoint(z, i), endpoint) == 0)
			return 1;
	return 0;
}

static void list(const char *endpoint)
{
	kvp_peers_add(&table, 0x101, endpoint, (uint32_t)strlen(endpoint));
	kvp_peer_members(&peer);
}

int main(void)
{
	void *mem = aligned_alloc(4096, kvp_peers_footprint(&geom));
	memset(mem, 0, kvp_peers_footprint(&geom));
	column = aligned_alloc(4096, sizeof(*column));
	memset(column, 0, sizeof(*column));
	if (kvp_peers_new(mem, &geom) || kvp_peers_join(mem, &geom, &table))
		exit(printf("Bail out! no table\n"));
	peer.boot.ctr = column;
	peer.zmq = zmq_ctx_new();
	add_mesh(KVP_PART_AGGREGATED, 0);
	add_mesh(KVP_PART_PREFILL, 9094);
	add_mesh(KVP_PART_DECODE, 9095);
	ok(kvp_peer_mesh_of(&peer, KVP_PART_DECODE) == &peer.mesh[2], "the mesh of a role");
	list("tcp://127.0.0.1:9092");
	is_u64(kvp_zmq_mesh_cnt(peer.mesh[0].zmq), 0, "nobody is heard before it is time");
	kvp_peer_listen(&peer);
	ok(hears(0, "tcp://127.0.0.1:9092"), "then as listed");
	ok(hears(1, "tcp://127.0.0.1:9094") && hears(2, "tcp://127.0.0.1:9095"), "other roles at their own");
	list("tcp://[::1]:9092");
	ok(hears(0, "tcp://[::1]:9092") && hears(1, "tcp://[::1]:9094"), "by IPv6, too");
	list("ipc:///nowhere/kvpick-test");
	ok(hears(0, "ipc:///nowhere/kvpick-test"), "other transports");
	ok(kvp_zmq_mesh_cnt(peer.mesh[1].zmq) == 2, "have no ports of roles");
	is_u64(column->val[KVP_CTR_PEER_PEERS], 7, "all are counted");
	list("tcp://*:9092");
	is_u64(column->val[KVP_CTR_PEER_CONNECT_FAILED], 3, "who cannot be connected to is counted");
	kvp_peers_drop(&table, "tcp://127.0.0.1:9092", 20);
	kvp_peer_members(&peer);
	ok(!hears(0, "tcp://127.0.0.1:9092") && !hears(1, "tcp://127.0.0.1:9094"), "who leaves, leaves all");
	ok(hears(0, "tcp://[::1]:9092") && hears(2, "tcp://[::1]:9095"), "the others stay");
	for (uint32_t i = 0; i < peer.mesh_cnt; i++)
		kvp_zmq_mesh_close(peer.mesh[i].zmq);
	zmq_ctx_term(peer.zmq);
	free(mem);
	free(column);
	return done();
}
