/* The vectors about requests in two legs: ledger_traces, topology_config, conditional_disagg,
 * llmd_prefix_decider and trtllm_conditional of disagg.json, COND of scheduling.json. A trace is a list of
 * events and the exact list of what is to be done; both orders of asking are replayed. */
#include "daemons/common/config.h"
#include "daemons/common/select_priv.h"
#include "daemons/extproc/extproc.h"
#include "shm/sweep.h"
#include "tests/vec.h"

#include <math.h>
#include <stdarg.h>

struct ledger {
	struct kvp_plan plan;
	char log[2048];
	size_t len;
	int lost[KVP_PLAN_LEGS]; /* its worker has gone */
	int killed, expired;
	int pending[KVP_PLAN_LEGS]; /* asked for when the process died */
	enum kvp_plan_leg first;
};

/* Where the bookings are. */
static struct kvp_selection *node;

static const char *const who[KVP_PLAN_LEGS] = {"P", "D"}, *const role[KVP_PLAN_LEGS] = {"prefill", "decode"};

__attribute__((format(printf, 2, 3))) static void say(struct ledger *l, const char *fmt, ...)
{
	va_list ap;
	if (l->len)
		l->len += (size_t)snprintf(l->log + l->len, sizeof(l->log) - l->len, " ; ");
	va_start(ap, fmt);
	l->len += (size_t)vsnprintf(l->log + l->len, sizeof(l->log) - l->len, fmt, ap);
	va_end(ap);
}

static struct kvp_str str(const char *s)
{
	return (struct kvp_str){s, strlen(s)};
}

static struct kvp_str id_of(enum kvp_plan_leg leg)
{
	return str(leg == KVP_PLAN_PREFILL ? "4f2c/prefill" : "4f2c/decode");
}

/* book is the success of a leg: a booking of the process, which the plan then hears of. */
static void book(struct ledger *l, enum kvp_plan_leg leg)
{
	static const uint32_t token[8] = {1, 2, 3, 4, 5, 6, 7, 8};
	struct kvp_select_request q;
	struct kvp_select_answer a;
	kvp_select_request_init(&q);
	q.role = leg == KVP_PLAN_PREFILL ? KVP_PART_PREFILL : KVP_PART_DECODE;
	q.model = str("m");
	q.group = str("g");
	q.selection_id = id_of(leg);
	q.prompt.form = KVP_PROMPT_TOKENS;
	q.prompt.token = token;
	q.prompt.token_cnt = 8;
	int status = kvp_selection_select_and_reserve(node, &q, &a);
	if (status != 200)
		say(l, "%s.booking is answered %d", who[leg], status);
	kvp_plan_booked(&l->plan, leg);
}

/* on_swept: a booking whose process has died. */
static void on_swept(void *ctx, uint64_t h)
{
	struct kvp_resv_info info;
	if (kvp_resv_info(&node->region->book, h, &info) == KVP_OK)
		say(ctx, "%s.expire(%s)", strstr(info.id, "prefill") ? "P" : "D", info.id);
}

static void on_book(void *ctx, enum kvp_plan_leg leg)
{
	say(ctx, "%s.select_and_reserve(4f2c/%s)", who[leg], role[leg]);
}
static void on_cancel(void *ctx, enum kvp_plan_leg leg)
{
	say(ctx, "%s.cancel(4f2c/%s)", who[leg], role[leg]);
}
static int on_holds(void *ctx, enum kvp_plan_leg leg)
{
	return !((struct ledger *)ctx)->lost[leg];
}
static void on_free(void *ctx, enum kvp_plan_leg leg)
{
	struct kvp_str id = id_of(leg);
	say(ctx, "%s.free(%s)", who[leg], id.ptr);
	kvp_selection_free(node, id);
}
static void on_prefilled(void *ctx)
{
	say(ctx, "D.prefill_complete(4f2c/decode)");
}
static void on_publish(void *ctx)
{
	struct ledger *l = ctx;
	say(l, "publish(decode_ep, %s)",
		l->plan.form == KVP_PLAN_PAIR ? "prefill_ep" : "no prefill header, strip client header");
}
static void on_refuse(void *ctx, enum kvp_plan_fault fault, enum kvp_plan_leg leg)
{
	(void)fault;
	(void)leg;
	say(ctx, "immediate_error");
}
static const struct kvp_plan_ops ops = {
	on_book, on_cancel, on_holds, on_free, on_prefilled, on_publish, on_refuse};

