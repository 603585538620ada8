/* ipc/loop_priv.h - what loop.c, loop_net.c and the two back ends share.
 *
 * Shape      a table of slots; a slot is one socket, listener or watch. A completion carries slot index,
 *            generation and operation; owner is NULL from close on, and the slot is reused only after the
 *            last operation in flight has reported.
 * Truth      loop thread only. Crash: process-local.
 */
#ifndef KVP_IPC_LOOP_PRIV_H
#define KVP_IPC_LOOP_PRIV_H

#include <liburing.h>
#include <kvpick/err.h>
#include "ipc/loop.h"

enum loop_op { LOOP_OP_NONE, LOOP_OP_RECV, LOOP_OP_SEND, LOOP_OP_CONNECT, LOOP_OP_ACCEPT, LOOP_OP_POLL };
enum loop_kind { LOOP_KIND_FREE, LOOP_KIND_SOCK, LOOP_KIND_LISTENER, LOOP_KIND_WATCH };
#define LOOP_SLOT_MAX (1u << 28)
#define LOOP_BUF_CNT 128u /* provided receive buffers, a power of two */
#define LOOP_BACKOFF_NS 100000000u

struct loop_slot {
	void *owner; /* kvp_sock, kvp_listener or kvp_watch; NULL once closed */
	uint32_t gen, idx, next_free;
	uint8_t kind;
	uint8_t flying;	 /* bit 1 << loop_op: in the kernel (epoll: wanted) */
	uint8_t recv_on; /* receiving wanted */
	uint8_t hup;	 /* or-ed kvp_sock_hup watched */
	int fd;
	uint32_t ep_events; /* registered with epoll, EP_NONE = not */
	int conn_err;	    /* epoll: immediate result of connect, -errno */
	char *send_buf;
	uint64_t send_off, send_end;
	struct kvp_addr *addr; /* of a connect in flight */
};
#define EP_NONE UINT32_MAX

struct loop_backend {
	int (*open)(struct kvp_loop *l, uint32_t entries);
	void (*close)(struct kvp_loop *l);
	/* wait sends off what was asked for, waits, handles events; number of them or KVP_ERR_SYS. */
	int (*wait)(struct kvp_loop *l, uint64_t timeout_ns);
	void (*arm)(struct kvp_loop *l, struct loop_slot *sl, enum loop_op op);
	void (*recv_stop)(struct kvp_loop *l, struct loop_slot *sl);
	int (*hup)(struct kvp_loop *l, struct loop_slot *sl);
	/* drop ends all operations of a slot and (close_fd) closes its descriptor; frees the slot when it
	 * can. */
	void (*drop)(struct kvp_loop *l, struct loop_slot *sl, enum loop_kind kind);
	/* take hands over connections that were accepted but not reported yet. */
	void (*take)(struct kvp_loop *l, struct loop_slot *sl);
};
extern const struct loop_backend kvp_loop_be_uring, kvp_loop_be_epoll;

struct kvp_loop {
	const struct loop_backend *be;
	struct loop_slot **slot;
	uint32_t slot_cnt, slot_cap, slot_free; /* slot_free: index + 1 */
	uint32_t flying;			/* operations in the kernel, all slots */
	uint64_t now_ns, wake_ns;
	struct kvp_timer **heap;
	uint32_t heap_cnt, heap_cap;
	struct kvp_defer *defer, **defer_tail;
	int (*sleep_hook)(void *ctx);
	void *sleep_ctx;
	volatile int stop;
	struct kvp_loop_stat stat;
	/* io_uring */
	struct io_uring ring;
	struct io_uring_buf_ring *br;
	char *bufs; /* receive buffers; epoll uses the first */
	uint8_t enabled, multishot;
	struct kvp_watch ep_watch; /* the hang-up epoll set, watched by the ring */
	/* epoll */
	int epfd;	    /* -1 = not made */
	uint64_t *try_list; /* slots with a send or connect result to look at before waiting */
	uint32_t try_cnt, try_cap;
};

static inline uint64_t loop_key(const struct loop_slot *sl, enum loop_op op)
{
	return (uint64_t)sl->gen << 32 | (uint64_t)sl->idx << 4 | op;
}
/* loop_slot_at: slot of a key if it is still that generation, else NULL. */
struct loop_slot *kvp_loop_slot_at(struct kvp_loop *l, uint64_t key);
struct loop_slot *kvp_loop_slot_new(struct kvp_loop *l, enum loop_kind kind, void *owner, int fd);
void kvp_loop_slot_put(struct kvp_loop *l, struct loop_slot *sl); /* back to the free list */
uint64_t kvp_loop_clock_ns(void);
/* Events common to both back ends. */
void kvp_loop_ev_accept(struct kvp_loop *l, struct loop_slot *sl, int fd);
/* accepting pauses; KVP_OK: the back end's arm is called when it may go on. */
int kvp_loop_ev_accept_failed(struct kvp_loop *l, struct loop_slot *sl);
void kvp_loop_ev_sent(struct kvp_loop *l, struct loop_slot *sl, int err);
void kvp_loop_ev_connect(struct kvp_loop *l, struct loop_slot *sl, int err);
void kvp_loop_ev_recv(struct loop_slot *sl, const char *data, int64_t len);
/* epoll set: interest of a slot as its state says; events of a slot. */
int kvp_loop_ep_update(struct kvp_loop *l, struct loop_slot *sl, uint32_t events);
void kvp_loop_ep_hup(struct kvp_loop *l, struct loop_slot *sl, uint32_t events);
#endif
