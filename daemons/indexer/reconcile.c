/* daemons/indexer/reconcile.c — POST, PATCH and DELETE of a worker: from what is registered to what is
 * wanted, rank by rank. Unchanged ranks keep listener, blocks and bookings. */
#include <kvpick/clock.h>
#include <kvpick/hash.h>
#include <kvpick/point.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemons/common/log.h"
#include "daemons/indexer/indexer.h"

#define LOG_EVERY_NS 5000000000ull
#define RECORD_SPARE 128 /* bytes kept free for a reason that turns up late */
#define STATE_AGENT "state_agent_v2" /* such workers are no sources of router hints */

static char record_text[KVP_CAT_RECORD_MAX]; /* apply thread only */

__attribute__((format(printf, 3, 4))) static int refuse(struct kvp_idx *idx, int status, const char *fmt, ...)
{
	char text[512];
	va_list ap;
	va_start(ap, fmt);
	vsnprintf(text, sizeof(text), fmt, ap);
	va_end(ap);
	kvp_jw_reset(&idx->jw);
	kvp_jw_obj(&idx->jw);
	kvp_jw_kstr(&idx->jw, "error", text);
	kvp_jw_end(&idx->jw);
	kvp_ctr_add(idx->ctr, KVP_CTR_IDX_CMD_REFUSED, 1);
	return status;
}

static void info_text(char *to, uint32_t *to_len, struct kvp_str s)
{
	uint32_t len = s.len < KVP_CAT_NAME_MAX ? (uint32_t)s.len : KVP_CAT_NAME_MAX;
	if (s.ptr)
		memcpy(to, s.ptr, len);
	*to_len = len;
}

/* Writes the record into the catalogue; its text stays in idx->jw for the reply. */
static int record_put(struct kvp_idx *idx, uint32_t widx, enum kvp_part_role role, uint32_t part,
	const struct kvp_wrec *rec, enum kvp_lifecycle life, const struct kvp_wrec_reasons *reasons)
{
	static struct kvp_cat_worker_info info; /* apply thread only */
	memset(&info, 0, offsetof(struct kvp_cat_worker_info, endpoint));
	info.worker_id = rec->worker_id;
	info.part = part;
	info.role = role;
	info.lifecycle = life;
	info.size = kvp_wrec_ranks(rec, &info.start_rank);
	info_text(info.endpoint, &info.endpoint_len, rec->endpoint);
	info_text(info.model, &info.model_len, rec->model);
	info_text(info.group, &info.group_len, rec->group);
	kvp_jw_reset(&idx->jw);
	kvp_wrec_json(rec, life, reasons, &idx->jw);
	int rc = kvp_jw_done(&idx->jw);
	return rc ? rc : kvp_cat_w_worker_put(&idx->cat, widx, &info, idx->jw.buf, (uint32_t)idx->jw.len);
}

static int record_read(
	struct kvp_idx *idx, uint32_t widx, struct kvp_cat_worker_info *info, struct kvp_wrec *rec)
{
	uint32_t len = 0;
	struct kvp_wrec_err err;
	int rc = kvp_cat_worker_read(&idx->cat.cat, widx, info, record_text, sizeof(record_text), &len);
	return rc ? rc : kvp_wrec_post(idx->json, record_text, len, rec, &err);
}

/* Takes a schedulable worker out: record draining, view without it, ranks lost. The record stays. */
static void withdraw(struct kvp_idx *idx, uint32_t widx)
{
	static struct kvp_cat_worker_info info; /* apply thread only */
	struct kvp_idx_worker *w = &idx->worker[widx];
	struct kvp_wrec rec;
	if (record_read(idx, widx, &info, &rec) == KVP_OK) {
		record_put(idx, widx, info.role, KVP_PART_NONE, &rec, KVP_LIFE_DRAINING, NULL);
		kvp_wrec_free(&rec);
	}
	KVP_POINT("indexer:draining");
	kvp_idx_part_drop(idx, w->part, widx);
	idx->part[w->part].taint_cnt -= w->taint_cnt;
	kvp_idx_view_publish(idx, w->part);
	KVP_POINT("indexer:withdrawn");
	for (uint32_t i = 0; i < w->rank_cnt; i++)
		kvp_idx_rank_lose(idx, w->rank_slot[i]);
	free(w->rank_slot);
	free(w->taint);
	memset(w, 0, sizeof(*w));
}

