/* Random operations of several ranks and partitions against a naive model, in every geometry. */
#include "tests/radix_model.h"
#include "tests/tap.h"

#define OPS 900
#define BATCH 30

static struct model *model;
static struct kvp_radix_match *match;
static struct op *op;
static struct kvp_radix_stats sum; /* what the sequences went through */
static int quiet;		   /* while shrinking */

static int batch_end(struct tree *t, uint64_t seed)
{
	if (kvp_radix_check(&t->r) || kvp_radix_w_check(t->w) || compare_dump(t->w, model))
		return -1;
	for (uint32_t i = 0; i < 12; i++)
		if (compare_query(&t->r, model, seed + i, match))
			return -1;
	return 0;
}

/* Runs the operations that are in use[]. Result: index of the first that went wrong, -1 if none did. */
static int run(uint32_t slots, uint64_t seed, const uint8_t *use, int cnt)
{
	struct tree t = tree_open(slots);
	int bad = -1;
	model_init(model, slots, MODEL_SLOTS);
	for (int i = 0; i < cnt && bad < 0; i++) {
		uint32_t a, b;
		if (use[i]) {
			op_gen(model, seed * 1000003 + (uint64_t)i, op);
			int want = op_model(model, op, &a), got = op_tree(t.w, model, op, &b);
			if (want != got || a != b) {
				if (!quiet)
					printf("# op %d kind %d n %u: result %d want %d, unknown %u want "
					       "%u\n",
						i, op->kind, op->n, got, want, b, a);
				bad = i;
			}
			for (uint32_t n = i % 3 ? 0 : UINT32_MAX;
				n && kvp_radix_w_tend(t.w, 5 + (uint32_t)i % 400);)
				n--;
		}
		if (i % (BATCH * 7) == BATCH * 7 - 1 && tree_reopen(&t))
			bad = i;
		if (bad < 0 && i % BATCH == BATCH - 1 && batch_end(&t, seed + (uint64_t)i * 77))
			bad = i;
	}
	for (uint32_t s = 0; s < MODEL_SLOTS && bad < 0; s++) {
		model_clear(model, s);
		kvp_radix_clear(t.w, model->slot_idx[s]);
	}
	struct kvp_radix_stats st;
	kvp_radix_stats(&t.r, &st);
	sum.splits += st.splits;
	sum.merges += st.merges;
	sum.appends += st.appends;
	sum.truncations += st.truncations;
	sum.moved += st.moved;
	sum.renamed += st.renamed;
	sum.duplicate += st.duplicate;
	sum.not_found += st.not_found;
	sum.unknown += st.unknown;
	sum.invalid += st.invalid;
	sum.lost += st.lost;
	if (bad < 0 && (batch_end(&t, seed) || st.runs || st.blocks || st.col_used_words ||
			       st.cut_used_words || st.alias_cnt || st.hole_cnt)) {
		printf("# after clearing all: runs %llu blocks %llu words %llu\n",
			(unsigned long long)st.runs, (unsigned long long)st.blocks,
			(unsigned long long)st.col_used_words);
		bad = cnt;
	}
	tree_close(&t);
	return bad;
}

/* Leaves out ever smaller pieces as long as the failure stays. */
static void shrink(uint32_t slots, uint64_t seed, uint8_t *use, int cnt)
{
	quiet = 1;
	for (int piece = cnt / 2; piece >= 1; piece /= 2) {
		for (int at = 0; at < cnt; at += piece) {
			uint8_t kept[OPS];
			memcpy(kept, use, sizeof(kept));
			for (int i = at; i < cnt && i < at + piece; i++)
				use[i] = 0;
			if (run(slots, seed, use, cnt) < 0)
				memcpy(use, kept, sizeof(kept));
		}
	}
	quiet = 0;
	run(slots, seed, use, cnt);
	printf("# smallest failing sequence, seed %llu, slots %u:", (unsigned long long)seed, slots);
	for (int i = 0; i < cnt; i++)
		if (use[i])
			printf(" %d", i);
	printf("\n");
}

int main(void)
{
	const uint32_t geo[] = {64, 256, 1024, 4096};
	const char *rounds = getenv("KVP_ROUNDS");
	uint64_t seed = tap_seed(0);
	model = malloc(sizeof(*model));
	match = malloc(sizeof(*match));
	op = malloc(sizeof(*op));
	int n = rounds ? (int)strtol(rounds, NULL, 10) : 2;
	for (int k = 0; k < n; k++)
		for (int i = 0; i < 4; i++) {
			uint8_t use[OPS];
			memset(use, 1, sizeof(use));
			uint64_t s = seed + (uint64_t)k * 4 + (uint64_t)i;
			int bad = run(geo[i], s, use, OPS);
			if (!ok(bad < 0, "%u slots: tree and model agree over %d operations", geo[i], OPS))
				shrink(geo[i], s, use, bad + 1 < OPS ? bad + 1 : OPS);
		}
	ok(sum.splits && sum.merges && sum.appends && sum.truncations && sum.moved && sum.renamed &&
			sum.duplicate && sum.not_found && sum.unknown && sum.invalid && !sum.lost,
		"all of it happened: %llu splits, %llu merges, %llu appends, %llu truncations, %llu moves, "
		"%llu renames",
		(unsigned long long)sum.splits, (unsigned long long)sum.merges,
		(unsigned long long)sum.appends, (unsigned long long)sum.truncations,
		(unsigned long long)sum.moved, (unsigned long long)sum.renamed);
	return done();
}
