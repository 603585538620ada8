/* Both ends of a proxy: an engine that streams tokens, and clients that count what arrives and when. What
 * stands between them, and its processor time, is the caller's business (bench/bars_sidecar.py).
 *
 * Usage      b_sidecar engine PORT
 *            b_sidecar latency PORT REQUESTS CONNECTIONS [PREFILL BYTES]   small answers, one after the
 *                other; PREFILL: port of the engine that prefills, BYTES: of the prompt
 *            b_sidecar streams PORT STREAMS TOKENS GAP_US       each with a token every GAP_US, all at once
 * Prints     engine: "ready". latency: requests, errors, p50_us, p99_us, requests_s. streams: tokens, errors,
 *            seconds, first_p50_us, first_p99_us, late_p99_us (arrival of a token behind its time at the
 *            engine); a line "open" when all streams have begun.
 * The engine reads its orders from the body: {"tokens":N,"gap_us":G}; 0 tokens: a whole answer. Each token's
 * event carries the time at which it was sent. */
#include <errno.h>
#include <inttypes.h>
#include <kvpick/err.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bench/bench.h"
#include "ipc/http_client.h"
#include "ipc/http_server.h"
#include "ipc/json_in.h"

#define LAT_MAX (1u << 22)

static struct kvp_loop *loop;

/* ---- engine ---- */

struct answer {
	struct kvp_http_req *req;
	struct kvp_timer timer;
	uint64_t left, gap_ns, due_ns;
};

static struct kvp_json *json;

static uint64_t order(struct kvp_json_val root, const char *key)
{
	struct kvp_json_val v;
	uint64_t n = 0;
	return kvp_json_get(root, key, &v) || kvp_json_u64(v, &n) ? 0 : n;
}

static void answer_end(struct answer *a)
{
	kvp_timer_cancel(loop, &a->timer);
	free(a);
}

static void on_token(void *ctx, struct kvp_timer *t)
{
	struct answer *a = ctx;
	char text[256];
	int n = snprintf(text, sizeof(text),
		"data: "
		"{\"id\":\"chatcmpl-bench\",\"object\":\"chat.completion.chunk\",\"created\":%020" PRIu64
		",\"model\":\"m\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\" "
		"word\"},\"finish_reason\":"
		"null}]}\n\n",
		bench_now_ns());
	kvp_http_reply_chunk(a->req, text, (uint64_t)n);
	if (--a->left) {
		a->due_ns += a->gap_ns;
		kvp_timer_set(loop, t, a->due_ns, on_token, a);
		return;
	}
	kvp_http_reply_chunk(a->req, "data: [DONE]\n\n", 14);
	kvp_http_reply_end(a->req);
	answer_end(a);
}

static void on_request(void *ctx, struct kvp_http_req *r)
{
	static const char whole[] =
		"{\"id\":\"chatcmpl-bench\",\"object\":\"chat.completion\",\"choices\":[{\"index\":0,"
		"\"message\":{\"role\":\"assistant\",\"content\":\"Rayleigh\"},\"finish_reason\":"
		"\"stop\"}],\"kv_transfer_params\":{\"do_remote_prefill\":true,\"do_remote_decode\":false,"
		"\"remote_block_ids\":[[1,2,3]],\"remote_engine_id\":\"e\",\"remote_request_id\":\"r\","
		"\"remote_host\":\"127.0.0.1\",\"remote_port\":5600}}";
	struct kvp_json_val root;
	struct answer *a = NULL;
	(void)ctx;
	uint64_t tokens = 0;
	if (r->body_len && kvp_json_parse(json, r->body, r->body_len, 16, &root, NULL) == KVP_OK)
		tokens = order(root, "tokens");
	if (tokens && (a = calloc(1, sizeof(*a)))) {
		a->req = r;
		a->left = tokens;
		a->gap_ns = order(root, "gap_us") * 1000;
		a->due_ns = kvp_loop_now_ns(loop) + a->gap_ns;
		r->user = a;
		kvp_http_reply_begin(r, 200, "text/event-stream", NULL, NULL);
		kvp_timer_set(loop, &a->timer, a->due_ns, on_token, a);
		return;
	}
	kvp_http_reply(r, 200, "application/json", whole, sizeof(whole) - 1);
}

