#include "ipc/zmq_mesh.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <zmq.h>

#include "ipc/zmq_monitor.h"
#include "ipc/zmq_sub.h"

#define BURST 16 /* messages of one peer before the next has its turn */

struct peer {
	struct kvp_zmq_mesh *mesh;
	void *sub; /* NULL: none was to be had, tend tries again */
	struct kvp_zmq_monitor monitor;
	struct kvp_watch watch;
	int is_ready; /* may have something to read; its watch says when it has, if there is a loop */
	char endpoint[];
};

struct kvp_zmq_mesh {
	struct kvp_zmq_mesh_cfg cfg;
	void *pub;
	struct kvp_loop *loop;
	struct kvp_watch pub_watch;
	struct peer **peer;
	uint32_t cnt, cap, at; /* at: whose turn it is */
	uint16_t port;
	struct kvp_zmq_mesh_stat stat;
};

static int set_int(void *sock, int opt, int v)
{
	return zmq_setsockopt(sock, opt, &v, sizeof(v));
}

static void *open_socket(const struct kvp_zmq_mesh *m, int type)
{
	void *sock = zmq_socket(m->cfg.zmq, type);
	if (!sock)
		return NULL;
	int64_t msg_max = KVP_ZMQ_MSG_MAX_BYTES;
	if (2ll * m->cfg.payload_max > msg_max)
		msg_max = 2ll * m->cfg.payload_max;
	int bad = set_int(sock, ZMQ_LINGER, 0) || set_int(sock, ZMQ_RECONNECT_IVL, 100) ||
		  set_int(sock, ZMQ_RECONNECT_IVL_MAX, 5000) || set_int(sock, ZMQ_TCP_KEEPALIVE, 1) ||
		  set_int(sock, ZMQ_HEARTBEAT_IVL, 5000) || set_int(sock, ZMQ_HEARTBEAT_TIMEOUT, 15000) ||
		  set_int(sock, ZMQ_HEARTBEAT_TTL, 15000) ||
		  set_int(sock, type == ZMQ_PUB ? ZMQ_SNDTIMEO : ZMQ_RCVTIMEO, type == ZMQ_PUB ? 0 : 100) ||
		  zmq_setsockopt(sock, ZMQ_MAXMSGSIZE, &msg_max, sizeof(msg_max));
	for (unsigned t = 0; !bad && type == ZMQ_SUB && t < KVP_REPLICA_TOPIC_CNT; t++) {
		struct kvp_str s = kvp_replica_topic_text((enum kvp_replica_topic)t);
		if (m->cfg.topics & 1u << t)
			bad = zmq_setsockopt(sock, ZMQ_SUBSCRIBE, s.ptr, s.len);
	}
	if (!bad)
		return sock;
	int e = errno;
	zmq_close(sock);
	errno = e;
	return NULL;
}

static void peer_close(struct peer *p)
{
	kvp_loop_unwatch(&p->watch);
	kvp_zmq_monitor_close(&p->monitor);
	if (p->sub)
		zmq_close(p->sub);
	p->sub = NULL;
}

static int is_wildcard(const char *ip)
{
	return !ip || !ip[0] || !strcmp(ip, "*") || !strcmp(ip, "0.0.0.0") || !strcmp(ip, "::");
}

/* A host without IPv6 has no dual-stack socket to bind. */
static int bind_pub(struct kvp_zmq_mesh *m)
{
	char text[96];
	const char *ip = m->cfg.ip;
	if (is_wildcard(ip))
		snprintf(text, sizeof(text), "tcp://*:%u", m->cfg.port);
	else
		snprintf(text, sizeof(text), strchr(ip, ':') ? "tcp://[%s]:%u" : "tcp://%s:%u", ip,
			m->cfg.port);
	if (set_int(m->pub, ZMQ_IPV6, 1))
		return -1;
	if (zmq_bind(m->pub, text) == 0)
		return 0;
	if (errno != EAFNOSUPPORT && errno != EADDRNOTAVAIL)
		return -1;
	return set_int(m->pub, ZMQ_IPV6, 0) || zmq_bind(m->pub, text);
}

static void read_port(struct kvp_zmq_mesh *m)
{
	char text[128] = "";
	size_t len = sizeof(text);
	m->port = m->cfg.port;
	if (m->port || zmq_getsockopt(m->pub, ZMQ_LAST_ENDPOINT, text, &len))
		return;
	const char *colon = strrchr(text, ':');
	m->port = colon ? (uint16_t)strtoul(colon + 1, NULL, 10) : 0;
}

int kvp_zmq_mesh_open(const struct kvp_zmq_mesh_cfg *cfg, struct kvp_zmq_mesh **out)
{
	struct kvp_zmq_mesh *m = calloc(1, sizeof(*m));
	if (!m)
		return KVP_ERR_SYS;
	m->cfg = *cfg;
	m->pub = open_socket(m, ZMQ_PUB);
	if (!m->pub || bind_pub(m)) {
		int e = errno;
		kvp_zmq_mesh_close(m);
		errno = e;
		return KVP_ERR_SYS;
	}
	read_port(m);
	*out = m;
	return KVP_OK;
}

