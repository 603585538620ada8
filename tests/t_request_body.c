/* JSON bodies of the Selection API: forms, precedence, nulls, ranges, limits, and the text of refusals. */
#include "daemons/common/request_body.h"
#include "tests/tap.h"

#include <stdlib.h>

static struct kvp_parse p;
static char text[16384];

/* body copies a literal into a buffer with slack, as the HTTP server gives it. */
static int body(const char *json)
{
	size_t n = strlen(json);
	memcpy(text, json, n);
	memset(text + n, 'x', 64);
	return kvp_parse_body(&p, text, n);
}

static int select_of(const char *json, struct kvp_select_request *q)
{
	int status = body(json);
	return status ? status : kvp_parse_select(&p, q);
}

static void refused(const char *json, int want, const char *word)
{
	struct kvp_select_request q;
	int status = select_of(json, &q);
	ok(status == want && strstr(p.err, word), "%.60s is %d naming '%s' (got %d: %s)", json, want, word,
		status, p.err);
}

static void test_forms(void)
{
	struct kvp_select_request q;
	is_u64(select_of("{\"token_ids\":[1,2,4294967295],\"block_hashes\":[-1]}", &q), 0,
		"tokens and hashes");
	ok(q.prompt.form == KVP_PROMPT_TOKENS && q.prompt.token_cnt == 3, "tokens win");
	is_u64(q.prompt.token[2], 4294967295u, "largest token id");
	is_str(q.model.ptr, "default", "model defaults");
	is_u64(select_of("{\"block_hashes\":[-1,9223372036854775807],\"sequence_hashes\":[-"
			 "9223372036854775808,0],"
			 "\"isl_tokens\":18446744073709551615}",
		       &q),
		0, "hash form");
	ok(q.prompt.form == KVP_PROMPT_HASHES && q.prompt.has_isl == KVP_YES, "hash form is recognised");
	is_u64(q.prompt.block_hash[0], UINT64_MAX, "a hash is a bit pattern");
	is_u64(q.prompt.seq_hash[0], 1ull << 63, "smallest signed hash");
	is_u64(q.prompt.isl_tok, UINT64_MAX, "exact 64-bit length");
	is_u64(select_of("{\"token_ids\":[9],\"mm_routing_info\":{\"routing_token_ids\":[1,2],"
			 "\"block_mm_infos\":[null,{\"mm_objects\":[{\"mm_hash\":7},{\"mm_hash\":5}]}]}}",
		       &q),
		0, "multimodal form");
	ok(q.prompt.token_cnt == 2 && q.prompt.mm_cnt == 2 && q.prompt.mm[0].cnt == 0 &&
			q.prompt.mm[1].cnt == 2,
		"routing tokens and their objects win");
	is_u64(q.prompt.mm[1].hash[1], 5, "object hashes in order");
	is_u64(select_of("{\"token_ids\":[9],\"mm_routing_info\":{\"routing_token_ids\":[]}}", &q), 0,
		"empty routing tokens");
	is_u64(q.prompt.token[0], 9, "fall back to token_ids");
}

static void test_members(void)
{
	struct kvp_select_request q;
	is_u64(select_of("{\"model_name\":null,\"selection_id\":null,\"isl_tokens\":null,\"tenant_id\":{},"
			 "\"pinned_worker\":{\"worker_id\":18446744073709551615,\"dp_rank\":3},"
			 "\"allowed_worker_ids\":[],\"routing_constraints\":{\"required_taints\":[\"a\"],"
			 "\"preferred_taints\":{\"b\":0.5}}}",
		       &q),
		0, "nulls are absent, unknown members ignored");
	ok(!q.selection_id.ptr && q.prompt.has_isl == KVP_NO, "null scalar is absent");
	ok(q.has_pinned == KVP_YES && q.pinned_worker_id == UINT64_MAX && q.pinned_dp_rank == 3, "pin");
	ok(q.allowed_worker_id && q.allowed_cnt == 0, "an empty allow list is present");
	ok(q.required_cnt == 1 && q.preferred_cnt == 1 && q.preferred_taint[0].weight == 0.5f, "taints");
	is_u64(select_of("{\"router_config_override\":{\"overlap_score_weight\":0,\"router_temperature\":2}}",
		       &q),
		0, "override");
	ok(q.override.overlap_score_credit == 0 && q.override.prefill_load_scale == 0 &&
			q.override.temperature == 2,
		"a deprecated weight of 0 takes the credit with it");
	is_u64(select_of("{\"token_ids\":[1],\"token_ids\":[2,3]}", &q), 0, "duplicate member");
	is_u64(q.prompt.token_cnt, 2, "the last one counts");
}

