/* ipc/grpc_server.c - listeners and the life of the whole server; streams are in grpc_stream.c. */
#include "ipc/grpc_locks.h"
#include "ipc/grpc_priv.h"

#include <arpa/inet.h>
#include <grpc/support/log.h>
#include <kvpick/err.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/poll.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define ACCEPT_AHEAD 64	   /* calls of a listener that the core may hand over before we ask for more */
#define METADATA_MAX 16384 /* header block of a gRPC call; HTTP headers travel in messages */
#define KEEPALIVE_ANSWER_MS 10000
#define LOG_PER_SECOND 10

/* The core's log function is one for the process; so is its user. */
static pthread_mutex_t log_mu = PTHREAD_MUTEX_INITIALIZER;
static struct kvp_grpc *log_user;

static void core_log(gpr_log_func_args *a)
{
	pthread_mutex_lock(&log_mu);
	struct kvp_grpc *g = log_user;
	if (g && a->severity >= GPR_LOG_SEVERITY_ERROR) {
		uint64_t now = (uint64_t)time(NULL);
		kvp_grpc_count(&g->n.log_lines, 1);
		kvp_grpc_count(&g->n.listeners_lost, strncmp(a->message, "Failed accept", 13) == 0);
		if (g->log_second != now)
			g->log_in_second = 0;
		g->log_second = now;
		if (g->cfg.log && g->log_in_second++ < LOG_PER_SECOND)
			g->cfg.log(g->cfg.log_ctx, a->message);
	}
	pthread_mutex_unlock(&log_mu);
}

static void log_to(struct kvp_grpc *g)
{
	pthread_mutex_lock(&log_mu);
	log_user = g;
	pthread_mutex_unlock(&log_mu);
	gpr_set_log_verbosity(GPR_LOG_SEVERITY_ERROR);
	gpr_set_log_function(core_log);
}

static void take_defaults(struct kvp_grpc_cfg *c)
{
	struct rlimit files;
	if (!c->message_max_bytes)
		c->message_max_bytes = 4u << 20;
	if (!c->stream_max)
		c->stream_max = 65536;
	if (!c->conn_stream_max)
		c->conn_stream_max = 4096;
	if (!c->conn_max)
		c->conn_max = 1024;
	/* Two for each connection, and as many again for those that are being refused. */
	if (getrlimit(RLIMIT_NOFILE, &files) == 0 && c->conn_max > files.rlim_cur / 3)
		c->conn_max = (uint32_t)(files.rlim_cur / 3) + 1;
	if (!c->handshake_ms)
		c->handshake_ms = 10000;
	if (!c->keepalive_ms)
		c->keepalive_ms = 30000;
	if (!c->memory_bytes)
		c->memory_bytes = 1ull << 30;
}

int kvp_grpc_new(struct kvp_grpc **out, const struct kvp_grpc_cfg *cfg)
{
	if (!cfg->method_cnt || cfg->method_cnt > KVP_GRPC_METHOD_MAX)
		return KVP_ERR_INVAL;
	struct kvp_grpc *g = calloc(1, sizeof(*g));
	if (!g)
		return KVP_ERR_SYS;
	g->cfg = *cfg;
	take_defaults(&g->cfg);
	g->drained_node.kind = KVP_GRPC_DRAINED;
	g->held_tail = &g->held;
	pthread_mutex_init(&g->cert_mu, NULL);
	g->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	int rc = g->event_fd < 0 ? KVP_ERR_SYS : kvp_grpc_conn_open(g);
	if (rc != KVP_OK)
		goto fail;
	log_to(g);
	kvp_grpc_locks_plain();
	grpc_init();
	g->quota = grpc_resource_quota_create("kvpick");
	grpc_resource_quota_resize(g->quota, g->cfg.memory_bytes);
	g->cq = grpc_completion_queue_create_for_next(NULL);
	if (pthread_create(&g->thread, NULL, kvp_grpc_core_thread, g) == 0) {
		*out = g;
		return KVP_OK;
	}
	rc = KVP_ERR_SYS;
	grpc_completion_queue_shutdown(g->cq);
	grpc_completion_queue_destroy(g->cq);
	grpc_resource_quota_unref(g->quota);
	grpc_shutdown();
	log_to(NULL);
	kvp_grpc_conn_close(g);
fail:
	if (g->event_fd >= 0)
		close(g->event_fd);
	pthread_mutex_destroy(&g->cert_mu);
	free(g);
	return rc;
}

