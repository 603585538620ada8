#include "daemons/peer/sync.h"

#include <stdlib.h>
#include <string.h>

void kvp_sync_open(struct kvp_sync *s, struct kvp_region *region, kvp_owner owner,
	struct kvp_ctr_column_shm *ctr, uint64_t router_id, struct kvp_bindings *bindings)
{
	memset(s, 0, sizeof(*s));
	s->region = region;
	s->ctr = ctr;
	s->router_id = router_id;
	s->bindings = bindings;
	kvp_lifecycle_attach(&region->lifecycle, owner, ctr);
}

void kvp_sync_close(struct kvp_sync *s)
{
	for (uint32_t i = 0; i < KVP_PART_MAX; i++)
		free(s->part[i]);
	free(s->seq);
	free(s->buf);
	memset(s, 0, sizeof(*s));
}

static void count(const struct kvp_sync *s, enum kvp_ctr id)
{
	if (s->ctr)
		kvp_ctr_add(s->ctr, id, 1);
}

/* Names and block size of a partition are asked for once. NULL: no such partition, or no memory. */
static const struct kvp_part_info *part_of(struct kvp_sync *s, uint32_t part)
{
	if (part >= KVP_PART_MAX || s->part[part])
		return part < KVP_PART_MAX ? s->part[part] : NULL;
	struct kvp_part_info *info = malloc(sizeof(*info));
	if (!info || kvp_cat_part_info(&s->region->cat, part, info)) {
		free(info);
		return NULL;
	}
	s->part[part] = info;
	return info;
}

static int buf_room(struct kvp_sync *s, size_t bytes)
{
	if (bytes <= s->buf_cap)
		return KVP_OK;
	uint8_t *p = realloc(s->buf, 2 * bytes);
	if (!p)
		return KVP_ERR_SYS;
	s->buf = p;
	s->buf_cap = 2 * bytes;
	return KVP_OK;
}

static int seq_room(struct kvp_sync *s, uint32_t cnt)
{
	if (cnt <= s->seq_cap)
		return KVP_OK;
	uint64_t *p = realloc(s->seq, 2ull * cnt * sizeof(*p));
	if (!p)
		return KVP_ERR_SYS;
	s->seq = p;
	s->seq_cap = 2 * cnt;
	return KVP_OK;
}

/* What an add tells beyond the record is in the reservation, as long as that lives. */
static int fill_add(struct kvp_sync *s, struct kvp_replica_event *e)
{
	const struct kvp_book *b = &s->region->book;
	uint32_t n = 0;
	if (kvp_resv_info(b, s->rec.h, &s->info) || seq_room(s, s->info.seq_cnt) ||
		kvp_resv_seq(b, s->rec.h, 0, s->seq, s->info.seq_cnt, &n) || n != s->info.seq_cnt)
		return KVP_ERR_NOTFOUND;
	e->seq = n ? s->seq : NULL;
	e->seq_cnt = n;
	e->track_prefill = (s->info.flags & KVP_RESV_TRACK_PREFILL) != 0;
	e->has_hint = e->track_prefill; /* also where there is nothing to prefill */
	e->hint_tok = s->info.prefill_tok;
	e->has_expected_output = s->info.expected_output_tok != 0;
	e->expected_output_tok = s->info.expected_output_tok;
	return KVP_OK;
}

static int lifecycle(struct kvp_sync *s, const struct kvp_part_info *part, struct kvp_sync_msg *out)
{
	const struct kvp_lifecycle_rec *r = &s->rec;
	struct kvp_replica_event e = {.model = {part->model, part->model_len},
		.group = {part->group, part->group_len},
		.id = {r->id, r->id_len},
		.lora = {r->lora_len ? r->lora : NULL, r->lora_len},
		.worker_id = r->worker_id,
		.router_id = s->router_id,
		.block_size = part->block_size,
		.dp_rank = r->dp_rank,
		.kind = r->kind == KVP_LIFECYCLE_ADD	? KVP_REPLICA_ADD
			: r->kind == KVP_LIFECYCLE_FREE ? KVP_REPLICA_FREE
							: KVP_REPLICA_MARK};
	if (e.kind == KVP_REPLICA_ADD && fill_add(s, &e)) {
		count(s, KVP_CTR_PEER_TOLD_SKIPPED);
		return KVP_ERR_EXISTS;
	}
	if (buf_room(s, kvp_replica_event_bound(&e)))
		return KVP_ERR_SYS;
	out->topic = KVP_REPLICA_LIFECYCLE;
	return kvp_replica_encode_event(&e, s->buf, s->buf_cap, &out->len);
}

static int binding(struct kvp_sync *s, const struct kvp_part_info *part, uint64_t now_ns,
	struct kvp_sync_msg *out)
{
	const struct kvp_lifecycle_rec *r = &s->rec;
	struct kvp_replica_binding b = {.model = {part->model, part->model_len},
		.group = {part->group, part->group_len},
		.session = {r->id, r->id_len},
		.worker_id = r->worker_id,
		.writer_id = s->router_id,
		.dp_rank = r->dp_rank,
		.has_rank = 1};
	struct kvp_affinity_target at = {r->worker_id, r->dp_rank};
	if (!s->bindings)
		return KVP_ERR_EXISTS;
	if (kvp_bindings_stamp(s->bindings, r->part, b.session, at, now_ns, &b.sequence)) {
		count(s, KVP_CTR_PEER_TOLD_REBOUND);
		return KVP_ERR_EXISTS;
	}
	if (buf_room(s, kvp_replica_binding_bound(&b)))
		return KVP_ERR_SYS;
	out->topic = KVP_REPLICA_AFFINITY;
	return kvp_replica_encode_binding(&b, s->buf, s->buf_cap, &out->len);
}

int kvp_sync_next(struct kvp_sync *s, uint64_t now_ns, struct kvp_sync_msg *out)
{
	int rc = kvp_lifecycle_next(&s->region->lifecycle, now_ns, &s->rec);
	if (rc)
		return rc;
	const struct kvp_part_info *part = part_of(s, s->rec.part);
	if (!part)
		rc = KVP_ERR_SYS;
	else if (s->rec.kind == KVP_LIFECYCLE_AFFINITY)
		rc = binding(s, part, now_ns, out);
	else
		rc = lifecycle(s, part, out);
	if (rc && rc != KVP_ERR_EXISTS)
		count(s, KVP_CTR_PEER_UNSENT); /* no memory: the event is lost as if nobody had listened */
	if (rc)
		return KVP_ERR_EXISTS;
	out->role = part->role;
	out->payload = s->buf;
	return KVP_OK;
}

void kvp_sync_done(struct kvp_sync *s)
{
	kvp_lifecycle_done(&s->region->lifecycle);
}
