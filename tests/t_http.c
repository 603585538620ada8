/* The HTTP server over real sockets, on both loop back ends: bytes in, bytes out. */
#include "tests/http_util.h"

#define OK_HEAD(n) "HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: " #n "\r\n"
#define ERR(status, n, text)                                                                                 \
	"HTTP/1.1 " status "\r\nContent-Type: application/json\r\nContent-Length: " #n                       \
	"\r\nConnection: close\r\n\r\n{\"error\":\"" text "\"}"
#define MALFORMED ERR("400 Bad Request", 29, "malformed request")
#define LENGTHS ERR("400 Bad Request", 53, "contradictory or malformed message length")
#define CHUNK ERR("400 Bad Request", 27, "malformed chunk")
#define TARGET ERR("400 Bad Request", 36, "malformed request target")
#define VERSION ERR("505 HTTP Version Not Supported", 38, "HTTP version not supported")

enum ending { KEEP, CLOSE };
struct exchange {
	const char *name, *req, *want;
	enum ending ending;
};
static const struct exchange table[] = {
	{"GET", "GET /e HTTP/1.1\r\nHost: a\r\n\r\n", OK_HEAD(7) "\r\nGET /e ", KEEP},
	{"no Host", "GET /e HTTP/1.1\r\n\r\n", ERR("400 Bad Request", 24, "missing Host"), CLOSE},
	{"empty Host", "GET /e HTTP/1.1\r\nHost:\r\n\r\n", OK_HEAD(7) "\r\nGET /e ", KEEP},
	{"query", "GET /e?a=%2F&b HTTP/1.1\r\nHost: a\r\n\r\n", OK_HEAD(16) "\r\nGET /e ?a=%2F&b ", KEEP},
	{"empty query", "DELETE /e? HTTP/1.1\r\nHost: a\r\n\r\n", OK_HEAD(12) "\r\nDELETE /e ? ", KEEP},
	{"blank lines before", "\r\n\r\nGET /e HTTP/1.1\r\nHost: a\r\n\r\n", OK_HEAD(7) "\r\nGET /e ", KEEP},
	{"HEAD", "HEAD /e HTTP/1.1\r\nHost: a\r\n\r\n", OK_HEAD(7) "\r\n", KEEP},
	{"body by length",
		"POST /e HTTP/1.1\r\nhost: a\r\ncontent-length:  5 \r\nCONTENT-TYPE: x/y\r\n\r\nhello",
		OK_HEAD(17) "\r\nPOST /e x/y hello", KEEP},
	{"empty body", "PUT /e HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n", OK_HEAD(7) "\r\nPUT /e ",
		KEEP},
	{"empty header value", "GET /e HTTP/1.1\r\nHost: a\r\nX:\r\nY: \r\n\r\n", OK_HEAD(7) "\r\nGET /e ",
		KEEP},
	{"chunked body",
		"PATCH /e HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: Chunked\r\n\r\n"
		"3\r\nabc\r\n00A;ext=\"1\"\r\n0123456789\r\n0\r\nTrailer: x\r\n\r\n",
		OK_HEAD(22) "\r\nPATCH /e abc0123456789", KEEP},
	{"empty chunked body", "POST /e HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
		OK_HEAD(8) "\r\nPOST /e ", KEEP},
	{"absolute target", "GET http://other:1/e?q HTTP/1.1\r\nHost: a\r\n\r\n",
		OK_HEAD(10) "\r\nGET /e ?q ", KEEP},
	{"absolute target without path", "GET HTTPS://other?q HTTP/1.1\r\nHost: a\r\n\r\n",
		OK_HEAD(9) "\r\nGET / ?q ", KEEP},
	{"OPTIONS *", "OPTIONS * HTTP/1.1\r\nHost: a\r\n\r\n", OK_HEAD(10) "\r\nOPTIONS * ", KEEP},
	{"204", "GET /204 HTTP/1.1\r\nHost: a\r\n\r\n", "HTTP/1.1 204 No Content\r\n\r\n", KEEP},
	{"further fields", "GET /302 HTTP/1.1\r\nHost: a\r\n\r\n",
		"HTTP/1.1 302 Found\r\nContent-Length: 0\r\nLocation: /echo\r\n\r\n", KEEP},
	{"Connection: close", "GET /e HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n",
		OK_HEAD(7) "Connection: close\r\n\r\nGET /e ", CLOSE},
	{"HTTP/1.0", "GET /e HTTP/1.0\r\n\r\n", OK_HEAD(7) "Connection: close\r\n\r\nGET /e ", CLOSE},
	{"HTTP/1.0 keep-alive", "GET /e HTTP/1.0\r\nConnection: keep-alive\r\n\r\n",
		OK_HEAD(7) "Connection: close\r\n\r\nGET /e ", CLOSE},
	{"upgrade is ignored", "GET /e HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n",
		OK_HEAD(7) "\r\nGET /e ", KEEP},
	{"three pipelined",
		"GET /1 HTTP/1.1\r\nHost: a\r\n\r\nPOST /2 HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\nhi"
		"GET /3 HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n",
		OK_HEAD(7) "\r\nGET /1 " OK_HEAD(10) "\r\nPOST /2 hi" OK_HEAD(
			7) "Connection: close\r\n\r\nGET /3 ",
		CLOSE},
	{"good then bad", "GET /1 HTTP/1.1\r\nHost: a\r\n\r\nBAD\r\n\r\n", OK_HEAD(7) "\r\nGET /1 " MALFORMED,
		CLOSE},
	{"nothing runs behind a closing request",
		"GET /1 HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\nGET /2 HTTP/1.1\r\nHost: a\r\n\r\n",
		OK_HEAD(7) "Connection: close\r\n\r\nGET /1 ", CLOSE},
	/* framing that two parsers may read differently */
	{"length and chunked",
		"POST /e HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nTransfer-Encoding: "
		"chunked\r\n\r\n0\r\n\r\n",
		MALFORMED, CLOSE},
	{"chunked and length",
		"POST /e HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nContent-Length: "
		"5\r\n\r\n0\r\n\r\n",
		MALFORMED, CLOSE},
	{"two lengths", "POST /e HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello!",
		MALFORMED, CLOSE},
	{"two equal lengths",
		"POST /e HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nContent-Length: 5\r\n\r\nhello",
		MALFORMED, CLOSE},
	{"list of lengths", "POST /e HTTP/1.1\r\nHost: a\r\nContent-Length: 5, 5\r\n\r\nhello", MALFORMED,
		CLOSE},
	{"signed length", "POST /e HTTP/1.1\r\nHost: a\r\nContent-Length: +5\r\n\r\nhello", MALFORMED, CLOSE},
	{"hexadecimal length", "POST /e HTTP/1.1\r\nHost: a\r\nContent-Length: 0x5\r\n\r\nhello", MALFORMED,
		CLOSE},
	{"empty length", "POST /e HTTP/1.1\r\nHost: a\r\nContent-Length:\r\n\r\n", MALFORMED, CLOSE},
	{"overflowing length", "POST /e HTTP/1.1\r\nHost: a\r\nContent-Length: 18446744073709551617\r\n\r\n",
		MALFORMED, CLOSE},
	{"two transfer codings",
		"POST /e HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: "
		"chunked\r\n\r\n0\r\n\r\n",
		LENGTHS, CLOSE},
	{"foreign coding", "POST /e HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
		ERR("501 Not Implemented", 41, "transfer coding not supported"), CLOSE},
	{"coding that only looks like chunked",
		"POST /e HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
		ERR("501 Not Implemented", 41, "transfer coding not supported"), CLOSE},
	{"chunked in HTTP/1.0", "POST /e HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", LENGTHS,
		CLOSE},
	{"chunk without size", "POST /e HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n\r\n", CHUNK,
		CLOSE},
	{"chunk size no number", "POST /e HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
		CHUNK, CLOSE},
	{"signed chunk size",
		"POST /e HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n+1\r\na\r\n0\r\n\r\n",
		CHUNK, CLOSE},
	{"chunk size with space",
		"POST /e HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n1 \r\na\r\n0\r\n\r\n",
		CHUNK, CLOSE},
	{"long chunk size",
		"POST /e HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: "
		"chunked\r\n\r\n00000000000000001\r\na\r\n0\r\n\r\n",
		CHUNK, CLOSE},
	{"chunk longer than said",
		"POST /e HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nab\r\n0\r\n\r\n",
		CHUNK, CLOSE},
	{"chunk line ends in LF",
		"POST /e HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n1\na\r\n0\r\n\r\n", CHUNK,
		CLOSE},
	{"chunk data ends in LF",
		"POST /e HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\n0\r\n\r\n", CHUNK,
		CLOSE},
	{"chunk CR without LF",
		"POST /e HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n1\rXa\r\n0\r\n\r\n", CHUNK,
		CLOSE},
	{"folded trailer",
		"POST /e HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n a: b\r\n\r\n", CHUNK,
		CLOSE},
	{"space before colon", "GET /e HTTP/1.1\r\nHost : a\r\n\r\n", MALFORMED, CLOSE},
	{"folded field", "GET /e HTTP/1.1\r\nHost: a\r\nX: 1\r\n 2\r\n\r\n", MALFORMED, CLOSE},
	{"field begins with space", "GET /e HTTP/1.1\r\n Host: a\r\n\r\n", MALFORMED, CLOSE},
	{"field without name", "GET /e HTTP/1.1\r\n: a\r\n\r\n", MALFORMED, CLOSE},
	{"field without colon", "GET /e HTTP/1.1\r\nHost\r\n\r\n", MALFORMED, CLOSE},
	{"two hosts", "GET /e HTTP/1.1\r\nHost: a\r\nHost: a\r\n\r\n",
		ERR("400 Bad Request", 25, "repeated Host"), CLOSE},
	{"line ends in LF", "GET /e HTTP/1.1\nHost: a\r\n\r\n", MALFORMED, CLOSE},
	{"field ends in LF", "GET /e HTTP/1.1\r\nHost: a\n\r\n", MALFORMED, CLOSE},
	{"head ends in LF", "GET /e HTTP/1.1\r\nHost: a\r\n\n", MALFORMED, CLOSE},
	{"bare CR", "GET /e HTTP/1.1\r\nHost: a\rb\r\n\r\n", MALFORMED, CLOSE},
	{"control byte in a value", "GET /e HTTP/1.1\r\nHost: a\x01\r\n\r\n", MALFORMED, CLOSE},
	{"delete in a value", "GET /e HTTP/1.1\r\nHost: a\x7f\r\n\r\n", MALFORMED, CLOSE},
	{"control byte in the target", "GET /e\x02 HTTP/1.1\r\nHost: a\r\n\r\n", MALFORMED, CLOSE},
	{"high byte in the target", "GET /e\xc3\xa4 HTTP/1.1\r\nHost: a\r\n\r\n", MALFORMED, CLOSE},
	{"fragment in the target", "GET /e#f HTTP/1.1\r\nHost: a\r\n\r\n", MALFORMED, CLOSE},
	{"two spaces", "GET  /e HTTP/1.1\r\nHost: a\r\n\r\n", MALFORMED, CLOSE},
	{"two spaces before the version", "GET /e  HTTP/1.1\r\nHost: a\r\n\r\n", MALFORMED, CLOSE},
	{"tab for space", "GET\t/e HTTP/1.1\r\nHost: a\r\n\r\n", MALFORMED, CLOSE},
	{"space behind the version", "GET /e HTTP/1.1 \r\nHost: a\r\n\r\n", MALFORMED, CLOSE},
	{"unknown method", "FOO /e HTTP/1.1\r\nHost: a\r\n\r\n", MALFORMED, CLOSE},
	{"lower-case method", "get /e HTTP/1.1\r\nHost: a\r\n\r\n", MALFORMED, CLOSE},
	{"no version", "GET /e\r\nHost: a\r\n\r\n", MALFORMED, CLOSE},
	{"TLS hello", "\x16\x03\x01\x02", MALFORMED, CLOSE},
	{"HTTP/2 preface", "PRI * HTTP/2.0\r\n\r\n", MALFORMED, CLOSE},
	{"HTTP/2.0", "GET /e HTTP/2.0\r\nHost: a\r\n\r\n", VERSION, CLOSE},
	{"HTTP/1.2", "GET /e HTTP/1.2\r\nHost: a\r\n\r\n", VERSION, CLOSE},
	{"CONNECT", "CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n",
		ERR("501 Not Implemented", 32, "method not supported"), CLOSE},
	{"target without host", "GET http:///e HTTP/1.1\r\nHost: a\r\n\r\n", TARGET, CLOSE},
	{"star for GET", "GET * HTTP/1.1\r\nHost: a\r\n\r\n", TARGET, CLOSE},
	{"other expectation", "POST /e HTTP/1.1\r\nHost: a\r\nExpect: cake\r\nContent-Length: 1\r\n\r\n",
		ERR("417 Expectation Failed", 37, "expectation not supported"), CLOSE},
};
#define TABLE_CNT (sizeof(table) / sizeof(table[0]))

