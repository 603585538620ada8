/* Ceilings over all processes: never exceeded, given back by a sweep, found by the check when damaged. */
#include "shm/quota.h"
#include "tests/procs.h"
#include "tests/tap.h"

#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#define PROCESSES 4
#define ROUNDS 20000
#define LIMIT 3

static const struct kvp_geom geom = {.slot_max = 8, .region_gen = 7};

static void life_cycle(void)
{
	struct kvp_geom bad = {.slot_max = KVP_SLOT_MAX + 1}, other = {.slot_max = 9};
	struct kvp_quota q;
	is_u64(kvp_quota_footprint(&bad), 0, "too many slots have no footprint");
	is_u64(kvp_quota_footprint(NULL), 0, "no geometry has no footprint");
	char *mem = shared(kvp_quota_footprint(&geom));
	ok(kvp_quota_new(NULL, &geom) == KVP_ERR_INVAL, "new refuses NULL");
	ok(kvp_quota_new(mem + 8, &geom) == KVP_ERR_INVAL, "new refuses misaligned memory");
	ok(kvp_quota_join(mem, &geom, &q) == KVP_ERR_AGAIN, "join before new answers AGAIN");
	ok(kvp_quota_new(mem, &geom) == KVP_OK, "new");
	ok(kvp_quota_join(mem, &other, &q) == KVP_ERR_LAYOUT, "join with another size answers LAYOUT");
	ok(kvp_quota_join(mem, &geom, &q) == KVP_OK, "join");
	is_u64(kvp_quota_check(&q), 0, "a fresh object has no faults");
	kvp_quota_leave(&q);
	kvp_quota_delete(mem);
	ok(kvp_quota_join(mem, &geom, &q) == KVP_ERR_AGAIN, "join after delete answers AGAIN");
	munmap(mem, kvp_quota_footprint(&geom));
}

static void one_process(struct kvp_quota *q)
{
	kvp_owner a = KVP_OWNER(1, 1), b = KVP_OWNER(2, 9), c = KVP_OWNER(1, 2);
	ok(kvp_quota_take(q, 0, KVP_QUOTA_PICK, 1, 9) == KVP_ERR_INVAL, "nobody takes nothing");
	ok(kvp_quota_take(q, KVP_OWNER(8, 1), KVP_QUOTA_PICK, 1, 9) == KVP_ERR_INVAL, "no slot 8");
	ok(kvp_quota_take(q, a, KVP_QUOTA_PICK, 0, 9) == KVP_ERR_INVAL, "zero is not taken");
	ok(kvp_quota_take(q, a, KVP_QUOTA_PICK, 2, 3) == KVP_OK, "two of three");
	ok(kvp_quota_take(q, b, KVP_QUOTA_PICK, 2, 3) == KVP_ERR_FULL, "two more are too many");
	ok(kvp_quota_take(q, b, KVP_QUOTA_PICK, 1, 3) == KVP_OK, "one more is the last");
	ok(kvp_quota_take(q, b, KVP_QUOTA_BODY, 1000, 1000) == KVP_OK, "kinds are counted apart");
	is_u64(kvp_quota_used(q, KVP_QUOTA_PICK), 3, "three are used");
	kvp_quota_give(q, b, KVP_QUOTA_PICK, 5);
	is_u64(kvp_quota_used(q, KVP_QUOTA_PICK), 2, "not more is given back than was taken");
	is_u64(kvp_quota_sweep_owner(q, c), 0, "the share of another generation is not swept");
	is_u64(kvp_quota_sweep_owner(q, a), 1, "a dead process's share is");
	is_u64(kvp_quota_used(q, KVP_QUOTA_PICK), 0, "and its places are free");
	is_u64(kvp_quota_used(q, KVP_QUOTA_BODY), 1000, "the other process keeps its own");
	is_u64(kvp_quota_sweep_owner(q, a), 0, "a second sweep finds nothing");
	ok(kvp_quota_take(q, c, KVP_QUOTA_PICK, 3, 3) == KVP_OK, "the slot's next process takes anew");
	is_u64(kvp_quota_check(q), 0, "no faults");
	kvp_quota_sweep_owner(q, b);
	kvp_quota_sweep_owner(q, c);
}

