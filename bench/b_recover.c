/* How fast a starting node has the index of another one: blocks/s recovered, from GET /dump of a real node.
 *   b_recover [blocks in the tree 1000000] [rounds 3]
 * One engine stores the blocks at a first node. In each round a second node starts with it as its peer; the
 * time is that of the recovery as the second node tells it (from the creation of its region to the open
 * gate). No worker is registered at the second node, so its blocks are held, and a registration then puts all
 * of them into the tree at once: the last figure. Medians. */
#include "bench/live.h"

#include <sys/stat.h>

#define LIMIT_NS 60000000000ull
#define ROUND_MAX 64

static struct live l;

struct figures {
	double recovery_ms, ready_ms, register_ms;
	uint64_t blocks;
};

/* The second node: starts, recovers, gets its worker, ends. */
static struct figures round_trip(uint64_t blocks)
{
	struct live n;
	struct kvp_recov_info info = {.state = KVP_RECOV_RUNNING};
	struct kvp_radix_stats st = {.blocks = 0};
	struct figures f = {.blocks = 0};
	memset(&n, 0, sizeof(n));
	snprintf(n.dir, sizeof(n.dir), "%.200s-2", l.dir);
	snprintf(n.build, sizeof(n.build), "%s", l.build);
	snprintf(n.peer, sizeof(n.peer), "http://127.0.0.1:%u", l.port);
	n.sh = l.sh;
	n.port = live_free_port();
	if (mkdir(n.dir, 0700))
		live_die("b_recover: directory");
	uint64_t t0 = bench_now_ns(), deadline = t0 + LIMIT_NS;
	n.node = fork();
	if (n.node == 0)
		live_node(&n, 2 * blocks + 100000, 2);
	while (kvp_boot_attach(n.dir, "default", 1000, &n.at) != KVP_OK ||
		kvp_region_join(n.at.region_fd, KVP_REGION_LOOK, &n.region) != KVP_OK)
		if (bench_now_ns() > deadline)
			live_die("b_recover: the second node does not start");
	while (info.state == KVP_RECOV_RUNNING && bench_now_ns() < deadline) {
		live_pause(200000);
		kvp_recov_get(&n.region.recov, &info);
	}
	f.ready_ms = (double)(bench_now_ns() - t0) / 1e6;
	if (info.state != KVP_RECOV_RECOVERED || info.blocks < blocks) {
		fprintf(stderr, "b_recover: %s, %" PRIu64 " blocks\n", kvp_recov_name(info.state),
			info.blocks);
		exit(1);
	}
	f.blocks = info.blocks;
	f.recovery_ms = (double)(info.ended_ns - info.begun_ns) / 1e6;
	t0 = bench_now_ns();
	live_register(&n, deadline);
	f.register_ms = (double)(bench_now_ns() - t0) / 1e6;
	kvp_radix_stats(&n.region.radix, &st);
	if (st.blocks < blocks) {
		fprintf(stderr, "b_recover: %" PRIu64 " blocks in the tree\n", (uint64_t)st.blocks);
		exit(1);
	}
	live_close_node(&n);
	return f;
}

int main(int argc, char **argv)
{
	uint64_t blocks = argc > 1 ? strtoull(argv[1], NULL, 10) : 1000000, held = 0;
	uint32_t rounds = argc > 2 ? (uint32_t)strtoul(argv[2], NULL, 10) : 3;
	double recovery[ROUND_MAX], ready[ROUND_MAX], reg[ROUND_MAX];
	if (!blocks || !rounds || rounds > ROUND_MAX)
		return 2;
	bench_args(argc, argv);
	live_open(&l, argv[0], blocks * 2 + 100000, 2);
	live_fill(&l, blocks, LIMIT_NS);
	for (uint32_t i = 0; i < rounds; i++) {
		struct figures f = round_trip(blocks);
		recovery[i] = f.recovery_ms;
		ready[i] = f.ready_ms;
		reg[i] = f.register_ms;
		held = f.blocks;
	}
	double ms = bench_median(recovery, rounds);
	printf("bench=recover blocks=%" PRIu64
	       " recovery_ms=%.0f blocks_s=%.0f from_start_ms=%.0f register_ms=%.0f\n",
		held, ms, (double)held * 1e3 / ms, bench_median(ready, rounds), bench_median(reg, rounds));
	live_close(&l);
	return 0;
}
