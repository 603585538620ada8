/* The selections of scheduling.json that need only the interface and an index, through the whole flow:
 * workers, blocks in all tiers, bookings, then one booked selection. */
#include "daemons/common/config.h"
#include "daemons/common/select_priv.h"
#include "tests/vec.h"

#include <math.h>

#define BLK_MAX 512
#define TOK_MAX 16384
#define ROWS 16

static struct kvp_config cfg;

static struct kvp_str text(const char *s)
{
	return (struct kvp_str){s, strlen(s)};
}

static void configure(struct kvp_json_val v)
{
	static struct kvp_config_err err;
	static char line[16][128];
	const char *env[17];
	int n = 0;
	struct kvp_json_iter it = kvp_json_each(vec_get(v, "config"));
	while (kvp_json_next(&it) && n < 16) {
		snprintf(line[n], sizeof(line[0]), "%.*s=%s", (int)it.key_len, it.key, vec_text(it.val));
		env[n] = line[n];
		n++;
	}
	env[n] = NULL;
	if (kvp_config_load(KVP_BIN_SUPERVISOR, 0, NULL, env, &cfg, NULL, &err) != KVP_OK)
		ok(0, "configuration of a vector: %s", err.text);
}

/* A prompt by name: its tokens, or hashes where the request says so. */
struct prompt {
	uint32_t tok[TOK_MAX], tok_cnt;
	uint64_t local[BLK_MAX], seq[BLK_MAX];
	uint32_t cnt;
	uint64_t isl;
};

static void read_hashes(struct kvp_json_val list, uint64_t *out)
{
	struct kvp_json_iter it = kvp_json_each(list);
	for (uint32_t n = 0; kvp_json_next(&it) && n < BLK_MAX; n++)
		out[n] = vec_num(it.val);
}

static void read_prompt(struct kvp_json_val v, const char *name, struct prompt *p)
{
	struct kvp_json_val x = vec_get(vec_get(vec_get(v, "setup"), "prompts"), name);
	struct kvp_json_iter it = kvp_json_each(vec_get(x, "token_runs"));
	p->tok_cnt = 0;
	p->isl = vec_u64(x, "isl_tokens");
	p->cnt = (uint32_t)kvp_json_len(vec_get(x, "block_hashes"));
	read_hashes(vec_get(x, "block_hashes"), p->local);
	read_hashes(vec_get(x, "sequence_hashes"), p->seq);
	while (kvp_json_next(&it)) {
		uint64_t run[2] = {0};
		read_hashes(it.val, run);
		for (uint64_t i = 0; i < run[1] && p->tok_cnt < TOK_MAX; i++)
			p->tok[p->tok_cnt++] = (uint32_t)(run[0] + i);
	}
}

static struct kvp_prompt as_tokens(const struct prompt *p)
{
	return (struct kvp_prompt){
		.form = KVP_PROMPT_TOKENS, .token = p->tok, .token_cnt = p->tok_cnt, .eagle = KVP_UNSET};
}

static struct kvp_prompt as_hashes(const struct prompt *p)
{
	return (struct kvp_prompt){.form = KVP_PROMPT_HASHES,
		.block_hash = p->local,
		.block_hash_cnt = p->cnt,
		.seq_hash = p->seq,
		.seq_hash_cnt = p->cnt,
		.has_isl = KVP_YES,
		.isl_tok = p->isl,
		.eagle = KVP_UNSET};
}

static void add_workers(struct kvp_selection *s, struct kvp_json_val v)
{
	struct kvp_json_iter it = kvp_json_each(vec_get(vec_get(v, "setup"), "workers"));
	struct kvp_json_val size;
	while (kvp_json_next(&it)) {
		struct kvp_local_worker w = {.worker_id = vec_u64(it.val, "worker_id"),
			.model = text("default"),
			.group = text("default"),
			.endpoint = text("http://w:1"),
			.block_size = (uint32_t)vec_u64(v, "block_size"),
			.size = 1};
		if (vec_has(it.val, "data_parallel_size", &size))
			w.size = (uint32_t)vec_num(size);
		is_u64(kvp_selection_local_worker(s, &w), 201, "%s: worker registered", vec_str(v, "id"));
	}
}

