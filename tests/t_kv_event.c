/* t_kv_event — what the payload vectors leave out: forms, limits, group filter, LoRA and salt memory.
 * Payloads are made with msgpack-c; its unpacker is the independent judge of what one complete value is. */
#include <msgpack.h>
#include <stdlib.h>

#include "ipc/kv_event.h"
#include "ipc/mp_in.h"
#include "tests/tap.h"

static struct kvp_kv_dec *D;
static msgpack_sbuffer B;
static msgpack_packer P;

static void begin(uint32_t events)
{
	msgpack_sbuffer_clear(&B);
	msgpack_packer_init(&P, &B, msgpack_sbuffer_write);
	msgpack_pack_array(&P, 3);
	msgpack_pack_double(&P, 1.5);
	msgpack_pack_array(&P, events);
}
static void str(const char *s)
{
	msgpack_pack_str(&P, strlen(s));
	msgpack_pack_str_body(&P, s, strlen(s));
}
static void nil(void)
{
	msgpack_pack_nil(&P);
}
static void num(int64_t v)
{
	msgpack_pack_int64(&P, v);
}
static void list(uint32_t n)
{
	msgpack_pack_array(&P, n);
}
static void key_num(const char *k, int64_t v)
{
	str(k);
	num(v);
}
static void key_str(const char *k, const char *v)
{
	str(k);
	str(v);
}
/* The list of hashes first .. first + n - 1. */
static void hashes(int64_t first, uint32_t n)
{
	list(n);
	for (uint32_t i = 0; i < n; i++)
		num(first + i);
}
static struct kvp_kv_batch end(void)
{
	struct kvp_kv_batch b = {.ts = 0};
	num(0);
	ok(kvp_kv_decode(D, B.data, B.size, &b) == KVP_OK, "batch is framed");
	return b;
}

/* A map store of n blocks of 4 tokens; extra: further members that the caller packs. */
static void map_store(int64_t hash, uint32_t n, int64_t parent, uint32_t extra)
{
	msgpack_pack_map(&P, 5 + extra);
	key_str("type", "BlockStored");
	str("block_hashes");
	hashes(hash, n);
	str("parent_block_hash");
	if (parent < 0)
		nil();
	else
		num(parent);
	str("token_ids");
	hashes(100, 4 * n);
	key_num("block_size", 4);
}
static void map_remove(int64_t hash, uint32_t n, uint32_t extra)
{
	msgpack_pack_map(&P, 2 + extra);
	key_str("type", "BlockRemoved");
	str("block_hashes");
	hashes(hash, n);
}

static enum kvp_kv_reason run(struct kvp_kv_norm *n, struct kvp_kv_op *op)
{
	struct kvp_kv_batch b = end();
	return b.event_cnt == 1 ? kvp_kv_normalise(n, &b.event[0], 0, op) : KVP_KV_REASON_CNT;
}

/* ---- framing against the library ---- */

static uint64_t rnd(uint64_t *s)
{
	*s += 0x9e3779b97f4a7c15ull;
	uint64_t z = *s;
	z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
	z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
	return z ^ (z >> 31);
}

static void pack_random(uint64_t *s, int depth)
{
	uint64_t r = rnd(s);
	uint32_t n = (uint32_t)(rnd(s) % 5);
	static const char zeros[70000];
	switch (r % (depth > 5 ? 10 : 12)) {
	case 0:
		nil();
		break;
	case 1:
		msgpack_pack_true(&P);
		break;
	case 2:
		msgpack_pack_uint64(&P, rnd(s) >> (rnd(s) % 64));
		break;
	case 3:
		num((int64_t)rnd(s) >> (rnd(s) % 64));
		break;
	case 4:
		msgpack_pack_double(&P, 0.5);
		break;
	case 5:
		msgpack_pack_float(&P, 0.5f);
		break;
	case 6:
		n = (uint32_t)(rnd(s) % 2 ? rnd(s) % 40 : rnd(s) % 70000);
		msgpack_pack_str(&P, n);
		msgpack_pack_str_body(&P, zeros, n);
		break;
	case 7:
		n = (uint32_t)(rnd(s) % 300);
		msgpack_pack_bin(&P, n);
		msgpack_pack_bin_body(&P, zeros, n);
		break;
	case 8:
		n = 1u << (rnd(s) % 9);
		msgpack_pack_ext(&P, n, 3);
		msgpack_pack_ext_body(&P, zeros, n);
		break;
	case 9:
		str("x");
		break;
	case 10:
		n = rnd(s) % 9 ? n : 20;
		list(n);
		while (n--)
			pack_random(s, depth + 1);
		break;
	default:
		msgpack_pack_map(&P, n);
		while (n--) {
			pack_random(s, depth + 1);
			pack_random(s, depth + 1);
		}
	}
}