/* Sends req cut at the given places and compares every byte of the answer. */
static int exchange(const struct exchange *e, size_t cut, size_t step)
{
	size_t len = strlen(e->req), want = strlen(e->want), at = 0;
	struct in in = {0};
	int fd = dial(kvp_http_server_port(srv)), good;
	while (at < len) {
		size_t n = cut && at < cut ? cut - at : step;
		n = n < len - at ? n : len - at;
		uint64_t rx = kvp_http_server_stat(srv)->rx_bytes;
		if (put(fd, e->req + at, n) < 0)
			break;
		at += n;
		if (at < len)
			UNTIL(kvp_http_server_stat(srv)->rx_bytes >= rx + n || in.eof);
	}
	UNTIL((in_more(fd, &in), strip_dates(&in), in.len >= want && (e->ending == KEEP || in.eof)) ||
		in.eof);
	for (int i = 0; i < 2 && e->ending == KEEP; i++) {
		pump();
		in_more(fd, &in);
	}
	strip_dates(&in);
	good = in.len == want && memcmp(in.p, e->want, want) == 0 && in.eof == (e->ending == CLOSE);
	if (!good)
		printf("# cut %zu step %zu: eof %d, got (%zu bytes): %s\n", cut, step, in.eof, in.len, in.p);
	in_free(&in);
	close(fd);
	return good;
}

