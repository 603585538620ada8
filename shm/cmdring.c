#include "shm/cmdring.h"

#include <kvpick/point.h>
#include <stdio.h>
#include <string.h>

#define MAGIC 0x31474e49524443ULL /* "CDRING1" */
#define LAYOUT 1

enum { FREE, CLAIMED, POSTED, TAKEN, DONE };

/* State word: owner in the upper half; a use count of 24 bits, so that a cell that was freed and claimed
 * again in between never passes for the old one; the state in the low byte. */
#define STATE(w) ((unsigned)((w)&0xffu))
#define OWNER(w) ((kvp_owner)((w) >> 32))
#define USE(w) (((w) >> 8) & 0xffffffu)
#define WORD(owner, use, state) (((uint64_t)(owner) << 32) | (((use) & 0xffffffULL) << 8) | (state))
#define WITH_STATE(w, state) (((w) & ~0xffULL) | (state))
#define NEXT_FREE(w) WORD(0, USE(w) + 1, FREE)

struct kvp_cmdring_shm {
	struct kvp_objhdr hdr;
	uint64_t pad0[8];
	uint64_t ticket; /* next ticket, from 1; producers fetch-add */
	uint64_t pad1[15];
	uint32_t bell; /* 1 = there may be a posted command; producers set, the consumer clears */
	uint32_t pad2[31];
	uint32_t consumer; /* kvp_owner of the consumer, 0 = none yet */
	uint32_t pad3[31];
	struct kvp_cmd_cell cell[KVP_CMD_CELLS];
};
#define BUF_OFF kvp_align_up(sizeof(struct kvp_cmdring_shm), KVP_PAGE)

static uint32_t layout_hash(void)
{
	const size_t w[] = {sizeof(struct kvp_cmdring_shm), sizeof(struct kvp_cmd_cell),
		offsetof(struct kvp_cmd_cell, arg), offsetof(struct kvp_cmd_cell, status), KVP_CMD_CELLS,
		KVP_CMD_PAYLOAD_MAX};
	return kvp_obj_hash(w, sizeof(w) / sizeof(w[0]));
}

uint64_t kvp_cmdring_align(void)
{
	return KVP_PAGE;
}

uint64_t kvp_cmdring_footprint(const struct kvp_geom *g)
{
	return g ? BUF_OFF + (uint64_t)KVP_CMD_CELLS * KVP_CMD_PAYLOAD_MAX : 0;
}

int kvp_cmdring_new(void *mem, const struct kvp_geom *g)
{
	uint64_t fp = kvp_cmdring_footprint(g);
	if (!mem || ((uintptr_t)mem & (KVP_PAGE - 1)) || !fp)
		return KVP_ERR_INVAL;
	kvp_obj_begin(mem, LAYOUT, layout_hash(), fp, g->region_gen);
	struct kvp_cmdring_shm *s = mem;
	s->ticket = 1;
	kvp_obj_ready(mem, MAGIC);
	return KVP_OK;
}

int kvp_cmdring_join(void *mem, const struct kvp_geom *g, struct kvp_cmdring *out)
{
	int rc = kvp_obj_join(mem, MAGIC, LAYOUT, layout_hash());
	if (rc)
		return rc;
	struct kvp_cmdring_shm *s = mem;
	if (s->hdr.footprint != kvp_cmdring_footprint(g))
		return KVP_ERR_LAYOUT;
	out->shm = s;
	out->slots = NULL;
	return KVP_OK;
}

void kvp_cmdring_leave(struct kvp_cmdring *r)
{
	r->shm = NULL;
	r->slots = NULL;
}

int kvp_cmdring_delete(void *mem)
{
	kvp_obj_delete(mem);
	return KVP_OK;
}

static uint32_t index_of(const struct kvp_cmdring *r, const struct kvp_cmd_cell *c)
{
	uint32_t i = (uint32_t)(c - r->shm->cell);
	KVP_ASSERT(i < KVP_CMD_CELLS);
	return i;
}

