/* Processes (threads under ThreadSanitizer) insert, find, consume and discard pending selections at full
 * speed under few ids; one after the other is killed at a random instant and swept while the others go on.
 * What is found is whole, no generation is consumed twice, and nothing is left in the end. KVP_TORTURE_S
 * seconds (1). */
#include "tests/pending_fixture.h"
#include "tests/procs.h"

#include <pthread.h>

#define WORKERS 3
#define GEN_MAX (1u << 22)

struct shared {
	uint64_t stop, inserted, found, consumed, broken, twice, refused;
	uint8_t pad[64];
	uint32_t gone[GEN_MAX]; /* consumes of a generation */
};
static struct pend f;
static struct shared *sh;

static uint64_t mix(uint64_t *x)
{
	return xorshift(x) >> 8;
}

static void look(struct kvp_pending *p, const char *id, uint64_t *x, uint64_t now)
{
	struct kvp_pending_hit h;
	uint64_t seq[1200];
	if (kvp_pending_peek(p, 3, id, strlen(id), now, &h))
		return;
	kvp_faa_rlx_u64(&sh->found, 1);
	if (h.seq_cnt != h.worker_id % 1200 || h.isl_tok != h.worker_id + 1) {
		kvp_faa_rlx_u64(&sh->broken, 1);
		return;
	}
	if (kvp_pending_lists(p, &h, seq, NULL, NULL) == KVP_OK)
		for (uint32_t i = 0; i < h.seq_cnt; i++)
			if (seq[i] != h.worker_id * 1000003 + i) {
				kvp_faa_rlx_u64(&sh->broken, 1);
				break;
			}
	if (mix(x) % 2 && kvp_pending_consume(p, &h) == KVP_OK) {
		kvp_faa_rlx_u64(&sh->consumed, 1);
		if (h.gen < GEN_MAX && kvp_faa_ar_u32(&sh->gone[h.gen], 1))
			kvp_faa_rlx_u64(&sh->twice, 1);
	}
}

static void work(uint32_t me, uint32_t incarnation)
{
	struct kvp_pending p;
	kvp_pending_join(f.mem, &f.g, &p);
	kvp_pending_attach(&p, KVP_OWNER(me + 1, incarnation), NULL);
	uint64_t x = 0x9e3779b97f4a7c15ULL * (me + 1) + incarnation * 77;
	while (!kvp_ld_acq_u64(&sh->stop)) {
		char id[16];
		uint64_t mark = mix(&x) % 4 ? mix(&x) % 40 + 1200 * (mix(&x) % 9) : mix(&x) % 9000;
		snprintf(id, sizeof(id), "%u", (unsigned)(mix(&x) % 24));
		switch (mix(&x) % 8) {
		case 0:
			kvp_pending_discard(&p, 3, id, strlen(id));
			break;
		case 1:
		case 2:
		case 3:
			if (pend_put(&p, id, (uint32_t)(mark % 1200), mark, mix(&x) % 8 + 1000))
				kvp_faa_rlx_u64(&sh->refused, 1);
			kvp_faa_rlx_u64(&sh->inserted, 1);
			break;
		default:
			look(&p, id, &x, 1004);
		}
	}
}

#ifdef KVP_ATOMIC_C11
static void *thread(void *arg)
{
	work((uint32_t)(uintptr_t)arg, 1);
	return NULL;
}
static uint64_t run(uint64_t seconds)
{
	pthread_t t[WORKERS];
	for (uintptr_t i = 0; i < WORKERS; i++)
		pthread_create(&t[i], NULL, thread, (void *)i);
	sleep((unsigned)seconds);
	kvp_st_rel_u64(&sh->stop, 1);
	for (int i = 0; i < WORKERS; i++)
		pthread_join(t[i], NULL);
	return 0;
}
#else
static pid_t start(uint32_t me, uint32_t incarnation)
{
	pid_t pid = fork();
	if (pid == 0) {
		work(me, incarnation);
		_exit(0);
	}
	return pid;
}
static uint64_t run(uint64_t seconds)
{
	pid_t pid[WORKERS];
	uint32_t gen[WORKERS];
	uint64_t kills = 0, x = tap_seed(0) | 1, end = now_ms() + seconds * 1000;
	for (uint32_t i = 0; i < WORKERS; i++)
		pid[i] = start(i, gen[i] = 1);
	while (now_ms() < end) {
		uint32_t v = (uint32_t)(mix(&x) % WORKERS);
		usleep((useconds_t)(mix(&x) % 3000)); /* killed at some moment */
		kill(pid[v], SIGKILL);
		waitpid(pid[v], NULL, 0);
		kvp_pending_sweep_owner(&f.p, KVP_OWNER(v + 1, gen[v]));
		kills++;
		pid[v] = start(v, ++gen[v]);
	}
	kvp_st_rel_u64(&sh->stop, 1);
	for (int i = 0; i < WORKERS; i++)
		waitpid(pid[i], NULL, 0);
	return kills;
}
#endif

int main(void)
{
	const char *s = getenv("KVP_TORTURE_S");
	sh = shared(sizeof(*sh));
	pend_make(&f, 12, 40000, 6);
	uint64_t kills = run(s ? strtoull(s, NULL, 10) : 1);
	struct kvp_pending_stat st;
	kvp_pending_stat(&f.p, &st);
	printf("# %" PRIu64 " kills, %" PRIu64 " inserts, %" PRIu64 " found, %" PRIu64 " consumed, %" PRIu64
	       " refused\n",
		kills, sh->inserted, sh->found, sh->consumed, sh->refused);
	ok(sh->inserted > 100 && sh->found > 10 && sh->consumed > 10, "work was done");
	is_u64(sh->broken, 0, "whatever was found was whole");
	is_u64(sh->twice, 0, "no generation was consumed twice");
	is_u64(sh->refused, 0, "no insert was refused");
	ok(st.taken == 0 && kvp_pending_check(&f.p) == 0, "nothing is left over");
	pend_drop(&f);
	return done();
}
