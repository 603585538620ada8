/* daemons/discovery/objects.c — digests are fields with a final 0 each, one after the other. */
#include "daemons/discovery/objects.h"

#include <arpa/inet.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>

/* ---- JSON ---- */

static int text_of(struct kvp_json_val obj, const char *key, const char **s)
{
	struct kvp_json_val v;
	size_t len;
	int rc = kvp_json_get(obj, key, &v);
	rc = rc ? rc : kvp_json_str(v, s, &len);
	/* A 0 inside would end a field: such a text is none that Kubernetes knows. */
	return rc ? rc : strlen(*s) == len ? KVP_OK : KVP_ERR_PROTO;
}

static int at_path(struct kvp_json_val obj, const char *a, const char *b, struct kvp_json_val *out)
{
	struct kvp_json_val v;
	int rc = kvp_json_get(obj, a, &v);
	return rc ? rc : kvp_json_get(v, b, out);
}

static int put(struct kvp_kube_buf *out, const char *s)
{
	return kvp_kube_put(out, s, strlen(s) + 1);
}

/* The next field; NULL behind the last. */
static const char *next(struct kvp_kube_bytes *b)
{
	if (!b->len)
		return NULL;
	const char *s = b->p;
	size_t n = strnlen(s, b->len);
	if (n == b->len)
		return NULL;
	b->p += n + 1;
	b->len -= n + 1;
	return s;
}

/* All members of an object that are texts, as key, value, ... */
static int put_map(struct kvp_json_val map, struct kvp_kube_buf *out, uint32_t max, uint32_t *cnt)
{
	struct kvp_json_iter it = kvp_json_each(map);
	int rc = KVP_OK;
	*cnt = 0;
	while (!rc && *cnt < max && kvp_json_next(&it)) {
		const char *s;
		size_t len;
		if (kvp_json_str(it.val, &s, &len) || strlen(s) != len || !it.key ||
			strlen(it.key) != it.key_len)
			continue;
		rc = put(out, it.key);
		rc = rc ? rc : put(out, s);
		(*cnt)++;
	}
	return rc;
}

/* ---- pools: "" or a reason, ports with commas between them, labels ---- */

static int put_ports(struct kvp_json_val list, char *text, size_t cap)
{
	struct kvp_json_iter it = kvp_json_each(list);
	size_t len = 0;
	uint32_t cnt = 0;
	text[0] = 0;
	while (cnt < KVP_IPOOL_PORTS_MAX && kvp_json_next(&it)) {
		struct kvp_json_val v;
		uint32_t port = 0;
		int bad =
			kvp_json_get(it.val, "number", &v) || kvp_json_u32(v, &port) || !port || port > 65535;
		if (bad && !cnt)
			return KVP_ERR_PROTO; /* the first one is what requests are sent to */
		if (bad)
			continue;
		len += (size_t)snprintf(text + len, cap - len, "%s%u", cnt++ ? "," : "", port);
	}
	return cnt ? KVP_OK : KVP_ERR_PROTO;
}

static int put_invalid(struct kvp_kube_buf *out, const char *why)
{
	out->len = 0;
	return put(out, why);
}

int kvp_ipool_digest(enum kvp_ipool_form form, struct kvp_json_val obj, struct kvp_kube_buf *out)
{
	struct kvp_json_val labels, ports;
	char text[8 * KVP_IPOOL_PORTS_MAX];
	uint32_t cnt = 0, port = 0;
	int rc = put(out, "");
	if (form == KVP_IPOOL_V1) {
		if (at_path(obj, "spec", "targetPorts", &ports) || put_ports(ports, text, sizeof(text)))
			return put_invalid(out, "spec.targetPorts[0].number is not a port");
	} else {
		if (at_path(obj, "spec", "targetPortNumber", &ports) || kvp_json_u32(ports, &port) || !port ||
			port > 65535)
			return put_invalid(out, "spec.targetPortNumber is not a port");
		snprintf(text, sizeof(text), "%u", port);
	}
	rc = rc ? rc : put(out, text);
	if (at_path(obj, "spec", "selector", &labels) ||
		(form == KVP_IPOOL_V1 && kvp_json_get(labels, "matchLabels", &labels)) ||
		kvp_json_type(labels) != KVP_JSON_OBJ)
		return put_invalid(out, "spec.selector.matchLabels is missing");
	if (kvp_json_len(labels) > KVP_IPOOL_LABELS_MAX)
		return put_invalid(out, "spec.selector.matchLabels has more than 64 labels");
	rc = rc ? rc : put_map(labels, out, KVP_IPOOL_LABELS_MAX, &cnt);
	/* Without a label it would be every pod. */
	return rc || cnt ? rc : put_invalid(out, "spec.selector.matchLabels is empty");
}

