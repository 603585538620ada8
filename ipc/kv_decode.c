/* ipc/kv_decode.c — msgpack batch -> events. The rules are in kv_event.h; here is how they are met in one
 * pass.
 *
 * An event is read into the arena on the way. If anything in it is wrong, the cursor goes back to its first
 *    byte
 * and one generic skip decides: a complete value costs the event, an incomplete one the batch.
 */
#include <stdlib.h>

#include "ipc/kv_event.h"
#include "ipc/mp_in.h"

#define CHUNK_BYTES (256u << 10)
#define EVENT_DEPTH 2 /* containers around an event: batch, list of events */
#define SALT_TAG "dynamo-cache-salt:"
#define SALT_TAG_LEN (sizeof(SALT_TAG) - 1)

/* ---- arena: a list of chunks; reset rewinds it and drops what a huge batch left behind ---- */

struct chunk {
	struct chunk *next;
	size_t cap, used;
	max_align_t data[];
};

struct kvp_kv_dec {
	struct chunk *first, *cur;
	uint64_t held_bytes, payload_max_bytes;
	int err; /* KVP_OK, or why the last allocation failed */
};

struct kvp_kv_dec *kvp_kv_dec_new(void)
{
	struct kvp_kv_dec *d = calloc(1, sizeof(*d));
	if (d)
		d->payload_max_bytes = KVP_KV_PAYLOAD_MAX_BYTES;
	return d;
}

void kvp_kv_dec_limit(struct kvp_kv_dec *d, uint64_t payload_max_bytes)
{
	d->payload_max_bytes = payload_max_bytes;
}

static void free_chunks(struct chunk *c)
{
	while (c) {
		struct chunk *next = c->next;
		free(c);
		c = next;
	}
}

void kvp_kv_dec_free(struct kvp_kv_dec *d)
{
	if (!d)
		return;
	free_chunks(d->first);
	free(d);
}

static void arena_reset(struct kvp_kv_dec *d)
{
	uint64_t kept = 0;
	struct chunk **at = &d->first;
	while (*at && kept + (*at)->cap <= KVP_KV_ARENA_KEEP_BYTES) {
		kept += (*at)->cap;
		(*at)->used = 0;
		at = &(*at)->next;
	}
	free_chunks(*at);
	*at = NULL;
	d->cur = d->first;
	d->held_bytes = kept;
	d->err = KVP_OK;
}

static struct chunk *arena_grow(struct kvp_kv_dec *d, size_t bytes)
{
	size_t cap = bytes > CHUNK_BYTES ? bytes : CHUNK_BYTES;
	if (d->held_bytes + cap > KVP_KV_ARENA_MAX_BYTES) {
		d->err = KVP_ERR_LIMIT;
		return NULL;
	}
	struct chunk *c = malloc(sizeof(*c) + cap);
	if (!c) {
		d->err = KVP_ERR_FULL;
		return NULL;
	}
	c->cap = cap;
	c->used = 0;
	c->next = d->cur ? d->cur->next : d->first;
	if (d->cur)
		d->cur->next = c;
	else
		d->first = c;
	d->cur = c;
	d->held_bytes += cap;
	return c;
}

static void *arena_get(struct kvp_kv_dec *d, uint64_t cnt, size_t size)
{
	uint64_t bytes = (cnt * size + 15) & ~15ull; /* cnt is at most 2^32, size below 2^9 */
	if (bytes > KVP_KV_ARENA_MAX_BYTES) {
		d->err = KVP_ERR_LIMIT;
		return NULL;
	}
	struct chunk *c = d->cur;
	while (c && c->cap - c->used < bytes && c->next) {
		c = c->next;
		c->used = 0;
		d->cur = c;
	}
	if (!c || c->cap - c->used < bytes)
		c = arena_grow(d, bytes);
	if (!c)
		return NULL;
	void *p = (char *)c->data + c->used;
	c->used += bytes;
	return p;
}

/* ---- one event ---- */

enum key {
	KEY_TYPE,
	KEY_HASHES,
	KEY_PARENT,
	KEY_TOKENS,
	KEY_BLOCK_SIZE,
	KEY_MEDIUM,
	KEY_LORA,
	KEY_SALT,
	KEY_EXTRA,
	KEY_MM,
	KEY_GROUP,
	KEY_KIND,
	KEY_WINDOW,
	KEY_LOCALITY,
	KEY_OWNERSHIP,
	KEY_CNT
};

