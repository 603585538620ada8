/* The region: geometry, creation, joining with the access of each role, damage, second build. */
#include "shm/region.h"
#include "tests/tap.h"

#include <errno.h>
#include <setjmp.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

static struct kvp_geom small(void)
{
	return (struct kvp_geom){.slot_max = 8,
		.rank_max = 64,
		.index_rank_max = 10,
		.resv_max = 256,
		.block_max = 20000,
		.active_block_max = 4096,
		.queued_max = 16,
		.part_max = 4};
}

/* dies: does a store of one byte at p kill a child with SIGSEGV? */
static int dies(volatile uint8_t *p)
{
	int st;
	pid_t pid = fork();
	if (pid == 0) {
		signal(SIGSEGV, SIG_DFL);
		uint8_t v = *p;
		*p = v;
		_exit(0);
	}
	waitpid(pid, &st, 0);
	return WIFSIGNALED(st) || WEXITSTATUS(st) != 0; /* sanitizers turn the signal into an exit code */
}

static void test_geometry(void)
{
	struct kvp_geom g = small();
	is_u64(kvp_region_geom(&g), KVP_OK, "a small geometry is fine");
	is_u64(g.index_rank_max, 64, "index ranks round up to a built geometry");
	ok(g.region_gen && g.salt[0] && g.salt[1], "generation and salts are drawn");
	struct kvp_geom bad = small();
	bad.rank_max = 0;
	ok(kvp_region_geom(&bad) == KVP_ERR_INVAL, "no rank is refused");
	bad = small();
	bad.index_rank_max = 5000;
	ok(kvp_region_geom(&bad) == KVP_ERR_INVAL, "too many index ranks are refused");
	bad = small();
	bad.resv_max = 1;
	ok(kvp_region_geom(&bad) == KVP_ERR_INVAL, "an object's own range is checked");
}

static void test_access(int fd)
{
	static struct kvp_region r;
	const enum kvp_region_access all[] = {
		KVP_REGION_LOOK, KVP_REGION_BOOKER, KVP_REGION_INDEXER, KVP_REGION_SUPERVISOR};
	/* expected fault per access: superblock, slots, booking, catalogue, tree */
	const int faults[4][5] = {{1, 1, 1, 1, 1}, {1, 0, 0, 1, 1}, {1, 0, 0, 0, 0}, {0, 0, 1, 1, 1}};
	const char *name[5] = {"superblock", "slots", "booking", "catalogue", "radix"};
	for (int a = 0; a < 4; a++) {
		if (!ok(kvp_region_join(fd, all[a], &r) == KVP_OK, "join with access %d", a))
			continue;
		for (int o = 0; o < 5; o++) {
			uint64_t off = 0;
			for (uint32_t i = 0; i < r.super->dir_cnt && o; i++)
				if (strcmp(r.super->dir[i].name, name[o]) == 0)
					off = r.super->dir[i].off;
			ok(dies(r.base + off + 64) == faults[a][o], "access %d: %s is %s", a, name[o],
				faults[a][o] ? "read-only" : "writable");
		}
		kvp_region_leave(&r);
	}
}

static void test_damage(int fd, uint64_t size)
{
	static struct kvp_region r;
	struct kvp_super_shm *s = mmap(NULL, sizeof(*s), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	uint64_t off = s->dir[2].off;
	s->dir[2].off = size;
	ok(kvp_region_join(fd, KVP_REGION_LOOK, &r) == KVP_ERR_LAYOUT, "an offset behind the end is refused");
	s->dir[2].off = off;
	s->build_id[0] ^= 1;
	ok(kvp_region_join(fd, KVP_REGION_LOOK, &r) == KVP_ERR_LAYOUT, "another build is refused");
	s->build_id[0] ^= 1;
	uint64_t magic = s->hdr.magic;
	s->hdr.magic = 0;
	ok(kvp_region_join(fd, KVP_REGION_LOOK, &r) == KVP_ERR_AGAIN, "a region under construction is AGAIN");
	s->hdr.magic = magic;
	ok(kvp_region_join(fd, KVP_REGION_LOOK, &r) == KVP_OK, "restored, it joins again");
	kvp_region_leave(&r);
	munmap(s, sizeof(*s));
}

int main(void)
{
	_Static_assert(sizeof(struct kvp_objhdr) == 64, "object header is one cache line");
	_Static_assert(offsetof(struct kvp_objhdr, region_gen) == 24, "object header layout");
	struct kvp_geom g = small();
	int fd = -1;
	struct stat st;
	test_geometry();
	kvp_region_geom(&g);
	if (!ok(kvp_region_create(&g, &fd) == KVP_OK, "a region is created"))
		return done();
	fstat(fd, &st);
	ok(st.st_size > 0 && st.st_blocks * 512 < (16 << 20), "it is sparse: %lld of %lld bytes in memory",
		(long long)st.st_blocks * 512, (long long)st.st_size);
	ok(ftruncate(fd, 4096) != 0 && errno == EPERM, "nobody can shrink it");
	test_access(fd);
	test_damage(fd, (uint64_t)st.st_size);
	close(fd);
	int junk = memfd_create("junk", MFD_CLOEXEC);
	static struct kvp_region r;
	ok(kvp_region_join(junk, KVP_REGION_LOOK, &r) == KVP_ERR_LAYOUT, "an empty file is no region");
	ok(kvp_region_join(-1, KVP_REGION_LOOK, &r) == KVP_ERR_SYS, "a bad descriptor is a system error");
	close(junk);
	return done();
}
