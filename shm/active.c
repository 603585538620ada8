#include "shm/book_priv.h"

#define LINE 4u
#define CNT_SHIFT 42
#define CNT(hi) ((uint32_t)((hi) >> CNT_SHIFT))
#define WEIGHT_MASK ((1ULL << 41) - 1)
#define WEIGHT(hi) ((hi) >> 1 & WEIGHT_MASK)
#define TENT 1ULL
#define CNT_MAX ((1u << 22) - 1)
#define VAL(cnt, weight) ((uint64_t)(cnt) << CNT_SHIFT | (weight) << 1)
/* Blocks between the first touch of a table line and its use: covers the latency of main memory. */
#define AHEAD CHUNK_KEYS

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

static uint64_t home(const struct kvp_book *b, uint64_t key)
{
	return (key & b->act_line_mask) * LINE;
}

static uint64_t place(const struct kvp_book *b, uint64_t key, uint32_t i)
{
	return (home(b, key) + i) & (b->act_line_mask * LINE + LINE - 1);
}

static uint32_t reach(const struct kvp_book *b)
{
	uint64_t n = kvp_ld_acq_u64(&b->hdr->act_reach);
	return (uint32_t)(n < KVP_ACTIVE_REACH ? n : KVP_ACTIVE_REACH) * LINE;
}

static void prefetch(const struct kvp_book *b, uint64_t key)
{
	__builtin_prefetch(&b->act[home(b, key)], 1);
}

