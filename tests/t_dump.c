/* tests/t_dump.c — from the tree to the text of GET /dump and back: equal to a model at rest, enough to
 * recover from while operations go on, whatever happens to the indexer. The indexer's side runs in the test's
 * own thread. */
#include "daemons/indexer/dump.c"
#include "daemons/common/dump.h"
#include "ipc/json_in.h"
#include "shm/region.h"
#include "tests/tier_model.h"
#include "tests/tap.h"

#define OWNER 3u
#define FIRST_WORKER 18446744073709551000ull /* ids that no double can hold */

static const char *const tier_text[TM_TIERS] = {"device", "host_pinned", "disk", "external"};

struct node {
	struct kvp_region r;
	int fd;
	struct kvp_geom g;
	void *priv;
	struct kvp_idx idx; /* what dump.c uses of it */
	uint32_t rank_slot[TM_RANKS];
	uint32_t pages, restarts;
};
static struct node node;
static struct tiers *model;
static struct kvp_radix_match *match;
static struct tm_op *op;

static char *text; /* the last dump */
static size_t text_len, text_cap;

/* ---- the node ---- */

static void part_name(uint32_t part, char *to, size_t cap)
{
	snprintf(to, cap, "m:%u\"\xc3\xb6", part);
}

static void new_part(uint32_t part)
{
	char name[32];
	uint32_t at;
	part_name(part, name, sizeof(name));
	kvp_cat_w_part(
		&node.idx.cat, KVP_PART_AGGREGATED, name, (uint32_t)strlen(name), "g", 1, 16 + part, 0, &at);
}

static void take_rank(uint32_t r)
{
	struct kvp_cat_rank_info info;
	kvp_cat_w_rank_take(&node.idx.cat, FIRST_WORKER + r, 7 * r, tm_part(r), 0, &info);
	model->slot[r] = info.index_slot;
	node.rank_slot[r] = info.rank_slot;
}

static void publish(uint32_t part)
{
	struct kvp_rank_view v[TM_RANKS];
	uint32_t cnt = 0;
	memset(v, 0, sizeof(v));
	for (uint32_t r = 0; r < TM_RANKS; r++) {
		struct kvp_cat_rank_info i;
		if (tm_part(r) != part || kvp_cat_rank_info(&node.r.cat, node.rank_slot[r], &i))
			continue;
		v[cnt++] = (struct kvp_rank_view){.worker_id = i.worker_id,
			.dp_rank = i.dp_rank,
			.rank_slot = i.rank_slot,
			.rank_gen = i.rank_gen,
			.index_slot = i.index_slot,
			.index_gen = i.index_gen};
	}
	kvp_cat_w_view(&node.idx.cat, part, v, cnt, NULL, 0, cnt);
}

static int open_node(void)
{
	node.g = (struct kvp_geom){.slot_max = 8,
		.rank_max = 64,
		.index_rank_max = 64,
		.resv_max = 64,
		.block_max = 200000,
		.active_block_max = 1024,
		.queued_max = 16,
		.part_max = 8};
	if (kvp_region_geom(&node.g) || kvp_region_create(&node.g, &node.fd) ||
		kvp_region_join(node.fd, KVP_REGION_INDEXER, &node.r))
		return -1;
	node.idx.ctr = &node.r.counters.column[1];
	node.priv = seg_map(kvp_radix_priv_footprint(&node.g));
	return !node.priv || kvp_radix_priv_new(node.priv, &node.g) ||
	       kvp_radix_w_open((void *)(uintptr_t)node.r.radix.base, node.priv, &node.g, KVP_RADIX_RESET,
		       NULL, &node.idx.radix, NULL) ||
	       kvp_cat_w_open(&node.r.cat, &node.idx.cat);
}

/* The indexer dies and another one takes over. */
static void restart(void)
{
	kvp_radix_w_close(node.idx.radix);
	kvp_radix_w_open((void *)(uintptr_t)node.r.radix.base, node.priv, &node.g, KVP_RADIX_RECOVER, NULL,
		&node.idx.radix, NULL);
	kvp_cmd_attach(&node.r.cmd, OWNER);
	node.restarts++;
}