/* play is one event; 0 = not one that is known. */
static int play(struct ledger *l, const char *e)
{
	struct kvp_plan *p = &l->plan;
	if (!strcmp(e, "pick") || !strcmp(e, "pick(bypass)"))
		kvp_plan_begin(p, &ops, l, e[4] ? KVP_PLAN_LOCAL : KVP_PLAN_PAIR, l->first);
	else if (!strcmp(e, "P ok") || !strcmp(e, "P ok (late)"))
		book(l, KVP_PLAN_PREFILL);
	else if (!strcmp(e, "D ok"))
		book(l, KVP_PLAN_MAIN);
	else if (!strcmp(e, "P error") || !strcmp(e, "D error"))
		kvp_plan_failed(p, e[0] == 'P' ? KVP_PLAN_PREFILL : KVP_PLAN_MAIN);
	else if (!strcmp(e, "P worker deleted"))
		l->lost[KVP_PLAN_PREFILL] = 1;
	else if (!strcmp(e, "resp body non-empty"))
		kvp_plan_first_body(p);
	else if (!strcmp(e, "resp end") || !strcmp(e, "stream closed"))
		kvp_plan_end(p);
	else if (!strcmp(e, "process killed")) {
		l->killed = 1;
		for (int i = 0; i < KVP_PLAN_LEGS; i++)
			l->pending[i] = p->leg[i] == KVP_LEG_PENDING;
	} else if (!strcmp(e, "lease sweep") && l->killed) {
		l->expired =
			kvp_book_sweep_owner(&node->region->book, node->owner, on_swept, l, NULL) == KVP_OK;
	} else if (strcmp(e, "headers sent") != 0 && strcmp(e, "resp headers") != 0 &&
		   strcmp(e, "resp body empty") != 0)
		return 0;
	return 1;
}

static const char *final_of(const struct ledger *l)
{
	return l->expired			   ? "expired"
	       : l->plan.state == KVP_PLAN_CLOSED  ? "closed"
	       : l->plan.state == KVP_PLAN_ABORTED ? "aborted"
						   : "open";
}

/* join writes the expected calls; the two requests in the order in which they are made here. */
static void join(struct kvp_json_val calls, enum kvp_plan_leg first, char *out, size_t cap)
{
	const char *c[16];
	size_t n = 0, at = 0;
	for (struct kvp_json_iter i = kvp_json_each(calls); kvp_json_next(&i) && n < 16;)
		c[n++] = vec_text(i.val);
	int swap = n > 1 && first == KVP_PLAN_MAIN && strncmp(c[0], "P.select", 8) == 0 &&
		   strncmp(c[1], "D.select", 8) == 0;
	for (size_t i = 0; i < n; i++)
		at += (size_t)snprintf(
			out + at, cap - at, "%s%s", i ? " ; " : "", c[swap && i < 2 ? 1 - i : i]);
}

/* forget_pending: of a leg that was asked for, and not booked, when its process died, the trace tells
 * nothing: both are asked for before one is there. */
static void forget_pending(struct ledger *l)
{
	for (int i = 0; i < KVP_PLAN_LEGS; i++) {
		char text[80];
		snprintf(text, sizeof(text), "%s.select_and_reserve(4f2c/%s) ; ", who[i], role[i]);
		char *at = l->pending[i] ? strstr(l->log, text) : NULL;
		if (at)
			memmove(at, at + strlen(text), strlen(at + strlen(text)) + 1);
	}
}

static void open_books(void)
{
	struct kvp_local_cfg cfg = {.seed = 1};
	struct kvp_local_worker w = {.model = str("m"),
		.group = str("g"),
		.endpoint = str("http://w:8000"),
		.block_size = 4,
		.size = 1};
	node = kvp_selection_open_local(&cfg);
	node->set.owner_kind = KVP_BOOK_FOR_PROCESS;
	for (w.worker_id = 1; w.worker_id <= 2; w.worker_id++) {
		w.role = w.worker_id == 1 ? KVP_PART_PREFILL : KVP_PART_DECODE;
		is_u64((uint64_t)kvp_selection_local_worker(node, &w), 201, "worker %u",
			(unsigned)w.worker_id);
	}
}

