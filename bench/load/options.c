/* bench/load/options.c — see options.h. */
#include "bench/load/options.h"
#include "bench/sim/opt.h"
#include <getopt.h>
#include <stdlib.h>
#include <string.h>

static const char usage[] =
	"usage: kvpick-load [--simulate | --generate FILE] --trace FILE [options]\n"
	"Replays a trace against engines behind a policy and prints hit rate, TTFT, TPOT and selection "
	"latency.\n"
	"  --trace FILE            JSON lines: timestamp (ms), input_length, output_length, hash_ids of 512 "
	"tokens\n"
	"  --limit N               only the first N requests; --duration-s N: only those that arrive within "
	"N s\n"
	"  --speed X               arrivals come X times as fast, default 1\n"
	"  --time-scale S          virtual seconds a second: that of the engines, default 1\n"
	"  --spread | --raw        spread requests that share a timestamp (default), or don't\n"
	"  --policy P              kv, round-robin, random or least-loaded; default kv; with --simulate\n"
	"                          also least-work: what a node with that policy would choose\n"
	"  --compare P,P[,...]     several policies side by side, each with its own engines\n"
	"  --engines LIST          host:port[:events[:replay]],... or @FILE with the output of kvpick-sim;\n"
	"                          once a policy, in their order\n"
	"  --base URL              the node, default http://127.0.0.1:8092 (policy kv)\n"
	"  --register              register the engines of policy kv with the node, and wait until it is "
	"ready\n"
	"  --model NAME, --routing-group NAME   default \"default\"\n"
	"  --token-file FILE       bearer token for the node\n"
	"  --node-form hashes|tokens    prompt to the node, default hashes\n"
	"  --engine-form ids|tokens     prompt to the engine, default ids (kvpick-sim only)\n"
	"  --timeout-s N           a request, default 600\n"
	"  --seed N                random policy and ties, default 1\n"
	"  --json                  one JSON object instead of the table\n"
	"Simulate: the engines' model and an ideal policy in this process, no sockets.\n"
	"  --engine-count N        default 8; --block-size N (also for --register), --blocks N,\n"
	"                          --step-us N, --rate N, --decode-us N, --kv-token-ns N, --chunk N: as "
	"kvpick-sim\n"
	"Generate: write a multi-turn trace to FILE (- = standard output).\n"
	"  --sessions N, --turns N, --systems N, --system-tokens N, --user-tokens N, --output-tokens N, "
	"--think-s N\n";

enum {
	O_TRACE = 256,
	O_LIMIT,
	O_DURATION,
	O_SPEED,
	O_SCALE,
	O_SPREAD,
	O_RAW,
	O_POLICY,
	O_COMPARE,
	O_ENGINES,
	O_BASE,
	O_REGISTER,
	O_MODEL,
	O_GROUP,
	O_TOKEN,
	O_NODE_FORM,
	O_ENGINE_FORM,
	O_TIMEOUT,
	O_SEED,
	O_JSON,
	O_SIMULATE,
	O_COUNT,
	O_BLOCK,
	O_BLOCKS,
	O_STEP,
	O_RATE,
	O_DECODE,
	O_KVTOK,
	O_CHUNK,
	O_GENERATE,
	O_SESSIONS,
	O_TURNS,
	O_SYSTEMS,
	O_SYSTEM_TOK,
	O_USER_TOK,
	O_OUT_TOK,
	O_THINK,
	O_HELP
};
static const struct option options[] = {{"trace", 1, 0, O_TRACE}, {"limit", 1, 0, O_LIMIT},
	{"duration-s", 1, 0, O_DURATION}, {"speed", 1, 0, O_SPEED}, {"time-scale", 1, 0, O_SCALE},
	{"spread", 0, 0, O_SPREAD}, {"raw", 0, 0, O_RAW}, {"policy", 1, 0, O_POLICY},
	{"compare", 1, 0, O_COMPARE}, {"engines", 1, 0, O_ENGINES}, {"base", 1, 0, O_BASE},
	{"register", 0, 0, O_REGISTER}, {"model", 1, 0, O_MODEL}, {"routing-group", 1, 0, O_GROUP},
	{"token-file", 1, 0, O_TOKEN}, {"node-form", 1, 0, O_NODE_FORM}, {"engine-form", 1, 0, O_ENGINE_FORM},
	{"timeout-s", 1, 0, O_TIMEOUT}, {"seed", 1, 0, O_SEED}, {"json", 0, 0, O_JSON},
	{"simulate", 0, 0, O_SIMULATE}, {"engine-count", 1, 0, O_COUNT}, {"block-size", 1, 0, O_BLOCK},
	{"blocks", 1, 0, O_BLOCKS}, {"step-us", 1, 0, O_STEP}, {"rate", 1, 0, O_RATE},
	{"decode-us", 1, 0, O_DECODE}, {"kv-token-ns", 1, 0, O_KVTOK}, {"chunk", 1, 0, O_CHUNK},
	{"generate", 1, 0, O_GENERATE}, {"sessions", 1, 0, O_SESSIONS}, {"turns", 1, 0, O_TURNS},
	{"systems", 1, 0, O_SYSTEMS}, {"system-tokens", 1, 0, O_SYSTEM_TOK},
	{"user-tokens", 1, 0, O_USER_TOK}, {"output-tokens", 1, 0, O_OUT_TOK}, {"think-s", 1, 0, O_THINK},
	{"help", 0, 0, O_HELP}, {0, 0, 0, 0}};

