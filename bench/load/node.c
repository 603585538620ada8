/* bench/load/node.c — see node.h. */
#include "bench/load/node.h"
#include <inttypes.h>
#include <kvpick/hash.h>
#include <stdlib.h>
#include <string.h>

#define READY_WAIT_NS 30000000000ull
#define READY_PAUSE_NS 100000000ull
#define CALL_NS 10000000000ull

static void put_u32s(struct kvp_jw *w, const char *key, const uint32_t *v, uint32_t cnt)
{
	kvp_jw_key(w, key);
	kvp_jw_arr(w);
	for (uint32_t i = 0; i < cnt; i++)
		kvp_jw_u64(w, v[i]);
	kvp_jw_end(w);
}

static void put_hashes(struct kvp_jw *w, const char *key, const uint64_t *v, uint64_t cnt)
{
	kvp_jw_key(w, key);
	kvp_jw_i64s(w, (const int64_t *)v, cnt);
}

int kvp_node_select_body(struct kvp_jw *w, const struct kvp_load_cfg *cfg, const uint32_t *tok,
	uint32_t tok_cnt, uint32_t out_tok, const char *selection_id)
{
	kvp_jw_reset(w);
	kvp_jw_obj(w);
	kvp_jw_kstr(w, "model_name", cfg->model);
	kvp_jw_kstr(w, "routing_group", cfg->group);
	kvp_jw_kstr(w, "selection_id", selection_id);
	kvp_jw_ku64(w, "expected_output_tokens", out_tok);
	if (cfg->node_form == KVP_LOAD_TOKENS) {
		put_u32s(w, "token_ids", tok, tok_cnt);
		kvp_jw_end(w);
		return kvp_jw_done(w);
	}
	struct kvp_hasher h;
	kvp_hasher_init(&h, tok, tok_cnt, cfg->engine.block_size_tok, KVP_HASH_WINDOW_PLAIN,
		kvp_hash_seed(NULL, 0, NULL, 0));
	uint64_t n = kvp_hasher_blocks(&h);
	uint64_t *hash = malloc((n + 1) * sizeof(*hash));
	if (!hash)
		return KVP_ERR_SYS;
	kvp_hasher_local(&h, 0, n, hash);
	put_hashes(w, "block_hashes", hash, n);
	kvp_hash_chain(NULL, hash, n, hash);
	put_hashes(w, "sequence_hashes", hash, n);
	kvp_jw_ku64(w, "isl_tokens", tok_cnt);
	kvp_jw_end(w);
	free(hash);
	return kvp_jw_done(w);
}

void kvp_node_engine_body(struct kvp_jw *w, const struct kvp_load_cfg *cfg, const uint64_t *id,
	uint32_t id_cnt, const uint32_t *tok, uint32_t tok_cnt, uint32_t out_tok)
{
	kvp_jw_reset(w);
	kvp_jw_obj(w);
	kvp_jw_kstr(w, "model", cfg->model);
	kvp_jw_kbool(w, "stream", 1);
	kvp_jw_key(w, "stream_options");
	kvp_jw_obj(w);
	kvp_jw_kbool(w, "include_usage", 1);
	kvp_jw_end(w);
	kvp_jw_ku64(w, "max_tokens", out_tok ? out_tok : 1);
	if (cfg->engine_form == KVP_LOAD_TOKENS) {
		put_u32s(w, "prompt", tok, tok_cnt);
	} else {
		kvp_jw_key(w, "kvpick_hash_ids");
		kvp_jw_arr(w);
		for (uint32_t i = 0; i < id_cnt; i++)
			kvp_jw_u64(w, id[i]);
		kvp_jw_end(w);
		kvp_jw_ku64(w, "prompt_len", tok_cnt);
	}
	kvp_jw_end(w);
}

static void put_endpoint(
	struct kvp_jw *w, const char *key, const char *scheme, const char *host, uint16_t port)
{
	char text[128];
	int is_v6 = strchr(host, ':') != NULL;
	snprintf(
		text, sizeof(text), "%s://%s%s%s:%u", scheme, is_v6 ? "[" : "", host, is_v6 ? "]" : "", port);
	kvp_jw_kstr(w, key, text);
}

void kvp_node_worker_body(
	struct kvp_jw *w, const struct kvp_load_cfg *cfg, const struct kvp_load_target *t, uint64_t worker_id)
{
	kvp_jw_reset(w);
	kvp_jw_obj(w);
	kvp_jw_ku64(w, "worker_id", worker_id);
	kvp_jw_kstr(w, "model_name", cfg->model);
	kvp_jw_kstr(w, "routing_group", cfg->group);
	put_endpoint(w, "endpoint", "http", t->host, t->http_port);
	if (t->event_port) {
		kvp_jw_key(w, "kv_events_endpoints");
		kvp_jw_obj(w);
		put_endpoint(w, "0", "tcp", t->host, t->event_port);
		kvp_jw_end(w);
	}
	if (t->replay_port)
		put_endpoint(w, "replay_endpoint", "tcp", t->host, t->replay_port);
	kvp_jw_ku64(w, "block_size", cfg->engine.block_size_tok);
	kvp_jw_ku64(w, "data_parallel_start_rank", 0);
	kvp_jw_ku64(w, "data_parallel_size", 1);
	kvp_jw_ku64(w, "max_num_batched_tokens", cfg->engine.chunk_tok);
	kvp_jw_ku64(w, "total_kv_blocks", cfg->engine.block_max);
	kvp_jw_end(w);
}

