/* ipc/mp_in.c — see mp_in.h. */
#include "ipc/mp_in.h"

/* One value's header: its kind, the bytes that follow as its own data, the values inside, the integer. */
struct head {
	enum kvp_mp_type type;
	size_t head_bytes, data_bytes;
	uint64_t count; /* values inside */
	uint64_t bits;
	int neg;
};

static uint64_t be(const uint8_t *p, size_t n)
{
	uint64_t v = 0;
	while (n--)
		v = v << 8 | *p++;
	return v;
}

/* First bytes 0xc0..0xdf: kind, and how many bytes of length or value follow. */
static const struct {
	uint8_t type, bytes;
} wide[32] = {
	{KVP_MP_NIL, 0}, {KVP_MP_NONE, 0}, {KVP_MP_BOOL, 0}, {KVP_MP_BOOL, 0},  /* c0 */
	{KVP_MP_BIN, 1}, {KVP_MP_BIN, 2}, {KVP_MP_BIN, 4}, {KVP_MP_EXT, 1},     /* c4 */
	{KVP_MP_EXT, 2}, {KVP_MP_EXT, 4}, {KVP_MP_FLOAT, 4}, {KVP_MP_FLOAT, 8}, /* c8 */
	{KVP_MP_INT, 1}, {KVP_MP_INT, 2}, {KVP_MP_INT, 4}, {KVP_MP_INT, 8},     /* cc */
	{KVP_MP_INT, 1}, {KVP_MP_INT, 2}, {KVP_MP_INT, 4}, {KVP_MP_INT, 8},     /* d0 */
	{KVP_MP_EXT, 0}, {KVP_MP_EXT, 0}, {KVP_MP_EXT, 0}, {KVP_MP_EXT, 0},     /* d4 */
	{KVP_MP_EXT, 0}, {KVP_MP_STR, 1}, {KVP_MP_STR, 2}, {KVP_MP_STR, 4},     /* d8 */
	{KVP_MP_ARR, 2}, {KVP_MP_ARR, 4}, {KVP_MP_MAP, 2}, {KVP_MP_MAP, 4},     /* dc */
};

static void head_wide(const uint8_t *p, struct head *h)
{
	h->type = wide[p[0] - 0xc0].type;
	size_t n = wide[p[0] - 0xc0].bytes;
	h->head_bytes = 1 + n;
	uint64_t v = be(p + 1, n);
	switch (h->type) {
	case KVP_MP_INT:
		h->bits = v;
		if (p[0] >= 0xd0) { /* signed: extend */
			unsigned shift = 64 - 8 * (unsigned)n;
			h->bits = (uint64_t)((int64_t)(v << shift) >> shift);
			h->neg = (int64_t)h->bits < 0;
		}
		break;
	case KVP_MP_BOOL:
		h->bits = p[0] & 1;
		break;
	case KVP_MP_FLOAT:
		h->bits = v;
		break;
	case KVP_MP_EXT: /* type byte, then the data */
		h->data_bytes = 1 + (n ? v : 1ull << (p[0] - 0xd4));
		break;
	case KVP_MP_STR:
	case KVP_MP_BIN:
		h->data_bytes = v;
		break;
	case KVP_MP_ARR:
		h->count = v;
		break;
	case KVP_MP_MAP:
		h->count = 2 * v;
		break;
	case KVP_MP_NIL:
	case KVP_MP_NONE:
		break;
	}
}

/* KVP_OK if the header and the value's own data are there, and bytes for the values inside may be. */
static int head(const struct kvp_mp *c, struct head *h)
{
	size_t left = kvp_mp_left(c);
	if (!left)
		return KVP_ERR_PROTO;
	const uint8_t b = c->p[0];
	*h = (struct head){.head_bytes = 1};
	if (b < 0x80) {
		h->type = KVP_MP_INT;
		h->bits = b;
	} else if (b < 0x90) {
		h->type = KVP_MP_MAP;
		h->count = 2 * (b & 15u);
	} else if (b < 0xa0) {
		h->type = KVP_MP_ARR;
		h->count = b & 15u;
	} else if (b < 0xc0) {
		h->type = KVP_MP_STR;
		h->data_bytes = b & 31u;
	} else if (b >= 0xe0) {
		h->type = KVP_MP_INT;
		h->bits = (uint64_t)(int64_t)(int8_t)b;
		h->neg = 1;
	} else {
		size_t need = 1 + (size_t)wide[b - 0xc0].bytes;
		if (left < need || b == 0xc1)
			return KVP_ERR_PROTO;
		head_wide(c->p, h);
	}
	left -= h->head_bytes;
	return h->data_bytes > left || h->count > left - h->data_bytes ? KVP_ERR_PROTO : KVP_OK;
}

/* The header of a value of this kind; moves behind the header. */
static int take(struct kvp_mp *c, enum kvp_mp_type type, struct head *h)
{
	if (head(c, h) != KVP_OK || h->type != type)
		return KVP_ERR_PROTO;
	c->p += h->head_bytes;
	return KVP_OK;
}

enum kvp_mp_type kvp_mp_type(const struct kvp_mp *c)
{
	if (c->p == c->end)
		return KVP_MP_NONE;
	const uint8_t b = c->p[0];
	if (b < 0x80 || b >= 0xe0)
		return KVP_MP_INT;
	if (b >= 0xc0)
		return (enum kvp_mp_type)wide[b - 0xc0].type;
	return b < 0x90 ? KVP_MP_MAP : b < 0xa0 ? KVP_MP_ARR : KVP_MP_STR;
}

