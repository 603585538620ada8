/* One blocking HTTP exchange, plain or over TLS, for `kvpick doctor` only: daemons use ipc/http_client.h. */
#include "daemons/supervisor/doctor.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <openssl/x509v3.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/un.h>
#include <unistd.h>

/* Where the bytes go: a socket, and TLS above it if ssl is set. */
struct wire {
	int fd;
	SSL_CTX *ctx;
	SSL *ssl;
	uint64_t end_ms;
};

__attribute__((format(printf, 3, 4))) static int fail(struct doc_http *h, int rc, const char *fmt, ...)
{
	va_list ap;
	va_start(ap, fmt);
	vsnprintf(h->error, sizeof(h->error), fmt, ap);
	va_end(ap);
	return rc;
}

static int copy(char *out, size_t cap, const char *from, size_t len)
{
	if (len >= cap)
		return KVP_ERR_INVAL;
	memcpy(out, from, len);
	out[len] = 0;
	return KVP_OK;
}

int doc_url_parse(const char *text, struct doc_url *u)
{
	memset(u, 0, sizeof(*u));
	u->tls = strncmp(text, "https://", 8) == 0;
	const char *p = text + (u->tls ? 8 : 7);
	if (!u->tls && strncmp(text, "http://", 7) != 0)
		return KVP_ERR_INVAL;
	u->port = u->tls ? 443 : 80;
	u->is_unix = strncmp(p, "unix:/", 6) == 0;
	size_t len = u->is_unix ? 5 + strcspn(p + 5, ":?#") : strcspn(p, "/?#");
	const char *path = p + len + (u->is_unix && p[len] == ':');
	size_t path_len = strcspn(path, "?#");
	while (path_len && path[path_len - 1] == '/')
		path_len--;
	if (copy(u->path, sizeof(u->path), path, path_len))
		return KVP_ERR_INVAL;
	if (u->is_unix) {
		snprintf(u->authority, sizeof(u->authority), "localhost");
		return copy(u->host, sizeof(u->host), p + 5, len - 5);
	}
	if (copy(u->authority, sizeof(u->authority), p, len))
		return KVP_ERR_INVAL;
	int bracket = p[0] == '[';
	const char *last = bracket ? memchr(p, ']', len) : NULL;
	size_t host_len = last ? (size_t)(last - p) - 1 : strcspn(u->authority, ":");
	const char *colon = last ? last + 1 : p + host_len;
	if (colon < p + len && *colon == ':')
		u->port = (uint16_t)strtoul(colon + 1, NULL, 10);
	return copy(u->host, sizeof(u->host), p + bracket, host_len);
}

static int wait_for(int fd, short events, uint64_t end_ms)
{
	struct pollfd p = {.fd = fd, .events = events};
	uint64_t now = sup_now_ms();
	return now < end_ms ? poll(&p, 1, (int)(end_ms - now)) : 0;
}

/* connect_one: a connected non-blocking socket, or -1 with errno. */
static int connect_one(const struct sockaddr *a, socklen_t len, int timeout_ms)
{
	int err = 0, fd = socket(a->sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	socklen_t err_len = sizeof(err);
	if (fd < 0)
		return -1;
	if (connect(fd, a, len) != 0) {
		err = errno;
		if (err == EINPROGRESS) {
			err = ETIMEDOUT;
			if (wait_for(fd, POLLOUT, sup_now_ms() + (uint64_t)timeout_ms) == 1)
				getsockopt(fd, SOL_SOCKET, SO_ERROR, &err, &err_len);
		}
	}
	if (!err)
		return fd;
	close(fd);
	errno = err;
	return -1;
}

int doc_connect(const char *host, uint16_t port, int timeout_ms, char *error, size_t cap)
{
	struct addrinfo hint = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_NUMERICSERV}, *list = NULL;
	char service[8];
	snprintf(service, sizeof(service), "%u", (unsigned)port);
	int rc = getaddrinfo(host, service, &hint, &list), fd = -1;
	if (rc) {
		snprintf(error, cap, "the name %.200s can't be resolved: %s", host, gai_strerror(rc));
		return -1;
	}
	for (struct addrinfo *a = list; a && fd < 0; a = a->ai_next)
		fd = connect_one(a->ai_addr, a->ai_addrlen, timeout_ms);
	if (fd < 0)
		snprintf(error, cap, "%.200s port %u: %s", host, (unsigned)port, strerror(errno));
	freeaddrinfo(list);
	return fd;
}

