#include "daemons/common/request_body.h"

#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

__attribute__((format(printf, 3, 4))) static int fail(struct kvp_parse *p, int status, const char *fmt, ...)
{
	va_list ap;
	va_start(ap, fmt);
	vsnprintf(p->err, sizeof(p->err), fmt, ap);
	va_end(ap);
	return status;
}

static void *room(struct kvp_parse_buf *b, size_t n, size_t elem)
{
	size_t want = (n ? n : 1) * elem;
	if (want > b->bytes) {
		void *grown = realloc(b->ptr, want);
		if (!grown)
			return NULL;
		b->ptr = grown;
		b->bytes = want;
	}
	return b->ptr;
}

int kvp_parse_open(struct kvp_parse *p)
{
	memset(p, 0, sizeof(*p));
	p->lists = (struct kvp_json_lists){.list_cnt = KVP_PARSE_LIST_CNT,
		.list = {[KVP_PARSE_TOKENS] = {.key = "token_ids", .of = KVP_JSON_LIST_U32},
			[KVP_PARSE_BLOCK_HASHES] = {.key = "block_hashes", .of = KVP_JSON_LIST_I64},
			[KVP_PARSE_SEQ_HASHES] = {.key = "sequence_hashes", .of = KVP_JSON_LIST_I64}}};
	p->json = kvp_json_new();
	return p->json ? KVP_OK : KVP_ERR_SYS;
}

void kvp_parse_close(struct kvp_parse *p)
{
	struct kvp_parse_buf *all[] = {&p->token, &p->routing_token, &p->block_hash, &p->seq_hash,
		&p->allowed, &p->required, &p->preferred, &p->mm, &p->mm_hash};
	for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++)
		free(all[i]->ptr);
	kvp_json_lists_free(&p->lists);
	kvp_json_free(p->json);
	memset(p, 0, sizeof(*p));
}

int kvp_parse_body(struct kvp_parse *p, const void *body, size_t len)
{
	struct kvp_json_err err;
	int rc = kvp_json_lists_read(p->json, body, len, &p->lists, &p->root, &err);
	if (rc == KVP_ERR_FULL)
		return fail(p, 500, "out of memory");
	if (rc)
		return fail(p, 400, "request body is not JSON: %s", err.text);
	if (kvp_json_type(p->root) != KVP_JSON_OBJ)
		return fail(p, 422, "request body must be a JSON object");
	p->lone_surrogate = kvp_json_lone_surrogate(p->lists.judged, p->lists.judged_len);
	return 0;
}

struct kvp_str kvp_parse_seq_text(const struct kvp_parse *p, const uint64_t *seq, uint32_t cnt)
{
	const struct kvp_json_list *l = &p->lists.list[KVP_PARSE_SEQ_HASHES];
	if (!l->is_read || seq != (const uint64_t *)l->i64 || cnt != l->cnt || !l->text)
		return (struct kvp_str){NULL, 0};
	return (struct kvp_str){l->text, l->text_len};
}

/* present: the member is there and not null. */
static int present(struct kvp_json_val obj, const char *name, struct kvp_json_val *v)
{
	return kvp_json_get(obj, name, v) == KVP_OK && kvp_json_type(*v) != KVP_JSON_NULL;
}

static int wrong(struct kvp_parse *p, const char *name, const char *want, struct kvp_json_val v)
{
	return fail(p, 422, "%s: expected %s, got %s", name, want, kvp_json_type_name(kvp_json_type(v)));
}

static int opt_str(
	struct kvp_parse *p, struct kvp_json_val obj, const char *name, size_t max, struct kvp_str *out)
{
	struct kvp_json_val v;
	if (!present(obj, name, &v))
		return 0;
	if (kvp_json_str(v, &out->ptr, &out->len))
		return wrong(p, name, "a string", v);
	if (out->len > max)
		return fail(p, 400, "%s must not exceed %zu bytes", name, max);
	if (p->lone_surrogate && memmem(out->ptr, out->len, "\xef\xbf\xbd", 3))
		return fail(p, 400, "%s is not valid Unicode", name);
	return 0;
}

