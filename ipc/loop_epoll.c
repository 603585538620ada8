#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <unistd.h>
#include "ipc/loop_priv.h"

#define EVENTS_MAX 256

int kvp_loop_ep_update(struct kvp_loop *l, struct loop_slot *sl, uint32_t events)
{
	if (events == sl->ep_events)
		return KVP_OK;
	struct epoll_event ev = {.events = events, .data.u64 = loop_key(sl, LOOP_OP_POLL)};
	int op = events == EP_NONE ? EPOLL_CTL_DEL : sl->ep_events == EP_NONE ? EPOLL_CTL_ADD : EPOLL_CTL_MOD;
	if (epoll_ctl(l->epfd, op, sl->fd, &ev) < 0 && op != EPOLL_CTL_DEL)
		return KVP_ERR_SYS;
	sl->ep_events = events;
	return KVP_OK;
}

void kvp_loop_ep_hup(struct kvp_loop *l, struct loop_slot *sl, uint32_t events)
{
	int hup = events & (EPOLLHUP | EPOLLERR) ? KVP_SOCK_HUP | KVP_SOCK_RDHUP : 0;
	hup |= events & EPOLLRDHUP ? KVP_SOCK_RDHUP : 0;
	hup &= sl->hup;
	if (!hup)
		return;
	sl->hup = 0;
	l->be->hup(l, sl);
	struct kvp_sock *s = sl->owner;
	s->ops->on_hup(s->ctx, s, hup);
}

/* What the slot waits for, from its state. Nothing wanted: not registered, for errors are always reported. */
static int interest(struct kvp_loop *l, struct loop_slot *sl)
{
	uint32_t ev = 0;
	if (sl->recv_on || sl->flying & (1u << LOOP_OP_ACCEPT | 1u << LOOP_OP_POLL))
		ev |= EPOLLIN;
	if (sl->flying & (1u << LOOP_OP_SEND | 1u << LOOP_OP_CONNECT))
		ev |= EPOLLOUT;
	if (sl->hup & KVP_SOCK_RDHUP)
		ev |= EPOLLRDHUP;
	return kvp_loop_ep_update(l, sl, !ev && !sl->hup ? EP_NONE : ev);
}

static void try_add(struct kvp_loop *l, uint64_t key)
{
	if (l->try_cnt == l->try_cap) {
		uint32_t cap = l->try_cap ? l->try_cap * 2 : 64;
		uint64_t *t = realloc(l->try_list, cap * sizeof(*t));
		KVP_ASSERT(t);
		l->try_list = t;
		l->try_cap = cap;
	}
	l->try_list[l->try_cnt++] = key;
}

static void be_arm(struct kvp_loop *l, struct loop_slot *sl, enum loop_op op)
{
	int fl = fcntl(sl->fd, F_GETFL);
	if (op != LOOP_OP_POLL && op != LOOP_OP_SEND && !(fl & O_NONBLOCK))
		fcntl(sl->fd, F_SETFL, fl | O_NONBLOCK);
	if (op == LOOP_OP_RECV) {
		interest(l, sl);
		return;
	}
	if (op == LOOP_OP_CONNECT) {
		const struct sockaddr *sa = (const struct sockaddr *)&sl->addr->ss;
		sl->conn_err = connect(sl->fd, sa, sl->addr->len) < 0 ? -errno : 0;
		if (sl->conn_err != -EINPROGRESS) {
			try_add(l, loop_key(sl, op));
			return;
		}
	}
	if (op == LOOP_OP_SEND) {
		try_add(l, loop_key(sl, op));
		return;
	}
	sl->flying |= (uint8_t)(1u << op);
	interest(l, sl);
}

static void send_try(struct kvp_loop *l, struct loop_slot *sl)
{
	ssize_t n = send(sl->fd, sl->send_buf + sl->send_off, sl->send_end - sl->send_off,
		MSG_NOSIGNAL | MSG_DONTWAIT);
	int err = n < 0 ? -errno : 0;
	if (n > 0) {
		sl->send_off += (uint64_t)n;
		((struct kvp_sock *)sl->owner)->tx_bytes += (uint64_t)n;
	}
	if ((n >= 0 && sl->send_off < sl->send_end) || err == -EAGAIN || err == -EINTR) {
		sl->flying |= 1u << LOOP_OP_SEND;
		if (interest(l, sl) == KVP_OK)
			return;
		err = -errno;
	}
	sl->flying &= (uint8_t) ~(1u << LOOP_OP_SEND);
	interest(l, sl);
	kvp_loop_ev_sent(l, sl, err);
}

static int try_run(struct kvp_loop *l)
{
	uint32_t n = l->try_cnt; /* what callbacks add now is for the next turn */
	for (uint32_t i = 0; i < n; i++) {
		struct loop_slot *sl = kvp_loop_slot_at(l, l->try_list[i]);
		if (!sl || !sl->owner)
			continue;
		if ((l->try_list[i] & 15) == LOOP_OP_CONNECT)
			kvp_loop_ev_connect(l, sl, sl->conn_err);
		else if (sl->send_buf)
			send_try(l, sl);
	}
	for (uint32_t i = n; i < l->try_cnt; i++)
		l->try_list[i - n] = l->try_list[i];
	l->try_cnt -= n;
	return (int)n;
}

