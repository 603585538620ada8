/* What the gRPC server refuses and bounds: oversized and compressed messages, a peer that does not read, too
 * many streams, too many connections, slow handshakes, broken bytes; and two processes on one port,
 * certificates that change under open connections. */
#include "tests/grpc_fixture.h"

#include "ipc/tls_cert.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <openssl/ssl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>

static struct kvp_tls_pair cert, second;

static uint16_t serve(struct fix *f, const struct kvp_grpc_cfg *cfg, enum kvp_grpc_security security)
{
	struct kvp_grpc_listen l = {.addr = "127.0.0.1:0", .security = security, .methods = 1};
	struct kvp_grpc_cfg c = *cfg;
	uint16_t port = 0;
	c.method = fix_method;
	c.method_cnt = 1;
	*f = (struct fix){0};
	if (kvp_grpc_new(&f->g, &c) != KVP_OK ||
		(security == KVP_GRPC_TLS && kvp_grpc_cert_set(f->g, cert.cert, cert.key) != KVP_OK) ||
		kvp_grpc_listen_add(f->g, &l, &port) != KVP_OK || kvp_grpc_start(f->g) != KVP_OK)
		ok(0, "a server starts");
	return port;
}

static void client(struct fix *f, uint16_t port, const char *root_pem, uint32_t conns)
{
	char target[64];
	snprintf(target, sizeof(target), "127.0.0.1:%u", port);
	kvp_gc_open(&f->c, &(struct kvp_gc_cfg){.target = target, .root_pem = root_pem, .conns = conns});
}

static void stop(struct fix *f)
{
	kvp_gc_close(f->c);
	kvp_grpc_delete(f->g);
}

static int dial(uint16_t port)
{
	struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons(port)};
	a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	if (connect(fd, (struct sockaddr *)&a, sizeof(a)) != 0)
		ok(0, "connect");
	return fd;
}

/* ended: the server has closed the connection (after whatever it sent), within the fixture's time. */
static int ended(struct fix *f, int fd)
{
	char drop[4096];
	uint64_t end = fix_now_ms() + FIX_WAIT_MS;
	while (fix_now_ms() < end) {
		ssize_t n = recv(fd, drop, sizeof(drop), MSG_DONTWAIT);
		if (n == 0 || (n < 0 && errno != EAGAIN))
			return 1;
		if (f)
			fix_pump(f);
	}
	return 0;
}

static void oversized(void)
{
	struct fix f;
	struct fix_call k;
	uint8_t big[70000] = "e";
	uint16_t port = serve(&f, &(struct kvp_grpc_cfg){.message_max_bytes = 65536}, KVP_GRPC_PLAINTEXT);
	client(&f, port, NULL, 1);
	for (uint32_t len = 65536; len <= 65537; len++) {
		fix_begin(&f, &k, fix_method[0]);
		kvp_gc_send(k.call, big, len);
		FIX_UNTIL(&f, k.messages || k.status >= 0);
		if (len == 65536) {
			is_u64(k.bytes, len, "a message of exactly the limit passes");
			kvp_gc_half_close(k.call);
			FIX_UNTIL(&f, k.status >= 0);
		} else {
			is_u64(k.status, KVP_GRPC_RESOURCE_EXHAUSTED, "one byte more ends the stream");
		}
	}
	FIX_UNTIL(&f, f.closed == 2);
	is_u64(f.cancelled, 1, "the server hears of the refused one as cancelled");
	is_u64(f.messages, 1, "and never of its message");
	stop(&f);
}

/* 64 MB towards a client that does not read: it stays in the queue of its stream, and the server stops taking
 * more from that client, while another stream is served. */
