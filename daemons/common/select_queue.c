/* Requests that wait, from their owner's side: admission, storing, collecting the answer, giving up. */
#include "daemons/common/select_priv.h"
#include <kvpick/clock.h>

#include <inttypes.h>
#include <string.h>

/* What a record carries: this, then the arrays it counts, in its order of counts, then the strings. The hold
 * of its session is the owner's alone. */
enum { STR_ID, STR_MODEL, STR_GROUP, STR_LORA, STR_SESSION, STR_CNT };
struct store_head {
	double credit, scale, temperature, shared_multiplier;
	uint64_t isl_tok, pinned_worker_id, target_worker_id;
	uint64_t key_lo, key_hi, hold_worker_id, hold_tag;
	uint32_t pinned_dp_rank, target_dp_rank, expected_output_tok, role;
	uint32_t allowed_cnt, required_cnt, preferred_cnt, cached_cnt, local_cnt, seq_cnt;
	uint32_t key_part, hold_dp_rank, hold_kind;
	uint32_t str_len[STR_CNT];
	int8_t has_pinned, has_target, has_target_rank, has_allowed, track, kind, pad[2];
};
#define HEAD_WORDS (sizeof(struct store_head) / 8)
_Static_assert(sizeof(struct store_head) % 8 == 0, "records are made of words");

/* What an answer begins with: then ranks and tokens of the overlap, or the error text. */
struct answer_head {
	uint64_t worker_id, effective_prefill_tok, potential_decode_blk;
	int32_t status, decode_busy;
	uint32_t dp_rank, worker_idx, block_size, dp_cnt, text_len;
	uint32_t longest_tok, gpu_tok, cpu_tok, disk_tok, pad;
};
#define ANSWER_WORDS (sizeof(struct answer_head) / 8)
_Static_assert(sizeof(struct answer_head) % 8 == 0 && ANSWER_WORDS < KVP_QUEUE_INLINE, "words, few");

static uint64_t words_of(uint64_t bytes)
{
	return (bytes + 7) / 8;
}

/* ---- admission ---- */

static const struct kvp_policy_profile *profile_of(
	const struct kvp_selection *s, const struct kvp_select_request *q)
{
	const struct kvp_policy_profile *p = s->set.policy ? kvp_policy_of(s->set.policy, q->model) : NULL;
	return p && kvp_policy_any_queues(p) ? p : NULL;
}

static uint64_t worker_cnt(const struct kvp_selection *s)
{
	uint64_t n = 0;
	for (uint32_t i = 0; i < s->rank_cnt; i++)
		n += i == 0 || s->rank[i].worker_id != s->rank[i - 1].worker_id;
	return n;
}

static int refuse(struct kvp_selection *s, const struct kvp_policy_class *class, enum kvp_limit which,
	uint64_t current, uint64_t limit)
{
	s->refusal = (struct kvp_select_refusal){class->name, kvp_limit_name(which), current, limit};
	kvp_ctr_add(s->ctr, KVP_CTR_QUEUE_REJECTED, 1);
	return kvp_sel_fail(s, 429,
		"router policy class \"%s\" queue %s limit reached (current=%" PRIu64 ", limit=%" PRIu64 ")",
		class->name, kvp_limit_name(which), current, limit);
}

static int no_room(struct kvp_selection *s, const struct kvp_policy_class *class)
{
	uint32_t max = s->region->geom.queued_max;
	return refuse(s, class, KVP_LIMIT_REQUESTS, max, max);
}

static int put_cached(struct kvp_selection *s, uint64_t h, uint32_t *cnt)
{
	int rc = KVP_OK;
	*cnt = 0;
	for (uint32_t i = 0; !rc && i < s->rank_cnt; i++) {
		const struct kvp_sel_rank *r = &s->rank[i];
		const struct kvp_score_tiers *c = &r->cached;
		const uint64_t w[KVP_SEL_CACHED_WORDS] = {r->worker_id,
			(uint64_t)r->dp_rank << 32 | r->rank_gen, (uint64_t)c->dev_blk << 32 | c->host_blk,
			c->disk_blk};
		if (!(c->dev_blk | c->host_blk | c->disk_blk))
			continue;
		rc = h ? kvp_queue_put(&s->region->queue, h, w, KVP_SEL_CACHED_WORDS) : KVP_OK;
		++*cnt;
	}
	return rc;
}

