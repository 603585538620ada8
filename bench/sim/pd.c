/* bench/sim/pd.c — see pd.h. */
#include "bench/sim/pd.h"
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define BOOTSTRAP_PORT 8998
#define SGLANG_VERSION "0.5.19"
#define BLOCK_TOK 16 /* of the block ids that a handoff names */
#define BLOCKS_MAX 4096

static int is_null(struct kvp_json_val root, const char *key)
{
	struct kvp_json_val v;
	return kvp_json_get(root, key, &v) || kvp_json_type(v) == KVP_JSON_NULL;
}

static uint64_t number(struct kvp_json_val obj, const char *key)
{
	struct kvp_json_val v;
	uint64_t n;
	return kvp_json_get(obj, key, &v) || kvp_json_type(v) != KVP_JSON_INT || kvp_json_u64(v, &n) ? 0 : n;
}

static int flag(struct kvp_json_val obj, const char *key)
{
	struct kvp_json_val v;
	int on = 0;
	return kvp_json_get(obj, key, &v) == KVP_OK && kvp_json_bool(v, &on) == KVP_OK && on;
}

static const char *text(struct kvp_json_val obj, const char *key)
{
	struct kvp_json_val v;
	const char *s;
	size_t len;
	return kvp_json_get(obj, key, &v) || kvp_json_str(v, &s, &len) ? "" : s;
}

/* ---- vLLM ---- */

static int vllm(enum kvp_pd_role role, struct kvp_json_val root, const struct kvp_ask *ask,
	struct kvp_pd_ask *out, const char **why)
{
	struct kvp_json_val p, groups;
	*why = "stream_options needs stream";
	if (!is_null(root, "stream_options") && ask->mode != KVP_ASK_STREAM)
		return 400;
	*why = "min_tokens is over max_tokens";
	if (number(root, "min_tokens") > ask->out_tok)
		return 400;
	if (is_null(root, "kv_transfer_params"))
		return 200;
	kvp_json_get(root, "kv_transfer_params", &p);
	*why = "kv_transfer_params is not what this engine takes";
	if (kvp_json_type(p) != KVP_JSON_OBJ || flag(p, "do_remote_decode") == flag(p, "do_remote_prefill"))
		return 400;
	if (flag(p, "do_remote_decode")) {
		out->leg = KVP_PD_FIRST;
		return role == KVP_PD_PREFILL && ask->out_tok == 1 && ask->mode == KVP_ASK_WHOLE ? 200 : 400;
	}
	if (role != KVP_PD_DECODE || kvp_json_get(p, "remote_block_ids", &groups) ||
		kvp_json_type(groups) != KVP_JSON_ARR || !text(p, "remote_host")[0] ||
		!text(p, "remote_engine_id")[0] || !number(p, "remote_port"))
		return 400;
	out->leg = KVP_PD_SECOND;
	const char *id = strrchr(text(p, "remote_request_id"), '-');
	out->key = id ? strtoull(id + 1, NULL, 16) : 0;
	return 200;
}

/* ---- SGLang ---- */

static int is_rid(const char *s)
{
	return strlen(s) == 32 && strspn(s, "0123456789abcdef") == 32;
}

static int sglang(enum kvp_pd_role role, struct kvp_json_val root, struct kvp_pd_ask *out, const char **why)
{
	const char *host = text(root, "bootstrap_host"), *rid = text(root, "rid");
	struct kvp_json_val room;
	*why = "an engine of a pair needs bootstrap_host, bootstrap_port, bootstrap_room and rid";
	if (!host[0] || host[0] == '[' || number(root, "bootstrap_port") != BOOTSTRAP_PORT || !is_rid(rid) ||
		kvp_json_get(root, "bootstrap_room", &room) || kvp_json_u64(room, &out->key) ||
		out->key > INT64_MAX)
		return 400;
	out->leg = role == KVP_PD_PREFILL ? KVP_PD_FIRST : KVP_PD_SECOND;
	snprintf(out->rid, sizeof(out->rid), "%s", rid);
	return 200;
}

/* ---- TensorRT-LLM ---- */

static int is_known(const char *key, size_t len)
{
	static const char *const known[] = {"model", "messages", "prompt", "max_tokens",
		"max_completion_tokens", "temperature", "top_p", "seed", "stream", "stream_options", "n",
		"best_of", "tools", "stop", "disaggregated_params", "prompt_token_ids", "kvpick_hash_ids",
		"prompt_len", "logprobs", "top_logprobs"};
	for (size_t i = 0; i < sizeof(known) / sizeof(known[0]); i++)
		if (strlen(known[i]) == len && !memcmp(known[i], key, len))
			return 1;
	return 0;
}

static int trtllm(enum kvp_pd_role role, struct kvp_json_val root, const struct kvp_ask *ask,
	struct kvp_pd_ask *out, const char **why)
{
	struct kvp_json_val p, ids;
	struct kvp_json_iter it = kvp_json_each(root);
	*why = "a member that is not known";
	while (kvp_json_next(&it))
		if (!is_known(it.key, it.key_len))
			return 400;
	if (is_null(root, "disaggregated_params"))
		return 200;
	kvp_json_get(root, "disaggregated_params", &p);
	*why = "disaggregated_params is not what this engine takes";
	out->key = number(p, "disagg_request_id");
	if (out->key < UINT64_C(1) << 40 || out->key > INT64_MAX)
		return 400;
	if (role == KVP_PD_PREFILL) {
		out->leg = KVP_PD_FIRST;
		return strcmp(text(p, "request_type"), "context_only") == 0 && ask->mode == KVP_ASK_WHOLE &&
				       is_null(root, "stream_options")
			       ? 200
			       : 400;
	}
	out->leg = KVP_PD_SECOND;
	const char *where = ask->kind == KVP_ASK_CHAT ? "prompt_token_ids" : "prompt";
	return strcmp(text(p, "request_type"), "generation_only") == 0 &&
			       number(p, "ctx_request_id") == out->key &&
			       text(p, "encoded_opaque_state")[0] &&
			       kvp_json_get(root, where, &ids) == KVP_OK && kvp_json_type(ids) == KVP_JSON_ARR
		       ? 200
		       : 400;
}