static void traces(struct kvp_json_val list)
{
	uint64_t cnt = 0;
	for (struct kvp_json_iter i = kvp_json_each(list); kvp_json_next(&i); cnt++)
		for (int first = 0; first < KVP_PLAN_LEGS; first++) {
			struct ledger l = {.first = (enum kvp_plan_leg)first};
			char want[2048];
			const char *id = vec_str(i.val, "id");
			int known = 1;
			struct kvp_json_iter e = kvp_json_each(vec_get(i.val, "events"));
			while (kvp_json_next(&e))
				known &= play(&l, vec_text(e.val));
			join(vec_get(i.val, "expected_calls"), l.first, want, sizeof(want));
			forget_pending(&l);
			ok(known, "%s: every event is known", id);
			is_str(l.log, want, "%s: %s", id, vec_str(i.val, "title"));
			is_str(final_of(&l), vec_str(i.val, "final_state"), "%s: its end", id);
			is_u64(kvp_resv_cnt(&node->region->book), 0, "%s: no booking is left", id);
		}
	is_u64(cnt, 12, "all traces were played");
}

static enum kvp_cond_policy policy_of(const char *name)
{
	return !strcmp(name, "prefill_load")  ? KVP_COND_BY_PREFILL_LOAD
	       : !strcmp(name, "isl_or_load") ? KVP_COND_BY_EITHER
					      : KVP_COND_BY_ISL;
}

static enum kvp_tristate three(struct kvp_json_val v, const char *key)
{
	struct kvp_json_val m;
	int on = 0;
	if (!vec_has(v, key, &m))
		return KVP_UNSET;
	kvp_json_bool(m, &on);
	return on ? KVP_YES : KVP_NO;
}

static uint64_t num_or(struct kvp_json_val v, const char *key, uint64_t none)
{
	struct kvp_json_val m;
	return vec_has(v, key, &m) ? vec_num(m) : none;
}

static double float_or(struct kvp_json_val v, const char *key, double none)
{
	struct kvp_json_val m;
	double d = none;
	if (vec_has(v, key, &m))
		kvp_json_double(m, &d);
	return d;
}

static void judge(struct kvp_json_val r, const struct kvp_cond_cfg *cfg, const struct kvp_cond_in *in,
	enum kvp_tristate want, const char *name, uint64_t n)
{
	enum kvp_cond_verdict v = kvp_cond_decide(cfg, in);
	is_u64(v == KVP_COND_LOCAL, want == KVP_YES, "%s %u: %s", name, (unsigned)n, vec_str(r, "policy"));
	struct kvp_json_val m;
	if (!vec_has(r, "eff_isl", &m))
		return;
	double ratio = (double)kvp_cond_uncached_tok(in) / (double)(in->isl_tok ? in->isl_tok : 1);
	is_u64(kvp_cond_uncached_tok(in), vec_num(m), "%s %u: uncached tokens", name, (unsigned)n);
	ok(fabs(ratio - float_or(r, "ratio", -1)) < 1e-6, "%s %u: their share", name, (unsigned)n);
}

/* What a decision is about. */
enum {
	DISABLED,
	GATE,
	TRISTATE,
	UNKNOWN,
	QUADRANTS,
	ZERO,
	LONGER,
	EQUAL,
	RATIO,
	SMALL,
	LARGE,
	SHARE,
	ABOUTS
};
static const char *const about[ABOUTS] = {"disabled", "decode gate", "busy tri-state",
	"unknown busy falls back to ISL only", "four-quadrant OR table", "zero prompt",
	"overlap larger than prompt", "equality boundary", "ratio at threshold", "small and mostly cached",
	"large", "too great a share"};