static int put_bytes(struct kvp_selection *s, uint64_t h, struct kvp_str t)
{
	uint64_t w[64];
	int rc = KVP_OK;
	for (size_t at = 0; !rc && at < t.len; at += sizeof(w)) {
		size_t n = t.len - at < sizeof(w) ? t.len - at : sizeof(w);
		w[(n - 1) / 8] = 0;
		memcpy(w, t.ptr + at, n);
		rc = kvp_queue_put(&s->region->queue, h, w, (uint32_t)words_of(n));
	}
	return rc;
}

/* The filters of the request are in scratch_filter, as the last survey left them: allowed, required,
 * preferred. */
static int put_all(struct kvp_selection *s, uint64_t h, const struct kvp_select_request *q,
	struct store_head *head, const struct kvp_str str[STR_CNT])
{
	struct kvp_queue *qu = &s->region->queue;
	const uint64_t *filter = s->scratch_filter.ptr;
	uint64_t word[HEAD_WORDS];
	memcpy(word, head, sizeof(*head));
	int rc = kvp_queue_put(qu, h, word, HEAD_WORDS);
	rc = rc ? rc
		: kvp_queue_put(qu, h, filter, head->allowed_cnt + head->required_cnt + head->preferred_cnt);
	for (uint32_t i = 0; !rc && i < head->preferred_cnt; i++) {
		double weight = (double)q->preferred_taint[i].weight;
		memcpy(word, &weight, sizeof(weight));
		rc = kvp_queue_put(qu, h, word, 1);
	}
	rc = rc ? rc : put_cached(s, h, &head->cached_cnt);
	rc = rc ? rc : kvp_queue_put(qu, h, s->prompt.local, head->local_cnt);
	rc = rc ? rc : kvp_queue_put(qu, h, s->prompt.seq, head->seq_cnt);
	for (int i = 0; !rc && i < STR_CNT; i++)
		rc = put_bytes(s, h, str[i]);
	return rc;
}

static int store(struct kvp_selection *s, const struct kvp_select_request *q, enum kvp_tristate track,
	uint64_t resv, struct kvp_queue_entry *e)
{
	const struct kvp_sel_session *session = &s->session;
	struct kvp_str none = {NULL, 0};
	struct kvp_str str[STR_CNT] = {q->selection_id, q->model, q->group, q->prompt.lora, none};
	if (!str[STR_ID].ptr)
		str[STR_ID] = resv ? (struct kvp_str){s->id, KVP_SELECTION_NEW_ID_LEN} : none;
	if (session->steer == KVP_YES || kvp_sel_steerable(s, q))
		str[STR_SESSION] = q->session_id;
	kvp_sel_hash_rest(s); /* whoever looks the overlap up again has no tokens */
	struct store_head head = {.credit = q->override.overlap_score_credit,
		.scale = q->override.prefill_load_scale,
		.temperature = q->override.temperature,
		.shared_multiplier = q->override.shared_cache_multiplier,
		.isl_tok = s->prompt.isl_tok,
		.pinned_worker_id = q->pinned_worker_id,
		.target_worker_id = q->target_worker_id,
		.key_lo = session->key.lo,
		.key_hi = session->key.hi,
		.key_part = session->key.part,
		.hold_worker_id = session->hold.target.worker_id,
		.hold_dp_rank = session->hold.target.dp_rank,
		.hold_tag = session->hold.tag,
		.hold_kind = resv ? (uint32_t)session->hold.kind : KVP_AFFINITY_UNPINNED,
		.pinned_dp_rank = q->pinned_dp_rank,
		.target_dp_rank = q->target_dp_rank,
		.expected_output_tok = q->expected_output_tok,
		.role = (uint32_t)q->role,
		.allowed_cnt = q->allowed_worker_id ? q->allowed_cnt : 0,
		.required_cnt = q->required_cnt,
		.preferred_cnt = q->preferred_cnt,
		.local_cnt = s->prompt.local_cnt,
		.seq_cnt = s->prompt.seq_cnt,
		.has_pinned = (int8_t)q->has_pinned,
		.has_target = (int8_t)q->has_target,
		.has_target_rank = (int8_t)q->has_target_rank,
		.has_allowed = q->allowed_worker_id != NULL,
		.track = (int8_t)track,
		.kind = resv ? KVP_SELECT_AND_RESERVE : KVP_SELECT_ONLY};
	for (int i = 0; i < STR_CNT; i++)
		head.str_len[i] = (uint32_t)str[i].len;
	put_cached(s, 0, &head.cached_cnt);
	int rc = kvp_queue_begin(&s->region->queue, &e->h);
	if (rc)
		return rc;
	rc = put_all(s, e->h, q, &head, str);
	rc = rc ? rc : kvp_queue_post(&s->region->queue, e);
	if (rc)
		kvp_queue_abort(&s->region->queue, e->h);
	return rc;
}

