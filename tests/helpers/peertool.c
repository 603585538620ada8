/* tests/helpers/peertool.c — a replica's bare sockets, driven by lines on stdin.
 *
 *   bind ENDPOINT          publisher (an XPUB, so that subscriptions are seen)
 *   joined N MS            wait until N subscriptions have come, those that ended included
 *   send HEX [HEX..]       one message of these frames
 *   burst N                the last message N times more
 *   sub ENDPOINT           listen to a publisher, all topics
 *   recv MS                one message: "ok HEX HEX", or "error none"
 *   idle MS                "ok" if nothing comes for so long, else "error HEX.."
 *   quit
 *
 * Each line is answered by one line: "ok ..." or "error ...".
 */
#include "tests/procs.h"

#include <errno.h>
#include <zmq.h>

enum { LINE_MAX_BYTES = 1 << 22, FRAME_MAX = 8 };

static void *ctx, *pub, *sub;
static char line[LINE_MAX_BYTES], out[LINE_MAX_BYTES];
static uint64_t joined;
static unsigned char *frame[FRAME_MAX];
static size_t frame_len[FRAME_MAX];
static int frame_cnt;

static void *open_socket(int type)
{
	int zero = 0, on = 1;
	void *s = zmq_socket(ctx, type);
	zmq_setsockopt(s, ZMQ_LINGER, &zero, sizeof(zero));
	zmq_setsockopt(s, type == ZMQ_SUB ? ZMQ_RCVHWM : ZMQ_SNDHWM, &zero, sizeof(zero));
	zmq_setsockopt(s, ZMQ_IPV6, &on, sizeof(on));
	if (type == ZMQ_XPUB)
		zmq_setsockopt(s, ZMQ_XPUB_VERBOSER, &on, sizeof(on));
	else
		zmq_setsockopt(s, ZMQ_SUBSCRIBE, "", 0);
	return s;
}

static const char *bind_line(const char *at)
{
	pub = open_socket(ZMQ_XPUB);
	for (uint64_t end = now_ms() + 5000; zmq_bind(pub, at);) {
		if (errno != EADDRINUSE || now_ms() > end)
			return "error bind";
		zmq_poll(NULL, 0, 10);
	}
	return "ok";
}

static const char *joined_line(const char *rest)
{
	char *ms;
	uint64_t want = strtoull(rest, &ms, 10), end = now_ms() + strtoull(ms, NULL, 10);
	while (pub && joined < want && now_ms() < end) {
		zmq_pollitem_t item = {.socket = pub, .events = ZMQ_POLLIN};
		unsigned char m[256];
		if (zmq_poll(&item, 1, 20) < 1)
			continue;
		int n = zmq_recv(pub, m, sizeof(m), ZMQ_DONTWAIT);
		joined += n >= 1 && m[0] == 1;
	}
	return joined >= want ? "ok" : "error fewer";
}

static void publish(void)
{
	for (int i = 0; i < frame_cnt; i++)
		zmq_send(pub, frame[i], frame_len[i], i + 1 < frame_cnt ? ZMQ_SNDMORE : 0);
}

static const char *send_line(char *rest)
{
	char *save = NULL;
	while (frame_cnt)
		free(frame[--frame_cnt]);
	for (char *hex = strtok_r(rest, " ", &save); hex && frame_cnt < FRAME_MAX;
		hex = strtok_r(NULL, " ", &save)) {
		size_t n = strcmp(hex, "-") == 0 ? 0 : strlen(hex) / 2;
		unsigned char *p = malloc(n + 1);
		for (size_t i = 0; i < n; i++) {
			unsigned v = 0;
			sscanf(hex + 2 * i, "%2x", &v);
			p[i] = (unsigned char)v;
		}
		frame[frame_cnt] = p;
		frame_len[frame_cnt++] = n;
	}
	if (!pub || !frame_cnt)
		return "error not bound, or nothing to send";
	publish();
	return "ok";
}

static const char *recv_line(int ms, const char *got, const char *none)
{
	zmq_pollitem_t item = {.socket = sub, .events = ZMQ_POLLIN};
	size_t at = (size_t)snprintf(out, sizeof(out), "%s", got);
	int more = 1;
	if (!sub || zmq_poll(&item, 1, ms) < 1)
		return none;
	while (more) {
		zmq_msg_t m;
		zmq_msg_init(&m);
		zmq_msg_recv(&m, sub, 0);
		out[at++] = ' ';
		for (size_t i = 0; i < zmq_msg_size(&m) && at + 8 < sizeof(out); i++, at += 2)
			snprintf(out + at, 3, "%02x", ((unsigned char *)zmq_msg_data(&m))[i]);
		more = zmq_msg_more(&m);
		zmq_msg_close(&m);
	}
	out[at] = 0;
	return out;
}

static const char *run(const char *verb, char *rest)
{
	if (strcmp(verb, "bind") == 0)
		return bind_line(rest);
	if (strcmp(verb, "joined") == 0)
		return joined_line(rest);
	if (strcmp(verb, "send") == 0)
		return send_line(rest);
	if (strcmp(verb, "burst") == 0) {
		for (uint64_t n = strtoull(rest, NULL, 10); n; n--)
			publish();
		return "ok";
	}
	if (strcmp(verb, "sub") == 0) {
		sub = sub ? sub : open_socket(ZMQ_SUB);
		return zmq_connect(sub, rest) ? "error connect" : "ok";
	}
	if (strcmp(verb, "recv") == 0)
		return recv_line((int)strtol(rest, NULL, 10), "ok", "error none");
	if (strcmp(verb, "idle") == 0)
		return recv_line((int)strtol(rest, NULL, 10), "error", "ok");
	return "error unknown verb";
}

int main(void)
{
	ctx = zmq_ctx_new();
	while (fgets(line, sizeof(line), stdin)) {
		line[strcspn(line, "\n")] = 0;
		char *rest = line + strcspn(line, " ");
		if (*rest)
			*rest++ = 0;
		if (strcmp(line, "quit") == 0)
			break;
		puts(run(line, rest));
		fflush(stdout);
	}
	return 0;
}
