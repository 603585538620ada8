/* Lifecycle ring: a process killed at every step of booking, prefill-done and free, and of reading; then what
 * a replica makes of the records, against what is booked. */
#include "shm/region.h"
#include "shm/sweep.h"
#include "tests/procs.h"
#include "tests/tap.h"

#define CONSUMER_SLOT 1u
#define SURVIVOR_SLOT 2u
#define VICTIM_SLOT 3u
#define LONG_ID 300u

static struct kvp_region region;
static int fd;
static kvp_owner consumer, survivor, victim;
static uint64_t seq[40];
static char long_id[LONG_ID + 1];
static const char *book_id; /* of the victim */
static uint32_t book_flags;
static uint64_t book_h;
static struct kvp_lifecycle_rec rec;

/* What a replica knows: ids that were added and not freed. */
#define PEER_MAX 64u
static char peer[PEER_MAX][LONG_ID + 1];
static uint32_t peer_cnt;

static int peer_find(const char *id)
{
	for (uint32_t i = 0; i < peer_cnt; i++)
		if (strcmp(peer[i], id) == 0)
			return (int)i;
	return -1;
}

static void peer_apply(const struct kvp_lifecycle_rec *r)
{
	int i = peer_find(r->id);
	if (r->kind == KVP_LIFECYCLE_ADD && i < 0 && peer_cnt < PEER_MAX)
		snprintf(peer[peer_cnt++], LONG_ID + 1, "%.*s", (int)LONG_ID, r->id);
	if (r->kind == KVP_LIFECYCLE_FREE && i >= 0)
		memmove(peer[i], peer[--peer_cnt], LONG_ID + 1);
}

static int node_has(const char *id)
{
	uint64_t h;
	return kvp_resv_find(&region.book, id, strlen(id), &h) == KVP_OK;
}

/* ---- what the victim does ---- */

static int book(struct kvp_book *b, kvp_owner o, const char *id, uint32_t flags, uint64_t *h)
{
	struct kvp_resv_ask a = {.worker_id = 9,
		.seq = seq,
		.seq_cnt = 40,
		.prefill_tok = 100,
		.part = 0,
		.dp_rank = 1,
		.rank_slot = 0,
		.rank_gen = 1,
		.now_ns = 1,
		.flags = flags | KVP_RESV_TRACK_PREFILL};
	int rc = kvp_resv_claim_for(b, o, id, strlen(id), "adapter", 7, h);
	return rc ? rc : kvp_resv_book(b, *h, &a);
}

static void do_book(void)
{
	uint64_t h;
	book(&region.book, victim, book_id, book_flags, &h);
}

static void do_prefill(void)
{
	kvp_resv_prefill_done(&region.book, book_h);
}

static void do_free(void)
{
	kvp_resv_free(&region.book, book_h);
}

static void do_read(void)
{
	kvp_lifecycle_attach(&region.lifecycle, consumer, NULL);
	while (kvp_lifecycle_next(&region.lifecycle, 1, &rec) == KVP_OK)
		kvp_lifecycle_done(&region.lifecycle);
}

/* die runs fn in a child that kills itself at its n-th point: 1 = it was killed, 0 = it has fewer points. */
static int die(void (*fn)(void), kvp_owner owner, uint64_t n)
{
	fflush(stdout);
	pid_t pid = fork();
	if (pid == 0) {
		if (kvp_region_join(fd, KVP_REGION_INDEXER, &region))
			_exit(2);
		kvp_book_attach(&region.book, owner, NULL);
		kvp_book_publish(&region.book, &region.lifecycle);
		die_at(NULL, n);
		fn();
		_exit(0);
	}
	return was_killed(pid) == 1;
}

/* ---- afterwards ---- */

static uint32_t reads; /* records of the victim's id in the last drain */

static int drain(void)
{
	int rc;
	reads = 0;
	while ((rc = kvp_lifecycle_next(&region.lifecycle, 1, &rec)) == KVP_OK) {
		peer_apply(&rec);
		reads += strcmp(rec.id, book_id) == 0;
		if (rec.worker_id != 9 || rec.dp_rank != 1 || rec.lora_len != 7 ||
			strcmp(rec.lora, "adapter") != 0)
			return KVP_ERR_CORRUPT;
		kvp_lifecycle_done(&region.lifecycle);
	}
	return rc;
}

/* The victim is buried and its successor starts. */
static void bury(void)
{
	struct kvp_sweep_result res;
	for (int i = 0; i < 50; i++)
		if (kvp_book_sweep_owner(&region.book, victim, NULL, NULL, &res) == KVP_OK)
			break;
	kvp_slot_release(&region.slots, victim);
	victim = kvp_slot_assign(&region.slots, VICTIM_SLOT, KVP_ROLE_HTTPD, 1);
}

static const struct {
	const char *name;
	uint32_t flags;
} owned[] = {{"of the process", KVP_RESV_LEASED}, {"of the node", KVP_RESV_NODE_OWNED}};

enum { OP_BOOK, OP_PREFILL, OP_FREE };
static const struct {
	const char *name;
	void (*fn)(void);
} op[] = {{"book", do_book}, {"prefill", do_prefill}, {"free", do_free}};