/* Reads ports with commas between them; what is not one is left out. */
static uint32_t read_ports(const char *s, uint16_t *port, uint32_t max)
{
	uint32_t cnt = 0;
	while (*s && cnt < max) {
		uint32_t v = 0, digits = 0;
		s += strspn(s, " \t,");
		for (; *s >= '0' && *s <= '9'; s++, digits++)
			v = v < 100000 ? v * 10 + (uint32_t)(*s - '0') : v;
		s += strspn(s, " \t");
		int known = 0;
		for (uint32_t i = 0; i < cnt; i++)
			known |= port[i] == v;
		if (digits && v >= 1 && v <= 65535 && (*s == ',' || !*s) && !known)
			port[cnt++] = (uint16_t)v;
		s += strcspn(s, ",");
	}
	return cnt;
}

void kvp_ipool_read(struct kvp_kube_bytes b, struct kvp_ipool *out)
{
	const char *why = next(&b), *ports, *key, *val;
	memset(out, 0, sizeof(*out));
	out->why = !why ? "there is no such pool" : *why ? why : NULL;
	if (out->why || !(ports = next(&b)))
		return;
	out->port_cnt = read_ports(ports, out->port, KVP_IPOOL_PORTS_MAX);
	while (out->label_cnt < KVP_IPOOL_LABELS_MAX && (key = next(&b)) && (val = next(&b))) {
		out->label[out->label_cnt].key = key;
		out->label[out->label_cnt++].val = val;
	}
}

/* ---- pods: "" if it can't be a worker, else address, "1" and the ports that are active or "0", time of
 * creation, labels ---- */

static int is_ready(struct kvp_json_val obj)
{
	struct kvp_json_val v, type;
	if (at_path(obj, "status", "conditions", &v))
		return 0;
	struct kvp_json_iter it = kvp_json_each(v);
	while (kvp_json_next(&it))
		if (!kvp_json_get(it.val, "type", &type) && kvp_json_str_is(type, "Ready") &&
			!kvp_json_get(it.val, "status", &type))
			return kvp_json_str_is(type, "True");
	return 0;
}

static int is_address(const char *s)
{
	unsigned char a[16];
	return inet_pton(AF_INET, s, a) == 1 || inet_pton(AF_INET6, s, a) == 1;
}

static int put_active(struct kvp_json_val obj, struct kvp_kube_buf *out)
{
	struct kvp_json_val v;
	const char *ports;
	if (at_path(obj, "metadata", "annotations", &v) || text_of(v, KVP_ACTIVE_PORTS, &ports))
		return put(out, "0") ? KVP_ERR_SYS : put(out, "");
	return put(out, "1") ? KVP_ERR_SYS : put(out, ports);
}

/* RFC 3339 in UTC: texts are in the order of the times. */
static const char *created_of(struct kvp_json_val obj)
{
	struct kvp_json_val v;
	const char *at = NULL;
	return kvp_json_get(obj, "metadata", &v) || text_of(v, "creationTimestamp", &at) ? "" : at;
}

int kvp_pod_digest(struct kvp_json_val obj, struct kvp_kube_buf *out)
{
	struct kvp_json_val v;
	const char *ip = NULL;
	uint32_t cnt;
	int is_leaving =
		!at_path(obj, "metadata", "deletionTimestamp", &v) && kvp_json_type(v) != KVP_JSON_NULL;
	if (is_leaving || !is_ready(obj) || kvp_json_get(obj, "status", &v) || text_of(v, "podIP", &ip) ||
		!is_address(ip))
		return put(out, "");
	int rc = put(out, ip);
	rc = rc ? rc : put_active(obj, out);
	rc = rc ? rc : put(out, created_of(obj));
	if (!rc && !at_path(obj, "metadata", "labels", &v))
		rc = put_map(v, out, UINT32_MAX, &cnt);
	return rc;
}

