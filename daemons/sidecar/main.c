#include <errno.h>
#include <kvpick/err.h>
#include <malloc.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include "daemons/common/boot.h"
#include "daemons/common/log.h"
#include "daemons/sidecar/metrics.h"

/* Bodies of some hundred KB come and go: pages given back to the kernel each time cost more than all copies.
 * Larger blocks are mapped, and go at once. */
#define MMAP_MIN_BYTES (1 << 20)
#define TRIM_MIN_BYTES (8 << 20)
#define POOL_IDLE_MAX 256
#define POOL_IDLE_MS 60000

extern char **environ;

static struct kvp_sidecar sidecar;
static struct kvp_watch signals;

static void wake(const struct kvp_worker *w)
{
	uint64_t one = 1;
	if (write(w->wake_fd, &one, sizeof(one)) < 0)
		KVP_LOG_W("sidecar.drain", "errno=%s", strerror(errno));
}

static void on_wake(void *ctx, int fd)
{
	uint64_t n;
	if (read(fd, &n, sizeof(n)) != (ssize_t)sizeof(n) || !kvp_ld_acq_u32(&sidecar.is_draining))
		return;
	kvp_worker_drain(ctx);
	kvp_worker_check(ctx); /* another one may have ended */
}

static void on_signal(void *ctx, int fd)
{
	struct signalfd_siginfo si;
	(void)ctx;
	if (read(fd, &si, sizeof(si)) != (ssize_t)sizeof(si))
		return;
	KVP_LOG_I("sidecar.drain", "signal=%u", si.ssi_signo);
	kvp_st_rel_u32(&sidecar.is_draining, 1); /* pairs with: on_wake */
	for (unsigned i = 0; i < sidecar.worker_cnt; i++)
		wake(&sidecar.worker[i]);
}

static int open_signals(struct kvp_worker *w)
{
	sigset_t set;
	sigemptyset(&set);
	sigaddset(&set, SIGTERM);
	sigaddset(&set, SIGINT);
	sigprocmask(SIG_BLOCK, &set, NULL);
	signal(SIGPIPE, SIG_IGN);
	int fd = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
	return fd < 0 ? KVP_ERR_SYS : kvp_loop_watch_fd(w->loop, &signals, fd, on_signal, NULL);
}

static void on_tls_failed(void *ctx, const char *why)
{
	struct kvp_worker *w = ctx;
	uint64_t left_out = 0;
	if (kvp_log_limit_pass(&w->tls_warned, kvp_loop_now_ns(w->loop), UINT64_C(1000000000), &left_out))
		KVP_LOG_W("sidecar.tls", "reason=%s suppressed=%llu", why, (unsigned long long)left_out);
}

static int open_tls(struct kvp_worker *w)
{
	char why[256] = "";
	const struct kvp_config *cfg = w->cfg;
	const char *name = cfg->sidecar_engine_name[0] ? cfg->sidecar_engine_name : "localhost";
	int rc = kvp_tls_client_open(&w->tls, cfg->sidecar_engine_ca_file, name, why, sizeof(why));
	if (rc)
		KVP_LOG_E("sidecar.tls", "reason=%s", why);
	return rc;
}

static int open_worker(struct kvp_worker *w, unsigned id)
{
	const struct kvp_config *cfg = &sidecar.cfg;
	*w = (struct kvp_worker){.sidecar = &sidecar, .cfg = cfg, .id = id, .wake_fd = -1};
	snprintf(w->engine, sizeof(w->engine), "localhost:%u", (unsigned)cfg->decode_engine_port);
	snprintf(w->base, sizeof(w->base), "%s", cfg->sidecar_engine_base_path);
	/* Engines bind one of the two, often only the first. */
	kvp_addr_ip(&w->engine_at.addr[0], "127.0.0.1", (uint16_t)cfg->decode_engine_port);
	kvp_addr_ip(&w->engine_at.addr[1], "::1", (uint16_t)cfg->decode_engine_port);
	w->engine_at.cnt = 2;
	for (size_t n = strlen(w->base); n && w->base[n - 1] == '/'; n--)
		w->base[n - 1] = 0;
	int rc = kvp_loop_open(&w->loop, 0);
	if (rc)
		return rc;
	w->pool = (struct kvp_leg_pool){.loop = w->loop,
		.idle_max = POOL_IDLE_MAX,
		.idle_ms = POOL_IDLE_MS,
		.head_max_bytes = 65536,
		.names = {.loop = w->loop},
		.on_tls_failed = on_tls_failed,
		.ctx = w};
	if (cfg->sidecar_engine_tls && open_tls(w))
		return KVP_ERR_INVAL;
	w->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (w->wake_fd < 0 || kvp_loop_watch_fd(w->loop, &w->wake, w->wake_fd, on_wake, w))
		return KVP_ERR_SYS;
	return kvp_worker_listen(w, cfg->sidecar_threads > 1 ? KVP_LISTEN_REUSEPORT : KVP_LISTEN_PLAIN);
}

