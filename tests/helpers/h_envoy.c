/* Streams of a played Envoy (bench/load/envoy.h) against an Endpoint Picker: tests and benchmarks.
 *
 * Usage      h_envoy TARGET streams in_flight connections tokens|chat size whole|mix [mode [pairs]]
 *            size: token ids of a /v1/completions prompt, or bytes of a chat; mix: streams break off at
 *            every place in turn, by half close and by reset
 * Prints     one line key=value: streams, routed, refused, failed, retried, violations, streams_s, and p50_us
 *            and p99_us from the first message to the routing answer. Exit 1 if the picker broke a rule.
 */
#include <inttypes.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "bench/load/envoy.h"
#include <kvpick/clock.h>

#define PROMPTS 64
#define UNAVAILABLE 14

struct load {
	struct kvp_gc *gc;
	struct kvp_envoy *x; /* in flight */
	uint32_t streams, in_flight, started, ended, routed, refused, failed, retried, broken, mode;
	int is_chat, is_mix, is_paired;
	char *text[PROMPTS];
	struct kvp_extproc_str body[PROMPTS]; /* the same */
	uint64_t *took;
	char first_fault[200];
};

static char *make_body(int is_chat, uint32_t size, uint32_t n)
{
	size_t cap = (size_t)size * 12 + 300, len;
	char *t = malloc(cap);
	if (!t)
		exit(2);
	if (is_chat) {
		len = (size_t)snprintf(t, cap, "{\"messages\":[{\"role\":\"user\",\"content\":\"%u ", n);
		memset(t + len, 'a' + (int)(n % 26), size);
		snprintf(t + len + size, cap - len - size, "\"}]}");
		return t;
	}
	len = (size_t)snprintf(t, cap, "{\"prompt\":[");
	for (uint32_t i = 0; i < size; i++)
		len += (size_t)snprintf(t + len, cap - len, "%s%u", i ? "," : "", n * 100000 + i);
	snprintf(t + len, cap - len, "]}");
	return t;
}

static void start(struct load *l, struct kvp_envoy *x)
{
	static const struct kvp_extproc_header chat[] = {
		{KVP_EXTPROC_STR(":method"), KVP_EXTPROC_STR("POST")},
		{KVP_EXTPROC_STR(":path"), KVP_EXTPROC_STR("/v1/chat/completions")}};
	static const struct kvp_extproc_header completions[] = {
		{KVP_EXTPROC_STR(":method"), KVP_EXTPROC_STR("POST")},
		{KVP_EXTPROC_STR(":path"), KVP_EXTPROC_STR("/v1/completions")}};
	static const struct kvp_extproc_header sse[] = {{KVP_EXTPROC_STR(":status"), KVP_EXTPROC_STR("200")},
		{KVP_EXTPROC_STR("content-type"), KVP_EXTPROC_STR("text/event-stream")}};
	uint32_t n = l->started++;
	*x = (struct kvp_envoy){.header = l->is_chat ? chat : completions,
		.header_cnt = 2,
		.response_header = sse,
		.response_header_cnt = 2,
		.body = l->body[n % PROMPTS],
		.response_body = KVP_EXTPROC_STR("data: {\"x\":1}\n\ndata: {\"x\":2}\n\ndata: [DONE]\n\n"),
		.response_piece_bytes = 16,
		.request_mode = l->mode,
		.response_mode = KVP_EXTPROC_BODY_FULL_DUPLEX};
	if (l->is_mix) {
		x->stop = (enum kvp_envoy_stop)(n % (KVP_ENVOY_IN_RESPONSE + 1));
		x->leave = n / (KVP_ENVOY_IN_RESPONSE + 1) % 2 ? KVP_ENVOY_RESET : KVP_ENVOY_CLOSE;
		x->trailers = n % 5 == 0 && l->mode == KVP_EXTPROC_BODY_FULL_DUPLEX;
		x->response_trailers = n % 3 == 0;
		x->piece_bytes = 100 + n % 1000;
	}
	kvp_envoy_start(l->gc, x);
}

static void ended(struct load *l, const struct kvp_envoy *x)
{
	int whole = x->stop == KVP_ENVOY_WHOLE && x->grpc_status == 0;
	uint32_t wrong = x->violations + x->mismatches;
	if (x->destination[0]) {
		if (x->routed_ns > x->start_ns)
			l->took[l->routed++] = x->routed_ns - x->start_ns;
		wrong += strcmp(x->destination, x->metadata) != 0;
		wrong += l->is_paired && (!x->prefiller[0] || strcmp(x->prefiller, x->destination) == 0);
		wrong += whole && x->forwarded_bytes != x->body.len;
		wrong += whole && x->response_bytes != x->response_body.len;
	}
	l->refused += x->http_status != 0;
	l->failed += x->stop == KVP_ENVOY_WHOLE && !x->destination[0] && !x->http_status;
	l->broken += wrong != 0;
	if (wrong && !l->first_fault[0])
		snprintf(
			l->first_fault, sizeof(l->first_fault), "%.120s stop=%d", x->violation, (int)x->stop);
	l->ended++;
}

