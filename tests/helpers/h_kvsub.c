/* tests/helpers/h_kvsub.c — subscribes to an engine's KV events and prints each batch as a line of JSON; at
 * the end of its standard input it asks for a replay from sequence number 0 and prints that, too.
 *
 * usage: h_kvsub EVENTS-ENDPOINT REPLAY-ENDPOINT */
#include "ipc/kv_event.h"
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <zmq.h>

#define FRAME_MAX 6
#define WAIT_MS 10000

static struct kvp_kv_dec *dec;

struct message {
	zmq_msg_t frame[FRAME_MAX];
	uint32_t cnt;
};

static int receive(void *s, struct message *m)
{
	int more = 1;
	m->cnt = 0;
	while (more && m->cnt < FRAME_MAX) {
		zmq_msg_init(&m->frame[m->cnt]);
		if (zmq_msg_recv(&m->frame[m->cnt], s, 0) < 0)
			return 0;
		more = zmq_msg_more(&m->frame[m->cnt++]);
	}
	return 1;
}

static void release(struct message *m)
{
	for (uint32_t i = 0; i < m->cnt; i++)
		zmq_msg_close(&m->frame[i]);
}

static uint64_t seq_of(zmq_msg_t *f)
{
	const uint8_t *p = zmq_msg_data(f);
	uint64_t v = 0;
	for (size_t i = 0; i < zmq_msg_size(f); i++)
		v = v << 8 | p[i];
	return v;
}

static void print_event(const struct kvp_kv_event *e)
{
	static const char *const kind[] = {
		"stored", "removed", "cleared", "tier", "ignored", "unknown", "malformed"};
	printf("{\"kind\":\"%s\",\"block_size\":%" PRIu64 ",\"medium\":\"%.*s\",\"parent\":", kind[e->kind],
		e->block_size, (int)e->medium.len, e->medium.p ? e->medium.p : "");
	if (e->has_parent)
		printf("%" PRIu64, e->parent);
	else
		printf("null");
	printf(",\"hashes\":[");
	for (uint32_t i = 0; i < e->hash_cnt; i++)
		printf("%s%" PRIu64, i ? "," : "", e->hash[i]);
	printf("],\"tokens\":[");
	for (uint32_t i = 0; i < e->tok_cnt; i++)
		printf("%s%u", i ? "," : "", e->tok[i]);
	printf("]}");
}

/* print_message: the payload is the last frame, the sequence number the one before. */
static void print_message(const char *what, struct message *m)
{
	struct kvp_kv_batch b;
	zmq_msg_t *payload = &m->frame[m->cnt - 1], *seq = &m->frame[m->cnt > 1 ? m->cnt - 2 : 0];
	printf("{\"what\":\"%s\",\"frames\":%u,\"seq_len\":%zu,\"seq\":%" PRIu64 ",\"topic\":\"%.*s\"", what,
		m->cnt, zmq_msg_size(seq), seq_of(seq),
		m->cnt > 2 ? (int)zmq_msg_size(&m->frame[m->cnt - 3]) : 0,
		m->cnt > 2 ? (const char *)zmq_msg_data(&m->frame[m->cnt - 3]) : "");
	if (zmq_msg_size(payload) &&
		kvp_kv_decode(dec, zmq_msg_data(payload), zmq_msg_size(payload), &b) == KVP_OK) {
		printf(",\"rank\":%d,\"events\":[", b.has_rank ? (int)b.rank : -1);
		for (uint32_t i = 0; i < b.event_cnt; i++) {
			if (i)
				putchar(',');
			print_event(&b.event[i]);
		}
		putchar(']');
	}
	puts("}");
	fflush(stdout);
}

/* wait_connected returns when the subscription's connection stands. */
static int wait_connected(void *ctx, void *sub, const char *endpoint)
{
	struct message m;
	void *mon = zmq_socket(ctx, ZMQ_PAIR);
	int ms = WAIT_MS;
	if (zmq_socket_monitor(sub, "inproc://mon", ZMQ_EVENT_HANDSHAKE_SUCCEEDED) ||
		zmq_connect(mon, "inproc://mon"))
		return 0;
	zmq_setsockopt(mon, ZMQ_RCVTIMEO, &ms, sizeof(ms));
	int done = zmq_connect(sub, endpoint) == 0 && receive(mon, &m);
	if (done)
		release(&m);
	zmq_socket_monitor(sub, NULL, 0);
	zmq_close(mon);
	return done;
}

static void replay(void *ctx, const char *endpoint)
{
	struct message m;
	int ms = WAIT_MS, linger_ms = 0, more = 1;
	void *s = zmq_socket(ctx, ZMQ_DEALER);
	zmq_setsockopt(s, ZMQ_RCVTIMEO, &ms, sizeof(ms));
	zmq_setsockopt(s, ZMQ_LINGER, &linger_ms, sizeof(linger_ms));
	zmq_connect(s, endpoint);
	zmq_send(s, "", 0, ZMQ_SNDMORE);
	zmq_send(s, "\0\0\0\0\0\0\0\0", 8, 0);
	while (more && receive(s, &m)) {
		more = zmq_msg_size(&m.frame[m.cnt - 1]) > 0;
		print_message(more ? "replay" : "end", &m);
		release(&m);
	}
	zmq_close(s);
}

int main(int argc, char **argv)
{
	int linger_ms = 0, is_open = 1;
	char byte;
	if (argc != 3)
		return KVP_EXIT_CONFIG;
	void *ctx = zmq_ctx_new(), *sub = zmq_socket(ctx, ZMQ_SUB);
	dec = kvp_kv_dec_new();
	zmq_setsockopt(sub, ZMQ_SUBSCRIBE, "", 0);
	zmq_setsockopt(sub, ZMQ_LINGER, &linger_ms, sizeof(linger_ms));
	if (!dec || !wait_connected(ctx, sub, argv[1]))
		return KVP_EXIT_DEPEND;
	puts("{\"what\":\"connected\"}");
	fflush(stdout);
	while (is_open) {
		zmq_pollitem_t item[2] = {
			{.socket = sub, .events = ZMQ_POLLIN}, {.fd = STDIN_FILENO, .events = ZMQ_POLLIN}};
		struct message m;
		if (zmq_poll(item, 2, -1) < 0)
			break;
		if (item[0].revents && receive(sub, &m)) {
			print_message("live", &m);
			release(&m);
		}
		if (item[1].revents)
			is_open = read(STDIN_FILENO, &byte, 1) > 0;
	}
	replay(ctx, argv[2]);
	zmq_close(sub);
	zmq_ctx_term(ctx);
	kvp_kv_dec_free(dec);
	return KVP_EXIT_OK;
}
