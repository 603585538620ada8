/* Lifecycle ring: against a model of claims, gaps and a full ring; stalls, late records, broken content, a
 * new consumer, wake-ups. */
#include "shm/lifecycle.h"
#include "tests/procs.h"
#include "tests/tap.h"

#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

#define CELLS 64u
#define HEAD 40u /* bytes of a record before its texts */
#define ME KVP_OWNER(3, 1)
#define OTHER KVP_OWNER(4, 1)
#define CONSUMER KVP_OWNER(1, 1)
#define MS 1000000ull

static struct kvp_geom geom = {.slot_max = 8, .region_gen = 1, .lifecycle_max = CELLS};
static struct kvp_lifecycle_ring ring;
static void *mem;
static struct kvp_ctr_column_shm col;
static struct kvp_lifecycle_rec rec;
static char text[KVP_RESV_ID_MAX + KVP_RESV_LORA_MAX];

static void fresh(void)
{
	if (mem)
		munmap(mem, kvp_lifecycle_footprint(&geom));
	mem = shared(kvp_lifecycle_footprint(&geom));
	memset(&col, 0, sizeof(col));
	if (kvp_lifecycle_new(mem, &geom) || kvp_lifecycle_join(mem, &geom, &ring))
		ok(0, "a new ring");
	kvp_lifecycle_attach(&ring, CONSUMER, &col);
}

/* What the n-th record says. */
static struct kvp_lifecycle_put put_of(uint64_t n, uint32_t id_len, uint32_t lora_len)
{
	return (struct kvp_lifecycle_put){.kind = (enum kvp_lifecycle_kind)(1 + n % 4),
		.part = (uint32_t)(n % 7),
		.dp_rank = (uint32_t)(n % 3),
		.h = n << 32 | 5,
		.worker_id = ~n,
		.id = text + n % 100,
		.id_len = id_len,
		.lora = text + n % 90,
		.lora_len = lora_len};
}

static int says(const struct kvp_lifecycle_put *p)
{
	return rec.kind == p->kind && rec.part == p->part && rec.dp_rank == p->dp_rank && rec.h == p->h &&
	       rec.worker_id == p->worker_id && rec.id_len == p->id_len && rec.lora_len == p->lora_len &&
	       memcmp(rec.id, p->id, p->id_len) == 0 && memcmp(rec.lora, p->lora, p->lora_len) == 0 &&
	       rec.id[rec.id_len] == 0 && rec.lora[rec.lora_len] == 0;
}

static struct kvp_lifecycle_claim claim(uint64_t n, int *rc)
{
	struct kvp_lifecycle_claim c;
	struct kvp_lifecycle_put p = put_of(n, 36, 0);
	*rc = kvp_lifecycle_claim(&ring, ME, &p, &c);
	return c;
}

static int tell(uint64_t n)
{
	int rc;
	struct kvp_lifecycle_claim c = claim(n, &rc);
	kvp_lifecycle_ready(&ring, &c, &col);
	return rc;
}

static int comes(uint64_t n)
{
	struct kvp_lifecycle_put p = put_of(n, 36, 0);
	int good = kvp_lifecycle_next(&ring, 1, &rec) == KVP_OK && says(&p);
	kvp_lifecycle_done(&ring);
	return good;
}

static void life_cycle(void)
{
	struct kvp_geom off = geom, big = geom;
	struct kvp_lifecycle_ring r;
	off.lifecycle_max = 0;
	big.lifecycle_max = KVP_LIFECYCLE_MAX + 1;
	char *m = shared(1 << 20);
	is_u64(kvp_lifecycle_footprint(&big), 0, "too many events have no footprint");
	is_u64(kvp_lifecycle_footprint(NULL), 0, "no geometry has no footprint");
	ok(kvp_lifecycle_join(m, &geom, &r) == KVP_ERR_AGAIN, "join before new answers AGAIN");
	ok(kvp_lifecycle_new(m + 64, &geom) == KVP_ERR_INVAL, "new refuses misaligned memory");
	ok(kvp_lifecycle_new(m, &geom) == KVP_OK, "new");
	ok(kvp_lifecycle_join(m, &(struct kvp_geom){.slot_max = 8, .lifecycle_max = 1000}, &r) ==
			KVP_ERR_LAYOUT,
		"join with another size answers LAYOUT");
	ok(kvp_lifecycle_join(m, &geom, &r) == KVP_OK && r.cell_mask == CELLS - 1, "join");
	ok(kvp_lifecycle_check(&r) == 0 && kvp_lifecycle_depth(&r) == 0 &&
			kvp_lifecycle_next(&r, 1, &rec) == KVP_ERR_NOTFOUND,
		"a fresh ring is empty and has no faults");
	kvp_lifecycle_delete(m);
	ok(kvp_lifecycle_join(m, &geom, &r) == KVP_ERR_AGAIN, "join after delete answers AGAIN");
	ok(kvp_lifecycle_footprint(&off) == KVP_PAGE && kvp_lifecycle_new(m, &off) == KVP_OK &&
			kvp_lifecycle_join(m, &off, &r) == KVP_OK && r.shm == NULL,
		"without replica sync there is no ring");
	kvp_lifecycle_attach(&r, CONSUMER, NULL);
	kvp_lifecycle_done(&r);
	ok(kvp_lifecycle_next(&r, 1, &rec) == KVP_ERR_NOTFOUND && kvp_lifecycle_check(&r) == 0 &&
			kvp_lifecycle_depth(&r) == 0,
		"and every call on it is harmless");
	munmap(m, 1 << 20);
}

