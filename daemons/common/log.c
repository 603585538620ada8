#include "daemons/common/log.h"

#include <kvpick/atomic.h>
#include <kvpick/err.h>

#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define SPEC_MAX 32
#define TAIL_MAX 32 /* room kept for the mark of a truncated line and its end */

static const char level_char[] = "DINWE";
static struct {
	const char *process;
	int instance;
	enum kvp_log_level least;
	enum kvp_log_form form;
} settings = {"kvpick", -1, KVP_LOG_LEVEL_I, KVP_LOG_FORM_TEXT};
static uint64_t nobody_looks, *dropped = &nobody_looks;

/* Bounded output. A field that does not fit is taken back as a whole, hence the explicit overflow mark. */
struct sink {
	char *buf;
	size_t len, cap;
	enum { SINK_FITS, SINK_FULL } state;
};

/* One value under construction: literal parts and conversions of the format up to its next blank. */
struct value {
	char text[KVP_LOG_VALUE_MAX + 4];
	size_t len;
	unsigned conversions;
	enum { VALUE_TEXT, VALUE_NUMBER } kind;
};

static void put(struct sink *s, const char *p, size_t n)
{
	if (s->state == SINK_FULL || n > s->cap - s->len) {
		s->state = SINK_FULL;
		return;
	}
	memcpy(s->buf + s->len, p, n);
	s->len += n;
}

static void put_str(struct sink *s, const char *p)
{
	put(s, p, strlen(p));
}

__attribute__((format(printf, 2, 3))) static void put_fmt(struct sink *s, const char *fmt, ...)
{
	char t[128];
	va_list ap;
	va_start(ap, fmt);
	int n = vsnprintf(t, sizeof(t), fmt, ap);
	va_end(ap);
	put(s, t, n < (int)sizeof(t) ? (size_t)n : sizeof(t) - 1);
}

static void value_add(struct value *v, const char *p, size_t n)
{
	size_t room = KVP_LOG_VALUE_MAX - v->len;
	if (v->len >= KVP_LOG_VALUE_MAX)
		return;
	if (n <= room) {
		memcpy(v->text + v->len, p, n);
		v->len += n;
		return;
	}
	memcpy(v->text + v->len, p, room);
	memcpy(v->text + KVP_LOG_VALUE_MAX, "..", 2);
	v->len = KVP_LOG_VALUE_MAX + 2;
}

/* Length of the valid UTF-8 sequence at p, 0 if there is none. */
static size_t utf8_len(const unsigned char *p, size_t n)
{
	static const struct {
		unsigned char lo, hi, second_lo, second_hi;
		size_t len;
	} form[] = {{0xc2, 0xdf, 0x80, 0xbf, 2}, {0xe0, 0xe0, 0xa0, 0xbf, 3}, {0xe1, 0xec, 0x80, 0xbf, 3},
		{0xed, 0xed, 0x80, 0x9f, 3}, {0xee, 0xef, 0x80, 0xbf, 3}, {0xf0, 0xf0, 0x90, 0xbf, 4},
		{0xf1, 0xf3, 0x80, 0xbf, 4}, {0xf4, 0xf4, 0x80, 0x8f, 4}};
	for (size_t f = 0; f < sizeof(form) / sizeof(form[0]); f++) {
		if (p[0] < form[f].lo || p[0] > form[f].hi)
			continue;
		if (n < form[f].len || p[1] < form[f].second_lo || p[1] > form[f].second_hi)
			return 0;
		for (size_t i = 2; i < form[f].len; i++)
			if ((p[i] & 0xc0) != 0x80)
				return 0;
		return form[f].len;
	}
	return 0;
}

static int plain_char(unsigned char c)
{
	return c > ' ' && c < 0x7f && c != '"' && c != '\\' && c != '=';
}

static int is_plain(const struct value *v)
{
	for (size_t i = 0; i < v->len; i++)
		if (!plain_char((unsigned char)v->text[i]))
			return 0;
	return v->len > 0;
}

size_t kvp_log_printable(const char *text, char *out, size_t cap)
{
	size_t len = 0;
	for (const unsigned char *p = (const unsigned char *)text; *p; p++) {
		int is_printable = *p >= ' ' && *p < 0x7f;
		size_t need = is_printable ? 1 : 4;
		if (len + need >= cap)
			break;
		if (is_printable)
			out[len] = (char)*p;
		else
			snprintf(out + len, need + 1, "\\x%02x", *p);
		len += need;
	}
	out[len] = 0;
	return len;
}

