/* kvpick-sim — simulated inference engines: OpenAI endpoints, prefix cache, KV events, one virtual clock. */
#include "bench/sim/host.h"
#include "bench/sim/opt.h"
#include <errno.h>
#include <getopt.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <unistd.h>

static const char usage[] =
	"usage: kvpick-sim [options]\n"
	"  --engines N             engines in this process, default 1\n"
	"  --ip IP                 address to listen on, default 127.0.0.1\n"
	"  --http-port P           engine i listens on P + i; 0, the default: any free port\n"
	"  --event-port P          the same for KV events, --replay-port P for replay\n"
	"  --model NAME            default \"default\"\n"
	"  --block-size N          tokens a block, default 512\n"
	"  --blocks N              cache capacity, default 2000\n"
	"  --time-scale S          virtual seconds a second, default 1\n"
	"  --kv-events on|off      default on\n"
	"  --event-form array|map  shape of the events, default array\n"
	"  --replay-form topic|plain   replay messages with a topic frame or without, default topic\n"
	"  --topic TEXT            topic frame, default \"kv-events\"\n"
	"  --replay-batches N      batches kept for replay, default 10000\n"
	"  --replay-mib N          and at most so many MiB of them an engine, default 64\n"
	"  --step-us N             fixed part of a step, default 10000\n"
	"  --rate N                batch tokens per second, default 16000\n"
	"  --decode-us N           per decoding request and step, default 100\n"
	"  --kv-token-ns N         per live KV token and step, default 30\n"
	"  --chunk N               prompt tokens a step, default 8192\n"
	"  --max-running N         requests in a batch, default 0 = no limit\n"
	"  --turn-us N             least wall time between wake-ups at a time scale over 1, default 1000\n"
	"  --stream-ms N           least wall time between two pieces of an answer, default 0, at a scale "
	"over 1: 50\n"
	"  --pd PROTOCOL           engines in two roles: off (default), vllm, sglang, trtllm\n"
	"  --pd-prefill N          the first N engines prefill, the others decode, default 1\n"
	"  --pd-fault KIND         error, hang, reset, bad, cut, refuse instead of an answer\n"
	"  --pd-fault-role ROLE    prefill (default) or decode\n"
	"  --pd-fault-every N      one request in N, default 10\n"
	"  --die-with-parent       end when the parent process ends\n"
	"Prints one line an engine when it listens, then \"ready engines=N\". Ends at SIGTERM or SIGINT.\n";

enum {
	O_ENGINES = 256,
	O_IP,
	O_HTTP,
	O_EVENT,
	O_REPLAY,
	O_MODEL,
	O_BLOCK,
	O_BLOCKS,
	O_SCALE,
	O_KV,
	O_FORM,
	O_RFORM,
	O_TOPIC,
	O_BATCHES,
	O_MIB,
	O_STEP,
	O_RATE,
	O_DECODE,
	O_KVTOK,
	O_CHUNK,
	O_RUNNING,
	O_TURN,
	O_STREAM,
	O_PD,
	O_PD_PREFILL,
	O_PD_FAULT,
	O_PD_ROLE,
	O_PD_EVERY,
	O_DIE,
	O_HELP
};
static const struct option options[] = {{"engines", 1, 0, O_ENGINES}, {"ip", 1, 0, O_IP},
	{"http-port", 1, 0, O_HTTP}, {"event-port", 1, 0, O_EVENT}, {"replay-port", 1, 0, O_REPLAY},
	{"model", 1, 0, O_MODEL}, {"block-size", 1, 0, O_BLOCK}, {"blocks", 1, 0, O_BLOCKS},
	{"time-scale", 1, 0, O_SCALE}, {"kv-events", 1, 0, O_KV}, {"event-form", 1, 0, O_FORM},
	{"replay-form", 1, 0, O_RFORM}, {"topic", 1, 0, O_TOPIC}, {"replay-batches", 1, 0, O_BATCHES},
	{"replay-mib", 1, 0, O_MIB}, {"step-us", 1, 0, O_STEP}, {"rate", 1, 0, O_RATE},
	{"decode-us", 1, 0, O_DECODE}, {"kv-token-ns", 1, 0, O_KVTOK}, {"chunk", 1, 0, O_CHUNK},
	{"max-running", 1, 0, O_RUNNING}, {"turn-us", 1, 0, O_TURN}, {"stream-ms", 1, 0, O_STREAM},
	{"pd", 1, 0, O_PD}, {"pd-prefill", 1, 0, O_PD_PREFILL}, {"pd-fault", 1, 0, O_PD_FAULT},
	{"pd-fault-role", 1, 0, O_PD_ROLE}, {"pd-fault-every", 1, 0, O_PD_EVERY},
	{"die-with-parent", 0, 0, O_DIE}, {"help", 0, 0, O_HELP}, {0, 0, 0, 0}};

