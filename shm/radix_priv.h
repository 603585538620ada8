/* shm/radix_priv.h — layouts and inner calls of the KV radix tree (radix*.c and their tests only).
 *
 * Shape      public: header page, key column, cutoff arena, two areas for each header table size. Private:
 *            header page with redo records, columns parallel to the key column, run records, aliases,
 *            holes.
 * Truth      public headers say what is published; the private columns and records add what recovery needs.
 * Writers    the writer only; everything outside the public object is unknown to readers.
 * Readers    of the public part: radix_read.c.
 * Ordering   kvp_radix_commit is the only function that changes more than one word of a published header.
 * Lifetime   both objects as long as the region.
 * Crash      img, split and op records in the private header page are enough to finish a change:
 *            radix_open.c.
 * Proved by  tests/t_radix.c (layout), tests/t_radix_crash.c.
 */
#ifndef KVP_SHM_RADIX_PRIV_H
#define KVP_SHM_RADIX_PRIV_H

#include <kvpick/mix.h>

#include "shm/radix.h"

#define KVP_RADIX_KEY_NONE 0ULL /* table slot never used: ends a probe */
#define KVP_RADIX_KEY_DEAD 1ULL /* tombstone */
#define KVP_RADIX_KEY_MIN 2ULL
#define KVP_RADIX_NOPOS UINT32_MAX
#define KVP_RADIX_OP_BLK_MAX 65536u /* blocks in one redo record; longer operations are cut */
#define KVP_RADIX_COL_GRAN 8u	    /* words in a granule of the key column */
#define KVP_RADIX_CUT_GRAN 4u	    /* words in a granule of the cutoff arena */
#define KVP_RADIX_SPLIT 1u
#define KVP_RADIX_MERGE 2u
#define KVP_RADIX_NAME_OTHER (1u << 31) /* in run_of: the map of names points elsewhere for this hash */

/* Header of a run, in a table slot. 56 fixed bytes, then one bit a slot. */
struct kvp_radix_hdr_shm {
	uint64_t key;	  /* of the first block; 0 never used, 1 dead; release */
	uint64_t last;	  /* key of the last block */
	uint32_t ver;	  /* odd while changing */
	uint32_t len;	  /* blocks, 1..KVP_RADIX_RUN_BLK_MAX */
	uint32_t base;	  /* first word in the key column */
	uint32_t cap;	  /* words from base that the run may fill */
	uint32_t cut_ref; /* first word of the cutoff list */
	uint32_t cut_n;	  /* entries (low half), log2 of the granules + 1 (high half; 0 = no list) */
	uint32_t low_ref; /* first word of the list of lower-tier intervals */
	uint32_t rid;	  /* the writer's number of this run */
	uint32_t low_n;	  /* intervals (low half), log2 of them there is room for (high half, 0 = no list) */
	uint32_t spare;
	uint64_t bits[1]; /* word_cnt words: slot holds the whole run */
};
#define KVP_RADIX_HDR_FIXED 56u
#define KVP_RADIX_CUT_CNT(n) ((n)&0xffffu)
#define KVP_RADIX_CUT_CLASS(n) ((n) >> 16)
/* A cutoff entry: slot in the high half, blocks held (0 = dead entry) in the low half. */
#define KVP_RADIX_CUT(slot, blk) (((slot) << 16) | (blk))
#define KVP_RADIX_CUT_SLOT(e) ((e) >> 16)
#define KVP_RADIX_CUT_BLK(e) ((e)&0xffffu)
/* An interval of a lower tier: a holder has blocks a..b-1 of the run (b 0 = dead entry). Intervals of one
 * holder do not touch at rest; while one changes, a second may say part of it, too. A holder is a rank in a
 * tier, numbered tier * slot_max + slot; holders of the device tier are the slots themselves and never have
 * intervals. Lists lie in the cutoff arena, two words an interval. */
#define KVP_RADIX_IV(holder, a, b) (((uint64_t)(holder) << 32) | ((uint64_t)(a) << 16) | (b))
#define KVP_RADIX_IV_HOLDER(v) ((uint32_t)((v) >> 32))
#define KVP_RADIX_IV_A(v) ((uint32_t)((v) >> 16) & 0xffffu)
#define KVP_RADIX_IV_B(v) ((uint32_t)(v)&0xffffu)
#define KVP_RADIX_IV_CLASS_MAX 12u /* at most 4096 intervals in one run */
#define KVP_RADIX_IV_MAX (1u << KVP_RADIX_IV_CLASS_MAX)

