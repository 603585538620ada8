/* shm/radix.h — the KV radix tree: which rank holds which prompt prefix, for lock-free readers.
 *
 * Shape      runs of blocks without a branch. A run's header stands in a hash table under the absolute key
 *            of its first block, so a walk costs one dependent miss a run and needs no links. Beside the
 *            table: a column with the key of every block and an arena of cutoff lists. Coverage of a run by
 *            a rank is a bit (all of it) or a cutoff (its first n blocks). What only the writer needs
 *            (local and external hashes, names, holes) is in a second segment that no reader maps.
 *            Lower tiers (host, disk, external) share the runs, their keys and the names. Who holds what
 *            there is an optional list of intervals (rank and tier, from, to) a run, in the cutoff arena,
 *            named by the header: such blocks need not start where a run does, and their holes need no
 *            records. No bits: tiers are sparse, and a list of explicit intervals lets device blocks be
 *            appended behind it. While no tier but the device holds anything, a lookup pays one load of a
 *            word that it has in its cache anyway; else a second walk over the same runs follows the first.
 * Truth      the header of a run, as far as its version is even.
 * Writers    the indexer's apply thread, nobody else.
 * Readers    any process, mapped read-only; they write nothing, pin nothing, wait for nobody.
 * Ordering   a header is published by its key (release) and changed under its version (odd while changing);
 *            single coverage words and intervals change by one store. The writer kills a header before it
 *            reuses what the header named. A reader validates version and table descriptor after its loads.
 * Lifetime   as long as the region. The writer may leave and come back: kvp_radix_w_open.
 * Crash      reader: leaves nothing. Writer: at most one header with an odd version (a walk ends there
 *            after bounded retries) and leaked arrays; the next kvp_radix_w_open finishes the interrupted
 *            change from the second segment and repeats the interrupted operation, so that an operation has
 *            happened fully or not at all.
 * Proved by  tests/t_radix.c, tests/m_radix.c, tests/t_radix_crash.c, tests/v_index.c,
 *            tests/t_radix_merge.c, tests/t_radix_give.c, tests/t_radix_table.c, tests/m_tiers.c,
 *            tests/t_tiers_crash.c, tests/m_tour.c, tests/torture/x_radix.c.
 */
#ifndef KVP_SHM_RADIX_H
#define KVP_SHM_RADIX_H

#include "shm/counter.h"
#include "shm/obj.h"

#define KVP_RADIX_SLOT_MAX 4096 /* largest index_rank_max */
#define KVP_RADIX_WORD_MAX (KVP_RADIX_SLOT_MAX / 64)
#define KVP_RADIX_RUN_BLK_MAX 1024 /* blocks in one run */
#define KVP_RADIX_RETRY_MAX 50     /* version retries a walk */
#define KVP_RADIX_CHUNK_BLK 64     /* keys computed (and hashes asked for) at a time */
#define KVP_RADIX_SLOT_ALL UINT32_MAX

/* In the order in which a prompt is looked for; numbers of enum kvp_kv_tier. */
enum kvp_radix_tier {
	KVP_RADIX_DEVICE,
	KVP_RADIX_HOST,
	KVP_RADIX_DISK,
	KVP_RADIX_EXTERNAL,
	KVP_RADIX_TIER_CNT
};

struct kvp_radix_shm;
struct kvp_radix_w; /* the writer, process-local */

struct kvp_radix { /* process-local handle of a reader; plain values, may be copied */
	const struct kvp_radix_shm *shm;
	const char *base; /* start of the object */
	uint64_t key_salt[2];
	uint64_t col_off, cut_off, table_off; /* bytes from base, by the geometry; never read from memory */
	uint32_t col_max, cut_max;            /* words in the key column and in the cutoff arena */
	uint32_t hdr_bytes, word_cnt;         /* bytes of a run header; coverage words in it */
	uint32_t log2_min, log2_max;          /* sizes of header tables */
};

/* One lookup. local[i] is the local hash of block i of the prompt. The walk needs them in order and stops
 * asking at the first miss. */
struct kvp_radix_query {
	uint64_t part_salt;    /* key salt of the partition */
	const uint64_t *local; /* hashes of blocks 0..local_cnt-1 */
	uint32_t local_cnt;    /* available now */
	uint32_t total_blk;    /* blocks of the prompt */
	/* Extends local and local_cnt (local may move) and returns the new local_cnt; the same count = no
	 * more. NULL if everything is in local already. */
	uint32_t (*more)(void *ctx, struct kvp_radix_query *q);
	void *ctx;
};

