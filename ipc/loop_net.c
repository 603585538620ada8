#include <arpa/inet.h>
#include <errno.h>
#include <limits.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>
#include "ipc/loop_priv.h"

#define BACKLOG 4096
#define IP_TEXT_MAX 64

int kvp_addr_ip(struct kvp_addr *a, const char *ip, uint16_t port)
{
	struct kvp_addr out;
	struct sockaddr_in *v4 = (struct sockaddr_in *)&out.ss;
	struct sockaddr_in6 *v6 = (struct sockaddr_in6 *)&out.ss;
	char text[IP_TEXT_MAX];
	memset(&out, 0, sizeof(out));
	if (!ip || !*ip || strcmp(ip, "*") == 0)
		ip = "0.0.0.0";
	size_t len = strlen(ip);
	int v6_only = len > 2 && ip[0] == '[' && ip[len - 1] == ']';
	if (v6_only) {
		ip++;
		len -= 2;
	}
	if (len >= sizeof(text))
		return KVP_ERR_INVAL;
	memcpy(text, ip, len);
	text[len] = 0;
	if (!v6_only && inet_pton(AF_INET, text, &v4->sin_addr) == 1) {
		v4->sin_family = AF_INET;
		v4->sin_port = htons(port);
		out.len = sizeof(*v4);
	} else if (inet_pton(AF_INET6, text, &v6->sin6_addr) == 1) {
		v6->sin6_family = AF_INET6;
		v6->sin6_port = htons(port);
		out.len = sizeof(*v6);
	} else {
		return KVP_ERR_INVAL;
	}
	*a = out;
	return KVP_OK;
}

int kvp_addr_unix(struct kvp_addr *a, const char *path)
{
	struct sockaddr_un un = {.sun_family = AF_UNIX};
	size_t len = path ? strlen(path) : 0;
	if (!len || len >= sizeof(un.sun_path))
		return KVP_ERR_INVAL;
	memcpy(un.sun_path, path, len + 1);
	memset(a, 0, sizeof(*a));
	memcpy(&a->ss, &un, sizeof(un));
	a->len = sizeof(un);
	return KVP_OK;
}

/* Vanished hosts. */

/* A unix socket says no. */
static void keep_alive(int fd)
{
	const int on = 1, idle_s = KVP_LOOP_KEEP_IDLE_S;
	const int every_s = KVP_LOOP_KEEP_EVERY_S, cnt = KVP_LOOP_KEEP_CNT;
	setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle_s, sizeof(idle_s));
	setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &every_s, sizeof(every_s));
	setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &cnt, sizeof(cnt));
	setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof(on));
}

void kvp_listener_take_limit(struct kvp_listener *ls, uint64_t ms)
{
	const uint64_t least_ms = 1000 * (KVP_LOOP_KEEP_IDLE_S + KVP_LOOP_KEEP_EVERY_S * KVP_LOOP_KEEP_CNT);
	uint64_t most_ms = ms < least_ms ? least_ms : ms;
	unsigned v = most_ms > INT_MAX ? INT_MAX : (unsigned)most_ms;
	setsockopt(ls->fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &v, sizeof(v)); /* inherited, as keep-alive is */
}

/* Watches. */

int kvp_loop_watch_fd(
	struct kvp_loop *l, struct kvp_watch *w, int fd, void (*cb)(void *ctx, int fd), void *ctx)
{
	struct loop_slot *sl = kvp_loop_slot_new(l, LOOP_KIND_WATCH, w, fd);
	if (!sl)
		return KVP_ERR_SYS;
	w->loop = l;
	w->slot = sl->idx;
	w->fd = fd;
	w->cb = cb;
	w->ctx = ctx;
	l->be->arm(l, sl, LOOP_OP_POLL);
	return KVP_OK;
}

void kvp_loop_unwatch(struct kvp_watch *w)
{
	struct kvp_loop *l = w->loop;
	if (!l)
		return;
	w->loop = NULL;
	struct loop_slot *sl = l->slot[w->slot];
	sl->owner = NULL;
	l->be->drop(l, sl, LOOP_KIND_WATCH);
}

/* Listeners. */

static void backoff_end(void *ctx, struct kvp_timer *t)
{
	struct kvp_listener *ls = ctx;
	(void)t;
	ls->loop->be->arm(ls->loop, ls->loop->slot[ls->slot], LOOP_OP_ACCEPT);
}

