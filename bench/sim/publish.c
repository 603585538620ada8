/* bench/sim/publish.c — see publish.h. */
#include "bench/sim/publish.h"
#include <msgpack.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <zmq.h>

#define HWM_MSG 100000
#define MEDIUM "GPU"

struct kept {
	uint64_t seq;
	char *payload;
	size_t len;
};

struct kvp_publish {
	struct kvp_publish_cfg cfg;
	void *pub, *router;
	struct kvp_watch watch; /* of the router */
	uint16_t event_port, replay_port;
	msgpack_sbuffer event; /* packed events of the batch being built */
	uint32_t event_cnt;
	uint64_t seq;	     /* of the next batch */
	struct kept *kept;   /* ring; batch s at s % kept_max */
	uint64_t kept_first; /* oldest kept; kept are [kept_first, seq) */
	uint64_t kept_bytes;
};

/* bind_socket makes a bound socket; *port is the real port afterwards. */
static void *bind_socket(void *ctx, int type, const char *ip, uint16_t *port)
{
	char at[128];
	size_t len = sizeof(at);
	int linger_ms = 0, hwm = type == ZMQ_PUB ? HWM_MSG : 0;
	void *s = zmq_socket(ctx, type);
	if (!s)
		return NULL;
	zmq_setsockopt(s, ZMQ_LINGER, &linger_ms, sizeof(linger_ms));
	zmq_setsockopt(s, ZMQ_SNDHWM, &hwm, sizeof(hwm));
	if (*port)
		snprintf(at, sizeof(at), "tcp://%s:%u", ip, *port);
	else
		snprintf(at, sizeof(at), "tcp://%s:*", ip);
	if (zmq_bind(s, at) || zmq_getsockopt(s, ZMQ_LAST_ENDPOINT, at, &len)) {
		zmq_close(s);
		return NULL;
	}
	const char *colon = strrchr(at, ':');
	*port = colon ? (uint16_t)strtoul(colon + 1, NULL, 10) : 0;
	return s;
}

static void seq_bytes(uint64_t seq, uint8_t out[8])
{
	for (int i = 0; i < 8; i++)
		out[i] = (uint8_t)(seq >> (56 - 8 * i));
}

/* send_reply sends one replay message: identity, "", [topic,] sequence number, payload. */
static void send_reply(struct kvp_publish *p, zmq_msg_t *peer, const char *topic, uint64_t seq,
	const char *payload, size_t len)
{
	uint8_t be[8];
	zmq_msg_t id;
	seq_bytes(seq, be);
	zmq_msg_init(&id);
	zmq_msg_copy(&id, peer);
	if (zmq_msg_send(&id, p->router, ZMQ_SNDMORE | ZMQ_DONTWAIT) < 0) {
		zmq_msg_close(&id); /* the peer is gone */
		return;
	}
	zmq_send(p->router, "", 0, ZMQ_SNDMORE | ZMQ_DONTWAIT);
	if (p->cfg.replay == KVP_PUBLISH_REPLAY_TOPIC)
		zmq_send(p->router, topic, strlen(topic), ZMQ_SNDMORE | ZMQ_DONTWAIT);
	zmq_send(p->router, be, sizeof(be), ZMQ_SNDMORE | ZMQ_DONTWAIT);
	zmq_send(p->router, payload, len, ZMQ_DONTWAIT);
}

static void serve_replay(struct kvp_publish *p, zmq_msg_t *peer, uint64_t start)
{
	for (uint64_t s = start > p->kept_first ? start : p->kept_first; s < p->seq; s++) {
		const struct kept *k = &p->kept[s % p->cfg.kept_max];
		send_reply(p, peer, p->cfg.topic, s, k->payload, k->len);
	}
	send_reply(p, peer, "", UINT64_MAX, "", 0);
}

