/* Configuration: precedence, every class of error, rules across settings, texts, the sealed memory file,
 * and the start vectors of scheduling.json and selection_api.json. The environment is passed in. */
#include "daemons/common/config_priv.h"
#include "daemons/common/log.h"
#include "tests/vec.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static struct kvp_config cfg;
static struct kvp_config_err err;
static struct kvp_config_rest rest;
static char dir[64];

/* Splits "A=1;B=2" or "--a;1" into pointers. */
static int split(const char *text, char *buf, size_t cap, const char **out)
{
	int n = 0;
	snprintf(buf, cap, "%s", text);
	for (char *p = buf; *p && n < 31;) {
		out[n++] = p;
		p += strcspn(p, ";");
		if (*p)
			*p++ = 0;
	}
	out[n] = NULL;
	return n;
}

static int load_as(enum kvp_binary b, const char *args, const char *env)
{
	static char ab[4096], eb[16384];
	const char *av[32], *ev[32];
	int n = split(args, ab, sizeof(ab), av);
	split(env, eb, sizeof(eb), ev);
	return kvp_config_load(b, n, av, ev, &cfg, NULL, &err);
}
#define LOAD(args, env) load_as(KVP_BIN_SUPERVISOR, args, env)

static void good(const char *args, const char *env, const char *what)
{
	if (!ok(LOAD(args, env) == KVP_OK, "starts: %s", what))
		printf("# %s", err.text);
}

/* Each part (separated by ;) must be in the message. */
static void bad_as(enum kvp_binary b, const char *args, const char *env, const char *parts)
{
	char buf[1024], given[1024], shown[4096];
	const char *p[32];
	int rc = load_as(b, args, env), n = split(parts, buf, sizeof(buf), p), all = 1;
	snprintf(given, sizeof(given), "%s %s", args, env);
	kvp_log_printable(given, shown, sizeof(shown));
	for (int i = 0; i < n; i++)
		all &= strstr(err.text, p[i]) != NULL;
	if (!ok(rc == KVP_ERR_INVAL && err.cnt == 1 && all, "refused: %s (%s)", shown, parts))
		printf("# rc %d, %u errors: %s", rc, err.cnt, err.text);
}
#define BAD(args, env, parts) bad_as(KVP_BIN_SUPERVISOR, args, env, parts)

static const char *file(const char *name, const char *text)
{
	static char path[4][128];
	static int next;
	char *p = path[next++ & 3];
	snprintf(p, sizeof(path[0]), "%s/%s", dir, name);
	FILE *f = fopen(p, "we");
	if (f) {
		fputs(text, f);
		fclose(f);
	}
	return p;
}

static const char *envf(const char *fmt, const char *path)
{
	static char buf[512];
	snprintf(buf, sizeof(buf), "%s%s", fmt, path);
	return buf;
}

static void precedence(void)
{
	good("", "", "nothing set");
	ok(cfg.port == 8092 && cfg.eff.api_port == 8092 && cfg.temperature == 0.0 && cfg.use_kv_events == 1 &&
			cfg.eff.mode == KVP_MODE_SELECTION && !cfg.eff.metrics_port && !cfg.eff.peer_on &&
			!cfg.eff.discovery_on && cfg.eff.threads == 4 && !cfg.eff.queueing_on,
		"defaults");
	is_str(cfg.instance, "default", "text default");
	ok(!kvp_config_has(cfg.queue_threshold) && cfg.session_affinity_ttl_secs == KVP_CONFIG_UNSET &&
			cfg.policy_all == KVP_CONFIG_NO_WORD,
		"optional settings are unset");
	const char *f =
		envf("KVPICK_CONFIG=", file("a.yaml", "KVPICK_PORT: 1001\nDYN_ROUTER_TEMPERATURE: 0.5\n"
						      "KVPICK_BIND: \"127.0.0.1\"\nKVPICK_MAX_QUEUED: ~\n"));
	char env[1024];
	snprintf(env, sizeof(env), "%s;KVPICK_PORT=1002", f);
	good("", f, "file");
	ok(cfg.port == 1001 && cfg.temperature == 0.5 && cfg.max_queued == 16384,
		"file beats default, null is unset");
	is_u64(cfg.source[KVP_CFG_port], KVP_FROM_FILE, "source file");
	good("", env, "file and environment");
	ok(cfg.port == 1002 && cfg.temperature == 0.5 && cfg.source[KVP_CFG_port] == KVP_FROM_ENV,
		"environment beats file");
	good("--port;1003", env, "all three");
	ok(cfg.port == 1003 && cfg.source[KVP_CFG_port] == KVP_FROM_FLAG, "flag beats environment");
	snprintf(env, sizeof(env), "%s;KVPICK_PORT=  ", f);
	good("", env, "blank");
	is_u64(cfg.port, 1001, "blank is unset: the weaker source counts");
	good("", "KVPICK_PORT= \t77 ;DYN_ROUTER_USE_KV_EVENTS= oFF", "blanks around");
	ok(cfg.port == 77 && !cfg.use_kv_events, "values are trimmed; words of booleans in any case");
}

