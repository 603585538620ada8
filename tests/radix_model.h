/* tests/radix_model.h — a naive prefix tree, one node a block, written from the rules and not from the
 * code: a rank owns a node as long as one of its hashes names it. Shared by the model, crash and life-cycle
 * tests. */
#ifndef KVP_RADIX_MODEL_H
#define KVP_RADIX_MODEL_H

#include "shm/radix.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define MODEL_NODES 60000
#define MODEL_SLOTS 12
#define MODEL_NAMES 16384
#define MODEL_BATCH 1400
#define MODEL_PARTS 2

/* ---- random numbers: one stream an operation, so that operations can be left out when shrinking ---- */
struct rng {
	uint64_t s;
};
static inline uint64_t rnd(struct rng *r)
{
	uint64_t x = (r->s += 0x9e3779b97f4a7c15ULL);
	x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
	x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
	return x ^ (x >> 31);
}
static inline uint32_t rnd_below(struct rng *r, uint32_t n)
{
	return (uint32_t)(rnd(r) % n);
}

/* ---- memory of both segments ---- */
struct seg {
	void *pub, *priv;
	uint64_t pub_bytes, priv_bytes;
};
static inline void *seg_map(uint64_t bytes)
{
	int fd = memfd_create("t", 0);
	if (fd < 0 || ftruncate(fd, (off_t)bytes))
		return NULL;
	void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
	close(fd);
	return p == MAP_FAILED ? NULL : p;
}
static inline int seg_new(struct seg *s, const struct kvp_geom *g)
{
	s->pub_bytes = kvp_radix_footprint(g);
	s->priv_bytes = kvp_radix_priv_footprint(g);
	s->pub = seg_map(s->pub_bytes);
	s->priv = seg_map(s->priv_bytes);
	if (!s->pub || !s->priv)
		return KVP_ERR_SYS;
	int rc = kvp_radix_new(s->pub, g);
	return rc ? rc : kvp_radix_priv_new(s->priv, g);
}
static inline void seg_free(struct seg *s)
{
	munmap(s->pub, s->pub_bytes);
	munmap(s->priv, s->priv_bytes);
	s->pub = s->priv = NULL;
}
/* seg_fresh: an empty tree, a reader and the writer, in place of what may be there. Exits on failure. */
static inline void seg_fresh(
	struct seg *s, const struct kvp_geom *g, struct kvp_radix *r, struct kvp_radix_w **w)
{
	kvp_radix_w_close(*w);
	*w = NULL;
	if (s->pub)
		seg_free(s);
	if (seg_new(s, g) || kvp_radix_join(s->pub, g, r) ||
		kvp_radix_w_open(s->pub, s->priv, g, KVP_RADIX_RECOVER, NULL, w, NULL)) {
		printf("Bail out! no tree\n");
		exit(1);
	}
}
/* A tree with its reader and its writer. tree_reopen: the next writer takes over; -1 if it had to mend. */
struct tree {
	struct kvp_geom g;
	struct seg seg;
	struct kvp_radix r;
	struct kvp_radix_w *w;
};
static inline struct tree tree_open(uint32_t slots)
{
	struct tree t = {.g = {.slot_max = 8,
				 .rank_max = 64,
				 .index_rank_max = slots,
				 .block_max = 200000,
				 .region_gen = 7,
				 .salt = {11, 22}}};
	seg_fresh(&t.seg, &t.g, &t.r, &t.w);
	return t;
}
static inline int tree_reopen(struct tree *t)
{
	struct kvp_radix_report rep;
	kvp_radix_w_close(t->w);
	t->w = NULL;
	int rc = kvp_radix_w_open(t->seg.pub, t->seg.priv, &t->g, KVP_RADIX_RECOVER, NULL, &t->w, &rep);
	if (!rc && !rep.runs_dropped && !rep.headers_redone && !rep.ops_repeated && !rep.names_dropped)
		return 0;
	printf("# reopen: rc %d, dropped %llu, names %llu\n", rc, (unsigned long long)rep.runs_dropped,
		(unsigned long long)rep.names_dropped);
	return -1;
}
static inline void tree_close(struct tree *t)
{
	kvp_radix_w_close(t->w);
	seg_free(&t->seg);
}

