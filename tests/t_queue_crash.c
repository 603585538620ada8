/* A process is killed at every place of the queue's code, at every hit: once as the owner of waiting records,
 * once as the drainer of another one's. Then the sweeps. No record of the dead is left, no record of the
 * living is lost, nothing is booked or claimed that nobody knows of. The sweep is killed too. Builds the
 * modules with their kill places whatever the build. */
#ifndef KVP_TEST_POINTS
#define KVP_TEST_POINTS
#endif
#include "shm/active.c"
#include "shm/book_check.c"
#include "shm/load.c"
#include "shm/point.c"
#include "shm/resv.c"
#include "shm/sweep.c"
#undef MAGIC
#undef LAYOUT
#define layout_hash queue_layout_hash
#define recount queue_recount
#define check_counts queue_check_counts
#define fault queue_fault
#define lay_out queue_lay_out
#define places queue_places
#define sweep_one queue_sweep_one
#define sweep_chunks queue_sweep_chunks
#define still queue_still
#define chain queue_chain
#include "shm/queue.c"
#include "shm/queue_drain.c"
#include "shm/queue_sweep.c"
#undef places
#include "tests/procs.h"
#include "tests/queue_fixture.h"

#define SURVIVOR 1u
#define VICTIM 2u
#define SWEEPER 3u

static struct queue_fixture f;
static struct queue_proc me;

/* The survivor's records, posted before the victim drains. */
static struct kvp_queue_entry waits[3];

static void survivor_posts(void)
{
	memset(waits, 0, sizeof(waits));
	for (uint32_t i = 0; i < 3; i++) {
		waits[i].part = 1;
		waits[i].class = i;
		if (queue_post(&me, i == 0 ? "s0" : i == 1 ? "s1" : NULL, 100, 40 + i, &waits[i]))
			ok(0, "the survivor posts");
	}
}

/* One that waits and stays, one cancelled, one answered and ended, one answered and left, one in the middle
 * of its making. */
static void owner_script(struct queue_proc *v)
{
	struct kvp_queue_entry e[5];
	uint64_t h;
	uint32_t seen;
	memset(e, 0, sizeof(e));
	queue_post(v, "v0", 130, 1, &e[0]);
	queue_post(v, "v1", 10, 2, &e[1]);
	if (kvp_queue_cancel(&v->q, e[1].h) == KVP_OK)
		kvp_resv_abandon(&v->b, e[1].resv);
	queue_post(v, "v2", 10, 3, &e[2]);
	queue_post(v, "v3", 70, 4, &e[3]);
	if (kvp_queue_drain_begin(&v->q, 0, &seen) == KVP_OK) {
		queue_serve(v, e[2].h, 100, 8);
		queue_serve(v, e[3].h, 5, 9);
		while (kvp_queue_drain_end(&v->q, 0, &seen) == KVP_ERR_AGAIN)
			;
	}
	if (kvp_queue_state(&v->q, e[2].h) == KVP_Q_ANSWERED) {
		kvp_queue_end(&v->q, e[2].h);
		kvp_resv_free(&v->b, e[2].resv);
	}
	kvp_queue_begin(&v->q, &h);
	uint64_t word[70] = {0};
	kvp_queue_put(&v->q, h, word, 70);
}

static void drainer_script(struct queue_proc *v)
{
	struct kvp_queue_entry list[8];
	uint32_t seen;
	if (kvp_queue_drain_begin(&v->q, 1, &seen) != KVP_OK)
		return;
	uint32_t n = kvp_queue_list(&v->q, 1, list, 8);
	for (uint32_t i = 0; i < n; i++)
		queue_serve(v, list[i].h, i ? 5 : 100, 20 + list[i].class);
	kvp_queue_drain_end(&v->q, 1, &seen);
}

static pid_t spawn(void (*run)(struct queue_proc *), uint32_t slot, const char *place, uint64_t n)
{
	fflush(stdout);
	pid_t pid = fork();
	if (pid == 0) {
		struct queue_proc v;
		queue_proc_make(&f, &v, slot);
		die_at(place, n);
		run(&v);
		_exit(0);
	}
	return pid;
}

