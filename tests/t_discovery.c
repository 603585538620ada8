/* What discovery makes of the objects of Kubernetes: pools, pods, roles, ports and ranks, worker ids,
 * replicas. */
#include "daemons/common/config.h"
#include "daemons/discovery/cluster.h"

#include "daemons/common/worker_record.h"
#include "shm/cmdring.h"
#include "tests/tap.h"
#include "tests/vec.h"
#include <stdlib.h>

static struct kvp_json *json, *other;

static struct kvp_json_val parse(const char *text)
{
	struct kvp_json_val v = {0};
	struct kvp_json_err err;
	if (kvp_json_parse(json, text, strlen(text), 64, &v, &err))
		printf("# %s in %s\n", err.text, text);
	return v;
}

/* ---- pools ---- */

static struct kvp_kube_bytes pool_bytes(enum kvp_ipool_form form, const char *text)
{
	static struct kvp_kube_buf buf[4];
	static int turn;
	struct kvp_kube_buf *b = &buf[turn++ % 4];
	b->len = 0;
	kvp_ipool_digest(form, parse(text), b);
	return (struct kvp_kube_bytes){b->p, b->len};
}

static struct kvp_ipool pool_of(enum kvp_ipool_form form, const char *text)
{
	struct kvp_ipool p;
	kvp_ipool_read(pool_bytes(form, text), &p);
	return p;
}

#define SPEC(selector, ports) "{\"metadata\":{\"name\":\"p\"},\"spec\":{" selector ports "}}"
#define LABELS "\"selector\":{\"matchLabels\":{\"app\":\"x\"}},"
#define PORTS "\"targetPorts\":[{\"number\":8000}]"

static void pools(void)
{
	static const struct {
		const char *text, *why;
	} bad[] = {
		{SPEC("", PORTS), "missing"},
		{SPEC("\"selector\":{},", PORTS), "missing"},
		{SPEC("\"selector\":{\"matchLabels\":{}},", PORTS), "empty"},
		{SPEC("\"selector\":{\"matchLabels\":{\"a\":1,\"b\":null}},", PORTS), "empty"},
		{SPEC("\"selector\":{\"matchLabels\":[]},", PORTS), "missing"},
		{SPEC("\"selector\":{\"app\":\"x\"},", "\"targetPortNumber\":8000"), "targetPorts"},
		{SPEC("\"selector\":{\"app\":\"x\"},", PORTS), "missing"},
		{SPEC(LABELS, "\"targetPorts\":[]"), "targetPorts"},
		{SPEC(LABELS, "\"targetPorts\":[{}]"), "targetPorts"},
		{SPEC(LABELS, "\"targetPorts\":[{\"number\":0}]"), "targetPorts"},
		{SPEC(LABELS, "\"targetPorts\":[{\"number\":65536}]"), "targetPorts"},
		{SPEC(LABELS, "\"targetPorts\":[{\"number\":\"8000\"}]"), "targetPorts"},
		{SPEC(LABELS, "\"targetPorts\":[{\"number\":-1},{\"number\":8000}]"), "targetPorts"},
		{"{\"metadata\":{\"name\":\"p\"}}", "targetPorts"},
	};
	for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
		struct kvp_ipool p = pool_of(KVP_IPOOL_V1, bad[i].text);
		ok(p.why && strstr(p.why, bad[i].why), "7.2: invalid, because %s: %s", bad[i].why,
			bad[i].text);
	}
	struct kvp_ipool p = pool_of(
		KVP_IPOOL_V1, SPEC("\"selector\":{\"matchLabels\":{\"app\":\"x\",\"n\":7,\"tier\":\"gpu\"}},",
				      "\"targetPorts\":[{\"number\":8000},{\"number\":8001},{\"number\":0},{"
				      "\"number\":8001},{\"number\":9}]"));
	ok(!p.why && p.label_cnt == 2 && !strcmp(p.label[0].key, "app") && !strcmp(p.label[0].val, "x") &&
			!strcmp(p.label[1].key, "tier") && !strcmp(p.label[1].val, "gpu"),
		"7.2: labels that are no texts are left out");
	ok(p.port_cnt == 3 && p.port[0] == 8000 && p.port[1] == 8001 && p.port[2] == 9,
		"further ports: what is none, or known, is left out");
	p = pool_of(KVP_IPOOL_V1, SPEC(LABELS, PORTS));
	ok(!p.why && p.port_cnt == 1 && p.port[0] == 8000, "the common case");
	p = pool_of(KVP_IPOOL_OLD, SPEC("\"selector\":{\"app\":\"x\"},", "\"targetPortNumber\":8000"));
	ok(!p.why && p.port[0] == 8000 && p.label_cnt == 1,
		"the older group has one port and a flat selector");
	p = pool_of(KVP_IPOOL_OLD, SPEC(LABELS, PORTS));
	ok(p.why != NULL, "and not the newer form");
	kvp_ipool_read((struct kvp_kube_bytes){NULL, 0}, &p);
	ok(p.why && !p.label_cnt, "no pool is no valid one");
	kvp_ipool_read((struct kvp_kube_bytes){"\0008000\0a", 7}, &p);
	ok(!p.why && p.label_cnt == 0, "bytes that break off are read as far as they go");
}