int kvp_loop_ev_accept_failed(struct kvp_loop *l, struct loop_slot *sl)
{
	struct kvp_listener *ls = sl->owner;
	l->stat.accept_failed++;
	return kvp_timer_set(l, &ls->backoff, l->now_ns + LOOP_BACKOFF_NS, backoff_end, ls);
}

void kvp_loop_ev_accept(struct kvp_loop *l, struct loop_slot *sl, int fd)
{
	struct kvp_listener *ls = sl->owner;
	(void)l;
	ls->on_accept(ls->ctx, fd);
}

int kvp_loop_listen_fd(
	struct kvp_loop *l, struct kvp_listener *ls, int fd, void (*on_accept)(void *ctx, int fd), void *ctx)
{
	struct sockaddr_storage ss;
	socklen_t len = sizeof(ss);
	struct loop_slot *sl = NULL;
	if (getsockname(fd, (struct sockaddr *)&ss, &len) < 0 ||
		!(sl = kvp_loop_slot_new(l, LOOP_KIND_LISTENER, ls, fd)))
		return KVP_ERR_SYS;
	memset(ls, 0, sizeof(*ls));
	keep_alive(fd); /* which what it accepts inherits */
	if (ss.ss_family == AF_INET)
		ls->port = ntohs(((struct sockaddr_in *)&ss)->sin_port);
	else if (ss.ss_family == AF_INET6)
		ls->port = ntohs(((struct sockaddr_in6 *)&ss)->sin6_port);
	ls->loop = l;
	ls->slot = sl->idx;
	ls->fd = fd;
	ls->on_accept = on_accept;
	ls->ctx = ctx;
	l->be->arm(l, sl, LOOP_OP_ACCEPT);
	return KVP_OK;
}

int kvp_loop_listen_addr(struct kvp_loop *l, struct kvp_listener *ls, const struct kvp_addr *a, int flags,
	void (*on_accept)(void *ctx, int fd), void *ctx)
{
	int on = 1, fd = socket(a->ss.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0), rc = KVP_ERR_SYS;
	if (fd < 0)
		return KVP_ERR_SYS;
	if (a->ss.ss_family != AF_UNIX && setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)) < 0)
		goto out;
	if (flags & KVP_LISTEN_REUSEPORT && setsockopt(fd, SOL_SOCKET, SO_REUSEPORT, &on, sizeof(on)) < 0)
		goto out;
	if (bind(fd, (const struct sockaddr *)&a->ss, a->len) < 0 || listen(fd, BACKLOG) < 0)
		goto out;
	rc = kvp_loop_listen_fd(l, ls, fd, on_accept, ctx);
out:
	if (rc) {
		int err = errno;
		close(fd);
		errno = err;
	}
	return rc;
}

int kvp_loop_listen(struct kvp_loop *l, struct kvp_listener *ls, const char *ip, uint16_t port, int flags,
	void (*on_accept)(void *ctx, int fd), void *ctx)
{
	struct kvp_addr a;
	int rc = kvp_addr_ip(&a, ip, port);
	return rc ? rc : kvp_loop_listen_addr(l, ls, &a, flags, on_accept, ctx);
}

/* The descriptor may be shared with other processes that block in accept, so it is not made non-blocking; a
 * receive time-out bounds accept just as well when somebody else takes the last connection first. */
static void backlog_serve(struct kvp_listener *ls)
{
	struct timeval tv = {.tv_usec = 1000};
	setsockopt(ls->fd, SOL_SOCKET, SO_RCVTIMEO, &tv, sizeof(tv));
	for (int i = 0; i < BACKLOG; i++) {
		int fd = accept4(ls->fd, NULL, NULL, SOCK_CLOEXEC);
		if (fd < 0 && (errno == ECONNABORTED || errno == EINTR))
			continue;
		if (fd < 0)
			break;
		ls->on_accept(ls->ctx, fd);
	}
}

void kvp_listener_close(struct kvp_listener *ls, enum kvp_listener_end how)
{
	struct kvp_loop *l = ls->loop;
	if (!l)
		return;
	struct loop_slot *sl = l->slot[ls->slot];
	if (how == KVP_LISTENER_SERVE) {
		l->be->take(l, sl);
		backlog_serve(ls);
		l->be->take(l, sl);
	}
	kvp_timer_cancel(l, &ls->backoff);
	ls->loop = NULL;
	sl->owner = NULL;
	l->be->drop(l, sl, LOOP_KIND_LISTENER);
}

