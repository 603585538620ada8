/* daemons/indexer/ahead.c — touches memory ahead of the apply thread. */
#include "daemons/indexer/ahead.h"

#include <kvpick/atomic.h>
#include <kvpick/err.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

static void *thread_main(void *arg)
{
	struct kvp_idx_ahead *a = arg;
	uint64_t n;
	while (!kvp_ld_acq_u32(&a->stop)) {
		if (read(a->wake_fd, &n, sizeof(n)) != (ssize_t)sizeof(n))
			continue;
		/* Before the marks are read: what is noted later wakes again. */
		kvp_xchg_ar_u32(&a->is_awake, 0);
		kvp_ctr_add_mw(a->ctr, KVP_CTR_RADIX_TOUCHED, kvp_radix_ahead_run(a->mem));
	}
	return NULL;
}

int kvp_idx_ahead_open(struct kvp_idx_ahead *a, struct kvp_radix_w *w, enum kvp_radix_huge huge,
	struct kvp_ctr_column_shm *ctr)
{
	memset(a, 0, sizeof(*a));
	a->ctr = ctr;
	a->wake_fd = eventfd(0, EFD_CLOEXEC);
	if (a->wake_fd < 0)
		return KVP_ERR_SYS;
	int rc = kvp_radix_ahead_open(w, huge, &a->mem);
	if (!rc && pthread_create(&a->tid, NULL, thread_main, a)) {
		kvp_radix_ahead_close(a->mem);
		rc = KVP_ERR_SYS;
	}
	if (rc) {
		close(a->wake_fd);
		a->mem = NULL;
		return rc;
	}
	kvp_ctr_set(ctr, KVP_CTR_RADIX_HUGE, (uint64_t)kvp_radix_ahead_huge(a->mem));
	kvp_idx_ahead_note(a);
	return KVP_OK;
}

static void wake(struct kvp_idx_ahead *a)
{
	uint64_t one = 1;
	ssize_t n = write(a->wake_fd, &one, sizeof(one));
	(void)n; /* a full eventfd wakes as well */
}

void kvp_idx_ahead_note(struct kvp_idx_ahead *a)
{
	if (a->mem && kvp_radix_ahead_due(a->mem) && !kvp_ld_rlx_u32(&a->is_awake)) {
		kvp_xchg_ar_u32(&a->is_awake, 1);
		wake(a);
	}
}

void kvp_idx_ahead_close(struct kvp_idx_ahead *a)
{
	if (!a->mem)
		return;
	kvp_st_rel_u32(&a->stop, 1);
	wake(a);
	pthread_join(a->tid, NULL);
	kvp_radix_ahead_close(a->mem);
	close(a->wake_fd);
	a->mem = NULL;
}
