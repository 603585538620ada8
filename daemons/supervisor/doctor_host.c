#include "daemons/supervisor/doctor.h"

#include "ipc/loop.h"
#include "ipc/tls_cert.h"
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/sysinfo.h>
#include <unistd.h>

#define GIB (1024.0 * 1024 * 1024)
#define OWN_BYTES                                                                                            \
	(512ull << 20) /* memory of the processes beside the shared one; bodies under way come on top */

/* What the node does with its region: make it, fix its size, open it again read-only. */
void doc_memory_file(struct doctor *d)
{
	static const char *const todo =
		"allow memfd_create (seccomp profile) and mount /proc; without them no node starts";
	char path[40];
	int fd = memfd_create("kvpick-doctor", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	if (fd < 0) {
		doc_say(d, DOC_FAIL, "memory file", todo, "memfd_create: %s", strerror(errno));
		return;
	}
	snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
	int again = -1;
	if (ftruncate(fd, 4096) != 0 || fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0)
		doc_say(d, DOC_FAIL, "memory file", todo, "size and seals of a memory file: %s",
			strerror(errno));
	else if ((again = open(path, O_RDONLY | O_CLOEXEC)) < 0)
		doc_say(d, DOC_FAIL, "memory file", todo, "%s: %s", path, strerror(errno));
	else
		doc_say(d, DOC_OK, "memory file", NULL, "memfd_create, seals, /proc/self/fd");
	if (again >= 0)
		close(again);
	close(fd);
}

void doc_io_uring(struct doctor *d)
{
	struct kvp_loop *loop = NULL;
	struct rlimit r = {0, 0};
	getrlimit(RLIMIT_MEMLOCK, &r);
	if (kvp_loop_open_backend(&loop, 0, KVP_LOOP_URING) == KVP_OK) {
		kvp_loop_close(loop);
		doc_say(d, DOC_OK, "io_uring", NULL, "a ring with provided buffers can be made");
		return;
	}
	int err = errno;
	const char *todo =
		"kernel 5.19 or newer has what kvpick needs; epoll costs a little speed, nothing else";
	if (err == EPERM || err == EACCES)
		todo = "allow io_uring in the seccomp profile (deploy/kubernetes/seccomp) and set "
		       "kernel.io_uring_disabled=0; epoll costs a little speed, nothing else";
	else if (err == ENOMEM)
		todo = "raise the limit of locked memory (ulimit -l, LimitMEMLOCK=); epoll costs a little "
		       "speed, "
		       "nothing else";
	doc_say(d, DOC_WARN, "io_uring", todo,
		"no ring: %s; the node runs on epoll (locked memory: %llu KiB)", strerror(err),
		(unsigned long long)r.rlim_cur / 1024);
}

/* The most descriptors that one process of the node may want. */
static uint64_t files_wanted(const struct kvp_config *c)
{
	uint64_t most = c->http_max_connections;
	if (c->eff.epp_on && c->epp_max_connections > most)
		most = c->epp_max_connections;
	/* A listened-to rank has two sockets with an event descriptor each. */
	if (c->use_kv_events && c->index_ranks * 4 > most)
		most = c->index_ranks * 4;
	return most + 64;
}

void doc_open_files(struct doctor *d)
{
	struct rlimit r = {0, 0};
	uint64_t want = files_wanted(d->cfg);
	getrlimit(RLIMIT_NOFILE, &r);
	unsigned long long hard = r.rlim_max, need = want;
	if (r.rlim_max < want)
		doc_say(d, DOC_WARN, "open files",
			"raise the hard limit (ulimit -Hn, LimitNOFILE=), or lower "
			"KVPICK_HTTP_MAX_CONNECTIONS, "
			"KVPICK_EPP_MAX_CONNECTIONS or KVPICK_INDEX_RANKS",
			"hard limit %llu, a process may want %llu", hard, need);
	else
		doc_say(d, DOC_OK, "open files", NULL, "hard limit %llu, a process may want %llu", hard,
			need);
}

void doc_run_dir(struct doctor *d)
{
	const char *dir = d->cfg->run_dir;
	struct stat st;
	char parent[sizeof(d->cfg->run_dir)];
	if (stat(dir, &st) != 0) {
		snprintf(parent, sizeof(parent), "%s", dir);
		char *slash = strrchr(parent, '/');
		if (slash)
			slash[slash == parent] = 0;
		if (slash && access(parent, W_OK | X_OK) == 0)
			doc_say(d, DOC_OK, "run directory", NULL, "%s will be made", dir);
		else
			doc_say(d, DOC_FAIL, "run directory",
				"make it, owned by the user of the node, with mode 0700; or set "
				"KVPICK_RUN_DIR",
				"%s is missing and can't be made in %s", dir, slash ? parent : ".");
	} else if (!S_ISDIR(st.st_mode)) {
		doc_say(d, DOC_FAIL, "run directory", "set KVPICK_RUN_DIR to another path",
			"%s is no directory", dir);
	} else if (st.st_uid != geteuid()) {
		doc_say(d, DOC_FAIL, "run directory",
			"run doctor as the user of the node, or give it a directory of its own (in a "
			"container: a "
			"subdirectory of the volume, which kvpick makes itself)",
			"%s belongs to user %u, this is user %u", dir, (unsigned)st.st_uid,
			(unsigned)geteuid());
	} else if (st.st_mode & 022) {
		doc_say(d, DOC_FAIL, "run directory", "chmod 0700", "%s: others may write in it (mode %03o)",
			dir, (unsigned)(st.st_mode & 0777));
	} else if (access(dir, W_OK | X_OK) != 0) {
		doc_say(d, DOC_FAIL, "run directory", "make it writable for the user of the node", "%s: %s",
			dir, strerror(errno));
	} else {
		doc_say(d, DOC_OK, "run directory", NULL, "%s, own and writable (mode %03o)", dir,
			(unsigned)(st.st_mode & 0777));
	}
}

/* -- memory -- */

struct limit {
	uint64_t bytes;
	char where[1200];
};

static int read_number(const char *path, uint64_t *out)
{
	unsigned long long v;
	FILE *f = fopen(path, "re");
	int ok = f && fscanf(f, "%llu", &v) == 1;
	if (f)
		fclose(f);
	if (ok)
		*out = v;
	return ok;
}

static void take_limit(struct limit *l, const char *path)
{
	uint64_t v;
	if (read_number(path, &v) && v < l->bytes) {
		l->bytes = v;
		snprintf(l->where, sizeof(l->where), "%s", path);
	}
}

/* The least limit of the control groups above pid; UINT64_MAX without one. In a container the group is the
 * root. */
static void group_limit(pid_t pid, struct limit *l)
{
	char name[40], line[1024], path[1150];
	l->bytes = UINT64_MAX;
	l->where[0] = 0;
	take_limit(l, "/sys/fs/cgroup/memory.max");
	take_limit(l, "/sys/fs/cgroup/memory/memory.limit_in_bytes");
	snprintf(name, sizeof(name), "/proc/%d/cgroup", (int)pid);
	FILE *f = fopen(name, "re");
	while (f && fgets(line, sizeof(line), f)) {
		line[strcspn(line, "\n")] = 0;
		char *at = strstr(line, ":memory:") ? strstr(line, ":memory:") + 8 : NULL;
		const char *base = "/sys/fs/cgroup/memory", *file = "memory.limit_in_bytes";
		if (!at && strncmp(line, "0::", 3) == 0) {
			at = line + 3;
			base = "/sys/fs/cgroup";
			file = "memory.max";
		}
		for (; at && *at == '/' && at[1]; *strrchr(at, '/') = 0) {
			snprintf(path, sizeof(path), "%s%s/%s", base, at, file);
			take_limit(l, path);
		}
	}
	if (f)
		fclose(f);
}

/* need answers the bytes of region and index segment when they are used up; 0 = can't be built. */
static uint64_t need(const struct kvp_geom *want)
{
	struct kvp_geom g = *want;
	struct kvp_boot_index x;
	struct stat st = {.st_size = 0};
	int fd = -1;
	g.region_gen = g.salt[0] = g.salt[1] = 0;
	if (kvp_region_geom(&g) != KVP_OK || kvp_region_create(&g, &fd) != KVP_OK)
		return 0;
	kvp_boot_index_layout(&g, &x);
	int ok = fstat(fd, &st) == 0;
	close(fd);
	return ok ? (uint64_t)st.st_size + x.bytes : 0;
}

/* fitting answers a KVPICK_MAX_BLOCKS that fits, with two digits that are not 0; 0 = none. */
static uint64_t fitting(const struct doctor *d, uint64_t bytes)
{
	struct kvp_geom g = d->plan->geom;
	for (; g.block_max >= 10000; g.block_max = g.block_max / 10 * 9) {
		uint64_t unit = 1, n;
		while (g.block_max / unit >= 100)
			unit *= 10;
		g.block_max -= g.block_max % unit;
		g.predicted_max = g.predicted_max ? g.block_max : 0;
		n = need(&g);
		if (n && n <= bytes)
			return g.block_max;
	}
	return 0;
}

static void say_memory(struct doctor *d, uint64_t bytes, uint64_t own, const struct limit *l)
{
	char todo[240];
	double all = (double)(bytes + own) / GIB;
	int group = l->where[0] == '/';
	uint64_t room = l->bytes > own ? l->bytes - own : 0, fits = bytes > room ? fitting(d, room) : 0;
	int n = snprintf(
		todo, sizeof(todo), group ? "raise the limit to %.1f GiB" : "it may want %.1f GiB", all);
	if (fits)
		snprintf(todo + n, sizeof(todo) - (size_t)n, ", or set KVPICK_MAX_BLOCKS=%llu",
			(unsigned long long)fits);
	else
		snprintf(todo + n, sizeof(todo) - (size_t)n, ", or choose smaller capacities");
	enum doc_result r = bytes <= room ? DOC_OK : group && bytes > l->bytes ? DOC_FAIL : DOC_WARN;
	doc_say(d, r, "memory", r == DOC_OK ? NULL : todo,
		"shared memory takes %.2f GiB when its capacities are used up, the processes up to %.2f GiB; "
		"%s: "
		"%.2f GiB",
		(double)bytes / GIB, (double)own / GIB, l->where, (double)l->bytes / GIB);
}

void doc_memory(struct doctor *d)
{
	struct sysinfo si;
	struct limit group, ram = {.where = "memory of this machine"};
	uint64_t bytes = need(&d->plan->geom), own = OWN_BYTES;
	if (!bytes) {
		doc_say(d, DOC_FAIL, "memory",
			"smaller capacities (KVPICK_MAX_BLOCKS and others), or a limit on address "
			"space (ulimit -v) lifted",
			"a region of these capacities can't be made: %s", strerror(errno));
		return;
	}
	if (d->cfg->eff.api_port)
		own += d->cfg->httpd_processes * d->cfg->http_max_held_bytes;
	if (d->cfg->eff.epp_on)
		own += d->cfg->epp_body_budget_bytes;
	group_limit(d->region->base ? d->at.supervisor : getpid(), &group);
	ram.bytes = sysinfo(&si) == 0 ? (uint64_t)si.totalram * si.mem_unit : UINT64_MAX;
	say_memory(d, bytes, own, group.bytes < ram.bytes ? &group : &ram);
}

void doc_cpu(struct doctor *d)
{
	unsigned long long quota, period;
	FILE *f = fopen("/sys/fs/cgroup/cpu.max", "re");
	if (f && fscanf(f, "%llu %llu", &quota, &period) == 2 && period)
		doc_say(d, DOC_WARN, "cpu",
			"remove the limit: a node that has used up its share stands still for up to a "
			"period, and with it every request",
			"limit of %.2f processors (/sys/fs/cgroup/cpu.max)", (double)quota / (double)period);
	if (f)
		fclose(f);
}

void doc_certificate(struct doctor *d)
{
	const struct kvp_config *c = d->cfg;
	struct kvp_tls_pair pair = {NULL, NULL};
	if (!c->eff.epp_on || !c->secure_serving || !c->epp_tls_cert_file[0])
		return;
	int rc = kvp_tls_load(c->epp_tls_cert_file, c->epp_tls_key_file, &pair);
	if (rc)
		doc_say(d, DOC_FAIL, "certificate",
			"give a PEM certificate and the private key that belongs to it", "%s and %s: %s",
			c->epp_tls_cert_file, c->epp_tls_key_file,
			rc == KVP_ERR_SYS ? strerror(errno) : "do not belong together or can't be parsed");
	else
		doc_say(d, DOC_OK, "certificate", NULL, "%s and its key belong together",
			c->epp_tls_cert_file);
	kvp_tls_free(&pair);
}
