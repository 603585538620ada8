/* Command ring: states, order, full ring, dead producers, dead consumer. */
#include "shm/cmdring.h"
#include "tests/procs.h"
#include "tests/tap.h"
#include <stdlib.h>
#include <sys/eventfd.h>
#include <unistd.h>

_Static_assert(sizeof(struct kvp_cmd_cell) == 128, "cell size");

static struct kvp_geom geom = {.slot_max = 8, .region_gen = 1};
#define P1 KVP_OWNER(3, 1)
#define P2 KVP_OWNER(4, 1)
#define CONS KVP_OWNER(1, 1)

static void fresh(struct kvp_cmdring *r)
{
	void *mem = shared(kvp_cmdring_footprint(&geom));
	ok(kvp_cmdring_join(mem, &geom, r) == KVP_ERR_AGAIN, "join before new answers AGAIN");
	ok(kvp_cmdring_new((char *)mem + 64, &geom) == KVP_ERR_INVAL, "new refuses misaligned memory");
	ok(kvp_cmdring_new(mem, &geom) == KVP_OK && kvp_cmdring_join(mem, &geom, r) == KVP_OK,
		"new and join");
}

static struct kvp_cmd_cell *post(struct kvp_cmdring *r, kvp_owner o, const char *text)
{
	struct kvp_cmd_cell *c = NULL;
	void *p = NULL;
	if (kvp_cmd_begin(r, o, &c, &p) != KVP_OK)
		return NULL;
	memcpy(p, text, strlen(text));
	return kvp_cmd_post(r, c, KVP_CMD_PING, (uint32_t)strlen(text)) == KVP_OK ? c : NULL;
}

static int takes(struct kvp_cmdring *r, struct kvp_cmd_cell **c, const char *text)
{
	return kvp_cmd_next(r, c) == KVP_OK && (*c)->len == strlen(text) &&
	       memcmp(kvp_cmd_buffer(r, *c), text, (*c)->len) == 0;
}

static void round_trip(void)
{
	struct kvp_cmdring r;
	struct kvp_cmd_cell *c, *t;
	void *p;
	fresh(&r);
	ok(kvp_cmd_next(&r, &t) == KVP_ERR_NOTFOUND, "an empty ring has no command");
	ok(kvp_cmd_begin(&r, P1, &c, &p) == KVP_OK && p == kvp_cmd_buffer(&r, c),
		"begin gives cell and buffer");
	c->worker_id = 77;
	ok(kvp_cmd_next(&r, &t) == KVP_ERR_NOTFOUND, "a claimed cell is not a command");
	ok(kvp_cmd_post(&r, c, KVP_CMD_WORKER_PATCH, KVP_CMD_PAYLOAD_MAX + 1) == KVP_ERR_INVAL,
		"too long a payload");
	ok(kvp_cmd_post(&r, c, KVP_CMD_TYPE_CNT, 0) == KVP_ERR_INVAL, "unknown type");
	memset(p, 'z', KVP_CMD_PAYLOAD_MAX);
	ok(kvp_cmd_post(&r, c, KVP_CMD_WORKER_PATCH, KVP_CMD_PAYLOAD_MAX) == KVP_OK,
		"the longest payload is posted");
	ok(kvp_cmd_post(&r, c, KVP_CMD_PING, 0) == KVP_ERR_INVAL, "a posted cell is not posted twice");
	ok(!kvp_cmd_done(&r, c), "no reply yet");
	ok(kvp_cmd_next(&r, &t) == KVP_OK && t == c && t->worker_id == 77 && t->attempt == 1,
		"the consumer takes it");
	ok(kvp_cmd_next(&r, &t) == KVP_ERR_NOTFOUND, "only once");
	ok(kvp_cmd_reply(&r, c, -9, KVP_CMD_PAYLOAD_MAX + 1) == KVP_ERR_INVAL, "too long a reply");
	memcpy(kvp_cmd_buffer(&r, c), "yes", 3);
	ok(kvp_cmd_reply(&r, c, -9, 3) == KVP_OK, "reply");
	ok(kvp_cmd_done(&r, c) && c->status == -9 && c->reply_len == 3 && memcmp(p, "yes", 3) == 0,
		"it is there");
	is_u64(kvp_cmdring_check(&r), 0, "no faults");
	ok(kvp_cmd_end(&r, c) == 1, "end");
	uint32_t n[KVP_CMD_STATES];
	kvp_cmd_count(&r, n);
	is_u64(n[0], KVP_CMD_CELLS, "all cells are free");
}

