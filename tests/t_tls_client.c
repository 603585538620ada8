/* TLS to a service: the HTTP client against a server of the TLS library, which does it well and badly. */
#include "ipc/http_client.h"
#include "ipc/tls_cert.h"
#include "tests/http_util.h"

#include <openssl/ssl.h>
#include <pthread.h>

#define SERVED_MAX 64 /* connections */

enum manners { GOOD, PLAIN, SILENT, OLD };

static int listen_fd;
static uint16_t port;
static volatile int manners;
static volatile unsigned accepted;
static SSL_CTX *server_ctx;
static struct kvp_http_client *cl;
static struct kvp_tls_client *trusting;
static char ca[] = "/tmp/kvpick-ca-XXXXXX", other_ca[] = "/tmp/kvpick-ca-XXXXXX";

/* ---- the server, in a thread of its own ---- */

static int read_request(SSL *s, char *buf, size_t cap, size_t *head, size_t *body)
{
	size_t n = 0;
	for (;;) {
		int got = SSL_read(s, buf + n, (int)(cap - n - 1));
		if (got <= 0)
			return 0;
		n += (size_t)got;
		buf[n] = 0;
		char *end = strstr(buf, "\r\n\r\n"), *cl_at = strstr(buf, "Content-Length: ");
		if (!end)
			continue;
		*head = (size_t)(end - buf) + 4;
		*body = cl_at && cl_at < end ? strtoull(cl_at + 16, NULL, 10) : 0;
		if (n >= *head + *body)
			return 1;
	}
}

static void say(SSL *s, const char *data, size_t len)
{
	for (size_t at = 0; at < len;) {
		int n = SSL_write(s, data + at, (int)(len - at));
		if (n <= 0)
			return;
		at += (size_t)n;
	}
}

/* One answer; 0 = the connection is over. */
static int answer(SSL *s, char *buf, size_t head, size_t body)
{
	char line[256];
	if (strncmp(buf, "POST /none", 10) == 0 || strncmp(buf, "POST /cut", 9) == 0) {
		say(s, "HTTP/1.1 200 OK\r\n\r\nall of it", 28);
		if (buf[6] == 'n')
			SSL_shutdown(s);
		return 0;
	}
	if (strncmp(buf, "POST /half", 10) == 0) {
		say(s, "HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf", 43);
		return 0;
	}
	int n = snprintf(line, sizeof(line), "HTTP/1.1 200 OK\r\nContent-Length: %zu\r\n\r\n", body);
	say(s, line, (size_t)n);
	say(s, buf + head, body);
	if (strncmp(buf, "POST /bye", 9) != 0)
		return 1;
	SSL_shutdown(s);
	return 0;
}

#define SERVER_BUF (8u << 20)

static void serve(int fd, char *buf)
{
	size_t head, body;
	if (manners == PLAIN) {
		if (write(fd, "HTTP/1.1 400 Bad Request\r\n\r\n", 28) < 0)
			perror("write");
		return;
	}
	if (manners == SILENT) {
		while (read(fd, buf, SERVER_BUF) > 0)
			;
		return;
	}
	SSL *s = SSL_new(server_ctx);
	SSL_set_fd(s, fd);
	if (manners == OLD)
		SSL_set_max_proto_version(s, TLS1_2_VERSION);
	if (SSL_accept(s) == 1)
		while (read_request(s, buf, SERVER_BUF, &head, &body) && answer(s, buf, head, body))
			;
	SSL_free(s);
}

static struct served {
	pthread_t thread;
	int fd;
} served[SERVED_MAX];
static pthread_t server_thread;

static void *connection(void *arg)
{
	const struct served *me = arg;
	char *buf = malloc(SERVER_BUF);
	if (buf)
		serve(me->fd, buf);
	free(buf);
	shutdown(me->fd, SHUT_RDWR);
	return NULL;
}

/* Ends with the listener, and with all that it began: what a thread still has at the end would be a leak. */
static void *server(void *arg)
{
	uint32_t cnt = 0;
	int fd;
	(void)arg;
	while (cnt < SERVED_MAX && (fd = accept(listen_fd, NULL, NULL)) >= 0) {
		struct served *s = &served[cnt];
		s->fd = fd;
		accepted++;
		if (pthread_create(&s->thread, NULL, connection, s) == 0)
			cnt++;
		else
			close(fd);
	}
	for (uint32_t i = 0; i < cnt; i++) {
		shutdown(served[i].fd, SHUT_RDWR);
		pthread_join(served[i].thread, NULL);
		close(served[i].fd);
	}
	return NULL;
}