static void no_reader(void)
{
	struct fix f;
	struct fix_call lazy, other;
	uint16_t port = serve(&f, &(struct kvp_grpc_cfg){0}, KVP_GRPC_PLAINTEXT);
	client(&f, port, NULL, 2);
	fix_begin(&f, &lazy, fix_method[0]);
	kvp_gc_read_hold(lazy.call);
	fix_say(&lazy, "b 64000000");
	for (int i = 0; i < 200; i++)
		fix_say(&lazy, "hold");
	FIX_UNTIL(&f, fix_stat(&f).read_paused > 0 && f.messages > 0);
	ok(fix_stat(&f).read_paused > 0, "reading pauses when a peer does not read");
	ok(f.unsent_max > KVP_GRPC_OUTBOX_BYTES, "what waits is what we sent ourselves (%zu bytes)",
		f.unsent_max);
	for (int i = 0; i < 20; i++)
		fix_pump(&f);
	ok(f.messages <= 1 + KVP_GRPC_INBOX_MSG + 1, "its further messages stay outside (%u)", f.messages);
	fix_begin(&f, &other, fix_method[0]);
	fix_say(&other, "echo");
	FIX_UNTIL(&f, other.messages);
	is_u64(other.messages, 1, "another stream goes on");
	kvp_gc_read_go(lazy.call);
	FIX_UNTIL(&f, lazy.bytes == 64000000 && f.messages == 202);
	is_u64(lazy.bytes, 64000000, "all arrives when the peer reads again");
	is_u64(f.messages, 202, "and its own messages are taken");
	kvp_gc_cancel(lazy.call);
	FIX_UNTIL(&f, lazy.status >= 0);
	stop(&f);
}

/* A client that cancels with megabytes queued towards it: the end comes at once. */
static void cancel_unread(void)
{
	struct fix f;
	struct fix_call k;
	uint16_t port = serve(&f, &(struct kvp_grpc_cfg){0}, KVP_GRPC_PLAINTEXT);
	client(&f, port, NULL, 1);
	fix_begin(&f, &k, fix_method[0]);
	kvp_gc_read_hold(k.call);
	fix_say(&k, "b 8000000");
	FIX_UNTIL(&f, f.messages == 1);
	kvp_gc_cancel(k.call);
	FIX_UNTIL(&f, f.closed == 1);
	is_u64(f.cancelled, 1, "a cancel is heard behind megabytes that nobody reads");
	stop(&f);
}

static void too_many_streams(void)
{
	struct fix f;
	struct fix_call k[12];
	uint32_t refused = 0;
	uint16_t port = serve(&f, &(struct kvp_grpc_cfg){.stream_max = 8}, KVP_GRPC_PLAINTEXT);
	client(&f, port, NULL, 2);
	for (int i = 0; i < 8; i++) {
		fix_begin(&f, &k[i], fix_method[0]);
		fix_say(&k[i], "hold");
	}
	FIX_UNTIL(&f, f.messages == 8);
	for (int i = 8; i < 12; i++) {
		fix_begin(&f, &k[i], fix_method[0]);
		FIX_UNTIL(&f, k[i].status >= 0);
		refused += k[i].status == KVP_GRPC_RESOURCE_EXHAUSTED;
	}
	is_u64(refused, 4, "streams over stream_max end with RESOURCE_EXHAUSTED");
	is_u64(fix_stat(&f).stream_refused, 4, "and are counted");
	is_u64(f.opened, 8, "without an event");
	kvp_gc_cancel(k[0].call);
	FIX_UNTIL(&f, k[0].status >= 0 && fix_stat(&f).streams == 7);
	fix_begin(&f, &k[0], fix_method[0]);
	fix_say(&k[0], "echo");
	FIX_UNTIL(&f, k[0].messages);
	is_u64(k[0].messages, 1, "when one has ended there is room again");
	stop(&f);
}

static void too_many_connections(enum kvp_grpc_security security, const char *how)
{
	struct fix f;
	struct fix_call k;
	int fd[4];
	struct kvp_grpc_stat s;
	uint16_t port = serve(&f, &(struct kvp_grpc_cfg){.conn_max = 4}, security);
	if (!kvp_grpc_caps_connections()) {
		ok(1, "%s: # SKIP connections cannot be limited with this version of the gRPC core", how);
		kvp_grpc_delete(f.g);
		return;
	}
	for (int i = 0; i < 4; i++)
		fd[i] = dial(port);
	FIX_UNTIL(&f, fix_stat(&f).conns == 4);
	is_u64(fix_stat(&f).conns, 4, "%s: four connections are there", how);
	int over = dial(port);
	ok(ended(&f, over), "%s: the fifth is closed", how);
	close(over);
	s = fix_stat(&f);
	ok(s.conn_refused == 1 && s.conn_accepted == 4, "%s: and counted as refused", how);
	for (int i = 0; i < 4; i++)
		close(fd[i]);
	FIX_UNTIL(&f, fix_stat(&f).conns == 0);
	is_u64(fix_stat(&f).conns, 0, "%s: closed connections are no longer counted", how);
	client(&f, port, security == KVP_GRPC_TLS ? cert.cert : NULL, 1);
	fix_begin(&f, &k, fix_method[0]);
	fix_say(&k, "echo");
	FIX_UNTIL(&f, k.messages || k.status >= 0);
	is_u64(k.messages, 1, "%s: and there is room again", how);
	is_u64(fix_stat(&f).conns, 1, "%s: for one", how);
	stop(&f);
}

