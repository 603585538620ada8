#include "shm/errlog.h"

#include <kvpick/point.h>
#include <stdio.h>
#include <string.h>

#define MAGIC 0x31474f4c525245ULL /* "ERRLOG1" */
#define LAYOUT 1
#define PROBE_MAX KVP_ERRLOG_MAX
#define FILL_SPINS 200 /* how long to wait for another writer that is filling the record we would have made */

/* State word of a record: owner << 8 | state, so that a sweep frees exactly what a dead owner left. */
enum { FREE, CLAIMED, READY };
#define STATE(w) ((w)&0xffu)
#define WORD(owner, state) (((uint64_t)(owner) << 8) | (state))

struct entry_shm {
	uint64_t word; /* compare-and-swap; READY is final */
	uint64_t hash; /* of code, module, line, text; set while CLAIMED */
	uint64_t cnt, first_ns, last_ns;
	int32_t code;
	uint32_t line;
	uint64_t place; /* hash of code, module, line only */
	char module[KVP_ERRLOG_MODULE];
	char text[KVP_ERRLOG_TEXT];
	uint64_t pad[5];
} __attribute__((aligned(64)));

struct kvp_errlog_shm {
	struct kvp_objhdr hdr;
	uint64_t lost;
	uint64_t pad[7];
	struct entry_shm entry[KVP_ERRLOG_MAX];
};
_Static_assert(sizeof(struct entry_shm) == 320, "layout of an error record");

static uint32_t layout_hash(void)
{
	const size_t w[] = {sizeof(struct kvp_errlog_shm), sizeof(struct entry_shm),
		offsetof(struct entry_shm, module), offsetof(struct entry_shm, text)};
	return kvp_obj_hash(w, sizeof(w) / sizeof(w[0]));
}

uint64_t kvp_errlog_align(void)
{
	return KVP_CACHE_LINE;
}

uint64_t kvp_errlog_footprint(const struct kvp_geom *g)
{
	return g ? sizeof(struct kvp_errlog_shm) : 0;
}

int kvp_errlog_new(void *mem, const struct kvp_geom *g)
{
	if (!mem || ((uintptr_t)mem & (KVP_CACHE_LINE - 1)) || !g)
		return KVP_ERR_INVAL;
	kvp_obj_begin(mem, LAYOUT, layout_hash(), sizeof(struct kvp_errlog_shm), g->region_gen);
	kvp_obj_ready(mem, MAGIC);
	return KVP_OK;
}

int kvp_errlog_join(void *mem, const struct kvp_geom *g, struct kvp_errlog *out)
{
	int rc = kvp_obj_join(mem, MAGIC, LAYOUT, layout_hash());
	if (rc)
		return rc;
	struct kvp_errlog_shm *l = mem;
	if (l->hdr.footprint != kvp_errlog_footprint(g))
		return KVP_ERR_LAYOUT;
	out->shm = l;
	return KVP_OK;
}

void kvp_errlog_leave(struct kvp_errlog *l)
{
	l->shm = NULL;
}

int kvp_errlog_delete(void *mem)
{
	kvp_obj_delete(mem);
	return KVP_OK;
}

static uint64_t fold(uint64_t h, const void *p, size_t n)
{
	const unsigned char *c = p;
	for (size_t i = 0; i < n; i++)
		h = (h ^ c[i]) * 1099511628211u;
	return h;
}

static uint64_t finish(uint64_t h)
{
	h ^= h >> 32;
	return h ? h : 1;
}

/* printable copies at most max-1 bytes, cuts at a whole UTF-8 character and leaves no control characters. */
static void printable(char *to, size_t max, const char *from)
{
	size_t n = strnlen(from, max);
	if (n == max)
		for (n = max - 1; n > 0 && ((unsigned char)from[n] & 0xc0) == 0x80; n--)
			;
	for (size_t i = 0; i < n; i++)
		to[i] = (unsigned char)from[i] < 0x20 || from[i] == 0x7f ? '?' : from[i];
	memset(to + n, 0, max - n);
}

static void count(struct entry_shm *e, uint64_t now_ns)
{
	kvp_faa_rlx_u64(&e->cnt, 1);
	for (uint64_t last = kvp_ld_rlx_u64(&e->last_ns); last < now_ns; last = kvp_ld_rlx_u64(&e->last_ns))
		if (kvp_cas_ar_u64(&e->last_ns, last, now_ns))
			break;
}

/* state_of waits a little for a record under construction, so that one error rarely makes two records. */
static unsigned state_of(const struct entry_shm *e)
{
	uint64_t w = kvp_ld_acq_u64(&e->word); /* pairs with: kvp_errlog_put, READY */
	for (int i = 0; STATE(w) == CLAIMED && i < FILL_SPINS; i++) {
		kvp_pause();
		w = kvp_ld_acq_u64(&e->word);
	}
	return STATE(w);
}

