#include "daemons/common/config_priv.h"
#include "daemons/common/token.h"
#include <kvpick/err.h>

#include <arpa/inet.h>

#include <ctype.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static const char *check_instance(const char *v)
{
	for (const char *p = v; *p; p++)
		if (!isalnum((unsigned char)*p) && !strchr("_.-", *p))
			return "not a name";
	/* It becomes part of file names. */
	return v[0] == '.' ? "not a name" : NULL;
}

static const char *check_ip(const char *v)
{
	unsigned char a[16];
	return inet_pton(AF_INET, v, a) == 1 || inet_pton(AF_INET6, v, a) == 1 ? NULL : "not an IP address";
}

static const char *check_file(const char *v)
{
	struct stat st;
	if (stat(v, &st) != 0 || access(v, R_OK) != 0)
		return "file can't be read";
	return S_ISDIR(st.st_mode) ? "is a directory" : NULL;
}

static const char *check_token_file(const char *v)
{
	struct kvp_token token = {.path = v};
	const char *bad = check_file(v);
	int rc = bad ? KVP_OK : kvp_token_refresh(&token);
	if (rc)
		bad = rc == KVP_ERR_INVAL ? "file has not 1 to 4096 bytes besides white space"
					  : "file can't be read";
	explicit_bzero(&token, sizeof(token));
	return bad;
}

/* A port of decimal digits at p; -1 when it is none. */
static long port_at(const char *p)
{
	long v = 0;
	if (!*p || strlen(p) > 5)
		return -1;
	for (; *p; p++) {
		if (*p < '0' || *p > '9')
			return -1;
		v = v * 10 + (*p - '0');
	}
	return v <= 65535 ? v : -1;
}

static const char *check_url(const char *v)
{
	size_t scheme = strncmp(v, "http://", 7) == 0 ? 7 : strncmp(v, "https://", 8) == 0 ? 8 : 0;
	if (!scheme)
		return "not an http:// or https:// address";
	const char *host = v + scheme;
	if (host[strcspn(host, " \t\r\n\"<>\\^`{|}")] != 0)
		return "contains a character that no address has";
	size_t n = strcspn(host, "/?#");
	char auth[1024];
	if (n == 0 || n >= sizeof(auth) || memchr(host, '@', n))
		return "has no host, or has user information";
	memcpy(auth, host, n);
	auth[n] = 0;
	const char *after = auth[0] == '[' ? strchr(auth, ']') : auth;
	if (!after)
		return "bracket without its end";
	const char *colon = strchr(after, ':');
	if (colon == auth)
		return "has no host";
	return colon && port_at(colon + 1) < 1 ? "has a bad port" : NULL;
}

/* A service on this host may listen on a Unix socket, written as web servers write it. */
static const char *check_service_url(const char *v)
{
	if (strncmp(v, "http://unix:/", 13) != 0)
		return check_url(v);
	const char *path = v + 12;
	size_t n = strcspn(path, ":?#");
	if (n < 2 || n > 107)
		return "has no socket path of at most 107 bytes";
	return path[n] == ':' && path[n + 1] != '/' ? "has something else than a path behind the socket"
						    : NULL;
}

static const char *check_header(const char *v)
{
	for (const char *p = v; *p; p++)
		if (!isalnum((unsigned char)*p) && !strchr("!#$%&'*+-.^_`|~", *p))
			return "not part of a header name";
	return NULL;
}

/* What a request line can hold before the path of a request. */
static const char *check_path(const char *v)
{
	if (v[0] != '/')
		return "does not begin with a slash";
	for (const char *p = v; *p; p++)
		if (*p <= ' ' || *p > '~' || *p == '?' || *p == '#')
			return "contains a byte that no path has";
	return NULL;
}

static int dns_label_ok(const char *p, size_t n)
{
	for (size_t i = 0; i < n; i++)
		if (!islower((unsigned char)p[i]) && !isdigit((unsigned char)p[i]) && p[i] != '-')
			return 0;
	return n > 0 && p[0] != '-' && p[n - 1] != '-';
}

int kvp_cfg_label_ok(const char *v)
{
	const char *slash = strchr(v, '/'), *name = slash ? slash + 1 : v;
	size_t n = strlen(name);
	if (n < 1 || n > 63 || !isalnum((unsigned char)name[0]) || !isalnum((unsigned char)name[n - 1]))
		return 0;
	for (size_t i = 0; i < n; i++)
		if (!isalnum((unsigned char)name[i]) && !strchr("-_.", name[i]))
			return 0;
	if (!slash)
		return 1;
	if (slash - v > 253)
		return 0;
	for (const char *p = v; p <= slash;) {
		size_t len = strcspn(p, "./");
		if (!dns_label_ok(p, len))
			return 0;
		p += len + 1;
	}
	return 1;
}

static const char *check_label(const char *v)
{
	return kvp_cfg_label_ok(v) ? NULL : "not a label key";
}

