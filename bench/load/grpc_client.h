/* bench/load/grpc_client.h - gRPC client for tests and load: many streams on one thread.
 *
 * Shape      a client holds one or more connections to one target and a completion queue; calls go round the
 *            connections. kvp_gc_next drives everything, so one thread is enough for thousands of streams.
 * Truth      the gRPC core. One thread per client; several clients may live in one process.
 * Ordering   events of a call: MESSAGE*, then exactly one STATUS. What is sent goes out in order of the
 *            calls.
 * Crash      process-local.
 * Proved by  tests/t_grpc_server.c.
 */
#ifndef KVP_BENCH_GRPC_CLIENT_H
#define KVP_BENCH_GRPC_CLIENT_H

#include <stddef.h>
#include <stdint.h>

struct kvp_gc;
struct kvp_gc_call; /* alive until the kvp_gc_next after its STATUS */

struct kvp_gc_cfg {
	const char *target;   /* "ip:port" or "unix:/path" */
	const char *root_pem; /* NULL: plaintext. Else TLS, this certificate is trusted as "localhost" */
	uint32_t conns;	      /* 0 = 1 */
};
int kvp_gc_open(struct kvp_gc **out, const struct kvp_gc_cfg *cfg); /* KVP_OK, KVP_ERR_SYS */
void kvp_gc_close(struct kvp_gc *c);				    /* cancels what is open; NULL is fine */

/* kvp_gc_call begins a stream; it fails by its STATUS event. deadline_ms 0: none. */
struct kvp_gc_call *kvp_gc_call(struct kvp_gc *c, const char *method, uint32_t deadline_ms, void *ctx);
void *kvp_gc_ctx(const struct kvp_gc_call *k);
void kvp_gc_send(struct kvp_gc_call *k, const void *data, size_t len);
void kvp_gc_half_close(struct kvp_gc_call *k); /* behind all messages */
void kvp_gc_cancel(struct kvp_gc_call *k);     /* reset */
/* kvp_gc_read_hold stops taking messages, so that the server meets a peer that does not read; go resumes. */
void kvp_gc_read_hold(struct kvp_gc_call *k);
void kvp_gc_read_go(struct kvp_gc_call *k);

enum kvp_gc_kind { KVP_GC_MESSAGE, KVP_GC_STATUS };
struct kvp_gc_event {
	enum kvp_gc_kind kind;
	struct kvp_gc_call *call;
	void *ctx;
	const uint8_t *data; /* MESSAGE; valid until the next kvp_gc_next */
	size_t len;
	int status;	  /* STATUS: gRPC code */
	const char *text; /* STATUS */
};
/* kvp_gc_next waits at most timeout_ms for an event: 1, or 0. */
int kvp_gc_next(struct kvp_gc *c, uint32_t timeout_ms, struct kvp_gc_event *ev);
#endif