static int about_of(struct kvp_json_val r, const struct kvp_cond_cfg *cfg, const struct kvp_cond_in *in)
{
	uint64_t rest = kvp_cond_uncached_tok(in);
	double ratio = (double)rest / (double)(in->isl_tok ? in->isl_tok : 1);
	if (three(r, "enabled") == KVP_NO)
		return DISABLED;
	if (!strcmp(vec_str(r, "policy"), "decode_busy_veto"))
		return GATE;
	if (cfg->policy == KVP_COND_BY_PREFILL_LOAD)
		return TRISTATE;
	if (cfg->policy == KVP_COND_BY_EITHER)
		return in->prefill_busy == KVP_UNSET ? UNKNOWN : QUADRANTS;
	if (!in->isl_tok || in->hit_tok > in->isl_tok)
		return in->isl_tok ? LONGER : ZERO;
	if (rest >= cfg->isl_max_tok)
		return rest == cfg->isl_max_tok ? EQUAL : LARGE;
	return fabs(ratio - cfg->ratio_max) < 1e-9 ? RATIO : ratio < cfg->ratio_max ? SMALL : SHARE;
}

/* settings_of is what the picker makes of its settings. */
static struct kvp_cond_cfg settings_of(const char *enabled, const char *policy, const char *decode_gate)
{
	static struct kvp_config c;
	static struct kvp_config_err err;
	static const char *const argv[] = {NULL};
	char text[3][96];
	const char *env[] = {"KVPICK_MODE=both", "DYN_MODEL_NAME=m", "DYN_EPP_TOKENIZER_PROTOCOL=vllm-render",
		"DYN_EPP_TOKENIZER_SERVICE_URL=http://tok:8000/x", "DYN_EPP_TOPOLOGY_MODE=disaggregated",
		"DYN_ROUTER_CONDITIONAL_DISAGG_PREFILL_BUSY_THRESHOLD=1", text[0], text[1], text[2], NULL};
	struct kvp_cond_cfg out = {.isl_max_tok = 0};
	snprintf(text[0], sizeof(text[0]), "DYN_ROUTER_CONDITIONAL_DISAGG=%s", enabled);
	snprintf(text[1], sizeof(text[1]), "DYN_ROUTER_CONDITIONAL_DISAGG_POLICY=%s", policy);
	snprintf(text[2], sizeof(text[2]), "DYN_ROUTER_CONDITIONAL_DISAGG_DECODE_BUSY_THRESHOLD=%s",
		decode_gate);
	if (ok(kvp_config_load(KVP_BIN_SUPERVISOR, 0, argv, env, &c, NULL, &err) == KVP_OK,
		    "settings: %s, %s", enabled, policy))
		kvp_cond_from_config(&c, &out);
	return out;
}

static void decisions(struct kvp_json_val list)
{
	uint64_t n = 0, seen[ABOUTS] = {0};
	for (struct kvp_json_iter i = kvp_json_each(list); kvp_json_next(&i); n++) {
		struct kvp_json_val r = i.val;
		const char *policy = vec_str(r, "policy");
		int is_veto = !strcmp(policy, "decode_busy_veto");
		struct kvp_cond_cfg cfg = settings_of(three(r, "enabled") == KVP_NO ? "false" : "true",
			is_veto ? "isl_bounding" : policy,
			is_veto && !strcmp(vec_str(r, "decode_busy_gate"), "set") ? "0.5" : "");
		cfg.isl_max_tok = num_or(r, "eff_isl_threshold", cfg.isl_max_tok);
		cfg.ratio_max = float_or(r, "eff_isl_ratio_threshold", cfg.ratio_max);
		struct kvp_cond_in in = {.isl_tok = num_or(r, "prompt_tokens", 0),
			.hit_tok = num_or(r, "overlap_blocks", 0) * num_or(r, "block_size", 64),
			.is_hit_known = KVP_YES,
			.prefill_busy = three(r, "prefill_busy"),
			.decode_busy = three(r, "decode_busy")};
		if (is_veto)
			in.isl_tok = three(r, "policy_says_bypass") == KVP_YES ? 0 : 1000000;
		int of = about_of(r, &cfg, &in);
		char name[96];
		seen[of]++;
		snprintf(name, sizeof(name), "Conditional disagg: %s", about[of]);
		judge(r, &cfg, &in, three(r, "bypass_remote_prefill"), name, n);
	}
	for (int i = 0; i < ABOUTS; i++)
		ok(seen[i] > 0, "Conditional disagg: %s: there is such a row", about[i]);
	is_u64(n, 29, "all decisions were judged");
}

