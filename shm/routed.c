#include "shm/routed.h"

#include <kvpick/hash.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define BUCKETS_MIN_LOG2 10
#define BATCH 256    /* blocks taken out of the tree at once */
#define AHEAD 16     /* blocks whose table places are fetched ahead */
#define NOTHING_DUE UINT64_MAX

/* Entries 0..slot_max are the ends of the lists: one a slot, the last for what was forgotten. */
struct entry {
	uint64_t ext;
	uint64_t at_ns;
	uint32_t prev, next; /* in the list; next: also the next free entry */
	uint32_t chain;	     /* next entry of the bucket, 0 = none */
	uint16_t slot, epoch; /* epoch: of the slot when it was made; forgotten ones are never found */
};

struct kvp_routed {
	struct kvp_routed_cfg cfg;
	struct kvp_radix_w *w;
	struct entry *entry;
	uint32_t *bucket; /* first entry, 0 = none */
	uint64_t entry_bytes, bucket_bytes;
	uint32_t first;	 /* first entry that is not the end of a list */
	uint32_t bump;	 /* first entry that was never used */
	uint32_t end;	 /* behind the last one */
	uint32_t free;	 /* 0 = none */
	uint32_t cnt;	 /* entries in use, forgotten ones included */
	uint32_t log2, split; /* buckets 0..2^log2 + split - 1 exist */
	uint32_t slots_used;  /* slots from here on never had entries */
	uint64_t due_ns;      /* nothing ends before */
	uint32_t *slot_cnt;
	uint16_t *epoch;
	uint64_t *ext;	/* sequence hashes of the path at hand */
	uint32_t *found; /* its entries, 0 = none */
};

/* ---- table: linear hashing, so that no insert pays for a whole new table ---- */

static uint64_t mix(const struct kvp_routed *t, uint64_t ext, uint32_t slot, uint32_t epoch)
{
	unsigned __int128 p = (unsigned __int128)(ext ^ t->cfg.salt) *
			      (((uint64_t)slot << 32 | epoch << 8 | 0x9bull) * 0x9e3779b97f4a7c15ull);
	return (uint64_t)p ^ (uint64_t)(p >> 64);
}

static uint32_t *place(const struct kvp_routed *t, uint64_t hash)
{
	uint64_t at = hash & ((1ull << t->log2) - 1);
	if (at < t->split)
		at = hash & ((2ull << t->log2) - 1);
	return &t->bucket[at];
}

static uint64_t hash_of(const struct kvp_routed *t, const struct entry *e)
{
	return mix(t, e->ext, e->slot, e->epoch);
}

static uint32_t look_up(const struct kvp_routed *t, uint32_t slot, uint64_t ext)
{
	uint32_t i = *place(t, mix(t, ext, slot, t->epoch[slot]));
	while (i && (t->entry[i].ext != ext || t->entry[i].slot != slot ||
			    t->entry[i].epoch != t->epoch[slot]))
		i = t->entry[i].chain;
	return i;
}

static void split_one(struct kvp_routed *t)
{
	uint32_t low = t->split, i = t->bucket[low];
	uint64_t bit = 1ull << t->log2, high = bit + low;
	t->bucket[low] = 0;
	if (low + AHEAD < 1u << t->log2)
		__builtin_prefetch(&t->entry[t->bucket[low + AHEAD]]);
	if (++t->split == 1u << t->log2) {
		t->log2++;
		t->split = 0;
	}
	while (i) {
		uint32_t next = t->entry[i].chain;
		uint32_t *at = &t->bucket[hash_of(t, &t->entry[i]) & bit ? high : low];
		t->entry[i].chain = *at;
		*at = i;
		i = next;
	}
}

static uint64_t bucket_cnt(const struct kvp_routed *t)
{
	return (1ull << t->log2) + t->split;
}

/* ---- lists ---- */

