#include "daemons/common/boot_priv.h"

#include "daemons/common/config.h"
#include "shm/mark.h"
#include "shm/memo.h"
#include "shm/region.h"
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#define OLD_CHILDREN_MS 2000 /* how long children of a killed supervisor may take to be gone */
#define ARG_MAX_CNT 16

__attribute__((format(printf, 3, 4))) static int fail(struct kvp_node_err *e, int rc, const char *fmt, ...)
{
	va_list ap;
	va_start(ap, fmt);
	vsnprintf(e->text, sizeof(e->text), fmt, ap);
	va_end(ap);
	return rc;
}

static void shut(int *fd)
{
	if (*fd >= 0)
		close(*fd);
	*fd = -1;
}

static int open_dir(struct kvp_node *n, struct kvp_node_err *e)
{
	struct stat st;
	if (mkdir(n->run_dir, 0700) != 0 && errno != EEXIST)
		return fail(e, KVP_ERR_SYS, "run directory %s: %s", n->run_dir, strerror(errno));
	n->dir_fd = open(n->run_dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (n->dir_fd < 0 || fstat(n->dir_fd, &st) != 0)
		return fail(e, KVP_ERR_SYS, "run directory %s: %s", n->run_dir, strerror(errno));
	if (st.st_uid != geteuid())
		return fail(e, KVP_ERR_INVAL, "run directory %s belongs to user %u", n->run_dir,
			(unsigned)st.st_uid);
	if (st.st_mode & 022)
		return fail(e, KVP_ERR_INVAL, "run directory %s: others may write in it (mode %03o)",
			n->run_dir, (unsigned)(st.st_mode & 0777));
	return KVP_OK;
}

static void read_pid(int fd, char pid[16])
{
	ssize_t r = pread(fd, pid, 15, 0);
	pid[r > 0 ? r : 0] = 0;
	pid[strspn(pid, "0123456789")] = 0;
}

/* old_child answers the first byte above 0 that is held, 0 if none is. */
static uint32_t old_child(int fd)
{
	struct flock f = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = 1, .l_len = KVP_SLOT_MAX};
	return fcntl(fd, F_OFD_GETLK, &f) == 0 && f.l_type != F_UNLCK ? (uint32_t)f.l_start : 0;
}

