/* bench/sim/engine.c — see engine.h.
 *
 * Recency order gives leaf-first eviction for free: a request unpins its path from the deepest block up, so
 * in the list a block always stands behind every block below it. */
#include "bench/sim/engine.h"
#include <stdlib.h>
#include <string.h>

#define NONE UINT32_MAX

struct node {
	uint64_t key;
	uint32_t pin_cnt;
	uint32_t prev, next; /* recency list while unpinned; next also links the free list */
};

struct req_list {
	struct kvp_sim_req *first, *last;
	uint32_t cnt;
};

struct kvp_sim_engine {
	struct kvp_sim_cfg cfg;
	struct kvp_sim_sink sink;
	struct node *node;
	uint32_t *table; /* key -> node index, open addressing */
	uint32_t table_mask;
	uint32_t free_head;
	uint32_t lru_first, lru_last; /* unpinned nodes, least recent first */
	uint32_t cached_blk, unpinned_blk, private_blk;
	uint64_t *gone; /* keys evicted by the admission under way */
	struct req_list waiting, running;
	uint64_t now_ns;      /* no earlier instant matters any more */
	uint64_t step_end_ns; /* end of the step under way; KVP_SIM_NEVER between steps */
	uint64_t step_cnt, prefill_tok, evicted_blk;
};

void kvp_sim_cfg_default(struct kvp_sim_cfg *cfg)
{
	*cfg = (struct kvp_sim_cfg){.block_size_tok = 512,
		.block_max = 2000,
		.chunk_tok = 8192,
		.step_ns = 10000000,
		.rate_tok_s = 16000,
		.decode_ns = 100000,
		.kv_tok_ns = 30};
}

struct kvp_sim_engine *kvp_sim_open(const struct kvp_sim_cfg *cfg, const struct kvp_sim_sink *sink)
{
	if (!cfg->block_size_tok || !cfg->block_max || cfg->block_max > 1u << 28 || !cfg->chunk_tok ||
		!cfg->rate_tok_s)
		return NULL;
	struct kvp_sim_engine *e = calloc(1, sizeof(*e));
	if (!e)
		return NULL;
	uint32_t size = 64;
	while (size < 2 * cfg->block_max)
		size *= 2;
	e->cfg = *cfg;
	e->sink = *sink;
	e->node = calloc(cfg->block_max, sizeof(*e->node));
	e->gone = calloc(cfg->block_max, sizeof(*e->gone));
	e->table = malloc(size * sizeof(*e->table));
	if (!e->node || !e->gone || !e->table) {
		kvp_sim_close(e);
		return NULL;
	}
	memset(e->table, 0xff, size * sizeof(*e->table));
	e->table_mask = size - 1;
	for (uint32_t i = 0; i < cfg->block_max; i++)
		e->node[i].next = i + 1 < cfg->block_max ? i + 1 : NONE;
	e->lru_first = e->lru_last = NONE;
	e->step_end_ns = KVP_SIM_NEVER;
	return e;
}

static uint32_t min_u32(uint32_t a, uint32_t b)
{
	return a < b ? a : b;
}

static void req_free(struct kvp_sim_req *r)
{
	free(r->key);
	free(r->node);
	free(r);
}

static void list_add(struct req_list *l, struct kvp_sim_req *r)
{
	r->next = NULL;
	r->prev = l->last;
	if (l->last)
		l->last->next = r;
	else
		l->first = r;
	l->last = r;
	l->cnt++;
}

static void list_del(struct req_list *l, struct kvp_sim_req *r)
{
	if (r->prev)
		r->prev->next = r->next;
	else
		l->first = r->next;
	if (r->next)
		r->next->prev = r->prev;
	else
		l->last = r->prev;
	l->cnt--;
}

void kvp_sim_close(struct kvp_sim_engine *e)
{
	if (!e)
		return;
	struct req_list *lists[2] = {&e->waiting, &e->running};
	for (int i = 0; i < 2; i++) {
		while (lists[i]->first) {
			struct kvp_sim_req *r = lists[i]->first;
			list_del(lists[i], r);
			req_free(r);
		}
	}
	free(e->node);
	free(e->gone);
	free(e->table);
	free(e);
}

/* ---- the cache ---- */

static uint32_t table_home(const struct kvp_sim_engine *e, uint64_t key)
{
	return (uint32_t)((key * 0x9e3779b97f4a7c15ull) >> 32) & e->table_mask;
}

static uint32_t cache_find(const struct kvp_sim_engine *e, uint64_t key)
{
	for (uint32_t at = table_home(e, key); e->table[at] != NONE; at = (at + 1) & e->table_mask)
		if (e->node[e->table[at]].key == key)
			return e->table[at];
	return NONE;
}

