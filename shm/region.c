#include "shm/region.h"
#include <kvpick/clock.h>

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#define MAGIC 0x31524550555350ULL /* "PSUPER1" */
#define LAYOUT 1

/* Who may write an object besides the indexer, which writes all but the superblock. */
#define BY_BOOKER 1u
#define BY_SUPERVISOR 2u
#define BY_NOBODY_ELSE 0u

int kvp_region_predicted_geom(const struct kvp_geom *g, struct kvp_geom *out)
{
	*out = *g;
	out->block_max = g->predicted_max;
	return g->predicted_max != 0;
}

/* A page that nobody looks at where there are no predictions. */
static uint64_t predicted_footprint(const struct kvp_geom *g)
{
	struct kvp_geom p;
	return kvp_region_predicted_geom(g, &p) ? kvp_radix_footprint(&p) : KVP_PAGE;
}

static int predicted_new(void *mem, const struct kvp_geom *g)
{
	struct kvp_geom p;
	return kvp_region_predicted_geom(g, &p) ? kvp_radix_new(mem, &p) : KVP_OK;
}

static int predicted_join(const void *mem, const struct kvp_geom *g, struct kvp_radix *out)
{
	struct kvp_geom p;
	return kvp_region_predicted_geom(g, &p) ? kvp_radix_join(mem, &p, out) : KVP_OK;
}

struct object {
	const char *name;
	uint64_t (*footprint)(const struct kvp_geom *g);
	int (*make)(void *mem, const struct kvp_geom *g);
	unsigned writers;
};

/* Size pass, init pass and access all follow this one table. */
static const struct object object[] = {
	{"slots", kvp_slot_footprint, kvp_slot_new, BY_BOOKER | BY_SUPERVISOR},
	{"counters", kvp_counter_footprint, kvp_counter_new, BY_BOOKER | BY_SUPERVISOR},
	{"errlog", kvp_errlog_footprint, kvp_errlog_new, BY_BOOKER | BY_SUPERVISOR},
	{"commands", kvp_cmdring_footprint, kvp_cmdring_new, BY_BOOKER},
	{"booking", kvp_book_footprint, kvp_book_new, BY_BOOKER},
	{"catalogue", kvp_catalogue_footprint, kvp_catalogue_new, BY_NOBODY_ELSE},
	{"radix", kvp_radix_footprint, kvp_radix_new, BY_NOBODY_ELSE},
	{"pending", kvp_pending_footprint, kvp_pending_new, BY_BOOKER},
	{"queue", kvp_queue_footprint, kvp_queue_new, BY_BOOKER},
	{"affinity", kvp_affinity_footprint, kvp_affinity_new, BY_BOOKER},
	{"peers", kvp_peers_footprint, kvp_peers_new, BY_BOOKER | BY_SUPERVISOR},
	{"predicted", predicted_footprint, predicted_new, BY_NOBODY_ELSE},
	{"hits", kvp_hits_footprint, kvp_hits_new, BY_BOOKER},
	{"quota", kvp_quota_footprint, kvp_quota_new, BY_BOOKER},
	{"sources", kvp_peers_footprint, kvp_peers_new, BY_BOOKER},
	{"gates", kvp_gates_footprint, kvp_gates_new, BY_BOOKER},
	{"recovery", kvp_recov_footprint, kvp_recov_new, BY_SUPERVISOR},
	{"lifecycle", kvp_lifecycle_footprint, kvp_lifecycle_new, BY_BOOKER},
};
#define OBJECT_CNT (sizeof(object) / sizeof(object[0]))
_Static_assert(OBJECT_CNT <= KVP_REGION_DIR_MAX, "object directory is full");

static uint32_t layout_hash(void)
{
	const size_t w[] = {sizeof(struct kvp_super_shm), offsetof(struct kvp_super_shm, geom),
		offsetof(struct kvp_super_shm, dir), sizeof(struct kvp_geom), OBJECT_CNT};
	return kvp_obj_hash(w, sizeof(w) / sizeof(w[0]));
}

const char *kvp_region_build_id(void)
{
	return "kvpick 0.1 layout 1";
}

int kvp_region_geom(struct kvp_geom *g)
{
	static const uint32_t slots[] = {64, 256, 1024, 4096};
	uint32_t want = g->index_rank_max;
	if (want == 0 || want > 4096 || g->rank_max == 0 || g->rank_max > 65536)
		return KVP_ERR_INVAL;
	for (size_t i = 0; i < sizeof(slots) / sizeof(slots[0]); i++)
		if (want <= slots[i]) {
			g->index_rank_max = slots[i];
			break;
		}
	if (g->slot_max == 0)
		g->slot_max = KVP_SLOT_MAX;
	if (g->part_max == 0)
		g->part_max = KVP_PART_MAX;
	while (g->region_gen == 0 || g->salt[0] == 0 || g->salt[1] == 0) {
		uint64_t r[3];
		if (getrandom(r, sizeof(r), 0) != (ssize_t)sizeof(r))
			return KVP_ERR_SYS;
		g->region_gen = g->region_gen ? g->region_gen : r[0];
		g->salt[0] = g->salt[0] ? g->salt[0] : r[1];
		g->salt[1] = g->salt[1] ? g->salt[1] : r[2];
	}
	for (size_t i = 0; i < OBJECT_CNT; i++)
		if (object[i].footprint(g) == 0)
			return KVP_ERR_INVAL;
	return KVP_OK;
}

