/* bench/sim/host.c — see host.h. */
#include "bench/sim/host.h"
#include "bench/sim/answer.h"
#include "bench/sim/prompt.h"
#include "ipc/http_server.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <zmq.h>

#define JSON_TYPE "application/json"
#define BODY_MAX_BYTES (64ull << 20)
#define WORD " kv" /* what every generated token reads as */
#define WORD_LEN 3

struct engine {
	struct kvp_host *host;
	struct kvp_sim_engine *sim;
	struct kvp_http_server *http;
	struct kvp_publish *pub; /* NULL with events off */
	struct talk *dirty;	 /* answers with tokens to send */
	struct talk *all;
	enum kvp_pd_role role;
	uint64_t generated; /* generation requests, for faults */
};

struct talk { /* one request under way */
	struct engine *engine;
	struct kvp_http_req *http;
	struct kvp_sim_req *sim; /* NULL once finished */
	struct kvp_ask ask;
	struct kvp_answer answer; /* out_tok: generated so far */
	uint32_t sent_tok;
	uint64_t sent_ns;	   /* wall, of the last piece */
	struct talk *next, **prev; /* dirty list; prev NULL = not in it */
	struct talk *all_next, **all_prev;
	struct kvp_pd_ask pd;
	enum kvp_pd_fault fault;
};

struct kvp_host {
	struct kvp_host_cfg cfg;
	struct kvp_loop *loop;
	struct kvp_timer turn;
	struct kvp_defer arm;
	struct kvp_json *json;
	struct kvp_jw jw, params, ids; /* of answers, of a first leg's hand-over */
	void *zmq;
	uint64_t start_ns, next_id;
	char *words;
	size_t word_max;
	char *out; /* server-sent events of one answer, sent as one piece */
	size_t out_len, out_max;
	struct kvp_pd_table handoffs;
	uint64_t rejected, pd_aborts; /* requests that a protocol forbids; calls of /abort_request */
	struct engine *engine;
};

static uint64_t virtual_ns(const struct kvp_host *h)
{
	return (uint64_t)((double)(kvp_loop_now_ns(h->loop) - h->start_ns) * h->cfg.scale);
}

/* ---- answers ---- */

static const char *words(struct kvp_host *h, size_t cnt)
{
	if (cnt > h->word_max) {
		char *p = realloc(h->words, cnt * WORD_LEN);
		if (!p)
			return NULL;
		for (size_t i = h->word_max; i < cnt; i++)
			memcpy(p + i * WORD_LEN, WORD, WORD_LEN);
		h->words = p;
		h->word_max = cnt;
	}
	return h->words;
}

static void reply_error(struct kvp_host *h, struct kvp_http_req *r, int status, const char *text)
{
	kvp_jw_reset(&h->jw);
	kvp_answer_error(&h->jw, status, text);
	kvp_http_reply(r, status, JSON_TYPE, h->jw.buf, h->jw.len);
}

static void talk_undirty(struct talk *t)
{
	if (!t->prev)
		return;
	*t->prev = t->next;
	if (t->next)
		t->next->prev = t->prev;
	t->prev = NULL;
}

static void talk_free(struct talk *t)
{
	talk_undirty(t);
	*t->all_prev = t->all_next;
	if (t->all_next)
		t->all_next->all_prev = t->all_prev;
	kvp_ask_free(&t->ask);
	free(t);
}

static void out_add(struct kvp_host *h, const char *s, size_t len)
{
	if (h->out_len + len > h->out_max) {
		size_t max = 2 * (h->out_len + len);
		char *p = realloc(h->out, max);
		if (!p)
			return;
		h->out = p;
		h->out_max = max;
	}
	memcpy(h->out + h->out_len, s, len);
	h->out_len += len;
}

/* out_object adds what the JSON writer holds as one server-sent event. */
static void out_object(struct kvp_host *h)
{
	out_add(h, "data: ", 6);
	out_add(h, h->jw.buf, h->jw.len);
	out_add(h, "\n\n", 2);
	kvp_jw_reset(&h->jw);
}

static void out_send(struct kvp_host *h, struct talk *t)
{
	kvp_http_reply_chunk(t->http, h->out, h->out_len);
	h->out_len = 0;
}