static void sweep_as(struct queue_proc *s, uint32_t slot)
{
	struct kvp_queue_sweep res;
	kvp_book_sweep_owner(&s->b, KVP_OWNER(slot, 1), NULL, NULL, NULL);
	kvp_queue_sweep_owner(&s->q, &s->b, KVP_OWNER(slot, 1), &res);
}

static void sweep_script(struct queue_proc *v)
{
	sweep_as(v, VICTIM);
}

/* What the survivor finds of its records: waiting with a claim, to be claimed anew, or answered. */
static int survivor_collects(void)
{
	int good = 1;
	for (uint32_t i = 0; i < 3; i++) {
		uint64_t w[128], h;
		uint32_t len = 0;
		struct kvp_resv_info info;
		switch (kvp_queue_state(&me.q, waits[i].h)) {
		case KVP_Q_WAITS:
			good &= kvp_queue_words(&me.q, waits[i].h, 0, w, 100, &len) == KVP_OK &&
				words_are(w, 100, 7, 40 + i);
			good &= i == 2 || kvp_resv_is_claim(&me.b, waits[i].resv);
			good &= kvp_queue_cancel(&me.q, waits[i].h) == KVP_OK;
			if (i < 2)
				good &= kvp_resv_abandon(&me.b, waits[i].resv) == KVP_OK;
			break;
		case KVP_Q_RETRY:
			good &= i < 2 && kvp_resv_claim(&me.b, me.b.owner, i ? "s1" : "s0", 2, &h) == KVP_OK;
			good &= kvp_queue_again(&me.q, waits[i].h, h) == KVP_OK;
			good &= queue_serve(&me, waits[i].h, 3, 1) == KVP_OK;
			kvp_queue_end(&me.q, waits[i].h);
			good &= kvp_resv_free(&me.b, h) == KVP_OK;
			break;
		case KVP_Q_ANSWERED:
			good &= kvp_queue_answer(&me.q, waits[i].h, w, 128, &len) == KVP_OK &&
				words_are(w, len, 3, 20 + i) && (len == 100 || len == 5);
			good &= i == 2 || kvp_resv_info(&me.b, waits[i].resv, &info) == KVP_OK;
			kvp_queue_end(&me.q, waits[i].h);
			if (i < 2)
				good &= kvp_resv_free(&me.b, waits[i].resv) == KVP_OK;
			break;
		default:
			good = 0;
		}
	}
	return good;
}

/* v2 was answered, and ended or just about to be: a booking of the node that its client frees. */
static int nothing_left(void)
{
	struct kvp_load l;
	uint64_t h;
	if (kvp_resv_find(&me.b, "v2", 2, &h) == KVP_OK)
		kvp_resv_free(&me.b, h);
	kvp_load_read(&me.b, 0, &l);
	return kvp_queue_check(&me.q) == 0 && kvp_book_check(&me.b) == 0 && kvp_queue_total(&me.q) == 0 &&
	       kvp_resv_cnt(&me.b) == 0 && l.prefill_tok == 0 && l.requests == 0 && l.active_blk_fx == 0;
}

/* The victim's slot counts as dead from here on; afterwards it is given out again, same generation. */
static void victim_dies(void)
{
	kvp_slot_release(&f.slots, KVP_OWNER(VICTIM, 1));
}
static void victim_again(void)
{
	kvp_st_rlx_u32(&f.slots.slot[VICTIM].gen, 0);
	kvp_slot_assign(&f.slots, VICTIM, KVP_ROLE_HTTPD, VICTIM);
}

static int kill_once(void (*script)(struct queue_proc *), const char *place, uint64_t n)
{
	survivor_posts();
	was_killed(spawn(script, VICTIM, place, n));
	victim_dies();
	struct queue_proc s;
	queue_proc_make(&f, &s, SWEEPER);
	sweep_as(&s, VICTIM);
	uint64_t faults = kvp_queue_check(&me.q);
	int good = survivor_collects(), left = nothing_left();
	victim_again();
	kvp_book_leave(&s.b);
	if (faults || !good || !left)
		printf("# killed at %s:%" PRIu64 ": faults %" PRIu64 ", collected %d, empty %d\n", place, n,
			faults, good, left);
	return !faults && good && left;
}

static void count_places(void (*script)(struct queue_proc *), uint32_t slot)
{
	struct queue_proc v;
	spots_clear();
	queue_proc_make(&f, &v, slot);
	kvp_point_hook = note_spot;
	script(&v);
	kvp_point_hook = NULL;
	kvp_book_leave(&v.b);
}

