#include "ipc/json_ids.h"

#include <stdlib.h>
#include <string.h>

/* A walk over the members of one object in a text that need not be valid: it never leaves the text, and on a
 * valid text it sees exactly the members. What it makes of an invalid one doesn't matter, because nothing is
 * accepted that the parser has not accepted, too. */
struct walk {
	const char *s, *end;
};

static int skip_white(struct walk *w)
{
	const char *from = w->s;
	while (w->s < w->end && (*w->s == ' ' || *w->s == '\n' || *w->s == '\r' || *w->s == '\t'))
		w->s++;
	return w->s > from;
}

static int take(struct walk *w, char c)
{
	skip_white(w);
	if (w->s == w->end || *w->s != c)
		return 0;
	w->s++;
	return 1;
}

/* From behind an opening quote to behind the closing one. */
static void skip_string(struct walk *w)
{
	const char *from = w->s;
	for (const char *q; (q = memchr(w->s, '"', (size_t)(w->end - w->s)));) {
		const char *b = q;
		while (b > from && b[-1] == '\\')
			b--;
		w->s = q + 1;
		if ((q - b) % 2 == 0)
			return;
	}
	w->s = w->end;
}

static void skip_value(struct walk *w)
{
	size_t depth = 0;
	skip_white(w);
	while (w->s < w->end) {
		switch (*w->s) {
		case '"':
			w->s++;
			skip_string(w);
			break;
		case '{':
		case '[':
			depth++;
			w->s++;
			break;
		case '}':
		case ']':
			if (depth)
				depth--;
			else
				return;
			w->s++;
			break;
		case ',':
			if (!depth)
				return;
			w->s++;
			break;
		default:
			w->s++;
			break;
		}
		if (!depth && w->s[-1] != ',' && (w->s[-1] == '"' || w->s[-1] == '}' || w->s[-1] == ']'))
			return;
	}
}

/* The next member: its name as spelled, and the walk at its value. The first call comes behind the brace. */
static int next_member(struct walk *w, const char **key, size_t *key_len)
{
	if (!take(w, '"'))
		return 0;
	*key = w->s;
	skip_string(w);
	*key_len = (size_t)(w->s - *key) - (w->s > *key ? 1 : 0);
	if (!take(w, ':'))
		return 0;
	skip_white(w);
	return 1;
}

static int after_member(struct walk *w)
{
	skip_value(w);
	return take(w, ',');
}

/* -- ids -- */

static int room_ids(struct kvp_json_ids *out, size_t n)
{
	if (n <= out->cap)
		return KVP_OK;
	uint32_t *id = malloc(n * sizeof(*id)); /* old contents are not wanted */
	if (!id)
		return KVP_ERR_FULL;
	free(out->id);
	out->id = id;
	out->cap = n;
	return KVP_OK;
}

/* A number of one to ten digits at s; *used 0 if it is none, too large, or has a needless zero before it. */
static uint64_t long_number(const char *s, size_t *used)
{
	uint64_t v = 0;
	size_t n = 0;
	for (; n <= 10 && s[n] >= '0' && s[n] <= '9'; n++)
		v = v * 10 + (uint64_t)(s[n] - '0');
	*used = n > 10 || v > UINT32_MAX || (n > 1 && *s == '0') ? 0 : n;
	return v;
}

/* The value of eight digits, the first one in the lowest byte. */
static inline uint64_t eight(uint64_t w)
{
	w = (w * 10 + (w >> 8)) & 0x00ff00ff00ff00ffull;
	w = (w * 100 + (w >> 16)) & 0x0000ffff0000ffffull;
	return (w * 10000 + (w >> 32)) & 0xffffffffull;
}

/* Up to eight digits in one word, *n of them: first the position of the first byte that is no digit, then all
 * digits at once. No branch depends on the length of a number, which changes from one to the next. */
static uint64_t word(const char *s, size_t *n)
{
	uint64_t w;
	memcpy(&w, s, 8);
	w ^= 0x3030303030303030ull;
	uint64_t other = ((w + 0x7676767676767676ull) | w) & 0x8080808080808080ull;
	*n = other ? (size_t)__builtin_ctzll(other) / 8 : 8;
	if (!*n)
		return 0;
	return eight(w << (64 - 8 * *n));
}

