/* The tokenizer client over real sockets, on both loop back ends, against a service with every fault. */
#include "daemons/extproc/tokenizer.c"
#include "daemons/extproc/tokenizer_parts.c"
#include "ipc/resolve.c"
#include "tests/http_util.h"
#include "tests/tokenizer_sim.h"

static struct simtok sim;
static struct kvp_tkz *tkz;
static struct kvp_ctr_column_shm ctr;
static const char *the_body = "{\"model\":\"m\",\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}]} \n";

struct got {
	int done, status, upstream;
	enum kvp_tkz_end end;
	uint32_t cnt, id[4];
	char text[128], detail[KVP_TKZ_ERROR_MAX + 1];
	uint64_t took_ns;
};

static void on_answer(void *ctx, const struct kvp_tkz_answer *a)
{
	struct got *g = ctx;
	g->done++;
	g->status = a->status;
	g->upstream = a->upstream_status;
	g->end = a->end;
	g->cnt = a->tokens.token_cnt;
	g->took_ns = a->took_ns;
	if (g->cnt)
		memcpy(g->id, a->tokens.token, 4 * (g->cnt < 4 ? g->cnt : 4));
	snprintf(g->text, sizeof(g->text), "%s", a->text);
	snprintf(g->detail, sizeof(g->detail), "%s", a->detail ? a->detail : "(null)");
}

static struct kvp_tkz_cfg cfg_now;

static void open_at(int32_t protocol, const char *url)
{
	char err[256] = "";
	kvp_tkz_close(tkz);
	tkz = NULL;
	cfg_now.protocol = protocol;
	cfg_now.url = url;
	cfg_now.model = "m";
	cfg_now.timeout_ns = cfg_now.timeout_ns ? cfg_now.timeout_ns : WAIT_NS;
	cfg_now.response_max_bytes = cfg_now.response_max_bytes ? cfg_now.response_max_bytes : 1 << 20;
	cfg_now.ctr = &ctr;
	if (kvp_tkz_open(loop, &cfg_now, &tkz, err, sizeof(err)))
		printf("# open: %s\n", err);
}

static const char *url_of(const char *base)
{
	static char url[128];
	snprintf(url, sizeof(url), "http://127.0.0.1:%u%s", (unsigned)sim.ls.port, base);
	return url;
}

static int ask(enum kvp_tkz_what what, struct got *g)
{
	struct kvp_tkz_call *c;
	memset(g, 0, sizeof(*g));
	if (kvp_tkz_start(tkz, what, the_body, strlen(the_body), on_answer, g, &c) || g->done)
		return -1;
	UNTIL(g->done);
	return g->done == 1 ? (int)g->end : -1;
}

static void test_answers(void)
{
	struct got g;
	uint32_t first = (uint32_t)'{' << 24 | '"' << 16 | 'm' << 8 | 'o';
	open_at(KVP_TOK_VLLM_RENDER, url_of("/gateway/vllm/?q=1#f"));
	is_u64(ask(KVP_TKZ_CHAT, &g), KVP_TKZ_OK, "%s: vLLM chat", be_name);
	ok(g.cnt == (strlen(the_body) + 3) / 4 && g.id[0] == first && g.status == 200 && g.upstream == 200,
		"%s: its token ids", be_name);
	is_str(sim.path, "/gateway/vllm/v1/chat/completions/render", "%s: path", be_name);
	ok(sim.last_len == strlen(the_body) && !memcmp(sim.last, the_body, sim.last_len),
		"%s: the body arrives as it is", be_name);
	ok(strstr(sim.head, "Content-Type: application/json\r\n") && !strstr(sim.head, "Authorization"),
		"%s: as JSON, without credentials", be_name);
	is_u64(ask(KVP_TKZ_COMPLETIONS, &g), KVP_TKZ_OK, "%s: vLLM completions, a list of one", be_name);
	is_str(sim.path, "/gateway/vllm/v1/completions/render", "%s: path", be_name);
	is_u64(sim.accepted, 1, "%s: on one connection", be_name);
	simtok_drop_all(&sim);
	sim.accepted = sim.gone = 0;
	sim.style = "input_ids";
	open_at(KVP_TOK_SGLANG_RENDERER, url_of(""));
	is_u64(ask(KVP_TKZ_CHAT, &g), KVP_TKZ_OK, "%s: SGLang renderer", be_name);
	is_u64(ask(KVP_TKZ_COMPLETIONS, &g), KVP_TKZ_UNSERVED, "%s: which has no completions", be_name);
	ok(g.status == 200 && !*g.text && !g.cnt, "%s: no error, no tokens", be_name);
	sim.style = "token_ids";
	is_u64(ask(KVP_TKZ_CHAT, &g), KVP_TKZ_INVALID, "%s: token_ids from a SGLang renderer", be_name);
	is_str(g.detail, "no token ids in the answer", "%s: are none", be_name);
	open_at(KVP_TOK_VLLM_RENDER, url_of(""));
	sim.style = "input_ids";
	is_u64(ask(KVP_TKZ_CHAT, &g), KVP_TKZ_INVALID, "%s: and the reverse", be_name);
	sim.style = "token_ids";
}