static void test_table(void)
{
	for (size_t i = 0; i < TABLE_CNT; i++) {
		const struct exchange *e = &table[i];
		size_t len = strlen(e->req);
		ok(exchange(e, 0, len), "%s: %s: the answer is right, byte for byte", be_name, e->name);
		int good = exchange(e, 0, 1);
		for (size_t cut = 1; cut < len && good; cut++)
			good = exchange(e, cut, len);
		ok(good, "%s: %s: also byte by byte and cut at every place", be_name, e->name);
	}
}

static void expect(const char *name, char *req, size_t len, const char *want, enum ending ending)
{
	struct in in = {0};
	int fd = dial(kvp_http_server_port(srv));
	ok(put(fd, req, len) == 0, "%s: %s: sent", be_name, name);
	size_t n = strlen(want);
	UNTIL((in_more(fd, &in), strip_dates(&in), in.len >= n && (ending == KEEP || in.eof)) || in.eof);
	ok(in.len >= n && memcmp(in.p, want, n) == 0, "%s: %s: answered as it should be", be_name, name);
	if (in.len < n || memcmp(in.p, want, n))
		printf("# got: %.200s\n", in.p);
	ok(in.eof == (ending == CLOSE), "%s: %s: connection %s", be_name, name,
		ending == CLOSE ? "closed" : "kept");
	in_free(&in);
	close(fd);
}

#define LINE414 ERR("414 URI Too Long", 33, "request line too long")
#define HEAD431 ERR("431 Request Header Fields Too Large", 34, "header block too large")
#define BODY413 ERR("413 Payload Too Large", 34, "request body too large")

enum { BODY = 8 << 20, BUF_MAX = BODY + 1000 };

static size_t make_line(char *buf, size_t line)
{
	size_t n = (size_t)snprintf(buf, BUF_MAX, "GET /");
	memset(buf + n, 'x', line - 14);
	n += line - 14;
	return n + (size_t)snprintf(buf + n, BUF_MAX - n, " HTTP/1.1\r\nHost: a\r\n\r\n");
}

static size_t make_header(char *buf, size_t block)
{
	size_t n = (size_t)snprintf(buf, BUF_MAX, "HEAD /h HTTP/1.1\r\nHost: a\r\nX: ");
	memset(buf + n, 'y', block - 16);
	n += block - 16;
	return n + (size_t)snprintf(buf + n, BUF_MAX - n, "\r\n\r\n");
}

