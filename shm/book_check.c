#include "shm/book_priv.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

/* The expected table of active blocks: key -> entry that holds it. */
struct expect {
	uint64_t key;
	uint32_t at;
};
/* Entries that live bookings hold: place + 1 -> their number. */
struct held {
	uint32_t place, cnt;
};

struct checker {
	struct kvp_book *b;
	struct expect *tab;
	struct held *held;
	uint64_t mask, faults;
	uint64_t *tok, *req, *blk;
};

__attribute__((format(printf, 2, 3))) static void fault(struct checker *c, const char *fmt, ...)
{
	if (c->faults++ >= 10)
		return;
	va_list ap;
	va_start(ap, fmt);
	fputs("book check: ", stderr);
	vfprintf(stderr, fmt, ap);
	fputc('\n', stderr);
	va_end(ap);
}

static struct held *held_at(struct checker *c, uint32_t at)
{
	uint64_t i = at * 0x9e3779b97f4a7c15ULL >> 32 & c->mask;
	while (c->held[i].place && c->held[i].place != at + 1)
		i = (i + 1) & c->mask;
	return &c->held[i];
}

/* A block is in one entry only. */
static void expect_key(struct checker *c, uint64_t key, uint32_t at, uint32_t rank)
{
	uint64_t i = key & c->mask;
	while (c->tab[i].key && c->tab[i].key != key)
		i = (i + 1) & c->mask;
	if (c->tab[i].key && c->tab[i].at != at)
		fault(c, "rank %" PRIu32 ": block %016" PRIx64 " is there twice", rank, key);
	c->tab[i] = (struct expect){key, at};
}

static void check_group(struct checker *c, struct book_dom dom, const uint64_t *h, uint32_t n, uint32_t rank)
{
	struct book_chain chain;
	if (!book_cover(c->b, dom, h, n, &chain)) {
		fault(c, "rank %" PRIu32 ": blocks %016" PRIx64 ".. of a live booking are missing", rank,
			h[0]);
		return;
	}
	for (uint32_t i = 0; i < chain.cnt; i++) {
		const struct book_link *l = &chain.link[i];
		struct held *held = held_at(c, l->at);
		if (held->place == 0) {
			held->place = l->at + 1;
			c->blk[rank] += l->len * l->weight;
		}
		held->cnt++;
		for (uint32_t k = 0; k < l->len; k++)
			expect_key(c, book_key(dom, h[l->pos + k]), l->at, rank);
	}
}

static void check_keys(struct checker *c, uint32_t idx, uint32_t rank, uint64_t h)
{
	struct kvp_book *b = c->b;
	struct book_dom dom = book_dom(b, rank, CTL_EPOCH(book_ctl(b, rank)));
	uint32_t left = b->resv[idx].seq_cnt, chunk = b->resv[idx].chunk_first;
	while (left) {
		if (chunk == 0 || chunk >= b->chunk_cnt || b->chunk[chunk].owner != h) {
			fault(c, "reservation %" PRIu32 ": broken chain of chunks, %" PRIu32 " keys left",
				idx, left);
			return;
		}
		const uint64_t *key = &b->key[(uint64_t)chunk * CHUNK_KEYS];
		for (uint32_t i = 0; i < CHUNK_KEYS && left; i += KVP_ACTIVE_RUN) {
			uint32_t n = left < KVP_ACTIVE_RUN ? left : KVP_ACTIVE_RUN;
			check_group(c, dom, &key[i], n, rank);
			left -= n;
		}
		chunk = b->chunk[chunk].next;
	}
}

/* No second entry of the same id within reach of the first. */
static void check_id(struct checker *c, uint32_t idx)
{
	for (uint32_t i = 1; i < KVP_RESV_WINDOW; i++) {
		const struct kvp_u128 *p = &c->b->id[(idx + i) & (c->b->id_cnt - 1)].p;
		if (p->hi == c->b->id[idx].p.hi && S_BASE(p->lo) >= ST_CLAIM)
			fault(c, "entry %" PRIu32 ": its id is there twice", idx);
	}
}

static void check_resv(struct checker *c, uint32_t idx)
{
	struct kvp_book *b = c->b;
	uint64_t s = kvp_ld_acq_u64(book_state(b, idx));
	struct kvp_resv_shm *e = &b->resv[idx];
	if (S_BASE(s) == ST_FREE) {
		if (b->id[idx].p.hi)
			fault(c, "entry %" PRIu32 ": free but has a tag", idx);
		return;
	}
	check_id(c, idx);
	if (S_BASE(s) == ST_CLAIM)
		return;
	if (S_BASE(s) != ST_BOOKED || (s & FL_WANT)) {
		fault(c, "entry %" PRIu32 ": operation under way, state %" PRIu64, idx, s & 0xff);
		return;
	}
	uint32_t rank = book_rank_of(b, e);
	uint64_t ctl = rank < b->rank_max ? book_ctl(b, rank) : 0;
	if (CTL_STATE(ctl) != KVP_CTL_OPEN || CTL_GEN(ctl) != e->rank_gen) {
		fault(c, "entry %" PRIu32 ": booked on rank %" PRIu32 ", which is not open for it", idx,
			rank);
		return;
	}
	c->tok[rank] += s & FL_TOK ? e->prefill_tok : 0;
	c->req[rank]++;
	c->blk[rank] += e->out_fx[S_SEL(s)];
	check_keys(c, idx, rank, HANDLE(S_GEN(s), idx));
}

