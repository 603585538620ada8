/* Pending selections: the rules one by one, then long random runs against a model of a few lines. */
#include "tests/pending_fixture.h"

static uint64_t rnd_state;
static uint64_t rnd(void)
{
	rnd_state ^= rnd_state << 13;
	rnd_state ^= rnd_state >> 7;
	rnd_state ^= rnd_state << 17;
	return rnd_state >> 11;
}

static uint64_t entries(struct pend *f)
{
	struct kvp_pending_stat st;
	kvp_pending_stat(&f->p, &st);
	return st.entries;
}

static void test_estimate(void)
{
	struct kvp_pending_item it = {.id_len = 1, .names_len = 12, .seq_cnt = 3};
	is_u64(kvp_pending_estimate(&it), 37, "3 hashes, id of 1 byte: 37 bytes");
	it.id_len = 5;
	is_u64(kvp_pending_estimate(&it), 41, "id of 5 bytes: 41");
	it = (struct kvp_pending_item){.id_len = 10, .names_len = 12, .seq_cnt = 8, .block_cnt = 8};
	is_u64(kvp_pending_estimate(&it), 150, "8 and 8 hashes, id of 10 bytes: 150");
}

static void test_life(void)
{
	struct pend f;
	struct kvp_pending_hit h, h2;
	pend_make(&f, 4, 1 << 20, 10 * SEC);
	ok(pend_put(&f.p, "a", 3, 7, SEC) == KVP_OK && pend_get(&f.p, "a", 3, 7, SEC, &h) == 1,
		"kept and found");
	ok(pend_get(&f.p, "a", 3, 7, SEC, &h) == 1, "a peek does not consume");
	ok(kvp_pending_peek(&f.p, 4, "a", 1, SEC, &h2) == KVP_ERR_NOTFOUND, "another partition: not found");
	ok(kvp_pending_peek(&f.p, 3, "b", 1, SEC, &h2) == KVP_ERR_NOTFOUND, "another id: not found");
	ok(pend_put(&f.p, "a", 500, 8, 2 * SEC) == KVP_OK && pend_get(&f.p, "a", 500, 8, 2 * SEC, &h2) == 1 &&
			entries(&f) == 1,
		"the latest wins and is alone");
	ok(kvp_pending_consume(&f.p, &h) == KVP_ERR_NOTFOUND &&
			pend_get(&f.p, "a", 500, 8, 2 * SEC, NULL) == 1,
		"a consume of the older generation leaves the newer");
	uint64_t seq[3];
	ok(kvp_pending_lists(&f.p, &h, seq, NULL, NULL) == KVP_ERR_NOTFOUND, "nor can its lists be read");
	ok(kvp_pending_consume(&f.p, &h2) == KVP_OK && kvp_pending_consume(&f.p, &h2) == KVP_ERR_NOTFOUND &&
			pend_get(&f.p, "a", 500, 8, 2 * SEC, NULL) == 0,
		"consumed once");
	pend_put(&f.p, "d", 1, 1, 3 * SEC);
	ok(kvp_pending_discard(&f.p, 3, "d", 1) == KVP_OK &&
			kvp_pending_discard(&f.p, 3, "d", 1) == KVP_ERR_NOTFOUND,
		"discarded once");
	is_u64(kvp_pending_check(&f.p), 0, "no fault");
	pend_drop(&f);
}

static void test_ttl(void)
{
	struct pend f;
	pend_make(&f, 100, 1 << 20, 10 * SEC);
	pend_put(&f.p, "a", 3, 7, SEC);
	pend_put(&f.p, "b", 3, 8, SEC);
	ok(pend_get(&f.p, "a", 3, 7, 11 * SEC, NULL) == 1, "exactly as old as the time to live: there");
	ok(pend_get(&f.p, "a", 3, 7, 11 * SEC + 1, NULL) == 0, "a nanosecond older: not there");
	is_u64(entries(&f), 2, "expired entries stay until an insert");
	pend_put(&f.p, "c", 3, 9, 12 * SEC);
	is_u64(entries(&f), 1, "which drops them");
	pend_put(&f.p, "old", 3, 1, 5 * SEC);
	ok(pend_get(&f.p, "old", 3, 1, 22 * SEC, NULL) == 1,
		"a clock that lags cannot make a newer entry older");
	is_u64(kvp_pending_check(&f.p), 0, "no fault");
	pend_drop(&f);
}

static void test_limits(void)
{
	struct pend f;
	pend_make(&f, 2, 1 << 20, 10 * SEC);
	pend_put(&f.p, "a", 1, 1, SEC);
	pend_put(&f.p, "b", 1, 2, SEC);
	pend_put(&f.p, "a", 1, 3, SEC);
	pend_put(&f.p, "c", 1, 4, SEC);
	ok(pend_get(&f.p, "b", 1, 2, SEC, NULL) == 0 && pend_get(&f.p, "a", 1, 3, SEC, NULL) == 1 &&
			pend_get(&f.p, "c", 1, 4, SEC, NULL) == 1,
		"over the entries the oldest goes; replacement made a newest");
	pend_drop(&f);
	pend_make(&f, 100, 74, 10 * SEC);
	for (int i = 0; i < 3; i++)
		pend_put(&f.p, i == 0 ? "a" : i == 1 ? "b" : "c", 3, 1, SEC);
	ok(!pend_get(&f.p, "a", 3, 1, SEC, NULL) && pend_get(&f.p, "b", 3, 1, SEC, NULL) == 1 &&
			pend_get(&f.p, "c", 3, 1, SEC, NULL) == 1,
		"37 bytes each in a budget of 74: two stay");
	pend_put(&f.p, "c", 7, 2, SEC);
	ok(pend_get(&f.p, "c", 7, 2, SEC, NULL) == 1 && entries(&f) == 1,
		"a larger replacement pushes the other out");
	pend_put(&f.p, "d", 9, 1, SEC);
	is_u64(entries(&f), 0, "over the whole budget: everything goes, itself too");
	is_u64(kvp_pending_check(&f.p), 0, "no fault");
	pend_drop(&f);
	pend_make(&f, 0, 1 << 20, 10 * SEC);
	ok(pend_put(&f.p, "a", 1, 1, SEC) == KVP_OK && pend_get(&f.p, "a", 1, 1, SEC, NULL) == 0 &&
			kvp_pending_check(&f.p) == 0,
		"no entries allowed: nothing is kept");
	pend_drop(&f);
}