/* The same escapes serve both forms but for bytes that are no text: JSON knows no \x. */
static void put_quoted(struct sink *s, const struct value *v, enum kvp_log_form form)
{
	put(s, "\"", 1);
	for (size_t i = 0; i < v->len;) {
		const unsigned char *p = (const unsigned char *)v->text + i;
		size_t n = 1;
		if (*p == '"' || *p == '\\')
			put_fmt(s, "\\%c", *p);
		else if (*p == '\n')
			put(s, "\\n", 2);
		else if (*p < ' ' || *p == 0x7f)
			put_fmt(s, form == KVP_LOG_FORM_JSON ? "\\u%04x" : "\\x%02x", *p);
		else if (*p < 0x7f)
			put(s, (const char *)p, 1);
		else if ((n = utf8_len(p, v->len - i)) != 0)
			put(s, (const char *)p, n);
		else if (form == KVP_LOG_FORM_JSON)
			put(s, "\\ufffd", 6);
		else
			put_fmt(s, "\\x%02x", *p);
		i += n ? n : 1;
	}
	put(s, "\"", 1);
}

static void put_field(
	struct sink *s, const char *key, size_t key_len, const struct value *v, enum kvp_log_form form)
{
	size_t before = s->len;
	if (form == KVP_LOG_FORM_JSON) {
		put(s, ",\"", 2);
		put(s, key, key_len);
		put(s, "\":", 2);
	} else {
		put(s, " ", 1);
		put(s, key, key_len);
		put(s, "=", 1);
	}
	int bare = form == KVP_LOG_FORM_JSON ? v->kind == VALUE_NUMBER && v->conversions == 1 : is_plain(v);
	if (bare)
		put(s, v->text, v->len);
	else
		put_quoted(s, v, form);
	if (s->state == SINK_FULL)
		s->len = before;
}

/* A conversion of the format: its flags and digits are handed to snprintf, its length decides the argument.
 * */
struct spec {
	char text[SPEC_MAX];
	size_t len;
	char conv;
	enum { LEN_INT, LEN_LONG, LEN_LLONG, LEN_SIZE } length;
	int precision; /* of a string: at most that many bytes, -1 without */
};

static const char *spec_parse(const char *f, struct spec *sp, va_list *ap)
{
	*sp = (struct spec){.len = 0, .length = LEN_INT, .precision = -1};
	sp->text[sp->len++] = '%';
	for (f++; *f && strchr("-+ #0123456789.*", *f); f++) {
		if (*f == '*') {
			sp->precision = va_arg(*ap, int);
			sp->len += (size_t)snprintf(sp->text + sp->len, 12, "%d", sp->precision);
		} else if (sp->len < SPEC_MAX - 20) {
			sp->text[sp->len++] = *f;
		}
	}
	for (; *f == 'l' || *f == 'z'; f++) {
		sp->length = *f == 'z' ? LEN_SIZE : sp->length == LEN_LONG ? LEN_LLONG : LEN_LONG;
		sp->text[sp->len++] = *f;
	}
	sp->conv = *f;
	sp->text[sp->len++] = *f;
	sp->text[sp->len] = 0;
	return *f ? f + 1 : f;
}

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wformat-nonliteral"
static void convert_number(struct value *v, const struct spec *sp, va_list *ap)
{
	char t[400];
	int n;
	if (strchr("fFgGeE", sp->conv))
		n = snprintf(t, sizeof(t), sp->text, va_arg(*ap, double));
	else if (sp->length == LEN_LLONG)
		n = snprintf(t, sizeof(t), sp->text, va_arg(*ap, long long));
	else if (sp->length == LEN_LONG)
		n = snprintf(t, sizeof(t), sp->text, va_arg(*ap, long));
	else if (sp->length == LEN_SIZE)
		n = snprintf(t, sizeof(t), sp->text, va_arg(*ap, size_t));
	else
		n = snprintf(t, sizeof(t), sp->text, va_arg(*ap, int));
	if (n > 0)
		value_add(v, t, (size_t)n < sizeof(t) ? (size_t)n : sizeof(t) - 1);
	/* JSON numbers: decimal and finite. */
	if (v->conversions == 0 && v->len == (size_t)n && strchr("diufg", sp->conv) && !strpbrk(t, "in +") &&
		!(t[0] == '0' && t[1] >= '0' && t[1] <= '9'))
		v->kind = VALUE_NUMBER;
}
#pragma GCC diagnostic pop

static void convert(struct value *v, const struct spec *sp, va_list *ap)
{
	if (sp->conv == 's') {
		const char *p = va_arg(*ap, const char *);
		if (!p)
			p = "(null)";
		value_add(v, p, sp->precision >= 0 ? strnlen(p, (size_t)sp->precision) : strlen(p));
	} else if (sp->conv == 'c') {
		char c = (char)va_arg(*ap, int);
		value_add(v, &c, 1);
	} else if (sp->conv == '%') {
		value_add(v, "%", 1);
	} else {
		convert_number(v, sp, ap);
	}
	v->conversions++;
}

