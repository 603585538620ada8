/* Session bindings: every situation of the table one by one, a random run of several processes with kills,
 * and a kill at every place. Builds the module with its kill places whatever the build. */
#ifndef KVP_TEST_POINTS
#define KVP_TEST_POINTS
#endif
#include "shm/affinity.c"
#include "shm/point.c"
#include "shm/txn.c"
#include "tests/procs.h"
#include "tests/tap.h"

#define SEC 1000000000ULL
#define ME KVP_OWNER(1, 1)
#define OTHER KVP_OWNER(2, 1)
#define VICTIM KVP_OWNER(3, 5)

static struct kvp_geom g;
static void *mem;
static uint64_t bytes;
static struct kvp_affinity me, other;
static const struct kvp_affinity_target w1 = {1, 0}, w2 = {2, 3};

static void make_table(uint32_t max)
{
	if (mem)
		munmap(mem, bytes);
	g = (struct kvp_geom){.slot_max = 8,
		.part_max = 4,
		.affinity_max = max,
		.affinity_ttl_ns = 10 * SEC,
		.affinity_hold_ns = 100 * SEC,
		.region_gen = 1,
		.salt = {11, 12}};
	bytes = kvp_affinity_footprint(&g);
	mem = shared(bytes);
	if (kvp_affinity_new(mem, &g) || kvp_affinity_join(mem, &g, &me) ||
		kvp_affinity_join(mem, &g, &other)) {
		printf("Bail out! no table\n");
		exit(1);
	}
	kvp_affinity_attach(&me, ME, NULL);
	kvp_affinity_attach(&other, OTHER, NULL);
}

static struct kvp_affinity_key key(const char *id)
{
	return kvp_affinity_key(&me, 1, id, strlen(id));
}
static int is_at(const char *id, uint64_t now, struct kvp_affinity_target want)
{
	struct kvp_affinity_target t;
	return kvp_affinity_query(&me, key(id), now, &t) == KVP_OK && same(t, want);
}
static int unbound(const char *id, uint64_t now)
{
	struct kvp_affinity_target t;
	return kvp_affinity_query(&me, key(id), now, &t) == KVP_ERR_NOTFOUND;
}
/* bind: hold and commit by one process; the lease. */
static uint64_t bind_by(struct kvp_affinity *a, const char *id, struct kvp_affinity_target at, uint64_t now)
{
	struct kvp_affinity_hold h;
	struct kvp_affinity_target o;
	uint64_t tag = 0;
	if (kvp_affinity_hold(a, key(id), now, NULL, &h) == KVP_OK && h.kind != KVP_AFFINITY_UNPINNED)
		kvp_affinity_commit(a, key(id), at, KVP_AFFINITY_IS_HARD, KVP_AFFINITY_KEEP, now, &tag, &o);
	return tag;
}

static void test_life(void)
{
	struct kvp_affinity_hold h, h2;
	struct kvp_affinity_target o;
	uint64_t t1 = 0, t2 = 0;
	make_table(100);
	ok(unbound("s", SEC) && kvp_affinity_cnt(&me, 1) == 0, "a look binds nothing");
	ok(kvp_affinity_hold(&me, key("s"), SEC, NULL, &h) == KVP_OK && h.kind == KVP_AFFINITY_INIT,
		"the first booking initialises");
	ok(kvp_affinity_hold(&other, key("s"), SEC, NULL, &h2) == KVP_ERR_EXISTS && unbound("s", SEC),
		"the second waits, a look sees nothing");
	ok(kvp_affinity_busy(&other, key("s")) && !kvp_affinity_busy(&other, key("t")),
		"and which session is busy is seen");
	ok(kvp_affinity_commit(&me, key("s"), w1, KVP_AFFINITY_IS_HARD, KVP_AFFINITY_KEEP, SEC, &t1, &o) ==
				KVP_OK &&
			is_at("s", SEC, w1),
		"bound where it was booked");
	ok(kvp_affinity_hold(&other, key("s"), 2 * SEC, NULL, &h2) == KVP_OK &&
			h2.kind == KVP_AFFINITY_BOUND && same(h2.target, w1),
		"who waited is steered there");
	ok(kvp_affinity_commit(&other, key("s"), w1, KVP_AFFINITY_IS_HARD, KVP_AFFINITY_KEEP, 2 * SEC, &t2,
		   &o) == KVP_OK &&
			t2 == t1,
		"and takes a lease of the same binding");
	kvp_affinity_release(&me, t1, 3 * SEC);
	ok(is_at("s", 90 * SEC, w1), "a lease holds it over its time to live");
	kvp_affinity_release(&me, t2, 91 * SEC);
	kvp_affinity_release(&me, t2, 95 * SEC);
	ok(is_at("s", 101 * SEC, w1) && unbound("s", 101 * SEC + 1), "idle time starts at the last return");
	is_u64(kvp_affinity_cnt(&me, 1), 1, "still in the table,");
	is_u64(kvp_affinity_reap(&me, 101 * SEC, 10) + kvp_affinity_reap(&me, 101 * SEC + 1, 10), 1,
		"then the reaper takes it");
	is_u64(kvp_affinity_cnt(&me, 1), 0, "no longer");
	bind_by(&me, "s", w2, 200 * SEC);
	ok(is_at("s", 310 * SEC, w2) && unbound("s", 310 * SEC + 1),
		"a lease that nobody returns counts as long as a booking can live");
	is_u64(kvp_affinity_check(&me), 0, "no fault");
}