/* again gives the same exchange from its beginning. */
static struct kvp_envoy *again(struct kvp_envoy *x)
{
	struct kvp_envoy o = *x;
	*x = (struct kvp_envoy){.header = o.header,
		.header_cnt = o.header_cnt,
		.response_header = o.response_header,
		.response_header_cnt = o.response_header_cnt,
		.body = o.body,
		.response_body = o.response_body,
		.response_piece_bytes = o.response_piece_bytes,
		.piece_bytes = o.piece_bytes,
		.trailers = o.trailers,
		.response_trailers = o.response_trailers,
		.request_mode = o.request_mode,
		.response_mode = o.response_mode,
		.stop = o.stop,
		.leave = o.leave};
	return x;
}

static int by_size(const void *a, const void *b)
{
	uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
	return x < y ? -1 : x > y;
}

static void run(struct load *l)
{
	struct kvp_extproc_dec *d = kvp_extproc_dec_new();
	struct kvp_gc_event ev;
	for (uint32_t i = 0; i < l->in_flight && l->started < l->streams; i++)
		start(l, &l->x[i]);
	while (d && l->ended < l->streams) {
		if (!kvp_gc_next(l->gc, 30000, &ev)) {
			snprintf(l->first_fault, sizeof(l->first_fault), "nothing came for 30 s");
			l->broken++;
			break;
		}
		struct kvp_envoy *x = ev.ctx;
		kvp_envoy_event(d, &ev);
		if (!x->done)
			continue;
		/* What a dead process left unanswered a proxy tries once more, elsewhere. */
		if (x->grpc_status == UNAVAILABLE && !x->destination[0] && x->stop != KVP_ENVOY_UNANSWERED) {
			l->retried++;
			poll(NULL, 0, 1);
			kvp_envoy_start(l->gc, again(x));
			continue;
		}
		ended(l, x);
		if (l->started < l->streams)
			start(l, x);
	}
	kvp_extproc_dec_delete(d);
}

int main(int argc, char **argv)
{
	struct load l = {.mode = KVP_EXTPROC_BODY_FULL_DUPLEX};
	if (argc < 8) {
		fputs("usage: h_envoy TARGET streams in_flight connections tokens|chat size whole|mix "
		      "[request_mode [pairs]]\n",
			stderr);
		return 2;
	}
	struct kvp_gc_cfg cfg = {.target = argv[1], .conns = (uint32_t)strtoul(argv[4], NULL, 10)};
	l.streams = (uint32_t)strtoul(argv[2], NULL, 10);
	l.in_flight = (uint32_t)strtoul(argv[3], NULL, 10);
	l.is_chat = strcmp(argv[5], "chat") == 0;
	l.is_mix = strcmp(argv[7], "mix") == 0;
	if (argc > 8)
		l.mode = (uint32_t)strtoul(argv[8], NULL, 10);
	l.is_paired = argc > 9; /* every answer names a prefill worker, too, and another one */
	for (uint32_t i = 0; i < PROMPTS; i++) {
		l.text[i] = make_body(l.is_chat, (uint32_t)strtoul(argv[6], NULL, 10), i);
		l.body[i] = (struct kvp_extproc_str){l.text[i], (uint32_t)strlen(l.text[i])};
	}
	l.x = calloc(l.in_flight + 1, sizeof(*l.x));
	l.took = calloc(l.streams + 1, sizeof(*l.took));
	if (!l.x || !l.took || kvp_gc_open(&l.gc, &cfg))
		return 2;
	uint64_t begin_ns = kvp_clock_mono_ns();
	run(&l);
	double s = (double)(kvp_clock_mono_ns() - begin_ns) * 1e-9;
	qsort(l.took, l.routed, sizeof(*l.took), by_size);
	printf("streams=%u routed=%u refused=%u failed=%u retried=%u violations=%u streams_s=%.0f "
	       "p50_us=%.0f "
	       "p99_us=%.0f "
	       "fault=%s\n",
		l.ended, l.routed, l.refused, l.failed, l.retried, l.broken, l.ended / s,
		l.routed ? (double)l.took[l.routed / 2] * 1e-3 : 0,
		l.routed ? (double)l.took[(uint64_t)l.routed * 99 / 100] * 1e-3 : 0,
		l.first_fault[0] ? l.first_fault : "none");
	kvp_gc_close(l.gc);
	for (uint32_t i = 0; i < PROMPTS; i++)
		free(l.text[i]);
	free(l.x);
	free(l.took);
	return l.broken ? 1 : 0;
}