static void arguments(void)
{
	struct kvp_lifecycle_claim c;
	fresh();
	struct kvp_lifecycle_put p = put_of(1, 0, 0);
	ok(kvp_lifecycle_claim(&ring, ME, &p, &c) == KVP_ERR_INVAL, "an empty id is refused");
	p = put_of(1, KVP_RESV_ID_MAX + 1, 0);
	ok(kvp_lifecycle_claim(&ring, ME, &p, &c) == KVP_ERR_INVAL, "too long an id is refused");
	p = put_of(1, 1, KVP_RESV_LORA_MAX + 1);
	ok(kvp_lifecycle_claim(&ring, ME, &p, &c) == KVP_ERR_INVAL, "too long an adapter is refused");
	p = put_of(1, 1, 0);
	ok(kvp_lifecycle_claim(&ring, 0, &p, &c) == KVP_ERR_INVAL, "nobody may not claim");
	p.kind = KVP_LIFECYCLE_KIND_CNT;
	ok(kvp_lifecycle_claim(&ring, ME, &p, &c) == KVP_ERR_INVAL, "an unknown kind is refused");
	is_u64(kvp_lifecycle_depth(&ring), 0, "nothing of it is in the ring");
	p = put_of(2, KVP_RESV_ID_MAX, KVP_RESV_LORA_MAX);
	ok(kvp_lifecycle_claim(&ring, ME, &p, &c) == KVP_OK && c.cells == KVP_LIFECYCLE_CELLS_MAX,
		"the longest record takes its place");
	kvp_lifecycle_ready(&ring, &c, &col);
	ok(kvp_lifecycle_next(&ring, 1, &rec) == KVP_OK && says(&p), "and is whole");
}

/* ---- the model: a list of claims in order ---- */

static uint64_t seed;

static uint32_t any(uint32_t below)
{
	seed ^= seed << 13;
	seed ^= seed >> 7;
	seed ^= seed << 17;
	return (uint32_t)(seed >> 11) % below;
}

struct claimed {
	struct kvp_lifecycle_put put;
	struct kvp_lifecycle_claim c;
	int state; /* 0 open, 1 ready, 2 void */
};
#define MODEL_MAX 4096u
static struct claimed list[MODEL_MAX]; /* ring of [from, to) */
static uint64_t from, to, used, faults;

static uint32_t cells_of(const struct kvp_lifecycle_put *p)
{
	return (HEAD + p->id_len + p->lora_len + KVP_LIFECYCLE_CELL_BYTES - 1) / KVP_LIFECYCLE_CELL_BYTES;
}

static void model_claim(uint64_t n)
{
	uint32_t id_len = 1 + any(any(4) ? 90 : KVP_RESV_ID_MAX);
	uint32_t lora_len = any(2) ? 0 : any(60);
	struct claimed *x = &list[to % MODEL_MAX];
	x->put = put_of(n, id_len, lora_len);
	x->state = 0;
	int rc = kvp_lifecycle_claim(&ring, any(2) ? ME : OTHER, &x->put, &x->c);
	int fits = used + cells_of(&x->put) <= CELLS;
	faults += rc != (fits ? KVP_OK : KVP_ERR_FULL) || (x->c.pos != 0) != fits;
	if (!fits) {
		kvp_lifecycle_ready(&ring, &x->c, &col);
		return;
	}
	used += cells_of(&x->put);
	to++;
}