/* What an upsert is going to do. */
struct plan {
	const struct kvp_wrec *rec;
	enum kvp_part_role role;
	uint32_t widx, part, start_rank, rank_cnt;
	uint32_t *slot;	 /* rank_cnt; UINT32_MAX = to be taken */
	uint8_t *is_new; /* rank_cnt */
	uint64_t *taint;
	uint32_t taint_cnt;
	struct kvp_wrec_reasons reasons;
};

static void plan_free(struct plan *p)
{
	free(p->slot);
	free(p->is_new);
	free(p->taint);
	kvp_wrec_reasons_free(&p->reasons);
}

/* Reason 7: the partition exists with other parameters, or can't be made. */
static void plan_part(struct kvp_idx *idx, struct plan *p)
{
	static struct kvp_part_info have; /* apply thread only */
	const struct kvp_wrec *rec = p->rec;
	uint32_t eagle = rec->is_eagle.is_set && rec->is_eagle.v, part = KVP_PART_NONE;
	int rc = kvp_cat_w_part(&idx->cat, p->role, rec->model.ptr, (uint32_t)rec->model.len, rec->group.ptr,
		(uint32_t)rec->group.len, rec->block_size.v, eagle, &part);
	if (rc == KVP_OK) {
		p->part = part;
		return;
	}
	if (rc != KVP_ERR_EXISTS) {
		static struct kvp_log_limit limit;
		uint64_t left = 0;
		kvp_ctr_add(idx->ctr, KVP_CTR_CAT_PART_FULL, 1);
		if (kvp_log_limit_pass(&limit, kvp_clock_mono_ns(), LOG_EVERY_NS, &left))
			KVP_LOG_E("registry.partitions",
				"worker=%llu partitions=%u effect=%s suppressed=%llu",
				(unsigned long long)rec->worker_id, kvp_cat_part_cnt(&idx->cat.cat),
				"new models and groups find no place until the node starts anew",
				(unsigned long long)left);
		kvp_wrec_reason(&p->reasons, "reconciliation failed: partition table is full");
		return;
	}
	kvp_cat_part_info(&idx->cat.cat, part, &have);
	if (have.block_size != rec->block_size.v)
		kvp_wrec_reason(&p->reasons,
			"reconciliation failed: block_size mismatch for model=%s routing_group=%s: "
			"existing=%u requested=%u",
			have.model, have.group, have.block_size, rec->block_size.v);
	else
		kvp_wrec_reason(&p->reasons,
			"reconciliation failed: is_eagle mismatch for model=%s routing_group=%s: existing=%s "
			"requested=%s",
			have.model, have.group, have.is_eagle ? "true" : "false", eagle ? "true" : "false");
}

static int u64_cmp(const void *a, const void *b)
{
	const uint64_t *x = a, *y = b;
	return (*x > *y) - (*x < *y);
}

/* Our own capacities. */
static int plan_room(struct kvp_idx *idx, struct plan *p)
{
	const struct kvp_idx_worker *w = &idx->worker[p->widx];
	const struct kvp_wrec *rec = p->rec;
	uint32_t used = idx->part[p->part].taint_cnt;
	if (w->is_schedulable && w->part == p->part)
		used -= w->taint_cnt;
	if (p->rank_cnt > idx->cat.cat.rank_max)
		kvp_wrec_reason(&p->reasons, "rank capacity exhausted");
	if (rec->taints.cnt > idx->cat.cat.taint_max - used)
		kvp_wrec_reason(&p->reasons, "taint capacity exhausted");
	if (p->reasons.cnt)
		return KVP_OK;
	p->slot = malloc(p->rank_cnt * sizeof(*p->slot) + 1);
	p->is_new = calloc(p->rank_cnt + 1ull, 1);
	p->taint = malloc(rec->taints.cnt * sizeof(*p->taint) + 1);
	if (!p->slot || !p->is_new || !p->taint || kvp_idx_part_room(idx, p->part))
		return KVP_ERR_SYS;
	for (uint32_t i = 0; i < rec->taints.cnt; i++)
		p->taint[i] = kvp_hash_taint(rec->taints.item[i].key.ptr, rec->taints.item[i].key.len);
	p->taint_cnt = rec->taints.cnt;
	qsort(p->taint, p->taint_cnt, sizeof(*p->taint), u64_cmp);
	return KVP_OK;
}