/* opt_int reads an unsigned integer of at most max; *has says whether it was given. */
static int opt_int(struct kvp_parse *p, struct kvp_json_val obj, const char *name, uint64_t max,
	uint64_t *out, enum kvp_tristate *has)
{
	struct kvp_json_val v;
	*has = KVP_NO;
	if (!present(obj, name, &v))
		return 0;
	if (kvp_json_u64(v, out) || *out > max)
		return fail(p, 422, "%s: expected an integer in 0..%" PRIu64, name, max);
	*has = KVP_YES;
	return 0;
}

static int opt_num(struct kvp_parse *p, struct kvp_json_val obj, const char *name, double *out)
{
	struct kvp_json_val v;
	if (!present(obj, name, &v))
		return 0;
	int rc = kvp_json_double(v, out);
	if (rc == KVP_ERR_LIMIT)
		return fail(p, 422, "%s: number out of range", name);
	return rc ? wrong(p, name, "a number", v) : 0;
}

static int opt_bool(struct kvp_parse *p, struct kvp_json_val obj, const char *name, enum kvp_tristate *out)
{
	struct kvp_json_val v;
	int b;
	if (!present(obj, name, &v))
		return 0;
	if (kvp_json_bool(v, &b))
		return wrong(p, name, "a boolean", v);
	*out = b ? KVP_YES : KVP_NO;
	return 0;
}

static int token_list(struct kvp_parse *p, struct kvp_json_val v, const char *name, struct kvp_parse_buf *buf,
	const uint32_t **out, uint32_t *cnt)
{
	size_t n = kvp_json_len(v);
	uint32_t *t = room(buf, n, sizeof(uint32_t));
	if (!t)
		return fail(p, 500, "out of memory");
	int rc = kvp_json_u32s(v, t, n, &n);
	if (rc == KVP_ERR_INVAL)
		return wrong(p, name, "an array of integers", v);
	if (rc)
		return fail(p, 422, "%s[%zu]: expected an integer in 0..4294967295", name, n);
	*out = t;
	*cnt = (uint32_t)n;
	return 0;
}

static int hash_list(
	struct kvp_parse *p, enum kvp_parse_list list, const uint64_t **out, uint32_t *cnt)
{
	struct kvp_parse_buf *buf = list == KVP_PARSE_BLOCK_HASHES ? &p->block_hash : &p->seq_hash;
	const struct kvp_json_list *l = &p->lists.list[list];
	const char *name = l->key;
	struct kvp_json_val v;
	if (l->is_read) {
		*out = (const uint64_t *)l->i64;
		*cnt = (uint32_t)l->cnt;
		return 0;
	}
	if (!present(p->root, name, &v))
		return 0;
	size_t n = kvp_json_len(v);
	int64_t *h = room(buf, n, sizeof(int64_t));
	if (!h)
		return fail(p, 500, "out of memory");
	int rc = kvp_json_i64s(v, h, n, &n);
	if (rc == KVP_ERR_INVAL)
		return wrong(p, name, "an array of integers", v);
	if (rc)
		return fail(p, 422, "%s[%zu]: expected a signed 64-bit integer", name, n);
	*out = (const uint64_t *)h;
	*cnt = (uint32_t)n;
	return 0;
}

/* mm_objects appends the hashes of one block's objects; at counts what is stored over all blocks. */
static int mm_objects(struct kvp_parse *p, struct kvp_json_val info, uint64_t **hash, size_t *at, size_t cap)
{
	struct kvp_json_val objects, v;
	if (kvp_json_type(info) != KVP_JSON_OBJ || kvp_json_get(info, "mm_objects", &objects) ||
		kvp_json_type(objects) != KVP_JSON_ARR)
		return fail(p, 422, "block_mm_infos: expected null or an object with the array mm_objects");
	struct kvp_json_iter it = kvp_json_each(objects);
	while (kvp_json_next(&it)) {
		uint64_t h;
		if (kvp_json_get(it.val, "mm_hash", &v) || kvp_json_u64(v, &h) || *at >= cap)
			return fail(p, 422, "block_mm_infos: mm_hash must be an integer in 0..2^64-1");
		(*hash)[(*at)++] = h;
	}
	return 0;
}