struct kvp_radix_shm {
	struct kvp_objhdr hdr;
	uint64_t key_salt[2]; /* derived from the region's secret */
	uint64_t block_max;
	uint32_t slot_max, run_max;
	uint64_t pad0[4];
	/* written by the writer, read by all */
	uint64_t table;	     /* descriptor: sequence << 16 | log2 << 1 | side; release */
	uint64_t generation; /* + 1 whenever the tree is emptied */
	uint32_t ready;
	uint32_t low; /* 1: lower tiers hold something, so that a lookup has to look there as well */
	uint64_t pad2[5];
	uint64_t hidden[KVP_RADIX_WORD_MAX]; /* slots being cleared, which readers leave out; release */
	struct kvp_radix_stats stat;
	/* writer only */
	uint64_t area_used[2];	     /* bit log2: the area of that side was written to */
	uint32_t col_bump, cut_bump; /* granules ever handed out */
} __attribute__((aligned(64)));
#define KVP_RADIX_DESC(seq, log2, side) (((uint64_t)(seq) << 16) | ((uint64_t)(log2) << 1) | (side))
#define KVP_RADIX_DESC_SEQ(d) ((d) >> 16)
#define KVP_RADIX_DESC_LOG2(d) ((uint32_t)(((d) >> 1) & 63))
#define KVP_RADIX_DESC_SIDE(d) ((uint32_t)((d)&1))

/* ---- private segment ---- */

/* parent_pos and part_salt survive a restart, the rest is rebuilt. Run 0 is the root: parent of all first
 * runs. */
struct kvp_radix_run_shm {
	uint64_t part_salt;
	uint64_t part_mix;	    /* mixed into names */
	uint32_t parent_pos;	    /* column position of the parent block; KVP_RADIX_NOPOS at the root */
	uint32_t came;		    /* tour_now when a rank last came to hold device blocks of it */
	uint32_t child, next, prev; /* first child, siblings; 0 = none. next: also the next free run */
	uint32_t hole;		    /* first hole record + 1 */
	uint32_t live;		    /* 1: published */
	uint32_t alias;		    /* 1: some block may have aliases */
};
/* The rank in slot holds positions a..b-1 beyond its visible coverage of their run. */
struct kvp_radix_hole_shm {
	uint32_t slot1; /* slot + 1, 0 = free; stored last */
	uint32_t a, b;
	uint32_t next; /* + 1; of the same run, or free */
};
/* The rank in slot holds position pos under ext. If a rank has aliases at a position, they are all its
 * names there; otherwise its name is the one in the column of external hashes. */
struct kvp_radix_alias_shm {
	uint64_t ext;
	uint32_t slot1; /* slot + 1, 0 = free; stored last */
	uint32_t pos;
	uint32_t next_ext, next_pos; /* + 1; chains of the two maps, or free */
};
struct kvp_radix_slot_shm {
	uint64_t part_salt, part_mix;
	uint64_t blocks; /* held; rebuilt */
	uint32_t has_part;
	uint32_t alias_cnt; /* rebuilt */
};
enum kvp_radix_op {
	KVP_RADIX_OP_NONE,
	KVP_RADIX_OP_STORE,
	KVP_RADIX_OP_REMOVE,
	KVP_RADIX_OP_CLEAR,
	KVP_RADIX_OP_CLEAR_TIER,
	KVP_RADIX_OP_ATTACH
};
struct kvp_radix_oprec {
	uint32_t op;	       /* enum kvp_radix_op; stored last, cleared at the end */
	uint32_t slot, how, n; /* slot: the holder; CLEAR: the rank, all its holders */
	uint64_t part_salt, parent_ext;
};
struct kvp_radix_priv_shm {
	struct kvp_objhdr hdr;
	uint64_t generation; /* of the tree it belongs to; 0 = none yet */
	uint32_t img_at;     /* table slot + 1 that img is being copied to; 0 = idle */
	uint32_t split_on; /* KVP_RADIX_SPLIT: tail being published, head not shortened yet; KVP_RADIX_MERGE:
				head being lengthened, tail not taken out yet; 0 = idle */
	uint32_t split_head, split_tail, split_len; /* table slots, blocks of the head without the tail */
	uint32_t merge_from, merge_to; /* last block of the tail: column position before and after a merge */
	uint32_t rid_bump, hole_bump, alias_bump;
	struct kvp_radix_oprec op;
	union { /* the header as it shall be */
		struct kvp_radix_hdr_shm img;
		char img_room[KVP_RADIX_HDR_FIXED + KVP_RADIX_SLOT_MAX / 8];
	};
} __attribute__((aligned(64)));

