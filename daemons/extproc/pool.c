#include "daemons/extproc/pool.h"

#include <kvpick/hash.h>

#include <arpa/inet.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

void kvp_pool_open(struct kvp_pool *p, const struct kvp_cat *cat, enum kvp_part_role role,
	struct kvp_str model, struct kvp_str group)
{
	*p = (struct kvp_pool){.cat = cat, .role = role, .model = model, .group = group};
}

void kvp_pool_close(struct kvp_pool *p)
{
	free(p->member);
	free(p->allowed);
	free(p->record);
	kvp_json_free(p->json);
	memset(p, 0, sizeof(*p));
}

/* ---- addresses ---- */

static int read_port(const char *t, size_t n, uint32_t *port)
{
	uint32_t v = 0;
	if (n < 1 || n > 5)
		return 0;
	for (size_t i = 0; i < n; i++) {
		if (t[i] < '0' || t[i] > '9')
			return 0;
		v = v * 10 + (uint32_t)(t[i] - '0');
	}
	*port = v;
	return v >= 1 && v <= 65535;
}

static void read_host(const char *t, size_t n, struct kvp_pool_addr *a)
{
	char text[INET6_ADDRSTRLEN + 1];
	a->name = (struct kvp_str){t, n};
	a->family = 0;
	if (n >= sizeof(text))
		return;
	memcpy(text, t, n);
	text[n] = 0;
	a->family = inet_pton(AF_INET, text, a->ip) == 1 ? 4 : inet_pton(AF_INET6, text, a->ip) == 1 ? 6 : 0;
}

/* read_addr reads host:port, [v6]:port, or a host alone (port 0). 1 if it is one of them. */
static int read_addr(const char *t, size_t n, struct kvp_pool_addr *a)
{
	const char *colon = NULL, *end = t + n;
	uint32_t colons = 0;
	*a = (struct kvp_pool_addr){.port = 0};
	if (n && t[0] == '[') {
		const char *close = memchr(t, ']', n);
		if (!close)
			return 0;
		read_host(t + 1, (size_t)(close - t) - 1, a);
		if (a->family != 6)
			return 0;
		return close + 1 == end ||
		       (close[1] == ':' && read_port(close + 2, (size_t)(end - close) - 2, &a->port));
	}
	for (const char *c = t; c < end; c++)
		if (*c == ':') {
			colon = c;
			colons++;
		}
	read_host(t, colons == 1 ? (size_t)(colon - t) : n, a);
	if (!a->name.len || (colons > 1 && a->family != 6))
		return 0;
	return colons != 1 || read_port(colon + 1, (size_t)(end - colon) - 1, &a->port);
}

static int same_host(const struct kvp_pool_addr *a, const struct kvp_pool_addr *b)
{
	if (a->family != b->family)
		return 0;
	if (a->family)
		return memcmp(a->ip, b->ip, a->family == 4 ? 4 : 16) == 0;
	return a->name.len == b->name.len && strncasecmp(a->name.ptr, b->name.ptr, a->name.len) == 0;
}

/* ---- members ---- */

static int same(struct kvp_str a, const char *t, uint32_t len)
{
	return a.len == len && memcmp(a.ptr, t, len) == 0;
}

/* make_member turns a worker's endpoint into what a proxy is told; 0 = it can't be. */
static int make_member(const struct kvp_cat_worker_info *w, struct kvp_pool_member *m)
{
	const char *t = w->endpoint, *scheme = strstr(t, "://");
	struct kvp_pool_addr a;
	t = scheme ? scheme + 3 : t;
	size_t n = strcspn(t, "/?#");
	if (n >= KVP_POOL_TEXT || !read_addr(t, n, &a) || !a.port)
		return 0;
	*m = (struct kvp_pool_member){
		.worker_id = w->worker_id, .start_rank = w->start_rank, .rank_cnt = w->size};
	memcpy(m->text, t, n);
	/* Read once more, so that a name points into the member; moving members sets it anew. */
	m->host_len = (uint32_t)(strrchr(m->text, ':') - m->text);
	m->addr = a;
	return 1;
}