/* ---- model ---- */
struct model_node {
	uint32_t parent, child, sibling;
	uint64_t local, path; /* path: hash of the locals down to here, equal in all partitions */
};
struct model_name {
	uint64_t ext;
	uint32_t node;
};
struct model {
	uint32_t node_cnt; /* nodes 0..MODEL_PARTS-1 are the roots */
	struct model_node node[MODEL_NODES];
	uint8_t own[MODEL_SLOTS][MODEL_NODES]; /* number of names */
	uint32_t name_cnt[MODEL_SLOTS];
	struct model_name name[MODEL_SLOTS][MODEL_NAMES];
	uint32_t slot_idx[MODEL_SLOTS]; /* index slot in the tree */
	uint32_t slot_cnt;
};
static inline uint32_t model_part(uint32_t s)
{
	return s % MODEL_PARTS;
}
static inline uint64_t model_salt(uint32_t part)
{
	return 0x1234567 + 99991ULL * part;
}
static inline void model_init(struct model *m, uint32_t slot_max, uint32_t slot_cnt)
{
	memset(m, 0, sizeof(*m));
	m->node_cnt = MODEL_PARTS;
	for (uint32_t i = 0; i < MODEL_PARTS; i++)
		m->node[i].path = 0x77;
	m->slot_cnt = slot_cnt;
	for (uint32_t i = 0; i < slot_cnt; i++) /* spread over the words, first and last slot included */
		m->slot_idx[i] = (uint32_t)((uint64_t)i * (slot_max - 1) / (slot_cnt - 1));
}
static inline uint32_t model_child(struct model *m, uint32_t n, uint64_t local, int make)
{
	for (uint32_t c = m->node[n].child; c; c = m->node[c].sibling)
		if (m->node[c].local == local)
			return c;
	if (!make || m->node_cnt == MODEL_NODES)
		return 0;
	uint32_t c = m->node_cnt++;
	struct rng r = {m->node[n].path ^ (local * 0x2545f4914f6cdd1dULL)};
	m->node[c] = (struct model_node){n, 0, m->node[n].child, local, rnd(&r)};
	m->node[n].child = c;
	return c;
}
static inline struct model_name *model_find(struct model *m, uint32_t s, uint64_t ext)
{
	for (uint32_t i = 0; i < m->name_cnt[s]; i++)
		if (m->name[s][i].ext == ext)
			return &m->name[s][i];
	return NULL;
}
static inline int model_unname(struct model *m, uint32_t s, uint64_t ext)
{
	struct model_name *x = model_find(m, s, ext);
	if (!x)
		return 0;
	m->own[s][x->node]--;
	*x = m->name[s][--m->name_cnt[s]];
	return 1;
}
static inline int model_store(struct model *m, uint32_t s, int child, uint64_t parent, uint32_t n,
	const uint64_t *local, const uint64_t *ext)
{
	uint32_t at = model_part(s);
	for (uint32_t i = 0; i < n; i++) {
		if (child && ext[i] == parent)
			return KVP_ERR_INVAL;
		for (uint32_t j = 0; j < i; j++)
			if (ext[i] == ext[j])
				return KVP_ERR_INVAL;
	}
	if (child) {
		struct model_name *p = model_find(m, s, parent);
		if (!p)
			return KVP_ERR_NOTFOUND;
		at = p->node;
	}
	for (uint32_t i = 0; i < n; i++) {
		at = model_child(m, at, local[i], 1);
		struct model_name *x = model_find(m, s, ext[i]);
		if (x && x->node == at)
			continue;
		if (x)
			model_unname(m, s, ext[i]);
		m->name[s][m->name_cnt[s]++] = (struct model_name){ext[i], at};
		m->own[s][at]++;
	}
	return KVP_OK;
}
static inline void model_clear(struct model *m, uint32_t s)
{
	m->name_cnt[s] = 0;
	memset(m->own[s], 0, sizeof(m->own[s]));
}

