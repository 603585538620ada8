/* ipc/grpc_stream.c - streams: the core's thread on one side, the io thread on the other.
 *
 * Three operations of a stream may be under way in the core at once: one receive, one send (messages and
 * status are sent one after another), and the notice of its end. Each holds a reference, the io thread one
 * from OPEN to CLOSED. The stream's mutex guards only our own lists; who sets reading or sending from 0 to 1
 * owns that operation and calls the core without the mutex. */
#include "ipc/grpc_priv.h"

#include <grpc/byte_buffer.h>
#include <grpc/support/alloc.h>
#include <kvpick/err.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define HALF_LOOKS 8   /* times that nothing came behind a half close, then it is believed */
#define HALF_OTHERS 64 /* completions after which it is believed anyway */
#define BURST_MAX 32   /* events of the core that the io thread hears of at once */
#define HELD_EVENTS 16 /* events handed out, or bytes, for which a send may wait */
#define HELD_BYTES 32768u

static const uint8_t no_bytes[1];

/* Listeners and streams hold the server; the core may call a listener down before the last stream's
 * operations are through. Who lets go last reports DRAINED. */
static void unhold(struct kvp_grpc *g)
{
	if (kvp_faa_ar_u64(&g->holds, (uint64_t)-1) == 1)
		kvp_grpc_push(g, &g->drained_node);
}

static void stream_unref(struct kvp_grpc_stream *st)
{
	struct kvp_grpc *g = st->g;
	grpc_call *call = st->call;
	if (kvp_faa_ar_u32(&st->refs, (uint32_t)-1) != 1)
		return;
	if (call)
		grpc_call_unref(call);
	grpc_metadata_array_destroy(&st->metadata);
	grpc_slice_unref(st->status_text);
	pthread_mutex_destroy(&st->mu);
	free(st);
	if (call) {
		kvp_grpc_count(&g->n.streams, (uint64_t)-1);
		unhold(g);
	}
}

static void out_free(struct kvp_grpc_out *o)
{
	while (o) {
		struct kvp_grpc_out *next = o->next;
		grpc_byte_buffer_destroy(o->bb);
		free(o);
		o = next;
	}
}

/* Any order of pushes and takes keeps the order of one pusher: the io thread reverses what it takes. The
 * descriptor is written when the list was empty, and cleared by the taker before its last look. */
static void push_list(struct kvp_grpc *g, struct kvp_grpc_node *newest, struct kvp_grpc_node *oldest)
{
	uint64_t head;
	do { /* pairs with: grpc_stream.c:take_all */
		head = kvp_ld_acq_u64(&g->pushed);
		oldest->next = (struct kvp_grpc_node *)(uintptr_t)head;
	} while (!kvp_cas_ar_u64(&g->pushed, head, (uint64_t)(uintptr_t)newest));
	const uint64_t one = 1;
	if (!head)
		while (write(g->event_fd, &one, sizeof(one)) < 0)
			; /* an eventfd's only failure here is an interruption */
}

void kvp_grpc_push(struct kvp_grpc *g, struct kvp_grpc_node *n)
{
	push_list(g, n, n);
}

/* The core's thread pushes what comes in one go together: one wake-up, and the answers can leave together. */
static void push_later(struct kvp_grpc *g, struct kvp_grpc_node *n)
{
	n->next = g->burst;
	if (!g->burst)
		g->burst_oldest = n;
	g->burst = n;
	g->burst_cnt++;
}

static void push_burst(struct kvp_grpc *g)
{
	if (g->burst)
		push_list(g, g->burst, g->burst_oldest);
	g->burst = NULL;
	g->burst_cnt = 0;
}

static struct kvp_grpc_node *take_all(struct kvp_grpc *g)
{
	/* pairs with: grpc_stream.c:kvp_grpc_push */
	struct kvp_grpc_node *n = (struct kvp_grpc_node *)(uintptr_t)kvp_xchg_ar_u64(&g->pushed, 0);
	struct kvp_grpc_node *oldest = NULL;
	while (n) {
		struct kvp_grpc_node *next = n->next;
		n->next = oldest;
		oldest = n;
		n = next;
	}
	return oldest;
}