static void answer(uint32_t max)
{
	struct kvp_cmd_cell *c;
	uint32_t len;
	while (max-- && kvp_cmd_next(&node.r.cmd, &c) == KVP_OK) {
		int status = c->type == KVP_CMD_DUMP
				     ? kvp_idx_dump(&node.idx, c, kvp_cmd_buffer(&node.r.cmd, c), &len)
				     : KVP_ERR_PROTO;
		kvp_cmd_reply(&node.r.cmd, c, status, status == KVP_ERR_PROTO ? 0 : len);
		node.pages++;
	}
}

/* ---- a dump, with something happening between its pages ---- */

static int dump_whole(void (*between)(struct rng *g), struct rng *g)
{
	struct kvp_dump *d = kvp_dump_open(&node.r, OWNER, node.r.counters.column, KVP_PART_AGGREGATED);
	const char *data;
	size_t len;
	int rc;
	text_len = 0;
	while ((rc = kvp_dump_next(d, 1000, &data, &len)) == KVP_OK || rc == KVP_ERR_AGAIN) {
		if (rc == KVP_ERR_AGAIN) {
			if (between)
				between(g);
			answer(1);
			continue;
		}
		if (text_len + len > text_cap) {
			text_cap = 2 * (text_len + len);
			text = realloc(text, text_cap);
		}
		memcpy(text + text_len, data, len);
		text_len += len;
	}
	kvp_dump_close(d);
	return rc == KVP_ERR_NOTFOUND ? 0 : rc;
}

/* ---- reading it ---- */

static struct kvp_json_val at(struct kvp_json_val v, const char *key)
{
	struct kvp_json_val out = v;
	if (kvp_json_get(v, key, &out))
		kvp_json_get(v, "", &out); /* stays v: of a wrong type for what follows */
	return out;
}

static uint64_t num(struct kvp_json_val v)
{
	uint64_t n = UINT64_MAX;
	kvp_json_u64(v, &n);
	return n;
}

struct reader {
	uint64_t events, blocks, bad, orphans;
	struct kvp_radix_w *to; /* receives what is read; NULL = nobody */
};

static int read_event(struct reader *x, uint32_t part, struct kvp_json_val v)
{
	static uint64_t local[8192], ext[8192];
	struct kvp_json_val ev = at(v, "event"), st = at(at(ev, "data"), "stored"), parent;
	uint32_t r = (uint32_t)(num(at(v, "worker_id")) - FIRST_WORKER), t = 0, n = 0;
	while (t < TM_TIERS && !kvp_json_str_is(at(v, "storage_tier"), tier_text[t]))
		t++;
	struct kvp_json_iter b = kvp_json_each(at(st, "blocks"));
	for (; kvp_json_next(&b) && n < 8192; n++) {
		ext[n] = num(at(b.val, "block_hash"));
		local[n] = num(at(b.val, "tokens_hash"));
		if (kvp_json_type(at(b.val, "mm_extra_info")) != KVP_JSON_NULL)
			return -1;
	}
	if (r >= TM_RANKS || num(at(ev, "dp_rank")) != 7 * r || tm_part(r) != part || t == TM_TIERS || !n ||
		kvp_json_get(st, "parent_hash", &parent) || num(at(ev, "event_id")) != x->events ||
		!kvp_json_str_is(at(v, "residency_domain"), "worker"))
		return -1;
	int child = kvp_json_type(parent) != KVP_JSON_NULL;
	x->events++;
	x->blocks += n;
	for (uint32_t i = 0; i < n; i++) {
		struct model_name *p = tm_find(&model->h[r][t], ext[i]);
		x->bad += x->to == NULL && (!p || model->node[p->node].local != local[i]);
	}
	if (!x->to)
		return 0;
	int rc = kvp_radix_store_tier(x->to, model->slot[r], (enum kvp_radix_tier)t, model_salt(part),
		child ? KVP_RADIX_CHILD : KVP_RADIX_ROOT, child ? num(parent) : 0, n, local, ext, NULL);
	x->orphans += rc == KVP_ERR_NOTFOUND;
	x->bad += rc && rc != KVP_ERR_NOTFOUND;
	return 0;
}