static void test_skip(void)
{
	uint64_t seed = tap_seed(4711), s = seed;
	int same = 1, cut = 1, broken = 1;
	for (int round = 0; round < 3000; round++) {
		msgpack_sbuffer_clear(&B);
		msgpack_packer_init(&P, &B, msgpack_sbuffer_write);
		pack_random(&s, 0);
		size_t len = B.size;
		nil();
		uint8_t *copy = malloc(len + 1);
		memcpy(copy, B.data, len + 1);
		struct kvp_mp c = {copy, copy + len + 1}, d = c;
		same &= kvp_mp_skip(&c) == KVP_OK && c.p == copy + len;
		same &= kvp_mp_skip_depth(&d, KVP_MP_DEPTH_MAX) == KVP_OK && d.p == copy + len;
		struct kvp_mp e = {copy, copy + rnd(&s) % len};
		cut &= kvp_mp_skip(&e) == KVP_ERR_PROTO && e.p == copy;
		/* one byte changed: both must agree whether a complete value starts there, and on its end */
		copy[rnd(&s) % len] = (uint8_t)rnd(&s);
		if (memchr(copy, 0xdd, len) || memchr(copy, 0xdf, len)) {
			free(copy); /* the library would allocate by a 32-bit count, up to 64 GiB */
			continue;
		}
		msgpack_unpacked u;
		msgpack_unpacked_init(&u);
		size_t off = 0;
		msgpack_unpack_return rc = msgpack_unpack_next(&u, (const char *)copy, len, &off);
		struct kvp_mp f = {copy, copy + len};
		int ours = kvp_mp_skip(&f) == KVP_OK;
		int theirs = rc == MSGPACK_UNPACK_SUCCESS || rc == MSGPACK_UNPACK_EXTRA_BYTES;
		if (rc != MSGPACK_UNPACK_NOMEM_ERROR) /* its depth limit */
			broken &= ours == theirs && (!ours || f.p == copy + off);
		msgpack_unpacked_destroy(&u);
		free(copy);
	}
	ok(same, "3000 random values are passed exactly");
	ok(cut, "cut ones are not, and the cursor stays");
	ok(broken, "changed ones are judged as msgpack-c does");
}

static void test_numbers(void)
{
	static const struct {
		const char *bytes;
		size_t len;
		uint64_t bits;
		int neg;
	} in[] = {{"\x7f", 1, 127, 0}, {"\xe0", 1, (uint64_t)-32, 1}, {"\xcc\xff", 2, 255, 0},
		{"\xcd\xff\xfe", 3, 0xfffe, 0}, {"\xce\x80\0\0\1", 5, 0x80000001u, 0},
		{"\xcf\xff\xff\xff\xff\xff\xff\xff\xff", 9, UINT64_MAX, 0},
		{"\xd0\x80", 2, (uint64_t)-128, 1}, {"\xd0\x05", 2, 5, 0},
		{"\xd1\x80\0", 3, (uint64_t)-32768, 1}, {"\xd2\x80\0\0\0", 5, (uint64_t)INT32_MIN, 1},
		{"\xd3\x80\0\0\0\0\0\0\0", 9, (uint64_t)INT64_MIN, 1}, {"\xd3\0\0\0\0\0\0\0\2", 9, 2, 0}};
	for (size_t i = 0; i < sizeof(in) / sizeof(in[0]); i++) {
		struct kvp_mp c = {(const uint8_t *)in[i].bytes, (const uint8_t *)in[i].bytes + in[i].len},
			      d = c;
		uint64_t bits = 0;
		uint32_t u = 0;
		int neg = 5;
		ok(kvp_mp_int(&c, &bits, &neg) == KVP_OK && bits == in[i].bits && neg == in[i].neg &&
				c.p == c.end,
			"integer encoding %zu", i);
		int fits = !in[i].neg && in[i].bits <= UINT32_MAX;
		ok((kvp_mp_u32(&d, &u) == KVP_OK) == fits && (!fits || u == in[i].bits), "as u32: %d", fits);
	}
}

/* ---- events ---- */

