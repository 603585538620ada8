/* ipc/zmq_endpoint.c — addresses of listeners, see zmq_sub.h. */
#include <stdio.h>
#include <string.h>

#include "ipc/zmq_sub.h"

static int refuse(char *err, size_t cap, const char *text)
{
	if (err && cap)
		snprintf(err, cap, "%s", text);
	return KVP_ERR_INVAL;
}

/* Decimal digits only, 0..65535. */
static int parse_port(const char *s, uint32_t *out)
{
	uint32_t v = 0;
	size_t n = strlen(s);
	if (!n || n > 5)
		return KVP_ERR_INVAL;
	for (; *s; s++) {
		if (*s < '0' || *s > '9')
			return KVP_ERR_INVAL;
		v = v * 10 + (uint32_t)(*s - '0');
	}
	if (v > 65535)
		return KVP_ERR_INVAL;
	*out = v;
	return KVP_OK;
}

static int check_tcp(const char *addr, char *err, size_t cap)
{
	const char *colon = strrchr(addr, ':');
	uint32_t port;
	if (!colon)
		return refuse(err, cap, "tcp endpoint needs a port");
	if (parse_port(colon + 1, &port) != KVP_OK)
		return refuse(err, cap, "tcp port must be a number from 0 to 65535");
	size_t host_len = (size_t)(colon - addr);
	if (!host_len)
		return refuse(err, cap, "tcp endpoint needs a host");
	if (addr[0] == '[') {
		if (host_len < 3 || addr[host_len - 1] != ']' || memchr(addr + 1, '[', host_len - 1) ||
			memchr(addr, ']', host_len - 1))
			return refuse(err, cap, "IPv6 host must be enclosed in brackets");
		return KVP_OK;
	}
	if (memchr(addr, ':', host_len) || memchr(addr, '[', host_len) || memchr(addr, ']', host_len))
		return refuse(err, cap, "IPv6 host must be enclosed in brackets");
	return KVP_OK;
}

int kvp_zmq_endpoint_check(const char *endpoint, char *err, size_t cap)
{
	size_t len = strlen(endpoint);
	if (len > KVP_ZMQ_ENDPOINT_MAX)
		return refuse(err, cap, "endpoint is longer than 1024 bytes");
	for (size_t i = 0; i < len; i++)
		if ((unsigned char)endpoint[i] <= ' ' || endpoint[i] == 0x7f)
			return refuse(err, cap, "endpoint contains white space or control characters");
	const char *sep = strstr(endpoint, "://");
	if (!sep)
		return refuse(err, cap, "endpoint needs a scheme: tcp://, ipc:// or inproc://");
	const char *addr = sep + 3;
	size_t scheme_len = (size_t)(sep - endpoint);
	if (scheme_len == 3 && !memcmp(endpoint, "tcp", 3))
		return check_tcp(addr, err, cap);
	if ((scheme_len == 3 && !memcmp(endpoint, "ipc", 3)) ||
		(scheme_len == 6 && !memcmp(endpoint, "inproc", 6)))
		return *addr ? KVP_OK : refuse(err, cap, "endpoint needs an address");
	return refuse(err, cap, "unsupported endpoint scheme, use tcp, ipc or inproc");
}

int kvp_zmq_endpoint_advance(const char *endpoint, uint32_t delta, char *out, size_t cap)
{
	char text[KVP_ZMQ_ENDPOINT_MAX + 32];
	int n;
	if (kvp_zmq_endpoint_check(endpoint, NULL, 0) != KVP_OK)
		return KVP_ERR_INVAL;
	if (!delta) {
		n = snprintf(text, sizeof(text), "%s", endpoint);
	} else if (!strncmp(endpoint, "inproc://", 9)) {
		n = snprintf(text, sizeof(text), "%s_dp%u", endpoint, delta);
	} else if (!strncmp(endpoint, "tcp://", 6)) {
		const char *colon = strrchr(endpoint, ':');
		uint32_t port = 0;
		if (parse_port(colon + 1, &port) != KVP_OK)
			return KVP_ERR_INVAL;
		if (delta > 65535 - port)
			return KVP_ERR_LIMIT;
		n = snprintf(text, sizeof(text), "%.*s:%u", (int)(colon - endpoint), endpoint, port + delta);
	} else {
		return KVP_ERR_INVAL;
	}
	if ((size_t)n >= cap)
		return KVP_ERR_FULL;
	memcpy(out, text, (size_t)n + 1);
	return KVP_OK;
}
