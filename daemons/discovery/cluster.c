#include "daemons/discovery/cluster_priv.h"

#include "daemons/common/log.h"
#include <kvpick/clock.h>
#include <kvpick/hash.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#define LOG_EVERY_NS 5000000000ull

/* ---- rules ---- */

static uint64_t or_none(uint64_t v)
{
	return v == KVP_CONFIG_UNSET ? UINT64_MAX : v;
}

void kvp_cluster_rules(const struct kvp_config *cfg, struct kvp_pod_rules *out)
{
	static const char *const enforcement[] = {NULL, "required", "preferred"};
	*out = (struct kvp_pod_rules){
		.roles = !cfg->eff.disaggregated     ? KVP_PODS_AGGREGATED
			 : cfg->prefill_pool_name[0] ? KVP_PODS_BY_POOL
						     : KVP_PODS_BY_LABEL,
		.model = cfg->model_name,
		.words = cfg->role_vocabulary == KVP_ROLES_LLMD ? KVP_PODS_LLMD : KVP_PODS_DYN,
		.role_label = cfg->worker_role_label,
		.block_size = (uint32_t)cfg->kv_cache_block_size,
		.event_port = (uint32_t)cfg->epp_kv_event_port,
		.replay_port = cfg->epp_kv_event_replay_port == KVP_CONFIG_UNSET
				       ? 0
				       : (uint32_t)cfg->epp_kv_event_replay_port,
		.stride = (uint32_t)cfg->epp_kv_event_port_stride,
		.rank_cnt = (uint32_t)cfg->epp_data_parallel_size,
		.ranks_by_port = cfg->epp_dp_routing == KVP_DP_PORT,
		.has_events = cfg->use_kv_events,
		.has_decode_events = cfg->conditional_disagg,
		.is_eagle = cfg->epp_is_eagle,
		.total_kv_blocks = or_none(cfg->epp_total_kv_blocks),
		.capacity = {{or_none(cfg->epp_max_num_batched_tokens)},
			{or_none(cfg->eff.prefill_max_num_batched_tokens)},
			{or_none(cfg->eff.decode_max_num_batched_tokens)}},
		.taint_labels = cfg->epp_taint_labels,
		.domain_label = cfg->epp_kv_transfer_domain_label,
		.enforcement = (uint32_t)cfg->epp_kv_transfer_enforcement < 3
				       ? enforcement[cfg->epp_kv_transfer_enforcement]
				       : NULL,
	};
}

/* ---- pictures ---- */

static int is_known(const struct kvp_cluster *c)
{
	for (uint32_t i = 0; i < c->pool_cnt; i++)
		if (!kvp_kube_is_synced(c->pool[i].ref))
			return 0;
	return kvp_kube_is_synced(c->pods);
}

static int is_valid(const struct kvp_cluster *c)
{
	for (uint32_t i = 0; i < c->pool_cnt; i++)
		if (!kvp_kube_is_synced(c->pool[i].ref) || c->pool[i].pool.why)
			return 0;
	return 1;
}

static void shut(struct kvp_cluster *c)
{
	struct kvp_gates *g = &c->cfg.boot->region->gates;
	if (kvp_gate_is_open(g, KVP_GATE_WORKERS))
		KVP_LOG_W("discovery.not_ready", "reason=%s", "a pool is gone or invalid");
	kvp_gate_shut(g, KVP_GATE_WORKERS);
}

/* What an engine has told goes before what nobody has set; the block size is its own in any case, because
 * blocks of another size never match. */
static void take_answer(struct kvp_pod_rules *r, const struct kvp_probe_answer *a)
{
	if (a->block_size && a->block_size <= UINT32_MAX)
		r->block_size = (uint32_t)a->block_size;
	if (a->kv_blocks && r->total_kv_blocks == UINT64_MAX)
		r->total_kv_blocks = a->kv_blocks;
}

