/* shm/memo.c — chained map of the notes. */
#include "shm/memo.h"

#include <kvpick/mix.h>
#include <kvpick/point.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define KVP_MEMO_MAGIC 0x6b76702d6d656d6full
#define KVP_MEMO_LAYOUT 2
#define SWEEP_PER_NEW 2 /* buckets looked through for each new node */

struct kvp_memo_node {
	uint64_t id, word[2];
	uint32_t next; /* node + 1; 0 = end */
	uint32_t rank_slot, epoch, dp_rank;
	uint32_t state, pad;
};

struct kvp_memo_shm {
	struct kvp_objhdr hdr;
	uint32_t is_used; /* 0: no bucket has ever been touched */
	uint32_t pad0;
	struct kvp_mix mix; /* constant; engines choose the ids */
	uint64_t pad1[5];
};

struct sizes {
	uint64_t epoch_off, bucket_off, node_off, bytes;
	uint32_t bucket_max, node_max;
};

static uint32_t memo_layout_hash(void)
{
	static const size_t word[] = {sizeof(struct kvp_memo_node), offsetof(struct kvp_memo_node, next),
		offsetof(struct kvp_memo_node, epoch), offsetof(struct kvp_memo_node, state),
		sizeof(struct kvp_memo_shm), sizeof(struct kvp_memo_note)};
	return kvp_obj_hash(word, sizeof(word) / sizeof(word[0]));
}

/* Each rank holds its own blocks, so there may be more notes than blocks in the tree. */
static int sizes_of(const struct kvp_geom *g, struct sizes *s)
{
	if (!g || g->rank_max < 1 || g->rank_max > 65536 || g->block_max < 10000 ||
		g->block_max > 1000000000ull)
		return KVP_ERR_INVAL;
	uint64_t buckets = 1024;
	while (buckets < g->block_max / 4)
		buckets *= 2;
	s->bucket_max = (uint32_t)buckets;
	s->node_max = (uint32_t)(2 * g->block_max);
	s->epoch_off = kvp_align_up(sizeof(struct kvp_memo_shm), KVP_PAGE);
	s->bucket_off = s->epoch_off + kvp_align_up(g->rank_max * 4ull, KVP_PAGE);
	s->node_off = s->bucket_off + kvp_align_up(buckets * 4, KVP_PAGE);
	s->bytes = s->node_off + kvp_align_up(s->node_max * sizeof(struct kvp_memo_node), KVP_PAGE);
	return KVP_OK;
}

uint64_t kvp_memo_align(void)
{
	return KVP_PAGE;
}

uint64_t kvp_memo_footprint(const struct kvp_geom *g)
{
	struct sizes s;
	return sizes_of(g, &s) ? 0 : s.bytes;
}

int kvp_memo_new(void *mem, const struct kvp_geom *g)
{
	struct kvp_memo_shm *shm = mem;
	uint64_t footprint = kvp_memo_footprint(g);
	if (!mem || ((uintptr_t)mem & (KVP_CACHE_LINE - 1)) || !footprint)
		return KVP_ERR_INVAL;
	kvp_obj_begin(&shm->hdr, KVP_MEMO_LAYOUT, memo_layout_hash(), footprint, g->region_gen);
	shm->mix = kvp_mix_of(g->salt);
	kvp_obj_ready(&shm->hdr, KVP_MEMO_MAGIC); /* zeros are empty buckets */
	return KVP_OK;
}

/* -- taking over -- */

static uint32_t bucket_of(const struct kvp_memo *m, uint32_t rank_slot, uint32_t dp_rank, uint64_t id)
{
	uint64_t owner = kvp_mix_u64(&m->shm->mix, (uint64_t)rank_slot << 32 | dp_rank);
	return (uint32_t)kvp_mix_u64(&m->shm->mix, owner ^ id) & (m->bucket_max - 1);
}

static int is_alive(const struct kvp_memo *m, const struct kvp_memo_node *n)
{
	return n->epoch == m->epoch[n->rank_slot];
}

