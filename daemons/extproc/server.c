/* gRPC events to streams, and what streams say to gRPC. */
#include "daemons/extproc/extproc.h"
#include "daemons/common/log.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define EVENTS_A_TURN 4096 /* then timers and other descriptors have their turn */
#define METHOD_PROCESS 0u
#define METHOD_CHECK 1u
#define METHOD_WATCH 2u
#define ON_EXTPROC 7u /* methods, as bits: health also where requests come in */
#define ON_HEALTH 6u
#define LENT_MIN 4096u /* bytes of a piece that are sent from where they stand */
#define WATCHES_END_NS 50000000ull /* after the drain began */
#define FRAME_BYTES 65536u /* of a message beside its body */

static const char *const method[] = {KVP_EXTPROC_METHOD, KVP_GRPC_HEALTH_CHECK, KVP_GRPC_HEALTH_WATCH};

const struct kvp_stream_ops kvp_epp_ops = {.send = kvp_epp_send,
	.finish = kvp_epp_finish,
	.admit = kvp_epp_admit,
	.keep = kvp_epp_keep,
	.pick = kvp_epp_pick,
	.cancel = kvp_epp_cancel,
	.prefill_done = kvp_epp_prefill_done,
	.served = kvp_epp_served,
	.response_headers = kvp_epp_response_headers,
	.response_body = kvp_epp_response_body,
	.release = kvp_epp_release,
	.note = kvp_epp_note};

void kvp_epp_send(void *ctx, const struct kvp_extproc_reply *m)
{
	struct kvp_job *j = ctx;
	struct kvp_extproc_frame f;
	size_t len = 0;
	if (!j->grpc)
		return;
	if (m->kept && m->body.len >= LENT_MIN && kvp_extproc_reply_frame(m, &f)) {
		struct kvp_grpc_lent l = {m->body.p, m->body.len, kvp_extproc_kept_unref, m->kept};
		kvp_extproc_kept_ref(m->kept);
		if (kvp_grpc_lend(j->grpc, (struct iovec){f.head, f.head_len}, &l,
			    (struct iovec){f.tail, f.tail_len}) == KVP_ERR_SYS)
			kvp_grpc_abort(j->grpc);
		return;
	}
	void *mem = kvp_extproc_reply_new(m, &len);
	/* A message that can't be sent leaves a hole that the proxy must not take for an answer. */
	if (!mem || kvp_grpc_give(j->grpc, mem, len) == KVP_ERR_SYS)
		kvp_grpc_abort(j->grpc);
}

void kvp_epp_finish(void *ctx, int grpc_status, const char *text)
{
	struct kvp_job *j = ctx;
	if (j->grpc)
		kvp_grpc_finish(j->grpc, (enum kvp_grpc_status)grpc_status, text);
}

static void on_body_late(void *ctx, struct kvp_timer *t)
{
	struct kvp_job *j = ctx;
	(void)t;
	kvp_stream_body_late(&j->stream);
}

static void job_new(struct kvp_epp *x, struct kvp_grpc_stream *st)
{
	if (x->draining) { /* accepted before, heard of now: another process can take it */
		kvp_grpc_finish(st, KVP_GRPC_UNAVAILABLE, "shutting down");
		return;
	}
	struct kvp_job *j = calloc(1, sizeof(*j));
	if (!j) {
		kvp_grpc_finish(st, KVP_GRPC_RESOURCE_EXHAUSTED, "out of memory");
		return;
	}
	j->x = x;
	j->grpc = st;
	j->start_ns = kvp_clock_mono_ns();
	if (x->boot.config->log_requests && x->log_turn++ % x->boot.config->log_requests == 0)
		j->is_logged = 1;
	j->is_timed = x->timed_turn++ % KVP_STAGE_EVERY == 0;
	if (j->is_timed)
		kvp_epp_count(x, KVP_CTR_EPP_TIMED);
	kvp_stream_open(&j->stream, &x->stream_cfg, &kvp_epp_ops, j);
	j->next = x->jobs;
	if (x->jobs)
		x->jobs->prev = j;
	x->jobs = j;
	x->job_cnt++;
	kvp_epp_count(x, KVP_CTR_EPP_STREAMS);
	kvp_grpc_set_ctx(st, j);
}