static void test_depth_and_counts(void)
{
	struct kvp_kv_batch b = {.event_cnt = 9};
	begin(3);
	map_remove(1, 1, 1);
	str("deep");
	for (int i = 0; i < 29; i++)
		list(1);
	nil();
	map_remove(2, 1, 1);
	str("deep");
	for (int i = 0; i < 30; i++)
		list(1);
	nil();
	map_remove(3, 1, 0);
	b = end();
	ok(b.event_cnt == 3 && b.event[0].kind == KVP_KV_REMOVED, "32 levels are accepted");
	ok(b.event[1].kind == KVP_KV_MALFORMED && b.event[2].kind == KVP_KV_REMOVED,
		"33 cost that event only");
	static const char *const claims[] = {"\x93\x01\xdd\xff\xff\xff\xff",
		"\x93\x01\x91\xdf\xff\xff\xff\xff",
		("\x93\x01\x91\x92\xac"
		 "BlockRemoved\xdd\x7f\xff\xff\xff"),
		"\xdd\xff\xff\xff\xff\x01\x90", "\x93\x01\x91\x92\xdb\xff\xff\xff\xff",
		"\x93\x01\x91\xc9\xff\xff\xff\xff\x01"};
	for (size_t i = 0; i < sizeof(claims) / sizeof(claims[0]); i++)
		ok(kvp_kv_decode(D, claims[i], strlen(claims[i]), &b) == KVP_ERR_PROTO,
			"a count beyond the bytes is refused (%zu)", i);
	size_t n = KVP_KV_EVENT_MAX + 1;
	uint8_t *many = calloc(1, n + 8);
	memcpy(many, "\x93\x01\xdd\0\0\0\0", 7);
	many[3] = (uint8_t)(n >> 24), many[4] = (uint8_t)(n >> 16), many[5] = (uint8_t)(n >> 8),
	many[6] = (uint8_t)n;
	ok(kvp_kv_decode(D, many, n + 8, &b) == KVP_ERR_LIMIT, "too many events");
	free(many);
	ok(kvp_kv_decode(D, "\x92\x01\x90", KVP_KV_PAYLOAD_MAX_BYTES + 1ull, &b) == KVP_ERR_LIMIT,
		"too many bytes");
	static const char *const outer[] = {"\x91\x01", "\x90", "\x92\xc0\x90", "\x92\xa1x\x90",
		"\x92\x01\xc0", "\x92\x01\x80", "\x93\x01\x90\xa1x", "\x93\x01\x90\xca\0\0\0\0",
		"\x81\xa2ts\x01", "\x05", "\xa1x",
		("\x81\xa6"
		 "events\xc0"),
		"\x93\x01\x90\xd3\x80\0\0\0\0\0\0"};
	for (size_t i = 0; i < sizeof(outer) / sizeof(outer[0]); i++)
		ok(kvp_kv_decode(D, outer[i], strlen(outer[i]), &b) == KVP_ERR_PROTO,
			"outer shape %zu is refused", i);
	ok(kvp_kv_decode(D, "\x93\x01\x90\xd2\x80\0\0\0", 8, &b) == KVP_OK && b.has_rank &&
			b.rank == 0x80000000u,
		"rank -2^31");
	ok(kvp_kv_decode(D, "\x93\xca\x40\x20\0\0\x90\xc0", 8, &b) == KVP_OK && !b.has_rank && b.ts == 2.5,
		"float32 time");
	static const char alias[] = "\x83\xc4\x02ts\x01\xa7"
				    "dp_rank\x05\xa6"
				    "events\x90";
	ok(kvp_kv_decode(D, alias, sizeof(alias) - 1, &b) == KVP_OK && b.rank == 5,
		"map batch, bin key, alias");
}

static void store_head(uint32_t elements)
{
	list(elements);
	str("BlockStored");
	hashes(1, 1);
	nil();
	hashes(100, 4);
	num(4);
}

static void test_tails(void)
{
	struct kvp_kv_batch b;
	begin(5);
	store_head(14); /* newest */
	for (int i = 0; i < 4; i++)
		nil();
	num(2), str("mamba"), num(128), str("LOCAL"), str("kvcr");
	store_head(12); /* legacy: kind, group, mm list in any order */
	for (int i = 0; i < 4; i++)
		nil();
	str("mla_attention"), num(3), list(1);
	msgpack_pack_map(&P, 1);
	str("mm_objects"), list(1), msgpack_pack_map(&P, 2), key_num("mm_hash", 9), str("offsets"), list(0);
	list(8); /* removed, newest */
	str("BlockRemoved"), hashes(5, 2), str("CPU"), nil(), str("full_attention"), nil(), str("REMOTE"),
		nil();
	list(6); /* removed, legacy: three numbers */
	str("BlockRemoved"), hashes(5, 2), nil(), num(7), num(64), num(9);
	list(2); /* a float is no kind of ours in any place */
	str("AllBlocksCleared"), msgpack_pack_double(&P, 1);
	b = end();
	const struct kvp_kv_event *e = b.event;
	ok(e[0].has_group && e[0].group_idx == 2 && e[0].has_window && e[0].sliding_window == 128 &&
			e[0].locality.len == 5 && e[0].ownership.len == 4,
		"newest tail");
	ok(e[1].group_idx == 3 && e[1].group_kind.len == 13 && e[1].mm_cnt == 1 && e[1].mm[0].cnt == 1 &&
			e[1].mm[0].hash[0] == 9,
		"legacy tail");
	ok(!e[2].has_group && e[2].group_kind.len == 14 && e[2].locality.len == 6 && e[2].medium.len == 3,
		"tail of a remove");
	ok(e[3].group_idx == 7 && e[3].sliding_window == 64 && e[3].kind == KVP_KV_REMOVED,
		"numbers in order");
	ok(e[4].kind == KVP_KV_CLEARED, "a clear ignores the rest");
}