/* ---- pods ---- */

static struct kvp_pod_rules rules;

static void rules_reset(void)
{
	rules = (struct kvp_pod_rules){.model = "m",
		.role_label = "nvidia.com/role",
		.block_size = 16,
		.event_port = 5557,
		.replay_port = 5560,
		.stride = 1,
		.rank_cnt = 1,
		.has_events = 1,
		.total_kv_blocks = UINT64_MAX,
		.capacity = {{UINT64_MAX}, {UINT64_MAX}, {UINT64_MAX}},
		.taint_labels = "",
		.domain_label = ""};
}

static struct kvp_jw body;
static struct kvp_pod_worker worker;
static struct kvp_ipool pool, prefill;

static struct kvp_kube_bytes pod_bytes(const char *text)
{
	static struct kvp_kube_buf buf;
	buf.len = 0;
	kvp_pod_digest(parse(text), &buf);
	return (struct kvp_kube_bytes){buf.p, buf.len};
}

static enum kvp_pod_why why_of(const char *name, const char *text)
{
	return kvp_pod_worker_of(&rules, &pool, &prefill, name, pod_bytes(text), &body, &worker);
}

/* A member of the body just made, as text; "-" = it has none. */
static const char *member(const char *key)
{
	static char text[4][512];
	static int turn;
	char *to = text[turn++ % 4];
	struct kvp_json_val root, v;
	struct kvp_jw w;
	if (kvp_json_parse(other, body.buf, body.len, 16, &root, NULL) || kvp_json_get(root, key, &v))
		return "-";
	kvp_jw_init(&w);
	kvp_jw_val(&w, v);
	snprintf(to, sizeof(text[0]), "%.*s", (int)w.len, w.buf);
	kvp_jw_free(&w);
	return to;
}

#define READY                                                                                                \
	"\"conditions\":[{\"type\":\"X\",\"status\":\"False\"},{\"type\":\"Ready\",\"status\":\"True\"}]"
#define POD_META(meta, labels, status)                                                                       \
	"{\"metadata\":{\"name\":\"n\"," meta "\"labels\":{" labels "}},\"status\":{" status "}}"
#define POD(labels, status) POD_META("", labels, status)
#define GOOD POD("\"app\":\"x\"", "\"podIP\":\"10.0.0.1\"," READY)

static void eligibility(void)
{
	static const struct {
		const char *text, *name;
	} bad[] = {
		{POD_META("\"deletionTimestamp\":\"2026-01-01T00:00:00Z\",", "\"app\":\"x\"",
			 "\"podIP\":\"10.0.0.1\"," READY),
			"being deleted"},
		{POD("\"app\":\"x\"",
			 "\"podIP\":\"10.0.0.1\",\"conditions\":[{\"type\":\"Ready\",\"status\":\"False\"}]"),
			"not ready"},
		{POD("\"app\":\"x\"", "\"podIP\":\"10.0.0.1\",\"conditions\":[{\"type\":\"Ready\",\"status\":"
				      "\"Unknown\"}]"),
			"nobody knows"},
		{POD("\"app\":\"x\"", "\"podIP\":\"10.0.0.1\",\"containerStatuses\":[{\"ready\":true}]"),
			"only its containers are ready"},
		{POD("\"app\":\"x\"", "\"podIP\":\"10.0.0.1\""), "no conditions"},
		{POD("\"app\":\"x\"", READY), "no address"},
		{POD("\"app\":\"x\"", "\"podIP\":\"\"," READY), "an empty address"},
		{POD("\"app\":\"x\"", "\"podIP\":\"host.local\"," READY), "a name for an address"},
		{POD("\"app\":\"x\"", "\"podIPs\":[{\"ip\":\"10.0.0.1\"}]," READY), "podIPs only"},
		{"{\"metadata\":{\"name\":\"n\"}}", "no status"},
		{"{}", "nothing"},
	};
	rules_reset();
	pool = pool_of(
		KVP_IPOOL_V1, SPEC("\"selector\":{\"matchLabels\":{\"app\":\"x\",\"z\":\"\"}},", PORTS));
	ok(why_of("n", GOOD) == KVP_POD_NOT_SELECTED, "7.3: every label has to be there");
	ok(why_of("n", POD("\"app\":\"x\",\"z\":\"\",\"more\":\"y\"", "\"podIP\":\"10.0.0.1\"," READY)) ==
			KVP_POD_IS_WORKER,
		"and equal; further ones do not matter");
	pool = pool_of(KVP_IPOOL_V1, SPEC(LABELS, PORTS));
	ok(why_of("n", GOOD) == KVP_POD_IS_WORKER, "a ready pod with an address is a worker");
	for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
		ok(why_of("n", bad[i].text) == KVP_POD_NOT_READY, "7.3: no worker: %s", bad[i].name);
		is_u64(pod_bytes(bad[i].text).len, 1, "and not told apart from others that are none");
	}
	ok(why_of("n", POD("\"app\":\"y\"", "\"podIP\":\"10.0.0.1\"," READY)) == KVP_POD_NOT_SELECTED,
		"another label");
	ok(why_of("n", POD_META("\"deletionTimestamp\":null,", "\"app\":\"x\"",
			       "\"podIP\":\"10.0.0.1\"," READY)) == KVP_POD_IS_WORKER,
		"null is no time of deletion");
	kvp_ipool_read((struct kvp_kube_bytes){NULL, 0}, &pool);
	ok(why_of("n", GOOD) == KVP_POD_NOT_SELECTED, "without a pool nobody is selected");
}