/* Blocks first_block .. of a prompt in a tier; their names are the chain of all hashes before. */
static void add_blocks(struct kvp_selection *s, struct kvp_json_val v)
{
	static const char *const name[] = {"device", "host", "disk", "external"};
	static struct prompt p;
	struct kvp_json_iter it = kvp_json_each(vec_get(vec_get(v, "setup"), "index"));
	while (kvp_json_next(&it)) {
		uint64_t ext[BLK_MAX];
		uint32_t tier = 0, first = (uint32_t)vec_u64(it.val, "first_block");
		while (tier < 3 && strcmp(vec_str(it.val, "tier"), name[tier]))
			tier++;
		read_prompt(v, vec_str(it.val, "prompt"), &p);
		kvp_hash_chain(NULL, p.local, p.cnt, ext);
		is_u64(kvp_selection_local_stored_in(s, (enum kvp_cache_tier)tier,
			       vec_u64(it.val, "worker_id"), (uint32_t)vec_u64(it.val, "dp_rank"),
			       first ? &ext[first - 1] : NULL, (uint32_t)vec_u64(it.val, "blocks"),
			       p.local + first, ext + first),
			200, "%s: blocks in %s", vec_str(v, "id"), name[tier]);
	}
}

static void add_bookings(struct kvp_selection *s, struct kvp_json_val v)
{
	static struct prompt p;
	struct kvp_json_iter it = kvp_json_each(vec_get(vec_get(v, "setup"), "bookings"));
	while (kvp_json_next(&it)) {
		struct kvp_select_answer a;
		struct kvp_json_val effective;
		read_prompt(v, vec_str(it.val, "prompt"), &p);
		struct kvp_reserve_request q = {.model = text("default"),
			.group = text("default"),
			.selection_id = text(vec_str(it.val, "selection_id")),
			.worker_id = vec_u64(it.val, "worker_id"),
			.dp_rank = (uint32_t)vec_u64(it.val, "dp_rank"),
			.prompt = as_hashes(&p),
			.track_prefill_tokens = KVP_UNSET,
			.override = {NAN, NAN, NAN, NAN, KVP_UNSET, KVP_UNSET}};
		if (vec_has(it.val, "effective_prefill_tokens", &effective)) {
			q.has_effective_prefill = KVP_YES;
			q.effective_prefill_tok = vec_num(effective);
		}
		is_u64(kvp_selection_reserve(s, &q, &a), 201, "%s: booking", vec_str(v, "id"));
	}
}

static struct kvp_json_val candidate(struct kvp_json_val v, uint64_t worker_id, uint64_t dp_rank)
{
	struct kvp_json_iter it = kvp_json_each(vec_get(vec_get(v, "expected"), "candidates"));
	while (kvp_json_next(&it))
		if (vec_u64(it.val, "worker_id") == worker_id && vec_u64(it.val, "dp_rank") == dp_rank)
			return it.val;
	ok(0, "%s: %" PRIu64 ":%" PRIu64 " is a candidate", vec_str(v, "id"), worker_id, dp_rank);
	exit(done());
}

/* Cached blocks of each rank as the vector lists them, and the credit where nothing decays it. */
static void check_rows(struct kvp_selection *s, struct kvp_json_val v, const struct kvp_select_request *q)
{
	struct kvp_overlap_row row[ROWS];
	uint32_t cnt = 0, block_size, blk;
	const char *id = vec_str(v, "id");
	is_u64(kvp_selection_overlap_scores(s, q, row, ROWS, &cnt, &block_size, &blk), 200, "%s: rows", id);
	struct kvp_json_iter it = kvp_json_each(vec_get(v, "ranks"));
	for (uint32_t n = 0; kvp_json_next(&it) && n < cnt; n++) {
		double credit =
			vec_real(vec_get(candidate(v, row[n].worker_id, row[n].dp_rank), "credit_blocks"));
		ok(row[n].worker_id == vec_u64(it.val, "worker_id") &&
				row[n].dp_rank == vec_u64(it.val, "dp_rank") &&
				row[n].device_blk == vec_u64(it.val, "device") &&
				row[n].host_ext_blk == vec_u64(it.val, "host") &&
				row[n].disk_ext_blk == vec_u64(it.val, "disk") + vec_u64(it.val, "external"),
			"%s: blocks of row %u", id, n);
		ok(cfg.overlap_score_credit_decay > 0 || fabs(row[n].router_credit_blk - credit) < 1e-9,
			"%s: credit of row %u", id, n);
	}
}

static void check_overlap(struct kvp_json_val v, const struct kvp_overlap_summary *o)
{
	struct kvp_json_val want;
	if (!vec_has(vec_get(v, "expected"), "overlap", &want))
		return;
	ok(o->longest_matched_tok == vec_u64(want, "longest_matched") && o->gpu_tok == vec_u64(want, "gpu") &&
			o->cpu_tok == vec_u64(want, "cpu") && o->disk_tok == vec_u64(want, "disk"),
		"%s: overlap of the chosen worker, tier by tier", vec_str(v, "id"));
	for (uint32_t i = 0; i < o->dp_cnt; i++) {
		char key[16];
		snprintf(key, sizeof(key), "%u", o->dp_rank[i]);
		is_u64(o->dp_tok[i], vec_u64(vec_get(want, "dp"), key), "%s: tokens of rank %s",
			vec_str(v, "id"), key);
	}
}