static void test_refusals(void)
{
	static char longid[6000];
	refused("", 400, "JSON");
	refused("{", 400, "JSON");
	refused("[1]", 422, "object");
	refused("{\"token_ids\":[1,-1]}", 422, "token_ids[1]");
	refused("{\"token_ids\":[4294967296]}", 422, "token_ids[0]");
	refused("{\"token_ids\":[1.0]}", 422, "token_ids[0]");
	refused("{\"token_ids\":\"x\"}", 422, "token_ids");
	refused("{\"block_hashes\":[9223372036854775808]}", 422, "block_hashes[0]");
	refused("{\"isl_tokens\":-1}", 422, "isl_tokens");
	refused("{\"isl_tokens\":1.5}", 422, "isl_tokens");
	refused("{\"model_name\":7}", 422, "model_name");
	refused("{\"advisory\":null}", 422, "advisory");
	refused("{\"routing_constraints\":null}", 422, "routing_constraints");
	refused("{\"pinned_worker\":{\"worker_id\":1}}", 422, "pinned_worker");
	refused("{\"strict_priority\":4294967296}", 422, "strict_priority");
	refused("{\"priority_jump\":-1e308}", 422, "priority_jump: number out of range");
	refused("{\"router_config_override\":{\"router_temperature\":1e999}}", 422,
		"router_temperature: number out of range");
	refused("{\"router_config_override\":{\"router_temperature\":-0.5}}", 422,
		"router_temperature must be greater than or equal to 0");
	refused("{\"router_config_override\":{\"shared_cache_multiplier\":1.5}}", 422,
		"shared_cache_multiplier must be between 0 and 1");
	refused("{\"router_config_override\":{\"overlap_score_credit\":-1}}", 422,
		"overlap_score_credit must be a finite, non-negative number");
	snprintf(longid, sizeof(longid), "{\"selection_id\":\"%04097d\"}", 0);
	refused(longid, 400, "selection_id");
	snprintf(longid, sizeof(longid), "{\"lora_name\":\"%01025d\"}", 0);
	refused(longid, 400, "lora_name");
}

static void test_reserve(void)
{
	struct kvp_reserve_request q;
	enum kvp_tristate has;
	double f;
	is_u64(body("{\"selection_id\":\"a\",\"worker_id\":1,\"effective_prefill_tokens\":0}"), 0, "body");
	is_u64(kvp_parse_reserve(&p, &q, &has), 0, "explicit form");
	ok(has == KVP_YES && q.has_effective_prefill == KVP_YES && q.dp_rank == 0, "rank defaults to 0");
	body("{\"worker_id\":1}");
	is_u64(kvp_parse_reserve(&p, &q, &has), 422, "an id is mandatory");
	body("{\"selection_id\":\"a\",\"worker_id\":null}");
	ok(kvp_parse_reserve(&p, &q, &has) == 0 && has == KVP_NO, "worker_id null is the replay form");
	body("{}");
	ok(kvp_parse_output_block(&p, &f, &has) == 0 && has == KVP_NO, "no fraction");
	body("{\"decay_fraction\":1}");
	ok(kvp_parse_output_block(&p, &f, &has) == 0 && has == KVP_YES && f == 1.0, "an integer fraction");
	body("{\"decay_fraction\":\"1\"}");
	is_u64(kvp_parse_output_block(&p, &f, &has), 422, "a string is no fraction");
}

/* The digits of an answer's hashes are the body's where a writer would write the same. */
static void test_seq_text(void)
{
	struct kvp_select_request q;
	uint64_t same[] = {UINT64_MAX, 5};
	struct kvp_str t;
	select_of("{\"sequence_hashes\":[-1,5],\"block_hashes\":[1, 2]}", &q);
	t = kvp_parse_seq_text(&p, q.prompt.seq_hash, 2);
	ok(t.ptr && t.len == 6 && !memcmp(t.ptr, "[-1,5]", 6), "hashes of the body as they stand there");
	ok(q.prompt.block_hash_cnt == 2 && q.prompt.block_hash[1] == 2, "beside others with a blank");
	ok(!kvp_parse_seq_text(&p, same, 2).ptr, "not those of another body");
	ok(!kvp_parse_seq_text(&p, q.prompt.seq_hash, 1).ptr, "nor some of them");
	select_of("{\"sequence_hashes\":[-1, 5]}", &q);
	ok(q.prompt.seq_hash_cnt == 2 && !kvp_parse_seq_text(&p, q.prompt.seq_hash, 2).ptr,
		"nor with a blank");
	select_of("{\"sequence_hashes\":[-0]}", &q);
	ok(q.prompt.seq_hash_cnt == 1 && !kvp_parse_seq_text(&p, q.prompt.seq_hash, 1).ptr, "nor -0");
	select_of("{\"token_ids\":[1]}", &q);
	ok(!kvp_parse_seq_text(&p, q.prompt.seq_hash, 0).ptr, "none in a body without");
	is_u64(select_of("{\"token_ids\":[1,2,3],\"lora_name\":\"\\ud800\"}", &q), 400,
		"half a surrogate pair beside token ids");
}

int main(void)
{
	kvp_parse_open(&p);
	test_forms();
	test_members();
	test_refusals();
	test_reserve();
	test_seq_text();
	kvp_parse_close(&p);
	return done();
}