struct fault_row {
	enum simtok_fault fault;
	enum kvp_tkz_end want;
	int status;
	const char *text;
};

static void test_faults(void)
{
	static const char un[] = "tokenization service unavailable", er[] = "tokenization service error";
	static const struct fault_row t[] = {{SIMTOK_RESET, KVP_TKZ_UNAVAILABLE, 503, un},
		{SIMTOK_CLOSE, KVP_TKZ_UNAVAILABLE, 503, un},
		{SIMTOK_HALF_RESET, KVP_TKZ_UNAVAILABLE, 503, un},
		{SIMTOK_HALF_CLOSE, KVP_TKZ_UNAVAILABLE, 503, un}, {SIMTOK_CLOSE_AFTER, KVP_TKZ_OK, 200, ""},
		{SIMTOK_SAYS_CLOSE, KVP_TKZ_OK, 200, ""}, {SIMTOK_CHUNKED, KVP_TKZ_OK, 200, ""},
		{SIMTOK_DRIBBLE, KVP_TKZ_OK, 200, ""}, {SIMTOK_NO_LENGTH, KVP_TKZ_OK, 200, ""},
		{SIMTOK_CONTINUE, KVP_TKZ_OK, 200, ""}, {SIMTOK_NOT_HTTP, KVP_TKZ_INVALID, 502, er},
		{SIMTOK_HUGE_HEAD, KVP_TKZ_TOO_LARGE, 502, er}, {SIMTOK_CUT_JSON, KVP_TKZ_INVALID, 502, er}};
	struct got g;
	open_at(KVP_TOK_VLLM_RENDER, url_of(""));
	for (size_t i = 0; i < sizeof(t) / sizeof(t[0]); i++)
		for (int twice = 0; twice < 2; twice++) {
			sim.fault = t[i].fault;
			int end = ask(KVP_TKZ_CHAT, &g);
			ok(end == (int)t[i].want && g.status == t[i].status && !strcmp(g.text, t[i].text),
				"%s: fault %d gives %d", be_name, (int)t[i].fault, t[i].status);
			if (end != (int)t[i].want)
				printf("# end %d, %s\n", end, g.detail);
			sim.fault = SIMTOK_FINE;
			is_u64(ask(KVP_TKZ_CHAT, &g), KVP_TKZ_OK, "%s: and the next call is fine", be_name);
		}
}

static void test_bodies(void)
{
	static const struct {
		const char *body;
		const char *detail; /* NULL = fine */
	} t[] = {{"{\"token_ids\":[1,2]}", NULL}, {"{\"token_ids\":[-1]}", "token id out of range"},
		{"{\"token_ids\":[4294967296]}", "token id out of range"},
		{"{\"token_ids\":[4294967295]}", NULL},
		{"{\"token_ids\":[1.5]}", "token ids are not an array of integers"},
		{"{\"token_ids\":\"x\"}", "token ids are not an array of integers"},
		{"{\"token_ids\":[]}", "no token in the answer"},
		{"{\"token_ids\":null}", "no token ids in the answer"},
		{"{\"tokens\":[1]}", "no token ids in the answer"}, {"", "empty answer"},
		{"[]", "token ids are not an array of integers"},
		{"[{\"token_ids\":[1]},{\"token_ids\":[1]}]", "token ids are not an array of integers"},
		{"{\"token_ids\":[1,2", "malformed JSON"}};
	struct got g;
	open_at(KVP_TOK_VLLM_RENDER, url_of(""));
	for (size_t i = 0; i < sizeof(t) / sizeof(t[0]); i++) {
		sim.fault = SIMTOK_BODY;
		sim.body = t[i].body;
		is_u64(ask(KVP_TKZ_CHAT, &g), t[i].detail ? KVP_TKZ_INVALID : KVP_TKZ_OK, "%s: %s", be_name,
			t[i].body);
		if (t[i].detail)
			ok(!strcmp(g.detail, t[i].detail) && g.status == 502, "%s: %s", be_name, g.detail);
	}
	sim.body = NULL;
	sim.fault = SIMTOK_FINE;
}