static void scheduling_rows(struct kvp_json_val vectors)
{
	uint64_t n = 0;
	for (struct kvp_json_iter i = kvp_json_each(vectors); kvp_json_next(&i);) {
		if (strcmp(vec_str(i.val, "id"), "COND") != 0)
			continue;
		for (struct kvp_json_iter k = kvp_json_each(vec_get(i.val, "rows")); kvp_json_next(&k); n++) {
			struct kvp_json_val r = k.val;
			struct kvp_cond_cfg cfg = {.policy = policy_of(vec_str(r, "policy")),
				.isl_max_tok = num_or(r, "eff_isl_threshold", 0),
				.ratio_max = float_or(r, "ratio_threshold", 0),
				.has_decode_gate = three(r, "decode_gate_configured")};
			struct kvp_cond_in in = {.isl_tok = num_or(r, "isl_tokens", 0),
				.hit_tok = num_or(r, "decode_device_overlap_blocks", 0) *
					   num_or(r, "block_size", 0),
				.is_hit_known = KVP_YES,
				.prefill_busy = three(r, "prefill_chosen_worker_busy"),
				.decode_busy = three(r, "decode_busy")};
			judge(r, &cfg, &in, three(r, "bypass"), "COND", n);
		}
	}
	is_u64(n, 19, "all rows of COND were judged");
}

/* ---- llmd_prefix_decider, trtllm_conditional: the policies of other pickers ---- */

/* gate judges once more what the policy lets a decode worker do: behind the decode gate only a calm one
 * does. */
static void gate(struct kvp_cond_cfg cfg, struct kvp_cond_in in, const char *name, unsigned n)
{
	static const enum kvp_tristate busy[] = {KVP_NO, KVP_YES, KVP_UNSET};
	int is_local = kvp_cond_decide(&cfg, &in) == KVP_COND_LOCAL;
	cfg.has_decode_gate = KVP_YES;
	for (int i = 0; i < 3; i++) {
		in.decode_busy = busy[i];
		is_u64(kvp_cond_decide(&cfg, &in),
			!is_local	    ? KVP_COND_REMOTE
			: busy[i] == KVP_NO ? KVP_COND_LOCAL
					    : KVP_COND_VETOED,
			"%s %u: behind the decode gate, busy %d", name, n, busy[i]);
	}
}

static void llmd_rows(struct kvp_json_val list)
{
	unsigned n = 0;
	for (struct kvp_json_iter i = kvp_json_each(list); kvp_json_next(&i); n++) {
		struct kvp_json_val r = i.val;
		struct kvp_cond_cfg cfg = {
			.policy = KVP_COND_BY_NON_CACHED, .non_cached_tok = vec_u64(r, "nonCachedTokens")};
		struct kvp_cond_in in = {.isl_tok = vec_u64(r, "input_tokens"),
			.hit_tok = vec_u64(r, "hit_prefix_tokens"),
			.is_hit_known = KVP_YES,
			.prefill_busy = KVP_UNSET,
			.decode_busy = KVP_UNSET};
		is_u64(kvp_cond_decide(&cfg, &in) == KVP_COND_REMOTE, three(r, "disaggregate") == KVP_YES,
			"llm-d's decider %u: of %u tokens %u are cached, threshold %u", n,
			(unsigned)in.isl_tok, (unsigned)in.hit_tok, (unsigned)cfg.non_cached_tok);
		gate(cfg, in, "llm-d's decider", n);
		in.is_hit_known = KVP_NO;
		is_u64(kvp_cond_decide(&cfg, &in), KVP_COND_LOCAL,
			"llm-d's decider %u: not with an unknown prefix", n);
		in = (struct kvp_cond_in){.isl_tok = 10, .hit_tok = 11, .is_hit_known = KVP_YES};
		is_u64(kvp_cond_decide(&cfg, &in), KVP_COND_LOCAL,
			"llm-d's decider %u: more cached than the prompt has", n);
	}
	is_u64(n, 7, "all rows of llm-d's decider were judged");
}

