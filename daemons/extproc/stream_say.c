/* What a stream sends, and what it keeps of what it got. */
#include "daemons/extproc/stream_priv.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#define DESTINATION "x-gateway-destination-endpoint"
#define PREFILLER "x-prefiller-host-port"

/* Removed from every request that is routed, in this order. */
static const char *const always[] = {"x-gateway-inference-fairness-id", "x-gateway-inference-objective",
	"x-gateway-model-name-rewrite", "x-gateway-destination-endpoint-subset",
	"x-gateway-destination-endpoint-served", PREFILLER};
/* Removed, after those, when the client sent them. */
static const char *const when_sent[] = {
	"x-prefiller-url", "x-prefiller-dp-rank", "x-data-parallel-host-port", "x-data-parallel-rank"};
#define ALWAYS_CNT (sizeof(always) / sizeof(always[0]))
#define SENT_CNT (sizeof(when_sent) / sizeof(when_sent[0]))
#define DP_RANK (SENT_CNT - 1)

int stream_name_is(struct kvp_extproc_str name, const char *lower)
{
	return name.len == strlen(lower) && strncasecmp(name.p, lower, name.len) == 0;
}

static struct kvp_extproc_str str(const char *text)
{
	return (struct kvp_extproc_str){text, (uint32_t)strlen(text)};
}

void stream_say(struct kvp_stream *s, enum kvp_extproc_answer kind)
{
	struct kvp_extproc_reply m = {.kind = kind};
	s->ops->send(s->ctx, &m);
}

/* A routing header that the picker owns, or that the proxy would not take, is none. */
static int is_usable(struct kvp_extproc_str name)
{
	if (!name.len || name.p[0] == ':' || stream_name_is(name, DESTINATION) ||
		stream_name_is(name, "content-length"))
		return 0;
	if (name.len >= 7 && strncasecmp(name.p, "x-envoy", 7) == 0)
		return 0;
	for (size_t i = 0; i < ALWAYS_CNT; i++)
		if (stream_name_is(name, always[i]))
			return 0;
	return 1;
}

void stream_say_routing(struct kvp_stream *s, enum kvp_extproc_answer kind, const struct kvp_pick_answer *a)
{
	struct kvp_extproc_set_header set[KVP_STREAM_EXTRA_MAX + 2];
	struct kvp_extproc_str remove[ALWAYS_CNT + SENT_CNT + 1];
	struct kvp_extproc_reply m = {.kind = kind, .clear_route_cache = 1, .set = set, .remove = remove};
	m.destination = a->destination;
	if (kind == KVP_EXTPROC_ANSWER_REQUEST_BODY && a->body.p) {
		m.mutation = KVP_EXTPROC_BODY_REPLACE;
		m.body = a->body;
		/* The proxy checks what it knew of the length against what it got. */
		remove[m.remove_cnt++] = str("content-length");
	}
	set[m.set_cnt++] = (struct kvp_extproc_set_header){
		str(DESTINATION), a->destination, KVP_EXTPROC_OVERWRITE_OR_ADD};
	for (uint32_t i = 0; i < a->extra_cnt; i++)
		if (is_usable(a->extra[i].key))
			set[m.set_cnt++] = (struct kvp_extproc_set_header){
				a->extra[i].key, a->extra[i].value, KVP_EXTPROC_OVERWRITE_OR_ADD};
	if (a->prefiller.len)
		set[m.set_cnt++] = (struct kvp_extproc_set_header){
			str(PREFILLER), a->prefiller, KVP_EXTPROC_OVERWRITE_OR_ADD};
	for (size_t i = 0; i < ALWAYS_CNT; i++)
		if (always[i] != always[ALWAYS_CNT - 1] || !a->prefiller.len)
			remove[m.remove_cnt++] = str(always[i]);
	for (size_t i = 0; i < SENT_CNT; i++) {
		int is_set = 0;
		for (uint32_t k = 0; k < m.set_cnt; k++)
			is_set |= stream_name_is(set[k].key, when_sent[i]);
		if ((s->stripped >> i & 1) && !is_set)
			remove[m.remove_cnt++] = str(when_sent[i]);
	}
	s->ops->send(s->ctx, &m);
}