/* A decode worker without event endpoints is complete: who decodes is chosen by load. */
static enum kvp_wrec_events events_of(const struct kvp_idx *idx, const struct plan *p)
{
	int has = p->rec->event_endpoint.len || p->rec->event_endpoints.cnt;
	return p->role == KVP_PART_DECODE && !has ? KVP_WREC_EVENTS_OFF : idx->cfg.events;
}

/* Everything that speaks against the candidate, before anything changes. */
static int plan_check(struct kvp_idx *idx, struct plan *p)
{
	p->rank_cnt = kvp_wrec_ranks(p->rec, &p->start_rank);
	p->part = KVP_PART_NONE;
	kvp_wrec_check(p->rec, idx->cfg.queueing, events_of(idx, p), &p->reasons);
	if (!p->reasons.cnt && !p->rank_cnt)
		kvp_wrec_reason(&p->reasons, "data_parallel_start_rank leaves no rank");
	if (!p->reasons.cnt)
		plan_part(idx, p);
	if (!p->reasons.cnt && idx->cfg.events == KVP_WREC_EVENTS_ON && p->rank_cnt <= idx->cat.cat.rank_max)
		kvp_wrec_check_listeners(p->rec, &p->reasons);
	return p->reasons.cnt ? KVP_OK : plan_room(idx, p);
}

/* Finds the slots of ranks that stay and takes the others; on KVP_ERR_FULL nothing stays taken. */
static int plan_slots(struct kvp_idx *idx, struct plan *p)
{
	const struct kvp_idx_worker *w = &idx->worker[p->widx];
	int rc = KVP_OK;
	uint32_t done = 0;
	for (; done < p->rank_cnt && !rc; done++) {
		uint32_t rank = p->start_rank + done, at = rank - w->start_rank;
		p->is_new[done] = !w->is_schedulable || at >= w->rank_cnt;
		if (!p->is_new[done])
			p->slot[done] = w->rank_slot[at];
		else
			rc = kvp_idx_rank_take(
				idx, p->widx, p->rec->worker_id, p->part, rank, &p->slot[done]);
	}
	for (uint32_t i = 0; rc && i + 1 < done; i++)
		if (p->is_new[i])
			kvp_idx_rank_lose(idx, p->slot[i]);
	return rc;
}

static void listen_all(struct kvp_idx *idx, const struct plan *p, enum kvp_idx_resume how)
{
	char event[KVP_WREC_ENDPOINT_MAX], replay[KVP_WREC_ENDPOINT_MAX];
	for (uint32_t i = 0; idx->cfg.events == KVP_WREC_EVENTS_ON && i < p->rank_cnt; i++) {
		struct kvp_str e = kvp_wrec_event(p->rec, p->start_rank + i);
		snprintf(event, sizeof(event), "%.*s", (int)e.len, e.ptr ? e.ptr : "");
		int has_replay = kvp_wrec_replay(p->rec, p->start_rank + i, replay) == KVP_OK;
		int rc = kvp_idx_rank_listen(
			idx, p->slot[i], e.len ? event : NULL, has_replay ? replay : NULL, how);
		if (rc) /* no memory: the rank has no events until the next registration */
			kvp_ctr_add(idx->ctr, KVP_CTR_IDX_LISTEN_FAILED, 1);
	}
}

/* What a rank may do for router hints: nothing without a worker type or without events; be a source with a
 * control endpoint of its own, unless another agent tells of its blocks. */
static uint64_t kv_hint_of(const struct kvp_idx *idx, const struct kvp_wrec *rec, uint32_t rank)
{
	const struct kvp_wrec_list *l = &rec->hint_endpoints;
	struct kvp_str mode = rec->event_source_mode;
	if (!rec->hint_worker_type.len || idx->cfg.events == KVP_WREC_EVENTS_OFF)
		return 0;
	uint64_t hint = kvp_hash_bytes(rec->hint_worker_type.ptr, rec->hint_worker_type.len, 0) & ~1ull;
	hint = hint ? hint : 2;
	if (mode.len == sizeof(STATE_AGENT) - 1 && memcmp(mode.ptr, STATE_AGENT, mode.len) == 0)
		return hint;
	for (uint32_t i = 0; i < l->cnt; i++)
		if (l->item[i].rank == rank && l->item[i].val.len)
			return hint | 1;
	return hint;
}