/* worker_of makes a pod's worker in c->body. told: the rules, with what its engine has said. */
static enum kvp_pod_why worker_of(struct kvp_cluster *c, const char *name, struct kvp_kube_bytes pod,
	struct kvp_pod_rules *told, struct kvp_pod_worker *w)
{
	const struct kvp_ipool *prefill = c->pool_cnt > 1 ? &c->pool[1].pool : NULL;
	*told = c->rules;
	enum kvp_pod_why why = kvp_pod_worker_of(told, &c->pool[0].pool, prefill, name, pod, &c->body, w);
	if (!c->probes)
		return why;
	if (why != KVP_POD_IS_WORKER) {
		kvp_probe_drop(c->probes, name);
		return why;
	}
	const struct kvp_probe_answer *a = kvp_probe_get(c->probes, name, w->ip, w->port);
	if (!a)
		return why; /* registered as the settings say, until it is known better */
	take_answer(told, a);
	return kvp_pod_worker_of(told, &c->pool[0].pool, prefill, name, pod, &c->body, w);
}

static void say_excluded(enum kvp_pod_why why, const char *name, const struct kvp_pod_worker *w)
{
	static struct kvp_log_limit limit;
	uint64_t left = 0;
	if (why < KVP_POD_PORT_OFF || !kvp_log_limit_pass(&limit, kvp_clock_mono_ns(), LOG_EVERY_NS, &left))
		return;
	KVP_LOG_W("discovery.pod_excluded", "pod=%s reason=%s role=%s suppressed=%llu", name,
		kvp_pod_why_name(why), w->why_text, (unsigned long long)left);
}

/* A worker and whose it is; the texts are the reflector's. */
struct candidate {
	struct kvp_catalog_want want;
	const char *name, *created;
};

struct picture {
	struct kvp_cluster *c;
	struct candidate *of;
	struct kvp_catalog_want *want; /* those that stay */
	uint32_t cnt, cap, want_cnt;
	int rc;
};

static uint64_t owner_of(const char *name)
{
	return kvp_hash_bytes(name, strlen(name), 1);
}

/* add_worker adds what is in the body. */
static void add_worker(struct picture *p, const char *name, const struct kvp_pod_worker *w)
{
	char *json = malloc(p->c->body.len + 1);
	if (!json || kvp_jw_done(&p->c->body) || p->cnt == p->cap) {
		free(json);
		p->rc = KVP_ERR_SYS;
		return;
	}
	memcpy(json, p->c->body.buf, p->c->body.len);
	p->of[p->cnt++] = (struct candidate){
		{w->id, json, (uint32_t)p->c->body.len, w->role, owner_of(name)}, name, w->created};
}

static int by_seniority(const void *x, const void *y)
{
	const struct candidate *a = x, *b = y;
	if (a->want.worker_id != b->want.worker_id)
		return a->want.worker_id < b->want.worker_id ? -1 : 1;
	int by_age = strcmp(a->created, b->created);
	int by_name = by_age ? by_age : strcmp(a->name, b->name);
	return by_name ? by_name : (a->want.role > b->want.role) - (a->want.role < b->want.role);
}

static void leave_out(struct kvp_cluster *c, const struct candidate *of, enum kvp_ctr id, const char *why)
{
	static struct kvp_log_limit limit;
	uint64_t left = 0;
	c->left_out++;
	kvp_ctr_add(c->cfg.boot->ctr, id, 1);
	if (kvp_log_limit_pass(&limit, kvp_clock_mono_ns(), LOG_EVERY_NS, &left))
		KVP_LOG_E("discovery.pod_left_out", "pod=%s worker=%llu reason=%s suppressed=%llu", of->name,
			(unsigned long long)of->want.worker_id, why, (unsigned long long)left);
}

/* judge leaves out what would spoil the whole picture. Of two pods whose names have the same id the older one
 * stays, in every replica: who may create pods can't push one out. */
