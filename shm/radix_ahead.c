#include "shm/radix_ahead.h"
#include "shm/radix_priv.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define STEP_BYTES (256u << 10)
#define WINDOW_MIN (256u << 10)
#define WINDOW_MAX (8u << 20)
#define SHMEM_POLICY "/sys/kernel/mm/transparent_hugepage/shmem_enabled"

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#define MADV_POPULATE_WRITE 23
#endif

/* An array that fills from its start. */
struct area {
	char *base;
	const uint32_t *bump;	  /* units handed out; read by the writer thread only */
	uint64_t unit, max_bytes; /* bytes of a unit */
	uint64_t used;		  /* bytes; writer -> helper */
	uint64_t done;		  /* bytes touched; helper -> writer */
};
enum { AREA_COL, AREA_LOCAL, AREA_EXT, AREA_RUN_OF, AREA_COL_USE, AREA_CUT, AREA_RUN, AREA_ALIAS, AREA_CNT };

struct kvp_radix_ahead {
	struct kvp_radix_w *w;
	enum kvp_radix_huge huge;
	uint32_t name_want;  /* size (log2) of the next map of names, 0 = not needed; writer -> helper */
	uint64_t spare; /* address of the map (a whole page) plus its log2, 0 = none; release, exchange */
	int huge_ok;
	struct area area[AREA_CNT];
};

/* The more there is, the faster it may grow. */
static uint64_t window(uint64_t used)
{
	uint64_t win = used / 4;
	win = win < WINDOW_MIN ? WINDOW_MIN : win;
	return win > WINDOW_MAX ? WINDOW_MAX : win;
}