static int wait_turn(struct kvp_selection *s, const struct kvp_select_request *q, enum kvp_tristate track,
	uint64_t h, const struct kvp_policy_class *class, uint32_t idx)
{
	struct kvp_policy_usage use;
	struct kvp_sel_survey sv;
	uint64_t current = 0, limit = 0;
	if (!s->ticket)
		return kvp_sel_fail(s, 429,
			"request opted out of router queueing (policy class \"%s\", %" PRIu32 " waiting)",
			class->name, kvp_queue_waiting(&s->region->queue, s->part_idx, idx));
	int status = kvp_sel_survey(s, q, NULL, KVP_SEL_LOOK_CACHED, &sv);
	if (status)
		return status;
	kvp_queue_usage(&s->region->queue, s->part_idx, idx, &use);
	enum kvp_limit over = kvp_policy_limit(class, worker_cnt(s), &use, &current, &limit);
	if (over != KVP_LIMIT_NONE)
		return refuse(s, class, over, current, limit);
	uint64_t now_ns = kvp_clock_mono_ns();
	double arrival_s = (double)(now_ns - s->region->super->created_mono_ns) / 1e9;
	struct kvp_queue_entry e = {.resv = h,
		.isl_tok = s->prompt.isl_tok,
		.cached_tok = sv.best_cached_tok,
		.posted_ns = now_ns,
		.pinned_worker_id = q->pinned_worker_id,
		.pinned_dp_rank = q->pinned_dp_rank,
		.has_pinned = q->has_pinned,
		.part = s->part_idx,
		.class = idx,
		.key = {.strict = q->strict_priority,
			.score = kvp_policy_score(class->order, arrival_s, q->priority_jump,
				kvp_policy_cost(s->prompt.isl_tok, sv.best_cached_tok))}};
	if (store(s, q, track, h, &e) != KVP_OK)
		return no_room(s, class);
	*s->ticket = e.h;
	s->session.hold.kind = KVP_AFFINITY_UNPINNED; /* it is the record's now */
	return KVP_SELECT_WAITS;
}

int kvp_sel_admit(
	struct kvp_selection *s, const struct kvp_select_request *q, enum kvp_tristate track, uint64_t h)
{
	const struct kvp_policy_profile *p = profile_of(s, q);
	struct kvp_sel_survey sv = {0, 0, 0};
	s->gate = NULL;
	if (!p || q->advisory == KVP_YES)
		return 0;
	if (kvp_policy_needs_cache(p)) {
		int status = kvp_sel_survey(s, q, NULL, KVP_SEL_LOOK_CACHED, &sv);
		if (status)
			return status;
	}
	uint32_t idx = kvp_policy_classify(p, q->policy_class, s->prompt.isl_tok, sv.best_cached_tok);
	const struct kvp_policy_class *class = &p->class[idx];
	if (!kvp_policy_queues(class))
		return 0;
	int status = kvp_sel_survey(s, q, class, KVP_SEL_LOOK_BUSY, &sv);
	if (status || sv.eligible == 0) /* nobody to wait for: the choice says so */
		return status;
	if (kvp_queue_waiting(&s->region->queue, s->part_idx, idx) ||
		kvp_policy_pool_busy(class, sv.busy, sv.eligible))
		return wait_turn(s, q, track, h, class, idx);
	s->gate = class;
	s->gate_idx = idx;
	return 0;
}

