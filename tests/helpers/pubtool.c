/* tests/helpers/pubtool.c — an engine's KV-event publisher and replay service, driven by lines on stdin.
 *
 *   bind ENDPOINT          PUB socket (an XPUB, so that subscriptions are seen)
 *   restart                close it and bind it again: a publisher that starts anew
 *   replay ENDPOINT        ROUTER socket that answers replay requests from what "pub" and "keep" named
 *   frames 2|3             replies with or without the topic frame (default 3)
 *   end on|off             whether replies end with the end marker (default on)
 *   pub SEQ HEX            send a batch and keep it for replays
 *   keep SEQ HEX           only keep it: it was lost on the way
 *   live SEQ HEX           only send it
 *   forget                 empty the replay buffer
 *   joined N MS            wait until N subscriptions have come, those that ended included
 *   requested N MS         wait until N replay requests came; prints the start of the last one
 *   unbind, quit
 *
 * Each line is answered by one line: "ok ..." or "error ...".
 */
#include "tests/procs.h"

#include <errno.h>
#include <time.h>
#include <zmq.h>

enum { KEEP_MAX = 20000, LINE_MAX_BYTES = 1 << 22 };

struct batch {
	uint64_t seq;
	unsigned char *bytes;
	size_t len;
};

static void *ctx, *pub, *router;
static char pub_at[256], router_at[256], line[LINE_MAX_BYTES];
static struct batch kept[KEEP_MAX];
static int kept_cnt, has_topic = 1, has_end = 1;
static uint64_t requests, last_start, joined;

static void put_seq(unsigned char out[8], uint64_t seq)
{
	for (int i = 0; i < 8; i++)
		out[i] = (unsigned char)(seq >> (56 - 8 * i));
}

static void *open_at(int type, const char *at)
{
	int zero = 0, all = 1;
	void *s = zmq_socket(ctx, type);
	zmq_setsockopt(s, ZMQ_LINGER, &zero, sizeof(zero));
	zmq_setsockopt(s, ZMQ_SNDHWM, &zero, sizeof(zero));
	if (type == ZMQ_XPUB)
		zmq_setsockopt(s, ZMQ_XPUB_VERBOSER, &all, sizeof(all));
	for (uint64_t end = now_ms() + 5000;
		zmq_bind(s, at);) { /* the old socket may not have left the address yet */
		if (errno != EADDRINUSE || now_ms() > end) {
			zmq_close(s);
			return NULL;
		}
		struct timespec wait = {0, 10000000};
		nanosleep(&wait, NULL);
	}
	return s;
}

static void reply(const void *id, size_t id_len, const unsigned char seq[8], const void *payload, size_t len)
{
	zmq_send(router, id, id_len, ZMQ_SNDMORE);
	zmq_send(router, "", 0, ZMQ_SNDMORE);
	if (has_topic)
		zmq_send(router, "", 0, ZMQ_SNDMORE);
	zmq_send(router, seq, 8, ZMQ_SNDMORE);
	zmq_send(router, payload, len, 0);
}

static void serve_replay(void)
{
	unsigned char id[256], empty[8], start[16], seq[8];
	int id_len = zmq_recv(router, id, sizeof(id), ZMQ_DONTWAIT);
	if (id_len < 0 || zmq_recv(router, empty, sizeof(empty), 0) < 0 ||
		zmq_recv(router, start, sizeof(start), 0) != 8)
		return;
	last_start = 0;
	for (int i = 0; i < 8; i++)
		last_start = last_start << 8 | start[i];
	requests++;
	for (int i = 0; i < kept_cnt; i++) {
		if (kept[i].seq < last_start)
			continue;
		put_seq(seq, kept[i].seq);
		reply(id, (size_t)id_len, seq, kept[i].bytes, kept[i].len);
	}
	put_seq(seq, UINT64_MAX);
	if (has_end)
		reply(id, (size_t)id_len, seq, "", 0);
}

static void serve_subscription(void)
{
	unsigned char m[256];
	int n = zmq_recv(pub, m, sizeof(m), ZMQ_DONTWAIT);
	joined += n >= 1 && m[0] == 1;
}

