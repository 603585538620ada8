/* tests/t_load_trace.c — traces: reader, spreading, block ids to tokens, generator, statistics, and the
 * quality that the simulated reference policy reaches on the bundled trace. */
#include "bench/load/gen.h"
#include "bench/load/node.h"
#include "bench/load/options.h"
#include "bench/load/product.h"
#include "bench/load/simulate.h"
#include "bench/load/trace.h"
#include "bench/sim/prompt.h"
#include "tests/tap.h"
#include <kvpick/hash.h>
#include <math.h>
#include <stdlib.h>
#include <unistd.h>

#define SMALL "bench/load/trace_small.jsonl"

static int line(struct kvp_trace *t, const char *s)
{
	return kvp_trace_line(t, s, strlen(s), t->req_cnt ? t->req[t->req_cnt - 1].at_ns / 1000000 : 0);
}

static void test_lines(void)
{
	struct kvp_trace t = {0};
	is_u64(line(&t, "{\"timestamp\": 27, \"input_length\": 600, \"output_length\": 5, \"hash_ids\": [3, "
			"9]}"),
		KVP_OK, "a Mooncake line is read");
	is_u64(line(&t,
		       "{\"hash_ids\":[46],\"output_length\":1,\"x\":[1,\"a\"],\"y\":null,\"timestamp\":30.5,"
		       "\"input_length\":512}\n"),
		KVP_OK, "in any order, with unknown members");
	is_u64(t.req_cnt, 2, "two requests");
	is_u64(t.req[0].at_ns, 27000000, "timestamps are milliseconds");
	is_u64(t.req[0].prompt_tok, 600, "prompt length");
	is_u64(t.req[0].out_tok, 5, "output length");
	is_u64(t.req[1].id_cnt, 1, "ids belong to their request");
	is_u64(t.id[t.req[1].id_off], 46, "with their values");
	static const char *const bad[] = {"", "{}", "[]", "{\"timestamp\":31}",
		"{\"timestamp\":29,\"input_length\":1,\"output_length\":1,\"hash_ids\":[1]}",
		"{\"timestamp\":31,\"input_length\":0,\"output_length\":1,\"hash_ids\":[]}",
		"{\"timestamp\":31,\"input_length\":513,\"output_length\":1,\"hash_ids\":[1]}",
		"{\"timestamp\":31,\"input_length\":1,\"output_length\":1,\"hash_ids\":[1,2]}",
		"{\"timestamp\":31,\"input_length\":1,\"output_length\":1,\"hash_ids\":[1}",
		"{\"timestamp\":31,\"input_length\":1,\"input_length\":1,\"output_length\":1,\"hash_ids\":[1]"
		"}",
		"{\"timestamp\":31,\"input_length\":-1,\"output_length\":1,\"hash_ids\":[1]}",
		"{\"timestamp\":31,\"input_length\":1,\"output_length\":1,\"hash_ids\":[99999999999999999999]"
		"}",
		"{\"timestamp\":31,\"input_length\":1,\"output_length\":1,\"hash_ids\":[1]} x",
		"{\"timestamp\":31,\"input_length\":1,\"output_length\":1,\"hash_ids\":[1],\"x\":\"",
		"{\"timestamp\":31,\"input_length\":99999999999,\"output_length\":1,\"hash_ids\":[1]}"};
	uint32_t taken = 0;
	for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++)
		if (!ok(line(&t, bad[i]) == KVP_ERR_PROTO, "refused: %s", bad[i]))
			taken++;
	is_u64(t.req_cnt, 2 + taken, "a refused line adds nothing");
	kvp_trace_free(&t);
}

static void test_spread(void)
{
	struct kvp_trace t = {0};
	uint64_t id = 1;
	static const uint64_t at_ms[] = {0, 0, 0, 3000, 6000, 6000};
	static const uint64_t want_ms[] = {0, 1000, 2000, 3000, 6000, 7500};
	for (int i = 0; i < 6; i++)
		kvp_trace_add(&t, at_ms[i] * 1000000, 1, 1, &id, 1);
	kvp_trace_spread(&t);
	for (int i = 0; i < 6; i++)
		is_u64(t.req[i].at_ns, want_ms[i] * 1000000, "request %d is spread inside its tick", i);
	kvp_trace_free(&t);
}