void *kvp_cmd_buffer(const struct kvp_cmdring *r, const struct kvp_cmd_cell *c)
{
	return (char *)r->shm + BUF_OFF + (uint64_t)index_of(r, c) * KVP_CMD_PAYLOAD_MAX;
}

static void wake(struct kvp_cmdring *r, kvp_owner who)
{
	if (r->slots && who)
		kvp_slot_wake(r->slots, KVP_OWNER_SLOT(who));
}

static void ring_bell(struct kvp_cmdring *r)
{
	kvp_st_rel_u32(&r->shm->bell, 1); /* after the cell's POSTED; pairs with: kvp_cmd_next */
	wake(r, kvp_ld_acq_u32(&r->shm->consumer));
}

/* claim takes cell i if it is free. */
static int claim(struct kvp_cmdring *r, kvp_owner owner, uint32_t i, struct kvp_cmd_cell **c, void **payload)
{
	struct kvp_cmd_cell *p = &r->shm->cell[i];
	uint64_t w = kvp_ld_acq_u64(&p->word); /* pairs with: every change to FREE */
	if (STATE(w) != FREE || !kvp_cas_ar_u64(&p->word, w, WORD(owner, USE(w), CLAIMED)))
		return 0;
	KVP_POINT("cmdring:claimed");
	p->worker_id = 0;
	memset(p->arg, 0, sizeof(p->arg));
	kvp_st_rlx_u32(&p->type, KVP_CMD_NONE);
	kvp_st_rlx_u32(&p->len, 0);
	p->attempt = 0;
	p->status = KVP_ERR_AGAIN;
	kvp_st_rlx_u32(&p->reply_len, 0);
	*c = p;
	*payload = kvp_cmd_buffer(r, p);
	return 1;
}

int kvp_cmd_begin(struct kvp_cmdring *r, kvp_owner owner, struct kvp_cmd_cell **c, void **payload)
{
	KVP_ASSERT(owner != 0);
	for (uint32_t i = 0; i < KVP_CMD_CELLS; i++)
		if (claim(r, owner, i, c, payload))
			return KVP_OK;
	return KVP_ERR_FULL;
}

int kvp_cmd_begin_spare(struct kvp_cmdring *r, kvp_owner owner, struct kvp_cmd_cell **c, void **payload)
{
	uint32_t cnt = KVP_CMD_CELLS - KVP_CMD_RESERVED;
	uint32_t at = (uint32_t)kvp_ld_rlx_u64(&r->shm->ticket) % cnt; /* likely the one used longest ago */
	KVP_ASSERT(owner != 0);
	for (uint32_t i = 0; i < cnt; i++, at = at + 1 < cnt ? at + 1 : 0)
		if (claim(r, owner, KVP_CMD_RESERVED + at, c, payload))
			return KVP_OK;
	return KVP_ERR_FULL;
}

/* post publishes; owner 0: nobody reads the reply. */
static int post(
	struct kvp_cmdring *r, struct kvp_cmd_cell *c, enum kvp_cmd_type type, uint32_t len, kvp_owner owner)
{
	uint64_t w = kvp_ld_acq_u64(&c->word);
	if (len > KVP_CMD_PAYLOAD_MAX || type <= KVP_CMD_NONE || type >= KVP_CMD_TYPE_CNT ||
		STATE(w) != CLAIMED)
		return KVP_ERR_INVAL;
	kvp_st_rlx_u32(&c->type, (uint32_t)type); /* atomic: kvp_cmdring_check looks at any time */
	kvp_st_rlx_u32(&c->len, len);
	kvp_st_rlx_u64(&c->ticket, kvp_faa_ar_u64(&r->shm->ticket, 1));
	KVP_POINT("cmdring:ticket");
	if (!kvp_cas_ar_u64(&c->word, w, WORD(owner, USE(w), POSTED))) /* pairs with: kvp_cmd_next */
		return KVP_ERR_FENCED;
	KVP_POINT("cmdring:posted");
	ring_bell(r);
	return KVP_OK;
}

int kvp_cmd_post(struct kvp_cmdring *r, struct kvp_cmd_cell *c, enum kvp_cmd_type type, uint32_t len)
{
	return post(r, c, type, len, OWNER(kvp_ld_acq_u64(&c->word)));
}

