#include "daemons/common/config_priv.h"
#include "daemons/common/policy_file.h"

#include <kvpick/err.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define METRICS_PORT_EPP 9090
#define PREFILL_RESPONSE_BYTES 1048576
#define PREFILL_RESPONSE_BYTES_TRTLLM 33554432
#define HELD_BYTES 268435456
#define SGLANG_BYTES 33554432 /* of a body and of an answer, fixed */

static uint64_t first_set(uint64_t a, uint64_t b)
{
	return a != KVP_CONFIG_UNSET ? a : b;
}

/* Number of the policy a role uses: its own word, else the common one, else the base. Word 0 of the published
 * names is "default", which is policy 0. */
static int32_t policy_of(const struct kvp_config *c, int32_t role_word)
{
	int32_t w = role_word != KVP_CONFIG_NO_WORD ? role_word : c->policy_all;
	if (w == KVP_CONFIG_NO_WORD)
		return c->selection_policy;
	return w > 0 ? w - 1 : 0;
}

static void derive_ports(struct kvp_config *c)
{
	struct kvp_config_derived *e = &c->eff;
	e->api_port = e->selection_on ? (uint16_t)c->port : 0;
	if (c->metrics_port != KVP_CONFIG_UNSET)
		e->metrics_port = (uint16_t)c->metrics_port;
	else
		e->metrics_port = e->epp_on ? METRICS_PORT_EPP : 0;
	if (c->replica_sync_port != KVP_CONFIG_UNSET)
		e->sync_port = (uint16_t)c->replica_sync_port;
	else
		e->sync_port = c->epp_peer_service[0] ? (uint16_t)c->epp_replica_sync_port : 0;
	e->dump_port = c->dump_port != KVP_CONFIG_UNSET ? (uint16_t)c->dump_port : 0;
}

/* What one request at all of its limits holds: its body and an engine's copy, of which there are two on a
 * kept connection; then two copies of body and answer. With SGLang both engines have theirs. */
static uint64_t one_request_bytes(const struct kvp_config *c)
{
	int is_sgl = c->eff.sidecar_adapter == KVP_PD_SGLANG;
	uint64_t body = c->eff.sidecar_max_request_bytes, answer = c->eff.sidecar_max_answer_bytes;
	if (body > UINT64_MAX / 8 || answer > UINT64_MAX / 8)
		return UINT64_MAX;
	uint64_t before = (is_sgl ? 4 : 3) * body, after = 2 * body + (is_sgl ? 4 : 2) * answer;
	return before > after ? before : after;
}

static void derive_sidecar(struct kvp_config *c)
{
	struct kvp_config_derived *e = &c->eff;
	e->sidecar_adapter = c->sidecar_pd_adapter > 0 ? c->sidecar_pd_adapter : KVP_PD_NONE;
	/* Word 1 of the other published form is sglang. */
	if (c->sidecar_pd_adapter == KVP_CONFIG_NO_WORD && c->sidecar_pd_backend == 1)
		e->sidecar_adapter = KVP_PD_SGLANG;
	e->sidecar_max_request_bytes = c->sidecar_max_request_bytes;
	e->sidecar_max_answer_bytes = first_set(c->sidecar_max_prefill_response_bytes,
		e->sidecar_adapter == KVP_PD_TRTLLM ? PREFILL_RESPONSE_BYTES_TRTLLM : PREFILL_RESPONSE_BYTES);
	if (e->sidecar_adapter == KVP_PD_SGLANG)
		e->sidecar_max_request_bytes = e->sidecar_max_answer_bytes = SGLANG_BYTES;
	uint64_t need = one_request_bytes(c);
	e->sidecar_max_held_bytes =
		first_set(c->sidecar_max_held_bytes, need > HELD_BYTES ? need : HELD_BYTES);
}