/* One entry stays while a great many come and go behind it. */
static void test_old_one(void)
{
	struct pend f;
	struct kvp_pending_hit h;
	int bad = 0;
	pend_make(&f, 64, 1 << 20, 1000 * SEC);
	pend_put(&f.p, "old", 5, 9, SEC);
	for (int i = 0; i < 50000; i++) {
		pend_put(&f.p, "x", (uint32_t)(i % 300), (uint64_t)i, SEC);
		bad += pend_get(&f.p, "x", (uint32_t)(i % 300), (uint64_t)i, SEC, &h) != 1;
		bad += kvp_pending_consume(&f.p, &h) != KVP_OK;
	}
	ok(!bad && pend_get(&f.p, "old", 5, 9, SEC, NULL) == 1 && entries(&f) == 1 &&
			!kvp_pending_check(&f.p),
		"50000 selections booked behind one that waits");
	pend_drop(&f);
}

/* ---- model: an array in order of age ---- */
#define MODEL_MAX 64
struct model_entry {
	uint32_t id, n;
	uint64_t mark, at;
};
static struct model_entry model[MODEL_MAX];
static uint32_t model_cnt;

static void model_remove(uint32_t i)
{
	memmove(&model[i], &model[i + 1], (--model_cnt - i) * sizeof(*model));
}
static uint64_t model_bytes(const struct model_entry *e)
{
	return 8ULL * e->n + 12 + (e->id < 10 ? 1 : 2);
}
static int model_find(uint32_t id)
{
	for (uint32_t i = 0; i < model_cnt; i++)
		if (model[i].id == id)
			return (int)i;
	return -1;
}
static void model_insert(struct model_entry e, uint32_t max, uint64_t budget, uint64_t ttl)
{
	while (model_cnt && e.at - model[0].at > ttl)
		model_remove(0);
	int old = model_find(e.id);
	if (old >= 0)
		model_remove((uint32_t)old);
	model[model_cnt++] = e;
	for (;;) {
		uint64_t sum = 0;
		for (uint32_t i = 0; i < model_cnt; i++)
			sum += model_bytes(&model[i]);
		if (!model_cnt || (model_cnt <= max && sum <= budget))
			return;
		model_remove(0);
	}
}

static int same_as_model(struct pend *f, uint64_t now, uint64_t ttl)
{
	char id[8];
	for (uint32_t i = 0; i < 40; i++) {
		int m = model_find(i);
		snprintf(id, sizeof(id), "%u", i);
		int want = m >= 0 && now - model[m].at <= ttl;
		if (pend_get(&f->p, id, m >= 0 ? model[m].n : 0, m >= 0 ? model[m].mark : 0, now, NULL) !=
			want)
			return 0;
	}
	return entries(f) == model_cnt && !kvp_pending_check(&f->p);
}

static int model_run(uint32_t max, uint64_t budget, int steps)
{
	struct pend f;
	char id[8];
	uint64_t now = 100 * SEC, ttl = 5 * SEC;
	int good = 1;
	model_cnt = 0;
	pend_make(&f, max, budget, ttl);
	for (int i = 0; i < steps && good; i++) {
		uint32_t k = (uint32_t)(rnd() % 40), op = (uint32_t)(rnd() % 10);
		now += rnd() % 4 ? 0 : rnd() % SEC;
		snprintf(id, sizeof(id), "%u", k);
		int m = model_find(k);
		if (op < 6) {
			uint32_t n = rnd() % 8 ? (uint32_t)(rnd() % 40) : (uint32_t)(rnd() % 1200);
			struct model_entry e = {k, n, rnd() % 1000, now};
			model_insert(e, max, budget, ttl);
			good = pend_put(&f.p, id, n, e.mark, now) == KVP_OK;
		} else if (op < 8) {
			struct kvp_pending_hit h;
			int want = m >= 0 && now - model[m].at <= ttl;
			good = (kvp_pending_peek(&f.p, 3, id, strlen(id), now, &h) == KVP_OK) == want;
			if (want) {
				good = good && kvp_pending_consume(&f.p, &h) == KVP_OK;
				model_remove((uint32_t)m);
			}
		} else {
			good = (kvp_pending_discard(&f.p, 3, id, strlen(id)) == KVP_OK) == (m >= 0);
			if (m >= 0)
				model_remove((uint32_t)m);
		}
		good = good && (i % 16 || same_as_model(&f, now, ttl));
		if (!good)
			printf("# max %u budget %" PRIu64 " step %d op %u id %u\n", max, budget, i, op, k);
	}
	pend_drop(&f);
	return good;
}

int main(void)
{
	rnd_state = tap_seed(0) | 1;
	test_estimate();
	test_life();
	test_ttl();
	test_limits();
	test_old_one();
	ok(model_run(8, 1 << 20, 6000), "6000 random steps as the model says: entries short");
	ok(model_run(60, 2500, 6000), "bytes short");
	ok(model_run(20, 9000, 6000), "both");
	return done();
}