int kvp_cmd_post_away(struct kvp_cmdring *r, struct kvp_cmd_cell *c, enum kvp_cmd_type type, uint32_t len)
{
	return post(r, c, type, len, 0);
}

int kvp_cmd_done(const struct kvp_cmdring *r, const struct kvp_cmd_cell *c)
{
	(void)index_of(r, c);
	return STATE(kvp_ld_acq_u64(&c->word)) == DONE; /* pairs with: kvp_cmd_reply */
}

int kvp_cmd_end(struct kvp_cmdring *r, struct kvp_cmd_cell *c)
{
	(void)index_of(r, c);
	for (;;) { /* ends: every failed exchange is a step of the consumer, and a cell has few of them */
		uint64_t w = kvp_ld_acq_u64(&c->word);
		if (STATE(w) == TAKEN) {
			if (kvp_cas_ar_u64(&c->word, w, WORD(0, USE(w), TAKEN)))
				return 0;
		} else if (STATE(w) == FREE || kvp_cas_ar_u64(&c->word, w, NEXT_FREE(w))) {
			return 1;
		}
	}
}

uint32_t kvp_cmd_attach(struct kvp_cmdring *r, kvp_owner owner)
{
	uint32_t again = 0;
	for (uint32_t i = 0; i < KVP_CMD_CELLS; i++) {
		struct kvp_cmd_cell *p = &r->shm->cell[i];
		uint64_t w = kvp_ld_acq_u64(&p->word);
		/* Fails only when the producer gives up at this moment (owner -> 0): then look again. */
		while (STATE(w) == TAKEN && !kvp_cas_ar_u64(&p->word, w, WITH_STATE(w, POSTED)))
			w = kvp_ld_acq_u64(&p->word);
		again += STATE(w) == TAKEN;
	}
	kvp_st_rel_u32(&r->shm->consumer, owner);
	kvp_st_rel_u32(&r->shm->bell, 1);
	return again;
}

static int fits(const struct kvp_cmd_cell *p)
{
	uint32_t type = kvp_ld_rlx_u32(&p->type);
	return type > KVP_CMD_NONE && type < KVP_CMD_TYPE_CNT &&
	       kvp_ld_rlx_u32(&p->len) <= KVP_CMD_PAYLOAD_MAX;
}

int kvp_cmd_next(struct kvp_cmdring *r, struct kvp_cmd_cell **c)
{
	if (!kvp_ld_rlx_u32(&r->shm->bell))
		return KVP_ERR_NOTFOUND;
	kvp_xchg_sc_u32(
		&r->shm->bell, 0); /* before the scan: a later post rings again; pairs with: ring_bell */
	for (uint32_t tries = 0; tries <= KVP_CMD_CELLS; tries++) {
		struct kvp_cmd_cell *best = NULL;
		uint64_t best_ticket = 0, best_word = 0;
		for (uint32_t i = 0; i < KVP_CMD_CELLS; i++) {
			struct kvp_cmd_cell *p = &r->shm->cell[i];
			uint64_t w = kvp_ld_acq_u64(&p->word); /* pairs with: kvp_cmd_post */
			uint64_t t = kvp_ld_rlx_u64(&p->ticket);
			if (STATE(w) == POSTED && (!best || t < best_ticket)) {
				best = p;
				best_ticket = t;
				best_word = w;
			}
		}
		if (!best)
			return KVP_ERR_NOTFOUND;
		/* Fails when the producer withdrew it or the sweep took its owner away: look again. */
		if (!kvp_cas_ar_u64(&best->word, best_word, WITH_STATE(best_word, TAKEN)))
			continue;
		KVP_POINT("cmdring:taken");
		best->attempt++;
		if (!fits(best)) {
			kvp_cmd_reply(r, best, KVP_ERR_INVAL, 0);
			continue;
		}
		kvp_st_rel_u32(&r->shm->bell, 1); /* there may be more */
		*c = best;
		return KVP_OK;
	}
	kvp_st_rel_u32(&r->shm->bell, 1);
	return KVP_ERR_NOTFOUND;
}

