/* daemons/common/worker_record.c — members are described once, in a table; reading and writing walk it. */
#include "daemons/common/worker_record.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ipc/zmq_sub.h"

enum wrec_kind {
	WREC_STR,
	WREC_ENFORCE,
	WREC_U32,
	WREC_U64,
	WREC_BOOL,
	WREC_F32,
	WREC_BY_RANK,
	WREC_SET,
	WREC_BY_NAME
};
enum wrec_echo { WREC_ALWAYS, WREC_WHEN_SET }; /* in the record: null when absent, or left out */
enum wrec_when { WREC_POST, WREC_PATCH, WREC_WHEN_BOTH };

struct wrec_member {
	const char *name;
	enum wrec_kind kind;
	size_t off;
	uint32_t max; /* bytes of a string; 0 = no limit of its own */
	enum wrec_echo echo;
	enum wrec_when when; /* read in */
};

#define WREC_OFF(field) offsetof(struct kvp_wrec, field)
#define WREC_NAME KVP_CAT_NAME_MAX
static const struct wrec_member member[] = {
	/* in the order of the record; lifecycle follows the first two */
	{"model_name", WREC_STR, WREC_OFF(model), WREC_NAME, WREC_ALWAYS, WREC_POST},
	{"routing_group", WREC_STR, WREC_OFF(group), WREC_NAME, WREC_ALWAYS, WREC_POST},
	{"endpoint", WREC_STR, WREC_OFF(endpoint), WREC_NAME, WREC_ALWAYS, WREC_WHEN_BOTH},
	{"kv_events_endpoint", WREC_STR, WREC_OFF(event_endpoint), WREC_NAME, WREC_ALWAYS, WREC_WHEN_BOTH},
	{"kv_events_endpoints", WREC_BY_RANK, WREC_OFF(event_endpoints), WREC_NAME, WREC_WHEN_SET,
		WREC_WHEN_BOTH},
	{"replay_endpoint", WREC_STR, WREC_OFF(replay_endpoint), WREC_NAME, WREC_ALWAYS, WREC_WHEN_BOTH},
	{"replay_endpoints", WREC_BY_RANK, WREC_OFF(replay_endpoints), WREC_NAME, WREC_WHEN_SET,
		WREC_WHEN_BOTH},
	{"block_size", WREC_U32, WREC_OFF(block_size), 0, WREC_ALWAYS, WREC_WHEN_BOTH},
	{"data_parallel_start_rank", WREC_U32, WREC_OFF(start_rank), 0, WREC_ALWAYS, WREC_WHEN_BOTH},
	{"data_parallel_size", WREC_U32, WREC_OFF(size), 0, WREC_ALWAYS, WREC_WHEN_BOTH},
	{"max_num_batched_tokens", WREC_U64, WREC_OFF(max_num_batched_tokens), 0, WREC_ALWAYS,
		WREC_WHEN_BOTH},
	{"total_kv_blocks", WREC_U64, WREC_OFF(total_kv_blocks), 0, WREC_ALWAYS, WREC_WHEN_BOTH},
	{"stable_routing_id", WREC_STR, WREC_OFF(stable_routing_id), 0, WREC_ALWAYS, WREC_WHEN_BOTH},
	{"is_eagle", WREC_BOOL, WREC_OFF(is_eagle), 0, WREC_ALWAYS, WREC_WHEN_BOTH},
	{"taints", WREC_SET, WREC_OFF(taints), 0, WREC_ALWAYS, WREC_WHEN_BOTH},
	{"topology_domains", WREC_BY_NAME, WREC_OFF(topology_domains), 0, WREC_ALWAYS, WREC_WHEN_BOTH},
	{"kv_transfer_domain", WREC_STR, WREC_OFF(kv_transfer_domain), 0, WREC_ALWAYS, WREC_WHEN_BOTH},
	{"kv_transfer_enforcement", WREC_ENFORCE, WREC_OFF(kv_transfer_enforcement), 0, WREC_ALWAYS,
		WREC_WHEN_BOTH},
	{"kv_transfer_preferred_weight", WREC_F32, WREC_OFF(kv_transfer_preferred_weight), 0, WREC_ALWAYS,
		WREC_WHEN_BOTH},
	{"router_hint_worker_type", WREC_STR, WREC_OFF(hint_worker_type), 0, WREC_WHEN_SET, WREC_WHEN_BOTH},
	{"router_hint_source_control_endpoints", WREC_BY_RANK, WREC_OFF(hint_endpoints), WREC_NAME,
		WREC_WHEN_SET, WREC_WHEN_BOTH},
	{"kv_event_source_mode", WREC_STR, WREC_OFF(event_source_mode), 0, WREC_WHEN_SET, WREC_WHEN_BOTH},
};
enum { MEMBER_CNT = sizeof(member) / sizeof(member[0]) };

