#include "shm/radix_priv.h"

#include <kvpick/point.h>
#include <string.h>

#define CNT(n) KVP_RADIX_CUT_CNT(n)
#define CLASS(n) KVP_RADIX_CUT_CLASS(n)

/* A list of 1 << class intervals takes that many pairs of words. */
static uint32_t order_of(uint32_t cls)
{
	return cls - 1;
}

void kvp_radix_low_note(struct kvp_radix_w *w, uint64_t blocks)
{
	kvp_st_rlx_u64(&w->pub->stat.low_blocks, blocks);
	uint32_t low = blocks != 0;
	if (w->pub->low != low)
		kvp_st_rel_u32(&w->pub->low, low); /* pairs with: radix_read.c kvp_radix_find */
}

int kvp_radix_low_holds(const struct kvp_radix_w *w, uint32_t holder, uint32_t pos)
{
	const struct kvp_radix_hdr_shm *h = kvp_radix_hdr_of(w, kvp_radix_rid_at(w, pos));
	const uint64_t *iv = kvp_radix_iv(w, h);
	uint32_t off = pos - h->base;
	for (uint32_t i = 0; i < CNT(h->low_n); i++)
		if (KVP_RADIX_IV_HOLDER(iv[i]) == holder && KVP_RADIX_IV_A(iv[i]) <= off &&
			off < KVP_RADIX_IV_B(iv[i]))
			return 1;
	return 0;
}

void kvp_radix_low_set(const struct kvp_radix_w *w, uint32_t rid, uint32_t holder, struct kvp_radix_set *s)
{
	const struct kvp_radix_hdr_shm *h = kvp_radix_hdr_of(w, rid);
	const uint64_t *iv = kvp_radix_iv(w, h);
	for (uint32_t i = 0; i < CNT(h->low_n); i++)
		if (KVP_RADIX_IV_HOLDER(iv[i]) == holder)
			kvp_radix_set_add(s, KVP_RADIX_IV_A(iv[i]), KVP_RADIX_IV_B(iv[i]));
}

uint32_t kvp_radix_low_end(const struct kvp_radix_w *w, const struct kvp_radix_hdr_shm *h)
{
	const uint64_t *iv = kvp_radix_iv(w, h);
	uint32_t end = 0;
	for (uint32_t i = 0; i < CNT(h->low_n); i++)
		end = KVP_RADIX_IV_B(iv[i]) > end ? KVP_RADIX_IV_B(iv[i]) : end;
	return end;
}

/* ---- lists ---- */

uint32_t kvp_radix_low_list(struct kvp_radix_w *w, const uint64_t *iv, uint32_t cnt, uint32_t *low_n)
{
	uint32_t cls = 1;
	while (1u << cls < cnt)
		cls++;
	if (cls > KVP_RADIX_IV_CLASS_MAX)
		return KVP_RADIX_NOPOS;
	uint32_t g = kvp_radix_buddy_get(&w->cutb, order_of(cls));
	if (g == KVP_RADIX_NOPOS)
		return KVP_RADIX_NOPOS;
	uint32_t ref = g * KVP_RADIX_CUT_GRAN;
	uint64_t *to = (uint64_t *)(void *)(w->cut + ref);
	for (uint32_t i = 0; i < cnt; i++)
		kvp_st_rlx_u64(&to[i], iv[i]);
	*low_n = cls << 16 | cnt;
	return ref;
}

void kvp_radix_low_free(struct kvp_radix_w *w, uint32_t low_ref, uint32_t low_n)
{
	if (CLASS(low_n))
		kvp_radix_buddy_put(&w->cutb, low_ref / KVP_RADIX_CUT_GRAN, 1u << order_of(CLASS(low_n)));
}

/* Names another list in the header, then frees the old one. */
static void list_swap(struct kvp_radix_w *w, uint32_t rid, uint32_t ref, uint32_t low_n)
{
	const struct kvp_radix_hdr_shm *h = kvp_radix_hdr_of(w, rid);
	uint32_t old_ref = h->low_ref, old_n = h->low_n;
	struct kvp_radix_hdr_shm *n = kvp_radix_img_load(w, w->tslot[rid]);
	n->low_ref = ref;
	n->low_n = low_n;
	KVP_POINT("radix:low_swap");
	kvp_radix_commit(w, w->tslot[rid]);
	kvp_radix_low_free(w, old_ref, old_n);
}

/* Dead entries at the end leave the list; a list without entries leaves the header. */
static void list_trim(struct kvp_radix_w *w, uint32_t rid)
{
	struct kvp_radix_hdr_shm *h = kvp_radix_hdr_of(w, rid);
	const uint64_t *iv = kvp_radix_iv(w, h);
	uint32_t n = h->low_n;
	while (CNT(n) && KVP_RADIX_IV_B(iv[CNT(n) - 1]) == 0)
		n--;
	if (n && CNT(n) == 0) {
		list_swap(w, rid, 0, 0);
	} else if (n != h->low_n) {
		kvp_st_rel_u32(&h->low_n, n);
		kvp_radix_mirror(w, h);
	}
}

