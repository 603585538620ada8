/* The booking sequences, the deep chain and the expiry of vectors/scheduling.json: loads, requests and exact
 * fractional blocks after every step; which ages a sweep frees. Selections are pinned to the rank that the
 * vector chose. */
#include "tests/book_fixture.h"
#include "tests/vec.h"

#include <math.h>

static struct fixture f;

static uint32_t seq_read(struct kvp_json_val vec, struct kvp_json_val step, uint64_t *seq, size_t cap)
{
	struct kvp_json_val prompt = vec_get(vec_get(vec, "prompts"), vec_str(step, "prompt"));
	size_t n = 0;
	kvp_json_h64s(vec_get(prompt, "sequence_hashes"), seq, cap, &n);
	return (uint32_t)n;
}

/* Rank slot = worker id; every vector gets fresh generations. */
static int do_step(struct kvp_json_val vec, struct kvp_json_val step, uint32_t gen)
{
	const char *op = vec_str(step, "op"), *id = vec_str(step, "id");
	uint64_t h, seq[256], tok = 0;
	struct kvp_json_val v;
	double frac;
	if (strcmp(op, "book") == 0 || strcmp(op, "select_and_book") == 0) {
		struct kvp_json_val from = op[0] == 's' ? vec_get(step, "expected") : step;
		if (vec_has(from, "effective_prefill_tokens", &v))
			tok = vec_num(v);
		uint32_t n = seq_read(vec, step, seq, 256);
		uint32_t rank = (uint32_t)vec_num(vec_get(step, "worker_id"));
		return book_simple(&f.b, f.b.owner, id, rank, gen, tok, seq, n, &h);
	}
	int rc = kvp_resv_find(&f.b, id, strlen(id), &h);
	if (rc)
		return rc;
	if (strcmp(op, "prefill_complete") == 0)
		return kvp_resv_prefill_done(&f.b, h);
	if (strcmp(op, "free") == 0)
		return kvp_resv_free(&f.b, h);
	if (!vec_has(step, "decay_fraction", &v))
		return kvp_resv_output(&f.b, h, NULL);
	kvp_json_double(v, &frac);
	return kvp_resv_output(&f.b, h, &frac);
}

static int same_loads(struct kvp_json_val expected)
{
	struct kvp_json_iter it = kvp_json_each(vec_get(expected, "loads"));
	int good = 1;
	while (kvp_json_next(&it)) {
		struct kvp_load l;
		double exact = 0;
		kvp_load_read(&f.b, (uint32_t)strtoul(it.key, NULL, 10), &l);
		good &= kvp_load_blocks(&l) == vec_num(vec_get(it.val, "potential_decode_blocks"));
		good &= l.prefill_tok == vec_num(vec_get(it.val, "potential_prefill_tokens"));
		good &= l.requests == vec_num(vec_get(it.val, "active_requests"));
		kvp_json_double(vec_get(vec_get(expected, "exact_blocks"), it.key), &exact);
		good &= fabs(exact - (double)l.active_blk_fx / (double)KVP_BLK_FX_ONE) < 1e-9;
	}
	return good;
}

static void sequence(struct kvp_json_val vec, uint32_t gen)
{
	struct kvp_json_iter it = kvp_json_each(vec_get(vec, "steps"));
	int n = 0, bad = 0;
	while (kvp_json_next(&it)) {
		n++;
		if (do_step(vec, it.val, gen) || !same_loads(vec_get(it.val, "expected")))
			bad = bad ? bad : n;
	}
	ok(n && !bad, "%s: %d steps give the loads of the vector (first wrong: %d)", vec_str(vec, "id"), n,
		bad);
}

static uint64_t blocks_now(void)
{
	struct kvp_load l;
	kvp_load_read(&f.b, 1, &l);
	return kvp_load_blocks(&l);
}

