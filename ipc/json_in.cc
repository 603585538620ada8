/* ipc/json_in.cc — simdjson's DOM tape behind json_in.h. */
#define SIMDJSON_EXCEPTIONS 0
#include <simdjson.h>

#include <charconv>
#include <cmath>
#include <cstring>
#include <new>

#include "ipc/json_in.h"

using simdjson::error_code;
using simdjson::internal::tape_ref;
using simdjson::internal::tape_type;

static_assert(
	simdjson::SIMDJSON_PADDING <= KVP_JSON_SLACK_BYTES, "slack promised in the header is too small");

/* Numbers at or above this were written so by sanitise_number, or are as useless. */
static constexpr double HUGE_NUMBER = 9e307;
static constexpr double TWO_64 = 18446744073709551616.0, MINUS_TWO_63 = -9223372036854775808.0;

struct kvp_json {
	simdjson::dom::parser parser;
	uint8_t *copy = nullptr;
	size_t copy_cap = 0;
	size_t depth = 0; /* what the parser was allocated for */
};

static inline tape_ref ref(kvp_json_val v)
{
	return tape_ref(static_cast<const simdjson::dom::document *>(v.doc), v.at);
}
static inline tape_type type_at(const simdjson::dom::document *d, size_t at)
{
	return static_cast<tape_type>(d->tape[at] >> 56);
}

extern "C" struct kvp_json *kvp_json_new(void)
{
	return new (std::nothrow) kvp_json();
}

extern "C" void kvp_json_free(struct kvp_json *p)
{
	if (!p)
		return;
	std::free(p->copy);
	delete p;
}

extern "C" void kvp_json_trim(struct kvp_json *p, size_t most)
{
	if (p->parser.capacity() > most) {
		p->parser = simdjson::dom::parser();
		p->depth = 0;
	}
	if (p->copy_cap > most + most / 2 + KVP_JSON_SLACK_BYTES) {
		std::free(p->copy);
		p->copy = nullptr;
		p->copy_cap = 0;
	}
}

/* The text in our own buffer, zeroes behind it. */
static const uint8_t *copy_in(struct kvp_json *p, const void *text, size_t len)
{
	if (p->copy_cap < len + KVP_JSON_SLACK_BYTES) {
		size_t cap = len + len / 2 + KVP_JSON_SLACK_BYTES;
		uint8_t *mem = static_cast<uint8_t *>(std::malloc(cap));
		if (!mem)
			return nullptr;
		std::free(p->copy);
		p->copy = mem;
		p->copy_cap = cap;
	}
	std::memcpy(p->copy, text, len);
	std::memset(p->copy + len, 0, KVP_JSON_SLACK_BYTES);
	return p->copy;
}

static bool is_digit(uint8_t c)
{
	return c >= '0' && c <= '9';
}

/* One number token [s, e) that RFC 8259 allows? *integer: without fraction and exponent. */
static bool number_is_valid(const uint8_t *s, const uint8_t *e, bool *integer)
{
	*integer = true;
	if (s < e && *s == '-')
		s++;
	if (s == e || !is_digit(*s) || (*s == '0' && s + 1 < e && is_digit(s[1])))
		return false;
	while (s < e && is_digit(*s))
		s++;
	if (s < e && *s == '.') {
		*integer = false;
		if (++s == e || !is_digit(*s))
			return false;
		while (s < e && is_digit(*s))
			s++;
	}
	if (s < e && (*s == 'e' || *s == 'E')) {
		*integer = false;
		if (++s < e && (*s == '+' || *s == '-'))
			s++;
		if (s == e || !is_digit(*s))
			return false;
		while (s < e && is_digit(*s))
			s++;
	}
	return s == e;
}

/* Rewrite, in place and in the same length, a valid number that simdjson refuses: an integer beyond 64 bits
 * becomes the double of (almost) its value, a number beyond a double becomes HUGE_NUMBER. */
