/* bench/load/grpc_client.c - a call has at most one receive, one send and one status operation under way. */
#include "bench/load/grpc_client.h"

#include <grpc/byte_buffer.h>
#include <grpc/byte_buffer_reader.h>
#include <grpc/grpc.h>
#include <grpc/grpc_security.h>
#include <grpc/slice.h>
#include <kvpick/err.h>
#include <stdlib.h>
#include <string.h>
#include "ipc/grpc_locks.h"

enum op { OP_RECV, OP_SEND, OP_STATUS };
struct tag {
	enum op op;
	struct kvp_gc_call *call;
};
struct message {
	struct message *next;
	grpc_byte_buffer *bb;
};
struct kvp_gc_call {
	struct kvp_gc_call *next, **prev; /* of all open calls */
	struct kvp_gc *c;
	grpc_call *call;
	void *ctx;
	struct tag recv, send, status;
	grpc_metadata_array initial, trailing;
	grpc_status_code code;
	grpc_slice text;
	char text_copy[1024];
	grpc_byte_buffer *recv_bb;
	struct message *out, **out_tail, *sending_msg;
	uint32_t ops; /* under way */
	int sending, initial_sent, half, half_sent, hold, reading, read_end, status_known;
};
struct kvp_gc {
	grpc_completion_queue *cq;
	grpc_channel *channel[64];
	uint32_t channel_cnt, turn;
	struct kvp_gc_call *open;
	struct kvp_gc_call *over; /* its STATUS was handed out: freed at the next call */
	grpc_slice data;	  /* of the last MESSAGE */
	int has_data;
};

static grpc_channel *new_channel(const struct kvp_gc_cfg *cfg)
{
	grpc_arg arg[] = {
		{.type = GRPC_ARG_INTEGER, .key = (char *)(uintptr_t)GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL},
		{.type = GRPC_ARG_INTEGER, .key = (char *)(uintptr_t)GRPC_ARG_MAX_RECEIVE_MESSAGE_LENGTH},
		{.type = GRPC_ARG_INTEGER, .key = (char *)(uintptr_t)GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS},
		{.type = GRPC_ARG_INTEGER, .key = (char *)(uintptr_t)GRPC_ARG_ENABLE_RETRIES},
		{.type = GRPC_ARG_STRING, .key = (char *)(uintptr_t)GRPC_SSL_TARGET_NAME_OVERRIDE_ARG}};
	arg[0].value.integer = 1;
	arg[1].value.integer = -1;
	arg[2].value.integer = 100;
	arg[3].value.integer = 0;
	arg[4].value.string = (char *)(uintptr_t) "localhost";
	grpc_channel_args args = {cfg->root_pem ? 5 : 4, arg};
	grpc_channel_credentials *creds =
		cfg->root_pem ? grpc_ssl_credentials_create(cfg->root_pem, NULL, NULL, NULL)
			      : grpc_insecure_credentials_create();
	grpc_channel *ch = grpc_channel_create(cfg->target, creds, &args);
	grpc_channel_credentials_release(creds);
	return ch;
}

int kvp_gc_open(struct kvp_gc **out, const struct kvp_gc_cfg *cfg)
{
	struct kvp_gc *c = calloc(1, sizeof(*c));
	if (!c)
		return KVP_ERR_SYS;
	kvp_grpc_locks_plain();
	grpc_init();
	c->cq = grpc_completion_queue_create_for_next(NULL);
	c->channel_cnt = cfg->conns && cfg->conns <= 64 ? cfg->conns : 1;
	for (uint32_t i = 0; i < c->channel_cnt; i++)
		c->channel[i] = new_channel(cfg);
	*out = c;
	return KVP_OK;
}

static void message_free(struct message *m)
{
	if (m)
		grpc_byte_buffer_destroy(m->bb);
	free(m);
}

static void call_free(struct kvp_gc_call *k)
{
	grpc_call_unref(k->call);
	grpc_metadata_array_destroy(&k->initial);
	grpc_metadata_array_destroy(&k->trailing);
	grpc_slice_unref(k->text);
	while (k->out) {
		struct message *m = k->out;
		k->out = m->next;
		message_free(m);
	}
	*k->prev = k->next;
	if (k->next)
		k->next->prev = k->prev;
	free(k);
}

