/* Tours of the tree while random operations change it between the steps, against a naive model: what was held
 * all the time is told, what is told is held, parents come first. */
#include "tests/tier_model.h"
#include "tests/tap.h"

#define AT_ONCE 4
#define ROUNDS 30
#define OPS_BEFORE 60

static struct tiers *model;
static struct tm_op *op;

/* For every block of a holder: since which operation it has had the names that it has. */
static uint64_t sig[TM_RANKS][TM_TIERS][TM_NODES], since[TM_RANKS][TM_TIERS][TM_NODES], now;

struct tour {
	uint64_t id, device, begun, told, again;
	uint32_t r, part; /* part 2: over */
	uint32_t room, bad;
	uint8_t seen[TM_TIERS][TM_NODES];
};
static struct tour tour[AT_ONCE];

static uint64_t steps, told, twice, whole, kept, since_then;

static void note_names(uint32_t r)
{
	static uint64_t is[TM_NODES];
	for (uint32_t t = 0; t < TM_TIERS; t++) {
		memset(is, 0, sizeof(is));
		for (uint32_t i = 0; i < model->h[r][t].cnt; i++) {
			struct rng g = {model->h[r][t].name[i].ext};
			is[model->h[r][t].name[i].node] += rnd(&g) | 1;
		}
		for (uint32_t i = 0; i < model->node_cnt; i++)
			if (is[i] != sig[r][t][i]) {
				sig[r][t][i] = is[i];
				since[r][t][i] = now;
			}
	}
}

static int random_op(struct tree *t, uint64_t seed)
{
	uint32_t a, b;
	now++;
	tm_gen(model, seed, op);
	int want = tm_apply(model, op, &a), got = tm_tree(t->w, model, op, &b);
	note_names(op->r);
	return want != got || a != b;
}

static int steady(const struct tour *x, uint32_t t, uint32_t node)
{
	return model->h[x->r][t].own[node] && since[x->r][t][node] <= x->begun;
}

/* The parent of a block in tier `of`, if tier t has it under that name and it was told: for a device block on
 * the device, else in any tier. */
static uint32_t parent_in(const struct tour *x, uint32_t of, uint32_t t, uint64_t ext)
{
	struct model_name *p = tm_find(&model->h[x->r][t], ext);
	int seen = 0;
	for (uint32_t i = 0; p && i < (of ? TM_TIERS : 1); i++)
		seen |= x->seen[i][p->node];
	return seen ? p->node : 0;
}

static uint32_t take(void *ctx, const struct kvp_radix_dump_event *ev)
{
	struct tour *x = ctx;
	uint32_t at = tm_part(x->r), n = ev->n < x->room ? ev->n : x->room;
	struct model_name *first = tm_find(&model->h[x->r][ev->tier], ev->ext[0]);
	x->bad += ev->slot != model->slot[x->r] || ev->part_salt != model_salt(at) || !first ||
		  (ev->tier != 0 && x->part == KVP_RADIX_TOUR_DEVICE);
	if (ev->how == KVP_RADIX_CHILD && first) {
		at = parent_in(x, ev->tier, ev->tier, ev->parent_ext);
		for (uint32_t t = 0; t < TM_TIERS && ev->tier; t++)
			if (!at || model->node[first->node].parent != at)
				at = parent_in(x, ev->tier, t, ev->parent_ext);
		x->bad += !at;
	}
	for (uint32_t i = 0; i < n && !x->bad; i++) {
		at = tm_child(model, at, ev->local[i], 0);
		struct model_name *p = at ? tm_find(&model->h[x->r][ev->tier], ev->ext[i]) : NULL;
		x->bad += !p || p->node != at;
		x->again += x->seen[ev->tier][at] && model->h[x->r][ev->tier].own[at] == 1;
		since_then += x->part == KVP_RADIX_TOUR_LOW && !ev->tier && !x->seen[0][at];
		x->seen[ev->tier][at] = 1;
	}
	x->room -= n;
	x->told += n;
	return n;
}

/* Blocks that were held all the time with all before them (dev: on the device, any: in some tier) were
 * told. */
static uint32_t missed(struct tour *x)
{
	static uint8_t dev[TM_NODES], any[TM_NODES];
	uint32_t bad = 0;
	for (uint32_t i = 0; i < model->node_cnt; i++) {
		uint32_t up = model->node[i].parent, low = 0;
		if (i < TM_PARTS) {
			dev[i] = any[i] = 1;
			continue;
		}
		for (uint32_t t = 0; t < TM_TIERS; t++) {
			int must = steady(x, t, i) && (t ? any[up] : dev[up]);
			low += t && must;
			kept += must != 0;
			bad += must && !x->seen[t][i];
		}
		dev[i] = steady(x, 0, i) && dev[up];
		any[i] = dev[i] || low;
	}
	return bad;
}

