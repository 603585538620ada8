/* daemons/indexer/recovery.c — records of a peer's dump into the tree, and the end of the recovery. */
#include "daemons/indexer/recovery.h"

#include <string.h>

#include "daemons/common/log.h"
#include "daemons/indexer/indexer.h"
#include "daemons/indexer/listener.h"

#define WARN_MAX 8u

int kvp_idx_recovery_open(struct kvp_idx *idx, struct kvp_recov *gate, uint64_t block_max,
	uint64_t patience_ns, uint64_t now_ns)
{
	struct kvp_idx_recovery *v = &idx->recovery;
	if (!gate || !kvp_recov_is_active(gate))
		return KVP_OK;
	v->held = kvp_held_new(4 * block_max); /* two hashes a block, as much again for short records */
	v->gate = gate;
	v->patience_ns = patience_ns;
	v->heard_ns = now_ns;
	kvp_ctr_set(idx->ctr, KVP_CTR_RECOV_STATE, (uint64_t)kvp_recov_state(gate));
	return v->held ? KVP_OK : KVP_ERR_SYS;
}

void kvp_idx_recovery_close(struct kvp_idx *idx)
{
	kvp_held_free(idx->recovery.held);
	idx->recovery.held = NULL;
}

/* ---- records ---- */

/* Applies one record to a rank that is in the tree. */
static void rec_apply(struct kvp_idx *idx, const struct kvp_idx_rank *r, const struct kvp_recov_rec *rec,
	const uint64_t *hash, struct kvp_recov_done *done)
{
	enum kvp_radix_tier tier = (enum kvp_radix_tier)rec->tier;
	uint32_t n = 0;
	if (rec->op == KVP_RECOV_CLEAR) {
		kvp_radix_clear(idx->radix, r->index_slot);
		return;
	}
	if (rec->op == KVP_RECOV_REMOVE) {
		kvp_radix_remove_tier(idx->radix, r->index_slot, tier, rec->n, hash, &n);
		return;
	}
	int rc = kvp_radix_store_tier(idx->radix, r->index_slot, tier, r->part_salt,
		rec->has_parent ? KVP_RADIX_CHILD : KVP_RADIX_ROOT, rec->parent, rec->n, hash, hash + rec->n,
		&n);
	done->stored += n;
	done->parent += rc == KVP_ERR_NOTFOUND;
	if (rc != KVP_OK && rc != KVP_ERR_NOTFOUND)
		done->dropped += rec->n - n;
}

static int part_key_is(const struct kvp_idx *idx, uint32_t part, uint32_t role, const char *key, uint32_t len,
	uint32_t *block_size)
{
	static struct kvp_part_info p; /* apply thread only */
	if (kvp_cat_part_info(&idx->cat.cat, part, &p) || p.role != role ||
		len != p.model_len + 1 + p.group_len)
		return 0;
	*block_size = p.block_size;
	return memcmp(key, p.model, p.model_len) == 0 && key[p.model_len] == ':' &&
	       memcmp(key + p.model_len + 1, p.group, p.group_len) == 0;
}

static void warn_size(struct kvp_idx *idx, const struct kvp_held_key *k, uint32_t block_size)
{
	if (idx->recovery.warned++ < WARN_MAX)
		KVP_LOG_W("recovery.skipped", "partition=%.*s block_size=%u here=%u", (int)k->len, k->text,
			k->block_size, block_size);
}

/* The partition that the last record of this batch belonged to. */
struct batch {
	struct kvp_held_key key;
	uint32_t part, block_size; /* KVP_PART_NONE = none yet */
	int is_same;
	struct kvp_recov_done done;
};

/* The rank that a record is for, if it is registered under that key; *other: 1 = with another block size. */
static const struct kvp_idx_rank *rank_of(
	struct kvp_idx *idx, struct batch *b, const struct kvp_recov_rec *rec, int *other)
{
	uint32_t widx;
	*other = 0;
	if (kvp_cat_worker_find(&idx->cat.cat, rec->worker_id, &widx))
		return NULL;
	const struct kvp_idx_worker *w = &idx->worker[widx];
	if (!w->is_schedulable || rec->dp_rank - w->start_rank >= w->rank_cnt)
		return NULL;
	if (b->part != w->part) {
		b->part = w->part;
		b->is_same = part_key_is(idx, w->part, b->key.role, b->key.text, b->key.len, &b->block_size);
		if (b->is_same && b->block_size != b->key.block_size)
			warn_size(idx, &b->key, b->block_size);
	}
	if (!b->is_same)
		return NULL;
	*other = b->block_size != b->key.block_size;
	return &idx->rank[w->rank_slot[rec->dp_rank - w->start_rank]];
}

static void rec_take(struct kvp_idx *idx, struct batch *b, const struct kvp_recov_rec *rec)
{
	int other;
	const struct kvp_idx_rank *r = rank_of(idx, b, rec, &other);
	uint64_t n = rec->op == KVP_RECOV_STORE ? rec->n : 0;
	if (other)
		b->done.skipped += n;
	else if (r && r->index_slot != KVP_INDEX_NONE)
		rec_apply(idx, r, rec, (const uint64_t *)(const void *)(rec + 1), &b->done);
	else if (kvp_held_put(idx->recovery.held, &b->key, rec) == KVP_OK)
		b->done.held += n;
	else
		b->done.dropped += n;
}