/* Waits for a line on stdin (fd 0) or, with want NULL, for the sockets, up to ms. */
static int serve(int with_stdin, int ms)
{
	zmq_pollitem_t item[3] = {{.fd = with_stdin ? 0 : -1, .events = ZMQ_POLLIN}};
	int n = 1, pub_item = -1, router_item = -1;
	if (pub)
		item[pub_item = n++] = (zmq_pollitem_t){.socket = pub, .events = ZMQ_POLLIN};
	if (router)
		item[router_item = n++] = (zmq_pollitem_t){.socket = router, .events = ZMQ_POLLIN};
	int skip = with_stdin ? 0 : 1;
	if (zmq_poll(item + skip, n - skip, ms) < 0)
		return 0;
	if (pub_item > 0 && item[pub_item].revents)
		serve_subscription();
	if (router_item > 0 && item[router_item].revents)
		serve_replay();
	return with_stdin && item[0].revents;
}

static int unhex(const char *s, struct batch *b)
{
	size_t n = strlen(s) / 2;
	b->bytes = malloc(n + 1);
	b->len = n;
	for (size_t i = 0; i < n; i++) {
		unsigned v;
		if (sscanf(s + 2 * i, "%2x", &v) != 1)
			return -1;
		b->bytes[i] = (unsigned char)v;
	}
	return 0;
}

static const char *batch_line(const char *verb, const char *rest)
{
	struct batch b = {0};
	unsigned char seq[8];
	char *hex;
	b.seq = strtoull(rest, &hex, 10);
	if (unhex(*hex == ' ' ? hex + 1 : hex, &b))
		return "error hex";
	if (strcmp(verb, "keep") != 0) {
		if (!pub)
			return "error not bound";
		put_seq(seq, b.seq);
		zmq_send(pub, "", 0, ZMQ_SNDMORE);
		zmq_send(pub, seq, 8, ZMQ_SNDMORE);
		zmq_send(pub, b.bytes, b.len, 0);
	}
	if (strcmp(verb, "live") == 0 || kept_cnt == KEEP_MAX)
		free(b.bytes);
	else
		kept[kept_cnt++] = b;
	return "ok";
}

static const char *wait_line(const char *verb, const char *rest)
{
	static char out[64];
	char *ms;
	uint64_t want = strtoull(rest, &ms, 10), end = now_ms() + strtoull(ms, NULL, 10);
	const uint64_t *have = strcmp(verb, "joined") == 0 ? &joined : &requests;
	while (*have < want && now_ms() < end)
		serve(0, 20);
	snprintf(out, sizeof(out), "%s %llu %llu", *have >= want ? "ok" : "error", (unsigned long long)*have,
		(unsigned long long)last_start);
	return out;
}

static void shut(void **s)
{
	if (*s)
		zmq_close(*s);
	*s = NULL;
}

static const char *run(const char *verb, const char *rest)
{
	if (strcmp(verb, "bind") == 0 || strcmp(verb, "restart") == 0 || strcmp(verb, "unbind") == 0) {
		if (verb[0] == 'b')
			snprintf(pub_at, sizeof(pub_at), "%s", rest);
		shut(&pub);
		if (verb[0] != 'u')
			pub = open_at(ZMQ_XPUB, pub_at);
		return pub || verb[0] == 'u' ? "ok" : "error bind";
	}
	if (strcmp(verb, "replay") == 0) {
		snprintf(router_at, sizeof(router_at), "%s", rest);
		shut(&router);
		router = open_at(ZMQ_ROUTER, router_at);
		return router ? "ok" : "error bind";
	}
	if (strcmp(verb, "frames") == 0) {
		has_topic = rest[0] == '3';
		return "ok";
	}
	if (strcmp(verb, "end") == 0) {
		has_end = strcmp(rest, "on") == 0;
		return "ok";
	}
	if (strcmp(verb, "forget") == 0) {
		while (kept_cnt)
			free(kept[--kept_cnt].bytes);
		return "ok";
	}
	if (strcmp(verb, "pub") == 0 || strcmp(verb, "keep") == 0 || strcmp(verb, "live") == 0)
		return batch_line(verb, rest);
	if (strcmp(verb, "joined") == 0 || strcmp(verb, "requested") == 0)
		return wait_line(verb, rest);
	return "error unknown verb";
}

int main(void)
{
	ctx = zmq_ctx_new();
	setvbuf(stdin, NULL, _IONBF, 0); /* so that poll on the descriptor sees every line */
	for (;;) {
		if (!serve(1, 1000))
			continue;
		if (!fgets(line, sizeof(line), stdin))
			break;
		line[strcspn(line, "\n")] = 0;
		char *rest = strchr(line, ' ');
		if (rest)
			*rest++ = 0;
		if (strcmp(line, "quit") == 0)
			break;
		puts(run(line, rest ? rest : ""));
		fflush(stdout);
	}
	shut(&pub);
	shut(&router);
	zmq_ctx_term(ctx);
	return 0;
}
