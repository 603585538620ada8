#include "daemons/common/config_priv.h"

#include <kvpick/err.h>

#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

/* Names of one source layer: the settings first, then the aliases. */
#define NAME_CNT (KVP_CFG_CNT + 16)
#define FLAG_MAX 64

/* The values of all layers as text, before any of them is parsed: a value that a stronger layer hides must
 * still be legal, because it would come into force the moment the stronger one goes away. */
struct kvp_cfg_load {
	enum kvp_binary binary;
	struct kvp_config *c;
	struct kvp_config_err *err;
	struct kvp_config_rest *rest;
	const char *const *envp;
	const char *raw[KVP_FROM_FLAG + 1][NAME_CNT]; /* [source][name] */
	char flag_who[KVP_CFG_CNT][FLAG_MAX];         /* the flag as written, dashes included */
	char *file_text[NAME_CNT];                    /* owned copies of the file's values */
};

static const char *name_of(int n)
{
	return n < KVP_CFG_CNT ? kvp_cfg_row[n].name : kvp_cfg_alias[n - KVP_CFG_CNT].name;
}

static int find_name(const char *name, size_t len)
{
	for (int n = 0; n < KVP_CFG_CNT + kvp_cfg_alias_cnt; n++)
		if (strlen(name_of(n)) == len && memcmp(name_of(n), name, len) == 0)
			return n;
	return -1;
}

static const struct kvp_cfg_old *find_old(const char *name)
{
	for (int i = 0; i < kvp_cfg_old_cnt; i++)
		if (strcmp(kvp_cfg_old[i].name, name) == 0)
			return &kvp_cfg_old[i];
	return NULL;
}

static const char *nearest_name(const char *name)
{
	unsigned best = ~0u;
	const char *near = "";
	for (int n = 0; n < KVP_CFG_CNT + kvp_cfg_alias_cnt; n++) {
		unsigned d = kvp_cfg_distance(name, name_of(n));
		if (d < best) {
			best = d;
			near = name_of(n);
		}
	}
	return near;
}

/* word: what `now` is; now NULL: there is nothing to say but the name. */
static void notice(struct kvp_config *c, const char *name, const char *word, const char *now)
{
	size_t len = strlen(c->ignored);
	char one[256];
	int n = snprintf(one, sizeof(one), "%s%.100s%s%s%s%s", len ? " " : "", name, now ? "(" : "",
		now ? word : "", now ? now : "", now ? ")" : "");
	if (n > 0 && len + (size_t)n < sizeof(c->ignored))
		memcpy(c->ignored + len, one, (size_t)n + 1);
}

/* -- environment -- */

static void env_one(struct kvp_cfg_load *l, const char *entry, const char *eq)
{
	char name[128];
	size_t len = (size_t)(eq - entry);
	int ours = strncmp(entry, "KVPICK_", 7) == 0, published = strncmp(entry, "DYN_", 4) == 0;
	int n = find_name(entry, len);
	if (n >= 0) {
		l->raw[KVP_FROM_ENV][n] = eq + 1;
		return;
	}
	if (!ours && !published)
		return;
	snprintf(name, sizeof(name), "%.*s", (int)len, entry);
	const struct kvp_cfg_old *old = find_old(name);
	if (ours)
		kvp_cfg_error(l->err, "%s (environment): unknown variable; the nearest known one is %s", name,
			nearest_name(name));
	else
		notice(l->c, name, "now:", old ? old->now : NULL);
}

static const char *env_get(const char *const *envp, const char *name)
{
	size_t len = strlen(name);
	for (; envp && *envp; envp++)
		if (strncmp(*envp, name, len) == 0 && (*envp)[len] == '=')
			return *envp + len + 1;
	return NULL;
}

/* A bare level in RUST_LOG is the default of the log level; any other filter means nothing here. */
static void rust_log(struct kvp_cfg_load *l)
{
	static const char *const level[] = {"trace", "debug", "info", "warn", "error", "off"};
	static const int32_t word[] = {0, 0, 1, 3, 4, 4};
	const char *v = env_get(l->envp, "RUST_LOG");
	char t[16];
	if (!v || kvp_cfg_trim(v, t, sizeof(t)) != KVP_OK)
		return;
	for (int i = 0; i < 6; i++)
		if (strcasecmp(t, level[i]) == 0)
			l->c->log_level = word[i];
}

/* -- command line -- */