static void add_piece(struct kvp_host *h, struct talk *t)
{
	uint32_t cnt = t->answer.out_tok - t->sent_tok;
	const char *text = words(h, cnt);
	kvp_jw_reset(&h->jw);
	kvp_answer_piece(&h->jw, &t->answer, t->sent_tok ? KVP_ANSWER_MIDDLE : KVP_ANSWER_FIRST,
		text ? text : "", text ? (size_t)cnt * WORD_LEN : 0);
	out_object(h);
	t->sent_tok += cnt;
	t->sent_ns = kvp_loop_now_ns(h->loop);
}

static void send_end(struct kvp_host *h, struct talk *t)
{
	if (t->fault == KVP_PD_CUT) {
		h->out_len = 0;
		kvp_http_reply_abort(t->http);
		return;
	}
	kvp_jw_reset(&h->jw);
	if (t->ask.mode == KVP_ASK_WHOLE) {
		const char *text = words(h, t->answer.out_tok);
		kvp_answer_whole(&h->jw, &t->answer, text ? text : "",
			text ? (size_t)t->answer.out_tok * WORD_LEN : 0);
		kvp_http_reply(t->http, 200, JSON_TYPE, h->jw.buf, h->jw.len);
		return;
	}
	kvp_answer_stop(&h->jw, &t->answer);
	out_object(h);
	if (t->ask.usage == KVP_ASK_USAGE) {
		kvp_answer_usage(&h->jw, &t->answer);
		out_object(h);
	}
	out_add(h, "data: [DONE]\n\n", 14);
	out_send(h, t);
	kvp_http_reply_end(t->http);
}

/* ---- first legs ---- */

static void talk_submit(struct talk *t);

/* What the first leg's answer hands over; its texts lie in h->out until the answer is written. */
static void first_leg_params(struct kvp_host *h, struct talk *t)
{
	struct kvp_jw *w = &h->params, *ids = &h->ids;
	enum kvp_pd_proto proto = h->cfg.pd.proto;
	if (t->pd.leg != KVP_PD_FIRST || proto == KVP_PD_SGLANG || t->fault == KVP_PD_BAD)
		return;
	if (proto == KVP_PD_VLLM)
		t->pd.key = t->answer.id + 1;
	kvp_jw_reset(w);
	kvp_pd_params(w, proto, &t->pd, (uint32_t)(t->engine - h->engine), t->answer.prompt_tok);
	kvp_jw_reset(ids);
	kvp_jw_arr(ids);
	for (uint32_t i = 0; t->ask.tok && i < t->ask.tok_cnt; i++)
		kvp_jw_u64(ids, t->ask.tok[i]);
	kvp_jw_end(ids);
	out_add(h, w->buf, w->len);
	out_add(h, "", 1);
	out_add(h, ids->buf, ids->len);
	out_add(h, "", 1);
	h->out_len = 0;
	if (proto == KVP_PD_VLLM) {
		t->answer.kv_transfer_params = h->out;
	} else {
		t->answer.disaggregated_params = h->out;
		t->answer.prompt_token_ids = h->out + w->len + 1;
	}
}

/* The KV is there: a decode request that waits for it goes on, a later one will find it. */
static void first_leg_done(struct kvp_host *h, struct talk *t)
{
	if (t->pd.leg != KVP_PD_FIRST || t->fault == KVP_PD_BAD)
		return;
	struct kvp_pd_handoff *o = kvp_pd_find(&h->handoffs, t->pd.key);
	o = o ? o : kvp_pd_add(&h->handoffs, t->pd.key);
	if (!o)
		return;
	struct talk *waiter = o->waiter;
	o->prompt_tok = t->answer.prompt_tok;
	o->is_ready = 1;
	if (!waiter)
		return;
	kvp_pd_drop(&h->handoffs, o);
	talk_submit(waiter);
}

/* engine_send sends what the last steps have yielded: first tokens and ends at once, the rest at the pace. */
static void engine_send(struct engine *g)
{
	struct kvp_host *h = g->host;
	uint64_t now_ns = kvp_loop_now_ns(h->loop);
	for (struct talk *t = g->dirty, *next; t; t = next) {
		next = t->next;
		if (t->ask.mode == KVP_ASK_STREAM) {
			if (t->sim && t->sent_tok && now_ns - t->sent_ns < h->cfg.stream_ns)
				continue;
			add_piece(h, t);
		}
		if (!t->sim) {
			first_leg_params(h, t);
			send_end(h, t);
			first_leg_done(h, t);
			talk_free(t);
			continue;
		}
		out_send(h, t);
		talk_undirty(t);
	}
}