static int mm_infos(struct kvp_parse *p, struct kvp_json_val obj, struct kvp_prompt *out)
{
	struct kvp_json_val list, objects;
	if (!present(obj, "block_mm_infos", &list))
		return 0;
	if (kvp_json_type(list) != KVP_JSON_ARR)
		return wrong(p, "block_mm_infos", "an array", list);
	size_t n = kvp_json_len(list), total = 0, at = 0, i = 0;
	struct kvp_json_iter it = kvp_json_each(list);
	while (kvp_json_next(&it))
		if (kvp_json_get(it.val, "mm_objects", &objects) == KVP_OK)
			total += kvp_json_len(objects);
	struct kvp_hash_mm *mm = room(&p->mm, n, sizeof(*mm));
	uint64_t *hash = room(&p->mm_hash, total, sizeof(*hash));
	if (!mm || !hash)
		return fail(p, 500, "out of memory");
	it = kvp_json_each(list);
	while (kvp_json_next(&it)) {
		size_t from = at;
		if (kvp_json_type(it.val) != KVP_JSON_NULL) {
			int rc = mm_objects(p, it.val, &hash, &at, total);
			if (rc)
				return rc;
		}
		mm[i].hash = hash + from;
		mm[i++].cnt = (uint32_t)(at - from);
	}
	out->mm = mm;
	out->mm_cnt = (uint32_t)n;
	return 0;
}

/* tokens: mm_routing_info with tokens wins over token_ids, which wins over the hash lists. */
static int tokens(struct kvp_parse *p, struct kvp_prompt *out)
{
	struct kvp_json_val info, list;
	int rc;
	const struct kvp_json_list *ids = &p->lists.list[KVP_PARSE_TOKENS];
	if (ids->is_read) {
		out->token = ids->u32;
		out->token_cnt = (uint32_t)ids->cnt;
		out->form = KVP_PROMPT_TOKENS;
	} else if (present(p->root, "token_ids", &list)) {
		rc = token_list(p, list, "token_ids", &p->token, &out->token, &out->token_cnt);
		if (rc)
			return rc;
		out->form = KVP_PROMPT_TOKENS;
	}
	if (!present(p->root, "mm_routing_info", &info))
		return mm_infos(p, p->root, out);
	if (kvp_json_type(info) != KVP_JSON_OBJ || kvp_json_get(info, "routing_token_ids", &list))
		return fail(p, 422, "mm_routing_info: routing_token_ids is required");
	const uint32_t *tok;
	uint32_t cnt;
	rc = token_list(p, list, "routing_token_ids", &p->routing_token, &tok, &cnt);
	if (rc)
		return rc;
	if (cnt == 0)
		return mm_infos(p, p->root, out);
	out->form = KVP_PROMPT_TOKENS;
	out->token = tok;
	out->token_cnt = cnt;
	return mm_infos(p, info, out);
}

static int prompt(struct kvp_parse *p, struct kvp_prompt *out)
{
	memset(out, 0, sizeof(*out));
	out->eagle = KVP_UNSET;
	int rc = tokens(p, out);
	rc = rc ? rc : hash_list(p, KVP_PARSE_BLOCK_HASHES, &out->block_hash, &out->block_hash_cnt);
	rc = rc ? rc : hash_list(p, KVP_PARSE_SEQ_HASHES, &out->seq_hash, &out->seq_hash_cnt);
	rc = rc ? rc : opt_int(p, p->root, "isl_tokens", UINT64_MAX, &out->isl_tok, &out->has_isl);
	rc = rc ? rc : opt_str(p, p->root, "lora_name", KVP_NAME_MAX, &out->lora);
	rc = rc ? rc : opt_str(p, p->root, "cache_salt", KVP_NAME_MAX, &out->salt);
	rc = rc ? rc : opt_bool(p, p->root, "is_eagle", &out->eagle);
	if (!rc && out->form != KVP_PROMPT_TOKENS)
		out->form = KVP_PROMPT_HASHES;
	return rc;
}

