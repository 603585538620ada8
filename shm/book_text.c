/* The id of a reservation and the name of its adapter, one behind the other: in the body, or in chunks. */
#include "shm/book_priv.h"

#include <string.h>

static void words_store(uint64_t *to, const unsigned char *id, size_t len)
{
	for (size_t i = 0; i < len; i += 8) {
		uint64_t w = 0;
		memcpy(&w, id + i, len - i < 8 ? len - i : 8);
		kvp_st_rlx_u64(&to[i / 8], w);
	}
}

static void words_load(unsigned char *id, const uint64_t *from, size_t len)
{
	for (size_t i = 0; i < len; i += 8) {
		uint64_t w = kvp_ld_acq_u64(&from[i / 8]);
		memcpy(id + i, &w, len - i < 8 ? len - i : 8);
	}
}

static int text_store(
	struct kvp_book *b, uint64_t h, const unsigned char *text, uint32_t id_len, uint32_t lora_len)
{
	struct kvp_resv_shm *e = &b->resv[H_IDX(h)];
	size_t len = id_len + lora_len;
	kvp_st_rlx_u32(&e->id_chunk, 0);
	kvp_st_rlx_u32(&e->id_len, RESV_TEXT(id_len, lora_len));
	if (len <= RESV_ID_INLINE) {
		words_store(e->id, text, len);
		return KVP_OK;
	}
	uint32_t *link = &e->id_chunk;
	for (size_t off = 0; off < len; off += CHUNK_KEYS * 8) {
		uint32_t c = book_chunk_take(b, h);
		if (!c)
			return KVP_ERR_FULL;
		kvp_st_rlx_u32(link, c);
		link = &b->chunk[c].next;
		size_t n = len - off < CHUNK_KEYS * 8 ? len - off : CHUNK_KEYS * 8;
		words_store(&b->key[(uint64_t)c * CHUNK_KEYS], text + off, n);
	}
	return KVP_OK;
}

int book_text_store(
	struct kvp_book *b, uint64_t h, const void *id, size_t id_len, const void *lora, size_t lora_len)
{
	unsigned char text[RESV_TEXT_MAX];
	if (lora_len == 0)
		return text_store(b, h, id, (uint32_t)id_len, 0);
	memcpy(text, id, id_len);
	memcpy(text + id_len, lora, lora_len);
	return text_store(b, h, text, (uint32_t)id_len, (uint32_t)lora_len);
}

uint32_t book_text_load(const struct kvp_book *b, uint32_t idx, unsigned char text[RESV_TEXT_MAX])
{
	const struct kvp_resv_shm *e = &b->resv[idx];
	uint32_t lens = kvp_ld_acq_u32(&e->id_len), off = 0;
	uint32_t len = RESV_TEXT_ID(lens) + RESV_TEXT_LORA(lens);
	if (RESV_TEXT_ID(lens) > KVP_RESV_ID_MAX || RESV_TEXT_LORA(lens) > KVP_RESV_LORA_MAX)
		return 0;
	if (len <= RESV_ID_INLINE) {
		words_load(text, e->id, len);
		return lens;
	}
	for (uint32_t c = kvp_ld_acq_u32(&e->id_chunk); off < len && c && c < b->chunk_cnt;
		c = kvp_ld_acq_u32(&b->chunk[c].next)) {
		uint32_t n = len - off < CHUNK_KEYS * 8 ? len - off : CHUNK_KEYS * 8;
		words_load(text + off, &b->key[(uint64_t)c * CHUNK_KEYS], n);
		off += n;
	}
	return off == len ? lens : 0;
}
