/* What `kvpick doctor` asks over the network: the clients of the daemons, each on a loop that runs for one
 * answer. */
#include "daemons/supervisor/doctor.h"

#include "ipc/http_client.h"
#include <errno.h>
#include <netdb.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

__attribute__((format(printf, 3, 4))) static int fail(struct doc_http *h, int rc, const char *fmt, ...)
{
	va_list ap;
	va_start(ap, fmt);
	vsnprintf(h->error, sizeof(h->error), fmt, ap);
	va_end(ap);
	return rc;
}

/* connect_one: a connected non-blocking socket, or -1 with errno. */
static int connect_one(const struct sockaddr *a, socklen_t len, int timeout_ms)
{
	int err = 0, fd = socket(a->sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	socklen_t err_len = sizeof(err);
	if (fd < 0)
		return -1;
	if (connect(fd, a, len) != 0) {
		struct pollfd p = {.fd = fd, .events = POLLOUT};
		err = errno;
		if (err == EINPROGRESS) {
			err = ETIMEDOUT;
			if (poll(&p, 1, timeout_ms) == 1)
				getsockopt(fd, SOL_SOCKET, SO_ERROR, &err, &err_len);
		}
	}
	if (!err)
		return fd;
	close(fd);
	errno = err;
	return -1;
}

/* look_up: addresses of a name, to be freed; NULL with error. */
static struct addrinfo *look_up(const char *host, uint16_t port, char *error, size_t cap)
{
	struct addrinfo hint = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_NUMERICSERV}, *list = NULL;
	char service[8];
	snprintf(service, sizeof(service), "%u", (unsigned)port);
	int rc = getaddrinfo(host, service, &hint, &list);
	if (rc)
		snprintf(error, cap, "the name %.200s can't be resolved: %s", host, gai_strerror(rc));
	return rc ? NULL : list;
}

int doc_connect(const char *host, uint16_t port, int timeout_ms, char *error, size_t cap)
{
	struct addrinfo *list = look_up(host, port, error, cap);
	int fd = -1;
	if (!list)
		return -1;
	for (struct addrinfo *a = list; a && fd < 0; a = a->ai_next)
		fd = connect_one(a->ai_addr, a->ai_addrlen, timeout_ms);
	if (fd < 0)
		snprintf(error, cap, "%.200s port %u: %s", host, (unsigned)port, strerror(errno));
	freeaddrinfo(list);
	return fd;
}

/* -- one call -- */

struct call {
	struct doc_http *h;
	const struct kvp_http_client *client;
	int done, err, sys;
};

static void on_body(void *ctx, struct kvp_http_call *c, const char *data, uint64_t len)
{
	struct doc_http *h = ((struct call *)ctx)->h;
	(void)c;
	/* The client's own limit keeps it below. */
	memcpy(h->reply + h->len, data, len);
	h->len += len;
	h->reply[h->len] = 0;
}

static void on_done(void *ctx, struct kvp_http_call *c, int status, int err)
{
	struct call *k = ctx;
	(void)c;
	k->sys = errno;
	k->h->status = status;
	k->err = err;
	k->done = 1;
}

static int say_why(struct doc_http *h, const struct call *k)
{
	switch (k->err) {
	case KVP_OK:
		return KVP_OK;
	case KVP_ERR_SYS:
		if (kvp_http_client_why(k->client)[0])
			return fail(h, k->err, "TLS: %s", kvp_http_client_why(k->client));
		return fail(
			h, k->err, "%s port %u: %s", h->url->host, (unsigned)h->url->port, strerror(k->sys));
	case KVP_ERR_TIMEOUT:
		return fail(h, k->err, "no answer came in time");
	case KVP_ERR_PROTO:
		return fail(h, k->err, "the answer is not HTTP");
	case KVP_ERR_LIMIT:
		return fail(h, k->err, "the answer is longer than %u bytes", DOC_REPLY_MAX);
	default:
		return fail(h, k->err, "the connection was closed before the answer");
	}
}

