#include "shm/pending_priv.h"

#include <kvpick/point.h>
#include <string.h>
#include <xxhash.h>

#define MAGIC 0x31444e455055ULL /* "UPEND1" */
#define LAYOUT 1
#define TRIES 20000 /* attempts before a call gives up: each failure means that another call succeeded */
#define POOL_SLACK (32ULL << 20) /* bytes for entries that are being filled beside a full cache */

struct plan {
	uint64_t entry_cap, bucket_cnt, chunk_cnt, word_cnt, word_off, body_off, data_off, total;
};

static uint32_t layout_hash(void)
{
	const size_t w[] = {sizeof(struct kvp_pending_shm), offsetof(struct kvp_pending_shm, txn),
		sizeof(struct kvp_txn_rec_shm), G_WORDS, E_WORDS, B_WORDS, CHUNK_WORDS};
	return kvp_obj_hash(w, sizeof(w) / sizeof(w[0]));
}

static int plan_of(const struct kvp_geom *g, struct plan *l)
{
	if (!g || g->pending_max > (1u << 20) || g->slot_max == 0 || g->slot_max > KVP_SLOT_MAX)
		return KVP_ERR_INVAL;
	memset(l, 0, sizeof(*l));
	l->bucket_cnt = 1;
	if (g->pending_max) {
		l->entry_cap = g->pending_max + 2 * g->slot_max;
		uint64_t pool =
			g->pending_bytes < KVP_PENDING_POOL_MAX ? g->pending_bytes : KVP_PENDING_POOL_MAX;
		l->chunk_cnt = (pool + POOL_SLACK) / (8 * CHUNK_WORDS) + l->entry_cap;
		while (l->bucket_cnt < l->entry_cap)
			l->bucket_cnt *= 2;
	}
	l->word_cnt = G_WORDS + l->bucket_cnt + l->entry_cap * E_WORDS + l->chunk_cnt;
	l->word_off = kvp_align_up(sizeof(struct kvp_pending_shm), KVP_PAGE);
	l->body_off = kvp_align_up(l->word_off + l->word_cnt * sizeof(struct kvp_u128), KVP_PAGE);
	l->data_off = kvp_align_up(l->body_off + l->entry_cap * B_WORDS * 8, KVP_PAGE);
	l->total = l->data_off + l->chunk_cnt * CHUNK_WORDS * 8;
	return KVP_OK;
}

uint64_t kvp_pending_align(void)
{
	return KVP_PAGE;
}

uint64_t kvp_pending_footprint(const struct kvp_geom *g)
{
	struct plan l;
	return plan_of(g, &l) ? 0 : l.total;
}

int kvp_pending_new(void *mem, const struct kvp_geom *g)
{
	struct plan l;
	if (!mem || ((uintptr_t)mem & (KVP_CACHE_LINE - 1)) || plan_of(g, &l))
		return KVP_ERR_INVAL;
	struct kvp_pending_shm *s = mem;
	kvp_obj_begin(&s->hdr, LAYOUT, layout_hash(), l.total, g->region_gen);
	s->max = g->pending_max;
	s->bytes_max = g->pending_bytes;
	s->ttl_ns = g->pending_ttl_ns;
	s->entry_cap = l.entry_cap;
	s->bucket_cnt = l.bucket_cnt;
	s->chunk_cnt = l.chunk_cnt;
	s->word_off = l.word_off;
	s->word_cnt = l.word_cnt;
	s->body_off = l.body_off;
	s->data_off = l.data_off;
	kvp_obj_ready(&s->hdr, MAGIC);
	return KVP_OK;
}

