#include "daemons/common/boot_priv.h"

#include "daemons/common/config.h"
#include "daemons/common/log.h"
#include "shm/mark.h"
#include "shm/memo.h"
#include "shm/region.h"
#include <kvpick/clock.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

static int complain(int rc, const char *what)
{
	int saved = errno;
	fprintf(stderr, "kvpick: start of this process failed: %s: %s\n", what,
		rc == KVP_ERR_SYS ? strerror(saved) : kvp_strerror(rc));
	errno = saved;
	return rc;
}

/* boot_fd finds the last --boot-fd N or --boot-fd=N. */
static int boot_fd(int argc, char **argv)
{
	const char *v = NULL;
	for (int i = 1; i < argc; i++) {
		if (strcmp(argv[i], "--boot-fd") == 0)
			v = argv[i + 1];
		else if (strncmp(argv[i], "--boot-fd=", 10) == 0)
			v = argv[i] + 10;
	}
	char *end = NULL;
	unsigned long n = v ? strtoul(v, &end, 10) : 0;
	return v && *v && !*end && n <= 1 << 20 ? (int)n : -1;
}

static int read_desc(int fd, enum kvp_role role, struct kvp_boot_desc *d)
{
	const int seals = F_SEAL_WRITE | F_SEAL_SHRINK | F_SEAL_GROW;
	if ((fcntl(fd, F_GET_SEALS) & seals) != seals)
		return KVP_ERR_INVAL;
	if (pread(fd, d, sizeof(*d), 0) != (ssize_t)sizeof(*d) || d->magic != KVP_BOOT_MAGIC ||
		d->size != sizeof(*d))
		return KVP_ERR_LAYOUT;
	if (d->role != (uint32_t)role || d->slot_max > KVP_SLOT_MAX || d->slot >= d->slot_max ||
		KVP_OWNER_SLOT(d->owner) != d->slot || !memchr(d->run_dir, 0, sizeof(d->run_dir)) ||
		!memchr(d->node, 0, sizeof(d->node)))
		return KVP_ERR_INVAL;
	return KVP_OK;
}

/* live_under makes the kernel kill this process with its parent, and notices one that died before that. */
static int live_under(pid_t parent)
{
	if (prctl(PR_SET_PDEATHSIG, SIGKILL) != 0)
		return KVP_ERR_SYS;
	return getppid() == parent ? KVP_OK : KVP_ERR_CLOSED;
}

static int take_byte(const struct kvp_boot_desc *d, int *lock_fd)
{
	char path[KVP_BOOT_PATH_MAX + 64];
	snprintf(path, sizeof(path), "%s/%s.lock", d->run_dir, d->node);
	int fd = open(path, O_RDWR | O_CLOEXEC | O_NOFOLLOW);
	struct stat st;
	if (fd < 0 || fstat(fd, &st) != 0) {
		if (fd >= 0)
			close(fd);
		return KVP_ERR_SYS;
	}
	int rc = st.st_ino == d->lock_ino && st.st_dev == d->lock_dev ? kvp_slot_lock(fd, d->slot)
								      : KVP_ERR_INVAL;
	if (rc) {
		close(fd);
		return rc;
	}
	*lock_fd = fd;
	return KVP_OK;
}

static int own(int fd)
{
	return fd < 0 || fcntl(fd, F_SETFD, FD_CLOEXEC) == 0 ? KVP_OK : KVP_ERR_SYS;
}

static int keep_fds(const struct kvp_boot_desc *d, struct kvp_boot *b)
{
	int rc = own(d->region_fd);
	rc = rc ? rc : own(d->index_fd);
	b->region_fd = d->region_fd;
	b->index_fd = d->index_fd;
	for (uint32_t i = 0; i < KVP_SLOT_MAX; i++) {
		b->wake_fds[i] = i < d->slot_max ? d->wake_fd[i] : -1;
		rc = rc ? rc : own(b->wake_fds[i]);
	}
	b->wake_fd = b->wake_fds[d->slot];
	return rc;
}

static int join_region(struct kvp_boot *b, const struct kvp_boot_desc *d)
{
	enum kvp_region_access access = d->role == KVP_ROLE_INDEXER ? KVP_REGION_INDEXER : KVP_REGION_BOOKER;
	int rc = kvp_region_join(d->region_fd, access, b->region);
	if (rc)
		return rc;
	if (b->region->geom.region_gen != d->region_gen || b->region->slots.slot_max != d->slot_max)
		return KVP_ERR_LAYOUT;
	b->slots = &b->region->slots;
	b->slots->lock_fd = b->lock_fd;
	b->slots->wake_fd = b->wake_fds;
	b->region->cmd.slots = b->slots;
	return kvp_slot_activate(b->slots, d->owner);
}

