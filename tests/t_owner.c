/* Who owns what is said by slot, generation and lock byte, never by a process id: an id that comes again, and
 * ids that mean different processes in different namespaces. Each process makes one booking of its own. */
#include "shm/slot.h"
#include "tests/book_fixture.h"
#include "tests/procs.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/sched.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

static struct fixture f;
static struct kvp_slots slots;
static char path[] = "/tmp/t_owner.XXXXXX";

/* A process that takes the owner's byte and slot, books, and says so. */
static void live(kvp_owner o, const char *id, int ready)
{
	struct kvp_book b;
	uint64_t h, seq[3] = {o, o + 1, o + 2};
	int fd = open(path, O_RDWR | O_CLOEXEC);
	char good = 'n';
	kvp_book_join(f.mem, &f.g, &b);
	kvp_book_attach(&b, o, NULL);
	if (kvp_slot_lock(fd, KVP_OWNER_SLOT(o)) == KVP_OK && kvp_slot_activate(&slots, o) == KVP_OK &&
		book_simple(&b, o, id, 0, 1, 10, seq, 3, &h) == KVP_OK)
		good = 'y';
	if (write(ready, &good, 1) != 1)
		_exit(1);
	for (;;)
		pause();
}

static int told(int ready[2])
{
	char c = 0;
	return read(ready[0], &c, 1) == 1 && c == 'y';
}

static int is_booked(const char *id)
{
	uint64_t h;
	return kvp_resv_find(&f.b, id, strlen(id), &h) == KVP_OK;
}

static void end(pid_t pid)
{
	kill(pid, SIGKILL);
	waitpid(pid, NULL, 0);
}

static uint32_t pid_of(uint32_t slot)
{
	return kvp_ld_rlx_u32(&slots.slot[slot].pid);
}

/* A child with this very process id; -1 with errno if the kernel does not let us. */
static pid_t fork_as(pid_t want)
{
	struct clone_args a = {
		.exit_signal = SIGCHLD, .set_tid = (uint64_t)(uintptr_t)&want, .set_tid_size = 1};
	return (pid_t)syscall(SYS_clone3, &a, sizeof(a));
}

static void test_reuse(void)
{
	int ready[2];
	kvp_owner first = kvp_slot_assign(&slots, 2, KVP_ROLE_HTTPD, 0);
	fflush(stdout);
	pid_t pid = pipe(ready) ? -1 : fork();
	if (pid == 0)
		live(first, "first", ready[1]);
	ok(told(ready) && is_booked("first") && kvp_owner_dead(&slots, first) == 0, "an owner lives");
	end(pid);
	fflush(stdout);
	pid_t again = fork_as(pid);
	if (again == 0) { /* somebody who has nothing to do with us */
		for (;;)
			pause();
	}
	if (again < 0) {
		ok(1, "# SKIP a process id that comes again: clone3: %s", strerror(errno));
		kvp_book_sweep_owner(&f.b, first, NULL, NULL, NULL);
		kvp_slot_release(&slots, first);
		return;
	}
	ok(again == pid && pid_of(2) == (uint32_t)pid && kvp_owner_dead(&slots, first) == 1,
		"its process id lives again as another process's: the owner is dead all the same");
	ok(kvp_book_sweep_owner(&f.b, first, NULL, NULL, NULL) == KVP_OK && !is_booked("first"),
		"and its booking is swept");
	end(again);
	/* The id comes again as the next owner of the same slot. */
	kvp_slot_release(&slots, first);
	kvp_owner second = kvp_slot_assign(&slots, 2, KVP_ROLE_HTTPD, 0);
	fflush(stdout);
	again = fork_as(pid);
	if (again == 0)
		live(second, "second", ready[1]);
	ok(again == pid && told(ready) && pid_of(2) == (uint32_t)pid,
		"the next owner has slot and process id of the first");
	ok(second != first && kvp_owner_dead(&slots, first) == 1 && kvp_owner_dead(&slots, second) == 0,
		"the first is dead, the second is not");
	kvp_book_sweep_owner(&f.b, first, NULL, NULL, NULL);
	ok(is_booked("second"), "a late sweep of the first takes nothing of the second");
	end(again);
	ok(kvp_owner_dead(&slots, second) == 1, "the second dies");
	kvp_book_sweep_owner(&f.b, second, NULL, NULL, NULL);
	ok(!is_booked("second"), "and is swept");
	kvp_slot_release(&slots, second);
	close(ready[0]);
	close(ready[1]);
}

