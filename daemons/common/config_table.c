#include "daemons/common/config_priv.h"
#include "daemons/common/log.h"

#include <kvpick/err.h>

#include <ctype.h>
#include <errno.h>
#include <float.h>
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#define S KVP_BIN_SUPERVISOR
#define I KVP_BIN_INDEXER
#define X KVP_BIN_EXTPROC
#define H KVP_BIN_HTTPD
#define P KVP_BIN_PEER
#define K KVP_BIN_DISCOVERY
#define C KVP_BIN_SIDECAR
#define T KVP_BIN_CTL
#define SECRET KVP_CFG_ATTR_SECRET
#define NONE_WORD KVP_CFG_ATTR_NONE_WORD
#define JSON_FORM KVP_CFG_ATTR_JSON_FORM
#define REFUSE_TRUE KVP_CFG_ATTR_REFUSE_TRUE
#define EXACT KVP_CFG_ATTR_EXACT
#define MULTIPLE_64 KVP_CFG_ATTR_MULTIPLE_64

const struct kvp_cfg_row kvp_cfg_row[KVP_CFG_CNT] = {
#define COMMON(f, n, fl, rd, at, h)                                                                          \
	.name = n, .flag = fl, .readers = rd, .attrs = at, .help = h, .off = offsetof(struct kvp_config, f)
#define GROUP(title)
#define BOOL(f, n, fl, def, rd, at, h) {COMMON(f, n, fl, rd, at, h), .type = KVP_CFG_BOOL, .udef = def},
#define INT(f, n, fl, def, lo, hi, rd, at, h)                                                                \
	{COMMON(f, n, fl, rd, at, h), .type = KVP_CFG_INT, .udef = def, .umin = lo, .umax = hi},
#define FLT(f, n, fl, def, lo, hi, rd, at, h)                                                                \
	{COMMON(f, n, fl, rd, at, h), .type = KVP_CFG_FLT, .fdef = def, .fmin = lo, .fmax = hi},
#define STR(f, n, fl, bytes, def, chk, rd, at, h)                                                            \
	{COMMON(f, n, fl, rd, at, h), .type = KVP_CFG_STR, .cap = bytes, .sdef = def, .check = chk},
#define WORD(f, n, fl, w, def, rd, at, h)                                                                    \
	{COMMON(f, n, fl, rd, at, h), .type = KVP_CFG_WORD, .words = w, .wdef = def},
#include "daemons/common/config_settings.def"
#undef COMMON
};

const struct kvp_cfg_item kvp_cfg_item[] = {
#define GROUP(title) {title, -1},
#define BOOL(f, ...) {NULL, KVP_CFG_##f},
#define INT(f, ...) {NULL, KVP_CFG_##f},
#define FLT(f, ...) {NULL, KVP_CFG_##f},
#define STR(f, ...) {NULL, KVP_CFG_##f},
#define WORD(f, ...) {NULL, KVP_CFG_##f},
#include "daemons/common/config_settings.def"
};

const struct kvp_cfg_alias kvp_cfg_alias[] = {
	{"DYN_USE_KV_EVENTS", KVP_CFG_use_kv_events, KVP_CFG_ALIAS_ELSE},
	{"DYN_OVERLAP_SCORE_WEIGHT", KVP_CFG_overlap_score_weight, KVP_CFG_ALIAS_ELSE},
	{"DYN_ROUTER_EVENT_THREADS", KVP_CFG_threads, KVP_CFG_ALIAS_ELSE},
	{"DYN_EPP_SESSION_AFFINITY_MODE", KVP_CFG_session_affinity_mode, KVP_CFG_ALIAS_CONFLICT},
	{"DYN_EPP_ROLE_LABEL", KVP_CFG_worker_role_label, KVP_CFG_ALIAS_CONFLICT},
};