static int connect_unix(const char *path)
{
	struct sockaddr_un a = {.sun_family = AF_UNIX};
	if (copy(a.sun_path, sizeof(a.sun_path), path, strlen(path))) {
		errno = ENAMETOOLONG;
		return -1;
	}
	return connect_one((struct sockaddr *)&a, sizeof(a), DOC_CONNECT_MS);
}

int doc_read_token(const char *path, char *out, size_t cap)
{
	FILE *f = fopen(path, "re");
	if (!f)
		return KVP_ERR_SYS;
	size_t n = fread(out, 1, cap - 1, f);
	int more = fgetc(f) != EOF;
	fclose(f);
	out[n] = 0;
	out[strcspn(out, "\r\n")] = 0;
	return more ? KVP_ERR_LIMIT : KVP_OK;
}

/* -- TLS -- */

static void tls_reason(struct doc_http *h, const SSL *ssl)
{
	long bad = SSL_get_verify_result(ssl);
	char text[160] = "the other side does not speak TLS, or closed";
	unsigned long code = ERR_get_error();
	if (code)
		ERR_error_string_n(code, text, sizeof(text));
	(void)fail(h, KVP_ERR_PROTO, "TLS: %s", bad != X509_V_OK ? X509_verify_cert_error_string(bad) : text);
}

/* again waits for what TLS wants next; 0 = deadline or error. */
static int again(struct wire *w, int rc)
{
	int why = SSL_get_error(w->ssl, rc);
	if (why == SSL_ERROR_WANT_READ)
		return wait_for(w->fd, POLLIN, w->end_ms) == 1;
	return why == SSL_ERROR_WANT_WRITE && wait_for(w->fd, POLLOUT, w->end_ms) == 1;
}

static int tls_start(struct doc_http *h, struct wire *w)
{
	unsigned char ip[16];
	const char *host = h->url->host;
	w->ctx = SSL_CTX_new(TLS_client_method());
	if (!w->ctx || !(w->ssl = SSL_new(w->ctx)))
		return fail(h, KVP_ERR_SYS, "TLS: no memory");
	SSL_CTX_set_verify(w->ctx, SSL_VERIFY_PEER, NULL);
	SSL_set_verify(w->ssl, SSL_VERIFY_PEER, NULL);
	if (h->ca_file && SSL_CTX_load_verify_locations(w->ctx, h->ca_file, NULL) != 1)
		return fail(h, KVP_ERR_SYS, "%s: no certificates in it, or not readable", h->ca_file);
	if (!h->ca_file)
		SSL_CTX_set_default_verify_paths(w->ctx);
	int is_ip = inet_pton(AF_INET, host, ip) == 1 || inet_pton(AF_INET6, host, ip) == 1;
	X509_VERIFY_PARAM *param = SSL_get0_param(w->ssl);
	int ok =
		is_ip ? X509_VERIFY_PARAM_set1_ip_asc(param, host)
		      : SSL_set_tlsext_host_name(w->ssl, host) && X509_VERIFY_PARAM_set1_host(param, host, 0);
	if (ok != 1 || SSL_set_fd(w->ssl, w->fd) != 1)
		return fail(h, KVP_ERR_SYS, "TLS: no memory");
	int rc;
	while ((rc = SSL_connect(w->ssl)) != 1)
		if (!again(w, rc)) {
			tls_reason(h, w->ssl);
			return KVP_ERR_PROTO;
		}
	return KVP_OK;
}

/* -- exchange -- */

/* take answers bytes received, 0 at the end, -1 on error or at the deadline. */
static ssize_t take(struct wire *w, char *buf, size_t cap)
{
	for (;;) {
		ssize_t n = w->ssl ? SSL_read(w->ssl, buf, (int)cap) : recv(w->fd, buf, cap, 0);
		if (n > 0)
			return n;
		if (w->ssl) {
			if (SSL_get_error(w->ssl, (int)n) == SSL_ERROR_ZERO_RETURN)
				return 0;
			if (!again(w, (int)n))
				return -1;
		} else if (n == 0) {
			return 0;
		} else if (errno != EAGAIN || wait_for(w->fd, POLLIN, w->end_ms) != 1) {
			return -1;
		}
	}
}