static void count_done(struct kvp_idx *idx, const struct kvp_recov_done *d)
{
	kvp_ctr_add(idx->ctr, KVP_CTR_RECOV_STORED, d->stored);
	kvp_ctr_add(idx->ctr, KVP_CTR_RECOV_HELD, d->held);
	kvp_ctr_add(idx->ctr, KVP_CTR_RECOV_DROPPED, d->dropped);
	kvp_ctr_add(idx->ctr, KVP_CTR_RECOV_PARENT, d->parent);
	kvp_ctr_add(idx->ctr, KVP_CTR_RECOV_SKIPPED, d->skipped);
	kvp_ctr_set(idx->ctr, KVP_CTR_RECOV_HELD_NOW, kvp_held_blocks(idx->recovery.held));
}

/* Bytes of the record at p, of which `left` are there; 0 = it cannot be. */
static uint64_t rec_bytes(const struct kvp_recov_rec *rec, uint64_t left)
{
	if (left < sizeof(*rec) || rec->op > KVP_RECOV_CLEAR || rec->tier >= KVP_RADIX_TIER_CNT ||
		(rec->op == KVP_RECOV_CLEAR) != (rec->n == 0))
		return 0;
	uint64_t bytes = KVP_RECOV_REC_BYTES(rec->op, rec->n);
	return bytes <= left ? bytes : 0;
}

/* ---- commands ---- */

/* 0 = go on, else the status to answer. */
static int heard(struct kvp_idx *idx, uint64_t now_ns)
{
	struct kvp_idx_recovery *v = &idx->recovery;
	if (!v->gate || !kvp_recov_is_active(v->gate) || v->to != KVP_RECOV_NONE)
		return KVP_ERR_CLOSED;
	v->heard_ns = now_ns;
	return KVP_OK;
}

int kvp_idx_recovery_begin(
	struct kvp_idx *idx, const struct kvp_cmd_cell *c, void *buf, uint32_t *len, uint64_t now_ns)
{
	struct kvp_idx_recovery *v = &idx->recovery;
	struct kvp_recov_begun b = {0, 0};
	int rc = heard(idx, now_ns);
	*len = 0;
	if (rc || !c->arg[0])
		return rc ? rc : KVP_ERR_INVAL;
	if (v->attempt != c->arg[0]) {
		v->attempt = c->arg[0];
		kvp_held_drop(v->held); /* of an attempt that failed; the peers tell much the same */
		if (idx->listeners && kvp_idx_listeners_mark(idx->listeners, v->attempt))
			return KVP_ERR_SYS;
	}
	if (idx->listeners &&
		!kvp_idx_listeners_marked(idx->listeners, v->attempt, &b.listeners, &b.connected))
		return KVP_ERR_AGAIN;
	memcpy(buf, &b, sizeof(b));
	*len = sizeof(b);
	return KVP_OK;
}

int kvp_idx_recovery_put(
	struct kvp_idx *idx, const struct kvp_cmd_cell *c, void *buf, uint32_t *len, uint64_t now_ns)
{
	struct kvp_recov_head head;
	struct batch b = {.part = KVP_PART_NONE};
	int rc = heard(idx, now_ns);
	*len = 0;
	if (!rc && (c->arg[0] != idx->recovery.attempt || !c->arg[0]))
		rc = KVP_ERR_FENCED;
	if (rc)
		return rc;
	if (c->len < sizeof(head))
		return KVP_ERR_PROTO;
	memcpy(&head, buf, sizeof(head));
	if (head.key_len > KVP_RECOV_KEY_MAX || head.role >= KVP_PART_ROLE_CNT || !head.block_size)
		return KVP_ERR_PROTO;
	uint64_t at = sizeof(head) + KVP_RECOV_KEY_BYTES(head.key_len);
	if (at > c->len)
		return KVP_ERR_PROTO;
	b.key = (struct kvp_held_key){
		head.role, head.block_size, (const char *)buf + sizeof(head), head.key_len};
	for (uint32_t i = 0; !rc && i < head.rec_cnt; i++) {
		const struct kvp_recov_rec *rec = (const void *)((const char *)buf + at);
		uint64_t bytes = rec_bytes(rec, c->len - at);
		if (bytes)
			rec_take(idx, &b, rec);
		else
			rc = KVP_ERR_PROTO;
		at += bytes;
	}
	count_done(idx, &b.done);
	kvp_recov_tell(idx->recovery.gate, 0, b.done.stored + b.done.held);
	memcpy(buf, &b.done, sizeof(b.done));
	*len = sizeof(b.done);
	return rc;
}

static void end_as(struct kvp_idx *idx, enum kvp_recov_state to, uint64_t number, uint64_t now_ns)
{
	struct kvp_idx_recovery *v = &idx->recovery;
	v->to = to;
	v->to_ns = now_ns;
	if (idx->listeners && kvp_idx_listeners_open_gate(idx->listeners, number))
		KVP_LOG_E("recovery.listeners", "error=no_memory effect=events_wait_for_restart");
}

