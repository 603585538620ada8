/* ipc/loop.h - one thread's event loop: sockets, timers and watched descriptors on io_uring.
 *
 * Shape      one struct kvp_loop a thread. Sockets, listeners, timers and watches are structs embedded in the
 *            user's own; the loop keeps only a table of slots, so a completion of a closed object is
 *            recognised by slot and generation and never touches the user's memory.
 * Back ends  io_uring with a ring of provided receive buffers (kernel 5.19+); where that is refused (old
 *            kernel, container policy) epoll behind the same interface.
 * Truth      kernel; the loop caches the time of the turn.
 * Writers    the loop's thread. Only kvp_loop_stop may be called from a signal handler of that thread.
 * Readers    the same thread.
 * Ordering   callbacks run one after another, never from inside the call that asked for them (the two
 *            exceptions are named below). Everything that callbacks ask for is submitted once a turn.
 * Vanished   a host that goes without a word ends its connections all the same: every TCP connection,
 *            accepted or made, has keep-alive (KVP_LOOP_KEEP_*), so that one on which nobody waits for
 *            anything ends as by a reset (ETIMEDOUT). Bytes under way are the kernel's to repeat, a quarter
 *            of an hour; a listener may set less (kvp_listener_take_limit). Connections made have no such
 *            limit: a server that does not read yet is up to the time-outs of who asks it.
 * Lifetime   open to close; kvp_loop_close releases all descriptors and buffers of objects still open,
 *            without callbacks; the structs may be freed before or after.
 * Crash      process-local; the kernel closes everything.
 * Proved by  tests/t_loop.c (both back ends).
 */
#ifndef KVP_IPC_LOOP_H
#define KVP_IPC_LOOP_H

#include <stdint.h>
#include <sys/socket.h>

struct kvp_loop;
enum kvp_loop_backend { KVP_LOOP_AUTO, KVP_LOOP_URING, KVP_LOOP_EPOLL };
#define KVP_LOOP_FOREVER UINT64_MAX /* a deadline or time-out that never comes */
#define KVP_LOOP_RECV_BYTES 16384   /* most bytes one on_recv hands over */
#define KVP_LOOP_KEEP_IDLE_S 60	    /* silence after which the other host is asked whether it is there */
#define KVP_LOOP_KEEP_EVERY_S 15    /* between two such questions */
#define KVP_LOOP_KEEP_CNT 4	    /* questions without an answer that end the connection */

struct kvp_loop_stat {			/* all since open, except turn_max_ns */
	uint64_t turns, events, timers; /* turns; completions handled; timers fired */
	uint64_t accept_failed;		/* accept errors (EMFILE, ...): accepting pauses 100 ms after each */
	uint64_t recv_nobufs;		/* receives that found all buffers taken and were repeated */
	uint64_t turn_max_ns;		/* longest time from waking to sleeping since the last stat_take */
};

/* kvp_loop_open makes a loop. entries: submission queue size, 0 = 1024. KVP_ERR_SYS: errno says why. With
 * KVPICK_LOOP=epoll in the environment AUTO means epoll. open_backend is for tests. */
int kvp_loop_open(struct kvp_loop **out, uint32_t entries);
int kvp_loop_open_backend(struct kvp_loop **out, uint32_t entries, enum kvp_loop_backend be);
void kvp_loop_close(struct kvp_loop *l); /* NULL is fine; not from a callback */
enum kvp_loop_backend kvp_loop_backend_of(const struct kvp_loop *l);

/* kvp_loop_run_once submits, waits at most timeout_ns (0 = does not wait, KVP_LOOP_FOREVER) for the first
 * event or timer, and runs the callbacks that are due. Number of events and timers handled, or KVP_ERR_SYS.
 * kvp_loop_run repeats it until kvp_loop_stop: KVP_OK, or KVP_ERR_SYS. All on one thread, which need not be
 * the thread that opened. */
int kvp_loop_run_once(struct kvp_loop *l, uint64_t timeout_ns);
int kvp_loop_run(struct kvp_loop *l);
void kvp_loop_stop(struct kvp_loop *l);

/* kvp_loop_now_ns: CLOCK_MONOTONIC at the start of this turn. */
uint64_t kvp_loop_now_ns(const struct kvp_loop *l);
/* kvp_loop_stat_take copies the statistics and starts a new turn_max_ns (feed it to a LOOP_MAX_NS
 * counter). */