void stream_say_pieces(struct kvp_stream *s, enum kvp_extproc_answer kind, struct kvp_extproc_str body,
	struct kvp_extproc_kept *kept, int ends)
{
	struct kvp_extproc_pieces p = {.body = body, .end_of_stream = (uint8_t)ends};
	struct kvp_extproc_reply m = {
		.kind = kind, .mutation = KVP_EXTPROC_BODY_STREAMED_PIECE, .kept = kept};
	while (kvp_extproc_piece_next(&p, &m.body, &m.end_of_stream))
		s->ops->send(s->ctx, &m);
}

void stream_reject(struct kvp_stream *s, int status, const char *text, uint64_t retry_after_s)
{
	char number[24];
	snprintf(number, sizeof(number), "%" PRIu64, retry_after_s);
	struct kvp_extproc_set_header retry = {
		KVP_EXTPROC_STR("retry-after"), str(number), KVP_EXTPROC_OVERWRITE_OR_ADD};
	struct kvp_extproc_reply m = {.kind = KVP_EXTPROC_ANSWER_IMMEDIATE,
		.http_status = (uint32_t)status,
		.body = str(text),
		.set = &retry,
		.set_cnt = retry_after_s ? 1 : 0};
	s->rejected = 1;
	s->state = KVP_STREAM_OVER;
	s->ops->send(s->ctx, &m);
	s->ops->finish(s->ctx, KVP_STREAM_GRPC_OK, "");
}

static struct kvp_extproc_str copy(char **at, struct kvp_extproc_str from)
{
	struct kvp_extproc_str to = {*at, from.len};
	if (from.len)
		memcpy(*at, from.p, from.len);
	*at += from.len;
	return to;
}

int stream_take_headers(struct kvp_stream *s, const struct kvp_extproc_req *m)
{
	size_t bytes = 1;
	for (uint32_t i = 0; i < m->header_cnt; i++)
		bytes += m->header[i].key.len + m->header[i].value.len;
	s->header = calloc(m->header_cnt + 1, sizeof(*s->header));
	s->header_mem = malloc(bytes);
	if (!s->header || !s->header_mem)
		return 0;
	char *at = s->header_mem;
	for (uint32_t i = 0; i < m->header_cnt; i++) {
		const struct kvp_extproc_header *h = &m->header[i];
		for (size_t k = 0; k < SENT_CNT; k++)
			if (stream_name_is(h->key, when_sent[k]) && (k != DP_RANK || s->cfg->strips_dp_rank))
				s->stripped |= 1u << k;
		if (stream_name_is(h->key, PREFILLER))
			continue;
		struct kvp_extproc_header *to = &s->header[s->header_cnt++];
		to->key = copy(&at, h->key);
		to->value = copy(&at, h->value);
	}
	return 1;
}

int stream_take_subset(struct kvp_stream *s, const struct kvp_extproc_req *m)
{
	if (m->subset_hint == KVP_EXTPROC_HINT_ABSENT)
		return 1;
	size_t bytes = m->subset_cnt * sizeof(struct kvp_extproc_str) + 1;
	for (uint32_t i = 0; i < m->subset_cnt; i++)
		bytes += m->subset[i].len;
	struct kvp_extproc_str *list = malloc(bytes);
	if (!list)
		return 0;
	char *at = (char *)(list + m->subset_cnt);
	for (uint32_t i = 0; i < m->subset_cnt; i++)
		list[i] = copy(&at, m->subset[i]);
	free(s->subset);
	s->subset = list;
	s->subset_hint = m->subset_hint;
	s->subset_cnt = m->subset_cnt;
	return 1;
}