static void test_statuses(void)
{
	static const struct {
		int said, want;
		enum kvp_tkz_end end;
	} t[] = {{400, 400, KVP_TKZ_REJECTED}, {422, 400, KVP_TKZ_REJECTED}, {401, 502, KVP_TKZ_STATUS},
		{403, 502, KVP_TKZ_STATUS}, {404, 502, KVP_TKZ_STATUS}, {500, 502, KVP_TKZ_STATUS},
		{501, 502, KVP_TKZ_STATUS}, {502, 502, KVP_TKZ_STATUS}, {429, 503, KVP_TKZ_UNAVAILABLE},
		{503, 503, KVP_TKZ_UNAVAILABLE}, {302, 502, KVP_TKZ_STATUS}};
	struct got g;
	char *big = malloc(300001);
	open_at(KVP_TOK_VLLM_RENDER, url_of(""));
	sim.body = "{\"token_ids\":[1],\"error\":\"a\tb\"}";
	for (size_t i = 0; i < sizeof(t) / sizeof(t[0]); i++) {
		sim.status = t[i].said;
		ok(ask(KVP_TKZ_CHAT, &g) == (int)t[i].end && g.status == t[i].want && g.upstream == t[i].said,
			"%s: status %d becomes %d", be_name, t[i].said, t[i].want);
		is_str(g.detail, "{\"token_ids\":[1],\"error\":\"a b\"}", "%s: its body, for the log",
			be_name);
	}
	sim.status = 201;
	sim.body = "{\"token_ids\":[1]}";
	ok(ask(KVP_TKZ_CHAT, &g) == KVP_TKZ_OK && g.status == 200, "%s: any 2xx is an answer", be_name);
	ok(!strcmp(kvp_ctr_info(KVP_CTR_TOK_REJECTED)->name, "extproc.tokenizer.rejected") &&
			ctr.val[KVP_CTR_TOK_REJECTED] >= 2,
		"%s: they are counted", be_name);
	memset(big, 'e', 300000);
	big[300000] = 0;
	sim.body = big;
	for (int fault = SIMTOK_FINE; fault <= SIMTOK_CHUNKED; fault += SIMTOK_CHUNKED) {
		sim.fault = (enum simtok_fault)fault;
		sim.status = 500;
		cfg_now.response_max_bytes = 2000;
		open_at(KVP_TOK_VLLM_RENDER, url_of(""));
		ok(ask(KVP_TKZ_CHAT, &g) == KVP_TKZ_STATUS && strlen(g.detail) <= KVP_TKZ_ERROR_MAX,
			"%s: an error's long body is not read to its end (%zu bytes)", be_name,
			strlen(g.detail));
	}
	cfg_now.response_max_bytes = 0;
	sim.status = 0;
	sim.fault = SIMTOK_FINE;
	sim.body = NULL;
	free(big);
}

static void test_size(void)
{
	struct got g;
	for (int chunked = 0; chunked < 2; chunked++) {
		static const char text[] = "{\"token_ids\":[1,2,3]}"; /* 21 bytes */
		sim.fault = SIMTOK_BODY;
		sim.body = text;
		cfg_now.response_max_bytes = 20;
		open_at(KVP_TOK_VLLM_RENDER, url_of(""));
		ok(ask(KVP_TKZ_CHAT, &g) == KVP_TKZ_TOO_LARGE && g.status == 502,
			"%s: 21 bytes against a cap of 20", be_name);
		cfg_now.response_max_bytes = 21;
		open_at(KVP_TOK_VLLM_RENDER, url_of(""));
		ok(ask(KVP_TKZ_CHAT, &g) == KVP_TKZ_OK && g.cnt == 3 && g.id[2] == 3, "%s: against 21",
			be_name);
		sim.body = NULL;
		sim.fault = SIMTOK_CHUNKED;
		sim.id_cnt = 200;
		cfg_now.response_max_bytes = 400;
		open_at(KVP_TOK_VLLM_RENDER, url_of(""));
		ok(ask(KVP_TKZ_CHAT, &g) == KVP_TKZ_TOO_LARGE, "%s: chunks over the cap", be_name);
		sim.id_cnt = 0;
	}
	cfg_now.response_max_bytes = 0;
	sim.fault = SIMTOK_FINE;
}

