#include "shm/txn.h"

#include <kvpick/point.h>
#include <stdio.h>

#define HELP_MAX 100000 /* changes of others finished or watched before an attempt starts */
#define TEAR_MAX 64	/* loads of one word that other stores tear */
#define TURN(seq, rec) ((uint64_t)(seq) << 16 | (rec))
#define TURN_SEQ(t) ((t) >> 16)
#define TURN_REC(t) ((uint32_t)((t)&0xffffu)) /* 0 = at rest, else record + 1 */
#define REC_OWNER(o) (1ULL << 32 | (o))

static void store_all(
	const struct kvp_txn *t, uint64_t seq, const uint64_t *idx, const uint64_t *val, uint64_t cnt)
{
	for (uint64_t i = 0; i < cnt; i++) {
		if (idx[i] >= t->word_cnt)
			continue;
		struct kvp_u128 *w = &t->word[idx[i]], old = kvp_ld_u128(w);
		/* A larger number: this change is long complete. The same: another helper was here. */
		while (old.hi < seq && !kvp_cas_u128(w, &old, (struct kvp_u128){val[i], seq}))
			;
		KVP_POINT("txn:stored");
	}
}

/* help finishes the change that turn names, if it is still under way. */
static void help(const struct kvp_txn *t, uint64_t turn)
{
	uint64_t idx[KVP_TXN_WORDS], val[KVP_TXN_WORDS];
	uint32_t r = TURN_REC(turn) - 1;
	if (r >= KVP_TXN_REC)
		return;
	const struct kvp_txn_rec_shm *rec = &t->shm->rec[r];
	uint64_t cnt = kvp_ld_acq_u64(&rec->cnt);
	for (uint64_t i = 0; i < cnt && i < KVP_TXN_WORDS; i++) {
		idx[i] = kvp_ld_acq_u64(&rec->idx[i]);
		val[i] = kvp_ld_acq_u64(&rec->val[i]);
	}
	/* The record is rewritten only after the turn moved on. */
	if (kvp_ld_acq_u64(&t->shm->turn) != turn || cnt > KVP_TXN_WORDS)
		return;
	store_all(t, TURN_SEQ(turn), idx, val, cnt);
	kvp_cas_ar_u64(&t->shm->turn, turn, TURN(TURN_SEQ(turn), 0));
}

int kvp_txn_begin(const struct kvp_txn *t, struct kvp_txn_try *x)
{
	x->cnt = x->torn = 0;
	for (int i = 0; i < HELP_MAX; i++) {
		uint64_t turn = kvp_ld_acq_u64(&t->shm->turn);
		if (!TURN_REC(turn)) {
			x->seq = TURN_SEQ(turn);
			return KVP_OK;
		}
		help(t, turn);
	}
	x->torn = 1;
	return KVP_ERR_AGAIN;
}

int kvp_txn_look(const struct kvp_txn *t, struct kvp_txn_try *x)
{
	uint64_t turn = kvp_ld_acq_u64(&t->shm->turn);
	x->cnt = 0;
	x->seq = TURN_SEQ(turn);
	x->torn = TURN_REC(turn) != 0;
	return x->torn ? KVP_ERR_AGAIN : KVP_OK;
}

uint64_t kvp_txn_get(const struct kvp_txn *t, struct kvp_txn_try *x, uint64_t idx)
{
	for (uint32_t i = x->cnt; i-- > 0;)
		if (x->idx[i] == idx)
			return x->val[i];
	for (int i = 0; i < TEAR_MAX && idx < t->word_cnt; i++) {
		uint64_t stamp = kvp_ld_acq_u64(&t->word[idx].hi);
		uint64_t val = kvp_ld_acq_u64(&t->word[idx].lo);
		if (kvp_ld_acq_u64(&t->word[idx].hi) != stamp)
			continue;
		if (stamp <= x->seq)
			return val;
		break;
	}
	x->torn = 1;
	return 0;
}

