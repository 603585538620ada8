#include "ipc/replica_msg.h"

#include <stdlib.h>
#include <string.h>

#include "ipc/mp_in.h"

#define DEPTH_MAX 1024 /* containers inside each other, whole message */
#define FIXED_BYTES 512 /* an encoding without strings' contents and hashes is shorter */

static const char *const topic_text[KVP_REPLICA_TOPIC_CNT] = {
	[KVP_REPLICA_LIFECYCLE] = KVP_REPLICA_TOPIC_LIFECYCLE,
	[KVP_REPLICA_AFFINITY] = KVP_REPLICA_TOPIC_AFFINITY,
};

struct kvp_str kvp_replica_topic_text(enum kvp_replica_topic t)
{
	return (struct kvp_str){topic_text[t], strlen(topic_text[t])};
}

int kvp_replica_topic_of(const void *frame, size_t len, enum kvp_replica_topic *out)
{
	for (unsigned t = 0; t < KVP_REPLICA_TOPIC_CNT; t++) {
		struct kvp_str s = kvp_replica_topic_text((enum kvp_replica_topic)t);
		if (s.len == len && memcmp(s.ptr, frame, len) == 0) {
			*out = (enum kvp_replica_topic)t;
			return KVP_OK;
		}
	}
	return KVP_ERR_NOTFOUND;
}

/* ---- encoder ---- */

/* The bound was checked: nothing here can overflow. */
struct out {
	uint8_t *p;
};

static void put_be(struct out *o, uint64_t v, unsigned bytes)
{
	while (bytes--)
		*o->p++ = (uint8_t)(v >> 8 * bytes);
}

static void put_uint(struct out *o, uint64_t v)
{
	if (v < 0x80) {
		*o->p++ = (uint8_t)v;
	} else if (v <= UINT8_MAX) {
		*o->p++ = 0xcc;
		put_be(o, v, 1);
	} else if (v <= UINT16_MAX) {
		*o->p++ = 0xcd;
		put_be(o, v, 2);
	} else if (v <= UINT32_MAX) {
		*o->p++ = 0xce;
		put_be(o, v, 4);
	} else {
		*o->p++ = 0xcf;
		put_be(o, v, 8);
	}
}

static void put_nil(struct out *o)
{
	*o->p++ = 0xc0;
}

static void put_map(struct out *o, unsigned n)
{
	*o->p++ = (uint8_t)(0x80 | n);
}

static void put_str(struct out *o, struct kvp_str s)
{
	if (s.len < 32) {
		*o->p++ = (uint8_t)(0xa0 | s.len);
	} else if (s.len <= UINT8_MAX) {
		*o->p++ = 0xd9;
		put_be(o, s.len, 1);
	} else if (s.len <= UINT16_MAX) {
		*o->p++ = 0xda;
		put_be(o, s.len, 2);
	} else {
		*o->p++ = 0xdb;
		put_be(o, s.len, 4);
	}
	if (s.len)
		memcpy(o->p, s.ptr, s.len);
	o->p += s.len;
}

static void put_key(struct out *o, const char *key)
{
	put_str(o, (struct kvp_str){key, strlen(key)});
}

static void put_seq(struct out *o, const uint64_t *seq, uint32_t n)
{
	if (!seq) {
		put_nil(o);
		return;
	}
	if (n < 16) {
		*o->p++ = (uint8_t)(0x90 | n);
	} else if (n <= UINT16_MAX) {
		*o->p++ = 0xdc;
		put_be(o, n, 2);
	} else {
		*o->p++ = 0xdd;
		put_be(o, n, 4);
	}
	for (uint32_t i = 0; i < n; i++)
		put_uint(o, seq[i]);
}

static void put_hint(struct out *o, const struct kvp_replica_event *e)
{
	if (!e->has_hint) {
		put_nil(o);
		return;
	}
	put_map(o, 2);
	put_key(o, "initial_effective_prefill_tokens");
	put_uint(o, e->hint_tok);
	put_key(o, "expected_prefill_duration");
	if (!e->has_duration) {
		put_nil(o);
		return;
	}
	put_map(o, 2);
	put_key(o, "secs");
	put_uint(o, e->duration_secs);
	put_key(o, "nanos");
	put_uint(o, e->duration_nanos);
}

