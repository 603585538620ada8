/* kvpickctl — the command line of the tool that looks at a node. */
#include "daemons/ctl/ctl.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const struct {
	const char *name;
	int (*run)(struct ctl *c);
	const char *help;
} verb[] = {
	{"top", ctl_top, "latencies, busiest ranks and rates; -u MS interval (1000), -1 once"},
	{"workers", ctl_workers, "registered workers with their load; --model M, --group G, --limit N"},
	{"resv", ctl_resv, "live bookings; --model M, --group G, --limit N"},
	{"radix", ctl_radix, "size of the prefix index (--stats is the only form)"},
	{"slots", ctl_slots, "processes of the node; --limit N"},
	{"peers", ctl_peers, "replicas that are listened to"},
	{"errors", ctl_errors, "distinct errors with counts; --limit N"},
	{"check", ctl_check, "every invariant of the shared memory; exit 0 = none broken, 1 = some"},
	{"gen", ctl_gen, "generation, build and creation of the region, layout of its objects"},
};
#define VERB_CNT (sizeof(verb) / sizeof(verb[0]))

static void usage(FILE *f)
{
	fputs("kvpickctl - look at a running kvpick node; never changes it\n\n"
	      "  kvpickctl [--instance NAME] [--run-dir PATH] [--json] [-t MS] VERB [FLAGS]\n\n",
		f);
	for (size_t i = 0; i < VERB_CNT; i++)
		fprintf(f, "  %-8s %s\n", verb[i].name, verb[i].help);
	fputs("  sweep    give back what a dead process held; --slot I; run by the supervisor only\n\n"
	      "-t MS: wait at most that long for a region (1000).\n\n"
	      "--json prints one object: a member named like the table (workers, reservations, radix, "
	      "slots,\n"
	      "peers, errors, check) with an array of one object a row, whose members are the columns of the "
	      "text form.\n"
	      "gen: objects, and generation, build_id, created, boot_id, bytes, supervisor beside it. top: "
	      "one\n"
	      "object a turn and line, with latencies, ranks and counters. Numbers are exact integers up to\n"
	      "2^64-1, but members ending in _us and per_second are decimal; null = does not apply.\n\n"
	      "Exit codes: 0 done; 1 check found faults; 2 bad arguments; 75 no such node, or it is "
	      "starting.\n",
		f);
}

int ctl_attach(struct ctl *c)
{
	int rc = kvp_boot_attach(c->cfg->run_dir, c->cfg->instance, c->timeout_ms, &c->at);
	if (rc) {
		fprintf(stderr, "kvpickctl: no node '%s' in %s: %s\n", c->cfg->instance, c->cfg->run_dir,
			kvp_strerror(rc));
		return KVP_EXIT_AGAIN;
	}
	rc = kvp_region_join(c->at.region_fd, KVP_REGION_LOOK, c->region);
	if (rc) {
		fprintf(stderr, "kvpickctl: region of '%s': %s\n", c->cfg->instance, kvp_strerror(rc));
		kvp_boot_detach(&c->at);
		return rc == KVP_ERR_AGAIN ? KVP_EXIT_AGAIN : KVP_EXIT_DEPEND;
	}
	c->region->slots.lock_fd = c->at.lock_fd;
	return KVP_OK;
}

void ctl_detach(struct ctl *c)
{
	if (c->region->base)
		kvp_region_leave(c->region);
	kvp_boot_detach(&c->at);
}

static int number(const char *s, uint64_t max, uint64_t *out)
{
	char *end = NULL;
	if (!s || *s < '0' || *s > '9')
		return KVP_ERR_INVAL;
	unsigned long long v = strtoull(s, &end, 10);
	if (*end || v > max)
		return KVP_ERR_INVAL;
	*out = v;
	return KVP_OK;
}

/* value_of answers the value of a flag given as "--name value" or "--name=value" and moves *i past it. */
static const char *value_of(const struct kvp_config_rest *r, int *i, const char *name)
{
	const char *a = r->arg[*i];
	size_t n = strlen(name);
	if (strcmp(a, name) == 0)
		return *i + 1 < r->cnt ? r->arg[++*i] : NULL;
	return strncmp(a, name, n) == 0 && a[n] == '=' ? a + n + 1 : NULL;
}