static void trtllm_rows(struct kvp_json_val list)
{
	unsigned n = 0;
	for (struct kvp_json_iter i = kvp_json_each(list); kvp_json_next(&i); n++) {
		struct kvp_json_val r = i.val;
		struct kvp_cond_cfg cfg = {.policy = KVP_COND_BY_LENGTH,
			.local_max_tok = vec_u64(r, "max_local_prefill_length")};
		struct kvp_cond_in in = {.isl_tok = vec_u64(r, "total"),
			.hit_tok = vec_u64(r, "match"),
			.is_hit_known = KVP_YES,
			.prefill_busy = KVP_UNSET,
			.decode_busy = KVP_UNSET};
		is_u64(kvp_cond_decide(&cfg, &in) == KVP_COND_REMOTE, three(r, "need_ctx") == KVP_YES,
			"TensorRT-LLM's orchestrator %u: of %u tokens %u match, length %u", n,
			(unsigned)in.isl_tok, (unsigned)in.hit_tok, (unsigned)cfg.local_max_tok);
		gate(cfg, in, "TensorRT-LLM's orchestrator", n);
	}
	is_u64(n, 4, "all rows of TensorRT-LLM's orchestrator were judged");
}

/* ---- topology_config: the settings that say whether there are roles ---- */

static void topology_rows(struct kvp_json_val list)
{
	static struct kvp_config cfg;
	static struct kvp_config_err err;
	static const char *const argv[] = {NULL};
	uint64_t n = 0;
	for (struct kvp_json_iter i = kvp_json_each(list); kvp_json_next(&i); n++) {
		char mem[8][256];
		const char *env[16] = {"DYN_EPP_MODE=standalone", "DYN_MODEL_NAME=m",
			"DYN_EPP_TOKENIZER_PROTOCOL=vllm-render",
			"DYN_EPP_TOKENIZER_SERVICE_URL=http://tok:8000/x", "DYN_EPP_INFERENCE_POOL_NAME=p",
			"POD_NAMESPACE=n", "DYN_KV_CACHE_BLOCK_SIZE=16", "POD_IP=10.0.0.1"};
		int cnt = 8, on = 0;
		struct kvp_json_val mode;
		for (struct kvp_json_iter e = kvp_json_each(vec_get(i.val, "env"));
			kvp_json_next(&e) && cnt < 15; cnt++) {
			snprintf(mem[cnt - 8], sizeof(mem[0]), "%.*s=%s", (int)e.key_len, e.key,
				vec_text(e.val));
			env[cnt] = mem[cnt - 8];
		}
		kvp_json_bool(vec_get(i.val, "ok"), &on);
		int rc = kvp_config_load(KVP_BIN_SUPERVISOR, 0, argv, env, &cfg, NULL, &err);
		is_u64(rc == KVP_OK, (uint64_t)on, "topology %u: %s", (unsigned)n,
			on ? "starts" : "is refused");
		if (rc == KVP_OK && vec_has(i.val, "mode", &mode))
			is_str(cfg.eff.disaggregated ? "disaggregated" : "aggregated", vec_text(mode),
				"topology %u: its roles", (unsigned)n);
	}
	is_u64(n, 10, "all topologies were tried");
}

/* What the decode leg of a pair overrides for every selection and booking. */
static void role_config(void)
{
	struct kvp_override o = KVP_EPP_NO_OVERRIDE;
	ok(isnan(o.overlap_score_credit) && o.assume_kv_reuse == KVP_UNSET &&
			o.track_prefill_tokens == KVP_UNSET,
		"Role config: prefill overrides nothing");
	kvp_epp_override_decode(&o);
	ok(o.overlap_score_credit == 0 && o.assume_kv_reuse == KVP_NO && o.track_prefill_tokens == KVP_NO,
		"Role config: decode override values exact");
	ok(isnan(o.prefill_load_scale) && isnan(o.temperature) && isnan(o.shared_cache_multiplier),
		"Role config: others unset");
}

int main(void)
{
	struct kvp_json *json = kvp_json_new();
	struct kvp_json_val root = vec_load(json, "disagg.json");
	role_config();
	open_books();
	traces(vec_get(root, "ledger_traces"));
	kvp_selection_close(node);
	decisions(vec_get(root, "conditional_disagg"));
	llmd_rows(vec_get(root, "llmd_prefix_decider"));
	trtllm_rows(vec_get(root, "trtllm_conditional"));
	topology_rows(vec_get(root, "topology_config"));
	scheduling_rows(vec_get(vec_load(json, "scheduling.json"), "vectors"));
	kvp_json_free(json);
	return done();
}