static void ids(void)
{
	struct kvp_json *p = kvp_json_new();
	struct kvp_json_iter it = kvp_json_each(vec_get(vec_load(p, "worker_id.json"), "vectors"));
	uint32_t n = 0;
	while (kvp_json_next(&it)) {
		const char *name = vec_str(it.val, "pod_name");
		is_u64(kvp_pod_id(name, strlen(name)), vec_num(vec_get(it.val, "worker_id")), "7.4: \"%s\"",
			name);
		n++;
	}
	ok(n == 10, "all vectors");
	kvp_json_free(p);
}

static void mapping(void)
{
	rules_reset();
	pool = pool_of(KVP_IPOOL_V1, SPEC(LABELS, PORTS));
	ok(why_of("vllm-0", GOOD) == KVP_POD_IS_WORKER && worker.role == KVP_PART_AGGREGATED, "7.5: vllm-0");
	is_str(member("worker_id"), "1943803597606491", "worker_id");
	is_str(member("model_name"), "\"m\"", "model_name");
	is_str(member("routing_group"), "\"default\"", "routing_group");
	is_str(member("endpoint"), "\"http://10.0.0.1:8000\"", "endpoint");
	is_str(member("block_size"), "16", "block_size");
	is_str(member("data_parallel_start_rank"), "0", "start rank");
	is_str(member("data_parallel_size"), "1", "size");
	is_str(member("kv_events_endpoints"), "{\"0\":\"tcp://10.0.0.1:5557\"}", "events");
	is_str(member("replay_endpoint"), "\"tcp://10.0.0.1:5560\"", "replay");
	ok(!strcmp(member("replay_endpoints"), "-") && !strcmp(member("max_num_batched_tokens"), "-") &&
			!strcmp(member("total_kv_blocks"), "-") && !strcmp(member("is_eagle"), "-") &&
			!strcmp(member("taints"), "-") && !strcmp(member("stable_routing_id"), "-"),
		"nothing that was not told");
	why_of("vllm-0", POD("\"app\":\"x\"", "\"podIP\":\"fd00::10\"," READY));
	is_str(member("endpoint"), "\"http://[fd00::10]:8000\"", "IPv6: endpoint in brackets");
	is_str(member("kv_events_endpoints"), "{\"0\":\"tcp://[fd00::10]:5557\"}", "IPv6: events");
	rules.rank_cnt = 3;
	rules.stride = 2;
	why_of("vllm-0", GOOD);
	is_str(member("kv_events_endpoints"),
		"{\"0\":\"tcp://10.0.0.1:5557\",\"1\":\"tcp://10.0.0.1:5559\",\"2\":\"tcp://10.0.0.1:5561\"}",
		"three ranks, stride 2");
	is_str(member("replay_endpoints"),
		"{\"0\":\"tcp://10.0.0.1:5560\",\"1\":\"tcp://10.0.0.1:5562\",\"2\":\"tcp://10.0.0.1:5564\"}",
		"with a map of replay endpoints");
	ok(!strcmp(member("replay_endpoint"), "-") && !strcmp(member("data_parallel_size"), "3"),
		"and no single one");
	rules.rank_cnt = 512; /* as many as the settings allow */
	rules.event_port = 60001;
	rules.replay_port = 64001;
	why_of("vllm-0",
		POD("\"app\":\"x\"", "\"podIP\":\"fd00:1111:2222:3333:4444:5555:6666:7777\"," READY));
	ok(body.len < KVP_CMD_PAYLOAD_MAX - 4096, "the longest maps are %zu bytes of a command", body.len);
	rules.rank_cnt = 3;
	rules.replay_port = 0;
	rules.total_kv_blocks = 0;
	rules.is_eagle = 1;
	rules.capacity[0].max_num_batched_tokens = 8192;
	why_of("vllm-0", GOOD);
	ok(!strcmp(member("replay_endpoints"), "-") && !strcmp(member("total_kv_blocks"), "0") &&
			!strcmp(member("is_eagle"), "true") &&
			!strcmp(member("max_num_batched_tokens"), "8192"),
		"what was told");
	rules.has_events = 0;
	why_of("vllm-0", GOOD);
	is_str(member("kv_events_endpoints"), "-", "without KV events no endpoints of them");
	rules_reset();
	rules.taint_labels = "zone,gone,team";
	rules.domain_label = "nv/domain";
	rules.enforcement = "required";
	why_of("a", POD("\"app\":\"x\",\"team\":\"red\",\"zone\":\"b\",\"nv/domain\":\"rack7\"",
			    "\"podIP\":\"10.0.0.1\"," READY));
	is_str(member("taints"), "[\"zone=b\",\"team=red\"]", "labels that become taints");
	is_str(member("kv_transfer_domain"), "\"rack7\"", "transfer domain");
	is_str(member("kv_transfer_enforcement"), "\"required\"", "and how strict it is");
	struct kvp_wrec rec;
	struct kvp_wrec_err err = {0, ""};
	ok(kvp_wrec_post(other, body.buf, body.len, &rec, &err) == KVP_OK, "the indexer reads it %s",
		err.text);
	kvp_wrec_free(&rec);
}

