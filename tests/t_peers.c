/* The table of replica peers: a set of strings, changed by many processes at a time, some of which are
 * killed. */
#ifndef KVP_TEST_POINTS
#define KVP_TEST_POINTS
#endif
#include "shm/peers.c"
#include "shm/point.c"
#include "tests/procs.h"
#include "tests/tap.h"

#include <pthread.h>
#include <sched.h>

#define ME 5u
#define VICTIM 9u

static struct kvp_geom geom = {.slot_max = 8, .region_gen = 3};
static struct kvp_peers p;
static void *mem;

static char listed[65536];
static void note(void *ctx, const char *text, uint32_t len)
{
	(void)ctx;
	size_t at = strlen(listed);
	snprintf(listed + at, sizeof(listed) - at, "%.*s ", (int)len, text);
}
static const char *list(void)
{
	listed[0] = 0;
	kvp_peers_list(&p, note, NULL);
	return listed;
}

static int add(kvp_owner owner, const char *text)
{
	return kvp_peers_add(&p, owner, text, (uint32_t)strlen(text));
}
static int drop(const char *text)
{
	return kvp_peers_drop(&p, text, (uint32_t)strlen(text));
}

static uint32_t rows(void)
{
	char text[KVP_PEERS_TEXT_MAX + 1];
	uint32_t len, n = 0;
	for (uint32_t i = 0; i < KVP_PEERS_MAX + 5; i++)
		n += kvp_peers_get(&p, i, text, &len) == KVP_OK;
	return n;
}

static void clear(void)
{
	char text[KVP_PEERS_TEXT_MAX + 1];
	uint32_t len;
	for (uint32_t i = 0; i < KVP_PEERS_MAX; i++)
		if (kvp_peers_get(&p, i, text, &len) == KVP_OK)
			kvp_peers_drop(&p, text, len);
}

static void a_set(void)
{
	char text[KVP_PEERS_TEXT_MAX + 2];
	uint64_t v = kvp_peers_version(&p);
	ok(add(ME, "tcp://b:2") == KVP_OK && add(ME, "tcp://a:1") == KVP_OK &&
			add(ME, "tcp://b:20") == KVP_OK,
		"three endpoints");
	is_str(list(), "tcp://a:1 tcp://b:2 tcp://b:20 ", "are listed in order");
	is_u64(kvp_peers_version(&p) - v, 3, "every change changes the version");
	ok(add(ME, "tcp://a:1") == KVP_ERR_EXISTS && add(ME, "TCP://a:1") == KVP_OK, "exact strings");
	ok(drop("tcp://a:1") == KVP_OK && drop("tcp://a:1") == KVP_ERR_NOTFOUND &&
			drop("tcp://b") == KVP_ERR_NOTFOUND,
		"what is not listed cannot be dropped");
	is_str(list(), "TCP://a:1 tcp://b:2 tcp://b:20 ", "the rest stays");
	is_u64(kvp_peers_version(&p) - v, 5, "nothing else changed the version");
	memset(text, 'x', sizeof(text));
	ok(kvp_peers_add(&p, ME, text, KVP_PEERS_TEXT_MAX) == KVP_OK &&
			kvp_peers_add(&p, ME, text, KVP_PEERS_TEXT_MAX + 1) == KVP_ERR_INVAL &&
			kvp_peers_add(&p, ME, text, 0) == KVP_ERR_INVAL &&
			kvp_peers_add(&p, 0, text, 5) == KVP_ERR_INVAL &&
			kvp_peers_drop(&p, text, KVP_PEERS_TEXT_MAX + 1) == KVP_ERR_NOTFOUND,
		"bounds");
	clear();
	for (uint32_t i = 0; i < KVP_PEERS_MAX; i++) {
		snprintf(text, sizeof(text), "ipc:///%u", i);
		add(ME, text);
	}
	ok(rows() == KVP_PEERS_MAX && add(ME, "one more") == KVP_ERR_FULL &&
			add(ME, "ipc:///7") == KVP_ERR_EXISTS,
		"a full table");
	clear();
	ok(rows() == 0 && kvp_peers_check(&p) == 0, "and an empty one");
}

static void hammer(uint32_t seed)
{
	uint64_t x = seed * 0x9e3779b97f4a7c15ull + 1;
	for (int i = 0; i < 20000; i++) {
		char text[32];
		x = x * 6364136223846793005ull + 1442695040888963407ull;
		snprintf(text, sizeof(text), "tcp://h:%u", (unsigned)(x >> 33) % 5);
		if (x >> 40 & 1)
			add(100 + seed, text);
		else
			drop(text);
		if ((x >> 50 & 31) == 0)
			sched_yield();
	}
	_exit(0);
}