static const struct {
	const char *name;
	uint8_t len;
	enum key key;
} key_table[] = {
#define K(text, id)                                                                                          \
	{                                                                                                    \
		text, sizeof(text) - 1, id                                                                   \
	}
	K("type", KEY_TYPE),
	K("block_hashes", KEY_HASHES),
	K("parent_block_hash", KEY_PARENT),
	K("token_ids", KEY_TOKENS),
	K("block_size", KEY_BLOCK_SIZE),
	K("medium", KEY_MEDIUM),
	K("lora_name", KEY_LORA),
	K("cache_salt", KEY_SALT),
	K("extra_keys", KEY_EXTRA),
	K("block_mm_infos", KEY_MM),
	K("group_idx", KEY_GROUP),
	K("kv_cache_spec_kind", KEY_KIND),
	K("kv_cache_spec_sliding_window", KEY_WINDOW),
	K("locality", KEY_LOCALITY),
	K("ownership", KEY_OWNERSHIP),
	K("source_kind", KEY_OWNERSHIP),
#undef K
};

/* Where each member's value starts (end NULL = absent) and the lists that were read on the way. */
struct fields {
	struct kvp_mp at[KEY_CNT];
	int hashes_ok, tokens_ok;
};

static int has(const struct fields *f, enum key k)
{
	return f->at[k].end != NULL;
}

static int read_hash(struct kvp_mp *c, uint64_t *out)
{
	int neg;
	if (kvp_mp_int(c, out, &neg) == KVP_OK) /* int64 and uint64: the bits are the hash */
		return KVP_OK;
	const uint8_t *b;
	uint32_t len;
	if (kvp_mp_bin(c, &b, &len) != KVP_OK)
		return KVP_ERR_PROTO;
	*out = kvp_hash_external_bytes(b, len);
	return KVP_OK;
}

static int read_hashes(struct kvp_kv_dec *d, struct kvp_mp *c, struct kvp_kv_event *ev)
{
	uint32_t n;
	if (kvp_mp_arr(c, &n) != KVP_OK)
		return KVP_ERR_PROTO;
	uint64_t *hash = arena_get(d, n, sizeof(*hash));
	if (!hash)
		return d->err;
	for (uint32_t i = 0; i < n; i++)
		if (read_hash(c, &hash[i]) != KVP_OK)
			return KVP_ERR_PROTO;
	ev->hash = hash;
	ev->hash_cnt = n;
	return KVP_OK;
}

/* Pairs (bigrams): the first of each, and the second of the last. */
static int read_pairs(struct kvp_kv_dec *d, struct kvp_mp *c, uint32_t n, struct kvp_kv_event *ev)
{
	uint32_t *tok = arena_get(d, (uint64_t)n + 1, sizeof(*tok));
	if (!tok)
		return d->err;
	for (uint32_t i = 0; i < n; i++) {
		uint32_t two;
		if (kvp_mp_arr(c, &two) != KVP_OK || two != 2 || kvp_mp_u32(c, &tok[i]) != KVP_OK ||
			kvp_mp_u32(c, &tok[i + 1]) != KVP_OK)
			return KVP_ERR_PROTO;
	}
	ev->tok = tok;
	ev->tok_cnt = n + 1;
	ev->window = KVP_HASH_WINDOW_EAGLE;
	return KVP_OK;
}

static int read_tokens(struct kvp_kv_dec *d, struct kvp_mp *c, struct kvp_kv_event *ev)
{
	uint32_t n;
	if (kvp_mp_arr(c, &n) != KVP_OK)
		return KVP_ERR_PROTO;
	if (n && kvp_mp_type(c) == KVP_MP_ARR)
		return read_pairs(d, c, n, ev);
	uint32_t *tok = arena_get(d, n, sizeof(*tok));
	if (!tok)
		return d->err;
	for (uint32_t i = 0; i < n; i++)
		if (kvp_mp_u32(c, &tok[i]) != KVP_OK)
			return KVP_ERR_PROTO;
	ev->tok = tok;
	ev->tok_cnt = n;
	ev->window = KVP_HASH_WINDOW_PLAIN;
	return KVP_OK;
}