void kvp_cfg_derive(struct kvp_config *c)
{
	struct kvp_config_derived *e = &c->eff;
	memset(e, 0, sizeof(*e));
	/* Word 0 of DYN_EPP_MODE is standalone. */
	int32_t mode = c->epp_mode == 0 ? KVP_MODE_EPP : KVP_MODE_SELECTION;
	e->mode = c->mode != KVP_CONFIG_NO_WORD ? c->mode : mode;
	e->selection_on = e->mode != KVP_MODE_EPP;
	e->epp_on = e->mode != KVP_MODE_SELECTION;
	derive_ports(c);
	e->peer_on = e->sync_port || e->dump_port || c->epp_peer_service[0] || c->indexer_peers[0];
	/* In mode both without pool and file the workers come over HTTP: nothing to discover. */
	e->discovery_on = c->workers_file[0] || (e->epp_on && (c->pool_name[0] || !e->selection_on));
	e->disaggregated = c->topology_mode == KVP_TOPOLOGY_DISAGGREGATED || c->prefill_pool_name[0];
	e->queueing_on = kvp_config_has(c->queue_threshold) || c->policy_config[0];
	e->threads = (uint32_t)c->threads;
	e->policy[0] = policy_of(c, KVP_CONFIG_NO_WORD);
	e->policy[1] = policy_of(c, c->policy_prefill);
	e->policy[2] = policy_of(c, c->policy_decode);
	e->overlap_score_credit = c->overlap_score_credit;
	e->prefill_load_scale = c->prefill_load_scale;
	if (kvp_config_has(c->overlap_score_weight)) {
		e->prefill_load_scale = c->overlap_score_weight;
		if (c->overlap_score_weight == 0)
			e->overlap_score_credit = 0;
	}
	e->prefill_busy_threshold =
		kvp_config_has(c->prefill_busy_threshold) ? c->prefill_busy_threshold : c->queue_threshold;
	e->prefill_max_num_batched_tokens =
		first_set(c->epp_prefill_max_num_batched_tokens, c->epp_max_num_batched_tokens);
	e->decode_max_num_batched_tokens =
		first_set(c->epp_decode_max_num_batched_tokens, c->epp_max_num_batched_tokens);
	e->log_level = c->log_level;
	if (c->role_vocabulary == KVP_ROLES_LLMD && c->source[KVP_CFG_worker_role_label] == KVP_FROM_DEFAULT)
		snprintf(c->worker_role_label, sizeof(c->worker_role_label), "llm-d.ai/role");
	derive_sidecar(c);
}

/* -- rules across settings -- */

struct listener {
	const char *name;
	unsigned port;
};

static void add_listener(struct listener *l, int *cnt, const char *name, uint64_t port)
{
	if (port)
		l[(*cnt)++] = (struct listener){name, (unsigned)port};
}

static void cross_listeners(const struct kvp_config *c, struct kvp_config_err *err)
{
	struct listener l[24];
	char member[KVP_CFG_VALUE_MAX];
	size_t pos = 0;
	int cnt = 0;
	add_listener(l, &cnt, "KVPICK_PORT", c->eff.api_port);
	add_listener(l, &cnt, "DYN_EPP_METRICS_PORT", c->eff.metrics_port);
	add_listener(l, &cnt, "DYN_EPP_SELECTION_HTTP_PORT", c->eff.dump_port);
	if (c->eff.sync_port) {
		int own = c->replica_sync_port != KVP_CONFIG_UNSET;
		add_listener(l, &cnt, own ? "KVPICK_REPLICA_SYNC_PORT" : "DYN_EPP_REPLICA_SYNC_PORT",
			c->eff.sync_port);
	}
	if (c->eff.sync_port && c->eff.epp_on && c->eff.disaggregated) {
		add_listener(l, &cnt, "KVPICK_REPLICA_SYNC_PORT_PREFILL", c->replica_sync_port_prefill);
		add_listener(l, &cnt, "KVPICK_REPLICA_SYNC_PORT_DECODE", c->replica_sync_port_decode);
	}
	if (c->eff.epp_on) {
		add_listener(l, &cnt, "KVPICK_EPP_HEALTH_PORT", c->epp_health_port);
		if (!c->epp_listen[0])
			add_listener(l, &cnt, "KVPICK_EPP_PORT", c->epp_port);
		/* Addresses of one list may share a port; it is compared with other listeners only. */
		unsigned last = 0;
		while (cnt < 20 && kvp_config_list_next(c->epp_listen, &pos, member, sizeof(member))) {
			const char *colon = strrchr(member, ':');
			unsigned port = member[0] == 'u' ? 0 : (unsigned)strtoul(colon + 1, NULL, 10);
			if (port != last)
				add_listener(l, &cnt, "KVPICK_EPP_LISTEN", port);
			last = port ? port : last;
		}
	}
	for (int i = 0; i < cnt; i++)
		for (int j = i + 1; j < cnt; j++)
			if (l[i].port == l[j].port && l[i].name != l[j].name)
				kvp_cfg_error(err, "%s and %s are both port %u; every listener needs its own",
					l[i].name, l[j].name, l[i].port);
}

