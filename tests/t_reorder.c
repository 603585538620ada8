/* t_reorder — the set of early frees and marks against a plain list. */
#include <stdlib.h>
#include <string.h>

#include <kvpick/err.h>

#include "daemons/peer/reorder.h"
#include "tests/tap.h"

#define MODEL_MAX 4096

static struct {
	struct kvp_reorder_key key;
	uint64_t at, val;
} model[MODEL_MAX]; /* oldest first */
static uint32_t model_cnt;
static uint64_t rnd;

static uint64_t next(void)
{
	rnd = rnd * 6364136223846793005u + 1442695040888963407u;
	return rnd >> 20;
}

static void model_drop(uint32_t i)
{
	memmove(&model[i], &model[i + 1], (--model_cnt - i) * sizeof(model[0]));
}

static uint64_t model_val; /* of the one taken last */

static int model_take(struct kvp_reorder_key k)
{
	for (uint32_t i = 0; i < model_cnt; i++)
		if (model[i].key.lo == k.lo && model[i].key.hi == k.hi) {
			model_val = model[i].val;
			model_drop(i);
			return 1;
		}
	return 0;
}

static int model_has(struct kvp_reorder_key k)
{
	for (uint32_t i = 0; i < model_cnt; i++)
		if (model[i].key.lo == k.lo && model[i].key.hi == k.hi)
			return 1;
	return 0;
}

/* Few keys, some of them in one bucket and equal in one half. */
static struct kvp_reorder_key some_key(uint32_t keys)
{
	uint64_t n = next() % keys;
	return (struct kvp_reorder_key){(n / 3) << (n % 2 ? 20 : 0), n};
}

static void against_model(uint32_t max, uint32_t keys, uint32_t steps)
{
	struct kvp_reorder s;
	uint64_t now = 0, evicted = 0;
	uint32_t bad = 0;
	model_cnt = 0;
	enum kvp_reorder_kind kind = max % 2 ? KVP_REORDER_VALUES : KVP_REORDER_KEYS;
	ok(kvp_reorder_init(&s, max, kind) == KVP_OK, "a set of %u", max);
	for (uint32_t i = 0; i < steps && bad < 5; i++) {
		struct kvp_reorder_key k = some_key(keys);
		now += next() % 3;
		switch (next() % 8) {
		case 0:
			bad += kvp_reorder_take(&s, k) != model_take(k);
			break;
		case 1: {
			uint64_t age = next() % 2000;
			uint32_t want = 0;
			for (; model_cnt && now - model[0].at > age; want++)
				model_drop(0);
			bad += kvp_reorder_expire(&s, now, age) != want;
			break;
		}
		case 2:
			bad += kvp_reorder_has(&s, k) != model_has(k);
			break;
		default:
			bad += kvp_reorder_put(&s, k, now) != KVP_OK;
			int was = model_take(k);
			if (!was && model_cnt == max) {
				model_drop(0);
				evicted++;
			}
			struct kvp_reorder_val *v = kvp_reorder_val(&s, k);
			bad += !v != !s.val || (v && v->a != (was ? model_val : 0));
			if (v)
				v->a = i;
			model[model_cnt].key = k;
			model[model_cnt].val = i;
			model[model_cnt++].at = now;
		}
		bad += s.cnt != model_cnt || s.evicted != evicted;
	}
	is_u64(bad, 0, "max %u, %u keys: as the model says", max, keys);
	for (uint32_t i = 0; i < model_cnt; i++)
		bad += !kvp_reorder_has(&s, model[i].key);
	is_u64(bad, 0, "and holds all of it");
	kvp_reorder_close(&s);
}

static void grows(void)
{
	struct kvp_reorder s;
	uint32_t n = 50000, there = 0;
	kvp_reorder_init(&s, n, KVP_REORDER_KEYS);
	for (uint32_t i = 0; i < n + 10; i++)
		kvp_reorder_put(&s, (struct kvp_reorder_key){i * 0x9e3779b97f4a7c15u, i}, i);
	for (uint32_t i = 0; i < n + 10; i++)
		there += (uint32_t)kvp_reorder_has(&s, (struct kvp_reorder_key){i * 0x9e3779b97f4a7c15u, i});
	ok(there == n && s.cnt == n && s.evicted == 10, "full: the oldest made room");
	ok(!kvp_reorder_has(&s, (struct kvp_reorder_key){9 * 0x9e3779b97f4a7c15u, 9}), "the tenth has gone");
	is_u64(kvp_reorder_expire(&s, n + 9, n), 0, "nobody is older than the age");
	is_u64(kvp_reorder_expire(&s, n + 9, n - 1), 0, "being as old is not older");
	is_u64(kvp_reorder_expire(&s, n + 9, n - 2), 1, "strictly older");
	is_u64(kvp_reorder_expire(&s, 1000000, 0), n - 1, "all in the end");
	kvp_reorder_close(&s);
}

int main(void)
{
	rnd = tap_seed(1);
	against_model(1, 3, 20000);
	against_model(7, 12, 50000);
	against_model(8, 12, 50000);
	against_model(300, 500, 100000);
	against_model(3001, 4000, 100000);
	grows();
	return done();
}