int kvp_cmd_reply(struct kvp_cmdring *r, struct kvp_cmd_cell *c, int status, uint32_t len)
{
	if (len > KVP_CMD_PAYLOAD_MAX)
		return KVP_ERR_INVAL;
	c->status = status;
	kvp_st_rlx_u32(&c->reply_len, len);
	uint64_t w = kvp_ld_acq_u64(&c->word);
	KVP_ASSERT(STATE(w) == TAKEN);
	/* One retry suffices: the only change others make to a taken cell is owner -> 0. */
	while (!kvp_cas_ar_u64(&c->word, w, OWNER(w) ? WITH_STATE(w, DONE) : NEXT_FREE(w)))
		w = kvp_ld_acq_u64(&c->word);
	KVP_POINT("cmdring:replied");
	wake(r, OWNER(w));
	return KVP_OK;
}

uint32_t kvp_cmd_sweep_owner(struct kvp_cmdring *r, kvp_owner dead)
{
	uint32_t n = 0;
	for (uint32_t i = 0; dead && i < KVP_CMD_CELLS; i++) {
		struct kvp_cmd_cell *p = &r->shm->cell[i];
		uint64_t w = kvp_ld_acq_u64(&p->word);
		while (OWNER(w) == dead && STATE(w) != FREE) {
			int keep = STATE(w) == POSTED || STATE(w) == TAKEN;
			if (kvp_cas_ar_u64(&p->word, w, keep ? WORD(0, USE(w), STATE(w)) : NEXT_FREE(w))) {
				n++;
				break;
			}
			w = kvp_ld_acq_u64(&p->word); /* the consumer took or answered it meanwhile */
		}
	}
	/* The dead producer may have posted without ringing. */
	ring_bell(r);
	return n;
}

void kvp_cmd_count(const struct kvp_cmdring *r, uint32_t cnt[KVP_CMD_STATES])
{
	memset(cnt, 0, KVP_CMD_STATES * sizeof(cnt[0]));
	for (uint32_t i = 0; i < KVP_CMD_CELLS; i++) {
		unsigned st = STATE(kvp_ld_rlx_u64(&r->shm->cell[i].word));
		if (st < KVP_CMD_STATES)
			cnt[st]++;
	}
}

static const char *cell_fault(const struct kvp_cmdring *r, const struct kvp_cmd_cell *p, uint64_t w)
{
	unsigned st = STATE(w);
	if (st > DONE)
		return "state out of range";
	if (st == FREE)
		return OWNER(w) ? "free cell has an owner" : NULL;
	if ((st == CLAIMED || st == DONE) && !OWNER(w))
		return "cell without an owner";
	if (OWNER(w) && r->slots && KVP_OWNER_SLOT(OWNER(w)) >= r->slots->slot_max)
		return "owner's slot out of range";
	if (st == CLAIMED)
		return NULL;
	if (!fits(p))
		return "type or length out of range";
	uint64_t t = kvp_ld_rlx_u64(&p->ticket);
	if (t == 0 || t >= kvp_ld_acq_u64(&r->shm->ticket))
		return "ticket never given out";
	if (st == DONE && kvp_ld_rlx_u32(&p->reply_len) > KVP_CMD_PAYLOAD_MAX)
		return "reply length out of range";
	return NULL;
}

uint64_t kvp_cmdring_check(const struct kvp_cmdring *r)
{
	uint64_t faults = 0;
	if (!r->shm || kvp_ld_acq_u64(&r->shm->hdr.magic) != MAGIC)
		return 1;
	for (uint32_t i = 0; i < KVP_CMD_CELLS; i++) {
		const struct kvp_cmd_cell *p = &r->shm->cell[i];
		for (int tries = 0; tries < 100; tries++) {
			uint64_t w = kvp_ld_acq_u64(&p->word);
			const char *what = cell_fault(r, p, w);
			if (what && kvp_ld_sc_u64(&p->word) != w)
				continue; /* it changed under us */
			if (what && faults++ < 10)
				fprintf(stderr, "cmdring.check: cell %u: %s\n", i, what);
			break;
		}
	}
	return faults;
}