/* Takes and gives; *inside counts those who have a place, most[] the largest number that each one saw. */
static void child(struct kvp_quota *q, uint32_t slot, uint64_t *inside, uint64_t *most)
{
	kvp_owner me = KVP_OWNER(slot, 1);
	uint64_t got = 0;
	for (int i = 0; i < ROUNDS; i++) {
		if (kvp_quota_take(q, me, KVP_QUOTA_PICK, 1, LIMIT) != KVP_OK)
			continue;
		uint64_t n = kvp_faa_ar_u64(inside, 1) + 1;
		most[slot] = n > most[slot] ? n : most[slot];
		got++;
		kvp_faa_ar_u64(inside, (uint64_t)-1);
		kvp_quota_give(q, me, KVP_QUOTA_PICK, 1);
	}
	_exit(got ? 0 : 1);
}

static void many_processes(struct kvp_quota *q)
{
	uint64_t *inside = shared(4096), *most = inside + 64;
	pid_t pid[PROCESSES + 1];
	for (uint32_t i = 0; i < PROCESSES; i++)
		if (!(pid[i] = fork()))
			child(q, i + 1, inside, most);
	int st, all_got = 1;
	for (uint32_t i = 0; i < PROCESSES; i++) {
		waitpid(pid[i], &st, 0);
		all_got &= WIFEXITED(st) && WEXITSTATUS(st) == 0;
	}
	uint64_t max = 0;
	for (uint32_t i = 1; i <= PROCESSES; i++)
		max = most[i] > max ? most[i] : max;
	ok(max >= 1 && max <= LIMIT, "of %d processes at most %d were inside (%d)", PROCESSES, LIMIT,
		(int)max);
	ok(all_got, "every process got a place now and then");
	is_u64(kvp_quota_used(q, KVP_QUOTA_PICK), 0, "in the end nobody is inside");
	munmap(inside, 4096);
}

static void killed(struct kvp_quota *q)
{
	int ready[2];
	char c;
	if (pipe(ready))
		exit(1);
	pid_t pid = fork();
	if (!pid) {
		int ok = kvp_quota_take(q, KVP_OWNER(5, 3), KVP_QUOTA_PICK, LIMIT, LIMIT) == KVP_OK;
		if (write(ready[1], ok ? "y" : "n", 1) == 1)
			pause();
		_exit(1);
	}
	ok(read(ready[0], &c, 1) == 1 && c == 'y', "a process takes all places");
	kill(pid, SIGKILL);
	waitpid(pid, NULL, 0);
	close(ready[0]);
	close(ready[1]);
	ok(kvp_quota_take(q, KVP_OWNER(1, 1), KVP_QUOTA_PICK, 1, LIMIT) == KVP_ERR_FULL,
		"killed, it still has them");
	is_u64(kvp_quota_sweep_owner(q, KVP_OWNER(5, 3)), 1, "the sweep gives them back");
	ok(kvp_quota_take(q, KVP_OWNER(1, 1), KVP_QUOTA_PICK, LIMIT, LIMIT) == KVP_OK, "all of them");
	kvp_quota_give(q, KVP_OWNER(1, 1), KVP_QUOTA_PICK, LIMIT);
}

int main(void)
{
	life_cycle();
	void *mem = shared(kvp_quota_footprint(&geom));
	struct kvp_quota q;
	if (!mem || kvp_quota_new(mem, &geom) || kvp_quota_join(mem, &geom, &q))
		return 1;
	one_process(&q);
	if (!TAP_IS_TSAN) {
		many_processes(&q);
		killed(&q);
	}
	((uint64_t *)mem)[16 + 16 * 6] = 1;
	ok(kvp_quota_check(&q) == 1, "a share of nobody is a fault");
	return done();
}