static void put_data(struct out *o, const struct kvp_replica_event *e)
{
	if (e->kind == KVP_REPLICA_FREE) {
		put_key(o, "Free");
		return;
	}
	if (e->kind == KVP_REPLICA_MARK) {
		put_key(o, "MarkPrefillCompleted");
		return;
	}
	put_map(o, 1);
	put_key(o, "AddRequest");
	put_map(o, 4);
	put_key(o, "token_sequence");
	put_seq(o, e->seq, e->seq_cnt);
	put_key(o, "track_prefill_tokens");
	*o->p++ = e->track_prefill ? 0xc3 : 0xc2;
	put_key(o, "expected_output_tokens");
	if (e->has_expected_output)
		put_uint(o, e->expected_output_tok);
	else
		put_nil(o);
	put_key(o, "prefill_load_hint");
	put_hint(o, e);
}

size_t kvp_replica_event_bound(const struct kvp_replica_event *e)
{
	size_t seq = e->kind == KVP_REPLICA_ADD && e->seq ? 9 * (size_t)e->seq_cnt : 0;
	return FIXED_BYTES + e->model.len + e->group.len + e->id.len + e->lora.len + seq;
}

int kvp_replica_encode_event(const struct kvp_replica_event *e, void *buf, size_t cap, size_t *len)
{
	struct out o = {buf};
	if (e->model.len > UINT32_MAX || e->group.len > UINT32_MAX || e->id.len > UINT32_MAX ||
		e->lora.len > UINT32_MAX)
		return KVP_ERR_INVAL;
	if (cap < kvp_replica_event_bound(e))
		return KVP_ERR_FULL;
	put_map(&o, 4);
	put_key(&o, "model_name");
	put_str(&o, e->model);
	put_key(&o, "routing_group");
	put_str(&o, e->group);
	put_key(&o, "block_size");
	put_uint(&o, e->block_size);
	put_key(&o, "event");
	put_map(&o, 5);
	put_key(&o, "request_id");
	put_str(&o, e->id);
	put_key(&o, "worker");
	put_map(&o, 2);
	put_key(&o, "worker_id");
	put_uint(&o, e->worker_id);
	put_key(&o, "dp_rank");
	put_uint(&o, e->dp_rank);
	put_key(&o, "data");
	put_data(&o, e);
	put_key(&o, "router_id");
	put_uint(&o, e->router_id);
	put_key(&o, "lora_name");
	if (e->lora.ptr)
		put_str(&o, e->lora);
	else
		put_nil(&o);
	*len = (size_t)(o.p - (uint8_t *)buf);
	return KVP_OK;
}

size_t kvp_replica_binding_bound(const struct kvp_replica_binding *b)
{
	return FIXED_BYTES + b->model.len + b->group.len + b->session.len;
}

int kvp_replica_encode_binding(const struct kvp_replica_binding *b, void *buf, size_t cap, size_t *len)
{
	struct out o = {buf};
	if (b->model.len > UINT32_MAX || b->group.len > UINT32_MAX || b->session.len > UINT32_MAX)
		return KVP_ERR_INVAL;
	if (cap < kvp_replica_binding_bound(b))
		return KVP_ERR_FULL;
	put_map(&o, 7);
	put_key(&o, "model_name");
	put_str(&o, b->model);
	put_key(&o, "routing_group");
	put_str(&o, b->group);
	put_key(&o, "session_id");
	put_str(&o, b->session);
	put_key(&o, "worker_id");
	put_uint(&o, b->worker_id);
	put_key(&o, "dp_rank");
	if (b->has_rank)
		put_uint(&o, b->dp_rank);
	else
		put_nil(&o);
	put_key(&o, "sequence");
	put_uint(&o, b->sequence);
	put_key(&o, "writer_id");
	put_uint(&o, b->writer_id);
	*len = (size_t)(o.p - (uint8_t *)buf);
	return KVP_OK;
}