const struct kvp_cfg_old kvp_cfg_old[] = {
	{"DYN_ROUTER_REPLICA_SYNC", NULL},
	{"DYN_NAMESPACE", NULL},
	{"DYN_NAMESPACE_PREFIX", NULL},
	{"DYN_COMPONENT_NAME", NULL},
	{"DYN_ACTIVE_DECODE_BLOCKS_THRESHOLD", NULL},
	{"DYN_ACTIVE_PREFILL_TOKENS_THRESHOLD", NULL},
	{"DYN_ACTIVE_PREFILL_TOKENS_THRESHOLD_FRAC", NULL},
	{"DYN_TOPOLOGY_ENABLED", NULL},
	{"DYN_TOPOLOGY_MOUNT_PATH", NULL},
	{"DYN_KV_TRANSFER_DOMAIN", "KVPICK_EPP_KV_TRANSFER_DOMAIN_LABEL"},
	{"DYN_KV_TRANSFER_ENFORCEMENT", "KVPICK_EPP_KV_TRANSFER_ENFORCEMENT"},
	{"DYN_KV_TRANSFER_PREFERRED_WEIGHT", NULL},
	{"DYN_LOGGING_CONSOLE_FORMAT", "DYN_LOGGING_JSONL"},
	{"DYN_KV_INDEXER_TEST_ENDPOINTS", NULL},
	{"DYN_EPP_SELECTOR_MODE", "KVPICK_MODE"},
	{"DYN_EPP_POOL_NAMESPACE", "POD_NAMESPACE"},
	{"DYN_EPP_TOKENIZE_URL", "DYN_EPP_TOKENIZER_SERVICE_URL"},
	{"DYN_EPP_VLLM_RENDER_URL", "DYN_EPP_TOKENIZER_SERVICE_URL"},
	{"DYN_EPP_POD_SELECTOR", "DYN_EPP_INFERENCE_POOL_NAME"},
	{"DYN_EPP_TARGET_PORT", "DYN_EPP_INFERENCE_POOL_NAME"},
	{"DYN_EPP_EMIT_PREFILLER_HOST_PORT", "DYN_EPP_TOPOLOGY_MODE"},
	{"DYN_EPP_EXTERNAL", "DYN_EPP_MODE"},
	{"DYN_EPP_PREFIX_MODE", "DYN_ROUTER_USE_KV_EVENTS"},
	{"DYN_EPP_PREDICT_ON_ROUTE", "DYN_ROUTER_PREDICTED_TTL_SECS"},
	{"DYN_EPP_KV_EVENTS", "DYN_ROUTER_USE_KV_EVENTS"},
	{"DYN_PD_LISTEN_ADDR", "DYN_SIDECAR_PORT"},
	{"DYN_PD_DECODE_URL", "DYN_DECODE_ENGINE_PORT"},
};

#define CNT(a) ((int)(sizeof(a) / sizeof((a)[0])))
#define SHOWN_MAX 196 /* bytes of a value in a message */
const int kvp_cfg_alias_cnt = CNT(kvp_cfg_alias), kvp_cfg_old_cnt = CNT(kvp_cfg_old),
	  kvp_cfg_item_cnt = CNT(kvp_cfg_item);

void kvp_cfg_error(struct kvp_config_err *err, const char *fmt, ...)
{
	char line[2048];
	size_t room = sizeof(err->text) - err->len;
	va_list ap;
	err->cnt++;
	if (room < 2)
		return;
	va_start(ap, fmt);
	vsnprintf(line, sizeof(line), fmt, ap);
	va_end(ap);
	/* Values, names and paths may hold anything. */
	err->len += kvp_log_printable(line, err->text + err->len, room - 1);
	err->text[err->len++] = '\n';
	err->text[err->len] = 0;
}

static const char *from_text(enum kvp_config_source from)
{
	static const char *const text[] = {"default", "file", "environment", "command line"};
	return text[from];
}

void kvp_cfg_bad(struct kvp_config_err *err, const struct kvp_cfg_row *r, const struct kvp_cfg_raw *raw,
	const char *what)
{
	char range[512];
	int flag = raw->from == KVP_FROM_FLAG, is_long = strlen(raw->text) > SHOWN_MAX;
	kvp_cfg_error(err, "%s=\"%.*s%s\" (%s%s%s): %s; legal: %s", raw->who, SHOWN_MAX, raw->text,
		is_long ? "..." : "", from_text(raw->from), flag ? ", " : "", flag ? r->name : "", what,
		kvp_cfg_range(r, range, sizeof(range)));
}

int kvp_cfg_trim(const char *text, char *out, size_t cap)
{
	static const char blank[] = " \t\r\n\v\f";
	text += strspn(text, blank);
	size_t n = strlen(text);
	while (n && strchr(blank, text[n - 1]))
		n--;
	if (n >= cap)
		return KVP_ERR_LIMIT;
	memcpy(out, text, n);
	out[n] = 0;
	return KVP_OK;
}

/* Word w of an a|b|!c list; returns its number of bytes, 0 at the end. A refused word keeps its mark. */
static size_t word_at(const char *words, int w, const char **at)
{
	for (; w > 0; w--) {
		words = strchr(words, '|');
		if (!words)
			return 0;
		words++;
	}
	*at = words;
	return strcspn(words, "|");
}