static void test_kills(const char *who, void (*script)(struct queue_proc *))
{
	struct queue_proc s;
	survivor_posts();
	count_places(script, VICTIM);
	victim_dies();
	queue_proc_make(&f, &s, SWEEPER);
	sweep_as(&s, VICTIM);
	int good = survivor_collects(), left = nothing_left();
	ok(good && left, "%s without a kill: swept without a trace", who);
	victim_again();
	kvp_book_leave(&s.b);
	for (int i = 0; spot[i].name; i++) {
		uint64_t tried = 0, bad = 0;
		for (uint64_t n = 1; n <= spot[i].hits && !bad; n += 1 + n / 8, tried++)
			bad += !kill_once(script, spot[i].name, n);
		ok(!bad, "%s killed at %s (%" PRIu64 " of %" PRIu64 " hits): nothing lost, nothing left", who,
			spot[i].name, tried, spot[i].hits);
	}
}

/* The sweep is killed at each of its places, then repeated by the next one (same slot, as the supervisor
 * starts it). */
static void test_sweep(const char *who, void (*script)(struct queue_proc *), const char *death, uint64_t nth)
{
	uint64_t tried = 0, bad = 0;
	survivor_posts();
	was_killed(spawn(script, VICTIM, death, nth));
	victim_dies();
	count_places(sweep_script, SWEEPER);
	survivor_collects();
	victim_again();
	for (int i = 0; spot[i].name; i++)
		for (uint64_t n = 1; n <= spot[i].hits && !bad; n += 1 + spot[i].hits / 8, tried++) {
			if (strncmp(spot[i].name, "book:", 5) == 0 &&
				strcmp(spot[i].name, "book:release") != 0)
				continue;
			survivor_posts();
			was_killed(spawn(script, VICTIM, death, nth));
			victim_dies();
			was_killed(spawn(sweep_script, SWEEPER, spot[i].name, n));
			struct queue_proc s;
			queue_proc_make(&f, &s, SWEEPER);
			sweep_as(&s, SWEEPER);
			sweep_as(&s, VICTIM);
			uint64_t faults = kvp_queue_check(&me.q);
			int good = survivor_collects(), left = nothing_left();
			bad += faults || !good || !left;
			if (bad)
				printf("# sweep killed at %s:%" PRIu64 ": faults %" PRIu64
				       ", collected %d, empty %d\n",
					spot[i].name, n, faults, good, left);
			victim_again();
			kvp_book_leave(&s.b);
		}
	ok(!bad && tried > 3, "%s dead at %s: %" PRIu64 " sweeps killed and repeated", who, death, tried);
}

/* An owner dies while another process serves its record: that one is told, and ends it. */
static void test_owner_gone(void)
{
	struct queue_proc v, s;
	struct kvp_queue_entry e = {.part = 0};
	uint64_t resv, w[2] = {0};
	queue_proc_make(&f, &v, VICTIM);
	queue_proc_make(&f, &s, SWEEPER);
	queue_post(&v, "gone", 10, 1, &e);
	ok(kvp_queue_take(&me.q, &me.b, e.h, &resv) == KVP_OK, "a record is being served");
	victim_dies();
	sweep_as(&s, VICTIM);
	ok(kvp_resv_is_claim(&me.b, resv), "its owner's death leaves the claim with the server");
	ok(kvp_queue_finish(&me.q, e.h, 0, w, 2) == KVP_ERR_NOTFOUND &&
			kvp_resv_abandon(&me.b, resv) == KVP_OK,
		"who is told, and gives it up");
	victim_again();
	ok(nothing_left(), "nothing is left");
}

int main(void)
{
	if (TAP_IS_TSAN)
		return skip_all(TAP_PROCESSES);
	queue_fixture_make(&f);
	queue_proc_make(&f, &me, SURVIVOR);
	test_kills("owner", owner_script);
	test_kills("drainer", drainer_script);
	test_sweep("owner", owner_script, "queue:done", 2);
	test_sweep("owner", owner_script, "queue:chunk", 3);
	test_sweep("drainer", drainer_script, "queue:answer", 1);
	test_sweep("drainer", drainer_script, "queue:handed", 2);
	test_owner_gone();
	return done();
}
