/* What the Endpoint Picker does with a long prompt before it selects: body, tokenizer's answer, call.
 *
 * Usage      b_tok [token ids of an answer, default 55000] [body bytes, default 220000] [calls at once, 20]
 * Prints     us = processor time of one piece of work (a neighbour's load does not change it), ops_cpu_s =
 *            pieces a second of it.
 * Cases      body: headers and a chat body of that size, parsed. text: the same and its text blocks hashed.
 *            tokens: a body that carries the ids. ids: the answer's JSON to token ids, by kvp_json_ids_read
 *            and, for comparison, by the parser's tree alone. call: all of a call of the service over
 *            loopback, on the calling side (send the body, receive and read the answer).
 */
#include "daemons/extproc/request.c"
#include "daemons/extproc/tokenizer.c"
#include "daemons/extproc/tokenizer_parts.c"

#include <signal.h>
#include <sys/wait.h>

#include "bench/bench.h"
#include "tests/tokenizer_sim.h"

static struct kvp_ask_parser parser;
static char *body, *answer, *token_body;
static uint64_t body_len, answer_len, token_len, sink;
static uint32_t block_size = 16;

static void report(const char *name, double ns, double bytes)
{
	printf("b_tok case=%s us=%.1f ops_cpu_s=%.0f gb_s=%.2f\n", name, ns / 1e3, 1e9 / ns, bytes / ns);
	fflush(stdout);
}

static double cpu_ns(void (*fn)(void))
{
	double t[BENCH_REPEATS];
	uint64_t calls = 1;
	for (int i = -1; i < BENCH_REPEATS;) {
		uint64_t start = bench_cpu_ns();
		for (uint64_t k = 0; k < calls; k++)
			fn();
		uint64_t took = bench_cpu_ns() - start;
		if (took < BENCH_NS_MIN && i < 0) {
			calls *= 2;
			continue;
		}
		if (i >= 0)
			t[i] = (double)took / (double)calls;
		i++;
	}
	return bench_median(t, BENCH_REPEATS);
}

static struct kvp_ask ask;

static void parse_as(const char *path, const char *text, uint64_t len)
{
	const struct kvp_ask_field f[] = {{{":method", 7}, {"POST", 4}}, {{":path", 5}, {path, strlen(path)}},
		{{"content-type", 12}, {"application/json", 16}}, {{"x-request-id", 12}, {"r-1", 3}},
		{{"user-agent", 10}, {"bench", 5}}, {{"x-dynamo-session-id", 19}, {"s-1", 3}}};
	kvp_ask_reset(&ask);
	if (kvp_ask_head(&parser, f, 6, &ask) || kvp_ask_body(&parser, &ask, text, len)) {
		fprintf(stderr, "b_tok: %s\n", ask.err);
		exit(1);
	}
}

static void run_body(void)
{
	parse_as("/v1/chat/completions", body, body_len);
	sink += ask.source;
}

static void run_text(void)
{
	struct kvp_prompt q;
	parse_as("/v1/chat/completions", body, body_len);
	kvp_ask_prompt(&parser, &ask, body, body_len, NULL, block_size, &q);
	sink += q.seq_hash[q.seq_hash_cnt - 1];
}

static void run_tokens(void)
{
	struct kvp_prompt q;
	parse_as("/v1/completions", token_body, token_len);
	kvp_ask_prompt(&parser, &ask, token_body, token_len, NULL, block_size, &q);
	sink += q.token[q.token_cnt - 1];
}

static void run_ids(void)
{
	if (kvp_json_ids_read(parser.json, answer, answer_len, "token_ids", &parser.ids, NULL))
		exit(1);
	sink += parser.ids.id[parser.ids.cnt - 1];
}

static void run_tree(void)
{
	struct kvp_json_val root, v;
	size_t n;
	if (kvp_json_parse_slack(
		    parser.json, answer, answer_len, KVP_JSON_DEPTH_MAX, KVP_JSON_HAS_SLACK, &root, NULL) ||
		kvp_json_get(root, "token_ids", &v) || kvp_json_u32s(v, parser.ids.id, parser.ids.cap, &n))
		exit(1);
	sink += parser.ids.id[n - 1];
}

/* -- calls -- */

static struct kvp_loop *loop;
static struct kvp_tkz *tkz;
static uint64_t done_cnt, left, parse_sum_ns;

static void one_more(void);

static void on_ids(void *ctx, const struct kvp_tkz_answer *a)
{
	(void)ctx;
	if (a->end != KVP_TKZ_OK) {
		fprintf(stderr, "b_tok: end %d: %s\n", (int)a->end, a->detail);
		exit(1);
	}
	sink += a->tokens.token[a->tokens.token_cnt - 1];
	parse_sum_ns += a->parse_ns;
	done_cnt++;
	one_more();
}

static void one_more(void)
{
	struct kvp_tkz_call *c;
	if (left && left--)
		kvp_tkz_start(tkz, KVP_TKZ_CHAT, body, body_len, on_ids, NULL, &c);
}

static void serve(int out)
{
	static struct simtok sim;
	if (kvp_loop_open(&loop, 0) || simtok_open(&sim, loop, "127.0.0.1"))
		_exit(1);
	sim.ready = answer;
	sim.ready_len = answer_len;
	if (write(out, &sim.ls.port, sizeof(sim.ls.port)) == sizeof(sim.ls.port))
		kvp_loop_run(loop);
	_exit(0);
}