static int pass(struct kvp_mp *c)
{
	return kvp_mp_skip_depth(c, KVP_KV_DEPTH_MAX - EVENT_DEPTH - 1);
}

/* Remember where member k is and pass it. The two long lists are read at once instead of being passed;
 * whether a bad one matters is known only with the type. The only errors: truncated, too deep, no memory. */
static int note(struct kvp_kv_dec *d, struct kvp_mp *c, enum key k, struct fields *f, struct kvp_kv_event *ev)
{
	struct kvp_mp start = *c;
	f->at[k] = start;
	if (k == KEY_HASHES || k == KEY_TOKENS) {
		int rc = k == KEY_HASHES ? read_hashes(d, c, ev) : read_tokens(d, c, ev);
		if (d->err)
			return d->err;
		*(k == KEY_HASHES ? &f->hashes_ok : &f->tokens_ok) = rc == KVP_OK;
		if (rc == KVP_OK)
			return KVP_OK;
		*c = start;
	}
	return pass(c);
}

/* str or nil; nil and absent leave *out absent. */
static int get_str(const struct fields *f, enum key k, struct kvp_kv_str *out)
{
	struct kvp_mp c = f->at[k];
	if (!has(f, k) || kvp_mp_nil(&c) == KVP_OK)
		return KVP_OK;
	return kvp_mp_str(&c, &out->p, &out->len);
}

/* The same, and an empty string is absent, too. */
static int get_text(const struct fields *f, enum key k, struct kvp_kv_str *out)
{
	int rc = get_str(f, k, out);
	if (rc == KVP_OK && !out->len)
		out->p = NULL;
	return rc;
}

static int get_u32(const struct fields *f, enum key k, uint32_t *out, uint8_t *is_set)
{
	struct kvp_mp c = f->at[k];
	if (!has(f, k) || kvp_mp_nil(&c) == KVP_OK)
		return KVP_OK;
	if (kvp_mp_u32(&c, out) != KVP_OK)
		return KVP_ERR_PROTO;
	*is_set = 1;
	return KVP_OK;
}

static int str_is(struct kvp_kv_str s, const char *text, size_t len)
{
	return s.p && s.len == len && !memcmp(s.p, text, len);
}

static int is_hex64(struct kvp_kv_str s)
{
	if (s.len != 64)
		return 0;
	for (uint32_t i = 0; i < 64; i++) {
		char c = s.p[i] | 0x20;
		if (!(s.p[i] >= '0' && s.p[i] <= '9') && !(c >= 'a' && c <= 'f'))
			return 0;
	}
	return 1;
}

static int strip_tag(struct kvp_kv_str *s)
{
	if (s->len < SALT_TAG_LEN || memcmp(s->p, SALT_TAG, SALT_TAG_LEN))
		return 0;
	s->p += SALT_TAG_LEN;
	s->len -= SALT_TAG_LEN;
	return 1;
}

/* ---- extra_keys: one list of items a block ---- */

struct extra {
	struct kvp_kv_str lora, salt;
	int lora_seen; /* the LoRA marker of the first block is no salt, but only once */
	uint64_t *mm;  /* objects of the current block; room for its items */
	uint32_t mm_cnt;
};

static void add_mm(struct extra *x, struct kvp_kv_str id)
{
	if (kvp_hash_mm_id(id.p, id.len, &x->mm[x->mm_cnt]) == KVP_OK)
		x->mm_cnt++;
}

static void set_salt(struct extra *x, struct kvp_kv_str salt)
{
	if (!x->salt.p && salt.len)
		x->salt = salt;
}

