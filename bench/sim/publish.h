/* bench/sim/publish.h — a simulated engine's KV events: publisher and replay service as vLLM has them.
 *
 * Shape      a ZMQ PUB socket (frames: topic, sequence number as 8 bytes big-endian, msgpack batch), a ROUTER
 *            that answers [identity, "", start] with every kept batch from start on and an end marker, and a
 *            buffer of the last batches.
 * Truth      the buffer; sequence numbers start at 0 and grow by one a batch.
 * Writers    the loop's thread. Readers: the same. Ordering: none.
 * Lifetime   open to close. Crash: process-local; a restarted engine starts at 0 with an empty cache.
 * Proved by  tests/s_sim.t
 */
#ifndef KVP_BENCH_SIM_PUBLISH_H
#define KVP_BENCH_SIM_PUBLISH_H

#include <kvpick/err.h>
#include <stddef.h>
#include <stdint.h>
#include "ipc/loop.h"

enum kvp_publish_form { KVP_PUBLISH_ARRAY, KVP_PUBLISH_MAP }; /* events */
enum kvp_publish_replay {
	KVP_PUBLISH_REPLAY_TOPIC,
	KVP_PUBLISH_REPLAY_PLAIN
}; /* replies with a topic frame or not */

struct kvp_publish_cfg {
	const char *ip;
	uint16_t event_port, replay_port; /* 0 = any */
	const char *topic;
	enum kvp_publish_form form;
	enum kvp_publish_replay replay;
	uint32_t block_size_tok;
	uint32_t rank;	   /* data_parallel_rank of every batch */
	uint32_t kept_max; /* batches kept for replay, at least 1 */
	uint64_t kept_max_bytes;
};

struct kvp_publish;

/* kvp_publish_open binds both sockets; ctx is a ZMQ context. KVP_ERR_SYS: errno says why. */
int kvp_publish_open(
	struct kvp_loop *l, void *ctx, const struct kvp_publish_cfg *cfg, struct kvp_publish **out);
void kvp_publish_close(struct kvp_publish *p); /* NULL is fine */
uint16_t kvp_publish_event_port(const struct kvp_publish *p);
uint16_t kvp_publish_replay_port(const struct kvp_publish *p);

/* kvp_publish_stored and _removed add an event to the batch being built. parent NULL: the blocks start a
 * prompt. tok: cnt blocks of tokens. */
void kvp_publish_stored(struct kvp_publish *p, const uint64_t *parent, const uint64_t *key, uint32_t cnt,
	const uint32_t *tok);
void kvp_publish_removed(struct kvp_publish *p, const uint64_t *key, uint32_t cnt);
void kvp_publish_cleared(struct kvp_publish *p);
/* kvp_publish_flush sends the batch, if it holds an event, and keeps it for replay. at_s: its time stamp. */
void kvp_publish_flush(struct kvp_publish *p, double at_s);
#endif
