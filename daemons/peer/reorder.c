#include "daemons/peer/reorder.h"

#include <kvpick/err.h>

#include <stdlib.h>
#include <string.h>

#define CAP_FIRST 1024u

struct kvp_reorder_node {
	struct kvp_reorder_key key;
	uint64_t at_ns;
	uint32_t next, prev; /* by time; of node 0: oldest, newest */
	uint32_t chain;	     /* same bucket, or next free one */
	uint32_t pad;
};

static uint32_t *bucket(const struct kvp_reorder *s, struct kvp_reorder_key k)
{
	return &s->bucket[(uint32_t)k.lo & s->bucket_mask];
}

/* resize gives room for cap entries and, with them, as many buckets or more. */
static int resize(struct kvp_reorder *s, uint32_t cap)
{
	uint32_t buckets = CAP_FIRST;
	while (buckets < cap)
		buckets *= 2;
	struct kvp_reorder_node *node = realloc(s->node, (cap + 1ull) * sizeof(*node));
	if (!node)
		return KVP_ERR_SYS;
	s->node = node;
	if (s->kind == KVP_REORDER_VALUES) {
		struct kvp_reorder_val *val = realloc(s->val, (cap + 1ull) * sizeof(*val));
		if (!val)
			return KVP_ERR_SYS;
		s->val = val;
	}
	uint32_t *b = calloc(buckets, sizeof(*b));
	if (!b)
		return KVP_ERR_SYS;
	if (!s->cap)
		memset(&node[0], 0, sizeof(node[0]));
	free(s->bucket);
	s->bucket = b;
	s->bucket_mask = buckets - 1;
	for (uint32_t i = s->cap ? node[0].next : 0; i; i = node[i].next) {
		uint32_t *at = bucket(s, node[i].key);
		node[i].chain = *at;
		*at = i;
	}
	for (uint32_t i = cap; i > s->cap; i--) {
		node[i].chain = s->free;
		s->free = i;
	}
	s->cap = cap;
	return KVP_OK;
}

int kvp_reorder_init(struct kvp_reorder *s, uint32_t max, enum kvp_reorder_kind kind)
{
	*s = (struct kvp_reorder){.max = max, .kind = kind};
	int rc = resize(s, max < CAP_FIRST ? max : CAP_FIRST);
	if (rc)
		kvp_reorder_close(s);
	return rc;
}

void kvp_reorder_close(struct kvp_reorder *s)
{
	free(s->node);
	free(s->val);
	free(s->bucket);
	*s = (struct kvp_reorder){.node = NULL};
}

static uint32_t find(const struct kvp_reorder *s, struct kvp_reorder_key k)
{
	uint32_t i = *bucket(s, k);
	while (i && (s->node[i].key.lo != k.lo || s->node[i].key.hi != k.hi))
		i = s->node[i].chain;
	return i;
}

static void unlink_time(struct kvp_reorder *s, uint32_t i)
{
	struct kvp_reorder_node *n = s->node;
	n[n[i].prev].next = n[i].next;
	n[n[i].next].prev = n[i].prev;
}

static void link_newest(struct kvp_reorder *s, uint32_t i)
{
	struct kvp_reorder_node *n = s->node;
	n[i].prev = n[0].prev;
	n[i].next = 0;
	n[n[0].prev].next = i;
	n[0].prev = i;
}

static void drop(struct kvp_reorder *s, uint32_t i)
{
	uint32_t *at = bucket(s, s->node[i].key);
	while (*at != i)
		at = &s->node[*at].chain;
	*at = s->node[i].chain;
	unlink_time(s, i);
	s->node[i].chain = s->free;
	s->free = i;
	s->cnt--;
}

int kvp_reorder_put(struct kvp_reorder *s, struct kvp_reorder_key k, uint64_t now_ns)
{
	uint32_t i = find(s, k);
	int rc = KVP_OK;
	if (i) {
		unlink_time(s, i);
	} else {
		if (!s->free && s->cap < s->max)
			rc = resize(s, s->cap <= s->max / 2 ? 2 * s->cap : s->max);
		if (!s->free) {
			drop(s, s->node[0].next);
			s->evicted++;
		}
		i = s->free;
		s->free = s->node[i].chain;
		s->node[i].key = k;
		uint32_t *at = bucket(s, k);
		s->node[i].chain = *at;
		*at = i;
		s->cnt++;
		if (s->val)
			s->val[i] = (struct kvp_reorder_val){0, 0};
	}
	s->node[i].at_ns = now_ns;
	link_newest(s, i);
	return rc;
}

int kvp_reorder_has(const struct kvp_reorder *s, struct kvp_reorder_key k)
{
	return find(s, k) != 0;
}

struct kvp_reorder_val *kvp_reorder_val(const struct kvp_reorder *s, struct kvp_reorder_key k)
{
	uint32_t i = find(s, k);
	return i && s->val ? &s->val[i] : NULL;
}

int kvp_reorder_take(struct kvp_reorder *s, struct kvp_reorder_key k)
{
	uint32_t i = find(s, k);
	if (i)
		drop(s, i);
	return i != 0;
}

uint32_t kvp_reorder_expire(struct kvp_reorder *s, uint64_t now_ns, uint64_t age_ns)
{
	uint32_t cnt = 0;
	for (uint32_t i; (i = s->node[0].next) != 0 && now_ns - s->node[i].at_ns > age_ns; cnt++)
		drop(s, i);
	return cnt;
}
