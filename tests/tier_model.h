/* tests/tier_model.h — a naive model of ranks with four tiers, one node a block, written from the rules and
 * not from the code. Names belong to a rank in a tier. Shared by the tests of lower tiers. */
#ifndef KVP_TIER_MODEL_H
#define KVP_TIER_MODEL_H

#include "tests/radix_model.h"

#define TM_NODES 12000
#define TM_RANKS 6
#define TM_TIERS KVP_RADIX_TIER_CNT
#define TM_NAMES 3000
#define TM_BATCH 300
#define TM_PARTS 2

struct tm_node {
	uint32_t parent, child, sibling;
	uint64_t local, path;
};
struct tm_holder { /* a rank in a tier */
	uint32_t cnt;
	struct model_name name[TM_NAMES];
	uint8_t own[TM_NODES]; /* number of names */
};
struct tiers {
	uint32_t node_cnt; /* nodes 0..TM_PARTS-1 are the roots */
	struct tm_node node[TM_NODES];
	struct tm_holder h[TM_RANKS][TM_TIERS];
	uint32_t slot[TM_RANKS];
	uint64_t found[TM_TIERS]; /* blocks that queries found */
};
enum tm_kind { TM_STORE, TM_ATTACH, TM_REMOVE, TM_CLEAR, TM_CLEAR_TIER };
struct tm_op {
	enum tm_kind kind;
	uint32_t r, t, n;
	int child;
	uint64_t parent, local[TM_BATCH], ext[TM_BATCH];
};

static inline uint32_t tm_part(uint32_t r)
{
	return r % TM_PARTS;
}
static inline void tm_init(struct tiers *m, uint32_t slot_max)
{
	memset(m, 0, sizeof(*m));
	m->node_cnt = TM_PARTS;
	for (uint32_t i = 0; i < TM_RANKS; i++)
		m->slot[i] = i * (slot_max - 1) / (TM_RANKS - 1);
}
static inline uint32_t tm_child(struct tiers *m, uint32_t n, uint64_t local, int make)
{
	for (uint32_t c = m->node[n].child; c; c = m->node[c].sibling)
		if (m->node[c].local == local)
			return c;
	if (!make || m->node_cnt == TM_NODES)
		return 0;
	uint32_t c = m->node_cnt++;
	struct rng r = {m->node[n].path ^ (local * 0x2545f4914f6cdd1dULL)};
	m->node[c] = (struct tm_node){n, 0, m->node[n].child, local, rnd(&r)};
	m->node[n].child = c;
	return c;
}
static inline struct model_name *tm_find(struct tm_holder *h, uint64_t ext)
{
	for (uint32_t i = 0; i < h->cnt; i++)
		if (h->name[i].ext == ext)
			return &h->name[i];
	return NULL;
}
static inline int tm_unname(struct tm_holder *h, uint64_t ext)
{
	struct model_name *x = tm_find(h, ext);
	if (!x)
		return 0;
	h->own[x->node]--;
	*x = h->name[--h->cnt];
	return 1;
}
static inline void tm_name(struct tm_holder *h, uint64_t ext, uint32_t node)
{
	struct model_name *x = tm_find(h, ext);
	if (x && x->node == node)
		return;
	if (x)
		tm_unname(h, ext);
	h->name[h->cnt++] = (struct model_name){ext, node};
	h->own[node]++;
}
/* A name of the rank: in tier t, else for a lower tier in any. */
static inline struct model_name *tm_known(struct tiers *m, uint32_t r, uint32_t t, uint64_t ext)
{
	struct model_name *x = tm_find(&m->h[r][t], ext);
	for (uint32_t u = 0; u < TM_TIERS && !x && t; u++)
		x = tm_find(&m->h[r][u], ext);
	return x;
}
static inline int tm_store(struct tiers *m, const struct tm_op *o)
{
	uint32_t at = tm_part(o->r);
	for (uint32_t i = 0; i < o->n; i++) {
		if (o->child && o->ext[i] == o->parent)
			return KVP_ERR_INVAL;
		for (uint32_t j = 0; j < i; j++)
			if (o->ext[i] == o->ext[j])
				return KVP_ERR_INVAL;
	}
	if (o->child) {
		struct model_name *p = tm_known(m, o->r, o->t, o->parent);
		if (!p)
			return KVP_ERR_NOTFOUND;
		at = p->node;
	}
	for (uint32_t i = 0; i < o->n; i++) {
		at = tm_child(m, at, o->local[i], 1);
		tm_name(&m->h[o->r][o->t], o->ext[i], at);
	}
	return KVP_OK;
}
/* Node that a hash without tokens means; 0 = unknown, UINT32_MAX = ranks differ about it. */
static inline uint32_t tm_meant(struct tiers *m, uint32_t r, uint32_t t, uint64_t ext)
{
	struct model_name *x = tm_known(m, r, t, ext);
	uint32_t node = 0;
	if (x)
		return x->node;
	for (uint32_t q = 0; q < TM_RANKS; q++)
		for (uint32_t u = 0; u < TM_TIERS && tm_part(q) == tm_part(r); u++) {
			x = tm_find(&m->h[q][u], ext);
			if (x && node && x->node != node)
				return UINT32_MAX;
			node = x ? x->node : node;
		}
	return node;
}
static inline int tm_apply(struct tiers *m, const struct tm_op *o, uint32_t *unknown)
{
	*unknown = 0;
	for (uint32_t u = 0; u < TM_TIERS; u++)
		if (o->kind == TM_CLEAR || (o->kind == TM_CLEAR_TIER && u == o->t)) {
			m->h[o->r][u].cnt = 0;
			memset(m->h[o->r][u].own, 0, sizeof(m->h[o->r][u].own));
		}
	for (uint32_t i = 0; i < o->n && o->kind == TM_REMOVE; i++)
		*unknown += !tm_unname(&m->h[o->r][o->t], o->ext[i]);
	for (uint32_t i = 0; i < o->n && o->kind == TM_ATTACH; i++) {
		uint32_t node = tm_meant(m, o->r, o->t, o->ext[i]);
		*unknown += node == 0;
		if (node)
			tm_name(&m->h[o->r][o->t], o->ext[i], node);
	}
	return o->kind == TM_STORE ? tm_store(m, o) : KVP_OK;
}
static inline int tm_tree(
	struct kvp_radix_w *w, const struct tiers *m, const struct tm_op *o, uint32_t *unknown)
{
	uint32_t slot = m->slot[o->r];
	uint64_t salt = model_salt(tm_part(o->r));
	enum kvp_radix_tier t = (enum kvp_radix_tier)o->t;
	*unknown = 0;
	switch (o->kind) {
	case TM_STORE:
		return kvp_radix_store_tier(w, slot, t, salt, o->child ? KVP_RADIX_CHILD : KVP_RADIX_ROOT,
			o->parent, o->n, o->local, o->ext, NULL);
	case TM_ATTACH:
		return kvp_radix_attach(w, slot, t, salt, o->n, o->ext, unknown);
	case TM_REMOVE:
		return kvp_radix_remove_tier(w, slot, t, o->n, o->ext, unknown);
	case TM_CLEAR:
		return kvp_radix_clear(w, slot);
	default:
		return kvp_radix_clear_tier(w, slot, t);
	}
}

