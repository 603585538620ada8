#include "daemons/common/policy_file.h"

#include <kvpick/err.h>

#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <yaml.h>

struct reader {
	yaml_document_t doc;
	struct kvp_policy_err *err;
};

static int fail(struct reader *r, const yaml_node_t *at, const char *fmt, ...)
	__attribute__((format(printf, 3, 4)));
static int fail(struct reader *r, const yaml_node_t *at, const char *fmt, ...)
{
	va_list ap;
	int n = at ? snprintf(r->err->text, sizeof(r->err->text), "line %zu: ", at->start_mark.line + 1) : 0;
	va_start(ap, fmt);
	vsnprintf(r->err->text + n, sizeof(r->err->text) - (size_t)n, fmt, ap);
	va_end(ap);
	return KVP_ERR_INVAL;
}

/* ---- nodes ---- */

static yaml_node_t *node(struct reader *r, yaml_node_item_t i)
{
	return yaml_document_get_node(&r->doc, i);
}

static const char *text_of(const yaml_node_t *n)
{
	return (const char *)n->data.scalar.value;
}

static int is_text(const yaml_node_t *n)
{
	return n->type == YAML_SCALAR_NODE && strlen(text_of(n)) == n->data.scalar.length;
}

/* One key that a mapping may have, and the value found. */
struct member {
	const char *key;
	yaml_node_t *val;
};

/* members fills in the values of a mapping's keys; other keys and repeated ones are errors. */
static int members(struct reader *r, yaml_node_t *map, const char *where, struct member *m, size_t n)
{
	if (map->type != YAML_MAPPING_NODE)
		return fail(r, map, "%s: must be a mapping", where);
	for (yaml_node_pair_t *p = map->data.mapping.pairs.start; p < map->data.mapping.pairs.top; p++) {
		yaml_node_t *k = node(r, p->key);
		size_t i = 0;
		if (!is_text(k))
			return fail(r, k, "%s: a key must be a word", where);
		while (i < n && strcmp(m[i].key, text_of(k)) != 0)
			i++;
		if (i == n)
			return fail(r, k, "%s: unknown key \"%.100s\"", where, text_of(k));
		if (m[i].val)
			return fail(r, k, "%s: key %s stands there twice", where, m[i].key);
		m[i].val = node(r, p->value);
	}
	return KVP_OK;
}

