#include <kvpick/hash.h>
#include <kvpick/err.h>

#include <stdlib.h>
#include <string.h>

/* The library's header with everything inline: blocks are 64 to 256 bytes, where the call is a good part of
 * the cost, and the variant with a ready secret spares deriving it for each block over 240 bytes. */
#define XXH_INLINE_ALL
#include <xxhash.h>

#define MM_STACK_MAX 256
#define TOK_STACK_MAX 256

_Static_assert(KVP_HASH_SECRET_BYTES == XXH3_SECRET_DEFAULT_SIZE, "size of a derived secret");
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "tokens are hashed in memory order");

uint64_t kvp_hash_bytes(const void *p, size_t len, uint64_t seed)
{
	return XXH3_64bits_withSeed(len ? p : "", len, seed);
}

uint64_t kvp_hash_seed(const char *lora, size_t lora_len, const char *salt, size_t salt_len)
{
	uint64_t seed = KVP_HASH_BASE_SEED;
	if (lora_len)
		seed += kvp_hash_bytes(lora, lora_len, 0);
	if (salt_len)
		seed += kvp_hash_bytes(salt, salt_len, 1);
	return seed;
}

static void sift_down(uint64_t *a, size_t i, size_t n)
{
	for (size_t child; (child = 2 * i + 1) < n; i = child) {
		if (child + 1 < n && a[child + 1] > a[child])
			child++;
		if (a[i] >= a[child])
			return;
		uint64_t t = a[i];
		a[i] = a[child];
		a[child] = t;
	}
}

/* Heap sort: no memory and no quadratic case, because lists come from outside. */
static void sort_u64(uint64_t *a, size_t n)
{
	for (size_t i = n / 2; i-- > 0;)
		sift_down(a, i, n);
	for (size_t end = n; end-- > 1;) {
		uint64_t t = a[0];
		a[0] = a[end];
		a[end] = t;
		sift_down(a, 0, end);
	}
}

static uint64_t hash_append(
	const uint32_t *tok, uint32_t n_tok, const uint64_t *mm, uint32_t mm_cnt, uint64_t seed)
{
	uint64_t stack[MM_STACK_MAX], *sorted = stack, *heap = NULL;
	if (mm_cnt > MM_STACK_MAX) {
		heap = malloc((size_t)mm_cnt * sizeof(*heap));
		KVP_ASSERT(heap);
		sorted = heap;
	}
	memcpy(sorted, mm, (size_t)mm_cnt * sizeof(*mm));
	sort_u64(sorted, mm_cnt);
	XXH3_state_t st;
	XXH3_INITSTATE(&st);
	XXH3_64bits_reset_withSeed(&st, seed);
	XXH3_64bits_update(&st, tok, (size_t)n_tok * sizeof(*tok));
	XXH3_64bits_update(&st, sorted, (size_t)mm_cnt * sizeof(*sorted));
	free(heap);
	return XXH3_64bits_digest(&st);
}

uint64_t kvp_hash_block(
	const uint32_t *tok, uint32_t n_tok, const uint64_t *mm, uint32_t mm_cnt, uint64_t seed)
{
	if (mm_cnt == 0)
		return kvp_hash_bytes(tok, (size_t)n_tok * sizeof(*tok), seed);
	return hash_append(tok, n_tok, mm, mm_cnt, seed);
}

/* One walk over a block's placeholder runs serves counting and rewriting, so both see the same objects. */
struct run_walk {
	const struct kvp_hash_placeholder *ph;
	enum { RUN_NONE, RUN_IMAGE, RUN_VIDEO } in, last_object;
	uint64_t objects; /* objects begun so far */
};

/* Returns the object (0-based) that the token stands for, or -1 for text. */
static int64_t run_step(struct run_walk *w, uint32_t tok)
{
	const struct kvp_hash_placeholder *ph = w->ph;
	int image = ph->image_set == KVP_HASH_PLACEHOLDER_SET && tok == ph->image_tok;
	int video = !image && ph->video_set == KVP_HASH_PLACEHOLDER_SET && tok == ph->video_tok;
	if (!image && !video) {
		w->in = RUN_NONE;
		return -1;
	}
	if (image && w->in != RUN_IMAGE)
		w->objects++;
	/* A video's frames are runs with text between them: they go on with the object of the last video run.
	 */
	if (video && w->last_object != RUN_VIDEO)
		w->objects++;
	w->in = w->last_object = image ? RUN_IMAGE : RUN_VIDEO;
	return (int64_t)w->objects - 1;
}

static uint64_t count_objects(const uint32_t *tok, uint32_t n_tok, const struct kvp_hash_placeholder *ph)
{
	struct run_walk w = {.ph = ph, .in = RUN_NONE, .last_object = RUN_NONE};
	for (uint32_t i = 0; i < n_tok; i++)
		run_step(&w, tok[i]);
	return w.objects;
}

static uint64_t hash_mapped(const uint32_t *tok, uint32_t n_tok, const uint64_t *mm, uint32_t mm_cnt,
	uint64_t seed, const struct kvp_hash_placeholder *ph)
{
	struct run_walk w = {.ph = ph, .in = RUN_NONE, .last_object = RUN_NONE};
	uint32_t buf[TOK_STACK_MAX];
	XXH3_state_t st;
	XXH3_INITSTATE(&st);
	XXH3_64bits_reset_withSeed(&st, seed);
	for (uint32_t done = 0; done < n_tok;) {
		uint32_t n = n_tok - done < TOK_STACK_MAX ? n_tok - done : TOK_STACK_MAX;
		for (uint32_t i = 0; i < n; i++) {
			int64_t k = run_step(&w, tok[done + i]);
			if (k >= (int64_t)mm_cnt)
				k = (int64_t)mm_cnt - 1;
			buf[i] = k < 0 ? tok[done + i] : kvp_hash_pad_value(mm[k]);
		}
		XXH3_64bits_update(&st, buf, (size_t)n * sizeof(*buf));
		done += n;
	}
	return XXH3_64bits_digest(&st);
}