static void drop_last(struct kvp_gc *c)
{
	if (c->has_data)
		grpc_slice_unref(c->data);
	c->has_data = 0;
	if (c->over)
		call_free(c->over);
	c->over = NULL;
}

void kvp_gc_close(struct kvp_gc *c)
{
	struct kvp_gc_event ev;
	if (!c)
		return;
	for (struct kvp_gc_call *k = c->open; k; k = k->next)
		kvp_gc_cancel(k);
	while (c->open) {
		kvp_gc_next(c, 1000, &ev);
		drop_last(c);
	}
	for (uint32_t i = 0; i < c->channel_cnt; i++)
		grpc_channel_destroy(c->channel[i]);
	grpc_completion_queue_shutdown(c->cq);
	while (grpc_completion_queue_next(c->cq, gpr_inf_future(GPR_CLOCK_MONOTONIC), NULL).type !=
		GRPC_QUEUE_SHUTDOWN)
		;
	grpc_completion_queue_destroy(c->cq);
	grpc_shutdown_blocking();
	free(c);
}

static void start(struct kvp_gc_call *k, const grpc_op *op, size_t cnt, struct tag *tag)
{
	k->ops++;
	KVP_ASSERT(grpc_call_start_batch(k->call, op, cnt, tag, NULL) == GRPC_CALL_OK);
}

static void start_recv(struct kvp_gc_call *k)
{
	grpc_op op = {.op = GRPC_OP_RECV_MESSAGE};
	if (k->reading || k->hold || k->read_end)
		return;
	op.data.recv_message.recv_message = &k->recv_bb;
	k->reading = 1;
	start(k, &op, 1, &k->recv);
}

static void start_send(struct kvp_gc_call *k)
{
	grpc_op op[3] = {0};
	size_t cnt = 0;
	if (k->sending)
		return;
	struct message *m = k->out;
	if (m) {
		k->out = m->next;
		if (!m->next)
			k->out_tail = &k->out;
	}
	if (!k->initial_sent)
		op[cnt++].op = GRPC_OP_SEND_INITIAL_METADATA;
	k->initial_sent = 1;
	if (m) {
		op[cnt].data.send_message.send_message = m->bb;
		op[cnt++].op = GRPC_OP_SEND_MESSAGE;
	}
	if (!k->out && k->half && !k->half_sent) {
		k->half_sent = 1;
		op[cnt++].op = GRPC_OP_SEND_CLOSE_FROM_CLIENT;
	}
	if (!cnt)
		return;
	k->sending_msg = m;
	k->sending = 1;
	start(k, op, cnt, &k->send);
}

struct kvp_gc_call *kvp_gc_call(struct kvp_gc *c, const char *method, uint32_t deadline_ms, void *ctx)
{
	struct kvp_gc_call *k = calloc(1, sizeof(*k));
	grpc_op op[2] = {{.op = GRPC_OP_RECV_STATUS_ON_CLIENT}, {.op = GRPC_OP_RECV_INITIAL_METADATA}};
	KVP_ASSERT(k);
	gpr_timespec end = gpr_inf_future(GPR_CLOCK_MONOTONIC);
	if (deadline_ms)
		end = gpr_time_add(
			gpr_now(GPR_CLOCK_MONOTONIC), gpr_time_from_millis(deadline_ms, GPR_TIMESPAN));
	grpc_slice path = grpc_slice_from_copied_string(method);
	k->c = c;
	k->ctx = ctx;
	k->call = grpc_channel_create_call(c->channel[c->turn++ % c->channel_cnt], NULL,
		GRPC_PROPAGATE_DEFAULTS, c->cq, path, NULL, end, NULL);
	grpc_slice_unref(path);
	k->recv = (struct tag){OP_RECV, k};
	k->send = (struct tag){OP_SEND, k};
	k->status = (struct tag){OP_STATUS, k};
	k->out_tail = &k->out;
	k->text = grpc_empty_slice();
	k->next = c->open;
	k->prev = &c->open;
	if (k->next)
		k->next->prev = &k->next;
	c->open = k;
	grpc_metadata_array_init(&k->initial);
	grpc_metadata_array_init(&k->trailing);
	op[0].data.recv_status_on_client.trailing_metadata = &k->trailing;
	op[0].data.recv_status_on_client.status = &k->code;
	op[0].data.recv_status_on_client.status_details = &k->text;
	op[1].data.recv_initial_metadata.recv_initial_metadata = &k->initial;
	start_send(k);
	start(k, op, 2, &k->status);
	start_recv(k);
	return k;
}