static void test_tokens(void)
{
	uint32_t a[1200], b[1200];
	uint64_t ab[] = {7, 8, 9}, key[80], other[80];
	kvp_prompt_expand(ab, 1200, a);
	kvp_prompt_expand(ab, 700, b);
	ok(!memcmp(a, b, 700 * sizeof(*a)), "a shorter prompt of the same ids is a prefix");
	kvp_prompt_expand(ab + 1, 512, b);
	ok(!memcmp(a + 512, b, 512 * sizeof(*a)), "a block's tokens don't depend on its place");
	ok(memcmp(a, b, 512 * sizeof(*a)), "other ids are other tokens");
	uint32_t over = 0;
	for (int i = 0; i < 1200; i++)
		over += a[i] >= KVP_PROMPT_VOCAB;
	is_u64(over, 0, "tokens are in the vocabulary");
	is_u64(kvp_prompt_chain(a, 1200, 16, key), 75, "whole blocks are hashed");
	is_u64(kvp_prompt_chain(a, 1199, 16, other), 74, "a partial one is not");
	ok(!memcmp(key, other, 74 * sizeof(*key)), "a prefix has the same hashes");
	a[3] ^= 1;
	kvp_prompt_chain(a, 1200, 16, other);
	uint32_t same = 0;
	for (int i = 0; i < 75; i++)
		same += key[i] == other[i];
	is_u64(same, 0, "a change in the first block changes every hash of the chain");
	is_u64(kvp_prompt_text("hello kvpick", 12, b, 1200), 3, "text: a token for 4 bytes");
	is_u64(kvp_prompt_text("hello kvpick!", 13, b, 1200), 4, "and one for the rest");
}

static void test_generate(void)
{
	struct kvp_gen_cfg cfg;
	struct kvp_trace a = {0}, b = {0};
	size_t n;
	char path[] = "/tmp/kvp_trace_XXXXXX";
	int fd = mkstemp(path);
	FILE *f = fdopen(fd, "w");
	kvp_gen_cfg_default(&cfg);
	cfg.session_cnt = 30;
	is_u64(kvp_gen_make(&cfg, &a), KVP_OK, "a workload is made");
	is_u64(kvp_gen_write(f, &a), KVP_OK, "and written");
	fclose(f);
	is_u64(kvp_trace_read(&b, path, 0, &n), KVP_OK, "the reader takes what the generator writes");
	unlink(path);
	ok(a.req_cnt > 30 && a.req_cnt == b.req_cnt, "request by request");
	ok(a.id_cnt == b.id_cnt && !memcmp(a.id, b.id, a.id_cnt * sizeof(*a.id)), "id by id");
	kvp_trace_free(&b);
	is_u64(kvp_trace_read(&b, "bench/load/no_such_file", 0, &n), (uint64_t)KVP_ERR_SYS,
		"a missing file is an error");
	kvp_gen_make(&cfg, &b);
	ok(a.req_cnt == b.req_cnt && !memcmp(a.req, b.req, a.req_cnt * sizeof(*a.req)),
		"the same seed, the same trace");
	cfg.turn_mean = 0;
	is_u64(kvp_gen_make(&cfg, &b), (uint64_t)KVP_ERR_INVAL, "no turns, no workload");
	kvp_trace_free(&a);
	kvp_trace_free(&b);
}

static void test_stats(void)
{
	struct kvp_run_stats s = {.name = "x"};
	for (int i = 100; i > 0; i--)
		kvp_stats_finished(
			&s, 0, (uint64_t)i * 1000000000ull, (uint64_t)(i + 9) * 1000000000ull, 10, 5, 10);
	ok(kvp_sample_pct(&s.ttft_s, 0.5) == 50 && kvp_sample_pct(&s.ttft_s, 0.99) == 99 &&
			kvp_sample_mean(&s.ttft_s) == 50.5,
		"percentiles are nearest ranks");
	ok(kvp_sample_mean(&s.tpot_s) == 1, "time per output token leaves out the first");
	is_u64(s.cached_tok * 2, s.prompt_tok, "tokens add up");
	kvp_stats_free(&s);
	ok(kvp_sample_pct(&s.ttft_s, 0.5) == 0, "no value, no percentile");
}