static const char *const node_words[] = {"hashes", "tokens", NULL};
static const char *const engine_words[] = {"ids", "tokens", NULL};

/* ---- engines and addresses ---- */

static int read_port(const char **p, uint16_t *port)
{
	char *end;
	unsigned long v = strtoul(*p, &end, 10);
	if (end == *p || v < 1 || v > 65535)
		return KVP_ERR_PROTO;
	*port = (uint16_t)v;
	*p = end;
	return KVP_OK;
}

/* read_host copies the text before the next ':' (or the bracketed one) and passes over the colon. */
static int read_host(const char **p, char host[64])
{
	const char *first = *p, *end = *first == '[' ? strchr(first, ']') : strchr(first, ':');
	if (end && *first == '[') {
		first++;
		*p = end + 1;
	} else {
		*p = end;
	}
	if (!end || **p != ':' || end == first || end - first > 63)
		return KVP_ERR_PROTO;
	++*p;
	memcpy(host, first, (size_t)(end - first));
	host[end - first] = 0;
	if (!strcmp(host, "localhost"))
		memcpy(host, "127.0.0.1", sizeof("127.0.0.1"));
	return KVP_OK;
}

int kvp_load_url(const char *url, char host[64], uint16_t *port)
{
	static const char scheme[] = "http://";
	if (strncmp(url, scheme, strlen(scheme)))
		return KVP_ERR_PROTO;
	url += strlen(scheme);
	if (read_host(&url, host) || read_port(&url, port))
		return KVP_ERR_PROTO;
	return *url && strcmp(url, "/") ? KVP_ERR_PROTO : KVP_OK;
}

static int set_add(struct kvp_load_set *set, const struct kvp_load_target *t)
{
	if (set->cnt == KVP_LOAD_TARGET_MAX)
		return KVP_ERR_FULL;
	set->target[set->cnt++] = *t;
	return KVP_OK;
}

/* word_port finds "name=..." in a line of kvpick-sim and reads the port behind the last colon of the word. */
static uint16_t word_port(const char *line, const char *name)
{
	uint16_t port = 0;
	const char *p = strstr(line, name), *colon = NULL;
	for (p += p ? strlen(name) : 0; p && *p && *p != ' ' && *p != '\n'; p++)
		if (*p == ':')
			colon = p + 1;
	if (colon && read_port(&colon, &port))
		port = 0;
	return port;
}

static int set_read_file(struct kvp_load_set *set, const char *path)
{
	FILE *f = fopen(path, "re");
	char line[512];
	int rc = KVP_OK;
	if (!f)
		return KVP_ERR_SYS;
	while (!rc && fgets(line, sizeof(line), f)) {
		struct kvp_load_target t = {.event_port = word_port(line, " events="),
			.replay_port = word_port(line, " replay=")};
		const char *p = strstr(line, " http=");
		if (strncmp(line, "engine=", 7) || !p)
			continue;
		p += 6;
		rc = read_host(&p, t.host) || read_port(&p, &t.http_port) ? KVP_ERR_PROTO : set_add(set, &t);
	}
	fclose(f);
	return rc;
}

