#include "daemons/common/config_priv.h"

#include <kvpick/err.h>
#include <kvpick/version.h>

static const char *binary_name(enum kvp_binary b)
{
	switch (b) {
	case KVP_BIN_SUPERVISOR:
		return "kvpick";
	case KVP_BIN_INDEXER:
		return "kvpick-indexer";
	case KVP_BIN_EXTPROC:
		return "kvpick-extproc";
	case KVP_BIN_HTTPD:
		return "kvpick-httpd";
	case KVP_BIN_PEER:
		return "kvpick-peer";
	case KVP_BIN_DISCOVERY:
		return "kvpick-discovery";
	case KVP_BIN_SIDECAR:
		return "kvpick-sidecar";
	case KVP_BIN_CTL:
		return "kvpickctl";
	}
	return "kvpick";
}

static const char *type_name(const struct kvp_cfg_row *r)
{
	static const char *const name[] = {"bool", "int", "float", "text", "word"};
	return r->check >= CHECK_LIST_FIRST ? "list" : name[r->type];
}

/* "--port, --other" or "" */
static const char *flags_of(const struct kvp_cfg_row *r, char *buf, size_t cap)
{
	char own[64];
	kvp_cfg_auto_flag(r, own, sizeof(own));
	snprintf(buf, cap, "%s%s%s%s%s", own[0] ? "--" : "", own, own[0] && r->flag ? ", " : "",
		r->flag ? "--" : "", r->flag ? r->flag : "");
	return buf;
}

void kvp_config_print_version(FILE *f, enum kvp_binary binary)
{
	fprintf(f, "%s %s\n", binary_name(binary), KVPICK_VERSION);
}

static void help_row(FILE *f, const struct kvp_cfg_row *r)
{
	char flags[160], range[512], def[512];
	flags_of(r, flags, sizeof(flags));
	fprintf(f, "  %s%s%s\n", flags, flags[0] ? ", " : "", r->name);
	fprintf(f, "        %s\n", r->help);
	fprintf(f, "        %s: %s; default %s\n", type_name(r), kvp_cfg_range(r, range, sizeof(range)),
		kvp_cfg_default_text(r, def, sizeof(def)));
}

void kvp_config_print_help(FILE *f, enum kvp_binary binary)
{
	const char *title = NULL;
	const char *verbs = binary == KVP_BIN_SUPERVISOR ? " run|check-config|version|help"
			    : binary == KVP_BIN_CTL      ? " VERB"
							 : "";
	fprintf(f, "usage: %s%s [flags]\n\n", binary_name(binary), verbs);
	fprintf(f, "Settings, strongest first: flag, environment, file (--config), default. Flags take "
		   "--name value\n"
		   "or --name=value; a bool flag alone means true, --no-name false.\n\n"
		   "  --help        this text\n  --version     version\n");
	if (binary != KVP_BIN_CTL)
		fprintf(f, "  --check-config\n                check all settings, print them with their "
			   "sources, exit 0 or 2\n");
	for (int i = 0; i < kvp_cfg_item_cnt; i++) {
		if (kvp_cfg_item[i].title) {
			title = kvp_cfg_item[i].title;
			continue;
		}
		if (!(kvp_cfg_row[kvp_cfg_item[i].id].readers & (uint32_t)binary))
			continue;
		if (title)
			fprintf(f, "\n%s\n", title);
		title = NULL;
		help_row(f, &kvp_cfg_row[kvp_cfg_item[i].id]);
	}
}

int kvp_config_value_next(const struct kvp_config *c, int *id)
{
	while (*id < KVP_CFG_CNT) {
		int n = (*id)++;
		if (kvp_cfg_row[n].readers & c->binary)
			return n;
	}
	return -1;
}

