#include "ipc/resolve.h"

#include <errno.h>
#include <fcntl.h>
#include <kvpick/err.h>
#include <limits.h>
#include <netdb.h>
#include <poll.h>
#include <pthread.h>
#include <resolv.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define RETRY_MS 1000
#define TEXT_MAX 64 /* of a literal in a message */

struct message { /* one write to the pipe: whole or not at all */
	uint32_t cnt;
	char text[KVP_RESOLVE_MAX][TEXT_MAX];
};
_Static_assert(sizeof(struct message) <= PIPE_BUF, "written in one piece");

struct job { /* the thread's own; what it shares with the loop are two pipes */
	char host[256];
	uint32_t refresh_ms;
	int list_fd; /* write end of lists */
	int stop_fd; /* read end: hangs up when the loop is done with us */
};

struct kvp_resolve {
	struct kvp_watch watch;
	int list_fd, stop_fd; /* the other ends; -1 without a thread */
	uint32_t cnt, next;
	char text[KVP_RESOLVE_MAX][KVP_RESOLVE_TEXT];
	uint64_t bad_until_ns[KVP_RESOLVE_MAX];
	void (*on_answer)(void *ctx, struct kvp_resolve *r);
	void *ctx;
};

static int lookup(const char *host, struct message *m)
{
	struct addrinfo hint = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_ADDRCONFIG}, *list = NULL;
	memset(m, 0, sizeof(*m));
	int rc = getaddrinfo(host, NULL, &hint, &list);
	if (rc) { /* a host that has only its loopback is not said to have addresses */
		hint.ai_flags = 0;
		rc = getaddrinfo(host, NULL, &hint, &list);
	}
	if (rc)
		return KVP_ERR_NOTFOUND;
	for (struct addrinfo *a = list; a && m->cnt < KVP_RESOLVE_MAX; a = a->ai_next) {
		struct kvp_addr seen;
		char *to = m->text[m->cnt];
		if (!getnameinfo(a->ai_addr, a->ai_addrlen, to, TEXT_MAX, NULL, 0, NI_NUMERICHOST) &&
			kvp_addr_ip(&seen, to, 1) == KVP_OK)
			m->cnt++;
	}
	freeaddrinfo(list);
	return m->cnt ? KVP_OK : KVP_ERR_NOTFOUND;
}

static void *resolver(void *arg)
{
	struct job *j = arg;
	struct message m;
	int wait_ms;
	struct pollfd stop = {.fd = j->stop_fd, .events = POLLIN};
	do {
		int rc = lookup(j->host, &m);
		wait_ms = rc ? RETRY_MS : (int)j->refresh_ms;
		if (rc)
			m.cnt = 0; /* asked in vain */
		if (write(j->list_fd, &m, sizeof(m)) < 0 && errno == EPIPE)
			break;
	} while (poll(&stop, 1, wait_ms) == 0);
	/* The C library would free its copies of the servers' addresses, too, but so late that a leak check
	 * at the end of the process may find the thread gone and them still there. */
	res_nclose(&_res);
	close(j->list_fd);
	close(j->stop_fd);
	free(j);
	return NULL;
}

static void on_list(void *ctx, int fd)
{
	struct kvp_resolve *r = ctx;
	struct message m;
	ssize_t n = read(fd, &m, sizeof(m));
	if (n == 0)
		kvp_loop_unwatch(&r->watch); /* the thread is gone: what is known stays */
	if (n != (ssize_t)sizeof(m) || m.cnt > KVP_RESOLVE_MAX)
		return;
	if (m.cnt) {
		r->cnt = m.cnt;
		memset(r->bad_until_ns, 0, sizeof(r->bad_until_ns));
	}
	for (uint32_t i = 0; i < m.cnt; i++) {
		m.text[i][TEXT_MAX - 1] = 0;
		memcpy(r->text[i], m.text[i], TEXT_MAX);
	}
	if (r->on_answer)
		r->on_answer(r->ctx, r);
}