static int step(struct tree *t, struct tour *x, struct rng *g)
{
	enum kvp_radix_tour_part part = x->part ? KVP_RADIX_TOUR_LOW : KVP_RADIX_TOUR_DEVICE;
	x->room = KVP_RADIX_TOUR_ROOM + rnd_below(g, 200);
	if (!x->id)
		x->id = kvp_radix_tour_begin(t->w, model->slot[x->r], part, x->device);
	x->device = x->part ? x->device : x->id;
	int rc = kvp_radix_tour_step(t->w, x->id, 4 + rnd_below(g, 30), take, x);
	steps++;
	if (rc == KVP_OK) {
		x->part++;
		x->id = 0;
	}
	return x->bad || (rc && rc != KVP_ERR_AGAIN);
}

/* Tours of a few ranks at a time until all are over. 0 = good. */
static int round_of_tours(struct tree *t, struct rng *g)
{
	uint32_t open = AT_ONCE, busy = rnd_below(g, 3);
	memset(tour, 0, sizeof(tour));
	for (uint32_t i = 0; i < AT_ONCE; i++)
		tour[i] = (struct tour){.r = rnd_below(g, TM_RANKS), .begun = now};
	while (open) {
		struct tour *x = &tour[rnd_below(g, AT_ONCE)];
		for (uint32_t i = rnd_below(g, 1 + busy * 2); i; i--)
			if (random_op(t, rnd(g)))
				return -1;
		if (busy)
			kvp_radix_w_tend(t->w, 1 + rnd_below(g, 1000));
		if (x->part > 1)
			continue;
		if (step(t, x, g)) {
			printf("# rank %u part %u: bad %u\n", x->r, x->part, x->bad);
			return -1;
		}
		if (x->part < 2)
			continue;
		uint32_t gone = missed(x);
		if (gone) {
			printf("# rank %u: %u blocks missed, %llu told twice\n", x->r, gone,
				(unsigned long long)x->again);
			return -1;
		}
		open--;
		whole++;
		told += x->told;
		twice += x->again;
	}
	return 0;
}

static int void_numbers(struct tree *t)
{
	uint64_t id[KVP_RADIX_TOUR_MAX + 1];
	int good = kvp_radix_tour_begin(t->w, t->g.index_rank_max, KVP_RADIX_TOUR_LOW, 0) == 0 &&
		   kvp_radix_tour_step(t->w, 0, 10, take, &tour[0]) == KVP_ERR_NOTFOUND;
	for (uint32_t i = 0; i <= KVP_RADIX_TOUR_MAX; i++)
		id[i] = kvp_radix_tour_begin(t->w, 0, KVP_RADIX_TOUR_DEVICE, 0);
	good = good && kvp_radix_tour_step(t->w, id[0], 10, take, &tour[0]) == KVP_ERR_NOTFOUND;
	for (uint32_t i = 1; i <= KVP_RADIX_TOUR_MAX; i++)
		kvp_radix_tour_end(t->w, id[i]);
	kvp_radix_tour_end(t->w, id[1]);
	return good && kvp_radix_tour_step(t->w, id[1], 10, take, &tour[0]) == KVP_ERR_NOTFOUND;
}

static int run(uint32_t slots, uint64_t seed)
{
	struct tree t = tree_open(slots);
	struct rng g = {seed};
	int bad = 0;
	tm_init(model, slots);
	memset(sig, 0, sizeof(sig));
	memset(since, 0, sizeof(since));
	now = 0;
	for (int k = 0; k < ROUNDS && !bad; k++) {
		for (int i = 0; i < OPS_BEFORE && !bad; i++)
			bad = random_op(&t, rnd(&g));
		bad = bad || round_of_tours(&t, &g) || kvp_radix_w_check(t.w);
	}
	bad = bad || !void_numbers(&t);
	tree_close(&t);
	return !bad;
}

/* ---- a tour stands in a run that is cut, merged or taken out ---- */

#define CHAIN 600
struct count {
	uint32_t room, cnt, next; /* blocks in a row told so far, from 0 */
};

