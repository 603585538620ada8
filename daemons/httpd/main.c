#include "daemons/httpd/httpd.h"
#include "daemons/common/log.h"

#include <errno.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/signalfd.h>
#include <unistd.h>

#define REAP_MS 30000

void kvp_httpd_abort(void *ctx, struct kvp_http_req *r)
{
	const enum kvp_httpd_job *job = r->user;
	if (kvp_httpd_unpark(ctx, r) || !job)
		return;
	if (*job == KVP_HTTPD_WAIT)
		kvp_httpd_wait_drop(ctx, r->user);
	else if (*job == KVP_HTTPD_HINT)
		kvp_httpd_hint_drop(ctx, r->user);
	else if (*job == KVP_HTTPD_DUMP)
		kvp_dumps_drop(&((struct kvp_httpd *)ctx)->dumps, r);
	else
		((struct kvp_httpd_cmd *)r->user)->req = NULL; /* it goes on; its reply is thrown away */
}

static void on_wake(void *ctx, int fd)
{
	struct kvp_httpd *h = ctx;
	(void)fd;
	kvp_slot_awake(h->boot.slots);
	kvp_httpd_poll_commands(h);
	kvp_httpd_retry(h);
	kvp_httpd_wait_poll(h);
	kvp_httpd_hint_poll(h);
	kvp_dumps_poll(&h->dumps);
}

/* before_sleep: neither replies of the indexer nor turns of waiting requests must be missed between the last
 * look and the wait. */
static int before_sleep(void *ctx)
{
	struct kvp_httpd *h = ctx;
	int more = kvp_lifecycle_tend(&h->boot.region->lifecycle);
	if (!h->pending && !h->parked && !h->waits && !h->dumps.first && !h->hints)
		return more;
	kvp_slot_sleep(h->boot.slots);
	return more | kvp_httpd_poll_commands(h) | kvp_httpd_retry(h) | kvp_httpd_wait_poll(h) |
	       kvp_httpd_hint_poll(h) | kvp_dumps_poll(&h->dumps);
}

static void on_drained(void *ctx)
{
	struct kvp_httpd *h = ctx;
	kvp_loop_stop(h->loop);
}

static void on_signal(void *ctx, int fd)
{
	struct kvp_httpd *h = ctx;
	struct signalfd_siginfo si;
	if (read(fd, &si, sizeof(si)) != (ssize_t)sizeof(si) || h->draining)
		return;
	h->draining = 1;
	kvp_boot_control(&h->boot, KVP_CTL_DRAIN);
	kvp_httpd_wait_end(h);
	if (h->api)
		kvp_http_server_drain(h->api, on_drained, h);
	else
		on_drained(h);
}

/* count_http adds what the server counted since the last time. */
static void count_http(struct kvp_httpd *h)
{
	if (!h->api)
		return;
	struct kvp_http_server_stat now = *kvp_http_server_stat(h->api);
	struct kvp_ctr_column_shm *c = h->boot.ctr;
	kvp_ctr_add(c, KVP_CTR_HTTP_ACCEPTED, now.accepted - h->seen.accepted);
	kvp_ctr_add(c, KVP_CTR_HTTP_REFUSED, now.refused - h->seen.refused);
	kvp_ctr_add(c, KVP_CTR_HTTP_REQUESTS, now.requests - h->seen.requests);
	kvp_ctr_add(c, KVP_CTR_HTTP_BAD, now.bad - h->seen.bad);
	kvp_ctr_add(c, KVP_CTR_HTTP_OVER_LIMIT, now.over_limit - h->seen.over_limit);
	kvp_ctr_add(c, KVP_CTR_HTTP_TIMEOUT, now.timeouts - h->seen.timeouts);
	kvp_ctr_add(c, KVP_CTR_HTTP_ABORTED, now.aborted - h->seen.aborted);
	kvp_ctr_add(c, KVP_CTR_HTTP_IDLE_CLOSED, now.idle_closed - h->seen.idle_closed);
	kvp_ctr_add(c, KVP_CTR_HTTP_STALLED, now.stalled - h->seen.stalled);
	kvp_ctr_add(c, KVP_CTR_HTTP_OVERRUN, now.overrun - h->seen.overrun);
	kvp_ctr_add(c, KVP_CTR_HTTP_HELD_REFUSED, now.held_refused - h->seen.held_refused);
	kvp_ctr_set(c, KVP_CTR_HTTP_HELD, h->held.all);
	kvp_ctr_set(c, KVP_CTR_HTTP_OPEN, now.open);
	h->seen = now;
}