void kvp_loop_stat_take(struct kvp_loop *l, struct kvp_loop_stat *out);

/* kvp_loop_before_sleep: hook runs once a turn after all callbacks; nonzero = there is work, do not block
 * this turn. The place to announce "I sleep now, wake me" and to look once more at shared queues. NULL
 * removes it. */
void kvp_loop_before_sleep(struct kvp_loop *l, int (*hook)(void *ctx), void *ctx);

/* Deferred call: runs once at the end of this turn, before the next submission. Setting it twice is one
 * call. */
struct kvp_defer {
	struct kvp_loop *loop;
	struct kvp_defer *next, **prev; /* prev NULL = not set */
	void (*cb)(void *ctx);
	void *ctx;
};
void kvp_loop_defer(struct kvp_loop *l, struct kvp_defer *d, void (*cb)(void *ctx), void *ctx);
void kvp_loop_defer_cancel(struct kvp_defer *d); /* not set: nothing */

/* Timers. Zero the struct before first use. Set again = moved (to a later time at no cost). cb runs once, at
 * the first turn at or after deadline_ns (kvp_loop_now_ns clock); it may set the timer again. After cancel no
 * callback comes and the struct may be freed. */
struct kvp_timer {
	uint64_t deadline_ns; /* wanted */
	uint64_t key_ns;      /* place in the heap, never later than deadline_ns */
	uint32_t pos;	      /* 1 + index in the heap, 0 = not set */
	void (*cb)(void *ctx, struct kvp_timer *t);
	void *ctx;
};
int kvp_timer_set(struct kvp_loop *l, struct kvp_timer *t, uint64_t deadline_ns,
	void (*cb)(void *ctx, struct kvp_timer *t), void *ctx); /* KVP_OK, KVP_ERR_SYS: no memory */
void kvp_timer_cancel(struct kvp_loop *l, struct kvp_timer *t);

/* Watched descriptors (eventfd, signalfd, ZMQ's): cb runs while fd is readable (level-triggered: read it, or
 * it comes again; for ZMQ look at ZMQ_EVENTS until empty). The fd stays the caller's and must stay open until
 * unwatch; after unwatch no callback comes and the struct may be freed. */
struct kvp_watch {
	struct kvp_loop *loop; /* NULL = not watching */
	uint32_t slot;
	int fd;
	void (*cb)(void *ctx, int fd);
	void *ctx;
};
int kvp_loop_watch_fd(
	struct kvp_loop *l, struct kvp_watch *w, int fd, void (*cb)(void *ctx, int fd), void *ctx);
void kvp_loop_unwatch(struct kvp_watch *w); /* not watching: nothing */

/* Addresses: IPv4 and IPv6 literals ("::1" or "[::1]"), "*" or "" = any; a unix socket path (at most 107
 * bytes). KVP_ERR_INVAL for anything else; names are not resolved. */
struct kvp_addr {
	struct sockaddr_storage ss;
	socklen_t len;
};
int kvp_addr_ip(struct kvp_addr *a, const char *ip, uint16_t port);
int kvp_addr_unix(struct kvp_addr *a, const char *path);

/* Listeners. on_accept owns the new connected descriptor. Flags are or-ed. listen_fd takes over a listening
 * descriptor made elsewhere. listener_close with KVP_LISTENER_SERVE first hands over (from inside the call)
 * what already waits in the backlog. */
struct kvp_listener {
	struct kvp_loop *loop; /* NULL = closed */
	uint32_t slot;
	int fd;
	uint16_t port; /* the real one, also when 0 was asked for; 0 for unix */
	struct kvp_timer backoff;
	void (*on_accept)(void *ctx, int fd);
	void *ctx;
};
enum kvp_listen_flags { KVP_LISTEN_PLAIN = 0, KVP_LISTEN_REUSEPORT = 1 };
enum kvp_listener_end { KVP_LISTENER_DROP, KVP_LISTENER_SERVE };
int kvp_loop_listen(struct kvp_loop *l, struct kvp_listener *ls, const char *ip, uint16_t port, int flags,
	void (*on_accept)(void *ctx, int fd), void *ctx);