static uint32_t count(void *ctx, const struct kvp_radix_dump_event *ev)
{
	struct count *c = ctx;
	uint32_t n = ev->n < c->room ? ev->n : c->room;
	for (uint32_t i = 0; i < n; i++)
		c->next += ev->ext[i] == c->next + 1;
	c->cnt += n;
	c->room -= n;
	return n;
}

static void store(struct kvp_radix_w *w, uint32_t parent, uint32_t from, uint32_t n)
{
	static uint64_t v[CHAIN];
	for (uint32_t i = 0; i < n; i++)
		v[i] = from + i;
	kvp_radix_store(w, 0, 5, parent ? KVP_RADIX_CHILD : KVP_RADIX_ROOT, parent, n, v, v, NULL);
}

static void moved_along(void)
{
	struct kvp_geom g = {
		.slot_max = 8, .rank_max = 64, .index_rank_max = 64, .block_max = 20000, .region_gen = 7};
	struct seg seg;
	struct kvp_radix_w *w = NULL;
	struct kvp_radix r;
	struct kvp_radix_stats st;
	struct count c = {.room = 300};
	uint64_t all[CHAIN], branch = 5000;
	for (uint32_t i = 0; i < CHAIN; i++)
		all[i] = i + 1;
	ok(seg_new(&seg, &g) == 0 && kvp_radix_join(seg.pub, &g, &r) == 0 &&
			kvp_radix_w_open(seg.pub, seg.priv, &g, KVP_RADIX_RESET, NULL, &w, NULL) == 0,
		"a tree");
	store(w, 0, 1, CHAIN);
	uint64_t id = kvp_radix_tour_begin(w, 0, KVP_RADIX_TOUR_DEVICE, 0);
	ok(kvp_radix_tour_step(w, id, 100, count, &c) == KVP_ERR_AGAIN && c.next == 300,
		"half of a run is told");
	store(w, 250, 5000, 1);
	kvp_radix_stats(&r, &st);
	c.room = 100;
	ok(kvp_radix_tour_step(w, id, 100, count, &c) == KVP_ERR_AGAIN && st.splits == 1 && c.next == 400 &&
			c.cnt == 400,
		"the run is cut before that place: the tour goes on in the tail");
	kvp_radix_remove(w, 0, 1, &branch, NULL);
	while (kvp_radix_w_tend(w, 1000))
		;
	kvp_radix_stats(&r, &st);
	store(w, 0, 7000, 200); /* may be given the record of the tail */
	c.room = 100;
	ok(kvp_radix_tour_step(w, id, 100, count, &c) == KVP_ERR_AGAIN && st.merges == 1 && c.next == 500 &&
			c.cnt == 500,
		"the tail is merged into the head: the tour goes on there");
	c.room = 1000;
	ok(kvp_radix_tour_step(w, id, 100, count, &c) == KVP_OK && c.next == CHAIN && c.cnt == CHAIN,
		"every block was told once, in order");
	for (uint64_t i = 7199; i >= 7000; i--)
		kvp_radix_remove(w, 0, 1, &i, NULL);
	store(w, CHAIN, 5000, 300);
	store(w, CHAIN, 6000, 300);
	c = (struct count){.room = CHAIN + 100};
	id = kvp_radix_tour_begin(w, 0, KVP_RADIX_TOUR_DEVICE, 0);
	ok(kvp_radix_tour_step(w, id, 100, count, &c) == KVP_ERR_AGAIN && c.cnt == CHAIN + 100,
		"a tour stands in one of two branches");
	for (uint32_t i = 0; i < 300; i++) {
		uint64_t gone[2] = {5000 + i, 6000 + i};
		kvp_radix_remove(w, 0, 2, gone, NULL);
	}
	kvp_radix_remove(w, 0, CHAIN, all, NULL);
	for (uint32_t i = 9000; i < 9600; i += 200)
		store(w, 0, i, 200); /* these get the records of the three runs that are gone */
	c.room = 1000;
	ok(kvp_radix_tour_step(w, id, 100, count, &c) == KVP_OK && c.cnt == CHAIN + 100,
		"everything is taken out under it: it comes to its end");
	kvp_radix_w_close(w);
	seg_free(&seg);
}

/* ---- the device while the second tour is under way ---- */

struct family {
	uint32_t room;
	uint64_t told[4]; /* by external hash, bits of tiers */
};

/* Takes single blocks named 1 to 3, the rest is not looked at. */
static uint32_t note(void *ctx, const struct kvp_radix_dump_event *ev)
{
	struct family *f = ctx;
	if (!f->room)
		return 0;
	f->room--;
	for (uint32_t i = 0; i < ev->n; i++)
		if (ev->ext[i] < 4)
			f->told[ev->ext[i]] |= 1u << ev->tier;
	return ev->n;
}

