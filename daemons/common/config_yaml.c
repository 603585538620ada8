#include "daemons/common/config_priv.h"

#include <kvpick/err.h>

#include <errno.h>
#include <string.h>
#include <yaml.h>

#define FILE_BYTES_MAX (1 << 20)

static int is_null(const yaml_event_t *e)
{
	const char *v = (const char *)e->data.scalar.value;
	return e->data.scalar.style == YAML_PLAIN_SCALAR_STYLE &&
	       (strcmp(v, "~") == 0 || strcasecmp(v, "null") == 0);
}

/* What a walk over one flat mapping reports. code: KVP_ERR_PROTO for a broken document. */
struct flat {
	void *ctx;
	void (*put)(void *ctx, const char *key, const yaml_event_t *value);
	char error[256];
};

static int flat_error(struct flat *f, const char *what, size_t line)
{
	snprintf(f->error, sizeof(f->error), "line %zu: %s", line + 1, what);
	return KVP_ERR_PROTO;
}

/* Walks "key: scalar" pairs up to the end of the mapping. */
static int flat_pairs(yaml_parser_t *p, struct flat *f)
{
	char key[160] = "";
	enum { WANT_KEY, WANT_VALUE } want = WANT_KEY;
	for (;;) {
		yaml_event_t e;
		int rc = KVP_OK;
		if (!yaml_parser_parse(p, &e))
			return flat_error(f, p->problem ? p->problem : "syntax error", p->problem_mark.line);
		size_t line = e.start_mark.line;
		if (e.type == YAML_MAPPING_END_EVENT && want == WANT_KEY) {
			yaml_event_delete(&e);
			return KVP_OK;
		}
		if (e.type != YAML_SCALAR_EVENT) {
			rc = flat_error(
				f, want == WANT_KEY ? "key is not a scalar" : "value is not a scalar", line);
		} else if (strlen((char *)e.data.scalar.value) != e.data.scalar.length) {
			rc = flat_error(f, "NUL in a scalar", line);
		} else if (want == WANT_KEY) {
			snprintf(key, sizeof(key), "%s", (char *)e.data.scalar.value);
			want = WANT_VALUE;
		} else {
			f->put(f->ctx, key, &e);
			want = WANT_KEY;
		}
		yaml_event_delete(&e);
		if (rc)
			return rc;
	}
}

static int next_type(yaml_parser_t *p, struct flat *f, yaml_event_type_t *type, size_t *line)
{
	yaml_event_t e;
	if (!yaml_parser_parse(p, &e))
		return flat_error(f, p->problem ? p->problem : "syntax error", p->problem_mark.line);
	*type = e.type;
	*line = e.start_mark.line;
	yaml_event_delete(&e);
	return KVP_OK;
}

/* One document with one mapping; an empty text has no settings. */
static int flat_document(yaml_parser_t *p, struct flat *f)
{
	yaml_event_type_t type = YAML_NO_EVENT;
	size_t line = 0;
	int rc = next_type(p, f, &type, &line);
	if (!rc)
		rc = next_type(p, f, &type, &line);
	if (rc || type == YAML_STREAM_END_EVENT)
		return rc;
	rc = next_type(p, f, &type, &line);
	if (!rc && type != YAML_MAPPING_START_EVENT)
		return flat_error(f, "not a mapping", line);
	if (!rc)
		rc = flat_pairs(p, f);
	if (!rc)
		rc = next_type(p, f, &type, &line);
	if (!rc)
		rc = next_type(p, f, &type, &line);
	if (!rc && type != YAML_STREAM_END_EVENT)
		return flat_error(f, "more than one document", line);
	return rc;
}

struct file_ctx {
	struct kvp_cfg_load *load;
	void (*put)(struct kvp_cfg_load *l, const char *key, const char *value);
};

static void file_pair(void *ctx, const char *key, const yaml_event_t *e)
{
	struct file_ctx *c = ctx;
	c->put(c->load, key, is_null(e) ? "" : (const char *)e->data.scalar.value);
}