static void test_time(void)
{
	static const enum simtok_fault t[] = {SIMTOK_HANG, SIMTOK_HALF_HANG};
	struct got g;
	cfg_now.timeout_ns = 30000000;
	open_at(KVP_TOK_VLLM_RENDER, url_of(""));
	for (size_t i = 0; i < 2; i++) {
		sim.fault = t[i];
		ok(ask(KVP_TKZ_CHAT, &g) == KVP_TKZ_TIMEOUT && g.status == 504 && g.took_ns >= 20000000,
			"%s: the deadline", be_name);
		is_str(g.text, "tokenization service timed out", "%s: in the client's words", be_name);
	}
	cfg_now.timeout_ns = 0;
	sim.fault = SIMTOK_FINE;
	sim.delay_ns = 20000000;
	open_at(KVP_TOK_VLLM_RENDER, url_of(""));
	ok(ask(KVP_TKZ_CHAT, &g) == KVP_TKZ_OK, "%s: a slow answer is an answer", be_name);
	/* cancelled at several moments: no callback, the connection ends, and others go on */
	struct kvp_tkz_call *c, *d;
	struct got other;
	uint64_t had = sim.requests;
	memset(&g, 0, sizeof(g));
	memset(&other, 0, sizeof(other));
	kvp_tkz_start(tkz, KVP_TKZ_CHAT, the_body, strlen(the_body), on_answer, &g, &c);
	kvp_tkz_start(tkz, KVP_TKZ_CHAT, the_body, strlen(the_body), on_answer, &other, &d);
	UNTIL(sim.requests == had + 2);
	kvp_tkz_cancel(c);
	UNTIL(other.done);
	ok(!g.done && other.done == 1 && other.end == KVP_TKZ_OK, "%s: a cancelled call says nothing",
		be_name);
	kvp_tkz_start(tkz, KVP_TKZ_CHAT, the_body, strlen(the_body), on_answer, &g, &c);
	kvp_tkz_cancel(c);
	struct kvp_tkz_stat st;
	kvp_tkz_stat(tkz, &st);
	ok(!st.inflight && ctr.val[KVP_CTR_TOK_CANCELLED] >= 2, "%s: nor one cancelled at once", be_name);
	sim.delay_ns = 0;
}

static void test_stale(void)
{
	struct got g;
	struct kvp_tkz_stat st;
	open_at(KVP_TOK_VLLM_RENDER, url_of(""));
	ask(KVP_TKZ_CHAT, &g);
	simtok_drop_all(&sim);
	UNTIL(!kvp_http_client_stat(tkz->http)->idle);
	is_u64(ask(KVP_TKZ_CHAT, &g), KVP_TKZ_OK, "%s: a pooled connection that was closed is not used",
		be_name);
	sim.fault = SIMTOK_CLOSE; /* dies under the request: once more on a fresh one */
	sim.fault_left = 1;
	is_u64(ask(KVP_TKZ_CHAT, &g), KVP_TKZ_OK, "%s: one that dies before its first byte is retried once",
		be_name);
	kvp_tkz_stat(tkz, &st);
	is_u64(st.retried, 1, "%s: once", be_name);
	sim.fault_left = 0;
	is_u64(ask(KVP_TKZ_CHAT, &g), KVP_TKZ_OK, "%s: a fault that is over", be_name);
	sim.fault = SIMTOK_CLOSE;
	is_u64(ask(KVP_TKZ_CHAT, &g), KVP_TKZ_UNAVAILABLE, "%s: the retry is not retried", be_name);
	sim.fault = SIMTOK_FINE;
}

