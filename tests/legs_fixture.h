/* tests/legs_fixture.h — a picker without its sockets: streams, picks, legs and bookings of the real one over
 * a whole node in this process, with the messages of a proxy on one side and the node's loads on the other.
 */
#ifndef KVP_LEGS_FIXTURE_H
#define KVP_LEGS_FIXTURE_H

#include "daemons/common/select_priv.h"
#include "daemons/extproc/extproc.h"
#include "daemons/extproc/stream_priv.h"
#include "shm/sweep.h"
#include "tests/tap.h"

#include <stdlib.h>

#define TOK 32u /* of a prompt: 8 blocks */

/* One request of a proxy, and what it was told. */
struct ask {
	struct kvp_job j; /* first: the stream's context */
	int routed, status;
	uint32_t set_cnt;
	char text[64], to[64], prefiller[64], rank[16], first_rank[16];
};

static struct kvp_config cfg;
static struct kvp_epp x;
static struct kvp_selection *node;
static uint64_t at_start[KVP_CTR_CNT];

static inline struct kvp_str str(const char *s)
{
	return (struct kvp_str){s, strlen(s)};
}

static inline uint64_t counted(enum kvp_ctr c)
{
	return node->ctr->val[c] - at_start[c];
}

/* ---- the proxy's side ---- */

static inline void copy(char *to, size_t cap, struct kvp_extproc_str v)
{
	snprintf(to, cap, "%.*s", (int)v.len, v.p);
}

static inline void on_send(void *ctx, const struct kvp_extproc_reply *m)
{
	struct ask *a = ctx;
	if (m->kind == KVP_EXTPROC_ANSWER_IMMEDIATE) {
		a->status = (int)m->http_status;
		copy(a->text, sizeof(a->text), m->body);
	}
	if (m->kind != KVP_EXTPROC_ANSWER_REQUEST_HEADERS || !m->set_cnt)
		return;
	a->routed++;
	a->set_cnt = m->set_cnt;
	for (uint32_t i = 0; i < m->set_cnt; i++) {
		struct kvp_extproc_str k = m->set[i].key, v = m->set[i].value;
		if (stream_name_is(k, "x-gateway-destination-endpoint"))
			copy(a->to, sizeof(a->to), v);
		else if (stream_name_is(k, "x-prefiller-host-port"))
			copy(a->prefiller, sizeof(a->prefiller), v);
		else if (stream_name_is(k, "x-data-parallel-rank"))
			copy(a->rank, sizeof(a->rank), v);
		else if (stream_name_is(k, "x-prefiller-dp-rank"))
			copy(a->first_rank, sizeof(a->first_rank), v);
	}
}

static inline void on_finish(void *ctx, int status, const char *text)
{
	(void)ctx;
	(void)status;
	(void)text;
}

static struct kvp_stream_ops ops;

static inline void message(struct ask *a, struct kvp_extproc_req m)
{
	kvp_stream_message(&a->j.stream, &m);
}

static const char *session; /* of the requests that begin; NULL = none */

static inline struct ask *begin_as(const char *method, const char *path, int ends)
{
	struct ask *a = calloc(1, sizeof(*a));
	struct kvp_extproc_header h[] = {{KVP_EXTPROC_STR(":method"), {method, (uint32_t)strlen(method)}},
		{KVP_EXTPROC_STR(":path"), {path, (uint32_t)strlen(path)}},
		{KVP_EXTPROC_STR("x-session-id"), {session, session ? (uint32_t)strlen(session) : 0}}};
	a->j.x = &x;
	a->j.start_ns = kvp_clock_mono_ns();
	kvp_stream_open(&a->j.stream, &x.stream_cfg, &ops, a);
	message(a, (struct kvp_extproc_req){.kind = KVP_EXTPROC_REQUEST_HEADERS,
			   .header = h,
			   .header_cnt = session ? 3 : 2,
			   .end_of_stream = (uint8_t)ends});
	return a;
}

static inline void send_prompt(struct ask *a, uint32_t first, uint32_t tok)
{
	char text[4096];
	size_t n = (size_t)snprintf(text, sizeof(text), "{\"model\":\"m\",\"prompt\":[");
	for (uint32_t i = 0; i < tok; i++)
		n += (size_t)snprintf(text + n, sizeof(text) - n, "%s%u", i ? "," : "", first + i);
	n += (size_t)snprintf(text + n, sizeof(text) - n, "]}");
	message(a,
		(struct kvp_extproc_req){
			.kind = KVP_EXTPROC_REQUEST_BODY, .end_of_stream = 1, .body = {text, (uint32_t)n}});
}

