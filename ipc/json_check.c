#include "ipc/json_check.h"

#include <kvpick/err.h>
#include <string.h>

enum state {
	VALUE,	      /* a value */
	VALUE_OR_END, /* behind [ */
	KEY_OR_END,   /* behind { */
	KEY,	      /* behind a comma of an object */
	COLON,
	AFTER, /* behind a value */
	STRING,
	ESCAPE,
	HEX, /* at: digits seen */
	LITERAL,
	MINUS, /* numbers, from here */
	ZERO,
	INTEGER,
	DOT,
	FRACTION,
	E,
	E_SIGN,
	EXPONENT
};

static const char *const literal[] = {"true", "false", "null"};

/* What a string may hold as it is, one byte a character. */
static int is_plain(unsigned char b)
{
	return b >= 0x20 && b < 0x80 && b != '"' && b != '\\';
}

static int is_digit(unsigned char b)
{
	return b >= '0' && b <= '9';
}

static int is_blank(unsigned char b)
{
	return b == ' ' || b == '\n' || b == '\r' || b == '\t';
}

/* Eight plain bytes? May say no where it is yes: a borrow runs on into the next byte. */
static int are_plain(const unsigned char *p)
{
	const uint64_t ones = UINT64_C(0x0101010101010101);
	uint64_t v, quote, escape;
	memcpy(&v, p, sizeof(v));
	quote = v ^ ones * '"';
	escape = v ^ ones * '\\';
	return !((v | ((v - ones * 0x20) & ~v) | ((quote - ones) & ~quote) | ((escape - ones) & ~escape)) &
		 ones * 0x80);
}

static const unsigned char *skip_plain(const unsigned char *p, const unsigned char *end)
{
	while (p < end) {
		while (end - p >= 8 && are_plain(p))
			p += 8;
		if (p == end || !is_plain(*p))
			break;
		p++;
	}
	return p;
}

/* The first byte of a sequence says how many follow, and what the second may be: no overlong form, no half of
 * a surrogate pair, nothing over U+10FFFF. */
static int utf8_first(struct kvp_json_check *c, unsigned char b)
{
	c->low = b == 0xe0 ? 0xa0 : b == 0xf0 ? 0x90 : 0x80;
	c->high = b == 0xed ? 0x9f : b == 0xf4 ? 0x8f : 0xbf;
	c->left = b >= 0xf0 ? 3 : b >= 0xe0 ? 2 : 1;
	return b >= 0xc2 && b <= 0xf4 ? KVP_OK : KVP_ERR_PROTO;
}

static int open_in(struct kvp_json_check *c, int is_obj)
{
	if (c->depth == KVP_JSON_DEPTH_MAX)
		return KVP_ERR_LIMIT;
	uint8_t bit = (uint8_t)(1u << (c->depth & 7)), *at = &c->is_obj[c->depth / 8];
	*at = (uint8_t)(is_obj ? *at | bit : *at & ~bit);
	c->depth++;
	c->state = is_obj ? KEY_OR_END : VALUE_OR_END;
	return KVP_OK;
}

static int in_object(const struct kvp_json_check *c)
{
	return c->is_obj[(c->depth - 1) / 8] >> ((c->depth - 1) & 7) & 1;
}

static int close_in(struct kvp_json_check *c, unsigned char b)
{
	if (!c->depth || b != (in_object(c) ? '}' : ']'))
		return KVP_ERR_PROTO;
	c->depth--;
	c->state = AFTER;
	return KVP_OK;
}

static int value_first(struct kvp_json_check *c, unsigned char b)
{
	if (!c->depth)
		c->first = b;
	if (b == '"') {
		c->state = STRING;
		c->is_key = 0;
	} else if (b == '{' || b == '[') {
		return open_in(c, b == '{');
	} else if (b == '-') {
		c->state = MINUS;
	} else if (is_digit(b)) {
		c->state = b == '0' ? ZERO : INTEGER;
	} else if (b == 't' || b == 'f' || b == 'n') {
		c->literal = b == 't' ? 0 : b == 'f' ? 1 : 2;
		c->state = LITERAL;
		c->at = 1;
	} else {
		return KVP_ERR_PROTO;
	}
	return KVP_OK;
}

