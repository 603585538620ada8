/* Boot protocol without a supervisor's loop: lock, region, what a child accepts, what a tool gets. */
#include "daemons/common/boot.h"
#include "daemons/common/boot_priv.h"
#include "daemons/common/config.h"
#include "shm/mark.h"
#include "shm/region.h"
#include "tests/tap.h"
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

static char dir[] = "/tmp/t_boot.XXXXXX";
static struct kvp_config cfg;
static struct kvp_geom geom = {.slot_max = 4,
	.rank_max = 64,
	.index_rank_max = 64,
	.resv_max = 64,
	.block_max = 10000,
	.active_block_max = 1024,
	.queued_max = 16,
	.part_max = KVP_PART_MAX};

/* in_child runs fn in a process of its own and answers its exit code. */
static int in_child(int (*fn)(void *ctx), void *ctx)
{
	fflush(stdout);
	pid_t pid = fork();
	if (pid == 0) {
		int null = open("/dev/null", O_WRONLY);
		dup2(null, STDERR_FILENO); /* refusals are spelled out there */
		_exit(fn(ctx));
	}
	int st = 0;
	waitpid(pid, &st, 0);
	return WIFEXITED(st) ? WEXITSTATUS(st) : -1;
}

static int boot_with(int fd, enum kvp_role role)
{
	static struct kvp_boot b;
	char num[16], prog[] = "test", flag[] = "--boot-fd";
	snprintf(num, sizeof(num), "%d", fd);
	char *argv[] = {prog, flag, num, NULL};
	return -kvp_boot_child(fd < 0 ? 1 : 3, argv, role, &b);
}

static int no_flag(void *ctx)
{
	(void)ctx;
	return boot_with(-1, KVP_ROLE_HTTPD);
}

struct attempt {
	struct kvp_boot_desc d;
	enum kvp_role role;
	int seal;
};

static int attempt(void *ctx)
{
	struct attempt *a = ctx;
	int fd = memfd_create("t", MFD_ALLOW_SEALING);
	if (write(fd, &a->d, sizeof(a->d)) != (ssize_t)sizeof(a->d))
		return 99;
	if (a->seal)
		fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE | F_SEAL_SHRINK | F_SEAL_GROW);
	return boot_with(fd, a->role);
}

static struct attempt good_attempt(const struct kvp_node *n, kvp_owner o)
{
	struct attempt a = {.role = KVP_ROLE_HTTPD, .seal = 1};
	struct kvp_boot_desc d = {.magic = KVP_BOOT_MAGIC, .size = sizeof(d)};
	d.region_gen = n->geom.region_gen;
	d.lock_dev = n->lock_dev;
	d.lock_ino = n->lock_ino;
	d.parent = getpid();
	d.role = KVP_ROLE_HTTPD;
	d.slot = KVP_OWNER_SLOT(o);
	d.slot_max = n->geom.slot_max;
	d.owner = o;
	d.region_fd = n->region_fd;
	d.index_fd = -1;
	d.config_fd = n->config_fd;
	memcpy(d.wake_fd, n->wake_fds, sizeof(d.wake_fd));
	snprintf(d.run_dir, sizeof(d.run_dir), "%s", n->run_dir);
	snprintf(d.node, sizeof(d.node), "%s", n->instance);
	a.d = d;
	return a;
}

static void children(struct kvp_node *n)
{
	kvp_owner o = kvp_slot_assign(n->slots, 2, KVP_ROLE_HTTPD, 0);
	struct attempt a = good_attempt(n, o);
	is_u64(in_child(no_flag, NULL), -KVP_ERR_NOTFOUND, "no --boot-fd: NOTFOUND");
	is_u64(in_child(attempt, &a), 0, "a complete description is accepted");
	ok(kvp_slot_control_get(n->slots, 2) == KVP_CTL_BOOT, "the slot is in BOOT");
	ok(kvp_ld_acq_u32(&n->slots->slot[2].state) == KVP_SLOT_ACTIVE, "and active");
	is_u64(kvp_ctr_sum(&n->region->counters, KVP_CTR_PROC_STARTED), 1, "its start is counted");
	ok(kvp_owner_dead(n->slots, o) == 1, "after its end its owner is dead");
	a.seal = 0;
	is_u64(in_child(attempt, &a), -KVP_ERR_INVAL, "a description without seals is refused");
	a = good_attempt(n, o);
	a.role = KVP_ROLE_INDEXER;
	is_u64(in_child(attempt, &a), -KVP_ERR_INVAL, "one for another role is refused");
	a = good_attempt(n, o);
	a.d.magic++;
	is_u64(in_child(attempt, &a), -KVP_ERR_LAYOUT, "one of another layout is refused");
	a = good_attempt(n, o);
	a.d.slot = a.d.slot_max;
	is_u64(in_child(attempt, &a), -KVP_ERR_INVAL, "a slot out of range is refused");
	a = good_attempt(n, o);
	a.d.parent = 1;
	is_u64(in_child(attempt, &a), -KVP_ERR_CLOSED, "another parent is noticed");
	a = good_attempt(n, o);
	a.d.lock_ino++;
	is_u64(in_child(attempt, &a), -KVP_ERR_INVAL, "another lock file is noticed");
	a = good_attempt(n, o);
	a.d.region_gen++;
	is_u64(in_child(attempt, &a), -KVP_ERR_LAYOUT, "another region is noticed");
	a = good_attempt(n, o);
	a.d.owner = KVP_OWNER(2, 9);
	is_u64(in_child(attempt, &a), -KVP_ERR_FENCED, "a stale owner is fenced");
	a = good_attempt(n, o);
	int fd = openat(n->dir_fd, "n.lock", O_RDWR | O_CLOEXEC);
	ok(kvp_slot_lock(fd, 2) == KVP_OK, "somebody else takes the byte");
	is_u64(in_child(attempt, &a), -KVP_ERR_EXISTS, "a held byte is noticed");
	close(fd);
	ok(kvp_slot_release(n->slots, o) == KVP_OK, "release");
}

