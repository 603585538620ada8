/* ipc/grpc_priv.h - inside of the gRPC server: what its files share. */
#ifndef KVP_IPC_GRPC_PRIV_H
#define KVP_IPC_GRPC_PRIV_H

#include <grpc/grpc.h>
#include <grpc/grpc_security.h>
#include <grpc/slice.h>
#include <kvpick/atomic.h>
#include <pthread.h>

#include "ipc/grpc_server.h"
#include "ipc/tls_cert.h"

/* What a completion belongs to; the core hands its address back. */
enum kvp_grpc_op {
	KVP_GRPC_OP_ACCEPT,
	KVP_GRPC_OP_RECV,
	KVP_GRPC_OP_SEND,
	KVP_GRPC_OP_CLOSE,
	KVP_GRPC_OP_DOWN
};
struct kvp_grpc_tag {
	enum kvp_grpc_op op;
	void *owner; /* stream, or listener for DOWN */
};

/* An event under way from the core's thread to the io thread. Those of OPEN, HALF_CLOSE and CLOSED stand in
 * the stream, so that they can't fail. */
struct kvp_grpc_node {
	struct kvp_grpc_node *next;
	enum kvp_grpc_event_kind kind;
	struct kvp_grpc_stream *st;
	grpc_byte_buffer *bb; /* MESSAGE */
	uint8_t *flat;	      /* a copy in one piece, if somebody wanted it so */
	size_t len;
	struct iovec *part; /* MESSAGE: behind the node */
	uint32_t part_cnt;
};

struct kvp_grpc_out { /* a message that waits to be sent */
	struct kvp_grpc_out *next;
	grpc_byte_buffer *bb;
	size_t len;
};

enum kvp_grpc_faces {
	KVP_GRPC_VISIBLE,
	KVP_GRPC_SILENT
}; /* silent: refused, the io thread never hears of it */

struct kvp_grpc_listener {
	struct kvp_grpc *g;
	grpc_server *server;
	uint32_t idx, methods;
	uint64_t cert_seen; /* version that the core has; under its handshake lock */
	struct kvp_grpc_tag down;
};

struct kvp_grpc_stream {
	struct kvp_grpc *g;
	struct kvp_grpc_listener *listener;
	grpc_call *call;
	grpc_call_details details;
	grpc_metadata_array metadata;
	struct kvp_grpc_tag tag_accept, tag_recv, tag_send, tag_close;
	struct kvp_grpc_node open, half, closed_node;
	void *ctx;
	uint32_t method;
	enum kvp_grpc_faces faces;
	enum kvp_grpc_end end;		   /* set before closed_node is pushed */
	uint32_t refs;			   /* operations under way, and the io thread's */
	int cancelled;			   /* written by the core */
	struct kvp_grpc_stream *next_half; /* core's thread */
	grpc_byte_buffer *recv_bb;
	struct kvp_grpc_stream *next_held; /* io thread: its sends wait for the end of the batch */

	pthread_mutex_t mu; /* all below; never held across a call into the core */
	int reading;	    /* a receive is under way */
	int read_end;	    /* nothing more to receive */
	int sending;	    /* a send is under way; its owner also owns send_* */
	int initial_sent, finishing, status_given, closed;
	uint32_t inbox_cnt;
	size_t inbox_bytes;
	struct kvp_grpc_out *out, **out_tail;
	size_t unsent_bytes;
	grpc_status_code status;
	grpc_slice status_text;

	struct kvp_grpc_out *send_out; /* the message that is being sent */
	int send_status;	       /* the send carries the status */
};

struct kvp_grpc_counts { /* any thread, relaxed */
	uint64_t streams, conns, conn_accepted, conn_refused, stream_opened, stream_refused, stream_unknown,
		stream_finished, stream_cancelled, msg_received, msg_sent, bytes_received, bytes_sent,
		msg_compressed, read_paused, log_lines, listeners_lost, handshakes, cert_renewed;
};

struct kvp_grpc {
	struct kvp_grpc_cfg cfg;
	grpc_completion_queue *cq;
	grpc_resource_quota *quota;
	pthread_t thread;
	struct kvp_grpc_listener listener[KVP_GRPC_LISTEN_MAX];
	uint32_t listener_cnt;
	uint64_t holds;			/* listeners that are not down, and streams; any thread */
	int started, draining, drained; /* io thread */
	struct kvp_grpc_node drained_node;

	struct kvp_grpc_stream
		*halves; /* core's thread: half closes to be reported, or resets that look so */

	struct kvp_grpc_node *burst, *burst_oldest; /* core's thread: events not yet pushed, newest first */
	uint32_t burst_cnt;

	int event_fd;
	uint64_t pushed;	      /* newest first: a pointer to struct kvp_grpc_node, 0 = none */
	struct kvp_grpc_node *taken;  /* io thread, oldest first */
	struct kvp_grpc_node *in_use; /* io thread: data of the last event */

	int batch; /* io thread, all four: sends may wait */
	struct kvp_grpc_stream *held, **held_tail;
	uint32_t held_events; /* handed out since the first one waits */
	size_t held_bytes;

	pthread_mutex_t cert_mu;
	struct kvp_tls_pair cert;
	uint64_t cert_version; /* 0 = none yet */
	struct kvp_grpc_counts n;

	pthread_mutex_t conn_mu; /* connections under watch: grpc_conn.c */
	int conn_epoll;
	void *mutator;
	uint64_t log_second, log_in_second; /* under cert_mu */
};

static inline void kvp_grpc_count(uint64_t *c, uint64_t n)
{
	kvp_faa_rlx_u64(c, n);
}

/* grpc_stream.c */
void *kvp_grpc_core_thread(void *g);
int kvp_grpc_accept(struct kvp_grpc_listener *l);
void kvp_grpc_push(struct kvp_grpc *g, struct kvp_grpc_node *n);
/* grpc_conn.c: kvp_grpc_conn_arg adds the hook on accepted connections to a listener's arguments: 1, or 0
 * when this core is not known. reap looks which watched connections are gone. */
int kvp_grpc_conn_open(struct kvp_grpc *g);
int kvp_grpc_conn_arg(struct kvp_grpc *g, grpc_arg *arg);
void kvp_grpc_conn_reap(struct kvp_grpc *g);
void kvp_grpc_conn_close(struct kvp_grpc *g);
#endif