#define LABELLED(key) POD("\"app\":\"x\",\"" key "\":\"%s\"", "\"podIP\":\"10.0.0.1\"," READY)

/* pod_with writes a pod with a role label; "<absent>": without one. */
static const char *pod_with(const char *form, const char *value)
{
	static char text[512];
	snprintf(text, sizeof(text), strcmp(value, "<absent>") ? form : GOOD, value);
	return text;
}

/* What a label is about, in the words of the specification's list. */
static const char *about_label(const char *value)
{
	if (!strcmp(value, "prefill") || !strcmp(value, "decode"))
		return "two stages parse";
	if (!strcmp(value, "aggregated"))
		return "aggregated does not round-trip";
	return !strcmp(value, " Decode ") || !strcmp(value, "PREFILL") ? "trimming and case"
								       : "reasons distinct";
}

/* role_labels: dyn's words. */
static void roles_dyn(struct kvp_json_val list)
{
	uint64_t n = 0;
	rules_reset();
	pool = pool_of(KVP_IPOOL_V1, SPEC(LABELS, PORTS));
	for (struct kvp_json_iter i = kvp_json_each(list); kvp_json_next(&i); n++) {
		const char *value = vec_str(i.val, "value"), *want = vec_str(i.val, "role");
		const char *text = pod_with(LABELLED("nvidia.com/role"), value);
		rules.roles = KVP_PODS_BY_LABEL;
		enum kvp_pod_why why = why_of("p-0", text);
		is_str(why != KVP_POD_IS_WORKER		  ? kvp_pod_why_name(why)
			: worker.role == KVP_PART_PREFILL ? "prefill"
							  : "decode",
			want, "Roles: %s: label \"%s\"", about_label(value), value);
		ok(!worker.has_twin, "Roles: nobody has two of dyn's");
		if (why == KVP_POD_ROLE_INVALID)
			is_str(worker.why_text, value, "Roles: invalid values keep their spelling");
		rules.roles = KVP_PODS_AGGREGATED;
		ok(why_of("p-0", text) == KVP_POD_IS_WORKER && worker.role == KVP_PART_AGGREGATED &&
				worker.id == kvp_pod_id("p-0", 3),
			"Roles: the label is not read in aggregated topology");
	}
	is_u64(n, 12, "all role labels were tried");
}

static enum kvp_pod_why twin_of(const char *name, const char *text)
{
	return kvp_pod_twin_of(&rules, &pool, name, pod_bytes(text), &body, &worker);
}

