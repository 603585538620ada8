#include "daemons/supervisor/doctor.h"

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define ATTACH_MS 300

static uint64_t sum(const struct doctor *d, enum kvp_ctr id)
{
	return kvp_ctr_sum(&d->region->counters, id);
}

static unsigned long long ull(uint64_t v)
{
	return v;
}

static void processes(struct doctor *d)
{
	const struct kvp_slots *s = &d->region->slots;
	unsigned running = 0, other = 0;
	for (uint32_t i = 0; i < s->slot_max; i++) {
		if (kvp_ld_acq_u32(&s->slot[i].state) != KVP_SLOT_ACTIVE)
			continue;
		int run = kvp_slot_control_get(s, i) == KVP_CTL_RUN;
		running += (unsigned)run;
		other += (unsigned)!run;
	}
	uint64_t restarts = sum(d, KVP_CTR_SUP_RESTARTED);
	/* The last slot is the sweep helper's. */
	unsigned want = s->slot_max - 1;
	doc_say(d, running == want && !restarts ? DOC_OK : DOC_WARN, "node",
		running == want && !restarts ? NULL
					     : "look at `kvpickctl slots`, `kvpickctl errors` and the log",
		"instance '%s' runs, supervisor pid %d: %u of %u processes in RUN, %u in another state, %llu "
		"restarts",
		d->cfg->instance, (int)d->at.supervisor, running, want, other, ull(restarts));
}

static void error_log(struct doctor *d)
{
	struct kvp_errlog_entry e;
	unsigned n = 0;
	for (uint32_t i = 0; i < KVP_ERRLOG_MAX; i++)
		n += kvp_errlog_get(&d->region->errlog, i, &e) == KVP_OK;
	if (n)
		doc_say(d, DOC_WARN, "errors", "look at `kvpickctl errors`",
			"%u different errors since the node started", n);
	else
		doc_say(d, DOC_OK, "errors", NULL, "none since the node started");
}

static void workers(struct doctor *d)
{
	const struct kvp_cat *cat = &d->region->cat;
	struct kvp_cat_worker_info *w = malloc(sizeof(*w));
	unsigned all = 0, good = 0;
	for (uint32_t i = 0; w && i < kvp_cat_worker_max(cat); i++)
		if (kvp_cat_worker_info(cat, i, w) == KVP_OK) {
			all++;
			good += w->lifecycle == KVP_LIFE_SCHEDULABLE;
		}
	free(w);
	const char *todo =
		all ? "look at `kvpickctl workers` and at what its records lack"
		    : "register workers (POST /workers, workers file, or pods with the pool's labels)";
	doc_say(d, good && good == all ? DOC_OK : DOC_WARN, "workers", good && good == all ? NULL : todo,
		"%u of %u registered workers are schedulable", good, all);
}

/* The block size of the configuration, of the registrations, and of the events. */
static void block_size(struct doctor *d)
{
	const struct kvp_cat *cat = &d->region->cat;
	struct kvp_part_info *p = malloc(sizeof(*p));
	uint64_t want = d->cfg->kv_cache_block_size, other = sum(d, KVP_CTR_EV_BLOCK_SIZE);
	unsigned size = 0, parts = 0;
	for (uint32_t i = 0; p && i < kvp_cat_part_cnt(cat); i++) {
		if (kvp_cat_part_info(cat, i, p) != KVP_OK)
			continue;
		parts++;
		size = p->block_size;
		if (want != KVP_CONFIG_UNSET && want != size)
			doc_say(d, DOC_FAIL, "block size",
				"make DYN_KV_CACHE_BLOCK_SIZE the engines' block size, and restart",
				"model %.*s: registered with %u, configured %llu",
				(int)(p->model_len < 200 ? p->model_len : 200), p->model, size, ull(want));
	}
	free(p);
	if (other)
		doc_say(d, DOC_FAIL, "block size",
			"make the registration (block_size, DYN_KV_CACHE_BLOCK_SIZE) the engines' "
			"--block-size; log lines "
			"listener.block_size name the workers and both sizes",
			"%llu stores came in blocks of another size and were not indexed", ull(other));
	else if (parts && sum(d, KVP_CTR_EV_BLOCKS_STORED))
		doc_say(d, DOC_OK, "block size", NULL,
			"%llu blocks stored, all of the registered size (%u in the last of %u "
			"partitions)",
			ull(sum(d, KVP_CTR_EV_BLOCKS_STORED)), size, parts);
}