static int flag_matches(const struct kvp_cfg_row *r, const char *name, size_t len)
{
	char own[FLAG_MAX];
	kvp_cfg_auto_flag(r, own, sizeof(own));
	return (strlen(own) == len && memcmp(own, name, len) == 0) ||
	       (r->flag && strlen(r->flag) == len && memcmp(r->flag, name, len) == 0);
}

static int find_flag(const struct kvp_cfg_load *l, const char *name, size_t len)
{
	for (int n = 0; n < KVP_CFG_CNT && len; n++)
		if ((kvp_cfg_row[n].readers & l->binary) && flag_matches(&kvp_cfg_row[n], name, len))
			return n;
	return -1;
}

static void nearest_flag(const struct kvp_cfg_load *l, const char *name, char *buf, size_t cap)
{
	unsigned best = ~0u;
	buf[0] = 0;
	for (int n = 0; n < KVP_CFG_CNT; n++) {
		char own[FLAG_MAX];
		if (!(kvp_cfg_row[n].readers & l->binary))
			continue;
		kvp_cfg_auto_flag(&kvp_cfg_row[n], own, sizeof(own));
		const char *cand[2] = {own, kvp_cfg_row[n].flag};
		for (int i = 0; i < 2; i++) {
			if (!cand[i] || !cand[i][0] || kvp_cfg_distance(name, cand[i]) >= best)
				continue;
			best = kvp_cfg_distance(name, cand[i]);
			snprintf(buf, cap, "%s", cand[i]);
		}
	}
}

static int is_bool_word(const char *v)
{
	static const char *const word[] = {"1", "true", "on", "yes", "0", "false", "off", "no"};
	for (int i = 0; v && i < 8; i++)
		if (strcasecmp(v, word[i]) == 0)
			return 1;
	return 0;
}

static void unknown_flag(struct kvp_cfg_load *l, const char *arg)
{
	char near[FLAG_MAX];
	if (l->binary == KVP_BIN_CTL && l->rest && l->rest->cnt < 64) {
		l->rest->arg[l->rest->cnt++] = arg;
		return;
	}
	nearest_flag(l, arg + strspn(arg, "-"), near, sizeof(near));
	kvp_cfg_error(l->err, "%.100s: unknown flag; the nearest known one is --%s", arg, near);
}

static void set_flag(struct kvp_cfg_load *l, int n, const char *arg, size_t name_len, const char *value)
{
	/* --x and --no-x together contradict each other; otherwise the last one counts. */
	int no = strncmp(arg, "--no-", 5) == 0;
	if (l->raw[KVP_FROM_FLAG][n] && kvp_cfg_row[n].type == KVP_CFG_BOOL &&
		(strncmp(l->flag_who[n], "--no-", 5) == 0) != no)
		kvp_cfg_error(l->err, "%.*s: can't be given together with %s", (int)name_len + 2, arg,
			l->flag_who[n]);
	l->raw[KVP_FROM_FLAG][n] = value;
	snprintf(l->flag_who[n], FLAG_MAX, "%.*s", (int)name_len + 2, arg);
}

/* Handles the flag at argv[i]; returns how many arguments it took. */
static int one_flag(struct kvp_cfg_load *l, int argc, const char *const *argv, int i)
{
	const char *arg = argv[i], *name = arg + 2;
	size_t len = strcspn(name, "=");
	const char *value = name[len] ? name + len + 1 : NULL;
	const char *next = i + 1 < argc ? argv[i + 1] : NULL;
	int n = find_flag(l, name, len);
	if (n < 0 && !value && len > 3 && strncmp(name, "no-", 3) == 0) {
		n = find_flag(l, name + 3, len - 3);
		if (n >= 0 && kvp_cfg_row[n].type == KVP_CFG_BOOL) {
			set_flag(l, n, arg, len, "false");
			return 1;
		}
		n = -1;
	}
	if (n < 0) {
		unknown_flag(l, arg);
		/* The word behind it is most likely its value, not a fault of its own. */
		return l->binary != KVP_BIN_CTL && !value && next && next[0] != '-' ? 2 : 1;
	}
	if (value) {
		set_flag(l, n, arg, len, value);
		return 1;
	}
	if (kvp_cfg_row[n].type == KVP_CFG_BOOL) {
		int takes = is_bool_word(next);
		set_flag(l, n, arg, len, takes ? next : "true");
		return 1 + takes;
	}
	if (!next) {
		kvp_cfg_error(l->err, "%s: needs a value", arg);
		return 1;
	}
	set_flag(l, n, arg, len, next);
	return 2;
}