static int override_bounds(struct kvp_parse *p, const struct kvp_override *o)
{
	if (!isnan(o->overlap_score_credit) &&
		!(isfinite(o->overlap_score_credit) && o->overlap_score_credit >= 0))
		return fail(p, 422, "overlap_score_credit must be a finite, non-negative number");
	if (o->prefill_load_scale < 0)
		return fail(p, 422, "prefill_load_scale must be greater than or equal to 0");
	if (o->temperature < 0)
		return fail(p, 422, "router_temperature must be greater than or equal to 0");
	if (o->shared_cache_multiplier < 0 || o->shared_cache_multiplier > 1)
		return fail(p, 422, "shared_cache_multiplier must be between 0 and 1");
	return 0;
}

static int override(struct kvp_parse *p, struct kvp_override *o)
{
	struct kvp_json_val v;
	double weight = NAN;
	*o = (struct kvp_override){NAN, NAN, NAN, NAN, KVP_UNSET, KVP_UNSET};
	if (!present(p->root, "router_config_override", &v))
		return 0;
	if (kvp_json_type(v) != KVP_JSON_OBJ)
		return wrong(p, "router_config_override", "an object", v);
	int rc = opt_num(p, v, "overlap_score_weight", &weight);
	if (!rc && weight < 0)
		return fail(p, 422, "overlap_score_weight must be greater than or equal to 0");
	if (!rc && !isnan(weight)) {
		o->prefill_load_scale = weight;
		o->overlap_score_credit = weight == 0.0 ? 0.0 : NAN;
	}
	rc = rc ? rc : opt_num(p, v, "overlap_score_credit", &o->overlap_score_credit);
	rc = rc ? rc : opt_num(p, v, "prefill_load_scale", &o->prefill_load_scale);
	rc = rc ? rc : opt_num(p, v, "router_temperature", &o->temperature);
	rc = rc ? rc : opt_num(p, v, "shared_cache_multiplier", &o->shared_cache_multiplier);
	rc = rc ? rc : opt_bool(p, v, "assume_kv_reuse", &o->assume_kv_reuse);
	rc = rc ? rc : opt_bool(p, v, "track_prefill_tokens", &o->track_prefill_tokens);
	return rc ? rc : override_bounds(p, o);
}

static int partition(struct kvp_parse *p, struct kvp_str *model, struct kvp_str *group)
{
	static const struct kvp_str dflt = {"default", 7};
	*model = *group = dflt;
	int rc = opt_str(p, p->root, "model_name", KVP_NAME_MAX, model);
	return rc ? rc : opt_str(p, p->root, "routing_group", KVP_NAME_MAX, group);
}

static int worker_filters(struct kvp_parse *p, struct kvp_select_request *q)
{
	struct kvp_json_val v;
	if (present(p->root, "pinned_worker", &v)) {
		enum kvp_tristate has_w, has_r;
		uint64_t rank = 0;
		if (kvp_json_type(v) != KVP_JSON_OBJ)
			return wrong(p, "pinned_worker", "an object", v);
		int rc = opt_int(p, v, "worker_id", UINT64_MAX, &q->pinned_worker_id, &has_w);
		rc = rc ? rc : opt_int(p, v, "dp_rank", UINT32_MAX, &rank, &has_r);
		if (rc)
			return rc;
		if (has_w != KVP_YES || has_r != KVP_YES)
			return fail(p, 422, "pinned_worker: worker_id and dp_rank are required");
		q->pinned_dp_rank = (uint32_t)rank;
		q->has_pinned = KVP_YES;
	}
	if (present(p->root, "allowed_worker_ids", &v)) {
		size_t n = kvp_json_len(v);
		uint64_t *ids = room(&p->allowed, n, sizeof(*ids));
		if (!ids)
			return fail(p, 500, "out of memory");
		if (kvp_json_u64s(v, ids, n, &n))
			return fail(p, 422, "allowed_worker_ids: expected an array of integers in 0..2^64-1");
		q->allowed_worker_id = ids;
		q->allowed_cnt = (uint32_t)n;
	}
	return 0;
}