static void flags(void)
{
	good("--port=5;--no-router-assume-kv-reuse;--recover-loads;--kv-clear-on-loss;yes", "",
		"forms of flags");
	ok(cfg.port == 5 && !cfg.assume_kv_reuse && cfg.recover_loads && cfg.kv_clear_on_loss,
		"all four forms");
	good("--threads;7;--grpc-port;9102;--epp-health-port=9103", "", "published and own flag names");
	ok(cfg.eff.threads == 7 && cfg.epp_port == 9102 && cfg.epp_health_port == 9103,
		"reach their settings");
	good("--port;5;--port;6", "", "a flag twice");
	is_u64(cfg.port, 6, "the last one counts");
	BAD("--router-assume-kv-reuse;--no-router-assume-kv-reuse", "",
		"--no-router-assume-kv-reuse;together");
	BAD("--prot;5", "", "--prot;unknown flag;--port");
	BAD("--port", "", "--port;needs a value");
	BAD("-x", "", "-x;unknown flag");
	BAD("what", "", "what;unexpected argument");
	BAD("--engine-port;5", "", "--engine-port;unknown");
	ok(load_as(KVP_BIN_SIDECAR, "--port;8100;--engine-port;8200", "") == KVP_OK &&
			cfg.sidecar_port == 8100 && cfg.decode_engine_port == 8200,
		"the sidecar's --port is its own");
	bad_as(KVP_BIN_SIDECAR, "--threads;2", "", "--threads;unknown flag");
	bad_as(KVP_BIN_INDEXER, "--bind;127.0.0.1", "", "--bind;unknown flag");
	ok(load_as(KVP_BIN_HTTPD, "--bind;127.0.0.1", "") == KVP_OK && !strcmp(cfg.bind, "127.0.0.1"),
		"a child takes the flags it reads");
	const char *ctl[] = {"--instance", "n1", "-t", "50", "top", "--limit", "3"}, *none[] = {NULL};
	ok(kvp_config_load(KVP_BIN_CTL, 7, ctl, none, &cfg, &rest, &err) == KVP_OK && rest.cnt == 5 &&
			!strcmp(rest.arg[0], "-t") && !strcmp(rest.arg[2], "top") &&
			!strcmp(cfg.instance, "n1"),
		"kvpickctl keeps its own flags in order");
	ok(LOAD("--help;--nonsense", "KVPICK_X=1") == KVP_OK && cfg.act == KVP_ACT_HELP,
		"--help stops early");
	ok(LOAD("--version", "") == KVP_OK && cfg.act == KVP_ACT_VERSION, "--version");
	ok(LOAD("--check-config", "") == KVP_OK && cfg.act == KVP_ACT_CHECK, "--check-config");
}

static void bad_values(void)
{
	BAD("", "DYN_ROUTER_TEMPERATURE=abc",
		"DYN_ROUTER_TEMPERATURE=\"abc\";environment;finite number >= 0");
	BAD("", "DYN_ROUTER_TEMPERATURE=nan", "DYN_ROUTER_TEMPERATURE");
	BAD("", "DYN_ROUTER_TEMPERATURE=0x1p3", "DYN_ROUTER_TEMPERATURE");
	BAD("", "DYN_ROUTER_TEMPERATURE=1e999", "out of range");
	BAD("", "DYN_ROUTER_TEMPERATURE=1e", "not a number");
	BAD("", "DYN_ROUTER_HOST_CACHE_HIT_WEIGHT=1.01", "0..1");
	BAD("--port;65536", "", "--port=\"65536\";command line;KVPICK_PORT;0..65535");
	BAD("--port;-1", "", "--port=\"-1\";out of range");
	BAD("--port;+1", "", "not a decimal integer");
	BAD("--port;1 2", "", "not a decimal integer");
	BAD("", "KVPICK_MAX_QUEUED=99999999999999999999999", "out of range");
	BAD("", "KVPICK_INDEX_RANKS=100", "multiple of 64");
	BAD("", "DYN_ROUTER_QUEUE_POLICY=FCFS", "fcfs, lcfs, wspt");
	BAD("", "DYN_ROUTER_TRACK_ACTIVE_BLOCKS=maybe", "true, false");
	BAD("", "KVPICK_BIND=localhost", "IP address");
	BAD("", "KVPICK_INSTANCE=a/b", "KVPICK_INSTANCE;A-Z");
	BAD("", "KVPICK_INSTANCE=a123456789012345678901234567890123", "too long");
	BAD("", "DYN_EPP_TOKENIZER_SERVICE_URL=unix:///x", "http://");
	BAD("", "DYN_EPP_TOKENIZER_SERVICE_URL=https://", "no host");
	BAD("", "KVPICK_EPP_TOKENIZER_CA_FILE=/nonexistent", "KVPICK_EPP_TOKENIZER_CA_FILE");
	BAD("", "DYN_EPP_TOKENIZER_SERVICE_URL=http://unix:/", "socket path");
	BAD("", "DYN_EPP_TOKENIZER_SERVICE_URL=http://unix:/s:8000", "behind the socket");
	BAD("", "KVPICK_EPP_LISTEN=0.0.0.0:1,unix:rel", "unix:");
	BAD("", "KVPICK_EPP_TAINT_LABELS=a/b/c", "label key");
	BAD("", "KVPICK_INDEXER_PEERS=http://a:1,https://b:2", "http://");
	BAD("", "DYN_METADATA_HEADER=a b", "header name");
	BAD("", "KVPICK_MM_IMAGE_TOKEN_ID=4294967296", "0..4294967295");
	BAD("", "KVPICK_API_TOKEN_FILE=/nonexistent", "KVPICK_API_TOKEN_FILE;readable");
	BAD("", envf("KVPICK_API_TOKEN_FILE=", file("empty", "")), "1 to 4096 bytes");
	BAD("", envf("KVPICK_API_TOKEN_FILE=", file("blank", " \t\n")), "KVPICK_API_TOKEN_FILE;white space");
	BAD("", "KVPICK_TEMPERATURE=1", "unknown variable");
	BAD("", "DYN_ROUTER_QUEUE_THRESHOLD=\x1b[0m", "DYN_ROUTER_QUEUE_THRESHOLD=\"\\x1b[0m\"");
	BAD("", "DYN_ROUTER_TEMPERATURE=\x80\xc3\xa4\n\xff", "\"\\x80\\xc3\\xa4\\x0a\\xff\"");
	BAD("--p\xf6rt;5", "", "--p\\xf6rt: unknown flag");
	BAD("", "KVPICK_\xe9\x07=1", "KVPICK_\\xe9\\x07 (environment): unknown variable");
	BAD("", "KVPICK_CONFIG=/nonexistent/\xc3\xa4", "KVPICK_CONFIG=\"/nonexistent/\\xc3\\xa4\"");
	good("", "DYN_ROUTER_QUEUE_THRESHOLD=nOnE;DYN_ROUTER_POLICY_CONFIG= ", "None");
	ok(!kvp_config_has(cfg.queue_threshold), "None is unset");
	/* A hidden value is checked, too. */
	BAD("--port;7", "KVPICK_PORT=x", "KVPICK_PORT=\"x\"");
	ok(LOAD("--port;x", "DYN_ROUTER_TEMPERATURE=x;KVPICK_FOO=1") < 0 && err.cnt == 3,
		"all errors at once");
	bad_as(KVP_BIN_SIDECAR, "", "DYN_SIDECAR_PORT=", "DYN_SIDECAR_PORT;set but empty");
	bad_as(KVP_BIN_SIDECAR, "", "DYN_SIDECAR_PD_BACKEND= sglang", "DYN_SIDECAR_PD_BACKEND");
	ok(load_as(KVP_BIN_SIDECAR, "", "DYN_SIDECAR_PD_ADAPTER= sglang ") == KVP_OK &&
			cfg.eff.sidecar_adapter == KVP_PD_SGLANG,
		"the adapter's name is trimmed");
	ok(load_as(KVP_BIN_INDEXER, "", "DYN_ROUTER_TEMPERATURE=junk") == KVP_OK,
		"only settings read are checked");
}