/* {"type": ...}: newest vLLM. */
static int typed_item(struct kvp_mp *c, struct extra *x)
{
	struct kvp_kv_str type = {NULL, 0}, hash = {NULL, 0}, salt = {NULL, 0};
	uint32_t n;
	if (kvp_mp_map(c, &n) != KVP_OK)
		return KVP_ERR_PROTO;
	while (n--) {
		struct kvp_kv_str key;
		if (kvp_mp_key(c, &key.p, &key.len) != KVP_OK)
			return KVP_ERR_PROTO;
		struct kvp_kv_str *to = str_is(key, "type", 4)   ? &type
					: str_is(key, "hash", 4) ? &hash
					: str_is(key, "salt", 4) ? &salt
								 : NULL;
		if (!to || kvp_mp_str(c, &to->p, &to->len) != KVP_OK)
			if (pass(c) != KVP_OK)
				return KVP_ERR_PROTO;
	}
	if (str_is(type, "cache_salt", 10) && salt.p) {
		strip_tag(&salt);
		set_salt(x, salt);
	} else if (str_is(type, "mm", 2) && hash.p) {
		add_mm(x, hash);
	}
	return KVP_OK;
}

static void text_item(struct kvp_kv_str s, uint32_t block, struct extra *x)
{
	if (str_is(s, x->lora.p ? x->lora.p : "", x->lora.len)) {
		if (block || !x->lora_seen) {
			x->lora_seen = 1;
			return;
		}
		if (strip_tag(&s))
			set_salt(x, s);
		return;
	}
	struct kvp_kv_str rest = s;
	if (block == 0 && strip_tag(&rest))
		set_salt(x, rest);
	else if (is_hex64(s))
		add_mm(x, s);
}

static int extra_item(struct kvp_mp *c, uint32_t block, struct extra *x)
{
	struct kvp_mp start = *c;
	struct kvp_kv_str s;
	uint32_t two;
	uint64_t bits;
	int neg;
	switch (kvp_mp_type(c)) {
	case KVP_MP_STR:
		if (kvp_mp_str(c, &s.p, &s.len) != KVP_OK)
			return KVP_ERR_PROTO;
		text_item(s, block, x);
		return KVP_OK;
	case KVP_MP_ARR:
		if (kvp_mp_arr(c, &two) == KVP_OK && two == 2 && kvp_mp_str(c, &s.p, &s.len) == KVP_OK &&
			kvp_mp_int(c, &bits, &neg) == KVP_OK) {
			add_mm(x, s);
			return KVP_OK;
		}
		break;
	case KVP_MP_MAP:
		if (typed_item(c, x) == KVP_OK)
			return KVP_OK;
		break;
	default:
		break;
	}
	*c = start;
	return pass(c); /* prompt embeddings, numbers, shapes to come: no meaning for us */
}

/* ---- block_mm_infos: one {mm_objects: [{mm_hash, offsets}]} a block ---- */

static int mm_object(struct kvp_mp *c, struct extra *x)
{
	uint32_t n;
	int found = 0, neg;
	uint64_t hash = 0;
	if (kvp_mp_map(c, &n) != KVP_OK)
		return KVP_ERR_PROTO;
	while (n--) {
		struct kvp_kv_str key;
		if (kvp_mp_key(c, &key.p, &key.len) != KVP_OK)
			return KVP_ERR_PROTO;
		if (str_is(key, "mm_hash", 7)) {
			if (kvp_mp_int(c, &hash, &neg) != KVP_OK)
				return KVP_ERR_PROTO;
			found = 1;
		} else if (pass(c) != KVP_OK) {
			return KVP_ERR_PROTO;
		}
	}
	if (!found)
		return KVP_ERR_PROTO;
	x->mm[x->mm_cnt++] = hash;
	return KVP_OK;
}

static int mm_info(struct kvp_kv_dec *d, struct kvp_mp *c, struct extra *x)
{
	uint32_t n, cnt;
	if (kvp_mp_map(c, &n) != KVP_OK)
		return KVP_ERR_PROTO;
	while (n--) {
		struct kvp_kv_str key;
		if (kvp_mp_key(c, &key.p, &key.len) != KVP_OK)
			return KVP_ERR_PROTO;
		if (!str_is(key, "mm_objects", 10)) {
			if (pass(c) != KVP_OK)
				return KVP_ERR_PROTO;
			continue;
		}
		if (kvp_mp_arr(c, &cnt) != KVP_OK)
			return KVP_ERR_PROTO;
		x->mm_cnt = 0;
		if (!(x->mm = arena_get(d, cnt, sizeof(*x->mm))))
			return d->err;
		for (uint32_t i = 0; i < cnt; i++)
			if (mm_object(c, x) != KVP_OK)
				return KVP_ERR_PROTO;
	}
	return KVP_OK;
}