/* Sizes that follow from a geometry. Offsets in bytes from the start of their object. */
struct kvp_radix_geo {
	uint32_t slot_max, holder_max, word_cnt, hdr_bytes, run_max, hole_max, alias_max;
	uint32_t col_max, cut_max; /* words */
	uint32_t log2_min, log2_max;
	uint64_t block_max;
	uint64_t col_off, cut_off, table_off, side_bytes, footprint;
	uint64_t slot_off, op_local_off, op_ext_off, local_off, ext_off, run_of_off, run_off, hole_off,
		alias_off;
	uint64_t priv_footprint;
};
/* kvp_radix_geo fills the sizes: KVP_ERR_INVAL for a geometry out of range. */
int kvp_radix_geo(const struct kvp_geom *g, struct kvp_radix_geo *o);

/* ---- key chain ---- */
static inline uint64_t kvp_radix_fold(uint64_t a, uint64_t b)
{
	unsigned __int128 p = (unsigned __int128)a * b;
	return (uint64_t)p ^ (uint64_t)(p >> 64);
}
/* The chain value before the first block of a partition. */
static inline uint64_t kvp_radix_seed(const uint64_t salt[2], uint64_t part_salt)
{
	return kvp_radix_fold(salt[0] ^ part_salt, salt[1] ^ 0x9e3779b97f4a7c15ULL) ^ salt[0];
}
/* Key of a block from its predecessor's: one multiplication and one exclusive or in the chain, and a branch
 * in place of a conditional move. The predecessor's key is as secret as the salt. 0 and 1 are reserved. */
static inline uint64_t kvp_radix_step(const uint64_t salt[2], uint64_t prev, uint64_t local)
{
	unsigned __int128 p = (unsigned __int128)prev * (local ^ salt[1]);
	uint64_t k = (uint64_t)(p >> 64) ^ ((uint64_t)p ^ local);
	if (__builtin_expect(k < KVP_RADIX_KEY_MIN, 0))
		return k + 0x5bd1e9955bd1e995ULL;
	return k;
}

/* Area of a header table, bytes from the start of the object. */
static inline uint64_t kvp_radix_area(const struct kvp_radix *r, uint32_t log2, uint32_t side)
{
	uint64_t one = (2ULL << r->log2_max) - (1ULL << r->log2_min);
	return r->table_off + ((side ? one : 0) + (1ULL << log2) - (1ULL << r->log2_min)) * r->hdr_bytes;
}

/* ---- arenas: binary buddy over granules; state is process-local and rebuilt from the headers ---- */
#define KVP_RADIX_ORDER_MAX 11
struct kvp_radix_buddy {
	uint32_t gran_max, top_order; /* granules (multiple of 1 << top_order); largest block */
	uint32_t *bump;		      /* in shared memory: granules ever handed out */
	uint32_t head[KVP_RADIX_ORDER_MAX + 1];
	uint32_t *next, *prev; /* + 1 */
	uint8_t *state;	       /* order + 1 at the head of a free block */
	uint32_t free_gran;
	uint8_t *clean; /* 1: free block of the largest order whose memory the kernel has */
	uint32_t clean_gran;
	uint32_t scan; /* largest block that radix_give.c looks at next, 0 = no pass under way */
	uint64_t scan_seen;
};
/* kvp_radix_buddy_get: first granule of a block of 1 << order granules, or KVP_RADIX_NOPOS. */
uint32_t kvp_radix_buddy_get(struct kvp_radix_buddy *b, uint32_t order);
/* kvp_radix_buddy_put returns n granules from g on. */
void kvp_radix_buddy_put(struct kvp_radix_buddy *b, uint32_t g, uint32_t n);
int kvp_radix_buddy_open(struct kvp_radix_buddy *b, uint32_t gran_max, uint32_t top_order, uint32_t *bump);
void kvp_radix_buddy_close(struct kvp_radix_buddy *b);