static void refused_and_ignored(void)
{
	BAD("", "DYN_EPP_MODE=dynamo", "DYN_EPP_MODE;not supported;standalone");
	BAD("", "DYN_ROUTER_PREFILL_LOAD_MODEL=aic", "not supported");
	BAD("", "DYN_SHARED_CACHE_TYPE=hicache", "not supported");
	BAD("", "DYN_USE_REMOTE_INDEXER=true", "not supported");
	BAD("", "DYN_ROUTER_TRACKING_HASH=keyed-xxh3-v1", "not supported");
	BAD("", "DYN_KUBE_DISCOVERY_MODE=container", "not supported");
	BAD("", "DYN_ROUTER_PREFILL_POLICY=mine", "default, reference, least_work");
	good("",
		"DYN_USE_REMOTE_INDEXER=false;DYN_NAMESPACE=x;DYN_EPP_POOL_NAMESPACE=y;DYN_NEW_THING=1;PATH=/"
		"bin",
		"ignored");
	ok(strstr(cfg.ignored, "DYN_NAMESPACE") &&
			strstr(cfg.ignored, "DYN_EPP_POOL_NAMESPACE(now:POD_NAMESPACE)") &&
			strstr(cfg.ignored, "DYN_NEW_THING") && !strstr(cfg.ignored, "PATH"),
		"ignored names are listed, old ones with the new name");
	BAD("", "KVPICK_PROT=1", "KVPICK_PROT;unknown variable;KVPICK_PORT");
	BAD("", envf("KVPICK_CONFIG=", file("b.yaml", "DYN_ROUTER_TEMPRATURE: 1\n")),
		"DYN_ROUTER_TEMPRATURE;DYN_ROUTER_TEMPERATURE");
	BAD("", envf("KVPICK_CONFIG=", file("c.yaml", "KVPICK_PORT: [1]\n")), "line 1;not a scalar");
	BAD("", envf("KVPICK_CONFIG=", file("d.yaml", "- a\n")), "not a mapping");
	BAD("", envf("KVPICK_CONFIG=", file("e.yaml", "KVPICK_PORT: 1\nKVPICK_PORT: 2\n")), "given twice");
	BAD("", envf("KVPICK_CONFIG=", file("f.yaml", "KVPICK_PORT: \"1\n")), "KVPICK_CONFIG;line");
	BAD("", "KVPICK_CONFIG=/nonexistent.yaml", "KVPICK_CONFIG=\"/nonexistent.yaml\"");
	good("", envf("KVPICK_CONFIG=", file("g.yaml", "# nothing\n")), "an empty file");
	good("", envf("KVPICK_CONFIG=", file("h.yaml", "DYN_NAMESPACE: x\n")), "an ignored name in the file");
}

static void aliases(void)
{
	good("", "DYN_USE_KV_EVENTS=false", "fallback name");
	ok(!cfg.use_kv_events, "is read");
	good("", "DYN_USE_KV_EVENTS=false;DYN_ROUTER_USE_KV_EVENTS=true", "both names");
	ok(cfg.use_kv_events, "the main name wins");
	good("", "DYN_ROUTER_EVENT_THREADS=2;DYN_EPP_SELECTION_INDEXER_THREADS=3", "threads");
	is_u64(cfg.eff.threads, 3, "the more special name wins");
	good("--threads;9", "DYN_ROUTER_EVENT_THREADS=2;DYN_EPP_SELECTION_INDEXER_THREADS=3",
		"threads by flag");
	is_u64(cfg.eff.threads, 9, "the flag wins");
	good("", "DYN_EPP_SESSION_AFFINITY_MODE=soft", "alias alone");
	is_u64(cfg.session_affinity_mode, KVP_AFFINITY_SOFT, "is read");
	good("", "DYN_EPP_SESSION_AFFINITY_MODE=soft;DYN_ROUTER_SESSION_AFFINITY_MODE=soft",
		"alias and name agree");
	BAD("", "DYN_EPP_SESSION_AFFINITY_MODE=soft;DYN_ROUTER_SESSION_AFFINITY_MODE=hard",
		"DYN_EPP_SESSION_AFFINITY_MODE;DYN_ROUTER_SESSION_AFFINITY_MODE;differ");
	BAD("", "DYN_EPP_ROLE_LABEL=a;DYN_EPP_WORKER_ROLE_LABEL=b",
		"DYN_EPP_ROLE_LABEL;DYN_EPP_WORKER_ROLE_LABEL");
	good("", "RUST_LOG=warn", "bare level in RUST_LOG");
	is_u64(cfg.eff.log_level, KVP_LOG_LEVEL_W, "is the default of the log level");
	good("", "RUST_LOG=warn;KVPICK_LOG_LEVEL=D", "both");
	is_u64(cfg.eff.log_level, KVP_LOG_LEVEL_D, "the own variable wins");
	good("", "RUST_LOG=kv=debug", "a filter");
	is_u64(cfg.eff.log_level, KVP_LOG_LEVEL_I, "any other filter means nothing");
	good("", "DYN_ROUTER_WORKER_SELECTION_POLICY=default;DYN_ROUTER_DECODE_POLICY=reference", "policies");
	ok(cfg.eff.policy[0] == 0 && cfg.eff.policy[2] == 0, "are numbered");
	good("", "KVPICK_SELECTION_POLICY=least_work;DYN_ROUTER_PREFILL_POLICY=default", "another base");
	ok(cfg.eff.policy[0] == 1 && cfg.eff.policy[1] == 0 && cfg.eff.policy[2] == 1,
		"counts where no published name is given");
}