static int extra_items(struct kvp_kv_dec *d, struct kvp_mp *c, uint32_t block, struct extra *x)
{
	uint32_t n;
	if (kvp_mp_arr(c, &n) != KVP_OK)
		return KVP_ERR_PROTO;
	if (!(x->mm = arena_get(d, n, sizeof(*x->mm))))
		return d->err;
	for (uint32_t i = 0; i < n; i++)
		if (extra_item(c, block, x) != KVP_OK)
			return KVP_ERR_PROTO;
	return KVP_OK;
}

/* Either list: nil, or one nil or value a block. The multimodal objects go to ev (wins: overwrites). */
static int read_lists(
	struct kvp_kv_dec *d, const struct fields *f, enum key k, struct extra *x, struct kvp_kv_event *ev)
{
	struct kvp_mp c = f->at[k];
	uint32_t n;
	if (!has(f, k) || kvp_mp_nil(&c) == KVP_OK)
		return KVP_OK;
	if (kvp_mp_arr(&c, &n) != KVP_OK)
		return KVP_ERR_PROTO;
	uint32_t keep = n < ev->hash_cnt ? n : ev->hash_cnt;
	struct kvp_hash_mm *mm = NULL;
	for (uint32_t i = 0; i < n; i++) {
		x->mm = NULL;
		x->mm_cnt = 0;
		if (kvp_mp_nil(&c) != KVP_OK) {
			int rc = k == KEY_EXTRA ? extra_items(d, &c, i, x) : mm_info(d, &c, x);
			if (rc != KVP_OK)
				return rc;
		}
		if (i >= keep || (!mm && !x->mm_cnt))
			continue;
		if (!mm) { /* the first object: lists for all blocks, so far empty */
			if (!(mm = arena_get(d, keep, sizeof(*mm))))
				return d->err;
			memset(mm, 0, keep * sizeof(*mm));
		}
		mm[i] = (struct kvp_hash_mm){x->mm, x->mm_cnt};
	}
	ev->mm = mm;
	ev->mm_cnt = mm ? keep : 0;
	return KVP_OK;
}

/* ---- kinds ---- */

static int finish_common(const struct fields *f, struct kvp_kv_event *ev)
{
	if (!f->hashes_ok || get_text(f, KEY_MEDIUM, &ev->medium) != KVP_OK ||
		get_u32(f, KEY_GROUP, &ev->group_idx, &ev->has_group) != KVP_OK ||
		get_str(f, KEY_KIND, &ev->group_kind) != KVP_OK ||
		get_u32(f, KEY_WINDOW, &ev->sliding_window, &ev->has_window) != KVP_OK ||
		get_str(f, KEY_LOCALITY, &ev->locality) != KVP_OK ||
		get_text(f, KEY_OWNERSHIP, &ev->ownership) != KVP_OK)
		return KVP_ERR_PROTO;
	return KVP_OK;
}

static int finish_stored(struct kvp_kv_dec *d, const struct fields *f, struct kvp_kv_event *ev)
{
	struct kvp_mp c = f->at[KEY_PARENT];
	if (!f->tokens_ok || finish_common(f, ev) != KVP_OK)
		return KVP_ERR_PROTO;
	if (has(f, KEY_PARENT) && kvp_mp_nil(&c) != KVP_OK) {
		if (read_hash(&c, &ev->parent) != KVP_OK)
			return KVP_ERR_PROTO;
		ev->has_parent = 1;
	}
	c = f->at[KEY_BLOCK_SIZE];
	if (!has(f, KEY_BLOCK_SIZE) || kvp_mp_u64(&c, &ev->block_size) != KVP_OK)
		return KVP_ERR_PROTO;
	if (get_text(f, KEY_LORA, &ev->lora) != KVP_OK || get_text(f, KEY_SALT, &ev->salt) != KVP_OK)
		return KVP_ERR_PROTO;
	struct extra x = {.lora = ev->lora};
	int rc = read_lists(d, f, KEY_EXTRA, &x, ev);
	if (rc == KVP_OK)
		rc = read_lists(d, f, KEY_MM, &x, ev);
	if (rc == KVP_OK && !ev->salt.p)
		ev->salt = x.salt;
	return rc;
}

