#include "daemons/discovery/catalog.h"
#include "daemons/discovery/cluster.h"
#include "daemons/discovery/workers_file.h"
#include "daemons/common/apply_config.h"
#include "daemons/common/boot.h"
#include "daemons/common/config.h"
#include "daemons/common/log.h"
#include "ipc/loop.h"
#include "shm/region.h"
#include <kvpick/clock.h>

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/signalfd.h>
#include <unistd.h>

/* The discovery process: keeps the workers of a file, or of Kubernetes, registered. */
struct discovery {
	struct kvp_boot boot;
	struct kvp_loop *loop;
	struct kvp_catalog *catalog;
	struct kvp_cluster *cluster; /* NULL: the workers are those of the file */
	struct kvp_workers_watch file;
	struct kvp_watch wake, signals;
	struct kvp_timer beat;
	int signal_fd, draining, says_run, is_bad, exit_code;
	uint64_t failed; /* passes, as logged */
	char ids_path[KVP_BOOT_PATH_MAX + 64];
};

static void on_refused(void *ctx, uint64_t worker_id, int status, const char *text, size_t len)
{
	static struct kvp_log_limit limit;
	uint64_t left = 0;
	struct discovery *d = ctx;
	kvp_ctr_add(d->boot.ctr, KVP_CTR_DISC_REFUSED, 1);
	if (kvp_log_limit_pass(&limit, kvp_clock_mono_ns(), 1000000000ull, &left))
		KVP_LOG_W("discovery.refused", "worker=%llu status=%d answer=%.*s suppressed=%llu",
			(unsigned long long)worker_id, status, (int)(len < 300 ? len : 300), text,
			(unsigned long long)left);
}

static void tend(struct discovery *d)
{
	struct kvp_catalog_stat st;
	kvp_catalog_tend(d->catalog, kvp_clock_mono_ns(), on_refused, d);
	kvp_catalog_stat(d->catalog, &st);
	kvp_ctr_set(d->boot.ctr, KVP_CTR_DISC_WANTED, st.wanted);
	kvp_ctr_set(d->boot.ctr, KVP_CTR_DISC_SCHEDULABLE, st.schedulable);
	kvp_ctr_add(d->boot.ctr, KVP_CTR_DISC_FAILED, st.failed - d->failed);
	d->failed = st.failed;
	if (d->cluster) {
		kvp_cluster_tend(d->cluster, kvp_clock_mono_ns());
		return;
	}
	/* What a predecessor registered stands as long as the file says nothing better. */
	int stands = kvp_catalog_is_settled(d->catalog) || (d->is_bad && kvp_catalog_has_ids(d->catalog));
	if (!d->says_run && !d->draining && stands) {
		d->says_run = 1;
		kvp_boot_control(&d->boot, KVP_CTL_RUN);
		kvp_gate_open(&d->boot.region->gates, KVP_GATE_WORKERS);
		KVP_LOG_I("discovery.run", "workers=%u schedulable=%u", st.wanted, st.schedulable);
	}
}

/* set_roles: without roles in the topology they mean nothing; with them a worker without one gets no
 * requests. */
static void set_roles(const struct discovery *d, struct kvp_workers_list *list)
{
	uint32_t missing = 0;
	for (uint32_t i = 0; i < list->cnt; i++) {
		missing += list->want[i].role == KVP_PART_AGGREGATED;
		if (!d->boot.config->eff.disaggregated)
			list->want[i].role = KVP_PART_AGGREGATED;
	}
	if (missing && d->boot.config->eff.disaggregated)
		KVP_LOG_W("discovery.workers", "reason=role_label_missing workers=%u effect=%s", missing,
			"they get no requests: the topology is disaggregated");
}

/* read_file takes a new version. A bad one changes nothing. KVP_OK; KVP_ERR_* as read. */
static int read_file(struct discovery *d)
{
	struct kvp_workers_list list;
	char err[512];
	uint64_t twice = 0;
	int rc = kvp_workers_file_read(d->file.path, &list, err, sizeof(err));
	if (!rc) {
		set_roles(d, &list);
		rc = kvp_catalog_set(d->catalog, list.want, list.cnt, &twice);
		if (rc == KVP_ERR_EXISTS)
			snprintf(err, sizeof(err), "worker_id %llu comes twice", (unsigned long long)twice);
		else if (rc)
			snprintf(err, sizeof(err), "%s", kvp_strerror(rc));
		else
			KVP_LOG_I("discovery.workers", "file=%s workers=%u", d->file.path, list.cnt);
		kvp_workers_list_free(&list);
	}
	kvp_ctr_add(d->boot.ctr, rc ? KVP_CTR_DISC_BAD : KVP_CTR_DISC_READ, 1);
	d->is_bad = rc != KVP_OK;
	if (rc)
		KVP_LOG_E("discovery.workers", "KVPICK_WORKERS_FILE=%s error=%s effect=%s", d->file.path, err,
			"the last good version stays");
	return rc;
}

