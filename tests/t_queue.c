/* The queue object in one process: life cycle, what each step refuses, capacity, the drain word, and a random
 * walk of three owners against a plain model. */
#include "shm/queue_priv.h"
#include "tests/queue_fixture.h"

static struct queue_fixture f;
static struct queue_proc p[4];

static void life(void)
{
	struct kvp_queue_entry e = {.part = 1,
		.class = 2,
		.isl_tok = 40,
		.cached_tok = 8,
		.key = {.strict = 3, .score = -1.5},
		.has_pinned = KVP_YES,
		.pinned_worker_id = 77,
		.pinned_dp_rank = 4};
	struct kvp_queue_entry got, list[8];
	uint64_t w[512], resv, h;
	uint32_t len = 0, seen, cursor = 0;
	struct kvp_policy_usage use;
	is_u64(kvp_queue_total(&p[1].q), 0, "nobody waits at first");
	is_u64(queue_post(&p[1], "life", 200, 5, &e), KVP_OK, "posted with 200 words");
	ok(kvp_queue_total(&p[2].q) == 1 && kvp_queue_waiting(&p[2].q, 1, 2) == 1 &&
			kvp_queue_waiting(&p[2].q, 1, KVP_POLICY_CLASS_MAX) == 1 &&
			kvp_queue_waiting(&p[2].q, 0, 2) == 0,
		"counted by partition and class");
	kvp_queue_usage(&p[2].q, 1, KVP_POLICY_CLASS_MAX, &use);
	ok(use.requests == 1 && use.isl_tok == 40 && use.cached_tok == 8, "its tokens are counted");
	ok(kvp_queue_list(&p[2].q, 1, list, 8) == 1 && list[0].h == e.h && list[0].key.strict == 3 &&
			list[0].key.score == -1.5 && list[0].pinned_worker_id == 77 &&
			list[0].pinned_dp_rank == 4 && list[0].has_pinned == KVP_YES,
		"another process lists it");
	is_u64(kvp_queue_list(&p[2].q, 0, list, 8), 0, "not in another partition");
	ok(kvp_queue_words(&p[2].q, e.h, 0, w, 200, &len) == KVP_OK && len == 200 && words_are(w, 200, 7, 5),
		"and reads its words");
	ok(kvp_queue_words(&p[2].q, e.h, 63, w, 3, &len) == KVP_OK && words_are(w, 3, 7, 5 + 7 * 63),
		"from the middle, across a chunk");
	ok(kvp_queue_words(&p[2].q, e.h, 199, w, 3, &len) == KVP_OK && w[0] == 7 * 199 + 5 && w[1] == 0,
		"zeros beyond the end");
	is_u64(kvp_queue_state(&p[1].q, e.h), KVP_Q_WAITS, "it waits");
	is_u64(kvp_queue_drain_begin(&p[2].q, 1, &seen), KVP_OK, "the drain word is free");
	is_u64((uint64_t)kvp_queue_take(&p[2].q, &p[2].b, e.h, &resv), KVP_OK, "taken");
	ok(kvp_queue_take(&p[3].q, &p[3].b, e.h, &h) == KVP_ERR_NOTFOUND, "once");
	ok(resv == e.resv && kvp_resv_is_claim(&p[2].b, resv), "with its claim");
	is_u64(kvp_queue_total(&p[2].q), 0, "it does not wait any more");
	ok(kvp_queue_finish(&p[3].q, e.h, 0, w, 1) == KVP_ERR_NOTFOUND, "only its taker answers");
	for (uint32_t i = 0; i < 300; i++)
		w[i] = 3 * i + 9;
	is_u64((uint64_t)kvp_queue_finish(&p[2].q, e.h, 0, w, 300), KVP_OK, "a long answer");
	is_u64(kvp_queue_state(&p[1].q, e.h), KVP_Q_ANSWERED, "the owner finds it");
	ok(kvp_queue_next_ready(&p[3].q, &cursor, &h) == KVP_ERR_NOTFOUND, "nobody else does");
	cursor = 0;
	ok(kvp_queue_next_ready(&p[1].q, &cursor, &h) == KVP_OK && h == e.h, "among its ready ones");
	ok(kvp_queue_next_ready(&p[1].q, &cursor, &h) == KVP_ERR_NOTFOUND, "once");
	memset(w, 0, sizeof(w));
	ok(kvp_queue_answer(&p[1].q, e.h, w, 300, &len) == KVP_OK && len == 300 && words_are(w, 300, 3, 9),
		"the answer is whole");
	ok(kvp_queue_entry(&p[1].q, e.h, &got) == KVP_OK && got.resv == e.resv, "the entry too");
	ok(kvp_queue_cancel(&p[1].q, e.h) == KVP_ERR_EXISTS, "too late to cancel");
	kvp_queue_end(&p[1].q, e.h);
	ok(kvp_queue_entry(&p[1].q, e.h, &got) == KVP_ERR_NOTFOUND &&
			kvp_queue_state(&p[1].q, e.h) == KVP_Q_GONE,
		"the handle is dead");
	ok(kvp_queue_cancel(&p[1].q, e.h) == KVP_ERR_NOTFOUND, "for every call");
	is_u64((uint64_t)kvp_queue_drain_end(&p[2].q, 1, &seen), KVP_OK, "nobody kicked");
	ok(kvp_resv_abandon(&p[2].b, resv) == KVP_OK && kvp_queue_check(&p[1].q) == 0, "no faults");
}