static void table_del(struct kvp_sim_engine *e, uint64_t key)
{
	uint32_t at = table_home(e, key), mask = e->table_mask;
	while (e->node[e->table[at]].key != key)
		at = (at + 1) & mask;
	/* Close the hole: an entry moves up unless its home lies between the hole and its place. */
	for (uint32_t to = at;;) {
		at = (at + 1) & mask;
		if (e->table[at] == NONE) {
			e->table[to] = NONE;
			return;
		}
		uint32_t home = table_home(e, e->node[e->table[at]].key);
		if (((at - home) & mask) >= ((at - to) & mask)) {
			e->table[to] = e->table[at];
			to = at;
		}
	}
}

static void lru_del(struct kvp_sim_engine *e, uint32_t i)
{
	struct node *n = &e->node[i];
	if (n->prev != NONE)
		e->node[n->prev].next = n->next;
	else
		e->lru_first = n->next;
	if (n->next != NONE)
		e->node[n->next].prev = n->prev;
	else
		e->lru_last = n->prev;
	e->unpinned_blk--;
}

static void cache_pin(struct kvp_sim_engine *e, uint32_t i)
{
	if (!e->node[i].pin_cnt++)
		lru_del(e, i);
}

static void cache_unpin(struct kvp_sim_engine *e, uint32_t i)
{
	struct node *n = &e->node[i];
	if (--n->pin_cnt)
		return;
	n->next = NONE;
	n->prev = e->lru_last;
	if (e->lru_last != NONE)
		e->node[e->lru_last].next = i;
	else
		e->lru_first = i;
	e->lru_last = i;
	e->unpinned_blk++;
}

/* cache_add makes a pinned node; there is room, because its block was reserved. */
static uint32_t cache_add(struct kvp_sim_engine *e, uint64_t key)
{
	uint32_t i = e->free_head;
	KVP_ASSERT(i != NONE);
	e->free_head = e->node[i].next;
	e->node[i] = (struct node){.key = key, .pin_cnt = 1, .prev = NONE, .next = NONE};
	uint32_t at = table_home(e, key);
	while (e->table[at] != NONE)
		at = (at + 1) & e->table_mask;
	e->table[at] = i;
	e->cached_blk++;
	return i;
}

/* cache_drop forgets the least recent block and returns its key. */
static uint64_t cache_drop(struct kvp_sim_engine *e)
{
	uint32_t i = e->lru_first;
	table_del(e, e->node[i].key);
	lru_del(e, i);
	e->node[i].next = e->free_head;
	e->free_head = i;
	e->cached_blk--;
	return e->node[i].key;
}

static void cache_evict(struct kvp_sim_engine *e, uint32_t cnt)
{
	for (uint32_t done = 0; done < cnt; done++)
		e->gone[done] = cache_drop(e);
	e->evicted_blk += cnt;
	if (cnt && e->sink.removed)
		e->sink.removed(e->sink.ctx, e->gone, cnt, e->now_ns);
}

int kvp_sim_clear(struct kvp_sim_engine *e)
{
	if (e->running.cnt)
		return KVP_ERR_AGAIN;
	while (e->lru_first != NONE)
		cache_drop(e);
	return KVP_OK;
}

uint32_t kvp_sim_match(const struct kvp_sim_engine *e, const uint64_t *key, uint32_t key_cnt)
{
	uint32_t n = 0;
	while (n < key_cnt && cache_find(e, key[n]) != NONE)
		n++;
	return n;
}

/* ---- requests ---- */

static uint32_t req_blocks(const struct kvp_sim_engine *e, uint64_t prompt_tok, uint64_t out_tok)
{
	uint64_t n = (prompt_tok + out_tok + e->cfg.block_size_tok - 1) / e->cfg.block_size_tok;
	return n > e->cfg.block_max ? NONE : (uint32_t)n;
}

int kvp_sim_submit(struct kvp_sim_engine *e, uint64_t now_ns, const uint64_t *key, uint32_t key_cnt,
	uint32_t prompt_tok, uint32_t out_tok, void *user, struct kvp_sim_req **out)
{
	if (!prompt_tok || key_cnt != prompt_tok / e->cfg.block_size_tok || now_ns < e->now_ns)
		return KVP_ERR_INVAL;
	if (!out_tok)
		out_tok = 1;
	if (req_blocks(e, prompt_tok, out_tok) == NONE)
		return KVP_ERR_LIMIT;
	struct kvp_sim_req *r = calloc(1, sizeof(*r));
	if (!r)
		return KVP_ERR_SYS;
	r->key = malloc((key_cnt + 1) * sizeof(*r->key));
	r->node = malloc((key_cnt + 1) * sizeof(*r->node));
	if (!r->key || !r->node) {
		req_free(r);
		return KVP_ERR_SYS;
	}
	if (key_cnt)
		memcpy(r->key, key, key_cnt * sizeof(*r->key));
	r->key_cnt = key_cnt;
	r->prompt_tok = prompt_tok;
	r->out_max_tok = out_tok;
	r->arrival_ns = now_ns;
	r->user = user;
	if (e->step_end_ns == KVP_SIM_NEVER)
		e->now_ns = now_ns; /* idle until now: the next step starts here */
	list_add(&e->waiting, r);
	*out = r;
	return KVP_OK;
}