static int same_key(const struct kvp_memo_node *a, const struct kvp_memo_node *b)
{
	return a->id == b->id && a->rank_slot == b->rank_slot && a->dp_rank == b->dp_rank &&
	       a->epoch == b->epoch && !((a->state ^ b->state) & KVP_MEMO_KIND);
}

/* Is there a node of this key in front of it? Its maker was killed before it could unlink this one. */
static int is_replaced(const struct kvp_memo *m, uint32_t b, const struct kvp_memo_node *n)
{
	const struct kvp_memo_node *at = &m->node[m->bucket[b] - 1];
	while (at != n && !same_key(at, n))
		at = &m->node[at->next - 1];
	return at != n;
}

/* Marks the nodes of one chain; KVP_ERR_CORRUPT if it leads out of the arena, or to a node seen before. */
static int walk(struct kvp_memo *m, uint32_t b, uint64_t *seen)
{
	uint32_t *link = &m->bucket[b];
	while (*link) {
		uint32_t i = *link - 1;
		if (i >= m->node_max || (seen[i / 64] >> (i % 64) & 1))
			return KVP_ERR_CORRUPT;
		struct kvp_memo_node *n = &m->node[i];
		if (n->rank_slot >= m->rank_max || bucket_of(m, n->rank_slot, n->dp_rank, n->id) != b)
			return KVP_ERR_CORRUPT;
		if (m->fresh <= i)
			m->fresh = i + 1;
		if (is_replaced(m, b, n)) {
			kvp_st_rel_u32(link, n->next);
			continue;
		}
		seen[i / 64] |= 1ull << (i % 64);
		m->live_cnt[n->rank_slot] += (uint32_t)is_alive(m, n);
		link = &n->next;
	}
	return KVP_OK;
}

static int push_free(struct kvp_memo *m, uint32_t i)
{
	if (m->free_cnt == m->free_max) {
		uint32_t max = m->free_max ? 2 * m->free_max : 64;
		uint32_t *grown = realloc(m->free, max * sizeof(*grown));
		if (!grown)
			return KVP_ERR_SYS; /* the node is free again after the next start */
		m->free = grown;
		m->free_max = max;
	}
	m->free[m->free_cnt++] = i;
	return KVP_OK;
}

static int recover(struct kvp_memo *m)
{
	uint64_t *seen = calloc(m->node_max / 64 + 1, 8);
	if (!seen)
		return KVP_ERR_SYS;
	int rc = KVP_OK;
	for (uint32_t b = 0; !rc && b < m->bucket_max; b++)
		rc = walk(m, b, seen);
	for (uint32_t i = 0; !rc && i < m->fresh; i++)
		if (!(seen[i / 64] >> (i % 64) & 1))
			rc = push_free(m, i);
	free(seen);
	return rc;
}

static void empty(struct kvp_memo *m)
{
	memset(m->bucket, 0, m->bucket_max * sizeof(*m->bucket));
	memset(m->live_cnt, 0, m->rank_max * sizeof(*m->live_cnt));
	m->fresh = m->free_cnt = 0;
}

int kvp_memo_join(void *mem, const struct kvp_geom *g, struct kvp_memo *out)
{
	struct sizes s;
	if (!out || sizes_of(g, &s))
		return KVP_ERR_INVAL;
	int rc = kvp_obj_join(mem, KVP_MEMO_MAGIC, KVP_MEMO_LAYOUT, memo_layout_hash());
	if (rc)
		return rc;
	struct kvp_memo_shm *shm = mem;
	if (shm->hdr.footprint != s.bytes || shm->hdr.region_gen != g->region_gen)
		return KVP_ERR_LAYOUT;
	uint8_t *base = mem;
	struct kvp_memo m = {.shm = shm,
		.epoch = (uint32_t *)(void *)(base + s.epoch_off),
		.bucket = (uint32_t *)(void *)(base + s.bucket_off),
		.node = (struct kvp_memo_node *)(void *)(base + s.node_off),
		.rank_max = g->rank_max,
		.bucket_max = s.bucket_max,
		.node_max = s.node_max};
	m.live_cnt = calloc(g->rank_max, sizeof(*m.live_cnt));
	if (!m.live_cnt)
		return KVP_ERR_SYS;
	rc = kvp_ld_rlx_u32(&shm->is_used) ? recover(&m) : KVP_OK;
	if (rc == KVP_ERR_CORRUPT)
		empty(&m);
	if (rc == KVP_ERR_SYS)
		kvp_memo_leave(&m);
	else
		*out = m;
	return rc;
}