/* Makes the candidate the schedulable worker. Ranks of before that it no longer has are lost last. */
static int commit(struct kvp_idx *idx, struct plan *p, enum kvp_idx_resume how)
{
	struct kvp_idx_worker *w = &idx->worker[p->widx], old = *w;
	if (old.is_schedulable)
		idx->part[old.part].taint_cnt -= old.taint_cnt;
	*w = (struct kvp_idx_worker){.worker_id = p->rec->worker_id,
		.is_schedulable = 1,
		.part = p->part,
		.start_rank = p->start_rank,
		.rank_cnt = p->rank_cnt,
		.rank_slot = p->slot,
		.taint = p->taint,
		.taint_cnt = p->taint_cnt,
		.max_num_batched_tokens = p->rec->max_num_batched_tokens.v,
		.total_kv_blocks = p->rec->total_kv_blocks.v};
	p->slot = NULL;
	p->taint = NULL;
	idx->part[p->part].taint_cnt += w->taint_cnt;
	int rc = kvp_idx_part_add(idx, p->part, p->widx);
	KVP_ASSERT(rc == KVP_OK); /* plan_room has made room */
	struct plan view = {
		.rec = p->rec, .start_rank = p->start_rank, .rank_cnt = p->rank_cnt, .slot = w->rank_slot};
	for (uint32_t i = 0; i < w->rank_cnt; i++)
		idx->rank[w->rank_slot[i]].kv_hint = kv_hint_of(idx, p->rec, w->start_rank + i);
	for (uint32_t i = 0; i < w->rank_cnt; i++)
		if (p->is_new[i])
			kvp_idx_recovery_give(idx, w->rank_slot[i]);
	listen_all(idx, &view, how);
	KVP_POINT("indexer:listening");
	rc = record_put(idx, p->widx, p->role, p->part, p->rec, KVP_LIFE_SCHEDULABLE, NULL);
	KVP_POINT("indexer:recorded");
	kvp_idx_view_publish(idx, p->part);
	KVP_POINT("indexer:published");
	for (uint32_t i = 0; i < old.rank_cnt; i++)
		if (old.start_rank + i - w->start_rank >= w->rank_cnt)
			kvp_idx_rank_lose(idx, old.rank_slot[i]);
	free(old.rank_slot);
	free(old.taint);
	return rc;
}

static int upsert_planned(struct kvp_idx *idx, struct plan *p, enum kvp_idx_resume how)
{
	if (plan_check(idx, p))
		return refuse(idx, 503, "out of memory");
	kvp_jw_reset(&idx->jw);
	kvp_wrec_json(p->rec, KVP_LIFE_UNSCHEDULABLE, &p->reasons, &idx->jw);
	if (kvp_jw_done(&idx->jw))
		return refuse(idx, 503, "out of memory");
	if (idx->jw.len > KVP_CAT_RECORD_MAX - RECORD_SPARE)
		return refuse(
			idx, 400, "worker record: longer than %d bytes", KVP_CAT_RECORD_MAX - RECORD_SPARE);
	struct kvp_idx_worker *w = &idx->worker[p->widx];
	if (w->is_schedulable && (p->reasons.cnt || w->part != p->part))
		withdraw(idx, p->widx);
	if (!p->reasons.cnt && plan_slots(idx, p)) {
		kvp_wrec_reason(&p->reasons, "rank capacity exhausted");
		if (w->is_schedulable)
			withdraw(idx, p->widx);
	}
	int rc;
	if (p->reasons.cnt)
		rc = record_put(
			idx, p->widx, p->role, KVP_PART_NONE, p->rec, KVP_LIFE_INCOMPLETE, &p->reasons);
	else
		rc = commit(idx, p, how);
	return rc ? refuse(idx, 500, "worker record: %s", kvp_strerror(rc)) : 0;
}

/* 0, or the HTTP status of a refusal that changed nothing. */
static int upsert(
	struct kvp_idx *idx, enum kvp_part_role role, const struct kvp_wrec *rec, enum kvp_idx_resume how)
{
	struct plan p = {.rec = rec, .role = role};
	if (kvp_cat_w_worker_slot(&idx->cat, rec->worker_id, &p.widx))
		return refuse(idx, 503, "worker table is full");
	int status = upsert_planned(idx, &p, how);
	static struct kvp_cat_worker_info info; /* apply thread only */
	if (status && kvp_cat_worker_info(&idx->cat.cat, p.widx, &info) == KVP_ERR_NOTFOUND)
		kvp_cat_w_worker_drop(&idx->cat, p.widx); /* a slot that never got a record */
	plan_free(&p);
	kvp_idx_gauges(idx);
	return status;
}

