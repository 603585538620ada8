/* ipc/extproc_proxy.c - the proxy's side of the messages: requests to bytes, answers from bytes. */
#include "ipc/extproc_msg.h"
#include "ipc/extproc_priv.h"

#include <kvpick/err.h>

#include <stdlib.h>
#include <string.h>

static ProtobufCBinaryData bytes(struct kvp_extproc_str s)
{
	return (ProtobufCBinaryData){s.len, (uint8_t *)(uintptr_t)s.p};
}

/* One namespace with one key, as the proxy sends a hint and a served endpoint. */
struct space {
	Kvp__Extproc__MetadataEntry entry;
	Kvp__Extproc__Struct fields;
	Kvp__Extproc__StructEntry field, *field_p;
	Kvp__Extproc__Value value;
};

static Kvp__Extproc__MetadataEntry *build_space(
	struct space *s, struct kvp_extproc_str name, struct kvp_extproc_str key)
{
	kvp__extproc__metadata_entry__init(&s->entry);
	kvp__extproc__struct__init(&s->fields);
	kvp__extproc__struct_entry__init(&s->field);
	kvp__extproc__value__init(&s->value);
	s->entry.key = bytes(name);
	s->entry.value = &s->fields;
	s->field.key = bytes(key);
	s->field.value = &s->value;
	s->field_p = &s->field;
	s->fields.n_fields = 1;
	s->fields.fields = &s->field_p;
	return &s->entry;
}

/* All tables of a request in one allocation. */
struct build {
	Kvp__Extproc__ProcessingRequest top;
	Kvp__Extproc__HttpHeaders headers;
	Kvp__Extproc__HttpBody body;
	Kvp__Extproc__HttpTrailers trailers;
	Kvp__Extproc__HeaderMap map;
	Kvp__Extproc__Metadata metadata;
	Kvp__Extproc__MetadataEntry *space[2];
	struct space hint, served;
	Kvp__Extproc__List list;
	Kvp__Extproc__ProtocolConfiguration config;
	Kvp__Extproc__HeaderValue *value, **value_p;
	Kvp__Extproc__Item *item, **item_p;
};

static void build_headers(struct build *b, const struct kvp_extproc_req *r)
{
	kvp__extproc__header_map__init(&b->map);
	for (uint32_t i = 0; i < r->header_cnt; i++) {
		kvp__extproc__header_value__init(&b->value[i]);
		b->value[i].key = bytes(r->header[i].key);
		b->value[i].raw_value = bytes(r->header[i].value);
		b->value_p[i] = &b->value[i];
	}
	b->map.n_headers = r->header_cnt;
	b->map.headers = b->value_p;
}

static void build_member(struct build *b, const struct kvp_extproc_req *r)
{
	b->top.request_case = (Kvp__Extproc__ProcessingRequest__RequestCase)r->kind;
	build_headers(b, r);
	switch (r->kind) {
	case KVP_EXTPROC_REQUEST_HEADERS:
	case KVP_EXTPROC_RESPONSE_HEADERS: /* the members of a oneof share their place */
		kvp__extproc__http_headers__init(&b->headers);
		b->headers.headers = &b->map;
		b->headers.end_of_stream = r->end_of_stream;
		b->top.request_headers = &b->headers;
		break;
	case KVP_EXTPROC_REQUEST_BODY:
	case KVP_EXTPROC_RESPONSE_BODY:
		kvp__extproc__http_body__init(&b->body);
		b->body.body = bytes(r->body);
		b->body.end_of_stream = r->end_of_stream;
		b->top.request_body = &b->body;
		break;
	case KVP_EXTPROC_REQUEST_TRAILERS:
	case KVP_EXTPROC_RESPONSE_TRAILERS:
		kvp__extproc__http_trailers__init(&b->trailers);
		b->trailers.trailers = r->header_cnt ? &b->map : NULL;
		b->top.request_trailers = &b->trailers;
		break;
	default:
		break;
	}
}