int kvp_sel_admit_again(
	struct kvp_selection *s, const struct kvp_select_request *q, enum kvp_tristate track, uint64_t h)
{
	struct kvp_sel_survey sv;
	if (!s->gate)
		return 0;
	int status = kvp_sel_survey(s, q, s->gate, KVP_SEL_LOOK_BUSY, &sv);
	if (status || !kvp_policy_pool_busy(s->gate, sv.busy, sv.eligible))
		return status;
	return wait_turn(s, q, track, h, s->gate, s->gate_idx);
}

/* ---- reading a record ---- */

static void take_apart(struct kvp_selection *s, const struct store_head *d, const uint64_t *w,
	struct kvp_sel_waiting *out)
{
	uint64_t *at = (uint64_t *)(uintptr_t)(w + HEAD_WORDS);
	out->q = (struct kvp_select_request){.role = (enum kvp_part_role)d->role,
		.override = {.overlap_score_credit = d->credit,
			.prefill_load_scale = d->scale,
			.temperature = d->temperature,
			.shared_cache_multiplier = d->shared_multiplier},
		.expected_output_tok = d->expected_output_tok,
		.has_pinned = (enum kvp_tristate)d->has_pinned,
		.pinned_worker_id = d->pinned_worker_id,
		.pinned_dp_rank = d->pinned_dp_rank,
		.has_target = (enum kvp_tristate)d->has_target,
		.has_target_rank = (enum kvp_tristate)d->has_target_rank,
		.target_worker_id = d->target_worker_id,
		.target_dp_rank = d->target_dp_rank,
		.required_cnt = d->required_cnt,
		.preferred_cnt = d->preferred_cnt};
	out->session.key = (struct kvp_affinity_key){d->key_lo, d->key_hi, d->key_part};
	out->session.hold = (struct kvp_affinity_hold){
		.target = {d->hold_worker_id, d->hold_dp_rank}, .tag = d->hold_tag};
	if (d->hold_kind <= KVP_AFFINITY_BOUND)
		out->session.hold.kind = (enum kvp_affinity_kind)d->hold_kind;
	out->track = (enum kvp_tristate)d->track;
	out->kind = d->kind == KVP_SELECT_AND_RESERVE ? KVP_SELECT_AND_RESERVE : KVP_SELECT_ONLY;
	out->stored.ask = (struct kvp_eligible_ask){.allowed = d->has_allowed ? at : NULL,
		.allowed_cnt = d->allowed_cnt,
		.has_pinned = out->q.has_pinned,
		.pinned_worker_id = d->pinned_worker_id,
		.pinned_dp_rank = d->pinned_dp_rank,
		.required = at + d->allowed_cnt,
		.required_cnt = d->required_cnt};
	out->stored.preferred = at + d->allowed_cnt + d->required_cnt;
	s->stored = &out->stored;
}