/* lay_out fills the directory; returns the total size or 0 on overflow or bad geometry. */
static uint64_t lay_out(struct kvp_super_shm *s, const struct kvp_geom *g)
{
	uint64_t off = kvp_align_up(sizeof(*s), KVP_PAGE);
	for (size_t i = 0; i < OBJECT_CNT; i++) {
		uint64_t fp = object[i].footprint(g);
		if (fp == 0 || fp > (1ULL << 46) || off > (1ULL << 46))
			return 0;
		struct kvp_dirent_shm *d = &s->dir[i];
		snprintf(d->name, sizeof(d->name), "%s", object[i].name);
		d->off = off;
		d->footprint = fp;
		off += kvp_align_up(fp, KVP_PAGE);
	}
	s->dir_cnt = OBJECT_CNT;
	return off;
}

static void read_boot_id(char out[40])
{
	memset(out, 0, 40);
	int fd = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return;
	ssize_t n = read(fd, out, 36);
	(void)n; /* an unreadable id stays empty: it is shown, never decided on */
	close(fd);
}

static int format(uint8_t *base, const struct kvp_super_shm *plan)
{
	struct kvp_super_shm *s = (struct kvp_super_shm *)(void *)base;
	kvp_obj_begin(
		&s->hdr, LAYOUT, layout_hash(), kvp_align_up(sizeof(*s), KVP_PAGE), plan->geom.region_gen);
	s->geom = plan->geom;
	s->total_bytes = plan->total_bytes;
	s->dir_cnt = plan->dir_cnt;
	memcpy(s->dir, plan->dir, sizeof(s->dir));
	snprintf(s->build_id, sizeof(s->build_id), "%s", kvp_region_build_id());
	read_boot_id(s->boot_id);
	s->created_real_ns = kvp_clock_real_ns();
	s->created_mono_ns = kvp_clock_mono_ns();
	for (size_t i = 0; i < OBJECT_CNT; i++) {
		int rc = object[i].make(base + s->dir[i].off, &s->geom);
		if (rc)
			return rc;
	}
	kvp_obj_ready(&s->hdr, MAGIC);
	return KVP_OK;
}