/* ---- what the model says ---- */

static void on_stored(void *ctx, const struct kvp_sim_req *r, uint32_t first, uint32_t cnt, uint64_t at_ns)
{
	struct engine *g = ctx;
	const struct talk *t = r->user;
	(void)at_ns;
	if (g->pub)
		kvp_publish_stored(g->pub, first ? &r->key[first - 1] : NULL, r->key + first, cnt,
			t->ask.tok + (size_t)first * g->host->cfg.engine.block_size_tok);
}

static void on_removed(void *ctx, const uint64_t *key, uint32_t cnt, uint64_t at_ns)
{
	struct engine *g = ctx;
	(void)at_ns;
	if (g->pub)
		kvp_publish_removed(g->pub, key, cnt);
}

static void on_token(void *ctx, const struct kvp_sim_req *r, uint64_t at_ns)
{
	struct engine *g = ctx;
	struct talk *t = r->user;
	(void)at_ns;
	t->answer.out_tok = r->out_tok;
	t->answer.cached_tok = r->cached_tok;
	t->answer.first_ns = r->first_ns;
	if (t->prev || (t->ask.mode == KVP_ASK_WHOLE && r->out_tok < r->out_max_tok))
		return;
	t->next = g->dirty;
	t->prev = &g->dirty;
	if (g->dirty)
		g->dirty->prev = &t->next;
	g->dirty = t;
}

static void on_finished(void *ctx, const struct kvp_sim_req *r, uint64_t at_ns)
{
	struct talk *t = r->user;
	(void)ctx;
	t->answer.finish_ns = at_ns;
	t->sim = NULL;
}

/* engine_play brings one engine to the present and tells the world. */
static void engine_play(struct engine *g)
{
	kvp_sim_advance(g->sim, virtual_ns(g->host));
	if (g->pub) {
		struct timespec ts;
		clock_gettime(CLOCK_REALTIME, &ts);
		kvp_publish_flush(g->pub, (double)ts.tv_sec + (double)ts.tv_nsec * 1e-9);
	}
	engine_send(g);
}

/* ---- the clock ---- */

static void on_turn(void *ctx, struct kvp_timer *t);

/* host_arm runs at the end of a turn: requests that came in one turn share a step. */
static void host_arm(void *ctx)
{
	struct kvp_host *h = ctx;
	uint64_t next_ns = KVP_SIM_NEVER;
	for (uint32_t i = 0; i < h->cfg.engine_cnt; i++) {
		uint64_t ns = kvp_sim_next_ns(h->engine[i].sim);
		if (ns < next_ns)
			next_ns = ns;
	}
	if (next_ns == KVP_SIM_NEVER)
		return;
	uint64_t at_ns = h->start_ns + (uint64_t)((double)next_ns / h->cfg.scale) + 1;
	uint64_t soonest_ns = kvp_loop_now_ns(h->loop) + (h->cfg.scale > 1 ? h->cfg.turn_ns : 0);
	kvp_timer_set(h->loop, &h->turn, at_ns > soonest_ns ? at_ns : soonest_ns, on_turn, h);
}

static void on_turn(void *ctx, struct kvp_timer *t)
{
	struct kvp_host *h = ctx;
	(void)t;
	for (uint32_t i = 0; i < h->cfg.engine_cnt; i++)
		engine_play(&h->engine[i]);
	kvp_loop_defer(h->loop, &h->arm, host_arm, h);
}

/* ---- requests ---- */

