/* daemons/common/config_priv.h — what the parts of the configuration share; included by config_*.c only. */
#ifndef KVP_COMMON_CONFIG_PRIV_H
#define KVP_COMMON_CONFIG_PRIV_H

#include "daemons/common/config.h"

#define KVP_CFG_VALUE_MAX 8192 /* longest text of a value */

enum kvp_cfg_type { KVP_CFG_BOOL, KVP_CFG_INT, KVP_CFG_FLT, KVP_CFG_STR, KVP_CFG_WORD };
enum kvp_cfg_check {
	CHECK_NONE,
	CHECK_INSTANCE,
	CHECK_IP,
	CHECK_FILE,
	CHECK_TOKEN_FILE,
	CHECK_URL,
	CHECK_SERVICE_URL,
	CHECK_HEADER,
	CHECK_PATH,
	CHECK_LABEL,
	CHECK_LIST_FIRST,
	CHECK_LABEL_LIST = CHECK_LIST_FIRST,
	CHECK_LISTEN_LIST,
	CHECK_ZMQ_LIST,
	CHECK_HTTP_LIST,
	CHECK_ALLOW_LIST,
	CHECK_PATH_LIST
};
enum kvp_cfg_attr {
	KVP_CFG_ATTR_SECRET = 1,      /* shown only as "set" */
	KVP_CFG_ATTR_NONE_WORD = 2,   /* the text None means unset */
	KVP_CFG_ATTR_JSON_FORM = 4,   /* may also come from DYN_ROUTER_CONDITIONAL_DISAGG_CONFIG */
	KVP_CFG_ATTR_REFUSE_TRUE = 8, /* a published switch that we don't have */
	KVP_CFG_ATTR_EXACT = 16,      /* not trimmed */
	KVP_CFG_ATTR_MULTIPLE_64 = 32
};
enum kvp_cfg_alias_kind {
	KVP_CFG_ALIAS_ELSE,    /* read where the main name is not set */
	KVP_CFG_ALIAS_CONFLICT /* the same setting; both set and different is an error */
};

struct kvp_cfg_row {
	const char *name, *flag, *words, *help, *sdef;
	uint64_t udef, umin, umax;
	double fdef, fmin, fmax;
	size_t off, cap; /* field in struct kvp_config; bytes of a string field */
	int32_t wdef;
	uint32_t readers;
	enum kvp_cfg_type type;
	enum kvp_cfg_check check;
	uint32_t attrs;
};
struct kvp_cfg_alias {
	const char *name;
	enum kvp_config_id id;
	enum kvp_cfg_alias_kind kind;
};
struct kvp_cfg_old {
	const char *name, *now; /* now NULL: published, without effect here */
};

extern const struct kvp_cfg_row kvp_cfg_row[KVP_CFG_CNT];
extern const struct kvp_cfg_alias kvp_cfg_alias[];
extern const struct kvp_cfg_old kvp_cfg_old[];
/* The table in reading order: headings (title set) and settings (title NULL). */
extern const struct kvp_cfg_item {
	const char *title;
	int id;
} kvp_cfg_item[];
extern const int kvp_cfg_alias_cnt, kvp_cfg_old_cnt, kvp_cfg_item_cnt;

/* One value as it stands somewhere: who = how the user calls it ("--port" or "KVPICK_PORT"). */
struct kvp_cfg_raw {
	const char *who;
	const char *text;
	enum kvp_config_source from;
};

/* kvp_cfg_error adds one line to err, in printable ASCII whatever the arguments hold. */
__attribute__((format(printf, 2, 3))) void kvp_cfg_error(struct kvp_config_err *err, const char *fmt, ...);

/* kvp_cfg_bad adds the error of one value: who, value, where from, what is wrong, legal range. */
void kvp_cfg_bad(struct kvp_config_err *err, const struct kvp_cfg_row *r, const struct kvp_cfg_raw *raw,
	const char *what);

/* kvp_cfg_trim copies text without blanks at both ends; KVP_ERR_LIMIT if it does not fit. */
int kvp_cfg_trim(const char *text, char *out, size_t cap);

/* kvp_cfg_set parses a value into the field of a setting. KVP_OK; KVP_ERR_NOTFOUND: blank, the field is left
 * alone; KVP_ERR_INVAL: err has a line. */
int kvp_cfg_set(struct kvp_config *c, enum kvp_config_id id, const struct kvp_cfg_raw *raw,
	struct kvp_config_err *err);
void kvp_cfg_default(struct kvp_config *c, enum kvp_config_id id);

/* kvp_cfg_range describes the legal values of a setting, kvp_cfg_default_text its default. */
const char *kvp_cfg_range(const struct kvp_cfg_row *r, char *buf, size_t cap);
const char *kvp_cfg_default_text(const struct kvp_cfg_row *r, char *buf, size_t cap);

/* kvp_cfg_auto_flag writes the flag that a KVPICK_X_Y has by itself (x-y); "" for other names. */
const char *kvp_cfg_auto_flag(const struct kvp_cfg_row *r, char *buf, size_t cap);

/* kvp_cfg_check checks the grammar of a string value. NULL if it is fine, else what is wrong. */
const char *kvp_cfg_check(enum kvp_cfg_check check, const char *v);
int kvp_cfg_label_ok(const char *v);

/* kvp_cfg_distance is the edit distance of two names (of at most 96 bytes each; longer ones are cut). */
unsigned kvp_cfg_distance(const char *a, const char *b);

/* kvp_cfg_seal stores the marks by which kvp_config_from_fd knows the structure. */
void kvp_cfg_seal(struct kvp_config *c);

/* kvp_cfg_derive fills c->eff; kvp_cfg_cross checks settings against each other. */
void kvp_cfg_derive(struct kvp_config *c);
void kvp_cfg_cross(const struct kvp_config *c, struct kvp_config_err *err);

/* kvp_cfg_yaml reads the configuration file: put is called for each key; kvp_cfg_json_form the JSON object of
 * conditional disaggregation, for settings that have no value of their own. */
struct kvp_cfg_load;

int kvp_cfg_yaml(const char *path, struct kvp_config_err *err,
	void (*put)(struct kvp_cfg_load *l, const char *key, const char *value), struct kvp_cfg_load *l);
void kvp_cfg_json_form(struct kvp_config *c, struct kvp_config_err *err);
#endif
