#include "daemons/extproc/extproc.h"
#include "daemons/common/log.h"

#include <errno.h>
#include <malloc.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/signalfd.h>
#include <unistd.h>

#define HEAP_BLOCK_BYTES (4 << 20)     /* a larger one is mapped on its own */
#define HEAP_SPARE_BYTES (64 << 20)    /* free memory at the end of the heap that stays */
#define TOUCH_BYTES (1u << 20)	       /* a beat */
#define TOUCH_FIRST_BYTES (256u << 20) /* before it serves */

static void on_wake(void *ctx, int fd)
{
	struct kvp_epp *x = ctx;
	(void)fd;
	kvp_slot_awake(x->boot.slots);
	kvp_epp_retry(x);
	kvp_epp_poll(x);
}

/* before_sleep: the turn of a waiting request must not be missed between the last look and the wait. */
static int before_sleep(void *ctx)
{
	struct kvp_epp *x = ctx;
	int more = kvp_lifecycle_tend(&x->boot.region->lifecycle);
	if (!x->parked && !x->queued_cnt)
		return more;
	kvp_slot_sleep(x->boot.slots);
	return more | kvp_epp_retry(x) | kvp_epp_poll(x);
}

static void on_signal(void *ctx, int fd)
{
	struct kvp_epp *x = ctx;
	struct signalfd_siginfo si;
	if (read(fd, &si, sizeof(si)) != (ssize_t)sizeof(si) || x->draining)
		return;
	x->draining = 1;
	kvp_boot_control(&x->boot, KVP_CTL_DRAIN);
	kvp_epp_server_drain(x);
}

static void on_beat(void *ctx, struct kvp_timer *t)
{
	struct kvp_epp *x = ctx;
	struct kvp_loop_stat st;
	uint64_t now_ns = kvp_loop_now_ns(x->loop);
	kvp_slot_beat(x->boot.slots, x->boot.slot, now_ns / 1000000);
	kvp_loop_stat_take(x->loop, &st);
	kvp_ctr_max(x->boot.ctr, KVP_CTR_LOOP_MAX_NS, st.turn_max_ns);
	kvp_epp_server_beat(x);
	kvp_epp_free_again(x);
	kvp_epp_renew(x);
	kvp_epp_poll(x);
	kvp_select_report(x->selection);
	kvp_radix_touch(&x->boot.region->radix, &x->touch, TOUCH_BYTES);
	kvp_timer_set(x->loop, t, now_ns + x->boot.config->slot_beat_ms * 1000000, on_beat, x);
}

static int open_signals(struct kvp_epp *x)
{
	sigset_t set;
	sigemptyset(&set);
	sigaddset(&set, SIGTERM);
	sigaddset(&set, SIGINT);
	/* Before any thread is made: they all inherit the mask. */
	sigprocmask(SIG_BLOCK, &set, NULL);
	x->signal_fd = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
	if (x->signal_fd < 0)
		return KVP_ERR_SYS;
	return kvp_loop_watch_fd(x->loop, &x->signals, x->signal_fd, on_signal, x);
}

/* say_unused names a threshold that is set for a policy that is not in use. */
static void say_unused(const struct kvp_config *cfg)
{
	const struct {
		enum kvp_config_id id;
		int32_t policy;
		uint64_t value;
	} row[] = {{KVP_CFG_conditional_disagg_non_cached, KVP_COND_NON_CACHED_TOKENS,
			   cfg->conditional_disagg_non_cached},
		{KVP_CFG_conditional_disagg_local_max, KVP_COND_MAX_LOCAL_PREFILL,
			cfg->conditional_disagg_local_max}};
	int is_on = cfg->eff.disaggregated && cfg->conditional_disagg;
	for (size_t i = 0; i < sizeof(row) / sizeof(row[0]); i++)
		if (row[i].value != KVP_CONFIG_UNSET &&
			(!is_on || cfg->conditional_disagg_policy != row[i].policy))
			KVP_LOG_W("extproc.topology", "setting=%s value=%llu effect=%s",
				kvp_config_name(row[i].id), (unsigned long long)row[i].value,
				is_on ? "none: another policy decides"
				      : "none: DYN_ROUTER_CONDITIONAL_DISAGG or the roles are off");
}