#define TOUCH_BYTES (1u << 20)	      /* a beat: a tenth of a millisecond */
#define TOUCH_FIRST_BYTES (256u << 20) /* before it serves */

/* Each process looks at its share of the bindings, so that all are seen once in the shorter of their time to
 * live and half a minute. */
static void reap_sessions(struct kvp_httpd *h)
{
	struct kvp_affinity *a = &h->boot.region->affinity;
	uint64_t period_ms = a->ttl_ns / 1000000 < REAP_MS ? a->ttl_ns / 1000000 : REAP_MS;
	uint64_t share = (uint64_t)kvp_affinity_used(a) * h->boot.config->slot_beat_ms / (period_ms + 1);
	if (kvp_affinity_used(a))
		kvp_affinity_reap(a, kvp_clock_mono_ns(), (uint32_t)share + 1);
}

static void on_beat(void *ctx, struct kvp_timer *t)
{
	struct kvp_httpd *h = ctx;
	struct kvp_loop_stat st;
	uint64_t now_ns = kvp_loop_now_ns(h->loop);
	kvp_slot_beat(h->boot.slots, h->boot.slot, now_ns / 1000000);
	kvp_loop_stat_take(h->loop, &st);
	kvp_ctr_max(h->boot.ctr, KVP_CTR_LOOP_MAX_NS, st.turn_max_ns);
	count_http(h);
	kvp_httpd_poll_commands(h);
	kvp_httpd_hint_poll(h);
	kvp_dumps_poll(&h->dumps);
	reap_sessions(h);
	kvp_select_report(h->selection);
	kvp_httpd_wait_poll(h);
	kvp_radix_touch(&h->boot.region->radix, &h->touch, TOUCH_BYTES);
	kvp_token_refresh(&h->token); /* a file that is gone or broken for a moment changes nothing */
	kvp_timer_set(h->loop, t, now_ns + h->boot.config->slot_beat_ms * 1000000, on_beat, h);
}

#define FILES_OTHER 128 /* open files that are no connections */

/* A connection over the limit is answered; one for which there is no descriptor would wait without a word. */
static uint32_t connections_max(const struct kvp_config *cfg)
{
	uint64_t ports = 1 + (cfg->eff.api_port && cfg->eff.metrics_port), files = kvp_boot_files();
	uint64_t room = files > FILES_OTHER ? (files - FILES_OTHER) / ports : 1;
	if (cfg->http_max_connections <= room)
		return (uint32_t)cfg->http_max_connections;
	KVP_LOG_W("httpd.connections", "wanted=%" PRIu64 " files=%" PRIu64 " limit=%" PRIu64,
		(uint64_t)cfg->http_max_connections, files, room);
	return (uint32_t)room;
}

static int open_server(struct kvp_httpd *h, uint16_t port, void (*on_request)(void *, struct kvp_http_req *),
	struct kvp_http_server **out)
{
	const struct kvp_config *cfg = h->boot.config;
	struct kvp_http_server_cfg sc;
	memset(&sc, 0, sizeof(sc));
	sc.ip = cfg->bind;
	sc.port = port;
	sc.listen_flags = KVP_LISTEN_REUSEPORT;
	sc.max_connections = connections_max(cfg);
	sc.read_timeout_ms = (uint32_t)cfg->http_read_timeout_ms;
	sc.idle_timeout_ms = (uint32_t)cfg->http_idle_timeout_ms;
	sc.on_request = on_request;
	sc.on_abort = kvp_httpd_abort;
	sc.on_undelivered = kvp_httpd_undelivered;
	sc.held = &h->held;
	if (out == &h->api)
		sc.on_early = kvp_httpd_early;
	sc.ctx = h;
	int rc = kvp_http_server_open(h->loop, &sc, out);
	if (rc)
		KVP_LOG_E("httpd.listen", "setting=%s port=%u KVPICK_BIND=%s error=%s errno=%s",
			out == &h->api ? "KVPICK_PORT" : "DYN_EPP_METRICS_PORT", port, cfg->bind,
			kvp_strerror(rc), strerror(errno));
	return rc;
}