static uint64_t number(const char *s, size_t *used)
{
	uint64_t v = word(s, used);
	return *used == 8 || (*s == '0' && *used > 1) ? long_number(s, used) : v;
}

/* A number of 64 bits with a sign: the bytes it takes, 0 if it is longer or written in another way. */
static size_t signed_number(const char *s, int64_t *out)
{
	static const uint64_t ten_to[] = {1, 10, 100, 1000, 10000, 100000, 1000000, 10000000, 100000000};
	size_t neg = *s == '-', n, len;
	const char *d = s + neg;
	uint64_t v = word(d, &len);
	if (len == 8) {
		uint64_t more = word(d + 8, &n);
		v = v * ten_to[n] + more;
		len += n;
	}
	if (len == 16) {
		uint64_t more = word(d + 16, &n);
		if (n > 3) /* might not fit in 64 bits */
			return 0;
		v = v * ten_to[n] + more;
		len += n;
	}
	if (!len || (*d == '0' && (len > 1 || neg)) || v > (uint64_t)INT64_MAX + neg)
		return 0;
	*out = (int64_t)(neg ? 0 - v : v);
	return neg + len;
}

/* Reads "[1, 2]" at the walk and leaves it behind the bracket. 0: not that simple. */
static int ids_at(struct walk *w, struct kvp_json_ids *out)
{
	struct walk i = *w;
	if (!take(&i, '[') || room_ids(out, (size_t)(i.end - i.s) / 2 + 1))
		return 0;
	uint32_t *to = out->id;
	while (i.s < i.end) {
		size_t used;
		if (*i.s <= ' ')
			skip_white(&i);
		*to = (uint32_t)number(i.s, &used);
		if (!used || (size_t)(i.end - i.s) <= used)
			return 0;
		to++;
		i.s += used;
		if (*i.s != ',') {
			if (take(&i, ']')) {
				out->cnt = (size_t)(to - out->id);
				*w = i;
				return 1;
			}
			if (!take(&i, ','))
				return 0;
		} else {
			i.s++;
		}
	}
	return 0;
}

/* The text with the ids between from and to taken out, judged by the parser. KVP_ERR_AGAIN: the name occurs
 * twice after all. */
static int judge_rest(struct kvp_json *p, const char *text, size_t len, const char *key, const char *from,
	const char *to, struct kvp_json_ids *out, struct kvp_json_err *err)
{
	size_t head = (size_t)(from - text) + 1, tail = len - (size_t)(to - text) + 1;
	struct kvp_json_val root;
	if (out->rest_cap < head + tail + KVP_JSON_SLACK_BYTES) {
		size_t cap = head + tail + 4096;
		char *rest = malloc(cap);
		if (!rest)
			return KVP_ERR_FULL;
		free(out->rest);
		out->rest = rest;
		out->rest_cap = cap;
	}
	memcpy(out->rest, text, head);
	memcpy(out->rest + head, to - 1, tail);
	memset(out->rest + head + tail, 0, KVP_JSON_SLACK_BYTES);
	int rc = kvp_json_parse_slack(
		p, out->rest, head + tail, KVP_JSON_DEPTH_MAX, KVP_JSON_HAS_SLACK, &root, err);
	if (rc)
		return rc;
	if (kvp_json_type(root) == KVP_JSON_ARR) {
		struct kvp_json_iter el = kvp_json_each(root);
		if (kvp_json_len(root) != 1 || !kvp_json_next(&el))
			return KVP_ERR_INVAL;
		root = el.val;
	}
	size_t times = 0, key_len = strlen(key);
	struct kvp_json_iter it = kvp_json_each(root);
	while (kvp_json_next(&it))
		times += it.key_len == key_len && !memcmp(it.key, key, key_len);
	if (times != 1)
		return KVP_ERR_AGAIN;
	out->obj = root;
	return KVP_OK;
}