/* ---- one random operation ---- */
enum model_op { MODEL_STORE, MODEL_REMOVE, MODEL_CLEAR };
struct op {
	enum model_op kind;
	uint32_t s, n;
	int child;
	uint64_t parent;
	uint64_t local[MODEL_BATCH], ext[MODEL_BATCH];
};

/* Engines come in three families with different external hashes for equal content. */
static inline uint64_t model_ext(const struct model *m, uint32_t s, uint32_t node)
{
	struct rng r = {m->node[node].path ^ (0x51ULL * (s % 3))};
	return rnd(&r);
}

static inline uint64_t any_ext(struct model *m, struct rng *r, uint32_t s)
{
	return m->name_cnt[s] ? m->name[s][rnd_below(r, m->name_cnt[s])].ext : rnd(r);
}

static inline void gen_store(struct model *m, struct rng *r, struct op *o)
{
	uint32_t at = model_part(o->s), kind = rnd_below(r, 20), odd = rnd_below(r, 8);
	o->n = kind == 0   ? 1 + rnd_below(r, MODEL_BATCH)
	       : kind < 10 ? 1 + rnd_below(r, 4)
			   : 1 + rnd_below(r, 40);
	o->child = m->name_cnt[o->s] && rnd_below(r, 3);
	if (o->child) {
		struct model_name *x = &m->name[o->s][rnd_below(r, m->name_cnt[o->s])];
		if (rnd_below(r, 2)) /* go on at a recent end */
			x = &m->name[o->s][m->name_cnt[o->s] - 1];
		o->parent = x->ext;
		at = x->node;
		if (rnd_below(r, 30) == 0)
			o->parent = rnd(r);
	}
	for (uint32_t i = 0; i < o->n; i++) {
		uint32_t c = m->node[at].child;
		while (c && rnd_below(r, 4) == 0)
			c = m->node[c].sibling;
		o->local[i] = c && rnd_below(r, 60) ? m->node[c].local : 1 + rnd_below(r, 5);
		at = model_child(m, at, o->local[i], 1);
		o->ext[i] = model_ext(m, o->s, at);
		if (odd == 0 && rnd_below(r, 12) == 0)
			o->ext[i] = any_ext(m, r, rnd_below(r, 2) ? o->s : rnd_below(r, m->slot_cnt));
		if (odd == 1 && rnd_below(r, 6) == 0)
			o->ext[i] = rnd(r); /* a second name for the same block, perhaps */
	}
	if (rnd_below(r, 60) == 0 && o->n > 1)
		o->ext[o->n - 1] = o->ext[0];
}

static inline void gen_remove(struct model *m, struct rng *r, struct op *o)
{
	uint32_t cnt = m->name_cnt[o->s], kind = rnd_below(r, 4);
	o->n = 1 + rnd_below(r, rnd_below(r, 4) ? 8 : 300);
	if (!cnt)
		o->n = 1;
	struct model_name *x = cnt ? &m->name[o->s][rnd_below(r, cnt)] : NULL;
	uint32_t node = x ? x->node : 0;
	for (uint32_t i = 0; i < o->n; i++) {
		o->ext[i] = any_ext(m, r, o->s);
		if (kind && node) { /* from a block upwards, as engines evict */
			o->ext[i] = model_ext(m, o->s, node);
			node = m->node[node].parent;
		}
	}
	if (kind == 2) /* or downwards */
		for (uint32_t i = 0; i < o->n / 2; i++) {
			uint64_t t = o->ext[i];
			o->ext[i] = o->ext[o->n - 1 - i];
			o->ext[o->n - 1 - i] = t;
		}
}

