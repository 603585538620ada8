/* tests/zmq_fixture.h — an engine in the test's own thread: XPUB and ROUTER on ephemeral ports, a replay
 * buffer.
 *
 * XPUB speaks PUB's protocol and tells when a subscription has arrived, so nothing has to be slept for.
 * fx_until pumps engine and listener until a condition holds; after 10 s the condition has failed.
 */
#ifndef KVP_ZMQ_FIXTURE_H
#define KVP_ZMQ_FIXTURE_H
#include <stdlib.h>
#include <time.h>
#include <zmq.h>

#include "ipc/kv_event.h"
#include "ipc/zmq_sub.h"
#include "tests/tap.h"

#define FX_MAX 4096

enum fx_mode { FX_NEW, FX_OLD, FX_NO_DELIMITER, FX_OLDEST_END, FX_NO_END, FX_SILENT, FX_GARBAGE, FX_RAW };

struct fx {
	void *zmq, *pub, *router;
	char endpoint[96], replay[96];
	struct kvp_zmq_sub *sub;
	struct kvp_kv_dec *dec;
	enum fx_mode mode;
	uint64_t seq[FX_MAX]; /* what the listener delivered and could be framed */
	enum kvp_zmq_source src[FX_MAX];
	uint32_t cnt, resets, losses, again; /* again: refusals still to give */
	uint64_t reset_at;           /* deliveries before the last reset */
	uint64_t w_before_live;      /* watermark when the last live batch came */
	uint64_t first, last;        /* replay buffer: [first, last] */
	uint64_t request_start;
	uint32_t requests;
	void (*raw)(struct fx *f, zmq_msg_t *id); /* FX_RAW */
	const void *raw_ctx;
	zmq_msg_t id; /* of the last request */
};

static const unsigned char fx_payload[] = {0x93, 0x09, 0x90, 0x00}; /* [9, [], 0] */

__attribute__((unused)) static uint64_t fx_now_ms(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000 + (uint64_t)t.tv_nsec / 1000000;
}

static int fx_on_batch(void *ctx, uint64_t seq, const void *p, size_t len, enum kvp_zmq_source src)
{
	struct fx *f = ctx;
	struct kvp_kv_batch b;
	if (f->again) {
		f->again--;
		return KVP_ERR_AGAIN;
	}
	if (src == KVP_ZMQ_LIVE && f->sub)
		f->w_before_live = kvp_zmq_sub_cursor(f->sub)->w;
	int rc = kvp_kv_decode(f->dec, p, len, &b);
	if (rc != KVP_OK || f->cnt == FX_MAX)
		return KVP_ERR_PROTO;
	f->seq[f->cnt] = seq;
	f->src[f->cnt++] = src;
	return KVP_OK;
}

static int fx_on_reset(void *ctx, enum kvp_zmq_why why)
{
	struct fx *f = ctx;
	if (f->again) {
		f->again--;
		return KVP_ERR_AGAIN;
	}
	f->resets++;
	f->losses += why == KVP_ZMQ_WHY_LOSS;
	f->reset_at = f->cnt;
	return KVP_OK;
}

static void *fx_bind(void *zmq, int type, const char *endpoint, char *out, size_t cap)
{
	int zero = 0, on = 1;
	void *s = zmq_socket(zmq, type);
	zmq_setsockopt(s, ZMQ_LINGER, &zero, sizeof(zero));
	zmq_setsockopt(s, ZMQ_SNDHWM, &zero, sizeof(zero));
	if (type == ZMQ_XPUB)
		zmq_setsockopt(s, ZMQ_XPUB_VERBOSER, &on, sizeof(on));
	/* The port of a socket closed a moment ago may still be taken. */
	uint64_t end = fx_now_ms() + 10000;
	while (zmq_bind(s, endpoint)) {
		if (fx_now_ms() > end) {
			printf("Bail out! bind %s: %s\n", endpoint, zmq_strerror(zmq_errno()));
			exit(1);
		}
		zmq_poll(NULL, 0, 5);
	}
	zmq_getsockopt(s, ZMQ_LAST_ENDPOINT, out, &cap);
	return s;
}

static void fx_send_id(struct fx *f, zmq_msg_t *id)
{
	zmq_msg_t copy;
	zmq_msg_init(&copy);
	zmq_msg_copy(&copy, id);
	zmq_msg_send(&copy, f->router, ZMQ_SNDMORE);
}

static void fx_reply(struct fx *f, zmq_msg_t *id, uint64_t seq, const void *p, size_t len)
{
	uint64_t wire = __builtin_bswap64(seq);
	fx_send_id(f, id);
	if (f->mode != FX_NO_DELIMITER)
		zmq_send(f->router, "", 0, ZMQ_SNDMORE);
	if (f->mode == FX_NEW || f->mode == FX_NO_DELIMITER)
		zmq_send(f->router, seq == UINT64_MAX ? "" : "kv", seq == UINT64_MAX ? 0 : 2, ZMQ_SNDMORE);
	zmq_send(f->router, &wire, 8, ZMQ_SNDMORE);
	zmq_send(f->router, p, len, 0);
}

