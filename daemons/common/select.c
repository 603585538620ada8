#include "daemons/common/select_priv.h"
#include <kvpick/clock.h>

#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#define PREFETCH_RANKS 8  /* loads fetched ahead */
#define REPORT_EVERY 32   /* selections of a partition, before others are told what they found */
#define VIEW_RETRY_MAX 16 /* catalogue changes tolerated while one view is read */

int kvp_sel_fail(struct kvp_selection *s, int status, const char *fmt, ...)
{
	va_list ap;
	va_start(ap, fmt);
	int len = vsnprintf(s->err, sizeof(s->err), fmt, ap);
	va_end(ap);
	s->err_len = len < (int)sizeof(s->err) ? (size_t)len : sizeof(s->err) - 1;
	kvp_ctr_add(s->ctr, KVP_CTR_SELECT_REFUSED, 1);
	return status;
}

int kvp_sel_fail_at(struct kvp_selection *s, int status, const struct kvp_str *name, const char *text)
{
	size_t at = 0, most = sizeof(s->err) - 1;
	for (; *text && at < most; text++) {
		struct kvp_str piece = {text, 1};
		if (*text == '%')
			piece = *name++;
		size_t len = piece.len < most - at ? piece.len : most - at;
		if (len)
			memcpy(s->err + at, piece.ptr, len);
		at += len;
	}
	s->err[at] = 0;
	s->err_len = at;
	kvp_ctr_add(s->ctr, KVP_CTR_SELECT_REFUSED, 1);
	return status;
}

void *kvp_sel_scratch(struct kvp_scratch *m, size_t n, size_t elem_bytes)
{
	size_t want = (n ? n : 1) * elem_bytes;
	if (want > m->bytes) {
		void *grown = malloc(want + want / 2);
		if (!grown)
			return NULL;
		free(m->ptr);
		m->ptr = grown;
		m->bytes = want + want / 2;
	}
	return m->ptr;
}

size_t kvp_selection_error_len(const struct kvp_selection *s)
{
	return s->err_len;
}

const char *kvp_selection_error(const struct kvp_selection *s)
{
	return s->err;
}

static void report_part(struct kvp_selection *s, uint32_t part)
{
	struct kvp_sel_hits *h = &s->hits[part];
	if (h->asked)
		kvp_hits_add(&s->region->hits, part, h->asked, h->found);
	*h = (struct kvp_sel_hits){0, 0};
}

void kvp_sel_note(struct kvp_selection *s, enum kvp_tristate found)
{
	struct kvp_sel_hits *h = &s->hits[s->part_idx];
	if (found == KVP_UNSET)
		return;
	h->found += found == KVP_YES;
	if (++h->asked >= REPORT_EVERY)
		report_part(s, s->part_idx);
}

void kvp_select_report(struct kvp_selection *s)
{
	for (uint32_t p = 0; p < KVP_PART_MAX; p++)
		report_part(s, p);
}

void kvp_select_time(struct kvp_selection *s, struct kvp_select_times *t)
{
	s->times = t;
}

uint64_t kvp_sel_clock(const struct kvp_selection *s)
{
	return s->times ? kvp_clock_ns(CLOCK_THREAD_CPUTIME_ID) : 0;
}

void kvp_sel_hashed(struct kvp_selection *s, uint64_t from)
{
	if (!s->times)
		return;
	s->times->hash_ns += kvp_sel_clock(s) - from;
	s->times->hash_cnt++;
}

void kvp_sel_booked(struct kvp_selection *s, uint64_t from)
{
	if (!s->times)
		return;
	s->times->book_ns += kvp_sel_clock(s) - from;
	s->times->book_cnt++;
}

void kvp_select_seed(struct kvp_selection *s, uint64_t seed)
{
	kvp_rng_seed(&s->rng, seed);
}

struct kvp_selection *kvp_select_open(struct kvp_region *r, kvp_owner owner,
	struct kvp_ctr_column_shm *column, const struct kvp_select_settings *set)
{
	/* The hasher inside wants more alignment than calloc gives. */
	struct kvp_selection *s = aligned_alloc(_Alignof(struct kvp_selection), sizeof(*s));
	uint64_t seed;
	if (!s)
		return NULL;
	memset(s, 0, sizeof(*s));
	s->region = r;
	s->owner = owner;
	s->ctr = column;
	s->set = *set;
	kvp_book_attach(&r->book, owner, column);
	kvp_book_publish(&r->book, &r->lifecycle);
	kvp_pending_attach(&r->pending, owner, column);
	kvp_affinity_attach(&r->affinity, owner, column);
	kvp_queue_attach(&r->queue, owner, &r->slots, column);
	if (getrandom(&seed, sizeof(seed), 0) != (ssize_t)sizeof(seed))
		seed = kvp_clock_real_ns();
	kvp_rng_seed(&s->rng, seed);
	return s;
}