static int call_at(struct doc_http *h, struct kvp_loop *loop, struct kvp_tls_client *tls, const char *host,
	const char *headers)
{
	struct kvp_http_client_cfg one = {.conn_max = 1};
	struct kvp_http_client *client = NULL;
	struct call k = {.h = h};
	char path[2048];
	snprintf(path, sizeof(path), "%s%s", h->url->base, h->path);
	struct kvp_http_call_cfg c = {.host = host,
		.port = h->url->port,
		.tls = tls,
		.method = "POST",
		.path = path,
		.authority = h->url->authority,
		.headers = headers,
		.body = h->body,
		.len = strlen(h->body),
		.timeout_ns = DOC_CALL_MS * 1000000ull,
		.body_max_bytes = DOC_REPLY_MAX,
		.on_body = on_body,
		.on_done = on_done,
		.ctx = &k};
	int rc = kvp_http_client_open(loop, &one, &client);
	k.client = client;
	rc = rc ? rc : kvp_http_call(client, &c, NULL);
	while (!rc && !k.done)
		if (kvp_loop_run_once(loop, KVP_LOOP_FOREVER) < 0)
			rc = KVP_ERR_SYS;
	rc = rc ? fail(h, rc, "the call can't be made: %s", kvp_strerror(rc)) : say_why(h, &k);
	kvp_http_client_close(client);
	return rc;
}

static int call_all(
	struct doc_http *h, struct kvp_loop *loop, struct kvp_tls_client *tls, const char *headers)
{
	char text[INET6_ADDRSTRLEN];
	if (strncmp(h->url->host, "unix:", 5) == 0)
		return call_at(h, loop, tls, h->url->host, headers);
	struct addrinfo *list = look_up(h->url->host, h->url->port, h->error, sizeof(h->error));
	int rc = KVP_ERR_SYS;
	for (struct addrinfo *a = list; a && rc == KVP_ERR_SYS; a = a->ai_next)
		if (getnameinfo(a->ai_addr, a->ai_addrlen, text, sizeof(text), NULL, 0, NI_NUMERICHOST) == 0)
			rc = call_at(h, loop, tls, text, headers);
	if (list)
		freeaddrinfo(list);
	return rc;
}

static int call_trusting(struct doc_http *h, struct kvp_loop *loop, const char *headers)
{
	struct kvp_tls_client *tls = NULL;
	char why[200] = "";
	int rc = h->url->is_https ? kvp_tls_client_open(&tls, h->ca_file ? h->ca_file : "", h->url->host, why,
					    sizeof(why))
				  : KVP_OK;
	rc = rc ? fail(h, rc, "TLS: %s", why) : call_all(h, loop, tls, headers);
	kvp_tls_client_close(tls);
	return rc;
}

static int read_token(const char *path, char *out, size_t cap)
{
	FILE *f = fopen(path, "re");
	if (!f)
		return KVP_ERR_SYS;
	size_t n = fread(out, 1, cap - 1, f);
	fclose(f);
	out[n] = 0;
	out[strcspn(out, "\r\n")] = 0;
	return KVP_OK;
}

int doc_http_call(struct doc_http *h)
{
	static const char json[] = "Content-Type: application/json\r\n";
	struct kvp_loop *loop = NULL;
	char token[4200] = "", headers[4400];
	h->len = 0;
	h->reply = calloc(1, DOC_REPLY_MAX + 1);
	if (!h->reply || kvp_loop_open(&loop, 64) != KVP_OK)
		return fail(h, KVP_ERR_SYS, "no memory");
	int n = snprintf(headers, sizeof(headers), "%s", json), rc = KVP_OK;
	if (h->token_file && h->token_file[0]) {
		rc = read_token(h->token_file, token, sizeof(token));
		snprintf(headers + n, sizeof(headers) - (size_t)n, "Authorization: Bearer %s\r\n", token);
	}
	rc = rc ? fail(h, rc, "%s: %s", h->token_file, strerror(errno)) : call_trusting(h, loop, headers);
	kvp_loop_close(loop);
	return rc;
}

void doc_http_free(struct doc_http *h)
{
	free(h->reply);
	h->reply = NULL;
}
