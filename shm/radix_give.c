#include "shm/radix_priv.h"

#include <sys/mman.h>

/* Memory of long free stretches goes back to the kernel, some of it at a time. Whoever still reads there sees
 * zeros, fails its validation and walks again; nothing ever faults. */

#define TOP_MIN 32u	/* free top blocks in a row that are worth a call */
#define TOP_MAX 128u	/* at most in one call: about a millisecond */
#define KEEP_MIN 32768u /* granules that stay at hand, or an eighth of those ever used */

struct target {
	char *base;
	uint32_t gran_bytes;
};

static uint32_t top_free(const struct kvp_radix_buddy *b, uint32_t top)
{
	uint32_t g = top << b->top_order;
	return g < *b->bump && b->state[g] == b->top_order + 1 && !b->clean[top];
}

static int excess(const struct kvp_radix_buddy *b)
{
	uint32_t keep = *b->bump / 8 > KEEP_MIN ? *b->bump / 8 : KEEP_MIN;
	return b->free_gran - b->clean_gran > keep;
}

/* Punches one stretch; bytes given back. */
static uint64_t punch(struct kvp_radix_buddy *b, uint32_t top, uint32_t n, const struct target *t)
{
	uint64_t gran = (uint64_t)n << b->top_order, at = (uint64_t)top << b->top_order, bytes = 0;
	for (; t->base; t++) {
		if (madvise(t->base + at * t->gran_bytes, gran * t->gran_bytes, MADV_REMOVE) == 0)
			bytes += gran * t->gran_bytes;
	}
	for (uint32_t i = 0; i < n; i++)
		b->clean[top + i] = 1;
	b->clean_gran += (uint32_t)gran;
	return bytes;
}

/* Goes on with a pass over the top blocks of an arena; ends with the first stretch that was given back. */
static uint32_t pass(
	struct kvp_radix_w *w, struct kvp_radix_buddy *b, const struct target *t, uint32_t budget)
{
	uint64_t now = w->pub->stat.removed + w->pub->stat.cleared + 1;
	if (!excess(b) || (!b->scan && b->scan_seen == now))
		return 0;
	if (!b->scan)
		b->scan_seen = now;
	uint32_t top_cnt = *b->bump >> b->top_order, done = 0;
	while (b->scan < top_cnt && done < budget) {
		uint32_t n = 0;
		while (n < TOP_MAX && top_free(b, b->scan + n))
			n++;
		done += n + 1;
		if (n >= TOP_MIN) {
			uint64_t bytes = punch(b, b->scan, n, t);
			kvp_radix_count(w, &w->pub->stat.given_back_bytes, KVP_CTR_RADIX_GIVEN_BACK, bytes);
			b->scan += n;
			return done;
		}
		b->scan += n + 1;
	}
	if (b->scan >= top_cnt)
		b->scan = 0;
	return done;
}

uint32_t kvp_radix_give_back(struct kvp_radix_w *w, uint32_t budget)
{
	const struct target col[] = {{(char *)w->col, 8 * KVP_RADIX_COL_GRAN},
		{(char *)w->local, 8 * KVP_RADIX_COL_GRAN}, {(char *)w->ext, 8 * KVP_RADIX_COL_GRAN},
		{(char *)w->run_of, 4 * KVP_RADIX_COL_GRAN}, {NULL, 0}};
	const struct target cut[] = {{(char *)w->cut, 4 * KVP_RADIX_CUT_GRAN}, {NULL, 0}};
	uint32_t did = pass(w, &w->colb, col, budget);
	return did ? did : pass(w, &w->cutb, cut, budget);
}
