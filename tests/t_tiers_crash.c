/* The writer is killed at every named place of its operations on lower tiers, some of its successors while
 * they recover; afterwards the tree must be what the model says after the whole operation. */
#include "tests/tier_model.h"
#include "tests/procs.h"
#include "tests/tap.h"

#define OPS 250	     /* at least */
#define OPS_MAX 4000 /* until every place was met */

static const char *const place[] = {"radix:low_swap", "radix:low_joined", "radix:low_held", "radix:low_cut",
	"radix:low_dropped", "radix:low_append", "radix:attach", "radix:create", "radix:split_tail",
	"radix:split_head", "radix:split_done", "radix:killed", "radix:commit_half"};
#define PLACES (sizeof(place) / sizeof(place[0]))

static struct kvp_geom geom = {.slot_max = 8,
	.rank_max = 64,
	.index_rank_max = 256,
	.block_max = 100000,
	.region_gen = 7,
	.salt = {11, 22}};
static struct seg seg;
static struct kvp_radix radix;
static struct tiers *model;
static struct kvp_radix_match *match;
static struct tm_op *op;
static uint32_t kills[PLACES], kills_any;

static struct kvp_radix_w *open_writer(struct kvp_radix_report *rep)
{
	struct kvp_radix_w *w = NULL;
	return kvp_radix_w_open(seg.pub, seg.priv, &geom, KVP_RADIX_RECOVER, NULL, &w, rep) ? NULL : w;
}

/* Child: opens, works, dies at the nth hit of the place (in recovery: while it opens). 1 if it was killed. */
static int child(const char *where, uint32_t nth, int in_recovery)
{
	pid_t pid = fork();
	if (pid == 0) {
		struct kvp_radix_report rep;
		uint32_t unknown;
		if (in_recovery)
			die_at(where, nth);
		struct kvp_radix_w *w = open_writer(&rep);
		if (!w)
			_exit(3);
		if (in_recovery)
			_exit(0);
		die_at(where, nth);
		tm_tree(w, model, op, &unknown);
		_exit(0);
	}
	return was_killed(pid);
}

/* Opens after a death, checks, compares. */
static int sound(uint64_t seed)
{
	struct kvp_radix_report rep;
	struct kvp_radix_w *w = open_writer(&rep);
	if (!w || rep.runs_dropped)
		return 0;
	int good =
		kvp_radix_check(&radix) == 0 && kvp_radix_w_check(w) == 0 && tm_compare_dump(w, model) == 0;
	for (uint32_t i = 0; i < 6 && good; i++)
		good = tm_compare_query(&radix, model, seed + i, match) == 0;
	kvp_radix_w_close(w);
	return good;
}

/* The place with the fewest kills; `turn` varies which one of several. */
static uint32_t rarest(uint32_t turn)
{
	uint32_t best = turn % PLACES;
	for (uint32_t i = 1; i < PLACES; i++) {
		uint32_t at = (turn + i) % PLACES;
		best = kills[at] < kills[best] ? at : best;
	}
	return best;
}

static int kill_in_ops(uint64_t seed)
{
	for (int i = 0; i < OPS || (i < OPS_MAX && kills[rarest(0)] == 0); i++) {
		struct rng r = {seed * 77 + (uint64_t)i};
		uint32_t at = rarest((uint32_t)i), unknown, any = rnd_below(&r, 3);
		tm_gen(model, seed * 1000003 + (uint64_t)i, op);
		int dead = any ? child(NULL, 1 + rnd_below(&r, 3 + any * any * 8), 0)
			       : child(place[at], 1 + rnd_below(&r, 2), 0);
		tm_apply(model, op, &unknown);
		kills[at] += !any && dead == 1;
		kills_any += any && dead == 1;
		if (dead == 1 && rnd_below(&r, 3) == 0)
			child(NULL, 1 + rnd_below(&r, 30), 1);
		if (dead < 0 || ((dead || i % 16 == 0) && !sound(seed + (uint64_t)i * 5))) {
			printf("# op %d kind %d tier %u, place %s, killed %d\n", i, op->kind, op->t,
				place[at], dead);
			return 0;
		}
	}
	return 1;
}

int main(void)
{
	uint64_t seed = tap_seed(0);
	if (TAP_IS_TSAN)
		return skip_all(TAP_PROCESSES);
	model = malloc(sizeof(*model));
	match = malloc(sizeof(*match));
	op = malloc(sizeof(*op));
	ok(seg_new(&seg, &geom) == 0 && kvp_radix_join(seg.pub, &geom, &radix) == 0,
		"both segments are made");
	tm_init(model, geom.index_rank_max);
	ok(kill_in_ops(seed), "an operation on any tier has happened fully after a kill at any place");
	printf("# %u more kills anywhere\n", kills_any);
	for (uint32_t i = 0; i < PLACES; i++)
		ok(kills[i] > 0, "writer killed at %s (%u times)", place[i], kills[i]);
	return done();
}
