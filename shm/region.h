/* shm/region.h — the node's shared memory: one sparse memfd, created whole, mapped once, never remapped.
 *
 * Shape      superblock page, then every object of the node at a page-aligned offset; the object directory in
 *            the superblock names them. Offsets and indices only, no pointers.
 * Truth      superblock: generation, geometry, directory, secret salt.
 * Writers    kvp_region_create (the supervisor), before any other process exists. Each object names its own.
 * Readers    all; tree and catalogue are mapped read-only in every process but the indexer, so that a wild
 *            store faults there instead of corrupting them.
 * Ordering   the superblock's magic is stored last (kvp_obj_ready), after every object is complete.
 * Lifetime   the descriptor: the region is gone when the last process that holds it is.
 * Crash      creator killed: nobody has the descriptor, the kernel frees the memory.
 * Proved by  tests/t_region.c
 */
#ifndef KVP_SHM_REGION_H
#define KVP_SHM_REGION_H

#include "shm/affinity.h"
#include "shm/catalogue.h"
#include "shm/cmdring.h"
#include "shm/counter.h"
#include "shm/errlog.h"
#include "shm/gate.h"
#include "shm/hits.h"
#include "shm/lifecycle.h"
#include "shm/obj.h"
#include "shm/peers.h"
#include "shm/pending.h"
#include "shm/queue.h"
#include "shm/quota.h"
#include "shm/radix.h"
#include "shm/recov.h"
#include "shm/resv.h"
#include "shm/slot.h"

#define KVP_REGION_DIR_MAX 24
#define KVP_BUILD_ID_BYTES 48

struct kvp_dirent_shm {
	char name[32];
	uint64_t off;	    /* bytes from region start, page multiple */
	uint64_t footprint; /* bytes */
};

struct kvp_super_shm {
	struct kvp_objhdr hdr;
	char build_id[KVP_BUILD_ID_BYTES]; /* version and layout of the creator; joiners must have the same */
	char boot_id[40];		   /* kernel boot id at creation */
	uint64_t created_real_ns;	   /* CLOCK_REALTIME */
	uint64_t created_mono_ns;	   /* CLOCK_MONOTONIC */
	uint64_t total_bytes;		   /* size of the memfd */
	struct kvp_geom geom;
	uint32_t dir_cnt, pad;
	struct kvp_dirent_shm dir[KVP_REGION_DIR_MAX];
};

/* What a process may write; everything else is mapped read-only. */
enum kvp_region_access {
	KVP_REGION_LOOK,       /* tools: nothing */
	KVP_REGION_BOOKER,     /* httpd, extproc, peer: all but superblock, catalogue, tree */
	KVP_REGION_INDEXER,    /* indexer: all but the superblock */
	KVP_REGION_SUPERVISOR, /* supervisor: superblock, slots, counters, error log, replica peers */
};

struct kvp_region { /* process-local */
	int fd;
	uint8_t *base;
	uint64_t total_bytes;
	struct kvp_super_shm *super;
	struct kvp_geom geom;
	struct kvp_slots slots;
	struct kvp_counters counters;
	struct kvp_errlog errlog;
	struct kvp_cmdring cmd;
	struct kvp_cat cat;
	struct kvp_radix radix;
	struct kvp_radix predicted; /* shm NULL: no predictions beside KV events */
	struct kvp_book book;
	struct kvp_pending pending;
	struct kvp_queue queue;
	struct kvp_affinity affinity;
	struct kvp_hits hits;
	struct kvp_peers peers;
	struct kvp_peers sources; /* base addresses (http://ip:port) that the index may be recovered from */
	struct kvp_quota quota;
	struct kvp_gates gates;
	struct kvp_recov recov;
	struct kvp_lifecycle_ring lifecycle; /* shm NULL: no replica sync */
};

/* kvp_region_geom rounds a requested geometry to what can be built: index ranks up to 64, 256, 1024 or 4096.
 * errors  KVP_ERR_INVAL when a count is out of the range given in obj.h. Fills region_gen and salt when they
 * are 0.
 */
int kvp_region_geom(struct kvp_geom *g);

/* kvp_region_predicted_geom is the geometry of the tree of predictions; 0 = there is none. */
int kvp_region_predicted_geom(const struct kvp_geom *g, struct kvp_geom *out);

/* kvp_region_create makes a region and formats every object.
 *
 * g       from kvp_region_geom.
 * fd      out: memfd, close-on-exec, size fixed (sealed against shrinking and growing).
 * errors  KVP_ERR_INVAL geometry, KVP_ERR_SYS (errno set) when memory can't be had.
 * blocks  no; touches only header pages (tens of microseconds).
 * who     the supervisor; tests.
 */
int kvp_region_create(const struct kvp_geom *g, int *fd);

/* kvp_region_join maps a region and joins every object.
 *
 * errors  KVP_ERR_AGAIN under construction, KVP_ERR_LAYOUT another build or a damaged directory (all offsets
 * are checked against the descriptor's size), KVP_ERR_SYS mmap or fstat failed. Nothing stays mapped then.
 * who     once per process; r is not movable while handles of its objects are in use.
 */
int kvp_region_join(int fd, enum kvp_region_access access, struct kvp_region *r);

/* kvp_region_leave unmaps; the descriptor stays the caller's. */
void kvp_region_leave(struct kvp_region *r);

/* kvp_region_own_column returns the counter column of a slot. */
static inline struct kvp_ctr_column_shm *kvp_region_own_column(struct kvp_region *r, uint32_t slot)
{
	KVP_ASSERT(slot < r->counters.slot_max);
	return &r->counters.column[slot];
}

/* kvp_region_build_id is the text that creator and joiner must share. */
const char *kvp_region_build_id(void);
#endif
