/* Bookings that feed a tree: processor time a block, by the writer's thread.
 *   b_routed [bookings 20000] [blocks of each 128] [ranks 64]
 * record: new paths behind 32 common blocks; again: the same ones once more; end: all of them by age, in
 * steps of 2048; recover: entries for a whole tree after a restart. Also: the longest step, and bytes of an
 * entry. */
#include "shm/routed.h"
#include "bench/bench.h"

#define PART 7
#define COMMON 32

static struct kvp_geom geom = {.slot_max = 8, .rank_max = 64, .index_rank_max = 1024, .salt = {5, 6}};
static struct kvp_radix_w *w;
static struct kvp_routed *t;
static struct kvp_routed_cfg cfg;
static void *pub, *priv;
static uint64_t bookings = 20000;
static uint32_t blocks = 128, ranks = 64;
static uint64_t local[KVP_ROUTED_BLK_MAX];

static void start(void)
{
	if (kvp_radix_w_open(pub, priv, &geom, KVP_RADIX_RECOVER, NULL, &w, NULL) ||
		kvp_routed_open(w, &cfg, &t)) {
		fprintf(stderr, "b_routed: cannot be opened\n");
		exit(1);
	}
}

static double record_all(uint64_t now_ns)
{
	uint64_t from = bench_cpu_ns(), hash = 0;
	for (uint64_t i = 0; i < bookings; i++) {
		uint64_t h0 = bench_cpu_ns();
		for (uint32_t k = 0; k < blocks; k++)
			local[k] = k < COMMON ? k + 1 : bench_mix(i * 100003 + k);
		hash += bench_cpu_ns() - h0;
		kvp_routed_record(t, (uint32_t)(i % ranks), PART, blocks, local, 0, now_ns);
	}
	return (double)(bench_cpu_ns() - from - hash) / (double)(bookings * blocks);
}

static void line(const char *name, double ns, double longest_us)
{
	printf("bench=routed_%s bookings=%" PRIu64 " blocks=%u ranks=%u ns_block=%.0f longest_step_us=%.0f\n",
		name, bookings, blocks, ranks, ns, longest_us);
}

static void end_all(uint64_t now_ns)
{
	uint64_t cnt = kvp_routed_cnt(t, KVP_RADIX_SLOT_ALL), from = bench_cpu_ns(), longest = 0, at = from;
	while (kvp_routed_tend(t, now_ns, 2048)) {
		uint64_t now = bench_cpu_ns();
		longest = now - at > longest ? now - at : longest;
		at = now;
	}
	line("end", (double)(bench_cpu_ns() - from) / (double)cnt, (double)longest / 1e3);
}

int main(int argc, char **argv)
{
	uint8_t owned[1024];
	int fd, fd2;
	bookings = argc > 1 ? strtoull(argv[1], NULL, 0) : bookings;
	blocks = argc > 2 ? (uint32_t)strtoul(argv[2], NULL, 0) : blocks;
	ranks = argc > 3 ? (uint32_t)strtoul(argv[3], NULL, 0) : ranks;
	if (!bookings || !blocks || blocks > KVP_ROUTED_BLK_MAX || !ranks || ranks > 1024) {
		fprintf(stderr, "b_routed: bad arguments\n");
		return 1;
	}
	bench_begin();
	bench_args(argc, argv);
	geom.region_gen = 1;
	geom.block_max = bookings * blocks + 10000;
	cfg = (struct kvp_routed_cfg){
		.ttl_ns = 1000, .entry_max = geom.block_max, .slot_max = geom.index_rank_max, .salt = 9};
	pub = bench_sparse(kvp_radix_footprint(&geom), &fd);
	priv = bench_sparse(kvp_radix_priv_footprint(&geom), &fd2);
	if (kvp_radix_new(pub, &geom) || kvp_radix_priv_new(priv, &geom))
		return 1;
	start();
	line("record", record_all(1), 0);
	line("again", record_all(2), 0);
	kvp_routed_close(t);
	kvp_radix_w_close(w);
	start();
	memset(owned, 1, sizeof(owned));
	uint64_t from = bench_cpu_ns(), cnt = kvp_routed_recover(t, owned, 3);
	line("recover", (double)(bench_cpu_ns() - from) / (double)cnt, 0);
	end_all(2000);
	return kvp_routed_check(t) ? 1 : 0;
}