void *kvp_gc_ctx(const struct kvp_gc_call *k)
{
	return k->ctx;
}

void kvp_gc_send(struct kvp_gc_call *k, const void *data, size_t len)
{
	struct message *m = calloc(1, sizeof(*m));
	KVP_ASSERT(m);
	grpc_slice s = grpc_slice_from_copied_buffer(data, len);
	m->bb = grpc_raw_byte_buffer_create(&s, 1);
	grpc_slice_unref(s);
	*k->out_tail = m;
	k->out_tail = &m->next;
	start_send(k);
}

void kvp_gc_half_close(struct kvp_gc_call *k)
{
	k->half = 1;
	start_send(k);
}

void kvp_gc_cancel(struct kvp_gc_call *k)
{
	grpc_call_cancel(k->call, NULL);
}

void kvp_gc_read_hold(struct kvp_gc_call *k)
{
	k->hold = 1;
}

void kvp_gc_read_go(struct kvp_gc_call *k)
{
	k->hold = 0;
	start_recv(k);
}

static int on_recv(struct kvp_gc_call *k, struct kvp_gc_event *ev)
{
	grpc_byte_buffer_reader r;
	grpc_byte_buffer *bb = k->recv_bb;
	k->recv_bb = NULL;
	k->reading = 0;
	if (!bb) {
		k->read_end = 1;
		return 0;
	}
	KVP_ASSERT(grpc_byte_buffer_reader_init(&r, bb));
	k->c->data = grpc_byte_buffer_reader_readall(&r);
	k->c->has_data = 1;
	grpc_byte_buffer_reader_destroy(&r);
	grpc_byte_buffer_destroy(bb);
	start_recv(k);
	*ev = (struct kvp_gc_event){.kind = KVP_GC_MESSAGE, .call = k, .ctx = k->ctx};
	ev->data = GRPC_SLICE_START_PTR(k->c->data);
	ev->len = GRPC_SLICE_LENGTH(k->c->data);
	return 1;
}

/* STATUS is handed out when it is known and nothing else is under way, so after the last message. */
static int maybe_status(struct kvp_gc_call *k, struct kvp_gc_event *ev)
{
	if (k->ops || !k->status_known)
		return 0;
	size_t n = GRPC_SLICE_LENGTH(k->text) < sizeof(k->text_copy) ? GRPC_SLICE_LENGTH(k->text)
								     : sizeof(k->text_copy) - 1;
	memcpy(k->text_copy, GRPC_SLICE_START_PTR(k->text), n);
	k->text_copy[n] = 0;
	k->c->over = k;
	*ev = (struct kvp_gc_event){.kind = KVP_GC_STATUS,
		.call = k,
		.ctx = k->ctx,
		.status = (int)k->code,
		.text = k->text_copy};
	return 1;
}

int kvp_gc_next(struct kvp_gc *c, uint32_t timeout_ms, struct kvp_gc_event *ev)
{
	gpr_timespec end =
		gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC), gpr_time_from_millis(timeout_ms, GPR_TIMESPAN));
	drop_last(c);
	for (;;) {
		grpc_event e = grpc_completion_queue_next(c->cq, end, NULL);
		if (e.type != GRPC_OP_COMPLETE)
			return 0;
		const struct tag *tag = e.tag;
		struct kvp_gc_call *k = tag->call;
		k->ops--;
		switch (tag->op) {
		case OP_RECV:
			if (on_recv(k, ev))
				return 1;
			break;
		case OP_SEND:
			message_free(k->sending_msg);
			k->sending_msg = NULL;
			k->sending = 0;
			if (!k->status_known)
				start_send(k);
			break;
		case OP_STATUS:
			k->status_known = 1;
			k->hold = 0;
			start_recv(k);
			break;
		}
		if (maybe_status(k, ev))
			return 1;
	}
}