int kvp_load_set_read(struct kvp_load_set *set, const char *text)
{
	if (*text == '@')
		return set_read_file(set, text + 1);
	for (const char *p = text;;) {
		struct kvp_load_target t = {0};
		if (read_host(&p, t.host) || read_port(&p, &t.http_port))
			return KVP_ERR_PROTO;
		if (*p == ':' && (p++, read_port(&p, &t.event_port)))
			return KVP_ERR_PROTO;
		if (*p == ':' && (p++, read_port(&p, &t.replay_port)))
			return KVP_ERR_PROTO;
		int rc = set_add(set, &t);
		if (rc || !*p)
			return rc;
		if (*p++ != ',')
			return KVP_ERR_PROTO;
	}
}

/* ---- options ---- */

static void take_policies(struct kvp_load_cfg *c, const char *name, const char *v)
{
	c->run_cnt = 0;
	for (const char *p = v;;) {
		size_t len = strcspn(p, ",");
		int policy = kvp_policy_parse(p, len);
		if (policy < 0 || c->run_cnt == KVP_LOAD_RUN_MAX)
			kvp_opt_bad(name, v, "a list of up to 4 of kv, round-robin, random, least-loaded");
		c->policy[c->run_cnt++] = (enum kvp_policy)policy;
		if (!p[len])
			return;
		p += len + 1;
	}
}

static void take_engines(struct kvp_load_cfg *c, const char *name, const char *v)
{
	if (c->set_cnt == KVP_LOAD_RUN_MAX || kvp_load_set_read(&c->set[c->set_cnt++], v))
		kvp_opt_bad(
			name, v, "host:port[:events[:replay]],... or @FILE with the output of kvpick-sim");
}

static void take_model(struct kvp_load_cfg *c, int opt, const char *name, const char *v)
{
	switch (opt) {
	case O_COUNT:
		c->engine_cnt = (uint32_t)kvp_opt_u64(name, v, 1, 1024);
		break;
	case O_BLOCK:
		c->engine.block_size_tok = (uint32_t)kvp_opt_u64(name, v, 1, 65536);
		break;
	case O_BLOCKS:
		c->engine.block_max = (uint32_t)kvp_opt_u64(name, v, 1, 1u << 24);
		break;
	case O_STEP:
		c->engine.step_ns = 1000 * kvp_opt_u64(name, v, 1, 60000000);
		break;
	case O_RATE:
		c->engine.rate_tok_s = kvp_opt_u64(name, v, 1, 1000000000);
		break;
	case O_DECODE:
		c->engine.decode_ns = 1000 * kvp_opt_u64(name, v, 0, 1000000);
		break;
	case O_KVTOK:
		c->engine.kv_tok_ns = kvp_opt_u64(name, v, 0, 1000000);
		break;
	case O_CHUNK:
		c->engine.chunk_tok = (uint32_t)kvp_opt_u64(name, v, 1, 1u << 24);
		break;
	case O_SESSIONS:
		c->gen.session_cnt = (uint32_t)kvp_opt_u64(name, v, 1, 1000000);
		break;
	case O_TURNS:
		c->gen.turn_mean = (uint32_t)kvp_opt_u64(name, v, 1, 1000);
		break;
	case O_SYSTEMS:
		c->gen.system_cnt = (uint32_t)kvp_opt_u64(name, v, 1, 1000000);
		break;
	case O_SYSTEM_TOK:
		c->gen.system_tok = (uint32_t)kvp_opt_u64(name, v, 0, 1u << 20);
		break;
	case O_USER_TOK:
		c->gen.user_tok = (uint32_t)kvp_opt_u64(name, v, 1, 1u << 20);
		break;
	case O_OUT_TOK:
		c->gen.out_tok = (uint32_t)kvp_opt_u64(name, v, 1, 1u << 20);
		break;
	case O_THINK:
		c->gen.think_s = (uint32_t)kvp_opt_u64(name, v, 1, 86400);
		break;
	}
}