static void read_flags(struct kvp_cfg_load *l, int argc, const char *const *argv)
{
	for (int i = 0; i < argc;) {
		if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0)
			l->c->act = KVP_ACT_HELP;
		else if (strcmp(argv[i], "--version") == 0)
			l->c->act = KVP_ACT_VERSION;
		else if (strcmp(argv[i], "--check-config") == 0 && l->binary != KVP_BIN_CTL)
			l->c->act = KVP_ACT_CHECK;
		else if (strncmp(argv[i], "--", 2) == 0 && argv[i][2]) {
			i += one_flag(l, argc, argv, i);
			continue;
		} else if (argv[i][0] == '-' && l->binary != KVP_BIN_CTL)
			unknown_flag(l, argv[i]);
		else if (l->rest && l->rest->cnt < 64)
			l->rest->arg[l->rest->cnt++] = argv[i];
		else
			kvp_cfg_error(l->err, "%.100s: unexpected argument", argv[i]);
		i++;
	}
}

/* -- file -- */

static void file_put(struct kvp_cfg_load *l, const char *key, const char *value)
{
	int n = find_name(key, strlen(key));
	if (n < 0) {
		const struct kvp_cfg_old *old = find_old(key);
		if (old)
			notice(l->c, key, "now:", old->now);
		else
			kvp_cfg_error(l->err, "%.100s (file): unknown key; the nearest known one is %s", key,
				nearest_name(key));
		return;
	}
	if (l->file_text[n]) {
		kvp_cfg_error(l->err, "%s (file): given twice", key);
		return;
	}
	l->file_text[n] = strdup(value);
	l->raw[KVP_FROM_FILE][n] = l->file_text[n];
	if (!l->file_text[n])
		kvp_cfg_error(l->err, "%s (file): no memory", key);
}

static void read_file(struct kvp_cfg_load *l)
{
	const int id = KVP_CFG_config_file;
	for (int from = KVP_FROM_FLAG; from >= KVP_FROM_ENV; from--) {
		char path[1024];
		const char *v = l->raw[from][id];
		if (!v || kvp_cfg_trim(v, path, sizeof(path)) != KVP_OK || !path[0])
			continue;
		kvp_cfg_yaml(path, l->err, file_put, l);
		/* The file can't name another file. */
		if (l->raw[KVP_FROM_FILE][id])
			kvp_cfg_error(l->err, "KVPICK_CONFIG (file): can't be set in the file itself");
		return;
	}
}

/* -- all layers together -- */

/* Parses one value; on a blank one the weaker layers count. Returns 1 if it set the field. */
static int take(struct kvp_cfg_load *l, enum kvp_config_id id, int n, enum kvp_config_source from)
{
	if (!l->raw[from][n])
		return 0;
	struct kvp_cfg_raw raw = {name_of(n), l->raw[from][n], from};
	if (from == KVP_FROM_FLAG)
		raw.who = l->flag_who[n];
	return kvp_cfg_set(l->c, id, &raw, l->err) == KVP_OK;
}

/* Text of the strongest layer in which a name is set and not blank. */
static const char *strongest(const struct kvp_cfg_load *l, int n, char *buf, size_t cap)
{
	for (int from = KVP_FROM_FLAG; from > KVP_FROM_DEFAULT; from--)
		if (l->raw[from][n] && kvp_cfg_trim(l->raw[from][n], buf, cap) == KVP_OK && buf[0])
			return buf;
	return NULL;
}

static void conflict(struct kvp_cfg_load *l, int a)
{
	char one[KVP_CFG_VALUE_MAX], two[KVP_CFG_VALUE_MAX];
	const struct kvp_cfg_alias *al = &kvp_cfg_alias[a];
	const char *x = strongest(l, (int)al->id, one, sizeof(one));
	const char *y = strongest(l, KVP_CFG_CNT + a, two, sizeof(two));
	if (al->kind == KVP_CFG_ALIAS_CONFLICT && x && y && strcmp(x, y) != 0)
		kvp_cfg_error(l->err,
			"%s=\"%.100s\" and %s=\"%.100s\" are two names of one setting and differ",
			kvp_cfg_row[al->id].name, x, al->name, y);
}