static void unlink_entry(struct kvp_routed *t, uint32_t i)
{
	struct entry *e = &t->entry[i];
	t->entry[e->prev].next = e->next;
	t->entry[e->next].prev = e->prev;
}

static void link_last(struct kvp_routed *t, uint32_t list, uint32_t i)
{
	struct entry *e = &t->entry[i], *l = &t->entry[list];
	e->prev = l->prev;
	e->next = list;
	t->entry[l->prev].next = i;
	l->prev = i;
}

static void note_due(struct kvp_routed *t, uint64_t at_ns)
{
	uint64_t due = at_ns > UINT64_MAX - t->cfg.ttl_ns ? NOTHING_DUE : at_ns + t->cfg.ttl_ns;
	if (t->cfg.policy == KVP_ROUTED_TTL && due < t->due_ns)
		t->due_ns = due;
}

/* There is room: the caller saw to it. */
static void insert(struct kvp_routed *t, uint32_t slot, uint64_t ext, uint64_t now_ns)
{
	uint32_t i = t->free;
	if (i)
		t->free = t->entry[i].next;
	else
		i = t->bump++;
	t->entry[i] = (struct entry){
		.ext = ext, .at_ns = now_ns, .slot = (uint16_t)slot, .epoch = t->epoch[slot]};
	if (t->cnt++ >= bucket_cnt(t))
		split_one(t);
	uint32_t *at = place(t, hash_of(t, &t->entry[i]));
	t->entry[i].chain = *at;
	*at = i;
	link_last(t, slot, i);
	t->slot_cnt[slot]++;
	if (slot >= t->slots_used)
		t->slots_used = slot + 1;
	note_due(t, now_ns);
}

static void drop(struct kvp_routed *t, uint32_t i)
{
	struct entry *e = &t->entry[i];
	uint32_t *at = place(t, hash_of(t, e));
	while (*at != i)
		at = &t->entry[*at].chain;
	*at = e->chain;
	unlink_entry(t, i);
	t->slot_cnt[e->slot] -= e->epoch == t->epoch[e->slot];
	e->next = t->free;
	t->free = i;
	t->cnt--;
}

static uint32_t room(const struct kvp_routed *t)
{
	return t->end - t->first - t->cnt;
}

/* ---- ends ---- */

static void count(struct kvp_routed *t, enum kvp_ctr id, uint64_t n)
{
	if (t->cfg.ctr && n)
		kvp_ctr_add(t->cfg.ctr, id, n);
}

/* Ends up to max of a slot's oldest blocks, of those recorded at before_ns or earlier. */
static uint32_t end_oldest(struct kvp_routed *t, uint32_t slot, uint32_t max, uint64_t before_ns)
{
	uint64_t ext[BATCH];
	uint32_t done = 0, n;
	do {
		for (n = 0; n < BATCH && done + n < max; n++) {
			uint32_t i = t->entry[slot].next;
			if (i == slot || t->entry[i].at_ns > before_ns)
				break;
			ext[n] = t->entry[i].ext;
			drop(t, i);
		}
		if (n)
			kvp_radix_remove(t->w, slot, n, ext, NULL);
		done += n;
	} while (n == BATCH);
	return done;
}

static uint32_t free_forgotten(struct kvp_routed *t, uint32_t max)
{
	uint32_t list = t->cfg.slot_max, n = 0;
	for (; n < max && t->entry[list].next != list; n++)
		drop(t, t->entry[list].next);
	return n;
}

static uint32_t oldest_slot(const struct kvp_routed *t)
{
	uint32_t best = t->cfg.slot_max;
	uint64_t best_ns = UINT64_MAX;
	for (uint32_t s = 0; s < t->slots_used; s++) {
		uint32_t i = t->entry[s].next;
		if (i == s || (best < t->cfg.slot_max && t->entry[i].at_ns >= best_ns))
			continue;
		best = s;
		best_ns = t->entry[i].at_ns;
	}
	return best;
}