static void test_breaker(void)
{
	struct got g;
	struct kvp_tkz_stat st;
	open_at(KVP_TOK_VLLM_RENDER, url_of(""));
	for (int i = 0; i < KVP_TKZ_BREAK_AT - 1; i++) {
		sim.fault = SIMTOK_RESET;
		ask(KVP_TKZ_CHAT, &g);
	}
	sim.fault = SIMTOK_FINE;
	is_u64(ask(KVP_TKZ_CHAT, &g), KVP_TKZ_OK, "%s: %d failures in a row are not enough", be_name,
		KVP_TKZ_BREAK_AT - 1);
	sim.status = 503;
	for (int i = 0; i < 2 * KVP_TKZ_BREAK_AT; i++)
		ask(KVP_TKZ_CHAT, &g);
	sim.status = 0;
	is_u64(ask(KVP_TKZ_CHAT, &g), KVP_TKZ_OK, "%s: a service that answers 503 is there", be_name);
	sim.fault = SIMTOK_RESET;
	for (int i = 0; i < KVP_TKZ_BREAK_AT; i++)
		ask(KVP_TKZ_CHAT, &g);
	kvp_tkz_stat(tkz, &st);
	ok(st.is_open && st.opened == 1, "%s: %d are", be_name, KVP_TKZ_BREAK_AT);
	uint64_t had = sim.requests;
	ok(ask(KVP_TKZ_CHAT, &g) == KVP_TKZ_BREAKER && g.status == 503 && sim.requests == had,
		"%s: while it is open nothing is sent", be_name);
	for (int end = KVP_TKZ_BREAKER; end == KVP_TKZ_BREAKER;)
		end = ask(KVP_TKZ_CHAT, &g);
	is_u64(g.end, KVP_TKZ_UNAVAILABLE, "%s: after a while one call is let through", be_name);
	is_u64(ask(KVP_TKZ_CHAT, &g), KVP_TKZ_BREAKER, "%s: which failed: open again", be_name);
	sim.fault = SIMTOK_FINE;
	for (int end = KVP_TKZ_BREAKER; end == KVP_TKZ_BREAKER;)
		end = ask(KVP_TKZ_CHAT, &g);
	is_u64(g.end, KVP_TKZ_OK, "%s: the next one is answered", be_name);
	is_u64(ask(KVP_TKZ_CHAT, &g), KVP_TKZ_OK, "%s: closed", be_name);
	kvp_tkz_stat(tkz, &st);
	ok(!st.is_open && st.opened == 2, "%s: opened twice", be_name);
}

static void test_nobody(void)
{
	struct got g;
	char url[64];
	struct kvp_listener ls;
	memset(&ls, 0, sizeof(ls));
	kvp_loop_listen(loop, &ls, "127.0.0.1", 0, KVP_LISTEN_PLAIN, simtok_accept, &sim);
	snprintf(url, sizeof(url), "http://127.0.0.1:%u", (unsigned)ls.port);
	kvp_listener_close(&ls, KVP_LISTENER_DROP);
	open_at(KVP_TOK_VLLM_RENDER, url);
	ok(ask(KVP_TKZ_CHAT, &g) == KVP_TKZ_UNAVAILABLE && g.status == 503, "%s: nobody listens", be_name);
	open_at(KVP_TOK_VLLM_RENDER, "http://no-such-host.invalid:1");
	ok(ask(KVP_TKZ_CHAT, &g) == KVP_TKZ_UNAVAILABLE, "%s: a name without an address", be_name);
	snprintf(url, sizeof(url), "http://localhost:%u", (unsigned)sim.ls.port);
	open_at(KVP_TOK_VLLM_RENDER, url);
	uint64_t start = kvp_loop_now_ns(loop);
	do
		ask(KVP_TKZ_CHAT, &g);
	while (g.end != KVP_TKZ_OK && !late(start));
	is_u64(g.end, KVP_TKZ_OK, "%s: a name", be_name);
	ok(strstr(sim.head, "Host: localhost:"), "%s: which the service is told", be_name);
}

/* A name with two addresses, at one of which nobody listens. */
static void test_addresses(void)
{
	struct got g;
	struct kvp_tkz_stat st;
	open_at(KVP_TOK_VLLM_RENDER, url_of(""));
	snprintf(tkz->name->text[1], KVP_RESOLVE_TEXT, "127.0.0.2");
	tkz->name->cnt = 2;
	uint32_t fine = 0;
	for (int i = 0; i < 6; i++) {
		simtok_drop_all(&sim); /* each call needs a connection */
		UNTIL(!kvp_http_client_stat(tkz->http)->idle);
		fine += ask(KVP_TKZ_CHAT, &g) == KVP_TKZ_OK;
	}
	kvp_tkz_stat(tkz, &st);
	is_u64(fine, 6, "%s: a dead address leaves its calls to the next", be_name);
	is_u64(st.connects, 7, "%s: and is passed over for a while", be_name);
	tkz->name->cnt = 1;
	snprintf(tkz->name->text[0], KVP_RESOLVE_TEXT, "127.0.0.3");
	simtok_drop_all(&sim);
	UNTIL(!kvp_http_client_stat(tkz->http)->idle);
	is_u64(ask(KVP_TKZ_CHAT, &g), KVP_TKZ_UNAVAILABLE, "%s: the only one has no next", be_name);
}