/* 0 = the text has the form it should have. */
static int read_text(struct reader *x)
{
	struct kvp_json *p = kvp_json_new();
	struct kvp_json_val root;
	char want[64];
	int bad = kvp_json_parse(p, text, text_len, 16, &root, NULL);
	for (uint32_t part = 0; part < TM_PARTS && !bad; part++) {
		struct kvp_json_val v;
		part_name(part, want, sizeof(want) - 2);
		strncat(want, ":g", 3);
		bad = kvp_json_get(root, want, &v) || num(at(v, "block_size")) != 16 + part ||
		      kvp_json_type(at(v, "events")) != KVP_JSON_ARR;
		uint64_t before = x->events;
		x->events = 0;
		struct kvp_json_iter it = kvp_json_each(at(v, "events"));
		while (!bad && kvp_json_next(&it))
			bad = read_event(x, part, it.val);
		x->events += before;
	}
	bad = bad || kvp_json_len(root) != TM_PARTS;
	kvp_json_free(p);
	return bad;
}

/* ---- operations ---- */

static struct tm_op *log_op; /* what engines told since the dump began */
static uint32_t log_cnt, log_max;

/* An engine that has one name for two blocks in different tiers cannot be told apart from one that means the
 * same block: the parent of a block in a third tier could be either. */
static int ambiguous(const struct tm_op *o)
{
	struct model_name *p = o->child ? tm_known(model, o->r, o->t, o->parent) : NULL;
	uint32_t at_node = p ? p->node : tm_part(o->r);
	if (o->kind != TM_STORE)
		return o->kind == TM_ATTACH;
	for (uint32_t i = 0; i < o->n; i++) {
		at_node = tm_child(model, at_node, o->local[i], 0);
		for (uint32_t t = 0; t < TM_TIERS; t++) {
			struct model_name *x = t == o->t ? NULL : tm_find(&model->h[o->r][t], o->ext[i]);
			if (x && x->node != at_node)
				return 1;
		}
	}
	return 0;
}

static void random_op(struct rng *g)
{
	uint32_t a, b;
	do
		tm_gen(model, rnd(g), op);
	while (ambiguous(op));
	int rc = tm_apply(model, op, &a);
	if (tm_tree(node.idx.radix, model, op, &b) != rc || a != b)
		printf("# tree and model differ\n");
	if (rc == KVP_OK && log_cnt < log_max)
		log_op[log_cnt++] = *op;
}

/* Everything anew: nothing held, a model of its own, then random operations. */
static void refill(struct rng *g)
{
	uint32_t slot[TM_RANKS];
	memcpy(slot, model->slot, sizeof(slot));
	for (uint32_t r = 0; r < TM_RANKS; r++)
		kvp_radix_clear(node.idx.radix, slot[r]);
	tm_init(model, 64);
	memcpy(model->slot, slot, sizeof(slot));
	for (int i = 0; i < 400; i++)
		random_op(g);
}

static void busy(struct rng *g)
{
	for (uint32_t i = rnd_below(g, 6); i; i--)
		random_op(g);
	kvp_radix_w_tend(node.idx.radix, rnd_below(g, 200));
}

static void busy_and_dying(struct rng *g)
{
	busy(g);
	if (rnd_below(g, 3) == 0)
		restart();
}

/* ---- a fresh tree that is given a dump ---- */

struct fresh {
	struct seg seg;
	struct kvp_radix r;
	struct kvp_radix_w *w;
};
static int fresh_open(struct fresh *f)
{
	return seg_new(&f->seg, &node.g) || kvp_radix_join(f->seg.pub, &node.g, &f->r) ||
	       kvp_radix_w_open(f->seg.pub, f->seg.priv, &node.g, KVP_RADIX_RESET, NULL, &f->w, NULL);
}
static void fresh_close(struct fresh *f)
{
	kvp_radix_w_close(f->w);
	seg_free(&f->seg);
}