static void save(const char *path, const char *text)
{
	FILE *f = fopen(path, "w");
	if (f) {
		fputs(text, f);
		fclose(f);
	}
}

static void server_open(void)
{
	struct sockaddr_in sa = {.sin_family = AF_INET, .sin_addr = {htonl(0x7f000001)}};
	socklen_t len = sizeof(sa);
	struct kvp_tls_pair pair = {NULL, NULL}, wrong = {NULL, NULL};
	close(mkstemp(ca));
	close(mkstemp(other_ca));
	ok(kvp_tls_generate(&pair) == KVP_OK && kvp_tls_generate(&wrong) == KVP_OK, "two certificates");
	save(ca, pair.cert);
	save(other_ca, wrong.cert);
	BIO *c = BIO_new_mem_buf(pair.cert, -1), *k = BIO_new_mem_buf(pair.key, -1);
	X509 *x = PEM_read_bio_X509(c, NULL, NULL, NULL);
	EVP_PKEY *key = PEM_read_bio_PrivateKey(k, NULL, NULL, NULL);
	server_ctx = SSL_CTX_new(TLS_server_method());
	ok(SSL_CTX_use_certificate(server_ctx, x) == 1 && SSL_CTX_use_PrivateKey(server_ctx, key) == 1,
		"server");
	X509_free(x);
	EVP_PKEY_free(key);
	BIO_free(c);
	BIO_free(k);
	kvp_tls_free(&pair);
	kvp_tls_free(&wrong);
	listen_fd = socket(AF_INET, SOCK_STREAM, 0);
	ok(bind(listen_fd, (struct sockaddr *)&sa, sizeof(sa)) == 0 && listen(listen_fd, 16) == 0 &&
			getsockname(listen_fd, (struct sockaddr *)&sa, &len) == 0,
		"listens");
	port = ntohs(sa.sin_port);
	pthread_create(&server_thread, NULL, server, NULL);
}

/* ---- the client ---- */

struct seen {
	int done, status, err, sys;
	char *body;
	uint64_t len, cap;
};

static void on_body(void *ctx, struct kvp_http_call *c, const char *data, uint64_t len)
{
	struct seen *s = ctx;
	(void)c;
	if (s->len + len + 1 > s->cap) {
		s->cap = 2 * (s->len + len) + 1;
		s->body = realloc(s->body, s->cap);
	}
	memcpy(s->body + s->len, data, len);
	s->len += len;
	s->body[s->len] = 0;
}

static void on_done(void *ctx, struct kvp_http_call *c, int status, int err)
{
	struct seen *s = ctx;
	(void)c;
	s->sys = errno;
	s->done++;
	s->status = status;
	s->err = err;
}

static struct seen ask(
	struct kvp_tls_client *tls, const char *path, const void *body, uint64_t len, uint64_t wait_ns)
{
	struct seen s = {.done = 0};
	struct kvp_http_call_cfg k = {.host = "127.0.0.1",
		.port = port,
		.tls = tls,
		.method = "POST",
		.path = path,
		.body = body,
		.len = len,
		.timeout_ns = wait_ns,
		.on_body = on_body,
		.on_done = on_done,
		.ctx = &s};
	s.err = kvp_http_call(cl, &k, NULL);
	UNTIL(s.done || s.err);
	return s;
}

static void gone(struct seen *s)
{
	free(s->body);
	s->body = NULL;
}

static struct kvp_tls_client *trust(const char *ca_path, const char *name)
{
	char err[300] = "";
	struct kvp_tls_client *c = NULL;
	int rc = kvp_tls_client_open(&c, ca_path, name, err, sizeof(err));
	ok(rc == KVP_OK, "a client that trusts %s %s", ca_path[0] ? "a file" : "the system", err);
	return c;
}