static void test_extra_keys(void)
{
	struct kvp_kv_batch b;
	static const char hex[] = "0123456789ABCDEF0123456789abcdef0123456789abcdef0123456789abcdef";
	uint64_t want = 0;
	kvp_hash_mm_id("img-1", 5, &want);
	begin(4);
	map_store(1, 2, -1,
		2); /* LoRA name that looks like an identifier or a salt, salt that looks like one */
	key_str("lora_name", hex);
	str("extra_keys"), list(2), list(4), str(hex), str("dynamo-cache-salt:s"), str("other"),
		msgpack_pack_float(&P, 1);
	list(2), str(hex), str("dynamo-cache-salt:t");
	map_store(1, 1, -1, 2); /* the marker is passed once */
	key_str("lora_name", "dynamo-cache-salt:x");
	str("extra_keys"), list(1), list(2), str("dynamo-cache-salt:x"), str("dynamo-cache-salt:x");
	map_store(1, 3, -1, 3); /* own salt wins; objects in block 2 only */
	key_str("cache_salt", "mine"), key_str("lora_name", "");
	str("extra_keys"), list(4), list(1), str("dynamo-cache-salt:other"), nil(), list(4), list(2),
		str("img-1"), num(-3), str(hex), list(2), str(""), num(0), list(3), num(1), num(2), num(3);
	list(1), str(hex);
	map_store(1, 1, -1, 1);
	str("extra_keys"), list(1), num(5);
	b = end();
	const struct kvp_kv_event *e = b.event;
	ok(e[0].salt.len == 1 && *e[0].salt.p == 's' && !e[0].mm,
		"LoRA marker and tagged salt are no objects");
	ok(e[1].salt.len == 1 && *e[1].salt.p == 'x', "only the first marker is passed");
	ok(e[2].salt.len == 4 && !e[2].lora.p && e[2].mm_cnt == 3 && !e[2].mm[0].cnt && !e[2].mm[1].cnt,
		"own salt wins; no objects in blocks 0 and 1");
	ok(e[2].mm[2].cnt == 2 && e[2].mm[2].hash[0] == want && e[2].mm[2].hash[1] == 0x0123456789abcdefull,
		"objects of block 2; a list behind the last block is ignored");
	ok(e[3].kind == KVP_KV_MALFORMED, "a number in place of a list costs the event");
}

static void test_malformed_members(void)
{
	static const char *const member[] = {"medium", "lora_name", "cache_salt", "group_idx",
		"kv_cache_spec_kind", "kv_cache_spec_sliding_window", "locality", "ownership", "block_size",
		"parent_block_hash", "block_mm_infos"};
	const uint32_t cnt = sizeof(member) / sizeof(member[0]);
	begin(cnt + 1);
	for (uint32_t i = 0; i < cnt; i++) {
		map_store(1, 1, -1, 1);
		str(member[i]);
		msgpack_pack_double(&P, 1.0);
	}
	map_store(1, 1, -1, 2);
	str("session_id"), msgpack_pack_double(&P, 1.0), str("lora_id"), str("x");
	struct kvp_kv_batch b = end();
	for (uint32_t i = 0; i < cnt; i++)
		ok(b.event[i].kind == KVP_KV_MALFORMED, "%s as a float", member[i]);
	ok(b.event[cnt].kind == KVP_KV_STORED, "ignored members may be anything");
}