/* The role under which an id is registered, or `otherwise` for an unknown one. */
static enum kvp_part_role role_of(struct kvp_idx *idx, uint64_t worker_id, enum kvp_part_role otherwise)
{
	static struct kvp_cat_worker_info info; /* apply thread only */
	uint32_t widx;
	int known = kvp_cat_worker_find(&idx->cat.cat, worker_id, &widx) == KVP_OK &&
		    kvp_cat_worker_info(&idx->cat.cat, widx, &info) == KVP_OK;
	return known && info.role < KVP_PART_ROLE_CNT ? info.role : otherwise;
}

int kvp_idx_worker_post(struct kvp_idx *idx, enum kvp_part_role role, enum kvp_cmd_post_by by,
	const char *json, size_t len)
{
	static const char *const name[KVP_PART_ROLE_CNT] = {"aggregated", "prefill", "decode"};
	struct kvp_wrec rec;
	struct kvp_wrec_err err;
	if (kvp_wrec_post(idx->json, json, len, &rec, &err))
		return refuse(idx, err.status, "%s", err.text);
	int status;
	enum kvp_part_role is = role_of(idx, rec.worker_id, role);
	if (idx->state == KVP_IDX_STOPPING)
		status = refuse(idx, 503, "selection service is shutting down");
	else if (by == KVP_CMD_BY_API && is != role)
		status = refuse(idx, 409, "worker_id %llu is registered with role %s",
			(unsigned long long)rec.worker_id, name[is]);
	else
		status = upsert(idx, role, &rec, KVP_IDX_FRESH);
	kvp_wrec_free(&rec);
	return status ? status : 201;
}

int kvp_idx_worker_patch(struct kvp_idx *idx, uint64_t worker_id, const char *json, size_t len)
{
	static struct kvp_cat_worker_info info; /* apply thread only */
	struct kvp_wrec rec = {0};
	struct kvp_wrec_err err;
	uint32_t widx;
	int known = kvp_cat_worker_find(&idx->cat.cat, worker_id, &widx) == KVP_OK &&
			record_read(idx, widx, &info, &rec) == KVP_OK;
	int status = 0;
	if (kvp_wrec_patch(idx->json, json, len, &rec, &err))
		status = refuse(idx, err.status, "%s", err.text);
	else if (idx->state == KVP_IDX_STOPPING)
		status = refuse(idx, 503, "selection service is shutting down");
	else if (!known)
		status = refuse(idx, 404, "worker %llu not found", (unsigned long long)worker_id);
	else
		status = upsert(idx, info.role, &rec, KVP_IDX_FRESH);
	kvp_wrec_free(&rec);
	return status ? status : 200;
}

int kvp_idx_worker_delete(struct kvp_idx *idx, uint64_t worker_id)
{
	static struct kvp_cat_worker_info info; /* apply thread only */
	struct kvp_wrec rec;
	uint32_t widx;
	if (kvp_cat_worker_find(&idx->cat.cat, worker_id, &widx) || record_read(idx, widx, &info, &rec))
		return refuse(idx, 404, "worker %llu not found", (unsigned long long)worker_id);
	if (idx->worker[widx].is_schedulable)
		withdraw(idx, widx);
	kvp_cat_w_worker_drop(&idx->cat, widx);
	memset(&idx->worker[widx], 0, sizeof(idx->worker[widx]));
	kvp_jw_reset(&idx->jw);
	kvp_wrec_json(&rec, KVP_LIFE_UNSCHEDULABLE, NULL, &idx->jw);
	kvp_wrec_free(&rec);
	kvp_idx_gauges(idx);
	return 200;
}

/* -- after a restart -- */

/* Gives a schedulable worker the rank slots that its predecessor had taken for it. */
static int adopt(struct kvp_idx *idx, uint32_t widx, const struct kvp_cat_worker_info *info,
	const struct kvp_cat_rank_info *held, uint32_t held_cnt)
{
	struct kvp_idx_worker *w = &idx->worker[widx];
	uint32_t *slot = malloc((info->size + 1ull) * sizeof(*slot)), cnt = 0;
	if (!slot)
		return KVP_ERR_SYS;
	/* held is sorted by worker slot and rank. A rank with no slot ends the run: the upsert below
	 * takes it. */
	for (uint32_t i = 0; i < held_cnt && cnt < info->size; i++)
		if (held[i].worker_id == info->worker_id && held[i].part == info->part &&
			held[i].dp_rank == info->start_rank + cnt)
			slot[cnt++] = held[i].rank_slot;
	*w = (struct kvp_idx_worker){.worker_id = info->worker_id,
		.is_schedulable = 1,
		.part = info->part,
		.start_rank = info->start_rank,
		.rank_cnt = cnt,
		.rank_slot = slot};
	return KVP_OK;
}