static void calls(uint32_t at_once)
{
	int fd[2];
	uint16_t port = 0;
	char url[64], err[128] = "";
	pid_t pid;
	if (pipe(fd) || (pid = fork()) < 0)
		exit(1);
	if (pid == 0)
		serve(fd[1]);
	if (read(fd[0], &port, sizeof(port)) != sizeof(port))
		exit(1);
	snprintf(url, sizeof(url), "http://127.0.0.1:%u", (unsigned)port);
	struct kvp_tkz_cfg cfg = {.protocol = KVP_TOK_VLLM_RENDER,
		.url = url,
		.timeout_ns = 60000000000ull,
		.response_max_bytes = 16u << 20};
	if (kvp_loop_open(&loop, 0) || kvp_tkz_open(loop, &cfg, &tkz, err, sizeof(err))) {
		fprintf(stderr, "b_tok: %s\n", err);
		exit(1);
	}
	double t[5];
	for (int r = -1; r < 5; r++) {
		uint64_t start = bench_cpu_ns(), want = done_cnt + 300;
		parse_sum_ns = 0;
		left = 300;
		for (uint32_t i = 0; i < at_once; i++)
			one_more();
		while (done_cnt < want)
			kvp_loop_run_once(loop, KVP_LOOP_FOREVER);
		if (r >= 0)
			t[r] = (double)(bench_cpu_ns() - start) / 300;
	}
	struct kvp_tkz_stat st;
	kvp_tkz_stat(tkz, &st);
	report("call", bench_median(t, 5), (double)(body_len + answer_len));
	printf("# %" PRIu64 " connections, JSON %.1f us of a call\n", st.connects,
		(double)parse_sum_ns / 300e3);
	kvp_tkz_close(tkz);
	kvp_loop_close(loop);
	kill(pid, SIGTERM);
	waitpid(pid, NULL, 0);
}

/* A conversation of turns with some escapes, as clients send it. */
static void make_body(uint64_t bytes)
{
	static const char turn[] = "{\"role\":\"user\",\"content\":\"";
	uint64_t x = 1;
	body = calloc(1, bytes + 4096);
	body_len = (uint64_t)snprintf(body, 64, "{\"model\":\"m\",\"stream\":true,\"messages\":[");
	while (body_len < bytes) {
		body_len += (uint64_t)snprintf(
			body + body_len, 64, "%s%s", body[body_len - 1] == '}' ? "," : "", turn);
		for (int i = 0; i < 2000 && body_len < bytes; i++) {
			x = bench_mix(x);
			if (x % 60 == 0) {
				body[body_len++] = '\\';
				body[body_len++] = x & 64 ? 'n' : '"';
			} else {
				body[body_len++] = x % 6 ? (char)('a' + x % 26) : ' ';
			}
		}
		body_len += (uint64_t)snprintf(body + body_len, 8, "\"}");
	}
	body_len += (uint64_t)snprintf(body + body_len, 64, "],\"max_tokens\":512,\"temperature\":0.7}");
}

static char *make_ids(const char *before, const char *after, uint32_t cnt, uint64_t *len)
{
	char *out = calloc(1, (size_t)cnt * 11 + 1024);
	uint64_t n = (uint64_t)snprintf(out, 256, "%s", before);
	for (uint32_t i = 0; i < cnt; i++)
		n += (uint64_t)snprintf(out + n, 16, "%s%u", i ? "," : "", (uint32_t)(bench_mix(i) % 151643));
	n += (uint64_t)snprintf(out + n, 512, "%s", after);
	*len = n;
	return out;
}

int main(int argc, char **argv)
{
	uint32_t cnt = argc > 1 ? (uint32_t)strtoul(argv[1], NULL, 10) : 55000;
	uint64_t bytes = argc > 2 ? strtoull(argv[2], NULL, 10) : 220000;
	uint32_t at_once = argc > 3 ? (uint32_t)strtoul(argv[3], NULL, 10) : 20;
	struct kvp_ask_cfg cfg = {.model = "m", .tokenizer = KVP_TOK_TEXT};
	signal(SIGPIPE, SIG_IGN);
	bench_header();
	bench_args(argc, argv);
	if (!cnt || bytes < 100 || kvp_ask_open(&parser, &cfg))
		return 2;
	make_body(bytes);
	answer = make_ids("{\"request_id\":\"chatcmpl-1f2e\",\"token_ids\":[",
		"],\"features\":null,\"sampling_params\":{\"max_tokens\":64},\"model\":\"m\",\"stream\":"
		"false}",
		cnt, &answer_len);
	token_body = make_ids("{\"model\":\"m\",\"prompt\":[", "],\"max_tokens\":64}", cnt, &token_len);
	printf("# body %" PRIu64 " bytes, answer %" PRIu64 " bytes\n", body_len, answer_len);
	report("body", cpu_ns(run_body), (double)body_len);
	for (block_size = 16; block_size <= 512; block_size *= 32) {
		char name[32];
		snprintf(name, sizeof(name), "text_blocks_%u", block_size);
		report(name, cpu_ns(run_text), (double)body_len);
	}
	report("ids", cpu_ns(run_ids), (double)answer_len);
	report("ids_tree", cpu_ns(run_tree), (double)answer_len);
	report("tokens", cpu_ns(run_tokens), (double)token_len);
	kvp_ask_reset(&ask);
	calls(at_once);
	kvp_ask_close(&parser);
	return sink == 42;
}
