/* A writer of the tree, readers and bookers under load, any of them killed by a seeded choice, over and over.
 * Asserted: no lookup is foreign or over-long, nothing of the bookings is left, survivors book on before the
 * dead is swept, and after the last kill the tree is the model. Printed: how long the survivors' calls took,
 * with kills and without. KVP_KILLS kills (100; 1000 if KVP_TORTURE_S is set), KVP_SEED. */
#include "shm/sweep.h"
#include "tests/torture/radix_oracle.h"

#include <sched.h>
#include <sys/resource.h>
#include <sys/wait.h>

enum role { WRITER, READER, BOOKER, ROLES };
enum { BOOKERS = 3, PROCS = 1 + READERS + BOOKERS, RANKS = 8, IDS = 48, PROMPT = 96, QUIET_CALLS = 20000 };
enum { BUCKETS = 200 }; /* four to each power of two of nanoseconds */

struct meter {
	uint64_t calls, over, worked, slept, wall_max_ns, cpu_max_ns, bucket[BUCKETS];
};
struct shared {
	uint64_t stop, killing;
	uint64_t work[PROCS]; /* what each has done, in its own units */
	struct meter meter[2][PROCS];
};

static const char *const role_name[ROLES] = {"writer", "reader", "booker"};
static const struct kvp_geom book_geom = {.slot_max = 16,
	.rank_max = RANKS,
	.index_rank_max = 64,
	.resv_max = 64,
	.block_max = 10000,
	.active_block_max = 4096,
	.part_max = 4,
	.region_gen = 1,
	.salt = {7, 8}};
static struct kvp_book book;
static struct shared *sh;
static void *book_mem;
static const void *tree; /* read-only */
static uint64_t seed;

static enum role role_of(uint32_t p)
{
	return p == 0 ? WRITER : p <= READERS ? READER : BOOKER;
}

static kvp_owner owner_of(uint32_t p, uint32_t incarnation)
{
	return KVP_OWNER(p + 1, incarnation);
}

/* ---- how long a call takes: by the clock, and of the processor; did it sleep? ---- */

struct moment {
	uint64_t wall_ns, cpu_ns, sleeps;
};