/* take_request reads one whole message: 1 = served or ignored, 0 = none there. */
static int take_request(struct kvp_publish *p)
{
	zmq_msg_t frame[3];
	uint32_t cnt = 0;
	int more = 1;
	while (more) {
		zmq_msg_t m;
		zmq_msg_init(&m);
		if (zmq_msg_recv(&m, p->router, ZMQ_DONTWAIT) < 0) {
			zmq_msg_close(&m);
			break;
		}
		more = zmq_msg_more(&m);
		if (cnt < 3)
			frame[cnt] = m;
		else
			zmq_msg_close(&m);
		cnt++;
	}
	if (cnt == 3 && zmq_msg_size(&frame[1]) == 0 && zmq_msg_size(&frame[2]) == 8) {
		const uint8_t *be = zmq_msg_data(&frame[2]);
		uint64_t start = 0;
		for (int i = 0; i < 8; i++)
			start = start << 8 | be[i];
		serve_replay(p, &frame[0], start);
	}
	for (uint32_t i = 0; i < cnt && i < 3; i++)
		zmq_msg_close(&frame[i]);
	return cnt > 0;
}

static void on_router(void *ctx, int fd)
{
	struct kvp_publish *p = ctx;
	(void)fd;
	while (take_request(p))
		;
}

int kvp_publish_open(
	struct kvp_loop *l, void *ctx, const struct kvp_publish_cfg *cfg, struct kvp_publish **out)
{
	int fd = -1;
	size_t len = sizeof(fd);
	struct kvp_publish *p = calloc(1, sizeof(*p));
	if (!p)
		return KVP_ERR_SYS;
	p->cfg = *cfg;
	p->event_port = cfg->event_port;
	p->replay_port = cfg->replay_port;
	msgpack_sbuffer_init(&p->event);
	p->kept = calloc(cfg->kept_max, sizeof(*p->kept));
	p->pub = p->kept ? bind_socket(ctx, ZMQ_PUB, cfg->ip, &p->event_port) : NULL;
	p->router = p->pub ? bind_socket(ctx, ZMQ_ROUTER, cfg->ip, &p->replay_port) : NULL;
	if (!p->router || zmq_getsockopt(p->router, ZMQ_FD, &fd, &len) ||
		kvp_loop_watch_fd(l, &p->watch, fd, on_router, p)) {
		kvp_publish_close(p);
		return KVP_ERR_SYS;
	}
	on_router(p, fd); /* the descriptor only signals changes: start from a known state */
	*out = p;
	return KVP_OK;
}

void kvp_publish_close(struct kvp_publish *p)
{
	if (!p)
		return;
	kvp_loop_unwatch(&p->watch);
	if (p->router)
		zmq_close(p->router);
	if (p->pub)
		zmq_close(p->pub);
	for (uint64_t s = p->kept_first; s < p->seq; s++)
		free(p->kept[s % p->cfg.kept_max].payload);
	free(p->kept);
	msgpack_sbuffer_destroy(&p->event);
	free(p);
}

uint16_t kvp_publish_event_port(const struct kvp_publish *p)
{
	return p->event_port;
}

uint16_t kvp_publish_replay_port(const struct kvp_publish *p)
{
	return p->replay_port;
}

/* ---- packing ---- */

static void put_str(msgpack_packer *k, const char *s)
{
	msgpack_pack_str(k, strlen(s));
	msgpack_pack_str_body(k, s, strlen(s));
}

/* begin_event opens an event of n fields behind the tag; put_name names the next one in map form. */
static msgpack_packer begin_event(struct kvp_publish *p, const char *tag, uint32_t n)
{
	msgpack_packer k;
	msgpack_packer_init(&k, &p->event, msgpack_sbuffer_write);
	p->event_cnt++;
	if (p->cfg.form == KVP_PUBLISH_ARRAY) {
		msgpack_pack_array(&k, n + 1);
	} else {
		msgpack_pack_map(&k, n + 1);
		put_str(&k, "type");
	}
	put_str(&k, tag);
	return k;
}

