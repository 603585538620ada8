/* daemons/indexer/ahead.h — the helper thread that touches the tree's memory before the apply thread needs
 * it.
 *
 * Shape      one thread that sleeps on an eventfd.
 * Truth      none; see shm/radix_ahead.h.
 * Writers    the apply thread notes, the helper touches.
 * Ordering   the eventfd wakes; marks are hints.
 * Lifetime   from kvp_idx_ahead_open to _close, within that of the tree's writer.
 * Crash      gone with the process.
 * Proved by  tests/t_radix_ahead.c
 */
#ifndef KVP_INDEXER_AHEAD_H
#define KVP_INDEXER_AHEAD_H

#include "shm/counter.h"
#include "shm/radix_ahead.h"
#include <pthread.h>

struct kvp_idx_ahead {
	struct kvp_radix_ahead *mem; /* NULL = not open */
	struct kvp_ctr_column_shm *ctr;
	pthread_t tid;
	int wake_fd;
	uint32_t stop, is_awake;
};

/* kvp_idx_ahead_open starts the thread: KVP_ERR_SYS. The caller may go on without it. */
int kvp_idx_ahead_open(struct kvp_idx_ahead *a, struct kvp_radix_w *w, enum kvp_radix_huge huge,
	struct kvp_ctr_column_shm *ctr);
/* kvp_idx_ahead_note wakes the helper if there is something to do. Apply thread, after a turn with work. */
void kvp_idx_ahead_note(struct kvp_idx_ahead *a);
void kvp_idx_ahead_close(struct kvp_idx_ahead *a);
#endif