int kvp_pending_join(void *mem, const struct kvp_geom *g, struct kvp_pending *out)
{
	struct kvp_pending_shm *s = mem;
	struct plan l;
	int rc = kvp_obj_join(mem, MAGIC, LAYOUT, layout_hash());
	if (rc)
		return rc;
	if (plan_of(g, &l) || s->hdr.footprint != l.total || s->entry_cap != l.entry_cap ||
		s->bucket_cnt != l.bucket_cnt || s->chunk_cnt != l.chunk_cnt || s->word_off != l.word_off ||
		s->body_off != l.body_off || s->data_off != l.data_off)
		return KVP_ERR_LAYOUT;
	uint8_t *base = mem;
	*out = (struct kvp_pending){.shm = s,
		.txn = {&s->txn, (struct kvp_u128 *)(void *)(base + l.word_off), l.word_cnt},
		.body = (uint64_t *)(void *)(base + l.body_off),
		.data = (uint64_t *)(void *)(base + l.data_off),
		.bytes_max = s->bytes_max,
		.ttl_ns = s->ttl_ns,
		.salt = {g->salt[0], g->salt[1]},
		.max = (uint32_t)s->max,
		.entry_cap = (uint32_t)l.entry_cap,
		.bucket_cnt = (uint32_t)l.bucket_cnt,
		.chunk_cnt = (uint32_t)l.chunk_cnt};
	return KVP_OK;
}

void kvp_pending_leave(struct kvp_pending *p)
{
	memset(p, 0, sizeof(*p));
}

int kvp_pending_delete(void *mem)
{
	if (!mem)
		return KVP_ERR_INVAL;
	kvp_obj_delete(mem);
	return KVP_OK;
}

void kvp_pending_attach(struct kvp_pending *p, kvp_owner owner, struct kvp_ctr_column_shm *ctr)
{
	p->owner = owner;
	p->ctr = ctr;
}

static void count(const struct kvp_pending *p, enum kvp_ctr id, uint64_t n)
{
	if (p->ctr && n)
		kvp_ctr_add(p->ctr, id, n);
}

uint64_t kvp_pending_estimate(const struct kvp_pending_item *it)
{
	return 8 * ((uint64_t)it->seq_cnt + it->block_cnt) + it->id_len + it->names_len;
}

/* ---- steps inside one attempt ---- */

struct key {
	uint64_t lo, hi;
};

static struct key key_of(const struct kvp_pending *p, uint32_t part, const char *id, size_t len)
{
	XXH128_hash_t x = XXH3_128bits_withSeed(id, len, p->salt[0] ^ ((uint64_t)part << 32 | part));
	return (struct key){x.low64 ^ p->salt[1], x.high64 ^ p->salt[0]};
}

static uint64_t bucket_of(const struct kvp_pending *p, struct key k)
{
	return w_bucket((k.lo >> 8) & (p->bucket_cnt - 1));
}

static uint64_t get(const struct kvp_pending *p, struct kvp_txn_try *x, uint64_t w)
{
	return kvp_txn_get(&p->txn, x, w);
}
static void set(const struct kvp_pending *p, struct kvp_txn_try *x, uint64_t w, uint64_t v)
{
	kvp_txn_set(&p->txn, x, w, v);
}
static void add(const struct kvp_pending *p, struct kvp_txn_try *x, uint64_t w, uint64_t v)
{
	set(p, x, w, get(p, x, w) + v);
}

/* in_range: an entry number that leads somewhere; else the attempt is torn (or the memory damaged). */
static int in_range(const struct kvp_pending *p, struct kvp_txn_try *x, uint64_t e)
{
	x->torn |= e == 0 || e > p->entry_cap;
	return !x->torn;
}

/* find: the live entry of a key, 0 = none. */
static uint32_t find(const struct kvp_pending *p, struct kvp_txn_try *x, struct key k)
{
	uint64_t e = get(p, x, bucket_of(p, k));
	for (uint32_t i = 0; e && i <= p->entry_cap && in_range(p, x, e); i++) {
		const uint64_t *b = body_of(p, e);
		if (kvp_ld_acq_u64(&b[B_KEY_LO]) == k.lo && kvp_ld_acq_u64(&b[B_KEY_HI]) == k.hi)
			return (uint32_t)e;
		e = get(p, x, w_entry(p, e, E_LINK));
	}
	return 0;
}