int kvp_grpc_cert_set(struct kvp_grpc *g, const char *cert_pem, const char *key_pem)
{
	int rc = kvp_tls_check(cert_pem, key_pem);
	if (rc != KVP_OK)
		return rc;
	struct kvp_tls_pair next = {strdup(cert_pem), strdup(key_pem)}, last;
	if (!next.cert || !next.key) {
		kvp_tls_free(&next);
		return KVP_ERR_SYS;
	}
	pthread_mutex_lock(&g->cert_mu);
	last = g->cert;
	g->cert = next;
	g->cert_version++;
	pthread_mutex_unlock(&g->cert_mu);
	kvp_grpc_count(&g->n.cert_renewed, last.cert != NULL);
	kvp_tls_free(&last);
	return KVP_OK;
}

/* The core asks before every handshake, one at a time for a listener. */
static grpc_ssl_certificate_config_reload_status fetch_cert(
	void *user, grpc_ssl_server_certificate_config **config)
{
	struct kvp_grpc_listener *l = user;
	struct kvp_grpc *g = l->g;
	grpc_ssl_certificate_config_reload_status rc = GRPC_SSL_CERTIFICATE_CONFIG_RELOAD_UNCHANGED;
	kvp_grpc_count(&g->n.handshakes, 1);
	pthread_mutex_lock(&g->cert_mu);
	if (l->cert_seen != g->cert_version) {
		grpc_ssl_pem_key_cert_pair pair = {g->cert.key, g->cert.cert};
		/* Root certificates must be there, though clients are not asked for theirs. */
		*config = grpc_ssl_server_certificate_config_create(g->cert.cert, &pair, 1);
		l->cert_seen = g->cert_version;
		rc = GRPC_SSL_CERTIFICATE_CONFIG_RELOAD_NEW;
	}
	pthread_mutex_unlock(&g->cert_mu);
	return rc;
}

static grpc_server_credentials *credentials(struct kvp_grpc_listener *l, enum kvp_grpc_security security)
{
	if (security == KVP_GRPC_PLAINTEXT)
		return grpc_insecure_server_credentials_create();
	return grpc_ssl_server_credentials_create_with_options(
		grpc_ssl_server_credentials_create_options_using_config_fetcher(
			GRPC_SSL_DONT_REQUEST_CLIENT_CERTIFICATE, fetch_cert, l));
}

static grpc_arg int_arg(const char *key, uint32_t value)
{
	grpc_arg a = {.type = GRPC_ARG_INTEGER, .key = (char *)(uintptr_t)key};
	a.value.integer = value > INT32_MAX ? INT32_MAX : (int)value;
	return a;
}