/* ---- random operations ---- */

static inline uint64_t tm_ext(const struct tiers *m, uint32_t r, uint32_t node)
{
	struct rng g = {m->node[node].path ^ (0x51ULL * (r % 3))};
	return rnd(&g);
}
static inline struct model_name *tm_any(struct tiers *m, struct rng *g, uint32_t r)
{
	struct tm_holder *h = &m->h[r][rnd_below(g, TM_TIERS)];
	return h->cnt ? &h->name[rnd_below(g, 2) ? h->cnt - 1 : rnd_below(g, h->cnt)] : NULL;
}
static inline void tm_gen_store(struct tiers *m, struct rng *g, struct tm_op *o)
{
	uint32_t at = tm_part(o->r), odd = rnd_below(g, 8);
	struct model_name *x = rnd_below(g, 4) ? tm_any(m, g, o->r) : NULL;
	o->n = 1 + rnd_below(g, rnd_below(g, 12) ? 12 : TM_BATCH);
	o->child = x != NULL;
	if (x) {
		o->parent = rnd_below(g, 30) ? x->ext : rnd(g);
		at = x->node;
	}
	for (uint32_t i = 0; i < o->n; i++) {
		uint32_t c = m->node[at].child;
		while (c && rnd_below(g, 4) == 0)
			c = m->node[c].sibling;
		o->local[i] = c && rnd_below(g, 40) ? m->node[c].local : 1 + rnd_below(g, 4);
		at = tm_child(m, at, o->local[i], 1);
		o->ext[i] = tm_ext(m, o->r, at);
		x = odd == 0 && rnd_below(g, 10) == 0 ? tm_any(m, g, rnd_below(g, TM_RANKS)) : NULL;
		if (x)
			o->ext[i] = x->ext;
		if (odd == 1 && rnd_below(g, 6) == 0)
			o->ext[i] = rnd(g);
	}
}
/* A run of blocks upwards or downwards, or any. Attached hashes often are another rank's or unknown. */
static inline void tm_gen_hashes(struct tiers *m, struct rng *g, struct tm_op *o)
{
	uint32_t from = o->kind == TM_ATTACH && rnd_below(g, 3) == 0 ? rnd_below(g, TM_RANKS) : o->r;
	struct model_name *x = tm_any(m, g, from);
	uint32_t node = x ? x->node : 0, kind = rnd_below(g, 3);
	o->n = 1 + rnd_below(g, rnd_below(g, 3) ? 6 : 60);
	for (uint32_t i = 0; i < o->n; i++) {
		x = tm_any(m, g, from);
		o->ext[i] = x && rnd_below(g, 12) ? x->ext : rnd(g);
		if (kind && node >= TM_PARTS) {
			o->ext[i] = tm_ext(m, from, node);
			node = m->node[node].parent;
		}
	}
	for (uint32_t i = 0; i < o->n / 2 && kind == 2; i++) {
		uint64_t e = o->ext[i];
		o->ext[i] = o->ext[o->n - 1 - i];
		o->ext[o->n - 1 - i] = e;
	}
	for (uint32_t i = 0; i < o->n && o->kind == TM_ATTACH; i++)
		if (tm_meant(m, o->r, o->t, o->ext[i]) == UINT32_MAX)
			o->ext[i] = rnd(g);
}
static inline void tm_gen(struct tiers *m, uint64_t seed, struct tm_op *o)
{
	struct rng g = {seed};
	uint32_t k = rnd_below(&g, 200);
	o->r = rnd_below(&g, TM_RANKS);
	o->t = rnd_below(&g, TM_TIERS);
	o->n = 0;
	o->kind = k < 110   ? TM_STORE
		  : k < 135 ? TM_ATTACH
		  : k < 196 ? TM_REMOVE
		  : k < 198 ? TM_CLEAR_TIER
			    : TM_CLEAR;
	if (o->kind == TM_ATTACH && o->t == 0)
		o->t = 1 + rnd_below(&g, TM_TIERS - 1);
	for (uint32_t t = 0; t < TM_TIERS; t++)
		if (m->h[o->r][t].cnt > TM_NAMES - 2 * TM_BATCH || m->node_cnt > TM_NODES - 2 * TM_BATCH)
			o->kind = TM_CLEAR;
	if (o->kind == TM_STORE)
		tm_gen_store(m, &g, o);
	else if (o->kind == TM_ATTACH || o->kind == TM_REMOVE)
		tm_gen_hashes(m, &g, o);
}

