/* Memory touched ahead of the tree's writer, maps of names that grow while they are used, and the pages of a
 * reader's mapping. */
#include "shm/radix_ahead.h"
#include "shm/radix_priv.h"
#include "tests/procs.h"
#include "tests/tap.h"

#include <pthread.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#define BLOCKS 300000u
#define BATCH 500u

static struct kvp_geom geom = {.slot_max = 8,
	.rank_max = 64,
	.index_rank_max = 64,
	.block_max = 2000000,
	.region_gen = 7,
	.salt = {1, 2}};
static struct kvp_radix radix;
static struct kvp_radix_w *w;
static struct kvp_radix_ahead *ahead;
static uint64_t touched;
static uint32_t stop;

static uint64_t mix(uint64_t x)
{
	x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
	x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
	return x ^ (x >> 31);
}

static uint64_t ext_of(uint64_t i)
{
	return mix(i + 1);
}

static int resident(const void *p)
{
	unsigned char v = 0;
	void *page = (void *)((uintptr_t)p & ~(uintptr_t)(KVP_PAGE - 1));
	return mincore(page, KVP_PAGE, &v) == 0 && (v & 1);
}

static void store(uint32_t from, uint32_t n)
{
	uint64_t local[BATCH], ext[BATCH];
	for (uint32_t i = 0; i < n; i++) {
		local[i] = mix(from + i + 0x5000000000ULL);
		ext[i] = ext_of(from + i);
	}
	if (kvp_radix_store(w, 3, 1, from ? KVP_RADIX_CHILD : KVP_RADIX_ROOT, from ? ext_of(from - 1) : 0, n,
		    local, ext, NULL))
		exit(1);
}

static void *helper(void *arg)
{
	(void)arg;
	while (!kvp_ld_acq_u32(&stop)) {
		touched += kvp_radix_ahead_run(ahead);
		usleep(200);
	}
	return NULL;
}

/* Every name leads somewhere while entries of the old map are still on their way, and removal finds them. */
static void names_on_the_way(void)
{
	uint32_t at = 0, lost = 0, seen = 0, unknown, gone = 0;
	uint64_t ext[1];
	for (; at < 40000; at += 20) {
		store(at, 20);
		if (!w->name_sweep.old)
			continue;
		seen++;
		for (uint32_t i = 0; i < at; i += 97)
			lost += kvp_radix_name_of(w, 3, ext_of(i)) == KVP_RADIX_NOPOS;
	}
	ok(seen > 100 && lost == 0, "%u looks at a growing map, %u names lost", seen, lost);
	is_u64(kvp_radix_w_check(w), 0, "the tree is sound");
	while (!w->name_sweep.old) {
		store(at, 20);
		at += 20;
	}
	for (uint32_t i = at; i-- > 0;) {
		ext[0] = ext_of(i);
		kvp_radix_remove(w, 3, 1, ext, &unknown);
		gone += unknown == 0;
	}
	ok(gone == at && w->name_cnt == 0, "all %u names removed, some from either map", at);
	kvp_radix_name_sweep(w, UINT64_MAX);
	ok(!w->name_sweep.old, "the old map is gone");
}

static void ahead_of_writer(void)
{
	pthread_t t;
	ok(kvp_radix_ahead_open(w, KVP_RADIX_HUGE_TRY, &ahead) == KVP_OK, "ahead is opened");
	printf("# huge pages: %d\n", kvp_radix_ahead_huge(ahead));
	ok(kvp_radix_ahead_due(ahead) == 1, "an empty tree has something due");
	touched = kvp_radix_ahead_run(ahead);
	ok(touched > 0 && kvp_radix_ahead_due(ahead) == 0, "%llu bytes touched, nothing due",
		(unsigned long long)touched);
	ok(resident(w->col + 8000) && resident(w->ext + 8000) && resident(w->run_of + 8000) &&
			resident(w->cut),
		"the first pages are there");
	uint32_t log2 = w->name_log2;
	if (pthread_create(&t, NULL, helper, NULL))
		exit(1);
	for (uint32_t at = 0; at < BLOCKS; at += BATCH) {
		store(at, BATCH);
		kvp_radix_ahead_due(ahead);
	}
	kvp_st_rel_u32(&stop, 1);
	pthread_join(t, NULL);
	touched += kvp_radix_ahead_run(ahead);
	is_u64(kvp_radix_ahead_run(ahead), 0, "a second run finds nothing to do");
	uint64_t end = (uint64_t)w->pub->col_bump * KVP_RADIX_COL_GRAN;
	ok(resident(w->col + end) && resident(w->local + end) && resident(w->col + end + 8000),
		"the pages behind the last block are there (%llu bytes touched)",
		(unsigned long long)touched);
	ok(w->name_log2 > log2, "the map of names grew from 2^%u to 2^%u", log2, w->name_log2);
	ok(kvp_radix_check(&radix) == 0 && kvp_radix_w_check(w) == 0, "the tree is sound");
	kvp_radix_ahead_close(ahead);
	ok(w->ahead == NULL, "closed");
}

static void reader(int fd)
{
	struct kvp_radix r;
	struct kvp_radix_touch touch = {0};
	uint64_t bytes = kvp_radix_footprint(&geom), sum = 0, n;
	void *p = mmap(NULL, bytes, PROT_READ, MAP_SHARED | MAP_NORESERVE, fd, 0);
	if (p == MAP_FAILED || kvp_radix_join(p, &geom, &r))
		exit(1);
	n = kvp_radix_touch(&r, &touch, 65536);
	ok(n > 0 && n <= 65536, "a look within its budget: %llu bytes", (unsigned long long)n);
	for (sum = n; (n = kvp_radix_touch(&r, &touch, 1 << 20)) != 0; sum += n)
		;
	ok(sum >= BLOCKS * 8, "all of the key column: %llu bytes", (unsigned long long)sum);
	store(BLOCKS, BATCH);
	for (uint32_t i = 1; i < 100; i++)
		store(BLOCKS + i * BATCH, BATCH);
	ok(kvp_radix_touch(&r, &touch, UINT64_MAX) > 0, "after growth there is more");
	is_u64(kvp_radix_touch(&r, &touch, UINT64_MAX), 0, "and then nothing");
	munmap(p, bytes);
}

int main(void)
{
	int fd, priv_fd;
	void *pub = shared_file(kvp_radix_footprint(&geom), &fd),
	     *priv = shared_file(kvp_radix_priv_footprint(&geom), &priv_fd);
	if (kvp_radix_new(pub, &geom) || kvp_radix_priv_new(priv, &geom) ||
		kvp_radix_join(pub, &geom, &radix) ||
		kvp_radix_w_open(pub, priv, &geom, KVP_RADIX_RECOVER, NULL, &w, NULL))
		return 1;
	names_on_the_way();
	ahead_of_writer();
	reader(fd);
	kvp_radix_w_close(w);
	return done();
}