/* ---- decoder ---- */

void kvp_replica_dec_close(struct kvp_replica_dec *d)
{
	free(d->seq);
	d->seq = NULL;
	d->seq_cap = 0;
}

enum shape { SCOPED, EVENT, WORKER, ADD, HINT, DURATION, BINDING };
enum unknown { SKIP, REFUSE };

/* Maps by their keys: field i is bit i; without a bit in required it may be absent. depth: containers around
 * a value of an unknown key. */
static const struct {
	uint32_t cnt, required, depth;
	enum unknown unknown;
	const char *key[7];
} shape[] = {
	[SCOPED] = {4, 0xf, 1, SKIP, {"model_name", "routing_group", "block_size", "event"}},
	[EVENT] = {5, 0xf, 2, SKIP, {"request_id", "worker", "data", "router_id", "lora_name"}},
	[WORKER] = {2, 0x3, 3, SKIP, {"worker_id", "dp_rank"}},
	[ADD] = {4, 0x0, 4, SKIP,
		{"token_sequence", "track_prefill_tokens", "expected_output_tokens", "prefill_load_hint"}},
	[HINT] = {2, 0x1, 5, SKIP, {"initial_effective_prefill_tokens", "expected_prefill_duration"}},
	[DURATION] = {2, 0x3, 6, REFUSE, {"secs", "nanos"}},
	[BINDING] = {7, 0x6f, 1, SKIP,
		{"model_name", "routing_group", "session_id", "worker_id", "dp_rank", "sequence",
			"writer_id"}},
};

struct in {
	struct kvp_mp c;
	struct kvp_replica_dec *dec;
	struct kvp_replica_event *event;
	struct kvp_replica_binding *binding;
};

static int take_map(struct in *in, enum shape s);

/* Length of the UTF-8 sequence at p of n > 0 bytes, 0 = none: no overlong form, no surrogate, not above
 * U+10FFFF. */
static size_t utf8_len(const uint8_t *p, size_t n)
{
	static const uint8_t least[4] = {0x80, 0x80, 0xa0, 0x90}; /* of the second byte, by length */
	uint8_t a = p[0];
	size_t len = a < 0x80 ? 1 : a < 0xc2 ? 0 : a < 0xe0 ? 2 : a < 0xf0 ? 3 : a < 0xf5 ? 4 : 0;
	if (len < 2 || len > n)
		return len < 2 ? len : 0;
	uint8_t low = a == 0xe0 || a == 0xf0 ? least[len - 1] : 0x80;
	uint8_t high = a == 0xed ? 0x9f : a == 0xf4 ? 0x8f : 0xbf;
	if (p[1] < low || p[1] > high)
		return 0;
	for (size_t i = 2; i < len; i++)
		if ((p[i] & 0xc0) != 0x80)
			return 0;
	return len;
}

static int take_str(struct in *in, struct kvp_str *out)
{
	const char *s;
	uint32_t len;
	if (kvp_mp_str(&in->c, &s, &len))
		return KVP_ERR_PROTO;
	for (size_t i = 0, n; i < len; i += n) {
		n = utf8_len((const uint8_t *)s + i, len - i);
		if (!n)
			return KVP_ERR_PROTO;
	}
	*out = (struct kvp_str){s, len};
	return KVP_OK;
}

static int take_flag(struct in *in, uint8_t *out)
{
	if (kvp_mp_type(&in->c) != KVP_MP_BOOL)
		return KVP_ERR_PROTO;
	*out = *in->c.p++ == 0xc3;
	return KVP_OK;
}

