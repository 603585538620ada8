/* Slot table: life cycle, generations, liveness by lock byte with real processes, wake-ups. */
#include "shm/slot.h"
#include "tests/procs.h"
#include "tests/tap.h"
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

_Static_assert(sizeof(struct kvp_slot_shm) == 384, "slot size");
_Static_assert(offsetof(struct kvp_slot_shm, beat_ms) == 128, "own words on their own lines");
_Static_assert(offsetof(struct kvp_slot_shm, wake_need) == 256, "wake word on its own lines");

static struct kvp_geom geom = {.slot_max = 8, .region_gen = 7};

static void life_cycle(void)
{
	struct kvp_geom bad = {.slot_max = KVP_SLOT_MAX + 1};
	is_u64(kvp_slot_footprint(&bad), 0, "too many slots have no footprint");
	is_u64(kvp_slot_footprint(NULL), 0, "no geometry has no footprint");
	char *mem = shared(kvp_slot_footprint(&geom));
	struct kvp_slots s;
	ok(kvp_slot_new(NULL, &geom) == KVP_ERR_INVAL, "new refuses NULL");
	ok(kvp_slot_new(mem + 8, &geom) == KVP_ERR_INVAL, "new refuses misaligned memory");
	ok(kvp_slot_join(mem, &geom, &s) == KVP_ERR_AGAIN, "join before new answers AGAIN");
	ok(kvp_slot_new(mem, &geom) == KVP_OK, "new");
	struct kvp_geom other = {.slot_max = 9};
	ok(kvp_slot_join(mem, &other, &s) == KVP_ERR_LAYOUT, "join with another size answers LAYOUT");
	ok(kvp_slot_join(mem, &geom, &s) == KVP_OK, "join");
	is_u64(kvp_slot_check(&s), 0, "a fresh table has no faults");
	kvp_slot_delete(mem);
	ok(kvp_slot_join(mem, &geom, &s) == KVP_ERR_AGAIN, "join after delete answers AGAIN");
	munmap(mem, kvp_slot_footprint(&geom));
}

static void ownership(struct kvp_slots *s)
{
	kvp_owner a = kvp_slot_assign(s, 3, KVP_ROLE_HTTPD, 1);
	ok(a == KVP_OWNER(3, 1), "the first owner of slot 3 has generation 1");
	is_u64(kvp_slot_assign(s, 3, KVP_ROLE_HTTPD, 1), 0, "a taken slot is not assigned");
	is_u64(kvp_slot_assign(s, 8, KVP_ROLE_HTTPD, 1), 0, "a slot beyond the table is not assigned");
	is_u64(kvp_slot_owner(s, 3), a, "owner reads back");
	ok(kvp_slot_activate(s, KVP_OWNER(3, 2)) == KVP_ERR_FENCED,
		"activation with a wrong generation is fenced");
	ok(kvp_slot_activate(s, a) == KVP_OK && s->self == a, "activation");
	ok(kvp_slot_control_get(s, 3) == KVP_CTL_BOOT, "an active slot starts in BOOT");
	kvp_slot_control(s, 3, KVP_CTL_RUN);
	ok(kvp_slot_control_get(s, 3) == KVP_CTL_RUN, "control reads back");
	uint32_t idx = 0;
	ok(kvp_slot_find(s, KVP_ROLE_HTTPD, 1, &idx) == KVP_OK && idx == 3, "find by role and instance");
	ok(kvp_slot_find(s, KVP_ROLE_HTTPD, 2, &idx) == KVP_ERR_NOTFOUND, "find of a missing instance");
	ok(kvp_slot_release(s, KVP_OWNER(3, 9)) == KVP_ERR_NOTFOUND, "release of a stale owner");
	ok(kvp_slot_release(s, a) == KVP_OK && kvp_slot_owner(s, 3) == 0, "release");
	ok(kvp_slot_assign(s, 3, KVP_ROLE_HTTPD, 1) == KVP_OWNER(3, 2),
		"the next owner has the next generation");
	ok(kvp_slot_release(s, KVP_OWNER(3, 2)) == KVP_OK, "release again");
	s->slot[3].gen = 0xffffff;
	ok(kvp_slot_assign(s, 3, KVP_ROLE_HTTPD, 1) == KVP_OWNER(3, 1), "the generation wraps past 0");
	ok(kvp_slot_release(s, KVP_OWNER(3, 1)) == KVP_OK, "release after the wrap");
	s->self = 0;
}

static pid_t holder(struct kvp_slots *s, const char *path, kvp_owner o, int ready)
{
	pid_t pid = fork();
	if (pid == 0) {
		int fd = open(path, O_RDWR | O_CLOEXEC);
		char c = kvp_slot_lock(fd, KVP_OWNER_SLOT(o)) == KVP_OK && kvp_slot_activate(s, o) == KVP_OK
				 ? 'y'
				 : 'n';
		if (write(ready, &c, 1) != 1)
			_exit(1);
		for (;;)
			pause();
	}
	return pid;
}