static int take_lock(struct kvp_node *n, struct kvp_node_err *e)
{
	char name[64], pid[16];
	struct stat st;
	snprintf(name, sizeof(name), "%s.lock", n->instance);
	n->lock_fd = openat(n->dir_fd, name, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
	if (n->lock_fd < 0 || fstat(n->lock_fd, &st) != 0)
		return fail(e, KVP_ERR_SYS, "lock file %s/%s: %s", n->run_dir, name, strerror(errno));
	int rc = kvp_lock_byte(n->lock_fd, KVP_LOCK_BYTE_NODE);
	if (rc == KVP_ERR_EXISTS) {
		read_pid(n->lock_fd, pid);
		return fail(e, rc, "instance '%s' already runs (supervisor pid %s, run directory %s)",
			n->instance, *pid ? pid : "unknown", n->run_dir);
	}
	if (rc)
		return fail(e, rc, "lock file %s/%s: %s", n->run_dir, name, strerror(errno));
	uint32_t held = old_child(n->lock_fd);
	for (int ms = 0; held && ms < OLD_CHILDREN_MS; ms += 10) {
		poll(NULL, 0, 10);
		held = old_child(n->lock_fd);
	}
	if (held)
		return fail(e, KVP_ERR_EXISTS,
			"instance '%s': a process of an earlier run still lives (lock byte %u of %s/%s)",
			n->instance, held, n->run_dir, name);
	n->lock_dev = st.st_dev;
	n->lock_ino = st.st_ino;
	/* Only for the message above; the byte is what counts. */
	int len = snprintf(pid, sizeof(pid), "%d\n", (int)getpid());
	if (ftruncate(n->lock_fd, 0) != 0 || pwrite(n->lock_fd, pid, (size_t)len, 0) != len)
		return fail(e, KVP_ERR_SYS, "lock file %s/%s: %s", n->run_dir, name, strerror(errno));
	return KVP_OK;
}

static int open_socket(struct kvp_node *n, struct kvp_node_err *e)
{
	char name[64];
	struct sockaddr_un a = {.sun_family = AF_UNIX};
	snprintf(name, sizeof(name), "%s.sock", n->instance);
	if (unlinkat(n->dir_fd, name, 0) != 0 && errno != ENOENT)
		return fail(e, KVP_ERR_SYS, "control socket %s/%s: %s", n->run_dir, name, strerror(errno));
	/* By way of the directory's descriptor: run directories may be longer than a socket address. */
	snprintf(a.sun_path, sizeof(a.sun_path), "/proc/self/fd/%d/%s", n->dir_fd, name);
	n->sock_fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	mode_t old = umask(0177);
	int ok = n->sock_fd >= 0 && bind(n->sock_fd, (struct sockaddr *)&a, sizeof(a)) == 0 &&
		 listen(n->sock_fd, 16) == 0;
	umask(old);
	return ok ? KVP_OK
		  : fail(e, KVP_ERR_SYS, "control socket %s/%s: %s", n->run_dir, name, strerror(errno));
}

int kvp_node_open(struct kvp_node *n, const struct kvp_config *cfg, const char *run_dir, const char *instance,
	struct kvp_node_err *err)
{
	memset(n, 0, sizeof(*n));
	n->config = cfg;
	n->dir_fd = n->lock_fd = n->sock_fd = -1;
	n->region_fd = n->region_ro_fd = n->index_fd = n->config_fd = -1;
	for (uint32_t i = 0; i < KVP_SLOT_MAX; i++)
		n->wake_fds[i] = -1;
	if (strlen(run_dir) >= sizeof(n->run_dir) || strlen(instance) > 32)
		return fail(err, KVP_ERR_INVAL, "run directory or instance name too long");
	snprintf(n->run_dir, sizeof(n->run_dir), "%s", run_dir);
	snprintf(n->instance, sizeof(n->instance), "%s", instance);
	int rc = open_dir(n, err);
	rc = rc ? rc : take_lock(n, err);
	rc = rc ? rc : open_socket(n, err);
	if (rc) {
		shut(&n->sock_fd);
		shut(&n->lock_fd);
		shut(&n->dir_fd);
	}
	return rc;
}

static int index_segment(struct kvp_node *n, const struct kvp_geom *g)
{
	struct kvp_boot_index x;
	struct kvp_geom predicted;
	kvp_boot_index_layout(g, &x);
	n->index_fd = memfd_create("kvpick-index", MFD_CLOEXEC);
	if (n->index_fd < 0 || ftruncate(n->index_fd, (off_t)x.bytes) != 0)
		return KVP_ERR_SYS;
	char *mem = mmap(NULL, x.bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, n->index_fd, 0);
	if (mem == MAP_FAILED)
		return KVP_ERR_SYS;
	int rc = kvp_radix_priv_new(mem + x.radix_off, g);
	rc = rc ? rc : kvp_mark_new(mem + x.mark_off, g);
	rc = rc ? rc : kvp_memo_new(mem + x.memo_off, g);
	if (!rc && kvp_region_predicted_geom(g, &predicted))
		rc = kvp_radix_priv_new(mem + x.predicted_off, &predicted);
	munmap(mem, x.bytes);
	return rc;
}

/* What the configuration names is listed before any other process exists. */
static int configured_peers(struct kvp_node *n)
{
	char one[KVP_PEERS_TEXT_MAX + 1];
	size_t pos = 0;
	while (kvp_config_list_next(n->config->replica_sync_peers, &pos, one, sizeof(one))) {
		int rc = kvp_peers_add(&n->region->peers, n->owner, one, (uint32_t)strlen(one));
		if (rc && rc != KVP_ERR_EXISTS)
			return rc;
	}
	return KVP_OK;
}

int kvp_node_region(struct kvp_node *n, const struct kvp_geom *geom, struct kvp_node_err *err)
{
	err->text[0] = 0;
	kvp_node_drop(n);
	n->geom = *geom;
	n->geom.region_gen = n->geom.salt[0] = n->geom.salt[1] = 0;
	int rc = kvp_region_geom(&n->geom);
	if (rc)
		return fail(err, rc, "capacities cannot be built");
	rc = kvp_region_create(&n->geom, &n->region_fd);
	if (rc)
		return fail(
			err, rc, "shared memory: %s", rc == KVP_ERR_SYS ? strerror(errno) : kvp_strerror(rc));
	rc = index_segment(n, &n->geom);
	if (rc)
		return fail(
			err, rc, "index segment: %s", rc == KVP_ERR_SYS ? strerror(errno) : kvp_strerror(rc));
	char path[40];
	snprintf(path, sizeof(path), "/proc/self/fd/%d", n->region_fd);
	n->region_ro_fd = open(path, O_RDONLY | O_CLOEXEC);
	n->config_fd = kvp_config_to_memfd(n->config);
	if (n->region_ro_fd < 0 || n->config_fd < 0)
		return fail(err, KVP_ERR_SYS, "descriptors: %s", strerror(errno));
	for (uint32_t i = 0; i < n->geom.slot_max; i++) {
		n->wake_fds[i] = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
		if (n->wake_fds[i] < 0)
			return fail(err, KVP_ERR_SYS, "eventfd: %s", strerror(errno));
	}
	struct kvp_region *r = calloc(1, sizeof(*r));
	if (!r)
		return fail(err, KVP_ERR_SYS, "no memory");
	rc = kvp_region_join(n->region_fd, KVP_REGION_SUPERVISOR, r);
	if (rc) {
		free(r);
		return fail(err, rc, "own region: %s", kvp_strerror(rc));
	}
	n->region = r;
	n->slots = &r->slots;
	n->slots->lock_fd = n->lock_fd;
	n->slots->wake_fd = n->wake_fds;
	n->owner = kvp_slot_assign(n->slots, 0, KVP_ROLE_SUPERVISOR, 0);
	rc = kvp_slot_activate(n->slots, n->owner);
	return rc ? rc : configured_peers(n);
}

static int seal_desc(const struct kvp_boot_desc *d)
{
	int fd = memfd_create("kvpick-boot", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	if (fd < 0)
		return -1;
	if (write(fd, d, sizeof(*d)) == (ssize_t)sizeof(*d) &&
		fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0)
		return fd;
	close(fd);
	return -1;
}

static void inherit(int fd)
{
	if (fd >= 0)
		fcntl(fd, F_SETFD, 0);
}

/* exec_child runs between fork and exec: only async-signal-safe calls. */
__attribute__((noreturn)) static void exec_child(
	const struct kvp_boot_desc *d, int desc_fd, const char *program, char *const *argv)
{
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	if (getppid() != d->parent)
		_exit(KVP_EXIT_AGAIN);
	sigset_t none;
	sigemptyset(&none);
	sigprocmask(SIG_SETMASK, &none, NULL);
	inherit(desc_fd);
	inherit(d->region_fd);
	inherit(d->index_fd);
	inherit(d->config_fd);
	for (uint32_t i = 0; i < d->slot_max; i++)
		inherit(d->wake_fd[i]);
	execv(program, argv);
	_exit(KVP_EXIT_DEPEND);
}

int kvp_node_spawn(struct kvp_node *n, uint32_t idx, const char *program, const char *const *extra,
	pid_t *pid, int *pidfd)
{
	const struct kvp_slot_shm *slot = &n->slots->slot[idx];
	struct kvp_boot_desc d = {.magic = KVP_BOOT_MAGIC, .size = sizeof(d)};
	d.region_gen = n->geom.region_gen;
	d.lock_dev = n->lock_dev;
	d.lock_ino = n->lock_ino;
	d.parent = getpid();
	d.role = slot->role;
	d.instance = slot->instance;
	d.slot = idx;
	d.slot_max = n->geom.slot_max;
	d.owner = kvp_slot_owner(n->slots, idx);
	d.region_fd = n->region_fd;
	d.index_fd = slot->role == KVP_ROLE_INDEXER ? n->index_fd : -1;
	d.config_fd = n->config_fd;
	for (uint32_t i = 0; i < KVP_SLOT_MAX; i++)
		d.wake_fd[i] = n->wake_fds[i];
	memcpy(d.run_dir, n->run_dir, sizeof(d.run_dir));
	memcpy(d.node, n->instance, sizeof(d.node));
	int desc = seal_desc(&d);
	if (desc < 0)
		return KVP_ERR_SYS;
	char num[16], flag[] = "--boot-fd", name[KVP_BOOT_PATH_MAX];
	char *argv[ARG_MAX_CNT + 4];
	int argc = 0;
	snprintf(num, sizeof(num), "%d", desc);
	snprintf(name, sizeof(name), "%s", program);
	argv[argc++] = name;
	for (int i = 0; extra && extra[i] && i < ARG_MAX_CNT; i++)
		argv[argc++] =
			(char *)(uintptr_t)extra[i]; /* execv takes them as they are and changes nothing */
	argv[argc++] = flag;
	argv[argc++] = num;
	argv[argc] = NULL;
	pid_t child = fork();
	if (child == 0)
		exec_child(&d, desc, program, argv);
	close(desc);
	if (child < 0)
		return KVP_ERR_SYS;
	int fd = (int)syscall(SYS_pidfd_open, child, 0);
	if (fd < 0) {
		kill(child, SIGKILL); /* ours and not reaped: the number cannot have been reused */
		waitpid(child, NULL, 0);
		return KVP_ERR_SYS;
	}
	fcntl(fd, F_SETFD, FD_CLOEXEC);
	*pid = child;
	*pidfd = fd;
	return KVP_OK;
}

/* answer sends one message into an empty socket buffer: it cannot block. */
static int answer(const struct kvp_node *n, int sock)
{
	struct kvp_boot_hello h = {.magic = KVP_HELLO_MAGIC,
		.size = sizeof(h),
		.region_gen = n->geom.region_gen,
		.supervisor = getpid()};
	union {
		struct cmsghdr hdr;
		char space[CMSG_SPACE(sizeof(int))];
	} ctl;
	memset(&ctl, 0, sizeof(ctl));
	struct iovec iov = {&h, sizeof(h)};
	struct msghdr m = {.msg_iov = &iov,
		.msg_iovlen = 1,
		.msg_control = ctl.space,
		.msg_controllen = sizeof(ctl.space)};
	ctl.hdr.cmsg_level = SOL_SOCKET;
	ctl.hdr.cmsg_type = SCM_RIGHTS;
	ctl.hdr.cmsg_len = CMSG_LEN(sizeof(int));
	memcpy(CMSG_DATA(&ctl.hdr), &n->region_ro_fd, sizeof(int));
	return sendmsg(sock, &m, MSG_DONTWAIT | MSG_NOSIGNAL) == (ssize_t)sizeof(h);
}

int kvp_node_serve(struct kvp_node *n, uint32_t *denied)
{
	int cnt = 0;
	for (;;) {
		int sock = accept4(n->sock_fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
		if (sock < 0)
			return cnt;
		struct ucred peer;
		socklen_t len = sizeof(peer);
		if (getsockopt(sock, SOL_SOCKET, SO_PEERCRED, &peer, &len) != 0 || peer.uid != geteuid())
			(*denied)++;
		else if (n->region)
			cnt += answer(n, sock);
		close(sock);
	}
}

void kvp_node_drop(struct kvp_node *n)
{
	if (n->region) {
		kvp_region_leave(n->region);
		free(n->region);
	}
	n->region = NULL;
	n->slots = NULL;
	n->owner = 0;
	shut(&n->region_fd);
	shut(&n->region_ro_fd);
	shut(&n->index_fd);
	shut(&n->config_fd);
	for (uint32_t i = 0; i < KVP_SLOT_MAX; i++)
		shut(&n->wake_fds[i]);
}

void kvp_node_close(struct kvp_node *n)
{
	char name[64];
	kvp_node_drop(n);
	snprintf(name, sizeof(name), "%s.sock", n->instance);
	if (n->sock_fd >= 0)
		unlinkat(n->dir_fd, name, 0); /* a name that stays is taken over by the next start */
	shut(&n->sock_fd);
	shut(&n->lock_fd);
	shut(&n->dir_fd);
}