static void start(struct kvp_grpc_stream *st, const grpc_op *op, size_t cnt, struct kvp_grpc_tag *tag)
{
	kvp_faa_ar_u32(&st->refs, 1);
	grpc_call_error e = grpc_call_start_batch(st->call, op, cnt, tag, NULL);
	KVP_ASSERT(e == GRPC_CALL_OK); /* anything else is a misuse of the core by this file */
}

static void start_recv(struct kvp_grpc_stream *st)
{
	grpc_op op = {.op = GRPC_OP_RECV_MESSAGE};
	op.data.recv_message.recv_message = &st->recv_bb;
	start(st, &op, 1, &st->tag_recv);
}

/* may_read decides, under the mutex, whether the caller has to start a receive; it then is the owner. */
static int may_read(struct kvp_grpc_stream *st)
{
	if (st->reading || st->read_end || st->closed)
		return 0;
	if (st->inbox_cnt >= KVP_GRPC_INBOX_MSG || st->inbox_bytes >= KVP_GRPC_INBOX_BYTES ||
		st->unsent_bytes > KVP_GRPC_OUTBOX_BYTES)
		return 0;
	st->reading = 1;
	return 1;
}

/* send_next starts the next message or the status. The caller owns sending and holds no mutex. */
static void send_next(struct kvp_grpc_stream *st)
{
	grpc_op op[3] = {0};
	size_t cnt = 0;
	pthread_mutex_lock(&st->mu);
	struct kvp_grpc_out *o = st->out;
	int status = 0;
	if (o) {
		st->out = o->next;
		if (!o->next)
			st->out_tail = &st->out;
		o->next = NULL;
	}
	status = !st->out && st->finishing && !st->status_given;
	if (st->closed || (!o && !status)) {
		st->sending = 0;
		pthread_mutex_unlock(&st->mu);
		out_free(o);
		return;
	}
	int more = st->out || status;
	st->status_given |= status;
	if (!st->initial_sent) {
		st->initial_sent = 1;
		op[cnt++].op = GRPC_OP_SEND_INITIAL_METADATA;
	}
	pthread_mutex_unlock(&st->mu);
	st->send_out = o;
	st->send_status = status;
	if (o) {
		op[cnt].data.send_message.send_message = o->bb;
		/* With the hint the core would not write initial metadata either, and report neither as
		 * done. */
		op[cnt].flags = more && !cnt ? GRPC_WRITE_BUFFER_HINT : 0;
		op[cnt++].op = GRPC_OP_SEND_MESSAGE;
	}
	if (status) {
		op[cnt].data.send_status_from_server.status = st->status;
		op[cnt].data.send_status_from_server.status_details = &st->status_text;
		op[cnt++].op = GRPC_OP_SEND_STATUS_FROM_SERVER;
	}
	start(st, op, cnt, &st->tag_send);
}

static void on_sent(struct kvp_grpc_stream *st, int success)
{
	struct kvp_grpc *g = st->g;
	struct kvp_grpc_out *o = st->send_out;
	size_t len = o ? o->len : 0;
	st->send_out = NULL;
	if (success && o) {
		kvp_grpc_count(&g->n.msg_sent, 1);
		kvp_grpc_count(&g->n.bytes_sent, len);
	}
	out_free(o);
	pthread_mutex_lock(&st->mu);
	st->unsent_bytes -= len;
	int read = may_read(st);
	pthread_mutex_unlock(&st->mu);
	if (read)
		start_recv(st);
	send_next(st);
}

static void queue_send(struct kvp_grpc_stream *st, struct kvp_grpc_out *o)
{
	*st->out_tail = o;
	st->out_tail = &o->next;
	st->unsent_bytes += o->len;
}

/* flush starts what waits, in the order in which the streams began to. */
static void flush(struct kvp_grpc *g)
{
	struct kvp_grpc_stream *st = g->held;
	g->held = NULL;
	g->held_tail = &g->held;
	g->held_events = 0;
	g->held_bytes = 0;
	while (st) {
		struct kvp_grpc_stream *next = st->next_held;
		send_next(st);
		stream_unref(st);
		st = next;
	}
}