static void word_text(const char *words, int w, char *buf, size_t cap)
{
	const char *at = "";
	size_t n = word_at(words, w, &at);
	snprintf(buf, cap, "%.*s", (int)n, at);
}

static const char *set_bool(uint8_t *field, const struct kvp_cfg_row *r, const char *v)
{
	static const char *const yes[] = {"1", "true", "on", "yes"}, *const no[] = {
									     "0", "false", "off", "no"};
	for (int i = 0; i < 4; i++) {
		if (strcasecmp(v, yes[i]) == 0) {
			if (r->attrs & KVP_CFG_ATTR_REFUSE_TRUE)
				return "published, but not supported by kvpick";
			*field = 1;
			return NULL;
		}
		if (strcasecmp(v, no[i]) == 0) {
			*field = 0;
			return NULL;
		}
	}
	return "not a boolean";
}

static const char *set_int(uint64_t *field, const struct kvp_cfg_row *r, const char *v)
{
	uint64_t x = 0;
	if (v[0] == '-' && v[1 + strspn(v + 1, "0123456789")] == 0 && v[1])
		return "out of range";
	for (const char *p = v; *p; p++) {
		if (*p < '0' || *p > '9')
			return "not a decimal integer";
		if (__builtin_mul_overflow(x, 10, &x) || __builtin_add_overflow(x, (uint64_t)(*p - '0'), &x))
			return "out of range";
	}
	if (x < r->umin || x > r->umax)
		return "out of range";
	if ((r->attrs & KVP_CFG_ATTR_MULTIPLE_64) && x % 64)
		return "not a multiple of 64";
	*field = x;
	return NULL;
}

static const char *set_flt(double *field, const struct kvp_cfg_row *r, const char *v)
{
	char *end;
	/* strtod also knows hexadecimal, "inf" and "nan". */
	if (v[strspn(v, "0123456789.eE+-")] != 0)
		return "not a finite number";
	double x = strtod(v, &end);
	if (*end || end == v)
		return "not a number";
	if (!isfinite(x) || x < r->fmin || x > r->fmax)
		return "out of range";
	*field = x;
	return NULL;
}

static const char *set_word(int32_t *field, const struct kvp_cfg_row *r, const char *v)
{
	const char *w;
	size_t n, len = strlen(v);
	for (int i = 0; (n = word_at(r->words, i, &w)) != 0; i++) {
		if (w[0] == '!' && n - 1 == len && memcmp(w + 1, v, len) == 0)
			return "published, but not supported by kvpick";
		if (n == len && memcmp(w, v, len) == 0) {
			*field = i;
			return NULL;
		}
	}
	return "not a known word";
}

/* A list is kept in one form: members without blanks, one comma between them. */
static const char *normalise_list(const char *v, char *out, size_t cap)
{
	size_t len = 0;
	while (*v) {
		size_t n = strcspn(v, ",");
		char member[KVP_CFG_VALUE_MAX], trimmed[KVP_CFG_VALUE_MAX];
		snprintf(member, sizeof(member), "%.*s", (int)n, v);
		if (kvp_cfg_trim(member, trimmed, sizeof(trimmed)) == KVP_OK && trimmed[0]) {
			int w = snprintf(out + len, cap - len, "%s%s", len ? "," : "", trimmed);
			if ((size_t)w >= cap - len)
				return "too long";
			len += (size_t)w;
		}
		v += n + (v[n] == ',');
	}
	out[len] = 0;
	return NULL;
}

/* Empty is not the same as unset: the sidecar's published names are checked so, and an empty list of those
 * that are allowed must not allow everybody. */
static int is_never_empty(const struct kvp_cfg_row *r)
{
	return strncmp(r->name, "DYN_SIDECAR_", 12) == 0 || r->check == CHECK_ALLOW_LIST;
}

static const char *set_str(char *field, const struct kvp_cfg_row *r, const char *v)
{
	char text[KVP_CFG_VALUE_MAX];
	const char *bad = NULL;
	if (r->check >= CHECK_LIST_FIRST)
		bad = normalise_list(v, text, sizeof(text));
	else
		snprintf(text, sizeof(text), "%s", v);
	if (!bad && strlen(text) >= r->cap)
		bad = "too long";
	if (!bad && !text[0] && (is_never_empty(r) || r->check >= CHECK_LIST_FIRST))
		bad = "set, but without a member";
	if (!bad)
		bad = kvp_cfg_check(r->check, text);
	if (bad)
		return bad;
	if (r->check == CHECK_HEADER)
		for (char *p = text; *p; p++)
			*p = (char)tolower((unsigned char)*p);
	memcpy(field, text, strlen(text) + 1);
	return NULL;
}

