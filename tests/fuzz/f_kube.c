/* Fuzz: any JSON as an object of Kubernetes, any bytes as what was kept of one. What is kept of a pod makes a
 * worker that is registered, or none. */
#define KVP_FUZZ_NAME "kube"
#include "daemons/discovery/objects.c"
#include "daemons/common/worker_record.h"
#include "tests/fuzz/replay.h"

#include <stdlib.h>

static const struct kvp_pod_rules rules = {.roles = KVP_PODS_BY_POOL,
	.model = "m",
	.role_label = "role",
	.block_size = 16,
	.event_port = 5557,
	.replay_port = 5560,
	.stride = 1,
	.rank_cnt = 1,
	.ranks_by_port = 1,
	.has_events = 1,
	.total_kv_blocks = UINT64_MAX,
	.capacity = {{UINT64_MAX}, {UINT64_MAX}, {UINT64_MAX}},
	.taint_labels = "zone,a",
	.domain_label = "a",
	.enforcement = "required"};

static struct kvp_json *json, *other;
static struct kvp_jw body;

static void on_address(void *ctx, const char *address, int is_source)
{
	(void)is_source;
	*(size_t *)ctx += strlen(address);
}

/* The worker of these bytes, with these bytes as pool, too. */
static void make_worker(struct kvp_kube_bytes pod, struct kvp_kube_bytes pool_bytes)
{
	struct kvp_ipool pool, prefill;
	struct kvp_pod_worker w;
	struct kvp_wrec rec;
	struct kvp_wrec_err why;
	kvp_ipool_read(pool_bytes, &pool);
	kvp_ipool_read((struct kvp_kube_bytes){"\0008000\0k\0v", 10}, &prefill);
	if (!pool.why && !pool.port_cnt)
		pool.port[pool.port_cnt++] = 8000;
	if (kvp_pod_worker_of(&rules, &pool, &prefill, "pod", pod, &body, &w) != KVP_POD_IS_WORKER)
		return;
	if (kvp_jw_done(&body) != KVP_OK)
		abort();
	/* A label may be longer than what is registered, nothing else is refused. */
	if (kvp_wrec_post(other, body.buf, body.len, &rec, &why) == KVP_OK)
		kvp_wrec_free(&rec);
	else if (why.status != 400)
		abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len)
{
	struct kvp_kube_buf kept = {.p = NULL};
	struct kvp_kube_bytes raw = {(const char *)data, len};
	struct kvp_json_val v;
	size_t sum = 0;
	json = json ? json : kvp_json_new();
	other = other ? other : kvp_json_new();
	make_worker(raw, raw);
	kvp_slice_each(raw, KVP_SLICE_V4, "10.0.0.1", on_address, &sum);
	if (kvp_json_parse(json, data, len, 64, &v, NULL) != KVP_OK)
		return 0;
	struct kvp_kube_bytes pool = {"\0008000,8001\0app\0x", 17};
	kvp_pod_digest(v, &kept);
	make_worker((struct kvp_kube_bytes){kept.p, kept.len}, pool);
	for (int form = KVP_IPOOL_V1; form <= KVP_IPOOL_OLD; form++) {
		struct kvp_ipool p;
		kept.len = 0;
		kvp_ipool_digest((enum kvp_ipool_form)form, v, &kept);
		kvp_ipool_read((struct kvp_kube_bytes){kept.p, kept.len}, &p);
		if (!p.why && (!p.port_cnt || !p.port[0] || !p.label_cnt))
			abort(); /* a pool that is used selects by something, and has a port */
	}
	kept.len = 0;
	kvp_slice_digest(v, &kept);
	kvp_slice_each((struct kvp_kube_bytes){kept.p, kept.len}, KVP_SLICE_V6, "fd00::1", on_address, &sum);
	free(kept.p);
	return 0;
}