static void test_unix(void)
{
	struct got g;
	struct simtok other;
	char dir[] = "/tmp/kvp-tok-XXXXXX", at[128], url[128];
	if (!mkdtemp(dir))
		return;
	snprintf(at, sizeof(at), "unix:%s/s", dir);
	snprintf(url, sizeof(url), "http://unix:%s/s:/base/", dir);
	ok(simtok_open(&other, loop, at) == 0, "%s: a service on a Unix socket", be_name);
	open_at(KVP_TOK_VLLM_RENDER, url);
	is_u64(ask(KVP_TKZ_CHAT, &g), KVP_TKZ_OK, "%s: answers", be_name);
	is_str(other.path, "/base/v1/chat/completions/render", "%s: path", be_name);
	kvp_tkz_close(tkz);
	tkz = NULL;
	simtok_close(&other);
	unlink(at + 5);
	rmdir(dir);
}

static void test_token(void)
{
	struct got g;
	char file[] = "/tmp/kvp-tok-XXXXXX", err[256] = "";
	int fd = mkstemp(file);
	if (fd < 0 || write(fd, " secret-1\n", 10) != 10)
		return;
	cfg_now.token_file = file;
	open_at(KVP_TOK_VLLM_RENDER, url_of(""));
	ask(KVP_TKZ_CHAT, &g);
	ok(strstr(sim.head, "Authorization: Bearer secret-1\r\n"), "%s: the token is sent", be_name);
	if (ftruncate(fd, 0) || pwrite(fd, "secret-22\n", 10, 0) != 10)
		printf("# cannot rewrite the token\n");
	uint64_t start = kvp_loop_now_ns(loop);
	do
		ask(KVP_TKZ_CHAT, &g);
	while (!strstr(sim.head, "Bearer secret-22\r\n") && !late(start));
	ok(strstr(sim.head, "Bearer secret-22\r\n"), "%s: and read again when it changes", be_name);
	kvp_tkz_close(tkz);
	tkz = NULL;
	if (pwrite(fd, "sec\1et-22\n", 10, 0) != 10)
		printf("# cannot rewrite the token\n");
	ok(kvp_tkz_open(loop, &cfg_now, &tkz, err, sizeof(err)) == KVP_ERR_INVAL && strstr(err, file),
		"%s: a token with control bytes is refused: %s", be_name, err);
	close(fd);
	unlink(file);
	ok(kvp_tkz_open(loop, &cfg_now, &tkz, err, sizeof(err)) == KVP_ERR_INVAL, "%s: so is no file",
		be_name);
	cfg_now.token_file = NULL;
}

static void until_known(void)
{
	UNTIL(tkz->chat != PROBE_UNKNOWN);
}

static void test_probe(void)
{
	struct got g;
	sim.style = "tokens";
	open_at(KVP_TOK_SGLANG_TOKENIZE, url_of("/base"));
	is_u64(ask(KVP_TKZ_CHAT, &g), KVP_TKZ_UNAVAILABLE, "%s: not known yet", be_name);
	until_known();
	is_u64(ask(KVP_TKZ_CHAT, &g), KVP_TKZ_OK, "%s: a server that takes messages", be_name);
	is_str(sim.path, "/base/tokenize", "%s: path", be_name);
	is_u64(ask(KVP_TKZ_COMPLETIONS, &g), KVP_TKZ_OK, "%s: and prompts", be_name);
	sim.old_tokenize = 1;
	open_at(KVP_TOK_SGLANG_TOKENIZE, url_of(""));
	until_known();
	is_u64(ask(KVP_TKZ_CHAT, &g), KVP_TKZ_UNSERVED, "%s: one that does not", be_name);
	the_body = "{\"prompt\":\"hello\"}";
	is_u64(ask(KVP_TKZ_COMPLETIONS, &g), KVP_TKZ_OK, "%s: still takes prompts", be_name);
	sim.fault = SIMTOK_BODY;
	sim.body = "{\"tokens\":[[7,8,9]],\"count\":[3]}";
	ok(ask(KVP_TKZ_COMPLETIONS, &g) == KVP_TKZ_OK && g.cnt == 3 && g.id[0] == 7,
		"%s: a list of one prompt", be_name);
	sim.fault = SIMTOK_FINE;
	sim.body = NULL;
	sim.old_tokenize = 0;
	sim.no_path = "e/tokenize";
	open_at(KVP_TOK_SGLANG_TOKENIZE, url_of("/base"));
	UNTIL(tkz->chat == PROBE_YES);
	is_u64(ask(KVP_TKZ_CHAT, &g), KVP_TKZ_OK, "%s: the other spelling of the path", be_name);
	is_str(sim.path, "/base/v1/tokenize", "%s: is found", be_name);
	sim.no_path = NULL;
	sim.style = "token_ids";
	the_body = "{\"model\":\"m\",\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}]} \n";
}

