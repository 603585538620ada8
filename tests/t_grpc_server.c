/* The gRPC server with the real client over TCP, a Unix socket and TLS: many streams, order and content, half
 * close, cancel, status, abort, shutdown with open streams. */
#include "tests/grpc_fixture.h"

#include "ipc/tls_cert.h"

#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#define STREAMS 200
#define MESSAGES 6
#define RESETS 50

static uint8_t pattern[300000];
static char unix_path[64];

static void many_streams(struct fix *f, const char *how)
{
	static const uint32_t size[MESSAGES] = {0, 1, 5, 1000, 16384, 66000};
	static struct fix_call call[STREAMS];
	uint32_t wrong = 0, messages = 0, status = 0;
	for (uint32_t i = 0; i < STREAMS; i++) {
		fix_begin(f, &call[i], fix_method[0]);
		call[i].want = pattern;
		for (uint32_t k = 0; k < MESSAGES; k++)
			kvp_gc_send(call[i].call, pattern, size[k]);
		kvp_gc_half_close(call[i].call);
	}
	for (uint32_t i = 0; i < STREAMS; i++) {
		FIX_UNTIL(f, call[i].status >= 0);
		wrong += call[i].wrong + (call[i].bytes != 83390);
		messages += call[i].messages;
		status += call[i].status == 0;
	}
	is_u64(messages, STREAMS * MESSAGES, "%s: every message of %d streams came back", how, STREAMS);
	is_u64(wrong, 0, "%s: unchanged and complete", how);
	is_u64(status, STREAMS, "%s: every stream ended with OK behind its half close", how);
	FIX_UNTIL(f, f->closed == STREAMS);
	is_u64(f->finished, STREAMS, "%s: the server saw each end, as finished", how);
	is_u64(f->half_closed, STREAMS, "%s: and each half close", how);
	is_u64(fix_stat(f).streams, 0, "%s: no stream is left", how);
}

static void big_message(struct fix *f, const char *how)
{
	struct fix_call k;
	fix_begin(f, &k, fix_method[0]);
	k.want = pattern;
	kvp_gc_send(k.call, pattern, sizeof(pattern));
	FIX_UNTIL(f, k.messages == 1 || k.status >= 0);
	ok(k.bytes == sizeof(pattern) && !k.wrong, "%s: a message of 300,000 bytes goes there and back", how);
	kvp_gc_half_close(k.call);
	FIX_UNTIL(f, k.status >= 0);
	is_u64(k.status, 0, "%s: its stream ends with OK", how);
}

/* The first messages of a stream at once, together with its initial metadata, and then more; small and large.
 * Then a stream that is reset while they are on their way. */
static void lent_messages(struct fix *f, const char *how)
{
	static const uint32_t size[] = {3, 60, 5000, 70000, 200000};
	struct fix_call k;
	for (size_t i = 0; i < sizeof(size) / sizeof(size[0]); i++) {
		uint8_t *msg = malloc(size[i]);
		memcpy(msg, pattern, size[i]);
		msg[0] = 'l';
		fix_begin(f, &k, fix_method[0]);
		k.want = msg;
		kvp_gc_send(k.call, msg, size[i]);
		FIX_UNTIL(f, k.messages == 3 || k.status >= 0);
		kvp_gc_send(k.call, msg, size[i]);
		FIX_UNTIL(f, k.messages == 6 || k.status >= 0);
		ok(k.messages == 6 && !k.wrong && k.bytes == 6ull * size[i],
			"%s: six lent messages of %u bytes", how, size[i]);
		kvp_gc_half_close(k.call);
		FIX_UNTIL(f, k.status >= 0);
		is_u64(k.status, 0, "%s: and the end", how);
		uint32_t lent = f->lent;
		fix_begin(f, &k, fix_method[0]);
		k.want = msg;
		kvp_gc_send(k.call, msg, size[i]);
		FIX_UNTIL(f, f->lent > lent);
		kvp_gc_cancel(k.call);
		FIX_UNTIL(f, k.status >= 0 && f->closed == f->opened);
		free(msg);
	}
}