static void judge(struct picture *p)
{
	uint64_t taken = 0;
	qsort(p->of, p->cnt, sizeof(*p->of), by_seniority);
	p->c->left_out = 0;
	for (uint32_t i = 0; i < p->cnt; i++) {
		const struct candidate *of = &p->of[i];
		if (of->want.len > KVP_CMD_PAYLOAD_MAX) {
			leave_out(p->c, of, KVP_CTR_DISC_TOO_LONG, "record_too_long");
		} else if (p->want_cnt && taken == of->want.worker_id) {
			leave_out(p->c, of, KVP_CTR_DISC_TWICE, "id_taken");
		} else {
			p->want[p->want_cnt++] = of->want;
			taken = of->want.worker_id;
		}
	}
}

static void add_pod(void *ctx, const char *name, struct kvp_kube_bytes pod)
{
	struct picture *p = ctx;
	struct kvp_pod_rules told;
	struct kvp_pod_worker w;
	enum kvp_pod_why why = worker_of(p->c, name, pod, &told, &w);
	p->c->why[why]++;
	if (why != KVP_POD_IS_WORKER) {
		say_excluded(why, name, &w);
		return;
	}
	add_worker(p, name, &w);
	if (w.has_twin &&
		kvp_pod_twin_of(&told, &p->c->pool[0].pool, name, pod, &p->c->body, &w) == KVP_POD_IS_WORKER)
		add_worker(p, name, &w);
}

/* Everything anew, from lists that are complete. */
static void make_picture(struct kvp_cluster *c)
{
	uint32_t each = c->rules.words == KVP_PODS_LLMD ? 2 : 1; /* workers of a pod */
	struct picture p = {.c = c, .cap = each * kvp_kube_count(c->pods)};
	uint64_t twice = 0;
	c->is_picture_due = 0;
	if (!is_known(c))
		return;
	if (!is_valid(c)) {
		shut(c);
		kvp_catalog_set(c->cfg.catalog, NULL, 0, &twice);
		return;
	}
	memset(c->why, 0, sizeof(c->why));
	p.of = calloc((size_t)p.cap + 1, sizeof(*p.of));
	p.want = calloc((size_t)p.cap + 1, sizeof(*p.want));
	if (p.of && p.want)
		kvp_kube_each(c->pods, add_pod, &p);
	int rc = p.of && p.want ? p.rc : KVP_ERR_SYS;
	if (!rc)
		judge(&p);
	rc = rc ? rc : kvp_catalog_set(c->cfg.catalog, p.want, p.want_cnt, &twice);
	if (rc) {
		kvp_ctr_add(c->cfg.boot->ctr, KVP_CTR_DISC_PICTURE_BAD, 1);
		KVP_LOG_E("discovery.picture", "error=%s worker=%llu effect=%s", kvp_strerror(rc),
			(unsigned long long)twice, "the picture of before stays");
		c->is_picture_due = rc == KVP_ERR_SYS;
	}
	for (uint32_t i = 0; i < p.cnt; i++)
		free((char *)(uintptr_t)p.of[i].want.json);
	free(p.of);
	free(p.want);
}

/* ---- pods ---- */

static int digest_pod(void *ctx, int which, struct kvp_json_val obj, struct kvp_kube_buf *out)
{
	(void)ctx;
	(void)which;
	return kvp_pod_digest(obj, out);
}

/* put_worker makes what is in the body the worker that is wanted; returns its id. What can't be (the id is
 * another pod's, the body is too long) is judged with everything else in view. */
static uint64_t put_worker(struct kvp_cluster *c, const char *name, const struct kvp_pod_worker *w)
{
	struct kvp_catalog_want want = {
		w->id, c->body.buf, (uint32_t)c->body.len, w->role, owner_of(name)};
	if (kvp_jw_done(&c->body) || kvp_catalog_put(c->cfg.catalog, &want))
		c->is_picture_due = 1;
	return w->id;
}

/* drop_others drops the workers that a pod may have been in another role. */
static void drop_others(struct kvp_cluster *c, const char *name, const uint64_t *id, uint32_t cnt)
{
	static const enum kvp_part_role role[] = {KVP_PART_PREFILL, KVP_PART_DECODE};
	for (int i = 0; i < 2; i++) {
		uint64_t old = kvp_pod_role_id(&c->rules, name, role[i]);
		if ((cnt < 1 || old != id[0]) && (cnt < 2 || old != id[1]))
			kvp_catalog_drop(c->cfg.catalog, old, owner_of(name));
	}
}