static void take_option(struct kvp_load_cfg *c, int opt, const char *name, const char *v)
{
	switch (opt) {
	case O_TRACE:
		c->trace = v;
		break;
	case O_LIMIT:
		c->limit = kvp_opt_u64(name, v, 0, UINT32_MAX);
		break;
	case O_DURATION:
		c->duration_s = kvp_opt_u64(name, v, 1, 10000000);
		break;
	case O_SPEED:
		c->speed = kvp_opt_f64(name, v, 0.001, 10000);
		break;
	case O_SCALE:
		c->scale = kvp_opt_f64(name, v, 0.001, 10000);
		break;
	case O_SPREAD:
		c->arrival = KVP_LOAD_SPREAD;
		break;
	case O_RAW:
		c->arrival = KVP_LOAD_RAW;
		break;
	case O_POLICY:
	case O_COMPARE:
		take_policies(c, name, v);
		break;
	case O_ENGINES:
		take_engines(c, name, v);
		break;
	case O_BASE:
		if (kvp_load_url(v, c->base_host, &c->base_port))
			kvp_opt_bad(name, v, "http://ip:port");
		break;
	case O_REGISTER:
		c->registration = KVP_LOAD_REGISTER_YES;
		break;
	case O_MODEL:
		c->model = v;
		break;
	case O_GROUP:
		c->group = v;
		break;
	case O_TOKEN:
		c->token_file = v;
		break;
	case O_NODE_FORM:
		c->node_form = (enum kvp_load_prompt)kvp_opt_word(name, v, node_words);
		break;
	case O_ENGINE_FORM:
		c->engine_form = (enum kvp_load_prompt)kvp_opt_word(name, v, engine_words);
		break;
	case O_TIMEOUT:
		c->timeout_s = kvp_opt_u64(name, v, 1, 86400);
		break;
	case O_SEED:
		c->seed = kvp_opt_u64(name, v, 0, UINT64_MAX);
		break;
	case O_JSON:
		c->output = KVP_LOAD_JSON;
		break;
	case O_SIMULATE:
		c->mode = KVP_LOAD_SIMULATE;
		break;
	case O_GENERATE:
		c->mode = KVP_LOAD_GENERATE, c->generate = v;
		break;
	case O_HELP:
		fputs(usage, stdout);
		exit(KVP_EXIT_OK);
	case '?':
		fputs("kvpick-load --help lists the options\n", stderr);
		exit(KVP_EXIT_CONFIG);
	default:
		take_model(c, opt, name, v);
	}
}

static void check(struct kvp_load_cfg *c)
{
	if (c->duration_s)
		c->gen.duration_s = (uint32_t)c->duration_s;
	c->gen.seed = c->seed;
	if (c->mode != KVP_LOAD_GENERATE && !c->trace)
		kvp_opt_bad("trace", "", "there, but it is needed");
	if (c->mode == KVP_LOAD_REPLAY && c->set_cnt != c->run_cnt)
		kvp_opt_bad("engines", "", "given once for each policy");
	uint32_t kv_cnt = 0;
	for (uint32_t i = 0; i < c->run_cnt; i++)
		kv_cnt += c->policy[i] == KVP_POLICY_KV;
	for (uint32_t i = 0; i < c->run_cnt; i++)
		if (c->mode == KVP_LOAD_REPLAY && c->policy[i] == KVP_POLICY_LEAST_WORK)
			kvp_opt_bad("policy", "least-work",
				"possible without --simulate: kv, and the node's KVPICK_SELECTION_POLICY");
	if (c->mode == KVP_LOAD_REPLAY && kv_cnt > 1)
		kvp_opt_bad("compare", "kv", "possible twice on one node");
}

void kvp_load_options(int argc, char **argv, struct kvp_load_cfg *c)
{
	memset(c, 0, sizeof(*c));
	memcpy(c->base_host, "127.0.0.1", sizeof("127.0.0.1"));
	c->base_port = 8092;
	c->speed = c->scale = 1;
	c->run_cnt = 1;
	c->model = c->group = "default";
	c->timeout_s = 600;
	c->seed = 1;
	c->engine_cnt = 8;
	kvp_sim_cfg_default(&c->engine);
	kvp_gen_cfg_default(&c->gen);
	for (int opt, at = -1; (opt = getopt_long(argc, argv, "", options, &at)) != -1; at = -1)
		take_option(c, opt, at >= 0 ? options[at].name : "", optarg);
	if (optind < argc)
		kvp_opt_bad("", argv[optind], "an option");
	check(c);
}
