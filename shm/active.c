#include "shm/book_priv.h"

#define LINE 4u
/* lo of a gate: tag 40 | slot of the inserter 8 | nonce 16, never 0; hi: count 20 | length - 1 3 | weight 41.
 * A count of 0 marks an entry whose hashes are being written. Hashes belong to one lo and never change. */
#define TAG_SHIFT 24
#define GATE_SLOT(lo) ((uint32_t)((lo) >> 16) & 0xffu)
#define CNT_SHIFT BOOK_GATE_CNT_SHIFT
#define LEN_SHIFT 41
#define CNT_MAX ((1u << 20) - 1)
#define CNT(hi) BOOK_GATE_CNT(hi)
#define LEN(hi) (((uint32_t)((hi) >> LEN_SHIFT) & (RUN - 1)) + 1)
#define WEIGHT(hi) ((hi) & ((1ULL << LEN_SHIFT) - 1))
#define HI(cnt, len, w) ((uint64_t)(cnt) << CNT_SHIFT | (uint64_t)((len)-1) << LEN_SHIFT | (w))
#define RUN KVP_ACTIVE_RUN
#define AHEAD 32u /* most groups between the first touch of a table line and its use: covers memory latency */
#define MISS_MAX 64
#define ABSENT UINT32_MAX

static uint64_t fold(uint64_t a, uint64_t b)
{
	unsigned __int128 p = (unsigned __int128)a * b;
	return (uint64_t)p ^ (uint64_t)(p >> 64);
}

struct book_dom book_dom(const struct kvp_book *b, uint32_t rank, uint32_t epoch)
{
	struct book_dom d;
	uint64_t x = (uint64_t)rank << 20 | epoch;
	d.a = fold(x ^ b->salt[0], b->salt[1] | 1) ^ b->salt[1];
	d.m = fold(x + 0x9e3779b97f4a7c15ULL, b->salt[0] | 1) | 1;
	return d;
}

uint64_t book_key(struct book_dom dom, uint64_t seq)
{
	uint64_t k = fold(fold(seq ^ dom.a, 0x9fb21c651e98df25ULL) ^ dom.m, dom.m ^ 0xd6e8feb86659fd93ULL);
	return k ? k : 1;
}

/* ---- places ---- */

static struct kvp_u128 *gate(const struct kvp_book *b, uint32_t at)
{
	return &b->act[at / LINE].gate[at % LINE];
}

static uint64_t *hashes(const struct kvp_book *b, uint32_t at)
{
	return b->act[at / LINE].hash[at % LINE];
}

static uint32_t place(const struct kvp_book *b, uint64_t key, uint32_t i)
{
	return (uint32_t)(((key & b->act_line_mask) * LINE + i) & (b->act_line_mask * LINE + LINE - 1));
}

/* Distance of a place from the home of its key. */
static uint32_t offset(const struct kvp_book *b, uint64_t key, uint32_t at)
{
	return (uint32_t)((at - (key & b->act_line_mask) * LINE) & (b->act_line_mask * LINE + LINE - 1));
}

static uint32_t reach(const struct kvp_book *b)
{
	uint64_t n = kvp_ld_acq_u64(&b->hdr->act_reach);
	return (uint32_t)(n < KVP_ACTIVE_REACH ? n : KVP_ACTIVE_REACH) * LINE;
}

/* One more line may be used from now on, by everyone: raised before the first entry goes there. */
static int reach_more(struct kvp_book *b, uint32_t seen)
{
	uint64_t n = kvp_ld_acq_u64(&b->hdr->act_reach);
	if (n * LINE != seen)
		return 1;
	if (n >= KVP_ACTIVE_REACH)
		return 0;
	kvp_cas_ar_u64(&b->hdr->act_reach, n, n + 1);
	return 1;
}

/* What look will read: the gates of every line in reach, and mostly the first hashes of the first line. */
static void prefetch(const struct kvp_book *b, uint64_t key)
{
	const struct kvp_bucket_shm *u = &b->act[key & b->act_line_mask];
	__builtin_prefetch(u->gate, 1);
	__builtin_prefetch(u->hash[0], 1);
	for (uint32_t i = reach(b) / LINE; i-- > 1;)
		__builtin_prefetch(b->act[(key + i) & b->act_line_mask].gate);
}

