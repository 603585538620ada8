/* Processes (threads under ThreadSanitizer) book, prefill, output and free at full speed over a few ranks
 * with shared prefixes; one after the other is killed at a random instant and swept while the others go on.
 * In the end, with everything freed, nothing may be left. KVP_TORTURE_S seconds (2). */
#include "tests/book_fixture.h"
#include "tests/procs.h"

#include <pthread.h>

#define RANKS 8
#define WORKERS 3
#define HELD 12

struct shared {
	uint64_t stop, ops, refused, node_left, sum_wrong;
	uint32_t gen[RANKS]; /* generation that is open now */
};
static struct fixture f;
static struct shared *sh;

static uint64_t mix(uint64_t *x)
{
	return xorshift(x) >> 8;
}

struct held {
	uint64_t h;
	int mine;
};

static int do_book(struct kvp_book *b, kvp_owner owner, uint64_t *x, struct held *at)
{
	uint64_t seq[96];
	uint32_t n = (uint32_t)(mix(x) % 4 ? mix(x) % 24 : mix(x) % 96), family = (uint32_t)(mix(x) % 3);
	uint32_t shared = (uint32_t)(mix(x) % (n + 1));
	uint64_t own = mix(x);
	for (uint32_t i = 0; i < n; i++)
		seq[i] = i < shared ? family * 1000 + i + 1 : own * 131 + i;
	char id[32];
	/* few ids, so that claims of the same one meet */
	snprintf(id, sizeof(id), "id-%u", (unsigned)(mix(x) % 48));
	int rc = kvp_resv_claim(b, owner, id, strlen(id), &at->h);
	if (rc)
		return rc;
	uint32_t rank = (uint32_t)(mix(x) % RANKS);
	struct kvp_resv_ask a = { .rank_slot = rank, .rank_gen = kvp_ld_acq_u32(&sh->gen[rank]),
		.prefill_tok = mix(x) % 1000, .seq = seq, .seq_cnt = n, .validate = 1,
		.flags = KVP_RESV_TRACK_PREFILL | (mix(x) % 4 ? 0 : KVP_RESV_NODE_OWNED) };
	for (int i = 0; i < 5; i++) {
		kvp_load_read(b, rank, &a.seen);
		a.validate = i < 4;
		rc = kvp_resv_book(b, at->h, &a);
		if (rc != KVP_ERR_AGAIN)
			break;
	}
	if (rc) {
		kvp_resv_abandon(b, at->h);
		kvp_faa_rlx_u64(&sh->refused, 1);
		return rc;
	}
	at->mine = 1;
	return KVP_OK;
}

/* One booker; frees of bookings that another process may end at the same moment included. */
static void work(uint32_t me, uint32_t incarnation, uint64_t ops)
{
	struct kvp_book b;
	kvp_owner owner = KVP_OWNER(me + 1, incarnation);
	kvp_book_join(f.mem, &f.g, &b);
	kvp_book_attach(&b, owner, NULL);
	uint64_t x = 0x9e3779b97f4a7c15ULL * (me + 1) + incarnation * 77;
	struct held held[HELD];
	memset(held, 0, sizeof(held));
	for (uint64_t i = 0; (!ops || i < ops) && !kvp_ld_acq_u64(&sh->stop); i++) {
		struct held *at = &held[mix(&x) % HELD];
		uint64_t what = mix(&x) % 10, h;
		char id[32];
		double frac = (double)(mix(&x) % 11) / 10;
		kvp_faa_rlx_u64(&sh->ops, 1);
		if (!at->mine) {
			do_book(&b, owner, &x, at);
		} else if (what < 5) {
			kvp_resv_free(&b, at->h);
			at->mine = 0;
		} else if (what < 7) {
			kvp_resv_prefill_done(&b, at->h);
		} else if (what < 9) {
			kvp_resv_output(&b, at->h, what == 7 ? &frac : NULL);
		} else {
			snprintf(id, sizeof(id), "id-%u", (unsigned)(mix(&x) % 48));
			if (kvp_resv_find(&b, id, strlen(id), &h) == KVP_OK) {
				struct kvp_resv_info info;
				if (kvp_resv_info(&b, h, &info) == KVP_OK && strcmp(info.id, id) != 0)
					kvp_faa_rlx_u64(&sh->sum_wrong, 1);
				if (mix(&x) % 2)
					kvp_resv_free(&b, h);
			}
		}
	}
	for (int i = 0; i < HELD; i++)
		if (held[i].mine)
			kvp_resv_free(&b, held[i].h);
	kvp_book_leave(&b);
}