/* send_first: the io thread has become the owner of the stream's sending. */
static void send_first(struct kvp_grpc_stream *st)
{
	struct kvp_grpc *g = st->g;
	if (!g->batch) {
		send_next(st);
		return;
	}
	kvp_faa_ar_u32(&st->refs, 1);
	st->next_held = NULL;
	*g->held_tail = st;
	g->held_tail = &st->next_held;
}

void kvp_grpc_batch_begin(struct kvp_grpc *g)
{
	g->batch = 1;
}

void kvp_grpc_batch_end(struct kvp_grpc *g)
{
	g->batch = 0;
	flush(g);
}

static int send_slices(struct kvp_grpc_stream *st, grpc_slice *slice, size_t cnt)
{
	struct kvp_grpc *g = st->g;
	struct kvp_grpc_out *o = calloc(1, sizeof(*o));
	if (o) {
		o->bb = grpc_raw_byte_buffer_create(slice, cnt);
		o->len = grpc_byte_buffer_length(o->bb);
	}
	for (size_t i = 0; i < cnt; i++)
		grpc_slice_unref(slice[i]);
	if (!o)
		return KVP_ERR_SYS;
	size_t len = o->len;
	pthread_mutex_lock(&st->mu);
	int over = st->closed || st->finishing, first = 0;
	if (!over) {
		queue_send(st, o);
		first = !st->sending;
		st->sending = 1;
	}
	pthread_mutex_unlock(&st->mu);
	if (over)
		out_free(o);
	if (first)
		send_first(st);
	g->held_bytes += len;
	if (g->batch && g->held_bytes >= HELD_BYTES)
		flush(g);
	return over ? KVP_ERR_CLOSED : KVP_OK;
}

int kvp_grpc_send(struct kvp_grpc_stream *st, const void *data, size_t len)
{
	grpc_slice one = grpc_slice_from_copied_buffer(data, len);
	return send_slices(st, &one, 1);
}

int kvp_grpc_give(struct kvp_grpc_stream *st, void *mem, size_t len)
{
	grpc_slice one = grpc_slice_new(mem, len, free);
	return send_slices(st, &one, 1);
}

int kvp_grpc_lend(
	struct kvp_grpc_stream *st, struct iovec head, const struct kvp_grpc_lent *middle, struct iovec tail)
{
	grpc_slice part[3] = {grpc_slice_from_copied_buffer(head.iov_base, head.iov_len),
		grpc_slice_new_with_user_data(
			(void *)(uintptr_t)middle->data, middle->len, middle->done, middle->owner),
		grpc_slice_from_copied_buffer(tail.iov_base, tail.iov_len)};
	return send_slices(st, part, 3);
}

size_t kvp_grpc_unsent(struct kvp_grpc_stream *st)
{
	pthread_mutex_lock(&st->mu);
	size_t n = st->unsent_bytes;
	pthread_mutex_unlock(&st->mu);
	return n;
}

void kvp_grpc_finish(struct kvp_grpc_stream *st, enum kvp_grpc_status code, const char *text)
{
	size_t len = strnlen(text, 1023);
	pthread_mutex_lock(&st->mu);
	int over = st->closed || st->finishing, first = 0;
	if (!over) {
		st->finishing = 1;
		st->status = (grpc_status_code)code;
		st->status_text = grpc_slice_from_copied_buffer(text, len);
		first = !st->sending;
		st->sending = 1;
	}
	pthread_mutex_unlock(&st->mu);
	if (first)
		send_first(st);
}

void kvp_grpc_abort(struct kvp_grpc_stream *st)
{
	grpc_call_cancel(st->call, NULL);
}

void kvp_grpc_set_ctx(struct kvp_grpc_stream *st, void *ctx)
{
	st->ctx = ctx;
}

void *kvp_grpc_ctx(const struct kvp_grpc_stream *st)
{
	return st->ctx;
}