static void cross_node(const struct kvp_config *c, struct kvp_config_err *err)
{
	if (c->slot_stuck_ms <= 2 * c->slot_beat_ms)
		kvp_cfg_error(err,
			"KVPICK_SLOT_STUCK_MS=%llu must be more than twice KVPICK_SLOT_BEAT_MS=%llu",
			(unsigned long long)c->slot_stuck_ms, (unsigned long long)c->slot_beat_ms);
	if (c->ring_unblock_ms <= c->slot_stuck_ms)
		kvp_cfg_error(err, "KVPICK_RING_UNBLOCK_MS=%llu must be more than KVPICK_SLOT_STUCK_MS=%llu",
			(unsigned long long)c->ring_unblock_ms, (unsigned long long)c->slot_stuck_ms);
	if (c->index_ranks > c->max_ranks)
		kvp_cfg_error(err, "KVPICK_INDEX_RANKS=%llu must not exceed KVPICK_MAX_RANKS=%llu",
			(unsigned long long)c->index_ranks, (unsigned long long)c->max_ranks);
	if (c->replica_sync_peers[0] && !c->eff.sync_port)
		kvp_cfg_error(err, "--replica-sync-peers requires --replica-sync-port "
				   "(KVPICK_REPLICA_SYNC_PEERS, KVPICK_REPLICA_SYNC_PORT)");
	if (c->epp_peer_service[0] && !c->pod_ip[0] && c->eff.discovery_on)
		kvp_cfg_error(err, "DYN_EPP_PEER_SERVICE requires POD_IP");
	if (c->epp_peer_service[0] && c->workers_file[0])
		kvp_cfg_error(err,
			"DYN_EPP_PEER_SERVICE is watched in Kubernetes, which KVPICK_WORKERS_FILE takes "
			"the place of; use KVPICK_REPLICA_SYNC_PEERS");
	else if (c->epp_peer_service[0] && !c->eff.discovery_on)
		kvp_cfg_error(err,
			"DYN_EPP_PEER_SERVICE is watched by the discovery of the Endpoint Picker, which "
			"needs KVPICK_MODE=epp, or both with DYN_EPP_INFERENCE_POOL_NAME; use "
			"KVPICK_REPLICA_SYNC_PEERS");
	if (!c->epp_tls_cert_file[0] != !c->epp_tls_key_file[0])
		kvp_cfg_error(err, "KVPICK_EPP_TLS_CERT_FILE and KVPICK_EPP_TLS_KEY_FILE: both or neither");
	if (c->epp_body_budget_bytes < c->epp_max_body_bytes)
		kvp_cfg_error(err,
			"KVPICK_EPP_BODY_BUDGET_BYTES=%llu must not be below "
			"KVPICK_EPP_MAX_BODY_BYTES=%llu",
			(unsigned long long)c->epp_body_budget_bytes,
			(unsigned long long)c->epp_max_body_bytes);
	cross_listeners(c, err);
}