static void test_groups(void)
{
	struct kvp_kv_norm *n = kvp_kv_norm_new(4);
	struct kvp_kv_op op = {.tok_cnt = 0};
	struct kvp_kv_batch b;
	begin(4);
	map_store(1, 1, -1, 2), key_num("group_idx", 0), key_str("kv_cache_spec_kind", "sliding_window");
	map_remove(1, 1, 1), key_num("group_idx", 0);
	map_remove(1, 1, 2), key_num("group_idx", 1), key_str("kv_cache_spec_kind", "full_attention");
	map_remove(1, 1, 1), key_num("group_idx", 1);
	b = end();
	is_u64(kvp_kv_normalise(n, &b.event[0], 0, &op), KVP_KV_REASON_NON_MAIN_KIND,
		"group 0 of another kind");
	is_u64(kvp_kv_normalise(n, &b.event[1], 0, &op), KVP_KV_REASON_NON_MAIN_GROUP,
		"its later bare remove");
	is_u64(kvp_kv_normalise(n, &b.event[1], 1, &op), KVP_KV_REASON_OK, "learned for that rank only");
	is_u64(kvp_kv_normalise(n, &b.event[2], 0, &op), KVP_KV_REASON_OK, "main kind in group 1");
	is_u64(kvp_kv_normalise(n, &b.event[3], 0, &op), KVP_KV_REASON_UNLEARNED_GROUP,
		"removes never teach");
	kvp_kv_norm_reset(n);
	is_u64(kvp_kv_normalise(n, &b.event[1], 0, &op), KVP_KV_REASON_OK, "a restart forgets the groups");
	kvp_kv_norm_free(n);
}

static uint64_t seed_of(const char *lora, const char *salt)
{
	return kvp_hash_seed(lora, lora ? strlen(lora) : 0, salt, salt ? strlen(salt) : 0);
}

static void test_salt(void)
{
	struct kvp_kv_norm *n = kvp_kv_norm_new(4);
	struct kvp_kv_op op = {.seed = 0};
	begin(1), map_store(1, 2, -1, 2), key_str("cache_salt", "s"), key_str("lora_name", "l");
	ok(run(n, &op) == KVP_KV_REASON_OK && op.seed == seed_of("l", "s"), "own LoRA and salt");
	begin(1), map_store(3, 1, 2, 0);
	ok(run(n, &op) == KVP_KV_REASON_OK && op.seed == seed_of("l", "s"), "inherited from the parent");
	begin(1), map_store(4, 1, 3, 1), key_str("cache_salt", "");
	ok(run(n, &op) == KVP_KV_REASON_OK && op.seed == seed_of("l", "s"),
		"and by the grandchild; empty is absent");
	begin(1), map_store(4, 1, 99, 0);
	ok(run(n, &op) == KVP_KV_REASON_OK && op.seed == seed_of(NULL, NULL), "unknown parent: unsalted");
	is_u64(kvp_kv_norm_remembered(n), 4, "remembered blocks");
	begin(1), map_store(5, 1, 4, 0);
	ok(run(n, &op) == KVP_KV_REASON_AMBIGUOUS, "stored salted and unsalted: children are dropped");
	begin(1), map_store(5, 1, 4, 1), key_str("cache_salt", "q");
	ok(run(n, &op) == KVP_KV_REASON_OK && op.seed == seed_of("l", "q"), "unless they say their salt");
	begin(1), map_store(1, 1, -1, 2), key_str("medium", "CPU"), key_str("cache_salt", "s");
	ok(run(n, &op) == KVP_KV_REASON_OK && op.tier == KVP_KV_HOST, "host copy");
	begin(1), map_remove(1, 2, 0);
	ok(run(n, &op) == KVP_KV_REASON_OK, "both blocks leave the device");
	begin(1), map_store(7, 1, 1, 0);
	ok(run(n, &op) == KVP_KV_REASON_OK && op.seed == seed_of("l", "s"),
		"1 is remembered: the host holds it");
	begin(1), map_store(8, 1, 2, 0);
	ok(run(n, &op) == KVP_KV_REASON_OK && op.seed == seed_of(NULL, NULL),
		"2 is forgotten: nobody holds it");
	begin(1), map_remove(1, 1, 1), key_str("medium", "CPU");
	ok(run(n, &op) == KVP_KV_REASON_OK, "1 leaves the host");
	begin(1), map_store(9, 1, 1, 0);
	ok(run(n, &op) == KVP_KV_REASON_OK && op.seed == seed_of(NULL, NULL), "1 is forgotten");
	begin(1), map_store(10, 1, 7, 0);
	struct kvp_kv_batch b = end();
	ok(kvp_kv_normalise(n, &b.event[0], 1, &op) == KVP_KV_REASON_OK && op.seed == seed_of(NULL, NULL) &&
			op.dp_rank == 1,
		"another rank has its own memory");
	begin(1), msgpack_pack_map(&P, 1), key_str("type", "AllBlocksCleared");
	ok(run(n, &op) == KVP_KV_REASON_OK && op.kind == KVP_KV_OP_CLEAR, "clear");
	is_u64(kvp_kv_norm_remembered(n), 0, "forgets all");
	kvp_kv_norm_free(n);
}

