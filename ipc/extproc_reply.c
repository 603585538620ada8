/* ipc/extproc_reply.c - answers to bytes, and a body in pieces. The message tree of an answer is small and of
 * known shape, so it stands on the stack. */
#include "ipc/extproc_msg.h"
#include "ipc/extproc_priv.h"

#include <kvpick/atomic.h>
#include <kvpick/err.h>

#include <stdlib.h>
#include <string.h>

static const struct kvp_extproc_str space_lb = {"envoy.lb", 8};
static const struct kvp_extproc_str key_destination = {"x-gateway-destination-endpoint", 30};

static ProtobufCBinaryData bytes(struct kvp_extproc_str s)
{
	return (ProtobufCBinaryData){s.len, (uint8_t *)(uintptr_t)s.p};
}

struct mutation {
	Kvp__Extproc__HeaderMutation top;
	Kvp__Extproc__HeaderValueOption option[KVP_EXTPROC_SET_MAX], *option_p[KVP_EXTPROC_SET_MAX];
	Kvp__Extproc__HeaderValue value[KVP_EXTPROC_SET_MAX];
	ProtobufCBinaryData remove[KVP_EXTPROC_SET_MAX];
};

static Kvp__Extproc__HeaderMutation *build_mutation(struct mutation *m, const struct kvp_extproc_reply *r)
{
	if (!r->set_cnt && !r->remove_cnt)
		return NULL;
	KVP_ASSERT(r->set_cnt <= KVP_EXTPROC_SET_MAX && r->remove_cnt <= KVP_EXTPROC_SET_MAX);
	kvp__extproc__header_mutation__init(&m->top);
	for (uint32_t i = 0; i < r->set_cnt; i++) {
		kvp__extproc__header_value__init(&m->value[i]);
		m->value[i].key = bytes(r->set[i].key);
		m->value[i].raw_value = bytes(r->set[i].value);
		kvp__extproc__header_value_option__init(&m->option[i]);
		m->option[i].header = &m->value[i];
		m->option[i].append_action = r->set[i].append;
		m->option_p[i] = &m->option[i];
	}
	for (uint32_t i = 0; i < r->remove_cnt; i++)
		m->remove[i] = bytes(r->remove[i]);
	m->top.n_set_headers = r->set_cnt;
	m->top.set_headers = m->option_p;
	m->top.n_remove_headers = r->remove_cnt;
	m->top.remove_headers = m->remove;
	return &m->top;
}

struct common {
	Kvp__Extproc__CommonAnswer top;
	Kvp__Extproc__CommonResponse response;
	Kvp__Extproc__BodyMutation body;
	Kvp__Extproc__StreamedBodyResponse piece;
};

static Kvp__Extproc__BodyMutation *build_body(struct common *c, const struct kvp_extproc_reply *r)
{
	kvp__extproc__body_mutation__init(&c->body);
	switch (r->mutation) {
	case KVP_EXTPROC_BODY_REPLACE:
		c->body.mutation_case = KVP__EXTPROC__BODY_MUTATION__MUTATION_BODY;
		c->body.body = bytes(r->body);
		return &c->body;
	case KVP_EXTPROC_BODY_CLEAR:
		c->body.mutation_case = KVP__EXTPROC__BODY_MUTATION__MUTATION_CLEAR_BODY;
		c->body.clear_body = 1;
		return &c->body;
	case KVP_EXTPROC_BODY_STREAMED_PIECE:
		kvp__extproc__streamed_body_response__init(&c->piece);
		c->piece.body = bytes(r->body);
		c->piece.end_of_stream = r->end_of_stream;
		c->body.mutation_case = KVP__EXTPROC__BODY_MUTATION__MUTATION_STREAMED_RESPONSE;
		c->body.streamed_response = &c->piece;
		return &c->body;
	default:
		return NULL;
	}
}

static Kvp__Extproc__CommonAnswer *build_common(
	struct common *c, struct mutation *m, const struct kvp_extproc_reply *r)
{
	kvp__extproc__common_answer__init(&c->top);
	kvp__extproc__common_response__init(&c->response);
	c->top.response = &c->response;
	c->response.header_mutation = build_mutation(m, r);
	c->response.body_mutation = build_body(c, r);
	c->response.clear_route_cache = r->clear_route_cache;
	return &c->top;
}

struct immediate {
	Kvp__Extproc__ImmediateResponse top;
	Kvp__Extproc__HttpStatus status;
};

static Kvp__Extproc__ImmediateResponse *build_immediate(
	struct immediate *i, struct mutation *m, const struct kvp_extproc_reply *r)
{
	kvp__extproc__immediate_response__init(&i->top);
	kvp__extproc__http_status__init(&i->status);
	i->status.code = r->http_status;
	i->top.status = &i->status;
	i->top.headers = build_mutation(m, r);
	i->top.body = bytes(r->body);
	return &i->top;
}

struct metadata {
	Kvp__Extproc__Spaces top;
	Kvp__Extproc__SpaceEntry space, *space_p;
	Kvp__Extproc__SpaceValue space_value;
	Kvp__Extproc__LeafStruct leaves;
	Kvp__Extproc__LeafEntry leaf, *leaf_p;
	Kvp__Extproc__Leaf value;
};

