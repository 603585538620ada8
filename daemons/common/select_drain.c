/* Requests that wait, from the side of whoever gave load back: whose turn it is, choice and booking. */
#include "daemons/common/select_priv.h"
#include <kvpick/clock.h>
#include <kvpick/mix.h>

#include <string.h>

#define PASS_MAX 32 /* looks at one partition in a row, before the own clients get their turn */

enum lane_state { LANE_UNKNOWN, LANE_FREE, LANE_BLOCKED, LANE_EMPTY };

/* Entries of one class that wait for the same: any rank, or exactly one. Only the head is looked at. */
struct lane {
	uint64_t worker_id;
	uint32_t class, dp_rank;
	enum kvp_tristate has_pinned;
	enum lane_state state;
	uint32_t head; /* entry */
};

struct pass {
	struct kvp_queue_entry *entry;
	uint32_t *lane_of; /* of each entry; NO_LANE = it is gone */
	struct lane *lane;
	uint32_t *bucket; /* hash of lanes: lane + 1 */
	uint32_t cnt, lane_cnt, bucket_mask;
	struct kvp_mix mix; /* clients choose whom they wait for */
	uint32_t left[KVP_POLICY_CLASS_MAX]; /* entries of each class */
	const struct kvp_policy_profile *profile;
	struct kvp_drr turns;
};
#define NO_LANE UINT32_MAX

static const struct kvp_policy_class *class_of(const struct pass *p, uint32_t class)
{
	return &p->profile->class[class < p->profile->class_cnt ? class : 0];
}

/* ---- lanes ---- */

static int same_lane(const struct lane *l, const struct kvp_queue_entry *e)
{
	return l->class == e->class && l->has_pinned == e->has_pinned &&
	       (e->has_pinned != KVP_YES ||
		       (l->worker_id == e->pinned_worker_id && l->dp_rank == e->pinned_dp_rank));
}

static uint32_t lane_for(struct pass *p, const struct kvp_queue_entry *e)
{
	uint64_t k = e->has_pinned == KVP_YES ? kvp_mix_u64(&p->mix, e->pinned_worker_id) : 0;
	uint64_t rank = e->has_pinned == KVP_YES ? e->pinned_dp_rank + 1ull : 0;
	uint32_t at = (uint32_t)kvp_mix_u64(&p->mix, k ^ (rank << 8 | e->class)) & p->bucket_mask;
	for (; p->bucket[at]; at = (at + 1) & p->bucket_mask)
		if (same_lane(&p->lane[p->bucket[at] - 1], e))
			return p->bucket[at] - 1;
	p->lane[p->lane_cnt] = (struct lane){.worker_id = e->pinned_worker_id,
		.class = e->class,
		.dp_rank = e->pinned_dp_rank,
		.has_pinned = e->has_pinned,
		.state = LANE_EMPTY};
	p->bucket[at] = ++p->lane_cnt;
	return p->lane_cnt - 1;
}

static void offer_head(struct pass *p, uint32_t i)
{
	struct lane *l = &p->lane[p->lane_of[i]];
	if (l->state == LANE_EMPTY || kvp_order_before(&p->entry[i].key, &p->entry[l->head].key)) {
		l->head = i;
		l->state = LANE_UNKNOWN;
	}
}

static int open_pass(struct kvp_selection *s, uint32_t part, struct pass *p)
{
	uint32_t cap = kvp_queue_waiting(&s->region->queue, part, KVP_POLICY_CLASS_MAX) + 16, buckets = 64;
	while (buckets < 2 * cap)
		buckets *= 2;
	p->entry = kvp_sel_scratch(&s->scratch_entry, cap, sizeof(*p->entry));
	uint64_t bytes = cap * (sizeof(struct lane) + 4) + buckets * 4ull;
	uint8_t *mem = kvp_sel_scratch(&s->scratch_lane, bytes, 1);
	if (!p->entry || !mem)
		return KVP_ERR_SYS;
	p->lane = (struct lane *)(void *)mem;
	p->lane_of = (uint32_t *)(void *)(mem + cap * sizeof(struct lane));
	p->bucket = p->lane_of + cap;
	p->bucket_mask = buckets - 1;
	p->mix = kvp_mix_of(s->region->geom.salt);
	p->lane_cnt = 0;
	memset(p->bucket, 0, buckets * 4ull);
	memset(p->left, 0, sizeof(p->left));
	p->cnt = kvp_queue_list(&s->region->queue, part, p->entry, cap);
	for (uint32_t i = 0; i < p->cnt; i++) {
		p->lane_of[i] = lane_for(p, &p->entry[i]);
		p->left[p->entry[i].class]++;
		offer_head(p, i);
	}
	return KVP_OK;
}

/* remove takes an entry out and finds its lane's next head. */
static void remove_entry(struct pass *p, uint32_t i)
{
	uint32_t lane = p->lane_of[i];
	p->lane_of[i] = NO_LANE;
	p->left[p->entry[i].class]--;
	if (p->lane[lane].head != i)
		return;
	p->lane[lane].state = LANE_EMPTY;
	for (uint32_t k = 0; k < p->cnt; k++)
		if (p->lane_of[k] == lane)
			offer_head(p, k);
}

