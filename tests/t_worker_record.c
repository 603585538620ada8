/* tests/t_worker_record.c — registrations in and out: types, nulls, PATCH, reasons, endpoints, limits. */
#include <stdlib.h>

#include "daemons/common/worker_record.h"
#include "tests/tap.h"

static struct kvp_json *parser;
static struct kvp_jw jw;
static struct kvp_wrec_err err;

static const char *record_text(const struct kvp_wrec *rec, const struct kvp_wrec_reasons *r)
{
	static char text[70000];
	kvp_jw_reset(&jw);
	kvp_wrec_json(rec, r ? KVP_LIFE_INCOMPLETE : KVP_LIFE_SCHEDULABLE, r, &jw);
	if (kvp_jw_done(&jw) || jw.len >= sizeof(text))
		return NULL;
	memcpy(text, jw.buf, jw.len);
	text[jw.len] = 0;
	return text;
}

static void post_is(const char *body, const char *want, const char *name)
{
	struct kvp_wrec rec;
	if (!ok(kvp_wrec_post(parser, body, strlen(body), &rec, &err) == KVP_OK, "%s: accepted", name)) {
		printf("#   %d %s\n", err.status, err.text);
		return;
	}
	is_str(record_text(&rec, NULL), want, "%s: record", name);
	/* What is stored reads back as the same. */
	struct kvp_wrec again;
	kvp_wrec_post(parser, want, strlen(want), &again, &err);
	is_str(record_text(&again, NULL), want, "%s: record of the record", name);
	kvp_wrec_free(&rec);
	kvp_wrec_free(&again);
}

static void post_fails(const char *body, int status, const char *in_text)
{
	struct kvp_wrec rec;
	err.status = 0;
	err.text[0] = 0;
	int rc = kvp_wrec_post(parser, body, strlen(body), &rec, &err);
	if (!ok(rc == KVP_ERR_PROTO && err.status == status && strstr(err.text, in_text), "%d: %.70s", status,
			body))
		printf("#   %d %s\n", err.status, err.text);
}

#define NULLS                                                                                                \
	"\"max_num_batched_tokens\":null,\"total_kv_blocks\":null,\"stable_routing_id\":null,"               \
	"\"is_eagle\":null,\"taints\":[],\"topology_domains\":{},\"kv_transfer_domain\":null,"               \
	"\"kv_transfer_enforcement\":null,\"kv_transfer_preferred_weight\":null}"

