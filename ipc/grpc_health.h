/* ipc/grpc_health.h - grpc.health.v1.Health on a kvp_grpc server: Check and Watch.
 *
 * Shape      a table of service names with their status, and the list of open Watch streams.
 * Truth      what kvp_grpc_health_set said last; a service not in the table is unknown.
 * Writers    io thread of the server: every function here.
 * Readers    the same.
 * Ordering   a Watch gets the status at its start and then every change, in order.
 * Bounds     KVP_GRPC_HEALTH_SERVICES names, KVP_GRPC_HEALTH_WATCHES open Watch streams (one more ends with
 *            RESOURCE_EXHAUSTED), requests of at most 1024 bytes. A Watch that leaves KVP_GRPC_HEALTH_UNREAD
 *            bytes unread is reset.
 * Lifetime   new to delete; delete it after the server, or when none of its streams is open.
 * Crash      process-local.
 * Proved by  tests/t_grpc_health.c.
 */
#ifndef KVP_IPC_GRPC_HEALTH_H
#define KVP_IPC_GRPC_HEALTH_H

#include "ipc/grpc_server.h"

#define KVP_GRPC_HEALTH_CHECK "/grpc.health.v1.Health/Check"
#define KVP_GRPC_HEALTH_WATCH "/grpc.health.v1.Health/Watch"
#define KVP_GRPC_HEALTH_SERVICES 16
#define KVP_GRPC_HEALTH_WATCHES 256
#define KVP_GRPC_HEALTH_NAME_MAX 128
#define KVP_GRPC_HEALTH_UNREAD 64

enum kvp_grpc_serving {
	KVP_GRPC_HEALTH_UNKNOWN = 0,
	KVP_GRPC_SERVING = 1,
	KVP_GRPC_NOT_SERVING = 2,
	KVP_GRPC_SERVICE_UNKNOWN = 3
};

struct kvp_grpc_health;
struct kvp_grpc_health *kvp_grpc_health_new(void); /* NULL: no memory */
void kvp_grpc_health_delete(struct kvp_grpc_health *h);

/* kvp_grpc_health_set adds a service or changes its status and tells the Watch streams of it. "" is the
 * server as a whole. KVP_ERR_FULL, KVP_ERR_INVAL (name too long). */
int kvp_grpc_health_set(struct kvp_grpc_health *h, const char *service, enum kvp_grpc_serving status);
enum kvp_grpc_serving kvp_grpc_health_get(const struct kvp_grpc_health *h, const char *service);

/* kvp_grpc_health_event handles an event of a stream of the two methods. The caller says by the event's
 * method index which one it is; it uses the stream's ctx. */
enum kvp_grpc_health_method { KVP_GRPC_HEALTH_IS_CHECK, KVP_GRPC_HEALTH_IS_WATCH };
void kvp_grpc_health_event(
	struct kvp_grpc_health *h, enum kvp_grpc_health_method m, const struct kvp_grpc_event *ev);

/* The two messages, for clients and tests. encode: bytes written, at most KVP_GRPC_HEALTH_NAME_MAX + 8.
 * decode: status, or KVP_ERR_PROTO. */
size_t kvp_grpc_health_request(const char *service, uint8_t *out, size_t max);
size_t kvp_grpc_health_reply(enum kvp_grpc_serving status, uint8_t *out, size_t max);
int kvp_grpc_health_reply_parse(const void *data, size_t len);
#endif