/* Set before the first entry goes to a stretch of the table: check reads no other. */
static void mark_used(struct kvp_book *b, uint32_t at)
{
	uint64_t unit = at / LINE / ACT_USED_LINES, bit = 1ULL << (unit % 64);
	uint64_t *w = &b->act_used[unit / 64], old = kvp_ld_rlx_u64(w);
	while (!(old & bit) && !kvp_cas_ar_u64(w, old, old | bit))
		old = kvp_ld_rlx_u64(w);
}

/* ---- looking ---- */

struct look {
	struct kvp_u128 full_v, part_v;
	uint32_t full, full_at; /* length of the longest entry that lies within the path */
	uint32_t part, part_at; /* blocks in common with an entry that goes on in another way, or further */
	uint32_t free_at;       /* first empty place */
};

static uint32_t common(const struct kvp_book *b, uint32_t at, const uint64_t *h, uint32_t n)
{
	const uint64_t *x = hashes(b, at);
	uint32_t i = 0;
	while (i < n && kvp_ld_acq_u64(&x[i]) == h[i])
		i++;
	return i;
}

/* Everything the table has under the key of h[0], but for the entry at skip; with an entry for all of h, that
 * one only. */
static void look(const struct kvp_book *b, uint64_t key, const uint64_t *h, uint32_t n, uint32_t skip,
	struct look *k)
{
	uint32_t end = reach(b);
	k->full = k->part = 0;
	k->free_at = ABSENT;
	for (uint32_t i = 0; i < end; i++) {
		uint32_t at = place(b, key, i);
		const struct kvp_u128 *g = gate(b, at);
		struct kvp_u128 v = { kvp_ld_acq_u64(&g->lo), 0 };
		if (v.lo == 0 && k->free_at == ABSENT)
			k->free_at = at;
		if (v.lo >> TAG_SHIFT != key >> TAG_SHIFT || v.lo == 0 || at == skip)
			continue;
		v.hi = kvp_ld_acq_u64(&g->hi);
		uint32_t len = LEN(v.hi), c = CNT(v.hi) ? common(b, at, h, len < n ? len : n) : 0;
		if (c == len && c > k->full) {
			k->full = c;
			k->full_at = at;
			k->full_v = v;
		} else if (c != len && c > k->part) {
			k->part = c;
			k->part_at = at;
			k->part_v = v;
		} else {
			continue;
		}
		if (kvp_ld_acq_u64(&g->lo) != v.lo) { /* another entry by now: once more */
			k->full = k->part = 0;
			k->free_at = ABSENT;
			i = UINT32_MAX;
		} else if (k->full == n) {
			return; /* none is longer */
		}
	}
}

/* Appends entries that together cover h[p..e) to the chain. With two entries of one key (see settle) the
 * first choice may lead nowhere. */
static int cover(const struct kvp_book *b, struct book_dom dom, const uint64_t *h, uint32_t p, uint32_t e,
	struct book_chain *c)
{
	for (uint32_t max = e - p; max; max--) {
		struct look k;
		look(b, book_key(dom, h[p]), h + p, max, ABSENT, &k);
		if (!k.full)
			return 0;
		struct book_link *l = &c->link[c->cnt++];
		*l = (struct book_link){ k.full_v, k.full_at, p, k.full, CNT(k.full_v.hi),
			WEIGHT(k.full_v.hi) };
		if (p + k.full == e || cover(b, dom, h, p + k.full, e, c))
			return 1;
		c->cnt--;
		max = k.full;
	}
	return 0;
}

int book_cover(const struct kvp_book *b, struct book_dom dom, const uint64_t *h, uint32_t n,
	struct book_chain *c)
{
	c->cnt = 0;
	return n && cover(b, dom, h, 0, n, c);
}

/* ---- taking and dropping references ---- */

struct job {
	struct kvp_book *b;
	struct book_dom dom;
	int64_t *delta;
	uint32_t *note; /* names the entry that is being filled */
	uint32_t slot;  /* whose death makes it garbage */
	/* reservation that keeps hashes of entries being split; ABSENT: they are safe elsewhere */
	uint32_t idx;
	uint32_t chunk, chunk_used;
};

