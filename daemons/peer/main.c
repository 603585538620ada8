#include "daemons/peer/peer.h"

#include <errno.h>
#include <inttypes.h>
#include <signal.h>
#include <string.h>
#include <sys/random.h>
#include <sys/signalfd.h>
#include <unistd.h>
#include <zmq.h>

#define LOST_LOG_NS 5000000000ull

static void lifecycle(struct kvp_peer *p, enum kvp_part_role role, const void *payload, size_t len)
{
	struct kvp_replica_event e;
	int rc = kvp_replica_decode_event(&p->dec, payload, len, &e);
	if (rc == KVP_ERR_LIMIT)
		kvp_ctr_add(p->boot.ctr, KVP_CTR_PEER_OVERSIZE, 1);
	else if (rc)
		kvp_ctr_add(p->boot.ctr, KVP_CTR_PEER_MALFORMED, 1);
	else
		kvp_mirror_apply(&p->mirror, role, &e, p->now_ns);
}

static void binding(struct kvp_peer *p, enum kvp_part_role role, const void *payload, size_t len)
{
	struct kvp_replica_binding b;
	if (kvp_replica_decode_binding(&p->dec, payload, len, &b))
		kvp_ctr_add(p->boot.ctr, KVP_CTR_PEER_MALFORMED, 1);
	else
		kvp_bindings_apply(&p->bindings, role, &b, p->now_ns);
}

/* A message of a peer. Nonzero ends the turn: enough events, enough time, or somebody may have been taken
 * from the table of peers, who must not be heard any more. */
static int on_message(void *ctx, enum kvp_replica_topic t, const void *payload, size_t len)
{
	struct kvp_peer_mesh *m = ctx;
	struct kvp_peer *p = m->peer;
	if (t == KVP_REPLICA_LIFECYCLE)
		lifecycle(p, m->role, payload, len);
	else
		binding(p, m->role, payload, len);
	p->now_ns = kvp_clock_mono_ns();
	return !--p->left || p->now_ns >= p->until_ns || kvp_peers_version(m->peers) != m->seen;
}

static void on_again(void *ctx, struct kvp_timer *t)
{
	(void)ctx;
	(void)t; /* the turn that this begins looks at the ring */
}

/* publish tells the peers what happened here, a batch of it; 1 = there is more. */
static int publish(struct kvp_peer *p)
{
	struct kvp_sync_msg msg;
	for (uint32_t i = 0; i < KVP_PEER_BATCH; i++) {
		int rc = kvp_sync_next(&p->sync, p->now_ns, &msg);
		if (rc == KVP_ERR_AGAIN)
			kvp_timer_set(p->loop, &p->again, p->now_ns + KVP_PEER_AGAIN_MS * 1000000ull,
				on_again, p);
		if (rc == KVP_ERR_AGAIN || rc == KVP_ERR_NOTFOUND)
			return 0;
		struct kvp_peer_mesh *m = rc ? NULL : kvp_peer_mesh_of(p, msg.role);
		if (m)
			kvp_zmq_mesh_send(m->zmq, msg.topic, msg.payload, msg.len);
		else if (!rc)
			kvp_ctr_add(p->boot.ctr, KVP_CTR_PEER_TOLD_NO_MESH, 1);
		kvp_sync_done(&p->sync);
	}
	return 1;
}

/* before_sleep: one turn of work; nonzero = there is more. Whoever gives us work wakes us if it comes after
 * kvp_slot_sleep, and we see it if it comes before. */