static void on_abort(void *ctx, struct kvp_http_req *r)
{
	(void)ctx;
	if (r->user)
		answer_end(r->user);
}

static int engine(uint16_t port)
{
	struct kvp_http_server_cfg cfg = {.ip = "127.0.0.1",
		.port = port,
		.max_connections = 20000,
		.idle_timeout_ms = 600000,
		.on_request = on_request,
		.on_abort = on_abort};
	struct kvp_http_server *s;
	json = kvp_json_new();
	if (!json || kvp_http_server_open(loop, &cfg, &s))
		return 1;
	printf("ready\n");
	fflush(stdout);
	return kvp_loop_run(loop) != KVP_OK;
}

/* ---- clients ---- */

struct lat { /* microseconds */
	uint32_t *us;
	uint32_t cnt;
};

static void lat_add(struct lat *l, uint64_t ns)
{
	l->us = l->us ? l->us : malloc(LAT_MAX * sizeof(*l->us));
	if (l->us && l->cnt < LAT_MAX)
		l->us[l->cnt++] = (uint32_t)(ns / 1000);
}

static int by_value(const void *a, const void *b)
{
	uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
	return x < y ? -1 : x > y;
}

static uint32_t lat_at(struct lat *l, double q)
{
	if (!l->cnt)
		return 0;
	qsort(l->us, l->cnt, sizeof(*l->us), by_value);
	uint32_t i = (uint32_t)(q * l->cnt);
	return l->us[i < l->cnt ? i : l->cnt - 1];
}

static struct kvp_http_client *client;
static struct lat whole_lat, first_lat, late_lat;
static uint64_t todo, errors, tokens_in, begun, streams;
static uint16_t port_to;
static char *order_text;
static char head_text[160];
static uint32_t running;

struct call {
	uint64_t start_ns;
	uint8_t has_first;
};

static void call_start(void);

static void on_body(void *ctx, struct kvp_http_call *c, const char *data, uint64_t len)
{
	static const char mark[] = "\"created\":";
	struct call *k = ctx;
	uint64_t now = bench_now_ns();
	(void)c;
	for (const char *p = data, *end = data + len; streams && p < end;) {
		const char *at = memmem(p, (size_t)(end - p), mark, sizeof(mark) - 1);
		if (!at || end - at < 40)
			break;
		at += sizeof(mark) - 1;
		lat_add(&late_lat, now - strtoull(at, NULL, 10));
		tokens_in++;
		p = at;
	}
	if (!k->has_first) {
		k->has_first = 1;
		lat_add(&first_lat, now - k->start_ns);
		if (streams && ++begun == streams) {
			printf("open\n");
			fflush(stdout);
		}
	}
}

static void on_done(void *ctx, struct kvp_http_call *c, int status, int err)
{
	struct call *k = ctx;
	(void)c;
	errors += err != KVP_OK || status != 200;
	lat_add(&whole_lat, bench_now_ns() - k->start_ns);
	free(k);
	running--;
	if (todo)
		call_start();
	else if (!running)
		kvp_loop_stop(loop);
}

static void call_start(void)
{
	struct call *k = calloc(1, sizeof(*k));
	struct kvp_http_call_cfg cfg = {.host = "127.0.0.1",
		.port = port_to,
		.method = "POST",
		.path = "/v1/chat/completions",
		.headers = head_text,
		.body = order_text,
		.len = strlen(order_text),
		.on_body = on_body,
		.on_done = on_done,
		.ctx = k};
	todo--;
	running++;
	if (!k)
		exit(1);
	k->start_ns = bench_now_ns();
	if (kvp_http_call(client, &cfg, NULL)) {
		fprintf(stderr, "call: %s\n", strerror(errno));
		exit(1);
	}
}

