/* tests/queue_fixture.h — queue, bookings and slots in shared memory for the queue tests. */
#ifndef KVP_TESTS_QUEUE_FIXTURE_H
#define KVP_TESTS_QUEUE_FIXTURE_H

#include "shm/queue.h"
#include "tests/book_fixture.h"
#include "tests/procs.h"

#include <sys/eventfd.h>

struct queue_fixture {
	struct fixture book;
	void *queue_mem, *slot_mem;
	struct kvp_slots slots;
	int wake_fd[16];
};

/* Two open ranks (0, 1, generation 1), slots 1..8 assigned to owners of generation 1. */
__attribute__((unused)) static void queue_fixture_make(struct queue_fixture *x)
{
	fixture_make(&x->book, 4, 256, 8192);
	kvp_rank_open(&x->book.b, 0, 1);
	kvp_rank_open(&x->book.b, 1, 1);
	x->queue_mem = shared(kvp_queue_footprint(&x->book.g));
	x->slot_mem = shared(kvp_slot_footprint(&x->book.g));
	if (kvp_queue_new(x->queue_mem, &x->book.g) || kvp_slot_new(x->slot_mem, &x->book.g) ||
		kvp_slot_join(x->slot_mem, &x->book.g, &x->slots)) {
		printf("Bail out! no objects\n");
		exit(1);
	}
	for (uint32_t i = 0; i < 16; i++)
		x->wake_fd[i] = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	x->slots.wake_fd = x->wake_fd;
	for (uint32_t i = 1; i <= 8; i++)
		kvp_slot_assign(&x->slots, i, KVP_ROLE_HTTPD, i);
}

/* A process's handles: as if it were owner KVP_OWNER(slot, 1). */
struct queue_proc {
	struct kvp_book b;
	struct kvp_queue q;
	struct kvp_slots slots;
};
__attribute__((unused)) static void queue_proc_make(
	struct queue_fixture *x, struct queue_proc *p, uint32_t slot)
{
	kvp_owner o = KVP_OWNER(slot, 1);
	if (kvp_book_join(x->book.mem, &x->book.g, &p->b) ||
		kvp_queue_join(x->queue_mem, &x->book.g, &p->q)) {
		printf("Bail out! no handles\n");
		exit(1);
	}
	p->slots = x->slots;
	p->slots.self = o;
	kvp_book_attach(&p->b, o, NULL);
	kvp_queue_attach(&p->q, o, &p->slots, NULL);
}

/* Posts a record with n words (7 * i + salt) and a claim of id; id NULL: none. */
__attribute__((unused)) static int queue_post(struct queue_proc *p, const char *id, uint32_t n, uint64_t salt,
	struct kvp_queue_entry *e)
{
	uint64_t word[256];
	int rc = id ? kvp_resv_claim(&p->b, p->b.owner, id, strlen(id), &e->resv) : KVP_OK;
	if (rc)
		return rc;
	rc = kvp_queue_begin(&p->q, &e->h);
	for (uint32_t i = 0; i < n && i < 256; i++)
		word[i] = 7 * i + salt;
	rc = rc ? rc : kvp_queue_put(&p->q, e->h, word, n / 3);
	rc = rc ? rc : kvp_queue_put(&p->q, e->h, word + n / 3, n - n / 3);
	rc = rc ? rc : kvp_queue_post(&p->q, e);
	if (rc) {
		kvp_queue_abort(&p->q, e->h);
		if (e->resv)
			kvp_resv_abandon(&p->b, e->resv);
	}
	return rc;
}

/* Takes a record, books its claim on rank 0 with 10 tokens and 5 blocks, answers with n words. */
__attribute__((unused)) static int queue_serve(
	struct queue_proc *p, uint64_t h, uint32_t n, uint64_t salt)
{
	uint64_t resv, word[512], seq[5] = {1, 2, 3, 4, salt};
	int rc = kvp_queue_take(&p->q, &p->b, h, &resv);
	if (rc)
		return rc;
	struct kvp_resv_ask a = {.rank_slot = 0,
		.rank_gen = 1,
		.prefill_tok = 10,
		.seq = seq,
		.seq_cnt = 5,
		.flags = KVP_RESV_TRACK_PREFILL | KVP_RESV_NODE_OWNED};
	if (resv && (rc = kvp_resv_book(&p->b, resv, &a))) {
		kvp_resv_abandon(&p->b, resv);
		resv = 0;
	}
	for (uint32_t i = 0; i < n && i < 512; i++)
		word[i] = 3 * i + salt;
	rc = kvp_queue_finish(&p->q, h, resv, word, n);
	if (rc == KVP_ERR_NOTFOUND && resv)
		kvp_resv_free(&p->b, resv);
	return rc;
}

__attribute__((unused)) static int words_are(const uint64_t *w, uint32_t n, uint64_t step, uint64_t salt)
{
	for (uint32_t i = 0; i < n; i++)
		if (w[i] != step * i + salt)
			return 0;
	return 1;
}
#endif