/* llmd_role_labels: a pod of both roles is a worker in both catalogues, each with an id of its own. */
static void roles_llmd(struct kvp_json_val list)
{
	static const char name[] = "vllm-0";
	uint64_t n = 0, both = 0, decode = kvp_pod_id(name, 6), prefill_id = kvp_pod_id("vllm-0/prefill", 14);
	rules_reset();
	rules.roles = KVP_PODS_BY_LABEL;
	rules.words = KVP_PODS_LLMD;
	rules.role_label = "llm-d.ai/role";
	rules.capacity[KVP_PART_PREFILL].max_num_batched_tokens = 100;
	rules.capacity[KVP_PART_DECODE].max_num_batched_tokens = 200;
	for (struct kvp_json_iter i = kvp_json_each(list); kvp_json_next(&i); n++) {
		const char *value = vec_str(i.val, "value");
		uint64_t in[KVP_PART_ROLE_CNT] = {0};
		const char *text = pod_with(LABELLED("llm-d.ai/role"), value);
		enum kvp_pod_why why = why_of(name, text);
		ok(why == KVP_POD_IS_WORKER || why == KVP_POD_ROLE_INVALID, "llm-d's label \"%s\": %s", value,
			kvp_pod_why_name(why));
		if (why == KVP_POD_ROLE_INVALID)
			is_str(worker.why_text, value, "told as it is written");
		for (int more = why == KVP_POD_IS_WORKER; more;) {
			in[worker.role]++;
			is_u64(worker.id, worker.role == KVP_PART_DECODE ? decode : prefill_id,
				"%s: an id for each role", value);
			is_u64(strtoull(member("worker_id"), NULL, 10), worker.id, "%s: told to the indexer",
				value);
			is_str(member("max_num_batched_tokens"),
				worker.role == KVP_PART_DECODE ? "200" : "100", "%s: the role's capacity",
				value);
			ok(!strcmp(member("kv_events_endpoints"), "-") == (worker.role == KVP_PART_DECODE),
				"%s: events of who prefills", value);
			more = worker.has_twin && twin_of(name, text) == KVP_POD_IS_WORKER;
		}
		is_u64(in[KVP_PART_PREFILL], vec_u64(i.val, "prefill_pool"), "%s: in the prefill pool",
			value);
		is_u64(in[KVP_PART_DECODE], vec_u64(i.val, "decode_pool"), "%s: in the decode pool", value);
		both += in[KVP_PART_PREFILL] && in[KVP_PART_DECODE];
	}
	is_u64(n, 9, "all labels of llm-d were tried");
	is_u64(both, 3, "three of them mean both");
	ok(why_of(name, pod_with(LABELLED("llm-d.ai/role"), " Both ")) == KVP_POD_IS_WORKER &&
			worker.has_twin,
		"blanks and case as with dyn's words");
	static const char one_of_two[] =
		POD_META("\"annotations\":{\"inference.networking.k8s.io/active-ports\":\"8000\"},",
			"\"app\":\"x\",\"llm-d.ai/role\":\"both\"", "\"podIP\":\"10.0.0.1\"," READY);
	rules.ranks_by_port = 1;
	rules.rank_cnt = 2;
	ok(why_of(name, one_of_two) == KVP_POD_IS_WORKER && !strcmp(member("data_parallel_size"), "2"),
		"a port a rank: the decode worker's stand behind one");
	ok(twin_of(name, one_of_two) == KVP_POD_IS_WORKER && !strcmp(member("data_parallel_size"), "1") &&
			!strcmp(member("endpoint"), "\"http://10.0.0.1:8000\""),
		"of the prefill worker's the active one counts");
	ok(why_of(name, pod_with(LABELLED("llm-d.ai/role"), "")) == KVP_POD_ROLE_INVALID,
		"an empty label is not an absent one");
	ok(why_of(name, pod_with(LABELLED("nvidia.com/role"), "prefill")) == KVP_POD_IS_WORKER &&
			worker.role == KVP_PART_DECODE,
		"and another label is none");
}

static void roles(void)
{
	struct kvp_json *p = kvp_json_new();
	struct kvp_json_val root = vec_load(p, "disagg.json");
	roles_dyn(vec_get(root, "role_labels"));
	roles_llmd(vec_get(root, "llmd_role_labels"));
	kvp_json_free(p);
}

static void role_rules(void)
{
	rules_reset();
	pool = pool_of(KVP_IPOOL_V1, SPEC(LABELS, PORTS));
	rules.roles = KVP_PODS_BY_LABEL;
	ok(why_of("p-0", GOOD) == KVP_POD_ROLE_MISSING, "no role label");
	ok(why_of("p-0", POD("\"app\":\"x\"", READY)) == KVP_POD_NOT_READY,
		"7.3: readiness goes before the role");
	rules.capacity[KVP_PART_PREFILL].max_num_batched_tokens = 100;
	rules.capacity[KVP_PART_DECODE].max_num_batched_tokens = 200;
	static const char decode[] =
		POD("\"app\":\"x\",\"nvidia.com/role\":\"decode\"", "\"podIP\":\"10.0.0.1\"," READY);
	why_of("d-0", decode);
	ok(!strcmp(member("max_num_batched_tokens"), "200") && !strcmp(member("kv_events_endpoints"), "-") &&
			!strcmp(member("replay_endpoint"), "-"),
		"a decode worker has its own capacity and no events");
	rules.has_decode_events = 1;
	why_of("d-0", decode);
	ok(strcmp(member("kv_events_endpoints"), "-") != 0, "unless they are needed");
	rules.capacity[KVP_PART_DECODE] = rules.capacity[KVP_PART_PREFILL];
	why_of("d-0", decode);
	char whole[1024], without[1024];
	snprintf(whole, sizeof(whole), "%.*s", (int)body.len, body.buf);
	why_of("d-0", POD("\"app\":\"x\",\"nvidia.com/role\":\"prefill\"", "\"podIP\":\"10.0.0.1\"," READY));
	ok(body.len == strlen(whole) && !memcmp(whole, body.buf, body.len),
		"Role config: only decode changes statically: with its events it is told like prefill");
	rules.has_decode_events = 0;
	why_of("d-0", decode);
	const char *from = strstr(whole, ",\"kv_events_endpoints\""),
		   *to = strstr(whole, ",\"max_num_batched");
	snprintf(without, sizeof(without), "%.*s%s", from ? (int)(from - whole) : 0, whole, to ? to : "");
	ok(body.len == strlen(without) && !memcmp(without, body.buf, body.len),
		"Role config: only decode changes statically and only use_kv_events");
	rules.roles = KVP_PODS_BY_POOL;
	rules.has_decode_events = 0;
	prefill = pool_of(KVP_IPOOL_V1, SPEC("\"selector\":{\"matchLabels\":{\"kind\":\"pre\"}},",
						"\"targetPorts\":[{\"number\":9000}]"));
	ok(why_of("d-0", GOOD) == KVP_POD_IS_WORKER && worker.role == KVP_PART_DECODE,
		"two pools: the pool decodes");
	ok(why_of("p-0", POD("\"kind\":\"pre\"", "\"podIP\":\"10.0.0.1\"," READY)) == KVP_POD_IS_WORKER &&
			worker.role == KVP_PART_PREFILL &&
			!strcmp(member("endpoint"), "\"http://10.0.0.1:9000\"") &&
			!strcmp(member("max_num_batched_tokens"), "100"),
		"the other one has its port and capacity");
	ok(why_of("p-0", POD("\"kind\":\"pre\",\"app\":\"x\"", "\"podIP\":\"10.0.0.1\"," READY)) ==
			KVP_POD_IN_BOTH,
		"a pod in both is none");
	rules.roles = KVP_PODS_AGGREGATED;
	ok(why_of("p-0", POD("\"kind\":\"pre\",\"app\":\"x\"", "\"podIP\":\"10.0.0.1\"," READY)) ==
			KVP_POD_IS_WORKER,
		"with one pool there is no other");
}

