/* select_and_reserve + prefill_complete + free in one process: token and hash form, 8 and 64 ranks.
 *
 * Usage: b_select [cycles]. One line a case: bench=select.cycle ranks= blocks= form= p50_ns= p99_ns=
 * cycles_s= p50 and p99 are of select_and_reserve alone. Half of each prompt is cached on some rank. */
#include <kvpick/clock.h>
#include <kvpick/selection.h>

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static uint32_t tok[4096];

static int by_value(const void *a, const void *b)
{
	uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
	return (x > y) - (x < y);
}

static void run(
	struct kvp_selection *s, uint32_t ranks, uint32_t blocks, enum kvp_prompt_form form, uint32_t cycles)
{
	static uint64_t local[1024], seq[1024];
	struct kvp_select_request q;
	struct kvp_select_answer a;
	struct kvp_hasher h;
	uint64_t *ns = calloc(cycles, sizeof(*ns)), failed = 0;
	memset(&q, 0, sizeof(q));
	q.model = q.group = (struct kvp_str){"default", 7};
	q.override = (struct kvp_override){NAN, NAN, NAN, NAN, KVP_UNSET, KVP_UNSET};
	q.prompt.form = form;
	q.prompt.eagle = KVP_UNSET;
	kvp_hasher_init(&h, tok, blocks * 4, 4, KVP_HASH_WINDOW_PLAIN, kvp_hash_seed(NULL, 0, NULL, 0));
	kvp_hasher_local(&h, 0, blocks, local);
	kvp_hash_chain(NULL, local, blocks, seq);
	q.prompt.token = tok;
	q.prompt.token_cnt = blocks * 4;
	q.prompt.block_hash = local;
	q.prompt.seq_hash = seq;
	q.prompt.block_hash_cnt = q.prompt.seq_hash_cnt = blocks;
	q.prompt.has_isl = KVP_YES;
	q.prompt.isl_tok = blocks * 4;
	uint64_t start_ns = kvp_clock_mono_ns();
	for (uint32_t i = 0; i < cycles; i++) {
		char id[32];
		q.selection_id = (struct kvp_str){id, (size_t)snprintf(id, sizeof(id), "b%u", i)};
		uint64_t t = kvp_clock_mono_ns();
		failed += kvp_selection_select_and_reserve(s, &q, &a) != 200;
		ns[i] = kvp_clock_mono_ns() - t;
		kvp_selection_prefill_complete(s, q.selection_id);
		kvp_selection_free(s, q.selection_id);
	}
	double sec = (double)(kvp_clock_mono_ns() - start_ns) * 1e-9;
	qsort(ns, cycles, sizeof(*ns), by_value);
	printf("bench=select.cycle ranks=%u blocks=%u form=%s cycles=%u failed=%" PRIu64 " p50_ns=%" PRIu64
	       " p99_ns=%" PRIu64 " cycles_s=%.0f\n",
		ranks, blocks, form == KVP_PROMPT_TOKENS ? "tokens" : "hashes", cycles, failed,
		ns[cycles / 2], ns[(uint64_t)cycles * 99 / 100], cycles / sec);
	free(ns);
}

static int add_worker(struct kvp_selection *s, uint64_t id)
{
	struct kvp_local_worker w = {.worker_id = id,
		.model = {"default", 7},
		.group = {"default", 7},
		.endpoint = {"http://w:8000", 13},
		.block_size = 4,
		.size = 1};
	return kvp_selection_local_worker(s, &w) == 201;
}

static void store(struct kvp_selection *s, uint64_t worker_id, uint32_t n)
{
	static uint64_t local[1024], ext[1024];
	struct kvp_hasher h;
	kvp_hasher_init(&h, tok, n * 4, 4, KVP_HASH_WINDOW_PLAIN, kvp_hash_seed(NULL, 0, NULL, 0));
	kvp_hasher_local(&h, 0, n, local);
	kvp_hash_chain(NULL, local, n, ext);
	kvp_selection_local_stored(s, worker_id, 0, NULL, n, local, ext);
}

int main(int argc, char **argv)
{
	uint32_t cycles = argc > 1 ? (uint32_t)strtoul(argv[1], NULL, 10) : 20000, ranks = 0;
	static const uint32_t rank_step[] = {8, 64, 1024}, block[] = {32, 512};
	struct kvp_local_cfg cfg = {.rank_max = 1024, .seed = 1};
	struct kvp_selection *s = kvp_selection_open_local(&cfg);
	if (!s)
		return 1;
	for (uint32_t i = 0; i < 4096; i++)
		tok[i] = i;
	for (int step = 0; step < 3; step++) {
		while (ranks < rank_step[step])
			if (!add_worker(s, ++ranks))
				return 1;
		store(s, ranks, 256);
		for (int b = 0; b < 2; b++)
			for (int f = KVP_PROMPT_TOKENS; f <= KVP_PROMPT_HASHES; f++)
				run(s, ranks, block[b], (enum kvp_prompt_form)f, cycles);
	}
	kvp_selection_close(s);
	return 0;
}