static grpc_server *new_server(struct kvp_grpc *g)
{
	grpc_arg arg[] = {int_arg(GRPC_ARG_ALLOW_REUSEPORT, 1), int_arg(GRPC_ARG_ENABLE_CHANNELZ, 0),
		int_arg(GRPC_ARG_MAX_RECEIVE_MESSAGE_LENGTH, g->cfg.message_max_bytes),
		int_arg(GRPC_ARG_MAX_CONCURRENT_STREAMS, g->cfg.conn_stream_max),
		int_arg(GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS, g->cfg.handshake_ms),
		int_arg(GRPC_ARG_KEEPALIVE_TIME_MS, g->cfg.keepalive_ms),
		int_arg(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, KEEPALIVE_ANSWER_MS),
		int_arg(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1),
		int_arg(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0),
		int_arg(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 1000),
		int_arg(GRPC_ARG_ENABLE_PER_MESSAGE_DECOMPRESSION, 0),
		int_arg(GRPC_ARG_MAX_METADATA_SIZE, METADATA_MAX),
		{.type = GRPC_ARG_POINTER, .key = (char *)(uintptr_t)GRPC_ARG_RESOURCE_QUOTA}, {0}};
	size_t cnt = sizeof(arg) / sizeof(arg[0]) - 1;
	arg[cnt - 1].value.pointer.p = g->quota;
	arg[cnt - 1].value.pointer.vtable = grpc_resource_quota_arg_vtable();
	cnt += (size_t)kvp_grpc_conn_arg(g, &arg[cnt]);
	grpc_channel_args args = {cnt, arg};
	return grpc_server_create(&args, NULL);
}

/* Names are not resolved, so what we give to the core is a literal with a port, or a Unix path. */
static int check_addr(const char *addr, enum kvp_grpc_security security)
{
	char host[INET6_ADDRSTRLEN + 1];
	struct in6_addr bin;
	if (strncmp(addr, "unix:", 5) == 0)
		return addr[5] == '/' && strlen(addr + 5) < 108 && security == KVP_GRPC_PLAINTEXT;
	const char *colon = strrchr(addr, ':'), *end;
	int v6 = addr[0] == '[';
	end = v6 ? strchr(addr, ']') : colon;
	if (!colon || !end || (v6 && end + 1 != colon))
		return 0;
	size_t n = (size_t)(end - addr) - (size_t)v6;
	if (!n || n >= sizeof(host))
		return 0;
	memcpy(host, addr + v6, n);
	host[n] = 0;
	char *rest;
	unsigned long port = strtoul(colon + 1, &rest, 10);
	return inet_pton(v6 ? AF_INET6 : AF_INET, host, &bin) == 1 && colon[1] >= '0' && colon[1] <= '9' &&
	       !*rest && port <= 65535;
}

int kvp_grpc_listen_add(struct kvp_grpc *g, const struct kvp_grpc_listen *cfg, uint16_t *port)
{
	if (!check_addr(cfg->addr, cfg->security) || g->started || g->draining ||
		(cfg->security == KVP_GRPC_TLS && !g->cert_version))
		return KVP_ERR_INVAL;
	if (g->listener_cnt == KVP_GRPC_LISTEN_MAX)
		return KVP_ERR_FULL;
	struct kvp_grpc_listener *l = &g->listener[g->listener_cnt];
	*l = (struct kvp_grpc_listener){.g = g, .idx = g->listener_cnt, .methods = cfg->methods};
	l->down = (struct kvp_grpc_tag){KVP_GRPC_OP_DOWN, l};
	l->server = new_server(g);
	grpc_server_register_completion_queue(l->server, g->cq, NULL);
	grpc_server_credentials *creds = credentials(l, cfg->security);
	int is_unix = strncmp(cfg->addr, "unix:", 5) == 0;
	/* The socket's file must never be there with another mode, not even for an instant. */
	mode_t mask = is_unix ? umask(0177) : 0;
	int got = grpc_server_add_http2_port(l->server, cfg->addr, creds);
	if (is_unix)
		umask(mask);
	grpc_server_credentials_release(creds);
	if (got <= 0) {
		grpc_server_destroy(l->server);
		return KVP_ERR_SYS;
	}
	g->listener_cnt++;
	kvp_faa_ar_u64(&g->holds, 1);
	if (port)
		*port = is_unix ? 0 : (uint16_t)got;
	return KVP_OK;
}