static void many(void)
{
	uint32_t doubles = 0;
	for (int round = 0; round < 5; round++) {
		pid_t pid[4];
		for (uint32_t i = 0; i < 4; i++)
			if ((pid[i] = fork()) == 0)
				hammer((uint32_t)round * 4 + i);
		for (int i = 0; i < 4; i++)
			waitpid(pid[i], NULL, 0);
		char text[32];
		uint32_t distinct = 0, have = rows();
		for (uint32_t i = 0; i < 5; i++) {
			snprintf(text, sizeof(text), "tcp://h:%u", i);
			distinct += drop(text) == KVP_OK;
		}
		doubles += have != distinct || rows() || kvp_peers_check(&p);
	}
	is_u64(doubles, 0, "four processes adding and dropping leave a set");
}

static void killed_at(const char *where)
{
	pid_t pid = fork();
	if (pid == 0) {
		die_at(where, 1);
		add(VICTIM, "tcp://v:1");
		_exit(0);
	}
	is_u64(was_killed(pid), 1, "killed at %s", where);
	ok(add(ME, "tcp://o:1") == KVP_OK && drop("tcp://o:1") == KVP_OK && kvp_peers_check(&p) == 0,
		"others go on at once");
}

/* Two that list the same text at the same time: the second comes in while the first stands at a place. */
static const char *place;
static int second_rc;
static void second(const char *here)
{
	if (strcmp(here, place) != 0)
		return;
	kvp_point_hook = NULL;
	second_rc = add(ME + 1, "tcp://same:1");
}

static void at_once(const char *where)
{
	place = where;
	second_rc = 1;
	kvp_point_hook = second;
	int rc = add(ME, "tcp://same:1");
	ok((rc == KVP_OK || rc == KVP_ERR_EXISTS) && (second_rc == KVP_OK || second_rc == KVP_ERR_EXISTS) &&
			(rc == KVP_OK || second_rc == KVP_OK) && rows() == 1 &&
			strcmp(list(), "tcp://same:1 ") == 0,
		"two at the same time, the second at %s: one row (%d, %d)", where, rc, second_rc);
	clear();
}

static void swept(const char *here)
{
	if (strcmp(here, "peers:claimed") == 0)
		kvp_peers_sweep_owner(&p, ME);
}

/* Two processes list one endpoint at the same time: each has listed it before either looks. */
static pthread_barrier_t both;
static void meet(const char *at)
{
	if (strcmp(at, "peers:claimed") == 0 || strcmp(at, "peers:listed") == 0)
		pthread_barrier_wait(&both);
}
static void *add_one(void *arg)
{
	return (void *)(intptr_t)add(*(kvp_owner *)arg, "tcp://same:1");
}
static void two_at_once(void)
{
	kvp_owner owner[2] = {ME, ME + 1};
	pthread_t t[2];
	void *rc[2];
	pthread_barrier_init(&both, NULL, 2);
	kvp_point_hook = meet;
	for (int i = 0; i < 2; i++)
		pthread_create(&t[i], NULL, add_one, &owner[i]);
	for (int i = 0; i < 2; i++)
		pthread_join(t[i], &rc[i]);
	kvp_point_hook = NULL;
	pthread_barrier_destroy(&both);
	is_str(list(), "tcp://same:1 ", "two who list one endpoint at once: it is listed");
	is_u64(rows(), 1, "once");
	ok((rc[0] == (void *)KVP_OK) + (rc[1] == (void *)KVP_OK) >= 1, "at least one is told so");
	clear();
}

int main(void)
{
	uint64_t bytes = kvp_peers_footprint(&geom);
	mem = shared(bytes);
	struct kvp_geom other = geom;
	other.region_gen = 4;
	ok(kvp_peers_join(mem, &geom, &p) == KVP_ERR_AGAIN && kvp_peers_new(mem, &geom) == KVP_OK &&
			kvp_peers_join(mem, &other, &p) == KVP_ERR_LAYOUT &&
			kvp_peers_join(mem, &geom, &p) == KVP_OK &&
			kvp_peers_new(NULL, &geom) == KVP_ERR_INVAL,
		"life cycle");
	is_str(list(), "", "nothing listed at first");
	a_set();
	many();
	two_at_once();
	killed_at("peers:claimed");
	ok(rows() == 0 && kvp_peers_sweep_owner(&p, VICTIM) == 1 && kvp_peers_sweep_owner(&p, VICTIM) == 0,
		"the claimed row is swept once");
	killed_at("peers:listed");
	ok(strcmp(list(), "tcp://v:1 ") == 0 && kvp_peers_sweep_owner(&p, VICTIM) == 0 &&
			drop("tcp://v:1") == KVP_OK && rows() == 0,
		"what was listed stays until it is dropped");
	at_once("peers:claimed");
	at_once("peers:listed");
	kvp_point_hook = swept;
	ok(add(ME, "tcp://s:1") == KVP_ERR_FULL && rows() == 0, "who is taken for dead lists nothing");
	kvp_point_hook = NULL;
	p.shm->row[3].word = 77;
	p.shm->row[4].word = LISTED;
	p.shm->row[4].len = 0;
	is_u64(kvp_peers_check(&p), 2, "the check finds what cannot be");
	return done();
}