/* ---- writer ---- */
#define KVP_HUGE_PAGE (2u << 20)
struct kvp_radix_sweep {     /* a map of names that is being replaced by one of twice the size */
	uint64_t *old;	     /* NULL = none */
	uint64_t from, done; /* first place swept, places swept */
	uint32_t log2;
};
/* A table of another size that is being filled beside the current one: slots before `at` have their copy. */
struct kvp_radix_next {
	char *tab; /* NULL = none */
	uint32_t *tslot;
	uint32_t log2, mask, side;
	uint64_t at, dead; /* slot of the current table that is next; tombstones in the new one */
};
struct kvp_radix_old { /* a table that was replaced: bytes before `at` are given back */
	uint64_t at, bytes; /* bytes 0 = none */
	uint32_t log2, side, tick;
};
struct kvp_radix_tour { /* see radix_tour.c */
	uint64_t id;	   /* 0 = free */
	uint64_t used;	   /* stamp of the last step */
	uint64_t told;	   /* blocks */
	uint32_t slot, part, age;
	uint32_t rid, off; /* run at hand, 0 = end; next block in it */
	/* lower tiers: highest run above that at hand that the device does not hold whole; tour_now when the
	 * tour of the device began; highest run above whose device blocks came since then */
	uint32_t broken, since, fresh;
};
struct kvp_radix_w {
	struct kvp_radix r;
	struct kvp_radix_geo geo;
	struct kvp_radix_shm *pub;
	struct kvp_radix_priv_shm *priv;
	struct kvp_ctr_column_shm *ctr;
	uint64_t *col;
	uint32_t *cut;
	char *tab; /* current header table */
	uint32_t tab_log2, tab_mask;
	uint32_t *tslot; /* table slot of a run */
	struct kvp_radix_next next;
	struct kvp_radix_old old;
	uint64_t *local, *ext;
	uint32_t *run_of;
	struct kvp_radix_run_shm *run;
	struct kvp_radix_hole_shm *hole;
	struct kvp_radix_alias_shm *alias;
	struct kvp_radix_slot_shm *slot;
	uint64_t *op_local, *op_ext;
	uint32_t rid_free, hole_free, alias_free; /* + 1 but for rid; 0 = none */
	uint32_t clear_slot, clear_at; /* slot being cleared in steps, next run to look at */
	uint32_t merge_at;			  /* next run to look at, 0 = no pass under way */
	uint64_t merge_seen;			  /* operations done when the last pass began */
	uint32_t pin_rid;			  /* run that must not be cut or killed now */
	/* names: external hash -> position. Entry: 32 bits of the mixed hash << 32 | position + 1; 0 =
	 * empty */
	uint64_t *name;
	uint32_t name_log2;
	uint64_t name_cnt;
	struct kvp_radix_sweep name_sweep;
	struct kvp_radix_ahead *ahead;	       /* NULL: nobody touches memory ahead */
	uint32_t *alias_by_ext, *alias_by_pos; /* + 1 */
	uint32_t alias_log2;
	struct kvp_radix_buddy colb, cutb;
	uint8_t *col_use; /* runs that reach into a granule */
	uint64_t *key;	  /* keys of the blocks of the current operation */
	uint32_t *dup;	  /* duplicate detection: stamp + index */
	uint32_t dup_stamp;
	struct kvp_mix dup_mix; /* engines choose the hashes */
	uint64_t dup_steps;     /* places passed by: less than one for each hash, whatever the hashes */
	struct kvp_radix_tour tour[KVP_RADIX_TOUR_MAX];
	uint64_t tour_serial, tour_tick, tour_first;
	uint32_t tour_any; /* 1: some tour is under way */
	uint32_t tour_now; /* tours begun by this writer */
	uint32_t came[KVP_RADIX_SLOT_MAX]; /* tour_now when a slot last came to hold device blocks */
};