int kvp_region_create(const struct kvp_geom *g, int *out_fd)
{
	struct kvp_super_shm plan;
	memset(&plan, 0, sizeof(plan));
	plan.geom = *g;
	plan.total_bytes = lay_out(&plan, g);
	if (!plan.total_bytes)
		return KVP_ERR_INVAL;
	int rc = KVP_ERR_SYS;
	int fd = memfd_create("kvpick-region", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	if (fd < 0)
		return rc;
	uint8_t *base = MAP_FAILED;
	if (ftruncate(fd, (off_t)plan.total_bytes) != 0)
		goto out;
	if (fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0)
		goto out;
	base = mmap(NULL, plan.total_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
	if (base == MAP_FAILED)
		goto out;
	rc = format(base, &plan);
out:
	if (base != MAP_FAILED)
		munmap(base, plan.total_bytes);
	if (rc) {
		int saved = errno;
		close(fd);
		errno = saved;
		return rc;
	}
	*out_fd = fd;
	return KVP_OK;
}

/* check_super trusts nothing but the descriptor's size. */
static int check_super(const struct kvp_super_shm *s, uint64_t size)
{
	int rc = kvp_obj_join(&s->hdr, MAGIC, LAYOUT, layout_hash());
	if (rc)
		return rc;
	if (s->total_bytes != size || s->dir_cnt != OBJECT_CNT)
		return KVP_ERR_LAYOUT;
	if (strncmp(s->build_id, kvp_region_build_id(), sizeof(s->build_id)) != 0)
		return KVP_ERR_LAYOUT;
	for (size_t i = 0; i < OBJECT_CNT; i++) {
		const struct kvp_dirent_shm *d = &s->dir[i];
		if (strncmp(d->name, object[i].name, sizeof(d->name)) != 0 || d->off % KVP_PAGE ||
			d->off > size || d->footprint > size - d->off)
			return KVP_ERR_LAYOUT;
	}
	return KVP_OK;
}

static int may_write(enum kvp_region_access access, unsigned writers)
{
	switch (access) {
	case KVP_REGION_INDEXER:
		return 1;
	case KVP_REGION_BOOKER:
		return (writers & BY_BOOKER) != 0;
	case KVP_REGION_SUPERVISOR:
		return (writers & BY_SUPERVISOR) != 0;
	default:
		return 0;
	}
}

static int protect(struct kvp_region *r, enum kvp_region_access access)
{
	if (access != KVP_REGION_SUPERVISOR &&
		mprotect(r->base, kvp_align_up(sizeof(struct kvp_super_shm), KVP_PAGE), PROT_READ) != 0)
		return KVP_ERR_SYS;
	for (size_t i = 0; i < OBJECT_CNT; i++) {
		const struct kvp_dirent_shm *d = &r->super->dir[i];
		if (!may_write(access, object[i].writers) &&
			mprotect(r->base + d->off, kvp_align_up(d->footprint, KVP_PAGE), PROT_READ) != 0)
			return KVP_ERR_SYS;
	}
	return KVP_OK;
}

/* A lease of a session ends with its reservation. */
static void end_lease(void *ctx, uint64_t session)
{
	kvp_affinity_release(ctx, session, kvp_clock_mono_ns());
}

static int join_objects(struct kvp_region *r)
{
	const struct kvp_dirent_shm *d = r->super->dir;
	const struct kvp_geom *g = &r->geom;
	int rc = kvp_slot_join(r->base + d[0].off, g, &r->slots);
	rc = rc ? rc : kvp_counter_join(r->base + d[1].off, g, &r->counters);
	rc = rc ? rc : kvp_errlog_join(r->base + d[2].off, g, &r->errlog);
	rc = rc ? rc : kvp_cmdring_join(r->base + d[3].off, g, &r->cmd);
	rc = rc ? rc : kvp_book_join(r->base + d[4].off, g, &r->book);
	rc = rc ? rc : kvp_catalogue_join(r->base + d[5].off, g, &r->cat);
	rc = rc ? rc : kvp_radix_join(r->base + d[6].off, g, &r->radix);
	rc = rc ? rc : kvp_pending_join(r->base + d[7].off, g, &r->pending);
	rc = rc ? rc : kvp_queue_join(r->base + d[8].off, g, &r->queue);
	rc = rc ? rc : kvp_affinity_join(r->base + d[9].off, g, &r->affinity);
	rc = rc ? rc : kvp_peers_join(r->base + d[10].off, g, &r->peers);
	rc = rc ? rc : predicted_join(r->base + d[11].off, g, &r->predicted);
	rc = rc ? rc : kvp_hits_join(r->base + d[12].off, g, &r->hits);
	rc = rc ? rc : kvp_quota_join(r->base + d[13].off, g, &r->quota);
	rc = rc ? rc : kvp_peers_join(r->base + d[14].off, g, &r->sources);
	rc = rc ? rc : kvp_gates_join(r->base + d[15].off, g, &r->gates);
	rc = rc ? rc : kvp_recov_join(r->base + d[16].off, g, &r->recov);
	rc = rc ? rc : kvp_lifecycle_join(r->base + d[17].off, g, &r->lifecycle);
	if (rc)
		return rc;
	kvp_book_on_end(&r->book, end_lease, &r->affinity);
	r->lifecycle.slots = &r->slots;
	r->lifecycle.book = &r->book;
	return KVP_OK;
}

int kvp_region_join(int fd, enum kvp_region_access access, struct kvp_region *r)
{
	struct stat st;
	if (fstat(fd, &st) != 0)
		return KVP_ERR_SYS;
	if (st.st_size < (off_t)sizeof(struct kvp_super_shm))
		return KVP_ERR_LAYOUT;
	memset(r, 0, sizeof(*r));
	r->fd = fd;
	r->total_bytes = (uint64_t)st.st_size;
	int prot = access == KVP_REGION_LOOK ? PROT_READ : PROT_READ | PROT_WRITE;
	r->base = mmap(NULL, r->total_bytes, prot, MAP_SHARED | MAP_NORESERVE, fd, 0);
	if (r->base == MAP_FAILED)
		return KVP_ERR_SYS;
	r->super = (struct kvp_super_shm *)(void *)r->base;
	int rc = check_super(r->super, r->total_bytes);
	if (!rc) {
		r->geom = r->super->geom;
		rc = access == KVP_REGION_LOOK ? KVP_OK : protect(r, access);
	}
	if (!rc)
		rc = join_objects(r);
	if (rc)
		kvp_region_leave(r);
	return rc;
}

void kvp_region_leave(struct kvp_region *r)
{
	kvp_book_leave(&r->book);
	if (r->base && r->base != MAP_FAILED)
		munmap(r->base, r->total_bytes);
	memset(r, 0, sizeof(*r));
	r->fd = -1;
}