int kvp_wrec_is_member(const char *name)
{
	for (int i = 0; i < MEMBER_CNT; i++)
		if (strcmp(member[i].name, name) == 0)
			return 1;
	return strcmp(name, "worker_id") == 0;
}

/* -- memory: chunks that live as long as the record -- */

struct kvp_wrec_chunk {
	struct kvp_wrec_chunk *next;
	char bytes[] __attribute__((aligned(16)));
};

static void *wrec_alloc(struct kvp_wrec *rec, size_t bytes)
{
	struct kvp_wrec_chunk *c = malloc(sizeof(*c) + bytes);
	if (!c)
		return NULL;
	c->next = rec->mem;
	rec->mem = c;
	return c->bytes;
}

void kvp_wrec_free(struct kvp_wrec *rec)
{
	while (rec->mem) {
		struct kvp_wrec_chunk *c = rec->mem;
		rec->mem = c->next;
		free(c);
	}
	memset(rec, 0, sizeof(*rec));
}

/* -- JSON in -- */

struct wrec_in {
	struct kvp_wrec *rec;
	struct kvp_wrec_err *err;
	enum wrec_when when;
};

static int fail(struct wrec_in *in, int status, const char *name, const char *what)
{
	in->err->status = status;
	snprintf(in->err->text, sizeof(in->err->text), "%s: %s", name, what);
	return KVP_ERR_PROTO;
}

static int keep(
	struct wrec_in *in, const struct wrec_member *m, const char *s, size_t len, struct kvp_str *out)
{
	if (m->max && len > m->max)
		return fail(in, 400, m->name, "longer than 1024 bytes");
	if (len > KVP_CAT_RECORD_MAX)
		return fail(in, 400, m->name, "longer than 65536 bytes");
	char *to = wrec_alloc(in->rec, len + 1);
	if (!to)
		return fail(in, 503, m->name, "out of memory");
	memcpy(to, s, len);
	to[len] = 0;
	*out = (struct kvp_str){to, (uint32_t)len};
	return KVP_OK;
}

static int read_str(
	struct wrec_in *in, const struct wrec_member *m, struct kvp_json_val v, struct kvp_str *out)
{
	const char *s;
	size_t len;
	if (kvp_json_str(v, &s, &len))
		return fail(in, 422, m->name, "expected a string");
	return keep(in, m, s, len, out);
}

/* The key of a map by rank: a decimal number without leading zeros, as a JSON integer would be written. */
static int read_rank(const char *s, size_t len, uint32_t *rank)
{
	uint64_t v = 0;
	if (!len || len > 10 || (len > 1 && s[0] == '0'))
		return KVP_ERR_INVAL;
	for (size_t i = 0; i < len; i++) {
		if (s[i] < '0' || s[i] > '9')
			return KVP_ERR_INVAL;
		v = v * 10 + (uint64_t)(s[i] - '0');
	}
	if (v > UINT32_MAX)
		return KVP_ERR_INVAL;
	*rank = (uint32_t)v;
	return KVP_OK;
}

static int str_cmp(struct kvp_str a, struct kvp_str b)
{
	int c = memcmp(a.ptr, b.ptr, a.len < b.len ? a.len : b.len);
	return c ? c : (a.len > b.len) - (a.len < b.len);
}

struct wrec_sort {
	struct kvp_wrec_pair pair;
	uint32_t at; /* place in the text: of equal keys the last wins */
};

static int sort_cmp(const void *a, const void *b)
{
	const struct wrec_sort *x = a, *y = b;
	int c;
	if (x->pair.key.ptr)
		c = str_cmp(x->pair.key, y->pair.key);
	else
		c = (x->pair.rank > y->pair.rank) - (x->pair.rank < y->pair.rank);
	return c ? c : (x->at > y->at) - (x->at < y->at);
}

