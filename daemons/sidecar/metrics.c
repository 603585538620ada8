#include "daemons/sidecar/metrics.h"

#include <kvpick/err.h>
#include <string.h>

#include "daemons/common/metrics_text.h"
#include "ipc/http_client.h"
#include "ipc/http_server.h"

#define PREFIX "dynamo_pd_sidecar_"

#define CONN_MAX 64
#define PROBE_NS UINT64_C(2000000000)

static struct {
	struct kvp_sidecar *sidecar;
	struct kvp_http_server *server;
	struct kvp_sock probe; /* to the engine beside us, while somebody asks for it */
	struct kvp_timer timer;
	struct kvp_http_req *asked[CONN_MAX]; /* requests that wait for the probe */
	unsigned asked_cnt;
	uint8_t probing, second; /* the second address is tried */
} m;

static uint64_t sum(size_t off)
{
	uint64_t n = 0;
	for (unsigned i = 0; i < m.sidecar->worker_cnt; i++)
		n += kvp_ld_rlx_u64(
			(const uint64_t *)(const void *)((const char *)&m.sidecar->worker[i] + off));
	return n;
}
#define SUM(field) sum(offsetof(struct kvp_worker, field))

/* Without an adapter only the other profile runs requests by one, vLLM's. */
static const char *backend(int by_adapter)
{
	static const char *const text[] = {"vllm_nixl", "vllm_nixl", "sglang", "trtllm"};
	return by_adapter ? text[m.sidecar->cfg.eff.sidecar_adapter] : "none";
}

static void put_requests(struct kvp_text *t)
{
	kvp_text_add(t, "# HELP " PREFIX "requests_total Requests by path, protocol and how they ended.\n"
			"# TYPE " PREFIX "requests_total counter\n");
	for (unsigned p = 0; p < KVP_PATH_CNT; p++)
		for (unsigned a = 0; a < 2; a++)
			for (unsigned e = 0; e < KVP_RESULT_CNT; e++) {
				size_t off = offsetof(struct kvp_worker, count.request) +
					     ((p * 2 + a) * KVP_RESULT_CNT + e) * sizeof(uint64_t);
				uint64_t n = sum(off);
				if (n)
					kvp_text_add(t,
						PREFIX "requests_total{path=\"%s\",backend=\"%s\","
						       "result=\"%s\"} %llu\n",
						kvp_path_text[p], backend((int)a), kvp_result_text[e],
						(unsigned long long)n);
			}
}

static void put_legs(struct kvp_text *t)
{
	static const char *const leg[] = {"prefill", "decode"};
	kvp_text_add(t,
		"# HELP " PREFIX "leg_duration_seconds Time of a call to an engine, to its last byte.\n"
		"# TYPE " PREFIX "leg_duration_seconds histogram\n");
	for (unsigned l = 0; l < KVP_COUNT_LEGS; l++) {
		uint64_t n = 0;
		for (unsigned b = 0; b < KVP_COUNT_BUCKETS; b++) {
			n += sum(offsetof(struct kvp_worker, count.leg_bucket) +
				 (l * KVP_COUNT_BUCKETS + b) * sizeof(uint64_t));
			if (b < KVP_COUNT_BUCKETS - 1)
				kvp_text_add(t,
					PREFIX "leg_duration_seconds_bucket{leg=\"%s\",le=\"%g\"} %llu\n",
					leg[l], 0.001 * (double)(UINT64_C(1) << b), (unsigned long long)n);
		}
		kvp_text_add(t, PREFIX "leg_duration_seconds_bucket{leg=\"%s\",le=\"+Inf\"} %llu\n", leg[l],
			(unsigned long long)n);
		kvp_text_add(t, PREFIX "leg_duration_seconds_sum{leg=\"%s\"} %g\n", leg[l],
			(double)sum(offsetof(struct kvp_worker, count.leg_sum_us) + l * sizeof(uint64_t)) /
				1e6);
		kvp_text_add(t, PREFIX "leg_duration_seconds_count{leg=\"%s\"} %llu\n", leg[l],
			(unsigned long long)n);
	}
	kvp_text_add(t,
		"# HELP " PREFIX "cancellations_total Calls to engines ended before their last byte.\n"
		"# TYPE " PREFIX "cancellations_total counter\n");
	for (unsigned l = 0; l < KVP_COUNT_LEGS; l++)
		kvp_text_add(t, PREFIX "cancellations_total{leg=\"%s\"} %llu\n", leg[l],
			(unsigned long long)sum(
				offsetof(struct kvp_worker, count.cancelled) + l * sizeof(uint64_t)));
}