static void check_ranks(struct checker *c)
{
	for (uint32_t r = 0; r < c->b->rank_max; r++) {
		uint64_t st = CTL_STATE(book_ctl(c->b, r));
		struct kvp_load l;
		kvp_load_read(c->b, r, &l);
		if (st == KVP_CTL_RECOUNT || st == KVP_CTL_CLEAN)
			fault(c, "rank %" PRIu32 ": recount under way", r);
		if (l.prefill_tok != c->tok[r] || l.requests != c->req[r] ||
			kvp_ld_acq_u64(&kvp_rank_at(c->b, r)->pair[PAIR_B].lo) != c->blk[r])
			fault(c,
				"rank %" PRIu32 ": load %" PRIu64 " tokens %" PRIu32
				" requests %.6f blocks, want %" PRIu64 " %" PRIu64 " %.6f",
				r, l.prefill_tok, l.requests,
				(double)l.active_blk_fx / (double)KVP_BLK_FX_ONE, c->tok[r], c->req[r],
				(double)c->blk[r] / (double)KVP_BLK_FX_ONE);
	}
}

static void check_entry(struct checker *c, uint32_t at)
{
	const struct kvp_u128 *g = &c->b->act[at / 4].gate[at % 4];
	if (kvp_ld_acq_u64(&g->lo) == 0)
		return;
	uint32_t cnt = BOOK_GATE_CNT(kvp_ld_acq_u64(&g->hi));
	const struct held *held = held_at(c, at);
	if (held->place == 0)
		fault(c, "active entry %" PRIu32 " belongs to no live booking", at);
	else if (held->cnt != cnt)
		fault(c, "active entry %" PRIu32 ": count %" PRIu32 ", want %" PRIu32, at, cnt, held->cnt);
}

/* Only stretches that were ever used: the rest of the table has no memory yet, and need not get any. */
static void check_active(struct checker *c)
{
	uint64_t units = (c->b->act_line_mask + ACT_USED_LINES) / ACT_USED_LINES;
	for (uint64_t u = 0; u < units; u++) {
		if (!(kvp_ld_acq_u64(&c->b->act_used[u / 64]) >> (u % 64) & 1))
			continue;
		uint64_t line = u * ACT_USED_LINES;
		for (; line < (u + 1) * ACT_USED_LINES && line <= c->b->act_line_mask; line++)
			for (uint32_t k = 0; k < 4; k++)
				check_entry(c, (uint32_t)(line * 4 + k));
	}
}

static void check_chunks(struct checker *c)
{
	for (uint32_t i = 1; i < c->b->chunk_cnt; i++) {
		uint64_t h = kvp_ld_acq_u64(&c->b->chunk[i].owner);
		if (!h)
			continue;
		uint64_t s = H_IDX(h) < c->b->id_cnt ? kvp_ld_acq_u64(book_state(c->b, H_IDX(h))) : 0;
		if (S_GEN(s) != H_GEN(h) || S_BASE(s) == ST_FREE)
			fault(c, "chunk %" PRIu32 " has no reservation", i);
	}
}

uint64_t kvp_book_check(struct kvp_book *b)
{
	uint64_t keys = 1024;
	for (uint32_t i = 0; i < b->id_cnt; i++)
		if (S_BASE(kvp_ld_acq_u64(book_state(b, i))) != ST_FREE)
			keys += kvp_ld_rlx_u32(&b->resv[i].seq_cnt);
	struct checker c = {.b = b, .mask = 1};
	while (c.mask < 2 * keys)
		c.mask <<= 1;
	c.tab = calloc(c.mask, sizeof(*c.tab));
	c.held = calloc(c.mask, sizeof(*c.held));
	c.tok = calloc(3ULL * b->rank_max, sizeof(*c.tok));
	c.mask--;
	if (!c.tab || !c.held || !c.tok) {
		fault(&c, "no memory for %" PRIu64 " blocks", keys);
	} else {
		c.req = c.tok + b->rank_max;
		c.blk = c.req + b->rank_max;
		for (uint32_t i = 0; i < b->id_cnt; i++)
			check_resv(&c, i);
		check_ranks(&c);
		check_active(&c);
		check_chunks(&c);
	}
	free(c.tab);
	free(c.held);
	free(c.tok);
	return c.faults;
}