/* Weakest layer first, within a layer the alias first: what is set last stays, and everything is checked. */
static void settle(struct kvp_cfg_load *l, enum kvp_config_id id)
{
	for (int from = KVP_FROM_FILE; from <= KVP_FROM_FLAG; from++) {
		for (int a = 0; a < kvp_cfg_alias_cnt; a++)
			if (kvp_cfg_alias[a].id == id)
				take(l, id, KVP_CFG_CNT + a, (enum kvp_config_source)from);
		take(l, id, (int)id, (enum kvp_config_source)from);
	}
}

/* Names of llm-d's sidecar that have no effect with the other settings. */
static void sidecar_names(struct kvp_cfg_load *l)
{
	static const char *const pool[] = {
		"INFERENCE_POOL", "INFERENCE_POOL_NAMESPACE", "INFERENCE_POOL_NAME"};
	const struct kvp_config *c = l->c;
	for (int i = 0; i < 3; i++)
		if (env_get(l->envp, pool[i]))
			notice(l->c, pool[i], "now:", "KVPICK_SIDECAR_PREFILL_ALLOWLIST");
	if (c->enable_prefiller_sampling && !c->sidecar_profile)
		notice(l->c, "ENABLE_PREFILLER_SAMPLING", "with:", "KVPICK_SIDECAR_PROFILE=llmd");
	if (c->sglang_bootstrap_port == KVP_CONFIG_UNSET)
		return;
	if (!c->sidecar_profile)
		notice(l->c, "SGLANG_BOOTSTRAP_PORT", "with:", "KVPICK_SIDECAR_PROFILE=llmd");
	else if (c->eff.sidecar_adapter != KVP_PD_SGLANG)
		notice(l->c, "SGLANG_BOOTSTRAP_PORT", "with:", "DYN_SIDECAR_PD_ADAPTER=sglang");
}

static int load(struct kvp_cfg_load *l, int argc, const char *const *argv)
{
	struct kvp_config *c = l->c;
	read_flags(l, argc, argv);
	if (c->act == KVP_ACT_HELP || c->act == KVP_ACT_VERSION)
		return KVP_OK;
	for (const char *const *e = l->envp; e && *e; e++) {
		const char *eq = strchr(*e, '=');
		if (eq)
			env_one(l, *e, eq);
	}
	read_file(l);
	rust_log(l);
	for (int n = 0; n < KVP_CFG_CNT; n++)
		if (kvp_cfg_row[n].readers & l->binary)
			settle(l, (enum kvp_config_id)n);
	for (int a = 0; a < kvp_cfg_alias_cnt; a++)
		if (kvp_cfg_row[kvp_cfg_alias[a].id].readers & l->binary)
			conflict(l, a);
	kvp_cfg_json_form(c, l->err);
	if (!c->run_dir[0])
		kvp_config_run_dir("/run", env_get(l->envp, "XDG_RUNTIME_DIR"), geteuid(), c->run_dir,
			sizeof(c->run_dir));
	kvp_cfg_derive(c);
	if (l->binary == KVP_BIN_SIDECAR)
		sidecar_names(l);
	/* Rules across settings make sense only once each of them is legal. */
	if (!l->err->cnt)
		kvp_cfg_cross(c, l->err);
	return l->err->cnt ? KVP_ERR_INVAL : KVP_OK;
}

int kvp_config_load(enum kvp_binary binary, int argc, const char *const *argv, const char *const *envp,
	struct kvp_config *out, struct kvp_config_rest *rest, struct kvp_config_err *err)
{
	_Static_assert(NAME_CNT >= KVP_CFG_CNT + 5, "a place for each alias");
	err->len = 0;
	err->cnt = 0;
	err->text[0] = 0;
	struct kvp_cfg_load *l = calloc(1, sizeof(*l));
	if (!l)
		return KVP_ERR_SYS;
	memset(out, 0, sizeof(*out));
	if (rest)
		rest->cnt = 0;
	l->binary = binary;
	l->c = out;
	l->err = err;
	l->rest = rest;
	l->envp = envp;
	out->binary = (uint32_t)binary;
	for (int n = 0; n < KVP_CFG_CNT; n++)
		kvp_cfg_default(out, (enum kvp_config_id)n);
	int rc = load(l, argc, argv);
	kvp_cfg_seal(out);
	for (int n = 0; n < NAME_CNT; n++)
		free(l->file_text[n]);
	free(l);
	return rc;
}