static void cancels(void)
{
	struct kvp_queue_entry e = {.part = 0}, g = {.part = 0};
	uint64_t resv, w[2] = {1, 2};
	ok(queue_post(&p[1], "c1", 10, 1, &e) == KVP_OK && kvp_queue_cancel(&p[1].q, e.h) == KVP_OK &&
			kvp_resv_is_claim(&p[1].b, e.resv),
		"a cancelled wait leaves the claim with its owner");
	kvp_resv_abandon(&p[1].b, e.resv);
	ok(queue_post(&p[1], "c2", 10, 1, &g) == KVP_OK &&
			kvp_queue_take(&p[2].q, &p[2].b, g.h, &resv) == KVP_OK &&
			kvp_queue_cancel(&p[1].q, g.h) == KVP_ERR_AGAIN,
		"what is being served is abandoned");
	ok(kvp_queue_finish(&p[2].q, g.h, 0, w, 2) == KVP_ERR_NOTFOUND, "and its taker is told");
	ok(kvp_queue_state(&p[1].q, g.h) == KVP_Q_GONE && kvp_resv_abandon(&p[2].b, resv) == KVP_OK,
		"who ends it");
	ok(kvp_queue_check(&p[1].q) == 0 && kvp_queue_total(&p[1].q) == 0, "no faults");
}

static void room(void)
{
	static struct kvp_queue_entry e[65];
	uint64_t h;
	uint32_t n = 0;
	while (n < 65 && queue_post(&p[1], NULL, 20, n, &e[n]) == KVP_OK)
		n++;
	is_u64(n, 64, "as many as there is room for");
	for (uint32_t i = 0; i < n; i++)
		kvp_queue_cancel(&p[1].q, e[i].h);
	static uint64_t big[64 * 4096];
	ok(kvp_queue_begin(&p[1].q, &h) == KVP_OK &&
			kvp_queue_put(&p[1].q, h, big, 64 * 4096) == KVP_ERR_FULL,
		"the pool has an end");
	kvp_queue_abort(&p[1].q, h);
	ok(kvp_queue_begin(&p[1].q, &h) == KVP_OK && kvp_queue_put(&p[1].q, h, big, 64 * 4095) == KVP_OK,
		"and all of it can be used again");
	struct kvp_queue_entry s = {.part = 0};
	ok(kvp_queue_begin(&p[2].q, &s.h) == KVP_OK && kvp_queue_post(&p[2].q, &s) == KVP_OK,
		"one without words");
	uint64_t resv, w[30] = {0};
	ok(kvp_queue_take(&p[3].q, &p[3].b, s.h, &resv) == KVP_OK &&
			kvp_queue_finish(&p[3].q, s.h, 0, w, 30) == KVP_ERR_FULL &&
			kvp_queue_finish(&p[3].q, s.h, 0, w, KVP_QUEUE_INLINE) == KVP_OK,
		"a short answer always fits");
	kvp_queue_end(&p[2].q, s.h);
	kvp_queue_abort(&p[1].q, h);
	struct kvp_queue_entry bad = {.part = 99};
	ok(kvp_queue_begin(&p[1].q, &bad.h) == KVP_OK && kvp_queue_post(&p[1].q, &bad) == KVP_ERR_INVAL,
		"partitions are bounds-checked");
	kvp_queue_abort(&p[1].q, bad.h);
	ok(kvp_queue_check(&p[1].q) == 0, "no faults");
}