/* The whole policy file is read, so that a node with a broken one does not start. */
static void cross_policy_file(const struct kvp_config *c, struct kvp_config_err *err)
{
	struct kvp_policy policy;
	struct kvp_policy_err why = {"out of memory"};
	if (!c->policy_config[0] || access(c->policy_config, R_OK) != 0)
		return; /* a file that can't be read is reported where the value is checked */
	struct kvp_policy_profile *single = malloc(sizeof(*single));
	if (single)
		kvp_policy_single(single, KVP_ORDER_FCFS, NAN);
	if (!single || kvp_policy_load(c->policy_config, single, &policy, &why) != KVP_OK)
		kvp_cfg_error(err, "DYN_ROUTER_POLICY_CONFIG=\"%.200s\": %s", c->policy_config, why.text);
	else
		kvp_policy_drop(&policy);
	free(single);
}

static void cross_conditional(const struct kvp_config *c, struct kvp_config_err *err)
{
	static const char name[] = "DYN_ROUTER_CONDITIONAL_DISAGG_POLICY";
	int32_t p = c->conditional_disagg_policy;
	if ((p == KVP_COND_PREFILL_LOAD || p == KVP_COND_ISL_OR_LOAD) &&
		!kvp_config_has(c->eff.prefill_busy_threshold))
		kvp_cfg_error(err,
			"%s by load requires DYN_ROUTER_CONDITIONAL_DISAGG_PREFILL_BUSY_THRESHOLD or "
			"DYN_ROUTER_QUEUE_THRESHOLD",
			name);
	if (p == KVP_COND_NON_CACHED_TOKENS && c->conditional_disagg_non_cached == KVP_CONFIG_UNSET)
		kvp_cfg_error(err, "%s=non_cached_tokens requires %s", name,
			kvp_config_name(KVP_CFG_conditional_disagg_non_cached));
	if (p == KVP_COND_MAX_LOCAL_PREFILL && c->conditional_disagg_local_max == KVP_CONFIG_UNSET)
		kvp_cfg_error(err, "%s=max_local_prefill_length requires %s", name,
			kvp_config_name(KVP_CFG_conditional_disagg_local_max));
}

static void cross_scheduling(const struct kvp_config *c, struct kvp_config_err *err)
{
	if (kvp_config_has(c->predicted_ttl_secs) && !c->use_kv_events)
		kvp_cfg_error(err, "DYN_ROUTER_PREDICTED_TTL_SECS requires DYN_ROUTER_USE_KV_EVENTS=true");
	if (c->approximate_cache_policy == KVP_APPROX_LRU && c->use_kv_events)
		kvp_cfg_error(err,
			"DYN_ROUTER_APPROXIMATE_CACHE_POLICY=lru requires DYN_ROUTER_USE_KV_EVENTS=false");
	cross_policy_file(c, err);
	if (c->track_output_blocks && !c->track_active_blocks)
		kvp_cfg_error(
			err, "DYN_ROUTER_TRACK_OUTPUT_BLOCKS requires DYN_ROUTER_TRACK_ACTIVE_BLOCKS=true");
	if (c->conditional_disagg)
		cross_conditional(c, err);
}

static void need(struct kvp_config_err *err, int given, const char *name, const char *when)
{
	if (!given)
		kvp_cfg_error(err, "%s is required %s", name, when);
}

static void cross_epp_capacity(const struct kvp_config *c, struct kvp_config_err *err)
{
	static const char *const why = "while DYN_ROUTER_QUEUE_THRESHOLD is set";
	/* Whether the classes of a policy file queue is known only to who reads it. */
	if (!kvp_config_has(c->queue_threshold) || c->policy_config[0] || !c->eff.discovery_on)
		return;
	if (!c->eff.disaggregated) {
		need(err, c->epp_max_num_batched_tokens != KVP_CONFIG_UNSET, "DYN_EPP_MAX_NUM_BATCHED_TOKENS",
			why);
		return;
	}
	need(err, c->eff.prefill_max_num_batched_tokens != KVP_CONFIG_UNSET,
		"DYN_EPP_MAX_NUM_BATCHED_TOKENS or DYN_EPP_PREFILL_MAX_NUM_BATCHED_TOKENS", why);
	need(err, c->eff.decode_max_num_batched_tokens != KVP_CONFIG_UNSET,
		"DYN_EPP_MAX_NUM_BATCHED_TOKENS or DYN_EPP_DECODE_MAX_NUM_BATCHED_TOKENS", why);
}