/* A helper that becomes the parent of process 1 of a namespace of its own, if that is allowed. */
static pid_t fork_in_namespace(kvp_owner o, const char *id, int ready[2])
{
	fflush(stdout);
	pid_t outer = fork();
	if (outer)
		return outer;
	if (unshare(CLONE_NEWPID) && unshare(CLONE_NEWUSER | CLONE_NEWPID)) {
		_exit(write(ready[1], "n", 1) != 1);
	}
	pid_t inner = fork();
	if (inner == 0)
		live(o, id, ready[1]);
	waitpid(inner, NULL, 0);
	_exit(0);
}

/* Ends process 1 of the helper's namespace, and with it the helper. */
static void end_in_namespace(pid_t outer)
{
	char name[64];
	int inner = 0;
	snprintf(name, sizeof(name), "/proc/%d/task/%d/children", (int)outer, (int)outer);
	FILE *file = fopen(name, "r");
	if (file && fscanf(file, "%d", &inner) == 1)
		kill(inner, SIGKILL);
	if (file)
		fclose(file);
	waitpid(outer, NULL, 0);
}

static void test_namespaces(void)
{
	int ready[2];
	kvp_owner a = kvp_slot_assign(&slots, 3, KVP_ROLE_HTTPD, 1),
		  b = kvp_slot_assign(&slots, 4, KVP_ROLE_HTTPD, 2);
	pid_t in_a = pipe(ready) ? -1 : fork_in_namespace(a, "a", ready);
	if (!told(ready)) {
		ok(1, "# SKIP process id namespaces: not permitted here");
		waitpid(in_a, NULL, 0);
		return;
	}
	pid_t in_b = fork_in_namespace(b, "b", ready);
	ok(told(ready) && pid_of(3) == 1 && pid_of(4) == 1,
		"two owners in process id namespaces of their own, both with id 1");
	ok(kvp_owner_dead(&slots, a) == 0 && kvp_owner_dead(&slots, b) == 0,
		"both live, as seen from outside");
	end_in_namespace(in_a);
	ok(kvp_owner_dead(&slots, a) == 1 && kvp_owner_dead(&slots, b) == 0, "one dies, the other does not");
	kvp_book_sweep_owner(&f.b, a, NULL, NULL, NULL);
	ok(!is_booked("a") && is_booked("b"), "what it held is swept, what the other holds stays");
	end_in_namespace(in_b);
	kvp_book_sweep_owner(&f.b, b, NULL, NULL, NULL);
	ok(kvp_owner_dead(&slots, b) == 1 && !is_booked("b"), "then the other");
	kvp_slot_release(&slots, a);
	kvp_slot_release(&slots, b);
	close(ready[0]);
	close(ready[1]);
}

int main(void)
{
	if (TAP_IS_TSAN)
		return skip_all(TAP_PROCESSES);
	fixture_make(&f, 4, 64, 1024);
	kvp_book_attach(&f.b, KVP_OWNER(1, 1), NULL);
	kvp_rank_open(&f.b, 0, 1);
	uint64_t bytes = kvp_slot_footprint(&f.g);
	void *mem = shared(bytes);
	int tmp = mkstemp(path);
	ok(tmp >= 0 && kvp_slot_new(mem, &f.g) == KVP_OK &&
			kvp_slot_join(mem, &f.g, &slots) == KVP_OK,
		"slots and a lock file");
	slots.lock_fd = open(path, O_RDWR | O_CLOEXEC);
	test_reuse();
	test_namespaces();
	is_u64(kvp_book_check(&f.b) + kvp_slot_check(&slots), 0, "nothing is left, nothing is wrong");
	is_u64(kvp_resv_cnt(&f.b), 0, "no booking");
	unlink(path);
	close(slots.lock_fd);
	close(tmp);
	fixture_drop(&f);
	return done();
}