/* Ends the n oldest blocks of all slots, roughly: a slot at a time. */
static void prune(struct kvp_routed *t, uint32_t n)
{
	uint32_t freed = free_forgotten(t, n), slot;
	while (freed < n && (slot = oldest_slot(t)) < t->cfg.slot_max) {
		uint32_t want = n - freed < BATCH ? n - freed : BATCH;
		uint32_t done = end_oldest(t, slot, want, UINT64_MAX);
		count(t, KVP_CTR_ROUTED_PRUNED, done);
		freed += done;
	}
}

/* ---- record ---- */

static void find_all(struct kvp_routed *t, uint32_t slot, uint32_t n)
{
	for (uint32_t i = 0; i < n; i++) {
		if (i + AHEAD < n)
			__builtin_prefetch(place(t, mix(t, t->ext[i + AHEAD], slot, t->epoch[slot])));
		if (i + AHEAD / 2 < n) {
			uint32_t e = *place(t, mix(t, t->ext[i + AHEAD / 2], slot, t->epoch[slot]));
			__builtin_prefetch(&t->entry[e]);
		}
		t->found[i] = look_up(t, slot, t->ext[i]);
	}
}

/* Stores the blocks behind those that are held; *held = blocks held, from the start. */
static int store(struct kvp_routed *t, uint32_t slot, uint64_t part_salt, uint32_t n, const uint64_t *local,
	uint32_t *held)
{
	uint32_t k = 0, stored = 0;
	while (k < n && t->found[k])
		k++;
	*held = k;
	if (k == n)
		return KVP_OK;
	int rc = KVP_ERR_NOTFOUND;
	if (k)
		rc = kvp_radix_store(t->w, slot, part_salt, KVP_RADIX_CHILD, t->ext[k - 1], n - k, local + k,
			t->ext + k, &stored);
	/* At the root, or the tree has forgotten a parent for lack of records. */
	if (rc == KVP_ERR_NOTFOUND) {
		k = 0;
		rc = kvp_radix_store(t->w, slot, part_salt, KVP_RADIX_ROOT, 0, n, local, t->ext, &stored);
	}
	*held = k + stored;
	return rc;
}

static void touch(struct kvp_routed *t, uint32_t slot, uint32_t n, uint64_t now_ns)
{
	uint64_t fresh = 0;
	for (uint32_t i = n; i-- > 0;) {
		uint32_t e = t->found[i];
		if (!e) {
			insert(t, slot, t->ext[i], now_ns);
			fresh++;
			continue;
		}
		unlink_entry(t, e);
		link_last(t, slot, e);
		t->entry[e].at_ns = now_ns;
	}
	count(t, KVP_CTR_ROUTED_STORED, fresh);
	count(t, KVP_CTR_ROUTED_REFRESHED, n - fresh);
}

static uint32_t least(uint64_t a, uint64_t b)
{
	return (uint32_t)(a < b ? a : b);
}

uint32_t kvp_routed_record(struct kvp_routed *t, uint32_t slot, uint64_t part_salt, uint32_t n,
	const uint64_t *local, uint64_t limit_blk, uint64_t now_ns)
{
	uint32_t asked = n, entry_max = t->end - t->first, held = 0;
	uint64_t limit = t->cfg.policy == KVP_ROUTED_LRU && limit_blk ? limit_blk : entry_max;
	if (slot >= t->cfg.slot_max)
		return 0;
	n = least(n, least(least(KVP_ROUTED_BLK_MAX, entry_max), limit));
	kvp_hash_chain(NULL, local, n, t->ext);
	/* Twice only when the tree is full. */
	for (int i = 0; i < 2; i++) {
		if (room(t) < n)
			prune(t, n - room(t));
		find_all(t, slot, n);
		int rc = store(t, slot, part_salt, n, local, &held);
		touch(t, slot, held, now_ns);
		if (rc != KVP_ERR_FULL || i)
			break;
		prune(t, n < BATCH ? BATCH : n);
	}
	/* A limit that was lowered takes effect over several bookings. */
	if (t->slot_cnt[slot] > limit)
		count(t, KVP_CTR_ROUTED_EVICTED,
			end_oldest(t, slot, least(t->slot_cnt[slot] - limit, n + 4 * BATCH), UINT64_MAX));
	count(t, KVP_CTR_ROUTED_OK, 1);
	count(t, KVP_CTR_ROUTED_CUT, asked - held);
	return held;
}

