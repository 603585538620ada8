/* What telling the replicas costs who books: select_and_reserve + prefill_complete + free on a node of 64
 * ranks, in process, with and without the ring, in turns within one run; a consumer on the other processor
 * reads along. consumer=busy: bookings follow each other. consumer=asleep: pauses before every cycle, so that
 * the first record wakes it. Then the ring alone. Times of one call, ns; the two columns of a line are from
 * the same seconds.
 *   make BUILD=release build/release/bench/b_lifecycle && build/release/bench/b_lifecycle */
#include "bench/bench.h"
#include "daemons/common/select_priv.h"

#include <kvpick/clock.h>
#include <poll.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/wait.h>

#define TURN 50u /* cycles before the other way has its turn */
#define CYCLES 20000u
#define CYCLES_SLOW 250u
#define BLOCKS 128u
#define PUTS 2000000u
#define BOOKER 2u
#define CONSUMER 3u

static struct kvp_geom geom = {.slot_max = 8, .region_gen = 1, .lifecycle_max = 131072};
static struct kvp_selection *node;
static struct kvp_lifecycle_ring ring;
static void *ring_mem;
static struct kvp_slots slots;
static int wake_fd[8];
static uint64_t hash[BLOCKS];
static uint64_t *taken; /* shared: records read */
static uint64_t reserve_ns[2][CYCLES], rest_ns[2][CYCLES];

static int by_value(const void *a, const void *b)
{
	uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
	return x < y ? -1 : x > y;
}

static uint64_t at(uint64_t *v, uint32_t n, uint32_t per_mille)
{
	qsort(v, n, sizeof(*v), by_value);
	return v[(uint64_t)n * per_mille / 1000];
}

static void consume(void)
{
	static struct kvp_lifecycle_rec rec;
	slots.self = KVP_OWNER(CONSUMER, 1);
	kvp_lifecycle_attach(&ring, slots.self, NULL);
	for (;;) {
		while (kvp_lifecycle_next(&ring, kvp_clock_mono_ns(), &rec) == KVP_OK) {
			kvp_lifecycle_done(&ring);
			kvp_faa_rlx_u64(taken, 1);
		}
		int ms = (int)kvp_lifecycle_rest(&ring, kvp_clock_mono_ns());
		kvp_slot_sleep(&slots);
		struct pollfd pf = {.fd = wake_fd[CONSUMER], .events = POLLIN};
		if (kvp_lifecycle_next(&ring, kvp_clock_mono_ns(), &rec) == KVP_ERR_NOTFOUND)
			poll(&pf, 1, ms);
		kvp_slot_awake(&slots);
	}
}

static void cycle(uint32_t on, uint32_t n, uint64_t number)
{
	char id[40];
	struct kvp_select_request q;
	struct kvp_select_answer a;
	snprintf(id, sizeof(id), "%08x-0000-4000-8000-%012x", (unsigned)number, on);
	kvp_select_request_init(&q);
	q.model = q.group = (struct kvp_str){"default", 7};
	q.selection_id = (struct kvp_str){id, 36};
	q.prompt.form = KVP_PROMPT_HASHES;
	q.prompt.block_hash = q.prompt.seq_hash = hash;
	q.prompt.block_hash_cnt = q.prompt.seq_hash_cnt = BLOCKS;
	q.prompt.has_isl = KVP_YES;
	q.prompt.isl_tok = BLOCKS * 16;
	hash[BLOCKS - 1] = number;
	kvp_book_publish(&node->region->book, on ? &ring : NULL);
	uint64_t t0 = bench_now_ns();
	if (kvp_selection_select_and_reserve(node, &q, &a) != 200)
		exit(printf("%s\n", kvp_selection_error(node)));
	uint64_t t1 = bench_now_ns();
	kvp_selection_prefill_complete(node, q.selection_id);
	kvp_selection_free(node, q.selection_id);
	rest_ns[on][n] = bench_now_ns() - t1;
	reserve_ns[on][n] = t1 - t0;
	while (kvp_lifecycle_tend(&ring))
		;
}