/* Result. Only depth[s] of slots whose bit is set in active is meaningful (1..total_blk). Big: keep one a
 * thread. */
struct kvp_radix_match {
	uint32_t longest;  /* greatest depth, 0 = nothing matched */
	uint32_t retries;  /* version retries of this walk; the caller counts them */
	uint32_t word_cnt; /* words of active in use */
	uint32_t gave_up;  /* 1: the walk ended early because retries were exhausted */
	uint64_t active[KVP_RADIX_WORD_MAX];
	uint32_t depth[KVP_RADIX_SLOT_MAX];
	/* What follows the device's blocks in lower tiers. ext[t - 1][s]: further blocks that slot s holds in
	 * tier t, where the tier before it ended (from block 0 without device blocks). Meaningful only if
	 * low_any and the slot's bit in low is set; kvp_radix_match_ext asks for that. */
	uint32_t low_any;
	uint64_t low[KVP_RADIX_WORD_MAX];
	uint32_t ext[KVP_RADIX_TIER_CNT - 1][KVP_RADIX_SLOT_MAX];
};
static inline uint32_t kvp_radix_match_ext(
	const struct kvp_radix_match *m, enum kvp_radix_tier tier, uint32_t slot)
{
	return m->low_any && (m->low[slot >> 6] >> (slot & 63) & 1) ? m->ext[tier - 1][slot] : 0;
}

/* Figures of the tree, kept by the writer in the header page: readable by everybody. Relaxed, may be a
 * moment apart. */
#define KVP_RADIX_STAT_LIST(X)                                                                               \
	X(runs)                                                                                              \
	X(blocks) X(table_slots) X(tombstones) X(col_used_words) X(cut_used_words) X(stored) X(removed)      \
		X(cleared) X(duplicate) X(renamed) X(moved) X(not_found) X(unknown) X(invalid) X(full)       \
			X(lost) X(splits) X(appends) X(truncations) X(table_growths) X(alias_cnt)            \
				X(hole_cnt) X(merges) X(given_back_bytes) X(low_blocks) X(orphans)           \
					X(unattached)
struct kvp_radix_stats {
#define X(name) uint64_t name;
	KVP_RADIX_STAT_LIST(X)
#undef X
	uint64_t generation, block_max, run_max;
	uint32_t ready, slot_max;
};

/* Life cycle, as in shm/obj.h. Geometry used: index_rank_max (64, 256, 1024 or 4096), block_max,
 * region_gen, salt. The memory must be page-aligned, zero-filled and may be sparse: only the first page is
 * touched by new. */
uint64_t kvp_radix_align(void);
uint64_t kvp_radix_footprint(const struct kvp_geom *g);
int kvp_radix_new(void *mem, const struct kvp_geom *g);
int kvp_radix_join(const void *mem, const struct kvp_geom *g, struct kvp_radix *out);
void kvp_radix_leave(struct kvp_radix *r);
int kvp_radix_delete(void *mem);
/* kvp_radix_check verifies what readers rely on: table reachability, key chain ends, ranges, overlaps,
 * cutoffs, versions. No concurrent writer. Returns the number of faults; the first ten go to stderr. */
uint64_t kvp_radix_check(const struct kvp_radix *r);
/* kvp_radix_ready: 1 if lookups mean something; 0 while the tree is being emptied. Acquire. */
int kvp_radix_ready(const struct kvp_radix *r);
/* kvp_radix_generation: changes whenever the tree was emptied as a whole. */
uint64_t kvp_radix_generation(const struct kvp_radix *r);
void kvp_radix_stats(const struct kvp_radix *r, struct kvp_radix_stats *out);

/* kvp_radix_find walks the prompt and reports for every rank how many blocks it holds without a gap from
 * block 0 on its device, and how many more where those end in host memory, then on disk, then externally.
 * Each tier is visited once, in this order: a host block behind a disk block is not reached.
 *
 * q       see above; q->local and q->local_cnt may be changed by q->more.
 * m       overwritten.
 * return  KVP_OK (also when nothing matched), KVP_ERR_AGAIN while the tree is not ready (m is empty).
 * blocks  no; at most KVP_RADIX_RETRY_MAX retries, then it reports what is known so far. Takes no lock.
 * who     any thread of any process that joined.
 * order   every depth reported was held at some instant between call and return. A slot may have got
 *         another owner meanwhile: the caller compares the catalogue's slot generations before and after.
 */