void kvp_routed_forget(struct kvp_routed *t, uint32_t slot)
{
	if (slot >= t->cfg.slot_max)
		return;
	struct entry *l = &t->entry[slot], *gone = &t->entry[t->cfg.slot_max];
	t->epoch[slot]++;
	t->slot_cnt[slot] = 0;
	if (l->next == slot)
		return;
	t->entry[l->next].prev = gone->prev;
	t->entry[gone->prev].next = l->next;
	t->entry[l->prev].next = t->cfg.slot_max;
	gone->prev = l->prev;
	l->next = l->prev = slot;
}

uint32_t kvp_routed_tend(struct kvp_routed *t, uint64_t now_ns, uint32_t budget)
{
	uint32_t done = free_forgotten(t, budget);
	if (now_ns < t->due_ns || t->cfg.policy != KVP_ROUTED_TTL || now_ns < t->cfg.ttl_ns)
		return done;
	uint32_t ended = 0;
	for (uint32_t s = 0; s < t->slots_used && done + ended < budget; s++)
		ended += end_oldest(t, s, budget - done - ended, now_ns - t->cfg.ttl_ns);
	count(t, KVP_CTR_ROUTED_EXPIRED, ended);
	if (done + ended >= budget)
		return done + ended; /* there may be more */
	t->due_ns = NOTHING_DUE;
	for (uint32_t s = 0; s < t->slots_used; s++)
		if (t->entry[s].next != s)
			note_due(t, t->entry[t->entry[s].next].at_ns);
	return done + ended;
}

/* ---- after a restart ---- */

struct recover {
	struct kvp_routed *t;
	const uint8_t *owned;
	uint64_t now_ns;
};

static void recover_some(void *ctx, uint32_t slot, uint32_t n, const uint64_t *ext)
{
	const struct recover *r = ctx;
	for (uint32_t i = n; r->owned[slot] && i-- > 0 && room(r->t);)
		insert(r->t, slot, ext[i], r->now_ns);
}

uint64_t kvp_routed_recover(struct kvp_routed *t, const uint8_t *owned, uint64_t now_ns)
{
	struct recover r = {.t = t, .owned = owned, .now_ns = now_ns};
	kvp_radix_w_each(t->w, recover_some, &r);
	for (uint32_t s = 0; s < t->cfg.slot_max; s++)
		if (owned[s] && t->slot_cnt[s] != kvp_radix_w_blocks(t->w, s)) {
			kvp_routed_forget(t, s); /* blocks without an entry would never end */
			kvp_radix_clear(t->w, s);
		}
	return t->cnt;
}

uint64_t kvp_routed_cnt(const struct kvp_routed *t, uint32_t slot)
{
	return slot == KVP_RADIX_SLOT_ALL ? t->cnt : slot < t->cfg.slot_max ? t->slot_cnt[slot] : 0;
}

/* ---- life ---- */