static uint64_t by_result(enum kvp_result e)
{
	uint64_t n = 0;
	for (unsigned i = 0; i < KVP_PATH_CNT * 2; i++)
		n += sum(offsetof(struct kvp_worker, count.request) +
			 (i * KVP_RESULT_CNT + e) * sizeof(uint64_t));
	return n;
}

static void put_one(struct kvp_text *t, const char *name, const char *type, const char *help, uint64_t v)
{
	kvp_text_add(t, "# HELP " PREFIX "%s %s\n# TYPE " PREFIX "%s %s\n" PREFIX "%s %llu\n", name, help,
		name, type, name, (unsigned long long)v);
}

static void put_prefill_errors(struct kvp_text *t)
{
	static const enum kvp_result e[] = {KVP_RESULT_PREFILL_UNAVAILABLE, KVP_RESULT_PREFILL_TIMEOUT,
		KVP_RESULT_PREFILL_DEADLINE, KVP_RESULT_PREFILL_ERROR, KVP_RESULT_PREFILL_TOO_LARGE,
		KVP_RESULT_HANDOFF};
	kvp_text_add(t, "# HELP " PREFIX "prefill_errors_total Requests that ended with the prefill leg.\n"
			"# TYPE " PREFIX "prefill_errors_total counter\n");
	for (size_t i = 0; i < sizeof(e) / sizeof(e[0]); i++)
		kvp_text_add(t, PREFIX "prefill_errors_total{reason=\"%s\"} %llu\n", kvp_result_text[e[i]],
			(unsigned long long)by_result(e[i]));
}

static void put_all(struct kvp_text *t)
{
	put_requests(t);
	put_legs(t);
	put_prefill_errors(t);
	put_one(t, "invalid_metadata_total", "counter", "Requests with a bad prefill header.",
		by_result(KVP_RESULT_METADATA));
	put_one(t, "requests_inflight", "gauge", "Requests that run.", SUM(count.streams));
	put_one(t, "held_bytes", "gauge", "Bytes kept in memory for requests.",
		kvp_ld_rlx_u64(&m.sidecar->held.all));
	put_one(t, "held_refused_total", "counter",
		"Requests and pipelined bytes over the budget of kept bytes.", SUM(count.held_refused));
	put_one(t, "connections", "gauge", "Connections of clients.", SUM(count.conns));
	put_one(t, "connections_accepted_total", "counter", "Connections accepted.", SUM(count.accepted));
	put_one(t, "engine_connections", "gauge", "Connections to engines.", SUM(pool.stat.open));
	put_one(t, "engine_connections_total", "counter", "Connections made to engines.",
		SUM(pool.stat.connects));
	put_one(t, "engine_connections_reused_total", "counter", "Calls on a kept connection.",
		SUM(pool.stat.reused));
	put_one(t, "engine_retries_total", "counter", "Calls repeated because a kept connection was dead.",
		SUM(pool.stat.retried));
	put_one(t, "engine_unrepeated_total", "counter",
		"Generations not repeated on a new connection: the engine may have begun.",
		SUM(pool.stat.unrepeated));
	put_one(t, "engine_connections_stale_total", "counter", "Kept connections found dead before use.",
		SUM(pool.stat.stale));
	put_one(t, "engine_tls_failed_total", "counter", "TLS handshakes with engines that failed.",
		SUM(pool.stat.tls_failed));
	put_one(t, "aborts_total", "counter", "Abort calls to engines.", SUM(count.aborts));
	put_one(t, "aborts_failed_total", "counter", "Abort calls without success.",
		SUM(count.aborts_failed));
	put_one(t, "prefill_fallbacks_total", "counter",
		"Prefills that failed and left all of the work to the decode engine.", SUM(count.fallbacks));
	put_one(t, "usage_too_long_total", "counter",
		"Lines and texts of answers that were too long for cached tokens to be set.",
		SUM(count.usage_long));
	put_one(t, "local_requests_total", "counter", "Health and readiness requests.", SUM(count.local));
	put_one(t, "not_found_total", "counter", "Requests for paths that are not served.",
		SUM(count.not_found));
	put_one(t, "received_bytes_total", "counter", "Bytes from clients.", SUM(count.rx_bytes));
	put_one(t, "sent_bytes_total", "counter", "Bytes to clients.", SUM(count.tx_bytes));
}