static void job_delete(struct kvp_job *j)
{
	struct kvp_epp *x = j->x;
	j->grpc = NULL;
	kvp_stream_gone(&j->stream);
	kvp_epp_job_ended(j);
	kvp_stream_close(&j->stream);
	kvp_timer_cancel(x->loop, &j->body_timer);
	kvp_ask_reset(&j->ask);
	if (j->next)
		j->next->prev = j->prev;
	if (j->prev)
		j->prev->next = j->next;
	else
		x->jobs = j->next;
	x->job_cnt--;
	free(j);
}

static void on_message(struct kvp_job *j, const struct kvp_grpc_event *ev)
{
	struct kvp_epp *x = j->x;
	struct kvp_extproc_req m;
	if (kvp_extproc_req_decode_parts(x->dec, ev->part, ev->part_cnt, &m) != KVP_OK) {
		kvp_epp_count(x, KVP_CTR_EPP_GARBLED);
		kvp_stream_garbled(&j->stream);
		return;
	}
	kvp_stream_message(&j->stream, &m);
	if (kvp_stream_body_outstanding(&j->stream)) {
		if (!j->body_timer.pos)
			kvp_timer_set(x->loop, &j->body_timer,
				j->start_ns + x->boot.config->epp_body_timeout_ms * 1000000, on_body_late, j);
	} else {
		kvp_timer_cancel(x->loop, &j->body_timer);
	}
}

static void on_process(struct kvp_epp *x, const struct kvp_grpc_event *ev)
{
	struct kvp_job *j = kvp_grpc_ctx(ev->stream);
	switch (ev->kind) {
	case KVP_GRPC_OPEN:
		job_new(x, ev->stream);
		break;
	case KVP_GRPC_MESSAGE:
		if (j)
			on_message(j, ev);
		break;
	case KVP_GRPC_HALF_CLOSE:
		if (j)
			kvp_stream_half_closed(&j->stream);
		break;
	case KVP_GRPC_CLOSED:
		if (j)
			job_delete(j);
		break;
	default:
		break;
	}
}

/* end_watches: health watches have no end of their own; they must not hold up the end of the process. They
 * hear of the drain first. */
static void end_watches(struct kvp_epp *x)
{
	if (x->draining && !x->job_cnt && kvp_loop_now_ns(x->loop) - x->drain_ns > WATCHES_END_NS)
		kvp_grpc_abort_all(x->grpc);
}

static void on_grpc(void *ctx, int fd)
{
	struct kvp_epp *x = ctx;
	struct kvp_grpc_event ev;
	(void)fd;
	kvp_grpc_batch_begin(x->grpc);
	for (int i = 0; i < EVENTS_A_TURN && kvp_grpc_next_parts(x->grpc, &ev); i++) {
		if (ev.kind == KVP_GRPC_DRAINED)
			kvp_loop_stop(x->loop);
		else if (ev.method == METHOD_PROCESS)
			on_process(x, &ev);
		else {
			kvp_grpc_flat(x->grpc, &ev);
			kvp_grpc_health_event(x->health,
				ev.method == METHOD_CHECK ? KVP_GRPC_HEALTH_IS_CHECK
							  : KVP_GRPC_HEALTH_IS_WATCH,
				&ev);
		}
		if (ev.kind == KVP_GRPC_CLOSED)
			end_watches(x);
	}
	kvp_grpc_batch_end(x->grpc);
}

/* ---- opening ---- */

static void say_health(struct kvp_epp *x, int ready)
{
	enum kvp_grpc_serving s = ready ? KVP_GRPC_SERVING : KVP_GRPC_NOT_SERVING;
	kvp_grpc_health_set(x->health, "", KVP_GRPC_SERVING);
	kvp_grpc_health_set(x->health, "liveness", KVP_GRPC_SERVING);
	kvp_grpc_health_set(x->health, "readiness", s);
	kvp_grpc_health_set(x->health, "inference-extension", s);
	kvp_grpc_health_set(x->health, "envoy.service.ext_proc.v3.ExternalProcessor", s);
	x->ready = ready;
}

/* discovery_is_ready: the workers of every pool, or of the file, are known and registered. */
static int discovery_is_ready(const struct kvp_epp *x)
{
	return !x->boot.config->eff.discovery_on ||
	       kvp_gate_is_open(&x->boot.region->gates, KVP_GATE_WORKERS);
}

