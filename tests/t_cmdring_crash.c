/* Command ring and error log: a process killed at each of their named places, then what the others do. */
#include "shm/cmdring.h"
#include "shm/errlog.h"
#include "tests/procs.h"
#include "tests/tap.h"

static struct kvp_geom geom = {.slot_max = 8, .region_gen = 1};
#define PRODUCER KVP_OWNER(3, 1)
#define OTHER KVP_OWNER(4, 1)
#define CONSUMER KVP_OWNER(1, 1)
static struct kvp_cmdring ring;
static struct kvp_errlog errlog;
static uint64_t *executed; /* shared */

static int post(kvp_owner o, struct kvp_cmd_cell **c)
{
	void *p;
	int rc = kvp_cmd_begin(&ring, o, c, &p);
	return rc ? rc : kvp_cmd_post(&ring, *c, KVP_CMD_PING, 8);
}

static int serve_one(void)
{
	struct kvp_cmd_cell *c;
	int rc = kvp_cmd_next(&ring, &c);
	if (rc)
		return rc;
	(*executed)++;
	return kvp_cmd_reply(&ring, c, KVP_OK, 8);
}

static void produce(void)
{
	struct kvp_cmd_cell *c;
	(void)post(PRODUCER, &c);
}

static void consume(void)
{
	(void)serve_one();
}

static void log_one(void)
{
	(void)kvp_errlog_put(&errlog, PRODUCER, 1, -1, "m", 1, "t");
}

static void die_in(void (*fn)(void), const char *place)
{
	pid_t pid = fork();
	if (pid == 0) {
		die_at(place, 1);
		fn();
		_exit(0);
	}
	is_u64(was_killed(pid), 1, "killed at %s", place);
}

static void fresh(void)
{
	void *m = shared(kvp_cmdring_footprint(&geom));
	ok(kvp_cmdring_new(m, &geom) == KVP_OK && kvp_cmdring_join(m, &geom, &ring) == KVP_OK, "a new ring");
	*executed = 0;
}

/* want: how often the dead producer's command is executed in the end. */
static void producer_dies(const char *place, uint64_t want)
{
	struct kvp_cmd_cell *c;
	uint32_t n[KVP_CMD_STATES];
	fresh();
	kvp_cmd_attach(&ring, CONSUMER);
	while (serve_one() == KVP_OK)
		;
	die_in(produce, place);
	is_u64(kvp_cmdring_check(&ring), 0, "no faults before the sweep");
	ok(post(OTHER, &c) == KVP_OK, "another producer goes on");
	is_u64(kvp_cmd_sweep_owner(&ring, PRODUCER), 1, "the sweep finds one cell");
	while (serve_one() == KVP_OK)
		;
	ok(kvp_cmd_done(&ring, c) && kvp_cmd_end(&ring, c) == 1, "the other one is answered");
	is_u64(*executed, want + 1, "the dead one's command was executed %u times", (unsigned)want);
	kvp_cmd_count(&ring, n);
	is_u64(n[0], KVP_CMD_CELLS, "every cell is free");
}

static void consumer_dies(const char *place, uint64_t again, uint64_t attempt)
{
	struct kvp_cmd_cell *c, *t;
	fresh();
	kvp_cmd_attach(&ring, CONSUMER);
	ok(post(OTHER, &c) == KVP_OK, "a command waits");
	die_in(consume, place);
	is_u64(kvp_cmdring_check(&ring), 0, "no faults");
	is_u64(kvp_cmd_attach(&ring, KVP_OWNER(1, 2)), again, "the next consumer takes %u over",
		(unsigned)again);
	if (again) {
		ok(kvp_cmd_next(&ring, &t) == KVP_OK && t == c && t->attempt == attempt, "as attempt %u",
			(unsigned)attempt);
		kvp_cmd_reply(&ring, t, KVP_OK, 0);
	}
	ok(kvp_cmd_done(&ring, c) && kvp_cmd_end(&ring, c) == 1, "the producer is answered");
}

static void bell_is_not_lost(void)
{
	fresh();
	kvp_cmd_attach(&ring, CONSUMER);
	while (serve_one() == KVP_OK)
		;
	die_in(produce, "cmdring:posted");
	ok(serve_one() == KVP_ERR_NOTFOUND, "posted without ringing: not noticed");
	kvp_cmd_sweep_owner(&ring, PRODUCER);
	ok(serve_one() == KVP_OK, "until the sweep rings");
}

static void writer_dies(void)
{
	void *m = shared(kvp_errlog_footprint(&geom));
	kvp_errlog_new(m, &geom);
	kvp_errlog_join(m, &geom, &errlog);
	die_in(log_one, "errlog:claimed");
	is_u64(kvp_errlog_check(&errlog), 0, "no faults");
	ok(kvp_errlog_put(&errlog, OTHER, 1, -1, "m", 1, "t") == KVP_OK, "another writer goes on");
	is_u64(kvp_errlog_sweep_owner(&errlog, PRODUCER), 1, "the sweep frees the record");
}

int main(void)
{
	if (TAP_IS_TSAN)
		return skip_all(TAP_PROCESSES);
	executed = shared(4096);
	producer_dies("cmdring:claimed", 0);
	producer_dies("cmdring:ticket", 0);
	producer_dies("cmdring:posted", 1);
	consumer_dies("cmdring:taken", 1, 1);
	consumer_dies("cmdring:replied", 0, 0);
	bell_is_not_lost();
	writer_dies();
	return done();
}
