/* A killed indexer: how long until it runs again and until the first event that came meanwhile is in the
 * tree.
 *   b_restart [blocks in the tree 1000000] [kills 5]
 * A real node; the engine process stores the blocks, then sends a message a millisecond while the indexer
 * gets SIGKILL. Lookups go on all the time: read_max_us is the slowest one. Medians over the kills. */
#include "bench/live.h"

#define KILLS_MAX 64
#define LIMIT_NS 30000000000ull

static struct live l;

/* The slot of the indexer; its process id, 0 while it does not run. */
static uint32_t indexer(uint32_t *idx)
{
	if (kvp_slot_find(&l.region.slots, KVP_ROLE_INDEXER, 0, idx) != KVP_OK ||
		kvp_slot_control_get(&l.region.slots, *idx) != KVP_CTL_RUN)
		return 0;
	return kvp_ld_rlx_u32(&l.region.slots.slot[*idx].pid);
}

/* Milliseconds that the last start spent on the tree, from the node's log. */
static double rebuild_ms(void)
{
	char path[300], line[1024];
	double ms = 0;
	snprintf(path, sizeof(path), "%s/log", l.dir);
	FILE *f = fopen(path, "re");
	while (f && fgets(line, sizeof(line), f)) {
		const char *at = strstr(line, "indexer.tree") ? strstr(line, " ms=") : NULL;
		if (at)
			ms = strtod(at + 4, NULL);
	}
	if (f)
		fclose(f);
	return ms;
}

/* The engine goes on: what it published meanwhile is asked for when its next message shows the gap. */
static void go_on(void)
{
	if (l.sh->want < kvp_ld_acq_u64(&l.sh->sent) + 50)
		live_send(&l, 50);
}

struct kill {
	double run_ms, event_ms, rebuild_ms, read_max_us;
};

static struct kill once(void)
{
	struct kill k = {0};
	uint32_t idx = 0, old = indexer(&idx), now;
	struct live_shape s = {1, 1, 0, 1000000, 0};
	live_shape(&l, s);
	if (!old || kill((pid_t)old, SIGKILL))
		live_die("b_restart: kill");
	uint64_t t0 = bench_now_ns(), first = live_send(&l, 50), at = 0, limit = t0 + LIMIT_NS;
	while (!(now = indexer(&idx)) || now == old) {
		uint64_t t = bench_now_ns();
		live_wait(&l, 0, 0); /* one look at what is known */
		double us = (double)(bench_now_ns() - t) / 1e3;
		k.read_max_us = us > k.read_max_us ? us : k.read_max_us;
		if (bench_now_ns() > limit)
			live_die("b_restart: the indexer does not come back");
		go_on();
		live_pause(20000);
	}
	k.run_ms = (double)(bench_now_ns() - t0) / 1e6;
	while (!(at = live_wait(&l, first, bench_now_ns() + 1000000))) {
		if (bench_now_ns() > limit)
			live_die("b_restart: the first event does not come");
		go_on();
	}
	k.event_ms = (double)(at - t0) / 1e6;
	if (!live_wait(&l, l.sh->want - 1, limit))
		live_die("b_restart: the last event does not come");
	k.rebuild_ms = rebuild_ms();
	return k;
}

int main(int argc, char **argv)
{
	uint64_t blocks = argc > 1 ? strtoull(argv[1], NULL, 10) : 1000000;
	uint32_t kills = argc > 2 ? (uint32_t)strtoul(argv[2], NULL, 10) : 5;
	double run[KILLS_MAX], event[KILLS_MAX], rebuild[KILLS_MAX], read[KILLS_MAX];
	if (!blocks || !kills || kills > KILLS_MAX)
		return 2;
	bench_args(argc, argv);
	live_open(&l, argv[0], blocks * 2 + 100000, 2);
	live_fill(&l, blocks, LIMIT_NS);
	for (uint32_t i = 0; i < kills; i++) {
		struct kill k = once();
		run[i] = k.run_ms;
		event[i] = k.event_ms;
		rebuild[i] = k.rebuild_ms;
		read[i] = k.read_max_us;
	}
	double ms = bench_median(rebuild, kills);
	bench_median(read, kills);
	printf("bench=restart.killed blocks=%" PRIu64
	       " kills=%u run_ms=%.0f first_event_ms=%.0f rebuild_ms=%.0f "
	       "rebuild_ns_blk=%.1f read_max_us=%.0f\n",
		blocks, kills, bench_median(run, kills), bench_median(event, kills), ms,
		ms * 1e6 / (double)blocks, read[kills - 1]);
	live_close(&l);
	return 0;
}