static int tag_kind(struct kvp_kv_str tag, enum kvp_kv_kind *out)
{
	if (str_is(tag, "BlockStored", 11))
		*out = KVP_KV_STORED;
	else if (str_is(tag, "BlockRemoved", 12))
		*out = KVP_KV_REMOVED;
	else if (str_is(tag, "AllBlocksCleared", 16))
		*out = KVP_KV_CLEARED;
	else if (str_is(tag, "Ignored", 7))
		*out = KVP_KV_IGNORED;
	else
		return KVP_ERR_NOTFOUND;
	return KVP_OK;
}

static int finish(struct kvp_kv_dec *d, const struct fields *f, struct kvp_kv_event *ev)
{
	int rc = KVP_OK;
	if (ev->kind == KVP_KV_STORED)
		rc = finish_stored(d, f, ev);
	else if (ev->kind == KVP_KV_REMOVED)
		rc = finish_common(f, ev);
	else if (ev->kind == KVP_KV_TIER_CLEARED)
		rc = get_text(f, KEY_MEDIUM, &ev->medium) == KVP_OK && ev->medium.p ? KVP_OK : KVP_ERR_PROTO;
	return d->err ? d->err : rc;
}

/* ---- the two forms ---- */

static int find_key(struct kvp_kv_str key, enum key *out)
{
	for (size_t i = 0; i < sizeof(key_table) / sizeof(key_table[0]); i++) {
		if (str_is(key, key_table[i].name, key_table[i].len)) {
			*out = key_table[i].key;
			return 1;
		}
	}
	return 0;
}

static int read_map_event(struct kvp_kv_dec *d, struct kvp_mp *c, struct kvp_kv_event *ev)
{
	struct fields f = {.hashes_ok = 0};
	uint32_t n;
	if (kvp_mp_map(c, &n) != KVP_OK)
		return KVP_ERR_PROTO;
	while (n--) {
		struct kvp_kv_str key;
		enum key k;
		if (kvp_mp_type(c) != KVP_MP_STR && kvp_mp_type(c) != KVP_MP_BIN) { /* no key of ours */
			if (pass(c) != KVP_OK || pass(c) != KVP_OK)
				return KVP_ERR_PROTO;
			continue;
		}
		if (kvp_mp_key(c, &key.p, &key.len) != KVP_OK)
			return KVP_ERR_PROTO;
		int rc = find_key(key, &k) ? note(d, c, k, &f, ev) : pass(c);
		if (rc != KVP_OK)
			return rc;
	}
	if (!has(&f, KEY_TYPE) || get_str(&f, KEY_TYPE, &ev->tag) != KVP_OK || !ev->tag.p)
		return KVP_ERR_PROTO;
	if (str_is(ev->tag, "TierBlocksCleared", 17))
		ev->kind = KVP_KV_TIER_CLEARED;
	else if (tag_kind(ev->tag, &ev->kind) != KVP_OK)
		ev->kind = KVP_KV_UNKNOWN;
	return finish(d, &f, ev);
}

/* Do the elements behind the fixed ones have the newest layout? c is at the first of n. */
static int tail_is_new(struct kvp_mp c, uint32_t n)
{
	static const enum kvp_mp_type want[5] = {KVP_MP_INT, KVP_MP_STR, KVP_MP_INT, KVP_MP_STR, KVP_MP_STR};
	if (n < 4)
		return 0;
	for (uint32_t i = 0; i < n; i++) {
		uint32_t u;
		if (kvp_mp_nil(&c) == KVP_OK)
			continue;
		if (kvp_mp_type(&c) != want[i])
			return 0;
		if (want[i] == KVP_MP_INT ? kvp_mp_u32(&c, &u) != KVP_OK : pass(&c) != KVP_OK)
			return 0;
	}
	return 1;
}

