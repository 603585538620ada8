/* GET /dump of a real node: MB/s, and what it costs those who book or store meanwhile.
 *   b_dump [blocks in the tree 1000000] [rounds 3]
 * One engine stores the blocks. A client reads the whole dump, round after round; a last round runs while the
 * engine stores a message of 16 blocks every millisecond and shows how late these come into the tree.
 * Medians. */
#include "bench/live.h"

#define LIMIT_NS 60000000000ull
#define ROUND_MAX 64

static struct live l;

struct dump {
	uint64_t bytes, ns, first_ns; /* first_ns: until the first byte of the body */
};

static struct dump dump(const char *query)
{
	static char buf[1 << 20];
	struct sockaddr_in a = {
		.sin_family = AF_INET, .sin_port = htons(l.port), .sin_addr = {htonl(INADDR_LOOPBACK)}};
	char text[256];
	int n = snprintf(text, sizeof(text), "GET /dump%s HTTP/1.0\r\n\r\n", query);
	struct dump d = {0};
	uint64_t t0 = bench_now_ns();
	int s = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	if (connect(s, (struct sockaddr *)&a, sizeof(a)) || write(s, text, (size_t)n) != n)
		live_die("b_dump: connect");
	ssize_t got;
	while ((got = read(s, buf, sizeof(buf))) > 0) {
		d.first_ns = d.first_ns ? d.first_ns : bench_now_ns() - t0;
		d.bytes += (uint64_t)got;
	}
	close(s);
	d.ns = bench_now_ns() - t0;
	return d;
}

static void quiet(uint64_t blocks, uint32_t rounds, const char *query, const char *name)
{
	double mbs[ROUND_MAX], ms[ROUND_MAX], first[ROUND_MAX];
	uint64_t bytes = 0;
	for (uint32_t i = 0; i < rounds; i++) {
		struct dump d = dump(query);
		bytes = d.bytes;
		mbs[i] = (double)d.bytes * 1e3 / (double)d.ns;
		ms[i] = (double)d.ns / 1e6;
		first[i] = (double)d.first_ns / 1e6;
	}
	if (bytes < blocks * 80) {
		fprintf(stderr, "b_dump: the dump is too short: %" PRIu64 " bytes\n", bytes);
		exit(1);
	}
	printf("bench=%s blocks=%" PRIu64 " bytes=%" PRIu64
	       " mb_s=%.0f ms=%.0f first_byte_ms=%.1f blocks_s=%.0f\n",
		name, blocks, bytes, bench_median(mbs, rounds), bench_median(ms, rounds),
		bench_median(first, rounds), (double)blocks * 1e3 / bench_median(ms, rounds));
}

/* Time from the sending of a message to its being in the tree, without and with a dump under way. */
static void busy(uint32_t with)
{
	static double us[4000];
	struct live_shape s = {1, 16, 1000, 1000000, 0};
	uint32_t cnt = 0;
	live_shape(&l, s);
	pid_t reader = with ? fork() : 0;
	if (with && reader == 0) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		for (;;)
			dump("");
	}
	uint64_t first = live_send(&l, 1500);
	for (uint64_t i = first; i < first + 1500; i++) {
		while (kvp_ld_acq_u64(&l.sh->sent) <= i)
			live_pause(5000);
		uint64_t at = live_wait(&l, i, bench_now_ns() + LIMIT_NS);
		us[cnt++] = at ? (double)(at - l.sh->at_ns[i]) / 1e3 : 1e9;
	}
	if (with) {
		kill(reader, SIGKILL);
		waitpid(reader, NULL, 0);
	}
	double p50 = bench_median(us, cnt);
	printf("bench=dump.lag with_dump=%u messages=%u p50_us=%.0f p99_us=%.0f max_us=%.0f\n", with, cnt,
		p50, us[cnt * 99 / 100], us[cnt - 1]);
}

int main(int argc, char **argv)
{
	uint64_t blocks = argc > 1 ? strtoull(argv[1], NULL, 10) : 1000000;
	uint32_t rounds = argc > 2 ? (uint32_t)strtoul(argv[2], NULL, 10) : 3;
	if (!blocks || !rounds || rounds > ROUND_MAX)
		return 2;
	bench_args(argc, argv);
	live_open(&l, argv[0], blocks * 2 + 100000, 2);
	live_fill(&l, blocks, LIMIT_NS);
	quiet(blocks, rounds, "", "dump.whole");
	quiet(blocks, rounds, "?max_bytes=100000000000", "dump.limited");
	busy(0);
	busy(1);
	live_close(&l);
	return 0;
}