int kvp_boot_child(int argc, char **argv, enum kvp_role role, struct kvp_boot *b)
{
	struct kvp_boot_desc d;
	memset(b, 0, sizeof(*b));
	int fd = boot_fd(argc, argv);
	if (fd < 0)
		return complain(KVP_ERR_NOTFOUND, "--boot-fd (this program is started by kvpick run)");
	int rc = read_desc(fd, role, &d);
	if (rc)
		return complain(rc, "description at --boot-fd");
	close(fd);
	rc = live_under(d.parent);
	if (rc)
		return complain(rc, "parent process");
	sigset_t none;
	sigemptyset(&none);
	sigprocmask(SIG_SETMASK, &none, NULL);
	signal(SIGPIPE, SIG_IGN);
	rc = take_byte(&d, &b->lock_fd);
	if (rc)
		return complain(rc, "lock file");
	b->role = role;
	b->instance = d.instance;
	b->slot = d.slot;
	b->slot_max = d.slot_max;
	b->owner = d.owner;
	b->parent = d.parent;
	memcpy(b->run_dir, d.run_dir, sizeof(b->run_dir));
	memcpy(b->node, d.node, sizeof(b->node));
	snprintf(b->name, sizeof(b->name), "%s[%u]/%d", kvp_role_name(role), d.instance, (int)getpid());
	rc = keep_fds(&d, b);
	if (rc)
		return complain(rc, "inherited descriptors");
	b->config = malloc(sizeof(*b->config));
	b->region = calloc(1, sizeof(*b->region));
	if (!b->config || !b->region)
		return complain(KVP_ERR_SYS, "memory");
	rc = kvp_config_from_fd(d.config_fd, b->config);
	if (rc)
		return complain(rc, "configuration");
	close(d.config_fd);
	kvp_config_log_setup(b->config, kvp_role_name(role), (int)d.instance);
	rc = join_region(b, &d);
	if (rc)
		return complain(rc, "region");
	b->ctr = kvp_region_own_column(b->region, b->slot);
	kvp_book_attach(&b->region->book, b->owner, b->ctr);
	kvp_ctr_add(b->ctr, KVP_CTR_PROC_STARTED, 1);
	kvp_log_count(&b->ctr->val[KVP_CTR_LOG_DROPPED]);
	return KVP_OK;
}

void kvp_boot_index_layout(const struct kvp_geom *g, struct kvp_boot_index *out)
{
	struct kvp_geom predicted;
	out->radix_off = 0;
	out->mark_off = kvp_align_up(kvp_radix_priv_footprint(g), KVP_PAGE);
	out->memo_off = out->mark_off + kvp_align_up(kvp_mark_footprint(g), KVP_PAGE);
	out->predicted_off = out->memo_off + kvp_align_up(kvp_memo_footprint(g), KVP_PAGE);
	out->bytes = out->predicted_off;
	if (kvp_region_predicted_geom(g, &predicted))
		out->bytes += kvp_align_up(kvp_radix_priv_footprint(&predicted), KVP_PAGE);
}

uint64_t kvp_boot_files(void)
{
	struct rlimit r;
	if (getrlimit(RLIMIT_NOFILE, &r) != 0)
		return 0;
	rlim_t before = r.rlim_cur;
	r.rlim_cur = r.rlim_max;
	return setrlimit(RLIMIT_NOFILE, &r) == 0 ? r.rlim_max : before;
}

int kvp_boot_exit(int rc)
{
	switch (rc) {
	case KVP_OK:
		return KVP_EXIT_OK;
	case KVP_ERR_NOTFOUND:
	case KVP_ERR_INVAL:
	case KVP_ERR_LAYOUT: /* programs of two builds: starting again cannot help */
		return KVP_EXIT_CONFIG;
	case KVP_ERR_CORRUPT:
		return KVP_EXIT_CORRUPT;
	case KVP_ERR_SYS:
		return KVP_EXIT_DEPEND;
	default:
		return KVP_EXIT_AGAIN;
	}
}

void kvp_boot_control(struct kvp_boot *b, enum kvp_ctl v)
{
	kvp_slot_control(b->slots, b->slot, v);
	kvp_slot_wake(b->slots, 0);
}

void kvp_boot_error(struct kvp_boot *b, int code, const char *module, uint32_t line, const char *text)
{
	/* A full log counts what it could not take by itself. */
	(void)kvp_errlog_put(&b->region->errlog, b->owner, kvp_clock_real_ns(), code, module, line, text);
}
