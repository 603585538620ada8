/* Tagged replies: the server hears of those that a client which went away cannot have got, and of no others.
 * On both loop back ends, over real sockets in one thread. */
#include "tests/http_util.h"
#include <sys/ioctl.h>

#define TAG_MAX 4096
static uint8_t missing[TAG_MAX]; /* by tag, how often reported */
static uint32_t missing_cnt, tagged;
static uint32_t reply_bytes; /* of a body */
static uint64_t head_bytes;  /* of a whole answer without its body */

static void on_tagged(void *ctx, struct kvp_http_req *r)
{
	static char body[1u << 20];
	if (path_is(r, "/hold")) {
		on_request(ctx, r);
		return;
	}
	kvp_http_reply_tag(r, ++tagged);
	kvp_http_reply(r, 200, "text/plain", body, reply_bytes);
}

static void on_undelivered(void *ctx, uint64_t tag)
{
	(void)ctx;
	missing[tag]++;
	missing_cnt++;
}

static void open_tagged(void)
{
	struct kvp_http_server_cfg cfg = {.ip = "127.0.0.1",
		.linger_ms = 300,
		.on_request = on_tagged,
		.on_abort = on_abort,
		.on_undelivered = on_undelivered};
	memset(missing, 0, sizeof(missing));
	missing_cnt = tagged = held_cnt = aborts = 0;
	reply_bytes = 10;
	if (!ok(kvp_http_server_open(loop, &cfg, &srv) == KVP_OK, "%s: server", be_name))
		exit(1);
}

static void close_tagged(void)
{
	UNTIL(kvp_http_server_stat(srv)->open == 0);
	is_u64(kvp_http_server_stat(srv)->open, 0, "%s: no connection stays", be_name);
	kvp_http_server_close(srv);
}

static const char req[] = "GET /t HTTP/1.1\r\nHost: a\r\n\r\n";
#define REQ_LEN (sizeof(req) - 1)

static void reset(int fd)
{
	struct linger lg = {1, 0};
	setsockopt(fd, SOL_SOCKET, SO_LINGER, &lg, sizeof(lg));
	close(fd);
}

/* Reads until n answers of the present size have arrived. */
static void answers(int fd, struct in *in, uint32_t n)
{
	UNTIL((in_more(fd, in), in->eof || in->len >= n * (head_bytes + reply_bytes)));
}

static void test_delivered(void)
{
	struct in in = {0};
	open_tagged();
	int fd = dial(kvp_http_server_port(srv));
	put(fd, req, REQ_LEN);
	UNTIL((in_more(fd, &in), in.p && memmem(in.p, in.len, "\r\n\r\n", 4)));
	head_bytes = in.len - reply_bytes;
	for (uint32_t i = 2; i <= 300; i++) {
		put(fd, req, REQ_LEN);
		answers(fd, &in, i);
	}
	is_u64(in.len, 300 * (head_bytes + reply_bytes), "%s: 300 answers on one connection", be_name);
	close(fd);
	in_free(&in);
	fd = dial(kvp_http_server_port(srv));
	put(fd, req, REQ_LEN);
	answers(fd, &in, 1);
	reset(fd);
	in_free(&in);
	fd = dial(kvp_http_server_port(srv));
	put(fd, req, REQ_LEN);
	shutdown(fd, SHUT_WR);
	UNTIL((in_more(fd, &in), in.eof));
	is_u64(in.len, head_bytes + reply_bytes, "%s: a client that has ended its side is answered", be_name);
	close(fd);
	in_free(&in);
	close_tagged();
	is_u64(tagged, 302, "%s: all ran", be_name);
	is_u64(missing_cnt, 0, "%s: what was read is not reported, however the client went", be_name);
}