static int turn(void *ctx)
{
	struct kvp_peer *p = ctx;
	p->now_ns = kvp_clock_mono_ns();
	uint32_t rest_ms = kvp_lifecycle_rest(&p->boot.region->lifecycle, p->now_ns);
	kvp_slot_sleep(p->boot.slots);
	kvp_peer_members(p);
	int more = publish(p);
	if (!more && rest_ms < KVP_SLEEP_MAX_MS) /* bookers do not wake us for the next ones */
		kvp_timer_set(p->loop, &p->again, p->now_ns + rest_ms * 1000000ull, on_again, p);
	p->left = KVP_PEER_BATCH;
	p->now_ns = kvp_clock_mono_ns();
	p->until_ns = p->now_ns + KVP_PEER_TURN_NS;
	for (uint32_t i = 0; i < p->mesh_cnt && p->left; i++)
		more |= kvp_zmq_mesh_work(p->mesh[i].zmq, p->left);
	kvp_mirror_flush(&p->mirror);
	more |= kvp_dump_port_poll(p->dump_port);
	more |= p->recovery && kvp_recovery_poll(p->recovery);
	return more;
}

static void on_wake(void *ctx, int fd)
{
	struct kvp_peer *p = ctx;
	(void)fd;
	kvp_slot_awake(p->boot.slots);
}

static void count(struct kvp_peer *p)
{
	struct kvp_ctr_column_shm *c = p->boot.ctr;
	for (uint32_t i = 0; i < p->mesh_cnt; i++) {
		struct kvp_peer_mesh *m = &p->mesh[i];
		struct kvp_zmq_mesh_stat now = *kvp_zmq_mesh_stat(m->zmq);
		kvp_ctr_add(c, KVP_CTR_PEER_RECEIVED, now.received - m->counted.received);
		kvp_ctr_add(c, KVP_CTR_PEER_BAD_FRAMES, now.bad_frames - m->counted.bad_frames);
		kvp_ctr_add(c, KVP_CTR_PEER_SENT, now.sent - m->counted.sent);
		kvp_ctr_add(c, KVP_CTR_PEER_UNSENT, now.unsent - m->counted.unsent);
		kvp_ctr_add(c, KVP_CTR_PEER_GIVEN_UP, now.given_up - m->counted.given_up);
		m->counted = now;
	}
}

/* The places where events are lost are in other processes, which write no line for each. */
static void tell_lost(struct kvp_peer *p, uint64_t now_ns)
{
	uint64_t lost = kvp_ctr_sum(&p->boot.region->counters, KVP_CTR_LIFECYCLE_DROPPED), left_out;
	if (lost == p->lost_seen || !kvp_log_limit_pass(&p->lost_log, now_ns, LOST_LOG_NS, &left_out))
		return;
	KVP_LOG_W("peer.queue_full", "why=%s dropped=%" PRIu64 " capacity=%" PRIu64,
		"the replica queue full of events: new ones are not told", lost - p->lost_seen,
		(uint64_t)p->boot.config->replica_queue);
	p->lost_seen = lost;
}

static void on_beat(void *ctx, struct kvp_timer *t)
{
	struct kvp_peer *p = ctx;
	struct kvp_loop_stat st;
	uint64_t now_ns = kvp_loop_now_ns(p->loop);
	kvp_slot_beat(p->boot.slots, p->boot.slot, now_ns / 1000000);
	kvp_loop_stat_take(p->loop, &st);
	kvp_ctr_max(p->boot.ctr, KVP_CTR_LOOP_MAX_NS, st.turn_max_ns);
	for (uint32_t i = 0; i < p->mesh_cnt; i++)
		kvp_zmq_mesh_tend(p->mesh[i].zmq);
	count(p);
	kvp_mirror_expire(&p->mirror, kvp_clock_mono_ns());
	tell_lost(p, now_ns);
	kvp_ctr_set(p->boot.ctr, KVP_CTR_LIFECYCLE_DEPTH, kvp_lifecycle_depth(&p->boot.region->lifecycle));
	kvp_timer_set(p->loop, t, now_ns + p->boot.config->slot_beat_ms * 1000000, on_beat, p);
}

static void on_end(void *ctx, struct kvp_timer *t)
{
	struct kvp_peer *p = ctx;
	(void)t;
	kvp_loop_stop(p->loop);
}

/* The other processes end in this moment, too: what they free last shall still reach the peers, and what was
 * published must have left the library. */