static void unlink_bucket(const struct kvp_pending *p, struct kvp_txn_try *x, uint64_t e)
{
	const uint64_t *b = body_of(p, e);
	struct key k = {kvp_ld_acq_u64(&b[B_KEY_LO]), kvp_ld_acq_u64(&b[B_KEY_HI])};
	uint64_t at = bucket_of(p, k);
	for (uint32_t i = 0; i <= p->entry_cap; i++) {
		uint64_t next = get(p, x, at);
		if (next == e) {
			set(p, x, at, get(p, x, w_entry(p, e, E_LINK)));
			return;
		}
		if (!in_range(p, x, next))
			return;
		at = w_entry(p, next, E_LINK);
	}
}

static void unlink_order(const struct kvp_pending *p, struct kvp_txn_try *x, uint64_t e)
{
	uint64_t nbr = get(p, x, w_entry(p, e, E_NBR));
	uint32_t older = HI32(nbr), newer = LO32(nbr);
	uint64_t ends = get(p, x, G_ENDS);
	uint32_t oldest = HI32(ends), newest = LO32(ends);
	if (!older) {
		oldest = newer;
	} else if (in_range(p, x, older)) {
		uint64_t w = w_entry(p, older, E_NBR);
		set(p, x, w, PAIR(HI32(get(p, x, w)), newer));
	}
	if (!newer) {
		newest = older;
	} else if (in_range(p, x, newer)) {
		uint64_t w = w_entry(p, newer, E_NBR);
		set(p, x, w, PAIR(older, LO32(get(p, x, w))));
	}
	set(p, x, G_ENDS, PAIR(oldest, newest));
}

/* give_back returns an entry and its linked chunks to the free lists. */
static void give_back(const struct kvp_pending *p, struct kvp_txn_try *x, uint64_t e)
{
	uint64_t old = get(p, x, w_entry(p, e, E_CHUNK)), fresh = get(p, x, w_entry(p, e, E_FRESH));
	uint64_t n = get(p, x, w_entry(p, e, E_CNT));
	uint32_t first = HI32(old) ? HI32(old) : HI32(fresh);
	uint32_t last = LO32(fresh) ? HI32(fresh) + LO32(fresh) - 1 : LO32(old);
	if (n && (first == 0 || first > p->chunk_cnt || last == 0 || last > p->chunk_cnt))
		x->torn = 1;
	if (n && !x->torn) {
		set(p, x, w_chunk(p, last), get(p, x, G_CHUNK_FREE));
		set(p, x, G_CHUNK_FREE, first);
		add(p, x, G_CHUNK_CNT, n);
	}
	set(p, x, w_entry(p, e, E_STATE), S_FREE);
	set(p, x, w_entry(p, e, E_LINK), get(p, x, G_FREE));
	set(p, x, G_FREE, e);
}

/* drop takes a live entry out of everything. */
static void drop(const struct kvp_pending *p, struct kvp_txn_try *x, uint64_t e)
{
	if (!in_range(p, x, e))
		return;
	unlink_bucket(p, x, e);
	unlink_order(p, x, e);
	add(p, x, G_CNT, (uint64_t)-1);
	add(p, x, G_BYTES, (uint64_t)0 - kvp_ld_acq_u64(&body_of(p, e)[B_BYTES]));
	give_back(p, x, e);
}

/* ---- take, fill, publish ---- */

