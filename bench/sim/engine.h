/* bench/sim/engine.h — the model of one inference engine: prefix cache, continuous batching, clock. No I/O.
 *
 * Shape      a block-granular prefix cache (node per cached prompt block, hash table, recency list) and two
 *            request lists: waiting (first come, first served) and running. Time is virtual nanoseconds that
 *            the caller passes in and that never run backwards.
 * Clock      the engine works in steps. A step that starts at t takes in every request that arrived at or
 *            before t, and lasts base + batch tokens / rate + per decoding request + per live KV token.
 *            Each step gives a decoding request one token and shares chunk_tok prompt tokens between the
 *            prefilling requests in order of admission; the step that ends a prefill yields the first token.
 * Cache      a request is admitted when its blocks (prompt and output) fit after evicting unpinned blocks;
 *            all of them stay pinned until it ends. The hit is the longest cached run of whole prompt blocks,
 *            never the whole prompt (one token must be computed). Prompt blocks enter the cache at the end of
 *            the step that computed them; output blocks and the partial last block are private.
 * Truth      this object alone. Writers, readers: the owning thread. Ordering: none needed.
 * Crash      process-local; gone with the process.
 * Proved by  tests/t_sim_engine.c
 */
#ifndef KVP_BENCH_SIM_ENGINE_H
#define KVP_BENCH_SIM_ENGINE_H

#include <kvpick/err.h>
#include <stddef.h>
#include <stdint.h>

#define KVP_SIM_NEVER UINT64_MAX

struct kvp_sim_cfg {
	uint32_t block_size_tok; /* tokens a block, >= 1 */
	uint32_t block_max;	 /* capacity of the cache in blocks, 1..2^28 */
	uint32_t chunk_tok;	 /* prompt tokens a step, >= 1 */
	uint32_t running_max;	 /* requests in a batch; 0 = as many as fit the cache */
	uint64_t step_ns;	 /* fixed part of a step */
	uint64_t rate_tok_s;	 /* batch tokens per second, >= 1 */
	uint64_t decode_ns;	 /* added per decoding request */
	uint64_t kv_tok_ns;	 /* added per live KV token */
};

struct kvp_sim_req {
	void *user;	      /* the caller's, from kvp_sim_submit */
	uint32_t prompt_tok;  /* length of the prompt */
	uint32_t out_max_tok; /* tokens to generate */
	uint32_t cached_tok;  /* prompt tokens found in the cache at admission */
	uint32_t out_tok;     /* tokens generated so far */
	uint64_t arrival_ns;  /* when it was submitted */
	uint64_t first_ns;    /* end of the step that yielded the first token; 0 before */
	uint64_t finish_ns;   /* end of the step that yielded the last token; 0 before */
	uint32_t remote_tok;  /* prompt tokens whose KV another engine gives; set right after submit */
	uint64_t *key;	      /* hashes of the whole prompt blocks, chained from block 0 */
	uint32_t key_cnt;
	/* the engine's own */
	uint32_t pinned_cnt;   /* leading keys that are in the cache, pinned by this request */
	uint32_t private_blk;  /* blocks reserved and not (yet) in the cache */
	uint32_t computed_tok; /* prompt tokens computed or found in the cache */
	uint32_t sched_tok;    /* tokens of the step under way */
	uint32_t *node;	       /* cache node of each pinned key */
	struct kvp_sim_req *prev, *next;
};

/* What the engine tells its caller, from within kvp_sim_advance. Members may be NULL. The caller must not
 * call back into the engine. at_ns is the virtual end of the step (removed: its start). */
struct kvp_sim_sink {
	void *ctx;
	/* keys [first, first + cnt) of the request have entered the cache; their parent is key[first - 1] */
	void (*stored)(void *ctx, const struct kvp_sim_req *r, uint32_t first, uint32_t cnt, uint64_t at_ns);
	/* these blocks were evicted, leaves first */
	void (*removed)(void *ctx, const uint64_t *key, uint32_t cnt, uint64_t at_ns);
	/* one token; r->out_tok counts it already, 1 = the first */
	void (*token)(void *ctx, const struct kvp_sim_req *r, uint64_t at_ns);
	/* all tokens are out; the request is freed after the call */
	void (*finished)(void *ctx, const struct kvp_sim_req *r, uint64_t at_ns);
};

struct kvp_sim_load {
	uint32_t waiting_cnt, running_cnt;
	uint32_t cached_blk;  /* blocks in the cache, pinned or not */
	uint32_t pinned_blk;  /* of those, pinned by running requests */
	uint32_t private_blk; /* reserved outside the cache */
	uint64_t step_cnt;
	uint64_t prefill_tok; /* prompt tokens computed since the start */
	uint64_t evicted_blk; /* blocks evicted since the start */
};

struct kvp_sim_engine;

/* kvp_sim_cfg_default fills in the reference policy's engine: 2000 blocks of 512 tokens, steps of 10 ms +
 * batch tokens / 16 k per second + 0.1 ms per decoding request + 30 ns per live KV token, chunks of 8192. */
void kvp_sim_cfg_default(struct kvp_sim_cfg *cfg);

/* kvp_sim_open makes an engine with an empty cache at time 0. The sink is copied.
 * return  NULL for a value out of range or when memory is short. */
struct kvp_sim_engine *kvp_sim_open(const struct kvp_sim_cfg *cfg, const struct kvp_sim_sink *sink);
/* kvp_sim_close frees the engine and every request in it, without telling the sink. */
void kvp_sim_close(struct kvp_sim_engine *e);

/* kvp_sim_submit adds a request that arrives at now_ns; the caller has advanced the engine to now_ns.
 *
 * key      chained hashes of the whole prompt blocks, copied; key_cnt = prompt_tok / block size
 * out_tok  tokens to generate; 0 counts as 1
 * errors   KVP_ERR_LIMIT: it can never fit the cache. KVP_ERR_INVAL: key_cnt, an empty prompt, or time
 *          running backwards. KVP_ERR_SYS: memory. */
int kvp_sim_submit(struct kvp_sim_engine *e, uint64_t now_ns, const uint64_t *key, uint32_t key_cnt,
	uint32_t prompt_tok, uint32_t out_tok, void *user, struct kvp_sim_req **out);

/* kvp_sim_abort forgets a request that has not finished; its blocks stay cached, unpinned. The sink hears
 * nothing. Not from within the sink. */
void kvp_sim_abort(struct kvp_sim_engine *e, struct kvp_sim_req *r);

/* kvp_sim_advance plays every step that ends at or before until_ns and starts those that begin before it. */
void kvp_sim_advance(struct kvp_sim_engine *e, uint64_t until_ns);

/* kvp_sim_next_ns starts the step that is due (requests of the same instant have been submitted by now) and
 * returns its end, or KVP_SIM_NEVER when the engine is idle. */
uint64_t kvp_sim_next_ns(struct kvp_sim_engine *e);

/* kvp_sim_clear empties the cache; the sink hears nothing. KVP_ERR_AGAIN while requests run. */
int kvp_sim_clear(struct kvp_sim_engine *e);

/* kvp_sim_match is the number of leading keys that are in the cache now. */
uint32_t kvp_sim_match(const struct kvp_sim_engine *e, const uint64_t *key, uint32_t key_cnt);

void kvp_sim_load(const struct kvp_sim_engine *e, struct kvp_sim_load *out);

/* kvp_sim_check recounts everything from the lists: number of faults. */
uint32_t kvp_sim_check(const struct kvp_sim_engine *e);
#endif