int kvp_cfg_set(struct kvp_config *c, enum kvp_config_id id, const struct kvp_cfg_raw *raw,
	struct kvp_config_err *err)
{
	const struct kvp_cfg_row *r = &kvp_cfg_row[id];
	char v[KVP_CFG_VALUE_MAX];
	const char *bad = NULL;
	void *field = (char *)c + r->off;
	int rc = r->attrs & KVP_CFG_ATTR_EXACT
			 ? (snprintf(v, sizeof(v), "%s", raw->text) < (int)sizeof(v) ? KVP_OK : KVP_ERR_LIMIT)
			 : kvp_cfg_trim(raw->text, v, sizeof(v));
	if (rc) {
		bad = "too long";
	} else if (!v[0] || ((r->attrs & KVP_CFG_ATTR_NONE_WORD) && strcasecmp(v, "none") == 0)) {
		if (!v[0] && is_never_empty(r))
			bad = "set but empty";
		else
			return KVP_ERR_NOTFOUND;
	} else if (r->type == KVP_CFG_BOOL) {
		bad = set_bool(field, r, v);
	} else if (r->type == KVP_CFG_INT) {
		bad = set_int(field, r, v);
	} else if (r->type == KVP_CFG_FLT) {
		bad = set_flt(field, r, v);
	} else if (r->type == KVP_CFG_WORD) {
		bad = set_word(field, r, v);
	} else {
		bad = set_str(field, r, v);
	}
	if (bad) {
		kvp_cfg_bad(err, r, raw, bad);
		return KVP_ERR_INVAL;
	}
	c->source[id] = (uint8_t)raw->from;
	return KVP_OK;
}

void kvp_cfg_default(struct kvp_config *c, enum kvp_config_id id)
{
	const struct kvp_cfg_row *r = &kvp_cfg_row[id];
	char *field = (char *)c + r->off;
	uint8_t b = (uint8_t)r->udef;
	if (r->type == KVP_CFG_BOOL)
		memcpy(field, &b, sizeof(b));
	else if (r->type == KVP_CFG_INT)
		memcpy(field, &r->udef, sizeof(r->udef));
	else if (r->type == KVP_CFG_FLT)
		memcpy(field, &r->fdef, sizeof(r->fdef));
	else if (r->type == KVP_CFG_WORD)
		memcpy(field, &r->wdef, sizeof(r->wdef));
	else
		snprintf(field, r->cap, "%s", r->sdef);
	c->source[id] = KVP_FROM_DEFAULT;
}

static const char *words_text(const char *words, char *buf, size_t cap)
{
	const char *w;
	size_t n, len = 0;
	buf[0] = 0;
	for (int i = 0; (n = word_at(words, i, &w)) != 0 && len < cap; i++)
		if (w[0] != '!')
			len += (size_t)snprintf(buf + len, cap - len, "%s%.*s", len ? ", " : "", (int)n, w);
	return buf;
}

static const char *str_range(enum kvp_cfg_check check)
{
	static const char *const text[] = {[CHECK_NONE] = "any text",
		[CHECK_INSTANCE] = "1 to 32 of A-Z a-z 0-9 _ . -",
		[CHECK_IP] = "an IP address",
		[CHECK_FILE] = "a readable file",
		[CHECK_TOKEN_FILE] = "a readable file of 1 to 4096 bytes",
		[CHECK_URL] = "an http:// or https:// address with a host",
		[CHECK_SERVICE_URL] = "an http:// address with a host, or http://unix:/path[:/base]",
		[CHECK_HEADER] = "characters of a header name",
		[CHECK_PATH] = "/ and a path without ? and #",
		[CHECK_LABEL] = "a Kubernetes label key",
		[CHECK_LABEL_LIST] = "Kubernetes label keys, comma-separated",
		[CHECK_LISTEN_LIST] = "ip:port or unix:/path, comma-separated",
		[CHECK_ZMQ_LIST] = "ZMQ endpoints (tcp://host:port), comma-separated",
		[CHECK_HTTP_LIST] = "http:// addresses, comma-separated",
		[CHECK_ALLOW_LIST] = "host, host:port or CIDR, comma-separated",
		[CHECK_PATH_LIST] = "ends of paths from a / on, comma-separated"};
	return text[check];
}

