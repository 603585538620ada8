#include "daemons/extproc/tokenizer_priv.h"

#include <kvpick/err.h>
#include <kvpick/hash.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int kvp_tkz_path(const struct kvp_http_url *u, const char *endpoint, char out[KVP_TKZ_PATH_MAX])
{
	int n = snprintf(out, KVP_TKZ_PATH_MAX, "%s%s", u->base, endpoint);
	return n < KVP_TKZ_PATH_MAX ? KVP_OK : KVP_ERR_LIMIT;
}

/* -- media -- */

static int mm_room(struct kvp_tkz_mm *m, uint32_t n)
{
	if (n <= m->cap)
		return 1;
	struct kvp_ask_mm *obj = realloc(m->obj, (size_t)n * 2 * sizeof(*obj));
	if (!obj)
		return 0;
	m->obj = obj;
	m->cap = n * 2;
	return 1;
}

/* One modality: its hashes and its places, which must be as many. Places count for the first one in any case.
 * Returns 0 if something does not fit. */
static int modality(struct kvp_tkz_mm *m, struct kvp_json_val hashes, struct kvp_json_val places,
	struct kvp_ask_tokens *t)
{
	struct kvp_json_iter h = kvp_json_each(hashes), at = kvp_json_each(places);
	int fits = kvp_json_len(hashes) == kvp_json_len(places) && !h.is_obj && !at.is_obj;
	while (!at.is_obj && kvp_json_next(&at)) {
		struct kvp_json_val v;
		struct kvp_ask_mm o = {0, 0, 0};
		const char *id;
		size_t id_len;
		if (kvp_json_get(at.val, "offset", &v) || kvp_json_u32(v, &o.off)) {
			t->mm_from = 0;
			return 0;
		}
		t->mm_from = o.off < t->mm_from ? o.off : t->mm_from;
		if (kvp_json_get(at.val, "length", &v) || kvp_json_u32(v, &o.len) || !o.len ||
			(uint64_t)o.off + o.len > t->token_cnt || !kvp_json_next(&h) ||
			kvp_json_str(h.val, &id, &id_len) || kvp_hash_mm_id(id, id_len, &o.hash) ||
			!mm_room(m, t->mm_cnt + 1)) {
			fits = 0;
			continue;
		}
		m->obj[t->mm_cnt++] = o;
	}
	return fits;
}

static int by_place(const void *a, const void *b)
{
	const struct kvp_ask_mm *x = a, *y = b;
	return x->off < y->off ? -1 : x->off > y->off;
}

void kvp_tkz_mm_read(struct kvp_tkz_mm *m, struct kvp_json_val answer, struct kvp_ask_tokens *t)
{
	struct kvp_json_val features, hashes, places, h;
	t->mm_form = KVP_ASK_MM_NONE;
	t->mm_cnt = 0;
	t->mm_from = UINT32_MAX;
	if (kvp_json_get(answer, "features", &features) || kvp_json_type(features) == KVP_JSON_NULL)
		return;
	t->mm_form = KVP_ASK_MM_UNKNOWN;
	if (kvp_json_get(features, "mm_placeholders", &places) || kvp_json_type(places) != KVP_JSON_OBJ) {
		t->mm_from = 0;
		return;
	}
	int fits = kvp_json_get(features, "mm_hashes", &hashes) == KVP_OK &&
		   kvp_json_len(hashes) == kvp_json_len(places);
	struct kvp_json_iter it = kvp_json_each(places);
	while (kvp_json_next(&it)) {
		if (!fits || kvp_json_getn(hashes, it.key, it.key_len, &h)) {
			fits = 0;
			h = it.val; /* only the places are looked at */
		}
		fits &= modality(m, h, it.val, t);
	}
	if (t->mm_cnt)
		qsort(m->obj, t->mm_cnt, sizeof(*m->obj), by_place);
	for (uint32_t i = 1; i < t->mm_cnt; i++)
		fits &= (uint64_t)m->obj[i - 1].off + m->obj[i - 1].len <= m->obj[i].off;
	t->mm = m->obj;
	if (fits)
		t->mm_form = t->mm_cnt ? KVP_ASK_MM_KNOWN : KVP_ASK_MM_NONE;
	else if (t->mm_from == UINT32_MAX)
		t->mm_from = 0;
}

void kvp_tkz_mm_free(struct kvp_tkz_mm *m)
{
	free(m->obj);
	memset(m, 0, sizeof(*m));
}