static int read_tail(
	struct kvp_kv_dec *d, struct kvp_mp *c, uint32_t n, struct fields *f, struct kvp_kv_event *ev)
{
	static const enum key in_order[5] = {KEY_GROUP, KEY_KIND, KEY_WINDOW, KEY_LOCALITY, KEY_OWNERSHIP};
	uint32_t cnt = n < 5 ? n : 5;
	int is_new = tail_is_new(*c, cnt), ints = 0;
	for (uint32_t i = 0; i < n; i++) {
		enum key k = KEY_CNT;
		uint32_t u;
		struct kvp_mp look = *c;
		enum kvp_mp_type type = kvp_mp_type(c);
		if (i >= cnt)
			; /* more than the newest layout has */
		else if (is_new)
			k = in_order[i];
		else if (type == KVP_MP_ARR && ev->kind == KVP_KV_STORED)
			k = KEY_MM;
		else if (type == KVP_MP_STR)
			k = KEY_KIND;
		else if (type == KVP_MP_INT && ints < 2 && kvp_mp_u32(&look, &u) == KVP_OK)
			k = ints++ ? KEY_WINDOW : KEY_GROUP;
		int rc = k == KEY_CNT ? pass(c) : note(d, c, k, f, ev);
		if (rc != KVP_OK)
			return rc;
	}
	return KVP_OK;
}

/* Position 7 of a store: LoRA name, or SGLang's map with the salt. */
static int read_metadata(struct kvp_kv_dec *d, struct kvp_mp *c, struct fields *f, struct kvp_kv_event *ev)
{
	uint32_t n;
	if (kvp_mp_type(c) != KVP_MP_MAP)
		return note(d, c, KEY_LORA, f, ev);
	if (kvp_mp_map(c, &n) != KVP_OK)
		return KVP_ERR_PROTO;
	while (n--) {
		struct kvp_kv_str key;
		if (kvp_mp_key(c, &key.p, &key.len) != KVP_OK)
			return KVP_ERR_PROTO;
		int rc = str_is(key, "cache_salt", 10) ? note(d, c, KEY_SALT, f, ev) : pass(c);
		if (rc != KVP_OK)
			return rc;
	}
	return KVP_OK;
}

static int read_array_event(struct kvp_kv_dec *d, struct kvp_mp *c, struct kvp_kv_event *ev)
{
	/* KEY_CNT = passed. Position 7 of a store is read_metadata's. */
	static const enum key stored[] = {KEY_TYPE, KEY_HASHES, KEY_PARENT, KEY_TOKENS, KEY_BLOCK_SIZE,
		KEY_CNT, KEY_MEDIUM, KEY_LORA, KEY_EXTRA};
	static const enum key removed[] = {KEY_TYPE, KEY_HASHES, KEY_MEDIUM};
	struct fields f = {.hashes_ok = 0};
	uint32_t n, fixed = 1;
	if (kvp_mp_arr(c, &n) != KVP_OK || !n || kvp_mp_str(c, &ev->tag.p, &ev->tag.len) != KVP_OK)
		return KVP_ERR_PROTO;
	if (tag_kind(ev->tag, &ev->kind) != KVP_OK)
		ev->kind = KVP_KV_UNKNOWN;
	const enum key *layout = ev->kind == KVP_KV_STORED ? stored : removed;
	if (ev->kind == KVP_KV_STORED)
		fixed = sizeof(stored) / sizeof(stored[0]);
	else if (ev->kind == KVP_KV_REMOVED)
		fixed = sizeof(removed) / sizeof(removed[0]);
	for (uint32_t i = 1; i < n && i < fixed; i++) {
		int rc = layout[i] == KEY_CNT    ? pass(c)
			 : layout[i] == KEY_LORA ? read_metadata(d, c, &f, ev)
						 : note(d, c, layout[i], &f, ev);
		if (rc != KVP_OK)
			return rc;
	}
	if (fixed == 1) { /* nothing in the other kinds matters to us */
		for (uint32_t i = 1; i < n; i++)
			if (pass(c) != KVP_OK)
				return KVP_ERR_PROTO;
	} else if (n > fixed) {
		int rc = read_tail(d, c, n - fixed, &f, ev);
		if (rc != KVP_OK)
			return rc;
	}
	return finish(d, &f, ev);
}