void kvp_zmq_mesh_close(struct kvp_zmq_mesh *m)
{
	if (!m)
		return;
	kvp_loop_unwatch(&m->pub_watch);
	while (m->cnt) {
		peer_close(m->peer[--m->cnt]);
		free(m->peer[m->cnt]);
	}
	free(m->peer);
	if (m->pub)
		zmq_close(m->pub);
	free(m);
}

uint16_t kvp_zmq_mesh_port(const struct kvp_zmq_mesh *m)
{
	return m->port;
}

/* ---- the loop ---- */

/* ZMQ's descriptor says by edges that its socket has got something to do; asking for the events does the
 * internal part of it. Subscriptions of peers are such a part, so the publishing socket is asked, too. */
static void on_pub(void *ctx, int fd)
{
	struct kvp_zmq_mesh *m = ctx;
	int events;
	size_t len = sizeof(events);
	(void)fd;
	zmq_getsockopt(m->pub, ZMQ_EVENTS, &events, &len);
}

/* The turn that this begins ends with kvp_zmq_mesh_work, which reads until nothing is there: only then has
 * the descriptor been emptied. */
static void on_sub(void *ctx, int fd)
{
	struct peer *p = ctx;
	(void)fd;
	p->is_ready = 1;
}

static int watch(struct kvp_zmq_mesh *m, void *sock, struct kvp_watch *w, void (*cb)(void *, int), void *ctx)
{
	int fd;
	size_t len = sizeof(fd);
	if (!sock || !m->loop || w->loop)
		return KVP_OK;
	if (zmq_getsockopt(sock, ZMQ_FD, &fd, &len))
		return KVP_ERR_SYS;
	return kvp_loop_watch_fd(m->loop, w, fd, cb, ctx);
}

int kvp_zmq_mesh_watch(struct kvp_zmq_mesh *m, struct kvp_loop *l)
{
	m->loop = l;
	int rc = watch(m, m->pub, &m->pub_watch, on_pub, m);
	on_pub(m, -1); /* what came before */
	for (uint32_t i = 0; !rc && i < m->cnt; i++)
		rc = watch(m, m->peer[i]->sub, &m->peer[i]->watch, on_sub, m->peer[i]);
	return rc;
}

/* ---- peers ---- */

static uint32_t find(const struct kvp_zmq_mesh *m, const char *endpoint)
{
	uint32_t i = 0;
	while (i < m->cnt && strcmp(m->peer[i]->endpoint, endpoint) != 0)
		i++;
	return i;
}

static int room(struct kvp_zmq_mesh *m)
{
	if (m->cnt < m->cap)
		return KVP_OK;
	uint32_t cap = m->cap ? 2 * m->cap : 8;
	struct peer **p = realloc(m->peer, cap * sizeof(*p));
	if (!p)
		return KVP_ERR_SYS;
	m->peer = p;
	m->cap = cap;
	return KVP_OK;
}

/* KVP_ERR_SYS; KVP_ERR_INVAL: the library does not take the endpoint. */
static int peer_open(struct peer *p)
{
	struct kvp_zmq_mesh *m = p->mesh;
	int rc = KVP_ERR_SYS;
	p->sub = open_socket(m, ZMQ_SUB);
	if (p->sub && set_int(p->sub, ZMQ_IPV6, !strncmp(p->endpoint, "tcp://[", 7)) == 0) {
		kvp_zmq_monitor_open(&p->monitor, m->cfg.zmq, p->sub);
		rc = zmq_connect(p->sub, p->endpoint) ? KVP_ERR_INVAL : KVP_OK;
	}
	rc = rc ? rc : watch(m, p->sub, &p->watch, on_sub, p);
	if (rc)
		peer_close(p);
	p->is_ready = !rc;
	return rc;
}

int kvp_zmq_mesh_connect(struct kvp_zmq_mesh *m, const char *endpoint)
{
	if (find(m, endpoint) < m->cnt)
		return KVP_ERR_EXISTS;
	size_t len = strlen(endpoint) + 1;
	struct peer *p = room(m) ? NULL : calloc(1, sizeof(*p) + len);
	if (!p)
		return KVP_ERR_SYS;
	p->mesh = m;
	memcpy(p->endpoint, endpoint, len);
	int rc = peer_open(p);
	if (rc)
		free(p);
	else
		m->peer[m->cnt++] = p;
	return rc;
}