static int look(void *ctx)
{
	const struct kvp_node *n = ctx;
	struct kvp_attach at;
	if (kvp_boot_attach(dir, "n", 10000, &at) || at.region_gen != n->geom.region_gen)
		return 1;
	struct kvp_region *r = calloc(1, sizeof(*r));
	if (mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, at.region_fd, 0) != MAP_FAILED ||
		errno != EACCES)
		return 2;
	if (kvp_region_join(at.region_fd, KVP_REGION_LOOK, r))
		return 3;
	if (kvp_slot_owner(&r->slots, 0) != n->owner || kvp_lock_held(at.lock_fd, KVP_LOCK_BYTE_NODE) != 1)
		return 4;
	kvp_region_leave(r);
	free(r);
	kvp_boot_detach(&at);
	return 0;
}

static void tools(struct kvp_node *n)
{
	uint32_t denied = 0;
	fflush(stdout);
	pid_t pid = fork();
	if (pid == 0)
		_exit(look(n));
	int st = -1, answered = 0;
	while (waitpid(pid, &st, WNOHANG) == 0) {
		struct pollfd p = {.fd = n->sock_fd, .events = POLLIN};
		poll(&p, 1, 10);
		answered += kvp_node_serve(n, &denied);
	}
	ok(WIFEXITED(st) && WEXITSTATUS(st) == 0, "a tool gets the region, read-only (%d)", WEXITSTATUS(st));
	ok(answered == 1 && denied == 0, "one answer");
}

static void index_segment(struct kvp_node *n)
{
	struct kvp_boot_index x;
	struct stat st;
	struct kvp_mark m;
	kvp_boot_index_layout(&n->geom, &x);
	ok(fstat(n->index_fd, &st) == 0 && (uint64_t)st.st_size == x.bytes, "the index segment has its size");
	char *p = mmap(NULL, x.bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, n->index_fd, 0);
	ok(p != MAP_FAILED && kvp_mark_join(p + x.mark_off, &n->geom, &m) == KVP_OK, "with the marks in it");
	munmap(p, x.bytes);
}

static void node(void)
{
	struct kvp_node n, second;
	struct kvp_node_err e;
	struct kvp_attach at;
	ok(kvp_boot_attach(dir, "n", 0, &at) == KVP_ERR_TIMEOUT, "no node: the tool gives up");
	chmod(dir, 0777);
	ok(kvp_node_open(&n, &cfg, dir, "n", &e) == KVP_ERR_INVAL,
		"a directory where others may write is refused");
	chmod(dir, 0700);
	ok(kvp_node_open(&n, &cfg, dir, "n", &e) == KVP_OK, "open");
	ok(kvp_node_open(&second, &cfg, dir, "n", &e) == KVP_ERR_EXISTS && strstr(e.text, "already runs"),
		"the instance cannot be opened twice");
	uint32_t denied = 0;
	ok(kvp_node_serve(&n, &denied) == 0, "nobody waits at the socket");
	struct kvp_geom bad = geom;
	bad.rank_max = 0;
	ok(kvp_node_region(&n, &bad, &e) == KVP_ERR_INVAL, "impossible capacities are refused");
	ok(kvp_node_region(&n, &geom, &e) == KVP_OK, "region (%s)", e.text);
	children(&n);
	tools(&n);
	index_segment(&n);
	uint64_t gen = n.geom.region_gen;
	ok(kvp_node_region(&n, &geom, &e) == KVP_OK && n.geom.region_gen != gen,
		"a new region, another generation");
	kvp_node_close(&n);
	char path[64];
	snprintf(path, sizeof(path), "%s/n.lock", dir);
	int fd = open(path, O_RDWR | O_CLOEXEC);
	ok(kvp_slot_lock(fd, 3) == KVP_OK, "a process of the earlier run lives on");
	ok(kvp_node_open(&n, &cfg, dir, "n", &e) == KVP_ERR_EXISTS && strstr(e.text, "byte 4"),
		"the start is refused");
	close(fd);
	ok(kvp_node_open(&n, &cfg, dir, "n", &e) == KVP_OK, "and accepted when it is gone");
	kvp_node_close(&n);
	unlink(path);
}

int main(void)
{
	static struct kvp_config_err err;
	const char *const env[] = {NULL};
	if (TAP_IS_TSAN)
		return skip_all(TAP_PROCESSES);
	ok(mkdtemp(dir) && kvp_config_load(KVP_BIN_SUPERVISOR, 0, NULL, env, &cfg, NULL, &err) == KVP_OK,
		"setup");
	node();
	rmdir(dir);
	return done();
}
