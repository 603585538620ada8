/* daemons/common/dump_serve.h — dumps under way to HTTP clients: what the Selection API and the dump port
 * share.
 *
 * Shape      a list of dumps, each with its request and its place in the text (daemons/common/dump.h). A dump
 *            goes on when its client has read or the indexer has answered, a few pieces at a time, so that
 *            other requests wait for fractions of a millisecond.
 * Truth      this memory; the text comes from the indexer page by page.
 * Writers    the loop's thread.
 * Limits     KVP_DUMPS_MAX at once, half a megabyte each at most. With a limit of bytes the text is made
 *            twice: counted, then sent. A client that doesn't read is cut by the server (its
 *            read_timeout_ms).
 * Lifetime   the owner's; kvp_dumps_close ends all, their requests must be dead by then.
 * Crash      the client sees its connection end in the middle of a chunked answer.
 * Proved by  tests/s_dump.t, tests/s_recovery.t
 */
#ifndef KVP_DAEMONS_DUMP_SERVE_H
#define KVP_DAEMONS_DUMP_SERVE_H

#include "daemons/common/dump.h"
#include "ipc/http_server.h"

#define KVP_DUMPS_MAX 16

struct kvp_dump_send;
struct kvp_dumps {
	struct kvp_region *region;
	kvp_owner owner;
	struct kvp_ctr_column_shm *ctr;
	int tag; /* first member of what a request's `user` points to meanwhile */
	/* How this port answers with an error, and what it says of a text that could not be made. */
	void (*refuse)(void *ctx, struct kvp_http_req *r, int status, const char *text);
	void *ctx;
	int failed_status;
	const char *failed_text;
	struct kvp_dump_send *first;
};

/* kvp_dumps_query reads role and max_bytes (0 = any): 0, or -1 when it was answered 400. */
int kvp_dumps_query(
	struct kvp_dumps *d, struct kvp_http_req *r, enum kvp_part_role *role, uint64_t *max_bytes);
/* kvp_dumps_begin answers the request, now or later: 503 until the index is recovered, or when there are too
 * many. */
void kvp_dumps_begin(
	struct kvp_dumps *d, struct kvp_http_req *r, enum kvp_part_role role, uint64_t max_bytes);
/* kvp_dumps_poll goes on with the dumps that can; 1 if there was one. kvp_dumps_drop: the client of r has
 * gone. */
int kvp_dumps_poll(struct kvp_dumps *d);
void kvp_dumps_drop(struct kvp_dumps *d, struct kvp_http_req *r);
void kvp_dumps_close(struct kvp_dumps *d);
#endif