static void good(void)
{
	static char big[3 << 20];
	for (size_t i = 0; i < sizeof(big); i++)
		big[i] = (char)('a' + i % 23);
	for (int turn = 0; turn < 3; turn++) {
		struct seen s = ask(trusting, "/echo", "hello", 5, WAIT_NS);
		ok(s.err == KVP_OK && s.status == 200 && s.len == 5 && memcmp(s.body, "hello", 5) == 0,
			"answer %d (%d)", turn, s.err);
		gone(&s);
	}
	is_u64(accepted, 1, "three calls, one connection");
	struct seen s = ask(trusting, "/echo", big, sizeof(big), WAIT_NS);
	ok(s.err == KVP_OK && s.len == sizeof(big) && memcmp(s.body, big, sizeof(big)) == 0,
		"3 MiB both ways");
	gone(&s);
	is_u64(accepted, 1, "over the same one");
	s = ask(trusting, "/none", "x", 1, WAIT_NS);
	ok(s.err == KVP_OK && s.len == 9 && strcmp(s.body, "all of it") == 0, "an end that is announced");
	gone(&s);
	s = ask(trusting, "/cut", "x", 1, WAIT_NS);
	ok(s.err == KVP_ERR_CLOSED && s.len == 9, "one that is not is no end (%d)", s.err);
	gone(&s);
	s = ask(trusting, "/half", "x", 1, WAIT_NS);
	ok(s.err == KVP_ERR_CLOSED, "an answer that breaks off (%d)", s.err);
	gone(&s);
	s = ask(trusting, "/bye", "x", 1, WAIT_NS);
	ok(s.err == KVP_OK && s.len == 1, "an answer, and goodbye");
	gone(&s);
	s = ask(trusting, "/echo", "y", 1, WAIT_NS);
	ok(s.err == KVP_OK && s.len == 1, "then a new connection");
	gone(&s);
}

static void bad(void)
{
	struct kvp_tls_client *wrong_ca = trust(other_ca, "localhost"),
			      *wrong_name = trust(ca, "example.org"), *by_ip = trust(ca, "0.0.0.0"),
			      *system = trust("", "localhost");
	struct seen s = ask(wrong_ca, "/echo", "x", 1, WAIT_NS);
	ok(s.err == KVP_ERR_SYS && s.sys == EPROTO && strstr(kvp_http_client_why(cl), "certificate"),
		"a certificate that nobody vouches for: %s", kvp_http_client_why(cl));
	s = ask(system, "/echo", "x", 1, WAIT_NS);
	ok(s.err == KVP_ERR_SYS, "nor does the system: %s", kvp_http_client_why(cl));
	s = ask(wrong_name, "/echo", "x", 1, WAIT_NS);
	ok(s.err == KVP_ERR_SYS && strstr(kvp_http_client_why(cl), "mismatch"), "another name: %s",
		kvp_http_client_why(cl));
	s = ask(by_ip, "/echo", "x", 1, WAIT_NS);
	ok(s.err == KVP_OK, "an address as name");
	gone(&s);
	is_u64(kvp_http_client_stat(cl)->idle, 2, "connections of different trust are kept apart");
	manners = PLAIN;
	s = ask(by_ip, "/bye", "x", 1, WAIT_NS);
	gone(&s);
	s = ask(by_ip, "/echo", "x", 1, WAIT_NS);
	ok(s.err == KVP_ERR_SYS, "a peer that speaks no TLS: %s", kvp_http_client_why(cl));
	manners = SILENT;
	s = ask(by_ip, "/echo", "x", 1, 200000000);
	ok(s.err == KVP_ERR_TIMEOUT, "one that says nothing");
	manners = OLD;
	s = ask(by_ip, "/echo", "x", 1, WAIT_NS);
	ok(s.err == KVP_OK && s.len == 1, "TLS 1.2");
	gone(&s);
	kvp_http_client_close(cl);
	kvp_tls_client_close(wrong_ca);
	kvp_tls_client_close(wrong_name);
	kvp_tls_client_close(by_ip);
	kvp_tls_client_close(system);
}

int main(void)
{
	char err[300];
	struct kvp_tls_client *c;
	if (TAP_IS_TSAN) {
		ok(1, "# SKIP the TLS library is not instrumented");
		return done();
	}
	signal(SIGPIPE, SIG_IGN);
	server_open();
	be_name = "default";
	ok(kvp_loop_open(&loop, 0) == KVP_OK, "a loop: %s", be_name);
	kvp_http_client_open(loop, NULL, &cl);
	trusting = trust(ca, "localhost");
	ok(kvp_tls_client_open(&c, "/nonexistent", "a", err, sizeof(err)) == KVP_ERR_INVAL && err[0],
		"no such file: %s", err);
	ok(kvp_tls_client_open(&c, ca, "", err, sizeof(err)) == KVP_ERR_INVAL, "no name");
	good();
	bad();
	kvp_tls_client_close(trusting);
	kvp_loop_close(loop);
	shutdown(listen_fd, SHUT_RDWR);
	pthread_join(server_thread, NULL);
	SSL_CTX_free(server_ctx);
	close(listen_fd);
	unlink(ca);
	unlink(other_ca);
	return done();
}