static void test_records(void)
{
	post_is("{\"worker_id\":7,\"model_name\":\"m\",\"endpoint\":\"http://"
		"10.0.0.7:8000\",\"block_size\":16}",
		"{\"worker_id\":7,\"model_name\":\"m\",\"routing_group\":\"default\",\"lifecycle\":"
		"\"schedulable\","
		"\"endpoint\":\"http://10.0.0.7:8000\",\"kv_events_endpoint\":null,\"replay_endpoint\":null,"
		"\"block_size\":16,\"data_parallel_start_rank\":null,\"data_parallel_size\":null," NULLS,
		"omitted members");
	post_is("{\"worker_id\":18446744073709551615,\"model_name\":null,\"routing_group\":null,\"x\":[{}],"
		"\"kv_events_endpoints\":{\"10\":\"tcp://b:1\",\"2\":\"tcp://a:1\",\"2\":\"tcp://c:1\"},"
		"\"replay_endpoints\":{\"2\":\"tcp://r:9\"},\"kv_events_endpoints_\":1,\"tenant_id\":7}",
		"{\"worker_id\":18446744073709551615,\"model_name\":\"default\",\"routing_group\":"
		"\"default\","
		"\"lifecycle\":\"schedulable\",\"endpoint\":null,\"kv_events_endpoint\":null,"
		"\"kv_events_endpoints\":{\"2\":\"tcp://c:1\",\"10\":\"tcp://b:1\"},\"replay_endpoint\":null,"
		"\"replay_endpoints\":{\"2\":\"tcp://"
		"r:9\"},\"block_size\":null,\"data_parallel_start_rank\":null,"
		"\"data_parallel_size\":null," NULLS,
		"maps by rank, nulls of names, unknown members, last duplicate");
	post_is("{\"worker_id\":1,\"endpoint\":\"\",\"data_parallel_start_rank\":4294967295,\"data_parallel_"
		"size\":0,"
		"\"max_num_batched_tokens\":18446744073709551615,\"total_kv_blocks\":0,\"stable_routing_id\":"
		"\"s\\u0001\","
		"\"is_eagle\":false,\"taints\":[\"b\",\"a\",\"b\"],\"topology_domains\":{\"z\":\"2\","
		"\"rack\":\"1\"},"
		"\"kv_transfer_domain\":\"d\",\"kv_transfer_enforcement\":\"preferred\","
		"\"kv_transfer_preferred_weight\":0.1,\"router_hint_worker_type\":\"t\","
		"\"router_hint_source_control_endpoints\":{\"0\":\"h:1\"},\"kv_event_source_mode\":\"state_"
		"agent_v2\"}",
		"{\"worker_id\":1,\"model_name\":\"default\",\"routing_group\":\"default\",\"lifecycle\":"
		"\"schedulable\","
		"\"endpoint\":\"\",\"kv_events_endpoint\":null,\"replay_endpoint\":null,\"block_size\":null,"
		"\"data_parallel_start_rank\":4294967295,\"data_parallel_size\":0,"
		"\"max_num_batched_tokens\":18446744073709551615,\"total_kv_blocks\":0,\"stable_routing_id\":"
		"\"s\\u0001\","
		"\"is_eagle\":false,\"taints\":[\"a\",\"b\"],\"topology_domains\":{\"rack\":\"1\",\"z\":"
		"\"2\"},"
		"\"kv_transfer_domain\":\"d\",\"kv_transfer_enforcement\":\"preferred\","
		"\"kv_transfer_preferred_weight\":0.1,\"router_hint_worker_type\":\"t\","
		"\"router_hint_source_control_endpoints\":{\"0\":\"h:1\"},\"kv_event_source_mode\":\"state_"
		"agent_v2\"}",
		"every member");
}