int kvp_mp_int(struct kvp_mp *c, uint64_t *bits, int *neg)
{
	struct head h;
	if (take(c, KVP_MP_INT, &h) != KVP_OK)
		return KVP_ERR_PROTO;
	*bits = h.bits;
	*neg = h.neg;
	return KVP_OK;
}

int kvp_mp_u64(struct kvp_mp *c, uint64_t *out)
{
	struct head h;
	if (head(c, &h) != KVP_OK || h.type != KVP_MP_INT || h.neg)
		return KVP_ERR_PROTO;
	c->p += h.head_bytes;
	*out = h.bits;
	return KVP_OK;
}

int kvp_mp_u32_slow(struct kvp_mp *c, uint32_t *out)
{
	struct head h;
	if (head(c, &h) != KVP_OK || h.type != KVP_MP_INT || h.neg || h.bits > UINT32_MAX)
		return KVP_ERR_PROTO;
	c->p += h.head_bytes;
	*out = (uint32_t)h.bits;
	return KVP_OK;
}

int kvp_mp_number(struct kvp_mp *c, double *out)
{
	struct head h;
	if (head(c, &h) != KVP_OK)
		return KVP_ERR_PROTO;
	if (h.type == KVP_MP_INT) {
		*out = h.neg ? (double)(int64_t)h.bits : (double)h.bits;
	} else if (h.type != KVP_MP_FLOAT) {
		return KVP_ERR_PROTO;
	} else if (h.head_bytes == 5) {
		uint32_t bits = (uint32_t)h.bits;
		float f;
		memcpy(&f, &bits, sizeof(f));
		*out = (double)f;
	} else {
		memcpy(out, &h.bits, sizeof(*out));
	}
	c->p += h.head_bytes;
	return KVP_OK;
}

int kvp_mp_nil(struct kvp_mp *c)
{
	if (c->p == c->end || c->p[0] != 0xc0)
		return KVP_ERR_PROTO;
	c->p++;
	return KVP_OK;
}

static int take_bytes(struct kvp_mp *c, enum kvp_mp_type type, const uint8_t **s, uint32_t *len)
{
	struct head h;
	if (take(c, type, &h) != KVP_OK)
		return KVP_ERR_PROTO;
	*s = c->p;
	*len = (uint32_t)h.data_bytes;
	c->p += h.data_bytes;
	return KVP_OK;
}

int kvp_mp_str(struct kvp_mp *c, const char **s, uint32_t *len)
{
	const uint8_t *b;
	if (take_bytes(c, KVP_MP_STR, &b, len) != KVP_OK)
		return KVP_ERR_PROTO;
	*s = (const char *)b;
	return KVP_OK;
}

int kvp_mp_bin(struct kvp_mp *c, const uint8_t **s, uint32_t *len)
{
	return take_bytes(c, KVP_MP_BIN, s, len);
}

int kvp_mp_key(struct kvp_mp *c, const char **s, uint32_t *len)
{
	const uint8_t *b;
	enum kvp_mp_type type = kvp_mp_type(c) == KVP_MP_BIN ? KVP_MP_BIN : KVP_MP_STR;
	if (take_bytes(c, type, &b, len) != KVP_OK)
		return KVP_ERR_PROTO;
	*s = (const char *)b;
	return KVP_OK;
}

int kvp_mp_arr(struct kvp_mp *c, uint32_t *n)
{
	struct head h;
	if (take(c, KVP_MP_ARR, &h) != KVP_OK)
		return KVP_ERR_PROTO;
	*n = (uint32_t)h.count;
	return KVP_OK;
}

int kvp_mp_map(struct kvp_mp *c, uint32_t *n)
{
	struct head h;
	if (take(c, KVP_MP_MAP, &h) != KVP_OK)
		return KVP_ERR_PROTO;
	*n = (uint32_t)(h.count / 2);
	return KVP_OK;
}

int kvp_mp_skip(struct kvp_mp *c)
{
	struct kvp_mp at = *c;
	for (uint64_t todo = 1; todo; todo--) {
		struct head h;
		if (head(&at, &h) != KVP_OK)
			return KVP_ERR_PROTO;
		at.p += h.head_bytes + h.data_bytes;
		todo += h.count;
		if (todo - 1 > kvp_mp_left(&at)) /* every value has at least one byte */
			return KVP_ERR_PROTO;
	}
	*c = at;
	return KVP_OK;
}

int kvp_mp_skip_depth(struct kvp_mp *c, uint32_t depth_max)
{
	struct kvp_mp at = *c;
	uint64_t todo[KVP_MP_DEPTH_MAX + 1]; /* as far as depth */
	uint32_t depth = 0;
	todo[0] = 1;
	if (depth_max > KVP_MP_DEPTH_MAX)
		return KVP_ERR_PROTO;
	for (;;) {
		while (!todo[depth]) {
			if (!depth) {
				*c = at;
				return KVP_OK;
			}
			depth--;
		}
		todo[depth]--;
		struct head h;
		if (head(&at, &h) != KVP_OK)
			return KVP_ERR_PROTO;
		at.p += h.head_bytes + h.data_bytes;
		if (h.type != KVP_MP_ARR && h.type != KVP_MP_MAP)
			continue;
		if (depth == depth_max)
			return KVP_ERR_PROTO;
		todo[++depth] = h.count;
	}
}