static int held_cmp(const void *a, const void *b)
{
	const struct kvp_cat_rank_info *x = a, *y = b;
	if (x->worker_idx != y->worker_idx)
		return x->worker_idx < y->worker_idx ? -1 : 1;
	if (x->dp_rank != y->dp_rank)
		return x->dp_rank < y->dp_rank ? -1 : 1;
	return (x->rank_slot > y->rank_slot) - (x->rank_slot < y->rank_slot);
}

static void recover_ranks(struct kvp_idx *idx, struct kvp_cat_rank_info *held, uint32_t held_cnt)
{
	uint8_t *is_owned = calloc(idx->cat.cat.rank_max, 1);
	KVP_ASSERT(is_owned);
	for (uint32_t i = 0; i < idx->cat.cat.worker_max; i++)
		for (uint32_t k = 0; k < idx->worker[i].rank_cnt; k++)
			is_owned[idx->worker[i].rank_slot[k]] = 1;
	for (uint32_t i = 0; i < held_cnt; i++) {
		uint32_t slot = held[i].rank_slot;
		kvp_idx_rank_set(idx, &held[i]);
		if (is_owned[slot]) {
			kvp_rank_open(idx->book, slot, held[i].rank_gen);
			uint64_t applied, live;
			if (idx->mark && kvp_mark_get(idx->mark, slot, held[i].rank_gen, &applied, &live))
				kvp_mark_reset(idx->mark, slot, held[i].rank_gen);
		} else {
			kvp_idx_rank_lose(idx, slot);
		}
	}
	free(is_owned);
}

int kvp_idx_recover(struct kvp_idx *idx)
{
	static struct kvp_cat_worker_info info; /* apply thread only */
	const struct kvp_cat *cat = &idx->cat.cat;
	struct kvp_cat_rank_info *held = calloc(cat->rank_max, sizeof(*held));
	uint32_t held_cnt = 0;
	int rc = held ? KVP_OK : KVP_ERR_SYS;
	for (uint32_t i = 0; !rc && i < cat->rank_max; i++)
		held_cnt += kvp_cat_rank_info(cat, i, &held[held_cnt]) == KVP_OK;
	if (!rc)
		qsort(held, held_cnt, sizeof(*held), held_cmp);
	for (uint32_t i = 0, from = 0; !rc && i < cat->worker_max; i++) {
		uint32_t to = from;
		for (; to < held_cnt && held[to].worker_idx <= i; to++)
			from += held[to].worker_idx < i;
		if (kvp_cat_worker_info(cat, i, &info) == KVP_OK && info.lifecycle == KVP_LIFE_SCHEDULABLE &&
			info.part < kvp_cat_part_cnt(cat) && info.size <= cat->rank_max) {
			rc = adopt(idx, i, &info, held + from, to - from);
			if (!rc)
				rc = kvp_idx_part_add(idx, info.part, i);
		}
		from = to;
	}
	if (!rc)
		recover_ranks(idx, held, held_cnt);
	free(held);
	if (!rc)
		rc = kvp_idx_notes_load(idx);
	/* The same reconciliation as a registration: takes missing ranks, starts listeners at the kept
	 * marks. */
	for (uint32_t i = 0; !rc && i < cat->worker_max; i++) {
		struct kvp_wrec rec;
		if (record_read(idx, i, &info, &rec))
			continue;
		if (info.lifecycle == KVP_LIFE_SCHEDULABLE || info.lifecycle == KVP_LIFE_DRAINING)
			upsert(idx, info.role, &rec, KVP_IDX_RESUME);
		kvp_wrec_free(&rec);
	}
	kvp_idx_notes_free(idx);
	if (!rc) {
		idx->state = KVP_IDX_SERVING;
		kvp_idx_index_waiting(idx);
	}
	for (uint32_t i = 0; !rc && i < kvp_cat_part_cnt(cat); i++)
		kvp_idx_view_publish(idx, i);
	kvp_idx_gauges(idx);
	return rc;
}