/* The whole text by the parser alone. */
static int ids_by_tree(struct kvp_json *p, const char *text, size_t len, const char *key,
	struct kvp_json_ids *out, struct kvp_json_err *err)
{
	struct kvp_json_val root, v;
	int rc = kvp_json_parse_slack(p, text, len, KVP_JSON_DEPTH_MAX, KVP_JSON_HAS_SLACK, &root, err);
	if (rc)
		return rc;
	if (kvp_json_type(root) == KVP_JSON_ARR && kvp_json_len(root) == 1) {
		struct kvp_json_iter el = kvp_json_each(root);
		kvp_json_next(&el);
		root = el.val;
	}
	if (kvp_json_type(root) != KVP_JSON_OBJ)
		return KVP_ERR_INVAL;
	out->obj = root;
	if (kvp_json_get(root, key, &v) || kvp_json_type(v) == KVP_JSON_NULL)
		return KVP_ERR_NOTFOUND;
	if (kvp_json_type(v) == KVP_JSON_ARR && kvp_json_len(v) == 1) {
		struct kvp_json_iter el = kvp_json_each(v);
		kvp_json_next(&el);
		if (kvp_json_type(el.val) == KVP_JSON_ARR)
			v = el.val;
	}
	if (kvp_json_type(v) != KVP_JSON_ARR)
		return KVP_ERR_INVAL;
	if (room_ids(out, kvp_json_len(v)))
		return KVP_ERR_FULL;
	rc = kvp_json_u32s(v, out->id, out->cap, &out->cnt);
	if (rc)
		out->cnt = 0;
	return rc == KVP_ERR_PROTO ? KVP_ERR_INVAL : rc;
}

int kvp_json_ids_read(struct kvp_json *p, const char *text, size_t len, const char *key,
	struct kvp_json_ids *out, struct kvp_json_err *err)
{
	struct walk w = {.s = text, .end = text + len};
	struct kvp_json_err own;
	const char *name;
	size_t name_len, key_len = strlen(key);
	err = err ? err : &own;
	if (out->cap > KVP_JSON_IDS_KEEP || out->rest_cap > KVP_JSON_IDS_KEEP)
		kvp_json_ids_free(out);
	out->obj = (struct kvp_json_val){NULL, 0};
	out->cnt = 0;
	take(&w, '[');
	if (len <= KVP_JSON_LEN_MAX && take(&w, '{'))
		do {
			if (!next_member(&w, &name, &name_len))
				break;
			const char *from = w.s;
			if (name_len != key_len || memcmp(name, key, key_len) != 0)
				continue;
			if (!ids_at(&w, out))
				break;
			int rc = judge_rest(p, text, len, key, from, w.s, out, err);
			if (rc == KVP_OK)
				return rc;
			out->cnt = 0;
			if (rc != KVP_ERR_AGAIN)
				return rc;
			break;
		} while (after_member(&w));
	return ids_by_tree(p, text, len, key, out, err);
}

void kvp_json_ids_free(struct kvp_json_ids *ids)
{
	free(ids->id);
	free(ids->rest);
	memset(ids, 0, sizeof(*ids));
}

/* -- lists -- */

#define PASS_MAX 65536 /* bytes of other members that are passed over in search of lists */
#define FIRST_CAP 256

static int list_grow(struct kvp_json_list *l)
{
	size_t cap = l->cap ? 2 * l->cap : FIRST_CAP, size = l->of == KVP_JSON_LIST_U32 ? 4 : 8;
	void *mem = realloc(l->mem, cap * size);
	if (!mem)
		return 0;
	l->mem = mem;
	l->cap = cap;
	return 1;
}

/* Three digits and a comma, or two and a comma: the digits, 0 = something else. */
static inline uint32_t tail_digits(const char *s, uint32_t *v)
{
	uint32_t c;
	memcpy(&c, s, 4);
	c ^= 0x2c303030u; /* the digits, and 0 for a comma as the fourth */
	if (!(((c + 0x00060606u) | c) & 0xfff0f0f0u)) {
		*v = (c & 0xff) * 100 + (c >> 8 & 0xff) * 10 + (c >> 16);
		return 3;
	}
	c = (c ^ (0x30u ^ 0x2cu) << 16) & 0xffffff;
	*v = (c & 0xff) * 10 + (c >> 8);
	return (((c + 0x0606u) | c) & 0xfff0f0u) ? 0 : 2;
}