const char *kvp_cfg_range(const struct kvp_cfg_row *r, char *buf, size_t cap)
{
	if (r->type == KVP_CFG_BOOL) {
		snprintf(buf, cap, "%s", r->attrs & KVP_CFG_ATTR_REFUSE_TRUE ? "false" : "true, false");
	} else if (r->type == KVP_CFG_WORD) {
		words_text(r->words, buf, cap);
	} else if (r->type == KVP_CFG_INT) {
		const char *more = r->attrs & KVP_CFG_ATTR_MULTIPLE_64 ? ", multiple of 64" : "";
		if (r->umax >= KVP_CONFIG_UNSET - 1)
			snprintf(buf, cap, ">= %llu%s", (unsigned long long)r->umin, more);
		else
			snprintf(buf, cap, "%llu..%llu%s", (unsigned long long)r->umin,
				(unsigned long long)r->umax, more);
	} else if (r->type == KVP_CFG_FLT) {
		if (r->fmin <= -DBL_MAX)
			snprintf(buf, cap, "a finite number");
		else if (r->fmax < DBL_MAX)
			snprintf(buf, cap, "%g..%g", r->fmin, r->fmax);
		else
			snprintf(buf, cap,
				r->fmin == DBL_MIN ? "a finite number > 0" : "a finite number >= 0");
	} else {
		snprintf(buf, cap, "%s", str_range(r->check));
	}
	return buf;
}

const char *kvp_cfg_default_text(const struct kvp_cfg_row *r, char *buf, size_t cap)
{
	if (r->type == KVP_CFG_BOOL)
		snprintf(buf, cap, "%s", r->udef ? "true" : "false");
	else if (r->type == KVP_CFG_INT && r->udef != KVP_CONFIG_UNSET)
		snprintf(buf, cap, "%llu", (unsigned long long)r->udef);
	else if (r->type == KVP_CFG_FLT && kvp_config_has(r->fdef))
		snprintf(buf, cap, "%g", r->fdef);
	else if (r->type == KVP_CFG_WORD && r->wdef != KVP_CONFIG_NO_WORD)
		word_text(r->words, r->wdef, buf, cap);
	else if (r->type == KVP_CFG_STR && r->sdef[0])
		snprintf(buf, cap, "%s", r->sdef);
	else
		snprintf(buf, cap, "unset");
	return buf;
}

const char *kvp_cfg_auto_flag(const struct kvp_cfg_row *r, char *buf, size_t cap)
{
	size_t n = 0;
	if (strncmp(r->name, "KVPICK_", 7) == 0)
		for (const char *p = r->name + 7; *p && n + 1 < cap; p++)
			buf[n++] = *p == '_' ? '-' : (char)tolower((unsigned char)*p);
	buf[n] = 0;
	return buf;
}

const char *kvp_config_name(enum kvp_config_id id)
{
	return kvp_cfg_row[id].name;
}

const char *kvp_config_value(const struct kvp_config *c, enum kvp_config_id id, char *buf, size_t cap)
{
	const struct kvp_cfg_row *r = &kvp_cfg_row[id];
	const char *field = (const char *)c + r->off;
	uint64_t u;
	double d;
	int32_t i;
	snprintf(buf, cap, "unset");
	if (r->type == KVP_CFG_BOOL) {
		snprintf(buf, cap, "%s", *field ? "true" : "false");
	} else if (r->type == KVP_CFG_INT) {
		memcpy(&u, field, sizeof(u));
		if (u != KVP_CONFIG_UNSET)
			snprintf(buf, cap, "%llu", (unsigned long long)u);
	} else if (r->type == KVP_CFG_FLT) {
		memcpy(&d, field, sizeof(d));
		if (kvp_config_has(d))
			snprintf(buf, cap, "%.15g", d);
	} else if (r->type == KVP_CFG_WORD) {
		memcpy(&i, field, sizeof(i));
		if (i != KVP_CONFIG_NO_WORD)
			word_text(r->words, i, buf, cap);
	} else if (field[0]) {
		snprintf(buf, cap, "%s", r->attrs & KVP_CFG_ATTR_SECRET ? "set" : field);
	}
	return buf;
}

unsigned kvp_cfg_distance(const char *a, const char *b)
{
	enum { MAX = 96 };
	size_t n = strnlen(a, MAX), m = strnlen(b, MAX);
	unsigned row[MAX + 1];
	for (size_t j = 0; j <= m; j++)
		row[j] = (unsigned)j;
	for (size_t i = 1; i <= n; i++) {
		unsigned diag = row[0];
		row[0] = (unsigned)i;
		for (size_t j = 1; j <= m; j++) {
			unsigned change = diag + (a[i - 1] != b[j - 1]);
			unsigned best = row[j] < row[j - 1] ? row[j] + 1 : row[j - 1] + 1;
			diag = row[j];
			row[j] = change < best ? change : best;
		}
	}
	return row[m];
}