#define ABSENT UINT32_MAX
/* Offset from home of the first entry with this key, other than skip; *free_at = first empty offset. */
static uint32_t find(const struct kvp_book *b, uint64_t key, uint32_t skip, uint32_t *free_at)
{
	uint32_t end = reach(b);
	*free_at = ABSENT;
	for (uint32_t i = 0; i < end; i++) {
		uint64_t k = kvp_ld_acq_u64(&b->act[place(b, key, i)].lo);
		if (k == key && i != skip)
			return i;
		if (k == 0 && *free_at == ABSENT)
			*free_at = i;
	}
	return ABSENT;
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

static uint64_t weight_of(uint64_t hi)
{
	return hi & TENT ? KVP_BLK_FX_ONE : WEIGHT(hi);
}

/* Takes n references off; the last one takes the weight along. An entry that moves between two places is at
 * its new one before it leaves the old one, so a miss is looked at again. */
static void sub(struct kvp_book *b, uint64_t key, uint32_t n, int64_t *delta)
{
	uint32_t none;
	for (int miss = 0; miss < 3;) {
		uint32_t i = find(b, key, ABSENT, &none);
		if (i == ABSENT) {
			miss++;
			continue;
		}
		struct kvp_u128 *p = &b->act[place(b, key, i)], old = kvp_ld_u128(p), new = { 0, 0 };
		if (old.lo != key)
			continue;
		if (CNT(old.hi) > n) {
			new.lo = key;
			new.hi = old.hi - VAL(n, 0);
		}
		if (!kvp_cas_u128(p, &old, new))
			continue;
		if (new.lo)
			return;
		/* A tentative entry has added no weight yet; its count lives on in another entry. */
		if (!(old.hi & TENT))
			*delta -= (int64_t)WEIGHT(old.hi);
		if (n == CNT(old.hi))
			return;
		n -= CNT(old.hi);
	}
}

/* Brings two entries of one key together: from's count goes to into, then from goes. 1 if from is gone. */
static int merge(struct kvp_book *b, uint64_t key, uint32_t from, uint32_t into, int64_t *delta)
{
	struct kvp_u128 *pf = &b->act[place(b, key, from)], *pi = &b->act[place(b, key, into)];
	struct kvp_u128 f = kvp_ld_u128(pf), i = kvp_ld_u128(pi);
	if (f.lo != key)
		return 1;
	if (i.lo != key)
		return 0;
	struct kvp_u128 more = { key, i.hi + VAL(CNT(f.hi), 0) }, empty = { 0, 0 };
	if (!kvp_cas_u128(pi, &i, more))
		return 0;
	KVP_POINT("book:merge");
	uint32_t moved = CNT(f.hi);
	if (kvp_cas_u128(pf, &f, empty))
		return 1;
	sub(b, key, moved, delta); /* from changed meanwhile: take back what was added */
	return 0;
}

/* A new entry is tentative until a search that began after its insertion finds no other of the same key. Of
 * two tentative ones the lower stays. The one whose own entry gets confirmed adds the weight. */
static void settle(struct kvp_book *b, uint64_t key, uint32_t mine, uint64_t nonce, uint64_t w,
	int64_t *delta)
{
	struct kvp_u128 *p = &b->act[place(b, key, mine)];
	uint32_t none;
	for (;;) {
		KVP_POINT("book:tentative");
		struct kvp_u128 me = kvp_ld_u128(p);
		if (me.lo != key || !(me.hi & TENT) || WEIGHT(me.hi) != nonce)
			return; /* another process took my count over */
		uint32_t other = find(b, key, mine, &none);
		if (other == ABSENT) {
			struct kvp_u128 sure = { key, VAL(CNT(me.hi), w) };
			if (!kvp_cas_u128(p, &me, sure))
				continue;
			*delta += (int64_t)w;
			return;
		}
		uint64_t hi = kvp_ld_acq_u64(&b->act[place(b, key, other)].hi);
		if (!(hi & TENT) || other < mine) {
			if (merge(b, key, mine, other, delta))
				return;
		} else {
			merge(b, key, other, mine, delta);
		}
	}
}

static int add(struct kvp_book *b, uint64_t key, uint64_t w, int64_t *delta)
{
	for (;;) {
		uint32_t end = reach(b), empty, i = find(b, key, ABSENT, &empty);
		if (i != ABSENT) {
			struct kvp_u128 *p = &b->act[place(b, key, i)], old = kvp_ld_u128(p);
			if (old.lo != key)
				continue;
			if (CNT(old.hi) == CNT_MAX)
				return KVP_ERR_FULL;
			struct kvp_u128 new = { key, old.hi + VAL(1, 0) };
			if (kvp_cas_u128(p, &old, new))
				return KVP_OK;
			continue;
		}
		if (empty == ABSENT) {
			if (reach_more(b, end))
				continue;
			return KVP_ERR_FULL;
		}
		uint64_t nonce = b->nonce++ & WEIGHT_MASK;
		struct kvp_u128 old = { 0, 0 }, new = { key, VAL(1, nonce) | TENT };
		KVP_POINT("book:insert");
		if (!kvp_cas_u128(&b->act[place(b, key, empty)], &old, new))
			continue;
		settle(b, key, empty, nonce, w, delta);
		return KVP_OK;
	}
}

uint32_t book_peek(const struct kvp_book *b, uint64_t key, uint64_t *weight)
{
	uint32_t none, i = find(b, key, ABSENT, &none);
	if (i == ABSENT)
		return 0;
	struct kvp_u128 v = kvp_ld_u128(&b->act[place(b, key, i)]);
	if (v.lo != key)
		return 0;
	if (weight)
		*weight = weight_of(v.hi);
	return CNT(v.hi);
}

/* The keys of one chunk in the domain, their table lines on the way. 0 past the end of the chain. */
static uint32_t load_keys(const struct kvp_book *b, uint32_t chunk, uint32_t cnt, struct book_dom dom,
	uint64_t *k)
{
	if (chunk == 0 || chunk >= b->chunk_cnt)
		return 0;
	const uint64_t *src = &b->key[(uint64_t)chunk * CHUNK_KEYS];
	for (uint32_t i = 0; i < cnt; i++) {
		k[i] = book_key(dom, kvp_ld_rlx_u64(&src[i]));
		prefetch(b, k[i]);
	}
	return cnt;
}

static uint32_t next_of(const struct kvp_book *b, uint32_t chunk)
{
	return chunk && chunk < b->chunk_cnt ? kvp_ld_rlx_u32(&b->chunk[chunk].next) : 0;
}

static uint32_t prev_of(const struct kvp_book *b, uint32_t chunk)
{
	return chunk && chunk < b->chunk_cnt ? kvp_ld_rlx_u32(&b->chunk[chunk].prev) : 0;
}

/* A walk over the chunks of a reservation, one chunk of keys ahead of the one in hand. */
struct walk {
	uint64_t k[2][AHEAD];
	uint32_t cnt[2], left, chunk, half;
	struct book_dom dom;
};

static void walk_fetch(const struct kvp_book *b, struct walk *w, uint32_t want)
{
	w->cnt[w->half] = load_keys(b, w->chunk, want, w->dom, w->k[w->half]);
	w->left = w->cnt[w->half] ? w->left - want : 0;
}

static void walk_up_start(const struct kvp_book *b, struct walk *w, uint32_t idx, struct book_dom dom)
{
	w->dom = dom;
	w->half = 0;
	w->left = kvp_ld_rlx_u32(&b->resv[idx].seq_cnt);
	w->chunk = kvp_ld_rlx_u32(&b->resv[idx].chunk_first);
	walk_fetch(b, w, w->left < CHUNK_KEYS ? w->left : CHUNK_KEYS);
}

/* The keys in hand after this call: w->k[ret], w->cnt[ret] of them; the next chunk is being fetched. */
static uint32_t walk_up_next(const struct kvp_book *b, struct walk *w)
{
	uint32_t hand = w->half;
	w->half ^= 1;
	w->chunk = next_of(b, w->chunk);
	walk_fetch(b, w, w->left < CHUNK_KEYS ? w->left : CHUNK_KEYS);
	return hand;
}

int book_ref(struct kvp_book *b, uint32_t idx, struct book_dom dom, int64_t *delta, uint32_t *done)
{
	struct walk w;
	*done = 0;
	walk_up_start(b, &w, idx, dom);
	while (w.cnt[w.half]) {
		uint32_t hand = walk_up_next(b, &w);
		for (uint32_t i = 0; i < w.cnt[hand]; i++) {
			if (add(b, w.k[hand][i], KVP_BLK_FX_ONE, delta))
				return KVP_ERR_FULL;
			KVP_POINT("book:ref");
			++*done;
		}
	}
	return KVP_OK;
}

/* Copies the key array of idx to private memory: a close may take the chunks away at any moment. */
static uint32_t keys_copy(struct kvp_book *b, uint32_t idx)
{
	uint32_t left = kvp_ld_rlx_u32(&b->resv[idx].seq_cnt), cnt = 0;
	uint32_t chunk = kvp_ld_rlx_u32(&b->resv[idx].chunk_first);
	if (left > KVP_RESV_SEQ_MAX || !book_scratch(b, left))
		return 0;
	for (; left && chunk && chunk < b->chunk_cnt; chunk = next_of(b, chunk)) {
		uint32_t n = left < CHUNK_KEYS ? left : CHUNK_KEYS;
		for (uint32_t i = 0; i < n; i++)
			b->scratch[cnt++] = kvp_ld_rlx_u64(&b->key[(uint64_t)chunk * CHUNK_KEYS + i]);
		left -= n;
	}
	return left ? 0 : cnt;
}

int book_count(struct kvp_book *b, uint32_t idx, struct book_dom dom, struct book_dom old, int64_t *delta,
	uint32_t *cnt)
{
	int rc = KVP_OK;
	*cnt = keys_copy(b, idx);
	if (*cnt != kvp_ld_rlx_u32(&b->resv[idx].seq_cnt))
		rc = KVP_ERR_FULL;
	for (uint32_t i = 0; i < *cnt; i++) {
		uint64_t w = KVP_BLK_FX_ONE;
		book_peek(b, book_key(old, b->scratch[i]), &w);
		if (add(b, book_key(dom, b->scratch[i]), w, delta))
			rc = KVP_ERR_FULL;
	}
	return rc;
}

void book_unref(struct kvp_book *b, uint32_t idx, struct book_dom dom, uint32_t cnt, int64_t *delta)
{
	uint32_t total = kvp_ld_rlx_u32(&b->resv[idx].seq_cnt), pos = total;
	struct walk w = { .dom = dom, .left = total, .chunk = kvp_ld_rlx_u32(&b->resv[idx].chunk_last) };
	walk_fetch(b, &w, total ? (total - 1) % CHUNK_KEYS + 1 : 0);
	while (w.cnt[w.half]) {
		uint32_t hand = w.half;
		w.half ^= 1;
		w.chunk = prev_of(b, w.chunk);
		walk_fetch(b, &w, w.left < CHUNK_KEYS ? w.left : CHUNK_KEYS);
		for (uint32_t i = w.cnt[hand]; i-- > 0;) {
			if (--pos >= cnt)
				continue;
			sub(b, w.k[hand][i], 1, delta);
			KVP_POINT("book:unref");
		}
	}
}

/* 1: weight set, go on towards the root; 0: somebody else holds the block too. */
static int set_weight(struct kvp_book *b, uint64_t key, uint64_t frac_fx, int64_t *delta)
{
	uint32_t none;
	for (;;) {
		uint32_t i = find(b, key, ABSENT, &none);
		if (i == ABSENT)
			return 0;
		struct kvp_u128 *p = &b->act[place(b, key, i)], old = kvp_ld_u128(p);
		if (old.lo != key)
			continue;
		if (CNT(old.hi) != 1 || (old.hi & TENT))
			return 0;
		struct kvp_u128 new = { key, VAL(1, frac_fx) };
		if (!kvp_cas_u128(p, &old, new))
			continue;
		*delta += (int64_t)frac_fx - (int64_t)WEIGHT(old.hi);
		return 1;
	}
}

void book_frac(struct kvp_book *b, uint32_t idx, struct book_dom dom, uint64_t frac_fx, int64_t *delta)
{
	uint32_t left = kvp_ld_rlx_u32(&b->resv[idx].seq_cnt);
	uint32_t chunk = kvp_ld_rlx_u32(&b->resv[idx].chunk_last);
	for (; left && chunk && chunk < b->chunk_cnt; chunk = prev_of(b, chunk)) {
		uint32_t n = (left - 1) % CHUNK_KEYS + 1;
		uint64_t k[CHUNK_KEYS];
		load_keys(b, chunk, n, dom, k);
		for (uint32_t i = n; i-- > 0;) {
			if (!set_weight(b, k[i], frac_fx, delta))
				return;
			KVP_POINT("book:frac");
		}
		left -= n;
	}
}

static void purge(struct kvp_book *b, uint64_t key, enum book_purge_what what)
{
	uint32_t none, i;
	while ((i = find(b, key, ABSENT, &none)) != ABSENT) {
		struct kvp_u128 *p = &b->act[place(b, key, i)], old = kvp_ld_u128(p), empty = { 0, 0 };
		if (old.lo != key)
			continue;
		if (what == PURGE_WHOLE && weight_of(old.hi) != KVP_BLK_FX_ONE)
			return;
		kvp_cas_u128(p, &old, empty);
	}
}

void book_uncount(struct kvp_book *b, struct book_dom dom, uint32_t cnt)
{
	for (uint32_t i = 0; i < cnt; i++)
		purge(b, book_key(dom, b->scratch[i]), PURGE_ALL);
}

void book_purge(struct kvp_book *b, uint32_t idx, uint32_t rank, uint32_t epoch_last, uint32_t epochs,
	enum book_purge_what what)
{
	for (uint32_t ep = 0; ep < epochs; ep++) {
		struct walk w;
		walk_up_start(b, &w, idx, book_dom(b, rank, (epoch_last - ep) & 0xfffffu));
		while (w.cnt[w.half]) {
			uint32_t hand = walk_up_next(b, &w);
			for (uint32_t i = 0; i < w.cnt[hand]; i++)
				purge(b, w.k[hand][i], what);
			KVP_POINT("book:purge");
		}
	}
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
	/* lo blocks are known to be live, block hi is known not to be (or does not exist) */
	uint32_t lo = 0, hi = 1;
	while (hi <= n && book_peek(b, book_key(dom, seq[hi - 1]), NULL)) {
		lo = hi;
		hi = hi > n / 2 ? n + (hi == n) : hi * 2;
	}
	if (hi > n)
		hi = n + 1;
	while (hi - lo > 1) {
		uint32_t mid = lo + (hi - lo) / 2;
		if (book_peek(b, book_key(dom, seq[mid - 1]), NULL))
			lo = mid;
		else
			hi = mid;
	}
	return lo;
}