int kvp_radix_find(const struct kvp_radix *r, struct kvp_radix_query *q, struct kvp_radix_match *m);

/* ---- writer ---- */

/* The second segment: columns and records that only the writer needs, same geometry. Lives as long as the
 * region, mapped by the indexer only. Page-aligned, zero-filled, sparse; only the first page is touched by
 * new. */
uint64_t kvp_radix_priv_align(void);
uint64_t kvp_radix_priv_footprint(const struct kvp_geom *g);
int kvp_radix_priv_new(void *mem, const struct kvp_geom *g);
int kvp_radix_priv_delete(void *mem);

enum kvp_radix_open {
	KVP_RADIX_RECOVER, /* keep the tree: finish what was interrupted, rebuild maps */
	KVP_RADIX_RESET,   /* empty tree, generation + 1 */
};
/* What kvp_radix_w_open found and did. */
struct kvp_radix_report {
	uint64_t runs, blocks;    /* kept */
	uint64_t headers_redone;  /* header changes finished (0 or 1) */
	uint64_t splits_undone;   /* half-done splits taken back (0 or 1) */
	uint64_t merges_finished; /* half-done merges finished (0 or 1) */
	uint64_t runs_dropped;    /* runs that could not be trusted */
	uint64_t ops_repeated;    /* interrupted operations carried out again (0 or 1) */
	uint64_t names_dropped;   /* aliases and holes without a holder */
	uint64_t duration_ns;
};

/* kvp_radix_w_open makes the calling thread the tree's writer.
 *
 * pub, priv  both segments, joined or fresh; the same geometry.
 * ctr        counter column of the process, or NULL.
 * rep        may be NULL.
 * errors     INVAL; LAYOUT; AGAIN (not formatted yet); SYS (no memory); CORRUPT: the segments do not belong
 *            together or the tree is broken beyond dropping single runs. After CORRUPT open with
 *            KVP_RADIX_RESET.
 * blocks     for the time of a rebuild: about 100 ns a block. Readers go on meanwhile.
 * who        the indexer, after it made sure that no other writer lives. */
int kvp_radix_w_open(void *pub, void *priv, const struct kvp_geom *g, enum kvp_radix_open how,
	struct kvp_ctr_column_shm *ctr, struct kvp_radix_w **out, struct kvp_radix_report *rep);
/* kvp_radix_w_close frees process-local memory only; the tree stays. NULL is allowed. */
void kvp_radix_w_close(struct kvp_radix_w *w);

enum kvp_radix_parent { KVP_RADIX_ROOT, KVP_RADIX_CHILD };

/* Capacity: block_max blocks, in as many runs if need be (up to 2^28 runs). A block that stands alone costs
 * 64 B of key column and two to four table slots of a header each, and in the second segment 160 B of columns
 * and a run record of 48 B.
 *
 * kvp_radix_store: the rank in `slot` now holds n blocks in a row, the first under parent_ext
 * (KVP_RADIX_CHILD) or at the root.
 *
 * slot       index slot, below index_rank_max; one partition a slot until kvp_radix_clear.
 * local,ext  n hashes each; ext are removal keys of this rank only and may differ from other ranks'.
 * stored     blocks admitted (n on success), may be NULL. Blocks that the rank held already count as
 *            stored.
 * return     KVP_OK; NOTFOUND: the rank does not hold the parent, nothing changed; INVAL: slot out of
 *            range, other partition, parent or hashes not pairwise distinct, nothing changed; FULL:
 *            capacity, the blocks from *stored on are not held.
 * Holding a known external hash at another position moves it: the old position is dropped for this rank. */
int kvp_radix_store(struct kvp_radix_w *w, uint32_t slot, uint64_t part_salt, enum kvp_radix_parent how,
	uint64_t parent_ext, uint32_t n, const uint64_t *local, const uint64_t *ext, uint32_t *stored);