/* The rest of a record, which was read whole: weights, cached ranks, prompt, strings. */
static int take_prompt(struct kvp_selection *s, const struct store_head *d, const uint64_t *w,
	struct kvp_sel_waiting *out)
{
	const uint64_t *at = w + HEAD_WORDS + d->allowed_cnt + d->required_cnt + d->preferred_cnt;
	struct kvp_taint_pref *pref = kvp_sel_scratch(&s->scratch_taint, d->preferred_cnt, sizeof(*pref));
	struct kvp_str *str[STR_CNT] = {&out->q.selection_id, &out->q.model, &out->q.group,
		&out->q.prompt.lora, &out->q.session_id};
	if (!pref)
		return KVP_ERR_SYS;
	for (uint32_t i = 0; i < d->preferred_cnt; i++) {
		double weight;
		memcpy(&weight, at++, sizeof(weight));
		pref[i] = (struct kvp_taint_pref){{NULL, 0}, (float)weight};
	}
	out->q.preferred_taint = pref;
	out->cached = at;
	out->cached_cnt = d->cached_cnt;
	at += KVP_SEL_CACHED_WORDS * (size_t)d->cached_cnt;
	s->prompt = (struct kvp_sel_prompt){.form = KVP_PROMPT_HASHES,
		.local = at,
		.local_cnt = d->local_cnt,
		.blk_cnt = d->local_cnt,
		.seq = at + d->local_cnt,
		.seq_cnt = d->seq_cnt,
		.isl_tok = d->isl_tok};
	at += d->local_cnt + d->seq_cnt;
	for (int i = 0; i < STR_CNT; i++) {
		*str[i] = (struct kvp_str){d->str_len[i] ? (const char *)at : NULL, d->str_len[i]};
		at += words_of(d->str_len[i]);
	}
	return KVP_OK;
}

/* counted gives the words that a head stands for; 0 when they can't be what was read. */
static uint64_t counted(const struct store_head *d, enum kvp_sel_load what)
{
	uint64_t n = HEAD_WORDS + (uint64_t)d->allowed_cnt + d->required_cnt + d->preferred_cnt;
	if (what == KVP_SEL_LOAD_FILTERS)
		return n;
	n += (uint64_t)d->preferred_cnt + (uint64_t)KVP_SEL_CACHED_WORDS * d->cached_cnt + d->local_cnt +
	     d->seq_cnt;
	for (int i = 0; i < STR_CNT; i++)
		n += words_of(d->str_len[i]);
	return n;
}

int kvp_sel_load(struct kvp_selection *s, uint64_t h, enum kvp_sel_load what, struct kvp_sel_waiting *w)
{
	const struct kvp_queue *qu = &s->region->queue;
	struct store_head d;
	uint64_t head[HEAD_WORDS];
	uint32_t len = 0;
	int rc = kvp_queue_words(qu, h, 0, head, HEAD_WORDS, &len);
	if (rc)
		return rc;
	memcpy(&d, head, sizeof(d));
	uint64_t n = counted(&d, what);
	if (d.role >= KVP_PART_ROLE_CNT || n > len || (what == KVP_SEL_LOAD_ALL && n != len))
		return KVP_ERR_CORRUPT;
	uint64_t *word = kvp_sel_scratch(&s->scratch_words, n, sizeof(*word));
	if (!word)
		return KVP_ERR_SYS;
	rc = kvp_queue_words(qu, h, 0, word, (uint32_t)n, &len);
	if (rc)
		return rc;
	take_apart(s, &d, word, w);
	return what == KVP_SEL_LOAD_ALL ? take_prompt(s, &d, word, w) : KVP_OK;
}

/* ---- answers ---- */

int kvp_sel_answer_put(struct kvp_selection *s, uint64_t h, uint64_t booked, int status,
	const struct kvp_select_answer *a, uint32_t worker_idx)
{
	uint32_t text_max = (KVP_QUEUE_INLINE - ANSWER_WORDS) * 8;
	struct answer_head d = {.status = status};
	size_t words = ANSWER_WORDS;
	if (status == 200) {
		d = (struct answer_head){.worker_id = a->worker_id,
			.effective_prefill_tok = a->effective_prefill_tok,
			.potential_decode_blk = a->potential_decode_blk,
			.status = status,
			.decode_busy = a->decode_busy,
			.dp_rank = a->dp_rank,
			.worker_idx = worker_idx,
			.block_size = a->block_size,
			.dp_cnt = a->overlap.dp_cnt,
			.longest_tok = a->overlap.longest_matched_tok,
			.gpu_tok = a->overlap.gpu_tok,
			.cpu_tok = a->overlap.cpu_tok,
			.disk_tok = a->overlap.disk_tok};
		words += d.dp_cnt;
	} else {
		d.text_len = (uint32_t)(s->err_len < text_max ? s->err_len : text_max);
		words += words_of(d.text_len);
	}
	uint64_t *w = kvp_sel_scratch(&s->scratch_answer, words, sizeof(*w));
	if (!w)
		return KVP_ERR_SYS;
	memset(w, 0, words * sizeof(*w));
	memcpy(w, &d, sizeof(d));
	for (uint32_t i = 0; i < d.dp_cnt; i++)
		w[ANSWER_WORDS + i] = (uint64_t)a->overlap.dp_rank[i] << 32 | a->overlap.dp_tok[i];
	memcpy(w + ANSWER_WORDS + d.dp_cnt, s->err, d.text_len);
	return kvp_queue_finish(&s->region->queue, h, booked, w, (uint32_t)words);
}

