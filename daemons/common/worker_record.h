/* daemons/common/worker_record.h — a worker as it is registered: JSON in, reasons, endpoints of its
 * ranks, JSON out.
 *
 * Shape      struct kvp_wrec: every member of a registration as it was sent; absent members say so.
 *            Strings and lists live in the record's own memory.
 * Truth      the stored WorkerRecord text (shm/catalogue.h); kvp_wrec_post reads it back, so a restarted
 *            indexer and a PATCH start from what clients were told.
 * Writers    the indexer (HTTP bodies); discovery builds bodies of the same form.
 * Ordering   none: process-local, no I/O, no shared state.
 * Lifetime   a record until kvp_wrec_free.
 * Crash      nothing survives the process.
 * Proved by  tests/t_worker_record.c
 */
#ifndef KVP_DAEMONS_WORKER_RECORD_H
#define KVP_DAEMONS_WORKER_RECORD_H

#include <stddef.h>
#include <stdint.h>

#include <kvpick/types.h>

#include "ipc/json_in.h"
#include "ipc/json_out.h"
#include "shm/catalogue.h"

#define KVP_WREC_ENDPOINT_MAX (KVP_CAT_NAME_MAX + 8) /* buffer of a derived endpoint, with the final 0 */
#define KVP_WREC_REASON_MAX 256 /* reasons listed; one more says how many were left out */

struct kvp_wrec_u32 {
	uint32_t is_set, v;
};
struct kvp_wrec_u64 {
	uint32_t is_set;
	uint64_t v;
};
struct kvp_wrec_f32 {
	uint32_t is_set;
	float v;
};
struct kvp_wrec_pair { /* of a map by rank (rank) or by name (key) */
	uint32_t rank;
	struct kvp_str key, val;
};
struct kvp_wrec_list { /* sorted, no duplicates */
	struct kvp_wrec_pair *item;
	uint32_t cnt;
};
struct kvp_wrec_chunk;

struct kvp_wrec {
	uint64_t worker_id;
	struct kvp_str model, group; /* always set */
	struct kvp_str endpoint, event_endpoint, replay_endpoint, stable_routing_id;
	struct kvp_wrec_list event_endpoints, replay_endpoints; /* rank -> endpoint */
	struct kvp_wrec_u32 block_size, start_rank, size, is_eagle;
	struct kvp_wrec_u64 max_num_batched_tokens, total_kv_blocks;
	struct kvp_wrec_list taints;	       /* key only */
	struct kvp_wrec_list topology_domains; /* name -> value */
	struct kvp_str kv_transfer_domain, kv_transfer_enforcement;
	struct kvp_wrec_f32 kv_transfer_preferred_weight;
	struct kvp_str hint_worker_type, event_source_mode;
	struct kvp_wrec_list hint_endpoints; /* rank -> endpoint */
	struct kvp_wrec_chunk *mem;
};

struct kvp_wrec_err {
	int status; /* 400: not JSON, or a string over its limit; 422: JSON of the wrong form */
	char text[256];
};

/* kvp_wrec_post reads a WorkerRequest (or a stored WorkerRecord) into *out. KVP_ERR_PROTO with *err
 * filled (the text names the member); then there is nothing to free. kvp_wrec_patch overlays a
 * WorkerPatch: members that are present and not null. On KVP_ERR_PROTO the record may be half changed:
 * discard it. Unknown members are ignored. */
int kvp_wrec_post(
	struct kvp_json *p, const char *json, size_t len, struct kvp_wrec *out, struct kvp_wrec_err *err);
int kvp_wrec_patch(
	struct kvp_json *p, const char *json, size_t len, struct kvp_wrec *rec, struct kvp_wrec_err *err);
void kvp_wrec_free(struct kvp_wrec *rec);
/* kvp_wrec_is_member: 1 for the name of a member of a WorkerRequest. */
int kvp_wrec_is_member(const char *name);

/* Ranks that the worker owns: [*start, *start + return); the end saturates at 2^32 - 1. */
uint32_t kvp_wrec_ranks(const struct kvp_wrec *rec, uint32_t *start);
/* kvp_wrec_event gives the KV-event endpoint of an owned rank, absent or empty if there is none. */
struct kvp_str kvp_wrec_event(const struct kvp_wrec *rec, uint32_t rank);
/* kvp_wrec_replay writes the replay endpoint of an owned rank, 0-terminated: the map's, else the single
 * one with its TCP port advanced by rank - start. KVP_ERR_NOTFOUND: it has none. KVP_ERR_LIMIT: the port
 * would exceed 65535. KVP_ERR_INVAL: the endpoint is malformed. */
int kvp_wrec_replay(const struct kvp_wrec *rec, uint32_t rank, char buf[KVP_WREC_ENDPOINT_MAX]);

/* Why a worker is not schedulable, in order. Growing; kvp_wrec_reason adds one (printf). */
struct kvp_wrec_reasons {
	char **text;
	uint32_t cnt;
	uint32_t left_out;
};
void kvp_wrec_reason(struct kvp_wrec_reasons *r, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
void kvp_wrec_reasons_free(struct kvp_wrec_reasons *r);

enum kvp_wrec_queueing { KVP_WREC_QUEUEING_OFF, KVP_WREC_QUEUEING_ON };
enum kvp_wrec_events { KVP_WREC_EVENTS_OFF, KVP_WREC_EVENTS_ON };
/* kvp_wrec_check adds the reasons that the record alone gives. kvp_wrec_check_listeners adds the one
 * reason for which its listeners can't be started ("reconciliation failed: ..."), if any. */
void kvp_wrec_check(const struct kvp_wrec *rec, enum kvp_wrec_queueing queueing, enum kvp_wrec_events events,
	struct kvp_wrec_reasons *r);
void kvp_wrec_check_listeners(const struct kvp_wrec *rec, struct kvp_wrec_reasons *r);

/* kvp_wrec_json writes the WorkerRecord. r may be NULL. */
void kvp_wrec_json(const struct kvp_wrec *rec, enum kvp_lifecycle life, const struct kvp_wrec_reasons *r,
	struct kvp_jw *w);
const char *kvp_lifecycle_name(enum kvp_lifecycle life);
#endif