static void test_limits(void)
{
	char *buf = malloc(BUF_MAX);
	size_t n;
	expect("request line of 16384 bytes", buf, make_line(buf, 16384), OK_HEAD(16376), KEEP);
	expect("request line of 16385 bytes", buf, make_line(buf, 16385), LINE414, CLOSE);
	expect("endless request line", buf, make_line(buf, 60000), LINE414, CLOSE);
	expect("header block of 65536 bytes", buf, make_header(buf, 65536), OK_HEAD(7), KEEP);
	expect("header block of 65537 bytes", buf, make_header(buf, 65537), HEAD431, CLOSE);
	n = (size_t)snprintf(buf, BUF_MAX, "GET /h HTTP/1.1\r\nHost: a\r\n");
	for (int i = 0; i < 1025; i++)
		n += (size_t)snprintf(buf + n, BUF_MAX - n, "a:\r\n");
	n += (size_t)snprintf(buf + n, BUF_MAX - n, "\r\n");
	expect("1025 header fields", buf, n,
		ERR("431 Request Header Fields Too Large", 34, "too many header fields"), CLOSE);
	n = (size_t)snprintf(buf, BUF_MAX, "POST /b HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n", BODY);
	memset(buf + n, 'z', BODY);
	expect("body of 8 MiB", buf, n + BODY, OK_HEAD(8388616), KEEP);
	n = (size_t)snprintf(
		buf, BUF_MAX, "POST /b HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n", BODY + 1);
	expect("body of 8 MiB and a byte, before it comes", buf, n, BODY413, CLOSE);
	n = (size_t)snprintf(buf, BUF_MAX,
		"POST /b HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: %d\r\n\r\n",
		BODY + 1);
	expect("the same with Expect: no 100", buf, n, BODY413, CLOSE);
	n = (size_t)snprintf(buf, BUF_MAX,
		"POST /b HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n", BODY + 1);
	expect("a chunk that would be too large", buf, n, BODY413, CLOSE);
	n = (size_t)snprintf(buf, BUF_MAX,
		"POST /b HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\n");
	expect("a chunk size over 64 bits", buf, n, CHUNK, CLOSE);
	/* the client goes on uploading 8 MiB after the refusal and still reads the answer */
	n = (size_t)snprintf(buf, BUF_MAX, "POST /b HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999\r\n\r\n");
	memset(buf + n, 'z', BODY);
	expect("refused upload that goes on", buf, n + BODY, BODY413, CLOSE);
	free(buf);
}

static void test_nul(void)
{
	static const char head[] = "GET /e HTTP/1.1\r\nHost: a\0b\r\n\r\n",
			  line[] = "GET /\0e HTTP/1.1\r\nHost: a\r\n\r\n";
	static const char body[] = "POST /e HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\na\0b";
	expect("NUL in a field", (char *)(uintptr_t)head, sizeof(head) - 1, MALFORMED, CLOSE);
	expect("NUL in the request line", (char *)(uintptr_t)line, sizeof(line) - 1, MALFORMED, CLOSE);
	expect("NUL in a body is nobody's business", (char *)(uintptr_t)body, sizeof(body) - 1, OK_HEAD(11),
		KEEP);
}

static void test_expect_continue(void)
{
	static const char head[] =
		"POST /e HTTP/1.1\r\nHost: a\r\nExpect: 100-Continue\r\nContent-Length: 2\r\n\r\n";
	static const char go[] = "HTTP/1.1 100 Continue\r\n\r\n";
	struct in in = {0};
	int fd = dial(kvp_http_server_port(srv));
	put(fd, head, sizeof(head) - 1);
	UNTIL((in_more(fd, &in), in.len >= sizeof(go) - 1));
	is_str(in.p, go, "%s: 100 Continue before the body", be_name);
	put(fd, "hi", 2);
	UNTIL((in_more(fd, &in), strip_dates(&in), in.len >= 100));
	is_str(in.p + sizeof(go) - 1, OK_HEAD(10) "\r\nPOST /e hi", "%s: then the answer", be_name);
	in_free(&in);
	close(fd);
}

static void test_pipelined_async(void)
{
	static const char reqs[] = "GET /hold HTTP/1.1\r\nHost: a\r\n\r\nGET /2 HTTP/1.1\r\nHost: "
				   "a\r\n\r\nGET /hold HTTP/1.1\r\nHost: a\r\n\r\n"
				   "GET /4 HTTP/1.1\r\nHost: a\r\n\r\n";
	struct in in = {0};
	int fd = dial(kvp_http_server_port(srv));
	held_cnt = 0;
	uint64_t before = kvp_http_server_stat(srv)->requests;
	put(fd, reqs, sizeof(reqs) - 1);
	UNTIL(held_cnt == 1);
	for (int i = 0; i < 3; i++)
		pump();
	in_more(fd, &in);
	ok(in.len == 0 && kvp_http_server_stat(srv)->requests == before + 1,
		"%s: requests behind one that runs are not started", be_name);
	kvp_http_reply(held[0], 200, "text/plain", "one", 3);
	UNTIL(held_cnt == 2);
	kvp_http_reply(held[1], 200, "text/plain", "three", 5);
	static const char want[] =
		OK_HEAD(3) "\r\none" OK_HEAD(7) "\r\nGET /2 " OK_HEAD(5) "\r\nthree" OK_HEAD(7) "\r\nGET /4 ";
	UNTIL((in_more(fd, &in), strip_dates(&in), in.len >= sizeof(want) - 1));
	is_str(in.p, want, "%s: answers come in order", be_name);
	in_free(&in);
	close(fd);
}

/* More behind a running request than is kept: it is answered, the rest is not. */
static void test_overrun(void)
{
	struct in in = {0};
	char *junk = calloc(1, 9 << 20);
	uint64_t before = kvp_http_server_stat(srv)->overrun;
	int fd = dial(kvp_http_server_port(srv));
	held_cnt = 0;
	put(fd, "GET /hold HTTP/1.1\r\nHost: a\r\n\r\n", 31);
	UNTIL(held_cnt == 1);
	ok(put(fd, junk, 9 << 20) == 0, "%s: 9 MiB behind a running request are taken", be_name);
	UNTIL(kvp_http_server_stat(srv)->overrun == before + 1);
	is_u64(kvp_http_server_stat(srv)->overrun, before + 1, "%s: and counted as too much", be_name);
	kvp_http_reply(held[0], 200, "text/plain", "one", 3);
	UNTIL((in_more(fd, &in), in.eof));
	strip_dates(&in);
	is_str(in.p, OK_HEAD(3) "Connection: close\r\n\r\none", "%s: the request is answered, then the end",
		be_name);
	in_free(&in);
	close(fd);
	free(junk);
}

