/* ipc/http_url.c — the parts of an http:// address. */
#include "ipc/http_url.h"

#include <stdio.h>
#include <string.h>

static int port_of(const char *s, size_t len, uint16_t *port)
{
	uint32_t v = 0;
	for (size_t i = 0; i < len; i++) {
		if (s[i] < '0' || s[i] > '9' || v > 65535)
			return 0;
		v = v * 10 + (uint32_t)(s[i] - '0');
	}
	*port = (uint16_t)v;
	return len && v >= 1 && v <= 65535;
}

static const char *base_set(struct kvp_http_url *u, const char *path)
{
	size_t len = strcspn(path, "?#");
	if (len && path[len - 1] == '/')
		len--;
	if (len >= sizeof(u->base))
		return "is too long";
	for (size_t i = 0; i < len; i++)
		if ((unsigned char)path[i] <= 32 || (unsigned char)path[i] >= 127)
			return "has a character in its path that no address has";
	memcpy(u->base, path, len);
	u->base[len] = 0;
	return NULL;
}

/* "/path/to/socket" or "/path/to/socket:/base" behind "unix:" */
static const char *unix_set(struct kvp_http_url *u, const char *s)
{
	const char *colon = strstr(s, ":/");
	size_t len = colon ? (size_t)(colon - s) : strcspn(s, "?#");
	if (*s != '/' || len < 2 || len > 107)
		return "has no socket path of at most 107 bytes behind unix:";
	snprintf(u->host, sizeof(u->host), "unix:%.*s", (int)len, s);
	snprintf(u->authority, sizeof(u->authority), "localhost");
	return base_set(u, colon ? colon + 1 : "");
}

const char *kvp_http_url_parse(struct kvp_http_url *u, const char *text)
{
	if (strncmp(text, "https://", 8) == 0)
		return "begins with https://, which this version cannot speak to a service";
	return kvp_http_url_parse_any(u, text);
}

const char *kvp_http_url_parse_any(struct kvp_http_url *u, const char *text)
{
	memset(u, 0, sizeof(*u));
	u->is_https = strncmp(text, "https://", 8) == 0;
	if (!u->is_https && strncmp(text, "http://", 7) != 0)
		return "does not begin with http:// or https://";
	const char *s = text + 7 + u->is_https;
	if (strncmp(s, "unix:/", 6) == 0)
		return u->is_https ? "has a socket behind https://" : unix_set(u, s + 5);
	size_t len = strcspn(s, "/?#");
	const char *host = s, *end = s + len, *colon;
	if (memchr(s, '@', len))
		return "has user information in it";
	if (*s == '[') {
		host = s + 1;
		end = memchr(s, ']', len);
		if (!end)
			return "has a bracket without its end";
		colon = end + 1;
	} else {
		colon = memchr(s, ':', len);
		colon = end = colon ? colon : end;
	}
	size_t host_len = (size_t)(end - host), rest = (size_t)(s + len - colon);
	if (!host_len || host_len >= sizeof(u->host) - 8)
		return "has no host, or one that is too long";
	u->port = u->is_https ? 443 : 80;
	if (rest && (*colon != ':' || rest > 6 || !port_of(colon + 1, rest - 1, &u->port)))
		return "has a bad port";
	memcpy(u->host, host, host_len);
	snprintf(u->authority, sizeof(u->authority), "%.*s", (int)len, s);
	return base_set(u, s + len);
}