static void test_tokenless(void)
{
	struct kvp_kv_norm *n = kvp_kv_norm_new(4);
	struct kvp_kv_op op = {.seed = 0};
	begin(1), map_store(1, 1, -1, 1), key_str("cache_salt", "s");
	run(n, &op);
	begin(1), msgpack_pack_map(&P, 5), key_str("type", "BlockStored"), key_str("medium", "CPU");
	str("block_hashes"), hashes(1, 2), str("token_ids"), list(0), key_num("block_size", 0);
	ok(run(n, &op) == KVP_KV_REASON_OK && op.kind == KVP_KV_OP_ATTACH && op.tier == KVP_KV_HOST &&
			op.ext_cnt == 2,
		"host store without tokens: attach");
	begin(1), map_remove(1, 1, 0);
	run(n, &op);
	begin(1), map_store(2, 1, 1, 0);
	ok(run(n, &op) == KVP_KV_REASON_OK && op.seed == seed_of(NULL, "s"),
		"the attached tier keeps the salt known");
	begin(1), msgpack_pack_map(&P, 2), key_str("type", "TierBlocksCleared"), key_str("medium", "CPU");
	ok(run(n, &op) == KVP_KV_REASON_OK && op.kind == KVP_KV_OP_CLEAR_TIER && op.tier == KVP_KV_HOST,
		"tier clear");
	is_u64(kvp_kv_norm_remembered(n), 1, "forgets what only that tier held");
	begin(1), msgpack_pack_map(&P, 4), key_str("type", "BlockStored");
	str("block_hashes"), hashes(1, 2), str("token_ids"), list(0), key_num("block_size", 4);
	ok(run(n, &op) == KVP_KV_REASON_EMPTY_STORE, "device store without tokens: nothing");
	begin(1), msgpack_pack_map(&P, 1), key_str("type", "TierBlocksCleared");
	ok(run(n, &op) == KVP_KV_REASON_MALFORMED_EVENT, "tier clear without a tier");
	begin(1), map_remove(1, 1, 1), key_str("ownership", "kvcr");
	ok(run(n, &op) == KVP_KV_REASON_FOREIGN_OWNER, "another owner");
	kvp_kv_norm_free(n);
}

/* The memory against a plain array: random stores, removes, tier clears. */
static void test_memory_model(void)
{
	enum { BLOCKS = 600 };
	static uint8_t tiers[BLOCKS];
	struct kvp_kv_norm *n = kvp_kv_norm_new(4);
	struct kvp_kv_op op = {.seed = 0};
	uint64_t s = tap_seed(99);
	static const char *const medium[] = {"GPU", "CPU", "DISK", "SHARED"};
	static uint32_t tok[8 * 4];
	int same = 1;
	for (int round = 0; round < 40000; round++) {
		uint32_t t = (uint32_t)(rnd(&s) % 4), cnt = 1 + (uint32_t)(rnd(&s) % 8);
		uint64_t hash[8], first = rnd(&s) % (BLOCKS - 8), want = 0;
		struct kvp_kv_event ev = {.hash = hash,
			.hash_cnt = cnt,
			.tok = tok,
			.tok_cnt = 4 * cnt,
			.block_size = 4,
			.medium = {medium[t], (uint32_t)strlen(medium[t])},
			.salt = {"s", 1}};
		for (uint32_t i = 0; i < cnt; i++)
			hash[i] = (first + i) * 0x100000001ull;
		uint64_t what = rnd(&s) % 400;
		ev.kind = what == 0 ? KVP_KV_TIER_CLEARED : what % 2 ? KVP_KV_STORED : KVP_KV_REMOVED;
		same &= kvp_kv_normalise(n, &ev, 3, &op) == KVP_KV_REASON_OK;
		for (uint32_t i = 0; i < BLOCKS; i++) {
			int hit = ev.kind == KVP_KV_TIER_CLEARED || (i >= first && i < first + cnt);
			if (hit && ev.kind == KVP_KV_STORED)
				tiers[i] |= (uint8_t)(1u << t);
			else if (hit)
				tiers[i] &= (uint8_t) ~(1u << t);
			want += tiers[i] != 0;
		}
		same &= kvp_kv_norm_remembered(n) == want;
	}
	ok(same, "40000 operations: as many blocks remembered as some tier holds");
	int inherits = 1;
	for (uint32_t i = 0; i < BLOCKS; i++) {
		uint64_t child = UINT64_MAX;
		struct kvp_kv_event ev = {.kind = KVP_KV_STORED,
			.hash = &child,
			.hash_cnt = 1,
			.tok = tok,
			.tok_cnt = 4,
			.block_size = 4,
			.has_parent = 1,
			.parent = i * 0x100000001ull};
		kvp_kv_normalise(n, &ev, 3, &op);
		inherits &= op.seed == seed_of(NULL, tiers[i] ? "s" : NULL);
		ev.kind = KVP_KV_REMOVED;
		kvp_kv_normalise(n, &ev, 3, &op);
	}
	ok(inherits, "and a child inherits from exactly those");
	kvp_kv_norm_free(n);
}