static inline struct kvp_radix_hdr_shm *kvp_radix_hdr(const struct kvp_radix_w *w, uint32_t tslot)
{
	return (struct kvp_radix_hdr_shm *)(void *)(w->tab + (uint64_t)tslot * w->geo.hdr_bytes);
}
static inline struct kvp_radix_hdr_shm *kvp_radix_hdr_of(const struct kvp_radix_w *w, uint32_t rid)
{
	return kvp_radix_hdr(w, w->tslot[rid]);
}
static inline uint32_t kvp_radix_rid_at(const struct kvp_radix_w *w, uint32_t pos)
{
	return w->run_of[pos] & ~KVP_RADIX_NAME_OTHER;
}
static inline int kvp_radix_is_low(const struct kvp_radix_w *w, uint32_t holder)
{
	return holder >= w->geo.slot_max;
}
static inline uint64_t *kvp_radix_iv(const struct kvp_radix_w *w, const struct kvp_radix_hdr_shm *h)
{
	return (uint64_t *)(void *)(w->cut + h->low_ref);
}
static inline int kvp_radix_has_bit(const struct kvp_radix_hdr_shm *h, uint32_t slot)
{
	return (int)((h->bits[slot >> 6] >> (slot & 63)) & 1);
}

/* radix_run.c: headers and runs; radix_table.c: the table */
struct kvp_radix_hdr_shm *kvp_radix_img_load(struct kvp_radix_w *w, uint32_t tslot);
struct kvp_radix_hdr_shm *kvp_radix_img_clear(struct kvp_radix_w *w);
void kvp_radix_commit(struct kvp_radix_w *w, uint32_t tslot);
void kvp_radix_commit_finish(struct kvp_radix_w *w);
uint32_t kvp_radix_probe(const struct kvp_radix_w *w, uint64_t key);	  /* run, 0 = absent */
uint32_t kvp_radix_probe_free(const struct kvp_radix_w *w, uint64_t key); /* slot to insert at */
void kvp_radix_use_table(struct kvp_radix_w *w, uint64_t desc);
/* kvp_radix_table_fit keeps room for two more headers and goes on with a growth. */
void kvp_radix_table_fit(struct kvp_radix_w *w);
/* kvp_radix_table_tend goes on with growing, shrinking and giving back; looks done, 0 = nothing to do. */
uint32_t kvp_radix_table_tend(struct kvp_radix_w *w, uint32_t budget);
uint64_t kvp_radix_table_check(const struct kvp_radix_w *w);
/* kvp_radix_mirror repeats a change of a header in the table that is being filled. After every change. */
void kvp_radix_mirror(struct kvp_radix_w *w, const struct kvp_radix_hdr_shm *h);
void kvp_radix_area_clear(struct kvp_radix_w *w, uint32_t log2, uint32_t side);
int kvp_radix_split(struct kvp_radix_w *w, uint32_t rid, uint32_t len);
uint32_t kvp_radix_run_get(struct kvp_radix_w *w, uint64_t part_salt, uint64_t part_mix, uint32_t parent_pos);
void kvp_radix_run_link(struct kvp_radix_w *w, uint32_t rid);
uint32_t kvp_radix_parent_of(const struct kvp_radix_w *w, uint32_t rid); /* run, 0 = root */
void kvp_radix_run_put(struct kvp_radix_w *w, uint32_t rid);
void kvp_radix_col_use(struct kvp_radix_w *w, uint32_t base, uint32_t cap);
void kvp_radix_col_unuse(struct kvp_radix_w *w, uint32_t base, uint32_t cap);
void kvp_radix_reap(struct kvp_radix_w *w, uint32_t rid);
void kvp_radix_kill(struct kvp_radix_w *w, uint32_t tslot);

/* radix_cover.c: who holds what of a run */
#define KVP_RADIX_SET_WORDS (KVP_RADIX_RUN_BLK_MAX / 64)
struct kvp_radix_set { /* blocks of one run */
	uint64_t w[KVP_RADIX_SET_WORDS];
};
void kvp_radix_set_add(struct kvp_radix_set *s, uint32_t a, uint32_t b);
uint32_t kvp_radix_set_cnt(const struct kvp_radix_set *s);
/* First block from `at` on whose membership is `in`; `len` if there is none before it. */
uint32_t kvp_radix_set_next(const struct kvp_radix_set *s, uint32_t at, uint32_t len, uint64_t in);
uint32_t kvp_radix_cover_get(const struct kvp_radix_w *w, const struct kvp_radix_hdr_shm *h, uint32_t slot);
int kvp_radix_cover_set(struct kvp_radix_w *w, uint32_t rid, uint32_t slot, uint32_t blk);
int kvp_radix_holds(const struct kvp_radix_w *w, uint32_t slot, uint32_t pos);
uint32_t kvp_radix_held_end(const struct kvp_radix_w *w, uint32_t rid);
void kvp_radix_held_set(const struct kvp_radix_w *w, uint32_t rid, uint32_t slot, struct kvp_radix_set *s);
/* kvp_radix_hold adds blocks a..b-1; *fresh = how many were not held. FULL: nothing changed. */
int kvp_radix_hold(
	struct kvp_radix_w *w, uint32_t rid, uint32_t slot, uint32_t a, uint32_t b, uint32_t *fresh);
