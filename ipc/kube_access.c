/* ipc/kube_access.c — where the API server is and what it takes to be let in. */
#include "ipc/kube_priv.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <yaml.h>

#define ACCOUNT_DIR "/var/run/secrets/kubernetes.io/serviceaccount"

struct find {
	struct kvp_kube_access *out;
	char *why;
	size_t why_cap;
};

__attribute__((format(printf, 2, 3))) static int bad(const struct find *f, const char *fmt, ...)
{
	va_list ap;
	va_start(ap, fmt);
	vsnprintf(f->why, f->why_cap, fmt, ap);
	va_end(ap);
	return KVP_ERR_INVAL;
}

char *kube_read_file(const char *path, size_t *len)
{
	struct stat st;
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return NULL;
	if (fstat(fd, &st) != 0 || !S_ISREG(st.st_mode) || st.st_size > (off_t)KUBE_SECRET_MAX) {
		close(fd);
		errno = EFBIG;
		return NULL;
	}
	char *p = malloc(KUBE_SECRET_MAX + 1);
	size_t n = 0;
	ssize_t got = 0;
	while (p && n < KUBE_SECRET_MAX && (got = read(fd, p + n, KUBE_SECRET_MAX - n)) > 0)
		n += (size_t)got;
	close(fd);
	if (!p || got < 0) {
		free(p);
		return NULL;
	}
	p[n] = 0;
	*len = n;
	char *fit = realloc(p, n + 1);
	return fit ? fit : p;
}

void kvp_kube_access_free(struct kvp_kube_access *a)
{
	char *secret[] = {a->token, a->ca_pem, a->cert_pem, a->key_pem};
	for (size_t i = 0; i < sizeof(secret) / sizeof(secret[0]); i++)
		if (secret[i]) {
			explicit_bzero(secret[i], strlen(secret[i]));
			free(secret[i]);
		}
	memset(a, 0, sizeof(*a));
}

static int copy(char *to, size_t cap, const char *from)
{
	int n = snprintf(to, cap, "%s", from);
	return n >= 0 && (size_t)n < cap ? KVP_OK : KVP_ERR_LIMIT;
}

static int set_base(const struct find *f, const char *url)
{
	if (copy(f->out->base, sizeof(f->out->base), url))
		return bad(f, "address of the API server is too long");
	size_t n = strlen(f->out->base);
	while (n && f->out->base[n - 1] == '/')
		f->out->base[--n] = 0;
	if (strncmp(f->out->base, "http://", 7) != 0 && strncmp(f->out->base, "https://", 8) != 0)
		return bad(f, "address of the API server is not http:// or https://: %.200s", url);
	return KVP_OK;
}

/* ---- service account ---- */

/* The account's files that are there. A token never goes over a connection that anybody can read. */
static void account(const struct find *f, const char *dir)
{
	char path[1024];
	size_t len;
	if (strncmp(f->out->base, "https://", 8) != 0)
		return;
	snprintf(path, sizeof(path), "%s/token", dir);
	if (access(path, R_OK) == 0)
		snprintf(f->out->token_file, sizeof(f->out->token_file), "%s", path);
	snprintf(path, sizeof(path), "%s/ca.crt", dir);
	if (access(path, R_OK) == 0)
		snprintf(f->out->ca_file, sizeof(f->out->ca_file), "%s", path);
	snprintf(path, sizeof(path), "%s/namespace", dir);
	char *ns = kube_read_file(path, &len);
	if (ns) {
		ns[strcspn(ns, " \t\r\n")] = 0;
		snprintf(f->out->namespace_, sizeof(f->out->namespace_), "%s", ns);
		free(ns);
	}
}

static int in_cluster(const struct find *f, const struct kvp_kube_where *w, const char *dir)
{
	char url[512];
	int is_v6 = strchr(w->host, ':') && w->host[0] != '[';
	snprintf(url, sizeof(url), is_v6 ? "https://[%s]:%u" : "https://%s:%u", w->host,
		w->port ? w->port : 443);
	int rc = set_base(f, url);
	if (rc)
		return rc;
	account(f, dir);
	if (!f->out->token_file[0])
		return bad(f, "%s/token can't be read: is the service account's token mounted?", dir);
	if (!f->out->ca_file[0])
		return bad(f, "%s/ca.crt can't be read", dir);
	return KVP_OK;
}