int kvp_pool_read_domains(struct kvp_pool *p)
{
	p->json = kvp_json_new();
	p->record = malloc(KVP_CAT_RECORD_MAX + KVP_JSON_SLACK_BYTES);
	p->is_read = 0;
	return p->json && p->record ? KVP_OK : KVP_ERR_SYS;
}

/* domain_of reads the worker's record; one that just changes is read again with the catalogue's next
 * version. */
static uint64_t domain_of(struct kvp_pool *p, uint32_t idx)
{
	struct kvp_json_val root, v;
	const char *s;
	size_t n;
	uint32_t len = 0;
	if (kvp_cat_worker_json(p->cat, idx, p->record, KVP_CAT_RECORD_MAX, &len) ||
		kvp_json_parse(p->json, p->record, len, KVP_JSON_DEPTH_MAX, &root, NULL) ||
		kvp_json_get(root, "kv_transfer_domain", &v) || kvp_json_str(v, &s, &n) || !n)
		return 0;
	uint64_t h = kvp_hash_bytes(s, n, 0);
	return h ? h : 1;
}

static int by_id(const void *x, const void *y)
{
	const struct kvp_pool_member *a = x, *b = y;
	return a->worker_id < b->worker_id ? -1 : a->worker_id > b->worker_id;
}

static int add(struct kvp_pool *p, const struct kvp_pool_member *m)
{
	if (p->cnt == p->cap) {
		uint32_t cap = p->cap ? 2 * p->cap : 64;
		struct kvp_pool_member *grown = realloc(p->member, cap * sizeof(*grown));
		if (!grown)
			return KVP_ERR_SYS;
		p->member = grown;
		p->cap = cap;
	}
	p->member[p->cnt++] = *m;
	return KVP_OK;
}

int kvp_pool_refresh(struct kvp_pool *p)
{
	uint64_t version = kvp_cat_version(p->cat);
	if (p->is_read && version == p->version)
		return KVP_OK;
	struct kvp_cat_worker_info *w = malloc(sizeof(*w));
	struct kvp_pool_member m;
	uint32_t max = kvp_cat_worker_max(p->cat);
	int rc = w ? KVP_OK : KVP_ERR_SYS;
	p->cnt = rc ? p->cnt : 0;
	p->unusable = 0;
	for (uint32_t i = 0; i < max && !rc; i++) {
		if (kvp_cat_worker_info(p->cat, i, w) != KVP_OK || w->lifecycle != KVP_LIFE_SCHEDULABLE ||
			w->role != p->role || !same(p->model, w->model, w->model_len) ||
			!same(p->group, w->group, w->group_len))
			continue;
		if (!make_member(w, &m)) {
			p->unusable++;
			continue;
		}
		if (p->json)
			m.domain = domain_of(p, i);
		rc = add(p, &m);
	}
	free(w);
	if (p->cnt)
		qsort(p->member, p->cnt, sizeof(*p->member), by_id);
	for (uint32_t i = 0; i < p->cnt; i++)
		read_addr(p->member[i].text, strlen(p->member[i].text), &p->member[i].addr);
	p->is_read = !rc;
	p->version = version; /* of before the scan: what changed meanwhile is read the next time */
	return rc;
}

const struct kvp_pool_member *kvp_pool_worker(const struct kvp_pool *p, uint64_t worker_id)
{
	struct kvp_pool_member key = {.worker_id = worker_id};
	return p->cnt ? bsearch(&key, p->member, p->cnt, sizeof(key), by_id) : NULL;
}

static int has_port(const struct kvp_pool_member *m, uint32_t port, enum kvp_pool_ports ports)
{
	uint32_t more = ports == KVP_POOL_RANK_PORTS && m->rank_cnt ? m->rank_cnt - 1 : 0;
	return port >= m->addr.port && port - m->addr.port <= more;
}

