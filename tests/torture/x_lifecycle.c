/* Lifecycle ring with real processes (threads, without kills, under ThreadSanitizer): producers and the
 * consumer are killed with SIGKILL at random moments and started again. Oracle: every record is whole; those
 * of one producer come in their order, each once (the one at which a consumer died may come twice); every
 * record that was counted as told comes. */
#include "shm/lifecycle.h"
#include "tests/torture/ring_kills.h"

static struct kvp_geom geom = {.slot_max = 8, .region_gen = 1, .lifecycle_max = 1024};

struct oracle { /* shared by all processes */
	struct kvp_ctr_column_shm col[PRODUCERS + 1];
	uint64_t last[PRODUCERS + 1]; /* last number that came, by producer slot */
	uint64_t seen, twice, wrong, full;
};

static struct oracle *o;
static void *ring_mem;
static _Thread_local struct kvp_lifecycle_ring ring;

static void ring_join(void)
{
	kvp_lifecycle_join(ring_mem, &geom, &ring);
	ring.slots = &slots;
}

static uint64_t ring_faults(void)
{
	return kvp_lifecycle_check(&ring);
}

static uint64_t ring_left(void)
{
	return kvp_lifecycle_depth(&ring);
}

/* The consumer repairs what a producer leaves. */
static void ring_sweep(kvp_owner dead)
{
	(void)dead;
}

/* Number n of a producer: texts whose bytes and lengths follow from it. */
static void texts_of(uint64_t n, char *id, uint32_t *id_len, char *lora, uint32_t *lora_len)
{
	uint64_t m = mix(n);
	*id_len = 1 + (uint32_t)(m % (m & 0x700 ? 100 : KVP_RESV_ID_MAX));
	*lora_len = m & 0x1000 ? (uint32_t)(m >> 20) % 50 : 0;
	memset(id, 'a' + (int)(m % 26), *id_len);
	memset(lora, 'A' + (int)(m % 26), *lora_len);
}

static void producer(kvp_owner me)
{
	uint32_t idx = KVP_OWNER_SLOT(me);
	char id[KVP_RESV_ID_MAX], lora[KVP_RESV_LORA_MAX];
	slots.self = me;
	for (uint64_t n = 1; !kvp_ld_rlx_u64(ring_end); n++) {
		struct kvp_lifecycle_claim c;
		struct kvp_lifecycle_put p = {.kind = KVP_LIFECYCLE_ADD,
			.part = idx,
			.h = (uint64_t)KVP_OWNER_GEN(me) << 32 | n,
			.id = id,
			.lora = lora};
		p.worker_id = mix(p.h);
		texts_of(p.h, id, &p.id_len, lora, &p.lora_len);
		while (kvp_lifecycle_claim(&ring, me, &p, &c) != KVP_OK) {
			kvp_faa_rlx_u64(&o->full, 1);
			if (kvp_ld_rlx_u64(ring_end))
				return;
			poll(NULL, 0, 1);
		}
		if (n % 9 == 0)
			kvp_lifecycle_void(&ring, &c);
		else
			kvp_lifecycle_ready(&ring, &c, &o->col[idx]);
		if (n % 512 == 0)
			poll(NULL, 0, 1);
	}
}

/* judge compares a record with its number; first: the first one of a consumer. */
static void judge(const struct kvp_lifecycle_rec *r, int first)
{
	char id[KVP_RESV_ID_MAX], lora[KVP_RESV_LORA_MAX];
	uint32_t id_len, lora_len;
	texts_of(r->h, id, &id_len, lora, &lora_len);
	int good = r->kind == KVP_LIFECYCLE_ADD && r->part >= 1 && r->part <= PRODUCERS &&
		   r->worker_id == mix(r->h) && r->id_len == id_len && r->lora_len == lora_len &&
		   memcmp(r->id, id, id_len) == 0 && memcmp(r->lora, lora, lora_len) == 0 &&
		   (uint32_t)r->h % 9 != 0;
	if (good && r->h == o->last[r->part] && first) {
		o->twice++;
	} else if (good && r->h > o->last[r->part]) {
		o->last[r->part] = r->h;
		o->seen++;
	} else {
		o->wrong++;
	}
}

static void consumer(kvp_owner me)
{
	static _Thread_local struct kvp_lifecycle_rec rec;
	slots.self = me;
	kvp_lifecycle_attach(&ring, me, &o->col[CONSUMER]);
	for (int first = 1;;) {
		int rc = kvp_lifecycle_next(&ring, kvp_clock_mono_ns(), &rec);
		if (rc == KVP_OK) {
			judge(&rec, first);
			kvp_lifecycle_done(&ring);
			first = 0;
			continue;
		}
		if (rc == KVP_ERR_NOTFOUND && kvp_ld_acq_u64(ring_end) == RING_ALL)
			return;
		int ms = (int)kvp_lifecycle_rest(&ring, kvp_clock_mono_ns());
		kvp_slot_sleep(&slots);
		struct pollfd pf = {.fd = wake_fd[CONSUMER], .events = POLLIN};
		if (kvp_lifecycle_next(&ring, kvp_clock_mono_ns(), &rec) != KVP_OK)
			poll(&pf, 1, rc == KVP_ERR_AGAIN ? 1 : ms);
		kvp_slot_awake(&slots);
	}
}

int main(void)
{
	uint64_t told = 0;
	ring_mem = shared(kvp_lifecycle_footprint(&geom));
	o = shared(sizeof(*o));
	kvp_lifecycle_new(ring_mem, &geom);
	uint64_t faults = ring_run(&geom);
	for (uint32_t i = 1; i <= PRODUCERS; i++)
		told += kvp_ld_rlx_u64(&o->col[i].val[KVP_CTR_LIFECYCLE_ENQUEUED]);
	uint64_t dead = kvp_ld_rlx_u64(&o->col[CONSUMER].val[KVP_CTR_LIFECYCLE_DEAD]);
	uint64_t lost = kvp_ld_rlx_u64(&o->col[CONSUMER].val[KVP_CTR_LIFECYCLE_BROKEN]);
	printf("# %" PRIu64 " told, %" PRIu64 " seen, %" PRIu64 " twice, %" PRIu64
	       " of the dead, full %" PRIu64 " times\n",
		told, o->seen, o->twice, dead, o->full);
	is_u64(o->wrong, 0, "every record is whole, in order, and comes once");
	is_u64(faults, 0, "no faults at any time");
	is_u64(lost, 0, "none was written over");
	ok(told > 0 && o->seen >= told && o->seen <= told + killed, "what was told has come");
	ok(o->twice <= consumer_kills && dead <= killed, "no more came twice, or was lost, than was killed");
	is_u64(kvp_lifecycle_depth(&ring), 0, "nothing is left");
	return done();
}