/* take_chunks notes n chunks for entry e, from the free list first. 0 = there are not so many. */
static int take_chunks(const struct kvp_pending *p, struct kvp_txn_try *x, uint64_t e, uint64_t n)
{
	uint64_t have = get(p, x, G_CHUNK_CNT), bump = get(p, x, G_CHUNK_BUMP);
	uint64_t old = n < have ? n : have, fresh = n - old;
	if (x->torn || bump + fresh > p->chunk_cnt)
		return 0;
	uint64_t first = old ? get(p, x, G_CHUNK_FREE) : 0, c = first, last = first;
	for (uint64_t i = 0; i < old; i++) {
		if (x->torn || c == 0 || c > p->chunk_cnt) {
			x->torn = 1;
			return 0;
		}
		last = c;
		c = get(p, x, w_chunk(p, c));
	}
	if (old) {
		set(p, x, G_CHUNK_FREE, c);
		set(p, x, G_CHUNK_CNT, have - old);
	}
	if (fresh)
		set(p, x, G_CHUNK_BUMP, bump + fresh);
	set(p, x, w_entry(p, e, E_CHUNK), PAIR(first, last));
	set(p, x, w_entry(p, e, E_FRESH), PAIR(fresh ? bump + 1 : 0, fresh));
	set(p, x, w_entry(p, e, E_CNT), n);
	return 1;
}

/* link_chunks makes one list of what a taken entry has. Idempotent: the sweep repeats it. */
static void link_chunks(const struct kvp_pending *p, struct kvp_txn_try *x, uint64_t e)
{
	uint64_t old = get(p, x, w_entry(p, e, E_CHUNK)), fresh = get(p, x, w_entry(p, e, E_FRESH));
	uint32_t at = HI32(fresh), n = LO32(fresh);
	if (x->torn || n == 0 || at == 0 || (uint64_t)at + n - 1 > p->chunk_cnt)
		return;
	if (LO32(old) && LO32(old) <= p->chunk_cnt)
		kvp_txn_own_set(&p->txn, w_chunk(p, LO32(old)), at, x->seq);
	for (uint32_t i = 0; i + 1 < n; i++)
		kvp_txn_own_set(&p->txn, w_chunk(p, at + i), at + i + 1, x->seq);
	KVP_POINT("pending:linked");
}

/* evict drops the oldest entry; KVP_ERR_NOTFOUND with nothing to drop. */
static int evict(struct kvp_pending *p, struct kvp_txn_try *x)
{
	uint32_t e = HI32(get(p, x, G_ENDS));
	if (x->torn)
		return KVP_ERR_AGAIN;
	if (!e)
		return KVP_ERR_NOTFOUND;
	drop(p, x, e);
	int rc = kvp_txn_commit(&p->txn, x, p->owner);
	if (!rc)
		count(p, KVP_CTR_PENDING_EVICTED, 1);
	KVP_POINT("pending:evicted");
	return rc;
}

/* take makes an entry with n chunks the caller's: *e, and x at the change that did it. */
static int take(struct kvp_pending *p, uint64_t n, struct kvp_txn_try *x, uint32_t *e)
{
	for (int i = 0; i < TRIES; i++) {
		if (kvp_txn_begin(&p->txn, x))
			continue;
		uint64_t at = get(p, x, G_FREE), bump = get(p, x, G_BUMP);
		int room = at || bump < p->entry_cap;
		if (room && at && in_range(p, x, at)) {
			set(p, x, G_FREE, get(p, x, w_entry(p, at, E_LINK)));
		} else if (room && !at) {
			at = bump + 1;
			set(p, x, G_BUMP, at);
		}
		if (room && !x->torn)
			room = take_chunks(p, x, at, n);
		if (x->torn)
			continue;
		if (!room) {
			x->cnt = 0;
			if (evict(p, x) == KVP_ERR_NOTFOUND)
				return KVP_ERR_FULL;
			continue;
		}
		set(p, x, w_entry(p, at, E_STATE), S_TAKEN | (uint64_t)p->owner << 8);
		if (kvp_txn_commit(&p->txn, x, p->owner) == KVP_OK) {
			*e = (uint32_t)at;
			KVP_POINT("pending:taken");
			return KVP_OK;
		}
	}
	return KVP_ERR_AGAIN;
}

