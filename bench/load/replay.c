/* bench/load/replay.c — see replay.h. */
#include "bench/load/replay.h"
#include "bench/load/node.h"
#include "bench/sim/prompt.h"
#include <inttypes.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define SECOND_NS 1000000000ull
#define TEXT_MAX_BYTES (8u << 20) /* of a selection, or of one line of a stream */
#define PROGRESS_TTY_NS SECOND_NS
#define PROGRESS_LOG_NS (5 * SECOND_NS)

struct run { /* one policy */
	struct replay *replay;
	enum kvp_policy policy;
	const struct kvp_load_set *set;
	struct kvp_run_stats *stats;
	struct kvp_timer arrival;
	size_t next;	   /* request to send next */
	uint32_t open_cnt; /* requests under way */
	uint32_t turn;	   /* round-robin */
	uint64_t rng;
	uint32_t load[KVP_LOAD_TARGET_MAX]; /* requests under way by engine */
	uint64_t end_ns;
};

enum booking { NOT_BOOKED, BOOKED, PREFILLED };

struct flight { /* one request */
	struct run *run;
	const struct kvp_trace_req *req;
	uint32_t target;
	enum booking booking;
	int is_failed, is_streamed; /* streamed: the engine's answer is complete */
	int prefill_calls;	    /* prefill_complete under way */
	char id[48], host[64];
	uint16_t port;
	uint64_t call_ns;   /* wall: selection or engine call began */
	uint64_t select_ns; /* wall: how long the selection took */
	uint64_t first_ns;  /* wall: first piece */
	char *text;	    /* selection, or the unfinished line of the stream */
	size_t text_len, text_max;
	int has_usage;
	struct kvp_node_usage usage;
};

struct replay {
	const struct kvp_load_cfg *cfg;
	const struct kvp_trace *trace;
	struct kvp_loop *loop;
	struct kvp_http_client *client;
	struct kvp_json *json;
	struct kvp_jw jw;
	struct kvp_timer progress;
	char headers[1024];
	uint32_t *tok;
	uint64_t start_ns, flight_cnt;
	uint32_t running_cnt;
	struct run run[KVP_LOAD_RUN_MAX];
};

static struct kvp_loop *signal_loop;
static volatile sig_atomic_t interrupted;

static void on_signal(int sig)
{
	(void)sig;
	interrupted = 1;
	kvp_loop_stop(signal_loop);
}

/* wall_ns is exact where the loop's clock, the start of the turn, is not: selection latency. */
static uint64_t wall_ns(void)
{
	struct timespec ts;
	clock_gettime(CLOCK_MONOTONIC, &ts);
	return (uint64_t)ts.tv_sec * SECOND_NS + (uint64_t)ts.tv_nsec;
}

static double virtual_s(const struct replay *p, uint64_t span_ns)
{
	return (double)span_ns * 1e-9 * p->cfg->scale;
}

/* ---- end of a request ---- */

static void run_end(struct run *x)
{
	x->end_ns = kvp_loop_now_ns(x->replay->loop);
	x->stats->wall_s = (double)(x->end_ns - x->replay->start_ns) * 1e-9;
	x->stats->virtual_s = virtual_s(x->replay, x->end_ns - x->replay->start_ns);
	if (--x->replay->running_cnt == 0)
		kvp_loop_stop(x->replay->loop);
}

static void flight_count(struct flight *f)
{
	struct kvp_run_stats *s = f->run->stats;
	const struct kvp_node_usage *u = &f->usage;
	if (f->is_failed || !f->has_usage) {
		s->error_cnt++;
		return;
	}
	if (u->finish_ns) { /* the selection's wall time counts once, whatever the scale */
		kvp_stats_finished(s, u->arrival_ns - f->select_ns, u->first_ns, u->finish_ns, u->prompt_tok,
			u->cached_tok, u->out_tok);
		return;
	}
	double scale = f->run->replay->cfg->scale;
	uint64_t now_ns = wall_ns();
	kvp_stats_finished(s, 0, f->select_ns + (uint64_t)((double)(f->first_ns - f->call_ns) * scale),
		f->select_ns + (uint64_t)((double)(now_ns - f->call_ns) * scale), u->prompt_tok,
		u->cached_tok, u->out_tok);
}

static void flight_end(struct flight *f)
{
	struct run *x = f->run;
	flight_count(f);
	free(f->text);
	free(f);
	if (--x->open_cnt == 0 && x->next == x->replay->trace->req_cnt)
		run_end(x);
}

/* ---- calls ---- */