/* Sockets. */

void kvp_loop_ev_recv(struct loop_slot *sl, const char *data, int64_t len)
{
	struct kvp_sock *s = sl->owner;
	s->ops->on_recv(s->ctx, s, data, len);
}

void kvp_loop_ev_sent(struct kvp_loop *l, struct loop_slot *sl, int err)
{
	struct kvp_sock *s = sl->owner;
	char *buf = sl->send_buf;
	(void)l;
	sl->send_buf = NULL;
	s->ops->on_sent(s->ctx, s, buf, err);
}

void kvp_loop_ev_connect(struct kvp_loop *l, struct loop_slot *sl, int err)
{
	struct kvp_sock *s = sl->owner;
	(void)l;
	free(sl->addr);
	sl->addr = NULL;
	s->ops->on_connect(s->ctx, s, err);
}

int kvp_sock_open(struct kvp_loop *l, struct kvp_sock *s, int fd, const struct kvp_sock_ops *ops, void *ctx)
{
	struct loop_slot *sl = kvp_loop_slot_new(l, LOOP_KIND_SOCK, s, fd);
	int on = 1;
	if (!sl) {
		close(fd);
		return KVP_ERR_SYS;
	}
	setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on)); /* a unix socket says no */
	s->loop = l;
	s->ops = ops;
	s->ctx = ctx;
	s->slot = sl->idx;
	s->fd = fd;
	s->tx_bytes = 0;
	return KVP_OK;
}

int kvp_sock_connect(struct kvp_loop *l, struct kvp_sock *s, const struct kvp_addr *a,
	const struct kvp_sock_ops *ops, void *ctx)
{
	int fd = socket(a->ss.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
	struct kvp_addr *copy = malloc(sizeof(*copy));
	if (fd < 0 || !copy) {
		free(copy);
		if (fd >= 0)
			close(fd);
		return KVP_ERR_SYS;
	}
	*copy = *a;
	keep_alive(fd);
	int rc = kvp_sock_open(l, s, fd, ops, ctx);
	if (rc) {
		free(copy);
		return rc;
	}
	struct loop_slot *sl = l->slot[s->slot];
	sl->addr = copy;
	l->be->arm(l, sl, LOOP_OP_CONNECT);
	return KVP_OK;
}

void kvp_sock_recv_start(struct kvp_sock *s)
{
	struct loop_slot *sl = s->loop->slot[s->slot];
	if (sl->recv_on)
		return;
	sl->recv_on = 1;
	s->loop->be->arm(s->loop, sl, LOOP_OP_RECV);
}

void kvp_sock_recv_stop(struct kvp_sock *s)
{
	struct loop_slot *sl = s->loop->slot[s->slot];
	if (!sl->recv_on)
		return;
	sl->recv_on = 0;
	s->loop->be->recv_stop(s->loop, sl);
}

int kvp_sock_send(struct kvp_sock *s, char *buf, uint64_t off, uint64_t len)
{
	struct loop_slot *sl = s->loop->slot[s->slot];
	if (sl->send_buf)
		return KVP_ERR_AGAIN;
	sl->send_buf = buf;
	sl->send_off = off;
	sl->send_end = off + len;
	s->loop->be->arm(s->loop, sl, LOOP_OP_SEND);
	return KVP_OK;
}

int kvp_sock_watch_hup(struct kvp_sock *s, int hup)
{
	struct loop_slot *sl = s->loop->slot[s->slot];
	if (sl->hup == hup)
		return KVP_OK;
	sl->hup = (uint8_t)hup;
	return s->loop->be->hup(s->loop, sl);
}

void kvp_sock_shutdown(struct kvp_sock *s)
{
	shutdown(s->fd, SHUT_WR);
}

void kvp_sock_close(struct kvp_sock *s)
{
	struct kvp_loop *l = s->loop;
	if (!l)
		return;
	struct loop_slot *sl = l->slot[s->slot];
	s->loop = NULL;
	sl->owner = NULL;
	l->be->drop(l, sl, LOOP_KIND_SOCK);
}

void kvp_sock_reset(struct kvp_sock *s)
{
	struct linger lg = {.l_onoff = 1, .l_linger = 0};
	if (s->loop)
		setsockopt(s->fd, SOL_SOCKET, SO_LINGER, &lg, sizeof(lg));
	kvp_sock_close(s);
}
