/* Every vector of hashes.json, and the lazy hasher against whole-block hashing. */
#include <kvpick/hash.h>

#include "tests/vec.h"

#define MAX 1024

static const char *opt_str(struct kvp_json_val v, const char *key)
{
	struct kvp_json_val s;
	return vec_has(v, key, &s) ? vec_text(s) : "";
}

static void primitives(struct kvp_json_val root)
{
	uint8_t buf[4096];
	struct kvp_json_iter it = kvp_json_each(vec_get(root, "xxh3_64"));
	while (kvp_json_next(&it)) {
		size_t n = vec_unhex(vec_str(it.val, "hex"), buf);
		is_u64(kvp_hash_bytes(buf, n, vec_u64(it.val, "seed")), vec_u64(it.val, "hash"),
			"H of %zu bytes", n);
	}
	it = kvp_json_each(vec_get(root, "salt_seed"));
	while (kvp_json_next(&it)) {
		const char *lora = opt_str(it.val, "lora_name"), *salt = opt_str(it.val, "cache_salt");
		is_u64(kvp_hash_seed(lora, strlen(lora), salt, strlen(salt)), vec_u64(it.val, "seed"),
			"seed of lora '%s' salt '%s'", lora, salt);
	}
	it = kvp_json_each(vec_get(root, "mm_identifier"));
	while (kvp_json_next(&it)) {
		struct kvp_json_val want;
		const char *id = vec_str(it.val, "identifier");
		uint64_t got = 77;
		int rc = kvp_hash_mm_id(id, strlen(id), &got);
		if (vec_has(it.val, "hash", &want))
			ok(rc == KVP_OK && got == vec_num(want), "media identifier '%s'", id);
		else
			ok(rc == KVP_ERR_NOTFOUND && got == 77, "media identifier '%s' is none", id);
	}
	it = kvp_json_each(vec_get(root, "pad_value"));
	while (kvp_json_next(&it))
		is_u64(kvp_hash_pad_value(vec_u64(it.val, "mm_hash")), vec_u64(it.val, "pad_value"),
			"pad value");
}

static void external(struct kvp_json_val root)
{
	struct kvp_json_iter it = kvp_json_each(vec_get(root, "external_hash"));
	while (kvp_json_next(&it)) {
		uint8_t buf[128];
		size_t n = vec_unhex(vec_str(it.val, "msgpack_hex"), buf);
		/* Integers are the event decoder's business; bytes (bin 8: tag, length, bytes) are ours. */
		if (buf[0] == 0xc4)
			is_u64(kvp_hash_external_bytes(buf + 2, n - 2), vec_u64(it.val, "u64"),
				"external hash: %s", vec_str(it.val, "desc"));
	}
}

static void chains(struct kvp_json_val root)
{
	struct kvp_json_iter it = kvp_json_each(vec_get(root, "chain_only"));
	while (kvp_json_next(&it)) {
		uint64_t local[MAX], seq[MAX];
		size_t n = 0, bad = 0;
		struct kvp_json_iter e = kvp_json_each(vec_get(it.val, "block_hashes"));
		while (kvp_json_next(&e))
			local[n++] = vec_num(e.val);
		kvp_hash_chain(NULL, local, n, seq);
		e = kvp_json_each(vec_get(it.val, "sequence_hashes"));
		for (size_t i = 0; kvp_json_next(&e); i++)
			bad += seq[i] != vec_num(e.val);
		ok(n > 0 && bad == 0, "chain of %zu given hashes", n);
		kvp_hash_chain(&seq[0], local + 1, n - 1, local + 1);
		ok(memcmp(local + 1, seq + 1, (n - 1) * sizeof(*seq)) == 0,
			"continued in place after its first value");
	}
}

struct case_mm {
	struct kvp_hash_mm list[64];
	uint64_t hash[64];
	uint32_t cnt;
};