static int read_item(struct wrec_in *in, const struct wrec_member *m, const struct kvp_json_iter *it,
	struct kvp_wrec_pair *out)
{
	if (m->kind == WREC_SET)
		return read_str(in, m, it->val, &out->key);
	int rc = KVP_OK;
	if (m->kind == WREC_BY_NAME)
		rc = keep(in, m, it->key, it->key_len, &out->key);
	else if (read_rank(it->key, it->key_len, &out->rank))
		rc = fail(in, 422, m->name, "expected a rank (0 to 4294967295) as key");
	return rc ? rc : read_str(in, m, it->val, &out->val);
}

static int read_list(
	struct wrec_in *in, const struct wrec_member *m, struct kvp_json_val v, struct kvp_wrec_list *out)
{
	int is_set = m->kind == WREC_SET;
	if (kvp_json_type(v) != (is_set ? KVP_JSON_ARR : KVP_JSON_OBJ))
		return fail(in, 422, m->name,
			is_set ? "expected an array of strings" : "expected an object of strings");
	size_t cnt = kvp_json_len(v), n = 0;
	if (cnt > KVP_CAT_RECORD_MAX)
		return fail(in, 400, m->name, "too many entries");
	struct wrec_sort *tmp = calloc(cnt + 1, sizeof(*tmp));
	struct kvp_wrec_pair *item = wrec_alloc(in->rec, (cnt + 1) * sizeof(*item));
	int rc = tmp && item ? KVP_OK : fail(in, 503, m->name, "out of memory");
	struct kvp_json_iter it = kvp_json_each(v);
	while (!rc && n < cnt && kvp_json_next(&it)) {
		rc = read_item(in, m, &it, &tmp[n].pair);
		tmp[n].at = (uint32_t)n;
		n++;
	}
	if (!rc) {
		qsort(tmp, n, sizeof(*tmp), sort_cmp);
		*out = (struct kvp_wrec_list){item, 0};
		for (size_t i = 0; i < n; i++) {
			const struct kvp_wrec_pair *p = &tmp[i].pair;
			int same = out->cnt && (p->key.ptr ? str_cmp(p->key, item[out->cnt - 1].key) == 0
								: p->rank == item[out->cnt - 1].rank);
			item[same ? out->cnt - 1 : out->cnt++] = *p;
		}
	}
	free(tmp);
	return rc;
}

static int read_f32(
	struct wrec_in *in, const struct wrec_member *m, struct kvp_json_val v, struct kvp_wrec_f32 *out)
{
	double d;
	if (kvp_json_double(v, &d) || !isfinite((float)d))
		return fail(in, 422, m->name, "expected a number");
	*out = (struct kvp_wrec_f32){1, (float)d};
	return KVP_OK;
}

static int read_value(struct wrec_in *in, const struct wrec_member *m, struct kvp_json_val v)
{
	void *to = (char *)in->rec + m->off;
	struct kvp_wrec_u32 u32 = {1, 0};
	struct kvp_wrec_u64 u64 = {1, 0};
	int flag;
	switch (m->kind) {
	case WREC_STR:
		return read_str(in, m, v, to);
	case WREC_ENFORCE:
		if (!kvp_json_str_is(v, "required") && !kvp_json_str_is(v, "preferred"))
			return fail(in, 422, m->name, "expected \"required\" or \"preferred\"");
		return read_str(in, m, v, to);
	case WREC_U32:
		if (kvp_json_u32(v, &u32.v))
			return fail(in, 422, m->name, "expected an integer from 0 to 4294967295");
		memcpy(to, &u32, sizeof(u32));
		return KVP_OK;
	case WREC_U64:
		if (kvp_json_u64(v, &u64.v))
			return fail(in, 422, m->name, "expected an integer from 0 to 18446744073709551615");
		memcpy(to, &u64, sizeof(u64));
		return KVP_OK;
	case WREC_BOOL:
		if (kvp_json_bool(v, &flag))
			return fail(in, 422, m->name, "expected true or false");
		u32.v = flag != 0;
		memcpy(to, &u32, sizeof(u32));
		return KVP_OK;
	case WREC_F32:
		return read_f32(in, m, v, to);
	default:
		return read_list(in, m, v, to);
	}
}

static int is_list(enum wrec_kind k)
{
	return k == WREC_BY_RANK || k == WREC_SET || k == WREC_BY_NAME;
}