void kvp_selection_close(struct kvp_selection *s)
{
	if (!s)
		return;
	struct kvp_scratch *all[] = {&s->scratch_cand, &s->scratch_local, &s->scratch_seq, &s->scratch_dp,
		&s->scratch_tiers, &s->scratch_filter, &s->scratch_cand_rank, &s->scratch_words,
		&s->scratch_entry, &s->scratch_lane, &s->scratch_answer, &s->scratch_taint};
	for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++)
		free(all[i]->ptr);
	for (uint32_t i = 0; i < KVP_PART_MAX; i++) {
		free(s->view[i].rank_mem.ptr);
		free(s->view[i].taint_mem.ptr);
	}
	kvp_sel_local_close(s->local);
	free(s);
}

uint32_t kvp_selection_schedulable(struct kvp_selection *s)
{
	return kvp_cat_schedulable_cnt(&s->region->cat, KVP_PART_AGGREGATED);
}

int kvp_selection_worker_next(struct kvp_selection *s, uint32_t *cursor, struct kvp_worker_row *row)
{
	const struct kvp_cat *cat = &s->region->cat;
	const struct kvp_cat_worker_info *w = &s->worker;
	while (*cursor < kvp_cat_worker_max(cat)) {
		if (kvp_cat_worker_info(cat, (*cursor)++, &s->worker) != KVP_OK)
			continue;
		*row = (struct kvp_worker_row){.worker_id = w->worker_id,
			.role = w->role,
			.model = {w->model_len ? w->model : NULL, w->model_len},
			.group = {w->group_len ? w->group : NULL, w->group_len},
			.endpoint = {w->endpoint_len ? w->endpoint : NULL, w->endpoint_len},
			.start_rank = w->start_rank,
			.size = w->size,
			.is_schedulable = w->lifecycle == KVP_LIFE_SCHEDULABLE ? KVP_YES : KVP_NO};
		return 1;
	}
	return 0;
}

static int not_ready(struct kvp_selection *s, struct kvp_str model, struct kvp_str group)
{
	const struct kvp_str name[] = {model, group};
	return kvp_sel_fail_at(s, 503, name, "no schedulable workers for model=% routing_group=%");
}

/* find_partition sets part_idx and part; 0 or 503. */
static int find_partition(
	struct kvp_selection *s, enum kvp_part_role role, struct kvp_str model, struct kvp_str group)
{
	const struct kvp_cat *cat = &s->region->cat;
	if (kvp_cat_schedulable_cnt(cat, role) == 0)
		return kvp_sel_fail(s, 503, "no schedulable workers are available");
	if (kvp_cat_part_find(cat, role, model.ptr, (uint32_t)model.len, group.ptr, (uint32_t)group.len,
		    &s->part_idx) ||
		kvp_cat_part_get(cat, s->part_idx, &s->part))
		return not_ready(s, model, group);
	return 0;
}

/* copy_ranks copies ranks and taints of a shared view; KVP_ERR_FULL without memory, KVP_ERR_AGAIN when the
 * view was replaced meanwhile. */
static int copy_ranks(const struct kvp_cat *cat, const struct kvp_cat_view *v, struct kvp_sel_view *c)
{
	struct kvp_sel_rank *rank = kvp_sel_scratch(&c->rank_mem, v->cnt, sizeof(*rank));
	uint64_t *taint = kvp_sel_scratch(&c->taint_mem, v->taint_cnt, sizeof(*taint));
	uint32_t at = 0;
	c->cnt = 0;
	if (!rank || !taint)
		return KVP_ERR_FULL;
	for (uint32_t k = 0; k < v->cnt; k++) {
		const struct kvp_rank_view *rv = &v->rank[k];
		const uint64_t *t;
		uint32_t n = kvp_cat_view_taints(v, k, &t);
		n = n > v->taint_cnt - at ? v->taint_cnt - at : n;
		kvp_copy_out(taint + at, t, n * sizeof(uint64_t));
		rank[k] = (struct kvp_sel_rank){.worker_id = kvp_ld_rlx_u64(&rv->worker_id),
			.dp_rank = kvp_ld_rlx_u32(&rv->dp_rank),
			.rank_slot = kvp_ld_rlx_u32(&rv->rank_slot),
			.rank_gen = kvp_ld_rlx_u32(&rv->rank_gen),
			.worker_idx = kvp_ld_rlx_u32(&rv->worker_idx),
			.index_slot = kvp_ld_rlx_u32(&rv->index_slot),
			.index_gen = kvp_ld_rlx_u32(&rv->index_gen),
			.kv_hint = kvp_ld_rlx_u64(&rv->kv_hint),
			.taint_off = at,
			.taint_cnt = n,
			.total_kv_blocks = kvp_ld_rlx_u64(&rv->total_kv_blocks),
			.max_num_batched_tokens = kvp_ld_rlx_u64(&rv->max_num_batched_tokens)};
		at += n;
	}
	if (kvp_cat_view_valid(cat, v) != KVP_OK)
		return KVP_ERR_AGAIN;
	c->version = v->version;
	c->cnt = v->cnt;
	return KVP_OK;
}