/* kvp_radix_drop takes the blocks of a set away, all of which are held, with their aliases. */
void kvp_radix_drop(struct kvp_radix_w *w, uint32_t rid, uint32_t slot, const struct kvp_radix_set *gone);
void kvp_radix_drop_all(struct kvp_radix_w *w, uint32_t rid, uint32_t slot);
/* kvp_radix_tidy makes coverage and records of a slot say the same thing once (after a kill). */
void kvp_radix_tidy(struct kvp_radix_w *w, uint32_t rid, uint32_t slot);
uint32_t kvp_radix_hole_get(struct kvp_radix_w *w, uint32_t slot, uint32_t a, uint32_t b); /* + 1, 0 = none */
void kvp_radix_hole_link(struct kvp_radix_w *w, uint32_t hole1);
void kvp_radix_hole_put(struct kvp_radix_w *w, uint32_t hole1);

/* radix_low.c: who holds what of a run in a lower tier. The calls above come here for such holders. */
int kvp_radix_low_holds(const struct kvp_radix_w *w, uint32_t holder, uint32_t pos);
void kvp_radix_low_set(const struct kvp_radix_w *w, uint32_t rid, uint32_t holder, struct kvp_radix_set *s);
uint32_t kvp_radix_low_end(const struct kvp_radix_w *w, const struct kvp_radix_hdr_shm *h);
int kvp_radix_low_hold(
	struct kvp_radix_w *w, uint32_t rid, uint32_t holder, uint32_t a, uint32_t b, uint32_t *fresh);
/* kvp_radix_low_cut takes the blocks of a set out of a holder's intervals; more than those for lack of
 * room. */
void kvp_radix_low_cut(
	struct kvp_radix_w *w, uint32_t rid, uint32_t holder, const struct kvp_radix_set *gone);
/* kvp_radix_low_room: the next kvp_radix_low_hold in this run cannot fail. FULL. */
int kvp_radix_low_room(struct kvp_radix_w *w, uint32_t rid);
/* kvp_radix_low_list writes a list that no header names yet; KVP_RADIX_NOPOS without room. */
uint32_t kvp_radix_low_list(struct kvp_radix_w *w, const uint64_t *iv, uint32_t cnt, uint32_t *low_n);
void kvp_radix_low_free(struct kvp_radix_w *w, uint32_t low_ref, uint32_t low_n);
/* kvp_radix_low_tail collects the intervals behind block len, counted from there. */
uint32_t kvp_radix_low_tail(
	const struct kvp_radix_w *w, const struct kvp_radix_hdr_shm *h, uint32_t len, uint64_t *out);
/* kvp_radix_low_clip cuts intervals at the end of their run; kvp_radix_low_tidy also joins those of one
 * holder that touch. */
void kvp_radix_low_clip(struct kvp_radix_w *w, uint32_t rid);
void kvp_radix_low_tidy(struct kvp_radix_w *w, uint32_t rid);
void kvp_radix_low_note(struct kvp_radix_w *w, uint64_t blocks); /* sets the number of lower-tier blocks */