#define ACTIVE(ports)                                                                                        \
	POD_META("\"annotations\":{\"inference.networking.k8s.io/active-ports\":\"" ports "\"},",            \
		"\"app\":\"x\"", "\"podIP\":\"10.0.0.1\"," READY)

static void one_case(const char *annotated, const char *want, const char *name)
{
	char got[256] = "none";
	if (why_of("n", annotated) == KVP_POD_IS_WORKER)
		snprintf(got, sizeof(got), "%s %s+%s %s", member("endpoint"),
			member("data_parallel_start_rank"), member("data_parallel_size"),
			member("kv_events_endpoints"));
	is_str(got, want, "%s", name);
}

static void ports(void)
{
	rules_reset();
	rules.replay_port = 0;
	pool = pool_of(KVP_IPOOL_V1, SPEC(LABELS, "\"targetPorts\":[{\"number\":8000},{\"number\":8001},{"
						  "\"number\":8002},{\"number\":9000}]"));
	one_case(GOOD, "\"http://10.0.0.1:8000\" 0+1 {\"0\":\"tcp://10.0.0.1:5557\"}",
		"the first port counts");
	one_case(ACTIVE("8000,8001"), "\"http://10.0.0.1:8000\" 0+1 {\"0\":\"tcp://10.0.0.1:5557\"}",
		"and is active");
	one_case(ACTIVE(" 9000 , 8000 "), "\"http://10.0.0.1:8000\" 0+1 {\"0\":\"tcp://10.0.0.1:5557\"}",
		"blanks");
	one_case(ACTIVE("8001"), "none", "or is not");
	one_case(ACTIVE(""), "none", "none is active");
	one_case(ACTIVE("x,80 00,-8000,8000x"), "none", "nonsense names no port");
	rules.ranks_by_port = 1;
	one_case(GOOD,
		"\"http://10.0.0.1:8000\" 0+3 {\"0\":\"tcp://10.0.0.1:5557\",\"1\":\"tcp://10.0.0.1:5558\","
		"\"2\":\"tcp://10.0.0.1:5559\"}",
		"a rank a port: as many as there are in a row");
	one_case(ACTIVE("8001,8002"),
		"\"http://10.0.0.1:8001\" 1+2 {\"1\":\"tcp://10.0.0.1:5558\",\"2\":\"tcp://10.0.0.1:5559\"}",
		"active ones from the second on");
	one_case(ACTIVE("8000,8002"), "\"http://10.0.0.1:8000\" 0+1 {\"0\":\"tcp://10.0.0.1:5557\"}",
		"a hole ends the row");
	one_case(ACTIVE("9000"), "none", "a port that is no rank's");
	rules.rank_cnt = 2;
	one_case(GOOD,
		"\"http://10.0.0.1:8000\" 0+2 {\"0\":\"tcp://10.0.0.1:5557\",\"1\":\"tcp://10.0.0.1:5558\"}",
		"a size that was told");
	pool = pool_of(KVP_IPOOL_V1, SPEC(LABELS, PORTS));
	one_case(GOOD,
		"\"http://10.0.0.1:8000\" 0+2 {\"0\":\"tcp://10.0.0.1:5557\",\"1\":\"tcp://10.0.0.1:5558\"}",
		"a pool with one port: the next ones follow");
	pool = pool_of(KVP_IPOOL_V1, SPEC(LABELS, "\"targetPorts\":[{\"number\":65535}]"));
	one_case(GOOD, "\"http://10.0.0.1:65535\" 0+1 {\"0\":\"tcp://10.0.0.1:5557\"}",
		"there is no port 65536");
	pool = pool_of(KVP_IPOOL_V1, SPEC(LABELS, "\"targetPorts\":[{\"number\":8000},{\"number\":8001}]"));
	rules.roles = KVP_PODS_BY_LABEL;
	rules.has_decode_events = 1;
#define OF_ROLE(role) POD("\"app\":\"x\",\"nvidia.com/role\":\"" role "\"", "\"podIP\":\"10.0.0.1\"," READY)
	one_case(OF_ROLE("prefill"),
		"\"http://10.0.0.1:8000\" 0+2 {\"0\":\"tcp://10.0.0.1:5557\",\"1\":\"tcp://10.0.0.1:5558\"}",
		"a pod that prefills has a port a rank");
	one_case(OF_ROLE("decode"),
		"\"http://10.0.0.1:8000\" 0+2 {\"0\":\"tcp://10.0.0.1:5557\",\"1\":\"tcp://10.0.0.1:5558\"}",
		"a pod that decodes as many ranks as were told, behind its sidecar");
	rules.rank_cnt = 1;
	one_case(OF_ROLE("decode"), "\"http://10.0.0.1:8000\" 0+1 {\"0\":\"tcp://10.0.0.1:5557\"}",
		"whatever ports the pool has");
}