int kvp_pd_ask(const struct kvp_pd_cfg *cfg, enum kvp_pd_role role, struct kvp_json *json, const char *body,
	size_t len, const struct kvp_ask *ask, struct kvp_pd_ask *out, const char **why)
{
	struct kvp_json_val root;
	*out = (struct kvp_pd_ask){.leg = KVP_PD_PLAIN};
	if (cfg->proto == KVP_PD_OFF)
		return 200;
	if (kvp_json_parse(json, body, len, KVP_JSON_DEPTH_MAX, &root, NULL)) {
		*why = "the body is not a JSON object";
		return 400;
	}
	switch (cfg->proto) {
	case KVP_PD_VLLM:
		return vllm(role, root, ask, out, why);
	case KVP_PD_SGLANG:
		return sglang(role, root, out, why);
	case KVP_PD_TRTLLM:
		return trtllm(role, root, ask, out, why);
	case KVP_PD_OFF:
		break;
	}
	return 200;
}

/* ---- handoffs ---- */

struct kvp_pd_handoff *kvp_pd_find(struct kvp_pd_table *t, uint64_t key)
{
	for (uint32_t i = 0; i < t->cnt; i++)
		if (t->handoff[i].key == key)
			return &t->handoff[i];
	return NULL;
}

struct kvp_pd_handoff *kvp_pd_add(struct kvp_pd_table *t, uint64_t key)
{
	if (t->cnt == t->cap) {
		uint32_t cap = t->cap ? 2 * t->cap : 64;
		struct kvp_pd_handoff *p = realloc(t->handoff, cap * sizeof(*p));
		if (!p)
			return NULL;
		t->handoff = p;
		t->cap = cap;
	}
	t->handoff[t->cnt] = (struct kvp_pd_handoff){.key = key};
	return &t->handoff[t->cnt++];
}

void kvp_pd_drop(struct kvp_pd_table *t, struct kvp_pd_handoff *h)
{
	*h = t->handoff[--t->cnt];
}

/* ---- answers ---- */

static void vllm_params(struct kvp_jw *w, const struct kvp_pd_ask *a, uint32_t engine, uint32_t prompt_tok)
{
	char id[48];
	uint32_t cnt = (prompt_tok + BLOCK_TOK - 1) / BLOCK_TOK;
	kvp_jw_kbool(w, "do_remote_prefill", 1);
	kvp_jw_kbool(w, "do_remote_decode", 0);
	kvp_jw_key(w, "remote_block_ids");
	kvp_jw_arr(w);
	kvp_jw_arr(w);
	for (uint32_t i = 0; i < cnt && i < BLOCKS_MAX; i++)
		kvp_jw_u64(w, i);
	kvp_jw_end(w);
	kvp_jw_end(w);
	snprintf(id, sizeof(id), "sim-%u", engine);
	kvp_jw_kstr(w, "remote_engine_id", id);
	snprintf(id, sizeof(id), "chatcmpl-%" PRIx64, a->key);
	kvp_jw_kstr(w, "remote_request_id", id);
	kvp_jw_kstr(w, "remote_host", "127.0.0.1");
	kvp_jw_ku64(w, "remote_port", 5600);
	kvp_jw_ku64(w, "tp_size", 1);
	kvp_jw_ku64(w, "remote_num_tokens", prompt_tok);
	kvp_jw_kstr(w, "transfer_mode", "pull");
}

void kvp_pd_params(struct kvp_jw *w, enum kvp_pd_proto proto, const struct kvp_pd_ask *a, uint32_t engine,
	uint32_t prompt_tok)
{
	kvp_jw_obj(w);
	if (proto == KVP_PD_VLLM) {
		vllm_params(w, a, engine, prompt_tok);
	} else {
		kvp_jw_kstr(w, "request_type", "context_only");
		kvp_jw_key(w, "first_gen_tokens");
		kvp_jw_arr(w);
		kvp_jw_u64(w, 1);
		kvp_jw_end(w);
		kvp_jw_ku64(w, "ctx_request_id", a->key);
		kvp_jw_kstr(w, "encoded_opaque_state", "c2ltdWxhdGVk");
		kvp_jw_ku64(w, "disagg_request_id", a->key);
		kvp_jw_ku64(w, "ctx_dp_rank", 0);
	}
	kvp_jw_end(w);
}

void kvp_pd_info(struct kvp_jw *w, enum kvp_pd_role role)
{
	kvp_jw_obj(w);
	kvp_jw_kstr(w, "version", SGLANG_VERSION);
	kvp_jw_kstr(w, "disaggregation_mode", role == KVP_PD_PREFILL ? "prefill" : "decode");
	kvp_jw_ku64(w, "disaggregation_bootstrap_port", BOOTSTRAP_PORT);
	kvp_jw_end(w);
}