static void sanitise_number(uint8_t *s, uint8_t *e)
{
	bool integer;
	if (!number_is_valid(s, e, &integer))
		return;
	const bool neg = *s == '-';
	uint8_t *d = s + neg;
	const size_t n = static_cast<size_t>(e - d);
	double v = 0;
	auto res = std::from_chars(reinterpret_cast<char *>(s), reinterpret_cast<char *>(e), v);
	const bool neg_exp = std::memchr(d, '-', n) != nullptr; /* out of range towards zero is no problem */
	if (res.ec == std::errc::result_out_of_range ? !neg_exp : std::fabs(v) >= HUGE_NUMBER) {
		if (n < 5)
			return;
		std::memset(d, '0', n);
		d[0] = '9';
		d[1] = 'e';
		std::memcpy(e - 3, "307", 3);
		return;
	}
	if (!integer)
		return;
	const char *limit = neg ? "9223372036854775808" : "18446744073709551615";
	const size_t limit_len = std::strlen(limit);
	if (n > limit_len || (n == limit_len && std::memcmp(d, limit, n) > 0))
		std::memcpy(e - 2, "e2", 2);
}

static int hex4(const uint8_t *s)
{
	int v = 0;
	for (int i = 0; i < 4; i++) {
		const uint8_t c = s[i], l = c | 0x20;
		if (is_digit(c))
			v = v * 16 + (c - '0');
		else if (l >= 'a' && l <= 'f')
			v = v * 16 + (l - 'a' + 10);
		else
			return -1;
	}
	return v;
}

/* s is behind an opening quote; returns the place behind the closing one. Lone surrogates become \ufffd. */
static uint8_t *sanitise_string(uint8_t *s, uint8_t *e)
{
	while (s < e && *s != '"') {
		if (*s != '\\') {
			s++;
			continue;
		}
		if (e - s < 6 || s[1] != 'u') {
			s += 2;
			continue;
		}
		const int c = hex4(s + 2);
		if (c < 0xd800 || c > 0xdfff) {
			s += 6;
			continue;
		}
		const int low = c <= 0xdbff && e - s >= 12 && s[6] == '\\' && s[7] == 'u' ? hex4(s + 8) : -1;
		if (low >= 0xdc00 && low <= 0xdfff) {
			s += 12;
			continue;
		}
		std::memcpy(s + 2, "fffd", 4);
		s += 6;
	}
	return s < e ? s + 1 : e;
}

extern "C" int kvp_json_lone_surrogate(const void *text, size_t len)
{
	const uint8_t *s = static_cast<const uint8_t *>(text), *e = s + len;
	while (s < e &&
		(s = static_cast<const uint8_t *>(std::memchr(s, '\\', static_cast<size_t>(e - s))))) {
		const int u = e - s >= 6 && s[1] == 'u' ? hex4(s + 2) : -1;
		if (u >= 0xd800 && u <= 0xdfff) {
			const bool two = u < 0xdc00 && e - s >= 12 && s[6] == '\\' && s[7] == 'u';
			const int low = two ? hex4(s + 8) : -1;
			if (low < 0xdc00 || low > 0xdfff)
				return 1;
			s += 6;
		}
		s += u < 0 ? 2 : 6;
	}
	return 0;
}

/* The slow path after a refused number or string (the header's rule for members that nobody reads). */
static void sanitise(uint8_t *s, uint8_t *e)
{
	while (s < e) {
		if (*s == '"') {
			s = sanitise_string(s + 1, e);
		} else if (*s == '-' || is_digit(*s)) {
			uint8_t *n = s;
			while (n < e && (is_digit(*n) || std::strchr("+-.eE", *n)) && *n)
				n++;
			sanitise_number(s, n);
			s = n;
		} else {
			s++;
		}
	}
}

static error_code parse_once(struct kvp_json *p, const uint8_t *text, size_t len, size_t depth)
{
	if (p->depth != depth) {
		const size_t cap = len > p->parser.capacity() ? len : p->parser.capacity();
		const error_code ec = p->parser.allocate(cap, depth);
		if (ec)
			return ec;
		p->depth = depth;
	}
	return p->parser.parse_into_document(p->parser.doc, text, len, false).error();
}

/* The library doesn't count an empty innermost container: measure the tape. */
static bool deeper_than(const simdjson::dom::document *d, size_t depth_max)
{
	size_t depth = 0, end = static_cast<size_t>(tape_ref(d, 0).matching_brace_index());
	for (size_t at = 1; at < end; at++) {
		switch (type_at(d, at)) {
		case tape_type::START_ARRAY:
		case tape_type::START_OBJECT:
			if (++depth > depth_max)
				return true;
			break;
		case tape_type::END_ARRAY:
		case tape_type::END_OBJECT:
			depth--;
			break;
		case tape_type::INT64:
		case tape_type::UINT64:
		case tape_type::DOUBLE:
			at++;
			break;
		default:
			break;
		}
	}
	return false;
}

