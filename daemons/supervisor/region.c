#include "daemons/supervisor/sup.h"

#include "daemons/common/log.h"
#include "shm/region.h"
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/sysinfo.h>
#include <unistd.h>

/* memory_limit answers what this process may use at most, bytes; UINT64_MAX = no limit known. */
static uint64_t memory_limit(void)
{
	uint64_t limit = UINT64_MAX;
	unsigned long long v;
	struct sysinfo si;
	if (sysinfo(&si) == 0)
		limit = (uint64_t)si.totalram * si.mem_unit;
	FILE *f = fopen("/sys/fs/cgroup/memory.max", "re");
	if (f && fscanf(f, "%llu", &v) == 1 && v < limit)
		limit = v;
	if (f)
		fclose(f);
	return limit;
}

/* warn_size says when the capacities, used up, need more than there is; the memory is sparse until then. */
static void warn_size(const struct sup *s)
{
	struct kvp_boot_index x;
	kvp_boot_index_layout(&s->node.geom, &x);
	uint64_t need = s->node.region->total_bytes + x.bytes, limit = memory_limit();
	if (need > limit)
		KVP_LOG_W("node.memory", "region_bytes=%llu limit_bytes=%llu", (unsigned long long)need,
			(unsigned long long)limit);
}

/* A peer to recover from is configured, or will be found by discovery, and there is who asks it. */
static int recovers(const struct sup *s)
{
	const struct kvp_config *c = s->cfg;
	int is_found = c->epp_peer_service[0] && c->eff.dump_port && c->eff.discovery_on;
	return s->path[KVP_ROLE_PEER][0] && c->use_kv_events && (c->indexer_peers[0] || is_found);
}

int sup_region(struct sup *s)
{
	struct kvp_node_err e = {""};
	int rc = kvp_node_region(&s->node, &s->geom, &e);
	if (rc) {
		KVP_LOG_E("node.region", "error=%s", e.text[0] ? e.text : kvp_strerror(rc));
		return rc == KVP_ERR_INVAL ? KVP_EXIT_CONFIG : KVP_EXIT_DEPEND;
	}
	if (recovers(s))
		kvp_recov_begin(&s->node.region->recov, kvp_clock_mono_ns());
	s->ctr = kvp_region_own_column(s->node.region, 0);
	kvp_ctr_add(s->ctr, KVP_CTR_PROC_STARTED, 1);
	kvp_ctr_set(s->ctr, KVP_CTR_SUP_REBUILT, s->rebuilds);
	kvp_slot_control(s->node.slots, 0, KVP_CTL_RUN);
	KVP_LOG_I("node.region", "generation=%llx bytes=%llu slots=%u blocks=%llu",
		(unsigned long long)s->node.geom.region_gen, (unsigned long long)s->node.region->total_bytes,
		s->node.geom.slot_max, (unsigned long long)s->node.geom.block_max);
	warn_size(s);
	return 0;
}

/* oldest picks the archive name to write: one that is missing, else the one written longest ago. */
static void oldest(const struct sup *s, char *name, size_t max)
{
	struct timespec best = {0, 0};
	for (int i = 0; i < SUP_ARCHIVE_MAX; i++) {
		char n[64];
		struct stat st;
		snprintf(n, sizeof(n), "%s.errors.%d", s->node.instance, i);
		int have = fstatat(s->node.dir_fd, n, &st, AT_SYMLINK_NOFOLLOW) == 0;
		int older = have &&
			    (st.st_mtim.tv_sec < best.tv_sec ||
				    (st.st_mtim.tv_sec == best.tv_sec && st.st_mtim.tv_nsec < best.tv_nsec));
		if (i == 0 || !have || older) {
			snprintf(name, max, "%s", n);
			best = have ? st.st_mtim : best;
		}
		if (!have)
			return;
	}
}

void sup_archive(struct sup *s)
{
	char name[64];
	oldest(s, name, sizeof(name));
	unlinkat(s->node.dir_fd, name, 0);
	int fd = openat(s->node.dir_fd, name, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
	FILE *f = fd >= 0 ? fdopen(fd, "w") : NULL;
	if (!f) {
		KVP_LOG_W("errlog.archive", "file=%s error=%s", name, strerror(errno));
		if (fd >= 0)
			close(fd);
		return;
	}
	struct kvp_errlog_entry e;
	unsigned cnt = 0;
	fprintf(f,
		"# region generation %" PRIx64 ", lost %" PRIu64
		"\n# first_ns last_ns count slot code module:line text\n",
		s->node.geom.region_gen, kvp_errlog_lost(&s->node.region->errlog));
	for (uint32_t i = 0; i < KVP_ERRLOG_MAX; i++)
		if (kvp_errlog_get(&s->node.region->errlog, i, &e) == KVP_OK) {
			fprintf(f, "%" PRIu64 " %" PRIu64 " %" PRIu64 " %u %d %s:%u %s\n", e.first_ns,
				e.last_ns, e.cnt, e.slot, e.code, e.module, e.line, e.text);
			cnt++;
		}
	int bad = ferror(f);
	bad |= fclose(f);
	if (bad)
		KVP_LOG_W("errlog.archive", "file=%s error=write", name);
	else
		KVP_LOG_N("errlog.archive", "file=%s errors=%u", name, cnt);
}