/* ---- one request ---- */

/* The overlap of then: both lists are sorted by worker and rank. A rank that was taken anew holds nothing. */
static void restore_cached(struct kvp_selection *s, const struct kvp_sel_waiting *w)
{
	const uint64_t *c = w->cached, *end = c + KVP_SEL_CACHED_WORDS * (size_t)w->cached_cnt;
	for (uint32_t i = 0; i < s->rank_cnt; i++) {
		struct kvp_sel_rank *r = &s->rank[i];
		r->cached = (struct kvp_score_tiers){0};
		while (c < end && (c[0] < r->worker_id || (c[0] == r->worker_id && c[1] >> 32 < r->dp_rank)))
			c += KVP_SEL_CACHED_WORDS;
		if (c < end && c[0] == r->worker_id && c[1] >> 32 == r->dp_rank &&
			(uint32_t)c[1] == r->rank_gen)
			r->cached = (struct kvp_score_tiers){.dev_blk = (uint32_t)(c[2] >> 32),
				.host_blk = (uint32_t)c[2],
				.disk_blk = (uint32_t)c[3]};
	}
}

static int choose(struct kvp_selection *s, struct kvp_sel_waiting *w, uint64_t resv, uint32_t *chosen,
	struct kvp_select_answer *a, uint64_t *booked)
{
	int status = resv ? kvp_sel_book_chosen(s, &w->q, resv, w->track, chosen)
			  : kvp_sel_pick(s, &w->q, w->track, chosen);
	if (!status)
		*booked = resv;
	status = status ? status : kvp_sel_worker_of(s, &s->rank[*chosen]);
	return status ? status : kvp_sel_fill_answer(s, *chosen, w->track, a);
}

/* serve chooses and books for a record and answers it. 0 = it was not there any more. */
static int serve(struct kvp_selection *s, const struct kvp_queue_entry *e)
{
	struct kvp_book *b = &s->region->book;
	struct kvp_select_answer a;
	struct kvp_sel_waiting w;
	uint64_t resv = 0, booked = 0;
	uint32_t chosen = 0;
	if (kvp_queue_take(&s->region->queue, b, e->h, &resv))
		return 0;
	memset(&a, 0, sizeof(a));
	int rc = kvp_sel_load(s, e->h, KVP_SEL_LOAD_ALL, &w);
	uint64_t now_ns = kvp_clock_mono_ns();
	if (!rc && kvp_policy_refresh_due(
			   s->set.refresh_after_s, now_ns - e->posted_ns, s->prompt.local_cnt != 0)) {
		kvp_sel_look_up(s);
		kvp_ctr_add(s->ctr, KVP_CTR_QUEUE_REFRESHED, 1);
	} else if (!rc) {
		restore_cached(s, &w);
	}
	int status = rc ? kvp_sel_fail(s, 500, "the waiting request was lost")
			: choose(s, &w, resv, &chosen, &a, &booked);
	s->stored = NULL;
	if (status) {
		if (booked)
			kvp_resv_free(b, booked);
		else if (resv)
			kvp_resv_abandon(b, resv);
		booked = 0;
	}
	uint32_t idx = status ? 0 : s->rank[chosen].worker_idx;
	rc = kvp_sel_answer_put(s, e->h, booked, status ? status : 200, &a, idx);
	if (rc && rc != KVP_ERR_NOTFOUND) { /* no room for a long answer: a short one always fits */
		if (booked)
			kvp_resv_free(b, booked);
		booked = 0;
		kvp_sel_fail(s, 503, "no room in the queue for the answer");
		rc = kvp_sel_answer_put(s, e->h, 0, 503, NULL, 0);
	}
	if (rc == KVP_ERR_NOTFOUND && booked)
		kvp_resv_free(b, booked);
	return 1;
}

/* ---- turns ---- */

/* judge finds out whether a lane's head could go now. */
static void judge(struct kvp_selection *s, struct pass *p, struct lane *l)
{
	struct kvp_sel_waiting w;
	struct kvp_sel_survey sv = {0, 0, 0};
	while (l->state == LANE_UNKNOWN) {
		uint32_t head = l->head;
		const struct kvp_policy_class *class = class_of(p, l->class);
		if (kvp_sel_load(s, p->entry[head].h, KVP_SEL_LOAD_FILTERS, &w)) {
			s->stored = NULL;
			remove_entry(p, head);
			continue;
		}
		kvp_sel_survey(s, &w.q, class, KVP_SEL_LOOK_BUSY, &sv);
		s->stored = NULL;
		l->state = kvp_policy_pool_busy(class, sv.busy, sv.eligible) ? LANE_BLOCKED : LANE_FREE;
	}
}

/* better: the larger key; on a full tie the exact lane. */
static int better(const struct pass *p, const struct lane *a, const struct lane *b)
{
	const struct kvp_order_key *x = &p->entry[a->head].key, *y = &p->entry[b->head].key;
	if (kvp_order_before(x, y) || kvp_order_before(y, x))
		return kvp_order_before(x, y);
	return a->has_pinned == KVP_YES;
}

