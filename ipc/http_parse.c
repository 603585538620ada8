#include <http_parser.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <kvpick/err.h>
#include "ipc/http_parse.h"

#define BLANK_LINES_MAX 8	 /* before a request line */
#define CHUNK_OVERHEAD_MAX 16384 /* extensions and trailers of one body */
#define CHUNK_DIGITS_MAX 16
#define BUF_MIN 1024

enum head_state { HEAD_START, HEAD_START_LF, HEAD_LINE, HEAD_LF, HEAD_BEGIN };

int kvp_http_buf_grow(struct kvp_http_buf *b, uint64_t extra)
{
	uint64_t cap = b->cap ? b->cap : BUF_MIN;
	while (cap < b->len + extra)
		cap += cap / 2 > extra ? cap / 2 : extra;
	char *p = realloc(b->p, cap);
	if (!p)
		return KVP_ERR_SYS;
	b->p = p;
	b->cap = cap;
	return KVP_OK;
}

int kvp_http_buf_put(struct kvp_http_buf *b, const void *data, uint64_t len)
{
	if (kvp_http_buf_room(b, len))
		return KVP_ERR_SYS;
	if (len)
		memcpy(b->p + b->len, data, len);
	b->len += len;
	return KVP_OK;
}

int kvp_http_buf_text(struct kvp_http_buf *b, const char *text)
{
	return kvp_http_buf_put(b, text, strlen(text));
}

void kvp_http_buf_trim(struct kvp_http_buf *b)
{
	b->len = 0;
	if (b->cap > KVP_HTTP_KEEP_BYTES)
		kvp_http_buf_free(b);
}

void kvp_http_buf_free(struct kvp_http_buf *b)
{
	free(b->p);
	*b = (struct kvp_http_buf){0};
}

unsigned kvp_http_dec(char to[KVP_DECIMAL_MAX], uint64_t n)
{
	char text[KVP_DECIMAL_MAX], *end = text + sizeof(text), *from = kvp_decimal(end, n);
	memcpy(to, from, (size_t)(end - from));
	return (unsigned)(end - from);
}

unsigned kvp_http_chunk_line(char to[KVP_HTTP_CHUNK_LINE_MAX], uint64_t len)
{
	unsigned cnt = len ? (67 - (unsigned)__builtin_clzll(len)) / 4 : 1;
	for (unsigned i = cnt; i; i--, len >>= 4)
		to[i - 1] = "0123456789abcdef"[len & 15];
	to[cnt] = '\r';
	to[cnt + 1] = '\n';
	return cnt + 2;
}

void kvp_http_parse_init(void)
{
	/* Ours are the limits; the library's must not be met first. */
	http_parser_set_max_header_size(UINT32_MAX / 2);
}

static int is_text(unsigned char c)
{
	return (c >= 32 && c != 127) || c == '\t';
}

/* Whether eight bytes are text for sure: none below 32 or equal to 127. (A tab, or a byte above one that is
 * none, may be taken for one.) */
static int is_text8(const char *p)
{
	const uint64_t ones = UINT64_C(0x0101010101010101), tops = ones << 7;
	uint64_t v, del;
	memcpy(&v, p, sizeof(v));
	del = v ^ ones * 127;
	return !((((v - ones * 32) & ~v) | ((del - ones) & ~del)) & tops);
}

/* Letters, digits and !#$%&'*+-.^_`|~ as bits. */
static int is_token(unsigned char c)
{
	static const uint64_t set[2] = {UINT64_C(0x03ff6cfa00000000), UINT64_C(0x57ffffffc7fffffe)};
	return c < 128 && set[c >> 6] >> (c & 63) & 1;
}

/* One line's bytes; stops at the first that is none. */
static int head_line(struct kvp_http_head *h, const char *data, uint64_t len, uint64_t *at)
{
	uint64_t i = *at, most = len - i;
	uint64_t room =
		h->line_len || h->header_len ? h->header_max - h->header_len : h->line_max - h->cur_len;
	most = most < room + 1 ? most : room + 1; /* one more than allowed is enough to see that */
	uint64_t end = i + most;
	while (end - i >= 8 && is_text8(data + i))
		i += 8;
	while (i < end && is_text((unsigned char)data[i]))
		i++;
	uint64_t n = i - *at;
	*at = i;
	h->cur_len += (uint32_t)n;
	if (h->line_len)
		h->header_len += (uint32_t)n;
	return n > room ? KVP_ERR_LIMIT : KVP_OK;
}