static void order(void)
{
	struct kvp_cmdring r;
	struct kvp_cmd_cell *first, *c, *d, *t = NULL;
	void *p;
	fresh(&r);
	kvp_cmd_begin(&r, P1, &first, &p);
	post(&r, P2, "a");
	post(&r, P1, "b");
	memcpy(p, "c", 1);
	kvp_cmd_post(&r, first, KVP_CMD_PING, 1);
	ok(takes(&r, &t, "a"), "commands come in the order of their posts, not of their cells: a");
	kvp_cmd_reply(&r, t, 0, 0);
	ok(takes(&r, &t, "b"), "then b");
	c = t;
	ok(takes(&r, &t, "c"), "then c");
	d = t;
	is_u64(kvp_cmd_attach(&r, CONS), 2, "a new consumer finds two taken commands");
	ok(takes(&r, &t, "b") && t == c && t->attempt == 2,
		"and gets the older one again first, as a second attempt");
	ok(takes(&r, &t, "c") && t == d && t->attempt == 2, "then the other");
	is_u64(kvp_cmdring_check(&r), 0, "no faults");
}

static void full_ring(void)
{
	struct kvp_cmdring r;
	struct kvp_cmd_cell *c, *t;
	void *p;
	fresh(&r);
	uint32_t n = 0;
	while (post(&r, P1, "x"))
		n++;
	is_u64(n, KVP_CMD_CELLS, "every cell can be used");
	ok(kvp_cmd_begin(&r, P2, &c, &p) == KVP_ERR_FULL, "then the ring is full");
	ok(takes(&r, &t, "x") && kvp_cmd_reply(&r, t, 0, 0) == KVP_OK && kvp_cmd_end(&r, t) == 1,
		"one is served");
	ok(kvp_cmd_begin(&r, P2, &c, &p) == KVP_OK, "and there is room again");
	for (n = 0; kvp_cmd_next(&r, &t) == KVP_OK; n++)
		kvp_cmd_reply(&r, t, 0, 0);
	is_u64(n, KVP_CMD_CELLS - 1, "all others are served");
	is_u64(kvp_cmd_sweep_owner(&r, P1), KVP_CMD_CELLS - 1,
		"a sweep frees the answered cells of a dead producer");
	is_u64(kvp_cmd_sweep_owner(&r, P2), 1, "and the claimed one of another");
}

/* Commands that nobody waits for. */
static void away(void)
{
	struct kvp_cmdring r;
	struct kvp_cmd_cell *c, *t;
	void *p;
	uint32_t n, cnt[KVP_CMD_STATES];
	fresh(&r);
	for (n = 0; kvp_cmd_begin_spare(&r, P1, &c, &p) == KVP_OK; n++) {
		memcpy(p, &n, sizeof(n));
		if (kvp_cmd_post_away(&r, c, KVP_CMD_ROUTED, sizeof(n)))
			break;
	}
	is_u64(n, KVP_CMD_CELLS - KVP_CMD_RESERVED, "commands that nobody waits for use no reserved cell");
	is_u64(kvp_cmdring_check(&r), 0, "no faults");
	is_u64(kvp_cmd_sweep_owner(&r, P1), 0, "they are nobody's once posted");
	ok(post(&r, P2, "x") != NULL, "others find room");
	uint32_t wrong = 0;
	for (uint32_t i = 0; i < n; i++) {
		uint32_t got = UINT32_MAX;
		if (kvp_cmd_next(&r, &t) == KVP_OK)
			memcpy(&got, kvp_cmd_buffer(&r, t), sizeof(got));
		wrong += got != i || kvp_cmd_reply(&r, t, 0, 0) != KVP_OK;
	}
	is_u64(wrong, 0, "they are taken in their order");
	ok(takes(&r, &t, "x"), "and the one that was posted later after them");
	kvp_cmd_count(&r, cnt);
	is_u64(cnt[0], KVP_CMD_CELLS - 1, "their cells are free at once");
	ok(kvp_cmd_begin_spare(&r, P1, &c, &p) == KVP_OK && kvp_cmd_sweep_owner(&r, P1) == 1,
		"one that was only claimed is the sweep's");
	is_u64(kvp_cmdring_check(&r), 0, "no faults");
}