static void slow_and_broken(enum kvp_grpc_security security, const char *how)
{
	struct fix f;
	struct fix_call k;
	uint16_t port = serve(&f, &(struct kvp_grpc_cfg){.handshake_ms = 2000}, security);
	int silent = dial(port), broken = dial(port), half = dial(port);
	static const char garbage[] = "GET / HTTP/1.1\r\nHost: x\r\n\r\n\x16\x03\x01\xff\xff";
	static const char preface[] = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\xff\xff\xff\x7f\xff\xff\xff\xff\xff";
	ok(send(broken, garbage, sizeof(garbage), 0) > 0 && send(half, preface, sizeof(preface) - 1, 0) > 0,
		"%s: bytes that are no gRPC", how);
	ok(ended(&f, broken), "%s: another protocol is closed", how);
	ok(ended(&f, half), "%s: a frame of 16 MB is closed", how);
	ok(ended(&f, silent), "%s: a silent connection is closed after the handshake time", how);
	close(silent);
	close(broken);
	close(half);
	client(&f, port, security == KVP_GRPC_TLS ? cert.cert : NULL, 1);
	fix_begin(&f, &k, fix_method[0]);
	fix_say(&k, "echo");
	FIX_UNTIL(&f, k.messages || k.status >= 0);
	is_u64(k.messages, 1, "%s: and the server serves on", how);
	stop(&f);
}

/* The TLS of the listener as a foreign client sees it: protocol, version, the certificate's digest. */
static int handshake(
	struct fix *f, uint16_t port, int max_version, const char *offer, char *digest, char *alpn)
{
	SSL_CTX *ctx = SSL_CTX_new(TLS_client_method());
	SSL *ssl = SSL_new(ctx);
	int fd = dial(port), good = 0;
	uint64_t end = fix_now_ms() + FIX_WAIT_MS;
	fcntl(fd, F_SETFL, O_NONBLOCK);
	SSL_set_max_proto_version(ssl, max_version);
	SSL_set_alpn_protos(ssl, (const unsigned char *)offer, (unsigned)strlen(offer));
	SSL_set_fd(ssl, fd);
	while (fix_now_ms() < end) {
		int rc = SSL_connect(ssl), why = SSL_get_error(ssl, rc);
		good = rc == 1;
		if (good || (why != SSL_ERROR_WANT_READ && why != SSL_ERROR_WANT_WRITE))
			break;
		fix_pump(f);
	}
	X509 *x = good ? SSL_get1_peer_certificate(ssl) : NULL;
	unsigned char sum[32];
	unsigned len = 0;
	const unsigned char *name = NULL;
	digest[0] = alpn[0] = 0;
	if (x && X509_digest(x, EVP_sha256(), sum, &len))
		for (unsigned i = 0; i < len; i++)
			snprintf(digest + 2 * i, 3, "%02x", sum[i]);
	if (good)
		SSL_get0_alpn_selected(ssl, &name, &len);
	if (good)
		snprintf(alpn, 16, "%.*s", (int)len, name ? (const char *)name : "");
	X509_free(x);
	SSL_free(ssl);
	SSL_CTX_free(ctx);
	close(fd);
	return good;
}