static void test_conflict(void)
{
	struct kvp_affinity_hold h;
	struct kvp_affinity_target o = {0, 0};
	uint64_t tag = 0, t1;
	make_table(100);
	t1 = bind_by(&me, "s", w1, SEC);
	ok(kvp_affinity_commit(&me, key("s"), w2, KVP_AFFINITY_IS_HARD, KVP_AFFINITY_KEEP, SEC, &tag, &o) ==
				KVP_ERR_EXISTS &&
			same(o, w1) && is_at("s", SEC, w1),
		"hard: booked elsewhere is refused");
	ok(kvp_affinity_commit(&me, key("s"), w2, KVP_AFFINITY_IS_SOFT, KVP_AFFINITY_KEEP, SEC, &tag, &o) ==
				KVP_OK &&
			is_at("s", SEC, w2),
		"soft: the binding follows");
	ok(kvp_affinity_hold(&me, key("s"), SEC, &w1, &h) == KVP_OK && h.kind == KVP_AFFINITY_BOUND,
		"another target gone: still bound");
	ok(kvp_affinity_hold(&me, key("s"), SEC, &w2, &h) == KVP_OK && h.kind == KVP_AFFINITY_INIT &&
			unbound("s", SEC),
		"its target gone: initialised anew");
	ok(kvp_affinity_commit(
		   &other, key("s"), w1, KVP_AFFINITY_IS_HARD, KVP_AFFINITY_KEEP, SEC, &tag, &o) == KVP_OK &&
			is_at("s", SEC, w1),
		"a booking that is there already completes the initialisation of another");
	ok(kvp_affinity_commit(&me, key("s"), w2, KVP_AFFINITY_IS_HARD, KVP_AFFINITY_KEEP, SEC, &tag, &o) ==
			KVP_ERR_EXISTS,
		"whose own commit elsewhere is then refused");
	kvp_affinity_cancel(&me, key("s"), &h);
	ok(is_at("s", SEC, w1), "a cancel of what others completed changes nothing");
	kvp_affinity_drop(&me, key("s"), w2);
	ok(is_at("s", SEC, w1), "a drop of another target neither");
	ok(kvp_affinity_commit(
		   &me, key("s"), w2, KVP_AFFINITY_IS_HARD, KVP_AFFINITY_REPLACE, SEC, &tag, &o) == KVP_OK &&
			is_at("s", SEC, w2) && tag != t1,
		"a departed target is replaced, as a new binding");
	kvp_affinity_release(&me, t1, SEC);
	kvp_affinity_release(&me, 0, SEC);
	kvp_affinity_release(&me, UINT64_MAX, SEC);
	ok(is_at("s", 60 * SEC, w2), "the lease of the old one does not count for the new");
	kvp_affinity_drop(&me, key("s"), w2);
	ok(unbound("s", SEC) && kvp_affinity_cnt(&me, 1) == 0, "dropped");
	ok(kvp_affinity_hold(&me, key("s"), SEC, NULL, &h) == KVP_OK && h.kind == KVP_AFFINITY_INIT, "begun");
	kvp_affinity_cancel(&me, key("s"), &h);
	ok(kvp_affinity_cnt(&me, 1) == 0 && kvp_affinity_check(&me) == 0, "and cancelled");
	struct kvp_affinity_key p2 = kvp_affinity_key(&me, 2, "s", 1);
	bind_by(&me, "s", w1, SEC);
	ok(kvp_affinity_query(&me, p2, SEC, &o) == KVP_ERR_NOTFOUND,
		"partitions do not see each other's sessions");
}