static int give(struct wire *w, const char *buf, size_t len)
{
	for (size_t off = 0; off < len;) {
		ssize_t n = w->ssl ? SSL_write(w->ssl, buf + off, (int)(len - off))
				   : send(w->fd, buf + off, len - off, MSG_NOSIGNAL);
		if (n > 0)
			off += (size_t)n;
		else if (w->ssl ? !again(w, (int)n)
				: errno != EAGAIN || wait_for(w->fd, POLLOUT, w->end_ms) != 1)
			return KVP_ERR_CLOSED;
	}
	return KVP_OK;
}

static int ask(struct doc_http *h, struct wire *w)
{
	char token[4200] = "", *text = NULL;
	if (h->token_file && h->token_file[0] && doc_read_token(h->token_file, token, sizeof(token)))
		return fail(h, KVP_ERR_SYS, "%s: %s", h->token_file, strerror(errno));
	int n = asprintf(&text,
		"%s %s%s HTTP/1.1\r\nHost: %s\r\nConnection: close\r\nAccept: application/json\r\n"
		"%s%s%sContent-Type: application/json\r\nContent-Length: %zu\r\n\r\n%s",
		h->body ? "POST" : "GET", h->url->path, h->path, h->url->authority,
		token[0] ? "Authorization: Bearer " : "", token, token[0] ? "\r\n" : "",
		h->body ? strlen(h->body) : 0, h->body ? h->body : "");
	if (n < 0)
		return fail(h, KVP_ERR_SYS, "no memory");
	int rc = give(w, text, (size_t)n);
	free(text);
	return rc ? fail(h, rc, "the connection was closed while the request was sent") : KVP_OK;
}

/* Content-Length where the head has one, so that a server that keeps the connection is not waited for. */
static size_t length_of(const char *head, const char *end)
{
	const char *p = strcasestr(head, "\r\ncontent-length:");
	return p && p < end ? strtoul(p + 17, NULL, 10) : SIZE_MAX;
}

static int answer(struct doc_http *h, struct wire *w)
{
	char *buf = malloc(DOC_REPLY_MAX + 1), *end = NULL;
	size_t len = 0;
	ssize_t n = 1;
	if (!buf)
		return fail(h, KVP_ERR_SYS, "no memory");
	buf[0] = 0;
	while (n > 0 && len < DOC_REPLY_MAX) {
		n = take(w, buf + len, DOC_REPLY_MAX - len);
		len += n > 0 ? (size_t)n : 0;
		buf[len] = 0;
		end = strstr(buf, "\r\n\r\n");
		if (end && len >= (size_t)(end + 4 - buf) &&
			len - (size_t)(end + 4 - buf) >= length_of(buf, end))
			break;
	}
	if (!end || sscanf(buf, "HTTP/1.%*d %d", &h->status) != 1) {
		int nothing = len == 0;
		free(buf);
		return fail(h, KVP_ERR_PROTO, "%s",
			nothing ? "connected, but no answer came in time"
				: "connected, but the answer is not HTTP");
	}
	h->len = len - (size_t)(end + 4 - buf);
	memmove(buf, end + 4, h->len + 1);
	h->reply = buf;
	return KVP_OK;
}

int doc_http_call(struct doc_http *h)
{
	struct wire w = {.end_ms = sup_now_ms() + DOC_CALL_MS};
	h->reply = NULL;
	h->len = 0;
	if (h->url->is_unix)
		w.fd = connect_unix(h->url->host);
	else
		w.fd = doc_connect(h->url->host, h->url->port, DOC_CONNECT_MS, h->error, sizeof(h->error));
	if (w.fd < 0)
		return h->url->is_unix ? fail(h, KVP_ERR_CLOSED, "%s: %s", h->url->host, strerror(errno))
				       : KVP_ERR_CLOSED;
	int rc = h->url->tls ? tls_start(h, &w) : KVP_OK;
	rc = rc ? rc : ask(h, &w);
	rc = rc ? rc : answer(h, &w);
	SSL_free(w.ssl);
	SSL_CTX_free(w.ctx);
	close(w.fd);
	return rc;
}

void doc_http_free(struct doc_http *h)
{
	free(h->reply);
	h->reply = NULL;
}