static void at_rest(struct rng *g)
{
	struct reader look = {.to = NULL};
	struct fresh f;
	struct tm_reach *reach = malloc(sizeof(*reach));
	uint64_t want = 0, same = 0;
	int rc = dump_whole(NULL, NULL);
	ok(rc == 0 && read_text(&look) == 0, "a dump at rest is well-formed: %llu bytes",
		(unsigned long long)text_len);
	for (uint32_t r = 0; r < TM_RANKS; r++) {
		tm_reach(model, r, reach);
		for (uint32_t t = 0; t < TM_TIERS; t++)
			for (uint32_t i = 0; i < model->h[r][t].cnt; i++) {
				uint32_t up = model->node[model->h[r][t].name[i].node].parent;
				want += t ? reach->any[up] : reach->dev[up];
			}
	}
	free(reach);
	ok(look.bad == 0, "every block in it is held by its rank in its tier");
	is_u64(look.blocks, want,
		"and every block whose ancestors are held is in it, under each of its names");
	struct reader copy = {.to = NULL};
	ok(fresh_open(&f) == 0, "a fresh tree");
	copy.to = f.w;
	ok(read_text(&copy) == 0 && copy.orphans == 0 && copy.bad == 0,
		"takes all of it: parents come first");
	for (uint32_t i = 0; i < 500; i++)
		same += tm_compare_query(&f.r, model, rnd(g), match) == 0;
	is_u64(same, 500, "and answers 500 sampled prompts as the model does");
	fresh_close(&f);
}

/* 1 if both trees answer a random prompt alike. */
static int same_answer(const struct kvp_radix *a, const struct kvp_radix *b, struct rng *g)
{
	static uint64_t local[TM_NODES];
	static struct kvp_radix_match m[2];
	uint32_t part = rnd_below(g, TM_PARTS), n = 0;
	for (uint32_t c = model->node[part].child; c && rnd_below(g, 300); c = model->node[c].child) {
		while (model->node[c].sibling && rnd_below(g, 3) == 0)
			c = model->node[c].sibling;
		local[n++] = model->node[c].local;
	}
	for (int i = 0; i < 2; i++) {
		struct kvp_radix_query q = {model_salt(part), local, n, n, NULL, NULL};
		if (kvp_radix_find(i ? b : a, &q, &m[i]))
			return 0;
	}
	for (uint32_t r = 0; r < TM_RANKS; r++) {
		uint32_t s = model->slot[r], d[2];
		for (int i = 0; i < 2; i++)
			d[i] = m[i].active[s >> 6] >> (s & 63) & 1 ? m[i].depth[s] : 0;
		for (uint32_t t = 1; t < TM_TIERS; t++)
			d[0] += kvp_radix_match_ext(&m[0], (enum kvp_radix_tier)t, s) !=
				kvp_radix_match_ext(&m[1], (enum kvp_radix_tier)t, s);
		if (d[0] != d[1])
			return 0;
	}
	return 1;
}

/* The names of a random prompt's first blocks: as many as a lookup finds on the rank's device, each one of
 * the rank's names there. */
static void names(struct rng *g)
{
	static uint64_t local[TM_NODES], ext[TM_NODES];
	static uint32_t path[TM_NODES];
	uint64_t good = 0, found = 0;
	for (int i = 0; i < 300; i++) {
		uint32_t r = rnd_below(g, TM_RANKS), n = 0, want = 0, bad = 0;
		for (uint32_t c = model->node[tm_part(r)].child; c; c = model->node[c].child) {
			while (model->node[c].sibling && rnd_below(g, 3) == 0)
				c = model->node[c].sibling;
			path[n] = c;
			local[n++] = model->node[c].local;
		}
		while (want < n && model->h[r][0].own[path[want]])
			want++;
		uint32_t ask = rnd_below(g, 2) ? n : rnd_below(g, n + 1);
		uint32_t got = kvp_radix_w_names(
			node.idx.radix, model->slot[r], model_salt(tm_part(r)), ask, local, ext);
		for (uint32_t k = 0; k < got; k++) {
			struct model_name *p = tm_find(&model->h[r][0], ext[k]);
			bad += !p || p->node != path[k];
		}
		good += got == (want < ask ? want : ask) && !bad;
		found += got;
	}
	is_u64(good, 300, "names of prompts are those of the rank");
	ok(found > 20, "of %llu blocks", (unsigned long long)found);
}