/* Takes refs references off an entry, all it has at most: their number. 0 = it changed, look again. */
static uint32_t take_off(const struct job *j, const struct book_link *l, uint32_t refs)
{
	uint32_t take = l->cnt < refs ? l->cnt : refs;
	struct kvp_u128 old = l->v, new = { 0, 0 };
	if (take < l->cnt) {
		new.lo = old.lo;
		new.hi = HI(l->cnt - take, l->len, l->weight);
	}
	KVP_POINT("book:take_off");
	if (!kvp_cas_u128(gate(j->b, l->at), &old, new))
		return 0;
	if (!new.lo)
		*j->delta -= (int64_t)(l->len * l->weight);
	return take;
}

/* Drops refs references to h[0..n), leaf to root; the last one of an entry takes its weight along. Where a
 * purge of the epoch, or a death before its recount, left holes, what lies between them. */
static void unref_run(const struct job *j, const uint64_t *h, uint32_t n, uint32_t refs)
{
	uint32_t from = 0;
	for (int miss = 0; n;) {
		struct book_chain c;
		if (book_cover(j->b, j->dom, h + from, n - from, &c)) {
			const struct book_link *l = &c.link[c.cnt - 1];
			uint32_t took = take_off(j, l, refs);
			if (took && took < refs) { /* the others are held by another chain */
				unref_run(j, h + from, l->pos, took);
				refs -= took;
			} else if (took) {
				n = from + l->pos;
			}
		} else if (++miss > MISS_MAX && ++from >= n) {
			n--;
		} else {
			continue;
		}
		if (from >= n)
			from = 0;
	}
}

static int ref_run(struct job *j, uint64_t key, const uint64_t *h, uint32_t n, uint32_t refs, uint64_t w,
	uint32_t skip);

/* Keeps hashes that are not the booking's own where the sweep finds them. */
static int keep_hashes(struct job *j, const uint64_t *h, uint32_t n)
{
	struct kvp_book *b = j->b;
	if (j->idx == ABSENT)
		return 1;
	if (!j->chunk) {
		uint64_t s = kvp_ld_acq_u64(book_state(b, j->idx));
		j->chunk = book_chunk_take(b, HANDLE(S_GEN(s), j->idx));
		if (!j->chunk)
			return 0;
		kvp_st_rel_u32(&b->resv[j->idx].split_chunk, j->chunk);
	}
	for (uint32_t i = 0; i < n; i++)
		kvp_st_rlx_u64(&b->key[(uint64_t)j->chunk * CHUNK_KEYS + j->chunk_used++ % CHUNK_KEYS], h[i]);
	return 1;
}

/* Leaves keep blocks in the entry at, value v, and gives its references to the others to further entries:
 * these first, so that no holder ever misses its blocks. Nothing is changed if the entry did meanwhile. */
static int displace(struct job *j, uint32_t at, struct kvp_u128 v, uint32_t keep)
{
	uint32_t len = LEN(v.hi), cnt = CNT(v.hi);
	uint64_t h[RUN], w = WEIGHT(v.hi);
	for (uint32_t i = 0; i < len; i++)
		h[i] = kvp_ld_acq_u64(&hashes(j->b, at)[i]);
	if (kvp_ld_acq_u64(&gate(j->b, at)->lo) != v.lo)
		return KVP_OK;
	if (!keep_hashes(j, h + keep, len - keep))
		return KVP_ERR_FULL;
	int rc = ref_run(j, book_key(j->dom, h[keep]), h + keep, len - keep, cnt, w, keep ? ABSENT : at);
	if (rc)
		return rc;
	KVP_POINT("book:split");
	struct kvp_u128 new = { 0, 0 };
	if (keep) {
		new.lo = v.lo;
		new.hi = HI(cnt, keep, w);
	}
	if (kvp_cas_u128(gate(j->b, at), &v, new)) {
		*j->delta -= (int64_t)((len - keep) * w);
		KVP_POINT("book:split_done");
	} else {
		unref_run(j, h + keep, len - keep, cnt);
	}
	return KVP_OK;
}

/* Two processes may insert one key at once. Each looks again after its insertion, so that one of them sees
 * both: the references of the higher one go to the lower one. */
static int settle(struct job *j, uint64_t key, const uint64_t *h, uint32_t len, uint32_t mine, uint64_t lo)
{
	for (;;) {
		struct look k;
		look(j->b, key, h, len, mine, &k);
		if (!k.full && !k.part)
			return KVP_OK;
		struct kvp_u128 v = kvp_ld_u128(gate(j->b, mine));
		if (v.lo != lo)
			return KVP_OK;
		uint32_t other = k.full ? k.full_at : k.part_at;
		int rc = offset(j->b, key, other) < offset(j->b, key, mine)
				 ? displace(j, mine, v, 0)
				 : displace(j, other, k.full ? k.full_v : k.part_v, 0);
		if (rc)
			return rc;
	}
}