void kvp_config_print_check(FILE *f, const struct kvp_config *c)
{
	static const char *const from[] = {"default", "file", "environment", "command line"};
	char v[KVP_CFG_VALUE_MAX];
	for (int id = 0, n; (n = kvp_config_value_next(c, &id)) >= 0;)
		fprintf(f, "%s=%s  # %s\n", kvp_cfg_row[n].name,
			kvp_config_value(c, (enum kvp_config_id)n, v, sizeof(v)), from[c->source[n]]);
	if (c->ignored[0])
		fprintf(f, "# ignored: %s\n", c->ignored);
}

/* "|" would end a table cell. */
static void cell(FILE *f, const char *text)
{
	for (; *text; text++) {
		if (*text == '|')
			fputc('\\', f);
		fputc(*text, f);
	}
}

static void markdown_row(FILE *f, const struct kvp_cfg_row *r)
{
	static const char letter[] = "SIXHPKCT";
	char flags[160], range[512], def[512], by[sizeof(letter)];
	size_t n = 0;
	flags_of(r, flags, sizeof(flags));
	for (size_t i = 0; letter[i]; i++)
		if (r->readers & (1u << i))
			by[n++] = letter[i];
	by[n] = 0;
	fprintf(f, "| `%s` | %s%s%s | %s | `%s` | ", r->name, flags[0] ? "`" : "", flags, flags[0] ? "`" : "",
		type_name(r), kvp_cfg_default_text(r, def, sizeof(def)));
	cell(f, kvp_cfg_range(r, range, sizeof(range)));
	fprintf(f, " | %s | ", n == 8 ? "all" : by);
	cell(f, r->help);
	fprintf(f, " |\n");
}

void kvp_config_print_markdown(FILE *f)
{
	fprintf(f, "Read by: S supervisor, I indexer, X extproc, H httpd, P peer, K discovery, C sidecar, T "
		   "kvpickctl.\n");
	for (int i = 0; i < kvp_cfg_item_cnt; i++) {
		if (kvp_cfg_item[i].title)
			fprintf(f,
				"\n**%s**\n\n| variable | flag | type | default | range | read by | meaning "
				"|\n"
				"|---|---|---|---|---|---|---|\n",
				kvp_cfg_item[i].title);
		else
			markdown_row(f, &kvp_cfg_row[kvp_cfg_item[i].id]);
	}
}

void kvp_config_log(const struct kvp_config *c)
{
	char v[KVP_CFG_VALUE_MAX];
	/* One line a setting that somebody chose: all defaults in one line would not fit into one. */
	for (int id = 0, n; (n = kvp_config_value_next(c, &id)) >= 0;)
		if (c->source[n] != KVP_FROM_DEFAULT)
			KVP_LOG_I("config.setting", "name=%s value=%s", kvp_cfg_row[n].name,
				kvp_config_value(c, (enum kvp_config_id)n, v, sizeof(v)));
	if (c->ignored[0])
		KVP_LOG_W("config.ignored", "names=%s", c->ignored);
}

void kvp_config_log_setup(const struct kvp_config *c, const char *process, int instance)
{
	kvp_log_setup(process, instance, (enum kvp_log_level)c->eff.log_level,
		c->logging_jsonl ? KVP_LOG_FORM_JSON : KVP_LOG_FORM_TEXT);
}

int kvp_config_main(enum kvp_binary binary, int argc, const char *const *argv, const char *const *envp,
	struct kvp_config *out, struct kvp_config_rest *rest)
{
	struct kvp_config_err err;
	int rc = kvp_config_load(binary, argc, argv, envp, out, rest, &err);
	if (rc == KVP_ERR_SYS) {
		fprintf(stderr, "%s: no memory\n", binary_name(binary));
		return KVP_EXIT_AGAIN;
	}
	if (rc) {
		fprintf(stderr, "%s: configuration:\n%s", binary_name(binary), err.text);
		return KVP_EXIT_CONFIG;
	}
	if (out->act == KVP_ACT_RUN)
		return -1;
	if (out->act == KVP_ACT_HELP)
		kvp_config_print_help(stdout, binary);
	else if (out->act == KVP_ACT_VERSION)
		kvp_config_print_version(stdout, binary);
	else
		kvp_config_print_check(stdout, out);
	return KVP_EXIT_OK;
}
