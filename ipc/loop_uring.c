#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <unistd.h>
#include "ipc/loop_priv.h"

#define BUF_GROUP 0
#define SQE_TRIES_MAX 1000  /* submissions refused in a row (no kernel memory) before giving up */
#define CLOSE_WAITS_MAX 100 /* of 10 ms: time the kernel gets to end cancelled operations */
#define SEND_MAX_BYTES (1u << 30)

/* The ring starts disabled and belongs to the thread that enables it: the one that runs the loop. (The
 * packaged library does not export its own function for this.) */
static int ring_enable(struct kvp_loop *l)
{
	if (l->enabled)
		return KVP_OK;
	l->enabled = 1;
	int rc = io_uring_register((unsigned)l->ring.ring_fd, IORING_REGISTER_ENABLE_RINGS, NULL, 0);
	if (rc >= 0)
		return KVP_OK;
	errno = -rc;
	return KVP_ERR_SYS;
}

static struct io_uring_sqe *sqe_get(struct kvp_loop *l)
{
	struct io_uring_sqe *sqe = io_uring_get_sqe(&l->ring);
	for (int i = 0; !sqe && i < SQE_TRIES_MAX; i++) {
		ring_enable(l);
		io_uring_submit(&l->ring);
		sqe = io_uring_get_sqe(&l->ring);
	}
	KVP_ASSERT(sqe);
	return sqe;
}

static void fly(struct kvp_loop *l, struct loop_slot *sl, enum loop_op op, struct io_uring_sqe *sqe)
{
	io_uring_sqe_set_data64(sqe, loop_key(sl, op));
	sl->flying |= (uint8_t)(1u << op);
	l->flying++;
}

static void land(struct kvp_loop *l, struct loop_slot *sl, enum loop_op op)
{
	sl->flying &= (uint8_t) ~(1u << op);
	l->flying--;
	if (!sl->owner && !sl->flying)
		kvp_loop_slot_put(l, sl);
}

static void recv_arm(struct kvp_loop *l, struct loop_slot *sl, unsigned ioprio)
{
	struct io_uring_sqe *sqe = sqe_get(l);
	io_uring_prep_recv(sqe, sl->fd, NULL, KVP_LOOP_RECV_BYTES, 0);
	sqe->flags |= IOSQE_BUFFER_SELECT;
	sqe->buf_group = BUF_GROUP;
	sqe->ioprio = (uint16_t)ioprio;
	fly(l, sl, LOOP_OP_RECV, sqe);
}

static void be_arm(struct kvp_loop *l, struct loop_slot *sl, enum loop_op op)
{
	if (op == LOOP_OP_RECV) {
		if (!(sl->flying & 1u << LOOP_OP_RECV))
			recv_arm(l, sl, 0);
		return;
	}
	struct io_uring_sqe *sqe = sqe_get(l);
	if (op == LOOP_OP_SEND) {
		uint64_t len = sl->send_end - sl->send_off;
		len = len < SEND_MAX_BYTES ? len : SEND_MAX_BYTES;
		io_uring_prep_send(sqe, sl->fd, sl->send_buf + sl->send_off, len, MSG_NOSIGNAL | MSG_WAITALL);
	} else if (op == LOOP_OP_CONNECT) {
		io_uring_prep_connect(sqe, sl->fd, (struct sockaddr *)&sl->addr->ss, sl->addr->len);
	} else if (op == LOOP_OP_ACCEPT) {
		if (l->multishot)
			io_uring_prep_multishot_accept(sqe, sl->fd, NULL, NULL, SOCK_CLOEXEC);
		else
			io_uring_prep_accept(sqe, sl->fd, NULL, NULL, SOCK_CLOEXEC);
	} else {
		io_uring_prep_poll_add(sqe, sl->fd, POLLIN);
	}
	fly(l, sl, op, sqe);
}

static void buf_give(struct kvp_loop *l, unsigned bid)
{
	io_uring_buf_ring_add(l->br, l->bufs + (size_t)bid * KVP_LOOP_RECV_BYTES, KVP_LOOP_RECV_BYTES,
		(unsigned short)bid, io_uring_buf_ring_mask(LOOP_BUF_CNT), 0);
	io_uring_buf_ring_advance(l->br, 1);
}