/* use_view points the handle at its own copy of the partition's ranks, renewed when another view was
 * published: 0, 500 or 503. */
static int use_view(struct kvp_selection *s, struct kvp_str model, struct kvp_str group)
{
	const struct kvp_cat *cat = &s->region->cat;
	struct kvp_sel_view *c = &s->view[s->part_idx];
	struct kvp_cat_view v;
	for (int i = 0; i < VIEW_RETRY_MAX; i++) {
		if (kvp_cat_view_begin(cat, s->part_idx, &v) || v.cnt == 0)
			return not_ready(s, model, group);
		int rc = c->cnt && c->version == v.version ? KVP_OK : copy_ranks(cat, &v, c);
		if (rc == KVP_ERR_FULL)
			return kvp_sel_fail(s, 500, "out of memory");
		if (rc == KVP_OK) {
			s->rank = c->rank_mem.ptr;
			s->taint = c->taint_mem.ptr;
			s->rank_cnt = c->cnt;
			return 0;
		}
		kvp_ctr_add(s->ctr, KVP_CTR_SELECT_VIEW_RETRY, 1);
	}
	return kvp_sel_fail(s, 503, "the worker catalogue changes too fast; try again");
}

static uint32_t depth_of(const struct kvp_radix_match *m, uint32_t at)
{
	return at / 64 < m->word_cnt && m->active[at / 64] >> (at % 64) & 1 ? m->depth[at] : 0;
}

/* What is predicted beyond the device's blocks counts as on the device, too; blocks of lower tiers that it
 * covers are not counted twice. */
static void add_predicted(struct kvp_score_tiers *t, uint32_t predicted_blk)
{
	uint32_t more = predicted_blk > t->dev_blk ? predicted_blk - t->dev_blk : 0;
	uint32_t host = more < t->host_blk ? more : t->host_blk;
	uint32_t disk = more - host < t->disk_blk ? more - host : t->disk_blk;
	t->dev_blk += more;
	t->host_blk -= host;
	t->disk_blk -= disk;
}

/* Blocks of the prompt that the last walks found at a rank. */
static struct kvp_score_tiers cached_of(const struct kvp_selection *s, const struct kvp_sel_rank *r)
{
	const struct kvp_radix_match *m = &s->match;
	uint32_t at = r->index_slot;
	struct kvp_score_tiers t = {.dev_blk = depth_of(m, at)};
	if (at / 64 < m->word_cnt && m->low_any) {
		t.host_blk = kvp_radix_match_ext(m, KVP_RADIX_HOST, at);
		t.disk_blk = kvp_radix_match_ext(m, KVP_RADIX_DISK, at) +
			     kvp_radix_match_ext(m, KVP_RADIX_EXTERNAL, at);
	}
	if (s->predicted.longest)
		add_predicted(&t, depth_of(&s->predicted, at));
	if ((t.dev_blk | t.host_blk | t.disk_blk) && kvp_cat_index_gen(&s->region->cat, at) != r->index_gen)
		return (struct kvp_score_tiers){0};
	return t;
}

/* find walks a tree for the prompt; 1 if something was found. */
static int find(struct kvp_selection *s, const struct kvp_radix *tree, struct kvp_radix_query *q,
	struct kvp_radix_match *m)
{
	if (!tree->shm || kvp_radix_find(tree, q, m) != KVP_OK) {
		m->longest = m->low_any = m->word_cnt = 0;
		return 0;
	}
	if (m->retries) {
		kvp_ctr_add(s->ctr, KVP_CTR_RADIX_RETRIES, m->retries);
		kvp_ctr_add(s->ctr, KVP_CTR_RADIX_GAVE_UP, m->gave_up);
	}
	return m->longest || m->low_any;
}

/* A slot that changed hands during the walk counts 0. With a configured credit of 0 the cache is not
 * asked. */