/* A new entry at an empty place. 0 = the place was taken, look again. */
static int insert(struct job *j, uint64_t key, const uint64_t *h, uint64_t hi, uint32_t at, int *rc)
{
	struct kvp_book *b = j->b;
	uint32_t len = LEN(hi);
	b->nonce = b->nonce % 0xffffu + 1;
	uint64_t lo = key >> TAG_SHIFT << TAG_SHIFT | (uint64_t)j->slot << 16 | b->nonce;
	struct kvp_u128 old = { 0, 0 }, busy = { lo, 0 }, done = { lo, hi };
	mark_used(b, at);
	kvp_st_rel_u32(j->note, at + 1);
	KVP_POINT("book:insert");
	if (!kvp_cas_u128(gate(b, at), &old, busy))
		return 0;
	KVP_POINT("book:fill");
	for (uint32_t i = 0; i < len; i++)
		kvp_st_rlx_u64(&hashes(b, at)[i], h[i]);
	/* pairs with: look, which reads lo, the hashes, then lo again */
	if (!kvp_cas_u128(gate(b, at), &busy, done)) {
		*rc = KVP_ERR_FULL; /* swept: the caller was taken for dead */
		return 0;
	}
	*j->delta += (int64_t)(len * WEIGHT(hi));
	KVP_POINT("book:inserted");
	*rc = settle(j, key, h, len, at, lo);
	return 1;
}

/* Adds refs references to h[0..n), root to leaf; n blocks of one group. New entries get weight w. The first
 * look passes over the entry at skip. KVP_ERR_FULL leaves nothing behind. */
static int ref_run(struct job *j, uint64_t key, const uint64_t *h, uint32_t n, uint32_t refs, uint64_t w,
	uint32_t skip)
{
	int rc = KVP_OK;
	uint32_t p = 0;
	while (p < n && !rc) {
		struct look k;
		uint32_t end = reach(j->b);
		look(j->b, key, h + p, n - p, skip, &k);
		if (k.full) {
			struct kvp_u128 new = { k.full_v.lo, k.full_v.hi + ((uint64_t)refs << CNT_SHIFT) };
			if (CNT(k.full_v.hi) > CNT_MAX - refs)
				rc = KVP_ERR_FULL;
			else if (kvp_cas_u128(gate(j->b, k.full_at), &k.full_v, new))
				p += k.full;
			else
				continue;
		} else if (k.part) {
			rc = displace(j, k.part_at, k.part_v, k.part);
			continue;
		} else if (k.free_at != ABSENT) {
			if (!insert(j, key, h + p, HI(refs, n - p, w), k.free_at, &rc))
				continue;
			p = n;
		} else {
			rc = reach_more(j->b, end) ? KVP_OK : KVP_ERR_FULL;
			continue;
		}
		if (p < n)
			key = book_key(j->dom, h[p]);
	}
	if (rc)
		unref_run(j, h, p, refs);
	return rc;
}

void book_gate_clean(struct kvp_book *b, uint32_t note, uint32_t slot)
{
	if (!note || note > (b->act_line_mask + 1) * LINE)
		return;
	struct kvp_u128 old = kvp_ld_u128(gate(b, note - 1)), empty = { 0, 0 };
	if (old.lo && !old.hi && GATE_SLOT(old.lo) == slot)
		kvp_cas_u128(gate(b, note - 1), &old, empty);
}

/* ---- walks over the key array of a reservation ---- */

struct group {
	uint64_t key;
	uint32_t pos, chunk;
};
enum way { ROOT_TO_LEAF, LEAF_TO_ROOT };
/* Groups in order, AHEAD of them known and their table lines on the way. */
struct walk {
	struct group ring[AHEAD];
	uint32_t head, tail, pos, chunk, total;
	enum way way;
	struct book_dom dom;
};