static void test_urls(void)
{
	static const struct {
		const char *url, *host, *authority, *path; /* host NULL = refused */
		uint16_t port;
	} t[] = {{"http://h:1", "h", "h:1", "/v1/chat/completions/render", 1},
		{"http://h:1/gateway/vllm/?q=1#f", "h", "h:1", "/gateway/vllm/v1/chat/completions/render", 1},
		{"http://svc.ns.svc.cluster.local", "svc.ns.svc.cluster.local", "svc.ns.svc.cluster.local",
			"/v1/chat/completions/render", 80},
		{"http://[::1]:8000/", "::1", "[::1]:8000", "/v1/chat/completions/render", 8000},
		{"http://[::1]", "::1", "[::1]", "/v1/chat/completions/render", 80},
		{"http://10.0.0.1:65535/a//", "10.0.0.1", "10.0.0.1:65535", "/a//v1/chat/completions/render",
			65535},
		{"http://h?x", "h", "h", "/v1/chat/completions/render", 80},
		{"http://unix:/run/t.sock", "unix:/run/t.sock", "localhost", "/v1/chat/completions/render",
			0},
		{"http://unix:/run/t.sock:/b", "unix:/run/t.sock", "localhost",
			"/b/v1/chat/completions/render", 0},
		{"https://unix:/t", NULL, NULL, NULL, 0}, {"unix:///run/t.sock", NULL, NULL, NULL, 0},
		{"h:1", NULL, NULL, NULL, 0}, {"http://", NULL, NULL, NULL, 0},
		{"http://:1", NULL, NULL, NULL, 0}, {"http://h:0", NULL, NULL, NULL, 0},
		{"http://h:65536", NULL, NULL, NULL, 0}, {"http://h:x", NULL, NULL, NULL, 0},
		{"http://h:", NULL, NULL, NULL, 0}, {"http://u:p@h:1", NULL, NULL, NULL, 0},
		{"http://[::1", NULL, NULL, NULL, 0}, {"http://[::1]x", NULL, NULL, NULL, 0},
		{"http://h/a b", NULL, NULL, NULL, 0}, {"http://unix:/", NULL, NULL, NULL, 0}};
	for (size_t i = 0; i < sizeof(t) / sizeof(t[0]); i++) {
		struct kvp_http_url u;
		char path[KVP_TKZ_PATH_MAX] = "";
		const char *why = kvp_http_url_parse_any(&u, t[i].url);
		if (!t[i].host) {
			ok(why, "%s: %s", t[i].url, why);
			continue;
		}
		kvp_tkz_path(&u, "/v1/chat/completions/render", path);
		ok(!why && !strcmp(u.host, t[i].host) && !strcmp(u.authority, t[i].authority) &&
				u.port == t[i].port,
			"%s", t[i].url);
		is_str(path, t[i].path, "and its path");
	}
}