static void sidecar_adapters(void)
{
	bad_as(KVP_BIN_SIDECAR, "--port;8001", "", "DYN_SIDECAR_PORT;DYN_DECODE_ENGINE_PORT");
	bad_as(KVP_BIN_SIDECAR, "--pd-adapter;vllm_nixl", "DYN_VLLM_NIXL_PROTOCOL_VERSION=v2",
		"vllm-v0.29.0-nixl-pull");
	ok(load_as(KVP_BIN_SIDECAR, "", "DYN_VLLM_NIXL_PROTOCOL_VERSION=v2") == KVP_OK,
		"unchecked without the adapter");
	bad_as(KVP_BIN_SIDECAR, "--pd-adapter;trtllm", "KVPICK_EPP_DATA_PARALLEL_SIZE=2",
		"trtllm;DATA_PARALLEL");
	ok(load_as(KVP_BIN_SIDECAR, "--pd-adapter;trtllm", "") == KVP_OK &&
			cfg.eff.sidecar_max_answer_bytes == 33554432,
		"the longest prefill answer depends on the adapter");
	ok(load_as(KVP_BIN_SIDECAR, "--pd-adapter;sglang",
		   "DYN_SIDECAR_MAX_REQUEST_BYTES=5;DYN_SIDECAR_MAX_PREFILL_RESPONSE_BYTES=6") == KVP_OK &&
			cfg.eff.sidecar_max_request_bytes == 33554432 &&
			cfg.eff.sidecar_max_answer_bytes == 33554432,
		"with sglang both limits are fixed");
}

#define EPP                                                                                                  \
	"DYN_EPP_MODE=standalone;DYN_MODEL_NAME=m;DYN_EPP_TOKENIZER_PROTOCOL=vllm-render;"                   \
	"DYN_EPP_TOKENIZER_SERVICE_URL=http://tok:8000/x;DYN_EPP_INFERENCE_POOL_NAME=p;POD_NAMESPACE=n;"     \
	"DYN_KV_CACHE_BLOCK_SIZE=16"