static uint32_t dead_entry(const struct kvp_radix_w *w, const struct kvp_radix_hdr_shm *h)
{
	const uint64_t *iv = kvp_radix_iv(w, h);
	uint32_t i = 0;
	while (i < CNT(h->low_n) && KVP_RADIX_IV_B(iv[i]))
		i++;
	return i;
}

/* A list grows only when none of its entries is dead: the numbers of its entries stay. */
int kvp_radix_low_room(struct kvp_radix_w *w, uint32_t rid)
{
	const struct kvp_radix_hdr_shm *h = kvp_radix_hdr_of(w, rid);
	uint32_t cls = CLASS(h->low_n), cnt = CNT(h->low_n), low_n = 0;
	if (cls && (cnt < 1u << cls || dead_entry(w, h) < cnt))
		return KVP_OK;
	/* Asks for room for one more than there is now. */
	uint64_t all[KVP_RADIX_IV_MAX + 1];
	memcpy(all, kvp_radix_iv(w, h), sizeof(all[0]) * cnt);
	all[cnt] = 0;
	uint32_t ref = kvp_radix_low_list(w, all, cnt + 1, &low_n);
	if (ref == KVP_RADIX_NOPOS)
		return KVP_ERR_FULL;
	list_swap(w, rid, ref, low_n - 1);
	return KVP_OK;
}

static void entry_add(struct kvp_radix_w *w, uint32_t rid, uint64_t v)
{
	struct kvp_radix_hdr_shm *h = kvp_radix_hdr_of(w, rid);
	uint32_t i = dead_entry(w, h);
	kvp_st_rel_u64(&kvp_radix_iv(w, h)[i], v);
	if (i < CNT(h->low_n))
		return;
	kvp_st_rel_u32(&h->low_n, h->low_n + 1); /* pairs with: radix_low_read.c copy_low */
	kvp_radix_mirror(w, h);
}

/* ---- changes: each single store leaves something true ---- */

static int touches(uint64_t v, uint32_t holder, uint32_t a, uint32_t b)
{
	return KVP_RADIX_IV_HOLDER(v) == holder && KVP_RADIX_IV_B(v) && KVP_RADIX_IV_A(v) <= b &&
	       KVP_RADIX_IV_B(v) >= a;
}

/* Blocks of a..b-1 that an interval has. */
static uint32_t shared(uint64_t v, uint32_t a, uint32_t b)
{
	uint32_t lo = KVP_RADIX_IV_A(v) > a ? KVP_RADIX_IV_A(v) : a;
	uint32_t hi = KVP_RADIX_IV_B(v) < b ? KVP_RADIX_IV_B(v) : b;
	return hi > lo ? hi - lo : 0;
}

int kvp_radix_low_hold(
	struct kvp_radix_w *w, uint32_t rid, uint32_t holder, uint32_t a, uint32_t b, uint32_t *fresh)
{
	const struct kvp_radix_hdr_shm *h = kvp_radix_hdr_of(w, rid);
	uint64_t *iv = kvp_radix_iv(w, h);
	uint32_t cnt = CNT(h->low_n), first = cnt, lo = a, hi = b, have = 0;
	for (uint32_t i = 0; i < cnt; i++) {
		if (!touches(iv[i], holder, a, b))
			continue;
		first = first == cnt ? i : first;
		have += shared(iv[i], a, b);
		lo = KVP_RADIX_IV_A(iv[i]) < lo ? KVP_RADIX_IV_A(iv[i]) : lo;
		hi = KVP_RADIX_IV_B(iv[i]) > hi ? KVP_RADIX_IV_B(iv[i]) : hi;
	}
	*fresh = b - a - have;
	if (*fresh == 0)
		return KVP_OK;
	if (first == cnt) {
		if (kvp_radix_low_room(w, rid)) {
			*fresh = 0;
			return KVP_ERR_FULL;
		}
		entry_add(w, rid, KVP_RADIX_IV(holder, a, b));
	} else {
		kvp_st_rel_u64(&iv[first], KVP_RADIX_IV(holder, lo, hi));
		KVP_POINT("radix:low_joined");
		for (uint32_t i = first + 1; i < cnt; i++)
			if (touches(iv[i], holder, a, b))
				kvp_st_rel_u64(&iv[i], 0);
		list_trim(w, rid);
	}
	KVP_POINT("radix:low_held");
	w->slot[holder].blocks += *fresh;
	kvp_radix_low_note(w, w->pub->stat.low_blocks + *fresh);
	return KVP_OK;
}