/* By the thread that ran the loop: a ring belongs to one. */
static void close_worker(struct kvp_worker *w)
{
	if (!w->loop)
		return;
	kvp_worker_end(w);
	kvp_loop_unwatch(&w->wake);
	kvp_loop_close(w->loop);
	w->loop = NULL;
	kvp_tls_client_close(w->tls);
}

static void run_worker(struct kvp_worker *w)
{
	if (kvp_loop_run(w->loop))
		KVP_LOG_W("sidecar.loop", "worker=%u errno=%s", w->id, strerror(errno));
}

static void *worker_thread(void *arg)
{
	run_worker(arg);
	close_worker(arg);
	kvp_faa_ar_u32(&sidecar.other_cnt, UINT32_MAX); /* pairs with: kvp_worker_check */
	wake(&sidecar.worker[0]);
	return NULL;
}

static int open_all(void)
{
	const struct kvp_config *cfg = &sidecar.cfg;
	kvp_http_parse_init();
	sidecar.worker_cnt = (unsigned)cfg->sidecar_threads;
	sidecar.held.max = cfg->eff.sidecar_max_held_bytes;
	sidecar.worker = calloc(sidecar.worker_cnt, sizeof(*sidecar.worker));
	if (!sidecar.worker)
		return KVP_ERR_SYS;
	for (unsigned i = 0; i < sidecar.worker_cnt; i++) {
		int rc = open_worker(&sidecar.worker[i], i);
		if (rc)
			return rc;
	}
	int rc = open_signals(&sidecar.worker[0]);
	return rc ? rc : kvp_sc_metrics_open(&sidecar);
}

static int run_all(void)
{
	pthread_t tid[64];
	unsigned n = 1;
	sidecar.other_cnt = sidecar.worker_cnt - 1;
	for (; n < sidecar.worker_cnt; n++)
		if (pthread_create(&tid[n], NULL, worker_thread, &sidecar.worker[n]))
			break;
	int rc = n < sidecar.worker_cnt ? KVP_ERR_SYS : KVP_OK;
	if (!rc)
		run_worker(&sidecar.worker[0]);
	for (unsigned i = 1; !rc && i < n; i++)
		pthread_join(tid[i], NULL);
	return rc;
}

int main(int argc, char **argv)
{
	struct kvp_config *cfg = &sidecar.cfg;
	static const char *const adapter[] = {"none", "vllm_nixl", "sglang", "trtllm"};
	int code = kvp_config_main(KVP_BIN_SIDECAR, argc - 1, (const char *const *)argv + 1,
		(const char *const *)environ, cfg, NULL);
	if (code >= 0)
		return code;
	kvp_config_log_setup(cfg, "sidecar", -1);
	kvp_boot_files();
	mallopt(M_MMAP_THRESHOLD, MMAP_MIN_BYTES);
	mallopt(M_TRIM_THRESHOLD, TRIM_MIN_BYTES);
	int rc = open_all();
	if (rc) {
		KVP_LOG_E("sidecar.start", "port=%u error=%s errno=%s", (unsigned)cfg->sidecar_port,
			kvp_strerror(rc), strerror(errno));
		return rc == KVP_ERR_INVAL || errno == EADDRINUSE || errno == EADDRNOTAVAIL || errno == EACCES
			       ? KVP_EXIT_CONFIG
			       : KVP_EXIT_AGAIN;
	}
	kvp_config_log(cfg);
	KVP_LOG_I("sidecar.run", "port=%u engine=%s profile=%s adapter=%s protocol=%s sglang=%s model=%s",
		(unsigned)cfg->sidecar_port, sidecar.worker[0].engine, cfg->sidecar_profile ? "llmd" : "dyn",
		adapter[cfg->eff.sidecar_adapter], cfg->vllm_nixl_protocol, cfg->sidecar_sglang_version,
		cfg->model_name);
	rc = run_all();
	kvp_sc_metrics_close();
	for (unsigned i = 0; i < sidecar.worker_cnt; i++) {
		close_worker(&sidecar.worker[i]);
		close(sidecar.worker[i].wake_fd);
	}
	free(sidecar.worker);
	KVP_LOG_I("sidecar.end", "rc=%d", rc);
	return rc ? KVP_EXIT_AGAIN : KVP_EXIT_OK;
}