static int open_signals(struct kvp_httpd *h)
{
	sigset_t set;
	sigemptyset(&set);
	sigaddset(&set, SIGTERM);
	sigaddset(&set, SIGINT);
	sigprocmask(SIG_BLOCK, &set, NULL);
	h->signal_fd = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
	if (h->signal_fd < 0)
		return KVP_ERR_SYS;
	return kvp_loop_watch_fd(h->loop, &h->signals, h->signal_fd, on_signal, h);
}

static int open_all(struct kvp_httpd *h)
{
	struct kvp_select_settings set;
	struct kvp_policy_err why;
	kvp_select_from_config(&set, h->boot.config);
	if (kvp_policy_from_config(&h->policy, h->boot.config, &why)) {
		KVP_LOG_E("httpd.policy", "DYN_ROUTER_POLICY_CONFIG=%s error=%s",
			h->boot.config->policy_config, why.text);
		return KVP_ERR_INVAL;
	}
	set.policy = &h->policy;
	h->load_row = calloc(KVP_HTTPD_ROWS_MAX, sizeof(*h->load_row));
	h->overlap_row = calloc(KVP_HTTPD_ROWS_MAX, sizeof(*h->overlap_row));
	h->record = malloc(KVP_CAT_RECORD_MAX);
	if (!h->load_row || !h->overlap_row || !h->record || kvp_parse_open(&h->parse))
		return KVP_ERR_SYS;
	kvp_jw_init(&h->out);
	h->selection = kvp_select_open(h->boot.region, h->boot.owner, h->boot.ctr, &set);
	if (!h->selection)
		return KVP_ERR_SYS;
	kvp_httpd_dump_open(h);
	h->token.path = h->boot.config->api_token_file;
	int rc = kvp_token_refresh(&h->token);
	rc = rc ? rc : kvp_loop_open(&h->loop, 0);
	rc = rc ? rc : open_signals(h);
	rc = rc ? rc : kvp_loop_watch_fd(h->loop, &h->wake, h->boot.wake_fd, on_wake, h);
	if (rc)
		return rc;
	kvp_loop_before_sleep(h->loop, before_sleep, h);
	h->boot.region->lifecycle.wake = KVP_LIFECYCLE_WAKE_LATER;
	const struct kvp_config_derived *eff = &h->boot.config->eff;
	h->held.max = h->boot.config->http_max_held_bytes;
	if (eff->api_port)
		rc = open_server(h, eff->api_port, kvp_httpd_request, &h->api);
	if (!rc && eff->metrics_port)
		rc = open_server(h, eff->metrics_port, kvp_httpd_metrics_request, &h->metrics);
	return rc;
}

static void close_all(struct kvp_httpd *h)
{
	kvp_httpd_wait_end(h);
	kvp_http_server_close(h->api);
	kvp_http_server_close(h->metrics);
	kvp_loop_close(h->loop);
	kvp_selection_close(h->selection);
	while (h->parked)
		kvp_httpd_unpark(h, h->parked->req);
	kvp_parse_close(&h->parse);
	kvp_jw_free(&h->out);
	kvp_policy_drop(&h->policy);
	while (h->pending) {
		struct kvp_httpd_cmd *p = h->pending;
		h->pending = p->next;
		kvp_cmd_end(&h->boot.region->cmd, p->cell);
		free(p);
	}
	free(h->load_row);
	free(h->overlap_row);
	free(h->record);
}

int main(int argc, char **argv)
{
	static struct kvp_httpd h;
	int rc = kvp_boot_child(argc, argv, KVP_ROLE_HTTPD, &h.boot);
	if (rc)
		return kvp_boot_exit(rc);
	kvp_config_log_setup(h.boot.config, "httpd", (int)h.boot.instance);
	rc = open_all(&h);
	if (rc) {
		KVP_LOG_E("httpd.start", "error=%s errno=%s", kvp_strerror(rc), strerror(errno));
		return errno == EADDRINUSE || errno == EADDRNOTAVAIL ? KVP_EXIT_CONFIG : KVP_EXIT_AGAIN;
	}
	kvp_radix_touch(&h.boot.region->radix, &h.touch, TOUCH_FIRST_BYTES);
	on_beat(&h, &h.beat);
	kvp_boot_control(&h.boot, KVP_CTL_RUN);
	KVP_LOG_I("httpd.run", "port=%u metrics_port=%u", h.api ? kvp_http_server_port(h.api) : 0,
		h.metrics ? kvp_http_server_port(h.metrics) : 0);
	rc = kvp_loop_run(h.loop);
	close_all(&h);
	return rc ? KVP_EXIT_AGAIN : KVP_EXIT_OK;
}