static void on_wake(void *ctx, int fd)
{
	struct discovery *d = ctx;
	(void)fd;
	kvp_slot_awake(d->boot.slots);
	tend(d);
}

static int before_sleep(void *ctx)
{
	struct discovery *d = ctx;
	kvp_slot_sleep(d->boot.slots);
	tend(d);
	return 0;
}

static void on_signal(void *ctx, int fd)
{
	struct discovery *d = ctx;
	struct signalfd_siginfo si;
	if (read(fd, &si, sizeof(si)) != (ssize_t)sizeof(si))
		return;
	d->draining = 1;
	kvp_boot_control(&d->boot, KVP_CTL_DRAIN);
	kvp_loop_stop(d->loop);
}

static void on_beat(void *ctx, struct kvp_timer *t)
{
	struct discovery *d = ctx;
	uint64_t now_ns = kvp_loop_now_ns(d->loop);
	struct kvp_loop_stat st;
	kvp_slot_beat(d->boot.slots, d->boot.slot, now_ns / 1000000);
	kvp_loop_stat_take(d->loop, &st);
	kvp_ctr_max(d->boot.ctr, KVP_CTR_LOOP_MAX_NS, st.turn_max_ns);
	if (!d->cluster && kvp_workers_watch_poll(&d->file, now_ns))
		(void)read_file(d);
	tend(d);
	kvp_timer_set(d->loop, t, now_ns + d->boot.config->slot_beat_ms * 1000000, on_beat, d);
}

static void on_fatal(void *ctx, int exit_code)
{
	struct discovery *d = ctx;
	d->exit_code = exit_code;
	kvp_loop_stop(d->loop);
}

static int open_cluster(struct discovery *d)
{
	struct kvp_cluster_cfg c = {
		.loop = d->loop, .boot = &d->boot, .catalog = d->catalog, .on_fatal = on_fatal, .ctx = d};
	int rc = kvp_cluster_open(&c, &d->cluster);
	if (!rc)
		kvp_boot_control(&d->boot, KVP_CTL_RUN);
	return rc;
}

static int open_signals(struct discovery *d)
{
	sigset_t set;
	sigemptyset(&set);
	sigaddset(&set, SIGTERM);
	sigaddset(&set, SIGINT);
	sigprocmask(SIG_BLOCK, &set, NULL);
	d->signal_fd = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
	if (d->signal_fd < 0)
		return KVP_ERR_SYS;
	return kvp_loop_watch_fd(d->loop, &d->signals, d->signal_fd, on_signal, d);
}

static int open_all(struct discovery *d)
{
	struct kvp_catalog_cfg c = {.ring = &d->boot.region->cmd,
		.owner = d->boot.owner,
		.cat = &d->boot.region->cat,
		.ids_path = d->ids_path,
		.region_gen = d->boot.region->geom.region_gen,
		.order = d->boot.config->workers_file[0] ? KVP_CATALOG_POST_FIRST : KVP_CATALOG_DELETE_FIRST};
	snprintf(d->ids_path, sizeof(d->ids_path), "%s/%s.workers", d->boot.run_dir, d->boot.node);
	d->file.path = d->boot.config->workers_file;
	int rc = kvp_loop_open(&d->loop, 0);
	rc = rc ? rc : open_signals(d);
	rc = rc ? rc : kvp_catalog_open(&d->catalog, &c);
	rc = rc ? rc : kvp_loop_watch_fd(d->loop, &d->wake, d->boot.wake_fd, on_wake, d);
	if (rc)
		return rc;
	kvp_loop_before_sleep(d->loop, before_sleep, d);
	return d->boot.config->workers_file[0] ? KVP_OK : open_cluster(d);
}

int main(int argc, char **argv)
{
	static struct discovery d;
	int rc = kvp_boot_child(argc, argv, KVP_ROLE_DISCOVERY, &d.boot);
	if (rc)
		return kvp_boot_exit(rc);
	kvp_config_log_setup(d.boot.config, "discovery", (int)d.boot.instance);
	rc = open_all(&d);
	if (rc) {
		KVP_LOG_E("discovery.start", "error=%s errno=%s", kvp_strerror(rc), strerror(errno));
		return rc == KVP_ERR_INVAL ? KVP_EXIT_CONFIG : KVP_EXIT_AGAIN;
	}
	/* A file that is wrong when the node starts is a mistake of whoever starts it; later it is not. */
	if (!d.cluster && !kvp_catalog_has_ids(d.catalog)) {
		rc = read_file(&d);
		if (rc && rc != KVP_ERR_AGAIN)
			return KVP_EXIT_CONFIG;
	}
	on_beat(&d, &d.beat);
	rc = kvp_loop_run(d.loop);
	kvp_cluster_close(d.cluster);
	kvp_catalog_close(d.catalog);
	kvp_loop_close(d.loop);
	return d.exit_code ? d.exit_code : rc ? KVP_EXIT_AGAIN : KVP_EXIT_OK;
}