/* The slices of a message are used where the core put them. */
static struct kvp_grpc_node *message_node(struct kvp_grpc_stream *st, grpc_byte_buffer *bb)
{
	grpc_slice_buffer *sb = &bb->data.raw.slice_buffer;
	struct kvp_grpc_node *n = malloc(sizeof(*n) + sb->count * sizeof(*n->part));
	if (!n)
		return NULL;
	*n = (struct kvp_grpc_node){.kind = KVP_GRPC_MESSAGE, .st = st, .bb = bb, .len = sb->length};
	n->part = (struct iovec *)(n + 1);
	for (size_t i = 0; i < sb->count; i++)
		if (GRPC_SLICE_LENGTH(sb->slices[i]))
			n->part[n->part_cnt++] = (struct iovec){
				GRPC_SLICE_START_PTR(sb->slices[i]), GRPC_SLICE_LENGTH(sb->slices[i])};
	return n;
}

static void on_message(struct kvp_grpc_stream *st, grpc_byte_buffer *bb)
{
	struct kvp_grpc *g = st->g;
	struct kvp_grpc_node *n = NULL;
	if (bb->type == GRPC_BB_RAW && bb->data.raw.compression == GRPC_COMPRESS_NONE)
		n = message_node(st, bb);
	else
		kvp_grpc_count(&g->n.msg_compressed, 1);
	if (!n) {
		grpc_byte_buffer_destroy(bb);
		grpc_call_cancel_with_status(
			st->call, GRPC_STATUS_UNIMPLEMENTED, "message can't be taken", NULL);
		return;
	}
	kvp_grpc_count(&g->n.msg_received, 1);
	kvp_grpc_count(&g->n.bytes_received, n->len);
	pthread_mutex_lock(&st->mu);
	st->inbox_cnt++;
	st->inbox_bytes += n->len;
	pthread_mutex_unlock(&st->mu);
	push_later(g, n);
	pthread_mutex_lock(&st->mu);
	st->reading = 0;
	int read = may_read(st);
	pthread_mutex_unlock(&st->mu);
	if (read)
		start_recv(st);
	else
		kvp_grpc_count(&g->n.read_paused, 1);
}

static void on_recv(struct kvp_grpc_stream *st, int success)
{
	grpc_byte_buffer *bb = st->recv_bb;
	st->recv_bb = NULL;
	pthread_mutex_lock(&st->mu);
	int closed = st->closed;
	st->read_end |= !bb || closed || st->faces == KVP_GRPC_SILENT;
	int ended = st->read_end;
	if (ended)
		st->reading = 0;
	pthread_mutex_unlock(&st->mu);
	if (bb && !ended) {
		on_message(st, bb);
		return;
	}
	if (bb)
		grpc_byte_buffer_destroy(bb);
	else if (success && !closed && st->faces == KVP_GRPC_VISIBLE) {
		kvp_faa_ar_u32(&st->refs, 1);
		st->next_half = st->g->halves;
		st->g->halves = st;
	}
}

/* A reset shows as the end of the messages too, followed by the notice of the stream's end. So a half close
 * is believed only when no completion waits behind it. */
static void report_halves(struct kvp_grpc *g)
{
	struct kvp_grpc_stream *st = g->halves;
	g->halves = NULL;
	while (st) {
		struct kvp_grpc_stream *next = st->next_half;
		if (!st->closed)
			push_later(g, &st->half);
		stream_unref(st);
		st = next;
	}
}

static void on_close(struct kvp_grpc_stream *st)
{
	struct kvp_grpc *g = st->g;
	pthread_mutex_lock(&st->mu);
	st->closed = 1;
	struct kvp_grpc_out *o = st->out;
	st->out = NULL;
	st->out_tail = &st->out;
	int finished = st->status_given && !st->cancelled;
	pthread_mutex_unlock(&st->mu);
	out_free(o);
	st->end = finished ? KVP_GRPC_END_FINISHED : KVP_GRPC_END_CANCELLED;
	if (st->faces == KVP_GRPC_SILENT)
		return;
	kvp_grpc_count(finished ? &g->n.stream_finished : &g->n.stream_cancelled, 1);
	push_later(g, &st->closed_node);
}