static const char *const kv_words[] = {"on", "off", NULL};
static const char *const form_words[] = {"array", "map", NULL};
static const char *const replay_words[] = {"topic", "plain", NULL};

static const char *const pd_words[] = {"off", "vllm", "sglang", "trtllm", NULL};
static const char *const fault_words[] = {"none", "error", "hang", "reset", "bad", "cut", "refuse", NULL};
static const char *const role_words[] = {"prefill", "decode", NULL};

static struct kvp_loop *loop;

static void on_signal(int sig)
{
	(void)sig;
	kvp_loop_stop(loop);
}

#define STREAM_UNSET UINT64_MAX

static void take_engine(struct kvp_sim_cfg *e, int opt, const char *name, const char *v)
{
	switch (opt) {
	case O_BLOCK:
		e->block_size_tok = (uint32_t)kvp_opt_u64(name, v, 1, 65536);
		break;
	case O_BLOCKS:
		e->block_max = (uint32_t)kvp_opt_u64(name, v, 1, 1u << 24);
		break;
	case O_STEP:
		e->step_ns = 1000 * kvp_opt_u64(name, v, 1, 60000000);
		break;
	case O_RATE:
		e->rate_tok_s = kvp_opt_u64(name, v, 1, 1000000000);
		break;
	case O_DECODE:
		e->decode_ns = 1000 * kvp_opt_u64(name, v, 0, 1000000);
		break;
	case O_KVTOK:
		e->kv_tok_ns = kvp_opt_u64(name, v, 0, 1000000);
		break;
	case O_CHUNK:
		e->chunk_tok = (uint32_t)kvp_opt_u64(name, v, 1, 1u << 24);
		break;
	case O_RUNNING:
		e->running_max = (uint32_t)kvp_opt_u64(name, v, 0, 1u << 20);
		break;
	}
}

static void take_pd(struct kvp_pd_cfg *pd, int opt, const char *name, const char *v)
{
	switch (opt) {
	case O_PD:
		pd->proto = (enum kvp_pd_proto)kvp_opt_word(name, v, pd_words);
		break;
	case O_PD_PREFILL:
		pd->prefill_cnt = (uint32_t)kvp_opt_u64(name, v, 0, 1024);
		break;
	case O_PD_FAULT:
		pd->fault = (enum kvp_pd_fault)kvp_opt_word(name, v, fault_words);
		break;
	case O_PD_ROLE:
		pd->fault_role = (enum kvp_pd_role)kvp_opt_word(name, v, role_words);
		break;
	case O_PD_EVERY:
		pd->fault_every = (uint32_t)kvp_opt_u64(name, v, 1, 1u << 30);
		break;
	}
}