static void test_gone_at_once(void)
{
	open_tagged();
	int fd = dial(kvp_http_server_port(srv));
	put(fd, req, REQ_LEN);
	close(fd);
	UNTIL(missing_cnt);
	is_u64(missing_cnt, 1, "%s: closed before the answer: reported", be_name);
	fd = dial(kvp_http_server_port(srv));
	put(fd, "GET /t HTTP/1.1\r\nHost: a\r\n\r\nGET /t HTTP/1.1\r\nHost: a\r\n\r\nGET /t HTT", 66);
	close(fd);
	UNTIL(missing_cnt == 3);
	is_u64(missing_cnt, 3, "%s: both pipelined answers, not the half request", be_name);
	close_tagged();
	is_u64(missing[1] + missing[2] + missing[3], 3, "%s: each once", be_name);
}

enum leaving { LEAVE_RESET, LEAVE_CLOSE, LEAVE_SERVER };
static void test_not_read(enum leaving how, const char *name)
{
	enum { REQS = 200 };
	int room = 150000, got = 0;
	open_tagged();
	reply_bytes = 40000;
	int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &room, sizeof(room));
	struct sockaddr_in sa = {.sin_family = AF_INET,
		.sin_port = htons(kvp_http_server_port(srv)),
		.sin_addr = {htonl(0x7f000001)}};
	ok(connect(fd, (struct sockaddr *)&sa, sizeof(sa)) == 0, "%s: %s: connected", be_name, name);
	for (int i = 0; i < REQS; i++)
		put(fd, req, REQ_LEN);
	uint64_t tx = UINT64_MAX;
	for (int quiet = 0; quiet < 200; pump()) {
		quiet = tx == kvp_http_server_stat(srv)->tx_bytes ? quiet + 1 : 0;
		tx = kvp_http_server_stat(srv)->tx_bytes;
	}
	is_u64(missing_cnt, 0, "%s: %s: nothing reported while the client may still read", be_name, name);
	ioctl(fd, FIONREAD, &got);
	uint32_t whole =
		(uint32_t)((uint64_t)got / (head_bytes + 3 + reply_bytes)); /* "40000": 3 more digits */
	if (how == LEAVE_SERVER)
		kvp_http_server_close(srv);
	if (how == LEAVE_RESET)
		reset(fd);
	else
		close(fd);
	if (how != LEAVE_SERVER)
		close_tagged();
	uint32_t first = 1;
	while (first <= tagged && !missing[first])
		first++;
	uint32_t cnt = 0;
	for (uint32_t t = first; t <= tagged; t++)
		cnt += missing[t] == 1;
	is_u64(cnt, tagged - first + 1, "%s: %s: all from answer %u of %u on, each once", be_name, name,
		first, tagged);
	if (how == LEAVE_SERVER)
		ok(first > whole, "%s: %s: what the kernel has taken may arrive", be_name, name);
	else
		ok(whole && first <= whole + 1 && first + 1 >= whole,
			"%s: %s: those that had come are not: %u of them", be_name, name, whole);
}

/* A handler that holds the request hears of the end by on_abort; there is no reply to speak of. */
static void test_held(void)
{
	struct in in = {0};
	open_tagged();
	int fd = dial(kvp_http_server_port(srv));
	put(fd, "GET /t HTTP/1.1\r\nHost: a\r\n\r\nGET /hold HTTP/1.1\r\nHost: a\r\n\r\n", 59);
	answers(fd, &in, 1);
	is_u64(held_cnt, 1, "%s: one answered, one held", be_name);
	in_free(&in);
	reset(fd);
	UNTIL(aborts == 1);
	is_u64(aborts, 1, "%s: the holder is told", be_name);
	close_tagged();
	is_u64(missing_cnt, 0, "%s: the answer before it had arrived", be_name);
}

static void run(enum kvp_loop_backend be, const char *name)
{
	be_name = name;
	if (!ok(kvp_loop_open_backend(&loop, 0, be) == KVP_OK, "%s: loop", name))
		return;
	test_delivered();
	test_gone_at_once();
	test_not_read(LEAVE_RESET, "reset unread");
	test_not_read(LEAVE_CLOSE, "closed unread");
	test_not_read(LEAVE_SERVER, "the server ends");
	test_held();
	kvp_loop_close(loop);
}

int main(void)
{
	return on_each_backend(run);
}