static uint64_t rotl(uint64_t x, int b)
{
	return x << b | x >> (64 - b);
}

static void sip_round(uint64_t v[4])
{
	v[0] += v[1];
	v[1] = rotl(v[1], 13) ^ v[0];
	v[0] = rotl(v[0], 32);
	v[2] += v[3];
	v[3] = rotl(v[3], 16) ^ v[2];
	v[0] += v[3];
	v[3] = rotl(v[3], 21) ^ v[0];
	v[2] += v[1];
	v[1] = rotl(v[1], 17) ^ v[2];
	v[2] = rotl(v[2], 32);
}

/* SipHash-1-3 with a key of zeros over the name and one byte 0xff. */
uint64_t kvp_pod_id(const char *name, size_t len)
{
	uint64_t v[4] = {
		0x736f6d6570736575ull, 0x646f72616e646f6dull, 0x6c7967656e657261ull, 0x7465646279746573ull};
	uint64_t total = len + 1, word = 0;
	for (size_t i = 0; i < total; i++) {
		uint64_t byte = i < len ? (uint8_t)name[i] : 0xff;
		word |= byte << 8 * (i & 7);
		if ((i & 7) != 7)
			continue;
		v[3] ^= word;
		sip_round(v);
		v[0] ^= word;
		word = 0;
	}
	word |= total << 56;
	v[3] ^= word;
	sip_round(v);
	v[0] ^= word;
	v[2] ^= 0xff;
	for (int i = 0; i < 3; i++)
		sip_round(v);
	return (v[0] ^ v[1] ^ v[2] ^ v[3]) & 0x001fffffffffffffull;
}

uint64_t kvp_pod_role_id(const struct kvp_pod_rules *r, const char *name, enum kvp_part_role role)
{
	char text[KVP_KUBE_NAME_MAX + 16];
	if (r->roles != KVP_PODS_BY_LABEL || r->words != KVP_PODS_LLMD || role != KVP_PART_PREFILL)
		return kvp_pod_id(name, strlen(name));
	int n = snprintf(text, sizeof(text), "%s/prefill", name);
	return kvp_pod_id(text, (size_t)n < sizeof(text) ? (size_t)n : sizeof(text) - 1);
}

const char *kvp_pod_why_name(enum kvp_pod_why w)
{
	static const char *const name[] = {"worker", "not_ready", "not_selected", "port_inactive",
		"role_label_missing", "role_label_invalid", "in_both_pools"};
	return (uint32_t)w < KVP_POD_WHY_CNT ? name[w] : "?";
}

struct pod {
	const char *ip, *active; /* active NULL: all ports are */
	const char *created;
	int is_v6;
	struct kvp_kube_bytes labels;
};

static int read_pod(struct kvp_kube_bytes b, struct pod *p)
{
	const char *ip = next(&b), *has = ip && *ip ? next(&b) : NULL, *active = has ? next(&b) : NULL;
	const char *created = active ? next(&b) : NULL;
	if (!created)
		return 0;
	*p = (struct pod){.ip = ip,
		.active = *has == '1' ? active : NULL,
		.created = created,
		.is_v6 = strchr(ip, ':') != NULL,
		.labels = b};
	return 1;
}

static const char *label(const struct pod *p, const char *key)
{
	struct kvp_kube_bytes b = p->labels;
	const char *k, *v;
	while ((k = next(&b)) && (v = next(&b)))
		if (strcmp(k, key) == 0)
			return v;
	return NULL;
}

static int is_selected(const struct pod *p, const struct kvp_ipool *pool)
{
	if (!pool || pool->why || !pool->label_cnt)
		return 0;
	for (uint32_t i = 0; i < pool->label_cnt; i++) {
		const char *v = label(p, pool->label[i].key);
		if (!v || strcmp(v, pool->label[i].val) != 0)
			return 0;
	}
	return 1;
}

enum { PREFILLS = 1, DECODES = 2 };

/* What a word of the label means; the first DYN_WORDS are those of both vocabularies. */
#define DYN_WORDS 2
static const struct {
	const char *word;
	unsigned does;
} role_word[] = {{"prefill", PREFILLS}, {"decode", DECODES}, {"prefill-decode", PREFILLS | DECODES},
	{"both", PREFILLS | DECODES}, {"encode-prefill", PREFILLS},
	{"encode-prefill-decode", PREFILLS | DECODES}};