static void test_sets(void)
{
	struct kvp_load_set s = {.cnt = 0};
	char host[64];
	uint16_t port = 0;
	is_u64(kvp_load_set_read(&s, "127.0.0.1:80,[::1]:81:82,localhost:83:84:85"), KVP_OK,
		"a list of engines is read");
	is_u64(s.cnt, 3, "all three");
	is_str(s.target[1].host, "::1", "IPv6 in brackets");
	is_u64(s.target[1].event_port + s.target[2].replay_port, 82 + 85, "event and replay ports");
	ok(kvp_load_set_read(&s, "127.0.0.1") && kvp_load_set_read(&s, ":80") &&
			kvp_load_set_read(&s, "h:70000") && kvp_load_set_read(&s, "h:1,"),
		"broken lists are refused");
	is_u64(kvp_load_url("http://10.0.0.1:8092/", host, &port), KVP_OK, "a base URL is read");
	is_u64(port, 8092, "with its port");
	ok(kvp_load_url("https://10.0.0.1:8092", host, &port) &&
			kvp_load_url("http://10.0.0.1:1/x", host, &port),
		"other URLs are refused");
}

/* member reads one member of the object in the writer. */
static struct kvp_json_val member(struct kvp_json *json, const struct kvp_jw *w, const char *key)
{
	struct kvp_json_val root, v = {0};
	if (!kvp_json_parse(json, w->buf, w->len, KVP_JSON_DEPTH_MAX, &root, NULL))
		kvp_json_get(root, key, &v);
	return v;
}

static void test_bodies(void)
{
	static struct kvp_load_cfg cfg = {.model = "m", .group = "g"};
	struct kvp_json *json = kvp_json_new();
	struct kvp_jw w;
	uint64_t id[] = {4, 5}, want[2], got[4];
	uint32_t tok[1024], back[1024];
	size_t n = 0;
	kvp_jw_init(&w);
	kvp_sim_cfg_default(&cfg.engine);
	kvp_prompt_expand(id, 1024, tok);
	kvp_node_select_body(&w, &cfg, tok, 1000, 7, "s-1");
	is_u64(kvp_json_len(member(json, &w, "block_hashes")), 1, "hash form: whole blocks only");
	kvp_node_select_body(&w, &cfg, tok, 1024, 7, "s-1");
	want[0] = kvp_hash_block(tok, 512, NULL, 0, KVP_HASH_BASE_SEED);
	want[1] = kvp_hash_block(tok + 512, 512, NULL, 0, KVP_HASH_BASE_SEED);
	kvp_json_h64s(member(json, &w, "block_hashes"), got, 4, &n);
	ok(n == 2 && got[0] == want[0] && got[1] == want[1], "with the public block hashes");
	kvp_json_h64s(member(json, &w, "sequence_hashes"), got, 4, &n);
	ok(n == 2 && got[0] == want[0] && got[1] == kvp_hash_seq(want[0], want[1]), "and their chain");
	ok(kvp_json_str_is(member(json, &w, "selection_id"), "s-1"), "under the id that frees it");
	cfg.node_form = cfg.engine_form = KVP_LOAD_TOKENS;
	kvp_node_select_body(&w, &cfg, tok, 1000, 7, "s-1");
	kvp_json_u32s(member(json, &w, "token_ids"), back, 1024, &n);
	ok(n == 1000 && !memcmp(back, tok, n * sizeof(*tok)), "token form: the tokens");
	kvp_node_engine_body(&w, &cfg, id, 2, tok, 1000, 7);
	is_u64(kvp_json_len(member(json, &w, "prompt")), 1000, "engine, token form: the tokens");
	cfg.engine_form = KVP_LOAD_HASHES;
	kvp_node_engine_body(&w, &cfg, id, 2, tok, 1000, 7);
	is_u64(kvp_json_len(member(json, &w, "kvpick_hash_ids")), 2, "engine, id form: the ids");
	struct kvp_load_target t = {.host = "::1", .http_port = 80, .event_port = 81, .replay_port = 82};
	kvp_node_worker_body(&w, &cfg, &t, 3);
	ok(kvp_json_str_is(member(json, &w, "endpoint"), "http://[::1]:80"), "a worker's endpoint");
	ok(kvp_json_str_is(member(json, &w, "replay_endpoint"), "tcp://[::1]:82"), "and its replay endpoint");
	static const char selection[] = "{\"worker_id\":1,\"endpoint\":\"http://10.1.2.3:99\"}";
	char host[64];
	uint16_t port = 0;
	is_u64(kvp_node_selection(json, selection, strlen(selection), host, &port), KVP_OK,
		"a selection is read");
	ok(port == 99 && !strcmp(host, "10.1.2.3"), "it names host and port");
	ok(kvp_node_selection(json, "{}", 2, host, &port) == KVP_ERR_PROTO,
		"without an endpoint it is refused");
	kvp_jw_free(&w);
	kvp_json_free(json);
}

