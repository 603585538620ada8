/* Heads byte by byte: which bytes a value and a name may have, at every place, in one piece and in single
 * bytes. Numbers as the library of C prints them. */
#include <kvpick/err.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ipc/http_parse.h"
#include "tests/tap.h"

#define PLACES 17 /* more than two words of eight */
#define TOKENS                                                                                               \
	"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"                                     \
	"!#$%&'*+-.^_`|~"

enum how { WHOLE, BYTES };

/* What feed (*fed) and then parse say of a request whose field is name and val. */
static int head_read(struct kvp_http_head *h, const char *name, uint64_t name_len, const char *val,
	uint64_t val_len, enum how how, int *fed)
{
	static const char line[] = "GET / HTTP/1.1\r\nHost: a\r\n";
	struct kvp_http_buf b = {0};
	uint64_t used, at = 0;
	int rc = KVP_ERR_AGAIN;
	*h = (struct kvp_http_head){.line_max = 1000, .header_max = 1000};
	if (kvp_http_buf_text(&b, line) || kvp_http_buf_put(&b, name, name_len) ||
		kvp_http_buf_text(&b, ": ") || kvp_http_buf_put(&b, val, val_len) ||
		kvp_http_buf_text(&b, "\r\n\r\n"))
		abort();
	while (rc == KVP_ERR_AGAIN && at < b.len) {
		rc = kvp_http_head_feed(h, b.p + at, how == WHOLE ? b.len - at : 1, &used);
		at += used;
	}
	kvp_http_buf_free(&b);
	*fed = rc;
	return rc ? rc : kvp_http_head_parse(h, KVP_HTTP_KIND_REQUEST);
}

static int is_field(const struct kvp_http_head *h, const char *name, uint64_t name_len, const char *val,
	uint64_t val_len)
{
	const struct kvp_http_field *f = &h->field[1];
	return h->field_cnt == 2 && f->name_len == name_len &&
	       memcmp(h->raw.p + f->name, name, name_len) == 0 && f->val_len == val_len &&
	       memcmp(h->raw.p + f->val, val, val_len) == 0;
}

static void values(enum how how)
{
	uint32_t wrong = 0;
	for (int c = 0; c < 256; c++)
		for (int at = 1; at < PLACES - 1; at++) { /* blanks around a value are no part of it */
			struct kvp_http_head h;
			char val[PLACES];
			memset(val, 'v', sizeof(val));
			val[at] = (char)c;
			int may = (c >= 32 && c != 127) || c == '\t';
			int fed, rc = head_read(&h, "x", 1, val, sizeof(val), how, &fed);
			int got = rc == KVP_OK && is_field(&h, "x", 1, val, sizeof(val));
			wrong += got != may || fed != (may ? KVP_OK : KVP_ERR_PROTO);
			kvp_http_head_free(&h);
		}
	is_u64(wrong, 0, "a value takes every byte but control bytes, at every place");
}

static void names(enum how how)
{
	uint32_t wrong = 0;
	for (int c = 0; c < 256; c++)
		for (int at = 0; at < PLACES; at++) {
			struct kvp_http_head h;
			char name[PLACES];
			memset(name, 'n', sizeof(name));
			name[at] = (char)c;
			int may = c && strchr(TOKENS, c);
			int fed, rc = head_read(&h, name, sizeof(name), "v", 1, how, &fed);
			int got = rc == KVP_OK && is_field(&h, name, sizeof(name), "v", 1);
			/* A colon ends the name before it. */
			int is_short = c == ':' && at;
			wrong += got != may || (!may && !is_short && rc != KVP_ERR_PROTO);
			kvp_http_head_free(&h);
		}
	is_u64(wrong, 0, "a name takes the bytes of a token, at every place");
}

static void number(uint64_t n, uint32_t *wrong)
{
	char want[32], got[KVP_DECIMAL_MAX], line[KVP_HTTP_CHUNK_LINE_MAX];
	unsigned len = (unsigned)snprintf(want, sizeof(want), "%llu", (unsigned long long)n);
	*wrong += kvp_http_dec(got, n) != len || memcmp(got, want, len) != 0;
	len = (unsigned)snprintf(want, sizeof(want), "%llx\r\n", (unsigned long long)n);
	*wrong += kvp_http_chunk_line(line, n) != len || memcmp(line, want, len) != 0;
}

static void numbers(void)
{
	uint32_t wrong = 0;
	number(UINT64_MAX, &wrong);
	for (uint64_t n = 0; n < 70000; n++)
		number(n, &wrong);
	for (uint64_t base = 10; base <= 16; base += 6)
		for (uint64_t n = 1; n <= UINT64_MAX / base; n *= base) {
			number(n * base, &wrong);
			number(n * base - 1, &wrong);
		}
	is_u64(wrong, 0, "decimal and chunk lines");
}

int main(void)
{
	kvp_http_parse_init();
	for (int how = WHOLE; how <= BYTES; how++) {
		values((enum how)how);
		names((enum how)how);
	}
	numbers();
	return done();
}