/* Signals are the main thread's; a broken pipe is an error number. */
static int thread_start(struct job *j)
{
	pthread_attr_t attr;
	pthread_t tid;
	sigset_t all, old;
	int rc = pthread_attr_init(&attr);
	if (rc)
		return KVP_ERR_SYS;
	pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &old);
	rc = pthread_create(&tid, &attr, resolver, j);
	pthread_sigmask(SIG_SETMASK, &old, NULL);
	pthread_attr_destroy(&attr);
	errno = rc;
	return rc ? KVP_ERR_SYS : KVP_OK;
}

static int start(struct kvp_loop *l, struct kvp_resolve *r, const char *host, uint32_t refresh_ms)
{
	int list[2], stop[2];
	if (pipe2(list, O_CLOEXEC) < 0)
		return KVP_ERR_SYS;
	if (pipe2(stop, O_CLOEXEC) < 0) {
		close(list[0]);
		close(list[1]);
		return KVP_ERR_SYS;
	}
	r->list_fd = list[0];
	r->stop_fd = stop[1];
	struct job *j = calloc(1, sizeof(*j));
	if (j) {
		*j = (struct job){.refresh_ms = refresh_ms, .list_fd = list[1], .stop_fd = stop[0]};
		memcpy(j->host, host, strlen(host) + 1);
	}
	if (j && fcntl(list[0], F_SETFL, O_NONBLOCK) == 0 && fcntl(list[1], F_SETFL, O_NONBLOCK) == 0 &&
		kvp_loop_watch_fd(l, &r->watch, list[0], on_list, r) == KVP_OK && thread_start(j) == KVP_OK)
		return KVP_OK;
	free(j);
	close(list[1]);
	close(stop[0]);
	return KVP_ERR_SYS;
}

int kvp_resolve_open(struct kvp_loop *l, const char *host, uint32_t refresh_ms, struct kvp_resolve **out)
{
	struct kvp_addr a;
	size_t len = strlen(host);
	int is_unix = strncmp(host, "unix:", 5) == 0;
	int literal = is_unix ? kvp_addr_unix(&a, host + 5) == KVP_OK : kvp_addr_ip(&a, host, 1) == KVP_OK;
	if (!len || (is_unix && !literal) ||
		len >= (literal ? KVP_RESOLVE_TEXT : sizeof(((struct job *)0)->host)))
		return KVP_ERR_INVAL;
	struct kvp_resolve *r = calloc(1, sizeof(*r));
	if (!r)
		return KVP_ERR_SYS;
	r->list_fd = r->stop_fd = -1;
	if (literal) {
		memcpy(r->text[0], host, len + 1);
		r->cnt = 1;
	} else if (start(l, r, host, refresh_ms ? refresh_ms : RETRY_MS)) {
		kvp_resolve_close(r);
		return KVP_ERR_SYS;
	}
	*out = r;
	return KVP_OK;
}

void kvp_resolve_close(struct kvp_resolve *r)
{
	if (!r)
		return;
	kvp_loop_unwatch(&r->watch);
	if (r->list_fd >= 0)
		close(r->list_fd);
	if (r->stop_fd >= 0)
		close(r->stop_fd);
	free(r);
}

const char *kvp_resolve_next(struct kvp_resolve *r, uint64_t now_ns)
{
	if (!r->cnt)
		return NULL;
	for (uint32_t i = 0; i < r->cnt; i++) {
		r->next = (r->next + 1) % r->cnt;
		if (r->bad_until_ns[r->next] <= now_ns)
			return r->text[r->next];
	}
	r->next = (r->next + 1) % r->cnt;
	return r->text[r->next];
}

void kvp_resolve_bad(struct kvp_resolve *r, const char *address, uint64_t until_ns)
{
	for (uint32_t i = 0; i < r->cnt; i++)
		if (!strcmp(r->text[i], address))
			r->bad_until_ns[i] = until_ns;
}

void kvp_resolve_tell(struct kvp_resolve *r, void (*on_answer)(void *ctx, struct kvp_resolve *r), void *ctx)
{
	r->on_answer = on_answer;
	r->ctx = ctx;
}

uint32_t kvp_resolve_cnt(const struct kvp_resolve *r)
{
	return r->cnt;
}
