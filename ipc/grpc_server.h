/* ipc/grpc_server.h - gRPC over HTTP/2 for one thread: listeners, streams, bytes in, bytes out.
 *
 * Shape      one struct kvp_grpc a process: listeners (TCP, TLS, Unix socket), each with the methods that it
 *            serves, and one thread of its own that waits for the gRPC core. The user is one other thread
 *            (the io thread): it watches kvp_grpc_fd and takes events with kvp_grpc_next. Every method is
 *            taken as a bidirectional stream of messages; a unary call is one message each way.
 * Truth      the gRPC core. Nothing of it shows in this header, so that another HTTP/2 server can replace it.
 * Writers    io thread: every function here, unless its comment says otherwise. Core thread: the events.
 * Readers    the io thread.
 * Ordering   events of a stream: OPEN, MESSAGE*, at most one HALF_CLOSE, exactly one CLOSED, which is the
 *            last. A reset may, rarely, show as a HALF_CLOSE directly before its CLOSED (CANCELLED). CLOSED
 *            comes as soon as the stream is over for whatever reason, also while messages wait
 *            to be sent. What the io thread sends goes out in the order of its calls. No lock is held while
 *            the core is called.
 * Bounds     per stream: KVP_GRPC_INBOX_MSG messages or KVP_GRPC_INBOX_BYTES that the io thread has not taken
 *            yet, and reading pauses while more than KVP_GRPC_OUTBOX_BYTES wait to be sent, so a peer that
 *            does not read can't make us buffer its own bytes. Streams: stream_max; one over it ends with
 *            RESOURCE_EXHAUSTED. Connections: conn_max; one over it is closed at once (only with the core
 *            that kvp_grpc_caps_connections knows). TLS handshakes: handshake_ms. Memory of the
 *            core's buffers: memory_bytes. All refusals are counted.
 * Files      a connection takes two descriptors. When a process has none left the core gives its listener up
 *            for good (listeners_lost): raise RLIMIT_NOFILE before kvp_grpc_new, which lowers conn_max to a
 *            third of it, and leave the process (exit code 75) when listeners_lost is not 0.
 * Lifetime   new, listen, start, ..., drain, delete. Not usable across fork; a child process execs first.
 * Crash      process-local: the kernel closes the connections, the peers see their streams fail. A Unix
 *            socket's file stays and is replaced by the next listener on its path.
 * Proved by  tests/t_grpc_server.c (TCP, Unix socket, TLS, two processes on one port), tests/t_grpc_limits.c.
 */
#ifndef KVP_IPC_GRPC_SERVER_H
#define KVP_IPC_GRPC_SERVER_H

#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

#define KVP_GRPC_METHOD_MAX 8
#define KVP_GRPC_LISTEN_MAX 16
#define KVP_GRPC_INBOX_MSG 16
#define KVP_GRPC_INBOX_BYTES (256u << 10)
#define KVP_GRPC_OUTBOX_BYTES (512u << 10)

/* Status codes of gRPC that a stream may end with. */
enum kvp_grpc_status {
	KVP_GRPC_OK = 0,
	KVP_GRPC_CANCELLED = 1,
	KVP_GRPC_UNKNOWN = 2,
	KVP_GRPC_INVALID_ARGUMENT = 3,
	KVP_GRPC_NOT_FOUND = 5,
	KVP_GRPC_RESOURCE_EXHAUSTED = 8,
	KVP_GRPC_FAILED_PRECONDITION = 9,
	KVP_GRPC_UNIMPLEMENTED = 12,
	KVP_GRPC_INTERNAL = 13,
	KVP_GRPC_UNAVAILABLE = 14
};

struct kvp_grpc;
struct kvp_grpc_stream; /* alive from OPEN until the call of kvp_grpc_next after CLOSED */

struct kvp_grpc_cfg {		    /* zero the struct; 0 takes the default in brackets */
	const char *const *method;  /* full paths, "/package.Service/Method"; constant text that stays */
	uint32_t method_cnt;	    /* 1 .. KVP_GRPC_METHOD_MAX */
	uint32_t message_max_bytes; /* [4 MiB] a longer message ends its stream with RESOURCE_EXHAUSTED */
	uint32_t stream_max;	    /* [65536] open streams, all connections */
	uint32_t conn_stream_max;   /* [4096] streams of one connection, announced to the peer */
	uint32_t conn_max;	    /* [1024] connections, all listeners */
	uint32_t handshake_ms;	    /* [10000] until TLS and the HTTP/2 preface are through */
	/* [30000] silence after which the peer is pinged; 10 s later it is dead */
	uint32_t keepalive_ms;
	uint64_t memory_bytes; /* [1 GiB] core's buffers; near it new connections are refused */
	/* Lines of the core's own error log, each once; called on any thread. NULL: only counted. */
	void (*log)(void *ctx, const char *text);
	void *log_ctx;
};