const struct kvp_pool_member *kvp_pool_at(const struct kvp_pool *p, struct kvp_extproc_str endpoint,
	enum kvp_pool_ports ports, uint32_t *dp_rank)
{
	struct kvp_pool_addr a;
	if (!endpoint.len || !read_addr(endpoint.p, endpoint.len, &a))
		return NULL;
	for (uint32_t i = 0; i < p->cnt; i++) {
		const struct kvp_pool_member *m = &p->member[i];
		if (!same_host(&a, &m->addr) || !has_port(m, a.port, ports))
			continue;
		*dp_rank = m->start_rank + (a.port - m->addr.port);
		return m;
	}
	return NULL;
}

static int is_named(const struct kvp_pool_member *m, const struct kvp_extproc_str *entry, uint32_t cnt)
{
	struct kvp_pool_addr a;
	for (uint32_t i = 0; i < cnt; i++)
		if (read_addr(entry[i].p, entry[i].len, &a) && same_host(&a, &m->addr) &&
			(!a.port || a.port == m->addr.port))
			return 1;
	return 0;
}

static int allow_room(struct kvp_pool *p)
{
	if (p->allowed_cap >= p->cnt + 1)
		return KVP_OK;
	uint64_t *grown = realloc(p->allowed, (p->cnt + 1) * sizeof(*grown));
	if (!grown)
		return KVP_ERR_SYS;
	p->allowed = grown;
	p->allowed_cap = p->cnt + 1;
	return KVP_OK;
}

int kvp_pool_allow(struct kvp_pool *p, enum kvp_extproc_hint hint, const struct kvp_extproc_str *entry,
	uint32_t entry_cnt, const uint64_t **ids, uint32_t *cnt)
{
	*ids = NULL;
	*cnt = 0;
	if (hint == KVP_EXTPROC_HINT_ABSENT && !p->unusable)
		return KVP_OK;
	if (allow_room(p))
		return KVP_ERR_SYS;
	for (uint32_t i = 0; i < p->cnt; i++)
		if (hint == KVP_EXTPROC_HINT_ABSENT || is_named(&p->member[i], entry, entry_cnt))
			p->allowed[(*cnt)++] = p->member[i].worker_id;
	*ids = p->allowed;
	return KVP_OK;
}

int kvp_pool_narrow(struct kvp_pool *p, uint64_t domain, const uint64_t **ids, uint32_t *cnt)
{
	uint32_t kept = 0;
	if (!domain)
		return KVP_OK;
	if (!*ids) {
		int rc = allow_room(p);
		if (rc)
			return rc;
		for (uint32_t i = 0; i < p->cnt; i++)
			p->allowed[i] = p->member[i].worker_id;
		*cnt = p->cnt;
	}
	for (uint32_t i = 0; i < *cnt; i++) {
		const struct kvp_pool_member *m = kvp_pool_worker(p, p->allowed[i]);
		if (m && (!m->domain || m->domain == domain))
			p->allowed[kept++] = p->allowed[i];
	}
	*ids = p->allowed;
	*cnt = kept;
	return KVP_OK;
}

const struct kvp_pool_member *kvp_pool_any(struct kvp_pool *p, const uint64_t *ids, uint32_t cnt)
{
	uint32_t n = ids ? cnt : p->cnt;
	if (!n)
		return NULL;
	uint32_t i = p->turn++ % n;
	return ids ? kvp_pool_worker(p, ids[i]) : &p->member[i];
}

int kvp_pool_destination(
	const struct kvp_pool_member *m, uint32_t dp_rank, enum kvp_pool_ports ports, char *out, size_t cap)
{
	uint32_t further = ports == KVP_POOL_RANK_PORTS ? dp_rank - m->start_rank : 0;
	if (further > 65535 || m->addr.port + further > 65535)
		return 0;
	int n = snprintf(out, cap, "%.*s:%u", (int)m->host_len, m->text, m->addr.port + further);
	return n > 0 && (size_t)n < cap;
}