static int head_step(struct kvp_http_head *h, const char *data, uint64_t len, uint64_t *at)
{
	char c = data[*at];
	switch ((enum head_state)h->state) {
	case HEAD_START:
		if (c != '\r') {
			h->state = HEAD_LINE;
			return KVP_ERR_AGAIN;
		}
		h->state = HEAD_START_LF;
		break;
	case HEAD_START_LF:
		if (c != '\n' || ++h->blank_cnt > BLANK_LINES_MAX)
			return KVP_ERR_PROTO;
		h->state = HEAD_START;
		break;
	case HEAD_BEGIN:
		if (c == ' ' || c == '\t') /* a folded line */
			return KVP_ERR_PROTO;
		h->state = HEAD_LINE;
		return KVP_ERR_AGAIN;
	case HEAD_LINE:
		if (c != '\r') {
			int rc = head_line(h, data, len, at);
			h->over_line = !h->line_len;
			return rc ? rc : *at < len && data[*at] != '\r' ? KVP_ERR_PROTO : KVP_ERR_AGAIN;
		}
		h->state = HEAD_LF;
		break;
	case HEAD_LF:
		if (c != '\n')
			return KVP_ERR_PROTO;
		(*at)++;
		if (!h->line_len) {
			h->line_len = h->cur_len;
		} else {
			h->header_len += 2;
			if (!h->cur_len)
				return h->header_len > h->header_max ? KVP_ERR_LIMIT : KVP_OK;
		}
		h->cur_len = 0;
		h->state = HEAD_BEGIN;
		return h->header_len >= h->header_max ? KVP_ERR_LIMIT : KVP_ERR_AGAIN;
	}
	(*at)++;
	return KVP_ERR_AGAIN;
}

int kvp_http_head_feed(struct kvp_http_head *h, const char *data, uint64_t len, uint64_t *used)
{
	uint64_t at = 0, from = 0;
	int rc = KVP_ERR_AGAIN;
	while (rc == KVP_ERR_AGAIN && at < len) {
		rc = head_step(h, data, len, &at);
		if (h->state <= HEAD_START_LF)
			from = at; /* blank lines are not kept */
	}
	*used = at;
	int put = kvp_http_buf_put(&h->raw, data + from, at - from);
	return put ? put : rc;
}

static int on_url(http_parser *p, const char *at, size_t len)
{
	struct kvp_http_head *h = p->data;
	h->url = (uint32_t)(at - h->raw.p);
	h->url_len = (uint32_t)len;
	return 0;
}

/* The head is one piece of memory, so each name and each value comes in one piece. */
static int on_field(http_parser *p, const char *at, size_t len)
{
	struct kvp_http_head *h = p->data;
	if (h->field_cnt == h->field_cap) {
		uint32_t cap = h->field_cap ? h->field_cap * 2 : 16;
		struct kvp_http_field *f = cap > KVP_HTTP_FIELD_MAX
						   ? NULL
						   : realloc(h->field, cap * sizeof(struct kvp_http_field));
		if (!f)
			return 1;
		h->field = f;
		h->field_cap = cap;
	}
	h->field[h->field_cnt++] = (struct kvp_http_field){.name = (uint32_t)(at - h->raw.p),
		.name_len = (uint32_t)len,
		.val = (uint32_t)(at - h->raw.p)};
	return 0;
}

static int on_value(http_parser *p, const char *at, size_t len)
{
	struct kvp_http_head *h = p->data;
	while (len && (*at == ' ' || *at == '\t')) {
		at++;
		len--;
	}
	while (len && (at[len - 1] == ' ' || at[len - 1] == '\t'))
		len--;
	h->field[h->field_cnt - 1].val = (uint32_t)(at - h->raw.p);
	h->field[h->field_cnt - 1].val_len = (uint32_t)len;
	return 0;
}