enum kvp_grpc_security { KVP_GRPC_PLAINTEXT, KVP_GRPC_TLS };
struct kvp_grpc_listen {
	const char *addr; /* "ip:port", "[v6]:port" (port 0: any) or "unix:/path" (mode 0600, no TLS) */
	enum kvp_grpc_security security;
	uint32_t methods; /* bit i: method i is served here; other methods get UNIMPLEMENTED */
};

struct kvp_grpc_stat {				/* since new; conns and streams are gauges */
	uint64_t conn_max;			/* in effect */
	uint64_t listeners_lost;		/* see Files above */
	uint64_t conns, streams;		/* open now */
	uint64_t conn_accepted, conn_refused;	/* refused: over conn_max */
	uint64_t stream_opened, stream_refused; /* refused: over stream_max */
	uint64_t stream_unknown;		/* no such method here */
	uint64_t stream_finished;		/* ended with the status that we gave */
	uint64_t stream_cancelled;		/* ended in any other way */
	uint64_t msg_received, msg_sent;
	uint64_t bytes_received, bytes_sent; /* of messages */
	uint64_t msg_compressed;	     /* refused: nobody agreed on compression */
	uint64_t read_paused;		     /* times that a bound above stopped reading a stream */
	uint64_t log_lines;		     /* error lines of the core */
	uint64_t handshakes;		     /* TLS handshakes begun */
	uint64_t cert_renewed;
};

/* kvp_grpc_new makes the server; nothing listens yet. KVP_ERR_INVAL, KVP_ERR_SYS. */
int kvp_grpc_new(struct kvp_grpc **out, const struct kvp_grpc_cfg *cfg);

/* kvp_grpc_cert_set gives the certificate chain and the private key (PEM) that TLS handshakes from now on
 * use; open connections keep theirs. Both are copied, and checked first: KVP_ERR_INVAL (not a pair) leaves
 * the earlier pair in use. To be called before the first TLS listener is added, and at any time later. */
int kvp_grpc_cert_set(struct kvp_grpc *g, const char *cert_pem, const char *key_pem);

/* kvp_grpc_listen_add binds and listens; *port (may be NULL) becomes the real TCP port, 0 for a Unix socket.
 * TCP ports are shared with other processes of the same user that listen the same way (SO_REUSEPORT). Before
 * start only. KVP_ERR_INVAL: not an address, or TLS without certificate or on a Unix socket; KVP_ERR_FULL;
 * KVP_ERR_SYS: the address can't be bound. */
int kvp_grpc_listen_add(struct kvp_grpc *g, const struct kvp_grpc_listen *l, uint16_t *port);

/* kvp_grpc_start accepts connections from now on. KVP_ERR_SYS: no thread. */
int kvp_grpc_start(struct kvp_grpc *g);

/* kvp_grpc_fd: descriptor that is readable while kvp_grpc_next may have events (level-triggered). */
int kvp_grpc_fd(const struct kvp_grpc *g);

enum kvp_grpc_event_kind {
	KVP_GRPC_OPEN,	     /* new stream of the given method */
	KVP_GRPC_MESSAGE,    /* data, len: one message, len may be 0 */
	KVP_GRPC_HALF_CLOSE, /* the peer sends no more messages; we still may */
	KVP_GRPC_CLOSED,     /* stream over (end says how); nothing can be sent, last event of the stream */
	KVP_GRPC_DRAINED     /* no stream and no listener is left after kvp_grpc_drain; stream is NULL */
};
enum kvp_grpc_end {
	KVP_GRPC_END_FINISHED, /* everything queued and our status went out */
	KVP_GRPC_END_CANCELLED /* reset by the peer, connection lost, aborted, or a message was refused */
};
struct kvp_grpc_event {
	enum kvp_grpc_event_kind kind;
	enum kvp_grpc_end end; /* CLOSED */
	struct kvp_grpc_stream *stream;
	uint32_t method;     /* index into cfg.method */
	uint32_t listener;   /* index in order of listen_add */
	const uint8_t *data; /* MESSAGE; never NULL, but for kvp_grpc_next_parts */
	size_t len;
	const struct iovec *part; /* MESSAGE: the same bytes as the core read them; none when len is 0 */
	uint32_t part_cnt;
};
/* kvp_grpc_next takes the next event: 1, or 0 when there is none (and the descriptor is no longer readable).
 * Data, and the stream of a CLOSED event, are valid until the next call. Does not block. */