static error_code parse_deep(struct kvp_json *p, const uint8_t *text, size_t len, size_t depth_max)
{
	/* With a limit of depth_max the library accepts at most that many levels, and refuses some. */
	error_code ec = parse_once(p, text, len, depth_max);
	if (ec != simdjson::DEPTH_ERROR)
		return ec;
	ec = parse_once(p, text, len, depth_max + 1);
	if (ec == simdjson::SUCCESS && deeper_than(&p->parser.doc, depth_max))
		ec = simdjson::DEPTH_ERROR;
	return ec;
}

static int fail(struct kvp_json_err *err, int code, const char *text)
{
	if (err) {
		err->code = code;
		err->text = text;
	}
	return code;
}

static int fail_parse(struct kvp_json_err *err, error_code ec)
{
	switch (ec) {
	case simdjson::DEPTH_ERROR:
		return fail(err, KVP_ERR_LIMIT, "nested too deeply");
	case simdjson::CAPACITY:
		return fail(err, KVP_ERR_LIMIT, "text too long");
	case simdjson::MEMALLOC:
		return fail(err, KVP_ERR_FULL, "out of memory");
	case simdjson::UTF8_ERROR:
		return fail(err, KVP_ERR_PROTO, "invalid UTF-8");
	case simdjson::EMPTY:
		return fail(err, KVP_ERR_PROTO, "empty text");
	case simdjson::NUMBER_ERROR:
		return fail(err, KVP_ERR_PROTO, "malformed number");
	case simdjson::STRING_ERROR:
	case simdjson::UNESCAPED_CHARS:
	case simdjson::UNCLOSED_STRING:
		return fail(err, KVP_ERR_PROTO, "malformed string");
	default:
		return fail(err, KVP_ERR_PROTO, "malformed JSON");
	}
}

extern "C" int kvp_json_parse_slack(struct kvp_json *p, const void *text, size_t len, uint32_t depth_max,
	enum kvp_json_slack slack, struct kvp_json_val *root, struct kvp_json_err *err)
{
	if (!p || !root || (!text && len) || !depth_max || depth_max > KVP_JSON_DEPTH_MAX)
		return fail(err, KVP_ERR_INVAL, "bad argument");
	if (len > KVP_JSON_LEN_MAX)
		return fail(err, KVP_ERR_LIMIT, "text too long");
	if (!len)
		return fail(err, KVP_ERR_PROTO, "empty text");
	if (len >= 3 && !std::memcmp(text, "\xef\xbb\xbf", 3))
		return fail(err, KVP_ERR_PROTO, "byte order mark");
	const uint8_t *in = static_cast<const uint8_t *>(text);
	if (slack == KVP_JSON_NO_SLACK && !(in = copy_in(p, text, len)))
		return fail(err, KVP_ERR_FULL, "out of memory");
	error_code ec = parse_deep(p, in, len, depth_max);
	if (ec == simdjson::NUMBER_ERROR || ec == simdjson::STRING_ERROR) {
		if (!copy_in(p, text, len))
			return fail(err, KVP_ERR_FULL, "out of memory");
		sanitise(p->copy, p->copy + len);
		ec = parse_deep(p, p->copy, len, depth_max);
	}
	if (ec)
		return fail_parse(err, ec);
	root->doc = &p->parser.doc;
	root->at = 1;
	return fail(err, KVP_OK, nullptr);
}

extern "C" int kvp_json_parse(struct kvp_json *p, const void *text, size_t len, uint32_t depth_max,
	struct kvp_json_val *root, struct kvp_json_err *err)
{
	return kvp_json_parse_slack(p, text, len, depth_max, KVP_JSON_NO_SLACK, root, err);
}