/* kvp_radix_store_tier: the same in any tier; kvp_radix_store is its device form. Names are those of a rank
 * in a tier. The parent of a device block must be held on the device. The parent of a lower-tier block is
 * looked for in that tier, then in the others in their order; if the rank holds it nowhere the blocks are
 * skipped (NOTFOUND, counted as orphans). */
int kvp_radix_store_tier(struct kvp_radix_w *w, uint32_t slot, enum kvp_radix_tier tier, uint64_t part_salt,
	enum kvp_radix_parent how, uint64_t parent_ext, uint32_t n, const uint64_t *local,
	const uint64_t *ext, uint32_t *stored);
/* kvp_radix_attach: the rank now holds n blocks in a lower tier of which only the hashes are told. Each hash
 * is looked for among the rank's own names (that tier, then device, host, disk, external), then among those
 * of every rank of the partition; one that nobody knows is counted in *unknown (may be NULL) and skipped.
 * KVP_OK; INVAL: slot or tier out of range, device tier, other partition; FULL: capacity, some are not
 * held. */
int kvp_radix_attach(struct kvp_radix_w *w, uint32_t slot, enum kvp_radix_tier tier, uint64_t part_salt,
	uint32_t n, const uint64_t *ext, uint32_t *unknown);
/* kvp_radix_remove: the rank no longer holds these; each hash by itself, descendants stay held (and
 * hidden). Unknown hashes are counted in *unknown (may be NULL) and skipped. KVP_OK, or INVAL for a slot
 * out of range. */
int kvp_radix_remove(
	struct kvp_radix_w *w, uint32_t slot, uint32_t n, const uint64_t *ext, uint32_t *unknown);
/* kvp_radix_remove_tier: the same in any tier. */
int kvp_radix_remove_tier(struct kvp_radix_w *w, uint32_t slot, enum kvp_radix_tier tier, uint32_t n,
	const uint64_t *ext, uint32_t *unknown);
/* kvp_radix_clear drops everything of one slot in every tier and forgets its partition;
 * kvp_radix_clear_tier, further down, what it holds in one. Cost: one look at every run. */
int kvp_radix_clear(struct kvp_radix_w *w, uint32_t slot);
/* kvp_radix_clear_some does it in steps of budget looks (50 to 100 ns each): KVP_ERR_AGAIN until nothing is
 * left, KVP_OK then; a run that goes costs as much as several. From the first step on no lookup that begins
 * finds the slot. Nothing must be stored for it meanwhile; one slot at a time makes progress. A successor
 * ends what was begun. */
int kvp_radix_clear_some(struct kvp_radix_w *w, uint32_t slot, uint32_t budget);
int kvp_radix_clear_tier(struct kvp_radix_w *w, uint32_t slot, enum kvp_radix_tier tier);
/* kvp_radix_w_tend does upkeep that no operation should wait for: a run that is the only child of its parent
 * and held by the same ranks, on their devices only, is merged into it, which bounds the hops of a walk;
 * memory of long free stretches goes back to the kernel, at most 4 MiB a call and never the last eighth; a
 * header table goes on changing its size, which begins and ends within kvp_radix_store as well, in steps.
 * budget   looks at runs, some tens of nanoseconds each; a merge counts as a few looks.
 * return   looks done; 0 = nothing to do until the tree changes.
 * who      the writer, between operations, best when it is idle. */
uint32_t kvp_radix_w_tend(struct kvp_radix_w *w, uint32_t budget);
/* kvp_radix_w_blocks: blocks the slot holds on its device (visible or not); kvp_radix_w_tier_blocks: in a
 * tier. */
uint64_t kvp_radix_w_blocks(const struct kvp_radix_w *w, uint32_t slot);
uint64_t kvp_radix_w_tier_blocks(const struct kvp_radix_w *w, uint32_t slot, enum kvp_radix_tier tier);
/* kvp_radix_w_set_ready sets the flag that kvp_radix_ready reads. Release. */
void kvp_radix_w_set_ready(struct kvp_radix_w *w, uint32_t ready);

/* One event of a dump: n blocks in a row of one slot, with that slot's own external hashes. */
struct kvp_radix_dump_event {
	uint32_t slot, n;
	uint64_t part_salt;
	enum kvp_radix_parent how;
	enum kvp_radix_tier tier;
	uint64_t parent_ext;
	const uint64_t *local, *ext; /* valid during the callback only */
};

