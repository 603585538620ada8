/* One writer and two readers in processes of their own; the writer is killed at random instants and its
 * successor recovers. Every lookup is judged by tests/torture/radix_oracle.h. KVP_TORTURE_S: seconds,
 * default 2. */
#include "tests/torture/radix_oracle.h"

#include <sys/wait.h>

static void reader(uint32_t n, const void *pub)
{
	struct kvp_radix r;
	struct kvp_radix_match *m = malloc(sizeof(*m));
	struct tally *t = &oracle->reader[n];
	struct rng g = {n + 99};
	struct look look;
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	if (kvp_radix_join(pub, &geom, &r))
		_exit(2);
	while (!kvp_ld_acq_u32(&oracle->stop)) {
		look_begin(&look, &g);
		uint64_t begin = now();
		kvp_radix_find(&r, &look.q, m);
		uint64_t ns = now() - begin;
		judge(t, look.chain, m, look.before);
		t->queries++;
		t->retries += m->retries;
		t->gave_up += m->gave_up;
		t->slowest_ns = ns > t->slowest_ns ? ns : t->slowest_ns;
	}
	_exit(0);
}

/* ---- parent ---- */

static pid_t start_writer(uint64_t seed)
{
	pid_t p = fork();
	if (p == 0)
		writer(seed, &oracle->ops);
	return p;
}

int main(void)
{
	const char *s = getenv("KVP_TORTURE_S");
	uint64_t seed = tap_seed(0), kills = 0, bad_exit = 0, end;
	struct rng g = {seed};
	if (TAP_IS_TSAN)
		return skip_all(TAP_PROCESSES);
	oracle = seg_map(sizeof(*oracle));
	if (!oracle || seg_new(&seg, &geom))
		return 1;
	const void *ro = read_only();
	ok(ro != NULL, "readers have a read-only mapping");
	end = now() + (s ? strtoull(s, NULL, 10) : 2) * 1000000000ULL;
	pid_t rd[READERS], wr = start_writer(rnd(&g));
	for (uint32_t i = 0; i < READERS; i++) {
		rd[i] = fork();
		if (rd[i] == 0)
			reader(i, ro);
	}
	int st;
	while (now() < end && !bad_exit) {
		struct timespec t = {0, (long)(1000000 + rnd_below(&g, 25000000))};
		nanosleep(&t, NULL);
		kill(wr, SIGKILL);
		waitpid(wr, &st, 0);
		if (WIFSIGNALED(st))
			kills++;
		else
			bad_exit = 100 + (uint64_t)WEXITSTATUS(st);
		wr = start_writer(rnd(&g));
	}
	kvp_st_sc_u32(&oracle->stop, 1);
	waitpid(wr, &st, 0);
	bad_exit = bad_exit ? bad_exit : st ? 1 : 0;
	for (uint32_t i = 0; i < READERS; i++) {
		waitpid(rd[i], &st, 0);
		ok(st == 0, "reader %u ended in order", i);
	}
	is_u64(bad_exit, 0,
		"every writer recovered a sound tree (%llu kills, %llu opened, %llu headers finished, "
		"%llu splits undone, %llu merges finished, %llu operations repeated)",
		(unsigned long long)kills, (unsigned long long)oracle->opens,
		(unsigned long long)oracle->redone, (unsigned long long)oracle->undone,
		(unsigned long long)oracle->merged, (unsigned long long)oracle->repeated);
	struct tally *a = &oracle->reader[0], *b = &oracle->reader[1];
	is_u64(a->wrong + b->wrong, 0,
		"no foreign slot, no wrong depth in %llu lookups (%llu exact comparisons, %llu with lower "
		"tiers)",
		(unsigned long long)(a->queries + b->queries), (unsigned long long)(a->exact + b->exact),
		(unsigned long long)(a->exact_low + b->exact_low));
	ok(a->queries && b->queries && a->exact && a->exact_low && oracle->ops,
		"readers and writer worked (%llu changes)", (unsigned long long)oracle->ops);
	ok(oracle->merges > 0, "runs were merged under readers (%llu)", (unsigned long long)oracle->merges);
	printf("# retries %llu, gave up %llu, slowest lookup %llu us\n",
		(unsigned long long)(a->retries + b->retries), (unsigned long long)(a->gave_up + b->gave_up),
		(unsigned long long)(a->slowest_ns > b->slowest_ns ? a->slowest_ns : b->slowest_ns) / 1000);
	return done();
}