void kvp_memo_leave(struct kvp_memo *m)
{
	free(m->free);
	free(m->live_cnt);
	memset(m, 0, sizeof(*m));
}

int kvp_memo_delete(void *mem)
{
	if (!mem)
		return KVP_ERR_INVAL;
	kvp_obj_delete(mem);
	return KVP_OK;
}

uint64_t kvp_memo_check(const struct kvp_memo *m)
{
	struct kvp_memo copy = *m;
	uint64_t faults = 0, *seen = calloc(m->node_max / 64 + 1, 8);
	copy.live_cnt = calloc(m->rank_max, sizeof(*copy.live_cnt));
	for (uint32_t b = 0; seen && copy.live_cnt && b < m->bucket_max; b++)
		if (walk(&copy, b, seen) && ++faults <= 10)
			fprintf(stderr, "memo check: bucket %u leads astray\n", b);
	for (uint32_t i = 0; !faults && copy.live_cnt && i < m->rank_max; i++) {
		if (copy.live_cnt[i] != m->live_cnt[i] && ++faults <= 10)
			fprintf(stderr, "memo check: rank slot %u counts %u notes, has %u\n", i,
				m->live_cnt[i], copy.live_cnt[i]);
	}
	free(seen);
	free(copy.live_cnt);
	return faults;
}

/* -- changes -- */

static void unlink_node(struct kvp_memo *m, uint32_t *link)
{
	uint32_t i = *link - 1;
	kvp_st_rel_u32(link, m->node[i].next);
	push_free(m, i);
}

/* The link to the key's node, or NULL; dead nodes met on the way are freed. */
static uint32_t *find(struct kvp_memo *m, uint32_t b, uint32_t rank_slot, const struct kvp_memo_note *note)
{
	uint32_t *link = &m->bucket[b];
	while (*link) {
		struct kvp_memo_node *n = &m->node[*link - 1];
		m->steps++;
		if (!is_alive(m, n)) {
			unlink_node(m, link);
			continue;
		}
		if (n->id == note->id && n->rank_slot == rank_slot && n->dp_rank == note->dp_rank &&
			!((n->state ^ note->state) & KVP_MEMO_KIND))
			return link;
		link = &n->next;
	}
	return NULL;
}

/* Frees the dead nodes of the next buckets, so that they are found before the arena is used up. */
static void sweep_some(struct kvp_memo *m, uint32_t buckets)
{
	for (; buckets; buckets--) {
		uint32_t *link = &m->bucket[m->sweep];
		while (*link) {
			struct kvp_memo_node *n = &m->node[*link - 1];
			if (is_alive(m, n))
				link = &n->next;
			else
				unlink_node(m, link);
		}
		m->sweep = (m->sweep + 1) & (m->bucket_max - 1);
	}
}

static uint32_t node_take(struct kvp_memo *m)
{
	if (m->free_cnt)
		return m->free[--m->free_cnt];
	if (m->fresh < m->node_max)
		return m->fresh++;
	return UINT32_MAX;
}

