/* What is done through a publishing handle leaves a record for the replicas (shm/lifecycle.h). The place in
 * the ring is taken before the change can be seen by anybody, and filled after it: so the records of one id
 * are in the order of the changes, whichever processes make them. */
#include "shm/book_priv.h"

void kvp_book_publish(struct kvp_book *b, struct kvp_lifecycle_ring *l)
{
	b->tell = l && l->shm ? l : NULL;
}

static void claim(struct kvp_book *b, struct kvp_lifecycle_put *r, const unsigned char *text, uint32_t lens,
	struct kvp_lifecycle_claim *c)
{
	r->id = text;
	r->id_len = RESV_TEXT_ID(lens);
	r->lora = text + r->id_len;
	r->lora_len = RESV_TEXT_LORA(lens);
	kvp_lifecycle_claim(b->tell, b->owner, r, c);
}

void book_tell_add(
	struct kvp_book *b, uint64_t h, const struct kvp_resv_ask *a, struct kvp_lifecycle_claim *c)
{
	unsigned char text[RESV_TEXT_MAX];
	struct kvp_lifecycle_put r = {.kind = KVP_LIFECYCLE_ADD,
		.part = a->part,
		.dp_rank = a->dp_rank,
		.h = h,
		.worker_id = a->worker_id};
	*c = (struct kvp_lifecycle_claim){0};
	if (kvp_resv_is_claim(b, h)) /* else the booking is refused */
		claim(b, &r, text, book_text_load(b, H_IDX(h), text), c);
}

/* of_entry copies what a record says of idx: RESV_TEXT, 0 = it is nothing any more. */
static uint32_t of_entry(const struct kvp_book *b, uint32_t idx, struct kvp_lifecycle_put *r,
	unsigned char text[RESV_TEXT_MAX])
{
	const struct kvp_resv_shm *e = &b->resv[idx];
	r->worker_id = kvp_ld_acq_u64(&e->worker_id);
	r->dp_rank = kvp_ld_acq_u32(&e->dp_rank);
	r->part = kvp_ld_acq_u32(&e->part);
	return book_text_load(b, idx, text);
}

int book_tell_begin(struct kvp_book *b, uint64_t h, enum book_tell_what what, struct kvp_lifecycle_claim *c)
{
	unsigned char text[RESV_TEXT_MAX];
	uint32_t idx = H_IDX(h);
	if (idx >= b->id_cnt)
		return 0;
	struct kvp_lifecycle_put r = {
		.kind = what == BOOK_TELL_FREE ? KVP_LIFECYCLE_FREE : KVP_LIFECYCLE_PREFILL_DONE, .h = h};
	uint64_t s = kvp_ld_acq_u64(book_state(b, idx));
	if (S_GEN(s) != H_GEN(h) || !IS_IN(s, BASES_LIVE))
		return 0;
	uint32_t lens = of_entry(b, idx, &r, text);
	/* What is a booking now was one all the time: what was read is of it. */
	s = kvp_ld_acq_u64(book_state(b, idx));
	if (S_GEN(s) != H_GEN(h) || !IS_IN(s, BASES_LIVE))
		return 0;
	claim(b, &r, text, lens, c);
	return 1;
}

void book_tell_end(struct kvp_book *b, const struct kvp_lifecycle_claim *c, int rc)
{
	if (rc == KVP_OK)
		kvp_lifecycle_ready(b->tell, c, b->ctr);
	else
		kvp_lifecycle_void(b->tell, c);
}

void book_tell_swept(struct kvp_book *b, uint32_t idx)
{
	unsigned char text[RESV_TEXT_MAX];
	struct kvp_lifecycle_claim c;
	const struct kvp_resv_shm *e = &b->resv[idx];
	if (!b->tell || !(kvp_ld_acq_u32(&e->flags) & (RESV_TOLD | KVP_RESV_MIRRORED)))
		return;
	uint64_t s = kvp_ld_acq_u64(book_state(b, idx));
	struct kvp_lifecycle_put r = {.kind = KVP_LIFECYCLE_FREE, .h = HANDLE(S_GEN(s), idx)};
	claim(b, &r, text, of_entry(b, idx, &r, text), &c);
	kvp_lifecycle_ready(b->tell, &c, b->ctr);
}