static void endings(struct fix *f, const char *how)
{
	struct fix_call k;
	uint32_t closed = f->closed, half = f->half_closed, cancelled = f->cancelled,
		 refused = f->after_close, status = 0;
	FIX_UNTIL(f, f->closed == f->opened);
	closed = f->closed;
	for (uint32_t i = 1; i <= RESETS; i++) {
		fix_begin(f, &k, fix_method[0]);
		fix_say(&k, "hold");
		FIX_UNTIL(f, f->last && kvp_grpc_ctx(f->last));
		kvp_gc_cancel(k.call);
		FIX_UNTIL(f, f->closed == closed + i && k.status >= 0);
		status += k.status == KVP_GRPC_CANCELLED;
	}
	is_u64(status, RESETS, "%s: a client that cancels gets its status", how);
	is_u64(f->cancelled, cancelled + RESETS, "%s: the server hears of it", how);
	ok(f->after_close >= refused + RESETS, "%s: a send after the end is refused", how);
	printf("# %s: %u of %d resets showed as a half close first\n", how, f->half_closed - half, RESETS);
	closed += RESETS - 1;

	char want[64] = "s\x09response_body_mode is 0; \xc3\xa4";
	fix_begin(f, &k, fix_method[0]);
	fix_say(&k, want);
	FIX_UNTIL(f, k.status >= 0);
	is_u64(k.status, KVP_GRPC_FAILED_PRECONDITION, "%s: the server's status arrives", how);
	is_str(k.text, want + 2, "%s: with its text", how);
	FIX_UNTIL(f, f->closed == closed + 2);

	refused = f->after_close;
	fix_begin(f, &k, fix_method[0]);
	fix_say(&k, "quick");
	FIX_UNTIL(f, k.status >= 0);
	ok(k.status == 0 && k.messages == 3, "%s: messages queued before a finish arrive before it", how);
	ok(f->after_close > refused, "%s: a send behind a finish is refused", how);
	FIX_UNTIL(f, f->closed == closed + 3);

	cancelled = f->cancelled;
	fix_begin(f, &k, fix_method[0]);
	fix_say(&k, "abort");
	FIX_UNTIL(f, k.status >= 0 && f->closed == closed + 4);
	ok(k.status > 0, "%s: an aborted stream fails at the client (status %d)", how, k.status);
	is_u64(f->cancelled, cancelled + 1, "%s: and counts as cancelled", how);

	uint64_t unknown = fix_stat(f).stream_unknown;
	uint32_t opened = f->opened;
	for (int i = 0; i < 2; i++) {
		fix_begin(f, &k, i ? "/kvp.test.Service/None" : fix_method[1]);
		fix_say(&k, "echo");
		FIX_UNTIL(f, k.status >= 0);
		is_u64(k.status, KVP_GRPC_UNIMPLEMENTED, "%s: %s method is refused", how,
			i ? "an unknown" : "another listener's");
	}
	is_u64(fix_stat(f).stream_unknown, unknown + 2, "%s: and counted", how);
	is_u64(f->opened, opened, "%s: without an event", how);
}

/* The connection goes away under open streams: a client that is closed. */
static void lost_connection(struct fix *f, const char *how, const struct kvp_gc_cfg *cfg)
{
	struct fix_call k[20];
	struct kvp_gc *keep = f->c;
	uint32_t closed, cancelled = f->cancelled;
	FIX_UNTIL(f, f->closed == f->opened);
	closed = f->closed;
	kvp_gc_open(&f->c, cfg);
	uint32_t held = f->messages;
	for (int i = 0; i < 20; i++) {
		fix_begin(f, &k[i], fix_method[0]);
		fix_say(&k[i], "hold");
	}
	FIX_UNTIL(f, f->messages == held + 20);
	kvp_gc_close(f->c);
	f->c = keep;
	FIX_UNTIL(f, f->closed == closed + 20);
	is_u64(f->cancelled, cancelled + 20, "%s: streams of a lost connection are cancelled", how);
}

static void shutdown_open(struct fix *f, const char *how)
{
	struct fix_call k[8], late;
	uint32_t held = f->messages;
	for (int i = 0; i < 8; i++) {
		fix_begin(f, &k[i], fix_method[0]);
		fix_say(&k[i], "echo");
	}
	FIX_UNTIL(f, f->messages == held + 8);
	kvp_grpc_drain(f->g);
	for (int i = 0; i < 8; i++) {
		fix_say(&k[i], "echo");
		FIX_UNTIL(f, k[i].messages == 2);
		is_u64(k[i].messages, 2, "%s: stream %d goes on during shutdown", how, i);
	}
	ok(!f->drained, "%s: not drained while streams are open", how);
	fix_begin(f, &late, fix_method[0]);
	fix_say(&late, "echo");
	kvp_gc_half_close(late.call);
	FIX_UNTIL(f, late.status >= 0);
	ok(late.status == KVP_GRPC_UNAVAILABLE, "%s: a new stream finds nobody (%d)", how, late.status);
	for (int i = 0; i < 6; i++)
		kvp_gc_half_close(k[i].call);
	for (int i = 0; i < 6; i++) {
		FIX_UNTIL(f, k[i].status >= 0);
		is_u64(k[i].status, 0, "%s: and ends as it should", how);
	}
	kvp_grpc_abort_all(f->g);
	for (int i = 6; i < 8; i++) {
		FIX_UNTIL(f, k[i].status >= 0);
		ok(k[i].status > 0, "%s: the rest is aborted (%d)", how, k[i].status);
	}
	FIX_UNTIL(f, f->drained);
	is_u64(f->drained, 1, "%s: drained when the last stream is gone", how);
	is_u64(f->closed, f->opened, "%s: every stream had its end", how);
}