int kvp_grpc_accept(struct kvp_grpc_listener *l)
{
	struct kvp_grpc_stream *st = calloc(1, sizeof(*st));
	if (!st)
		return KVP_ERR_SYS;
	st->g = l->g;
	st->listener = l;
	st->refs = 1;
	st->out_tail = &st->out;
	st->status_text = grpc_empty_slice();
	st->tag_accept = (struct kvp_grpc_tag){KVP_GRPC_OP_ACCEPT, st};
	st->tag_recv = (struct kvp_grpc_tag){KVP_GRPC_OP_RECV, st};
	st->tag_send = (struct kvp_grpc_tag){KVP_GRPC_OP_SEND, st};
	st->tag_close = (struct kvp_grpc_tag){KVP_GRPC_OP_CLOSE, st};
	st->open = (struct kvp_grpc_node){.kind = KVP_GRPC_OPEN, .st = st};
	st->half = (struct kvp_grpc_node){.kind = KVP_GRPC_HALF_CLOSE, .st = st};
	st->closed_node = (struct kvp_grpc_node){.kind = KVP_GRPC_CLOSED, .st = st};
	pthread_mutex_init(&st->mu, NULL);
	grpc_metadata_array_init(&st->metadata);
	grpc_call_details_init(&st->details);
	grpc_call_error e = grpc_server_request_call(
		l->server, &st->call, &st->details, &st->metadata, l->g->cq, l->g->cq, &st->tag_accept);
	if (e == GRPC_CALL_OK)
		return KVP_OK;
	grpc_call_details_destroy(&st->details);
	stream_unref(st);
	return KVP_ERR_SYS;
}

static int method_of(const struct kvp_grpc_listener *l, grpc_slice path)
{
	for (uint32_t i = 0; i < l->g->cfg.method_cnt; i++)
		if (l->methods >> i & 1 && grpc_slice_str_cmp(path, l->g->cfg.method[i]) == 0)
			return (int)i;
	return -1;
}

/* A new stream. The reference that accepting held becomes the io thread's, or is dropped. */
static void on_accept(struct kvp_grpc_stream *st, int success)
{
	struct kvp_grpc *g = st->g;
	int method = success ? method_of(st->listener, st->details.method) : -1;
	grpc_call_details_destroy(&st->details);
	if (!success) { /* shutting down */
		stream_unref(st);
		return;
	}
	kvp_grpc_accept(st->listener);
	uint64_t streams = kvp_faa_rlx_u64(&g->n.streams, 1);
	kvp_faa_ar_u64(&g->holds, 1);
	int refused = method < 0 || streams >= g->cfg.stream_max;
	st->faces = refused ? KVP_GRPC_SILENT : KVP_GRPC_VISIBLE;
	st->method = (uint32_t)(method < 0 ? 0 : method);
	grpc_op op = {.op = GRPC_OP_RECV_CLOSE_ON_SERVER};
	op.data.recv_close_on_server.cancelled = &st->cancelled;
	if (!refused) {
		kvp_grpc_count(&g->n.stream_opened, 1);
		push_later(g, &st->open);
		st->reading = 1;
		start_recv(st);
		start(st, &op, 1, &st->tag_close);
		return;
	}
	kvp_grpc_count(method < 0 ? &g->n.stream_unknown : &g->n.stream_refused, 1);
	start(st, &op, 1, &st->tag_close);
	kvp_grpc_finish(st, method < 0 ? KVP_GRPC_UNIMPLEMENTED : KVP_GRPC_RESOURCE_EXHAUSTED,
		method < 0 ? "no such method here" : "too many streams");
	stream_unref(st);
}