static void walk_ahead(const struct kvp_book *b, struct walk *w)
{
	while (w->head - w->tail < AHEAD && w->pos < w->total && w->chunk && w->chunk < b->chunk_cnt) {
		struct group *g = &w->ring[w->head++ % AHEAD];
		g->pos = w->pos;
		g->chunk = w->chunk;
		const uint64_t *src = &b->key[(uint64_t)w->chunk * CHUNK_KEYS + w->pos % CHUNK_KEYS];
		g->key = book_key(w->dom, kvp_ld_rlx_u64(src));
		prefetch(b, g->key);
		const struct kvp_chunk_shm *c = &b->chunk[w->chunk];
		if (w->way == ROOT_TO_LEAF) {
			w->pos += RUN;
			if (w->pos % CHUNK_KEYS == 0)
				w->chunk = kvp_ld_rlx_u32(&c->next);
		} else {
			if (w->pos % CHUNK_KEYS == 0)
				w->chunk = kvp_ld_rlx_u32(&c->prev);
			w->pos -= RUN; /* past 0: beyond total, the end */
		}
	}
}

static void walk_start(const struct kvp_book *b, struct walk *w, uint32_t idx, struct book_dom dom,
	enum way way)
{
	const struct kvp_resv_shm *e = &b->resv[idx];
	uint32_t total = kvp_ld_rlx_u32(&e->seq_cnt);
	w->head = w->tail = 0;
	w->total = total <= KVP_RESV_SEQ_MAX ? total : 0;
	w->way = way;
	w->dom = dom;
	w->pos = way == ROOT_TO_LEAF || !total ? 0 : (total - 1) & ~(RUN - 1);
	w->chunk = kvp_ld_rlx_u32(way == ROOT_TO_LEAF ? &e->chunk_first : &e->chunk_last);
	walk_ahead(b, w);
}

/* The hashes of the next group, their number, its first position and key; 0 at the end. */
static uint32_t walk_next(const struct kvp_book *b, struct walk *w, uint64_t *h, struct group *g)
{
	if (w->head == w->tail)
		return 0;
	*g = w->ring[w->tail++ % AHEAD];
	uint32_t n = w->total - g->pos < RUN ? w->total - g->pos : RUN;
	const uint64_t *src = &b->key[(uint64_t)g->chunk * CHUNK_KEYS + g->pos % CHUNK_KEYS];
	for (uint32_t i = 0; i < n; i++)
		h[i] = kvp_ld_rlx_u64(&src[i]);
	/* Many at once: their address translations overlap, as they can't across the CAS of a group. */
	if (w->head - w->tail <= AHEAD / 2)
		walk_ahead(b, w);
	return n;
}

int book_ref(struct kvp_book *b, uint32_t idx, struct book_dom dom, int64_t *delta, uint32_t *done)
{
	struct kvp_resv_shm *e = &b->resv[idx];
	struct walk w;
	struct group g;
	uint64_t h[RUN];
	uint32_t n;
	uint64_t s = kvp_ld_acq_u64(book_state(b, idx));
	struct job j = { b, dom, delta, &e->filling, S_SLOT(s), idx, 0, 0 };
	int rc = KVP_OK;
	*done = 0;
	walk_start(b, &w, idx, dom, ROOT_TO_LEAF);
	while (!rc && (n = walk_next(b, &w, h, &g))) {
		rc = ref_run(&j, g.key, h, n, 1, KVP_BLK_FX_ONE, ABSENT);
		*done += rc ? 0 : n;
		j.chunk_used = 0;
		KVP_POINT("book:ref");
	}
	if (j.chunk) {
		kvp_st_rlx_u32(&e->split_chunk, 0);
		kvp_cas_ar_u64(&b->chunk[j.chunk].owner, HANDLE(S_GEN(s), idx), 0);
	}
	return rc;
}

void book_unref(struct kvp_book *b, uint32_t idx, struct book_dom dom, uint32_t cnt, int64_t *delta)
{
	struct walk w;
	struct group g;
	uint64_t h[RUN];
	uint32_t n;
	struct job j = { b, dom, delta, NULL, 0, ABSENT, 0, 0 };
	walk_start(b, &w, idx, dom, LEAF_TO_ROOT);
	while ((n = walk_next(b, &w, h, &g))) {
		if (g.pos >= cnt)
			continue;
		unref_run(&j, h, n, 1);
		KVP_POINT("book:unref");
	}
}