/* 1 has the children 2 and 20, 2 has 3 and 30; a leaf in a lower tier keeps the second tour going. */
static void parent_goes(void)
{
	struct kvp_geom g = {
		.slot_max = 8, .rank_max = 64, .index_rank_max = 64, .block_max = 20000, .region_gen = 7};
	struct seg seg;
	struct kvp_radix_w *w = NULL;
	struct family f = {.room = 100};
	uint64_t one = 1, low = 9;
	ok(seg_new(&seg, &g) == 0 &&
			kvp_radix_w_open(seg.pub, seg.priv, &g, KVP_RADIX_RESET, NULL, &w, NULL) == 0,
		"another tree");
	store(w, 0, 1, 1);
	store(w, 1, 20, 1);
	kvp_radix_store_tier(w, 0, KVP_RADIX_HOST, 5, KVP_RADIX_ROOT, 0, 1, &one, &one, NULL);
	uint64_t first = kvp_radix_tour_begin(w, 0, KVP_RADIX_TOUR_DEVICE, 0);
	ok(kvp_radix_tour_step(w, first, 100, note, &f) == KVP_OK && f.told[1] == 1 && !f.told[2],
		"the first tour goes by");
	store(w, 1, 2, 1);
	store(w, 2, 30, 1);
	store(w, 2, 3, 1);
	kvp_radix_store_tier(w, 0, KVP_RADIX_HOST, 5, KVP_RADIX_CHILD, 3, 1, &low, &low, NULL);
	uint64_t second = kvp_radix_tour_begin(w, 0, KVP_RADIX_TOUR_LOW, first);
	f.room = 1;
	ok(kvp_radix_tour_step(w, second, 100, note, &f) == KVP_ERR_AGAIN && f.told[1] == 3 && !f.told[2],
		"the second stops behind the first block");
	kvp_radix_remove(w, 0, 1, &one, NULL);
	f.room = 100;
	ok(kvp_radix_tour_step(w, second, 100, note, &f) == KVP_OK && !f.told[2] && !f.told[3],
		"which leaves the device: nothing that hangs from it there is told");
	kvp_radix_store(w, 0, 5, KVP_RADIX_ROOT, 0, 1, &one, &one, NULL);
	second = kvp_radix_tour_begin(w, 0, KVP_RADIX_TOUR_LOW, first);
	ok(kvp_radix_tour_step(w, second, 100, note, &f) == KVP_OK && f.told[2] == 1 && f.told[3] == 1,
		"it comes back: a tour after the same first one tells what has come since");
	f = (struct family){.room = 100};
	kvp_radix_remove(w, 0, 1, &one, NULL);
	first = kvp_radix_tour_begin(w, 0, KVP_RADIX_TOUR_DEVICE, 0);
	ok(kvp_radix_tour_step(w, first, 100, note, &f) == KVP_OK && !f.told[2] && !f.told[3],
		"a first tour without it reaches nothing");
	kvp_radix_store(w, 0, 5, KVP_RADIX_ROOT, 0, 1, &one, &one, NULL);
	second = kvp_radix_tour_begin(w, 0, KVP_RADIX_TOUR_LOW, first);
	ok(kvp_radix_tour_step(w, second, 100, note, &f) == KVP_OK && f.told[1] == 3 && f.told[2] == 1 &&
			f.told[3] == 1,
		"it comes back: the second tells what can be reached by it, though that had been there");
	kvp_radix_w_close(w);
	seg_free(&seg);
}

int main(void)
{
	const char *rounds = getenv("KVP_ROUNDS");
	uint64_t seed = tap_seed(0);
	int n = rounds ? (int)strtol(rounds, NULL, 10) : 12;
	model = malloc(sizeof(*model));
	op = malloc(sizeof(*op));
	moved_along();
	parent_goes();
	for (int i = 0; i < n; i++)
		ok(run(i & 1 ? 256 : 64, seed + (uint64_t)i),
			"tours tell what is there while it changes (%d)", i);
	ok(whole && twice < told / 8 && kept && since_then,
		"%llu tours in %llu steps told %llu blocks, %llu of them twice, %llu behind the first tour",
		(unsigned long long)whole, (unsigned long long)steps, (unsigned long long)told,
		(unsigned long long)twice, (unsigned long long)since_then);
	return done();
}