enum kvp_tristate kvp_sel_look_up(struct kvp_selection *s)
{
	struct kvp_radix_query q = {.part_salt = s->part.key_salt,
		.local = s->prompt.local,
		.local_cnt = s->prompt.local_cnt,
		.total_blk = s->prompt.blk_cnt,
		.more = s->prompt.form == KVP_PROMPT_TOKENS ? kvp_sel_prompt_more : NULL,
		.ctx = s};
	enum kvp_tristate held = KVP_UNSET;
	uint32_t unindexed = 0;
	int wanted = q.total_blk && s->set.weights.overlap_score_credit != 0, found = 0;
	if (wanted) {
		if (s->local)
			kvp_sel_local_age(s->local);
		found = find(s, &s->region->radix, &q, &s->match);
		held = found ? KVP_YES : KVP_NO;
		found |= find(s, &s->region->predicted, &q, &s->predicted);
	}
	for (uint32_t i = 0; i < s->rank_cnt; i++) {
		struct kvp_sel_rank *r = &s->rank[i];
		r->cached = (struct kvp_score_tiers){0};
		if (r->index_slot == KVP_INDEX_NONE) {
			unindexed++;
			continue;
		}
		if (found)
			r->cached = cached_of(s, r);
	}
	if (unindexed)
		kvp_ctr_add(s->ctr, KVP_CTR_SELECT_UNINDEXED, unindexed);
	return held;
}

void kvp_sel_read_load(struct kvp_selection *s, uint32_t i)
{
	const struct kvp_book *b = &s->region->book;
	const struct kvp_sel_prompt *p = &s->prompt;
	struct kvp_sel_rank *r = &s->rank[i];
	if (i + PREFETCH_RANKS < s->rank_cnt)
		kvp_load_prefetch(b, s->rank[i + PREFETCH_RANKS].rank_slot);
	if (s->set.track_active_blocks == KVP_YES && p->seq_cnt && i + PREFETCH_RANKS / 2 < s->rank_cnt)
		kvp_active_prefetch(b, s->rank[i + PREFETCH_RANKS / 2].rank_slot, p->seq[0]);
	kvp_load_read(b, r->rank_slot, &r->load);
	r->additional_blk = 0;
	if (s->set.track_active_blocks == KVP_YES)
		r->additional_blk = p->seq_cnt - (r->load.requests ? kvp_active_depth(b, r->rank_slot,
									     r->rank_gen, p->seq, p->seq_cnt)
								   : 0);
}

int kvp_sel_open_partition(
	struct kvp_selection *s, enum kvp_part_role role, struct kvp_str model, struct kvp_str group)
{
	int status = find_partition(s, role, model, group);
	return status ? status : use_view(s, model, group);
}

int kvp_sel_open_part(struct kvp_selection *s, uint32_t part)
{
	struct kvp_part_info info;
	s->part_idx = part;
	s->rank_cnt = 0;
	if (kvp_cat_part_info(&s->region->cat, part, &info) ||
		kvp_cat_part_get(&s->region->cat, part, &s->part))
		return kvp_sel_fail(s, 503, "no schedulable workers are available");
	return use_view(s, (struct kvp_str){info.model, info.model_len},
		(struct kvp_str){info.group, info.group_len});
}

void kvp_select_request_init(struct kvp_select_request *q)
{
	memset(q, 0, sizeof(*q));
	q->prompt.eagle = KVP_UNSET;
	q->override = (struct kvp_override){NAN, NAN, NAN, NAN, KVP_UNSET, KVP_UNSET};
}

void kvp_reserve_request_init(struct kvp_reserve_request *q)
{
	memset(q, 0, sizeof(*q));
	q->prompt.eagle = KVP_UNSET;
	q->override = (struct kvp_override){NAN, NAN, NAN, NAN, KVP_UNSET, KVP_UNSET};
	q->track_prefill_tokens = KVP_UNSET;
}

void kvp_select_defaults(struct kvp_select_settings *set)
{
	*set = (struct kvp_select_settings){.weights = {.overlap_score_credit = 1.0,
						    .prefill_load_scale = 1.0,
						    .host_weight = 0.75,
						    .disk_weight = 0.25},
		.track_prefill_tokens = KVP_YES,
		.track_active_blocks = KVP_YES,
		.assume_kv_reuse = KVP_YES,
		.decode_busy_threshold = NAN,
		.prefill_busy_threshold = NAN,
		.refresh_after_s = 10,
		.records_routing = KVP_NO,
		.decode_learns = KVP_YES,
		.owner_kind = KVP_BOOK_FOR_NODE};
}