static void *memory(uint64_t bytes)
{
	void *p = mmap(
		NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	return p == MAP_FAILED ? NULL : p;
}

int kvp_routed_open(struct kvp_radix_w *w, const struct kvp_routed_cfg *cfg, struct kvp_routed **out)
{
	if (!cfg->slot_max || cfg->slot_max > KVP_RADIX_SLOT_MAX || !cfg->entry_max ||
		cfg->entry_max > 1u << 31)
		return KVP_ERR_INVAL;
	struct kvp_routed *t = calloc(1, sizeof(*t));
	if (!t)
		return KVP_ERR_SYS;
	t->cfg = *cfg;
	t->w = w;
	t->first = t->bump = cfg->slot_max + 1;
	t->end = t->first + (uint32_t)cfg->entry_max;
	t->log2 = BUCKETS_MIN_LOG2;
	t->due_ns = NOTHING_DUE;
	t->entry_bytes = (uint64_t)t->end * sizeof(*t->entry);
	t->bucket_bytes = (cfg->entry_max + (1u << BUCKETS_MIN_LOG2) + 1) * sizeof(*t->bucket);
	t->entry = memory(t->entry_bytes);
	t->bucket = memory(t->bucket_bytes);
	t->slot_cnt = calloc(cfg->slot_max, sizeof(*t->slot_cnt));
	t->epoch = calloc(cfg->slot_max, sizeof(*t->epoch));
	t->ext = malloc(KVP_ROUTED_BLK_MAX * sizeof(*t->ext));
	t->found = malloc(KVP_ROUTED_BLK_MAX * sizeof(*t->found));
	if (!t->entry || !t->bucket || !t->slot_cnt || !t->epoch || !t->ext || !t->found) {
		kvp_routed_close(t);
		return KVP_ERR_SYS;
	}
	for (uint32_t i = 0; i <= cfg->slot_max; i++)
		t->entry[i].prev = t->entry[i].next = i;
	*out = t;
	return KVP_OK;
}

void kvp_routed_close(struct kvp_routed *t)
{
	if (!t)
		return;
	if (t->entry)
		munmap(t->entry, t->entry_bytes);
	if (t->bucket)
		munmap(t->bucket, t->bucket_bytes);
	free(t->slot_cnt);
	free(t->epoch);
	free(t->ext);
	free(t->found);
	free(t);
}

/* ---- check ---- */

static void fault(uint64_t *n, const char *what, uint64_t where)
{
	if (++*n <= 10)
		fprintf(stderr, "routed.check fault=\"%s\" at=%llu\n", what, (unsigned long long)where);
}

static uint64_t check_list(const struct kvp_routed *t, uint32_t list, uint64_t *n)
{
	uint64_t cnt = 0, last_ns = 0;
	for (uint32_t i = t->entry[list].next; i != list && cnt <= t->cnt; i = t->entry[i].next, cnt++) {
		const struct entry *e = &t->entry[i];
		if (t->entry[e->next].prev != i)
			fault(n, "list is broken", i);
		if (list == t->cfg.slot_max)
			continue;
		if (e->slot != list || e->epoch != t->epoch[list])
			fault(n, "entry in another slot's list", i);
		if (e->at_ns < last_ns)
			fault(n, "entries out of order", i);
		if (look_up(t, e->slot, e->ext) != i)
			fault(n, "entry is not found", i);
		last_ns = e->at_ns;
	}
	return cnt;
}

uint64_t kvp_routed_check(const struct kvp_routed *t)
{
	uint64_t n = 0, sum = check_list(t, t->cfg.slot_max, &n), chained = 0;
	for (uint32_t s = 0; s < t->cfg.slot_max; s++) {
		uint64_t cnt = check_list(t, s, &n);
		if (cnt != t->slot_cnt[s])
			fault(&n, "entries of a slot differ from their count", s);
		if (cnt != kvp_radix_w_blocks(t->w, s))
			fault(&n, "entries of a slot differ from its blocks", s);
		sum += cnt;
	}
	for (uint64_t b = 0; b < bucket_cnt(t); b++)
		for (uint32_t i = t->bucket[b]; i && chained <= t->cnt; i = t->entry[i].chain)
			chained++;
	if (sum != t->cnt || chained != t->cnt)
		fault(&n, "entries differ from their count", sum);
	return n;
}