int kvp_idx_recovery_end(struct kvp_idx *idx, const struct kvp_cmd_cell *c, uint64_t now_ns)
{
	int rc = heard(idx, now_ns);
	uint64_t to = c->arg[1];
	if (rc)
		return rc;
	if (to <= KVP_RECOV_RUNNING || to >= KVP_RECOV_REFILLING || (to == KVP_RECOV_RECOVERED && !c->arg[0]))
		return KVP_ERR_INVAL;
	if (c->arg[0] && c->arg[0] != idx->recovery.attempt)
		return KVP_ERR_FENCED;
	idx->recovery.peers = c->arg[2];
	end_as(idx, (enum kvp_recov_state)to, c->arg[0], now_ns);
	return KVP_OK;
}

/* ---- workers that come later ---- */

void kvp_idx_recovery_give(struct kvp_idx *idx, uint32_t rank_slot)
{
	struct kvp_idx_recovery *v = &idx->recovery;
	const struct kvp_idx_rank *r = &idx->rank[rank_slot];
	static struct kvp_part_info p; /* apply thread only */
	char key[KVP_RECOV_KEY_MAX];
	struct kvp_held_list l;
	struct kvp_recov_done done = {.stored = 0};
	if (!v->held || !kvp_held_ranks(v->held) || r->index_slot == KVP_INDEX_NONE ||
		kvp_cat_part_info(&idx->cat.cat, r->part, &p))
		return;
	memcpy(key, p.model, p.model_len);
	key[p.model_len] = ':';
	memcpy(key + p.model_len + 1, p.group, p.group_len);
	uint32_t len = p.model_len + 1 + p.group_len;
	if (!kvp_held_take(v->held, p.role, key, len, r->worker_id, r->dp_rank, &l))
		return;
	if (l.block_size != p.block_size) {
		warn_size(idx, &(struct kvp_held_key){p.role, l.block_size, key, len}, p.block_size);
		done.skipped = l.blocks;
		l.cnt = 0;
	}
	for (uint64_t at = 0; at < l.cnt;) {
		const struct kvp_recov_rec *rec = (const void *)(l.word + at);
		rec_apply(idx, r, rec, (const uint64_t *)(const void *)(rec + 1), &done);
		at += KVP_RECOV_REC_BYTES(rec->op, rec->n) / 8;
	}
	count_done(idx, &done);
	kvp_ctr_add(idx->ctr, KVP_CTR_RECOV_GIVEN, l.blocks);
	kvp_held_free_list(&l);
}

/* ---- the end ---- */

static void gate_opens(struct kvp_idx *idx, uint64_t now_ns)
{
	struct kvp_idx_recovery *v = &idx->recovery;
	struct kvp_recov_info i;
	kvp_recov_tell(v->gate, v->peers, 0);
	kvp_recov_end(v->gate, v->to, now_ns);
	kvp_recov_get(v->gate, &i);
	kvp_ctr_set(idx->ctr, KVP_CTR_RECOV_STATE, (uint64_t)i.state);
	v->drop_ns = now_ns + KVP_HELD_NS;
	KVP_LOG_N("recovery.ended", "state=%s attempts=%llu blocks=%llu held=%llu ms=%llu",
		kvp_recov_name(i.state), (unsigned long long)i.attempts, (unsigned long long)i.blocks,
		(unsigned long long)kvp_held_blocks(v->held),
		(unsigned long long)((i.ended_ns - i.begun_ns) / 1000000));
}

int kvp_idx_recovery_tend(struct kvp_idx *idx, uint64_t now_ns, int are_rings_empty)
{
	struct kvp_idx_recovery *v = &idx->recovery;
	if (!v->gate)
		return 0;
	if (kvp_recov_is_active(v->gate)) {
		if (v->to == KVP_RECOV_NONE && v->patience_ns && now_ns > v->heard_ns + v->patience_ns) {
			KVP_LOG_W("recovery.given_up", "reason=nobody_goes_on_with_it");
			end_as(idx, KVP_RECOV_EXHAUSTED, 0, now_ns);
		}
		if (v->to == KVP_RECOV_NONE)
			return 0;
		int is_done = !idx->listeners ||
			      (are_rings_empty && kvp_idx_listeners_caught_up(idx->listeners)) ||
			      now_ns > v->to_ns + KVP_IDX_CATCH_UP_NS;
		if (is_done)
			gate_opens(idx, now_ns);
		return is_done;
	}
	if (v->drop_ns && now_ns >= v->drop_ns) {
		uint64_t blocks = kvp_held_drop(v->held);
		kvp_ctr_add(idx->ctr, KVP_CTR_RECOV_DROPPED, blocks);
		kvp_ctr_set(idx->ctr, KVP_CTR_RECOV_HELD_NOW, 0);
		if (blocks)
			KVP_LOG_W("recovery.held_dropped", "blocks=%llu reason=workers_never_registered",
				(unsigned long long)blocks);
		v->drop_ns = 0;
	}
	return 0;
}