/* A position in the chunks of an entry. */
struct cursor {
	uint64_t chunk;
	uint32_t word;
};

static uint64_t *place(const struct kvp_pending *p, struct cursor *c)
{
	if (c->word == CHUNK_WORDS) {
		c->chunk = kvp_ld_acq_u64(&p->txn.word[w_chunk(p, c->chunk)].lo);
		c->word = 0;
	}
	if (c->chunk == 0 || c->chunk > p->chunk_cnt)
		return NULL;
	return p->data + (c->chunk - 1) * CHUNK_WORDS + c->word++;
}

static void put_words(const struct kvp_pending *p, struct cursor *c, const void *from, uint64_t n_bytes)
{
	for (uint64_t i = 0; i < n_bytes; i += 8) {
		uint64_t *w = place(p, c);
		if (!w)
			return;
		kvp_copy_in(w, (const char *)from + i, n_bytes - i < 8 ? n_bytes - i : 8);
	}
}

static uint64_t first_chunk(uint64_t old, uint64_t fresh)
{
	return HI32(old) ? HI32(old) : HI32(fresh);
}

static void fill(const struct kvp_pending *p, struct kvp_txn_try *x, uint64_t e, struct key k,
	const struct kvp_pending_item *it)
{
	const uint64_t body[B_WORDS] = {[B_KEY_LO] = k.lo,
		[B_KEY_HI] = k.hi,
		[B_BYTES] = kvp_pending_estimate(it),
		[B_WORKER] = it->worker_id,
		[B_ISL] = it->isl_tok,
		[B_PREFILL] = it->prefill_tok,
		[B_LORA] = it->lora_hash,
		[B_PART_RANK] = PAIR(it->part, it->dp_rank),
		[B_CNTS] = PAIR(it->seq_cnt, it->block_cnt),
		[B_SESSION] = PAIR(it->session_len, it->flags),
		[B_EXPECTED] = PAIR(it->lora_len, it->expected_output_tok)};
	kvp_copy_in(body_of(p, e), body, sizeof(body));
	struct cursor c = {
		first_chunk(get(p, x, w_entry(p, e, E_CHUNK)), get(p, x, w_entry(p, e, E_FRESH))), 0};
	put_words(p, &c, it->seq, 8ULL * it->seq_cnt);
	put_words(p, &c, it->block, 8ULL * it->block_cnt);
	put_words(p, &c, it->session, it->session_len);
	put_words(p, &c, it->lora, it->lora_len);
	KVP_POINT("pending:filled");
}

static void link_newest(
	const struct kvp_pending *p, struct kvp_txn_try *x, uint64_t e, struct key k, uint64_t now_ns)
{
	uint64_t ends = get(p, x, G_ENDS), bucket = bucket_of(p, k);
	uint32_t newest = LO32(ends);
	uint64_t time = now_ns;
	if (newest && in_range(p, x, newest)) {
		uint64_t w = w_entry(p, newest, E_NBR), t = get(p, x, w_entry(p, newest, E_TIME));
		set(p, x, w, PAIR(HI32(get(p, x, w)), e));
		time = t > time ? t : time;
	}
	set(p, x, G_ENDS, PAIR(HI32(ends) ? HI32(ends) : e, e));
	set(p, x, w_entry(p, e, E_NBR), PAIR(newest, 0));
	set(p, x, w_entry(p, e, E_TIME), time);
	set(p, x, w_entry(p, e, E_LINK), get(p, x, bucket));
	set(p, x, bucket, e);
	set(p, x, w_entry(p, e, E_STATE), S_LIVE);
	add(p, x, G_CNT, 1);
	add(p, x, G_BYTES, kvp_ld_acq_u64(&body_of(p, e)[B_BYTES]));
}

