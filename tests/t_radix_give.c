/* Memory of what was removed goes back to the kernel, and can be used again. */
#include "shm/radix_priv.h"
#include "tests/procs.h"
#include "tests/radix_model.h"
#include "tests/tap.h"

#include <sys/stat.h>

#define PART 5
#define CHAINS 300u
#define LEN 2000u
static struct kvp_geom geom = {.slot_max = 8,
	.rank_max = 64,
	.index_rank_max = 64,
	.block_max = 2000000,
	.region_gen = 7,
	.salt = {1, 2}};
static struct kvp_radix radix;
static struct kvp_radix_w *w;
static struct kvp_radix_match *match;
static uint64_t local[LEN], ext[LEN];
static int fd[2];

static uint64_t kib(void)
{
	struct stat a, b;
	if (fstat(fd[0], &a) || fstat(fd[1], &b))
		exit(1);
	return (uint64_t)(a.st_blocks + b.st_blocks) / 2;
}

static void chain(uint64_t c)
{
	struct rng r = {c * 7919};
	for (uint32_t i = 0; i < LEN; i++) {
		local[i] = rnd(&r);
		ext[i] = rnd(&r);
	}
}

static void put_all(void)
{
	for (uint64_t c = 0; c < CHAINS; c++) {
		chain(c);
		if (kvp_radix_store(w, c % 2, PART, KVP_RADIX_ROOT, 0, LEN, local, ext, NULL))
			exit(1);
	}
}

static uint32_t found(void)
{
	uint32_t n = 0;
	for (uint64_t c = 0; c < CHAINS; c++) {
		chain(c);
		struct kvp_radix_query q = {PART, local, LEN, LEN, NULL, NULL};
		kvp_radix_find(&radix, &q, match);
		n += match->longest == LEN && match->active[0] == 1ULL << (c % 2);
	}
	return n;
}

static uint64_t tend(void)
{
	struct kvp_radix_stats st;
	while (kvp_radix_w_tend(w, 64))
		;
	kvp_radix_stats(&radix, &st);
	return st.given_back_bytes;
}

int main(void)
{
	void *pub = shared_file(kvp_radix_footprint(&geom), &fd[0]),
	     *priv = shared_file(kvp_radix_priv_footprint(&geom), &fd[1]);
	match = malloc(sizeof(*match));
	if (kvp_radix_new(pub, &geom) || kvp_radix_priv_new(priv, &geom) ||
		kvp_radix_join(pub, &geom, &radix) ||
		kvp_radix_w_open(pub, priv, &geom, KVP_RADIX_RECOVER, NULL, &w, NULL))
		return 1;
	put_all();
	is_u64(tend(), 0, "a full tree gives nothing back");
	uint64_t full = kib();
	kvp_radix_clear(w, 0);
	uint64_t given = tend();
	ok(kvp_radix_check(&radix) == 0 && kvp_radix_w_check(w) == 0,
		"half of it cleared: the tree is sound");
	is_u64(found(), CHAINS / 2, "the other half is found");
	kvp_radix_clear(w, 1);
	given = tend();
	uint64_t less = kib();
	ok(given > 4 << 20 && full - less > 4096,
		"all cleared: %llu of %llu KiB given back, %llu by the count",
		(unsigned long long)(full - less), (unsigned long long)full,
		(unsigned long long)given / 1024);
	is_u64(kvp_radix_w_tend(w, 64), 0, "nothing more to do");
	put_all();
	is_u64(found(), CHAINS, "the memory is used again");
	ok(kvp_radix_check(&radix) == 0 && kvp_radix_w_check(w) == 0, "the tree is sound");
	ok(kib() <= full + full / 8, "and there is no more of it than before: %llu KiB",
		(unsigned long long)kib());
	kvp_radix_w_close(w);
	free(match);
	return done();
}
