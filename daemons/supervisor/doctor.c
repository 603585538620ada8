#include "daemons/supervisor/doctor.h"

#include "daemons/common/log.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *const result_name[] = {"ok", "warn", "FAIL"};

void doc_say(struct doctor *d, enum doc_result r, const char *check, const char *todo, const char *fmt, ...)
{
	char seen[1024];
	va_list ap;
	va_start(ap, fmt);
	vsnprintf(seen, sizeof(seen), fmt, ap);
	va_end(ap);
	d->cnt[r]++;
	if (d->form == DOC_TEXT) {
		char shown[sizeof(seen) * 4];
		kvp_log_printable(seen, shown, sizeof(shown)); /* what others answered may hold anything */
		printf("%-4s  %-14s %s\n", result_name[r], check, shown);
		if (todo)
			printf("      %-14s -> %s\n", "", todo);
		return;
	}
	kvp_jw_obj(&d->doc);
	kvp_jw_kstr(&d->doc, "check", check);
	kvp_jw_kstr(&d->doc, "result", result_name[r]);
	kvp_jw_kstr(&d->doc, "seen", seen);
	kvp_jw_key(&d->doc, "todo");
	if (todo)
		kvp_jw_str(&d->doc, todo);
	else
		kvp_jw_null(&d->doc);
	kvp_jw_end(&d->doc);
}

static void say_config_errors(struct doctor *d, char *text)
{
	char *save = NULL;
	for (char *line = strtok_r(text, "\n", &save); line; line = strtok_r(NULL, "\n", &save))
		doc_say(d, DOC_FAIL, "configuration", "correct it; `kvpick help settings` lists all", "%s",
			line);
}

static int look_at_config(
	struct doctor *d, int argc, const char *const *argv, const char *const *envp, struct kvp_config *cfg)
{
	struct kvp_config_err *err = calloc(1, sizeof(*err));
	int rc = err ? kvp_config_load(KVP_BIN_SUPERVISOR, argc, argv, envp, cfg, NULL, err) : KVP_ERR_SYS;
	if (rc == KVP_ERR_INVAL)
		say_config_errors(d, err->text);
	else if (rc)
		doc_say(d, DOC_FAIL, "configuration", "free some memory", "no memory");
	else if (cfg->ignored[0])
		doc_say(d, DOC_WARN, "configuration", "remove or rename them: they have no effect",
			"valid; ignored variables: %s", cfg->ignored);
	else
		doc_say(d, DOC_OK, "configuration", NULL, "valid (`kvpick check-config` prints it)");
	free(err);
	return rc;
}

/* Also fills in the plan, without which the capacities are not known. */
static int look_at_programs(struct doctor *d)
{
	int code = sup_plan(d->plan);
	if (code)
		doc_say(d, DOC_FAIL, "programs", "install all programs of this version into one directory",
			"a program that this mode needs is missing in %s (its name is on stderr)",
			d->plan->dir);
	else
		doc_say(d, DOC_OK, "programs", NULL, "%u processes beside the supervisor, from %s",
			d->plan->child_cnt, d->plan->dir);
	return code;
}

static void look_at_all(struct doctor *d)
{
	int planned = look_at_programs(d) == 0;
	doc_node(d); /* first: the others compare with what runs */
	doc_memory_file(d);
	doc_io_uring(d);
	doc_open_files(d);
	doc_run_dir(d);
	if (planned)
		doc_memory(d);
	doc_cpu(d);
	doc_certificate(d);
	doc_listeners(d);
	doc_tokenizer(d);
	doc_api_server(d);
	doc_events(d);
	doc_peers(d);
}

static void look(
	struct doctor *d, int argc, const char *const *argv, const char *const *envp, struct kvp_config *cfg)
{
	if (look_at_config(d, argc, argv, envp, cfg))
		return;
	kvp_config_log_setup(cfg, "doctor", -1);
	d->cfg = d->plan->cfg = cfg;
	look_at_all(d);
	if (d->region->base)
		kvp_region_leave(d->region);
	kvp_boot_detach(&d->at);
}

static void finish(struct doctor *d)
{
	unsigned all = d->cnt[DOC_OK] + d->cnt[DOC_WARN] + d->cnt[DOC_FAIL];
	if (d->form == DOC_TEXT) {
		printf("%u findings: %u ok, %u warn, %u FAIL\n", all, d->cnt[DOC_OK], d->cnt[DOC_WARN],
			d->cnt[DOC_FAIL]);
		return;
	}
	kvp_jw_end(&d->doc);
	kvp_jw_kbool(&d->doc, "ok", d->cnt[DOC_FAIL] == 0);
	kvp_jw_ku64(&d->doc, "warnings", d->cnt[DOC_WARN]);
	kvp_jw_ku64(&d->doc, "failures", d->cnt[DOC_FAIL]);
	kvp_jw_end(&d->doc);
	if (kvp_jw_done(&d->doc) == KVP_OK)
		printf("%.*s\n", (int)d->doc.len, d->doc.buf);
	kvp_jw_free(&d->doc);
}

int doc_main(int argc, const char *const *argv, const char *const *envp)
{
	struct doctor d = {.at = {.region_fd = -1, .lock_fd = -1}};
	struct kvp_config *cfg = calloc(1, sizeof(*cfg));
	const char **rest = calloc((size_t)argc + 1, sizeof(*rest));
	int cnt = 0;
	d.plan = calloc(1, sizeof(*d.plan));
	d.region = calloc(1, sizeof(*d.region));
	if (!cfg || !rest || !d.plan || !d.region) {
		fputs("kvpick: no memory\n", stderr);
		return KVP_EXIT_DEPEND;
	}
	for (int i = 0; i < argc; i++)
		if (strcmp(argv[i], "--json") == 0)
			d.form = DOC_JSON;
		else
			rest[cnt++] = argv[i];
	if (d.form == DOC_JSON) {
		kvp_jw_init(&d.doc);
		kvp_jw_obj(&d.doc);
		kvp_jw_key(&d.doc, "findings");
		kvp_jw_arr(&d.doc);
	}
	look(&d, cnt, rest, envp, cfg);
	finish(&d);
	free(rest);
	free(cfg);
	free(d.plan);
	free(d.region);
	return d.cnt[DOC_FAIL] ? 1 : 0;
}