static int read_members(struct wrec_in *in, struct kvp_json_val root)
{
	for (int i = 0; i < MEMBER_CNT; i++) {
		const struct wrec_member *m = &member[i];
		struct kvp_json_val v;
		if (m->when != WREC_WHEN_BOTH && m->when != in->when)
			continue;
		if (kvp_json_get(root, m->name, &v))
			continue;
		if (kvp_json_type(v) == KVP_JSON_NULL && (in->when == WREC_PATCH || !is_list(m->kind)))
			continue;
		int rc = read_value(in, m, v);
		if (rc)
			return rc;
	}
	return KVP_OK;
}

static int read_root(
	struct wrec_in *in, struct kvp_json *p, const char *json, size_t len, struct kvp_json_val *root)
{
	struct kvp_json_err jerr;
	int rc = kvp_json_parse(p, json, len, KVP_JSON_DEPTH_MAX, root, &jerr);
	if (rc) {
		in->err->status = 400;
		snprintf(in->err->text, sizeof(in->err->text), "request body is not valid JSON: %s",
			jerr.text);
		return KVP_ERR_PROTO;
	}
	if (kvp_json_type(*root) != KVP_JSON_OBJ)
		return fail(in, 422, "request body", "expected an object");
	return KVP_OK;
}

int kvp_wrec_post(
	struct kvp_json *p, const char *json, size_t len, struct kvp_wrec *out, struct kvp_wrec_err *err)
{
	struct kvp_wrec rec = {.model = {"default", 7}, .group = {"default", 7}};
	struct wrec_in in = {&rec, err, WREC_POST};
	struct kvp_json_val root, id;
	int rc = read_root(&in, p, json, len, &root);
	if (!rc && kvp_json_get(root, "worker_id", &id))
		rc = fail(&in, 422, "worker_id", "member is missing");
	if (!rc && kvp_json_u64(id, &rec.worker_id))
		rc = fail(&in, 422, "worker_id", "expected an integer from 0 to 18446744073709551615");
	if (!rc)
		rc = read_members(&in, root);
	if (rc)
		kvp_wrec_free(&rec);
	else
		*out = rec;
	return rc;
}

int kvp_wrec_patch(
	struct kvp_json *p, const char *json, size_t len, struct kvp_wrec *rec, struct kvp_wrec_err *err)
{
	struct wrec_in in = {rec, err, WREC_PATCH};
	struct kvp_json_val root;
	int rc = read_root(&in, p, json, len, &root);
	return rc ? rc : read_members(&in, root);
}

/* -- ranks and endpoints -- */

uint32_t kvp_wrec_ranks(const struct kvp_wrec *rec, uint32_t *start)
{
	uint32_t size = rec->size.is_set ? rec->size.v : 1;
	*start = rec->start_rank.is_set ? rec->start_rank.v : 0;
	return size <= UINT32_MAX - *start ? size : UINT32_MAX - *start;
}

static struct kvp_str list_by_rank(const struct kvp_wrec_list *l, uint32_t rank)
{
	uint32_t lo = 0, hi = l->cnt;
	while (lo < hi) {
		uint32_t mid = lo + (hi - lo) / 2;
		if (l->item[mid].rank < rank)
			lo = mid + 1;
		else
			hi = mid;
	}
	if (lo < l->cnt && l->item[lo].rank == rank)
		return l->item[lo].val;
	return (struct kvp_str){NULL, 0};
}

struct kvp_str kvp_wrec_event(const struct kvp_wrec *rec, uint32_t rank)
{
	uint32_t size = rec->size.is_set ? rec->size.v : 1;
	if (rec->event_endpoints.cnt || size != 1)
		return list_by_rank(&rec->event_endpoints, rank);
	return rec->event_endpoint;
}

/* Endpoints are 0-terminated copies; one that holds a NUL byte is none. */
static int endpoint_check(struct kvp_str e, char *err, size_t cap)
{
	if (strlen(e.ptr) == e.len)
		return kvp_zmq_endpoint_check(e.ptr, err, cap);
	snprintf(err, cap, "endpoint contains a NUL byte");
	return KVP_ERR_INVAL;
}