/* A client that sends a lot before it reads: the server stops reading, forgets nothing, stays bounded. */
static void test_pipelined_many(void)
{
	enum { REQS = 1500, EACH = 8000 };
	char head[100], *all = malloc(REQS * (EACH + 100)), *at = all;
	for (int i = 0; i < REQS; i++) {
		int n = snprintf(head, sizeof(head),
			"POST /%04d HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n", i, EACH);
		memcpy(at, head, (size_t)n);
		memset(at + n, 'p', EACH);
		at += n + EACH;
	}
	struct in in = {0};
	int fd = dial(kvp_http_server_port(srv)), small = 65536, quiet = 0;
	setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &small, sizeof(small));
	char *next = all;
	uint64_t rx = 0;
	while (next < at && quiet < 200) { /* until nobody takes anything any more */
		ssize_t n = send(fd, next, (size_t)(at - next), MSG_DONTWAIT);
		next += n > 0 ? n : 0;
		pump();
		quiet = n > 0 || kvp_http_server_stat(srv)->rx_bytes != rx ? 0 : quiet + 1;
		rx = kvp_http_server_stat(srv)->rx_bytes;
	}
	ok(next < at, "%s: a client that does not read its answers cannot send for ever", be_name);
	for (uint64_t start = kvp_loop_now_ns(loop); !late(start) && in.len < (size_t)REQS * EACH;) {
		ssize_t n = next < at ? send(fd, next, (size_t)(at - next), MSG_DONTWAIT) : 0;
		next += n > 0 ? n : 0;
		pump();
		in_more(fd, &in);
	}
	UNTIL((in_more(fd, &in),
		      in.len > EACH + 11 && memcmp(in.p + in.len - EACH - 11, "POST /1499 ", 11) == 0) ||
		in.eof);
	strip_dates(&in);
	int order = 0;
	const char *p = in.p, *end = in.p + in.len;
	for (; order < REQS; order++) {
		snprintf(head, sizeof(head), "\r\n\r\nPOST /%04d p", order);
		p = memmem(p, (size_t)(end - p), head, strlen(head));
		if (!p)
			break;
	}
	is_u64(order, REQS, "%s: when it reads, every answer comes, in order", be_name);
	in_free(&in);
	close(fd);
	free(all);
}

enum gone { GONE_CLOSE, GONE_RESET, GONE_CLOSE_PIPELINED, GONE_RESET_PIPELINED };
static void test_abort(enum gone how, const char *name)
{
	static const char req[] = "GET /hold HTTP/1.1\r\nHost: a\r\n\r\n";
	int fd = dial(kvp_http_server_port(srv));
	struct linger lg = {1, 0};
	held_cnt = aborts = 0;
	put(fd, req, sizeof(req) - 1);
	UNTIL(held_cnt == 1);
	if (how == GONE_CLOSE_PIPELINED || how == GONE_RESET_PIPELINED) {
		char junk[1000];
		memset(junk, 'j', sizeof(junk));
		for (int i = 0; i < 3000; i++) { /* until the server takes no more */
			if (send(fd, junk, sizeof(junk), MSG_DONTWAIT) < 0)
				break;
			if (i % 50 == 0)
				kvp_loop_run_once(loop, 0);
		}
	}
	for (int i = 0; i < 3; i++)
		kvp_loop_run_once(loop, 0);
	is_u64(aborts, 0, "%s: %s: not yet", be_name, name);
	if (how == GONE_RESET || how == GONE_RESET_PIPELINED)
		setsockopt(fd, SOL_SOCKET, SO_LINGER, &lg, sizeof(lg));
	uint64_t t = kvp_loop_now_ns(loop);
	close(fd);
	UNTIL(aborts == 1);
	is_u64(aborts, 1, "%s: %s: the handler is told while its reply is pending", be_name, name);
	printf("# after %.1f ms\n", (double)(kvp_loop_now_ns(loop) - t) / 1e6);
	UNTIL(kvp_http_server_stat(srv)->open == 0);
}

static void test_half_close(void)
{
	static const char req[] = "GET /hold HTTP/1.1\r\nHost: a\r\n\r\nGET /2 HTTP/1.1\r\nHost: a\r\n\r\n";
	static const char want[] = OK_HEAD(4) "\r\nlate" OK_HEAD(7) "\r\nGET /2 ";
	struct in in = {0};
	int fd = dial(kvp_http_server_port(srv));
	held_cnt = aborts = 0;
	put(fd, req, sizeof(req) - 1);
	shutdown(fd, SHUT_WR);
	UNTIL(held_cnt == 1);
	for (int i = 0; i < 5; i++)
		pump();
	is_u64(aborts, 0, "%s: a half close is no abort", be_name);
	kvp_http_reply(held[0], 200, "text/plain", "late", 4);
	UNTIL((in_more(fd, &in), in.eof));
	strip_dates(&in);
	is_str(in.p, want, "%s: a client that half closed gets its answers", be_name);
	ok(in.eof == 1, "%s: and then the end", be_name);
	in_free(&in);
	close(fd);
	/* an incomplete request and then the end: nothing to say */
	fd = dial(kvp_http_server_port(srv));
	put(fd, "GET /1 HT", 9);
	shutdown(fd, SHUT_WR);
	UNTIL((in_more(fd, &in), in.eof));
	ok(in.len == 0 && in.eof == 1, "%s: half a request is closed without an answer", be_name);
	in_free(&in);
	close(fd);
}

/* Decodes what kvp_http_reply_chunk wrote; number of body bytes or -1. */
static int64_t unchunk(const char *p, size_t len)
{
	int64_t body = 0;
	const char *at = memmem(p, len, "\r\n\r\n", 4), *end = p + len;
	for (at = at ? at + 4 : end; at < end;) {
		char *nl;
		uint64_t n = strtoull(at, &nl, 16);
		if (nl == at || nl + 4 > end || memcmp(nl, "\r\n", 2))
			return -1;
		at = nl + 2 + n + 2;
		if (!n)
			return at == end ? body : -1;
		body += (int64_t)n;
	}
	return -1;
}