static unsigned read_role(enum kvp_pod_words words, const char *s)
{
	static const char blank[] = " \t\r\n\v\f";
	size_t cnt = words == KVP_PODS_LLMD ? sizeof(role_word) / sizeof(role_word[0]) : DYN_WORDS;
	s += strspn(s, blank);
	size_t n = strlen(s);
	while (n && strchr(blank, s[n - 1]))
		n--;
	for (size_t i = 0; i < cnt; i++)
		if (strlen(role_word[i].word) == n && strncasecmp(s, role_word[i].word, n) == 0)
			return role_word[i].does;
	return 0;
}

static enum kvp_pod_why role_by_label(
	const struct kvp_pod_rules *r, const struct pod *p, struct kvp_pod_worker *out)
{
	const char *s = label(p, r->role_label);
	unsigned does = s ? read_role(r->words, s) : r->words == KVP_PODS_LLMD ? DECODES : 0;
	if (s)
		snprintf(out->why_text, sizeof(out->why_text), "%s", s);
	if (!does)
		return s ? KVP_POD_ROLE_INVALID : KVP_POD_ROLE_MISSING;
	out->role = does & DECODES ? KVP_PART_DECODE : KVP_PART_PREFILL;
	out->has_twin = does == (PREFILLS | DECODES);
	return KVP_POD_IS_WORKER;
}

static enum kvp_pod_why find_role(const struct kvp_pod_rules *r, const struct kvp_ipool **pool,
	const struct kvp_ipool *prefill, const struct pod *p, struct kvp_pod_worker *out)
{
	int in_pool = is_selected(p, *pool),
	    in_prefill = r->roles == KVP_PODS_BY_POOL && is_selected(p, prefill);
	out->role = KVP_PART_AGGREGATED;
	if (!in_pool && !in_prefill)
		return KVP_POD_NOT_SELECTED;
	if (in_pool && in_prefill)
		return KVP_POD_IN_BOTH;
	if (r->roles == KVP_PODS_BY_LABEL)
		return role_by_label(r, p, out);
	if (r->roles == KVP_PODS_BY_POOL)
		out->role = in_prefill ? KVP_PART_PREFILL : KVP_PART_DECODE;
	*pool = in_prefill ? prefill : *pool;
	return KVP_POD_IS_WORKER;
}

/* ---- ports and ranks ---- */

struct ranks {
	uint32_t first, cnt, port; /* of the first rank */
};

static int has_port(const uint16_t *port, uint32_t cnt, uint32_t v)
{
	for (uint32_t i = 0; i < cnt; i++)
		if (port[i] == v)
			return 1;
	return 0;
}

/* Which ranks of a pod can be sent to. With a port a rank these are the first ranks in a row whose ports are
 * targets of the pool (a pool that names one port means the row that begins there) and active. In front of
 * all ranks of a pod that decodes is one sidecar, on the first target port. */
static int find_ranks(const struct kvp_pod_rules *r, const struct kvp_ipool *pool, const struct pod *p,
	enum kvp_part_role role, struct ranks *out)
{
	uint16_t active[64];
	uint32_t active_cnt = p->active ? read_ports(p->active, active, 64) : 0, base = pool->port[0],
		 cnt = r->rank_cnt;
	*out = (struct ranks){.first = 0, .cnt = cnt, .port = base};
	if (!r->ranks_by_port || role == KVP_PART_DECODE)
		return !p->active || has_port(active, active_cnt, base);
	if (cnt == 1)
		while (cnt < pool->port_cnt && has_port(pool->port, pool->port_cnt, base + cnt))
			cnt++;
	uint32_t n = 0;
	for (uint32_t i = 0; i < cnt; i++) {
		uint32_t port = base + i;
		int is_on = port <= 65535 &&
			    (pool->port_cnt < 2 || has_port(pool->port, pool->port_cnt, port)) &&
			    (!p->active || has_port(active, active_cnt, port));
		if (is_on && !n++)
			out->first = i;
		if (!is_on && n)
			break;
	}
	out->cnt = n;
	out->port = base + out->first;
	return n > 0;
}