static void test_full(void)
{
	struct kvp_affinity_hold h;
	struct kvp_affinity_target o;
	uint64_t tag = 1;
	char id[16];
	make_table(50);
	for (int i = 0; i < 50; i++) {
		snprintf(id, sizeof(id), "h%d", i);
		bind_by(&me, id, w1, SEC);
	}
	ok(kvp_affinity_hold(&me, key("x"), SEC, NULL, &h) == KVP_OK && h.kind == KVP_AFFINITY_UNPINNED,
		"no room: unpinned");
	ok(kvp_affinity_commit(&me, key("x"), w1, KVP_AFFINITY_IS_HARD, KVP_AFFINITY_KEEP, SEC, &tag, &o) ==
				KVP_OK &&
			tag == 0 && unbound("x", SEC) && is_at("h7", SEC, w1),
		"a booking is not refused either");
	make_table(70000);
	for (int i = 0; i < 65540; i++) {
		snprintf(id, sizeof(id), "h%d", i);
		bind_by(&me, id, w1, SEC);
	}
	is_u64(kvp_affinity_cnt(&me, 1), 65536, "65536 sessions of a partition at most");
	ok(kvp_affinity_check(&me) == 0, "no fault");
}

static void test_waiters(void)
{
	uint32_t slot;
	make_table(10);
	ok(!kvp_affinity_waiting(&me, &slot), "nobody waits");
	ok(kvp_affinity_wait(&me, 5) == 1 && kvp_affinity_wait(&me, 130) == 1, "two are noted");
	is_u64(kvp_affinity_wait(&me, 5), 0, "nothing has ended: one stands there still");
	uint32_t got[2] = {0, 0};
	kvp_affinity_waiting(&me, &got[0]);
	kvp_affinity_waiting(&me, &got[1]);
	ok(got[0] == 5 && got[1] == 130 && !kvp_affinity_waiting(&me, &slot), "each waiter is named once");
	is_u64(kvp_affinity_wait(&me, 5), 1, "and has to be noted anew");
}

/* ---- processes ---- */

static void script(struct kvp_affinity *a)
{
	struct kvp_affinity_hold h;
	struct kvp_affinity_target o;
	uint64_t tag = 0;
	kvp_affinity_hold(a, key("v"), SEC, NULL, &h);
	kvp_affinity_cancel(a, key("v"), &h);
	tag = bind_by(a, "v", w1, SEC);
	kvp_affinity_release(a, tag, 2 * SEC);
	kvp_affinity_hold(a, key("v"), 2 * SEC, &w1, &h);
	kvp_affinity_commit(a, key("v"), w2, KVP_AFFINITY_IS_HARD, KVP_AFFINITY_KEEP, SEC, &tag, &o);
	kvp_affinity_drop(a, key("v"), w2);
	kvp_affinity_hold(a, key("u"), 2 * SEC, NULL, &h);
}