int kvp_errlog_put(struct kvp_errlog *l, kvp_owner owner, uint64_t now_ns, int code, const char *module,
	uint32_t line, const char *text)
{
	if (!l->shm || !owner || !module || !text)
		return KVP_ERR_INVAL;
	char mod[KVP_ERRLOG_MODULE], txt[KVP_ERRLOG_TEXT];
	printable(mod, sizeof(mod), module);
	printable(txt, sizeof(txt), text);
	uint64_t h = fold(fold(14695981039346656037u, &code, sizeof(code)), &line, sizeof(line));
	h = fold(h, mod, sizeof(mod));
	uint64_t place = finish(h), hash = finish(fold(h, txt, sizeof(txt)));
	struct entry_shm *same_place = NULL;
	for (uint32_t i = 0; i < PROBE_MAX; i++) {
		struct entry_shm *e = &l->shm->entry[(hash + i) % KVP_ERRLOG_MAX];
		unsigned st = state_of(e);
		if (st == FREE && kvp_cas_ar_u64(&e->word, FREE, WORD(owner, CLAIMED))) {
			KVP_POINT("errlog:claimed");
			e->hash = hash;
			e->place = place;
			e->code = code;
			e->line = line;
			memcpy(e->module, mod, sizeof(mod));
			memcpy(e->text, txt, sizeof(txt));
			e->first_ns = now_ns;
			kvp_st_rlx_u64(&e->last_ns, now_ns);
			kvp_st_rlx_u64(&e->cnt, 1);
			kvp_st_rel_u64(
				&e->word, WORD(owner, READY)); /* pairs with: state_of, kvp_errlog_get */
			return KVP_OK;
		}
		st = st == FREE ? state_of(e) : st;
		if (st != READY)
			continue;
		if (e->hash == hash && strncmp(e->text, txt, sizeof(txt)) == 0) {
			count(e, now_ns);
			return KVP_OK;
		}
		if (e->place == place)
			same_place = e;
	}
	if (same_place) {
		count(same_place, now_ns);
		return KVP_OK;
	}
	kvp_faa_rlx_u64(&l->shm->lost, 1);
	return KVP_ERR_FULL;
}

int kvp_errlog_get(const struct kvp_errlog *l, uint32_t idx, struct kvp_errlog_entry *out)
{
	if (!l->shm || idx >= KVP_ERRLOG_MAX)
		return KVP_ERR_NOTFOUND;
	const struct entry_shm *e = &l->shm->entry[idx];
	uint64_t w = kvp_ld_acq_u64(&e->word); /* pairs with: kvp_errlog_put, READY */
	if (STATE(w) != READY)
		return KVP_ERR_NOTFOUND;
	out->code = e->code;
	out->line = e->line;
	out->slot = KVP_OWNER_SLOT((kvp_owner)(w >> 8));
	memcpy(out->module, e->module, sizeof(out->module));
	memcpy(out->text, e->text, sizeof(out->text));
	out->module[sizeof(out->module) - 1] = 0;
	out->text[sizeof(out->text) - 1] = 0;
	out->cnt = kvp_ld_rlx_u64(&e->cnt);
	out->first_ns = e->first_ns;
	out->last_ns = kvp_ld_rlx_u64(&e->last_ns);
	return KVP_OK;
}

uint64_t kvp_errlog_lost(const struct kvp_errlog *l)
{
	return l->shm ? kvp_ld_rlx_u64(&l->shm->lost) : 0;
}

uint32_t kvp_errlog_sweep_owner(struct kvp_errlog *l, kvp_owner dead)
{
	uint32_t n = 0;
	for (uint32_t i = 0; l->shm && dead && i < KVP_ERRLOG_MAX; i++)
		n += kvp_cas_ar_u64(&l->shm->entry[i].word, WORD(dead, CLAIMED), FREE);
	return n;
}

uint64_t kvp_errlog_check(const struct kvp_errlog *l)
{
	uint64_t faults = 0;
	if (!l->shm || kvp_ld_acq_u64(&l->shm->hdr.magic) != MAGIC)
		return 1;
	for (uint32_t i = 0; i < KVP_ERRLOG_MAX; i++) {
		const struct entry_shm *e = &l->shm->entry[i];
		uint64_t w = kvp_ld_acq_u64(&e->word);
		const char *what = NULL;
		if (STATE(w) > READY || (STATE(w) == FREE) != (w == 0))
			what = "state out of range";
		else if (STATE(w) != READY)
			continue;
		else if (e->module[sizeof(e->module) - 1] || e->text[sizeof(e->text) - 1])
			what = "text without end";
		else if (kvp_ld_rlx_u64(&e->cnt) == 0 || kvp_ld_rlx_u64(&e->last_ns) < e->first_ns)
			what = "count or times impossible";
		if (what && faults++ < 10)
			fprintf(stderr, "errlog.check: record %u: %s\n", i, what);
	}
	return faults;
}