/* ---- slices ---- */

static char seen[512];

static void on_address(void *ctx, const char *address, int is_source)
{
	(void)ctx;
	size_t n = strlen(seen);
	snprintf(seen + n, sizeof(seen) - n, "%s%s%s", n ? " " : "", address, is_source ? "*" : "");
}

static const char *slice(const char *text, enum kvp_slice_family family, const char *own)
{
	static struct kvp_kube_buf buf;
	buf.len = 0;
	seen[0] = 0;
	kvp_slice_digest(parse(text), &buf);
	kvp_slice_each((struct kvp_kube_bytes){buf.p, buf.len}, family, own, on_address, NULL);
	return seen;
}

#define SLICE(type, endpoints) "{\"addressType\":\"" type "\",\"endpoints\":[" endpoints "]}"
#define EP(ip, conditions) "{\"addresses\":[\"" ip "\"]" conditions "}"
#define COND(c) ",\"conditions\":{" c "}"

static void slices(void)
{
	static const struct {
		const char *conditions;
		int is_source;
	} v[] = {
		{"", 0},
		{",\"conditions\":null", 0},
		{COND(""), 0},
		{COND("\"ready\":true"), 1},
		{COND("\"ready\":false"), 0},
		{COND("\"ready\":true,\"serving\":false"), 0},
		{COND("\"ready\":false,\"serving\":true"), 1},
		{COND("\"ready\":true,\"serving\":null"), 1},
		{COND("\"serving\":true,\"terminating\":true"), 0},
		{COND("\"ready\":true,\"terminating\":false"), 1},
		{COND("\"ready\":false,\"serving\":false,\"terminating\":true"), 0},
	};
	for (size_t i = 0; i < sizeof(v) / sizeof(v[0]); i++) {
		char text[256];
		snprintf(text, sizeof(text), SLICE("IPv4", EP("10.0.0.2", "%s")), v[i].conditions);
		is_str(slice(text, KVP_SLICE_V4, "10.0.0.1"), v[i].is_source ? "10.0.0.2*" : "10.0.0.2",
			"a member%s: \"%s\"", v[i].is_source ? " and a source" : "", v[i].conditions);
	}
	is_str(slice(SLICE("ipv4", EP("10.0.0.1", "") "," EP("10.0.0.3", "")), KVP_SLICE_V4, "10.0.0.1"),
		"10.0.0.3", "not ourselves; the family in any case");
	is_str(slice(SLICE("IPv6", EP("fd00::2", "") "," EP("fd00:0::1", "")), KVP_SLICE_V6, "fd00::1"),
		"fd00::2", "not ourselves in another spelling");
	is_str(slice(SLICE("IPv6", EP("fd00::2", "")), KVP_SLICE_V4, "10.0.0.1"), "", "not the other family");
	is_str(slice(SLICE("FQDN", EP("a.b", "")), KVP_SLICE_V4, "10.0.0.1"), "", "nor names");
	is_str(slice("{\"addressType\":\"IPv4\",\"endpoints\":[{\"addresses\":[\"10.0.0.2\",\"\",\"10.0.0."
		     "4\"]},{}]}",
		       KVP_SLICE_V4, "10.0.0.1"),
		"10.0.0.2 10.0.0.4", "every address, empty ones left out");
	is_str(slice("{\"addressType\":\"IPv4\",\"endpoints\":null}", KVP_SLICE_V4, "10.0.0.1"), "",
		"no endpoints");
}