static void build_metadata(struct build *b, const struct kvp_extproc_req *r)
{
	kvp__extproc__metadata__init(&b->metadata);
	b->metadata.filter_metadata = b->space;
	if (r->served.len) {
		b->space[b->metadata.n_filter_metadata++] =
			build_space(&b->served, KVP_EXTPROC_STR("envoy.lb"),
				KVP_EXTPROC_STR("x-gateway-destination-endpoint-served"));
		b->served.value.kind_case = KVP__EXTPROC__VALUE__KIND_STRING_VALUE;
		b->served.value.string_value = bytes(r->served);
	}
	if (r->subset_hint == KVP_EXTPROC_HINT_PRESENT) {
		b->space[b->metadata.n_filter_metadata++] =
			build_space(&b->hint, KVP_EXTPROC_STR("envoy.lb.subset_hint"),
				KVP_EXTPROC_STR("x-gateway-destination-endpoint-subset"));
		kvp__extproc__list__init(&b->list);
		for (uint32_t i = 0; i < r->subset_cnt; i++) {
			kvp__extproc__item__init(&b->item[i]);
			b->item[i].kind_case = KVP__EXTPROC__ITEM__KIND_STRING_VALUE;
			b->item[i].string_value = bytes(r->subset[i]);
			b->item_p[i] = &b->item[i];
		}
		b->list.n_values = r->subset_cnt;
		b->list.values = b->item_p;
		b->hint.value.kind_case = KVP__EXTPROC__VALUE__KIND_LIST_VALUE;
		b->hint.value.list_value = &b->list;
	}
	if (b->metadata.n_filter_metadata)
		b->top.metadata_context = &b->metadata;
}

void *kvp_extproc_req_new(const struct kvp_extproc_req *r, size_t *len)
{
	struct build *b = calloc(1, sizeof(*b));
	uint8_t *out = NULL;
	if (!b)
		return NULL;
	b->value = calloc(r->header_cnt + 1u, sizeof(*b->value));
	b->value_p = calloc(r->header_cnt + 1u, sizeof(*b->value_p));
	b->item = calloc(r->subset_cnt + 1u, sizeof(*b->item));
	b->item_p = calloc(r->subset_cnt + 1u, sizeof(*b->item_p));
	if (!b->value || !b->value_p || !b->item || !b->item_p)
		goto out;
	kvp__extproc__processing_request__init(&b->top);
	build_member(b, r);
	build_metadata(b, r);
	b->top.observability_mode = r->observability_mode;
	if (r->has_config) {
		kvp__extproc__protocol_configuration__init(&b->config);
		b->config.request_body_mode = r->request_body_mode;
		b->config.response_body_mode = r->response_body_mode;
		b->config.send_body_without_waiting_for_header_response = r->send_body_without_waiting;
		b->top.protocol_config = &b->config;
	}
	size_t n = kvp__extproc__processing_request__get_packed_size(&b->top);
	out = malloc(n ? n : 1);
	if (out)
		*len = kvp__extproc__processing_request__pack(&b->top, out);
out:
	free(b->item_p);
	free(b->item);
	free(b->value_p);
	free(b->value);
	free(b);
	return out;
}

static int take_mutation(
	struct kvp_extproc_dec *d, const Kvp__Extproc__HeaderMutation *m, struct kvp_extproc_reply *out)
{
	if (!m)
		return KVP_OK;
	struct kvp_extproc_set_header *set = kvp_extproc_arena_alloc(d, m->n_set_headers * sizeof(*set));
	struct kvp_extproc_str *remove = kvp_extproc_arena_alloc(d, m->n_remove_headers * sizeof(*remove));
	if (!set || !remove)
		return KVP_ERR_LIMIT;
	for (size_t i = 0; i < m->n_set_headers; i++) {
		const Kvp__Extproc__HeaderValue *v = m->set_headers[i]->header;
		set[i] = (struct kvp_extproc_set_header){0};
		set[i].append = (enum kvp_extproc_append)m->set_headers[i]->append_action;
		if (!v)
			continue;
		set[i].key = kvp_extproc_text(v->key);
		set[i].value = kvp_extproc_text(v->raw_value.len ? v->raw_value : v->value);
	}
	for (size_t i = 0; i < m->n_remove_headers; i++)
		remove[i] = kvp_extproc_text(m->remove_headers[i]);
	out->set = set;
	out->set_cnt = (uint32_t)m->n_set_headers;
	out->remove = remove;
	out->remove_cnt = (uint32_t)m->n_remove_headers;
	return KVP_OK;
}