static void check_load(struct kvp_selection *s, struct kvp_json_val v, const struct kvp_select_answer *a)
{
	struct kvp_load_row row[ROWS];
	struct kvp_json_val all, want;
	uint32_t cnt = 0;
	char key[48];
	snprintf(key, sizeof(key), "%" PRIu64 ":%u", a->worker_id, a->dp_rank);
	if (!vec_has(vec_get(v, "expected"), "chosen_load_after_booking", &all) || !vec_has(all, key, &want))
		return;
	kvp_selection_loads(s, KVP_PART_AGGREGATED, text("default"), text("default"), row, ROWS, &cnt);
	for (uint32_t i = 0; i < cnt; i++)
		if (row[i].worker_id == a->worker_id && row[i].dp_rank == a->dp_rank)
			ok(row[i].prefill_tok == vec_u64(want, "potential_prefill_tokens") &&
					row[i].decode_blk == vec_u64(want, "potential_decode_blocks") &&
					row[i].active_requests == vec_u64(want, "active_requests"),
				"%s: load of the chosen rank once it is booked", vec_str(v, "id"));
}

static struct kvp_select_request request_of(struct kvp_json_val v, struct prompt *p)
{
	struct kvp_json_val ask = vec_get(vec_get(v, "setup"), "request"), o, m;
	struct kvp_select_request q = {.model = text("default"),
		.group = text("default"),
		.override = {NAN, NAN, NAN, NAN, KVP_UNSET, KVP_UNSET}};
	int b;
	read_prompt(v, vec_str(ask, "prompt"), p);
	q.prompt = as_tokens(p);
	if (vec_has(ask, "form", &m) && kvp_json_str_is(m, "hashes"))
		q.prompt = as_hashes(p);
	if (vec_has(ask, "router_config_override", &o)) {
		if (vec_has(o, "overlap_score_credit", &m))
			q.override.overlap_score_credit = vec_real(m);
		if (vec_has(o, "track_prefill_tokens", &m) && kvp_json_bool(m, &b) == KVP_OK)
			q.override.track_prefill_tokens = b ? KVP_YES : KVP_NO;
	}
	return q;
}

static void replay(struct kvp_json_val v)
{
	static struct prompt p;
	struct kvp_local_cfg local = {.seed = 1};
	struct kvp_select_answer a;
	const char *id = vec_str(v, "id");
	configure(v);
	struct kvp_selection *s = kvp_selection_open_local(&local);
	s->set.weights = (struct kvp_score_weights){cfg.eff.overlap_score_credit,
		cfg.overlap_score_credit_decay, cfg.eff.prefill_load_scale, cfg.decode_active_request_weight,
		cfg.host_cache_hit_weight, cfg.disk_cache_hit_weight, cfg.shared_cache_multiplier,
		cfg.temperature};
	add_workers(s, v);
	add_blocks(s, v);
	add_bookings(s, v);
	struct kvp_select_request q = request_of(v, &p);
	check_rows(s, v, &q);
	is_u64(kvp_selection_select_and_reserve(s, &q, &a), 200, "%s: selected", id);
	int allowed = 0;
	struct kvp_json_iter it = kvp_json_each(vec_get(vec_get(v, "expected"), "choose_one_of"));
	while (kvp_json_next(&it)) {
		uint64_t one[2] = {0};
		read_hashes(it.val, one);
		allowed |= one[0] == a.worker_id && one[1] == a.dp_rank;
	}
	ok(allowed, "%s: %" PRIu64 ":%u may be chosen", id, a.worker_id, a.dp_rank);
	is_u64(a.effective_prefill_tok,
		vec_u64(candidate(v, a.worker_id, a.dp_rank), "effective_prefill_tokens"),
		"%s: effective prefill", id);
	check_overlap(v, &a.overlap);
	check_load(s, v, &a);
	kvp_selection_close(s);
}

int main(void)
{
	struct kvp_json *parser = kvp_json_new();
	struct kvp_json_iter it = kvp_json_each(vec_get(vec_load(parser, "scheduling.json"), "vectors"));
	uint32_t ran = 0;
	while (kvp_json_next(&it)) {
		struct kvp_json_val how;
		if (strcmp(vec_str(it.val, "kind"), "select") || !vec_has(it.val, "replay", &how) ||
			!kvp_json_str_is(how, "http_zmq"))
			continue;
		replay(it.val);
		ran++;
	}
	is_u64(ran, 25, "all selections that need an index only");
	kvp_json_free(parser);
	return done();
}