static void cross_epp_ranks(const struct kvp_config *c, struct kvp_config_err *err)
{
	uint64_t last = (c->epp_data_parallel_size - 1) * c->epp_kv_event_port_stride;
	if (c->epp_data_parallel_size > 1 && c->epp_dp_routing == KVP_DP_NONE)
		kvp_cfg_error(err, "KVPICK_EPP_DATA_PARALLEL_SIZE above 1 requires "
				   "KVPICK_EPP_DP_ROUTING=header or port");
	if (c->epp_kv_event_port + last > 65535)
		kvp_cfg_error(err,
			"DYN_EPP_KV_EVENT_PORT with KVPICK_EPP_DATA_PARALLEL_SIZE and "
			"KVPICK_EPP_KV_EVENT_PORT_STRIDE gives port %llu; legal: 1..65535",
			(unsigned long long)(c->epp_kv_event_port + last));
	if (c->epp_kv_event_replay_port != KVP_CONFIG_UNSET && c->epp_kv_event_replay_port + last > 65535)
		kvp_cfg_error(err,
			"DYN_EPP_KV_EVENT_REPLAY_PORT with KVPICK_EPP_DATA_PARALLEL_SIZE and "
			"KVPICK_EPP_KV_EVENT_PORT_STRIDE gives port %llu; legal: 1..65535",
			(unsigned long long)(c->epp_kv_event_replay_port + last));
}

static void cross_epp(const struct kvp_config *c, struct kvp_config_err *err)
{
	int kubernetes = !c->workers_file[0] && c->eff.discovery_on;
	need(err, c->model_name[0], "DYN_MODEL_NAME", "in EPP mode");
	need(err, c->tokenizer_protocol != KVP_CONFIG_NO_WORD, "DYN_EPP_TOKENIZER_PROTOCOL",
		"in EPP mode; legal: vllm-render, sglang-renderer, sglang-tokenize, text-blocks");
	if (c->tokenizer_protocol != KVP_CONFIG_NO_WORD && c->tokenizer_protocol != KVP_TOK_TEXT)
		need(err, c->tokenizer_url[0], "DYN_EPP_TOKENIZER_SERVICE_URL",
			"in EPP mode unless DYN_EPP_TOKENIZER_PROTOCOL=text-blocks");
	if (c->tokenizer_protocol == KVP_TOK_TEXT && c->use_kv_events)
		kvp_cfg_error(err, "DYN_EPP_TOKENIZER_PROTOCOL=text-blocks requires DYN_USE_KV_EVENTS=false: "
				   "engine events can't match such blocks");
	if (kubernetes) {
		need(err, c->pool_name[0], "DYN_EPP_INFERENCE_POOL_NAME",
			"in EPP mode unless KVPICK_WORKERS_FILE is set or KVPICK_MODE=both");
		need(err, c->pod_namespace[0], "POD_NAMESPACE", "with Kubernetes");
		need(err, c->kv_cache_block_size != KVP_CONFIG_UNSET, "DYN_KV_CACHE_BLOCK_SIZE",
			"with Kubernetes");
		if (c->epp_kv_transfer_enforcement && !c->epp_kv_transfer_domain_label[0])
			kvp_cfg_error(err,
				"KVPICK_EPP_KV_TRANSFER_ENFORCEMENT requires "
				"KVPICK_EPP_KV_TRANSFER_DOMAIN_LABEL with Kubernetes: no pod would have a "
				"domain");
		if (c->epp_kv_transfer_domain_label[0] && !c->epp_kv_transfer_enforcement)
			kvp_cfg_error(err, "KVPICK_EPP_KV_TRANSFER_DOMAIN_LABEL without effect: "
					   "KVPICK_EPP_KV_TRANSFER_ENFORCEMENT is off");
	}
	if (c->eff.disaggregated && !kvp_cfg_label_ok(c->worker_role_label))
		kvp_cfg_error(err,
			"DYN_EPP_WORKER_ROLE_LABEL=\"%.320s\": not a label key; legal: a Kubernetes label "
			"key",
			c->worker_role_label);
	cross_epp_capacity(c, err);
	cross_epp_ranks(c, err);
}

