/* shm/catalogue_priv.h — layout of the catalogue, for its own sources and its test.
 *
 * Shape, Truth, Writers, Readers, Ordering, Crash: shm/catalogue.h.
 */
#ifndef KVP_SHM_CATALOGUE_PRIV_H
#define KVP_SHM_CATALOGUE_PRIV_H

#include <kvpick/mix.h>

#include "shm/catalogue.h"

#define KVP_CAT_MAGIC 0x6b76702d63617401ull
#define KVP_CAT_LAYOUT 3

/* A double buffer. Version v lives in buffer v & 1; 0 = nothing published yet. */
struct kvp_cat_dbuf {
	uint64_t word;     /* published version; release store, acquire load */
	uint64_t building; /* version whose buffer is, or was last, being written; word or word + 1 */
};

struct kvp_cat_shm {
	struct kvp_objhdr hdr;
	uint64_t version;   /* publications of any kind */
	uint64_t chain_seq; /* unlinked workers; bumped before the slot can be linked again */
	uint64_t salt[2];   /* constant */
	uint32_t part_cnt;  /* partitions that exist; release store */
	uint32_t part_max, worker_max, rank_max, index_max, taint_max, bucket_cnt; /* constant */
	uint32_t most_schedulable; /* workers schedulable at once, ever */
	uint64_t off_part, off_worker, off_rank, off_index, off_bucket, off_view,
		off_record; /* from the header */
	uint64_t view_bytes;
	uint64_t part_hash[KVP_PART_MAX];
} __attribute__((aligned(64)));

struct kvp_cat_part_shm { /* all constant once part_cnt covers it, but for view */
	struct kvp_cat_dbuf view;
	uint64_t pad0[6];
	uint32_t role, block_size, is_eagle, model_len, group_len, pad1;
	uint64_t key_salt;
	char model[KVP_CAT_NAME_MAX + 1], group[KVP_CAT_NAME_MAX + 1];
} __attribute__((aligned(64)));

enum kvp_cat_worker_state {
	KVP_CAT_WORKER_FREE,
	KVP_CAT_WORKER_TAKEN, /* no record yet, not linked */
	KVP_CAT_WORKER_LIVE,  /* has a record; linked, or about to be */
	KVP_CAT_WORKER_DEAD,  /* being unlinked */
};
struct kvp_cat_worker_shm {
	uint64_t worker_id;
	uint32_t state; /* enum kvp_cat_worker_state; release */
	uint32_t next;  /* chain: worker index + 1, 0 = end */
	struct kvp_cat_dbuf record;
	uint64_t pad0[4];
} __attribute__((aligned(64)));

struct kvp_cat_rank_shm {
	uint32_t gen; /* odd = in use; release */
	uint32_t dp_rank;
	uint64_t worker_id;
	uint32_t index_slot, worker_idx, part, pad0;
} __attribute__((aligned(32)));

struct kvp_cat_index_shm {
	uint32_t gen; /* odd = in use; release */
	uint32_t rank_slot;
};

struct kvp_cat_view_shm { /* one buffer of a view; taints follow the ranks */
	uint32_t cnt, taint_cnt, worker_cnt, pad0;
	uint64_t pad1[6];
	struct kvp_rank_view rank[];
} __attribute__((aligned(64)));

#define KVP_CAT_NAME_WORDS (KVP_CAT_NAME_MAX / 8)
struct kvp_cat_record_shm { /* one buffer of a record; all by kvp_copy_in and kvp_copy_out */
	uint64_t head[offsetof(struct kvp_cat_worker_info, endpoint) / 8]; /* head[0] = worker_id */
	uint64_t endpoint[KVP_CAT_NAME_WORDS], model[KVP_CAT_NAME_WORDS], group[KVP_CAT_NAME_WORDS];
	uint32_t json_len, pad0;
	uint64_t json[KVP_CAT_RECORD_MAX / 8];
} __attribute__((aligned(64)));

_Static_assert(offsetof(struct kvp_cat_worker_info, endpoint) % 8 == 0 && KVP_CAT_NAME_MAX % 8 == 0 &&
		KVP_CAT_RECORD_MAX % 8 == 0,
	"records are whole words");

uint64_t kvp_cat_part_hash(const struct kvp_cat_shm *shm, enum kvp_part_role role, const char *model,
	uint32_t model_len, const char *group, uint32_t group_len);

static inline uint32_t kvp_cat_bucket(const struct kvp_cat *cat, uint64_t worker_id)
{
	struct kvp_mix mix = kvp_mix_of(cat->shm->salt);
	return (uint32_t)kvp_mix_u64(&mix, worker_id) & cat->bucket_mask;
}
static inline struct kvp_cat_view_shm *kvp_cat_view_buf(
	const struct kvp_cat *cat, uint32_t part, uint64_t version)
{
	uint64_t i = 2ull * part + (version & 1);
	return (struct kvp_cat_view_shm *)(void *)(cat->view + i * cat->view_bytes);
}
static inline uint64_t *kvp_cat_view_taint(const struct kvp_cat *cat, struct kvp_cat_view_shm *b)
{
	return (uint64_t *)(void *)(b->rank + cat->rank_max);
}
static inline struct kvp_cat_record_shm *kvp_cat_record_buf(
	const struct kvp_cat *cat, uint32_t idx, uint64_t version)
{
	uint64_t i = 2ull * idx + (version & 1);
	return (struct kvp_cat_record_shm *)(void *)(cat->record + i * sizeof(struct kvp_cat_record_shm));
}
/* kvp_cat_dbuf_valid says whether the buffer of version v is still untouched. Pairs with: kvp_cat_dbuf_begin.
 */
static inline int kvp_cat_dbuf_valid(const struct kvp_cat_dbuf *d, uint64_t v)
{
	kvp_fence_acq(); /* the caller's loads from the buffer, before the load of building */
	return kvp_ld_rlx_u64(&d->building) < v + 2;
}
#endif