static void test_media_parts(void)
{
#define H "00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff"
	static const struct {
		const char *json;
		enum kvp_ask_mm_form form;
		uint32_t cnt, from;
	} t[] = {{"{}", KVP_ASK_MM_NONE, 0, 0}, {"{\"features\":null}", KVP_ASK_MM_NONE, 0, 0},
		{"{\"features\":{\"mm_hashes\":{},\"mm_placeholders\":{}}}", KVP_ASK_MM_NONE, 0, 0},
		{"{\"features\":{\"mm_hashes\":{\"image\":[\"" H
		 "\",\"x\"],\"audio\":[\"y\"]},\"mm_placeholders\":{"
		 "\"image\":[{\"offset\":3,\"length\":4},{\"offset\":30,\"length\":2}],\"audio\":[{"
		 "\"offset\":10,\"length\":5}]}}}",
			KVP_ASK_MM_KNOWN, 3, 0},
		{"{\"features\":{\"mm_hashes\":{\"image\":[\"a\"]},\"mm_placeholders\":{"
		 "\"image\":[{\"offset\":9,\"length\":4},{\"offset\":30,\"length\":2}]}}}",
			KVP_ASK_MM_UNKNOWN, 0, 9},
		{"{\"features\":{\"mm_placeholders\":{\"image\":[{\"offset\":9,\"length\":4}]}}}",
			KVP_ASK_MM_UNKNOWN, 0, 9},
		{"{\"features\":{\"mm_hashes\":{\"video\":[\"a\"]},\"mm_placeholders\":{\"image\":[{"
		 "\"offset\":9,\"length\":4}]}}}",
			KVP_ASK_MM_UNKNOWN, 0, 9},
		{"{\"features\":{\"mm_hashes\":{\"image\":[null]},\"mm_placeholders\":{\"image\":[{"
		 "\"offset\":9,\"length\":4}]}}}",
			KVP_ASK_MM_UNKNOWN, 0, 9},
		{"{\"features\":{\"mm_hashes\":{\"image\":[\"a\",\"b\"]},\"mm_placeholders\":{\"image\":["
		 "{\"offset\":9,\"length\":4},{\"offset\":12,\"length\":4}]}}}",
			KVP_ASK_MM_UNKNOWN, 0, 9},
		{"{\"features\":{\"mm_hashes\":{\"image\":[\"a\"]},\"mm_placeholders\":{\"image\":[{"
		 "\"offset\":39,\"length\":4}]}}}",
			KVP_ASK_MM_UNKNOWN, 0, 39},
		{"{\"features\":{\"mm_hashes\":{\"image\":[\"a\"]},\"mm_placeholders\":{\"image\":[{"
		 "\"offset\":-1,\"length\":4}]}}}",
			KVP_ASK_MM_UNKNOWN, 0, 0},
		{"{\"features\":{\"mm_hashes\":{\"image\":[\"a\"]}}}", KVP_ASK_MM_UNKNOWN, 0, 0},
		{"{\"features\":7}", KVP_ASK_MM_UNKNOWN, 0, 0}};
	struct kvp_json *json = kvp_json_new();
	struct kvp_tkz_mm mm = {NULL, 0};
	for (size_t i = 0; i < sizeof(t) / sizeof(t[0]); i++) {
		struct kvp_json_val root;
		struct kvp_ask_tokens k = {.token_cnt = 40};
		kvp_json_parse(json, t[i].json, strlen(t[i].json), 128, &root, NULL);
		kvp_tkz_mm_read(&mm, root, &k);
		ok(k.mm_form == t[i].form && (k.mm_form != KVP_ASK_MM_KNOWN || k.mm_cnt == t[i].cnt) &&
				(k.mm_form != KVP_ASK_MM_UNKNOWN || k.mm_from == t[i].from),
			"media: %.100s", t[i].json);
		if (k.mm_form == KVP_ASK_MM_KNOWN)
			ok(k.mm[0].off == 3 && k.mm[0].hash == 0x0011223344556677u && k.mm[1].off == 10 &&
					k.mm[2].off == 30,
				"by their place");
	}
	kvp_tkz_mm_free(&mm);
	kvp_json_free(json);
}

int main(void)
{
	static const enum kvp_loop_backend be[] = {KVP_LOOP_URING, KVP_LOOP_EPOLL};
	static const char *const name[] = {"io_uring", "epoll"};
	signal(SIGPIPE, SIG_IGN);
	test_urls();
	test_media_parts();
	for (int i = 0; i < 2; i++) {
		be_name = name[i];
		if (kvp_loop_open_backend(&loop, 0, be[i])) {
			printf("# no %s here\n", be_name);
			continue;
		}
		memset(&ctr, 0, sizeof(ctr));
		ok(simtok_open(&sim, loop, "127.0.0.1") == 0, "%s: a tokenizer service", be_name);
		test_answers();
		test_faults();
		test_bodies();
		test_statuses();
		test_size();
		test_time();
		test_stale();
		test_breaker();
		test_nobody();
		test_addresses();
		test_unix();
		test_token();
		test_probe();
		kvp_tkz_close(tkz);
		tkz = NULL;
		simtok_close(&sim);
		kvp_loop_close(loop);
	}
	return done();
}
