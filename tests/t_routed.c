/* Bookings as content of the tree: capacity, long paths, ages at their edges, ranks that go, a killed
 * writer. */
#include "shm/routed.h"
#include "tests/radix_model.h"
#include "tests/tap.h"

#include <signal.h>
#include <sys/wait.h>
#include <time.h>

#define PART 9
#define SEC 1000000000ull
static struct kvp_geom geom = {.slot_max = 8,
	.rank_max = 64,
	.index_rank_max = 64,
	.block_max = 10000,
	.region_gen = 7,
	.salt = {1, 2}};
static struct seg seg;
static struct kvp_radix radix;
static struct kvp_radix_w *w;
static struct kvp_routed *t;
static struct kvp_radix_match *match;
static struct kvp_ctr_column_shm ctr;
static uint64_t local[70000];

static struct kvp_routed_cfg config(void)
{
	return (struct kvp_routed_cfg){
		.ttl_ns = 10 * SEC, .entry_max = 10000, .slot_max = 64, .salt = 3, .ctr = &ctr};
}

static int start(const struct kvp_routed_cfg *cfg)
{
	struct kvp_radix_report rep;
	if (kvp_radix_w_open(seg.pub, seg.priv, &geom, KVP_RADIX_RECOVER, NULL, &w, &rep))
		return -1;
	kvp_radix_w_set_ready(w, 1);
	return kvp_routed_open(w, cfg, &t);
}

static void stop(void)
{
	kvp_routed_close(t);
	kvp_radix_w_close(w);
	t = NULL;
	w = NULL;
}

static void fresh(const struct kvp_routed_cfg *cfg)
{
	stop();
	if (seg.pub)
		seg_free(&seg);
	memset(&ctr, 0, sizeof(ctr));
	if (seg_new(&seg, &geom) || kvp_radix_join(seg.pub, &geom, &radix) || start(cfg))
		exit(1);
}

static void path(uint64_t name, uint32_t n)
{
	for (uint32_t i = 0; i < n; i++)
		local[i] = name * 1000003 + i;
}

static uint32_t record(uint32_t slot, uint64_t name, uint32_t n, uint64_t limit, uint64_t now_ns)
{
	path(name, n);
	return kvp_routed_record(t, slot, PART, n, local, limit, now_ns);
}

static uint32_t depth(uint32_t slot, uint64_t name, uint32_t n)
{
	path(name, n);
	struct kvp_radix_query q = {PART, local, n, n, NULL, NULL};
	kvp_radix_find(&radix, &q, match);
	return match->active[slot >> 6] >> (slot & 63) & 1 ? match->depth[slot] : 0;
}

static uint64_t faults(void)
{
	return kvp_routed_check(t) + kvp_radix_check(&radix) + kvp_radix_w_check(w);
}

static void ages(void)
{
	struct kvp_routed_cfg cfg = config();
	fresh(&cfg);
	is_u64(record(1, 1, 40, 0, 5 * SEC), 40, "a booking of 40 blocks");
	record(1, 1, 20, 0, 8 * SEC);
	is_u64(kvp_routed_tend(t, 15 * SEC - 1, 1000), 0, "nothing ends a nanosecond early");
	is_u64(kvp_routed_tend(t, 15 * SEC, 7), 7, "at its age it ends, as many blocks at once as asked for");
	is_u64(depth(1, 1, 40), 33, "those at the end first");
	while (kvp_routed_tend(t, 15 * SEC, 7))
		;
	is_u64(depth(1, 1, 40), 20, "what was recorded again lives on");
	is_u64(faults(), 0, "no faults");
	while (kvp_routed_tend(t, 18 * SEC, 7))
		;
	is_u64(depth(1, 1, 40) + kvp_routed_cnt(t, KVP_RADIX_SLOT_ALL), 0, "then ends, too");
	is_u64(ctr.val[KVP_CTR_ROUTED_EXPIRED], 40, "all blocks counted");
	cfg.ttl_ns = 0;
	fresh(&cfg);
	record(1, 1, 5, 0, SEC);
	is_u64(kvp_routed_tend(t, SEC, 100), 5, "an age of 0: gone at once");
	cfg.ttl_ns = UINT64_MAX;
	fresh(&cfg);
	record(1, 1, 5, 0, SEC);
	is_u64(kvp_routed_tend(t, UINT64_MAX - 1, 100), 0, "the greatest age: never");
}