/* One kill: 0 = the operation has no such point. */
static int one(uint32_t what, uint64_t n, uint64_t *wrong)
{
	uint64_t other = 0;
	if (what != OP_BOOK) {
		book(&region.book, victim, book_id, book_flags, &book_h);
		if (drain() != KVP_ERR_NOTFOUND || peer_find(book_id) < 0)
			++*wrong;
	}
	int killed = die(op[what].fn, victim, n);
	/* Others are not held up, and do not lose anything. */
	*wrong += kvp_lifecycle_check(&region.lifecycle) != 0;
	*wrong += book(&region.book, survivor, "other", KVP_RESV_NODE_OWNED, &other) != KVP_OK;
	*wrong += kvp_resv_free(&region.book, other) != KVP_OK;
	bury();
	*wrong += drain() != KVP_ERR_NOTFOUND;
	*wrong += peer_find("other") >= 0;
	/* A replica has nothing that the node has not; it may lack a booking that the sweep completed. */
	int here = node_has(book_id), there = peer_find(book_id) >= 0;
	if (there && !here)
		printf("# %s killed at point %u: a ghost\n", op[what].name, (unsigned)n);
	*wrong += there && !here;
	*wrong += what != OP_BOOK && here != there;
	uint64_t h;
	if (here && kvp_resv_find(&region.book, book_id, strlen(book_id), &h) == KVP_OK)
		*wrong += kvp_resv_free(&region.book, h) != KVP_OK;
	*wrong += drain() != KVP_ERR_NOTFOUND || peer_cnt != 0;
	*wrong += kvp_book_check(&region.book) + kvp_lifecycle_check(&region.lifecycle);
	return killed;
}

static void producers(void)
{
	for (uint32_t o = 0; o < 2; o++)
		for (uint32_t w = OP_BOOK; w <= OP_FREE; w++) {
			uint64_t n = 1, wrong = 0;
			book_flags = owned[o].flags;
			while (n < 500 && one(w, n, &wrong))
				n++;
			ok(wrong == 0 && n > 5,
				"%s, a booking %s, %u characters: killed at each of %u points", op[w].name,
				owned[o].name, (unsigned)strlen(book_id), (unsigned)n - 1);
		}
}

/* A booking that was made and whose maker died before it said so: the replicas learn of it. */
static void made_and_dead(void)
{
	uint64_t n, last = 0, wrong = 0;
	book_flags = KVP_RESV_NODE_OWNED;
	for (n = 1; n < 500; n++) {
		int killed = die(do_book, victim, n);
		bury();
		drain();
		int here = node_has(book_id), there = peer_find(book_id) >= 0;
		last = here && there ? last + 1 : last;
		wrong += there && !here;
		uint64_t h;
		if (kvp_resv_find(&region.book, book_id, strlen(book_id), &h) == KVP_OK)
			kvp_resv_free(&region.book, h);
		drain();
		if (!killed)
			break;
	}
	ok(wrong == 0 && last > 3, "a booking that was made before its maker died is told: at %u points",
		(unsigned)last);
}

static void readers(void)
{
	uint64_t n = 1, wrong = 0, h[3];
	static const char *const ids[] = {"r0", "r1", "r2"};
	for (; n < 100; n++) {
		for (int i = 0; i < 3; i++)
			wrong += book(&region.book, survivor, ids[i], 0, &h[i]) != KVP_OK;
		uint64_t before = kvp_lifecycle_depth(&region.lifecycle);
		int killed = die(do_read, consumer, n);
		wrong += kvp_lifecycle_check(&region.lifecycle) != 0;
		uint64_t left = kvp_lifecycle_depth(&region.lifecycle);
		wrong += left > before;
		kvp_lifecycle_attach(&region.lifecycle, consumer, NULL);
		/* Which records come is exact: the oldest that was not done, and all after it. */
		for (uint64_t i = 3 - left; i < 3; i++) {
			wrong += kvp_lifecycle_next(&region.lifecycle, 1, &rec) != KVP_OK ||
				 strcmp(rec.id, ids[i]) != 0;
			kvp_lifecycle_done(&region.lifecycle);
		}
		for (int i = 0; i < 3; i++)
			wrong += kvp_resv_free(&region.book, h[i]) != KVP_OK;
		wrong += drain() != KVP_ERR_NOTFOUND;
		if (!killed)
			break;
	}
	ok(wrong == 0 && n > 6, "a consumer killed at each of %u points: the next one misses nothing",
		(unsigned)n - 1);
}

int main(void)
{
	if (TAP_IS_TSAN)
		return skip_all(TAP_PROCESSES);
	struct kvp_geom g = {.slot_max = 8,
		.rank_max = 4,
		.index_rank_max = 64,
		.resv_max = 64,
		.block_max = 10000,
		.active_block_max = 1024,
		.queued_max = 64,
		.lifecycle_max = 64};
	if (kvp_region_geom(&g) || kvp_region_create(&g, &fd) ||
		kvp_region_join(fd, KVP_REGION_INDEXER, &region))
		return printf("Bail out! no region\n"), 1;
	consumer = kvp_slot_assign(&region.slots, CONSUMER_SLOT, KVP_ROLE_PEER, 0);
	survivor = kvp_slot_assign(&region.slots, SURVIVOR_SLOT, KVP_ROLE_HTTPD, 0);
	victim = kvp_slot_assign(&region.slots, VICTIM_SLOT, KVP_ROLE_HTTPD, 1);
	kvp_book_attach(&region.book, survivor, NULL);
	kvp_book_publish(&region.book, &region.lifecycle);
	kvp_rank_open(&region.book, 0, 1);
	for (uint64_t i = 0; i < 40; i++)
		seq[i] = i * 0x9e3779b97f4a7c15ull;
	memset(long_id, 'x', LONG_ID);
	kvp_lifecycle_attach(&region.lifecycle, consumer, NULL);
	book_id = "victim";
	producers();
	made_and_dead();
	readers();
	book_id = long_id;
	producers();
	return done();
}