static int required_taints(struct kvp_parse *p, struct kvp_json_val c, struct kvp_select_request *q)
{
	struct kvp_json_val v;
	if (!present(c, "required_taints", &v))
		return 0;
	if (kvp_json_type(v) != KVP_JSON_ARR)
		return wrong(p, "required_taints", "an array of strings", v);
	struct kvp_str *t = room(&p->required, kvp_json_len(v), sizeof(*t));
	if (!t)
		return fail(p, 500, "out of memory");
	struct kvp_json_iter it = kvp_json_each(v);
	while (kvp_json_next(&it)) {
		if (kvp_json_str(it.val, &t[q->required_cnt].ptr, &t[q->required_cnt].len))
			return wrong(p, "required_taints", "strings", it.val);
		q->required_cnt++;
	}
	q->required_taint = t;
	return 0;
}

static int preferred_taints(struct kvp_parse *p, struct kvp_json_val c, struct kvp_select_request *q)
{
	struct kvp_json_val v;
	if (!present(c, "preferred_taints", &v))
		return 0;
	if (kvp_json_type(v) != KVP_JSON_OBJ)
		return wrong(p, "preferred_taints", "an object", v);
	struct kvp_taint_pref *t = room(&p->preferred, kvp_json_len(v), sizeof(*t));
	if (!t)
		return fail(p, 500, "out of memory");
	struct kvp_json_iter it = kvp_json_each(v);
	while (kvp_json_next(&it)) {
		double w;
		if (kvp_json_double(it.val, &w))
			return wrong(p, "preferred_taints", "numbers", it.val);
		struct kvp_taint_pref *e = &t[q->preferred_cnt++];
		e->taint.ptr = it.key;
		e->taint.len = it.key_len;
		e->weight = (float)w;
	}
	q->preferred_taint = t;
	return 0;
}

static int constraints(struct kvp_parse *p, struct kvp_select_request *q)
{
	struct kvp_json_val c;
	if (kvp_json_get(p->root, "routing_constraints", &c))
		return 0;
	if (kvp_json_type(c) != KVP_JSON_OBJ)
		return wrong(p, "routing_constraints", "an object", c);
	int rc = required_taints(p, c, q);
	return rc ? rc : preferred_taints(p, c, q);
}

static int session_context(struct kvp_parse *p, struct kvp_str *session)
{
	struct kvp_json_val c, v;
	struct kvp_str s = {NULL, 0};
	enum kvp_tristate final_turn;
	if (!present(p->root, "session_context", &c))
		return 0;
	if (kvp_json_type(c) != KVP_JSON_OBJ)
		return wrong(p, "session_context", "an object", c);
	if (!present(c, "session_id", &v))
		return fail(p, 422, "session_context: session_id is required");
	int rc = opt_str(p, c, "session_id", SIZE_MAX, session);
	rc = rc ? rc : opt_str(p, c, "parent_session_id", SIZE_MAX, &s);
	rc = rc ? rc : opt_bool(p, c, "session_final", &final_turn);
	if (!rc && present(c, "input_trigger", &v) && !kvp_json_str_is(v, "user_message") &&
		!kvp_json_str_is(v, "tool_result") && !kvp_json_str_is(v, "other"))
		rc = fail(p, 422, "input_trigger: expected user_message, tool_result or other");
	return rc;
}

static int affinity_target(struct kvp_parse *p, struct kvp_select_request *q)
{
	struct kvp_json_val v;
	uint64_t rank = 0;
	if (!present(p->root, "affinity_target", &v))
		return 0;
	if (kvp_json_type(v) != KVP_JSON_OBJ)
		return wrong(p, "affinity_target", "an object", v);
	int rc = opt_int(p, v, "worker_id", UINT64_MAX, &q->target_worker_id, &q->has_target);
	rc = rc ? rc : opt_int(p, v, "dp_rank", UINT32_MAX, &rank, &q->has_target_rank);
	if (!rc && q->has_target != KVP_YES)
		rc = fail(p, 422, "affinity_target: worker_id is required");
	q->target_dp_rank = (uint32_t)rank;
	return rc;
}

