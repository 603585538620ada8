/* A process is killed at every place of the pending cache, at every hit. The others go on at once, without a
 * sweep; what they find is whole; after the sweep nothing is left over. Builds the modules with their kill
 * places whatever the build. */
#ifndef KVP_TEST_POINTS
#define KVP_TEST_POINTS
#endif
#include "shm/pending.c"
#include "shm/pending_check.c"
#include "shm/point.c"
#include "shm/txn.c"
#include "tests/pending_fixture.h"
#include "tests/procs.h"

#define VICTIM KVP_OWNER(2, 7)
#define SWEEPER KVP_OWNER(3, 9)

static struct pend f;

/* Everything the cache can do: new, replaced, evicting, expired, too large, consumed, discarded. */
static void script(struct kvp_pending *p)
{
	struct kvp_pending_hit h;
	pend_put(p, "v", 300, 11, 2 * SEC);
	pend_put(p, "v", 5, 12, 2 * SEC);
	pend_put(p, "w", 400, 13, 2 * SEC);
	if (pend_get(p, "w", 400, 13, 2 * SEC, &h) == 1)
		kvp_pending_consume(p, &h);
	pend_put(p, "y", 700, 14, 2 * SEC);
	kvp_pending_discard(p, 3, "v", 1);
	pend_put(p, "z", 1, 15, 12 * SEC); /* the two of the survivor expire */
	pend_put(p, "big", 5000, 16, 12 * SEC);
}

static void spawn(void (*run)(struct kvp_pending *), kvp_owner owner, const char *place, uint64_t n)
{
	fflush(stdout);
	pid_t pid = fork();
	if (pid == 0) {
		struct kvp_pending p;
		kvp_pending_join(f.mem, &f.g, &p);
		kvp_pending_attach(&p, owner, NULL);
		die_at(place, n);
		run(&p);
		_exit(0);
	}
	waitpid(pid, NULL, 0);
}

static void restart(void)
{
	pend_drop(&f);
	pend_make(&f, 3, 16384, 10 * SEC);
	pend_put(&f.p, "s1", 200, 1, SEC);
	pend_put(&f.p, "s2", 20, 2, SEC);
}

/* What is found is one of the states that the script makes. */
static int whole(void)
{
	struct kvp_pending_hit h;
	int v = kvp_pending_peek(&f.p, 3, "v", 1, 2 * SEC, &h) ? 0 : (int)h.seq_cnt;
	int good = !v || pend_get(&f.p, "v", (uint32_t)v, v == 300 ? 11 : 12, 2 * SEC, NULL) == 1;
	good &= pend_get(&f.p, "w", 400, 13, 2 * SEC, NULL) >= 0 &&
		pend_get(&f.p, "y", 700, 14, 2 * SEC, NULL) >= 0;
	good &= pend_get(&f.p, "z", 1, 15, 12 * SEC, NULL) >= 0 &&
		pend_get(&f.p, "s2", 20, 2, SEC, NULL) >= 0;
	return good && pend_get(&f.p, "big", 5000, 16, 12 * SEC, NULL) == 0;
}

static int survivor_goes_on(void)
{
	struct kvp_pending_hit h;
	return pend_put(&f.p, "on", 600, 21, 13 * SEC) == KVP_OK &&
	       pend_get(&f.p, "on", 600, 21, 13 * SEC, &h) == 1 && kvp_pending_consume(&f.p, &h) == KVP_OK;
}

static void sweep_run(struct kvp_pending *p)
{
	kvp_pending_sweep_owner(p, VICTIM);
}

static int clean(void)
{
	struct kvp_pending_stat st;
	kvp_pending_sweep_owner(&f.p, VICTIM);
	kvp_pending_sweep_owner(&f.p, SWEEPER);
	kvp_pending_stat(&f.p, &st);
	return st.taken == 0 && kvp_pending_check(&f.p) == 0;
}

static void test_victim(void)
{
	restart();
	kvp_point_hook = note_spot;
	script(&f.p);
	kvp_point_hook = NULL;
	ok(clean() && whole(), "the script leaves nothing behind");
	for (int i = 0; spot[i].name; i++) {
		uint64_t bad = 0, n = 1;
		for (; n <= spot[i].hits && !bad; n++) {
			restart();
			spawn(script, VICTIM, spot[i].name, n);
			int found = whole(), on = survivor_goes_on(), swept = clean();
			bad = !found || !on || !swept || !survivor_goes_on() || !whole();
			if (bad)
				printf("# %s:%" PRIu64 " whole %d on %d swept %d\n", spot[i].name, n, found,
					on, swept);
		}
		ok(!bad, "killed at %s (%" PRIu64 " hits): whole at once, nothing left after the sweep",
			spot[i].name, spot[i].hits);
	}
}

static void test_sweep(void)
{
	static const char *const deaths[] = {"pending:taken", "pending:filled", "txn:published", "txn:taken"};
	uint64_t tried = 0, bad = 0;
	for (size_t d = 0; d < 4; d++) {
		spots_clear();
		restart();
		spawn(script, VICTIM, deaths[d], 3);
		kvp_point_hook = note_spot;
		sweep_run(&f.p);
		kvp_point_hook = NULL;
		for (int i = 0; spot[i].name; i++)
			for (uint64_t n = 1; n <= spot[i].hits && !bad; n++, tried++) {
				restart();
				spawn(script, VICTIM, deaths[d], 3);
				spawn(sweep_run, SWEEPER, spot[i].name, n);
				bad += !survivor_goes_on() || !clean() || !whole();
			}
	}
	ok(!bad && tried > 20, "%" PRIu64 " sweeps killed in the middle and repeated", tried);
}

int main(void)
{
	if (TAP_IS_TSAN)
		return skip_all(TAP_PROCESSES);
	pend_make(&f, 1, 1, 1);
	test_victim();
	test_sweep();
	pend_drop(&f);
	return done();
}