/* talk_submit gives a request to the model; what cannot be is answered and freed. */
static void talk_submit(struct talk *t)
{
	struct engine *g = t->engine;
	struct kvp_host *h = g->host;
	uint32_t block_size_tok = h->cfg.engine.block_size_tok;
	uint64_t *key = malloc((t->ask.tok_cnt / block_size_tok + 1) * sizeof(*key));
	int rc = KVP_ERR_SYS;
	if (key) {
		engine_play(g);
		uint64_t now_ns = virtual_ns(h);
		t->answer.arrival_ns = now_ns;
		rc = kvp_sim_submit(g->sim, now_ns, key,
			kvp_prompt_chain(t->ask.tok, t->ask.tok_cnt, block_size_tok, key), t->ask.tok_cnt,
			t->ask.out_tok, t, &t->sim);
	}
	free(key);
	if (rc) {
		reply_error(h, t->http, rc == KVP_ERR_LIMIT ? 400 : 500,
			rc == KVP_ERR_LIMIT ? "prompt and max_tokens exceed the cache" : "out of memory");
		talk_free(t);
		return;
	}
	if (t->pd.leg == KVP_PD_SECOND)
		t->sim->remote_tok = t->ask.tok_cnt;
	if (t->ask.mode == KVP_ASK_STREAM)
		kvp_http_reply_begin(t->http, 200, "text/event-stream; charset=utf-8", NULL, NULL);
	if (!g->pub && t->pd.leg != KVP_PD_FIRST) { /* nobody will ask for them */
		free(t->ask.tok);
		t->ask.tok = NULL;
	}
	kvp_loop_defer(h->loop, &h->arm, host_arm, h);
}

/* pd_begin: 0 = the request may run; 1 = it waits; else the status of a refusal. */
static int pd_begin(struct kvp_host *h, struct talk *t, const char **why)
{
	struct kvp_pd_handoff *o = t->pd.leg == KVP_PD_PLAIN ? NULL : kvp_pd_find(&h->handoffs, t->pd.key);
	if (t->pd.leg == KVP_PD_PLAIN || (t->pd.leg == KVP_PD_FIRST && h->cfg.pd.proto == KVP_PD_VLLM))
		return 0;
	if (t->pd.leg == KVP_PD_FIRST) {
		*why = "the number of this handoff is taken";
		if (o && !o->waiter)
			return 400;
		if (!o)
			o = kvp_pd_add(&h->handoffs, t->pd.key);
		return o ? 0 : 500;
	}
	*why = "there is no such handoff";
	if (h->cfg.pd.proto != KVP_PD_SGLANG && (!o || !o->is_ready))
		return 400;
	*why = "the handoff is of another prompt";
	if (o && o->is_ready && o->prompt_tok != t->ask.tok_cnt)
		return 400;
	if (o && o->is_ready) {
		kvp_pd_drop(&h->handoffs, o);
		return 0;
	}
	*why = "two requests in one room";
	if (o && o->waiter)
		return 400;
	o = o ? o : kvp_pd_add(&h->handoffs, t->pd.key);
	if (!o)
		return 500;
	o->waiter = t;
	return 1;
}

/* pd_end: a request that ends unfinished takes its part of the handoff with it. */
static void pd_end(struct talk *t)
{
	struct kvp_pd_table *table = &t->engine->host->handoffs;
	struct kvp_pd_handoff *o = t->pd.leg == KVP_PD_PLAIN ? NULL : kvp_pd_find(table, t->pd.key);
	if (o && (o->waiter == t || (t->pd.leg == KVP_PD_FIRST && !o->is_ready && !o->waiter)))
		kvp_pd_drop(table, o);
}

static enum kvp_pd_fault next_fault(struct engine *g)
{
	const struct kvp_pd_cfg *pd = &g->host->cfg.pd;
	g->generated++;
	return pd->fault_every && g->role == pd->fault_role && g->generated % pd->fault_every == 0
		       ? pd->fault
		       : KVP_PD_NO_FAULT;
}

/* Faults that come before any work. 1 = the request is taken care of; one that hangs ends with its client. */
static int fault_now(struct engine *g, struct talk *t)
{
	if (t->fault == KVP_PD_ERROR)
		reply_error(g->host, t->http, 500, "an error was asked for");
	else if (t->fault == KVP_PD_REFUSE)
		reply_error(g->host, t->http, 429, "a refusal was asked for");
	else if (t->fault == KVP_PD_RESET)
		kvp_http_reply_abort(t->http);
	else if (t->fault != KVP_PD_HANG)
		return 0;
	pd_end(t);
	if (t->fault == KVP_PD_HANG)
		t->pd.leg = KVP_PD_PLAIN;
	else
		talk_free(t);
	return 1;
}