/* ---- settings ---- */

static struct kvp_pod_rules rules_from(const char *const *more)
{
	static struct kvp_config cfg;
	static struct kvp_config_err err;
	struct kvp_pod_rules r = {.model = "?"};
	const char *env[32] = {"DYN_EPP_MODE=standalone", "DYN_MODEL_NAME=m", "DYN_EPP_INFERENCE_POOL_NAME=p",
		"POD_NAMESPACE=ns", "DYN_KV_CACHE_BLOCK_SIZE=32", "DYN_EPP_TOKENIZER_PROTOCOL=vllm-render",
		"DYN_EPP_TOKENIZER_SERVICE_URL=http://127.0.0.1:1"};
	size_t n = 7;
	while (*more)
		env[n++] = *more++;
	memset(&err, 0, sizeof(err));
	int rc = kvp_config_load(KVP_BIN_SUPERVISOR, 0, NULL, env, &cfg, NULL, &err);
	if (rc)
		printf("# %s", err.text);
	else
		kvp_cluster_rules(&cfg, &r);
	return r;
}
#define RULES(...) rules_from((const char *const[]){__VA_ARGS__, NULL})

static void settings(void)
{
	struct kvp_pod_rules r = RULES("X=");
	ok(r.roles == KVP_PODS_AGGREGATED && r.block_size == 32 && r.event_port == 5557 && !r.replay_port &&
			r.stride == 1 && r.rank_cnt == 1 && !r.ranks_by_port && r.has_events && !r.is_eagle,
		"what nobody sets");
	ok(r.total_kv_blocks == UINT64_MAX && r.capacity[0].max_num_batched_tokens == UINT64_MAX &&
			!r.enforcement && !strcmp(r.role_label, "nvidia.com/role"),
		"is not told");
	r = RULES("DYN_EPP_KV_EVENT_REPLAY_PORT=6000", "KVPICK_EPP_DATA_PARALLEL_SIZE=4",
		"KVPICK_EPP_KV_EVENT_PORT_STRIDE=2", "KVPICK_EPP_DP_ROUTING=port",
		"DYN_EPP_TOTAL_KV_BLOCKS=0", "DYN_EPP_IS_EAGLE=true", "DYN_USE_KV_EVENTS=false",
		"DYN_EPP_MAX_NUM_BATCHED_TOKENS=8192");
	ok(r.replay_port == 6000 && r.rank_cnt == 4 && r.stride == 2 && r.ranks_by_port &&
			!r.total_kv_blocks && r.is_eagle && !r.has_events,
		"what is set");
	is_u64(r.capacity[KVP_PART_AGGREGATED].max_num_batched_tokens, 8192, "capacity");
	r = RULES("DYN_EPP_TOPOLOGY_MODE=disaggregated", "DYN_EPP_ROLE_LABEL=a/b",
		"DYN_EPP_MAX_NUM_BATCHED_TOKENS=100", "DYN_EPP_PREFILL_MAX_NUM_BATCHED_TOKENS=200");
	ok(r.roles == KVP_PODS_BY_LABEL && !strcmp(r.role_label, "a/b") &&
			r.capacity[KVP_PART_PREFILL].max_num_batched_tokens == 200 &&
			r.capacity[KVP_PART_DECODE].max_num_batched_tokens == 100 && !r.has_decode_events,
		"roles by label, capacities by role");
	ok(r.words == KVP_PODS_DYN, "by dyn's words");
	r = RULES("DYN_EPP_TOPOLOGY_MODE=disaggregated", "KVPICK_EPP_ROLE_VOCABULARY=llmd");
	ok(r.words == KVP_PODS_LLMD && !strcmp(r.role_label, "llm-d.ai/role"),
		"or by llm-d's, with its label");
	r = RULES("DYN_EPP_PREFILL_INFERENCE_POOL_NAME=q", "DYN_ROUTER_CONDITIONAL_DISAGG=true",
		"KVPICK_EPP_KV_TRANSFER_DOMAIN_LABEL=d", "KVPICK_EPP_KV_TRANSFER_ENFORCEMENT=preferred",
		"KVPICK_EPP_TAINT_LABELS=x,y");
	ok(r.roles == KVP_PODS_BY_POOL && r.has_decode_events && !strcmp(r.domain_label, "d") &&
			!strcmp(r.enforcement, "preferred") && !strcmp(r.taint_labels, "x,y"),
		"two pools");
}

int main(void)
{
	json = kvp_json_new();
	other = kvp_json_new();
	kvp_jw_init(&body);
	pools();
	eligibility();
	ids();
	mapping();
	roles();
	role_rules();
	ports();
	slices();
	settings();
	kvp_jw_free(&body);
	kvp_json_free(json);
	kvp_json_free(other);
	return done();
}
