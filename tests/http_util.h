/* tests/http_util.h - a loop, a test server with known answers, and raw sockets that turn the loop while they
 * wait. One thread: nothing happens in the server but during pump(). */
#ifndef KVP_TEST_HTTP_UTIL_H
#define KVP_TEST_HTTP_UTIL_H
#include <errno.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>
#include <kvpick/err.h>
#include "ipc/http_server.h"
#include "tests/tap.h"

#define WAIT_NS UINT64_C(10000000000)
#define IN_MAX (32u << 20)

static struct kvp_loop *loop;
__attribute__((unused)) static struct kvp_http_server *srv;
static const char *be_name;
static struct kvp_http_req *held[8]; /* requests to /hold, newest last */
static uint32_t held_cnt, aborts, again_cnt, drain_cnt;
static uint64_t stream_left;

__attribute__((unused)) static void pump(void)
{
	static int quiet; /* sleeps only after nothing happened for a while */
	if (kvp_loop_run_once(loop, 0) > 0)
		quiet = 0;
	else if (++quiet > 20)
		kvp_loop_run_once(loop, 1000000);
}

static int late(uint64_t start)
{
	return kvp_loop_now_ns(loop) > start + WAIT_NS;
}

#define UNTIL(cond) for (uint64_t start_ = kvp_loop_now_ns(loop); !(cond) && !late(start_); pump())

static void stream_more(void *ctx, struct kvp_http_req *r)
{
	static char block[10000];
	(void)ctx;
	drain_cnt++;
	while (stream_left) {
		uint64_t n = stream_left < sizeof(block) ? stream_left : sizeof(block);
		for (uint64_t i = 0; i < n; i++)
			block[i] = (char)('a' + (stream_left - i) % 23);
		stream_left -= n;
		if (kvp_http_reply_chunk(r, block, n) == KVP_ERR_AGAIN && stream_left) {
			again_cnt++;
			return;
		}
	}
	kvp_http_reply_end(r);
}

static int path_is(const struct kvp_http_req *r, const char *p)
{
	return r->path_len == strlen(p) && memcmp(r->path, p, r->path_len) == 0;
}

/* "METHOD path ?query type body": what the handler saw. */
static void reply_echo(struct kvp_http_req *r)
{
	static const char *const method[] = {"GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "OTHER"};
	size_t cap = r->body_len + r->path_len + r->query_len + r->content_type_len + 64;
	char *out = malloc(cap);
	int n = snprintf(out, cap, "%s %.*s ", method[r->method], (int)r->path_len, r->path);
	if (r->query)
		n += snprintf(out + n, cap - (size_t)n, "?%.*s ", (int)r->query_len, r->query);
	if (r->content_type)
		n += snprintf(out + n, cap - (size_t)n, "%.*s ", (int)r->content_type_len, r->content_type);
	memcpy(out + n, r->body, r->body_len);
	for (int i = 0; i < KVP_HTTP_BODY_SLACK; i++)
		if (r->body[r->body_len + (uint64_t)i])
			abort();
	kvp_http_reply(r, 200, "text/plain", out, (uint64_t)n + r->body_len);
	free(out);
}

__attribute__((unused)) static void on_request(void *ctx, struct kvp_http_req *r)
{
	(void)ctx;
	if (path_is(r, "/hold")) {
		held[held_cnt++ % 8] = r;
	} else if (path_is(r, "/stream")) {
		kvp_http_reply_begin(r, 200, "text/plain", NULL, stream_more);
		stream_more(NULL, r);
	} else if (path_is(r, "/abort")) {
		kvp_http_reply_abort(r);
	} else if (path_is(r, "/204")) {
		kvp_http_reply(r, 204, NULL, NULL, 0);
	} else if (path_is(r, "/302")) {
		kvp_http_reply_extra(r, 302, NULL, "Location: /echo\r\n", NULL, 0);
	} else {
		reply_echo(r);
	}
}

__attribute__((unused)) static void on_abort(void *ctx, struct kvp_http_req *r)
{
	(void)ctx;
	(void)r;
	aborts++;
}

__attribute__((unused)) static int dial(uint16_t port)
{
	struct sockaddr_in sa = {
		.sin_family = AF_INET, .sin_port = htons(port), .sin_addr = {htonl(0x7f000001)}};
	int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	if (connect(fd, (struct sockaddr *)&sa, sizeof(sa)) < 0)
		printf("# connect: errno %d\n", errno);
	return fd;
}

/* Sends everything, turning the loop while the peer's window is full. -1: the connection broke. */
__attribute__((unused)) static int put(int fd, const char *data, size_t len)
{
	uint64_t start = kvp_loop_now_ns(loop);
	while (len && !late(start)) {
		ssize_t n = send(fd, data, len, MSG_DONTWAIT | MSG_NOSIGNAL);
		if (n < 0 && errno != EAGAIN)
			return -1;
		if (n > 0) {
			data += n;
			len -= (size_t)n;
		} else {
			pump();
		}
	}
	return len ? -1 : 0;
}

/* What a client received. */
struct in {
	char *p;
	size_t len;
	int eof; /* 1 end, 2 error */
};

__attribute__((unused)) static void in_more(int fd, struct in *in)
{
	if (!in->p)
		in->p = calloc(1, IN_MAX + 1);
	for (ssize_t n; !in->eof && in->len < IN_MAX;) {
		n = recv(fd, in->p + in->len, IN_MAX - in->len, MSG_DONTWAIT);
		if (n < 0 && errno == EAGAIN)
			return;
		if (n <= 0)
			in->eof = n < 0 ? 2 : 1;
		else
			in->len += (size_t)n;
	}
}

/* Date lines are the one thing that no test can know. */
__attribute__((unused)) static void strip_dates(struct in *in)
{
	for (char *d; in->p && (d = memmem(in->p, in->len, "Date: ", 6));) {
		char *end = memmem(d, in->len - (size_t)(d - in->p), "\r\n", 2);
		if (!end)
			return;
		end += 2;
		memmove(d, end, in->len - (size_t)(end - in->p));
		in->len -= (size_t)(end - d);
		in->p[in->len] = 0;
	}
}

__attribute__((unused)) static void in_free(struct in *in)
{
	free(in->p);
	memset(in, 0, sizeof(*in));
}
/* Runs the test on epoll and, where the kernel has it, on io_uring; the test's exit code. */
__attribute__((unused)) static int on_each_backend(void (*run)(enum kvp_loop_backend be, const char *name))
{
	struct kvp_loop *probe;
	signal(SIGPIPE, SIG_IGN);
	run(KVP_LOOP_EPOLL, "epoll");
	if (kvp_loop_open_backend(&probe, 8, KVP_LOOP_URING) == KVP_OK) {
		kvp_loop_close(probe);
		run(KVP_LOOP_URING, "uring");
	}
	return done();
}
#endif