extern "C" enum kvp_json_type kvp_json_type(struct kvp_json_val v)
{
	switch (ref(v).tape_ref_type()) {
	case tape_type::START_OBJECT:
		return KVP_JSON_OBJ;
	case tape_type::START_ARRAY:
		return KVP_JSON_ARR;
	case tape_type::STRING:
		return KVP_JSON_STR;
	case tape_type::INT64:
	case tape_type::UINT64:
		return KVP_JSON_INT;
	case tape_type::DOUBLE:
		return KVP_JSON_DOUBLE;
	case tape_type::TRUE_VALUE:
	case tape_type::FALSE_VALUE:
		return KVP_JSON_BOOL;
	default:
		return KVP_JSON_NULL;
	}
}

extern "C" const char *kvp_json_type_name(enum kvp_json_type t)
{
	static const char *const name[] = {
		"null", "boolean", "integer", "number", "string", "array", "object"};
	return t >= KVP_JSON_NULL && t <= KVP_JSON_OBJ ? name[t] : "unknown";
}

/* Every number as (negative, 64 bits). beyond: what a number that isn't in the tape's integer form answers
 * if it is larger than every integer. */
static inline int integer_at(
	const simdjson::dom::document *d, size_t at, uint64_t *bits, bool *neg, int other)
{
	switch (type_at(d, at)) {
	case tape_type::INT64:
		*bits = d->tape[at + 1];
		*neg = static_cast<int64_t>(*bits) < 0;
		return KVP_OK;
	case tape_type::UINT64:
		*bits = d->tape[at + 1];
		*neg = false;
		return KVP_OK;
	case tape_type::DOUBLE: {
		double v;
		std::memcpy(&v, &d->tape[at + 1], sizeof(v));
		return v >= TWO_64 || v <= MINUS_TWO_63 ? KVP_ERR_LIMIT : other;
	}
	default:
		return other;
	}
}

static inline int in_range(uint64_t bits, bool neg, uint64_t *out)
{
	if (neg)
		return KVP_ERR_LIMIT;
	*out = bits;
	return KVP_OK;
}
static inline int in_range(uint64_t bits, bool neg, uint32_t *out)
{
	if (neg || bits > UINT32_MAX)
		return KVP_ERR_LIMIT;
	*out = static_cast<uint32_t>(bits);
	return KVP_OK;
}
static inline int in_range(uint64_t bits, bool neg, int64_t *out)
{
	if (!neg && bits > INT64_MAX)
		return KVP_ERR_LIMIT;
	*out = static_cast<int64_t>(bits);
	return KVP_OK;
}

template <typename T> static int integer(struct kvp_json_val v, T *out)
{
	uint64_t bits = 0;
	bool neg = false;
	const int rc = integer_at(
		static_cast<const simdjson::dom::document *>(v.doc), v.at, &bits, &neg, KVP_ERR_INVAL);
	return rc ? rc : in_range(bits, neg, out);
}

extern "C" int kvp_json_u64(struct kvp_json_val v, uint64_t *out)
{
	return integer(v, out);
}
extern "C" int kvp_json_u32(struct kvp_json_val v, uint32_t *out)
{
	return integer(v, out);
}
extern "C" int kvp_json_i64(struct kvp_json_val v, int64_t *out)
{
	return integer(v, out);
}

extern "C" int kvp_json_double(struct kvp_json_val v, double *out)
{
	const tape_ref t = ref(v);
	if (t.is_double()) {
		const double d = t.next_tape_value<double>();
		if (std::fabs(d) >= HUGE_NUMBER)
			return KVP_ERR_LIMIT;
		*out = d;
	} else if (t.is_int64()) {
		*out = static_cast<double>(t.next_tape_value<int64_t>());
	} else if (t.is_uint64()) {
		*out = static_cast<double>(t.next_tape_value<uint64_t>());
	} else {
		return KVP_ERR_INVAL;
	}
	return KVP_OK;
}

extern "C" int kvp_json_bool(struct kvp_json_val v, int *out)
{
	const tape_ref t = ref(v);
	if (!t.is_true() && !t.is_false())
		return KVP_ERR_INVAL;
	*out = t.is_true();
	return KVP_OK;
}

extern "C" int kvp_json_str(struct kvp_json_val v, const char **s, size_t *len)
{
	const tape_ref t = ref(v);
	if (t.tape_ref_type() != tape_type::STRING)
		return KVP_ERR_INVAL;
	*s = t.get_c_str();
	*len = t.get_string_length();
	return KVP_OK;
}