static int flight_text(struct flight *f, const char *data, uint64_t len)
{
	if (f->text_len + len > f->text_max) {
		size_t max = 2 * (f->text_len + len) + 1024;
		char *p = max > TEXT_MAX_BYTES ? NULL : realloc(f->text, max);
		if (!p)
			return KVP_ERR_LIMIT;
		f->text = p;
		f->text_max = max;
	}
	memcpy(f->text + f->text_len, data, len);
	f->text_len += len;
	return KVP_OK;
}

static int call(struct flight *f, struct kvp_http_call_cfg *c)
{
	struct replay *p = f->run->replay;
	c->ctx = f;
	c->timeout_ns = p->cfg->timeout_s * SECOND_NS;
	return kvp_http_call(p->client, c, NULL);
}

static int call_node(struct flight *f, const char *method, const char *path, const struct kvp_jw *body,
	void (*on_done)(void *, struct kvp_http_call *, int, int))
{
	struct replay *p = f->run->replay;
	struct kvp_http_call_cfg c = {.host = p->cfg->base_host,
		.port = p->cfg->base_port,
		.method = method,
		.path = path,
		.headers = p->headers,
		.body = body ? body->buf : NULL,
		.len = body ? body->len : 0,
		.on_done = on_done};
	return call(f, &c);
}

static void on_freed(void *ctx, struct kvp_http_call *c, int status, int err)
{
	struct flight *f = ctx;
	(void)c;
	if (err || status != 200)
		f->is_failed = 1;
	flight_end(f);
}

/* flight_free gives the booking back once nothing else is under way for it. */
static void flight_free(struct flight *f)
{
	char path[96];
	if (f->prefill_calls)
		return;
	if (f->booking == NOT_BOOKED) {
		flight_end(f);
		return;
	}
	snprintf(path, sizeof(path), "/reservations/%s", f->id);
	if (call_node(f, "DELETE", path, NULL, on_freed)) {
		f->is_failed = 1;
		flight_end(f);
	}
}

static void on_prefilled(void *ctx, struct kvp_http_call *c, int status, int err)
{
	struct flight *f = ctx;
	(void)c;
	f->prefill_calls--;
	if (err || status != 200)
		f->is_failed = 1;
	if (f->is_streamed)
		flight_free(f);
}

static void flight_prefilled(struct flight *f)
{
	char path[96];
	f->booking = PREFILLED;
	snprintf(path, sizeof(path), "/reservations/%s/prefill_complete", f->id);
	if (call_node(f, "POST", path, NULL, on_prefilled))
		f->is_failed = 1;
	else
		f->prefill_calls++;
}

/* take_lines reads whole lines of the stream; only the one with usage matters. */
static void take_lines(struct flight *f)
{
	static const char mark[] = "\"usage\":{";
	size_t first = 0;
	char *end;
	while ((end = memchr(f->text + first, '\n', f->text_len - first)) != NULL) {
		const char *line = f->text + first;
		size_t len = (size_t)(end - line);
		if (len > 6 && !memcmp(line, "data: ", 6) && memmem(line, len, mark, strlen(mark)) &&
			kvp_node_usage(f->run->replay->json, line + 6, len - 6, &f->usage) == KVP_OK)
			f->has_usage = 1;
		first += len + 1;
	}
	memmove(f->text, f->text + first, f->text_len - first);
	f->text_len -= first;
}

static void on_stream(void *ctx, struct kvp_http_call *c, const char *data, uint64_t len)
{
	struct flight *f = ctx;
	(void)c;
	if (!f->first_ns)
		f->first_ns = wall_ns();
	if (f->booking == BOOKED)
		flight_prefilled(f);
	if (flight_text(f, data, len))
		f->is_failed = 1;
	else
		take_lines(f);
}

static void on_streamed(void *ctx, struct kvp_http_call *c, int status, int err)
{
	struct flight *f = ctx;
	(void)c;
	f->run->load[f->target]--;
	f->is_streamed = 1;
	if (err || status != 200)
		f->is_failed = 1;
	flight_free(f);
}

static void flight_generate(struct flight *f)
{
	struct replay *p = f->run->replay;
	const struct kvp_trace_req *q = f->req;
	if (p->cfg->engine_form == KVP_LOAD_TOKENS)
		kvp_prompt_expand(p->trace->id + q->id_off, q->prompt_tok, p->tok);
	kvp_node_engine_body(
		&p->jw, p->cfg, p->trace->id + q->id_off, q->id_cnt, p->tok, q->prompt_tok, q->out_tok);
	struct kvp_http_call_cfg c = {.host = f->host,
		.port = f->port,
		.method = "POST",
		.path = "/v1/completions",
		.headers = "content-type: application/json\r\n",
		.body = p->jw.buf,
		.len = p->jw.len,
		.on_body = on_stream,
		.on_done = on_streamed};
	f->text_len = 0;
	f->call_ns = wall_ns();
	f->run->load[f->target]++;
	if (call(f, &c)) {
		f->is_failed = 1;
		f->run->load[f->target]--;
		flight_free(f);
	}
}

