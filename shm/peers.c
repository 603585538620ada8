/* shm/peers.c — a set of strings that any process may change. */
#include "shm/peers.h"

#include <kvpick/point.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAGIC 0x6b76702d70656572ull
#define LAYOUT 1

enum state { FREE, CLAIMED, LISTED, STATE_CNT };

struct row {
	uint64_t word;			       /* owner << 32 | use count << 8 | state */
	uint64_t len;			       /* bytes of the text */
	uint64_t text[KVP_PEERS_TEXT_MAX / 8]; /* written while CLAIMED */
} __attribute__((aligned(64)));

struct kvp_peers_shm {
	struct kvp_objhdr hdr;
	uint64_t version;
	uint64_t pad[7];
	struct row row[KVP_PEERS_MAX];
};

static enum state state_of(uint64_t word)
{
	return (enum state)(word & 0xff);
}

static kvp_owner owner_of(uint64_t word)
{
	return (kvp_owner)(word >> 32);
}

/* The next use of a row begins when it is claimed. */
static uint64_t word_next(uint64_t word, kvp_owner owner, enum state s)
{
	uint64_t use = (word >> 8 & 0xffffff) + (s == CLAIMED);
	return (uint64_t)owner << 32 | (use & 0xffffff) << 8 | s;
}

static uint32_t layout_hash(void)
{
	static const size_t w[] = {sizeof(struct row), offsetof(struct row, text),
		offsetof(struct kvp_peers_shm, row), sizeof(struct kvp_peers_shm)};
	return kvp_obj_hash(w, sizeof(w) / sizeof(w[0]));
}

uint64_t kvp_peers_align(void)
{
	return KVP_PAGE;
}

uint64_t kvp_peers_footprint(const struct kvp_geom *g)
{
	return g ? kvp_align_up(sizeof(struct kvp_peers_shm), KVP_PAGE) : 0;
}

int kvp_peers_new(void *mem, const struct kvp_geom *g)
{
	struct kvp_peers_shm *s = mem;
	if (!mem || (uintptr_t)mem % KVP_CACHE_LINE || !g)
		return KVP_ERR_INVAL;
	kvp_obj_begin(&s->hdr, LAYOUT, layout_hash(), kvp_peers_footprint(g), g->region_gen);
	kvp_obj_ready(&s->hdr, MAGIC);
	return KVP_OK;
}

int kvp_peers_join(void *mem, const struct kvp_geom *g, struct kvp_peers *out)
{
	struct kvp_peers_shm *s = mem;
	if (!g || !out)
		return KVP_ERR_INVAL;
	int rc = kvp_obj_join(mem, MAGIC, LAYOUT, layout_hash());
	if (rc)
		return rc;
	if (s->hdr.footprint != kvp_peers_footprint(g) || s->hdr.region_gen != g->region_gen)
		return KVP_ERR_LAYOUT;
	out->shm = s;
	return KVP_OK;
}

void kvp_peers_leave(struct kvp_peers *p)
{
	memset(p, 0, sizeof(*p));
}

int kvp_peers_delete(void *mem)
{
	if (!mem)
		return KVP_ERR_INVAL;
	kvp_obj_delete(mem);
	return KVP_OK;
}

uint64_t kvp_peers_check(const struct kvp_peers *p)
{
	uint64_t faults = 0;
	for (uint32_t i = 0; i < KVP_PEERS_MAX; i++) {
		const struct row *r = &p->shm->row[i];
		uint64_t word = kvp_ld_acq_u64(&r->word), len = kvp_ld_rlx_u64(&r->len);
		kvp_fence_acq();
		if (kvp_ld_rlx_u64(&r->word) != word)
			continue; /* under change */
		int bad = state_of(word) >= STATE_CNT ||
			  (owner_of(word) != 0) != (state_of(word) == CLAIMED) ||
			  (state_of(word) == LISTED && (len == 0 || len > KVP_PEERS_TEXT_MAX));
		if (bad && ++faults <= 10)
			fprintf(stderr, "peers.check fault row=%u word=%llx len=%llu\n", i,
				(unsigned long long)word, (unsigned long long)len);
	}
	return faults;
}

/* ---- rows ---- */

/* Word of a row that lists this text; 0 = another text or nothing. */
static uint64_t lists(const struct row *r, const char *text, uint32_t len)
{
	uint64_t copy[KVP_PEERS_TEXT_MAX / 8];
	uint64_t word =
		kvp_ld_sc_u64(&r->word); /* after the own listing: pairs with kvp_peers_add elsewhere */
	if (state_of(word) != LISTED || kvp_ld_rlx_u64(&r->len) != len)
		return 0;
	kvp_copy_out(copy, r->text, len);
	kvp_fence_acq();
	return kvp_ld_rlx_u64(&r->word) == word && memcmp(copy, text, len) == 0 ? word : 0;
}

static void changed(struct kvp_peers *p)
{
	kvp_faa_ar_u64(&p->shm->version, 1); /* pairs with: kvp_peers_version */
}