/* In the middle of a list nothing is done: its end makes a picture. */
static void update_pod(struct kvp_cluster *c, const char *name, struct kvp_kube_bytes is)
{
	struct kvp_pod_rules told;
	struct kvp_pod_worker w = {.why_text = ""};
	uint64_t id[2] = {0, 0};
	uint32_t cnt = 0;
	if (c->probes && !is.p)
		kvp_probe_drop(c->probes, name);
	c->is_picture_due |= c->left_out != 0;
	if (kvp_kube_is_listing(c->pods) || c->is_picture_due || !is_known(c) || !is_valid(c))
		return;
	enum kvp_pod_why why = is.p ? worker_of(c, name, is, &told, &w) : KVP_POD_NOT_READY;
	if (why == KVP_POD_IS_WORKER)
		id[cnt++] = put_worker(c, name, &w);
	else
		say_excluded(why, name, &w);
	if (cnt && w.has_twin &&
		kvp_pod_twin_of(&told, &c->pool[0].pool, name, is, &c->body, &w) == KVP_POD_IS_WORKER)
		id[cnt++] = put_worker(c, name, &w);
	drop_others(c, name, id, cnt);
}

/* One pod came, changed or went. */
static void on_pod(void *ctx, const char *name, struct kvp_kube_bytes was, struct kvp_kube_bytes is)
{
	(void)was;
	update_pod(ctx, name, is);
}

/* An engine has told what it is. */
static void on_answer(void *ctx, const char *name, const struct kvp_probe_answer *a)
{
	struct kvp_cluster *c = ctx;
	int other_size = a->block_size && a->block_size != c->rules.block_size;
	KVP_LOG_D("discovery.engine", "pod=%s block_size=%llu kv_blocks=%llu model=%d", name,
		(unsigned long long)a->block_size, (unsigned long long)a->kv_blocks, (int)a->model);
	if (other_size || a->model == KVP_PROBE_MODEL_OTHER) {
		static struct kvp_log_limit limit;
		uint64_t left = 0;
		kvp_ctr_add(c->cfg.boot->ctr, KVP_CTR_PROBE_OTHER, 1);
		if (kvp_log_limit_pass(&limit, kvp_clock_mono_ns(), LOG_EVERY_NS, &left))
			KVP_LOG_W("discovery.engine",
				"pod=%s block_size=%llu DYN_KV_CACHE_BLOCK_SIZE=%u DYN_MODEL_NAME=%s "
				"reason=%s "
				"suppressed=%llu",
				name, (unsigned long long)a->block_size, c->rules.block_size, c->rules.model,
				other_size ? "the engine has another block size"
					   : "the engine serves other models",
				(unsigned long long)left);
	}
	struct kvp_kube_bytes is = kvp_kube_find(c->pods, name);
	if (is.p)
		update_pod(c, name, is);
}

static void on_pods_synced(void *ctx)
{
	make_picture(ctx);
}

/* ---- pools ---- */

static int digest_pool(void *ctx, int which, struct kvp_json_val obj, struct kvp_kube_buf *out)
{
	(void)ctx;
	return kvp_ipool_digest(which ? KVP_IPOOL_OLD : KVP_IPOOL_V1, obj, out);
}

static void read_pool(struct cluster_pool *p)
{
	kvp_ipool_read(kvp_kube_find(p->ref, p->name), &p->pool);
	int valid = p->pool.why ? -1 : 1;
	if (valid == p->said_valid)
		return;
	p->said_valid = valid;
	if (p->pool.why)
		KVP_LOG_W("discovery.pool", "pool=%s valid=0 reason=%s", p->name, p->pool.why);
	else
		KVP_LOG_I("discovery.pool", "pool=%s valid=1 port=%u ports=%u labels=%u", p->name,
			p->pool.port[0], p->pool.port_cnt, p->pool.label_cnt);
}