static void test_refusals(void)
{
	static const char *const wrong[][2] = {
		{"{}", "worker_id"},
		{"[]", "request body"},
		{"{\"worker_id\":null}", "worker_id"},
		{"{\"worker_id\":-1}", "worker_id"},
		{"{\"worker_id\":1.0}", "worker_id"},
		{"{\"worker_id\":\"1\"}", "worker_id"},
		{"{\"worker_id\":18446744073709551616}", "worker_id"},
		{"{\"worker_id\":1,\"model_name\":1}", "model_name"},
		{"{\"worker_id\":1,\"block_size\":4294967296}", "block_size"},
		{"{\"worker_id\":1,\"block_size\":-1}", "block_size"},
		{"{\"worker_id\":1,\"data_parallel_size\":1.5}", "data_parallel_size"},
		{"{\"worker_id\":1,\"kv_events_endpoints\":{\"x\":\"tcp://a:1\"}}", "kv_events_endpoints"},
		{"{\"worker_id\":1,\"kv_events_endpoints\":{\"-1\":\"tcp://a:1\"}}", "kv_events_endpoints"},
		{"{\"worker_id\":1,\"kv_events_endpoints\":{\"01\":\"tcp://a:1\"}}", "kv_events_endpoints"},
		{"{\"worker_id\":1,\"kv_events_endpoints\":{\"4294967296\":\"tcp://a:1\"}}",
			"kv_events_endpoints"},
		{"{\"worker_id\":1,\"kv_events_endpoints\":{\"0\":null}}", "kv_events_endpoints"},
		{"{\"worker_id\":1,\"kv_events_endpoints\":null}", "kv_events_endpoints"},
		{"{\"worker_id\":1,\"replay_endpoints\":null}", "replay_endpoints"},
		{"{\"worker_id\":1,\"router_hint_source_control_endpoints\":null}", "router_hint_source"},
		{"{\"worker_id\":1,\"taints\":null}", "taints"},
		{"{\"worker_id\":1,\"taints\":\"a\"}", "taints"},
		{"{\"worker_id\":1,\"taints\":[1]}", "taints"},
		{"{\"worker_id\":1,\"topology_domains\":null}", "topology_domains"},
		{"{\"worker_id\":1,\"topology_domains\":{\"a\":1}}", "topology_domains"},
		{"{\"worker_id\":1,\"kv_transfer_enforcement\":\"maybe\"}", "kv_transfer_enforcement"},
		{"{\"worker_id\":1,\"kv_transfer_preferred_weight\":\"1\"}", "kv_transfer_preferred_weight"},
		{"{\"worker_id\":1,\"is_eagle\":\"true\"}", "is_eagle"},
		{"{\"worker_id\":1,\"is_eagle\":1}", "is_eagle"},
	};
	for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++)
		post_fails(wrong[i][0], 422, wrong[i][1]);
	post_fails("", 400, "JSON");
	post_fails("{\"worker_id\":1", 400, "JSON");
	static const char *const limited[] = {
		"model_name", "routing_group", "endpoint", "kv_events_endpoint", "replay_endpoint"};
	static char body[4096], fill[1026];
	memset(fill, 'x', 1025);
	for (size_t i = 0; i < sizeof(limited) / sizeof(limited[0]); i++) {
		snprintf(body, sizeof(body), "{\"worker_id\":1,\"%s\":\"%s\"}", limited[i], fill);
		post_fails(body, 400, limited[i]);
	}
	snprintf(body, sizeof(body), "{\"worker_id\":1,\"kv_events_endpoints\":{\"0\":\"%s\"}}", fill);
	post_fails(body, 400, "kv_events_endpoints");
	fill[1024] = 0;
	struct kvp_wrec rec;
	snprintf(body, sizeof(body), "{\"worker_id\":1,\"model_name\":\"%s\"}", fill);
	ok(kvp_wrec_post(parser, body, strlen(body), &rec, &err) == KVP_OK, "1024 bytes are accepted");
	kvp_wrec_free(&rec);
}

static void test_patch(void)
{
	static const char base[] =
		"{\"worker_id\":1,\"model_name\":\"m\",\"endpoint\":\"e\",\"block_size\":4,"
		"\"taints\":[\"a\",\"b\"],\"total_kv_blocks\":100,\"topology_domains\":{\"r\":\"1\"}}";
	struct kvp_wrec rec;
	kvp_wrec_post(parser, base, strlen(base), &rec, &err);
	char *before = strdup(record_text(&rec, NULL));
	static const char *const same[] = {"{}",
		"{\"total_kv_blocks\":null,\"taints\":null,\"topology_domains\":null}",
		("{\"worker_id\":9,\"model_name\":\"zz\",\"routing_group\":5,\"lifecycle\":\"draining\","
		 "\"bogus\":1}")};
	for (int i = 0; i < 3; i++) {
		int rc = kvp_wrec_patch(parser, same[i], strlen(same[i]), &rec, &err);
		ok(rc == KVP_OK && strcmp(record_text(&rec, NULL), before) == 0, "no change by %s", same[i]);
	}
	static const char change[] =
		"{\"taints\":[\"c\"],\"topology_domains\":{\"z\":\"2\"},\"total_kv_blocks\":7}";
	kvp_wrec_patch(parser, change, strlen(change), &rec, &err);
	ok(strstr(record_text(&rec, NULL), "\"taints\":[\"c\"],\"topology_domains\":{\"z\":\"2\"}") != NULL,
		"sets and maps are replaced");
	ok(rec.total_kv_blocks.v == 7 && rec.block_size.v == 4, "one scalar is overwritten, others stay");
	kvp_wrec_patch(parser, "{\"taints\":[]}", 13, &rec, &err);
	is_u64(rec.taints.cnt, 0, "an empty set clears");
	ok(kvp_wrec_patch(parser, "{\"taints\":1}", 12, &rec, &err) == KVP_ERR_PROTO && err.status == 422,
		"a wrong type is 422");
	ok(kvp_wrec_patch(parser, "", 0, &rec, &err) == KVP_ERR_PROTO && err.status == 400,
		"an empty body is 400");
	free(before);
	kvp_wrec_free(&rec);
}