static int ring_setup(struct kvp_loop *l, uint32_t entries)
{
	/* Newest first: the kernel names no reason but EINVAL for a flag that it does not know. */
	static const unsigned flags[] = {
		IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN | IORING_SETUP_R_DISABLED,
		IORING_SETUP_COOP_TASKRUN | IORING_SETUP_R_DISABLED,
	};
	int rc = -EINVAL;
	for (unsigned i = 0; i < sizeof(flags) / sizeof(flags[0]) && rc == -EINVAL; i++) {
		struct io_uring_params p;
		memset(&p, 0, sizeof(p));
		p.flags = flags[i] | IORING_SETUP_CQSIZE | IORING_SETUP_CLAMP;
		p.cq_entries = entries * 4;
		rc = io_uring_queue_init_params(entries, &l->ring, &p);
		if (rc == 0 && (!(p.features & IORING_FEAT_EXT_ARG) || !(p.features & IORING_FEAT_NODROP))) {
			io_uring_queue_exit(&l->ring);
			rc = -ENOSYS;
		}
	}
	return rc;
}

static int be_open(struct kvp_loop *l, uint32_t entries)
{
	size_t ring_bytes = LOOP_BUF_CNT * sizeof(struct io_uring_buf);
	int rc = ring_setup(l, entries);
	if (rc) {
		errno = -rc;
		return KVP_ERR_SYS;
	}
	io_uring_ring_dontfork(&l->ring);
	l->br = mmap(NULL, ring_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	l->bufs = malloc((size_t)LOOP_BUF_CNT * KVP_LOOP_RECV_BYTES);
	if (l->br == MAP_FAILED || !l->bufs) {
		rc = -ENOMEM;
		goto fail;
	}
	struct io_uring_buf_reg reg = {
		.ring_addr = (uint64_t)(uintptr_t)l->br, .ring_entries = LOOP_BUF_CNT, .bgid = BUF_GROUP};
	rc = io_uring_register_buf_ring(&l->ring, &reg, 0);
	if (rc)
		goto fail;
	io_uring_buf_ring_init(l->br);
	for (unsigned i = 0; i < LOOP_BUF_CNT; i++)
		buf_give(l, i);
	l->multishot = 1;
	return KVP_OK;
fail:
	io_uring_queue_exit(&l->ring);
	if (l->br != MAP_FAILED)
		munmap(l->br, ring_bytes);
	free(l->bufs);
	l->bufs = NULL;
	errno = -rc;
	return KVP_ERR_SYS;
}

/* The ring waits only on blocking descriptors; one made elsewhere may be non-blocking. */
static void blocking(int fd)
{
	int fl = fcntl(fd, F_GETFL);
	if (fl >= 0 && fl & O_NONBLOCK)
		fcntl(fd, F_SETFL, fl & ~O_NONBLOCK);
}

static void ev_recv(struct kvp_loop *l, struct loop_slot *sl, int res, unsigned flags)
{
	unsigned bid = flags >> IORING_CQE_BUFFER_SHIFT;
	uint64_t key = loop_key(sl, LOOP_OP_RECV);
	land(l, sl, LOOP_OP_RECV);
	if (!kvp_loop_slot_at(l, key) || !sl->owner)
		goto give;
	unsigned next = flags & IORING_CQE_F_SOCK_NONEMPTY ? 0 : IORING_RECVSEND_POLL_FIRST;
	if (res == -ENOBUFS || res == -EINTR || res == -EAGAIN) {
		l->stat.recv_nobufs += res == -ENOBUFS;
		if (res == -EAGAIN)
			blocking(sl->fd);
		next = 0;
	} else {
		if (res <= 0)
			sl->recv_on = 0;
		const char *data =
			flags & IORING_CQE_F_BUFFER ? l->bufs + (size_t)bid * KVP_LOOP_RECV_BYTES : "";
		kvp_loop_ev_recv(sl, data, res);
	}
	if (kvp_loop_slot_at(l, key) && sl->owner && sl->recv_on && !(sl->flying & 1u << LOOP_OP_RECV))
		recv_arm(l, sl, next);
give:
	if (flags & IORING_CQE_F_BUFFER)
		buf_give(l, bid);
}

static void ev_send(struct kvp_loop *l, struct loop_slot *sl, int res)
{
	int gone = !sl->owner;
	land(l, sl, LOOP_OP_SEND);
	if (gone)
		return;
	if (res > 0) {
		sl->send_off += (uint64_t)res;
		((struct kvp_sock *)sl->owner)->tx_bytes += (uint64_t)res;
	}
	if (res == -EAGAIN)
		blocking(sl->fd);
	if ((res >= 0 && sl->send_off < sl->send_end) || res == -EINTR || res == -EAGAIN)
		be_arm(l, sl, LOOP_OP_SEND);
	else
		kvp_loop_ev_sent(l, sl, res < 0 ? res : 0);
}

static void ev_accept(struct kvp_loop *l, struct loop_slot *sl, int res, unsigned flags)
{
	uint64_t key = loop_key(sl, LOOP_OP_ACCEPT);
	int gone = !sl->owner;
	if (!(flags & IORING_CQE_F_MORE))
		land(l, sl, LOOP_OP_ACCEPT);
	if (gone) {
		if (res >= 0)
			close(res);
		return;
	}
	if (res >= 0)
		kvp_loop_ev_accept(l, sl, res);
	else if (res == -EINVAL && l->multishot)
		l->multishot = 0; /* not known to this kernel: one by one */
	else if (res == -EAGAIN)
		blocking(sl->fd);
	else if (res != -ECONNABORTED && res != -EINTR) {
		if (!(sl->flying & 1u << LOOP_OP_ACCEPT) && kvp_loop_ev_accept_failed(l, sl) == KVP_OK)
			return;
	}
	if (kvp_loop_slot_at(l, key) && sl->owner && !(sl->flying & 1u << LOOP_OP_ACCEPT))
		be_arm(l, sl, LOOP_OP_ACCEPT);
}

static void ev_poll(struct kvp_loop *l, struct loop_slot *sl, int res)
{
	uint64_t key = loop_key(sl, LOOP_OP_POLL);
	int gone = !sl->owner;
	land(l, sl, LOOP_OP_POLL);
	if (gone || res < 0)
		return;
	struct kvp_watch *w = sl->owner;
	w->cb(w->ctx, w->fd);
	if (kvp_loop_slot_at(l, key) && sl->owner && !(sl->flying & 1u << LOOP_OP_POLL))
		be_arm(l, sl, LOOP_OP_POLL);
}

static void event(struct kvp_loop *l, uint64_t key, int res, unsigned flags)
{
	struct loop_slot *sl = kvp_loop_slot_at(l, key);
	if (!sl)
		return; /* cancels and closes */
	switch ((enum loop_op)(key & 15)) {
	case LOOP_OP_RECV:
		ev_recv(l, sl, res, flags);
		return;
	case LOOP_OP_SEND:
		ev_send(l, sl, res);
		return;
	case LOOP_OP_ACCEPT:
		ev_accept(l, sl, res, flags);
		return;
	case LOOP_OP_POLL:
		ev_poll(l, sl, res);
		return;
	case LOOP_OP_CONNECT: {
		int gone = !sl->owner;
		land(l, sl, LOOP_OP_CONNECT);
		if (!gone)
			kvp_loop_ev_connect(l, sl, res);
		return;
	}
	case LOOP_OP_NONE:
		return;
	}
}

static int be_wait(struct kvp_loop *l, uint64_t timeout_ns)
{
	struct io_uring_cqe *cqe = NULL;
	int rc, n = 0;
	if (ring_enable(l))
		return KVP_ERR_SYS;
	if (timeout_ns == 0 || io_uring_cq_ready(&l->ring)) {
		rc = io_uring_submit_and_get_events(&l->ring);
	} else if (timeout_ns == KVP_LOOP_FOREVER) {
		rc = io_uring_submit_and_wait(&l->ring, 1);
	} else {
		struct __kernel_timespec ts = {.tv_sec = (int64_t)(timeout_ns / 1000000000u),
			.tv_nsec = (int64_t)(timeout_ns % 1000000000u)};
		rc = io_uring_submit_and_wait_timeout(&l->ring, &cqe, 1, &ts, NULL);
	}
	l->now_ns = l->wake_ns = kvp_loop_clock_ns();
	if (rc < 0 && rc != -ETIME && rc != -EINTR && rc != -EBUSY && rc != -EAGAIN) {
		errno = -rc;
		return KVP_ERR_SYS;
	}
	/* What arrives while callbacks run waits for the next turn: timers get their chance. */
	for (unsigned ready = io_uring_cq_ready(&l->ring); ready; ready--) {
		cqe = NULL;
		if (io_uring_peek_cqe(&l->ring, &cqe) || !cqe)
			break;
		uint64_t key = cqe->user_data;
		int res = cqe->res;
		unsigned flags = cqe->flags;
		io_uring_cqe_seen(&l->ring, cqe);
		event(l, key, res, flags);
		n++;
	}
	return n;
}

static void be_recv_stop(struct kvp_loop *l, struct loop_slot *sl)
{
	(void)l;
	(void)sl; /* the receive in flight, if any, is the one more that the contract allows */
}

static void hup_events(void *ctx, int fd)
{
	struct kvp_loop *l = ctx;
	struct epoll_event ev[64];
	int n = epoll_wait(fd, ev, 64, 0);
	for (int i = 0; i < n; i++) {
		struct loop_slot *sl = kvp_loop_slot_at(l, ev[i].data.u64);
		if (sl && sl->owner)
			kvp_loop_ep_hup(l, sl, ev[i].events);
	}
}

/* A ring's poll always reports RDHUP too, which is true for ever behind a FIN; epoll reports what it is asked
 * for. Few sockets are watched this way at a time. */
static int be_hup(struct kvp_loop *l, struct loop_slot *sl)
{
	if (l->epfd < 0) {
		if (!sl->hup)
			return KVP_OK;
		l->epfd = epoll_create1(EPOLL_CLOEXEC);
		if (l->epfd < 0)
			return KVP_ERR_SYS;
		int rc = kvp_loop_watch_fd(l, &l->ep_watch, l->epfd, hup_events, l);
		if (rc)
			return rc;
	}
	return kvp_loop_ep_update(l, sl, !sl->hup ? EP_NONE : sl->hup & KVP_SOCK_RDHUP ? EPOLLRDHUP : 0);
}

static void be_drop(struct kvp_loop *l, struct loop_slot *sl, enum loop_kind kind)
{
	kvp_loop_ep_update(l, sl, EP_NONE);
	for (unsigned op = LOOP_OP_RECV; op <= LOOP_OP_POLL; op++) {
		if (!(sl->flying & 1u << op))
			continue;
		struct io_uring_sqe *sqe = sqe_get(l);
		io_uring_prep_cancel64(sqe, loop_key(sl, op), 0);
		io_uring_sqe_set_data64(sqe, 0);
	}
	/* By the ring as well: operations on this number that wait for submission must come before. */
	if (kind != LOOP_KIND_WATCH) {
		struct io_uring_sqe *sqe = sqe_get(l);
		io_uring_prep_close(sqe, sl->fd);
		io_uring_sqe_set_data64(sqe, 0);
	}
	if (!sl->flying)
		kvp_loop_slot_put(l, sl);
}

static void be_take(struct kvp_loop *l, struct loop_slot *sl)
{
	struct io_uring_cqe *cqe;
	unsigned head, cnt = 0;
	int fd[64];
	io_uring_for_each_cqe(&l->ring, head, cqe)
	{
		if (cnt == 64)
			break;
		if (cqe->user_data != loop_key(sl, LOOP_OP_ACCEPT) || cqe->res < 0)
			continue;
		fd[cnt++] = cqe->res;
		cqe->res = -EAGAIN; /* seen again by ev_accept, which finds nothing to close */
	}
	for (unsigned i = 0; i < cnt; i++)
		kvp_loop_ev_accept(l, sl, fd[i]);
}

static void be_close(struct kvp_loop *l)
{
	for (int i = 0; i == 0 || (l->flying && i < CLOSE_WAITS_MAX); i++)
		if (be_wait(l, i ? 10000000 : 0) < 0)
			break;
	io_uring_queue_exit(&l->ring);
	munmap(l->br, LOOP_BUF_CNT * sizeof(struct io_uring_buf));
	if (l->epfd >= 0)
		close(l->epfd);
}

const struct loop_backend kvp_loop_be_uring = {
	be_open, be_close, be_wait, be_arm, be_recv_stop, be_hup, be_drop, be_take};
