/* shm/catalogue.h — partitions, workers, rank slots, and the ranks that a request may be given to.
 *
 * Shape      part_max partitions, each with two view buffers (rank_max ranks and their taints);
 *            worker_max worker slots, each with two record buffers (KVP_CAT_RECORD_MAX bytes of JSON);
 *            rank_max rank slots; index_rank_max index slots; a chained hash worker id -> worker slot.
 *            Mostly untouched pages.
 * Truth      a worker: its published record. A partition's eligible ranks: its published view. A rank
 *            slot or an index slot: its generation (odd = in use) and the fields beside it.
 * Writers    the indexer, one thread, through struct kvp_cat_writer. Nobody else; other processes map it
 *            read-only.
 * Readers    every process; they write nothing and wait for nobody.
 * Ordering   records and views are double-buffered: the writer announces the version that it builds
 *            (`building`), writes the buffer that is not published, and publishes with one release store
 *            (`word`). A reader acquires `word`, reads, and is right if `building` is still below its
 *            version + 2. The fields of a rank or index slot are written while its generation is even;
 *            the odd one is a release store. Readers compare generations before and after.
 * Lifetime   as long as the region. Partitions are created once and never destroyed; block size and eagle
 *            flag are fixed then. Worker, rank and index slots are reused with the next generation.
 * Crash      the writer killed anywhere: every published record and view stays valid; the buffer under
 *            construction is simply written again. kvp_cat_w_open of the next writer finds the slots in
 *            use by a scan, links workers that were not linked yet and frees those that were being
 *            removed. Rank slots in use by no schedulable worker are found by the indexer
 *            (kvp_cat_rank_info) and freed.
 * Proved by  tests/t_catalogue.c, tests/torture/x_catalogue.c
 */
#ifndef KVP_SHM_CATALOGUE_H
#define KVP_SHM_CATALOGUE_H

#include <kvpick/types.h>
#include "shm/obj.h"

#define KVP_CAT_NAME_MAX 1024	  /* bytes of a model or group name or an endpoint, without the final 0 */
#define KVP_CAT_RECORD_MAX 65536  /* bytes of a worker record's JSON text */
#define KVP_CAT_WORKER_SPARE 1024 /* worker slots beyond rank_max: workers that got no rank slot */
#define KVP_CAT_TAINT_PER_RANK 4  /* taints of a view: this times rank_max, plus KVP_CAT_TAINT_SPARE */
#define KVP_CAT_TAINT_SPARE 8192
#define KVP_CAT_RETRY_MAX 1000
#define KVP_INDEX_NONE UINT32_MAX /* index_slot of a rank beyond the index capacity */
#define KVP_PART_NONE UINT32_MAX

enum kvp_lifecycle {
	KVP_LIFE_INCOMPLETE,
	KVP_LIFE_SCHEDULABLE,
	KVP_LIFE_DRAINING,
	KVP_LIFE_UNSCHEDULABLE,
};

struct kvp_part_info {
	enum kvp_part_role role;
	uint32_t block_size; /* tokens, > 0 */
	uint32_t is_eagle;   /* 0 or 1 */
	uint32_t model_len, group_len;
	uint64_t key_salt; /* secret start value of the partition's keys in the tree */
	char model[KVP_CAT_NAME_MAX + 1], group[KVP_CAT_NAME_MAX + 1];
};

/* One eligible rank. Sorted by (worker_id, dp_rank) in a view. */
struct kvp_rank_view {
	uint64_t worker_id;
	uint32_t dp_rank;		 /* global data-parallel rank */
	uint32_t rank_slot;		 /* load and booking slot, < rank_max, dense over the node */
	uint32_t rank_gen;		 /* odd */
	uint32_t index_slot;		 /* < index_rank_max, or KVP_INDEX_NONE */
	uint32_t index_gen;		 /* odd; 0 with KVP_INDEX_NONE */
	uint32_t worker_idx;		 /* < kvp_cat_worker_max */
	uint64_t max_num_batched_tokens; /* 0 = absent */
	uint64_t total_kv_blocks;	 /* 0 = absent */
	uint32_t taint_off,
		taint_cnt; /* part of the view's taint array, sorted hashes; see kvp_cat_view_taints */
	/* 0 = none; else a hash of the router hint's worker type, lowest bit: may be a source */
	uint64_t kv_hint;
};

struct kvp_cat_worker_info {
	uint64_t worker_id;
	uint32_t part; /* KVP_PART_NONE unless schedulable */
	enum kvp_part_role role;
	enum kvp_lifecycle lifecycle;
	uint32_t start_rank, size; /* ranks [start_rank, start_rank + size) */
	uint32_t endpoint_len, model_len, group_len;
	char endpoint[KVP_CAT_NAME_MAX + 1], model[KVP_CAT_NAME_MAX + 1], group[KVP_CAT_NAME_MAX + 1];
};