static int answer_text(struct kvp_selection *s, const struct answer_head *d, const uint64_t *w)
{
	char text[KVP_QUEUE_INLINE * 8 + 1] = "";
	uint32_t len = d->text_len < sizeof(text) ? d->text_len : 0;
	memcpy(text, w + ANSWER_WORDS, len);
	const struct kvp_str all = {text, len};
	return kvp_sel_fail_at(s, d->status >= 400 && d->status < 600 ? d->status : 500, &all, "%");
}

/* read_answer copies the answer words and checks their counts. */
static const uint64_t *read_answer(struct kvp_selection *s, uint64_t ticket, struct answer_head *d)
{
	uint64_t head[ANSWER_WORDS];
	uint32_t len = 0;
	if (kvp_queue_answer(&s->region->queue, ticket, head, ANSWER_WORDS, &len) || len < ANSWER_WORDS)
		return NULL;
	memcpy(d, head, sizeof(*d));
	if ((uint64_t)ANSWER_WORDS + d->dp_cnt + words_of(d->text_len) != len)
		return NULL;
	uint64_t *w = kvp_sel_scratch(&s->scratch_answer, len, sizeof(*w));
	return w && kvp_queue_answer(&s->region->queue, ticket, w, len, &len) == KVP_OK ? w : NULL;
}

static int fill_overlap(struct kvp_selection *s, const struct answer_head *d, const uint64_t *w,
	struct kvp_overlap_summary *o)
{
	uint32_t *dp = kvp_sel_scratch(&s->scratch_dp, 2 * (size_t)d->dp_cnt, sizeof(uint32_t));
	if (!dp)
		return kvp_sel_fail(s, 500, "out of memory");
	for (uint32_t i = 0; i < d->dp_cnt; i++) {
		dp[i] = (uint32_t)(w[ANSWER_WORDS + i] >> 32);
		dp[d->dp_cnt + i] = (uint32_t)w[ANSWER_WORDS + i];
	}
	*o = (struct kvp_overlap_summary){.longest_matched_tok = d->longest_tok,
		.gpu_tok = d->gpu_tok,
		.cpu_tok = d->cpu_tok,
		.disk_tok = d->disk_tok,
		.dp_rank = dp,
		.dp_tok = dp + d->dp_cnt,
		.dp_cnt = d->dp_cnt};
	return 0;
}

/* take_session makes a stored hold the current call's: it ends with bind or cancel. */
static void take_session(struct kvp_selection *s, const struct kvp_sel_waiting *x)
{
	s->session.key = x->session.key;
	s->session.id = x->q.session_id;
	s->session.hold = x->session.hold;
	s->session.steer = KVP_NO;
}

/* Of a source counts what it holds now, not when the request was posted or its rank was chosen: only the
 * ranks that may be given one are worth another walk. */
static void source_now(struct kvp_selection *s, uint32_t chosen, struct kvp_kv_source *out)
{
	if (!s->rank[chosen].kv_hint || s->set.records_routing == KVP_YES)
		return;
	kvp_sel_look_up(s);
	kvp_sel_kv_source(s, chosen, out);
}

