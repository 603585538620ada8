/* Command ring with real processes (threads, without kills, under ThreadSanitizer): producers and the
 * consumer are killed with SIGKILL at random moments, the parent sweeps and starts them again. Oracle: every
 * answered command has the right reply to its own payload; commands of one producer are executed in their
 * order; no more are answered than were executed; at the end, after a last sweep, every cell is free. */
#include "shm/cmdring.h"
#include "tests/torture/ring_kills.h"

static struct kvp_geom geom = {.slot_max = 8, .region_gen = 1};

struct oracle {				  /* shared by all processes */
	uint64_t answered[PRODUCERS + 1]; /* replies seen, by producer slot */
	uint64_t executed, again;	  /* by the consumers */
	uint64_t last[PRODUCERS + 1];	  /* highest number executed for the first time, by producer slot */
	uint64_t wrong;			  /* any broken claim */
};

static struct oracle *o;
static void *ring_mem;
static _Thread_local struct kvp_cmdring ring;

static void ring_join(void)
{
	kvp_cmdring_join(ring_mem, &geom, &ring);
	ring.slots = &slots;
}

static uint64_t ring_faults(void)
{
	return kvp_cmdring_check(&ring);
}

static uint64_t ring_left(void)
{
	uint32_t n[KVP_CMD_STATES];
	kvp_cmd_count(&ring, n);
	return KVP_CMD_CELLS - n[0];
}

static void ring_sweep(kvp_owner dead)
{
	kvp_cmd_sweep_owner(&ring, dead);
}

static void sleep_on(uint32_t idx, int (*idle)(void *), void *ctx)
{
	kvp_slot_sleep(&slots);
	struct pollfd pf = {.fd = wake_fd[idx], .events = POLLIN};
	if (idle(ctx))
		poll(&pf, 1, KVP_SLEEP_MAX_MS);
	kvp_slot_awake(&slots);
}

static int no_reply(void *c)
{
	return !kvp_cmd_done(&ring, c);
}

static int no_command(void *unused)
{
	(void)unused;
	uint32_t n[KVP_CMD_STATES];
	kvp_cmd_count(&ring, n);
	return n[2] == 0;
}

static void producer(kvp_owner me)
{
	uint32_t idx = KVP_OWNER_SLOT(me);
	slots.self = me;
	for (uint64_t n = 1; !kvp_ld_rlx_u64(ring_end); n++) {
		struct kvp_cmd_cell *c;
		void *buf;
		int away = n % 16 == 8; /* nobody waits for it */
		while ((away ? kvp_cmd_begin_spare : kvp_cmd_begin)(&ring, me, &c, &buf) != KVP_OK)
			kvp_pause();
		uint64_t p[3] = {((uint64_t)KVP_OWNER_GEN(me) << 32) | n, idx, mix(n)};
		memcpy(buf, p, sizeof(p));
		memset((char *)buf + sizeof(p), (int)(n & 0xff), 64);
		c->worker_id = p[0];
		if ((away ? kvp_cmd_post_away : kvp_cmd_post)(&ring, c, KVP_CMD_PING, sizeof(p) + 64) !=
			KVP_OK)
			kvp_faa_rlx_u64(&o->wrong, 1);
		if (away)
			continue;
		if (n % 16 == 0) { /* give up at once: withdrawn or left to the consumer */
			kvp_cmd_end(&ring, c);
			continue;
		}
		while (!kvp_cmd_done(&ring, c))
			sleep_on(idx, no_reply, c);
		uint64_t r[2];
		memcpy(r, buf, sizeof(r));
		if (c->status != 7 || c->reply_len != sizeof(r) || r[0] != mix(p[0]) || r[1] != p[0])
			kvp_faa_rlx_u64(&o->wrong, 1);
		kvp_cmd_end(&ring, c);
		kvp_faa_rlx_u64(&o->answered[idx], 1);
	}
}

static void consumer(kvp_owner me)
{
	slots.self = me;
	kvp_faa_rlx_u64(&o->again, kvp_cmd_attach(&ring, me));
	for (;;) {
		struct kvp_cmd_cell *c;
		while (kvp_cmd_next(&ring, &c) != KVP_OK) {
			if (kvp_ld_acq_u64(ring_end) == RING_ALL)
				return;
			sleep_on(CONSUMER, no_command, NULL);
		}
		uint64_t p[3], id = c->worker_id;
		char *buf = kvp_cmd_buffer(&ring, c);
		memcpy(p, buf, sizeof(p));
		/* A consumer killed before it published its reply leaves that in the buffer. */
		int replied = c->attempt > 1 && p[0] == mix(id) && p[1] == id;
		if (!replied &&
			(p[0] != id || p[1] < 1 || p[1] > PRODUCERS || p[2] != mix(id & 0xffffffffu) ||
				(unsigned char)buf[sizeof(p) + 63] != (id & 0xff)) &&
			c->attempt == 1)
			kvp_faa_rlx_u64(&o->wrong, 1);
		if (c->attempt == 1 && p[1] >= 1 && p[1] <= PRODUCERS) {
			if (id <= o->last[p[1]])
				kvp_faa_rlx_u64(&o->wrong, 1);
			o->last[p[1]] = id;
		}
		if (id % 64 == 0) /* work that takes a while, so that kills meet it */
			poll(NULL, 0, 1);
		kvp_faa_rlx_u64(&o->executed, 1);
		uint64_t r[2] = {mix(id), id};
		memcpy(buf, r, sizeof(r));
		kvp_cmd_reply(&ring, c, 7, sizeof(r));
	}
}

int main(void)
{
	uint64_t answered = 0;
	ring_mem = shared(kvp_cmdring_footprint(&geom));
	o = shared(sizeof(*o));
	kvp_cmdring_new(ring_mem, &geom);
	uint64_t faults = ring_run(&geom);
	for (uint32_t i = 1; i <= PRODUCERS; i++)
		answered += o->answered[i];
	printf("# %" PRIu64 " answered, %" PRIu64 " executed, %" PRIu64 " taken again\n", answered,
		o->executed, o->again);
	is_u64(o->wrong, 0, "every reply fits its command, commands of a producer are taken in order");
	is_u64(faults, 0, "no faults at any time");
	ok(answered > 0 && o->executed >= answered, "what was answered was executed");
	is_u64(ring_left(), 0, "all cells are free at the end");
	return done();
}