static void on_signal(void *ctx, int fd)
{
	struct kvp_peer *p = ctx;
	struct signalfd_siginfo si;
	if (read(fd, &si, sizeof(si)) != (ssize_t)sizeof(si) || p->draining)
		return;
	p->draining = 1;
	kvp_boot_control(&p->boot, KVP_CTL_DRAIN);
	kvp_timer_set(p->loop, &p->end, kvp_loop_now_ns(p->loop) + KVP_PEER_FLUSH_MS * 1000000ull, on_end, p);
}

static int open_signals(struct kvp_peer *p)
{
	sigset_t set;
	sigemptyset(&set);
	sigaddset(&set, SIGTERM);
	sigaddset(&set, SIGINT);
	sigprocmask(SIG_BLOCK, &set, NULL);
	p->signal_fd = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
	if (p->signal_fd < 0)
		return KVP_ERR_SYS;
	return kvp_loop_watch_fd(p->loop, &p->signals, p->signal_fd, on_signal, p);
}

static int open_mesh(struct kvp_peer *p, enum kvp_part_role role, uint64_t port, uint64_t peer_port)
{
	struct kvp_peer_mesh *m = &p->mesh[p->mesh_cnt];
	uint32_t affinity = p->boot.region->affinity.max ? 1u << KVP_REPLICA_AFFINITY : 0;
	struct kvp_zmq_mesh_cfg cfg = {.zmq = p->zmq,
		.port = (uint16_t)port,
		.topics = 1u << KVP_REPLICA_LIFECYCLE | affinity,
		.payload_max = p->dec.payload_max,
		.ctx = m,
		.on_message = on_message};
	if (!port)
		return KVP_OK;
	*m = (struct kvp_peer_mesh){.peer = p,
		.role = role,
		.peers = &p->boot.region->peers,
		.peer_port = (uint16_t)peer_port,
		.seen = UINT64_MAX};
	int rc = kvp_zmq_mesh_open(&cfg, &m->zmq);
	if (rc) {
		KVP_LOG_E("peer.listen", "port=%u error=%s errno=%s", cfg.port, kvp_strerror(rc),
			strerror(errno));
		return rc;
	}
	p->mesh_cnt++;
	return kvp_zmq_mesh_watch(m->zmq, p->loop);
}

/* Roles never meet in one mesh: a prefill and a decode booking of one request have the same name. */
static int open_meshes(struct kvp_peer *p)
{
	const struct kvp_config *c = p->boot.config;
	int is_split = c->eff.sync_port && c->eff.epp_on && c->eff.disaggregated;
	uint64_t prefill = is_split ? c->replica_sync_port_prefill : 0;
	uint64_t decode = is_split ? c->replica_sync_port_decode : 0;
	int rc = open_mesh(p, KVP_PART_AGGREGATED, c->eff.sync_port, 0);
	rc = rc ? rc : open_mesh(p, KVP_PART_PREFILL, prefill, prefill);
	return rc ? rc : open_mesh(p, KVP_PART_DECODE, decode, decode);
}

/* The index is recovered, or there is nothing to recover: the peers' load is listened to from now on. */
static void on_recovered(void *ctx)
{
	kvp_peer_listen(ctx);
}

static void on_fetched(void *ctx, const struct kvp_http_url *from, const char *host)
{
	struct kvp_peer *p = ctx;
	kvp_warm_fetch_ask(p->warm, from, host);
}

/* With room for every peer in every mesh. */
static void *open_zmq(void)
{
	const int most = KVP_PART_ROLE_CNT * (KVP_PEERS_MAX * KVP_ZMQ_MESH_SOCKETS + 1);
	void *zmq = zmq_ctx_new();
	if (zmq && zmq_ctx_set(zmq, ZMQ_MAX_SOCKETS, most)) {
		zmq_ctx_term(zmq);
		return NULL;
	}
	return zmq;
}