/* scheduling_hints takes what the queue uses and checks what only session affinity does. */
static int scheduling_hints(struct kvp_parse *p, struct kvp_select_request *q)
{
	struct kvp_json_val v;
	uint64_t priority = 0;
	enum kvp_tristate has;
	int flag;
	int rc = opt_num(p, p->root, "priority_jump", &q->priority_jump);
	rc = rc ? rc : opt_int(p, p->root, "strict_priority", UINT32_MAX, &priority, &has);
	rc = rc ? rc : opt_str(p, p->root, "session_id", SIZE_MAX, &q->session_id);
	rc = rc ? rc : session_context(p, &q->session_id);
	if (rc)
		return rc;
	q->strict_priority = (uint32_t)priority;
	if (kvp_json_get(p->root, "advisory", &v) == KVP_OK) {
		if (kvp_json_bool(v, &flag))
			return wrong(p, "advisory", "a boolean", v);
		q->advisory = flag ? KVP_YES : KVP_NO;
	}
	return 0;
}

int kvp_parse_select(struct kvp_parse *p, struct kvp_select_request *q)
{
	enum kvp_tristate has;
	uint64_t expected = 0;
	memset(q, 0, sizeof(*q));
	int rc = partition(p, &q->model, &q->group);
	rc = rc ? rc : opt_str(p, p->root, "selection_id", KVP_SELECTION_ID_MAX, &q->selection_id);
	rc = rc ? rc : prompt(p, &q->prompt);
	rc = rc ? rc : override(p, &q->override);
	rc = rc ? rc : opt_int(p, p->root, "expected_output_tokens", UINT32_MAX, &expected, &has);
	rc = rc ? rc : worker_filters(p, q);
	rc = rc ? rc : constraints(p, q);
	rc = rc ? rc : affinity_target(p, q);
	rc = rc ? rc : scheduling_hints(p, q);
	q->expected_output_tok = (uint32_t)expected;
	return rc;
}

int kvp_parse_reserve(struct kvp_parse *p, struct kvp_reserve_request *q, enum kvp_tristate *has_worker)
{
	enum kvp_tristate has;
	uint64_t expected = 0, rank = 0;
	memset(q, 0, sizeof(*q));
	q->track_prefill_tokens = KVP_UNSET;
	int rc = partition(p, &q->model, &q->group);
	rc = rc ? rc : opt_str(p, p->root, "selection_id", KVP_SELECTION_ID_MAX, &q->selection_id);
	if (!rc && !q->selection_id.ptr)
		rc = fail(p, 422, "selection_id is required");
	rc = rc ? rc : opt_int(p, p->root, "worker_id", UINT64_MAX, &q->worker_id, has_worker);
	rc = rc ? rc : opt_int(p, p->root, "dp_rank", UINT32_MAX, &rank, &has);
	rc = rc ? rc : prompt(p, &q->prompt);
	rc = rc ? rc : override(p, &q->override);
	rc = rc ? rc : opt_int(p, p->root, "expected_output_tokens", UINT32_MAX, &expected, &has);
	rc = rc ? rc
		: opt_int(p, p->root, "effective_prefill_tokens", UINT64_MAX, &q->effective_prefill_tok,
			  &q->has_effective_prefill);
	rc = rc ? rc : opt_bool(p, p->root, "track_prefill_tokens", &q->track_prefill_tokens);
	q->dp_rank = (uint32_t)rank;
	q->expected_output_tok = (uint32_t)expected;
	return rc;
}

int kvp_parse_output_block(struct kvp_parse *p, double *fraction, enum kvp_tristate *has)
{
	*fraction = NAN;
	int rc = opt_num(p, p->root, "decay_fraction", fraction);
	*has = isnan(*fraction) ? KVP_NO : KVP_YES;
	return rc;
}