/* The engine is up when one of its two addresses takes a connection; looked at when somebody asks. */
static void probe_end(int up)
{
	kvp_timer_cancel(m.sidecar->worker[0].loop, &m.timer);
	kvp_sock_close(&m.probe);
	m.probing = 0;
	for (unsigned i = 0; i < m.asked_cnt; i++)
		kvp_http_reply(m.asked[i], up ? 200 : 503, NULL, "", 0);
	m.asked_cnt = 0;
}

static void probe_late(void *ctx, struct kvp_timer *t)
{
	(void)ctx;
	(void)t;
	probe_end(0);
}

static const struct kvp_sock_ops probe_ops;

static int probe_connect(void)
{
	struct kvp_addr a;
	kvp_addr_ip(&a, m.second ? "::1" : "127.0.0.1", (uint16_t)m.sidecar->cfg.decode_engine_port);
	m.probe = (struct kvp_sock){.loop = NULL};
	return kvp_sock_connect(m.sidecar->worker[0].loop, &m.probe, &a, &probe_ops, NULL);
}

static void on_connect(void *ctx, struct kvp_sock *s, int err)
{
	(void)ctx;
	if (err && !m.second) {
		m.second = 1;
		kvp_sock_close(s);
		if (probe_connect() == KVP_OK)
			return;
	}
	probe_end(!err);
}

static void on_recv(void *ctx, struct kvp_sock *s, const char *data, int64_t len)
{
	(void)ctx;
	(void)s;
	(void)data;
	(void)len;
}

static const struct kvp_sock_ops probe_ops = {.on_connect = on_connect, .on_recv = on_recv};

static void ready_ask(struct kvp_http_req *q)
{
	struct kvp_loop *l = m.sidecar->worker[0].loop;
	if (m.sidecar->worker[0].draining || m.asked_cnt == CONN_MAX) {
		kvp_http_reply(q, 503, NULL, "", 0);
		return;
	}
	m.asked[m.asked_cnt++] = q;
	if (m.probing)
		return;
	m.probing = 1;
	m.second = 0;
	if (kvp_timer_set(l, &m.timer, kvp_loop_now_ns(l) + PROBE_NS, probe_late, NULL) || probe_connect())
		probe_end(0);
}

static void on_abort(void *ctx, struct kvp_http_req *q)
{
	unsigned n = 0;
	(void)ctx;
	for (unsigned i = 0; i < m.asked_cnt; i++)
		if (m.asked[i] != q)
			m.asked[n++] = m.asked[i];
	m.asked_cnt = n;
}

static void on_request(void *ctx, struct kvp_http_req *q)
{
	struct kvp_text t = {0};
	int is_get = q->method == KVP_HTTP_GET;
	(void)ctx;
	if (is_get && q->path_len == 8 && !memcmp(q->path, "/metrics", 8)) {
		put_all(&t);
		kvp_http_reply(q, 200, "text/plain; version=0.0.4", t.buf, t.len);
	} else if (is_get && q->path_len == 7 && !memcmp(q->path, "/health", 7)) {
		kvp_http_reply(q, 200, NULL, "", 0);
	} else if (is_get && q->path_len == 6 && !memcmp(q->path, "/ready", 6)) {
		ready_ask(q);
	} else {
		kvp_http_reply(q, 404, NULL, "", 0);
	}
	kvp_text_free(&t);
}

int kvp_sc_metrics_open(struct kvp_sidecar *s)
{
	struct kvp_http_server_cfg cfg = {.ip = s->cfg.sidecar_bind,
		.port = (uint16_t)s->cfg.sidecar_metrics_port,
		.max_connections = CONN_MAX,
		.on_request = on_request,
		.on_abort = on_abort};
	m.sidecar = s;
	if (!cfg.port)
		return KVP_OK;
	return kvp_http_server_open(s->worker[0].loop, &cfg, &m.server);
}

void kvp_sc_metrics_close(void)
{
	if (!m.server)
		return;
	kvp_timer_cancel(m.sidecar->worker[0].loop, &m.timer);
	kvp_sock_close(&m.probe);
	m.asked_cnt = 0;
	kvp_http_server_close(m.server);
	m.server = NULL;
}