int kvp_peers_add(struct kvp_peers *p, kvp_owner owner, const char *text, uint32_t len)
{
	struct kvp_peers_shm *s = p->shm;
	uint32_t at = 0;
	if (!owner || !len || len > KVP_PEERS_TEXT_MAX)
		return KVP_ERR_INVAL;
	for (uint32_t i = 0; i < KVP_PEERS_MAX; i++)
		if (lists(&s->row[i], text, len))
			return KVP_ERR_EXISTS;
	uint64_t word = 0;
	for (; at < KVP_PEERS_MAX; at++) {
		word = kvp_ld_acq_u64(&s->row[at].word);
		if (state_of(word) == FREE &&
			kvp_cas_ar_u64(&s->row[at].word, word, word_next(word, owner, CLAIMED)))
			break;
	}
	if (at == KVP_PEERS_MAX)
		return KVP_ERR_FULL;
	word = word_next(word, owner, CLAIMED);
	KVP_POINT("peers:claimed");
	kvp_st_rlx_u64(&s->row[at].len, len);
	kvp_copy_in(s->row[at].text, text, len);
	if (!kvp_cas_ar_u64(&s->row[at].word, word, word_next(word, 0, LISTED))) /* pairs with: lists */
		return KVP_ERR_FULL; /* the sweep took the caller for dead */
	kvp_fence_sc();		     /* own listing before the look at the others' */
	KVP_POINT("peers:listed");
	word = word_next(word, 0, LISTED);
	for (uint32_t i = 0; i < KVP_PEERS_MAX; i++) {
		uint64_t other = i == at ? 0 : lists(&s->row[i], text, len);
		if (other && i < at) {
			kvp_cas_ar_u64(&s->row[at].word, word, word_next(word, 0, FREE));
			return KVP_ERR_EXISTS;
		}
		if (other)
			kvp_cas_ar_u64(&s->row[i].word, other, word_next(other, 0, FREE));
	}
	changed(p);
	return KVP_OK;
}

int kvp_peers_drop(struct kvp_peers *p, const char *text, uint32_t len)
{
	int found = 0;
	for (uint32_t i = 0; i < KVP_PEERS_MAX && len && len <= KVP_PEERS_TEXT_MAX; i++) {
		uint64_t word = lists(&p->shm->row[i], text, len);
		found |= word && kvp_cas_ar_u64(&p->shm->row[i].word, word, word_next(word, 0, FREE));
	}
	if (!found)
		return KVP_ERR_NOTFOUND;
	changed(p);
	return KVP_OK;
}

int kvp_peers_get(const struct kvp_peers *p, uint32_t i, char text[KVP_PEERS_TEXT_MAX + 1], uint32_t *len)
{
	if (i >= KVP_PEERS_MAX)
		return KVP_ERR_NOTFOUND;
	const struct row *r = &p->shm->row[i];
	uint64_t word = kvp_ld_acq_u64(&r->word), n = kvp_ld_rlx_u64(&r->len);
	if (state_of(word) != LISTED || n > KVP_PEERS_TEXT_MAX)
		return KVP_ERR_NOTFOUND;
	kvp_copy_out(text, r->text, n);
	kvp_fence_acq();
	if (kvp_ld_rlx_u64(&r->word) != word)
		return KVP_ERR_NOTFOUND; /* removed meanwhile */
	text[n] = 0;
	*len = (uint32_t)n;
	return KVP_OK;
}

/* ---- all of them ---- */

struct entry {
	uint32_t len;
	char text[KVP_PEERS_TEXT_MAX + 1];
};

static int by_bytes(const void *a, const void *b)
{
	const struct entry *x = a, *y = b;
	int d = memcmp(x->text, y->text, x->len < y->len ? x->len : y->len);
	return d ? d : (x->len > y->len) - (x->len < y->len);
}

int kvp_peers_list(
	const struct kvp_peers *p, void (*fn)(void *ctx, const char *text, uint32_t len), void *ctx)
{
	struct entry *e = malloc(sizeof(*e) * KVP_PEERS_MAX);
	uint32_t n = 0;
	if (!e)
		return KVP_ERR_SYS;
	for (uint32_t i = 0; i < KVP_PEERS_MAX; i++)
		n += kvp_peers_get(p, i, e[n].text, &e[n].len) == KVP_OK;
	qsort(e, n, sizeof(*e), by_bytes);
	for (uint32_t i = 0; i < n; i++)
		if (i == 0 || by_bytes(&e[i - 1], &e[i]) != 0)
			fn(ctx, e[i].text, e[i].len);
	free(e);
	return KVP_OK;
}

uint64_t kvp_peers_version(const struct kvp_peers *p)
{
	return kvp_ld_acq_u64(&p->shm->version);
}

uint32_t kvp_peers_sweep_owner(struct kvp_peers *p, kvp_owner dead)
{
	uint32_t n = 0;
	for (uint32_t i = 0; i < KVP_PEERS_MAX && dead; i++) {
		uint64_t word = kvp_ld_acq_u64(&p->shm->row[i].word);
		if (state_of(word) == CLAIMED && owner_of(word) == dead)
			n += kvp_cas_ar_u64(&p->shm->row[i].word, word, word_next(word, 0, FREE));
	}
	return n;
}