static void capacity(void)
{
	struct kvp_routed_cfg cfg = config();
	cfg.entry_max = 500;
	fresh(&cfg);
	for (uint32_t i = 0; i < 100; i++)
		if (record(i % 5, i, 60, 0, i * SEC) != 60 || depth(i % 5, i, 60) != 60)
			ok(0, "booking %u", i);
	ok(kvp_routed_cnt(t, KVP_RADIX_SLOT_ALL) <= 500, "never more entries than there is room for");
	is_u64(depth(2, 97, 60), 60, "the newest are kept");
	is_u64(depth(0, 85, 60), 0, "the oldest went, whatever their rank");
	is_u64(ctr.val[KVP_CTR_ROUTED_PRUNED],
		ctr.val[KVP_CTR_ROUTED_STORED] - kvp_routed_cnt(t, KVP_RADIX_SLOT_ALL),
		"and were counted");
	is_u64(record(1, 1000, 900, 0, 200 * SEC), 500, "a path longer than all room is cut");
	is_u64(ctr.val[KVP_CTR_ROUTED_CUT], 400, "which is counted");
	is_u64(faults(), 0, "no faults");
	cfg.entry_max = 100000;
	fresh(&cfg);
	uint32_t short_cnt = 0;
	for (uint32_t i = 0; i < 300; i++)
		short_cnt += record(i % 7, i, 100, 0, i * SEC) != 100 || depth(i % 7, i, 100) != 100;
	is_u64(short_cnt, 0, "in a full tree the oldest make room");
	ok(ctr.val[KVP_CTR_ROUTED_PRUNED] > 1000, "it was full");
	is_u64(faults(), 0, "no faults");
}

static void limits(void)
{
	struct kvp_routed_cfg cfg = config();
	cfg.policy = KVP_ROUTED_LRU;
	fresh(&cfg);
	is_u64(record(1, 1, 300, 100, SEC), 100, "a path longer than its rank's limit is cut to it");
	record(1, 2, 30, 100, SEC);
	is_u64(kvp_routed_cnt(t, 1), 100, "a rank holds no more than its limit");
	is_u64(depth(1, 1, 300), 70, "the older path lost its end");
	is_u64(depth(1, 2, 30), 30, "the newer one is whole");
	is_u64(kvp_routed_tend(t, 1ull << 60, 1000), 0, "nothing ends by age");
	record(2, 3, 200, 0, SEC);
	is_u64(kvp_routed_cnt(t, 2), 200, "a rank of unknown size has no limit of its own");
	record(1, 1, 10, 20, SEC);
	is_u64(kvp_routed_cnt(t, 1), 20, "a lowered limit takes effect with the next booking");
	is_u64(depth(1, 1, 300), 10, "what was booked is whole");
	record(1, 9, 0, 20, SEC);
	is_u64(kvp_routed_cnt(t, 1), 20, "a booking without blocks changes nothing");
	is_u64(faults(), 0, "no faults");
}

static void big_path(void)
{
	struct kvp_geom small = geom;
	struct kvp_routed_cfg cfg = config();
	geom.block_max = 200000;
	cfg.entry_max = 200000;
	fresh(&cfg);
	is_u64(record(1, 1, 70000, 0, SEC), KVP_ROUTED_BLK_MAX, "70,000 blocks: the first 65,536 are kept");
	is_u64(depth(1, 1, 70000), KVP_ROUTED_BLK_MAX, "and found");
	is_u64(ctr.val[KVP_CTR_ROUTED_CUT], 70000 - KVP_ROUTED_BLK_MAX, "the others counted");
	is_u64(faults(), 0, "no faults");
	geom = small;
}