int kvp_cfg_yaml(const char *path, struct kvp_config_err *err,
	void (*put)(struct kvp_cfg_load *l, const char *key, const char *value), struct kvp_cfg_load *l)
{
	struct file_ctx ctx = {l, put};
	struct flat f = {.ctx = &ctx, .put = file_pair, .error = ""};
	yaml_parser_t p;
	FILE *in = fopen(path, "re");
	if (!in) {
		kvp_cfg_error(err, "KVPICK_CONFIG=\"%.200s\": %s; legal: a readable YAML file", path,
			strerror(errno));
		return KVP_ERR_SYS;
	}
	if (fseek(in, 0, SEEK_END) == 0 && ftell(in) > FILE_BYTES_MAX) {
		kvp_cfg_error(err, "KVPICK_CONFIG=\"%.200s\": longer than %d bytes", path, FILE_BYTES_MAX);
		fclose(in);
		return KVP_ERR_LIMIT;
	}
	rewind(in);
	if (!yaml_parser_initialize(&p)) {
		fclose(in);
		kvp_cfg_error(err, "KVPICK_CONFIG: no memory");
		return KVP_ERR_SYS;
	}
	yaml_parser_set_input_file(&p, in);
	int rc = flat_document(&p, &f);
	if (rc)
		kvp_cfg_error(err, "KVPICK_CONFIG=\"%.200s\": %s; legal: a mapping of variables to scalars",
			path, f.error);
	yaml_parser_delete(&p);
	fclose(in);
	return rc;
}

/* -- JSON form of conditional disaggregation; JSON is read as the subset of YAML that it is -- */

static const struct {
	const char *key;
	enum kvp_config_id id;
} json_key[] = {{"policy", KVP_CFG_conditional_disagg_policy},
	{"eff_isl_threshold", KVP_CFG_conditional_disagg_eff_isl},
	{"eff_isl_ratio_threshold", KVP_CFG_conditional_disagg_ratio},
	{"non_cached_tokens", KVP_CFG_conditional_disagg_non_cached},
	{"max_local_prefill_length", KVP_CFG_conditional_disagg_local_max},
	{"prefill_busy_threshold", KVP_CFG_prefill_busy_threshold},
	{"decode_busy_threshold", KVP_CFG_decode_busy_threshold}};
#define JSON_KEYS                                                                                            \
	"policy, eff_isl_threshold, eff_isl_ratio_threshold, non_cached_tokens, "                            \
	"max_local_prefill_length, prefill_busy_threshold, decode_busy_threshold"

struct json_ctx {
	struct kvp_config *c;
	struct kvp_config_err *err;
};

/* null stands for a number that has no default. */
static int may_be_null(const struct kvp_cfg_row *r)
{
	return r->type == KVP_CFG_INT ? r->udef == KVP_CONFIG_UNSET : !kvp_config_has(r->fdef);
}

static void json_pair(void *ctx, const char *key, const yaml_event_t *e)
{
	static const char name[] = "DYN_ROUTER_CONDITIONAL_DISAGG_CONFIG";
	struct json_ctx *j = ctx;
	const char *v = (const char *)e->data.scalar.value;
	for (size_t i = 0; i < sizeof(json_key) / sizeof(json_key[0]); i++) {
		enum kvp_config_id id = json_key[i].id;
		if (strcmp(json_key[i].key, key) != 0)
			continue;
		int plain = e->data.scalar.style == YAML_PLAIN_SCALAR_STYLE;
		int word = kvp_cfg_row[id].type == KVP_CFG_WORD;
		if (is_null(e) && may_be_null(&kvp_cfg_row[id]))
			return;
		if (plain == word) {
			kvp_cfg_error(j->err, "%s: member %s has the wrong type", name, key);
			return;
		}
		/* Single variables win, but the object must be right all the same. */
		char who[96];
		snprintf(who, sizeof(who), "%s.%s", name, key);
		enum kvp_config_source from = (enum kvp_config_source)j->c->source[id];
		struct kvp_cfg_raw raw = {
			who, v, (enum kvp_config_source)j->c->source[KVP_CFG_conditional_disagg_config]};
		struct kvp_config keep = *j->c;
		if (kvp_cfg_set(j->c, id, &raw, j->err) == KVP_OK && from != KVP_FROM_DEFAULT)
			*j->c = keep;
		return;
	}
	kvp_cfg_error(j->err, "%s: unknown member %.60s; legal: " JSON_KEYS, name, key);
}

void kvp_cfg_json_form(struct kvp_config *c, struct kvp_config_err *err)
{
	const char *text = c->conditional_disagg_config;
	struct json_ctx ctx = {c, err};
	struct flat f = {.ctx = &ctx, .put = json_pair, .error = ""};
	yaml_parser_t p;
	if (!text[0])
		return;
	int rc = KVP_ERR_PROTO;
	if (text[0] == '{' && yaml_parser_initialize(&p)) {
		yaml_parser_set_input_string(&p, (const unsigned char *)text, strlen(text));
		rc = flat_document(&p, &f);
		yaml_parser_delete(&p);
	}
	if (rc)
		kvp_cfg_error(err,
			"DYN_ROUTER_CONDITIONAL_DISAGG_CONFIG: %s; legal: a JSON object with " JSON_KEYS,
			f.error[0] ? f.error : "not a JSON object");
}