int kvp_wrec_replay(const struct kvp_wrec *rec, uint32_t rank, char buf[KVP_WREC_ENDPOINT_MAX])
{
	uint32_t start;
	kvp_wrec_ranks(rec, &start);
	struct kvp_str own = list_by_rank(&rec->replay_endpoints, rank);
	uint32_t shift = rank - start;
	if (own.ptr)
		shift = 0;
	else
		own = rec->replay_endpoint;
	if (!own.ptr)
		return KVP_ERR_NOTFOUND;
	char why[64];
	if (own.len > KVP_CAT_NAME_MAX || endpoint_check(own, why, sizeof(why)))
		return KVP_ERR_INVAL;
	if (shift && memcmp(own.ptr, "tcp://", 6) != 0)
		return KVP_ERR_NOTFOUND; /* no port to advance: it serves the first rank only */
	return kvp_zmq_endpoint_advance(own.ptr, shift, buf, KVP_WREC_ENDPOINT_MAX);
}

/* -- reasons -- */

void kvp_wrec_reason(struct kvp_wrec_reasons *r, const char *fmt, ...)
{
	char *text = NULL;
	va_list ap;
	if (r->cnt >= KVP_WREC_REASON_MAX) {
		r->left_out++;
		return;
	}
	if (!r->text)
		r->text = calloc(KVP_WREC_REASON_MAX, sizeof(*r->text));
	va_start(ap, fmt);
	if (!r->text || vasprintf(&text, fmt, ap) < 0)
		r->left_out++;
	else
		r->text[r->cnt++] = text;
	va_end(ap);
}

void kvp_wrec_reasons_free(struct kvp_wrec_reasons *r)
{
	for (uint32_t i = 0; i < r->cnt; i++)
		free(r->text[i]);
	free(r->text);
	memset(r, 0, sizeof(*r));
}

void kvp_wrec_check(const struct kvp_wrec *rec, enum kvp_wrec_queueing queueing, enum kvp_wrec_events events,
	struct kvp_wrec_reasons *r)
{
	uint32_t start, cnt = kvp_wrec_ranks(rec, &start);
	if (!rec->endpoint.ptr || !rec->endpoint.len)
		kvp_wrec_reason(r, "endpoint is required");
	if (!rec->block_size.is_set || !rec->block_size.v)
		kvp_wrec_reason(r, "block_size must be greater than 0");
	if (rec->size.is_set && !rec->size.v)
		kvp_wrec_reason(r, "data_parallel_size must be greater than 0");
	if (queueing == KVP_WREC_QUEUEING_ON && !rec->max_num_batched_tokens.is_set)
		kvp_wrec_reason(r, "max_num_batched_tokens is required while queueing is enabled");
	if (events == KVP_WREC_EVENTS_OFF)
		return;
	for (uint32_t i = 0; i < cnt; i++) {
		if (r->cnt >= KVP_WREC_REASON_MAX) { /* a size of billions must not cost billions of steps */
			r->left_out += cnt - i;
			return;
		}
		struct kvp_str e = kvp_wrec_event(rec, start + i);
		if (!e.ptr || !e.len)
			kvp_wrec_reason(r, "kv_events endpoint is required for dp_rank %u", start + i);
	}
}

static int check_endpoint(struct kvp_wrec_reasons *r, const char *member_name, struct kvp_str e)
{
	char why[128];
	if (endpoint_check(e, why, sizeof(why)) == KVP_OK)
		return 0;
	kvp_wrec_reason(r, "reconciliation failed: %s \"%s\": %s", member_name, e.ptr, why);
	return 1;
}

void kvp_wrec_check_listeners(const struct kvp_wrec *rec, struct kvp_wrec_reasons *r)
{
	char buf[KVP_WREC_ENDPOINT_MAX];
	uint32_t start, cnt = kvp_wrec_ranks(rec, &start);
	for (uint32_t i = 0; i < rec->event_endpoints.cnt; i++)
		if (check_endpoint(r, "kv_events_endpoints", rec->event_endpoints.item[i].val))
			return;
	if (!rec->event_endpoints.cnt && rec->event_endpoint.ptr)
		if (check_endpoint(r, "kv_events_endpoint", rec->event_endpoint))
			return;
	for (uint32_t i = 0; i < rec->replay_endpoints.cnt; i++)
		if (check_endpoint(r, "replay_endpoints", rec->replay_endpoints.item[i].val))
			return;
	if (rec->replay_endpoint.ptr && check_endpoint(r, "replay_endpoint", rec->replay_endpoint))
		return;
	for (uint32_t i = 0; i < cnt; i++)
		if (kvp_wrec_replay(rec, start + i, buf) == KVP_ERR_LIMIT) {
			kvp_wrec_reason(r,
				"reconciliation failed: replay_endpoint \"%s\" gives dp_rank %u a port above "
				"65535",
				rec->replay_endpoint.ptr, start + i);
			return;
		}
}

