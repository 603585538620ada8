/* shm/obj.h — what every object in the region starts with, and the life cycle that all share.
 *
 * Shape      a 64-byte header in front of each object; the object follows at offset 64.
 * Truth      magic: 0 while under construction, the object's magic once it is complete.
 * Writers    the process that creates the region (new, delete). Nobody else.
 * Readers    every process that joins.
 * Ordering   magic is stored last with release (kvp_obj_ready) and loaded first with acquire (kvp_obj_join).
 * Crash      creator killed before kvp_obj_ready: magic stays 0, join answers KVP_ERR_AGAIN, and the region
 *            is created anew by the next supervisor. join never repairs.
 *
 * Every object X offers kvp_X_align, kvp_X_footprint(geometry) (0 = bad parameters), kvp_X_new (format
 * zero-filled memory, caller not joined), kvp_X_join (check, fill a process-local handle), kvp_X_leave,
 * kvp_X_delete and kvp_X_check (full invariant scan, no concurrent writer: number of faults, the first ten
 * logged to stderr).
 */
#ifndef KVP_SHM_OBJ_H
#define KVP_SHM_OBJ_H

#include <kvpick/atomic.h>
#include <kvpick/err.h>
#include <stddef.h>
#include <stdint.h>

#define KVP_CACHE_LINE 64
#define KVP_FALSE_SHARE 128 /* bytes between words of different writers (adjacent-line prefetch) */
#define KVP_PAGE 4096

struct kvp_objhdr {
	uint64_t magic;	      /* object kind; 0 while under construction; stored last, release */
	uint32_t layout;      /* layout version of this kind of object */
	uint32_t layout_hash; /* FNV-1a over sizeof and offsetof values, kvp_obj_hash */
	uint64_t footprint;   /* bytes, header included, multiple of 64 */
	uint64_t region_gen;  /* generation of the region that created it */
	uint64_t pad[4];
} __attribute__((aligned(64)));

/* Capacities of a region, fixed at its creation. All are counts; ranges are those of the settings of the same
 * name. Every footprint function validates what it uses and answers 0 for a value out of range. */
struct kvp_geom {
	uint32_t slot_max;	   /* participant slots, 1..KVP_SLOT_MAX */
	uint32_t rank_max;	   /* catalogue and load entries, 1..65536 */
	uint32_t index_rank_max;   /* ranks with a bit in the tree: 64, 256, 1024 or 4096 */
	uint32_t resv_max;	   /* live reservations, 64..4194304 */
	uint64_t block_max;	   /* blocks in the tree, 10000..1e9 */
	uint64_t predicted_max;	   /* blocks in the tree of predictions; 0 = there is none */
	uint64_t active_block_max; /* prompt blocks over all live bookings, 1024..2^30 */
	uint32_t queued_max;	   /* waiting requests */
	uint32_t part_max;	   /* partitions, 1..KVP_PART_MAX */
	uint32_t pending_max;	   /* selections that may be replayed, 0..1048576; 0 = none */
	uint64_t pending_bytes;	   /* their byte budget, any */
	uint64_t pending_ttl_ns;   /* their time to live */
	uint32_t affinity_max;	   /* sessions bound to workers, 0..2^24; 0 = no affinity */
	uint64_t affinity_ttl_ns;  /* life of an idle binding */
	uint64_t affinity_hold_ns; /* no booking lives longer than this */
	uint32_t lifecycle_max;	   /* events on their way to the replicas, 1024..10000000; 0 = no sync */
	uint64_t region_gen;	   /* generation, never 0 */
	uint64_t salt[2];	   /* random secret: index key chain, id hashes */
};

/* kvp_obj_hash folds n words (sizes and offsets of a layout) into a layout hash (FNV-1a). */
static inline uint32_t kvp_obj_hash(const size_t *word, size_t n)
{
	uint32_t h = 2166136261u;
	for (size_t i = 0; i < n; i++)
		for (int b = 0; b < 8; b++)
			h = (h ^ (uint32_t)((word[i] >> (8 * b)) & 0xff)) * 16777619u;
	return h;
}

/* kvp_obj_begin starts formatting: magic 0, then the other header fields. */
static inline void kvp_obj_begin(
	struct kvp_objhdr *h, uint32_t layout, uint32_t hash, uint64_t footprint, uint64_t region_gen)
{
	kvp_st_rel_u64(&h->magic, 0);
	h->layout = layout;
	h->layout_hash = hash;
	h->footprint = footprint;
	h->region_gen = region_gen;
}

/* kvp_obj_ready publishes a formatted object. Pairs with: kvp_obj_join. */
static inline void kvp_obj_ready(struct kvp_objhdr *h, uint64_t magic)
{
	kvp_st_rel_u64(&h->magic, magic);
}

/* kvp_obj_join checks a header: KVP_ERR_AGAIN while under construction, KVP_ERR_LAYOUT for another kind,
 * layout or size, KVP_ERR_INVAL for NULL or misalignment. Pairs with: kvp_obj_ready. */
static inline int kvp_obj_join(const struct kvp_objhdr *h, uint64_t magic, uint32_t layout, uint32_t hash)
{
	if (!h || ((uintptr_t)h & (KVP_CACHE_LINE - 1)))
		return KVP_ERR_INVAL;
	uint64_t m = kvp_ld_acq_u64(&h->magic);
	if (m == 0)
		return KVP_ERR_AGAIN;
	if (m != magic || h->layout != layout || h->layout_hash != hash)
		return KVP_ERR_LAYOUT;
	return KVP_OK;
}

/* kvp_obj_delete withdraws an object: magic 0 first. The caller owns the memory again. */
static inline void kvp_obj_delete(struct kvp_objhdr *h)
{
	kvp_st_rel_u64(&h->magic, 0);
}

/* kvp_align_up rounds x up to a power of two a. */
static inline uint64_t kvp_align_up(uint64_t x, uint64_t a)
{
	return (x + a - 1) & ~(a - 1);
}

/* Who owns a record that a process may die inside: slot index and the slot's generation. 0 = nobody. */
typedef uint32_t kvp_owner;
#define KVP_SLOT_MAX 192
#define KVP_PART_MAX 256
#define KVP_OWNER(slot, gen) ((kvp_owner)(((gen) << 8) | (slot)))
#define KVP_OWNER_SLOT(o) ((o)&0xffu)
#define KVP_OWNER_GEN(o) ((o) >> 8) /* 24 bits, never 0 for a live owner */

#endif