/* Notes of a stream kept in a plain list, as somebody who outlives the listener does. */
struct kept {
	struct kvp_kv_note note[4096];
	uint32_t cnt;
};

static int same_note(const struct kvp_kv_note *a, const struct kvp_kv_note *b)
{
	return a->id == b->id && a->dp_rank == b->dp_rank && !((a->state ^ b->state) & KVP_KV_NOTE_GROUP);
}

static void keep_notes(struct kept *k, const struct kvp_kv_norm *n)
{
	const struct kvp_kv_note *note;
	uint32_t cnt = kvp_kv_norm_notes(n, &note);
	for (uint32_t i = 0; i < cnt; i++) {
		uint32_t at = 0;
		while (at < k->cnt && !same_note(&k->note[at], &note[i]))
			at++;
		k->note[at] = note[i];
		k->cnt += at == k->cnt;
		if (!(note[i].state & ~KVP_KV_NOTE_GROUP))
			k->note[at] = k->note[--k->cnt];
	}
}

static struct kvp_kv_str text(const char *s)
{
	return (struct kvp_kv_str){s, s ? (uint32_t)strlen(s) : 0};
}

/* A listener that is replaced now and then by one made of its notes answers like one that is not. */
static void test_notes(void)
{
	enum { BLOCKS = 200 };
	static struct kept kept;
	struct kvp_kv_norm *n = kvp_kv_norm_new(4), *whole = kvp_kv_norm_new(4);
	uint64_t s = tap_seed(7), wrong = 0, seeds = 0, ambiguous = 0;
	static const char *const medium[] = {"GPU", "GPU", "CPU", "DISK"},
				 *const lora[] = {NULL, NULL, "a", "b"},
				 *const salt[] = {NULL, NULL, NULL, NULL, NULL, "s", "t"},
				 *const kind[] = {NULL, NULL, NULL, "full_attention", "mamba", "new"};
	static uint32_t tok[8 * 4];
	for (int round = 0; round < 30000; round++) {
		uint64_t hash[8], first = rnd(&s) % (BLOCKS - 9), what = rnd(&s) % 1000;
		struct kvp_kv_event ev = {.hash = hash,
			.hash_cnt = 1 + (uint32_t)(rnd(&s) % 4),
			.tok = rnd(&s) % 10 ? tok : NULL,
			.block_size = 4,
			.medium = text(medium[rnd(&s) % 4]),
			.lora = text(lora[rnd(&s) % 4]),
			.salt = text(salt[rnd(&s) % 7]),
			.has_group = rnd(&s) % 4 == 0,
			.group_idx = (uint32_t)(rnd(&s) % 3),
			.has_parent = 1,
			.parent = first};
		if (ev.has_group)
			ev.group_kind = text(kind[rnd(&s) % 6]);
		ev.tok_cnt = ev.tok ? 4 * ev.hash_cnt : 0;
		ev.kind = what == 0  ? KVP_KV_CLEARED
			  : what < 4 ? KVP_KV_TIER_CLEARED
			  : what % 2 ? KVP_KV_STORED
				     : KVP_KV_REMOVED;
		for (uint32_t i = 0; i < ev.hash_cnt; i++)
			hash[i] = first + 1 + i;
		uint32_t rank = (uint32_t)(rnd(&s) % 2);
		struct kvp_kv_op a = {.seed = 0}, b = {.seed = 0};
		enum kvp_kv_reason why = kvp_kv_normalise(n, &ev, rank, &a);
		wrong += why != kvp_kv_normalise(whole, &ev, rank, &b) || a.seed != b.seed;
		seeds += a.seed > KVP_HASH_BASE_SEED;
		ambiguous += why == KVP_KV_REASON_AMBIGUOUS;
		keep_notes(&kept, n);
		if (round % 100 == 0) {
			kvp_kv_norm_free(n);
			n = kvp_kv_norm_new(4);
			wrong += kvp_kv_norm_restore(n, kept.note, kept.cnt) != KVP_OK;
			wrong += kvp_kv_norm_remembered(n) != kvp_kv_norm_remembered(whole);
		}
	}
	is_u64(wrong, 0, "30000 events: a successor made of the notes answers as the first would");
	ok(seeds > 1000 && ambiguous > 100, "%llu seeds, %llu ambiguous parents", (unsigned long long)seeds,
		(unsigned long long)ambiguous);
	for (uint32_t rank = 0; rank < 2; rank++) {
		kvp_kv_norm_forget_rank(n, rank);
		keep_notes(&kept, n);
	}
	uint32_t groups = 0;
	for (uint32_t i = 0; i < kept.cnt; i++)
		groups += (kept.note[i].state & KVP_KV_NOTE_GROUP) != 0;
	ok(kept.cnt == groups && groups > 0, "ranks forgotten: only their groups are left (%u)", groups);
	struct kvp_kv_note odd[] = {
		{1, 2, 3, 0, 0}, {1, 2, 3, 0, KVP_KV_NOTE_GROUP | 0x1f}, {1, 2, 3, 0, 0x700}};
	ok(kvp_kv_norm_restore(n, odd, 3) == KVP_OK && kvp_kv_norm_remembered(n) == 0,
		"notes that make no sense are skipped");
	kvp_kv_norm_free(n);
	kvp_kv_norm_free(whole);
}