static struct moment moment(void)
{
	struct timespec t;
	struct rusage u;
	clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
	getrusage(RUSAGE_THREAD, &u);
	return (struct moment){
		now(), (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec, (uint64_t)u.ru_nvcsw};
}

static uint32_t bucket_of(uint64_t ns)
{
	uint32_t log2 = 63 - (uint32_t)__builtin_clzll(ns | 4);
	uint32_t i = 4 * log2 + (uint32_t)(ns >> (log2 - 2) & 3);
	return i < BUCKETS ? i : BUCKETS - 1;
}

static void measure(uint32_t p, struct moment from)
{
	struct moment to = moment();
	struct meter *m = &sh->meter[kvp_ld_rlx_u64(&sh->killing)][p];
	uint64_t wall = to.wall_ns - from.wall_ns, cpu = to.cpu_ns - from.cpu_ns;
	m->calls++;
	m->over += wall > 1000000;
	m->worked += cpu > 1000000;
	m->slept += to.sleeps != from.sleeps;
	m->wall_max_ns = wall > m->wall_max_ns ? wall : m->wall_max_ns;
	m->cpu_max_ns = cpu > m->cpu_max_ns ? cpu : m->cpu_max_ns;
	m->bucket[bucket_of(wall)]++;
}

static double quantile_us(const uint64_t *bucket, uint64_t calls, double q)
{
	uint64_t left = (uint64_t)((double)calls * q);
	uint32_t i = 0;
	while (i < BUCKETS - 1 && bucket[i] <= left)
		left -= bucket[i++];
	return (double)((4ULL + i % 4) << (i / 4)) / 4000.0;
}

static void print_meters(uint64_t killing, enum role role)
{
	static struct meter sum;
	memset(&sum, 0, sizeof(sum));
	for (uint32_t p = 0; p < PROCS; p++) {
		const struct meter *m = &sh->meter[killing][p];
		if (role_of(p) != role)
			continue;
		sum.calls += m->calls;
		sum.over += m->over;
		sum.worked += m->worked;
		sum.slept += m->slept;
		sum.wall_max_ns = m->wall_max_ns > sum.wall_max_ns ? m->wall_max_ns : sum.wall_max_ns;
		sum.cpu_max_ns = m->cpu_max_ns > sum.cpu_max_ns ? m->cpu_max_ns : sum.cpu_max_ns;
		for (uint32_t i = 0; i < BUCKETS; i++)
			sum.bucket[i] += m->bucket[i];
	}
	printf("# %s %s: %" PRIu64
	       " calls, p50 %.1f us, p99 %.1f us, p99.9 %.1f us, longest %.0f us (of processor "
	       "%.0f us); over 1 ms %" PRIu64 ", of these by work %" PRIu64 "; asleep in a call %" PRIu64
	       "\n",
		role_name[role], killing ? "with kills" : "without", sum.calls,
		quantile_us(sum.bucket, sum.calls, 0.5), quantile_us(sum.bucket, sum.calls, 0.99),
		quantile_us(sum.bucket, sum.calls, 0.999), (double)sum.wall_max_ns / 1000,
		(double)sum.cpu_max_ns / 1000, sum.over, sum.worked, sum.slept);
}

/* ---- who is killed ---- */

static void reader(uint32_t p, uint64_t my_seed)
{
	struct kvp_radix r;
	struct rng g = {my_seed};
	struct look look;
	struct kvp_radix_match *m = malloc(sizeof(*m));
	if (kvp_radix_join(tree, &geom, &r))
		_exit(2);
	while (!kvp_ld_acq_u64(&sh->stop)) {
		look_begin(&look, &g);
		struct moment from = moment();
		kvp_radix_find(&r, &look.q, m);
		measure(p, from);
		judge(&oracle->reader[p - 1], look.chain, m, look.before);
		kvp_faa_rlx_u64(&sh->work[p], 1);
	}
}

/* Chooses the rank that has least to do, as far as the loads that it saw go. */
static int book_one(struct kvp_book *b, struct rng *g, uint64_t h)
{
	uint64_t seq[PROMPT];
	uint32_t chain = rnd_below(g, GROUPS * CHAINS);
	struct kvp_resv_ask a = {.rank_gen = 1,
		.prefill_tok = rnd_below(g, 1000),
		.seq = seq,
		.seq_cnt = rnd_below(g, PROMPT),
		.flags = KVP_RESV_TRACK_PREFILL | (rnd_below(g, 4) ? 0 : KVP_RESV_NODE_OWNED)};
	for (uint32_t i = 0; i < a.seq_cnt; i++)
		seq[i] = local_of(chain, i);
	int rc = KVP_ERR_AGAIN;
	for (int tries = 0; tries < 5 && rc == KVP_ERR_AGAIN; tries++) {
		kvp_load_read(b, 0, &a.seen);
		a.rank_slot = 0;
		for (uint32_t r = 1; r < RANKS; r++) {
			struct kvp_load l;
			kvp_load_read(b, r, &l);
			if (l.prefill_tok < a.seen.prefill_tok) {
				a.seen = l;
				a.rank_slot = r;
			}
		}
		a.validate = tries < 4;
		rc = kvp_resv_book(b, h, &a);
	}
	return rc;
}

/* One call of one kind on a booking that may be anybody's. */
static void book_call(struct kvp_book *b, kvp_owner me, struct rng *g)
{
	char id[16];
	uint64_t h;
	double fraction = rnd_below(g, 11) / 10.0;
	snprintf(id, sizeof(id), "id-%u", rnd_below(g, IDS));
	uint32_t what = rnd_below(g, 8);
	if (kvp_resv_find(b, id, strlen(id), &h) != KVP_OK) {
		if (kvp_resv_claim(b, me, id, strlen(id), &h) == KVP_OK && book_one(b, g, h) != KVP_OK)
			kvp_resv_abandon(b, h);
	} else if (what < 4) {
		kvp_resv_free(b, h);
	} else if (what < 6) {
		kvp_resv_prefill_done(b, h);
	} else {
		kvp_resv_output(b, h, what == 6 ? &fraction : NULL);
	}
}

static void booker(uint32_t p, kvp_owner me, uint64_t my_seed)
{
	struct kvp_book b;
	struct rng g = {my_seed};
	if (kvp_book_join(book_mem, &book_geom, &b))
		_exit(2);
	kvp_book_attach(&b, me, NULL);
	while (!kvp_ld_acq_u64(&sh->stop)) {
		struct moment from = moment();
		book_call(&b, me, &g);
		measure(p, from);
		kvp_faa_rlx_u64(&sh->work[p], 1);
	}
}

/* ---- dump ---- */

struct seen {
	uint32_t s;
	uint64_t wrong, held[TIERS][HELD_WORDS];
};

static int see(void *ctx, const struct kvp_radix_dump_event *ev)
{
	struct seen *x = ctx;
	for (uint32_t i = 0; i < ev->n; i++) {
		uint32_t at = 0;
		while (at < CHAIN_LEN && ext_of(x->s, at) != ev->ext[i])
			at++;
		if (at == CHAIN_LEN || local_of(x->s / 2, at) != ev->local[i] ||
			is_held(x->held[ev->tier], at))
			x->wrong++;
		else
			set_held(x->held[ev->tier], at, at + 1, 1);
	}
	return 0;
}

/* Faults of what a dump reports of a slot: what the oracle says is held, as far as a walk can get there. */
static uint64_t dump_faults(struct kvp_radix_w *w, uint32_t s, uint64_t *blocks)
{
	const struct oracle_slot *o = &oracle->slot[s];
	struct seen x = {.s = s};
	x.wrong = kvp_radix_w_dump(w, idx_of(s), see, &x, NULL) != KVP_OK;
	for (uint32_t i = 0, dev = 1, any = 1; i < CHAIN_LEN; i++) {
		uint32_t next = 0;
		for (uint32_t t = 0; t < TIERS; t++) {
			uint32_t want = (t ? any : dev) && is_held(o->held[t], i);
			x.wrong += (uint32_t)is_held(x.held[t], i) != want;
			next |= want;
			*blocks += want;
		}
		dev = dev && is_held(o->held[0], i);
		any = next;
	}
	return x.wrong;
}

/* ---- parent ---- */

struct proc {
	pid_t pid;
	uint32_t incarnation, kills;
	uint64_t born; /* its work at the start */
};
static struct proc proc[PROCS];

static void start(uint32_t p)
{
	struct proc *x = &proc[p];
	uint64_t my_seed = seed + p * 1000003ULL + ++x->incarnation;
	x->born = kvp_ld_acq_u64(&sh->work[p]);
	fflush(stdout);
	x->pid = fork();
	if (x->pid)
		return;
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	if (role_of(p) == WRITER)
		writer(my_seed, &sh->work[p]);
	else if (role_of(p) == READER)
		reader(p, my_seed);
	else
		booker(p, owner_of(p, x->incarnation), my_seed);
	_exit(0);
}

/* Waits until one of the processes from a to b - 1, but not `but`, has done more than at some time before: 1,
 * or 0 after 30 s. */
static int goes_on(uint32_t a, uint32_t b, uint32_t but, const uint64_t *was)
{
	for (uint64_t end = now() + 30000000000ULL; now() < end; sched_yield())
		for (uint32_t p = a; p < b; p++)
			if (p != but && kvp_ld_acq_u64(&sh->work[p]) > was[p])
				return 1;
	return 0;
}

static void kill_one(struct rng *g, uint64_t *odd, uint64_t *stuck)
{
	static const uint32_t first[ROLES] = {0, 1, 1 + READERS}, cnt[ROLES] = {1, READERS, BOOKERS};
	enum role role = (enum role)rnd_below(g, ROLES);
	uint32_t p = first[role] + rnd_below(g, cnt[role]);
	uint64_t was[PROCS];
	struct timespec delay = {0, (long)rnd_below(g, 1500000)};
	int st;
	for (uint32_t i = 0; i < PROCS; i++)
		was[i] = proc[i].born;
	*stuck += !goes_on(p, p + 1, PROCS, was); /* it has begun */
	nanosleep(&delay, NULL);
	kill(proc[p].pid, SIGKILL);
	waitpid(proc[p].pid, &st, 0);
	*odd += !WIFSIGNALED(st);
	proc[p].kills++;
	for (uint32_t i = 0; i < PROCS; i++)
		was[i] = kvp_ld_acq_u64(&sh->work[i]);
	*stuck += !goes_on(1 + READERS, PROCS, p, was) || !goes_on(1, 1 + READERS, p, was);
	if (role == BOOKER)
		while (kvp_book_sweep_owner(&book, owner_of(p, proc[p].incarnation), NULL, NULL,
			       &(struct kvp_sweep_result){0}) == KVP_ERR_AGAIN)
			;
	start(p);
}

static void check_bookings(void)
{
	uint32_t cursor = 0;
	uint64_t h, left = 0;
	is_u64(kvp_book_check(&book), 0, "the loads are those of the bookings");
	while (kvp_resv_iter(&book, &cursor, &h) == KVP_OK)
		kvp_resv_free(&book, h);
	for (uint32_t r = 0; r < RANKS; r++) {
		struct kvp_load l;
		kvp_load_read(&book, r, &l);
		left += l.prefill_tok + l.requests + l.active_blk_fx;
	}
	is_u64(left, 0, "everything freed leaves no load");
	is_u64(kvp_book_check(&book), 0, "no block, no chunk, no id");
}

static void check_tree(void)
{
	struct kvp_radix_w *w = NULL;
	struct kvp_radix r;
	uint64_t wrong = 0, blocks = 0;
	if (kvp_radix_w_open(seg.pub, seg.priv, &geom, KVP_RADIX_RECOVER, NULL, &w, NULL) ||
		kvp_radix_join(seg.pub, &geom, &r)) {
		ok(0, "the tree opens");
		return;
	}
	wrong = kvp_radix_check(&r) + kvp_radix_w_check(w) + (uint64_t)settle(w, &r);
	for (uint32_t s = 0; s < SLOTS; s++)
		wrong += dump_faults(w, s, &blocks);
	is_u64(wrong, 0, "the tree is the model: %" PRIu64 " blocks in four tiers", blocks);
	kvp_radix_w_close(w);
}

static int make_all(void)
{
	oracle = seg_map(sizeof(*oracle));
	sh = seg_map(sizeof(*sh));
	book_mem = seg_map(kvp_book_footprint(&book_geom));
	if (!oracle || !sh || !book_mem || seg_new(&seg, &geom) || kvp_book_new(book_mem, &book_geom) ||
		kvp_book_join(book_mem, &book_geom, &book))
		return -1;
	kvp_book_attach(&book, KVP_OWNER(15, 1), NULL);
	for (uint32_t r = 0; r < RANKS; r++)
		kvp_rank_open(&book, r, 1);
	tree = read_only();
	return tree ? 0 : -1;
}

static void end_all(uint64_t *odd)
{
	int st;
	kvp_st_rel_u64(&sh->stop, 1);
	kvp_st_rel_u32(&oracle->stop, 1);
	for (uint32_t p = 0; p < PROCS; p++) {
		waitpid(proc[p].pid, &st, 0);
		*odd += st != 0;
		if (st)
			printf("# %s ended with status %d\n", role_name[role_of(p)], st);
	}
}

int main(void)
{
	const char *n = getenv("KVP_KILLS");
	uint64_t kills = n ? strtoull(n, NULL, 10) : getenv("KVP_TORTURE_S") ? 1000 : 100;
	uint64_t odd = 0, stuck = 0, by_role[ROLES] = {0}, from[PROCS];
	if (TAP_IS_TSAN)
		return skip_all(TAP_PROCESSES);
	seed = tap_seed(0);
	struct rng g = {seed};
	if (make_all())
		return 1;
	for (uint32_t p = 0; p < PROCS; p++) {
		start(p);
		from[p] = role_of(p) == WRITER ? 0 : QUIET_CALLS;
	}
	for (uint32_t p = 0; p < PROCS; p++)
		stuck += !goes_on(p, p + 1, PROCS, from);
	kvp_st_rel_u64(&sh->killing, 1);
	for (uint64_t i = 0; i < kills && !odd && !stuck; i++)
		kill_one(&g, &odd, &stuck);
	end_all(&odd);
	for (uint32_t p = 0; p < PROCS; p++)
		by_role[role_of(p)] += proc[p].kills;
	printf("# kills: %" PRIu64 " writer, %" PRIu64 " reader, %" PRIu64 " booker\n", by_role[WRITER],
		by_role[READER], by_role[BOOKER]);
	is_u64(odd, 0, "nobody ended but by a kill, or in order");
	is_u64(stuck, 0, "after each kill readers read and bookers book on, before anything is repaired");
	is_u64(oracle->reader[0].wrong + oracle->reader[1].wrong, 0,
		"no foreign or over-long match in %" PRIu64 " lookups", sh->work[1] + sh->work[2]);
	check_bookings();
	check_tree();
	for (uint32_t k = 0; k < 4; k++)
		print_meters(k & 1, k < 2 ? READER : BOOKER);
	return done();
}