static void put_head(struct sink *s, const struct kvp_log_head *h, const char *event, size_t event_len)
{
	time_t sec = (time_t)(h->real_ns / 1000000000);
	struct tm tm;
	gmtime_r(&sec, &tm);
	char when[64];
	size_t n = strftime(when, sizeof(when), "%Y-%m-%dT%H:%M:%S", &tm);
	snprintf(when + n, sizeof(when) - n, ".%06dZ", (int)(h->real_ns % 1000000000 / 1000));
	char level = level_char[h->level];
	if (h->form == KVP_LOG_FORM_JSON) {
		put_fmt(s, "{\"time\":\"%s\",\"level\":\"%c\",\"process\":\"%s\"", when, level, h->process);
		if (h->instance >= 0)
			put_fmt(s, ",\"instance\":%d", h->instance);
		put_fmt(s, ",\"pid\":%d,\"event\":\"%.*s\"", h->pid, (int)event_len, event);
		return;
	}
	put_fmt(s, "%s %c %s", when, level, h->process);
	if (h->instance >= 0)
		put_fmt(s, "[%d]", h->instance);
	put_fmt(s, "/%d ", h->pid);
	put(s, event, event_len);
}

/* Reads one field of the format from f (at its key) and appends it. A word without "=" has the key "text". */
static const char *field(struct sink *s, const char *f, va_list *ap, enum kvp_log_form form)
{
	struct value v = {.len = 0, .conversions = 0, .kind = VALUE_TEXT};
	const char *key = "text";
	size_t n = strcspn(f, "= %");
	size_t key_len = 4;
	if (f[n] == '=') {
		key = f;
		key_len = n;
		f += n + 1;
	}
	while (*f && *f != ' ') {
		if (*f == '%') {
			struct spec sp;
			f = spec_parse(f, &sp, ap);
			convert(&v, &sp, ap);
		} else {
			v.kind = VALUE_TEXT;
			v.conversions += 2;
			value_add(&v, f++, 1);
		}
	}
	put_field(s, key, key_len, &v, form);
	return f;
}

size_t kvp_log_line(char *buf, size_t cap, const struct kvp_log_head *head, const char *fmt, va_list ap)
{
	struct sink s = {.buf = buf, .len = 0, .cap = cap - TAIL_MAX, .state = SINK_FITS};
	va_list args;
	va_copy(args, ap);
	size_t event_len = strcspn(fmt, " ");
	put_head(&s, head, fmt, event_len);
	for (const char *f = fmt + event_len; *f && s.state == SINK_FITS;) {
		if (*f == ' ')
			f++;
		else
			f = field(&s, f, &args, head->form);
	}
	va_end(args);
	int cut = s.state == SINK_FULL, json = head->form == KVP_LOG_FORM_JSON;
	s.cap = cap;
	s.state = SINK_FITS;
	if (cut)
		put_str(&s, json ? ",\"truncated\":1" : " truncated=1");
	put_str(&s, json ? "}\n" : "\n");
	return s.len;
}

void kvp_log_setup(const char *process, int instance, enum kvp_log_level least, enum kvp_log_form form)
{
	settings.process = process;
	settings.instance = instance;
	settings.least = least;
	settings.form = form;
}

void kvp_log_write(enum kvp_log_level level, const char *fmt, ...)
{
	if (level < settings.least)
		return;
	struct timespec ts;
	clock_gettime(CLOCK_REALTIME, &ts);
	struct kvp_log_head head = {level, settings.form, settings.process, settings.instance, (int)getpid(),
		(int64_t)ts.tv_sec * 1000000000 + ts.tv_nsec};
	char line[KVP_LOG_LINE_MAX];
	va_list ap;
	va_start(ap, fmt);
	size_t n = kvp_log_line(line, sizeof(line), &head, fmt, ap);
	va_end(ap);
	/* A stuck reader of stderr must not stop a daemon: a line that would wait is dropped. */
	struct pollfd pfd = {.fd = STDERR_FILENO, .events = POLLOUT};
	if (poll(&pfd, 1, 0) != 1 || write(STDERR_FILENO, line, n) < 0)
		kvp_faa_rlx_u64(dropped, 1);
}

void kvp_log_count(uint64_t *counter)
{
	dropped = counter ? counter : &nobody_looks;
}

int kvp_log_limit_pass(struct kvp_log_limit *l, uint64_t now_ns, uint64_t interval_ns, uint64_t *suppressed)
{
	uint64_t next = kvp_ld_rlx_u64(&l->next_ns);
	if (now_ns < next || !kvp_cas_ar_u64(&l->next_ns, next, now_ns + interval_ns)) {
		kvp_faa_rlx_u64(&l->suppressed, 1);
		return 0;
	}
	*suppressed = kvp_xchg_ar_u64(&l->suppressed, 0);
	return 1;
}