static void drain_word(void)
{
	uint32_t a, b;
	ok(kvp_queue_drain_begin(&p[1].q, 2, &a) == KVP_OK &&
			kvp_queue_drain_begin(&p[2].q, 2, &b) == KVP_ERR_EXISTS,
		"one drainer");
	ok(kvp_queue_drain_end(&p[1].q, 2, &a) == KVP_ERR_AGAIN &&
			kvp_queue_drain_end(&p[1].q, 2, &a) == KVP_OK,
		"who looks once more after a kick");
	ok(kvp_queue_drain_begin(&p[2].q, 2, &b) == KVP_OK, "then it is free");
	ok(!kvp_queue_stalled(&p[1].q, 2), "and lives");
	kvp_slot_release(&f.slots, KVP_OWNER(2, 1));
	ok(kvp_queue_stalled(&p[1].q, 2) && kvp_queue_drain_begin(&p[1].q, 2, &a) == KVP_OK,
		"taken from the dead");
	ok(kvp_queue_drain_end(&p[2].q, 2, &b) == KVP_OK && kvp_queue_stalled(&p[3].q, 2) == 0,
		"a late former holder takes nothing away");
	struct kvp_queue_part_shm *part = &p[1].q.part[2];
	uint64_t now_ns = kvp_clock_mono_ns();
	kvp_st_rlx_u64(&part->drain_ns, now_ns - KVP_QUEUE_STALL_NS / 2);
	ok(kvp_queue_stalled(&p[3].q, 2) == 0 && kvp_queue_drain_begin(&p[3].q, 2, &b) == KVP_ERR_EXISTS,
		"a holder has time");
	kvp_st_rlx_u64(&part->drain_ns, now_ns - KVP_QUEUE_STALL_NS - 1);
	ok(kvp_queue_stalled(&p[3].q, 2) == 1 && kvp_queue_drain_begin(&p[3].q, 2, &b) == KVP_OK,
		"one that stands still loses the word");
	ok(kvp_ld_rlx_u64(&part->drain_ns) >= now_ns &&
			kvp_queue_drain_begin(&p[1].q, 2, &a) == KVP_ERR_EXISTS,
		"its successor's time counts from then");
	kvp_queue_drain_leave(&p[3].q, 2);
	ok(kvp_queue_asked(&p[3].q) && kvp_queue_drain_begin(&p[1].q, 2, &a) == KVP_OK, "and is free again");
	kvp_queue_drain_leave(&p[1].q, 2);
	ok(kvp_queue_asked(&p[1].q) && !kvp_queue_asked(&p[1].q), "who leaves asks itself to look later");
	struct kvp_drr d = {.cursor = 3, .carry = 2, .deficit = {5, [63] = 9}}, g;
	kvp_queue_turns_set(&p[1].q, 2, &d);
	kvp_queue_turns(&p[3].q, 2, &g);
	ok(memcmp(&d, &g, sizeof(d)) == 0, "turn state is kept");
	struct kvp_queue_entry e = {.part = 2};
	is_u64(kvp_queue_nudge(&p[3].q), 0, "nobody to nudge");
	queue_post(&p[1], NULL, 1, 1, &e);
	ok(kvp_queue_nudge(&p[3].q) == 1 && kvp_queue_asked(&p[1].q) && !kvp_queue_asked(&p[3].q),
		"the owner of what waits is nudged");
	kvp_queue_cancel(&p[1].q, e.h);
	kvp_slot_assign(&f.slots, 2, KVP_ROLE_HTTPD, 2);
	ok(kvp_queue_check(&p[1].q) == 0, "no faults");
}

/* ---- random walk ---- */

#define MODEL_MAX 64
enum { M_NONE, M_WAITS, M_TAKEN, M_ABANDONED, M_DONE };
static struct model {
	uint64_t h, resv, salt, isl;
	int state, owner, taker, part, class;
} model[MODEL_MAX];

static void model_check(const char *when, uint64_t step)
{
	struct kvp_policy_usage use, want;
	for (uint32_t part = 0; part < 2; part++)
		for (uint32_t c = 0; c < 3; c++) {
			want = (struct kvp_policy_usage){0, 0, 0};
			for (int i = 0; i < MODEL_MAX; i++)
				if (model[i].state == M_WAITS && model[i].part == (int)part &&
					model[i].class == (int)c) {
					want.requests++;
					want.isl_tok += model[i].isl;
				}
			kvp_queue_usage(&p[1].q, part, c, &use);
			if (use.requests != want.requests || use.isl_tok != want.isl_tok ||
				kvp_queue_waiting(&p[2].q, part, c) != want.requests)
				ok(0, "%s, step %" PRIu64 ": what waits in %u/%u", when, step, part, c);
		}
}