uint64_t kvp_hash_block_mm(const uint32_t *tok, uint32_t n_tok, const uint64_t *mm, uint32_t mm_cnt,
	uint64_t seed, const struct kvp_hash_placeholder *ph)
{
	if (mm_cnt && ph) {
		uint64_t objects = count_objects(tok, n_tok, ph);
		int exact = ph->video_set == KVP_HASH_PLACEHOLDER_SET;
		if (exact ? objects == mm_cnt : objects > 0)
			return hash_mapped(tok, n_tok, mm, mm_cnt, seed, ph);
	}
	return kvp_hash_block(tok, n_tok, mm, mm_cnt, seed);
}

uint64_t kvp_hash_seq(uint64_t prev_seq, uint64_t local)
{
	uint64_t pair[2] = {prev_seq, local};
	return XXH3_64bits_withSeed(pair, sizeof(pair), KVP_HASH_BASE_SEED);
}

void kvp_hash_chain(const uint64_t *prev, const uint64_t *local, size_t n, uint64_t *out)
{
	if (n == 0)
		return;
	uint64_t s = prev ? kvp_hash_seq(*prev, local[0]) : local[0];
	out[0] = s;
	for (size_t i = 1; i < n; i++) {
		s = kvp_hash_seq(s, local[i]);
		out[i] = s;
	}
}

static int hex_digit(char c)
{
	if (c >= '0' && c <= '9')
		return c - '0';
	if (c >= 'a' && c <= 'f')
		return c - 'a' + 10;
	if (c >= 'A' && c <= 'F')
		return c - 'A' + 10;
	return -1;
}

int kvp_hash_mm_id(const char *s, size_t len, uint64_t *out)
{
	if (len == 0)
		return KVP_ERR_NOTFOUND;
	uint64_t v = 0;
	int hex = len == 64;
	for (size_t i = 0; hex && i < len; i++) {
		int d = hex_digit(s[i]);
		if (d < 0)
			hex = 0;
		else if (i < 16)
			v = v << 4 | (uint64_t)d;
	}
	*out = hex ? v : kvp_hash_bytes(s, len, 0);
	return KVP_OK;
}

uint32_t kvp_hash_pad_value(uint64_t mm_hash)
{
	return 1000000u + (uint32_t)(mm_hash & 0x3fffffffu);
}

uint64_t kvp_hash_external_bytes(const uint8_t *p, size_t len)
{
	uint64_t v = 0;
	for (size_t i = len > 8 ? len - 8 : 0; i < len; i++)
		v = v << 8 | p[i];
	return v;
}

uint64_t kvp_hash_taint(const char *s, size_t len)
{
	return kvp_hash_bytes(s, len, 0);
}

void kvp_hasher_init(struct kvp_hasher *h, const uint32_t *tok, uint64_t tok_cnt, uint32_t block_size,
	enum kvp_hash_window window, uint64_t seed)
{
	/* A bigram window would not fit a 32-bit count at the very top; such a block can't exist in memory
	 * either. */
	uint32_t eagle = window == KVP_HASH_WINDOW_EAGLE && block_size < UINT32_MAX;
	h->tok = tok;
	h->tok_cnt = tok_cnt;
	h->block_size = block_size;
	h->window_tok = block_size + eagle;
	h->seed = seed;
	h->mm = NULL;
	h->mm_cnt = 0;
	h->placeholder = (struct kvp_hash_placeholder){.image_set = KVP_HASH_PLACEHOLDER_UNSET};
	h->blocks = 0;
	if (block_size)
		h->blocks = (eagle && tok_cnt ? tok_cnt - 1 : tok_cnt) / block_size;
	if ((uint64_t)h->window_tok * sizeof(*tok) > XXH3_MIDSIZE_MAX)
		XXH3_generateSecret_fromSeed(h->secret, seed);
}

void kvp_hasher_set_mm(struct kvp_hasher *h, const struct kvp_hash_mm *mm, uint64_t mm_cnt,
	const struct kvp_hash_placeholder *ph)
{
	h->mm = mm;
	h->mm_cnt = mm_cnt;
	if (ph)
		h->placeholder = *ph;
}

uint64_t kvp_hasher_local(const struct kvp_hasher *h, uint64_t first, uint64_t n, uint64_t *out)
{
	if (first >= h->blocks)
		return 0;
	if (n > h->blocks - first)
		n = h->blocks - first;
	size_t bytes = (size_t)h->window_tok * sizeof(*h->tok);
	for (uint64_t i = 0; i < n; i++) {
		uint64_t blk = first + i;
		const uint32_t *tok = h->tok + blk * h->block_size;
		if (blk < h->mm_cnt && h->mm[blk].cnt)
			out[i] = kvp_hash_block_mm(tok, h->window_tok, h->mm[blk].hash, h->mm[blk].cnt,
				h->seed, &h->placeholder);
		else if (bytes > XXH3_MIDSIZE_MAX)
			out[i] = XXH3_64bits_withSecretandSeed(
				tok, bytes, h->secret, sizeof(h->secret), h->seed);
		else
			out[i] = XXH3_64bits_withSeed(tok, bytes, h->seed);
	}
	return n;
}