int kvp_node_selection(struct kvp_json *json, const char *text, size_t len, char host[64], uint16_t *port)
{
	struct kvp_json_val root, m;
	const char *s;
	size_t n;
	if (kvp_json_parse(json, text, len, KVP_JSON_DEPTH_MAX, &root, NULL) ||
		kvp_json_get(root, "endpoint", &m) || kvp_json_str(m, &s, &n))
		return KVP_ERR_PROTO;
	return kvp_load_url(s, host, port);
}

static uint64_t get_u64(struct kvp_json_val obj, const char *key)
{
	struct kvp_json_val m;
	uint64_t v = 0;
	if (kvp_json_get(obj, key, &m) == KVP_OK)
		kvp_json_u64(m, &v);
	return v;
}

int kvp_node_usage(struct kvp_json *json, const char *text, size_t len, struct kvp_node_usage *out)
{
	struct kvp_json_val root, usage, more;
	if (kvp_json_parse(json, text, len, KVP_JSON_DEPTH_MAX, &root, NULL))
		return KVP_ERR_PROTO;
	if (kvp_json_get(root, "usage", &usage) || kvp_json_type(usage) != KVP_JSON_OBJ)
		return KVP_ERR_NOTFOUND;
	*out = (struct kvp_node_usage){.prompt_tok = get_u64(usage, "prompt_tokens"),
		.out_tok = get_u64(usage, "completion_tokens")};
	if (kvp_json_get(usage, "prompt_tokens_details", &more) == KVP_OK)
		out->cached_tok = get_u64(more, "cached_tokens");
	if (kvp_json_get(root, "kvpick_sim", &more) == KVP_OK) {
		out->arrival_ns = get_u64(more, "arrival_ns");
		out->first_ns = get_u64(more, "first_ns");
		out->finish_ns = get_u64(more, "finish_ns");
	}
	return KVP_OK;
}

/* ---- registration ---- */

struct wait { /* one call that the loop is run for */
	int is_done, status, err;
	char text[512]; /* start of the answer */
	size_t len;
};

static void wait_body(void *ctx, struct kvp_http_call *call, const char *data, uint64_t len)
{
	struct wait *w = ctx;
	(void)call;
	if (len > sizeof(w->text) - 1 - w->len)
		len = sizeof(w->text) - 1 - w->len;
	memcpy(w->text + w->len, data, len);
	w->len += len;
}

static void wait_done(void *ctx, struct kvp_http_call *call, int status, int err)
{
	struct wait *w = ctx;
	(void)call;
	w->is_done = 1;
	w->status = status;
	w->err = err;
}

static int call_and_wait(
	struct kvp_loop *l, struct kvp_http_client *client, struct kvp_http_call_cfg *call, struct wait *w)
{
	*w = (struct wait){0};
	call->timeout_ns = CALL_NS;
	call->on_body = wait_body;
	call->on_done = wait_done;
	call->ctx = w;
	int rc = kvp_http_call(client, call, NULL);
	while (!rc && !w->is_done)
		rc = kvp_loop_run_once(l, KVP_LOOP_FOREVER) < 0 ? KVP_ERR_SYS : KVP_OK;
	return rc ? rc : w->err;
}

static void no_op(void *ctx, struct kvp_timer *t)
{
	(void)ctx;
	(void)t;
}

/* wait_ok repeats GET path until it answers 200. */
static int wait_ok(
	struct kvp_loop *l, struct kvp_http_client *client, struct kvp_http_call_cfg *call, const char *path)
{
	struct wait w = {0};
	struct kvp_timer pause = {0};
	uint64_t end_ns = kvp_loop_now_ns(l) + READY_WAIT_NS;
	call->method = "GET";
	call->path = path;
	call->body = NULL;
	call->len = 0;
	while (kvp_loop_now_ns(l) < end_ns) {
		if (call_and_wait(l, client, call, &w) == KVP_OK && w.status == 200)
			return KVP_OK;
		uint64_t until_ns = kvp_loop_now_ns(l) + READY_PAUSE_NS;
		kvp_timer_set(l, &pause, until_ns, no_op, NULL);
		while (kvp_loop_now_ns(l) < until_ns)
			if (kvp_loop_run_once(l, KVP_LOOP_FOREVER) < 0)
				break;
		kvp_timer_cancel(l, &pause);
	}
	fprintf(stderr, "kvpick-load: http://%s:%u%s: status %d %s\n", call->host, call->port, path, w.status,
		w.text);
	return KVP_ERR_TIMEOUT;
}

int kvp_node_register(struct kvp_loop *l, struct kvp_http_client *client, const struct kvp_load_cfg *cfg,
	const struct kvp_load_set *set, const char *headers)
{
	struct kvp_jw w;
	struct kvp_http_call_cfg call = {.host = cfg->base_host, .port = cfg->base_port};
	char lines[1024];
	int rc;
	snprintf(lines, sizeof(lines), "content-type: application/json\r\n%s", headers ? headers : "");
	call.headers = lines;
	kvp_jw_init(&w);
	rc = wait_ok(l, client, &call, "/health");
	for (uint32_t i = 0; !rc && i < set->cnt; i++) {
		struct wait answer;
		kvp_node_worker_body(&w, cfg, &set->target[i], i + 1);
		call.method = "POST";
		call.path = "/workers";
		call.body = w.buf;
		call.len = w.len;
		rc = call_and_wait(l, client, &call, &answer);
		if (!rc && (answer.status != 201 || strstr(answer.text, "\"incomplete\"")))
			rc = KVP_ERR_PROTO;
		if (rc)
			fprintf(stderr,
				"kvpick-load: registering worker %u at http://%s:%u: %s, status %d %s\n",
				i + 1, cfg->base_host, cfg->base_port, kvp_strerror(rc), answer.status,
				answer.text);
	}
	kvp_jw_free(&w);
	return rc ? rc : wait_ok(l, client, &call, "/ready");
}