static int publish(struct kvp_pending *p, uint64_t e, struct key k, uint64_t now_ns)
{
	struct kvp_txn_try x;
	uint64_t bytes = kvp_ld_acq_u64(&body_of(p, e)[B_BYTES]);
	for (int i = 0; i < TRIES; i++) {
		if (kvp_txn_begin(&p->txn, &x))
			continue;
		uint32_t same = find(p, &x, k);
		if (same)
			drop(p, &x, same);
		if (get(p, &x, G_CNT) >= p->max || bytes > p->bytes_max - get(p, &x, G_BYTES)) {
			x.cnt = 0;
			evict(p, &x);
			continue;
		}
		link_newest(p, &x, e, k, now_ns);
		if (kvp_txn_commit(&p->txn, &x, p->owner) == KVP_OK) {
			count(p, KVP_CTR_PENDING_REPLACED, same != 0);
			KVP_POINT("pending:published");
			return KVP_OK;
		}
	}
	return KVP_ERR_AGAIN;
}

/* untake gives a taken entry back unused. */
static int untake(struct kvp_pending *p, uint64_t e)
{
	struct kvp_txn_try x;
	for (int i = 0; i < TRIES; i++) {
		if (kvp_txn_begin(&p->txn, &x))
			continue;
		give_back(p, &x, e);
		if (kvp_txn_commit(&p->txn, &x, p->owner) == KVP_OK)
			return KVP_OK;
	}
	return KVP_ERR_AGAIN;
}

static int is_expired(const struct kvp_pending *p, uint64_t inserted_ns, uint64_t now_ns)
{
	return now_ns > inserted_ns && now_ns - inserted_ns > p->ttl_ns;
}

/* drop_oldest drops entries from the oldest end: expired ones, or all of them. */
enum which { EXPIRED, ALL };
static void drop_oldest(struct kvp_pending *p, enum which which, uint64_t now_ns, uint64_t max)
{
	struct kvp_txn_try x;
	uint64_t n = 0;
	for (int i = 0; i < TRIES && n < max; i++) {
		if (kvp_txn_begin(&p->txn, &x))
			continue;
		uint32_t e = HI32(get(p, &x, G_ENDS));
		if (!e && !x.torn)
			break;
		if (!in_range(p, &x, e))
			continue;
		uint64_t time = get(p, &x, w_entry(p, e, E_TIME));
		if (which == EXPIRED && !x.torn && !is_expired(p, time, now_ns))
			break;
		drop(p, &x, e);
		if (kvp_txn_commit(&p->txn, &x, p->owner) == KVP_OK) {
			n++;
			i = 0;
		}
	}
	count(p, which == EXPIRED ? KVP_CTR_PENDING_EXPIRED : KVP_CTR_PENDING_EVICTED, n);
}

int kvp_pending_insert(struct kvp_pending *p, const struct kvp_pending_item *it, uint64_t now_ns)
{
	if (!it->id || it->id_len == 0 || it->seq_cnt > KVP_PENDING_HASH_MAX ||
		it->block_cnt > KVP_PENDING_HASH_MAX || it->session_len > KVP_PENDING_SESSION_MAX ||
		it->lora_len > KVP_PENDING_LORA_MAX)
		return KVP_ERR_INVAL;
	if (p->max == 0)
		return KVP_OK;
	drop_oldest(p, EXPIRED, now_ns, KVP_PENDING_SWEEP_MAX);
	if (kvp_pending_estimate(it) > p->bytes_max) {
		drop_oldest(p, ALL, now_ns, p->entry_cap);
		count(p, KVP_CTR_PENDING_OVERSIZE, 1);
		return KVP_OK;
	}
	struct key k = key_of(p, it->part, it->id, it->id_len);
	uint64_t words =
		(uint64_t)it->seq_cnt + it->block_cnt + (it->session_len + 7) / 8 + (it->lora_len + 7) / 8;
	struct kvp_txn_try x;
	uint32_t e;
	int rc = take(p, (words + CHUNK_WORDS - 1) / CHUNK_WORDS, &x, &e);
	if (!rc) {
		link_chunks(p, &x, e);
		fill(p, &x, e, k, it);
		rc = publish(p, e, k, now_ns);
		if (rc)
			untake(p, e);
	}
	count(p, rc ? KVP_CTR_PENDING_LOST : KVP_CTR_PENDING_INSERTED, 1);
	return rc;
}

