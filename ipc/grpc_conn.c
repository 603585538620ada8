/* ipc/grpc_conn.c - how many connections the gRPC core has, and a limit on them.
 *
 * The core of this version has no such limit. It offers a hook on every accepted socket (socket mutator),
 * whose structs are not in the installed headers; they are declared here as they are in version 29 (gRPC
 * 1.51), and with any other version the hook is left out and connections are neither counted nor limited.
 * The hook gets the descriptor. Refusing in the core's own way would end the listener, so a connection over
 * the limit is shut down and let through: the core reads its end and drops it. Of the others a duplicate is
 * kept in an epoll set, which tells when the connection is gone: the core shuts a socket down before it
 * closes it. */
#include "ipc/grpc_priv.h"

#include <kvpick/err.h>
#include <fcntl.h>
#include <grpc/support/sync.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#define CORE_VERSION "29."

struct socket_info {
	int fd;
	int usage;
};
enum { USAGE_SERVER_CONNECTION = 2 };
struct socket_hook;
struct socket_hook_ops {
	_Bool (*on_fd)(int fd, struct socket_hook *h);
	int (*compare)(struct socket_hook *a, struct socket_hook *b);
	void (*destroy)(struct socket_hook *h);
	_Bool (*on_socket)(const struct socket_info *info, struct socket_hook *h);
};
struct socket_hook {
	const struct socket_hook_ops *ops;
	gpr_refcount refs;
	struct kvp_grpc *g; /* ours, behind what the core knows */
};

int kvp_grpc_caps_connections(void)
{
	return strncmp(grpc_version_string(), CORE_VERSION, strlen(CORE_VERSION)) == 0;
}

static void reap_locked(struct kvp_grpc *g)
{
	struct epoll_event ev[64];
	int n;
	do {
		n = epoll_wait(g->conn_epoll, ev, 64, 0);
		for (int i = 0; i < n; i++) {
			/* By hand: closing alone would not do it while the core still holds the socket. */
			epoll_ctl(g->conn_epoll, EPOLL_CTL_DEL, ev[i].data.fd, NULL);
			close(ev[i].data.fd);
			kvp_grpc_count(&g->n.conns, (uint64_t)-1);
		}
	} while (n == 64);
}

void kvp_grpc_conn_reap(struct kvp_grpc *g)
{
	pthread_mutex_lock(&g->conn_mu);
	reap_locked(g);
	pthread_mutex_unlock(&g->conn_mu);
}

static void admit(struct kvp_grpc *g, int fd)
{
	struct epoll_event ev = {.events = EPOLLRDHUP | EPOLLHUP | EPOLLERR};
	pthread_mutex_lock(&g->conn_mu);
	reap_locked(g);
	int over = kvp_ld_rlx_u64(&g->n.conns) >= g->cfg.conn_max;
	int twin = over ? -1 : fcntl(fd, F_DUPFD_CLOEXEC, 0);
	ev.data.fd = twin;
	if (twin >= 0 && epoll_ctl(g->conn_epoll, EPOLL_CTL_ADD, twin, &ev) != 0) {
		close(twin);
		twin = -1;
	}
	kvp_grpc_count(twin >= 0 ? &g->n.conns : &g->n.conn_refused, 1);
	kvp_grpc_count(&g->n.conn_accepted, twin >= 0);
	pthread_mutex_unlock(&g->conn_mu);
	if (twin < 0)
		shutdown(fd, SHUT_RDWR);
}

static _Bool on_socket(const struct socket_info *info, struct socket_hook *h)
{
	if (info->usage == USAGE_SERVER_CONNECTION)
		admit(h->g, info->fd);
	return 1;
}

static _Bool on_fd(int fd, struct socket_hook *h)
{
	(void)fd;
	(void)h;
	return 1;
}

static int compare(struct socket_hook *a, struct socket_hook *b)
{
	return (a > b) - (a < b);
}

static void destroy(struct socket_hook *h)
{
	free(h);
}

static const struct socket_hook_ops ops = {on_fd, compare, destroy, on_socket};

static void hook_unref(struct socket_hook *h)
{
	if (gpr_unref(&h->refs))
		free(h);
}

static void *arg_copy(void *p)
{
	gpr_ref(&((struct socket_hook *)p)->refs);
	return p;
}

static void arg_destroy(void *p)
{
	hook_unref(p);
}

static int arg_cmp(void *a, void *b)
{
	return compare(a, b);
}

static const grpc_arg_pointer_vtable arg_ops = {arg_copy, arg_destroy, arg_cmp};

int kvp_grpc_conn_open(struct kvp_grpc *g)
{
	struct socket_hook *h = calloc(1, sizeof(*h));
	g->conn_epoll = epoll_create1(EPOLL_CLOEXEC);
	if (!h || g->conn_epoll < 0) {
		free(h);
		return KVP_ERR_SYS;
	}
	pthread_mutex_init(&g->conn_mu, NULL);
	h->ops = &ops;
	gpr_ref_init(&h->refs, 1);
	h->g = g;
	g->mutator = h;
	return KVP_OK;
}

int kvp_grpc_conn_arg(struct kvp_grpc *g, grpc_arg *arg)
{
	if (!kvp_grpc_caps_connections())
		return 0;
	*arg = (grpc_arg){.type = GRPC_ARG_POINTER, .key = (char *)(uintptr_t)GRPC_ARG_SOCKET_MUTATOR};
	arg->value.pointer.p = g->mutator;
	arg->value.pointer.vtable = &arg_ops;
	return 1;
}

void kvp_grpc_conn_close(struct kvp_grpc *g)
{
	reap_locked(g);
	close(g->conn_epoll);
	hook_unref(g->mutator);
	pthread_mutex_destroy(&g->conn_mu);
}