static void rules(void)
{
	BAD("--replica-sync-peers;tcp://a:1", "", "--replica-sync-peers requires --replica-sync-port");
	BAD("--replica-sync-port;8092", "", "KVPICK_PORT;KVPICK_REPLICA_SYNC_PORT;8092");
	BAD("", EPP ";DYN_EPP_PEER_SERVICE=s", "DYN_EPP_PEER_SERVICE;POD_IP");
	BAD("", "DYN_EPP_PEER_SERVICE=s;POD_IP=10.0.0.1;KVPICK_WORKERS_FILE=/f",
		"DYN_EPP_PEER_SERVICE;KVPICK_WORKERS_FILE");
	good("", EPP ";DYN_EPP_PEER_SERVICE=s;POD_IP=10.0.0.1", "peer service");
	ok(cfg.eff.sync_port == 9092 && cfg.eff.peer_on, "turns the sync plane on at the published port");
	BAD("", "KVPICK_SLOT_BEAT_MS=1000", "KVPICK_SLOT_STUCK_MS;KVPICK_SLOT_BEAT_MS");
	BAD("", "KVPICK_RING_UNBLOCK_MS=2000", "KVPICK_RING_UNBLOCK_MS;KVPICK_SLOT_STUCK_MS");
	BAD("", "KVPICK_MAX_RANKS=100", "KVPICK_INDEX_RANKS;KVPICK_MAX_RANKS");
	BAD("", envf("KVPICK_EPP_TLS_CERT_FILE=", file("c.pem", "x")), "CERT_FILE;KEY_FILE");
	BAD("", "KVPICK_EPP_BODY_BUDGET_BYTES=2000", "BUDGET_BYTES;MAX_BODY_BYTES");
	good("", EPP, "an EPP manifest");
	ok(cfg.eff.mode == KVP_MODE_EPP && !cfg.eff.api_port && cfg.eff.metrics_port == 9090 &&
			cfg.eff.discovery_on,
		"starts the EPP role: API off, metrics on, discovery on");
	good("--mode;both", EPP, "both");
	ok(cfg.eff.epp_on && cfg.eff.selection_on && cfg.eff.api_port == 8092, "runs both");
	BAD("--mode;epp",
		"DYN_MODEL_NAME=m;DYN_EPP_TOKENIZER_PROTOCOL=text-blocks;DYN_USE_KV_EVENTS=0;"
		"POD_NAMESPACE=n;DYN_KV_CACHE_BLOCK_SIZE=16",
		"DYN_EPP_INFERENCE_POOL_NAME");
	BAD("--mode;both", "DYN_EPP_TOKENIZER_PROTOCOL=text-blocks;DYN_USE_KV_EVENTS=0", "DYN_MODEL_NAME");
	BAD("--mode;both", "DYN_MODEL_NAME=m", "DYN_EPP_TOKENIZER_PROTOCOL;text-blocks");
	BAD("--mode;both", "DYN_MODEL_NAME=m;DYN_EPP_TOKENIZER_PROTOCOL=vllm-render",
		"DYN_EPP_TOKENIZER_SERVICE_URL");
	BAD("--mode;both", "DYN_MODEL_NAME=m;DYN_EPP_TOKENIZER_PROTOCOL=text-blocks",
		"DYN_EPP_TOKENIZER_PROTOCOL;DYN_USE_KV_EVENTS");
	good("--mode;both", "DYN_MODEL_NAME=m;DYN_EPP_TOKENIZER_PROTOCOL=text-blocks;DYN_USE_KV_EVENTS=0",
		"both, no pool");
	ok(!cfg.eff.discovery_on, "workers come over HTTP: no discovery");
	BAD("", EPP ";DYN_ROUTER_QUEUE_THRESHOLD=4",
		"DYN_EPP_MAX_NUM_BATCHED_TOKENS;DYN_ROUTER_QUEUE_THRESHOLD");
	BAD("",
		EPP ";DYN_ROUTER_QUEUE_THRESHOLD=4;DYN_EPP_TOPOLOGY_MODE=disaggregated;"
		    "DYN_EPP_DECODE_MAX_NUM_BATCHED_TOKENS=9",
		"DYN_EPP_PREFILL_MAX_NUM_BATCHED_TOKENS");
	BAD("", EPP ";KVPICK_EPP_DATA_PARALLEL_SIZE=2", "DATA_PARALLEL_SIZE;KVPICK_EPP_DP_ROUTING");
	BAD("", EPP ";KVPICK_EPP_DATA_PARALLEL_SIZE=3;KVPICK_EPP_DP_ROUTING=port;DYN_EPP_KV_EVENT_PORT=65534",
		"DYN_EPP_KV_EVENT_PORT;65536");
	good("", EPP, "paths of two workers");
	is_str(cfg.epp_disagg_paths, "/completions", "by default those that sidecars share");
	good("", EPP ";KVPICK_EPP_DISAGG_PATHS= /completions , /responses,", "several ends of paths");
	is_str(cfg.epp_disagg_paths, "/completions,/responses", "in one form");
	BAD("", EPP ";KVPICK_EPP_DISAGG_PATHS=/a,completions", "KVPICK_EPP_DISAGG_PATHS;begin with a slash");
	BAD("", EPP ";KVPICK_EPP_DISAGG_PATHS=/completions?x", "KVPICK_EPP_DISAGG_PATHS;no path has");
	BAD("", EPP ";KVPICK_EPP_DISAGG_PATHS=,", "KVPICK_EPP_DISAGG_PATHS;without a member");
	BAD("", EPP ";DYN_EPP_TOPOLOGY_MODE=disaggregated;DYN_EPP_ROLE_LABEL=-x",
		"DYN_EPP_WORKER_ROLE_LABEL");
	good("", EPP ";DYN_EPP_ROLE_LABEL=-x", "the role label is not looked at in aggregated topology");
	BAD("", EPP ";DYN_EPP_TOPOLOGY_MODE=disaggregated;KVPICK_REPLICA_SYNC_PORT=9094",
		"KVPICK_REPLICA_SYNC_PORT_PREFILL;9094");
	BAD("", EPP ";KVPICK_EPP_HEALTH_PORT=9002", "KVPICK_EPP_PORT;KVPICK_EPP_HEALTH_PORT");
	BAD("", EPP ";KVPICK_EPP_LISTEN=127.0.0.1:9090,[::1]:9090", "KVPICK_EPP_LISTEN;DYN_EPP_METRICS_PORT");
	bad_as(KVP_BIN_SIDECAR, "", "DYN_SIDECAR_PD_ADAPTER=vllm_nixl;DYN_SIDECAR_PD_BACKEND=sglang",
		"DYN_SIDECAR_PD_ADAPTER;DYN_SIDECAR_PD_BACKEND");
	bad_as(KVP_BIN_SIDECAR, "", "KVPICK_SIDECAR_ENGINE_BASE_PATH=v1",
		"KVPICK_SIDECAR_ENGINE_BASE_PATH;slash");
	bad_as(KVP_BIN_SIDECAR, "", "KVPICK_SIDECAR_ENGINE_BASE_PATH=/a?b",
		"KVPICK_SIDECAR_ENGINE_BASE_PATH;byte");
	ok(load_as(KVP_BIN_SIDECAR, "", "ENABLE_PREFILLER_SAMPLING=1;INFERENCE_POOL=a") == KVP_OK &&
			!strcmp(cfg.ignored, "INFERENCE_POOL(now:KVPICK_SIDECAR_PREFILL_ALLOWLIST) "
					     "ENABLE_PREFILLER_SAMPLING(with:KVPICK_SIDECAR_PROFILE=llmd)"),
		"llm-d's names without effect are listed with what gives them one");
	ok(load_as(KVP_BIN_SUPERVISOR, "", "INFERENCE_POOL=a;ENABLE_PREFILLER_SAMPLING=1") == KVP_OK &&
			!cfg.ignored[0],
		"in the sidecar only");
}

/* The policies that users of llm-d and trtllm-serve know, and the roles' words. */
/* Every time is used in nanoseconds somewhere, with a clock's time added, and some doubled. */
static void times(void)
{
	uint32_t cnt = 0;
	for (int i = 0; i < KVP_CFG_CNT; i++) {
		const struct kvp_cfg_row *r = &kvp_cfg_row[i];
		const char *unit = strrchr(r->name, '_');
		uint64_t ns = 0;
		if (unit && !strcmp(unit, "_MS"))
			ns = 1000000;
		if (unit && !strcmp(unit, "_SECS"))
			ns = 1000000000;
		if (r->type != KVP_CFG_INT || !ns)
			continue;
		ok(r->umax <= UINT64_MAX / 8 / ns, "%s up to %llu", r->name, (unsigned long long)r->umax);
		cnt++;
	}
	ok(cnt > 20, "%u times", cnt);
	good("",
		"DYN_ROUTER_ACTIVE_REQUEST_EXPIRY_SECS=1000000000;"
		"DYN_EPP_RECOVERY_HTTP_TIMEOUT_MS=1000000000000",
		"the longest times");
	BAD("", "DYN_ROUTER_ACTIVE_REQUEST_EXPIRY_SECS=1000000001", "EXPIRY_SECS;1..1000000000");
	BAD("", "DYN_ROUTER_ACTIVE_REQUEST_EXPIRY_SECS=18446744074", "EXPIRY_SECS;out of range");
	BAD("", "DYN_EPP_RECOVERY_HTTP_TIMEOUT_MS=1000000000001", "TIMEOUT_MS;out of range");
}

