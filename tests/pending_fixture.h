/* tests/pending_fixture.h — a pending-selection cache in shared anonymous memory for its tests. */
#ifndef KVP_TESTS_PENDING_FIXTURE_H
#define KVP_TESTS_PENDING_FIXTURE_H

#include "shm/pending.h"
#include <stdlib.h>
#include <sys/mman.h>
#include "tests/procs.h"
#include "tests/tap.h"

#define SEC 1000000000ULL

struct pend {
	struct kvp_geom g;
	void *mem;
	uint64_t bytes;
	struct kvp_pending p;
};

__attribute__((unused)) static void pend_make(struct pend *f, uint32_t max, uint64_t bytes, uint64_t ttl_ns)
{
	f->g = (struct kvp_geom){.slot_max = 8,
		.pending_max = max,
		.pending_bytes = bytes,
		.pending_ttl_ns = ttl_ns,
		.region_gen = 1,
		.salt = {0x1234567890abcdefULL, 0xfedcba0987654321ULL}};
	f->bytes = kvp_pending_footprint(&f->g);
	f->mem = shared(f->bytes);
	if (kvp_pending_new(f->mem, &f->g) || kvp_pending_join(f->mem, &f->g, &f->p)) {
		printf("Bail out! no cache\n");
		exit(1);
	}
	kvp_pending_attach(&f->p, KVP_OWNER(1, 1), NULL);
}

__attribute__((unused)) static void pend_drop(struct pend *f)
{
	kvp_pending_leave(&f->p);
	munmap(f->mem, f->bytes);
}

/* pend_put inserts id with n sequence hashes derived from mark (names of 12 bytes: "model" + "default"). */
__attribute__((unused)) static int pend_put(
	struct kvp_pending *p, const char *id, uint32_t n, uint64_t mark, uint64_t now_ns)
{
	uint64_t *seq = malloc((n ? n : 1) * sizeof(*seq));
	for (uint32_t i = 0; i < n; i++)
		seq[i] = mark * 1000003 + i;
	struct kvp_pending_item it = {.id = id,
		.id_len = (uint32_t)strlen(id),
		.names_len = 12,
		.part = 3,
		.worker_id = mark,
		.dp_rank = (uint32_t)mark & 7,
		.isl_tok = mark + 1,
		.prefill_tok = mark + 2,
		.seq = seq,
		.seq_cnt = n,
		.session = "sess",
		.session_len = mark & 1 ? 4 : 0,
		.flags = mark & 1};
	int rc = kvp_pending_insert(p, &it, now_ns);
	free(seq);
	return rc;
}

/* pend_get: 1 = found and every captured value is that of (n, mark); 0 = not found; -1 = something is
 * wrong. */
__attribute__((unused)) static int pend_get(struct kvp_pending *p, const char *id, uint32_t n, uint64_t mark,
	uint64_t now_ns, struct kvp_pending_hit *out)
{
	struct kvp_pending_hit h;
	char session[KVP_PENDING_SESSION_MAX];
	if (kvp_pending_peek(p, 3, id, strlen(id), now_ns, &h))
		return 0;
	if (out)
		*out = h;
	uint64_t *seq = malloc((h.seq_cnt ? h.seq_cnt : 1) * sizeof(*seq));
	int good = h.seq_cnt == n && h.worker_id == mark && h.dp_rank == (mark & 7) &&
		   h.isl_tok == mark + 1 && h.prefill_tok == mark + 2 && h.flags == (mark & 1) &&
		   h.session_len == (mark & 1 ? 4u : 0u);
	good = good && kvp_pending_lists(p, &h, seq, NULL, session) == KVP_OK;
	for (uint32_t i = 0; i < n && good; i++)
		good = seq[i] == mark * 1000003 + i;
	good = good && (!h.session_len || memcmp(session, "sess", 4) == 0);
	free(seq);
	return good ? 1 : -1;
}
#endif