static void walk_one(struct model *m, uint64_t step)
{
	uint64_t w[512] = {0};
	uint32_t len = 0, who = 1 + rnd_below(3);
	char id[32];
	switch (m->state) {
	case M_NONE: {
		struct kvp_queue_entry e = {
			.part = rnd_below(2), .class = rnd_below(3), .isl_tok = rnd_below(99)};
		snprintf(id, sizeof(id), "walk-%" PRIu64, step);
		m->salt = step;
		if (queue_post(&p[who], rnd_below(4) ? id : NULL, rnd_below(256), m->salt, &e) != KVP_OK)
			return;
		m->h = e.h;
		m->resv = e.resv;
		m->isl = e.isl_tok;
		m->part = (int)e.part;
		m->class = (int)e.class;
		m->owner = (int)who;
		m->state = M_WAITS;
		return;
	}
	case M_WAITS:
		if (rnd_below(3) == 0) {
			if (kvp_queue_cancel(&p[m->owner].q, m->h) != KVP_OK)
				ok(0, "a wait is cancelled");
			if (m->resv)
				kvp_resv_abandon(&p[m->owner].b, m->resv);
			m->state = M_NONE;
			return;
		}
		m->taker = (int)who;
		if (kvp_queue_words(&p[who].q, m->h, 0, w, 256, &len) || !words_are(w, len, 7, m->salt))
			ok(0, "words of a waiting record");
		if (kvp_queue_take(&p[who].q, &p[who].b, m->h, &w[0]))
			ok(0, "a waiting record can be taken");
		m->state = M_TAKEN;
		return;
	case M_TAKEN:
		if (rnd_below(4) == 0) {
			if (kvp_queue_cancel(&p[m->owner].q, m->h) != KVP_ERR_AGAIN)
				ok(0, "a taken record is abandoned");
			m->state = M_ABANDONED;
			return;
		}
		for (uint32_t i = 0; i < 100; i++)
			w[i] = i + m->salt;
		if (kvp_queue_finish(&p[m->taker].q, m->h, 0, w, rnd_below(100)))
			ok(0, "a taken record is answered");
		m->state = M_DONE;
		break;
	case M_ABANDONED:
		if (kvp_queue_finish(&p[m->taker].q, m->h, 0, w, rnd_below(20)) != KVP_ERR_NOTFOUND)
			ok(0, "an abandoned record takes no answer");
		m->state = M_NONE;
		break;
	default:
		if (kvp_queue_answer(&p[m->owner].q, m->h, w, 100, &len) || !words_are(w, len, 1, m->salt))
			ok(0, "the answer arrives");
		kvp_queue_end(&p[m->owner].q, m->h);
		m->state = M_NONE;
		return;
	}
	if (m->resv)
		kvp_resv_abandon(&p[m->taker].b, m->resv);
}

static void walk(void)
{
	rnd_seed();
	for (uint64_t step = 1; step <= 20000; step++) {
		walk_one(&model[rnd_below(MODEL_MAX)], step);
		if (step % 64 == 0)
			model_check("walk", step);
	}
	for (int i = 0; i < MODEL_MAX; i++)
		while (model[i].state)
			walk_one(&model[i], 0);
	ok(kvp_queue_check(&p[1].q) == 0 && kvp_queue_total(&p[1].q) == 0 && kvp_resv_cnt(&p[1].b) == 0,
		"20000 random steps end with nothing left");
}

/* Requests that come and go one after the other stay in the same few chunks. */
static void footprint(void)
{
	const struct kvp_queue *q = &p[1].q;
	uint64_t word[200], h, touched = 0;
	int rc = KVP_OK;
	memset(word, 1, sizeof(word));
	for (int i = 0; i < 5000 && !rc; i++) {
		rc = kvp_queue_begin(&p[1].q, &h);
		rc = rc ? rc : kvp_queue_put(&p[1].q, h, word, 200);
		kvp_queue_abort(&p[1].q, h);
	}
	for (uint32_t c = 0; c < q->chunk_cnt; c++)
		touched += q->pool[(uint64_t)c * 64] != 0;
	ok(!rc && touched <= 4, "5000 records of 200 words in %" PRIu64 " chunks of %u", touched,
		q->chunk_cnt);
}

int main(void)
{
	queue_fixture_make(&f);
	for (uint32_t i = 1; i < 4; i++)
		queue_proc_make(&f, &p[i], i);
	footprint();
	life();
	cancels();
	room();
	drain_word();
	walk();
	return done();
}
