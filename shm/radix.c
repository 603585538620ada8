#include "shm/radix_priv.h"

#include <stddef.h>
#include <stdio.h>
#include <string.h>

#define MAGIC 0x31585452504b56ULL /* "VKPRTX1" */
#define LAYOUT 2
#define RUN_MAX (1u << 28)

static uint32_t layout_hash(void)
{
	const size_t w[] = {sizeof(struct kvp_radix_shm), offsetof(struct kvp_radix_shm, table),
		offsetof(struct kvp_radix_shm, stat), KVP_RADIX_HDR_FIXED,
		offsetof(struct kvp_radix_hdr_shm, cut_ref), offsetof(struct kvp_radix_hdr_shm, low_n),
		offsetof(struct kvp_radix_hdr_shm, bits), offsetof(struct kvp_radix_shm, low),
		offsetof(struct kvp_radix_shm, hidden),
		KVP_RADIX_COL_GRAN, KVP_RADIX_CUT_GRAN, KVP_RADIX_RUN_BLK_MAX};
	return kvp_obj_hash(w, sizeof(w) / sizeof(w[0]));
}

static uint32_t ceil_log2(uint64_t v)
{
	return v <= 1 ? 0 : 64 - (uint32_t)__builtin_clzll(v - 1);
}

static uint32_t words(uint64_t want, uint64_t unit)
{
	uint64_t limit = (UINT32_MAX - 1) / unit * unit;
	uint64_t up = (want + unit - 1) / unit * unit;
	return (uint32_t)(up > limit ? limit : up);
}

/* The layout of the second segment: every array page-aligned, touched only where used. */
static void geo_priv(struct kvp_radix_geo *o)
{
	uint64_t at = kvp_align_up(sizeof(struct kvp_radix_priv_shm), KVP_PAGE);
#define PLACE(off, cnt, size) (o->off = at, at += kvp_align_up((uint64_t)(cnt) * (size), KVP_PAGE))
	PLACE(slot_off, o->holder_max, sizeof(struct kvp_radix_slot_shm));
	PLACE(op_local_off, KVP_RADIX_OP_BLK_MAX, 8);
	PLACE(op_ext_off, KVP_RADIX_OP_BLK_MAX, 8);
	PLACE(local_off, o->col_max, 8);
	PLACE(ext_off, o->col_max, 8);
	PLACE(run_of_off, o->col_max, 4);
	PLACE(run_off, (uint64_t)o->run_max + 1, sizeof(struct kvp_radix_run_shm));
	PLACE(hole_off, o->hole_max, sizeof(struct kvp_radix_hole_shm));
	PLACE(alias_off, o->alias_max, sizeof(struct kvp_radix_alias_shm));
#undef PLACE
	o->priv_footprint = at;
}

int kvp_radix_geo(const struct kvp_geom *g, struct kvp_radix_geo *o)
{
	if (!g || g->block_max < 64 || g->block_max > 1000000000)
		return KVP_ERR_INVAL;
	memset(o, 0, sizeof(*o));
	switch (g->index_rank_max) {
	case 64:
		o->hdr_bytes = 64;
		break;
	case 256:
		o->hdr_bytes = 128;
		break;
	case 1024:
		o->hdr_bytes = 192;
		break;
	case 4096:
		o->hdr_bytes = 576;
		break;
	default:
		return KVP_ERR_INVAL;
	}
	o->slot_max = g->index_rank_max;
	o->holder_max = KVP_RADIX_TIER_CNT * o->slot_max;
	o->word_cnt = o->slot_max / 64;
	o->block_max = g->block_max;
	uint64_t few = g->block_max < (1u << 20) ? g->block_max : (1u << 20);
	o->run_max = (uint32_t)(g->block_max > few ? g->block_max : few); /* all of them may stand alone */
	o->run_max = o->run_max > RUN_MAX ? RUN_MAX : o->run_max;
	/* Arrays are at most two thirds slack (continuations double), short runs begin with 16 words. */
	o->col_max = words(4 * g->block_max + 16ULL * o->run_max, KVP_RADIX_RUN_BLK_MAX);
	o->cut_max = words(2 * g->block_max + 65536, KVP_RADIX_CUT_GRAN << (KVP_RADIX_IV_CLASS_MAX - 1));
	o->hole_max = words(g->block_max / 4 + 4096, 1);
	o->alias_max = words(4 * g->block_max, 1) / 2;
	o->log2_min = 10;
	o->log2_max = ceil_log2(2ULL * o->run_max);
	o->log2_max = o->log2_max < o->log2_min ? o->log2_min : o->log2_max;
	o->side_bytes = ((2ULL << o->log2_max) - (1ULL << o->log2_min)) * o->hdr_bytes;
	o->col_off = kvp_align_up(sizeof(struct kvp_radix_shm), KVP_PAGE);
	o->cut_off = kvp_align_up(o->col_off + 8ULL * o->col_max, KVP_PAGE);
	o->table_off = kvp_align_up(o->cut_off + 4ULL * o->cut_max, KVP_PAGE);
	o->footprint = kvp_align_up(o->table_off + 2 * o->side_bytes, KVP_PAGE);
	geo_priv(o);
	return KVP_OK;
}