static void reasons_are(const char *body, int queueing, int events, const char *want)
{
	struct kvp_wrec rec;
	struct kvp_wrec_reasons r = {0};
	char got[2048] = "";
	kvp_wrec_post(parser, body, strlen(body), &rec, &err);
	kvp_wrec_check(&rec, queueing ? KVP_WREC_QUEUEING_ON : KVP_WREC_QUEUEING_OFF,
		events ? KVP_WREC_EVENTS_ON : KVP_WREC_EVENTS_OFF, &r);
	if (!r.cnt && events)
		kvp_wrec_check_listeners(&rec, &r);
	for (uint32_t i = 0; i < r.cnt; i++)
		snprintf(got + strlen(got), sizeof(got) - strlen(got), "%s%s", i ? "|" : "", r.text[i]);
	is_str(got, want, "reasons of %.80s", body);
	kvp_wrec_reasons_free(&r);
	kvp_wrec_free(&rec);
}

static void test_reasons(void)
{
	reasons_are("{\"worker_id\":1,\"data_parallel_size\":0}", 1, 1,
		"endpoint is required|block_size must be greater than 0|data_parallel_size must be greater "
		"than 0|"
		"max_num_batched_tokens is required while queueing is enabled");
	reasons_are("{\"worker_id\":1,\"endpoint\":\"\",\"block_size\":0}", 0, 0,
		"endpoint is required|block_size must be greater than 0");
	reasons_are("{\"worker_id\":1,\"endpoint\":\"e\",\"block_size\":4}", 0, 0, "");
	reasons_are("{\"worker_id\":1,\"endpoint\":\"e\",\"block_size\":4}", 0, 1,
		"kv_events endpoint is required for dp_rank 0");
	reasons_are("{\"worker_id\":1,\"endpoint\":\"e\",\"block_size\":4,\"data_parallel_size\":2,\"data_"
			"parallel_start_rank\":3,"
			"\"kv_events_endpoint\":\"tcp://a:1\"}",
		0, 1,
		"kv_events endpoint is required for dp_rank 3|kv_events endpoint is required for dp_rank 4");
	reasons_are("{\"worker_id\":1,\"endpoint\":\"e\",\"block_size\":4,\"data_parallel_size\":2,"
			"\"kv_events_endpoints\":{\"0\":\"tcp://a:1\",\"1\":\"\"}}",
		0, 1, "kv_events endpoint is required for dp_rank 1");
	reasons_are("{\"worker_id\":1,\"endpoint\":\"e\",\"block_size\":4,\"data_parallel_start_rank\":3,"
			"\"kv_events_endpoint\":\"tcp://a:1\"}",
		0, 1, "");
	reasons_are("{\"worker_id\":1,\"endpoint\":\"e\",\"block_size\":4,\"kv_events_endpoint\":\"not-an-"
			"endpoint\"}",
		0, 1,
		"reconciliation failed: kv_events_endpoint \"not-an-endpoint\": endpoint needs a "
		"scheme: tcp://, ipc:// or inproc://");
	reasons_are("{\"worker_id\":1,\"endpoint\":\"e\",\"block_size\":4,\"kv_events_endpoint\":\"tcp://"
			"a:1\",\"replay_endpoint\":\"nonsense\"}",
		0, 1,
		"reconciliation failed: replay_endpoint \"nonsense\": endpoint needs a scheme: tcp://, "
		"ipc:// or inproc://");
	reasons_are("{\"worker_id\":1,\"endpoint\":\"e\",\"block_size\":4,\"data_parallel_size\":2,\"replay_"
			"endpoint\":\"tcp://a:65535\","
			"\"kv_events_endpoints\":{\"0\":\"tcp://a:1\",\"1\":\"tcp://a:2\"}}",
		0, 1,
		"reconciliation failed: replay_endpoint \"tcp://a:65535\" gives dp_rank 1 a port above "
		"65535");
	reasons_are("{\"worker_id\":1,\"endpoint\":\"e\",\"block_size\":4,"
			"\"kv_events_endpoints\":{\"0\":\"tcp://a:1\",\"7\":\"udp://a:2\"}}",
		0, 1,
		"reconciliation failed: kv_events_endpoints \"udp://a:2\": unsupported endpoint scheme, use "
		"tcp, ipc or inproc");
	/* Billions of ranks are counted, not listed. */
	static const char many[] =
		"{\"worker_id\":1,\"endpoint\":\"e\",\"block_size\":4,\"data_parallel_size\":4294967295}";
	struct kvp_wrec rec;
	struct kvp_wrec_reasons r = {0};
	kvp_wrec_post(parser, many, strlen(many), &rec, &err);
	kvp_wrec_check(&rec, KVP_WREC_QUEUEING_OFF, KVP_WREC_EVENTS_ON, &r);
	is_u64(r.cnt, KVP_WREC_REASON_MAX, "reasons are bounded");
	ok(strstr(record_text(&rec, &r), "\"and 4294967039 more\"]}") != NULL, "the rest is counted");
	kvp_wrec_reasons_free(&r);
	kvp_wrec_free(&rec);
}