static void put_name(struct kvp_publish *p, msgpack_packer *k, const char *name)
{
	if (p->cfg.form == KVP_PUBLISH_MAP)
		put_str(k, name);
}

static void put_hashes(struct kvp_publish *p, msgpack_packer *k, const uint64_t *key, uint32_t cnt)
{
	put_name(p, k, "block_hashes");
	msgpack_pack_array(k, cnt);
	for (uint32_t i = 0; i < cnt; i++)
		msgpack_pack_uint64(k, key[i]);
}

void kvp_publish_stored(
	struct kvp_publish *p, const uint64_t *parent, const uint64_t *key, uint32_t cnt, const uint32_t *tok)
{
	uint32_t tok_cnt = cnt * p->cfg.block_size_tok;
	msgpack_packer k = begin_event(p, "BlockStored", 7);
	put_hashes(p, &k, key, cnt);
	put_name(p, &k, "parent_block_hash");
	if (parent)
		msgpack_pack_uint64(&k, *parent);
	else
		msgpack_pack_nil(&k);
	put_name(p, &k, "token_ids");
	msgpack_pack_array(&k, tok_cnt);
	for (uint32_t i = 0; i < tok_cnt; i++)
		msgpack_pack_uint32(&k, tok[i]);
	put_name(p, &k, "block_size");
	msgpack_pack_uint32(&k, p->cfg.block_size_tok);
	put_name(p, &k, "lora_id");
	msgpack_pack_nil(&k);
	put_name(p, &k, "medium");
	put_str(&k, MEDIUM);
	put_name(p, &k, "lora_name");
	msgpack_pack_nil(&k);
}

void kvp_publish_removed(struct kvp_publish *p, const uint64_t *key, uint32_t cnt)
{
	msgpack_packer k = begin_event(p, "BlockRemoved", 2);
	put_hashes(p, &k, key, cnt);
	put_name(p, &k, "medium");
	put_str(&k, MEDIUM);
}

void kvp_publish_cleared(struct kvp_publish *p)
{
	begin_event(p, "AllBlocksCleared", 0);
}

/* keep takes the payload into the ring, in place of the oldest ones where count or bytes ask for it. */
static void keep(struct kvp_publish *p, char *payload, size_t len)
{
	while (p->kept_first < p->seq &&
		(p->seq - p->kept_first == p->cfg.kept_max || p->kept_bytes + len > p->cfg.kept_max_bytes)) {
		struct kept *old = &p->kept[p->kept_first++ % p->cfg.kept_max];
		p->kept_bytes -= old->len;
		free(old->payload);
		*old = (struct kept){0};
	}
	p->kept[p->seq % p->cfg.kept_max] = (struct kept){p->seq, payload, len};
	p->kept_bytes += len;
	p->seq++;
}

void kvp_publish_flush(struct kvp_publish *p, double at_s)
{
	msgpack_sbuffer batch;
	msgpack_packer k;
	uint8_t be[8];
	if (!p->event_cnt)
		return;
	msgpack_sbuffer_init(&batch);
	msgpack_packer_init(&k, &batch, msgpack_sbuffer_write);
	msgpack_pack_array(&k, 3);
	msgpack_pack_double(&k, at_s);
	msgpack_pack_array(&k, p->event_cnt);
	msgpack_sbuffer_write(&batch, p->event.data, p->event.size);
	msgpack_pack_uint32(&k, p->cfg.rank);
	msgpack_sbuffer_clear(&p->event);
	p->event_cnt = 0;
	seq_bytes(p->seq, be);
	zmq_send(p->pub, p->cfg.topic, strlen(p->cfg.topic), ZMQ_SNDMORE | ZMQ_DONTWAIT);
	zmq_send(p->pub, be, sizeof(be), ZMQ_SNDMORE | ZMQ_DONTWAIT);
	zmq_send(p->pub, batch.data, batch.size, ZMQ_DONTWAIT);
	size_t len = batch.size;
	keep(p, msgpack_sbuffer_release(&batch), len);
}