static void compare(const char *consumer, uint32_t cycles, int asleep)
{
	uint32_t n[2] = {0, 0};
	for (uint64_t i = 0; n[0] < cycles || n[1] < cycles; i++) {
		uint32_t on = (uint32_t)(i / TURN) & 1;
		if (n[on] >= cycles)
			continue;
		if (asleep)
			poll(NULL, 0, 8); /* longer than it lingers */
		cycle(on, n[on]++, i);
	}
	printf("bench=lifecycle.booker consumer=%s blocks=%u", consumer, BLOCKS);
	for (uint32_t m = 500; m <= 990; m += 490)
		printf(" reserve_p%u_ns=%" PRIu64 "/%" PRIu64 " rest_p%u_ns=%" PRIu64 "/%" PRIu64, m / 10,
			at(reserve_ns[0], cycles, m), at(reserve_ns[1], cycles, m), m / 10,
			at(rest_ns[0], cycles, m), at(rest_ns[1], cycles, m));
	printf(" order=off/on\n");
	fflush(stdout);
}

static void alone(void)
{
	struct kvp_lifecycle_put p = {
		.kind = KVP_LIFECYCLE_FREE, .id = "01234567-0123-4567-89ab-0123456789ab", .id_len = 36};
	struct kvp_lifecycle_claim c;
	uint64_t from = kvp_ld_rlx_u64(taken), lost = 0, t0 = bench_now_ns(), cpu = bench_cpu_ns();
	for (uint32_t i = 0; i < PUTS; i++) {
		while (kvp_lifecycle_claim(&ring, KVP_OWNER(BOOKER, 1), &p, &c) == KVP_ERR_FULL) {
			sched_yield();
			lost++;
		}
		kvp_lifecycle_ready(&ring, &c, NULL);
	}
	cpu = bench_cpu_ns() - cpu;
	while (kvp_ld_rlx_u64(taken) - from < PUTS)
		sched_yield();
	uint64_t t = bench_now_ns() - t0;
	printf("bench=lifecycle.ring records=%u put_cpu_ns=%.1f records_s=%.0f full=%" PRIu64 "\n", PUTS,
		(double)cpu / PUTS, PUTS * 1e9 / (double)t, lost);
}

int main(void)
{
	cpu_set_t allowed;
	struct kvp_local_cfg cfg = {.seed = 1, .block_max = 1000000, .active_block_max = 262144};
	sched_getaffinity(0, sizeof(allowed), &allowed);
	bench_header();
	node = kvp_selection_open_local(&cfg);
	ring_mem = mmap(NULL, kvp_lifecycle_footprint(&geom), PROT_READ | PROT_WRITE,
		MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	void *slot_mem = mmap(
		NULL, kvp_slot_footprint(&geom), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	taken = mmap(NULL, KVP_PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (!node || kvp_lifecycle_new(ring_mem, &geom) || kvp_lifecycle_join(ring_mem, &geom, &ring) ||
		kvp_slot_new(slot_mem, &geom) || kvp_slot_join(slot_mem, &geom, &slots))
		return 1;
	madvise(ring_mem, kvp_lifecycle_footprint(&geom), MADV_POPULATE_WRITE);
	for (int i = 0; i < 8; i++)
		wake_fd[i] = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
	slots.wake_fd = wake_fd;
	ring.slots = &slots;
	ring.wake = KVP_LIFECYCLE_WAKE_LATER; /* as httpd and extproc */
	for (uint64_t id = 1; id <= 64; id++) {
		struct kvp_local_worker w = {.worker_id = id,
			.model = {"default", 7},
			.group = {"default", 7},
			.endpoint = {"http://w", 8},
			.block_size = 16,
			.size = 1};
		kvp_selection_local_worker(node, &w);
	}
	for (uint32_t i = 0; i < BLOCKS; i++)
		hash[i] = bench_mix(i);
	fflush(stdout);
	pid_t pid = fork();
	if (pid == 0) {
		bench_pin(&allowed, 1);
		consume();
	}
	bench_pin(&allowed, 0);
	while (!kvp_ld_acq_u32(&slots.slot[CONSUMER].wake_need))
		sched_yield();
	compare("busy", CYCLES, 0);
	compare("asleep", CYCLES_SLOW, 1);
	alone();
	kill(pid, SIGKILL);
	waitpid(pid, NULL, 0);
	return 0;
}