void book_frac(struct kvp_book *b, uint32_t idx, struct book_dom dom, uint64_t frac_fx, int64_t *delta)
{
	struct walk w;
	struct group g;
	struct book_chain c;
	uint64_t h[RUN];
	uint32_t n;
	walk_start(b, &w, idx, dom, LEAF_TO_ROOT);
	while ((n = walk_next(b, &w, h, &g))) {
		for (int miss = 0; n;) {
			if (!book_cover(b, dom, h, n, &c)) {
				if (++miss > MISS_MAX)
					return;
				continue;
			}
			const struct book_link *l = &c.link[c.cnt - 1];
			if (l->cnt != 1)
				return; /* somebody else holds these blocks too */
			struct kvp_u128 old = l->v, new = { old.lo, HI(1, l->len, frac_fx) };
			if (!kvp_cas_u128(gate(b, l->at), &old, new))
				continue;
			*delta += (int64_t)l->len * ((int64_t)frac_fx - (int64_t)l->weight);
			n = l->pos;
			KVP_POINT("book:frac");
		}
	}
}

/* Copies the key array of idx to private memory: a close may take the chunks away at any moment. */
static uint32_t keys_copy(struct kvp_book *b, uint32_t idx)
{
	uint32_t left = kvp_ld_rlx_u32(&b->resv[idx].seq_cnt), cnt = 0;
	uint32_t chunk = kvp_ld_rlx_u32(&b->resv[idx].chunk_first);
	if (left > KVP_RESV_SEQ_MAX || !book_scratch(b, left))
		return 0;
	for (; left && chunk && chunk < b->chunk_cnt; chunk = kvp_ld_rlx_u32(&b->chunk[chunk].next)) {
		uint32_t n = left < CHUNK_KEYS ? left : CHUNK_KEYS;
		for (uint32_t i = 0; i < n; i++)
			b->scratch[cnt++] = kvp_ld_rlx_u64(&b->key[(uint64_t)chunk * CHUNK_KEYS + i]);
		left -= n;
	}
	return left ? 0 : cnt;
}

/* One group into dom, in pieces that had one weight in old. */
static int count_group(struct job *j, struct book_dom old, const uint64_t *h, uint32_t n)
{
	int rc = KVP_OK;
	for (uint32_t p = 0; p < n;) {
		struct look k;
		uint32_t q = p;
		do /* blocks that have no entry any more weigh one */
			look(j->b, book_key(old, h[q]), h + q, n - q, ABSENT, &k);
		while (!k.full && ++q < n);
		if (q > p)
			rc |= ref_run(j, book_key(j->dom, h[p]), h + p, q - p, 1, KVP_BLK_FX_ONE, ABSENT);
		if (q < n)
			rc |= ref_run(j, book_key(j->dom, h[q]), h + q, k.full, 1, WEIGHT(k.full_v.hi),
				ABSENT);
		p = q < n ? q + k.full : n;
	}
	return rc ? KVP_ERR_FULL : KVP_OK;
}

int book_count(struct kvp_book *b, uint32_t idx, struct book_dom dom, struct book_dom old, int64_t *delta,
	uint32_t *cnt)
{
	uint32_t slot = book_slot(b);
	struct job j = { b, dom, delta, &b->hdr->filling[slot], slot, ABSENT, 0, 0 };
	int rc = KVP_OK;
	*cnt = keys_copy(b, idx);
	if (*cnt != kvp_ld_rlx_u32(&b->resv[idx].seq_cnt))
		rc = KVP_ERR_FULL;
	for (uint32_t i = 0; i < *cnt; i += RUN)
		rc |= count_group(&j, old, b->scratch + i, *cnt - i < RUN ? *cnt - i : RUN);
	return rc ? KVP_ERR_FULL : KVP_OK;
}

/* ---- deleting what a garbage epoch left ---- */

static void purge(struct kvp_book *b, uint64_t key, uint64_t hash, enum book_purge_what what)
{
	uint32_t end = reach(b);
	for (uint32_t i = 0; i < end; i++) {
		struct kvp_u128 *g = gate(b, place(b, key, i)), old, empty = { 0, 0 };
		do {
			old = kvp_ld_u128(g);
			if (old.lo >> TAG_SHIFT != key >> TAG_SHIFT || !CNT(old.hi) ||
				!common(b, place(b, key, i), &hash, 1) ||
				(what == PURGE_WHOLE && WEIGHT(old.hi) != KVP_BLK_FX_ONE))
				break;
		} while (!kvp_cas_u128(g, &old, empty));
	}
}

void book_uncount(struct kvp_book *b, struct book_dom dom, uint32_t cnt)
{
	for (uint32_t i = 0; i < cnt; i++)
		purge(b, book_key(dom, b->scratch[i]), b->scratch[i], PURGE_ALL);
}