int kvp_grpc_start(struct kvp_grpc *g)
{
	g->started = 1;
	for (uint32_t i = 0; i < g->listener_cnt; i++) {
		grpc_server_start(g->listener[i].server);
		for (uint32_t k = 0; k < ACCEPT_AHEAD; k++)
			if (kvp_grpc_accept(&g->listener[i]) != KVP_OK)
				return KVP_ERR_SYS;
	}
	return KVP_OK;
}

int kvp_grpc_fd(const struct kvp_grpc *g)
{
	return g->event_fd;
}

void kvp_grpc_drain(struct kvp_grpc *g)
{
	if (g->draining)
		return;
	g->draining = 1;
	if (!g->listener_cnt)
		kvp_grpc_push(g, &g->drained_node);
	for (uint32_t i = 0; i < g->listener_cnt; i++)
		grpc_server_shutdown_and_notify(g->listener[i].server, g->cq, &g->listener[i].down);
}

void kvp_grpc_abort_all(struct kvp_grpc *g)
{
	for (uint32_t i = 0; i < g->listener_cnt; i++)
		grpc_server_cancel_all_calls(g->listener[i].server);
}

void kvp_grpc_delete(struct kvp_grpc *g)
{
	struct kvp_grpc_event ev;
	if (!g)
		return;
	kvp_grpc_drain(g);
	kvp_grpc_abort_all(g);
	while (kvp_grpc_next(g, &ev) || !g->drained) {
		struct pollfd p = {.fd = g->event_fd, .events = POLLIN};
		poll(&p, 1, 1000);
	}
	for (uint32_t i = 0; i < g->listener_cnt; i++)
		grpc_server_destroy(g->listener[i].server);
	grpc_completion_queue_shutdown(g->cq);
	pthread_join(g->thread, NULL);
	grpc_completion_queue_destroy(g->cq);
	grpc_resource_quota_unref(g->quota);
	grpc_shutdown_blocking();
	log_to(NULL);
	kvp_grpc_conn_close(g);
	close(g->event_fd);
	kvp_tls_free(&g->cert);
	pthread_mutex_destroy(&g->cert_mu);
	free(g);
}

void kvp_grpc_stat(const struct kvp_grpc *g, struct kvp_grpc_stat *out)
{
	const struct kvp_grpc_counts *n = &g->n;
	kvp_grpc_conn_reap((struct kvp_grpc *)(uintptr_t)g);
	*out = (struct kvp_grpc_stat){
		.conn_max = g->cfg.conn_max,
		.listeners_lost = kvp_ld_rlx_u64(&n->listeners_lost),
		.conns = kvp_ld_rlx_u64(&n->conns),
		.streams = kvp_ld_rlx_u64(&n->streams),
		.conn_accepted = kvp_ld_rlx_u64(&n->conn_accepted),
		.conn_refused = kvp_ld_rlx_u64(&n->conn_refused),
		.stream_opened = kvp_ld_rlx_u64(&n->stream_opened),
		.stream_refused = kvp_ld_rlx_u64(&n->stream_refused),
		.stream_unknown = kvp_ld_rlx_u64(&n->stream_unknown),
		.stream_finished = kvp_ld_rlx_u64(&n->stream_finished),
		.stream_cancelled = kvp_ld_rlx_u64(&n->stream_cancelled),
		.msg_received = kvp_ld_rlx_u64(&n->msg_received),
		.msg_sent = kvp_ld_rlx_u64(&n->msg_sent),
		.bytes_received = kvp_ld_rlx_u64(&n->bytes_received),
		.bytes_sent = kvp_ld_rlx_u64(&n->bytes_sent),
		.msg_compressed = kvp_ld_rlx_u64(&n->msg_compressed),
		.read_paused = kvp_ld_rlx_u64(&n->read_paused),
		.log_lines = kvp_ld_rlx_u64(&n->log_lines),
		.handshakes = kvp_ld_rlx_u64(&n->handshakes),
		.cert_renewed = kvp_ld_rlx_u64(&n->cert_renewed),
	};
}