static inline struct ask *ask_on(const char *path, uint32_t first, uint32_t tok)
{
	struct ask *a = begin_as("POST", path, 0);
	if (!a->status)
		send_prompt(a, first, tok);
	return a;
}

/* pair asks for a prompt of 32 tokens from `first` on. */
static inline struct ask *pair(uint32_t first)
{
	return ask_on("/v1/completions", first, TOK);
}

static inline void respond(struct ask *a, const char *served)
{
	struct kvp_extproc_header h = {KVP_EXTPROC_STR(":status"), KVP_EXTPROC_STR("200")};
	message(a, (struct kvp_extproc_req){.kind = KVP_EXTPROC_RESPONSE_HEADERS,
			   .header = &h,
			   .header_cnt = 1,
			   .served = {served, (uint32_t)strlen(served)}});
}

static inline void respond_body(struct ask *a, const char *text, int ends)
{
	message(a, (struct kvp_extproc_req){.kind = KVP_EXTPROC_RESPONSE_BODY,
			   .end_of_stream = (uint8_t)ends,
			   .body = {text, (uint32_t)strlen(text)}});
}

/* gone: the stream's call is over, in whatever state it is. */
static inline void gone(struct ask *a)
{
	kvp_stream_gone(&a->j.stream);
	kvp_epp_job_ended(&a->j);
	kvp_stream_close(&a->j.stream);
	kvp_timer_cancel(x.loop, &a->j.body_timer);
	kvp_ask_reset(&a->j.ask);
	free(a);
}

/* ---- the node's side ---- */

/* load says prompt tokens, blocks and requests of a worker of a role, of all its ranks. */
static inline const char *load(enum kvp_part_role role, uint64_t id)
{
	static char text[4][64];
	static int turn;
	struct kvp_load_row row[16], sum = {.worker_id = id};
	uint32_t cnt = 0;
	kvp_selection_loads(node, role, str("m"), str(KVP_EPP_GROUP), row, 16, &cnt);
	for (uint32_t i = 0; i < cnt; i++) {
		if (row[i].worker_id != id)
			continue;
		sum.prefill_tok += row[i].prefill_tok;
		sum.decode_blk += row[i].decode_blk;
		sum.active_requests += row[i].active_requests;
	}
	char *to = text[turn++ % 4];
	snprintf(to, sizeof(text[0]), "%u/%u/%u", (unsigned)sum.prefill_tok, (unsigned)sum.decode_blk,
		(unsigned)sum.active_requests);
	return to;
}

static inline const char *prefill(uint64_t id)
{
	return load(KVP_PART_PREFILL, id);
}

static inline const char *decode(uint64_t id)
{
	return load(KVP_PART_DECODE, id);
}

struct ranks {
	uint32_t start, size;
};

static inline int put_worker(uint64_t id, const char *endpoint, struct ranks r)
{
	struct kvp_local_worker w = {.worker_id = id,
		.role = id < 5 ? KVP_PART_PREFILL : KVP_PART_DECODE,
		.model = str("m"),
		.group = str(KVP_EPP_GROUP),
		.endpoint = str(endpoint),
		.block_size = 4,
		.start_rank = r.start,
		.size = r.size,
		.max_num_batched_tokens = TOK,
		.total_kv_blocks = 1000};
	return kvp_selection_local_worker(node, &w);
}

static inline void worker(uint64_t id, const char *endpoint, struct ranks r)
{
	is_u64((uint64_t)put_worker(id, endpoint, r), 201, "worker %u", (unsigned)id);
}

static const struct ranks one = {0, 1};

/* holds: the worker's engine has the first blk blocks of the prompt from `first` on. */
static inline void holds(uint64_t id, uint32_t first, uint32_t blk)
{
	uint32_t tok[TOK];
	uint64_t local[TOK / 4], ext[TOK / 4];
	struct kvp_hasher h;
	for (uint32_t i = 0; i < TOK; i++)
		tok[i] = first + i;
	kvp_hasher_init(&h, tok, TOK, 4, KVP_HASH_WINDOW_PLAIN, kvp_hash_seed(NULL, 0, NULL, 0));
	kvp_hasher_local(&h, 0, blk, local);
	kvp_hash_chain(NULL, local, blk, ext);
	is_u64((uint64_t)kvp_selection_local_stored(node, id, 0, NULL, blk, local, ext), 200,
		"worker %u holds %u blocks", (unsigned)id, blk);
}