/* Worker counts do not matter, but for the number that has to have been there once. */
static int is_ready(const struct kvp_epp *x)
{
	return !x->draining && !kvp_recov_is_shut(&x->boot.region->recov) && discovery_is_ready(x) &&
	       kvp_cat_most_schedulable(&x->boot.region->cat) >= x->boot.config->min_initial_workers;
}

/* read_pair gives the server a certificate: the supplied one, or one that the processes of the node share in
 * the run directory. Whoever comes first makes it; of two at once the later one's counts, and the other reads
 * it in its next turn. */
static int read_pair(struct kvp_epp *x)
{
	struct kvp_tls_pair pair = {NULL, NULL};
	int changed = kvp_tls_watch_poll(&x->tls, &pair);
	if (changed < 0 && !x->boot.config->epp_tls_cert_file[0] && !x->grpc_fd.loop) {
		changed = kvp_tls_generate(&pair);
		changed = changed ? changed : kvp_tls_save(x->tls.cert_path, x->tls.key_path, &pair);
		changed = changed ? changed : 1;
	}
	if (changed == 1)
		changed = kvp_grpc_cert_set(x->grpc, pair.cert, pair.key);
	kvp_tls_free(&pair);
	return changed;
}

static int open_pair(struct kvp_epp *x)
{
	static char cert[KVP_BOOT_PATH_MAX + 64], key[KVP_BOOT_PATH_MAX + 64];
	const struct kvp_config *cfg = x->boot.config;
	if (!cfg->secure_serving)
		return KVP_OK;
	x->tls.cert_path = cfg->epp_tls_cert_file;
	x->tls.key_path = cfg->epp_tls_key_file;
	if (!cfg->epp_tls_cert_file[0]) {
		snprintf(cert, sizeof(cert), "%s/%s.crt", x->boot.run_dir, x->boot.node);
		snprintf(key, sizeof(key), "%s/%s.key", x->boot.run_dir, x->boot.node);
		x->tls.cert_path = cert;
		x->tls.key_path = key;
	}
	int rc = read_pair(x);
	if (rc)
		KVP_LOG_E("extproc.tls", "cert=%s error=%s", x->tls.cert_path, kvp_strerror(rc));
	return rc;
}

static int listen_on(struct kvp_epp *x, const char *addr, enum kvp_grpc_security security, uint32_t methods)
{
	uint16_t port = 0;
	struct kvp_grpc_listen l = {addr, security, methods};
	int rc = kvp_grpc_listen_add(x->grpc, &l, &port);
	if (rc)
		KVP_LOG_E("extproc.listen", "addr=%s error=%s errno=%s", addr, kvp_strerror(rc),
			strerror(errno));
	else
		KVP_LOG_I("extproc.listen", "addr=%s port=%u tls=%d", addr, port, security == KVP_GRPC_TLS);
	return rc;
}

static int open_listeners(struct kvp_epp *x)
{
	const struct kvp_config *cfg = x->boot.config;
	enum kvp_grpc_security tcp = cfg->secure_serving ? KVP_GRPC_TLS : KVP_GRPC_PLAINTEXT;
	char addr[1100], member[1024];
	size_t pos = 0;
	int rc = KVP_OK;
	if (!cfg->epp_listen[0]) {
		snprintf(addr, sizeof(addr), "0.0.0.0:%u", (unsigned)cfg->epp_port);
		rc = listen_on(x, addr, tcp, ON_EXTPROC);
	}
	while (!rc && kvp_config_list_next(cfg->epp_listen, &pos, member, sizeof(member))) {
		int is_unix = strncmp(member, "unix:", 5) == 0;
		/* A path can't be shared: every process has one of its own. */
		if (is_unix && cfg->extproc_processes > 1)
			snprintf(addr, sizeof(addr), "%s.%u", member, x->boot.instance);
		else
			snprintf(addr, sizeof(addr), "%s", member);
		rc = listen_on(x, addr, is_unix ? KVP_GRPC_PLAINTEXT : tcp, ON_EXTPROC);
	}
	snprintf(addr, sizeof(addr), "0.0.0.0:%u", (unsigned)cfg->epp_health_port);
	return rc ? rc : listen_on(x, addr, KVP_GRPC_PLAINTEXT, ON_HEALTH);
}

