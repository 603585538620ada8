/* The writer is killed at every named place of its operations; its successor recovers from the two segments,
 * and the tree must be what the model says after the whole operation. Some successors are killed, too, while
 * they recover. */
#include "tests/radix_model.h"
#include "tests/procs.h"
#include "tests/tap.h"

#define OPS 400	     /* at least */
#define OPS_MAX 12000 /* until every place was met */
#define FILLER 1     /* index slot outside the model, in a partition of its own */

static const char *const place[] = {"radix:op", "radix:commit", "radix:commit_odd", "radix:commit_half",
	"radix:commit_key", "radix:committed", "radix:create", "radix:append", "radix:split",
	"radix:split_tail", "radix:split_head", "radix:split_done", "radix:killed", "radix:cover_entry",
	"radix:named", "radix:rename", "radix:move", "radix:unalias", "radix:hold_holes", "radix:drop_holes",
	"radix:drop_seen", "radix:dropped", "radix:drop_all", "radix:merge", "radix:merge_head",
	"radix:merge_children", "radix:merge_tail", "radix:merged", "radix:table_begin", "radix:table_copied",
	"radix:table_new"};
#define PLACES (sizeof(place) / sizeof(place[0]))
#define PLACE_MERGE 23 /* five that need runs to merge */
#define PLACE_TABLE 28 /* the last three need a growing table */

static struct kvp_geom geom = {.slot_max = 8,
	.rank_max = 64,
	.index_rank_max = 256,
	.block_max = 100000,
	.region_gen = 7,
	.salt = {11, 22}};
static struct seg seg;
static struct kvp_radix radix;
static struct model *model;
static struct kvp_radix_match *match;
static struct op *op;
static uint32_t kills[PLACES], kills_any;

static struct kvp_radix_w *open_writer(struct kvp_radix_report *rep)
{
	struct kvp_radix_w *w = NULL;
	return kvp_radix_w_open(seg.pub, seg.priv, &geom, KVP_RADIX_RECOVER, NULL, &w, rep) ? NULL : w;
}

static void filler_op(struct kvp_radix_w *w, uint64_t id)
{
	uint64_t l = id * 977 + 5, e = id * 991 + 3;
	kvp_radix_store(w, FILLER, 999, KVP_RADIX_ROOT, 0, 1, &l, &e, NULL);
}