struct kvp_cat_rank_info {
	uint64_t worker_id;
	uint32_t dp_rank, rank_slot, rank_gen, index_slot, index_gen, worker_idx, part;
};

struct kvp_cat_shm;
struct kvp_cat_part_shm;
struct kvp_cat_worker_shm;
struct kvp_cat_rank_shm;
struct kvp_cat_index_shm;

struct kvp_cat { /* process-local handle */
	struct kvp_cat_shm *shm;
	struct kvp_cat_part_shm *part;
	struct kvp_cat_worker_shm *worker;
	struct kvp_cat_rank_shm *rank;
	struct kvp_cat_index_shm *index;
	uint32_t *bucket;
	uint8_t *view, *record; /* buffers of all views and of all records */
	uint64_t view_bytes;	/* of one view buffer */
	uint32_t part_max, worker_max, rank_max, index_max, taint_max, bucket_mask;
};

/* A view as the reader holds it: pointers into the shared buffer, to be loaded by kvp_ld_rlx_* and
 * kvp_copy_out only. Until kvp_cat_view_valid has answered KVP_OK, fields may stem from a later view: each
 * field holds some value that the writer wrote for some rank, slots are always in range, but neighbours need
 * not belong together. */
struct kvp_cat_view {
	const struct kvp_rank_view *rank;
	const uint64_t *taint;
	uint32_t cnt, taint_cnt;
	uint32_t worker_cnt; /* schedulable workers in the view */
	uint32_t part;
	uint64_t version;
};

uint64_t kvp_catalogue_align(void);
uint64_t kvp_catalogue_footprint(const struct kvp_geom *g);
int kvp_catalogue_new(void *mem, const struct kvp_geom *g);
int kvp_catalogue_join(void *mem, const struct kvp_geom *g, struct kvp_cat *out);
void kvp_catalogue_leave(struct kvp_cat *cat);
int kvp_catalogue_delete(void *mem);
uint64_t kvp_catalogue_check(const struct kvp_cat *cat);

/* -- readers: any process, any thread; none of these blocks or writes -- */

/* kvp_cat_part_find looks a partition up by name (bytes, not 0-terminated). KVP_ERR_NOTFOUND. A part index,
 * once given out, stays right. kvp_cat_part_info copies its constant description; KVP_ERR_INVAL for an index
 * at or above kvp_cat_part_cnt. kvp_cat_part_get is the same without the names, for the request path. */
int kvp_cat_part_find(const struct kvp_cat *cat, enum kvp_part_role role, const char *model,
	uint32_t model_len, const char *group, uint32_t group_len, uint32_t *part);
int kvp_cat_part_info(const struct kvp_cat *cat, uint32_t part, struct kvp_part_info *out);
struct kvp_part_fixed {
	enum kvp_part_role role;
	uint32_t block_size, is_eagle;
	uint64_t key_salt;
};
int kvp_cat_part_get(const struct kvp_cat *cat, uint32_t part, struct kvp_part_fixed *out);
uint32_t kvp_cat_part_cnt(const struct kvp_cat *cat);

/* kvp_cat_view_begin fills v with the published view of a partition (cnt 0 before the first). KVP_ERR_INVAL
 * for an unknown partition. kvp_cat_view_valid, after the last read from v: KVP_OK if all that was read
 * belonged to the one view; KVP_ERR_AGAIN if the buffer has been reused since (two publications later; begin
 * anew). kvp_cat_view_taints gives the taint hashes of v->rank[i], clamped to the array whatever was read. */
int kvp_cat_view_begin(const struct kvp_cat *cat, uint32_t part, struct kvp_cat_view *v);
int kvp_cat_view_valid(const struct kvp_cat *cat, const struct kvp_cat_view *v);
uint32_t kvp_cat_view_taints(const struct kvp_cat_view *v, uint32_t i, const uint64_t **taint);

/* kvp_cat_version changes with every publication of any view or record: a cheap "has anything changed".
 * kvp_cat_schedulable_cnt counts the schedulable workers of all partitions of a role.
 * kvp_cat_most_schedulable is the greatest number that was schedulable at once, in all roles together, since
 * the region exists. */
uint64_t kvp_cat_version(const struct kvp_cat *cat);
uint32_t kvp_cat_most_schedulable(const struct kvp_cat *cat);
uint32_t kvp_cat_schedulable_cnt(const struct kvp_cat *cat, enum kvp_part_role role);

/* kvp_cat_worker_find finds the slot of a worker; KVP_ERR_NOTFOUND. kvp_cat_worker_max bounds an iteration
 * over slots. kvp_cat_worker_info and _json copy what is published: KVP_ERR_NOTFOUND for a free slot,
 * KVP_ERR_AGAIN when the record changed KVP_CAT_RETRY_MAX times while it was copied, KVP_ERR_LIMIT when cap
 * is too small (*len is then the size needed). The JSON text has no final 0. kvp_cat_worker_read copies both
 * from the same version; json may be NULL. */