static void liveness(struct kvp_slots *s)
{
	char path[] = "/tmp/t_slot.XXXXXX";
	int tmp = mkstemp(path), p[2];
	char c = 0;
	s->lock_fd = open(path, O_RDWR | O_CLOEXEC);
	kvp_owner o = kvp_slot_assign(s, 2, KVP_ROLE_INDEXER, 0);
	ok(pipe(p) == 0 && tmp >= 0 && s->lock_fd >= 0, "setup");
	is_u64((uint64_t)kvp_slot_alive(s->lock_fd, 2), 0, "nobody holds the byte yet");
	pid_t pid = holder(s, path, o, p[1]);
	ok(read(p[0], &c, 1) == 1 && c == 'y', "a process takes byte and slot");
	ok(kvp_slot_alive(s->lock_fd, 2) == 1 && kvp_slot_alive(s->lock_fd, 1) == 0,
		"exactly its byte is held");
	ok(kvp_slot_lock(s->lock_fd, 2) == KVP_ERR_EXISTS, "nobody else gets it");
	ok(kvp_owner_dead(s, o) == 0, "a living owner is not dead");
	kill(pid, SIGSTOP);
	int st;
	waitpid(pid, &st, WUNTRACED);
	ok(kvp_owner_dead(s, o) == 0, "a stopped owner is not dead");
	ok(kvp_owner_dead(s, KVP_OWNER(2, 5)) == 1, "another generation is dead");
	ok(kvp_owner_dead(s, 0) == 1 && kvp_owner_dead(s, 0xffffffffu) == 1, "nobody and garbage are dead");
	kill(pid, SIGKILL);
	waitpid(pid, &st, 0);
	ok(kvp_owner_dead(s, o) == 1, "a killed owner is dead");
	ok(kvp_slot_release(s, o) == KVP_OK && kvp_owner_dead(s, o) == 1, "and stays dead after the release");
	kvp_owner me = kvp_slot_assign(s, 4, KVP_ROLE_HTTPD, 0);
	int mine = open(path, O_RDWR | O_CLOEXEC);
	ok(kvp_slot_lock(mine, 4) == KVP_OK && kvp_slot_activate(s, me) == KVP_OK,
		"this process takes a slot");
	close(s->lock_fd);
	s->lock_fd = mine;
	ok(kvp_owner_dead(s, me) == 0, "oneself is never dead, although the own lock is not reported");
	unlink(path);
	close(tmp);
}

/* Two processes hand a number to and fro; a lost wake-up shows as a time-out of the poll. */
static void wakeups(struct kvp_slots *s)
{
	enum { ROUNDS = 20000 };
	int fds[8];
	uint64_t *ball = shared(4096);
	for (int i = 0; i < 8; i++)
		fds[i] = i < 2 ? eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC) : -1;
	s->wake_fd = fds;
	kvp_owner o[2] = {
		kvp_slot_assign(s, 0, KVP_ROLE_SUPERVISOR, 0), kvp_slot_assign(s, 1, KVP_ROLE_PEER, 0)};
	is_u64((uint64_t)kvp_slot_wake(s, 1), 0, "a process that does not sleep gets no write");
	is_u64((uint64_t)kvp_slot_wake(s, 7), 0, "a slot without an eventfd is ignored");
	is_u64((uint64_t)kvp_slot_wake(s, 99), 0, "a slot beyond the table is ignored");
	pid_t pid = fork();
	uint32_t me = pid ? 0 : 1, late = 0;
	s->self = o[me];
	for (uint64_t turn = me; turn < ROUNDS; turn += 2) {
		while (kvp_ld_acq_u64(ball) != turn) {
			kvp_slot_sleep(s);
			struct pollfd pf = {.fd = fds[me], .events = POLLIN};
			if (kvp_ld_acq_u64(ball) != turn && poll(&pf, 1, 20000) == 0 &&
				kvp_ld_acq_u64(ball) == turn)
				late++;
			kvp_slot_awake(s);
		}
		kvp_st_rel_u64(ball, turn + 1);
		kvp_slot_wake(s, !me);
	}
	if (pid == 0)
		_exit(late ? 1 : 0);
	int st = 0;
	waitpid(pid, &st, 0);
	ok(late == 0 && WIFEXITED(st) && WEXITSTATUS(st) == 0, "no wake-up is lost in %d hand-overs", ROUNDS);
}

int main(void)
{
	life_cycle();
	void *mem = shared(kvp_slot_footprint(&geom));
	struct kvp_slots s;
	kvp_slot_new(mem, &geom);
	kvp_slot_join(mem, &geom, &s);
	ownership(&s);
	liveness(&s);
	wakeups(&s);
	is_u64(kvp_slot_check(&s), 0, "the table has no faults at the end");
	s.slot[6].owner = KVP_OWNER(5, 1);
	s.slot[7].control = 77;
	is_u64(kvp_slot_check(&s), 2, "check finds planted faults");
	return done();
}