static inline void op_gen(struct model *m, uint64_t seed, struct op *o)
{
	struct rng r = {seed};
	uint32_t k = rnd_below(&r, 100);
	o->s = rnd_below(&r, m->slot_cnt);
	o->kind = m->node_cnt > MODEL_NODES - 2 * MODEL_BATCH || m->name_cnt[o->s] > MODEL_NAMES - MODEL_BATCH
			  ? MODEL_CLEAR
		  : k < 60 ? MODEL_STORE
		  : k < 99 ? MODEL_REMOVE
			   : MODEL_CLEAR;
	if (o->kind == MODEL_STORE)
		gen_store(m, &r, o);
	else if (o->kind == MODEL_REMOVE)
		gen_remove(m, &r, o);
}

/* Runs the operation on the model; the result and the number of unknown hashes. */
static inline int op_model(struct model *m, const struct op *o, uint32_t *unknown)
{
	*unknown = 0;
	if (o->kind == MODEL_STORE)
		return model_store(m, o->s, o->child, o->parent, o->n, o->local, o->ext);
	if (o->kind == MODEL_CLEAR)
		model_clear(m, o->s);
	else
		for (uint32_t i = 0; i < o->n; i++)
			*unknown += !model_unname(m, o->s, o->ext[i]);
	return KVP_OK;
}
static inline int op_tree(struct kvp_radix_w *w, const struct model *m, const struct op *o, uint32_t *unknown)
{
	uint32_t slot = m->slot_idx[o->s];
	*unknown = 0;
	if (o->kind == MODEL_STORE)
		return kvp_radix_store(w, slot, model_salt(model_part(o->s)),
			o->child ? KVP_RADIX_CHILD : KVP_RADIX_ROOT, o->parent, o->n, o->local, o->ext, NULL);
	if (o->kind == MODEL_CLEAR)
		return kvp_radix_clear(w, slot);
	return kvp_radix_remove(w, slot, o->n, o->ext, unknown);
}

/* ---- comparison ---- */

/* A random path: down from a root, mostly along nodes that exist. Result 0 if the lookup agrees. */
static inline int compare_query(
	const struct kvp_radix *r, struct model *m, uint64_t seed, struct kvp_radix_match *out)
{
	static uint64_t local[6000];
	static uint32_t path[6000];
	struct rng g = {seed};
	uint32_t part = rnd_below(&g, MODEL_PARTS), n = 0, at = part;
	if (rnd_below(&g, 3) && m->node_cnt > MODEL_PARTS) { /* the path to a node, and on */
		uint32_t x = MODEL_PARTS + rnd_below(&g, m->node_cnt - MODEL_PARTS), d = 0;
		for (uint32_t y = x; y >= MODEL_PARTS; y = m->node[y].parent)
			d++;
		if (d > 4000)
			return 0;
		for (n = d; x >= MODEL_PARTS; x = m->node[x].parent) {
			local[--d] = m->node[x].local;
			path[d] = x;
			part = m->node[x].parent;
		}
		at = path[n - 1];
	}
	uint32_t known = n;
	for (uint32_t c; n < 6000 && (c = m->node[at].child) != 0 && rnd_below(&g, 200); at = c) {
		while (m->node[c].sibling && rnd_below(&g, 3) == 0)
			c = m->node[c].sibling;
		path[n] = c;
		local[n++] = m->node[c].local;
		known = n;
	}
	if (n < 6000 && rnd_below(&g, 2))
		local[n++] = rnd_below(&g, 2) ? 1 + rnd_below(&g, 5) : rnd(&g);
	if (n > known && model_child(m, known ? path[known - 1] : part, local[known], 0)) {
		path[known] = model_child(m, known ? path[known - 1] : part, local[known], 0);
		known++;
	}
	struct kvp_radix_query q = {model_salt(part), local, n, n, NULL, NULL};
	if (kvp_radix_find(r, &q, out))
		return -1;
	uint32_t longest = 0, active = 0;
	for (uint32_t s = 0; s < m->slot_cnt; s++) {
		uint32_t d = 0, idx = m->slot_idx[s];
		while (model_part(s) == part && d < known && m->own[s][path[d]])
			d++;
		uint32_t on = out->active[idx >> 6] >> (idx & 63) & 1;
		if (on != (d != 0) || (on && out->depth[idx] != d)) {
			printf("# query of %u blocks: slot %u has %u, want %u\n", n, idx,
				on ? out->depth[idx] : 0, d);
			return -1;
		}
		longest = d > longest ? d : longest;
		active += on;
	}
	for (uint32_t i = 0; i < out->word_cnt; i++)
		active -= (uint32_t)__builtin_popcountll(out->active[i]);
	if (active || out->longest != longest || out->retries)
		printf("# query: foreign slots %d, longest %u want %u, retries %u\n", -(int)active,
			out->longest, longest, out->retries);
	return active || out->longest != longest || out->retries ? -1 : 0;
}