/* Numbers of 18 and 19 digits with a comma behind, as most hashes are: where the next one begins does not
 * wait for their digits to be counted. Returns where it stopped; *cnt of at most cap numbers are stored. */
static const char *long_numbers(const char *s, const char *end, int64_t *out, size_t cap, size_t *cnt)
{
	size_t n = *cnt;
	for (; n < cap && end - s > 32; n++) {
		uint64_t neg = *s == '-', a, b;
		uint32_t low, more;
		const char *d = s + neg;
		memcpy(&a, d, 8);
		memcpy(&b, d + 8, 8);
		a ^= 0x3030303030303030ull;
		b ^= 0x3030303030303030ull;
		uint64_t other = ((a + 0x7676767676767676ull) | a | (b + 0x7676767676767676ull) | b) &
				 0x8080808080808080ull;
		more = tail_digits(d + 16, &low);
		if (other || !more || !(a & 0xff))
			break;
		uint64_t v = (eight(a) * 100000000 + eight(b)) * (more == 3 ? 1000 : 100) + low;
		if (v > (uint64_t)INT64_MAX + neg)
			break;
		out[n] = (int64_t)((v ^ (0 - neg)) + neg);
		s = d + 17 + more;
	}
	*cnt = n;
	return s;
}

/* Reads "[1, -2]" at the walk and leaves it behind the bracket. 0: not that simple. */
static int list_at(struct walk *w, struct kvp_json_list *l)
{
	struct walk i = *w;
	size_t used;
	int white = 0;
	if (!take(&i, '['))
		return 0;
	for (l->cnt = 0; i.s < i.end; i.s++) { /* past a comma */
		if (*i.s <= ' ')
			white |= skip_white(&i);
		if (l->of == KVP_JSON_LIST_I64)
			i.s = long_numbers(i.s, i.end, l->i64, l->cap, &l->cnt);
		if (l->cnt == l->cap && !list_grow(l))
			return 0;
		if (l->of == KVP_JSON_LIST_U32)
			l->u32[l->cnt] = (uint32_t)number(i.s, &used);
		else
			used = signed_number(i.s, &l->i64[l->cnt]);
		if (!used || (size_t)(i.end - i.s) <= used)
			return 0;
		l->cnt++;
		i.s += used;
		if (*i.s <= ' ')
			white |= skip_white(&i);
		if (i.s < i.end && *i.s == ']') {
			l->text = white ? NULL : w->s;
			l->text_len = (size_t)(i.s + 1 - w->s);
			w->s = i.s + 1;
			return 1;
		}
		if (i.s == i.end || *i.s != ',')
			return 0;
	}
	return 0;
}

/* Memory of a very long text does not stay. */
static void lists_begin(struct kvp_json_lists *l)
{
	size_t most = l->rest_cap;
	for (size_t i = 0; i < l->list_cnt; i++) {
		l->list[i].is_read = 0;
		most = l->list[i].cap > most ? l->list[i].cap : most;
	}
	if (most > KVP_JSON_IDS_KEEP)
		kvp_json_lists_free(l);
	l->rest_len = 0;
}

static int rest_put(struct kvp_json_lists *l, const char *from, const char *to)
{
	size_t n = (size_t)(to - from);
	if (l->rest_cap < l->rest_len + n + KVP_JSON_SLACK_BYTES) {
		size_t cap = 2 * (l->rest_len + n) + 4096;
		char *rest = realloc(l->rest, cap);
		if (!rest)
			return 0;
		l->rest = rest;
		l->rest_cap = cap;
	}
	memcpy(l->rest + l->rest_len, from, n);
	l->rest_len += n;
	return 1;
}

static struct kvp_json_list *list_named(struct kvp_json_lists *l, const char *name, size_t len)
{
	for (size_t i = 0; i < l->list_cnt; i++)
		if (strlen(l->list[i].key) == len && !memcmp(l->list[i].key, name, len))
			return &l->list[i];
	return NULL;
}

/* Reads the lists of the outermost object and leaves the text without their numbers in rest: how many. A name
 * that comes again is read again, and then found twice by the parser. */
