#include "shm/pending_priv.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#define SAID_MAX 10

struct check {
	const struct kvp_pending *p;
	struct kvp_txn_try x;
	uint8_t *chunk_seen;
	uint64_t faults;
};

static void fault(struct check *c, const char *what, uint64_t at)
{
	if (c->faults++ < SAID_MAX)
		fprintf(stderr, "pending: %s (%" PRIu64 ")\n", what, at);
}

static uint64_t seen(struct check *c, uint64_t w)
{
	return kvp_txn_get(&c->p->txn, &c->x, w);
}

static void see_chunk(struct check *c, uint64_t at)
{
	if (at == 0 || at > c->p->chunk_cnt)
		fault(c, "chunk number out of range", at);
	else if (c->chunk_seen[at]++)
		fault(c, "chunk in two places", at);
}

/* chunks_of follows the list of an entry; a taken one may not be linked yet. */
static void chunks_of(struct check *c, uint64_t e, enum state state)
{
	uint64_t old = seen(c, w_entry(c->p, e, E_CHUNK)), fresh = seen(c, w_entry(c->p, e, E_FRESH));
	uint64_t n = seen(c, w_entry(c->p, e, E_CNT)), at = HI32(old) ? HI32(old) : HI32(fresh);
	if (state == S_TAKEN) {
		for (uint32_t i = 0; i < LO32(fresh); i++)
			see_chunk(c, (uint64_t)HI32(fresh) + i);
		n -= LO32(fresh);
		at = HI32(old);
	}
	for (uint64_t i = 0; i < n && !c->x.torn; i++) {
		see_chunk(c, at);
		if (at == 0 || at > c->p->chunk_cnt)
			break;
		at = seen(c, w_chunk(c->p, at));
	}
}

static int in_bucket(struct check *c, uint64_t e)
{
	uint64_t key = kvp_ld_acq_u64(&body_of(c->p, e)[B_KEY_LO]);
	uint64_t at = seen(c, w_bucket((key >> 8) & (c->p->bucket_cnt - 1)));
	for (uint32_t i = 0; at && at <= c->p->entry_cap && i <= c->p->entry_cap; i++) {
		if (at == e)
			return 1;
		at = seen(c, w_entry(c->p, at, E_LINK));
	}
	return 0;
}

static void check_order(struct check *c)
{
	uint64_t ends = seen(c, G_ENDS), e = HI32(ends), last = 0, time = 0, n = 0, bytes = 0;
	for (; e && !c->x.torn; n++) {
		if (e > c->p->entry_cap || n > c->p->entry_cap) {
			fault(c, "order list leads nowhere", e);
			return;
		}
		uint64_t nbr = seen(c, w_entry(c->p, e, E_NBR)), t = seen(c, w_entry(c->p, e, E_TIME));
		if (HI32(nbr) != last)
			fault(c, "older neighbour is another", e);
		if (t < time)
			fault(c, "older than the one before it", e);
		if (seen(c, w_entry(c->p, e, E_STATE)) != S_LIVE)
			fault(c, "entry in the order list is not live", e);
		if (!in_bucket(c, e))
			fault(c, "entry is not in its bucket", e);
		bytes += kvp_ld_acq_u64(&body_of(c->p, e)[B_BYTES]);
		last = e;
		time = t;
		e = LO32(nbr);
	}
	if (last != LO32(ends))
		fault(c, "newest entry is another", last);
	if (n != seen(c, G_CNT) || n > c->p->max)
		fault(c, "count of live entries", n);
	if (bytes != seen(c, G_BYTES) || (c->p->max && bytes > c->p->bytes_max))
		fault(c, "bytes of live entries", bytes);
}

static void check_entries(struct check *c)
{
	uint64_t used = seen(c, G_BUMP), free_cnt = 0, live = 0, taken = 0;
	if (used > c->p->entry_cap) {
		fault(c, "entries used", used);
		return;
	}
	for (uint64_t e = 1; e <= used; e++) {
		enum state s = (enum state)(seen(c, w_entry(c->p, e, E_STATE)) & 0xff);
		live += s == S_LIVE;
		taken += s == S_TAKEN;
		if (s != S_FREE)
			chunks_of(c, e, s);
	}
	for (uint64_t e = seen(c, G_FREE); e && e <= used && free_cnt <= used; free_cnt++)
		e = seen(c, w_entry(c->p, e, E_LINK));
	if (free_cnt + live + taken != used)
		fault(c, "free, taken and live entries are not all", used);
	if (live != seen(c, G_CNT))
		fault(c, "live entries outside the order list", live);
}

static void check_chunks(struct check *c)
{
	uint64_t n = seen(c, G_CHUNK_CNT), used = seen(c, G_CHUNK_BUMP), at = seen(c, G_CHUNK_FREE);
	for (uint64_t i = 0; i < n && at && at <= c->p->chunk_cnt; i++) {
		see_chunk(c, at);
		at = seen(c, w_chunk(c->p, at));
	}
	for (uint64_t i = 1; i <= c->p->chunk_cnt; i++)
		if (c->chunk_seen[i] != (i <= used))
			fault(c, "chunk is nowhere, or used before its time", i);
}

uint64_t kvp_pending_check(const struct kvp_pending *p)
{
	struct check c = {.p = p};
	uint64_t faults = kvp_txn_check(&p->txn);
	if (kvp_txn_look(&p->txn, &c.x))
		return faults;
	c.chunk_seen = calloc((size_t)p->chunk_cnt + 1, 1);
	if (!c.chunk_seen)
		return faults + 1;
	check_order(&c);
	check_entries(&c);
	check_chunks(&c);
	free(c.chunk_seen);
	return faults + c.faults + (c.x.torn != 0);
}

void kvp_pending_stat(const struct kvp_pending *p, struct kvp_pending_stat *out)
{
	struct kvp_txn_try x;
	*out = (struct kvp_pending_stat){0, 0, 0};
	for (int i = 0; i < 1000; i++) {
		if (kvp_txn_look(&p->txn, &x))
			continue;
		out->entries = kvp_txn_get(&p->txn, &x, G_CNT);
		out->bytes = kvp_txn_get(&p->txn, &x, G_BYTES);
		if (!x.torn)
			break;
	}
	uint64_t used = kvp_ld_acq_u64(&p->txn.word[G_BUMP].lo);
	for (uint64_t e = 1; e <= used && e <= p->entry_cap; e++)
		out->taken += (kvp_ld_acq_u64(&p->txn.word[w_entry(p, e, E_STATE)].lo) & 0xff) == S_TAKEN;
}
