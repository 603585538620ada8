/* ipc/http_query.c — percent decoding and query parameters. */
#include "ipc/http_query.h"

#include <ctype.h>
#include <string.h>

static int hex_digit(char ch)
{
	if (ch >= '0' && ch <= '9')
		return ch - '0';
	ch = (char)tolower((unsigned char)ch);
	return ch >= 'a' && ch <= 'f' ? ch - 'a' + 10 : -1;
}

long kvp_percent_decode(const char *in, size_t n, enum kvp_plus plus, char *out, size_t cap)
{
	size_t len = 0;
	for (size_t i = 0; i < n; i++) {
		char ch = in[i] == '+' && plus == KVP_PLUS_IS_SPACE ? ' ' : in[i];
		if (ch == '%') {
			int hi = i + 2 < n ? hex_digit(in[i + 1]) : -1;
			int lo = i + 2 < n ? hex_digit(in[i + 2]) : -1;
			if (hi < 0 || lo < 0)
				return -1;
			ch = (char)(hi * 16 + lo);
			i += 2;
		}
		if (len == cap)
			return -1;
		out[len++] = ch;
	}
	return (long)len;
}

int kvp_query_get(const struct kvp_http_req *r, const char *name, char *buf, size_t cap, size_t *len)
{
	const char *p = r->query, *end = p ? p + r->query_len : NULL;
	size_t want = strlen(name);
	int found = 0;
	while (p && p < end) {
		const char *amp = memchr(p, '&', (size_t)(end - p));
		const char *stop = amp ? amp : end;
		const char *eq = memchr(p, '=', (size_t)(stop - p));
		size_t key = (size_t)((eq ? eq : stop) - p);
		if (key == want && memcmp(p, name, want) == 0) {
			const char *val = eq ? eq + 1 : stop;
			long n = kvp_percent_decode(val, (size_t)(stop - val), KVP_PLUS_IS_SPACE, buf, cap);
			if (n < 0 || found)
				return -1;
			*len = (size_t)n;
			found = 1;
		}
		p = amp ? amp + 1 : end;
	}
	return found;
}
