#include "daemons/common/select_priv.h"

#include <inttypes.h>

#define CHUNK_BLK 64 /* local hashes made at once for the walk */

static int begin_tokens(struct kvp_selection *s, const struct kvp_prompt *p, enum kvp_prompt_use use)
{
	struct kvp_sel_prompt *n = &s->prompt;
	if (p->token_cnt == 0 && use == KVP_PROMPT_USE_SELECT)
		return kvp_sel_fail(s, 400, "token_ids must not be empty");
	int eagle = p->eagle == KVP_UNSET ? (int)s->part.is_eagle : p->eagle == KVP_YES;
	uint64_t seed = kvp_hash_seed(p->lora.ptr, p->lora.len, p->salt.ptr, p->salt.len);
	kvp_hasher_init(&n->hasher, p->token, p->token_cnt, s->part.block_size,
		eagle ? KVP_HASH_WINDOW_EAGLE : KVP_HASH_WINDOW_PLAIN, seed);
	if (p->mm)
		kvp_hasher_set_mm(&n->hasher, p->mm, p->mm_cnt, &s->set.placeholder);
	n->isl_tok = p->token_cnt;
	n->blk_cnt = (uint32_t)kvp_hasher_blocks(&n->hasher);
	n->seq_cnt = n->blk_cnt;
	n->local = kvp_sel_scratch(&s->scratch_local, n->blk_cnt, sizeof(uint64_t));
	return n->local ? 0 : kvp_sel_fail(s, 500, "out of memory");
}

static int begin_hashes(struct kvp_selection *s, const struct kvp_prompt *p, enum kvp_prompt_use use)
{
	struct kvp_sel_prompt *n = &s->prompt;
	int explicit_form = use == KVP_PROMPT_USE_RESERVE;
	if (!p->block_hash && !explicit_form)
		return kvp_sel_fail(s, 400, "block_hashes is required without token_ids");
	if (!p->seq_hash)
		return kvp_sel_fail(s, 400, "sequence_hashes is required without token_ids");
	if (p->has_isl != KVP_YES)
		return kvp_sel_fail(s, 400, "isl_tokens is required without token_ids");
	int routed = !explicit_form || (p->block_hash && s->set.records_routing == KVP_YES);
	if (routed && p->isl_tok == 0)
		return kvp_sel_fail(s, 400, "isl_tokens must be greater than 0");
	if (routed && p->block_hash_cnt != p->seq_hash_cnt)
		return kvp_sel_fail(s, 400,
			"block_hashes length %" PRIu32 " must match sequence_hashes length %" PRIu32,
			p->block_hash_cnt, p->seq_hash_cnt);
	n->isl_tok = p->isl_tok;
	n->local = p->block_hash;
	n->local_cnt = n->blk_cnt = routed ? p->block_hash_cnt : 0;
	n->seq = p->seq_hash;
	n->seq_cnt = p->seq_hash_cnt;
	return 0;
}

int kvp_sel_prompt_begin(struct kvp_selection *s, const struct kvp_prompt *p, enum kvp_prompt_use use)
{
	struct kvp_sel_prompt *n = &s->prompt;
	n->form = p->form;
	n->local_cnt = n->blk_cnt = n->seq_cnt = 0;
	n->local = n->seq = NULL;
	n->isl_tok = 0;
	return p->form == KVP_PROMPT_TOKENS ? begin_tokens(s, p, use) : begin_hashes(s, p, use);
}

uint32_t kvp_sel_prompt_more(void *ctx, struct kvp_radix_query *q)
{
	struct kvp_selection *s = ctx;
	struct kvp_sel_prompt *n = &s->prompt;
	uint32_t left = n->blk_cnt - n->local_cnt;
	uint32_t want = left < CHUNK_BLK ? left : CHUNK_BLK;
	uint64_t *out = s->scratch_local.ptr, from = kvp_sel_clock(s);
	n->local_cnt += (uint32_t)kvp_hasher_local(&n->hasher, n->local_cnt, want, out + n->local_cnt);
	q->local = n->local;
	q->local_cnt = n->local_cnt;
	kvp_sel_hashed(s, from);
	return n->local_cnt;
}

void kvp_sel_hash_rest(struct kvp_selection *s)
{
	struct kvp_radix_query q;
	while (s->prompt.form == KVP_PROMPT_TOKENS && s->prompt.local_cnt < s->prompt.blk_cnt &&
		kvp_sel_prompt_more(s, &q))
		;
}

int kvp_sel_prompt_finish(struct kvp_selection *s, enum kvp_tristate assume_reuse)
{
	struct kvp_sel_prompt *n = &s->prompt;
	if (n->form != KVP_PROMPT_TOKENS)
		return 0;
	uint64_t *seq = kvp_sel_scratch(&s->scratch_seq, n->blk_cnt, sizeof(uint64_t));
	if (!seq)
		return kvp_sel_fail(s, 500, "out of memory");
	n->seq = seq;
	if (assume_reuse == KVP_NO) {
		/* Without reuse no two blocks are the same, so load never dedupes. */
		for (uint32_t i = 0; i < n->blk_cnt; i++)
			seq[i] = kvp_rng_next(&s->rng);
		return 0;
	}
	uint64_t *local = s->scratch_local.ptr, from = kvp_sel_clock(s);
	n->local_cnt += (uint32_t)kvp_hasher_local(
		&n->hasher, n->local_cnt, n->blk_cnt - n->local_cnt, local + n->local_cnt);
	kvp_hash_chain(NULL, local, n->blk_cnt, seq);
	kvp_sel_hashed(s, from);
	return 0;
}