int kvp_kube_access_find(
	const struct kvp_kube_where *w, struct kvp_kube_access *out, char *why, size_t why_cap)
{
	const char *dir = w->account_dir ? w->account_dir : ACCOUNT_DIR;
	struct find f = {out, why, why_cap};
	char file[1024];
	memset(out, 0, sizeof(*out));
	if (w->url && w->url[0]) {
		int rc = set_base(&f, w->url);
		if (!rc)
			account(&f, dir);
		return rc;
	}
	if (w->host && w->host[0])
		return in_cluster(&f, w, dir);
	if (w->kubeconfig && w->kubeconfig[0]) {
		snprintf(file, sizeof(file), "%.*s", (int)strcspn(w->kubeconfig, ":"), w->kubeconfig);
		return kvp_kube_access_file(file, out, why, why_cap);
	}
	snprintf(why, why_cap, "no API server: neither in a pod (KUBERNETES_SERVICE_HOST) nor KUBECONFIG");
	return KVP_ERR_NOTFOUND;
}

/* ---- kubeconfig ---- */

struct config {
	struct find f;
	const char *path;
	yaml_document_t doc;
};

static yaml_node_t *member(struct config *c, const yaml_node_t *map, const char *key)
{
	if (!map || map->type != YAML_MAPPING_NODE)
		return NULL;
	for (yaml_node_pair_t *p = map->data.mapping.pairs.start; p < map->data.mapping.pairs.top; p++) {
		yaml_node_t *k = yaml_document_get_node(&c->doc, p->key);
		if (k && k->type == YAML_SCALAR_NODE && strcmp((char *)k->data.scalar.value, key) == 0)
			return yaml_document_get_node(&c->doc, p->value);
	}
	return NULL;
}

/* Text of a member, NULL if there is none or it is empty or null. */
static const char *text(struct config *c, const yaml_node_t *map, const char *key)
{
	yaml_node_t *n = member(c, map, key);
	if (!n || n->type != YAML_SCALAR_NODE || !n->data.scalar.length)
		return NULL;
	const char *s = (const char *)n->data.scalar.value;
	int is_null = n->data.scalar.style == YAML_PLAIN_SCALAR_STYLE &&
		      (strcmp(s, "null") == 0 || strcmp(s, "~") == 0);
	return is_null || strlen(s) != n->data.scalar.length ? NULL : s;
}

/* The member `of` of the element of list `in` that is called name. */
static yaml_node_t *named(
	struct config *c, const yaml_node_t *root, const char *in, const char *name, const char *of)
{
	yaml_node_t *list = member(c, root, in);
	if (!list || list->type != YAML_SEQUENCE_NODE)
		return NULL;
	for (yaml_node_item_t *i = list->data.sequence.items.start; i < list->data.sequence.items.top; i++) {
		yaml_node_t *e = yaml_document_get_node(&c->doc, *i);
		const char *is = text(c, e, "name");
		if (is && strcmp(is, name) == 0)
			return member(c, e, of);
	}
	return NULL;
}

static int digit64(char c)
{
	return c >= 'A' && c <= 'Z'   ? c - 'A'
	       : c >= 'a' && c <= 'z' ? c - 'a' + 26
	       : c >= '0' && c <= '9' ? c - '0' + 52
	       : c == '+'	      ? 62
	       : c == '/'	      ? 63
				      : -1;
}

static char *decode64(const char *s)
{
	char *out = malloc(strlen(s) / 4 * 3 + 4), *to = out;
	uint32_t acc = 0, bits = 0;
	for (; out && *s && *s != '='; s++) {
		int d = digit64(*s);
		if (d < 0 && !strchr("\r\n\t ", *s)) {
			free(out);
			return NULL;
		}
		if (d < 0)
			continue;
		acc = acc << 6 | (uint32_t)d;
		bits += 6;
		if (bits >= 8)
			*to++ = (char)(acc >> (bits -= 8));
	}
	if (out)
		*to = 0;
	return out;
}

/* A file that the configuration names, from its own folder unless it begins at the root. */
static int beside(struct config *c, const char *name, char *out, size_t cap)
{
	const char *slash = strrchr(c->path, '/');
	int dir = slash && name[0] != '/' ? (int)(slash - c->path) + 1 : 0;
	int n = snprintf(out, cap, "%.*s%s", dir, c->path, name);
	return n > 0 && (size_t)n < cap ? KVP_OK : bad(&c->f, "%s: path is too long", name);
}

