/* shm/radix_ahead.h — touches memory of the KV radix tree before it is used for the first time.
 *
 * Shape      writer side: a process-local record of how far each array is used and how far it was touched,
 *            and a spare map of names of the next size. Reader side: how far a mapping was filled.
 * Truth      none: without it everything works, a page fault (2 to 4 us) at a time.
 * Writers    used: the tree's writer thread. touched, spare: one helper thread of the same process.
 * Readers    those two.
 * Ordering   marks are relaxed hints. The spare map is published with release and taken by exchange.
 * Lifetime   between kvp_radix_ahead_open and _close, within that of the writer.
 * Crash      gone with the process; pages that were touched stay and are zero.
 * Proved by  tests/t_radix_ahead.c
 */
#ifndef KVP_SHM_RADIX_AHEAD_H
#define KVP_SHM_RADIX_AHEAD_H

#include "shm/radix.h"

enum kvp_radix_huge { KVP_RADIX_HUGE_OFF, KVP_RADIX_HUGE_TRY };
struct kvp_radix_ahead;

/* kvp_radix_ahead_open attaches to a writer.
 * huge    KVP_RADIX_HUGE_TRY advises huge pages for both segments and for maps of names.
 * errors  KVP_ERR_SYS without memory. kvp_radix_ahead_close ends it; the helper thread must be gone and the
 *         writer not yet closed. NULL is allowed. */
int kvp_radix_ahead_open(struct kvp_radix_w *w, enum kvp_radix_huge huge, struct kvp_radix_ahead **out);
void kvp_radix_ahead_close(struct kvp_radix_ahead *a);
/* kvp_radix_ahead_huge: 1 if the kernel took the advice and its policy for shared memory allows it. */
int kvp_radix_ahead_huge(const struct kvp_radix_ahead *a);
/* kvp_radix_ahead_due notes how far the arrays are used. 1: the helper should run. Writer thread; some tens
 * of nanoseconds. */
int kvp_radix_ahead_due(struct kvp_radix_ahead *a);
/* kvp_radix_ahead_run touches what is due, in steps of 256 KiB, and frees what is left over. Returns bytes
 * touched. Helper thread; blocks for the time of the page faults. */
uint64_t kvp_radix_ahead_run(struct kvp_radix_ahead *a);

/* A reader's mapping: zero it once. */
struct kvp_radix_touch {
	uint64_t desc, table, col, cut; /* bytes done; of the table that desc names */
};
/* kvp_radix_touch maps what of the tree is in use and not mapped here yet, at most budget_bytes rounded up
 * to pages. Allocates nothing where the writer wrote densely. Returns the bytes done, 0 = nothing left.
 * About 0.1 ms a MiB. */
uint64_t kvp_radix_touch(const struct kvp_radix *r, struct kvp_radix_touch *t, uint64_t budget_bytes);
#endif