/* What is left of entry i: its first piece in its place, further ones behind it. */
static void entry_cut(struct kvp_radix_w *w, uint32_t rid, uint32_t i, const struct kvp_radix_set *gone)
{
	uint64_t v = kvp_radix_iv(w, kvp_radix_hdr_of(w, rid))[i], left = 0;
	uint32_t holder = KVP_RADIX_IV_HOLDER(v), end = KVP_RADIX_IV_B(v);
	uint32_t a = kvp_radix_set_next(gone, KVP_RADIX_IV_A(v), end, 0);
	while (a < end) {
		uint32_t b = kvp_radix_set_next(gone, a, end, 1);
		if (!left)
			left = KVP_RADIX_IV(holder, a, b);
		else if (kvp_radix_low_room(w, rid) == KVP_OK)
			entry_add(w, rid, KVP_RADIX_IV(holder, a, b));
		a = kvp_radix_set_next(gone, b, end, 0);
	}
	KVP_POINT("radix:low_cut");
	if (left != v)
		kvp_st_rel_u64(&kvp_radix_iv(w, kvp_radix_hdr_of(w, rid))[i], left);
}

void kvp_radix_low_cut(struct kvp_radix_w *w, uint32_t rid, uint32_t holder, const struct kvp_radix_set *gone)
{
	uint32_t cnt = CNT(kvp_radix_hdr_of(w, rid)->low_n);
	for (uint32_t i = 0; i < cnt; i++) {
		uint64_t v = kvp_radix_iv(w, kvp_radix_hdr_of(w, rid))[i];
		if (KVP_RADIX_IV_HOLDER(v) == holder && KVP_RADIX_IV_B(v))
			entry_cut(w, rid, i, gone);
	}
	list_trim(w, rid);
}

uint32_t kvp_radix_low_tail(
	const struct kvp_radix_w *w, const struct kvp_radix_hdr_shm *h, uint32_t len, uint64_t *out)
{
	const uint64_t *iv = kvp_radix_iv(w, h);
	uint32_t cnt = 0;
	for (uint32_t i = 0; i < CNT(h->low_n); i++) {
		uint32_t a = KVP_RADIX_IV_A(iv[i]), b = KVP_RADIX_IV_B(iv[i]);
		if (b > len)
			out[cnt++] = KVP_RADIX_IV(KVP_RADIX_IV_HOLDER(iv[i]), a > len ? a - len : 0, b - len);
	}
	return cnt;
}

void kvp_radix_low_clip(struct kvp_radix_w *w, uint32_t rid)
{
	const struct kvp_radix_hdr_shm *h = kvp_radix_hdr_of(w, rid);
	uint64_t *iv = kvp_radix_iv(w, h);
	for (uint32_t i = 0; i < CNT(h->low_n); i++) {
		uint32_t who = KVP_RADIX_IV_HOLDER(iv[i]), a = KVP_RADIX_IV_A(iv[i]);
		uint32_t b = KVP_RADIX_IV_B(iv[i]) < h->len ? KVP_RADIX_IV_B(iv[i]) : h->len;
		uint64_t v = a < b ? KVP_RADIX_IV(who, a, b) : 0;
		if (iv[i] != v)
			kvp_st_rel_u64(&iv[i], v);
	}
	if (CLASS(h->low_n))
		list_trim(w, rid);
}

/* Joins entry i with the others of its holder that it touches. */
static void entry_join(const struct kvp_radix_hdr_shm *h, uint64_t *iv, uint32_t i)
{
	uint32_t who = KVP_RADIX_IV_HOLDER(iv[i]), a = KVP_RADIX_IV_A(iv[i]), b = KVP_RADIX_IV_B(iv[i]);
	for (uint32_t j = 0; j < CNT(h->low_n); j++) {
		if (j == i || !touches(iv[j], who, a, b))
			continue;
		a = KVP_RADIX_IV_A(iv[j]) < a ? KVP_RADIX_IV_A(iv[j]) : a;
		b = KVP_RADIX_IV_B(iv[j]) > b ? KVP_RADIX_IV_B(iv[j]) : b;
		kvp_st_rel_u64(&iv[i], KVP_RADIX_IV(who, a, b));
		kvp_st_rel_u64(&iv[j], 0);
		j = UINT32_MAX; /* what it is now may touch more: from the start */
	}
}

void kvp_radix_low_tidy(struct kvp_radix_w *w, uint32_t rid)
{
	const struct kvp_radix_hdr_shm *h = kvp_radix_hdr_of(w, rid);
	uint64_t *iv = kvp_radix_iv(w, h);
	for (uint32_t i = 0; i < CNT(h->low_n); i++) {
		uint32_t who = KVP_RADIX_IV_HOLDER(iv[i]);
		if (who < w->geo.slot_max || who >= w->geo.holder_max)
			kvp_st_rel_u64(&iv[i], 0);
		else if (KVP_RADIX_IV_B(iv[i]))
			entry_join(h, iv, i);
	}
	kvp_radix_low_clip(w, rid);
}