static int insert(struct kvp_memo *m, uint32_t b, uint32_t rank_slot, const struct kvp_memo_note *note)
{
	uint32_t i = node_take(m);
	if (i == UINT32_MAX)
		return KVP_ERR_FULL;
	m->node[i] = (struct kvp_memo_node){.id = note->id,
		.word = {note->word[0], note->word[1]},
		.next = m->bucket[b],
		.rank_slot = rank_slot,
		.epoch = m->epoch[rank_slot],
		.dp_rank = note->dp_rank,
		.state = note->state};
	KVP_POINT("memo:filled");
	kvp_st_rel_u32(&m->bucket[b], i + 1); /* the node's fields first: a successor may walk here */
	KVP_POINT("memo:linked");
	return KVP_OK;
}

static int put_one(struct kvp_memo *m, uint32_t rank_slot, const struct kvp_memo_note *note)
{
	uint32_t b = bucket_of(m, rank_slot, note->dp_rank, note->id);
	uint32_t *link = find(m, b, rank_slot, note);
	struct kvp_memo_node *n = link ? &m->node[*link - 1] : NULL;
	if (!(note->state & ~KVP_MEMO_KIND)) {
		if (link)
			unlink_node(m, link);
		m->live_cnt[rank_slot] -= link != NULL;
		return KVP_OK;
	}
	if (n && n->word[0] == note->word[0] && n->word[1] == note->word[1]) {
		kvp_st_rel_u32(&n->state, note->state);
		return KVP_OK;
	}
	sweep_some(m, SWEEP_PER_NEW);
	int rc = insert(m, b, rank_slot, note);
	if (rc)
		return rc;
	m->live_cnt[rank_slot]++;
	if (!n)
		return KVP_OK;
	/* The old node is behind the new one; the first to be found is not. */
	for (link = &m->node[m->bucket[b] - 1].next; *link && &m->node[*link - 1] != n; m->steps++)
		link = &m->node[*link - 1].next;
	if (*link) {
		unlink_node(m, link);
		m->live_cnt[rank_slot]--;
	}
	return KVP_OK;
}

int kvp_memo_put(struct kvp_memo *m, uint32_t rank_slot, const struct kvp_memo_note *note, uint32_t cnt,
	uint32_t *lost)
{
	if (rank_slot >= m->rank_max)
		return KVP_ERR_INVAL;
	if (!kvp_ld_rlx_u32(&m->shm->is_used))
		kvp_st_rel_u32(&m->shm->is_used, 1);
	*lost = 0;
	for (uint32_t i = 0; i < cnt; i++)
		*lost += put_one(m, rank_slot, &note[i]) == KVP_ERR_FULL;
	return *lost ? KVP_ERR_FULL : KVP_OK;
}

void kvp_memo_clear(struct kvp_memo *m, uint32_t rank_slot)
{
	if (rank_slot >= m->rank_max || !m->live_cnt[rank_slot])
		return;
	kvp_st_rel_u32(&m->epoch[rank_slot], m->epoch[rank_slot] + 1);
	m->live_cnt[rank_slot] = 0;
}

/* -- looking -- */

uint32_t kvp_memo_cnt(const struct kvp_memo *m, uint32_t rank_slot)
{
	return rank_slot < m->rank_max ? m->live_cnt[rank_slot] : 0;
}

void kvp_memo_get_all(const struct kvp_memo *m, struct kvp_memo_note *out, uint64_t *first)
{
	first[0] = 0;
	for (uint32_t i = 0; i < m->rank_max; i++)
		first[i + 1] = first[i] + m->live_cnt[i];
	if (!first[m->rank_max])
		return;
	for (uint32_t b = 0; b < m->bucket_max; b++) {
		for (uint32_t at = m->bucket[b]; at; at = m->node[at - 1].next) {
			const struct kvp_memo_node *n = &m->node[at - 1];
			if (is_alive(m, n))
				out[first[n->rank_slot]++] = (struct kvp_memo_note){n->id,
					{n->word[0], n->word[1]}, n->dp_rank, n->state};
		}
	}
	for (uint32_t i = m->rank_max; i > 0; i--)
		first[i] = first[i - 1];
	first[0] = 0;
}