static inline void open_pools(void)
{
	struct kvp_str model = str("m"), group = str(KVP_EPP_GROUP);
	kvp_pool_open(&x.pool[KVP_PLAN_MAIN], &node->region->cat, KVP_PART_DECODE, model, group);
	kvp_pool_open(&x.pool[KVP_PLAN_PREFILL], &node->region->cat, KVP_PART_PREFILL, model, group);
}

/* open_node begins a node with roles. more: settings. */
static inline void open_node(const struct kvp_local_cfg *local, const char *const *more)
{
	static struct kvp_config_err err;
	const char *env[24] = {"KVPICK_MODE=both", "DYN_MODEL_NAME=m",
		"DYN_EPP_TOKENIZER_PROTOCOL=vllm-render", "DYN_EPP_TOKENIZER_SERVICE_URL=http://127.0.0.1:1",
		"DYN_EPP_TOPOLOGY_MODE=disaggregated", "DYN_EPP_MAX_NUM_BATCHED_TOKENS=32"};
	static const char *const argv[] = {NULL};
	size_t n = 6;
	while (more && *more)
		env[n++] = *more++;
	if (!ok(kvp_config_load(KVP_BIN_SUPERVISOR, 0, argv, env, &cfg, NULL, &err) == KVP_OK, "settings"))
		printf("# %s", err.text);
	struct kvp_local_cfg l = local ? *local : (struct kvp_local_cfg){.queue = KVP_LOCAL_NO_QUEUE};
	l.seed = 1;
	memset(&x, 0, sizeof(x));
	node = kvp_selection_open_local(&l);
	memcpy(at_start, node->ctr->val, sizeof(at_start));
	x.selection = node;
	x.boot = (struct kvp_boot){
		.config = &cfg, .region = node->region, .ctr = node->ctr, .owner = node->owner};
	ok(kvp_loop_open(&x.loop, 0) == KVP_OK, "a loop");
	ok(kvp_ask_open(&x.parser, &(struct kvp_ask_cfg){.model = "m",
					   .tokenizer = KVP_TOK_VLLM_RENDER,
					   .pair_paths = cfg.epp_disagg_paths}) == KVP_OK,
		"a parser");
	kvp_cond_from_config(&cfg, &x.cond);
	open_pools();
	x.usage_json = kvp_json_new();
	x.stream_cfg = (struct kvp_stream_cfg){
		.body_max = 1 << 20, .assumed_mode = KVP_EXTPROC_BODY_FULL_DUPLEX, .strips_dp_rank = 1};
	ops = kvp_epp_ops;
	ops.send = on_send;
	ops.finish = on_finish;
}

static inline void close_node(const char *name)
{
	uint64_t rest = 0;
	struct kvp_load_row row[16];
	for (int role = 0; role < KVP_PART_ROLE_CNT; role++) {
		uint32_t cnt = 0;
		kvp_selection_loads(
			node, (enum kvp_part_role)role, str("m"), str(KVP_EPP_GROUP), row, 16, &cnt);
		for (uint32_t i = 0; i < cnt; i++)
			rest += row[i].active_requests + row[i].prefill_tok + row[i].decode_blk;
	}
	is_u64(rest, 0, "%s: no load is left", name);
	is_u64(kvp_resv_cnt(&node->region->book), 0, "%s: no booking is left", name);
	is_u64(kvp_book_check(&node->region->book), 0, "%s: the books are in order", name);
	ok(!x.renew_first && !x.renew_last && !x.parked && !x.queued_cnt && !x.unfreed,
		"%s: nobody's lease is renewed any more, nobody waits", name);
	is_u64(counted(KVP_CTR_EPP_FREE_BAD), 0, "%s: every booking could be freed", name);
	for (int i = 0; i < KVP_PLAN_LEGS; i++)
		kvp_pool_close(&x.pool[i]);
	kvp_json_free(x.usage_json);
	kvp_ask_close(&x.parser);
	kvp_selection_close(node);
	kvp_loop_close(x.loop);
}
#endif
