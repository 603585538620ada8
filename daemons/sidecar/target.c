#include "daemons/sidecar/target.h"

#include <arpa/inet.h>
#include <kvpick/err.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "daemons/common/config.h"

#define PORT_DIGITS_MAX 32 /* leading zeros are legal, not any number of them */

static int is_name(char c)
{
	return (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '-' ||
	       c == '.' || c == '_' || c == '~';
}

static int port_parse(const char *v, size_t len, uint16_t *out)
{
	uint32_t port = 0;
	if (!len || len > PORT_DIGITS_MAX)
		return KVP_ERR_INVAL;
	for (size_t i = 0; i < len; i++) {
		if (v[i] < '0' || v[i] > '9')
			return KVP_ERR_INVAL;
		port = port * 10 + (uint32_t)(v[i] - '0');
		if (port > 65535)
			return KVP_ERR_INVAL;
	}
	if (!port)
		return KVP_ERR_INVAL;
	*out = (uint16_t)port;
	return KVP_OK;
}

int kvp_target_parse(const char *v, size_t len, struct kvp_target *out)
{
	struct kvp_target t;
	struct in6_addr ip6;
	size_t host = 0, from = 0;
	int v6 = len && v[0] == '[';
	if (v6) {
		const char *end = memchr(v, ']', len);
		from = 1;
		host = end ? (size_t)(end - v) - 1 : 0;
	} else {
		while (host < len && is_name(v[host]))
			host++;
	}
	size_t colon = from + host + (size_t)v6;
	if (!host || host > KVP_TARGET_HOST_MAX || colon >= len || v[colon] != ':' ||
		port_parse(v + colon + 1, len - colon - 1, &t.port))
		return KVP_ERR_INVAL;
	memcpy(t.host, v + from, host);
	t.host[host] = 0;
	if (v6 && (strlen(t.host) != host || inet_pton(AF_INET6, t.host, &ip6) != 1))
		return KVP_ERR_INVAL;
	snprintf(t.authority, sizeof(t.authority), v6 ? "[%s]:%u" : "%s:%u", t.host, (unsigned)t.port);
	*out = t;
	return KVP_OK;
}

/* Address bytes of a literal, 0 if it is none. An IPv4 address mapped into IPv6 is that IPv4 address. */
static size_t address(const char *host, uint8_t *b)
{
	static const uint8_t mapped[12] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};
	if (inet_pton(AF_INET, host, b) == 1)
		return 4;
	if (inet_pton(AF_INET6, host, b) != 1)
		return 0;
	if (memcmp(b, mapped, sizeof(mapped)) != 0)
		return 16;
	memmove(b, b + 12, 4);
	return 4;
}

static int in_net(const char *net, const char *bits, const uint8_t *ip, size_t ip_len)
{
	uint8_t n[16];
	unsigned long left = strtoul(bits, NULL, 10);
	if (address(net, n) != ip_len || !ip_len || left > ip_len * 8)
		return 0;
	for (size_t i = 0; left; i++) {
		unsigned take = left < 8 ? (unsigned)left : 8, mask = (0xffu << (8 - take)) & 0xff;
		if ((n[i] ^ ip[i]) & mask)
			return 0;
		left -= take;
	}
	return 1;
}

static int same_host(const char *a, const char *host, const uint8_t *ip, size_t ip_len)
{
	uint8_t b[16];
	if (ip_len)
		return address(a, b) == ip_len && memcmp(b, ip, ip_len) == 0;
	return strcasecmp(a, host) == 0;
}

int kvp_target_allowed(const char *list, const struct kvp_target *t)
{
	char m[512];
	size_t pos = 0;
	uint8_t ip[16];
	size_t ip_len = address(t->host, ip);
	if (!list[0])
		return 1;
	while (kvp_config_list_next(list, &pos, m, sizeof(m))) {
		struct kvp_target one;
		char *slash = strchr(m, '/'), *host = m;
		size_t len = strlen(m);
		if (slash) {
			*slash = 0;
			if (in_net(m, slash + 1, ip, ip_len))
				return 1;
			continue;
		}
		if (kvp_target_parse(m, len, &one) == KVP_OK) {
			if (one.port == t->port && same_host(one.host, t->host, ip, ip_len))
				return 1;
			continue;
		}
		if (len > 2 && m[0] == '[' && m[len - 1] == ']') {
			m[len - 1] = 0;
			host++;
		}
		if (same_host(host, t->host, ip, ip_len))
			return 1;
	}
	return 0;
}

static int is_blank(char c)
{
	return c == ' ' || c == '\t';
}

size_t kvp_target_pick(
	const struct kvp_target_text *line, size_t line_cnt, struct kvp_target_text *out, size_t most)
{
	size_t n = 0, value_cnt = 0;
	for (size_t i = 0; i < line_cnt; i++) {
		const char *p = line[i].ptr, *end = p + line[i].len;
		if (p == end && !value_cnt)
			return 0;
		while (p < end) {
			const char *comma = memchr(p, ',', (size_t)(end - p)), *to = comma ? comma : end;
			const char *next = comma ? comma + 1 : end;
			while (p < to && is_blank(*p))
				p++;
			while (to > p && is_blank(to[-1]))
				to--;
			if (to - p >= 7 && strncasecmp(p, "http://", 7) == 0)
				p += 7;
			int seen = to == p;
			if (seen && !value_cnt)
				return 0;
			value_cnt++;
			for (size_t k = 0; k < n && k < most && !seen; k++)
				seen = out[k].len == (size_t)(to - p) && !memcmp(out[k].ptr, p, out[k].len);
			if (!seen && n < most)
				out[n++] = (struct kvp_target_text){p, (size_t)(to - p)};
			p = next;
		}
	}
	return n;
}