void book_purge(struct kvp_book *b, uint32_t idx, uint32_t rank, uint32_t epoch_last, uint32_t epochs,
	enum book_purge_what what)
{
	uint32_t c = kvp_ld_acq_u32(&b->resv[idx].split_chunk);
	for (uint32_t ep = 0; ep < epochs; ep++) {
		struct book_dom dom = book_dom(b, rank, (epoch_last - ep) & 0xfffffu);
		struct walk w;
		struct group g;
		uint64_t h[RUN];
		uint32_t n;
		walk_start(b, &w, idx, dom, ROOT_TO_LEAF);
		while ((n = walk_next(b, &w, h, &g))) {
			for (uint32_t i = 0; i < n; i++)
				purge(b, book_key(dom, h[i]), h[i], what);
			KVP_POINT("book:purge");
		}
		for (uint32_t i = 0; i < CHUNK_KEYS && c && c < b->chunk_cnt; i++) {
			uint64_t x = kvp_ld_rlx_u64(&b->key[(uint64_t)c * CHUNK_KEYS + i]);
			purge(b, book_key(dom, x), x, what);
		}
	}
}

/* ---- depth ---- */

void kvp_active_prefetch(const struct kvp_book *b, uint32_t rank_slot, uint64_t first)
{
	if (rank_slot < b->rank_max)
		prefetch(b, book_key(book_dom(b, rank_slot, CTL_EPOCH(book_ctl(b, rank_slot))), first));
}

/* A block at the start of a group is live exactly if an entry begins with it: the first that is found will
 * do. */
static int is_start(const struct kvp_book *b, struct book_dom dom, const uint64_t *h)
{
	uint64_t key = book_key(dom, *h);
	uint32_t end = reach(b) / LINE;
	for (uint32_t i = 0; i < end; i++) {
		const struct kvp_bucket_shm *u = &b->act[(key + i) & b->act_line_mask];
		for (uint32_t k = 0; k < LINE; k++) {
			uint64_t lo = kvp_ld_acq_u64(&u->gate[k].lo);
			if (lo >> TAG_SHIFT != key >> TAG_SHIFT || !lo)
				continue;
			int has = CNT(kvp_ld_acq_u64(&u->gate[k].hi)) && kvp_ld_acq_u64(&u->hash[k][0]) == *h;
			if (kvp_ld_acq_u64(&u->gate[k].lo) != lo)
				k--; /* another entry by now: once more */
			else if (has)
				return 1;
		}
	}
	return 0;
}

uint32_t kvp_active_depth(const struct kvp_book *b, uint32_t rank_slot, uint32_t rank_gen,
	const uint64_t *seq, uint32_t n)
{
	if (rank_slot >= b->rank_max || n == 0)
		return 0;
	uint64_t ctl = book_ctl(b, rank_slot);
	if (CTL_GEN(ctl) != rank_gen || CTL_STATE(ctl) == KVP_CTL_CLOSED)
		return 0;
	uint32_t ep = CTL_EPOCH(ctl);
	if (CTL_STATE(ctl) == KVP_CTL_RECOUNT) /* the last complete count */
		ep = (ep - CTL_BACK(ctl)) & 0xfffffu;
	struct book_dom dom = book_dom(b, rank_slot, ep);
	/* the first lo groups are known to be live, group hi is known not to be (or does not exist) */
	uint32_t cnt = (n + RUN - 1) / RUN, lo = 0, hi = 1;
	while (hi <= cnt && is_start(b, dom, &seq[(hi - 1) * RUN])) {
		lo = hi;
		hi = hi > cnt / 2 ? cnt + (hi == cnt) : hi * 2;
	}
	if (hi > cnt)
		hi = cnt + 1;
	while (hi - lo > 1) {
		uint32_t mid = lo + (hi - lo) / 2;
		if (is_start(b, dom, &seq[(mid - 1) * RUN]))
			lo = mid;
		else
			hi = mid;
	}
	if (!lo)
		return 0;
	uint32_t p = (lo - 1) * RUN, end = lo * RUN < n ? lo * RUN : n;
	while (p < end) {
		struct look k;
		look(b, book_key(dom, seq[p]), seq + p, end - p, ABSENT, &k);
		p += k.full > k.part ? k.full : k.part;
		if (k.part > k.full || !k.full)
			break;
	}
	return p;
}