/* Tours: what a slot holds, told in steps while the tree changes in between. A tour is for the device or for
 * the lower tiers; to tell everything, take one of each, in this order. The second tells device blocks, too,
 * that may have come since the first began.
 * Told is every block that the slot holds, together with all blocks before it, under the same names from the
 * beginning of the first tour to the end of the last; of what comes or goes meanwhile, some. Everything told
 * was held at that moment. A parent is told before its children (in the same tier, or in any if the child is
 * in a lower one); only if it was given another name meanwhile may a child name one that was not told. Left
 * out are device blocks behind one that is not held on the device, and other blocks behind one that is held
 * nowhere. A further external hash of a block is an event of its own. A block may be told twice. */
#define KVP_RADIX_TOUR_MAX 64
#define KVP_RADIX_TOUR_ROOM 256
enum kvp_radix_tour_part { KVP_RADIX_TOUR_DEVICE, KVP_RADIX_TOUR_LOW };
/* Takes what an event tells, or the first blocks of it: returns how many. Fewer than n: no room now. */
typedef uint32_t kvp_radix_tour_fn(void *ctx, const struct kvp_radix_dump_event *ev);
/* kvp_radix_tour_begin gives the number of a new tour, never 0 and greater than those before; of
 * KVP_RADIX_TOUR_MAX under way the one that has not been stepped for the longest time is forgotten. after:
 * for the lower tiers, the number of the tour of the device; an earlier one (also of another writer) or 0
 * makes it tell more device blocks again. 0: slot out of range.
 * kvp_radix_tour_step goes on for budget looks at runs (50 to 100 ns each; at least 4) or until fn has no
 * room; fn must have room for KVP_RADIX_TOUR_ROOM events of one block when a step begins; of a block with
 * more names than that only the first ones may be told. KVP_OK: the tour has come to its end and its number
 * is void; KVP_ERR_AGAIN: call again; KVP_ERR_NOTFOUND: void number (forgotten, or another writer's).
 * kvp_radix_tour_end gives up a tour; void numbers are allowed. */
uint64_t kvp_radix_tour_begin(
	struct kvp_radix_w *w, uint32_t slot, enum kvp_radix_tour_part part, uint64_t after);
int kvp_radix_tour_step(
	struct kvp_radix_w *w, uint64_t id, uint32_t budget, kvp_radix_tour_fn *fn, void *ctx);
void kvp_radix_tour_end(struct kvp_radix_w *w, uint64_t id);
/* kvp_radix_tour_age, called now and then, gives up tours that were not stepped for more than max calls. */
void kvp_radix_tour_age(struct kvp_radix_w *w, uint32_t max);

typedef int kvp_radix_dump_fn(void *ctx, const struct kvp_radix_dump_event *ev);
/* kvp_radix_w_dump makes both tours of a slot (or of every slot: KVP_RADIX_SLOT_ALL, slot by slot) at once;
 * the tree must not be changed meanwhile. Blocks left out are counted in *hidden (may be NULL). A callback
 * result other than 0 ends the dump and is returned. KVP_OK, INVAL. */
int kvp_radix_w_dump(
	struct kvp_radix_w *w, uint32_t slot, kvp_radix_dump_fn *fn, void *ctx, uint64_t *hidden);
/* kvp_radix_w_each tells all blocks that ranks hold on their devices, n neighbours in a run at a time with
 * the rank's names for them, in one pass: what follows a block comes before it (stretches behind gaps of one
 * run in any order). The tree must not be changed meanwhile. */
typedef void kvp_radix_each_fn(void *ctx, uint32_t slot, uint32_t n, const uint64_t *ext);
void kvp_radix_w_each(struct kvp_radix_w *w, kvp_radix_each_fn *fn, void *ctx);
/* kvp_radix_w_names gives the slot's external hashes of the first blocks of a prompt, as many as it holds on
 * its device without a gap, at most n. Result: their number. */
uint32_t kvp_radix_w_names(const struct kvp_radix_w *w, uint32_t slot, uint64_t part_salt, uint32_t n,
	const uint64_t *local, uint64_t *ext);
/* kvp_radix_w_check compares private against public state (after kvp_radix_check). Number of faults. */
uint64_t kvp_radix_w_check(struct kvp_radix_w *w);
#endif