static void take_option(struct kvp_host_cfg *c, int opt, const char *name, const char *v)
{
	switch (opt) {
	case O_ENGINES:
		c->engine_cnt = (uint32_t)kvp_opt_u64(name, v, 1, 1024);
		break;
	case O_IP:
		c->ip = v;
		break;
	case O_HTTP:
		c->http_port = (uint16_t)kvp_opt_u64(name, v, 0, 65535);
		break;
	case O_EVENT:
		c->publish.event_port = (uint16_t)kvp_opt_u64(name, v, 0, 65535);
		break;
	case O_REPLAY:
		c->publish.replay_port = (uint16_t)kvp_opt_u64(name, v, 0, 65535);
		break;
	case O_MODEL:
		c->model = v;
		break;
	case O_SCALE:
		c->scale = kvp_opt_f64(name, v, 0.001, 10000);
		break;
	case O_KV:
		c->events = kvp_opt_word(name, v, kv_words) ? KVP_HOST_EVENTS_OFF : KVP_HOST_EVENTS_ON;
		break;
	case O_FORM:
		c->publish.form = (enum kvp_publish_form)kvp_opt_word(name, v, form_words);
		break;
	case O_RFORM:
		c->publish.replay = (enum kvp_publish_replay)kvp_opt_word(name, v, replay_words);
		break;
	case O_TOPIC:
		c->publish.topic = v;
		break;
	case O_BATCHES:
		c->publish.kept_max = (uint32_t)kvp_opt_u64(name, v, 1, 1u << 20);
		break;
	case O_MIB:
		c->publish.kept_max_bytes = kvp_opt_u64(name, v, 1, 65536) << 20;
		break;
	case O_TURN:
		c->turn_ns = 1000 * kvp_opt_u64(name, v, 0, 1000000);
		break;
	case O_STREAM:
		c->stream_ns = 1000000 * kvp_opt_u64(name, v, 0, 60000);
		break;
	case O_DIE:
		prctl(PR_SET_PDEATHSIG, SIGTERM);
		break;
	case O_HELP:
		fputs(usage, stdout);
		exit(KVP_EXIT_OK);
	case '?':
		fputs("kvpick-sim --help lists the options\n", stderr);
		exit(KVP_EXIT_CONFIG);
	default:
		take_engine(&c->engine, opt, name, v);
		take_pd(&c->pd, opt, name, v);
	}
}

static void print_ports(const struct kvp_host *h, const struct kvp_host_cfg *c)
{
	for (uint32_t i = 0; i < c->engine_cnt; i++) {
		struct kvp_host_ports p;
		kvp_host_ports(h, i, &p);
		printf("engine=%u http=%s:%u", i, c->ip, p.http);
		if (c->events == KVP_HOST_EVENTS_ON)
			printf(" events=tcp://%s:%u replay=tcp://%s:%u", c->ip, p.event, c->ip, p.replay);
		putchar('\n');
	}
	printf("ready engines=%u\n", c->engine_cnt);
	fflush(stdout);
}

int main(int argc, char **argv)
{
	struct kvp_host *h;
	struct kvp_host_cfg c = {.ip = "127.0.0.1",
		.model = "default",
		.engine_cnt = 1,
		.scale = 1,
		.turn_ns = 1000000,
		.stream_ns = STREAM_UNSET,
		.pd = {.prefill_cnt = 1, .fault_every = 10},
		.publish = {.topic = "kv-events", .kept_max = 10000, .kept_max_bytes = 64ull << 20}};
	kvp_sim_cfg_default(&c.engine);
	for (int opt, at = -1; (opt = getopt_long(argc, argv, "", options, &at)) != -1; at = -1)
		take_option(&c, opt, at >= 0 ? options[at].name : "", optarg);
	if (optind < argc)
		kvp_opt_bad("", argv[optind], "an option");
	if (c.stream_ns == STREAM_UNSET)
		c.stream_ns = c.scale > 1 ? 50000000 : 0;
	struct rlimit nofile;
	if (getrlimit(RLIMIT_NOFILE, &nofile) == 0) { /* many engines, many connections */
		nofile.rlim_cur = nofile.rlim_max;
		setrlimit(RLIMIT_NOFILE, &nofile);
	}
	signal(SIGPIPE, SIG_IGN);
	int rc = kvp_loop_open(&loop, 0);
	if (!rc)
		rc = kvp_host_open(loop, &c, &h);
	if (rc) {
		fprintf(stderr, "kvpick-sim: %s%s%s\n", kvp_strerror(rc), rc == KVP_ERR_SYS ? ": " : "",
			rc == KVP_ERR_SYS ? strerror(errno) : "");
		return rc == KVP_ERR_INVAL ? KVP_EXIT_CONFIG : KVP_EXIT_AGAIN;
	}
	struct sigaction sa = {.sa_handler = on_signal};
	sigaction(SIGTERM, &sa, NULL);
	sigaction(SIGINT, &sa, NULL);
	print_ports(h, &c);
	rc = kvp_loop_run(loop);
	kvp_host_close(h);
	kvp_loop_close(loop);
	return rc ? KVP_EXIT_AGAIN : KVP_EXIT_OK;
}