static void fx_answer(struct fx *f, zmq_msg_t *id)
{
	if (f->mode == FX_SILENT)
		return;
	if (f->mode == FX_RAW) {
		f->raw(f, id);
		return;
	}
	if (f->mode == FX_GARBAGE) {
		fx_send_id(f, id);
		zmq_send(f->router, "", 0, ZMQ_SNDMORE);
		zmq_send(f->router, "short", 5, ZMQ_SNDMORE);
		zmq_send(f->router, "payload", 7, 0);
		return;
	}
	uint64_t from = f->request_start > f->first ? f->request_start : f->first;
	for (uint64_t s = from; s <= f->last && f->last != UINT64_MAX; s++)
		fx_reply(f, id, s, fx_payload, sizeof(fx_payload));
	if (f->mode == FX_OLDEST_END) {
		fx_send_id(f, id);
		zmq_send(f->router, "", 0, ZMQ_SNDMORE);
		zmq_send(f->router, "", 0, 0);
	} else if (f->mode != FX_NO_END) {
		fx_reply(f, id, UINT64_MAX, "", 0);
	}
}

static void fx_serve(struct fx *f)
{
	zmq_msg_t id, part;
	zmq_msg_init(&id);
	while (zmq_msg_recv(&id, f->router, ZMQ_DONTWAIT) >= 0) {
		uint32_t n = 1;
		int ok_shape = 1;
		uint64_t start = 0;
		for (int more = zmq_msg_more(&id); more; n++) {
			zmq_msg_init(&part);
			zmq_msg_recv(&part, f->router, 0);
			more = zmq_msg_more(&part);
			if (n == 1)
				ok_shape &= zmq_msg_size(&part) == 0;
			if (n == 2 && (ok_shape &= zmq_msg_size(&part) == 8))
				memcpy(&start, zmq_msg_data(&part), 8);
			zmq_msg_close(&part);
		}
		if (n != 3 || !ok_shape) {
			ok(0, "a replay request has identity, delimiter, number");
			continue;
		}
		f->requests++;
		f->request_start = __builtin_bswap64(start);
		zmq_msg_copy(&f->id, &id);
		fx_answer(f, &id);
	}
	zmq_msg_close(&id);
}

#define fx_until(f, cond)                                                                                    \
	do {                                                                                                 \
		uint64_t fx_end = fx_now_ms() + 10000;                                                       \
		while (!(cond) && fx_now_ms() < fx_end)                                                      \
			fx_pump(f);                                                                          \
		if (!(cond))                                                                                 \
			ok(0, "within 10 s: %s", #cond);                                                     \
	} while (0)

static void fx_pump(struct fx *f)
{
	fx_serve(f);
	if (f->sub)
		kvp_zmq_sub_poll(&f->sub, 1, -1, 2, 64, NULL);
	fx_serve(f);
}

static void fx_engine(struct fx *f)
{
	f->pub = fx_bind(f->zmq, ZMQ_XPUB, f->endpoint[0] ? f->endpoint : "tcp://127.0.0.1:*", f->endpoint,
		sizeof(f->endpoint));
	f->router = fx_bind(f->zmq, ZMQ_ROUTER, f->replay[0] ? f->replay : "tcp://127.0.0.1:*", f->replay,
		sizeof(f->replay));
}

/* The next subscription has arrived: from now on nothing is lost. */
static void fx_subscribed(struct fx *f)
{
	uint64_t end = fx_now_ms() + 10000;
	char buf[8];
	while (fx_now_ms() < end) {
		int n = zmq_recv(f->pub, buf, sizeof(buf), ZMQ_DONTWAIT);
		if (n >= 1 && buf[0] == 1)
			return;
		fx_pump(f);
	}
	ok(0, "the listener subscribes within 10 s");
}

__attribute__((unused)) static void fx_open_sub(struct fx *f, struct kvp_zmq_sub_cfg *cfg)
{
	cfg->zmq = f->zmq;
	cfg->endpoint = f->endpoint;
	cfg->ctx = f;
	cfg->on_batch = fx_on_batch;
	cfg->on_reset = fx_on_reset;
	if (kvp_zmq_sub_open(cfg, &f->sub) != KVP_OK) {
		printf("Bail out! no listener\n");
		exit(1);
	}
	fx_subscribed(f);
}

__attribute__((unused)) static void fx_open(struct fx *f, struct kvp_zmq_sub_cfg *cfg, enum fx_mode mode)
{
	memset(f, 0, sizeof(*f));
	f->zmq = kvp_zmq_ctx_new(16);
	f->dec = kvp_kv_dec_new();
	f->mode = mode;
	f->last = UINT64_MAX;
	zmq_msg_init(&f->id);
	fx_engine(f);
	if (cfg->replay_endpoint) /* any text: with replay */
		cfg->replay_endpoint = f->replay;
	fx_open_sub(f, cfg);
}

static void fx_engine_stop(struct fx *f)
{
	zmq_close(f->pub);
	zmq_close(f->router);
}

__attribute__((unused)) static void fx_close(struct fx *f)
{
	kvp_zmq_sub_close(f->sub);
	fx_engine_stop(f);
	zmq_msg_close(&f->id);
	zmq_ctx_term(f->zmq);
	kvp_kv_dec_free(f->dec);
}

__attribute__((unused)) static void fx_publish_raw(
	struct fx *f, const void *num, size_t num_len, const void *p, size_t len)
{
	zmq_send(f->pub, "kv", 2, ZMQ_SNDMORE);
	zmq_send(f->pub, num, num_len, ZMQ_SNDMORE);
	zmq_send(f->pub, p, len, 0);
}

__attribute__((unused)) static void fx_publish(struct fx *f, uint64_t seq)
{
	uint64_t wire = __builtin_bswap64(seq);
	fx_publish_raw(f, &wire, 8, fx_payload, sizeof(fx_payload));
}

/* Into the replay buffer only, or into both. */
__attribute__((unused)) static void fx_keep(struct fx *f, uint64_t seq)
{
	if (f->last == UINT64_MAX)
		f->first = seq;
	f->last = seq;
}
#endif