/* -- JSON out -- */

const char *kvp_lifecycle_name(enum kvp_lifecycle life)
{
	static const char *const name[] = {"incomplete", "schedulable", "draining", "unschedulable"};
	return (unsigned)life < 4 ? name[life] : "unknown";
}

/* The shortest text that reads back as the same float. */
static void write_f32(struct kvp_jw *w, float v)
{
	char text[32];
	for (int digits = 1; digits <= 9; digits++) {
		snprintf(text, sizeof(text), "%.*g", digits, (double)v);
		if (strtof(text, NULL) == v)
			break;
	}
	size_t len = strlen(text);
	if (!strpbrk(text, ".e")) {
		memcpy(text + len, ".0", 3);
		len += 2;
	}
	kvp_jw_raw(w, text, len);
}

static void write_list(struct kvp_jw *w, enum wrec_kind kind, const struct kvp_wrec_list *l)
{
	if (kind == WREC_SET)
		kvp_jw_arr(w);
	else
		kvp_jw_obj(w);
	for (uint32_t i = 0; i < l->cnt; i++) {
		const struct kvp_wrec_pair *p = &l->item[i];
		char key[16];
		if (kind == WREC_SET) {
			kvp_jw_strn(w, p->key.ptr, p->key.len);
			continue;
		}
		snprintf(key, sizeof(key), "%u", p->rank);
		if (kind == WREC_BY_RANK)
			kvp_jw_key(w, key);
		else
			kvp_jw_keyn(w, p->key.ptr, p->key.len);
		kvp_jw_strn(w, p->val.ptr, p->val.len);
	}
	kvp_jw_end(w);
}

static int member_is_set(const struct wrec_member *m, const void *from)
{
	switch (m->kind) {
	case WREC_STR:
	case WREC_ENFORCE:
		return ((const struct kvp_str *)from)->ptr != NULL;
	case WREC_BY_RANK:
	case WREC_SET:
	case WREC_BY_NAME:
		return m->echo == WREC_ALWAYS || ((const struct kvp_wrec_list *)from)->cnt;
	default:
		return *(const uint32_t *)from != 0; /* is_set comes first */
	}
}

static void write_member(struct kvp_jw *w, const struct wrec_member *m, const struct kvp_wrec *rec)
{
	const void *from = (const char *)rec + m->off;
	const struct kvp_str *s = from;
	int is_set = member_is_set(m, from);
	if (!is_set && m->echo == WREC_WHEN_SET)
		return;
	kvp_jw_key(w, m->name);
	if (!is_set) {
		kvp_jw_null(w);
		return;
	}
	switch (m->kind) {
	case WREC_STR:
	case WREC_ENFORCE:
		kvp_jw_strn(w, s->ptr, s->len);
		break;
	case WREC_U32:
		kvp_jw_u64(w, ((const struct kvp_wrec_u32 *)from)->v);
		break;
	case WREC_U64:
		kvp_jw_u64(w, ((const struct kvp_wrec_u64 *)from)->v);
		break;
	case WREC_BOOL:
		kvp_jw_bool(w, (int)((const struct kvp_wrec_u32 *)from)->v);
		break;
	case WREC_F32:
		write_f32(w, ((const struct kvp_wrec_f32 *)from)->v);
		break;
	default:
		write_list(w, m->kind, from);
	}
}

void kvp_wrec_json(const struct kvp_wrec *rec, enum kvp_lifecycle life, const struct kvp_wrec_reasons *r,
	struct kvp_jw *w)
{
	kvp_jw_obj(w);
	kvp_jw_ku64(w, "worker_id", rec->worker_id);
	for (int i = 0; i < MEMBER_CNT; i++) {
		if (i == 2)
			kvp_jw_kstr(w, "lifecycle", kvp_lifecycle_name(life));
		write_member(w, &member[i], rec);
	}
	if (r && (r->cnt || r->left_out)) {
		char more[64];
		kvp_jw_key(w, "not_schedulable_reasons");
		kvp_jw_arr(w);
		for (uint32_t i = 0; i < r->cnt; i++)
			kvp_jw_str(w, r->text[i]);
		snprintf(more, sizeof(more), "and %u more", r->left_out);
		if (r->left_out)
			kvp_jw_str(w, more);
		kvp_jw_end(w);
	}
	kvp_jw_end(w);
}