static void deep(struct kvp_json_val vec, uint32_t gen)
{
	struct kvp_json_val want = vec_get(vec, "expected");
	uint64_t range[2], h[2];
	size_t n;
	kvp_json_u64s(vec_get(vec, "sequence_range"), range, 2, &n);
	uint64_t *seq = malloc(range[1] * sizeof(*seq));
	for (uint64_t i = 0; i < range[1]; i++)
		seq[i] = range[0] + i;
	book_simple(&f.b, f.b.owner, "deep-1", 1, gen, 0, seq, (uint32_t)range[1], &h[0]);
	is_u64(blocks_now(), vec_num(vec_get(want, "after_first")),
		"deep chain: blocks after the first booking");
	book_simple(&f.b, f.b.owner, "deep-2", 1, gen, 0, seq, (uint32_t)range[1], &h[1]);
	is_u64(blocks_now(), vec_num(vec_get(want, "after_second")), "deep chain: blocks after the second");
	kvp_resv_free(&f.b, h[0]);
	is_u64(blocks_now(), vec_num(vec_get(want, "after_free_one")), "deep chain: blocks after one free");
	kvp_resv_free(&f.b, h[1]);
	is_u64(blocks_now(), vec_num(vec_get(want, "after_free_both")), "deep chain: blocks after both");
	free(seq);
}

static int expires(struct kvp_json_val row)
{
	int yes = 0;
	kvp_json_bool(vec_get(row, "expired_at_sweep"), &yes);
	return yes;
}

/* One booking of each age, on rank 1; progress calls do not make it younger. */
static void expiry(struct kvp_json_val vec, uint32_t gen)
{
	struct kvp_json_iter it = kvp_json_each(vec_get(vec, "rows"));
	const char *config = vec_str(vec_get(vec, "config"), "DYN_ROUTER_ACTIVE_REQUEST_EXPIRY_SECS");
	uint64_t limit_ns = strtoull(config, NULL, 10) * 1000000000ull, now_ns = 1000000000000000ull, h;
	char id[32];
	uint32_t n = 0, old = 0;
	double age_s;
	for (; kvp_json_next(&it); n++) {
		struct kvp_resv_ask a = {.rank_slot = 1, .rank_gen = gen, .flags = KVP_RESV_NODE_OWNED};
		kvp_json_double(vec_get(it.val, "age_s"), &age_s);
		a.now_ns = now_ns - (uint64_t)llround(age_s * 1e9);
		snprintf(id, sizeof(id), "age-%u", n);
		if (kvp_resv_claim(&f.b, f.b.owner, id, strlen(id), &h) || kvp_resv_book(&f.b, h, &a) ||
			kvp_resv_output(&f.b, h, NULL) || kvp_resv_prefill_done(&f.b, h))
			ok(0, "a booking of %.3f s", age_s);
		old += expires(it.val);
	}
	is_u64(kvp_resv_expire(&f.b, now_ns, limit_ns), old, "a sweep frees as many as the vector says");
	it = kvp_json_each(vec_get(vec, "rows"));
	for (uint32_t i = 0; kvp_json_next(&it); i++) {
		kvp_json_double(vec_get(it.val, "age_s"), &age_s);
		snprintf(id, sizeof(id), "age-%u", i);
		int gone = kvp_resv_find(&f.b, id, strlen(id), &h) != KVP_OK;
		ok(gone == expires(it.val), "%.3f s: %s", age_s, gone ? "gone" : "live");
		if (!gone)
			kvp_resv_free(&f.b, h);
	}
	is_u64(blocks_now(), 0, "and no load is left");
}

int main(void)
{
	struct kvp_json *parser = kvp_json_new();
	struct kvp_json_val root = vec_load(parser, "scheduling.json");
	fixture_make(&f, 16, 64, 262144);
	kvp_book_attach(&f.b, KVP_OWNER(1, 1), NULL);
	uint32_t gen = 0, cnt = 0;
	struct kvp_json_iter it = kvp_json_each(vec_get(root, "vectors"));
	while (kvp_json_next(&it)) {
		const char *kind = vec_str(it.val, "kind");
		void (*run)(struct kvp_json_val, uint32_t) =
			strcmp(kind, "deep_chain") == 0		? deep
			: strcmp(kind, "booking_sequence") == 0 ? sequence
			: strcmp(kind, "expiry") == 0		? expiry
								: NULL;
		if (!run)
			continue;
		gen++;
		cnt++;
		for (uint32_t r = 0; r < 16;
			r++) /* bookings that a vector leaves behind go with their generation */
			kvp_rank_open(&f.b, r, gen);
		run(it.val, gen);
	}
	is_u64(cnt, 10, "all booking vectors were found");
	is_u64(kvp_book_check(&f.b), 0, "check finds no fault");
	kvp_json_free(parser);
	fixture_drop(&f);
	return done();
}