/* ---- comparison ---- */

static inline int tm_compare_rank(struct tiers *m, uint32_t r, uint32_t part, const uint32_t *path,
	uint32_t known, const struct kvp_radix_match *out)
{
	uint32_t want[TM_TIERS] = {0}, at = 0, s = m->slot[r];
	for (uint32_t t = 0; t < TM_TIERS && tm_part(r) == part; t++)
		while (at < known && m->h[r][t].own[path[at]]) {
			want[t]++;
			at++;
		}
	for (uint32_t t = 0; t < TM_TIERS; t++) {
		uint32_t dev = out->active[s >> 6] >> (s & 63) & 1 ? out->depth[s] : 0;
		uint32_t got = t ? kvp_radix_match_ext(out, (enum kvp_radix_tier)t, s) : dev;
		if (got != want[t]) {
			printf("# query: rank %u tier %u has %u, want %u\n", r, t, got, want[t]);
			return -1;
		}
		m->found[t] += got;
	}
	return 0;
}
/* A random path down from a root. Result 0 if the lookup agrees for every rank. */
static inline int tm_compare_query(
	const struct kvp_radix *r, struct tiers *m, uint64_t seed, struct kvp_radix_match *out)
{
	static uint64_t local[TM_NODES + 1];
	static uint32_t path[TM_NODES + 1];
	struct rng g = {seed};
	uint32_t part = rnd_below(&g, TM_PARTS), n = 0, at = part;
	for (uint32_t c; (c = m->node[at].child) != 0 && rnd_below(&g, 300); at = c) {
		while (m->node[c].sibling && rnd_below(&g, 3) == 0)
			c = m->node[c].sibling;
		path[n] = c;
		local[n++] = m->node[c].local;
	}
	uint32_t known = n;
	if (rnd_below(&g, 2))
		local[n++] = rnd(&g);
	struct kvp_radix_query q = {model_salt(part), local, n, n, NULL, NULL};
	if (kvp_radix_find(r, &q, out) || out->retries)
		return -1;
	for (uint32_t i = 0; i < TM_RANKS; i++)
		if (tm_compare_rank(m, i, part, path, known, out))
			return -1;
	return 0;
}