static void accept_some(struct kvp_loop *l, struct loop_slot *sl, uint64_t key)
{
	for (int i = 0; i < 64; i++) {
		int fd = accept4(sl->fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
		if (fd >= 0) {
			kvp_loop_ev_accept(l, sl, fd);
			if (kvp_loop_slot_at(l, key) && sl->owner)
				continue;
			return;
		}
		if (errno == ECONNABORTED || errno == EINTR)
			continue;
		if (errno == EAGAIN)
			return;
		break;
	}
	if (errno != EMFILE && errno != ENFILE && errno != ENOBUFS && errno != ENOMEM)
		return;
	sl->flying &= (uint8_t) ~(1u << LOOP_OP_ACCEPT);
	interest(l, sl);
	if (kvp_loop_ev_accept_failed(l, sl))
		be_arm(l, sl, LOOP_OP_ACCEPT);
}

static void recv_one(struct kvp_loop *l, struct loop_slot *sl)
{
	ssize_t n = recv(sl->fd, l->bufs, KVP_LOOP_RECV_BYTES, MSG_DONTWAIT);
	if (n < 0 && (errno == EAGAIN || errno == EINTR))
		return;
	int64_t res = n < 0 ? -errno : n;
	if (res <= 0) {
		sl->recv_on = 0;
		interest(l, sl);
	}
	kvp_loop_ev_recv(sl, l->bufs, res);
}

static void sock_event(struct kvp_loop *l, struct loop_slot *sl, uint64_t key, uint32_t ev)
{
	if (sl->flying & 1u << LOOP_OP_CONNECT) {
		int err = 0;
		socklen_t len = sizeof(err);
		if (!(ev & (EPOLLOUT | EPOLLERR | EPOLLHUP)))
			return;
		getsockopt(sl->fd, SOL_SOCKET, SO_ERROR, &err, &len);
		sl->flying &= (uint8_t) ~(1u << LOOP_OP_CONNECT);
		interest(l, sl);
		kvp_loop_ev_connect(l, sl, -err);
		return;
	}
	if (sl->flying & 1u << LOOP_OP_SEND && ev & (EPOLLOUT | EPOLLERR | EPOLLHUP))
		send_try(l, sl);
	if (!kvp_loop_slot_at(l, key) || !sl->owner)
		return;
	if (sl->recv_on && ev & (EPOLLIN | EPOLLERR | EPOLLHUP))
		recv_one(l, sl);
	else if (sl->hup)
		kvp_loop_ep_hup(l, sl, ev);
}

static int be_wait(struct kvp_loop *l, uint64_t timeout_ns)
{
	struct epoll_event ev[EVENTS_MAX];
	int tried = try_run(l), ms = -1;
	if (tried || l->try_cnt)
		ms = 0;
	else if (timeout_ns != KVP_LOOP_FOREVER)
		ms = timeout_ns > 3600000000000u ? 3600000 : (int)((timeout_ns + 999999) / 1000000);
	int n = epoll_wait(l->epfd, ev, EVENTS_MAX, ms);
	l->now_ns = l->wake_ns = kvp_loop_clock_ns();
	if (n < 0)
		return errno == EINTR ? tried : KVP_ERR_SYS;
	for (int i = 0; i < n; i++) {
		uint64_t key = ev[i].data.u64;
		struct loop_slot *sl = kvp_loop_slot_at(l, key);
		if (!sl || !sl->owner)
			continue;
		if (sl->kind == LOOP_KIND_SOCK) {
			sock_event(l, sl, key, ev[i].events);
		} else if (sl->kind == LOOP_KIND_LISTENER) {
			accept_some(l, sl, key);
		} else {
			struct kvp_watch *w = sl->owner;
			w->cb(w->ctx, w->fd);
		}
	}
	return tried + n;
}

static int be_open(struct kvp_loop *l, uint32_t entries)
{
	(void)entries;
	l->bufs = malloc(KVP_LOOP_RECV_BYTES);
	l->epfd = epoll_create1(EPOLL_CLOEXEC);
	if (l->bufs && l->epfd >= 0)
		return KVP_OK;
	free(l->bufs);
	l->bufs = NULL;
	return KVP_ERR_SYS;
}

static void be_recv_stop(struct kvp_loop *l, struct loop_slot *sl)
{
	interest(l, sl);
}

static int be_hup(struct kvp_loop *l, struct loop_slot *sl)
{
	return interest(l, sl);
}

static void be_drop(struct kvp_loop *l, struct loop_slot *sl, enum loop_kind kind)
{
	kvp_loop_ep_update(l, sl, EP_NONE);
	if (kind != LOOP_KIND_WATCH)
		close(sl->fd);
	sl->flying = 0;
	kvp_loop_slot_put(l, sl);
}

static void be_take(struct kvp_loop *l, struct loop_slot *sl)
{
	(void)l;
	(void)sl;
}

static void be_close(struct kvp_loop *l)
{
	close(l->epfd);
}

const struct loop_backend kvp_loop_be_epoll = {
	be_open, be_close, be_wait, be_arm, be_recv_stop, be_hup, be_drop, be_take};