/* Names in the copy that the model does not have. */
static int alien(void *ctx, const struct kvp_radix_dump_event *ev)
{
	uint64_t *n = ctx;
	uint32_t r = 0;
	while (r < TM_RANKS && model->slot[r] != ev->slot)
		r++;
	for (uint32_t i = 0; i < ev->n; i++)
		*n += r == TM_RANKS || !tm_find(&model->h[r][ev->tier], ev->ext[i]);
	return 0;
}

/* While engines go on: the dump, then what they told since it began, gives what the node has. */
static void while_busy(struct rng *g, void (*between)(struct rng *g), const char *what)
{
	uint64_t orphans = 0, aliens = 0, same = 0, asked = 0, bad = 0, before = node.restarts;
	refill(g);
	for (int round = 0; round < 8; round++) {
		struct fresh f;
		struct reader copy = {.to = NULL};
		uint32_t none;
		log_cnt = 0;
		bad += dump_whole(between, g) != 0 || fresh_open(&f) != 0;
		copy.to = f.w;
		bad += read_text(&copy) != 0 || copy.bad;
		orphans += copy.orphans;
		for (uint32_t i = 0; i < log_cnt; i++)
			tm_tree(f.w, model, &log_op[i], &none);
		kvp_radix_w_dump(f.w, KVP_RADIX_SLOT_ALL, alien, &aliens, NULL);
		bad += kvp_radix_w_check(f.w);
		for (uint32_t i = 0; i < 50; i++, asked++)
			same += (uint64_t)same_answer(&node.r.radix, &f.r, g);
		fresh_close(&f);
	}
	ok(bad == 0 && log_cnt < log_max, "%s: every dump is well-formed (%llu restarts)", what,
		(unsigned long long)(node.restarts - before));
	is_u64(aliens, 0, "nothing comes back that the node has dropped since");
	ok(same > asked * 8 / 10, "%llu of %llu sampled prompts are answered as by the node, %llu orphans",
		(unsigned long long)same, (unsigned long long)asked, (unsigned long long)orphans);
}

/* ---- what can go wrong ---- */

static void lose_rank(struct rng *g)
{
	static uint32_t done;
	(void)g;
	if (done++)
		return;
	uint64_t other = 4242;
	kvp_radix_clear(node.idx.radix, model->slot[2]);
	kvp_cat_w_rank_drop(&node.idx.cat, node.rank_slot[2]);
	for (uint32_t t = 0; t < TM_TIERS; t++) {
		model->h[2][t].cnt = 0;
		memset(model->h[2][t].own, 0, sizeof(model->h[2][t].own));
	}
	/* The place goes to another rank, which has blocks at once. */
	kvp_radix_store(node.idx.radix, model->slot[2], model_salt(tm_part(2)), KVP_RADIX_ROOT, 0, 1, &other,
		&other, NULL);
}

static int failing(void (*answering)(struct kvp_cmd_cell *c), uint64_t now_ns)
{
	struct kvp_dump *d = kvp_dump_open(&node.r, OWNER, node.r.counters.column, KVP_PART_AGGREGATED);
	struct kvp_cmd_cell *c;
	const char *data;
	size_t len;
	uint64_t t = 1000;
	int rc;
	while ((rc = kvp_dump_next(d, t, &data, &len)) == KVP_OK || rc == KVP_ERR_AGAIN) {
		t = now_ns;
		while (answering && kvp_cmd_next(&node.r.cmd, &c) == KVP_OK)
			answering(c);
	}
	kvp_dump_close(d);
	return rc;
}

