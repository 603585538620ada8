/* shm/pending_priv.h — layout of the pending-selection cache, shared by pending.c and pending_check.c. */
#ifndef KVP_SHM_PENDING_PRIV_H
#define KVP_SHM_PENDING_PRIV_H

#include "shm/pending.h"

#define CHUNK_WORDS 128u /* 1 KiB */

/* Words of the object; entries and chunks are numbered from 1, 0 = none. */
enum {
	G_FREE,	      /* first free entry */
	G_BUMP,	      /* entries ever used */
	G_CHUNK_FREE, /* first free chunk */
	G_CHUNK_CNT,  /* free chunks in that list */
	G_CHUNK_BUMP, /* chunks ever used */
	G_ENDS,	      /* oldest 32 | newest 32 */
	G_CNT,	      /* live entries */
	G_BYTES,      /* of them, by the estimate */
	G_WORDS
};
enum {
	E_STATE, /* enum state | owner << 8; live: its change number is the generation */
	E_LINK,	 /* next in the bucket, or next free */
	E_NBR,	 /* older 32 | newer 32 */
	E_TIME,	 /* when inserted, ns */
	E_CHUNK, /* chunks from the free list: first 32 | last 32 */
	E_FRESH, /* chunks never used before: first 32 | count 32 */
	E_CNT,	 /* chunks altogether */
	E_WORDS
};
enum state { S_FREE, S_TAKEN, S_LIVE };
#define PAIR(hi, lo) ((uint64_t)(hi) << 32 | (uint32_t)(lo))
#define HI32(v) ((uint32_t)((v) >> 32))
#define LO32(v) ((uint32_t)(v))

/* Body of an entry: ordinary words, written by who has taken the entry. */
enum {
	B_KEY_LO,
	B_KEY_HI,
	B_BYTES,
	B_WORKER,
	B_ISL,
	B_PREFILL,
	B_LORA,
	B_PART_RANK, /* partition 32 | rank 32 */
	B_CNTS,	     /* sequence hashes 32 | block hashes 32 */
	B_SESSION,   /* length 32 | flags 32 */
	B_EXPECTED,
	B_WORDS = 16
};

struct kvp_pending_shm {
	struct kvp_objhdr hdr;
	uint64_t max, bytes_max, ttl_ns, entry_cap, bucket_cnt, chunk_cnt, body_off, data_off;
	uint64_t word_off, word_cnt, pad[6];
	struct kvp_txn_shm txn __attribute__((aligned(128)));
};

static inline uint64_t w_bucket(uint64_t b)
{
	return G_WORDS + b;
}
static inline uint64_t w_entry(const struct kvp_pending *p, uint64_t e, uint32_t field)
{
	return G_WORDS + (uint64_t)p->bucket_cnt + (e - 1) * E_WORDS + field;
}
static inline uint64_t w_chunk(const struct kvp_pending *p, uint64_t c)
{
	return G_WORDS + (uint64_t)p->bucket_cnt + (uint64_t)p->entry_cap * E_WORDS + (c - 1);
}
static inline uint64_t *body_of(const struct kvp_pending *p, uint64_t e)
{
	return p->body + (e - 1) * B_WORDS;
}
#endif