/* What would be accepted and have no effect. */
static void without_effect(void)
{
	BAD("", "DYN_EPP_PEER_SERVICE=s;POD_IP=10.0.0.1", "DYN_EPP_PEER_SERVICE;KVPICK_REPLICA_SYNC_PEERS");
	BAD("", "KVPICK_MODE=both;DYN_MODEL_NAME=m;DYN_EPP_TOKENIZER_PROTOCOL=text-blocks;"
		"DYN_USE_KV_EVENTS=false;DYN_EPP_PEER_SERVICE=s;POD_IP=10.0.0.1",
		"DYN_EPP_PEER_SERVICE;DYN_EPP_INFERENCE_POOL_NAME");
	BAD("", EPP ";KVPICK_EPP_KV_TRANSFER_ENFORCEMENT=required",
		"KVPICK_EPP_KV_TRANSFER_ENFORCEMENT;KVPICK_EPP_KV_TRANSFER_DOMAIN_LABEL");
	BAD("", EPP ";KVPICK_EPP_KV_TRANSFER_DOMAIN_LABEL=zone",
		"KVPICK_EPP_KV_TRANSFER_DOMAIN_LABEL;KVPICK_EPP_KV_TRANSFER_ENFORCEMENT");
	good("", EPP ";KVPICK_EPP_KV_TRANSFER_DOMAIN_LABEL=zone;KVPICK_EPP_KV_TRANSFER_ENFORCEMENT=preferred",
		"a domain and its rule");
	good("", EPP ";KVPICK_EPP_KV_TRANSFER_ENFORCEMENT=required;KVPICK_WORKERS_FILE=/dev/null",
		"domains of a workers' file");
}

static void lists(void)
{
	char env[4096], ok_one[1024], too_long[1025];
#define SYNC "KVPICK_REPLICA_SYNC_PORT=9;KVPICK_REPLICA_SYNC_PEERS="
	BAD("", SYNC "tcp://a:1,tcp://*:9092", "KVPICK_REPLICA_SYNC_PEERS;wildcard");
	BAD("", SYNC "tcp://a:0", "KVPICK_REPLICA_SYNC_PEERS;port 0");
	good("", SYNC "tcp://a:1,tcp://[::1]:2,ipc:///x", "peers");
	BAD("", EPP ";KVPICK_EPP_LISTEN=,", "KVPICK_EPP_LISTEN;without a member");
	BAD("", EPP ";KVPICK_EPP_TAINT_LABELS= , ,", "KVPICK_EPP_TAINT_LABELS;without a member");
	BAD("", EPP ";KVPICK_EPP_DATA_PARALLEL_SIZE=513", "KVPICK_EPP_DATA_PARALLEL_SIZE;1..512");
	BAD("", "KVPICK_INDEXER_PEERS=,", "KVPICK_INDEXER_PEERS;without a member");
	good("", EPP ";KVPICK_EPP_LISTEN=;KVPICK_EPP_TAINT_LABELS=", "empty lists are not set");
	memset(ok_one, 'h', sizeof(ok_one) - 1);
	memcpy(ok_one, "http://", 7);
	ok_one[1023] = 0;
	snprintf(too_long, sizeof(too_long), "%sh", ok_one);
	snprintf(env, sizeof(env), "KVPICK_INDEXER_PEERS=%s,http://b:1", ok_one);
	good("", env, "a member as long as may be");
	snprintf(env, sizeof(env), "KVPICK_INDEXER_PEERS=http://a:1,%s,http://b:1", too_long);
	ok(LOAD("", env) == KVP_ERR_INVAL && strstr(err.text, "a member is too long"),
		"a member that no reader would take, and behind which none would be found");
}

static void other_pickers(void)
{
#define COND "DYN_ROUTER_CONDITIONAL_DISAGG=true;DYN_ROUTER_CONDITIONAL_DISAGG_POLICY="
#define NON_CACHED "KVPICK_CONDITIONAL_DISAGG_NON_CACHED_TOKENS"
#define LENGTH "KVPICK_CONDITIONAL_DISAGG_MAX_LOCAL_PREFILL_LENGTH"
	BAD("", COND "non_cached_tokens", "POLICY=non_cached_tokens requires " NON_CACHED);
	BAD("", COND "max_local_prefill_length;" NON_CACHED "=5",
		"POLICY=max_local_prefill_length requires " LENGTH);
	BAD("", COND "non_cached_tokens;" NON_CACHED "=-1", NON_CACHED ";-1");
	BAD("", COND "max_local_prefill_length;" LENGTH "=-1", LENGTH ";-1");
	BAD("", COND "prefix-based-pd-decider", "isl_bounding;max_local_prefill_length");
	good("", COND "non_cached_tokens;" NON_CACHED "=0", "llm-d's threshold may be 0: never");
	good("", COND "max_local_prefill_length;" LENGTH "=0", "and so may be the length");
	good("", "DYN_ROUTER_CONDITIONAL_DISAGG_POLICY=non_cached_tokens",
		"what is switched off needs no threshold");
	good("", EPP ";DYN_EPP_TOPOLOGY_MODE=disaggregated;DYN_ROUTER_PREDICTED_TTL_SECS=5",
		"Role config: predicted TTL: the settings of both roles are valid with it");
	good("",
		EPP ";DYN_EPP_TOPOLOGY_MODE=disaggregated;DYN_ROUTER_PREFILL_LOAD_MODEL=none;"
		    "DYN_EPP_SELECTION_HTTP_PORT=8093",
		"Role config: prefill load model and serve-indexer");
	ok(cfg.eff.disaggregated && cfg.prefill_load_model == 0 && cfg.eff.dump_port == 8093,
		"Role config: are inherited by both");
	BAD("", EPP ";DYN_EPP_TOPOLOGY_MODE=disaggregated;DYN_ROUTER_PREFILL_LOAD_MODEL=aic", "LOAD_MODEL");
	good("", EPP, "roles' words");
	ok(cfg.role_vocabulary == KVP_ROLES_DYN && !strcmp(cfg.worker_role_label, "nvidia.com/role"),
		"are dyn's by default");
	good("", EPP ";KVPICK_EPP_ROLE_VOCABULARY=llmd", "llm-d's words");
	is_str(cfg.worker_role_label, "llm-d.ai/role", "come with llm-d's label");
	good("", EPP ";KVPICK_EPP_ROLE_VOCABULARY=llmd;DYN_EPP_ROLE_LABEL=a/b", "unless another one");
	is_str(cfg.worker_role_label, "a/b", "is set, by either name");
	good("", EPP ";KVPICK_EPP_ROLE_VOCABULARY=llmd;DYN_EPP_WORKER_ROLE_LABEL=nvidia.com/role", "or the");
	is_str(cfg.worker_role_label, "nvidia.com/role", "default itself");
	BAD("", EPP ";KVPICK_EPP_ROLE_VOCABULARY=llm-d", "ROLE_VOCABULARY;dyn, llmd");
}