static int policy_allows(void)
{
	char line[128] = "";
	int fd = open(SHMEM_POLICY, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return 0;
	ssize_t n = read(fd, line, sizeof(line) - 1);
	close(fd);
	return n > 0 && !strstr(line, "[never]") && !strstr(line, "[deny]");
}

int kvp_radix_ahead_open(struct kvp_radix_w *w, enum kvp_radix_huge huge, struct kvp_radix_ahead **out)
{
	struct kvp_radix_ahead *a = calloc(1, sizeof(*a));
	if (!a)
		return KVP_ERR_SYS;
	const struct kvp_radix_geo *g = &w->geo;
	const uint32_t *col = &w->pub->col_bump;
	const struct area area[AREA_CNT] = {
		[AREA_COL] = {(char *)w->col, col, 8 * KVP_RADIX_COL_GRAN, 8ULL * g->col_max, 0, 0},
		[AREA_LOCAL] = {(char *)w->local, col, 8 * KVP_RADIX_COL_GRAN, 8ULL * g->col_max, 0, 0},
		[AREA_EXT] = {(char *)w->ext, col, 8 * KVP_RADIX_COL_GRAN, 8ULL * g->col_max, 0, 0},
		[AREA_RUN_OF] = {(char *)w->run_of, col, 4 * KVP_RADIX_COL_GRAN, 4ULL * g->col_max, 0, 0},
		[AREA_COL_USE] = {(char *)w->col_use, col, 1, g->col_max / KVP_RADIX_COL_GRAN, 0, 0},
		[AREA_CUT] = {(char *)w->cut, &w->pub->cut_bump, 4 * KVP_RADIX_CUT_GRAN, 4ULL * g->cut_max, 0,
			0},
		[AREA_RUN] = {(char *)w->run, &w->priv->rid_bump, sizeof(*w->run),
			sizeof(*w->run) * ((uint64_t)g->run_max + 1), 0, 0},
		[AREA_ALIAS] = {(char *)w->alias, &w->priv->alias_bump, sizeof(*w->alias),
			sizeof(*w->alias) * (uint64_t)g->alias_max, 0, 0},
	};
	memcpy(a->area, area, sizeof(area));
	a->w = w;
	a->huge = huge;
	if (huge == KVP_RADIX_HUGE_TRY) {
		int rc = madvise(w->pub, g->footprint, MADV_HUGEPAGE);
		rc |= madvise(w->priv, g->priv_footprint, MADV_HUGEPAGE);
		a->huge_ok = rc == 0 && policy_allows();
	}
	kvp_radix_ahead_due(a);
	for (int i = 0; i < AREA_CNT; i++)
		a->area[i].done = a->area[i].used & ~(uint64_t)(KVP_PAGE - 1);
	w->ahead = a;
	*out = a;
	return KVP_OK;
}

/* One word says where the map is and how big: the helper makes the next one as soon as it is taken. */
static void *spare_map(uint64_t spare)
{
	return (void *)(uintptr_t)(spare & ~(uint64_t)(KVP_PAGE - 1));
}

static uint32_t spare_log2(uint64_t spare)
{
	return spare & (KVP_PAGE - 1);
}

static void spare_free(struct kvp_radix_ahead *a)
{
	uint64_t spare = kvp_xchg_ar_u64(&a->spare, 0);
	kvp_radix_mem_put(spare_map(spare), 8ULL << spare_log2(spare));
}

void kvp_radix_ahead_close(struct kvp_radix_ahead *a)
{
	if (!a)
		return;
	a->w->ahead = NULL;
	spare_free(a);
	free(a);
}

int kvp_radix_ahead_huge(const struct kvp_radix_ahead *a)
{
	return a->huge_ok;
}

int kvp_radix_ahead_due(struct kvp_radix_ahead *a)
{
	const struct kvp_radix_w *w = a->w;
	int due = 0;
	for (int i = 0; i < AREA_CNT; i++) {
		struct area *x = &a->area[i];
		uint64_t used = (uint64_t)*x->bump * x->unit;
		kvp_st_rlx_u64(&x->used, used);
		uint64_t done = kvp_ld_rlx_u64(&x->done);
		due |= done < x->max_bytes && used + window(used) / 2 > done;
	}
	/* The map grows at 60 %. */
	uint32_t want = w->name_cnt * 20 >= 9ULL << w->name_log2 ? w->name_log2 + 1 : 0;
	kvp_st_rlx_u32(&a->name_want, want);
	return due | (want && !kvp_ld_rlx_u64(&a->spare));
}

static uint64_t touch_area(struct area *x)
{
	uint64_t used = kvp_ld_rlx_u64(&x->used), done = x->done, from = done;
	uint64_t max = kvp_align_up(x->max_bytes, KVP_PAGE);
	uint64_t end = used + window(used) < max ? used + window(used) : max;
	while (done < end) {
		uint64_t n = max - done < STEP_BYTES ? max - done : STEP_BYTES;
		if (madvise(x->base + done, n, MADV_POPULATE_WRITE) != 0)
			n = max - done; /* no memory, or an old kernel: leave it to page faults */
		done += n;
		kvp_st_rlx_u64(&x->done, done);
	}
	return done - from;
}

static uint64_t make_spare(struct kvp_radix_ahead *a)
{
	uint32_t want = kvp_ld_rlx_u32(&a->name_want);
	uint64_t spare = kvp_ld_rlx_u64(&a->spare);
	if (spare) {
		if (want && want != spare_log2(spare))
			spare_free(a);
		return 0;
	}
	if (!want)
		return 0;
	uint64_t bytes = 8ULL << want;
	char *p = kvp_radix_mem_get(bytes);
	if (!p)
		return 0;
	if (a->huge == KVP_RADIX_HUGE_TRY)
		madvise(p, bytes, MADV_HUGEPAGE);
	for (uint64_t at = 0; at < bytes; at += STEP_BYTES) {
		uint64_t n = bytes - at < STEP_BYTES ? bytes - at : STEP_BYTES;
		if (madvise(p + at, n, MADV_POPULATE_WRITE) != 0)
			break;
	}
	kvp_xchg_ar_u64(&a->spare, (uint64_t)(uintptr_t)p | want); /* pairs with: kvp_radix_ahead_names */
	return bytes;
}

uint64_t kvp_radix_ahead_run(struct kvp_radix_ahead *a)
{
	uint64_t bytes = 0;
	for (int i = 0; i < AREA_CNT; i++)
		bytes += touch_area(&a->area[i]);
	return bytes + make_spare(a);
}

uint64_t *kvp_radix_ahead_names(struct kvp_radix_w *w, uint32_t log2)
{
	struct kvp_radix_ahead *a = w->ahead;
	uint64_t spare = a && kvp_ld_acq_u64(&a->spare) ? kvp_xchg_ar_u64(&a->spare, 0) : 0;
	if (spare && spare_log2(spare) != log2) {
		kvp_radix_mem_put(spare_map(spare), 8ULL << spare_log2(spare));
		return NULL;
	}
	return spare_map(spare);
}

/* ---- readers ---- */

static uint64_t touch_range(const char *base, uint64_t *done, uint64_t end, uint64_t budget)
{
	end &= ~(uint64_t)(KVP_PAGE - 1);
	if (*done >= end || budget == 0)
		return 0;
	uint64_t n = end - *done < budget ? end - *done : kvp_align_up(budget, KVP_PAGE);
	n = n < end - *done ? n : end - *done;
	uintptr_t from = (uintptr_t)(base + *done) & ~(uintptr_t)(KVP_PAGE - 1);
	madvise((void *)from, n, MADV_POPULATE_READ); /* a hint: page faults do the rest */
	*done += n;
	return n;
}

uint64_t kvp_radix_touch(const struct kvp_radix *r, struct kvp_radix_touch *t, uint64_t budget_bytes)
{
	uint64_t d = kvp_ld_acq_u64(&r->shm->table), n = 0;
	uint32_t log2 = KVP_RADIX_DESC_LOG2(d);
	if (d != t->desc) {
		t->desc = d;
		t->table = 0;
	}
	if (log2 >= r->log2_min && log2 <= r->log2_max)
		n += touch_range(r->base + kvp_radix_area(r, log2, KVP_RADIX_DESC_SIDE(d)), &t->table,
			(uint64_t)r->hdr_bytes << log2, budget_bytes);
	uint64_t col = (uint64_t)kvp_ld_rlx_u32(&r->shm->col_bump) * 8 * KVP_RADIX_COL_GRAN;
	uint64_t cut = (uint64_t)kvp_ld_rlx_u32(&r->shm->cut_bump) * 4 * KVP_RADIX_CUT_GRAN;
	col = col < 8ULL * r->col_max ? col : 8ULL * r->col_max;
	cut = cut < 4ULL * r->cut_max ? cut : 4ULL * r->cut_max;
	n += touch_range(
		r->base + r->col_off, &t->col, col, budget_bytes - (n < budget_bytes ? n : budget_bytes));
	n += touch_range(
		r->base + r->cut_off, &t->cut, cut, budget_bytes - (n < budget_bytes ? n : budget_bytes));
	return n;
}