static void flap(uint64_t *x)
{
	uint32_t r = (uint32_t)(mix(x) % RANKS), gen = sh->gen[r];
	kvp_rank_close(&f.b, r, gen);
	kvp_rank_open(&f.b, r, gen + 1);
	kvp_st_rel_u32(&sh->gen[r], gen + 1);
}

static void free_all(void)
{
	uint32_t cursor = 0;
	uint64_t h;
	while (kvp_resv_iter(&f.b, &cursor, &h) == KVP_OK)
		kvp_resv_free(&f.b, h);
}

static uint64_t residue(void)
{
	uint64_t sum = 0;
	for (uint32_t r = 0; r < RANKS; r++) {
		struct kvp_load l;
		kvp_load_read(&f.b, r, &l);
		sum += l.prefill_tok + l.requests + l.active_blk_fx;
	}
	return sum;
}

static pid_t start(uint32_t me, uint32_t incarnation)
{
	fflush(stdout);
	pid_t pid = fork();
	if (pid == 0) {
		work(me, incarnation, 0);
		_exit(0);
	}
	return pid;
}

static void kills(uint64_t seconds)
{
	pid_t pid[WORKERS];
	uint32_t inc[WORKERS];
	uint64_t killed = 0, again = 0, recounted = 0, x = rnd();
	for (uint32_t i = 0; i < WORKERS; i++)
		pid[i] = start(i, inc[i] = 1);
	uint64_t end = now_ns() + seconds * 1000000000u;
	while (now_ns() < end) {
		uint32_t v = rnd_below(WORKERS);
		uint64_t until = now_ns() + 200000 + rnd_below(3000000);
		struct kvp_sweep_result res;
		while (now_ns() < until)
			sched_yield();
		kill(pid[v], SIGKILL);
		waitpid(pid[v], NULL, 0);
		killed++;
		int rc;
		while ((rc = kvp_book_sweep_owner(&f.b, KVP_OWNER(v + 1, inc[v]), NULL, NULL, &res)) ==
			KVP_ERR_AGAIN)
			again++;
		recounted += res.rank_cnt;
		pid[v] = start(v, ++inc[v]);
		if (rnd_below(4) == 0)
			flap(&x);
	}
	kvp_st_rel_u64(&sh->stop, 1);
	for (uint32_t i = 0; i < WORKERS; i++)
		waitpid(pid[i], NULL, 0);
	printf("# %" PRIu64 " operations, %" PRIu64 " kills, %" PRIu64 " recounts, %" PRIu64
	       " sweeps repeated, %" PRIu64 " bookings refused\n",
		sh->ops, killed, recounted, again, sh->refused);
	is_u64(kvp_book_check(&f.b), 0, "after %" PRIu64 " kills the loads are those of the reservations",
		killed);
}

static void *thread_main(void *arg)
{
	work((uint32_t)(uintptr_t)arg, 1, 0);
	return NULL;
}

static void threads(uint64_t seconds)
{
	pthread_t t[WORKERS];
	uint64_t x = rnd();
	for (uintptr_t i = 0; i < WORKERS; i++)
		pthread_create(&t[i], NULL, thread_main, (void *)i);
	uint64_t end = now_ns() + seconds * 1000000000u;
	while (now_ns() < end) {
		uint64_t until = now_ns() + 3000000;
		while (now_ns() < until)
			sched_yield();
		flap(&x);
	}
	kvp_st_rel_u64(&sh->stop, 1);
	for (int i = 0; i < WORKERS; i++)
		pthread_join(t[i], NULL);
	is_u64(kvp_book_check(&f.b), 0, "after threads the loads are those of the reservations");
}

int main(void)
{
	const char *s = getenv("KVP_TORTURE_S");
	uint64_t seconds = s ? strtoull(s, NULL, 10) : 2;
	rnd_seed();
	fixture_make(&f, KVP_LOAD_PADDED_MAX + 1, 64, 4096);
	kvp_book_attach(&f.b, KVP_OWNER(9, 1), NULL);
	sh = shared(sizeof(*sh));
	for (uint32_t r = 0; r < RANKS; r++)
		kvp_rank_open(&f.b, r, sh->gen[r] = 1);
#ifdef KVP_ATOMIC_C11
	threads(seconds);
	(void)kills;
#else
	kills(seconds);
	(void)threads;
#endif
	free_all();
	is_u64(residue(), 0, "everything freed leaves exactly zero load");
	is_u64(kvp_book_check(&f.b), 0, "and no block, chunk or id");
	is_u64(sh->sum_wrong, 0, "no id ever led to a reservation of another");
	kvp_resv_expire(&f.b, 0, 0);
	is_u64(kvp_resv_cnt(&f.b), 0, "the table is empty");
	fixture_drop(&f);
	return done();
}