/* A pool that is invalid now counts at once; a valid one waits for the end of a list of pods under way. */
static void pool_changed(struct cluster_pool *p)
{
	struct kvp_cluster *c = p->c;
	read_pool(p);
	if (p->pool.why)
		shut(c);
	if (p->pool.why || !kvp_kube_is_listing(c->pods))
		make_picture(c);
}

static void on_pool(void *ctx, const char *name, struct kvp_kube_bytes was, struct kvp_kube_bytes is)
{
	struct cluster_pool *p = ctx;
	(void)was;
	(void)is;
	/* Of the list of before there is only the one that is asked for. */
	if (strcmp(name, p->name) == 0 && kvp_kube_is_synced(p->ref))
		pool_changed(p);
}

static void on_pool_synced(void *ctx)
{
	struct cluster_pool *p = ctx;
	pool_changed(p);
}

/* ---- opening ---- */

static void on_trouble(void *ctx, enum kvp_kube_trouble t, const char *path, const char *text)
{
	static struct kvp_log_limit limit[KVP_KUBE_TROUBLE_CNT];
	struct kvp_cluster *c = ctx;
	uint64_t left = 0;
	(void)c;
	if (!kvp_log_limit_pass(&limit[t], kvp_clock_mono_ns(), LOG_EVERY_NS, &left))
		return;
	const char *hint = t == KVP_KUBE_FORBIDDEN
				   ? "the role of the service account lacks get, list or watch for it"
			   : t == KVP_KUBE_DENIED ? "the token or certificate is not accepted"
			   : t == KVP_KUBE_ABSENT ? "is the InferencePool CRD installed?"
						  : "it is tried again; what is known stays";
	KVP_LOG_W("discovery.api", "trouble=%s path=%s reason=%s hint=%s suppressed=%llu",
		kvp_kube_trouble_name(t), path, text, hint, (unsigned long long)left);
}

/* Names go into addresses as they are: nothing but what names of objects are made of. */
static int check_name(enum kvp_config_id setting, const char *name)
{
	if (strspn(name, "abcdefghijklmnopqrstuvwxyz0123456789.-") == strlen(name) && name[0] != '.')
		return KVP_OK;
	KVP_LOG_E("discovery.settings", "setting=%s value=%s reason=%s", kvp_config_name(setting), name,
		"not the name of an object of Kubernetes");
	return KVP_ERR_INVAL;
}

static int check_names(const struct kvp_config *cfg)
{
	int rc = check_name(KVP_CFG_pod_namespace, cfg->pod_namespace);
	rc = rc ? rc : check_name(KVP_CFG_pool_name, cfg->pool_name);
	rc = rc ? rc : check_name(KVP_CFG_prefill_pool_name, cfg->prefill_pool_name);
	return rc ? rc : check_name(KVP_CFG_epp_peer_service, cfg->epp_peer_service);
}

static int open_pool(struct kvp_cluster *c, const char *name)
{
	char path[2][CLUSTER_NAME_MAX], query[CLUSTER_NAME_MAX];
	struct cluster_pool *p = &c->pool[c->pool_cnt];
	const char *ns = c->config->pod_namespace;
	p->c = c;
	p->name = name;
	kvp_ipool_read((struct kvp_kube_bytes){NULL, 0}, &p->pool);
	snprintf(path[0], sizeof(path[0]),
		"/apis/inference.networking.k8s.io/v1/namespaces/%s/inferencepools", ns);
	snprintf(path[1], sizeof(path[1]),
		"/apis/inference.networking.x-k8s.io/v1alpha2/namespaces/%s/inferencepools", ns);
	snprintf(query, sizeof(query), "fieldSelector=metadata.name%%3D%s", name);
	struct kvp_kube_reflector_cfg rc = {.path = {path[0], path[1]},
		.query = query,
		.digest = digest_pool,
		.on_change = on_pool,
		.on_synced = on_pool_synced,
		.ctx = p};
	int rc_open = kvp_kube_reflect(c->kube, &rc, &p->ref);
	c->pool_cnt += !rc_open;
	return rc_open;
}