static void on_select_text(void *ctx, struct kvp_http_call *c, const char *data, uint64_t len)
{
	struct flight *f = ctx;
	(void)c;
	if (flight_text(f, data, len))
		f->is_failed = 1;
}

static void on_selected(void *ctx, struct kvp_http_call *c, int status, int err)
{
	struct flight *f = ctx;
	struct replay *p = f->run->replay;
	(void)c;
	f->select_ns = wall_ns() - f->call_ns;
	if (!err && status == 200)
		f->booking = BOOKED;
	if (err || status != 200 || f->is_failed ||
		kvp_node_selection(p->json, f->text, f->text_len, f->host, &f->port)) {
		f->is_failed = 1;
		flight_free(f);
		return;
	}
	kvp_sample_add(&f->run->stats->select_s, (double)f->select_ns * 1e-9);
	flight_generate(f);
}

static void flight_select(struct flight *f)
{
	struct replay *p = f->run->replay;
	snprintf(f->id, sizeof(f->id), "load-%d-%" PRIu64, (int)getpid(), p->flight_cnt++);
	kvp_prompt_expand(p->trace->id + f->req->id_off, f->req->prompt_tok, p->tok);
	struct kvp_http_call_cfg c = {.host = p->cfg->base_host,
		.port = p->cfg->base_port,
		.method = "POST",
		.path = "/select_and_reserve",
		.headers = p->headers,
		.on_body = on_select_text,
		.on_done = on_selected};
	if (kvp_node_select_body(&p->jw, p->cfg, p->tok, f->req->prompt_tok, f->req->out_tok, f->id) ==
		KVP_OK) {
		c.body = p->jw.buf;
		c.len = p->jw.len;
		f->call_ns = wall_ns();
		if (call(f, &c) == KVP_OK)
			return;
	}
	f->is_failed = 1;
	flight_free(f);
}

/* ---- arrivals ---- */

static uint32_t pick(struct run *x)
{
	uint32_t best = 0, ties = 0;
	if (x->policy == KVP_POLICY_ROUND_ROBIN)
		return x->turn++ % x->set->cnt;
	if (x->policy == KVP_POLICY_RANDOM)
		return (uint32_t)(kvp_prompt_next(&x->rng) % x->set->cnt);
	for (uint32_t i = 0; i < x->set->cnt; i++) {
		if (ties && x->load[i] > x->load[best])
			continue;
		ties = ties && x->load[i] == x->load[best] ? ties + 1 : 1;
		if (ties == 1 || kvp_prompt_next(&x->rng) % ties == 0)
			best = i;
	}
	return best;
}

static void depart(struct run *x, const struct kvp_trace_req *q)
{
	struct flight *f = calloc(1, sizeof(*f));
	x->stats->sent_cnt++;
	if (!f) {
		x->stats->error_cnt++;
		return;
	}
	x->open_cnt++;
	f->run = x;
	f->req = q;
	if (x->policy == KVP_POLICY_KV) {
		flight_select(f);
		return;
	}
	f->target = pick(x);
	memcpy(f->host, x->set->target[f->target].host, sizeof(f->host));
	f->port = x->set->target[f->target].http_port;
	flight_generate(f);
}

static uint64_t due_ns(const struct run *x, size_t i)
{
	const struct replay *p = x->replay;
	return p->start_ns + (uint64_t)((double)p->trace->req[i].at_ns / p->cfg->speed / p->cfg->scale);
}

static void on_arrival(void *ctx, struct kvp_timer *t)
{
	struct run *x = ctx;
	const struct kvp_trace *trace = x->replay->trace;
	uint64_t now_ns = kvp_loop_now_ns(x->replay->loop);
	x->open_cnt++; /* the run can't end in here */
	while (x->next < trace->req_cnt && due_ns(x, x->next) <= now_ns)
		depart(x, &trace->req[x->next++]);
	if (x->next < trace->req_cnt)
		kvp_timer_set(x->replay->loop, t, due_ns(x, x->next), on_arrival, x);
	if (--x->open_cnt == 0 && x->next == trace->req_cnt)
		run_end(x);
}