static void model_settle(void)
{
	if (from == to)
		return;
	struct claimed *x = &list[(from + any((uint32_t)(to - from))) % MODEL_MAX];
	if (x->state)
		return;
	x->state = any(4) ? 1 : 2;
	if (x->state == 1)
		kvp_lifecycle_ready(&ring, &x->c, &col);
	else
		kvp_lifecycle_void(&ring, &x->c);
}

static void model_read(void)
{
	int rc = kvp_lifecycle_next(&ring, 1, &rec);
	while (from != to && list[from % MODEL_MAX].state == 2)
		used -= cells_of(&list[from++ % MODEL_MAX].put);
	const struct claimed *x = &list[from % MODEL_MAX];
	faults += rc != (from == to ? KVP_ERR_NOTFOUND : x->state ? KVP_OK : KVP_ERR_AGAIN);
	if (rc)
		return;
	faults += !says(&x->put);
	if (any(3) == 0)
		return; /* it is read again */
	kvp_lifecycle_done(&ring);
	used -= cells_of(&x->put);
	from++;
}

static void model(uint32_t steps)
{
	fresh();
	seed = tap_seed(20261130u);
	from = to = used = faults = 0;
	uint64_t checked = 0, full = 0;
	for (uint64_t n = 1; n <= steps; n++) {
		uint32_t what = any(8);
		if (what < 3)
			model_claim(n);
		else if (what < 5)
			model_settle();
		else
			model_read();
		faults += kvp_lifecycle_depth(&ring) != used;
		if (n % 64 == 0)
			checked += kvp_lifecycle_check(&ring);
	}
	full = col.val[KVP_CTR_LIFECYCLE_DROPPED];
	is_u64(faults, 0, "%u steps are those of the model", steps);
	is_u64(checked, 0, "without faults on the way");
	ok(full > 0, "and the ring was full %u times", (unsigned)full);
	ok(to > 4 * CELLS, "over %u records", (unsigned)to);
}

/* ---- who does not finish ---- */

static void stalls(void)
{
	int rc;
	fresh();
	struct kvp_lifecycle_claim c = claim(1, &rc);
	tell(2);
	uint64_t t = 1000 * MS;
	ok(kvp_lifecycle_next(&ring, t, &rec) == KVP_ERR_AGAIN &&
			kvp_lifecycle_next(&ring, t + KVP_LIFECYCLE_STALL_NS - 1, &rec) == KVP_ERR_AGAIN,
		"an open claim holds what is behind it up");
	ok(kvp_lifecycle_next(&ring, t + KVP_LIFECYCLE_STALL_NS, &rec) == KVP_OK && rec.h == (2ull << 32 | 5),
		"not for ever");
	is_u64(col.val[KVP_CTR_LIFECYCLE_STALLED], 1, "which is counted");
	kvp_lifecycle_done(&ring);
	kvp_lifecycle_ready(&ring, &c, &col);
	ok(comes(1), "its record comes late when it goes on");
	is_u64(col.val[KVP_CTR_LIFECYCLE_ENQUEUED], 2, "none is lost");
	c = claim(3, &rc);
	kvp_lifecycle_next(&ring, t, &rec);
	kvp_lifecycle_next(&ring, t + KVP_LIFECYCLE_STALL_NS, &rec);
	kvp_lifecycle_void(&ring, &c);
	ok(kvp_lifecycle_next(&ring, t, &rec) == KVP_ERR_NOTFOUND, "one that is given up late does not come");
	c = claim(4, &rc);
	kvp_lifecycle_next(&ring, t, &rec);
	kvp_lifecycle_next(&ring, t + KVP_LIFECYCLE_STALL_NS, &rec);
	int good = 1;
	for (uint64_t n = 100; n < 100 + 2 * CELLS; n++)
		good &= tell(n) == KVP_OK && comes(n);
	kvp_lifecycle_ready(&ring, &c, &col);
	ok(good && kvp_lifecycle_next(&ring, t, &rec) == KVP_ERR_NOTFOUND &&
			col.val[KVP_CTR_LIFECYCLE_DROPPED] == 1,
		"one whose cells were used meanwhile is lost and counted");
	is_u64(kvp_lifecycle_check(&ring), 0, "no faults");
}