void *kvp_grpc_core_thread(void *ctx)
{
	struct kvp_grpc *g = ctx;
	uint32_t since = 0, looks = 0;
	for (;;) {
		if (g->burst_cnt >= BURST_MAX)
			push_burst(g);
		gpr_timespec until = g->halves || g->burst ? gpr_time_0(GPR_CLOCK_MONOTONIC)
							   : gpr_inf_future(GPR_CLOCK_MONOTONIC);
		grpc_event ev = grpc_completion_queue_next(g->cq, until, NULL);
		if (ev.type != GRPC_OP_COMPLETE)
			push_burst(g);
		if (ev.type == GRPC_QUEUE_TIMEOUT && g->halves && ++looks < HALF_LOOKS) {
			sched_yield();
			continue;
		}
		if (ev.type != GRPC_OP_COMPLETE || ++since == HALF_OTHERS) {
			report_halves(g);
			since = looks = 0;
		}
		if (ev.type == GRPC_QUEUE_SHUTDOWN)
			return NULL;
		if (ev.type == GRPC_QUEUE_TIMEOUT)
			continue;
		const struct kvp_grpc_tag *tag = ev.tag;
		struct kvp_grpc_stream *st = tag->owner;
		switch (tag->op) {
		case KVP_GRPC_OP_DOWN:
			unhold(g);
			continue;
		case KVP_GRPC_OP_ACCEPT:
			on_accept(st, ev.success);
			continue;
		case KVP_GRPC_OP_RECV:
			on_recv(st, ev.success);
			break;
		case KVP_GRPC_OP_SEND:
			on_sent(st, ev.success);
			break;
		case KVP_GRPC_OP_CLOSE:
			on_close(st);
			break;
		}
		stream_unref(st);
	}
}

/* The io thread is through with an event: a message makes room in its stream, CLOSED ends the io thread's
 * hold. */
static void release(struct kvp_grpc_node *n)
{
	struct kvp_grpc_stream *st = n->st;
	if (n->kind != KVP_GRPC_MESSAGE) {
		if (n->kind == KVP_GRPC_CLOSED)
			stream_unref(st); /* n is part of it */
		return;
	}
	pthread_mutex_lock(&st->mu);
	st->inbox_cnt--;
	st->inbox_bytes -= n->len;
	int read = may_read(st);
	pthread_mutex_unlock(&st->mu);
	if (read)
		start_recv(st);
	gpr_free(n->flat);
	grpc_byte_buffer_destroy(n->bb);
	free(n);
}

int kvp_grpc_next_parts(struct kvp_grpc *g, struct kvp_grpc_event *ev)
{
	if (g->in_use)
		release(g->in_use);
	g->in_use = NULL;
	if (g->held && ++g->held_events > HELD_EVENTS)
		flush(g);
	if (!g->taken)
		g->taken = take_all(g);
	if (!g->taken) {
		uint64_t drop;
		if (read(g->event_fd, &drop, sizeof(drop)) == (ssize_t)sizeof(drop))
			g->taken = take_all(g);
		if (!g->taken)
			return 0;
	}
	struct kvp_grpc_node *n = g->taken;
	g->taken = n->next;
	g->in_use = n;
	if (n->kind == KVP_GRPC_DRAINED)
		g->drained = 1;
	*ev = (struct kvp_grpc_event){.kind = n->kind, .stream = n->st, .data = no_bytes};
	if (n->st) {
		ev->end = n->st->end;
		ev->method = n->st->method;
		ev->listener = n->st->listener->idx;
	}
	if (n->kind == KVP_GRPC_MESSAGE) {
		ev->len = n->len;
		ev->part = n->part;
		ev->part_cnt = n->part_cnt;
		if (n->part_cnt)
			ev->data = n->part_cnt == 1 ? n->part[0].iov_base : NULL;
	}
	return 1;
}

void kvp_grpc_flat(struct kvp_grpc *g, struct kvp_grpc_event *ev)
{
	if (ev->data)
		return;
	struct kvp_grpc_node *n = g->in_use;
	uint8_t *at = n->flat = gpr_malloc(n->len);
	ev->data = at;
	for (uint32_t i = 0; i < n->part_cnt; at += n->part[i++].iov_len)
		memcpy(at, n->part[i].iov_base, n->part[i].iov_len);
}

int kvp_grpc_next(struct kvp_grpc *g, struct kvp_grpc_event *ev)
{
	if (!kvp_grpc_next_parts(g, ev))
		return 0;
	kvp_grpc_flat(g, ev);
	return 1;
}