static double hit(const struct kvp_run_stats *s)
{
	return (double)s->cached_tok / (double)s->prompt_tok;
}

static void test_quality(void)
{
	struct kvp_trace t = {0};
	struct kvp_run_stats kv = {0}, rr = {0};
	struct kvp_simulate_cfg cfg = {.engine_cnt = 8, .speed = 1, .seed = 1, .policy = KVP_POLICY_KV};
	size_t n;
	kvp_sim_cfg_default(&cfg.engine);
	if (!ok(kvp_trace_read(&t, SMALL, 0, &n) == KVP_OK, "the bundled trace is read"))
		return;
	is_u64(kvp_simulate(&cfg, &t, &kv), KVP_OK, "the reference policy plays it");
	cfg.policy = KVP_POLICY_ROUND_ROBIN;
	is_u64(kvp_simulate(&cfg, &t, &rr), KVP_OK, "round-robin plays it");
	is_u64(kv.done_cnt + rr.done_cnt, 2 * t.req_cnt, "every request finishes");
	ok(hit(&kv) > 1.5 * hit(&rr), "prefix hits: %.3f against %.3f", hit(&kv), hit(&rr));
	ok(kvp_sample_mean(&kv.ttft_s) < 0.75 * kvp_sample_mean(&rr.ttft_s),
		"time to first token: %.3f against %.3f s", kvp_sample_mean(&kv.ttft_s),
		kvp_sample_mean(&rr.ttft_s));
	kvp_stats_free(&kv);
	kvp_stats_free(&rr);
	kvp_trace_free(&t);
}

struct quality {
	double hit, ttft_s, tpot_s;
};

/* chosen_by_product plays the bundled trace at twice its rate, the product choosing in this process. */
static struct quality chosen_by_product(const struct kvp_trace *t, enum kvp_part_role role,
	enum kvp_local_policy policy, const char *name)
{
	struct kvp_simulate_cfg cfg = {.engine_cnt = 8, .speed = 2, .seed = 1, .role = role};
	struct kvp_run_stats s = {0};
	struct kvp_product p;
	struct quality q = {0};
	kvp_sim_cfg_default(&cfg.engine);
	cfg.chooser = &p.chooser;
	if (!ok(kvp_product_open(&p, &cfg, policy) == KVP_OK, "%s: a private node", name))
		return q;
	is_u64(kvp_simulate(&cfg, t, &s), KVP_OK, "plays the trace");
	is_u64(s.done_cnt, t->req_cnt, "every request finishes");
	is_u64(p.failed_cnt, 0, "every block and every end is taken");
	q = (struct quality){hit(&s), kvp_sample_mean(&s.ttft_s), kvp_sample_mean(&s.tpot_s)};
	kvp_product_close(&p);
	kvp_stats_free(&s);
	return q;
}

static struct quality simulated(
	const struct kvp_trace *t, enum kvp_part_role role, enum kvp_policy policy)
{
	struct kvp_simulate_cfg cfg = {.engine_cnt = 8, .speed = 2, .policy = policy, .role = role};
	struct quality q = {0};
	kvp_sim_cfg_default(&cfg.engine);
	for (cfg.seed = 1; cfg.seed <= 3; cfg.seed++) {
		struct kvp_run_stats s = {0};
		is_u64(kvp_simulate(&cfg, t, &s), KVP_OK, "the simulated %s plays it",
			kvp_policy_name(policy));
		q.hit += hit(&s) / 3;
		q.ttft_s += kvp_sample_mean(&s.ttft_s) / 3;
		q.tpot_s += kvp_sample_mean(&s.tpot_s) / 3;
		kvp_stats_free(&s);
	}
	return q;
}