int kvp_grpc_next(struct kvp_grpc *g, struct kvp_grpc_event *ev);
/* kvp_grpc_next_parts is the same, but data of a message in several parts is NULL until kvp_grpc_flat puts
 * them together: who can use parts saves a copy. */
int kvp_grpc_next_parts(struct kvp_grpc *g, struct kvp_grpc_event *ev);
void kvp_grpc_flat(struct kvp_grpc *g, struct kvp_grpc_event *ev);

/* Between batch_begin and batch_end what is sent and finished may wait for more: messages of a stream then
 * leave in one write. It goes on its way at batch_end, or sooner when much is waiting. A batch is a few
 * events long and ends before the io thread sleeps; no kvp_grpc_delete within. */
void kvp_grpc_batch_begin(struct kvp_grpc *g);
void kvp_grpc_batch_end(struct kvp_grpc *g);

/* The user's pointer of a stream; NULL at OPEN. */
void kvp_grpc_set_ctx(struct kvp_grpc_stream *st, void *ctx);
void *kvp_grpc_ctx(const struct kvp_grpc_stream *st);

/* kvp_grpc_send queues a copy of one message; kvp_grpc_give queues memory from malloc without a copy and owns
 * it from then on, also on failure. KVP_ERR_CLOSED: stream over or already finished; the message is dropped.
 * KVP_ERR_SYS: no memory. Do not block. */
int kvp_grpc_send(struct kvp_grpc_stream *st, const void *data, size_t len);
int kvp_grpc_give(struct kvp_grpc_stream *st, void *mem, size_t len);
/* kvp_grpc_lend queues one message of three parts: head and tail are copied, the middle is used where it
 * stands: done(owner) is called once, on any thread, when it is no longer needed, also on failure. */
struct kvp_grpc_lent {
	const void *data;
	size_t len;
	void (*done)(void *owner);
	void *owner;
};
int kvp_grpc_lend(struct kvp_grpc_stream *st, struct iovec head, const struct kvp_grpc_lent *middle,
	struct iovec tail);
/* kvp_grpc_unsent: bytes of messages that are not in the core's hands yet. */
size_t kvp_grpc_unsent(struct kvp_grpc_stream *st);
/* kvp_grpc_finish ends the stream with a status behind all queued messages; text is copied (at most 1023
 * bytes; other than printable ASCII is encoded by the core). A second call, or one on a stream that is over,
 * does nothing. CLOSED follows. */
void kvp_grpc_finish(struct kvp_grpc_stream *st, enum kvp_grpc_status code, const char *text);
/* kvp_grpc_abort resets the stream at once; what is queued is dropped. CLOSED (CANCELLED) follows. */
void kvp_grpc_abort(struct kvp_grpc_stream *st);

/* kvp_grpc_drain stops listening and tells the peers of open connections to go elsewhere (GOAWAY); open
 * streams go on. DRAINED comes when the last one has ended. kvp_grpc_abort_all ends the open ones (after a
 * grace time, say). Drain before start, or a second drain: nothing more happens. */
void kvp_grpc_drain(struct kvp_grpc *g);
void kvp_grpc_abort_all(struct kvp_grpc *g);
/* kvp_grpc_delete ends everything, also without a drain; streams become invalid without events. NULL is fine.
 * Waits for the core's thread, which takes as long as the core needs to cancel (milliseconds). */
void kvp_grpc_delete(struct kvp_grpc *g);

/* kvp_grpc_stat may be called on any thread. */
void kvp_grpc_stat(const struct kvp_grpc *g, struct kvp_grpc_stat *out);
/* kvp_grpc_caps_connections: 1 when conn_max is enforced with the gRPC core that this process runs with. */
int kvp_grpc_caps_connections(void);
#endif