/* Replays a dump into what a receiver would hold. */
struct receiver {
	struct model *m;
	uint32_t s, cnt, bad;
	uint8_t *seen; /* names of the slot that arrived */
};
static inline int receive(void *ctx, const struct kvp_radix_dump_event *ev)
{
	struct receiver *x = ctx;
	struct model *m = x->m;
	uint32_t s = 0;
	while (s < m->slot_cnt && m->slot_idx[s] != ev->slot)
		s++;
	if (s != x->s || ev->part_salt != model_salt(model_part(s))) {
		x->bad++;
		return 0;
	}
	uint32_t at = model_part(s);
	if (ev->how == KVP_RADIX_CHILD) {
		struct model_name *p = model_find(m, s, ev->parent_ext);
		if (!p || !x->seen[p - m->name[s]]) {
			x->bad++;
			return 0;
		}
		at = p->node;
	}
	for (uint32_t i = 0; i < ev->n; i++) {
		at = model_child(m, at, ev->local[i], 0);
		struct model_name *p = at ? model_find(m, s, ev->ext[i]) : NULL;
		if (!p || p->node != at || x->seen[p - m->name[s]]) {
			x->bad++;
			return 0;
		}
		x->seen[p - m->name[s]] = 1;
		x->cnt++;
	}
	return 0;
}

/* Nodes that a slot holds with all their ancestors. A parent has a smaller number than its children. */
static inline void reachable(const struct model *m, uint32_t s, uint8_t *reach)
{
	for (uint32_t i = 0; i < m->node_cnt; i++)
		reach[i] = i < MODEL_PARTS || (m->own[s][i] && reach[m->node[i].parent]);
}

static inline int compare_dump(struct kvp_radix_w *w, struct model *m)
{
	static uint8_t seen[MODEL_NAMES], reach[MODEL_NODES];
	for (uint32_t s = 0; s < m->slot_cnt; s++) {
		struct receiver x = {m, s, 0, 0, seen};
		uint64_t hidden = 0;
		memset(seen, 0, sizeof(seen));
		reachable(m, s, reach);
		int rc = kvp_radix_w_dump(w, m->slot_idx[s], receive, &x, &hidden);
		uint32_t want = 0, held = 0, unseen = 0;
		for (uint32_t i = 0; i < m->name_cnt[s]; i++)
			want += reach[m->name[s][i].node];
		for (uint32_t i = MODEL_PARTS; i < m->node_cnt; i++) {
			held += m->own[s][i] != 0;
			unseen += m->own[s][i] && !reach[i];
		}
		if (rc || x.bad || x.cnt != want || hidden != unseen ||
			kvp_radix_w_blocks(w, m->slot_idx[s]) != held) {
			printf("# dump of slot %u: bad %u, names %u want %u, hidden %llu want %u, held %llu "
			       "want %u\n",
				m->slot_idx[s], x.bad, x.cnt, want, (unsigned long long)hidden, unseen,
				(unsigned long long)kvp_radix_w_blocks(w, m->slot_idx[s]), held);
			return -1;
		}
	}
	return 0;
}
#endif
