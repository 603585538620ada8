/* Random operations on all four tiers against a naive model, with restarts of the writer in between. */
#include "tests/tier_model.h"
#include "tests/tap.h"

#define OPS 1500
#define BATCH 25

static struct tiers *model;
static struct kvp_radix_match *match;
static struct tm_op *op;
static struct kvp_radix_stats sum;
static uint32_t attached, cleared;
static uint64_t found[TM_TIERS];

static int batch_end(struct tree *t, uint64_t seed)
{
	if (kvp_radix_check(&t->r) || kvp_radix_w_check(t->w) || tm_compare_dump(t->w, model))
		return -1;
	for (uint32_t i = 0; i < 20; i++)
		if (tm_compare_query(&t->r, model, seed + i, match))
			return -1;
	return 0;
}

static int step(struct tree *t, uint64_t seed, int i)
{
	uint32_t a, b;
	tm_gen(model, seed * 1000003 + (uint64_t)i, op);
	int want = tm_apply(model, op, &a), got = tm_tree(t->w, model, op, &b);
	attached += op->kind == TM_ATTACH ? op->n - a : 0;
	cleared += op->kind == TM_CLEAR_TIER;
	if (want == got && a == b)
		return 0;
	printf("# op %d kind %d tier %u n %u: result %d want %d, unknown %u want %u\n", i, op->kind, op->t,
		op->n, got, want, b, a);
	return -1;
}

/* After everything went, all memory is there again. */
static int empty(struct tree *t)
{
	struct kvp_radix_stats st;
	uint32_t none;
	op->kind = TM_CLEAR;
	op->n = 0;
	for (op->r = 0; op->r < TM_RANKS; op->r++) {
		tm_apply(model, op, &none);
		tm_tree(t->w, model, op, &none);
	}
	kvp_radix_stats(&t->r, &st);
	sum.splits += st.splits;
	sum.merges += st.merges;
	sum.appends += st.appends;
	sum.moved += st.moved;
	sum.renamed += st.renamed;
	sum.orphans += st.orphans;
	sum.unattached += st.unattached;
	sum.not_found += st.not_found;
	sum.lost += st.lost + st.full;
	return st.runs || st.blocks || st.low_blocks || st.col_used_words || st.cut_used_words ||
	       st.alias_cnt || st.hole_cnt;
}

static int run(uint32_t slots, uint64_t seed)
{
	struct tree t = tree_open(slots);
	int bad = -1;
	tm_init(model, slots);
	for (int i = 0; i < OPS && bad < 0; i++) {
		if (i % 9 == 0)
			kvp_radix_w_tend(t.w, 200);
		if (step(&t, seed, i) || (i % (BATCH * 7) == BATCH * 7 - 1 && tree_reopen(&t)) ||
			(i % BATCH == BATCH - 1 && batch_end(&t, seed + (uint64_t)i * 77)))
			bad = i;
	}
	if (bad < 0 && (empty(&t) || batch_end(&t, seed)))
		bad = OPS;
	for (uint32_t i = 0; i < TM_TIERS; i++)
		found[i] += model->found[i];
	if (bad >= 0)
		printf("# slots %u seed %llu: wrong at or before operation %d\n", slots,
			(unsigned long long)seed, bad);
	tree_close(&t);
	return bad < 0;
}

int main(void)
{
	const uint32_t geo[] = {64, 256, 1024, 4096};
	const char *rounds = getenv("KVP_ROUNDS");
	uint64_t seed = tap_seed(0);
	model = malloc(sizeof(*model));
	match = malloc(sizeof(*match));
	op = malloc(sizeof(*op));
	int n = rounds ? (int)strtol(rounds, NULL, 10) : 1;
	for (int k = 0; k < n; k++)
		for (int i = 0; i < 4; i++)
			ok(run(geo[i], seed + (uint64_t)(k * 4 + i)),
				"%u slots: tree and model agree on all tiers over %d operations", geo[i],
				OPS);
	ok(sum.splits && sum.merges && sum.appends && sum.moved && sum.renamed && sum.orphans &&
			sum.unattached && sum.not_found && attached && cleared && !sum.lost,
		"all of it happened: %llu splits, %llu appends, %llu moves, %llu orphans, %u attached, %llu "
		"unattached",
		(unsigned long long)sum.splits, (unsigned long long)sum.appends,
		(unsigned long long)sum.moved, (unsigned long long)sum.orphans, attached,
		(unsigned long long)sum.unattached);
	ok(found[0] && found[1] && found[2] && found[3],
		"queries found blocks in every tier: %llu device, %llu host, %llu disk, %llu external",
		(unsigned long long)found[0], (unsigned long long)found[1], (unsigned long long)found[2],
		(unsigned long long)found[3]);
	return done();
}
