#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#include "ipc/loop_priv.h"

#define DEFER_ROUNDS_MAX 16 /* calls that defer each other again and again must not hold up the kernel */

uint64_t kvp_loop_clock_ns(void)
{
	struct timespec ts;
	clock_gettime(CLOCK_MONOTONIC, &ts);
	return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

struct loop_slot *kvp_loop_slot_at(struct kvp_loop *l, uint64_t key)
{
	uint32_t idx = (uint32_t)(key >> 4) & (LOOP_SLOT_MAX - 1);
	if (!(key & 15) || idx >= l->slot_cnt || l->slot[idx]->gen != key >> 32)
		return NULL;
	return l->slot[idx]->kind == LOOP_KIND_FREE ? NULL : l->slot[idx];
}

/* Slots are allocated one by one so that their addresses stay while callbacks make the table grow. */
static struct loop_slot *slot_grow(struct kvp_loop *l)
{
	if (l->slot_cnt == l->slot_cap) {
		uint32_t cap = l->slot_cap ? l->slot_cap * 2 : 64;
		struct loop_slot **t = cap > LOOP_SLOT_MAX ? NULL : realloc(l->slot, cap * sizeof(*t));
		if (!t)
			return NULL;
		l->slot = t;
		l->slot_cap = cap;
	}
	struct loop_slot *sl = calloc(1, sizeof(*sl));
	if (!sl)
		return NULL;
	sl->idx = l->slot_cnt;
	l->slot[l->slot_cnt++] = sl;
	return sl;
}

struct loop_slot *kvp_loop_slot_new(struct kvp_loop *l, enum loop_kind kind, void *owner, int fd)
{
	struct loop_slot *sl;
	if (l->slot_free) {
		sl = l->slot[l->slot_free - 1];
		l->slot_free = sl->next_free;
	} else if (!(sl = slot_grow(l))) {
		errno = ENOMEM;
		return NULL;
	}
	uint32_t gen = sl->gen + 1, idx = sl->idx;
	memset(sl, 0, sizeof(*sl));
	sl->gen = gen;
	sl->idx = idx;
	sl->kind = (uint8_t)kind;
	sl->owner = owner;
	sl->fd = fd;
	sl->ep_events = EP_NONE;
	return sl;
}

void kvp_loop_slot_put(struct kvp_loop *l, struct loop_slot *sl)
{
	free(sl->send_buf);
	free(sl->addr);
	sl->send_buf = NULL;
	sl->addr = NULL;
	sl->kind = LOOP_KIND_FREE;
	sl->owner = NULL;
	sl->next_free = l->slot_free;
	l->slot_free = sl->idx + 1;
}

int kvp_loop_open_backend(struct kvp_loop **out, uint32_t entries, enum kvp_loop_backend be)
{
	struct kvp_loop *l = calloc(1, sizeof(*l));
	if (!l)
		return KVP_ERR_SYS;
	l->epfd = -1;
	l->defer_tail = &l->defer;
	const char *env = getenv("KVPICK_LOOP");
	if (be == KVP_LOOP_AUTO && env && strcmp(env, "epoll") == 0)
		be = KVP_LOOP_EPOLL;
	int rc = KVP_ERR_SYS;
	if (be != KVP_LOOP_EPOLL) {
		l->be = &kvp_loop_be_uring;
		rc = l->be->open(l, entries ? entries : 1024);
	}
	if (rc && be != KVP_LOOP_URING) {
		l->be = &kvp_loop_be_epoll;
		rc = l->be->open(l, entries);
	}
	if (rc) {
		int err = errno;
		free(l);
		errno = err;
		return rc;
	}
	l->now_ns = l->wake_ns = kvp_loop_clock_ns();
	*out = l;
	return KVP_OK;
}

int kvp_loop_open(struct kvp_loop **out, uint32_t entries)
{
	return kvp_loop_open_backend(out, entries, KVP_LOOP_AUTO);
}

void kvp_loop_close(struct kvp_loop *l)
{
	if (!l)
		return;
	for (uint32_t i = 0; i < l->slot_cnt; i++) {
		struct loop_slot *sl = l->slot[i];
		if (sl->kind == LOOP_KIND_FREE || !sl->owner)
			continue;
		sl->owner = NULL;
		l->be->drop(l, sl, sl->kind);
	}
	l->be->close(l);
	/* Still flying after the back end's bounded wait: its memory stays, the kernel may write to it. */
	if (!l->flying)
		free(l->bufs);
	for (uint32_t i = 0; i < l->slot_cnt; i++) {
		struct loop_slot *sl = l->slot[i];
		if (sl->kind != LOOP_KIND_FREE && sl->flying)
			continue;
		free(sl->send_buf);
		free(sl->addr);
		free(sl);
	}
	free(l->slot);
	free(l->heap);
	free(l->try_list);
	free(l);
}

enum kvp_loop_backend kvp_loop_backend_of(const struct kvp_loop *l)
{
	return l->be == &kvp_loop_be_uring ? KVP_LOOP_URING : KVP_LOOP_EPOLL;
}

uint64_t kvp_loop_now_ns(const struct kvp_loop *l)
{
	return l->now_ns;
}

void kvp_loop_stat_take(struct kvp_loop *l, struct kvp_loop_stat *out)
{
	*out = l->stat;
	l->stat.turn_max_ns = 0;
}

void kvp_loop_before_sleep(struct kvp_loop *l, int (*hook)(void *ctx), void *ctx)
{
	l->sleep_hook = hook;
	l->sleep_ctx = ctx;
}

void kvp_loop_defer(struct kvp_loop *l, struct kvp_defer *d, void (*cb)(void *ctx), void *ctx)
{
	d->cb = cb;
	d->ctx = ctx;
	if (d->prev)
		return;
	d->loop = l;
	d->next = NULL;
	d->prev = l->defer_tail;
	*l->defer_tail = d;
	l->defer_tail = &d->next;
}

void kvp_loop_defer_cancel(struct kvp_defer *d)
{
	if (!d->prev)
		return;
	*d->prev = d->next;
	if (d->next)
		d->next->prev = d->prev;
	else
		d->loop->defer_tail = d->prev;
	d->prev = NULL;
}

/* Those set by the calls of one round run in the next. */
static void defer_run(struct kvp_loop *l)
{
	for (int i = 0; l->defer && i < DEFER_ROUNDS_MAX; i++) {
		struct kvp_defer end = {
			0}; /* marks the end of the round; its neighbours may be cancelled freely */
		kvp_loop_defer(l, &end, NULL, NULL);
		for (struct kvp_defer *d; (d = l->defer) != &end;) {
			kvp_loop_defer_cancel(d);
			d->cb(d->ctx);
		}
		kvp_loop_defer_cancel(&end);
	}
}

/* Binary heap on key_ns. A timer that is set to a later time keeps its key: when the key comes up it is put
 * back under the wanted deadline. That makes "push the idle time-out on" free. */
static void heap_put(struct kvp_loop *l, uint32_t i, struct kvp_timer *t)
{
	l->heap[i] = t;
	t->pos = i + 1;
}

static void heap_up(struct kvp_loop *l, uint32_t i, struct kvp_timer *t)
{
	for (; i && l->heap[(i - 1) / 2]->key_ns > t->key_ns; i = (i - 1) / 2)
		heap_put(l, i, l->heap[(i - 1) / 2]);
	heap_put(l, i, t);
}

static void heap_down(struct kvp_loop *l, uint32_t i, struct kvp_timer *t)
{
	for (uint32_t c; (c = 2 * i + 1) < l->heap_cnt; i = c) {
		if (c + 1 < l->heap_cnt && l->heap[c + 1]->key_ns < l->heap[c]->key_ns)
			c++;
		if (l->heap[c]->key_ns >= t->key_ns)
			break;
		heap_put(l, i, l->heap[c]);
	}
	heap_put(l, i, t);
}

int kvp_timer_set(struct kvp_loop *l, struct kvp_timer *t, uint64_t deadline_ns,
	void (*cb)(void *ctx, struct kvp_timer *t), void *ctx)
{
	t->cb = cb;
	t->ctx = ctx;
	t->deadline_ns = deadline_ns;
	if (t->pos) {
		if (deadline_ns < t->key_ns) {
			t->key_ns = deadline_ns;
			heap_up(l, t->pos - 1, t);
		}
		return KVP_OK;
	}
	if (l->heap_cnt == l->heap_cap) {
		uint32_t cap = l->heap_cap ? l->heap_cap * 2 : 64;
		struct kvp_timer **h = realloc(l->heap, cap * sizeof(struct kvp_timer *));
		if (!h)
			return KVP_ERR_SYS;
		l->heap = h;
		l->heap_cap = cap;
	}
	t->key_ns = deadline_ns;
	heap_up(l, l->heap_cnt++, t);
	return KVP_OK;
}

void kvp_timer_cancel(struct kvp_loop *l, struct kvp_timer *t)
{
	if (!t->pos)
		return;
	uint32_t i = t->pos - 1;
	struct kvp_timer *last = l->heap[--l->heap_cnt];
	t->pos = 0;
	if (last == t)
		return;
	if (i && l->heap[(i - 1) / 2]->key_ns > last->key_ns)
		heap_up(l, i, last);
	else
		heap_down(l, i, last);
}

static int timers_run(struct kvp_loop *l)
{
	int n = 0;
	/* A callback that sets itself to "now" again must not keep the turn for ever. */
	for (uint32_t most = l->heap_cnt * 2 + 16; most && l->heap_cnt && l->heap[0]->key_ns <= l->now_ns;
		most--) {
		struct kvp_timer *t = l->heap[0];
		if (t->deadline_ns > t->key_ns) { /* first to its place, also when both are due: order */
			t->key_ns = t->deadline_ns;
			heap_down(l, 0, t);
			continue;
		}
		kvp_timer_cancel(l, t);
		n++;
		t->cb(t->ctx, t);
	}
	l->stat.timers += (uint64_t)n;
	return n;
}

int kvp_loop_run_once(struct kvp_loop *l, uint64_t timeout_ns)
{
	defer_run(l);
	if (l->defer || (l->sleep_hook && l->sleep_hook(l->sleep_ctx)) || l->defer || l->stop)
		timeout_ns = 0;
	uint64_t now = kvp_loop_clock_ns();
	if (now - l->wake_ns > l->stat.turn_max_ns)
		l->stat.turn_max_ns = now - l->wake_ns;
	if (l->heap_cnt) {
		uint64_t key = l->heap[0]->key_ns, left = key > now ? key - now : 0;
		timeout_ns = left < timeout_ns ? left : timeout_ns;
	}
	int n = l->be->wait(l, timeout_ns);
	if (n < 0)
		return n;
	l->stat.turns++;
	l->stat.events += (uint64_t)n;
	n += timers_run(l);
	defer_run(l);
	return n;
}

int kvp_loop_run(struct kvp_loop *l)
{
	l->wake_ns = kvp_loop_clock_ns();
	while (!l->stop) {
		int rc = kvp_loop_run_once(l, KVP_LOOP_FOREVER);
		if (rc < 0)
			return rc;
	}
	l->stop = 0;
	return KVP_OK;
}

void kvp_loop_stop(struct kvp_loop *l)
{
	l->stop = 1;
}
