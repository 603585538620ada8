/* What engines tell of themselves: the list of models, and the line of their metrics. */
#include "daemons/discovery/probe.h"

#include "tests/tap.h"

static void models(void)
{
	static const struct {
		const char *text;
		enum kvp_probe_model want;
	} v[] = {
		{"{\"object\":\"list\",\"data\":[{\"id\":\"other\"},{\"id\":\"m\",\"object\":\"model\"}]}",
			KVP_PROBE_MODEL_SERVED},
		{"{\"data\":[{\"id\":\"M\"}]}", KVP_PROBE_MODEL_OTHER},
		{"{\"data\":[{\"id\":7},{},null]}", KVP_PROBE_MODEL_OTHER},
		{"{\"data\":[]}", KVP_PROBE_MODEL_OTHER},
		{"{\"data\":{}}", KVP_PROBE_MODEL_UNKNOWN},
		{"[]", KVP_PROBE_MODEL_UNKNOWN},
		{"", KVP_PROBE_MODEL_UNKNOWN},
		{"<html>", KVP_PROBE_MODEL_UNKNOWN},
	};
	struct kvp_json *p = kvp_json_new();
	for (size_t i = 0; i < sizeof(v) / sizeof(v[0]); i++)
		is_u64(kvp_probe_models(p, v[i].text, strlen(v[i].text), "m"), v[i].want, "models: %s",
			v[i].text);
	kvp_json_free(p);
}

static void metrics(void)
{
	static const struct {
		const char *text;
		uint64_t size, blocks;
	} v[] = {
		{"# HELP vllm:cache_config_info x\n# TYPE vllm:cache_config_info gauge\na 1\n"
		 "vllm:cache_config_info{block_size=\"16\",cache_dtype=\"auto\",num_gpu_blocks=\"2048\"} "
		 "1.0\nb 2\n",
			16, 2048},
		{"sglang:cache_config_info{engine_type=\"x\",num_pages=\"77\",page_size=\"64\"} 1", 64, 77},
		{"vllm:cache_config_info{my_block_size=\"8\",num_gpu_blocks=\"None\",block_size=\"32\"} 1\n",
			32, 0},
		{"vllm:cache_config_info{block_size=\"16", 0, 0},
		{"vllm:cache_config_info{block_size=\"99999999999999999999999\"} 1\n", 0, 0},
		{"vllm:cache_config_info{}\n", 0, 0},
		{"vllm:other{block_size=\"16\"} 1\n", 0, 0},
		{"# vllm:cache_config_info{block_size=\"16\"} 1\n", 0, 0},
		{"\n\n", 0, 0},
	};
	for (size_t i = 0; i < sizeof(v) / sizeof(v[0]); i++) {
		struct kvp_probe_answer a = {.block_size = 0};
		kvp_probe_metrics(v[i].text, strlen(v[i].text), &a);
		ok(a.block_size == v[i].size && a.kv_blocks == v[i].blocks, "metrics %zu: %llu and %llu", i,
			(unsigned long long)a.block_size, (unsigned long long)a.kv_blocks);
	}
}

int main(void)
{
	models();
	metrics();
	return done();
}