static int take_seq(struct in *in)
{
	struct kvp_replica_dec *d = in->dec;
	uint32_t n;
	if (kvp_mp_arr(&in->c, &n)) /* n values can follow in the bytes that are there */
		return KVP_ERR_PROTO;
	if (n > d->seq_cap || !d->seq) {
		uint64_t *p = realloc(d->seq, (n ? n : 1) * sizeof(*p));
		if (!p)
			return KVP_ERR_SYS;
		d->seq = p;
		d->seq_cap = n ? n : 1;
	}
	for (uint32_t i = 0; i < n; i++)
		if (kvp_mp_u64(&in->c, &d->seq[i]))
			return KVP_ERR_PROTO;
	in->event->seq = d->seq;
	in->event->seq_cnt = n;
	return KVP_OK;
}

static int is_text(struct kvp_str s, const char *text)
{
	return s.len == strlen(text) && memcmp(s.ptr, text, s.len) == 0;
}

/* Which event: its bare name, or a map of it to its fields (nil where it has none). */
static int take_data(struct in *in)
{
	uint32_t n = 0;
	struct kvp_str name;
	int is_map = kvp_mp_type(&in->c) == KVP_MP_MAP;
	if (is_map && (kvp_mp_map(&in->c, &n) || n != 1))
		return KVP_ERR_PROTO;
	if (take_str(in, &name))
		return KVP_ERR_PROTO;
	if (is_text(name, "AddRequest")) {
		in->event->kind = KVP_REPLICA_ADD;
		in->event->track_prefill = 1;
		return is_map ? take_map(in, ADD) : KVP_ERR_PROTO;
	}
	if (is_text(name, "Free"))
		in->event->kind = KVP_REPLICA_FREE;
	else if (is_text(name, "MarkPrefillCompleted"))
		in->event->kind = KVP_REPLICA_MARK;
	else
		return KVP_ERR_PROTO;
	return is_map ? kvp_mp_nil(&in->c) : KVP_OK;
}

/* nil leaves the field absent. */
static int take_nil(struct in *in)
{
	return kvp_mp_nil(&in->c) == KVP_OK;
}

static int take_duration(struct in *in)
{
	struct kvp_replica_event *e = in->event;
	int rc = take_map(in, DURATION);
	if (rc)
		return rc;
	uint32_t carry = e->duration_nanos / 1000000000u;
	if (e->duration_secs > UINT64_MAX - carry)
		return KVP_ERR_PROTO;
	e->duration_secs += carry;
	e->duration_nanos %= 1000000000u;
	e->has_duration = 1;
	return KVP_OK;
}

static int take_hint(struct in *in)
{
	int rc = take_map(in, HINT);
	in->event->has_hint = 1;
	return rc;
}

static int take_add(struct in *in, uint32_t i)
{
	struct kvp_replica_event *e = in->event;
	switch (i) {
	case 0:
		return take_nil(in) ? KVP_OK : take_seq(in);
	case 1:
		return take_flag(in, &e->track_prefill);
	case 2:
		if (take_nil(in))
			return KVP_OK;
		e->has_expected_output = 1;
		return kvp_mp_u32(&in->c, &e->expected_output_tok);
	default:
		return take_nil(in) ? KVP_OK : take_hint(in);
	}
}

static int take_event(struct in *in, uint32_t i)
{
	struct kvp_replica_event *e = in->event;
	switch (i) {
	case 0:
		return take_str(in, &e->id);
	case 1:
		return take_map(in, WORKER);
	case 2:
		return take_data(in);
	case 3:
		return kvp_mp_u64(&in->c, &e->router_id);
	default:
		return take_nil(in) ? KVP_OK : take_str(in, &e->lora);
	}
}

static int take_scoped(struct in *in, uint32_t i)
{
	struct kvp_replica_event *e = in->event;
	switch (i) {
	case 0:
		return take_str(in, &e->model);
	case 1:
		return take_str(in, &e->group);
	case 2:
		return kvp_mp_u32(&in->c, &e->block_size);
	default:
		return take_map(in, EVENT);
	}
}