/* One byte between values, no blank. */
static int between(struct kvp_json_check *c, unsigned char b)
{
	switch ((enum state)c->state) {
	case VALUE_OR_END:
		return b == ']' ? close_in(c, b) : value_first(c, b);
	case KEY_OR_END:
	case KEY:
		if (b == '}' && c->state == KEY_OR_END)
			return close_in(c, b);
		c->state = STRING;
		c->is_key = 1;
		return b == '"' ? KVP_OK : KVP_ERR_PROTO;
	case COLON:
		c->state = VALUE;
		return b == ':' ? KVP_OK : KVP_ERR_PROTO;
	case AFTER:
		if (b != ',')
			return close_in(c, b);
		if (!c->depth)
			return KVP_ERR_PROTO;
		c->state = in_object(c) ? KEY : VALUE;
		return KVP_OK;
	default:
		return value_first(c, b);
	}
}

/* From STRING up to its quote, or to what needs a state of its own. */
static const unsigned char *string(
	struct kvp_json_check *c, const unsigned char *p, const unsigned char *end, int *rc)
{
	while (p < end && !*rc) {
		if (c->left) {
			*rc = *p >= c->low && *p <= c->high ? KVP_OK : KVP_ERR_PROTO;
			c->low = 0x80;
			c->high = 0xbf;
			c->left--;
			p++;
			continue;
		}
		p = skip_plain(p, end);
		if (p == end)
			break;
		unsigned char b = *p++;
		if (b >= 0x80) {
			*rc = utf8_first(c, b);
			continue;
		}
		c->state = b == '\\' ? ESCAPE : c->is_key ? COLON : AFTER;
		*rc = b >= 0x20 ? KVP_OK : KVP_ERR_PROTO;
		break;
	}
	return p;
}

static int escape(struct kvp_json_check *c, unsigned char b)
{
	c->state = b == 'u' ? HEX : STRING;
	c->at = 0;
	return b && strchr("\"\\/bfnrtu", b) ? KVP_OK : KVP_ERR_PROTO;
}

static int hex(struct kvp_json_check *c, unsigned char b)
{
	if (++c->at == 4)
		c->state = STRING;
	return is_digit(b) || ((b | 32) >= 'a' && (b | 32) <= 'f') ? KVP_OK : KVP_ERR_PROTO;
}

static int literal_byte(struct kvp_json_check *c, unsigned char b)
{
	const char *text = literal[c->literal];
	if ((unsigned char)text[c->at++] != b)
		return KVP_ERR_PROTO;
	if (!text[c->at])
		c->state = AFTER;
	return KVP_OK;
}

/* Whether a number may end in that state. */
static int ends_number(unsigned state)
{
	return state == ZERO || state == INTEGER || state == FRACTION || state == EXPONENT;
}

/* A byte behind the first one of a number; *used 0: it belongs to what follows. */
static int number(struct kvp_json_check *c, unsigned char b, int *used)
{
	unsigned s = c->state;
	int digit = is_digit(b);
	*used = 1;
	if (s == MINUS && digit)
		c->state = b == '0' ? ZERO : INTEGER;
	else if ((s == DOT || s == FRACTION) && digit)
		c->state = FRACTION;
	else if (s >= E && digit)
		c->state = EXPONENT;
	else if ((s == ZERO || s == INTEGER) && b == '.')
		c->state = DOT;
	else if ((s == ZERO || s == INTEGER || s == FRACTION) && (b | 32) == 'e')
		c->state = E;
	else if (s == E && (b == '+' || b == '-'))
		c->state = E_SIGN;
	else if (s != INTEGER || !digit)
		*used = 0;
	if (*used)
		return KVP_OK;
	c->state = AFTER;
	return ends_number(s) ? KVP_OK : KVP_ERR_PROTO;
}

static const unsigned char *feed_some(
	struct kvp_json_check *c, const unsigned char *p, const unsigned char *end, int *rc)
{
	int used = 1;
	switch ((enum state)c->state) {
	case STRING:
		return string(c, p, end, rc);
	case ESCAPE:
		*rc = escape(c, *p);
		break;
	case HEX:
		*rc = hex(c, *p);
		break;
	case LITERAL:
		*rc = literal_byte(c, *p);
		break;
	default:
		if (c->state >= MINUS)
			*rc = number(c, *p, &used);
		else if (!is_blank(*p))
			*rc = between(c, *p);
		break;
	}
	return p + used;
}

int kvp_json_check_feed(struct kvp_json_check *c, const void *data, uint64_t len)
{
	const unsigned char *p = data, *end = p + len;
	while (p < end && !c->rc)
		p = feed_some(c, p, end, &c->rc);
	return c->rc;
}

int kvp_json_check_end(const struct kvp_json_check *c)
{
	if (c->rc)
		return c->rc;
	return !c->depth && (c->state == AFTER || ends_number(c->state)) ? KVP_OK : KVP_ERR_PROTO;
}