static int open_selection(struct kvp_epp *x)
{
	const struct kvp_config *cfg = x->boot.config;
	struct kvp_select_settings set;
	struct kvp_policy_err why;
	kvp_select_from_config(&set, cfg);
	set.owner_kind = KVP_BOOK_FOR_PROCESS;
	if (kvp_policy_from_config(&x->policy, cfg, &why)) {
		KVP_LOG_E("extproc.policy", "file=%s error=%s", cfg->policy_config, why.text);
		return KVP_ERR_INVAL;
	}
	set.policy = &x->policy;
	x->selection = kvp_select_open(x->boot.region, x->boot.owner, x->boot.ctr, &set);
	struct kvp_str model = {cfg->model_name, strlen(cfg->model_name)};
	struct kvp_str group = {KVP_EPP_GROUP, strlen(KVP_EPP_GROUP)};
	kvp_pool_open(&x->pool[KVP_PLAN_MAIN], &x->boot.region->cat,
		cfg->eff.disaggregated ? KVP_PART_DECODE : KVP_PART_AGGREGATED, model, group);
	if (cfg->eff.disaggregated)
		kvp_pool_open(
			&x->pool[KVP_PLAN_PREFILL], &x->boot.region->cat, KVP_PART_PREFILL, model, group);
	x->by_domain = (enum kvp_domain)cfg->epp_kv_transfer_enforcement;
	if (cfg->eff.disaggregated && x->by_domain != KVP_DOMAIN_OFF)
		for (int i = 0; i < KVP_PLAN_LEGS; i++)
			if (kvp_pool_read_domains(&x->pool[i]))
				return KVP_ERR_SYS;
	kvp_cond_from_config(cfg, &x->cond);
	say_unused(cfg);
	if (cfg->eff.disaggregated && kvp_config_has(cfg->predicted_ttl_secs))
		KVP_LOG_W("extproc.topology", "DYN_ROUTER_PREDICTED_TTL_SECS=%g effect=%s",
			cfg->predicted_ttl_secs,
			cfg->conditional_disagg ? "none for decode workers: what they hold their events tell"
						: "none for decode workers: they are chosen by load alone");
	x->ports[KVP_PLAN_PREFILL] =
		cfg->epp_dp_routing == KVP_DP_PORT ? KVP_POOL_RANK_PORTS : KVP_POOL_ONE_PORT;
	x->ports[KVP_PLAN_MAIN] = cfg->eff.disaggregated ? KVP_POOL_ONE_PORT : x->ports[KVP_PLAN_PREFILL];
	x->stream_cfg = (struct kvp_stream_cfg){.body_max = cfg->epp_max_body_bytes,
		.assumed_mode =
			cfg->epp_assume_body_mode ? KVP_EXTPROC_BODY_BUFFERED : KVP_EXTPROC_BODY_FULL_DUPLEX,
		.response_none = cfg->epp_response_body_none,
		.strips_dp_rank = cfg->epp_dp_routing != KVP_DP_NONE,
		.retry_after_s = cfg->epp_shed_retry_after_secs};
	return x->selection ? KVP_OK : KVP_ERR_SYS;
}

static int open_tokenizer(struct kvp_epp *x)
{
	const struct kvp_config *cfg = x->boot.config;
	char err[256] = "";
	struct kvp_ask_cfg a = {.model = cfg->model_name,
		.metadata_prefix = cfg->metadata_header,
		.tokenizer = cfg->tokenizer_protocol,
		.pair_paths = cfg->epp_disagg_paths};
	int rc = kvp_ask_open(&x->parser, &a);
	if (rc || cfg->tokenizer_protocol == KVP_TOK_TEXT || cfg->tokenizer_protocol == KVP_CONFIG_NO_WORD)
		return rc;
	struct kvp_tkz_cfg t = {.protocol = (enum kvp_config_tokenizer)cfg->tokenizer_protocol,
		.url = cfg->tokenizer_url,
		.ca_file = cfg->tokenizer_ca_file,
		.token_file = cfg->tokenizer_token_file,
		.model = cfg->model_name,
		.timeout_ns = cfg->tokenization_timeout_ms * 1000000,
		.response_max_bytes = cfg->tokenizer_max_response_bytes,
		.ctr = x->boot.ctr};
	rc = kvp_tkz_open(x->loop, &t, &x->tkz, err, sizeof(err));
	if (rc)
		KVP_LOG_E("extproc.tokenizer", "reason=%s", err);
	return rc;
}

static int open_all(struct kvp_epp *x)
{
	int rc = kvp_loop_open(&x->loop, 0);
	rc = rc ? rc : open_signals(x);
	rc = rc ? rc : open_selection(x);
	rc = rc ? rc : open_tokenizer(x);
	x->usage_json = kvp_json_new();
	rc = rc || x->usage_json ? rc : KVP_ERR_SYS;
	rc = rc ? rc : kvp_loop_watch_fd(x->loop, &x->wake, x->boot.wake_fd, on_wake, x);
	if (rc)
		return rc;
	kvp_loop_before_sleep(x->loop, before_sleep, x);
	x->boot.region->lifecycle.wake = KVP_LIFECYCLE_WAKE_LATER;
	kvp_radix_touch(&x->boot.region->radix, &x->touch, TOUCH_FIRST_BYTES);
	return kvp_epp_server_open(x);
}

static void close_all(struct kvp_epp *x)
{
	kvp_epp_server_close(x);
	kvp_epp_free_again(x);
	kvp_tkz_close(x->tkz);
	kvp_ask_close(&x->parser);
	kvp_selection_close(x->selection);
	kvp_policy_drop(&x->policy);
	for (int i = 0; i < KVP_PLAN_LEGS; i++)
		kvp_pool_close(&x->pool[i]);
	kvp_json_free(x->usage_json);
	kvp_loop_close(x->loop);
}

int main(int argc, char **argv)
{
	static struct kvp_epp x;
	/* Bodies come and go all the time: their memory is not to be given back and faulted in again. */
	mallopt(M_MMAP_THRESHOLD, HEAP_BLOCK_BYTES);
	mallopt(M_TRIM_THRESHOLD, HEAP_SPARE_BYTES);
	int rc = kvp_boot_child(argc, argv, KVP_ROLE_EXTPROC, &x.boot);
	if (rc)
		return kvp_boot_exit(rc);
	kvp_config_log_setup(x.boot.config, "extproc", (int)x.boot.instance);
	rc = open_all(&x);
	if (rc) {
		KVP_LOG_E("extproc.start", "error=%s errno=%s", kvp_strerror(rc), strerror(errno));
		return rc == KVP_ERR_INVAL || errno == EADDRINUSE || errno == EADDRNOTAVAIL ? KVP_EXIT_CONFIG
											    : KVP_EXIT_AGAIN;
	}
	on_beat(&x, &x.beat);
	kvp_boot_control(&x.boot, KVP_CTL_RUN);
	KVP_LOG_I("extproc.run", "model=%s topology=%s", x.boot.config->model_name,
		x.boot.config->eff.disaggregated ? "disaggregated" : "aggregated");
	rc = kvp_loop_run(x.loop);
	close_all(&x);
	return rc ? KVP_EXIT_AGAIN : KVP_EXIT_OK;
}