static void salts(const struct kvp_geom *g, uint64_t out[2])
{
	/* Never degenerate, whatever the secret: the chain multiplies with these. */
	for (int i = 0; i < 2; i++) {
		uint64_t x = g->salt[i] + 0x9e3779b97f4a7c15ULL * (uint64_t)(i + 1);
		x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
		x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
		out[i] = x ^ (x >> 31);
	}
}

uint64_t kvp_radix_align(void)
{
	return KVP_PAGE;
}

uint64_t kvp_radix_footprint(const struct kvp_geom *g)
{
	struct kvp_radix_geo o;
	return kvp_radix_geo(g, &o) ? 0 : o.footprint;
}

int kvp_radix_new(void *mem, const struct kvp_geom *g)
{
	struct kvp_radix_geo o;
	if (!mem || ((uintptr_t)mem & (KVP_PAGE - 1)) || kvp_radix_geo(g, &o))
		return KVP_ERR_INVAL;
	struct kvp_radix_shm *s = mem;
	kvp_obj_begin(&s->hdr, LAYOUT, layout_hash(), o.footprint, g->region_gen);
	salts(g, s->key_salt);
	s->block_max = o.block_max;
	s->slot_max = o.slot_max;
	s->run_max = o.run_max;
	memset(&s->stat, 0, sizeof(s->stat));
	s->area_used[0] = s->area_used[1] = 0;
	s->col_bump = s->cut_bump = 0;
	kvp_st_rlx_u64(&s->generation, 1);
	kvp_st_rlx_u64(&s->table, KVP_RADIX_DESC(1, o.log2_min, 0));
	kvp_st_rlx_u32(&s->ready, 1);
	kvp_obj_ready(&s->hdr, MAGIC);
	return KVP_OK;
}

int kvp_radix_join(const void *mem, const struct kvp_geom *g, struct kvp_radix *out)
{
	struct kvp_radix_geo o;
	int rc = kvp_obj_join(mem, MAGIC, LAYOUT, layout_hash());
	if (rc)
		return rc;
	const struct kvp_radix_shm *s = mem;
	if (kvp_radix_geo(g, &o) || s->hdr.footprint != o.footprint || s->slot_max != o.slot_max ||
		s->block_max != o.block_max)
		return KVP_ERR_LAYOUT;
	memset(out, 0, sizeof(*out));
	out->shm = s;
	out->base = mem;
	out->key_salt[0] = s->key_salt[0];
	out->key_salt[1] = s->key_salt[1];
	out->col_off = o.col_off;
	out->cut_off = o.cut_off;
	out->table_off = o.table_off;
	out->col_max = o.col_max;
	out->cut_max = o.cut_max;
	out->hdr_bytes = o.hdr_bytes;
	out->word_cnt = o.word_cnt;
	out->log2_min = o.log2_min;
	out->log2_max = o.log2_max;
	return KVP_OK;
}

void kvp_radix_leave(struct kvp_radix *r)
{
	memset(r, 0, sizeof(*r));
}

int kvp_radix_delete(void *mem)
{
	if (!mem)
		return KVP_ERR_INVAL;
	kvp_obj_delete(mem);
	return KVP_OK;
}

int kvp_radix_ready(const struct kvp_radix *r)
{
	return kvp_ld_acq_u32(&r->shm->ready) != 0;
}

uint64_t kvp_radix_generation(const struct kvp_radix *r)
{
	return kvp_ld_acq_u64(&r->shm->generation);
}

void kvp_radix_stats(const struct kvp_radix *r, struct kvp_radix_stats *out)
{
#define X(name) out->name = kvp_ld_rlx_u64(&r->shm->stat.name);
	KVP_RADIX_STAT_LIST(X)
#undef X
	out->generation = kvp_ld_rlx_u64(&r->shm->generation);
	out->block_max = r->shm->block_max;
	out->run_max = r->shm->run_max;
	out->ready = kvp_ld_rlx_u32(&r->shm->ready);
	out->slot_max = r->shm->slot_max;
}

static void fault(uint64_t *n, const char *what, uint64_t where)
{
	if (++*n <= 10)
		fprintf(stderr, "radix.check fault=\"%s\" at=%llu\n", what, (unsigned long long)where);
}

