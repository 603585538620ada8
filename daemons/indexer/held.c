/* daemons/indexer/held.c — lists of records by rank. */
#include "daemons/indexer/held.h"

#include <kvpick/err.h>
#include <kvpick/mix.h>
#include <stdlib.h>
#include <string.h>

enum { BUCKETS = 4096, FIRST_WORDS = 256 };

struct rank {
	struct rank *next;
	uint64_t worker_id;
	uint32_t dp_rank, role, key_len;
	char *key;
	uint64_t cap;
	struct kvp_held_list list;
};

struct kvp_held {
	struct rank *bucket[BUCKETS];
	struct rank *last; /* put to last */
	uint64_t max_words, words, blocks;
	uint64_t steps;
	uint32_t ranks;
	struct kvp_mix mix; /* peers choose worker ids */
};

struct kvp_held *kvp_held_new(uint64_t max_words)
{
	struct kvp_held *h = calloc(1, sizeof(*h));
	if (h && kvp_mix_draw(&h->mix)) {
		free(h);
		return NULL;
	}
	if (h)
		h->max_words = max_words;
	return h;
}

static void rank_free(struct rank *r)
{
	free(r->list.word);
	free(r->key);
	free(r);
}

uint64_t kvp_held_drop(struct kvp_held *h)
{
	uint64_t blocks = h->blocks;
	for (uint32_t i = 0; i < BUCKETS; i++) {
		for (struct rank *r = h->bucket[i], *next; r; r = next) {
			next = r->next;
			rank_free(r);
		}
		h->bucket[i] = NULL;
	}
	h->last = NULL;
	h->words = h->blocks = 0;
	h->ranks = 0;
	return blocks;
}

void kvp_held_free(struct kvp_held *h)
{
	if (!h)
		return;
	kvp_held_drop(h);
	free(h);
}

uint64_t kvp_held_blocks(const struct kvp_held *h)
{
	return h->blocks;
}

uint32_t kvp_held_ranks(const struct kvp_held *h)
{
	return h->ranks;
}

uint64_t kvp_held_steps(const struct kvp_held *h)
{
	return h->steps;
}

static uint32_t bucket_of(const struct kvp_held *h, uint64_t worker_id, uint32_t dp_rank)
{
	uint64_t worker = kvp_mix_u64(&h->mix, worker_id);
	return (uint32_t)kvp_mix_u64(&h->mix, worker ^ dp_rank) & (BUCKETS - 1);
}

static int is_rank(const struct rank *r, uint32_t role, const char *key, uint32_t key_len, uint64_t worker_id,
	uint32_t dp_rank)
{
	return r->worker_id == worker_id && r->dp_rank == dp_rank && r->role == role &&
	       r->key_len == key_len && memcmp(r->key, key, key_len) == 0;
}

static struct rank **find(struct kvp_held *h, uint32_t role, const char *key, uint32_t key_len,
	uint64_t worker_id, uint32_t dp_rank)
{
	struct rank **at = &h->bucket[bucket_of(h, worker_id, dp_rank)];
	for (; *at && !is_rank(*at, role, key, key_len, worker_id, dp_rank); h->steps++)
		at = &(*at)->next;
	return at;
}

static struct rank *rank_new(
	struct kvp_held *h, const struct kvp_held_key *k, uint64_t worker_id, uint32_t dp_rank)
{
	struct rank *r = calloc(1, sizeof(*r));
	char *key = malloc(k->len + 1ull);
	if (!r || !key) {
		free(r);
		free(key);
		return NULL;
	}
	memcpy(key, k->text, k->len);
	key[k->len] = 0;
	*r = (struct rank){.worker_id = worker_id,
		.dp_rank = dp_rank,
		.role = k->role,
		.key_len = k->len,
		.key = key,
		.list = {.block_size = k->block_size}};
	h->ranks++;
	return r;
}

/* Everything of a rank is void: cleared, or told by a peer with another block size. */
static void rank_empty(struct kvp_held *h, struct rank *r)
{
	h->words -= r->list.cnt;
	h->blocks -= r->list.blocks;
	r->list.cnt = r->list.blocks = 0;
}

static int rank_room(struct rank *r, uint64_t words)
{
	if (r->list.cnt + words <= r->cap)
		return KVP_OK;
	uint64_t cap = r->cap ? r->cap + r->cap / 2 : FIRST_WORDS;
	cap = cap < r->list.cnt + words ? r->list.cnt + words : cap;
	uint64_t *grown = realloc(r->list.word, cap * sizeof(*grown));
	if (!grown)
		return KVP_ERR_SYS;
	r->list.word = grown;
	r->cap = cap;
	return KVP_OK;
}

int kvp_held_put(struct kvp_held *h, const struct kvp_held_key *k, const struct kvp_recov_rec *rec)
{
	uint64_t words = KVP_RECOV_REC_BYTES(rec->op, rec->n) / 8;
	struct rank *r = h->last;
	if (!r || !is_rank(r, k->role, k->text, k->len, rec->worker_id, rec->dp_rank)) {
		struct rank **at = find(h, k->role, k->text, k->len, rec->worker_id, rec->dp_rank);
		if (!*at && h->ranks >= KVP_HELD_RANKS)
			return KVP_ERR_FULL;
		if (!*at)
			*at = rank_new(h, k, rec->worker_id, rec->dp_rank);
		r = *at;
		if (!r)
			return KVP_ERR_SYS;
		h->last = r;
	}
	if (rec->op == KVP_RECOV_CLEAR || r->list.block_size != k->block_size)
		rank_empty(h, r);
	r->list.block_size = k->block_size;
	if (rec->op == KVP_RECOV_CLEAR)
		return KVP_OK;
	if (words > h->max_words - h->words)
		return KVP_ERR_FULL;
	int rc = rank_room(r, words);
	if (rc)
		return rc;
	memcpy(r->list.word + r->list.cnt, rec, words * 8);
	r->list.cnt += words;
	h->words += words;
	if (rec->op == KVP_RECOV_STORE) {
		r->list.blocks += rec->n;
		h->blocks += rec->n;
	}
	return KVP_OK;
}

int kvp_held_take(struct kvp_held *h, uint32_t role, const char *key, uint32_t key_len, uint64_t worker_id,
	uint32_t dp_rank, struct kvp_held_list *out)
{
	struct rank **at = find(h, role, key, key_len, worker_id, dp_rank), *r = *at;
	if (!r)
		return 0;
	*at = r->next;
	h->last = NULL;
	h->ranks--;
	h->words -= r->list.cnt;
	h->blocks -= r->list.blocks;
	*out = r->list;
	r->list.word = NULL;
	rank_free(r);
	return 1;
}

void kvp_held_free_list(struct kvp_held_list *l)
{
	free(l->word);
	memset(l, 0, sizeof(*l));
}