static int open_all(struct kvp_peer *p)
{
	struct kvp_region *r = p->boot.region;
	int rc = kvp_loop_open(&p->loop, 0);
	rc = rc ? rc : open_signals(p);
	rc = rc ? rc : kvp_loop_watch_fd(p->loop, &p->wake, p->boot.wake_fd, on_wake, p);
	if (rc)
		return rc;
	while (!p->router_id)
		if (getrandom(&p->router_id, sizeof(p->router_id), 0) != (ssize_t)sizeof(p->router_id))
			return KVP_ERR_SYS;
	kvp_boot_files(); /* each peer costs several */
	uint64_t most = p->boot.config->replica_max_payload_bytes;
	p->dec.payload_max = most < UINT32_MAX ? (uint32_t)most : UINT32_MAX;
	kvp_book_attach(&r->book, p->boot.owner, p->boot.ctr);
	kvp_queue_attach(&r->queue, p->boot.owner, p->boot.slots, p->boot.ctr);
	kvp_affinity_attach(&r->affinity, p->boot.owner, p->boot.ctr);
	rc = kvp_mirror_open(&p->mirror, r, p->boot.owner, p->boot.ctr, p->router_id);
	rc = rc ? rc : kvp_bindings_open(&p->bindings, r, p->boot.ctr, p->router_id, kvp_clock_real_ns());
	p->zmq = rc ? NULL : open_zmq();
	if (!p->zmq)
		return KVP_ERR_SYS;
	kvp_sync_open(&p->sync, r, p->boot.owner, p->boot.ctr, p->router_id,
		r->affinity.max ? &p->bindings : NULL);
	kvp_loop_before_sleep(p->loop, turn, p);
	rc = open_meshes(p);
	rc = rc ? rc : kvp_dump_port_open(&p->boot, p->loop, &p->dump_port);
	struct kvp_recovery_hooks hooks = {on_recovered, on_fetched, p};
	rc = rc ? rc : kvp_warm_fetch_open(&p->boot, p->loop, &p->mirror, &p->warm);
	return rc ? rc : kvp_recovery_open(&p->boot, p->loop, &hooks, &p->recovery);
}

static void close_all(struct kvp_peer *p)
{
	for (uint32_t i = 0; i < p->mesh_cnt; i++)
		kvp_zmq_mesh_close(p->mesh[i].zmq);
	kvp_recovery_close(p->recovery);
	kvp_warm_fetch_close(p->warm);
	kvp_dump_port_close(p->dump_port);
	kvp_loop_close(p->loop);
	if (p->zmq)
		zmq_ctx_term(p->zmq);
	kvp_sync_close(&p->sync);
	kvp_bindings_close(&p->bindings);
	kvp_mirror_close(&p->mirror);
	kvp_replica_dec_close(&p->dec);
}

/* A port that somebody has ends the node at its start. Later it is the port of the process before this one:
 * the kernel may close the sockets of a killed process some time after its end. */
static int exit_code(const struct kvp_peer *p, int e)
{
	int is_first = kvp_ld_rlx_u64(&p->boot.ctr->val[KVP_CTR_PROC_STARTED]) <= 1;
	return is_first && (e == EADDRINUSE || e == EADDRNOTAVAIL) ? KVP_EXIT_CONFIG : KVP_EXIT_AGAIN;
}

int main(int argc, char **argv)
{
	static struct kvp_peer p;
	int rc = kvp_boot_child(argc, argv, KVP_ROLE_PEER, &p.boot);
	if (rc)
		return kvp_boot_exit(rc);
	kvp_config_log_setup(p.boot.config, "peer", (int)p.boot.instance);
	rc = open_all(&p);
	if (rc) {
		int e = errno;
		KVP_LOG_E("peer.start", "error=%s errno=%s", kvp_strerror(rc), strerror(e));
		return exit_code(&p, e);
	}
	on_beat(&p, &p.beat);
	kvp_boot_control(&p.boot, KVP_CTL_RUN);
	KVP_LOG_I("peer.run", "port=%u router_id=%" PRIu64, p.mesh_cnt ? kvp_zmq_mesh_port(p.mesh[0].zmq) : 0,
		p.router_id);
	rc = kvp_loop_run(p.loop);
	count(&p);
	close_all(&p);
	return rc ? KVP_EXIT_AGAIN : KVP_EXIT_OK;
}
