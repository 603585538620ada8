/* Discovery from Kubernetes without a node around it, for tests/s_kube_roles.t: settings from the
 * environment, a region of its own, and an indexer that takes every worker. One line an event on stdout: post
 * ROLE RECORD, delete ID, ready 0|1. Ends with its standard input. */
#include "daemons/common/config.h"
#include "daemons/discovery/cluster.h"
#include "ipc/loop.h"
#include "shm/region.h"

#include <kvpick/clock.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define ME KVP_OWNER(1, 1)
#define INDEXER KVP_OWNER(2, 1)
#define BEAT_NS 5000000ull

static struct kvp_boot boot;
static struct kvp_config config;
static struct kvp_region region;
static struct kvp_loop *loop;
static struct kvp_catalog *catalog;
static struct kvp_cluster *cluster;
static int was_ready = -1;

static void play_indexer(void)
{
	static const char reply[] = "{\"lifecycle\":\"schedulable\"}";
	struct kvp_cmd_cell *c;
	while (kvp_cmd_next(&region.cmd, &c) == KVP_OK) {
		char *buf = kvp_cmd_buffer(&region.cmd, c);
		int is_post = c->type == KVP_CMD_WORKER_POST;
		if (is_post)
			printf("post %llu %.*s\n", (unsigned long long)c->arg[0], (int)c->len, buf);
		else
			printf("delete %llu\n", (unsigned long long)c->worker_id);
		memcpy(buf, reply, sizeof(reply));
		kvp_cmd_reply(&region.cmd, c, is_post ? 201 : 200, sizeof(reply) - 1);
	}
}

static void on_beat(void *ctx, struct kvp_timer *t)
{
	uint64_t now_ns = kvp_clock_mono_ns();
	(void)ctx;
	kvp_catalog_tend(catalog, now_ns, NULL, NULL);
	play_indexer();
	kvp_catalog_tend(catalog, now_ns, NULL, NULL);
	kvp_cluster_tend(cluster, now_ns);
	int ready = kvp_gate_is_open(&region.gates, KVP_GATE_WORKERS);
	if (ready != was_ready)
		printf("ready %d\n", ready);
	was_ready = ready;
	fflush(stdout);
	kvp_timer_set(loop, t, now_ns + BEAT_NS, on_beat, NULL);
}

static void on_stdin(void *ctx, int fd)
{
	char byte;
	(void)ctx;
	if (read(fd, &byte, 1) <= 0)
		kvp_loop_stop(loop);
}

static void on_fatal(void *ctx, int exit_code)
{
	(void)ctx;
	printf("fatal %d\n", exit_code);
	kvp_loop_stop(loop);
}

static int open_region(void)
{
	struct kvp_geom g = {.slot_max = 4,
		.rank_max = 256,
		.index_rank_max = 64,
		.block_max = 10000,
		.resv_max = 64,
		.active_block_max = 1024,
		.queued_max = 16};
	int fd = -1, rc = kvp_region_geom(&g);
	rc = rc ? rc : kvp_region_create(&g, &fd);
	rc = rc ? rc : kvp_region_join(fd, KVP_REGION_INDEXER, &region);
	if (rc)
		return rc;
	boot = (struct kvp_boot){.config = &config,
		.region = &region,
		.slots = &region.slots,
		.ctr = kvp_region_own_column(&region, 1),
		.owner = ME,
		.slot = 1};
	kvp_cmd_attach(&region.cmd, INDEXER);
	return KVP_OK;
}

int main(void)
{
	extern char **environ;
	static struct kvp_config_err err;
	struct kvp_timer beat = {.pos = 0};
	struct kvp_watch in = {.fd = -1};
	if (kvp_config_load(KVP_BIN_SUPERVISOR, 0, NULL, (const char *const *)environ, &config, NULL, &err)) {
		printf("config %s", err.text);
		return 2;
	}
	kvp_config_log_setup(&config, "cluster", -1);
	if (open_region() || kvp_loop_open(&loop, 0))
		return 3;
	struct kvp_catalog_cfg cc = {
		.ring = &region.cmd, .owner = ME, .region_gen = 1, .order = KVP_CATALOG_DELETE_FIRST};
	struct kvp_cluster_cfg kc = {.loop = loop, .boot = &boot, .on_fatal = on_fatal};
	if (kvp_catalog_open(&catalog, &cc))
		return 4;
	kc.catalog = catalog;
	if (kvp_cluster_open(&kc, &cluster) || kvp_loop_watch_fd(loop, &in, 0, on_stdin, NULL))
		return 5;
	on_beat(NULL, &beat);
	kvp_loop_run(loop);
	kvp_cluster_close(cluster);
	kvp_catalog_close(catalog);
	kvp_loop_close(loop);
	return 0;
}