static int open_pods(struct kvp_cluster *c)
{
	char path[CLUSTER_NAME_MAX];
	snprintf(path, sizeof(path), "/api/v1/namespaces/%s/pods", c->config->pod_namespace);
	struct kvp_kube_reflector_cfg rc = {.path = {path, NULL},
		.digest = digest_pod,
		.on_change = on_pod,
		.on_synced = on_pods_synced,
		.ctx = c};
	return kvp_kube_reflect(c->kube, &rc, &c->pods);
}

static int open_kube(struct kvp_cluster *c)
{
	const struct kvp_config *cfg = c->config;
	char why[512] = "";
	uint64_t seed = 0;
	struct kvp_kube_where where = {.url = cfg->kube_api_url,
		.host = cfg->kubernetes_service_host,
		.port = cfg->kubernetes_service_port == KVP_CONFIG_UNSET
				? 0
				: (uint32_t)cfg->kubernetes_service_port,
		.kubeconfig = cfg->kubeconfig};
	if (kvp_kube_access_find(&where, &c->access, why, sizeof(why))) {
		KVP_LOG_E("discovery.access", "reason=%s", why);
		return KVP_ERR_INVAL;
	}
	if (getrandom(&seed, sizeof(seed), 0) != (ssize_t)sizeof(seed))
		seed = kvp_clock_mono_ns();
	struct kvp_kube_cfg kc = {.access = &c->access, .seed = seed, .on_trouble = on_trouble, .ctx = c};
	KVP_LOG_I("discovery.api", "server=%s namespace=%s pool=%s prefill_pool=%s peer_service=%s",
		c->access.base, cfg->pod_namespace, cfg->pool_name, cfg->prefill_pool_name,
		cfg->epp_peer_service);
	return kvp_kube_open(c->cfg.loop, &kc, &c->kube);
}

int kvp_cluster_open(const struct kvp_cluster_cfg *cfg, struct kvp_cluster **out)
{
	struct kvp_cluster *c = calloc(1, sizeof(*c));
	if (!c)
		return KVP_ERR_SYS;
	c->cfg = *cfg;
	c->config = cfg->boot->config;
	kvp_jw_init(&c->body);
	kvp_cluster_rules(c->config, &c->rules);
	struct kvp_probe_cfg pc = {
		.loop = cfg->loop, .model = c->config->model_name, .on_answer = on_answer, .ctx = c};
	int rc = c->config->epp_probe_engines ? kvp_probes_open(&pc, &c->probes) : KVP_OK;
	rc = rc ? rc : check_names(c->config);
	rc = rc ? rc : open_kube(c);
	rc = rc ? rc : open_pods(c);
	rc = rc ? rc : open_pool(c, c->config->pool_name);
	if (!rc && c->config->prefill_pool_name[0])
		rc = open_pool(c, c->config->prefill_pool_name);
	if (!rc && c->config->epp_peer_service[0])
		rc = cluster_peers_open(c);
	if (rc) {
		kvp_cluster_close(c);
		return rc;
	}
	*out = c;
	return KVP_OK;
}

void kvp_cluster_close(struct kvp_cluster *c)
{
	if (!c)
		return;
	cluster_peers_close(c);
	kvp_probes_close(c->probes);
	kvp_kube_reflector_close(c->pods);
	for (uint32_t i = 0; i < c->pool_cnt; i++)
		kvp_kube_reflector_close(c->pool[i].ref);
	kvp_kube_close(c->kube);
	kvp_kube_access_free(&c->access);
	kvp_jw_free(&c->body);
	free(c);
}

/* ---- beats ---- */