static Kvp__Extproc__Spaces *build_metadata(struct metadata *m, struct kvp_extproc_str destination)
{
	kvp__extproc__leaf__init(&m->value);
	m->value.kind_case = KVP__EXTPROC__LEAF__KIND_STRING_VALUE;
	m->value.string_value = bytes(destination);
	kvp__extproc__leaf_entry__init(&m->leaf);
	m->leaf.key = bytes(key_destination);
	m->leaf.value = &m->value;
	m->leaf_p = &m->leaf;
	kvp__extproc__leaf_struct__init(&m->leaves);
	m->leaves.n_fields = 1;
	m->leaves.fields = &m->leaf_p;
	kvp__extproc__space_value__init(&m->space_value);
	m->space_value.kind_case = KVP__EXTPROC__SPACE_VALUE__KIND_STRUCT_VALUE;
	m->space_value.struct_value = &m->leaves;
	kvp__extproc__space_entry__init(&m->space);
	m->space.key = bytes(space_lb);
	m->space.value = &m->space_value;
	m->space_p = &m->space;
	kvp__extproc__spaces__init(&m->top);
	m->top.n_fields = 1;
	m->top.fields = &m->space_p;
	return &m->top;
}

void *kvp_extproc_reply_new(const struct kvp_extproc_reply *r, size_t *len)
{
	Kvp__Extproc__ProcessingResponse top;
	Kvp__Extproc__TrailersAnswer trailers;
	struct mutation mutation;
	struct common common;
	struct immediate immediate;
	struct metadata metadata;
	kvp__extproc__processing_response__init(&top);
	top.response_case = (Kvp__Extproc__ProcessingResponse__ResponseCase)r->kind;
	switch (r->kind) {
	case KVP_EXTPROC_ANSWER_NONE:
		break;
	case KVP_EXTPROC_ANSWER_IMMEDIATE:
		top.immediate_response = build_immediate(&immediate, &mutation, r);
		break;
	case KVP_EXTPROC_ANSWER_REQUEST_TRAILERS:
	case KVP_EXTPROC_ANSWER_RESPONSE_TRAILERS: /* the members of a oneof share their place */
		kvp__extproc__trailers_answer__init(&trailers);
		trailers.header_mutation = build_mutation(&mutation, r);
		top.request_trailers = &trailers;
		break;
	default:
		top.request_headers = build_common(&common, &mutation, r);
	}
	if (r->destination.len)
		top.dynamic_metadata = build_metadata(&metadata, r->destination);
	size_t n = kvp__extproc__processing_response__get_packed_size(&top);
	uint8_t *out = malloc(n ? n : 1);
	if (out)
		*len = kvp__extproc__processing_response__pack(&top, out);
	return out;
}

/* ---- pieces that are not copied ---- */

struct frame_buffer {
	ProtobufCBuffer base;
	const uint8_t *body;
	uint32_t body_len;
	struct kvp_extproc_frame *f;
	int behind, fits;
};

static void frame_append(ProtobufCBuffer *base, size_t len, const uint8_t *data)
{
	struct frame_buffer *b = (struct frame_buffer *)base;
	struct kvp_extproc_frame *f = b->f;
	if (data == b->body && len == b->body_len && !b->behind) {
		b->behind = 1;
		return;
	}
	uint32_t *used = b->behind ? &f->tail_len : &f->head_len;
	if (len > KVP_EXTPROC_FRAME_MAX - *used) {
		b->fits = 0;
		return;
	}
	memcpy((b->behind ? f->tail : f->head) + *used, data, len);
	*used += (uint32_t)len;
}

int kvp_extproc_reply_frame(const struct kvp_extproc_reply *r, struct kvp_extproc_frame *f)
{
	Kvp__Extproc__ProcessingResponse top;
	struct common common;
	if (r->mutation != KVP_EXTPROC_BODY_STREAMED_PIECE || !r->body.len || r->set_cnt || r->remove_cnt ||
		r->destination.len ||
		(r->kind != KVP_EXTPROC_ANSWER_REQUEST_BODY && r->kind != KVP_EXTPROC_ANSWER_RESPONSE_BODY))
		return 0;
	struct frame_buffer b = {
		{frame_append}, (const uint8_t *)r->body.p, r->body.len, f, 0, 1};
	kvp__extproc__processing_response__init(&top);
	top.response_case = (Kvp__Extproc__ProcessingResponse__ResponseCase)r->kind;
	top.request_headers = build_common(&common, NULL, r);
	f->head_len = f->tail_len = 0;
	kvp__extproc__processing_response__pack_to_buffer(&top, &b.base);
	return b.fits && b.behind;
}

struct kvp_extproc_kept *kvp_extproc_kept_grow(struct kvp_extproc_kept *kept, size_t size)
{
	struct kvp_extproc_kept *k = realloc(kept, sizeof(*k) + size);
	if (k && !kept)
		k->refs = 1;
	return k;
}

void kvp_extproc_kept_ref(struct kvp_extproc_kept *kept)
{
	kvp_faa_ar_u32(&kept->refs, 1);
}

void kvp_extproc_kept_unref(void *kept)
{
	struct kvp_extproc_kept *k = kept;
	if (k && kvp_faa_ar_u32(&k->refs, (uint32_t)-1) == 1)
		free(k);
}

int kvp_extproc_piece_next(
	struct kvp_extproc_pieces *p, struct kvp_extproc_str *piece, uint8_t *end_of_stream)
{
	uint32_t left = p->body.len - p->off;
	if (p->begun && !left)
		return 0;
	uint32_t n = left < KVP_EXTPROC_PIECE_BYTES ? left : KVP_EXTPROC_PIECE_BYTES;
	*piece = (struct kvp_extproc_str){left ? p->body.p + p->off : NULL, n};
	p->begun = 1;
	p->off += n;
	*end_of_stream = p->end_of_stream && n == left;
	return 1;
}
