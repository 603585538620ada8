/* tests/t_collide.c — hashes and ids that somebody chose so that they would meet in a table which places
 * them by a multiplication: what is counted is the places looked at, which may not grow with their square. */
#include <stdlib.h>

#include "daemons/indexer/held.c"
#include "ipc/kv_event.h"
#include "shm/catalogue_priv.h"
#include "shm/memo.h"
#include "shm/radix_priv.h"
#include "tests/procs.h"
#include "tests/radix_model.h"
#include "tests/tap.h"

#define GOLDEN 0x9e3779b97f4a7c15ull
#define CNT 30000u

static uint64_t hash[CNT];

/* The number that times a (odd) is 1. */
static uint64_t inverse(uint64_t a)
{
	uint64_t x = a;
	for (int i = 0; i < 6; i++)
		x *= 2 - a * x;
	return x;
}

/* hash[i] * a = i + 1: bits from 32 on are the same for all. */
static void choose(uint64_t a)
{
	for (uint32_t i = 0; i < CNT; i++)
		hash[i] = inverse(a) * (i + 1);
}

/* Numbers that differ in few bits. */
static void choose_spread(uint32_t shift)
{
	for (uint32_t i = 0; i < CNT; i++)
		hash[i] = (uint64_t)(i + 1) << shift;
}

static struct kvp_kv_event event(enum kvp_kv_kind kind, const uint32_t *tok, const char *salt)
{
	return (struct kvp_kv_event){.kind = kind,
		.hash = hash,
		.hash_cnt = CNT,
		.tok = tok,
		.tok_cnt = tok ? CNT : 0,
		.block_size = 1,
		.salt = {salt, salt ? 1 : 0}};
}

static void listener(const char *how)
{
	static uint32_t tok[CNT];
	struct kvp_kv_norm *n = kvp_kv_norm_new(1);
	struct kvp_kv_event ev = event(KVP_KV_STORED, tok, NULL);
	struct kvp_kv_op op;
	ok(kvp_kv_normalise(n, &ev, 0, &op) == KVP_KV_REASON_OK, "%s: stored", how);
	ok(kvp_kv_norm_probes(n) < 4ull * CNT, "%s: looked for twins at %llu places", how,
		(unsigned long long)kvp_kv_norm_probes(n));
	ev = event(KVP_KV_STORED, tok, "s");
	ok(kvp_kv_normalise(n, &ev, 0, &op) == KVP_KV_REASON_OK, "%s: stored under a salt", how);
	ev = event(KVP_KV_REMOVED, NULL, NULL);
	ok(kvp_kv_normalise(n, &ev, 0, &op) == KVP_KV_REASON_OK && !kvp_kv_norm_remembered(n),
		"%s: and removed", how);
	ok(kvp_kv_norm_probes(n) < 16ull * CNT, "%s: remembered and forgotten at %llu places", how,
		(unsigned long long)kvp_kv_norm_probes(n));
	kvp_kv_norm_free(n);
}

static void memo(const char *how)
{
	static const struct kvp_geom geom = {.rank_max = 4, .block_max = 100000, .region_gen = 3};
	void *mem = shared(kvp_memo_footprint(&geom));
	struct kvp_memo m;
	uint32_t lost, wrong = kvp_memo_new(mem, &geom) || kvp_memo_join(mem, &geom, &m);
	for (uint32_t i = 0; !wrong && i < CNT; i++) {
		struct kvp_memo_note note = {hash[i], {1, 2}, 0, 1};
		wrong += kvp_memo_put(&m, 1, &note, 1, &lost) != KVP_OK;
	}
	ok(!wrong && kvp_memo_cnt(&m, 1) == CNT && m.steps < 2ull * CNT, "%s: memo passed by %llu notes", how,
		(unsigned long long)m.steps);
	kvp_memo_leave(&m);
	munmap(mem, kvp_memo_footprint(&geom));
}

static void held(const char *how)
{
	struct kvp_held *h = kvp_held_new(1 << 20);
	const struct kvp_held_key key = {0, 16, "m:g", 3};
	uint64_t wrong = 0;
	for (uint32_t i = 0; i < KVP_HELD_RANKS; i++) {
		struct {
			struct kvp_recov_rec rec;
			uint64_t word[4];
		} r = {{.op = KVP_RECOV_STORE, .worker_id = hash[i], .n = 1}, {1, 2}};
		wrong += kvp_held_put(h, &key, &r.rec) != KVP_OK;
	}
	is_u64(wrong, 0, "%s: held", how);
	is_u64(kvp_held_ranks(h), KVP_HELD_RANKS, "%s: as many ranks as there may be", how);
	ok(kvp_held_steps(h) < 8ull * KVP_HELD_RANKS, "%s: held passed by %llu ranks", how,
		(unsigned long long)kvp_held_steps(h));
	kvp_held_free(h);
}

static void radix(const char *how)
{
	static const struct kvp_geom geom = {.slot_max = 8,
		.rank_max = 64,
		.index_rank_max = 256,
		.block_max = 100000,
		.region_gen = 7,
		.salt = {1, 2}};
	static uint64_t local[CNT];
	struct seg seg;
	struct kvp_radix_w *w;
	uint32_t stored = 0;
	for (uint32_t i = 0; i < CNT; i++)
		local[i] = i + 77;
	if (seg_new(&seg, &geom) ||
		kvp_radix_w_open(seg.pub, seg.priv, &geom, KVP_RADIX_RECOVER, NULL, &w, NULL)) {
		ok(0, "%s: tree", how);
		return;
	}
	int rc = kvp_radix_store(w, 3, 5, KVP_RADIX_ROOT, 0, CNT, local, hash, &stored);
	ok(rc == KVP_OK && stored == CNT, "%s: in the tree", how);
	ok(w->dup_steps < 1ull * CNT, "%s: tree passed by %llu places", how,
		(unsigned long long)w->dup_steps);
	kvp_radix_w_close(w);
	munmap(seg.pub, seg.pub_bytes);
	munmap(seg.priv, seg.priv_bytes);
}

/* Workers of one bucket, of as many as there are. */
static void catalogue(const char *how)
{
	struct kvp_cat_shm shm = {.salt = {3, 4}};
	struct kvp_cat cat = {.shm = &shm, .bucket_mask = 16383};
	static uint32_t in[16384];
	uint32_t most = 0;
	memset(in, 0, sizeof(in));
	for (uint32_t i = 0; i < 16384; i++) {
		uint32_t *n = &in[kvp_cat_bucket(&cat, hash[i])];
		most = ++*n > most ? *n : most;
	}
	ok(most < 20, "%s: at most %u workers share a bucket", how, most);
}

static void all(const char *how)
{
	listener(how);
	memo(how);
	held(how);
	radix(how);
	catalogue(how);
}

int main(void)
{
	static const uint64_t factor[] = {GOLDEN, 0xff51afd7ed558ccdull};
	static const uint32_t shift[] = {0, 20, 40, 49};
	char how[64];
	for (size_t i = 0; i < sizeof(factor) / sizeof(factor[0]); i++) {
		choose(factor[i]);
		snprintf(how, sizeof(how), "chosen for %llx", (unsigned long long)factor[i]);
		all(how);
	}
	for (size_t i = 0; i < sizeof(shift) / sizeof(shift[0]); i++) {
		choose_spread(shift[i]);
		snprintf(how, sizeof(how), "numbers << %u", shift[i]);
		all(how);
	}
	return done();
}