int kvp_cat_worker_find(const struct kvp_cat *cat, uint64_t worker_id, uint32_t *idx);
uint32_t kvp_cat_worker_max(const struct kvp_cat *cat);
int kvp_cat_worker_info(const struct kvp_cat *cat, uint32_t idx, struct kvp_cat_worker_info *out);
int kvp_cat_worker_json(const struct kvp_cat *cat, uint32_t idx, char *buf, uint32_t cap, uint32_t *len);
int kvp_cat_worker_read(const struct kvp_cat *cat, uint32_t idx, struct kvp_cat_worker_info *out, char *json,
	uint32_t cap, uint32_t *len);

/* Current generation of a rank or index slot: odd while in use, 0 for a slot out of range. Load (acquire) it
 * after the work that depends on the slot and compare with what the view said. */
uint32_t kvp_cat_rank_gen(const struct kvp_cat *cat, uint32_t rank_slot);
uint32_t kvp_cat_index_gen(const struct kvp_cat *cat, uint32_t index_slot);
/* Who holds a slot: KVP_ERR_NOTFOUND if it is free, KVP_ERR_AGAIN if it changed hands while being read. */
int kvp_cat_rank_info(const struct kvp_cat *cat, uint32_t rank_slot, struct kvp_cat_rank_info *out);
int kvp_cat_index_info(const struct kvp_cat *cat, uint32_t index_slot, struct kvp_cat_rank_info *out);

/* -- writer: the indexer, one thread -- */

struct kvp_cat_writer {
	struct kvp_cat cat;
	uint64_t *rank_used, *index_used, *worker_used; /* bitmaps, heap */
	uint32_t rank_cnt, index_cnt, worker_cnt;	/* slots in use */
};

/* kvp_cat_w_open takes over as the writer (see Crash); the previous one is dead. KVP_ERR_SYS without memory.
 */
int kvp_cat_w_open(const struct kvp_cat *cat, struct kvp_cat_writer *w);
void kvp_cat_w_close(struct kvp_cat_writer *w);

/* kvp_cat_w_part finds or creates a partition. KVP_ERR_EXISTS if it exists with another block size or eagle
 * flag
 * (*part is set: ask kvp_cat_part_info), KVP_ERR_FULL, KVP_ERR_INVAL (block_size 0, names too long). */
int kvp_cat_w_part(struct kvp_cat_writer *w, enum kvp_part_role role, const char *model, uint32_t model_len,
	const char *group, uint32_t group_len, uint32_t block_size, uint32_t is_eagle, uint32_t *part);

/* kvp_cat_w_rank_take gives (worker_id, dp_rank) the lowest free rank slot, and an index slot while there is
 * one; fills slots and generations of out. KVP_ERR_FULL without a rank slot. kvp_cat_w_rank_index gives an
 * index slot to a rank that got none: KVP_ERR_FULL, KVP_ERR_EXISTS (it has one), KVP_ERR_NOTFOUND (the rank
 * slot is free); a view with it must be published. kvp_cat_w_rank_drop ends the
 * use: call it after the view without the rank is published, its bookings are dropped and the tree is cleared
 * of it. */
int kvp_cat_w_rank_take(struct kvp_cat_writer *w, uint64_t worker_id, uint32_t dp_rank, uint32_t part,
	uint32_t worker_idx, struct kvp_cat_rank_info *out);
int kvp_cat_w_rank_index(struct kvp_cat_writer *w, uint32_t rank_slot, struct kvp_cat_rank_info *out);
int kvp_cat_w_rank_drop(struct kvp_cat_writer *w, uint32_t rank_slot);

/* kvp_cat_w_view publishes the eligible ranks of a partition: rank[] sorted by (worker_id, dp_rank), taint
 * ranges inside taint[]. KVP_ERR_FULL if there are more taints than fit (nothing published). One release
 * store. */
int kvp_cat_w_view(struct kvp_cat_writer *w, uint32_t part, const struct kvp_rank_view *rank, uint32_t cnt,
	const uint64_t *taint, uint32_t taint_cnt, uint32_t worker_cnt);

/* kvp_cat_w_worker_slot finds the slot of a worker or takes a free one (invisible until its first put).
 * KVP_ERR_FULL. kvp_cat_w_worker_put publishes a record in it: KVP_ERR_LIMIT for JSON over
 * KVP_CAT_RECORD_MAX or a name over KVP_CAT_NAME_MAX. kvp_cat_w_worker_drop removes the worker; also gives a
 * slot without a record back. */
int kvp_cat_w_worker_slot(struct kvp_cat_writer *w, uint64_t worker_id, uint32_t *idx);
int kvp_cat_w_worker_put(struct kvp_cat_writer *w, uint32_t idx, const struct kvp_cat_worker_info *info,
	const char *json, uint32_t len);
int kvp_cat_w_worker_drop(struct kvp_cat_writer *w, uint32_t idx);
#endif