/* ---- look, consume ---- */

static void read_body(const struct kvp_pending *p, uint32_t e, struct kvp_pending_hit *h)
{
	uint64_t b[B_WORDS];
	for (int i = 0; i < B_WORDS; i++)
		b[i] = kvp_ld_acq_u64(&body_of(p, e)[i]);
	h->worker_id = b[B_WORKER];
	h->isl_tok = b[B_ISL];
	h->prefill_tok = b[B_PREFILL];
	h->lora_hash = b[B_LORA];
	h->part = HI32(b[B_PART_RANK]);
	h->dp_rank = LO32(b[B_PART_RANK]);
	h->seq_cnt = HI32(b[B_CNTS]);
	h->block_cnt = LO32(b[B_CNTS]);
	h->session_len = HI32(b[B_SESSION]);
	h->flags = LO32(b[B_SESSION]);
	h->lora_len = HI32(b[B_EXPECTED]);
	h->expected_output_tok = LO32(b[B_EXPECTED]);
}

/* is_same: the entry of a hit is still the one that was found. */
static int is_same(const struct kvp_pending *p, const struct kvp_pending_hit *h)
{
	if (h->idx == 0 || h->idx > p->entry_cap)
		return 0;
	uint64_t w = w_entry(p, h->idx, E_STATE);
	return kvp_txn_stamp(&p->txn, w) == h->gen && kvp_ld_acq_u64(&p->txn.word[w].lo) == S_LIVE &&
	       kvp_txn_stamp(&p->txn, w) == h->gen;
}

int kvp_pending_peek(struct kvp_pending *p, uint32_t part, const char *id, size_t id_len, uint64_t now_ns,
	struct kvp_pending_hit *hit)
{
	struct kvp_txn_try x;
	if (p->max == 0 || !id || id_len == 0)
		return KVP_ERR_NOTFOUND;
	struct key k = key_of(p, part, id, id_len);
	for (int i = 0; i < TRIES; i++) {
		if (kvp_txn_begin(&p->txn, &x))
			continue;
		struct kvp_pending_hit h = {.idx = find(p, &x, k)};
		if (x.torn)
			continue;
		if (h.idx == 0)
			return KVP_ERR_NOTFOUND;
		h.inserted_ns = get(p, &x, w_entry(p, h.idx, E_TIME));
		h.gen = kvp_txn_stamp(&p->txn, w_entry(p, h.idx, E_STATE));
		read_body(p, h.idx, &h);
		if (x.torn || h.gen > x.seq || !is_same(p, &h))
			continue;
		if (is_expired(p, h.inserted_ns, now_ns))
			return KVP_ERR_NOTFOUND;
		*hit = h;
		return KVP_OK;
	}
	return KVP_ERR_AGAIN;
}

/* get_words reads n bytes; 0 = the chunks led nowhere. */
static int get_words(const struct kvp_pending *p, struct cursor *c, void *to, uint64_t n_bytes)
{
	for (uint64_t i = 0; i < n_bytes; i += 8) {
		const uint64_t *w = place(p, c);
		if (!w)
			return 0;
		uint64_t v = kvp_ld_acq_u64(w);
		if (to)
			memcpy((char *)to + i, &v, n_bytes - i < 8 ? n_bytes - i : 8);
	}
	return 1;
}