static const char *check_listen(const char *v)
{
	char host[128];
	if (strncmp(v, "unix:", 5) == 0)
		return v[5] == '/' && strlen(v + 5) < 100
			       ? NULL
			       : "unix: needs an absolute path of less than 100 bytes";
	const char *colon = strrchr(v, ':');
	if (!colon || port_at(colon + 1) < 1 || (size_t)(colon - v) >= sizeof(host))
		return "a member is not ip:port";
	size_t n = (size_t)(colon - v);
	int bracket = v[0] == '[' && n > 2 && v[n - 1] == ']';
	memcpy(host, v + bracket, n - 2 * (size_t)bracket);
	host[n - 2 * (size_t)bracket] = 0;
	if (!bracket && strchr(host, ':'))
		return "an IPv6 address needs brackets";
	return check_ip(host);
}

static const char *check_zmq(const char *v)
{
	const char *sep = strstr(v, "://");
	if (!sep)
		return "missing scheme";
	const char *a = sep + 3;
	size_t scheme = (size_t)(sep - v);
	if (!*a)
		return "missing address";
	if ((scheme == 3 && strncmp(v, "ipc", 3) == 0) || (scheme == 6 && strncmp(v, "inproc", 6) == 0))
		return NULL;
	if (scheme != 3 || strncmp(v, "tcp", 3) != 0)
		return "unsupported scheme";
	const char *colon = strrchr(a, ':');
	if (!colon)
		return "missing TCP port";
	if (colon == a)
		return "missing TCP host";
	if (a[0] == '[' && colon[-1] != ']')
		return "missing closing `]`";
	if (a[0] != '[' && memchr(a, ':', (size_t)(colon - a)))
		return "missing TCP port";
	return port_at(colon + 1) < 0 ? "invalid TCP port" : NULL;
}

/* What others can connect to. */
static const char *check_zmq_peer(const char *v)
{
	const char *bad = check_zmq(v), *colon = strrchr(v, ':');
	if (bad)
		return bad;
	if (strncmp(v, "tcp://*:", 8) == 0)
		return "nobody can connect to a wildcard host";
	int is_zero = strncmp(v, "tcp://", 6) == 0 && port_at(colon + 1) == 0;
	return is_zero ? "nobody can connect to port 0" : NULL;
}

static const char *check_http(const char *v)
{
	return strncmp(v, "http://", 7) == 0 ? check_url(v) : "a member is not an http:// address";
}

static const char *check_allow(const char *v)
{
	char host[256];
	const char *slash = strchr(v, '/');
	if (strlen(v) > KVP_CONFIG_ALLOW_MAX)
		return "a member is too long";
	if (slash) {
		size_t n = (size_t)(slash - v);
		long bits = port_at(slash + 1);
		if (n >= sizeof(host))
			return "a member is too long";
		memcpy(host, v, n);
		host[n] = 0;
		long most = strchr(host, ':') ? 128 : 32;
		return check_ip(host) || bits < 0 || bits > most ? "a member is not a CIDR" : NULL;
	}
	const char *rest = v[0] == '[' ? strchr(v, ']') : v;
	if (!rest)
		return "bracket without its end";
	const char *colon = strchr(rest, ':');
	/* An address without brackets has several colons and no port. */
	if (colon && strchr(colon + 1, ':'))
		return check_ip(v);
	if (colon == v || v[strcspn(v, " \t/@\"")] != 0)
		return "a member is not host or host:port";
	return colon && port_at(colon + 1) < 1 ? "a member has a bad port" : NULL;
}

static const char *check_members(const char *list, const char *(*one)(const char *))
{
	char member[KVP_CFG_VALUE_MAX];
	const char *bad = NULL;
	size_t pos = 0;
	while (!bad && kvp_config_list_next(list, &pos, member, sizeof(member)))
		bad = strlen(member) > KVP_CONFIG_MEMBER_MAX ? "a member is too long" : one(member);
	return bad;
}

const char *kvp_cfg_check(enum kvp_cfg_check check, const char *v)
{
	switch (check) {
	case CHECK_NONE:
		return NULL;
	case CHECK_INSTANCE:
		return check_instance(v);
	case CHECK_IP:
		return check_ip(v);
	case CHECK_FILE:
		return check_file(v);
	case CHECK_TOKEN_FILE:
		return check_token_file(v);
	case CHECK_URL:
		return check_url(v);
	case CHECK_SERVICE_URL:
		return check_service_url(v);
	case CHECK_HEADER:
		return check_header(v);
	case CHECK_PATH:
		return check_path(v);
	case CHECK_LABEL:
		return check_label(v);
	case CHECK_LABEL_LIST:
		return check_members(v, check_label);
	case CHECK_LISTEN_LIST:
		return check_members(v, check_listen);
	case CHECK_ZMQ_LIST:
		return check_members(v, check_zmq_peer);
	case CHECK_HTTP_LIST:
		return check_members(v, check_http);
	case CHECK_ALLOW_LIST:
		return check_members(v, check_allow);
	case CHECK_PATH_LIST:
		return check_members(v, check_path);
	}
	return NULL;
}

int kvp_config_list_next(const char *list, size_t *pos, char *member, size_t cap)
{
	const char *p = list + *pos;
	size_t n = strcspn(p, ",");
	if (n == 0 || n >= cap)
		return 0;
	memcpy(member, p, n);
	member[n] = 0;
	*pos += n + (p[n] == ',');
	return 1;
}