static void events(struct doctor *d)
{
	uint64_t got = sum(d, KVP_CTR_EV_RECEIVED) + sum(d, KVP_CTR_EV_REPLAYED);
	uint64_t open = sum(d, KVP_CTR_EV_LISTENERS), bad = sum(d, KVP_CTR_EV_LISTENERS_FAILED);
	uint64_t lost = sum(d, KVP_CTR_EV_REPLAY_NONE) + sum(d, KVP_CTR_EV_REPLAY_INCOMPLETE);
	uint64_t full = sum(d, KVP_CTR_EV_STORED_FULL);
	if (!d->cfg->use_kv_events || !open)
		return;
	if (bad)
		doc_say(d, DOC_FAIL, "events", "see event ports below", "%llu of %llu listeners have failed",
			ull(bad), ull(open));
	else if (!got)
		doc_say(d, DOC_WARN, "events",
			"send a request of some blocks to an engine; if nothing comes then, its KV events "
			"are off, or prefix "
			"caching is",
			"%llu listeners, no message yet", ull(open));
	else
		doc_say(d, DOC_OK, "events", NULL, "%llu listeners, %llu messages", ull(open), ull(got));
	if (lost)
		doc_say(d, DOC_WARN, "events", "set replay_endpoint in the engines and in their registration",
			"%llu gaps could not be filled by a replay", ull(lost));
	if (full)
		doc_say(d, DOC_WARN, "events",
			"raise KVPICK_MAX_BLOCKS (and the memory limit), or KVPICK_INDEX_RANKS",
			"%llu stores were cut short: the index is full", ull(full));
}

static void proxy(struct doctor *d)
{
	uint64_t streams = sum(d, KVP_CTR_EPP_STREAMS), bad = sum(d, KVP_CTR_EPP_STREAM_ERROR);
	if (!d->cfg->eff.epp_on)
		return;
	if (!streams)
		doc_say(d, DOC_WARN, "envoy",
			"send a request through it; if that fails, compare its filter with "
			"deploy/envoy/kvpick.yaml (address, "
			"TLS, HTTP/2)",
			"no ext_proc stream since the node started");
	else if (bad)
		doc_say(d, DOC_WARN, "envoy",
			"compare the filter's processing modes with deploy/envoy/kvpick.yaml",
			"%llu of %llu ext_proc streams broke the protocol or were refused", ull(bad),
			ull(streams));
	else
		doc_say(d, DOC_OK, "envoy", NULL, "%llu ext_proc streams", ull(streams));
	if (sum(d, KVP_CTR_EPP_INDEX_MISMATCH))
		doc_say(d, DOC_WARN, "envoy",
			"check that tokenizer, block size and model are those of the engines",
			"engines report other numbers of cached tokens than the index predicts");
}

void doc_node(struct doctor *d)
{
	const struct kvp_config *c = d->cfg;
	char path[sizeof(c->run_dir) + 64];
	snprintf(path, sizeof(path), "%s/%s.sock", c->run_dir, c->instance);
	/* Where there is no socket there is nothing to wait for. */
	int there = access(path, F_OK) == 0;
	int rc = kvp_boot_attach(c->run_dir, c->instance, there ? ATTACH_MS : 0, &d->at);
	if (rc == KVP_ERR_TIMEOUT || rc == KVP_ERR_SYS) {
		doc_say(d, DOC_OK, "node", NULL,
			"instance '%s' does not run: workers, events, block sizes and Envoy were not looked "
			"at",
			c->instance);
		return;
	}
	rc = rc ? rc : kvp_region_join(d->at.region_fd, KVP_REGION_LOOK, d->region);
	if (rc) {
		doc_say(d, DOC_FAIL, "node", "run doctor as the user of the node, with the version that runs",
			"instance '%s' in %s can't be looked into: %s", c->instance, c->run_dir,
			kvp_strerror(rc));
		return;
	}
	processes(d);
	error_log(d);
	workers(d);
	block_size(d);
	events(d);
	proxy(d);
}