/* radix_name.c: external hashes */
static inline uint64_t kvp_radix_name_hash(const struct kvp_radix_w *w, uint64_t ext, uint64_t part_mix)
{
	uint64_t x = (ext ^ part_mix) * 0x9fb21c651e98df25ULL;
	x ^= x >> 32;
	return (x ^ w->r.key_salt[1]) * 0xd6e8feb86659fd93ULL;
}
static inline void kvp_radix_name_prefetch(const struct kvp_radix_w *w, uint64_t hash)
{
	__builtin_prefetch(&w->name[hash >> (64 - w->name_log2)]);
	if (w->name_sweep.old)
		__builtin_prefetch(&w->name_sweep.old[hash >> (64 - w->name_sweep.log2)]);
}
uint32_t kvp_radix_name_get(const struct kvp_radix_w *w, uint64_t ext, uint64_t part_mix);
int kvp_radix_name_put(struct kvp_radix_w *w, uint64_t ext, uint64_t part_mix, uint32_t pos);
void kvp_radix_name_del(struct kvp_radix_w *w, uint64_t ext, uint64_t part_mix, uint32_t pos);
/* kvp_radix_name_move: the block is found at another position from now on. */
void kvp_radix_name_move(struct kvp_radix_w *w, uint64_t ext, uint64_t part_mix, uint32_t from, uint32_t to);
/* kvp_radix_name_sweep goes on with the growth of the map: at least budget places, to the next empty one. */
void kvp_radix_name_sweep(struct kvp_radix_w *w, uint64_t budget);
/* Position that the slot holds under ext, or KVP_RADIX_NOPOS. */
uint32_t kvp_radix_name_of(const struct kvp_radix_w *w, uint32_t slot, uint64_t ext);
uint32_t kvp_radix_alias_cnt(const struct kvp_radix_w *w, uint32_t slot, uint32_t pos);
uint32_t kvp_radix_alias_find(const struct kvp_radix_w *w, uint32_t slot, uint64_t ext, uint32_t pos);
int kvp_radix_alias_put(struct kvp_radix_w *w, uint32_t slot, uint64_t ext, uint32_t pos);
void kvp_radix_alias_del(struct kvp_radix_w *w, uint32_t alias1);
void kvp_radix_alias_drop(struct kvp_radix_w *w, uint32_t slot, uint32_t pos); /* all at pos */
int kvp_radix_alias_link(struct kvp_radix_w *w, uint32_t alias1);
/* Next alias of the chain of (slot, pos) after alias1 (0 = first), 0 = end. */
uint32_t kvp_radix_alias_next(const struct kvp_radix_w *w, uint32_t slot, uint32_t pos, uint32_t alias1);
void *kvp_radix_mem_get(uint64_t bytes); /* zeroed, unreserved; NULL = none */
void kvp_radix_mem_put(void *p, uint64_t bytes);

/* radix_ahead.c: an empty map of names of this size that was touched before; NULL = none */
uint64_t *kvp_radix_ahead_names(struct kvp_radix_w *w, uint32_t log2);

/* radix_recover.c: rebuild everything that is not kept, from the headers and the private records */
int kvp_radix_recover(struct kvp_radix_w *w, struct kvp_radix_report *rep);

/* radix_merge.c: merges in about budget looks at runs; returns looks done, 0 = nothing left to look at */
uint32_t kvp_radix_merge_some(struct kvp_radix_w *w, uint32_t budget);

/* radix_tour.c: tours are moved along: before a run is unlinked; after a run was cut behind len blocks; after
 * a tail was put into its head of len blocks */
void kvp_radix_tour_gone(struct kvp_radix_w *w, uint32_t rid);
void kvp_radix_tour_cut(struct kvp_radix_w *w, uint32_t head, uint32_t tail, uint32_t len);
void kvp_radix_tour_merged(struct kvp_radix_w *w, uint32_t head, uint32_t tail, uint32_t len);
/* A slot has come to hold blocks of a run on its device. */
static inline void kvp_radix_tour_came(struct kvp_radix_w *w, uint32_t rid, uint32_t slot)
{
	w->run[rid].came = w->came[slot] = w->tour_now;
}

/* radix_give.c: returns looks done, 0 = nothing to give back now */
uint32_t kvp_radix_give_back(struct kvp_radix_w *w, uint32_t budget);

/* radix_write.c */
void kvp_radix_gauges(struct kvp_radix_w *w);
void kvp_radix_redo(struct kvp_radix_w *w);
static inline void kvp_radix_count(struct kvp_radix_w *w, uint64_t *stat, enum kvp_ctr id, uint64_t n)
{
	kvp_add_sw_u64(stat, n);
	if (w->ctr)
		kvp_ctr_add(w->ctr, id, n);
}
#endif