static int take_binding(struct in *in, uint32_t i)
{
	struct kvp_replica_binding *b = in->binding;
	switch (i) {
	case 0:
		return take_str(in, &b->model);
	case 1:
		return take_str(in, &b->group);
	case 2:
		return take_str(in, &b->session);
	case 3:
		return kvp_mp_u64(&in->c, &b->worker_id);
	case 4:
		if (take_nil(in))
			return KVP_OK;
		b->has_rank = 1;
		return kvp_mp_u32(&in->c, &b->dp_rank);
	case 5:
		return kvp_mp_u64(&in->c, &b->sequence);
	default:
		return kvp_mp_u64(&in->c, &b->writer_id);
	}
}

static int take_field(struct in *in, enum shape s, uint32_t i)
{
	struct kvp_replica_event *e = in->event;
	switch (s) {
	case SCOPED:
		return take_scoped(in, i);
	case EVENT:
		return take_event(in, i);
	case WORKER:
		return i ? kvp_mp_u32(&in->c, &e->dp_rank) : kvp_mp_u64(&in->c, &e->worker_id);
	case ADD:
		return take_add(in, i);
	case HINT:
		if (i == 0)
			return kvp_mp_u64(&in->c, &e->hint_tok);
		return take_nil(in) ? KVP_OK : take_duration(in);
	case DURATION:
		return i ? kvp_mp_u32(&in->c, &e->duration_nanos) : kvp_mp_u64(&in->c, &e->duration_secs);
	case BINDING:
		return take_binding(in, i);
	}
	return KVP_ERR_PROTO;
}

static int take_pair(struct in *in, enum shape s, uint32_t *seen)
{
	const char *key;
	uint32_t len, i = 0;
	if (kvp_mp_key(&in->c, &key, &len))
		return KVP_ERR_PROTO;
	while (i < shape[s].cnt && !is_text((struct kvp_str){key, len}, shape[s].key[i]))
		i++;
	if (i == shape[s].cnt)
		return shape[s].unknown == SKIP ? kvp_mp_skip_depth(&in->c, DEPTH_MAX - shape[s].depth)
						: KVP_ERR_PROTO;
	if (*seen & 1u << i)
		return KVP_ERR_PROTO;
	*seen |= 1u << i;
	return take_field(in, s, i);
}

/* A map by keys, or an array in their order. */
static int take_map(struct in *in, enum shape s)
{
	uint32_t n, seen = 0;
	int rc = KVP_OK;
	if (kvp_mp_type(&in->c) == KVP_MP_ARR) {
		if (kvp_mp_arr(&in->c, &n) || n > shape[s].cnt)
			return KVP_ERR_PROTO;
		for (uint32_t i = 0; i < n && !rc; i++)
			rc = take_field(in, s, i);
		seen = (1u << n) - 1;
	} else {
		if (kvp_mp_map(&in->c, &n))
			return KVP_ERR_PROTO;
		for (uint32_t i = 0; i < n && !rc; i++)
			rc = take_pair(in, s, &seen);
	}
	return rc ? rc : (seen & shape[s].required) == shape[s].required ? KVP_OK : KVP_ERR_PROTO;
}

static int decode(struct in *in, const void *payload, size_t len, enum shape s)
{
	size_t max = in->dec->payload_max ? in->dec->payload_max : KVP_REPLICA_PAYLOAD_MAX_BYTES;
	if (len > max)
		return KVP_ERR_LIMIT;
	in->c = (struct kvp_mp){payload, (const uint8_t *)payload + len};
	return len ? take_map(in, s) : KVP_ERR_PROTO;
}

int kvp_replica_decode_event(
	struct kvp_replica_dec *d, const void *payload, size_t len, struct kvp_replica_event *out)
{
	struct in in = {.dec = d, .event = out};
	memset(out, 0, sizeof(*out));
	return decode(&in, payload, len, SCOPED);
}

int kvp_replica_decode_binding(
	struct kvp_replica_dec *d, const void *payload, size_t len, struct kvp_replica_binding *out)
{
	struct in in = {.dec = d, .binding = out};
	memset(out, 0, sizeof(*out));
	return decode(&in, payload, len, BINDING);
}