static void cross_held(const struct kvp_config *c, struct kvp_config_err *err)
{
	uint64_t need = one_request_bytes(c);
	int has_pd = c->eff.sidecar_adapter != KVP_PD_NONE || c->sidecar_profile;
	if (has_pd && c->eff.sidecar_max_held_bytes && c->eff.sidecar_max_held_bytes < need)
		kvp_cfg_error(err,
			"KVPICK_SIDECAR_MAX_HELD_BYTES=%llu is less than one request may need: %llu",
			(unsigned long long)c->eff.sidecar_max_held_bytes, (unsigned long long)need);
}

static void cross_sidecar(const struct kvp_config *c, struct kvp_config_err *err)
{
	struct listener l[3] = {{"DYN_SIDECAR_PORT", (unsigned)c->sidecar_port},
		{"DYN_DECODE_ENGINE_PORT", (unsigned)c->decode_engine_port},
		{"KVPICK_SIDECAR_METRICS_PORT", (unsigned)c->sidecar_metrics_port}};
	static const int pair[3][2] = {{0, 1}, {0, 2}, {1, 2}};
	for (int i = 0; i < 3; i++)
		if (l[pair[i][0]].port == l[pair[i][1]].port)
			kvp_cfg_error(err, "%s and %s are both port %u; every listener needs its own",
				l[pair[i][0]].name, l[pair[i][1]].name, l[pair[i][0]].port);
	int adapter = c->sidecar_pd_adapter, backend = c->sidecar_pd_backend;
	int both = adapter != KVP_CONFIG_NO_WORD && backend != KVP_CONFIG_NO_WORD;
	if (both && (backend == 1 ? adapter != KVP_PD_SGLANG : adapter != KVP_PD_NONE))
		kvp_cfg_error(
			err, "DYN_SIDECAR_PD_ADAPTER and DYN_SIDECAR_PD_BACKEND name different protocols");
	if (c->eff.sidecar_adapter == KVP_PD_VLLM_NIXL &&
		strcmp(c->vllm_nixl_protocol, kvp_cfg_row[KVP_CFG_vllm_nixl_protocol].sdef) != 0)
		kvp_cfg_error(err, "DYN_VLLM_NIXL_PROTOCOL_VERSION=\"%s\": not spoken here; legal: %s",
			c->vllm_nixl_protocol, kvp_cfg_row[KVP_CFG_vllm_nixl_protocol].sdef);
	if (c->eff.sidecar_adapter == KVP_PD_TRTLLM && c->epp_data_parallel_size > 1)
		kvp_cfg_error(err, "DYN_SIDECAR_PD_ADAPTER=trtllm requires KVPICK_EPP_DATA_PARALLEL_SIZE=1");
	cross_held(c, err);
}

void kvp_cfg_cross(const struct kvp_config *c, struct kvp_config_err *err)
{
	if (c->binary == KVP_BIN_SIDECAR) {
		cross_sidecar(c, err);
		return;
	}
	if (c->binary == KVP_BIN_CTL)
		return;
	/* Settings that a binary does not read have their defaults here, which break no rule. */
	cross_node(c, err);
	cross_scheduling(c, err);
	if (c->eff.epp_on && c->binary == KVP_BIN_SUPERVISOR)
		cross_epp(c, err);
}