static void say_void(struct kvp_cmd_cell *c)
{
	kvp_cmd_reply(&node.r.cmd, c, KVP_ERR_NOTFOUND, 0);
}

static void say_nothing_good(struct kvp_cmd_cell *c)
{
	static uint32_t turn;
	struct kvp_dump_page *p = kvp_cmd_buffer(&node.r.cmd, c);
	struct kvp_dump_event *e = (void *)(p + 1);
	*p = (struct kvp_dump_page){.tour = 9, .event_cnt = 1, .bytes = sizeof(*e) + 16};
	*e = (struct kvp_dump_event){.n = 1 + (turn == 0) * 4000000000u, .tier = turn == 1 ? 77 : 0};
	p->event_cnt += turn == 2;
	p->bytes += turn == 3;
	kvp_cmd_reply(&node.r.cmd, c, turn == 4 ? -99 : KVP_OK, (uint32_t)sizeof(*p) + (turn == 5 ? 0 : 40));
	turn++;
}

static void failures(void)
{
	struct kvp_cmd_cell *cell[KVP_CMD_CELLS];
	uint32_t cnt[KVP_CMD_STATES], n = 0;
	void *payload;
	is_u64((uint64_t)-failing(NULL, 2000 + KVP_DUMP_WAIT_NS), (uint64_t)-KVP_ERR_TIMEOUT,
		"a silent indexer is waited for so long");
	is_u64((uint64_t)-failing(say_void, 2000), (uint64_t)-KVP_ERR_CLOSED,
		"a rank that always has to be told anew is given up");
	for (int i = 0; i < 6; i++)
		is_u64((uint64_t)-failing(say_nothing_good, 2000), (uint64_t)-KVP_ERR_PROTO,
			"a page that cannot be is refused");
	while (kvp_cmd_begin(&node.r.cmd, OWNER + 1, &cell[n], &payload) == KVP_OK)
		n++;
	is_u64((uint64_t)-failing(NULL, 2000 + KVP_DUMP_WAIT_NS), (uint64_t)-KVP_ERR_TIMEOUT,
		"no free command cell: a time-out, too");
	while (n)
		kvp_cmd_end(&node.r.cmd, cell[--n]);
	answer(1000);
	kvp_cmd_count(&node.r.cmd, cnt);
	is_u64(cnt[0], KVP_CMD_CELLS, "no command cell is left behind");
}

int main(void)
{
	struct rng g = {tap_seed(0)};
	model = malloc(sizeof(*model));
	match = malloc(sizeof(*match));
	op = malloc(sizeof(*op));
	log_max = 4000;
	log_op = malloc(sizeof(*log_op) * log_max);
	ok(open_node() == 0, "a node");
	kvp_cmd_attach(&node.r.cmd, OWNER);
	ok(dump_whole(NULL, NULL) == 0 && text_len == 2 && memcmp(text, "{}", 2) == 0,
		"without partitions: {}");
	tm_init(model, 64);
	for (uint32_t p = 0; p < TM_PARTS; p++)
		new_part(p);
	for (uint32_t r = 0; r < TM_RANKS; r++)
		take_rank(r);
	publish(0);
	publish(1);
	struct reader none = {.to = NULL};
	ok(dump_whole(NULL, NULL) == 0 && read_text(&none) == 0 && none.events == 0,
		"partitions without blocks have empty lists");
	refill(&g);
	at_rest(&g);
	names(&g);
	while_busy(&g, busy, "engines go on");
	while_busy(&g, busy_and_dying, "the indexer dies now and then");
	refill(&g);
	at_rest(&g);
	struct reader left = {.to = NULL};
	ok(dump_whole(lose_rank, &g) == 0 && read_text(&left) == 0,
		"a rank is lost meanwhile: the rest is told");
	is_u64(left.bad, 0, "and nothing of the lost one");
	failures();
	ok(node.pages > 100, "%u pages", node.pages);
	return done();
}