static void test_endpoints(void)
{
	static const char body[] =
		"{\"worker_id\":1,\"data_parallel_start_rank\":4,\"data_parallel_size\":3,"
		"\"replay_endpoint\":\"tcp://[::1]:5560\",\"replay_endpoints\":{\"6\":\"tcp://x:1\"}}";
	char buf[KVP_WREC_ENDPOINT_MAX];
	struct kvp_wrec rec;
	kvp_wrec_post(parser, body, strlen(body), &rec, &err);
	kvp_wrec_replay(&rec, 4, buf);
	is_str(buf, "tcp://[::1]:5560", "the first rank replays from the endpoint itself");
	kvp_wrec_replay(&rec, 5, buf);
	is_str(buf, "tcp://[::1]:5561", "the next from the next port");
	kvp_wrec_replay(&rec, 6, buf);
	is_str(buf, "tcp://x:1", "the map wins");
	kvp_wrec_free(&rec);
	static const char ipc[] =
		"{\"worker_id\":1,\"data_parallel_size\":2,\"replay_endpoint\":\"ipc:///r\"}";
	kvp_wrec_post(parser, ipc, strlen(ipc), &rec, &err);
	ok(kvp_wrec_replay(&rec, 0, buf) == KVP_OK && kvp_wrec_replay(&rec, 1, buf) == KVP_ERR_NOTFOUND,
		"an endpoint without port serves the first rank only");
	kvp_wrec_free(&rec);
	static const char top[] =
		"{\"worker_id\":1,\"data_parallel_start_rank\":4294967290,\"data_parallel_size\":100}";
	uint32_t start;
	kvp_wrec_post(parser, top, strlen(top), &rec, &err);
	is_u64(kvp_wrec_ranks(&rec, &start), 5, "the upper end of the ranks saturates");
	kvp_wrec_free(&rec);
}

int main(void)
{
	parser = kvp_json_new();
	kvp_jw_init(&jw);
	test_records();
	test_refusals();
	test_patch();
	test_reasons();
	test_endpoints();
	kvp_jw_free(&jw);
	kvp_json_free(parser);
	return done();
}