static void req_release(struct kvp_sim_engine *e, struct kvp_sim_req *r)
{
	for (uint32_t i = r->pinned_cnt; i-- > 0;)
		cache_unpin(e, r->node[i]);
	e->private_blk -= r->private_blk;
	list_del(&e->running, r);
}

static int req_is_waiting(const struct kvp_sim_engine *e, const struct kvp_sim_req *r)
{
	const struct kvp_sim_req *w = e->waiting.first;
	while (w && w != r)
		w = w->next;
	return w != NULL;
}

void kvp_sim_abort(struct kvp_sim_engine *e, struct kvp_sim_req *r)
{
	if (req_is_waiting(e, r))
		list_del(&e->waiting, r);
	else
		req_release(e, r);
	req_free(r);
}

/* req_admit pins the hit, evicts what the rest needs and reserves it: KVP_ERR_FULL when it doesn't fit now.
 * */
static int req_admit(struct kvp_sim_engine *e, struct kvp_sim_req *r)
{
	/* At least one prompt token is computed, so a fully cached prompt gives its last block back. */
	uint32_t hit_max = (r->prompt_tok - 1) / e->cfg.block_size_tok;
	uint32_t hit = kvp_sim_match(e, r->key, hit_max < r->key_cnt ? hit_max : r->key_cnt);
	uint32_t need = req_blocks(e, r->prompt_tok, r->out_max_tok) - hit;
	uint32_t room = e->cfg.block_max - e->cached_blk - e->private_blk, evictable = e->unpinned_blk;
	for (uint32_t i = 0; i < hit; i++) {
		r->node[i] = cache_find(e, r->key[i]);
		evictable -= !e->node[r->node[i]].pin_cnt;
	}
	if (need > room + evictable)
		return KVP_ERR_FULL;
	for (uint32_t i = 0; i < hit; i++)
		cache_pin(e, r->node[i]);
	if (need > room)
		cache_evict(e, need - room);
	e->private_blk += need;
	r->private_blk = need;
	r->pinned_cnt = hit;
	r->cached_tok = r->computed_tok = hit * e->cfg.block_size_tok;
	uint32_t remote_tok = min_u32(r->remote_tok, r->prompt_tok - 1);
	r->computed_tok = remote_tok > r->computed_tok ? remote_tok : r->computed_tok;
	list_del(&e->waiting, r);
	list_add(&e->running, r);
	return KVP_OK;
}

/* req_publish moves the prompt blocks computed so far from private into the cache. A block that another
 * request has computed meanwhile is shared, and this one's copy is given back. */
static void req_publish(struct kvp_sim_engine *e, struct kvp_sim_req *r)
{
	uint32_t upto = r->computed_tok / e->cfg.block_size_tok, first = r->pinned_cnt;
	for (uint32_t i = first; i < upto; i++) {
		uint32_t n = cache_find(e, r->key[i]);
		r->private_blk--;
		e->private_blk--;
		r->pinned_cnt++;
		if (n == NONE) {
			r->node[i] = cache_add(e, r->key[i]);
			continue;
		}
		cache_pin(e, n);
		r->node[i] = n;
		if (i > first && e->sink.stored)
			e->sink.stored(e->sink.ctx, r, first, i - first, e->now_ns);
		first = i + 1;
	}
	if (upto > first && e->sink.stored)
		e->sink.stored(e->sink.ctx, r, first, upto - first, e->now_ns);
}

/* ---- steps ---- */