extern "C" int kvp_json_str_is(struct kvp_json_val v, const char *s)
{
	const char *got;
	size_t len;
	return kvp_json_str(v, &got, &len) == KVP_OK && std::strlen(s) == len && !std::memcmp(s, got, len);
}

extern "C" int kvp_json_getn(
	struct kvp_json_val obj, const char *key, size_t key_len, struct kvp_json_val *out)
{
	if (ref(obj).tape_ref_type() != tape_type::START_OBJECT)
		return KVP_ERR_INVAL;
	int rc = KVP_ERR_NOTFOUND;
	struct kvp_json_iter it = kvp_json_each(obj);
	while (kvp_json_next(&it)) {
		if (it.key_len == key_len && !std::memcmp(it.key, key, key_len)) {
			*out = it.val;
			rc = KVP_OK;
		}
	}
	return rc;
}

extern "C" int kvp_json_get(struct kvp_json_val obj, const char *key, struct kvp_json_val *out)
{
	return kvp_json_getn(obj, key, std::strlen(key), out);
}

extern "C" size_t kvp_json_len(struct kvp_json_val v)
{
	const tape_ref t = ref(v);
	const tape_type type = t.tape_ref_type();
	if (type != tape_type::START_ARRAY && type != tape_type::START_OBJECT)
		return 0;
	size_t n = t.scope_count();
	if (n < 0xffffff) /* the tape's count has 24 bits and saturates */
		return n;
	n = 0;
	struct kvp_json_iter it = kvp_json_each(v);
	while (kvp_json_next(&it))
		n++;
	return n;
}

extern "C" struct kvp_json_iter kvp_json_each(struct kvp_json_val v)
{
	struct kvp_json_iter it = {};
	const tape_ref t = ref(v);
	const tape_type type = t.tape_ref_type();
	it.doc = v.doc;
	if (type != tape_type::START_ARRAY && type != tape_type::START_OBJECT)
		return it;
	it.is_obj = type == tape_type::START_OBJECT;
	it.next = v.at + 1;
	it.end = t.matching_brace_index() - 1;
	return it;
}

extern "C" int kvp_json_next(struct kvp_json_iter *it)
{
	if (it->next >= it->end)
		return 0;
	const auto *d = static_cast<const simdjson::dom::document *>(it->doc);
	if (it->is_obj) {
		const tape_ref k(d, it->next);
		it->key = k.get_c_str();
		it->key_len = k.get_string_length();
		it->next++;
	}
	it->val.doc = d;
	it->val.at = it->next;
	it->next = tape_ref(d, it->next).after_element();
	return 1;
}

template <typename T, bool bit_pattern>
static int integers(struct kvp_json_val v, T *out, size_t cap, size_t *n)
{
	*n = 0;
	const auto *d = static_cast<const simdjson::dom::document *>(v.doc);
	if (type_at(d, v.at) != tape_type::START_ARRAY)
		return KVP_ERR_INVAL;
	const size_t len = kvp_json_len(v);
	if (len > cap) {
		*n = len;
		return KVP_ERR_FULL;
	}
	size_t at = v.at + 1, i = 0;
	for (; i < len; i++, at += 2) { /* an integer takes two words of tape; anything else ends the loop */
		uint64_t bits = 0;
		bool neg = false;
		int rc = integer_at(d, at, &bits, &neg, KVP_ERR_PROTO);
		if (rc == KVP_OK)
			rc = in_range(bits, bit_pattern ? false : neg, &out[i]);
		if (rc) {
			*n = i;
			return rc;
		}
	}
	*n = i;
	return KVP_OK;
}

extern "C" int kvp_json_u32s(struct kvp_json_val v, uint32_t *out, size_t cap, size_t *n)
{
	return integers<uint32_t, false>(v, out, cap, n);
}
extern "C" int kvp_json_u64s(struct kvp_json_val v, uint64_t *out, size_t cap, size_t *n)
{
	return integers<uint64_t, false>(v, out, cap, n);
}
extern "C" int kvp_json_i64s(struct kvp_json_val v, int64_t *out, size_t cap, size_t *n)
{
	return integers<int64_t, false>(v, out, cap, n);
}
extern "C" int kvp_json_h64s(struct kvp_json_val v, uint64_t *out, size_t cap, size_t *n)
{
	return integers<uint64_t, true>(v, out, cap, n);
}