static void broken(void)
{
	int rc;
	fresh();
	tell(1);
	struct kvp_lifecycle_claim c = claim(2, &rc);
	kvp_lifecycle_ready(&ring, &c, &col);
	tell(3);
	char *cell = (char *)mem + KVP_PAGE + (c.pos & ring.cell_mask) * 128;
	cell[8 + 60] ^= 1;
	is_u64(kvp_lifecycle_check(&ring), 1, "the check finds broken content");
	ok(comes(1) && comes(3), "which costs one record");
	is_u64(col.val[KVP_CTR_LIFECYCLE_BROKEN], 1, "and is counted");
	is_u64(kvp_lifecycle_check(&ring), 0, "then all is well");
	c = claim(4, &rc);
	kvp_lifecycle_ready(&ring, &c, &col);
	tell(5);
	memset((char *)mem + KVP_PAGE + (c.pos & ring.cell_mask) * 128, 0xff, 8);
	ok(kvp_lifecycle_check(&ring) == 1 && kvp_lifecycle_next(&ring, 1, &rec) == KVP_ERR_NOTFOUND,
		"where no record begins all of them are passed");
	ok(tell(6) == KVP_OK && comes(6) && kvp_lifecycle_check(&ring) == 0, "and the next one comes");
}

static void next_consumer(void)
{
	fresh();
	tell(1);
	tell(2);
	ok(kvp_lifecycle_next(&ring, 1, &rec) == KVP_OK, "a consumer reads a record");
	kvp_lifecycle_attach(&ring, KVP_OWNER(1, 2), &col);
	kvp_lifecycle_done(&ring);
	ok(comes(1) && comes(2), "the next one gets it again, and what follows");
	kvp_lifecycle_done(&ring);
	ok(tell(3) == KVP_OK && comes(3), "done is done once");
}

static void wakes(void)
{
	struct kvp_slots slots;
	int fd[8], rc;
	uint64_t n;
	fresh();
	void *m = shared(kvp_slot_footprint(&geom));
	kvp_slot_new(m, &geom);
	kvp_slot_join(m, &geom, &slots);
	for (int i = 0; i < 8; i++)
		fd[i] = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
	slots.wake_fd = fd;
	slots.self = CONSUMER;
	ring.slots = &slots;
	tell(1);
	ok(read(fd[1], &n, 8) != 8 && comes(1), "who is awake is not woken");
	kvp_slot_sleep(&slots);
	struct kvp_lifecycle_claim c = claim(2, &rc);
	ok(read(fd[1], &n, 8) != 8, "a claim wakes nobody");
	kvp_lifecycle_ready(&ring, &c, &col);
	ok(read(fd[1], &n, 8) == 8, "its record does");
	kvp_slot_sleep(&slots);
	c = claim(3, &rc);
	kvp_lifecycle_void(&ring, &c);
	ok(read(fd[1], &n, 8) == 8, "so does giving it up: what is behind it may come now");
	ring.wake = KVP_LIFECYCLE_WAKE_LATER;
	kvp_slot_sleep(&slots);
	tell(4);
	ok(read(fd[1], &n, 8) != 8 && kvp_lifecycle_tend(&ring) == 1 && read(fd[1], &n, 8) != 8,
		"a wake-up that is put off comes after the answers");
	tell(5);
	ok(kvp_lifecycle_tend(&ring) == 0 && read(fd[1], &n, 8) == 8, "a turn later, even if more was told");
	ok(kvp_lifecycle_tend(&ring) == 0, "and only once");
	kvp_slot_sleep(&slots);
	uint64_t t = 5 * MS;
	ok(kvp_lifecycle_next(&ring, t, &rec) == KVP_OK && kvp_lifecycle_rest(&ring, t) == 1,
		"a consumer that had a record looks again soon");
	tell(6);
	ok(kvp_lifecycle_tend(&ring) == 0 && kvp_lifecycle_tend(&ring) == 0 && read(fd[1], &n, 8) != 8,
		"and is not woken");
	ok(kvp_lifecycle_rest(&ring, t + KVP_LIFECYCLE_LINGER_NS) == KVP_SLEEP_MAX_MS,
		"one that had none for a while sleeps");
	tell(7);
	ok(kvp_lifecycle_tend(&ring) == 1 && kvp_lifecycle_tend(&ring) == 0 && read(fd[1], &n, 8) == 8,
		"and is woken");
	for (int i = 0; i < 8; i++)
		close(fd[i]);
	ring.slots = NULL;
	munmap(m, kvp_slot_footprint(&geom));
}

int main(void)
{
	for (size_t i = 0; i < sizeof(text); i++)
		text[i] = (char)('!' + i * 7 % 90);
	life_cycle();
	arguments();
	model(200000);
	stalls();
	broken();
	next_consumer();
	wakes();
	return done();
}