/* Child: opens, works, dies at the countdown-th hit of the place. Result: 1 if it was killed. */
static int child(const char *where, uint32_t nth, int in_recovery, int filler_from, int filler_cnt)
{
	pid_t pid = fork();
	if (pid == 0) {
		struct kvp_radix_report rep;
		if (in_recovery)
			die_at(where, nth);
		struct kvp_radix_w *w = open_writer(&rep);
		uint32_t unknown;
		if (!w)
			_exit(3);
		if (in_recovery)
			_exit(0);
		die_at(where, nth);
		for (int i = 0; i < filler_cnt; i++)
			filler_op(w, (uint64_t)(filler_from + i));
		if (!filler_cnt)
			op_tree(w, model, op, &unknown);
		while (kvp_radix_w_tend(w, 100000))
			;
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
	int good = kvp_radix_check(&radix) == 0 && kvp_radix_w_check(w) == 0 && compare_dump(w, model) == 0;
	for (uint32_t i = 0; i < 4 && good; i++)
		good = compare_query(&radix, model, seed + i, match) == 0;
	kvp_radix_w_close(w);
	return good;
}

/* The place with the fewest kills; `turn` varies which one of several. */
static uint32_t rarest(uint32_t turn)
{
	uint32_t best = turn % PLACE_MERGE;
	for (uint32_t i = 1; i < PLACE_MERGE; i++) {
		uint32_t at = (turn + i) % PLACE_MERGE;
		best = kills[at] < kills[best] ? at : best;
	}
	return best;
}

/* A model that is full knows no operation but a clear. */
static void begin_anew(void)
{
	struct kvp_radix_report rep;
	struct kvp_radix_w *w = open_writer(&rep);
	for (uint32_t s = 0; s < model->slot_cnt; s++)
		kvp_radix_clear(w, model->slot_idx[s]);
	kvp_radix_w_close(w);
	model_init(model, geom.index_rank_max, MODEL_SLOTS);
}

static int kill_in_ops(uint64_t seed)
{
	for (int i = 0; i < OPS || (i < OPS_MAX && kills[rarest(0)] == 0); i++) {
		struct rng r = {seed * 77 + (uint64_t)i};
		uint32_t at = rarest((uint32_t)i), unknown, any = rnd_below(&r, 3);
		if (model->node_cnt > MODEL_NODES - 3 * MODEL_BATCH)
			begin_anew();
		op_gen(model, seed * 1000003 + (uint64_t)i, op);
		int dead = any ? child(NULL, 1 + rnd_below(&r, 3 + any * any * 8), 0, 0, 0)
			       : child(place[at], 1 + rnd_below(&r, 2), 0, 0, 0);
		op_model(model, op, &unknown);
		kills[at] += !any && dead == 1;
		kills_any += any && dead == 1;
		if (dead == 1 && rnd_below(&r, 3) == 0)
			child(NULL, 1 + rnd_below(&r, 30), 1, 0, 0);
		if (dead < 0 || ((dead || i % 16 == 0) && !sound(seed + (uint64_t)i * 5))) {
			printf("# op %d kind %d, place %s, killed %d\n", i, op->kind, place[at], dead);
			return 0;
		}
	}
	return 1;
}

/* Two runs that can be merged, and a death at each step of it: the words follow one another, or both go to a
 * new array and the tail's child with them. */
static int mergeable(uint64_t id, int moved)
{
	uint64_t l[33], e[33];
	struct kvp_radix_report rep;
	struct kvp_radix_w *w = open_writer(&rep);
	for (uint32_t i = 0; i < 33; i++) {
		l[i] = id * 1009 + i;
		e[i] = id * 1013 + i + 7;
	}
	int rc = kvp_radix_store(w, FILLER, 999, KVP_RADIX_ROOT, 0, 16, l, e, NULL);
	for (uint32_t s = 0; moved && s < 2; s++) {
		rc |= kvp_radix_store(w, FILLER + 1, 999, KVP_RADIX_ROOT, 0, 16, l, e, NULL);
		rc |= kvp_radix_store(w, FILLER + s, 999, KVP_RADIX_CHILD, e[15], 16, l + 16, e + 16, NULL);
	}
	if (moved) {
		rc |= kvp_radix_store(w, FILLER, 999, KVP_RADIX_CHILD, e[31], 1, l + 32, e + 32, NULL);
	} else { /* a branch that goes again */
		rc |= kvp_radix_store(w, FILLER, 999, KVP_RADIX_CHILD, e[7], 1, l + 32, e + 32, NULL);
		rc |= kvp_radix_remove(w, FILLER, 1, e + 32, NULL);
	}
	kvp_radix_w_close(w);
	return rc;
}

static int kill_in_merge(void)
{
	for (uint32_t i = 0; i < 2 * (PLACE_TABLE - PLACE_MERGE); i++) {
		uint32_t at = PLACE_MERGE + i / 2;
		if (mergeable(90000 + i, (int)(i % 2)) || child(place[at], 1, 0, 95000 + (int)i, 1) != 1 ||
			!sound(i)) {
			printf("# place %s, moved %u\n", place[at], i % 2);
			return 0;
		}
		kills[at]++;
	}
	return 1;
}

/* Single-block runs until the table is about to double, and a death at each step of that. */
static int kill_in_growth(void)
{
	int id = 1;
	for (uint32_t at = PLACE_TABLE; at < PLACES; at++) {
		struct kvp_radix_stats st;
		struct kvp_radix_report rep;
		struct kvp_radix_w *w = open_writer(&rep);
		for (kvp_radix_stats(&radix, &st); st.runs + 10 < st.table_slots / 2; st.runs++)
			filler_op(w, (uint64_t)id++);
		kvp_radix_w_close(w);
		int dead = child(place[at], 1, 0, id, 40);
		if (dead != 1 || !sound((uint64_t)id))
			return 0;
		kills[at]++;
		id += 40;
	}
	return 1;
}

/* Killed while a slot is cleared in steps. Lookups miss it from the first step on, its successor ends what
 * was begun, and it may be filled again. */
static int finds_filler(uint64_t id)
{
	uint64_t l = id * 977 + 5;
	struct kvp_radix_query q = {.part_salt = 999, .local = &l, .local_cnt = 1, .total_blk = 1};
	kvp_radix_find(&radix, &q, match);
	return (match->active[0] >> FILLER & 1) || kvp_radix_match_ext(match, KVP_RADIX_HOST, FILLER);
}

/* Block 59 is in host memory only. */
static void fill(struct kvp_radix_w *w)
{
	uint64_t l = 59 * 977 + 5, e = 1;
	for (uint64_t id = 0; id < 59; id++)
		filler_op(w, id);
	kvp_radix_store_tier(w, FILLER, KVP_RADIX_HOST, 999, KVP_RADIX_ROOT, 0, 1, &l, &e, NULL);
}

static int die_in_steps(uint32_t nth)
{
	struct kvp_radix_report rep;
	pid_t pid = fork();
	if (pid == 0) {
		struct kvp_radix_w *w = open_writer(&rep);
		die_at(nth % 2 ? "radix:cleared" : "radix:hidden", nth);
		while (w && kvp_radix_clear_some(w, FILLER, 3) == KVP_ERR_AGAIN)
			;
		_exit(0);
	}
	return was_killed(pid) == 1;
}

static int kill_in_steps(void)
{
	for (uint32_t nth = 1; nth <= 8; nth++) {
		struct kvp_radix_report rep;
		struct kvp_radix_w *w = open_writer(&rep);
		fill(w);
		kvp_radix_w_close(w);
		int good = finds_filler(0) && finds_filler(59);
		good &= die_in_steps(nth);
		good &= !finds_filler(0) && !finds_filler(59);
		w = open_writer(&rep);
		good &= w && kvp_radix_w_blocks(w, FILLER) == 0 && !finds_filler(59);
		filler_op(w, 59);
		good &= finds_filler(59) && !finds_filler(0);
		kvp_radix_w_close(w);
		if (!good || !sound(nth)) {
			printf("# step %u\n", nth);
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
	model_init(model, geom.index_rank_max, MODEL_SLOTS);
	ok(kill_in_ops(seed), "an operation has happened fully after a kill at any place");
	ok(kill_in_merge(), "a merge survives a kill at any place");
	ok(kill_in_steps(), "a clear in steps is ended by the successor");
	ok(kill_in_growth(), "a doubling of the table survives a kill at any place");
	printf("# %u more kills anywhere\n", kills_any);
	for (uint32_t i = 0; i < PLACES; i++)
		ok(kills[i] > 0, "writer killed at %s (%u times)", place[i], kills[i]);
	return done();
}