static void test_kills(void)
{
	make_table(20);
	kvp_point_hook = note_spot;
	script(&me);
	kvp_point_hook = NULL;
	for (int i = 0; spot[i].name; i++) {
		uint64_t bad = 0, n;
		for (n = 1; n <= spot[i].hits && !bad; n++) {
			make_table(20);
			bind_by(&me, "s", w1, SEC);
			fflush(stdout);
			pid_t pid = fork();
			if (pid == 0) {
				kvp_affinity_attach(&other, VICTIM, NULL);
				die_at(spot[i].name, n);
				script(&other);
				_exit(0);
			}
			bad += was_killed(pid) != 1;
			bad += !is_at("s", SEC, w1) || !bind_by(&me, "t", w2, SEC) || !is_at("t", SEC, w2);
			kvp_affinity_sweep_owner(&me, VICTIM);
			bad += kvp_affinity_check(&me) != 0 || !bind_by(&me, "u", w1, SEC);
			struct kvp_affinity_hold h;
			bad += kvp_affinity_hold(&me, key("v"), SEC, NULL, &h) != KVP_OK;
		}
		ok(!bad, "killed at %s (%" PRIu64 " hits): others go on, the sweep leaves nothing",
			spot[i].name, spot[i].hits);
	}
}

static uint64_t mix(uint64_t *x)
{
	return xorshift(x) >> 8;
}

static void churn(struct kvp_affinity *a, uint64_t x, uint64_t *stop)
{
	uint64_t now = SEC, tag[8] = {0};
	while (!kvp_ld_acq_u64(stop)) {
		struct kvp_affinity_hold h;
		struct kvp_affinity_target at = {mix(&x) % 3, 0}, o;
		char id[16];
		snprintf(id, sizeof(id), "%u", (unsigned)(mix(&x) % 12));
		uint64_t *t = &tag[mix(&x) % 8];
		now += mix(&x) % 4 * SEC;
		kvp_affinity_release(a, *t, now);
		*t = 0;
		if (kvp_affinity_hold(a, key(id), now, mix(&x) % 4 ? NULL : &at, &h) != KVP_OK)
			continue;
		if (h.kind == KVP_AFFINITY_INIT && mix(&x) % 3 == 0) {
			kvp_affinity_cancel(a, key(id), &h);
		} else if (kvp_affinity_commit(a, key(id), h.kind == KVP_AFFINITY_BOUND ? h.target : at,
				   KVP_AFFINITY_IS_HARD, KVP_AFFINITY_KEEP, now, t, &o) == KVP_ERR_EXISTS) {
			kvp_affinity_drop(a, key(id), o);
			kvp_affinity_cancel(a, key(id), &h);
		}
		if (mix(&x) % 16 == 0)
			kvp_affinity_reap(a, now, 3);
	}
}

static void test_churn(void)
{
	pid_t pid[3] = {0};
	uint64_t x = tap_seed(0) | 1, kills = 0;
	uint64_t *stop = shared(KVP_PAGE);
	make_table(10);
	for (int round = 0; round < 150; round++) {
		int v = round % 3;
		if (pid[v]) {
			kill(pid[v], SIGKILL);
			waitpid(pid[v], NULL, 0);
			kvp_affinity_sweep_owner(&me, KVP_OWNER((uint32_t)v + 4, 1));
			kills++;
		}
		fflush(stdout);
		pid[v] = fork();
		if (pid[v] == 0) {
			kvp_affinity_attach(&other, KVP_OWNER((uint32_t)v + 4, 1), NULL);
			churn(&other, x + (uint64_t)round * 977, stop);
			_exit(0);
		}
		usleep((useconds_t)(mix(&x) % 4000)); /* killed at some moment */
	}
	kvp_st_rel_u64(stop, 1);
	for (int i = 0; i < 3; i++) {
		waitpid(pid[i], NULL, 0);
		kvp_affinity_sweep_owner(&me, KVP_OWNER((uint32_t)i + 4, 1));
	}
	is_u64(kvp_affinity_check(&me), 0, "%" PRIu64 " processes killed at random: no fault", kills);
	uint64_t init = 0;
	struct kvp_affinity_hold h;
	for (int i = 0; i < 12; i++) {
		char id[16];
		snprintf(id, sizeof(id), "%d", i);
		init += kvp_affinity_hold(&me, key(id), 1ULL << 60, NULL, &h) == KVP_ERR_EXISTS;
	}
	is_u64(init, 0, "and no session waits for a dead one");
	munmap(stop, KVP_PAGE);
}

int main(void)
{
	test_life();
	test_conflict();
	test_full();
	test_waiters();
	if (TAP_IS_TSAN) {
		ok(1, "# SKIP kills: " TAP_PROCESSES);
		return done();
	}
	test_kills();
	test_churn();
	return done();
}