static void put_address(struct kvp_jw *w, const char *scheme, const struct pod *p, uint32_t port)
{
	char text[INET6_ADDRSTRLEN + 32];
	snprintf(text, sizeof(text), p->is_v6 ? "%s://[%s]:%u" : "%s://%s:%u", scheme, p->ip, port);
	kvp_jw_str(w, text);
}

static void put_rank_map(struct kvp_jw *w, const char *name, const struct kvp_pod_rules *r,
	const struct pod *p, const struct ranks *k, uint32_t base)
{
	char rank[16];
	kvp_jw_key(w, name);
	kvp_jw_obj(w);
	for (uint32_t i = k->first; i < k->first + k->cnt; i++) {
		snprintf(rank, sizeof(rank), "%u", i);
		kvp_jw_key(w, rank);
		put_address(w, "tcp", p, base + i * r->stride);
	}
	kvp_jw_end(w);
}

static void put_events(
	struct kvp_jw *w, const struct kvp_pod_rules *r, const struct pod *p, const struct ranks *k)
{
	put_rank_map(w, "kv_events_endpoints", r, p, k, r->event_port);
	if (!r->replay_port)
		return;
	if (k->cnt > 1) {
		put_rank_map(w, "replay_endpoints", r, p, k, r->replay_port);
		return;
	}
	kvp_jw_key(w, "replay_endpoint");
	put_address(w, "tcp", p, r->replay_port + k->first * r->stride);
}

/* Labels of the list that the pod has, as key=value. */
static void put_taints(struct kvp_jw *w, const struct kvp_pod_rules *r, const struct pod *p)
{
	char key[320], text[768];
	kvp_jw_key(w, "taints");
	kvp_jw_arr(w);
	for (const char *s = r->taint_labels; *s;) {
		size_t n = strcspn(s, ",");
		snprintf(key, sizeof(key), "%.*s", (int)n, s);
		const char *v = label(p, key);
		if (v) {
			snprintf(text, sizeof(text), "%s=%s", key, v);
			kvp_jw_str(w, text);
		}
		s += n + (s[n] == ',');
	}
	kvp_jw_end(w);
}

static void put_worker(struct kvp_jw *w, const struct kvp_pod_rules *r, const struct pod *p,
	const struct ranks *k, const struct kvp_pod_worker *of)
{
	uint64_t tokens = r->capacity[of->role].max_num_batched_tokens;
	const char *domain = r->domain_label[0] ? label(p, r->domain_label) : NULL;
	kvp_jw_reset(w);
	kvp_jw_obj(w);
	kvp_jw_ku64(w, "worker_id", of->id);
	kvp_jw_kstr(w, "model_name", r->model);
	kvp_jw_kstr(w, "routing_group", KVP_WORKER_GROUP);
	kvp_jw_key(w, "endpoint");
	put_address(w, "http", p, k->port);
	kvp_jw_ku64(w, "block_size", r->block_size);
	kvp_jw_ku64(w, "data_parallel_start_rank", k->first);
	kvp_jw_ku64(w, "data_parallel_size", k->cnt);
	if (r->has_events && (of->role != KVP_PART_DECODE || r->has_decode_events))
		put_events(w, r, p, k);
	if (tokens != UINT64_MAX)
		kvp_jw_ku64(w, "max_num_batched_tokens", tokens);
	if (r->total_kv_blocks != UINT64_MAX)
		kvp_jw_ku64(w, "total_kv_blocks", r->total_kv_blocks);
	if (r->is_eagle)
		kvp_jw_kbool(w, "is_eagle", 1);
	if (r->taint_labels[0])
		put_taints(w, r, p);
	if (domain && r->enforcement) {
		kvp_jw_kstr(w, "kv_transfer_domain", domain);
		kvp_jw_kstr(w, "kv_transfer_enforcement", r->enforcement);
	}
	kvp_jw_end(w);
}