int kvp_zmq_mesh_disconnect(struct kvp_zmq_mesh *m, const char *endpoint)
{
	uint32_t i = find(m, endpoint);
	if (i == m->cnt)
		return KVP_ERR_NOTFOUND;
	peer_close(m->peer[i]); /* what its pipe still holds is dropped */
	free(m->peer[i]);
	m->peer[i] = m->peer[--m->cnt];
	return KVP_OK;
}

void kvp_zmq_mesh_tend(struct kvp_zmq_mesh *m)
{
	for (uint32_t i = 0; i < m->cnt; i++) {
		struct peer *p = m->peer[i];
		kvp_zmq_monitor_read(&p->monitor);
		int gave_up = kvp_zmq_monitor_gave_up(&p->monitor);
		if (p->sub && !gave_up)
			continue;
		m->stat.given_up += (uint64_t)gave_up;
		peer_close(p);
		peer_open(p);
	}
}

uint32_t kvp_zmq_mesh_cnt(const struct kvp_zmq_mesh *m)
{
	return m->cnt;
}

const char *kvp_zmq_mesh_endpoint(const struct kvp_zmq_mesh *m, uint32_t i)
{
	return m->peer[i]->endpoint;
}

/* ---- messages ---- */

int kvp_zmq_mesh_send(struct kvp_zmq_mesh *m, enum kvp_replica_topic t, const void *payload, size_t len)
{
	struct kvp_str topic = kvp_replica_topic_text(t);
	if (zmq_send(m->pub, topic.ptr, topic.len, ZMQ_SNDMORE | ZMQ_DONTWAIT) < 0 ||
		zmq_send(m->pub, payload, len, ZMQ_DONTWAIT) < 0) {
		m->stat.unsent++;
		return KVP_ERR_SYS;
	}
	m->stat.sent++;
	return KVP_OK;
}

/* One whole message into the first two frames; later ones are read and dropped. 0 = there is none. */
static uint32_t take(struct peer *p, zmq_msg_t frame[2])
{
	zmq_msg_t rest;
	uint32_t n = 0;
	int more = 1;
	for (; more; n++) {
		zmq_msg_t *at = n < 2 ? &frame[n] : &rest;
		if (n >= 2)
			zmq_msg_init(&rest);
		if (zmq_msg_recv(at, p->sub, ZMQ_DONTWAIT) < 0)
			return n ? UINT32_MAX : 0; /* parts come together, but for the end of the context */
		more = zmq_msg_more(at);
		if (n >= 2)
			zmq_msg_close(&rest);
	}
	return n;
}

static int topic_of(zmq_msg_t *frame, enum kvp_replica_topic *t)
{
	return kvp_replica_topic_of(zmq_msg_data(frame), zmq_msg_size(frame), t);
}

enum heard { HEARD_NOTHING, HEARD_ONE, HEARD_ENOUGH };

static enum heard hear(struct kvp_zmq_mesh *m, struct peer *p)
{
	zmq_msg_t frame[2];
	enum kvp_replica_topic t;
	int is_full = 0;
	zmq_msg_init(&frame[0]);
	zmq_msg_init(&frame[1]);
	uint32_t n = take(p, frame);
	if (n == 2 && topic_of(&frame[0], &t) == KVP_OK) {
		m->stat.received++;
		is_full = m->cfg.on_message(m->cfg.ctx, t, zmq_msg_data(&frame[1]), zmq_msg_size(&frame[1]));
	} else if (n) {
		m->stat.bad_frames++;
	}
	zmq_msg_close(&frame[0]);
	zmq_msg_close(&frame[1]);
	return !n ? HEARD_NOTHING : is_full ? HEARD_ENOUGH : HEARD_ONE;
}

/* Up to max messages of one peer, their number to *cnt. Without a loop nobody says who is ready. */
static enum heard hear_out(struct kvp_zmq_mesh *m, struct peer *p, uint32_t max, uint32_t *cnt)
{
	enum heard got = HEARD_ONE;
	if (!p->sub || (m->loop && !p->is_ready))
		return HEARD_NOTHING;
	for (*cnt = 0; *cnt < max && got == HEARD_ONE; *cnt += got != HEARD_NOTHING)
		got = hear(m, p);
	p->is_ready = got != HEARD_NOTHING;
	return got;
}

int kvp_zmq_mesh_work(struct kvp_zmq_mesh *m, uint32_t max)
{
	uint32_t silent = 0; /* peers in a row that have nothing */
	while (max && silent < m->cnt) {
		uint32_t cnt = 0, at = m->at < m->cnt ? m->at : 0;
		enum heard got = hear_out(m, m->peer[at], max < BURST ? max : BURST, &cnt);
		m->at = at + 1;
		max -= cnt;
		silent = got == HEARD_NOTHING ? silent + 1 : 0;
		if (got == HEARD_ENOUGH)
			return 1;
	}
	return silent < m->cnt;
}

const struct kvp_zmq_mesh_stat *kvp_zmq_mesh_stat(const struct kvp_zmq_mesh *m)
{
	return &m->stat;
}