static void json_form(void)
{
#define J "DYN_ROUTER_CONDITIONAL_DISAGG_CONFIG="
	good("",
		J "{\"policy\":\"isl_or_load\",\"eff_isl_threshold\":10,\"prefill_busy_threshold\":0.5,"
		  "\"decode_busy_threshold\":null}",
		"JSON form");
	ok(cfg.conditional_disagg_policy == KVP_COND_ISL_OR_LOAD && cfg.conditional_disagg_eff_isl == 10 &&
			cfg.prefill_busy_threshold == 0.5 && !kvp_config_has(cfg.decode_busy_threshold) &&
			cfg.conditional_disagg_ratio == 0.7,
		"sets what it names");
	good("", J "{\"eff_isl_threshold\":10};DYN_ROUTER_CONDITIONAL_DISAGG_EFF_ISL_THRESHOLD=20",
		"JSON and variable");
	is_u64(cfg.conditional_disagg_eff_isl, 20, "the single variable wins");
	good("",
		J "{\"policy\":\"non_cached_tokens\",\"non_cached_tokens\":512,"
		  "\"max_local_prefill_length\":null};DYN_ROUTER_CONDITIONAL_DISAGG=true",
		"the thresholds of other pickers");
	ok(cfg.conditional_disagg_policy == KVP_COND_NON_CACHED_TOKENS &&
			cfg.conditional_disagg_non_cached == 512 &&
			cfg.conditional_disagg_local_max == KVP_CONFIG_UNSET,
		"are set; null leaves a number without default alone");
	BAD("", J "{\"eff_isl_threshold\":null}", "eff_isl_threshold");
	BAD("", J "{\"non_cached_tokens\":-1}", "non_cached_tokens;-1");
	BAD("", J "{\"nope\":1}", "nope;unknown member");
	BAD("", J "{\"eff_isl_threshold\":\"10\"}", "eff_isl_threshold;wrong type");
	BAD("", J "{\"policy\":5}", "policy;wrong type");
	BAD("", J "{\"eff_isl_ratio_threshold\":2}", "eff_isl_ratio_threshold;0..1");
	BAD("", J "[1]", "JSON object");
	BAD("", J "{\"policy\":", "CONDITIONAL_DISAGG_CONFIG");
}

static char *text_of(void (*print)(FILE *))
{
	char *text = NULL;
	size_t n;
	FILE *f = open_memstream(&text, &n);
	print(f);
	fclose(f);
	return text;
}
static void help(FILE *f)
{
	kvp_config_print_help(f, KVP_BIN_SUPERVISOR);
}
static void help_httpd(FILE *f)
{
	kvp_config_print_help(f, KVP_BIN_HTTPD);
}
static void check(FILE *f)
{
	kvp_config_print_check(f, &cfg);
}

static void texts(void)
{
	char env[512], v[256];
	snprintf(env, sizeof(env), "DYN_NAMESPACE=n;DYN_ROUTER_TEMPERATURE=0.1;KVPICK_API_TOKEN_FILE=%s",
		file("token", "s3cret"));
	good("--port;9", env, "for the texts");
	char *t = text_of(check);
	ok(strstr(t, "KVPICK_PORT=9  # command line\n") &&
			strstr(t, "DYN_ROUTER_TEMPERATURE=0.1  # environment\n") &&
			strstr(t, "KVPICK_BIND=0.0.0.0  # default\n") &&
			strstr(t, "# ignored: DYN_NAMESPACE\n"),
		"--check-config shows value and source");
	ok(strstr(t, "KVPICK_API_TOKEN_FILE=set  #") && !strstr(t, "token\n") && !strstr(t, "SIDECAR"),
		"secrets only as set; settings of others not at all");
	is_str(kvp_config_value(&cfg, KVP_CFG_queue_threshold, v, sizeof(v)), "unset", "an optional value");
	free(t);
	t = text_of(help);
	ok(strstr(t, "--port, KVPICK_PORT") && strstr(t, "--epp-port, --grpc-port, KVPICK_EPP_PORT") &&
			strstr(t, "0..65535") && !strstr(t, "DYN_SIDECAR_PORT"),
		"help names flags, ranges");
	free(t);
	t = text_of(help_httpd);
	ok(strstr(t, "KVPICK_PORT") && !strstr(t, "KVPICK_KV_RECV_HWM"), "help of a child has its subset");
	free(t);
	t = text_of(kvp_config_print_markdown);
	int all = 1;
	for (int i = 0; i < KVP_CFG_CNT; i++) {
		snprintf(v, sizeof(v), "| `%s` |", kvp_config_name((enum kvp_config_id)i));
		all &= strstr(t, v) != NULL;
	}
	ok(all, "the README tables have every setting");
	free(t);
}