/* step_begin composes the batch at now_ns. Nothing to do leaves the engine idle. */
static void step_begin(struct kvp_sim_engine *e)
{
	uint32_t chunk_tok = e->cfg.chunk_tok, decode_cnt = 0;
	uint64_t batch_tok = 0, live_tok = 0;
	for (struct kvp_sim_req *r = e->running.first; r; r = r->next) {
		live_tok += r->computed_tok + r->out_tok;
		if (r->computed_tok == r->prompt_tok) {
			r->sched_tok = 1;
			decode_cnt++;
		} else {
			r->sched_tok = min_u32(r->prompt_tok - r->computed_tok, chunk_tok);
			chunk_tok -= r->sched_tok;
		}
		batch_tok += r->sched_tok;
	}
	while (e->waiting.first && chunk_tok &&
		(!e->cfg.running_max || e->running.cnt < e->cfg.running_max)) {
		struct kvp_sim_req *r = e->waiting.first;
		if (req_admit(e, r))
			break;
		r->sched_tok = min_u32(r->prompt_tok - r->computed_tok, chunk_tok);
		chunk_tok -= r->sched_tok;
		batch_tok += r->sched_tok;
		live_tok += r->computed_tok;
	}
	if (!e->running.cnt)
		return;
	e->step_end_ns = e->now_ns + e->cfg.step_ns + batch_tok * 1000000000ull / e->cfg.rate_tok_s +
			 decode_cnt * e->cfg.decode_ns + live_tok * e->cfg.kv_tok_ns;
	e->step_cnt++;
}

static void step_end(struct kvp_sim_engine *e)
{
	e->now_ns = e->step_end_ns;
	e->step_end_ns = KVP_SIM_NEVER;
	for (struct kvp_sim_req *r = e->running.first, *next; r; r = next) {
		next = r->next;
		if (!r->sched_tok)
			continue;
		if (r->computed_tok < r->prompt_tok) {
			r->computed_tok += r->sched_tok;
			e->prefill_tok += r->sched_tok;
			req_publish(e, r);
			if (r->computed_tok < r->prompt_tok)
				continue;
			r->first_ns = e->now_ns;
		}
		r->out_tok++;
		if (e->sink.token)
			e->sink.token(e->sink.ctx, r, e->now_ns);
		if (r->out_tok < r->out_max_tok)
			continue;
		r->finish_ns = e->now_ns;
		req_release(e, r);
		if (e->sink.finished)
			e->sink.finished(e->sink.ctx, r, e->now_ns);
		req_free(r);
	}
}

void kvp_sim_advance(struct kvp_sim_engine *e, uint64_t until_ns)
{
	for (;;) {
		if (e->step_end_ns != KVP_SIM_NEVER) {
			if (e->step_end_ns > until_ns)
				return;
			step_end(e);
		}
		if (e->now_ns >= until_ns)
			return;
		step_begin(e);
		if (e->step_end_ns == KVP_SIM_NEVER)
			break;
	}
	e->now_ns = until_ns;
}

uint64_t kvp_sim_next_ns(struct kvp_sim_engine *e)
{
	if (e->step_end_ns == KVP_SIM_NEVER)
		step_begin(e);
	return e->step_end_ns;
}

void kvp_sim_load(const struct kvp_sim_engine *e, struct kvp_sim_load *out)
{
	*out = (struct kvp_sim_load){.waiting_cnt = e->waiting.cnt,
		.running_cnt = e->running.cnt,
		.cached_blk = e->cached_blk,
		.pinned_blk = e->cached_blk - e->unpinned_blk,
		.private_blk = e->private_blk,
		.step_cnt = e->step_cnt,
		.prefill_tok = e->prefill_tok,
		.evicted_blk = e->evicted_blk};
}

uint32_t kvp_sim_check(const struct kvp_sim_engine *e)
{
	uint32_t faults = 0, unpinned = 0, used = 0, free_cnt = 0;
	uint64_t private_blk = 0, pins = 0, node_pins = 0;
	for (const struct kvp_sim_req *r = e->running.first; r; r = r->next) {
		private_blk += r->private_blk;
		pins += r->pinned_cnt;
		for (uint32_t i = 0; i < r->pinned_cnt; i++)
			faults += e->node[r->node[i]].key != r->key[i] || !e->node[r->node[i]].pin_cnt;
		faults += r->pinned_cnt + r->private_blk != req_blocks(e, r->prompt_tok, r->out_max_tok);
	}
	for (uint32_t i = e->lru_first; i != NONE && unpinned <= e->cfg.block_max; i = e->node[i].next) {
		faults += e->node[i].pin_cnt != 0;
		unpinned++;
	}
	for (uint32_t at = 0; at <= e->table_mask; at++) {
		uint32_t i = e->table[at];
		if (i == NONE)
			continue;
		used++;
		node_pins += e->node[i].pin_cnt;
		faults += cache_find(e, e->node[i].key) != i;
	}
	for (uint32_t i = e->free_head; i != NONE && free_cnt <= e->cfg.block_max; i = e->node[i].next)
		free_cnt++;
	faults += unpinned != e->unpinned_blk;
	faults += used != e->cached_blk;
	faults += used + free_cnt != e->cfg.block_max;
	faults += private_blk != e->private_blk;
	faults += pins != node_pins;
	faults += e->cached_blk + e->private_blk > e->cfg.block_max;
	return faults;
}