static void test_stream(void)
{
	static const char req[] = "GET /stream HTTP/1.1\r\nHost: a\r\n\r\n",
			  old[] = "GET /stream HTTP/1.0\r\n\r\n";
	enum { BYTES = 12 << 20 };
	struct in in = {0};
	int fd = dial(kvp_http_server_port(srv));
	again_cnt = drain_cnt = 0;
	stream_left = BYTES;
	put(fd, req, sizeof(req) - 1);
	UNTIL(again_cnt);
	for (int i = 0; i < 30; i++)
		pump();
	ok(stream_left > 0, "%s: a stream waits for a client that does not read", be_name);
	UNTIL((in_more(fd, &in), in.len > 5 && memcmp(in.p + in.len - 5, "0\r\n\r\n", 5) == 0));
	is_u64(unchunk(in.p, in.len), BYTES, "%s: and then all of it arrives, well framed", be_name);
	ok(drain_cnt > 2, "%s: asked to go on %u times", be_name, drain_cnt);
	in_free(&in);
	/* the connection is still good */
	put(fd, "GET /e HTTP/1.1\r\nHost: a\r\n\r\n", 28);
	UNTIL((in_more(fd, &in), strip_dates(&in), in.len >= 70));
	is_str(in.p, OK_HEAD(7) "\r\nGET /e ", "%s: and the next request is answered", be_name);
	in_free(&in);
	close(fd);
	fd = dial(kvp_http_server_port(srv));
	stream_left = 30000;
	put(fd, old, sizeof(old) - 1);
	UNTIL((in_more(fd, &in), in.eof));
	strip_dates(&in);
	static const char head[] = "HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nConnection: close\r\n\r\n";
	ok(in.len == sizeof(head) - 1 + 30000 && memcmp(in.p, head, sizeof(head) - 1) == 0 && in.eof == 1,
		"%s: HTTP/1.0 gets a stream that ends with the connection", be_name);
	in_free(&in);
	close(fd);
	fd = dial(kvp_http_server_port(srv));
	put(fd, "GET /abort HTTP/1.1\r\nHost: a\r\n\r\n", 32);
	UNTIL((in_more(fd, &in), in.eof));
	ok(in.len == 0, "%s: an aborted reply is a closed connection", be_name);
	in_free(&in);
	close(fd);
}

static struct kvp_http_server *open_server(const struct kvp_http_server_cfg *base)
{
	struct kvp_http_server_cfg cfg = *base;
	struct kvp_http_server *s = NULL;
	cfg.ip = "127.0.0.1";
	cfg.on_request = on_request;
	cfg.on_abort = on_abort;
	if (kvp_http_server_open(loop, &cfg, &s))
		printf("# server: errno %d\n", errno);
	return s;
}

static size_t own_error(void *ctx, int status, const char *text, char *buf, size_t cap)
{
	(void)ctx;
	(void)text;
	return (size_t)snprintf(buf, cap, "<%d>", status);
}

static void test_time(void)
{
	struct kvp_http_server_cfg cfg = {
		.read_timeout_ms = 150, .idle_timeout_ms = 250, .error_body = own_error};
	struct kvp_http_server *main_srv = srv;
	struct in in = {0};
	srv = open_server(&cfg);
	const struct kvp_http_server_stat *st = kvp_http_server_stat(srv);
	/* one byte every few milliseconds: activity does not move the deadline */
	int fd = dial(kvp_http_server_port(srv));
	uint64_t t = kvp_loop_now_ns(loop);
	put(fd, "GET /slow", 9);
	UNTIL((in_more(fd, &in), in.eof))
	{
		if (kvp_loop_now_ns(loop) > t + 5000000) {
			put(fd, "x", 1);
			t = kvp_loop_now_ns(loop);
		}
	}
	strip_dates(&in);
	is_str(in.p,
		"HTTP/1.1 408 Request Timeout\r\nContent-Type: application/json\r\nContent-Length: 5\r\n"
		"Connection: close\r\n\r\n<408>",
		"%s: a request that comes byte by byte is answered 408", be_name);
	is_u64(st->timeouts, 1, "%s: and counted", be_name);
	in_free(&in);
	close(fd);
	fd = dial(kvp_http_server_port(srv));
	put(fd, "POST /e HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\nabc", 51);
	UNTIL((in_more(fd, &in), in.eof));
	ok(in.len && memcmp(in.p, "HTTP/1.1 408 ", 13) == 0, "%s: so is a body that does not come", be_name);
	in_free(&in);
	close(fd);
	fd = dial(kvp_http_server_port(srv));
	t = kvp_loop_now_ns(loop);
	UNTIL((in_more(fd, &in), in.eof));
	ok(in.len == 0 && in.eof == 1 && kvp_loop_now_ns(loop) - t > 200000000,
		"%s: a connection without a request is closed after the idle time", be_name);
	in_free(&in);
	close(fd);
	fd = dial(kvp_http_server_port(srv));
	put(fd, "GET /hold HTTP/1.1\r\nHost: a\r\n\r\n", 31);
	held_cnt = aborts = 0;
	t = kvp_loop_now_ns(loop);
	UNTIL(kvp_loop_now_ns(loop) > t + 400000000);
	ok(held_cnt == 1 && aborts == 0, "%s: no time-out falls on a handler", be_name);
	kvp_http_reply(held[0], 200, "text/plain", "x", 1);
	UNTIL((in_more(fd, &in), in.len > 10));
	ok(in.len > 10, "%s: its late answer arrives", be_name);
	in_free(&in);
	close(fd);
	fd = dial(kvp_http_server_port(srv));
	stream_left = UINT64_C(1) << 40;
	put(fd, "GET /stream HTTP/1.1\r\nHost: a\r\n\r\n", 33);
	UNTIL(st->stalled);
	ok(st->stalled == 1 && aborts == 1, "%s: a client that reads nothing is thrown out, the handler told",
		be_name);
	stream_left = 0;
	close(fd);
	UNTIL(st->open == 0);
	kvp_http_server_close(srv);
	srv = main_srv;
}

