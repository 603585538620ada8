/* ipc/extproc_msg.c - requests from bytes, answers to bytes. protobuf-c does the wire format; its memory
 * comes from an arena with a bound, because a message of empty headers would otherwise grow forty-fold. */
#include "ipc/extproc_msg.h"
#include "ipc/extproc_priv.h"

#include <kvpick/err.h>

#include <stdlib.h>
#include <string.h>

#define SLACK_BYTES (256u << 10)
#define KEEP_BYTES (1u << 20) /* an arena that grew beyond this is given back before the next message */

static const struct kvp_extproc_str space_hint = {"envoy.lb.subset_hint", 20};
static const struct kvp_extproc_str space_lb = {"envoy.lb", 8};
static const struct kvp_extproc_str key_hint = {"x-gateway-destination-endpoint-subset", 37};
static const struct kvp_extproc_str key_served = {"x-gateway-destination-endpoint-served", 37};

struct kvp_extproc_dec *kvp_extproc_dec_new(void)
{
	return calloc(1, sizeof(struct kvp_extproc_dec));
}

void kvp_extproc_dec_delete(struct kvp_extproc_dec *d)
{
	if (d)
		free(d->arena);
	free(d);
}

void *kvp_extproc_arena_alloc(void *ctx, size_t bytes)
{
	struct kvp_extproc_dec *d = ctx;
	if (bytes > d->max - d->used) {
		d->over = 1;
		return NULL;
	}
	void *p = d->arena + d->used;
	bytes = (bytes + 15) & ~(size_t)15;
	d->used = bytes > d->max - d->used ? d->max : d->used + bytes;
	return p;
}

static void arena_free(void *ctx, void *p)
{
	(void)ctx;
	(void)p;
}

int kvp_extproc_arena_begin(struct kvp_extproc_dec *d, size_t len)
{
	size_t want = 3 * len + SLACK_BYTES;
	if (d->size < want || d->size > KEEP_BYTES) {
		if (want < KEEP_BYTES)
			want = want < KEEP_BYTES / 2 ? KEEP_BYTES / 2 : KEEP_BYTES;
		if (d->size != want) {
			free(d->arena);
			d->size = 0;
			d->arena = malloc(want);
			if (!d->arena)
				return KVP_ERR_SYS;
			d->size = want;
		}
	}
	d->max = 3 * len + SLACK_BYTES;
	d->used = 0;
	d->over = 0;
	d->alloc = (ProtobufCAllocator){kvp_extproc_arena_alloc, arena_free, d};
	return KVP_OK;
}

struct kvp_extproc_str kvp_extproc_text(ProtobufCBinaryData b)
{
	return (struct kvp_extproc_str){(const char *)b.data, (uint32_t)b.len};
}

static int same(ProtobufCBinaryData b, struct kvp_extproc_str s)
{
	return b.len == s.len && memcmp(b.data, s.p, s.len) == 0;
}

static int blank(char c)
{
	return c == ' ' || (c >= '\t' && c <= '\r');
}

/* next_entry takes the next entry of a comma list, trimmed; 0 behind the last. Entries may be empty. */
static int next_entry(struct kvp_extproc_str *list, struct kvp_extproc_str *entry)
{
	if (!list->p)
		return 0;
	const char *comma = list->len ? memchr(list->p, ',', list->len) : NULL;
	uint32_t n = comma ? (uint32_t)(comma - list->p) : list->len;
	*entry = (struct kvp_extproc_str){list->p, n};
	*list = comma ? (struct kvp_extproc_str){comma + 1, list->len - n - 1} : (struct kvp_extproc_str){0};
	while (entry->len && blank(entry->p[0])) {
		entry->p++;
		entry->len--;
	}
	while (entry->len && blank(entry->p[entry->len - 1]))
		entry->len--;
	return 1;
}

static uint32_t add_entries(ProtobufCBinaryData text, struct kvp_extproc_str *out, uint32_t cnt, uint32_t max)
{
	struct kvp_extproc_str list = kvp_extproc_text(text), e;
	while (cnt < max && next_entry(&list, &e))
		if (e.len)
			out[cnt++] = e;
	return cnt;
}

/* Entries are counted before they are taken, so that their table is exact. */
static uint32_t count_commas(ProtobufCBinaryData b)
{
	uint32_t n = 1;
	for (size_t i = 0; i < b.len; i++)
		n += b.data[i] == ',';
	return n;
}

static int take_hint(struct kvp_extproc_dec *d, const Kvp__Extproc__Value *v, struct kvp_extproc_req *out)
{
	uint32_t max = 0, cnt = 0;
	int list = v && v->kind_case == KVP__EXTPROC__VALUE__KIND_LIST_VALUE;
	int string = v && v->kind_case == KVP__EXTPROC__VALUE__KIND_STRING_VALUE;
	if (string)
		max = count_commas(v->string_value);
	for (size_t i = 0; list && i < v->list_value->n_values; i++)
		if (v->list_value->values[i]->kind_case == KVP__EXTPROC__ITEM__KIND_STRING_VALUE)
			max += count_commas(v->list_value->values[i]->string_value);
	struct kvp_extproc_str *entry = kvp_extproc_arena_alloc(d, max * sizeof(*entry));
	if (!entry)
		return KVP_ERR_LIMIT;
	if (string)
		cnt = add_entries(v->string_value, entry, cnt, max);
	for (size_t i = 0; list && i < v->list_value->n_values; i++)
		if (v->list_value->values[i]->kind_case == KVP__EXTPROC__ITEM__KIND_STRING_VALUE)
			cnt = add_entries(v->list_value->values[i]->string_value, entry, cnt, max);
	out->subset_hint = KVP_EXTPROC_HINT_PRESENT;
	out->subset = entry;
	out->subset_cnt = cnt;
	return KVP_OK;
}