static void begin_talk(
	struct engine *g, struct kvp_http_req *r, struct kvp_ask *ask, const struct kvp_pd_ask *pd)
{
	struct kvp_host *h = g->host;
	struct talk *t = calloc(1, sizeof(*t));
	const char *why = "out of memory";
	if (!t) {
		kvp_ask_free(ask);
		reply_error(h, r, 500, why);
		return;
	}
	t->engine = g;
	t->http = r;
	t->ask = *ask;
	t->pd = *pd;
	t->fault = next_fault(g);
	t->all_next = g->all;
	t->all_prev = &g->all;
	if (g->all)
		g->all->all_prev = &t->all_next;
	g->all = t;
	r->user = t;
	if (pd->leg == KVP_PD_FIRST)
		t->ask.out_tok = 1;
	t->answer = (struct kvp_answer){.kind = ask->kind,
		.id = h->next_id++,
		.model = h->cfg.model,
		.prompt_tok = ask->tok_cnt,
		.created_s = (uint64_t)time(NULL)};
	int status = pd_begin(h, t, &why);
	if (status > 1) {
		h->rejected++;
		t->pd.leg = KVP_PD_PLAIN;
		reply_error(h, r, status, why);
		talk_free(t);
		return;
	}
	if (!fault_now(g, t) && status == 0)
		talk_submit(t);
}

enum verb { GENERATE, RENDER };

static void post_completion(struct engine *g, struct kvp_http_req *r, enum kvp_ask_kind kind, enum verb verb)
{
	struct kvp_host *h = g->host;
	struct kvp_ask ask;
	const char *why = "";
	int status = kvp_ask_parse(h->json, r->body, r->body_len, kind, h->cfg.model, &ask, &why);
	if (status == 200 && verb == GENERATE && ask.prompt_cnt > 1) {
		status = 400;
		why = "one prompt a request, please";
	}
	if (status != 200) {
		kvp_ask_free(&ask);
		reply_error(h, r, status, why);
		return;
	}
	if (verb == GENERATE) {
		struct kvp_pd_ask pd;
		status = kvp_pd_ask(&h->cfg.pd, g->role, h->json, r->body, r->body_len, &ask, &pd, &why);
		if (status == 200) {
			begin_talk(g, r, &ask, &pd);
			return;
		}
		h->rejected++;
		kvp_ask_free(&ask);
		reply_error(h, r, status, why);
		return;
	}
	kvp_jw_reset(&h->jw);
	kvp_answer_render(&h->jw, &ask, h->next_id++, h->cfg.model);
	kvp_http_reply(r, 200, JSON_TYPE, h->jw.buf, h->jw.len);
	kvp_ask_free(&ask);
}

static void get_models(struct engine *g, struct kvp_http_req *r)
{
	struct kvp_jw *w = &g->host->jw;
	kvp_jw_reset(w);
	kvp_jw_obj(w);
	kvp_jw_kstr(w, "object", "list");
	kvp_jw_key(w, "data");
	kvp_jw_arr(w);
	kvp_jw_obj(w);
	kvp_jw_kstr(w, "id", g->host->cfg.model);
	kvp_jw_kstr(w, "object", "model");
	kvp_jw_kstr(w, "owned_by", "kvpick-sim");
	kvp_jw_end(w);
	kvp_jw_end(w);
	kvp_jw_end(w);
	kvp_http_reply(r, 200, JSON_TYPE, w->buf, w->len);
}

static void get_stats(struct engine *g, struct kvp_http_req *r)
{
	struct kvp_jw *w = &g->host->jw;
	struct kvp_sim_load load;
	engine_play(g);
	kvp_sim_load(g->sim, &load);
	kvp_jw_reset(w);
	kvp_jw_obj(w);
	kvp_jw_ku64(w, "virtual_ns", virtual_ns(g->host));
	kvp_jw_ku64(w, "waiting_requests", load.waiting_cnt);
	kvp_jw_ku64(w, "running_requests", load.running_cnt);
	kvp_jw_ku64(w, "cached_blocks", load.cached_blk);
	kvp_jw_ku64(w, "pinned_blocks", load.pinned_blk);
	kvp_jw_ku64(w, "private_blocks", load.private_blk);
	kvp_jw_ku64(w, "steps", load.step_cnt);
	kvp_jw_ku64(w, "prefill_tokens", load.prefill_tok);
	kvp_jw_ku64(w, "evicted_blocks", load.evicted_blk);
	uint64_t open_cnt = 0; /* also those that wait for a handoff or hang */
	for (const struct talk *t = g->all; t; t = t->all_next)
		open_cnt++;
	kvp_jw_ku64(w, "open_requests", open_cnt);
	kvp_jw_ku64(w, "generated", g->generated);
	kvp_jw_ku64(w, "handoffs", g->host->handoffs.cnt);
	kvp_jw_ku64(w, "protocol_rejected", g->host->rejected);
	kvp_jw_ku64(w, "abort_requests", g->host->pd_aborts);
	kvp_jw_end(w);
	kvp_http_reply(r, 200, JSON_TYPE, w->buf, w->len);
}

