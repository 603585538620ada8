/* Distinct error log: one record an error, full table, half-written records, many writers. */
#include "shm/errlog.h"
#include "tests/procs.h"
#include "tests/tap.h"
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

static struct kvp_geom geom = {.slot_max = 8, .region_gen = 1};
#define OWNER KVP_OWNER(2, 1)

static uint32_t records(struct kvp_errlog *l, uint64_t *sum)
{
	uint32_t n = 0;
	struct kvp_errlog_entry e;
	*sum = 0;
	for (uint32_t i = 0; i < KVP_ERRLOG_MAX; i++)
		if (kvp_errlog_get(l, i, &e) == KVP_OK) {
			n++;
			*sum += e.cnt;
		}
	return n;
}

static int only(struct kvp_errlog *l, struct kvp_errlog_entry *e)
{
	for (uint32_t i = 0; i < KVP_ERRLOG_MAX; i++)
		if (kvp_errlog_get(l, i, e) == KVP_OK)
			return 1;
	return 0;
}

static void *fresh(struct kvp_errlog *l)
{
	void *mem = shared(kvp_errlog_footprint(&geom));
	ok(kvp_errlog_join(mem, &geom, l) == KVP_ERR_AGAIN, "join before new answers AGAIN");
	ok(kvp_errlog_new(mem, &geom) == KVP_OK && kvp_errlog_join(mem, &geom, l) == KVP_OK, "new and join");
	return mem;
}

static void contents(void)
{
	struct kvp_errlog l;
	struct kvp_errlog_entry e;
	uint64_t sum;
	fresh(&l);
	ok(kvp_errlog_put(&l, 0, 1, -1, "m", 1, "x") == KVP_ERR_INVAL, "no owner, no record");
	ok(kvp_errlog_put(&l, OWNER, 100, KVP_ERR_FULL, "resv", 12, "no\nroom") == KVP_OK, "put");
	ok(kvp_errlog_put(&l, OWNER, 300, KVP_ERR_FULL, "resv", 12, "no\nroom") == KVP_OK, "put again");
	ok(kvp_errlog_put(&l, OWNER, 200, KVP_ERR_FULL, "resv", 12, "no\nroom") == KVP_OK,
		"and with an older time");
	ok(records(&l, &sum) == 1 && sum == 3, "one record counts all three");
	ok(only(&l, &e) && e.first_ns == 100 && e.last_ns == 300, "first and last time");
	ok(e.code == KVP_ERR_FULL && e.line == 12 && e.slot == 2, "code, line and slot");
	is_str(e.module, "resv", "module");
	is_str(e.text, "no?room", "control characters are replaced");
	kvp_errlog_put(&l, OWNER, 1, KVP_ERR_FULL, "resv", 13, "no\nroom");
	kvp_errlog_put(&l, OWNER, 1, KVP_ERR_AGAIN, "resv", 12, "no\nroom");
	kvp_errlog_put(&l, OWNER, 1, KVP_ERR_FULL, "book", 12, "no\nroom");
	kvp_errlog_put(&l, OWNER, 1, KVP_ERR_FULL, "resv", 12, "no room");
	ok(records(&l, &sum) == 5 && sum == 7, "line, code, module and text each make another error");
	is_u64(kvp_errlog_check(&l), 0, "no faults");
}

static void long_text(void)
{
	struct kvp_errlog l;
	struct kvp_errlog_entry e;
	char text[400];
	fresh(&l);
	memset(text, 'a', sizeof(text));
	memcpy(text + KVP_ERRLOG_TEXT - 2, "\xe2\x82\xac", 3); /* the cut falls inside this character */
	text[399] = 0;
	kvp_errlog_put(&l, OWNER, 1, -1, "a module with a very long name", 1, text);
	ok(only(&l, &e), "a record");
	is_u64(strlen(e.text), KVP_ERRLOG_TEXT - 2,
		"text is cut in front of the character that does not fit");
	is_u64(strlen(e.module), KVP_ERRLOG_MODULE - 1, "module is cut");
}

static void full(void)
{
	struct kvp_errlog l;
	uint64_t sum;
	fresh(&l);
	int rc = KVP_OK;
	for (uint32_t i = 0; i < KVP_ERRLOG_MAX; i++)
		rc |= kvp_errlog_put(&l, OWNER, 1, -1, "m", i, "t");
	ok(rc == KVP_OK && records(&l, &sum) == KVP_ERRLOG_MAX, "as many errors as records");
	ok(kvp_errlog_put(&l, OWNER, 1, -1, "m", 5, "another text") == KVP_OK,
		"a known place is counted when full");
	ok(kvp_errlog_put(&l, OWNER, 1, -1, "n", 5, "t") == KVP_ERR_FULL, "an unknown one is refused");
	records(&l, &sum);
	ok(sum == KVP_ERRLOG_MAX + 1 && kvp_errlog_lost(&l) == 1, "and counted as lost");
	is_u64(kvp_errlog_check(&l), 0, "no faults");
}

static void writers(void)
{
	enum { PROCS = 4, ROUNDS = 5000, KINDS = 40 };
	struct kvp_errlog l;
	uint64_t sum;
	fresh(&l);
	for (uint32_t p = 0; p < PROCS; p++)
		if (fork() == 0) {
			for (uint32_t i = 0; i < ROUNDS; i++)
				kvp_errlog_put(&l, KVP_OWNER(p, 1), i, -1, "m", (i * 7 + p) % KINDS, "t");
			_exit(0);
		}
	while (wait(NULL) > 0)
		;
	uint32_t n = records(&l, &sum);
	is_u64(sum, PROCS * ROUNDS, "no occurrence is lost with %d processes", PROCS);
	ok(n >= KINDS && n < KINDS * PROCS, "%u records for %d errors", n, KINDS);
	is_u64(kvp_errlog_check(&l), 0, "no faults");
}

static void half_written(void)
{
	struct kvp_errlog l;
	uint64_t sum, *word = NULL;
	char *mem = fresh(&l);
	/* A record turned back into what a writer killed while filling leaves: CLAIMED, same owner. */
	kvp_errlog_put(&l, OWNER, 1, -1, "m", 1, "t");
	for (uint64_t off = 128; off < kvp_errlog_footprint(&geom) && !word; off += 320)
		if (*(uint64_t *)(void *)(mem + off))
			word = (uint64_t *)(void *)(mem + off);
	*word = ((uint64_t)OWNER << 8) | 1;
	ok(records(&l, &sum) == 0, "a half-written record is not shown");
	ok(kvp_errlog_put(&l, KVP_OWNER(3, 1), 1, -1, "m", 1, "t") == KVP_OK, "and holds nobody up");
	ok(records(&l, &sum) == 1 && sum == 1, "the error is there once");
	is_u64(kvp_errlog_sweep_owner(&l, KVP_OWNER(2, 2)), 0, "the sweep of another generation leaves it");
	is_u64(kvp_errlog_sweep_owner(&l, OWNER), 1, "the sweep of its owner frees it");
	is_u64(kvp_errlog_check(&l), 0, "no faults");
}

int main(void)
{
	contents();
	long_text();
	full();
	writers();
	half_written();
	return done();
}