static void test_many(void)
{
	enum { N = 400 };
	static int fd[N];
	uint64_t answered = 0;
	for (int i = 0; i < N; i++) {
		fd[i] = dial(kvp_http_server_port(srv));
		if (i % 50 == 0)
			pump();
	}
	UNTIL(kvp_http_server_stat(srv)->open == N);
	is_u64(kvp_http_server_stat(srv)->open, N, "%s: %d connections", be_name, N);
	for (int i = 0; i < N; i++)
		put(fd[i], "GET /e HTTP/1.1\r\nHost: a\r\n\r\n", 28);
	for (int i = 0; i < N; i++) {
		struct in in = {0};
		UNTIL((in_more(fd[i], &in), in.len > 60));
		answered += in.len > 60;
		in_free(&in);
		close(fd[i]);
	}
	is_u64(answered, N, "%s: all are answered", be_name);
	UNTIL(kvp_http_server_stat(srv)->open == 0);
	is_u64(kvp_http_server_stat(srv)->open, 0, "%s: and gone when their clients are", be_name);
}

static void test_max_connections(void)
{
	struct kvp_http_server_cfg cfg = {.max_connections = 2};
	struct kvp_http_server *main_srv = srv;
	struct in in = {0};
	srv = open_server(&cfg);
	int a = dial(kvp_http_server_port(srv)), b = dial(kvp_http_server_port(srv));
	UNTIL(kvp_http_server_stat(srv)->open == 2);
	int c = dial(kvp_http_server_port(srv));
	UNTIL((in_more(c, &in), in.eof));
	is_str(in.p, ERR("503 Service Unavailable", 32, "too many connections"), "%s: one too many gets 503",
		be_name);
	is_u64(kvp_http_server_stat(srv)->refused, 1, "%s: counted", be_name);
	close(a);
	UNTIL(kvp_http_server_stat(srv)->open == 1);
	close(c);
	c = dial(kvp_http_server_port(srv));
	UNTIL(kvp_http_server_stat(srv)->open == 2);
	is_u64(kvp_http_server_stat(srv)->open, 2, "%s: a free place is used again", be_name);
	in_free(&in);
	close(b);
	close(c);
	kvp_http_server_close(srv);
	srv = main_srv;
}

static int drained;
static void early(void *ctx, const struct kvp_http_req *r, struct kvp_http_refusal *why)
{
	(void)ctx;
	if (r->path_len == 7 && memcmp(r->path, "/closed", 7) == 0)
		*why = (struct kvp_http_refusal){401, "closed", "WWW-Authenticate: Bearer\r\n"};
	else if (why->status == 413)
		*why = (struct kvp_http_refusal){404, "none", NULL};
}

/* One answer of a connection that is closed behind it. */
static void last_answer(int fd, const char *want, const char *name)
{
	struct in in = {0};
	UNTIL((in_more(fd, &in), in.eof));
	strip_dates(&in);
	ok(in.p && strncmp(in.p, want, strlen(want)) == 0 && in.eof, "%s: %s", be_name, name);
	if (in.p && strncmp(in.p, want, strlen(want)) != 0)
		printf("# got: %.200s\n", in.p);
	in_free(&in);
	close(fd);
}

#define NO_ROOM                                                                                              \
	"HTTP/1.1 503 Service Unavailable\r\n"                                                               \
	"Content-Type: application/json\r\nContent-Length: 35\r\nRetry-After: 1\r\n"                         \
	"Connection: close\r\n\r\n{\"error\":\"too many bytes are held\"}"

static void test_held(void)
{
	static const char head[] = "POST /hold HTTP/1.1\r\nHost: a\r\nContent-Length: 900\r\n\r\n";
	static char body[900];
	struct kvp_held budget = {.max = 1000};
	struct kvp_http_server_cfg cfg = {.held = &budget};
	struct kvp_http_server *main_srv = srv;
	memset(body, 'b', sizeof(body));
	srv = open_server(&cfg);
	const struct kvp_http_server_stat *st = kvp_http_server_stat(srv);
	held_cnt = 0;
	int a = dial(kvp_http_server_port(srv));
	put(a, head, sizeof(head) - 1);
	put(a, body, 600);
	UNTIL(budget.all == 600);
	is_u64(budget.all, 600, "%s: half a body is held", be_name);
	int b = dial(kvp_http_server_port(srv));
	put(b, head, sizeof(head) - 1);
	put(b, body, 600);
	last_answer(b, NO_ROOM, "another one is too much: 503");
	is_u64(st->held_refused, 1, "%s: counted", be_name);
	put(a, body, 300);
	UNTIL(held_cnt == 1);
	is_u64(budget.all, 900, "%s: a request that waits for its answer holds its body", be_name);
	put(a, head, sizeof(head) - 1);
	UNTIL(budget.all > 900);
	put(a, body, 200);
	UNTIL(st->held_refused == 2);
	is_u64(budget.all, 900 + sizeof(head) - 1,
		"%s: what is pipelined behind it counts, what is too much is dropped", be_name);
	kvp_http_reply(held[0], 200, "text/plain", "x", 1);
	last_answer(a,
		"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 1\r\n"
		"Connection: close\r\n\r\nx",
		"and closes the connection behind the answer");
	UNTIL(st->open == 0);
	is_u64(budget.all, 0, "%s: nothing is held when all are gone", be_name);
	a = dial(kvp_http_server_port(srv));
	put(a, head, sizeof(head) - 1);
	put(a, body, 900);
	UNTIL(held_cnt == 2);
	kvp_http_req_forget_body(held[1]);
	ok(budget.all == 0 && held[1]->body_len == 0, "%s: a forgotten body is not held", be_name);
	kvp_http_reply(held[1], 200, "text/plain", "x", 1);
	close(a);
	UNTIL(st->open == 0);
	a = dial(kvp_http_server_port(srv));
	put(a, head, sizeof(head) - 1);
	put(a, body, 600);
	UNTIL(budget.all == 600);
	close(a);
	UNTIL(st->open == 0);
	is_u64(budget.all, 0, "%s: a client that leaves gives its bytes back", be_name);
	is_u64(st->overrun, 0, "%s: none of this is an overrun of one connection", be_name);
	kvp_http_server_close(srv);
	srv = main_srv;
}