/* Cutoff lists: in range, one entry a slot, no entry beyond the run. */
static void check_cut(const struct kvp_radix *r, const struct kvp_radix_hdr_shm *h, uint64_t i, uint64_t *n)
{
	uint64_t seen[KVP_RADIX_WORD_MAX] = {0};
	uint32_t cnt = KVP_RADIX_CUT_CNT(h->cut_n), cls = KVP_RADIX_CUT_CLASS(h->cut_n);
	if (cls > 11 || (cls == 0 && cnt) || (cls && cnt > (KVP_RADIX_CUT_GRAN << (cls - 1))) ||
		(uint64_t)h->cut_ref + cnt > r->cut_max) {
		fault(n, "cutoff list out of range", i);
		return;
	}
	const uint32_t *cut = (const uint32_t *)(const void *)(r->base + r->cut_off) + h->cut_ref;
	for (uint32_t j = 0; j < cnt; j++) {
		uint32_t s = KVP_RADIX_CUT_SLOT(cut[j]);
		if (KVP_RADIX_CUT_BLK(cut[j]) == 0)
			continue;
		if (s >= r->word_cnt * 64 ||
			(!kvp_radix_has_bit(h, s) && KVP_RADIX_CUT_BLK(cut[j]) >= h->len))
			fault(n, "cutoff entry out of range", i);
		else if (seen[s >> 6] >> (s & 63) & 1)
			fault(n, "two cutoff entries of one slot", i);
		else
			seen[s >> 6] |= 1ULL << (s & 63);
	}
}

/* Lists of lower-tier intervals: in range, and no two of one holder touch. */
static void check_low(const struct kvp_radix *r, const struct kvp_radix_hdr_shm *h, uint64_t i, uint64_t *n)
{
	uint32_t cnt = KVP_RADIX_CUT_CNT(h->low_n), cls = KVP_RADIX_CUT_CLASS(h->low_n);
	if (cls > KVP_RADIX_IV_CLASS_MAX || (cls == 0 && cnt) || (cls && cnt > 1u << cls) ||
		h->low_ref % KVP_RADIX_CUT_GRAN || (uint64_t)h->low_ref + 2 * cnt > r->cut_max) {
		fault(n, "list of lower-tier intervals out of range", i);
		return;
	}
	const uint64_t *iv = (const uint64_t *)(const void *)(r->base + r->cut_off + 4ULL * h->low_ref);
	if (cnt && !r->shm->low)
		fault(n, "lower-tier intervals that no lookup looks at", i);
	for (uint32_t j = 0; j < cnt; j++) {
		uint32_t who = KVP_RADIX_IV_HOLDER(iv[j]), a = KVP_RADIX_IV_A(iv[j]),
			 b = KVP_RADIX_IV_B(iv[j]);
		if (b == 0)
			continue;
		if (a >= b || b > h->len || who / 64 < r->word_cnt ||
			who / 64 >= KVP_RADIX_TIER_CNT * r->word_cnt)
			fault(n, "lower-tier interval out of range", i);
		for (uint32_t k = j + 1; k < cnt; k++)
			if (KVP_RADIX_IV_B(iv[k]) && KVP_RADIX_IV_HOLDER(iv[k]) == who &&
				KVP_RADIX_IV_A(iv[k]) <= b && a <= KVP_RADIX_IV_B(iv[k]))
				fault(n, "lower-tier intervals of one holder touch", i);
	}
}

static void check_run(const struct kvp_radix *r, const struct kvp_radix_hdr_shm *h, uint64_t i, uint64_t *n)
{
	const uint64_t *col = (const uint64_t *)(const void *)(r->base + r->col_off);
	if (h->ver & 1)
		fault(n, "odd version at rest", i);
	if (h->len == 0 || h->len > KVP_RADIX_RUN_BLK_MAX || h->cap < h->len ||
		(uint64_t)h->base + h->cap > r->col_max) {
		fault(n, "run out of range", i);
		return;
	}
	if (col[h->base] != h->key || col[h->base + h->len - 1] != h->last)
		fault(n, "run ends and key column differ", i);
	check_cut(r, h, i, n);
	check_low(r, h, i, n);
}

uint64_t kvp_radix_check(const struct kvp_radix *r)
{
	uint64_t n = 0, runs = 0, blocks = 0;
	if (!r->shm || kvp_ld_acq_u64(&r->shm->hdr.magic) != MAGIC)
		return 1;
	uint64_t d = kvp_ld_acq_u64(&r->shm->table);
	uint32_t log2 = KVP_RADIX_DESC_LOG2(d);
	if (log2 < r->log2_min || log2 > r->log2_max) {
		fault(&n, "table descriptor out of range", d);
		return n;
	}
	uint64_t cnt = 1ULL << log2;
	const char *tab = r->base + kvp_radix_area(r, log2, KVP_RADIX_DESC_SIDE(d));
#define HDR(x) ((const struct kvp_radix_hdr_shm *)(const void *)(tab + (x)*r->hdr_bytes))
	for (uint64_t i = 0; i < cnt; i++) {
		const struct kvp_radix_hdr_shm *h = HDR(i);
		if (h->key < KVP_RADIX_KEY_MIN)
			continue;
		runs++;
		blocks += h->len;
		check_run(r, h, i, &n);
		uint64_t j = h->key & (cnt - 1);
		for (; j != i; j = (j + 1) & (cnt - 1)) {
			if (HDR(j)->key == KVP_RADIX_KEY_NONE || HDR(j)->key == h->key) {
				fault(&n, "header not reachable by its key", i);
				break;
			}
		}
	}
#undef HDR
	if (runs != r->shm->stat.runs || blocks != r->shm->stat.blocks)
		fault(&n, "runs or blocks differ from the count", blocks);
	return n;
}