/* next_turn picks the entry that goes now; NO_LANE: nobody can. */
static uint32_t next_turn(struct kvp_selection *s, struct pass *p, uint32_t *class)
{
	struct kvp_drr_class c[KVP_POLICY_CLASS_MAX];
	struct lane *best[KVP_POLICY_CLASS_MAX] = {NULL};
	uint32_t n = p->profile->class_cnt;
	for (uint32_t i = 0; i < p->lane_cnt; i++) {
		struct lane *l = &p->lane[i];
		judge(s, p, l);
		if (l->state == LANE_FREE && (!best[l->class] || better(p, l, best[l->class])))
			best[l->class] = l;
	}
	for (uint32_t i = 0; i < n; i++) {
		const struct kvp_queue_entry *e = best[i] ? &p->entry[best[i]->head] : NULL;
		c[i] = (struct kvp_drr_class){.quantum = p->profile->class[i].quantum,
			.cost = e ? kvp_policy_cost(e->isl_tok, e->cached_tok) : 0,
			.waiting = p->left[i],
			.can_go = e != NULL};
	}
	int i = kvp_drr_pick(&p->turns, c, n);
	if (i < 0)
		return NO_LANE;
	*class = (uint32_t)i;
	return best[i]->head;
}

/* Whoever has nobody left to wait for is answered at once, also behind others. Asked once a view. */
static void answer_hopeless(struct kvp_selection *s, uint32_t part, struct pass *p)
{
	struct kvp_sel_view *v = &s->view[part];
	struct kvp_sel_waiting w;
	struct kvp_sel_survey sv;
	if (s->rank_cnt && v->drained == v->version)
		return;
	v->drained = v->version;
	for (uint32_t i = 0; i < p->cnt; i++) {
		int rc = kvp_sel_load(s, p->entry[i].h, KVP_SEL_LOAD_FILTERS, &w);
		if (!rc)
			rc = kvp_sel_survey(s, &w.q, NULL, KVP_SEL_LOOK_BUSY, &sv);
		s->stored = NULL;
		if (!rc && sv.eligible == 0) {
			serve(s, &p->entry[i]);
			remove_entry(p, i);
		}
	}
}

static void one_pass(struct kvp_selection *s, uint32_t part)
{
	struct kvp_part_info info;
	struct pass p;
	uint32_t class = 0, at;
	if (!s->set.policy || kvp_cat_part_info(&s->region->cat, part, &info))
		return;
	p.profile = kvp_policy_of(s->set.policy, (struct kvp_str){info.model, info.model_len});
	kvp_sel_open_part(s, part);
	if (open_pass(s, part, &p))
		return;
	answer_hopeless(s, part, &p);
	kvp_queue_turns(&s->region->queue, part, &p.turns);
	while ((at = next_turn(s, &p, &class)) != NO_LANE) {
		const struct kvp_queue_entry *e = &p.entry[at];
		int served = serve(s, e);
		remove_entry(&p, at);
		if (!served)
			continue;
		uint64_t cost = kvp_policy_cost(e->isl_tok, e->cached_tok);
		kvp_drr_take(&p.turns, p.profile->class_cnt, class, cost, p.left[class]);
		kvp_queue_turns_set(&s->region->queue, part, &p.turns);
		for (uint32_t i = 0; i < p.lane_cnt; i++) /* more load than before */
			if (p.lane[i].state == LANE_FREE)
				p.lane[i].state = LANE_UNKNOWN;
	}
	kvp_queue_turns_set(&s->region->queue, part, &p.turns);
}

void kvp_sel_drain(struct kvp_selection *s, uint32_t part)
{
	uint32_t seen;
	s->gate = NULL;
	if (kvp_queue_drain_begin(&s->region->queue, part, &seen))
		return;
	for (int i = 0; i < PASS_MAX; i++) {
		one_pass(s, part);
		if (kvp_queue_drain_end(&s->region->queue, part, &seen) == KVP_OK)
			return;
	}
	kvp_queue_drain_leave(&s->region->queue, part);
}

void kvp_sel_drain_all(struct kvp_selection *s)
{
	const struct kvp_queue *q = &s->region->queue;
	if (!kvp_queue_total(q))
		return;
	for (uint32_t p = 0; p < kvp_cat_part_cnt(&s->region->cat); p++)
		if (kvp_queue_waiting(q, p, KVP_POLICY_CLASS_MAX))
			kvp_sel_drain(s, p);
}

void kvp_selection_tend(struct kvp_selection *s)
{
	struct kvp_queue *q = &s->region->queue;
	if (kvp_queue_asked(q)) {
		kvp_sel_drain_all(s);
		return;
	}
	for (uint32_t p = 0; kvp_queue_total(q) && p < kvp_cat_part_cnt(&s->region->cat); p++)
		if (kvp_queue_stalled(q, p))
			kvp_sel_drain(s, p);
}