static void test_early(void)
{
	static const char closed[] = "POST /closed HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\n"
				     "Content-Length: 900\r\n\r\n";
	static const char chunked[] = "POST /e HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
				      "5\r\nabc";
	struct kvp_http_server_cfg cfg = {.on_early = early, .body_max_bytes = 1000};
	struct kvp_http_server *main_srv = srv;
	srv = open_server(&cfg);
	int a = dial(kvp_http_server_port(srv));
	put(a, closed, sizeof(closed) - 1);
	last_answer(a,
		"HTTP/1.1 401 Unauthorized\r\nContent-Type: application/json\r\nContent-Length: 18\r\n"
		"WWW-Authenticate: Bearer\r\nConnection: close\r\n\r\n{\"error\":\"closed\"}",
		"a request is refused before its body comes, without 100");
	a = dial(kvp_http_server_port(srv));
	put(a, chunked, sizeof(chunked) - 1);
	UNTIL(kvp_http_server_stat(srv)->rx_bytes > sizeof(closed) + sizeof(chunked) - 4);
	put(a, "de\r\n3e8\r\n", 9);
	last_answer(a, ERR("404 Not Found", 16, "none"), "a body that gets too large is judged again");
	is_u64(kvp_http_server_stat(srv)->requests, 0, "%s: no handler saw them", be_name);
	kvp_http_server_close(srv);
	srv = main_srv;
}

static void on_drained(void *ctx)
{
	(void)ctx;
	drained++;
}

static void test_drain(void)
{
	struct kvp_http_server_cfg cfg = {.linger_ms = 100};
	struct kvp_http_server *main_srv = srv;
	struct in idle_in = {0}, busy_in = {0}, part_in = {0}, late_in = {0};
	srv = open_server(&cfg);
	int idle = dial(kvp_http_server_port(srv)), busy = dial(kvp_http_server_port(srv)),
	    part = dial(kvp_http_server_port(srv));
	held_cnt = aborts = 0;
	put(idle, "GET /e HTTP/1.1\r\nHost: a\r\n\r\n", 28);
	UNTIL((in_more(idle, &idle_in), idle_in.len > 60));
	put(busy, "GET /hold HTTP/1.1\r\nHost: a\r\n\r\n", 31);
	put(part, "POST /e HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\n\r\nab", 50);
	UNTIL(held_cnt == 1 && kvp_http_server_stat(srv)->rx_bytes == 19 + 22 + 41);
	int late_fd = dial(kvp_http_server_port(srv)); /* waits in the backlog */
	put(late_fd, "GET /late HTTP/1.1\r\nHost: a\r\n\r\n", 31);
	drained = 0;
	kvp_http_server_drain(srv, on_drained, NULL);
	UNTIL((in_more(idle, &idle_in), idle_in.eof));
	ok(idle_in.eof == 1, "%s: drain: idle connections are closed at once", be_name);
	UNTIL((in_more(late_fd, &late_in), late_in.eof));
	strip_dates(&late_in);
	is_str(late_in.p, OK_HEAD(10) "Connection: close\r\n\r\nGET /late ",
		"%s: drain: the backlog is served", be_name);
	put(part, "cd", 2);
	UNTIL((in_more(part, &part_in), part_in.eof));
	strip_dates(&part_in);
	is_str(part_in.p, OK_HEAD(12) "Connection: close\r\n\r\nPOST /e abcd", "%s: drain: uploads finish",
		be_name);
	ok(!drained, "%s: drain: not over while a request runs", be_name);
	kvp_http_reply(held[0], 200, "text/plain", "x", 1);
	UNTIL((in_more(busy, &busy_in), busy_in.eof));
	close(busy);
	close(part);
	close(late_fd);
	UNTIL(drained);
	is_u64(drained, 1, "%s: drain: then it is over, once", be_name);
	struct in none = {0};
	struct sockaddr_in sa = {.sin_family = AF_INET,
		.sin_port = htons(kvp_http_server_port(srv)),
		.sin_addr = {htonl(0x7f000001)}};
	int refused = socket(AF_INET, SOCK_STREAM, 0);
	ok(connect(refused, (struct sockaddr *)&sa, sizeof(sa)) < 0 && errno == ECONNREFUSED,
		"%s: drain: nobody gets in any more", be_name);
	close(refused);
	in_free(&idle_in);
	in_free(&busy_in);
	in_free(&part_in);
	in_free(&late_in);
	in_free(&none);
	close(idle);
	kvp_http_server_close(srv);
	srv = main_srv;
}

static void run(enum kvp_loop_backend be, const char *name)
{
	struct kvp_http_server_cfg cfg = {.linger_ms = 2000};
	be_name = name;
	if (!ok(kvp_loop_open_backend(&loop, 0, be) == KVP_OK, "%s: loop", name))
		return;
	srv = open_server(&cfg);
	ok(srv && kvp_http_server_port(srv), "%s: server on port %u", name,
		srv ? kvp_http_server_port(srv) : 0);
	test_table();
	test_nul();
	test_limits();
	test_expect_continue();
	test_pipelined_async();
	test_half_close();
	test_overrun();
	test_pipelined_many();
	test_stream();
	UNTIL(kvp_http_server_stat(srv)->open == 0);
	test_abort(GONE_CLOSE, "closed by the client");
	test_abort(GONE_RESET, "reset by the client");
	test_abort(GONE_CLOSE_PIPELINED, "closed behind unread pipelined bytes");
	test_abort(GONE_RESET_PIPELINED, "reset behind unread pipelined bytes");
	test_many();
	test_time();
	test_max_connections();
	test_held();
	test_early();
	test_drain();
	/* closing tells the handlers of running requests */
	int fd = dial(kvp_http_server_port(srv));
	held_cnt = aborts = 0;
	put(fd, "GET /hold HTTP/1.1\r\nHost: a\r\n\r\n", 31);
	UNTIL(held_cnt == 1);
	kvp_http_server_close(srv);
	is_u64(aborts, 1, "%s: closing the server aborts running requests", name);
	close(fd);
	kvp_loop_close(loop);
}

int main(void)
{
	if (TAP_IS_TSAN)
		return skip_all("one thread, and minutes under ThreadSanitizer");
	return on_each_backend(run);
}