static void on_progress(void *ctx, struct kvp_timer *t)
{
	struct replay *p = ctx;
	int is_tty = isatty(STDERR_FILENO);
	uint64_t now_ns = kvp_loop_now_ns(p->loop);
	fprintf(stderr, "%s%.0f s", is_tty ? "\r\033[K" : "", virtual_s(p, now_ns - p->start_ns));
	for (uint32_t i = 0; i < p->cfg->run_cnt; i++) {
		const struct kvp_run_stats *s = p->run[i].stats;
		fprintf(stderr, " | %s %" PRIu64 "/%zu open %u hit %.3f ttft %.3f s", s->name, s->done_cnt,
			p->trace->req_cnt, p->run[i].open_cnt,
			s->prompt_tok ? (double)s->cached_tok / (double)s->prompt_tok : 0,
			kvp_sample_mean(&s->ttft_s));
		if (s->error_cnt)
			fprintf(stderr, " errors %" PRIu64, s->error_cnt);
	}
	fputs(is_tty ? "" : "\n", stderr);
	kvp_timer_set(p->loop, t, now_ns + (is_tty ? PROGRESS_TTY_NS : PROGRESS_LOG_NS), on_progress, p);
}

/* ---- life ---- */

static int read_token(const char *path, char *out, size_t cap)
{
	char token[512] = "";
	size_t len = strlen(out);
	FILE *f = path ? fopen(path, "re") : NULL;
	if (!path)
		return KVP_OK;
	if (!f || !fgets(token, sizeof(token), f)) {
		fprintf(stderr, "kvpick-load: %s: no token\n", path);
		if (f)
			fclose(f);
		return KVP_ERR_SYS;
	}
	fclose(f);
	token[strcspn(token, " \t\r\n")] = 0;
	snprintf(out + len, cap - len, "authorization: Bearer %s\r\n", token);
	return KVP_OK;
}

static int replay_open(struct replay *p)
{
	struct kvp_http_client_cfg http = {.conn_max = 8192, .idle_max = 1024};
	uint32_t prompt_max = 1;
	for (size_t i = 0; i < p->trace->req_cnt; i++)
		if (p->trace->req[i].prompt_tok > prompt_max)
			prompt_max = p->trace->req[i].prompt_tok;
	kvp_jw_init(&p->jw);
	snprintf(p->headers, sizeof(p->headers), "content-type: application/json\r\n");
	p->tok = malloc((prompt_max + 1) * sizeof(*p->tok));
	p->json = kvp_json_new();
	if (!p->tok || !p->json)
		return KVP_ERR_SYS;
	int rc = read_token(p->cfg->token_file, p->headers, sizeof(p->headers));
	if (!rc)
		rc = kvp_loop_open(&p->loop, 0);
	return rc ? rc : kvp_http_client_open(p->loop, &http, &p->client);
}

static int register_kv(struct replay *p)
{
	const char *token = strchr(p->headers, '\n') + 1;
	if (p->cfg->registration == KVP_LOAD_REGISTER_NO)
		return KVP_OK;
	for (uint32_t i = 0; i < p->cfg->run_cnt; i++) {
		if (p->cfg->policy[i] != KVP_POLICY_KV)
			continue;
		int rc = kvp_node_register(p->loop, p->client, p->cfg, &p->cfg->set[i], token);
		if (rc)
			return rc;
	}
	return KVP_OK;
}

int kvp_replay(const struct kvp_load_cfg *cfg, const struct kvp_trace *t, struct kvp_run_stats *stats)
{
	struct replay p = {.cfg = cfg, .trace = t};
	int rc = replay_open(&p);
	if (!rc) {
		signal_loop = p.loop;
		struct sigaction sa = {.sa_handler = on_signal};
		sigaction(SIGINT, &sa, NULL);
		sigaction(SIGTERM, &sa, NULL);
		signal(SIGPIPE, SIG_IGN);
		rc = register_kv(&p);
	}
	if (!rc) {
		kvp_loop_run_once(p.loop, 0); /* the start is now */
		p.start_ns = kvp_loop_now_ns(p.loop);
		p.running_cnt = cfg->run_cnt;
		for (uint32_t i = 0; i < cfg->run_cnt; i++) {
			stats[i].name = kvp_policy_name(cfg->policy[i]);
			p.run[i] = (struct run){.replay = &p,
				.policy = cfg->policy[i],
				.set = &cfg->set[i],
				.stats = &stats[i],
				.rng = cfg->seed};
			kvp_timer_set(p.loop, &p.run[i].arrival, p.start_ns, on_arrival, &p.run[i]);
		}
		kvp_timer_set(p.loop, &p.progress, p.start_ns + PROGRESS_TTY_NS, on_progress, &p);
		rc = kvp_loop_run(p.loop);
		if (isatty(STDERR_FILENO))
			fputc('\n', stderr);
		if (!rc && interrupted)
			rc = KVP_ERR_CLOSED;
	}
	kvp_http_client_close(p.client);
	if (p.loop)
		kvp_loop_close(p.loop);
	kvp_jw_free(&p.jw);
	kvp_json_free(p.json);
	free(p.tok);
	return rc;
}