static int settle_booking(
	struct kvp_selection *s, const struct kvp_queue_entry *e, struct kvp_select_answer *a)
{
	kvp_sel_open_part(s, e->part); /* which ranks there are now */
	int status = kvp_sel_session_bind(s, e->resv, a->worker_id, a->dp_rank);
	for (uint32_t i = 0; !status && i < s->rank_cnt; i++) {
		if (s->rank[i].worker_id != a->worker_id || s->rank[i].dp_rank != a->dp_rank)
			continue;
		kvp_sel_tell_prompt(s, &s->rank[i]);
		source_now(s, i, &a->kv_source);
	}
	return status;
}

/* settle does what is left to the owner: session, prediction and source of a booking, the memory of a mere
 * choice. */
static int settle(struct kvp_selection *s, const struct kvp_queue_entry *e, struct kvp_sel_waiting *x,
	struct kvp_select_answer *a)
{
	if (x->kind == KVP_SELECT_AND_RESERVE)
		return settle_booking(s, e, a);
	if (x->q.session_id.len)
		x->q.has_target = KVP_NO; /* what there is came from the session */
	if (x->q.selection_id.len)
		kvp_sel_remember(s, &x->q, a);
	return 0;
}

static int fill_collected(struct kvp_selection *s, const struct kvp_queue_entry *e,
	const struct answer_head *d, const uint64_t *w, struct kvp_sel_waiting *x,
	struct kvp_select_answer *a)
{
	struct kvp_sel_rank r = {.worker_id = d->worker_id, .worker_idx = d->worker_idx};
	s->part_idx = e->part;
	a->selection_id = x->q.selection_id;
	a->model = x->q.model;
	a->group = x->q.group;
	a->track_prefill_tokens = x->track;
	if (d->status != 200)
		return answer_text(s, d, w);
	int status = kvp_sel_worker_of(s, &r);
	status = status ? status : fill_overlap(s, d, w, &a->overlap);
	if (status)
		return status;
	a->worker_id = d->worker_id;
	a->dp_rank = d->dp_rank;
	a->endpoint = s->worker.endpoint;
	a->block_size = d->block_size;
	a->effective_prefill_tok = d->effective_prefill_tok;
	a->potential_decode_blk = d->potential_decode_blk;
	a->decode_busy = (enum kvp_tristate)d->decode_busy;
	a->seq_hash = s->prompt.seq;
	a->seq_cnt = s->prompt.seq_cnt;
	a->isl_tok = s->prompt.isl_tok;
	a->booking = e->resv;
	status = settle(s, e, x, a);
	return status ? status : 200;
}

/* claim_again: the drainer died with the claim. */
static int claim_again(struct kvp_selection *s, uint64_t ticket)
{
	struct kvp_sel_waiting x;
	uint64_t h;
	int rc = kvp_sel_load(s, ticket, KVP_SEL_LOAD_ALL, &x);
	s->stored = NULL;
	int status = rc ? kvp_sel_fail(s, 500, "the waiting request was lost")
			: kvp_sel_claim(s, x.q.selection_id, x.q.prompt.lora, &h);
	if (status) {
		kvp_queue_cancel(&s->region->queue, ticket);
		if (!rc)
			take_session(s, &x);
		kvp_sel_session_cancel(s);
		return status;
	}
	if (kvp_queue_again(&s->region->queue, ticket, h))
		kvp_resv_abandon(&s->region->book, h);
	kvp_sel_drain_all(s);
	return KVP_SELECT_WAITS;
}

