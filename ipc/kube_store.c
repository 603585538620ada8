/* ipc/kube_store.c — objects of one kind by name, and what is kept of each. */
#include "ipc/kube_priv.h"

#include <stdlib.h>
#include <string.h>

#define BUCKETS_MIN 64u

static uint64_t hash_of(const char *p, size_t len)
{
	uint64_t h = 0xcbf29ce484222325ull;
	for (size_t i = 0; i < len; i++)
		h = (h ^ (uint8_t)p[i]) * 0x100000001b3ull;
	return h ^ h >> 32;
}

static struct kube_entry **place(const struct kube_store *s, const char *name, size_t name_len, uint64_t hash)
{
	struct kube_entry **at = &s->bucket[hash & (s->bucket_cnt - 1)];
	while (*at && ((*at)->hash != hash || (*at)->name_len != name_len ||
			      memcmp((*at)->bytes, name, name_len) != 0))
		at = &(*at)->next;
	return at;
}

struct kube_entry *kube_store_find(const struct kube_store *s, const char *name, size_t name_len)
{
	return s->cnt ? *place(s, name, name_len, hash_of(name, name_len)) : NULL;
}

static int grow(struct kube_store *s)
{
	uint32_t cnt = s->bucket_cnt ? 2 * s->bucket_cnt : BUCKETS_MIN;
	struct kube_entry **b = calloc(cnt, sizeof(*b));
	if (!b)
		return KVP_ERR_SYS;
	for (uint32_t i = 0; i < s->bucket_cnt; i++)
		for (struct kube_entry *e = s->bucket[i], *next; e; e = next) {
			next = e->next;
			e->next = b[e->hash & (cnt - 1)];
			b[e->hash & (cnt - 1)] = e;
		}
	free(s->bucket);
	s->bucket = b;
	s->bucket_cnt = cnt;
	return KVP_OK;
}

int kube_store_put(struct kube_store *s, const char *name, size_t name_len, struct kvp_kube_bytes is,
	struct kube_entry **was)
{
	if (s->cnt >= s->bucket_cnt && grow(s))
		return KVP_ERR_SYS;
	struct kube_entry *e = malloc(sizeof(*e) + name_len + 1 + is.len);
	if (!e)
		return KVP_ERR_SYS;
	*e = (struct kube_entry){
		.hash = hash_of(name, name_len), .name_len = (uint32_t)name_len, .len = is.len};
	memcpy(e->bytes, name, name_len);
	e->bytes[name_len] = 0;
	if (is.len)
		memcpy(e->bytes + name_len + 1, is.p, is.len);
	struct kube_entry **at = place(s, name, name_len, e->hash);
	*was = *at;
	e->next = *at ? (*at)->next : NULL;
	s->cnt += !*at;
	*at = e;
	return KVP_OK;
}

struct kube_entry *kube_store_take(struct kube_store *s, const char *name, size_t name_len)
{
	if (!s->cnt)
		return NULL;
	struct kube_entry **at = place(s, name, name_len, hash_of(name, name_len)), *e = *at;
	if (e) {
		*at = e->next;
		s->cnt--;
	}
	return e;
}

struct kube_entry *kube_store_next(const struct kube_store *s, const struct kube_entry *e)
{
	if (e && e->next)
		return e->next;
	for (uint64_t i = e ? (e->hash & (s->bucket_cnt - 1)) + 1 : 0; i < s->bucket_cnt; i++)
		if (s->bucket[i])
			return s->bucket[i];
	return NULL;
}

void kube_store_clear(struct kube_store *s)
{
	for (uint32_t i = 0; i < s->bucket_cnt; i++)
		for (struct kube_entry *e = s->bucket[i], *next; e; e = next) {
			next = e->next;
			free(e);
		}
	free(s->bucket);
	memset(s, 0, sizeof(*s));
}