static int is_identifier(const char *s)
{
	static const char legal[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-";
	return *s && strspn(s, legal) == strlen(s);
}

/* identifier copies a name of at most KVP_POLICY_NAME_MAX bytes. */
static int identifier(struct reader *r, yaml_node_t *n, const char *what, char *out)
{
	if (!is_text(n) || !is_identifier(text_of(n)) || n->data.scalar.length > KVP_POLICY_NAME_MAX)
		return fail(r, n, "%s: must be 1 to %d letters, digits, _ . or -", what, KVP_POLICY_NAME_MAX);
	memcpy(out, text_of(n), n->data.scalar.length + 1);
	return KVP_OK;
}

static int whole(struct reader *r, yaml_node_t *n, const char *what, uint64_t least, uint64_t *out)
{
	const char *s = is_text(n) ? text_of(n) : "";
	char *end = NULL;
	errno = 0;
	unsigned long long v = strtoull(s, &end, 10);
	if (!*s || strspn(s, "0123456789") != strlen(s) || errno || v < least || v == UINT64_MAX)
		return fail(r, n, "%s: must be a whole number >= %llu", what, (unsigned long long)least);
	*out = v;
	return KVP_OK;
}

static int real(struct reader *r, yaml_node_t *n, const char *what, double *out)
{
	const char *s = is_text(n) ? text_of(n) : "";
	char *end = NULL;
	double v = strtod(s, &end);
	if (!*s || strspn(s, "0123456789.eE+-") != strlen(s) || *end || !isfinite(v))
		return fail(r, n, "%s: must be a finite number", what);
	*out = v;
	return KVP_OK;
}

static yaml_node_item_t *items(yaml_node_t *n, size_t *cnt)
{
	*cnt = (size_t)(n->data.sequence.items.top - n->data.sequence.items.start);
	return n->data.sequence.items.start;
}

static int sequence(struct reader *r, yaml_node_t *n, const char *what)
{
	size_t cnt;
	if (n->type != YAML_SEQUENCE_NODE)
		return fail(r, n, "%s: must be a list", what);
	items(n, &cnt);
	if (cnt == 0 || cnt > KVP_POLICY_CLASS_MAX)
		return fail(r, n, "%s: must have 1 to %d entries", what, KVP_POLICY_CLASS_MAX);
	return KVP_OK;
}

static int find_name(char list[][KVP_POLICY_NAME_MAX + 1], uint32_t cnt, const char *name)
{
	for (uint32_t i = 0; i < cnt; i++)
		if (strcmp(list[i], name) == 0)
			return (int)i;
	return -1;
}

/* ---- a profile ---- */

static int read_bucket(struct reader *r, struct kvp_policy_profile *p, yaml_node_t *n)
{
	struct member m[] = {{"min_tokens", NULL}, {"bucket", NULL}};
	uint32_t i = p->bucket_cnt;
	int rc = members(r, n, "uncached_isl_buckets", m, 2);
	if (!rc && (!m[0].val || !m[1].val))
		rc = fail(r, n, "uncached_isl_buckets: min_tokens and bucket are required");
	rc = rc ? rc : whole(r, m[0].val, "min_tokens", 0, &p->bucket_min[i]);
	rc = rc ? rc : identifier(r, m[1].val, "bucket", p->bucket[i]);
	if (rc)
		return rc;
	if (i == 0 && p->bucket_min[0] != 0)
		return fail(r, n, "uncached_isl_buckets: the first min_tokens must be 0");
	if (i && p->bucket_min[i] <= p->bucket_min[i - 1])
		return fail(r, n, "uncached_isl_buckets: min_tokens must be strictly increasing");
	if (find_name(p->bucket, i, p->bucket[i]) >= 0)
		return fail(r, n, "uncached_isl_buckets: bucket %s stands there twice", p->bucket[i]);
	p->bucket_cnt++;
	return KVP_OK;
}

enum {
	M_NAME,
	M_QUEUE_POLICY,
	M_QUANTUM,
	M_FAMILY,
	M_BUCKET,
	M_BUSY,
	M_BUSY_FRAC,
	M_RATIO,
	M_REQUESTS,
	M_ISL,
	M_CACHED,
	M_CNT
};

static int class_numbers(struct reader *r, struct member *m, struct kvp_policy_class *c)
{
	int rc = whole(r, m[M_QUANTUM].val, "quantum", 1, &c->quantum);
	if (!rc && m[M_BUSY].val)
		rc = whole(r, m[M_BUSY].val, m[M_BUSY].key, 0, &c->busy_tok);
	if (!rc && m[M_BUSY_FRAC].val) {
		rc = real(r, m[M_BUSY_FRAC].val, m[M_BUSY_FRAC].key, &c->busy_frac);
		if (!rc && c->busy_frac < 0)
			rc = fail(r, m[M_BUSY_FRAC].val, "%s: must be >= 0", m[M_BUSY_FRAC].key);
	}
	if (!rc && m[M_RATIO].val) {
		rc = real(r, m[M_RATIO].val, m[M_RATIO].key, &c->busy_ratio);
		if (!rc && !(c->busy_ratio > 0 && c->busy_ratio <= 1))
			rc = fail(r, m[M_RATIO].val, "busy_worker_ratio: must be > 0 and <= 1");
		if (!rc && !kvp_policy_queues(c))
			rc = fail(r, m[M_RATIO].val, "busy_worker_ratio: needs a prefill busy threshold");
	}
	if (!rc && m[M_REQUESTS].val)
		rc = whole(r, m[M_REQUESTS].val, m[M_REQUESTS].key, 0, &c->limit_requests);
	if (!rc && m[M_ISL].val)
		rc = whole(r, m[M_ISL].val, m[M_ISL].key, 0, &c->limit_isl_tok);
	if (!rc && m[M_CACHED].val)
		rc = whole(r, m[M_CACHED].val, m[M_CACHED].key, 0, &c->limit_cached_tok);
	return rc;
}

static int class_order(struct reader *r, yaml_node_t *n, struct kvp_policy_class *c)
{
	if (!n || (is_text(n) && strcmp(text_of(n), "fcfs") == 0))
		c->order = KVP_ORDER_FCFS;
	else if (is_text(n) && strcmp(text_of(n), "wspt") == 0)
		c->order = KVP_ORDER_WSPT;
	else
		return fail(r, n, "queue_policy: must be fcfs or wspt");
	return KVP_OK;
}

/* class_place finds the class's cell of the matrix; families appear with their first class. */
static int class_place(struct reader *r, struct kvp_policy_profile *p, struct member *m, yaml_node_t *n,
	struct kvp_policy_class *c)
{
	char family[KVP_POLICY_NAME_MAX + 1], bucket[KVP_POLICY_NAME_MAX + 1];
	c->family = KVP_POLICY_EXPLICIT;
	if (!m[M_FAMILY].val && !m[M_BUCKET].val)
		return KVP_OK;
	if (!m[M_FAMILY].val || !m[M_BUCKET].val)
		return fail(r, n, "class %s: policy_family and cache_bucket go together", c->name);
	int rc = identifier(r, m[M_FAMILY].val, "policy_family", family);
	rc = rc ? rc : identifier(r, m[M_BUCKET].val, "cache_bucket", bucket);
	if (rc)
		return rc;
	int b = find_name(p->bucket, p->bucket_cnt, bucket), f = find_name(p->family, p->family_cnt, family);
	if (b < 0)
		return fail(r, n, "class %s: there is no bucket %s", c->name, bucket);
	if (f < 0) {
		f = (int)p->family_cnt++;
		memcpy(p->family[f], family, sizeof(family));
		memset(p->matrix[f], 0xff, sizeof(p->matrix[f]));
	}
	if (p->matrix[f][b] != 0xff)
		return fail(r, n, "family %s has two classes for bucket %s", family, bucket);
	p->matrix[f][b] = (uint8_t)p->class_cnt;
	c->family = (uint32_t)f;
	c->bucket = (uint32_t)b;
	return KVP_OK;
}

static int read_class(struct reader *r, struct kvp_policy_profile *p, yaml_node_t *n)
{
	struct member m[M_CNT] = {[M_NAME] = {"name", NULL},
		[M_QUEUE_POLICY] = {"queue_policy", NULL},
		[M_QUANTUM] = {"quantum", NULL},
		[M_FAMILY] = {"policy_family", NULL},
		[M_BUCKET] = {"cache_bucket", NULL},
		[M_BUSY] = {"prefill_busy_threshold", NULL},
		[M_BUSY_FRAC] = {"prefill_busy_threshold_frac", NULL},
		[M_RATIO] = {"busy_worker_ratio", NULL},
		[M_REQUESTS] = {"request_queue_limit_per_worker", NULL},
		[M_ISL] = {"raw_isl_token_queue_limit_per_worker", NULL},
		[M_CACHED] = {"cached_token_queue_limit_per_worker", NULL}};
	struct kvp_policy_class *c = &p->class[p->class_cnt];
	c->busy_tok = c->limit_requests = c->limit_isl_tok = c->limit_cached_tok = KVP_POLICY_NONE;
	c->busy_frac = c->busy_ratio = NAN;
	int rc = members(r, n, "policy_classes", m, M_CNT);
	if (!rc && (!m[M_NAME].val || !m[M_QUANTUM].val))
		rc = fail(r, n, "policy_classes: name and quantum are required");
	rc = rc ? rc : identifier(r, m[M_NAME].val, "name", c->name);
	rc = rc ? rc : class_order(r, m[M_QUEUE_POLICY].val, c);
	rc = rc ? rc : class_numbers(r, m, c);
	for (uint32_t i = 0; !rc && i < p->class_cnt; i++)
		if (strcmp(p->class[i].name, c->name) == 0)
			rc = fail(r, n, "class %s stands there twice", c->name);
	rc = rc ? rc : class_place(r, p, m, n, c);
	p->class_cnt += rc == KVP_OK;
	return rc;
}

/* whole_matrix: no hole, the default family exists, no explicit class is named like a family. */
static int whole_matrix(struct reader *r, struct kvp_policy_profile *p, yaml_node_t *family)
{
	char name[KVP_POLICY_NAME_MAX + 1];
	int rc = identifier(r, family, "default_policy_family", name);
	if (rc)
		return rc;
	int f = find_name(p->family, p->family_cnt, name);
	if (f < 0)
		return fail(r, family, "default_policy_family: no class belongs to family %s", name);
	p->default_family = (uint32_t)f;
	for (uint32_t i = 0; i < p->family_cnt; i++)
		for (uint32_t b = 0; b < p->bucket_cnt; b++)
			if (p->matrix[i][b] == 0xff)
				return fail(r, family, "family %s has no class for bucket %s", p->family[i],
					p->bucket[b]);
	for (uint32_t i = 0; i < p->class_cnt; i++)
		if (p->class[i].family == KVP_POLICY_EXPLICIT &&
			find_name(p->family, p->family_cnt, p->class[i].name) >= 0)
			return fail(r, family, "explicit class %s has the name of a family",
				p->class[i].name);
	return KVP_OK;
}

enum { P_FAMILY, P_CLASSES, P_BUCKETS, P_CNT };
static const char *const profile_key[P_CNT] = {
	"default_policy_family", "policy_classes", "uncached_isl_buckets"};

/* read_profile: the three members are all given (checked before). */
static int read_profile(struct reader *r, struct kvp_policy_profile *p, const struct member *m)
{
	size_t cnt = 0;
	memset(p, 0, sizeof(*p));
	int rc = sequence(r, m[P_BUCKETS].val, profile_key[P_BUCKETS]);
	yaml_node_item_t *it = rc ? NULL : items(m[P_BUCKETS].val, &cnt);
	for (size_t i = 0; !rc && i < cnt; i++)
		rc = read_bucket(r, p, node(r, it[i]));
	rc = rc ? rc : sequence(r, m[P_CLASSES].val, profile_key[P_CLASSES]);
	it = rc ? NULL : items(m[P_CLASSES].val, &cnt);
	for (size_t i = 0; !rc && i < cnt; i++)
		rc = read_class(r, p, node(r, it[i]));
	return rc ? rc : whole_matrix(r, p, m[P_FAMILY].val);
}

static int all_or_none(struct reader *r, yaml_node_t *at, const char *where, const struct member *m)
{
	int given = (m[P_FAMILY].val != NULL) + (m[P_CLASSES].val != NULL) + (m[P_BUCKETS].val != NULL);
	if (given != 0 && given != P_CNT)
		return fail(r, at, "%s: %s, %s and %s go together", where, profile_key[0], profile_key[1],
			profile_key[2]);
	return KVP_OK;
}

/* ---- the document ---- */

static int read_models(struct reader *r, yaml_node_t *n, struct kvp_policy *out)
{
	if (n->type != YAML_MAPPING_NODE)
		return fail(r, n, "models: must be a mapping");
	size_t cnt = (size_t)(n->data.mapping.pairs.top - n->data.mapping.pairs.start);
	struct kvp_policy_profile *grown = realloc(out->profile, (cnt + 1) * sizeof(*grown));
	out->profile = grown ? grown : out->profile;
	char **names = grown ? realloc(out->model, (cnt + 1) * sizeof(*names)) : NULL;
	out->model = names ? names : out->model;
	if (!names)
		return KVP_ERR_SYS;
	for (size_t i = 0; i < cnt; i++) {
		yaml_node_pair_t *p = n->data.mapping.pairs.start + i;
		yaml_node_t *key = node(r, p->key), *val = node(r, p->value);
		struct member m[P_CNT] = {
			{profile_key[0], NULL}, {profile_key[1], NULL}, {profile_key[2], NULL}};
		if (!is_text(key) || !*text_of(key))
			return fail(r, key, "models: a model name must not be empty");
		for (uint32_t k = 1; k < out->profile_cnt; k++)
			if (strcmp(out->model[k], text_of(key)) == 0)
				return fail(r, key, "models: %.100s stands there twice", text_of(key));
		int rc = members(r, val, "models", m, P_CNT);
		rc = rc ? rc : all_or_none(r, val, "models", m);
		if (!rc && !m[P_FAMILY].val)
			rc = fail(r, val, "models: %.100s has no classes", text_of(key));
		rc = rc ? rc : read_profile(r, &out->profile[out->profile_cnt], m);
		if (rc)
			return rc;
		out->model[out->profile_cnt] = strdup(text_of(key));
		if (!out->model[out->profile_cnt])
			return KVP_ERR_SYS;
		out->profile_cnt++;
	}
	return KVP_OK;
}

struct instances {
	char name[KVP_POLICY_CLASS_MAX][KVP_POLICY_NAME_MAX + 1];
	uint32_t cnt;
};

static int read_instance(struct reader *r, yaml_node_t *n, struct instances *all)
{
	struct member m[] = {{"name", NULL}, {"type", NULL}, {"parameters", NULL}};
	char type[KVP_POLICY_NAME_MAX + 1];
	int rc = members(r, n, "instances", m, 3);
	if (!rc && (!m[0].val || !m[1].val))
		rc = fail(r, n, "instances: name and type are required");
	rc = rc ? rc : identifier(r, m[0].val, "name", all->name[all->cnt]);
	rc = rc ? rc : identifier(r, m[1].val, "type", type);
	if (rc)
		return rc;
	if (strcmp(all->name[all->cnt], "default") == 0)
		return fail(r, n, "instances: an instance can't be named default");
	if (find_name(all->name, all->cnt, all->name[all->cnt]) >= 0)
		return fail(r, n, "instances: %s stands there twice", all->name[all->cnt]);
	if (m[2].val && m[2].val->type != YAML_MAPPING_NODE)
		return fail(r, n, "instances: parameters must be a mapping");
	if (strcmp(type, "default") != 0 && strcmp(type, "reference") != 0)
		return fail(r, n, "instances: selection policy %s is not compiled in; legal: reference",
			type);
	all->cnt++;
	return KVP_OK;
}

/* read_selection checks worker_selection; the one policy there is needs no settings. */
static int read_selection(struct reader *r, yaml_node_t *n)
{
	struct member m[] = {{"aggregated", NULL}, {"prefill", NULL}, {"decode", NULL}, {"encode", NULL},
		{"instances", NULL}};
	struct instances all = {.cnt = 0};
	char name[KVP_POLICY_NAME_MAX + 1];
	size_t cnt = 0;
	int rc = members(r, n, "worker_selection", m, 5);
	if (!rc && n->data.mapping.pairs.start == n->data.mapping.pairs.top)
		rc = fail(r, n, "worker_selection: must not be empty");
	if (!rc && m[4].val) {
		rc = sequence(r, m[4].val, "instances");
		yaml_node_item_t *it = rc ? NULL : items(m[4].val, &cnt);
		for (size_t i = 0; !rc && i < cnt; i++)
			rc = read_instance(r, node(r, it[i]), &all);
	}
	for (int i = 0; !rc && i < 4; i++) {
		if (!m[i].val)
			continue;
		rc = identifier(r, m[i].val, m[i].key, name);
		if (!rc && strcmp(name, "default") != 0 && find_name(all.name, all.cnt, name) < 0)
			rc = fail(r, m[i].val, "worker_selection: there is no instance %s", name);
	}
	return rc;
}

static int read_document(struct reader *r, struct kvp_policy *out)
{
	struct member m[] = {{profile_key[0], NULL}, {profile_key[1], NULL}, {profile_key[2], NULL},
		{"models", NULL}, {"worker_selection", NULL}};
	yaml_node_t *root = yaml_document_get_root_node(&r->doc);
	if (!root)
		return fail(r, NULL, "the file is empty");
	int rc = members(r, root, "policy file", m, 5);
	rc = rc ? rc : all_or_none(r, root, "policy file", m);
	if (!rc && !m[P_FAMILY].val && !m[3].val && !m[4].val)
		rc = fail(r, root, "policy file: neither classes nor models nor worker_selection");
	if (!rc && m[P_FAMILY].val)
		rc = read_profile(r, &out->profile[0], m);
	if (!rc && m[3].val)
		rc = read_models(r, m[3].val, out);
	if (!rc && m[4].val)
		rc = read_selection(r, m[4].val);
	return rc;
}

static int read_text(struct reader *r, const char *text, size_t len, struct kvp_policy *out)
{
	yaml_parser_t p;
	yaml_document_t more;
	if (!yaml_parser_initialize(&p))
		return KVP_ERR_SYS;
	yaml_parser_set_input_string(&p, (const unsigned char *)text, len);
	int rc = KVP_OK;
	if (!yaml_parser_load(&p, &r->doc)) {
		rc = fail(r, NULL, "line %zu: %s", p.problem_mark.line + 1,
			p.problem ? p.problem : "syntax error");
		yaml_parser_delete(&p);
		return rc;
	}
	if (!yaml_parser_load(&p, &more)) {
		rc = fail(r, NULL, "line %zu: %s", p.problem_mark.line + 1,
			p.problem ? p.problem : "syntax error");
	} else {
		if (yaml_document_get_root_node(&more))
			rc = fail(r, NULL, "more than one document");
		yaml_document_delete(&more);
	}
	rc = rc ? rc : read_document(r, out);
	yaml_document_delete(&r->doc);
	yaml_parser_delete(&p);
	return rc;
}

int kvp_policy_parse(const char *text, size_t len, const struct kvp_policy_profile *single,
	struct kvp_policy *out, struct kvp_policy_err *err)
{
	struct reader r = {.err = err};
	*out = (struct kvp_policy){.profile_cnt = 1,
		.profile = malloc(sizeof(*out->profile)),
		.model = calloc(1, sizeof(*out->model))};
	snprintf(err->text, sizeof(err->text), "out of memory");
	int rc = out->profile && out->model ? KVP_OK : KVP_ERR_SYS;
	if (!rc)
		out->profile[0] = *single;
	if (!rc && text)
		rc = read_text(&r, text, len, out);
	if (rc)
		kvp_policy_drop(out);
	return rc;
}

int kvp_policy_load(const char *path, const struct kvp_policy_profile *single, struct kvp_policy *out,
	struct kvp_policy_err *err)
{
	if (!path || !*path)
		return kvp_policy_parse(NULL, 0, single, out, err);
	*out = (struct kvp_policy){.profile = NULL};
	FILE *f = fopen(path, "re");
	char *text = malloc(KVP_POLICY_FILE_MAX + 1);
	size_t n = f && text ? fread(text, 1, KVP_POLICY_FILE_MAX + 1, f) : 0;
	int rc = KVP_OK;
	if (!f || !text || ferror(f)) {
		snprintf(err->text, sizeof(err->text), "%s", strerror(errno));
		rc = KVP_ERR_SYS;
	} else if (n > KVP_POLICY_FILE_MAX) {
		snprintf(err->text, sizeof(err->text), "longer than %u bytes", KVP_POLICY_FILE_MAX);
		rc = KVP_ERR_INVAL;
	}
	rc = rc ? rc : kvp_policy_parse(text, n, single, out, err);
	if (f)
		fclose(f);
	free(text);
	return rc;
}

void kvp_policy_drop(struct kvp_policy *p)
{
	for (uint32_t i = 1; p->model && i < p->profile_cnt; i++)
		free(p->model[i]);
	free(p->model);
	free(p->profile);
	*p = (struct kvp_policy){.profile = NULL};
}