int kvp_loop_listen_addr(struct kvp_loop *l, struct kvp_listener *ls, const struct kvp_addr *a, int flags,
	void (*on_accept)(void *ctx, int fd), void *ctx);
int kvp_loop_listen_fd(
	struct kvp_loop *l, struct kvp_listener *ls, int fd, void (*on_accept)(void *ctx, int fd), void *ctx);
void kvp_listener_close(struct kvp_listener *ls, enum kvp_listener_end how); /* closed: nothing */
/* kvp_listener_take_limit: connections accepted from now on end (ETIMEDOUT) when the client's host takes none
 * of the bytes sent to it for ms, be it that it is gone or that nobody reads there. Not less than
 * KVP_LOOP_KEEP_IDLE_S + KVP_LOOP_KEEP_EVERY_S * KVP_LOOP_KEEP_CNT, so that keep-alive has its time; with
 * more, a silent host has so long, too. */
void kvp_listener_take_limit(struct kvp_listener *ls, uint64_t ms);

/* Connected stream sockets. Any callback may close the socket (and free the struct). */
struct kvp_sock;
enum kvp_sock_hup {
	KVP_SOCK_HUP = 1,  /* connection gone: reset, error, or closed in both directions */
	KVP_SOCK_RDHUP = 2 /* the peer sends no more (FIN), possibly behind bytes not yet received */
};
struct kvp_sock_ops {
	/* len > 0: bytes, valid during the call only; 0: end of stream; < 0: -errno. After 0 or an error
	 * receiving has stopped. */
	void (*on_recv)(void *ctx, struct kvp_sock *s, const char *data, int64_t len);
	/* The whole buffer is in the kernel's hands (err 0) or sending failed (-errno); buf is the caller's
	 * again. */
	void (*on_sent)(void *ctx, struct kvp_sock *s, char *buf, int err);
	void (*on_connect)(void *ctx, struct kvp_sock *s, int err); /* 0 or -errno */
	void (*on_hup)(void *ctx, struct kvp_sock *s, int hup);	    /* or-ed kvp_sock_hup, once a watch_hup */
};
struct kvp_sock {
	struct kvp_loop *loop; /* NULL = closed */
	const struct kvp_sock_ops *ops;
	void *ctx;
	uint32_t slot;
	int fd;
	uint64_t tx_bytes; /* bytes the kernel took so far: progress for stall timers */
};

/* kvp_sock_open adopts a connected descriptor; kvp_sock_connect makes one (on_connect reports). On failure
 * the descriptor given to open is closed. TCP sockets get TCP_NODELAY. */
int kvp_sock_open(struct kvp_loop *l, struct kvp_sock *s, int fd, const struct kvp_sock_ops *ops, void *ctx);
int kvp_sock_connect(struct kvp_loop *l, struct kvp_sock *s, const struct kvp_addr *a,
	const struct kvp_sock_ops *ops, void *ctx);
/* recv_start delivers on_recv until recv_stop, end or error. After recv_stop at most one more on_recv comes.
 * An idle receiving socket holds no buffer. */
void kvp_sock_recv_start(struct kvp_sock *s);
void kvp_sock_recv_stop(struct kvp_sock *s);
/* kvp_sock_send sends len >= 1 bytes at buf + off, partial writes continued. buf comes from malloc and
 * belongs to the loop until on_sent; if the socket is closed before, the loop frees it. One send at a time:
 * KVP_ERR_AGAIN (buf stays the caller's) while one runs. */
int kvp_sock_send(struct kvp_sock *s, char *buf, uint64_t off, uint64_t len);
/* kvp_sock_watch_hup reports a dead peer while nothing is received: RDHUP|HUP after recv_stop, HUP after the
 * end of stream was received. Replaces an earlier watch; 0 ends it. */
int kvp_sock_watch_hup(struct kvp_sock *s, int hup);
void kvp_sock_shutdown(struct kvp_sock *s); /* sends FIN; receiving goes on */
/* kvp_sock_close: no callback comes after it; the struct may be freed at once. Closed: nothing. */
void kvp_sock_close(struct kvp_sock *s);
/* kvp_sock_reset closes with a reset instead of a FIN. */
void kvp_sock_reset(struct kvp_sock *s);
#endif