static int read_event(struct kvp_kv_dec *d, struct kvp_mp *c, struct kvp_kv_event *ev)
{
	struct kvp_mp start = *c;
	memset(ev, 0, sizeof(*ev));
	int rc = kvp_mp_type(c) == KVP_MP_MAP ? read_map_event(d, c, ev) : read_array_event(d, c, ev);
	if (rc == KVP_OK)
		return KVP_OK;
	if (d->err)
		return d->err;
	struct kvp_kv_str tag = ev->tag;
	memset(ev, 0, sizeof(*ev));
	ev->kind = KVP_KV_MALFORMED;
	ev->tag = tag;
	*c = start;
	return kvp_mp_skip(c); /* an incomplete event is an incomplete batch */
}

/* ---- the batch ---- */

static int read_events(struct kvp_kv_dec *d, struct kvp_mp *c, struct kvp_kv_batch *out)
{
	uint32_t n;
	if (kvp_mp_arr(c, &n) != KVP_OK)
		return KVP_ERR_PROTO;
	if (n > KVP_KV_EVENT_MAX)
		return KVP_ERR_LIMIT;
	struct kvp_kv_event *ev = arena_get(d, n, sizeof(*ev));
	if (!ev)
		return d->err;
	for (uint32_t i = 0; i < n; i++) {
		int rc = read_event(d, c, &ev[i]);
		if (rc != KVP_OK)
			return rc;
	}
	out->event = ev;
	out->event_cnt = n;
	return KVP_OK;
}

static int read_rank(struct kvp_mp *c, struct kvp_kv_batch *out)
{
	uint64_t bits;
	int neg;
	out->has_rank = 0;
	out->rank = 0;
	if (kvp_mp_nil(c) == KVP_OK)
		return KVP_OK;
	if (kvp_mp_int(c, &bits, &neg) != KVP_OK || (neg ? (int64_t)bits < INT32_MIN : bits > INT32_MAX))
		return KVP_ERR_PROTO;
	out->has_rank = 1;
	out->rank = (uint32_t)bits;
	return KVP_OK;
}

static int read_array_batch(struct kvp_kv_dec *d, struct kvp_mp *c, struct kvp_kv_batch *out)
{
	uint32_t n;
	if (kvp_mp_arr(c, &n) != KVP_OK || n < 2 || kvp_mp_number(c, &out->ts) != KVP_OK)
		return KVP_ERR_PROTO;
	int rc = read_events(d, c, out);
	if (rc == KVP_OK && n > 2)
		rc = read_rank(c, out);
	for (uint32_t i = 3; i < n && rc == KVP_OK; i++)
		rc = kvp_mp_skip(c);
	return rc;
}

static int read_map_batch(struct kvp_kv_dec *d, struct kvp_mp *c, struct kvp_kv_batch *out)
{
	uint32_t n, seen = 0;
	if (kvp_mp_map(c, &n) != KVP_OK)
		return KVP_ERR_PROTO;
	while (n--) {
		struct kvp_kv_str key = {NULL, 0};
		int rc = kvp_mp_key(c, &key.p, &key.len);
		if (rc != KVP_OK)
			return rc;
		if (str_is(key, "ts", 2)) {
			rc = kvp_mp_number(c, &out->ts);
		} else if (str_is(key, "events", 6)) {
			rc = read_events(d, c, out);
			seen = 1;
		} else if (str_is(key, "data_parallel_rank", 18) || str_is(key, "dp_rank", 7) ||
			   str_is(key, "attn_dp_rank", 12)) {
			rc = read_rank(c, out);
		} else {
			rc = kvp_mp_skip(c);
		}
		if (rc != KVP_OK)
			return rc;
	}
	return seen ? KVP_OK : KVP_ERR_PROTO;
}

int kvp_kv_decode(struct kvp_kv_dec *d, const void *payload, size_t len, struct kvp_kv_batch *out)
{
	struct kvp_mp c = {payload, (const uint8_t *)payload + len};
	struct kvp_kv_batch b = {.ts = 0};
	if (len > d->payload_max_bytes)
		return KVP_ERR_LIMIT;
	if (!len)
		return KVP_ERR_PROTO;
	arena_reset(d);
	int rc = kvp_mp_type(&c) == KVP_MP_MAP ? read_map_batch(d, &c, &b) : read_array_batch(d, &c, &b);
	if (rc == KVP_OK)
		*out = b;
	return rc;
}