static void giving_up(void)
{
	struct kvp_cmdring r;
	struct kvp_cmd_cell *c, *t;
	uint32_t n[KVP_CMD_STATES];
	fresh(&r);
	c = post(&r, P1, "a");
	ok(kvp_cmd_end(&r, c) == 1 && kvp_cmd_next(&r, &t) == KVP_ERR_NOTFOUND,
		"a withdrawn command is not executed");
	c = post(&r, P1, "b");
	ok(takes(&r, &t, "b") && kvp_cmd_end(&r, c) == 0, "a taken one cannot be withdrawn");
	is_u64(kvp_cmdring_check(&r), 0, "no faults meanwhile");
	ok(kvp_cmd_reply(&r, t, 0, 0) == KVP_OK, "its reply goes nowhere");
	kvp_cmd_count(&r, n);
	is_u64(n[0], KVP_CMD_CELLS, "and frees the cell");
}

static void dead_producer(void)
{
	struct kvp_cmdring r;
	struct kvp_cmd_cell *c, *t;
	void *p;
	uint32_t n[KVP_CMD_STATES];
	fresh(&r);
	kvp_cmd_begin(&r, P1, &c, &p);
	post(&r, P1, "posted");
	post(&r, P1, "taken");
	post(&r, P2, "other");
	ok(takes(&r, &c, "posted"), "one command is taken");
	is_u64(kvp_cmd_sweep_owner(&r, P1), 3, "the sweep handles three cells");
	kvp_cmd_count(&r, n);
	ok(n[0] == KVP_CMD_CELLS - 3 && n[2] == 2 && n[3] == 1, "only the claimed one is free at once");
	is_u64(kvp_cmdring_check(&r), 0, "no faults meanwhile");
	kvp_cmd_reply(&r, c, 0, 0);
	ok(takes(&r, &t, "taken") && kvp_cmd_reply(&r, t, 0, 0) == KVP_OK,
		"the posted one is still executed");
	ok(takes(&r, &t, "other") && kvp_cmd_reply(&r, t, 0, 0) == KVP_OK,
		"and so is that of the living one");
	kvp_cmd_count(&r, n);
	ok(n[0] == KVP_CMD_CELLS - 1 && n[4] == 1,
		"the dead one's cells are free, the living one's reply waits");
}

static void garbage(void)
{
	struct kvp_cmdring r;
	struct kvp_cmd_cell *c, *t;
	fresh(&r);
	c = post(&r, P1, "a");
	c->len = KVP_CMD_PAYLOAD_MAX + 5;
	ok(kvp_cmdring_check(&r) == 1, "check sees an impossible length");
	ok(kvp_cmd_next(&r, &t) == KVP_ERR_NOTFOUND, "the consumer never sees it");
	ok(kvp_cmd_done(&r, c) && c->status == KVP_ERR_INVAL, "it is answered with INVAL");
}

static void doorbells(void)
{
	struct kvp_cmdring r;
	struct kvp_slots s;
	struct kvp_cmd_cell *t;
	int fd[8];
	uint64_t v;
	void *mem = aligned_alloc(4096, kvp_align_up(kvp_slot_footprint(&geom), 4096));
	memset(mem, 0, kvp_align_up(kvp_slot_footprint(&geom), 4096));
	fresh(&r);
	kvp_slot_new(mem, &geom);
	kvp_slot_join(mem, &geom, &s);
	for (int i = 0; i < 8; i++)
		fd[i] = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
	s.wake_fd = fd;
	r.slots = &s;
	kvp_cmd_attach(&r, CONS);
	s.self = CONS;
	kvp_slot_sleep(&s);
	struct kvp_cmd_cell *c = post(&r, P1, "a");
	ok(read(fd[1], &v, 8) == 8, "a post wakes a sleeping consumer");
	post(&r, P1, "b");
	ok(read(fd[1], &v, 8) < 0, "once");
	s.self = P1;
	kvp_slot_sleep(&s);
	ok(takes(&r, &t, "a") && t == c, "the command is there");
	kvp_cmd_reply(&r, t, 0, 0);
	ok(read(fd[3], &v, 8) == 8, "a reply wakes a sleeping producer");
	for (int i = 0; i < 8; i++)
		close(fd[i]);
	free(mem);
}

int main(void)
{
	round_trip();
	order();
	full_ring();
	away();
	giving_up();
	dead_producer();
	garbage();
	doorbells();
	return done();
}