static void read_mm(struct kvp_json_val v, struct case_mm *mm)
{
	struct kvp_json_val lists;
	uint32_t used = 0;
	mm->cnt = 0;
	if (!vec_has(v, "block_mm_hashes", &lists))
		return;
	struct kvp_json_iter it = kvp_json_each(lists);
	while (kvp_json_next(&it)) {
		struct kvp_hash_mm *l = &mm->list[mm->cnt++];
		*l = (struct kvp_hash_mm){&mm->hash[used], 0};
		struct kvp_json_iter e = kvp_json_each(it.val);
		while (kvp_json_next(&e)) {
			mm->hash[used++] = vec_num(e.val);
			l->cnt++;
		}
	}
}

static void one_sequence(struct kvp_json_val v)
{
	static uint32_t tok[MAX];
	static uint64_t local[MAX], seq[MAX], piece[MAX];
	const char *name = vec_str(v, "name"), *lora = opt_str(v, "lora_name"),
		   *salt = opt_str(v, "cache_salt");
	struct kvp_json_val eagle;
	struct case_mm mm;
	struct kvp_hasher h;
	uint64_t n = 0, want = 0, bad = 0;
	struct kvp_json_iter it = kvp_json_each(vec_get(v, "tokens"));
	while (kvp_json_next(&it))
		tok[n++] = (uint32_t)vec_num(it.val);
	read_mm(v, &mm);
	kvp_hasher_init(&h, tok, n, (uint32_t)vec_u64(v, "block_size"),
		vec_has(v, "is_eagle", &eagle) ? KVP_HASH_WINDOW_EAGLE : KVP_HASH_WINDOW_PLAIN,
		kvp_hash_seed(lora, strlen(lora), salt, strlen(salt)));
	kvp_hasher_set_mm(&h, mm.list, mm.cnt, NULL);
	uint64_t got = kvp_hasher_local(&h, 0, MAX, local);
	kvp_hash_chain(NULL, local, got, seq);
	it = kvp_json_each(vec_get(v, "block_hashes"));
	for (; kvp_json_next(&it); want++)
		bad += want >= got || local[want] != vec_num(it.val);
	ok(bad == 0 && got == want && kvp_hasher_blocks(&h) == want, "%s: %" PRIu64 " local hashes", name,
		want);
	it = kvp_json_each(vec_get(v, "sequence_hashes"));
	for (uint64_t i = 0; kvp_json_next(&it); i++)
		bad += i >= got || seq[i] != vec_num(it.val);
	ok(bad == 0, "%s: sequence hashes", name);
	for (uint64_t i = 0; i < got; i++)
		bad += kvp_hasher_local(&h, got - 1 - i, 1, &piece[got - 1 - i]) != 1;
	ok(bad == 0 && memcmp(piece, local, got * sizeof(*piece)) == 0,
		"%s: the same block by block, backwards", name);
	is_u64(kvp_hasher_local(&h, got, 1, piece), 0, "%s: nothing after the last block", name);
}

/* The ready secret of the lazy hasher must give what the plain seeded hash gives, at every window length. */
static void long_blocks(void)
{
	static uint32_t tok[4 * 600 + 1];
	uint64_t bad = 0, out[4], x = 88172645463325252u;
	for (size_t i = 0; i < sizeof(tok) / sizeof(tok[0]); i++) {
		x ^= x << 13;
		x ^= x >> 7;
		x ^= x << 17;
		tok[i] = (uint32_t)x;
	}
	for (uint32_t bs = 1; bs <= 600; bs++) {
		for (uint32_t w = 0; w < 2; w++) {
			struct kvp_hasher h;
			kvp_hasher_init(&h, tok, 4 * bs + 1, bs, (enum kvp_hash_window)w, x + bs);
			if (kvp_hasher_local(&h, 0, 4, out) != 4)
				bad++;
			for (uint32_t i = 0; i < 4; i++)
				bad += out[i] != kvp_hash_block(tok + i * bs, bs + w, NULL, 0, x + bs);
		}
	}
	is_u64(bad, 0, "block sizes 1 to 600, both windows: lazy and whole hashing agree");
}