static void on_core_log(void *ctx, const char *text)
{
	static struct kvp_log_limit limit;
	uint64_t left = 0;
	(void)ctx;
	if (kvp_log_limit_pass(&limit, kvp_clock_mono_ns(), 1000000000ull, &left))
		KVP_LOG_W("extproc.grpc", "text=%s suppressed=%llu", text, (unsigned long long)left);
}

int kvp_epp_server_open(struct kvp_epp *x)
{
	const struct kvp_config *cfg = x->boot.config;
	uint64_t share = (cfg->epp_max_connections + cfg->extproc_processes - 1) / cfg->extproc_processes;
	struct kvp_grpc_cfg g = {.method = method,
		.method_cnt = 3,
		.message_max_bytes = (uint32_t)cfg->epp_max_body_bytes + FRAME_BYTES,
		.conn_max = (uint32_t)share,
		.log = on_core_log};
	x->dec = kvp_extproc_dec_new();
	x->health = kvp_grpc_health_new();
	if (!x->dec || !x->health)
		return KVP_ERR_SYS;
	say_health(x, 0);
	int rc = kvp_grpc_new(&x->grpc, &g);
	rc = rc ? rc : open_pair(x);
	rc = rc ? rc : open_listeners(x);
	rc = rc ? rc : kvp_loop_watch_fd(x->loop, &x->grpc_fd, kvp_grpc_fd(x->grpc), on_grpc, x);
	rc = rc ? rc : kvp_grpc_start(x->grpc);
	if (!rc)
		say_health(x, is_ready(x));
	return rc;
}

void kvp_epp_server_close(struct kvp_epp *x)
{
	while (x->jobs)
		job_delete(x->jobs);
	kvp_loop_unwatch(&x->grpc_fd);
	kvp_grpc_delete(x->grpc);
	kvp_grpc_health_delete(x->health);
	kvp_extproc_dec_delete(x->dec);
}

void kvp_epp_server_drain(struct kvp_epp *x)
{
	x->drain_ns = kvp_loop_now_ns(x->loop);
	say_health(x, 0);
	kvp_grpc_drain(x->grpc);
	for (struct kvp_job *j = x->jobs; j; j = j->next)
		kvp_stream_shut_down(&j->stream);
	kvp_epp_server_beat(x);
}

void kvp_epp_server_beat(struct kvp_epp *x)
{
	struct kvp_ctr_column_shm *c = x->boot.ctr;
	struct kvp_grpc_stat now;
	kvp_grpc_stat(x->grpc, &now);
	kvp_ctr_set(c, KVP_CTR_EPP_OPEN, x->job_cnt);
	kvp_ctr_set(c, KVP_CTR_GRPC_CONNS, now.conns);
	kvp_ctr_add(c, KVP_CTR_GRPC_ACCEPTED, now.conn_accepted - x->seen.conn_accepted);
	kvp_ctr_add(c, KVP_CTR_GRPC_REFUSED, now.conn_refused - x->seen.conn_refused);
	kvp_ctr_add(c, KVP_CTR_GRPC_STREAM_REFUSED, now.stream_refused - x->seen.stream_refused);
	kvp_ctr_add(c, KVP_CTR_GRPC_UNKNOWN, now.stream_unknown - x->seen.stream_unknown);
	kvp_ctr_add(c, KVP_CTR_GRPC_CANCELLED, now.stream_cancelled - x->seen.stream_cancelled);
	kvp_ctr_add(c, KVP_CTR_GRPC_IN_BYTES, now.bytes_received - x->seen.bytes_received);
	kvp_ctr_add(c, KVP_CTR_GRPC_OUT_BYTES, now.bytes_sent - x->seen.bytes_sent);
	kvp_ctr_add(c, KVP_CTR_GRPC_PAUSED, now.read_paused - x->seen.read_paused);
	kvp_ctr_add(c, KVP_CTR_GRPC_LOG, now.log_lines - x->seen.log_lines);
	x->seen = now;
	/* A pair that is broken for a moment changes nothing: the one in use stays. */
	if (x->tls.cert_path)
		(void)read_pair(x);
	if (x->ready != is_ready(x))
		say_health(x, is_ready(x));
	end_watches(x);
}
