/* KV events from a socket to a reader: a real engine process publishes ZMQ frames, the indexer of a real node
 * (`kvpick run`) decodes and applies them, this process looks the prompts up in the region.
 *   b_events [events a second 100000] [seconds 5] [events a message 32] [blocks an event 1] [decoder threads
 *   2]
 * Half of the events store, half remove. Lag: from handing a message to the socket until a lookup finds all
 * of its blocks, in order, message by message; the reader looks every 20 us. lost: messages whose blocks did
 * not come within 10 s. Then the greatest rate without pacing, 64 blocks an event, 256 messages on their
 * way. */
#include "bench/live.h"

#define REPEATS 5
#define KEEP 5000
#define LOST_NS 10000000000ull
#define FAST_MSG 1000

static struct live l;

struct seen {
	uint64_t cnt, lost, ns;
	double p50_us, p99_us, max_us;
};

static struct seen watch(uint64_t first, uint64_t n)
{
	struct seen s = {0};
	double *lag = calloc(n, sizeof(*lag));
	uint64_t begin = 0, end = 0;
	if (!lag)
		exit(1);
	for (uint64_t i = first; i < first + n; i++) {
		while (kvp_ld_acq_u64(&l.sh->sent) <= i)
			live_pause(20000);
		uint64_t t = live_wait(&l, i, bench_now_ns() + LOST_NS);
		kvp_st_rel_u64(&l.sh->seen, i + 1);
		begin = begin ? begin : l.sh->at_ns[i];
		if (!t) {
			s.lost++;
			continue;
		}
		end = t;
		lag[s.cnt++] = t > l.sh->at_ns[i] ? (double)(t - l.sh->at_ns[i]) / 1e3 : 0;
	}
	if (s.cnt) {
		qsort(lag, s.cnt, sizeof(*lag), bench_cmp);
		s.p50_us = lag[s.cnt / 2];
		s.p99_us = lag[s.cnt * 99 / 100];
		s.max_us = lag[s.cnt - 1];
	}
	s.ns = end > begin ? end - begin : 1;
	free(lag);
	return s;
}

static uint64_t counter(enum kvp_ctr id)
{
	return kvp_ctr_sum(&l.region.counters, id);
}

static void paced(double events_s, double seconds, uint32_t per_msg, uint32_t blk)
{
	double p50[REPEATS], p99[REPEATS], rate[REPEATS], max = 0;
	uint64_t lost = 0, n = (uint64_t)(events_s * seconds / REPEATS / per_msg) + 1;
	struct live_shape s = {per_msg / 2, blk, KEEP, (uint64_t)(1e9 * per_msg / events_s), 0};
	uint64_t gaps = counter(KVP_CTR_EV_GAPS), unheld = counter(KVP_CTR_EV_STORED_PARENT);
	live_shape(&l, s);
	watch(live_send(&l, KEEP), KEEP); /* from here on each message also removes */
	for (int rep = 0; rep < REPEATS; rep++) {
		struct seen w = watch(live_send(&l, n), n);
		p50[rep] = w.p50_us;
		p99[rep] = w.p99_us;
		max = w.max_us > max ? w.max_us : max;
		lost += w.lost;
		rate[rep] = (double)w.cnt * per_msg * 1e9 / (double)w.ns;
	}
	double events = bench_median(rate, REPEATS);
	printf("bench=events.lag offered_events_s=%.0f events_s=%.0f blocks_s=%.0f events_msg=%u "
	       "blocks_event=%u "
	       "messages=%" PRIu64 " lag_p50_us=%.0f lag_p99_us=%.0f lag_max_us=%.0f lost=%" PRIu64
	       " gaps=%" PRIu64 " unheld_parent=%" PRIu64 "\n",
		events_s, events, events * blk, per_msg, blk, n * REPEATS, bench_median(p50, REPEATS),
		bench_median(p99, REPEATS), max, lost, counter(KVP_CTR_EV_GAPS) - gaps,
		counter(KVP_CTR_EV_STORED_PARENT) - unheld);
	fflush(stdout);
}

static void unpaced(void)
{
	double rate[REPEATS];
	uint64_t lost = 0, gaps = counter(KVP_CTR_EV_GAPS);
	struct live_shape s = {8, 64, 500, 0, 256};
	live_shape(&l, s);
	watch(live_send(&l, 500), 500);
	for (int rep = 0; rep < REPEATS; rep++) {
		struct seen w = watch(live_send(&l, FAST_MSG), FAST_MSG);
		lost += w.lost;
		rate[rep] = (double)w.cnt * 1024 * 1e9 / (double)w.ns;
	}
	double blocks = bench_median(rate, REPEATS);
	printf("bench=events.max events_s=%.0f blocks_s=%.0f events_msg=16 blocks_event=64 lost=%" PRIu64
	       " gaps=%" PRIu64 "\n",
		blocks / 64, blocks, lost, counter(KVP_CTR_EV_GAPS) - gaps);
}

int main(int argc, char **argv)
{
	double events_s = argc > 1 ? strtod(argv[1], NULL) : 100000;
	double seconds = argc > 2 ? strtod(argv[2], NULL) : 5;
	uint32_t per_msg = argc > 3 ? (uint32_t)strtoul(argv[3], NULL, 10) : 32;
	uint32_t blk = argc > 4 ? (uint32_t)strtoul(argv[4], NULL, 10) : 1;
	uint32_t threads = argc > 5 ? (uint32_t)strtoul(argv[5], NULL, 10) : 2;
	if (events_s < 1 || seconds <= 0 || per_msg < 2 || !blk ||
		(uint64_t)per_msg * blk > LIVE_MSG_BLK_MAX || !threads)
		return 2;
	bench_args(argc, argv);
	live_open(&l, argv[0], 4000000, threads);
	paced(events_s, seconds, per_msg, blk);
	unpaced();
	live_close(&l);
	return 0;
}
