/* bench/chains.h — the data that index benchmarks store and ask for.
 *
 * Shape      equal shares of blocks in chains of 64, 512, 1024 and 4608 blocks; 16 chains share their first
 *            16 blocks; each chain has one to three holders of all of it and one or two of a part of it.
 *            Churn: chains of 16 shared and 128 own blocks, two holders each, stored first block first,
 *            removed last block first.
 * Truth, Writers, Readers, Ordering, Lifetime, Crash: functions of their arguments; no state but the
 * caller's.
 */
#ifndef KVP_BENCH_CHAINS_H
#define KVP_BENCH_CHAINS_H

#include "bench/bench.h"
#include "shm/radix.h"

#define CHAIN_KINDS 4
#define CHAIN_BLK_MAX 4608
#define CHAIN_PART 1 /* key salt of the partition */
#define CHURN_BLK 144
#define CHURN_LIVE 4000

static const uint32_t chain_blk[CHAIN_KINDS] = {64, 512, 1024, CHAIN_BLK_MAX};

/* Local hashes of the first n blocks of chain c of a kind; ext may be NULL. */
static inline void chain_make(uint32_t kind, uint64_t c, uint32_t n, uint64_t *local, uint64_t *ext)
{
	for (uint32_t i = 0; i < n; i++) {
		uint64_t who = i < 16 ? (1 + c / 16) << 8 : (c << 20) + 0x100000000000ULL;
		local[i] = bench_mix(who + ((uint64_t)kind << 56) + i);
		if (ext)
			ext[i] = bench_mix(local[i] ^ 0x55);
	}
}

static inline uint64_t chain_cnt(uint64_t blocks, uint32_t kind)
{
	return blocks / CHAIN_KINDS / chain_blk[kind] + 1;
}

/* Stores the first n blocks of a chain for a slot, first block first, batch blocks at a time. */
static inline int chain_store(struct kvp_radix_w *w, uint32_t slot, uint32_t n, uint32_t batch,
	const uint64_t *local, const uint64_t *ext)
{
	int rc = KVP_OK;
	for (uint32_t i = 0; i < n && !rc; i += batch)
		rc = kvp_radix_store(w, slot, CHAIN_PART, i ? KVP_RADIX_CHILD : KVP_RADIX_ROOT,
			i ? ext[i - 1] : 0, n - i < batch ? n - i : batch, local + i, ext + i, NULL);
	return rc;
}

/* Churn chain id: its blocks; the two holders are churn_slot(id, 0) and (id, 1). */
static inline void churn_make(uint64_t id, uint64_t local[CHURN_BLK], uint64_t ext[CHURN_BLK])
{
	for (uint32_t i = 0; i < CHURN_BLK; i++) {
		local[i] = bench_mix((i < 16 ? (id / 64) << 8 : id << 20) + i + 0x7700000000000000ULL);
		ext[i] = bench_mix(local[i] ^ 0x99);
	}
}

static inline uint32_t churn_slot(uint64_t id, uint32_t holder, uint32_t slots)
{
	return (uint32_t)((id + holder * 7) % slots);
}

static inline int churn_put(struct kvp_radix_w *w, uint64_t id, uint32_t batch, uint32_t slots)
{
	uint64_t local[CHURN_BLK], ext[CHURN_BLK];
	churn_make(id, local, ext);
	int rc = chain_store(w, churn_slot(id, 0, slots), CHURN_BLK, batch, local, ext);
	return rc ? rc : chain_store(w, churn_slot(id, 1, slots), CHURN_BLK, batch, local, ext);
}

static inline void churn_take(struct kvp_radix_w *w, uint64_t id, uint32_t batch, uint32_t slots)
{
	uint64_t local[CHURN_BLK], ext[CHURN_BLK], back[CHURN_BLK];
	churn_make(id, local, ext);
	for (uint32_t i = 0; i < CHURN_BLK; i++)
		back[i] = ext[CHURN_BLK - 1 - i];
	for (uint32_t h = 0; h < 2; h++)
		for (uint32_t i = 0; i < CHURN_BLK; i += batch)
			kvp_radix_remove(w, churn_slot(id, h, slots),
				CHURN_BLK - i < batch ? CHURN_BLK - i : batch, back + i, NULL);
}
#endif