int kvp_selection_collect(struct kvp_selection *s, uint64_t ticket, struct kvp_select_answer *a)
{
	struct kvp_queue *qu = &s->region->queue;
	struct kvp_sel_waiting x;
	struct kvp_queue_entry e;
	struct answer_head d;
	memset(a, 0, sizeof(*a));
	s->refusal.policy_class = NULL;
	if (kvp_queue_state(qu, ticket) == KVP_Q_RETRY) {
		int status = claim_again(s, ticket);
		if (status != KVP_SELECT_WAITS)
			return status;
	}
	switch (kvp_queue_state(qu, ticket)) {
	case KVP_Q_WAITS:
	case KVP_Q_RETRY:
		return KVP_SELECT_WAITS;
	case KVP_Q_ANSWERED:
		break;
	default:
		return kvp_sel_fail(s, 500, "the waiting request was lost");
	}
	int rc = kvp_sel_load(s, ticket, KVP_SEL_LOAD_ALL, &x);
	s->stored = NULL;
	rc = rc ? rc : kvp_queue_entry(qu, ticket, &e);
	s->session.hold.kind = KVP_AFFINITY_UNPINNED;
	if (!rc)
		take_session(s, &x);
	const uint64_t *w = rc ? NULL : read_answer(s, ticket, &d);
	int status = w ? fill_collected(s, &e, &d, w, &x, a)
		       : kvp_sel_fail(s, 500, "the answer of a waiting request was lost");
	kvp_queue_end(qu, ticket);
	if (status != 200)
		kvp_sel_session_cancel(s);
	if (status != 200 && !rc && e.resv)
		kvp_resv_free(&s->region->book, e.resv); /* its worker has gone: nobody waits for that load */
	return status;
}

void kvp_selection_cancel(struct kvp_selection *s, uint64_t ticket)
{
	struct kvp_queue *qu = &s->region->queue;
	struct kvp_queue_entry e;
	struct kvp_sel_waiting x;
	if (kvp_queue_entry(qu, ticket, &e))
		return;
	if (kvp_sel_load(s, ticket, KVP_SEL_LOAD_FILTERS, &x) == KVP_OK) {
		take_session(s, &x);
		kvp_sel_session_cancel(s);
	}
	s->stored = NULL;
	switch (kvp_queue_cancel(qu, ticket)) {
	case KVP_OK:
		if (e.resv)
			kvp_resv_abandon(&s->region->book, e.resv);
		break;
	case KVP_ERR_EXISTS:
		if (e.resv)
			kvp_resv_free(&s->region->book, e.resv);
		kvp_queue_end(qu, ticket);
		break;
	default:
		break;
	}
	kvp_sel_drain_all(s);
}

int kvp_selection_submit(struct kvp_selection *s, const struct kvp_select_request *q,
	enum kvp_select_kind kind, struct kvp_select_answer *a, uint64_t *ticket)
{
	s->ticket = ticket;
	s->refusal.policy_class = NULL;
	int status = kind == KVP_SELECT_AND_RESERVE ? kvp_selection_select_and_reserve(s, q, a)
						    : kvp_selection_select(s, q, a);
	s->ticket = NULL;
	if (status != KVP_SELECT_WAITS)
		return status;
	/* Load may have been given back between the look at it and the post: pairs with kvp_sel_drain_all of
	 * whoever gave it back. */
	kvp_sel_drain(s, s->part_idx);
	return kvp_selection_collect(s, *ticket, a);
}

int kvp_selection_next(struct kvp_selection *s, uint32_t *cursor, uint64_t *ticket)
{
	return kvp_queue_next_ready(&s->region->queue, cursor, ticket) == KVP_OK;
}

const struct kvp_select_refusal *kvp_selection_refusal(const struct kvp_selection *s)
{
	return s->refusal.policy_class ? &s->refusal : NULL;
}

void kvp_selection_waiting(struct kvp_selection *s, enum kvp_part_role role, struct kvp_str model,
	struct kvp_str group, uint64_t *cnt, uint64_t *isl_tok)
{
	struct kvp_policy_usage use = {0, 0, 0};
	uint32_t part;
	if (kvp_queue_total(&s->region->queue) &&
		kvp_cat_part_find(&s->region->cat, role, model.ptr, (uint32_t)model.len, group.ptr,
			(uint32_t)group.len, &part) == KVP_OK)
		kvp_queue_usage(&s->region->queue, part, KVP_POLICY_CLASS_MAX, &use);
	*cnt = use.requests;
	*isl_tok = use.isl_tok;
}
