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
	if (d) {
		free(d->arena);
		free(d->flat);
	}
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

/* ---- a message in parts ---- */

#define REST_MAX 2048 /* bytes of a message with a body, but for the body, that are taken the short way */

/* Reads a varint of at most five bytes; 0 = it is not there in full. */
static size_t varint(const uint8_t *p, size_t n, uint64_t *v)
{
	*v = 0;
	for (size_t i = 0; i < n && i < 5; i++) {
		*v |= (uint64_t)(p[i] & 0x7f) << (7 * i);
		if (!(p[i] & 0x80))
			return i + 1;
	}
	return 0;
}

/* Copies n bytes from off of the whole message. */
static void gather(const struct iovec *part, size_t off, size_t n, uint8_t *to)
{
	for (; n; part++) {
		if (off >= part->iov_len) {
			off -= part->iov_len;
			continue;
		}
		size_t k = part->iov_len - off < n ? part->iov_len - off : n;
		memcpy(to, (const uint8_t *)part->iov_base + off, k);
		to += k;
		n -= k;
		off = 0;
	}
}

/* The places of n bytes from off on. */
static int point(struct kvp_extproc_dec *d, const struct iovec *part, uint32_t cnt, size_t off, size_t n,
	struct kvp_extproc_req *r)
{
	struct kvp_extproc_str *more = NULL;
	uint32_t more_cnt = 0;
	while (off >= part->iov_len) {
		off -= part->iov_len;
		part++;
		cnt--;
	}
	size_t k = part->iov_len - off < n ? part->iov_len - off : n;
	r->body = (struct kvp_extproc_str){(const char *)part->iov_base + off, (uint32_t)k};
	if (k == n)
		return KVP_OK;
	more = kvp_extproc_arena_alloc(d, cnt * sizeof(*more));
	if (!more)
		return KVP_ERR_LIMIT;
	while (n -= k) {
		part++;
		k = part->iov_len < n ? part->iov_len : n;
		more[more_cnt++] = (struct kvp_extproc_str){part->iov_base, (uint32_t)k};
	}
	r->body_more = more;
	r->body_more_cnt = more_cnt;
	return KVP_OK;
}

/* Field numbers below 8 are members of the oneof; the last one counts, so none may follow. */
static int only_others(const uint8_t *p, size_t n)
{
	uint64_t tag, v;
	while (n) {
		size_t k = varint(p, n, &tag);
		if (!k || tag >> 3 < 8 || (tag & 7) > 2 || (tag & 7) == 1)
			return 0;
		p += k;
		n -= k;
		k = varint(p, n, &v);
		if (!k || ((tag & 7) == 2 && v > n - k))
			return 0;
		k += (tag & 7) == 2 ? v : 0;
		p += k;
		n -= k;
	}
	return 1;
}

/* decode_body takes a message that begins with a body, as proxies send it: it is decoded without the body,
 * which is then put in where it stands. KVP_ERR_AGAIN: the message has another form. */
static int decode_body(struct kvp_extproc_dec *d, const struct iovec *part, uint32_t cnt, size_t len,
	struct kvp_extproc_req *out)
{
	const uint8_t *p = part->iov_base;
	uint8_t rest[REST_MAX + 8];
	uint64_t member, body;
	size_t n = part->iov_len, at = 1, k;
	if (n < 2 || (p[0] != (KVP_EXTPROC_REQUEST_BODY << 3 | 2) &&
			     p[0] != (KVP_EXTPROC_RESPONSE_BODY << 3 | 2)))
		return KVP_ERR_AGAIN;
	k = varint(p + at, n - at, &member);
	at += k;
	if (!k || member > len - at || !member || at >= n || p[at] != (1 << 3 | 2))
		return KVP_ERR_AGAIN;
	size_t end = at + member;
	k = varint(p + at + 1, n - at - 1, &body);
	at += 1 + k;
	if (!k || !body || at > end || body > end - at)
		return KVP_ERR_AGAIN;
	size_t behind = at + body, flags = end - behind;
	if (len - behind > REST_MAX || (flags && flags != 2))
		return KVP_ERR_AGAIN;
	rest[0] = p[0];
	rest[1] = (uint8_t)flags;
	gather(part, behind, len - behind, rest + 2);
	if ((flags && rest[2] != 2 << 3) || !only_others(rest + 2 + flags, len - end))
		return KVP_ERR_AGAIN;
	int rc = kvp_extproc_req_decode(d, rest, 2 + len - behind, out);
	return rc ? rc : point(d, part, cnt, at, body, out);
}

int kvp_extproc_req_decode_parts(
	struct kvp_extproc_dec *d, const struct iovec *part, uint32_t cnt, struct kvp_extproc_req *out)
{
	struct kvp_extproc_req r;
	size_t len = 0;
	for (uint32_t i = 0; i < cnt; i++)
		len += part[i].iov_len;
	if (len > KVP_EXTPROC_MSG_MAX)
		return KVP_ERR_LIMIT;
	int rc = cnt ? decode_body(d, part, cnt, len, &r) : KVP_ERR_AGAIN;
	/* A response's body is looked at as it passes, in one piece. */
	if (rc == KVP_OK && r.kind == KVP_EXTPROC_RESPONSE_BODY && r.body_more_cnt)
		rc = KVP_ERR_AGAIN;
	if (rc == KVP_OK)
		*out = r;
	if (rc != KVP_ERR_AGAIN)
		return rc;
	if (cnt <= 1)
		return kvp_extproc_req_decode(d, cnt ? part->iov_base : "", len, out);
	if (d->flat_size < len || d->flat_size > KEEP_BYTES) {
		free(d->flat);
		d->flat_size = len > KEEP_BYTES / 4 ? len : KEEP_BYTES / 4;
		d->flat = malloc(d->flat_size);
		if (!d->flat) {
			d->flat_size = 0;
			return KVP_ERR_SYS;
		}
	}
	gather(part, 0, len, d->flat);
	return kvp_extproc_req_decode(d, d->flat, len, out);
}