static void count(struct kvp_cluster *c)
{
	struct kvp_ctr_column_shm *ctr = c->cfg.boot->ctr;
	const struct kvp_kube_stat *now = kvp_kube_stat(c->kube);
	struct kvp_kube_stat *was = &c->seen;
	uint32_t watching = (uint32_t)kvp_kube_is_watching(c->pods), valid = 0;
	for (uint32_t i = 0; i < c->pool_cnt; i++) {
		watching += (uint32_t)kvp_kube_is_watching(c->pool[i].ref);
		valid += kvp_kube_is_synced(c->pool[i].ref) && !c->pool[i].pool.why;
	}
	kvp_ctr_set(ctr, KVP_CTR_KUBE_WATCHING, watching);
	kvp_ctr_set(ctr, KVP_CTR_KUBE_POOLS, valid);
	kvp_ctr_set(ctr, KVP_CTR_KUBE_PODS, kvp_kube_count(c->pods));
	kvp_ctr_add(ctr, KVP_CTR_KUBE_REQUESTS, now->requests - was->requests);
	kvp_ctr_add(ctr, KVP_CTR_KUBE_BYTES, now->bytes - was->bytes);
	kvp_ctr_add(ctr, KVP_CTR_KUBE_LISTS, now->lists - was->lists);
	kvp_ctr_add(ctr, KVP_CTR_KUBE_EVENTS, now->events - was->events);
	kvp_ctr_add(ctr, KVP_CTR_KUBE_GONE, now->gone - was->gone);
	kvp_ctr_add(ctr, KVP_CTR_KUBE_LATE, now->late + now->repeated - was->late - was->repeated);
	kvp_ctr_add(ctr, KVP_CTR_KUBE_SKIPPED, now->skipped - was->skipped);
	kvp_ctr_add(ctr, KVP_CTR_KUBE_FORBIDDEN,
		now->trouble[KVP_KUBE_FORBIDDEN] + now->trouble[KVP_KUBE_DENIED] -
			was->trouble[KVP_KUBE_FORBIDDEN] - was->trouble[KVP_KUBE_DENIED]);
	for (int t = 0; t < KVP_KUBE_TROUBLE_CNT; t++)
		kvp_ctr_add(ctr, KVP_CTR_KUBE_TROUBLE, now->trouble[t] - was->trouble[t]);
	*was = *now;
}

static void compare(struct kvp_cluster *c, uint64_t now_ns)
{
	const struct kvp_cat *cat = &c->cfg.boot->region->cat;
	uint64_t version = kvp_cat_version(cat);
	if (now_ns < c->compare_ns)
		return;
	c->compare_ns = now_ns + CLUSTER_COMPARE_NS;
	struct kvp_catalog_stat st;
	kvp_catalog_stat(c->cfg.catalog, &st);
	/* Nothing was published since all was right: nothing to look at. */
	if (version == c->cat_version && st.schedulable == st.wanted)
		return;
	uint32_t n = kvp_catalog_compare(c->cfg.catalog);
	c->cat_version = version;
	if (!n)
		return;
	kvp_ctr_add(c->cfg.boot->ctr, KVP_CTR_DISC_STRAYED, n);
	KVP_LOG_W("discovery.strayed", "workers=%u effect=%s", n, "registered again");
}

void kvp_cluster_tend(struct kvp_cluster *c, uint64_t now_ns)
{
	struct kvp_gates *g = &c->cfg.boot->region->gates;
	if (c->is_picture_due && !kvp_kube_is_listing(c->pods))
		make_picture(c);
	if (is_known(c) && is_valid(c) && !kvp_gate_is_open(g, KVP_GATE_WORKERS) &&
		kvp_catalog_is_settled(c->cfg.catalog)) {
		struct kvp_catalog_stat st;
		kvp_catalog_stat(c->cfg.catalog, &st);
		kvp_gate_open(g, KVP_GATE_WORKERS);
		KVP_LOG_I("discovery.ready", "pods=%u workers=%u schedulable=%u", kvp_kube_count(c->pods),
			st.wanted, st.schedulable);
	}
	if (c->probes) {
		struct kvp_probe_stat st;
		kvp_probes_tend(c->probes, now_ns);
		kvp_probes_stat(c->probes, &st);
		kvp_ctr_add(c->cfg.boot->ctr, KVP_CTR_PROBE_ANSWERED, st.answered - c->probed.answered);
		kvp_ctr_add(c->cfg.boot->ctr, KVP_CTR_PROBE_FAILED, st.failed - c->probed.failed);
		c->probed = st;
	}
	compare(c, now_ns);
	count(c);
}