static void certificates(void)
{
	struct fix f;
	struct fix_call old, fresh;
	char first[80], now[80], alpn[16];
	uint16_t port = serve(&f, &(struct kvp_grpc_cfg){0}, KVP_GRPC_TLS);
	ok(handshake(&f, port, TLS1_3_VERSION, "\x02h2", first, alpn), "TLS 1.3 is spoken");
	is_str(alpn, "h2", "and h2 agreed on");
	ok(handshake(&f, port, TLS1_2_VERSION, "\x08http/1.1\x02h2", now, alpn), "TLS 1.2 is spoken");
	is_str(alpn, "h2", "and h2 chosen");
	ok(!handshake(&f, port, TLS1_1_VERSION, "\x02h2", now, alpn), "TLS 1.1 is not");
	client(&f, port, cert.cert, 1);
	fix_begin(&f, &old, fix_method[0]);
	fix_say(&old, "echo");
	FIX_UNTIL(&f, old.messages == 1 || old.status >= 0);
	is_u64(old.messages, 1, "a stream under the first certificate");
	ok(kvp_grpc_cert_set(f.g, second.cert, cert.key) == KVP_ERR_INVAL, "a pair that is none is refused");
	ok(kvp_grpc_cert_set(f.g, "", "") == KVP_ERR_INVAL, "so is nothing");
	ok(handshake(&f, port, TLS1_3_VERSION, "\x02h2", now, alpn), "and handshakes go on");
	is_str(now, first, "with the first certificate");
	ok(kvp_grpc_cert_set(f.g, second.cert, second.key) == KVP_OK, "a second pair is taken");
	ok(handshake(&f, port, TLS1_3_VERSION, "\x02h2", now, alpn), "the next handshake");
	ok(strcmp(now, first) != 0, "shows the second certificate");
	fix_say(&old, "echo");
	FIX_UNTIL(&f, old.messages == 2);
	is_u64(old.messages, 2, "the stream under the first one goes on");
	struct kvp_gc *keep = f.c;
	client(&f, port, second.cert, 1);
	fix_begin(&f, &fresh, fix_method[0]);
	fix_say(&fresh, "echo");
	FIX_UNTIL(&f, fresh.messages == 1 || fresh.status >= 0);
	is_u64(fresh.messages, 1, "a client that trusts only the second one is served");
	kvp_gc_close(f.c);
	client(&f, port, cert.cert, 1);
	fix_begin(&f, &fresh, fix_method[0]);
	fix_say(&fresh, "echo");
	FIX_UNTIL(&f, fresh.messages == 1 || fresh.status >= 0);
	is_u64(fresh.status, KVP_GRPC_UNAVAILABLE, "one that trusts only the first is not");
	kvp_gc_close(f.c);
	f.c = keep;
	ok(fix_stat(&f).cert_renewed == 1 && fix_stat(&f).handshakes >= 7,
		"handshakes and renewals are counted");
	stop(&f);
}

/* One more process of the port: serves until its stdin ends; its streams answer with their process's
 * number. */
static pid_t child_server(uint16_t port, int *hold)
{
	int pipe_fd[2], ready[2];
	char byte = 0;
	if (pipe(pipe_fd) != 0 || pipe(ready) != 0)
		exit(1);
	pid_t pid = fork();
	if (pid == 0) {
		struct fix f = {0};
		char addr[32];
		close(pipe_fd[1]);
		snprintf(addr, sizeof(addr), "127.0.0.1:%u", port);
		struct kvp_grpc_cfg cfg = {.method = fix_method, .method_cnt = 1};
		struct kvp_grpc_listen l = {.addr = addr, .methods = 1};
		if (kvp_grpc_new(&f.g, &cfg) != KVP_OK || kvp_grpc_listen_add(f.g, &l, NULL) != KVP_OK ||
			kvp_grpc_start(f.g) != KVP_OK)
			_exit(1);
		if (write(ready[1], &byte, 1) != 1)
			_exit(1);
		fcntl(pipe_fd[0], F_SETFL, O_NONBLOCK);
		while (read(pipe_fd[0], &byte, 1) != 0)
			fix_pump(&f);
		kvp_grpc_delete(f.g);
		_exit(f.opened ? 0 : 2); /* 2: this process served nothing */
	}
	close(pipe_fd[0]);
	close(ready[1]);
	if (read(ready[0], &byte, 1) != 1)
		ok(0, "a second process listens on the same port");
	close(ready[0]);
	*hold = pipe_fd[1];
	return pid;
}