static uint64_t mapped(
	const uint32_t *tok, uint32_t n, const uint64_t *mm, uint32_t mm_cnt, int image, int video)
{
	struct kvp_hash_placeholder ph = {image ? KVP_HASH_PLACEHOLDER_SET : KVP_HASH_PLACEHOLDER_UNSET,
		video ? KVP_HASH_PLACEHOLDER_SET : KVP_HASH_PLACEHOLDER_UNSET, 500, 600};
	return kvp_hash_block_mm(tok, n, mm, mm_cnt, 1337, &ph);
}

static void placeholders(void)
{
	uint32_t t[] = {1, 500, 500, 2, 500, 3}, v[] = {500, 2, 600, 600, 3, 600};
	uint64_t mm[] = {9, 3, 7};
	uint32_t p9 = kvp_hash_pad_value(9), p3 = kvp_hash_pad_value(3);
	uint32_t two[] = {1, p9, p9, 2, p3, 3}, last[] = {1, p9, p9, 2, p9, 3},
		 vid[] = {p9, 2, p3, p3, 3, p3};
	uint64_t append2 = kvp_hash_block(t, 6, mm, 2, 1337);
	is_u64(mapped(t, 6, mm, 2, 1, 0), kvp_hash_block(two, 6, NULL, 0, 1337), "run k becomes object k");
	is_u64(mapped(t, 6, mm, 3, 1, 0), kvp_hash_block(two, 6, NULL, 0, 1337),
		"surplus objects are not used");
	is_u64(mapped(t, 6, mm, 1, 1, 0), kvp_hash_block(last, 6, NULL, 0, 1337), "the last object repeats");
	is_u64(mapped(t, 6, mm, 2, 0, 0), append2, "no placeholder configured: appended");
	uint32_t text[] = {1, 2, 3, 4};
	is_u64(mapped(text, 4, mm, 2, 1, 0), kvp_hash_block(text, 4, mm, 2, 1337),
		"no run in the block: appended");
	is_u64(mapped(v, 6, mm, 2, 1, 1), kvp_hash_block(vid, 6, NULL, 0, 1337),
		"consecutive video runs: one object");
	is_u64(mapped(v, 6, mm, 3, 1, 1), kvp_hash_block(v, 6, mm, 3, 1337),
		"with a video id only an exact fit maps");
	is_u64(mapped(v, 6, mm, 0, 1, 1), kvp_hash_block(v, 6, NULL, 0, 1337),
		"no objects: the tokens alone");
}

/* Long lists: sorted with duplicates kept, independent of their order. */
static void long_lists(void)
{
	static uint64_t up[1000], down[1000], bytes[1000 + 1];
	uint32_t tok[2] = {5, 6};
	for (uint64_t i = 0; i < 1000; i++) {
		up[i] = i / 2 * 0x9e3779b97f4a7c15u / 977;
		down[999 - i] = up[i];
	}
	is_u64(kvp_hash_block(tok, 2, up, 1000, 1), kvp_hash_block(tok, 2, down, 1000, 1),
		"order does not matter");
	memcpy(bytes, tok, sizeof(tok));
	for (uint64_t i = 0; i < 300; i++)
		bytes[1 + i] = i;
	for (uint64_t i = 0; i < 300; i++)
		up[i] = (i * 7) % 300;
	is_u64(kvp_hash_block(tok, 2, up, 300, 1), kvp_hash_bytes(bytes, sizeof(tok) + 300 * 8, 1),
		"tokens, then the sorted list");
}

int main(void)
{
	struct kvp_json *p = kvp_json_new();
	struct kvp_json_val root = vec_load(p, "hashes.json");
	primitives(root);
	external(root);
	chains(root);
	struct kvp_json_iter it = kvp_json_each(vec_get(root, "sequences"));
	while (kvp_json_next(&it))
		one_sequence(it.val);
	long_blocks();
	placeholders();
	long_lists();
	kvp_json_free(p);
	return done();
}