static void test_state_limits(void)
{
	struct kvp_kv_norm *n = kvp_kv_norm_new(4);
	struct kvp_kv_op op = {.seed = 0};
	uint32_t tok[4] = {0};
	uint64_t hash = 1;
	struct kvp_kv_event ev = {.kind = KVP_KV_STORED,
		.hash = &hash,
		.hash_cnt = 1,
		.tok = tok,
		.tok_cnt = 4,
		.block_size = 4};
	for (uint32_t r = 0; r < KVP_KV_RANK_MAX; r++)
		kvp_kv_normalise(n, &ev, r, &op);
	ok(kvp_kv_normalise(n, &ev, KVP_KV_RANK_MAX, &op) == KVP_KV_REASON_STATE_FULL, "too many ranks");
	ok(kvp_kv_normalise(n, &ev, 5, &op) == KVP_KV_REASON_OK, "known ranks go on");
	/* Refused before anything is made for it; the hashes are pairwise distinct, as they must be. */
	ev.hash_cnt = KVP_KV_MEMORY_MAX + 1;
	ev.tok_cnt = 4;
	ev.salt = (struct kvp_kv_str){"s", 1};
	uint64_t *many = malloc(8ull * ev.hash_cnt);
	for (uint32_t i = 0; i < ev.hash_cnt; i++)
		many[i] = i;
	ev.hash = many;
	ok(kvp_kv_normalise(n, &ev, 5, &op) == KVP_KV_REASON_STATE_FULL && !kvp_kv_norm_remembered(n),
		"more salted blocks than a listener remembers");
	ev.hash_cnt = 1000;
	ok(kvp_kv_normalise(n, &ev, 5, &op) == KVP_KV_REASON_OK && kvp_kv_norm_remembered(n) == 1000,
		"fewer are remembered");
	ev.hash = many + 1000;
	ev.hash_cnt = KVP_KV_MEMORY_MAX - 999;
	ok(kvp_kv_normalise(n, &ev, 6, &op) == KVP_KV_REASON_STATE_FULL && kvp_kv_norm_remembered(n) == 1000,
		"all ranks together");
	free(many);
	ok(!kvp_kv_norm_new(0), "block size 0 is no partition");
	is_str(kvp_kv_reason_name(KVP_KV_REASON_AMBIGUOUS), "ambiguous_cache_namespace",
		"reasons have names");
	kvp_kv_norm_free(n);
	kvp_kv_norm_free(NULL);
	kvp_kv_dec_free(NULL);
}

int main(void)
{
	D = kvp_kv_dec_new();
	msgpack_sbuffer_init(&B);
	test_numbers();
	test_skip();
	test_depth_and_counts();
	test_tails();
	test_extra_keys();
	test_malformed_members();
	test_groups();
	test_salt();
	test_tokenless();
	test_memory_model();
	test_notes();
	test_state_limits();
	msgpack_sbuffer_destroy(&B);
	kvp_kv_dec_free(D);
	return done();
}