/* Whether blocks were reported: on the device, in any tier. A parent has a smaller number than its child. */
struct tm_reach {
	uint8_t dev[TM_NODES], any[TM_NODES];
};
static inline void tm_reach(struct tiers *m, uint32_t r, struct tm_reach *x)
{
	memset(x, 0, sizeof(*x));
	for (uint32_t i = 0; i < m->node_cnt; i++) {
		uint32_t p = m->node[i].parent, low = 0;
		for (uint32_t t = 1; t < TM_TIERS; t++)
			low += m->h[r][t].own[i];
		x->dev[i] = i < TM_PARTS || (m->h[r][0].own[i] && x->dev[p]);
		x->any[i] = x->dev[i] || (low && x->any[p]);
	}
}
struct tm_receiver {
	struct tiers *m;
	uint32_t r, cnt, bad;
	uint8_t seen[TM_TIERS][TM_NAMES];
};
/* Node under which an event may hang: a parent that arrived in tier t and whose child has the event's first
 * name. */
static inline uint32_t tm_hang(struct tm_receiver *x, uint32_t t, const struct kvp_radix_dump_event *ev)
{
	struct tm_holder *h = &x->m->h[x->r][t];
	struct model_name *p = tm_find(h, ev->parent_ext);
	struct model_name *first = tm_find(&x->m->h[x->r][ev->tier], ev->ext[0]);
	if (!p || !x->seen[t][p - h->name] || !first || x->m->node[first->node].parent != p->node)
		return 0;
	return p->node;
}
static inline int tm_receive(void *ctx, const struct kvp_radix_dump_event *ev)
{
	struct tm_receiver *x = ctx;
	struct tiers *m = x->m;
	struct tm_holder *h = &m->h[x->r][ev->tier];
	uint32_t at = tm_part(x->r);
	if (ev->slot != m->slot[x->r] || ev->part_salt != model_salt(at))
		x->bad++;
	if (ev->how == KVP_RADIX_CHILD) {
		at = tm_hang(x, ev->tier, ev);
		for (uint32_t t = 0; t < TM_TIERS && !at && ev->tier; t++)
			at = tm_hang(x, t, ev);
		if (!at) {
			x->bad++;
			return 0;
		}
	}
	for (uint32_t i = 0; i < ev->n; i++) {
		at = tm_child(m, at, ev->local[i], 0);
		struct model_name *p = at ? tm_find(h, ev->ext[i]) : NULL;
		if (!p || p->node != at || x->seen[ev->tier][p - h->name]) {
			x->bad++;
			return 0;
		}
		x->seen[ev->tier][p - h->name] = 1;
		x->cnt++;
	}
	return 0;
}
static inline int tm_compare_dump(struct kvp_radix_w *w, struct tiers *m)
{
	static struct tm_receiver x;
	static struct tm_reach reach;
	for (uint32_t r = 0; r < TM_RANKS; r++) {
		uint64_t hidden = 0, unseen = 0;
		uint32_t want = 0;
		memset(&x, 0, sizeof(x));
		x.m = m;
		x.r = r;
		tm_reach(m, r, &reach);
		int rc = kvp_radix_w_dump(w, m->slot[r], tm_receive, &x, &hidden);
		for (uint32_t t = 0; t < TM_TIERS; t++) {
			struct tm_holder *h = &m->h[r][t];
			const uint8_t *up = t ? reach.any : reach.dev;
			uint64_t held = 0;
			for (uint32_t i = 0; i < h->cnt; i++)
				want += up[m->node[h->name[i].node].parent];
			for (uint32_t i = TM_PARTS; i < m->node_cnt; i++) {
				held += h->own[i] != 0;
				unseen += h->own[i] && !up[m->node[i].parent];
			}
			if (held != kvp_radix_w_tier_blocks(w, m->slot[r], (enum kvp_radix_tier)t)) {
				printf("# rank %u tier %u: other number of blocks, want %llu\n", r, t,
					(unsigned long long)held);
				return -1;
			}
		}
		if (rc || x.bad || x.cnt != want || hidden != unseen) {
			printf("# dump of rank %u: bad %u, names %u want %u, hidden %llu want %llu\n", r,
				x.bad, x.cnt, want, (unsigned long long)hidden, (unsigned long long)unseen);
			return -1;
		}
	}
	return 0;
}
#endif
