/* Log lines: head, fields, escaping of text from outside, both forms, truncation, the repeat limiter. */
#include "daemons/common/log.h"
#include "tests/tap.h"

#include <stdlib.h>
#include <unistd.h>

static char line[KVP_LOG_LINE_MAX + 1];
static struct kvp_log_head head = {
	KVP_LOG_LEVEL_W, KVP_LOG_FORM_TEXT, "extproc", 3, 4711, 1738324800123456789};

__attribute__((format(printf, 2, 3))) static const char *fmt_line(size_t cap, const char *fmt, ...)
{
	va_list ap;
	va_start(ap, fmt);
	size_t n = kvp_log_line(line, cap, &head, fmt, ap);
	va_end(ap);
	line[n] = 0;
	return line;
}
#define LINE(...) fmt_line(KVP_LOG_LINE_MAX, __VA_ARGS__)
#define HEAD "2025-01-31T12:00:00.123456Z W extproc[3]/4711 "
#define JHEAD                                                                                                \
	"{\"time\":\"2025-01-31T12:00:00.123456Z\",\"level\":\"W\",\"process\":\"extproc\",\"instance\":3,"  \
	"\"pid\":4711,"

static void text_form(void)
{
	const char *volatile null_text = NULL;
	is_str(LINE("resv.book selection=%s code=%s cnt=%u", "9f2c", "FULL", 65536),
		HEAD "resv.book selection=9f2c code=FULL cnt=65536\n", "head and plain values");
	is_str(LINE("a.b "), HEAD "a.b\n", "an event without fields");
	is_str(LINE("a.b x=%s", "two words"), HEAD "a.b x=\"two words\"\n", "a blank in a value is quoted");
	is_str(LINE("a.b x=%s", "y=1\n2025 E forged"), HEAD "a.b x=\"y=1\\n2025 E forged\"\n",
		"a value can't forge a field or a line");
	is_str(LINE("a.b x=%s", "\x1b[31m\"\\\x7f"), HEAD "a.b x=\"\\x1b[31m\\\"\\\\\\x7f\"\n",
		"control bytes, quote and backslash are escaped");
	is_str(LINE("a.b x=%s y=%s", "gr\xc3\xb6\xc3\x9f", "\xc3("),
		HEAD "a.b x=\"gr\xc3\xb6\xc3\x9f\" y=\"\\xc3(\"\n",
		"valid UTF-8 stays, other bytes are escaped");
	is_str(LINE("a.b x=%s", ""), HEAD "a.b x=\"\"\n", "an empty value is visible");
	is_str(LINE("a.b x=%s", null_text), HEAD "a.b x=(null)\n", "NULL is no crash");
	is_str(LINE("a.b addr=%s:%u n=%.*s", "10.0.0.1", 80u, 3, "abcdef"),
		HEAD "a.b addr=10.0.0.1:80 n=abc\n",
		"a value of several conversions, and a string with a length");
	is_str(LINE("a.b d=%d lu=%lu zu=%zu lx=%lx llu=%llu f=%.2f p=%d%%", -5, 18446744073709551615ul,
		       (size_t)7, 255ul, 9ull, 1.5, 50),
		HEAD "a.b d=-5 lu=18446744073709551615 zu=7 lx=ff llu=9 f=1.50 p=50%\n",
		"number conversions");
}

static void json_form(void)
{
	head.form = KVP_LOG_FORM_JSON;
	is_str(LINE("resv.book selection=%s cnt=%u", "9f2c", 65536),
		JHEAD "\"event\":\"resv.book\",\"selection\":\"9f2c\",\"cnt\":65536}\n",
		"numbers are JSON numbers");
	is_str(LINE("a.b x=%s y=%lx z=%s:%d", "a\"\\\n\x01", 16ul, "h", 1),
		JHEAD "\"event\":\"a.b\",\"x\":\"a\\\"\\\\\\n\\u0001\",\"y\":\"10\",\"z\":\"h:1\"}\n",
		"JSON escapes; hexadecimal and compound values are strings");
	is_str(LINE("a.b x=%s", "\xff\xed\xa0\x80"),
		JHEAD "\"event\":\"a.b\",\"x\":\"\\ufffd\\ufffd\\ufffd\\ufffd\"}\n",
		"bytes that are no UTF-8");
	is_str(LINE("a.b x=%f y=%g", 1.0 / 0.0, 2.5), JHEAD "\"event\":\"a.b\",\"x\":\"inf\",\"y\":2.5}\n",
		"a number that is not finite is a string");
	head.instance = -1;
	ok(!strstr(LINE("a.b "), "instance"), "a process without a number has no instance member");
	head.instance = 3;
	head.form = KVP_LOG_FORM_TEXT;
}