static int get_lists(const struct kvp_pending *p, const struct kvp_pending_hit *hit, uint64_t *seq,
	uint64_t *block, char *session, char *lora)
{
	if (!is_same(p, hit) || hit->seq_cnt > KVP_PENDING_HASH_MAX ||
		hit->block_cnt > KVP_PENDING_HASH_MAX || hit->session_len > KVP_PENDING_SESSION_MAX ||
		hit->lora_len > KVP_PENDING_LORA_MAX)
		return KVP_ERR_NOTFOUND;
	const struct kvp_u128 *w = p->txn.word;
	struct cursor c = {first_chunk(kvp_ld_acq_u64(&w[w_entry(p, hit->idx, E_CHUNK)].lo),
				   kvp_ld_acq_u64(&w[w_entry(p, hit->idx, E_FRESH)].lo)),
		0};
	int whole = get_words(p, &c, seq, 8ULL * hit->seq_cnt) &&
		    get_words(p, &c, block, 8ULL * hit->block_cnt) &&
		    get_words(p, &c, session, hit->session_len) && get_words(p, &c, lora, hit->lora_len);
	return whole && is_same(p, hit) ? KVP_OK : KVP_ERR_NOTFOUND;
}

int kvp_pending_lists(const struct kvp_pending *p, const struct kvp_pending_hit *hit, uint64_t *seq,
	uint64_t *block, char *session)
{
	return get_lists(p, hit, seq, block, session, NULL);
}

int kvp_pending_lora(
	const struct kvp_pending *p, const struct kvp_pending_hit *hit, char lora[KVP_PENDING_LORA_MAX])
{
	return get_lists(p, hit, NULL, NULL, NULL, lora);
}

int kvp_pending_consume(struct kvp_pending *p, const struct kvp_pending_hit *hit)
{
	struct kvp_txn_try x;
	for (int i = 0; i < TRIES; i++) {
		if (kvp_txn_begin(&p->txn, &x))
			continue;
		if (!is_same(p, hit))
			return KVP_ERR_NOTFOUND;
		drop(p, &x, hit->idx);
		/* A commit says that nothing changed since begin: the entry still was the one found. */
		if (kvp_txn_commit(&p->txn, &x, p->owner) == KVP_OK) {
			count(p, KVP_CTR_PENDING_CONSUMED, 1);
			KVP_POINT("pending:consumed");
			return KVP_OK;
		}
	}
	return KVP_ERR_AGAIN;
}

int kvp_pending_discard(struct kvp_pending *p, uint32_t part, const char *id, size_t id_len)
{
	struct kvp_txn_try x;
	if (p->max == 0 || !id || id_len == 0)
		return KVP_ERR_NOTFOUND;
	struct key k = key_of(p, part, id, id_len);
	for (int i = 0; i < TRIES; i++) {
		if (kvp_txn_begin(&p->txn, &x))
			continue;
		uint32_t e = find(p, &x, k);
		if (!e && !x.torn)
			return KVP_ERR_NOTFOUND;
		drop(p, &x, e);
		if (kvp_txn_commit(&p->txn, &x, p->owner) == KVP_OK) {
			count(p, KVP_CTR_PENDING_DISCARDED, 1);
			return KVP_OK;
		}
	}
	return KVP_ERR_AGAIN;
}

uint32_t kvp_pending_sweep_owner(struct kvp_pending *p, kvp_owner dead)
{
	struct kvp_txn_try x;
	uint32_t cnt = 0;
	kvp_txn_sweep_owner(&p->txn, dead);
	if (kvp_txn_begin(&p->txn, &x))
		return 0;
	uint64_t used = get(p, &x, G_BUMP), want = S_TAKEN | (uint64_t)dead << 8;
	for (uint64_t e = 1; e <= used && e <= p->entry_cap; e++) {
		if (kvp_ld_acq_u64(&p->txn.word[w_entry(p, e, E_STATE)].lo) != want)
			continue;
		if (kvp_txn_begin(&p->txn, &x) || get(p, &x, w_entry(p, e, E_STATE)) != want)
			continue;
		link_chunks(p, &x, e);
		cnt += untake(p, e) == KVP_OK;
		KVP_POINT("pending:swept");
	}
	return cnt;
}