enum kvp_pod_why kvp_pod_worker_of(const struct kvp_pod_rules *r, const struct kvp_ipool *pool,
	const struct kvp_ipool *prefill, const char *name, struct kvp_kube_bytes bytes, struct kvp_jw *w,
	struct kvp_pod_worker *out)
{
	struct pod p;
	struct ranks k;
	*out = (struct kvp_pod_worker){.role = KVP_PART_AGGREGATED};
	if (!read_pod(bytes, &p))
		return KVP_POD_NOT_READY;
	enum kvp_pod_why why = find_role(r, &pool, prefill, &p, out);
	if (why != KVP_POD_IS_WORKER)
		return why;
	if (!find_ranks(r, pool, &p, out->role, &k))
		return KVP_POD_PORT_OFF;
	out->id = kvp_pod_role_id(r, name, out->role);
	out->ip = p.ip;
	out->created = p.created;
	out->port = (uint16_t)k.port;
	put_worker(w, r, &p, &k, out);
	return KVP_POD_IS_WORKER;
}

enum kvp_pod_why kvp_pod_twin_of(const struct kvp_pod_rules *r, const struct kvp_ipool *pool,
	const char *name, struct kvp_kube_bytes bytes, struct kvp_jw *w, struct kvp_pod_worker *out)
{
	struct pod p;
	struct ranks k;
	out->role = KVP_PART_PREFILL;
	out->id = kvp_pod_role_id(r, name, out->role);
	out->has_twin = 0;
	if (!read_pod(bytes, &p) || !find_ranks(r, pool, &p, out->role, &k))
		return KVP_POD_PORT_OFF;
	out->port = (uint16_t)k.port;
	put_worker(w, r, &p, &k, out);
	return KVP_POD_IS_WORKER;
}

/* ---- slices: family, then "s" or "-" and the address, for each ---- */

/* From where an index may be recovered: it serves, or is ready where nothing is said of serving, and does not
 * end. */
static int is_source(struct kvp_json_val endpoint)
{
	struct kvp_json_val c, v;
	int yes = 0;
	if (kvp_json_get(endpoint, "conditions", &c) || kvp_json_type(c) != KVP_JSON_OBJ)
		return 0;
	if (!kvp_json_get(c, "terminating", &v) && !kvp_json_bool(v, &yes) && yes)
		return 0;
	yes = 0;
	if (!kvp_json_get(c, "serving", &v) && kvp_json_type(v) != KVP_JSON_NULL)
		return !kvp_json_bool(v, &yes) && yes;
	return !kvp_json_get(c, "ready", &v) && !kvp_json_bool(v, &yes) && yes;
}

int kvp_slice_digest(struct kvp_json_val obj, struct kvp_kube_buf *out)
{
	struct kvp_json_val v;
	const char *type = "";
	if (text_of(obj, "addressType", &type))
		type = "";
	int rc = put(out, strcasecmp(type, "IPv4") == 0 ? "4" : strcasecmp(type, "IPv6") == 0 ? "6" : "-");
	if (rc || kvp_json_get(obj, "endpoints", &v))
		return rc;
	struct kvp_json_iter it = kvp_json_each(v);
	while (!rc && kvp_json_next(&it)) {
		struct kvp_json_val list;
		const char *how = is_source(it.val) ? "s" : "-", *s;
		size_t len;
		if (kvp_json_get(it.val, "addresses", &list))
			continue;
		struct kvp_json_iter a = kvp_json_each(list);
		while (!rc && kvp_json_next(&a)) {
			if (kvp_json_str(a.val, &s, &len) || !len || strlen(s) != len || !is_address(s))
				continue;
			rc = put(out, how);
			rc = rc ? rc : put(out, s);
		}
	}
	return rc;
}

static int same_address(const char *x, const char *y)
{
	unsigned char a[16], b[16];
	for (int family = AF_INET; family; family = family == AF_INET ? AF_INET6 : 0)
		if (inet_pton(family, x, a) == 1 && inet_pton(family, y, b) == 1)
			return memcmp(a, b, family == AF_INET ? 4 : 16) == 0;
	return 0;
}

void kvp_slice_each(struct kvp_kube_bytes slice, enum kvp_slice_family family, const char *own,
	void (*fn)(void *ctx, const char *address, int is_source), void *ctx)
{
	const char *f = next(&slice), *how, *address;
	if (!f || *f != (family == KVP_SLICE_V4 ? '4' : '6'))
		return;
	while ((how = next(&slice)) && (address = next(&slice)))
		if (!same_address(address, own))
			fn(ctx, address, *how == 's');
}