static double run(uint64_t calls, uint64_t at_once)
{
	struct kvp_http_client_cfg cfg = {.conn_max = 20000, .idle_max = 20000};
	if (kvp_http_client_open(loop, &cfg, &client))
		exit(1);
	todo = calls;
	kvp_loop_run_once(loop, 0);
	uint64_t start = bench_now_ns();
	for (uint64_t i = 0; i < at_once && todo; i++)
		call_start();
	if (kvp_loop_run(loop))
		exit(1);
	return (double)(bench_now_ns() - start) / 1e9;
}

/* A body of about that many bytes, most of them prompt. */
static void order_make(const char *members, uint64_t bytes)
{
	static const char word[] = "The sky is blue because of what scatters. ";
	size_t cap = bytes + 512, n;
	order_text = malloc(cap);
	if (!order_text)
		exit(1);
	n = (size_t)snprintf(order_text, cap,
		"{\"model\":\"m\",%s,\"messages\":[{\"role\":\"user\",\"content\":\"", members);
	while (n + sizeof(word) < bytes) {
		memcpy(order_text + n, word, sizeof(word) - 1);
		n += sizeof(word) - 1;
	}
	snprintf(order_text + n, cap - n, "\"}]}");
}

static int latency(uint64_t requests, uint64_t connections, uint64_t prefill, uint64_t bytes)
{
	order_make("\"tokens\":0", bytes);
	if (prefill) {
		size_t n = strlen(head_text);
		snprintf(head_text + n, sizeof(head_text) - n,
			"x-prefiller-host-port: 127.0.0.1:%" PRIu64 "\r\n", prefill);
	}
	run(requests / 10 + 1, connections); /* warm */
	kvp_http_client_close(client);
	whole_lat.cnt = 0;
	double s = run(requests, connections);
	printf("requests=%" PRIu64 " errors=%" PRIu64 " p50_us=%u p99_us=%u requests_s=%.0f\n", requests,
		errors, lat_at(&whole_lat, 0.5), lat_at(&whole_lat, 0.99), (double)requests / s);
	return 0;
}

static int stream(uint64_t cnt, uint64_t tokens, uint64_t gap_us)
{
	char members[96];
	snprintf(members, sizeof(members), "\"tokens\":%" PRIu64 ",\"gap_us\":%" PRIu64, tokens, gap_us);
	order_make(members, 0);
	streams = cnt;
	double s = run(cnt, cnt);
	printf("tokens=%" PRIu64 " errors=%" PRIu64
	       " seconds=%.3f first_p50_us=%u first_p99_us=%u late_p50_us=%u "
	       "late_p99_us=%u\n",
		tokens_in, errors, s, lat_at(&first_lat, 0.5), lat_at(&first_lat, 0.99),
		lat_at(&late_lat, 0.5), lat_at(&late_lat, 0.99));
	return 0;
}

int main(int argc, char **argv)
{
	uint64_t n[5] = {0};
	for (int i = 2; i < argc && i < 7; i++)
		n[i - 2] = strtoull(argv[i], NULL, 10);
	signal(SIGPIPE, SIG_IGN);
	if (argc < 3 || kvp_loop_open(&loop, 0))
		return 2;
	port_to = (uint16_t)n[0];
	if (!strcmp(argv[1], "engine"))
		return engine(port_to);
	snprintf(head_text, sizeof(head_text), "Content-Type: application/json\r\nX-Request-Id: bench\r\n");
	if (!strcmp(argv[1], "latency") && (argc == 5 || argc == 7))
		return latency(n[1], n[2], n[3], n[4]);
	if (!strcmp(argv[1], "streams") && argc == 6)
		return stream(n[1], n[2], n[3]);
	return 2;
}