static void memory_file(void)
{
	static struct kvp_config copy;
	good("--port;9;--log-level;W", "", "to hand over");
	int fd = kvp_config_to_memfd(&cfg);
	ok(fd >= 0, "memory file");
	memset(&copy, 1, sizeof(copy));
	ok(kvp_config_from_fd(fd, &copy) == KVP_OK && memcmp(&copy, &cfg, sizeof(cfg)) == 0,
		"comes back unchanged");
	ok(pwrite(fd, "x", 1, 0) < 0 && ftruncate(fd, 10) < 0, "nobody can change it");
	close(fd);
	fd = memfd_create("not-sealed", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	ok(write(fd, &cfg, sizeof(cfg)) == (ssize_t)sizeof(cfg) &&
			kvp_config_from_fd(fd, &copy) == KVP_ERR_LAYOUT,
		"an unsealed file is refused");
	close(fd);
	cfg.layout ^= 1;
	fd = kvp_config_to_memfd(&cfg);
	ok(kvp_config_from_fd(fd, &copy) == KVP_ERR_LAYOUT, "another build's structure is refused");
	close(fd);
	char buf[256], sub[96], want[128];
	snprintf(sub, sizeof(sub), "%s/run", dir);
	mkdir(sub, 0700);
	snprintf(want, sizeof(want), "%s/kvpick", sub);
	kvp_config_run_dir(sub, "/nonexistent", 7, buf, sizeof(buf));
	is_str(buf, want, "run directory below a writable parent");
	kvp_config_run_dir("/nonexistent", sub, 7, buf, sizeof(buf));
	is_str(buf, want, "else below XDG_RUNTIME_DIR");
	kvp_config_run_dir("/nonexistent", NULL, 7, buf, sizeof(buf));
	is_str(buf, "/tmp/kvpick-7", "else in /tmp");
	good("--run-dir;/x/y", "XDG_RUNTIME_DIR=/z", "run dir given");
	is_str(cfg.run_dir, "/x/y", "is taken as given");
}

/* {"NAME": "value", ...} and a list of arguments into the two lists of kvp_config_load. */
static int load_vector(struct kvp_json_val env, const struct kvp_json_val *args)
{
	static char text[32][256];
	const char *ev[33], *av[32];
	int n = 0, a = 0;
	struct kvp_json_iter it = kvp_json_each(env);
	while (kvp_json_next(&it)) {
		snprintf(text[n], sizeof(text[0]), "%.*s=%s", (int)it.key_len, it.key, vec_text(it.val));
		ev[n] = text[n];
		n++;
	}
	ev[n] = NULL;
	if (args) {
		it = kvp_json_each(*args);
		while (kvp_json_next(&it))
			av[a++] = vec_text(it.val);
	}
	return kvp_config_load(KVP_BIN_SUPERVISOR, a, av, ev, &cfg, NULL, &err);
}

static void scheduling_vectors(struct kvp_json *p)
{
	struct kvp_json_iter v = kvp_json_each(vec_get(vec_load(p, "scheduling.json"), "vectors"));
	int rows = 0;
	while (kvp_json_next(&v)) {
		const char *kind = vec_str(v.val, "kind");
		int start = !strcmp(kind, "config_start"), weight = !strcmp(kind, "deprecated_weight");
		if (!start && !weight)
			continue;
		struct kvp_json_iter row = kvp_json_each(vec_get(v.val, "rows"));
		while (kvp_json_next(&row)) {
			struct kvp_json_val m;
			int want = 1, rc = load_vector(vec_get(row.val, "config"), NULL);
			if (vec_has(row.val, "starts", &m))
				kvp_json_bool(m, &want);
			ok((rc == KVP_OK) == want, "%s row %d %s", vec_str(v.val, "id"), rows++,
				want ? "starts" : "does not start");
			if (weight && want)
				ok(cfg.eff.overlap_score_credit ==
							vec_real(vec_get(row.val, "overlap_score_credit")) &&
						cfg.eff.prefill_load_scale ==
							vec_real(vec_get(row.val, "prefill_load_scale")),
					"credit and scale of that row");
		}
	}
	ok(rows > 20, "%d rows were read", rows);
}

static void api_vectors(struct kvp_json *p)
{
	struct kvp_json_iter s = kvp_json_each(vec_get(vec_load(p, "selection_api.json"), "scenarios"));
	int failing = 0, starting = 0;
	while (kvp_json_next(&s)) {
		struct kvp_json_val m, args, env;
		/* Files that a scenario writes are the policy parser's business. */
		if (vec_has(s.val, "files", &m) && kvp_json_len(m) > 0)
			continue;
		int fail = vec_has(s.val, "expect_start", &m) && !strcmp(vec_text(m), "fail");
		int has_args = vec_has(s.val, "args", &args);
		if (!vec_has(s.val, "env", &env))
			env = (struct kvp_json_val){0};
		int rc = env.doc ? load_vector(env, has_args ? &args : NULL) : KVP_OK;
		fail ? failing++ : starting++;
		err.text[strcspn(err.text, "\n")] = 0;
		if ((rc != KVP_OK) != fail)
			ok(0, "scenario %s: %s", vec_str(s.val, "id"), err.text);
		else if (fail)
			ok(err.cnt == 1, "scenario %s does not start: %s", vec_str(s.val, "id"), err.text);
	}
	ok(failing == 10 && starting > 50, "%d scenarios do not start, %d do", failing, starting);
}

int main(void)
{
	snprintf(dir, sizeof(dir), "/tmp/kvp-t-config-XXXXXX");
	if (!ok(mkdtemp(dir) != NULL, "a directory for files"))
		return done();
	struct kvp_json *p = kvp_json_new();
	precedence();
	flags();
	bad_values();
	refused_and_ignored();
	aliases();
	sidecar_adapters();
	rules();
	times();
	without_effect();
	lists();
	other_pickers();
	json_form();
	texts();
	memory_file();
	scheduling_vectors(p);
	api_vectors(p);
	kvp_json_free(p);
	char cmd[96];
	snprintf(cmd, sizeof(cmd), "rm -r %s", dir);
	ok(system(cmd) == 0, "cleaned up");
	return done();
}
