/* What selections find, summed up by partition; and what the flow counts as found. */
#include <stdlib.h>

#include "daemons/common/select_priv.h"
#include "tests/tap.h"

static void test_object(void)
{
	struct kvp_geom g = {.part_max = 3, .region_gen = 5}, other = g;
	struct kvp_hits h;
	uint64_t asked = 1, found = 1, bytes = kvp_hits_footprint(&g);
	void *mem = aligned_alloc(KVP_PAGE, bytes);
	memset(mem, 0, bytes);
	ok(kvp_hits_new(NULL, &g) == KVP_ERR_INVAL, "new refuses NULL");
	ok(kvp_hits_join(mem, &g, &h) == KVP_ERR_AGAIN, "join before new answers AGAIN");
	ok(kvp_hits_new(mem, &g) == KVP_OK && kvp_hits_join(mem, &g, &h) == KVP_OK, "new and join");
	other.region_gen = 6;
	ok(kvp_hits_join(mem, &other, &h) == KVP_ERR_LAYOUT, "join refuses another region's counts");
	kvp_hits_join(mem, &g, &h);
	kvp_hits_add(&h, 2, 10, 3);
	kvp_hits_add(&h, 2, 5, 0);
	kvp_hits_add(&h, 3, 5, 5); /* out of range: nothing */
	kvp_hits_get(&h, 2, &asked, &found);
	ok(asked == 15 && found == 3, "sums of a partition");
	kvp_hits_get(&h, 1, &asked, &found);
	ok(asked == 0 && found == 0, "others have none");
	kvp_hits_get(&h, 3, &asked, &found);
	ok(asked == 0 && found == 0, "nor has one out of range");
	kvp_hits_delete(mem);
	ok(kvp_hits_join(mem, &g, &h) == KVP_ERR_AGAIN, "join after delete answers AGAIN");
	free(mem);
}

static uint32_t tok[32];

static int ask(struct kvp_selection *s, uint32_t first, uint32_t cnt)
{
	struct kvp_select_request q;
	struct kvp_select_answer a;
	kvp_select_request_init(&q);
	q.model = q.group = (struct kvp_str){"m", 1};
	q.prompt.form = KVP_PROMPT_TOKENS;
	q.prompt.token = tok + first;
	q.prompt.token_cnt = cnt;
	return kvp_selection_select(s, &q, &a);
}

static void test_flow(void)
{
	struct kvp_local_cfg cfg = {.seed = 1};
	struct kvp_selection *s = kvp_selection_open_local(&cfg);
	struct kvp_local_worker w = {.worker_id = 1,
		.model = {"m", 1},
		.group = {"m", 1},
		.endpoint = {"e", 1},
		.block_size = 4,
		.size = 1};
	uint64_t local[2], block[2], asked, found;
	struct kvp_hasher h;
	for (uint32_t i = 0; i < 32; i++)
		tok[i] = i;
	kvp_selection_local_worker(s, &w);
	kvp_hasher_init(&h, tok, 8, 4, KVP_HASH_WINDOW_PLAIN, kvp_hash_seed(NULL, 0, NULL, 0));
	kvp_hasher_local(&h, 0, 2, local);
	kvp_hash_chain(NULL, local, 2, block);
	kvp_selection_local_stored(s, 1, 0, NULL, 2, local, block);
	ask(s, 0, 16);
	ask(s, 0, 4);
	ask(s, 4, 8);
	ask(s, 0, 3);
	kvp_hits_get(&s->region->hits, 0, &asked, &found);
	is_u64(asked, 0, "a few are not reported one by one");
	kvp_select_report(s);
	kvp_hits_get(&s->region->hits, 0, &asked, &found);
	ok(asked == 3 && found == 2, "two of three found their prefix; one had no whole block to look for");
	for (int i = 0; i < 32; i++)
		ask(s, 8, 8);
	kvp_hits_get(&s->region->hits, 0, &asked, &found);
	ok(asked == 35 && found == 2, "many are reported at once");
	kvp_selection_close(s);
}

int main(void)
{
	test_object();
	test_flow();
	return done();
}