static int is_flag(const char *arg, const char *name)
{
	size_t n = strlen(name);
	return strncmp(arg, name, n) == 0 && (arg[n] == 0 || (arg[n] == '=' && name[1] == '-'));
}

static int parse_one(struct ctl *c, const struct kvp_config_rest *r, int *i)
{
	const char *a = r->arg[*i];
	uint64_t v = 0;
	int rc = KVP_OK;
	if (strcmp(a, "--json") == 0) {
		c->form = CTL_JSON;
	} else if (strcmp(a, "-1") == 0) {
		c->once = 1;
	} else if (strcmp(a, "--stats") == 0) {
		return KVP_OK;
	} else if (is_flag(a, "-t")) {
		rc = number(value_of(r, i, "-t"), 3600000, &v);
		c->timeout_ms = (uint32_t)v;
	} else if (is_flag(a, "-u")) {
		rc = number(value_of(r, i, "-u"), 3600000, &v);
		c->interval_ms = (uint32_t)(v ? v : 1);
	} else if (is_flag(a, "--limit")) {
		rc = number(value_of(r, i, "--limit"), UINT64_MAX, &c->limit);
	} else if (is_flag(a, "--model")) {
		c->model = value_of(r, i, "--model");
		rc = c->model ? KVP_OK : KVP_ERR_INVAL;
	} else if (is_flag(a, "--group")) {
		c->group = value_of(r, i, "--group");
		rc = c->group ? KVP_OK : KVP_ERR_INVAL;
	} else if (a[0] != '-' && !c->verb) {
		c->verb = a;
	} else {
		rc = KVP_ERR_NOTFOUND;
	}
	if (rc)
		fprintf(stderr, "kvpickctl: %s '%s'\n",
			rc == KVP_ERR_NOTFOUND ? "unknown argument" : "missing or bad value of", a);
	return rc;
}

static int run(struct ctl *c, const struct kvp_config_rest *rest)
{
	for (int i = 0; i < rest->cnt; i++)
		if (parse_one(c, rest, &i))
			return KVP_EXIT_CONFIG;
	if (!c->verb || strcmp(c->verb, "help") == 0) {
		usage(c->verb ? stdout : stderr);
		return c->verb ? KVP_EXIT_OK : KVP_EXIT_CONFIG;
	}
	for (size_t i = 0; i < VERB_CNT; i++)
		if (strcmp(c->verb, verb[i].name) == 0) {
			int code = ctl_attach(c);
			if (code)
				return code;
			ctl_doc_begin(c);
			code = verb[i].run(c);
			int doc = KVP_EXIT_OK;
			if (verb[i].run == ctl_top)
				kvp_jw_free(&c->doc); /* it printed its own */
			else
				doc = ctl_doc_end(c);
			ctl_detach(c);
			return code ? code : doc;
		}
	fprintf(stderr, "kvpickctl: unknown verb '%s'\n", c->verb);
	return KVP_EXIT_CONFIG;
}

int main(int argc, char **argv)
{
	/* The supervisor's sweep has its configuration from the boot file, not from here. */
	if (argc > 1 && strcmp(argv[1], "sweep") == 0)
		return ctl_sweep(argc, argv);
	for (int i = 1; i < argc; i++)
		if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0) {
			usage(stdout);
			return KVP_EXIT_OK;
		}
	struct ctl c = {.at = {.region_fd = -1, .lock_fd = -1},
		.timeout_ms = 1000,
		.interval_ms = 1000,
		.limit = UINT64_MAX};
	struct kvp_config_rest rest;
	memset(&rest, 0, sizeof(rest));
	c.cfg = calloc(1, sizeof(*c.cfg));
	c.region = calloc(1, sizeof(*c.region));
	int code = KVP_EXIT_DEPEND;
	if (c.cfg && c.region)
		code = kvp_config_main(KVP_BIN_CTL, argc - 1, (const char *const *)argv + 1,
			(const char *const *)environ, c.cfg, &rest);
	if (code < 0)
		code = run(&c, &rest);
	free(c.region);
	free(c.cfg);
	return code;
}