/* Engines of one role each: the product as the model; prefill engines save prompts, decode engines don't
 * suffer. */
static void test_roles(const struct kvp_trace *t)
{
	struct quality ref = chosen_by_product(t, KVP_PART_PREFILL, KVP_LOCAL_REFERENCE, "prefill"),
		       work = chosen_by_product(t, KVP_PART_PREFILL, KVP_LOCAL_LEAST_WORK, "prefill"),
		       model = simulated(t, KVP_PART_PREFILL, KVP_POLICY_LEAST_WORK);
	ok(fabs(work.hit / model.hit - 1) < 0.03 && fabs(work.ttft_s / model.ttft_s - 1) < 0.12,
		"prefill role: hits %.3f and %.3f, first token after %.3f and %.3f s", work.hit, model.hit,
		work.ttft_s, model.ttft_s);
	ok(work.hit > 1.1 * ref.hit && work.ttft_s < 0.85 * ref.ttft_s, "against %.3f and %.3f s", ref.hit,
		ref.ttft_s);
	ref = chosen_by_product(t, KVP_PART_DECODE, KVP_LOCAL_REFERENCE, "decode");
	work = chosen_by_product(t, KVP_PART_DECODE, KVP_LOCAL_LEAST_WORK, "decode");
	model = simulated(t, KVP_PART_DECODE, KVP_POLICY_LEAST_WORK);
	ok(work.hit < 1e-9 && fabs(work.tpot_s / model.tpot_s - 1) < 0.03,
		"decode role: no hits, %.3f and %.3f ms a token", work.tpot_s * 1e3, model.tpot_s * 1e3);
	ok(work.tpot_s < 1.02 * ref.tpot_s, "against %.3f ms", ref.tpot_s * 1e3);
}

/* What the product reaches is what the same formula, written apart, reaches; and least_work is worth its
 * name. */
static void test_policies(void)
{
	struct kvp_trace t = {0};
	size_t n;
	if (!ok(kvp_trace_read(&t, SMALL, 0, &n) == KVP_OK, "the bundled trace is read"))
		return;
	enum kvp_part_role role = KVP_PART_AGGREGATED;
	struct quality ref = chosen_by_product(&t, role, KVP_LOCAL_REFERENCE, "reference"),
		       work = chosen_by_product(&t, role, KVP_LOCAL_LEAST_WORK, "least_work"),
		       ref_model = simulated(&t, role, KVP_POLICY_KV),
		       work_model = simulated(&t, role, KVP_POLICY_LEAST_WORK),
		       least = simulated(&t, role, KVP_POLICY_LEAST_LOADED);
	ok(fabs(ref.hit / ref_model.hit - 1) < 0.1 && fabs(ref.ttft_s / ref_model.ttft_s - 1) < 0.1,
		"reference: hits %.3f and %.3f, first token after %.3f and %.3f s", ref.hit, ref_model.hit,
		ref.ttft_s, ref_model.ttft_s);
	ok(fabs(work.hit / work_model.hit - 1) < 0.03 && fabs(work.ttft_s / work_model.ttft_s - 1) < 0.06,
		"least_work: hits %.3f and %.3f, first token after %.3f and %.3f s", work.hit,
		work_model.hit, work.ttft_s, work_model.ttft_s);
	ok(work.hit > 1.3 * ref.hit, "least_work hits more: %.3f against %.3f", work.hit, ref.hit);
	ok(work.ttft_s < 0.6 * ref.ttft_s && work.tpot_s < ref.tpot_s,
		"is faster: %.3f s and %.2f ms against %.3f s and %.2f ms", work.ttft_s, work.tpot_s * 1e3,
		ref.ttft_s, ref.tpot_s * 1e3);
	ok(work.hit > least.hit && work.ttft_s < least.ttft_s && work.tpot_s < least.tpot_s,
		"and is never behind least-requests: %.3f, %.3f s, %.2f ms", least.hit, least.ttft_s,
		least.tpot_s * 1e3);
	test_roles(&t);
	kvp_trace_free(&t);
}

int main(void)
{
	test_lines();
	test_spread();
	test_tokens();
	test_generate();
	test_stats();
	test_sets();
	test_bodies();
	test_quality();
	test_policies();
	return done();
}
