/* kvpick — the supervisor's command line: run, check-config, doctor, version, help. */
#include "daemons/supervisor/doctor.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void usage(FILE *f)
{
	fputs("kvpick - KV-cache-aware endpoint picker\n"
	      "\n"
	      "  kvpick run [FLAGS]            start a node: supervisor, indexer, HTTP service\n"
	      "  kvpick check-config [FLAGS]   parse the configuration, print it with its sources\n"
	      "  kvpick doctor [FLAGS]         look at all that such a node needs, say what to do about it;\n"
	      "                                exit code 1 when something fails; --json\n"
	      "  kvpick version                print the version\n"
	      "  kvpick help [VERB]            this text; 'kvpick help run' lists every flag and variable,\n"
	      "                                'kvpick help settings' prints them as the README's table\n"
	      "\n"
	      "Exit codes: 0 asked to stop; 2 bad configuration; 69 a program or the shared memory is "
	      "missing;\n"
	      "70 an invariant is broken; 75 the instance already runs, try again later.\n"
	      "A running node is looked at with kvpickctl.\n",
		f);
}

static int run(int argc, const char *const *argv, const char *const *envp)
{
	struct kvp_config *cfg = calloc(1, sizeof(*cfg));
	struct sup *s = calloc(1, sizeof(*s));
	if (!cfg || !s) {
		fputs("kvpick: no memory\n", stderr);
		free(cfg);
		free(s);
		return KVP_EXIT_DEPEND;
	}
	int code = kvp_config_main(KVP_BIN_SUPERVISOR, argc, argv, envp, cfg, NULL);
	if (code < 0) {
		kvp_config_log_setup(cfg, "supervisor", -1);
		s->cfg = cfg;
		code = sup_plan(s);
		code = code ? code : sup_run(s);
	}
	free(s);
	free(cfg);
	return code;
}

static int check_config(int argc, const char *const *argv, const char *const *envp)
{
	const char *flag = "--check-config", **all = calloc((size_t)argc + 2, sizeof(*all));
	if (!all)
		return KVP_EXIT_DEPEND;
	memcpy(all, argv, (size_t)argc * sizeof(*all));
	all[argc] = flag;
	int code = run(argc + 1, all, envp);
	free(all);
	return code;
}

int main(int argc, char **argv)
{
	const char *verb = argc > 1 ? argv[1] : "help";
	const char *const *rest = (const char *const *)argv + (argc > 1 ? 2 : 1), *const *env = NULL;
	int cnt = argc > 1 ? argc - 2 : 0;
	env = (const char *const *)environ;
	if (strcmp(verb, "run") == 0)
		return run(cnt, rest, env);
	if (strcmp(verb, "check-config") == 0)
		return check_config(cnt, rest, env);
	if (strcmp(verb, "doctor") == 0)
		return doc_main(cnt, rest, env);
	if (strcmp(verb, "version") == 0 || strcmp(verb, "--version") == 0) {
		kvp_config_print_version(stdout, KVP_BIN_SUPERVISOR);
		return KVP_EXIT_OK;
	}
	if (strcmp(verb, "help") == 0 || strcmp(verb, "--help") == 0 || strcmp(verb, "-h") == 0) {
		if (cnt > 0 && (strcmp(rest[0], "run") == 0 || strcmp(rest[0], "check-config") == 0 ||
				       strcmp(rest[0], "doctor") == 0))
			kvp_config_print_help(stdout, KVP_BIN_SUPERVISOR);
		else if (cnt > 0 && strcmp(rest[0], "settings") == 0)
			kvp_config_print_markdown(stdout);
		else
			usage(stdout);
		return KVP_EXIT_OK;
	}
	fprintf(stderr, "kvpick: unknown verb '%s'\n\n", verb);
	usage(stderr);
	return KVP_EXIT_CONFIG;
}