static void printable(void)
{
	char out[16];
	is_u64(kvp_log_printable("a\x1b\xc3~\x7f", out, sizeof(out)), 14, "bytes for a terminal");
	is_str(out, "a\\x1b\\xc3~\\x7f", "are ASCII");
	is_u64(kvp_log_printable("a\x1b\xc3~\x7f", out, 14), 10, "what does not fit");
	is_str(out, "a\\x1b\\xc3~", "is cut before an escape");
	is_u64(kvp_log_printable("", out, 1), 0, "nothing is nothing");
}

static void limits(void)
{
	char big[3000];
	memset(big, 'x', sizeof(big) - 1);
	big[sizeof(big) - 1] = 0;
	LINE("a.b x=%s y=1", big);
	is_u64(strlen(line), strlen(HEAD "a.b x= y=1\n") + KVP_LOG_VALUE_MAX + 2, "a long value is cut");
	ok(strstr(line, "xx.. y=1\n"), "and marked");
	fmt_line(256, "a.b one=%d x=%s two=%d", 1, big, 2);
	is_str(line, HEAD "a.b one=1 truncated=1\n", "a field that does not fit is left out as a whole");
	memset(big, 1, sizeof(big) - 1);
	size_t n = strlen(LINE("a.b a=%s b=%s c=%s", big, big, big));
	ok(n <= KVP_LOG_LINE_MAX && line[n - 1] == '\n', "escapes never outgrow a line");

	struct kvp_log_limit l = {0, 0};
	uint64_t sup = 99;
	is_u64(kvp_log_limit_pass(&l, 1000, 100, &sup), 1, "the first one passes");
	is_u64(sup, 0, "nothing suppressed yet");
	is_u64(kvp_log_limit_pass(&l, 1050, 100, &sup), 0, "within the interval: no");
	is_u64(kvp_log_limit_pass(&l, 1099, 100, &sup), 0, "still no");
	is_u64(kvp_log_limit_pass(&l, 1100, 100, &sup), 1, "after it: yes");
	is_u64(sup, 2, "with the number left out");
}

static void stderr_pipe(void)
{
	int fd[2], keep = dup(STDERR_FILENO);
	char got[8192];
	if (!ok(pipe(fd) == 0 && dup2(fd[1], STDERR_FILENO) >= 0, "stderr becomes a pipe"))
		return;
	kvp_log_setup("httpd", 2, KVP_LOG_LEVEL_N, KVP_LOG_FORM_TEXT);
	KVP_LOG_I("x.hidden", "a=%d", 1);
	KVP_LOG_N("x.shown", "a=%d", 2);
	ssize_t n = read(fd[0], got, sizeof(got) - 1);
	got[n > 0 ? n : 0] = 0;
	ok(strstr(got, " N httpd[2]/") && strstr(got, " x.shown a=2\n"), "a line at the level is written");
	ok(!strstr(got, "hidden"), "a line below it is not");
	/* Nobody reads: the writer must go on. */
	uint64_t dropped = 0;
	kvp_log_count(&dropped);
	for (int i = 0; i < 4000 && dropped == 0; i++)
		KVP_LOG_W("x.fill", "a=%0*d", 512, i);
	ok(dropped > 0, "a full pipe drops lines instead of blocking, and counts them");
	kvp_log_count(NULL);
	dup2(keep, STDERR_FILENO);
}

int main(void)
{
	text_form();
	json_form();
	printable();
	limits();
	stderr_pipe();
	return done();
}