void kvp_txn_set(const struct kvp_txn *t, struct kvp_txn_try *x, uint64_t idx, uint64_t val)
{
	if (x->torn)
		return; /* an index computed from torn values may be anything */
	KVP_ASSERT(idx < t->word_cnt);
	uint32_t i = 0;
	while (i < x->cnt && x->idx[i] != idx)
		i++;
	KVP_ASSERT(i < KVP_TXN_WORDS);
	x->cnt += i == x->cnt;
	x->idx[i] = idx;
	x->val[i] = val;
}

static struct kvp_txn_rec_shm *rec_take(const struct kvp_txn *t, kvp_owner owner, uint32_t *at)
{
	for (uint32_t i = 0; i < KVP_TXN_REC; i++) {
		*at = (KVP_OWNER_SLOT(owner) + i) % KVP_TXN_REC;
		struct kvp_txn_rec_shm *r = &t->shm->rec[*at];
		if (kvp_ld_rlx_u64(&r->owner) == 0 && kvp_cas_ar_u64(&r->owner, 0, REC_OWNER(owner)))
			return r;
	}
	return NULL;
}

int kvp_txn_commit(const struct kvp_txn *t, struct kvp_txn_try *x, kvp_owner owner)
{
	uint32_t at;
	if (x->torn)
		return KVP_ERR_AGAIN;
	if (x->cnt == 0)
		return KVP_OK;
	if (kvp_ld_acq_u64(&t->shm->turn) != TURN(x->seq, 0))
		return KVP_ERR_AGAIN;
	struct kvp_txn_rec_shm *r = rec_take(t, owner, &at);
	if (!r)
		return KVP_ERR_AGAIN;
	KVP_POINT("txn:taken");
	for (uint32_t i = 0; i < x->cnt; i++) {
		kvp_st_rel_u64(&r->idx[i], x->idx[i]);
		kvp_st_rel_u64(&r->val[i], x->val[i]);
	}
	kvp_st_rel_u64(&r->cnt, x->cnt);
	KVP_POINT("txn:noted");
	/* pairs with: the load of the turn word in begin, look and help */
	int rc = KVP_ERR_AGAIN;
	if (kvp_cas_ar_u64(&t->shm->turn, TURN(x->seq, 0), TURN(x->seq + 1, at + 1))) {
		x->seq++;
		KVP_POINT("txn:published");
		store_all(t, x->seq, x->idx, x->val, x->cnt);
		kvp_cas_ar_u64(&t->shm->turn, TURN(x->seq, at + 1), TURN(x->seq, 0));
		KVP_POINT("txn:done");
		rc = KVP_OK;
	}
	kvp_st_rel_u64(&r->owner, 0);
	return rc;
}

uint64_t kvp_txn_stamp(const struct kvp_txn *t, uint64_t idx)
{
	return idx < t->word_cnt ? kvp_ld_acq_u64(&t->word[idx].hi) : 0;
}

void kvp_txn_own_set(const struct kvp_txn *t, uint64_t idx, uint64_t val, uint64_t seq)
{
	KVP_ASSERT(idx < t->word_cnt);
	/* Number first: from then on no late helper of an earlier change can store. */
	kvp_st_rel_u64(&t->word[idx].hi, seq);
	kvp_fence_sc();
	kvp_st_rel_u64(&t->word[idx].lo, val);
}

uint32_t kvp_txn_sweep_owner(const struct kvp_txn *t, kvp_owner dead)
{
	struct kvp_txn_try x;
	uint32_t cnt = 0;
	if (kvp_txn_begin(t, &x))
		return 0;
	for (uint32_t i = 0; i < KVP_TXN_REC; i++)
		if (kvp_ld_acq_u64(&t->shm->rec[i].owner) == REC_OWNER(dead))
			cnt += kvp_cas_ar_u64(&t->shm->rec[i].owner, REC_OWNER(dead), 0);
	return cnt;
}

uint64_t kvp_txn_check(const struct kvp_txn *t)
{
	uint64_t faults = TURN_REC(kvp_ld_acq_u64(&t->shm->turn)) != 0;
	for (uint32_t i = 0; i < KVP_TXN_REC; i++)
		faults += kvp_ld_acq_u64(&t->shm->rec[i].owner) != 0;
	if (faults)
		fprintf(stderr, "txn: %llu records taken or changes open\n", (unsigned long long)faults);
	return faults;
}