/* reset_cache empties the cache; like vLLM only while nothing runs. */
static void reset_cache(struct engine *g, struct kvp_http_req *r)
{
	engine_play(g);
	if (kvp_sim_clear(g->sim)) {
		reply_error(g->host, r, 409, "requests are running");
		return;
	}
	if (g->pub)
		kvp_publish_cleared(g->pub);
	engine_play(g);
	kvp_http_reply(r, 200, JSON_TYPE, "{}", 2);
}

static void on_abort(void *ctx, struct kvp_http_req *r);

/* abort_request ends what runs under that name; its client has left already, or sees the break. */
static void abort_request(struct engine *g, struct kvp_http_req *r)
{
	struct kvp_json_val root, v;
	struct talk *t = g->all;
	const char *rid;
	size_t len;
	g->host->pd_aborts++;
	if (kvp_json_parse(g->host->json, r->body, r->body_len, 8, &root, NULL) ||
		kvp_json_get(root, "rid", &v) || kvp_json_str(v, &rid, &len)) {
		reply_error(g->host, r, 400, "no rid");
		return;
	}
	while (t && strcmp(t->pd.rid, rid) != 0)
		t = t->all_next;
	if (t) {
		struct kvp_http_req *http = t->http;
		on_abort(g, http);
		kvp_http_reply_abort(http);
	}
	kvp_http_reply(r, 200, NULL, "", 0);
}

static void get_info(struct engine *g, struct kvp_http_req *r)
{
	kvp_jw_reset(&g->host->jw);
	kvp_pd_info(&g->host->jw, g->role);
	kvp_http_reply(r, 200, JSON_TYPE, g->host->jw.buf, g->host->jw.len);
}

static int path_is(const struct kvp_http_req *r, const char *path)
{
	return r->path_len == strlen(path) && !memcmp(r->path, path, r->path_len);
}

static void on_request(void *ctx, struct kvp_http_req *r)
{
	struct engine *g = ctx;
	if (r->method == KVP_HTTP_POST && path_is(r, "/v1/chat/completions"))
		post_completion(g, r, KVP_ASK_CHAT, GENERATE);
	else if (r->method == KVP_HTTP_POST && path_is(r, "/v1/completions"))
		post_completion(g, r, KVP_ASK_COMPLETION, GENERATE);
	else if (r->method == KVP_HTTP_POST && path_is(r, "/v1/chat/completions/render"))
		post_completion(g, r, KVP_ASK_CHAT, RENDER);
	else if (r->method == KVP_HTTP_POST && path_is(r, "/v1/completions/render"))
		post_completion(g, r, KVP_ASK_COMPLETION, RENDER);
	else if (r->method == KVP_HTTP_POST && path_is(r, "/reset_prefix_cache"))
		reset_cache(g, r);
	else if (r->method == KVP_HTTP_GET && path_is(r, "/health"))
		kvp_http_reply(r, 200, NULL, "", 0);
	else if (r->method == KVP_HTTP_GET && path_is(r, "/v1/models"))
		get_models(g, r);
	else if (r->method == KVP_HTTP_GET && path_is(r, "/stats"))
		get_stats(g, r);
	else if (g->host->cfg.pd.proto == KVP_PD_SGLANG && r->method == KVP_HTTP_GET &&
		 path_is(r, "/server_info"))
		get_info(g, r);
	else if (g->host->cfg.pd.proto == KVP_PD_SGLANG && r->method == KVP_HTTP_POST &&
		 path_is(r, "/abort_request"))
		abort_request(g, r);
	else
		reply_error(g->host, r, 404, "no such path");
}