static int take_lists(struct kvp_json_lists *l, const char *text, size_t len)
{
	struct walk w = {.s = text, .end = text + len};
	const char *name, *kept = text;
	size_t name_len, pass = PASS_MAX;
	int cnt = 0;
	if (!take(&w, '{'))
		return 0;
	do {
		if (!next_member(&w, &name, &name_len))
			break;
		const char *from = w.s;
		struct kvp_json_list *li = list_named(l, name, name_len);
		if (li && list_at(&w, li)) {
			if (!rest_put(l, kept, from + 1))
				return 0;
			kept = w.s - 1;
			li->is_read = 1;
			cnt++;
			continue;
		}
		struct walk other = {w.s, (size_t)(w.end - w.s) > pass ? w.s + pass : w.end};
		skip_value(&other);
		pass -= (size_t)(other.s - w.s);
		w.s = other.s;
	} while (pass && take(&w, ','));
	if (!cnt || !rest_put(l, kept, text + len))
		return 0;
	memset(l->rest + l->rest_len, 0, KVP_JSON_SLACK_BYTES);
	return cnt;
}

/* Every list that was read is the one member of its name. */
static int is_each_once(const struct kvp_json_lists *l, struct kvp_json_val root)
{
	size_t times[KVP_JSON_LISTS_MAX] = {0};
	struct kvp_json_iter it = kvp_json_each(root);
	while (kvp_json_next(&it))
		for (size_t i = 0; i < l->list_cnt; i++)
			times[i] += strlen(l->list[i].key) == it.key_len &&
				    !memcmp(l->list[i].key, it.key, it.key_len);
	for (size_t i = 0; i < l->list_cnt; i++)
		if (l->list[i].is_read && times[i] != 1)
			return 0;
	return 1;
}

int kvp_json_lists_read(struct kvp_json *p, const char *text, size_t len, struct kvp_json_lists *l,
	struct kvp_json_val *root, struct kvp_json_err *err)
{
	lists_begin(l);
	if (len <= KVP_JSON_LEN_MAX && take_lists(l, text, len)) {
		l->judged = l->rest;
		l->judged_len = l->rest_len;
		if (kvp_json_parse_slack(p, l->rest, l->rest_len, KVP_JSON_DEPTH_MAX, KVP_JSON_HAS_SLACK,
			    root, err) == KVP_OK &&
			is_each_once(l, *root))
			return KVP_OK;
	}
	for (size_t i = 0; i < l->list_cnt; i++)
		l->list[i].is_read = 0;
	l->judged = text;
	l->judged_len = len;
	return kvp_json_parse_slack(p, text, len, KVP_JSON_DEPTH_MAX, KVP_JSON_HAS_SLACK, root, err);
}

void kvp_json_lists_free(struct kvp_json_lists *l)
{
	for (size_t i = 0; i < l->list_cnt; i++) {
		free(l->list[i].mem);
		l->list[i].mem = NULL;
		l->list[i].cnt = l->list[i].cap = 0;
	}
	free(l->rest);
	l->rest = NULL;
	l->rest_len = l->rest_cap = 0;
}

/* -- the bytes of a value -- */

int kvp_json_span(
	const char *text, size_t len, struct kvp_json_val root, const char *key, size_t *off, size_t *n)
{
	size_t at = 0, wanted = 0, key_len = strlen(key), name_len;
	struct walk w = {.s = text, .end = text + len};
	const char *name;
	struct kvp_json_iter it = kvp_json_each(root);
	/* Which member it is says the parser, since its name may be spelled in several ways. */
	for (size_t i = 1; it.is_obj && kvp_json_next(&it); i++)
		if (it.key_len == key_len && !memcmp(it.key, key, key_len))
			wanted = i;
	if (!wanted || !take(&w, '{'))
		return KVP_ERR_NOTFOUND;
	do {
		if (!next_member(&w, &name, &name_len))
			return KVP_ERR_NOTFOUND;
		if (++at == wanted) {
			const char *from = w.s;
			skip_value(&w);
			while (w.s > from &&
				(w.s[-1] == ' ' || w.s[-1] == '\n' || w.s[-1] == '\r' || w.s[-1] == '\t'))
				w.s--;
			*off = (size_t)(from - text);
			*n = (size_t)(w.s - from);
			return KVP_OK;
		}
	} while (after_member(&w));
	return KVP_ERR_NOTFOUND;
}