static int on_headers_complete(http_parser *p)
{
	struct kvp_http_head *h = p->data;
	h->keep_alive = http_should_keep_alive(p) != 0;
	h->done = 1;
	return 1; /* the body is not the library's */
}

int kvp_http_head_parse(struct kvp_http_head *h, enum kvp_http_kind kind)
{
	static const http_parser_settings cb = {.on_url = on_url,
		.on_header_field = on_field,
		.on_header_value = on_value,
		.on_headers_complete = on_headers_complete};
	http_parser p;
	http_parser_init(&p, kind == KVP_HTTP_KIND_REQUEST ? HTTP_REQUEST : HTTP_RESPONSE);
	p.data = h;
	http_parser_execute(&p, &cb, h->raw.p, h->raw.len);
	enum http_errno err = HTTP_PARSER_ERRNO(&p);
	if (err == HPE_CB_header_field)
		return KVP_ERR_LIMIT;
	h->version = (uint16_t)(p.http_major << 8 | (p.http_minor & 255));
	h->minor = (uint8_t)p.http_minor;
	h->method = (uint8_t)p.method;
	h->status = (uint16_t)p.status_code;
	for (uint32_t i = 0; i < h->field_cnt; i++) {
		const struct kvp_http_field *f = &h->field[i];
		for (uint32_t k = 0; k < f->name_len; k++)
			if (!is_token((unsigned char)h->raw.p[f->name + k]))
				return KVP_ERR_PROTO;
	}
	/* The framing is looked at by the caller, who tells a foreign coding from a contradiction. */
	if (err == HPE_INVALID_TRANSFER_ENCODING)
		return KVP_OK;
	return err != HPE_OK || !h->done ? KVP_ERR_PROTO : KVP_OK;
}

const char *kvp_http_head_find(const struct kvp_http_head *h, const char *name, uint32_t *len, uint32_t *cnt)
{
	const char *val = NULL;
	uint32_t n = 0, name_len = (uint32_t)strlen(name);
	for (uint32_t i = 0; i < h->field_cnt; i++) {
		const struct kvp_http_field *f = &h->field[i];
		if (f->name_len != name_len || strncasecmp(h->raw.p + f->name, name, name_len) != 0)
			continue;
		if (!n++) {
			val = h->raw.p + f->val;
			if (len)
				*len = f->val_len;
			if (!cnt)
				return val;
		}
	}
	if (cnt)
		*cnt = n;
	return val;
}

void kvp_http_head_reset(struct kvp_http_head *h)
{
	struct kvp_http_buf raw = h->raw;
	struct kvp_http_head keep = {.line_max = h->line_max,
		.header_max = h->header_max,
		.field = h->field,
		.field_cap = h->field_cap};
	kvp_http_buf_trim(&raw);
	keep.raw = raw;
	*h = keep;
}

void kvp_http_head_free(struct kvp_http_head *h)
{
	kvp_http_buf_free(&h->raw);
	free(h->field);
	h->field = NULL;
	h->field_cnt = h->field_cap = 0;
}

int kvp_http_head_framing(const struct kvp_http_head *h, enum kvp_http_framing *f, uint64_t *length)
{
	uint32_t te_len = 0, te_cnt, cl_len = 0, cl_cnt;
	const char *te = kvp_http_head_find(h, "transfer-encoding", &te_len, &te_cnt);
	const char *cl = kvp_http_head_find(h, "content-length", &cl_len, &cl_cnt);
	if (te_cnt > 1 || cl_cnt > 1 || (te && cl) || (te && h->minor == 0))
		return KVP_ERR_PROTO;
	if (te) {
		if (te_len != 7 || strncasecmp(te, "chunked", 7) != 0)
			return te_len ? KVP_ERR_INVAL : KVP_ERR_PROTO;
		*f = KVP_HTTP_FRAME_CHUNKED;
		return KVP_OK;
	}
	*f = KVP_HTTP_FRAME_NONE;
	if (!cl)
		return KVP_OK;
	uint64_t v = 0;
	for (uint32_t i = 0; i < cl_len; i++) {
		unsigned d = (unsigned char)cl[i] - '0';
		if (d > 9 || v > (UINT64_MAX - d) / 10)
			return KVP_ERR_PROTO;
		v = v * 10 + d;
	}
	if (!cl_len)
		return KVP_ERR_PROTO;
	*f = KVP_HTTP_FRAME_LENGTH;
	*length = v;
	return KVP_OK;
}