static void on_abort(void *ctx, struct kvp_http_req *r)
{
	struct engine *g = ctx;
	struct talk *t = r->user;
	if (!t)
		return;
	r->user = NULL;
	pd_end(t);
	if (t->sim)
		kvp_sim_abort(g->sim, t->sim);
	talk_free(t);
}

/* ---- life ---- */

static int engine_open(struct kvp_host *h, struct engine *g, uint32_t i)
{
	struct kvp_sim_sink sink = {g, on_stored, on_removed, on_token, on_finished};
	struct kvp_http_server_cfg http = {.ip = h->cfg.ip,
		.port = h->cfg.http_port ? (uint16_t)(h->cfg.http_port + i) : 0,
		.body_max_bytes = BODY_MAX_BYTES,
		.on_request = on_request,
		.on_abort = on_abort,
		.ctx = g};
	struct kvp_publish_cfg pub = h->cfg.publish;
	g->host = h;
	g->role = h->cfg.pd.proto && i < h->cfg.pd.prefill_cnt ? KVP_PD_PREFILL : KVP_PD_DECODE;
	g->sim = kvp_sim_open(&h->cfg.engine, &sink);
	if (!g->sim)
		return KVP_ERR_INVAL;
	int rc = kvp_http_server_open(h->loop, &http, &g->http);
	if (rc || h->cfg.events == KVP_HOST_EVENTS_OFF)
		return rc;
	pub.event_port = pub.event_port ? (uint16_t)(pub.event_port + i) : 0;
	pub.replay_port = pub.replay_port ? (uint16_t)(pub.replay_port + i) : 0;
	return kvp_publish_open(h->loop, h->zmq, &pub, &g->pub);
}

int kvp_host_open(struct kvp_loop *l, const struct kvp_host_cfg *cfg, struct kvp_host **out)
{
	if (!cfg->engine_cnt || cfg->engine_cnt > 1024 || !(cfg->scale > 0))
		return KVP_ERR_INVAL;
	struct kvp_host *h = calloc(1, sizeof(*h));
	if (!h)
		return KVP_ERR_SYS;
	h->cfg = *cfg;
	h->cfg.publish.ip = cfg->ip;
	h->cfg.publish.block_size_tok = cfg->engine.block_size_tok;
	h->loop = l;
	h->start_ns = kvp_loop_now_ns(l);
	kvp_jw_init(&h->jw);
	kvp_jw_init(&h->params);
	kvp_jw_init(&h->ids);
	h->json = kvp_json_new();
	h->zmq = zmq_ctx_new();
	h->engine = calloc(cfg->engine_cnt, sizeof(*h->engine));
	int rc = h->json && h->zmq && h->engine ? KVP_OK : KVP_ERR_SYS;
	if (h->zmq)
		zmq_ctx_set(h->zmq, ZMQ_MAX_SOCKETS, (int)(2 * cfg->engine_cnt + 16));
	for (uint32_t i = 0; !rc && i < cfg->engine_cnt; i++)
		rc = engine_open(h, &h->engine[i], i);
	if (rc) {
		kvp_host_close(h);
		return rc;
	}
	*out = h;
	return KVP_OK;
}

void kvp_host_close(struct kvp_host *h)
{
	if (!h)
		return;
	kvp_timer_cancel(h->loop, &h->turn);
	kvp_loop_defer_cancel(&h->arm);
	for (uint32_t i = 0; h->engine && i < h->cfg.engine_cnt; i++) {
		kvp_http_server_close(h->engine[i].http); /* aborts what runs */
		kvp_publish_close(h->engine[i].pub);
		kvp_sim_close(h->engine[i].sim);
	}
	if (h->zmq)
		zmq_ctx_term(h->zmq);
	kvp_jw_free(&h->jw);
	kvp_jw_free(&h->params);
	kvp_jw_free(&h->ids);
	kvp_json_free(h->json);
	free(h->handoffs.handoff);
	free(h->engine);
	free(h->words);
	free(h->out);
	free(h);
}

void kvp_host_ports(const struct kvp_host *h, uint32_t engine, struct kvp_host_ports *out)
{
	const struct engine *g = &h->engine[engine];
	*out = (struct kvp_host_ports){.http = kvp_http_server_port(g->http),
		.event = g->pub ? kvp_publish_event_port(g->pub) : 0,
		.replay = g->pub ? kvp_publish_replay_port(g->pub) : 0};
}