static struct kvp_extproc_str last_entry(ProtobufCBinaryData text)
{
	struct kvp_extproc_str list = kvp_extproc_text(text), e, last = {0};
	while (next_entry(&list, &e))
		if (e.len)
			last = e;
	return last;
}

static void take_served(const Kvp__Extproc__Value *v, struct kvp_extproc_req *out)
{
	out->served = (struct kvp_extproc_str){0};
	if (!v)
		return;
	if (v->kind_case == KVP__EXTPROC__VALUE__KIND_STRING_VALUE)
		out->served = last_entry(v->string_value);
	if (v->kind_case != KVP__EXTPROC__VALUE__KIND_LIST_VALUE)
		return;
	for (size_t i = 0; i < v->list_value->n_values; i++) {
		const Kvp__Extproc__Item *item = v->list_value->values[i];
		struct kvp_extproc_str e = {0};
		if (item->kind_case == KVP__EXTPROC__ITEM__KIND_STRING_VALUE)
			e = last_entry(item->string_value);
		if (e.len)
			out->served = e;
	}
}

/* A map may hold a key twice; the last one counts, as in any protobuf map. */
static int take_metadata(
	struct kvp_extproc_dec *d, const Kvp__Extproc__Metadata *m, struct kvp_extproc_req *out)
{
	const Kvp__Extproc__StructEntry *hint = NULL, *served = NULL;
	for (size_t i = 0; i < m->n_filter_metadata; i++) {
		const Kvp__Extproc__MetadataEntry *e = m->filter_metadata[i];
		int is_hint = same(e->key, space_hint), is_lb = same(e->key, space_lb);
		if (is_hint)
			hint = NULL;
		if (is_lb)
			served = NULL;
		for (size_t k = 0; e->value && k < e->value->n_fields; k++) {
			const Kvp__Extproc__StructEntry *f = e->value->fields[k];
			if (is_hint && same(f->key, key_hint))
				hint = f;
			if (is_lb && same(f->key, key_served))
				served = f;
		}
	}
	if (served)
		take_served(served->value, out);
	return hint ? take_hint(d, hint->value, out) : KVP_OK;
}

int kvp_extproc_take_headers(struct kvp_extproc_dec *d, const Kvp__Extproc__HeaderMap *map,
	const struct kvp_extproc_header **header, uint32_t *cnt)
{
	if (!map || !map->n_headers)
		return KVP_OK;
	struct kvp_extproc_header *h = kvp_extproc_arena_alloc(d, map->n_headers * sizeof(*h));
	if (!h)
		return KVP_ERR_LIMIT;
	for (size_t i = 0; i < map->n_headers; i++) {
		const Kvp__Extproc__HeaderValue *v = map->headers[i];
		h[i].key = kvp_extproc_text(v->key);
		h[i].value = kvp_extproc_text(v->raw_value.len ? v->raw_value : v->value);
	}
	*header = h;
	*cnt = (uint32_t)map->n_headers;
	return KVP_OK;
}

static int take_request(
	struct kvp_extproc_dec *d, const Kvp__Extproc__ProcessingRequest *m, struct kvp_extproc_req *out)
{
	out->kind = (enum kvp_extproc_kind)m->request_case;
	switch (out->kind) {
	case KVP_EXTPROC_REQUEST_HEADERS:
	case KVP_EXTPROC_RESPONSE_HEADERS: /* the members of a oneof share their place */
		out->end_of_stream = (uint8_t) !!m->request_headers->end_of_stream;
		return kvp_extproc_take_headers(
			d, m->request_headers->headers, &out->header, &out->header_cnt);
	case KVP_EXTPROC_REQUEST_BODY:
	case KVP_EXTPROC_RESPONSE_BODY:
		out->end_of_stream = (uint8_t) !!m->request_body->end_of_stream;
		out->body = kvp_extproc_text(m->request_body->body);
		return KVP_OK;
	case KVP_EXTPROC_REQUEST_TRAILERS:
	case KVP_EXTPROC_RESPONSE_TRAILERS:
		return kvp_extproc_take_headers(
			d, m->request_trailers->trailers, &out->header, &out->header_cnt);
	default:
		out->kind = KVP_EXTPROC_NONE;
		return KVP_OK;
	}
}

int kvp_extproc_req_decode(
	struct kvp_extproc_dec *d, const void *data, size_t len, struct kvp_extproc_req *out)
{
	struct kvp_extproc_req r = {0};
	if (len > KVP_EXTPROC_MSG_MAX)
		return KVP_ERR_LIMIT;
	int rc = kvp_extproc_arena_begin(d, len);
	if (rc != KVP_OK)
		return rc;
	const Kvp__Extproc__ProcessingRequest *m =
		kvp__extproc__processing_request__unpack(&d->alloc, len, data);
	if (!m)
		return d->over ? KVP_ERR_LIMIT : KVP_ERR_PROTO;
	rc = take_request(d, m, &r);
	if (rc == KVP_OK && m->metadata_context)
		rc = take_metadata(d, m->metadata_context, &r);
	if (rc != KVP_OK)
		return rc;
	r.observability_mode = (uint8_t) !!m->observability_mode;
	if (m->protocol_config) {
		r.has_config = 1;
		r.request_body_mode = m->protocol_config->request_body_mode;
		r.response_body_mode = m->protocol_config->response_body_mode;
		r.send_body_without_waiting =
			(uint8_t) !!m->protocol_config->send_body_without_waiting_for_header_response;
	}
	*out = r;
	return KVP_OK;
}