static int take_common(
	struct kvp_extproc_dec *d, const Kvp__Extproc__CommonAnswer *a, struct kvp_extproc_reply *out)
{
	const Kvp__Extproc__CommonResponse *c = a->response;
	if (!c)
		return KVP_OK;
	out->clear_route_cache = (uint8_t) !!c->clear_route_cache;
	const Kvp__Extproc__BodyMutation *b = c->body_mutation;
	switch (b ? b->mutation_case : KVP__EXTPROC__BODY_MUTATION__MUTATION__NOT_SET) {
	case KVP__EXTPROC__BODY_MUTATION__MUTATION_BODY:
		out->mutation = KVP_EXTPROC_BODY_REPLACE;
		out->body = kvp_extproc_text(b->body);
		break;
	case KVP__EXTPROC__BODY_MUTATION__MUTATION_CLEAR_BODY:
		out->mutation = b->clear_body ? KVP_EXTPROC_BODY_CLEAR : KVP_EXTPROC_BODY_KEEP;
		break;
	case KVP__EXTPROC__BODY_MUTATION__MUTATION_STREAMED_RESPONSE:
		out->mutation = KVP_EXTPROC_BODY_STREAMED_PIECE;
		out->body = kvp_extproc_text(b->streamed_response->body);
		out->end_of_stream = (uint8_t) !!b->streamed_response->end_of_stream;
		break;
	default:
		break;
	}
	return take_mutation(d, c->header_mutation, out);
}

static void take_destination(const Kvp__Extproc__Spaces *m, struct kvp_extproc_reply *out)
{
	const struct kvp_extproc_str space = KVP_EXTPROC_STR("envoy.lb");
	const struct kvp_extproc_str key = KVP_EXTPROC_STR("x-gateway-destination-endpoint");
	for (size_t i = 0; m && i < m->n_fields; i++) {
		const Kvp__Extproc__SpaceEntry *e = m->fields[i];
		if (e->key.len != space.len || memcmp(e->key.data, space.p, space.len) != 0 || !e->value ||
			e->value->kind_case != KVP__EXTPROC__SPACE_VALUE__KIND_STRUCT_VALUE)
			continue;
		for (size_t k = 0; k < e->value->struct_value->n_fields; k++) {
			const Kvp__Extproc__LeafEntry *f = e->value->struct_value->fields[k];
			if (f->key.len == key.len && memcmp(f->key.data, key.p, key.len) == 0 && f->value &&
				f->value->kind_case == KVP__EXTPROC__LEAF__KIND_STRING_VALUE)
				out->destination = kvp_extproc_text(f->value->string_value);
		}
	}
}

int kvp_extproc_reply_decode(
	struct kvp_extproc_dec *d, const void *data, size_t len, struct kvp_extproc_reply *out)
{
	struct kvp_extproc_reply r = {0};
	if (len > KVP_EXTPROC_MSG_MAX)
		return KVP_ERR_LIMIT;
	int rc = kvp_extproc_arena_begin(d, len);
	if (rc != KVP_OK)
		return rc;
	const Kvp__Extproc__ProcessingResponse *m =
		kvp__extproc__processing_response__unpack(&d->alloc, len, data);
	if (!m)
		return d->over ? KVP_ERR_LIMIT : KVP_ERR_PROTO;
	r.kind = (enum kvp_extproc_answer)m->response_case;
	switch (r.kind) {
	case KVP_EXTPROC_ANSWER_NONE:
		break;
	case KVP_EXTPROC_ANSWER_IMMEDIATE:
		r.http_status = m->immediate_response->status ? m->immediate_response->status->code : 0;
		r.body = kvp_extproc_text(m->immediate_response->body);
		rc = take_mutation(d, m->immediate_response->headers, &r);
		break;
	case KVP_EXTPROC_ANSWER_REQUEST_TRAILERS:
	case KVP_EXTPROC_ANSWER_RESPONSE_TRAILERS:
		rc = take_mutation(d, m->request_trailers->header_mutation, &r);
		break;
	default:
		rc = take_common(d, m->request_headers, &r);
	}
	take_destination(m->dynamic_metadata, &r);
	if (rc == KVP_OK)
		*out = r;
	return rc;
}