static void transport(const char *how, struct kvp_grpc_listen listen, const struct kvp_tls_pair *cert)
{
	struct fix f = {0};
	struct kvp_grpc_cfg cfg = {.method = fix_method, .method_cnt = 2, .log = fix_log};
	uint16_t port = 0;
	char target[96];
	ok(kvp_grpc_new(&f.g, &cfg) == KVP_OK, "%s: a server", how);
	listen.methods = 1;
	if (listen.security == KVP_GRPC_TLS) {
		ok(kvp_grpc_listen_add(f.g, &listen, &port) == KVP_ERR_INVAL, "TLS needs a certificate");
		ok(kvp_grpc_cert_set(f.g, cert->cert, cert->key) == KVP_OK, "a certificate is taken");
	}
	ok(kvp_grpc_listen_add(f.g, &listen, &port) == KVP_OK, "%s: listens", how);
	ok(kvp_grpc_start(f.g) == KVP_OK, "%s: serves", how);
	snprintf(target, sizeof(target), "127.0.0.1:%u", port);
	struct kvp_gc_cfg client = {.target = port ? target : listen.addr, .conns = 2};
	client.root_pem = listen.security == KVP_GRPC_TLS ? cert->cert : NULL;
	kvp_gc_open(&f.c, &client);
	many_streams(&f, how);
	big_message(&f, how);
	lent_messages(&f, how);
	endings(&f, how);
	lost_connection(&f, how, &client);
	shutdown_open(&f, how);
	struct kvp_grpc_stat s = fix_stat(&f);
	ok(s.msg_received >= STREAMS * MESSAGES && s.bytes_sent > STREAMS * 83390ull && !s.streams,
		"%s: counts of messages and bytes", how);
	kvp_gc_close(f.c);
	kvp_grpc_delete(f.g);
	ok(f.lent && f.lent_done == f.lent, "%s: everything lent was given back (%u of %u)", how, f.lent_done,
		f.lent);
}

/* What can't be an address, or not that way. */
static void addresses(const struct kvp_tls_pair *cert)
{
	static const char *const bad[] = {"", "127.0.0.1", "127.0.0.1:", "127.0.0.1:65536", "localhost:1",
		":1", "::1:80", "[::1]", "[::1]x:80", "127.0.0.1:1x", "unix:relative", "unix:", "300.0.0.1:1",
		"127.0.0.1:-1",
		"unix:/aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"
		"aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"};
	struct kvp_grpc_cfg cfg = {.method = fix_method, .method_cnt = 1};
	struct kvp_grpc *g;
	ok(kvp_grpc_new(&g, &cfg) == KVP_OK, "a server");
	for (uint32_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
		struct kvp_grpc_listen l = {.addr = bad[i], .methods = 1};
		ok(kvp_grpc_listen_add(g, &l, NULL) == KVP_ERR_INVAL, "'%s' is no address", bad[i]);
	}
	kvp_grpc_cert_set(g, cert->cert, cert->key);
	struct kvp_grpc_listen l = {.addr = unix_path, .security = KVP_GRPC_TLS, .methods = 1};
	ok(kvp_grpc_listen_add(g, &l, NULL) == KVP_ERR_INVAL, "no TLS on a Unix socket");
	l = (struct kvp_grpc_listen){.addr = "unix:/nonexistent/x", .methods = 1};
	ok(kvp_grpc_listen_add(g, &l, NULL) == KVP_ERR_SYS, "a path that can't be bound");
	l.addr = unix_path;
	struct sockaddr_un dead = {.sun_family = AF_UNIX};
	snprintf(dead.sun_path, sizeof(dead.sun_path), "%s", unix_path + 5);
	int fd = socket(AF_UNIX, SOCK_STREAM, 0);
	ok(bind(fd, (struct sockaddr *)&dead, sizeof(dead)) == 0, "what a killed process leaves");
	close(fd);
	ok(kvp_grpc_listen_add(g, &l, NULL) == KVP_OK, "is replaced");
	struct stat sb;
	ok(stat(unix_path + 5, &sb) == 0 && S_ISSOCK(sb.st_mode) && (sb.st_mode & 0777) == 0600,
		"the socket is for its owner only");
	kvp_grpc_delete(g);
	ok(stat(unix_path + 5, &sb) != 0, "and gone with the server, which never started");
	cfg.method_cnt = 0;
	ok(kvp_grpc_new(&g, &cfg) == KVP_ERR_INVAL, "a server without methods is refused");
	kvp_grpc_delete(NULL);
}

int main(void)
{
	struct kvp_tls_pair cert;
	if (TAP_IS_TSAN)
		return skip_all(FIX_TSAN);
	for (uint32_t i = 0; i < sizeof(pattern); i++)
		pattern[i] = (uint8_t)(i * 7 + i / 251);
	pattern[0] = 'e';
	snprintf(unix_path, sizeof(unix_path), "unix:/tmp/kvp-t-grpc-%d.sock", (int)getpid());
	ok(kvp_tls_generate(&cert) == KVP_OK, "a certificate is made");
	addresses(&cert);
	transport("tcp", (struct kvp_grpc_listen){.addr = "127.0.0.1:0"}, &cert);
	transport("unix", (struct kvp_grpc_listen){.addr = unix_path}, &cert);
	transport("tls", (struct kvp_grpc_listen){.addr = "127.0.0.1:0", .security = KVP_GRPC_TLS}, &cert);
	kvp_tls_free(&cert);
	return done();
}
