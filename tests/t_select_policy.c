/* Selection policies in the selection flow: each role compares its ranks by its own, with what the flow knows
 * of the request (blocks of live prompts) and of the rank (capacity). A state per input in which policies,
 * or the presence of the input, decide. What the formulas give is tests/v_least_work.c and
 * tests/v_scheduling.c. */
#include <kvpick/selection.h>
#include "tests/tap.h"

#include <stdlib.h>
#include <string.h>

#define BLOCK 64
#define PROMPT_BLK 2000

static uint32_t *tok; /* two prompts of PROMPT_BLK blocks that share nothing */
static struct kvp_selection *s;

static struct kvp_str str(const char *text)
{
	return (struct kvp_str){text, strlen(text)};
}

static struct kvp_prompt prompt(uint32_t first_blk, uint32_t blk)
{
	return (struct kvp_prompt){.form = KVP_PROMPT_TOKENS,
		.token = tok + (size_t)first_blk * BLOCK,
		.token_cnt = blk * BLOCK,
		.eagle = KVP_UNSET};
}

static void add(uint64_t id, enum kvp_part_role role, uint64_t total_blk)
{
	struct kvp_local_worker w = {.worker_id = id,
		.role = role,
		.model = str("m"),
		.group = str("g"),
		.endpoint = str("http://w"),
		.block_size = BLOCK,
		.size = 1,
		.total_kv_blocks = total_blk};
	is_u64(kvp_selection_local_worker(s, &w), 201, "worker %llu", (unsigned long long)id);
}

static void book(const char *id, enum kvp_part_role role, uint64_t worker_id, struct kvp_prompt p)
{
	struct kvp_reserve_request q;
	struct kvp_select_answer a;
	kvp_reserve_request_init(&q);
	q.role = role;
	q.model = str("m");
	q.group = str("g");
	q.selection_id = str(id);
	q.worker_id = worker_id;
	q.prompt = p;
	if (role != KVP_PART_DECODE) {
		q.has_effective_prefill = KVP_YES;
		q.effective_prefill_tok = p.token_cnt;
	}
	is_u64(kvp_selection_reserve(s, &q, &a), 201, "booking %s", id);
}

static uint64_t pick(enum kvp_part_role role, struct kvp_prompt p)
{
	struct kvp_select_request q;
	struct kvp_select_answer a = {0};
	kvp_select_request_init(&q);
	q.role = role;
	q.model = str("m");
	q.group = str("g");
	q.prompt = p;
	if (role == KVP_PART_DECODE) { /* as for what another role prefilled */
		q.override.overlap_score_credit = 0;
		q.override.assume_kv_reuse = KVP_NO;
		q.override.track_prefill_tokens = KVP_NO;
	}
	return kvp_selection_select(s, &q, &a) == 200 ? a.worker_id : 0;
}

/* One rank has a prompt live that is to be prefilled yet, the other nothing: the reference goes away from it,
 * least_work to it, as the work is done there already. */
static void live_prompt(enum kvp_part_role role, enum kvp_local_policy policy, const char *name)
{
	uint64_t busy = 10 + (uint64_t)role * 10, idle = busy + 1;
	char id[2] = {(char)('a' + role), 0};
	add(busy, role, 0);
	add(idle, role, 0);
	book(id, role, busy, prompt(0, 1000));
	is_u64(pick(role, prompt(0, 1001)), policy == KVP_LOCAL_LEAST_WORK ? busy : idle,
		"%s: a live prompt, one block longer", name);
	is_u64(pick(role, prompt(PROMPT_BLK, 1001)), idle, "%s: another prompt goes to the idle rank", name);
	kvp_selection_free(s, str(id));
}

/* A nearly full decode rank with one request beside one with three, whose capacity nobody knows. */
static void full(void)
{
	struct kvp_local_worker w = {.worker_id = 40,
		.role = KVP_PART_DECODE,
		.model = str("m"),
		.group = str("g"),
		.endpoint = str("http://w"),
		.block_size = BLOCK,
		.size = 1};
	add(40, KVP_PART_DECODE, 0);
	add(41, KVP_PART_DECODE, 0);
	book("f", KVP_PART_DECODE, 40, prompt(0, 850));
	for (uint32_t i = 0; i < 3; i++)
		book((const char *[]){"g", "h", "i"}[i], KVP_PART_DECODE, 41, prompt(PROMPT_BLK + i, 1));
	is_u64(pick(KVP_PART_DECODE, prompt(1, 100)), 40, "one long request slows less than three");
	w.total_kv_blocks = 1000;
	is_u64(kvp_selection_local_worker_update(s, &w), 200, "its rank gets a capacity");
	is_u64(pick(KVP_PART_DECODE, prompt(1, 100)), 41, "which the request would come too near to");
	is_u64(pick(KVP_PART_DECODE, prompt(1, 50)), 40, "a shorter one would not");
}

static void with(const enum kvp_local_policy policy[KVP_PART_ROLE_CNT], const char *name)
{
	struct kvp_local_cfg cfg = {.seed = 7};
	memcpy(cfg.policy, policy, sizeof(cfg.policy));
	s = kvp_selection_open_local(&cfg);
	if (!ok(s != NULL, "%s: a node", name))
		return;
	live_prompt(KVP_PART_AGGREGATED, policy[KVP_PART_AGGREGATED], name);
	live_prompt(KVP_PART_PREFILL, policy[KVP_PART_PREFILL], name);
	if (policy[KVP_PART_DECODE] == KVP_LOCAL_LEAST_WORK)
		full();
	kvp_selection_close(s);
}

int main(void)
{
	static const enum kvp_local_policy one[][KVP_PART_ROLE_CNT] = {
		{KVP_LOCAL_REFERENCE, KVP_LOCAL_REFERENCE, KVP_LOCAL_REFERENCE},
		{KVP_LOCAL_LEAST_WORK, KVP_LOCAL_REFERENCE, KVP_LOCAL_LEAST_WORK},
		{KVP_LOCAL_REFERENCE, KVP_LOCAL_LEAST_WORK, KVP_LOCAL_REFERENCE}};
	tok = malloc(2 * PROMPT_BLK * BLOCK * sizeof(*tok));
	if (!ok(tok != NULL, "memory"))
		return done();
	for (uint32_t i = 0; i < 2 * PROMPT_BLK * BLOCK; i++)
		tok[i] = i;
	with(one[0], "reference everywhere");
	with(one[1], "least_work but for prefill");
	with(one[2], "least_work for prefill");
	free(tok);
	return done();
}