/* A port that stays ours: bound and shared like the servers', but not listening. */
static uint16_t hold_port(int *fd)
{
	struct sockaddr_in a = {.sin_family = AF_INET};
	socklen_t len = sizeof(a);
	const int one = 1;
	a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	*fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	if (setsockopt(*fd, SOL_SOCKET, SO_REUSEPORT, &one, sizeof(one)) != 0 ||
		bind(*fd, (struct sockaddr *)&a, sizeof(a)) != 0 ||
		getsockname(*fd, (struct sockaddr *)&a, &len) != 0)
		exit(1);
	return ntohs(a.sin_port);
}

static void two_processes(void)
{
	struct fix f = {0};
	int hold[2], status[2], good = 0, held;
	uint16_t port = hold_port(&held);
	pid_t pid[2] = {child_server(port, &hold[0]), child_server(port, &hold[1])};
	/* The kernel spreads connections by a hash of their ports: of 40 each process gets some. */
	for (int i = 0; i < 40; i++) {
		struct fix_call k;
		client(&f, port, NULL, 1);
		fix_begin(&f, &k, fix_method[0]);
		fix_say(&k, "echo");
		kvp_gc_half_close(k.call);
		FIX_UNTIL(&f, k.status >= 0);
		good += k.status == 0 && k.messages == 1;
		kvp_gc_close(f.c);
	}
	is_u64(good, 40, "two processes on one port: every stream is served");
	close(held);
	close(hold[0]); /* the second child has a copy of the first one's, so both before waiting */
	close(hold[1]);
	for (int i = 0; i < 2; i++) {
		waitpid(pid[i], &status[i], 0);
		ok(WIFEXITED(status[i]) && WEXITSTATUS(status[i]) == 0, "process %d served some of them", i);
	}
}

/* Out of descriptors: the limit of connections follows theirs, and a listener that the core gave up is
 * counted. */
static void no_files(void)
{
	struct fix f;
	struct rlimit before, few;
	int fd[60], top = 0, made = 0;
	getrlimit(RLIMIT_NOFILE, &before);
	few = before;
	few.rlim_cur = 300;
	setrlimit(RLIMIT_NOFILE, &few);
	uint16_t port = serve(&f, &(struct kvp_grpc_cfg){0}, KVP_GRPC_PLAINTEXT);
	is_u64(fix_stat(&f).conn_max, 101, "300 descriptors are enough for 101 connections");
	for (int i = 0; i < 60; i++) {
		fd[i] = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
		top = fd[i] > top ? fd[i] : top;
	}
	few.rlim_cur = (rlim_t)top + 8;
	setrlimit(RLIMIT_NOFILE, &few);
	struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons(port)};
	a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	for (int i = 0; i < 60; i++)
		made += connect(fd[i], (struct sockaddr *)&a, sizeof(a)) == 0;
	is_u64(made, 60, "60 connections wait for 8 descriptors");
	FIX_UNTIL(&f, fix_stat(&f).listeners_lost);
	is_u64(fix_stat(&f).listeners_lost, 1, "a listener that is lost for want of descriptors is counted");
	for (int i = 0; i < 60; i++)
		close(fd[i]);
	setrlimit(RLIMIT_NOFILE, &before);
	kvp_grpc_delete(f.g);
}

int main(void)
{
	if (TAP_IS_TSAN)
		return skip_all(FIX_TSAN);
	signal(SIGPIPE, SIG_IGN);
	two_processes(); /* first: a process must not fork once the core runs */
	ok(kvp_tls_generate(&cert) == KVP_OK && kvp_tls_generate(&second) == KVP_OK, "two certificates");
	oversized();
	no_reader();
	cancel_unread();
	too_many_streams();
	too_many_connections(KVP_GRPC_PLAINTEXT, "tcp");
	too_many_connections(KVP_GRPC_TLS, "tls");
	slow_and_broken(KVP_GRPC_PLAINTEXT, "tcp");
	slow_and_broken(KVP_GRPC_TLS, "tls");
	certificates();
	no_files();
	kvp_tls_free(&cert);
	kvp_tls_free(&second);
	return done();
}