enum chunk_state {
	CHUNK_SIZE,
	CHUNK_EXT,
	CHUNK_SIZE_LF,
	CHUNK_DATA,
	CHUNK_DATA_CR,
	CHUNK_DATA_LF,
	CHUNK_TRAILER, /* at the start of a line */
	CHUNK_TRAILER_LINE,
	CHUNK_TRAILER_LF,
	CHUNK_END_LF
};

static int hex(char c)
{
	if (c >= '0' && c <= '9')
		return c - '0';
	c = (char)(c | 32);
	return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

/* One byte outside of data. */
static int chunk_byte(struct kvp_http_chunk *c, char b)
{
	int d;
	switch ((enum chunk_state)c->state) {
	case CHUNK_SIZE:
		d = hex(b);
		if (d >= 0) {
			if (++c->digits > CHUNK_DIGITS_MAX)
				return KVP_ERR_PROTO;
			c->left = c->left << 4 | (unsigned)d;
			return KVP_ERR_AGAIN;
		}
		if (!c->digits || (b != '\r' && b != ';'))
			return KVP_ERR_PROTO;
		c->state = b == ';' ? CHUNK_EXT : CHUNK_SIZE_LF;
		return KVP_ERR_AGAIN;
	case CHUNK_EXT:
	case CHUNK_TRAILER_LINE:
		if (b == '\r')
			c->state = c->state == CHUNK_EXT ? CHUNK_SIZE_LF : CHUNK_TRAILER_LF;
		else if (!is_text((unsigned char)b) || ++c->overhead > CHUNK_OVERHEAD_MAX)
			return KVP_ERR_PROTO;
		return KVP_ERR_AGAIN;
	case CHUNK_SIZE_LF:
		c->state = c->left ? CHUNK_DATA : CHUNK_TRAILER;
		c->digits = 0;
		return b == '\n' ? KVP_ERR_AGAIN : KVP_ERR_PROTO;
	case CHUNK_DATA_CR:
		c->state = CHUNK_DATA_LF;
		return b == '\r' ? KVP_ERR_AGAIN : KVP_ERR_PROTO;
	case CHUNK_DATA_LF:
		c->state = CHUNK_SIZE;
		return b == '\n' ? KVP_ERR_AGAIN : KVP_ERR_PROTO;
	case CHUNK_TRAILER:
		if (b != '\r' && !is_token((unsigned char)b))
			return KVP_ERR_PROTO;
		c->state = b == '\r' ? CHUNK_END_LF : CHUNK_TRAILER_LINE;
		return KVP_ERR_AGAIN;
	case CHUNK_TRAILER_LF:
		c->state = CHUNK_TRAILER;
		return b == '\n' ? KVP_ERR_AGAIN : KVP_ERR_PROTO;
	case CHUNK_END_LF:
		return b == '\n' ? KVP_OK : KVP_ERR_PROTO;
	case CHUNK_DATA:
		break;
	}
	return KVP_ERR_PROTO;
}

uint64_t kvp_http_chunk_due(const struct kvp_http_chunk *c)
{
	return c->state == CHUNK_DATA ? c->left : 0;
}

int kvp_http_chunk_feed(struct kvp_http_chunk *c, const char *data, uint64_t len, uint64_t *used,
	const char **out, uint64_t *out_len)
{
	uint64_t at = 0;
	int rc = KVP_ERR_AGAIN;
	*out_len = 0;
	*out = data;
	while (rc == KVP_ERR_AGAIN && at < len && c->state != CHUNK_DATA)
		rc = chunk_byte(c, data[at++]);
	if (rc == KVP_ERR_AGAIN && at < len) {
		uint64_t n = len - at < c->left ? len - at : c->left;
		*out = data + at;
		*out_len = n;
		at += n;
		c->left -= n;
		if (!c->left)
			c->state = CHUNK_DATA_CR;
	}
	*used = at;
	return rc;
}