static void ranks_go(void)
{
	struct kvp_routed_cfg cfg = config();
	fresh(&cfg);
	record(1, 1, 500, 0, SEC);
	record(2, 1, 300, 0, SEC);
	kvp_routed_forget(t, 1);
	kvp_radix_clear(w, 1);
	is_u64(kvp_routed_cnt(t, 1), 0, "a rank that goes has no entries");
	is_u64(depth(2, 1, 500), 300, "others keep theirs");
	record(1, 1, 20, 0, 2 * SEC);
	is_u64(depth(1, 1, 500), 20, "its successor begins anew");
	is_u64(faults(), 0, "no faults while forgotten entries are still there");
	is_u64(kvp_routed_tend(t, 2 * SEC, 450), 450, "which are freed in steps");
	is_u64(kvp_routed_tend(t, 2 * SEC, 450), 50, "to the last");
	is_u64(kvp_routed_cnt(t, KVP_RADIX_SLOT_ALL), 320, "what remains are those of the living");
	kvp_routed_forget(t, 1);
	kvp_routed_forget(t, 2);
	kvp_radix_clear(w, 1);
	kvp_radix_clear(w, 2);
	cfg.entry_max = 10000;
	is_u64(record(3, 4, 10000, 0, 3 * SEC), 10000, "forgotten entries make room when it is needed");
	is_u64(faults(), 0, "no faults");
}

/* Ranks that nobody owns any more are cleared, as those that are lost. */
static uint64_t recover(const uint8_t *owned, uint64_t now_ns)
{
	uint64_t cnt = kvp_routed_recover(t, owned, now_ns);
	if (!owned[3])
		kvp_radix_clear(w, 3);
	return cnt;
}

/* A child records until it is killed; its successor makes entries for what it finds. */
static void killed(uint64_t seed)
{
	struct rng g = {seed};
	struct kvp_routed_cfg cfg = config();
	uint8_t owned[64] = {0};
	uint64_t bad = 0, found = 0;
	memset(owned, 1, 5);
	geom.block_max = 20000;
	fresh(&cfg);
	for (int i = 0; i < 25; i++) {
		stop();
		pid_t pid = fork();
		if (pid == 0) {
			if (start(&cfg))
				_exit(1);
			recover(owned, 1);
			for (uint64_t n = 0;; n++) {
				record(rnd_below(&g, 5), rnd_below(&g, 12), 1 + rnd_below(&g, 400), 0, n);
				kvp_routed_tend(t, n + 10 * SEC - 20, 1000);
				kvp_radix_w_tend(w, 20);
			}
		}
		struct timespec pause = {0, 1000000 + rnd_below(&g, 4000000)};
		nanosleep(&pause, NULL);
		kill(pid, SIGKILL);
		waitpid(pid, NULL, 0);
		rnd(&g);
		if (start(&cfg))
			exit(1);
		found += recover(owned, 50);
		bad += faults();
		owned[3] ^= 1;
	}
	is_u64(bad, 0, "25 kills: a successor has an entry for every block, seed %" PRIu64, seed);
	ok(found > 1000, "it found blocks");
	while (kvp_routed_tend(t, 50 + 10 * SEC, 1000))
		;
	is_u64(kvp_routed_cnt(t, KVP_RADIX_SLOT_ALL), 0, "all of them end by age");
}

int main(void)
{
	match = calloc(1, sizeof(*match));
	if (!match)
		return 1;
	ages();
	capacity();
	limits();
	ranks_go();
	big_path();
	killed(tap_seed(0));
	struct kvp_routed_cfg cfg = config();
	struct kvp_routed *none = NULL;
	cfg.entry_max = 0;
	is_u64(-kvp_routed_open(w, &cfg, &none), -KVP_ERR_INVAL, "no room at all is refused");
	cfg.entry_max = 10;
	cfg.slot_max = 5000;
	is_u64(-kvp_routed_open(w, &cfg, &none), -KVP_ERR_INVAL, "and more slots than a tree can have");
	stop();
	return done();
}