/* PEM from key-data (base64) or from the file that key names. */
static int pem(struct config *c, const yaml_node_t *map, const char *key, char **out)
{
	char name[64], file[1024];
	size_t len;
	snprintf(name, sizeof(name), "%s-data", key);
	const char *data = text(c, map, name), *path = text(c, map, key);
	if (data) {
		*out = decode64(data);
		return *out ? KVP_OK : bad(&c->f, "%s: %s is not base64", c->path, name);
	}
	if (!path)
		return KVP_OK;
	int rc = beside(c, path, file, sizeof(file));
	if (rc)
		return rc;
	*out = kube_read_file(file, &len);
	return *out ? KVP_OK : bad(&c->f, "%s: %s: %s", c->path, file, strerror(errno));
}

static int refuse(struct config *c, const yaml_node_t *map, const char *const *key, size_t cnt)
{
	for (size_t i = 0; i < cnt; i++)
		if (member(c, map, key[i]))
			return bad(&c->f, "%s: %s is not supported here; use a token or a client certificate",
				c->path, key[i]);
	return KVP_OK;
}

static int read_cluster(struct config *c, const yaml_node_t *cluster)
{
	static const char *const unknown[] = {"proxy-url", "tls-server-name"};
	const char *server = text(c, cluster, "server"), *skip = text(c, cluster, "insecure-skip-tls-verify");
	if (!server)
		return bad(&c->f, "%s: the cluster has no server", c->path);
	int rc = refuse(c, cluster, unknown, 2);
	rc = rc ? rc : set_base(&c->f, server);
	rc = rc ? rc : pem(c, cluster, "certificate-authority", &c->f.out->ca_pem);
	c->f.out->insecure = skip && strcmp(skip, "true") == 0;
	return rc;
}

static int read_user(struct config *c, const yaml_node_t *user)
{
	static const char *const unknown[] = {"exec", "auth-provider", "username"};
	const char *token = text(c, user, "token"), *file = text(c, user, "tokenFile");
	int rc = refuse(c, user, unknown, 3);
	rc = rc ? rc : pem(c, user, "client-certificate", &c->f.out->cert_pem);
	rc = rc ? rc : pem(c, user, "client-key", &c->f.out->key_pem);
	if (!rc && !c->f.out->cert_pem != !c->f.out->key_pem)
		return bad(&c->f, "%s: client certificate and key: both or neither", c->path);
	if (!rc && file)
		return beside(c, file, c->f.out->token_file, sizeof(c->f.out->token_file));
	if (!rc && token) {
		c->f.out->token = strdup(token);
		return c->f.out->token ? KVP_OK : bad(&c->f, "out of memory");
	}
	return rc;
}

static int read_config(struct config *c)
{
	yaml_node_t *root = yaml_document_get_root_node(&c->doc);
	const char *current = text(c, root, "current-context");
	yaml_node_t *context = current ? named(c, root, "contexts", current, "context") : NULL;
	if (!context)
		return bad(&c->f, "%s: current-context is not set or names no context", c->path);
	const char *cluster = text(c, context, "cluster"), *user = text(c, context, "user"),
		   *ns = text(c, context, "namespace");
	yaml_node_t *at = cluster ? named(c, root, "clusters", cluster, "cluster") : NULL;
	if (!at)
		return bad(&c->f, "%s: context %.100s names no cluster", c->path, current);
	int rc = read_cluster(c, at);
	at = user ? named(c, root, "users", user, "user") : NULL;
	if (!rc && user && !at)
		return bad(&c->f, "%s: context %.100s names no user", c->path, current);
	if (!rc && ns)
		snprintf(c->f.out->namespace_, sizeof(c->f.out->namespace_), "%s", ns);
	return rc || !at ? rc : read_user(c, at);
}

int kvp_kube_access_file(const char *path, struct kvp_kube_access *out, char *why, size_t why_cap)
{
	struct config c = {.f = {out, why, why_cap}, .path = path};
	yaml_parser_t p;
	size_t len;
	memset(out, 0, sizeof(*out));
	errno = 0;
	char *body = kube_read_file(path, &len);
	if (!body)
		return bad(&c.f, "%s: %s", path, strerror(errno));
	if (!yaml_parser_initialize(&p)) {
		free(body);
		return bad(&c.f, "out of memory");
	}
	yaml_parser_set_input_string(&p, (const unsigned char *)body, len);
	int rc = yaml_parser_load(&p, &c.doc) ? KVP_OK
					      : bad(&c.f, "%s:%zu: %s", path, p.problem_mark.line + 1,
							p.problem ? p.problem : "not YAML");
	if (!rc) {
		rc = read_config(&c);
		yaml_document_delete(&c.doc);
	}
	yaml_parser_delete(&p);
	explicit_bzero(body, len);
	free(body);
	return rc;
}
